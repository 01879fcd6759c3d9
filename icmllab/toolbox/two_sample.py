"""Permutation tests and the scores calibrated by them; false discoveries among many tests."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import false_discovery_control

from icmllab.toolbox.similarity import Metric, as_pair, metric

MetricLike = str | Metric | Callable[[torch.Tensor, torch.Tensor], float]


class Calibrated(NamedTuple):
    """A similarity score with the zero that its permutation null gives it.

    Attributes:
        raw: the score itself.
        score: (raw - tau) / (s_max - tau), clipped to [0, 1]; 0 where the null explains it.
        p_value: share of the null, the observed pairing counted in, that is at least as large.
        tau: the level that unrelated data exceed with probability at most alpha.
        null: (B,) float64, the score under each permutation.
    """

    raw: float
    score: float
    p_value: float
    tau: float
    null: torch.Tensor


class Discoveries(NamedTuple):
    """Which of many hypotheses are rejected at a false discovery rate.

    Attributes:
        rejected: bool array.
        adjusted: p-values adjusted by Benjamini and Hochberg; rejected where at most q.
    """

    rejected: np.ndarray
    adjusted: np.ndarray


def check_alpha(alpha: float, n_perm: int) -> None:
    """ValueError unless a test with ``n_perm`` permutations can reject at level ``alpha``."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be in (0, 1): got {alpha}")
    if n_perm < 1:
        raise ValueError(f"n_perm must be at least 1: got {n_perm}")
    if alpha * (n_perm + 1) < 1 - 1e-9:
        raise ValueError(
            f"alpha * (n_perm + 1) must be at least 1, else the test can never reject: got "
            f"alpha={alpha}, n_perm={n_perm}; use n_perm >= {math.ceil(1 / alpha - 1e-9) - 1}"
        )


def random_permutations(
    n: int,
    n_perm: int,
    *,
    generator: torch.Generator | None = None,
    block: object = None,
) -> torch.Tensor:
    """Uniform random permutations of 0..n-1, as (n_perm, n) int64.

    Args:
        n: number of samples.
        n_perm: number of permutations.
        generator: source of randomness on the CPU.
        block: (n,) labels; samples are then exchanged within a label only.
    """
    keys = torch.rand(n_perm, n, generator=generator, dtype=torch.float64)
    if block is None:
        return keys.argsort(dim=1)
    labels = torch.as_tensor(block)
    if labels.shape != (n,):
        raise ValueError(f"block must have shape ({n},): got {tuple(labels.shape)}")
    _, label = torch.unique(labels, return_inverse=True)
    perms = torch.empty(n_perm, n, dtype=torch.int64)
    for value in range(int(label.max()) + 1):
        at = torch.nonzero(label == value)[:, 0]
        perms[:, at] = at[keys[:, at].argsort(dim=1)]
    return perms


def check_permutations(perms: object, n: int) -> torch.Tensor:
    """``perms`` as (B, n) int64; ValueError unless every row is a permutation of 0..n-1."""
    perms = torch.as_tensor(perms)
    if perms.ndim != 2 or perms.shape[1] != n or len(perms) == 0:
        raise ValueError(f"perms must be (B, {n}) with B >= 1: got shape {tuple(perms.shape)}")
    if perms.is_floating_point() or perms.dtype == torch.bool:
        raise ValueError(f"perms must hold integers: got {perms.dtype}")
    perms = perms.long().cpu()
    if not torch.equal(perms.sort(dim=1).values, torch.arange(n).expand_as(perms)):
        raise ValueError(f"perms must hold a permutation of 0..{n - 1} in every row")
    return perms


def choose_permutations(
    n: int,
    *,
    n_perm: int,
    alpha: float,
    generator: torch.Generator | None,
    perms: object,
    block: object,
) -> torch.Tensor:
    """The permutations of a test: those given, else random ones; checked against ``alpha``."""
    if perms is not None:
        if block is not None:
            raise ValueError("block must be None when perms are given")
        perms = check_permutations(perms, n)
        check_alpha(alpha, len(perms))
        return perms
    check_alpha(alpha, n_perm)
    return random_permutations(n, n_perm, generator=generator, block=block)


def calibrate_scores(
    observed: float, null: torch.Tensor, *, alpha: float = 0.05, s_max: float | None = 1.0
) -> Calibrated:
    """Calibrate an observed score by its null (Algorithm 1, steps c to e).

    Args:
        observed: the score s₀.
        null: (B,) scores under permutations.
        alpha: level of the threshold tau.
        s_max: largest possible score; None leaves the calibrated score unscaled.

    tau is the ceil((1 - alpha)(B + 1))-th smallest of the B + 1 scores, the observed one among
    them, so that score > 0 implies p_value <= alpha.
    """
    null = torch.as_tensor(null, dtype=torch.float64).reshape(-1)
    check_alpha(alpha, len(null))
    if s_max is not None and not s_max > 0:
        raise ValueError(f"s_max must be positive or None: got {s_max}")
    if math.isnan(observed) or torch.isnan(null).any():
        raise ValueError("observed and null must not hold nan: the metric is undefined here")
    count = len(null)
    together = torch.cat([null, torch.tensor([observed], dtype=torch.float64)]).sort().values
    # floating point may put the product a hair above a whole number
    rank = math.ceil((1 - alpha) * (count + 1) - 1e-9)
    tau = together[rank - 1].item()
    p_value = (1 + int((null >= observed).sum())) / (count + 1)
    if s_max is None:
        score = max(observed - tau, 0.0)
    else:
        score = min(max((observed - tau) / max(s_max - tau, 1e-12), 0.0), 1.0)
    return Calibrated(observed, score, p_value, tau, null)


def calibrate(
    X: object,
    Y: object,
    metric: MetricLike = "cka_linear",
    *,
    n_perm: int = 199,
    alpha: float = 0.05,
    s_max: float | None = 1.0,
    generator: torch.Generator | None = None,
    perms: object = None,
    block: object = None,
) -> Calibrated:
    """A similarity score, its p-value, and its calibrated form (Algorithm 1).

    Args:
        X: (n, d_x) features, float32 or float64; arithmetic is in float64.
        Y: (n, d_y) features of the same samples.
        metric: a metric's name, a Metric, or a function of two float64 tensors (X, Y[perm]) that
            returns a number; it is called once for the observed pairing and once a permutation.
        n_perm: number of random permutations B.
        alpha: level of the test, in (0, 1).
        s_max: largest possible score; None when there is none.
        generator: source of the permutations.
        perms: (B, n) permutations to use instead of random ones.
        block: (n,) labels; rows are exchanged within a label only.

    Raises:
        ValueError: bad shapes, fewer than 4 samples, non-finite entries, an ``alpha`` that can
            never reject, ``perms`` that are no permutations, or data without variance.
    """
    X, Y = as_pair(X, Y)
    chosen = choose_permutations(
        len(X), n_perm=n_perm, alpha=alpha, generator=generator, perms=perms, block=block
    )
    scores = paired_scores(X, Y, metric, chosen)
    return calibrate_scores(scores[0].item(), scores[1:], alpha=alpha, s_max=s_max)


def paired_scores(
    X: torch.Tensor, Y: torch.Tensor, metric: MetricLike, perms: torch.Tensor
) -> torch.Tensor:
    """(1 + B,) scores: the observed pairing, then each permutation, by the same arithmetic.

    Were the observed score summed another way, rounding would break its ties with the null.
    """
    perms = torch.cat([torch.arange(len(X))[None], perms])
    if isinstance(metric, str | Metric):
        chosen = as_metric(metric)
        return chosen.null(chosen.prepare(X, Y), perms)
    return torch.tensor([float(metric(X, Y[perm])) for perm in perms], dtype=torch.float64)


def as_metric(choice: str | Metric) -> Metric:
    """A metric by name, with its default parameters, or as it is."""
    return metric(choice) if isinstance(choice, str) else choice


def fdr_bh(p: object, q: float) -> Discoveries:
    """Benjamini and Hochberg's procedure at false discovery rate ``q``.

    Args:
        p: p-values in [0, 1], any shape.
        q: the rate, in (0, 1).
    """
    p = np.asarray(p, dtype=float)
    if p.size == 0 or not ((p >= 0) & (p <= 1)).all():
        raise ValueError("p must hold values in [0, 1], at least one")
    if not 0 < q < 1:
        raise ValueError(f"q must be in (0, 1): got {q}")
    adjusted = false_discovery_control(p.reshape(-1)).reshape(p.shape)
    return Discoveries(adjusted <= q, adjusted)
