"""Every mark of the course as one table, for an LMS."""

import json
from pathlib import Path

from icmllab.course.paths import Course, open_gradebook
from icmllab.notebook.sweep import write_text

COLUMNS = [
    "student",
    "lab",
    "score",
    "max_score",
    "auto_score",
    "manual_score",
    "needs_manual_grade",
    "late_seconds",
    "late_penalty",
    "status",
    "notes",
]


def table(course: Course):
    """A pandas DataFrame, one row a student and lab, in the order of :data:`COLUMNS`.

    ``status`` is ``graded``, ``unreadable``, ``missing``, or ``not graded`` (handed in, no marks).
    """
    import pandas as pd
    from nbgrader.api import MissingEntry

    rows = []
    with open_gradebook(course) as gradebook:
        labs = [a for a in gradebook.assignments if a.name in course.labs()]
        students = {s.id for s in gradebook.students}
        for lab in labs:
            handed_in = set(course.students(lab.name))
            for student in sorted(students | handed_in):
                row = dict.fromkeys(COLUMNS) | {"student": student, "lab": lab.name}
                row |= {"score": 0.0, "max_score": lab.max_score, "notes": ""}
                row["status"] = "not graded" if student in handed_in else "missing"
                try:
                    found = gradebook.find_submission(lab.name, student)
                except MissingEntry:
                    rows.append(row)
                    continue
                row["status"], row["notes"] = _record(course, lab.name, student, row["status"])
                manual = sum(g.manual_score or 0 for n in found.notebooks for g in n.grades)
                automatic = sum(g.auto_score or 0 for n in found.notebooks for g in n.grades)
                penalty = sum(n.late_submission_penalty or 0 for n in found.notebooks)
                row |= {
                    "score": found.score - penalty,
                    "auto_score": automatic,
                    "manual_score": manual,
                    "needs_manual_grade": bool(found.needs_manual_grade),
                    "late_seconds": found.total_seconds_late,
                    "late_penalty": penalty,
                }
                rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def _record(course: Course, lab: str, student: str, otherwise: str) -> tuple[str, str]:
    try:
        record = json.loads(course.record(lab, student).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return otherwise, ""
    return record["status"], "; ".join(record["notes"])


def write_csv(course: Course, path: Path) -> int:
    """Write the table to ``path`` in one step; returns the number of rows."""
    found = table(course)
    write_text(path, found.to_csv(index=False))
    return len(found)
