"""The Cholesky factor of a covariance, with a multiple of the identity added first."""

from typing import NamedTuple

import torch

from icmllab.toolbox.linalg import as_matrix


class DampedCholesky(NamedTuple):
    """S + damp·I = L Lᵀ.

    Attributes:
        factor: L, (n, n) float64, lower triangular with a positive diagonal.
        damp: what was added to the diagonal.
    """

    factor: torch.Tensor
    damp: float


def damped_cholesky(
    S: object, *, damping: float = 0.0, rtol: float = 1e-6, name: str = "S"
) -> DampedCholesky:
    """Factor S + damping·mean(diag S)·I in float64.

    In float32 the factor of a covariance of a thousand features loses its small pivots.

    Args:
        S: (n, n) symmetric positive semidefinite tensor or array.
        damping: relative to the mean of the diagonal; 0 takes S as it is.
        rtol: how far S may be from symmetric, relative to its largest entry.
        name: what messages call S.

    Returns:
        The factor and what was added.

    Raises:
        ValueError: S not square, not finite, not symmetric, or not positive definite once damped;
            a negative damping.
    """
    S = as_matrix(name, S).double()
    if S.shape[0] != S.shape[1]:
        raise ValueError(f"{name} must be square: got shape {tuple(S.shape)}")
    if not damping >= 0:
        raise ValueError(f"damping must be >= 0: got {damping}")
    gap, size = float((S - S.T).abs().max()), float(S.abs().max())
    if gap > rtol * size:
        raise ValueError(
            f"{name} must be symmetric: entries differ from their mirror by {gap:.3g}, "
            f"the largest is {size:.3g}"
        )
    damp = damping * float(S.diagonal().mean())
    damped = (S + S.T) / 2
    damped.diagonal().add_(damp)
    factor, info = torch.linalg.cholesky_ex(damped)
    if int(info):
        raise ValueError(
            f"{name} must be positive definite after damping={damping:g}: "
            f"the leading minor of order {int(info)} is not"
        )
    return DampedCholesky(factor, damp)
