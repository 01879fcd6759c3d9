"""The proofs of :mod:`icmllab.kernels.histogram_values`."""

import torch

from icmllab.kernels import histogram_values as kernel
from icmllab.kernels.histogram_values import histogram_values
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Program
from icmllab.kernels.runtime import cdiv


def _case(heads: int, n: int, J: int, K: int, *, strided: bool = False, one: bool = False) -> Case:
    def make(g: torch.Generator) -> Inputs:
        p = torch.rand(heads, n, generator=g)
        codes = torch.randint(K, (n, J), generator=g).to(torch.uint8)
        scale = 0.5 + torch.rand(n, generator=g)
        if one:
            codes.fill_(K - 1)
        if strided:
            p, codes = p.T.contiguous().T, codes.T.contiguous().T
        return {"p": p, "codes": codes, "scale": scale, "K": K}

    return Case(make, (2e-6,))


def _scale(x: Inputs) -> tuple[torch.Tensor]:
    return (kernel.reference(x["p"].abs(), x["codes"], x["scale"].abs(), x["K"]) + 1e-30,)


def _bytes(x: Inputs) -> int:
    """Codes, scales and weights for every code and range of codewords; the partial histograms."""
    (heads, n), J, K = x["p"].shape, x["codes"].shape[1], x["K"]
    read = J * cdiv(K, kernel.TILE) * n * (1 + 4 + 4 * heads)
    return read + 4 * cdiv(n, kernel.CHUNK) * heads * J * K


def _eager(x: Inputs) -> torch.Tensor:
    """A scatter that adds, in the order of the tokens on a CPU, in any order on a GPU."""
    weight = x["p"] * x["scale"]
    out = weight.new_zeros(len(weight), x["codes"].shape[1], x["K"])
    index = x["codes"].T.long()[None].expand(len(weight), -1, -1)
    return out.scatter_add_(2, index, weight[:, None].expand_as(index))


def _program(heads: int = 16, *, odd: bool = False) -> Program:
    types = {
        "p_ptr": "*fp32",
        "codes_ptr": "*u8",
        "scale_ptr": "*fp32",
        "out_ptr": "*fp32",
        **dict.fromkeys(("n", "heads", "J", "K"), "i32"),
    }
    sizes = {"BLOCK": kernel.BLOCK, "TILE": kernel.TILE, "CHUNK": kernel.CHUNK, "HEADS": heads}
    aligned = [a for a in types if a.endswith("_ptr")] + ([] if odd else ["n", "K"])
    return Program(
        kernel.histogram_values_kernel,
        types,
        sizes,
        tuple(aligned),
        # NVIDIA's compiler copies weights to shared memory asynchronously: no load to count
        wide_stores=0 if odd else 4 * kernel.TILE * heads,
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "p": torch.ones(1, 4),
        "codes": torch.zeros(4, 2, dtype=torch.uint8),
        "scale": torch.ones(4),
        "K": 3,
    }
    return BadCall(lambda: histogram_values(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    made = {
        "p": torch.rand(4, 1 << 18, generator=g),
        "codes": torch.randint(256, (1 << 18, 16), generator=g).to(torch.uint8),
        "scale": torch.rand(1 << 18, generator=g),
    }
    return {**{name: t.to(device) for name, t in made.items()}, "K": 256}


SPEC = KernelSpec(
    name="histogram_values",
    op=lambda x: (histogram_values(**x),),
    launch=lambda x: (kernel.launch(**x),),
    truth=lambda x: (kernel.reference(**x),),
    scale=_scale,
    cases={
        "n=1 J=1 K=1": _case(1, 1, 1, 1),
        "n=33": _case(1, 33, 2, 256),
        "n=64 a block": _case(2, 64, 2, 64),
        "n=65 past a block": _case(2, 65, 2, 65),
        "n=1030 past a chunk": _case(3, 1030, 1, 16),
        "K=16": _case(1, 70, 3, 16),
        "20 queries": _case(20, 70, 2, 32),
        "all in one code": _case(2, 130, 2, 256, one=True),
        "strided": _case(3, 50, 4, 20, strided=True),
    },
    bytes=_bytes,
    flops=lambda x: 2 * x["codes"].numel() * x["K"] * kernel._heads(len(x["p"])),
    programs={
        "16 queries": _program(),
        "64 queries": _program(64),
        "odd": _program(odd=True),
    },
    errors={
        "p a vector": _bad("p must be", p=torch.ones(4)),
        "too many queries": _bad("p must be .*64", p=torch.ones(65, 4)),
        "codes of other tokens": _bad("codes must be", codes=torch.zeros(3, 2, dtype=torch.uint8)),
        "codes of int64": _bad(
            "codes must have dtype uint8", codes=torch.zeros(4, 2, dtype=torch.int64)
        ),
        "scale of another length": _bad("scale must be", scale=torch.ones(3)),
        "scale of another dtype": _bad("scale must have dtype", scale=torch.ones(4).double()),
        "K too large": _bad("K must be in 1..256", K=257),
        "elsewhere": _bad("must share a device", scale=torch.ones(4, device="meta")),
    },
    bench=_bench,
    timed=lambda x: histogram_values(**x),
    baselines={"eager": _eager},
    note="arithmetic of the one-hot product sets the limit",
)
