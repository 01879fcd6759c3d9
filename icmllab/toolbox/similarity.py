r"""Similarity of two representations of the same inputs.

A representation is a matrix of features X: (n_samples, n_features); two of them are compared row
by row, and their widths may differ. Every score has the upper end 1. All computation is in
float64.

Two layers. The functions (`cka_linear(X, Y)`, `mutual_knn(X, Y, k=10)`, …) return one number.
`metric(name, **params)` returns a `Metric`, which splits the work so that a score can be computed
again under many permutations of the rows of Y at little cost: `prepare` once, then `null`.

Sources: CKA, Kornblith et al. 2019; its unbiased form from HSIC₁, Song et al. 2012; mutual and
cycle kNN and CKNNA, Huh et al. 2024; SVCCA, Raghu et al. 2017; PWCCA, Morcos et al. 2018; RSA,
Kriegeskorte et al. 2008. `local_distance_agreement` is this book's own.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata, spearmanr

from icmllab.kernels.perm_bilinear import perm_bilinear
from icmllab.kernels.perm_knn_overlap import perm_knn_overlap

# --------------------------------------------------------------------------------------------
# Input


def as_features(name: str, X: object) -> torch.Tensor:
    """``X`` as a float64 feature matrix, or the reason why it is none.

    Args:
        name: what the caller calls it, for the message.
        X: (n_samples, n_features) tensor or array of real numbers; a tensor keeps its device.

    Raises:
        ValueError: not two-dimensional, fewer than 4 rows, no column, or not finite.
    """
    if not isinstance(X, torch.Tensor):
        array = np.asarray(X)
        if array.dtype.kind not in "fiu":
            raise ValueError(f"{name} must hold real numbers: got dtype {array.dtype}")
        X = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))
    if X.is_complex() or X.dtype == torch.bool:
        raise ValueError(f"{name} must hold real numbers: got dtype {X.dtype}")
    if X.ndim != 2:
        raise ValueError(f"{name} must be 2-D, (n_samples, n_features): got shape {tuple(X.shape)}")
    if X.shape[0] < 4:
        raise ValueError(f"{name} must have at least 4 rows: got {X.shape[0]}")
    if X.shape[1] < 1:
        raise ValueError(f"{name} must have at least 1 column: got {X.shape[1]}")
    X = X.detach().to(torch.float64)
    if not torch.isfinite(X).all():
        raise ValueError(f"{name} must be finite: it holds NaN or infinity")
    return X


def as_pair(X: object, Y: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Both feature matrices in float64, checked to have the same number of rows."""
    X, Y = as_features("X", X), as_features("Y", Y)
    if len(X) != len(Y):
        raise ValueError(f"X and Y must have the same number of rows: got {len(X)} and {len(Y)}")
    if X.device != Y.device:
        raise ValueError(f"X and Y must share a device: got {X.device} and {Y.device}")
    return X, Y


def _check_k(k: int, n: int, *, least: int = 1) -> None:
    if isinstance(k, bool) or k != int(k) or not least <= k <= n - 1:
        raise ValueError(f"k must be a whole number in [{least}, n-1 = {n - 1}]: got {k}")


def _zero_variance() -> ValueError:
    return ValueError("zero variance: no variation left after centring, so no score exists")


# --------------------------------------------------------------------------------------------
# Pieces: centring, Gram matrices, distances, neighbours


def centre(X: torch.Tensor) -> torch.Tensor:
    """X with the mean of each column taken off; ValueError("zero variance") if nothing is left."""
    centred = X - X.mean(dim=0)
    if centred.norm() <= 1e-12 * X.norm():
        raise _zero_variance()
    return centred


def centre_gram(K: torch.Tensor) -> torch.Tensor:
    """H K H with H = I - 11ᵀ/n, for a symmetric K: (n, n)."""
    row = K.mean(dim=1)
    return K - row[:, None] - row[None, :] + row.mean()


def u_centre(K: torch.Tensor) -> torch.Tensor:
    r"""The U-centred Gram matrix: HSIC₁(K, L) = ⟨Ũ_K, Ũ_L⟩ / (n (n-3)).

    Ũ_ij = K̃_ij - (r_i + r_j)/(n-2) + Σr/((n-1)(n-2)) off the diagonal and 0 on it; K̃ is K with
    a zero diagonal and r its row sums.
    """
    n = len(K)
    zeroed = K - torch.diag(K.diagonal())
    r = zeroed.sum(dim=1)
    U = zeroed - (r[:, None] + r[None, :]) / (n - 2) + r.sum() / ((n - 1) * (n - 2))
    return U.fill_diagonal_(0.0)


def hsic_unbiased(K: torch.Tensor, L: torch.Tensor) -> float:
    r"""HSIC₁, the unbiased estimate of the Hilbert–Schmidt independence criterion.

    With K̃ and L̃ the matrices with zeroed diagonals, it is
    [tr(K̃L̃) + 1ᵀK̃1·1ᵀL̃1/((n-1)(n-2)) - 2·1ᵀK̃L̃1/(n-2)] / (n(n-3)).

    Args:
        K: (n, n), symmetric or not, n >= 4.
        L: (n, n).
    """
    n = len(K)
    K = K - torch.diag(K.diagonal())
    L = L - torch.diag(L.diagonal())
    trace = (K * L.T).sum()
    totals = K.sum() * L.sum() / ((n - 1) * (n - 2))
    cross = K.sum(dim=0) @ L.sum(dim=1) / (n - 2)
    return float((trace + totals - 2 * cross) / (n * (n - 3)))


def squared_distances(X: torch.Tensor) -> torch.Tensor:
    """Squared Euclidean distances between all rows, (n, n), zero diagonal."""
    X = X - X.mean(dim=0)
    gram = X @ X.T
    norms = gram.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * gram).clamp_(min=0.0).fill_diagonal_(0.0)


def upper_median(D: torch.Tensor) -> float:
    """The median of the entries above the diagonal: the zeros on it would bias a small sample."""
    values = D[tuple(torch.triu_indices(len(D), len(D), 1, device=D.device))]
    middle = (len(values) + 1) // 2
    low = values.kthvalue(middle).values
    if len(values) % 2:
        return float(low)
    return float((low + values.kthvalue(middle + 1).values) / 2)


def nearest(similarity: torch.Tensor, k: int) -> torch.Tensor:
    """The k most similar columns of each row, itself left out, ties to the lower index.

    Args:
        similarity: (n, n); overwritten nowhere.
        k: how many, in [1, n-1].

    Returns:
        (n, k) int64, most similar first.
    """
    _check_k(k, len(similarity))
    order = torch.sort(_rounded(similarity), dim=1, descending=True, stable=True).indices
    return order[:, :k].contiguous()


def ties_at_the_cut(similarity: torch.Tensor, k: int) -> bool:
    """Whether in some row the k-th and the (k+1)-th most similar column tie.

    Only then does the order of the columns decide who is a neighbour. Arguments as in `nearest`.
    """
    n = len(similarity)
    _check_k(k, n)
    if k == n - 1:  # all others are neighbours
        return False
    top = _rounded(similarity).topk(k + 1, dim=1).values
    return bool((top[:, k - 1] == top[:, k]).any())


def _rounded(similarity: torch.Tensor) -> torch.Tensor:
    """Similarities in steps of 1e-12 of the largest, a sample's own at -∞.

    Equal pairs can differ in the last bits of a matrix product; after rounding they tie.
    """
    scale = similarity.abs().max().clamp(min=1e-300)
    return (similarity / scale * 1e12).round().fill_diagonal_(-math.inf)


def cosines(X: torch.Tensor) -> torch.Tensor:
    """Cosine of every two rows, (n, n); a row of zeros is at 0 to all."""
    unit = X / X.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return unit @ unit.T


def knn_indices(X: torch.Tensor, k: int) -> torch.Tensor:
    """Cosine neighbours of each row, (n, k) int64; a row of zeros is at similarity 0 to all."""
    return nearest(cosines(X), k)


def neighbour_mask(indices: torch.Tensor) -> torch.Tensor:
    """0/1 float64 matrix of a neighbour list: entry (i, j) says that j is a neighbour of i."""
    n = len(indices)
    mask = torch.zeros(n, n, dtype=torch.float64, device=indices.device)
    return mask.scatter_(1, indices, 1.0)


def inverse_permutations(perms: torch.Tensor) -> torch.Tensor:
    """π⁻¹ for each row of ``perms``: (B, n)."""
    return torch.argsort(perms, dim=1)


def _left_singular(X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Left singular vectors and values of the centred X, those above 1e-10 of the largest."""
    U, S, _ = torch.linalg.svd(centre(X), full_matrices=False)
    keep = S[0] * 1e-10 < S
    return U[:, keep], S[keep]


# --------------------------------------------------------------------------------------------
# Metrics


class Prepared(NamedTuple):
    """What a metric keeps of a pair: its view of X and its view of Y."""

    a: Any
    b: Any


class Metric:
    """A similarity score that can be computed again under permutations of the rows of Y.

    `side` turns one representation into what the score needs of it; `pair` scores two sides;
    `take` gives the side of X[perm] from the side of X without looking at X again. A subclass
    with a faster way to score many permutations overrides `null`.

    Attributes:
        name: the name under which `metric` finds it.
    """

    name: ClassVar[str]

    def side(self, X: torch.Tensor) -> Any:
        """What the score needs of X: (n, d) float64, already checked."""
        raise NotImplementedError

    def pair(self, a: Any, b: Any) -> float:
        """The score of two sides."""
        raise NotImplementedError

    def take(self, side: Any, perm: torch.Tensor) -> Any:
        """The side of X[perm]; here a tuple of tensors, one row a sample, is re-ordered."""
        return tuple(t[perm] for t in side)

    def raw(self, X: object, Y: object) -> float:
        """The score of X and Y.

        Args:
            X: (n, d_x) tensor or array, n >= 4.
            Y: (n, d_y), same n.

        Raises:
            ValueError: bad input, or "zero variance".
        """
        X, Y = as_pair(X, Y)
        return self.pair(self.side(X), self.side(Y))

    def partner(self, Y: torch.Tensor, order: torch.Tensor | None = None) -> Any:
        """The side of Y for a permutation test: like `side`, which looks at no order by default.

        Args:
            Y: (n, d) float64, already checked.
            order: a permutation of 0..n-1 by which a score that must choose among ties breaks
                those of Y; None leaves them to the lower index.
        """
        return self.side(Y)

    def prepare(self, X: object, Y: object, *, order: torch.Tensor | None = None) -> Prepared:
        """Everything that the score needs of X and Y, computed once; ``order`` as in `partner`."""
        X, Y = as_pair(X, Y)
        return Prepared(self.side(X), self.partner(Y, order))

    def null(self, prepared: Prepared, perms: torch.Tensor) -> torch.Tensor:
        """The scores of X and Y[perm], one for each row of ``perms``: (B, n) → (B,) float64."""
        scores = [self.pair(prepared.a, self.take(prepared.b, perm)) for perm in perms]
        return torch.tensor(scores, dtype=torch.float64)

    def null_layers(self, As: list, Bs: list, perms: torch.Tensor) -> torch.Tensor:
        """The scores of every pair of sides under each permutation: (L_A, L_B, B) float64."""
        rows = [torch.stack([self.null(Prepared(a, b), perms) for b in Bs]) for a in As]
        return torch.stack(rows)


class _Bilinear(Metric):
    """Scores of the form Σ_ij K[i,j] L[π_i,π_j]: two normalised Gram matrices.

    Centring and norms do not change when rows and columns are permuted together, so both are
    done once, before any permutation.
    """

    def gram(self, X: torch.Tensor) -> torch.Tensor:
        """The symmetric matrix that stands for X, not yet centred."""
        raise NotImplementedError

    def centred(self, K: torch.Tensor) -> torch.Tensor:
        """The matrix of `gram`, centred."""
        raise NotImplementedError

    def side(self, X):
        K = self.gram(X)
        centred = self.centred(K)
        norm = centred.norm()
        # equal entries leave rounding noise behind, which must not be scaled up to a score
        if norm <= 1e-12 * K.norm():
            raise _zero_variance()
        return centred / norm

    def pair(self, a, b):
        return float((a * b).sum())

    def take(self, side, perm):
        return side[perm][:, perm]

    def null(self, prepared, perms):
        return perm_bilinear(prepared.a, prepared.b, perms, symmetric=True).cpu()

    def null_layers(self, As, Bs, perms):
        if len(As) * len(Bs) == 1 or As[0].is_cuda:
            return super().null_layers(As, Bs, perms)
        # On a CPU all pairs share one gather of Y's matrices, and their products are one GEMM.
        left = torch.stack(As).flatten(1)
        right = torch.stack(Bs)
        out = torch.empty(len(perms), len(As), len(Bs), dtype=torch.float64)
        for b, perm in enumerate(perms):
            moved = right.index_select(1, perm).index_select(2, perm)
            torch.mm(left, moved.flatten(1).T, out=out[b])
        return out.permute(1, 2, 0)


@dataclass(frozen=True)
class CKALinear(_Bilinear):
    """⟨K_c, L_c⟩/(‖K_c‖‖L_c‖) with K = XXᵀ."""

    name: ClassVar[str] = "cka_linear"

    def gram(self, X):
        X = centre(X)
        return X @ X.T

    def centred(self, K):
        return K  # the features are


@dataclass(frozen=True)
class CKAUnbiased(_Bilinear):
    """CKA with the unbiased HSIC₁ in numerator and denominator; may be negative."""

    name: ClassVar[str] = "cka_unbiased"

    def gram(self, X):
        # HSIC₁ does not see the mean of the features; without it nothing cancels in the sums.
        X = centre(X)
        return X @ X.T

    def centred(self, K):
        return u_centre(K)


@dataclass(frozen=True)
class CKARbf(_Bilinear):
    """CKA with k(x, x') = exp(-‖x-x'‖²/(2σ²)), σ² = sigma_frac² · median ‖x-x'‖².

    A σ below the size of a neighbourhood makes it a measure of local distances; a wider one sees
    only who is a neighbour. A very small σ gives K = I, and a raw score of 1 for any data.

    Attributes:
        sigma_frac: bandwidth as a fraction of the root of the median squared distance, > 0.
    """

    name: ClassVar[str] = "cka_rbf"
    sigma_frac: float = 1.0

    def __post_init__(self):
        if not 0 < self.sigma_frac < math.inf:
            raise ValueError(f"sigma_frac must be > 0 and finite: got {self.sigma_frac}")

    def gram(self, X):
        D = squared_distances(centre(X))
        median = upper_median(D)
        if median <= 0:
            raise ValueError(
                "sigma_frac scales the median squared distance, which is 0: half of the pairs "
                "of samples coincide"
            )
        return torch.exp(-D / (2 * self.sigma_frac**2 * median))

    def centred(self, K):
        return centre_gram(K)


@dataclass(frozen=True)
class RSA(_Bilinear):
    """Spearman correlation of the two sets of Euclidean distances, ties averaged."""

    name: ClassVar[str] = "rsa"

    def gram(self, X):
        n = len(X)
        i, j = torch.triu_indices(n, n, 1, device=X.device)
        D = squared_distances(X)[i, j].sqrt()
        if D.min() < 0.5 * D.max():
            # an inner product loses the digits of a small distance, so take differences there
            D = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist")[i, j]
        # Equal distances can differ in the last bits; 40 of the 53 bits decide the rank.
        mantissa, exponent = torch.frexp(D)
        D = torch.ldexp((mantissa * 2.0**40).round(), exponent)
        ranks = torch.as_tensor(rankdata(D.cpu().numpy()), device=X.device)
        out = torch.zeros(n, n, dtype=torch.float64, device=X.device)
        out[i, j] = out[j, i] = ranks
        return out

    def centred(self, K):
        n = len(K)
        return (K - K.sum() / (n * (n - 1))).fill_diagonal_(0.0)


class _Neighbours(Metric):
    """Scores of two neighbour lists (n, k); a permutation only renames one of them.

    Ties go to the lower index. In a permutation test that would tie the two sides to each other:
    in the observed pairing both prefer the same rows, and after a permutation they no longer do,
    so that unrelated data with many ties would look related. `partner` therefore breaks the ties
    of Y by an order of its own, which a permutation carries along with the rows.
    """

    k: int
    least_k: ClassVar[int] = 1

    def __post_init__(self):
        if isinstance(self.k, bool) or self.k != int(self.k) or self.k < self.least_k:
            raise ValueError(f"k must be a whole number >= {self.least_k}: got {self.k}")

    def similarity(self, X: torch.Tensor) -> torch.Tensor:
        """What neighbours are chosen by, (n, n)."""
        return cosines(X)

    def side(self, X):
        return nearest(self.similarity(X), self.k)

    def partner(self, Y, order=None):
        if order is None or not ties_at_the_cut(self.similarity(Y), self.k):
            return self.side(Y)
        order = order.to(Y.device)
        return self.take(self.side(Y[order]), torch.argsort(order))

    def take(self, side, perm):
        # row i of Y[perm] is row perm[i] of Y, and sample j of Y is called perm⁻¹[j] there
        return torch.argsort(perm)[side[perm]]


@dataclass(frozen=True)
class MutualKNN(_Neighbours):
    """Mean share of the k cosine neighbours that X and Y agree on.

    Attributes:
        k: neighbours, in [1, n-1].
    """

    name: ClassVar[str] = "mutual_knn"
    k: int = 10

    def pair(self, a, b):
        shared = (a[:, :, None] == b[:, None, :]).sum()
        return float(shared) / a.numel()

    def null(self, prepared, perms):
        counts = perm_knn_overlap(prepared.a, prepared.b, perms)
        return counts.cpu().to(torch.float64) / prepared.a.numel()


@dataclass(frozen=True)
class CycleKNN(_Neighbours):
    """Share of samples i that come back: i is an X-neighbour of one of i's Y-neighbours.

    Attributes:
        k: neighbours, in [1, n-1].
    """

    name: ClassVar[str] = "cycle_knn"
    k: int = 10

    def pair(self, a, b):
        samples = torch.arange(len(a), device=a.device)
        back = (a[b] == samples[:, None, None]).flatten(1).any(dim=1)
        return float(back.sum()) / len(a)


@dataclass(frozen=True)
class CKNNA(_Neighbours):
    """CKA on the pairs that are neighbours in both, by HSIC₁ of the masked Gram matrices.

    sim(K, L) = HSIC₁(M∘K, M∘L) with M = M_K∘M_L, the masks holding for each row the k largest
    uncentred inner products, itself left out; the score is sim(K, L)/√(sim(K, K) sim(L, L)). The
    masks are not symmetric, and neither is the score. Its mean over unrelated data is positive.

    Attributes:
        k: neighbours, in [2, n-1].
    """

    name: ClassVar[str] = "cknna"
    k: int = 10
    least_k: ClassVar[int] = 2

    def similarity(self, X):
        return X @ X.T

    def side(self, X):
        gram = self.similarity(X)
        mask = neighbour_mask(nearest(gram, self.k))
        self_term = hsic_unbiased(mask * gram, mask * gram)
        if self_term <= 0:
            raise ValueError(f"k = {self.k} gives a self-similarity of {self_term:.3g} <= 0")
        return gram * mask / math.sqrt(self_term), mask

    def take(self, side, perm):
        return tuple(t[perm][:, perm] for t in side)

    def pair(self, a, b):
        (K, in_x), (L, in_y) = a, b
        return hsic_unbiased(K * in_y, L * in_x)

    def null(self, prepared, perms):
        # Only X's n·k edges can carry a shared neighbour, so each permutation reads L and its mask
        # there and nowhere else: O(n k) for what `pair` does in O(n²).
        (K, in_x), (L, in_y) = prepared
        n = len(K)
        at = torch.arange(n, device=K.device)[:, None]
        to = in_x.nonzero()[:, 1].view(n, self.k)
        weight, back = K[at, to], in_x[to, at]
        out = []
        for part in perms.split(max(1, 2**21 // to.numel())):
            here, there = part[:, :, None], part[:, to]
            V = weight * in_y[here, there]  # K∘M on the edges i→j
            W = L[here, there]  # L∘M on them
            mirrored = L[there, here] * back  # L∘M on j→i
            columns = torch.zeros(len(part), n, dtype=V.dtype, device=V.device)
            columns.scatter_add_(1, to.reshape(1, -1).expand(len(part), -1), V.flatten(1))
            trace = (V * mirrored).sum(dim=(1, 2))
            totals = V.sum(dim=(1, 2)) * W.sum(dim=(1, 2)) / ((n - 1) * (n - 2))
            cross = (columns * W.sum(dim=2)).sum(dim=1) / (n - 2)
            out.append((trace + totals - 2 * cross) / (n * (n - 3)))
        return torch.cat(out).cpu()


@dataclass(frozen=True)
class CCAMean(Metric):
    """Mean canonical correlation over min(rank X, rank Y) directions."""

    name: ClassVar[str] = "cca_mean"

    def side(self, X):
        return (_left_singular(X)[0],)

    def pair(self, a, b):
        return float(torch.linalg.svdvals(a[0].T @ b[0]).clamp(max=1.0).mean())


@dataclass(frozen=True)
class SVCCA(CCAMean):
    """`cca_mean` of the leading principal components that carry ``var`` of the variance.

    Attributes:
        var: share of the variance to keep, in (0, 1].
    """

    name: ClassVar[str] = "svcca"
    var: float = 0.99

    def __post_init__(self):
        if not 0 < self.var <= 1:
            raise ValueError(f"var must be in (0, 1]: got {self.var}")

    def side(self, X):
        U, S = _left_singular(X)
        share = (S**2).cumsum(0) / (S**2).sum()
        kept = int((share < self.var - 1e-12).sum()) + 1
        return (U[:, :kept],)


@dataclass(frozen=True)
class PWCCA(Metric):
    """Canonical correlations weighted by how much of X each canonical variate of X carries.

    Σ α_i ρ_i / Σ α_i with α_i = Σ_j |⟨h_i, x_j⟩|, h_i the canonical variates of X and x_j its
    centred columns. Not symmetric in X and Y.
    """

    name: ClassVar[str] = "pwcca"

    def side(self, X):
        U, _ = _left_singular(X)
        # h_i = U w_i, so that ⟨h_i, x_j⟩ needs of X only Uᵀ X
        return U, U.T @ centre(X)

    def take(self, side, perm):
        return side[0][perm], side[1]

    def pair(self, a, b):
        W, rho, _ = torch.linalg.svd(a[0].T @ b[0], full_matrices=False)
        alpha = (W.T @ a[1]).abs().sum(dim=1)
        return float((alpha * rho.clamp(max=1.0)).sum() / alpha.sum())


@dataclass(frozen=True)
class Procrustes(Metric):
    """1 - (distance of Y to the best rotation of X)/‖Y‖, both centred; may be negative.

    1 - √(‖X_c‖² + ‖Y_c‖² - 2‖X_cᵀY_c‖_*)/‖Y_c‖. Scale matters, and X and Y are not exchangeable.
    """

    name: ClassVar[str] = "procrustes"

    def side(self, X):
        X = centre(X)
        if X.shape[1] > len(X):
            # a rotation of the features, which changes nothing: U S holds all of it
            U, S = _left_singular(X)
            X = U * S
        return (X,)

    def pair(self, a, b):
        X, Y = a[0], b[0]
        nuclear = torch.linalg.svdvals(X.T @ Y).sum()
        squared = X.square().sum() + Y.square().sum() - 2 * nuclear
        return float(1 - squared.clamp(min=0.0).sqrt() / Y.norm())


METRICS: dict[str, type[Metric]] = {
    cls.name: cls
    for cls in (
        CKALinear,
        CKAUnbiased,
        CKARbf,
        MutualKNN,
        CycleKNN,
        CKNNA,
        RSA,
        CCAMean,
        SVCCA,
        PWCCA,
        Procrustes,
    )
}
"""Every metric that row permutations calibrate, by name."""


def metric(name: str, **params: float) -> Metric:
    """The metric called ``name``, with its parameters.

    Args:
        name: a key of `METRICS`.
        params: ``k`` of the neighbour metrics (default 10), ``sigma_frac`` of ``cka_rbf`` (1.0),
            ``var`` of ``svcca`` (0.99).

    Raises:
        ValueError: no such metric, a parameter that it does not have, or a bad value.
    """
    if name == "local_distance_agreement":
        raise ValueError(
            "name must not be 'local_distance_agreement': permuting rows leaves it almost no "
            "shared neighbours to compare. Use local_distance_test"
        )
    if name not in METRICS:
        raise ValueError(f"name must be one of {', '.join(METRICS)}: got {name!r}")
    known = inspect.signature(METRICS[name]).parameters
    for param in params:
        if param not in known:
            has = ", ".join(known) or "none"
            raise ValueError(f"{param} is no parameter of {name}, which has: {has}")
    return METRICS[name](**params)


# --------------------------------------------------------------------------------------------
# The same scores as functions


def cka_linear(X: object, Y: object) -> float:
    """Linear centred kernel alignment (Kornblith et al. 2019), in [0, 1].

    ⟨K_c, L_c⟩/(‖K_c‖‖L_c‖) with K = XXᵀ, L = YYᵀ. Where both widths are below n it is computed
    as ‖Y_cᵀX_c‖²/(‖X_cᵀX_c‖‖Y_cᵀY_c‖), which is the same number from smaller matrices.

    Args:
        X: (n, d_x) tensor or array, n >= 4.
        Y: (n, d_y).

    Raises:
        ValueError: bad input; "zero variance" when all rows of one are equal.
    """
    X, Y = as_pair(X, Y)
    if max(X.shape[1], Y.shape[1]) >= len(X):
        return CKALinear().raw(X, Y)
    X, Y = centre(X), centre(Y)
    cross = (Y.T @ X).square().sum()
    return float(cross / ((X.T @ X).norm() * (Y.T @ Y).norm()))


def cka_unbiased(X: object, Y: object) -> float:
    """CKA from the unbiased HSIC₁: near 0 for unrelated data, may be negative, at most 1.

    HSIC₁(K, L)/√(HSIC₁(K, K) HSIC₁(L, L)). X: (n, d_x), Y: (n, d_y), n >= 4. ValueError as in
    `cka_linear`.
    """
    return CKAUnbiased().raw(X, Y)


def cka_rbf(X: object, Y: object, *, sigma_frac: float = 1.0) -> float:
    """CKA with a Gaussian kernel, its bandwidth ``sigma_frac`` times the median distance.

    X: (n, d_x), Y: (n, d_y), n >= 4. ValueError also when the median distance is 0.
    """
    return CKARbf(sigma_frac=sigma_frac).raw(X, Y)


def mutual_knn(X: object, Y: object, *, k: int = 10) -> float:
    """Mean share of common cosine neighbours (Huh et al. 2024), in [0, 1].

    X: (n, d_x), Y: (n, d_y); ``k`` in [1, n-1]. Ties go to the lower index.
    """
    return MutualKNN(k=k).raw(X, Y)


def cycle_knn(X: object, Y: object, *, k: int = 10) -> float:
    """Share of samples i with i ∈ ∪_{j ∈ N_Y(i)} N_X(j), in [0, 1]. Not symmetric."""
    return CycleKNN(k=k).raw(X, Y)


def cknna(X: object, Y: object, *, k: int = 10) -> float:
    """Centred kernel nearest-neighbour alignment (Huh et al. 2024); ``k`` in [2, n-1]."""
    return CKNNA(k=k).raw(X, Y)


def rsa(X: object, Y: object) -> float:
    """Representational similarity analysis: Spearman correlation of the distances, in [-1, 1]."""
    return RSA().raw(X, Y)


def cca_mean(X: object, Y: object) -> float:
    """Mean canonical correlation, in [0, 1]; it is 1 for any data once a rank reaches n-1."""
    return CCAMean().raw(X, Y)


def svcca(X: object, Y: object, *, var: float = 0.99) -> float:
    """Mean canonical correlation of the components that carry ``var`` of the variance."""
    return SVCCA(var=var).raw(X, Y)


def pwcca(X: object, Y: object) -> float:
    """Projection-weighted canonical correlation, weighted by the columns of X, in [0, 1]."""
    return PWCCA().raw(X, Y)


def procrustes(X: object, Y: object) -> float:
    """1 - relative distance after the best rotation of X onto Y; at most 1."""
    return Procrustes().raw(X, Y)


# --------------------------------------------------------------------------------------------
# Local distances, and closed forms under the null


class SharedPairs(NamedTuple):
    """Distances over the pairs that are neighbours in both representations.

    Attributes:
        x: (n_pairs,) float64 distances in X.
        y: (n_pairs,) the same pairs in Y.
    """

    x: torch.Tensor
    y: torch.Tensor


def shared_neighbour_distances(X: object, Y: object, *, k: int) -> SharedPairs:
    """Euclidean distances of the unordered pairs joined by one directed edge in both kNN graphs.

    X: (n, d_x), Y: (n, d_y); cosine neighbours, ``k`` in [1, n-1].
    """
    X, Y = as_pair(X, Y)
    both = neighbour_mask(knn_indices(X, k)) * neighbour_mask(knn_indices(Y, k))
    i, j = torch.nonzero(torch.triu(both + both.T), as_tuple=True)
    return SharedPairs((X[i] - X[j]).norm(dim=1), (Y[i] - Y[j]).norm(dim=1))


def local_distance_agreement(X: object, Y: object, *, k: int = 10) -> float:
    """Spearman correlation of the distances over the neighbour pairs that X and Y share.

    This book's own score: it asks whether neighbours agree on how far apart they are, given that
    they agree on who is a neighbour. Do not calibrate it by permuting rows; see
    `shared_neighbour_distances` and the test built on it.

    Returns:
        The correlation; nan with fewer than 10 shared pairs, or when all distances are equal.
    """
    return distance_correlation(shared_neighbour_distances(X, Y, k=k))


def distance_correlation(pairs: SharedPairs) -> float:
    """Spearman correlation of the two columns; nan with fewer than 10 pairs or a constant one."""
    x, y = (t.cpu().numpy() for t in pairs)
    if len(x) < 10 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(spearmanr(x, y).statistic)


def expected_null_cka(X: object, Y: object) -> float:
    r"""The exact mean of linear CKA over all permutations of the rows of Y.

    E_π⟨K_c, P L_c Pᵀ⟩ = tr(K_c) tr(L_c)/(n-1), because P L_c Pᵀ averages to the multiple of H
    that has the same trace; divide by the norms, which no permutation changes. For independent
    Gaussian features of width d it is about d/(n + d).

    X: (n, d_x), Y: (n, d_y). ValueError as in `cka_linear`.
    """
    X, Y = as_pair(X, Y)
    K, L = (Z @ Z.T for Z in (centre(X), centre(Y)))
    return float(K.trace() * L.trace() / ((len(X) - 1) * K.norm() * L.norm()))


def expected_null_mknn(n: int, k: int) -> float:
    """The exact mean of mutual kNN over all permutations: k/(n-1).

    Each of the k neighbours of a sample is, under a random pairing, any of the n-1 others.

    Raises:
        ValueError: n < 4 or k outside [1, n-1].
    """
    if n < 4:
        raise ValueError(f"n must be at least 4: got {n}")
    _check_k(k, n)
    return k / (n - 1)
