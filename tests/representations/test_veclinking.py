"""The paper's module: codes, scale, posterior, choice, the linker, encoders, baselines, files."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from icmllab.representations import veclinking as vl


@pytest.fixture(scope="module")
def problem():
    return vl.make_problem(vl.kernel_encoders(seed=0), seed=0)


@pytest.fixture(scope="module")
def found(problem):
    return vl.compare(problem, seed=0)


@pytest.fixture(scope="module")
def small():
    return vl.make_problem(vl.kernel_encoders(400, 12, seed=1), n=240, overlap=160, seed=1)


def unit(n, d, seed=0):
    X = np.random.default_rng(seed).normal(size=(n, d))
    return X / np.linalg.norm(X, axis=1, keepdims=True)


# Distances, codes, costs


def test_chord_distances_are_euclidean_and_keep_short_ones():
    U, V = unit(7, 5), unit(4, 5, 1)
    assert np.allclose(vl.chord_distances(U, V), cdist(U, V), atol=1e-14)
    near = U + 1e-6 * unit(7, 5, 2)
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    got = np.diag(vl.chord_distances(U, near))
    assert np.allclose(got, np.linalg.norm(U - near, axis=1), rtol=1e-3)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 8), p=st.integers(1, 9), r=st.integers(1, 9), seed=st.integers(0, 99))
def test_anchor_code_is_the_stable_sort(n, p, r, seed):
    D = np.random.default_rng(seed).integers(0, 4, (n, p)) / 4  # ties
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vl.FewAnchorsWarning)
        code = vl.anchor_code(D, r)
    order = np.argsort(D, axis=1, kind="stable")[:, :r]
    assert np.array_equal(code.idx, order)
    assert np.array_equal(code.val, np.take_along_axis(D, order, 1))


def test_code_asks_for_no_more_anchors_than_there_are():
    D = unit(3, 4) ** 2
    with pytest.warns(vl.FewAnchorsWarning, match=r"r=9 is more than the 4 anchors"):
        assert vl.anchor_code(D, 9).idx.shape == (3, 4)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 6),
    m=st.integers(1, 6),
    p=st.integers(1, 7),
    scale=st.floats(0.1, 5),
    seed=st.integers(0, 99),
)
def test_directed_cost_is_the_written_sum(n, m, p, scale, seed):
    rng = np.random.default_rng(seed)
    DX, DY, r = rng.random((n, p)), rng.random((m, p)), int(rng.integers(1, p + 1))
    DX[0, 0] = 0.0
    got = vl.directed_code_cost(DX, DY, r, scale)
    for i in range(n):
        near = np.argsort(DX[i], kind="stable")[:r]
        gap = DX[i, near] - scale * DY[:, near]
        expected = (gap**2 / np.maximum(DX[i, near], 0.01)).sum(axis=1)
        assert np.allclose(got[i], expected, rtol=1e-9, atol=1e-12)


def test_scale_is_a_median_over_near_pairs_and_inverts_exactly():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(20, 4))
    Q = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    AX, AY = cdist(A, A), cdist(A @ Q / 3, A @ Q / 3)
    assert vl.estimate_scale(AX, AY, 5) == pytest.approx(3, abs=1e-12)
    other = cdist(B := rng.normal(size=(20, 6)), B)
    forth, back = vl.estimate_scale(AX, other, 5), vl.estimate_scale(other, AX, 5)
    assert forth * back == pytest.approx(1, abs=1e-12)
    # by hand: with one neighbour, of four points on a line and their partners
    x, y = np.array([[0.0], [1.0], [10.0], [12.0]]), np.array([[0.0], [2.0], [30.0], [31.0]])
    assert vl.estimate_scale(cdist(x, x), cdist(y, y), 1) == pytest.approx(1.0)  # of 1/2 and 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vl.anchor_code(np.zeros(3), 1), "D must be a matrix"),
        (lambda: vl.anchor_code(-np.ones((2, 2)), 1), "D must hold finite"),
        (lambda: vl.anchor_code(np.ones((2, 2)), 0), "r must be a whole number >= 1"),
        (lambda: vl.directed_code_cost(np.ones((2, 3)), np.ones((2, 2)), 1, 1), "one column an"),
        (lambda: vl.directed_code_cost(np.ones((2, 2)), np.ones((2, 2)), 1, 0), "scale must be"),
        (lambda: vl.estimate_scale(np.ones((2, 3)), np.ones((2, 2)), 1), "AX and AY must be sq"),
        (lambda: vl.estimate_scale(np.zeros((3, 3)), np.zeros((3, 3)), 1), "all coincide"),
        (lambda: vl.beta_lower(5, 4), "h must lie in 0..T=4"),
        (lambda: vl.beta_lower(1, 4, 1.0), "q must be in"),
        (lambda: vl.beta_lower(1, 4, 0.1, a0=0), "a0 must be > 0"),
    ],
)
def test_bad_input_of_the_pieces_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Posterior and choice


@pytest.mark.parametrize("h", [0, 8, 16])
def test_lower_bound_is_the_beta_quantile(h):
    assert vl.beta_lower(h, 16) == pytest.approx(
        scipy.stats.beta(1 + h, 17 - h).ppf(0.1), abs=1e-10
    )


def test_default_thresholds_ask_for_13_and_14_of_16_votes():
    votes = np.arange(17)
    assert votes[vl.beta_lower(votes, 16) > 0.6].min() == 13
    assert votes[(1 + votes) / 18 > 0.8].min() == 14


def candidates(seed, n=12):
    rng = np.random.default_rng(seed)
    pairs = np.argwhere(rng.random((n, n)) < 0.3)
    votes = rng.integers(1, 6, len(pairs))
    return vl.Candidates(*pairs.T, votes, rng.integers(0, 3, len(pairs)) / 2)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_greedy_choice_is_the_list_gone_through_one_by_one(seed):
    c = candidates(seed)
    rows, cols, expected = set(), set(), []
    for _, _, i, j in sorted(zip(-c.votes, c.cost, c.i, c.j, strict=True)):
        if i not in rows and j not in cols:
            expected.append((i, j))
            rows.add(i)
            cols.add(j)
    got = vl.greedy_assignment(c)
    assert list(zip(got.i, got.j, strict=True)) == expected


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_hungarian_choice_has_the_largest_total(seed):
    c = candidates(seed, 8)
    gain = np.zeros((8, 8))
    gain[c.i, c.j] = -np.log(1 - (1 + c.votes) / 8)
    got = vl.hungarian_assignment(c, 6)
    assert len(set(got.i)) == len(set(got.j)) == len(got.i)
    best = gain[linear_sum_assignment(gain, maximize=True)].sum()
    assert gain[got.i, got.j].sum() == pytest.approx(best)
    assert (np.diff(got.votes) <= 0).all()


# Views


def test_views_of_few_anchors_leave_some_out():
    sizes = [vl.view_size(p, subsample=0.6, n_refs=16) for p in (3, 15, 20, 100)]
    assert sizes == [2, 13, 18, 60]


def test_votes_are_transposed_when_the_stores_change_places(small):
    X, Y, seeds = small.X, small.Y, small.seeds
    A, B = X[seeds[:, 0]], Y[seeds[:, 1]]
    forth = vl.cast_votes(X, Y, A, B, generator=3)
    back = vl.cast_votes(Y, X, B, A, generator=3)
    order = np.lexsort((back.pairs.i, back.pairs.j))
    assert np.array_equal(forth.pairs.i, back.pairs.j[order])
    assert np.array_equal(forth.pairs.j, back.pairs.i[order])
    assert np.array_equal(forth.pairs.votes, back.pairs.votes[order])
    assert forth.scales * back.scales == pytest.approx(1, abs=1e-12)
    assert len(np.unique(forth.scales)) > 8  # the views differ


def test_votes_are_those_of_the_explicit_costs(small):
    X, Y, seeds = small.X, small.Y, small.seeds
    A, B = X[seeds[:, 0]], Y[seeds[:, 1]]
    for local in (True, False):
        got = vl.cast_votes(X, Y, A, B, n_views=2, n_refs=6, local=local, generator=5)
        rng, votes = np.random.default_rng(5), np.zeros((len(X), len(Y)), dtype=int)
        for _ in range(2):
            view = rng.choice(20, 12, replace=False)
            r = 6 if local else 12
            DX, DY = vl.chord_distances(X, A[view]), vl.chord_distances(Y, B[view])
            inner = (vl.chord_distances(Z[view], Z[view]) for Z in (A, B))
            scale = vl.estimate_scale(*inner, r)
            D1, D2 = (
                vl.directed_code_cost(DX, DY, r, scale),
                vl.directed_code_cost(DY, DX, r, 1 / scale),
            )
            pairs = vl.mutual_nearest(torch.from_numpy(D1), torch.from_numpy(D2))
            votes[tuple(pairs.T.numpy())] += 1
        dense = np.zeros_like(votes)
        dense[got.pairs.i, got.pairs.j] = got.pairs.votes
        assert np.array_equal(dense, votes)


def test_costs_that_only_rounding_tells_apart_go_to_the_lowest_index():
    rng = np.random.default_rng(0)
    for _ in range(30):
        a, e = rng.uniform(0.3, 1.0), rng.uniform(0.01, 0.2)
        code = torch.full((1, 2), a, dtype=torch.float64)
        Y = torch.tensor([[a + e, a - e, a + e], [a, a, a]], dtype=torch.float64)
        for columns in ([0, 1, 2], [1, 0, 2]):
            found = vl.code_cost_argmin(code, torch.tensor([[0, 1]]), Y[:, columns], 1.0)
            assert found.best_j.tolist() == [0]


def test_searching_all_lists_is_the_full_search_and_few_lists_find_most(small):
    rng = np.random.default_rng(0)
    DX = torch.from_numpy(vl.chord_distances(small.X, small.X[:50]))
    DY = torch.from_numpy(vl.chord_distances(small.X[:180] + 0.02 * rng.random(512), small.X[:50]))
    code = DX.topk(8, largest=False)
    others = DY.T.contiguous()
    full = vl.code_cost_argmin(code.values, code.indices, others, 1.0)
    same = []
    for c in (8, 2):
        lists = vl.inverted_lists(DY.topk(50 if c == 8 else c, largest=False).indices, 50)
        pruned = vl.pruned_code_argmin(code.values, code.indices, others, 1.0, lists, c)
        same.append((pruned.best_j == full.best_j).double().mean())
        hit = pruned.best_j == full.best_j
        assert torch.allclose(pruned.best_cost[hit], full.best_cost[hit], atol=1e-9)
    assert same[0] == 1
    assert same[1] > 0.7
    nobody = vl.inverted_lists(torch.full((180, 1), 49), 50)
    lonely = vl.pruned_code_argmin(code.values[:3], code.indices[:3] % 40, others, 1.0, nobody, 2)
    assert lonely.best_j.tolist() == [-1] * 3
    assert lonely.best_cost.isinf().all()


# The linker


def test_linker_finds_the_overlap_and_the_local_code_and_the_bootstrap_carry_it(problem, found):
    scores = vl.comparison_scores(found, problem)
    assert scores["link_f"] > 0.8
    assert scores["link_p"] > 0.88
    assert scores["link_r"] > 2 * scores["link_r0"]
    assert scores["link_f"] > scores["all_f"]
    assert scores["link_f"] > scores["iter_f"] + 0.03
    assert scores["link_f"] > scores["once_f"] + 0.2
    assert scores["seed_r"] < 0.1
    assert scores["oracle_f"] > 0.9


def test_fitted_attributes_agree_with_each_other(problem, found):
    linker = found.linker
    links, n = linker.links_, len(problem.X)
    assert links.shape == (len(linker.posterior_), 2)
    for side in (0, 1):
        assert len(np.unique(links[:, side])) == len(links)
        assert not np.isin(links[:, side], problem.seeds[:, side]).any()
    votes = linker.votes_.toarray()[links[:, 0], links[:, 1]]
    assert np.allclose(linker.posterior_, (1 + votes) / 18)
    assert linker.posterior_.min() > 0.8
    assert (np.diff(linker.posterior_) <= 0).all()
    assert linker.votes_.shape == (n, n)
    partner = linker.predict(np.arange(n))
    assert (partner >= 0).sum() == len(links) + 20
    assert np.array_equal(partner[links[:, 0]], links[:, 1])
    assert np.array_equal(partner[problem.seeds[:, 0]], problem.seeds[:, 1])
    assert linker.history_.anchors.tolist() == [len(a) for a in linker.anchors_]
    assert np.array_equal(linker.anchors_[0], problem.seeds)
    room = [20 * 1.7**t for t in range(len(linker.anchors_))]
    assert all(len(a) <= most for a, most in zip(linker.anchors_, room, strict=True))
    assert linker.history_.links.iloc[-1] == len(links)
    assert linker.scale_ == pytest.approx(1.11, abs=0.05)


def test_anchors_are_decided_anew_so_that_a_wrong_one_can_leave(found):
    left = [
        set(map(tuple, before)) - set(map(tuple, after))
        for before, after in zip(found.linker.anchors_, found.linker.anchors_[1:], strict=False)
    ]
    assert any(left)


def test_fewer_rounds_are_the_first_rounds_of_more(problem, found):
    one = vl.link(problem, seed=0, options={"n_rounds": 1})
    assert np.array_equal(one.links_, found.linker.rounds_[0].links)


def test_same_stores_link_every_row_with_confidence():
    X = vl.kernel_encoders(300, seed=2).X
    order = np.random.default_rng(0).permutation(300)
    seeds = np.stack([order[:20], np.arange(20)], axis=1)
    linker = vl.VectorLinker().fit(X, X[order], seeds)
    assert len(linker.links_) == 280
    assert linker.posterior_.min() > 0.9
    room = [min(300, 20 + math.floor(20 * (1.7**t - 1))) for t in range(len(linker.anchors_))]
    assert [len(a) for a in linker.anchors_] == room
    capped = vl.VectorLinker(max_anchors=50).fit(X, X[order], seeds)
    assert [len(a) for a in capped.anchors_[:3]] == [20, 34, 50]
    assert max(len(a) for a in capped.anchors_) == 50
    assert np.array_equal(order[linker.links_[:, 1]], linker.links_[:, 0])


def test_rows_of_seeds_are_not_linked_again_on_either_side():
    X = vl.kernel_encoders(120, 6, seed=2).X
    seeds = np.stack([np.arange(21)] * 2, axis=1)
    seeds[20, 1] = 21  # a wrong one: rows 21 of X and 20 of Y are left without their partners
    linker = vl.VectorLinker(n_rounds=2).fit(X, X, seeds)
    assert len(linker.links_) > 60
    for found in linker.rounds_:
        assert not np.isin(found.chosen.i, seeds[:, 0]).any()
        assert not np.isin(found.chosen.j, seeds[:, 1]).any()


def test_thresholds_are_bounds_that_must_be_exceeded(small):
    one = vl.link(small, options={"n_rounds": 1, "n_views": 18}).rounds_[0]
    assert (one.chosen.votes == 15).any()  # posterior mean 16/20, accept = 0.8
    assert one.posterior.min() > 0.8
    anchors = [
        vl.link(small, options={"n_rounds": 2, "growth": 20, "q_level": level}).anchors_[1]
        for level in (0.01, 0.1, 0.5)
    ]
    assert len(anchors[0]) < len(anchors[1]) < len(anchors[2])
    votes = vl.link(small, options={"n_rounds": 1}).rounds_[0].chosen.votes
    assert len(anchors[1]) == 20 + (votes >= 13).sum()


def test_linker_stops_once_the_anchors_stay_the_same_twice():
    X = vl.kernel_encoders(60, 4, seed=2).X
    seeds = np.stack([np.arange(20)] * 2, axis=1)
    linker = vl.VectorLinker(n_rounds=40).fit(X, X, seeds)
    assert len(linker.rounds_) < 20
    last = [set(map(tuple, a)) for a in linker.anchors_[-2:]]
    assert last[0] == last[1]


def test_stores_of_different_size_and_both_assignments(small):
    keep = np.sort(np.random.default_rng(0).permutation(240)[:150])
    place = np.full(240, -1)
    place[keep] = np.arange(150)
    truth = np.stack([small.truth[:, 0], place[small.truth[:, 1]]], axis=1)
    truth = truth[truth[:, 1] >= 0]
    for assignment in ("greedy", "hungarian"):
        linker = vl.VectorLinker(assignment=assignment).fit(small.X, small.Y[keep], truth[:20])
        got = vl.link_metrics(linker.links_, truth, truth[:20])
        assert got.precision > 0.7
        assert got.recall > 0.3


def test_references_outside_the_stores_are_never_put_out(problem):
    linker = vl.VectorLinker().fit(
        problem.X, problem.Y, seed_vectors=(problem.outside_x[:20], problem.outside_y[:20])
    )
    assert vl.link_metrics(linker.links_, problem.truth).f1 > 0.7
    assert len(linker.anchors_[0]) == 0
    assert linker.history_.anchors.iloc[0] == 20
    both = vl.VectorLinker(n_rounds=1).fit(
        problem.X,
        problem.Y,
        problem.seeds[:10],
        seed_vectors=(problem.outside_x[:10], problem.outside_y[:10]),
    )
    assert both.history_.anchors.iloc[0] == 20
    assert len(both.anchors_[0]) == 10


def test_stores_without_overlap_get_few_links():
    assert vl.no_overlap_study(seed=3)["links"] <= 60


def test_copies_are_linked_once_and_warned_of(small):
    X = np.concatenate([small.X, small.X[:40]])
    with pytest.warns(vl.DuplicateVectorsWarning, match="X holds 40 copies"):
        linker = vl.VectorLinker().fit(X, small.Y, small.seeds)
    assert linker.links_[:, 0].max() < 240
    plain = vl.VectorLinker().fit(small.X, small.Y, small.seeds)
    assert set(map(tuple, linker.links_)) == set(map(tuple, plain.links_))


def test_seeds_of_one_cluster_are_not_forced_on_the_rest(problem):
    cluster = problem.labels_x[problem.truth[:, 0]]
    label = np.bincount(cluster).argmax()
    seeds = problem.truth[cluster == label][:12]
    with pytest.warns(vl.FewAnchorsWarning, match="more than the 12 seeds"):
        linker = vl.VectorLinker(n_rounds=1).fit(problem.X, problem.Y, seeds)
    linked = problem.labels_x[linker.links_[:, 0]]
    assert len(linker.links_) < 100
    votes = np.bincount(problem.labels_x, np.asarray(linker.votes_.max(axis=1).todense()).ravel())
    rate = votes / np.maximum(np.bincount(problem.labels_x), 1)
    assert rate[label] > np.median(rate)
    assert len(linked) < len(problem.truth)


GOOD = unit(30, 4), unit(30, 3, 1), np.stack([np.arange(20)] * 2, axis=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": GOOD[2][:2]}, "at least 3 pairs together: got 2"),
        ({"seeds": None}, "at least 3 pairs together: got 0"),
        ({"seeds": np.array([[0, 0], [0, 1], [2, 2]])}, "seeds must name each row once: row 0"),
        ({"seeds": np.array([[0, 0], [1, 30], [2, 2]])}, "rows of Y in 0..29"),
        ({"seeds": np.zeros((3, 3), dtype=int)}, r"seeds must be \(s, 2\) integers"),
        ({"seeds": np.ones((3, 2))}, r"seeds must be \(s, 2\) integers"),
        ({"X": np.where(np.arange(30)[:, None] == 4, 0, GOOD[0])}, "X must have no zero row.*4"),
        ({"Y": np.where(np.arange(30)[:, None] == 4, np.nan, GOOD[1])}, "Y must be finite"),
        ({"X": np.zeros(3)}, r"X must be \(n, d\)"),
        ({"seed_vectors": (unit(5, 4), unit(4, 3))}, "seed_vectors must be"),
        ({"seed_vectors": (unit(5, 3), unit(5, 3))}, "seed_vectors must be"),
        ({"seed_vectors": (unit(5, 4),)}, "seed_vectors must be a pair"),
        ({"q_min": 0.0}, "q_min must be in"),
        ({"accept": 1.0}, "accept must be in"),
        ({"q_level": 1.5}, "q_level must be in"),
        ({"growth": 0.9}, "growth must be >= 1"),
        ({"n_refs": 1}, "n_refs must be a whole number >= 2"),
        ({"n_views": 0}, "n_views must be"),
        ({"n_rounds": 1.5}, "n_rounds must be"),
        ({"subsample": 0.0}, "subsample must be in"),
        ({"assignment": "best"}, "assignment must be"),
        ({"n_probes": 0}, "n_probes must be"),
    ],
)
def test_bad_input_of_the_linker_is_named(change, message):
    X, Y, seeds = (change.get(k, v) for k, v in zip(("X", "Y", "seeds"), GOOD, strict=True))
    options = {k: v for k, v in change.items() if k not in ("X", "Y", "seeds", "seed_vectors")}
    with pytest.raises(ValueError, match=message):
        vl.VectorLinker(**options).fit(X, Y, seeds, seed_vectors=change.get("seed_vectors"))


def test_predict_names_its_errors():
    with pytest.raises(ValueError, match="fit first"):
        vl.VectorLinker().predict([0])
    linker = vl.VectorLinker(n_rounds=1).fit(*GOOD)
    with pytest.raises(ValueError, match=r"rows in 0\.\.29"):
        linker.predict([30])
    with pytest.raises(ValueError, match="integers"):
        linker.predict([0.5])


def test_pruned_linker_is_nearly_the_full_one(small):
    full, pruned = (vl.link(small, options={"n_probes": probes}) for probes in (None, 2))
    links = [set(map(tuple, linker.links_)) for linker in (full, pruned)]
    assert links[0] != links[1]  # so that lists were searched
    assert len(links[0] & links[1]) > 0.85 * len(links[0])


# Applications and metrics


def test_metrics_leave_the_seeds_out_on_both_sides():
    truth = np.array([[0, 0], [1, 1], [2, 2], [3, 3]])
    links = np.array([[0, 0], [1, 1], [2, 5]])
    got = vl.link_metrics(links, truth, truth[:1])
    assert got == pytest.approx((1 / 2, 1 / 3, 2 / 5))
    none = vl.link_metrics(np.empty((0, 2)), truth)
    assert math.isnan(none.precision)
    assert none[1:] == (0, 0)


def test_merged_stores_hold_each_object_once():
    links = np.array([[2, 0], [0, 3]])
    merged = vl.merge_stores(np.zeros((3, 2)), np.zeros((5, 1)), links)
    assert merged.tolist() == [[0, 3], [1, -1], [2, 0], [-1, 1], [-1, 2], [-1, 4]]
    assert len(vl.merge_stores(np.zeros((3, 2)), np.zeros((5, 1)), [])) == 8
    with pytest.raises(ValueError, match="links must name each row once"):
        vl.merge_stores(np.zeros((3, 2)), np.zeros((5, 1)), np.array([[0, 0], [0, 1]]))


def test_labels_travel_over_links_and_to_neighbours_of_linked_rows():
    Y = np.array([[1.0, 0], [0.99, 0.1], [0, 1], [0.1, 0.98]])
    labels = vl.transfer_clusters(["a", "b", "c"], np.array([[1, 0], [2, 2]]), Y)
    assert labels.tolist() == ["b", "b", "c", "c"]
    with pytest.raises(ValueError, match="at least one pair"):
        vl.transfer_clusters([0], [], Y)


# Encoders


def test_kernel_distances_have_the_limits_of_the_theory():
    d = np.array([0.001, 0.1, 0.5, 1.0, 4.0])
    ratio = vl.kernel_distance(d, 2, "gauss") / vl.kernel_distance(d, 3, "gauss")
    assert ratio == pytest.approx([1.49999997, 1.4997, 1.4935, 1.4746, 1.2117], abs=6e-5)
    assert ratio[1] == pytest.approx(1.5 * (1 - 5 * 0.01 / 288), abs=1e-7)
    matern = vl.kernel_distance(1e-7, 2, "gauss") / vl.kernel_distance(1e-7, 3, "t3")
    assert matern == pytest.approx(math.sqrt(3) / 2, rel=1e-6)


@pytest.mark.parametrize("kernel", ["gauss", "t3"])
def test_kernel_distance_is_that_of_the_similarity_and_smooth_where_forms_meet(kernel):
    d = np.linspace(0.05, 8, 50)
    direct = np.sqrt(2 * (1 - vl.kernel_similarity(d / 3, kernel)))
    assert vl.kernel_distance(d, 3, kernel) == pytest.approx(direct, rel=1e-9)
    around = 3 * 1e-2 / math.sqrt(3) * np.array([1 - 1e-9, 1 + 1e-9])
    assert np.diff(vl.kernel_distance(around, 3, kernel)) / around[0] < 1e-7


@pytest.mark.parametrize("kernel", ["gauss", "t3"])
def test_random_features_have_the_named_kernel(kernel):
    made = vl.kernel_encoders(60, ell=(2, 2), kernels=(kernel, "gauss"), dim=(60_000, 8), noise=0)
    z = vl.make_latents(60).z
    expected = vl.kernel_similarity(cdist(z, z) / 2, kernel)
    assert np.abs(made.X @ made.X.T - expected).max() < 0.03


def test_warp_bends_the_latents_and_noise_has_its_size():
    z = vl.make_latents(60).z
    plain, warped = (
        vl.kernel_encoders(60, ell=(2, 2), dim=(20_000, 8), noise=0, warp=warp) for warp in (0, 0.6)
    )
    expected = vl.kernel_similarity(cdist(z, z) / 2, "gauss")
    assert np.abs(plain.X @ plain.X.T - expected).max() < 0.04
    assert np.abs(warped.X @ warped.X.T - expected).max() > 0.1
    # rows of length 1 and noise of length 0.5 at a right angle
    noisy = vl.kernel_encoders(60, ell=(2, 2), dim=(20_000, 8), noise=0.5)
    assert (plain.X * noisy.X).sum(axis=1) == pytest.approx(1 / math.sqrt(1.25), abs=0.02)


def test_frequencies_of_t3_are_heavier_than_gaussian_ones():
    u = np.linspace(0.1, 4, 20)
    assert (vl.kernel_similarity(u, "t3") < vl.kernel_similarity(u, "gauss"))[:5].all()


@pytest.mark.parametrize("warp", [0.0, 0.3])
def test_kernel_encoders_are_locally_consistent_and_not_globally(warp):
    made = vl.kernel_encoders(warp=warp, seed=7)
    found = vl.consistency(made)
    assert found["short"] > 0.7
    assert found["long"] < 0.5
    assert np.allclose(np.linalg.norm(made.X, axis=1), 1)


def test_generators_repeat_with_their_seed_and_leave_global_ones_alone():
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for make in (
        lambda s: vl.kernel_encoders(50, seed=s),
        lambda s: vl.contrastive_encoders(60, seed=s, steps=3),
        lambda s: vl.digits_encoders(s, epochs=1),
    ):
        one, again, other = make(1), make(1), make(2)
        assert np.array_equal(one.X, again.X)
        assert np.array_equal(one.Y, again.Y)
        assert not np.array_equal(one.X, other.X)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 30), share=st.floats(0, 1), spare=st.integers(0, 9), seed=st.integers(0, 99)
)
def test_split_shares_what_it_says_and_order_tells_nothing(n, share, spare, seed):
    overlap = round(share * n)
    split = vl.overlap_split(2 * n - overlap + spare, n, overlap, seed)
    assert len(np.intersect1d(split.x, split.y)) == overlap == len(split.truth)
    assert np.array_equal(split.x[split.truth[:, 0]], split.y[split.truth[:, 1]])
    everyone = np.concatenate([np.union1d(split.x, split.y), split.outside])
    assert sorted(everyone) == list(range(2 * n - overlap + spare))


def test_training_pulls_copies_of_an_object_together():
    z = vl.make_latents(200, seed=0).z
    net = vl.encoder_net((6, 32, 16), "relu", 0)
    losses = vl.train_encoder(
        net,
        lambda x, g: x + 0.1 * torch.randn(x.shape, generator=g),
        torch.from_numpy(z).float(),
        steps=40,
        temperature=0.1,
        batch=64,
    )
    assert losses.shape == (40,)
    assert losses[-5:].mean() < 0.6 * losses[0]


@pytest.mark.parametrize("seed", vl.TRAINED_SEEDS)
def test_shipped_encoders_are_locally_consistent(seed):
    made = vl.load_trained(seed)
    assert made.X.shape == (1000, 64)
    assert made.Y.shape == (1000, 48)
    got = vl.consistency(made)
    assert got["short"] > 0.7
    assert got["short"] - got["long"] > 0.3


def test_shipped_weights_are_what_training_gives():
    # another processor may end at other weights, but not at another encoder
    z = vl.make_latents(1000, seed=0).z
    again = vl.encode(vl.train_latent_encoder(0, seed=0), z)
    shipped = vl.load_trained(0).X
    rho = vl.local_consistency(shipped, again, quantiles=(0, 0.1, 1)).spearman
    assert rho.min() > 0.8
    assert vl.TRAINED_FILE.stat().st_size <= 1_000_000


def test_unknown_weights_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"seed must be one of \[0, 1, 2\]: got 9"):
        vl.load_trained(9)
    with pytest.raises(FileNotFoundError):
        vl.load_trained(0, tmp_path / "none.safetensors")


def test_digits_encoders_are_the_negative_control():
    got = vl.consistency(vl.digits_encoders(0, epochs=10))
    assert got["short"] - got["long"] <= 0.1


def test_local_consistency_of_a_scaled_copy_is_perfect_and_of_noise_is_none():
    X = unit(200, 8)
    Q = np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))[0]
    same = vl.local_consistency(X, 7 * X @ Q, 2000)
    assert same.spearman.tolist() == pytest.approx([1, 1, 1])
    assert same.sd_log_ratio.max() < 1e-12
    spread = vl.local_consistency(X, unit(200, 8, 3), np.array([[0, 1], [2, 3], [4, 5]]), (0, 1))
    Y, pairs = unit(200, 8, 3), ((0, 1), (2, 3), (4, 5))
    logs = [math.log(math.dist(X[a], X[b]) / math.dist(Y[a], Y[b])) for a, b in pairs]
    assert spread.sd_log_ratio.tolist() == pytest.approx([np.std(logs)])
    # bins are those of X
    drawn = np.random.default_rng(0).permutation(200).reshape(100, 2)
    x, y = (np.linalg.norm(Z[drawn[:, 0]] - Z[drawn[:, 1]], axis=1) for Z in (X, Y))
    short, far = np.split(np.argsort(x), [30])
    rho = [scipy.stats.spearmanr(x[rows], y[rows]).statistic for rows in (short, far)]
    got = vl.local_consistency(X, Y, drawn, (0, 0.3, 1))
    assert got.spearman.tolist() == pytest.approx(rho)
    assert same["bin"].tolist() == [(0, 0.02), (0.02, 0.5), (0.5, 1)]
    noise = vl.local_consistency(X, unit(200, 8, 3), 20_000)
    assert noise.spearman.abs().max() < 0.15
    named = vl.local_consistency(X, X, np.array([[0, 1], [2, 3], [4, 5], [6, 7]]), (0, 1))
    assert named.spearman.tolist() == [1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vl.kernel_encoders(0), "n must be"),
        (lambda: vl.kernel_encoders(9, ell=(2, 0)), "ell must be"),
        (lambda: vl.kernel_encoders(9, kernels=("gauss", "box")), "kernel must be"),
        (lambda: vl.kernel_encoders(9, warp=-1), "warp must be"),
        (lambda: vl.overlap_split(10, 8, 3), "N must be at least"),
        (lambda: vl.overlap_split(10, 4, 5), "overlap must be in"),
        (lambda: vl.make_problem(vl.kernel_encoders(30), n=10, overlap=5, n_seeds=6), "n_seeds"),
        (lambda: vl.encoder_net((2, 2), "tanh", 0), "activation must be"),
        (lambda: vl.contrastive_encoders(50, noise=0, steps=1), "noise must be"),
        (lambda: vl.local_consistency(unit(5, 2), unit(4, 2)), "same objects"),
        (lambda: vl.local_consistency(unit(5, 2), unit(5, 2), 9, (0.5, 0.2)), "quantiles must"),
        (lambda: vl.local_consistency(unit(5, 2), unit(5, 2), np.ones(3)), "pairs must be"),
        (lambda: vl.local_consistency(unit(5, 2), unit(5, 2), np.array([[0, 5]])), r"in 0\.\.4"),
        (lambda: vl.study_run(run="nothing/1"), "run must be one of RUNS"),
    ],
)
def test_bad_input_of_the_generators_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Baselines


def test_procrustes_with_enough_pairs_links_a_rotated_store():
    X = unit(80, 6)
    Q = np.linalg.qr(np.random.default_rng(1).normal(size=(9, 9)))[0][:6]
    order = np.random.default_rng(2).permutation(80)
    pairs = np.stack([order, np.arange(80)], axis=1)
    for links in (
        vl.procrustes_links(X, (X @ Q)[order], pairs[:12]),
        vl.iterative_procrustes(X, (X @ Q)[order], pairs[:12], n_rounds=2)[-1],
    ):
        assert vl.link_metrics(links, pairs, pairs[:12])[:2] == (1, 1)


def test_bootstrapped_procrustes_starts_from_the_seeds_alone_and_gains(problem, found):
    seeds = problem.seeds
    first = vl.procrustes_links(problem.X, problem.Y, seeds)
    known = np.isin(first[:, 0], seeds[:, 0]) | np.isin(first[:, 1], seeds[:, 1])
    assert np.array_equal(found.iterative[0], first[~known])
    binding = False
    for t in (1, 2, 3):
        before, room = found.iterative[t - 1], math.floor(20 * (1.7**t - 1))
        pairs = np.concatenate([seeds, before[:room]])
        again = vl.procrustes_links(problem.X, problem.Y, pairs)
        known = np.isin(again[:, 0], seeds[:, 0]) | np.isin(again[:, 1], seeds[:, 1])
        assert np.array_equal(found.iterative[t], again[~known])
        binding |= len(before) > room
    assert binding
    recall = [vl.score(links, problem).recall for links in found.iterative]
    assert recall[-1] > 3 * recall[0]


def test_one_shot_codes_link_a_rotated_and_scaled_store_from_few_seeds():
    X = unit(80, 6)
    order = np.random.default_rng(2).permutation(80)
    pairs = np.stack([order, np.arange(80)], axis=1)
    links = vl.one_shot_links(X, 3 * X[order], pairs[:12])
    assert vl.link_metrics(links, pairs, pairs[:12])[:2] == (1, 1)
    # z-scores undo what an encoder adds to all distances and multiplies them by
    Y = np.concatenate([X, np.ones((80, 1))], axis=1)[order]  # distances shrink by the root of 2
    links = vl.one_shot_links(X, Y, pairs[:12])
    assert vl.link_metrics(links, pairs, pairs[:12])[:2] == (1, 1)


def test_gromov_wasserstein_aligns_points_on_an_uneven_arc():
    pytest.importorskip("ot")
    angle = np.cumsum(np.linspace(0.02, 0.2, 14))
    X = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    order = np.random.default_rng(0).permutation(14)
    links = vl.gromov_wasserstein_links(X, X[order], 14)
    got = vl.link_metrics(links, np.stack([order, np.arange(14)], axis=1))
    assert got.recall > 0.5


def test_gromov_wasserstein_needs_a_start_that_holds_the_seeds():
    pytest.importorskip("ot")
    p = vl.make_problem(vl.kernel_encoders(seed=0), n=90, overlap=60, seed=0)
    blind, led = (
        vl.score(vl.gromov_wasserstein_links(p.X, p.Y, 60, seeds), p) for seeds in (None, p.seeds)
    )
    assert blind.f1 < 0.3 < 0.6 < led.f1
    fewer = p.seeds[p.seeds[:, 1] < 80]
    links = vl.gromov_wasserstein_links(p.X, p.Y[:80], 50, fewer)
    assert len(links) == 50
    everyone = vl.gromov_wasserstein_links(p.X, p.Y, 60, p.truth)
    assert vl.link_metrics(everyone, p.truth).f1 > 0.8
    with pytest.raises(ValueError, match=r"overlap must be in 20\.\.90: got 19"):
        vl.gromov_wasserstein_links(p.X, p.Y, 19, p.seeds)


# Shipped runs and files


def test_runs_are_named_once_and_a_row_is_its_study():
    assert len(set(vl.RUNS)) == len(vl.RUNS)
    assert vl.study_run(run="budget/5/100/0") == vl.budget_study(n_seeds=5, overlap=100, seed=0)


def test_calibration_counts_the_pairs_of_the_last_round(problem, found):
    table = vl.vote_calibration(found.linker, problem)
    chosen = found.linker.rounds_[-1].chosen
    assert table.index.tolist() == list(range(1, 17))
    assert table["pairs"].sum() == len(chosen.i)
    links = table.loc[14:]
    assert links["pairs"].sum() == len(found.linker.links_)
    precision = vl.score(found.linker.links_, problem).precision
    assert links["right"].sum() / links["pairs"].sum() == pytest.approx(precision)
    assert table.loc[:4, "right"].sum() / table.loc[:4, "pairs"].sum() < 0.6


def test_stores_are_read_from_files(tmp_path):
    for name, array in (("x", GOOD[0]), ("y", GOOD[1]), ("seeds", GOOD[2])):
        np.save(tmp_path / f"{name}.npy", array)
    stores = vl.load_stores(tmp_path)
    assert np.array_equal(stores.X, GOOD[0])
    assert np.array_equal(stores.seeds, GOOD[2])
    assert stores.truth is None
    np.save(tmp_path / "truth.npy", np.zeros((4, 3)))
    with pytest.raises(ValueError, match=r"truth.npy must be \(n, 2\)"):
        vl.load_stores(tmp_path)
    (tmp_path / "truth.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"plain \.npy array"):
        vl.load_stores(tmp_path)
    (tmp_path / "y.npy").unlink()
    with pytest.raises(ValueError, match=r"y\.npy is missing"):
        vl.load_stores(tmp_path)
