"""Permutation tests: SciPy as the reference, exact levels, and the edge cases of the zero."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icmllab.toolbox import similarity as sim
from icmllab.toolbox import two_sample as ts
from icmllab.toolbox.similarity import metric
from icmllab.toolbox.two_sample import (
    calibrate,
    calibrate_layers,
    draw_permutations,
    fdr_bh,
    permutation_test,
)


def features(n=20, d=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g, dtype=torch.float64)


# Permutations


def test_permutations_are_permutations_and_repeat_with_the_generator():
    a = draw_permutations(9, 50, generator=torch.Generator().manual_seed(3))
    b = draw_permutations(9, 50, generator=torch.Generator().manual_seed(3))
    assert a.dtype == torch.int64
    assert (a.sort(dim=1).values == torch.arange(9)).all()
    assert (a == b).all()
    assert (draw_permutations(9, 50) == draw_permutations(9, 50)).all()
    c = draw_permutations(9, 50, generator=torch.Generator().manual_seed(4))
    assert (a != c).any()


def test_permutations_are_uniform():
    perms = draw_permutations(4, 24_000, generator=torch.Generator().manual_seed(0))
    codes = (perms * torch.tensor([64, 16, 4, 1])).sum(dim=1)
    counts = torch.unique(codes, return_counts=True)[1].numpy()
    assert len(counts) == 24
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=25), st.integers(0, 10**6))
def test_block_permutations_keep_the_blocks(labels, seed):
    labels = np.array(labels)
    g = torch.Generator().manual_seed(seed)
    perms = draw_permutations(len(labels), 20, generator=g, block=labels).numpy()
    assert (np.sort(perms, axis=1) == np.arange(len(labels))).all()
    assert (labels[perms] == labels).all()


def test_block_permutations_are_uniform_within_their_blocks():
    g = torch.Generator().manual_seed(0)
    block = torch.tensor([5, 0, 5, 0, 5])
    perms = draw_permutations(5, 12_000, generator=g, block=block)
    counts = torch.unique(perms, dim=0, return_counts=True)[1].numpy()
    assert len(counts) == 12  # 3! × 2!
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize(
    ("perms", "message"),
    [
        (torch.zeros(2, 20, dtype=torch.int64), "row 0 is none"),
        (torch.stack([torch.arange(20), torch.arange(1, 21)]), "row 1 is none"),
        (torch.arange(20), "shape"),
        (torch.arange(19)[None], "shape"),
        (torch.empty(0, 20, dtype=torch.int64), "shape"),
        (torch.arange(20.0)[None], "dtype"),
    ],
)
def test_what_is_no_permutation_is_refused(perms, message):
    with pytest.raises(ValueError, match=f"perms must.*{message}"):
        calibrate(features(), features(seed=1), perms=perms, alpha=0.5)


# p, τ and the score


@settings(max_examples=200, deadline=None)
@given(
    null=st.lists(st.integers(-3, 6).map(float), min_size=19, max_size=60),
    s0=st.integers(-4, 8).map(float),
    alpha=st.sampled_from([0.05, 0.1, 0.2, 0.5]),
)
def test_threshold_and_p_value_agree_with_counting(null, s0, alpha):
    found = permutation_test(s0, null, alpha=alpha, s_max=8.0)
    n = len(null) + 1
    assert found.p_value == pytest.approx((1 + sum(s >= s0 for s in null)) / n)
    # τ is the smallest of the scores that at least a share 1-α of all scores does not exceed
    scores = sorted([*null, s0])
    expected = next(t for t in scores if sum(s <= t for s in scores) >= (1 - alpha) * n - 1e-9)
    assert found.tau == expected
    assert 0 <= found.score <= 1
    assert (found.score > 0) == (s0 > found.tau)
    if found.score > 0:
        assert found.p_value <= alpha + 1e-12


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_without_ties_a_positive_score_is_the_same_as_rejection(seed):
    rng = np.random.default_rng(seed)
    null, s0 = rng.random(39), rng.random() ** 0.1
    found = permutation_test(s0, null)
    assert (found.score > 0) == (found.p_value <= 0.05)


def test_score_is_the_share_of_the_way_from_threshold_to_upper_end():
    null = np.arange(19) / 100
    found = permutation_test(0.59, null)
    assert found.tau == pytest.approx(0.18)
    assert found.score == pytest.approx((0.59 - 0.18) / (1 - 0.18))
    assert permutation_test(0.59, null, s_max=None).score == pytest.approx(0.41)
    assert permutation_test(0.05, null, s_max=None).score == 0
    assert permutation_test(7.0, null).score == 1


def test_rank_of_the_threshold_does_not_overshoot_in_floating_point():
    # (1 - 0.45) · 100 is 55.00000000000001 in floating point
    for n_perm, alpha in (
        (19, 0.05),
        (39, 0.05),
        (59, 0.05),
        (199, 0.05),
        (99, 0.1),
        (9, 0.3),
        (99, 0.45),
    ):
        scores = np.arange(1, n_perm + 2, dtype=float)
        rank = round((1 - alpha) * (n_perm + 1))
        assert permutation_test(scores[-1], scores[:-1], alpha=alpha, s_max=None).tau == rank


def test_scipy_gives_the_same_p_value_over_all_permutations():
    import itertools

    X, Y = features(6, 2), features(6, 3, seed=1)
    every = torch.tensor(list(itertools.permutations(range(6))))
    ours = calibrate(X, Y, perms=every)
    rows = np.arange(6)

    def statistic(order):
        return sim.cka_linear(X, Y[torch.from_numpy(np.asarray(order, dtype=np.int64))])

    theirs = scipy.stats.permutation_test(
        (rows,), statistic, permutation_type="pairings", n_resamples=np.inf, alternative="greater"
    )
    # SciPy enumerates all 720 without adding the observed one, which is among them
    assert ours.p_value == pytest.approx((theirs.pvalue * 720 + 1) / 721, abs=1e-12)
    assert np.sort(ours.null.numpy()) == pytest.approx(np.sort(theirs.null_distribution))


def test_scipy_agrees_on_random_permutations_within_chance():
    X = features(25, 2)
    Y = torch.cat([0.35 * X, features(25, 2, seed=2)], dim=1)
    ours = calibrate(X, Y, n_perm=1999, generator=torch.Generator().manual_seed(5))

    def statistic(order):
        return sim.cka_linear(X, Y[torch.from_numpy(np.asarray(order, dtype=np.int64))])

    theirs = scipy.stats.permutation_test(
        (np.arange(25),),
        statistic,
        permutation_type="pairings",
        n_resamples=1999,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    p = theirs.pvalue
    assert 0.005 < p < 0.6
    assert abs(ours.p_value - p) < 5 * math.sqrt(2 * p * (1 - p) / 2000)


@pytest.mark.parametrize("name", ["cka_linear", "mutual_knn"])
def test_level_is_kept_on_unrelated_data(name):
    g = torch.Generator().manual_seed(11)
    m = metric(name, k=5) if name == "mutual_knn" else metric(name)
    rejected = 0
    for _ in range(400):
        X, Y = torch.randn(2, 16, 6, generator=g, dtype=torch.float64)
        rejected += calibrate(X, Y, m, n_perm=19, generator=g).p_value <= 0.05
    # 400 trials at 5 %: more than 37 has probability 1e-3
    assert rejected <= 37
    assert rejected >= (6 if name == "cka_linear" else 0)


# calibrate


def test_identity_permutations_give_p_one_and_score_zero():
    X, Y = features(), features(seed=1)
    perms = torch.arange(20).repeat(39, 1)
    for name in sim.METRICS:
        m = metric(name, k=5) if "k" in sim.METRICS[name].__dataclass_fields__ else metric(name)
        found = calibrate(X, Y, m, perms=perms)
        assert (found.p_value, found.score) == (1.0, 0.0), name
        assert (found.null == found.raw).all()


def test_a_representation_beside_itself_scores_one_with_the_smallest_p():
    X = features()
    found = calibrate(X, X, n_perm=99)
    assert found.score == pytest.approx(1.0, abs=1e-9)
    assert found.p_value == 1 / 100
    assert found.raw == pytest.approx(1.0, abs=1e-12)


def test_exchanging_equal_rows_is_a_tie_whatever_rounding_does():
    X = features(12, 5)
    Y = features(12, 40, seed=1)
    Y[6:] = Y[:6]
    swap = torch.arange(12)
    swap[[0, 6, 2, 8]] = torch.tensor([6, 0, 8, 2])
    found = calibrate(X, Y, perms=swap.repeat(39, 1))
    assert (found.p_value, found.score) == (1.0, 0.0)


def test_full_rank_cca_is_uninformative_and_says_so():
    X, Y = features(10, 30), features(10, 30, seed=1)
    found = calibrate(X, Y, "cca_mean", n_perm=39)
    assert found.raw == pytest.approx(1.0, abs=1e-9)
    assert found.tau == pytest.approx(1.0, abs=1e-9)
    assert (found.score, found.p_value) == (0.0, 1.0)


def test_a_callable_gives_what_the_named_metric_gives():
    X, Y = features(), features(seed=1)
    named = calibrate(X, Y, "cka_linear", n_perm=39)
    calls = []

    def score(a, b):
        calls.append((a, b))
        return sim.cka_linear(a, b)

    found = calibrate(X.float(), Y.float(), score, n_perm=39)
    assert len(calls) == 40
    assert all(a.dtype == b.dtype == torch.float64 for a, b in calls)
    assert (calls[0][1] == Y.float().double()).all()
    assert found.null.numpy() == pytest.approx(named.null.numpy(), abs=1e-6)
    assert found.p_value == named.p_value


def test_result_fields_belong_together():
    X, Y = features(), features(seed=1)
    found = calibrate(X, Y, metric("mutual_knn", k=3), n_perm=59)
    assert found.null.shape == (59,)
    assert found.null.dtype == torch.float64
    assert found[:4] == (found.raw, found.score, found.p_value, found.tau)
    again = permutation_test(found.raw, found.null)
    assert tuple(again) == (found.p_value, found.tau, found.score)


def test_block_null_contains_what_the_labels_explain():
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(5).repeat(12)
    centres = 3 * torch.randn(5, 4, generator=g, dtype=torch.float64)
    X, Y = (centres[labels] + torch.randn(60, 4, generator=g, dtype=torch.float64) for _ in "xy")
    free = calibrate(X, Y, n_perm=99, generator=g)
    within = calibrate(X, Y, n_perm=99, generator=g, block=labels)
    assert free.p_value == 0.01
    assert within.p_value > 0.05
    assert within.null.mean() > 0.5 > free.null.mean()


def one_hot(n, g):
    return torch.nn.functional.one_hot(torch.randint(3, (n,), generator=g), 3).double()


def narrow_relu(n, g):
    """Two features after a ReLU: a quarter of the rows is 0, a half lies on two rays."""
    return torch.randn(n, 2, generator=g, dtype=torch.float64).relu()


@pytest.mark.parametrize("draw", [one_hot, narrow_relu])
@pytest.mark.parametrize("name", ["mutual_knn", "cycle_knn", "cknna"])
def test_level_is_kept_where_neighbours_tie(name, draw):
    g = torch.Generator().manual_seed(3)
    m = metric(name, k=5)
    trials, rejected, alone = 200, 0, 0
    for _ in range(trials):
        X, Y = draw(30, g), draw(30, g)
        rejected += calibrate(X, Y, m, n_perm=19, generator=g).p_value <= 0.05
        prepared = m.prepare(X, Y)  # ties of both sides to the lower index
        scores = m.null(prepared, ts.with_identity(draw_permutations(30, 19, generator=g)))
        alone += bool(scores[0] > scores[1:].max())
    # 200 trials at 5 %: more than 21 has probability 1e-3
    assert rejected <= 21
    if name == "mutual_knn":
        assert alone > 60  # what the order of the ties repairs


def test_level_is_kept_for_the_best_of_layers_that_tie():
    g = torch.Generator().manual_seed(4)
    rejected = 0
    for _ in range(150):
        Xs, Ys = ([one_hot(30, g), narrow_relu(30, g)] for _ in "xy")
        found = calibrate_layers(Xs, Ys, metric("mutual_knn", k=5), n_perm=19, generator=g)
        rejected += found.p_value <= 0.05
    assert rejected <= 17  # more has probability 1e-3


@pytest.mark.parametrize("name", ["mutual_knn", "cycle_knn", "cknna"])
def test_without_ties_the_test_sees_the_raw_score_and_recomputed_ones(name):
    X, Y = features(), features(seed=1)
    m, perms = metric(name, k=4), draw_permutations(20, 39)
    found = calibrate(X, Y, m, perms=perms)
    assert found.raw == pytest.approx(m.raw(X, Y), abs=1e-12)
    expected = np.array([m.raw(X, Y[perm]) for perm in perms])
    assert found.null.numpy() == pytest.approx(expected, abs=1e-12)


def test_with_ties_all_scores_of_the_test_use_one_order_that_goes_with_the_rows():
    g = torch.Generator().manual_seed(0)
    X, Y = one_hot(40, g), one_hot(40, g)
    m, perms = metric("mutual_knn", k=5), draw_permutations(40, 39)
    found = calibrate(X, Y, m, perms=perms)
    order = ts.tie_order(perms)
    # a tie is broken in favour of the row that comes first in the order
    place = torch.argsort(order)
    lists = []
    for i in range(40):
        others = [j for j in range(40) if j != i]
        lists.append(sorted(others, key=lambda j: (-float(Y[i] @ Y[j]), int(place[j])))[:5])
    theirs = torch.tensor(lists)
    mine = sim.knn_indices(X, 5)
    assert found.raw == m.pair(mine, theirs)
    assert found.null.tolist() == [m.pair(mine, m.take(theirs, perm)) for perm in perms]
    assert calibrate_layers([X], [Y], m, perms=perms).raw == found.raw
    assert torch.equal(calibrate(X, Y, m, perms=perms).null, found.null)


def test_the_order_of_ties_is_as_random_as_the_permutations():
    g = torch.Generator().manual_seed(0)
    perms = [draw_permutations(4, 5, generator=g) for _ in range(6000)]
    orders = torch.stack([ts.tie_order(p) for p in perms])
    assert torch.equal(ts.tie_order(perms[0]), orders[0])
    codes = (orders * torch.tensor([64, 16, 4, 1])).sum(dim=1)
    counts = torch.unique(codes, return_counts=True)[1].numpy()
    assert len(counts) == 24
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


def test_heavy_tails_do_not_break_the_level():
    g = torch.Generator().manual_seed(1)
    rejected = 0
    for _ in range(200):
        X, Y = torch.randn(2, 16, 4, generator=g, dtype=torch.float64).pow(5)
        rejected += calibrate(X, Y, n_perm=19, generator=g).score > 0
    assert rejected <= 22


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must be in"),
        ({"alpha": 1.0}, "alpha must be in"),
        ({"n_perm": 0}, "n_perm must be at least 1"),
        ({"n_perm": 19.5}, "n_perm must be at least 1, a whole number: got 19.5"),
        ({"n_perm": math.nan}, "n_perm must be at least 1, a whole number"),
        ({"n_perm": True}, "n_perm must be at least 1, a whole number"),
        ({"n_perm": 18}, "n_perm must be at least 19 .* can never reject"),
        ({"s_max": 0.0}, "s_max must be > 0"),
        ({"s_max": -1.0}, "s_max must be > 0"),
        ({"s_max": math.inf}, "s_max must be > 0 and finite, or None: got inf"),
        ({"s_max": math.nan}, "s_max must be > 0 and finite, or None: got nan"),
        ({"block": [0] * 19}, "block must hold one label a row"),
        ({"block": [0] * 20, "perms": torch.arange(20).repeat(19, 1)}, "block must be None"),
        ({"metric": "cka"}, "name must be one of"),
        ({"metric": 3}, "metric must be"),
        ({"metric": lambda a, b: math.nan}, "must be finite"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(features(), features(seed=1), **options)


def test_too_few_given_permutations_are_refused():
    with pytest.raises(ValueError, match="can never reject"):
        calibrate(features(), features(seed=1), perms=torch.arange(20).repeat(18, 1))


# calibrate_layers


def test_one_pair_of_layers_is_the_scalar_calibration():
    X, Y = features(), features(seed=1)
    perms = draw_permutations(20, 39)
    one, many = calibrate(X, Y, perms=perms), calibrate_layers([X], [Y], perms=perms)
    assert many[:4] == pytest.approx(one[:4])
    assert many.null.numpy() == pytest.approx(one.null.numpy())
    assert many.layer_scores.shape == (1, 1)
    assert many.argmax == (0, 0)


def test_one_pair_of_layers_takes_every_option_as_the_scalar_does():
    X = features()
    Y = 0.7 * X + features(seed=1)
    labels = np.arange(20) % 4
    options = {"block": labels, "alpha": 0.1, "s_max": None, "n_perm": 29}

    def run(fn, *pair, **changes):
        g = torch.Generator().manual_seed(6)
        return fn(*pair, **{**options, "generator": g, **changes})

    one, many = run(calibrate, X, Y), run(calibrate_layers, [X], [Y])
    assert many[:4] == pytest.approx(one[:4], abs=1e-12)
    assert many.null.numpy() == pytest.approx(one.null.numpy(), abs=1e-12)
    assert one.score > 0
    # each option matters
    for changes in (
        {"block": None},
        {"alpha": 0.2},
        {"s_max": 1.0},
        {"n_perm": 39},
        {"generator": torch.Generator().manual_seed(7)},
    ):
        other = run(calibrate_layers, [X], [Y], **changes)
        assert tuple(other[:4]) != pytest.approx(tuple(many[:4]), abs=1e-9), changes


@pytest.mark.parametrize("name", ["cka_linear", "mutual_knn", "procrustes"])
@pytest.mark.parametrize("agg", ["max", "mean"])
def test_the_same_permutation_is_applied_to_all_layers(name, agg):
    Xs = [features(seed=s) for s in range(3)]
    Ys = [features(seed=s) for s in range(3, 5)]
    m = metric(name, k=4) if name == "mutual_knn" else metric(name)
    perms = draw_permutations(20, 19)
    found = calibrate_layers(Xs, Ys, m, agg=agg, perms=perms)
    reduce = {"max": np.max, "mean": np.mean}[agg]
    expected = [reduce([[m.raw(X, Y[p]) for Y in Ys] for X in Xs]) for p in perms]
    assert found.null.numpy() == pytest.approx(np.array(expected), abs=1e-9)
    scores = np.array([[m.raw(X, Y) for Y in Ys] for X in Xs])
    assert found.layer_scores.numpy() == pytest.approx(scores, abs=1e-9)
    assert found.raw == pytest.approx(reduce(scores), abs=1e-9)
    assert found.argmax == tuple(np.unravel_index(scores.argmax(), scores.shape))


def test_aggregate_and_metric_may_be_callables():
    Xs, Ys = [features(seed=0), features(seed=1)], [features(seed=2)]
    perms = draw_permutations(20, 19)
    by_name = calibrate_layers(Xs, Ys, agg="mean", perms=perms)
    found = calibrate_layers(Xs, Ys, sim.cka_linear, agg=lambda S: S.mean(), perms=perms)
    assert found.null.numpy() == pytest.approx(by_name.null.numpy(), abs=1e-10)
    assert found.p_value == by_name.p_value


def test_layers_may_differ_in_width_but_not_in_rows():
    calibrate_layers([features(d=2), features(d=9)], [features(d=30)], n_perm=19)
    with pytest.raises(ValueError, match="same number of rows"):
        calibrate_layers([features(20), features(21)], [features(20)])
    with pytest.raises(ValueError, match="Ys must hold at least one layer"):
        calibrate_layers([features()], [])
    with pytest.raises(ValueError, match=r"Xs\[1\] must be 2-D"):
        calibrate_layers([features(), torch.zeros(20)], [features()])
    with pytest.raises(ValueError, match="agg must be"):
        calibrate_layers([features()], [features()], agg="median")


# Many tests


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.sampled_from([0.01, 0.05, 0.2]))
def test_benjamini_hochberg_by_its_step_up_rule(p, q):
    found = fdr_bh(p, q)
    order = np.argsort(p)
    passing = [r for r, i in enumerate(order, 1) if p[i] * len(p) / r <= q]
    cut = p[order[max(passing) - 1]] if passing else -1.0
    assert found.rejected.tolist() == [value <= cut for value in p]
    assert (found.adjusted >= torch.tensor(p, dtype=torch.float64) - 1e-15).all()


def test_benjamini_hochberg_keeps_the_shape():
    found = fdr_bh(torch.tensor([[0.001, 0.5], [0.02, 0.9]], dtype=torch.float64), 0.05)
    assert found.rejected.tolist() == [[True, False], [True, False]]
    assert found.adjusted.shape == (2, 2)


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ([], 0.05, "at least one"),
        ([1.2], 0.05, "lie in"),
        ([math.nan], 0.05, "lie in"),
        ([0.5], 0, "q must be"),
        ([0.5], 1, "q must be"),
    ],
)
def test_bad_p_values_are_refused(p, q, message):
    with pytest.raises(ValueError, match=message):
        fdr_bh(p, q)


def test_permutation_test_checks_its_scores():
    with pytest.raises(ValueError, match="one-dimensional"):
        permutation_test(0.5, np.zeros((4, 5)))
    with pytest.raises(ValueError, match="finite"):
        permutation_test(math.inf, np.zeros(19))


def test_rounding_is_judged_on_the_scale_of_the_scores():
    tiny = torch.tensor([1e-15, 2e-15], dtype=torch.float64)
    assert (ts.snap_ties(3e-15, tiny) == tiny).all()
    near = torch.tensor([0.5 + 1e-15, 0.4], dtype=torch.float64)
    assert ts.snap_ties(0.5, near).tolist() == [0.5, 0.4]
