r"""x̂ = s · clip(round(x / s), −2^(b−1), 2^(b−1) − 1): rounding to a grid in one pass, per group.

A group is G consecutive entries of a row that share a scale s: s = max|x| / (2^(b−1) − 1), or one
that is given and learned. Halves round to even, as ``torch.round`` does. The gradient for x and for
a given s (straight through, LSQ) takes one more pass:

    dx = g · 1[−2^(b−1) <= x/s <= 2^(b−1) − 1]
    ds = c · Σ g · (round(x/s) − x/s inside, −2^(b−1) below, 2^(b−1) − 1 above)

Bytes moved for M K entries of e bytes, in groups of G:

| | eager | fused |
|---|---|---|
| abs; amax; divide; round; clip; multiply | 2, 1, 2, 2, 2, 2 times e M K | – |
| x read, x̂ written | – | 2 e M K |
| codes, scales (where wanted) | M K + 4 M K / G | M K + 4 M K / G |
| gradient: x, g, s read, dx and ds written | about 14 e M K | 3 e M K + 8 M K / G |

Eleven passes become two, and memory is all there is to it. A program owns whole groups, so that ds
is a plain sum and no atomics are needed: two runs give the same bits. G is a compile-time constant:
a group that is no power of two is filled up by a mask.

Two details decide whether codes agree with PyTorch's. ``/`` on float32 is approximate on a GPU,
``tl.div_rn`` is not. And u + 1.5·2²³ − 1.5·2²³ rounds to the nearest, halves to even, where
floor(u + 0.5) would round halves up; clipping first, to whole numbers, changes nothing and keeps u
small enough.

Source: uniform quantisation with straight-through gradients (Bengio et al. 2013) and learned step
sizes (Esser et al. 2020); the kernel is our own.
"""

from typing import NamedTuple

import torch

from icmllab.kernels.runtime import (
    cdiv,
    check_dtype,
    check_same_device,
    jit,
    on_device,
    output,
    runs_triton,
    tl,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BITS = tuple(range(2, 9))
ZERO_SCALE = 1e-8
"""The scale of a group of zeros: its codes are 0 with any."""

ENTRIES = 2048
"""Entries that a program rounds; a larger group has a program of its own."""

MOST = 16384
"""The largest group that Triton takes: its entries stay in registers."""


class Rounded(NamedTuple):
    """What rounding gives.

    Attributes:
        values: x̂, shape and dtype of x.
        codes: the same shape, int8; None where they were not asked for.
        scales: (..., K/G) float32 (float64 for such x).
    """

    values: torch.Tensor
    codes: torch.Tensor | None
    scales: torch.Tensor


class Gradient(NamedTuple):
    """Gradients through the rounding: ``x`` in its shape and dtype, ``scales`` (..., K/G)."""

    x: torch.Tensor
    scales: torch.Tensor


@jit
def group_fake_quant_kernel(
    x_ptr,
    scales_in_ptr,
    values_ptr,
    codes_ptr,
    scales_ptr,
    groups,
    HALF: tl.constexpr,
    GIVEN: tl.constexpr,
    WITH_CODES: tl.constexpr,
    WITH_SCALES: tl.constexpr,
    G: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS groups of G entries in PADDED places; grid (blocks of groups,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, PADDED)
    at = rows.to(tl.int64)[:, None] * G + cols[None, :]
    keep = (rows < groups)[:, None]
    if G != PADDED:
        keep = keep & (cols < G)[None, :]
    x = tl.load(x_ptr + at, mask=keep, other=0.0).to(tl.float32)
    if GIVEN:
        s = tl.load(scales_in_ptr + rows, mask=rows < groups, other=1.0)
    else:
        # a NaN must not hide from the maximum: it makes the scale, and then the group, no number
        size = tl.where(x == x, tl.abs(x), float("inf"))
        s = tl.div_rn(tl.max(size, axis=1), tl.zeros((ROWS,), tl.float32) + (HALF - 1.0))
        s = tl.where(s > 0, s, 1e-8)
    u = tl.div_rn(x, tl.zeros((ROWS, PADDED), tl.float32) + s[:, None])
    u = tl.minimum(tl.maximum(u, -1.0 * HALF), HALF - 1.0)
    code = (u + 12582912.0) - 12582912.0
    tl.store(values_ptr + at, (code * s[:, None]).to(values_ptr.dtype.element_ty), mask=keep)
    if WITH_CODES:
        tl.store(codes_ptr + at, code.to(tl.int8), mask=keep)
    if WITH_SCALES:
        tl.store(scales_ptr + rows, s, mask=rows < groups)


@jit
def group_fake_quant_backward_kernel(
    x_ptr,
    grad_ptr,
    scales_ptr,
    dx_ptr,
    ds_ptr,
    groups,
    factor,
    HALF: tl.constexpr,
    G: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dx and ds of ROWS groups whose scales were given; grid (blocks of groups,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, PADDED)
    at = rows.to(tl.int64)[:, None] * G + cols[None, :]
    keep = (rows < groups)[:, None]
    if G != PADDED:
        keep = keep & (cols < G)[None, :]
    x = tl.load(x_ptr + at, mask=keep, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + at, mask=keep, other=0.0).to(tl.float32)
    s = tl.load(scales_ptr + rows, mask=rows < groups, other=1.0)
    u = tl.div_rn(x, tl.zeros((ROWS, PADDED), tl.float32) + s[:, None])
    clipped = tl.minimum(tl.maximum(u, -1.0 * HALF), HALF - 1.0)
    inside = u == clipped
    code = (clipped + 12582912.0) - 12582912.0
    slope = tl.where(inside, code - u, code)
    tl.store(dx_ptr + at, tl.where(inside, g, 0.0).to(dx_ptr.dtype.element_ty), mask=keep)
    tl.store(ds_ptr + rows, factor * tl.sum(g * slope, axis=1), mask=rows < groups)


def settings(group_size: int) -> dict[str, int]:
    """Groups of a program and the places each takes."""
    padded = max(1 << (group_size - 1).bit_length(), 2)
    warps = 4 if padded <= 2 * ENTRIES else 16
    return {"PADDED": padded, "ROWS": max(1, ENTRIES // padded), "num_warps": warps}


def launch(
    x: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    scales: torch.Tensor | None = None,
    with_codes: bool = False,
) -> Rounded:
    """Run the Triton kernel on checked inputs, wherever they are."""
    x = x.contiguous()
    groups = x.numel() // group_size
    shape = (*x.shape[:-1], x.shape[-1] // group_size)
    values = output(*x.shape, dtype=x.dtype, device=x.device)
    codes = output(*x.shape, dtype=torch.int8, device=x.device) if with_codes else None
    given = scales is not None
    if given:
        made = scales.float().contiguous()
    else:
        made = output(*shape, dtype=torch.float32, device=x.device)
    sizes = settings(group_size)
    with on_device(x):
        group_fake_quant_kernel[(cdiv(groups, sizes["ROWS"]),)](
            x,
            made,
            values,
            values if codes is None else codes,
            made,
            groups,
            HALF=1 << (bits - 1),
            GIVEN=given,
            WITH_CODES=with_codes,
            WITH_SCALES=not given,
            G=group_size,
            **sizes,
        )
    return Rounded(values, codes, made)


def launch_backward(
    x: torch.Tensor,
    scales: torch.Tensor,
    grad: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    factor: float = 1.0,
) -> Gradient:
    """The gradient by Triton, for given scales."""
    x, grad, scales = x.contiguous(), grad.contiguous(), scales.float().contiguous()
    groups = x.numel() // group_size
    dx = output(*x.shape, dtype=x.dtype, device=x.device)
    ds = output(*scales.shape, dtype=torch.float32, device=x.device)
    sizes = settings(group_size)
    with on_device(x):
        group_fake_quant_backward_kernel[(cdiv(groups, sizes["ROWS"]),)](
            x,
            grad,
            scales,
            dx,
            ds,
            groups,
            float(factor),
            HALF=1 << (bits - 1),
            G=group_size,
            **sizes,
        )
    return Gradient(dx, ds)


def _groups(x: torch.Tensor, group_size: int) -> torch.Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(wide).unflatten(-1, (-1, group_size))


def reference(
    x: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    scales: torch.Tensor | None = None,
    with_codes: bool = False,
) -> Rounded:
    """The same in plain PyTorch; float64 gives the truth."""
    half = 1 << (bits - 1)
    groups = _groups(x, group_size)
    if scales is None:
        scales = groups.abs().amax(dim=-1) / (half - 1)
        scales = torch.where(scales > 0, scales, ZERO_SCALE)
    else:
        scales = scales.to(groups.dtype)
    codes = (groups / scales[..., None]).round().clamp(-half, half - 1)
    values = (codes * scales[..., None]).flatten(-2).to(x.dtype)
    return Rounded(values, codes.flatten(-2).to(torch.int8) if with_codes else None, scales)


def reference_backward(
    x: torch.Tensor,
    scales: torch.Tensor,
    grad: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    factor: float = 1.0,
) -> Gradient:
    """The gradient in plain PyTorch."""
    half = 1 << (bits - 1)
    groups, g = _groups(x, group_size), _groups(grad, group_size)
    u = groups / scales.to(groups.dtype)[..., None]
    inside = (u >= -half) & (u <= half - 1)
    slope = u.round().clamp(-half, half - 1) - torch.where(inside, u, 0.0)
    dx = torch.where(inside, g, 0.0).flatten(-2).to(x.dtype)
    return Gradient(dx, factor * (g * slope).sum(dim=-1))


def _check(x: torch.Tensor, bits: int, group_size: int, scales: torch.Tensor | None) -> None:
    if x.ndim < 1:
        raise ValueError("x must have a last dimension to group along: got a scalar")
    check_dtype("x", x, DTYPES)
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"bits must be one of 2 to 8: got {bits}")
    if isinstance(group_size, bool) or group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(
            f"group_size must divide the last dimension: got {group_size}, size {x.shape[-1]}"
        )
    if not x.is_cuda and not bool(torch.isfinite(x).all()):
        raise ValueError("x must be finite: it holds NaN or infinity")
    if scales is None:
        return
    shape = (*x.shape[:-1], x.shape[-1] // group_size)
    if scales.shape != shape:
        raise ValueError(f"scales must be {tuple(shape)}: got {tuple(scales.shape)}")
    check_dtype("scales", scales, (torch.float32, torch.float64))
    check_same_device(x=x, scales=scales)
    if not scales.is_cuda and not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise ValueError("scales must be finite and > 0")


def _fused(x: torch.Tensor, group_size: int) -> bool:
    return x.dtype != torch.float64 and group_size <= MOST and runs_triton(x)


def group_fake_quant(
    x: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    scales: torch.Tensor | None = None,
    with_codes: bool = False,
) -> Rounded:
    """Round to the grid of each group and back.

    Args:
        x: (..., K) float16, bfloat16, float32 or float64, whose last dimension is grouped.
        bits: 2 to 8.
        group_size: divides K.
        scales: (..., K/G) > 0 float32 or float64; None takes max|x| / (2^(bits−1) − 1), and 1e-8
            for a group of zeros.
        with_codes: whether to give the codes too.

    Raises:
        ValueError: shapes, dtypes, devices, bits or sizes that do not fit; on the CPU also values
            that are not finite. On a GPU the host does not wait to look: a group that holds NaN or
            an infinity comes back as NaN.
    """
    _check(x, bits, group_size, scales)
    if x.numel() == 0:
        return reference(x, bits, group_size, scales=scales, with_codes=with_codes)
    run = launch if _fused(x, group_size) else reference
    return run(x, bits, group_size, scales=scales, with_codes=with_codes)


def group_fake_quant_backward(
    x: torch.Tensor,
    scales: torch.Tensor,
    grad: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    factor: float = 1.0,
) -> Gradient:
    """Straight-through gradients for x and for given scales.

    Args:
        x: (..., K), what was rounded.
        scales: (..., K/G) > 0.
        grad: the shape of ``x``, the gradient of x̂.
        bits: 2 to 8.
        group_size: divides K.
        factor: of the scales' gradient; LSQ takes 1/√(group_size·(2^(bits−1) − 1)).

    Raises:
        ValueError: as in :func:`group_fake_quant`; ``grad`` of another shape.
    """
    _check(x, bits, group_size, scales)
    if grad.shape != x.shape:
        raise ValueError(f"grad must be {tuple(x.shape)}: got {tuple(grad.shape)}")
    check_dtype("grad", grad, DTYPES)
    check_same_device(x=x, grad=grad)
    fused = x.numel() and _fused(x, group_size)
    run = launch_backward if fused else reference_backward
    return run(x, scales, grad, bits, group_size, factor=factor)
