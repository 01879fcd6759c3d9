"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.representations import stitching

EXERCISES = Exercises("representations/stitching", "st", stitching)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "stitching-slm": ("mean_b - W @ mean_a", "mean_b", "must minimise"),
    "stitching-invert": ("range(200)", "range(20)", "mean residual"),
    "stitching-linear": (
        "return unseen(G_B, G_A), unseen(G_A, G_B)",
        "return unseen(G_A, G_B), unseen(G_B, G_A)",
        "f must be",
    ),
    "stitching-cue": ("bc[0] > bc[1]", "bc[0] < bc[1]", "uses the"),
    "stitching-mixed": ("a.y[half], b.y[rest]", "a.y[half], a.y[rest]", "go by its colour"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])
