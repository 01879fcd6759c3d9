r"""y = x Wᵀ from 4-bit codes of both, a scale for each group of G inputs.

    y_ij = Σ_g sx_ig sw_jg Σ_{k in g} cx_ik cw_jk

The inner sum is of whole numbers: int8 products added up in int32 on tensor cores, exact. Two codes
share a byte, the even input in the low half, in two's complement: a byte p as int8 gives
(p << 4) >> 4 and p >> 4. A sum does not mind its order: from G = 64 the low halves are multiplied
with the low halves and the high ones with the high ones, and nothing is put back in order. At
G = 32 such a half would be shorter than the 32 that int8 products want: codes are interleaved.

Bytes moved for m rows, n inputs, out outputs, in tiles of M by N results:

| | eager | fused |
|---|---|---|
| weights dequantised to float16: codes read, weights written and read | 4.5 n out | none |
| activations the same | 4.5 m n | none |
| codes of weights | – | n out / 2 for each tile of rows |
| codes of activations | – | m n / 2 for each tile of outputs, from L2 |
| scales, float32 | 4 (m + out) n / G | the same, once a tile as well |
| y, float16 | 2 m out | 2 m out |

In decoding (m <= 16) the weights are all that counts: half a byte each, and 4/G bytes of scale.

|y| is up to 2^6 n times both scales, float32 adds up the groups. An inner sum is below 2^6 G, far
from the end of int32.

Source: integer inference with group-wise scales as many engines do it; the kernel is our own.
"""

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

GROUPS = (32, 64, 128)
"""Groups that the Triton kernel takes: int8 products want 32 inputs at least."""

SCALE_DTYPES = (torch.float32, torch.float64)


@jit
def w4a4_linear_kernel(
    x_ptr,
    sx_ptr,
    w_ptr,
    sw_ptr,
    y_ptr,
    m,
    out,
    groups,
    G: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """A tile of M rows by N outputs; grid (output tiles, row tiles)."""
    HALF: tl.constexpr = G // 2
    outs = tl.program_id(0) * N + tl.arange(0, N)
    rows = tl.program_id(1) * M + tl.arange(0, M)
    row_in = rows < m
    out_in = outs < out
    places = tl.arange(0, HALF)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * (groups * HALF) + places[None, :]
    w_at = w_ptr + outs.to(tl.int64)[:, None] * (groups * HALF) + places[None, :]
    sx_at = sx_ptr + rows.to(tl.int64) * groups
    sw_at = sw_ptr + outs.to(tl.int64) * groups
    total = tl.zeros((M, N), dtype=tl.float32)
    for group in range(groups):
        x = tl.load(x_at + group * HALF, mask=row_in[:, None], other=0).to(tl.int8, bitcast=True)
        w = tl.load(w_at + group * HALF, mask=out_in[:, None], other=0).to(tl.int8, bitcast=True)
        sx = tl.load(sx_at + group, mask=row_in, other=0.0)
        sw = tl.load(sw_at + group, mask=out_in, other=0.0)
        x_low, x_high = (x << 4) >> 4, x >> 4
        w_low, w_high = (w << 4) >> 4, w >> 4
        if G >= 64:
            inner = tl.dot(x_low, tl.trans(w_low), out_dtype=tl.int32)
            inner = tl.dot(x_high, tl.trans(w_high), inner, out_dtype=tl.int32)
        else:
            codes = tl.interleave(w_low, w_high)
            inner = tl.dot(tl.interleave(x_low, x_high), tl.trans(codes), out_dtype=tl.int32)
        total += inner.to(tl.float32) * sx[:, None] * sw[None, :]
    tl.store(
        y_ptr + rows.to(tl.int64)[:, None] * out + outs[None, :],
        total.to(tl.float16),
        mask=row_in[:, None] & out_in[None, :],
    )


def settings(m: int) -> dict[str, int]:
    """Tile sizes and warps: few rows in decoding, square tiles else."""
    if m <= 16:
        return {"M": 16, "N": 64, "num_warps": 4}
    return {"M": 64, "N": 64, "num_warps": 4}


def launch(
    x_packed: torch.Tensor, sx: torch.Tensor, w_packed: torch.Tensor, sw: torch.Tensor
) -> torch.Tensor:
    """Run the Triton kernel on checked inputs, wherever they are."""
    m, out, groups = len(x_packed), len(w_packed), sx.shape[1]
    y = output(m, out, dtype=torch.float16, device=x_packed.device)
    sizes = settings(m)
    with on_device(x_packed):
        w4a4_linear_kernel[(cdiv(out, sizes["N"]), cdiv(m, sizes["M"]))](
            x_packed.contiguous(),
            sx.float().contiguous(),
            w_packed.contiguous(),
            sw.float().contiguous(),
            y,
            m,
            out,
            groups,
            G=2 * x_packed.shape[1] // groups,
            **sizes,
        )
    return y


def decode(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes times scales, (rows, n) in the scales' dtype; the low half of a byte comes first."""
    signed = packed.to(torch.int16)
    codes = torch.stack([signed & 15, signed >> 4], dim=-1).flatten(-2)
    codes = (codes ^ 8) - 8
    return (codes.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def reference(
    x_packed: torch.Tensor, sx: torch.Tensor, w_packed: torch.Tensor, sw: torch.Tensor
) -> torch.Tensor:
    """The same from decoded matrices, in the scales' dtype; float64 gives the truth."""
    return decode(x_packed, sx) @ decode(w_packed, sw).T


def w4a4_linear(
    x_packed: torch.Tensor, sx: torch.Tensor, w_packed: torch.Tensor, sw: torch.Tensor
) -> torch.Tensor:
    """A linear layer whose inputs and weights are 4-bit codes.

    Args:
        x_packed: (m, n/2) uint8, two codes a byte, the even input in the low half.
        sx: (m, n/G) float32, or float64 for a result in float64.
        w_packed: (out, n/2) uint8.
        sw: (out, n/G), as ``sx``.

    Returns:
        (m, out) float16; in float64 for float64 scales. CUDA tensors with G of 32, 64 or 128 run
        the kernel, all others decode and multiply.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or groups that do not divide n.
    """
    for name, value in (("x_packed", x_packed), ("w_packed", w_packed)):
        if value.ndim != 2:
            raise ValueError(f"{name} must be a matrix of bytes: got shape {tuple(value.shape)}")
        check_dtype(name, value, (torch.uint8,))
    n = 2 * x_packed.shape[1]
    if n == 0 or w_packed.shape[1] != x_packed.shape[1]:
        raise ValueError(
            f"w_packed must have the inputs of x_packed, 2 or more: got {2 * w_packed.shape[1]} "
            f"and {n}"
        )
    for name, value, rows in (("sx", sx, len(x_packed)), ("sw", sw, len(w_packed))):
        check_dtype(name, value, SCALE_DTYPES)
        groups = sx.shape[-1] if sx.ndim else 0
        if value.ndim != 2 or value.shape != (rows, groups) or not groups or n % groups:
            raise ValueError(
                f"{name} must be ({rows}, n / group_size) with a group size that divides n={n}: "
                f"got {tuple(value.shape)}"
            )
    if sx.dtype != sw.dtype:
        raise ValueError(f"sw must have the dtype of sx, {sx.dtype}: got {sw.dtype}")
    check_same_device(x_packed=x_packed, sx=sx, w_packed=w_packed, sw=sw)
    exact = sx.dtype == torch.float64
    fits = n // sx.shape[1] in GROUPS and not exact
    if fits and len(x_packed) and len(w_packed) and runs_triton(x_packed, sx, w_packed, sw):
        return launch(x_packed, sx, w_packed, sw)
    y = reference(x_packed, sx, w_packed, sw)
    return y if exact else y.half()
