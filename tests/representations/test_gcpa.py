"""Alignment of many models: exact identities, other libraries, and the claims in small."""

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import orthogonal_procrustes as scipy_procrustes
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge

from icmllab.representations import gcpa
from icmllab.representations.gcpa import MultiWayAligner

D = 12


def _views(seed=0, *, M=4, n=60, d=D, r=4, noise=0.4, aniso=2.0, shift=True):
    rows = gcpa.make_multiview(M, n, d=d, r=r, noise=noise, aniso=aniso, seed=seed)
    return [X + m if shift else X - X.mean(dim=0) for m, X in enumerate(rows)]


def _aligned(seed=0, **options):
    views = _views(seed, shift=False, **options)
    rigid = gcpa.gpa(views)
    return [X @ W for X, W in zip(views, rigid.omegas, strict=True)], rigid


def _wide(seed=0):
    """Models of different widths that share factors."""
    return [X[:, :w] for X, w in zip(_views(seed), (12, 10, 11, 9), strict=True)]


# ------------------------------------------------------------------------------- correction


@pytest.mark.parametrize("lam", [0.0, 1e-3, 0.01, 1.0, 1e3])
@pytest.mark.parametrize("seed", range(3))
def test_shared_correction_solves_the_stacked_least_squares_problem(lam, seed):
    A, rigid = _aligned(seed)
    U, eye = rigid.centroid, torch.eye(D, dtype=torch.float64)
    level = lam * sum(float(a.square().sum()) for a in A) / D
    left = torch.cat([*A, math.sqrt(level) * eye]).numpy()
    right = torch.cat([U] * len(A) + [math.sqrt(level) * eye]).numpy()
    wanted = np.linalg.lstsq(left, right, rcond=None)[0]
    np.testing.assert_allclose(gcpa.correction(A, U, lam).numpy(), wanted, atol=1e-9)


@pytest.mark.parametrize("lam", [0.0, 0.01, 1.0])
def test_per_model_correction_is_a_ridge_towards_the_identity_by_scikit_learn(lam):
    A, rigid = _aligned()
    W = gcpa.correction(A, rigid.centroid, lam, "per_model")
    for a, w in zip(A, W, strict=True):
        level = lam * float(a.square().sum()) / D
        # ‖AW − U‖² + ℓ‖W − I‖² is a ridge for R = W − I with target U − A
        target = (rigid.centroid - a).numpy()
        found = Ridge(alpha=level, fit_intercept=False, solver="svd").fit(a.numpy(), target)
        np.testing.assert_allclose(w.numpy() - np.eye(D), found.coef_.T, atol=1e-9)


@pytest.mark.parametrize("mode", ["shared", "per_model"])
def test_infinite_lambda_is_exactly_the_identity_and_large_lambda_tends_to_it(mode):
    A, rigid = _aligned()
    eye = torch.eye(D, dtype=torch.float64)
    W = gcpa.correction(A, rigid.centroid, math.inf, mode)
    assert bool((eye == W).all())
    gaps = [
        float((gcpa.correction(A, rigid.centroid, lam, mode) - eye).abs().max())
        for lam in (1.0, 10.0, 100.0, 1e4)
    ]
    assert all(a > b for a, b in pairwise(gaps))
    assert gaps[-1] < 1e-3


def test_without_ridge_the_eigenvalues_of_the_correction_are_the_agreement_ratios():
    A, rigid = _aligned()
    values = torch.linalg.eigvals(gcpa.correction(A, rigid.centroid, 0.0))
    assert float(values.imag.abs().max()) < 1e-9
    found = values.real.sort(descending=True).values
    torch.testing.assert_close(found, gcpa.agreement_spectrum(A), atol=1e-9, rtol=0)


def test_isotropic_energy_gives_the_wiener_factor_with_lambda():
    g = torch.Generator().manual_seed(3)
    n, d, M, lam = 400, 5, 3, 0.3
    # views with S_T = c·I: the same energy along all directions, agreement along some
    Q = torch.linalg.qr(torch.randn(n, d + M * d, generator=g, dtype=torch.float64))[0]
    share = torch.linspace(0, 1, d, dtype=torch.float64)
    A = [
        Q[:, :d] * share.sqrt() + Q[:, d * (m + 1) : d * (m + 2)] * (1 - share).sqrt()
        for m in range(M)
    ]
    U = sum(A) / M
    gamma = share + (1 - share) / M
    W = gcpa.correction(A, U, lam)
    wanted = torch.diag((gamma + lam) / (1 + lam))
    torch.testing.assert_close(W, wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(gcpa.agreement_spectrum(A), gamma.flip(0), atol=1e-12, rtol=0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), M=st.integers(2, 5), noise=st.floats(0.05, 2))
def test_agreement_lies_between_zero_and_one_and_is_the_same_in_every_basis(seed, M, noise):
    A, _ = _aligned(seed, M=M, noise=noise, d=6, r=2, n=40)
    gamma = gcpa.agreement_spectrum(A)
    assert bool(((gamma >= 0) & (gamma <= 1)).all())
    assert bool((gamma[:-1] >= gamma[1:]).all())
    g = torch.Generator().manual_seed(seed)
    B = torch.randn(6, 6, generator=g, dtype=torch.float64) + 3 * torch.eye(6)
    turned = gcpa.agreement_spectrum([a @ B for a in A])
    torch.testing.assert_close(turned, gamma, atol=1e-8, rtol=0)


def test_pure_private_noise_agrees_by_one_over_the_number_of_models():
    g = torch.Generator().manual_seed(0)
    A = [torch.randn(20_000, 4, generator=g, dtype=torch.float64) for _ in range(5)]
    assert gcpa.agreement_spectrum(A).sub(1 / 5).abs().max() < 0.02


def test_agreement_mode_whitens_and_weighs_by_the_freed_agreement():
    A, rigid = _aligned(n=300)
    M, n, lam = len(A), 300, 0.5
    W = gcpa.correction(A, rigid.centroid, lam, "agreement")
    T = sum(a.T @ a for a in A) / (M * n)
    T = T + lam * T.trace() / D * torch.eye(D, dtype=torch.float64)
    # T^{-1/2} V diag(ρ): in the metric of T its columns are orthogonal with lengths ρ
    weights = W.T @ T @ W
    off = weights - torch.diag(weights.diagonal())
    assert float(off.abs().max()) < 1e-10
    rho = weights.diagonal().sqrt()
    assert bool((rho[:-1] >= rho[1:] - 1e-12).all())
    gamma = torch.linalg.eigvals(torch.linalg.solve(T, rigid.centroid.T @ rigid.centroid / n))
    gamma = gamma.real.sort(descending=True).values
    wanted = ((M * gamma - 1) / (M - 1)).clamp(0, 1)
    torch.testing.assert_close(rho, wanted, atol=1e-8, rtol=0)
    assert 0 < int((rho == 0).sum()) < D


def test_unit_norm_is_the_correction_of_rows_of_length_one():
    A, rigid = _aligned()
    unit = [torch.nn.functional.normalize(a, dim=1) for a in A]
    U = torch.nn.functional.normalize(rigid.centroid, dim=1)
    for mode in gcpa.MODES:
        W = gcpa.correction(A, rigid.centroid, 0.1, mode, unit_norm=True)
        torch.testing.assert_close(W, gcpa.correction(unit, U, 0.1, mode))


def test_noise_free_models_need_no_correction():
    views = _views(n=200, d=16, r=16, noise=0.0, shift=False)
    rigid = gcpa.gpa(views)
    assert rigid.objective[-1] < 1e-18
    A = [X @ W for X, W in zip(views, rigid.omegas, strict=True)]
    W = gcpa.correction(A, rigid.centroid, 0.01)
    assert float((W - torch.eye(16, dtype=torch.float64)).abs().max()) < 1e-10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lam": -0.1}, "lam must be >= 0: got -0.1"),
        ({"lam": math.nan}, "lam must be >= 0: got nan"),
        ({"mode": "both"}, "mode must be one of shared"),
        ({"lam": math.inf, "mode": "agreement"}, "lam must be finite"),
    ],
)
def test_bad_options_of_the_correction_are_named(change, message):
    A, rigid = _aligned()
    given = {"lam": 0.01, **change}
    with pytest.raises(ValueError, match=message):
        gcpa.correction(A, rigid.centroid, **given)


@pytest.mark.parametrize("mode", gcpa.MODES)
def test_no_ridge_on_features_that_do_not_span_is_refused_with_advice(mode):
    A, rigid = _aligned()
    flat = [a * (torch.arange(D) > 0) for a in A]
    U = rigid.centroid * (torch.arange(D) > 0)
    with pytest.raises(ValueError, match=r"lam must be > 0 .* 0\.01 is a good start"):
        gcpa.correction(flat, U, 0.0, mode)
    assert bool(gcpa.correction(flat, U, 0.01, mode).isfinite().all())


def test_a_centroid_of_another_shape_is_refused():
    A, rigid = _aligned()
    with pytest.raises(ValueError, match="centroid must have the shape"):
        gcpa.correction(A, rigid.centroid[:5], 0.1)


# -------------------------------------------------------------------------------- estimator


def test_the_universe_is_centred_scaled_and_consistent():
    views = _views()
    aligner = MultiWayAligner("gpa").fit(views)
    for m, X in enumerate(views):
        Z = aligner.normalize(X, m)
        assert float(Z.mean(dim=0).abs().max()) < 1e-12
        assert float(Z.square().sum(dim=1).mean()) == pytest.approx(1)
    U = torch.stack([aligner.transform(X, m) for m, X in enumerate(views)]).mean(dim=0)
    torch.testing.assert_close(U, aligner.centroid_)
    assert gcpa.cycle_error(aligner.translations()) < 1e-12
    assert aligner.scales_[0] != aligner.scales_[1]
    assert float((aligner.means_[3] - views[3].mean(dim=0)).abs().max()) < 1e-12


def test_arrays_give_arrays_and_tensors_give_tensors_with_the_same_numbers():
    views = _views()
    a = MultiWayAligner().fit(views)
    b = MultiWayAligner().fit([X.numpy() for X in views])
    there = b.transform(views[1].numpy(), model=1)
    assert isinstance(there, np.ndarray)
    np.testing.assert_array_equal(there, a.transform(views[1], model=1).numpy())
    assert isinstance(b.translate(views[0].numpy(), 0, 1), np.ndarray)
    assert isinstance(a.inverse_transform(a.transform(views[0], 0), 0), torch.Tensor)


def test_two_models_are_pairwise_procrustes():
    views = _views(M=2)
    gpa, pair = (MultiWayAligner(m).fit(views) for m in ("gpa", "pairwise"))
    torch.testing.assert_close(gpa.translation(0, 1), pair.translation(0, 1), atol=1e-6, rtol=0)
    A, B = (pair.normalize(X, m).numpy() for m, X in enumerate(views))
    np.testing.assert_allclose(pair.translation(0, 1), scipy_procrustes(A, B)[0], atol=1e-10)


@pytest.mark.parametrize("correction", ["shared", "agreement"])
def test_a_shared_correction_cancels_in_every_translation(correction):
    views = _views()
    rigid = MultiWayAligner("gpa").fit(views)
    made = rigid.corrected(views, correction=correction, lam=0.3)
    assert torch.equal(made.translations(), rigid.translations())
    assert torch.equal(made.translate(views[2], 2, 0), rigid.translate(views[2], 2, 0))


def test_per_model_correction_changes_translations_and_keeps_them_consistent():
    views = _views()
    rigid = MultiWayAligner("gpa").fit(views)
    made = rigid.corrected(views, correction="per_model")
    assert float((made.translations() - rigid.translations()).abs().max()) > 0.01
    assert gcpa.cycle_error(made.translations()) < 1e-10
    moved = made.transform(views[0], 0)
    back = made.translate(views[0], 0, 3)
    torch.testing.assert_close(made.transform(back, 3), moved, atol=1e-9, rtol=0)


def test_a_correction_on_given_rigid_maps_is_the_fit_from_scratch():
    views = _wide()
    for mode in gcpa.MODES:
        whole = MultiWayAligner(correction=mode, lam=0.2, unit_norm=True).fit(views)
        rigid = MultiWayAligner("gpa").fit(views)
        made = rigid.corrected(views, correction=mode, lam=0.2, unit_norm=True)
        assert torch.equal(made.W_, whole.W_)
        assert rigid.W_ is None
        assert rigid.method == "gpa"


@pytest.mark.parametrize("method", ["gpa", "gcpa"])
@pytest.mark.parametrize("correction", ["shared", "per_model"])
def test_the_way_back_undoes_the_way_in(method, correction):
    views = _wide()
    aligner = MultiWayAligner(method, correction=correction, lam=0.1).fit(views)
    for m, X in enumerate(views):
        Z = aligner.transform(X, m)
        assert Z.shape == (60, 9)
        back = aligner.inverse_transform(Z, m)
        assert back.shape == X.shape
        torch.testing.assert_close(aligner.transform(back, m), Z, atol=1e-9, rtol=0)
    # model 3 is as wide as the universe, so nothing of it was projected away
    torch.testing.assert_close(aligner.inverse_transform(Z, 3), views[3], atol=1e-9, rtol=0)


def test_dropped_directions_and_near_singular_corrections_are_not_inverted():
    views = _views(n=400, noise=1.5)
    made = MultiWayAligner(correction="agreement").fit(views)
    assert 0 < int(made.W_.any(dim=0).sum()) < D
    with pytest.raises(ValueError, match="drops directions"):
        made.inverse_transform(made.centroid_, 0)
    made = MultiWayAligner(lam=0.0).fit(views)
    made.W_ = made.W_.clone()
    made.W_[:, 0] = made.W_[:, 1] * (1 + 1e-10)
    with pytest.raises(ValueError, match="condition number exceeds"):
        made.inverse_transform(made.centroid_, 0)


def test_projection_goes_to_the_narrowest_model_and_padding_to_the_widest():
    views = _wide()
    assert MultiWayAligner("gpa").fit(views).omegas_.shape == (4, 9, 9)
    assert MultiWayAligner("gpa", n_components=5).fit(views).omegas_.shape == (4, 5, 5)
    padded = MultiWayAligner("gpa", pad=True).fit(views)
    assert padded.omegas_.shape == (4, 12, 12)
    gram = padded.components_[3].T @ padded.components_[3]
    wanted = torch.diag(torch.tensor([1.0] * 9 + [0.0] * 3, dtype=torch.float64))
    torch.testing.assert_close(gram, wanted, atol=1e-12, rtol=0)
    back = padded.inverse_transform(padded.transform(views[3], 3), 3)
    torch.testing.assert_close(back, views[3], atol=1e-9, rtol=0)


def test_means_axes_and_scales_come_from_the_anchors_alone():
    views = _wide()
    aligner = MultiWayAligner().fit([X[:40] for X in views])
    before = aligner.transform(views[0][40:], 0)
    one_by_one = torch.cat([aligner.transform(x[None], 0) for x in views[0][40:]])
    torch.testing.assert_close(before, one_by_one, atol=1e-12, rtol=0)


@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_units_and_offsets_of_a_model_do_not_matter(factor):
    views = _views()
    changed = [X * factor + 7 * factor if m == 1 else X for m, X in enumerate(views)]
    a, b = (MultiWayAligner().fit(v) for v in (views, changed))
    torch.testing.assert_close(
        a.transform(views[1], 1), b.transform(changed[1], 1), atol=1e-6, rtol=0
    )


def test_a_larger_share_of_anchors_gives_a_model_no_larger_weight():
    # the scale is a mean over rows: doubling all rows changes no map
    views = _views()
    a = MultiWayAligner("gpa").fit(views)
    b = MultiWayAligner("gpa").fit([torch.cat([X, X]) for X in views])
    torch.testing.assert_close(a.omegas_, b.omegas_, atol=1e-6, rtol=0)
    assert a.scales_ == pytest.approx(b.scales_)


def test_rotations_only_when_reflections_are_not_allowed():
    views = _views()
    views[1] = views[1] * torch.tensor([-1.0] + [1.0] * (D - 1))
    for allowed in (True, False):
        dets = torch.linalg.det(MultiWayAligner("gpa", allow_reflection=allowed).fit(views).omegas_)
        assert bool((dets.round() == 1).all()) is not allowed


def test_gcca_aligner_reaches_a_shared_space_and_comes_back_by_pseudo_inverse():
    views = _wide()
    aligner = MultiWayAligner("gcca", gcca_components=5).fit(views)
    Z = [aligner.transform(X, m) for m, X in enumerate(views)]
    assert Z[0].shape == (60, 5)
    normal = [aligner.normalize(X, m) for m, X in enumerate(views)]
    for z, X, W in zip(Z, normal, gcpa.gcca_maxvar(normal, 5, 1e-3), strict=True):
        torch.testing.assert_close(z, X @ W)
    T = aligner.translation(0, 1)
    wanted = aligner.weights_[0] @ torch.linalg.pinv(aligner.weights_[1])
    torch.testing.assert_close(T, wanted)


def test_pairwise_maps_have_no_universe_and_contradict_one_another():
    views = _views()
    aligner = MultiWayAligner("pairwise").fit(views)
    with pytest.raises(ValueError, match="no universe"):
        aligner.transform(views[0], 0)
    with pytest.raises(ValueError, match="no universe"):
        aligner.inverse_transform(views[0], 0)
    T = aligner.translations()
    assert gcpa.cycle_error(T) > 0.05
    torch.testing.assert_close(T[0, 2], T[2, 0].T, atol=1e-9, rtol=0)
    moved = aligner.translate(views[0], 0, 2)
    direct = aligner.normalize(views[0], 0) @ T[0, 2]
    torch.testing.assert_close(aligner.normalize(moved, 2), direct, atol=1e-12, rtol=0)


# ----------------------------------------------------------------------------- a new model


@pytest.mark.parametrize("method", ["gpa", "gcpa", "gcca", "pairwise"])
@pytest.mark.parametrize("correction", ["shared", "per_model"])
def test_adding_a_model_leaves_every_other_map_bit_by_bit(method, correction):
    views = _views(n=80)
    aligner = MultiWayAligner(method, correction=correction, gcca_components=4).fit(views[:3])
    if method == "pairwise":
        before = aligner.translations().clone()
        assert aligner.add_model(views[3]) == 3
        assert torch.equal(aligner.translations()[:3, :3], before)
        torch.testing.assert_close(
            aligner.translation(3, 1),
            MultiWayAligner("pairwise").fit(views).translation(3, 1),
            atol=1e-9,
            rtol=0,
        )
        return
    before = [aligner.transform(X, m).clone() for m, X in enumerate(views[:3])]
    centroid = aligner.centroid_.clone()
    assert aligner.add_model(views[3]) == 3
    assert aligner.n_models_ == 4
    assert torch.equal(aligner.centroid_, centroid)
    for m, Z in enumerate(before):
        assert torch.equal(aligner.transform(views[m], m), Z)
    assert aligner.transform(views[3], 3).shape == before[0].shape


@pytest.mark.parametrize("correction", ["shared", "per_model"])
def test_a_copy_of_a_known_model_is_added_where_that_model_is(correction):
    views = _views(n=400, noise=0.1, aniso=1.0)
    aligner = MultiWayAligner(correction=correction).fit(views)
    aligner.add_model(views[1])
    a, b = aligner.transform(views[1], 1), aligner.transform(views[1], 4)
    assert float((a - b).norm() / a.norm()) < 0.02


def test_a_new_models_own_correction_follows_the_aligners_options():
    views = _views(n=100)
    rigid = MultiWayAligner(correction="per_model", lam=math.inf).fit(views[:3])
    rigid.add_model(views[3])
    eye = torch.eye(D, dtype=torch.float64)
    assert bool((eye == rigid.W_).all())
    made = MultiWayAligner(correction="per_model", lam=0.1, unit_norm=True).fit(views[:3])
    made.add_model(views[3])
    A = made.normalize(views[3], 3) @ made.omegas_[3]
    # the same ridge that `correction` solves, with the consensus frozen
    wanted = gcpa.correction([A, A], made.centroid_, 0.1, "per_model", unit_norm=True)[0]
    torch.testing.assert_close(made.W_[3], wanted)


def test_a_model_that_saw_some_anchors_is_added_through_them():
    views = _views(n=300, noise=0.1, aniso=1.0)
    aligner = MultiWayAligner("gpa").fit(views[:3])
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:100]
    assert aligner.add_model(views[3][rows], rows) == 3
    whole = MultiWayAligner("gpa").fit(views[:3])
    whole.add_model(views[3])
    near, far = (
        gcpa.retrieval_at_k([a.transform(views[3], 3), a.centroid_])["mean"]
        for a in (aligner, whole)
    )
    assert near >= far - 0.02
    # the mean and the spread of the rows are not those of all anchors, and must not be taken so
    assert float((aligner.means_[3] - whole.means_[3]).norm()) < 0.1 * whole.scales_[3]
    assert float((views[3][rows].mean(dim=0) - whole.means_[3]).norm()) > 0.1 * whole.scales_[3]
    # the order of rows is the caller's: shuffled with their numbers, nothing changes
    again = MultiWayAligner("gpa").fit(views[:3])
    turned = rows.flip(0)
    again.add_model(views[3][turned], turned.tolist())
    torch.testing.assert_close(again.omegas_[3], aligner.omegas_[3], atol=1e-9, rtol=0)


def test_few_anchors_for_a_wide_new_model_warn_and_map_the_rest_to_zero():
    views = _views(n=60)
    g = torch.Generator().manual_seed(5)
    wide = torch.cat([views[3], torch.randn(60, 8, generator=g, dtype=torch.float64)], dim=1)
    aligner = MultiWayAligner("gpa").fit(views[:3])
    with pytest.warns(UserWarning, match="8 anchors span fewer"):
        aligner.add_model(wide[:8], range(8))
    V = aligner.components_[3]
    assert V.shape == (20, D)
    assert int(V.any(dim=0).sum()) == 7
    assert aligner.transform(wide, 3).shape == (60, D)


@pytest.mark.parametrize(
    ("X", "rows", "message"),
    [
        (lambda v: v[:5], None, "X must have a row for each of the 60 anchors: got 5"),
        (lambda v: v[:3], [0, 1], "rows must name an anchor for each row"),
        (lambda v: v[:2], [0, 60], r"rows must hold anchors in 0\.\.59"),
        (lambda v: v[:2], [-1, 3], r"rows must hold anchors in 0\.\.59"),
        (lambda v: v[:2], [3, 3], "at most once"),
        (lambda v: v[:2], [0.0, 1.0], "rows must be a vector of whole numbers"),
        (lambda v: v[:1], [4], "X must have at least 2 rows"),
        (lambda v: v[:, :7], None, "X must have at least 12 columns"),
        (lambda v: v * 0 + 3, None, "view 3 has zero variance"),
        (lambda v: v[:, :0], None, "X must be 2-D and not empty"),
    ],
)
def test_bad_new_models_are_refused_and_leave_the_aligner_as_it_was(X, rows, message):
    views = _views()
    aligner = MultiWayAligner().fit(views[:3])
    with pytest.raises(ValueError, match=message):
        aligner.add_model(X(views[3]), rows)
    assert aligner.n_models_ == 3
    assert len(aligner.omegas_) == 3


# ------------------------------------------------------------------------ cross-validation


def test_cross_validation_picks_the_best_of_its_scores_and_the_same_each_time():
    views = _views(n=60, noise=0.6)
    a = MultiWayAligner(lam="cv", correction="per_model", random_state=1).fit(views)
    assert set(a.cv_scores_) == set(gcpa.GRID)
    best = max(a.cv_scores_.values())
    assert a.lam_ == max(lam for lam, s in a.cv_scores_.items() if s == best)
    again = MultiWayAligner(lam="cv", correction="per_model", random_state=1).fit(views)
    assert again.cv_scores_ == a.cv_scores_
    other = MultiWayAligner(lam="cv", correction="per_model", random_state=2).fit(views)
    assert other.cv_scores_ != a.cv_scores_
    assert torch.equal(a.W_, MultiWayAligner(lam=a.lam_, correction="per_model").fit(views).W_)


def test_a_cross_validated_score_is_that_of_fits_without_the_held_out_rows():
    views = _views(n=60, noise=0.6)
    views = [X * torch.linspace(1, 2, 60, dtype=torch.float64)[:, None] for X in views]
    found = MultiWayAligner(lam="cv").fit(views).cv_scores_[1.0]
    scores = []
    for held in np.array_split(np.random.default_rng(0).permutation(60), 5):
        kept = np.setdiff1d(np.arange(60), held)
        made = MultiWayAligner(lam=1.0).fit([X[kept] for X in views])
        scores.append(gcpa.retrieval(made, [X[held] for X in views])["mean"])
    assert found == pytest.approx(np.mean(scores), abs=1e-12)


def test_a_fold_with_too_few_rows_leaves_the_strength_zero_out():
    views = _views(M=3, n=14)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fewer rows than columns: the point here
        aligner = MultiWayAligner(lam="cv", correction="per_model", n_folds=7).fit(views)
        assert aligner.lam_ > 0
        small = MultiWayAligner(lam="cv", correction="per_model", n_folds=2).fit(views)
        enough = _views(M=3, n=40)
        large = MultiWayAligner(lam="cv", correction="per_model", n_folds=7).fit(enough)
    assert 0.0 not in aligner.cv_scores_
    assert 0.0 not in small.cv_scores_
    assert 0.0 in large.cv_scores_


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("views", "options", "message"),
    [
        (lambda v: v[:1], {}, "Xs must hold at least 2 matrices: got 1"),
        (lambda v: [v[0], v[1][:9]], {}, "same number of rows"),
        (lambda v: [X[:1] for X in v], {}, "at least 2 rows"),
        (lambda v: [v[0], v[1] * math.nan], {}, r"Xs\[1\] must be finite"),
        (lambda v: [v[0], v[1] * 0 + 2], {}, "view 1 has zero variance"),
        (lambda v: v, {"n_components": 13}, r"n_components must be a whole number in \[1, 12\]"),
        (lambda v: [X[:6] for X in v], {"n_components": 6}, r"in \[1, 5\].*: got 6"),
        (lambda v: v, {"n_components": 0}, "n_components must be"),
        (lambda v: v, {"lam": -1.0}, "lam must be >= 0: got -1.0"),
        (lambda v: v, {"lam": "auto"}, "lam must be a number, None or 'cv': got 'auto'"),
        (lambda v: v, {"lam": "cv", "n_folds": 1}, "n_folds must be in"),
        (lambda v: v, {"method": "svd"}, "method must be one of gcpa"),
        (lambda v: v, {"correction": "none"}, "correction must be one of shared"),
        (lambda v: v, {"init": "last"}, "init must be one of medoid"),
        (lambda v: v, {"method": "gcca", "gcca_components": 61}, "k must be"),
    ],
)
def test_bad_input_to_fit_is_named(views, options, message):
    with pytest.raises(ValueError, match=message):
        MultiWayAligner(**options).fit(views(_views()))


def test_using_an_aligner_before_it_is_fitted_is_an_error():
    aligner = MultiWayAligner()
    for use in (
        lambda: aligner.transform(torch.zeros(2, 2), 0),
        lambda: aligner.translation(0, 1),
        lambda: aligner.add_model(torch.zeros(2, 2)),
        lambda: aligner.means_,
        lambda: aligner.corrected([]),
    ):
        with pytest.raises(NotFittedError):
            use()


def test_wrong_widths_and_unknown_models_are_named():
    views = _wide()
    aligner = MultiWayAligner().fit(views)
    with pytest.raises(ValueError, match="X must have the 10 columns of model 1: got 12"):
        aligner.transform(views[0], 1)
    with pytest.raises(ValueError, match=r"model must be a model in 0\.\.3: got 4"):
        aligner.transform(views[0], 4)
    with pytest.raises(ValueError, match=r"dst must be a model in 0\.\.3: got -1"):
        aligner.translate(views[0], 0, -1)
    with pytest.raises(ValueError, match="U must have 9 columns: got 8"):
        aligner.inverse_transform(torch.zeros(2, 8), 0)
    with pytest.raises(ValueError, match="4 models' 60 anchors"):
        aligner.corrected(views[:3])
    with pytest.raises(ValueError, match="to correct: got 'gcca'"):
        MultiWayAligner("gcca", gcca_components=3).fit(views).corrected(views)


def test_it_is_a_scikit_learn_estimator():
    aligner = MultiWayAligner("gpa", n_components=5, lam=0.2)
    copy = clone(aligner)
    assert copy.get_params() == aligner.get_params()
    assert "n_components=5" in repr(aligner)


# ---------------------------------------------------------------------------------- scores


def test_retrieval_leaves_the_diagonal_out_and_counts_by_brute_force():
    Z = _views(n=30, noise=1.0)
    for k, metric in ((1, "cosine"), (3, "cosine"), (2, "euclidean")):
        found = gcpa.retrieval_at_k(Z, k, metric)
        assert np.isnan(np.diag(found["matrix"])).all()
        for i in range(4):
            for j in range(4):
                if i == j:
                    continue
                a, b = Z[i], Z[j]
                if metric == "cosine":
                    a, b = (torch.nn.functional.normalize(t, dim=1) for t in (a, b))
                D2 = ((a[:, None] - b[None]) ** 2).sum(dim=2)
                hits = (D2.argsort(dim=1)[:, :k] == torch.arange(30)[:, None]).any(dim=1)
                assert found["matrix"][i, j] == pytest.approx(float(hits.double().mean()))
        rest = found["matrix"][~np.eye(4, dtype=bool)]
        assert found["mean"] == pytest.approx(rest.mean())


def test_retrieval_does_not_see_scale_and_duplicates_count_for_the_lowest_index():
    Z = _views(n=30)
    scaled = [z * (m + 1) for m, z in enumerate(Z)]
    assert gcpa.retrieval_at_k(Z)["mean"] == gcpa.retrieval_at_k(scaled)["mean"]
    X = torch.eye(4, dtype=torch.float64)
    X[3] = X[1]
    matrix = gcpa.retrieval_at_k([X, X])["matrix"]
    assert matrix[0, 1] == 0.75  # row 3 finds row 1, which is not its own
    assert gcpa.retrieval_at_k([X, X], 2)["mean"] == 1


def test_translated_retrieval_with_identities_is_plain_retrieval():
    Z = _views(n=30)
    maps = torch.eye(D, dtype=torch.float64).repeat(4, 4, 1, 1)
    a, b = gcpa.translated_retrieval(maps, Z, 2), gcpa.retrieval_at_k(Z, 2)
    np.testing.assert_array_equal(a["matrix"], b["matrix"])


@pytest.mark.parametrize("k", [0, 31, 1.5, True])
def test_k_out_of_range_is_named(k):
    with pytest.raises(ValueError, match=r"k must be a whole number in \[1, 30\]"):
        gcpa.retrieval_at_k(_views(n=30), k)


def test_cycle_error_is_one_for_unrelated_rotations_and_zero_through_a_universe():
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(5, 5, 40, 40, generator=g, dtype=torch.float64))[0]
    assert gcpa.cycle_error(Q) == pytest.approx(1, abs=0.02)
    through = torch.einsum("iab,jcb->ijac", Q[0], Q[0])
    assert gcpa.cycle_error(through) < 1e-12
    with pytest.raises(ValueError, match="M >= 3"):
        gcpa.cycle_error(Q[:2, :2])


def test_geometry_score_is_a_spearman_correlation_of_distances():
    X = _views(n=40)[0]
    g = torch.Generator().manual_seed(1)
    Q = torch.linalg.qr(torch.randn(D, D, generator=g, dtype=torch.float64))[0]
    assert gcpa.geometry_score(X, 3 * X @ Q + 1) == pytest.approx(1, abs=1e-9)
    Z = X @ torch.randn(D, D, generator=g, dtype=torch.float64)
    wanted = spearmanr(pdist(X[:20]), pdist(Z[:20])).statistic
    assert gcpa.geometry_score(X, Z, n_rows=20) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="same number of rows"):
        gcpa.geometry_score(X, Z[:5])


def test_a_probe_transfers_between_aligned_models_and_not_between_turned_ones():
    g = torch.Generator().manual_seed(2)
    y = torch.arange(90) % 3
    X = torch.eye(6, dtype=torch.float64)[y] * 3 + torch.randn(90, 6, generator=g)
    other = X + 0.1 * torch.randn(90, 6, generator=g)
    turned = other.roll(1, dims=1)
    found = gcpa.stitch_accuracy([X, other, turned], y, [X, other, turned], y)
    assert found.shape == (3, 3)
    assert found[0, 1] > 0.9
    assert found[0, 2] < 0.6
    # one number scales both sides: a universe's unit is no matter
    same = gcpa.stitch_accuracy([1e3 * X, 1e3 * other], y, [1e3 * X, 1e3 * other], y)
    np.testing.assert_allclose(same, found[:2, :2])


def test_head_accuracy_uses_the_target_models_own_classifier():
    views = _views(n=90, noise=0.05, d=6, r=6)
    y = views[0][:, 0] > views[0][:, 0].median()
    aligner = MultiWayAligner("gpa").fit(views)
    w = torch.linalg.lstsq(views[1], y.double()[:, None] - 0.5).solution
    heads = [None, lambda X: torch.cat([-(X @ w), X @ w], dim=1), None, None]
    found = gcpa.head_accuracy(aligner, views, heads, y)
    assert np.isnan(found[:, [0, 2, 3]]).all()
    own = float(((views[1] @ w)[:, 0] > 0).eq(y).double().mean())
    assert found[1, 1] == pytest.approx(own)
    assert found[0, 1] > own - 0.1
    assert found[0, 1] > 0.8
    with pytest.raises(ValueError, match="for each of the 4 models"):
        gcpa.head_accuracy(aligner, views[:3], heads, y)


def test_pairwise_ridge_is_scikit_learns_ridge():
    views = _views(shift=False)
    maps = gcpa.pairwise_ridge(views, 0.1)
    level = 0.1 * float(views[1].square().sum()) / D
    wanted = Ridge(alpha=level, fit_intercept=False).fit(views[1], views[2]).coef_.T
    np.testing.assert_allclose(maps[1, 2], wanted, atol=1e-10)
    assert bool((maps[3, 3] == torch.eye(D)).all())
    with pytest.raises(ValueError, match="ridge must be > 0"):
        gcpa.pairwise_ridge(views, 0.0)


def test_relative_representations_do_not_see_a_rotation():
    X = _views(n=40)[0]
    Q = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0]
    a = gcpa.relative_representation(X, X[:7])
    torch.testing.assert_close(a, gcpa.relative_representation(X @ Q, X[:7] @ Q))
    assert a.shape == (40, 7)
    torch.testing.assert_close(a[:7].diagonal(), torch.ones(7, dtype=torch.float64))


def test_pairwise_procrustes_wants_equal_shapes():
    X = _views()[0]
    with pytest.raises(ValueError, match="same shape"):
        gcpa.pairwise_procrustes(X, X[:, :5])


# ------------------------------------------------------------------------------------ data


def test_synthetic_models_share_factors_of_the_stated_scales_and_nothing_else():
    n, d, r = 4000, 10, 4
    views = gcpa.make_multiview(3, n, d=d, r=r, noise=0.6, aniso=2.0, seed=3)
    scales = torch.linspace(2, 0.5, r, dtype=torch.float64)
    wanted = torch.cat([scales**2 + 0.36, torch.full((d - r,), 1.44, dtype=torch.float64)])
    for X in views:
        found = torch.linalg.eigvalsh(X.T @ X / n)
        torch.testing.assert_close(found, wanted.sort().values, rtol=0.12, atol=0)
    singular = torch.linalg.svdvals(views[0].T @ views[1] / n)
    torch.testing.assert_close(singular[:r], scales**2, rtol=0.1, atol=0.05)
    assert float(singular[r:].max()) < 0.1
    assert torch.equal(gcpa.make_multiview(3, n, d=d, r=r, seed=3)[2], views[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"M": 0}, "M must be"),
        ({"d": 3}, "d must be a whole number >= 16"),
        ({"noise": -1.0}, "noise must be"),
        ({"aniso": math.inf}, "aniso must be"),
    ],
)
def test_impossible_synthetic_data_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        gcpa.make_multiview(**{"M": 2, "n": 10, **change})


def test_digits_views_are_disjoint_and_the_same_objects():
    views = gcpa.digits_views(100, 0, n_models=2, epochs=1)
    made = gcpa.digits_encoders(2, 0, 1)
    for X, T, features in zip(views.anchors, views.test, made.features, strict=True):
        assert torch.equal(X, features[:100])
        assert torch.equal(T, features[797:])
        assert len(T) == 400
    assert torch.equal(views.test_labels, made.labels[797:])
    with pytest.raises(ValueError, match=r"n must be a whole number in \[2, 797\]: got 798"):
        gcpa.digits_views(798, 0, n_models=2, epochs=1)


def test_features_are_read_from_files_shuffled_together(tmp_path):
    views = _wide()
    for m, X in enumerate(views):
        np.save(tmp_path / f"model_{m}.npy", X.float().numpy())
    read = gcpa.load_views(tmp_path, n_anchors=45, seed=1)
    assert [X.shape for X in read.anchors] == [(45, 12), (45, 10), (45, 11), (45, 9)]
    assert len(read.test[0]) == 15
    order = [int((views[0].float() == x.float()).all(dim=1).nonzero()) for x in read.anchors[0]]
    assert order != sorted(order)
    torch.testing.assert_close(read.anchors[3], views[3][order], atol=1e-5, rtol=1e-5)
    assert "gpa" in gcpa.aligners(read._replace(n_components=9))


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"at least two \.npy files: found 0"):
        gcpa.load_views(tmp_path, n_anchors=5)
    np.save(tmp_path / "a.npy", np.zeros((9, 3)))
    (tmp_path / "b.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"b\.npy must be a plain \.npy array"):
        gcpa.load_views(tmp_path, n_anchors=5)
    np.save(tmp_path / "b.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"b\.npy must be a plain \.npy array"):
        gcpa.load_views(tmp_path, n_anchors=5)
    np.save(tmp_path / "b.npy", np.zeros((9, 3)))
    with pytest.raises(ValueError, match=r"n_anchors must be a whole number in \[2, 8\]: got 9"):
        gcpa.load_views(tmp_path, n_anchors=9)


# ------------------------------------------------------------------------------ experiments


def test_the_study_reports_the_paper_in_small():
    # one draw of the chapter's synthetic comparison, at its smaller size
    row = gcpa.study_run(data="synth", n=100, seed=3)
    assert row["r1_shared"] > row["r1_gpa"]
    assert row["r1_agreement"] > row["r1_shared"] + 0.05
    assert row["r1_gcca_oracle"] >= row["r1_gcca_validated"]
    assert row["r1_ridge_oracle"] >= row["r1_ridge_validated"]
    assert row["cycle_pairwise"] > 0.3
    assert row["cycle_universe"] < 1e-10
    assert row["geometry_gpa"] == pytest.approx(1, abs=1e-9)
    assert 0.2 <= row["gamma_min"] < row["gamma_max"] <= 1
    assert not any(name.startswith("probe") for name in row)
    with pytest.raises(ValueError, match="data must be 'digits' or 'synth'"):
        gcpa.make_views("words", 100, 0)


def test_transfer_scores_digits_only_where_there_are_labels_and_heads():
    views = gcpa.digits_views(60, 0, n_models=3, n_components=20, epochs=2)
    found = gcpa.aligners(views)
    row = gcpa.transfer(found, views)
    assert row["head_shared"] == row["head_gpa"]
    assert 0.2 < row["head_gpa"] <= row["head_own"] <= 1
    assert {f"probe_{m}" for m in ("gpa", "shared", "per_model", "gcca")} < set(row)


def test_a_tuned_baseline_is_chosen_without_the_test_rows():
    seen = []

    def fit_and_score(train, rows, setting):
        seen.append((len(train[0]), len(rows[0]), setting))
        # setting 1 is best on the held-out anchors, setting 2 on the test rows
        return {10: {1: 0.9, 2: 0.5}, 25: {1: 0.3, 2: 0.8}}[len(rows[0])][setting]

    X, T = torch.zeros(50, 2), torch.zeros(25, 2)
    ladder = gcpa.tuned(fit_and_score, [1, 2], [X], [T])
    assert ladder == ({1: 0.3, 2: 0.8}, 0.3, 0.8)
    assert seen == [(40, 10, 1), (40, 10, 2), (50, 25, 1), (50, 25, 2)]


def test_lambda_sweep_ends_where_gpa_is_and_growth_counts_maps():
    views = gcpa.Views(*([X[a:b] for X in _views(n=120)] for a, b in ((0, 60), (60, 120))))
    rows = gcpa.lambda_sweep(views, [0.01, math.inf])
    rigid = MultiWayAligner("gpa").fit(views.anchors)
    assert rows[1]["r1"] == gcpa.retrieval(rigid, views.test)["mean"]
    assert rows[1]["geometry"] == pytest.approx(1)
    assert rows[0]["geometry"] < 1
    table = gcpa.growth(views, [2, 3, 4])
    assert [r["maps_pairwise"] for r in table] == [2, 6, 12]
    assert table[2]["cycle_pairwise"] > 0.05 > 1e-10 > table[2]["cycle_universe"]


# -------------------------------------------------------------------------------- checkers


def _round(Xs, U):
    omegas = [scipy_procrustes(X, U)[0] for X in Xs]
    return omegas, sum(X @ W for X, W in zip(Xs, omegas, strict=True)) / len(Xs)


def _correction(As, U, lam):
    total = sum(A.T @ A for A in As)
    level = lam * np.trace(total) / len(total) * np.eye(len(total))
    return np.linalg.solve(total + level, len(As) * U.T @ U + level)


def _grown(omegas, U, X):
    return np.concatenate([omegas, scipy_procrustes(X, U)[0][None]])


def test_checkers_accept_right_answers():
    gcpa.check_procrustes(lambda A, B: scipy_procrustes(A, B)[0])
    gcpa.check_gpa_round(_round)
    gcpa.check_correction(_correction)
    gcpa.check_add_model(_grown)


@pytest.mark.parametrize(
    ("check", "wrong", "message"),
    [
        (gcpa.check_procrustes, lambda A, B: scipy_procrustes(B, A)[0], "must be"),
        (gcpa.check_procrustes, lambda A, B: np.linalg.lstsq(A, B)[0], "orthogonal"),
        (gcpa.check_procrustes, lambda A, B: np.eye(3), "shape|must be"),
        (gcpa.check_gpa_round, lambda Xs, U: (_round(Xs, U)[0], U), "mean of the turned"),
        (gcpa.check_gpa_round, lambda Xs, U: _round(Xs, Xs[-1]), "minimise"),
        (gcpa.check_correction, lambda As, U, lam: np.eye(U.shape[1]), "off by"),
        (gcpa.check_correction, lambda As, U, lam: _correction(As, U, 0.01), "off by"),
        (gcpa.check_correction, lambda As, U, lam: _correction(As, U, lam).T, "off by"),
        (gcpa.check_add_model, lambda o, U, X: _grown(o, U[::-1], X), "R@1 of the new model"),
        (gcpa.check_add_model, lambda o, U, X: _grown(o + 1e-12, U, X), "bit by bit"),
        (gcpa.check_add_model, lambda o, U, X: o, r"\(5, 32, 32\)"),
        (gcpa.check_choose_lambda, lambda Xs: 0.01, "with 40 anchors"),
        (gcpa.check_choose_lambda, lambda Xs: 0.3, "with 80 anchors"),
        (gcpa.check_choose_lambda, lambda Xs: -1.0, "λ must be >= 0"),
    ],
)
def test_checkers_refuse_wrong_answers(check, wrong, message):
    with pytest.raises(AssertionError, match=message):
        check(wrong)
