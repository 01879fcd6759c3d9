"""The chapter's solutions, run as they are printed."""

import re

import pytest

from icmllab.notebook import chapters
from icmllab.representations import identifiability

TEXT = chapters.source_path("representations/identifiability").read_text(encoding="utf-8")
SOLUTIONS = dict(
    re.findall(r"^````\{solution\} (\S+)\n.*?^```python\n(.*?)^```$", TEXT, re.S | re.M)
)


def test_every_exercise_has_a_solution_with_code():
    labels = re.findall(r"^```\{exercise\}\n:label: (\S+)", TEXT, re.M)
    assert len(labels) == 5
    assert set(SOLUTIONS) == set(labels)


@pytest.mark.parametrize("label", sorted(SOLUTIONS))
def test_solution_passes_its_checker(label):
    code = SOLUTIONS[label]
    assert re.search(r"^idf\.check_\w+\(fn\)$", code, re.M)
    exec(compile(code, label, "exec"), {"idf": identifiability})


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
    right, wrong, message = SLIPS[label]
    assert right in SOLUTIONS[label]
    code = SOLUTIONS[label].replace(right, wrong)
    with pytest.raises(AssertionError, match=message):
        exec(compile(code, label, "exec"), {"idf": identifiability})
