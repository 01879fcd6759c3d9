"""Training: one loop, an average of the weights, and comparisons that are paired by seed.

The loop does the steps in the order that optimisers assume: gradient, clip, rate, step. Progress
is the caller's: pass ``on_step``, or wrap the batches in a progress bar.
"""

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn


class History(NamedTuple):
    """What a run left behind.

    Attributes:
        losses: (n_steps,) float64, the training loss before each step.
        grad_norms: (n_steps,) float64, the global norm before clipping.
        eval_steps: (n_evals,) int64, steps done at each evaluation.
        evals: (n_evals,) float64, what ``evaluate`` said.
    """

    losses: np.ndarray
    grad_norms: np.ndarray
    eval_steps: np.ndarray
    evals: np.ndarray


class EMA:
    """An exponential average of a model's parameters; buffers are copied.

    Args:
        model: what to average; :attr:`model` starts as its copy.
        decay: weight of the past, in [0, 1).

    Raises:
        ValueError: a decay out of range.
    """

    def __init__(self, model: nn.Module, *, decay: float):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1): got {decay}")
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards ``model``."""
        for mean, now in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(now, 1 - self.decay)
        for mine, now in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(now)


def fit(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, object], torch.Tensor],
    batches: Iterable,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    schedule: Callable[[int], float] | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    ema: EMA | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    eval_every: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> History:
    """Train ``model`` for one step a batch.

    Args:
        model: trained in place, in training mode.
        loss_fn: ``loss_fn(model, batch)``, a scalar with a gradient.
        batches: one element a step; its length is the run's.
        optimizer: one, or several that share the model's parameters among them.
        schedule: factor of each group's initial rate at a step, from 0.
        clip: largest global norm of the gradient; None does not clip.
        accumulate: parts that a batch, a tensor with samples first, is cut into; the gradient is
            that of the whole batch (``loss_fn`` being a mean), the memory that of a part.
        ema: updated after each step.
        evaluate: called on the model in evaluation mode without gradients, every ``eval_every``
            steps and at the end.
        eval_every: None means at the end only.
        on_step: called with the step's number, from 0, and its loss.

    Returns:
        The run's history.

    Raises:
        ValueError: a bad ``clip``, ``accumulate`` or ``eval_every``.
        FloatingPointError: the loss is not finite; the message names the step.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be > 0: got {clip}")
    if eval_every is not None and eval_every < 1:
        raise ValueError(f"eval_every must be >= 1: got {eval_every}")
    if accumulate < 1:
        raise ValueError(f"accumulate must be >= 1: got {accumulate}")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    groups = [group for o in optimizers for group in o.param_groups]
    rates = [group["lr"] for group in groups]
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses, norms, eval_steps, evals = [], [], [], []

    def look(done: int) -> None:
        model.eval()
        with torch.no_grad():
            evals.append(float(evaluate(model)))
        eval_steps.append(done)
        model.train()

    model.train()
    done = 0
    for step, batch in enumerate(batches):
        if schedule is not None:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * schedule(step)
        for o in optimizers:
            o.zero_grad(set_to_none=True)
        value = _backward(model, loss_fn, batch, accumulate)
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value} at step {step}")
        limit = math.inf if clip is None else clip
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        for o in optimizers:
            o.step()
        if ema is not None:
            ema.update(model)
        losses.append(value)
        done = step + 1
        if on_step is not None:
            on_step(step, value)
        if evaluate is not None and eval_every is not None and done % eval_every == 0:
            look(done)
    if evaluate is not None and (not eval_steps or eval_steps[-1] != done):
        look(done)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    return History(
        np.asarray(losses),
        np.asarray(norms),
        np.asarray(eval_steps, dtype=np.int64),
        np.asarray(evals),
    )


def _backward(model: nn.Module, loss_fn: Callable, batch: object, accumulate: int) -> float:
    """Add the gradient of the batch's loss to the parameters; returns the loss."""
    if accumulate == 1:
        loss = loss_fn(model, batch)
        loss.backward()
        return loss.item()
    value = 0.0
    for part in batch.chunk(accumulate):
        loss = loss_fn(model, part) * (len(part) / len(batch))
        loss.backward()
        value += loss.item()
    return value


class PairedDifference(NamedTuple):
    """How one arm differs from another on the same seeds.

    Attributes:
        per_seed: (n_seeds,) the differences.
        mean: their mean.
        sem: its standard error; NaN for one seed.
        low, high: 95 % interval of the mean by Student's t; NaN for one seed.
    """

    per_seed: np.ndarray
    mean: float
    sem: float
    low: float
    high: float


class PairedRuns:
    """A score for each arm and seed; an arm's run on a seed shares its draws with the others'.

    Differences between arms are often far below the spread between seeds: pairing takes that
    spread out.

    Args:
        scores: arm → (n_seeds,) scores, seeds in the same order everywhere.

    Raises:
        ValueError: no arm, arms of different lengths, or scores that are no vector.
    """

    def __init__(self, scores: Mapping[Hashable, Sequence[float]]):
        self.scores = {arm: np.asarray(s, dtype=np.float64) for arm, s in scores.items()}
        shapes = {s.shape for s in self.scores.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1 or next(iter(shapes)) == (0,):
            raise ValueError(f"scores must hold vectors of one length, one an arm: got {shapes}")

    def difference(self, arm: Hashable, against: Hashable) -> PairedDifference:
        """``arm`` minus ``against``, seed by seed.

        Raises:
            ValueError: an arm that there is not.
        """
        from scipy import stats

        for name, value in (("arm", arm), ("against", against)):
            if value not in self.scores:
                raise ValueError(f"{name} must be one of {list(self.scores)}: got {value!r}")
        gap = self.scores[arm] - self.scores[against]
        mean, n = float(gap.mean()), len(gap)
        if n == 1:
            return PairedDifference(gap, mean, math.nan, math.nan, math.nan)
        sem = float(gap.std(ddof=1) / math.sqrt(n))
        half = float(stats.t.ppf(0.975, n - 1)) * sem
        return PairedDifference(gap, mean, sem, mean - half, mean + half)


def compare_paired(
    run: Callable[[Hashable, int], float], *, arms: Sequence[Hashable], seeds: Iterable[int]
) -> PairedRuns:
    """Call ``run(arm, seed)`` for every pair; a run must take all its randomness from ``seed``."""
    seeds = list(seeds)
    return PairedRuns({arm: [float(run(arm, seed)) for seed in seeds] for arm in arms})
