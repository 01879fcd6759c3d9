"""Submissions made from the real labs."""

from pathlib import Path

import nbformat

from icmllab.course.paths import Course
from icmllab.course.sandbox import SandboxError, require
from icmllab.notebook.chapters import root

LABS = root() / "labs"


def sandbox_missing() -> str | None:
    """Why there is no sandbox on this machine, or None."""
    try:
        require()
    except SandboxError as error:
        return str(error)
    return None


def solved(lab: str) -> nbformat.NotebookNode:
    """The teacher's notebook: every answer right."""
    return nbformat.read(LABS / "source" / lab / f"{lab}.ipynb", as_version=4)


def answers_of(nb) -> dict[str, str]:
    """The text of each answer cell, by name."""
    cells = (c for c in nb.cells if c.metadata.get("nbgrader", {}).get("solution"))
    return {c.metadata.nbgrader.grade_id: c.source for c in cells}


def with_answers(nb, answers: dict[str, str]):
    """``nb`` with the text of some answer cells replaced."""
    nb = nbformat.from_dict(nb)
    left = dict(answers)
    for cell in nb.cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        if name in left:
            cell.source = left.pop(name)
    assert not left, f"no such cells: {sorted(left)}"
    return nb


def hand_in(course: Course, lab: str, student: str, nb) -> Path:
    """Put a notebook (or any text) where a student's submission lies."""
    path = course.submitted(lab, student)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nb if isinstance(nb, str) else nbformat.writes(nb), encoding="utf-8")
    return path


def marks_in_process(nb) -> dict[str, float]:
    """Points of each test cell when the whole notebook runs in one process, as for a student."""
    names: dict[str, object] = {"__name__": "__main__"}
    points = {}
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        info = cell.metadata.get("nbgrader", {})
        try:
            exec(compile(cell.source, info.get("grade_id", "cell"), "exec"), names)
        except Exception:
            if info.get("grade"):
                points[info.grade_id] = 0.0
                continue
            if not info.get("solution"):
                raise
        if info.get("grade"):
            points[info.grade_id] = float(info.points)
    return points
