r"""Successive interference cancellation inside a block of columns: round, feed back, next column.

    for j = B−1 … 0:   z_j = round(Y_j / (α_j L_jj)),   Y ← Y − z_j α_j L[j, :]

Rows are independent of one another, columns are not: what column j got wrong changes all columns
before it. With L lower triangular, a column's own entry L_jj turns Y_j into its rounding error.

Bytes moved for a rows and a block of B columns, in float32:

| | eager, a column at a time | fused |
|---|---|---|
| rows read and written again at each column, half a triangle | 4 a B² | 4 a B, read once |
| codes | 8 a B | 4 a B |
| scaled codes Q = α∘z for the product with the columns left of the block | 8 a B | 4 a B |
| what is left of the rows | – | 4 a B |
| L and α | 4 B² + 8 B | the same for each 32 rows, from L2 |

A whole matrix of n columns goes through B = 64 of them at a time, and the columns left of a block
see it in one product, Y[:, :s] −= Q L[block, :s]. The loop over single columns would move about
4 a n² bytes in all; blocked it is 4 a n²/B + 16 a n.

A program holds 32 rows of the block in registers, and their codes in a second tile. A column is
picked out of a tile by a masked sum, since registers can't be indexed. Rounding is half to even:
(u + 1.5·2²³) − 1.5·2²³ does it for |u| < 2²²; larger codes raise.

What limits it: B dependent steps. Each is a masked sum over the tile and one update of it, so that
the time of a program is B times their latency, and the card is filled by many rows (a = 4096 makes
128 programs). The products between blocks are ordinary matrix products.

Source: the loop is that of GPTQ and of WaterSIC ("WaterSIC: information-theoretically (near)
optimal linear layer quantization", arXiv 2603.04956). The kernel is our own.
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

BLOCK = 64
"""Columns that one launch takes at most."""

ROWS = 32
MAX_CODE = 2**22
"""Rounding by adding a large number is exact below this."""

DTYPES = (torch.float32, torch.float64)


class Block(NamedTuple):
    """A block of columns after its loop.

    Attributes:
        codes: (a, b) int32.
        scaled: (a, b) α∘z in the dtype of the rows.
        residual: (a, b) what is left of the rows; None where not asked for.
    """

    codes: torch.Tensor
    scaled: torch.Tensor
    residual: torch.Tensor | None


@jit
def sic_block_kernel(
    y_ptr,
    l_ptr,
    alpha_ptr,
    codes_ptr,
    scaled_ptr,
    residual_ptr,
    a,
    b,
    WITH_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """All b columns of ROWS rows; grid (row tiles,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    at = rows.to(tl.int64)[:, None] * b + cols[None, :]
    mine = (rows < a)[:, None] & (cols < b)[None, :]
    y = tl.load(y_ptr + at, mask=mine, other=0.0)
    alpha = tl.load(alpha_ptr + cols, mask=cols < b, other=0.0)
    codes = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for step in range(b):
        j = b - 1 - step
        row = tl.load(l_ptr + j * b + cols, mask=cols < b, other=0.0)
        here = cols == j
        diagonal = tl.sum(tl.where(here, row, 0.0), axis=0)
        size = tl.sum(tl.where(here, alpha, 0.0), axis=0)
        u = tl.sum(tl.where(here[None, :], y, 0.0), axis=1) / (size * diagonal)
        z = (u + 12582912.0) - 12582912.0  # 1.5 · 2²³: to the nearest whole number, half to even
        y -= (z * size)[:, None] * row[None, :]
        codes = tl.where(here[None, :], z[:, None], codes)
    tl.store(codes_ptr + at, codes.to(tl.int32), mask=mine)
    tl.store(scaled_ptr + at, codes * alpha[None, :], mask=mine)
    if WITH_RESIDUAL:
        tl.store(residual_ptr + at, y, mask=mine)


def columns(b: int) -> int:
    """Columns that a program's tile holds: b up to a power of two."""
    return max(2, 1 << (b - 1).bit_length())


def launch(
    Y: torch.Tensor, L: torch.Tensor, alpha: torch.Tensor, *, residual: bool = True
) -> Block:
    """Run the Triton kernel on checked inputs, wherever they are."""
    a, b = Y.shape
    codes = output(a, b, dtype=torch.int32, device=Y.device)
    scaled = output(a, b, dtype=torch.float32, device=Y.device)
    rest = output(a if residual else 1, b, dtype=torch.float32, device=Y.device)
    with on_device(Y):
        sic_block_kernel[(cdiv(a, ROWS),)](
            Y.contiguous(),
            L.contiguous(),
            alpha.contiguous(),
            codes,
            scaled,
            rest,
            a,
            b,
            WITH_RESIDUAL=residual,
            ROWS=ROWS,
            COLS=columns(b),
            num_warps=4,
        )
    if bool(((codes >= MAX_CODE) | (codes <= -MAX_CODE)).any()):
        raise ValueError(f"alpha must not be so small that codes reach {MAX_CODE} in float32")
    return Block(codes, scaled, rest if residual else None)


def reference(
    Y: torch.Tensor, L: torch.Tensor, alpha: torch.Tensor, *, residual: bool = True
) -> Block:
    """The same in plain PyTorch, in the dtype of the rows."""
    y, z = Y.clone(), torch.zeros_like(Y)
    for j in range(Y.shape[1] - 1, -1, -1):
        z[:, j] = (y[:, j] / (alpha[j] * L[j, j])).round()
        y[:, : j + 1] -= (z[:, j] * alpha[j])[:, None] * L[j, : j + 1]
    if z.numel() and not float(z.abs().max()) < 2**31:
        raise ValueError("alpha must not be so small that codes leave int32")
    return Block(z.int(), z * alpha, y if residual else None)


def sic_block(
    Y: torch.Tensor, L: torch.Tensor, alpha: torch.Tensor, *, residual: bool = True
) -> Block:
    """Round a block of columns, last to first, each with the errors of those after it fed back.

    Args:
        Y: (a, b) float32 or float64 rows in the coordinates of L, 1 <= b <= 64.
        L: (b, b), dtype of ``Y``, lower triangular with a positive diagonal; what stands above
            the diagonal must be 0.
        alpha: (b,), dtype of ``Y``, > 0, the weight that one code step stands for.
        residual: whether to return what is left of the rows.

    Returns:
        Codes, α∘z and the residual Y − (α∘z) L. On a GPU float32 runs the kernel; float64, and
        everything elsewhere, the reference.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or codes too large to be exact.
    """
    if Y.ndim != 2 or not 1 <= Y.shape[1] <= BLOCK:
        raise ValueError(f"Y must be (a, b) with b in [1, {BLOCK}]: got {tuple(Y.shape)}")
    b = Y.shape[1]
    if L.shape != (b, b):
        raise ValueError(f"L must be ({b}, {b}): got {tuple(L.shape)}")
    if alpha.shape != (b,):
        raise ValueError(f"alpha must be ({b},): got {tuple(alpha.shape)}")
    check_dtype("Y", Y, DTYPES)
    check_dtype("L", L, (Y.dtype,))
    check_dtype("alpha", alpha, (Y.dtype,))
    check_same_device(Y=Y, L=L, alpha=alpha)
    if len(Y) == 0:
        empty = Y.new_empty(0, b)
        return Block(empty.int(), empty, empty if residual else None)
    fused = Y.dtype == torch.float32 and runs_triton(Y, L, alpha)
    return (launch if fused else reference)(Y, L, alpha, residual=residual)
