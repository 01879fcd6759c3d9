"""The paper's module: instances, the sign-rank identity, bounds, constructions, solvers."""

import itertools
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icmllab.representations import dimension_collapse as dc


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_planes(N, D, d, seed=0):
    g = generator(seed)
    shapes = ((N, d), (D, d), (D,))
    return dc.Hyperplanes(*(torch.randn(s, generator=g, dtype=torch.float64) for s in shapes))


# Instances


@settings(max_examples=25, deadline=None)
@given(N=st.integers(1, 12), D=st.integers(1, 12), eta=st.sampled_from([1e-3, 0.3, 1.0, 50.0]))
def test_every_labelling_has_a_witness_in_d_dimensions(N, D, eta):
    instance = dc.shattered_instance(N, D, generator(N * D), eta=eta)
    assert instance.n_points == N + 2 * D == len(instance.witness)
    assert len(instance.triplets) == N * D
    assert dc.triplet_accuracy(instance.witness, instance.triplets) == 1.0
    wide = dc.witness_embedding(instance.signs, d=D + 3, eta=eta)
    assert wide.shape == (N + 2 * D, D + 3)
    assert dc.triplet_accuracy(wide, instance.triplets) == 1.0
    # turned over, the same points satisfy nothing
    assert dc.triplet_accuracy(wide, instance.triplets[:, [0, 2, 1]]) == 0.0


def test_shattered_triplets_stand_where_the_signs_say():
    instance = dc.shattered_instance(5, 3, generator(4))
    for i, l in itertools.product(range(5), range(3)):
        near, far = (5 + l, 8 + l) if instance.signs[i, l] > 0 else (8 + l, 5 + l)
        assert instance.triplets[3 * i + l].tolist() == [i, near, far]


def test_cube_holds_every_sign_vector_once():
    instance = dc.cube_instance(6)
    assert len({tuple(row) for row in instance.signs.tolist()}) == 64
    assert instance.triplets.shape == (384, 3)
    assert dc.triplet_accuracy(instance.witness, instance.triplets) == 1.0


def test_random_triplets_are_distinct_and_uniform():
    triplets = dc.random_triplets(5, 60_000, generator())
    assert all(len(set(t)) == 3 for t in triplets[:500].tolist())
    codes = triplets @ torch.tensor([25, 5, 1])
    counts = codes.unique(return_counts=True)[1]
    assert len(counts) == 60
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_gaussian_instance_is_true_and_its_second_half_is_fresh():
    instance = dc.gaussian_instance(40, 6, 500, generator(2))
    for triplets in (instance.triplets, instance.heldout):
        assert triplets.shape == (500, 3)
        assert dc.triplet_accuracy(instance.witness, triplets) == 1.0
    assert not torch.equal(instance.triplets, instance.heldout)
    near = instance.triplets[:, 1] < instance.triplets[:, 2]
    assert 0.4 < float(near.double().mean()) < 0.6  # the order of the names leaks nothing


def test_planted_line_turns_over_the_named_share():
    instance = dc.planted_line(20, 1000, 0.05, generator(1))
    assert dc.triplet_accuracy(instance.witness, instance.triplets) == pytest.approx(0.95)
    clean = dc.relabel(instance.triplets, instance.witness)
    assert dc.triplet_accuracy(instance.witness, clean) == 1.0
    assert int((clean != instance.triplets).any(dim=1).sum()) == 50


def test_generators_repeat_with_their_seed():
    for make in (
        lambda g: dc.shattered_instance(6, 4, g).signs,
        lambda g: dc.gaussian_instance(9, 4, 30, g).triplets,
        lambda g: dc.planted_line(9, 30, 0.1, g).triplets,
        lambda g: dc.random_tournament(7, g),
        lambda g: dc.random_line(9, g),
    ):
        assert torch.equal(make(generator(1)), make(generator(1)))
        assert not torch.equal(make(generator(1)), make(generator(2)))


# The sign-rank identity


@settings(max_examples=40, deadline=None)
@given(
    N=st.integers(1, 8), D=st.integers(1, 8), d=st.integers(1, 5), seed=st.integers(0, 999),
    zeros=st.booleans(),
)  # fmt: skip
def test_triplets_and_signs_agree_in_both_directions(N, D, d, seed, zeros):
    instance = dc.shattered_instance(N, D, generator(seed))
    planes = random_planes(N, D, d, seed + 1)
    if zeros:
        planes.W[0] = 0
    P = dc.signs_to_embedding(*planes)
    assert P.shape == (N + 2 * D, d)
    signs = dc.sign_accuracy(*planes, instance.signs)
    assert dc.triplet_accuracy(P, instance.triplets) == pytest.approx(signs, abs=1e-12)
    back = dc.embedding_to_signs(P, N, D)
    first = int(zeros)
    torch.testing.assert_close(back.W[first:], planes.W[first:])
    torch.testing.assert_close(back.b[first:], planes.b[first:])
    assert dc.sign_accuracy(*back, instance.signs) == pytest.approx(signs, abs=1e-12)


def test_a_hyperplane_of_zeros_is_a_tie_for_everybody():
    planes = random_planes(6, 2, 3)
    planes.W[0], planes.b[0] = 0, 0
    P = dc.signs_to_embedding(*planes)
    assert torch.equal(P[6], P[8])
    instance = dc.shattered_instance(6, 2, generator(1))
    assert dc.triplet_accuracy(P, instance.triplets[::2]) == 0.5


# Bounds


@pytest.mark.parametrize(("D", "d"), [(5, 1), (6, 2), (7, 3), (4, 4), (9, 2)])
def test_random_hyperplanes_make_as_many_cells_as_counted(D, d):
    planes = random_planes(1, D, d, D + 10 * d)
    assert dc.count_cells(planes.W, planes.b) == dc.cell_count(D, d)
    # points scattered over space find no cell beyond that, and most of them
    X = 5 * torch.randn(100_000, d, generator=generator(), dtype=torch.float64)
    seen = len((X @ planes.W.T + planes.b > 0).unique(dim=0))
    assert 0.5 * dc.cell_count(D, d) < seen <= dc.cell_count(D, d)


def test_cells_saturate_at_every_sign_vector():
    assert dc.cell_count(6, 2) == 22
    assert dc.cell_count(5, 5) == dc.cell_count(5, 9) == 32


def best_on_cube_by_enumeration(D):
    """Every order of thresholds is as good as another on the cube: this one, place by place."""
    total = Fraction(0)
    for signs in itertools.product((-1, 1), repeat=D):
        agree = max(
            sum(s == (1 if l < j else -1) for l, s in enumerate(signs)) for j in range(D + 1)
        )
        total += Fraction(agree, D)
    return float(total / 2**D)


@pytest.mark.parametrize("D", range(1, 9))
def test_optimum_on_a_line_is_what_enumeration_finds_and_what_thresholds_reach(D):
    wanted = best_on_cube_by_enumeration(D)
    assert dc.cube_optimum_1d(D) == pytest.approx(wanted, abs=1e-12)
    assert dc.threshold_embedding(dc.cube_instance(D).signs, 1).accuracy == pytest.approx(
        wanted, abs=1e-12
    )


def test_no_line_beats_the_optimum_by_an_independent_solver():
    # H*(1) and H*(2) are small enough for the integer programme over all lines
    for D in (1, 2):
        instance = dc.cube_instance(D) if D == 1 else dc.shattered_instance(3, 2, generator(3))
        if D == 1:
            found = dc.one_dim_milp(instance.triplets, instance.n_points)
            assert found.proven
            assert found.accuracy == dc.cube_optimum_1d(1) == 1.0
        else:
            found = dc.one_dim_milp(instance.triplets, instance.n_points)
            assert found.proven
            assert found.accuracy >= dc.best_found(instance.signs, 1).accuracy


@settings(max_examples=30, deadline=None)
@given(D=st.integers(1, 40), d=st.integers(1, 45))
def test_construction_lies_below_the_covering_bound_and_that_below_the_cell_bound(D, d):
    low, high = dc.threshold_accuracy(D, d), dc.covering_bound(D, d)
    assert 0.5 < low <= high + 1e-12
    assert high <= dc.cell_bound(D, d) + 1e-12
    if d >= D:
        assert low == high == 1.0
    else:
        assert dc.match_and_guess(D, d) <= dc.covering_bound(D, d)


@pytest.mark.parametrize(("D", "d"), [(3, 1), (4, 2), (5, 3)])
def test_no_random_arrangement_on_the_cube_exceeds_the_covering_bound(D, d):
    S = dc.cube_instance(D).signs
    for seed in range(50):
        planes = random_planes(1, D, d, seed)
        # the best cell for each anchor, cells found by scattering points
        X = 4 * torch.randn(3000, d, generator=generator(seed), dtype=torch.float64)
        cells = torch.sign(X @ planes.W.T + planes.b).unique(dim=0)
        best = ((S @ cells.T).max(dim=1).values / D + 1).mean() / 2
        assert float(best) <= dc.covering_bound(D, d) + 1e-12


def test_covering_bound_by_hand():
    # D=2, d=1: 3 cells, so that one of four anchors is at distance 1: mean distance 1/4
    assert dc.covering_bound(2, 1) == 1 - 0.25 / 2
    assert dc.covering_bound(1, 1) == 1.0


def test_threshold_accuracy_is_exact_on_the_cube_and_the_mean_on_random_signs():
    for d in (1, 2, 3, 5, 8, 10):
        S = dc.cube_instance(8).signs
        assert dc.threshold_embedding(S, d).accuracy == pytest.approx(
            dc.threshold_accuracy(8, d), abs=1e-12
        )
    S = dc.shattered_instance(20_000, 11, generator(5)).signs
    for d in (1, 3):
        assert dc.threshold_embedding(S, d).accuracy == pytest.approx(
            dc.threshold_accuracy(11, d), abs=0.005
        )


def test_asymptotics_are_those_of_the_text():
    D = 4000
    assert dc.cube_optimum_1d(D) == pytest.approx(
        0.5 + (math.sqrt(2 * D / math.pi) - 0.5) / D, abs=1e-5
    )
    d = 40
    approx = 0.5 + math.sqrt(2 * d / (math.pi * D)) - d / (2 * D)
    assert dc.threshold_accuracy(D, d) == pytest.approx(approx, abs=3e-4)
    assert dc.cell_bound(D, d) <= 0.5 + math.sqrt(d * math.log(math.e * D / d) / (2 * D))


def test_published_values_of_the_bounds():
    assert dc.cube_optimum_1d(10) == pytest.approx(0.708398, abs=5e-7)
    assert dc.accuracy_upper_bound(256, 32, 1) == pytest.approx(0.852, abs=5e-4)
    assert dc.accuracy_upper_bound(256, 32, 2) == pytest.approx(0.959, abs=5e-4)
    assert dc.accuracy_upper_bound(10**6, 10**5, 20) == pytest.approx(0.5356, abs=5e-5)
    assert dc.accuracy_upper_bound(20 * 2366, 2366, 1) <= 0.55
    assert dc.accuracy_upper_bound(20 * 2365, 2365, 1) > 0.55


def test_warren_counts_no_fewer_patterns_than_there_are():
    # d=1, thresholds alone: N anchors on a line make at least the patterns of one threshold
    for N, D, d in ((4, 3, 1), (50, 10, 2), (3, 3, 5)):
        ln_p = dc.warren_bound(N, D, d)
        assert ln_p <= N * D * math.log(2) + 1e-12
        assert ln_p >= math.log(2 * N)
    assert dc.accuracy_upper_bound(3, 3, 5) == 1.0


@settings(max_examples=30, deadline=None)
@given(eps=st.floats(0.01, 0.49))
def test_collapse_fraction_solves_its_equation(eps):
    c = dc.collapse_fraction(eps, "cube")
    h = [-(p * math.log2(p) + (1 - p) * math.log2(1 - p)) for p in (c, 0.5 + eps)]
    assert h[0] == pytest.approx(1 - h[1], abs=1e-9)
    assert 0 < c < 0.5
    w = dc.collapse_fraction(eps)
    assert w * math.log(8 * math.e / w) == pytest.approx(2 * eps**2)
    assert w < 1 / math.e


def test_collapse_fraction_is_the_limit_of_the_covering_bound():
    D = 1500
    c = dc.collapse_fraction(0.2, "cube")
    assert (
        dc.covering_bound(D, math.floor(0.8 * c * D))
        < 0.7
        < dc.covering_bound(D, round(1.6 * c * D))
    )


# Solvers for signs


@pytest.mark.parametrize("d", [1, 2, 4])
def test_fits_report_their_own_accuracy_and_stay_below_the_bound(d):
    instance = dc.cube_instance(6)
    found = [dc.fit_signs(instance.signs, d, init=i, steps=60) for i in ("random", "svd")]
    found += [dc.fit_signs(instance.signs, d, init="threshold", steps=20)]
    found += [dc.threshold_embedding(instance.signs, d), dc.block_majority(instance.signs, d)]
    for fit in found:
        P = dc.signs_to_embedding(fit.X, fit.W, fit.b)
        assert dc.triplet_accuracy(P, instance.triplets) == pytest.approx(fit.accuracy, abs=1e-12)
        assert fit.accuracy <= dc.covering_bound(6, d) + 1e-12
    assert found[2].accuracy >= dc.threshold_accuracy(6, d) - 1e-12


def test_fit_signs_solves_what_has_a_solution_and_best_is_the_best():
    S = dc.shattered_instance(40, 6, generator(1)).signs
    assert dc.fit_signs(S, 6).accuracy == 1.0
    each = [dc.fit_signs(S, 2, init=i, steps=50).accuracy for i in ("random", "svd", "threshold")]
    assert dc.fit_signs(S, 2, steps=50).accuracy == max(each)
    assert dc.fit_signs(S, 9, init="svd", steps=5).X.shape == (40, 9)


def test_gradient_of_the_sign_fit_is_that_of_its_loss():
    S = dc.shattered_instance(7, 5, generator(2)).signs
    start = random_planes(7, 5, 2)
    parts = [t.clone().requires_grad_() for t in start]
    X, W, b = parts
    torch.nn.functional.softplus(-S * (X @ W.T + b)).mean().backward()
    lr = 1e-3
    one = dc._descend(S, start, 1, lr)
    moved = [t - lr * p.grad.sign() for t, p in zip(start, parts, strict=True)]
    after = dc.sign_accuracy(*moved, S)
    # Adam's first step is lr times the sign of the gradient
    assert one.accuracy == max(after, dc.sign_accuracy(*start, S))


def test_order_search_never_falls_below_its_start_and_adapts_to_few_rows():
    S = dc.shattered_instance(64, 16, generator(3)).signs
    start = dc.threshold_embedding(S, 1).accuracy
    assert dc.order_search(S, 0).accuracy == pytest.approx(start)
    found = dc.order_search(S, 2000, generator())
    assert found.accuracy > start + 0.01
    assert dc.sign_accuracy(found.X, found.W, found.b, S) == found.accuracy
    assert dc.best_found(S, 1, generator()).accuracy >= start + 0.01


def test_order_search_gains_nothing_on_the_cube():
    S = dc.cube_instance(5).signs
    assert dc.order_search(S, 300).accuracy == pytest.approx(dc.cube_optimum_1d(5), abs=1e-12)


def test_order_search_finds_the_best_of_all_orders_and_sides():
    S = dc.shattered_instance(9, 4, generator(8)).signs
    best = 0.0
    for order in itertools.permutations(range(4)):
        for side in itertools.product((1.0, -1.0), repeat=4):
            turned = S[:, list(order)] * torch.tensor(side, dtype=torch.float64)
            best = max(best, dc.threshold_embedding(turned, 1).accuracy)
    assert dc.order_search(S, 3000, generator()).accuracy == pytest.approx(best)


# Solvers for triplets


def test_fit_triplets_finds_a_small_realisable_instance_and_keeps_its_best_iterate():
    instance = dc.gaussian_instance(12, 2, 60, generator(5))
    fit = dc.fit_triplets(instance.triplets, 12, 4, generator=generator())
    assert fit.accuracy == dc.triplet_accuracy(fit.X, instance.triplets)
    assert fit.accuracy > 0.97
    assert fit.trace.shape == (400,)
    assert float(fit.trace[-1]) < 0.3 * float(fit.trace[0])
    more = dc.fit_triplets(instance.triplets, 12, 1, restarts=4, generator=generator())
    assert (
        more.accuracy >= dc.fit_triplets(instance.triplets, 12, 1, generator=generator()).accuracy
    )


def test_fit_triplets_starts_where_it_is_told_and_in_that_dtype():
    instance = dc.gaussian_instance(12, 3, 60, generator(5))
    fit = dc.fit_triplets(instance.triplets, 12, 3, init=instance.witness.float(), steps=3)
    assert fit.accuracy == 1.0
    assert fit.X.dtype == torch.float32
    start = dc.fit_triplets(instance.triplets, 12, 3, init=instance.witness, steps=0)
    assert torch.equal(start.X, instance.witness)


def test_batches_descend_too():
    instance = dc.gaussian_instance(20, 2, 500, generator(5))
    fit = dc.fit_triplets(
        instance.triplets, 20, 3, batch_size=100, steps=300, generator=generator()
    )
    assert fit.accuracy > 0.9
    assert fit.accuracy == dc.triplet_accuracy(fit.X, instance.triplets)


def test_contradictory_triplets_are_allowed_with_a_warning():
    triplets = [[0, 1, 2], [0, 2, 1], [1, 0, 2]]
    with pytest.warns(UserWarning, match="contain 1 pairs .* contradict"):
        fit = dc.fit_triplets(triplets, 3, 2, steps=50)
    assert fit.accuracy == pytest.approx(2 / 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dc.fit_triplets([[0, 1, 2], [0, 1, 2], [1, 0, 2]], 3, 2, steps=2)


def best_line_by_enumeration(triplets, n, top):
    values = np.array(list(itertools.product(range(top + 1), repeat=n)))
    i, j, k = triplets.numpy().T
    near, far = np.abs(values[:, i] - values[:, j]), np.abs(values[:, i] - values[:, k])
    return (near < far).mean(axis=1).max()


@pytest.mark.parametrize("seed", range(4))
def test_integer_programme_is_exact_on_four_points(seed):
    triplets = dc.random_triplets(4, 10, generator(seed))
    found = dc.one_dim_milp(triplets, 4)
    assert found.proven
    assert found.accuracy == dc.triplet_accuracy(found.X, triplets)
    assert found.accuracy == pytest.approx(best_line_by_enumeration(triplets, 4, 10))


def test_integer_programme_bounds_every_fit_on_a_line():
    triplets = dc.random_triplets(5, 16, generator(9)).unique(dim=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = dc.fit_triplets(triplets, 5, 1, restarts=5, generator=generator())
    assert fit.accuracy <= dc.one_dim_milp(triplets, 5).accuracy + 1e-12


@settings(max_examples=40, deadline=None)
@given(n=st.integers(3, 15), m=st.integers(1, 60), grid=st.integers(2, 20), seed=st.integers(0, 99))
def test_conditional_expectations_never_end_below_one_half(n, m, grid, seed):
    triplets = dc.random_triplets(n, m, generator(seed))
    line = dc.conditional_expectation_line(triplets, n, grid)
    assert line.shape == (n, 1)
    assert 0 <= int(line.min()) <= int(line.max()) < grid
    assert dc.triplet_accuracy(line, triplets) >= 0.5


def test_random_line_is_right_half_of_the_time():
    instance = dc.shattered_instance(30, 8, generator(1))
    accuracy = [
        dc.triplet_accuracy(dc.random_line(46, generator(s)), instance.triplets) for s in range(400)
    ]
    error = np.std(accuracy) / 20
    assert abs(np.mean(accuracy) - 0.5) < 4 * error


# Acyclic subgraphs


def best_order_by_enumeration(arcs, n):
    best = 0
    for order in itertools.permutations(range(n)):
        rank = {v: r for r, v in enumerate(order)}
        best = max(best, sum(rank[j] < rank[k] for j, k in arcs.tolist()))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_dynamic_programme_finds_the_best_order(seed):
    n = 4 + seed % 3
    arcs = dc.random_tournament(n, generator(seed))[: 2 * n]
    found = dc.max_acyclic(arcs, n)
    assert found.value == best_order_by_enumeration(arcs, n)
    rank = torch.argsort(found.order)
    assert int((rank[arcs[:, 0]] < rank[arcs[:, 1]]).sum()) == found.value


def test_a_cycle_loses_one_arc_and_repeated_arcs_count_each():
    cycle = [[0, 1], [1, 2], [2, 0]]
    assert dc.max_acyclic(cycle, 3).value == 2
    assert dc.max_acyclic([*cycle, [2, 0], [2, 0]], 3).value == 4
    assert dc.max_acyclic([[0, 1]], 14).value == 1


@pytest.mark.parametrize("seed", range(3))
def test_single_anchor_accuracy_is_the_acyclic_share_in_every_dimension(seed):
    arcs = dc.random_tournament(6, generator(seed))
    instance = dc.single_anchor_instance(arcs, 6)
    best = dc.max_acyclic(arcs, 6)
    share = best.value / len(arcs)
    line = dc.line_from_order(best.order)
    assert dc.triplet_accuracy(line, instance.triplets) == share
    assert dc.one_dim_milp(instance.triplets, 7).accuracy == pytest.approx(share)
    for d in (1, 3):
        fit = dc.fit_triplets(instance.triplets, 7, d, steps=150, generator=generator())
        assert fit.accuracy <= share + 1e-12


# Truncation, margins, digits, experiments


def test_truncation_is_the_best_projection_and_classical_scaling_agrees():
    g = generator(3)
    X = torch.randn(30, 6, generator=g, dtype=torch.float64) * torch.tensor([5, 3, 2, 1, 0.5, 0.1])
    cut = dc.truncate(X + 7, 2)
    lost = torch.linalg.svdvals(X - X.mean(0))[2:].square().sum()
    total = (X - X.mean(0)).square().sum()
    assert float(total - cut.square().sum()) == pytest.approx(float(lost))
    torch.testing.assert_close(torch.pdist(dc.truncate(X, 6)), torch.pdist(X))
    assert dc.truncate(X, 9).shape == (30, 9)
    scaled = dc.classical_mds(X, 2)
    torch.testing.assert_close(torch.pdist(scaled), torch.pdist(cut))


def test_relative_margin_by_hand():
    P = torch.tensor([[0.0], [1.0], [3.0]])
    margin = dc.relative_margin(P, torch.tensor([[0, 1, 2], [1, 2, 0]]))
    assert margin.tolist() == pytest.approx([8 / 10, 3 / 5])


def test_digit_triplets_are_true_and_without_ties():
    instance = dc.digit_triplets(n=40, m=700, seed=3)
    assert instance.triplets.shape == (700, 3)
    exact = instance.witness.long()
    assert dc.triplet_accuracy(exact, instance.triplets, ties=0.0) == 1.0
    scores = dc.digit_scores(n=40, m=700, d=64, seed=3)
    assert scores["pca_all"] == scores["pca_near"] == 1.0
    fewer = dc.digit_scores(n=40, m=700, d=6, seed=3)
    assert fewer["pca_near"] < fewer["pca_all"] < 1.0
    assert fewer["projection_all"] < fewer["pca_all"]


def test_projection_keeps_distances_and_loses_order_as_the_normal_law_says():
    scores = [dc.projection_scores(N=128, D=32, d=16, seed=s) for s in range(3)]
    wanted = scipy.stats.norm.cdf(math.sqrt(16 / 31))
    assert np.mean([s["accuracy"] for s in scores]) == pytest.approx(wanted, abs=0.03)
    assert min(s["within_40"] for s in scores) > 0.95


def test_small_runs_of_the_experiments_are_consistent():
    scores = dc.shattered_scores(N=20, D=6, d=1, seed=0, restarts=2)
    assert scores["found"] == max(scores.values())
    assert scores["one"] <= scores["several"]
    tournament = dc.tournament_scores(n=6, dims=(1, 2), seed=1)
    assert tournament["line"] == tournament["acyclic"]
    planted = dc.planted_scores(n=20, m=400, flip=0.05, seed=0, restarts=2)
    assert planted["clean"] > planted["noisy"] > 0.85
    typical = dc.gaussian_scores(n=30, D=8, m=400, d=2, seed=0)
    assert 1 > typical["typical"] > typical["typical_pca"] > 0.55
    assert typical["typical"] > typical["heldout"] > 0.55


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dc.shattered_instance(0, 3), "N must be"),
        (lambda: dc.shattered_instance(3, 0), "D must be"),
        (lambda: dc.cube_instance(17), "D must be at most 16"),
        (lambda: dc.witness_embedding([[1, 0]]), "S must hold the signs"),
        (lambda: dc.witness_embedding([1, -1]), "S must have shape"),
        (lambda: dc.witness_embedding([[1, -1]], d=1), "d must be at least D=2"),
        (lambda: dc.witness_embedding([[1, -1]], eta=0.0), "eta must be"),
        (lambda: dc.random_triplets(2, 5), "n must be at least 3"),
        (lambda: dc.planted_line(5, 5, 0.5), "flip must be"),
        (lambda: dc.gaussian_instance(5, 0, 5), "D must be"),
        (lambda: dc.random_tournament(1), "n must be at least 2"),
        (lambda: dc.single_anchor_instance(torch.zeros(0, 2, dtype=torch.int64), 3), "q >= 1"),
        (lambda: dc.single_anchor_instance([[0, 3]], 3), r"vertices 0\.\.2: got 3"),
        (lambda: dc.single_anchor_instance([[1, 1]], 3), "two different vertices"),
        (lambda: dc.max_acyclic([[0, 1]], 15), "n must be at most 14"),
        (lambda: dc.embedding_to_signs(torch.zeros(5, 1), 2, 2), r"N\+2D=6 rows"),
        (
            lambda: dc.signs_to_embedding(torch.zeros(2, 1), torch.zeros(2, 2), torch.zeros(2)),
            "X, W",
        ),
        (lambda: dc.cell_count(3, 0), "d must be"),
        (lambda: dc.threshold_accuracy(0, 1), "D must be"),
        (lambda: dc.threshold_embedding([[1, -1]], 0), "d must be"),
        (lambda: dc.accuracy_upper_bound(3, 3, 1, delta=1.0), "delta must be"),
        (lambda: dc.collapse_fraction(0.5), r"eps must be in \(0, 1/2\): got 0.5"),
        (lambda: dc.collapse_fraction(0.0), "eps must be"),
        (lambda: dc.collapse_fraction(0.1, "other"), "kind must be"),
        (lambda: dc.fit_signs([[1, -1]], 1, init="zeros"), "init must be one of"),
        (lambda: dc.fit_signs([[1, -1]], 1, steps=-1), "steps must be"),
        (lambda: dc.fit_signs([[1, -1]], 1, lr=0.0), "lr must be"),
        (lambda: dc.fit_triplets([[0, 1, 1]], 3, 1), "three different points"),
        (lambda: dc.fit_triplets([[0, 1, 3]], 3, 1), "got 3"),
        (lambda: dc.fit_triplets([], 3, 1), "triplets must have shape"),
        (lambda: dc.fit_triplets([[0, 1, 2]], 3, 0), "d must be"),
        (lambda: dc.fit_triplets([[0, 1, 2]], 3, 1, init=torch.zeros(3, 2)), "init must be"),
        (lambda: dc.fit_triplets([[0, 1, 2]], 3, 1, batch_size=0), "batch_size must be"),
        (lambda: dc.one_dim_milp([[0, 1, 2]], 8), r"n must be in 3\.\.7"),
        (lambda: dc.one_dim_milp([[0, 1, 2]] * 31, 3), "at most 30 triplets"),
        (lambda: dc.conditional_expectation_line([[0, 1, 2]], 3, 1), "grid must be"),
        (lambda: dc.truncate(torch.zeros(3), 1), "X must have shape"),
        (lambda: dc.digit_triplets(n=1798, m=5, seed=0), r"n must be in 3\.\.1797"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
