"""Alignments between feature spaces: the small linear algebra that several papers share."""

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
