"""A notebook to grade: the teacher's cells in the teacher's order, with the student's answers in.

Of a submission only the text of answers and of the student's own cells is used. Tests and set-up
come from the course; cells that were deleted come back, copies lose their claim to points.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

MAX_SUBMISSION = 20 * 2**20
"""Bytes of a submitted notebook that are read."""


class Unreadable(ValueError):
    """A submission that is no notebook; the message says why."""


class Assembled(NamedTuple):
    """A notebook ready to run.

    Attributes:
        notebook: the course's cells with the student's answers and own cells.
        roles: what each cell is: ``student`` (code, not trusted), ``setup`` or ``test`` (the
            course's code), ``text``.
        notes: what was found and repaired, for the teacher.
    """

    notebook: NotebookNode
    roles: list[str]
    notes: list[str]


def preprocess(nb: NotebookNode, names: list[str], resources: dict) -> NotebookNode:
    """``nb`` after nbgrader's preprocessors of these names, one after the other."""
    import nbgrader.preprocessors

    for name in names:
        nb, resources = getattr(nbgrader.preprocessors, name)().preprocess(nb, resources)
    return nb


def template(source: Path) -> NotebookNode:
    """The lab of ``source`` with solutions taken out and hidden tests left in.

    This is what nbgrader keeps in its gradebook, and what submissions are laid into.
    """
    nb = nbformat.read(source, as_version=4)
    steps = ["LockCells", "ClearSolutions", "ClearOutput", "CheckCellMetadata", "ComputeChecksums"]
    return preprocess(nb, steps, {})


def release(source: Path) -> NotebookNode:
    """The students' version of the lab of ``source``: no solutions, no hidden tests."""
    steps = ["ClearHiddenTests", "ClearMarkScheme", "ComputeChecksums", "CheckCellMetadata"]
    nb = preprocess(template(source), steps, {})
    nb.metadata.pop("jupytext", None)  # students have one file, not a pair
    return nb


def read_submission(path: Path) -> NotebookNode:
    """A submitted notebook, of any version of the format.

    Raises:
        Unreadable: a link, a file that is too long or is no notebook.
    """
    if path.is_symlink() or not path.is_file():
        raise Unreadable("no regular file")
    if path.stat().st_size > MAX_SUBMISSION:
        raise Unreadable(f"longer than {MAX_SUBMISSION // 2**20} MiB")
    try:
        nb = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
        cells = nb.cells
        for cell in cells:
            if not isinstance(cell.source, str) or not isinstance(cell.metadata, dict):
                raise TypeError("a cell without text")
            str(cell.cell_type)
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except Exception as error:  # whatever a broken file makes the reader raise
        raise Unreadable(f"not a notebook: {type(error).__name__}: {str(error)[:200]}") from None
    return nb


def grade_id(cell: NotebookNode) -> str | None:
    """The cell's name in the course, or None for one that has none."""
    found = cell.metadata.get("nbgrader")
    name = found.get("grade_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def role(cell: NotebookNode) -> str:
    """What a cell of the template is; see :class:`Assembled`."""
    from nbgrader import utils

    if cell.cell_type != "code":
        return "text"
    if utils.is_solution(cell):
        return "student"
    return "test" if utils.is_grade(cell) else "setup"


def assemble(lab: NotebookNode, submission: NotebookNode) -> Assembled:
    """Lay a submission into the lab's template.

    A named cell of the template keeps its place. An answer takes the student's text; everything
    else keeps the course's. The student's own cells follow the named cell that they followed; a
    second cell of the same name is one of the student's own.
    """
    named = {grade_id(c): c for c in lab.cells if grade_id(c)}
    answers: dict[str, str] = {}
    own: dict[str | None, list[NotebookNode]] = {None: []}
    notes: list[str] = []
    here: str | None = None
    seen: Counter = Counter()
    for cell in submission.cells:
        name = grade_id(cell)
        if name in named:
            seen[name] += 1
            if seen[name] == 1:
                here = name
                answers[name] = cell.source
                continue
            if role(named[name]) != "student":
                continue
        own.setdefault(here, []).append(_own_cell(cell))
    for name, count in seen.items():
        if count > 1:
            notes.append(f"cell {name} occurs {count} times: the first one counts")
    cells, roles = (
        list(own[None]),
        ["student" if c.cell_type == "code" else "text" for c in own[None]],
    )
    for name, original in named.items():
        cell = nbformat.from_dict(original)
        kind = role(original)
        is_answer = bool(original.metadata.nbgrader.get("solution"))
        if name not in answers:
            notes.append(f"cell {name} was missing and was put back")
        elif is_answer:
            cell.source = answers[name]
        elif answers[name] != original.source and not _hides_tests(original):
            notes.append(f"cell {name} was changed and was put back")
        cells.append(cell)
        roles.append(kind)
        for extra in own.get(name, ()):
            cells.append(extra)
            roles.append("student" if extra.cell_type == "code" else "text")
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number:04d}"
    nb = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": lab.metadata.kernelspec})
    return Assembled(nb, roles, notes)


def _hides_tests(cell: NotebookNode) -> bool:
    return "### BEGIN HIDDEN TESTS" in cell.source or "=== BEGIN MARK SCHEME" in cell.source


def _own_cell(cell: NotebookNode) -> NotebookNode:
    """One of the student's own cells, with nothing but its text."""
    if cell.cell_type == "code":
        return nbformat.v4.new_code_cell(cell.source)
    return nbformat.v4.new_markdown_cell(cell.source)
