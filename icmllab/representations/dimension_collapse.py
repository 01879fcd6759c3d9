r"""Provable Accuracy Collapse in Embedding-Based Representations under Dimensionality Mismatch.

arXiv 2605.03346. A triplet (i, j, k) says that point i is nearer to j than to k. Triplets that a
D-dimensional embedding satisfies all at once may leave every embedding of dimension d << D close
to the one half that random reals on a line get. The chapter separates four things that are easy to
confuse: worst-case from typical instances, the best embedding from what gradient descent finds,
what exists from what can be computed, order from distance.

We worked from the abstract. The shattered instances, the covering bound and the exact optimum on
a line, the constants of the counting bound, the reduction from Maximum Acyclic Subgraph, and all
experiments are this book's reconstruction. Loss and accuracy of triplets live in
`icmllab.toolbox.contrastive`.
"""

import itertools
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from icmllab.kernels.triplet_loss import incidences, triplet_loss_fwd_bwd
from icmllab.toolbox.contrastive import (
    check_triplets,
    triplet_accuracy,
    triplet_distances,
    triplet_loss,
)

__all__ = [
    "SHIPPED",
    "Acyclic",
    "Hyperplanes",
    "LineOptimum",
    "SignFit",
    "TripletFit",
    "TripletInstance",
    "accuracy_upper_bound",
    "best_found",
    "block_majority",
    "cell_bound",
    "cell_count",
    "check_cell_count",
    "check_cube_optimum",
    "check_single_anchor",
    "check_smallest_dimension",
    "check_two_axes",
    "check_witness",
    "collapse_fraction",
    "conditional_expectation_line",
    "count_cells",
    "covering_bound",
    "cube_instance",
    "cube_optimum_1d",
    "dimension_run",
    "embedding_to_signs",
    "fit_signs",
    "fit_triplets",
    "gaussian_instance",
    "line_from_order",
    "match_and_guess",
    "max_acyclic",
    "one_dim_milp",
    "order_search",
    "planted_line",
    "random_line",
    "random_tournament",
    "random_triplets",
    "relabel",
    "relative_margin",
    "shattered_instance",
    "sign_accuracy",
    "signs_to_embedding",
    "single_anchor_instance",
    "threshold_accuracy",
    "threshold_embedding",
    "triplet_accuracy",
    "triplet_loss",
    "truncate",
    "warren_bound",
    "witness_embedding",
]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number >= 1: got {value}")


def _sign_matrix(S: object) -> torch.Tensor:
    S = torch.as_tensor(S)
    if S.ndim != 2 or 0 in S.shape:
        raise ValueError(f"S must have shape (N, D) with N, D >= 1: got {tuple(S.shape)}")
    S = S.double()
    if not bool((S.abs() == 1).all()):
        raise ValueError("S must hold the signs -1 and +1 alone: got other entries")
    return S


# --------------------------------------------------------------------------------------------
# Instances


class TripletInstance(NamedTuple):
    """Triplets over n points, and what is known about them.

    Attributes:
        n_points: n.
        triplets: (m, 3) int64, rows (i, j, k): i nearer to j than to k.
        signs: (N, D) float64 sign matrix of a shattered instance; points are N anchors, then
            u_1..u_D, then v_1..v_D, and triplet i·D + l belongs to anchor i and pair l.
        witness: (n, D) float64 embedding from which the labels come.
        heldout: (m, 3) int64, further triplets of the same points, for generalisation.
    """

    n_points: int
    triplets: torch.Tensor
    signs: torch.Tensor | None = None
    witness: torch.Tensor | None = None
    heldout: torch.Tensor | None = None


def witness_embedding(S: object, *, d: int | None = None, eta: float | None = None) -> torch.Tensor:
    """A D-dimensional embedding that satisfies every triplet of H(S), whatever the signs are.

    u_l = e_l, v_l = -e_l, anchor i at η S_i: |x - e_l|² - |x + e_l|² = -4 x_l, so the sign of
    coordinate l decides.

    Args:
        S: (N, D) signs.
        d: dimension of the result, at least D (the default); further columns are 0.
        eta: η > 0; by default 1/√D, which puts every point on the unit sphere.

    Returns:
        (N+2D, d) float64.

    Raises:
        ValueError: entries other than ±1, d < D, η that is not positive and finite.
    """
    S = _sign_matrix(S)
    D = S.shape[1]
    d = D if d is None else d
    eta = D**-0.5 if eta is None else eta
    if d < D:
        raise ValueError(f"d must be at least D={D}: got {d}")
    if not 0 < eta < math.inf:
        raise ValueError(f"eta must be > 0 and finite: got {eta}")
    eye = torch.eye(D, dtype=torch.float64)
    return torch.nn.functional.pad(torch.cat([eta * S, eye, -eye]), (0, d - D))


def _shattered(S: torch.Tensor, eta: float | None) -> TripletInstance:
    N, D = S.shape
    anchor = torch.arange(N).repeat_interleave(D)
    u = N + torch.arange(D).repeat(N)
    positive = S.flatten() > 0
    near, far = torch.where(positive, u, u + D), torch.where(positive, u + D, u)
    triplets = torch.stack([anchor, near, far], dim=1)
    return TripletInstance(N + 2 * D, triplets, S, witness_embedding(S, eta=eta))


def shattered_instance(
    N: int, D: int, generator: torch.Generator | None = None, *, eta: float | None = None
) -> TripletInstance:
    """H(N, D): N anchors, D reference pairs, and a fair coin for each of the ND comparisons.

    All 2^(ND) outcomes have a D-dimensional witness: the ND pairs are shattered.

    Args:
        N: anchors.
        D: reference pairs, and the dimension of the witness.
        generator: randomness; None is seeded with 0.
        eta: of the witness, see `witness_embedding`.

    Raises:
        ValueError: a size below 1, or a bad ``eta``.
    """
    _check_sizes(N=N, D=D)
    coins = torch.randint(0, 2, (N, D), generator=generator or _generator(0))
    return _shattered(2.0 * coins.double() - 1, eta)


def cube_instance(D: int, *, eta: float | None = None) -> TripletInstance:
    """H*(D): one anchor for each of the 2^D sign vectors.

    Args:
        D: reference pairs, 1..16.
        eta: of the witness, see `witness_embedding`.

    Raises:
        ValueError: D outside 1..16: a cube of dimension 17 has over two million triplets.
    """
    _check_sizes(D=D)
    if D > 16:
        raise ValueError(f"D must be at most 16: got {D}")
    bits = torch.arange(2**D)[:, None] >> torch.arange(D) & 1
    return _shattered(2.0 * bits.double() - 1, eta)


def random_triplets(n: int, m: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """m triplets of three different points each, uniform: (m, 3) int64.

    Raises:
        ValueError: m < 1 or n < 3.
    """
    _check_sizes(n=n, m=m)
    if n < 3:
        raise ValueError(f"n must be at least 3: got {n}")
    generator = generator or _generator(0)
    i = torch.randint(0, n, (m,), generator=generator)
    j = torch.randint(1, n, (m,), generator=generator)  # steps round a circle from i
    k = torch.randint(1, n - 1, (m,), generator=generator)
    k += k >= j  # leaves out the step that j took
    return torch.stack([i, (i + j) % n, (i + k) % n], dim=1)


def relabel(triplets: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """The triplets with near and far as they are in the embedding P; exact ties stay as given."""
    near, far = triplet_distances(P, triplets)
    return torch.where((far < near)[:, None], triplets[:, [0, 2, 1]], triplets)


def gaussian_instance(
    n: int, D: int, m: int, generator: torch.Generator | None = None
) -> TripletInstance:
    """G(n, D, m): a typical instance: points from N(0, I_D), random triplets, true labels.

    Returns:
        m triplets and m held-out ones, with the points as ``witness``.

    Raises:
        ValueError: D or m below 1, or n below 3.
    """
    _check_sizes(D=D)
    generator = generator or _generator(0)
    both = random_triplets(n, 2 * m, generator)
    P = torch.randn(n, D, generator=generator, dtype=torch.float64)
    both = relabel(both, P)
    return TripletInstance(n, both[:m], None, P, both[m:])


def planted_line(
    n: int, m: int, flip: float, generator: torch.Generator | None = None
) -> TripletInstance:
    """Triplets of n points on a line, a random share of them turned over.

    Args:
        n: points, uniform on [0, 1], at least 3.
        m: triplets.
        flip: share that is turned over, in [0, 1/2); round(flip·m) of them.
        generator: randomness; None is seeded with 0.

    Returns:
        The noisy triplets; ``relabel(triplets, witness)`` are the clean ones.

    Raises:
        ValueError: sizes or a share that do not fit.
    """
    if not 0 <= flip < 0.5:
        raise ValueError(f"flip must be in [0, 1/2): got {flip}")
    generator = generator or _generator(0)
    triplets = random_triplets(n, m, generator)
    P = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    triplets = relabel(triplets, P)
    wrong = torch.randperm(m, generator=generator)[: round(flip * m)]
    triplets[wrong] = triplets[wrong][:, [0, 2, 1]]
    return TripletInstance(n, triplets, None, P)


def _check_arcs(arcs: object, n: int) -> torch.Tensor:
    _check_sizes(n=n)
    arcs = torch.as_tensor(arcs)
    if arcs.ndim != 2 or arcs.shape[1] != 2 or len(arcs) == 0 or arcs.is_floating_point():
        raise ValueError(
            f"arcs must be a (q, 2) tensor of whole numbers with q >= 1: got {tuple(arcs.shape)} "
            f"{arcs.dtype}"
        )
    arcs = arcs.long()
    low, high = (int(v) for v in arcs.aminmax())
    if low < 0 or high >= n:
        raise ValueError(f"arcs must join vertices 0..{n - 1}: got {low if low < 0 else high}")
    if bool((arcs[:, 0] == arcs[:, 1]).any()):
        raise ValueError("arcs must join two different vertices: got a loop")
    return arcs


def random_tournament(n: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Each pair of n vertices joined by one arc of random direction: (n(n-1)/2, 2) int64."""
    _check_sizes(n=n)
    if n < 2:
        raise ValueError(f"n must be at least 2: got {n}")
    pairs = torch.combinations(torch.arange(n))
    coins = torch.randint(0, 2, (len(pairs), 1), generator=generator or _generator(0))
    return torch.where(coins == 1, pairs, pairs.flip(1))


def single_anchor_instance(arcs: object, n: int) -> TripletInstance:
    """A digraph as triplets: vertices 0..n-1, one anchor n, arc j → k becomes (n, j, k).

    Only the order of the distances to the anchor matters, and points on a line realise every
    order: the best accuracy is the largest acyclic share of the arcs, in one dimension and in any.

    Args:
        arcs: (q, 2) whole numbers, q >= 1, without loops.
        n: vertices.

    Raises:
        ValueError: no arc, a loop, or a vertex outside 0..n-1.
    """
    arcs = _check_arcs(arcs, n)
    anchor = torch.full((len(arcs), 1), n)
    return TripletInstance(n + 1, torch.cat([anchor, arcs], dim=1))


# --------------------------------------------------------------------------------------------
# Triplets on H(S) are signs of hyperplanes


class Hyperplanes(NamedTuple):
    """Points and oriented hyperplanes: X (N, d), W (D, d), b (D,)."""

    X: torch.Tensor
    W: torch.Tensor
    b: torch.Tensor


def embedding_to_signs(P: torch.Tensor, N: int, D: int) -> Hyperplanes:
    """The bisectors of the reference pairs: w_l = 2(u_l - v_l), b_l = |v_l|² - |u_l|².

    Anchor i is nearer to u_l than to v_l exactly when ⟨x_i, w_l⟩ + b_l > 0.

    Args:
        P: (N+2D, d) points, in the order of `TripletInstance`.
        N: anchors.
        D: pairs.

    Raises:
        ValueError: P has another number of rows.
    """
    _check_sizes(N=N, D=D)
    P = torch.as_tensor(P)
    if P.ndim != 2 or len(P) != N + 2 * D:
        raise ValueError(f"P must have N+2D={N + 2 * D} rows: got shape {tuple(P.shape)}")
    X, u, v = P[:N], P[N : N + D], P[N + D :]
    return Hyperplanes(X, 2 * (u - v), v.square().sum(dim=1) - u.square().sum(dim=1))


def signs_to_embedding(X: torch.Tensor, W: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The other direction: reference pairs whose bisectors are the given hyperplanes.

    u_l = m_l + w_l/4 and v_l = m_l - w_l/4 with m_l = -b_l w_l/|w_l|². A zero w_l is first
    replaced by t e_1 with t = |b_l|/(2 max|x_i| + 1), too short to change a sign.

    Args:
        X: (N, d) anchors.
        W: (D, d) normals.
        b: (D,) offsets.

    Returns:
        (N+2D, d) points, in the order of `TripletInstance`.

    Raises:
        ValueError: shapes that do not fit.
    """
    X, W, b = (torch.as_tensor(t) for t in (X, W, b))
    if X.ndim != 2 or W.ndim != 2 or X.shape[1] != W.shape[1] or b.shape != W.shape[:1]:
        raise ValueError(
            "X, W, b must have shapes (N, d), (D, d), (D,): got "
            f"{tuple(X.shape)}, {tuple(W.shape)}, {tuple(b.shape)}"
        )
    W = W.clone()
    zero = (W == 0).all(dim=1)
    W[zero, 0] = b[zero].abs() / (2 * X.norm(dim=1).max() + 1)
    square = W.square().sum(dim=1)
    # both w and b zero: u = v, a tie for every anchor, as the signs say
    middle = -(b / square.where(square > 0, 1))[:, None] * W
    return torch.cat([X, middle + W / 4, middle - W / 4])


def sign_accuracy(X: torch.Tensor, W: torch.Tensor, b: torch.Tensor, S: torch.Tensor) -> float:
    """Share of entries in which sign(X Wᵀ + 1 bᵀ) agrees with S; a zero counts one half."""
    Z = (X @ W.T + b) * S
    return (int((Z > 0).sum()) + 0.5 * int((Z == 0).sum())) / Z.numel()


# --------------------------------------------------------------------------------------------
# Bounds


def cell_count(D: int, d: int) -> int:
    """C(D, d) = Σ_{k≤d} binom(D, k): into how many cells D hyperplanes cut R^d at most."""
    _check_sizes(D=D, d=d)
    return sum(math.comb(D, k) for k in range(min(d, D) + 1))


def count_cells(W: torch.Tensor, b: torch.Tensor) -> int:
    """The cells of an arrangement in general position, counted one by one.

    With D >= d every cell has a corner, where d hyperplanes meet: around it the signs of those d
    take all 2^d values, and the other signs are fixed.

    Args:
        W: (D, d) normals.
        b: (D,) offsets; D <= 20 and d <= D.

    Raises:
        ValueError: shapes that do not fit.
    """
    D, d = W.shape
    if b.shape != (D,) or not d <= D <= 20:
        raise ValueError(
            f"W, b must have shapes (D, d), (D,) with d <= D <= 20: got {tuple(W.shape)}, "
            f"{tuple(b.shape)}"
        )
    W, b = W.double(), b.double()
    weights = 2 ** torch.arange(D)
    found = []
    for corner in itertools.combinations(range(D), d):
        at = torch.linalg.solve(W[list(corner)], -b[list(corner)])
        signs = (W @ at + b > 0).long()
        signs[list(corner)] = 0
        around = torch.cartesian_prod(*[torch.tensor([0, 1])] * d).reshape(-1, d)
        found.append(signs @ weights + around @ weights[list(corner)])
    return len(torch.cat(found).unique())


def covering_bound(D: int, d: int) -> float:
    """No d-dimensional embedding of H*(D) has a higher accuracy than this.

    The D bisectors cut R^d into at most M = C(D, d) cells, so that the 2^D anchors get at most M
    different answers. At most M binom(D, r) anchors lie at Hamming distance r from one of them:
    fill the distances from 0 on until all anchors are used. Integers throughout.

    Args:
        D: reference pairs.
        d: dimension.
    """
    M, left, errors = cell_count(D, d), 2**D, 0
    for r in range(D + 1):
        here = min(left, M * math.comb(D, r))
        errors += r * here
        left -= here
        if not left:
            break
    return float(1 - Fraction(errors, 2**D * D))


def cell_bound(D: int, d: int) -> float:
    """1/2 + √(ln C(D, d)/(2D)), at most 1: weaker than `covering_bound`, in closed form."""
    return min(1.0, 0.5 + math.sqrt(math.log(cell_count(D, d)) / (2 * D)))


def _mean_positive_part(n: int, shift: int) -> Fraction:
    """E (S_n - shift)⁺ of a walk of n fair ±1 steps."""
    total = sum(math.comb(n, k) * max(0, 2 * k - n - shift) for k in range(n + 1))
    return Fraction(total, 2**n)


def cube_optimum_1d(D: int) -> float:
    """acc*₁(D) = 1/2 + E[max_{0≤k≤D} S_k]/D: the best accuracy on H*(D) in one dimension.

    Sweeping along the line past threshold l turns answer l over once, so that the best place of
    an anchor is where a walk of its D signs is highest. E[max] = E[S_D⁺] + E[(S_D - 1)⁺].

    Args:
        D: reference pairs.
    """
    _check_sizes(D=D)
    highest = _mean_positive_part(D, 0) + _mean_positive_part(D, 1)
    return float(Fraction(1, 2) + highest / D)


def _blocks(D: int, d: int) -> list[range]:
    """Columns 0..D-1 in d contiguous blocks, sizes ⌊(k+1)D/d⌋ - ⌊kD/d⌋."""
    return [range(k * D // d, (k + 1) * D // d) for k in range(d)]


def threshold_accuracy(D: int, d: int) -> float:
    """Σ_k B_k acc*₁(B_k)/D: accuracy of `threshold_embedding` on H*(D), and its mean on H(N, D).

    About 1/2 + √(2d/(πD)) - d/(2D); exactly 1 from d = D on.

    Args:
        D: reference pairs.
        d: dimension.
    """
    _check_sizes(D=D, d=d)
    sizes = [len(block) for block in _blocks(D, d) if block]
    return sum(B * cube_optimum_1d(B) for B in sizes) / D


def match_and_guess(D: int, d: int) -> float:
    """(1 + d/D)/2: d pairs answered, a coin for each of the others."""
    _check_sizes(D=D, d=d)
    return (1 + min(1.0, d / D)) / 2


def warren_bound(N: int, D: int, d: int) -> float:
    """ln P: sign patterns that d-dimensional embeddings of H(N, D) can make, by Warren's theorem.

    ND polynomials of degree 2 in V = Nd + D(d+1) parameters have at most (8e·ND/V)^V sign
    patterns for ND >= V; there are never more than 2^(ND).

    Args:
        N: anchors.
        D: reference pairs.
        d: dimension.
    """
    _check_sizes(N=N, D=D, d=d)
    V, every = N * d + D * (d + 1), N * D * math.log(2)
    if N * D < V:
        return every
    return min(every, V * math.log(8 * math.e * N * D / V))


def accuracy_upper_bound(N: int, D: int, d: int, delta: float = 0.05) -> float:
    """With probability 1-δ over H(N, D), no d-dimensional embedding has a higher accuracy.

    1/2 + √((ln P + ln 1/δ)/(2ND)), at most 1: Hoeffding for one sign pattern, a union bound over
    the P of `warren_bound`.

    Args:
        N: anchors.
        D: reference pairs.
        d: dimension.
        delta: δ in (0, 1).
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1): got {delta}")
    return min(1.0, 0.5 + math.sqrt((warren_bound(N, D, d) - math.log(delta)) / (2 * N * D)))


def _entropy(p: float) -> float:
    """Binary entropy in bits."""
    return 0.0 if p in (0.0, 1.0) else -(p * math.log2(p) + (1 - p) * math.log2(1 - p))


def collapse_fraction(eps: float, kind: str = "warren") -> float:
    """The c up to which dimension cD leaves at most 1/2 + ε, in the limit of large D.

    Args:
        eps: ε in (0, 1/2).
        kind: "cube" for H*(D): h(c) = 1 - h(1/2+ε), h the binary entropy; "warren" for H(N, D)
            with N >> D: c ln(8e/c) = 2ε², on the branch c < 1/e.

    Raises:
        ValueError: ε outside (0, 1/2), or an unknown kind.
    """
    from scipy.optimize import brentq

    if not 0 < eps < 0.5:
        raise ValueError(f"eps must be in (0, 1/2): got {eps}")
    if kind == "cube":
        room = 1 - _entropy(0.5 + eps)
        return brentq(lambda c: _entropy(c) - room, 0.0, 0.5, xtol=1e-15, rtol=1e-12)
    if kind == "warren":

        def excess(c: float) -> float:
            return c * math.log(8 * math.e / c) - 2 * eps**2

        return brentq(excess, 1e-300, 1 / math.e, xtol=1e-15, rtol=1e-12)
    raise ValueError(f"kind must be 'warren' or 'cube': got {kind!r}")


# --------------------------------------------------------------------------------------------
# Solvers for sign matrices


class SignFit(NamedTuple):
    """Points and hyperplanes with their accuracy on S: X (N, d), W (D, d), b (D,) float64."""

    X: torch.Tensor
    W: torch.Tensor
    b: torch.Tensor
    accuracy: float


def threshold_embedding(S: object, d: int) -> SignFit:
    """The construction for any S: d axes, each with the thresholds of one block of columns.

    On axis k the B columns of block k have thresholds 1/2, 3/2, …, and an anchor stands at the
    j in 0..B that maximises Σ_{l<j} s_l - Σ_{l≥j} s_l. Coordinates are centred by B/2.

    Args:
        S: (N, D) signs.
        d: dimension; beyond D the further axes stay empty.

    Returns:
        A fit whose expected accuracy on random signs is `threshold_accuracy`.
    """
    S = _sign_matrix(S)
    _check_sizes(d=d)
    (N, D) = S.shape
    X, W, b = S.new_zeros(N, d), S.new_zeros(D, d), S.new_zeros(D)
    for axis, block in enumerate(_blocks(D, d)):
        B = len(block)
        if not B:
            continue
        columns = slice(block.start, block.stop)
        walk = S.new_zeros(N, B + 1)
        walk[:, 1:] = S[:, columns].cumsum(dim=1)
        X[:, axis] = walk.argmax(dim=1) - B / 2
        W[columns, axis] = 1
        b[columns] = B / 2 - 0.5 - torch.arange(B, dtype=S.dtype)
    return SignFit(X, W, b, sign_accuracy(X, W, b, S))


def _descend(S: torch.Tensor, start: Hyperplanes, steps: int, lr: float) -> SignFit:
    """Adam on mean softplus(-S∘(XWᵀ + 1bᵀ)), full batch; the best iterate, the start included."""
    parts = [t.clone() for t in start]
    optimizer = torch.optim.Adam(parts, lr=lr)
    best = SignFit(*start, sign_accuracy(*start, S))
    for _ in range(steps):
        X, W, b = parts
        # d softplus(-s z)/dz = -s sigmoid(-s z)
        G = -S * torch.sigmoid(-S * (X @ W.T + b)) / S.numel()
        X.grad, W.grad, b.grad = G @ W, G.T @ X, G.sum(dim=0)
        optimizer.step()
        accuracy = sign_accuracy(*parts, S)
        if accuracy > best.accuracy:
            best = SignFit(*(t.clone() for t in parts), accuracy)
    return best


def _sign_start(S: torch.Tensor, d: int, init: str, generator: torch.Generator) -> Hyperplanes:
    N, D = S.shape
    if init == "random":
        X, W = (torch.randn(n, d, generator=generator, dtype=S.dtype) for n in (N, D))
        return Hyperplanes(X, W, S.new_zeros(D))
    if init == "svd":
        U, s, Vh = torch.linalg.svd(S, full_matrices=False)
        keep = min(d, len(s))
        root = s[:keep].sqrt()
        pad = (0, d - keep)
        X = torch.nn.functional.pad(U[:, :keep] * root, pad)
        W = torch.nn.functional.pad(Vh[:keep].T * root, pad)
        return Hyperplanes(X, W, S.new_zeros(D))
    return Hyperplanes(*threshold_embedding(S, d)[:3])


def fit_signs(
    S: object,
    d: int,
    *,
    init: str = "best",
    steps: int = 300,
    lr: float = 0.05,
    generator: torch.Generator | None = None,
) -> SignFit:
    """Gradient descent for sign(X Wᵀ + 1 bᵀ) = S: an embedding of H(S), by the sign-rank identity.

    Args:
        S: (N, D) signs.
        d: dimension.
        init: "random" for N(0, 1), "svd" for (U√s, V√s), "threshold" for `threshold_embedding`,
            "best" for the best result of the three.
        steps: of Adam, full batch, >= 0.
        lr: its rate, > 0.
        generator: of the random start; None is seeded with 0.

    Returns:
        The iterate of highest accuracy, the start included.

    Raises:
        ValueError: arguments that do not fit.
    """
    S = _sign_matrix(S)
    _check_sizes(d=d)
    _check_descent(steps, lr)
    names = ("random", "svd", "threshold")
    if init not in (*names, "best"):
        raise ValueError(f"init must be one of {', '.join(names)}, best: got {init!r}")
    generator = generator or _generator(0)
    fits = [
        _descend(S, _sign_start(S, d, name, generator), steps, lr)
        for name in (names if init == "best" else (init,))
    ]
    return max(fits, key=lambda fit: fit.accuracy)


def _check_descent(steps: int, lr: float) -> None:
    if steps != int(steps) or steps < 0:
        raise ValueError(f"steps must be a whole number >= 0: got {steps}")
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be > 0 and finite: got {lr}")


def order_search(S: object, steps: int = 6000, generator: torch.Generator | None = None) -> SignFit:
    """Local search in one dimension: the order of the thresholds and the side that each faces.

    For a given order and orientation the best place of every anchor is known, as in
    `cube_optimum_1d`. Each step swaps two thresholds or turns one over, and is kept if the
    accuracy is not lower. On the full cube nothing can be gained; on N << 2^D anchors the
    thresholds adapt to the rows.

    Args:
        S: (N, D) signs.
        steps: proposals, >= 0.
        generator: randomness; None is seeded with 0.
    """
    S = _sign_matrix(S)
    _check_descent(steps, 1.0)
    generator = generator or _generator(0)
    (N, D) = S.shape
    a, b = torch.randint(0, D, (2, steps), generator=generator).tolist() if steps else ([], [])
    turn = torch.randint(0, 2, (steps,), generator=generator).tolist()
    rows = S.T.numpy().astype(np.int16).copy()  # (D, N): one contiguous row a threshold
    order, side = list(range(D)), [1] * D

    def places(rows: np.ndarray) -> np.ndarray:
        walk = np.zeros((D + 1, N), dtype=np.int16)
        np.cumsum(rows, axis=0, dtype=np.int16, out=walk[1:])
        return walk

    def value(rows: np.ndarray) -> int:
        """Twice the highest point of each walk, less its end, summed: 2·agreements - ND."""
        walk = places(rows)
        return 2 * int(walk.max(axis=0).sum(dtype=np.int64)) - int(walk[-1].sum(dtype=np.int64))

    best = value(rows)
    for first, second, over in zip(a, b, turn, strict=True):
        if over:
            rows[first] *= -1
        else:
            rows[[first, second]] = rows[[second, first]]
        now = value(rows)
        if now >= best:
            best = now
            if over:
                side[first] = -side[first]
            else:
                order[first], order[second] = order[second], order[first]
                side[first], side[second] = side[second], side[first]
        elif over:
            rows[first] *= -1
        else:
            rows[[first, second]] = rows[[second, first]]
    X = torch.from_numpy(places(rows).argmax(axis=0)).double()[:, None] - D / 2
    W, offset = S.new_zeros(D, 1), S.new_zeros(D)
    W[order, 0] = torch.tensor(side, dtype=S.dtype)
    offset[order] = W[order, 0] * (D / 2 - 0.5 - torch.arange(D, dtype=S.dtype))
    return SignFit(X, W, offset, sign_accuracy(X, W, offset, S))


def best_found(S: object, d: int, generator: torch.Generator | None = None) -> SignFit:
    """The best embedding of H(S) that we know how to find: `fit_signs`, and at d=1 `order_search`.

    Args:
        S: (N, D) signs.
        d: dimension.
        generator: randomness; None is seeded with 0.
    """
    generator = generator or _generator(0)
    fits = [fit_signs(S, d, generator=generator)]
    if d == 1:
        fits.append(order_search(S, generator=generator))
    return max(fits, key=lambda fit: fit.accuracy)


# --------------------------------------------------------------------------------------------
# Solvers for triplets


class TripletFit(NamedTuple):
    """A fitted embedding.

    Attributes:
        X: (n, d) points.
        accuracy: share of the triplets that they satisfy.
        trace: (steps,) float64 loss before each step of the run that gave ``X``.
    """

    X: torch.Tensor
    accuracy: float
    trace: torch.Tensor


def _warn_contradictions(triplets: torch.Tensor) -> None:
    turned = torch.cat([triplets, triplets[:, [0, 2, 1]]]).unique(dim=0)
    one_way = triplets.unique(dim=0)
    contradictory = 2 * len(one_way) - len(turned)
    if contradictory:
        warnings.warn(
            f"triplets contain {contradictory // 2} pairs (i, j, k), (i, k, j) that contradict "
            "each other: no embedding satisfies more than one of the two",
            stacklevel=3,
        )


def fit_triplets(
    triplets: object,
    n: int,
    d: int,
    *,
    init: object = None,
    steps: int = 400,
    lr: float = 0.05,
    margin_scale: float = 3.0,
    restarts: int = 1,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
) -> TripletFit:
    """Adam on mean softplus(margin_scale (|x_i - x_j|² - |x_i - x_k|²)).

    Args:
        triplets: (m, 3), see `icmllab.toolbox.contrastive.check_triplets`. Contradictory ones are
            allowed, with a warning.
        n: points.
        d: dimension.
        init: (n, d) start of the first run, in whose dtype the fit runs; None is N(0, 1), float32
            on a GPU, where the fused kernel runs, else float64. Keep it at unit scale: the loss
            saturates far from it.
        steps: of Adam.
        lr: its rate.
        margin_scale: slope of the softplus.
        restarts: runs; those after the first start from N(0, 1). The most accurate one counts.
        batch_size: triplets a step, drawn anew each time; None takes them all.
        generator: randomness; None is seeded with 0.

    Returns:
        The most accurate iterate of the best run; with ``batch_size`` its last iterate.

    Raises:
        ValueError: arguments that do not fit.
    """
    triplets = check_triplets(triplets, n)
    _check_sizes(n=n, d=d, restarts=restarts)
    _check_descent(steps, lr)
    if batch_size is not None:
        _check_sizes(batch_size=batch_size)
    _warn_contradictions(triplets)
    device = triplets.device
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    if init is not None:
        init = torch.as_tensor(init, device=device)
        if init.shape != (n, d) or not init.is_floating_point():
            raise ValueError(
                f"init must be a floating (n, d) = {(n, d)} tensor: got {tuple(init.shape)} "
                f"{init.dtype}"
            )
        dtype = init.dtype
    generator = generator or _generator(0)
    fits = []
    for run in range(restarts):
        start = torch.randn(n, d, generator=generator, dtype=dtype).to(device)
        if init is not None and run == 0:
            start = init.clone()
        draw = (batch_size, generator) if batch_size and batch_size < len(triplets) else None
        fits.append(_descend_triplets(triplets, start, steps, lr, margin_scale, draw))
    return max(fits, key=lambda fit: fit.accuracy)


def _descend_triplets(
    triplets: torch.Tensor,
    X: torch.Tensor,
    steps: int,
    lr: float,
    scale: float,
    draw: tuple[int, torch.Generator] | None,
) -> TripletFit:
    optimizer = torch.optim.Adam([X], lr=lr)
    trace = torch.zeros(steps, dtype=torch.float64)
    m, best, hits_best = len(triplets), X, -1.0
    # on a GPU the same list of incidences serves every step, if the caller asks for the same bits
    fixed = torch.are_deterministic_algorithms_enabled() and draw is None
    lists = incidences(triplets, len(X)) if fixed else None
    for t in range(steps):
        part = triplets
        if draw is not None:
            rows = torch.randint(0, m, (draw[0],), generator=draw[1])
            part = triplets[rows.to(triplets.device)]
        step = triplet_loss_fwd_bwd(X, part, scale=scale, lists=lists)
        trace[t] = float(step.loss)
        if draw is None and float(step.hits) > hits_best:
            best, hits_best = X.clone(), float(step.hits)
        X.grad = step.grad
        optimizer.step()
    last = triplet_accuracy(X, triplets)
    if draw is not None or steps == 0 or last * m > hits_best:
        best = X
    return TripletFit(best.detach(), triplet_accuracy(best, triplets), trace)


class LineOptimum(NamedTuple):
    """An optimal embedding on a line.

    Attributes:
        X: (n, 1) int64 points.
        accuracy: the share of the triplets that they satisfy.
        proven: whether the solver proved that no line does better.
    """

    X: torch.Tensor
    accuracy: float
    proven: bool


def one_dim_milp(triplets: object, n: int, time_limit: float = 60.0) -> LineOptimum:
    """The best embedding on a line, exactly, as an integer programme solved by HiGHS.

    Whole positions x_i in [0, 2^n]; for each pair a binary order o_ij and a distance a_ij =
    |x_i - x_j|; for each triplet a binary z with a_ij - a_ik <= M(1-z) - 1, M = 2^(n+1);
    maximise Σ z. A tie is never better than one of its two resolutions, so strict triplets are
    enough.

    Args:
        triplets: (m, 3), m <= 30.
        n: points, 3..7.
        time_limit: seconds.

    Raises:
        ValueError: arguments that do not fit.
        RuntimeError: no embedding within the time limit.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    triplets = check_triplets(triplets, n)
    if not 3 <= n <= 7 or len(triplets) > 30:
        raise ValueError(
            f"n must be in 3..7 with at most 30 triplets: got n={n} and {len(triplets)} triplets"
        )
    pairs = list(itertools.combinations(range(n), 2))
    at = {pair: p for p, pair in enumerate(pairs)}
    P, m, M = len(pairs), len(triplets), 2 ** (n + 1)
    # variables: x (n), a (P), o (P), z (m)
    terms: list[tuple[int, int, float]] = []
    limits: list[float] = []

    def at_most(limit: float, *entries: tuple[int, float]) -> None:
        terms.extend((len(limits), column, value) for column, value in entries)
        limits.append(limit)

    for p, (i, j) in enumerate(pairs):
        a, o = n + p, n + P + p
        at_most(0, (j, 1), (i, -1), (a, -1))  # a >= x_j - x_i
        at_most(0, (i, 1), (j, -1), (a, -1))
        at_most(M, (a, 1), (j, -1), (i, 1), (o, M))  # a <= x_j - x_i where o = 1
        at_most(0, (a, 1), (i, -1), (j, 1), (o, -M))  # a <= x_i - x_j where o = 0
    for t, (i, j, k) in enumerate(triplets.tolist()):
        near, far = (n + at[min(i, q), max(i, q)] for q in (j, k))
        at_most(M - 1, (near, 1), (far, -1), (n + 2 * P + t, M))
    columns = n + 2 * P + m
    row, column, value = zip(*terms, strict=True)
    matrix = csr_matrix((value, (row, column)), shape=(len(limits), columns))
    upper = np.concatenate([np.full(n + P, 2.0**n), np.ones(P + m)])
    cost = np.zeros(columns)
    cost[n + 2 * P :] = -1
    integer = np.ones(columns)
    integer[n : n + P] = 0  # differences of whole numbers are whole by themselves
    found = milp(
        cost,
        constraints=LinearConstraint(matrix, -np.inf, limits),
        bounds=Bounds(0, upper),
        integrality=integer,
        options={"time_limit": time_limit},
    )
    if found.x is None:
        raise RuntimeError(f"HiGHS found no embedding within time_limit={time_limit}")
    X = torch.from_numpy(np.rint(found.x[:n]).astype(np.int64))[:, None]
    return LineOptimum(X, triplet_accuracy(X, triplets), found.status == 0)


def conditional_expectation_line(triplets: object, n: int, grid: int = 16) -> torch.Tensor:
    """At least half of any triplets, without luck: the random line by conditional expectations.

    Points drawn from a grid satisfy one half on average, ties counting one half. Place them in
    turn, each at the value that maximises the mean over those still unplaced: the mean never
    falls.

    Args:
        triplets: (m, 3).
        n: points.
        grid: G grid values, >= 2.

    Returns:
        (n, 1) int64 points in 0..G-1.

    Raises:
        ValueError: arguments that do not fit.
    """
    triplets = check_triplets(triplets, n).cpu().numpy()
    _check_sizes(n=n, grid=grid)
    if grid < 2:
        raise ValueError(f"grid must be at least 2: got {grid}")
    value = np.arange(grid)
    near = np.abs(value[:, None] - value)
    hit = 0.5 + 0.5 * np.sign(near[:, None, :] - near[:, :, None])  # (a, b, c): far against near
    # one more index on each axis: that slot averaged over the grid
    for axis in range(3):
        hit = np.concatenate([hit, hit.mean(axis=axis, keepdims=True)], axis=axis)
    place = np.full(n, grid)
    for point in range(n):
        total = np.zeros(grid)
        for role in range(3):
            mine = triplets[triplets[:, role] == point]
            slots = [place[mine[:, other]][:, None] for other in range(3)]
            slots[role] = value[None, :]
            total += hit[tuple(slots)].sum(axis=0)
        # the lowest of those within rounding of the best: the same choice on every machine
        place[point] = int(np.flatnonzero(total >= total.max() - 1e-9)[0])
    return torch.from_numpy(place)[:, None]


class Acyclic(NamedTuple):
    """A largest acyclic set of arcs.

    Attributes:
        value: how many arcs.
        order: (n,) int64, vertices in an order in which these arcs all go forward.
    """

    value: int
    order: torch.Tensor


def max_acyclic(arcs: object, n: int) -> Acyclic:
    """Maximum Acyclic Subgraph by dynamic programming over subsets.

    f(Q) = max_{v∈Q} f(Q∖v) + #arcs(Q∖v → v): v comes last among Q.

    Args:
        arcs: (q, 2) whole numbers, j → k; repeated arcs count each.
        n: vertices, at most 14.

    Raises:
        ValueError: arguments that do not fit.
    """
    arcs = _check_arcs(arcs, n).numpy()
    if n > 14:
        raise ValueError(f"n must be at most 14: got {n}")
    adjacent = np.zeros((n, n), dtype=np.int64)
    np.add.at(adjacent, (arcs[:, 0], arcs[:, 1]), 1)
    sets = np.arange(2**n)
    member = (sets[:, None] >> np.arange(n)) & 1
    into = member @ adjacent  # (2^n, n): arcs from the set into each vertex
    best = np.zeros(2**n, dtype=np.int64)
    last = np.zeros(2**n, dtype=np.int64)
    size = member.sum(axis=1)
    for k in range(1, n + 1):  # all sets of one size at once
        Q = sets[size == k]
        rest = Q[:, None] - (1 << np.arange(n))
        inside = member[Q] == 1
        rest = np.where(inside, rest, 0)
        gain = np.where(inside, best[rest] + into[rest, np.arange(n)], -1)
        last[Q] = gain.argmax(axis=1)
        best[Q] = gain.max(axis=1)
    order, Q = [], 2**n - 1
    while Q:
        order.append(int(last[Q]))
        Q -= 1 << order[-1]
    return Acyclic(int(best[-1]), torch.tensor(order[::-1]))


def line_from_order(order: torch.Tensor) -> torch.Tensor:
    """Points of a single-anchor instance on a line: the anchor (last) at 0, vertices by rank.

    Args:
        order: (n,) vertices, nearest to the anchor first.

    Returns:
        (n+1, 1) int64.
    """
    X = torch.zeros(len(order) + 1, 1, dtype=torch.int64)
    X[order, 0] = torch.arange(1, len(order) + 1)
    return X


# --------------------------------------------------------------------------------------------
# Fewer dimensions of a given embedding, and baselines


def truncate(X: object, d: int) -> torch.Tensor:
    """The first d principal coordinates of X: (n, d) float64, zeros beyond the rank's columns.

    Args:
        X: (n, D) points.
        d: dimension.
    """
    _check_sizes(d=d)
    X = torch.as_tensor(X).double()
    if X.ndim != 2:
        raise ValueError(f"X must have shape (n, D): got {tuple(X.shape)}")
    U, s, _ = torch.linalg.svd(X - X.mean(dim=0), full_matrices=False)
    coordinates = (U * s)[:, :d]
    return torch.nn.functional.pad(coordinates, (0, d - coordinates.shape[1]))


def relative_margin(P: torch.Tensor, triplets: torch.Tensor) -> torch.Tensor:
    """|a - b|/(a + b) with a, b the squared distances to near and far; 0 where both are 0: (m,)."""
    near, far = triplet_distances(torch.as_tensor(P).double(), triplets)
    return (near - far).abs() / (near + far).clamp(min=1e-300)


def random_line(n: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """The trivial baseline: n random reals, (n, 1) float64.

    Real numbers, not shuffled ranks in the order of the points, which would correlate with an
    instance whose points come in order.
    """
    _check_sizes(n=n)
    return torch.randn(n, 1, generator=generator or _generator(0), dtype=torch.float64)


def block_majority(S: object, d: int) -> SignFit:
    """Each block of columns answered by the majority of its signs: x_ik = Σ_{l in block k} s_il."""
    S = _sign_matrix(S)
    _check_sizes(d=d)
    X, W = S.new_zeros(len(S), d), S.new_zeros(S.shape[1], d)
    for axis, block in enumerate(_blocks(S.shape[1], d)):
        columns = slice(block.start, block.stop)
        X[:, axis] = S[:, columns].sum(dim=1)
        W[columns, axis] = 1
    b = S.new_zeros(S.shape[1])
    return SignFit(X, W, b, sign_accuracy(X, W, b, S))


def classical_mds(P: torch.Tensor, d: int) -> torch.Tensor:
    """Classical multidimensional scaling of the distances of P: (n, d) float64, scikit-learn's."""
    from sklearn.manifold import ClassicalMDS

    return torch.from_numpy(ClassicalMDS(n_components=d).fit_transform(P.double().numpy()))


def random_projection(P: torch.Tensor, d: int, seed: int) -> torch.Tensor:
    """A Johnson–Lindenstrauss map of P to d dimensions: (n, d) float64, scikit-learn's."""
    from sklearn.random_projection import GaussianRandomProjection

    with warnings.catch_warnings():
        # scikit-learn warns when d exceeds the dimension of P, which is meant here
        warnings.filterwarnings("ignore", message="The number of components is higher")
        project = GaussianRandomProjection(n_components=d, random_state=seed)
        return torch.from_numpy(project.fit_transform(P.double().numpy()))


# --------------------------------------------------------------------------------------------
# Experiments: one run each, from a seed to numbers


def shattered_scores(*, N: int, D: int, d: int, seed: int, restarts: int) -> dict[str, float]:
    """Every way to embed one H(N, D) in d dimensions that the chapter compares, by accuracy.

    ``signs`` is `fit_signs` from its three starts, ``found`` the best of all embeddings (with
    `order_search` at d=1), ``one`` and ``several`` `fit_triplets` from 1 and from ``restarts``
    random starts.
    """
    generator = _generator(seed)
    instance = shattered_instance(N, D, generator)
    S, T, P = instance.signs, instance.triplets, instance.witness
    fits = {
        init: fit_signs(S, d, init=init, generator=generator).accuracy
        for init in ("random", "svd", "threshold")
    }
    first = fit_triplets(T, instance.n_points, d, generator=generator).accuracy
    rest = [
        fit_triplets(T, instance.n_points, d, generator=generator).accuracy
        for _ in range(restarts - 1)
    ]
    out = {
        "signs": max(fits.values()),
        "signs_random": fits["random"],
        "threshold": threshold_embedding(S, d).accuracy,
        "one": first,
        "several": max([first, *rest]),
        "pca": triplet_accuracy(truncate(P, d), T),
        "mds": triplet_accuracy(classical_mds(P, d), T),
        "projection": triplet_accuracy(random_projection(P, d, seed), T),
        "majority": block_majority(S, d).accuracy,
        "line": triplet_accuracy(random_line(instance.n_points, generator), T),
    }
    order = order_search(S, generator=generator).accuracy if d == 1 else 0.0
    return {**out, "found": max(*out.values(), order)}


def gaussian_scores(*, n: int, D: int, m: int, d: int, seed: int) -> dict[str, float]:
    """A typical instance in d dimensions: `fit_triplets` from the truncated witness."""
    generator = _generator(seed)
    instance = gaussian_instance(n, D, m, generator)
    start = truncate(instance.witness, d)
    fit = fit_triplets(instance.triplets, n, d, init=start, generator=generator)
    return {
        "typical": fit.accuracy,
        "heldout": triplet_accuracy(fit.X, instance.heldout),
        "typical_pca": triplet_accuracy(start, instance.triplets),
    }


def dimension_run(*, d: int, seed: int) -> dict[str, float]:
    """Worst case H(256, 32) and typical case G(120, 32, 8000) at one dimension and seed.

    Above d=8 the question is only whether H is solved: one start of `fit_triplets`, and no G.
    """
    if d > 8:
        return shattered_scores(N=256, D=32, d=d, seed=seed, restarts=1)
    return {
        **shattered_scores(N=256, D=32, d=d, seed=seed, restarts=5),
        **gaussian_scores(n=120, D=32, m=8000, d=d, seed=seed),
    }


SHIPPED = (dimension_run, {"d": (1, 2, 4, 8, 16, 24), "seed": tuple(range(20))})
"""What ``make results CHAPTER=representations/dimension_collapse`` computes."""


def tournament_scores(*, n: int, dims: tuple[int, ...], seed: int) -> dict[str, float]:
    """A random tournament as triplets: its acyclic share, that of a line, and fits in ``dims``."""
    generator = _generator(seed)
    arcs = random_tournament(n, generator)
    instance = single_anchor_instance(arcs, n)
    acyclic = max_acyclic(arcs, n)
    out = {
        "acyclic": acyclic.value / len(arcs),
        "line": triplet_accuracy(line_from_order(acyclic.order), instance.triplets),
    }
    for d in dims:
        fit = fit_triplets(instance.triplets, n + 1, d, generator=generator)
        out[f"fit_{d}"] = fit.accuracy
    return out


def projection_scores(*, N: int, D: int, d: int, seed: int) -> dict[str, float]:
    """A random projection of the witness of H(N, D): triplets kept, and distances kept.

    ``within_40`` is the share of pairs of points whose distance changes by less than 40 %.
    """
    generator = _generator(seed)
    instance = shattered_instance(N, D, generator)
    P = instance.witness
    Q = random_projection(P, d, seed)
    before, after = torch.pdist(P), torch.pdist(Q)
    kept = ((after / before - 1).abs() < 0.4).double()
    return {
        "accuracy": triplet_accuracy(Q, instance.triplets),
        "within_40": float(kept[before > 0].mean()),
    }


def digit_triplets(*, n: int, m: int, seed: int) -> TripletInstance:
    """Triplets of n random images of digits by their true 64-dimensional distances.

    Args:
        n: images, 3..1797.
        m: triplets; pairs at equal distance are dropped and drawn again.
        seed: picks images and triplets.

    Returns:
        m triplets with the pixel values, whole numbers 0..16, as (n, 64) float64 ``witness``.
    """
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().data)
    if not 3 <= n <= len(images):
        raise ValueError(f"n must be in 3..{len(images)}: got {n}")
    generator = _generator(seed)
    P = images[torch.randperm(len(images), generator=generator)[:n]]
    kept = torch.empty(0, 3, dtype=torch.int64)
    while len(kept) < m:
        drawn = random_triplets(n, m, generator)
        near, far = triplet_distances(P, drawn)
        kept = torch.cat([kept, drawn[near != far]])
    return TripletInstance(n, relabel(kept[:m], P), None, P)


def digit_scores(*, n: int, m: int, d: int, seed: int, near_share: float = 0.2) -> dict[str, float]:
    """Digits cut to d dimensions: all triplets, and the near-ties among them.

    Near-ties are the ``near_share`` of the triplets with the smallest relative margin.
    """
    instance = digit_triplets(n=n, m=m, seed=seed)
    T, P = instance.triplets, instance.witness
    near = T[relative_margin(P, T).argsort()[: round(near_share * m)]]
    cut, projected = truncate(P, d), random_projection(P, d, seed)
    return {
        "pca_all": triplet_accuracy(cut, T),
        "pca_near": triplet_accuracy(cut, near),
        "projection_all": triplet_accuracy(projected, T),
        "projection_near": triplet_accuracy(projected, near),
    }


def planted_scores(*, n: int, m: int, flip: float, seed: int, restarts: int) -> dict[str, float]:
    """A line with noisy labels, fitted in one dimension from random starts."""
    generator = _generator(seed)
    instance = planted_line(n, m, flip, generator)
    with warnings.catch_warnings():
        # a comparison that was drawn twice and turned over once is part of the noise
        warnings.filterwarnings("ignore", message="triplets contain .* contradict")
        fit = fit_triplets(instance.triplets, n, 1, restarts=restarts, generator=generator)
    clean = relabel(instance.triplets, instance.witness)
    return {"noisy": fit.accuracy, "clean": triplet_accuracy(fit.X, clean)}


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_witness(fn: Callable) -> None:
    """Exercise 1: ``fn(S, eta)`` embeds H(S) in D dimensions without a violated triplet.

    Tried on 20 random sign matrices of random shapes with η = 1e-3.

    Raises:
        AssertionError: with the instance, and what was expected.
    """
    generator = _generator(0)
    for _ in range(20):
        N, D = (int(v) for v in torch.randint(1, 20, (2,), generator=generator))
        instance = shattered_instance(N, D, generator)
        P = torch.as_tensor(fn(instance.signs.clone(), 1e-3))
        hint = f"N={N}, D={D}"
        assert tuple(P.shape) == (N + 2 * D, D), (
            f"{hint}: the result must have shape (N+2D, D) = {(N + 2 * D, D)}, anchors first, then "
            f"u_1..u_D, then v_1..v_D: got {tuple(P.shape)}"
        )
        accuracy = triplet_accuracy(P, instance.triplets)
        assert accuracy == 1, (
            f"{hint}: every triplet must hold, got {accuracy:.4f}: coordinate l of an anchor must "
            "decide between u_l and v_l, for either sign"
        )


def check_cell_count(fn: Callable) -> None:
    """Exercise 2: ``fn(D, d)`` counts the cells of D hyperplanes in general position in R^d.

    Compared with cells counted one by one in random arrangements.

    Raises:
        AssertionError: with the arrangement, and what was expected.
    """
    generator = _generator(1)
    cases = [(6, 2), (1, 1), (3, 3), (7, 3)]
    cases += [
        (D, int(torch.randint(1, min(D, 4) + 1, (), generator=generator)))
        for D in torch.randint(2, 10, (6,), generator=generator).tolist()
    ]
    for D, d in cases:
        W = torch.randn(D, d, generator=generator, dtype=torch.float64)
        b = torch.randn(D, generator=generator, dtype=torch.float64)
        expected, got = count_cells(W, b), int(fn(D, d))
        assert got == expected, (
            f"{D} random hyperplanes in R^{d} make {expected} cells, got {got}: hyperplane D meets "
            "the others in an arrangement of D-1 hyperplanes in R^(d-1), and cuts as many cells in "
            "two"
        )
    assert int(fn(3, 8)) == 8, "3 hyperplanes in R^8 make 2^3 = 8 cells"


def _enumerated_optimum(D: int) -> float:
    bits = torch.arange(2**D)[:, None] >> torch.arange(D) & 1
    walk = torch.nn.functional.pad((2 * bits - 1).cumsum(dim=1), (1, 0))
    agreements = (2 * walk - walk[:, -1:] + D) / 2  # at each place of the line
    return float(agreements.max(dim=1).values.double().mean()) / D


def check_cube_optimum(fn: Callable) -> None:
    """Exercise 3: ``fn(D)`` is the best accuracy on H*(D) in one dimension.

    Compared with an enumeration of all 2^D sign vectors for D = 1..10, to 1e-12.

    Raises:
        AssertionError: with D, and what was expected.
    """
    for D in range(1, 11):
        expected, got = _enumerated_optimum(D), float(fn(D))
        assert abs(got - expected) <= 1e-12, (
            f"D={D}: over all {2**D} sign vectors the mean best share is {expected:.12f}, got "
            f"{got:.12f}: the expected maximum of the walk needs E[S_D⁺] and E[(S_D - 1)⁺]"
        )


def check_smallest_dimension(fn: Callable) -> None:
    """Exercise 4: ``fn(target, d, factor)`` is the smallest D at which Warren's bound bites.

    That is, `accuracy_upper_bound` of N = factor·D anchors in d dimensions is at most target.

    Raises:
        AssertionError: with the case, and what was expected.
    """
    generator = _generator(3)
    cases = [(0.55, 1, 20)]
    for _ in range(4):
        target = 0.55 + 0.1 * float(torch.rand((), generator=generator))
        d, factor = (int(v) for v in torch.randint(1, 5, (2,), generator=generator))
        cases.append((round(target, 3), d, 5 * factor))
    for target, d, factor in cases:
        expected = next(
            D for D in itertools.count(d) if accuracy_upper_bound(factor * D, D, d) <= target
        )
        got = fn(target, d, factor)
        assert got == expected, (
            f"target={target}, d={d}, N={factor}D: the smallest D is {expected}, got {got}; count "
            "the references among the parameters: V = Nd + D(d+1)"
        )


def check_single_anchor(fn: Callable) -> None:
    """Exercise 5: ``fn(arcs, n)`` returns the triplets of a digraph and its best line.

    Triplets are (q, 3) over points 0..n with anchor n, the line is (n+1, 1). The line must reach
    the largest acyclic share exactly, and fits in 5 dimensions must not exceed it.

    Raises:
        AssertionError: with the digraph, and what was expected.
    """
    generator = _generator(4)
    for case in range(5):
        n = 5 + case % 4
        arcs = random_tournament(n, generator)
        if case % 2:  # not all pairs
            arcs = arcs[torch.randperm(len(arcs), generator=generator)[: len(arcs) - 3]]
        triplets, line = fn(arcs.clone(), n)
        triplets, line = torch.as_tensor(triplets), torch.as_tensor(line)
        assert tuple(triplets.shape) == (len(arcs), 3), (
            f"{len(arcs)} arcs must become as many triplets: got shape {tuple(triplets.shape)}"
        )
        expected = single_anchor_instance(arcs, n).triplets
        same = {tuple(t) for t in triplets.tolist()} == {tuple(t) for t in expected.tolist()}
        assert same, "arc j → k must become the triplet (n, j, k), whose anchor n is one more point"
        best = max_acyclic(arcs, n).value / len(arcs)
        got = triplet_accuracy(line.reshape(-1, 1), triplets)
        assert abs(got - best) <= 1e-12, (
            f"the best order of {n} vertices satisfies {best:.4f} of the arcs, your line {got:.4f}"
        )
        fit = fit_triplets(triplets, n + 1, 5, generator=generator).accuracy
        assert fit <= best + 1e-12, f"a fit in 5 dimensions has {fit:.4f}, above {best:.4f}"


def check_two_axes(fn: Callable) -> None:
    """Exercise 6: ``fn(S, generator)`` returns (X, W, b) in 2 dimensions that beat thresholds.

    On each of three random H(256, 32) the agreement must exceed that of `threshold_embedding` by
    0.01.

    Raises:
        AssertionError: with both accuracies.
    """
    for seed in (50, 51, 52):
        S = shattered_instance(256, 32, _generator(seed)).signs
        X, W, b = (torch.as_tensor(t).double() for t in fn(S.clone(), _generator(seed)))
        assert (tuple(X.shape), tuple(W.shape), tuple(b.shape)) == ((256, 2), (32, 2), (32,)), (
            "X, W, b must have shapes (256, 2), (32, 2), (32,): got "
            f"{tuple(X.shape)}, {tuple(W.shape)}, {tuple(b.shape)}"
        )
        base, got = threshold_embedding(S, 2).accuracy, sign_accuracy(X, W, b, S)
        assert got >= base + 0.01, (
            f"thresholds in their given order reach {base:.4f}, at least 0.01 more is wanted: got "
            f"{got:.4f}"
        )
