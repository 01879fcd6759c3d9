r"""Merged tokens from a merge plan: weighted mean, energy and rescale in one deterministic pass.

    x̄_j = Σ w_i x_i / Σ w_i,    e_j = Σ w_i |x_i| / Σ w_i,    i ∈ {j} ∪ {sources of j}

    out_j = x̄_j · min(e_j / max(|x̄_j|, 1e-6), κ),    size_j = Σ s_i,    pos_j = Σ s_i p_i / size_j

A token without sources is copied, bit by bit. κ = 1 is the plain weighted mean, since |x̄| <= e.
``keep`` names the tokens that stay, in the order of the output; source ``src[k]`` goes into the
token at place ``dst[k]`` of it. Several sources may go into one.

Bytes moved an image, M tokens that stay, r sources, d channels of s bytes:

| | eager | fused |
|---|---|---|
| gather what stays, and the sources | 2 s (M + r) d | s (M + r) d |
| norms | s (M + r) d | none |
| weighted copies | 2 s (M + r) d | none |
| scatter-add of sources, with a read and a write of the sum | 3 s r d | none |
| mean, its norm, rescale, select | 6 s M d | s M d |
| sizes, positions, energies | about 60 (M + r) | 40 M + 20 r |

A program holds some tokens that stay and walks through their sources, which a stable sort has put
side by side. No float atomics: the order of summation is that of ``src``, so that two runs give the
same bits. Rows are read by loads of 128 bits.

Source: energy-preserving fusion as this book reconstructs it from the abstract of
"Spatially-Regularized Entropy for Discriminative Token Merging in Fine-Grained Re-Identification";
the kernel is ours.
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

MAX_CHANNELS = 2048
"""Channels that a program holds; wider rows run the reference."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOOR = 1e-6


class Fused(NamedTuple):
    """What stays after a merge.

    Attributes:
        x: (B, M, d) tokens, in the dtype of the input.
        sizes: (B, M) float32, or float64 for float64 tokens.
        pos: (B, M, 2), dtype of ``sizes``.
    """

    x: torch.Tensor
    sizes: torch.Tensor
    pos: torch.Tensor


@jit
def fuse_scatter_kernel(
    x_ptr,
    weight_ptr,
    sizes_ptr,
    pos_ptr,
    keep_ptr,
    start_ptr,
    src_ptr,
    out_ptr,
    out_sizes_ptr,
    out_pos_ptr,
    n,
    kept,
    merged,
    d,
    tiles,
    kappa,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """ROWS tokens that stay, of one image; grid (images · tiles,)."""
    image = (tl.program_id(0) // tiles).to(tl.int64)
    rows = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inside = rows < kept
    here = (cols < d)[None, :]
    token = tl.load(keep_ptr + image * kept + rows, mask=inside, other=0)
    first = tl.load(start_ptr + image * (kept + 1) + rows, mask=inside, other=0)
    last = tl.load(start_ptr + image * (kept + 1) + rows + 1, mask=inside, other=0)
    at = image * n + token
    own = tl.load(x_ptr + at[:, None] * d + cols[None, :], mask=inside[:, None] & here, other=0.0)
    x = own.to(tl.float32)
    total = tl.load(weight_ptr + at, mask=inside, other=1.0)
    size = tl.load(sizes_ptr + at, mask=inside, other=1.0)
    px = tl.load(pos_ptr + 2 * at, mask=inside, other=0.0)
    py = tl.load(pos_ptr + 2 * at + 1, mask=inside, other=0.0)
    own_x, own_y = px, py
    px *= size
    py *= size
    mean = total[:, None] * x
    energy = total * tl.sqrt(tl.sum(x * x, axis=1))
    count = last - first
    for step in range(tl.max(count, axis=0)):
        live = inside & (step < count)
        source = tl.load(src_ptr + image * merged + first + step, mask=live, other=0)
        at = image * n + source
        y = tl.load(x_ptr + at[:, None] * d + cols[None, :], mask=live[:, None] & here, other=0.0)
        y = y.to(tl.float32)
        w = tl.load(weight_ptr + at, mask=live, other=0.0)
        s = tl.load(sizes_ptr + at, mask=live, other=0.0)
        mean += w[:, None] * y
        energy += w * tl.sqrt(tl.sum(y * y, axis=1))
        total += w
        size += s
        px += s * tl.load(pos_ptr + 2 * at, mask=live, other=0.0)
        py += s * tl.load(pos_ptr + 2 * at + 1, mask=live, other=0.0)
    mean /= total[:, None]
    length = tl.sqrt(tl.sum(mean * mean, axis=1))
    factor = tl.minimum(energy / total / tl.maximum(length, 1e-6), kappa)
    alone = count == 0  # a copy, bit by bit
    out = tl.where(alone[:, None], x, mean * factor[:, None])
    at = image * kept + rows
    tl.store(
        out_ptr + at[:, None] * d + cols[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & here,
    )
    tl.store(out_sizes_ptr + at, size, mask=inside)
    tl.store(out_pos_ptr + 2 * at, tl.where(alone, own_x, px / size), mask=inside)
    tl.store(out_pos_ptr + 2 * at + 1, tl.where(alone, own_y, py / size), mask=inside)


def settings(d: int) -> dict[str, int]:
    """Rows a program for loads of 128 bits by all of its threads; columns a power of two."""
    columns = max(16, 1 << (d - 1).bit_length())
    return {"ROWS": max(1, 2048 // columns), "COLS": columns, "num_warps": 4}


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    sizes: torch.Tensor,
    pos: torch.Tensor,
    keep: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    kappa: float,
) -> Fused:
    """Run the Triton kernel on checked inputs, wherever they are."""
    (images, n, d), kept = x.shape, keep.shape[1]
    order = dst.long().sort(dim=1, stable=True)
    # where the sources of a token start: how many go to an earlier place
    places = torch.arange(kept + 1, device=x.device).expand(images, -1).contiguous()
    start = torch.searchsorted(order.values, places)
    sizes_of = settings(d)
    tiles = cdiv(kept, sizes_of["ROWS"])
    out = output(images, kept, d, dtype=x.dtype, device=x.device)
    out_sizes = output(images, kept, dtype=torch.float32, device=x.device)
    out_pos = output(images, kept, 2, dtype=torch.float32, device=x.device)
    with on_device(x):
        fuse_scatter_kernel[(images * tiles,)](
            x.contiguous(),
            weight.float().contiguous(),
            sizes.float().contiguous(),
            pos.float().contiguous(),
            keep.to(torch.int32).contiguous(),
            start.to(torch.int32),
            src.long().gather(1, order.indices).to(torch.int32),
            out,
            out_sizes,
            out_pos,
            n,
            kept,
            src.shape[1],
            d,
            tiles,
            float(kappa),
            **sizes_of,
        )
    return Fused(out, out_sizes, out_pos)


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.long()[..., None].expand(-1, -1, x.shape[2]))


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    sizes: torch.Tensor,
    pos: torch.Tensor,
    keep: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    kappa: float,
) -> Fused:
    """The same in plain PyTorch by scatter-add; half precision in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    keep, src, dst = keep.long(), src.long(), dst.long()
    weight, sizes, pos = weight.to(wide), sizes.to(wide), pos.to(wide)
    # everything that is summed, side by side: w x, w |x|, w, s p, s
    rows = x.to(wide)
    w, s = weight[..., None], sizes[..., None]
    parts = torch.cat([w * rows, w * rows.norm(dim=2, keepdim=True), w, s * pos, s], dim=2)
    wide_dst = dst[..., None].expand(-1, -1, parts.shape[2])
    sums = _rows(parts, keep).scatter_add(1, wide_dst, _rows(parts, src))
    mean, energy, total, place, size = sums.split([x.shape[2], 1, 1, 2, 1], dim=2)
    mean, energy = mean / total, energy / total
    factor = (energy / mean.norm(dim=2, keepdim=True).clamp_min(FLOOR)).clamp_max(kappa)
    alone = torch.ones_like(keep, dtype=torch.bool).scatter(1, dst, False)[..., None]
    out = torch.where(alone, _rows(rows, keep), mean * factor).to(x.dtype)
    place = torch.where(alone, _rows(pos, keep), place / size)
    return Fused(out, size[..., 0], place)


def fuse_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    sizes: torch.Tensor,
    pos: torch.Tensor,
    keep: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    kappa: float = 1.5,
) -> Fused:
    """Merge tokens into those that stay.

    Args:
        x: (B, n, d) float16, bfloat16, float32 or float64, d >= 1.
        weight: (B, n) > 0, of the mean and of the energy.
        sizes: (B, n) > 0, patches that a token stands for.
        pos: (B, n, 2).
        keep: (B, M) integers in 0..n-1, tokens that stay, in the order of the output.
        src: (B, r) integers in 0..n-1, tokens that are merged away.
        dst: (B, r) integers in 0..M-1, the places in ``keep`` that they go to.
        kappa: κ >= 1, most that a mean is lengthened; 1 leaves the mean.

    Returns:
        Tokens, sizes and positions. A GPU computes in float32 and takes float64, more than 2048
        channels, and tensors that need gradients by the reference.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or κ below 1.
    """
    if x.ndim != 3 or x.shape[2] == 0:
        raise ValueError(f"x must be (B, n, d) with d >= 1: got shape {tuple(x.shape)}")
    images, n, d = x.shape
    check_dtype("x", x, DTYPES)
    for name, t, shape in (
        ("weight", weight, (images, n)),
        ("sizes", sizes, (images, n)),
        ("pos", pos, (images, n, 2)),
    ):
        if t.shape != shape:
            raise ValueError(f"{name} must have shape {shape}: got {tuple(t.shape)}")
        check_dtype(name, t, DTYPES)
    for name, t, most in (("keep", keep, n), ("src", src, n), ("dst", dst, keep.shape[-1])):
        if t.ndim != 2 or len(t) != images:
            raise ValueError(f"{name} must be ({images}, tokens): got shape {tuple(t.shape)}")
        check_dtype(name, t, (torch.int32, torch.int64))
        check_indices(name, t, most)
    if src.shape != dst.shape:
        raise ValueError(f"dst must have shape {tuple(src.shape)}: got {tuple(dst.shape)}")
    if not (kappa >= 1 and math.isfinite(kappa)):
        raise ValueError(f"kappa must be finite and >= 1: got {kappa}")
    tensors = {"x": x, "weight": weight, "sizes": sizes, "pos": pos}
    check_same_device(**tensors, keep=keep, src=src, dst=dst)
    if keep.numel() == 0:
        wide = torch.promote_types(x.dtype, torch.float32)
        none = x.new_empty(*keep.shape, d)
        return Fused(none, none.new_empty(keep.shape, dtype=wide), none[..., :2].to(wide))
    fused = x.dtype != torch.float64 and d <= MAX_CHANNELS
    fused = fused and runs_triton(*tensors.values(), keep, src, dst)
    fused = fused and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    if not fused:
        return reference(x, weight, sizes, pos, keep, src, dst, kappa=kappa)
    if x.dtype == torch.bfloat16:  # float32 holds every bfloat16
        found = launch(x.float(), weight, sizes, pos, keep, src, dst, kappa=kappa)
        return found._replace(x=found.x.bfloat16())
    return launch(x, weight, sizes, pos, keep, src, dst, kappa=kappa)
