r"""The best merge of every source token: argmax over targets, without the score matrix.

    S_ij = cos(k_i, k_j) + λ exp(-|p_i - p_j|^2 / (2 σ^2)) - γ sqrt(m_i m_j) / max m,   i ∈ A, j ∈ B

    best_i = max_j S_ij,    index_i = the lowest j that attains it

k are keys, p positions, m masses; A and B are lists of tokens of one image, which rows are gathered
by. With λ = γ = 0 this is the bipartite soft matching of ToMe. A row of zeros is at cosine 0.

Bytes moved an image, entries of s bytes, n_A sources, n_B targets, d channels:

| | eager | fused |
|---|---|---|
| normalise, and gather by the lists | 6 s (n_A + n_B) d | none |
| keys read | s (n_A + n_B) d | s n_A d + s n_B d ceil(n_A / 64), the second from L2 |
| products, window, mass term, their sums, the maximum | about 8 passes of 4 n_A n_B | none |
| lists, positions, masses | 16 (n_A + n_B) | 16 n_A + 16 n_B ceil(n_A / 64) |
| results | 12 n_A | 8 n_A |

At n = 1024 tokens a matrix is 1 MB an image, and the eager form passes over eight of them. Above
128 channels, and in float32, a program can't hold its rows of A: they pass by in pieces, once for
every 64 targets.

Products are taken of the raw keys, on tensor cores in float16, with sums in float32, and scaled by
reciprocal norms afterwards: normalising in float16 first would cost 5e-4. Float32 keys multiply in
IEEE float32, not TF32. A running pair (largest score, its place) is replaced by strictly larger
ones alone, so that equal scores keep the lowest place.

Source: ToMe (Bolya et al., 2023) for the matching; the terms of mass and place are this book's
reconstruction of "Spatially-Regularized Entropy for Discriminative Token Merging in Fine-Grained
Re-Identification", and the kernel is ours.
"""

import math
from typing import NamedTuple

import torch

from icmllab.kernels.runtime import (
    cdiv,
    check_dtype,
    check_indices,
    check_same_device,
    jit,
    on_device,
    output,
    runs_triton,
    tl,
)

ROWS = 64
TILE = 64
WHOLE = 128
"""Channels of 16 bits up to which a program holds its rows of A."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Match(NamedTuple):
    """The best target of every source.

    Attributes:
        best: (B, n_A) the score, float32, or float64 for float64 keys.
        index: (B, n_A) int64, the place in the list of targets.
    """

    best: torch.Tensor
    index: torch.Tensor


@jit
def match_scores_kernel(
    keys_ptr,
    a_ptr,
    b_ptr,
    pos_ptr,
    mass_ptr,
    scale_ptr,
    best_ptr,
    index_ptr,
    n,
    n_a,
    n_b,
    d,
    image_stride,
    row_stride,
    tiles,
    lam,
    gamma,
    reach,
    HOLD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLS: tl.constexpr,
):
    """ROWS sources of one image against all of its targets; grid (images · source tiles,)."""
    image = (tl.program_id(0) // tiles).to(tl.int64)
    rows = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, TILE)
    cols = tl.arange(0, COLS)
    inside = rows < n_a
    keys_ptr += image * image_stride
    mine = tl.load(a_ptr + image * n_a + rows, mask=inside, other=0)
    at = image * n + mine
    a_x = tl.load(pos_ptr + 2 * at, mask=inside, other=0.0)
    a_y = tl.load(pos_ptr + 2 * at + 1, mask=inside, other=0.0)
    gamma *= tl.load(scale_ptr + image)
    a_mass = gamma * tl.sqrt(tl.load(mass_ptr + at, mask=inside, other=0.0))
    a_row = keys_ptr + mine.to(tl.int64)[:, None] * row_stride + cols[None, :]
    if HOLD:
        q = tl.load(a_row, mask=inside[:, None] & (cols < d)[None, :], other=0.0)
        wide = q.to(tl.float32)
        a_norm = tl.sum(wide * wide, axis=1)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    index = tl.zeros((ROWS,), dtype=tl.int32)
    for start in range(0, n_b, TILE):
        here = start + lanes < n_b
        other = tl.load(b_ptr + image * n_b + start + lanes, mask=here, other=0)
        b_row = keys_ptr + other.to(tl.int64)[:, None] * row_stride + cols[None, :]
        if HOLD:
            k = tl.load(b_row, mask=here[:, None] & (cols < d)[None, :], other=0.0)
            wide = k.to(tl.float32)
            b_norm = tl.sum(wide * wide, axis=1)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            a_norm = tl.zeros((ROWS,), dtype=tl.float32)
            b_norm = tl.zeros((TILE,), dtype=tl.float32)
            score = tl.zeros((ROWS, TILE), dtype=tl.float32)
            for piece in range(0, d, COLS):
                left = (piece + cols < d)[None, :]
                q = tl.load(a_row + piece, mask=inside[:, None] & left, other=0.0)
                k = tl.load(b_row + piece, mask=here[:, None] & left, other=0.0)
                score = tl.dot(q, tl.trans(k), score, input_precision="ieee")
                wide = q.to(tl.float32)
                a_norm += tl.sum(wide * wide, axis=1)
                wide = k.to(tl.float32)
                b_norm += tl.sum(wide * wide, axis=1)
        # a row of zeros has no direction: its products are 0, and stay so
        score *= (1.0 / tl.sqrt(tl.where(a_norm > 0, a_norm, 1.0)))[:, None]
        score *= (1.0 / tl.sqrt(tl.where(b_norm > 0, b_norm, 1.0)))[None, :]
        at = image * n + other
        dx = a_x[:, None] - tl.load(pos_ptr + 2 * at, mask=here, other=0.0)[None, :]
        dy = a_y[:, None] - tl.load(pos_ptr + 2 * at + 1, mask=here, other=0.0)[None, :]
        score += lam * tl.exp(-reach * (dx * dx + dy * dy))
        b_mass = tl.sqrt(tl.load(mass_ptr + at, mask=here, other=0.0))
        score -= a_mass[:, None] * b_mass[None, :]
        score = tl.where(here[None, :], score, float("-inf"))
        first, where = tl.max(
            score, axis=1, return_indices=True, return_indices_tie_break_left=True
        )
        # strictly more: among equal scores the earlier tile has the lower place
        index = tl.where(first > best, start + where, index)
        best = tl.maximum(best, first)
    out = image * n_a + rows
    tl.store(best_ptr + out, best, mask=inside)
    tl.store(index_ptr + out, index, mask=inside)


def settings(d: int, *, narrow: bool = True) -> dict[str, int]:
    """Tile sizes and warps for d channels of 16 (``narrow``) or 32 bits.

    Columns are padded to a power of two, at least the 16 of a product. Products of 32 bits take
    their operands through registers, which do not hold whole rows.
    """
    hold = narrow and d <= WHOLE
    columns = max(16, 1 << (d - 1).bit_length()) if hold else 32 if narrow else 16
    return {
        "HOLD": hold,
        "ROWS": ROWS,
        "TILE": TILE,
        "COLS": columns,
        "num_warps": 4 if narrow else 8,
    }


def launch(
    keys: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    pos: torch.Tensor,
    mass: torch.Tensor,
    scale: torch.Tensor,
    *,
    lam: float,
    gamma: float,
    sigma: float,
) -> Match:
    """Run the Triton kernel on checked inputs, wherever they are."""
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    (images, n, d), n_a = keys.shape, a.shape[1]
    tiles = cdiv(n_a, ROWS)
    best = output(images, n_a, dtype=torch.float32, device=keys.device)
    index = output(images, n_a, dtype=torch.int32, device=keys.device)
    with on_device(keys):
        match_scores_kernel[(images * tiles,)](
            keys,
            a.to(torch.int32).contiguous(),
            b.to(torch.int32).contiguous(),
            pos.float().contiguous(),
            mass.float().contiguous(),
            scale.float().contiguous(),
            best,
            index,
            n,
            n_a,
            b.shape[1],
            d,
            keys.stride(0),
            keys.stride(1),
            tiles,
            float(lam),
            float(gamma),
            1 / (2 * sigma * sigma),
            **settings(d, narrow=keys.dtype == torch.float16),
        )
    return Match(best, index.long())


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.long()[..., None].expand(-1, -1, x.shape[2]))


def reference(
    keys: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    pos: torch.Tensor,
    mass: torch.Tensor,
    scale: torch.Tensor,
    *,
    lam: float,
    gamma: float,
    sigma: float,
) -> Match:
    """The same in plain PyTorch with the (n_A, n_B) matrix; half precision in float32."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    keys, pos, mass = keys.to(wide), pos.to(wide), mass.to(wide)
    norm = keys.norm(dim=2, keepdim=True)
    unit = keys / torch.where(norm > 0, norm, 1.0)
    score = _rows(unit, a) @ _rows(unit, b).mT
    if lam:
        (ay, ax), (by, bx) = (_rows(pos, index).unbind(dim=2) for index in (a, b))
        gap = (ay[:, :, None] - by[:, None]).square_() + (ax[:, :, None] - bx[:, None]).square_()
        score += gap.mul_(-1 / (2 * sigma * sigma)).exp_().mul_(lam)
    if gamma:
        root = mass.sqrt()
        heavy = gamma * scale.to(wide)[:, None] * root.gather(1, a.long())
        score -= heavy[:, :, None] * root.gather(1, b.long())[:, None]
    return Match(*score.max(dim=2))


def match_scores(
    keys: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    pos: torch.Tensor,
    mass: torch.Tensor,
    scale: torch.Tensor,
    *,
    lam: float = 0.2,
    gamma: float = 0.6,
    sigma: float = 1.5,
) -> Match:
    """The best target in ``b`` of every source in ``a``.

    Args:
        keys: (B, n, d) float16, bfloat16, float32 or float64, d >= 1, any strides.
        a: (B, n_A) integers in 0..n-1, sources.
        b: (B, n_B) integers in 0..n-1, targets; n_B >= 1.
        pos: (B, n, 2) positions, in the unit of ``sigma``.
        mass: (B, n) >= 0.
        scale: (B,) what the mass term is multiplied with, 1 / max m.
        lam: λ, weight of the window.
        gamma: γ, weight of the mass term.
        sigma: σ > 0, width of the window; infinity makes it 1 everywhere.

    Returns:
        Scores, and places in ``b``. A GPU computes in float32 and takes float64 keys by the
        reference.

    Raises:
        ValueError: shapes, dtypes, devices or widths that do not fit.
    """
    if keys.ndim != 3 or keys.shape[2] == 0:
        raise ValueError(f"keys must be (B, n, d) with d >= 1: got shape {tuple(keys.shape)}")
    images, n, _ = keys.shape
    for name, index in (("a", a), ("b", b)):
        if index.ndim != 2 or len(index) != images or (name == "b" and index.shape[1] == 0):
            least = " with at least one target" if name == "b" else ""
            raise ValueError(
                f"{name} must be ({images}, tokens){least}: got shape {tuple(index.shape)}"
            )
        check_dtype(name, index, (torch.int32, torch.int64))
        check_indices(name, index, n)
    for name, x, shape in (
        ("pos", pos, (images, n, 2)),
        ("mass", mass, (images, n)),
        ("scale", scale, (images,)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}: got {tuple(x.shape)}")
        check_dtype(name, x, DTYPES)
    check_dtype("keys", keys, DTYPES)
    if not sigma > 0:
        raise ValueError(f"sigma must be > 0: got {sigma}")
    if not (math.isfinite(lam) and math.isfinite(gamma)):
        raise ValueError(f"lam and gamma must be finite: got {lam} and {gamma}")
    check_same_device(keys=keys, a=a, b=b, pos=pos, mass=mass, scale=scale)
    wide = torch.promote_types(keys.dtype, torch.float32)
    if a.numel() == 0:
        none = keys.new_empty(a.shape, dtype=wide)
        return Match(none, torch.empty(a.shape, dtype=torch.int64, device=a.device))
    options = {"lam": lam, "gamma": gamma, "sigma": sigma}
    if keys.dtype == torch.bfloat16:  # float32 holds every bfloat16
        keys = keys.float()
    fused = keys.dtype != torch.float64 and runs_triton(keys, a, b, pos, mass, scale)
    return (launch if fused else reference)(keys, a, b, pos, mass, scale, **options)
