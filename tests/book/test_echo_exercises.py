"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.efficiency import echo

EXERCISES = Exercises("efficiency/echo", "echo", echo)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "echo-mask": ("mask[i] |= mask[p]", "mask[i, p] = True", "its ancestors"),
    "echo-verify": ("return [*path, x]", "return list(path) or [0]", "total variation"),
    "echo-global": ("push(-score, r, path)", "push(1.0, r, path)", "5 nodes can be"),
    "echo-break-even": ("max(1, (B + n + 1) / knee)", "max(1, (B + n) / knee)", "it pays from"),
    "echo-gate": ("left // (following - depth)", "left", "reserve for every level"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])
