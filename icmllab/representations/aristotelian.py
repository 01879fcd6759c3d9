r"""Revisiting the Platonic Representation Hypothesis: An Aristotelian View (arXiv 2602.14486).

A similarity score of two networks has no zero: unrelated networks score above 0, more so when they
are wide, and more again when the best pair of layers is reported. Permuting the rows of one side
destroys the correspondence and leaves everything else, so the permuted scores give any metric a
zero and a valid test (`calibrate`, Algorithm 1), layer search included (`calibrate_layers`,
Algorithm 2).

The metrics live in `icmllab.toolbox.similarity` and the permutation engine in
`icmllab.toolbox.two_sample`; their names are re-exported here. The data generators, the local
distance test and the digits study are this book's reconstruction.
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from icmllab.toolbox.digits import TwoViews, View, digits_two_views
from icmllab.toolbox.similarity import (
    Metric,
    as_features,
    cka_unbiased,
    distance_correlation,
    expected_null_cka,
    expected_null_mknn,
    knn_indices,
    metric,
    mutual_knn,
    shared_neighbour_distances,
)
from icmllab.toolbox.two_sample import (
    Calibrated,
    CalibratedLayers,
    Discoveries,
    calibrate,
    calibrate_layers,
    calibrated,
    check_layers,
    choose_permutations,
    draw_permutations,
    fdr_bh,
    layer_scores,
    permutation_test,
)

__all__ = [
    "Activations",
    "Calibrated",
    "CalibratedLayers",
    "Clusters",
    "Discoveries",
    "LayerMatrix",
    "LocalDistance",
    "Pair",
    "Ruler",
    "Stacks",
    "TwoViews",
    "View",
    "adjusted_score",
    "calibrate",
    "calibrate_layers",
    "calibrate_matrix",
    "check_best_layer",
    "check_block_permutations",
    "check_expected_null_cka",
    "check_permuted_mknn",
    "check_pvalue_and_tau",
    "digits_stacks",
    "digits_two_views",
    "expected_null_cka",
    "expected_null_mknn",
    "fdr_bh",
    "load_activations",
    "local_distance_test",
    "make_null",
    "make_shared_neighbourhoods",
    "make_shared_signal",
    "measure_stacks",
    "metric",
    "train_view_mlp",
    "z_score",
]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------------------------
# Data


class Pair(NamedTuple):
    """Two representations of the same samples, row by row: (n, d_x) and (n, d_y) float64."""

    X: torch.Tensor
    Y: torch.Tensor


class Clusters(NamedTuple):
    """Two representations that share who belongs together and nothing else.

    Attributes:
        X: (n, d) float64.
        Y: (n, d) float64, the same samples.
        labels: (n,) int64, the cluster of each sample.
    """

    X: torch.Tensor
    Y: torch.Tensor
    labels: torch.Tensor


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number >= 1: got {value}")


def make_null(
    n: int,
    d_x: int,
    d_y: int,
    *,
    dist: str = "normal",
    generator: torch.Generator | None = None,
) -> Pair:
    """Two unrelated representations: independent entries, no association at all.

    Args:
        n: samples.
        d_x: width of X.
        d_y: width of Y.
        dist: "normal" for N(0, 1), "t3" for Student's t with 3 degrees of freedom.
        generator: randomness; None is seeded with 0.

    Raises:
        ValueError: a size below 1 or an unknown ``dist``.
    """
    _check_sizes(n=n, d_x=d_x, d_y=d_y)
    if dist not in ("normal", "t3"):
        raise ValueError(f"dist must be 'normal' or 't3': got {dist!r}")
    generator = generator or _generator(0)

    def draw(d: int) -> torch.Tensor:
        z = torch.randn(n, d, generator=generator, dtype=torch.float64)
        if dist == "normal":
            return z
        # t with 3 degrees of freedom: a normal over the root of a mean of three squared normals
        squares = torch.randn(3, n, d, generator=generator, dtype=torch.float64).square()
        return z / squares.mean(dim=0).sqrt()

    return Pair(draw(d_x), draw(d_y))


def make_shared_signal(
    n: int,
    r: int,
    width: int,
    *,
    strength: float = 1.0,
    generator: torch.Generator | None = None,
) -> Pair:
    """Two networks that share r factors and pad them with private noise features.

    X = [s·Z Q₁, N₁] and Y = [s·Z Q₂, N₂] with Z (n, r) shared, Q orthogonal and N private, all
    entries N(0, 1). A larger width adds nothing that is shared.

    Args:
        n: samples.
        r: shared factors.
        width: private noise features of each network.
        strength: s, >= 0; 0 leaves no association.
        generator: randomness; None is seeded with 0.
    """
    _check_sizes(n=n, r=r, width=width)
    if not 0 <= strength < math.inf:
        raise ValueError(f"strength must be >= 0 and finite: got {strength}")
    generator = generator or _generator(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    Z = strength * normal(n, r)
    X, Y = (torch.cat([Z @ torch.linalg.qr(normal(r, r)).Q, normal(n, width)], 1) for _ in "XY")
    return Pair(X, Y)


def make_shared_neighbourhoods(
    n: int,
    cluster_size: int,
    d: int,
    within: float = 0.15,
    *,
    generator: torch.Generator | None = None,
) -> Clusters:
    """Two networks that agree on who belongs together but not on where, nor on how far apart.

    Samples fall into n/cluster_size clusters, the same in both networks. Each network draws its
    own cluster centres from N(0, I_d) and its own noise within clusters. One shuffle of the rows,
    shared by both, keeps the order from telling the clusters.

    Args:
        n: samples, a multiple of ``cluster_size``.
        cluster_size: samples of a cluster.
        d: width of both representations.
        within: standard deviation of the noise within a cluster, >= 0.
        generator: randomness; None is seeded with 0.
    """
    _check_sizes(n=n, cluster_size=cluster_size, d=d)
    if n % cluster_size:
        raise ValueError(f"n must be a multiple of cluster_size: got {n} and {cluster_size}")
    if not 0 <= within < math.inf:
        raise ValueError(f"within must be >= 0 and finite: got {within}")
    generator = generator or _generator(0)
    labels = torch.arange(n // cluster_size).repeat_interleave(cluster_size)
    labels = labels[torch.randperm(n, generator=generator)]

    def layout() -> torch.Tensor:
        centres = torch.randn(n // cluster_size, d, generator=generator, dtype=torch.float64)
        noise = torch.randn(n, d, generator=generator, dtype=torch.float64)
        return centres[labels] + within * noise

    return Clusters(layout(), layout(), labels)


class Activations(NamedTuple):
    """Layer activations of two models over the same inputs.

    Attributes:
        a: layers of model a, (n, d_i) float64 each.
        b: layers of model b.
        names_a: the file stems of ``a``, in order.
        names_b: the file stems of ``b``.
    """

    a: list[torch.Tensor]
    b: list[torch.Tensor]
    names_a: list[str]
    names_b: list[str]


def load_activations(folder: str | os.PathLike) -> Activations:
    """Activations of two models from ``folder/a/*.npy`` and ``folder/b/*.npy``.

    Each file holds one layer, an (n, d) array of real numbers; row i of every file belongs to the
    same input i. Files are read in natural order: layer_2 before layer_10. Pickled arrays are
    refused.

    Args:
        folder: the folder that holds ``a`` and ``b``.

    Raises:
        ValueError: a folder is missing or empty, a file is no plain .npy array, is not (n, d) with
            finite entries, or has another number of rows than the others.
    """
    folder = Path(folder)
    found = {}
    for side in ("a", "b"):
        files = sorted((folder / side).glob("*.npy"), key=_natural)
        if not files:
            raise ValueError(f"folder must hold {side}/*.npy, one file a layer: found none")
        layers = []
        for file in files:
            what = f"{side}/{file.name}"
            try:
                array = np.load(file, allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise ValueError(f"{what} must be a plain .npy array: {error}") from None
            layers.append(as_features(what, array))
        found[side] = layers, [f.stem for f in files]
    (a, names_a), (b, names_b) = found["a"], found["b"]
    rows = {len(layer) for layer in (*a, *b)}
    if len(rows) > 1:
        raise ValueError(f"every file must have the same number of rows: found {sorted(rows)}")
    return Activations(a, b, names_a, names_b)


def _natural(path: Path) -> list:
    """Sort key that compares the digits in a name as numbers."""
    return [(int(s), "") if s.isdigit() else (-1, s) for s in re.split(r"(\d+)", path.stem)]


def train_view_mlp(
    view: View, width: int, depth: int, epochs: int, seed: int, *, batch_size: int = 128
) -> list[torch.Tensor]:
    """Train a classifier on one view of the digits and return what its hidden layers say.

    An MLP features → width → … → width → 10 with ``depth`` hidden ReLU layers, Adam at 1e-3 on
    the cross-entropy.

    Args:
        view: training and test rows, see `digits_two_views`.
        width: width of each hidden layer.
        depth: number of hidden layers.
        epochs: passes over the training rows.
        seed: initial weights and order of the batches.
        batch_size: rows a step.

    Returns:
        ``depth`` tensors (n_test, width) float32: activations on the test rows, first layer first.
    """
    _check_sizes(width=width, depth=depth, epochs=epochs, batch_size=batch_size)
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws from the global generator
        torch.manual_seed(seed)
        sizes = [view.x_train.shape[1], *[width] * depth]
        hidden = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        head = nn.Linear(width, int(view.y_train.max()) + 1)
    net = nn.ModuleList([*hidden, head])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    order = _generator(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(view.x_train), generator=order).split(batch_size):
            h = view.x_train[rows]
            for layer in hidden:
                h = F.relu(layer(h))
            loss = F.cross_entropy(head(h), view.y_train[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    activations, h = [], view.x_test
    with torch.no_grad():
        for layer in hidden:
            h = F.relu(layer(h))
            activations.append(h)
    return activations


# --------------------------------------------------------------------------------------------
# The wrong order, and other baselines


class LayerMatrix(NamedTuple):
    """Every pair of layers on its own, each (L_A, L_B) float64: raw, calibrated, p-value."""

    raw: torch.Tensor
    score: torch.Tensor
    p_value: torch.Tensor


def calibrate_matrix(
    Xs: Sequence,
    Ys: Sequence,
    metric: str | Metric | Callable = "cka_linear",
    *,
    n_perm: int = 199,
    alpha: float = 0.05,
    s_max: float | None = 1.0,
    generator: torch.Generator | None = None,
    perms: object = None,
    block: object = None,
) -> LayerMatrix:
    """Calibrate each pair of layers by itself.

    For one pair that was chosen in advance this is right. Taking the maximum of these scores is
    the wrong order: with many pairs one of them exceeds its own threshold by chance. Use
    `calibrate_layers` for the best pair.

    Args:
        Xs: L_A feature matrices (n, d_i).
        Ys: L_B feature matrices (n, d_j).
        metric: a name, a `Metric` or a callable, as in `calibrate`; so are the other arguments.

    Raises:
        ValueError: as in `calibrate_layers`.
    """
    Xs, Ys = check_layers(Xs, Ys)
    perms = choose_permutations(
        len(Xs[0]), n_perm=n_perm, alpha=alpha, generator=generator, perms=perms, block=block
    ).to(Xs[0].device)
    scores = layer_scores(Xs, Ys, metric, perms)
    score, p_value = torch.empty(2, len(Xs), len(Ys), dtype=torch.float64)
    for i in range(len(Xs)):
        for j in range(len(Ys)):
            found = calibrated(scores[i, j], alpha=alpha, s_max=s_max)
            score[i, j], p_value[i, j] = found.score, found.p_value
    return LayerMatrix(scores[:, :, 0].clone(), score, p_value)


def z_score(result: Calibrated) -> float:
    """(s₀ - mean)/sd of the null: a test statistic, without an upper end. nan if sd is 0."""
    spread = float(result.null.std())
    return (result.raw - float(result.null.mean())) / spread if spread > 0 else math.nan


def adjusted_score(result: Calibrated, *, s_max: float = 1.0) -> float:
    """(s₀ - mean)/(s_max - mean): 0 on average under the null, as the adjusted Rand index is.

    It removes the drift of the mean but not the noise around it, and tests nothing.
    """
    mean = float(result.null.mean())
    return (result.raw - mean) / max(s_max - mean, 1e-12)


# --------------------------------------------------------------------------------------------
# Local distances


class LocalDistance(NamedTuple):
    """Agreement of distances among shared neighbours (this book's own test).

    Attributes:
        rho: Spearman correlation over the shared pairs; nan with fewer than 10.
        p_value: two-sided; nan where ``rho`` is.
        n_pairs: how many pairs X and Y share.
    """

    rho: float
    p_value: float
    n_pairs: int


def local_distance_test(
    X: object,
    Y: object,
    k: int = 10,
    *,
    n_perm: int = 999,
    generator: torch.Generator | None = None,
) -> LocalDistance:
    """Do neighbours that X and Y share agree on how far apart they are?

    The shared pairs stay fixed and the y-distances are permuted over them. Permuting rows instead
    would leave about k²n/(n-1) shared edges, far too few to compare. The test is approximate:
    pairs that share a point are not independent.

    Args:
        X: (n, d_x) tensor or array.
        Y: (n, d_y).
        k: neighbours, in [1, n-1].
        n_perm: permutations, >= 1.
        generator: randomness; None is seeded with 0.
    """
    _check_sizes(n_perm=n_perm)
    pairs = shared_neighbour_distances(X, Y, k=k)
    rho, m = distance_correlation(pairs), len(pairs.x)
    if math.isnan(rho):
        return LocalDistance(math.nan, math.nan, m)
    from scipy.stats import rankdata

    x, y = (torch.from_numpy(rankdata(t.cpu().numpy())) for t in pairs)
    x, y = ((t - t.mean()) / (t - t.mean()).norm() for t in (x, y))
    perms = draw_permutations(m, n_perm, generator=generator)
    null = y[perms] @ x
    # 1e-12: a permutation that only exchanges ties gives the same correlation up to rounding
    hits = int((null.abs() >= abs(rho) - 1e-12).sum())
    return LocalDistance(rho, (1 + hits) / (n_perm + 1), m)


# --------------------------------------------------------------------------------------------
# Experiments: one run each, from a seed to numbers


def null_drift(
    *, n: int, width: int, n_perm: int, seed: int, dist: str = "normal"
) -> dict[str, float]:
    """Raw and calibrated scores of unrelated data, by three metrics."""
    generator = _generator(seed)
    X, Y = make_null(n, width, width, dist=dist, generator=generator)
    perms = draw_permutations(n, n_perm, generator=generator)
    out = {}
    for name, measure in (
        ("cka", metric("cka_linear")),
        ("rbf", metric("cka_rbf", sigma_frac=1.0)),
        ("mknn", metric("mutual_knn", k=10)),
    ):
        found = calibrate(X, Y, measure, perms=perms)
        out[f"{name}_raw"], out[f"{name}_cal"] = found.raw, found.score
    return out


def narrow_kernel(*, n: int, width: int, sigma_frac: float, n_perm: int, seed: int) -> dict:
    """RBF-CKA of unrelated data with a small bandwidth: the raw score tends to 1."""
    generator = _generator(seed)
    X, Y = make_null(n, width, width, generator=generator)
    found = calibrate(
        X, Y, metric("cka_rbf", sigma_frac=sigma_frac), n_perm=n_perm, generator=generator
    )
    return {"raw": found.raw, "cal": found.score}


def null_p_value(*, n: int, width: int, n_perm: int, seed: int) -> float:
    """The p-value of linear CKA on unrelated data."""
    generator = _generator(seed)
    X, Y = make_null(n, width, width, generator=generator)
    return calibrate(X, Y, n_perm=n_perm, generator=generator).p_value


def depth_trial(*, n: int, width: int, n_layers: int, n_perm: int, seed: int) -> dict[str, float]:
    """The best of L×L pairs of unrelated layers: its raw score, and who calls it significant."""
    generator = _generator(seed)
    pairs = [make_null(n, width, width, generator=generator) for _ in range(n_layers)]
    Xs, Ys = [p.X for p in pairs], [p.Y for p in pairs]
    perms = draw_permutations(n, n_perm, generator=generator)
    naive = calibrate_matrix(Xs, Ys, perms=perms)
    aware = calibrate_layers(Xs, Ys, perms=perms)
    debiased = metric("cka_unbiased")
    left, right = [debiased.side(X) for X in Xs], [debiased.side(Y) for Y in Ys]
    return {
        "raw_max": aware.raw,
        "unbiased_max": max(debiased.pair(a, b) for a in left for b in right),
        "naive_rejects": float(naive.score.max() > 0),
        "aware_rejects": float(aware.score > 0),
    }


def width_trend(*, n: int, r: int, width: int, n_perm: int, seed: int) -> dict[str, float]:
    """Two networks with r shared factors and private noise: every score of linear CKA."""
    generator = _generator(seed)
    X, Y = make_shared_signal(n, r, width, generator=generator)
    found = calibrate(X, Y, n_perm=n_perm, generator=generator)
    return {
        "raw": found.raw,
        "calibrated": found.score,
        "unbiased": cka_unbiased(X, Y),
        "adjusted": adjusted_score(found),
        "z": z_score(found),
        "p": found.p_value,
    }


def neighbourhood_scores(
    *, n: int, cluster_size: int, d: int, k: int, n_perm: int, seed: int
) -> dict[str, float]:
    """What survives when two networks share neighbourhoods and nothing else."""
    generator = _generator(seed)
    X, Y, _ = make_shared_neighbourhoods(n, cluster_size, d, generator=generator)
    perms = draw_permutations(n, n_perm, generator=generator)
    narrow = calibrate(X, Y, metric("cka_rbf", sigma_frac=0.03), perms=perms)
    local = local_distance_test(X, Y, k, generator=generator)
    return {
        "mknn": calibrate(X, Y, metric("mutual_knn", k=k), perms=perms).score,
        "cka": calibrate(X, Y, perms=perms).score,
        "rbf03_raw": narrow.raw,
        "rbf03": narrow.score,
        "rbf2": calibrate(X, Y, metric("cka_rbf", sigma_frac=0.2), perms=perms).score,
        "local": local.rho,
        "local_p": local.p_value,
        "n_pairs": local.n_pairs,
    }


def bandwidth_scan(
    *, n: int, cluster_size: int, d: int, sigma_frac: float, n_perm: int, seed: int
) -> dict[str, float]:
    """Calibrated RBF-CKA of the shared-neighbourhood model at one bandwidth."""
    generator = _generator(seed)
    X, Y, _ = make_shared_neighbourhoods(n, cluster_size, d, generator=generator)
    found = calibrate(
        X, Y, metric("cka_rbf", sigma_frac=sigma_frac), n_perm=n_perm, generator=generator
    )
    return {"raw": found.raw, "cal": found.score}


class Stacks(NamedTuple):
    """Hidden layers of two networks on the same test rows, and the labels of the rows.

    Attributes:
        a: layers of the network that sees the left half, (n_test, width) float32 each.
        b: layers of the one that sees the right half.
        labels: (n_test,) int64 digits.
    """

    a: list[torch.Tensor]
    b: list[torch.Tensor]
    labels: torch.Tensor


def digits_stacks(*, width: int, depth: int, epochs: int, seed: int) -> Stacks:
    """Train one classifier a view; two networks that never saw the same pixel."""
    views = digits_two_views(seed)
    a, b = (
        train_view_mlp(view, width, depth, epochs, 2 * seed + side)
        for side, view in enumerate((views.a, views.b))
    )
    return Stacks(a, b, views.a.y_test)


def digits_scores(*, width: int, epochs: int, n_perm: int, seed: int) -> dict[str, float]:
    """Agreement of two classifiers that saw different halves of the same digits."""
    stacks = digits_stacks(width=width, depth=2, epochs=epochs, seed=seed)
    X, Y = stacks.a[1], stacks.b[1]
    perms = draw_permutations(len(X), n_perm, generator=_generator(seed))
    out = {}
    for name, measure in (
        ("cka", metric("cka_linear")),
        ("mknn", metric("mutual_knn", k=10)),
        ("rbf", metric("cka_rbf", sigma_frac=0.2)),
    ):
        found = calibrate(X, Y, measure, perms=perms)
        out |= {f"{name}_raw": found.raw, f"{name}_cal": found.score, f"{name}_p": found.p_value}
    return out


SEVEN: dict[str, Metric] = {
    "linear CKA": metric("cka_linear"),
    "unbiased CKA": metric("cka_unbiased"),
    "RBF CKA (0.2)": metric("cka_rbf", sigma_frac=0.2),
    "mutual kNN (10)": metric("mutual_knn", k=10),
    "CKNNA (10)": metric("cknna", k=10),
    "RSA": metric("rsa"),
    "SVCCA (0.99)": metric("svcca"),
}
"""Seven rulers for one pair of networks, by the name that a figure shows."""


class Ruler(NamedTuple):
    """One metric's verdict on two stacks of layers."""

    name: str
    raw: float
    score: float
    p_value: float
    adjusted_p: float
    argmax: tuple[int, int]


def measure_stacks(
    Xs: Sequence, Ys: Sequence, *, n_perm: int, seed: int, metrics: dict[str, Metric] | None = None
) -> list[Ruler]:
    """The best pair of layers of two models by several metrics, p-values adjusted over them.

    Args:
        Xs: layers of one model, (n, d_i) each.
        Ys: layers of the other.
        n_perm: permutations, the same for all metrics.
        seed: their source.
        metrics: by the names to show; `SEVEN` by default.
    """
    metrics = SEVEN if metrics is None else metrics
    Xs, Ys = check_layers(Xs, Ys)
    perms = draw_permutations(len(Xs[0]), n_perm, generator=_generator(seed))
    found = {name: calibrate_layers(Xs, Ys, m, perms=perms) for name, m in metrics.items()}
    adjusted = fdr_bh([r.p_value for r in found.values()]).adjusted
    return [
        Ruler(name, r.raw, r.score, r.p_value, float(q), r.argmax)
        for (name, r), q in zip(found.items(), adjusted, strict=True)
    ]


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_pvalue_and_tau(fn: Callable) -> None:
    """Exercise 1: ``fn(s0, null, alpha)`` returns (p, τ); compared on 100 cases, ties included.

    Raises:
        AssertionError: with the first case that differs, and what was expected.
    """
    rng = np.random.default_rng(0)
    for case in range(100):
        n_perm = int(rng.choice([19, 39, 99, 199, 200]))
        null = rng.normal(size=n_perm)
        if case % 2:
            null = null.round(1)  # ties
        s0 = float(rng.choice(null)) if case % 4 == 1 else float(rng.normal(0.5))
        alpha = float(rng.choice([0.05, 0.1, 0.25]))
        expected = permutation_test(s0, null, alpha=alpha)
        p, tau = (float(v) for v in fn(s0, null.copy(), alpha))
        hint = f"case {case}: B={n_perm}, alpha={alpha}, s0={s0:.3f}"
        assert p > 0, f"{hint}: p is {p}; count the observed score among the B+1"
        assert abs(p - expected.p_value) <= 1e-12, (
            f"{hint}: p must be (1 + #{{s_b >= s0}})/(B+1) = {expected.p_value:.6f}, got {p:.6f}"
        )
        assert abs(tau - expected.tau) <= 1e-12, (
            f"{hint}: τ must be the ⌈(1-α)(B+1)⌉-th smallest of all B+1 scores, the observed one "
            f"included: {expected.tau:.6f}, got {tau:.6f}"
        )


def check_permuted_mknn(fn: Callable) -> None:
    """Exercise 2: ``fn(idx_x, idx_y, perm)`` is mutual kNN after permuting the rows of Y.

    Compared exactly with the score whose neighbours are computed again, for 20 permutations.

    Raises:
        AssertionError: with the permutation that differs.
    """
    generator = _generator(1)
    X, Y, _ = make_shared_neighbourhoods(60, 5, 6, generator=generator)
    k = 6
    idx_x, idx_y = knn_indices(X, k), knn_indices(Y, k)
    perms = draw_permutations(60, 20, generator=generator)
    perms[0] = torch.arange(60)
    for b, perm in enumerate(perms):
        expected = mutual_knn(X, Y[perm], k=k)
        got = float(fn(idx_x.clone(), idx_y.clone(), perm.clone()))
        where = "the identity" if b == 0 else f"permutation {b}"
        assert got == expected, (
            f"for {where} the score must be exactly {expected:.6f}, got {got:.6f}: row i of "
            "Y[perm] is row perm[i] of Y, and its neighbours must be renamed by the inverse"
        )


def check_expected_null_cka(fn: Callable) -> None:
    """Exercise 3: ``fn(X, Y)`` is the mean of linear CKA over all permutations of Y's rows.

    Compared with all 720 permutations at n = 6, and with 400 random ones at n = 100.

    Raises:
        AssertionError: with both numbers.
    """
    generator = _generator(2)
    for widths in ((3, 3), (2, 9), (40, 5)):
        X, Y = make_null(6, *widths, generator=generator)
        X = X + 2  # a mean that centring must remove
        expected = float(all_permutation_scores(X, Y, "cka_linear").mean())
        got = float(fn(X, Y))
        assert abs(got - expected) <= 1e-10 * abs(expected), (
            f"at n=6 with widths {widths} the mean over all 720 permutations is {expected:.12f}, "
            f"got {got:.12f}: average P L_c Pᵀ over all P first"
        )
    X, Y = make_shared_signal(100, 4, 30, generator=generator)
    null = calibrate(X, Y, n_perm=399, generator=generator).null
    error = float(null.std()) / math.sqrt(len(null))
    got = float(fn(X, Y))
    assert abs(got - float(null.mean())) <= 3 * error, (
        f"at n=100 the mean of 399 permuted scores is {float(null.mean()):.5f} ± {error:.5f}, "
        f"got {got:.5f}"
    )


def check_best_layer(fn: Callable) -> None:
    """Exercise 4: ``fn(Xs, Ys, perms)`` is a valid p-value for the best pair of layers.

    On 200 stacks of unrelated layers p <= 0.05 must occur in at most 9 %; on stacks that share a
    signal in one pair of layers it must be found.

    Raises:
        AssertionError: with the rate that was seen.
    """
    generator = _generator(3)
    n, n_layers = 32, 3

    def stacks(strength: float) -> tuple[list, list]:
        pairs = [
            make_shared_signal(n, 4, 8, strength=strength * (layer == 1), generator=generator)
            for layer in range(n_layers)
        ]
        return [p.X for p in pairs], [p.Y for p in pairs]

    def rejects(strength: float) -> bool:
        perms = draw_permutations(n, 39, generator=generator)
        p = float(fn(*stacks(strength), perms))
        assert 0 < p <= 1, f"a p-value must lie in (0, 1]: got {p}"
        return p <= 0.05

    rate = sum(rejects(0.0) for _ in range(200)) / 200
    assert rate <= 0.09, (
        f"unrelated layers are called significant in {rate:.1%} of 200 trials, at most 9 % is "
        "expected at level 5 %: apply one permutation to all layers of Y, take the maximum over "
        "pairs for each permutation, then compare"
    )
    found = sum(rejects(2.0) for _ in range(20)) / 20
    assert found >= 0.9, (
        f"a strong signal in one pair of layers is found in {found:.0%} of 20 trials, at least "
        "90 % is expected"
    )


def check_block_permutations(fn: Callable) -> None:
    """Exercise 5: ``fn(labels, n_perm, generator)`` gives permutations that keep the labels.

    Every row must be a permutation that sends each sample to one of the same label, and within a
    label every order must be equally likely.

    Raises:
        AssertionError: with what went wrong.
    """
    labels = torch.tensor([0, 1, 1, 2, 0, 2, 1, 0, 1, 2, 3, 0])
    n, n_perm = len(labels), 4000
    perms = torch.as_tensor(fn(labels.clone(), n_perm, _generator(4)))
    assert tuple(perms.shape) == (n_perm, n), (
        f"the result must have shape (n_perm, n) = {(n_perm, n)}, got {tuple(perms.shape)}"
    )
    assert bool((perms.sort(dim=1).values == torch.arange(n)).all()), (
        "every row must hold each of 0..n-1 once"
    )
    assert bool((labels[perms] == labels).all()), (
        "a sample must change places only with samples of the same label: labels[perm] == labels"
    )
    for label in labels.unique():
        members = torch.nonzero(labels == label)[:, 0]
        # which order its members stand in, as one number a permutation
        digits = (perms[:, members][:, :, None] == members).int().argmax(dim=2)
        place = len(members) ** torch.arange(len(members))
        orders, counts = (digits * place).sum(dim=1).unique(return_counts=True)
        every = math.factorial(len(members))
        assert len(orders) == every, (
            f"label {int(label)} has {len(members)} samples, so {every} orders must occur: "
            f"{len(orders)} did in {n_perm} permutations"
        )
        off = float((counts / n_perm - 1 / every).abs().max())
        assert off <= 0.05, (
            f"within label {int(label)} each of the {every} orders must be equally likely: "
            f"a share is off by {off:.2f}"
        )


def all_permutation_scores(X: object, Y: object, measure: str | Metric) -> torch.Tensor:
    """The score under every permutation of the rows of Y: (n!,) float64, for n up to 8.

    Raises:
        ValueError: n > 8, or bad input.
    """
    found = metric(measure) if isinstance(measure, str) else measure
    n = len(X)
    if n > 8:
        raise ValueError(f"X must have at most 8 rows, there are n! permutations: got {n}")
    every = torch.tensor(list(itertools.permutations(range(n))))
    return found.null(found.prepare(X, Y), every)
