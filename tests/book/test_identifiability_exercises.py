"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.representations import identifiability

EXERCISES = Exercises("representations/identifiability", "idf", identifiability)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "identifiability-collider": ("s.sum(dim=1).abs() < 0.6", "s[:, 0].abs() < 0.6", "correlated"),
    "identifiability-partial": ("len(x) - Z.shape[1] - 2", "len(x) - 2", "degrees of freedom"),
    "identifiability-cliques": (" and len(sets) == len(tasks)", " or len(tasks) == 3", "is not"),
    "identifiability-block": ("torch.linalg.lstsq(x, g).solution.T", "x", "must not see s_I"),
    "identifiability-cancel": ("-w[1]", "w[1]", "must vanish"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])
