"""Alignments between feature spaces: the small linear algebra that several papers share.

Two matrices of features with matched rows are aligned by a rotation, a similarity or an affine
map; several at once by generalised Procrustes analysis (rigid maps) or by generalised canonical
correlation analysis (maps that whiten). Rows are samples, maps act from the right.
"""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch


def as_matrix(name: str, X: object) -> torch.Tensor:
    """``X`` as a finite two-dimensional floating tensor; arrays and integers become float64.

    Raises:
        ValueError: not two-dimensional, empty, not real, or not finite.
    """
    X = torch.as_tensor(X)
    if X.is_complex() or X.dtype == torch.bool:
        raise ValueError(f"{name} must hold real numbers: got dtype {X.dtype}")
    if not X.is_floating_point():
        X = X.double()
    if X.ndim != 2 or 0 in X.shape:
        raise ValueError(f"{name} must be 2-D and not empty: got shape {tuple(X.shape)}")
    if not torch.isfinite(X).all():
        raise ValueError(f"{name} must be finite: it holds NaN or infinity")
    return X


def orthogonal_procrustes(A: object, B: object, *, reflection: bool = True) -> torch.Tensor:
    """The map R with orthonormal columns or rows that minimises ``‖A R − B‖``_F.

    With AᵀB = P S Qᵀ, R = P Qᵀ (Schönemann, 1966).

    Args:
        A: (n_samples, d_a) tensor or array.
        B: (n_samples, d_b), of the same rows; centre both first if a translation may be between.
        reflection: False gives a rotation, det R = +1, by turning the last singular direction;
            this needs d_a == d_b.

    Returns:
        (d_a, d_b) in the wider of the two dtypes; orthogonal when d_a == d_b.

    Raises:
        ValueError: rows that do not match, values that are not finite, or ``reflection=False`` for
            a map that is not square.
    """
    A, B = as_matrix("A", A), as_matrix("B", B)
    if len(A) != len(B):
        raise ValueError(f"A and B must have the same number of rows: got {len(A)} and {len(B)}")
    dtype = torch.promote_types(A.dtype, B.dtype)
    P, _, Qt = torch.linalg.svd(A.to(dtype).T @ B.to(dtype), full_matrices=False)
    if not reflection:
        if A.shape[1] != B.shape[1]:
            raise ValueError(
                "reflection=False needs maps between spaces of one width: "
                f"got {A.shape[1]} and {B.shape[1]}"
            )
        if torch.linalg.det(P) * torch.linalg.det(Qt) < 0:
            P = P.clone()
            P[:, -1] = -P[:, -1]
    return P @ Qt


class Similarity(NamedTuple):
    """The map x → ``scale`` · x ``rotation``.

    Attributes:
        scale: >= 0.
        rotation: (d_a, d_b), as from :func:`orthogonal_procrustes`.
    """

    scale: float
    rotation: torch.Tensor

    def __call__(self, A: torch.Tensor) -> torch.Tensor:
        """(n, d_a) → (n, d_b)."""
        return self.scale * (A @ self.rotation)


def scaled_procrustes(A: object, B: object, *, reflection: bool = True) -> Similarity:
    """The scale s and map R that minimise ``‖s A R − B‖``_F.

    R does not depend on s, and s = ⟨A R, B⟩ / ‖A R‖².

    Args:
        A: (n_samples, d_a) tensor or array, not zero.
        B: (n_samples, d_b).
        reflection: as in :func:`orthogonal_procrustes`. Without reflections the best rotation may
            still point away from B; s is then 0.

    Raises:
        ValueError: as in :func:`orthogonal_procrustes`, or an ``A`` of zeros.
    """
    R = orthogonal_procrustes(A, B, reflection=reflection)
    turned, B = as_matrix("A", A).to(R.dtype) @ R, as_matrix("B", B).to(R.dtype)
    energy = turned.square().sum()
    if not energy > 0:
        raise ValueError("A must not be zero: no scale maps it to anything else")
    return Similarity(max(0.0, float((turned * B).sum() / energy)), R)


class Affine(NamedTuple):
    """The map x → x ``weight`` + ``bias``.

    Attributes:
        weight: (d_a, d_b).
        bias: (d_b,).
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, A: torch.Tensor) -> torch.Tensor:
        """(n, d_a) → (n, d_b)."""
        return A @ self.weight + self.bias


def affine_map(A: object, B: object, *, ridge: float = 0.0) -> Affine:
    """The affine map that minimises ``‖A W + 1bᵀ − B‖² + ℓ‖W‖²``; the bias is not penalised.

    Args:
        A: (n_samples, d_a) tensor or array.
        B: (n_samples, d_b).
        ridge: ℓ in units of the mean eigenvalue tr(A_cᵀA_c)/d_a of the centred A, >= 0. At 0 the
            map of least norm is taken where several fit equally well.

    Raises:
        ValueError: rows that do not match, values that are not finite, a negative ridge.
    """
    A, B = as_matrix("A", A), as_matrix("B", B)
    if len(A) != len(B):
        raise ValueError(f"A and B must have the same number of rows: got {len(A)} and {len(B)}")
    if not 0 <= ridge < math.inf:
        raise ValueError(f"ridge must be finite and >= 0: got {ridge}")
    dtype = torch.promote_types(A.dtype, B.dtype)
    A, B = A.to(dtype), B.to(dtype)
    a, b = A.mean(dim=0), B.mean(dim=0)
    centred = A - a
    P, s, Qt = torch.linalg.svd(centred, full_matrices=False)
    # the same cut as NumPy's and SciPy's least squares use
    keep = s > torch.finfo(dtype).eps * max(A.shape) * s[0]
    level = ridge * s.square().sum() / A.shape[1]
    gain = torch.where(keep, s / (s.square() + level).clamp(min=torch.finfo(dtype).tiny), 0)
    W = Qt.T @ (gain[:, None] * (P.T @ (B - b)))
    return Affine(W, b - a @ W)


def psd_power(S: object, power: float, *, rtol: float | None = None) -> torch.Tensor:
    """``S**power`` of a symmetric positive semi-definite matrix, by its eigenvalues.

    Args:
        S: (d, d) symmetric tensor or array.
        power: any real number; −0.5 whitens. A negative power of a singular matrix is the power of
            its pseudo-inverse: directions without energy stay without.
        rtol: eigenvalues at most ``rtol`` times the largest count as 0; d times the rounding
            error of the dtype by default.

    Returns:
        (d, d), symmetric.

    Raises:
        ValueError: not square, not symmetric, not finite, or an eigenvalue below 0 beyond rounding.
    """
    S = as_matrix("S", S)
    if S.shape[0] != S.shape[1]:
        raise ValueError(f"S must be square: got shape {tuple(S.shape)}")
    if not math.isfinite(power):
        raise ValueError(f"power must be finite: got {power}")
    size = S.abs().max()
    eps = torch.finfo(S.dtype).eps
    if (S - S.T).abs().max() > 100 * len(S) * eps * size:
        raise ValueError("S must be symmetric: S and its transpose differ beyond rounding")
    values, vectors = torch.linalg.eigh((S + S.T) / 2)
    cut = (len(S) * eps if rtol is None else rtol) * values[-1].clamp(min=0.0)
    if values[0] < -max(float(cut), float(100 * len(S) * eps * size)):
        raise ValueError(f"S must be positive semi-definite: it has eigenvalue {float(values[0])}")
    keep = values > cut
    powers = torch.where(keep, torch.where(keep, values, 1).pow(power), 0)
    return (vectors * powers) @ vectors.T


class PCA(NamedTuple):
    """Principal axes of a data set.

    Attributes:
        mean: (d,).
        components: (d, k), orthonormal columns, most variance first; the largest entry of each is
            positive, so that the same data give the same axes.
        variances: (k,), of the data along them, over n.
    """

    mean: torch.Tensor
    components: torch.Tensor
    variances: torch.Tensor

    def project(self, X: torch.Tensor) -> torch.Tensor:
        """(n, d) → (n, k) coordinates along the axes."""
        return (X - self.mean) @ self.components

    def whiten(self, X: torch.Tensor) -> torch.Tensor:
        """(n, d) → (n, k) coordinates, each divided by its standard deviation.

        Raises:
            ValueError: an axis without variance.
        """
        scale = self.variances.sqrt()
        # a direction without variance comes out of the decomposition at rounding level
        if not bool((scale > 100 * len(scale) * torch.finfo(scale.dtype).eps * scale[0]).all()):
            raise ValueError(
                "n_components must not exceed the rank of the data: an axis has no variance"
            )
        return self.project(X) / scale

    def restore(self, Z: torch.Tensor) -> torch.Tensor:
        """(n, k) coordinates → (n, d)."""
        return Z @ self.components.T + self.mean


def fit_pca(X: object, n_components: int | None = None) -> PCA:
    """Principal components by the singular values of the centred data.

    Args:
        X: (n_samples, d) tensor or array.
        n_components: k, at most min(d, n_samples − 1), which is the default (at least 1).

    Raises:
        ValueError: values that are not finite, or k out of range.
    """
    X = as_matrix("X", X)
    most = max(1, min(X.shape[1], len(X) - 1))
    k = most if n_components is None else n_components
    if isinstance(k, bool) or k != int(k) or not 1 <= k <= most:
        raise ValueError(
            f"n_components must be a whole number in [1, min(d, n - 1) = {most}]: got {k}"
        )
    mean = X.mean(dim=0)
    _, s, Vt = torch.linalg.svd(X - mean, full_matrices=False)
    axes = positive_columns(Vt[: int(k)].T)
    return PCA(mean, axes, s[: int(k)].square() / len(X))


def positive_columns(V: torch.Tensor) -> torch.Tensor:
    """V with each column's sign such that its entry of largest size is positive: (d, k)."""
    largest = V.gather(0, V.abs().argmax(dim=0, keepdim=True))
    return V * torch.where(largest < 0, -1.0, 1.0).to(V.dtype)


# --------------------------------------------------------------------------------------------
# Many matrices at once


class GPAResult(NamedTuple):
    """Several matrices turned onto one another.

    Attributes:
        omegas: (M, d, d), the orthogonal map of each.
        centroid: (n, d), U, the mean of the turned matrices.
        objective: Σ_m ``‖X_m Ω_m − U‖²`` after each round; it never rises.
        n_iter: rounds done.
        converged: whether the last round lowered the objective by at most ``tol`` of it.
    """

    omegas: torch.Tensor
    centroid: torch.Tensor
    objective: list[float]
    n_iter: int
    converged: bool


INITS = ("medoid", "first", "mean")


def as_views(name: str, Xs: Sequence, *, least: int = 2) -> list[torch.Tensor]:
    """The matrices in float64 on one device, checked to have the same number of rows.

    Raises:
        ValueError: fewer than ``least``, unequal rows or devices, fewer than 2 rows, not finite.
    """
    views = [as_matrix(f"{name}[{m}]", X).double() for m, X in enumerate(Xs)]
    if len(views) < least:
        raise ValueError(f"{name} must hold at least {least} matrices: got {len(views)}")
    rows = {len(X) for X in views}
    if len(rows) > 1:
        raise ValueError(f"{name} must have the same number of rows each: got {sorted(rows)}")
    if rows.pop() < 2:
        raise ValueError(f"{name} must have at least 2 rows: got 1")
    if len({X.device for X in views}) > 1:
        raise ValueError(f"{name} must share a device: got {[str(X.device) for X in views]}")
    return views


def gpa(
    Xs: Sequence,
    *,
    init: str = "medoid",
    tol: float = 1e-9,
    max_iter: int = 300,
    canonical: bool = True,
    reflection: bool = True,
) -> GPAResult:
    """Generalised orthogonal Procrustes analysis (Gower, 1975).

    Minimises Σ_m ``‖X_m Ω_m − U‖²`` over orthogonal Ω_m and U. Alternates Ω_m = P Qᵀ with
    X_mᵀU = P S Qᵀ, and U = mean of X_m Ω_m. Each half-step is an exact minimisation.

    With fewer rows than columns the minimisers are many; the singular value decomposition picks
    one, the same on every call, and a warning says so.

    Args:
        Xs: M >= 2 matrices (n, d), centred by the caller. Computed in float64.
        init: the first U: "medoid", the matrix with the smallest summed Procrustes residual to
            the others; "first"; or "mean", of matrices not yet turned, which may stall near 0.
        tol: stop when a round lowers the objective by at most this share of it.
        max_iter: stop after that many rounds.
        canonical: turn U to its principal axes (largest coordinate on each axis positive), which
            takes away the freedom (Ω_m, U) → (Ω_m G, U G). With ``reflection=False`` the last axis
            keeps whatever sign leaves all Ω_m rotations.
        reflection: False allows rotations only, det Ω_m = +1.

    Raises:
        ValueError: as in :func:`as_views`, unequal widths, or an option out of range.
    """
    views = as_views("Xs", Xs)
    widths = {X.shape[1] for X in views}
    if len(widths) > 1:
        raise ValueError(f"Xs must have the same number of columns each: got {sorted(widths)}")
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(INITS)}: got {init!r}")
    if not 0 <= tol < 1:
        raise ValueError(f"tol must be in [0, 1): got {tol}")
    if isinstance(max_iter, bool) or max_iter != int(max_iter) or max_iter < 1:
        raise ValueError(f"max_iter must be a whole number >= 1: got {max_iter}")
    X = torch.stack(views)
    n, d = X.shape[1:]
    if n < d:
        warnings.warn(
            f"{n} rows do not determine an orthogonal map of {d} columns: the SVD completes it",
            stacklevel=2,
        )
    U = _first_centroid(X, init, reflection)
    objective, converged = [], False
    while len(objective) < max_iter and not converged:
        omegas = _polar(X.mT @ U, reflection)
        turned = X @ omegas
        U = turned.mean(dim=0)
        objective.append(float((turned - U).square().sum()))
        # from the second round on: against f_0 = ∞ any test of this form passes at once
        converged = len(objective) > 1 and objective[-2] - objective[-1] <= tol * objective[-2]
    if canonical:
        G = _principal_axes(U, reflection)
        omegas, U = omegas @ G, U @ G
    return GPAResult(omegas, U, objective, len(objective), converged)


def _polar(cross: torch.Tensor, reflection: bool) -> torch.Tensor:
    """The orthogonal (or rotation) matrices nearest to each of (…, d, d)."""
    P, _, Qt = torch.linalg.svd(cross)
    if not reflection:
        sign = torch.where(torch.linalg.det(P) * torch.linalg.det(Qt) < 0, -1.0, 1.0)
        P = torch.cat([P[..., :-1], P[..., -1:] * sign[..., None, None].to(P)], dim=-1)
    return P @ Qt


def _first_centroid(X: torch.Tensor, init: str, reflection: bool) -> torch.Tensor:
    if init == "first":
        return X[0]
    if init == "mean":
        return X.mean(dim=0)
    # ‖X_a R − X_b‖² = ‖X_a‖² + ‖X_b‖² − 2⟨R, X_aᵀX_b⟩ for the best R
    cross = torch.einsum("and,bne->abde", X, X)
    gain = (_polar(cross, reflection) * cross).sum(dim=(-1, -2))
    energy = X.square().sum(dim=(-1, -2))
    residual = energy[:, None] + energy[None, :] - 2 * gain
    return X[int(residual.sum(dim=1).argmin())]


def _principal_axes(U: torch.Tensor, reflection: bool) -> torch.Tensor:
    """The orthogonal matrix that turns U to its principal axes, most energy first: (d, d)."""
    G = torch.linalg.svd(U, full_matrices=True).Vh.mT
    # the signs come from the coordinates of the rows, which no turn of the universe changes
    scores = U @ G
    largest = scores.gather(0, scores.abs().argmax(dim=0, keepdim=True))
    G = G * torch.where(largest < 0, -1.0, 1.0).to(G)
    if not reflection and torch.linalg.det(G) < 0:
        G = torch.cat([G[:, :-1], -G[:, -1:]], dim=1)
    return G


class GCCAResult(NamedTuple):
    """MAXVAR generalised canonical correlation analysis.

    Attributes:
        weights: M maps (d_m, k).
        consensus: (n, k), G, orthonormal columns.
        values: (k,), Σ_m of the shares of each consensus direction that the views explain, at
            most M; largest first.
    """

    weights: list[torch.Tensor]
    consensus: torch.Tensor
    values: torch.Tensor


def gcca(Xs: Sequence, k: int, reg: float) -> GCCAResult:
    """Directions on which several views agree, each view whitened (Kettenring, 1971: MAXVAR).

    C_m = X_mᵀX_m + reg · tr(X_mᵀX_m)/d_m · I; G = the first k eigenvectors of
    Σ_m X_m C_m⁻¹ X_mᵀ; W_m = C_m⁻¹ X_mᵀ G. The eigenproblem is solved through the thin SVD of
    [X_1 L_1^{-T}, …] with C_m = L_m L_mᵀ, so that no (n, n) matrix is formed.

    Args:
        Xs: M >= 2 matrices (n, d_m), centred by the caller. Computed in float64.
        k: directions, in [1, min(n, Σ d_m)].
        reg: ridge, >= 0; 0 needs views of full column rank.

    Raises:
        ValueError: as in :func:`as_views`, k or reg out of range, or a singular view without ridge.
    """
    views = as_views("Xs", Xs)
    most = min(len(views[0]), sum(X.shape[1] for X in views))
    if isinstance(k, bool) or k != int(k) or not 1 <= k <= most:
        raise ValueError(f"k must be a whole number in [1, {most}]: got {k}")
    if not 0 <= reg < math.inf:
        raise ValueError(f"reg must be finite and >= 0: got {reg}")
    factors, whitened = [], []
    for m, X in enumerate(views):
        C = X.T @ X
        C.diagonal().add_(reg * C.trace() / len(C))
        L, info = torch.linalg.cholesky_ex(C)
        # a Cholesky factor with a vanishing pivot is one of a matrix singular in float64
        if info or L.diagonal().min() <= 1e-8 * L.diagonal().max():
            raise ValueError(
                f"reg must be > 0 for a singular view: Xs[{m}] has {X.shape[1]} columns and "
                "fewer independent ones"
            )
        factors.append(L)
        whitened.append(torch.linalg.solve_triangular(L, X.T, upper=False).T)
    P, s, _ = torch.linalg.svd(torch.cat(whitened, dim=1), full_matrices=False)
    G = positive_columns(P[:, : int(k)])
    weights = [torch.cholesky_solve(X.T @ G, L) for X, L in zip(views, factors, strict=True)]
    return GCCAResult(weights, G, s[: int(k)].square())


def gcca_maxvar(Xs: Sequence, k: int, reg: float) -> list[torch.Tensor]:
    """The maps of :func:`gcca` alone: M tensors (d_m, k) float64."""
    return gcca(Xs, k, reg).weights
