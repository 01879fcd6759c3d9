"""The proofs of :mod:`icmllab.kernels.group_fake_quant`."""

import torch

from icmllab.kernels import group_fake_quant as kernel
from icmllab.kernels.group_fake_quant import group_fake_quant, group_fake_quant_backward
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program

HALF, BRAIN = torch.float16, torch.bfloat16

# rounding of x̂; bfloat16 is truncated by the interpreter
TOLERANCE = {torch.float32: 1e-6, HALF: 1e-3, BRAIN: 1.6e-2}
NEAR = 1e-6
"""A code may differ where x/s is this near, in units of q_max, to a half, but not at one."""


def _case(
    *shape: int,
    group: int,
    bits: int = 4,
    dtype: torch.dtype = torch.float32,
    codes: bool = False,
    learned: bool = False,
    gradient: bool = False,
    zeros: bool = False,
    ties: bool = False,
    strided: bool = False,
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        x = torch.randn(*shape, generator=g)
        grad = torch.randn(*shape, generator=g).to(dtype)
        if zeros:
            x.unflatten(-1, (-1, group))[..., ::2, :] = 0.0
        if ties:  # the largest is q_max times a power of two: x/s is exact, and often a half
            x = torch.randint(-13, 14, shape, generator=g) / 2.0
            x.unflatten(-1, (-1, group))[..., 0] = (1 << (bits - 1)) - 1.0
        x = x.to(dtype)
        if strided:
            x = torch.stack([x, -x], dim=-1)[..., 0]
        made = {"x": x, "bits": bits, "group_size": group, "with_codes": codes, "scales": None}
        if learned or gradient:  # such that a part of the entries is clipped
            top = x.float().unflatten(-1, (-1, group)).abs().amax(dim=-1)
            size = 0.5 + torch.rand(top.shape, generator=g)
            made["scales"] = (size * top / (1 << (bits - 1))).clamp_min(1e-6)
        made["grad"] = grad if gradient else None
        return made

    tolerance = TOLERANCE[dtype]
    if gradient:
        return Case(make, (tolerance, 2e-6))
    return Case(make, (tolerance, *((NEAR,) if codes else ()), 2e-6))


def _outputs(x: Inputs, forward, backward) -> Outputs:
    """x̂, codes if wanted, scales; or both gradients."""
    bits, group = x["bits"], x["group_size"]
    if x["grad"] is not None:
        return tuple(backward(x["x"], x["scales"], x["grad"], bits, group, factor=0.25))
    done = forward(x["x"], bits, group, scales=x["scales"], with_codes=x["with_codes"])
    return tuple(t for t in done if t is not None)


def _truth(x: Inputs) -> Outputs:
    return _outputs(x, kernel.reference, kernel.reference_backward)


def _ratio(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x/s and s of every entry, and where the code hangs on the last bits."""
    group, top = x["group_size"], (1 << (x["bits"] - 1)) - 1
    scales = kernel.reference(x["x"], x["bits"], group, scales=x["scales"]).scales
    s = scales.repeat_interleave(group, dim=-1)
    u = x["x"] / s
    gap = (u - u.floor() - 0.5).abs()
    return u, s, (gap > 0) & (gap < NEAR * top)


def _scale(x: Inputs) -> Outputs:
    """Entries in their own units, or a whole step where the code hangs on the last bits."""
    u, s, near = _ratio(x)
    if x["grad"] is not None:
        size = (x["grad"].abs() * (1 + u.abs())).unflatten(-1, (-1, x["group_size"])).sum(dim=-1)
        loose = near.unflatten(-1, (-1, x["group_size"])).any(dim=-1)
        return x["grad"].abs() + 1e-30, torch.where(loose, size / 2e-6, size)
    values = x["x"].abs() + s
    values = torch.where(near, s / 1e-6, values)
    if not x["with_codes"]:
        return values, kernel.reference(x["x"], x["bits"], x["group_size"], scales=x["scales"])[2]
    made = kernel.reference(x["x"], x["bits"], x["group_size"], scales=x["scales"]).scales
    return values, torch.where(near, 1 / NEAR, 1e-30), made


def _bytes(x: Inputs) -> int:
    """Forward: x, x̂, codes and scales once. Backward: x, g, dx, scales and their gradients."""
    n, e = x["x"].numel(), x["x"].element_size()
    groups = n // x["group_size"]
    if x["grad"] is not None:
        return n * (2 * e + x["grad"].element_size()) + 8 * groups
    return 2 * n * e + n * bool(x["with_codes"]) + 4 * groups


def _eager(x: Inputs) -> object:
    """As one writes it first, a pass for each operation."""
    half, group = 1 << (x["bits"] - 1), x["group_size"]
    wide = torch.float64 if x["x"].dtype == torch.float64 else torch.float32
    groups = x["x"].to(wide).unflatten(-1, (-1, group))
    s = x["scales"]
    if s is None:
        s = (groups.abs().amax(dim=-1) / (half - 1)).clamp_min(torch.finfo(wide).tiny)
        s = torch.where(groups.any(dim=-1), s, kernel.ZERO_SCALE)
    u = groups / s[..., None]
    code = torch.clamp(torch.round(u), -half, half - 1)
    if x["grad"] is not None:
        g = x["grad"].to(wide).unflatten(-1, (-1, group))
        inside = (u >= -half) & (u <= half - 1)
        ds = 0.25 * (g * torch.where(inside, code - u, code)).sum(dim=-1)
        return (g * inside).flatten(-2).to(x["x"].dtype), ds
    values = (code * s[..., None]).flatten(-2).to(x["x"].dtype)
    return (values, code.flatten(-2).to(torch.int8), s) if x["with_codes"] else (values, s)


def _program(
    x: str = "fp16", *, group: int = 32, backward: bool = False, given: bool = False, **extra: bool
) -> Program:
    sizes = kernel.settings(group)
    num_warps = sizes.pop("num_warps")
    whole = sizes["PADDED"] == group and group >= 16
    width = {"fp16": 2, "bf16": 2, "fp32": 4}[x] * sizes["ROWS"] * sizes["PADDED"]
    constants = {"HALF": 8, "G": group, **sizes}
    if backward:
        types = {
            **{f"{a}_ptr": f"*{x}" for a in ("x", "grad", "dx")},
            "scales_ptr": "*fp32",
            "ds_ptr": "*fp32",
            "groups": "i32",
            "factor": "fp32",
        }
        run = kernel.group_fake_quant_backward_kernel
    else:
        types = {
            **{f"{a}_ptr": f"*{x}" for a in ("x", "values")},
            "scales_in_ptr": "*fp32",
            "codes_ptr": "*i8",
            "scales_ptr": "*fp32",
            "groups": "i32",
        }
        run = kernel.group_fake_quant_kernel
        constants |= {"GIVEN": given, "WITH_SCALES": not given, "WITH_CODES": False, **extra}
    return Program(
        run,
        types,
        constants,
        tuple(a for a in types if a.endswith("_ptr")),
        num_warps=num_warps,
        wide_loads=width * (2 if backward else 1) if whole else 0,
        wide_stores=width if whole else 0,
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {"x": torch.ones(3, 8), "bits": 4, "group_size": 4}
    return BadCall(lambda: group_fake_quant(**{**good, **change}), message)


def _bad_gradient(message: str, **change: object) -> BadCall:
    good = {"x": torch.ones(3, 8), "scales": torch.ones(3, 2), "grad": torch.ones(3, 8)}
    call = {**good, "bits": 4, "group_size": 4, **change}
    return BadCall(lambda: group_fake_quant_backward(**call), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 4096, generator=g).bfloat16().to(device)
    options = {"bits": 4, "group_size": 32, "with_codes": False, "scales": None, "grad": None}
    return {"x": x, **options}


SPEC = KernelSpec(
    name="group_fake_quant",
    op=lambda x: _outputs(x, group_fake_quant, group_fake_quant_backward),
    launch=lambda x: _outputs(x, kernel.launch, kernel.launch_backward),
    truth=_truth,
    scale=_scale,
    cases={
        "one group of one": _case(1, 1, group=1),
        "7x96 G=32": _case(7, 96, group=32, codes=True),
        "7x96 G=32 float16": _case(7, 96, group=32, dtype=HALF, codes=True),
        "7x96 G=32 bfloat16": _case(7, 96, group=32, dtype=BRAIN),
        "G=24, no power of two": _case(5, 120, group=24, codes=True),
        "G=1": _case(3, 17, group=1, codes=True),
        "a row is a group": _case(9, 100, group=100),
        "longer than a block": _case(2, 3000, group=3000, bits=8, codes=True),
        "2 bits": _case(6, 64, group=16, bits=2, codes=True),
        "8 bits": _case(6, 64, group=16, bits=8, codes=True),
        "many groups": _case(3, 50, 64, group=8),
        "groups of zeros": _case(4, 64, group=16, zeros=True, codes=True),
        "halves": _case(64, 64, group=16, ties=True, codes=True),
        "halves float16": _case(64, 64, group=16, ties=True, codes=True, dtype=HALF),
        "strided": _case(6, 40, group=8, strided=True, codes=True),
        "given scales": _case(6, 64, group=16, learned=True, codes=True),
        "given scales float16": _case(6, 64, group=16, learned=True, dtype=HALF),
        "gradient": _case(7, 96, group=32, gradient=True),
        "gradient G=24": _case(5, 120, group=24, gradient=True),
        "gradient float16": _case(7, 96, group=32, gradient=True, dtype=HALF),
        "gradient 2 bits": _case(6, 64, group=64, bits=2, gradient=True),
    },
    bytes=_bytes,
    flops=lambda x: 6 * x["x"].numel(),
    programs={
        "fp16 G=32": _program(),
        "bf16 G=32": _program("bf16"),
        "fp32 G=32": _program("fp32"),
        "fp16 G=128 codes": _program(group=128, WITH_CODES=True),
        "fp16 G=4096": _program(group=4096),
        "fp16 G=24": _program(group=24),
        "fp16 given": _program(given=True),
        "fp16 gradient": _program(backward=True),
        "fp32 gradient": _program("fp32", backward=True),
    },
    errors={
        "x a scalar": _bad("x must have", x=torch.tensor(1.0)),
        "x of integers": _bad("x must have dtype", x=torch.ones(3, 8).long()),
        "1 bit": _bad("bits must be", bits=1),
        "16 bits": _bad("bits must be", bits=16),
        "a group that does not divide": _bad("group_size must divide", group_size=3),
        "group 0": _bad("group_size must divide", group_size=0),
        "x with NaN": _bad("x must be finite", x=torch.full((3, 8), float("nan"))),
        "x with infinity": _bad("x must be finite", x=torch.full((3, 8), float("inf"))),
        "scales of another shape": _bad("scales must be", scales=torch.ones(3, 3)),
        "a scale of 0": _bad("scales must be finite", scales=torch.zeros(3, 2)),
        "scales in half": _bad("scales must have dtype", scales=torch.ones(3, 2).half()),
        "elsewhere": _bad("must share a device", scales=torch.ones(3, 2, device="meta")),
        "grad of another shape": _bad_gradient("grad must be", grad=torch.ones(3, 4)),
        "grad of integers": _bad_gradient("grad must have dtype", grad=torch.ones(3, 8).long()),
    },
    bench=_bench,
    timed=lambda x: group_fake_quant(x["x"], x["bits"], x["group_size"]).values,
    baselines={"eager": _eager},
    note="memory sets the limit: x read once, x̂ written once",
)
