"""Where the files of a course lie: nbgrader's folders, one notebook a lab, its name the lab's."""

import contextlib
import difflib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STUDENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
"""What a student's name may be: it becomes a folder's name."""


@dataclass(frozen=True)
class Course:
    """A course folder.

    Attributes:
        root: the folder that holds ``source``, ``release``, ``submitted``, ``autograded`` and
            ``gradebook.db``.
    """

    root: Path

    @classmethod
    def default(cls) -> "Course":
        """The course of this checkout, in ``labs``."""
        from icmllab.notebook.chapters import root

        return cls(root() / "labs")

    @property
    def db_url(self) -> str:
        """Where nbgrader keeps marks; it waits for a gradebook that another program holds."""
        return f"sqlite:///{self.root / 'gradebook.db'}?timeout=60"

    def labs(self) -> list[str]:
        """The labs there are, sorted."""
        found = self.root.glob("source/*/*.ipynb")
        return sorted(p.stem for p in found if p.stem == p.parent.name)

    def find_lab(self, name: str | None) -> str:
        """``name`` if there is such a lab; else a ValueError that lists near matches."""
        labs = self.labs()
        if name in labs:
            return name
        near = difflib.get_close_matches(name or "", labs, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the labs are: {', '.join(labs)}"
        raise ValueError(f"LAB={name or ''} is not a lab; {hint}")

    def source(self, lab: str) -> Path:
        """The teacher's notebook, with solutions and hidden tests."""
        return self.root / "source" / lab / f"{lab}.ipynb"

    def released(self, lab: str) -> Path:
        """The students' notebook."""
        return self.root / "release" / lab / f"{lab}.ipynb"

    def submitted(self, lab: str, student: str) -> Path:
        """What a student handed in."""
        return self.root / "submitted" / student / lab / f"{lab}.ipynb"

    def autograded(self, lab: str, student: str) -> Path:
        """The notebook after grading, with outputs."""
        return self.root / "autograded" / student / lab / f"{lab}.ipynb"

    def record(self, lab: str, student: str) -> Path:
        """What the grading of a submission found; it is written last."""
        return self.autograded(lab, student).with_name("grading.json")

    def students(self, lab: str) -> list[str]:
        """Who handed in ``lab``, sorted; names that cannot be folders of ours are left out."""
        folders = self.root.glob(f"submitted/*/{lab}")
        return sorted(f.parent.name for f in folders if STUDENT.fullmatch(f.parent.name))


@contextlib.contextmanager
def open_gradebook(course: Course) -> Iterator:
    """nbgrader's gradebook of the course, made first where there is none."""
    from nbgrader.api import Gradebook

    if not (course.root / "gradebook.db").exists():
        _make_gradebook(course)
    with warnings.catch_warnings(), Gradebook(course.db_url) as gradebook:
        # nbgrader's own order of adding rows makes SQLAlchemy wonder
        warnings.filterwarnings("ignore", message="Object of type <Submitted")
        yield gradebook


def _make_gradebook(course: Course) -> None:
    """An empty gradebook, whole or not at all: nbgrader takes a half-made one for an old one."""
    from nbgrader.api import Gradebook

    path = os.environ.get("PATH", "")
    # nbgrader starts alembic, which lies beside this Python
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    try:
        with tempfile.TemporaryDirectory(dir=course.root, prefix=".gradebook-") as folder:
            made = Path(folder) / "gradebook.db"
            Gradebook(f"sqlite:///{made}").close()
            os.replace(made, course.root / "gradebook.db")
    finally:
        os.environ["PATH"] = path
