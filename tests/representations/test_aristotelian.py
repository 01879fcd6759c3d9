"""The paper's module: generators, the wrong order, local distances, files, experiments."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icmllab.representations import aristotelian as ari
from icmllab.toolbox.similarity import cka_linear, cka_rbf, cka_unbiased, knn_indices, metric
from icmllab.toolbox.two_sample import calibrate, calibrate_layers, draw_permutations


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Generators


@pytest.mark.parametrize("dist", ["normal", "t3"])
def test_null_data_have_the_named_distribution_and_no_association(dist):
    X, Y = ari.make_null(200, 30, 50, dist=dist, generator=generator())
    assert X.shape == (200, 30)
    assert Y.shape == (200, 50)
    law = scipy.stats.norm if dist == "normal" else scipy.stats.t(3)
    for Z in (X, Y):
        assert scipy.stats.kstest(Z.flatten().numpy(), law.cdf).pvalue > 1e-4
    assert abs(float(torch.corrcoef(torch.stack([X[:, 0], Y[:, 0]]))[0, 1])) < 0.3


def test_generators_repeat_with_their_seed():
    for make in (
        lambda g: ari.make_null(9, 2, 3, generator=g),
        lambda g: ari.make_shared_signal(9, 2, 3, generator=g),
        lambda g: ari.make_shared_neighbourhoods(10, 5, 3, generator=g),
    ):
        for a, b in zip(make(generator(1)), make(generator(1)), strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(make(generator(1))[0], make(generator(2))[0])


def test_shared_signal_shares_r_factors_and_nothing_else():
    n, r, width = 500, 3, 40
    X, Y = ari.make_shared_signal(n, r, width, generator=generator())
    assert X.shape == Y.shape == (n, r + width)
    # the signal parts are rotations of one Z: their Gram matrices are equal
    assert torch.allclose(X[:, :r] @ X[:, :r].T, Y[:, :r] @ Y[:, :r].T)
    assert float((X[:, :r] - Y[:, :r]).abs().max()) > 0.1
    cross = torch.linalg.svdvals(X[:, r:].T @ Y[:, r:] / n)
    assert float(cross[0]) < 1
    none = ari.make_shared_signal(n, r, width, strength=0.0, generator=generator())
    assert float(none.X[:, :r].abs().max()) == 0


def test_shared_neighbourhoods_share_labels_but_neither_order_nor_layout():
    X, Y, labels = ari.make_shared_neighbourhoods(400, 5, 8, generator=generator())
    assert torch.unique(labels, return_counts=True)[1].tolist() == [5] * 80
    assert (labels[1:] < labels[:-1]).any()
    for Z in (X, Y):
        within = Z - torch.stack([Z[labels == c].mean(0) for c in range(80)])[labels]
        assert float(within.std()) == pytest.approx(0.15 * math.sqrt(4 / 5), rel=0.05)
        same = labels[knn_indices(Z, 4)] == labels[:, None]
        assert float(same.double().mean()) > 0.97


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ari.make_null(0, 2, 2), "n must be"),
        (lambda: ari.make_null(5, 2, 2, dist="cauchy"), "dist must be"),
        (lambda: ari.make_shared_signal(5, 2, 0), "width must be"),
        (lambda: ari.make_shared_signal(5, 2, 2, strength=-1), "strength must be"),
        (lambda: ari.make_shared_neighbourhoods(11, 5, 2), "multiple of cluster_size"),
        (lambda: ari.make_shared_neighbourhoods(10, 5, 2, within=-0.1), "within must be"),
    ],
)
def test_bad_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Networks on two halves


def test_training_learns_the_digits_and_leaves_the_global_generator_alone():
    view = ari.digits_two_views(0).a
    torch.manual_seed(7)
    before = torch.get_rng_state()
    layers = ari.train_view_mlp(view, 8, 2, 15, 0)
    assert torch.equal(before, torch.get_rng_state())
    assert [tuple(h.shape) for h in layers] == [(300, 8)] * 2
    assert all(float(h.min()) == 0 for h in layers)  # after the ReLU
    again = ari.train_view_mlp(view, 8, 2, 15, 0)
    assert all(torch.equal(a, b) for a, b in zip(layers, again, strict=True))
    assert not torch.equal(ari.train_view_mlp(view, 8, 2, 15, 1)[1], layers[1])

    def share_of_nearest_neighbours_with_the_same_digit(h):
        nearest = torch.cdist(h, h).fill_diagonal_(math.inf).argmin(dim=1)
        return float((view.y_test[nearest] == view.y_test).double().mean())

    barely = ari.train_view_mlp(view, 8, 2, 1, 0)[1]
    assert (
        share_of_nearest_neighbours_with_the_same_digit(layers[1])
        > share_of_nearest_neighbours_with_the_same_digit(barely) + 0.05
    )


# The wrong order, and the right one


def layers(n=40, d=6, count=3, seed=0):
    g = generator(seed)
    return [torch.randn(n, d, generator=g, dtype=torch.float64) for _ in range(count)]


def test_matrix_calibrates_each_pair_as_the_scalar_does():
    Xs, Ys = layers(), layers(count=2, seed=1)
    perms = draw_permutations(40, 39)
    found = ari.calibrate_matrix(Xs, Ys, perms=perms)
    for i, j in itertools.product(range(3), range(2)):
        one = calibrate(Xs[i], Ys[j], perms=perms)
        got = [float(t[i, j]) for t in found]
        assert got == pytest.approx([one.raw, one.score, one.p_value], abs=1e-9)


def test_matrix_takes_every_option_as_the_scalar_does():
    X = layers()[0]
    Y = 0.7 * X + layers(seed=1)[0]
    labels = np.arange(40) % 4
    perms = draw_permutations(40, 39, generator=generator(2), block=labels)
    for options in (
        {"alpha": 0.1, "s_max": None, "perms": perms.numpy()},
        {"alpha": 0.2, "s_max": 0.8, "n_perm": 19, "block": labels},
    ):
        one = calibrate(X, Y, "cka_rbf", generator=generator(3), **options)
        found = ari.calibrate_matrix([X], [Y], "cka_rbf", generator=generator(3), **options)
        assert one.score > 0
        got = [float(t[0, 0]) for t in found]
        assert got == pytest.approx([one.raw, one.score, one.p_value], abs=1e-12)
    plain = ari.calibrate_matrix([X], [Y], "cka_rbf", perms=perms)
    assert float(plain.score) != pytest.approx(
        float(ari.calibrate_matrix([X], [Y], "cka_rbf", perms=perms, alpha=0.5).score)
    )


def test_maximum_of_calibrated_pairs_rejects_too_often_and_the_calibrated_maximum_does_not():
    naive = aware = 0
    for trial in range(60):
        out = ari.depth_trial(n=32, width=8, n_layers=5, n_perm=39, seed=trial)
        naive += out["naive_rejects"]
        aware += out["aware_rejects"]
    assert naive > 30
    assert aware <= 9  # P(more than 9 of 60 at 5 %) is 4e-4


def test_matrix_checks_its_input():
    with pytest.raises(ValueError, match="can never reject"):
        ari.calibrate_matrix(layers(), layers(), n_perm=9)
    with pytest.raises(ValueError, match="Xs must hold"):
        ari.calibrate_matrix([], layers())
    with pytest.raises(ValueError, match="row 0 is none"):
        ari.calibrate_matrix(layers(), layers(), perms=np.zeros((19, 40), dtype=np.int64))
    with pytest.raises(ValueError, match="block must hold one label a row"):
        ari.calibrate_matrix(layers(), layers(), block=[0] * 39)


def test_baselines_by_their_formulas():
    null = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    result = ari.Calibrated(0.6, 0.5, 0.25, 0.3, null)
    assert ari.z_score(result) == pytest.approx(4.0)
    assert ari.adjusted_score(result) == pytest.approx(0.5)
    flat = ari.Calibrated(0.6, 0.0, 1.0, 0.6, torch.full((3,), 0.6))
    assert math.isnan(ari.z_score(flat))


# Local distances


def test_local_distance_test_against_scipy():
    X, Y, _ = ari.make_shared_neighbourhoods(60, 5, 4, generator=generator())
    Y = Y + 0.4 * X
    found = ari.local_distance_test(X, Y, 4, n_perm=1999)
    pairs = ari.shared_neighbour_distances(X, Y, k=4)
    x, y = (t.numpy() for t in pairs)
    assert found.n_pairs == len(x)
    assert found.rho == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    theirs = scipy.stats.permutation_test(
        (x,),
        lambda order: scipy.stats.spearmanr(order, y).statistic,
        permutation_type="pairings",
        n_resamples=999,
        rng=np.random.default_rng(0),
    )
    p = max(theirs.pvalue, 1e-3)
    assert abs(found.p_value - p) < 5 * math.sqrt(p * (1 - p) / 999) + 2e-3


def test_local_distances_are_found_when_shared_and_not_when_private():
    X, Y, _ = ari.make_shared_neighbourhoods(400, 5, 8, generator=generator())
    private = ari.local_distance_test(X, Y, 4)
    assert abs(private.rho) < 0.15
    assert private.p_value > 0.01
    shared = ari.local_distance_test(X, X + 0.01 * Y, 4)
    assert shared.rho > 0.9
    assert shared.p_value == 1 / 1000


def test_local_distance_test_without_pairs_is_nan():
    X, Y = ari.make_null(6, 3, 3, generator=generator())
    found = ari.local_distance_test(X, Y, 1)
    assert math.isnan(found.rho)
    assert math.isnan(found.p_value)
    assert found.n_pairs < 10
    with pytest.raises(ValueError, match="n_perm"):
        ari.local_distance_test(X, Y, 1, n_perm=0)


def test_permuting_rows_leaves_too_few_shared_pairs_for_local_distances():
    X, Y, _ = ari.make_shared_neighbourhoods(400, 5, 8, generator=generator())
    counts = [
        len(ari.shared_neighbour_distances(X, Y[p], k=4).x) for p in draw_permutations(400, 5)
    ]
    # a random pairing shares about k² n/(n-1) directed edges
    assert max(counts) < 40


# Files


def write(folder, side, arrays):
    (folder / side).mkdir()
    for name, array in arrays.items():
        np.save(folder / side / f"{name}.npy", array)


def test_activations_are_read_in_natural_order(tmp_path):
    rng = np.random.default_rng(0)
    a = {f"layer_{i}": rng.normal(size=(9, i + 1)).astype(np.float32) for i in (10, 2, 1)}
    write(tmp_path, "a", a)
    write(tmp_path, "b", {"out": rng.normal(size=(9, 4))})
    found = ari.load_activations(tmp_path)
    assert found.names_a == ["layer_1", "layer_2", "layer_10"]
    assert [t.shape[1] for t in found.a] == [2, 3, 11]
    assert found.names_b == ["out"]
    assert all(t.dtype == torch.float64 for t in (*found.a, *found.b))
    assert np.array_equal(found.a[0].numpy(), a["layer_1"])


def test_bad_activation_folders_are_explained(tmp_path):
    with pytest.raises(ValueError, match=r"a/\*.npy"):
        ari.load_activations(tmp_path)
    write(tmp_path, "a", {"x": np.ones((5, 2))})
    with pytest.raises(ValueError, match=r"b/\*.npy"):
        ari.load_activations(tmp_path)
    write(tmp_path, "b", {"y": np.ones((6, 2))})
    with pytest.raises(ValueError, match=r"number of rows: found \[5, 6\]"):
        ari.load_activations(tmp_path)
    np.save(tmp_path / "b" / "y.npy", np.ones(5))
    with pytest.raises(ValueError, match=r"b/y.npy must be 2-D"):
        ari.load_activations(tmp_path)
    np.save(tmp_path / "b" / "y.npy", np.array([{}] * 5), allow_pickle=True)
    with pytest.raises(ValueError, match=r"b/y.npy must be a plain .npy array"):
        ari.load_activations(tmp_path)
    (tmp_path / "b" / "y.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"b/y.npy must be a plain .npy array"):
        ari.load_activations(tmp_path)


# Experiments: what they return is what the parts say


def test_null_drift_follows_the_closed_form_and_calibration_removes_it():
    for width in (8, 512):
        runs = [ari.null_drift(n=128, width=width, n_perm=39, seed=s) for s in range(4)]
        assert np.mean([r["cka_raw"] for r in runs]) == pytest.approx(
            width / (128 + width), abs=0.02
        )
        assert max(r[f"{m}_cal"] for r in runs for m in ("cka", "rbf", "mknn")) < 0.08


def test_null_drift_holds_for_heavy_tails():
    out = ari.null_drift(n=128, width=512, n_perm=39, seed=0, dist="t3")
    assert out["cka_raw"] > 0.4
    assert out["cka_cal"] < 0.08


def test_narrow_kernel_is_perfect_raw_and_zero_calibrated():
    out = ari.narrow_kernel(n=64, width=128, sigma_frac=0.1, n_perm=19, seed=0)
    assert out["raw"] == pytest.approx(1.0, abs=1e-9)
    assert out["cal"] == 0


def test_width_trend_separates_width_from_agreement():
    narrow = ari.width_trend(n=128, r=8, width=16, n_perm=39, seed=0)
    wide = ari.width_trend(n=128, r=8, width=512, n_perm=39, seed=0)
    assert wide["raw"] > narrow["raw"] + 0.2
    assert wide["calibrated"] < 0.05 < 0.2 < narrow["calibrated"]
    assert narrow["p"] == 1 / 40


def test_depth_trial_is_the_best_pair_by_raw_and_by_unbiased_cka():
    out = ari.depth_trial(n=24, width=8, n_layers=3, n_perm=39, seed=5)
    g = generator(5)
    pairs = [ari.make_null(24, 8, 8, generator=g) for _ in range(3)]
    Xs, Ys = zip(*pairs, strict=True)
    for name, score in (("raw_max", cka_linear), ("unbiased_max", cka_unbiased)):
        expected = max(score(X, Y) for X in Xs for Y in Ys)
        assert out[name] == pytest.approx(expected, abs=1e-12)
    perms = draw_permutations(24, 39, generator=g)
    naive = max(calibrate(X, Y, perms=perms).score for X in Xs for Y in Ys)
    assert out["naive_rejects"] == (naive > 0)
    assert out["aware_rejects"] == (calibrate_layers(Xs, Ys, perms=perms).p_value <= 0.05)


def test_neighbourhood_scores_are_those_of_their_metrics():
    world = {"n": 60, "cluster_size": 5, "d": 4}
    out = ari.neighbourhood_scores(**world, k=4, n_perm=39, seed=2)
    g = generator(2)
    X, Y, _ = ari.make_shared_neighbourhoods(*world.values(), generator=g)
    perms = draw_permutations(60, 39, generator=g)
    for key, m in (
        ("mknn", metric("mutual_knn", k=4)),
        ("cka", metric("cka_linear")),
        ("rbf03", metric("cka_rbf", sigma_frac=0.03)),
        ("rbf2", metric("cka_rbf", sigma_frac=0.2)),
    ):
        assert out[key] == pytest.approx(calibrate(X, Y, m, perms=perms).score, abs=1e-12)
    assert out["rbf03_raw"] == pytest.approx(cka_rbf(X, Y, sigma_frac=0.03), abs=1e-12)
    local = ari.local_distance_test(X, Y, 4, generator=g)
    assert (out["local"], out["local_p"], out["n_pairs"]) == local


def test_digits_scores_compare_the_second_hidden_layers():
    out = ari.digits_scores(width=16, epochs=2, n_perm=19, seed=1)
    stacks = ari.digits_stacks(width=16, depth=2, epochs=2, seed=1)
    perms = draw_permutations(300, 19, generator=generator(1))
    for key, m in (
        ("cka", metric("cka_linear")),
        ("mknn", metric("mutual_knn", k=10)),
        ("rbf", metric("cka_rbf", sigma_frac=0.2)),
    ):
        first, second = (calibrate(stacks.a[i], stacks.b[i], m, perms=perms) for i in range(2))
        got = [out[f"{key}_{part}"] for part in ("raw", "cal", "p")]
        assert got == pytest.approx([second.raw, second.score, second.p_value], abs=1e-9)
        assert abs(first.raw - second.raw) > 1e-3


def test_p_value_run_lies_on_its_grid():
    p = ari.null_p_value(n=16, width=8, n_perm=19, seed=0)
    assert p * 20 == pytest.approx(round(p * 20))
    assert 0 < p <= 1


def test_stacks_are_measured_by_every_ruler_with_adjusted_p_values():
    shared = ari.make_shared_signal(48, 4, 4, generator=generator())
    Xs, Ys = [*layers(48), shared.X], [shared.Y, *layers(48, seed=1)]
    rulers = ari.measure_stacks(Xs, Ys, n_perm=39, seed=0)
    assert [r.name for r in rulers] == list(ari.SEVEN)
    for ruler, m in zip(rulers, ari.SEVEN.values(), strict=True):
        perms = draw_permutations(48, 39, generator=generator(0))
        expected = calibrate_layers(Xs, Ys, m, perms=perms)
        assert (ruler.raw, ruler.score, ruler.p_value) == expected[:3]
        assert ruler.adjusted_p >= ruler.p_value
        assert ruler.argmax == expected.argmax
    assert rulers[0].argmax == (3, 0)


def test_all_permutations_at_small_n_only():
    X, Y = ari.make_null(5, 2, 2, generator=generator())
    assert ari.all_permutation_scores(X, Y, "cka_linear").shape == (120,)
    assert ari.all_permutation_scores(X, Y, metric("mutual_knn", k=2)).shape == (120,)
    with pytest.raises(ValueError, match="at most 8 rows"):
        ari.all_permutation_scores(*ari.make_null(9, 2, 2, generator=generator()), "cka_linear")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_exact_null_means_at_six_samples(seed):
    X, Y = ari.make_null(6, 4, 3, generator=generator(seed))
    mean = float(ari.all_permutation_scores(X, Y, "cka_linear").mean())
    assert ari.expected_null_cka(X, Y) == pytest.approx(mean, rel=1e-10)
    mean = float(ari.all_permutation_scores(X, Y, metric("mutual_knn", k=2)).mean())
    assert mean == pytest.approx(0.4, abs=1e-12)


def test_public_names_exist():
    for name in ari.__all__:
        assert hasattr(ari, name)


# Checkers: the right answer passes, plausible wrong ones do not


def right_pvalue_and_tau(s0, null, alpha):
    scores = np.sort(np.append(null, s0))
    p = (1 + (null >= s0).sum()) / len(scores)
    return p, scores[math.ceil((1 - alpha) * len(scores) - 1e-9) - 1]


def without_the_observed(s0, null, alpha):
    return (null >= s0).mean(), np.quantile(null, 1 - alpha)


def strict_inequality(s0, null, alpha):
    _, tau = right_pvalue_and_tau(s0, null, alpha)
    return (1 + (null > s0).sum()) / (len(null) + 1), tau


def tau_of_the_null_alone(s0, null, alpha):
    p, _ = right_pvalue_and_tau(s0, null, alpha)
    return p, np.sort(null)[math.ceil((1 - alpha) * len(null) - 1e-9) - 1]


def test_checker_of_exercise_1():
    ari.check_pvalue_and_tau(right_pvalue_and_tau)
    for wrong, hint in (
        (without_the_observed, "p "),
        (strict_inequality, "s_b >= s0"),
        (tau_of_the_null_alone, "observed one"),
    ):
        with pytest.raises(AssertionError, match=hint):
            ari.check_pvalue_and_tau(wrong)


def overlap(a, b):
    return float((a[:, :, None] == b[:, None, :]).sum()) / a.numel()


def test_checker_of_exercise_2():
    ari.check_permuted_mknn(lambda a, b, p: overlap(a, torch.argsort(p)[b[p]]))
    for wrong in (
        lambda a, b, p: overlap(a, b),
        lambda a, b, p: overlap(a, b[p]),
        lambda a, b, p: overlap(a, p[b[p]]),
        lambda a, b, p: overlap(a, p[b[torch.argsort(p)]]),
    ):
        with pytest.raises(AssertionError, match="inverse"):
            ari.check_permuted_mknn(wrong)


def test_checker_of_exercise_3():
    ari.check_expected_null_cka(ari.expected_null_cka)

    def uncentred(X, Y):
        K, L = X @ X.T, Y @ Y.T
        return K.trace() * L.trace() / ((len(X) - 1) * K.norm() * L.norm())

    def by_n(X, Y):
        return ari.expected_null_cka(X, Y) * (len(X) - 1) / len(X)

    def gaussian_rule(X, Y):
        return X.shape[1] / (X.shape[1] + len(X))

    for wrong in (uncentred, by_n, gaussian_rule):
        with pytest.raises(AssertionError, match="mean over all 720"):
            ari.check_expected_null_cka(wrong)


def test_checker_of_exercise_4():
    ari.check_best_layer(lambda Xs, Ys, perms: calibrate_layers(Xs, Ys, perms=perms).p_value)

    def smallest(Xs, Ys, perms):
        return float(ari.calibrate_matrix(Xs, Ys, perms=perms).p_value.min())

    def best_pair_alone(Xs, Ys, perms):
        i, j = calibrate_layers(Xs, Ys, perms=perms).argmax
        return calibrate(Xs[i], Ys[j], perms=perms).p_value

    for wrong in (smallest, best_pair_alone):
        with pytest.raises(AssertionError, match="one permutation to all layers"):
            ari.check_best_layer(wrong)
    with pytest.raises(AssertionError, match="strong signal"):
        ari.check_best_layer(lambda Xs, Ys, perms: 1.0)


def test_checker_of_exercise_5():
    def right(labels, n_perm, g):
        return draw_permutations(len(labels), n_perm, generator=g, block=labels)

    ari.check_block_permutations(right)

    def often_unmoved(labels, n_perm, g):
        perms = right(labels, n_perm, g)
        perms[: n_perm // 4] = torch.arange(len(labels))
        return perms

    wrong = {
        "equally likely": often_unmoved,
        "same label": lambda y, b, g: draw_permutations(len(y), b, generator=g),
        "orders must occur": lambda y, b, g: torch.arange(len(y)).repeat(b, 1),
        "each of": lambda y, b, g: torch.argsort(y).repeat(b, 1)[:, y],
        "shape": lambda y, b, g: right(y, 1, g),
    }
    for hint, fn in wrong.items():
        with pytest.raises(AssertionError, match=hint):
            ari.check_block_permutations(fn)
