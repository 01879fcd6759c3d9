"""The proofs of :mod:`icmllab.kernels.dequant_matmul`."""

import torch

from icmllab.kernels import dequant_matmul as kernel
from icmllab.kernels.dequant_matmul import dequant_matmul
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv

HALF = torch.float16

# rounding of x∘s and of y; bfloat16 is truncated by the interpreter
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


def _case(
    m: int,
    n: int,
    out: int,
    *,
    dtype: torch.dtype = torch.float32,
    code_dtype: torch.dtype = torch.int8,
    bias: bool = True,
    zero: bool = False,
    small: bool = False,
    strided: bool = False,
) -> Case:
    most = {torch.int8: 127, torch.int16: 3000, torch.int32: 100_000}[code_dtype]

    def make(g: torch.Generator) -> Inputs:
        x = torch.randn(m, n, generator=g).to(dtype)
        codes = torch.randint(-most, most + 1, (out, n), generator=g).to(code_dtype)
        col = torch.randn(n, generator=g)
        row = 0.5 + torch.rand(out, generator=g)
        if zero:
            codes[:, 0], codes[0] = 0, 0
            col[-1] = 0.0
        if small:  # x∘s would be zero in float16
            col, row = 1e-9 * col, 1e9 * row
        if strided:
            x = torch.cat([x, x], dim=1)[:, :n]
            codes = codes.T.contiguous().T
        made = {"x": x, "codes": codes, "col_scale": col, "row_scale": row}
        made["bias"] = torch.randn(out, generator=g) if bias else None
        return made

    return Case(make, (TOLERANCE[dtype],))


def _truth(x: Inputs) -> Outputs:
    """With the weights written out."""
    W = x["row_scale"][:, None] * x["codes"].double() * x["col_scale"]
    y = x["x"].double() @ W.T
    return (y if x["bias"] is None else y + x["bias"].double(),)


def _scale(x: Inputs) -> Outputs:
    made = {name: None if t is None else t.abs() for name, t in x.items()}
    return (_truth(made)[0] + 1e-30,)


def _bytes(x: Inputs) -> int:
    """A pass over x for each tile of outputs, over codes for each tile of rows; scales likewise."""
    (m, n), out = x["x"].shape, len(x["codes"])
    sizes = kernel.settings(m, n, kernel.arithmetic(x["x"].dtype, x["codes"].dtype))
    across, down = cdiv(out, sizes["N"]), cdiv(m, sizes["M"])
    e, k = x["x"].element_size(), x["codes"].element_size()
    per_output = 4 + 4 * (x["bias"] is not None)
    return (
        across * e * m * n
        + down * k * out * n
        + 4 * n * across * down
        + down * per_output * out
        + e * m * out
    )


def _eager(x: Inputs) -> torch.Tensor:
    """The weights formed first."""
    W = x["row_scale"][:, None] * x["codes"].to(x["row_scale"].dtype) * x["col_scale"]
    bias = None if x["bias"] is None else x["bias"].to(x["x"].dtype)
    return torch.nn.functional.linear(x["x"], W.to(x["x"].dtype), bias)


def _program(
    x: str = "fp16", codes: str = "i8", *, m: int = 16, bias: bool = True, odd: bool = False
) -> Program:
    types = {
        "x_ptr": f"*{x}",
        "codes_ptr": f"*{codes}",
        "col_ptr": "*fp32",
        "row_ptr": "*fp32",
        "bias_ptr": "*fp32",
        "y_ptr": f"*{x}",
        **dict.fromkeys(("m", "n", "out"), "i32"),
    }
    dtypes = {"fp16": HALF, "bf16": torch.bfloat16, "fp32": torch.float32}
    kinds = {"i8": torch.int8, "i16": torch.int16}
    mode = kernel.arithmetic(dtypes[x], kinds[codes])
    sizes = kernel.settings(m, 65 if odd else 64, mode)
    num_warps = sizes.pop("num_warps")
    aligned = [a for a in types if a.endswith("_ptr")] + ([] if odd else ["n", "out"])
    return Program(
        kernel.dequant_matmul_kernel,
        types,
        {"MODE": mode, "HAS_BIAS": bias, **sizes},
        tuple(aligned),
        num_warps=num_warps,
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "x": torch.ones(3, 4),
        "codes": torch.ones(5, 4, dtype=torch.int8),
        "col_scale": torch.ones(4),
        "row_scale": torch.ones(5),
    }
    return BadCall(lambda: dequant_matmul(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    made = {
        "x": torch.randn(16, 4096, generator=g).half(),
        "codes": torch.randint(-127, 128, (4096, 4096), generator=g).to(torch.int8),
        "col_scale": torch.rand(4096, generator=g),
        "row_scale": torch.rand(4096, generator=g),
    }
    return {**{name: t.to(device) for name, t in made.items()}, "bias": None}


SPEC = KernelSpec(
    name="dequant_matmul",
    op=lambda x: (dequant_matmul(**x),),
    launch=lambda x: (kernel.launch(**x),),
    truth=_truth,
    scale=_scale,
    cases={
        "m=1 n=65 out=127": _case(1, 65, 127),
        "m=1 n=65 out=127 float16": _case(1, 65, 127, dtype=HALF),
        "m=1 n=65 out=127 bfloat16": _case(1, 65, 127, dtype=torch.bfloat16),
        "m=17 n=64 out=64": _case(17, 64, 64),
        "m=65 n=130 out=65 float16": _case(65, 130, 65, dtype=HALF),
        "m=64 n=128 out=64 bfloat16": _case(64, 128, 64, dtype=torch.bfloat16),
        "n=1": _case(3, 1, 2),
        "int16 codes": _case(5, 40, 33, code_dtype=torch.int16),
        "int16 codes float16": _case(5, 40, 33, code_dtype=torch.int16, dtype=HALF),
        "int32 codes": _case(20, 33, 17, code_dtype=torch.int32),
        "zero column, row and scale": _case(4, 20, 18, dtype=HALF, zero=True),
        "small scales float16": _case(4, 48, 20, dtype=HALF, small=True),
        "no bias": _case(9, 32, 70, bias=False),
        "strided": _case(6, 24, 40, strided=True),
    },
    bytes=_bytes,
    flops=lambda x: 2 * x["x"].numel() * len(x["codes"]),
    programs={
        "fp16 decode": _program(),
        "bf16 decode": _program("bf16"),
        "fp16 prefill": _program(m=512),
        "bf16 prefill": _program("bf16", m=512),
        "fp32 decode": _program("fp32"),
        "fp32 prefill": _program("fp32", m=512),
        "fp16 int16 codes": _program(codes="i16", m=512),
        "fp16 odd": _program(odd=True, bias=False),
    },
    errors={
        "x a vector": _bad("x must be", x=torch.ones(4)),
        "x of integers": _bad("x must have dtype", x=torch.ones(3, 4).long()),
        "codes of other inputs": _bad("codes must be", codes=torch.ones(5, 3, dtype=torch.int8)),
        "codes as floats": _bad("codes must have dtype", codes=torch.ones(5, 4)),
        "col_scale of another size": _bad("col_scale must be", col_scale=torch.ones(5)),
        "row_scale of another size": _bad("row_scale must be", row_scale=torch.ones(4)),
        "row_scale in half": _bad("row_scale must have dtype", row_scale=torch.ones(5).half()),
        "bias of another size": _bad("bias must be", bias=torch.ones(4)),
        "elsewhere": _bad("must share a device", bias=torch.ones(5, device="meta")),
    },
    bench=_bench,
    timed=lambda x: dequant_matmul(**x),
    baselines={"eager": _eager},
    note="memory sets the limit in decoding: one byte a weight",
)
