r"""Vector Linking via Cross-Model Local Isometric Consistency (arXiv 2605.31100).

Two stores of embeddings, made by different encoders over partly overlapping objects; a few known
pairs; find the others. Independently trained encoders agree on short distances up to one factor
and not on long ones. So every point is described by its distances to nearby paired anchors, the
codes of the two stores are compared in many sampled views, votes become a Beta-Bernoulli posterior,
and confident links become anchors of the next round (`VectorLinker`).

Given by the authors' abstract: distances to sampled paired anchors as a code, many views, the
posterior, the bootstrapping. The exact code, the scale estimate, the sampling of views, thresholds,
growth schedule, generators and all numbers are this book's reconstruction.

The fused search behind a view is `icmllab.kernels.code_cost_argmin`.
"""

import itertools
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import sparse
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csgraph
from scipy.special import betaincinv
from scipy.stats import spearmanr
from sklearn.base import BaseEstimator
from torch import nn

from icmllab.kernels.code_cost_argmin import FLOOR, code_cost_argmin
from icmllab.toolbox.contrastive import info_nce
from icmllab.toolbox.fit import fit
from icmllab.toolbox.linalg import orthogonal_procrustes
from icmllab.toolbox.retrieval import mutual_nearest
from icmllab.toolbox.schedules import cosine_schedule

PERMISSIVE = {"n_refs": 32, "n_rounds": 12, "growth": 1.4, "q_min": 0.3, "accept": 0.5}
"""Options of `VectorLinker` for trained encoders, which agree less closely than kernel features."""

TILE = 20_000_000
"""Entries of the largest block of costs that is held at once."""


class FewAnchorsWarning(UserWarning):
    """A code asks for more anchors than there are; it uses all of them."""


class DuplicateVectorsWarning(UserWarning):
    """A store holds a vector more than once; links go to the first of them."""


# --------------------------------------------------------------------------------------------
# Distances and codes


def _unit_rows(name: str, X: object) -> np.ndarray:
    """``X`` as a finite (n, d) float64 array with rows of length 1."""
    X = np.asarray(X.detach().cpu() if isinstance(X, torch.Tensor) else X, dtype=np.float64)
    if X.ndim != 2 or 0 in X.shape:
        raise ValueError(f"{name} must be (n, d), not empty: got shape {X.shape}")
    if not np.isfinite(X).all():
        raise ValueError(f"{name} must be finite: it holds NaN or infinity")
    norms = np.linalg.norm(X, axis=1)
    if not norms.all():
        row = int(np.flatnonzero(norms == 0)[0])
        raise ValueError(f"{name} must have no zero row, which has no direction: row {row} is zero")
    return X / norms[:, None]


def chord_distances(U: np.ndarray, V: np.ndarray) -> np.ndarray:
    """δ(u, v) = ‖u − v‖ = √(2 − 2uᵀv) between rows of length 1: (n, d), (m, d) -> (n, m) float64.

    In float64, since the difference under the root loses half of the digits of short distances.
    """
    return np.sqrt(np.maximum(2.0 - 2.0 * (U @ V.T), 0.0))


class AnchorCode(NamedTuple):
    """The r nearest anchors of each point: ``idx`` (n, r) int64 and distances ``val`` (n, r)."""

    idx: np.ndarray
    val: np.ndarray


def anchor_code(D: np.ndarray, r: int) -> AnchorCode:
    """Each point's distances to the anchors nearest to it, nearest first.

    Args:
        D: (n, p) distances of points to anchors, >= 0.
        r: anchors of a code, >= 1; reduced to p with a `FewAnchorsWarning`.

    Returns:
        Indices of the anchors, in 0..p-1, the lower index first among equal distances, and the
        distances.

    Raises:
        ValueError: D is no (n, p) matrix of finite distances, or r < 1.
    """
    D = _distances("D", D)
    r = _fewer(r, D.shape[1])
    if r < D.shape[1]:
        # the r smallest, then in order; equal distances at the border go to the lower index
        border = np.partition(D, r - 1, axis=1)[:, r - 1 : r]
        rank = np.where(border > D, 0, np.where(border == D, 1, 2))
        order = np.argsort(rank, axis=1, kind="stable")[:, :r]
    else:
        order = np.broadcast_to(np.arange(r), D.shape)
    val = np.take_along_axis(D, order, axis=1)
    inner = np.argsort(val, axis=1, kind="stable")
    idx = np.take_along_axis(order, inner, axis=1)
    return AnchorCode(idx, np.take_along_axis(val, inner, axis=1))


def _distances(name: str, D: object) -> np.ndarray:
    D = np.asarray(D, dtype=np.float64)
    if D.ndim != 2 or 0 in D.shape:
        raise ValueError(f"{name} must be a matrix of distances, not empty: got shape {D.shape}")
    if not np.isfinite(D).all() or D.min() < 0:
        raise ValueError(f"{name} must hold finite distances >= 0")
    return D


def _fewer(r: int, p: int) -> int:
    _whole("r", r, 1)
    if r > p:
        warnings.warn(
            f"r={r} is more than the {p} anchors there are: all {p} are used",
            FewAnchorsWarning,
            stacklevel=3,
        )
    return min(r, p)


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}: got {value!r}")
    return int(value)


def directed_code_cost(DX: np.ndarray, DY: np.ndarray, r: int, scale: float) -> np.ndarray:
    """How badly each point of Y fits the code of each point of X, over X's own nearest anchors.

    D[i, j] = Σ_{l in N_r(i)} (δ_X(i, l) − κ δ_Y(j, l))² / max(δ_X(i, l), 0.01), the square expanded
    into two matrix products whose left factors hold r non-zeros a row. For the other direction
    exchange the stores and pass 1/κ.

    Args:
        DX: (n, p) distances of the points of X to the anchors.
        DY: (m, p) distances of the points of Y to the partners of these anchors.
        r: anchors of a code; reduced to p with a warning.
        scale: κ > 0, the factor from distances of Y to those of X.

    Returns:
        (n, m) float64, >= 0.

    Raises:
        ValueError: matrices that do not fit each other, r < 1, or a scale that is not > 0.
    """
    DX, DY = _distances("DX", DX), _distances("DY", DY)
    if DX.shape[1] != DY.shape[1]:
        raise ValueError(
            f"DX and DY must have one column an anchor: got {DX.shape[1]} and {DY.shape[1]}"
        )
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be > 0 and finite: got {scale}")
    (n, p), code = DX.shape, anchor_code(DX, r)
    weight = 1 / np.maximum(code.val, FLOOR)  # W
    rows = np.arange(0, n * code.idx.shape[1] + 1, code.idx.shape[1])

    def left(values: np.ndarray) -> sparse.csr_array:
        return sparse.csr_array((values.ravel(), code.idx.ravel(), rows), shape=(n, p))

    Y = scale * DY.T
    constant = (weight * code.val**2).sum(axis=1)  # c_i
    cost = constant[:, None] - 2 * (left(weight * code.val) @ Y) + left(weight) @ Y**2
    return np.maximum(cost, 0.0)


def estimate_scale(AX: np.ndarray, AY: np.ndarray, r: int) -> float:
    """κ: the median ratio of distances between nearby anchors, X over Y.

    exp(median(log δ_X(a, a') − log δ_Y(b, b'))) over unordered pairs of anchors of which one is
    among the r nearest of the other, in X or in Y. The logarithm and the symmetric choice of pairs
    make estimate_scale(AY, AX) its inverse.

    Args:
        AX: (p, p) distances among the anchors in X.
        AY: (p, p) distances among their partners in Y.
        r: neighbours that count as near, >= 1; at most p - 1 are used.

    Returns:
        κ > 0.

    Raises:
        ValueError: matrices that are not square or differ in size, fewer than two anchors, or no
            pair of distinct anchors.
    """
    return math.exp(_log_scale(_distances("AX", AX), _distances("AY", AY), r))


def _log_scale(AX: np.ndarray, AY: np.ndarray, r: int) -> float:
    p = len(AX)
    if AX.shape != (p, p) or AY.shape != (p, p) or p < 2:
        raise ValueError(
            f"AX and AY must be square, of one size >= 2: got {AX.shape} and {AY.shape}"
        )
    k = min(_whole("r", r, 1), p - 1)
    near = _near(AX, k) | _near(AY, k)
    a, b = np.nonzero(np.triu(near | near.T, 1))
    x, y = AX[a, b], AY[a, b]
    apart = (x > 0) & (y > 0)
    if not apart.any():
        raise ValueError("AX and AY must have a pair of anchors that differ in both: all coincide")
    return float(np.median(np.log(x[apart]) - np.log(y[apart])))


def _near(A: np.ndarray, k: int) -> np.ndarray:
    """(p, p) truth values: column among the k nearest others of the row."""
    others = A + np.where(np.eye(len(A), dtype=bool), np.inf, 0.0)
    near = np.zeros(A.shape, dtype=bool)
    order = np.argsort(others, axis=1, kind="stable")[:, :k]
    np.put_along_axis(near, order, True, axis=1)
    return near


# --------------------------------------------------------------------------------------------
# Posterior and one-to-one choice


def beta_lower(
    h: np.ndarray, T: int, q: float = 0.1, a0: float = 1.0, b0: float = 1.0
) -> np.ndarray:
    """Lower bound of the rate at which a pair is voted for: a quantile of its Beta posterior.

    Args:
        h: votes, each in 0..T.
        T: views.
        q: level of the quantile, in (0, 1).
        a0: prior successes, > 0.
        b0: prior failures, > 0.

    Returns:
        The q-quantile of Beta(a0 + h, b0 + T − h), shaped as ``h``, float64.

    Raises:
        ValueError: an argument out of its range.
    """
    h = np.asarray(h, dtype=np.float64)
    _whole("T", T, 1)
    if h.size and not (h.min() >= 0 and h.max() <= T):
        raise ValueError(f"h must lie in 0..T={T}: got {h.min()} to {h.max()}")
    _share("q", q)
    for name, value in (("a0", a0), ("b0", b0)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be > 0 and finite: got {value}")
    return betaincinv(a0 + h, b0 + T - h, q)


def _share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must be in (0, 1): got {value}")


class Candidates(NamedTuple):
    """Pairs that got a vote: each (k,).

    Attributes:
        i: rows of X, int64.
        j: rows of Y, int64.
        votes: of ``n_views``, int64.
        cost: mean directed cost D¹ over the views that voted for the pair, float64.
    """

    i: np.ndarray
    j: np.ndarray
    votes: np.ndarray
    cost: np.ndarray


def _take(found: Candidates, which: np.ndarray) -> Candidates:
    return Candidates(*(part[which] for part in found))


def greedy_assignment(found: Candidates) -> Candidates:
    """One partner each, by falling votes; ties: lower cost, then lower indices. In that order.

    A pair that comes first in both its row and its column is taken, its rivals leave, and so on:
    the same as going through the list one by one, in a few vectorised passes.
    """
    order = np.lexsort((found.j, found.i, found.cost, -found.votes))
    found = _take(found, order)
    open_, taken = np.arange(len(found.i)), []
    while len(open_):
        i, j = found.i[open_], found.j[open_]
        first_i = np.unique(i, return_index=True)
        first_j = np.unique(j, return_index=True)
        both = np.intersect1d(first_i[1], first_j[1])
        taken.append(open_[both])
        rival = np.isin(i, i[both]) | np.isin(j, j[both])
        open_ = open_[~rival]
    return _take(found, np.sort(np.concatenate(taken or [open_])))


def hungarian_assignment(found: Candidates, n_views: int) -> Candidates:
    """One partner each, so that Σ −log(1 − m) is largest; m is the posterior mean.

    Over the pairs that got a vote, each connected group of them by itself; in the order of
    `greedy_assignment`.
    """
    if not len(found.i):
        return found
    gain = np.log(2 + n_views) - np.log(1 + n_views - found.votes)
    rows, i = np.unique(found.i, return_inverse=True)
    cols, j = np.unique(found.j, return_inverse=True)
    n, m = len(rows), len(cols)
    graph = sparse.coo_array((np.ones(len(i)), (i, n + j)), shape=(n + m, n + m))
    _, group = csgraph.connected_components(graph, directed=False)
    chosen = []
    order = np.argsort(group[i], kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(group[i][order])) + 1):
        if len(members) == 1:
            chosen.append(members)
            continue
        mine, a = np.unique(i[members], return_inverse=True)
        theirs, b = np.unique(j[members], return_inverse=True)
        table = np.zeros((len(mine), len(theirs)))
        where = np.full(table.shape, -1)
        table[a, b], where[a, b] = gain[members], members
        picked = where[linear_sum_assignment(table, maximize=True)]
        chosen.append(picked[picked >= 0])
    found = _take(found, np.concatenate(chosen))
    return _take(found, np.lexsort((found.j, found.i, found.cost, -found.votes)))


# --------------------------------------------------------------------------------------------
# The linker


class Round(NamedTuple):
    """What one round found.

    Attributes:
        anchors: (k, 2) int64, the linked anchors that the round used: seeds, then accepted pairs.
        links: (L, 2) int64, the pairs whose posterior mean exceeds ``accept``, best first.
        posterior: (L,) float64, their posterior means.
        chosen: every pair of the one-to-one choice, with its votes, best first.
        scale: median over the views of κ.
    """

    anchors: np.ndarray
    links: np.ndarray
    posterior: np.ndarray
    chosen: Candidates
    scale: float


class Votes(NamedTuple):
    """The votes of one round: pairs, and the scale of each view, (n_views,)."""

    pairs: Candidates
    scales: np.ndarray


class _Side(NamedTuple):
    """One store: unit rows, for each row the first row that equals it, and the search device."""

    rows: np.ndarray
    first: np.ndarray
    device: torch.device

    def to_anchors(self, anchors: np.ndarray) -> torch.Tensor:
        """Distances to the anchors, (n, p): float64 on a CPU, float32 for the kernel on a GPU."""
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        D = torch.empty(len(self.rows), len(anchors), dtype=dtype, device=self.device)
        step = max(1, TILE // len(anchors))
        for start in range(0, len(self.rows), step):
            part = chord_distances(self.rows[start : start + step], anchors)
            D[start : start + step] = torch.from_numpy(part).to(self.device, dtype)
        return D


def _side(name: str, X: object, device: torch.device) -> _Side:
    rows = _unit_rows(name, X)
    _, start, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    first = start[inverse.reshape(-1)]
    copies = int((first != np.arange(len(rows))).sum())
    if copies:
        warnings.warn(
            f"{name} holds {copies} copies of earlier rows: only the first of equal rows is linked",
            DuplicateVectorsWarning,
            stacklevel=4,
        )
    return _Side(rows, first, device)


def view_size(n_anchors: int, *, subsample: float, n_refs: int) -> int:
    """Anchors of one view: k = max(⌈f p⌉, min(r + 2, ⌊.9 p⌋)).

    The .9 keeps views different when anchors are few: if every view took all of them, all votes
    would be the same vote.
    """
    # 1e-9: f p may come out a hair above a whole number
    share = math.ceil(subsample * n_anchors - 1e-9)
    return max(share, min(n_refs + 2, int(0.9 * n_anchors + 1e-9)))


def cast_votes(
    X: object,
    Y: object,
    anchors_x: object,
    anchors_y: object,
    *,
    n_refs: int = 16,
    n_views: int = 16,
    subsample: float = 0.6,
    local: bool = True,
    generator: np.random.Generator | int = 0,
    device: str | torch.device = "cpu",
) -> Votes:
    """One round: in each of many views of the anchors, the pairs that choose each other.

    Args:
        X: (n, d_x) vectors of one store.
        Y: (m, d_y) vectors of the other.
        anchors_x: (p, d_x) vectors of the anchors in the first encoder's space.
        anchors_y: (p, d_y) the same objects in the other's.
        n_refs: r, anchors of a code.
        n_views: V.
        subsample: f, share of the anchors that a view draws, in (0, 1].
        local: False puts all anchors of a view into every code.
        generator: draws the views; the same one gives transposed votes when the stores are
            exchanged.
        device: where the search runs.

    Returns:
        The pairs with votes, by rising (i, j), and κ of each view.

    Raises:
        ValueError: anchors that do not match each other or the stores.
    """
    device = torch.device(device)
    sides = _side("X", X, device), _side("Y", Y, device)
    anchors = _unit_rows("anchors_x", anchors_x), _unit_rows("anchors_y", anchors_y)
    for name, side, own in zip(("anchors_x", "anchors_y"), sides, anchors, strict=True):
        if own.shape[1] != side.rows.shape[1]:
            raise ValueError(
                f"{name} must have the width of its store, {side.rows.shape[1]}: got {own.shape[1]}"
            )
    if len(anchors[0]) != len(anchors[1]):
        raise ValueError(
            "anchors_x and anchors_y must pair up row by row: "
            f"got {len(anchors[0])} and {len(anchors[1])} rows"
        )
    rng = np.random.default_rng(generator)
    return _votes(
        *sides, *anchors, rng, n_refs=n_refs, n_views=n_views, subsample=subsample, local=local
    )


def _votes(
    side_x: _Side,
    side_y: _Side,
    ax: np.ndarray,
    ay: np.ndarray,
    rng: np.random.Generator,
    *,
    n_refs: int,
    n_views: int,
    subsample: float,
    local: bool,
    n_probes: int | None = None,
) -> Votes:
    p, m = len(ax), len(side_y.rows)
    DX, DY = side_x.to_anchors(ax), side_y.to_anchors(ay)
    DXt, DYt = DX.T.contiguous(), DY.T.contiguous()
    AX, AY = chord_distances(ax, ax), chord_distances(ay, ay)
    k = view_size(p, subsample=subsample, n_refs=n_refs)
    r = min(n_refs, k) if local else k
    # with few anchors their lists are so long that comparing all pairs is faster
    if n_probes is not None and 4 * n_probes**2 > k:
        n_probes = None
    keys, costs, scales = [], [], []
    for _ in range(n_views):
        view = np.sort(rng.choice(p, size=k, replace=False))
        log_scale = _log_scale(AX[np.ix_(view, view)], AY[np.ix_(view, view)], r)
        columns = torch.from_numpy(view).to(side_x.device)
        # exp of both signs, not a quotient: exchanged stores then see the very same numbers
        forward = _search(DX, DYt, columns, r, math.exp(log_scale), n_probes)
        backward = _search(DY, DXt, columns, r, math.exp(-log_scale), n_probes)
        to_y, to_x = side_y.first[forward.best_j], side_x.first[backward.best_j]
        to_y[forward.best_j < 0], to_x[backward.best_j < 0] = -1, -1
        i = np.flatnonzero((to_x[to_y] == np.arange(len(to_y))) & (to_y >= 0))
        keys.append(i * m + to_y[i])
        costs.append(forward.best_cost[i])
        scales.append(math.exp(log_scale))
    pairs, where, votes = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)
    cost = np.bincount(where.reshape(-1), np.concatenate(costs), minlength=len(pairs)) / votes
    return Votes(Candidates(pairs // m, pairs % m, votes, cost), np.array(scales))


class _Found(NamedTuple):
    """(n,) best match, −1 for none, and its cost."""

    best_j: np.ndarray
    best_cost: np.ndarray


def _search(
    D: torch.Tensor,
    others: torch.Tensor,
    columns: torch.Tensor,
    r: int,
    scale: float,
    n_probes: int | None,
) -> _Found:
    """For each row of D its best match, by its r nearest anchors among ``columns``."""
    lists = None
    if n_probes is not None:
        theirs = others.T[:, columns].topk(min(n_probes, len(columns)), dim=1, largest=False)
        lists = inverted_lists(columns[theirs.indices], len(others))
    best_j, best_cost = [], []
    for rows in D.split(max(1, TILE // len(columns))):
        code = rows[:, columns].topk(r, dim=1, largest=False)
        anchors = columns[code.indices]
        if lists is None:
            found = code_cost_argmin(code.values, anchors, others, scale)
        else:
            found = pruned_code_argmin(code.values, anchors, others, scale, lists, n_probes)
        best_j.append(found.best_j.cpu().numpy())
        best_cost.append(found.best_cost.double().cpu().numpy())
    return _Found(np.concatenate(best_j).astype(np.int64), np.concatenate(best_cost))


class InvertedLists(NamedTuple):
    """Which points are near an anchor: ``points[starts[l]:starts[l + 1]]`` for anchor l."""

    points: torch.Tensor
    starts: torch.Tensor


def inverted_lists(probes: torch.Tensor, n_anchors: int) -> InvertedLists:
    """The lists of all anchors, from the few nearest anchors of each point, (m, c) int64."""
    flat = probes.flatten()
    points = torch.argsort(flat, stable=True) // probes.shape[1]
    counts = torch.bincount(flat, minlength=n_anchors)
    return InvertedLists(points, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


class Pruned(NamedTuple):
    """(n,) int64 best candidate, −1 without candidates, and its cost, infinite then."""

    best_j: torch.Tensor
    best_cost: torch.Tensor


def pruned_code_argmin(
    dx: torch.Tensor,
    idx: torch.Tensor,
    DYt: torch.Tensor,
    scale: float,
    lists: InvertedLists,
    n_probes: int,
) -> Pruned:
    """`code_cost_argmin` over candidates alone: points of Y that share a near anchor.

    A candidate of point i is in the list of one of the ``n_probes`` anchors nearest to i. For
    stores of 10⁵ and more on a CPU, where comparing all pairs takes too long.

    Args:
        dx: (n, r) distances of a code, nearest first.
        idx: (n, r) its anchors.
        DYt: (p, m) distances of the anchors to the points of Y.
        scale: κ > 0.
        lists: the points of Y that count each anchor among their nearest.
        n_probes: anchors of a point whose lists are searched.
    """
    probes = idx[:, : min(n_probes, idx.shape[1])]
    length = (lists.starts[1:] - lists.starts[:-1])[probes]  # (n, c)
    weight = 1 / dx.clamp_min(FLOOR)
    best_j, best_cost = [], []
    # rows in pieces whose (candidates, r) costs fit into a tile
    piece = ((length.sum(dim=1) * dx.shape[1]).cumsum(0) // TILE).unique(return_counts=True)[1]
    for rows in torch.arange(len(dx), device=dx.device).split(piece.tolist()):
        count = length[rows].flatten()
        owner = rows.repeat_interleave(length[rows].sum(dim=1))
        first = lists.starts[probes[rows].flatten()]
        offset = torch.arange(len(owner), device=dx.device)
        offset = offset - (count.cumsum(0) - count).repeat_interleave(count)
        j = lists.points[first.repeat_interleave(count) + offset]
        gap = dx[owner] - scale * DYt[idx[owner], j[:, None]]
        cost = (weight[owner] * gap.square()).sum(dim=1)
        local = owner - rows[0]
        least = cost.new_full((len(rows),), math.inf).scatter_reduce(0, local, cost, "amin")
        tied = torch.where(cost == least[local], j, DYt.shape[1])
        where = j.new_full((len(rows),), DYt.shape[1]).scatter_reduce(0, local, tied, "amin")
        best_j.append(torch.where(least.isfinite(), where, -1))
        best_cost.append(least)
    return Pruned(torch.cat(best_j), torch.cat(best_cost))


class VectorLinker(BaseEstimator):
    """Links the same objects in two stores of embeddings, from a few known pairs.

    Each round: votes of many views (`cast_votes`), a Beta(1, 1) prior on the rate at which a pair
    is voted for, a one-to-one choice. Round t accepts as anchors of the next, beside the seeds,
    the best pairs whose lower bound exceeds ``q_min``, at most s(g^(t+1) − 1) of them. Accepted
    anchors are decided anew each round, so that a wrong one can leave; only seeds stay.

    Args:
        n_refs: r, anchors of a code, >= 2; where there are fewer, all are used, with a
            `FewAnchorsWarning` if already the seeds are fewer.
        n_views: V, views of a round, >= 1.
        n_rounds: T, >= 1; it ends earlier once the accepted anchors stay the same twice.
        subsample: f, share of the anchors that a view draws, in (0, 1].
        growth: g >= 1.
        q_level: level of the posterior's lower bound.
        q_min: lower bound that an anchor must exceed.
        accept: posterior mean that a link must exceed.
        local: False puts all anchors of a view into every code, near and far.
        assignment: "greedy" or "hungarian".
        max_anchors: most anchors of a round, so that large stores fit into memory.
        n_probes: None compares all pairs; a number compares a point only with those of the other
            store that share one of their ``n_probes`` nearest anchors (for large stores on a CPU).
        random_state: seed of the views.
        device: where the search runs; on a GPU in float32 by the fused kernel.

    Attributes:
        links_: (L, 2) int64 pairs (row of X, row of Y), best first; seeds are not among them.
        posterior_: (L,) posterior means of the links.
        votes_: sparse (n, m), votes of the last round.
        anchors_: the linked anchors of each round, (k, 2) int64 arrays.
        scale_: κ of the last round, the factor from distances in Y to distances in X.
        history_: a DataFrame with a row a round: anchors, pairs with votes, links, their mean
            posterior, scale.
        rounds_: a `Round` each; what a run with fewer rounds would have put out.

    Source: the abstract of arXiv 2605.31100; the exact form is this book's.
    """

    def __init__(
        self,
        n_refs: int = 16,
        n_views: int = 16,
        n_rounds: int = 8,
        subsample: float = 0.6,
        growth: float = 1.7,
        q_level: float = 0.1,
        q_min: float = 0.6,
        accept: float = 0.8,
        local: bool = True,
        assignment: str = "greedy",
        max_anchors: int = 4096,
        n_probes: int | None = None,
        random_state: int = 0,
        device: str = "cpu",
    ):
        self.n_refs = n_refs
        self.n_views = n_views
        self.n_rounds = n_rounds
        self.subsample = subsample
        self.growth = growth
        self.q_level = q_level
        self.q_min = q_min
        self.accept = accept
        self.local = local
        self.assignment = assignment
        self.max_anchors = max_anchors
        self.n_probes = n_probes
        self.random_state = random_state
        self.device = device

    def fit(
        self,
        X: object,
        Y: object,
        seeds: object = None,
        *,
        seed_vectors: tuple[object, object] | None = None,
    ) -> "VectorLinker":
        """Link two stores.

        Args:
            X: (n, d_x) vectors of one store; rows are normalised.
            Y: (m, d_y) vectors of the other.
            seeds: (s, 2) integers, known pairs (row of X, row of Y).
            seed_vectors: (s', d_x) and (s', d_y) vectors of known pairs that belong to neither
                store: references that are never put out. With ``seeds`` they count together.

        Returns:
            self.

        Raises:
            ValueError: fewer than 3 seeds in all, a row that is a seed twice, rows that are zero
                or not finite, or an option out of its range.
        """
        self._check()
        device = torch.device(self.device)
        side_x, side_y = _side("X", X, device), _side("Y", Y, device)
        seeds = _seed_pairs(seeds, len(side_x.rows), len(side_y.rows))
        fixed_x, fixed_y = _fixed_anchors(side_x, side_y, seeds, seed_vectors)
        n_seeds = len(fixed_x)
        if n_seeds < 3:
            raise ValueError(
                f"seeds and seed_vectors must hold at least 3 pairs together: got {n_seeds}"
            )
        if self.local and self.n_refs > n_seeds:
            warnings.warn(
                f"n_refs={self.n_refs} is more than the {n_seeds} seeds: the first rounds use "
                "all the anchors they have",
                FewAnchorsWarning,
                stacklevel=2,
            )
        rng = np.random.default_rng(self.random_state)
        accepted = np.empty((0, 2), dtype=np.int64)
        self.rounds_, history, unchanged = [], [], 0
        for t in range(self.n_rounds):
            ax = np.concatenate([fixed_x, side_x.rows[accepted[:, 0]]])
            ay = np.concatenate([fixed_y, side_y.rows[accepted[:, 1]]])
            votes = _votes(
                side_x,
                side_y,
                ax,
                ay,
                rng,
                n_refs=self.n_refs,
                n_views=self.n_views,
                subsample=self.subsample,
                local=self.local,
                n_probes=self.n_probes,
            )
            chosen = self._choose(votes.pairs, seeds)
            mean = (1 + chosen.votes) / (2 + self.n_views)
            pairs = np.stack([chosen.i, chosen.j], axis=1)
            linked = mean > self.accept
            self.rounds_.append(
                Round(
                    np.concatenate([seeds, accepted]),
                    pairs[linked],
                    mean[linked],
                    chosen,
                    float(np.median(votes.scales)),
                )
            )
            history.append(
                {
                    "round": t,
                    "anchors": len(ax),
                    "votes": len(votes.pairs.i),
                    "links": int(linked.sum()),
                    "mean_posterior": float(mean[linked].mean()) if linked.any() else math.nan,
                    "scale": self.rounds_[-1].scale,
                }
            )
            room = min(n_seeds * (self.growth ** (t + 1) - 1), self.max_anchors - n_seeds)
            strong = beta_lower(chosen.votes, self.n_views, self.q_level) > self.q_min
            before, accepted = accepted, pairs[strong][: max(0, math.floor(room + 1e-9))]
            same = set(map(tuple, accepted)) == set(map(tuple, before))
            unchanged = unchanged + 1 if same else 0
            if unchanged == 2:
                break
        last = self.rounds_[-1]
        self.links_, self.posterior_, self.scale_ = last.links, last.posterior, last.scale
        shape = (len(side_x.rows), len(side_y.rows))
        found = votes.pairs
        self.votes_ = sparse.csr_array((found.votes, (found.i, found.j)), shape=shape)
        self.anchors_ = [r.anchors for r in self.rounds_]
        self.history_ = pd.DataFrame(history).set_index("round")
        return self

    def predict(self, x_idx: object) -> np.ndarray:
        """The linked row of Y for each row of X, −1 where there is none; a seed gives its partner.

        Raises:
            ValueError: rows that are not there, or an estimator that is not fitted.
        """
        if not hasattr(self, "links_"):
            raise ValueError("predict needs a fitted linker: call fit first")
        x_idx = np.asarray(x_idx)
        n = self.votes_.shape[0]
        if not np.issubdtype(x_idx.dtype, np.integer):
            raise ValueError(f"x_idx must hold integers: got dtype {x_idx.dtype}")
        if x_idx.size and not (x_idx.min() >= 0 and x_idx.max() < n):
            raise ValueError(
                f"x_idx must hold rows in 0..{n - 1}: got {x_idx.min()}..{x_idx.max()}"
            )
        partner = np.full(n, -1, dtype=np.int64)
        partner[self.links_[:, 0]] = self.links_[:, 1]
        first = self.anchors_[0]
        partner[first[:, 0]] = first[:, 1]
        return partner[x_idx]

    def _choose(self, found: Candidates, seeds: np.ndarray) -> Candidates:
        open_ = ~(np.isin(found.i, seeds[:, 0]) | np.isin(found.j, seeds[:, 1]))
        found = _take(found, open_)
        if self.assignment == "hungarian":
            return hungarian_assignment(found, self.n_views)
        return greedy_assignment(found)

    def _check(self) -> None:
        _whole("n_refs", self.n_refs, 2)
        _whole("n_views", self.n_views, 1)
        _whole("n_rounds", self.n_rounds, 1)
        _whole("max_anchors", self.max_anchors, 3)
        if self.n_probes is not None:
            _whole("n_probes", self.n_probes, 1)
        if not 0 < self.subsample <= 1:
            raise ValueError(f"subsample must be in (0, 1]: got {self.subsample}")
        if not 1 <= self.growth < math.inf:
            raise ValueError(f"growth must be >= 1 and finite: got {self.growth}")
        for name in ("q_level", "q_min", "accept"):
            _share(name, getattr(self, name))
        if self.assignment not in ("greedy", "hungarian"):
            raise ValueError(f"assignment must be 'greedy' or 'hungarian': got {self.assignment!r}")


def _seed_pairs(seeds: object, n: int, m: int) -> np.ndarray:
    """Checked seeds: (s, 2) int64, empty for None."""
    if seeds is None:
        return np.empty((0, 2), dtype=np.int64)
    seeds = np.asarray(seeds)
    if seeds.ndim != 2 or seeds.shape[1] != 2 or not np.issubdtype(seeds.dtype, np.integer):
        raise ValueError(
            f"seeds must be (s, 2) integers: got shape {seeds.shape}, dtype {seeds.dtype}"
        )
    for side, name, size in ((0, "X", n), (1, "Y", m)):
        rows, count = np.unique(seeds[:, side], return_counts=True)
        if len(rows) and (rows[0] < 0 or rows[-1] >= size):
            raise ValueError(f"seeds must name rows of {name} in 0..{size - 1}: got {seeds}")
        if (count > 1).any():
            raise ValueError(
                f"seeds must name each row once: row {rows[count > 1][0]} of {name} is there "
                f"{count.max()} times"
            )
    return seeds.astype(np.int64)


class _Fixed(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def _fixed_anchors(side_x: _Side, side_y: _Side, seeds: np.ndarray, vectors: object) -> _Fixed:
    """The permanent anchors as vectors: those outside the stores, then the seeds."""
    x, y = side_x.rows[seeds[:, 0]], side_y.rows[seeds[:, 1]]
    if vectors is None:
        return _Fixed(x, y)
    if not isinstance(vectors, tuple | list) or len(vectors) != 2:
        raise ValueError(
            "seed_vectors must be a pair, vectors of the first and of the second space"
        )
    outside = [_unit_rows(name, v) for name, v in zip(("seed_x", "seed_y"), vectors, strict=True)]
    widths = (side_x.rows.shape[1], side_y.rows.shape[1])
    got = tuple(v.shape[1] for v in outside)
    if got != widths or len(outside[0]) != len(outside[1]):
        raise ValueError(
            f"seed_vectors must be (s, {widths[0]}) and (s, {widths[1]}): "
            f"got {outside[0].shape} and {outside[1].shape}"
        )
    return _Fixed(np.concatenate([outside[0], x]), np.concatenate([outside[1], y]))


# --------------------------------------------------------------------------------------------
# What links are good for


class LinkMetrics(NamedTuple):
    """How many links are right: precision is NaN without links, recall without true pairs."""

    precision: float
    recall: float
    f1: float


def link_metrics(links: object, truth: object, exclude: object = None) -> LinkMetrics:
    """Precision, recall and F1 of links.

    Args:
        links: (L, 2) integers, what was found.
        truth: (t, 2) integers, the pairs that are the same object.
        exclude: (s, 2) known pairs, which count on neither side.

    Returns:
        F1 is 0 where nothing right was found.
    """
    sets = [
        {tuple(pair) for pair in np.asarray(pairs).reshape(-1, 2).tolist()}
        for pairs in (links, truth, [] if exclude is None else exclude)
    ]
    found, wanted = sets[0] - sets[2], sets[1] - sets[2]
    right = len(found & wanted)
    return LinkMetrics(
        right / len(found) if found else math.nan,
        right / len(wanted) if wanted else math.nan,
        2 * right / (len(found) + len(wanted)) if found or wanted else math.nan,
    )


def merge_stores(X: object, Y: object, links: object) -> np.ndarray:
    """The union of two stores, each object once.

    Args:
        X: (n, d_x); only its length matters.
        Y: (m, d_y).
        links: (L, 2) pairs, one-to-one.

    Returns:
        (n + m − L, 2) int64: row of X and row of Y of each object, −1 where a store lacks it;
        the objects of X in their order, then those of Y alone.

    Raises:
        ValueError: links that are not one-to-one or name rows that are not there.
    """
    n, m = len(X), len(Y)
    links = _link_pairs(links, n, m)
    partner = np.full(n, -1, dtype=np.int64)
    partner[links[:, 0]] = links[:, 1]
    alone = np.setdiff1d(np.arange(m), links[:, 1])
    ours = np.stack([np.arange(n), partner], axis=1)
    return np.concatenate([ours, np.stack([np.full(len(alone), -1), alone], axis=1)])


def _link_pairs(links: object, n: int, m: int) -> np.ndarray:
    """Checked links: (L, 2) int64, one-to-one."""
    links = np.asarray(links)
    if not links.size:
        return np.empty((0, 2), dtype=np.int64)
    try:
        return _seed_pairs(links, n, m)
    except ValueError as error:
        raise ValueError(str(error).replace("seeds", "links")) from None


def transfer_clusters(labels_x: object, links: object, Y: object) -> np.ndarray:
    """Labels for Y from labels of X: a linked row takes its partner's, any other the label of the
    linked row that is nearest to it within Y.

    Args:
        labels_x: (n,) labels.
        links: (L, 2) pairs, L >= 1; seeds may be among them.
        Y: (m, d_y) vectors.

    Returns:
        (m,) labels in the dtype of ``labels_x``.

    Raises:
        ValueError: no link, or links that do not fit.
    """
    labels_x, Y = np.asarray(labels_x), _unit_rows("Y", Y)
    links = _link_pairs(links, len(labels_x), len(Y))
    if not len(links):
        raise ValueError("links must hold at least one pair: got none")
    nearest = np.argmin(chord_distances(Y, Y[links[:, 1]]), axis=1)
    # a linked row is its own nearest but for rounding and copies
    nearest[links[:, 1]] = np.arange(len(links))
    return labels_x[links[nearest, 0]]


# --------------------------------------------------------------------------------------------
# Data: encoders of the same objects, and stores that overlap in part


class Encoders(NamedTuple):
    """The same n objects as two encoders see them, row by row.

    Attributes:
        X: (n, d_x) float64, rows of length 1.
        Y: (n, d_y) float64, rows of length 1.
        labels: (n,) int64, the cluster (or the digit) of each object.
    """

    X: np.ndarray
    Y: np.ndarray
    labels: np.ndarray


class Latents(NamedTuple):
    """What the objects are: positions z (n, d) float64 and cluster (n,) int64."""

    z: np.ndarray
    labels: np.ndarray


def make_latents(n: int, k: int = 30, seed: int = 0, *, dim: int = 6) -> Latents:
    """Objects in k clusters: centres 1.5 N(0, I), spread 0.6, every object's cluster at random."""
    for name, value in (("n", n), ("k", k), ("dim", dim)):
        _whole(name, value, 1)
    rng = np.random.default_rng([seed, 0])
    centres = 1.5 * rng.normal(size=(k, dim))
    labels = rng.integers(k, size=n)
    return Latents(centres[labels] + 0.6 * rng.normal(size=(n, dim)), labels)


def kernel_similarity(u: np.ndarray, kernel: str) -> np.ndarray:
    """κ(u), what random features of a kernel approximate: "gauss" exp(−u²/2), or "t3", whose
    frequencies are multivariate Student t₃: Matérn-3/2, (1 + √3 u) exp(−√3 u)."""
    u = np.asarray(u, dtype=np.float64)
    if _kernel(kernel) == "gauss":
        return np.exp(-(u**2) / 2)
    return (1 + math.sqrt(3) * u) * np.exp(-math.sqrt(3) * u)


def kernel_distance(d: np.ndarray, ell: float, kernel: str) -> np.ndarray:
    """δ = √(2 (1 − κ(d/ℓ))), the distance that an encoder with similarity κ gives to latent
    distance d; accurate down to d = 0."""
    u = np.asarray(d, dtype=np.float64) / ell
    if _kernel(kernel) == "gauss":
        return np.sqrt(-2 * np.expm1(-(u**2) / 2))
    v = math.sqrt(3) * u
    # 1 − (1 + v) e^{−v} cancels for small v, where it is v²/2 − v³/3 + v⁴/8 − v⁵/30 + ...
    series = v**2 * (1 / 2 - v * (1 / 3 - v * (1 / 8 - v * (1 / 30 - v / 144))))
    return np.sqrt(2 * np.where(v < 1e-2, series, -np.expm1(-v) - v * np.exp(-v)))


def _kernel(kernel: str) -> str:
    if kernel not in ("gauss", "t3"):
        raise ValueError(f"kernel must be 'gauss' or 't3': got {kernel!r}")
    return kernel


def kernel_encoders(
    n: int = 1000,
    k: int = 30,
    ell: tuple[float, float] = (2.0, 3.0),
    kernels: tuple[str, str] = ("gauss", "t3"),
    dim: tuple[int, int] = (512, 384),
    warp: float = 0.0,
    noise: float = 0.02,
    seed: int = 0,
) -> Encoders:
    """Two encoders whose similarity is a kernel of the objects' latent distance.

    Random Fourier features √(2/D) cos(ωᵀz + φ) of a kernel with length ℓ, each encoder behind a
    private smooth warp z + amp sin(Bz + φ), B entries N(0, .35²), and with noise N(0, I)/√D.

    Args:
        n: objects.
        k: clusters.
        ell: ℓ of each encoder, > 0.
        kernels: "gauss" or "t3" (Matérn-3/2) for each.
        dim: D of each.
        warp: amp, >= 0.
        noise: factor of the noise, >= 0.
        seed: latents, frequencies, warps, noise.

    Raises:
        ValueError: a size below 1, lengths or amplitudes out of range, an unknown kernel.
    """
    z, labels = make_latents(n, k, seed)
    for name, value in (("warp", warp), ("noise", noise)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be >= 0 and finite: got {value}")
    sides = []
    for side in range(2):
        rng = np.random.default_rng([seed, 1 + side])
        if not 0 < ell[side] < math.inf:
            raise ValueError(f"ell must be > 0 and finite: got {ell[side]}")
        D, width = _whole("dim", dim[side], 1), z.shape[1]
        B = 0.35 * rng.normal(size=(width, width))
        seen = z + warp * np.sin(z @ B.T + rng.uniform(0, 2 * np.pi, width))
        omega = rng.normal(size=(width, D)) / ell[side]
        if _kernel(kernels[side]) == "t3":
            omega /= np.sqrt(rng.chisquare(3, size=D) / 3)
        features = np.sqrt(2 / D) * np.cos(seen @ omega + rng.uniform(0, 2 * np.pi, D))
        features += noise * rng.normal(size=features.shape) / math.sqrt(D)
        sides.append(_unit_rows("features", features))
    return Encoders(*sides, labels)


class Split(NamedTuple):
    """Two stores: which objects each holds, and where the shared ones lie.

    Attributes:
        x: (n,) int64, objects of the first store, in its order.
        y: (n,) int64, objects of the second.
        truth: (overlap, 2) int64, (row of the first, row of the second) of each shared object.
        outside: (N − 2n + overlap,) int64, objects in neither.
    """

    x: np.ndarray
    y: np.ndarray
    truth: np.ndarray
    outside: np.ndarray


def overlap_split(N: int, n: int, overlap: int, seed: int = 0) -> Split:
    """Two stores of n among N objects that share ``overlap`` of them, each in its own order.

    Raises:
        ValueError: an overlap outside 0..n, or too few objects.
    """
    _whole("N", N, 1)
    _whole("n", n, 1)
    if not 0 <= _whole("overlap", overlap, 0) <= n:
        raise ValueError(f"overlap must be in 0..n={n}: got {overlap}")
    if 2 * n - overlap > N:
        raise ValueError(f"N must be at least 2 n − overlap = {2 * n - overlap}: got {N}")
    rng = np.random.default_rng([seed, 3])
    order = rng.permutation(N)
    x = rng.permutation(order[:n])
    y = rng.permutation(order[n - overlap : 2 * n - overlap])
    place = np.full(N, -1)
    place[y] = np.arange(n)
    rows = np.flatnonzero(place[x] >= 0)
    truth = np.stack([rows, place[x[rows]]], axis=1)
    return Split(x, y, rng.permutation(truth), order[2 * n - overlap :])


class Problem(NamedTuple):
    """A linking problem with its answer.

    Attributes:
        X: (n, d_x), one store.
        Y: (n, d_y), the other.
        seeds: (s, 2) int64, the pairs that are given.
        truth: (overlap, 2) int64, all pairs, the seeds among them.
        outside_x, outside_y: vectors of objects that neither store holds, row by row.
        labels_x, labels_y: (n,) int64, cluster of each row.
    """

    X: np.ndarray
    Y: np.ndarray
    seeds: np.ndarray
    truth: np.ndarray
    outside_x: np.ndarray
    outside_y: np.ndarray
    labels_x: np.ndarray
    labels_y: np.ndarray


def make_problem(
    encoders: Encoders, *, n: int = 600, overlap: int = 400, n_seeds: int = 20, seed: int = 0
) -> Problem:
    """Two stores of n objects that share ``overlap``, of which ``n_seeds`` pairs are known.

    Raises:
        ValueError: sizes that do not fit.
    """
    split = overlap_split(len(encoders.X), n, overlap, seed)
    if not 0 <= n_seeds <= overlap:
        raise ValueError(f"n_seeds must be in 0..overlap={overlap}: got {n_seeds}")
    X, Y, labels = encoders
    return Problem(
        X[split.x],
        Y[split.y],
        split.truth[:n_seeds],  # the order of truth is random
        split.truth,
        X[split.outside],
        Y[split.outside],
        labels[split.x],
        labels[split.y],
    )


# Trained encoders


def encoder_net(
    sizes: Sequence[int], activation: str, seed: int, *, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """An MLP with ``activation`` ("relu" or "gelu") between its layers, weights from ``seed``."""
    kinds = {"relu": nn.ReLU, "gelu": nn.GELU}
    if activation not in kinds:
        raise ValueError(f"activation must be 'relu' or 'gelu': got {activation!r}")
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws from the global generator
        torch.manual_seed(seed)
        for d_in, d_out in itertools.pairwise(sizes):
            layers += [nn.Linear(d_in, d_out, dtype=dtype), kinds[activation]()]
    return nn.Sequential(*layers[:-1])


def train_encoder(
    net: nn.Module,
    augment: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
    data: torch.Tensor,
    *,
    steps: int,
    temperature: float,
    batch: int = 256,
    lr: float = 2e-3,
    seed: int = 0,
) -> np.ndarray:
    """Train ``net`` in place by symmetric InfoNCE on two augmented copies of each batch.

    Adam with a cosine decay to 0.

    Args:
        net: maps (b, d) to (b, d_out).
        augment: an augmented copy of a batch, drawn from the generator.
        data: (n, ...) objects; a batch is drawn without replacement.
        steps: >= 1.
        temperature: of InfoNCE.
        batch: rows a step, at most n.
        lr: peak rate.
        seed: batches and augmentation.

    Returns:
        (steps,) losses.
    """
    _whole("steps", steps, 1)
    generator = torch.Generator().manual_seed(seed)
    batch = min(batch, len(data))

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        a, b = (model(augment(data[rows], generator)) for _ in range(2))
        return info_nce(a, b, temperature=temperature)

    batches = (torch.randperm(len(data), generator=generator)[:batch] for _ in range(steps))
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    done = fit(net, loss, batches, optimizer, schedule=lambda t: cosine_schedule(t, steps))
    net.eval()
    return done.losses


NETS = (("x", (6, 128, 128, 64), "relu"), ("y", (6, 192, 192, 48), "gelu"))
"""The two encoders of latents: name, layer sizes, activation."""


def _halves(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Objects that each of two encoders is trained on: 70 % each, 40 % in common."""
    order = np.random.default_rng([seed, 4]).permutation(n)
    size, shared = round(0.7 * n), round(0.4 * n)
    return order[:size], order[size - shared : 2 * size - shared]


def train_latent_encoder(
    side: int,
    n: int = 1000,
    seed: int = 0,
    *,
    noise: float = 0.3,
    temperature: float = 0.07,
    steps: int = 500,
) -> nn.Sequential:
    """One of the two trained encoders of latents: ``NETS[side]`` on its 70 % of the objects."""
    rows = _halves(n, seed)[side]
    data = torch.from_numpy(make_latents(n, seed=seed).z[rows]).float()
    _, sizes, activation = NETS[side]
    net = encoder_net(sizes, activation, 2 * seed + side)
    if not 0 < noise < math.inf:
        raise ValueError(f"noise must be > 0 and finite: got {noise}")
    train_encoder(
        net,
        lambda z, g: z + noise * torch.randn(z.shape, generator=g),
        data,
        steps=steps,
        temperature=temperature,
        seed=2 * seed + side,
    )
    return net


def encode(net: nn.Module, data: np.ndarray) -> np.ndarray:
    """Unit rows of what ``net`` says of ``data``, computed in float64: (n, d) float64.

    In float64 the result hardly depends on the processor, whatever the weights' dtype.
    """
    wide = nn.Sequential(*net) if isinstance(net, nn.Sequential) else net
    kept = {name: p.detach().clone() for name, p in wide.state_dict().items()}
    doubled = {name: p.double() for name, p in kept.items()}
    with torch.no_grad():
        out = torch.func.functional_call(wide, doubled, (torch.from_numpy(np.asarray(data)),))
    return _unit_rows("embeddings", out)


def contrastive_encoders(
    n: int = 1000,
    seed: int = 0,
    noise: float = 0.3,
    temperature: float = 0.07,
    steps: int = 500,
) -> Encoders:
    """Two encoders trained apart by InfoNCE: other weights, widths, activations and objects.

    Args:
        n: objects; each encoder is trained on 70 % of them, 40 % are in both trainings.
        seed: latents, training sets, weights, batches.
        noise: spread of the two noisy copies of an object.
        temperature: of InfoNCE.
        steps: of training, some 5 s an encoder for 500 on one core.
    """
    z, labels = make_latents(n, seed=seed)
    options = {"noise": noise, "temperature": temperature, "steps": steps}
    sides = (encode(train_latent_encoder(side, n, seed, **options), z) for side in range(2))
    return Encoders(*sides, labels)


TRAINED_SEEDS = (0, 1, 2)


def save_trained(path: str | os.PathLike, seeds: Sequence[int] = TRAINED_SEEDS) -> None:
    """Train both encoders for each seed and keep their weights as one safetensors file."""
    from safetensors.torch import save_file

    tensors = {}
    for seed in seeds:
        for side, (name, *_) in enumerate(NETS):
            net = train_latent_encoder(side, seed=seed)
            tensors |= {f"{seed}.{name}.{key}": p for key, p in net.state_dict().items()}
    about = {"noise": "0.3", "temperature": "0.07", "steps": "500", "n": "1000"}
    save_file(tensors, path, metadata=about)


def load_trained(seed: int = 0, path: str | os.PathLike | None = None) -> Encoders:
    """The 1000 objects of `contrastive_encoders` (its defaults) by weights from a file.

    Args:
        seed: one of `TRAINED_SEEDS`.
        path: what `save_trained` wrote; by default the file that the chapter ships.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a seed that it does not hold.
    """
    from safetensors import safe_open

    z, labels = make_latents(1000, seed=seed)
    sides = []
    with safe_open(TRAINED_FILE if path is None else path, framework="pt") as file:
        known = sorted({int(key.split(".")[0]) for key in file.keys()})  # noqa: SIM118
        if seed not in known:
            raise ValueError(f"seed must be one of {known}: got {seed}")
        for name, sizes, activation in NETS:
            net = encoder_net(sizes, activation, 0)
            prefix = f"{seed}.{name}."
            net.load_state_dict({key: file.get_tensor(prefix + key) for key in net.state_dict()})
            sides.append(encode(net, z))
    return Encoders(*sides, labels)


TRAINED_FILE = (
    Path(__file__).resolve().parents[2] / "book/representations/veclinking.encoders.safetensors"
)
"""Weights of the trained encoders in a checkout."""


def digits_encoders(
    seed: int = 0, *, epochs: int = 25, temperature: float = 0.2, noise: float = 0.15
) -> Encoders:
    """Two small contrastive encoders of scikit-learn's digits, which are not locally consistent.

    64→128→128→64 and 64→128→128→48 ReLU, trained apart on overlapping 70 % of 1000 digits with
    rolls by up to one pixel and Gaussian noise as augmentations. Such changes are not small in an
    encoder's own metric, so that nothing makes the two agree on short distances.

    Args:
        seed: the digits, training sets, weights, batches.
        epochs: passes of each training.
        temperature: of InfoNCE.
        noise: standard deviation of the pixel noise, pixels in [0, 1].
    """
    from sklearn.datasets import load_digits

    _whole("epochs", epochs, 1)
    bundle = load_digits()
    rows = np.random.default_rng([seed, 5]).permutation(len(bundle.data))[:1000]
    images = bundle.data[rows] / 16

    def augment(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
        shift = torch.randint(-1, 2, (2, len(x)), generator=g)
        to = torch.arange(8)
        down = (to[None] - shift[0, :, None]) % 8
        right = (to[None] - shift[1, :, None]) % 8
        pick = (8 * down[:, :, None] + right[:, None, :]).flatten(1)
        rolled = x.gather(1, pick)
        return rolled + noise * torch.randn(x.shape, generator=g, dtype=x.dtype)

    sides = []
    for side, width in enumerate((64, 48)):
        # float64: 25 epochs then end alike on every processor, to many digits
        net = encoder_net((64, 128, 128, width), "relu", 2 * seed + side, dtype=torch.float64)
        data = torch.from_numpy(images[_halves(1000, seed)[side]])
        steps = epochs * math.ceil(len(data) / 256)
        train_encoder(
            net, augment, data, steps=steps, temperature=temperature, seed=2 * seed + side
        )
        sides.append(encode(net, images))
    return Encoders(*sides, bundle.target[rows].astype(np.int64))


def local_consistency(
    X: object,
    Y: object,
    pairs: int | np.ndarray = 60_000,
    quantiles: Sequence[float] = (0.0, 0.02, 0.5, 1.0),
    *,
    seed: int = 0,
) -> pd.DataFrame:
    """Do two encoders agree on distances, near and far?

    Args:
        X: (n, d_x) vectors of the same objects as ``Y``, row by row.
        Y: (n, d_y).
        pairs: how many pairs of rows to draw, or (k, 2) integers that name them.
        quantiles: edges of the bins of δ_X, rising within [0, 1].
        seed: draws the pairs.

    Returns:
        A row for each bin: ``bin`` (low, high quantile), ``spearman`` of δ_X and δ_Y within the
        bin, ``sd_log_ratio``, the standard deviation of log δ_X − log δ_Y there.

    Raises:
        ValueError: stores of different lengths, bad pairs, or quantiles that do not rise.
    """
    X, Y = _unit_rows("X", X), _unit_rows("Y", Y)
    if len(X) != len(Y) or len(X) < 3:
        raise ValueError(
            f"X and Y must hold the same objects, at least 3: got {len(X)} and {len(Y)} rows"
        )
    q = np.asarray(quantiles, dtype=np.float64)
    if q.ndim != 1 or len(q) < 2 or (np.diff(q) <= 0).any() or q[0] < 0 or q[-1] > 1:
        raise ValueError(f"quantiles must rise within [0, 1]: got {list(quantiles)}")
    if isinstance(pairs, int | np.integer):
        rng = np.random.default_rng(seed)
        a = rng.integers(len(X), size=_whole("pairs", pairs, 1))
        b = (a + rng.integers(1, len(X), size=len(a))) % len(X)
    else:
        pairs = np.asarray(pairs)
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise ValueError(f"pairs must be a number or (k, 2): got shape {pairs.shape}")
        inside = pairs.size and np.issubdtype(pairs.dtype, np.integer)
        if not inside or pairs.min() < 0 or pairs.max() >= len(X):
            raise ValueError(f"pairs must hold rows in 0..{len(X) - 1}, at least one pair")
        a, b = pairs.T
    x, y = np.linalg.norm(X[a] - X[b], axis=1), np.linalg.norm(Y[a] - Y[b], axis=1)
    order = np.argsort(x, kind="stable")
    edges = np.round(q * len(x)).astype(int)
    rows = []
    for low, high, start, stop in zip(q[:-1], q[1:], edges[:-1], edges[1:], strict=True):
        u, v = x[order[start:stop]], y[order[start:stop]]
        apart = (u > 0) & (v > 0)
        spread = np.log(u[apart]) - np.log(v[apart])
        rho = spearmanr(u, v).statistic if len(u) > 2 else math.nan
        rows.append(
            {
                "bin": (float(low), float(high)),
                "spearman": float(rho),
                "sd_log_ratio": float(spread.std()) if len(spread) else math.nan,
            }
        )
    return pd.DataFrame(rows)


# --------------------------------------------------------------------------------------------
# Baselines


def _mapped(A: np.ndarray, B: np.ndarray, X: np.ndarray) -> np.ndarray:
    """X through the orthogonal map that brings A to B, within the spans of A and B alone.

    With fewer pairs than dimensions the map is free outside the spans; leaving those directions
    out is better than filling them with an arbitrary completion.
    """
    bases = []
    for M in (A, B):
        _, size, Vt = np.linalg.svd(M, full_matrices=False)
        bases.append(Vt[size > 1e-10 * size[0]].T)
    R = orthogonal_procrustes(A @ bases[0], B @ bases[1]).numpy()
    return (X @ bases[0]) @ R @ bases[1].T


def _by_cosine(X: np.ndarray, Y: np.ndarray) -> Candidates:
    """Pairs that are each other's nearest by cosine, most similar first."""
    lengths = np.linalg.norm(X, axis=1, keepdims=True)
    far = torch.from_numpy(-(X / np.maximum(lengths, 1e-300)) @ Y.T)
    i, j = mutual_nearest(far, far.T).numpy().T
    cost = far.numpy()[i, j]
    order = np.argsort(cost, kind="stable")
    return Candidates(i[order], j[order], np.ones(len(i), dtype=np.int64), cost[order])


def _without(found: Candidates, seeds: np.ndarray) -> np.ndarray:
    known = np.isin(found.i, seeds[:, 0]) | np.isin(found.j, seeds[:, 1])
    return np.stack([found.i, found.j], axis=1)[~known]


def procrustes_links(X: object, Y: object, pairs: np.ndarray) -> np.ndarray:
    """One global orthogonal map, fitted on known pairs, then mutual nearest neighbours by cosine.

    With the seeds as ``pairs`` a baseline; with all true pairs the best that such a map can do.

    Returns:
        (L, 2) int64 links, most similar first; the rows in ``pairs`` are among them.
    """
    X, Y = _unit_rows("X", X), _unit_rows("Y", Y)
    found = _by_cosine(_mapped(X[pairs[:, 0]], Y[pairs[:, 1]], X), Y)
    return np.stack([found.i, found.j], axis=1)


def iterative_procrustes(
    X: object, Y: object, seeds: np.ndarray, *, n_rounds: int = 8, growth: float = 1.7
) -> list[np.ndarray]:
    """A bootstrapped global map: fit, link, add the most similar links as pairs, and again.

    The number of added pairs grows as in `VectorLinker`, s(g^(t+1) − 1), and they are decided
    anew each round.

    Returns:
        The links after each round, (L, 2) int64, most similar first, seeds excluded.
    """
    X, Y = _unit_rows("X", X), _unit_rows("Y", Y)
    pairs, rounds = seeds, []
    for t in range(n_rounds):
        found = _by_cosine(_mapped(X[pairs[:, 0]], Y[pairs[:, 1]], X), Y)
        rounds.append(_without(found, seeds))
        room = math.floor(len(seeds) * (growth ** (t + 1) - 1) + 1e-9)
        pairs = np.concatenate([seeds, rounds[-1][:room]])
    return rounds


def one_shot_links(X: object, Y: object, seeds: np.ndarray) -> np.ndarray:
    """Relative codes: distances to all seeds, z-scored in each store, mutual nearest neighbours.

    Returns:
        (L, 2) int64 links, seeds excluded.
    """
    codes = []
    for side, Z in enumerate((_unit_rows("X", X), _unit_rows("Y", Y))):
        D = chord_distances(Z, Z[seeds[:, side]])
        codes.append((D - D.mean(axis=0)) / D.std(axis=0))
    far = torch.cdist(*map(torch.from_numpy, codes))
    i, j = mutual_nearest(far, far.T).numpy().T
    return _without(Candidates(i, j, i, i), seeds)


def gromov_wasserstein_links(
    X: object, Y: object, overlap: int, seeds: np.ndarray | None = None
) -> np.ndarray:
    """Partial Gromov-Wasserstein of the two distance matrices, by POT.

    The objective is not convex and the plan it ends in depends on where it starts: from an even
    plan, which needs no seed, or from one that holds the seeds and is even elsewhere. Cubic in the
    size of the stores: a fraction of a second at 150 objects, some seconds at 600.

    Args:
        X: (n, d_x) vectors.
        Y: (m, d_y) vectors.
        overlap: how many objects are shared, seeds included, which the method has to be told.
        seeds: (s, 2) known pairs to start from, s <= overlap.

    Returns:
        (L, 2) int64 links, L <= n: the largest entry of each row of the plan that keeps more than
        half of its mass. Seeds may be among them.

    Raises:
        ValueError: an overlap that the stores or the seeds do not allow.
    """
    import ot

    X, Y = _unit_rows("X", X), _unit_rows("Y", Y)
    seeds = _seed_pairs(seeds, len(X), len(Y))
    least, most = max(1, len(seeds)), min(len(X), len(Y))
    if not least <= _whole("overlap", overlap, 1) <= most:
        raise ValueError(f"overlap must be in {least}..{most}: got {overlap}")
    C1, C2 = chord_distances(X, X), chord_distances(Y, Y)
    p, q = np.full(len(X), 1 / len(X)), np.full(len(Y), 1 / len(Y))
    # rounding must not push the mass past what a side holds
    unit = min(p[0], q[0])
    mass = min(overlap * unit, p.sum(), q.sum())
    start = None
    if len(seeds):
        open_x, open_y = (
            np.setdiff1d(np.arange(len(Z)), known)
            for Z, known in ((X, seeds[:, 0]), (Y, seeds[:, 1]))
        )
        start = np.zeros((len(X), len(Y)))
        start[np.ix_(open_x, open_y)] = (
            (overlap - len(seeds)) * unit / max(1, len(open_x) * len(open_y))
        )
        start[tuple(seeds.T)] = unit
        start *= 1 - 1e-9
    # POT gives this limit to its inner simplex too, which the default of 1000 stops too early
    plan = ot.gromov.partial_gromov_wasserstein(
        C1 / np.median(C1), C2 / np.median(C2), p, q, m=mass, G0=start, numItermax=100_000
    )
    rows = np.flatnonzero(plan.sum(axis=1) > 0.5 * unit)
    return np.stack([rows, plan[rows].argmax(axis=1)], axis=1)


# --------------------------------------------------------------------------------------------
# Stores from files


class Stores(NamedTuple):
    """Two stores of embeddings from files; ``truth`` is None where it is not known."""

    X: np.ndarray
    Y: np.ndarray
    seeds: np.ndarray
    truth: np.ndarray | None


def load_stores(folder: str | os.PathLike) -> Stores:
    """Two stores from ``folder``: x.npy (n, d_x), y.npy (m, d_y), seeds.npy (s, 2), truth.npy.

    The last may be missing. Vectors are mapped, not read; pickled arrays are refused.

    Raises:
        ValueError: a file is missing, is no plain .npy array or has the wrong shape.
    """
    folder, found = Path(folder), {}
    for name, width in (("x", None), ("y", None), ("seeds", 2), ("truth", 2)):
        file = folder / f"{name}.npy"
        if not file.is_file():
            if name == "truth":
                continue
            raise ValueError(f"folder must hold x.npy, y.npy and seeds.npy: {file.name} is missing")
        try:
            array = np.load(file, mmap_mode=None if width else "r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{file.name} must be a plain .npy array: {error}") from None
        if array.ndim != 2 or width not in (None, array.shape[1]):
            raise ValueError(f"{file.name} must be (n, {width or 'd'}): got shape {array.shape}")
        found[name] = array
    return Stores(found["x"], found["y"], found["seeds"], found.get("truth"))


# --------------------------------------------------------------------------------------------
# Experiments: one run each, from a seed to numbers


class Comparison(NamedTuple):
    """Every method on one problem: links after each round, or once for those without rounds."""

    linker: VectorLinker
    everywhere: VectorLinker
    iterative: list[np.ndarray]
    one_shot: np.ndarray
    procrustes: np.ndarray
    oracle: np.ndarray


def link(problem: Problem, *, seed: int = 0, options: Mapping[str, object] = {}) -> VectorLinker:
    """A fitted `VectorLinker`; silent where the seeds are fewer than ``n_refs``.

    Args:
        problem: what to link.
        seed: draws the views.
        options: of the linker, for example `PERMISSIVE`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewAnchorsWarning)
        linker = VectorLinker(random_state=seed).set_params(**(options or {}))
        return linker.fit(problem.X, problem.Y, problem.seeds)


def compare(problem: Problem, *, seed: int = 0) -> Comparison:
    """The linker at its default values, the same with all anchors in the code, and baselines."""
    X, Y, seeds = problem.X, problem.Y, problem.seeds
    return Comparison(
        link(problem, seed=seed),
        link(problem, seed=seed, options={"local": False}),
        iterative_procrustes(X, Y, seeds),
        one_shot_links(X, Y, seeds),
        procrustes_links(X, Y, seeds),
        procrustes_links(X, Y, problem.truth),
    )


def score(links: np.ndarray, problem: Problem) -> LinkMetrics:
    """Precision, recall and F1 on the pairs that were not given; precision 0 without links."""
    found = link_metrics(links, problem.truth, problem.seeds)
    return found._replace(precision=0.0) if math.isnan(found.precision) else found


def comparison_scores(
    found: Comparison, problem: Problem, *, n_rounds: int = 8
) -> dict[str, float]:
    """Precision (_p), recall (_r) and F1 (_f) of every method, also after each round (_p0, _r0...).

    A method that ended early keeps its last links.
    """
    out = {}
    series = {
        "link": [r.links for r in found.linker.rounds_],
        "all": [r.links for r in found.everywhere.rounds_],
        "iter": found.iterative,
        "once": [found.one_shot],
        "seed": [found.procrustes],
        "oracle": [found.oracle],
    }
    for name, rounds in series.items():
        scores = [score(links, problem) for links in rounds]
        out |= _named(name, scores[-1])
        if len(scores) > 1:
            for t in range(n_rounds):
                at = scores[min(t, len(scores) - 1)]
                out |= {f"{name}_p{t}": at.precision, f"{name}_r{t}": at.recall}
    return out


def _named(name: str, found: LinkMetrics) -> dict[str, float]:
    return {f"{name}_p": found.precision, f"{name}_r": found.recall, f"{name}_f": found.f1}


def vote_calibration(linker: VectorLinker, problem: Problem) -> pd.DataFrame:
    """Of the pairs of the last round by their votes: how many, and how many are right.

    Returns:
        Index ``votes`` 1..V; columns ``pairs``, ``right``.
    """
    chosen, V = linker.rounds_[-1].chosen, linker.n_views
    pairs = np.stack([chosen.i, chosen.j], axis=1)
    partner = np.full(len(problem.X), -1)
    partner[problem.truth[:, 0]] = problem.truth[:, 1]
    right = partner[pairs[:, 0]] == pairs[:, 1]
    table = {
        "pairs": np.bincount(chosen.votes, minlength=V + 1)[1:],
        "right": np.bincount(chosen.votes[right], minlength=V + 1)[1:],
    }
    return pd.DataFrame(table, index=pd.RangeIndex(1, V + 1, name="votes"))


def consistency(encoders: Encoders) -> dict[str, float]:
    """Spearman correlation of δ_X and δ_Y, shortest 2 % and longest 50 % of 60 000 pairs."""
    rho = local_consistency(encoders.X, encoders.Y).spearman
    return {"short": rho.iloc[0], "long": rho.iloc[-1]}


def kernel_study(*, overlap: int, warp: float, seed: int) -> dict[str, float]:
    """Kernel encoders, 600 + 600 objects, 20 seeds: every method, and the votes' calibration.

    Also the linker without thresholds ("bare") and Gromov-Wasserstein from the seeds ("gw").
    """
    encoders = kernel_encoders(warp=warp, seed=seed)
    problem = make_problem(encoders, overlap=overlap, seed=seed)
    found = compare(problem, seed=seed)
    out = consistency(encoders) | comparison_scores(found, problem)
    bare = link(problem, seed=seed, options={"q_min": 1e-9, "accept": 1e-9})
    out |= _named("bare", score(bare.links_, problem))
    transport = gromov_wasserstein_links(problem.X, problem.Y, overlap, problem.seeds)
    out |= _named("gw", score(transport, problem))
    table = vote_calibration(found.linker, problem)
    for votes, row in table.iterrows():
        out |= {f"pairs{votes}": row["pairs"], f"right{votes}": row["right"]}
    return out


def trained_study(*, seed: int, encoders: Encoders | None = None) -> dict[str, float]:
    """Trained encoders, from the shipped weights: the linker at permissive values, and baselines.

    Args:
        seed: of the stores and, without ``encoders``, of the weights.
        encoders: other ones.
    """
    encoders = load_trained(seed) if encoders is None else encoders
    problem = make_problem(encoders, seed=seed)
    X, Y, seeds = problem.X, problem.Y, problem.seeds
    n_rounds, growth = PERMISSIVE["n_rounds"], PERMISSIVE["growth"]
    permissive = link(problem, seed=seed, options=PERMISSIVE)
    found = {
        "link": permissive.links_,
        "first": permissive.rounds_[0].links,
        "default": link(problem, seed=seed).links_,
        "all": link(problem, seed=seed, options={"local": False}).links_,
        "iter": iterative_procrustes(X, Y, seeds, n_rounds=n_rounds, growth=growth)[-1],
        "once": one_shot_links(X, Y, seeds),
        "seed": procrustes_links(X, Y, seeds),
        "oracle": procrustes_links(X, Y, problem.truth),
        "gw": gromov_wasserstein_links(X, Y, len(problem.truth), seeds),
    }
    out = consistency(encoders)
    for name, links in found.items():
        out |= _named(name, score(links, problem))
    return out


def digits_study(*, seed: int) -> dict[str, float]:
    """The negative control: contrastive encoders of digits, 30 seeds."""
    encoders = digits_encoders(seed)
    problem = make_problem(encoders, n_seeds=30, seed=seed)
    found = {
        "link": link(problem, seed=seed).links_,
        "permissive": link(problem, seed=seed, options=PERMISSIVE).links_,
        "iter": iterative_procrustes(problem.X, problem.Y, problem.seeds)[-1],
        "oracle": procrustes_links(problem.X, problem.Y, problem.truth),
    }
    out = consistency(encoders)
    for name, links in found.items():
        out |= _named(name, score(links, problem))
    return out


def budget_study(*, n_seeds: int, overlap: int, seed: int) -> dict[str, float]:
    """The linker at one budget of seeds and one overlap."""
    encoders = kernel_encoders(1100, seed=seed)  # so that stores of 600 may share 100 alone
    problem = make_problem(encoders, overlap=overlap, n_seeds=n_seeds, seed=seed)
    return _named("link", score(link(problem, seed=seed).links_, problem))


def more_study(*, seed: int) -> dict[str, float]:
    """The linker alone on further kernel encoders: how often does the bootstrap stall?"""
    problem = make_problem(kernel_encoders(seed=seed), seed=seed)
    return _named("link", score(link(problem, seed=seed).links_, problem))


def redraw_study(*, seed: int) -> dict[str, float]:
    """The linker, permissive, on further draws of stores and seeds from the trained encoders."""
    problem = make_problem(load_trained(TRAINED_SEEDS[seed % 3]), seed=seed)
    return _named("link", score(link(problem, seed=seed, options=PERMISSIVE).links_, problem))


def no_overlap_study(*, seed: int) -> dict[str, float]:
    """Two stores without a common object, seeds from outside: how many links are put out."""
    encoders = kernel_encoders(1220, seed=seed)
    problem = make_problem(encoders, overlap=0, n_seeds=0, seed=seed)
    linker = VectorLinker(random_state=seed)
    linker.fit(problem.X, problem.Y, seed_vectors=(problem.outside_x, problem.outside_y))
    return {"links": len(linker.links_)}


def study_run(*, run: str) -> dict[str, float]:
    """One row of the shipped results, by its name in `RUNS`."""
    kind, *numbers = run.split("/")
    *middle, seed = map(int, numbers)
    if kind == "kernel":
        return kernel_study(overlap=middle[0], warp=middle[1] / 10, seed=seed)
    if kind == "trained":
        return trained_study(seed=seed)
    if kind == "digits":
        return digits_study(seed=seed)
    if kind == "budget":
        return budget_study(n_seeds=middle[0], overlap=middle[1], seed=seed)
    if kind == "more":
        return more_study(seed=seed)
    if kind == "redraw":
        return redraw_study(seed=seed)
    if kind == "none":
        return no_overlap_study(seed=seed)
    raise ValueError(f"run must be one of RUNS: got {run!r}")


RUNS = (
    *(f"kernel/400/0/{seed}" for seed in range(10)),
    *(f"kernel/200/0/{seed}" for seed in range(6)),
    *(f"kernel/400/3/{seed}" for seed in range(4)),
    *(f"trained/{seed}" for seed in TRAINED_SEEDS),
    *(f"digits/{seed}" for seed in range(3)),
    *(f"none/{seed}" for seed in range(4)),
    *(f"more/{seed}" for seed in range(10, 40)),
    *(f"redraw/{seed}" for seed in range(10, 40)),
    *(
        f"budget/{n_seeds}/{overlap}/{seed}"
        for n_seeds in (5, 10, 20, 30, 40)
        for overlap in (100, 200, 300, 400, 500)
        for seed in range(3)
    ),
)
"""kernel/overlap/ten times the warp/seed, trained/seed, digits/seed, none/seed, more/seed,
redraw/seed, budget/seeds/overlap/seed."""

SHIPPED = (study_run, {"run": RUNS})


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_beta_lower(fn: Callable) -> None:
    """Exercise 1: ``fn(h, T, q)`` is the q-quantile of Beta(1 + h, 1 + T − h).

    Raises:
        AssertionError: with the first case that differs, and what was expected.
    """
    from scipy.stats import beta

    rng = np.random.default_rng(0)
    cases = [(16, 16, 0.1), (8, 16, 0.1), (0, 16, 0.1)]
    for _ in range(20):
        T = int(rng.integers(1, 60))
        cases.append((int(rng.integers(T + 1)), T, float(rng.uniform(0.02, 0.6))))
    for h, T, q in cases:
        expected, got = float(beta(1 + h, 1 + T - h).ppf(q)), float(fn(h, T, q))
        assert abs(got - expected) <= 1e-10, (
            f"{h} of {T} votes: the {q:.3f}-quantile of Beta({1 + h}, {1 + T - h}) is "
            f"{expected:.12f}, got {got:.12f}"
        )


def check_code_cost(fn: Callable) -> None:
    """Exercise 2: ``fn(DX, DY, r, scale)`` is the (n, m) directed code cost, without loops over
    pairs.

    Compared with the sum written out, to 1e-5, on random problems.

    Raises:
        AssertionError: with the entry that differs.
    """
    rng = np.random.default_rng(1)
    for case in range(6):
        n, m, p = (int(v) for v in rng.integers(4, 14, size=3))
        r, scale = int(rng.integers(1, p + 1)), float(rng.uniform(0.4, 2.5))
        DX, DY = rng.uniform(0.05, 1.4, (n, p)), rng.uniform(0.05, 1.4, (m, p))
        DX[0, 0] = 0.0  # an anchor of its own: the weight stops at 1/0.01
        expected = np.zeros((n, m))
        for i in range(n):
            for l in np.argsort(DX[i])[:r]:
                weight = 1 / max(DX[i, l], FLOOR)
                expected[i] += weight * (DX[i, l] - scale * DY[:, l]) ** 2
        got = np.asarray(fn(DX.copy(), DY.copy(), r, scale))
        assert got.shape == (n, m), f"case {case}: the shape must be {(n, m)}, got {got.shape}"
        error = np.abs(got - expected) / (1 + expected)
        i, j = np.unravel_index(error.argmax(), error.shape)
        assert error.max() <= 1e-5, (
            f"case {case} (r={r}, κ={scale:.3f}): D[{i}, {j}] must be {expected[i, j]:.6f}, got "
            f"{got[i, j]:.6f}: the sum runs over the r anchors nearest to point i of X alone"
        )


def _random_anchors(rng: np.random.Generator, p: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances among p random anchors in two unrelated spaces."""
    A, B = rng.normal(size=(p, 5)), rng.normal(size=(p, 7))
    return tuple(np.linalg.norm(Z[:, None] - Z[None], axis=2) for Z in (A, B))


def check_scale(fn: Callable) -> None:
    """Exercise 3: ``fn(AX, AY, r)`` is the median ratio of distances between nearby anchors.

    Exactly 3 for anchors that Y holds rotated and a third as far apart, exactly inverse when the
    stores change places, and the value of `estimate_scale` on random anchors.

    Raises:
        AssertionError: with what was expected.
    """
    rng = np.random.default_rng(2)
    for _ in range(5):
        A = rng.normal(size=(25, 6))
        Q = np.linalg.qr(rng.normal(size=(6, 6)))[0]
        AX, AY = (np.linalg.norm(Z[:, None] - Z[None], axis=2) for Z in (A, A @ Q / 3))
        got = float(fn(AX, AY, 4))
        assert abs(got - 3) <= 1e-12, f"a copy at a third of the size has κ = 3, got {got!r}"
        AX, AY = _random_anchors(rng, 25)
        forth, back = float(fn(AX, AY, 4)), float(fn(AY, AX, 4))
        assert abs(forth * back - 1) <= 1e-12, (
            f"exchanging the stores must give 1/κ: {forth:.9f} · {back:.9f} = {forth * back:.12f}; "
            "take logarithms before the median, and pairs that are near in X OR in Y"
        )
        expected = estimate_scale(AX, AY, 4)
        assert abs(forth / expected - 1) <= 1e-12, (
            f"over unordered pairs of which one is among the 4 nearest of the other the median is "
            f"{expected:.9f}, got {forth:.9f}"
        )


def check_one_round(fn: Callable) -> None:
    """Exercise 4: ``fn(X, Y, seeds, n_views, rng)`` is the (n, m) matrix of votes of one round.

    Of the pairs with posterior mean above 0.8, at least 60 % must be right; and the same generator
    must give the transposed matrix when the stores change places.

    Raises:
        AssertionError: with what was seen.
    """
    for seed in (1, 5):
        problem = make_problem(kernel_encoders(400, 12, seed=seed), n=240, overlap=160, seed=seed)
        X, Y, seeds = problem.X, problem.Y, problem.seeds
        votes = np.asarray(fn(X, Y, seeds, 16, np.random.default_rng(seed)))
        assert votes.shape == (240, 240), f"votes must be (240, 240), got {votes.shape}"
        assert votes.min() >= 0, "a vote is counted, not weighed"
        assert votes.max() <= 16, "a pair gets at most one vote a view, 16 in all"
        links = np.argwhere((1 + votes) / 18 > 0.8)
        found = link_metrics(links, problem.truth, seeds)
        assert found.recall >= 0.05, (
            f"the confident pairs hold {found.recall:.0%} of the true ones; some must be found"
        )
        assert found.precision >= 0.6, (
            f"of the pairs with posterior mean above 0.8 only {found.precision:.0%} are right, at "
            "least 60 % are expected"
        )
        other = np.asarray(fn(Y, X, seeds[:, ::-1], 16, np.random.default_rng(seed)))
        assert np.array_equal(other, votes.T), (
            "with the stores exchanged the votes must be exactly transposed: use κ one way and 1/κ "
            "the other, and draw the views alike"
        )


def check_outside_seeds(fn: Callable) -> None:
    """Exercise 5: ``fn(X, Y, seed_x, seed_y)`` links two stores from references in neither.

    Raises:
        AssertionError: links out of range or not one-to-one, or F1 below 0.5.
    """
    for seed in (0, 1):
        problem = make_problem(kernel_encoders(seed=seed), seed=seed)
        outside = problem.outside_x[:20].copy(), problem.outside_y[:20].copy()
        links = np.asarray(fn(problem.X.copy(), problem.Y.copy(), *outside))
        assert links.ndim == 2, f"links must be (L, 2), got shape {links.shape}"
        assert links.shape[1] == 2, f"links must be (L, 2), got shape {links.shape}"
        for column, side in enumerate("XY"):
            assert len(np.unique(links[:, column])) == len(links), (
                f"a row of {side} is linked twice"
            )
        found = link_metrics(links, problem.truth)
        assert found.f1 >= 0.5, f"F1 must be at least 0.5, got {found.f1:.2f}"
