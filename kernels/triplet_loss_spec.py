"""The proofs of :mod:`icmllab.kernels.triplet_loss`."""

import torch

from icmllab.kernels import triplet_loss as kernel
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv
from icmllab.kernels.triplet_loss import triplet_loss, triplet_loss_fwd_bwd

# in units of the absolute terms; a difference of squares inherits their rounding
TOLERANCE = (1e-6,)


def random_triplets(
    n: int, m: int, generator: torch.Generator, *, anchors: int | None = None
) -> torch.Tensor:
    """(m, 3) int64, three different points each; the anchor among the first ``anchors``."""
    first = torch.randint(0, anchors or n, (m, 1), generator=generator)
    # two different steps round the circle of points
    steps = torch.stack([torch.randperm(n - 1, generator=generator)[:2] + 1 for _ in range(m)])
    return torch.cat([first, (first + steps) % n], dim=1)


def _case(
    n: int,
    m: int,
    d: int,
    *,
    deterministic: bool = False,
    gradient: bool = True,
    anchors: int | None = None,
    scale: float = 1.0,
    integers: bool = False,
    index: torch.dtype = torch.int32,
    strided: bool = False,
    lists: bool = False,
) -> Case:
    """``integers``: coordinates 0, 1, 2, so that many distances tie exactly. With fewer than three
    points a triplet names one of them three times: a tie without gradient."""

    def make(g: torch.Generator) -> Inputs:
        X = torch.randn(n, d, generator=g) / d**0.5
        if integers:
            X = torch.randint(0, 3, (n, d), generator=g).float()
        if strided:
            X = torch.stack([X, -X], dim=2).reshape(n, 2 * d)[:, ::2]
        triplets = torch.zeros(m, 3, dtype=torch.int64)
        if n >= 3:
            triplets = random_triplets(n, m, g, anchors=anchors)
        triplets = triplets.to(index)
        return {
            "X": X,
            "triplets": triplets,
            "scale": scale,
            "gradient": gradient,
            "deterministic": deterministic,
            "lists": list(kernel.incidences(triplets, n)) if lists else [],
        }

    return Case(make, TOLERANCE)


def _options(x: Inputs) -> dict:
    options = {k: x[k] for k in ("scale", "gradient", "deterministic")}
    return {**options, "lists": kernel.Incidences(*x["lists"]) if x["lists"] else None}


def _vector(step: kernel.TripletStep) -> Outputs:
    """Loss, hits and gradient as one vector, which every part of the proofs can hold."""
    parts = [step.loss.double()[None], step.hits[None]]
    parts += [] if step.grad is None else [step.grad.flatten().double()]
    return (torch.cat(parts),)


def _eager(x: Inputs) -> torch.Tensor:
    """What people write: gather, subtract, square, sum, softplus, and autograd."""
    X = x["X"].detach().requires_grad_()
    i, j, k = x["triplets"].long().unbind(dim=1)
    near = (X[i] - X[j]).square().sum(dim=1)
    far = (X[i] - X[k]).square().sum(dim=1)
    loss = torch.logaddexp(torch.zeros_like(near), x["scale"] * (near - far)).mean()
    hits = (torch.sign(far - near) + 1).sum() / 2
    if not x["gradient"]:
        return torch.stack([loss.detach(), hits.detach()])
    (grad,) = torch.autograd.grad(loss, X)
    return torch.cat([loss.detach()[None], hits.detach()[None], grad.flatten()])


def _scale(x: Inputs) -> Outputs:
    """Absolute terms: of the loss, 1 for the hits, of each entry of the gradient."""
    X, scale, m = x["X"], abs(x["scale"]), len(x["triplets"])
    i, j, k = x["triplets"].long().unbind(dim=1)
    a, b = (X[i] - X[j]).abs(), (X[i] - X[k]).abs()
    near, far = a.square().sum(dim=1), b.square().sum(dim=1)
    z = x["scale"] * (near - far)
    # rounding of z moves the loss by sigma(z) times, and q by the same share of itself
    moved = torch.sigmoid(z) * scale * (near + far)
    parts = [(torch.nn.functional.softplus(z) + moved).mean()[None], torch.ones_like(z[:1])]
    if x["gradient"]:
        w = (2 * scale / m * torch.sigmoid(z) * (1 + scale * (near + far)))[:, None]
        grad = torch.zeros_like(X)
        for rows, terms in ((i, a + b), (j, a), (k, b)):
            grad.index_add_(0, rows, w * terms)
        parts.append(grad.flatten())
    return (torch.cat(parts),)


def _bytes(x: Inputs) -> int:
    """Loads, stores and atomic adds; an add reads and writes its entry, 12 md bytes each way."""
    (n, d), m = x["X"].shape, len(x["triplets"])
    block_t, block_d = kernel.block_sizes(d)
    atomic = x["gradient"] and not x["deterministic"]
    sweeps = 1 if d <= kernel.MAX_COLUMNS else 1 + atomic
    total = cdiv(m, block_t) * 8 + 12 * m + sweeps * 12 * m * d + atomic * 24 * m * d
    if x["gradient"] and x["deterministic"]:
        slices = cdiv(d, block_d)
        total += 4 * m  # q
        # two starts a program; code, two indices and q an incidence; its two rows; the gradient
        total += slices * (8 * n + 16 * 3 * m) + 3 * m * 8 * d + 4 * n * d
    return total


def _program(
    d: int, *, deterministic: bool = False, gradient: bool = True, odd: bool = False
) -> Program:
    """``odd``: d is no multiple of 16 and no power of two."""
    block_t, block_d = kernel.block_sizes(d)
    types = {
        "x_ptr": "*fp32",
        "triplet_ptr": "*i32",
        **dict.fromkeys(("loss_ptr", "hits_ptr", "q_ptr", "grad_ptr"), "*fp32"),
        **dict.fromkeys(("n_triplets", "d"), "i32"),
        **dict.fromkeys(("scale", "scale_over_m"), "fp32"),
    }
    constants = {
        "ATOMIC": gradient and not deterministic,
        "STORE_Q": gradient and deterministic,
        "ONE_SWEEP": d <= kernel.MAX_COLUMNS,
        "WHOLE": d == block_d,
        "BLOCK_T": block_t,
        "BLOCK_D": block_d,
    }
    aligned = ["x_ptr", "triplet_ptr", "loss_ptr", "hits_ptr", "q_ptr", "grad_ptr"]
    if d == 1:
        constants["d"] = 1
        del types["d"]
    elif not odd:
        aligned.append("d")
    wide = 12 * block_t * block_d if d == block_d and d > 1 else 0
    return Program(kernel.triplet_loss_kernel, types, constants, tuple(aligned), wide_loads=wide)


def _gather(d: int, *, odd: bool = False) -> Program:
    block_t, block_d = kernel.block_sizes(d)
    types = {
        "x_ptr": "*fp32",
        "triplet_ptr": "*i32",
        "q_ptr": "*fp32",
        "starts_ptr": "*i32",
        "codes_ptr": "*i32",
        "grad_ptr": "*fp32",
        **({} if d == 1 else {"d": "i32"}),
        **({} if d <= block_d else {"n_slices": "i32"}),
    }
    constants = {
        **({"d": 1} if d == 1 else {}),
        **({"n_slices": 1} if d <= block_d else {}),
        "WHOLE": d % block_d == 0,
        "BLOCK_E": min(kernel.WALK, block_t),
        "BLOCK_D": block_d,
    }
    aligned = ["x_ptr", "triplet_ptr", "q_ptr", "starts_ptr", "codes_ptr", "grad_ptr"]
    aligned += [] if odd or d == 1 else ["d"]
    wide = 8 * min(kernel.WALK, block_t) * block_d if d % block_d == 0 and d > 1 else 0
    return Program(kernel.triplet_gather_kernel, types, constants, tuple(aligned), wide_loads=wide)


def _bad(message: str, **change: object) -> BadCall:
    good = {"X": torch.zeros(4, 2), "triplets": torch.tensor([[0, 1, 2]])}
    options = {k: change.pop(k) for k in ("scale", "lists") if k in change}
    return BadCall(lambda: triplet_loss_fwd_bwd(**{**good, **change}, **options), message)


def _bench(device: torch.device) -> Inputs:
    """A slice of the large instance of the chapter: 2^20 triplets of 2^14 points."""
    g = torch.Generator().manual_seed(0)
    n, m, d = 2**14, 2**20, 256
    first = torch.randint(0, n, (m, 1), generator=g)
    steps = torch.cat([torch.randint(1, n // 2, (m, 1), generator=g), first * 0 + n // 2], dim=1)
    triplets = torch.cat([first, (first + steps) % n], dim=1).to(torch.int32).to(device)
    return {
        "X": (torch.randn(n, d, generator=g) / d**0.5).to(device),
        "triplets": triplets,
        "scale": 1.0,
        "gradient": True,
        "deterministic": True,
        "lists": list(kernel.incidences(triplets, n)),
    }


SPEC = KernelSpec(
    name="triplet_loss",
    op=lambda x: _vector(triplet_loss_fwd_bwd(x["X"], x["triplets"], **_options(x))),
    launch=lambda x: _vector(kernel.launch(x["X"], x["triplets"], **_options(x))),
    truth=lambda x: (_eager(x),),
    scale=_scale,
    cases={
        "one point": _case(1, 1, 1),
        "one point deterministic": _case(1, 2, 1, deterministic=True),
        "m=1 d=1": _case(3, 1, 1),
        "m=1 d=1 deterministic": _case(3, 1, 1, deterministic=True),
        "m=127 d=1 below a block": _case(9, 127, 1, index=torch.int64),
        "m=128 d=1 a block": _case(9, 128, 1),
        "m=129 d=1 past a block": _case(9, 129, 1),
        "m=129 d=1 deterministic": _case(9, 129, 1, deterministic=True),
        "m=300 d=3 ties": _case(12, 300, 3, integers=True),
        "m=70 d=5 strided": _case(12, 70, 5, strided=True),
        "m=130 d=16 a power of two": _case(40, 130, 16, scale=3.0),
        "m=130 d=16 deterministic": _case(40, 130, 16, scale=3.0, deterministic=True),
        "m=200 d=33 one anchor": _case(60, 200, 33, anchors=1),
        "m=200 d=33 one anchor deterministic": _case(60, 200, 33, anchors=1, deterministic=True),
        "m=61 d=257": _case(20, 61, 257),
        "m=61 d=257 deterministic with lists": _case(20, 61, 257, deterministic=True, lists=True),
        "m=33 d=64 loss alone": _case(30, 33, 64, gradient=False),
        "m=90 d=8 large scale": _case(12, 90, 8, scale=60.0),
        "m=40 d=8 negative scale": _case(12, 40, 8, scale=-2.0),
        "m=9 d=1025 two sweeps": _case(7, 9, 1025),
        "m=9 d=2048 two sweeps": _case(7, 9, 2048),
        "m=9 d=1025 deterministic": _case(7, 9, 1025, deterministic=True),
        "m=9 d=2048 loss alone": _case(7, 9, 2048, gradient=False),
        "points in no triplet": _case(500, 4, 6, deterministic=True),
        # the most work, so that the repeated run on a GPU is of the form that promises it
        "m=700 d=300 deterministic": _case(50, 700, 300, deterministic=True),
    },
    bytes=_bytes,
    flops=lambda x: len(x["triplets"]) * x["X"].shape[1] * (6 + 9 * x["gradient"]),
    programs={
        "atomic d=256": _program(256),
        "atomic d=300": _program(300, odd=True),
        "atomic d=1": _program(1),
        "atomic d=2048": _program(2048),
        "q d=256": _program(256, deterministic=True),
        "loss d=16": _program(16, gradient=False),
        "gather d=256": _gather(256),
        "gather d=300": _gather(300, odd=True),
        "gather d=1": _gather(1),
    },
    errors={
        "X a vector": _bad(r"X must have shape \(n, d\)", X=torch.zeros(4)),
        "X without columns": _bad(r"X must have shape \(n, d\) with d >= 1", X=torch.zeros(4, 0)),
        "X of integers": _bad("X must have dtype", X=torch.zeros(4, 2, dtype=torch.int64)),
        "no triplets": _bad(
            r"triplets must have shape \(m, 3\) with m >= 1",
            triplets=torch.zeros(0, 3, dtype=torch.int64),
        ),
        "pairs": _bad(r"triplets must have shape \(m, 3\)", triplets=torch.tensor([[0, 1]])),
        "triplets of floats": _bad("triplets must have dtype", triplets=torch.zeros(1, 3)),
        "a point too many": _bad(
            r"triplets must hold entries in 0\.\.3: got 4", triplets=torch.tensor([[0, 1, 4]])
        ),
        "a negative point": _bad(
            r"triplets must hold entries in 0\.\.3: got -1", triplets=torch.tensor([[-1, 1, 2]])
        ),
        "scale infinite": _bad("scale must be finite: got inf", scale=float("inf")),
        "scale nan": _bad("scale must be finite: got nan", scale=float("nan")),
        "lists of others": _bad(
            "lists must belong to 4 points and 1 triplets: got 5 points and 1 triplets",
            lists=kernel.incidences(torch.tensor([[0, 1, 2]]), 5),
        ),
        "elsewhere": _bad(
            "must share a device", triplets=torch.zeros(1, 3, dtype=torch.int64, device="meta")
        ),
        "the differentiable form checks too": BadCall(
            lambda: triplet_loss(torch.zeros(4, 2), torch.tensor([[0, 1, 4]])), "triplets must hold"
        ),
    },
    bench=_bench,
    timed=lambda x: triplet_loss_fwd_bwd(x["X"], x["triplets"], **_options(x)),
    baselines={"eager": _eager},
    note="the deterministic form; the atomic one moves the same bytes, 2/3 of them as atomics",
)
