"""The proofs of :mod:`icmllab.kernels.sic_block`."""

import torch

from icmllab.kernels import sic_block as kernel
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv
from icmllab.kernels.sic_block import Block, sic_block


def _case(
    a: int, b: int, *, exact: bool = False, residual: bool = True, strided: bool = False
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        Y = 3 * torch.randn(a, b, generator=g)
        L = torch.randn(b, b, generator=g).tril(-1) / b**0.5
        L += torch.diag(0.5 + torch.rand(b, generator=g))
        alpha = 0.25 + torch.rand(b, generator=g)
        if exact:  # quarters and powers of two: every operation is exact, and many codes are ties
            Y = (4 * Y).round() / 4
            L = (4 * L).round().tril(-1) / 4 + torch.eye(b)
            alpha = torch.full((b,), 0.5)
        if strided:
            Y = torch.cat([Y, Y], dim=1)[:, :b]
            L = torch.cat([L, L], dim=0)[:b]
        return {"Y": Y, "L": L, "alpha": alpha, "residual": residual}

    return Case(make, (0.0,) * 3 if exact and residual else (0.0, 1e-6, 1e-6)[: 2 + residual])


def _outputs(found: Block) -> Outputs:
    return tuple(part for part in found if part is not None)


def _truth(x: Inputs) -> Outputs:
    """Column by column from what was rounded so far, without a running residual."""
    Y, L, alpha = x["Y"], x["L"], x["alpha"]
    b = Y.shape[1]
    q = torch.zeros_like(Y)
    z = torch.zeros_like(Y)
    for j in reversed(range(b)):
        rest = Y[:, j] - q[:, j + 1 :] @ L[j + 1 :, j]
        z[:, j] = torch.round(rest / (alpha[j] * L[j, j]))
        q[:, j] = alpha[j] * z[:, j]
    parts = (z.int(), q, Y - q @ L)
    return parts if x["residual"] else parts[:2]


def _scale(x: Inputs) -> Outputs:
    """A code must be right; what is left is off in units of all that was taken away."""
    q = _truth({**x, "residual": False})[1]
    moved = x["Y"].abs() + q.abs() @ x["L"].abs()
    parts = (torch.ones_like(q), q.abs() + 1e-30, moved)
    return parts if x["residual"] else parts[:2]


def _bytes(x: Inputs) -> int:
    """Rows once, L and α for every 32 rows, codes, scaled codes, the residual."""
    a, b = x["Y"].shape
    return 4 * (a * b * (3 + x["residual"]) + cdiv(a, kernel.ROWS) * (b * b + b))


def _eager(x: Inputs) -> Outputs:
    return _outputs(kernel.reference(**x))


def _program(
    b: int = 64, *, residual: bool = True, odd: bool = False, narrow: bool = False
) -> Program:
    """``narrow``: a tile that leaves a thread of AMD's wider warps less than 128 bits."""
    types = {
        "y_ptr": "*fp32",
        "l_ptr": "*fp32",
        "alpha_ptr": "*fp32",
        "codes_ptr": "*i32",
        "scaled_ptr": "*fp32",
        "residual_ptr": "*fp32",
        "a": "i32",
        "b": "i32",
    }
    aligned = [name for name in types if name.endswith("_ptr")] + ([] if odd else ["b"])
    tile = 0 if odd or narrow else 4 * kernel.ROWS * kernel.columns(b)
    return Program(
        kernel.sic_block_kernel,
        types,
        {"WITH_RESIDUAL": residual, "ROWS": kernel.ROWS, "COLS": kernel.columns(b)},
        tuple(aligned),
        wide_loads=tile,
        wide_stores=tile * (2 + residual),
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {"Y": torch.ones(3, 4), "L": torch.eye(4), "alpha": torch.ones(4)}
    return BadCall(lambda: sic_block(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    Y = 3 * torch.randn(16384, 64, generator=g)
    L = torch.randn(64, 64, generator=g).tril(-1) / 8 + torch.eye(64)
    made = {"Y": Y, "L": L, "alpha": torch.ones(64)}
    return {**{name: t.to(device) for name, t in made.items()}, "residual": True}


SPEC = KernelSpec(
    name="sic_block",
    op=lambda x: _outputs(sic_block(**x)),
    launch=lambda x: _outputs(kernel.launch(**x)),
    truth=_truth,
    scale=_scale,
    cases={
        "a=1 b=1": _case(1, 1),
        "a=33 b=64": _case(33, 64),
        "a=32 b=64": _case(32, 64),
        "a=31 b=2": _case(31, 2),
        "a=5 b=33": _case(5, 33),
        "a=64 b=48": _case(64, 48),
        "exact with ties": _case(70, 24, exact=True),
        "no residual": _case(17, 32, residual=False),
        "strided": _case(21, 20, strided=True),
    },
    bytes=_bytes,
    flops=lambda x: 2 * x["Y"].numel() * x["Y"].shape[1],
    programs={
        "b=64": _program(),
        "b=64 no residual": _program(residual=False),
        "b=16": _program(16, narrow=True),
        "b odd": _program(33, odd=True),
    },
    errors={
        "Y a vector": _bad("Y must be", Y=torch.ones(4)),
        "65 columns": _bad("Y must be", Y=torch.ones(2, 65)),
        "Y of integers": _bad("Y must have dtype", Y=torch.ones(3, 4).long()),
        "L of another size": _bad("L must be", L=torch.eye(3)),
        "alpha of another size": _bad("alpha must be", alpha=torch.ones(3)),
        "L of another dtype": _bad("L must have dtype", L=torch.eye(4).double()),
        "alpha of another dtype": _bad("alpha must have dtype", alpha=torch.ones(4).double()),
        "elsewhere": _bad("must share a device", alpha=torch.ones(4, device="meta")),
        "codes past int32": _bad("leave int32", Y=torch.full((1, 4), 1e12)),
    },
    bench=_bench,
    timed=lambda x: sic_block(**x).scaled,
    baselines={"eager": _eager},
    note="64 dependent steps set the limit, not memory",
)
