"""The proofs of :mod:`icmllab.kernels.fuse_scatter`."""

import torch

from icmllab.kernels import fuse_scatter as kernel
from icmllab.kernels.fuse_scatter import fuse_scatter
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program


def _case(
    images: int,
    n: int,
    r: int,
    d: int,
    *,
    dtype: torch.dtype = torch.float32,
    kappa: float = 1.5,
    crowd: bool = False,
    zeros: bool = False,
    far: bool = False,
) -> Case:
    """``crowd`` sends all sources to the last token, ``far`` puts the tokens far from 0."""

    def make(g: torch.Generator) -> Inputs:
        x = torch.randn(images, n, d, generator=g)
        if zeros:
            x[:, ::2] = 0
        if far:
            x[:, :, 0] += 100
        order = torch.rand(images, n, generator=g).argsort(dim=1).int()
        keep = n - r
        dst = torch.randint(keep, (images, r), generator=g)
        if crowd:
            dst[:] = keep - 1
        made = {
            "x": x.to(dtype),
            "weight": 0.1 + torch.rand(images, n, generator=g),
            "sizes": torch.randint(1, 9, (images, n), generator=g).float(),
            "pos": 10 * torch.rand(images, n, 2, generator=g),
            "keep": order[:, :keep].clone(),
            "src": order[:, keep:].clone(),
            "dst": dst.int(),
        }
        return {**made, "kappa": kappa}

    # a float16 is off by 2^-11 of its size
    return Case(make, (6e-4 if dtype == torch.float16 else 2e-6, 1e-6, 2e-6))


def _loop(x: Inputs) -> Outputs:
    """Token by token, as the formula says."""
    out, sizes, pos = [], [], []
    for b in range(len(x["x"])):
        for j, token in enumerate(x["keep"][b].tolist()):
            group = [token, *x["src"][b][x["dst"][b] == j].tolist()]
            rows, w, s = x["x"][b, group], x["weight"][b, group], x["sizes"][b, group]
            mean = (w[:, None] * rows).sum(0) / w.sum()
            energy = float((w * rows.norm(dim=1)).sum() / w.sum())
            factor = min(energy / max(float(mean.norm()), 1e-6), x["kappa"])
            out.append(mean * factor if len(group) > 1 else rows[0])
            sizes.append(s.sum())
            pos.append((s[:, None] * x["pos"][b, group]).sum(0) / s.sum())
    shape = x["keep"].shape
    return (
        torch.stack(out).reshape(*shape, -1),
        torch.stack(sizes).reshape(shape),
        torch.stack(pos).reshape(*shape, 2),
    )


def _scale(x: Inputs) -> Outputs:
    """The longest of the rows that a token is made of; sizes and positions of themselves."""
    length = x["x"].norm(dim=2)
    most = length.gather(1, x["keep"].long())
    most = most.scatter_reduce(1, x["dst"].long(), length.gather(1, x["src"].long()), "amax")
    _, sizes, pos = kernel.reference(**x)
    wide = (x["kappa"] * most)[..., None].expand(-1, -1, x["x"].shape[2])
    return wide, sizes, pos.abs().clamp_min(1.0)


def _bytes(x: Inputs) -> int:
    """What stays and the sources once, with weight, size and position; what comes out once."""
    images, d = len(x["x"]), x["x"].shape[2]
    row = d * x["x"].element_size() + 16
    kept, merged = x["keep"].shape[1], x["src"].shape[1]
    read = kept * (row + 12) + merged * (row + 4)
    return images * (read + kept * (d * x["x"].element_size() + 12))


def _eager(x: Inputs) -> Outputs:
    """Gather, scatter-add and divide, one quantity at a time."""
    image = torch.arange(len(x["x"]), device=x["x"].device)[:, None]
    keep, src, dst = (x[k].long() for k in ("keep", "src", "dst"))
    wide = torch.promote_types(x["x"].dtype, torch.float32)
    rows, w, s, p = (x[k].to(wide) for k in ("x", "weight", "sizes", "pos"))

    def total(values: torch.Tensor) -> torch.Tensor:
        return values[image, keep].index_put((image, dst), values[image, src], accumulate=True)

    weight, size = total(w), total(s)
    mean = total(rows * w[..., None]) / weight[..., None]
    energy = total(rows.norm(dim=2) * w) / weight
    factor = (energy / mean.norm(dim=2).clamp_min(1e-6)).clamp_max(x["kappa"])
    alone = total(torch.ones_like(w)) == 1
    factor = torch.where(alone, 1.0, factor)
    out = (mean * factor[..., None]).to(x["x"].dtype)
    return out, size, total(p * s[..., None]) / size[..., None]


def _program(d: int, dtype: str = "fp16", *, odd: bool = False) -> Program:
    types = {
        "x_ptr": f"*{dtype}",
        **dict.fromkeys(("weight_ptr", "sizes_ptr", "pos_ptr"), "*fp32"),
        **dict.fromkeys(("keep_ptr", "start_ptr", "src_ptr"), "*i32"),
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("out_sizes_ptr", "out_pos_ptr"), "*fp32"),
        **dict.fromkeys(("n", "kept", "merged", "d", "tiles"), "i32"),
        "kappa": "fp32",
    }
    constants = kernel.settings(d)
    num_warps = constants.pop("num_warps")
    aligned = [a for a in types if a.endswith("_ptr")] + ([] if odd else ["d"])
    entries = constants["ROWS"] * constants["COLS"] * (2 if dtype == "fp16" else 4)
    return Program(
        kernel.fuse_scatter_kernel,
        types,
        constants,
        tuple(aligned),
        num_warps=num_warps,
        # rows that stay, and a row of sources; then what comes out
        wide_loads=0 if odd else 2 * entries,
        wide_stores=0 if odd else entries,
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "x": torch.ones(2, 5, 4),
        "weight": torch.ones(2, 5),
        "sizes": torch.ones(2, 5),
        "pos": torch.zeros(2, 5, 2),
        "keep": torch.tensor([[0, 1, 2]] * 2),
        "src": torch.tensor([[3, 4]] * 2),
        "dst": torch.tensor([[0, 2]] * 2),
    }
    return BadCall(lambda: fuse_scatter(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    images, n, r, d = 256, 1024, 256, 768
    order = torch.rand(images, n, generator=g).argsort(dim=1).int()
    made = {
        "x": torch.randn(images, n, d, generator=g).half(),
        "weight": 0.1 + torch.rand(images, n, generator=g),
        "sizes": torch.ones(images, n),
        "pos": torch.rand(images, n, 2, generator=g),
        "keep": order[:, r:].contiguous(),
        "src": order[:, :r].contiguous(),
        "dst": torch.randint(n - r, (images, r), generator=g).int(),
    }
    return {**{name: t.to(device) for name, t in made.items()}, "kappa": 1.5}


SPEC = KernelSpec(
    name="fuse_scatter",
    op=lambda x: tuple(fuse_scatter(**x)),
    launch=lambda x: tuple(kernel.launch(**x)),
    truth=_loop,
    scale=_scale,
    cases={
        "n=2 r=1 d=1": _case(1, 2, 1, 1),
        "no source": _case(2, 9, 0, 32),
        "n=129 r=34 d=48": _case(2, 129, 34, 48),
        "n=33 half of them": _case(2, 33, 16, 64),
        "d=768 float16": _case(2, 20, 7, 768, dtype=torch.float16),
        "d=64 float16": _case(2, 40, 13, 64, dtype=torch.float16),
        "d=100": _case(1, 30, 10, 100),
        "d=2048": _case(1, 5, 2, 2048),
        "all into one": _case(2, 40, 20, 32, crowd=True),
        "one stays": _case(1, 9, 8, 20),
        "kappa 1": _case(1, 30, 12, 24, kappa=1.0),
        "kappa large": _case(1, 30, 12, 24, kappa=100.0),
        "zero rows": _case(2, 30, 14, 24, zeros=True),
        "an outlying channel": _case(1, 30, 14, 24, far=True),
    },
    bytes=_bytes,
    flops=lambda x: (
        len(x["x"]) * x["x"].shape[2] * (8 * x["keep"].shape[1] + 4 * x["src"].shape[1])
    ),
    programs={
        "fp16 d=64": _program(64),
        "fp16 d=768": _program(768),
        "fp16 d=2048": _program(2048),
        "fp32 d=48": _program(48, "fp32"),
        "fp32 d=768": _program(768, "fp32"),
        "fp32 d odd": _program(63, "fp32", odd=True),
    },
    errors={
        "x a matrix": _bad("x must be", x=torch.ones(5, 4)),
        "x of integers": _bad("x must have dtype", x=torch.ones(2, 5, 4).long()),
        "weight of another shape": _bad("weight must have shape", weight=torch.ones(2, 4)),
        "sizes of another shape": _bad("sizes must have shape", sizes=torch.ones(2, 5, 1)),
        "pos of another shape": _bad("pos must have shape", pos=torch.zeros(2, 5)),
        "keep of another batch": _bad("keep must be", keep=torch.tensor([[0, 1, 2]])),
        "src of floats": _bad("src must have dtype", src=torch.ones(2, 2)),
        "src past the end": _bad("src must hold entries", src=torch.full((2, 2), 5)),
        "dst past the end": _bad(r"dst must hold entries in 0\.\.2", dst=torch.full((2, 2), 3)),
        "dst of another length": _bad("dst must have shape", dst=torch.zeros(2, 1).long()),
        "kappa below 1": _bad("kappa must be", kappa=0.9),
        "elsewhere": _bad("must share a device", weight=torch.ones(2, 5, device="meta")),
    },
    bench=_bench,
    timed=lambda x: fuse_scatter(**x),
    baselines={"eager": _eager},
    note="256 images of 1024 tokens in float16; memory sets the limit",
)
