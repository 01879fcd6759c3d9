r"""GradPower: raise each gradient entry to a power before any optimiser sees it.

φ_p(g) = sign(g)|g|^p, elementwise, p > 0; the optimiser and its settings stay as they are. After
"GradPower: Powering Gradients for Faster Language Model Pre-Training" (arXiv 2505.24275). The
transform, AdamWPower and p = 1.2 are the paper's; the noise theory, Muon's form, the experiments
and their criteria are our reconstruction, derived and tested here.

The order in a step is: backward, all-reduce, unscale, clip the global norm, φ_p, optimiser. φ_p
is not linear: applied to micro-batches before they are added up, or before the clip, it is
another algorithm.

Notation: a gradient entry is g = μ + σξ with E ξ = 0, E ξ² = 1; u_p = E φ_p(g) / √(E|g|^{2p}) is
Adam's mean step in units of its learning rate.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from icmllab.kernels.adamw_power_step import adamw_power_step
from icmllab.toolbox.fit import PairedRuns, fit
from icmllab.toolbox.gpt import GPT, GPTConfig
from icmllab.toolbox.schedules import cosine_schedule, wsd_schedule
from icmllab.toolbox.text import batch_starts, load_char_data, split_tokens, windows

__all__ = [
    "SHIPPED",
    "STUDIES",
    "AdamWPower",
    "BestPower",
    "CharLM",
    "GradPower",
    "MuonPower",
    "best_drift_power",
    "best_power",
    "burst_gain",
    "char_batches",
    "check_best_power",
    "check_power_step",
    "check_sign_power",
    "check_stein",
    "check_triangular_gain",
    "cosine_schedule",
    "draw_noise",
    "drift",
    "drift_curve",
    "gain_factor",
    "gradient_rows",
    "make_gradients",
    "newton_schulz5",
    "noise_density",
    "noise_stats",
    "paired_losses",
    "powered_density",
    "rate_gap",
    "river_valley",
    "score_power",
    "sign_power",
    "sign_power_",
    "simulate_bursts",
    "simulate_drift",
    "simulate_tempering",
    "study_run",
    "tempered_logit",
    "train_char_lm",
    "train_char_lm_with",
    "train_gpt",
    "wsd_schedule",
]

Noise = str | tuple[str, float]
"""A law of ξ: "rademacher", "uniform", "gaussian", "laplace", or ("gennorm", k)."""


# The transform


def _check_power(p: float, name: str = "p") -> float:
    if isinstance(p, bool) or not isinstance(p, int | float | np.floating | np.integer):
        raise ValueError(f"{name} must be a number > 0: got {p!r}")
    if not (math.isfinite(p) and p > 0):
        raise ValueError(f"{name} must be finite and > 0: got {p}")
    return float(p)


def _check_dense_real(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_sparse:
        raise RuntimeError(f"{name} is sparse; GradPower does not support sparse gradients")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be real and floating: got dtype {tensor.dtype}")


def sign_power(g: torch.Tensor, p: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """φ_p(g) = sign(g)|g|^p, elementwise.

    Zero stays zero, NaN and the infinities pass through. Halves (float16, bfloat16) are raised
    in float32 and rounded once. |g|^p underflows in float32 below |g| = 2^(-126/p), 10^(-32) at
    p = 1.2.

    Args:
        g: any shape, real floating.
        p: exponent, > 0. At 1 nothing is computed: ``g`` itself comes back.
        out: written to and returned, when given; may be ``g``.

    Returns:
        The shape and dtype of ``g``.

    Raises:
        ValueError: p that is not finite and > 0, or a complex or integer ``g``.
        RuntimeError: a sparse ``g``.
    """
    p = _check_power(p)
    _check_dense_real("g", g)
    if p == 1.0:
        return g if out is None or out is g else out.copy_(g)
    # the magnitude alone is raised: a negative number to a real power is NaN
    wide = g.float() if g.dtype in (torch.float16, torch.bfloat16) else g
    powered = wide.abs().pow_(p).copysign_(wide)
    if out is None:
        return powered.to(g.dtype)
    return out.copy_(powered)


@torch.no_grad()
def sign_power_(params: Iterable[torch.Tensor], p: float) -> None:
    """Replace ``param.grad`` by φ_p of it, in place, for each parameter that has one.

    Call it once a step, after the clip and before ``optimizer.step()``.

    Raises:
        ValueError: p that is not finite and > 0, or a complex gradient.
        RuntimeError: a sparse gradient.
    """
    p = _check_power(p)
    for param in params:
        if param.grad is not None:
            sign_power(param.grad, p, out=param.grad)


def _sign_power_list(grads: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """φ_p of many tensors with few calls; halves come back as float32."""
    wide = [g.float() if g.dtype in (torch.float16, torch.bfloat16) else g for g in grads]
    if p == 1.0:
        return wide
    powered = torch._foreach_abs(wide)
    torch._foreach_pow_(powered, p)
    return [size.copysign_(g) for size, g in zip(powered, wide, strict=True)]


# Optimisers


def _check_settings(values: Mapping[str, object]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if name in values and not (math.isfinite(values[name]) and values[name] >= 0):
            raise ValueError(f"{name} must be finite and >= 0: got {values[name]}")
    for i, beta in enumerate(values.get("betas", ())):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}] must be in [0, 1): got {beta}")
    if "momentum" in values and not 0 <= values["momentum"] < 1:
        raise ValueError(f"momentum must be in [0, 1): got {values['momentum']}")
    if values.get("ns_steps", 1) < 1:
        raise ValueError(f"ns_steps must be >= 1: got {values['ns_steps']}")
    if values.get("eps_mode", "plain") not in ("plain", "power"):
        raise ValueError(f"eps_mode must be 'plain' or 'power': got {values['eps_mode']!r}")
    _check_power(values["p"])


def _check_params(params: Iterable[torch.Tensor]) -> None:
    for i, param in enumerate(params):
        if param.is_complex() or not param.is_floating_point():
            raise ValueError(f"params[{i}] must be real and floating: got dtype {param.dtype}")


def _run_closure(closure: Callable[[], torch.Tensor] | None) -> torch.Tensor | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class _PowerOptimizer(Optimizer):
    """What AdamWPower and MuonPower share: checks of every group, and exact state dicts."""

    STATE: tuple[str, ...] = ()

    def add_param_group(self, param_group: dict) -> None:
        """Add a group; its settings are checked like the constructor's."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_settings(group)
            self._check_group(group["params"])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_group(self, params: list[torch.Tensor]) -> None:
        _check_params(params)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what :meth:`state_dict` gave; moments of low-precision weights are float32."""
        super().load_state_dict(state_dict)
        # torch casts each state to its parameter's dtype, and shares the step count with the
        # optimiser it came from; moments are at least float32 here, also those that torch's
        # AdamW kept in bfloat16, and nothing may be shared
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if name in self.STATE:
                    wide = torch.promote_types(param.dtype, torch.float32)
                    moment = value.detach().clone()
                    self.state[param][name] = moment.to(device=param.device, dtype=wide)
                elif isinstance(value, torch.Tensor):
                    self.state[param][name] = value.detach().clone()


class AdamWPower(_PowerOptimizer):
    """AdamW on sign-powered gradients.

        g̃ = φ_p(g);  m = β₁m + (1−β₁)g̃;  v = β₂v + (1−β₂)g̃²
        θ ← θ − η [ m̂ / (√v̂ + ε) + λθ ]

    p = 1 is ``torch.optim.AdamW``. m and v see the same g̃, so the scale of the gradient cancels
    for every p, as long as ε plays no part.

    Args:
        params: parameters or groups; each group may have its own ``p`` and other settings.
        lr: learning rate η.
        betas: (β₁, β₂).
        eps: ε, of the size of √v̂ for tiny gradients: with p > 1 they are raised to the power p
            and shrink, while ε does not.
        weight_decay: decoupled decay λ.
        p: exponent, > 0.
        eps_mode: "plain" adds ε, "power" adds ε^p, which shrinks along with φ_p(g).
        maximize: step along the gradient.
        fused: True calls the kernel ``adamw_power_step`` (Triton on a GPU, its reference on a
            CPU), False the foreach path, None the kernel where all tensors of a group suit it.

    Raises:
        ValueError: a setting out of range, complex parameters, or a group without parameters.
        RuntimeError: in ``step``, a sparse gradient.
    """

    STATE = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        p: float = 1.2,
        eps_mode: Literal["plain", "power"] = "plain",
        fused: bool | None = None,
        *,
        maximize: bool = False,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "p": p,
            "eps_mode": eps_mode,
            "fused": fused,
            "maximize": maximize,
        }
        _check_settings(defaults)
        super().__init__(params, defaults)

    def __setstate__(self, state: dict) -> None:
        # a checkpoint of torch.optim.AdamW has no p: it goes on as what it was
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("p", 1.0)
            group.setdefault("eps_mode", "plain")
            group.setdefault("fused", None)
            group.setdefault("maximize", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One step; parameters without a gradient are left alone. Returns the closure's loss."""
        loss = _run_closure(closure)
        for group in self.param_groups:
            # parameters that joined late are at another step: each count is a call of its own
            for step, params in self._by_step(group["params"]).items():
                self._update(group, params, step)
        return loss

    def _by_step(self, params: list[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        by_step: dict[int, list[torch.Tensor]] = {}
        for param in params:
            if param.grad is None:
                continue
            _check_dense_real("grad", param.grad)
            state = self.state[param]
            if not state:
                wide = torch.promote_types(param.dtype, torch.float32)
                state["step"] = torch.tensor(0.0)
                for name in self.STATE:
                    state[name] = torch.zeros_like(
                        param, dtype=wide, memory_format=torch.preserve_format
                    )
            state["step"] += 1
            by_step.setdefault(int(state["step"]), []).append(param)
        return by_step

    def _update(self, group: dict, params: list[torch.Tensor], step: int) -> None:
        grads = [p.grad for p in params]
        moments = [[self.state[p][name] for p in params] for name in self.STATE]
        p = float(group["p"])
        settings = {
            "step": step,
            "lr": float(group["lr"]),
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"] ** p if group["eps_mode"] == "power" else group["eps"],
            "weight_decay": group["weight_decay"],
            "p": p,
            "maximize": group["maximize"],
        }
        fused = group["fused"]
        if fused is None:
            fused = all(t.is_cuda and t.is_contiguous() for t in (*params, *grads))
            fused = fused and not any(t.dtype in (torch.float16, torch.float64) for t in params)
        if fused:
            adamw_power_step(params, grads, *moments, **settings)
        else:
            _foreach_step(params, grads, *moments, **settings)


def _foreach_step(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    p: float,
    maximize: bool,
) -> None:
    """The step over lists of tensors, in place, in the order of operations of torch's AdamW."""
    if maximize:
        grads = torch._foreach_neg(grads)
    powered = [g.to(m.dtype) for g, m in zip(_sign_power_list(grads, p), exp_avgs, strict=True)]
    wide = [t.to(m.dtype) for t, m in zip(params, exp_avgs, strict=True)]
    torch._foreach_mul_(wide, 1 - lr * weight_decay)
    torch._foreach_lerp_(exp_avgs, powered, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, powered, powered, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(denominators, eps)
    if eps == 0:
        # no step where v is 0: no gradient has come yet, or its square has underflowed
        for d in denominators:
            d.masked_fill_(d == 0, math.inf)
    torch._foreach_addcdiv_(wide, exp_avgs, denominators, -lr / (1 - beta1**step))
    for param, value in zip(params, wide, strict=True):
        if param is not value:
            param.copy_(value)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of Muon's quintic iteration."""


def newton_schulz5(M: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """An approximately orthogonal matrix with the singular vectors of ``M``.

    X ← aX + (bA + cA²)X with A = XXᵀ, from M/(‖M‖_F + 1e-7), transposed first when there are
    more rows than columns. Singular values end in about [0.65, 1.2], not at 1.

    Args:
        M: (rows, columns) floating; halves are computed in float32.
        steps: iterations.

    Returns:
        The shape and dtype of ``M``.

    Raises:
        ValueError: no matrix, or ``steps`` below 1.
    """
    if M.ndim != 2:
        raise ValueError(f"M must be a matrix: got shape {tuple(M.shape)}")
    if steps < 1:
        raise ValueError(f"steps must be >= 1: got {steps}")
    a, b, c = NEWTON_SCHULZ
    X = M.float() if M.dtype in (torch.float16, torch.bfloat16) else M
    tall = X.shape[0] > X.shape[1]
    X = X.T if tall else X
    X = X / (X.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return (X.T if tall else X).to(M.dtype)


class MuonPower(_PowerOptimizer):
    """Muon on sign-powered gradients, for matrices in hidden layers.

        g̃ = φ_p(G);  M = μM + g̃;  O = NewtonSchulz5(g̃ + μM)
        θ ← θ − η·0.2√max(rows, columns)·O − ηλθ

    M is a plain sum; ``torch.optim.Muon`` averages, which is the same direction. The factor makes
    the entries of a step as large as AdamW's, so that ``lr`` is an AdamW rate. Embeddings, norms
    and the output head belong to :class:`AdamWPower`.

    Args:
        params: matrices, or groups of them.
        lr: learning rate η.
        momentum: μ.
        weight_decay: decoupled decay λ.
        p: exponent, > 0.
        ns_steps: Newton–Schulz iterations.
        nesterov: whether O looks one gradient ahead; else O = NewtonSchulz5(M).

    Raises:
        ValueError: a parameter that is no matrix, or a setting out of range.
        RuntimeError: in ``step``, a sparse gradient.
    """

    STATE = ("momentum_buffer",)

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        p: float = 1.2,
        ns_steps: int = 5,
        nesterov: bool = True,
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "p": p,
            "ns_steps": ns_steps,
            "nesterov": nesterov,
        }
        _check_settings(defaults)
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what :meth:`state_dict` gave.

        Raises:
            ValueError: a checkpoint of another optimiser, such as ``torch.optim.Muon``.
        """
        if not all("p" in group for group in state_dict["param_groups"]):
            raise ValueError(
                "state_dict must come from MuonPower: got groups without 'p'. torch.optim.Muon "
                "averages its momentum where MuonPower sums, and its rate may have another scale"
            )
        super().load_state_dict(state_dict)

    def _check_group(self, params: list[torch.Tensor]) -> None:
        _check_params(params)
        for i, param in enumerate(params):
            if param.ndim != 2:
                raise ValueError(
                    f"params[{i}] must be a matrix (give others to AdamWPower): got shape "
                    f"{tuple(param.shape)}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One step; parameters without a gradient are left alone. Returns the closure's loss."""
        loss = _run_closure(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                _check_dense_real("grad", param.grad)
                self._update(group, param)
        return loss

    def _update(self, group: dict, param: torch.Tensor) -> None:
        state, mu = self.state[param], group["momentum"]
        (powered,) = _sign_power_list([param.grad], float(group["p"]))
        if not state:
            state["momentum_buffer"] = torch.zeros_like(powered)
        M = state["momentum_buffer"].mul_(mu).add_(powered)
        direction = powered + mu * M if group["nesterov"] else M
        O = newton_schulz5(direction, group["ns_steps"])
        # in bfloat16 a decay of less than 2^-9 would round to none, so the sum is wide
        wide = param.to(O.dtype)
        wide.mul_(1 - group["lr"] * group["weight_decay"])
        wide.add_(O, alpha=-group["lr"] * 0.2 * math.sqrt(max(param.shape)))
        if wide is not param:
            param.copy_(wide)


class GradPower(Optimizer):
    """φ_p in front of any optimiser: one line around it.

        optimizer = GradPower(torch.optim.AdamW(model.parameters(), lr=1e-3), p=1.2)

    ``step()`` replaces each ``param.grad`` by φ_p(grad) in place and steps the base optimiser.
    Clip before it. Groups, state and settings are the base's own: schedulers, ``zero_grad`` and
    checkpoints work on the wrapper. A group with a key ``"power"`` has an exponent of its own;
    1.0 leaves it untouched.

    Args:
        optimizer: the base optimiser.
        p: the exponent, > 0.
        schedule: step → exponent, from step 0; overrides ``p``, not a group's own ``"power"``.

    Raises:
        ValueError: p that is not finite and > 0, no optimiser, complex parameters, or one that
            already powers its gradients (twice would be φ_{p·p}).
        RuntimeError: in ``step``, a sparse gradient.
    """

    # a fused base takes scaled gradients and unscales them itself, after the power; a gradient
    # scaler that sees False unscales first and skips the step at an inf
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        p: float = 1.2,
        schedule: Callable[[int], float] | None = None,
    ):
        # Optimizer.__init__ would copy the groups; everything not set here is the base's
        # (see __getattr__), so that a scheduler that changes one changes both.
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer must be a torch Optimizer: got {type(optimizer).__name__}")
        if isinstance(optimizer, GradPower | _PowerOptimizer):
            raise ValueError(
                f"optimizer must not power its gradients already: got {type(optimizer).__name__}, "
                "and a second power would make it p times p"
            )
        for group in optimizer.param_groups:
            _check_params(group["params"])
            _check_power(group.get("power", 1.0), "power")
        self.base = optimizer
        self.p = _check_power(p)
        self.schedule = schedule
        self.steps_done = 0

    def __getattr__(self, name: str):
        if name == "base":  # while unpickling, before there is one
            raise AttributeError(name)
        return getattr(self.base, name)

    def __getstate__(self) -> dict:
        # its own state alone: a learning-rate scheduler leaves a wrapped ``step`` bound to this
        # very object, which can't be pickled and would step the original from a copy
        return {name: self.__dict__[name] for name in ("base", "p", "schedule", "steps_done")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"GradPower(p={self.current_p:g}, {self.base!r})"

    @property
    def current_p(self) -> float:
        """The exponent of the next step."""
        if self.schedule is None:
            return self.p
        return _check_power(self.schedule(self.steps_done), "schedule(step)")

    def _transform(self, p: float) -> None:
        for group in self.base.param_groups:
            sign_power_(group["params"], group.get("power", p))

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Power the gradients in place, then let the base step; a second call powers anew."""
        p = self.current_p
        if closure is None:
            self._transform(p)
            loss = self.base.step()
        else:

            def powered() -> torch.Tensor:
                value = closure()
                self._transform(p)
                return value

            loss = self.base.step(powered)
        self.steps_done += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the base does."""
        self.base.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict) -> None:
        """As the base does; real parameters only."""
        params = param_group["params"]
        _check_params([params] if isinstance(params, torch.Tensor) else list(params))
        _check_power(param_group.get("power", 1.0), "power")
        self.base.add_param_group(param_group)

    def state_dict(self) -> dict:
        """The base's state dict, with the exponent and the step count beside it."""
        own = {"p": self.p, "steps_done": self.steps_done}
        return {**self.base.state_dict(), "grad_power": own}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what :meth:`state_dict` gave, or a bare checkpoint of the base."""
        rest = {k: v for k, v in state_dict.items() if k != "grad_power"}
        own = state_dict.get("grad_power", {})
        self.base.load_state_dict(rest)
        self.p = _check_power(own.get("p", self.p))
        self.steps_done = int(own.get("steps_done", self.steps_done))


# Theory: how fast Adam drifts


def _gennorm_scale(k: float) -> float:
    """a of the density ∝ exp(−|x/a|^k) whose variance is one."""
    return math.exp(0.5 * (math.lgamma(1 / k) - math.lgamma(3 / k)))


def _shape_of(noise: Noise) -> float:
    """k of the generalised Gaussian that ``noise`` names."""
    named = {"gaussian": 2.0, "laplace": 1.0}
    if isinstance(noise, str) and noise in named:
        return named[noise]
    if isinstance(noise, tuple) and len(noise) == 2 and noise[0] == "gennorm":
        k = float(noise[1])
        if not (math.isfinite(k) and k >= 0.3):
            raise ValueError(f"noise ('gennorm', k) needs a finite k >= 0.3: got k={noise[1]}")
        return k
    raise ValueError(
        "noise must be 'rademacher', 'uniform', 'gaussian', 'laplace' or ('gennorm', k): "
        f"got {noise!r}"
    )


def gain_factor(p: float, noise: Noise | np.ndarray | torch.Tensor) -> float:
    """c(p): Adam's drift at the power p against p = 1, when noise is far above the signal.

    c(p) = p·E|ξ|^{p−1} / √(E|ξ|^{2p}), in closed form for a named law. For samples the moments
    are means over them; that plug-in has infinite variance for p ≤ ½ and is wrong on lattices,
    where :func:`best_power` takes a symmetric difference instead.

    Args:
        p: exponent, > 0.
        noise: a law, or samples of ξ of any shape, standardised (mean 0, variance 1).

    Returns:
        c(p); 1 at p = 1.

    Raises:
        ValueError: a bad p, an unknown law, samples that are few or not standardised, or one
            that is zero when p < 1.
    """
    p = _check_power(p)
    if isinstance(noise, np.ndarray | torch.Tensor | list):
        xi = np.abs(_standardised(noise))
        if p < 1 and (xi == 0).any():
            raise ValueError(
                f"noise must hold no zero for p < 1, where |ξ|^(p-1) is infinite: got "
                f"{int((xi == 0).sum())} zeros at p={p}; best_power takes a difference instead"
            )
        return float(p * np.mean(xi ** (p - 1)) / np.sqrt(np.mean(xi ** (2 * p))))
    if noise == "rademacher":
        return p
    if noise == "uniform":
        return math.sqrt((2 * p + 1) / 3)
    k = _shape_of(noise)

    def log_moment(q: float) -> float:
        return q * math.log(_gennorm_scale(k)) + math.lgamma((q + 1) / k) - math.lgamma(1 / k)

    return p * math.exp(log_moment(p - 1) - 0.5 * log_moment(2 * p))


def _standardised(samples: np.ndarray | torch.Tensor | list) -> np.ndarray:
    xi = np.asarray(samples, dtype=np.float64).ravel()
    if len(xi) < 2 or not np.isfinite(xi).all():
        raise ValueError(f"noise must hold at least 2 finite samples: got {len(xi)} values")
    if abs(xi.mean()) > 0.1 or abs(xi.std() - 1) > 0.1:
        raise ValueError(
            f"noise must have mean 0 and standard deviation 1 (to 0.1): got {xi.mean():.3g} "
            f"and {xi.std():.3g}"
        )
    return xi


class ScorePower(NamedTuple):
    """The best elementwise power and its gain: p* and c(p*) = √(Fisher information)."""

    p: float
    gain: float


def score_power(k: float) -> ScorePower:
    """p* = k − 1 for noise ∝ exp(−|x/a|^k), k > 1: its score is φ_{k−1}, and no map beats it.

    √I = k √(Γ(3/k) Γ(2 − 1/k)) / Γ(1/k).

    Raises:
        ValueError: k that is not finite and > 1.
    """
    if not (math.isfinite(k) and k > 1):
        raise ValueError(f"k must be finite and > 1: got {k}")
    log_root = 0.5 * (math.lgamma(3 / k) + math.lgamma(2 - 1 / k)) - math.lgamma(1 / k)
    return ScorePower(k - 1, k * math.exp(log_root))


def noise_density(noise: Noise, xi: np.ndarray) -> np.ndarray:
    """The density of a continuous law at ``xi``, any shape.

    Raises:
        ValueError: an unknown law, or "rademacher", which has none.
    """
    xi = np.asarray(xi, dtype=np.float64)
    if noise == "uniform":
        return np.where(np.abs(xi) <= math.sqrt(3), 0.5 / math.sqrt(3), 0.0)
    k = _shape_of(noise)
    a = _gennorm_scale(k)
    return k / (2 * a) * np.exp(-(np.abs(xi / a) ** k) - math.lgamma(1 / k))


@lru_cache(maxsize=8)
def _tanh_sinh(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes as distances from either end of [0, 1], and weights; ends may be singular."""
    t = np.linspace(-3.4, 3.4, n)
    s = np.exp(np.pi * np.sinh(t))
    # distance from the left end and from the right end, each without cancellation
    left, right = s / (1 + s), 1 / (1 + s)
    weights = (t[1] - t[0]) * np.pi * np.cosh(t) * left * right
    return left, right, weights


def drift_curve(powers: Sequence[float], mu: float, sigma: float, noise: Noise) -> np.ndarray:
    """u_p = E φ_p(g) / √(E|g|^{2p}) for g = μ + σξ at each exponent, by quadrature.

    Some 400 nodes in panels that end where the integrand has a kink (ξ = 0, g = 0), with a rule
    that crowds nodes at both ends; two-point noise is summed exactly.

    Args:
        powers: (n_powers,) exponents, > 0.
        mu: signal μ.
        sigma: noise σ, > 0.
        noise: a law.

    Returns:
        (n_powers,) float64, in [−1, 1].

    Raises:
        ValueError: a bad exponent, signal, noise level or law.
    """
    powers = np.asarray([_check_power(p, "powers") for p in powers])[:, None]
    if not math.isfinite(mu):
        raise ValueError(f"mu must be finite: got {mu}")
    if not (math.isfinite(sigma) and sigma > 0):
        raise ValueError(f"sigma must be finite and > 0: got {sigma}")
    if noise == "rademacher":
        g, weight = np.array([mu - sigma, mu + sigma]), np.array([0.5, 0.5])
    else:
        g, weight = _nodes(mu, sigma, noise)
    # in units of the largest |g|, so that no power overflows
    g = g / np.abs(g).max()
    with np.errstate(divide="ignore"):
        size = np.exp(powers * np.log(np.abs(g)))
    return (size * np.sign(g)) @ weight / np.sqrt(size**2 @ weight)


def _nodes(mu: float, sigma: float, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
    """Values of g and their probabilities."""
    if noise == "uniform":
        end = math.sqrt(3)
    else:
        # beyond it the density, even times a high power, is below rounding
        k = _shape_of(noise)
        end = _gennorm_scale(k) * 80.0 ** (1 / k)
    zero = -mu / sigma
    cuts = sorted({-end, 0.0, end} | ({zero} if abs(zero) < end else set()))
    left, right, rule = _tanh_sinh(400 // (len(cuts) - 1))
    g, weight = [], []
    for low, high in pairwise(cuts):
        xi = np.where(left < 0.5, low + (high - low) * left, high - (high - low) * right)
        value = mu + sigma * xi
        # next to the zero of g the distance is known better than mu + sigma * xi
        if low == zero:
            value = sigma * (high - low) * left
        elif high == zero:
            value = -sigma * (high - low) * right
        g.append(value)
        weight.append((high - low) * rule * noise_density(noise, xi))
    weight = np.concatenate(weight)
    return np.concatenate(g), weight / weight.sum()


def drift(p: float, mu: float, sigma: float, noise: Noise) -> float:
    """u_p, Adam's mean step over its learning rate, for one exponent; see :func:`drift_curve`."""
    return float(drift_curve([p], mu, sigma, noise)[0])


def powered_density(z: np.ndarray, p: float, mu: float, sigma: float, noise: Noise) -> np.ndarray:
    """The density of φ_p(g) / rms(φ_p(g)) at ``z``: what Adam's quotient averages.

    Args:
        z: any shape; at 0 the density is infinite for p > 1 and 0 for p < 1.
        p: exponent, > 0.
        mu: signal μ.
        sigma: noise σ, > 0.
        noise: a continuous law.

    Returns:
        The shape of ``z``; mean u_p, mean square 1.

    Raises:
        ValueError: as :func:`drift_curve`, or "rademacher", which has no density.
    """
    p = _check_power(p)
    drift_curve([p], mu, sigma, noise)  # checks the rest
    g, weight = _nodes(mu, sigma, noise)
    top = np.abs(g).max()
    # g = top · φ_{1/p}(z · rms), both in units of the largest |g|
    rms = math.sqrt(float((np.abs(g) / top) ** (2 * p) @ weight))
    size = np.abs(np.asarray(z, dtype=np.float64)) * rms
    with np.errstate(divide="ignore"):
        inner = top * np.sign(z) * size ** (1 / p)
        stretch = top * rms / p * size ** (1 / p - 1)
    return noise_density(noise, (inner - mu) / sigma) / sigma * stretch


def best_drift_power(
    mu: float, sigma: float, noise: Noise, *, low: float = 0.02, high: float = 8.0
) -> float:
    """The exponent in [low, high] at which u_p is largest.

    Raises:
        ValueError: as :func:`drift_curve`, or low ≥ high.
    """
    if not 0 < low < high:
        raise ValueError(f"low and high must be 0 < low < high: got {low}, {high}")
    grid = np.geomspace(low, high, 61)
    for _ in range(3):  # three looks, each at the two cells around the best
        curve = drift_curve(grid, mu, sigma, noise)
        i = int(np.argmax(curve))
        grid = np.linspace(grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)], 61)
    return float(grid[int(np.argmax(drift_curve(grid, mu, sigma, noise)))])


def burst_gain(p: float, q: float, r0: float) -> float:
    """Drift at p against p = 1 when a share q of the steps carries signal and noise, g = μ + σξ.

    The others bring weaker noise alone, g = r₀σξ; ξ is Gaussian and μ ≪ σ:
    c(p) √(q + (1−q)r₀²) / √(q + (1−q)r₀^{2p}).

    Raises:
        ValueError: a bad p, q outside (0, 1], or r₀ outside [0, 1].
    """
    if not 0 < q <= 1:
        raise ValueError(f"q must be in (0, 1]: got {q}")
    if not 0 <= r0 <= 1:
        raise ValueError(f"r0 must be in [0, 1]: got {r0}")
    plain, powered = q + (1 - q) * r0**2, q + (1 - q) * r0 ** (2 * p)
    return gain_factor(p, "gaussian") * math.sqrt(plain / powered)


def tempered_logit(q: float, p: float, *, batch: int = 1) -> float:
    """Where φ_p + SGD comes to rest on the log-odds of an event of probability q.

    With one sample a step the gradient is π − 1 with probability q and π otherwise; its φ_p has
    mean zero at q(1−π)^p = (1−q)π^p, so logit π = logit(q)/p. With more samples averaged before
    φ_p the sum over the binomial counts is solved for π.

    Args:
        q: the event's probability, in (0, 1).
        p: exponent, > 0.
        batch: samples averaged before φ_p.

    Returns:
        The logit of π at rest.

    Raises:
        ValueError: q, p or batch out of range.
    """
    p = _check_power(p)
    if not 0 < q < 1:
        raise ValueError(f"q must be in (0, 1): got {q}")
    if batch < 1:
        raise ValueError(f"batch must be >= 1: got {batch}")
    truth = math.log(q) - math.log1p(-q)
    if batch == 1:
        return truth / p
    from scipy import optimize, stats

    share = np.arange(batch + 1) / batch
    weight = stats.binom.pmf(np.arange(batch + 1), batch, q)

    def mean_step(logit: float) -> float:
        g = 1 / (1 + math.exp(-logit)) - share
        return float(np.sum(weight * np.sign(g) * np.abs(g) ** p))

    reach = abs(truth) + 1 + abs(truth) / p
    return float(optimize.brentq(mean_step, -reach, reach, xtol=1e-12))


# Diagnostics


class BestPower(NamedTuple):
    """A power chosen from gradients.

    Attributes:
        p: where the curve is highest.
        curve: (n_powers,) estimated c(p).
        powers: (n_powers,) the exponents it was estimated at.
    """

    p: float
    curve: np.ndarray
    powers: np.ndarray


FEWEST = 32
"""Gradients other than 0 that :func:`best_power` wants of a coordinate, if there are so many
batches: noise that is standardised by fewer values of its own looks lighter-tailed than it is."""


def best_power(
    grads: np.ndarray | torch.Tensor,
    *,
    powers: Sequence[float] | None = None,
    h: float = 0.1,
) -> BestPower:
    """Estimate c(p) from mini-batch gradients, and the power at which it is largest.

    Exact zeros are left out: where a coordinate gets no gradient in a batch (a rare token, an
    expert that is not visited), the power acts through the law of the other batches alone. Each
    coordinate is centred and scaled to unit variance over the rest, all are pooled, and
    ĉ(p) = mean[φ_p(ξ+h) − φ_p(ξ−h)] / (2h) / √(mean|ξ|^{2p}). The symmetric difference stands
    for p·E|ξ|^{p−1}, which has infinite variance for p ≤ ½ and is wrong on lattices.

    The estimate is a little too large where a coordinate has few values: for Gaussian noise
    about 1.1 from 32 values, below 1.05 from 200.

    Args:
        grads: (n_batches, n_coords), one row a batch. Coordinates that do not vary are left out,
            and those with fewer than 32 values other than 0 (than n_batches, if that is less).
        powers: increasing exponents, > 0; default 0.3, 0.4, …, 3.5.
        h: half the width of the difference, in standard deviations.

    Returns:
        The best power (the vertex of the parabola through the three best points), and the curve.

    Raises:
        ValueError: fewer than 8 batches, values that are not finite, no coordinate that varies
            over enough values other than 0, bad powers, or a bad h.
    """
    g = np.asarray(grads.detach().cpu() if isinstance(grads, torch.Tensor) else grads)
    if g.ndim != 2 or g.shape[0] < 8:
        raise ValueError(f"grads must be (n_batches >= 8, n_coords): got shape {g.shape}")
    g = g.astype(np.float64)
    if not np.isfinite(g).all():
        raise ValueError("grads must be finite: got inf or NaN")
    if not (math.isfinite(h) and h > 0):
        raise ValueError(f"h must be finite and > 0: got {h}")
    powers = np.arange(0.3, 3.55, 0.1) if powers is None else np.asarray(powers, dtype=float)
    if powers.ndim != 1 or len(powers) < 3 or (np.diff(powers) <= 0).any():
        raise ValueError(f"powers must be at least 3 increasing exponents: got {powers}")
    for p in powers:
        _check_power(float(p), "powers")

    there = g != 0
    count = there.sum(axis=0)
    divisor = np.maximum(count, 1)
    centred = np.where(there, g - g.sum(axis=0) / divisor, 0.0)
    spread = np.sqrt((centred**2).sum(axis=0) / divisor)
    # a constant coordinate has only rounding left
    varies = spread > 1e-12 * np.abs(g).max(axis=0)
    fewest = min(FEWEST, len(g))
    used = varies & (count >= fewest)
    if not used.any():
        raise ValueError(
            f"grads must vary between batches in some coordinate, over at least {fewest} values "
            f"other than 0: got none, {int(varies.sum())} that vary over fewer"
        )
    xi = (centred[:, used] / spread[used])[there[:, used]]
    with np.errstate(divide="ignore"):  # log 0 = −∞ gives 0^p = 0
        logs = [np.log(np.abs(x)) for x in (xi + h, xi - h, xi)]
    up, down = np.sign(xi + h), np.sign(xi - h)
    curve = np.empty(len(powers))
    for i, p in enumerate(powers):
        rise = np.dot(up, np.exp(p * logs[0])) - np.dot(down, np.exp(p * logs[1]))
        curve[i] = rise / len(xi) / (2 * h) / math.sqrt(np.exp(2 * p * logs[2]).mean())
    return BestPower(_vertex(powers, curve), curve, powers)


def _vertex(x: np.ndarray, y: np.ndarray) -> float:
    """Where the parabola through the highest point and its neighbours peaks."""
    i = int(np.argmax(y))
    if i in (0, len(x) - 1):
        return float(x[i])
    a, b, _ = np.polyfit(x[i - 1 : i + 2] - x[i], y[i - 1 : i + 2], 2)
    return float(x[i] - b / (2 * a))


class NoiseStats(NamedTuple):
    """Moments of a layer's gradients over batches.

    Attributes:
        kurtosis: mean of ((g − ḡ)/σ̂)⁴; 1 for two-point noise, 1.8 uniform, 3 Gaussian, 6 Laplace.
        snr: root of the mean square of μ over that of σ; the sampling error of the mean is taken
            out, and what would be negative is 0.
    """

    kurtosis: float
    snr: float


def gradient_rows(
    model: nn.Module, loss_fn: Callable[[nn.Module, object], torch.Tensor], batches: Iterable
) -> dict[str, np.ndarray]:
    """Gradients of each parameter, one row a batch: name → (n_batches, n_entries) float64.

    The model is not changed, its gradients are cleared.

    Raises:
        ValueError: no batch.
    """
    rows: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
        for name, param in model.named_parameters():
            if param.requires_grad:
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                rows.setdefault(name, []).append(grad.detach().double().flatten().cpu().numpy())
    model.zero_grad(set_to_none=True)
    if not rows:
        raise ValueError("batches must hold at least one batch: got none")
    return {name: np.stack(r) for name, r in rows.items()}


def noise_stats(
    model: nn.Module, loss_fn: Callable[[nn.Module, object], torch.Tensor], batches: Iterable
) -> dict[str, NoiseStats]:
    """Kurtosis and signal-to-noise ratio of each parameter's gradient at fixed weights.

    Args:
        model: stays as it is; its gradients are cleared.
        loss_fn: ``loss_fn(model, batch)``, a scalar.
        batches: at least 2 batches, of the size that training uses.

    Returns:
        Parameter name → statistics over the coordinates that vary; both NaN when none does.

    Raises:
        ValueError: fewer than 2 batches.
    """
    stats = {}
    for name, g in gradient_rows(model, loss_fn, batches).items():
        n = len(g)
        if n < 2:
            raise ValueError(f"batches must hold at least 2 batches: got {n}")
        mean, std = g.mean(axis=0), g.std(axis=0)
        varies = std > 1e-12 * np.abs(g).max(axis=0)
        if not varies.any():
            stats[name] = NoiseStats(math.nan, math.nan)
            continue
        xi = (g[:, varies] - mean[varies]) / std[varies]
        variance = std[varies] ** 2 * n / (n - 1)
        signal = max(float(np.mean(mean[varies] ** 2 - variance / n)), 0.0)
        snr = math.sqrt(signal / float(variance.mean()))
        stats[name] = NoiseStats(float(np.mean(xi**4)), snr)
    return stats


# Experiments: simulated drift


def draw_noise(noise: Noise, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Samples of ξ with mean 0 and variance 1.

    Raises:
        ValueError: an unknown law.
    """
    if noise == "rademacher":
        return rng.integers(0, 2, shape) * 2.0 - 1.0
    if noise == "uniform":
        return rng.uniform(-math.sqrt(3), math.sqrt(3), shape)
    if noise == "gaussian":
        return rng.standard_normal(shape)
    k = _shape_of(noise)
    # |ξ/a|^k is Gamma(1/k)
    size = _gennorm_scale(k) * rng.standard_gamma(1 / k, shape) ** (1 / k)
    return np.copysign(size, rng.uniform(-1, 1, shape))


class _AdamArrays:
    """Adam on an array of independent coordinates; exponents along the first axis."""

    def __init__(self, powers: Sequence[float], shape: tuple[int, ...], betas: tuple[float, float]):
        exponents = [_check_power(p, "powers") for p in powers]
        self.p = np.reshape(exponents, (-1,) + (1,) * len(shape))
        self.m = np.zeros((len(exponents), *shape))
        self.v = np.zeros_like(self.m)
        self.betas, self.t = betas, 0

    def step(self, g: np.ndarray) -> np.ndarray:
        """The normalised step m̂/√v̂ for gradients ``g``, the same for all exponents or not."""
        (b1, b2), self.t = self.betas, self.t + 1
        powered = np.copysign(np.abs(g) ** self.p, g)
        self.m += (1 - b1) * (powered - self.m)
        self.v += (1 - b2) * (powered * powered - self.v)
        scale = math.sqrt(1 - b2**self.t) / (1 - b1**self.t)
        return scale * self.m / np.sqrt(self.v + 1e-300)


def simulate_drift(
    noises: Sequence[Noise],
    powers: Sequence[float],
    *,
    mu: float = 0.05,
    betas: tuple[float, float] = (0.9, 0.999),
    n_coords: int = 256,
    steps: int = 5000,
    seed: int = 0,
) -> np.ndarray:
    """Experiment A: Adam on a slope, g = μ + ξ; how far it gets, against p = 1.

    Half of the coordinates see −ξ of the other half: the error that plain sampling leaves in the
    mean, 2 %, cancels. All exponents see the same noise.

    Args:
        noises: laws of ξ.
        powers: exponents.
        mu: slope μ; the noise has σ = 1.
        betas: (β₁, β₂). β₂ = 0.95 looks at 20 steps only, and biases the drift.
        n_coords: coordinates, an even number.
        steps: Adam steps.
        seed: of the noise.

    Returns:
        (n_noises, n_powers): distance at p over distance at 1.

    Raises:
        ValueError: an unknown law, a bad exponent, or an odd number of coordinates.
    """
    if n_coords < 2 or n_coords % 2:
        raise ValueError(f"n_coords must be even and >= 2: got {n_coords}")
    ratios = []
    for i, noise in enumerate(noises):
        rng = np.random.default_rng([seed, i])
        adam = _AdamArrays([1.0, *powers], (n_coords,), betas)
        moved = np.zeros(len(adam.m))
        for _ in range(steps):
            xi = draw_noise(noise, (n_coords // 2,), rng)
            moved += adam.step(mu + np.concatenate([xi, -xi])).mean(axis=1)
        ratios.append(moved[1:] / moved[0])
    return np.asarray(ratios)


def simulate_bursts(
    powers: Sequence[float],
    *,
    q: float = 0.2,
    r0: float = 0.3,
    mu: float = 0.05,
    n_coords: int = 512,
    steps: int = 4000,
    seed: int = 0,
) -> np.ndarray:
    """Adam (β₂ = 0.999) where a share q of the steps is loud and carries the slope μ.

    Loud: g = μ + ξ. Quiet: g = r₀ξ. ξ is Gaussian and antithetic; each coordinate (and its
    mirror) has its own loud steps.

    Returns:
        (n_powers,): distance at p over distance at 1.

    Raises:
        ValueError: q outside (0, 1], r₀ outside [0, 1], or an odd number of coordinates.
    """
    if n_coords < 2 or n_coords % 2:
        raise ValueError(f"n_coords must be even and >= 2: got {n_coords}")
    burst_gain(1.0, q, r0)  # checks q and r0
    rng = np.random.default_rng(seed)
    adam = _AdamArrays([1.0, *powers], (2, n_coords // 2), (0.9, 0.999))
    moved = np.zeros(len(adam.m))
    sign = np.array([[1.0], [-1.0]])
    for _ in range(steps):
        loud = rng.random(n_coords // 2) < q
        xi = sign * rng.standard_normal(n_coords // 2)
        moved += adam.step(np.where(loud, mu + xi, r0 * xi)).mean(axis=(1, 2))
    return moved[1:] / moved[0]


class Valley(NamedTuple):
    """Paths down the river valley.

    Attributes:
        x: (n_powers, steps + 1) across the valley, the mean over replicas.
        y: (n_powers, steps + 1) along the river, the mean over replicas.
        one: (n_powers, steps + 1, 2) the first replica's (x, y).
    """

    x: np.ndarray
    y: np.ndarray
    one: np.ndarray


def river_valley(
    powers: Sequence[float],
    *,
    lr: float = 1e-3,
    steps: int = 2000,
    n_replicas: int = 256,
    start: float = 0.3,
    seed: int = 0,
) -> Valley:
    """Experiment B: L(x, y) = ½·50·x² − 0.05·y, steep banks and a slow river, Adam (0.9, 0.95).

    The gradient's noise has σ = 1, Gaussian across and two-point along the river; half of the
    replicas see the other half's noise with the sign turned.

    Raises:
        ValueError: a bad exponent, or an odd number of replicas.
    """
    if n_replicas < 2 or n_replicas % 2:
        raise ValueError(f"n_replicas must be even and >= 2: got {n_replicas}")
    rng = np.random.default_rng(seed)
    half, n = n_replicas // 2, len(powers)
    adam = _AdamArrays(powers, (n_replicas, 2), (0.9, 0.95))
    at = np.zeros((n, n_replicas, 2))
    at[..., 0] = start
    mean, one = np.empty((n, steps + 1, 2)), np.empty((n, steps + 1, 2))
    mean[:, 0], one[:, 0] = at.mean(axis=1), at[:, 0]
    for t in range(1, steps + 1):
        noise = np.stack(
            [draw_noise(law, (half,), rng) for law in ("gaussian", "rademacher")], axis=1
        )
        g = np.concatenate([noise, -noise])[None] + np.stack(
            [50 * at[..., 0], np.full(at.shape[:2], -0.05)], axis=-1
        )
        at -= lr * adam.step(g)
        mean[:, t], one[:, t] = at.mean(axis=1), at[:, 0]
    return Valley(mean[..., 0], mean[..., 1], one)


def simulate_tempering(
    rates: Sequence[float],
    powers: Sequence[float],
    *,
    batch: int = 1,
    lr: float = 2e-3,
    steps: int = 8000,
    n_replicas: int = 256,
    seed: int = 0,
) -> np.ndarray:
    """φ_p + SGD on the log-odds of an event of probability q, averaged over time and replicas.

    Each replica starts at the truth, logit(q). The step falls from 50·lr to lr over the first
    half and stays there; the average is over the second half.

    Args:
        rates: probabilities q, in (0, 1).
        powers: exponents.
        batch: samples averaged before φ_p.
        lr: final step size; the average's own error grows with it.
        steps: SGD steps.
        n_replicas: independent runs.
        seed: of the samples.

    Returns:
        (n_rates, n_powers) logits.

    Raises:
        ValueError: q or p out of range.
    """
    q = np.asarray(rates, dtype=np.float64)[:, None, None]
    if not ((q > 0) & (q < 1)).all():
        raise ValueError(f"rates must be in (0, 1): got {list(rates)}")
    p = np.asarray([_check_power(x, "powers") for x in powers])[None, :, None]
    rng = np.random.default_rng(seed)
    z = np.broadcast_to(np.log(q / (1 - q)), (q.shape[0], p.shape[1], n_replicas)).copy()
    total, half = np.zeros(z.shape[:2]), steps // 2
    for t in range(steps):
        share = rng.binomial(batch, q, (q.shape[0], 1, n_replicas)) / batch
        g = 1 / (1 + np.exp(-z)) - share
        rate = lr * 50 ** max(0.0, 1 - t / half)
        z -= rate * np.copysign(np.abs(g) ** p, g)
        if t >= half:
            total += z.mean(axis=2)
    return total / (steps - half)


# Experiments: character language models

CONTEXT, EMBED, HIDDEN = 6, 16, 64


class CharLM(nn.Module):
    """Experiment C's model: 6 characters → embedding 16 each → tanh 64 → softmax.

    With experts, the hidden layer is one of ``n_experts`` layers of 64, the router's favourite,
    its output times 2·(router probability). Several replicas can stand beside each other in a
    leading dimension of every parameter; they never mix.

    Args:
        vocab_size: number of characters.
        seeds: one replica a seed; the same seed gives the same weights, wherever it stands.
        n_experts: 0 for the plain model.
        embed_std: standard deviation of the embedding at the start; other weights start at
            1/√(fan-in), biases at 0.
        dtype: of the parameters.
    """

    def __init__(
        self,
        vocab_size: int,
        seeds: Sequence[int],
        *,
        n_experts: int = 0,
        embed_std: float = 0.1,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__()
        self.vocab_size, self.n_experts = vocab_size, n_experts
        fan_in, width = CONTEXT * EMBED, HIDDEN * max(n_experts, 1)
        shapes = {
            "embedding": (vocab_size, EMBED, embed_std),
            "hidden": (fan_in, width, fan_in**-0.5),
            "hidden_bias": (1, width, 0.0),
            "head": (HIDDEN, vocab_size, HIDDEN**-0.5),
            "head_bias": (1, vocab_size, 0.0),
        }
        if n_experts:
            shapes["router"] = (fan_in, n_experts, fan_in**-0.5)
        draws: dict[str, list[torch.Tensor]] = {name: [] for name in shapes}
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for name, (rows, cols, std) in shapes.items():
                draw = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
                draws[name].append(std * draw)
        for name, stack in draws.items():
            setattr(self, name, nn.Parameter(torch.stack(stack).to(dtype)))
        offsets = torch.arange(len(seeds))[:, None, None] * vocab_size
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """contexts (n_replicas, batch, 6) int64 → logits (n_replicas, batch, vocab_size)."""
        n, batch, _ = contexts.shape
        # one table for all replicas: replica r's rows start at r · vocab_size
        x = F.embedding(contexts + self.offsets, self.embedding.flatten(0, 1)).flatten(2)
        hidden = torch.baddbmm(self.hidden_bias, x, self.hidden).tanh()
        if self.n_experts:
            probs = torch.bmm(x, self.router).softmax(dim=-1)
            gate, expert = probs.max(dim=-1)
            chosen = F.one_hot(expert, self.n_experts).to(x.dtype) * (2 * gate)[..., None]
            hidden = hidden.view(n, batch, self.n_experts, HIDDEN)
            hidden = torch.einsum("rbe,rbeh->rbh", chosen, hidden)
        return torch.baddbmm(self.head_bias, hidden, self.head)

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in nats: rows (n_replicas, batch, 7) int64 → (n_replicas,)."""
        logits = self(rows[..., :-1])
        entropy = F.cross_entropy(logits.flatten(0, 1), rows[..., -1].flatten(), reduction="none")
        return entropy.view(len(rows), -1).mean(dim=1)


class CharRun(NamedTuple):
    """Losses of replicas trained side by side.

    Attributes:
        steps: (n_evals,) steps done at each look.
        losses: (n_evals, n_powers, n_seeds) held-out cross-entropy, nats a character.
        model: the trained replicas, exponents slowest.
    """

    steps: np.ndarray
    losses: np.ndarray
    model: CharLM


def train_char_lm(
    powers: Sequence[float],
    seeds: Sequence[int],
    *,
    lr: float,
    steps: int,
    batch: int = 32,
    n_experts: int = 0,
    embed_std: float = 0.1,
    eval_every: int | None = None,
    dtype: torch.dtype = torch.float64,
    on_step: Callable[[int], None] | None = None,
) -> CharRun:
    """Experiment C: train every exponent on every seed at once, with Adam on φ_p.

    A seed fixes the weights at the start and the batches: exponents are compared in pairs.
    WSD schedule (5 % warm-up, last 20 % linear decay), clip at norm 1 for each replica, then
    φ_p, β = (0.9, 0.95), ε = 1e-12, no weight decay. Held-out loss is the mean over a fixed
    16 384 places of the held-out text.

    Args:
        powers: exponents.
        seeds: of weights and batches.
        lr: peak learning rate.
        steps: training steps.
        batch: sequences a step.
        n_experts: 0, or experts of the mixture.
        embed_std: of the embedding at the start.
        eval_every: steps between looks at the held-out text; None looks at the end only.
        dtype: float64 by default: rounding grows over thousands of steps, and a run alone must
            give what it gives beside others.
        on_step: called with each step's number.

    Raises:
        ValueError: a bad exponent, or no seed.
    """
    exponents = [_check_power(p, "powers") for p in powers]
    if not exponents or not len(seeds):
        raise ValueError("powers and seeds must hold at least one value each")
    model = CharLM(
        load_char_data().tokenizer.vocab_size,
        [*seeds] * len(exponents),
        n_experts=n_experts,
        embed_std=embed_std,
        dtype=dtype,
    )
    rows = torch.stack([char_batches(s, steps, batch) for s in seeds], dim=1)
    rows = rows.repeat(1, len(exponents), 1, 1)
    p = torch.tensor(exponents, dtype=dtype).repeat_interleave(len(seeds))[:, None, None]
    adam = _ReplicaAdam(list(model.parameters()), p)
    looks, seen = [], []
    for t in range(steps):
        grads = torch.autograd.grad(model.losses(rows[t]).sum(), adam.params)
        adam.step(grads, lr=lr * wsd_schedule(t, steps, steps // 20))
        if t + 1 == steps or (eval_every and (t + 1) % eval_every == 0):
            seen.append(t + 1)
            looks.append(_held_out(model).view(len(exponents), len(seeds)).numpy())
        if on_step is not None:
            on_step(t)
    return CharRun(np.asarray(seen), np.asarray(looks), model)


def char_batches(seed: int, steps: int, batch: int) -> torch.Tensor:
    """The batches of a seed: (steps, batch, 7) int64, six characters and the one to predict."""
    train, length = load_char_data().train, CONTEXT + 1
    starts = batch_starts(len(train), length=length, batches=steps, batch_size=batch, seed=seed)
    return windows(train, starts, length)


class _ReplicaAdam:
    """Adam on φ_p for stacked replicas, each with its own exponent and its own clip."""

    def __init__(self, params: list[torch.Tensor], p: torch.Tensor, *, clip: float = 1.0):
        self.params, self.p, self.clip, self.t = params, p, clip, 0
        self.m = [torch.zeros_like(x) for x in params]
        self.v = [torch.zeros_like(x) for x in params]

    @torch.no_grad()
    def step(self, grads: Sequence[torch.Tensor], *, lr: float) -> None:
        self.t += 1
        b1, b2 = 0.9, 0.95
        norm = torch.stack([g.square().sum(dim=(1, 2)) for g in grads]).sum(dim=0).sqrt()
        scale = (self.clip / (norm + 1e-6)).clamp(max=1.0)[:, None, None]
        rate = lr * math.sqrt(1 - b2**self.t) / (1 - b1**self.t)
        # ε = 1e-12 of the corrected moments, in the units of the uncorrected ones
        eps = 1e-12 * math.sqrt(1 - b2**self.t)
        for x, m, v, g in zip(self.params, self.m, self.v, grads, strict=True):
            g = g * scale
            powered = g.abs().pow_(self.p).copysign_(g)
            m.lerp_(powered, 1 - b1)
            v.mul_(b2).addcmul_(powered, powered, value=1 - b2)
            x.addcdiv_(m, v.sqrt().add_(eps), value=-rate)


@torch.no_grad()
def _held_out(model: CharLM) -> torch.Tensor:
    """Loss of each replica on a fixed 16 384 places of the held-out text."""
    data = load_char_data()
    n = len(data.valid) - CONTEXT
    places = torch.linspace(0, n - 1, 16_384, dtype=torch.float64).long()
    rows = windows(data.valid, places, CONTEXT + 1)
    replicas = len(model.offsets)
    parts = [model.losses(part.expand(replicas, -1, -1)) for part in rows.split(2048)]
    return torch.stack(parts).mean(dim=0).double()


def train_char_lm_with(
    make_optimizers: Callable[[dict[str, torch.Tensor]], list[Optimizer]],
    seed: int,
    *,
    steps: int,
    batch: int = 32,
    transform: Callable[[list[torch.Tensor]], None] | None = None,
    eval_every: int | None = None,
) -> CharRun:
    """One replica of experiment C under any optimisers, else as :func:`train_char_lm`.

    Args:
        make_optimizers: from the parameters by name, each a matrix, to optimisers that share
            them out; their rates are the peaks of the schedule.
        seed: of weights and batches.
        steps: training steps.
        batch: sequences a step.
        transform: changes the gradients in place after the clip, given the parameters.
        eval_every: steps between looks at the held-out text; None looks at the end only.

    Returns:
        The run; ``losses`` is (n_evals, 1, 1).
    """
    model = CharLM(load_char_data().tokenizer.vocab_size, [seed])
    # matrices that share the replica's memory: a step on them is a step of the model
    matrices = {n: nn.Parameter(x.data[0]) for n, x in model.named_parameters()}
    optimizers = make_optimizers(matrices)
    groups = [(g, g["lr"]) for o in optimizers for g in o.param_groups]
    looks, seen = [], []
    for t, rows in enumerate(char_batches(seed, steps, batch)):
        grads = torch.autograd.grad(model.losses(rows[None]).sum(), list(model.parameters()))
        for matrix, grad in zip(matrices.values(), grads, strict=True):
            matrix.grad = grad[0]
        torch.nn.utils.clip_grad_norm_(matrices.values(), 1.0)
        if transform is not None:
            transform(list(matrices.values()))
        for group, peak in groups:
            group["lr"] = peak * wsd_schedule(t, steps, steps // 20)
        for o in optimizers:
            o.step()
        if t + 1 == steps or (eval_every and (t + 1) % eval_every == 0):
            seen.append(t + 1)
            looks.append(_held_out(model).view(1, 1).numpy())
    return CharRun(np.asarray(seen), np.asarray(looks), model)


# Experiments: a small transformer


class GPTRun(NamedTuple):
    """What training a transformer gave.

    Attributes:
        steps: (n_evals,) steps done at each look.
        losses: (n_evals,) held-out cross-entropy, nats a character.
        model: the trained model.
    """

    steps: np.ndarray
    losses: np.ndarray
    model: GPT


def train_gpt(
    p: float,
    seed: int,
    *,
    lr: float,
    steps: int,
    batch: int = 16,
    accumulate: int = 1,
    config: GPTConfig | None = None,
    weight_decay: float = 0.1,
    schedule: Literal["wsd", "cosine"] = "wsd",
    eval_every: int | None = None,
    tokens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
) -> GPTRun:
    """Experiment D: a GPT trained with AdamWPower, clip 1, 5 % warm-up.

    Args:
        p: exponent.
        seed: of weights and batches.
        lr: peak learning rate.
        steps: training steps.
        batch: sequences a step.
        accumulate: parts that a batch is cut into to save memory; φ_p sees their mean, once.
        config: the model; None is d = 48, 2 layers, 3 heads, 32 characters of context.
        weight_decay: decoupled decay.
        schedule: "wsd" (last 20 % decay) or "cosine" (to a tenth).
        eval_every: steps between looks at the held-out text; None looks at the end only.
        tokens: (n,) int64 to train and test on (90/10); None is Python's documentation.
        dtype: of the parameters.
        device: where to train.
        on_step: called with each step's number and loss.

    Raises:
        ValueError: a bad exponent or schedule.
    """
    if schedule not in ("wsd", "cosine"):
        raise ValueError(f"schedule must be 'wsd' or 'cosine': got {schedule!r}")
    data = load_char_data()
    train, valid = (data.train, data.valid) if tokens is None else split_tokens(tokens)
    if config is None:
        config = GPTConfig(vocab_size=data.tokenizer.vocab_size, context=32)
    model = GPT(config, seed=seed).to(device=device, dtype=dtype)
    optimizer = AdamWPower(model.parameters(), lr=lr, eps=1e-12, weight_decay=weight_decay, p=p)
    length = config.context + 1
    starts = batch_starts(len(train), length=length, batches=steps, batch_size=batch, seed=seed)
    count = min(256, len(valid) // length)
    places = torch.linspace(0, len(valid) - length, count, dtype=torch.float64).long()
    held_out = windows(valid, places, length).to(device)

    def evaluate(m: GPT) -> float:
        parts = [m.loss(part, balance_weight=0.0) * len(part) for part in held_out.split(64)]
        return float(sum(parts)) / len(held_out)

    def rate(t: int) -> float:
        if schedule == "wsd":
            return wsd_schedule(t, steps, steps // 20)
        return cosine_schedule(t, steps, steps // 20, floor=0.1)

    history = fit(
        model,
        lambda m, rows: m.loss(rows),
        (windows(train, s, length).to(device) for s in starts),
        optimizer,
        schedule=rate,
        clip=1.0,
        accumulate=accumulate,
        evaluate=evaluate,
        eval_every=eval_every,
        on_step=on_step,
    )
    return GPTRun(history.eval_steps, history.evals, model)


# Results that do not fit a chapter's time: one function, one row a run

LOOKS = 8
"""Looks at the held-out text in a shipped run, evenly spaced, the last at the end."""


@dataclass(frozen=True)
class Study:
    """Runs to be compared: every rate, exponent and seed of one model under one optimiser.

    Attributes:
        model: "mlp", "mlp wide embedding", "moe", "gpt" or "gpt moe".
        optimizer: "adamw", "muon", "sign" (momentum on signs, p → 0) or "value clip".
        steps: training steps.
        batch: sequences a step.
        rates: peak learning rates.
        powers: exponents.
        seeds: number of paired seeds, from 0.
    """

    model: str
    optimizer: str
    steps: int
    batch: int
    rates: tuple[float, ...]
    powers: tuple[float, ...] = (0.7, 1.0, 1.2)
    seeds: int = 4


STUDIES: dict[str, Study] = {
    "late": Study("mlp", "adamw", 4000, 32, (1e-3,), seeds=8),
    "batch 32": Study("mlp", "adamw", 1000, 32, (1e-3, 2e-3, 4e-3, 8e-3)),
    "batch 4": Study("mlp", "adamw", 1000, 4, (2e-3, 4e-3, 8e-3)),
    "batch 256": Study("mlp", "adamw", 1000, 256, (2e-3, 4e-3, 8e-3), seeds=3),
    "mixture": Study("moe", "adamw", 1000, 32, (2e-3, 4e-3, 8e-3)),
    "transformer": Study("gpt", "adamw", 500, 16, (1e-3, 2e-3, 4e-3), seeds=3),
    "transformer mixture": Study("gpt moe", "adamw", 500, 16, (2e-3,), seeds=3),
    "muon": Study("mlp", "muon", 1000, 32, (1e-3, 2e-3, 4e-3, 8e-3), (1.0, 1.2)),
    "sign momentum": Study("mlp", "sign", 1000, 32, (1e-3, 2e-3, 4e-3, 8e-3), (1.0,)),
    "value clip": Study("mlp", "value clip", 1000, 32, (1e-3, 2e-3, 4e-3, 8e-3), (1.0,)),
    "wide embedding": Study("mlp wide embedding", "adamw", 800, 32, (5e-4,), (0.8, 1.0, 1.2)),
}
"""What is shipped. Seed s gives the same weights and batches in every run of a study."""

RUNS: tuple[str, ...] = tuple(
    f"{name} | lr={lr:g} | p={p:g} | seed={seed}"
    for name, study in STUDIES.items()
    for lr in study.rates
    for p in study.powers
    for seed in range(study.seeds)
)


def study_run(*, run: str) -> dict[str, float]:
    """One shipped run, by its name in :data:`RUNS`.

    Returns:
        ``loss``: held-out cross-entropy at the end; ``loss_1`` … ``loss_8``: the same at eighths
        of the run.

    Raises:
        ValueError: a name that is not in :data:`RUNS`.
    """
    if run not in RUNS:
        raise ValueError(f"run must be one of RUNS: got {run!r}")
    name, *settings = run.split(" | ")
    lr, p, seed = (setting.split("=")[1] for setting in settings)
    losses = _study_losses(STUDIES[name], float(lr), float(p), int(seed))
    looks = {f"loss_{i + 1}": float(x) for i, x in enumerate(losses)}
    return {"loss": float(losses[-1]), **looks}


def _study_losses(study: Study, lr: float, p: float, seed: int) -> np.ndarray:
    """Held-out loss at each eighth of one run: (8,)."""
    shape = {"steps": study.steps, "batch": study.batch, "eval_every": study.steps // LOOKS}
    if study.model.startswith("gpt"):
        mlp = "moe" if study.model == "gpt moe" else "swiglu"
        config = GPTConfig(
            vocab_size=load_char_data().tokenizer.vocab_size,
            context=32,
            mlp=mlp,
            gate_scale=2.0 if mlp == "moe" else 1.0,
        )
        return train_gpt(p, seed, lr=lr, config=config, **shape).losses[:LOOKS]
    if study.optimizer != "adamw":
        make, transform = _baseline(study.optimizer, lr, p)
        run = train_char_lm_with(make, seed, transform=transform, **shape)
    else:
        run = train_char_lm(
            [p],
            [seed],
            lr=lr,
            n_experts=4 if study.model == "moe" else 0,
            embed_std=1.0 if study.model == "mlp wide embedding" else 0.1,
            **shape,
        )
    return run.losses[:LOOKS, 0, 0]


# Baselines


class _Baseline(NamedTuple):
    make: Callable[[dict[str, torch.Tensor]], list[Optimizer]]
    transform: Callable[[list[torch.Tensor]], None] | None


def _baseline(name: str, lr: float, p: float) -> _Baseline:
    """Another optimiser for :func:`train_char_lm_with`."""

    def adam(params: Iterable[torch.Tensor], power: float) -> Optimizer:
        return AdamWPower(params, lr=lr, eps=1e-12, weight_decay=0.0, p=power)

    def muon(params: dict[str, torch.Tensor]) -> list[Optimizer]:
        # the hidden matrix alone is Muon's; embedding, biases and head are Adam's, both at p
        rest = [x for n, x in params.items() if n != "hidden"]
        return [MuonPower([params["hidden"]], lr=lr, p=p), adam(rest, p)]

    def momentum(params: dict[str, torch.Tensor]) -> list[Optimizer]:
        return [torch.optim.SGD(params.values(), lr=lr, momentum=0.9, dampening=0.9)]

    def signs(params: list[torch.Tensor]) -> None:
        for x in params:
            x.grad.sign_()

    def clip_values(params: list[torch.Tensor]) -> None:
        # about one root mean square of an entry when the norm is at its clip of 1
        torch.nn.utils.clip_grad_value_(params, 0.01)

    return {
        "muon": _Baseline(muon, None),
        "sign": _Baseline(momentum, signs),
        "value clip": _Baseline(lambda params: [adam(params.values(), 1.0)], clip_values),
    }[name]


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=training/gradpower`` computes."""


def paired_losses(frame, study: str, lr: float, *, column: str = "loss") -> PairedRuns:
    """The shipped losses of a study at one rate, by exponent, seeds in order.

    Args:
        frame: ``load_results("training/gradpower")``, or one with columns ``run`` and ``column``.
        study: a name in :data:`STUDIES`.
        lr: one of its rates.
        column: "loss", or "loss_1" … "loss_8".

    Raises:
        ValueError: an unknown study, or a rate that it does not have.
    """
    if study not in STUDIES:
        raise ValueError(f"study must be one of {list(STUDIES)}: got {study!r}")
    if lr not in STUDIES[study].rates:
        raise ValueError(f"lr must be one of {STUDIES[study].rates}: got {lr}")
    values = frame.set_index("run")[column]
    return PairedRuns(
        {
            p: [
                values[f"{study} | lr={lr:g} | p={p:g} | seed={seed}"]
                for seed in range(STUDIES[study].seeds)
            ]
            for p in STUDIES[study].powers
        }
    )


class RateGap(NamedTuple):
    """A study's exponent against p = 1, each at its own best rate and at every shared rate.

    Attributes:
        best: p's mean loss at its best rate minus that of p = 1 at its best rate.
        rates: (n_rates,) the learning rates.
        gaps: (n_rates,) mean paired difference at each rate.
    """

    best: float
    rates: np.ndarray
    gaps: np.ndarray


def rate_gap(frame, study: str, p: float) -> RateGap:
    """Compare an exponent with p = 1 when both may choose their rate.

    Raises:
        ValueError: an unknown study, or an exponent that it does not have.
    """
    if study not in STUDIES or p not in STUDIES[study].powers:
        raise ValueError(f"study and p must be in STUDIES: got {study!r}, p={p}")
    rates = STUDIES[study].rates
    runs = [paired_losses(frame, study, lr) for lr in rates]
    means = np.array([[r.scores[x].mean() for r in runs] for x in (p, 1.0)])
    best = float(means[0].min() - means[1].min())
    return RateGap(best, np.asarray(rates), means[0] - means[1])


# Exercises: each check raises AssertionError with a hint, and returns None when all is well


def check_sign_power(student: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    """Exercise 1: ``student(g, p)`` is φ_p, safe at zero, for any sign and any p > 0."""
    g = torch.tensor([-3.0, -1.0, -1e-4, 0.0, 2e-5, 0.5, 4.0], dtype=torch.float64)
    kept = g.clone()
    for p in (0.3, 0.5, 1.0, 1.2, 2.0, 3.0):
        out = student(g, p)
        assert torch.equal(g, kept), "the input must stay as it is: make a new tensor"
        assert out.shape == g.shape, f"expected the shape {tuple(g.shape)}, got {tuple(out.shape)}"
        assert out.dtype == g.dtype, f"expected the dtype {g.dtype}, got {out.dtype}"
        assert not out.isnan().any(), (
            f"NaN at p={p}: raise |g|, never a negative number, and mind log(0)"
        )
        assert out[3] == 0, f"expected phi_p(0) = 0 at p={p}, got {float(out[3])}"
        expected = [math.copysign(abs(x) ** p, x) for x in kept.tolist()]
        assert torch.allclose(out, torch.tensor(expected, dtype=g.dtype), rtol=1e-12, atol=0), (
            f"expected sign(g)|g|^p at p={p}: {expected}, got {out.tolist()}"
        )
    twice, once = student(student(g, 0.5), 3.0), student(g, 1.5)
    assert torch.allclose(twice, once, rtol=1e-12, atol=0), "expected phi_3(phi_0.5) = phi_1.5"
    assert torch.allclose(student(-g, 1.2), -student(g, 1.2)), "expected an odd function"


def check_power_step(student: Callable[[Optimizer, float], None]) -> None:
    """Exercise 2: ``student(optimizer, p)`` powers every gradient, then steps the optimiser."""
    makers = {
        "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    }
    for name, make in makers.items():
        for p in (0.7, 1.0, 1.2):
            generator = torch.Generator().manual_seed(0)
            mine, theirs = (
                [nn.Parameter(torch.ones(3, 2, dtype=torch.float64)) for _ in range(3)]
                for _ in range(2)
            )
            groups = [[{"params": x[:1]}, {"params": x[1:]}] for x in (mine, theirs)]
            reference, other = make(groups[0]), make(groups[1])
            for _ in range(5):
                for a, b in zip(mine[:2], theirs[:2], strict=True):
                    a.grad = torch.randn(3, 2, generator=generator, dtype=torch.float64)
                    b.grad = a.grad.clone()
                    a.grad = a.grad.sign() * a.grad.abs() ** p
                reference.step()
                try:
                    student(other, p)
                except AttributeError as error:
                    raise AssertionError(
                        f"a parameter without a gradient must be skipped: {error}"
                    ) from error
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                assert torch.allclose(a, b, rtol=1e-12, atol=1e-14), (
                    f"{name}, p={p}, parameter {i}: expected the base's own steps on "
                    "sign(g)|g|^p, in every group and at every call"
                )


def _triangular_mean(fn: Callable[[np.ndarray], np.ndarray]) -> float:
    """E fn(|ξ|) for the triangular law on [−√6, √6], by quadrature."""
    from scipy import integrate

    end = math.sqrt(6)
    value, _ = integrate.quad(lambda x: 2 * fn(x) * (end - x) / 6, 0, end, limit=200)
    return value


def check_triangular_gain(student: Callable[[float], float]) -> None:
    """Exercise 3: ``student(p)`` is c(p) for noise of triangular density."""
    for p in (0.6, 1.0, 1.2, 2.0, 3.0):
        slope = _triangular_mean(lambda x, p=p: p * x ** (p - 1))
        expected = slope / math.sqrt(_triangular_mean(lambda x, p=p: x ** (2 * p)))
        value = float(student(p))
        assert abs(value - expected) < 1e-4, (
            f"at p={p} quadrature of p E|xi|^(p-1) / sqrt(E|xi|^(2p)) gives {expected:.5f}, "
            f"got {value:.5f}"
        )


def check_stein(student: Callable[[float], float]) -> None:
    """Exercise 4: ``student(p)`` is E[ξ φ_p(ξ)] for a Gaussian ξ, which is E[φ_p′(ξ)]."""
    from scipy import integrate

    def gauss(x: float) -> float:
        return 2 * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    for p in (0.5, 0.8, 1.0, 1.2, 2.0, 3.0):
        slope, _ = integrate.quad(lambda x, p=p: p * x ** (p - 1) * gauss(x), 0, math.inf)
        square, _ = integrate.quad(lambda x, p=p: x ** (2 * p) * gauss(x), 0, math.inf)
        value = float(student(p))
        assert abs(value - slope) < 1e-6, (
            f"at p={p} Stein's identity wants E[xi phi_p(xi)] = E[phi_p'(xi)] = {slope:.6f}, "
            f"got {value:.6f}"
        )
        assert value <= math.sqrt(square) * (1 + 1e-9), (
            f"at p={p} Cauchy-Schwarz wants at most sqrt(E phi_p^2) = {math.sqrt(square):.6f}"
        )


def check_best_power(student: Callable[[np.ndarray], float]) -> None:
    """Exercise 5: ``student(grads)`` finds the best power of 200 gradients of 1000 entries."""
    for k in (1.5, 2.0, 3.0):
        rng = np.random.default_rng(round(10 * k))
        grads = make_gradients(k, rng=rng)
        value = float(student(grads.copy()))
        assert abs(value - (k - 1)) <= 0.1, (
            f"noise of shape k={k} has its best power at k-1={k - 1}: got {value:.3f}. Centre and "
            "scale each coordinate by itself before pooling"
        )


def make_gradients(
    k: float, *, n_batches: int = 200, n_coords: int = 1000, rng: np.random.Generator
) -> np.ndarray:
    """Planted mini-batch gradients: means and scales of their own, generalised Gaussian noise.

    Args:
        k: shape of the noise ∝ exp(−|x/a|^k).
        n_batches: rows.
        n_coords: columns.
        rng: source of randomness.

    Returns:
        (n_batches, n_coords) float64. Scales spread over a factor of 100, means over a fifth of
        each scale.
    """
    scale = 10 ** rng.uniform(-4, -2, n_coords)
    mean = scale * rng.uniform(-0.2, 0.2, n_coords)
    return mean + scale * draw_noise(("gennorm", k), (n_batches, n_coords), rng)
