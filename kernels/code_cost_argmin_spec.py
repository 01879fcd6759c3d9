"""The proofs of :mod:`icmllab.kernels.code_cost_argmin`."""

import math

import torch

from icmllab.kernels import code_cost_argmin as kernel
from icmllab.kernels.code_cost_argmin import CodeMatch, code_cost_argmin
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Program
from icmllab.kernels.runtime import cdiv

# r products of a squared difference, each some five roundings of the difference's own terms
TOLERANCE = 3e-7


def _case(
    n: int,
    m: int,
    p: int,
    r: int,
    *,
    scale: float = 1.3,
    ties: bool = False,
    strided: bool = False,
    near: bool = False,
    index: torch.dtype = torch.int32,
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        dx = 0.2 + torch.rand(n, r, generator=g)
        idx = torch.rand(n, p, generator=g).argsort(dim=1)[:, :r].to(index)
        DYt = 0.2 + torch.rand(p, m, generator=g)
        if ties:  # values in eighths, so that costs are exact, and every column more than once
            dx, DYt = torch.ones(n, r), (8 * DYt).round() / 8
            DYt = DYt[:, : cdiv(m, 3)].repeat(1, 3)[:, :m].contiguous()
        if near:  # below the floor of the weight, and an anchor that is the point itself
            dx = dx * 0.02
            dx[:, 0] = 0.0
        if strided:  # every second column of a wider matrix, and transposes
            DYt = torch.stack([DYt, -DYt], dim=2).reshape(p, 2 * m)[:, ::2]
            dx, idx = (t.T.contiguous().T for t in (dx, idx))
        return {"dx": dx, "idx": idx, "DYt": DYt, "scale": 1.0 if ties else scale}

    return Case(make, (0.0,) if ties else (TOLERANCE,))


def _stack(found: CodeMatch) -> tuple[torch.Tensor]:
    """Index, best and second cost as the rows of one (3, n) float64 tensor."""
    return (torch.stack([part.double() for part in found]),)


def _direct(x: Inputs, magnitude: bool = False) -> torch.Tensor:
    """(n, m) costs, the whole (n, r, m) array at once; or the sizes of what their terms hold."""
    y = x["scale"] * x["DYt"][x["idx"].long()]
    dx = x["dx"][:, :, None]
    gap = dx.abs() + y.abs() if magnitude else dx - y
    return (gap**2 / dx.clamp_min(kernel.FLOOR)).sum(dim=1)


def _eager(x: Inputs) -> torch.Tensor:
    """The square expanded into two matrix products over all anchors, then the two smallest."""
    dx, idx, DYt, scale = x["dx"], x["idx"].long(), x["DYt"], x["scale"]
    weight = 1 / dx.clamp_min(kernel.FLOOR)
    W = dx.new_zeros(len(dx), len(DYt)).scatter_(1, idx, weight)
    WD = dx.new_zeros(len(dx), len(DYt)).scatter_(1, idx, weight * dx)
    Y = scale * DYt
    constant = (weight * dx**2).sum(dim=1, keepdim=True).expand(-1, DYt.shape[1])
    cost = torch.addmm(constant, WD, Y, alpha=-2).addmm_(W, Y * Y)
    return _first_two(cost)


def _first_two(cost: torch.Tensor) -> torch.Tensor:
    """Index, smallest and second smallest of each row: (3, n)."""
    # rounding splits ties of the expanded form; a relative 1e-12 mends them
    least = cost.amin(dim=1, keepdim=True)
    tied = cost <= least + 1e-12 * (1 + least.abs())
    where = torch.where(tied, torch.arange(cost.shape[1], device=cost.device), cost.shape[1])
    where = where.amin(dim=1, keepdim=True)
    rest = cost.scatter(1, where, math.inf).amin(dim=1)
    return torch.stack([where[:, 0].to(cost.dtype), least[:, 0], rest])


def _scale(x: Inputs) -> tuple[torch.Tensor]:
    """An index must be right; a cost may be off in units of the terms before their difference."""
    size = _direct(x, magnitude=True).amax(dim=1)
    return (torch.stack([torch.ones_like(size), size, size]),)


def _bytes(x: Inputs) -> int:
    """A row of DYt and one entry of the code for each point, anchor and tile; three results."""
    (n, r), tiles = x["dx"].shape, cdiv(x["DYt"].shape[1], kernel.COLS)
    return n * (r * tiles * (4 * kernel.COLS + 8) + 12)


def _program(*, odd: bool = False, smallest: bool = False) -> Program:
    """``odd``: neither n nor r is a multiple of 16; ``smallest``: one point, anchor and tile."""
    types = {
        "dx_ptr": "*fp32",
        "idx_ptr": "*i32",
        "y_ptr": "*fp32",
        "best_ptr": "*i32",
        "cost_ptr": "*fp32",
        "second_ptr": "*fp32",
        **dict.fromkeys(("n", "r", "tiles", "y_row"), "i32"),
        "scale": "fp32",
    }
    constants = {"FLOOR": kernel.FLOOR, "ROWS": kernel.ROWS, "COLS": kernel.COLS}
    if smallest:  # sizes of 1 are constants
        constants |= dict.fromkeys(("n", "r", "tiles"), 1)
    aligned = [a for a in types if a.endswith("_ptr")] + ["y_row"]
    aligned += [] if odd or smallest else ["n", "r"]
    return Program(
        kernel.code_cost_argmin_kernel,
        {a: t for a, t in types.items() if a not in constants},
        constants,
        tuple(aligned),
        wide_loads=4 * kernel.ROWS * kernel.COLS,
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "dx": torch.ones(3, 2),
        "idx": torch.tensor([[0, 1], [1, 2], [0, 2]]),
        "DYt": torch.ones(3, 4),
        "scale": 1.0,
    }
    return BadCall(lambda: code_cost_argmin(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    n, m, p, r = 16384, 16384, 1024, 16
    DX = 0.2 + torch.rand(n, p, generator=g)
    dx, idx = DX.topk(r, largest=False)
    DYt = 0.2 + torch.rand(p, m, generator=g)
    made = {"dx": dx, "idx": idx.to(torch.int32), "DYt": DYt}
    return {**{name: t.to(device) for name, t in made.items()}, "scale": 1.3}


SPEC = KernelSpec(
    name="code_cost_argmin",
    op=lambda x: _stack(code_cost_argmin(**x)),
    launch=lambda x: _stack(kernel.launch(**x)),
    truth=lambda x: (_first_two(_direct(x)),),
    scale=_scale,
    cases={
        "n=1 m=1 r=1": _case(1, 1, 1, 1),
        "m=1": _case(9, 1, 6, 3),
        "r=p": _case(20, 30, 5, 5),
        "r=2": _case(33, 127, 9, 2),
        "n=15 m=127 below a tile": _case(15, 127, 40, 16),
        "n=16 m=128 a tile": _case(16, 128, 40, 16),
        "n=17 m=129 past a tile": _case(17, 129, 40, 16, index=torch.int64),
        "n=50 m=300 three tiles": _case(50, 300, 64, 16),
        "r=33": _case(18, 140, 50, 33),
        "equal costs": _case(40, 300, 12, 4, ties=True),
        "equal costs past a tile": _case(5, 390, 12, 2, ties=True),
        "near anchors": _case(30, 200, 20, 8, near=True),
        "strided": _case(21, 150, 10, 4, strided=True),
        "small scale": _case(12, 140, 10, 4, scale=1e-3),
    },
    bytes=_bytes,
    flops=lambda x: 3 * x["dx"].numel() * x["DYt"].shape[1],
    programs={
        "fp32": _program(),
        "fp32 odd": _program(odd=True),
        "fp32 n=1": _program(smallest=True),
    },
    errors={
        "dx a vector": _bad("dx must be", dx=torch.ones(3)),
        "dx without anchors": _bad("dx must be", dx=torch.ones(3, 0), idx=torch.ones(3, 0).long()),
        "dx of integers": _bad("dx must have dtype", dx=torch.ones(3, 2).long()),
        "idx of another shape": _bad("idx must have the shape", idx=torch.zeros(3, 1).long()),
        "idx of floats": _bad("idx must have dtype", idx=torch.zeros(3, 2)),
        "idx out of range": _bad(r"idx must hold .*0\.\.2: got 3", idx=torch.full((3, 2), 3)),
        "idx below zero": _bad(r"idx must hold .*: got -1", idx=torch.full((3, 2), -1)),
        "DYt empty": _bad("DYt must be", DYt=torch.ones(3, 0)),
        "DYt of another dtype": _bad("DYt must have dtype float32", DYt=torch.ones(3, 4).double()),
        "scale zero": _bad("scale must be a number > 0", scale=0.0),
        "scale not finite": _bad("scale must be .* finite", scale=math.nan),
        "idx elsewhere": _bad(
            "must share a device", idx=torch.zeros(3, 2, dtype=torch.int64, device="meta")
        ),
    },
    bench=_bench,
    timed=lambda x: torch.stack([part.double() for part in code_cost_argmin(**x)]),
    baselines={"eager": _eager},
    note="rows of DYt gathered from L2: the share of HBM's roofline may exceed 100 %",
)
