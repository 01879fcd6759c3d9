"""Grade every submission of a lab, each in a process and a sandbox of its own.

The processes only run notebooks; this one alone writes marks, one submission at a time, and a
record last. So a run that is killed anywhere can be started again: what has a record is kept, the
rest is done.
"""

import ctypes
import hashlib
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import nbformat

from icmllab.course.assemble import (
    Unreadable,
    assemble,
    preprocess,
    read_submission,
    role,
    template,
)
from icmllab.course.execute import execute
from icmllab.course.labs import register
from icmllab.course.paths import Course, open_gradebook
from icmllab.course.sandbox import Limits, require
from icmllab.notebook.chapters import write_notebook
from icmllab.notebook.sweep import write_text

VERSION = 1
"""Changes when marks could come out otherwise: records of another version are done again."""

PROCESS_MEMORY = 8 * 2**30
"""Bytes of data that a grading process may take itself."""


class Marked(NamedTuple):
    """How one submission came out.

    Attributes:
        student: who handed it in.
        status: ``graded``, ``unreadable`` (no marks), or ``failed`` (to be done again: the
            fault is not the student's).
        score: points, or None when failed.
        max_score: points to be had.
        seconds: how long it took.
        notes: what a teacher should know.
    """

    student: str
    status: str
    score: float | None
    max_score: float
    seconds: float
    notes: list[str]


def digest(lab, submission: Path, *, sandboxed: bool) -> str:
    """What a mark depends on, as a hash: the lab, the submission, how it is graded."""
    parts = [str(VERSION), str(sandboxed), nbformat.writes(lab)]
    hashed = hashlib.sha256("\0".join(parts).encode())
    if submission.is_file() and not submission.is_symlink():
        with submission.open("rb") as file:
            while block := file.read(2**20):
                hashed.update(block)
    return hashed.hexdigest()


def grade(
    course: Course,
    lab: str,
    *,
    sandboxed: bool = True,
    limits: Limits | None = None,
    workers: int | None = None,
    again: bool = False,
    say: Callable[[str], object] = print,
) -> list[Marked]:
    """Grade the submissions of ``lab`` that have no marks yet.

    Args:
        course: the course's folders.
        lab: the lab's name.
        sandboxed: False runs students' code without walls.
        limits: what one student's code may use; None is :class:`Limits`'s defaults.
        workers: submissions at a time; None is the number of cores.
        again: grade all anew.
        say: called with a line for each submission.

    Returns:
        One entry a submission, sorted by student, earlier marks included.

    Raises:
        ValueError: no such lab.
        SandboxError: no sandbox can be made here; nothing was run.
    """
    lab = course.find_lab(lab)
    if sandboxed:
        require()
    limits = limits or Limits()
    blank = template(course.source(lab))
    register(course, lab)
    top = sum(float(c.metadata.nbgrader.points) for c in blank.cells if _graded(c))
    students = course.students(lab)
    done: dict[str, Marked] = {}
    todo: list[tuple[str, str]] = []
    for student in students:
        key = digest(blank, course.submitted(lab, student), sandboxed=sandboxed)
        kept = None if again else _kept(course, lab, student, key, top)
        if kept is None:
            todo.append((student, key))
        else:
            done[student] = kept
    if done:
        say(f"{len(done)} of {len(students)} have their marks from before")
    _preload(blank)
    with tempfile.TemporaryDirectory(prefix="icmllab-grading-") as folder:
        jobs = _run_all(
            course,
            lab,
            blank,
            todo,
            Path(folder),
            limits,
            sandboxed,
            workers or os.cpu_count() or 1,
        )
        for outcome in jobs:
            marked = _book(course, lab, outcome, top)
            done[marked.student] = marked
            score = "no marks" if marked.score is None else f"{marked.score:g}/{top:g}"
            note = f"  ({'; '.join(marked.notes)})" if marked.notes else ""
            say(f"{len(done):>4}/{len(students)}  {marked.student}  {score}{note}")
    return [done[s] for s in students]


def _graded(cell) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get("grade"))


def _preload(blank) -> None:
    """Import once, here, what the course's cells import: the processes start with it."""
    import ast

    for cell in blank.cells:
        if role(cell) not in ("test", "setup"):
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                try:
                    importlib.import_module(name)
                except ImportError:  # "from module import function" names no module
                    continue


class _Job(NamedTuple):
    student: str
    key: str
    process: object
    result: Path
    begin: float


class _Outcome(NamedTuple):
    student: str
    key: str
    found: dict
    seconds: float


def _run_all(course, lab, blank, todo, folder, limits, sandboxed, workers):
    """Run the processes, so many at a time; yields each outcome as it comes."""
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    patience = limits.notebook + 120
    waiting, running = list(todo), {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                student, key = waiting.pop(0)
                result = folder / f"{len(todo) - len(waiting)}.json"
                args = (course.submitted(lab, student), blank, limits, sandboxed, result)
                process = context.Process(target=_run_one, args=args, daemon=True)
                process.start()
                running[process.sentinel] = _Job(student, key, process, result, time.monotonic())
            ready = wait(list(running), timeout=1.0)
            for sentinel, job in list(running.items()):
                seconds = time.monotonic() - job.begin
                if sentinel not in ready and seconds <= patience:
                    continue
                if job.process.is_alive():
                    job.process.kill()
                job.process.join()
                del running[sentinel]
                if job.result.is_file():
                    found = json.loads(job.result.read_text(encoding="utf-8"))
                else:
                    found = {"status": "failed", "notes": ["the grading process ended early"]}
                yield _Outcome(job.student, job.key, found, seconds)
    finally:
        for job in running.values():
            job.process.kill()
            job.process.join()


def _run_one(submission: Path, blank, limits: Limits, sandboxed: bool, result: Path) -> None:
    """One submission, in a process of its own: run it and leave the outcome in ``result``."""
    if sys.platform == "linux":
        # 1: PR_SET_PDEATHSIG: nobody grades on when the run was killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_DATA, (PROCESS_MEMORY, PROCESS_MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assembled = assemble(blank, read_submission(submission))
        done = execute(assembled, limits=limits, sandboxed=sandboxed)
        found = {
            "status": "graded",
            "notes": done.notes,
            "notebook": nbformat.writes(done.notebook),
        }
    except Unreadable as error:
        found = {"status": "unreadable", "notes": [str(error)]}
    except Exception as error:
        traceback.print_exc()
        found = {"status": "failed", "notes": [f"{type(error).__name__}: {error}"]}
    write_text(result, json.dumps(found))


def _resources(course: Course, lab: str, student: str) -> dict:
    names = {"notebook": lab, "assignment": lab, "student": student, "db_url": course.db_url}
    return {"nbgrader": names}


def _book(course: Course, lab: str, outcome: _Outcome, top: float) -> Marked:
    """Write a submission's notebook, its marks and last its record."""
    student, found = outcome.student, outcome.found
    seconds, notes = round(outcome.seconds, 2), found["notes"]
    if found["status"] == "failed":
        return Marked(student, "failed", None, top, seconds, notes)
    _enter(course, lab, student)
    if found["status"] == "graded":
        nb = nbformat.reads(found["notebook"], as_version=4)
        write_notebook(course.autograded(lab, student), nb)
        steps = ["SaveAutoGrades", "AssignLatePenalties"]
        preprocess(nb, steps, _resources(course, lab, student))
    else:
        course.autograded(lab, student).unlink(missing_ok=True)
        _no_points(course, lab, student)
    score = _score(course, lab, student)
    record = {
        "version": VERSION,
        "digest": outcome.key,
        "status": found["status"],
        "notes": notes,
        "seconds": seconds,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_text(course.record(lab, student), json.dumps(record, indent=1) + "\n")
    return Marked(student, found["status"], score, top, seconds, notes)


def _enter(course: Course, lab: str, student: str) -> None:
    from nbgrader.utils import parse_utc

    when = course.submitted(lab, student).with_name("timestamp.txt")
    extra = {}
    if when.is_file() and not when.is_symlink():
        try:
            extra["timestamp"] = parse_utc(when.read_text(encoding="utf-8")[:100].strip())
        except ValueError:
            extra = {}
    with open_gradebook(course) as gradebook:
        gradebook.update_or_create_student(student)
        gradebook.update_or_create_submission(lab, student, **extra)


def _no_points(course: Course, lab: str, student: str) -> None:
    with open_gradebook(course) as gradebook:
        submission = gradebook.find_submission_notebook(lab, lab, student)
        for entry in submission.grades:
            entry.auto_score = 0
            entry.needs_manual_grade = False
        gradebook.db.commit()


def _score(course: Course, lab: str, student: str) -> float:
    with open_gradebook(course) as gradebook:
        return float(gradebook.find_submission(lab, student).score)


def _kept(course: Course, lab: str, student: str, key: str, top: float) -> Marked | None:
    """The marks that an earlier run left for exactly this submission, or None."""
    from nbgrader.api import MissingEntry

    try:
        record = json.loads(course.record(lab, student).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if record.get("digest") != key:
        return None
    with open_gradebook(course) as gradebook:
        try:
            score = float(gradebook.find_submission(lab, student).score)
        except MissingEntry:
            return None
    return Marked(student, record["status"], score, top, record["seconds"], record["notes"])
