"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.efficiency import gsrq

EXERCISES = Exercises("efficiency/gsrq", "gsrq", gsrq)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "gsrq-gain": ("(w * (X @ s)).sum() / w.sum()", "(X @ s).mean()", "derivative"),
    "gsrq-step": ("(X @ shapes.T)", "(-X @ shapes.T)", "largest inner product"),
    "gsrq-lut": (" * scale", "", "token scale"),
    "gsrq-gain-code": (" + 2 / X.shape[1]", "", "bit an element"),
    "gsrq-beam": ("largest=False", "largest=True", "must not exceed"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])
