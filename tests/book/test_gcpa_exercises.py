"""The chapter's solutions, run as they are printed."""

import re

import pytest

from icmllab.notebook import chapters
from icmllab.representations import gcpa

TEXT = chapters.source_path("representations/gcpa").read_text(encoding="utf-8")
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
    assert re.search(r"^gcpa\.check_\w+\(fn\)$", code, re.M)
    exec(compile(code, label, "exec"), {"gcpa": gcpa})


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "gcpa-procrustes": ("A.T @ B", "B.T @ A", "must be"),
    "gcpa-round": ("X.T @ U)", "X.T @ Xs[0])", "minimise"),
    "gcpa-correction": (
        "sum(A.T @ U for A in As) + level",
        "sum(A.T @ U for A in As)",
        "off by",
    ),
    "gcpa-add-model": ("(P @ Qt)[None]", "(P @ Qt).T[None]", "R@1 of the new model"),
    "gcpa-lambda": ("return max(", "return min(", "are expected"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    right, wrong, message = SLIPS[label]
    assert right in SOLUTIONS[label]
    code = SOLUTIONS[label].replace(right, wrong)
    with pytest.raises(AssertionError, match=message):
        exec(compile(code, label, "exec"), {"gcpa": gcpa})
