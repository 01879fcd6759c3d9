"""Selection, conditional independence and tasks; the specialist's block; baselines and checkers."""

import itertools
import math
import warnings

import networkx as nx
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression

from icmllab.representations import identifiability as ident


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# Level 1: the generator


def test_rows_are_those_whose_effects_fall_into_the_band():
    data = ident.make_selection_sequences(
        500, 5, [{0, 2}, {1, 3, 4}], steps=2, accept=0.5, generator=generator()
    )
    assert data.S.shape == (500, 10)
    assert data.outcomes.shape == (500, 2)
    assert data.n_proposed > 500
    limits = 0.5 * torch.tensor([2.0, 3.0], dtype=torch.float64).sqrt()
    assert bool((data.outcomes.abs() < limits).all())
    assert float((data.outcomes.abs().amax(dim=0) / limits).min()) > 0.95
    # the effect is ±tanh of every member step plus noise of deviation 0.2, and of nothing else
    fitted = LinearRegression().fit(torch.tanh(data.S), data.outcomes)
    signs = fitted.coef_.round(0)
    members = [[0, 1, 4, 5], [2, 3, 6, 7, 8, 9]]
    for row, steps in zip(signs, members, strict=True):
        assert {k for k in range(10) if row[k] != 0} == set(steps)
    residual = data.outcomes - torch.tanh(data.S) @ torch.from_numpy(signs).T
    assert float(residual.std()) == pytest.approx(0.2, abs=0.03)


def test_without_tasks_nothing_is_selected_and_the_chain_is_the_stated_one():
    data = ident.make_selection_sequences(
        20_000, 3, [], steps=2, rho=0.6, breaks=[3], generator=generator()
    )
    assert data.n_proposed == 20_000
    expected = np.eye(6)
    for block in (slice(0, 3), slice(3, 6)):
        lag = np.abs(np.subtract.outer(np.arange(3), np.arange(3)))
        expected[block, block] = 0.6**lag
    assert np.abs(np.cov(data.S.T) - expected).max() < 0.04


def test_proposals_bound_the_draw_and_few_rows_are_named():
    args = (60_000, 8, ident.EIGHT)
    data = ident.make_selection_sequences(*args, proposals=60_000, generator=generator())
    assert data.n_proposed == 60_000
    assert 3300 < len(data.S) < 4100  # 6 %
    with pytest.warns(UserWarning, match="fewer than 200"):
        few = ident.make_selection_sequences(*args, proposals=1000, generator=generator())
    assert len(few.S) < 200
    same = ident.make_selection_sequences(*args, proposals=60_000, generator=generator())
    assert torch.equal(same.S, data.S)


def test_a_band_that_nothing_meets_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(ident, "MAX_PROPOSALS", 30_000)
    with pytest.raises(RuntimeError, match="30000 proposals gave only"):
        ident.make_selection_sequences(1000, 8, ident.EIGHT, accept=0.001)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be"),
        ({"K": 1, "tasks": []}, "K must be"),
        ({"tasks": [{0}]}, "at least 2 members"),
        ({"tasks": [{0, 4}]}, r"segments 0..3: got \[0, 4\]"),
        ({"tasks": [{-1, 2}]}, "segments 0..3"),
        ({"rho": 1.0}, "rho must be"),
        ({"steps": 0}, "steps must be"),
        ({"noise": -0.1}, "noise must be"),
        ({"accept": 0.0}, "accept must be"),
        ({"breaks": [0]}, "breaks must be steps 1..3"),
        ({"breaks": [4]}, "breaks must be steps 1..3"),
        ({"proposals": 0}, "proposals must be"),
    ],
)
def test_bad_sequences_are_named(options, message):
    given_options = {"n": 10, "K": 4, "tasks": [{0, 1}]} | options
    positional = [given_options.pop(name) for name in ("n", "K", "tasks")]
    with pytest.raises(ValueError, match=message):
        ident.make_selection_sequences(*positional, **given_options)


# Level 1: the theorem, exactly


families = st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=4), min_size=0, max_size=4).map(
    lambda family: [frozenset(t) for t in family]
)


@settings(max_examples=40, deadline=None)
@given(families, st.sets(st.integers(1, 5)), st.sampled_from([0.0, 0.7]), st.integers(0, 10**6))
def test_selected_law_has_exactly_the_edges_of_shared_tasks_and_unbroken_links(
    family, breaks, link, seed
):
    strength = ident.exact_interactions(
        6, family, link=link, breaks=breaks, generator=generator(seed)
    )
    expected = ident.moral_graph(family, 6)
    if link:
        expected.add_edges_from((t - 1, t) for t in range(1, 6) if t not in breaks)
    for a, b in itertools.combinations(range(6), 2):
        if expected.has_edge(a, b):
            assert strength[a, b] > 1e-4  # faithful: random tables do not cancel
        else:
            assert strength[a, b] < 1e-12
    assert torch.equal(strength, strength.T)


def test_exact_interactions_of_two_coins_by_hand():
    # log p = ±0.7 on equal and unequal spins: the log odds ratio is 4 * 0.7
    strength = ident.exact_interactions(2, [], link=0.7)
    assert float(strength[0, 1]) == pytest.approx(2.8, abs=1e-12)
    with pytest.raises(ValueError, match="at most 12"):
        ident.exact_interactions(13, [])


# Level 1: the test


def features_by_hand(Z):
    Z = (Z - Z.mean(0)) / Z.std(0)
    columns = [torch.ones(len(Z), dtype=Z.dtype)]
    for k in range(Z.shape[1]):
        z = Z[:, k]
        columns += [z, z**2, z**3, z.abs()]
    for i, j in itertools.combinations(range(Z.shape[1]), 2):
        columns += [Z[:, i] * Z[:, j], (Z[:, i] * Z[:, j]) ** 2]
    return torch.stack(columns, dim=1).numpy()


def test_statistic_is_the_largest_fisher_z_of_independent_regressions():
    X = normal(200, 4)
    X[:, 1] += 0.3 * X[:, 0] ** 2
    F = features_by_hand(X[:, 2:])
    assert F.shape[1] == 11
    fit = LinearRegression(fit_intercept=False).fit(F, X[:, :2])
    u, v = (X[:, :2] - torch.from_numpy(fit.predict(F))).T
    found = ident.ci_test(X, 0, 1, [2, 3])
    z = [
        math.sqrt(200 - 11 - 3) * math.atanh(scipy.stats.pearsonr(p, q).statistic)
        for p, q in itertools.product((u, u**2), (v, v**2))
    ]
    best = max(map(abs, z))
    assert found.stat == pytest.approx(best, rel=1e-9)
    assert found.p == pytest.approx(min(1, 4 * 2 * scipy.stats.norm.sf(best)), rel=1e-9)


def test_neither_shift_nor_scale_nor_order_of_conditions_matters():
    X = normal(300, 5)
    X[:, 0] += X[:, 2] ** 2
    first = ident.ci_test(X, 0, 1, [2, 3, 4])
    moved = X * torch.tensor([1.0, -3, 100, 0.01, 7]) + torch.tensor([5.0, 0, -40, 1, 2])
    again = ident.ci_test(moved.numpy(), 0, 1, [4, 2, 3])
    assert again.stat == pytest.approx(first.stat, rel=1e-7)
    swapped = ident.ci_test(X, 1, 0, [2, 3, 4])
    assert swapped.stat == pytest.approx(first.stat, rel=1e-9)


@pytest.mark.parametrize("method", ["poly", "kernel"])
def test_null_p_values_are_small_no_more_often_than_they_should_be(method):
    n_trials = 200 if method == "poly" else 60
    p = []
    for trial in range(n_trials):
        Z = normal(150, 2, seed=trial)
        noise = normal(150, 2, seed=10_000 + trial)
        common = Z[:, :1] ** 2 + Z[:, 1:] + Z[:, :1] * Z[:, 1:]
        X = torch.cat([common + noise, Z], dim=1)
        p.append(ident.ci_test(X, 0, 1, [2, 3], method).p)
    rejected = sum(q <= 0.05 for q in p)
    # P(more than this many at 5 %) is below 1e-3
    assert rejected <= scipy.stats.binom.isf(1e-3, n_trials, 0.05)
    assert min(p) < 0.3


@pytest.mark.parametrize("method", ["poly", "kernel"])
@pytest.mark.parametrize(
    "effect", [lambda u: 0.6 * u, lambda u: u**2, lambda u: torch.sign(u) * u**2]
)
def test_dependence_given_the_rest_is_found(method, effect):
    Z, noise = normal(300, 2), normal(300, 2, seed=1)
    a = Z[:, 0] + noise[:, 0]
    b = Z[:, 0] * Z[:, 1] + effect(noise[:, 0]) + 0.5 * noise[:, 1]
    X = torch.stack([a, b, Z[:, 0], Z[:, 1]], dim=1)
    assert ident.ci_test(X, 0, 1, [2, 3], method).p < 1e-6


def test_dependence_of_spreads_alone_is_found():
    noise = normal(400, 2)
    X = torch.stack([noise[:, 0], noise[:, 1] * noise[:, 0].abs()], dim=1)
    assert abs(scipy.stats.pearsonr(*X.T).statistic) < 0.1
    assert ident.ci_test(X, 0, 1, []).p < 1e-6


def test_hsic_gamma_is_that_of_its_defining_sums():
    u, v = normal(40, 2).T
    v = v + u**2
    K, L = (
        torch.exp(-D / D[~torch.eye(40, dtype=torch.bool)].median())
        for D in ((t[:, None] - t[None]).square() for t in (u, v))
    )
    H = torch.eye(40, dtype=torch.float64) - 1 / 40
    found = ident._hsic_gamma(u, v)
    assert found.stat == pytest.approx(float((K @ H @ L @ H).trace()) / 40, rel=1e-9)
    # the gamma law has the mean of HSIC under random pairings
    null = [
        float((K @ H @ L[p][:, p] @ H).trace()) / 40
        for p in (torch.randperm(40, generator=generator(s)) for s in range(400))
    ]
    p = float(np.mean(np.array(null) >= found.stat))
    assert abs(found.p - p) < 0.03


def test_column_that_the_condition_fixes_is_independent():
    Z = normal(100, 1)
    X = torch.cat([Z**2, normal(100, 1, seed=1), Z], dim=1)
    assert ident.ci_test(X, 0, 1, [2]) == (0.0, 1.0)


def test_two_valued_columns_are_tested_by_their_values():
    s = torch.where(normal(400, 3) > 0, 1.0, -1.0).double()
    X = torch.stack([s[:, 0], s[:, 1]], dim=1)
    assert ident.ci_test(X, 0, 1, []).p > 0.01
    kept = X[(X[:, 0] + X[:, 1]).abs() > 0]
    X = torch.cat([kept, X])
    assert ident.ci_test(X, 0, 1, []).p < 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda X: ident.ci_test(X, 0, 0, []), "different columns"),
        (lambda X: ident.ci_test(X, 0, 1, [1]), "different columns"),
        (lambda X: ident.ci_test(X, 0, 4, []), "different columns"),
        (lambda X: ident.ci_test(X, -1, 1, []), "different columns"),
        (lambda X: ident.ci_test(X, 0, 1, [], "rank"), "method must be"),
        (lambda X: ident.ci_test(X, 0, 1, [], features="cubes"), "features must be"),
        (lambda X: ident.ci_test(X[:21], 0, 1, [2, 3]), "more than 21 rows for 11"),
        (lambda X: ident.ci_test(X * math.nan, 0, 1, []), "finite"),
        (lambda X: ident.ci_test(X[:, 0], 0, 1, []), "shape"),
        (lambda X: ident.ci_test(X * 1j, 0, 1, []), "real"),
        (
            lambda X: ident.ci_test(torch.cat([X, torch.ones(60, 1)], 1), 0, 1, [4]),
            "column 4 does not",
        ),
        (lambda X: ident.task_graph(torch.cat([X, torch.ones(60, 1)], 1)), "column 4 does not"),
        (lambda X: ident.task_graph(X, alpha=0.0), "alpha must be"),
        (lambda X: ident.task_graph(X, alpha=1.0), "alpha must be"),
        (lambda X: ident.task_graph(X, steps=3), "K\\*steps columns"),
        (lambda X: ident.task_graph(X, steps=4), "K\\*steps columns"),
        (lambda X: ident.task_graph(X, correction="holm"), "correction must be"),
        (lambda X: ident.task_graph(X, reference=X), "reference must be None"),
        (lambda X: ident.task_graph(X, linked=True, reference=X[:, :3]), "4 columns"),
        (lambda X: ident.task_graph(X, linked=True, reference=X[:30]), "more than 39 rows"),
        (lambda X: ident.change_point_sets(X, 5), "n_tasks must be"),
        (lambda X: ident.moral_graph([{0, 1}], 1), "K must be"),
    ],
)
def test_bad_tests_and_graphs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(normal(60, 4))


# Level 1: graphs


def test_graph_tests_the_first_step_of_a_against_the_last_of_b_given_all_others():
    X = normal(300, 6)
    G = ident.task_graph(X, steps=2, alpha=0.9, correction=None)
    p = G.graph["p_values"]
    assert p.shape == (3, 3)
    assert np.isnan(np.diag(p)).all()
    for a, b in itertools.combinations(range(3), 2):
        rest = [t for t in range(6) if t not in (2 * a, 2 * b + 1)]
        expected = ident.ci_test(X, 2 * a, 2 * b + 1, rest).p
        assert p[a, b] == p[b, a] == pytest.approx(expected, rel=1e-9)
        assert G.has_edge(a, b) == (expected <= 0.9)
        if G.has_edge(a, b):
            assert G.edges[a, b]["p"] == p[a, b]
    assert G.graph["undetermined"] == []


def test_bonferroni_divides_the_level_by_the_tested_pairs():
    X = normal(300, 4)
    assert ident.task_graph(X, alpha=0.06).graph["level"] == pytest.approx(0.01)
    assert ident.task_graph(X, alpha=0.06, linked=True).graph["level"] == pytest.approx(0.02)
    assert ident.task_graph(X, alpha=0.06, correction=None).graph["level"] == 0.06


@pytest.mark.parametrize("seed", range(3))
def test_tasks_of_eight_segments_are_found_and_marginal_tests_add_false_edges(seed):
    data = ident.eight_segments(seed)
    found = ident.task_sets(ident.task_graph(data.S))
    assert found == sorted(data.tasks, key=sorted)
    few = ident.task_sets(ident.task_graph(data.S[:300]))
    assert few == found
    marginal = ident.graph_scores(ident.marginal_graph(data.S), ident.EIGHT)
    assert marginal["false"] >= 3
    assert marginal["missed"] == 0


@pytest.mark.parametrize("seed", range(2))
def test_right_pair_of_steps_survives_the_chain_and_the_wrong_one_finds_links(seed):
    out = ident.chain_run(seed)
    assert out["right_exact"] == 1
    assert out["wrong_12"] == out["wrong_34"] == 1
    assert out["undetermined"] == 4
    assert out["blind_false"] == 0
    assert out["naive_false"] >= 2
    assert out["reference_exact"] == 1


def test_undetermined_pairs_are_the_lag_one_pairs_and_have_no_p_value():
    data = ident.make_selection_sequences(400, 4, [{0, 2}], rho=0.5, generator=generator())
    G = ident.task_graph(data.S, linked=True)
    assert G.graph["undetermined"] == [(0, 1), (1, 2), (2, 3)]
    assert all(np.isnan(G.graph["p_values"][a, b]) for a, b in G.graph["undetermined"])
    assert set(G.edges) == {(0, 2)}
    assert ident.task_graph(data.S, steps=2, linked=True).graph["undetermined"] == []
    two = ident.task_graph(data.S[:, :2], linked=True)
    assert two.number_of_edges() == 0


def test_density_ratio_finds_tasks_and_ignores_links():
    p = {"link": [], "task": []}
    for seed in range(4):
        draw = {"rho": 0.6, "generator": generator(seed)}
        data = ident.make_selection_sequences(1500, 4, [{0, 1}, {1, 3}], **draw)
        free = ident.make_selection_sequences(1500, 4, [], **draw)
        p["task"].append(ident._ratio_test(data.S, free.S, 0, 1))
        p["link"].append(ident._ratio_test(data.S, free.S, 2, 3))
    assert max(p["task"]) < 1e-6
    assert min(p["link"]) > 1e-3


def test_outcomes_open_chains_of_colliders():
    data = ident.make_selection_sequences(
        5000, 6, [{0, 2, 4}, {1, 3}, {2, 5}], generator=generator()
    )
    false = set(ident.outcome_graph(data).edges) - set(ident.task_graph(data.S).edges)
    assert false == {(0, 5), (4, 5)}
    assert ident.task_sets(ident.task_graph(data.S)) == [{0, 2, 4}, {1, 3}, {2, 5}]


def test_kernel_method_finds_a_task_too():
    data = ident.make_selection_sequences(400, 3, [{0, 2}], generator=generator())
    assert set(ident.task_graph(data.S, method="kernel").edges) == {(0, 2)}


def test_independent_segments_give_an_empty_graph():
    rejected, edges = [], 0
    for seed in range(5):
        free = ident.make_selection_sequences(1500, 6, [], generator=generator(seed))
        G = ident.task_graph(free.S)
        rejected.append((G.graph["p_values"][np.triu_indices(6, 1)] <= 0.05).mean())
        edges += G.number_of_edges()
    assert np.mean(rejected) <= 0.10
    assert edges <= 1  # P(more) is about 1e-3


def test_graphical_lasso_is_dense_here_and_joins_what_is_joined():
    data = ident.eight_segments(0)
    out = ident.graph_scores(ident.glasso_graph(data.S[:1500]), ident.EIGHT)
    assert out["missed"] == 0
    assert out["false"] > 4


def test_change_points_find_contiguous_blocks_and_only_those():
    blocks = [{0, 1, 2}, {3, 4}, {5, 6, 7}]
    data = ident.make_selection_sequences(3000, 8, blocks, generator=generator())
    assert ident.change_point_sets(data.S, 3) == [set(b) for b in blocks]
    runs = ident.change_point_sets(ident.eight_segments(0).S, 4)
    assert all(max(r) - min(r) == len(r) - 1 for r in runs)
    assert ident.change_point_sets(data.S, 8) == []


# Level 1: cliques and scores


def test_graph_without_edges_has_no_task():
    G = nx.empty_graph(4)
    assert ident.task_sets(G) == []
    assert ident.assignment_matrix([], 4).shape == (4, 0)
    out = ident.score_tasks([], [{0, 1}], K=4)
    assert out["precision"] == 1
    assert out["recall"] == 0
    assert out["missed"] == 1


@settings(max_examples=200, deadline=None)
@given(families)
def test_clique_property_says_whether_the_graph_gives_the_family_back(family):
    expected = sorted(family, key=sorted) == ident.task_sets(ident.moral_graph(family, 6))
    assert ident.has_clique_property(family) == expected


def test_known_families():
    assert ident.has_clique_property(ident.EIGHT)
    assert ident.has_clique_property(ident.CHAIN)
    assert not ident.has_clique_property(ident.TRIANGLE)
    assert not ident.has_clique_property([{0, 1, 2}, {1, 2}])
    assert not ident.has_clique_property([{0, 1}, {0, 1}])
    assert ident.has_clique_property([])
    with pytest.raises(ValueError, match="at least 2 members"):
        ident.has_clique_property([{0}])


def test_contained_task_cannot_be_seen():
    G = ident.moral_graph([{0, 1, 2}, {1, 2}], 4)
    assert ident.task_sets(G) == [{0, 1, 2}]
    A = ident.assignment_matrix(ident.task_sets(G), 4)
    assert A.tolist() == [[1], [1], [1], [0]]


def test_scores_by_hand():
    # true pairs 01 12 02 34; estimated 01 34 45: two hits of three, two of four
    out = ident.score_tasks([{0, 1}, {3, 4}, {4, 5}], [{0, 1, 2}, {3, 4}], K=6)
    assert out["precision"] == pytest.approx(2 / 3)
    assert out["recall"] == pytest.approx(1 / 2)
    assert (out["false"], out["missed"], out["exact"]) == (1, 2, 0)
    # of 15 pairs 12 agree in their number of shared sets; by chance 12/15·11/15 + 3/15·4/15
    chance = (12 * 11 + 3 * 4) / 225
    assert out["omega"] == pytest.approx((12 / 15 - chance) / (1 - chance))


def test_omega_index_is_the_adjusted_rand_index_of_partitions():
    from sklearn.metrics import adjusted_rand_score

    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 3, size=(2, 9))
        sets = [[set(np.nonzero(y == c)[0]) for c in range(3)] for y in (a, b)]
        sets = [[t for t in family if len(t) > 1] for family in sets]
        out = ident.score_tasks(*sets, K=9)
        assert out["omega"] == pytest.approx(adjusted_rand_score(a, b), abs=1e-12)


def test_equal_families_score_one_and_the_number_of_segments_is_read_off():
    out = ident.score_tasks([{4, 1}, {0, 2}], [{0, 2}, {1, 4}])
    assert out["exact"] == out["omega"] == out["precision"] == out["recall"] == 1
    doubled = ident.score_tasks([{0, 1}, {0, 1, 2}], [{0, 1, 2}], K=4)
    assert doubled["precision"] == doubled["recall"] == 1
    assert doubled["omega"] < 1  # the pair 01 lies in two sets instead of one


# Level 2: data


def test_mixing_is_inverted_exactly_and_standardised():
    data = ident.make_mixed_latents(500, generator=generator())
    assert data.s.shape == data.x.shape == (500, 6)
    assert data.g.shape == (500, 5)
    assert float((data.mix.inverse(data.x) - data.s).abs().max()) < 1e-12
    for t in (data.x, data.g):
        assert float(t.mean(dim=0).abs().max()) < 1e-12
        assert float((t.std(dim=0) - 1).abs().max()) < 1e-12
    far = 50 * data.s  # beyond the range of the data too
    assert float((data.mix.inverse(data.mix(far)) - far).abs().max()) < 1e-10
    linear = LinearRegression().fit(data.s, data.x)
    assert linear.score(data.s, data.x) < 0.97  # the mixing bends


def test_task_outputs_are_the_stated_function_of_the_relevant_latents():
    data = ident.make_mixed_latents(300, dim=4, relevant=2, n_tasks=3, generator=generator(5))
    draw = generator(5)
    ident.LeakyMixing(4, layers=3, generator=draw)
    W, V, U = (torch.randn(2, 3, generator=draw, dtype=torch.float64) for _ in range(3))
    s = torch.randn(300, 4, generator=draw, dtype=torch.float64)
    assert torch.equal(s, data.s)
    g = (s[:, :2] @ W).tanh() + (1.5 * s[:, :2] @ V).sin() / 2 + 0.3 * (s[:, :2] @ U)
    torch.testing.assert_close(data.g, (g - g.mean(0)) / g.std(0))


def test_tasks_see_the_relevant_latents_only_and_all_of_them():
    data = ident.make_mixed_latents(2000, dim=5, relevant=2, n_tasks=4, generator=generator())
    assert ident.block_r2(data.s[:, :2], data.g) > 0.9
    assert ident.block_r2(data.s[:, 2:], data.g) < 0.05
    for alone in (0, 1):
        assert ident.block_r2(data.s[:, [alone]], data.g) < 0.9


def test_wine_tasks_are_linear_in_three_features():
    data = ident.load_wine_task()
    assert data.s.shape == data.x.shape == (178, 13)
    assert float((data.mix.inverse(data.x) - data.s).abs().max()) < 1e-12
    singular = torch.linalg.svdvals(ident.linear_coefficients(data.s, data.g))
    assert float(singular[2]) > 0.05
    C = ident.linear_coefficients(data.s, data.g)
    assert float(C[:, 3:].abs().max()) < 1e-10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ident.make_mixed_latents(1), "n must be"),
        (lambda: ident.make_mixed_latents(9, relevant=7), "relevant must be"),
        (lambda: ident.make_mixed_latents(9, n_tasks=0), "n_tasks must be"),
        (lambda: ident.make_mixed_latents(9, layers=0), "layers must be"),
        (lambda: ident.LeakyMixing(3, slope=0.0, generator=generator()), "slope must be"),
    ],
)
def test_bad_latents_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Level 2: the linear case


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2))
def test_linear_block_is_exact(seed, rank, irrelevant, more_tasks):
    dim = rank + irrelevant
    g = generator(seed)
    A, B, s = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((dim, dim), (rank + more_tasks, rank), (200, dim))
    )
    if float(torch.linalg.cond(A)) > 1e4 or float(torch.linalg.cond(B)) > 1e4:
        return
    x, out = s @ A.T + 3.0, s[:, :rank] @ B.T - 1.0  # means do not matter
    V = ident.linear_specialist(x, out, rank)
    assert torch.allclose(V @ V.T, torch.eye(rank, dtype=torch.float64), atol=1e-12)
    J = V @ A
    assert float(J[:, rank:].norm()) < 1e-8 * float(J.norm())
    assert float(torch.linalg.svdvals(J[:, :rank])[-1]) > 0
    singular = torch.linalg.svdvals(ident.linear_coefficients(x, out))
    assert bool((singular[rank:] < 1e-9 * singular[0]).all())


def test_rank_deficient_tasks_name_a_smaller_block():
    s, A = normal(200, 5), normal(5, 5, seed=1)
    g = s[:, :2] @ normal(2, 4, seed=2)  # of s_R = (s0, s1, s2) they use two
    singular = torch.linalg.svdvals(ident.linear_coefficients(s @ A.T, g))
    assert float(singular[2]) < 1e-10 < 1e-2 < float(singular[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, g: ident.linear_specialist(x, g, 4), "rank must be"),
        (lambda x, g: ident.linear_specialist(x, g, 0), "rank must be"),
        (lambda x, g: ident.linear_specialist(x[:9], g, 1), "as many rows"),
        (lambda x, g: ident.linear_specialist(x[:5], g[:5], 1), "more rows than"),
        (lambda x, g: ident.fit_specialist(x, g, lam=-1.0), "lam must be"),
        (lambda x, g: ident.fit_specialist(x, g, lam=math.inf), "lam must be"),
        (lambda x, g: ident.fit_specialist(x, g, prune_to=0), "prune_to must be"),
        (lambda x, g: ident.fit_specialist(x, g, prune_to=6), "prune_to must be"),
        (lambda x, g: ident.fit_specialist(x, g, prune_to="best"), "prune_to must be"),
        (lambda x, g: ident.fit_specialist(x, g, units=0), "units must be"),
        (lambda x, g: ident.fit_specialist(x, g, steps=0), "steps must be"),
        (lambda x, g: ident.fit_specialist(x[:9], g), "as many rows"),
        (lambda x, g: ident.fit_specialist(x * math.inf, g), "x must be finite"),
        (lambda x, g: ident.fit_specialist(x, g[:, 0]), "g must have shape"),
        (lambda x, g: ident.fit_specialist(x.long(), g), "x must be float"),
        (lambda x, g: ident.block_r2(x, g, n_fit=15, n_test=10), "at least n_fit"),
        (lambda x, g: ident.block_r2(x[:, :0], g, n_fit=9, n_test=9), "at least one unit"),
        (lambda x, g: ident.block_r2(x, 0 * g, n_fit=9, n_test=9), "column 0 does not"),
        (lambda x, g: ident.fastica_code(x, g, x, width=6), "width must be"),
        (lambda x, g: ident.bottleneck_code(x, g, x, width=0), "width must be"),
        (lambda x, g: ident.SpecialistRepresentation(0, 3), "dim must be"),
    ],
)
def test_bad_fits_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(normal(20, 5), normal(20, 3, seed=1))


# Level 2: the specialist


def small_model(dim=4, dtype=torch.float64):
    model = ident.SpecialistRepresentation(dim, 3, 8, dtype=dtype, generator=generator())
    x = normal(50, dim).to(dtype)
    model.freeze(x)
    return model.eval(), x


def test_relevance_counts_gate_and_weight_and_survives_pruning():
    model, x = small_model()
    with torch.no_grad():
        model.gamma.copy_(torch.tensor([0.1, -2.0, 0.0, 1.0]))
        model.head[0].weight[:, 0] *= 100
    e = model.relevance()
    expected = model.gamma.abs() * model.head[0].weight.norm(dim=0)
    assert torch.allclose(e, expected.detach())
    assert int(e.argmax()) == 0  # by |γ| alone it would be unit 1
    u = model.encode(x).detach()
    order = model.active(4).tolist()
    kept = order[:2]
    with torch.no_grad():
        masked = u.clone()
        masked[:, order[2:]] = 0
        before = model.predict(masked)
        model.prune(2)
        assert torch.allclose(model.predict(u), before, atol=1e-12)
    assert torch.allclose(model.relevance()[kept], e[kept])
    assert model.gamma[kept].tolist() == [1, 1]
    assert sorted(model.active().tolist()) == sorted(kept)
    assert float(model.relevance()[order[2:]].abs().max()) == 0


def test_active_units_are_those_above_a_share_of_the_largest():
    model, _ = small_model()
    with torch.no_grad():
        scale = model.head[0].weight.norm(dim=0)
        model.gamma.copy_(torch.tensor([1.0, 0.04, 0.06, 0.0]) / scale)
    assert model.active().tolist() == [0, 2]
    assert model.active(3).tolist() == [0, 2, 1]
    for m in (0, 5, 1.5, True):
        with pytest.raises(ValueError, match="m must be a whole number"):
            model.active(m)


def test_closed_gates_give_an_empty_block_with_a_warning_and_no_pruning():
    data = ident.make_mixed_latents(300, generator=generator())
    fit = ident.fit_specialist(data.x, data.g, lam=100.0, steps=700, hidden=8, batch_size=32)
    assert fit.model.relevance().tolist() == [0.0] * 6
    with pytest.warns(UserWarning, match="R̂ is empty"):
        assert len(fit.model.active()) == 0
    with pytest.raises(ValueError, match="0 have a relevance above 0"):
        fit.model.prune(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="active unit"):
            ident.jacobian_leakage(fit.model, data.mix, data.s)


def test_code_is_standardised_by_batch_in_training_and_by_stored_moments_after():
    model, x = small_model()
    u = model.encode(x)
    assert float(u.detach().mean(dim=0).abs().max()) < 1e-9
    assert torch.allclose(model.encode(x[:5]), u[:5])
    model.train()
    part = model.encode(x[:5])
    assert float(part.detach().mean(dim=0).abs().max()) < 1e-9
    assert not torch.allclose(part, u[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fit_repeats_with_its_generator_and_leaves_the_global_one_alone(dtype):
    data = ident.make_mixed_latents(200, generator=generator())
    x, g = data.x.to(dtype), data.g.to(dtype)
    state = torch.get_rng_state()
    runs = [
        ident.fit_specialist(
            x, g, steps=20, prune_to=2, prune_steps=10, hidden=8, generator=generator(s)
        )
        for s in (0, 0, 1)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    codes = [run.model.encode(x).detach() for run in runs]
    assert codes[0].dtype == dtype
    assert torch.equal(codes[0], codes[1])
    assert not torch.allclose(codes[0], codes[2])
    history = runs[0].history
    assert len(history.task) == len(history.reconstruction) == len(history.gates) == 30
    assert history.task[0] > 0
    assert set(history.pruned_losses) == {2}
    assert not runs[0].model.training


def objective_by_hand(model, x, g, *, t, lam, penalised):
    """5·rec + task + .05‖Cov − I‖² and, in stage 1, λ·min(1, t/500)‖γ‖₁ + 1e-3‖W_H1‖²."""
    raw = model.encoder(x)
    u = (raw - raw.mean(0)) / (raw.std(0) + 1e-6)
    loss = 5 * ((model.decoder(u) - x) ** 2).sum() / x.numel()
    loss = loss + ((model.head(u * model.gamma * model.kept) - g) ** 2).sum() / g.numel()
    loss = loss + 0.05 * ((torch.cov(u.T) - torch.eye(x.shape[1])) ** 2).sum()
    if penalised:
        loss = loss + lam * min(1, t / 500) * model.gamma.abs().sum()
        loss = loss + 1e-3 * (model.head[0].weight ** 2).sum()
    return loss


def test_both_stages_take_the_steps_of_the_stated_objective():
    data = ident.make_mixed_latents(200, dim=4, relevant=2, n_tasks=3, generator=generator())
    options = {"lam": 30.0, "steps": 12, "prune_to": 2, "prune_steps": 8, "hidden": 8}
    found = ident.fit_specialist(
        data.x, data.g, **options, batch_size=32, generator=(used := generator(3))
    ).model
    draw = generator(3)
    model = ident.SpecialistRepresentation(4, 3, 8, dtype=torch.float64, generator=draw)
    model.train()
    for stage, steps in ((1, 12), (2, 8)):
        if stage == 2:
            model.prune(2)
        trained = [p for n, p in model.named_parameters() if stage == 1 or n != "gamma"]
        optimizer = torch.optim.Adam(trained, lr=3e-3)
        rows = torch.randint(200, (steps, 32), generator=draw)
        for t in range(steps):
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 + math.cos(math.pi * t / steps)) / 2
            optimizer.zero_grad()
            x, g = data.x[rows[t]], data.g[rows[t]]
            objective_by_hand(model, x, g, t=t, lam=30.0, penalised=stage == 1).backward()
            optimizer.step()
    assert torch.equal(draw.get_state(), used.get_state())
    for name, value in model.named_parameters():
        torch.testing.assert_close(dict(found.named_parameters())[name], value, atol=1e-9, rtol=0)
    assert torch.equal(found.kept, model.kept)


def test_auto_keeps_the_smallest_sufficient_number_of_units():
    data = ident.make_mixed_latents(
        1000, dim=4, relevant=2, n_tasks=4, layers=1, generator=generator()
    )
    fit = ident.fit_specialist(
        data.x,
        data.g,
        steps=500,
        prune_to="auto",
        prune_steps=300,
        hidden=32,
        generator=generator(),
    )
    losses = fit.history.pruned_losses
    m = int(fit.model.kept.sum())
    assert m == 2
    assert losses[2] <= 1.6 * losses[3]
    assert losses[1] > 1.6 * losses[2]


def test_units_limits_the_head_from_the_start():
    data = ident.make_mixed_latents(200, generator=generator())
    fit = ident.fit_specialist(data.x, data.g, units=2, steps=5, hidden=8)
    assert fit.model.relevance()[2:].tolist() == [0] * 4
    assert sorted(fit.model.active(2).tolist()) == [0, 1]


def test_pruned_specialist_finds_the_block_and_a_free_one_mixes():
    # a quarter of the book's steps
    data = ident.latent_data(0)
    x, g = data.x[: ident.TRAIN], data.g[: ident.TRAIN]
    free = ident.fit_specialist(x, g, lam=0.0, steps=400, generator=generator())
    first = ident.fit_specialist(x, g, steps=400, generator=generator())
    before = first.model.encode(x[:5]).detach()
    block = ident.prune_specialist(first, x, g, 3, steps=300, generator=generator())
    assert torch.equal(first.model.encode(x[:5]), before)  # stage 2 works on a copy
    mixed, clean = (ident.specialist_scores(f, data) for f in (free, block))
    assert clean["r2_relevant"] > 0.93
    assert clean["r2_irrelevant"] < 0.05
    assert clean["r2_relevant"] > mixed["r2_relevant"] + 0.1
    assert clean["leak"] < mixed["leak"]
    assert clean["active"] == 3
    u = block.model.encode(x).detach()
    assert (
        float((block.model.decode(u) - x).detach().square().mean()) < 0.05
    )  # the code stays invertible


# Level 2: evaluation


def test_block_r2_is_one_for_an_invertible_function_and_nothing_for_another_block():
    s = normal(1000, 4)
    u = torch.stack([s[:, 0] + s[:, 1] ** 3 / 8, s[:, 1]], dim=1)
    assert ident.block_r2(u, s[:, :2]) > 0.97
    assert ident.block_r2(u, s[:, 2:]) < 0.02
    assert ident.block_r2(100 * u + 7, s[:, :2]) == pytest.approx(ident.block_r2(u, s[:, :2]))


def test_block_r2_is_a_kernel_ridge_on_rows_it_was_not_fitted_to():
    u, s = normal(70, 2), normal(70, 3, seed=1)
    s[:, 0] += u[:, 0] ** 2
    found = ident.predict_block(u, s + 2.0, n_fit=40, n_test=20)
    u, s = ((t - t[:40].mean(0)) / t[:40].std(0, correction=0) for t in (u, s))
    K = torch.exp(-0.15 * torch.cdist(u, u).square())
    alpha = torch.linalg.solve(K[:40, :40] + 0.05 * torch.eye(40), s[:40])
    predicted, target = K[40:60, :40] @ alpha, s[40:60]
    np.testing.assert_allclose(found.predicted, predicted, atol=1e-9)
    share = (predicted - target).square().sum(0) / (target - target.mean(0)).square().sum(0)
    assert found.r2 == pytest.approx(float((1 - share).mean()), abs=1e-9)


def test_jacobian_is_that_of_finite_differences():
    data = ident.make_mixed_latents(50, dim=4, relevant=2, n_tasks=3, generator=generator())
    model, _ = small_model()
    J = ident._jacobians(model, data.mix, data.s)
    h = 1e-6
    for j in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[j] = h
        with torch.no_grad():
            up, down = (model.encode(data.mix(data.s + e)) for e in (step, -step))
        close = (J[:, :, j] - (up - down) / (2 * h)).abs().amax(dim=1) < 1e-6
        assert float(close.double().mean()) > 0.95  # a kink may lie between the two points
    assert torch.allclose(ident.jacobian_magnitudes(model, data.mix, data.s), J.abs().mean(dim=0))
    ratio = J[:, [1], 2:].norm() / J[:, [1], :2].norm()
    with torch.no_grad():
        model.gamma.copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))
    found = ident.jacobian_leakage(model, data.mix, data.s, relevant=2)
    assert found == pytest.approx(float(ratio))


def test_jacobian_needs_evaluation_mode_and_a_proper_block():
    data = ident.make_mixed_latents(20, dim=4, relevant=2, n_tasks=3, generator=generator())
    model, _ = small_model()
    with pytest.raises(ValueError, match="relevant must be"):
        ident.jacobian_leakage(model, data.mix, data.s, relevant=4)
    with pytest.raises(ValueError, match="evaluation mode"):
        ident.jacobian_magnitudes(model.train(), data.mix, data.s)


# Level 2: baselines


def test_bottleneck_learns_its_tasks_and_ica_separates_a_linear_mixture():
    s = torch.rand(800, 4, generator=generator(), dtype=torch.float64) * math.sqrt(12)
    s = s - s.mean(dim=0)
    x = s @ normal(4, 4, seed=1)
    g = s[:, :2] @ normal(2, 3, seed=2)
    g = g / g.std(dim=0)
    u = ident.fastica_code(x, g, x, width=2)
    R = np.abs(np.corrcoef(u.T, s.T)[:2, 2:])
    assert R[:, :2].max(axis=0).min() > 0.98
    assert R[:, 2:].max() < 0.1
    narrow = ident.bottleneck_code(
        x / x.std(dim=0), g, x / x.std(dim=0), width=2, steps=300, hidden=16, generator=generator()
    )
    assert narrow.u.shape == (800, 2)
    assert narrow.task < 0.1


# Experiments


def test_runs_are_named_by_study_and_seed():
    assert len(set(ident.RUNS)) == len(ident.RUNS)
    assert {run.partition("/")[0] for run in ident.RUNS} == set(ident.STUDIES)
    for bad in ("graph", "graph/x", "other/0", "graph/-1"):
        with pytest.raises(ValueError, match="run must be"):
            ident.study_run(bad)


def test_recovery_run_covers_the_map_and_more_rows_help():
    out = ident.recovery_run(0)
    assert set(out) == {f"exact_{n}_{w}" for n in ident.ROWS for w in ident.WIDTHS}
    assert set(out.values()) <= {0.0, 1.0}
    assert out["exact_600_0.45"] == 1
    assert out["exact_80_1.4"] == 0


def test_training_studies_return_what_the_parts_measure():
    out = ident.sparse_run(0, steps=30, prune_steps=10)
    data = ident.latent_data(0)
    x, g = data.x[: ident.TRAIN], data.g[: ident.TRAIN]
    draw = generator(0)
    fit = ident.fit_specialist(x, g, steps=30, generator=draw)
    assert out["l1_task"] == pytest.approx(ident.task_loss(fit.model, x, g), rel=1e-9)
    small = ident.prune_specialist(fit, x, g, 3, steps=10, generator=draw)
    u = small.model.encode(data.x[ident.TRAIN :]).detach()[:, small.model.active(3)]
    expected = ident.block_r2(u, data.s[ident.TRAIN :, 3:])
    assert out["pruned_r2_irrelevant"] == pytest.approx(expected, abs=1e-9)
    assert out["pruned_task"] == pytest.approx(out["pruned_task_3"], rel=1e-9)
    free = ident.free_run(0, steps=20)
    masks = ident.mask_run(0, steps=20)
    assert {k.split("_")[0] for k in free} == {"free", "bottleneck", "ica"}
    assert {k.split("_")[0] for k in masks} == {"mask2", "mask3", "mask4"}
    assert all(math.isfinite(v) for v in (*out.values(), *free.values(), *masks.values()))


def test_public_names_exist():
    assert len(set(ident.__all__)) == len(ident.__all__)
    for name in ident.__all__:
        assert hasattr(ident, name)


# Checkers: the right answer passes, plausible wrong ones do not


def test_checker_of_exercise_1():
    ident.check_collider_bias(lambda s: s.sum(dim=1).abs() < 0.5)
    ident.check_collider_bias(lambda s: (s[:, 0] - torch.tanh(s[:, 1])).abs() < 0.4)
    for wrong, hint in (
        (lambda s: torch.ones(len(s), dtype=torch.bool), "must be correlated"),
        (lambda s: s[:, 0] > 0, "must be correlated"),
        (lambda s: s.sum(dim=1).abs() < 1e-3, "at least 5 %"),
        (lambda s: (s.sum(dim=1).abs() < 0.5).double(), "booleans"),
        (
            lambda s: (s.sum(dim=1).abs() < 0.5) & (torch.arange(len(s)) % 2 == 0),
            "that row alone",
        ),
    ):
        with pytest.raises(AssertionError, match=hint):
            ident.check_collider_bias(wrong)


def partial_p(x, y, Z, *, constant=True, freedom=lambda n, k: n - k - 3):
    F = torch.cat([torch.ones(len(x), 1, dtype=Z.dtype), Z], dim=1) if constant else Z
    Q = torch.linalg.qr(F).Q
    u, v = x - Q @ (Q.T @ x), y - Q @ (Q.T @ y)
    r = float(u @ v / (u.norm() * v.norm()))
    z = math.sqrt(freedom(len(x), Z.shape[1])) * math.atanh(r)
    return 2 * scipy.stats.norm.sf(abs(z))


def test_checker_of_exercise_2():
    ident.check_partial_correlation(partial_p)
    for wrong, hint in (
        (lambda x, y, Z: partial_p(x, y, Z, freedom=lambda n, k: n - 3), "degrees of freedom"),
        (lambda x, y, Z: partial_p(x, y, Z[:, :0]), "uniform"),
        (lambda x, y, Z: partial_p(x, y, Z) / 2, "uniform"),
        (lambda x, y, Z: 2 * partial_p(x, y, Z), r"\[0, 1\]"),
        (lambda x, y, Z: float(np.random.default_rng(int(1e6 * abs(x[0]))).random()), "found"),
    ):
        with pytest.raises(AssertionError, match=hint):
            ident.check_partial_correlation(wrong)


def read_tasks(tasks):
    G = ident.moral_graph(tasks, 8)
    sets = ident.task_sets(G)
    family = [frozenset(t) for t in tasks]
    return sets, len(sets) == len(family) and set(sets) == set(family)


def test_checker_of_exercise_3():
    ident.check_task_reading(read_tasks)

    def components(tasks):
        G = ident.moral_graph(tasks, 8)
        sets = [c for c in nx.connected_components(G) if len(c) > 1]
        return sets, read_tasks(tasks)[1]

    def with_singles(tasks):
        return list(nx.find_cliques(ident.moral_graph(tasks, 8))), read_tasks(tasks)[1]

    def pairs_only(tasks):
        # forgets the triangle: looks for containment alone
        sets = read_tasks(tasks)[0]
        return sets, not any(set(a) <= set(b) for a, b in itertools.permutations(tasks, 2))

    for wrong, hint in (
        (components, "maximal cliques"),
        (with_singles, "maximal cliques"),
        (pairs_only, "is not the family"),
        (lambda tasks: (read_tasks(tasks)[0], False), "is the family"),
    ):
        with pytest.raises(AssertionError, match=hint):
            ident.check_task_reading(wrong)


def test_checker_of_exercise_4():
    ident.check_block_directions(ident.linear_specialist)

    def principal(x, g, rank):
        return torch.linalg.svd(x - x.mean(dim=0)).Vh[:rank]

    def left(x, g, rank):
        C = ident.linear_coefficients(x, g)
        return torch.linalg.svd(C.T @ C).Vh[-rank:]

    def one_direction(x, g, rank):
        return ident.linear_specialist(x, g, 1).repeat(rank, 1)

    for wrong, hint in (
        (principal, "leakage"),
        (left, "recoverable|leakage"),
        (one_direction, "recoverable"),
        (lambda x, g, rank: ident.linear_specialist(x, g, rank).T, "shape"),
    ):
        with pytest.raises(AssertionError, match=hint):
            ident.check_block_directions(wrong)


def test_checker_of_exercise_5():
    flip = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    ident.check_cancelled_edge(lambda w: flip * w)
    ident.check_cancelled_edge(lambda w: torch.stack([-w[1], w[0], w[2]]))
    for wrong, hint in (
        (lambda w: w, "must vanish"),
        (lambda w: -w, "must vanish"),
        (lambda w: 0 * w, "size 0.3"),
        (lambda w: w[:2], "three weights"),
    ):
        with pytest.raises(AssertionError, match=hint):
            ident.check_cancelled_edge(wrong)


def test_bell_selection_has_the_stated_precision():
    weights = torch.tensor([[1.0, -0.5, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    s = ident.make_bell_selection(weights, 20_000, generator=generator())
    precision = torch.eye(3, dtype=torch.float64) + weights.T @ weights
    assert float((torch.linalg.inv(torch.cov(s.T)) - precision).abs().max()) < 0.12
    with pytest.raises(ValueError, match="n must be"):
        ident.make_bell_selection(weights, 0)
