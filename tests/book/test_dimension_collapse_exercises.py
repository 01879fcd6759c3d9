"""The chapter's solutions, run as they are printed, and wrong ones, which the checkers refuse."""

import math

import pytest
import torch
from exercise_helpers import Exercises

from icmllab.representations import dimension_collapse as dc

EXERCISES = Exercises("representations/dimension_collapse", "dc", dc)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(6)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


def swapped_references(S, eta):
    eye = torch.eye(S.shape[1], dtype=torch.float64)
    return torch.cat([eta * S, -eye, eye])


def fixed_anchor(S, eta):
    return dc.witness_embedding(torch.ones_like(S), eta=eta)


def lines_through_one_point(D, d):
    return 2 * sum(math.comb(D - 1, k) for k in range(d))


def one_term_of_two(D):
    return 0.5 + 2 * float(dc._mean_positive_part(D, 0)) / D


def without_references(target, d, factor):
    D = d
    while True:
        N = factor * D
        V = N * d
        ln_p = min(N * D * math.log(2), V * math.log(8 * math.e * N * D / V))
        if 0.5 + math.sqrt((ln_p + math.log(20)) / (2 * N * D)) <= target:
            return D
        D += 1


def line_in_the_order_of_names(arcs, n):
    instance = dc.single_anchor_instance(arcs, n)
    return instance.triplets, dc.line_from_order(torch.arange(n))


def arcs_turned_over(arcs, n):
    best = dc.max_acyclic(arcs.flip(1), n).order
    return dc.single_anchor_instance(arcs.flip(1), n).triplets, dc.line_from_order(best)


@pytest.mark.parametrize(
    ("checker", "wrong", "message"),
    [
        (dc.check_witness, swapped_references, "every triplet must hold"),
        (dc.check_witness, fixed_anchor, "every triplet must hold"),
        (dc.check_witness, lambda S, eta: torch.zeros(len(S), 1), "must have shape"),
        (dc.check_cell_count, lambda D, d: 22, "hyperplanes in R"),
        (dc.check_cell_count, lines_through_one_point, "hyperplanes in R"),
        (dc.check_cube_optimum, one_term_of_two, "the expected maximum of the walk"),
        (dc.check_cube_optimum, lambda D: 0.75, "the mean best share"),
        (dc.check_smallest_dimension, lambda target, d, factor: 2366, "the smallest D is"),
        (dc.check_smallest_dimension, without_references, "count the references"),
        (dc.check_single_anchor, line_in_the_order_of_names, "the best order"),
        (dc.check_single_anchor, arcs_turned_over, "arc j → k must become"),
        (
            dc.check_two_axes,
            lambda S, generator: dc.threshold_embedding(S, 2)[:3],
            "at least 0.01 more is wanted",
        ),
        (dc.check_two_axes, lambda S, generator: dc.threshold_embedding(S, 1)[:3], "shapes"),
    ],
)
def test_wrong_answers_are_refused_with_a_reason(checker, wrong, message):
    with pytest.raises(AssertionError, match=message):
        checker(wrong)
