r"""From Generalist to Specialist Representation (arXiv 2605.12733).

Two questions about what can be recovered at all. *Across time*: which steps of a long sequence
serve the same task? A task is a common effect (a collider) of its steps, the data are those
sequences in which the tasks came out as they should, and this selection makes steps of one task
dependent given everything else, and no others (`task_graph`, `task_sets`). *Within a step*: which
part of the latent does a task need? An invertible code of which as few units as possible feed the
task recovers that part as a block (`fit_specialist`, `linear_specialist`).

The setting and the two theorems are the paper's in outline: we worked from its abstract and the
opening of its introduction. The selection generator, the test statistic, the rule for neighbouring
segments, the reading by cliques, the training objective with its pruning stage, and all data are
this book's reconstruction.
"""

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import networkx as nx
import numpy as np
import torch
from torch import nn

from icmllab.toolbox.schedules import cosine_schedule

__all__ = [
    "SHIPPED",
    "BlockPrediction",
    "CITest",
    "FitHistory",
    "LeakyMixing",
    "MixedLatents",
    "Sequences",
    "SpecialistFit",
    "SpecialistRepresentation",
    "assignment_matrix",
    "block_r2",
    "bottleneck_code",
    "change_point_sets",
    "check_block_directions",
    "check_cancelled_edge",
    "check_collider_bias",
    "check_partial_correlation",
    "check_task_reading",
    "ci_test",
    "exact_interactions",
    "fastica_code",
    "fit_specialist",
    "glasso_graph",
    "graph_scores",
    "has_clique_property",
    "jacobian_leakage",
    "jacobian_magnitudes",
    "last_first_graph",
    "linear_coefficients",
    "linear_specialist",
    "load_wine_task",
    "make_bell_selection",
    "make_mixed_latents",
    "make_selection_sequences",
    "marginal_graph",
    "moral_graph",
    "outcome_graph",
    "predict_block",
    "prune_specialist",
    "score_tasks",
    "study_run",
    "task_graph",
    "task_loss",
    "task_sets",
]

MAX_PROPOSALS = 10_000_000
"""Proposals after which rejection sampling gives up."""

FEW_ROWS = 200
"""With fewer selected rows than this the tests have little power, and the generator warns."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _check_count(name: str, value: int, *, least: int = 1) -> None:
    if isinstance(value, bool) or value != int(value) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}: got {value!r}")


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be in (0, 1): got {alpha}")


def _as_rows(name: str, X: object) -> torch.Tensor:
    """``X`` as a finite (n, d) float64 tensor on its own device."""
    X = torch.as_tensor(X)
    if X.ndim != 2 or len(X) < 2:
        raise ValueError(f"{name} must have shape (n >= 2, d): got {tuple(X.shape)}")
    if X.is_complex():
        raise ValueError(f"{name} must be real: got {X.dtype}")
    X = X.detach().to(torch.float64)
    if not bool(torch.isfinite(X).all()):
        raise ValueError(f"{name} must be finite: it holds NaN or infinite entries")
    return X


def _check_tasks(tasks: Iterable[Iterable[int]], K: int) -> list[frozenset]:
    """The tasks as sets of segments 0..K-1, at least two in each."""
    out = []
    for task in tasks:
        members = frozenset(int(k) for k in task)
        if len(members) < 2:
            raise ValueError(f"tasks must have at least 2 members each: got {sorted(members)}")
        if min(members) < 0 or max(members) >= K:
            raise ValueError(f"tasks must name segments 0..{K - 1}: got {sorted(members)}")
        out.append(members)
    return out


# --------------------------------------------------------------------------------------------
# Level 1, data: tasks as colliders, conditioned on


class Sequences(NamedTuple):
    """Sequences in which every task came out as it should.

    Attributes:
        S: (n, K*steps) float64; column k*steps + l is step l of segment k.
        tasks: the member sets M_τ.
        n_proposed: how many sequences were drawn to keep these.
        outcomes: (n, n_tasks) float64, the kept values of the common effects g_τ.
    """

    S: torch.Tensor
    tasks: list[frozenset]
    n_proposed: int
    outcomes: torch.Tensor


def make_selection_sequences(
    n: int,
    K: int,
    tasks: Iterable[Iterable[int]],
    *,
    steps: int = 1,
    rho: float = 0.0,
    breaks: Iterable[int] = (),
    noise: float = 0.2,
    accept: float = 0.45,
    proposals: int | None = None,
    generator: torch.Generator | None = None,
) -> Sequences:
    """Draw sequences and keep those whose task constraints all hold.

    Before selection the T = K*steps columns are N(0, 1), s_t = ρ s_{t-1} + √(1-ρ²) ε_t, with the
    link into each step of ``breaks`` cut. Task τ has the effect g_τ = Σ w tanh(s) + noise·ε over
    all steps of its members, w = ±1 drawn once a data set; a sequence is kept when
    |g_τ| < accept·√|M_τ| for every τ.

    Args:
        n: sequences to keep.
        K: segments, >= 2.
        tasks: member sets, two or more segments each; an empty list selects nothing away.
        steps: L, steps of a segment.
        rho: ρ, in (-1, 1); 0 makes all steps independent.
        breaks: steps (1..T-1) whose link to the step before is cut.
        noise: standard deviation of the noise in an effect, >= 0.
        accept: half-width of the accepted band, > 0; smaller selects more strongly.
        proposals: draw exactly this many and keep at most n of the accepted; by default draw until
            n are kept.
        generator: randomness on the CPU; None is seeded with 0.

    Raises:
        ValueError: a size, task, break or parameter out of range.
        RuntimeError: 10⁷ proposals did not give n sequences.

    Warns:
        UserWarning: ``proposals`` left fewer than 200 sequences.
    """
    _check_count("n", n)
    _check_count("K", K, least=2)
    _check_count("steps", steps)
    tasks = _check_tasks(tasks, K)
    if not -1 < rho < 1:
        raise ValueError(f"rho must be in (-1, 1): got {rho}")
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise must be >= 0 and finite: got {noise}")
    if not 0 < accept < math.inf:
        raise ValueError(f"accept must be > 0 and finite: got {accept}")
    if proposals is not None:
        _check_count("proposals", proposals)
    T = K * steps
    breaks = {int(t) for t in breaks}
    if not breaks <= set(range(1, T)):
        raise ValueError(f"breaks must be steps 1..{T - 1}: got {sorted(breaks)}")
    generator = generator or _generator(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    W = torch.zeros(T, len(tasks), dtype=torch.float64)  # w_τ, one column a task
    for j, members in enumerate(tasks):
        rows = [k * steps + step for k in sorted(members) for step in range(steps)]
        signs = torch.randint(2, (len(rows),), generator=generator, dtype=torch.float64)
        W[rows, j] = 2.0 * signs - 1
    limits = accept * torch.tensor([math.sqrt(len(m)) for m in tasks], dtype=torch.float64)

    kept, outcomes, found, proposed = [], [], 0, 0
    limit = MAX_PROPOSALS if proposals is None else proposals
    while proposed < limit and (found < n or proposals is not None):
        rows = min(20_000, limit - proposed)
        S = normal(rows, T)
        for t in range(1, T):
            if rho and t not in breaks:
                S[:, t] = rho * S[:, t - 1] + math.sqrt(1 - rho**2) * S[:, t]
        g = torch.tanh(S) @ W + noise * normal(rows, len(tasks))
        good = (g.abs() < limits).all(dim=1)
        kept.append(S[good])
        outcomes.append(g[good])
        found += int(good.sum())
        proposed += rows
    if proposals is None and found < n:
        raise RuntimeError(
            f"{proposed} proposals gave only {found} of n={n} sequences: use fewer or smaller "
            f"tasks, or a wider band than accept={accept}"
        )
    if min(found, n) < FEW_ROWS and proposals is not None:
        warnings.warn(
            f"selection left {min(found, n)} of {proposed} sequences, fewer than {FEW_ROWS}: the "
            "tests will miss edges",
            stacklevel=2,
        )
    return Sequences(torch.cat(kept)[:n], tasks, proposed, torch.cat(outcomes)[:n])


def exact_interactions(
    K: int,
    tasks: Iterable[Iterable[int]],
    *,
    link: float = 0.0,
    breaks: Iterable[int] = (),
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The theorem on a law that can be written down: which pairs interact, given all others.

    On {-1, 1}^K the law before selection is a chain with log p ∝ link·s_t s_{t-1} (0 for the
    links of ``breaks``) and every task multiplies it with a random positive table φ_τ(s_M). Entry
    (a, b) is the largest |log odds ratio| of (s_a, s_b) over all values of the others: 0 exactly
    when a ⟂ b given the rest.

    Args:
        K: binary segments, 2..12.
        tasks: member sets.
        link: strength of the unbroken links; 0 for independent segments.
        breaks: steps whose link to the step before is cut.
        generator: source of the tables; None is seeded with 0.

    Returns:
        (K, K) float64, symmetric, zero on the diagonal.

    Raises:
        ValueError: K out of range, or a bad task.
    """
    _check_count("K", K, least=2)
    if K > 12:
        raise ValueError(f"K must be at most 12, there are 2^K states: got {K}")
    tasks = _check_tasks(tasks, K)
    generator = generator or _generator(0)
    log_p = torch.zeros((2,) * K, dtype=torch.float64)
    spins = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    for t in range(1, K):
        if t not in set(breaks):
            pair = link * spins[:, None] * spins[None, :]
            shape = [2 if k in (t - 1, t) else 1 for k in range(K)]
            log_p = log_p + pair.reshape(shape)
    for members in tasks:
        shape = [2 if k in members else 1 for k in range(K)]
        log_p = log_p + torch.randn(*shape, generator=generator, dtype=torch.float64)
    out = torch.zeros(K, K, dtype=torch.float64)
    for a, b in itertools.combinations(range(K), 2):
        odds = log_p.diff(dim=a).diff(dim=b)
        out[a, b] = out[b, a] = odds.abs().max()
    return out


# --------------------------------------------------------------------------------------------
# Level 1, the conditional-independence test


class CITest(NamedTuple):
    """A test of a ⟂ b given the conditioning columns: its statistic and its p-value."""

    stat: float
    p: float


FEATURES = ("full", "squares", "linear")


def _n_features(n_cond: int, features: str) -> int:
    """Columns of F(Z), the constant included."""
    per = {"full": 4, "squares": 2, "linear": 1}[features]
    return 1 + per * n_cond + (n_cond * (n_cond - 1) if features == "full" else 0)


def _conditioning_features(Z: torch.Tensor, features: str) -> torch.Tensor:
    """F(Z): (n, m) polynomial features of the standardised columns of Z."""
    one = Z.new_ones(len(Z), 1)
    if Z.shape[1] == 0:
        return one
    # z_i² z_j² and |z| depend on the origin: standardised, the test ignores shift and scale
    Z = (Z - Z.mean(dim=0)) / Z.std(dim=0)
    if features == "linear":
        return torch.cat([one, Z], dim=1)
    if features == "squares":
        return torch.cat([one, Z, Z.square()], dim=1)
    i, j = torch.triu_indices(Z.shape[1], Z.shape[1], offset=1, device=Z.device)
    products = Z[:, i] * Z[:, j]
    return torch.cat([one, Z, Z**2, Z**3, Z.abs(), products, products.square()], dim=1)


def _two_sided(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def ci_test(
    X: object,
    a: int,
    b: int,
    cond: Sequence[int],
    method: str = "poly",
    *,
    features: str = "full",
) -> CITest:
    r"""Test whether columns a and b of X are independent given the columns ``cond``.

    Both are residualised by least squares on F(Z) = [1, z, z², z³, |z|, z_i z_j, z_i² z_j²]. With
    residuals u and v, ``"poly"`` takes the four correlations of (u, v), (u², v), (u, v²) and
    (u², v²), each by Fisher's √(n - dim F - 3)·artanh r ~ N(0, 1), and p = min(1, 4·min p).
    ``"kernel"`` takes the HSIC of u and v with Gaussian kernels of median width, and the gamma
    approximation to its null law (Gretton et al. 2007); it needs (n, n) matrices. If a column is a
    function of F(Z), it is constant given Z, hence independent: p = 1.

    Args:
        X: (n, T) tensor or array, computed in float64; shift and scale of a column do not matter.
        a: a column.
        b: another.
        cond: the columns to condition on, neither a nor b; may be empty.
        method: "poly" or "kernel".
        features: F(Z): "full", "squares" for [1, z, z²], or "linear" for [1, z].

    Returns:
        The largest |z| of the four (or n·HSIC), and the p-value.

    Raises:
        ValueError: bad columns, a constant one, too few rows for F(Z), or an unknown option.
    """
    X = _as_rows("X", X)
    columns = [int(a), int(b), *(int(c) for c in cond)]
    if len(set(columns)) < len(columns) or not all(0 <= c < X.shape[1] for c in columns):
        raise ValueError(
            f"a, b and cond must be different columns 0..{X.shape[1] - 1}: got a={a}, b={b}, "
            f"cond={list(cond)}"
        )
    if method not in ("poly", "kernel"):
        raise ValueError(f"method must be 'poly' or 'kernel': got {method!r}")
    if features not in FEATURES:
        raise ValueError(f"features must be one of {FEATURES}: got {features!r}")
    n, m = len(X), _n_features(len(columns) - 2, features)
    if n <= m + 10:
        raise ValueError(
            f"X must have more than {m + 10} rows for {m} conditioning features: got {n}"
        )
    _check_varies(X, columns)
    pair = X[:, columns[:2]]
    pair = (pair - pair.mean(dim=0)) / pair.std(dim=0)
    # Q alone is needed: it is orthonormal even if two features of F coincide
    Q = torch.linalg.qr(_conditioning_features(X[:, columns[2:]], features)).Q
    u, v = (pair - Q @ (Q.T @ pair)).T
    if min(float(u.norm()), float(v.norm())) < 1e-7 * math.sqrt(n):
        return CITest(0.0, 1.0)
    if method == "kernel":
        return _hsic_gamma(u, v)
    return _fisher_four(u, v, n - m - 3)


def _check_varies(X: torch.Tensor, columns: Sequence[int]) -> None:
    spread = (X[:, columns].amax(dim=0) - X[:, columns].amin(dim=0)).tolist()
    for column, width in zip(columns, spread, strict=True):
        if width == 0:
            raise ValueError(
                f"X must vary in every column that is tested: column {column} does not"
            )


def _fisher_four(u: torch.Tensor, v: torch.Tensor, freedom: int) -> CITest:
    """Fisher tests of (u, v), (u², v), (u, v²), (u², v²), Bonferroni over the four."""

    def directions(t: torch.Tensor) -> torch.Tensor:
        both = torch.stack([t, t.square()])
        both = both - both.mean(dim=1, keepdim=True)
        norm = both.norm(dim=1, keepdim=True)
        # a residual of ±1 has a constant square: it has no second direction
        return torch.where(norm > 1e-12, both / norm, torch.zeros_like(both))

    r = (directions(u) @ directions(v).T).flatten().clamp(-1 + 1e-15, 1 - 1e-15)
    stat = float((math.sqrt(freedom) * torch.atanh(r)).abs().max())
    return CITest(stat, min(1.0, 4 * _two_sided(stat)))


def _hsic_gamma(u: torch.Tensor, v: torch.Tensor) -> CITest:
    """n·HSIC_b of two samples and its gamma-approximated p-value (Gretton et al. 2007)."""
    from scipy.stats import gamma

    n = len(u)
    off = ~torch.eye(n, dtype=torch.bool, device=u.device)

    def gram(t: torch.Tensor) -> torch.Tensor:
        D = (t[:, None] - t[None, :]).square()
        return torch.exp(-D / D[off].median())

    def centred(G: torch.Tensor) -> torch.Tensor:
        return G - G.mean(dim=0) - G.mean(dim=1, keepdim=True) + G.mean()

    K, L = gram(u), gram(v)
    Kc, Lc = centred(K), centred(L)
    stat = float((Kc * Lc).sum()) / n
    k, m = float(K[off].mean()), float(L[off].mean())
    mean = (1 + k * m - k - m) / n
    spread = float((Kc * Lc / 6).square()[off].mean())
    variance = 72 * (n - 4) * (n - 5) / (n * (n - 1) * (n - 2) * (n - 3)) * spread
    shape, scale = mean**2 / variance, n * variance / mean
    return CITest(stat, float(gamma.sf(stat, shape, scale=scale)))


def _ratio_test(X: torch.Tensor, reference: torch.Tensor, a: int, b: int) -> float:
    """p-value of "no task holds a and b", from selected rows and unselected ones.

    Selection multiplies the law by Π φ_τ, so the log odds of "selected" against "unselected" are
    Σ log φ_τ whatever the law before was, temporal links included. Two logistic regressions, with
    and without the interactions of a and b, are compared by their likelihood ratio.
    """
    from scipy.stats import chi2

    both = torch.cat([X, reference])
    # bounded, so that a polynomial can follow log φ out into the tails
    both = torch.erf((both - reference.mean(dim=0)) / (math.sqrt(2) * reference.std(dim=0)))
    y = torch.cat([X.new_ones(len(X)), X.new_zeros(len(reference))])
    T = both.shape[1]
    i, j = torch.triu_indices(T, T, offset=1, device=X.device)
    other = ~(((i == a) & (j == b)) | ((i == b) & (j == a)))
    products = both[:, i[other]] * both[:, j[other]]
    base = [both.new_ones(len(both), 1), both, both**2, both**3, both.abs()]
    null = torch.cat([*base, products, products.square()], dim=1)
    u, v = both[:, a], both[:, b]
    extra = torch.stack([u * v, u**2 * v, u * v**2, u**2 * v**2], dim=1)
    gain = _log_likelihood(torch.cat([null, extra], dim=1), y) - _log_likelihood(null, y)
    return float(chi2.sf(max(2 * gain, 0.0), df=4))


def _log_likelihood(F: torch.Tensor, y: torch.Tensor, *, steps: int = 50) -> float:
    """The largest log-likelihood of a logistic regression, by Newton's method."""
    Q = torch.linalg.qr(F).Q * math.sqrt(len(F))  # the same span, well conditioned
    beta = Q.new_zeros(Q.shape[1])
    eye = torch.eye(Q.shape[1], dtype=Q.dtype, device=Q.device)

    def value(beta: torch.Tensor) -> torch.Tensor:
        logits = Q @ beta
        return (y * logits - nn.functional.softplus(logits)).sum() - 1e-6 * len(F) * beta @ beta

    best = value(beta)
    for _ in range(steps):
        p = torch.sigmoid(Q @ beta)
        gradient = Q.T @ (y - p) - 2e-6 * len(F) * beta
        hessian = (Q * (p * (1 - p))[:, None]).T @ Q + 2e-6 * len(F) * eye
        step = torch.linalg.solve(hessian, gradient)
        size = 1.0
        while value(beta + size * step) < best and size > 1e-6:
            size /= 2
        if size <= 1e-6:
            break
        beta = beta + size * step
        now = value(beta)
        if float(now - best) < 1e-9 * len(F):
            break
        best = now
    return float(value(beta))


# --------------------------------------------------------------------------------------------
# Level 1, the graph of segments and the tasks in it


def task_graph(
    X: object,
    *,
    steps: int = 1,
    linked: bool = False,
    alpha: float = 0.01,
    correction: str | None = "bonferroni",
    method: str = "poly",
    features: str = "full",
    reference: object = None,
) -> nx.Graph:
    """The graph of segments that share a task, from selected sequences.

    Segments a < b are joined when the *first* step of a and the *last* step of b depend on each
    other given all other T-2 steps. With two or more steps a segment, these two are never linked
    in time, so the chain and its breaks need not be known.

    Args:
        X: (n, K*steps) selected sequences, as in `Sequences`.
        steps: L, steps of a segment.
        linked: with ``steps=1``, whether neighbouring segments may be linked in time. Lag-1 pairs
            are then undetermined, since a link looks as a task does, unless ``reference`` is given.
        alpha: level, in (0, 1).
        correction: "bonferroni" over the tested pairs, or None.
        method: as in `ci_test`.
        features: as in `ci_test`.
        reference: (m, K) sequences of the same law without selection; it decides lag-1 pairs by
            the density ratio of selected to unselected, from which the links drop out.

    Returns:
        A graph on 0..K-1 with ``p`` on each edge. ``graph["undetermined"]`` lists the pairs that
        could not be tested, ``graph["p_values"]`` is (K, K) with nan where nothing was tested.

    Raises:
        ValueError: bad shapes or options, a constant segment, too few rows.
    """
    X = _as_rows("X", X)
    K = _segments(X, steps)
    undetermined, decided = [], {}
    if linked and steps == 1:
        lagged = [(k, k + 1) for k in range(K - 1)]
        if reference is None:
            undetermined = lagged
        else:
            reference = _as_rows("reference", reference)
            if reference.shape[1] != X.shape[1]:
                raise ValueError(
                    f"reference must have the {X.shape[1]} columns of X: got {reference.shape[1]}"
                )
            _check_varies(X, range(K))
            needed = _n_features(K, "full") + 10
            if min(len(X), len(reference)) <= needed:
                raise ValueError(
                    f"X and reference must have more than {needed} rows each: got {len(X)} and "
                    f"{len(reference)}"
                )
            decided = {(a, b): _ratio_test(X, reference, a, b) for a, b in lagged}
    elif reference is not None:
        raise ValueError("reference must be None unless linked=True and steps=1: nothing needs it")
    pairs = {
        (a, b): (a * steps, b * steps + steps - 1)
        for a, b in itertools.combinations(range(K), 2)
        if (a, b) not in undetermined and (a, b) not in decided
    }

    def test(first: int, last: int) -> float:
        rest = [t for t in range(X.shape[1]) if t not in (first, last)]
        return ci_test(X, first, last, rest, method, features=features).p

    p = decided | {pair: test(*columns) for pair, columns in pairs.items()}
    graph = _graph(K, p, alpha, correction)
    graph.graph["undetermined"] = undetermined
    return graph


def _segments(X: torch.Tensor, steps: int) -> int:
    _check_count("steps", steps)
    if X.shape[1] % steps or X.shape[1] < 2 * steps:
        raise ValueError(
            f"X must have K*steps columns with K >= 2: got {X.shape[1]} columns, steps={steps}"
        )
    return X.shape[1] // steps


def _graph(K: int, p: dict, alpha: float, correction: str | None) -> nx.Graph:
    """Segments joined where p is at most the corrected level."""
    _check_alpha(alpha)
    if correction not in ("bonferroni", None):
        raise ValueError(f"correction must be 'bonferroni' or None: got {correction!r}")
    level = alpha / len(p) if correction and p else alpha
    matrix = np.full((K, K), np.nan)
    graph = nx.Graph()
    graph.add_nodes_from(range(K))
    for (a, b), value in sorted(p.items()):
        matrix[a, b] = matrix[b, a] = value
        if value <= level:
            graph.add_edge(a, b, p=value)
    graph.graph |= {"p_values": matrix, "undetermined": [], "level": level}
    return graph


def moral_graph(tasks: Iterable[Iterable[int]], K: int) -> nx.Graph:
    """The graph that the theorem predicts: segments joined inside every task.

    Args:
        tasks: member sets.
        K: segments.

    Raises:
        ValueError: K < 2 or a bad task.
    """
    _check_count("K", K, least=2)
    graph = nx.Graph()
    graph.add_nodes_from(range(K))
    for members in _check_tasks(tasks, K):
        graph.add_edges_from(itertools.combinations(sorted(members), 2))
    return graph


def task_sets(G: nx.Graph) -> list[frozenset]:
    """The tasks that a graph of segments shows: its maximal cliques of two or more.

    They are the task sets when the family has the clique property (`has_clique_property`). Of two
    tasks of which one contains the other only the larger can be seen. Pairs that are undetermined
    count as not joined.

    Args:
        G: a graph on segments.

    Returns:
        The sets, sorted by their members.
    """
    found = (frozenset(c) for c in nx.find_cliques(G))
    return sorted((c for c in found if len(c) > 1), key=sorted)


def has_clique_property(tasks: Iterable[Iterable[int]]) -> bool:
    """Whether the tasks are exactly the maximal cliques of their own graph.

    Gilmore's criterion: no task contains another (nor equals it), and for any three of the family
    the segments that lie in at least two of them all lie in one task. {0,1}, {1,2}, {0,2} fails:
    its graph is that of {0,1,2}.

    Args:
        tasks: member sets.

    Raises:
        ValueError: a task with fewer than two members or a negative one.
    """
    tasks = [frozenset(int(k) for k in t) for t in tasks]
    tasks = _check_tasks(tasks, 1 + max((k for t in tasks for k in t), default=0))
    if any(a <= b for a, b in itertools.permutations(tasks, 2)):
        return False
    return all(
        any((a & b) | (a & c) | (b & c) <= t for t in tasks)
        for a, b, c in itertools.combinations(tasks, 3)
    )


def assignment_matrix(sets: Sequence[Iterable[int]], K: int) -> np.ndarray:
    """A: (K, len(sets)) int64, A[k, j] = 1 where segment k belongs to set j.

    Args:
        sets: as `task_sets` gives them.
        K: segments.
    """
    A = np.zeros((K, len(sets)), dtype=np.int64)
    for j, members in enumerate(_check_tasks(sets, K)):
        A[sorted(members), j] = 1
    return A


def _shared_counts(sets: Sequence[frozenset], K: int) -> np.ndarray:
    """For each pair of segments, in how many sets it lies: (K(K-1)/2,) int64."""
    A = assignment_matrix(sets, K) if sets else np.zeros((K, 1), dtype=np.int64)
    return (A @ A.T)[np.triu_indices(K, 1)]


def score_tasks(
    est: Iterable[Iterable[int]], true: Iterable[Iterable[int]], *, K: int | None = None
) -> dict[str, float]:
    """Hold estimated task sets against the true ones.

    Args:
        est: estimated sets; may overlap, may be empty.
        true: true sets.
        K: segments; by default one more than the largest that is named.

    Returns:
        ``precision`` and ``recall`` of pairs that share a task (1 where there are none to count),
        ``false`` and ``missed`` pairs, ``exact`` (1 when the families are equal) and ``omega``: the
        Omega index, the share of pairs that lie together in equally many sets, corrected for
        chance, 1 for equal families.

    Raises:
        ValueError: a bad set.
    """
    est, true = ([frozenset(int(k) for k in t) for t in family] for family in (est, true))
    if K is None:
        K = max(2, 1 + max((k for t in (*est, *true) for k in t), default=0))
    est, true = _check_tasks(est, K), _check_tasks(true, K)
    e, t = _shared_counts(est, K), _shared_counts(true, K)
    hits = int(((e > 0) & (t > 0)).sum())
    observed = float((e == t).mean())
    both = max(int(e.max()), int(t.max())) + 1
    shares = [np.bincount(c, minlength=both) / len(c) for c in (e, t)]
    chance = float(shares[0] @ shares[1])
    return {
        "precision": hits / int((e > 0).sum()) if (e > 0).any() else 1.0,
        "recall": hits / int((t > 0).sum()) if (t > 0).any() else 1.0,
        "false": int((e > 0).sum()) - hits,
        "missed": int((t > 0).sum()) - hits,
        "exact": float(set(est) == set(true)),
        "omega": 1.0 if chance == 1 else (observed - chance) / (1 - chance),
    }


def graph_scores(G: nx.Graph, tasks: Iterable[Iterable[int]]) -> dict[str, float]:
    """`score_tasks` of the tasks that a graph shows, over its own number of segments."""
    return score_tasks(task_sets(G), tasks, K=G.number_of_nodes())


# --------------------------------------------------------------------------------------------
# Level 1, baselines


def marginal_graph(
    X: object, *, steps: int = 1, alpha: float = 0.01, correction: str | None = "bonferroni"
) -> nx.Graph:
    """Join segments whose first and last steps depend on each other, given nothing.

    Args and returns as in `task_graph`.
    """
    X = _as_rows("X", X)
    K = _segments(X, steps)
    p = {
        (a, b): ci_test(X, a * steps, b * steps + steps - 1, ()).p
        for a, b in itertools.combinations(range(K), 2)
    }
    return _graph(K, p, alpha, correction)


def last_first_graph(
    X: object, *, steps: int, alpha: float = 0.01, correction: str | None = "bonferroni"
) -> nx.Graph:
    """The wrong pair of steps: the last of a against the first of b, given all others.

    In neighbouring segments these two are linked in time, and the link passes for a task.

    Args and returns as in `task_graph`.
    """
    X = _as_rows("X", X)
    K = _segments(X, steps)
    p = {}
    for a, b in itertools.combinations(range(K), 2):
        last, first = a * steps + steps - 1, b * steps
        rest = [t for t in range(X.shape[1]) if t not in (last, first)]
        p[a, b] = ci_test(X, last, first, rest).p
    return _graph(K, p, alpha, correction)


def outcome_graph(
    sequences: Sequences, *, alpha: float = 0.01, correction: str | None = "bonferroni"
) -> nx.Graph:
    """Condition on the outcomes of the tasks, but not on the other segments.

    Knowing all the effects opens every chain of colliders: 0 and 5 become dependent when 0 shares
    a task with 2 and 2 another one with 5. For sequences with one step a segment.

    Args and returns as in `task_graph`.
    """
    S = _as_rows("sequences.S", sequences.S)
    X = torch.cat([S, sequences.outcomes.to(S)], dim=1)
    K = S.shape[1]
    known = range(K, X.shape[1])
    p = {(a, b): ci_test(X, a, b, known).p for a, b in itertools.combinations(range(K), 2)}
    return _graph(K, p, alpha, correction)


def glasso_graph(X: object) -> nx.Graph:
    """A Gaussian graphical model: scikit-learn's GraphicalLassoCV, five folds.

    Args:
        X: (n, K), one step a segment; standardised here.

    Returns:
        The graph of non-zero entries of the precision matrix.
    """
    from sklearn.covariance import GraphicalLassoCV

    X = _as_rows("X", X)
    X = ((X - X.mean(dim=0)) / X.std(dim=0)).cpu().numpy()
    precision = GraphicalLassoCV(cv=5).fit(X).precision_
    graph = nx.Graph()
    graph.add_nodes_from(range(X.shape[1]))
    graph.add_edges_from(zip(*np.nonzero(np.triu(np.abs(precision) > 1e-8, 1)), strict=True))
    return graph


def change_point_sets(X: object, n_tasks: int) -> list[frozenset]:
    """Cut the sequence into ``n_tasks`` contiguous runs: optimal k-means in time.

    A segment's profile is its row of absolute correlations with all segments, of values and of
    squares; dynamic programming finds the cuts with the least sum of squares within runs.

    Args:
        X: (n, K), one step a segment.
        n_tasks: runs, in 1..K.

    Returns:
        The runs of two or more segments.
    """
    X = _as_rows("X", X)
    K = X.shape[1]
    if not 1 <= n_tasks <= K:
        raise ValueError(f"n_tasks must be in 1..{K}: got {n_tasks}")
    P = torch.cat([torch.corrcoef(X.T).abs(), torch.corrcoef(X.square().T).abs()], dim=1)

    def cost(i: int, j: int) -> float:
        return float((P[i:j] - P[i:j].mean(dim=0)).square().sum())

    # best[r][j]: least cost of the first j segments in r runs, and where the last run starts
    best = [{0: (0.0, 0)}]
    for r in range(1, n_tasks + 1):
        best.append(
            {
                j: min((best[r - 1][i][0] + cost(i, j), i) for i in best[r - 1] if i < j)
                for j in range(r, K + 1)
            }
        )
    runs, j = [], K
    for r in range(n_tasks, 0, -1):
        i = best[r][j][1]
        runs.append(frozenset(range(i, j)))
        j = i
    return sorted((run for run in runs if len(run) > 1), key=sorted)


# --------------------------------------------------------------------------------------------
# Level 2, data


class LeakyMixing(nn.Module):
    """x = mix(s): orthogonal layers with a leaky ReLU between, then standardised; invertible.

    Args:
        dim: latents.
        layers: orthogonal matrices; one is a linear mixing.
        slope: of the leaky ReLU for negative inputs, > 0.
        generator: source of the matrices.
    """

    def __init__(
        self, dim: int, *, layers: int = 3, slope: float = 0.4, generator: torch.Generator
    ):
        super().__init__()
        _check_count("dim", dim)
        _check_count("layers", layers)
        if not 0 < slope < math.inf:
            raise ValueError(f"slope must be > 0 and finite, or nothing inverts it: got {slope}")
        self.slope = slope
        noise = torch.randn(layers, dim, dim, generator=generator, dtype=torch.float64)
        self.register_buffer("rotations", torch.linalg.qr(noise).Q)
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("std", torch.ones(dim, dtype=torch.float64))

    def _raw(self, s: torch.Tensor) -> torch.Tensor:
        x = s @ self.rotations[0]
        for Q in self.rotations[1:]:
            x = nn.functional.leaky_relu(x, self.slope) @ Q
        return x

    def standardise(self, s: torch.Tensor) -> None:
        """Fix shift and scale, so that mix(s) has columns of mean 0 and deviation 1."""
        x = self._raw(s)
        self.mean, self.std = x.mean(dim=0), x.std(dim=0)

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        """(n, dim) latents to (n, dim) observations."""
        return (self._raw(s) - self.mean) / self.std

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """(n, dim) observations back to latents, exactly up to rounding."""
        s = x * self.std + self.mean
        for Q in self.rotations[1:].flip(0):
            s = s @ Q.T
            s = torch.where(s < 0, s / self.slope, s)
        return s @ self.rotations[0].T


class MixedLatents(NamedTuple):
    """Latents, what a generalist sees of them, and the outputs of tasks that need some of them.

    Attributes:
        s: (n, dim) float64; the first ``relevant`` columns are s_R, the others s_I.
        x: (n, dim) float64 observations, columns standardised.
        g: (n, n_tasks) float64 task outputs, columns standardised.
        mix: x = mix(s), with ``mix.inverse``.
    """

    s: torch.Tensor
    x: torch.Tensor
    g: torch.Tensor
    mix: nn.Module


def make_mixed_latents(
    n: int,
    dim: int = 6,
    relevant: int = 3,
    n_tasks: int = 5,
    layers: int = 3,
    generator: torch.Generator | None = None,
) -> MixedLatents:
    """Independent latents under an invertible mixing, and tasks that need the first few.

    s ~ N(0, I); x = mix(s), see `LeakyMixing`; g = tanh(s_R W) + .5 sin(1.5 s_R V) + .3 s_R U with
    standard normal W, V, U.

    Args:
        n: rows, >= 2.
        dim: latents.
        relevant: |R|, in 1..dim.
        n_tasks: T; at least ``relevant`` are needed for the block to be identifiable.
        layers: of the mixing.
        generator: randomness on the CPU; None is seeded with 0.

    Raises:
        ValueError: a size out of range.
    """
    _check_count("n", n, least=2)
    _check_count("dim", dim)
    _check_count("n_tasks", n_tasks)
    if not 1 <= relevant <= dim:
        raise ValueError(f"relevant must be in 1..dim={dim}: got {relevant}")
    generator = generator or _generator(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mix = LeakyMixing(dim, layers=layers, generator=generator)
    W, V, U = (normal(relevant, n_tasks) for _ in range(3))
    s = normal(n, dim)
    mix.standardise(s)
    s_R = s[:, :relevant]
    g = torch.tanh(s_R @ W) + 0.5 * torch.sin(1.5 * s_R @ V) + 0.3 * s_R @ U
    return MixedLatents(s, mix(s), (g - g.mean(dim=0)) / g.std(dim=0), mix)


WINE_FEATURES = (0, 6, 9)
"""Alcohol, flavanoids and colour intensity: the features that the wine task looks at."""


def load_wine_task(*, generator: torch.Generator | None = None) -> MixedLatents:
    """scikit-learn's wine: 13 measured features as latents, rotated; the tasks need three of them.

    One-against-rest logistic regressions of the three classes on `WINE_FEATURES` give three task
    logits. (The logits of one softmax sum to a constant: of rank 2, they could not name a block of
    three.) The relevant features come first in ``s``.

    Args:
        generator: source of the rotation; None is seeded with 0.

    Returns:
        178 rows, dim 13; ``mix`` is linear.
    """
    from sklearn.datasets import load_wine
    from sklearn.linear_model import LogisticRegression

    data, target = load_wine(return_X_y=True)
    order = [*WINE_FEATURES, *(i for i in range(data.shape[1]) if i not in WINE_FEATURES)]
    s = torch.from_numpy(data[:, order])
    s = (s - s.mean(dim=0)) / s.std(dim=0)
    logits = [
        LogisticRegression().fit(s[:, :3].numpy(), target == c).decision_function(s[:, :3].numpy())
        for c in range(3)
    ]
    g = torch.from_numpy(np.stack(logits, axis=1))
    mix = LeakyMixing(s.shape[1], layers=1, generator=generator or _generator(0))
    mix.standardise(s)
    return MixedLatents(s, mix(s), (g - g.mean(dim=0)) / g.std(dim=0), mix)


# --------------------------------------------------------------------------------------------
# Level 2, the specialist


def _mlp(sizes: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> nn.Sequential:
    """Linear layers with LeakyReLU(.2) between, He-uniform as nn.Linear draws them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layer = nn.utils.skip_init(nn.Linear, a, b, dtype=dtype)
        bound = 1 / math.sqrt(a)  # nn.Linear's own law, but from this generator
        with torch.no_grad():
            for t in (layer.weight, layer.bias):
                noise = torch.rand(t.shape, generator=generator, dtype=torch.float64)
                t.copy_((2 * noise - 1) * bound)
        layers += [layer, nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


ZERO_GATE = 1e-3
"""After training, gates below this are set to exactly 0: Adam only circles around the kink."""

ACTIVE = 0.05
"""A unit is active when its relevance exceeds this share of the largest one."""


class SpecialistRepresentation(nn.Module):
    """An invertible code u = E(x) of which gates γ let few units through to the task.

    E and D are MLPs dim-hidden-hidden-dim, H is dim-hidden-hidden-n_tasks, with LeakyReLU(.2). u is
    standardised: by its batch while training, by stored moments otherwise (`freeze`).

    Args:
        dim: width of x and of u.
        n_tasks: T, outputs of H.
        hidden: width of the hidden layers.
        dtype: of the parameters; float32 by default.
        generator: source of the initial weights; None is seeded with 0.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        dim: int,
        n_tasks: int,
        hidden: int = 64,
        *,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        _check_count("dim", dim)
        _check_count("n_tasks", n_tasks)
        _check_count("hidden", hidden)
        generator = generator or _generator(0)
        self.encoder = _mlp((dim, hidden, hidden, dim), generator, dtype)
        self.decoder = _mlp((dim, hidden, hidden, dim), generator, dtype)
        self.head = _mlp((dim, hidden, hidden, n_tasks), generator, dtype)
        self.gamma = nn.Parameter(torch.ones(dim, dtype=dtype))
        self.register_buffer("kept", torch.ones(dim, dtype=dtype))
        self.register_buffer("u_mean", torch.zeros(dim, dtype=dtype))
        self.register_buffer("u_std", torch.ones(dim, dtype=dtype))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """u = E(x), standardised: (n, dim) to (n, dim)."""
        raw = self.encoder(x)
        if self.training:
            return (raw - raw.mean(dim=0)) / (raw.std(dim=0) + 1e-6)
        return (raw - self.u_mean) / self.u_std

    @torch.no_grad()
    def freeze(self, x: torch.Tensor) -> None:
        """Store the moments of E(x) over these rows, for use outside training."""
        raw = self.encoder(x)
        self.u_mean.copy_(raw.mean(dim=0))
        self.u_std.copy_(raw.std(dim=0) + 1e-6)

    def decode(self, u: torch.Tensor) -> torch.Tensor:
        """D(u): (n, dim) to (n, dim)."""
        return self.decoder(u)

    def predict(self, u: torch.Tensor) -> torch.Tensor:
        """H(γ⊙u), with pruned units masked: (n, dim) to (n, n_tasks)."""
        return self.head(self.gamma * self.kept * u)

    @torch.no_grad()
    def relevance(self) -> torch.Tensor:
        """e_i = |γ_i|·‖W_H1[:, i]‖, 0 for pruned units: (dim,). γ alone ignores the scale of W."""
        return (self.gamma * self.kept).abs() * self.head[0].weight.norm(dim=0)

    def active(self, m: int | None = None) -> torch.Tensor:
        """R̂: the units that feed the task, the most relevant first, int64.

        Args:
            m: how many; by default all whose relevance exceeds 5 % of the largest.

        Raises:
            ValueError: ``m`` out of 1..dim.

        Warns:
            UserWarning: every relevance is 0, so that R̂ is empty.
        """
        e = self.relevance()
        order = e.argsort(descending=True, stable=True)
        if m is not None:
            self._check_m(m)
            return order[:m]
        if not bool((e > 0).any()):
            warnings.warn("no unit feeds the task, R̂ is empty: lam is too large", stacklevel=2)
        return order[e[order] > ACTIVE * e.max()]

    def _check_m(self, m: int) -> None:
        if isinstance(m, bool) or not 1 <= m <= len(self.gamma) or m != int(m):
            raise ValueError(f"m must be a whole number in 1..dim={len(self.gamma)}: got {m}")

    @torch.no_grad()
    def prune(self, m: int) -> None:
        """Keep the m most relevant units and mask the others for H, in place.

        The kept units get γ = 1, and the columns of H's first layer absorb the old γ: neither
        relevance nor prediction of the kept units changes.

        Raises:
            ValueError: ``m`` out of 1..dim, or fewer than m units with any relevance.
        """
        self._check_m(m)
        e = self.relevance()
        if int((e > 0).sum()) < m:
            raise ValueError(
                f"m must be at most the number of units that feed the task: got m={m}, "
                f"{int((e > 0).sum())} have a relevance above 0; lam was too large"
            )
        keep = torch.zeros_like(self.kept)
        keep[self.active(m)] = 1
        self.head[0].weight.mul_(torch.where(keep > 0, self.gamma, torch.ones_like(self.gamma)))
        self.gamma.copy_(keep)
        self.kept.copy_(keep)


class FitHistory(NamedTuple):
    """Losses before each step, both stages one after the other; (n_steps,) float64 each.

    Attributes:
        reconstruction: mean squared error of D(u) against x.
        task: mean squared error of H(γ⊙u) against g.
        gates: ‖γ‖₁.
        pruned_losses: task loss on all rows after pruning to m units, by m; what "auto" compares.
    """

    reconstruction: np.ndarray
    task: np.ndarray
    gates: np.ndarray
    pruned_losses: dict[int, float]


class SpecialistFit(NamedTuple):
    """A trained specialist, in evaluation mode, and how it got there."""

    model: SpecialistRepresentation
    history: FitHistory


def fit_specialist(
    x: object,
    g: object,
    *,
    lam: float = 0.1,
    steps: int = 1500,
    prune_to: int | str | None = None,
    prune_steps: int = 1000,
    units: int | None = None,
    hidden: int = 64,
    batch_size: int = 256,
    lr: float = 3e-3,
    generator: torch.Generator | None = None,
) -> SpecialistFit:
    """Fit an invertible code of which as few units as possible feed the tasks.

    Stage 1, ``steps`` of Adam under half a cosine, minimises
    5·‖D(u)-x‖²/dim + ‖H(γ⊙u)-g‖²/T + λ_t‖γ‖₁ + .05‖Cov(u)-I‖²_F + 1e-3‖W_H1‖²_F with
    λ_t = λ·min(1, t/500). The penalty on W_H1 stops the game of a smaller γ and a larger W. Stage 2
    keeps the most relevant units (`SpecialistRepresentation.prune`), drops the penalties on γ and W
    and trains E, D and H on.

    Args:
        x: (n, dim) observations or generalist features, float32 or float64, columns of about unit
            scale; the model computes in this dtype.
        g: (n, T) task outputs, columns of about unit scale.
        lam: λ, >= 0.
        steps: of stage 1.
        prune_to: units to keep; None for no second stage; "auto" for the smallest m whose pruned
            task loss is at most 1.6 times that of m + 1.
        prune_steps: of stage 2.
        units: let only the first so many units through to H, from the start and without L1.
        hidden: width of the MLPs.
        batch_size: rows a step, drawn with replacement.
        lr: peak learning rate of both stages.
        generator: initial weights and batches, on the CPU; None is seeded with 0.

    Raises:
        ValueError: bad shapes, ``lam`` < 0, ``prune_to`` or ``units`` out of 1..dim, or a γ that
            is all zero when pruning begins.
    """
    x, g = _check_xg(x, g)
    dim, n_tasks = x.shape[1], g.shape[1]
    if not 0 <= lam < math.inf:
        raise ValueError(f"lam must be >= 0 and finite: got {lam}")
    for name, value in (("steps", steps), ("prune_steps", prune_steps), ("batch_size", batch_size)):
        _check_count(name, value)
    for name, value in (("prune_to", prune_to), ("units", units)):
        whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= dim
        if not (value is None or whole or (name == "prune_to" and value == "auto")):
            raise ValueError(f"{name} must be a whole number in 1..dim={dim}: got {value!r}")
    generator = generator or _generator(0)
    model = SpecialistRepresentation(dim, n_tasks, hidden, dtype=x.dtype, generator=generator)
    model.to(x.device)
    if units is not None:
        model.kept[units:] = 0
        lam = 0.0
    options = {"batch_size": batch_size, "lr": lr, "generator": generator}
    log = _train(model, x, g, steps=steps, lam=lam, weight_penalty=1e-3, gates=True, **options)
    with torch.no_grad():
        model.gamma[model.gamma.abs() < ZERO_GATE] = 0
    first = SpecialistFit(model, FitHistory(*log, {}))
    if prune_to is None:
        return first
    options["steps"] = prune_steps
    if prune_to != "auto":
        return prune_specialist(first, x, g, prune_to, **options)
    small = prune_specialist(first, x, g, 1, **options)
    losses = dict(small.history.pruned_losses)
    for m in range(1, int((model.relevance() > 0).sum())):
        larger = prune_specialist(first, x, g, m + 1, **options)
        losses |= larger.history.pruned_losses
        if losses[m] <= 1.6 * losses[m + 1]:
            break
        small = larger
    return small._replace(history=small.history._replace(pruned_losses=losses))


def prune_specialist(
    fit: SpecialistFit,
    x: object,
    g: object,
    m: int,
    *,
    steps: int = 1000,
    batch_size: int = 256,
    lr: float = 3e-3,
    generator: torch.Generator | None = None,
) -> SpecialistFit:
    """Stage 2 of `fit_specialist` on a copy: keep m units, and train E, D and H on.

    Args:
        fit: after stage 1; left as it is.
        x: the training rows of stage 1.
        g: their task outputs.
        m: units to keep, in 1..dim.
        steps: of Adam under half a cosine of its own.
        batch_size: rows a step.
        lr: peak learning rate.
        generator: batches; None is seeded with 0.

    Returns:
        The pruned fit; its history continues that of ``fit``.

    Raises:
        ValueError: as in `SpecialistRepresentation.prune`, and bad shapes.
    """
    x, g = _check_xg(x, g)
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        _check_count(name, value)
    model = copy.deepcopy(fit.model)
    model.prune(m)
    options = {"batch_size": batch_size, "lr": lr, "generator": generator or _generator(0)}
    log = _train(model, x, g, steps=steps, lam=0.0, weight_penalty=0.0, gates=False, **options)
    history = [np.concatenate(pair) for pair in zip(fit.history[:3], log, strict=True)]
    return SpecialistFit(model, FitHistory(*history, {m: task_loss(model, x, g)}))


def _check_xg(x: object, g: object) -> tuple[torch.Tensor, torch.Tensor]:
    out = []
    for name, t in (("x", x), ("g", g)):
        t = torch.as_tensor(t).detach()
        if t.ndim != 2 or len(t) < 2:
            raise ValueError(f"{name} must have shape (n >= 2, d): got {tuple(t.shape)}")
        if not t.is_floating_point():
            raise ValueError(f"{name} must be float32 or float64: got {t.dtype}")
        if not bool(torch.isfinite(t).all()):
            raise ValueError(f"{name} must be finite: it holds NaN or infinite entries")
        out.append(t)
    if len(out[0]) != len(out[1]):
        raise ValueError(f"x and g must have as many rows: got {len(out[0])} and {len(out[1])}")
    return out[0], out[1].to(out[0])


def _train(
    model: SpecialistRepresentation,
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    steps: int,
    lam: float,
    weight_penalty: float,
    gates: bool,
    batch_size: int,
    lr: float,
    generator: torch.Generator,
) -> np.ndarray:
    """One stage of `fit_specialist`; leaves the model frozen and in evaluation mode.

    Returns:
        (3, steps) float64: reconstruction, task loss and ‖γ‖₁ before each step.
    """
    model.train()
    nets = (model.encoder, model.decoder, model.head)
    parameters = [p for net in nets for p in net.parameters()]
    if gates:
        parameters.append(model.gamma)
    model.gamma.requires_grad_(gates)
    optimizer = torch.optim.Adam(parameters, lr=lr, fused=True)
    batches = torch.randint(len(x), (steps, batch_size), generator=generator).to(x.device)
    identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    W = model.head[0].weight
    log = x.new_empty(3, steps)
    for t, rows in enumerate(batches):
        x_t, g_t = x[rows], g[rows]
        u = model.encode(x_t)
        reconstruction = (model.decode(u) - x_t).square().mean()
        task = (model.predict(u) - g_t).square().mean()
        covariance = u.T @ u / (batch_size - 1)  # u has mean 0 in the batch
        loss = 5 * reconstruction + task + 0.05 * (covariance - identity).square().sum()
        if weight_penalty:
            loss = loss + weight_penalty * W.square().sum()
        if lam:
            loss = loss + lam * min(1.0, t / 500) * model.gamma.abs().sum()
        for group in optimizer.param_groups:
            group["lr"] = lr * cosine_schedule(t, steps)
        optimizer.zero_grad()
        loss.backward()
        log[:, t] = torch.stack([reconstruction, task, model.gamma.abs().sum()]).detach()
        optimizer.step()
    model.eval()
    model.freeze(x)
    model.gamma.requires_grad_(True)
    return log.double().cpu().numpy()


@torch.no_grad()
def task_loss(model: SpecialistRepresentation, x: torch.Tensor, g: torch.Tensor) -> float:
    """Mean squared error of the predicted task outputs over all rows."""
    return float((model.predict(model.encode(x)) - g).square().mean())


def linear_specialist(x: object, g: object, rank: int) -> torch.Tensor:
    """The block when everything is linear: x = As, g = B s_R.

    g regressed on x has the coefficients C = B P_R A⁻¹, whose row space is that of P_R A⁻¹. So x
    on the top right singular vectors of C is an invertible function of s_R, free of s_I.

    Args:
        x: (n, dim), n > dim.
        g: (n, T).
        rank: |R|, in 1..min(dim, T).

    Returns:
        (rank, dim) float64 with orthonormal rows: u_R = x @ result.T.

    Raises:
        ValueError: bad shapes or rank.
    """
    C = linear_coefficients(x, g)
    if isinstance(rank, bool) or rank != int(rank) or not 1 <= rank <= min(C.shape):
        raise ValueError(f"rank must be a whole number in 1..{min(C.shape)}: got {rank}")
    return torch.linalg.svd(C, full_matrices=False).Vh[:rank]


def linear_coefficients(x: object, g: object) -> torch.Tensor:
    """C: (T, dim) float64, least-squares coefficients of centred g on centred x.

    Raises:
        ValueError: bad shapes, or no more rows than columns of x.
    """
    x, g = _as_rows("x", x), _as_rows("g", g)
    if len(x) != len(g):
        raise ValueError(f"x and g must have as many rows: got {len(x)} and {len(g)}")
    if len(x) <= x.shape[1]:
        raise ValueError(f"x must have more rows than its {x.shape[1]} columns: got {len(x)}")
    return torch.linalg.lstsq(x - x.mean(dim=0), g - g.mean(dim=0)).solution.T


# --------------------------------------------------------------------------------------------
# Level 2, evaluation


class BlockPrediction(NamedTuple):
    """What a smooth function of some units says about latents, on unseen rows.

    Attributes:
        target: (n_test, d) float64 latents, in standard units of the rows that fitted.
        predicted: (n_test, d) float64.
        r2: mean R² over the columns.
    """

    target: np.ndarray
    predicted: np.ndarray
    r2: float


def predict_block(u: object, s: object, *, n_fit: int = 600, n_test: int = 400) -> BlockPrediction:
    """Predict s from u by kernel ridge: Gaussian kernel exp(-.15‖·‖²) on standardised u, ridge .05.

    Args:
        u: (n, k) units; the first ``n_fit`` rows fit, the next ``n_test`` are predicted.
        s: (n, d) latents, of rows not seen in training.
        n_fit: rows to fit.
        n_test: rows to test.

    Raises:
        ValueError: unequal or too few rows, no unit, or a latent that does not vary.
    """
    from sklearn.kernel_ridge import KernelRidge

    U, S = _as_rows("u", u), _as_rows("s", s)
    if U.shape[1] < 1:
        raise ValueError("u must have at least one unit: got none")
    if len(U) != len(S) or len(U) < n_fit + n_test:
        raise ValueError(
            f"u and s must have the same rows, at least n_fit + n_test = {n_fit + n_test}: got "
            f"{len(U)} and {len(S)}"
        )
    _check_varies(S[:n_fit], range(S.shape[1]))
    U, S = (t[: n_fit + n_test].cpu().numpy() for t in (U, S))
    U, S = ((t - t[:n_fit].mean(0)) / np.maximum(t[:n_fit].std(0), 1e-12) for t in (U, S))
    found = KernelRidge(kernel="rbf", gamma=0.15, alpha=0.05).fit(U[:n_fit], S[:n_fit])
    target, predicted = S[n_fit:], found.predict(U[n_fit:])
    error = ((predicted - target) ** 2).sum(0)
    total = ((target - target.mean(0)) ** 2).sum(0)
    return BlockPrediction(target, predicted, float((1 - error / total).mean()))


def block_r2(u: object, s: object, *, n_fit: int = 600, n_test: int = 400) -> float:
    """How much of s a smooth function of u can tell: the R² of `predict_block`.

    It is 1 for full knowledge and about 0, often slightly below, for none. Arguments and errors as
    in `predict_block`.
    """
    return predict_block(u, s, n_fit=n_fit, n_test=n_test).r2


def jacobian_magnitudes(
    model: SpecialistRepresentation, mix: nn.Module, s: torch.Tensor
) -> torch.Tensor:
    """|∂u_i/∂s_j| through the true mixing, averaged over rows: (dim, dim), in the dtype of s.

    Args:
        model: in evaluation mode, so that the standardisation is frozen.
        mix: x = mix(s).
        s: (n, dim).

    Raises:
        ValueError: a model in training mode.
    """
    return _jacobians(model, mix, s).abs().mean(dim=0)


def _jacobians(model: SpecialistRepresentation, mix: nn.Module, s: torch.Tensor) -> torch.Tensor:
    """∂u_i/∂s_j by row: (n, dim, dim)."""
    if model.training:
        raise ValueError("model must be in evaluation mode: call model.eval() and freeze first")
    s = s.detach().clone().requires_grad_(True)
    u = model.encode(mix(s).to(model.gamma.dtype))
    # row i of u depends on row i of s alone, so the sum's gradient holds every row's
    columns = [
        torch.autograd.grad(u[:, i].sum(), s, retain_graph=True)[0] for i in range(u.shape[1])
    ]
    return torch.stack(columns, dim=1)


def jacobian_leakage(
    model: SpecialistRepresentation,
    mix: nn.Module,
    s: torch.Tensor,
    *,
    relevant: int = 3,
    m: int | None = None,
) -> float:
    """‖∂u_R̂/∂s_I‖/‖∂u_R̂/∂s_R‖, root mean square over rows: 0 when the block is clean.

    Args:
        model: as in `jacobian_magnitudes`, like ``mix`` and ``s``.
        relevant: |R|; the first columns of s.
        m: units of R̂, the most relevant; by default ``model.active()``.

    Raises:
        ValueError: no active unit, or ``relevant`` out of 1..dim-1.
    """
    if not 1 <= relevant < s.shape[1]:
        raise ValueError(f"relevant must be in 1..dim-1={s.shape[1] - 1}: got {relevant}")
    units = model.active(m)
    if len(units) == 0:
        raise ValueError("model must have an active unit: its relevance is 0 everywhere")
    J = _jacobians(model, mix, s)[:, units]
    return float(J[:, :, relevant:].norm() / J[:, :, :relevant].norm())


# --------------------------------------------------------------------------------------------
# Level 2, baselines


class Bottleneck(NamedTuple):
    """A supervised code without decoder: the codes of the rows to encode, and the task loss."""

    u: torch.Tensor
    task: float


def bottleneck_code(
    x: torch.Tensor,
    g: torch.Tensor,
    x_new: torch.Tensor,
    *,
    width: int = 3,
    hidden: int = 64,
    steps: int = 2500,
    batch_size: int = 256,
    lr: float = 3e-3,
    generator: torch.Generator | None = None,
) -> Bottleneck:
    """Plain supervision: an MLP dim-hidden-hidden-width-hidden-hidden-T and nothing else.

    Args:
        x: (n, dim) training rows.
        g: (n, T).
        x_new: (m, dim) rows to encode.
        width: of the code.
        hidden: width of the MLPs.
        steps: of Adam under half a cosine.
        batch_size: rows a step.
        lr: peak learning rate.
        generator: None is seeded with 0.
    """
    x, g = _check_xg(x, g)
    for name, value in (("width", width), ("steps", steps), ("batch_size", batch_size)):
        _check_count(name, value)
    generator = generator or _generator(0)
    encoder = _mlp((x.shape[1], hidden, hidden, width), generator, x.dtype)
    head = _mlp((width, hidden, hidden, g.shape[1]), generator, x.dtype)
    net = nn.Sequential(encoder, head).to(x.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, fused=True)
    batches = torch.randint(len(x), (steps, batch_size), generator=generator)
    for t, rows in enumerate(batches.to(x.device)):
        for group in optimizer.param_groups:
            group["lr"] = lr * cosine_schedule(t, steps)
        loss = (net(x[rows]) - g[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return Bottleneck(encoder(x_new), float((net(x) - g).square().mean()))


def fastica_code(
    x: torch.Tensor, g: torch.Tensor, x_new: torch.Tensor, *, width: int = 3, seed: int = 0
) -> torch.Tensor:
    """scikit-learn's FastICA, and of its components the ``width`` that regression needs most.

    A component's relevance is the norm of its least-squares coefficients for g.

    Args:
        x: (n, dim) training rows.
        g: (n, T).
        x_new: (m, dim) rows to encode.
        width: components to keep, in 1..dim.
        seed: of FastICA's start.

    Returns:
        (m, width) float64.
    """
    from sklearn.decomposition import FastICA

    x, g = _check_xg(x, g)
    if not 1 <= width <= x.shape[1]:
        raise ValueError(f"width must be in 1..dim={x.shape[1]}: got {width}")
    ica = FastICA(whiten="unit-variance", max_iter=2000, tol=1e-3, random_state=seed)
    z = ica.fit_transform(x.double().cpu().numpy())
    relevance = linear_coefficients(z, g).norm(dim=0)
    best = relevance.argsort(descending=True)[:width].numpy()
    return torch.from_numpy(ica.transform(x_new.double().cpu().numpy())[:, best])


# --------------------------------------------------------------------------------------------
# Experiments


EIGHT = ({0, 2, 5}, {1, 3}, {2, 6}, {1, 4, 7})
"""The tasks of the eight segments: interleaved, and two of them share segment 2, two segment 1."""

CHAIN = ({0, 1, 3}, {2, 4})
"""The tasks of the five segments in time."""

ROWS = (80, 150, 300, 600)
WIDTHS = (0.45, 0.7, 1.0, 1.4)
"""Selected rows and half-widths of the accepted band in the recovery map."""

TRAIN = 5000
"""Rows that train a specialist; the others are held out."""


def eight_segments(seed: int) -> Sequences:
    """Eight independent segments under `EIGHT`; 60 000 proposals leave about 3700 rows."""
    return make_selection_sequences(60_000, 8, EIGHT, proposals=60_000, generator=_generator(seed))


def graph_run(seed: int) -> dict[str, float]:
    """The task graph of eight segments beside its baselines, and the level on independent ones."""
    data = eight_segments(seed)
    out = {}
    for name, graph in (
        ("graph", task_graph(data.S)),
        ("few", task_graph(data.S[:300])),
        ("marginal", marginal_graph(data.S)),
        ("squares", task_graph(data.S, features="squares")),
        ("outcome", outcome_graph(data)),
        ("glasso", glasso_graph(data.S)),
    ):
        found = graph_scores(graph, EIGHT)
        out |= {f"{name}_{k}": found[k] for k in ("false", "missed", "exact", "omega")}
    runs = score_tasks(change_point_sets(data.S, len(EIGHT)), EIGHT, K=8)
    out |= {f"cuts_{k}": runs[k] for k in ("false", "missed", "exact", "omega")}
    free = make_selection_sequences(3700, 8, (), generator=_generator(seed))
    null = task_graph(free.S)
    p = null.graph["p_values"][np.triu_indices(8, 1)]
    out |= {"rows": len(data.S), "null_rejects": float((p <= 0.05).mean())}
    return out | {"null_edges": null.number_of_edges()}


def chain_run(seed: int) -> dict[str, float]:
    """Five segments of two linked steps, one link cut: the right pair of steps and the wrong one.

    And the same tasks with one step a segment, where lag-1 pairs need an unselected sample.
    """
    draw = {"rho": 0.6, "generator": _generator(seed)}
    data = make_selection_sequences(3000, 5, CHAIN, steps=2, breaks=(6,), proposals=40_000, **draw)
    right = graph_scores(task_graph(data.S, steps=2), CHAIN)
    wrong = last_first_graph(data.S, steps=2)
    single = make_selection_sequences(3000, 5, CHAIN, **draw)
    before = make_selection_sequences(3000, 5, (), **draw)
    blind = task_graph(single.S, linked=True)
    seeing = task_graph(single.S, linked=True, reference=before.S)
    naive = graph_scores(task_graph(single.S), CHAIN)
    return {
        "rows": len(data.S),
        **{f"right_{k}": right[k] for k in ("false", "missed", "exact")},
        "wrong_12": float(wrong.has_edge(1, 2)),
        "wrong_34": float(wrong.has_edge(3, 4)),
        "undetermined": len(blind.graph["undetermined"]),
        "blind_false": graph_scores(blind, CHAIN)["false"],
        "naive_false": naive["false"],
        "reference_exact": graph_scores(seeing, CHAIN)["exact"],
    }


def recovery_run(seed: int) -> dict[str, float]:
    """Whether the eight segments' tasks are found exactly, by rows and by width of the band."""
    out = {}
    for width in WIDTHS:
        data = make_selection_sequences(
            max(ROWS), 8, EIGHT, accept=width, generator=_generator(seed)
        )
        for n in ROWS:
            out[f"exact_{n}_{width}"] = graph_scores(task_graph(data.S[:n]), EIGHT)["exact"]
    return out


def block_scores(u: torch.Tensor, s: torch.Tensor, *, relevant: int = 3) -> dict[str, float]:
    """What a code tells of s_R and of s_I: ``r2_relevant`` and ``r2_irrelevant``."""
    return {
        "r2_relevant": block_r2(u, s[:, :relevant]),
        "r2_irrelevant": block_r2(u, s[:, relevant:]),
    }


def specialist_scores(fit: SpecialistFit, data: MixedLatents, *, m: int = 3) -> dict[str, float]:
    """Held-out scores of a specialist's m most relevant units.

    Args:
        fit: trained on the first `TRAIN` rows.
        data: with at least 1000 more rows.
        m: units of R̂.

    Returns:
        `block_scores`, ``leak`` (`jacobian_leakage`), ``task`` (training rows), ``active`` units.
    """
    x, s = data.x[TRAIN:], data.s[TRAIN:]
    with torch.no_grad():
        u = fit.model.encode(x)[:, fit.model.active(m)]
    return {
        **block_scores(u, s),
        "leak": jacobian_leakage(fit.model, data.mix, s, m=m),
        "task": task_loss(fit.model, data.x[:TRAIN], data.g[:TRAIN]),
        "active": len(fit.model.active()),
    }


def latent_data(seed: int) -> MixedLatents:
    """6000 rows of six mixed latents, of which five tasks need three."""
    return make_mixed_latents(TRAIN + 1000, generator=_generator(seed))


def free_run(seed: int, *, steps: int = 1500) -> dict[str, float]:
    """Without sparsity: λ = 0 and its three most relevant units, FastICA, a bottleneck."""
    data = latent_data(seed)
    x, g = data.x[:TRAIN], data.g[:TRAIN]
    fit = fit_specialist(x, g, lam=0.0, steps=steps, generator=_generator(seed))
    out = {f"free_{k}": v for k, v in specialist_scores(fit, data).items()}
    narrow = bottleneck_code(x, g, data.x[TRAIN:], steps=steps + 1000, generator=_generator(seed))
    ica = fastica_code(x, g, data.x[TRAIN:], seed=seed)
    for name, u in (("bottleneck", narrow.u), ("ica", ica)):
        out |= {f"{name}_{k}": v for k, v in block_scores(u, data.s[TRAIN:]).items()}
    return out | {"bottleneck_task": narrow.task}


def sparse_run(seed: int, *, steps: int = 1500, prune_steps: int = 1000) -> dict[str, float]:
    """λ = .1 before pruning, and pruned to two, three and four units."""
    data = latent_data(seed)
    x, g = data.x[:TRAIN], data.g[:TRAIN]
    generator = _generator(seed)
    fit = fit_specialist(x, g, steps=steps, generator=generator)
    out = {f"l1_{k}": v for k, v in specialist_scores(fit, data).items()}
    for m in (3, 2, 4):
        small = prune_specialist(fit, x, g, m, steps=prune_steps, generator=generator)
        out[f"pruned_task_{m}"] = small.history.pruned_losses[m]
        if m == 3:
            out |= {f"pruned_{k}": v for k, v in specialist_scores(small, data).items()}
    return out


def mask_run(seed: int, *, steps: int = 2000) -> dict[str, float]:
    """Two, three or four units let through to the task from the start, no L1."""
    data = latent_data(seed)
    out = {}
    for m in (2, 3, 4):
        fit = fit_specialist(
            data.x[:TRAIN], data.g[:TRAIN], units=m, steps=steps, generator=_generator(seed)
        )
        scores = specialist_scores(fit, data, m=min(m, 3))
        out |= {f"mask{m}_{k}": scores[k] for k in ("task", "r2_relevant", "r2_irrelevant")}
    return out


STUDIES: dict[str, Callable] = {
    "graph": graph_run,
    "chain": chain_run,
    "recovery": recovery_run,
    "free": free_run,
    "sparse": sparse_run,
    "mask": mask_run,
}

RUNS = (
    *(f"graph/{i}" for i in range(20)),
    *(f"chain/{i}" for i in range(20)),
    *(f"recovery/{i}" for i in range(20)),
    *(f"free/{i}" for i in range(6)),
    *(f"sparse/{i}" for i in range(6)),
    *(f"mask/{i}" for i in range(4)),
)


def study_run(run: str) -> dict[str, float]:
    """One shipped run, ``"study/seed"``, e.g. ``"graph/0"``.

    Raises:
        ValueError: an unknown study, or a seed that is no whole number.
    """
    study, _, number = run.partition("/")
    if study not in STUDIES or not number.isdigit():
        raise ValueError(f"run must be one of {sorted(STUDIES)} and a seed, 'graph/0': got {run!r}")
    return STUDIES[study](int(number))


SHIPPED = (study_run, {"run": RUNS})


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_collider_bias(fn: Callable) -> None:
    """Exercise 1: ``fn(s)`` says which rows of two independent normals are kept: (n,) bool.

    On 10 samples the columns must be uncorrelated before and clearly correlated among the kept
    rows, and whether a row is kept may depend on that row alone.

    Raises:
        AssertionError: with what was seen.
    """
    for case in range(10):
        generator = _generator(case)
        n = 4000 + 500 * case
        s = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        before = float(torch.corrcoef(s.T)[0, 1])
        assert abs(before) <= 0.05, f"sample {case} is no sample of independent normals"
        keep = torch.as_tensor(fn(s.clone()))
        got = (keep.dtype, tuple(keep.shape))
        assert got == (torch.bool, (n,)), f"the result must be {n} booleans: got {got}"
        assert int(keep.sum()) >= n // 20, (
            f"at least 5 % of the rows must be kept: {int(keep.sum())} of {n} are"
        )
        after = float(torch.corrcoef(s[keep].T)[0, 1])
        assert abs(after) >= 0.3, (
            f"kept rows must be correlated, |corr| >= 0.3: got {after:.3f}; keep the rows whose "
            "common effect falls into a narrow band"
        )
        order = torch.randperm(n, generator=generator)
        again = torch.as_tensor(fn(s[order].clone()))
        assert bool((again == keep[order]).all()), (
            "whether a row is kept must depend on that row alone: another order of the rows "
            "changed it"
        )


def check_partial_correlation(fn: Callable) -> None:
    """Exercise 2: ``fn(x, y, Z)`` is the p-value of a partial correlation given Z.

    Its p-values must be uniform on 600 null problems with few rows and many columns of Z, where
    the degrees of freedom matter, and tiny where x and y depend on each other given Z.

    Raises:
        AssertionError: with the Kolmogorov–Smirnov p-value, or the power.
    """
    from scipy.stats import kstest

    generator = _generator(11)

    def problem(n: int, k: int, effect: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        Z = normal(n, k) + 1.0  # a mean that the constant must take up
        x = Z @ normal(k) + normal(n)
        y = Z @ normal(k) + normal(n) + effect * x
        return x, y, Z

    null = []
    for _ in range(600):
        p = float(fn(*problem(24, 8, 0.0)))
        assert 0 <= p <= 1, f"a p-value must lie in [0, 1]: got {p}"
        null.append(p)
    found = float(kstest(null, "uniform").pvalue)
    assert found > 0.01, (
        "under independence given Z the p-values must be uniform: the Kolmogorov–Smirnov test of "
        f"600 says p = {found:.1e}; regress on Z and a constant, and count the columns of Z in "
        "the degrees of freedom"
    )
    power = sum(float(fn(*problem(200, 4, 0.6))) < 0.01 for _ in range(20))
    assert power >= 19, f"dependence given Z must be found: it was in {power} of 20 problems"


def _random_family(generator: torch.Generator, K: int) -> list[frozenset]:
    """Two to four tasks of two to four of K segments."""
    count = int(torch.randint(2, 5, (1,), generator=generator))
    sizes = torch.randint(2, 5, (count,), generator=generator).tolist()
    return [frozenset(torch.randperm(K, generator=generator)[:size].tolist()) for size in sizes]


TRIANGLE = (frozenset({0, 1}), frozenset({1, 2}), frozenset({0, 2}))
"""Three tasks whose graph is that of one task {0, 1, 2}."""


def check_task_reading(fn: Callable) -> None:
    """Exercise 3: ``fn(tasks)`` gives (sets, conformal) for a family of tasks.

    ``sets`` are those that can be read from the family's graph, ``conformal`` whether they are the
    family. Compared on 10 random families, on tasks of which one contains another, and on the
    triangle {0,1}, {1,2}, {0,2}.

    Raises:
        AssertionError: with the family that differs.
    """
    generator = _generator(12)
    families = [list(TRIANGLE), [frozenset({0, 1, 2}), frozenset({1, 2})]]
    families += [[frozenset({0, 2, 5}), frozenset({1, 3}), frozenset({2, 6})]]
    families += [_random_family(generator, 6) for _ in range(10)]
    for tasks in families:
        shown = [sorted(t) for t in tasks]
        expected = task_sets(moral_graph(tasks, 8))
        sets, conformal = fn([set(t) for t in tasks])
        got = {frozenset(t) for t in sets}
        assert got == set(expected), (
            f"from the graph of {shown} one reads {[sorted(t) for t in expected]}, got "
            f"{sorted(map(sorted, got))}: take the maximal cliques of two or more"
        )
        assert bool(conformal) == has_clique_property(tasks), (
            f"{shown} {'is' if has_clique_property(tasks) else 'is not'} the family of maximal "
            f"cliques of its own graph: the answer was {bool(conformal)}"
        )


def check_block_directions(fn: Callable) -> None:
    """Exercise 4: ``fn(x, g, rank)`` gives (rank, dim) directions of x that hold s_R and no s_I.

    On 10 random linear problems the directions' leakage from s_I must be below 1e-8, and s_R must
    be recoverable from them.

    Raises:
        AssertionError: with the leakage.
    """
    generator = _generator(13)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for case in range(10):
        dim, rank = 5 + case % 4, 2 + case % 3
        A, B = normal(dim, dim), normal(rank + 2, rank)
        s = normal(300, dim)
        V = torch.as_tensor(fn(s @ A.T, s[:, :rank] @ B.T, rank)).to(torch.float64)
        hint = f"problem {case}: dim={dim}, rank={rank}"
        assert tuple(V.shape) == (rank, dim), (
            f"{hint}: the result must have shape (rank, dim) = {(rank, dim)}: got {tuple(V.shape)}"
        )
        J = V @ A  # ∂(Vx)/∂s
        held = float(torch.linalg.svdvals(J[:, :rank])[-1])
        assert held > 1e-6 * float(J.norm()), (
            f"{hint}: s_R must be recoverable, but the {rank} directions see less than {rank} of "
            "its dimensions"
        )
        leak = float(J[:, rank:].norm() / J[:, :rank].norm())
        assert leak < 1e-8, (
            f"{hint}: the directions must not see s_I, leakage < 1e-8: got {leak:.1e}; which "
            "directions of x does the map from x to g use?"
        )


def make_bell_selection(
    weights: object, n: int, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Independent normals, kept with probability Π_τ exp(-(w_τᵀs)²/2): a Gaussian law.

    Its precision matrix is I + Σ_τ w_τ w_τᵀ, so what the theorem calls an edge is an entry of it.

    Args:
        weights: (n_tasks, K), one row w_τ a task; 0 for segments that are no members.
        n: rows to keep.
        generator: None is seeded with 0.

    Returns:
        (n, K) float64.

    Raises:
        ValueError: weights that are not finite or not 2-D.
        RuntimeError: 10⁷ proposals did not give n rows.
    """
    W = _as_rows("weights", weights)
    _check_count("n", n)
    generator = generator or _generator(0)
    kept, found = [], 0
    for _ in range(MAX_PROPOSALS // 20_000):
        s = torch.randn(20_000, W.shape[1], generator=generator, dtype=torch.float64)
        u = torch.rand(20_000, generator=generator, dtype=torch.float64)
        good = s[u.log() < -0.5 * (s @ W.T).square().sum(dim=1)]
        kept.append(good)
        found += len(good)
        if found >= n:
            return torch.cat(kept)[:n]
    raise RuntimeError(f"{MAX_PROPOSALS} proposals gave only {found} of n={n} rows")


def check_cancelled_edge(fn: Callable) -> None:
    """Exercise 5: ``fn(w)`` hides an edge: task {0,1,2} has weights w, find those of {0,1,3}.

    ``w`` holds the weights of segments 0, 1, 2 in the first task; the result those of 0, 1, 3 in
    the second, each at least 0.3 in size. On data selected by both (`make_bell_selection`), for 5
    random w, `task_graph` must miss the pair (0, 1) and find the four pairs with 2 and 3.

    Raises:
        AssertionError: with the edges that were found.
    """
    generator = _generator(14)
    for _ in range(5):
        w = 0.8 + 0.6 * torch.rand(3, generator=generator, dtype=torch.float64)
        w = w * (2.0 * torch.randint(2, (3,), generator=generator) - 1)
        other = torch.as_tensor(fn(w.clone())).to(torch.float64)
        sizes = other.abs()
        assert sizes.shape == (3,), f"the result must hold three weights: got {other.tolist()}"
        assert float(sizes.min()) >= 0.3, (
            "each weight must be of size 0.3 or more, so that 0, 1 and 3 are all members: got "
            f"{other.tolist()}"
        )
        weights = torch.zeros(2, 4, dtype=torch.float64)
        weights[0, [0, 1, 2]], weights[1, [0, 1, 3]] = w, other
        hidden = float((weights.T @ weights)[0, 1])
        edges = set(task_graph(make_bell_selection(weights, 3000, generator=generator)).edges)
        assert abs(hidden) < 1e-9, (
            f"the pair (0, 1) must vanish: entry (0, 1) of the precision matrix is {hidden:.3f}, "
            "the sum over both tasks of the products of their weights"
        )
        assert (0, 1) not in edges, f"the graph must miss the pair (0, 1): got {sorted(edges)}"
        assert {(0, 2), (1, 2), (0, 3), (1, 3)} <= edges, (
            f"the pairs of 2 and 3 with 0 and 1 must be found: got {sorted(edges)}; the weights "
            "may be too small to matter"
        )
