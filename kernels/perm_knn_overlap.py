r"""Shared neighbours of two k-nearest-neighbour lists under many permutations of one side.

    out_b = sum_i | N_X(i) ∩ perm_b^-1( N_Y(perm_b(i)) ) |

The lists are made once; a permutation only renames one side. Integers, exact.

Bytes moved, lists of k int32 for n points, B permutations: eager comparison writes and reads
B n k^2 truth values; fused, a program loads the permutation at its points, their lists of Y, the
inverse permutation at those neighbours, and their lists of X once for every 16 neighbours of Y:
B n (4 + 8 k + 4 k ceil(k / 16)) bytes, and writes one sum. All gathers are 4 bytes wide and served
by L2, whose request rate is the limit.

Source: the mutual k-nearest-neighbour score of "Revisiting the Platonic Representation
Hypothesis: An Aristotelian View". The kernel is ours.
"""

import torch

from icmllab.kernels.runtime import (
    cdiv,
    check_dtype,
    check_indices,
    check_permutations,
    check_same_device,
    jit,
    on_device,
    output,
    runs_triton,
    tl,
)

POINTS = 64
SLOTS = 16

# the CPU compares this many neighbours at a time, a few MB of indices
_COMPARED = 1 << 18


@jit
def perm_knn_overlap_kernel(
    x_ptr,
    y_ptr,
    perms_ptr,
    inverse_ptr,
    partials_ptr,
    n,
    n_tiles,
    k,
    POINTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Shared neighbours of POINTS points under one permutation; grid (perms, point tiles)."""
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    points = tile * POINTS + tl.arange(0, POINTS)
    point_in = points < n
    ours_at = x_ptr + points.to(tl.int64) * k
    image = tl.load(perms_ptr + b * n + points, mask=point_in, other=0)
    theirs_at = y_ptr + image.to(tl.int64)[:, None] * k
    count = tl.zeros((POINTS,), dtype=tl.int32)
    # pieces of SLOTS neighbours, so that registers suffice whatever k is
    for start in range(0, k, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        inside = point_in[:, None] & (slots < k)[None, :]
        theirs = tl.load(theirs_at + slots[None, :], mask=inside, other=0)
        # back to the names of X; -1 is no point
        theirs = tl.load(inverse_ptr + b * n + theirs, mask=inside, other=-1)
        for slot in range(k):
            ours = tl.load(ours_at + slot, mask=point_in, other=-2)
            count += tl.sum((theirs == ours[:, None]).to(tl.int32), axis=1)
    tl.store(partials_ptr + b * n_tiles + tile, tl.sum(count, axis=0))


def launch(idx_x: torch.Tensor, idx_y: torch.Tensor, perms: torch.Tensor) -> torch.Tensor:
    """Run the Triton kernel on checked inputs, wherever they are."""
    n, k = idx_x.shape
    tiles = cdiv(n, POINTS)
    partials = output(len(perms), tiles, dtype=torch.int32, device=idx_x.device)
    with on_device(idx_x):
        perm_knn_overlap_kernel[(len(perms), tiles)](
            idx_x.to(torch.int32).contiguous(),
            idx_y.to(torch.int32).contiguous(),
            perms.to(torch.int32).contiguous(),
            inverse(perms).to(torch.int32),
            partials,
            n,
            tiles,
            k,
            POINTS=POINTS,
            SLOTS=SLOTS,
            num_warps=4,
        )
    return partials.sum(dim=1, dtype=torch.int64)


def inverse(perms: torch.Tensor) -> torch.Tensor:
    """The inverse of each row: (B, n) int64."""
    places = torch.arange(perms.shape[1], device=perms.device).expand(perms.shape)
    return torch.empty_like(places).scatter_(1, perms.long(), places)


def reference(idx_x: torch.Tensor, idx_y: torch.Tensor, perms: torch.Tensor) -> torch.Tensor:
    """The same counts in plain PyTorch, looked up in the 0/1 mask of X's neighbours."""
    n, k = idx_x.shape
    mask = torch.zeros(n, n, dtype=torch.bool, device=idx_x.device)
    mask = mask.scatter_(1, idx_x.long(), True).flatten()
    theirs, perms = idx_y.long(), perms.long()
    rows = n * torch.arange(n, device=idx_x.device)[:, None]
    out = torch.empty(len(perms), dtype=torch.int64, device=idx_x.device)
    chunk = max(1, _COMPARED // (n * k))
    for start in range(0, len(perms), chunk):
        part = perms[start : start + chunk]
        images = theirs[part].flatten(1)  # (chunk, n * k), the names of Y
        names = inverse(part).gather(1, images).view(-1, n, k)
        out[start : start + chunk] = mask.take(rows + names).sum(dim=(1, 2))
    return out


def perm_knn_overlap(idx_x: torch.Tensor, idx_y: torch.Tensor, perms: torch.Tensor) -> torch.Tensor:
    """How many neighbours two lists share in all, for each permutation of the second side.

    Args:
        idx_x: (n, k) int32 or int64, n, k >= 1: the k neighbours of each point, in 0..n-1,
            without repetition in a row; any strides.
        idx_y: (n, k), the same for the other side.
        perms: (B, n) int32 or int64, each row a permutation of 0..n-1. Entries are checked on
            the CPU alone: on a GPU the host would have to wait.

    Returns:
        (B,) int64, each in 0..n*k. Divided by n*k it is the mutual k-nearest-neighbour score.

    Raises:
        ValueError: shapes, dtypes, devices or entries that do not fit.
    """
    if idx_x.ndim != 2 or idx_x.numel() == 0:
        raise ValueError(f"idx_x must be (n, k) with n, k >= 1: got shape {tuple(idx_x.shape)}")
    if idx_y.shape != idx_x.shape:
        raise ValueError(
            f"idx_y must have the shape of idx_x, {tuple(idx_x.shape)}: got {tuple(idx_y.shape)}"
        )
    check_same_device(idx_x=idx_x, idx_y=idx_y, perms=perms)
    for name, index in (("idx_x", idx_x), ("idx_y", idx_y)):
        check_dtype(name, index, (torch.int32, torch.int64))
        check_indices(name, index, len(idx_x))
    check_permutations("perms", perms, len(idx_x))
    if len(perms) == 0:
        return torch.empty(0, dtype=torch.int64, device=idx_x.device)
    run = launch if runs_triton(idx_x, idx_y, perms) else reference
    return run(idx_x, idx_y, perms)
