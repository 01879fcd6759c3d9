"""The chapter's solutions, run as they are printed."""

import pytest
from exercise_helpers import Exercises

from icmllab.representations import aristotelian as ari

EXERCISES = Exercises("representations/aristotelian", "ari", ari)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label, capsys):
    EXERCISES.run(label)


def test_agreement_beyond_the_label_is_smaller_than_all_of_it_and_not_nothing(capsys):
    EXERCISES.run("aristotelian-blocks")
    p_value, beyond, everything = map(float, capsys.readouterr().out.split())
    assert p_value <= 0.05
    assert 0 < beyond < 0.6 * everything
