"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.efficiency import ditron

EXERCISES = Exercises("efficiency/ditron", "ditron", ditron)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "ditron-chunks": ("(m1 - 1) // chunk_rows + 1", "m1 // chunk_rows + 1", "they lie in"),
    "ditron-swizzle": ("else -1", "else 1", "is possible"),
    "ditron-merge": ("np.exp(m - top)", "1.0", "off by"),
    "ditron-deadlock": ("min(error.unmet)", "max(error.unmet)", "does not wait in vain"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])


def test_a_gather_that_crosses_too_often_is_refused():
    def mesh(nodes, local):
        ranks = range(nodes * local)
        return [(r, p, r) for r in ranks for p in ranks if p != r]

    with pytest.raises(AssertionError, match="cross between nodes"):
        ditron.check_gather(mesh)
    with pytest.raises(AssertionError, match="never gets"):
        ditron.check_gather(lambda nodes, local: [])
    with pytest.raises(AssertionError, match="before it has it"):
        ditron.check_gather(lambda nodes, local: [(0, 1, 2)])
