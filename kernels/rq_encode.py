r"""Residual quantisation: the codes of all stages in one pass over the rows.

    r = x;   for each stage m:   a_m = argmax_k <r, s_mk> + b_mk,   r = r - c_m[a_m]

With unit shapes s and b = 0 this is the assignment of gain-shape k-means; with s = c and
b = -|c|^2 / 2 it is that of k-means, so that one kernel serves both. Equal scores: the lowest k.

Bytes moved for n rows of d channels, M stages of K codewords, in float32:

| | eager | fused |
|---|---|---|
| (n, K) scores written, and read for the argmax | 8 n M K | none |
| rows read, residual read and written in each stage | 12 n d M | 4 n d |
| shapes and biases | 4 M K (d + 1) | 4 M K (d + 1) ceil(n / 16), from L2 |
| the chosen codewords | 4 n d M | 4 n d M, from L2 |
| codes | 8 n M | n M |

A program holds 16 rows. The residual stays in its registers through all stages; a stage's shapes
pass by in tiles of 64 (32 above 64 channels), and a running pair (largest score, its index) is all
that is kept of them. For n = 8192, K = 256, M = 8, d = 64 the eager scores alone are 134 MB; the
fused pass reads 2.1 MB of rows and writes 66 kB of codes, and 1.05 MB of shapes and codewords stay
in L2.

What limits it is arithmetic: 2 n M K d operations in IEEE float32, since a code that differs in the
last bits of its score changes the row's later stages. Tensor cores would round the rows to TF32.

Source: gain-shape residual quantisation of "GSRQ: Gain-Shape Residual Quantization for Sub-1-bit
KV Cache", whose updates, and the kernel, are our reconstruction.
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

ROWS = 16
MAX_CODES = 256
MAX_CHANNELS = 128
"""Channels that a program holds; wider rows run the reference."""

DTYPES = (torch.float16, torch.float32, torch.float64)
TABLE_DTYPES = (torch.float32, torch.float64)


class Encoded(NamedTuple):
    """Codes, and what they leave over.

    Attributes:
        codes: (n, M) uint8.
        residual: (n, d) in the dtype of the tables; None where not asked for.
    """

    codes: torch.Tensor
    residual: torch.Tensor | None


@jit
def rq_encode_kernel(
    x_ptr,
    shapes_ptr,
    bias_ptr,
    words_ptr,
    codes_ptr,
    residual_ptr,
    n,
    d,
    M,
    K,
    tiles,
    WITH_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLS: tl.constexpr,
):
    """All stages of ROWS rows; grid (row tiles,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    lanes = tl.arange(0, TILE)
    inside = rows < n
    at = rows.to(tl.int64)[:, None] * d + cols[None, :]
    mine = inside[:, None] & (cols < d)[None, :]
    r = tl.load(x_ptr + at, mask=mine, other=0.0).to(tl.float32)
    for stage in range(M):
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        code = tl.zeros((ROWS,), dtype=tl.int32)
        for tile in tl.range(0, tiles, num_stages=1):
            words = tile * TILE + lanes
            here = words < K
            row = stage * K + words
            shapes = tl.load(
                shapes_ptr + row[:, None] * d + cols[None, :],
                mask=here[:, None] & (cols < d)[None, :],
                other=0.0,
            )
            bias = tl.load(bias_ptr + row, mask=here, other=float("-inf"))
            score = tl.dot(r, tl.trans(shapes), input_precision="ieee") + bias[None, :]
            first, where = tl.max(
                score, axis=1, return_indices=True, return_indices_tie_break_left=True
            )
            # strictly more: among equal scores the earlier tile has the lower index
            code = tl.where(first > best, tile * TILE + where, code)
            best = tl.maximum(best, first)
        chosen = (stage * K + code)[:, None] * d + cols[None, :]
        r -= tl.load(words_ptr + chosen, mask=mine, other=0.0)
        tl.store(codes_ptr + rows.to(tl.int64) * M + stage, code.to(tl.uint8), mask=inside)
    if WITH_RESIDUAL:
        tl.store(residual_ptr + at, r, mask=mine)


def settings(d: int) -> dict[str, int]:
    """Tile sizes and warps; columns are padded to a power of two, at least the 16 of a product."""
    columns = max(16, 1 << (d - 1).bit_length())
    wide = columns > 64  # a larger tile would not leave its registers room
    return {
        "ROWS": ROWS,
        "TILE": 32 if wide else 64,
        "COLS": columns,
        "num_warps": 8 if wide else 4,
    }


def launch(
    X: torch.Tensor,
    shapes: torch.Tensor,
    bias: torch.Tensor,
    codewords: torch.Tensor,
    *,
    residual: bool = True,
) -> Encoded:
    """Run the Triton kernel on checked inputs, wherever they are."""
    (n, d), (M, K) = X.shape, bias.shape
    sizes = settings(d)
    codes = output(n, M, dtype=torch.uint8, device=X.device)
    rest = output(n if residual else 1, d, dtype=torch.float32, device=X.device)
    with on_device(X):
        rq_encode_kernel[(cdiv(n, ROWS),)](
            X.contiguous(),
            shapes.contiguous(),
            bias.contiguous(),
            codewords.contiguous(),
            codes,
            rest,
            n,
            d,
            M,
            K,
            cdiv(K, sizes["TILE"]),
            WITH_RESIDUAL=residual,
            **sizes,
        )
    return Encoded(codes, rest if residual else None)


def reference(
    X: torch.Tensor,
    shapes: torch.Tensor,
    bias: torch.Tensor,
    codewords: torch.Tensor,
    *,
    residual: bool = True,
) -> Encoded:
    """The same in plain PyTorch, in the dtype of the tables."""
    r = X.to(codewords.dtype, copy=True)
    codes = torch.empty(len(X), len(bias), dtype=torch.uint8, device=X.device)
    for m, (s, b, c) in enumerate(zip(shapes, bias, codewords, strict=True)):
        chosen = torch.addmm(b, r, s.T).argmax(dim=1)
        r -= c[chosen]
        codes[:, m] = chosen.to(torch.uint8)
    return Encoded(codes, r if residual else None)


def rq_encode(
    X: torch.Tensor,
    shapes: torch.Tensor,
    bias: torch.Tensor,
    codewords: torch.Tensor,
    *,
    residual: bool = True,
) -> Encoded:
    """Greedy codes of rows by M stages.

    Args:
        X: (n, d) float16, float32 or float64 rows.
        shapes: (M, K, d) float32 or float64, what a residual is compared with; K <= 256.
        bias: (M, K), dtype of ``shapes``, added to the scores; -inf bars a codeword.
        codewords: (M, K, d), dtype of ``shapes``, what is subtracted.
        residual: whether to return what is left over.

    Returns:
        Codes, and the residual. On a GPU float16 and float32 rows of up to 128 channels run the
        kernel, in float32; everything else runs in the dtype of the tables.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or more than 256 codewords.
    """
    if X.ndim != 2 or X.shape[1] == 0:
        raise ValueError(f"X must be (n, d) with d >= 1: got shape {tuple(X.shape)}")
    if shapes.ndim != 3 or shapes.numel() == 0 or shapes.shape[2] != X.shape[1]:
        raise ValueError(f"shapes must be (M, K, {X.shape[1]}): got {tuple(shapes.shape)}")
    if shapes.shape[1] > MAX_CODES:
        raise ValueError(
            f"shapes must hold at most {MAX_CODES} codewords a stage, codes are bytes: got "
            f"{shapes.shape[1]}"
        )
    if bias.shape != shapes.shape[:2]:
        raise ValueError(f"bias must be {tuple(shapes.shape[:2])}: got {tuple(bias.shape)}")
    if codewords.shape != shapes.shape:
        raise ValueError(f"codewords must be {tuple(shapes.shape)}: got {tuple(codewords.shape)}")
    check_dtype("X", X, DTYPES)
    check_dtype("shapes", shapes, TABLE_DTYPES)
    check_dtype("bias", bias, (shapes.dtype,))
    check_dtype("codewords", codewords, (shapes.dtype,))
    check_same_device(X=X, shapes=shapes, bias=bias, codewords=codewords)
    if len(X) == 0:
        codes = torch.empty(0, len(bias), dtype=torch.uint8, device=X.device)
        return Encoded(codes, X.to(shapes.dtype) if residual else None)
    narrow = X.dtype != torch.float64 and shapes.dtype == torch.float32
    fused = narrow and X.shape[1] <= MAX_CHANNELS and runs_triton(X, shapes, bias, codewords)
    return (launch if fused else reference)(X, shapes, bias, codewords, residual=residual)
