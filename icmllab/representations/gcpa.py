r"""Multi-Way Representation Alignment: geometry-corrected Procrustes alignment (arXiv 2602.06205).

M >= 2 encoders embed the same n objects. Generalised Procrustes analysis (GPA) turns each model's
features by an orthogonal map Ω_m into one universe with centroid U, so that M maps translate
between all M(M−1) ordered pairs. A small correction W then pulls the turned points A_m = X̄_m Ω_m
towards the directions on which the models agree.

From the paper (abstract, beginning of the introduction, an author's post): GPA with orthogonal
maps, one map a model, CCA's advantage in retrieval, a shared residual correction after GPA. Ours:
the closed form of the correction (a ridge towards the consensus), its per-model and
agreement-weighted forms, the digits encoders, all hyper-parameters.

Notation: X_m (n, d_m) anchors of model m, X̄_m (n, d) centred, projected and scaled to unit mean
energy, Ω_m (d, d), U (n, d), W (d, d). Rows are objects, maps act from the right. All fitting is
done in float64 on the device of the data.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from icmllab.toolbox.digits import digits_encoders
from icmllab.toolbox.linalg import (
    GPAResult,
    as_matrix,
    as_views,
    fit_pca,
    gcca,
    gcca_maxvar,
    gpa,
    orthogonal_procrustes,
    psd_power,
)
from icmllab.toolbox.retrieval import match_ranks

__all__ = [
    "SHIPPED",
    "GPAResult",
    "MultiWayAligner",
    "Prepared",
    "Views",
    "agreement_spectrum",
    "check_add_model",
    "check_choose_lambda",
    "check_correction",
    "check_gpa_round",
    "check_procrustes",
    "correction",
    "cycle_error",
    "digits_encoders",
    "digits_views",
    "gcca_maxvar",
    "geometry_score",
    "gpa",
    "head_accuracy",
    "load_views",
    "make_multiview",
    "pairwise_procrustes",
    "pairwise_ridge",
    "relative_representation",
    "retrieval_at_k",
    "stitch_accuracy",
    "study_run",
    "synthetic_views",
    "translated_retrieval",
]

METHODS = ("gcpa", "gpa", "gcca", "pairwise")
MODES = ("shared", "per_model", "agreement")
GRID = (0.0, 0.001, 0.01, 0.1, 1.0, 10.0)
"""The strengths that cross-validation tries."""

SINGULAR = 1e8
"""A correction of larger condition number is not inverted."""


# --------------------------------------------------------------------------------------------
# Two models


def pairwise_procrustes(A: object, B: object, *, reflection: bool = True) -> torch.Tensor:
    """The orthogonal R that minimises ``‖A R − B‖``_F, from the SVD of AᵀB.

    Args:
        A: (n, d) tensor or array, centred by the caller.
        B: (n, d).
        reflection: False allows rotations only.

    Returns:
        (d, d).

    Raises:
        ValueError: shapes that differ, or values that are not finite.
    """
    A, B = as_matrix("A", A), as_matrix("B", B)
    if A.shape != B.shape:
        raise ValueError(
            f"A and B must have the same shape: got {tuple(A.shape)} and {tuple(B.shape)}"
        )
    return orthogonal_procrustes(A, B, reflection=reflection)


# --------------------------------------------------------------------------------------------
# The correction


def agreement_spectrum(aligned: Sequence) -> torch.Tensor:
    """How far the models agree along each direction: γ, the eigenvalues of (S_C, S_T).

    S_T = Σ_m A_mᵀA_m is the energy of all models and S_C = M UᵀU that of their consensus. γ = 1
    where all models say the same, 1/M where each has noise of its own (more after a fit to few
    anchors), 0 where nobody has energy.

    Args:
        aligned: M matrices A_m (n, d).

    Returns:
        (d,) float64 in [0, 1], largest first.
    """
    A = torch.stack(_aligned(aligned))
    total = torch.einsum("mnd,mne->de", A, A)
    U = A.mean(dim=0)
    root = psd_power(total, -0.5)
    shared = root @ (len(A) * U.T @ U) @ root
    return torch.linalg.eigvalsh((shared + shared.T) / 2).flip(0).clamp(0.0, 1.0)


def correction(
    aligned: Sequence,
    centroid: object,
    lam: float,
    mode: str = "shared",
    unit_norm: bool = False,
) -> torch.Tensor:
    """The map that pulls aligned points towards their consensus.

    - ``shared``: W = (S_T + ℓI)⁻¹(S_C + ℓI) minimises Σ_m ``‖A_m W − U‖² + ℓ‖W − I‖²`` with
      S_T = Σ A_mᵀA_m, S_C = Σ A_mᵀU, ℓ = λ tr(S_T)/d.
    - ``per_model``: the same for each model alone, W_m = (A_mᵀA_m + ℓ_m I)⁻¹(A_mᵀU + ℓ_m I).
    - ``agreement``: W = T^{-1/2} V diag(ρ) with T = S_T/(Mn) + λ tr(S_T)/(Mnd) I,
      T^{-1/2}(UᵀU/n)T^{-1/2} = V Γ Vᵀ and ρ = clip((Mγ − 1)/(M − 1), 0, 1): whitening as in CCA,
      with weights in place of a rank. Eigenvalues γ enter freed from the consensus' own noise.

    Args:
        aligned: M matrices A_m (n, d).
        centroid: U (n, d).
        lam: λ >= 0. Infinity gives W = I exactly, except for ``agreement``, where it has no limit.
        mode: one of the three above.
        unit_norm: scale the rows of A_m and U to length 1 first: cosine geometry.

    Returns:
        (d, d) float64, or (M, d, d) for ``per_model``.

    Raises:
        ValueError: λ out of range, λ = 0 for singular moments, an unknown mode, other shapes.
    """
    views = _aligned(aligned)
    U = as_matrix("centroid", centroid).double()
    if U.shape != views[0].shape:
        raise ValueError(
            f"centroid must have the shape of an aligned matrix, {tuple(views[0].shape)}: "
            f"got {tuple(U.shape)}"
        )
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}: got {mode!r}")
    lam = _check_lam(lam, mode)
    A = torch.stack(views)
    M, n, d = A.shape
    if math.isinf(lam):
        eye = torch.eye(d, dtype=A.dtype, device=A.device)
        return eye.repeat(M, 1, 1) if mode == "per_model" else eye
    if unit_norm:
        A, U = _unit_rows(A), _unit_rows(U)
    if mode == "per_model":
        return _towards(A.mT @ A, A.mT @ U, lam)
    total = (A.mT @ A).sum(dim=0)
    if mode == "shared":
        return _towards(total[None], (A.mT @ U).sum(dim=0)[None], lam)[0]
    if lam == 0:
        _check_definite(total[None])
    T = total / (M * n)
    T.diagonal().add_(lam * T.trace() / d)
    root = psd_power(T, -0.5)
    middle = root @ (U.T @ U / n) @ root
    gamma, V = torch.linalg.eigh((middle + middle.T) / 2)
    rho = ((M * gamma - 1) / (M - 1)).clamp(0.0, 1.0)
    # most agreement first, so that the coordinates that are dropped come last
    order = torch.arange(d - 1, -1, -1, device=A.device)
    return root @ V[:, order] * rho[order]


def _towards(total: torch.Tensor, cross: torch.Tensor, lam: float) -> torch.Tensor:
    """(total + ℓI)⁻¹(cross + ℓI) for each of (B, d, d), ℓ = λ tr(total)/d."""
    if lam == 0:
        _check_definite(total)
    d = total.shape[-1]
    level = lam * total.diagonal(dim1=1, dim2=2).sum(dim=1) / d
    ridge = level[:, None, None] * torch.eye(d, dtype=total.dtype, device=total.device)
    L, info = torch.linalg.cholesky_ex(total + ridge)
    if bool(info.any()):
        raise ValueError(f"lam must be larger for moments this near to singular: got {lam}")
    return torch.cholesky_solve(cross + ridge, L)


def _check_definite(total: torch.Tensor) -> None:
    values = torch.linalg.eigvalsh(total)
    if bool((values[:, 0] <= 1e-12 * values[:, -1]).any()):
        raise ValueError(
            "lam must be > 0 where the aligned features do not span all directions: got 0; "
            "0.01 is a good start"
        )


def _check_lam(lam: float, mode: str) -> float:
    lam = float(lam)
    if not lam >= 0:
        raise ValueError(f"lam must be >= 0: got {lam}")
    if math.isinf(lam) and mode == "agreement":
        raise ValueError("lam must be finite for mode='agreement', which has no limit: got inf")
    return lam


def _aligned(aligned: Sequence) -> list[torch.Tensor]:
    views = as_views("aligned", aligned)
    widths = {A.shape[1] for A in views}
    if len(widths) > 1:
        raise ValueError(f"aligned must have the same number of columns each: got {sorted(widths)}")
    return views


def _unit_rows(A: torch.Tensor) -> torch.Tensor:
    return A / A.norm(dim=-1, keepdim=True).clamp(min=1e-300)


# --------------------------------------------------------------------------------------------
# Into one scale


class Prepared(NamedTuple):
    """How one model's features become comparable: x̄ = (x − mean) components / scale.

    Attributes:
        mean: (d_m,), of the anchors.
        components: (d_m, d), orthonormal columns (zero ones where padded), or None for identity.
        scale: √(mean squared row norm), so that the anchors have unit mean energy whatever their
            number.
    """

    mean: torch.Tensor
    components: torch.Tensor | None
    scale: float

    def apply(self, X: torch.Tensor) -> torch.Tensor:
        """(n, d_m) → (n, d)."""
        X = X - self.mean
        return (X if self.components is None else X @ self.components) / self.scale

    def invert(self, X: torch.Tensor) -> torch.Tensor:
        """(n, d) → (n, d_m), exact up to what the projection took away."""
        X = X * self.scale
        return (X if self.components is None else X @ self.components.T) + self.mean


def _prepare(X: torch.Tensor, d: int, project: bool, view: int) -> Prepared:
    """Mean, axes and scale of one model's anchors; narrower models get zero columns."""
    mean = X.mean(dim=0)
    centred = X - mean
    if centred.norm() <= 1e-12 * max(float(X.norm()), 1e-300):
        raise ValueError(f"view {view} has zero variance")
    components = None
    if project:
        axes = fit_pca(X, min(d, *X.shape, len(X) - 1)).components
        components = torch.nn.functional.pad(axes, (0, d - axes.shape[1]))
        centred = centred @ components
    return Prepared(mean, components, float(centred.square().sum(dim=1).mean().sqrt()))


# --------------------------------------------------------------------------------------------
# The estimator


class MultiWayAligner(BaseEstimator):
    """M encoders of the same objects in one reference space.

    Args:
        method: "gcpa", rigid maps and a correction; "gpa", rigid maps alone; "gcca", MAXVAR
            generalised CCA; "pairwise", one Procrustes map for each ordered pair and no universe.
        n_components: d; None keeps the features where all widths agree, else min over models of
            d_m, and at most n − 1. Projections are principal components of each model's anchors.
        lam: λ of the correction; None for 0.01 (1 for ``correction="agreement"``); "cv" to choose
            by R@1 of held-out anchors.
        correction: "shared", "per_model" or "agreement", see :func:`correction`.
        unit_norm: the correction sees rows of length 1.
        pad: give models narrower than d columns of zeros instead of refusing them.
        allow_reflection: False for rotations only.
        init, tol, max_iter: of :func:`gpa`.
        gcca_components, gcca_reg: k and ridge of "gcca".
        n_folds: of the cross-validation.
        random_state: of its folds.

    Attributes:
        omegas_: (M, d, d) rigid maps ("gpa", "gcpa").
        centroid_: (n, d), U; for "gcca" the (n, k) consensus G.
        W_: (d, d), or (M, d, d) for "per_model"; None without a correction.
        weights_: M maps (d, k) of "gcca".
        pair_maps_: (M, M, d, d) of "pairwise".
        means_, components_, scales_: of each model, see :class:`Prepared`.
        objective_: of GPA, a value a round.
        agreement_: (d,), see :func:`agreement_spectrum`.
        lam_: the λ in use.
        cv_scores_: {λ: R@1 of held-out anchors} when ``lam="cv"``; strengths that a fold could
            not fit are left out.
        n_models_: M, which grows with :meth:`add_model`.

    Arrays in, arrays out; tensors in, float64 tensors out. All of it is fitted on the anchors.
    """

    def __init__(
        self,
        method: str = "gcpa",
        *,
        n_components: int | None = None,
        lam: float | str | None = None,
        correction: str = "shared",
        unit_norm: bool = False,
        pad: bool = False,
        allow_reflection: bool = True,
        init: str = "medoid",
        tol: float = 1e-9,
        max_iter: int = 300,
        gcca_components: int = 16,
        gcca_reg: float = 1e-3,
        n_folds: int = 5,
        random_state: int = 0,
    ):
        self.method = method
        self.n_components = n_components
        self.lam = lam
        self.correction = correction
        self.unit_norm = unit_norm
        self.pad = pad
        self.allow_reflection = allow_reflection
        self.init = init
        self.tol = tol
        self.max_iter = max_iter
        self.gcca_components = gcca_components
        self.gcca_reg = gcca_reg
        self.n_folds = n_folds
        self.random_state = random_state

    # -- fitting

    def fit(self, Xs: Sequence, y: object = None) -> "MultiWayAligner":
        """Fit on anchors.

        Args:
            Xs: M >= 2 matrices (n, d_m), row i of each for the same object.
            y: ignored.

        Raises:
            ValueError: fewer than two models, unequal rows, fewer than 2 rows, values that are
                not finite, a model without variance, an option out of range.
        """
        views = as_views("Xs", Xs)
        self._check_options()
        d, project = self._width(views)
        self._prepared = [_prepare(X, d, project, m) for m, X in enumerate(views)]
        self.cv_scores_ = None
        self.lam_ = None
        if self.method == "gcpa":
            self.lam_ = self._choose_lam(views)
        self._fit_maps([p.apply(X) for p, X in zip(self._prepared, views, strict=True)])
        return self

    def corrected(
        self,
        Xs: Sequence,
        *,
        correction: str = "shared",
        lam: float | str | None = None,
        unit_norm: bool = False,
    ) -> "MultiWayAligner":
        """A "gcpa" aligner on this one's rigid maps, which are not fitted again.

        Args:
            Xs: the anchors of the fit, of every model.
            correction, lam, unit_norm: of the new aligner.

        Raises:
            ValueError: this aligner has no rigid maps, or Xs does not fit them.
        """
        self._check_fitted()
        if self.omegas_ is None:
            raise ValueError(f"method must be 'gpa' or 'gcpa' to correct: got {self.method!r}")
        views = as_views("Xs", Xs)
        if len(views) != self.n_models_ or len(views[0]) != len(self.centroid_):
            raise ValueError(
                f"Xs must be the {self.n_models_} models' {len(self.centroid_)} anchors: "
                f"got {len(views)} and {len(views[0])}"
            )
        made = copy.copy(self)
        made.set_params(method="gcpa", correction=correction, lam=lam, unit_norm=unit_norm)
        made._check_options()
        made.cv_scores_ = None
        made.lam_ = made._choose_lam(views)
        features = [self._features(X, m) for m, X in enumerate(views)]
        made._correct(self._stack(self._prepared, features))
        return made

    def _correct(self, views: torch.Tensor) -> None:
        aligned = list(views @ self.omegas_)
        self.W_ = correction(aligned, self.centroid_, self.lam_, self.correction, self.unit_norm)

    def _check_options(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}: got {self.method!r}")
        if self.correction not in MODES:
            raise ValueError(f"correction must be one of {', '.join(MODES)}: got {self.correction}")
        if isinstance(self.lam, str):
            if self.lam != "cv":
                raise ValueError(f"lam must be a number, None or 'cv': got {self.lam!r}")
        elif self.lam is not None:
            _check_lam(self.lam, self.correction)

    def _width(self, views: list[torch.Tensor]) -> tuple[int, bool]:
        """The common width d, and whether the models are projected to it."""
        widths, n = [X.shape[1] for X in views], len(views[0])
        k = self.n_components
        if k is None:
            if len(set(widths)) == 1:
                return widths[0], False
            return min(max(widths) if self.pad else min(widths), n - 1), True
        most = min(max(widths) if self.pad else min(widths), n - 1)
        if isinstance(k, bool) or k != int(k) or not 1 <= k <= most:
            raise ValueError(
                f"n_components must be a whole number in [1, {most}], the narrowest model's width "
                f"and n - 1 (pad=True allows the widest model's): got {k}"
            )
        return int(k), True

    def _default_lam(self) -> float:
        return 1.0 if self.correction == "agreement" else 0.01

    def _choose_lam(self, views: list[torch.Tensor]) -> float:
        if self.lam is None:
            return self._default_lam()
        if self.lam != "cv":
            return float(self.lam)
        self.cv_scores_ = self._cross_validate(views)
        # the strongest pull to rigidity among the best
        best = max(self.cv_scores_.values())
        return max(lam for lam, score in self.cv_scores_.items() if score >= best - 1e-12)

    def _cross_validate(self, views: list[torch.Tensor]) -> dict[float, float]:
        n = len(views[0])
        if isinstance(self.n_folds, bool) or not 2 <= self.n_folds <= n // 2:
            raise ValueError(f"n_folds must be in [2, n/2 = {n // 2}]: got {self.n_folds}")
        order = torch.from_numpy(np.random.default_rng(self.random_state).permutation(n))
        order = order.to(views[0].device)
        scores: dict[float, list[float]] = {lam: [] for lam in GRID}
        for held in order.tensor_split(self.n_folds):
            kept = torch.ones(n, dtype=torch.bool, device=held.device)
            kept[held] = False
            trained = [X[kept] for X in views]
            d, project = self._fold_width(trained)
            fold = [_prepare(X, d, project, m) for m, X in enumerate(trained)]
            rigid = self._gpa([p.apply(X) for p, X in zip(fold, trained, strict=True)])
            near = list(self._stack(fold, trained) @ rigid.omegas)
            far = self._stack(fold, [X[held] for X in views]) @ rigid.omegas
            for lam in list(scores):
                try:
                    W = correction(near, rigid.centroid, lam, self.correction, self.unit_norm)
                except ValueError:
                    if lam:
                        raise
                    del scores[lam]  # moments of this fold are singular: 0 is no candidate
                    continue
                scores[lam].append(retrieval_at_k(list(far @ W))["mean"])
        return {lam: float(np.mean(found)) for lam, found in scores.items()}

    def _fold_width(self, trained: list[torch.Tensor]) -> tuple[int, bool]:
        """The width of the whole fit, as far as a fold's rows allow."""
        d, project = self._width_of_fit()
        return (min(d, len(trained[0]) - 1), True) if project else (d, False)

    def _width_of_fit(self) -> tuple[int, bool]:
        first = self._prepared[0]
        if first.components is None:
            return len(first.mean), False
        return first.components.shape[1], True

    @staticmethod
    def _stack(prepared: list[Prepared], Xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([p.apply(X) for p, X in zip(prepared, Xs, strict=True)])

    def _gpa(self, views: list[torch.Tensor]) -> GPAResult:
        return gpa(
            views,
            init=self.init,
            tol=self.tol,
            max_iter=self.max_iter,
            reflection=self.allow_reflection,
        )

    def _fit_maps(self, views: list[torch.Tensor]) -> None:
        self.omegas_ = self.centroid_ = self.W_ = self.weights_ = self.pair_maps_ = None
        self.objective_ = self.agreement_ = None
        if self.method == "pairwise":
            self._anchors = torch.stack(views)
            self.pair_maps_ = torch.stack(
                [torch.stack([self._pair_map(A, B) for B in views]) for A in views]
            )
        elif self.method == "gcca":
            found = gcca(views, self.gcca_components, self.gcca_reg)
            self.weights_, self.centroid_ = found.weights, found.consensus
        else:
            rigid = self._gpa(views)
            self.omegas_, self.centroid_ = rigid.omegas, rigid.centroid
            self.objective_ = rigid.objective
            self.agreement_ = agreement_spectrum(list(torch.stack(views) @ rigid.omegas))
            if self.method == "gcpa":
                self._correct(torch.stack(views))

    def _pair_map(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        if A is B:
            return torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
        return pairwise_procrustes(A, B, reflection=self.allow_reflection)

    # -- using

    @property
    def n_models_(self) -> int:
        """M, the models known so far."""
        self._check_fitted()
        return len(self._prepared)

    @property
    def means_(self) -> list[torch.Tensor]:
        """μ_m of each model."""
        self._check_fitted()
        return [p.mean for p in self._prepared]

    @property
    def components_(self) -> list[torch.Tensor | None]:
        """V_m of each model; None is the identity."""
        self._check_fitted()
        return [p.components for p in self._prepared]

    @property
    def scales_(self) -> list[float]:
        """s_m of each model."""
        self._check_fitted()
        return [p.scale for p in self._prepared]

    def _check_fitted(self) -> None:
        if not hasattr(self, "_prepared"):
            raise NotFittedError("this MultiWayAligner is not fitted: call fit first")

    def _model(self, name: str, model: int) -> int:
        self._check_fitted()
        M = len(self._prepared)
        if isinstance(model, bool) or model != int(model) or not 0 <= model < M:
            raise ValueError(f"{name} must be a model in 0..{M - 1}: got {model}")
        return int(model)

    def _features(self, X: object, model: int) -> torch.Tensor:
        X = as_matrix("X", X).double()
        width = len(self._prepared[model].mean)
        if X.shape[1] != width:
            raise ValueError(f"X must have the {width} columns of model {model}: got {X.shape[1]}")
        return X.to(self._prepared[model].mean.device)

    def normalize(self, X: object, model: int):
        """x̄ = (x − μ_m) V_m / s_m: (n, d_m) → (n, d), before any alignment."""
        model = self._model("model", model)
        return _like(X, self._prepared[model].apply(self._features(X, model)))

    def transform(self, X: object, model: int):
        """Into the universe: (n, d_m) → (n, d), or (n, k) for "gcca".

        Raises:
            ValueError: another width than fitted, an unknown model, or ``method="pairwise"``.
        """
        model = self._model("model", model)
        Z = self._prepared[model].apply(self._features(X, model)) @ self._universe_map(model)
        return _like(X, Z)

    def _universe_map(self, model: int, *, corrected: bool = True) -> torch.Tensor:
        """(d, d) or (d, k): from x̄ into the universe."""
        if self.method == "pairwise":
            raise ValueError("method='pairwise' has no universe: use translate(X, src, dst)")
        if self.method == "gcca":
            return self.weights_[model]
        omega = self.omegas_[model]
        if self.W_ is None or not corrected:
            return omega
        return omega @ (self.W_[model] if self.W_.ndim == 3 else self.W_)

    def _return_map(self, model: int, *, corrected: bool = True) -> torch.Tensor:
        """From the universe to x̄; a pseudo-inverse for "gcca"."""
        if self.method == "gcca":
            return torch.linalg.pinv(self.weights_[model])
        omega = self.omegas_[model]
        if self.W_ is None or not corrected:
            return omega.T
        W = self.W_[model] if self.W_.ndim == 3 else self.W_
        if self.correction == "agreement" and not bool(W.any(dim=0).all()):
            raise ValueError(
                "U can't be mapped back: the agreement correction drops directions (ρ = 0); "
                "translate works, and so does correction='shared'"
            )
        if torch.linalg.cond(W) > SINGULAR:
            raise ValueError(
                "U can't be mapped back: the correction's condition number exceeds 1e8; "
                "a larger lam lowers it"
            )
        return torch.linalg.solve(W, omega.T)

    def inverse_transform(self, U: object, model: int):
        """From the universe into a model's own space: (n, d) → (n, d_m).

        Raises:
            ValueError: a correction that can't be inverted, another width, an unknown model.
        """
        model = self._model("model", model)
        if self.method == "pairwise":
            raise ValueError("method='pairwise' has no universe: use translate(X, src, dst)")
        Z = as_matrix("U", U).double().to(self._prepared[model].mean.device)
        back = self._return_map(model)
        if Z.shape[1] != len(back):
            raise ValueError(f"U must have {len(back)} columns: got {Z.shape[1]}")
        return _like(U, self._prepared[model].invert(Z @ back))

    def translation(self, src: int, dst: int) -> torch.Tensor:
        """T_ij (d, d) between normalised features, x̄_i T_ij ≈ x̄_j.

        A correction that all models share cancels, so it is left out and not inverted.
        """
        src, dst = self._model("src", src), self._model("dst", dst)
        if self.method == "pairwise":
            return self.pair_maps_[src, dst]
        own = self.W_ is not None and self.W_.ndim == 3
        return self._universe_map(src, corrected=own) @ self._return_map(dst, corrected=own)

    def translations(self) -> torch.Tensor:
        """(M, M, d, d), all of :meth:`translation`."""
        models = range(self.n_models_)
        return torch.stack([torch.stack([self.translation(i, j) for j in models]) for i in models])

    def translate(self, X: object, src: int, dst: int):
        """From model ``src`` into the space of model ``dst``: (n, d_src) → (n, d_dst)."""
        T = self.translation(src, dst)
        moved = self._prepared[src].apply(self._features(X, src)) @ T
        return _like(X, self._prepared[dst].invert(moved))

    # -- one more model

    def add_model(self, X: object, rows: object = None) -> int:
        """Fit one more model to what is there; nobody else changes.

        Its own mean, axes and scale, one Procrustes fit to U[rows], then the frozen W (its own
        W_m for "per_model", its own ridge regression onto the consensus for "gcca"). O(nd² + d³).
        Where ``rows`` are a part of the anchors, the part's own mean and spread in the universe
        are taken into account. Directions that its anchors do not span are mapped to 0.
        "pairwise" needs a fit to each of the M models instead.

        Args:
            X: (n_a, d_new) features of anchors; n_a >= d/4 is advised.
            rows: (n_a,) which anchors they are, without repetition; None for all, in order.

        Returns:
            The new model's number.

        Raises:
            ValueError: rows that do not fit, or a model narrower than d without ``pad=True``.
        """
        self._check_fitted()
        X = as_matrix("X", X).double().to(self._prepared[0].mean.device)
        anchors = self._anchors[0] if self.method == "pairwise" else self.centroid_
        rows = self._rows(rows, len(X), len(anchors)).to(X.device)
        d, project = self._width_of_fit()
        if X.shape[1] < d and not self.pad:
            raise ValueError(f"X must have at least {d} columns (or pad=True): got {X.shape[1]}")
        if len(X) < 2:
            raise ValueError(f"X must have at least 2 rows: got {len(X)}")
        project = project or X.shape[1] != d
        if project and len(X) <= d:
            warnings.warn(
                f"{len(X)} anchors span fewer than the {d} directions of the universe: the new "
                "model is seen along those alone",
                stacklevel=2,
            )
        prepared = _prepare(X, d, project, len(self._prepared))
        self._prepared = [*self._prepared, self._attach(X, prepared, rows)]
        return len(self._prepared) - 1

    @staticmethod
    def _rows(rows: object, count: int, n: int) -> torch.Tensor:
        if rows is None:
            if count != n:
                raise ValueError(f"X must have a row for each of the {n} anchors: got {count}")
            return torch.arange(n)
        rows = torch.as_tensor(rows)
        if rows.dtype.is_floating_point or rows.dtype == torch.bool or rows.ndim != 1:
            raise ValueError("rows must be a vector of whole numbers")
        if len(rows) != count:
            raise ValueError(f"rows must name an anchor for each row of X: {len(rows)} for {count}")
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= n):
            raise ValueError(f"rows must hold anchors in 0..{n - 1}")
        if len(rows.unique()) != len(rows):
            raise ValueError("rows must name each anchor at most once")
        return rows.long()

    def _attach(self, X: torch.Tensor, prepared: Prepared, rows: torch.Tensor) -> Prepared:
        """Put the new model's maps behind the others'; its normalisation may need a shift."""
        if self.method == "pairwise":
            self._attach_pairs(prepared.apply(X), rows)
            return prepared
        target = self.centroid_[rows]
        # a part of the anchors has a mean and a spread of its own, in the universe as well
        middle = target.mean(dim=0)
        centred = target - middle
        share = float(centred.square().sum(dim=1).mean() / self.centroid_.square().sum(1).mean())
        if share <= 1e-12:
            raise ValueError("rows must name anchors that differ from one another")
        prepared = prepared._replace(scale=prepared.scale / math.sqrt(share))
        there = prepared.apply(X)
        if self.method == "gcca":
            C = there.T @ there
            C.diagonal().add_(self.gcca_reg * C.trace() / len(C))
            into = torch.linalg.solve(C, there.T @ centred)
            self.weights_ = [*self.weights_, into]
            return self._shifted(prepared, middle, torch.linalg.pinv(into))
        omega = pairwise_procrustes(there, centred, reflection=self.allow_reflection)
        prepared = self._shifted(prepared, middle, omega.T)
        self.omegas_ = torch.cat([self.omegas_, omega[None]])
        if self.W_ is not None and self.W_.ndim == 3:
            own = self._own_correction(prepared.apply(X) @ omega, target)
            self.W_ = torch.cat([self.W_, own[None]])
        return prepared

    @staticmethod
    def _shifted(prepared: Prepared, middle: torch.Tensor, back: torch.Tensor) -> Prepared:
        """With the mean that sends the anchors' mean to ``middle`` of the universe."""
        step = middle @ back * prepared.scale
        if prepared.components is not None:
            step = step @ prepared.components.T
        return prepared._replace(mean=prepared.mean - step)

    def _own_correction(self, A: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if math.isinf(self.lam_):
            return torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
        if self.unit_norm:
            A, target = _unit_rows(A), _unit_rows(target)
        return _towards((A.T @ A)[None], (A.T @ target)[None], self.lam_)[0]

    def _attach_pairs(self, X: torch.Tensor, rows: torch.Tensor) -> None:
        known = [A[rows] - A[rows].mean(dim=0) for A in self._anchors]
        M, _, d, _ = self.pair_maps_.shape
        maps = self.pair_maps_.new_empty(M + 1, M + 1, d, d)
        maps[:M, :M] = self.pair_maps_
        maps[M, :M] = torch.stack([self._pair_map(X, A) for A in known])
        maps[:M, M] = torch.stack([self._pair_map(A, X) for A in known])
        maps[M, M] = torch.eye(d, dtype=maps.dtype, device=maps.device)
        self.pair_maps_ = maps
        whole = self._anchors.new_zeros(1, *self._anchors.shape[1:])
        whole[0, rows] = X  # rows that it lacks are zero and turn nothing
        self._anchors = torch.cat([self._anchors, whole])


def _like(given: object, result: torch.Tensor):
    """A tensor for a tensor, an array for anything else."""
    return result if isinstance(given, torch.Tensor) else result.cpu().numpy()


# --------------------------------------------------------------------------------------------
# Scores


def retrieval_at_k(Zs: Sequence, k: int = 1, metric: str = "cosine") -> dict:
    """R@k for every ordered pair of models in one space.

    Args:
        Zs: M >= 2 matrices (n, d), row i of each for the same object.
        k: in [1, n].
        metric: "cosine" or "euclidean".

    Returns:
        ``{"mean": float, "matrix": (M, M) float64 array}``: entry (i, j) is the share of queries
        of model i whose object is among the k nearest of model j; the diagonal is nan and not part
        of the mean. Ties go to the lower index.

    Raises:
        ValueError: as in :func:`icmllab.toolbox.linalg.as_views`; k or metric unknown.
    """
    views = _aligned(Zs)
    _check_k(k, len(views[0]))
    if views[0].is_cuda:  # the kernel takes float32
        views = [Z.float() for Z in views]

    def recall(i: int, j: int) -> float:
        return float((match_ranks(views[i], views[j], metric=metric) < k).double().mean())

    return _over_pairs(recall, len(views))


def translated_retrieval(maps: object, Xs: Sequence, k: int = 1) -> dict:
    """R@k with cosine where model i's queries are mapped into model j's own space.

    Args:
        maps: (M, M, d, d) or a nested sequence; entry (i, j) maps x̄_i to x̄_j.
        Xs: M matrices (n, d), normalised.
        k: in [1, n].

    Returns:
        As :func:`retrieval_at_k`.
    """
    views = _aligned(Xs)
    _check_k(k, len(views[0]))

    def recall(i: int, j: int) -> float:
        return float((match_ranks(views[i] @ maps[i][j], views[j]) < k).double().mean())

    return _over_pairs(recall, len(views))


def _check_k(k: int, n: int) -> None:
    if isinstance(k, bool) or k != int(k) or not 1 <= k <= n:
        raise ValueError(f"k must be a whole number in [1, {n}]: got {k}")


def _over_pairs(score: Callable[[int, int], float], M: int) -> dict:
    matrix = np.full((M, M), np.nan)
    for i in range(M):
        for j in range(M):
            if i != j:
                matrix[i, j] = score(i, j)
    return {"mean": off_diagonal_mean(matrix), "matrix": matrix}


def off_diagonal_mean(matrix: np.ndarray) -> float:
    """The mean over ordered pairs of different models; pairs without a score are left out."""
    rest = matrix[~np.eye(len(matrix), dtype=bool)]
    return float(np.nanmean(rest))


def stitch_accuracy(Zs_tr: Sequence, y_tr: object, Zs_te: Sequence, y_te: object) -> np.ndarray:
    """A linear probe trained on one model and used on another.

    A logistic regression is fitted on model i's training rows in the universe and tested on model
    j's test rows. Each probe sees its features divided by their root mean square entry, the same
    number for training and test: a universe's overall scale then changes nothing.

    Args:
        Zs_tr: M matrices (n, d) in the universe.
        y_tr: (n,) labels.
        Zs_te: M matrices (n_test, d).
        y_te: (n_test,).

    Returns:
        (M, M) accuracies, row i the probe's model, column j the tested one.
    """
    from sklearn.linear_model import LogisticRegression

    train, test = _aligned(Zs_tr), _aligned(Zs_te)
    if len(train) != len(test) or train[0].shape[1] != test[0].shape[1]:
        raise ValueError("Zs_tr and Zs_te must hold the same models in the same space")
    y_tr, y_te = np.asarray(y_tr), np.asarray(y_te)
    out = np.empty((len(train), len(train)))
    for i, Z in enumerate(train):
        scale = float(Z.square().mean().sqrt())
        probe = LogisticRegression(max_iter=2000).fit((Z / scale).cpu().numpy(), y_tr)
        for j, other in enumerate(test):
            out[i, j] = probe.score((other / scale).cpu().numpy(), y_te)
    return out


def head_accuracy(aligner: MultiWayAligner, Xs: Sequence, heads: Sequence, y: object) -> np.ndarray:
    """Model i's features, translated, in the classifier that model j was trained with.

    Args:
        aligner: fitted on the models.
        Xs: M matrices (n, d_m) of raw features.
        heads: for each model a callable (n, d_m) float64 tensor → (n, n_classes) logits, or None.
        y: (n,) labels.

    Returns:
        (M, M) accuracies, row i the features' model, column j the head's. The diagonal is model
        j's own untranslated accuracy; columns of models without a head are nan.
    """
    y = torch.as_tensor(y)
    M = len(Xs)
    if not M == len(heads) == aligner.n_models_:
        raise ValueError(
            f"Xs and heads must have an entry for each of the {aligner.n_models_} models: "
            f"got {M} and {len(heads)}"
        )
    views = [torch.as_tensor(X).double() for X in Xs]
    out = np.full((M, M), np.nan)
    for j, head in enumerate(heads):
        if head is None:
            continue
        for i, X in enumerate(views):
            moved = X if i == j else aligner.translate(X, i, j)
            with torch.no_grad():
                out[i, j] = float((head(moved).argmax(dim=1) == y).double().mean())
    return out


def cycle_error(maps: object) -> float:
    """How far i → j → k is from i → k: the mean of ‖T_ij T_jk − T_ik‖_F / √(2d).

    1 for unrelated rotations, 0 for maps that go through one universe.

    Args:
        maps: (M, M, d, d) tensor, M >= 3; entry (i, j) maps model i to model j.

    Returns:
        The mean over ordered triples of different models.
    """
    T = torch.as_tensor(maps).double()
    if T.ndim != 4 or T.shape[0] != T.shape[1] or T.shape[2] != T.shape[3] or len(T) < 3:
        raise ValueError(f"maps must be (M, M, d, d) with M >= 3: got shape {tuple(T.shape)}")
    M, d = len(T), T.shape[2]
    errors = [
        (T[i, j] @ T[j, k] - T[i, k]).norm()
        for i in range(M)
        for j in range(M)
        for k in range(M)
        if len({i, j, k}) == 3
    ]
    return float(torch.stack(errors).mean()) / math.sqrt(2 * d)


def geometry_score(X: object, Z: object, *, n_rows: int = 150) -> float:
    """Spearman correlation of all pairwise distances before and after a map.

    Args:
        X: (n, d) rows before.
        Z: (n, d') the same rows after.
        n_rows: only the first so many are compared.

    Returns:
        1 for a map that keeps the order of all distances.
    """
    from scipy.spatial.distance import pdist
    from scipy.stats import spearmanr

    X, Z = as_matrix("X", X), as_matrix("Z", Z)
    if len(X) != len(Z):
        raise ValueError(f"X and Z must have the same number of rows: got {len(X)} and {len(Z)}")
    if len(X) < 3:
        raise ValueError(f"X must have at least 3 rows: got {len(X)}")
    before, after = (pdist(A[:n_rows].double().cpu().numpy()) for A in (X, Z))
    return float(spearmanr(before, after).statistic)


# --------------------------------------------------------------------------------------------
# Baselines


def pairwise_ridge(Xs: Sequence, ridge: float) -> torch.Tensor:
    """M(M−1) independent linear maps: X̄_i → X̄_j by ridge regression.

    Args:
        Xs: M matrices (n, d), centred.
        ridge: in units of the mean eigenvalue of X̄_iᵀX̄_i, > 0.

    Returns:
        (M, M, d, d); the diagonal holds identities.
    """
    X = torch.stack(_aligned(Xs))
    if not 0 < ridge < math.inf:
        raise ValueError(f"ridge must be > 0 and finite: got {ridge}")
    M, _, d = X.shape
    eye = torch.eye(d, dtype=X.dtype, device=X.device)
    gram = X.mT @ X
    level = ridge * gram.diagonal(dim1=1, dim2=2).mean(dim=1)
    L = torch.linalg.cholesky(gram + level[:, None, None] * eye)
    cross = torch.einsum("ind,jne->ijde", X, X)
    maps = torch.cholesky_solve(cross, L[:, None])
    for m in range(M):
        maps[m, m] = eye
    return maps


def relative_representation(X: object, anchors: object) -> torch.Tensor:
    """Cosines to the model's own anchors (Moschella et al., 2023): nothing is fitted.

    Args:
        X: (n, d) rows of one model.
        anchors: (n_a, d), the same objects in every model.

    Returns:
        (n, n_a) float64.
    """
    X, anchors = as_matrix("X", X).double(), as_matrix("anchors", anchors).double()
    return _unit_rows(X) @ _unit_rows(anchors).T


# --------------------------------------------------------------------------------------------
# Data


class Views(NamedTuple):
    """M models on the same objects, cut into anchors and test rows.

    Attributes:
        anchors: M matrices (n, d_m) float64.
        test: M matrices (n_test, d_m).
        n_components: the common width to align in; None keeps the models' own.
        labels: (n,) int64 of the anchors, or None.
        test_labels: (n_test,), or None.
        heads: each model's own classifier, None where it has none.
    """

    anchors: list[torch.Tensor]
    test: list[torch.Tensor]
    n_components: int | None = None
    labels: torch.Tensor | None = None
    test_labels: torch.Tensor | None = None
    heads: list[Callable | None] | None = None


def make_multiview(
    M: int,
    n: int,
    d: int = 64,
    r: int = 16,
    noise: float = 0.6,
    aniso: float = 2.0,
    seed: int = 0,
) -> list[torch.Tensor]:
    """M models that see r shared factors, each through noise and a rotation of its own.

    X_m = ([Z, 0] + noise_m) Q_m: Z (n, r) Gaussian with standard deviations from 2 down to 0.5,
    noise of ``noise`` on the r shared columns and of ``noise · aniso`` on the d − r others,
    independent between models, Q_m a random orthogonal matrix.

    Args:
        M: models, >= 1.
        n: rows.
        d: width, >= r.
        r: shared factors, >= 1.
        noise: standard deviation on the shared columns, >= 0.
        aniso: how much noisier the other columns are, >= 0.
        seed: all randomness.

    Returns:
        M tensors (n, d) float64. Rows are independent, so that any split of them is fair.
    """
    for name, value, least in (("M", M, 1), ("n", n, 1), ("r", r, 1), ("d", d, r)):
        if isinstance(value, bool) or value != int(value) or value < least:
            raise ValueError(f"{name} must be a whole number >= {least}: got {value}")
    for name, value in (("noise", noise), ("aniso", aniso)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and >= 0: got {value}")
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    Z = torch.zeros(n, d, dtype=torch.float64)
    Z[:, :r] = normal(n, r) * torch.linspace(2, 0.5, r, dtype=torch.float64)
    spread = noise * torch.cat([torch.ones(r), aniso * torch.ones(d - r)]).double()
    views = []
    for _ in range(M):
        Q, R = torch.linalg.qr(normal(d, d))
        # the signs of R's diagonal make Q uniform over the orthogonal group
        views.append((Z + spread * normal(n, d)) @ (Q * R.diagonal().sign()))
    return views


N_TEST = 400
N_POOL = 797
"""Held-out digits that may serve as anchors; the last 400 of the 1197 are test rows."""


def synthetic_views(n: int, seed: int, *, M: int = 5, aniso: float = 2.0) -> Views:
    """:func:`make_multiview` cut into n anchors and 400 test rows."""
    rows = make_multiview(M, n + N_TEST, aniso=aniso, seed=seed)
    return Views([X[:n] for X in rows], [X[n:] for X in rows])


def digits_views(
    n: int, seed: int, *, n_models: int = 5, n_components: int = 48, epochs: int = 30
) -> Views:
    """The digits encoders on n anchors and 400 test rows that no encoder was trained on.

    Args:
        n: anchors, in [2, 797].
        seed: of :func:`icmllab.toolbox.digits.digits_encoders`.
        n_models: encoders.
        n_components: the common width.
        epochs: of the training.
    """
    if isinstance(n, bool) or n != int(n) or not 2 <= n <= N_POOL:
        raise ValueError(f"n must be a whole number in [2, {N_POOL}]: got {n}")
    made = digits_encoders(n_models, seed, epochs)
    return Views(
        [X[:n] for X in made.features],
        [X[-N_TEST:] for X in made.features],
        n_components,
        made.labels[:n],
        made.labels[-N_TEST:],
        made.heads,
    )


def load_views(
    folder: str | Path, *, n_anchors: int, n_components: int | None = None, seed: int = 0
) -> Views:
    """Features of real encoders from ``folder/*.npy``, one (n, d_m) file a model.

    Row i of every file belongs to object i. The rows are shuffled, the first ``n_anchors`` are
    fitted on and the rest is for testing. Pickled arrays are refused.

    Args:
        folder: holds the files; models come in the order of their names.
        n_anchors: in [2, n − 1].
        n_components: the common width; None for the narrowest where widths differ.
        seed: of the shuffle.

    Raises:
        ValueError: fewer than two files, a file that is no plain .npy matrix, unequal rows, or
            ``n_anchors`` out of range.
    """
    files = sorted(Path(folder).glob("*.npy"))
    if len(files) < 2:
        raise ValueError(f"folder must hold at least two .npy files: found {len(files)}")
    arrays = []
    for file in files:
        try:
            arrays.append(np.load(file, allow_pickle=False))
        except (ValueError, EOFError) as error:
            raise ValueError(f"{file.name} must be a plain .npy array: {error}") from None
    views = as_views("files", arrays)
    n = len(views[0])
    if isinstance(n_anchors, bool) or n_anchors != int(n_anchors) or not 2 <= n_anchors < n:
        raise ValueError(f"n_anchors must be a whole number in [2, {n - 1}]: got {n_anchors}")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    anchors, test = order[:n_anchors], order[n_anchors:]
    return Views([X[anchors] for X in views], [X[test] for X in views], n_components)


# --------------------------------------------------------------------------------------------
# Experiments: one run each, from a seed to numbers

LADDER = (8, 16, 32)
REGS = (1e-3, 1e-1)
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)


def aligners(views: Views) -> dict[str, MultiWayAligner]:
    """Every alignment of this chapter fitted on the anchors, by name.

    "gpa", "shared" and "per_model" (λ = 0.01), "agreement" (λ = 1), "pairwise", and "gcca" with
    k = 16 and ridge 1e-3.
    """
    made = {
        method: MultiWayAligner(method, n_components=views.n_components).fit(views.anchors)
        for method in ("gpa", "pairwise", "gcca")
    }
    # the corrections stand on one rigid universe
    for mode in MODES:
        made[mode] = made["gpa"].corrected(views.anchors, correction=mode)
    return made


def normalized(aligner: MultiWayAligner, Xs: Sequence) -> list[torch.Tensor]:
    """Each model's rows, centred, projected and scaled, before any alignment."""
    return [aligner.normalize(X, m) for m, X in enumerate(Xs)]


def in_universe(aligner: MultiWayAligner, Xs: Sequence) -> list[torch.Tensor]:
    """Each model's rows in the universe."""
    return [aligner.transform(X, m) for m, X in enumerate(Xs)]


def retrieval(aligner: MultiWayAligner, Xs: Sequence, k: int = 1) -> dict:
    """R@k of an alignment, in its universe, or for "pairwise" in the target's own space."""
    if aligner.method == "pairwise":
        return translated_retrieval(aligner.pair_maps_, normalized(aligner, Xs), k)
    return retrieval_at_k(in_universe(aligner, Xs), k)


def mean_geometry(aligner: MultiWayAligner, Xs: Sequence) -> float:
    """:func:`geometry_score` of the way into the universe, mean over models."""
    pairs = zip(normalized(aligner, Xs), in_universe(aligner, Xs), strict=True)
    return float(np.mean([geometry_score(X, Z) for X, Z in pairs]))


class Ladder(NamedTuple):
    """R@1 on the test rows of a method that must be tuned.

    Attributes:
        scores: of every setting.
        validated: of the setting that was best on a fifth of the anchors, held out.
        oracle: of the best setting on the test rows themselves.
    """

    scores: dict
    validated: float
    oracle: float


def tuned(fit_and_score: Callable, settings: Sequence, anchors: Sequence, test: Sequence) -> Ladder:
    """Choose a setting on held-out anchors, then score it, and all others, on the test rows.

    Args:
        fit_and_score: (anchors, rows, setting) → R@1.
        settings: what may be chosen.
        anchors: M matrices, the last fifth of whose rows is held out for the choice.
        test: M matrices.
    """
    cut = len(anchors[0]) * 4 // 5
    inner, held = [X[:cut] for X in anchors], [X[cut:] for X in anchors]
    # a stable choice: the first of equals
    best = max(settings, key=lambda s: fit_and_score(inner, held, s))
    scores = {s: fit_and_score(anchors, test, s) for s in settings}
    return Ladder(scores, scores[best], max(scores.values()))


def gcca_ladder(anchors: Sequence, test: Sequence) -> Ladder:
    """GCCA with k in 8, 16, 32 and ridge in 1e-3, 1e-1, on normalised features."""

    def score(train: Sequence, rows: Sequence, setting: tuple[int, float]) -> float:
        maps = gcca_maxvar(train, *setting)
        return retrieval_at_k([X @ W for X, W in zip(rows, maps, strict=True)])["mean"]

    return tuned(score, [(k, reg) for k in LADDER for reg in REGS], anchors, test)


def ridge_ladder(anchors: Sequence, test: Sequence) -> Ladder:
    """Independent pairwise ridge maps with four strengths, on normalised features."""

    def score(train: Sequence, rows: Sequence, ridge: float) -> float:
        return translated_retrieval(pairwise_ridge(train, ridge), rows)["mean"]

    return tuned(score, RIDGES, anchors, test)


def make_views(data: str, n: int, seed: int) -> Views:
    """:func:`digits_views` or :func:`synthetic_views` by name.

    Raises:
        ValueError: ``data`` is neither "digits" nor "synth".
    """
    if data not in ("digits", "synth"):
        raise ValueError(f"data must be 'digits' or 'synth': got {data!r}")
    return digits_views(n, seed) if data == "digits" else synthetic_views(n, seed)


def study_run(*, data: str, n: int, seed: int) -> dict[str, float]:
    """Every number of the chapter's comparison for one draw of data.

    Args:
        data: "digits" or "synth".
        n: anchors.
        seed: of the data; for digits, of the encoders too.

    Returns:
        R@1 of every alignment and baseline on 400 test rows, cycle errors, geometry scores, the
        agreement spectrum's ends, the new-model experiment, and for digits the probes and heads.
    """
    views = make_views(data, n, seed)
    found = aligners(views)
    out = {f"r1_{name}": retrieval(a, views.test)["mean"] for name, a in found.items()}
    rigid = found["gpa"]
    near, far = normalized(rigid, views.anchors), normalized(rigid, views.test)
    out["r1_identity"] = retrieval_at_k(far)["mean"]
    early = gpa(near, max_iter=1)
    out["r1_one_round"] = retrieval_at_k(list(torch.stack(far) @ early.omegas))["mean"]
    mild = found["gpa"].corrected(views.anchors, correction="agreement", lam=0.1)
    out["r1_agreement_mild"] = retrieval(mild, views.test)["mean"]
    unit = found["gpa"].corrected(views.anchors, unit_norm=True)
    out["r1_unit_norm"] = retrieval(unit, views.test)["mean"]
    relative = [relative_representation(Z, X) for Z, X in zip(far, near, strict=True)]
    out["r1_relative"] = retrieval_at_k(relative)["mean"]
    ladder, ridge = gcca_ladder(near, far), ridge_ladder(near, far)
    for k in LADDER:
        out[f"r1_gcca{k}"] = ladder.scores[k, REGS[0]]
    out |= {"r1_gcca_validated": ladder.validated, "r1_gcca_oracle": ladder.oracle}
    out |= {"r1_ridge_validated": ridge.validated, "r1_ridge_oracle": ridge.oracle}
    out["cycle_pairwise"] = cycle_error(found["pairwise"].translations())
    out["cycle_universe"] = cycle_error(found["per_model"].translations())
    for name in ("gpa", "shared", "per_model", "gcca"):
        out[f"geometry_{name}"] = mean_geometry(found[name], views.test)
    out |= {
        "gamma_max": float(rigid.agreement_[0]),
        "gamma_min": float(rigid.agreement_[-1]),
        "kept": int(found["agreement"].W_.any(dim=0).sum()),
    }
    out |= new_model(found, views)
    return out | (transfer(found, views) if views.heads else {})


def new_model(found: dict[str, MultiWayAligner], views: Views) -> dict[str, float]:
    """The last model added to a fit of the others, against the joint fit of all.

    Returns:
        ``joint_x`` and ``added_x`` for x in gpa, shared: mean R@1 of the last model's queries and
        as a gallery, against the others.
    """
    others = views.anchors[:-1]
    rigid = MultiWayAligner("gpa", n_components=views.n_components).fit(others)
    grown = {"gpa": rigid, "shared": rigid.corrected(others)}
    out = {}
    for name, aligner in grown.items():
        aligner.add_model(views.anchors[-1])
        for label, fitted in (("joint", found[name]), ("added", aligner)):
            *rest, last = in_universe(fitted, views.test)
            out[f"{label}_{name}"] = one_against(rest, last)
    return out


def one_against(others: Sequence, Z: torch.Tensor) -> float:
    """Mean R@1 of one model's rows against each of the others', as queries and as gallery."""
    hits = [match_ranks(a, b) == 0 for other in others for a, b in ((Z, other), (other, Z))]
    return float(torch.cat(hits).double().mean())


def transfer(found: dict[str, MultiWayAligner], views: Views) -> dict[str, float]:
    """Linear probes and trained heads across models: means over ordered pairs of models."""
    out = {}
    for name in ("gpa", "shared", "per_model", "gcca"):
        aligner = found[name]
        near, far = in_universe(aligner, views.anchors), in_universe(aligner, views.test)
        probe = stitch_accuracy(near, views.labels, far, views.test_labels)
        heads = head_accuracy(aligner, views.test, views.heads, views.test_labels)
        out[f"probe_{name}"] = off_diagonal_mean(probe)
        out[f"head_{name}"] = off_diagonal_mean(heads)
    out["head_own"] = float(np.nanmean(np.diag(heads)))
    return out


def lambda_sweep(views: Views, lams: Sequence[float], mode: str = "shared") -> list[dict]:
    """R@1, probe accuracy and geometry at each strength of the correction; one GPA for all."""
    rigid = MultiWayAligner("gpa", n_components=views.n_components).fit(views.anchors)
    near, far = in_universe(rigid, views.anchors), in_universe(rigid, views.test)
    rows = []
    for lam in lams:
        W = correction(near, rigid.centroid_, lam, mode)
        train, test = list(torch.stack(near) @ W), list(torch.stack(far) @ W)
        row = {"lam": lam, "r1": retrieval_at_k(test)["mean"]}
        row["geometry"] = float(
            np.mean([geometry_score(a, b) for a, b in zip(far, test, strict=True)])
        )
        if views.labels is not None:
            probe = stitch_accuracy(train, views.labels, test, views.test_labels)
            row["probe"] = off_diagonal_mean(probe)
        rows.append(row)
    return rows


def growth(views: Views, counts: Sequence[int]) -> list[dict]:
    """Cycle error and number of stored maps for the first M models of ``views``, M in ``counts``.

    With two models there is no cycle, and its error is nan.
    """
    rows = []
    for M in counts:
        anchors = views.anchors[:M]
        pairs = MultiWayAligner("pairwise", n_components=views.n_components).fit(anchors)
        one = MultiWayAligner("gcpa", n_components=views.n_components).fit(anchors)
        rows.append(
            {
                "M": M,
                "maps_pairwise": M * (M - 1),
                "maps_universe": M,
                "cycle_pairwise": cycle_error(pairs.translations()) if M > 2 else math.nan,
                "cycle_universe": cycle_error(one.translations()) if M > 2 else math.nan,
            }
        )
    return rows


SHIPPED = (study_run, {"data": ("digits", "synth"), "n": (100, 400), "seed": tuple(range(12))})
"""What ``make results CHAPTER=representations/gcpa`` computes."""


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def _random_views(rng: np.random.Generator) -> list[torch.Tensor]:
    """A small alignment problem of random size, centred."""
    M, d = int(rng.integers(2, 6)), int(rng.integers(2, 9))
    rows = make_multiview(
        M,
        int(rng.integers(3 * d, 6 * d)),
        d=d,
        r=max(1, d // 2),
        noise=float(rng.uniform(0.1, 1)),
        seed=int(rng.integers(2**31)),
    )
    return [X - X.mean(dim=0) for X in rows]


def check_procrustes(fn: Callable) -> None:
    """Exercise 1: ``fn(A, B)`` is the orthogonal R that minimises ``‖A R − B‖``.

    Compared with SciPy on 20 random problems; A and B are arrays.

    Raises:
        AssertionError: with the first problem that differs.
    """
    from scipy.linalg import orthogonal_procrustes as oracle

    rng = np.random.default_rng(11)
    for case in range(20):
        A, B = (X.numpy() for X in _random_views(rng)[:2])
        wanted, _ = oracle(A, B)
        R = np.asarray(fn(A.copy(), B.copy()))
        assert R.shape == wanted.shape, (
            f"problem {case}: R must have shape {wanted.shape}, got {R.shape}"
        )
        assert np.abs(R.T @ R - np.eye(len(R))).max() < 1e-10, (
            f"problem {case}: R must be orthogonal, RᵀR differs from I"
        )
        assert np.abs(R - wanted).max() < 1e-10, (
            f"problem {case}: ‖A R − B‖ must be {np.linalg.norm(A @ wanted - B):.6f}, got "
            f"{np.linalg.norm(A @ R - B):.6f}; with AᵀB = P S Qᵀ it is R = P Qᵀ"
        )


def check_gpa_round(fn: Callable) -> None:
    """Exercise 2: ``fn(Xs, U)`` does one round of GPA and returns (omegas, new U).

    On 20 random problems: every Ω_m is orthogonal, each half-step is an exact minimisation, the
    objective never rises over ten rounds and agrees with the pairwise identity
    Σ_m ``‖A_m − U‖²`` = (1/M) Σ_{m<m'} ``‖A_m − A_m'‖²``.

    Raises:
        AssertionError: with the first thing that fails.
    """
    rng = np.random.default_rng(12)
    for case in range(20):
        Xs = [X.numpy() for X in _random_views(rng)]
        U, before = Xs[0].copy(), math.inf
        for step in range(10):
            omegas, after = fn([X.copy() for X in Xs], U.copy())
            where = f"problem {case}, round {step + 1}"
            for m, (X, W) in enumerate(zip(Xs, omegas, strict=True)):
                W = np.asarray(W)
                assert np.abs(W.T @ W - np.eye(X.shape[1])).max() < 1e-9, (
                    f"{where}: Ω_{m} must be orthogonal"
                )
                best = pairwise_procrustes(X, U).numpy()
                excess = np.linalg.norm(X @ W - U) - np.linalg.norm(X @ best - U)
                assert excess < 1e-9, (
                    f"{where}: Ω_{m} must minimise ‖X_{m} Ω − U‖ for the U that came in"
                )
            turned = [X @ np.asarray(W) for X, W in zip(Xs, omegas, strict=True)]
            after = np.asarray(after)
            assert np.abs(after - np.mean(turned, axis=0)).max() < 1e-9, (
                f"{where}: the new U must be the mean of the turned matrices"
            )
            value = sum(np.linalg.norm(A - after) ** 2 for A in turned)
            assert value <= before * (1 + 1e-12) + 1e-12, (
                f"{where}: the objective rose from {before:.9f} to {value:.9f}"
            )
            pairs = sum(
                np.linalg.norm(A - B) ** 2 for i, A in enumerate(turned) for B in turned[:i]
            )
            assert abs(value - pairs / len(Xs)) <= 1e-9 * max(value, 1e-9), (
                f"{where}: the objective {value:.9f} must be the pairwise {pairs / len(Xs):.9f}"
            )
            U, before = after, value


def check_correction(fn: Callable) -> None:
    """Exercise 3: ``fn(As, U, lam)`` is the shared correction W.

    Compared with a least-squares solution of the stacked system
    [A_1; …; A_M; √ℓ I] W = [U; …; U; √ℓ I] on 20 random problems.

    Raises:
        AssertionError: with the first problem that differs.
    """
    rng = np.random.default_rng(13)
    for case in range(20):
        rigid = gpa(views := _random_views(rng))
        As = [(X @ W).numpy() for X, W in zip(views, rigid.omegas, strict=True)]
        U, lam = rigid.centroid.numpy(), float(rng.choice([0.01, 0.1, 1.0, 10.0]))
        d = U.shape[1]
        root = math.sqrt(lam * sum(np.sum(A**2) for A in As) / d)
        left = np.concatenate([*As, root * np.eye(d)])
        right = np.concatenate([*[U] * len(As), root * np.eye(d)])
        wanted = np.linalg.lstsq(left, right, rcond=None)[0]
        W = np.asarray(fn([A.copy() for A in As], U.copy(), lam))
        assert W.shape == wanted.shape, f"problem {case}: W must have shape {wanted.shape}"
        worst = np.abs(W - wanted).max()
        assert worst < 1e-8, (
            f"problem {case} (M={len(As)}, d={d}, lam={lam}): an entry of W is off by {worst:.2g}; "
            "set the derivative of Σ‖A_m W − U‖² + ℓ‖W − I‖² to zero, ℓ = λ tr(S_T)/d"
        )


def check_add_model(fn: Callable) -> None:
    """Exercise 4: ``fn(omegas, U, X)`` is the list of maps with one more model's at the end.

    omegas (M, d, d) and U (n, d) are a fitted universe of four models, X (n, d) a fifth model's
    normalised anchors. On three random draws the others' maps must stay what they are, bit by bit,
    and the new model's R@1 against them must come within 0.02 of the joint fit of all five.

    Raises:
        AssertionError: with the numbers.
    """
    for draw in (21, 22, 23):
        rows = make_multiview(5, 100 + N_TEST, d=32, r=8, noise=0.3, aniso=1.0, seed=draw)
        views = Views([X[:100] for X in rows], [X[100:] for X in rows])
        joint = MultiWayAligner("gpa").fit(views.anchors)
        others = MultiWayAligner("gpa").fit(views.anchors[:4])
        new = joint.normalize(views.anchors[4], 4).numpy()
        omegas, U = others.omegas_.numpy(), others.centroid_.numpy()
        maps = np.asarray(fn(omegas.copy(), U.copy(), new))
        assert maps.shape == (5, 32, 32), f"the maps must be (5, 32, 32): got {maps.shape}"
        assert np.array_equal(maps[:4], omegas), (
            "the four others' maps must stay bit by bit what they are: fit X to U, and nobody else"
        )
        omega = maps[4]
        assert np.abs(omega.T @ omega - np.eye(32)).max() < 1e-9, (
            "the new map must be orthogonal, as everybody else's is"
        )
        moved = joint.normalize(views.test[4], 4) @ torch.from_numpy(omega)
        got = one_against(in_universe(others, views.test[:4]), moved)
        *rest, last = in_universe(joint, views.test)
        wanted = one_against(rest, last)
        assert got >= wanted - 0.02, (
            f"R@1 of the new model is {got:.3f}, the joint fit reaches {wanted:.3f}: its rows must "
            "be turned onto those of U"
        )


def check_choose_lambda(fn: Callable) -> None:
    """Exercise 5: ``fn(Xs)`` chooses λ of the per-model correction from the anchors alone.

    On three draws, with few, more and many anchors, the R@1 on fresh test rows at the chosen λ
    must reach 95 % of the best value on the grid 0, 0.001, 0.01, 0.1, 1, 10. No fixed λ does.

    Raises:
        AssertionError: with the numbers.
    """
    for draw, n in ((32, 40), (33, 80), (34, 240)):
        rows = make_multiview(4, n + N_TEST, d=32, r=8, noise=0.3, seed=draw)
        views = Views([X[:n] for X in rows], [X[n:] for X in rows])
        lam = float(fn([X.clone() for X in views.anchors]))
        assert lam >= 0, f"λ must be >= 0: got {lam}"
        best = max(row["r1"] for row in lambda_sweep(views, GRID, "per_model"))
        got = lambda_sweep(views, [lam], "per_model")[0]["r1"]
        assert got >= 0.95 * best, (
            f"with {n} anchors λ = {lam:g} gives R@1 {got:.3f} on new rows; the best on the grid "
            f"is {best:.3f}, of which 95 % are expected: hold anchors out and measure"
        )
