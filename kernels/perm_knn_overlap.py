r"""Shared neighbours of two k-nearest-neighbour lists under many permutations of one side.

    out_b = sum_i | N_X(i) ∩ perm_b^-1( N_Y(perm_b(i)) ) |

The lists are made once; a permutation only renames one side. Integers, exact.

Bytes moved, lists of k int32 for n points, B permutations: eager comparison of (B, n, k, k)
writes and reads B n k^2 bytes of truth values; fused, each program loads the two lists of its
points, their images, and the inverse permutation at the neighbours: B n (8 k + 4 + 4 k + 4/T')
bytes with T' points a program, and nothing else. The gathers are served by L2.
"""

import torch

from icmllab.kernels.runtime import cdiv, check_dtype, jit, output, runs_triton, tl

POINTS = 64


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
    K_BLOCK: tl.constexpr,
):
    """Shared neighbours of POINTS points under one permutation; grid (perms, point tiles)."""
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    points = tile * POINTS + tl.arange(0, POINTS)
    slots = tl.arange(0, K_BLOCK)
    point_in = points < n
    inside = point_in[:, None] & (slots < k)[None, :]
    image = tl.load(perms_ptr + b * n + points, mask=point_in, other=0)
    y_at = image.to(tl.int64)[:, None] * k + slots[None, :]
    theirs = tl.load(y_ptr + y_at, mask=inside, other=0)
    # back to the names of X; -1 is no point
    theirs = tl.load(inverse_ptr + b * n + theirs, mask=inside, other=-1)
    count = tl.zeros((POINTS,), dtype=tl.int32)
    for slot in range(k):
        ours = tl.load(x_ptr + points.to(tl.int64) * k + slot, mask=point_in, other=-2)
        count += tl.sum((theirs == ours[:, None]).to(tl.int32), axis=1)
    tl.store(partials_ptr + b * n_tiles + tile, tl.sum(count, axis=0))


def launch(idx_x: torch.Tensor, idx_y: torch.Tensor, perms: torch.Tensor) -> torch.Tensor:
    """Run the Triton kernel on checked inputs, wherever they are."""
    n, k = idx_x.shape
    tiles = cdiv(n, POINTS)
    partials = output(len(perms), tiles, dtype=torch.int32, device=idx_x.device)
    perm_knn_overlap_kernel[(len(perms), tiles)](
        idx_x.to(torch.int32).contiguous(),
        idx_y.to(torch.int32).contiguous(),
        perms.to(torch.int32).contiguous(),
        torch.argsort(perms, dim=1).to(torch.int32),
        partials,
        n,
        tiles,
        k,
        POINTS=POINTS,
        K_BLOCK=1 << max(0, (k - 1).bit_length()),
        num_warps=4,
    )
    return partials.sum(dim=1, dtype=torch.int64)


def reference(idx_x: torch.Tensor, idx_y: torch.Tensor, perms: torch.Tensor) -> torch.Tensor:
    """The same counts in plain PyTorch, through one 0/1 neighbour mask."""
    n, _ = idx_x.shape
    mask = torch.zeros(n, n, dtype=torch.bool, device=idx_x.device)
    mask.scatter_(1, idx_x.long(), True)
    rows = torch.arange(n, device=idx_x.device)[:, None]
    out = torch.empty(len(perms), dtype=torch.int64, device=idx_x.device)
    for b, perm in enumerate(perms.long()):
        inverse = torch.empty_like(perm)
        inverse[perm] = rows[:, 0]
        out[b] = mask[rows, inverse[idx_y.long()[perm]]].sum()
    return out


def perm_knn_overlap(idx_x: torch.Tensor, idx_y: torch.Tensor, perms: torch.Tensor) -> torch.Tensor:
    """How many neighbours two lists share in all, for each permutation of the second side.

    Args:
        idx_x: (n, k) integers, the k neighbours of each point, without repetition.
        idx_y: (n, k), the same for the other side.
        perms: (B, n) int32 or int64, each row a permutation of 0..n-1 (not checked here).

    Returns:
        (B,) int64, each in 0..n*k. Divided by n*k it is the mutual k-nearest-neighbour score.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if idx_x.ndim != 2 or idx_x.numel() == 0:
        raise ValueError(f"idx_x must be (n, k) with n, k >= 1: got shape {tuple(idx_x.shape)}")
    if idx_y.shape != idx_x.shape:
        raise ValueError(
            f"idx_y must have the shape of idx_x: got {tuple(idx_y.shape)}, {tuple(idx_x.shape)}"
        )
    if perms.ndim != 2 or perms.shape[1] != idx_x.shape[0]:
        raise ValueError(f"perms must be (B, {idx_x.shape[0]}): got shape {tuple(perms.shape)}")
    for name, tensor in (("idx_x", idx_x), ("idx_y", idx_y), ("perms", perms)):
        check_dtype(name, tensor, (torch.int32, torch.int64))
    if not idx_x.device == idx_y.device == perms.device:
        raise ValueError(
            f"idx_x, idx_y, perms must share a device: {idx_x.device}, {idx_y.device}, "
            f"{perms.device}"
        )
    if len(perms) == 0:
        return torch.empty(0, dtype=torch.int64, device=idx_x.device)
    run = launch if runs_triton(idx_x, idx_y, perms) else reference
    return run(idx_x, idx_y, perms)
