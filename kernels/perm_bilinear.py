r"""Bilinear forms of two square matrices under many permutations of one of them.

    out_b = sum_ij K[i, j] * L[perm_b(i), perm_b(j)]

This is the null distribution of every similarity that is an inner product of Gram matrices or of
neighbour masks: the matrices are prepared once, and only the pairing of their rows changes.

Bytes moved for n x n matrices of s bytes an entry, B permutations, tiles of T:

| | eager: gather, multiply, sum | fused |
|---|---|---|
| (B, n, n) written and read again | 4 B n^2 s | none |
| reads of L | B n^2 s | B n^2 s |
| reads of K | B n^2 s | B n^2 s / P |
| permutations | small | 8 B n^2 / T |
| partial sums | none | B s (n / T)^2 |

P permutations share one program, so that a tile of K is loaded once for all of them. While K and
L fit into the L2 cache, HBM sees 2 n^2 s + 4 B n bytes. For symmetric K and L only the tiles on
and above the diagonal are visited, which halves the work.

What limits it is the rate at which L2 serves the gathered tile of L: its rows lie in scattered
order, and the entries of a row are scattered inside n s contiguous bytes. Gathers cannot be
vector loads; the tile of K, which is padded with zeros to whole tiles, is read with 128-bit loads.

Source: the permutation null of "Revisiting the Platonic Representation Hypothesis: An Aristotelian
View". The kernel is ours.
"""

import torch

from icmllab.kernels.runtime import (
    cdiv,
    check_dtype,
    check_permutations,
    check_same_device,
    jit,
    on_device,
    output,
    runs_triton,
    tl,
)

TILE = 64
PERMS_PER_PROGRAM = 4
DTYPES = (torch.float32, torch.float64)

# the CPU gathers this many entries at a time: 2 MB of float64, which a core's cache holds
_GATHERED = 1 << 18


@jit
def perm_bilinear_kernel(
    k_ptr,
    l_ptr,
    perms_ptr,
    pairs_ptr,
    partials_ptr,
    n,
    n_perms,
    n_pairs,
    k_row,
    l_row,
    SYMMETRIC: tl.constexpr,
    TILE: tl.constexpr,
    PERMS: tl.constexpr,
):
    """Partial sums of PERMS permutations over one tile; grid (perm groups * tile pairs,)."""
    # one axis, because the others end at 65535 programs, which n = 16384 would exceed
    program = tl.program_id(0)
    group = program // n_pairs
    pair = program % n_pairs
    tile_i = tl.load(pairs_ptr + 2 * pair)
    tile_j = tl.load(pairs_ptr + 2 * pair + 1)
    rows = tile_i * TILE + tl.arange(0, TILE)
    cols = tile_j * TILE + tl.arange(0, TILE)
    row_in = rows < n
    col_in = cols < n
    inside = row_in[:, None] & col_in[None, :]
    # K is padded with zeros to whole tiles: no mask, so that its loads are vectors for every n
    k = tl.load(k_ptr + rows.to(tl.int64)[:, None] * k_row + cols[None, :])
    if SYMMETRIC:
        # a tile above the diagonal stands for its mirror image too
        k = tl.where(tile_i == tile_j, k, 2 * k)
    for step in tl.static_range(PERMS):
        b = group * PERMS + step
        if b < n_perms:
            at = perms_ptr + b.to(tl.int64) * n
            row_to = tl.load(at + rows, mask=row_in, other=0).to(tl.int64)
            col_to = tl.load(at + cols, mask=col_in, other=0)
            l_at = row_to[:, None] * l_row + col_to[None, :]
            gathered = tl.load(l_ptr + l_at, mask=inside, other=0.0)
            total = tl.sum(tl.sum(k * gathered, axis=1), axis=0)
            tl.store(partials_ptr + b.to(tl.int64) * n_pairs + pair, total)


def tile_pairs(n: int, *, symmetric: bool, device: torch.device) -> torch.Tensor:
    """The tiles to visit: (n_pairs, 2) int32, the upper triangle alone when symmetric."""
    tiles = cdiv(n, TILE)
    if symmetric:
        pairs = torch.triu_indices(tiles, tiles, device=device)
    else:
        index = torch.arange(tiles, device=device)
        pairs = torch.stack(torch.meshgrid(index, index, indexing="ij")).flatten(1)
    return pairs.T.to(torch.int32).contiguous()


def launch(
    K: torch.Tensor, L: torch.Tensor, perms: torch.Tensor, *, symmetric: bool = False
) -> torch.Tensor:
    """Run the Triton kernel on checked inputs, wherever they are."""
    n, n_perms = K.shape[0], perms.shape[0]
    # copies cost nothing beside B passes over the matrices
    pad = -n % TILE
    if pad:
        K = torch.nn.functional.pad(K, (0, pad, 0, pad))
    K, L = (m if m.stride(1) == 1 else m.contiguous() for m in (K, L))
    pairs = tile_pairs(n, symmetric=symmetric, device=K.device)
    partials = output(n_perms, len(pairs), dtype=K.dtype, device=K.device)
    grid = (cdiv(n_perms, PERMS_PER_PROGRAM) * len(pairs),)
    with on_device(K):
        perm_bilinear_kernel[grid](
            K,
            L,
            perms.to(torch.int32).contiguous(),
            pairs,
            partials,
            n,
            n_perms,
            len(pairs),
            K.stride(0),
            L.stride(0),
            SYMMETRIC=symmetric,
            TILE=TILE,
            PERMS=PERMS_PER_PROGRAM,
            num_warps=4,
        )
    return partials.sum(dim=1, dtype=torch.float64)


def reference(
    K: torch.Tensor, L: torch.Tensor, perms: torch.Tensor, *, symmetric: bool = False
) -> torch.Tensor:
    """The same sums in plain PyTorch, products and sums in float64: the truth.

    ``symmetric`` is accepted and not used: gathering half of the entries one by one was measured
    at five times the cost of gathering whole rows, then whole columns (0.39 against 0.08 ms at
    n = 256).
    """
    n = K.shape[0]
    k, wide, perms = K.double().flatten(), L.double(), perms.long()
    out = torch.empty(len(perms), dtype=torch.float64, device=K.device)
    chunk = max(1, _GATHERED // n**2)
    for start in range(0, len(perms), chunk):
        part = perms[start : start + chunk]
        rows = wide.index_select(0, part.flatten()).view(len(part), n, n)
        both = rows.gather(2, part[:, None, :].expand(-1, n, n))
        out[start : start + chunk] = both.flatten(1) @ k
    return out


def perm_bilinear(
    K: torch.Tensor, L: torch.Tensor, perms: torch.Tensor, *, symmetric: bool = False
) -> torch.Tensor:
    """Sum of K[i, j] * L[perm(i), perm(j)] over i and j, for each permutation.

    Args:
        K: (n, n) float32 or float64, n >= 1, any strides.
        L: (n, n), dtype and device of ``K``, any strides.
        perms: (B, n) int32 or int64, each row a permutation of 0..n-1, which is checked on the
            CPU alone: on a GPU the host would have to wait.
        symmetric: promise that K and L are symmetric; half of the tiles are then enough.

    Returns:
        (B,) float64. On a GPU a tile is summed in the dtype of ``K``, the tiles in float64; the
        CPU sums in float64 throughout.

    Raises:
        ValueError: shapes, dtypes, devices or entries that do not fit.
    """
    if K.ndim != 2 or K.shape[0] != K.shape[1] or K.shape[0] == 0:
        raise ValueError(f"K must be a square matrix with n >= 1: got shape {tuple(K.shape)}")
    if L.shape != K.shape:
        raise ValueError(f"L must have the shape of K, {tuple(K.shape)}: got {tuple(L.shape)}")
    check_dtype("K", K, DTYPES)
    check_dtype("L", L, (K.dtype,))
    check_same_device(K=K, L=L, perms=perms)
    check_permutations("perms", perms, K.shape[0])
    if len(perms) == 0:
        return torch.empty(0, dtype=torch.float64, device=K.device)
    run = launch if runs_triton(K, L, perms) else reference
    return run(K, L, perms, symmetric=symmetric)
