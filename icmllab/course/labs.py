"""Labs as files: the pair of a notebook and its text, and the students' version."""

from pathlib import Path

import nbformat

from icmllab.course.assemble import preprocess, release, template
from icmllab.course.paths import Course, open_gradebook
from icmllab.notebook.chapters import write_notebook


def read_text_half(path: Path):
    """The lab's notebook as its ``.md`` says; ids and versions are those of no tool."""
    import jupytext

    nb = jupytext.read(path, fmt="md:myst")
    nb.metadata.get("jupytext", {}).pop("text_representation", None)
    for number, cell in enumerate(nb.cells):
        cell["id"] = f"cell-{number:03d}"
    return nb


def content(nb) -> list[tuple]:
    """What a teacher wrote: each cell's kind, text and nbgrader's metadata."""
    return [
        (c.cell_type, c.source.strip(), sorted(dict(c.metadata.get("nbgrader", {})).items()))
        for c in nb.cells
    ]


def is_in_step(course: Course, lab: str) -> bool:
    """Whether ``<lab>.ipynb`` says what ``<lab>.md`` says."""
    path = course.source(lab)
    if not path.is_file():
        return False
    text = read_text_half(path.with_suffix(".md"))
    return content(nbformat.read(path, as_version=4)) == content(text)


def sync(course: Course, lab: str) -> None:
    """Write ``<lab>.ipynb`` from ``<lab>.md``, in one step."""
    path = course.source(lab)
    write_notebook(path, read_text_half(path.with_suffix(".md")))


def make_release(course: Course, lab: str) -> Path:
    """Write the students' version and tell the gradebook what the lab asks.

    Returns:
        Where it is. The file is replaced in one step.

    Raises:
        ValueError: no such lab, cells that nbgrader refuses, or cells added or taken away after
            students handed in.
    """
    lab = course.find_lab(lab)
    source = course.source(lab)
    nb = release(source)
    register(course, lab)
    write_notebook(course.released(lab), nb)
    return course.released(lab)


def register(course: Course, lab: str) -> None:
    """Enter the lab's cells and points into the gradebook.

    Raises:
        ValueError: cells were added or taken away although there are marks for the lab.
    """
    with open_gradebook(course) as gradebook:
        gradebook.update_or_create_assignment(lab)
    resources = {"nbgrader": {"notebook": lab, "assignment": lab, "db_url": course.db_url}}
    try:
        preprocess(template(course.source(lab)), ["SaveCells"], resources)
    except RuntimeError as error:
        raise ValueError(
            f"lab {lab} has marks already, so its graded cells can't be added or taken away: "
            f"{error}. Undo the change, or remove {lab} from the gradebook "
            f"(nbgrader db assignment remove {lab}) and grade anew"
        ) from None
