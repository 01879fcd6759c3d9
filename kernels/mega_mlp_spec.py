"""The proofs of :mod:`icmllab.kernels.mega_mlp`."""

import torch

from icmllab.kernels import mega_mlp as kernel
from icmllab.kernels.mega_mlp import mega_mlp
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv

HALF = torch.float16
# in units of all absolute terms of two products, of which the errors are a small part
TOLERANCE = {torch.float32: 1e-7, HALF: 5e-5}


def _case(
    M: int,
    D: int,
    H: int,
    *,
    dtype: torch.dtype = torch.float32,
    zero: bool = False,
    strided: bool = False,
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        made = {
            "x": torch.randn(M, D, generator=g),
            "weight": 0.5 + torch.rand(D, generator=g),
            "gate": torch.randn(D, H, generator=g) / D**0.5,
            "up": torch.randn(D, H, generator=g) / D**0.5,
            "down": torch.randn(H, D, generator=g) / H**0.5,
        }
        if zero:
            made["x"][0] = 0
        made = {name: t.to(dtype) for name, t in made.items()}
        if strided:
            made["gate"] = made["gate"].T.contiguous().T
            made["x"] = torch.cat([made["x"], made["x"]], dim=1)[:, :D]
        return made

    return Case(make, (TOLERANCE[dtype],))


def _scale(x: Inputs) -> Outputs:
    """Absolute terms of the last product, of whose factors each has an error of its own."""
    v = x["x"].double()
    n = v * (v.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * x["weight"].double()
    gate, up = (n.abs() @ x[name].double().abs() for name in ("gate", "up"))
    return ((gate.clamp_min(0.3) * up) @ x["down"].double().abs() + 1e-30,)


def _bytes(x: Inputs) -> int:
    """As the table of the module says."""
    (M, D), H, e = x["x"].shape, x["gate"].shape[1], x["x"].element_size()
    sizes = kernel.settings(M, D, H, x["x"].dtype)
    blocks, wide, tall = cdiv(M, sizes["BM"]), cdiv(H, sizes["BN"]), cdiv(D, sizes["BN"])
    norm = 3 * M * D + D * blocks
    # both products of a hidden tile read the normalised rows
    hidden = 2 * M * D * wide + 2 * D * H * blocks + M * H
    down = M * H * tall + H * D * blocks + M * D
    tasks = blocks * (1 + wide + tall)
    atomics = blocks * (1 + 2 * wide + tall)  # a norm publishes, a hidden tile does both
    return e * (norm + hidden + down) + 12 * tasks + 8 * atomics


def _program(dtype: str, M: int = 64, *, odd: bool = False) -> Program:
    data = ("x_ptr", "weight_ptr", "gate_ptr", "up_ptr", "down_ptr", "norm_ptr", "hidden_ptr")
    types = {
        "tasks_ptr": "*i32",
        "counters_ptr": "*i32",
        **dict.fromkeys((*data, "y_ptr"), f"*{dtype}"),
        **dict.fromkeys(("n_tasks", "M", "D", "H"), "i32"),
        "eps": "fp32",
        "programs": "i32",
    }
    sizes = kernel.settings(M, 65 if odd else 64, 64, HALF if dtype == "fp16" else torch.float32)
    num_warps = sizes.pop("num_warps")
    aligned = [a for a in types if a.endswith("_ptr")] + ([] if odd else ["D", "H"])
    return Program(kernel.mega_mlp_kernel, types, sizes, tuple(aligned), num_warps=num_warps)


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "x": torch.ones(2, 3),
        "weight": torch.ones(3),
        "gate": torch.ones(3, 4),
        "up": torch.ones(3, 4),
        "down": torch.ones(4, 3),
    }
    return BadCall(lambda: mega_mlp(**{**good, **change}), message)


def _eager(x: Inputs) -> torch.Tensor:
    """Five kernels, as one writes it."""
    n = torch.nn.functional.rms_norm(x["x"], (x["x"].shape[1],), x["weight"], eps=1e-6)
    return (torch.nn.functional.silu(n @ x["gate"]) * (n @ x["up"])) @ x["down"]


def _bench(device: torch.device) -> Inputs:
    return {
        name: t.to(device)
        for name, t in _case(16, 4096, 14336, dtype=HALF)
        .make(torch.Generator().manual_seed(0))
        .items()
    }


SPEC = KernelSpec(
    name="mega_mlp",
    op=lambda x: (mega_mlp(**x),),
    launch=lambda x: (kernel.launch(**x),),
    truth=lambda x: (kernel.reference(**x),),
    scale=_scale,
    cases={
        "M=1": _case(1, 32, 48),
        "M=17 hidden 100": _case(17, 40, 100),
        "M=33": _case(33, 64, 64),
        "D=1 H=1": _case(3, 1, 1),
        "float16": _case(17, 48, 100, dtype=HALF),
        "float16 decode": _case(5, 64, 130, dtype=HALF),
        "float16 two row blocks": _case(70, 64, 72, dtype=HALF),
        "a row of zeros": _case(4, 16, 20, zero=True),
        "strided": _case(6, 24, 40, strided=True),
    },
    bytes=_bytes,
    flops=lambda x: 6 * x["x"].numel() * x["gate"].shape[1],
    programs={
        "fp16 M=64": _program("fp16"),
        "fp16 decode": _program("fp16", 16),
        "fp32 M=64": _program("fp32"),
        "fp32 odd": _program("fp32", odd=True),
        "fp16 odd": _program("fp16", odd=True),
    },
    errors={
        "x a vector": _bad("x must be", x=torch.ones(3)),
        "weight of another size": _bad("weight must be", weight=torch.ones(2)),
        "gate of another size": _bad("gate must be", gate=torch.ones(4, 4)),
        "up of another size": _bad("up must be", up=torch.ones(3, 5)),
        "down of another size": _bad("down must be", down=torch.ones(3, 4)),
        "eps": _bad("eps must be", eps=0.0),
        "x of integers": _bad("x must have dtype", x=torch.ones(2, 3).long()),
        "down of another dtype": _bad("down must have dtype", down=torch.ones(4, 3).double()),
        "elsewhere": _bad("must share a device", up=torch.ones(3, 4, device="meta")),
    },
    bench=_bench,
    timed=lambda x: mega_mlp(**x),
    baselines={"eager": _eager},
    note="in decoding the three matrices are read once; launches and waves are what it saves",
)
