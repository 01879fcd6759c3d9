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

With bfloat16 parameters and gradients and float32 state it is 22 bytes. Nothing is read twice, so
the step is bound by memory: at 128-bit loads and stores it should reach the copy bandwidth of the
card, 4.8 TB/s on an H200, for tensors of a few million entries and more.

|g|^p is computed in float32 as exp2(p log2 |g|). Below |g| = 2^(-126/p) it is a denormal that
GPUs flush to zero, and its square vanishes below 2^(-63/p) (1.6e-16 at p = 1.2): v is then 0 and
eps keeps the quotient finite.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from icmllab.kernels.runtime import cdiv, check_dtype, jit, runs_triton, tl

BLOCK = 1024
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Step(NamedTuple):
    """What one step makes of a tensor: the parameter and its two moments."""

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@jit
def adamw_power_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    finite_ptr,
    n,
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
    SKIP_NONFINITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of one tensor in place; grid (blocks,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if SKIP_NONFINITE:
        inside = inside & (tl.load(finite_ptr) != 0)
    g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    if not POWER_IS_ONE:
        size = tl.abs(g)
        power = tl.where(size == 0.0, 0.0, tl.exp2(p * tl.log2(size)))
        g = tl.where(g < 0.0, -power, power)
    m = tl.load(exp_avg_ptr + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0)
    x = tl.load(param_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    x = decay * x - step_size * m / (tl.sqrt(v) / root_bias2 + eps)
    tl.store(exp_avg_ptr + at, m, mask=inside)
    tl.store(exp_avg_sq_ptr + at, v, mask=inside)
    tl.store(param_ptr + at, x.to(param_ptr.dtype.element_ty), mask=inside)


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
    """Run the Triton kernel on checked tensors, wherever they are; one launch a tensor."""
    if not params:
        return
    finite = all_finite(grads) if skip_nonfinite else params[0]
    scale = grad_scale * clip_scale * (-1.0 if maximize else 1.0)
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        if param.numel() == 0:
            continue
        adamw_power_kernel[(cdiv(param.numel(), BLOCK),)](
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            finite,
            param.numel(),
            scale,
            p,
            beta1,
            beta2,
            1.0 - beta1,
            1.0 - beta2,
            1.0 - lr * weight_decay,
            lr / (1.0 - beta1**step),
            (1.0 - beta2**step) ** 0.5,
            eps,
            POWER_IS_ONE=p == 1.0,
            SKIP_NONFINITE=skip_nonfinite,
            BLOCK=BLOCK,
            num_warps=4,
        )


def all_finite(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """One int32 on the device: 1 when every gradient is finite, else 0; the host does not wait."""
    return torch.stack([torch.isfinite(g).all() for g in grads]).all().to(torch.int32).reshape(1)


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
    x = (1 - lr * weight_decay) * param.to(m.dtype) - lr / (1 - beta1**step) * m / denom
    return Step(x.to(param.dtype), m, v)


def _step_foreach(params, grads, exp_avgs, exp_avg_sqs, **options) -> None:
    """The step over lists of tensors, in place, a handful of calls for all tensors of a dtype."""
    groups: dict[tuple, list[int]] = {}
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        groups.setdefault((param.dtype, grad.dtype, param.device), []).append(i)
    for index in groups.values():
        lists = [[t[i] for i in index] for t in (params, grads, exp_avgs, exp_avg_sqs)]
        _step_group(*lists, **options)


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
    wide = [t.to(state) for t in params] if low else params
    torch._foreach_mul_(wide, 1 - lr * weight_decay)
    torch._foreach_addcdiv_(wide, exp_avgs, denom, -lr / (1 - beta1**step))
    if low:
        torch._foreach_copy_(params, wide)


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

    Args:
        params: contiguous tensors of any shape, float32, bfloat16 or float64.
        grads: their gradients, same shapes, float32, bfloat16 or float64; left as they are.
        exp_avgs: first moments, float32 (float64 for float64 parameters).
        exp_avg_sqs: second moments, the same.
        step: the number of this step, from 1, for bias correction.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the corrected second moment, used as given.
        weight_decay: decoupled decay, times ``lr``.
        p: the exponent, > 0; 1 is AdamW itself.
        grad_scale: factor that undoes a loss scaling, applied before the power.
        clip_scale: factor of a global-norm clip, applied before the power.
        maximize: step along the gradient instead of against it.
        skip_nonfinite: leave everything as it is when any gradient holds inf or NaN; otherwise
            they propagate. The caller's step count is its own affair.

    Raises:
        ValueError: lists, shapes, dtypes or strides that do not fit, or a bad number.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if len({len(t) for t in lists.values()}) != 1:
        sizes = ", ".join(f"{name} {len(t)}" for name, t in lists.items())
        raise ValueError(f"params, grads, exp_avgs, exp_avg_sqs must have one length: got {sizes}")
    for name, value in (("p", p), ("lr", lr)):
        if not (value == value and abs(value) != float("inf")):
            raise ValueError(f"{name} must be finite: got {value}")
    if p <= 0:
        raise ValueError(f"p must be > 0: got {p}")
    if step < 1:
        raise ValueError(f"step must be >= 1: got {step}")
    if eps < 0:
        raise ValueError(f"eps must be >= 0: got {eps}")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must be in [0, 1): got {beta}")
    for i, param in enumerate(params):
        check_dtype(f"params[{i}]", param, PARAM_DTYPES)
        check_dtype(f"grads[{i}]", grads[i], PARAM_DTYPES)
        state = torch.float64 if param.dtype == torch.float64 else torch.float32
        for name in ("grads", "exp_avgs", "exp_avg_sqs"):
            if lists[name][i].shape != param.shape:
                raise ValueError(
                    f"{name}[{i}] must have the shape of params[{i}]: got "
                    f"{tuple(lists[name][i].shape)}, {tuple(param.shape)}"
                )
        for name in ("exp_avgs", "exp_avg_sqs"):
            check_dtype(f"{name}[{i}]", lists[name][i], (state,))
        for name, tensors in lists.items():
            if not tensors[i].is_contiguous():
                raise ValueError(
                    f"{name}[{i}] must be contiguous: got strides {tensors[i].stride()}"
                )
    options = {
        "step": step,
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "p": p,
        "grad_scale": grad_scale,
        "clip_scale": clip_scale,
        "maximize": maximize,
    }
    if not params:
        return
    double = any(t.dtype == torch.float64 for t in params)
    if runs_triton(*params, *grads) and not double:
        launch(params, grads, exp_avgs, exp_avg_sqs, **options, skip_nonfinite=skip_nonfinite)
    elif not (skip_nonfinite and not bool(all_finite(grads))):
        _step_foreach(params, grads, exp_avgs, exp_avg_sqs, **options)
