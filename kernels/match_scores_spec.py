"""The proofs of :mod:`icmllab.kernels.match_scores`."""

import torch

from icmllab.kernels import match_scores as kernel
from icmllab.kernels.match_scores import Match, match_scores
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv

# a score is a sum of d products in float32 and two terms more; places are exact
TOLERANCE = (2e-6, 0.0)
EXACT = (0.0, 0.0)


def _case(
    images: int,
    n: int,
    d: int,
    n_a: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    lam: float = 0.2,
    gamma: float = 0.6,
    sigma: float = 1.5,
    ties: bool = False,
    zeros: bool = False,
    with_class: bool = False,
) -> Case:
    """``n_a`` None takes the larger half. Lists are random tokens in order."""

    def make(g: torch.Generator) -> Inputs:
        keys = torch.randn(images, n + with_class, d, generator=g)
        if ties:  # four entries of ±1 a row, and few rows: norms and products are exact
            places = torch.rand(images, n, d, generator=g).argsort(dim=2)[:, :, :4] % max(4, d)
            signs = torch.randint(0, 2, places.shape, generator=g) * 2.0 - 1
            keys = torch.zeros(images, n, d).scatter_(2, places, signs)
        if zeros:
            keys[:, ::3] = 0
        keys = keys.to(dtype)[:, with_class:]  # a view that starts at the second token
        m = -(-n // 2) if n_a is None else n_a
        order = torch.rand(images, n, generator=g).argsort(dim=1)
        mass = 0.1 + torch.rand(images, n, generator=g).exp()
        made = {
            "keys": keys,
            "a": order[:, :m].sort(dim=1).values.int(),
            "b": order[:, m:].sort(dim=1).values.int(),
            "pos": 8 * torch.rand(images, n, 2, generator=g),
            "mass": mass,
            "scale": 1 / mass.amax(dim=1),
        }
        return {**made, "lam": lam, "gamma": gamma, "sigma": sigma}

    return Case(make, EXACT if ties else TOLERANCE)


def _outputs(found: Match) -> Outputs:
    return found.best, found.index


def _eager(x: Inputs) -> Outputs:
    """Pair by pair as the formula says: gathers, an outer difference, a matrix, its maximum."""
    wide = torch.promote_types(x["keys"].dtype, torch.float32)
    image = torch.arange(len(x["keys"]), device=x["keys"].device)[:, None]
    a, b = x["a"].long(), x["b"].long()
    unit = torch.nn.functional.normalize(x["keys"].to(wide), dim=2, eps=1e-300)
    score = torch.einsum("bid,bjd->bij", unit[image, a], unit[image, b])
    far = (x["pos"][image, a][:, :, None] - x["pos"][image, b][:, None]).norm(dim=3)
    score = score + x["lam"] * torch.exp(-0.5 * (far / x["sigma"]) ** 2)
    pair = (x["mass"][image, a][:, :, None] * x["mass"][image, b][:, None]).sqrt()
    score = score - x["gamma"] * pair * x["scale"][:, None, None]
    return tuple(score.max(dim=2))


def _scale(x: Inputs) -> Outputs:
    """The terms of a score add up to at most 1 + λ + γ; places are counted in whole numbers."""
    ones = torch.ones(x["a"].shape, dtype=torch.float64)
    return ones * (1 + x["lam"] + x["gamma"]), ones


def _bytes(x: Inputs) -> int:
    """Sources once, or once a tile of targets where they are not held; targets for 64 sources."""
    images, n_a = x["a"].shape
    (n_b, d), size = (x["b"].shape[1], x["keys"].shape[2]), x["keys"].element_size()
    held = kernel.settings(d, narrow=size == 2)["HOLD"]
    tiles, passes = cdiv(n_a, kernel.ROWS), 1 if held else cdiv(n_b, kernel.TILE)
    sources = n_a * (passes * d * size + 16)
    targets = tiles * n_b * (d * size + 16)
    return images * (sources + targets + 4 * tiles + 8 * n_a)


def _program(d: int, dtype: str = "fp16", *, odd: bool = False) -> Program:
    types = {
        "keys_ptr": f"*{dtype}",
        "a_ptr": "*i32",
        "b_ptr": "*i32",
        **dict.fromkeys(("pos_ptr", "mass_ptr", "scale_ptr", "best_ptr"), "*fp32"),
        "index_ptr": "*i32",
        **dict.fromkeys(("n", "n_a", "n_b", "d", "image_stride", "row_stride", "tiles"), "i32"),
        **dict.fromkeys(("lam", "gamma", "reach"), "fp32"),
    }
    constants = kernel.settings(d, narrow=dtype == "fp16")
    num_warps = constants.pop("num_warps")
    aligned = [a for a in types if a.endswith("_ptr")]
    if not odd:
        aligned += ["d", "image_stride", "row_stride"]
    return Program(
        kernel.match_scores_kernel, types, constants, tuple(aligned), num_warps=num_warps
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "keys": torch.ones(2, 5, 4),
        "a": torch.tensor([[0, 2, 4]] * 2),
        "b": torch.tensor([[1, 3]] * 2),
        "pos": torch.zeros(2, 5, 2),
        "mass": torch.ones(2, 5),
        "scale": torch.ones(2),
    }
    return BadCall(lambda: match_scores(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    images, n, d = 64, 1024, 64
    order = torch.rand(images, n, generator=g).argsort(dim=1).int()
    mass = 0.1 + torch.rand(images, n, generator=g)
    side = torch.arange(32.0)
    made = {
        "keys": torch.randn(images, n, d, generator=g).half(),
        "a": order[:, : n // 2].sort(dim=1).values,
        "b": order[:, n // 2 :].sort(dim=1).values,
        "pos": torch.cartesian_prod(side, side).expand(images, n, 2),
        "mass": mass,
        "scale": 1 / mass.amax(dim=1),
    }
    moved = {name: t.to(device) for name, t in made.items()}
    return {**moved, "lam": 0.2, "gamma": 0.6, "sigma": 1.5}


SPEC = KernelSpec(
    name="match_scores",
    op=lambda x: _outputs(match_scores(**x)),
    launch=lambda x: _outputs(kernel.launch(**x)),
    truth=_eager,
    scale=_scale,
    cases={
        "n=2": _case(1, 2, 16),
        "n=3 d=1": _case(2, 3, 1),
        "n=128 d=48": _case(2, 128, 48),
        "n=127 past the half": _case(1, 127, 64),
        "n=130 past a tile": _case(2, 130, 64),
        "n=257 d=64 float16": _case(1, 257, 64, dtype=torch.float16),
        "d=128": _case(1, 40, 128),
        "d=129 in pieces": _case(1, 40, 129),
        "d=768 float16": _case(1, 150, 768, dtype=torch.float16),
        "d=100 float16": _case(2, 66, 100, dtype=torch.float16),
        "one source": _case(1, 70, 20, 1),
        "one target": _case(1, 70, 20, 69),
        "tome": _case(2, 90, 32, lam=0.0, gamma=0.0),
        "window alone, narrow": _case(1, 90, 32, gamma=0.0, sigma=0.1),
        "infinite window": _case(1, 50, 32, sigma=float("inf")),
        "equal scores": _case(2, 150, 8, lam=0.0, gamma=0.0, ties=True),
        "zero rows": _case(1, 60, 24, zeros=True),
        "behind a class token": _case(2, 65, 48, with_class=True),
    },
    bytes=_bytes,
    flops=lambda x: 2 * x["a"].numel() * x["b"].shape[1] * x["keys"].shape[2],
    programs={
        "fp16 d=64": _program(64),
        "fp16 d=48": _program(48),
        "fp16 d=128": _program(128),
        "fp16 d=768": _program(768),
        "fp16 d odd": _program(63, odd=True),
        "fp32 d=64": _program(64, "fp32"),
        "fp32 d=128": _program(128, "fp32"),
        "fp32 d=768": _program(768, "fp32"),
    },
    errors={
        "keys a matrix": _bad("keys must be", keys=torch.ones(5, 4)),
        "keys of integers": _bad("keys must have dtype", keys=torch.ones(2, 5, 4).long()),
        "a of another batch": _bad("a must be", a=torch.tensor([[0, 2, 4]])),
        "a of floats": _bad("a must have dtype", a=torch.zeros(2, 3)),
        "a past the end": _bad(r"a must hold entries in 0\.\.4: got 5", a=torch.full((2, 1), 5)),
        "b empty": _bad("b must be .* at least one target", b=torch.zeros(2, 0).long()),
        "b below zero": _bad("b must hold entries", b=torch.full((2, 1), -1)),
        "pos of another shape": _bad("pos must have shape", pos=torch.zeros(2, 5, 3)),
        "mass of another shape": _bad("mass must have shape", mass=torch.ones(2, 4)),
        "scale of another shape": _bad("scale must have shape", scale=torch.ones(2, 1)),
        "sigma zero": _bad("sigma must be > 0", sigma=0.0),
        "lam infinite": _bad("lam and gamma must be finite", lam=float("inf")),
        "elsewhere": _bad("must share a device", mass=torch.ones(2, 5, device="meta")),
    },
    bench=_bench,
    timed=lambda x: match_scores(**x),
    baselines={"eager": _eager},
    note="64 images of 1024 tokens with 64 channels, the keys of a ViT-B averaged over heads",
)
