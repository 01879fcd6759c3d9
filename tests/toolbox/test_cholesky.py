"""The damped factor: what it is, its precision, what it refuses."""

import numpy as np
import pytest
import torch

from icmllab.toolbox.cholesky import damped_cholesky


def spd(n: int, seed: int = 0) -> torch.Tensor:
    A = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A.T @ A / (2 * n)


@pytest.mark.parametrize("damping", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factor_is_numpys_of_the_damped_matrix(damping, dtype):
    S = spd(12).to(dtype)
    S = (S + S.T) / 2
    found = damped_cholesky(S, damping=damping)
    damp = damping * S.double().diagonal().mean()
    expected = np.linalg.cholesky(S.double().numpy() + damp.item() * np.eye(12))
    assert found.factor.dtype == torch.float64
    assert found.damp == pytest.approx(damp.item())
    np.testing.assert_allclose(found.factor.numpy(), expected, rtol=1e-10, atol=1e-12)
    assert not found.factor.triu(1).any()


def test_pivots_that_float32_would_lose_are_kept():
    n = 40
    at = torch.arange(n, dtype=torch.float64)
    S = torch.exp(-((at[:, None] - at) ** 2) / 18)  # condition number about 1e16
    S = S + 1e-10 * torch.eye(n)
    L = damped_cholesky(S).factor
    torch.testing.assert_close(L @ L.T, S, rtol=0, atol=1e-14)
    assert int(torch.linalg.cholesky_ex(S.float()).info) > 0


def test_a_singular_matrix_needs_damping():
    S = torch.ones(3, 3)
    with pytest.raises(
        ValueError, match=r"sigma must be positive definite after damping=0.*order 2"
    ):
        damped_cholesky(S, name="sigma")
    L = damped_cholesky(S, damping=1e-3).factor
    torch.testing.assert_close(L @ L.T, S.double() + 1e-3 * torch.eye(3))
    assert damped_cholesky([[4.0]]).factor.item() == 2


def test_the_matrix_given_is_left_alone():
    S = spd(4)
    before = S.clone()
    damped_cholesky(S, damping=1.0)
    assert torch.equal(S, before)


@pytest.mark.parametrize(
    ("S", "damping", "message"),
    [
        (torch.ones(2, 3), 0, "square"),
        (torch.tensor([[1.0, 0.1], [0.0, 1.0]]), 0, "symmetric"),
        (torch.full((2, 2), float("nan")), 0, "finite"),
        (torch.eye(2), -1, "damping"),
        (torch.eye(2), float("nan"), "damping"),
        (-torch.eye(2), 0.5, "positive definite"),
    ],
)
def test_bad_input_is_named(S, damping, message):
    with pytest.raises(ValueError, match=message):
        damped_cholesky(S, damping=damping)
