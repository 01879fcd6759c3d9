"""How alike two representations of the same samples are: the field's scores, and their nulls.

Every score compares two feature matrices with equal rows. Each is built from one preparation a
side (a normalised Gram matrix, a neighbour list, an orthonormal basis), so that permuting the rows
of one side costs a re-pairing and never a new preparation. All arithmetic is in float64.

Scores have the upper end 1; centred and unbiased ones may be negative.
"""

import math
from typing import NamedTuple

import torch
from scipy.stats import rankdata

from icmllab.kernels.perm_bilinear import perm_bilinear
from icmllab.kernels.perm_knn_overlap import perm_knn_overlap

MIN_SAMPLES = 4


class Prepared(NamedTuple):
    """Both sides of a comparison, ready for any pairing of their rows."""

    x: object
    y: object


def as_features(name: str, X: object) -> torch.Tensor:
    """``X`` as a (n_samples, n_features) float64 tensor.

    Raises:
        ValueError: not 2-D, fewer than 4 samples, or non-finite entries.
    """
    X = torch.as_tensor(X).double()
    if X.ndim != 2 or X.shape[1] == 0:
        raise ValueError(f"{name} must be (n_samples, n_features): got shape {tuple(X.shape)}")
    if len(X) < MIN_SAMPLES:
        raise ValueError(f"{name} must have at least {MIN_SAMPLES} samples: got {len(X)}")
    if not torch.isfinite(X).all():
        raise ValueError(f"{name} must be finite: it holds inf or nan")
    return X


def as_pair(X: object, Y: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Two feature matrices over the same samples, as :func:`as_features` gives them."""
    X, Y = as_features("X", X), as_features("Y", Y)
    if len(X) != len(Y):
        raise ValueError(f"X and Y must have equal n_samples: got {len(X)} and {len(Y)}")
    return X, Y


# Preparations of one side


def centre(X: torch.Tensor) -> torch.Tensor:
    """``X`` (n, d) with the mean of each column taken off."""
    return X - X.mean(dim=0)


def squared_distances(X: torch.Tensor) -> torch.Tensor:
    """(n, n) squared Euclidean distances with an exact zero diagonal."""
    gram = X @ X.T
    norms = gram.diagonal()
    squared = (norms[:, None] + norms[None, :] - 2 * gram).clamp_min_(0)
    return squared.fill_diagonal_(0)


def centred_gram(K: torch.Tensor) -> torch.Tensor:
    """H K H with H = I - 11ᵀ/n, for a symmetric K (n, n)."""
    rows = K.mean(dim=1)
    return K - rows[:, None] - rows[None, :] + rows.mean()


def u_centred_gram(K: torch.Tensor) -> torch.Tensor:
    """The U-centred form of a symmetric K (n, n): HSIC₁(K, L) = ⟨U_K, U_L⟩ / (n(n-3))."""
    n = len(K)
    K = K.clone().fill_diagonal_(0)
    rows = K.sum(dim=1)
    U = K - (rows[:, None] + rows[None, :]) / (n - 2) + rows.sum() / ((n - 1) * (n - 2))
    return U.fill_diagonal_(0)


def unit(M: torch.Tensor, *, reference: float) -> torch.Tensor:
    """``M`` over its Frobenius norm.

    Raises:
        ValueError: "zero variance", when the norm is zero beside ``reference``, the scale before
            centring.
    """
    norm = torch.linalg.vector_norm(M).item()
    if norm <= 1e-13 * reference or norm == 0:
        raise ValueError("zero variance: the representation does not vary over the samples")
    return M / norm


def rbf_gram(X: torch.Tensor, *, sigma_frac: float) -> torch.Tensor:
    """exp(-|x - x'|² / 2σ²), σ² = sigma_frac² times the median off-diagonal squared distance."""
    squared = squared_distances(X)
    off = squared[~torch.eye(len(X), dtype=torch.bool, device=X.device)]
    # the median of an even count is the mean of the middle two, as NumPy has it
    median = torch.quantile(off, 0.5).item() if off.numel() <= 2**24 else off.median().item()
    if median <= 0:
        raise ValueError("zero variance: half of the distances are zero, so the RBF has no width")
    return torch.exp(-squared / (2 * sigma_frac**2 * median))


def smallest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """(n, k) column indices of each row's k smallest entries, itself excluded.

    Ties go to the lower index: the sort is stable, which ``topk`` does not promise.
    """
    scores = scores.clone().fill_diagonal_(math.inf)
    return torch.sort(scores, dim=1, stable=True).indices[:, :k]


def knn(X: torch.Tensor, k: int, *, by: str = "cosine") -> torch.Tensor:
    """(n, k) nearest neighbours, self excluded, ties to the lower index.

    Args:
        X: (n, d) float64.
        k: neighbours, 1..n-1.
        by: ``cosine``, ``euclidean`` or ``inner`` (largest inner product).
    """
    if not 1 <= k <= len(X) - 1:
        raise ValueError(f"k must be in 1..{len(X) - 1}: got {k}")
    if by == "euclidean":
        return smallest(squared_distances(X), k)
    if by == "cosine":
        X = X / torch.linalg.vector_norm(X, dim=1, keepdim=True).clamp_min(1e-300)
    elif by != "inner":
        raise ValueError(f"by must be cosine, euclidean or inner: got {by!r}")
    return smallest(-(X @ X.T), k)


def knn_mask(index: torch.Tensor) -> torch.Tensor:
    """The (n, n) 0/1 matrix of a neighbour list (n, k); row i marks the neighbours of i."""
    n = len(index)
    return torch.zeros(n, n, dtype=torch.float64, device=index.device).scatter_(1, index, 1.0)


def inverse_permutation(perm: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes ``perm`` (n,)."""
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(len(perm), device=perm.device)
    return inverse


def permute_neighbours(index: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """The neighbour list of the rows X[perm], from the list of X: no distance is recomputed."""
    return inverse_permutation(perm)[index[perm]]


def left_basis(X: torch.Tensor) -> torch.Tensor:
    """Left singular vectors of the centred X whose singular value exceeds 1e-10 of the largest."""
    U, S, _ = torch.linalg.svd(centre(X), full_matrices=False)
    if S[0] <= 1e-13 * torch.linalg.vector_norm(X):
        raise ValueError("zero variance: the representation does not vary over the samples")
    return U[:, 1e-10 * S[0] < S]


# Metrics


class Metric:
    """A similarity score with its null under permutations.

    Attributes:
        name: its name in :data:`METRICS`.
        upper: the largest value it can take.
    """

    name: str
    upper = 1.0

    def side(self, X: torch.Tensor) -> object:
        """What one side brings to a comparison, made once; X is (n, d) float64."""
        raise NotImplementedError

    def paired(self, x: object, y: object, perm: torch.Tensor) -> float:
        """The score of two sides when row i of X meets row perm[i] of Y."""
        raise NotImplementedError

    def prepare(self, X: object, Y: object) -> Prepared:
        """Both sides of a comparison: X (n, d_x), Y (n, d_y)."""
        X, Y = as_pair(X, Y)
        return Prepared(self.side(X), self.side(Y))

    def null(self, prepared: Prepared, perms: torch.Tensor) -> torch.Tensor:
        """The score under each row of ``perms`` (B, n): (B,) float64 on the CPU."""
        scores = [self.paired(prepared.x, prepared.y, perm) for perm in perms.long()]
        return torch.tensor(scores, dtype=torch.float64)

    def raw(self, X: object, Y: object) -> float:
        """The score itself."""
        X, Y = as_pair(X, Y)
        identity = torch.arange(len(X), device=X.device)[None]
        return self.null(Prepared(self.side(X), self.side(Y)), identity)[0].item()


class BilinearMetric(Metric):
    """A score that is the inner product of one matrix a side: s(perm) = Σ K_ij L_perm(i)perm(j)."""

    symmetric = True

    def side(self, X: torch.Tensor) -> torch.Tensor:
        """The side's matrix (n, n), normalised so that the score is a plain inner product."""
        raise NotImplementedError

    def null(self, prepared: Prepared, perms: torch.Tensor) -> torch.Tensor:
        perms = perms.to(prepared.x.device)
        scores = perm_bilinear(prepared.x, prepared.y, perms, symmetric=self.symmetric)
        return scores.cpu()


class CKALinear(BilinearMetric):
    """Centred kernel alignment of linear Grams."""

    name = "cka_linear"

    def side(self, X: torch.Tensor) -> torch.Tensor:
        centred = centre(X)
        return unit(centred @ centred.T, reference=torch.linalg.vector_norm(X).item() ** 2)


class CKAUnbiased(BilinearMetric):
    """CKA of the unbiased HSIC₁: U-centred linear Grams."""

    name = "cka_unbiased"

    def side(self, X: torch.Tensor) -> torch.Tensor:
        K = X @ X.T
        return unit(u_centred_gram(K), reference=torch.linalg.vector_norm(K).item())


class CKARBF(BilinearMetric):
    """CKA of Gaussian Grams of width ``sigma_frac`` times the median distance."""

    name = "cka_rbf"

    def __init__(self, sigma_frac: float = 1.0):
        if not sigma_frac > 0 or not math.isfinite(sigma_frac):
            raise ValueError(f"sigma_frac must be positive and finite: got {sigma_frac}")
        self.sigma_frac = sigma_frac

    def side(self, X: torch.Tensor) -> torch.Tensor:
        K = rbf_gram(X, sigma_frac=self.sigma_frac)
        return unit(centred_gram(K), reference=torch.linalg.vector_norm(K).item())


class RSA(BilinearMetric):
    """Spearman correlation of the two distance matrices (ties averaged)."""

    name = "rsa"

    def side(self, X: torch.Tensor) -> torch.Tensor:
        n = len(X)
        upper = torch.triu_indices(n, n, offset=1)
        distances = squared_distances(X).sqrt()[upper[0], upper[1]]
        ranks = torch.from_numpy(rankdata(distances.cpu().numpy())).to(X.device)
        R = torch.zeros(n, n, dtype=torch.float64, device=X.device)
        R[upper[0], upper[1]] = ranks - ranks.mean()
        return unit(R + R.T, reference=float(n * n))


class MutualKNN(Metric):
    """Share of cosine neighbours that both sides name."""

    name = "mutual_knn"

    def __init__(self, k: int = 10):
        self.k = _positive("k", k)

    def side(self, X: torch.Tensor) -> torch.Tensor:
        return knn(X, self.k)

    def null(self, prepared: Prepared, perms: torch.Tensor) -> torch.Tensor:
        shared = perm_knn_overlap(prepared.x, prepared.y, perms.to(prepared.x.device))
        return shared.cpu().double() / prepared.x.numel()


class CycleKNN(Metric):
    """Share of points that are a neighbour, in X, of one of their own neighbours in Y."""

    name = "cycle_knn"

    def __init__(self, k: int = 10):
        self.k = _positive("k", k)

    def side(self, X: torch.Tensor) -> torch.Tensor:
        return knn(X, self.k)

    def paired(self, x: torch.Tensor, y: torch.Tensor, perm: torch.Tensor) -> float:
        own = torch.arange(len(x), device=x.device)[:, None, None]
        back = x[permute_neighbours(y, perm.to(x.device))]  # (n, k, k)
        return (back == own).flatten(1).any(dim=1).double().mean().item()


class CKNNA(Metric):
    """HSIC₁ restricted to pairs that are neighbours on both sides (not symmetric)."""

    name = "cknna"

    def __init__(self, k: int = 10):
        if k < 2:
            raise ValueError(f"k must be at least 2: got {k}")
        self.k = k

    def side(self, X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return X @ X.T, knn_mask(knn(X, self.k, by="inner"))

    def paired(self, x, y, perm: torch.Tensor) -> float:
        K, mask_k = x
        perm = perm.to(K.device)
        L, mask_l = (M[perm][:, perm] for M in y)
        cross = _masked_hsic(K, L, mask_k * mask_l)
        own = [_masked_hsic(G, G, M) for G, M in ((K, mask_k), (L, mask_l))]
        if min(own) <= 0:
            raise ValueError(f"cknna needs positive self-terms: got {own[0]:.3g}, {own[1]:.3g}")
        return cross / math.sqrt(own[0] * own[1])


def _masked_hsic(K: torch.Tensor, L: torch.Tensor, mask: torch.Tensor) -> float:
    """HSIC₁ of two matrices under one mask that need not be symmetric."""
    n = len(K)
    K, L = (mask * K).fill_diagonal_(0), (mask * L).fill_diagonal_(0)
    trace = (K * L.T).sum()
    outer = K.sum() * L.sum() / ((n - 1) * (n - 2))
    mixed = 2 * (K.sum(dim=0) @ L.sum(dim=1)) / (n - 2)
    return ((trace + outer - mixed) / (n * (n - 3))).item()


class CCAMean(Metric):
    """Mean canonical correlation over the smaller rank."""

    name = "cca_mean"

    def side(self, X: torch.Tensor) -> torch.Tensor:
        return left_basis(X)

    def paired(self, x: torch.Tensor, y: torch.Tensor, perm: torch.Tensor) -> float:
        return _canonical(x, y[perm.to(y.device)]).mean().item()


def _canonical(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Canonical correlations of two orthonormal bases, at most 1, largest first."""
    return torch.linalg.svdvals(x.T @ y).clamp_max(1.0)


class SVCCA(CCAMean):
    """Mean canonical correlation of the principal components that carry ``var`` of the variance."""

    name = "svcca"

    def __init__(self, var: float = 0.99):
        if not 0 < var <= 1:
            raise ValueError(f"var must be in (0, 1]: got {var}")
        self.var = var

    def side(self, X: torch.Tensor) -> torch.Tensor:
        U, S, _ = torch.linalg.svd(centre(X), full_matrices=False)
        if S[0] <= 1e-13 * torch.linalg.vector_norm(X):
            raise ValueError("zero variance: the representation does not vary over the samples")
        share = torch.cumsum(S**2, dim=0) / (S**2).sum()
        keep = int((share < self.var - 1e-12).sum()) + 1
        return U[:, :keep][:, S[:keep] > 1e-10 * S[0]]


class PWCCA(Metric):
    """Canonical correlations weighted by how much of X each canonical variate accounts for."""

    name = "pwcca"

    def side(self, X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return left_basis(X), centre(X)

    def paired(self, x, y, perm: torch.Tensor) -> float:
        (basis_x, features), (basis_y, _) = x, y
        left, rho, _ = torch.linalg.svd(basis_x.T @ basis_y[perm.to(basis_y.device)])
        variates = basis_x @ left[:, : len(rho)]
        weights = (variates.T @ features).abs().sum(dim=1)
        return ((weights * rho.clamp_max(1.0)).sum() / weights.sum()).item()


class Procrustes(Metric):
    """One minus the distance of Y to X after the best rotation and no scaling, over |Y|."""

    name = "procrustes"

    def side(self, X: torch.Tensor) -> torch.Tensor:
        centred = centre(X)
        if torch.linalg.vector_norm(centred) <= 1e-13 * torch.linalg.vector_norm(X):
            raise ValueError("zero variance: the representation does not vary over the samples")
        return centred

    def paired(self, x: torch.Tensor, y: torch.Tensor, perm: torch.Tensor) -> float:
        nuclear = torch.linalg.svdvals(x.T @ y[perm.to(y.device)]).sum()
        norm_y = torch.linalg.vector_norm(y)
        squared = torch.linalg.vector_norm(x) ** 2 + norm_y**2 - 2 * nuclear
        return (1 - squared.clamp_min(0).sqrt() / norm_y).item()


def _positive(name: str, value: int) -> int:
    if int(value) != value or value < 1:
        raise ValueError(f"{name} must be a positive whole number: got {value}")
    return int(value)


METRICS: dict[str, type[Metric]] = {
    cls.name: cls
    for cls in (
        CKALinear,
        CKAUnbiased,
        CKARBF,
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


def metric(name: str, **params: float) -> Metric:
    """The metric called ``name``; ``params`` are its own (``k``, ``sigma_frac``, ``var``).

    Raises:
        ValueError: no such metric, or a parameter that it does not take.
    """
    if name not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}: got {name!r}")
    try:
        return METRICS[name](**params)
    except TypeError:
        raise ValueError(f"metric {name} does not take {', '.join(params)}") from None


# The scores as functions


def cka_linear(X: object, Y: object) -> float:
    """Linear CKA, by features when they are fewer than the samples, else by Grams.

    X (n, d_x), Y (n, d_y). Kornblith et al. (2019).
    """
    X, Y = as_pair(X, Y)
    if max(X.shape[1], Y.shape[1]) >= len(X):
        return metric("cka_linear").raw(X, Y)
    norm = torch.linalg.vector_norm
    x, y = centre(X), centre(Y)
    own = [norm(c.T @ c).item() for c in (x, y)]
    for value, whole in zip(own, (X, Y), strict=True):
        if value <= 1e-13 * norm(whole).item() ** 2:
            raise ValueError("zero variance: the representation does not vary over the samples")
    return norm(y.T @ x).item() ** 2 / (own[0] * own[1])


def cka_unbiased(X: object, Y: object) -> float:
    """CKA of the unbiased HSIC₁ (Song et al. 2012): zero in the mean for unrelated data."""
    return metric("cka_unbiased").raw(X, Y)


def cka_rbf(X: object, Y: object, *, sigma_frac: float = 1.0) -> float:
    """CKA of Gaussian Grams; a width below a neighbourhood's size compares local distances."""
    return metric("cka_rbf", sigma_frac=sigma_frac).raw(X, Y)


def mutual_knn(X: object, Y: object, *, k: int = 10) -> float:
    """Mean share of the k cosine neighbours that both sides name (Huh et al. 2024)."""
    return metric("mutual_knn", k=k).raw(X, Y)


def cycle_knn(X: object, Y: object, *, k: int = 10) -> float:
    """Share of points i with i among the X-neighbours of its Y-neighbours."""
    return metric("cycle_knn", k=k).raw(X, Y)


def cknna(X: object, Y: object, *, k: int = 10) -> float:
    """HSIC₁ over pairs that are neighbours on both sides, over the sides' own terms."""
    return metric("cknna", k=k).raw(X, Y)


def rsa(X: object, Y: object) -> float:
    """Representational similarity analysis: Spearman correlation of the distances."""
    return metric("rsa").raw(X, Y)


def cca_mean(X: object, Y: object) -> float:
    """Mean canonical correlation."""
    return metric("cca_mean").raw(X, Y)


def svcca(X: object, Y: object, *, var: float = 0.99) -> float:
    """Singular-vector CCA (Raghu et al. 2017)."""
    return metric("svcca", var=var).raw(X, Y)


def pwcca(X: object, Y: object) -> float:
    """Projection-weighted CCA (Morcos et al. 2018)."""
    return metric("pwcca").raw(X, Y)


def procrustes(X: object, Y: object) -> float:
    """One minus the orthogonal Procrustes distance over |Y|; sides of unequal width are allowed."""
    return metric("procrustes").raw(X, Y)


class SharedPairs(NamedTuple):
    """Pairs of points that are neighbours on both sides, with their distances.

    Attributes:
        i, j: (n_pairs,) the points, i < j.
        x, y: (n_pairs,) the distances of each pair on each side.
    """

    i: torch.Tensor
    j: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor


def shared_pairs(X: object, Y: object, *, k: int = 10) -> SharedPairs:
    """The unordered pairs of which some directed edge stands in both cosine kNN graphs."""
    X, Y = as_pair(X, Y)
    both = (knn_mask(knn(X, k)) * knn_mask(knn(Y, k))) > 0
    i, j = torch.nonzero(torch.triu(both | both.T, diagonal=1), as_tuple=True)
    return SharedPairs(i, j, *(torch.linalg.vector_norm(Z[i] - Z[j], dim=1) for Z in (X, Y)))


def local_distance_agreement(X: object, Y: object, *, k: int = 10) -> float:
    """Spearman correlation of distances over the pairs that are neighbours on both sides.

    Nan with fewer than 10 such pairs. Its null is no row permutation (a permuted side shares next
    to no pair): permute the distances over the fixed pairs instead.
    """
    from scipy.stats import spearmanr

    pairs = shared_pairs(X, Y, k=k)
    if len(pairs.i) < 10:
        return math.nan
    return float(spearmanr(pairs.x.cpu().numpy(), pairs.y.cpu().numpy()).statistic)


# Closed forms under the null


def expected_null_cka(X: object, Y: object) -> float:
    """The exact mean of linear CKA over all permutations of the rows of Y.

    tr K tr L / ((n-1) |K| |L|) for centred Grams K, L, since the permutation average of P L Pᵀ is
    the matrix with constant diagonal and constant off-diagonal of the same trace.
    """
    X, Y = as_pair(X, Y)
    grams = [c @ c.T for c in (centre(X), centre(Y))]
    trace = math.prod(g.trace().item() for g in grams)
    norm = math.prod(torch.linalg.vector_norm(g).item() for g in grams)
    if norm == 0:
        raise ValueError("zero variance: the representation does not vary over the samples")
    return trace / ((len(X) - 1) * norm)


def expected_null_mknn(n: int, k: int) -> float:
    """The exact mean of mutual kNN over all permutations: k / (n - 1)."""
    if not 1 <= k <= n - 1:
        raise ValueError(f"k must be in 1..{n - 1}: got {k}")
    return k / (n - 1)
