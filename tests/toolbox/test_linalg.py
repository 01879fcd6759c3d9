"""Alignments against SciPy and their invariances."""

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes as scipy_procrustes

from icmllab.toolbox.linalg import orthogonal_procrustes


def _pair(seed, *, n=30, d=6, e=6, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, w, generator=g, dtype=torch.float64).to(dtype) for w in (d, e)]


@pytest.mark.parametrize("seed", range(5))
def test_orthogonal_procrustes_agrees_with_scipy(seed):
    A, B = _pair(seed)
    expected, _ = scipy_procrustes(A.numpy(), B.numpy())
    np.testing.assert_allclose(orthogonal_procrustes(A, B).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_orthogonal_procrustes_recovers_a_rotation(dtype, atol):
    A, R = _pair(1, dtype=dtype)
    R = torch.linalg.qr(R[:6])[0]
    found = orthogonal_procrustes(A, A @ R)
    assert found.dtype == dtype
    torch.testing.assert_close(found, R, atol=atol, rtol=0)


def test_without_reflection_the_determinant_is_one_and_the_fit_is_the_best_rotation():
    A, _ = _pair(2, d=2)
    mirrored = A @ torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)) + 0.1
    R = orthogonal_procrustes(A, mirrored, reflection=False)
    assert torch.linalg.det(R) == pytest.approx(1, abs=1e-12)
    angles = torch.linspace(0, 2 * torch.pi, 20001, dtype=torch.float64)
    all_rotations = torch.stack(
        [
            torch.stack([angles.cos(), -angles.sin()], 1),
            torch.stack([angles.sin(), angles.cos()], 1),
        ],
        1,
    )
    errors = (A @ all_rotations - mirrored).square().sum((1, 2))
    assert (A @ R - mirrored).square().sum() <= errors.min() + 1e-9


def test_a_rectangular_map_has_orthonormal_columns():
    A, B = _pair(3, d=8, e=3)
    R = orthogonal_procrustes(A, B)
    assert R.shape == (8, 3)
    torch.testing.assert_close(R.T @ R, torch.eye(3, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda A, B: (A[:5], B), "same number of rows"),
        (lambda A, B: (A * float("nan"), B), "A must be finite"),
        (lambda A, B: (A, B[0]), "B must be 2-D"),
        (lambda A, B: (A, B.to(torch.complex64)), "B must hold real numbers"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        orthogonal_procrustes(*change(*_pair(0)))


def test_a_rotation_between_different_widths_is_refused():
    A, B = _pair(0, e=4)
    with pytest.raises(ValueError, match="one width"):
        orthogonal_procrustes(A, B, reflection=False)
