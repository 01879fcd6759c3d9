"""The proofs of :mod:`icmllab.kernels.rq_encode`."""

import torch

from icmllab.kernels import rq_encode as kernel
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Program
from icmllab.kernels.rq_encode import Encoded, rq_encode
from icmllab.kernels.runtime import cdiv


def _case(
    n: int,
    d: int,
    M: int,
    K: int,
    *,
    dtype: torch.dtype = torch.float32,
    l2: bool = False,
    ties: bool = False,
    barred: bool = False,
    residual: bool = True,
    strided: bool = False,
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        X = torch.randn(n, d, generator=g).to(dtype)
        words = torch.randn(M, K, d, generator=g) / (1 + torch.arange(M))[:, None, None]
        shapes = words / words.norm(dim=2, keepdim=True)
        bias = torch.zeros(M, K)
        if l2:
            shapes, bias = words.clone(), -words.square().sum(dim=2) / 2
        if ties:  # small whole numbers, and every codeword more than once
            X = X.round().to(dtype)
            words = words[:, : cdiv(K, 3)].round().repeat(1, 3, 1)[:, :K].contiguous()
            shapes = words.clone()
        if barred:
            bias[:, ::2] = float("-inf")
        if strided:
            X = torch.stack([X, -X], dim=2).reshape(n, 2 * d)[:, ::2]
            shapes = shapes.transpose(1, 2).contiguous().transpose(1, 2)
        made = {"X": X, "shapes": shapes, "bias": bias, "codewords": words}
        return {**made, "residual": residual}

    return Case(make, (2e-6,))  # a wrong code is off by 1


def _outputs(found: Encoded) -> tuple[torch.Tensor]:
    """Codes and residual side by side, (n, M + d) or (n, M)."""
    parts = (found.codes, found.residual)
    return (torch.cat([part.double() for part in parts if part is not None], dim=1),)


def _scale(x: Inputs) -> tuple[torch.Tensor]:
    """A code must be right; the residual is off in units of what was added up."""
    found = kernel.reference(x["X"], x["shapes"], x["bias"], x["codewords"])
    size = x["X"].abs().clone()
    for m, words in enumerate(x["codewords"]):
        size += words[found.codes[:, m].long()].abs()
    codes = torch.ones_like(found.codes, dtype=size.dtype)
    return (torch.cat([codes, size], dim=1) if x["residual"] else codes,)


def _bytes(x: Inputs) -> int:
    """Rows once, all tables for every 16 rows, the chosen codewords, codes, the residual."""
    (n, d), (M, K) = x["X"].shape, x["bias"].shape
    tables = cdiv(n, kernel.ROWS) * M * K * 4 * (d + 1)
    rest = 4 * n * d if x["residual"] else 0
    return n * d * x["X"].element_size() + tables + 4 * n * d * M + n * M + rest


def _eager(x: Inputs) -> torch.Tensor:
    """A score matrix a stage, as one writes it first."""
    r, codes = x["X"].to(x["codewords"].dtype), []
    for shapes, bias, words in zip(x["shapes"], x["bias"], x["codewords"], strict=True):
        codes.append((r @ shapes.T + bias).argmax(dim=1))
        r = r - words[codes[-1]]
    codes = torch.stack(codes, dim=1).to(r.dtype)
    return torch.cat([codes, r], dim=1) if x["residual"] else codes


def _program(
    columns: int = 64, *, x: str = "*fp32", odd: bool = False, residual: bool = True
) -> Program:
    types = {
        "x_ptr": x,
        "shapes_ptr": "*fp32",
        "bias_ptr": "*fp32",
        "words_ptr": "*fp32",
        "codes_ptr": "*u8",
        "residual_ptr": "*fp32",
        **dict.fromkeys(("n", "d", "M", "K", "tiles"), "i32"),
    }
    sizes = kernel.settings(columns)
    num_warps = sizes.pop("num_warps")
    aligned = [a for a in types if a.endswith("_ptr")] + ([] if odd else ["d", "K"])
    return Program(
        kernel.rq_encode_kernel,
        types,
        {"WITH_RESIDUAL": residual, **sizes},
        tuple(aligned),
        num_warps=num_warps,
        # without a whole number of 16 channels a row does not start where 128 bits do
        wide_loads=0 if odd else 4 * sizes["TILE"] * columns,
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "X": torch.ones(3, 4),
        "shapes": torch.ones(2, 5, 4),
        "bias": torch.zeros(2, 5),
        "codewords": torch.ones(2, 5, 4),
    }
    return BadCall(lambda: rq_encode(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    words = torch.randn(8, 256, 64, generator=g)
    made = {
        "X": torch.randn(65536, 64, generator=g),
        "shapes": words / words.norm(dim=2, keepdim=True),
        "bias": torch.zeros(8, 256),
        "codewords": words,
    }
    return {**{name: t.to(device) for name, t in made.items()}, "residual": False}


SPEC = KernelSpec(
    name="rq_encode",
    op=lambda x: _outputs(rq_encode(**x)),
    launch=lambda x: _outputs(kernel.launch(**x)),
    truth=lambda x: _outputs(kernel.reference(**x)),
    scale=_scale,
    cases={
        "n=1 M=1 K=1": _case(1, 16, 1, 1),
        "n=33 d=64 K=256 M=4": _case(33, 64, 4, 256),
        "n=33 d=64 K=256 M=4 l2": _case(33, 64, 4, 256, l2=True),
        "n=15 d=48": _case(15, 48, 2, 100),
        "n=16 d=128 K=33": _case(16, 128, 2, 33),
        "d=1": _case(9, 1, 2, 2),
        "d=5 K=16": _case(40, 5, 3, 16, l2=True),
        "K=65 past a tile": _case(20, 16, 2, 65),
        "float16": _case(35, 64, 3, 256, dtype=torch.float16),
        "equal scores": _case(30, 8, 1, 90, ties=True),
        "barred codewords": _case(30, 16, 2, 70, barred=True),
        "no residual": _case(17, 32, 2, 256, residual=False),
        "strided": _case(21, 24, 2, 40, strided=True),
    },
    bytes=_bytes,
    flops=lambda x: 2 * x["X"].numel() * x["bias"].numel(),
    programs={
        "fp32 d=64": _program(),
        "fp32 d=128": _program(128),
        "fp16 d=64": _program(x="*fp16"),
        "fp32 d=64 codes only": _program(residual=False),
        "fp32 d odd": _program(odd=True),
    },
    errors={
        "X a vector": _bad("X must be", X=torch.ones(4)),
        "X of integers": _bad("X must have dtype", X=torch.ones(3, 4).long()),
        "shapes of other channels": _bad("shapes must be", shapes=torch.ones(2, 5, 3)),
        "257 codewords": _bad(
            "at most 256 codewords",
            shapes=torch.ones(1, 257, 4),
            bias=torch.zeros(1, 257),
            codewords=torch.ones(1, 257, 4),
        ),
        "bias of another shape": _bad("bias must be", bias=torch.zeros(2, 4)),
        "codewords of another shape": _bad("codewords must be", codewords=torch.ones(2, 4, 4)),
        "bias of another dtype": _bad("bias must have dtype", bias=torch.zeros(2, 5).double()),
        "elsewhere": _bad("must share a device", bias=torch.zeros(2, 5, device="meta")),
    },
    bench=_bench,
    timed=lambda x: rq_encode(**x).codes,
    baselines={"eager": _eager},
    note="arithmetic in IEEE float32 sets the limit, not memory",
)
