"""The proofs of :mod:`icmllab.kernels.lut_scores`."""

import torch

from icmllab.kernels import lut_scores as kernel
from icmllab.kernels.lut_scores import lut_scores
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Program


def _case(heads: int, n: int, J: int, K: int, *, strided: bool = False, zero: bool = False) -> Case:
    def make(g: torch.Generator) -> Inputs:
        lut = torch.randn(heads, J, K, generator=g)
        codes = torch.randint(K, (n, J), generator=g).to(torch.uint8)
        scale = 0.5 + torch.rand(n, generator=g)
        if zero:
            scale[::2] = 0.0
        if strided:
            lut = lut.transpose(0, 2).contiguous().transpose(0, 2)
            codes = codes.T.contiguous().T
        return {"lut": lut, "codes": codes, "scale": scale}

    return Case(make, (1e-6,))


def _scale(x: Inputs) -> tuple[torch.Tensor]:
    return (kernel.reference(x["lut"].abs(), x["codes"], x["scale"]),)


def _bytes(x: Inputs) -> int:
    """Codes and scales once; an entry of the table a code and query; scores."""
    (n, J), heads = x["codes"].shape, len(x["lut"])
    return n * (J + 4 + heads * (4 * J + 4))


def _eager(x: Inputs) -> torch.Tensor:
    """All look-ups gathered, then summed."""
    heads, J, K = x["lut"].shape
    at = x["codes"].long() + K * torch.arange(J, device=x["lut"].device)
    return x["lut"].reshape(heads, J * K)[:, at].sum(dim=2) * x["scale"]


def _program(J: int = 8, *, odd: bool = False) -> Program:
    types = {
        "lut_ptr": "*fp32",
        "codes_ptr": "*u8",
        "scale_ptr": "*fp32",
        "out_ptr": "*fp32",
        **dict.fromkeys(("n", "heads", "J", "K"), "i32"),
    }
    constants: dict[str, object] = dict(kernel._sizes(J))
    aligned = [a for a in types if a.endswith("_ptr")] + ([] if odd else ["K", "J"])
    # codes of a thread lie side by side only where a token has a multiple of 16 of them
    return Program(
        kernel.lut_scores_kernel,
        types,
        constants,
        tuple(aligned),
        wide_loads=0 if odd else kernel.CODES,
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "lut": torch.ones(1, 2, 3),
        "codes": torch.zeros(4, 2, dtype=torch.uint8),
        "scale": torch.ones(4),
    }
    return BadCall(lambda: lut_scores(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    made = {
        "lut": torch.randn(4, 16, 256, generator=g),
        "codes": torch.randint(256, (1 << 20, 16), generator=g).to(torch.uint8),
        "scale": torch.rand(1 << 20, generator=g),
    }
    return {name: t.to(device) for name, t in made.items()}


SPEC = KernelSpec(
    name="lut_scores",
    op=lambda x: (lut_scores(**x),),
    launch=lambda x: (kernel.launch(**x),),
    truth=lambda x: (kernel.reference(**x),),
    scale=_scale,
    cases={
        "n=1 J=1 K=1": _case(1, 1, 1, 1),
        "n=33 J=8": _case(1, 33, 8, 256),
        "n=511 below a tile": _case(1, 511, 8, 256),
        "n=513 past a tile": _case(2, 513, 8, 256),
        "J=5": _case(3, 70, 5, 16),
        "J=32": _case(2, 100, 32, 256),
        "J=200": _case(1, 20, 200, 4),
        "7 queries": _case(7, 300, 4, 256),
        "zero scales": _case(1, 40, 8, 16, zero=True),
        "strided": _case(2, 50, 8, 32, strided=True),
    },
    bytes=_bytes,
    flops=lambda x: len(x["lut"]) * x["codes"].numel(),
    programs={
        "J=16": _program(16),
        "J=32": _program(32),
        "J=8 odd": _program(8, odd=True),
    },
    errors={
        "lut a matrix": _bad("lut must be", lut=torch.ones(2, 3)),
        "lut too wide": _bad("lut must be .*256", lut=torch.ones(1, 2, 257)),
        "codes of another width": _bad("codes must be", codes=torch.zeros(4, 3, dtype=torch.uint8)),
        "codes of int64": _bad(
            "codes must have dtype uint8", codes=torch.zeros(4, 2, dtype=torch.int64)
        ),
        "scale of another length": _bad("scale must be", scale=torch.ones(3)),
        "scale of another dtype": _bad("scale must have dtype", scale=torch.ones(4).double()),
        "elsewhere": _bad("must share a device", scale=torch.ones(4, device="meta")),
    },
    bench=_bench,
    timed=lambda x: lut_scores(**x),
    baselines={"eager": _eager},
    note="the table is gathered from L1: the share of HBM's roofline counts those bytes too",
)
