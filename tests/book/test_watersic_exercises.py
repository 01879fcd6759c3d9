"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.efficiency import watersic

EXERCISES = Exercises("efficiency/watersic", "watersic", watersic)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "watersic-water": ("- lam[m:].sum()) / m", "- lam[m:].sum()) / n", "must be D"),
    "watersic-loop": ("reversed(range(len(L)))", "range(len(L))", "last column first"),
    "watersic-predict": ("squares.mean() /", "squares.max() /", "bits above the limit"),
    "watersic-rescale": ("t[:, None] ** 2 * A", "A", "derivative"),
    "watersic-huffman": ("(c0 + c1, n, both)", "(max(c0, c1), n, both)", "mean length must lie"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])
