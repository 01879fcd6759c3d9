r"""y = t ∘ ((x ∘ s) Zᵀ) + b: a linear layer whose weights are integers with two scales.

The weight is Ŵ = diag(t) Z diag(s): codes Z, a scale s for each input (step times gain) and t for
each output. The columns' scales go into the tile of x, the rows' into the result, so that Ŵ itself
never exists. An int8 code is exact in float16 and in TF32, which bfloat16 rows are multiplied in;
wider codes, and float32 rows, are multiplied in IEEE float32.

Bytes moved for m rows of n inputs, and outputs in tiles of ``N``:

| | eager | fused |
|---|---|---|
| weights formed in float32: codes read, weights written and read | (k + 8) n out | none |
| codes, k bytes each | – | k n out, once for each tile of rows |
| x, e bytes each | e m n | e m n ceil(out / N), from L2 |
| y | e m out | e m out |
| scales, bias | 4 (n + 2 out) | 4 n for each tile of the result, 8 out for each of rows |

In decoding (m = 1 … 16) the codes are all that counts: out·n bytes in place of 2 out·n of float16
weights; the limit is memory. In prefill (m in the hundreds) it is a product on tensor cores.

Scales may be so small that x∘s leaves float16: s is divided by its largest magnitude first, and t
multiplied by it.

Source: the storage format of "WaterSIC: information-theoretically (near) optimal linear layer
quantization" (arXiv 2603.04956). The kernel is our own.
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

X_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CODE_DTYPES = (torch.int8, torch.int16, torch.int32)


@jit
def dequant_matmul_kernel(
    x_ptr,
    codes_ptr,
    col_ptr,
    row_ptr,
    bias_ptr,
    y_ptr,
    m,
    n,
    out,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """A tile of M rows by N outputs; grid (output tiles, row tiles)."""
    outs = tl.program_id(0) * N + tl.arange(0, N)
    rows = tl.program_id(1) * M + tl.arange(0, M)
    total = tl.zeros((M, N), dtype=tl.float32)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * n
    codes_at = codes_ptr + outs.to(tl.int64)[:, None] * n
    for start in range(0, n, K):
        at = start + tl.arange(0, K)
        inside = at < n
        x = tl.load(x_at + at[None, :], mask=(rows < m)[:, None] & inside[None, :], other=0.0)
        s = tl.load(col_ptr + at, mask=inside, other=0.0)
        z = tl.load(codes_at + at[None, :], mask=(outs < out)[:, None] & inside[None, :], other=0)
        scaled = x.to(tl.float32) * s[None, :]
        if MODE == "ieee":
            total = tl.dot(scaled, tl.trans(z.to(tl.float32)), total, input_precision="ieee")
        elif MODE == "tf32":  # TF32 holds every int8 and bfloat16, and more digits of x∘s
            total = tl.dot(scaled, tl.trans(z.to(tl.float32)), total, input_precision="tf32")
        else:
            total = tl.dot(scaled.to(x.dtype), tl.trans(z.to(x.dtype)), total)
    t = tl.load(row_ptr + outs, mask=outs < out, other=0.0)
    y = total * t[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + outs, mask=outs < out, other=0.0)[None, :]
    keep = (rows < m)[:, None] & (outs < out)[None, :]
    tl.store(
        y_ptr + rows.to(tl.int64)[:, None] * out + outs[None, :],
        y.to(y_ptr.dtype.element_ty),
        mask=keep,
    )


def arithmetic(x: torch.dtype, codes: torch.dtype) -> str:
    """What multiplies: "half" or "tf32" on tensor cores, "ieee" where they would lose digits."""
    if x == torch.float32 or codes != torch.int8:
        return "ieee"
    return "tf32" if x == torch.bfloat16 else "half"


def settings(m: int, n: int, mode: str) -> dict[str, int]:
    """Tile sizes and warps; float32 tiles, and rows that start anywhere, need more registers."""
    if mode == "ieee" or n % 16:
        return {"M": 16 if m <= 16 else 32, "N": 64, "K": 32, "num_warps": 4}
    if m <= 16:  # decoding: long reads of codes
        return {"M": 16, "N": 64, "K": 128 if mode == "half" else 64, "num_warps": 4}
    return {"M": 64, "N": 64, "K": 64 if mode == "half" else 32, "num_warps": 4}


def launch(
    x: torch.Tensor,
    codes: torch.Tensor,
    col_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the Triton kernel on checked inputs, wherever they are."""
    m, n = x.shape
    out = len(codes)
    y = output(m, out, dtype=x.dtype, device=x.device)
    largest = col_scale.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    mode = arithmetic(x.dtype, codes.dtype)
    sizes = settings(m, n, mode)
    row = (row_scale.float() * largest).contiguous()
    with on_device(x):
        dequant_matmul_kernel[(cdiv(out, sizes["N"]), cdiv(m, sizes["M"]))](
            x.contiguous(),
            codes.contiguous(),
            (col_scale.float() / largest).contiguous(),
            row,
            row if bias is None else bias.float().contiguous(),
            y,
            m,
            n,
            out,
            MODE=mode,
            HAS_BIAS=bias is not None,
            **sizes,
        )
    return y


def reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    col_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch, added up in float32, or float64 for float64."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = (x.to(wide) * col_scale.to(wide)) @ codes.to(wide).T * row_scale.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def dequant_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    col_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output of a linear layer with quantised weights.

    Args:
        x: (m, n) float16, bfloat16, float32 or float64.
        codes: (out, n) int8, int16 or int32.
        col_scale: (n,) float32 or float64, step times gain of each input.
        row_scale: (out,) float32 or float64, gain of each output.
        bias: (out,) or None.

    Returns:
        (m, out) in the dtype of ``x``, added up in float32 (float64 for float64).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(f"x must be (m, n) with n >= 1: got shape {tuple(x.shape)}")
    n = x.shape[1]
    if codes.ndim != 2 or codes.shape[1] != n:
        raise ValueError(f"codes must be (out, {n}): got shape {tuple(codes.shape)}")
    for name, value, size in (
        ("col_scale", col_scale, n),
        ("row_scale", row_scale, len(codes)),
        ("bias", bias, len(codes)),
    ):
        if value is not None and value.shape != (size,):
            raise ValueError(f"{name} must be ({size},): got shape {tuple(value.shape)}")
    check_dtype("x", x, X_DTYPES)
    check_dtype("codes", codes, CODE_DTYPES)
    scales = {"col_scale": col_scale, "row_scale": row_scale}
    for name, value in scales.items():
        check_dtype(name, value, (torch.float32, torch.float64))
    named = {"x": x, "codes": codes, **scales} | ({} if bias is None else {"bias": bias})
    check_same_device(**named)
    if len(x) == 0 or len(codes) == 0:
        return x.new_empty(len(x), len(codes))
    fused = x.dtype != torch.float64 and runs_triton(*named.values())
    return (launch if fused else reference)(x, codes, col_scale, row_scale, bias)
