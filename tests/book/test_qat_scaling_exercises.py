"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.efficiency import qat_scaling

EXERCISES = Exercises("efficiency/qat_scaling", "qat", qat_scaling)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "qat-scaling-ste": ("u <= half - 1", "u < half - 0.5", "before rounding"),
    "qat-scaling-fit": ("np.log(np.log2(G))", "np.log(G)", "ln log2 G"),
    "qat-scaling-group": ("(1 - 1 / G) * square", "square", "no error"),
    "qat-scaling-bias": ("np.log(np.log2(G))", "np.log(D)", "G stays"),
    "qat-scaling-mixed": ('{"a_bits": 6}', '{"a_bits": 8}', r"at most 4\.5"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])
