"""The chapter's solutions, run as they are printed."""

import re

import pytest

from icmllab.notebook import chapters
from icmllab.representations import aristotelian as ari

TEXT = chapters.source_path("representations/aristotelian").read_text(encoding="utf-8")
SOLUTIONS = dict(
    re.findall(r"^````\{solution\} (\S+)\n.*?^```python\n(.*?)^```$", TEXT, re.S | re.M)
)


def test_every_exercise_has_a_solution_with_code():
    labels = re.findall(r"^```\{exercise\}\n:label: (\S+)", TEXT, re.M)
    assert len(labels) == 5
    assert set(SOLUTIONS) == set(labels)


@pytest.mark.parametrize("label", sorted(SOLUTIONS))
def test_solution_passes_its_checker(label, capsys):
    code = SOLUTIONS[label]
    assert re.search(r"^ari\.check_\w+\(fn\)$", code, re.M)
    exec(compile(code, label, "exec"), {"ari": ari})


def test_agreement_beyond_the_label_is_smaller_than_all_of_it_and_not_nothing(capsys):
    exec(SOLUTIONS["aristotelian-blocks"], {"ari": ari})
    p_value, beyond, everything = map(float, capsys.readouterr().out.split())
    assert p_value <= 0.05
    assert 0 < beyond < 0.6 * everything
