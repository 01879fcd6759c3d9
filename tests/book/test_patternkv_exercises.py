"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.efficiency import patternkv

EXERCISES = Exercises("efficiency/patternkv", "patternkv", patternkv)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "patternkv-pack": ("[codes, np.zeros", "[codes[::-1], np.zeros", "lowest bits first"),
    "patternkv-scatter": ("between += len(cell) * ", "between += ", "between is"),
    "patternkv-shift": ("axis = 0 if", "axis = 1 if", "off by"),
    "patternkv-logits": (" + q @ zero", "", "off by"),
    "patternkv-break": ("[10.0, 1.0]])", "[10.0, -1.0]])", "no channel's residual"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])
