"""The proofs of :mod:`icmllab.kernels.adamw_power_step`."""

from collections.abc import Callable

import torch

from icmllab.kernels import adamw_power_step as kernel
from icmllab.kernels.adamw_power_step import adamw_power_step
from icmllab.kernels.registry import (
    BadCall,
    Case,
    Inputs,
    KernelSpec,
    Outputs,
    Program,
    map_tensors,
)
from icmllab.kernels.runtime import cdiv

OPTIONS = {
    "step": 3,
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "p": 1.2,
}

# parameter, first and second moment
FLOAT32 = (1e-6, 1e-5, 2e-5)
LOW = (1e-2, 1e-5, 2e-5)
DRIFT = (1e-5, 1e-5, 2e-5)

# below this float32 has no relative precision, and GPUs flush to zero
TINY = 1e-33


def _tensors(shape, dtype: torch.dtype, grad_dtype: torch.dtype, steps: int, g: torch.Generator):
    param, exp_avg = (torch.randn(shape, generator=g) for _ in range(2))
    exp_avg_sq = torch.rand(shape, generator=g)
    # gradients spread over six decades
    grads = torch.randn((steps, *shape), generator=g)
    grads = (grads * 10 ** (-6 * torch.rand((steps, *shape), generator=g))).to(grad_dtype)
    return param.to(dtype), list(grads), 0.1 * exp_avg, exp_avg_sq


def _case(
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    steps: int = 1,
    gradient: tuple[float, ...] = (),
    unaligned: bool = False,
    tolerance: tuple[float, float, float] = FLOAT32,
    **options: float,
) -> Case:
    """``gradient``: values that the first entries of each gradient take, moments being zero there.
    ``steps``: that many steps, one after the other, each with gradients of its own."""

    def make(g: torch.Generator) -> Inputs:
        made = [_tensors(s, dtype, grad_dtype or dtype, steps, g) for s in shapes]
        params, grads, exp_avgs, exp_avg_sqs = (list(t) for t in zip(*made, strict=True))
        for i in range(len(made)):
            for entry, value in enumerate(gradient):
                for grad in grads[i]:
                    grad.view(-1)[entry] = value
                exp_avgs[i].view(-1)[entry] = exp_avg_sqs[i].view(-1)[entry] = 0.0
        if unaligned:  # contiguous, but four bytes after an address that 16 divides
            params = [torch.cat([t.new_zeros(1), t.flatten()])[1:] for t in params]
        return {
            "params": params,
            "grads": [list(t) for t in zip(*grads, strict=True)],
            "exp_avgs": exp_avgs,
            "exp_avg_sqs": exp_avg_sqs,
            "options": {**OPTIONS, **options},
        }

    return Case(make, tolerance)


def _steps(step: Callable[..., None], x: Inputs) -> Outputs:
    state = x["params"], x["exp_avgs"], x["exp_avg_sqs"]
    for i, grads in enumerate(x["grads"]):
        options = {**x["options"], "step": x["options"]["step"] + i}
        step(x["params"], grads, x["exp_avgs"], x["exp_avg_sqs"], **options)
    return tuple(torch.cat([t.flatten().double() for t in tensors]) for tensors in state)


def _truth_step(params, grads, exp_avgs, exp_avg_sqs, *, skip_nonfinite=False, **options) -> None:
    if skip_nonfinite and not all(torch.isfinite(g).all() for g in grads):
        return
    for four in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        param, _, exp_avg, exp_avg_sq = four
        done = kernel.reference(*four, **options)
        param.copy_(done.param)
        exp_avg.copy_(done.exp_avg)
        exp_avg_sq.copy_(done.exp_avg_sq)


def _scale(x: Inputs) -> Outputs:
    """Steps on absolute values, updates added up instead of taken off.

    A single update inherits the relative errors of both moments, 2e-5, twenty times what a
    parameter may have. The drift over many steps has no such allowance.
    """
    weight = 20 if len(x["grads"]) == 1 else 1

    def step(params, grads, exp_avgs, exp_avg_sqs, *, maximize=False, **options) -> None:
        decay = 1 - options["lr"] * options["weight_decay"]
        for tensor in (*grads, *exp_avgs):
            tensor.abs_()
        kept = [decay * p for p in params]
        _truth_step(params, grads, exp_avgs, exp_avg_sqs, **options)
        for param, before in zip(params, kept, strict=True):
            param.copy_(before + weight * (before - param).abs())

    for param in x["params"]:
        param.abs_()
    return tuple(t.clamp(min=TINY) for t in _steps(step, x))


def _bytes(x: Inputs) -> int:
    """x, g, m, v read; x, m, v written; a program's look-ups, and a flag where one is asked for."""
    skip = x["options"].get("skip_nonfinite", False)
    total = 0
    for grads in x["grads"]:
        idle = skip and not all(torch.isfinite(g).all() for g in grads)
        for param, grad in zip(x["params"], grads, strict=True):
            n = param.numel()
            total += cdiv(n, kernel.BLOCK) * (48 + 4 * skip)
            total += 0 if idle else n * (2 * param.element_size() + grad.element_size() + 16)
    return total


def _program(
    param: torch.dtype = torch.float32,
    grad: torch.dtype = torch.float32,
    *,
    power_is_one: bool = False,
    skip: bool = False,
    aligned: bool = True,
) -> Program:
    scalars = ("scale", "p", "beta1", "beta2", "one_minus_beta1", "one_minus_beta2")
    scalars += ("decay", "step_size", "root_bias2", "eps")
    signature = {
        "table_ptr": "*i64",
        "tensor_ptr": "*i32",
        "block_ptr": "*i32",
        "finite_ptr": "*i32",
        **dict.fromkeys(scalars, "fp32"),
    }
    constants = {
        "PARAM": kernel.TRITON_DTYPES.get(param),
        "GRAD": kernel.TRITON_DTYPES.get(grad),
        "ALIGNED": aligned,
        "POWER_IS_ONE": power_is_one,
        "SKIP_NONFINITE": skip,
        "BLOCK": kernel.BLOCK,
    }
    # on AMD a thread's four entries of 2 bytes make 64 bits
    wide = sum(size for size in (param.itemsize, grad.itemsize) if size == 4) if aligned else 0
    moments = 8 if aligned else 0
    pointers = ("table_ptr", "tensor_ptr", "block_ptr", "finite_ptr")
    return Program(
        kernel.adamw_power_kernel,
        signature,
        constants,
        pointers,
        wide_loads=kernel.BLOCK * (wide + moments),
        wide_stores=kernel.BLOCK * (moments + (4 if aligned and param.itemsize == 4 else 0)),
    )


def _bad(message: str, **change: object) -> BadCall:
    def call() -> None:
        good = {
            "params": [torch.ones(4)],
            "grads": [torch.ones(4)],
            "exp_avgs": [torch.zeros(4)],
            "exp_avg_sqs": [torch.zeros(4)],
        }
        adamw_power_step(**{**good, **OPTIONS, **change})

    return BadCall(call, message)


def _bench(device: torch.device) -> Inputs:
    """The tensors of a GPT of 12 layers and width 768: 124 million parameters in 149 tensors."""
    d = 768
    weights = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
    vectors = [(3 * d,), (d,), (4 * d,), (d,), (d,), (d,), (d,), (d,)]
    case = _case((50257, d), (1024, d), *((weights + vectors) * 12), (d,), (d,), (d,))
    made = case.make(torch.Generator().manual_seed(0))
    return map_tensors(lambda t: t.to(device), made)


def _lists(x: Inputs) -> tuple[list[torch.Tensor], ...]:
    return x["params"], x["grads"][0], x["exp_avgs"], x["exp_avg_sqs"]


def _timed(x: Inputs) -> None:
    adamw_power_step(*_lists(x), **x["options"])


def _eager(x: Inputs) -> None:
    """Tensor by tensor and operation by operation, as optimisers are written first."""
    o = x["options"]
    for param, grad, m, v in zip(*_lists(x), strict=True):
        g = grad.sign() * grad.abs() ** o["p"]
        param.mul_(1 - o["lr"] * o["weight_decay"])
        m.lerp_(g, 1 - o["beta1"])
        v.mul_(o["beta2"]).addcmul_(g, g, value=1 - o["beta2"])
        root = (v.sqrt() / (1 - o["beta2"] ** o["step"]) ** 0.5).add_(o["eps"])
        param.addcdiv_(m, root, value=-o["lr"] / (1 - o["beta1"] ** o["step"]))


def _torch_fused(x: Inputs) -> None:
    """Sign-power with multi-tensor calls, then torch's fused AdamW."""
    options = dict(x["options"])
    params, given, exp_avgs, exp_avg_sqs = _lists(x)
    grads = torch._foreach_abs(given)
    torch._foreach_pow_(grads, options.pop("p"))
    torch._foreach_mul_(grads, torch._foreach_sign(given))
    step = torch.full((), float(options.pop("step")), device=grads[0].device)
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step.clone() for _ in grads],
        amsgrad=False,
        maximize=False,
        **options,
    )


INF = float("inf")

SPEC = KernelSpec(
    name="adamw_power_step",
    op=lambda x: _steps(adamw_power_step, x),
    launch=lambda x: _steps(kernel.launch, x),
    truth=lambda x: _steps(_truth_step, x),
    scale=_scale,
    cases={
        "float32 one entry": _case((1,)),
        "float32 1023": _case((1023,)),
        "float32 1024": _case((1024,)),
        "float32 1025": _case((1025,)),
        "float32 (3, 7, 150)": _case((3, 7, 150)),
        "float32 a scalar": _case(()),
        "float32 nothing": _case((0,)),
        "float32 five tensors": _case((1025,), (0, 3), (1,), (64, 48), ()),
        "float32 unaligned": _case((1500,), unaligned=True),
        "float32 zero and denormal": _case((300,), gradient=(0.0, -0.0, 1e-40, -1e-40, 1e-20)),
        "float32 inf and NaN": _case((300,), gradient=(INF, -INF, float("nan"))),
        "float32 p=1": _case((1025,), p=1.0),
        "float32 p=1 inf": _case((40,), p=1.0, gradient=(INF,)),
        "float32 p=0.5": _case((1025,), p=0.5),
        "float32 p=2": _case((300,), p=2.0),
        "float32 p=3 maximize": _case((300,), p=3.0, maximize=True),
        "float32 scaled and clipped": _case((1025,), grad_scale=1 / 1024, clip_scale=0.3),
        "float32 maximize": _case((500,), maximize=True),
        "float32 first step": _case((500,), step=1, weight_decay=0.0),
        "float32 step 10000, beta2=0.999": _case((500,), step=10000, beta2=0.999),
        "float32 large eps": _case((500,), eps=1e-2),
        "float32 zero gradient, eps=0": _case(
            (300,), gradient=(0.0, -0.0), eps=0.0, grad_scale=0.5
        ),
        "float32 no momentum": _case((500,), beta1=0.0),
        "float32 strong decay": _case((500,), weight_decay=100.0),
        "float32 finite, skip asked for": _case((1025,), (7,), skip_nonfinite=True),
        "float32 inf skipped": _case((1025,), (7,), skip_nonfinite=True, gradient=(1.0, -INF)),
        "float32 100 steps": _case((200,), steps=100, step=1, tolerance=DRIFT),
        "bfloat16 one entry": _case((1,), dtype=torch.bfloat16, tolerance=LOW),
        "bfloat16 1025": _case((1025,), dtype=torch.bfloat16, tolerance=LOW),
        "bfloat16 p=1.5": _case((400,), dtype=torch.bfloat16, p=1.5, tolerance=LOW),
        "bfloat16 gradients of float32": _case((1025,), grad_dtype=torch.bfloat16),
        "bfloat16 with float32 gradients": _case(
            (1030,), dtype=torch.bfloat16, grad_dtype=torch.float32, tolerance=LOW
        ),
        "float16 1025": _case((1025,), dtype=torch.float16, tolerance=LOW),
    },
    bytes=_bytes,
    flops=lambda x: 20 * sum(p.numel() for p in x["params"]),
    programs={
        "fp32": _program(),
        "fp32 p=1 skip": _program(power_is_one=True, skip=True),
        "fp32 unaligned": _program(aligned=False),
        "fp32, bf16 gradients": _program(grad=torch.bfloat16),
        "bf16": _program(torch.bfloat16, torch.bfloat16),
        "fp16": _program(torch.float16, torch.float16),
    },
    errors={
        "p zero": _bad("p must be > 0: got 0", p=0.0),
        "p negative": _bad("p must be > 0", p=-1.0),
        "p not finite": _bad("p must be finite", p=float("nan")),
        "lr not finite": _bad("lr must be finite", lr=INF),
        "lr negative": _bad("lr must be >= 0", lr=-1e-3),
        "weight_decay not finite": _bad("weight_decay must be finite", weight_decay=INF),
        "grad_scale not finite": _bad("grad_scale must be finite", grad_scale=INF),
        "step zero": _bad("step must be a whole number >= 1: got 0", step=0),
        "step a fraction": _bad("step must be a whole number", step=1.5),
        "eps negative": _bad("eps must be >= 0", eps=-1.0),
        "beta1 one": _bad(r"beta1 must be in \[0, 1\)", beta1=1.0),
        "beta2 negative": _bad(r"beta2 must be in \[0, 1\)", beta2=-0.1),
        "grads missing": _bad("must have one length: got params 1, grads 0", grads=[]),
        "grads of another shape": _bad(r"grads\[0\] must have the shape", grads=[torch.ones(3)]),
        "grads of integers": _bad(r"grads\[0\] must have dtype", grads=[torch.ones(4).long()]),
        "grads not contiguous": _bad(r"grads\[0\] must be contiguous", grads=[torch.ones(8)[::2]]),
        "params not contiguous": _bad(
            r"params\[0\] must be contiguous", params=[torch.ones(8)[::2]]
        ),
        "params complex": _bad(
            r"params\[0\] must have dtype", params=[torch.zeros(4, dtype=torch.complex64)]
        ),
        "exp_avgs of float64": _bad(
            r"exp_avgs\[0\] must have dtype float32", exp_avgs=[torch.zeros(4).double()]
        ),
        "exp_avg_sqs elsewhere": _bad(
            "must share a device", exp_avg_sqs=[torch.zeros(4, device="meta")]
        ),
    },
    bench=_bench,
    timed=_timed,
    baselines={"eager": _eager, "torch fused": _torch_fused},
)
