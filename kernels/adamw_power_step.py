r"""One step of AdamW on sign-powered gradients, fused.

    g  <- s * g                      unscale and clip (s < 0 maximises)
    g~ <- sign(g) |g|^p              sign-power
    m  <- b1 m + (1 - b1) g~
    v  <- b2 v + (1 - b2) g~^2
    x  <- (1 - lr wd) x - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

Bytes moved for one float32 parameter:

| step | reads | writes | bytes |
|---|---|---|---|
| fused | x, g, m, v | x, m, v | 28 |
| eager, some 29 tensor passes | | | about 116 |
| eager sign-power, then torch's fused AdamW | | | 36 + 28 |

With bfloat16 parameters and gradients and float32 moments it is 22 bytes. All tensors of a device
and pair of dtypes go in one launch: each program looks up its tensor (an entry of two int32 lists)
and that tensor's four addresses and size (five int64), 48 bytes beside the 28 kB of its block.
Nothing is read twice, so the step is bound by memory: with 128-bit loads and stores it should
come close to the copy bandwidth of the card for a few million parameters and more.

|g|^p is computed in float32 as exp2(p log2 |g|), with the rounding of p log2 |g| and of p itself:
up to 3.8e-6 relative. Below |g| = 2^(-126/p) it is a denormal that GPUs flush to zero, and its
square vanishes below 2^(-63/p) (1.6e-16 at p = 1.2): v is then 0 and eps keeps the quotient
finite; with eps = 0 such an entry makes no step. A zero gradient stays zero. A square above 2^128
makes v infinite, as it does at p = 1. bfloat16 parameters keep 8 bits: updates below 2^-9 of a
parameter round away.

Source: "GradPower: Powering Gradients for Faster Language Model Pre-Training". The kernel is ours.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from icmllab.kernels.runtime import (
    HAS_TRITON,
    cdiv,
    check_dtype,
    check_same_device,
    jit,
    on_device,
    runs_triton,
    tl,
)

BLOCK = 1024
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TRITON_DTYPES = (
    {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    if HAS_TRITON
    else {}
)


class Step(NamedTuple):
    """What one step makes of a tensor: the parameter and its two moments."""

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@jit
def _update(
    x_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    at,
    inside,
    scale,
    p,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    decay,
    step_size,
    root_bias2,
    eps,
    POWER_IS_ONE: tl.constexpr,
):
    """The step at the offsets ``at``; ``inside`` masks them, None means all."""
    g = tl.load(g_ptr + at, mask=inside).to(tl.float32) * scale
    m = tl.load(m_ptr + at, mask=inside)
    v = tl.load(v_ptr + at, mask=inside)
    x = tl.load(x_ptr + at, mask=inside).to(tl.float32)
    if not POWER_IS_ONE:
        size = tl.abs(g)
        power = tl.where(size == 0.0, 0.0, tl.exp2(p * tl.log2(size)))
        g = tl.where(g < 0.0, -power, power)
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    denom = tl.sqrt(v) / root_bias2 + eps
    # with eps = 0 and v = 0 there is nothing to divide by, and no step
    x = decay * x - tl.where(denom == 0.0, 0.0, step_size * m / denom)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=inside)


@jit
def adamw_power_kernel(
    table_ptr,
    tensor_ptr,
    block_ptr,
    finite_ptr,
    scale,
    p,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    decay,
    step_size,
    root_bias2,
    eps,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    POWER_IS_ONE: tl.constexpr,
    SKIP_NONFINITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of one of many tensors in place; grid (blocks of all tensors,)."""
    tensor = tl.load(tensor_ptr + tl.program_id(0))
    start = tl.load(block_ptr + tl.program_id(0)).to(tl.int64) * BLOCK
    row = table_ptr + 5 * tensor
    x_ptr = tl.load(row).to(tl.pointer_type(PARAM))
    g_ptr = tl.load(row + 1).to(tl.pointer_type(GRAD))
    m_ptr = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    v_ptr = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    n = tl.load(row + 4)
    if ALIGNED:
        # an address that comes out of memory carries no alignment, and accesses would be scalar
        x_ptr = tl.multiple_of(x_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        v_ptr = tl.multiple_of(v_ptr, 16)
    if SKIP_NONFINITE:
        n = tl.where(tl.load(finite_ptr) != 0, n, 0)
    at = start + tl.arange(0, BLOCK)
    # whole blocks go without a mask, so that they are vectorised whatever the size of the tensor
    if start + BLOCK <= n:
        _update(
            x_ptr, g_ptr, m_ptr, v_ptr, at, None,
            scale, p, beta1, beta2, one_minus_beta1, one_minus_beta2,
            decay, step_size, root_bias2, eps, POWER_IS_ONE,
        )  # fmt: skip
    else:
        _update(
            x_ptr, g_ptr, m_ptr, v_ptr, at, at < n,
            scale, p, beta1, beta2, one_minus_beta1, one_minus_beta2,
            decay, step_size, root_bias2, eps, POWER_IS_ONE,
        )  # fmt: skip


def launch(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    p: float,
    grad_scale: float = 1.0,
    clip_scale: float = 1.0,
    maximize: bool = False,
    skip_nonfinite: bool = False,
) -> None:
    """Run the Triton kernel on checked tensors, wherever they are.

    One launch for all tensors of a device and pair of dtypes: they are told apart by a table of
    addresses and sizes.
    """
    scale = grad_scale * clip_scale * (-1.0 if maximize else 1.0)
    groups = _groups(params, grads, exp_avgs, exp_avg_sqs)
    finite = all_finite(grads) if skip_nonfinite and groups else None
    for lists in groups:
        first = lists[0][0]
        sizes = tuple(t.numel() for t in lists[0])
        addresses = [[t.data_ptr() for t in tensors] for tensors in lists]
        aligned = all(a % 16 == 0 for row in addresses for a in row)
        table = torch.tensor([*addresses, sizes], dtype=torch.int64).T.contiguous()
        if first.is_cuda:  # from pinned memory the copy needs no wait
            table = table.pin_memory().to(first.device, non_blocking=True)
        tensor, block = _blocks(sizes, first.device)
        with on_device(first):
            adamw_power_kernel[(len(block),)](
                table,
                tensor,
                block,
                table if finite is None else finite.to(first.device, non_blocking=True),
                scale,
                float(p),
                float(beta1),
                float(beta2),
                1.0 - beta1,
                1.0 - beta2,
                1.0 - lr * weight_decay,
                lr / (1.0 - beta1**step),
                (1.0 - beta2**step) ** 0.5,
                float(eps),
                PARAM=TRITON_DTYPES[first.dtype],
                GRAD=TRITON_DTYPES[lists[1][0].dtype],
                ALIGNED=aligned,
                POWER_IS_ONE=p == 1.0,
                SKIP_NONFINITE=skip_nonfinite,
                BLOCK=BLOCK,
                num_warps=4,
            )


def _groups(*lists: Sequence[torch.Tensor]) -> list[tuple[list[torch.Tensor], ...]]:
    """The lists split by device and dtypes, without the tensors that hold nothing."""
    split: dict[tuple, list[tuple[torch.Tensor, ...]]] = {}
    for four in zip(*lists, strict=True):
        if four[0].numel():
            key = (four[0].device, *(t.dtype for t in four))
            split.setdefault(key, []).append(four)
    return [tuple(map(list, zip(*fours, strict=True))) for fours in split.values()]


@lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each program the tensor it works on and its block there; sizes stay over a training."""
    counts = torch.tensor([cdiv(n, BLOCK) for n in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    starts = torch.cumsum(counts, 0) - counts
    block = torch.arange(len(tensor)) - starts[tensor]
    return tensor.to(torch.int32).to(device), block.to(torch.int32).to(device)


def all_finite(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """One int32: 1 when no gradient holds inf or NaN, else 0; the host does not wait for it."""
    grads = [g for g in grads if g.numel()]
    if not grads:
        return torch.ones(1, dtype=torch.int32)
    # the largest absolute value of each, one read of each, no temporary of its size
    largest = torch._foreach_norm(grads, float("inf"))
    where = grads[0].device
    finite = torch.stack([x.isfinite().to(where, non_blocking=True) for x in largest])
    return finite.all().to(torch.int32).reshape(1)


def sign_power_eager(grad: torch.Tensor, p: float) -> torch.Tensor:
    """sign(g) |g|^p in the dtype of ``grad``; NaN and the infinities pass through."""
    return grad if p == 1.0 else grad.abs().pow(p).copysign(grad)


def reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    p: float,
    grad_scale: float = 1.0,
    clip_scale: float = 1.0,
    maximize: bool = False,
) -> Step:
    """One tensor's step in plain PyTorch, nothing in place; float64 gives the truth."""
    g = grad.to(exp_avg.dtype) * (grad_scale * clip_scale * (-1.0 if maximize else 1.0))
    g = sign_power_eager(g, p)
    m = beta1 * exp_avg + (1 - beta1) * g
    v = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = v.sqrt() / (1 - beta2**step) ** 0.5 + eps
    denom = denom.masked_fill(denom == 0, math.inf)
    x = (1 - lr * weight_decay) * param.to(m.dtype) - lr / (1 - beta1**step) * m / denom
    return Step(x.to(param.dtype), m, v)


def _step_group(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    *,
    step,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    p,
    grad_scale,
    clip_scale,
    maximize,
) -> None:
    """The step over tensors of one device and dtypes, in place, a handful of calls for them all."""
    state = exp_avgs[0].dtype
    low = params[0].dtype != state
    scale = grad_scale * clip_scale * (-1.0 if maximize else 1.0)
    g = [t.to(state) for t in grads]
    if scale != 1.0:
        g = torch._foreach_mul(g, scale)
    if p != 1.0:
        size = torch._foreach_abs(g)
        torch._foreach_pow_(size, p)
        g = [a.copysign_(b) for a, b in zip(size, g, strict=True)]
    torch._foreach_lerp_(exp_avgs, g, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, g, g, 1 - beta2)
    denom = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denom, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(denom, eps)
    if eps == 0:
        for d in denom:
            d.masked_fill_(d == 0, math.inf)
    wide = [t.to(state) for t in params] if low else params
    torch._foreach_mul_(wide, 1 - lr * weight_decay)
    torch._foreach_addcdiv_(wide, exp_avgs, denom, -lr / (1 - beta1**step))
    if low:
        torch._foreach_copy_(params, wide)


@torch.no_grad()
def adamw_power_step(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    p: float,
    grad_scale: float = 1.0,
    clip_scale: float = 1.0,
    maximize: bool = False,
    skip_nonfinite: bool = False,
) -> None:
    """Update parameters and moments in place by one AdamW step on sign(g)|g|^p.

    The order is unscale, clip, power, moments, decay, update. At p = 1 the power is left out and
    the step is that of ``torch.optim.AdamW``. Empty lists and empty tensors change nothing.

    Args:
        params: contiguous tensors of any shape, float32, bfloat16, float16 or float64.
        grads: their gradients, same shapes, one of these dtypes each; left as they are.
        exp_avgs: first moments, contiguous, float32 (float64 for float64 parameters).
        exp_avg_sqs: second moments, the same.
        step: the number of this step, from 1, for bias correction.
        lr: learning rate, >= 0.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the corrected second moment, used as given, >= 0. At 0 an entry
            whose second moment is 0 makes no step.
        weight_decay: decoupled decay, times ``lr``.
        p: the exponent, > 0.
        grad_scale: factor that undoes a loss scaling, applied before the power.
        clip_scale: factor of a global-norm clip, applied before the power.
        maximize: step along the gradient instead of against it.
        skip_nonfinite: leave every tensor as it is when any gradient of the lists holds inf or
            NaN, as gradient scalers do; it costs one more read of the gradients, and the host
            does not wait for the answer on a GPU. Otherwise inf and NaN propagate. Whoever counts
            steps counts a skipped one too.

    Raises:
        ValueError: lists, shapes, dtypes, devices or strides that do not fit, or a bad number.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    _check_tensors(lists)
    options = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "p": p,
        "grad_scale": grad_scale,
        "clip_scale": clip_scale,
    }
    _check_numbers(options)
    if step < 1 or step != int(step):
        raise ValueError(f"step must be a whole number >= 1: got {step}")
    options |= {"step": step, "maximize": maximize}
    double = any(t.dtype == torch.float64 for t in (*params, *grads))
    if runs_triton(*params) and not double:
        launch(params, grads, exp_avgs, exp_avg_sqs, **options, skip_nonfinite=skip_nonfinite)
    elif not (skip_nonfinite and not bool(all_finite(grads))):
        for group in _groups(params, grads, exp_avgs, exp_avg_sqs):
            _step_group(*group, **options)


def _check_tensors(lists: dict[str, Sequence[torch.Tensor]]) -> None:
    if len({len(t) for t in lists.values()}) != 1:
        sizes = ", ".join(f"{name} {len(t)}" for name, t in lists.items())
        raise ValueError(f"params, grads, exp_avgs, exp_avg_sqs must have one length: got {sizes}")
    for i, four in enumerate(zip(*lists.values(), strict=True)):
        param, grad, *moments = four
        named = {f"{name}[{i}]": t for name, t in zip(lists, four, strict=True)}
        check_dtype(f"params[{i}]", param, PARAM_DTYPES)
        check_dtype(f"grads[{i}]", grad, PARAM_DTYPES)
        state = torch.float64 if param.dtype == torch.float64 else torch.float32
        for name, moment in zip(("exp_avgs", "exp_avg_sqs"), moments, strict=True):
            check_dtype(f"{name}[{i}]", moment, (state,))
        check_same_device(**named)
        for name, tensor in named.items():
            if tensor.shape != param.shape:
                raise ValueError(
                    f"{name} must have the shape of params[{i}], {tuple(param.shape)}: got "
                    f"{tuple(tensor.shape)}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous: got strides {tensor.stride()}")


def _check_numbers(options: dict[str, float]) -> None:
    for name, value in options.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite: got {value}")
    if options["p"] <= 0:
        raise ValueError(f"p must be > 0: got {options['p']}")
    for name in ("lr", "eps"):
        if options[name] < 0:
            raise ValueError(f"{name} must be >= 0: got {options[name]}")
    for name in ("beta1", "beta2"):
        if not 0 <= options[name] < 1:
            raise ValueError(f"{name} must be in [0, 1): got {options[name]}")
