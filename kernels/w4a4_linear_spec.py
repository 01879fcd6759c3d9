"""The proofs of :mod:`icmllab.kernels.w4a4_linear`."""

import torch

from icmllab.kernels import w4a4_linear as kernel
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv
from icmllab.kernels.w4a4_linear import w4a4_linear


def _case(
    m: int, n: int, out: int, *, group: int, zeros: bool = False, extreme: bool = False
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        x = torch.randint(0, 256, (m, n // 2), generator=g).to(torch.uint8)
        w = torch.randint(0, 256, (out, n // 2), generator=g).to(torch.uint8)
        sx = 0.01 + torch.rand(m, n // group, generator=g)
        sw = (0.01 + torch.rand(out, n // group, generator=g)) / n
        if extreme:  # −8 everywhere: the largest sums there are
            x, w = torch.full_like(x, 0x88), torch.full_like(w, 0x88)
        if zeros:  # as a group of zeros is stored
            x[:, : group // 2], sx[:, 0] = 0, 1e-8
            w[0], sw[0] = 0, 1e-8
        return {"x_packed": x, "sx": sx, "w_packed": w, "sw": sw}

    return Case(make, (1e-3,))


def _truth(x: Inputs) -> Outputs:
    return (kernel.reference(**x),)


def _scale(x: Inputs) -> Outputs:
    """The sum of the absolute terms."""
    left, right = kernel.decode(x["x_packed"], x["sx"]), kernel.decode(x["w_packed"], x["sw"])
    return (left.abs() @ right.abs().T + 1e-6,)


def _bytes(x: Inputs) -> int:
    """Codes and scales of each side once for every tile of the other, y once."""
    (m, half), (out, _), groups = x["x_packed"].shape, x["w_packed"].shape, x["sx"].shape[1]
    sizes = kernel.settings(m)
    across, down = cdiv(out, sizes["N"]), cdiv(m, sizes["M"])
    row = half + 4 * groups
    return across * m * row + down * out * row + 2 * m * out


def _eager(x: Inputs) -> torch.Tensor:
    """Both sides dequantised, then a product in float16 (float64 where the scales are)."""
    wide = x["sx"].dtype
    dtype = torch.float64 if wide == torch.float64 else torch.float16
    left, right = (kernel.decode(x[f"{a}_packed"], x[f"s{a}"]).to(dtype) for a in ("x", "w"))
    return torch.nn.functional.linear(left, right)


def _program(group: int, *, m: int = 512) -> Program:
    types = {
        **dict.fromkeys(("x_ptr", "w_ptr"), "*u8"),
        **dict.fromkeys(("sx_ptr", "sw_ptr"), "*fp32"),
        "y_ptr": "*fp16",
        **dict.fromkeys(("m", "out", "groups"), "i32"),
    }
    sizes = kernel.settings(m)
    num_warps = sizes.pop("num_warps")
    aligned = (*(a for a in types if a.endswith("_ptr")), "out", "groups")
    return Program(
        kernel.w4a4_linear_kernel, types, {"G": group, **sizes}, aligned, num_warps=num_warps
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "x_packed": torch.zeros(3, 32, dtype=torch.uint8),
        "sx": torch.ones(3, 2),
        "w_packed": torch.zeros(5, 32, dtype=torch.uint8),
        "sw": torch.ones(5, 2),
    }
    return BadCall(lambda: w4a4_linear(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    made = {
        "x_packed": torch.randint(0, 256, (2048, 2048), generator=g).to(torch.uint8),
        "sx": torch.rand(2048, 64, generator=g),
        "w_packed": torch.randint(0, 256, (4096, 2048), generator=g).to(torch.uint8),
        "sw": torch.rand(4096, 64, generator=g) / 4096,
    }
    return {name: t.to(device) for name, t in made.items()}


SPEC = KernelSpec(
    name="w4a4_linear",
    op=lambda x: (w4a4_linear(**x),),
    launch=lambda x: (kernel.launch(**x),),
    truth=_truth,
    scale=_scale,
    cases={
        "m=1 n=64 out=33 G=32": _case(1, 64, 33, group=32),
        "m=1 n=64 out=33 G=64": _case(1, 64, 33, group=64),
        "one group of 32": _case(5, 32, 17, group=32),
        "one group of 128": _case(5, 128, 17, group=128),
        "m=65 n=256 out=65 G=64": _case(65, 256, 65, group=64),
        "m=17 n=96 out=64 G=32": _case(17, 96, 64, group=32),
        "m=16 n=384 out=128 G=128": _case(16, 384, 128, group=128),
        "groups of zeros": _case(9, 128, 40, group=32, zeros=True),
        "all -8": _case(4, 128, 16, group=128, extreme=True),
        "out=1": _case(3, 64, 1, group=32),
    },
    bytes=_bytes,
    flops=lambda x: 4 * x["x_packed"].numel() * len(x["w_packed"]),
    programs={
        **{f"G={g} decode": _program(g, m=16) for g in kernel.GROUPS},
        **{f"G={g} prefill": _program(g) for g in kernel.GROUPS},
    },
    errors={
        "x_packed a vector": _bad("x_packed must be", x_packed=torch.zeros(3).to(torch.uint8)),
        "x_packed as int8": _bad("x_packed must have dtype", x_packed=torch.zeros(3, 32).char()),
        "w_packed of other inputs": _bad(
            "w_packed must have the inputs", w_packed=torch.zeros(5, 16).to(torch.uint8)
        ),
        "sx of other rows": _bad("sx must be", sx=torch.ones(2, 2)),
        "groups that do not divide": _bad("divides n=64", sx=torch.ones(3, 3), sw=torch.ones(5, 3)),
        "sw of other groups": _bad("sw must be", sw=torch.ones(5, 4)),
        "sx in half": _bad("sx must have dtype", sx=torch.ones(3, 2).half()),
        "sw of another dtype": _bad("sw must have the dtype", sw=torch.ones(5, 2).double()),
        "elsewhere": _bad("must share a device", sw=torch.ones(5, 2, device="meta")),
    },
    bench=_bench,
    timed=lambda x: w4a4_linear(**x),
    baselines={"eager": _eager},
    note="eager multiplies in float16, from matrices that it first writes",
)
