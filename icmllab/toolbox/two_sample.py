r"""Permutation tests of association, and scores calibrated by them.

Under the null of no association the rows of Y may be paired with those of X in any order, so the
score of (X, Y) is exchangeable with the scores of (X, Y[π]). Two numbers follow from one pass
over permutations: a p-value that is valid at any sample size, and a threshold τ that serves as
the score's zero. Neither depends on what the score is.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import false_discovery_control

from icmllab.toolbox.similarity import Metric, as_features, as_pair, metric

# --------------------------------------------------------------------------------------------
# Permutations


def draw_permutations(
    n: int,
    n_perm: int,
    *,
    generator: torch.Generator | None = None,
    block: object = None,
) -> torch.Tensor:
    """Random permutations of 0..n-1, within blocks where these are given.

    Args:
        n: length, >= 1.
        n_perm: how many, >= 1.
        generator: source of randomness on the CPU; None draws from a generator of its own that
            is seeded with 0, so that equal calls give equal results.
        block: (n,) labels; only samples with equal labels change places.

    Returns:
        (n_perm, n) int64.

    Raises:
        ValueError: a size that is no whole number or below 1, or ``block`` of another length.
    """
    _check_count("n", n)
    _check_count("n_perm", n_perm)
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    noise = torch.rand(n_perm, n, generator=generator, dtype=torch.float64)
    if block is None:
        return torch.argsort(noise, dim=1)
    labels = np.asarray(block.cpu() if isinstance(block, torch.Tensor) else block)
    if labels.shape != (n,):
        raise ValueError(f"block must hold one label a row, shape ({n},): got {labels.shape}")
    group = torch.from_numpy(np.unique(labels, return_inverse=True)[1].reshape(-1))
    home = torch.argsort(group, stable=True)
    # sorted by (group, noise), slot s of a group holds a random member of that group
    shuffled = torch.argsort(group + noise, dim=1)
    return torch.empty_like(shuffled).scatter_(1, home.expand_as(shuffled), shuffled)


def check_permutations(perms: object, n: int) -> torch.Tensor:
    """``perms`` as (B, n) int64, every row a permutation of 0..n-1.

    Raises:
        ValueError: another shape or dtype, no row, or a row that is no permutation.
    """
    perms = torch.as_tensor(perms)
    if perms.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"perms must have dtype int64: got {perms.dtype}")
    if perms.ndim != 2 or perms.shape[1] != n or len(perms) < 1:
        raise ValueError(f"perms must have shape (B >= 1, n = {n}): got {tuple(perms.shape)}")
    perms = perms.to(torch.int64)
    wrong = (perms.sort(dim=1).values != torch.arange(n, device=perms.device)).any(dim=1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(f"perms must hold permutations of 0..{n - 1}: row {row} is none")
    return perms


# --------------------------------------------------------------------------------------------
# From a null sample to p, τ and the calibrated score


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be at least 1, a whole number: got {value!r}")


class PermutationTest(NamedTuple):
    """A score beside its null sample: p-value, threshold, and the score above the threshold."""

    p_value: float
    tau: float
    score: float


def check_alpha(alpha: float, n_perm: int) -> None:
    """ValueError unless a test with ``n_perm`` permutations can reject at ``alpha``."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be in (0, 1): got {alpha}")
    _check_count("n_perm", n_perm)
    if alpha * (n_perm + 1) < 1 - 1e-9:
        needed = math.ceil(1 / alpha - 1e-9) - 1
        raise ValueError(
            f"n_perm must be at least {needed} for alpha={alpha}: the smallest p-value is "
            f"1/(n_perm+1), so with n_perm={n_perm} the test can never reject"
        )


def permutation_test(
    observed: float, null: object, *, alpha: float = 0.05, s_max: float | None = 1.0
) -> PermutationTest:
    r"""p-value, threshold and calibrated score of an observed score against its null sample.

    p = (1 + #{b: s_b >= s₀})/(B+1); τ is the ⌈(1-α)(B+1)⌉-th smallest of {s₀, s₁, …, s_B}, the
    observed score included; the calibrated score is clip((s₀-τ)/(s_max-τ), 0, 1), or
    max(s₀-τ, 0) when ``s_max`` is None. A positive calibrated score implies p <= α
    (Algorithm 1 of the paper).

    Args:
        observed: s₀.
        null: (B,) the scores under permutation.
        alpha: level, in (0, 1), with α(B+1) >= 1.
        s_max: upper end of the score, > 0 and finite; None for a score without one.

    Raises:
        ValueError: bad level, no null score, a score that is not finite, or a bad ``s_max``.
    """
    null = np.asarray(null, dtype=np.float64)
    if null.ndim != 1:
        raise ValueError(f"null must be one-dimensional: got shape {null.shape}")
    check_alpha(alpha, len(null))
    if s_max is not None and not 0 < s_max < math.inf:
        raise ValueError(f"s_max must be > 0 and finite, or None: got {s_max}")
    if not (math.isfinite(observed) and np.isfinite(null).all()):
        raise ValueError("observed and null must be finite: the score is NaN or infinite")
    n_scores = len(null) + 1
    p_value = float((1 + (null >= observed).sum()) / n_scores)
    # 1e-9: in floating point (1-α)(B+1) may land just above a whole number
    rank = math.ceil((1 - alpha) * n_scores - 1e-9)
    tau = float(np.partition(np.append(null, observed), rank - 1)[rank - 1])
    if s_max is None:
        score = max(observed - tau, 0.0)
    else:
        score = min(max((observed - tau) / max(s_max - tau, 1e-12), 0.0), 1.0)
    return PermutationTest(p_value, tau, score)


def snap_ties(observed: float, null: torch.Tensor) -> torch.Tensor:
    """Null scores that differ from the observed one by rounding alone are made equal to it.

    A permutation that exchanges two equal rows gives the same score up to the order of the sum.
    """
    scale = max(abs(observed), float(null.abs().max()))
    return torch.where((null - observed).abs() <= 1e-12 * scale, observed, null)


# --------------------------------------------------------------------------------------------
# Calibrated similarity


class Calibrated(NamedTuple):
    """A similarity and what permutations say about it.

    Attributes:
        raw: the score of X and Y, as it enters the test. A neighbour metric's `Metric.raw` gives
            the same number unless neighbours in Y tie: those are broken by `tie_order` here.
        score: the calibrated score, 0 where the raw one does not exceed τ.
        p_value: share of permutations, the identity included, with at least the raw score.
        tau: the threshold, the score's new zero.
        null: (B,) float64, the scores under permutation.
    """

    raw: float
    score: float
    p_value: float
    tau: float
    null: torch.Tensor


class CalibratedLayers(NamedTuple):
    """An aggregate over all pairs of layers and what permutations say about it.

    Attributes:
        raw: the aggregate T₀ of the raw scores.
        score: calibrated aggregate.
        p_value: its p-value.
        tau: its threshold.
        null: (B,) float64, the aggregates under permutation.
        layer_scores: (L_A, L_B) float64 raw scores.
        argmax: (i, j) of the largest raw score.
    """

    raw: float
    score: float
    p_value: float
    tau: float
    null: torch.Tensor
    layer_scores: torch.Tensor
    argmax: tuple[int, int]


def calibrate(
    X: object,
    Y: object,
    metric: str | Metric | Callable = "cka_linear",
    *,
    n_perm: int = 199,
    alpha: float = 0.05,
    s_max: float | None = 1.0,
    generator: torch.Generator | None = None,
    perms: object = None,
    block: object = None,
) -> Calibrated:
    """Calibrate a similarity by permuting the rows of Y (Algorithm 1).

    Args:
        X: (n, d_x) tensor or array, float32 or float64; computed in float64. n >= 4.
        Y: (n, d_y), the same samples in the same order.
        metric: a name, a `Metric` (for parameters: ``metric("mutual_knn", k=4)``), or a callable
            that takes float64 tensors (X, Y[π]) and returns a float; it is called once for the
            observed pair and once a permutation. A callable must not look at the order of the
            rows, not even to break ties: the test would be invalid.
        n_perm: B, number of permutations.
        alpha: level of τ; α(B+1) must be at least 1, and is best a whole number.
        s_max: upper end of the score; None for a score without one.
        generator: source of the permutations; None is seeded with 0.
        perms: (B, n) int64 permutations to use instead.
        block: (n,) labels: only samples of equal label change places, so that agreement due to
            the labels is part of the null.

    Raises:
        ValueError: bad input; the message names the argument.
    """
    X, Y = as_pair(X, Y)
    perms = choose_permutations(
        len(X), n_perm=n_perm, alpha=alpha, generator=generator, perms=perms, block=block
    ).to(X.device)
    found = _resolve(metric)
    if isinstance(found, Metric):
        # the observed score goes through the same sums as the others: the identity comes first
        prepared = found.prepare(X, Y, order=tie_order(perms))
        scores = found.null(prepared, with_identity(perms))
    else:
        values = [float(found(X, Y)), *(float(found(X, Y[perm])) for perm in perms)]
        scores = torch.tensor(values, dtype=torch.float64)
    return calibrated(scores, alpha=alpha, s_max=s_max)


def calibrate_layers(
    Xs: Sequence,
    Ys: Sequence,
    metric: str | Metric | Callable = "cka_linear",
    *,
    agg: str | Callable = "max",
    n_perm: int = 199,
    alpha: float = 0.05,
    s_max: float | None = 1.0,
    generator: torch.Generator | None = None,
    perms: object = None,
    block: object = None,
) -> CalibratedLayers:
    """Calibrate an aggregate over all pairs of layers (Algorithm 2).

    One permutation is applied to all layers of Y at once, and the aggregate is taken inside the
    null: the search for the best pair is then part of what is calibrated.

    Args:
        Xs: L_A feature matrices, (n, d_i) each.
        Ys: L_B feature matrices, (n, d_j) each.
        metric: as in `calibrate`.
        agg: "max", "mean", or a callable from (L_A, L_B) float64 scores to a float.
        n_perm: as in `calibrate`, like the arguments that follow.

    Raises:
        ValueError: an empty list, unequal numbers of rows, or as in `calibrate`.
    """
    Xs, Ys = check_layers(Xs, Ys)
    perms = choose_permutations(
        len(Xs[0]), n_perm=n_perm, alpha=alpha, generator=generator, perms=perms, block=block
    ).to(Xs[0].device)
    scores = layer_scores(Xs, Ys, metric, perms)  # (L_A, L_B, 1 + B)
    totals = calibrated(aggregate(scores, agg), alpha=alpha, s_max=s_max)
    best = divmod(int(scores[:, :, 0].argmax()), len(Ys))
    return CalibratedLayers(*totals, scores[:, :, 0].clone(), best)


def layer_scores(
    Xs: Sequence[torch.Tensor],
    Ys: Sequence[torch.Tensor],
    metric: str | Metric | Callable,
    perms: torch.Tensor,
) -> torch.Tensor:
    """The scores of every pair of layers, first observed, then permuted: (L_A, L_B, 1 + B) float64.

    Args:
        Xs: checked float64 layers, see `check_layers`.
        Ys: the same.
        metric: as in `calibrate`.
        perms: (B, n) int64.
    """
    found = _resolve(metric)
    if isinstance(found, Metric):
        order = tie_order(perms)  # one for all layers, as one permutation is
        right = [found.partner(Y, order) for Y in Ys]
        return found.null_layers([found.side(X) for X in Xs], right, with_identity(perms))
    perms = with_identity(perms)
    out = torch.empty(len(Xs), len(Ys), len(perms), dtype=torch.float64)
    for b, perm in enumerate(perms):
        for j, Y in enumerate(Ys):
            moved = Y[perm]
            for i, X in enumerate(Xs):
                out[i, j, b] = float(found(X, moved))
    return out


def aggregate(scores: torch.Tensor, agg: str | Callable) -> torch.Tensor:
    """One number a permutation from (L_A, L_B, B) scores: (B,) float64."""
    if agg == "max":
        return scores.amax(dim=(0, 1))
    if agg == "mean":
        return scores.mean(dim=(0, 1))
    if not callable(agg):
        raise ValueError(f"agg must be 'max', 'mean' or a callable: got {agg!r}")
    values = [float(agg(scores[:, :, b])) for b in range(scores.shape[2])]
    return torch.tensor(values, dtype=torch.float64)


def check_layers(Xs: Sequence, Ys: Sequence) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Both lists of layers as float64 feature matrices with one number of rows.

    Raises:
        ValueError: an empty list, a bad layer, or unequal numbers of rows.
    """
    out = []
    for name, layers in (("Xs", Xs), ("Ys", Ys)):
        if len(layers) == 0:
            raise ValueError(f"{name} must hold at least one layer: got none")
        out.append([as_features(f"{name}[{i}]", layer) for i, layer in enumerate(layers)])
    rows = {len(layer) for layers in out for layer in layers}
    if len(rows) > 1:
        raise ValueError(f"Xs and Ys must have the same number of rows: got {sorted(rows)}")
    return out[0], out[1]


def _resolve(found: str | Metric | Callable) -> Metric | Callable:
    if isinstance(found, str):
        return metric(found)
    if isinstance(found, Metric) or callable(found):
        return found
    raise ValueError(f"metric must be a name, a Metric or a callable: got {found!r}")


def choose_permutations(
    n: int,
    *,
    n_perm: int,
    alpha: float,
    generator: torch.Generator | None = None,
    perms: object = None,
    block: object = None,
) -> torch.Tensor:
    """The permutations that a call asks for, checked against its level: (B, n) int64.

    Args:
        n: number of rows.
        n_perm: as in `calibrate`, like the arguments that follow; not used when ``perms`` is given.

    Raises:
        ValueError: as in `calibrate`.
    """
    if perms is not None:
        if block is not None:
            raise ValueError("block must be None when perms are given: they fix the pairing")
        perms = check_permutations(perms, n)
        check_alpha(alpha, len(perms))
        return perms
    check_alpha(alpha, n_perm)
    return draw_permutations(n, n_perm, generator=generator, block=block)


def tie_order(perms: torch.Tensor) -> torch.Tensor:
    """A random order of the rows, by which a neighbour metric breaks the ties of Y: (n,) int64.

    Its seed is a hash of ``perms``, (B, n) int64: as random as these are, the same for the same
    ones, and without a draw from the caller's generator. The level holds over that randomness.
    """
    digest = hashlib.blake2b(perms.cpu().contiguous().numpy().tobytes(), digest_size=8).digest()
    source = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randperm(perms.shape[1], generator=source)


def with_identity(perms: torch.Tensor) -> torch.Tensor:
    """The identity, which gives the observed score, and then ``perms``: (1 + B, n)."""
    identity = torch.arange(perms.shape[1], device=perms.device)
    return torch.cat([identity[None], perms])


def calibrated(scores: torch.Tensor, *, alpha: float, s_max: float | None) -> Calibrated:
    """The calibrated result from (1 + B,) scores, the observed one first."""
    observed = float(scores[0])
    null = snap_ties(observed, scores[1:])
    test = permutation_test(observed, null, alpha=alpha, s_max=s_max)
    return Calibrated(observed, test.score, test.p_value, test.tau, null)


# --------------------------------------------------------------------------------------------
# Many tests


class Discoveries(NamedTuple):
    """Which of many tests are significant when their false discovery rate is held.

    Attributes:
        rejected: bool tensor, the shape of the p-values.
        adjusted: float64, the smallest q at which each would be rejected.
    """

    rejected: torch.Tensor
    adjusted: torch.Tensor


def fdr_bh(p: object, q: float = 0.05) -> Discoveries:
    """The Benjamini–Hochberg procedure on p-values of any shape, over SciPy.

    Args:
        p: p-values in [0, 1]: a number's worth or more, any shape.
        q: false discovery rate, in (0, 1).

    Raises:
        ValueError: no p-value, one outside [0, 1], or a bad ``q``.
    """
    values = np.asarray(p, dtype=np.float64)
    if values.size == 0:
        raise ValueError("p must hold at least one p-value: got none")
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("p must lie in [0, 1]: a value is outside or NaN")
    if not 0 < q < 1:
        raise ValueError(f"q must be in (0, 1): got {q}")
    adjusted = torch.from_numpy(false_discovery_control(values.reshape(-1)).reshape(values.shape))
    return Discoveries(adjusted <= q, adjusted)
