"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.representations import gcpa

EXERCISES = Exercises("representations/gcpa", "gcpa", gcpa)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "gcpa-procrustes": ("A.T @ B", "B.T @ A", "must be"),
    "gcpa-round": ("X.T @ U)", "X.T @ Xs[0])", "minimise"),
    "gcpa-correction": (
        "sum(A.T @ U for A in As) + level",
        "sum(A.T @ U for A in As)",
        "off by",
    ),
    "gcpa-add-model": ("(P @ Qt)[None]", "(P @ Qt).T[None]", "R@1 of the new model"),
    "gcpa-lambda": ("return max(", "return min(", "are expected"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])
