"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.efficiency import sre_merge

EXERCISES = Exercises("efficiency/sre_merge", "sre", sre_merge)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "sre-merge-tome": ("argsort(-cos.max", "argsort(cos.max", "whose best cosine is largest"),
    "sre-merge-entropy": (
        "np.maximum(entropy(window), 0.01)",
        "np.log(window.sum(axis=1))",
        "with a window of one patch",
    ),
    "sre-merge-norm": ("v @ cosines @ v", "v @ v", "parallel vectors"),
    "sre-merge-flops": ("(left - merged) * d**2", "left * d**2", "ViT-B with"),
    "sre-merge-clutter": ("contrast * company**2 *", "contrast *", "must rise"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    EXERCISES.refuse(label, *SLIPS[label])
