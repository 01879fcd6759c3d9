"""The chapter's solutions, run as they are printed, and plausible slips, which must not pass."""

import numpy as np
import pytest
import scipy.stats
from exercise_helpers import Exercises
from scipy.special import betaincinv

from icmllab.representations import veclinking as vl

EXERCISES = Exercises("representations/veclinking", "vl", vl)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label, capsys):
    EXERCISES.run(label)
    if label == "veclinking-outside":  # seeds outside cost little, as the text says
        outside, inside = map(float, capsys.readouterr().out.split())
        assert inside > 0.7
        assert abs(outside - inside) < 0.1


def test_eight_votes_of_sixteen_exceed_a_bound_of_three_tenths():
    # what the first solution says
    assert vl.beta_lower(7, 16) <= 0.3 < vl.beta_lower(8, 16)


def test_gaussian_bound_does_not_pass():
    def fn(h, T, q):
        mean = (1 + h) / (2 + T)
        return scipy.stats.norm(mean, np.sqrt(mean * (1 - mean) / (3 + T))).ppf(q)

    with pytest.raises(AssertionError, match="16 of 16 votes"):
        vl.check_beta_lower(fn)


def test_bound_without_prior_or_with_fixed_views_does_not_pass():
    for fn in (
        lambda h, T, q: betaincinv(max(h, 1e-9), max(T - h, 1e-9), q),
        lambda h, T, q: betaincinv(1 + h, 17 - h, 0.1),
    ):
        with pytest.raises(AssertionError, match="votes"):
            vl.check_beta_lower(fn)


def code_cost(DX, DY, r, scale, *, near, floor=0.01, squared=True):
    W = np.zeros_like(DX)
    nearest = np.argsort(DX, axis=1)[:, : r if near else DX.shape[1]]
    np.put_along_axis(W, nearest, 1.0, axis=1)
    W /= np.maximum(DX, floor)
    Y = scale * DY.T
    constant = (W * DX**2).sum(axis=1, keepdims=True)
    return constant - 2 * (W * DX) @ Y + (W @ Y**2 if squared else 0)


def test_cost_helper_is_right_so_that_the_slips_are_the_slips():
    vl.check_code_cost(lambda *a: code_cost(*a, near=True))


@pytest.mark.parametrize(
    "slip",
    [
        lambda *a: code_cost(*a, near=False),
        lambda *a: code_cost(*a, near=True, floor=0.1),
        lambda *a: code_cost(*a, near=True, squared=False),
        lambda DX, DY, r, scale: code_cost(DX, DY, r, 1 / scale, near=True),
        lambda DX, DY, r, scale: code_cost(DY, DX, r, scale, near=True).T,
    ],
)
def test_slips_in_the_cost_do_not_pass(slip):
    with pytest.raises(AssertionError, match=r"D\["):
        vl.check_code_cost(slip)


def scale_of(AX, AY, r, *, ratio, both=True):
    near = np.zeros(AX.shape, dtype=bool)
    for A in (AX, AY) if both else (AX,):
        nearest = np.argsort(A + np.diag(np.full(len(A), np.inf)), axis=1)[:, :r]
        np.put_along_axis(near, nearest, True, axis=1)
    a, b = np.nonzero(np.triu(near | near.T, 1))
    return ratio(AX[a, b], AY[a, b])


def log_median(x, y):
    return np.exp(np.median(np.log(x) - np.log(y)))


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        (lambda *a: 3.0, "1/κ"),
        (lambda *a: scale_of(*a, ratio=log_median, both=False), "1/κ"),
        (lambda *a: scale_of(*a, ratio=lambda x, y: np.mean(x / y)), "1/κ"),
        (lambda *a: 1 / scale_of(*a, ratio=log_median), "κ = 3"),
        (lambda AX, AY, r: scale_of(AX, AY, len(AX) - 1, ratio=log_median), "4 nearest"),
    ],
)
def test_slips_in_the_scale_do_not_pass(slip, message):
    vl.check_scale(lambda *a: scale_of(*a, ratio=log_median))
    with pytest.raises(AssertionError, match=message):
        vl.check_scale(slip)


def votes_of(X, Y, seeds, n_views, rng, *, back, scale=True):
    A, B = X[seeds[:, 0]], Y[seeds[:, 1]]
    votes = np.zeros((len(X), len(Y)), dtype=int)
    for _ in range(n_views):
        view = rng.choice(len(seeds), size=18, replace=False)
        inner = (vl.chord_distances(Z[view], Z[view]) for Z in (A, B))
        kappa = vl.estimate_scale(*inner, 16) if scale else 1.0
        DX, DY = vl.chord_distances(X, A[view]), vl.chord_distances(Y, B[view])
        D1 = vl.directed_code_cost(DX, DY, 16, kappa)
        D2 = D1.T if back == "one" else vl.directed_code_cost(DY, DX, 16, back(kappa))
        to_y, to_x = D1.argmin(axis=1), D2.argmin(axis=1)
        i = np.flatnonzero(to_x[to_y] == np.arange(len(X)))
        votes[i, to_y[i]] += 1
    return votes


def test_mutual_minimum_of_one_matrix_does_not_pass():
    vl.check_one_round(lambda *a: votes_of(*a, back=lambda k: 1 / k))
    with pytest.raises(AssertionError, match="exactly transposed"):
        vl.check_one_round(lambda *a: votes_of(*a, back="one"))


def test_the_same_scale_both_ways_does_not_pass():
    with pytest.raises(AssertionError, match=r"transposed|right"):
        vl.check_one_round(lambda *a: votes_of(*a, back=lambda k: k))


def test_no_links_and_links_of_everything_do_not_pass():
    with pytest.raises(AssertionError, match="some must be found"):
        vl.check_one_round(lambda X, Y, *_: np.zeros((len(X), len(Y)), dtype=int))
    with pytest.raises(AssertionError, match="are right"):
        vl.check_one_round(lambda X, Y, *_: np.full((len(X), len(Y)), 16))


def test_links_by_a_global_map_of_outside_seeds_do_not_pass():
    def fn(X, Y, seed_x, seed_y):
        everyone = [np.concatenate(pair) for pair in ((seed_x, X), (seed_y, Y))]
        links = vl.procrustes_links(*everyone, np.stack([np.arange(20)] * 2, axis=1))
        return links[(links >= 20).all(axis=1)] - 20

    with pytest.raises(AssertionError, match=r"F1 must be at least 0\.5"):
        vl.check_outside_seeds(fn)
    with pytest.raises(AssertionError, match="linked twice"):
        vl.check_outside_seeds(lambda *_: np.zeros((2, 2), dtype=int))
