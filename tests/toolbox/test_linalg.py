"""Alignments against SciPy and their invariances."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import fractional_matrix_power
from scipy.linalg import lstsq as scipy_lstsq
from scipy.linalg import orthogonal_procrustes as scipy_procrustes
from sklearn.cross_decomposition import CCA
from sklearn.decomposition import PCA as SkPCA
from sklearn.linear_model import Ridge

from icmllab.toolbox.linalg import (
    affine_map,
    fit_pca,
    gcca,
    gpa,
    orthogonal_procrustes,
    psd_power,
    scaled_procrustes,
)


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


# ----------------------------------------------------------------- similarity, affine, powers


@pytest.mark.parametrize("seed", range(4))
def test_scaled_procrustes_has_scipys_scale_and_recovers_a_similarity(seed):
    A, B = _pair(seed)
    R, nuclear = scipy_procrustes(A.numpy(), B.numpy())
    found = scaled_procrustes(A, B)
    assert found.scale == pytest.approx(nuclear / float(A.square().sum()))
    np.testing.assert_allclose(found(A), found.scale * A.numpy() @ R, atol=1e-10)
    Q = torch.linalg.qr(B[:6])[0]
    known = scaled_procrustes(A, 2.5 * A @ Q)
    assert known.scale == pytest.approx(2.5)
    torch.testing.assert_close(known.rotation, Q, atol=1e-10, rtol=0)


def test_scale_is_never_negative_and_needs_something_to_scale():
    A = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    assert scaled_procrustes(A, -A, reflection=False).scale == 0
    assert scaled_procrustes(A, -A).scale == pytest.approx(1)
    with pytest.raises(ValueError, match="A must not be zero"):
        scaled_procrustes(A * 0, A)


@pytest.mark.parametrize("seed", range(3))
def test_affine_map_is_least_squares_with_an_intercept(seed):
    A, B = _pair(seed, e=4)
    A, B = A + 3, B - 2
    ones = np.ones((len(A), 1))
    wanted = scipy_lstsq(np.hstack([A.numpy(), ones]), B.numpy())[0]
    found = affine_map(A, B)
    np.testing.assert_allclose(found.weight, wanted[:-1], atol=1e-10)
    np.testing.assert_allclose(found.bias, wanted[-1], atol=1e-10)
    np.testing.assert_allclose(found(A), np.hstack([A.numpy(), ones]) @ wanted, atol=1e-10)


@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_affine_map_with_a_ridge_is_scikit_learns(ridge):
    A, B = _pair(5, e=3)
    A = A + 1
    level = ridge * float((A - A.mean(dim=0)).square().sum()) / 6
    model = Ridge(alpha=level).fit(A.numpy(), B.numpy())
    found = affine_map(A, B, ridge=ridge)
    np.testing.assert_allclose(found.weight.T, model.coef_, atol=1e-9)
    np.testing.assert_allclose(found.bias, model.intercept_, atol=1e-9)


def test_affine_map_of_dependent_columns_is_the_one_of_least_norm():
    A, B = _pair(6, e=2)
    A = torch.cat([A, A[:, :1]], dim=1)
    centred = (A - A.mean(dim=0)).numpy()
    wanted = np.linalg.pinv(centred) @ (B - B.mean(dim=0)).numpy()
    np.testing.assert_allclose(affine_map(A, B).weight, wanted, atol=1e-9)
    with pytest.raises(ValueError, match="ridge must be finite and >= 0: got -1"):
        affine_map(A, B, ridge=-1.0)
    with pytest.raises(ValueError, match="same number of rows"):
        affine_map(A, B[:4])


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.5, 1 / 3, 2.0])
def test_psd_power_is_scipys_matrix_power(power):
    A, _ = _pair(7)
    S = A.T @ A
    wanted = fractional_matrix_power(S.numpy(), power).real
    np.testing.assert_allclose(psd_power(S, power), wanted, rtol=1e-8, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999), d=st.integers(1, 7), rank=st.integers(1, 7))
def test_psd_powers_of_a_singular_matrix_multiply_to_its_projection(seed, d, rank):
    rank = min(rank, d)
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))[0][:, :rank]
    S = (Q * torch.linspace(0.5, 2, rank, dtype=torch.float64)) @ Q.T
    root, inverse = psd_power(S, 0.5), psd_power(S, -0.5)
    torch.testing.assert_close(root @ root, S, atol=1e-10, rtol=0)
    torch.testing.assert_close(root @ inverse, Q @ Q.T, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("S", "message"),
    [
        (torch.eye(3)[:2], "S must be square"),
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "S must be symmetric"),
        (torch.diag(torch.tensor([1.0, -0.1])), "positive semi-definite"),
    ],
)
def test_a_matrix_without_a_power_is_refused(S, message):
    with pytest.raises(ValueError, match=message):
        psd_power(S, 0.5)


# ------------------------------------------------------------------------------------- PCA


@pytest.mark.parametrize(("n", "d", "k"), [(40, 7, 3), (40, 7, 7), (6, 9, 5)])
def test_principal_components_are_scikit_learns_up_to_sign(n, d, k):
    A, _ = _pair(8, n=n, d=d)
    A = A * torch.arange(1, d + 1) + 4
    theirs = SkPCA(n_components=k).fit(A.numpy())
    ours = fit_pca(A, k)
    np.testing.assert_allclose(ours.variances * n / (n - 1), theirs.explained_variance_)
    np.testing.assert_allclose(ours.project(A).abs(), np.abs(theirs.transform(A)), atol=1e-9)
    assert bool((ours.components.gather(0, ours.components.abs().argmax(0)[None]) > 0).all())
    whole = ours.restore(ours.project(A))
    np.testing.assert_allclose(whole, theirs.inverse_transform(theirs.transform(A)), atol=1e-9)


def test_whitened_data_have_the_identity_as_covariance_and_no_axis_without_variance():
    A, _ = _pair(9)
    Z = fit_pca(A).whiten(A)
    torch.testing.assert_close(Z.T @ Z / 30, torch.eye(6, dtype=torch.float64))
    flat = torch.cat([A, A[:, :1]], dim=1)
    with pytest.raises(ValueError, match="rank of the data"):
        fit_pca(flat).whiten(flat)
    with pytest.raises(ValueError, match=r"n_components must be a whole number in \[1, .* = 6\]"):
        fit_pca(A, 7)


# ------------------------------------------------------------------------------------- GPA


def _views(seed, *, M=4, n=50, d=6, noise=0.3):
    g = torch.Generator().manual_seed(seed)
    Z = torch.randn(n, d, generator=g, dtype=torch.float64) * torch.linspace(2, 0.5, d)
    views = []
    for _ in range(M):
        Q = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))[0]
        X = (Z + noise * torch.randn(n, d, generator=g, dtype=torch.float64)) @ Q
        views.append(X - X.mean(dim=0))
    return views


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 9999),
    M=st.integers(2, 6),
    init=st.sampled_from(["medoid", "first", "mean"]),
    reflection=st.booleans(),
)
def test_gpa_descends_to_orthogonal_maps_with_the_pairwise_identity(seed, M, init, reflection):
    found = gpa(_views(seed, M=M), init=init, reflection=reflection, max_iter=60)
    values = torch.tensor(found.objective, dtype=torch.float64)
    assert bool((values[1:] <= values[:-1] * (1 + 1e-12)).all())
    eye = torch.eye(6, dtype=torch.float64).expand(M, 6, 6)
    torch.testing.assert_close(found.omegas.mT @ found.omegas, eye, atol=1e-12, rtol=0)
    if not reflection:
        assert bool((torch.linalg.det(found.omegas) > 0).all())
    turned = torch.stack(_views(seed, M=M)) @ found.omegas
    torch.testing.assert_close(turned.mean(dim=0), found.centroid)
    pairs = sum((turned[a] - turned[b]).square().sum() for a in range(M) for b in range(a))
    assert float(pairs) / M == pytest.approx(found.objective[-1], rel=1e-11)


def test_gpa_stands_still_at_a_joint_minimum():
    views = _views(1)
    found = gpa(views, tol=0.0, max_iter=2000)
    for X, W in zip(views, found.omegas, strict=True):
        # the best map to the centroid of the others is the map that it has
        others = found.centroid - X @ W / len(views)
        best = orthogonal_procrustes(X, others)
        torch.testing.assert_close(W, best, atol=1e-6, rtol=0)


def test_gpa_of_two_matrices_is_one_procrustes_fit():
    A, B = _views(2, M=2)
    found = gpa([A, B], tol=1e-14, max_iter=5000)
    between = found.omegas[0] @ found.omegas[1].T
    torch.testing.assert_close(between, orthogonal_procrustes(A, B), atol=1e-5, rtol=0)


def test_gpa_without_noise_is_exact():
    found = gpa(_views(3, noise=0.0))
    assert found.objective[-1] < 1e-18
    assert found.converged


def test_first_round_never_counts_as_converged():
    found = gpa(_views(4), tol=0.5)
    assert found.n_iter >= 2
    assert gpa(_views(4), max_iter=1).converged is False


@pytest.mark.parametrize("reflection", [True, False])
def test_canonical_axes_are_principal_and_do_not_depend_on_the_first_turn(reflection):
    views = _views(5)
    a = gpa(views, reflection=reflection)
    gram = a.centroid.T @ a.centroid
    off = gram - torch.diag(gram.diagonal())
    assert float(off.abs().max()) < 1e-9
    assert bool((gram.diagonal().diff() <= 1e-9).all())
    Q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    Q = Q * torch.sign(torch.linalg.det(Q)) if not reflection else Q
    # turn every view: the gauge in which U starts differs, the universe may not
    b = gpa([X @ Q for X in views], reflection=reflection)
    if reflection:
        torch.testing.assert_close(a.centroid, b.centroid, atol=1e-6, rtol=0)
    raw = gpa(views, reflection=reflection, canonical=False)
    assert raw.objective == a.objective
    torch.testing.assert_close(
        raw.omegas[0] @ raw.omegas[1].T, a.omegas[0] @ a.omegas[1].T, atol=1e-9, rtol=0
    )


def test_medoid_start_is_the_matrix_nearest_to_the_others():
    views = _views(6, M=3, noise=0.1)
    views.append(torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).double())
    one = gpa(views, max_iter=1, canonical=False)

    def residual(a):
        fits = [(views[a] @ orthogonal_procrustes(views[a], B) - B).square().sum() for B in views]
        return float(sum(fits))

    best = min(range(4), key=residual)
    assert best != 3
    wanted = torch.stack([orthogonal_procrustes(X, views[best]) for X in views])
    torch.testing.assert_close(one.omegas, wanted, atol=1e-9, rtol=0)
    first = gpa(views, init="first", max_iter=1, canonical=False)
    eye = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(first.omegas[0], eye, atol=1e-9, rtol=0)


def test_fewer_rows_than_columns_warn_and_give_the_same_maps_each_time():
    views = [X[:4] for X in _views(7)]
    with pytest.warns(UserWarning, match="4 rows do not determine"):
        a = gpa(views)
    with pytest.warns(UserWarning, match="do not determine"):
        b = gpa(views)
    assert torch.equal(a.omegas, b.omegas)
    eye = torch.eye(6, dtype=torch.float64).expand(4, 6, 6)
    torch.testing.assert_close(a.omegas.mT @ a.omegas, eye, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("views", "options", "message"),
    [
        (lambda v: v[:1], {}, "Xs must hold at least 2 matrices"),
        (lambda v: [v[0], v[1][:9]], {}, "same number of rows"),
        (lambda v: [v[0], v[1][:, :5]], {}, "same number of columns"),
        (lambda v: v, {"init": "median"}, "init must be one of"),
        (lambda v: v, {"tol": -1.0}, "tol must be"),
        (lambda v: v, {"max_iter": 0}, "max_iter must be"),
    ],
)
def test_bad_calls_of_gpa_are_named(views, options, message):
    with pytest.raises(ValueError, match=message):
        gpa(views(_views(0)), **options)


# ------------------------------------------------------------------------------------ GCCA


@pytest.mark.parametrize("reg", [1e-3, 0.1, 1.0])
def test_gcca_solves_the_eigenproblem_that_it_states(reg):
    views = [X[:, :w] for X, w in zip(_views(8), (6, 5, 4, 6), strict=True)]
    found = gcca(views, 3, reg)
    total = torch.zeros(50, 50, dtype=torch.float64)
    for X in views:
        C = X.T @ X + reg * (X.T @ X).trace() / X.shape[1] * torch.eye(X.shape[1])
        total += X @ torch.linalg.solve(C, X.T)
    values = torch.linalg.eigvalsh(total).flip(0)[:3]
    torch.testing.assert_close(found.values, values)
    torch.testing.assert_close(total @ found.consensus, found.consensus * values)
    eye = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(found.consensus.T @ found.consensus, eye, atol=1e-10, rtol=0)
    for X, W in zip(views, found.weights, strict=True):
        # each map is the ridge regression of the consensus on the view
        level = reg * float(X.square().sum()) / X.shape[1]
        model = Ridge(alpha=level, fit_intercept=False).fit(X.numpy(), found.consensus.numpy())
        np.testing.assert_allclose(W.T, model.coef_, atol=1e-9)


def test_gcca_of_two_views_has_the_canonical_correlations_of_scikit_learn():
    A, B = _views(9, M=2, n=300, noise=0.8)
    theirs = CCA(n_components=3, scale=False, max_iter=5000, tol=1e-12).fit(A.numpy(), B.numpy())
    x, y = theirs.transform(A.numpy(), B.numpy())
    rho = [np.corrcoef(x[:, i], y[:, i])[0, 1] for i in range(3)]
    np.testing.assert_allclose(gcca([A, B], 3, 0.0).values - 1, rho, atol=1e-6)


def test_gcca_without_ridge_does_not_see_an_invertible_map_of_a_view():
    views = _views(10)
    g = torch.Generator().manual_seed(0)
    B = torch.randn(6, 6, generator=g, dtype=torch.float64) + 3 * torch.eye(6)
    a, b = gcca(views, 2, 0.0), gcca([views[0] @ B, *views[1:]], 2, 0.0)
    torch.testing.assert_close(a.consensus, b.consensus, atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    ("views", "k", "reg", "message"),
    [
        (lambda v: v, 0, 0.1, "k must be a whole number in"),
        (lambda v: v, 25, 0.1, r"k must be a whole number in \[1, 24\]: got 25"),
        (lambda v: v, 2, -0.1, "reg must be finite and >= 0"),
        (lambda v: [v[0], v[1] * (torch.arange(6) > 0)], 2, 0.0, r"singular view: Xs\[1\]"),
        (lambda v: v[:1], 2, 0.1, "at least 2 matrices"),
    ],
)
def test_bad_calls_of_gcca_are_named(views, k, reg, message):
    with pytest.raises(ValueError, match=message):
        gcca(views(_views(0)), k, reg)
