"""The chapter's solutions, run as they are printed."""

import re

import pytest

from icmllab.notebook import chapters
from icmllab.representations import stitching

TEXT = chapters.source_path("representations/stitching").read_text(encoding="utf-8")
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
    assert re.search(r"^st\.check_\w+\(fn\)$", code, re.M)
    exec(compile(code, label, "exec"), {"st": stitching})


# each solution with one plausible slip, and what its checker then says
SLIPS = {
    "stitching-slm": ("mean_b - W @ mean_a", "mean_b", "must minimise"),
    "stitching-invert": ("range(200)", "range(20)", "mean residual"),
    "stitching-linear": (
        "return unseen(G_B, G_A), unseen(G_A, G_B)",
        "return unseen(G_A, G_B), unseen(G_B, G_A)",
        "f must be",
    ),
    "stitching-cue": ("bc[0] > bc[1]", "bc[0] < bc[1]", "uses the"),
    "stitching-mixed": ("a.y[half], b.y[rest]", "a.y[half], a.y[rest]", "go by its colour"),
}


@pytest.mark.parametrize("label", sorted(SLIPS))
def test_solution_with_a_slip_is_refused(label):
    right, wrong, message = SLIPS[label]
    assert right in SOLUTIONS[label]
    code = SOLUTIONS[label].replace(right, wrong)
    with pytest.raises(AssertionError, match=message):
        exec(compile(code, label, "exec"), {"st": stitching})
