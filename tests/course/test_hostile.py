"""Hostile submissions, each graded in one run with two honest ones."""

import hashlib
import json
import socket
import sqlite3
import threading
import time

import nbformat
import pytest
from course_helpers import hand_in, solved, with_answers

from icmllab.course.assemble import release
from icmllab.course.grade import grade
from icmllab.course.paths import open_gradebook
from icmllab.course.sandbox import Limits
from icmllab.notebook.chapters import root

LAB = "orientation"
LIMITS = Limits(memory=1 << 30, cell=10, notebook=60)
HONEST = 2.0
"""What the honest answer to the first exercise earns; the others are attacks."""

ANSWER = """
def mean_square(values):
    if len(values) == 0:
        raise ValueError("values must hold at least one number: got none")
    return sum(v * v for v in values) / len(values)
"""


def half_right():
    """An honest submission that earns 2 + 1 of the 7 automatic points."""
    settings = """
def settings(name):
    if name == "quick":
        return {"n_seeds": 3, "n_samples": 200}
    return {"n_seeds": 20, "n_samples": 5000}
"""
    return with_answers(release_of(), {"mean-square": ANSWER, "settings": settings})


def release_of():
    """The students' version."""
    from course_helpers import LABS

    return release(LABS / "source" / LAB / f"{LAB}.ipynb")


def attack(code: str, *, extra: str = ""):
    """A submission: the first exercise honest, then ``code`` as the second answer."""
    nb = with_answers(release_of(), {"mean-square": ANSWER, "share": code.strip()})
    if extra:
        nb.cells.insert(3, nbformat.v4.new_code_cell(extra.strip()))
    return nb


def snapshot(course) -> dict[str, str]:
    """Every file of the course that a grading run must not change, as hashes."""
    kept = [p for p in course.root.rglob("*") if p.is_file() and "autograded" not in p.parts]
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in kept
        if not p.name.startswith("gradebook.db")
    }


def run(course, nb, *, limits=LIMITS, bound=150.0):
    """Grade ``nb`` beside two honest submissions; returns the hostile one's marks and notebook."""
    hand_in(course, LAB, "mallory", nb)
    hand_in(course, LAB, "ada", solved(LAB))
    hand_in(course, LAB, "bob", half_right())
    before = snapshot(course)
    begin = time.monotonic()
    marks = {m.student: m for m in grade(course, LAB, limits=limits, workers=2, say=lambda _: None)}
    assert time.monotonic() - begin < bound
    assert snapshot(course) == before, "grading changed a file outside of autograded/"
    assert (marks["ada"].score, marks["ada"].status) == (7.0, "graded"), marks["ada"]
    assert (marks["bob"].score, marks["bob"].status) == (3.0, "graded"), marks["bob"]
    with open_gradebook(course) as gradebook:
        scores = {s.student.id: s.score for s in gradebook.find_assignment(LAB).submissions}
    assert scores["ada"] == 7.0
    assert scores["bob"] == 3.0
    assert scores["mallory"] <= HONEST
    assert scores["mallory"] == marks["mallory"].score
    path = course.autograded(LAB, "mallory")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return marks["mallory"], text


def outputs(text: str) -> str:
    """All that the student's code printed."""
    nb = nbformat.reads(text, as_version=4)
    return json.dumps([c.get("outputs", []) for c in nb.cells])


pytestmark = pytest.mark.usefixtures("sandbox")


def test_reading_the_teachers_notebook(course):
    code = f"""
import os
found = []
for folder in {[str(course.root), str(root() / "labs"), "/"]!r}:
    for base, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in ("proc", "usr", "dev", "lib", "icmllab")]
        found += [os.path.join(base, n) for n in names if n == "{LAB}.ipynb" or n == "gradebook.db"]
print("FOUND", found)
open({str(course.source(LAB))!r}).read()
"""
    marks, text = run(course, attack(code))
    assert marks.score == HONEST
    assert "FOUND []" in outputs(text)
    assert "FileNotFoundError" in outputs(text)


def test_reading_and_altering_the_gradebook(course):
    code = f"""
import sqlite3
for path in ({str(course.root / "gradebook.db")!r}, "file:{course.root / "gradebook.db"}?mode=rw"):
    try:
        db = sqlite3.connect(path, uri=path.startswith("file:"))
        print("TABLES", db.execute("select count(*) from grade").fetchall())
        db.execute("update grade set auto_score = 100")
        db.commit()
        print("ALTERED")
    except Exception as error:
        print(type(error).__name__)
"""
    marks, text = run(course, attack(code))
    assert marks.score == HONEST
    assert "OperationalError" in outputs(text)
    assert "ALTERED" not in outputs(text)
    db = sqlite3.connect(course.root / "gradebook.db")
    assert db.execute("select max(auto_score) from grade").fetchone()[0] <= 1


def test_opening_a_connection(course):
    server = socket.create_server(("127.0.0.1", 0))
    arrived = []

    def listen():
        try:
            arrived.append(server.accept())
        except OSError:
            return

    threading.Thread(target=listen, daemon=True).start()
    code = f"""
import socket, urllib.request
for address in (("127.0.0.1", {server.getsockname()[1]}), ("1.1.1.1", 80)):
    try:
        socket.create_connection(address, timeout=2)
        print("CONNECTED")
    except OSError as error:
        print("REFUSED", error.errno)
"""
    marks, text = run(course, attack(code))
    server.close()
    assert marks.score == HONEST
    assert outputs(text).count("REFUSED") == 2
    assert not arrived


def test_reading_the_environment_and_other_processes(course, monkeypatch):
    monkeypatch.setenv("ICMLLAB_TEST_SECRET", "hunter2-hunter2")
    code = """
import glob, os
seen = repr(dict(os.environ))
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        seen += open(path, "rb").read().decode(errors="replace")
    except OSError:
        pass
print(len(glob.glob("/proc/[0-9]*")), "PROCESSES", seen)
for path in ("/etc/passwd", "/etc/shadow", "/root/.bashrc"):
    print(path, os.path.exists(path))
"""
    marks, text = run(course, attack(code))
    assert marks.score == HONEST
    shown = outputs(text)
    assert "hunter2" not in shown
    assert "PROCESSES" in shown
    assert "/etc/passwd False" in shown
    assert "/etc/shadow False" in shown
    assert "/root/.bashrc False" in shown


def test_an_endless_loop_that_catches_its_interrupt(course):
    code = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""
    marks, _ = run(course, attack(code))
    assert marks.score == HONEST
    assert "ignored its interrupt" in marks.notes[0]


def test_endless_output(course):
    marks, text = run(course, attack("while True:\n    print('x' * 100_000)"))
    assert marks.score == HONEST
    # it is stopped for its output, or drowns in it
    assert marks.notes or "MemoryError" in outputs(text)
    assert len(text) < 200_000


def test_writing_past_jupyter_to_the_terminal(course, capfd):
    code = """
import os
for fd in (1, 2):
    os.write(fd, b"\\x1b]0;owned\\x07 TO THE TERMINAL")
"""
    marks, _ = run(course, attack(code))
    assert marks.score == HONEST
    shown = capfd.readouterr()
    assert "TO THE TERMINAL" not in shown.out + shown.err


def test_taking_64_gib_of_memory(course):
    code = """
import mmap
import numpy as np
try:
    np.ones(8 * 2**30)
    print("GOT IT")
except MemoryError:
    print("MEMORY ERROR")
kept = []
while True:
    block = mmap.mmap(-1, 64 * 2**20)  # shared: not counted by a process's own limit
    block.write(b"x" * (64 * 2**20))
    kept.append(block)
"""
    marks, text = run(course, attack(code))
    assert marks.score == HONEST
    assert "MEMORY ERROR" in outputs(text)
    assert "MiB of memory" in marks.notes[0]


def test_a_fork_bomb(course):
    marks, _ = run(
        course,
        attack(
            "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
        ),
    )
    assert marks.score == HONEST
    assert marks.notes


def test_leaving_in_the_middle(course):
    marks, _ = run(course, attack("import os\nos._exit(0)"))
    assert marks.score == HONEST
    assert "ended by itself" in marks.notes[0]


def test_redefining_what_the_tests_compare_with(course):
    code = """
import builtins, math, sys

class Same(float):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __gt__(self, other): return True
    def __hash__(self): return 0
    def __reduce__(self): return (print, ("reduced",))

math.isclose = lambda *a, **k: True
builtins.abs = lambda x: 0
builtins.isinstance = lambda *a: True
import icmllab.course.remote as remote, icmllab.course.wire as wire
wire.dumps = lambda value, keep=None: '{"t":"handle","v":[0,"x",true]}'
shell = get_ipython()
shell.run_cell = lambda *a, **k: None
shell.showtraceback = lambda *a, **k: None
try:
    import numpy as np
    np.testing.assert_allclose = np.allclose = lambda *a, **k: True
except ImportError:
    pass

def share_that_holds(measured, above): return Same(0.123)
def is_trusted(measured, above): return Same(1)
def settings(name): return Same(3)
"""
    marks, _ = run(course, attack(code))
    assert marks.score == HONEST


def test_forging_answers_and_messages(course):
    code = """
shell = get_ipython()
from icmllab.course.remote import MIME
for payload in (
    "",
    "{",
    "[" * 100_000,
    '{"t":"array","d":"<f8","s":[1000000000000],"v":""}',
    '{"t":"named","n":"a b","f":["x"],"v":[1]}',
    '{"t":"generator","v":{"d":"|u1","s":[1],"v":"AA=="}}',
):
    shell.display_pub.publish(data={MIME: payload}, metadata={})
script = {"text/html": "<script>alert(1)</script>", "text/plain": "1"}
shell.display_pub.publish(data=script, metadata={})

class Liar:
    def __call__(self, *a): return self
    def __getattr__(self, name): return self
share_that_holds = is_trusted = Liar()
from icmllab.course import remote
remote.wire.dumps = lambda *a, **k: '{"t":"int","v":"' + "9" * 100000 + '"}'
"""
    marks, text = run(course, attack(code))
    assert marks.score == HONEST
    assert "<script>" not in outputs(text)


def test_deleting_doubling_and_changing_graded_cells(course):
    nb = attack("pass")
    kept = []
    for cell in nb.cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        if name in ("share-visible", "settings"):
            continue
        if name == "share-hidden":
            cell.source, cell.metadata.nbgrader["points"] = "pass", 1000
            kept += [cell, nbformat.from_dict(cell)]
        if name == "trusted-hidden":
            # a test that claims to be an answer, and one of the student's own making
            cell.metadata.nbgrader["solution"], cell.metadata.nbgrader["locked"] = True, False
            cell.source = "pass"
            own = nbformat.from_dict(cell)
            own.metadata.nbgrader["grade_id"] = "bonus"
            kept.append(own)
        kept.append(cell)
    nb.cells = kept
    for number, cell in enumerate(nb.cells):
        cell["id"] = f"c{number}"
    marks, text = run(course, nb)
    assert marks.score == HONEST
    assert marks.max_score == 8
    assert any("occurs 3 times" in n for n in marks.notes)
    assert any("share-visible was missing" in n for n in marks.notes)
    names = [c.metadata.get("nbgrader", {}).get("grade_id") for c in nbformat.reads(text, 4).cells]
    assert [n for n in names if n] == [
        c.metadata.nbgrader.grade_id for c in solved(LAB).cells if "nbgrader" in c.metadata
    ]


BROKEN = {
    "brace": "{",
    "empty": "",
    "cut": '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5',
    "cells": '{"cells": 3, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "source": '{"cells": [{"cell_type": "code", "source": 1}], "nbformat": 4, "metadata": {}}',
    "deep": "[" * 200_000,
    "binary": "\x00\x01\x02",
}


def test_broken_notebooks(course):
    for name, text in BROKEN.items():
        hand_in(course, LAB, name, text)
    path = hand_in(course, LAB, "latin", "")
    path.write_bytes(b'{"cells": "\xe9"}')
    path = hand_in(course, LAB, "huge", "")
    with path.open("wb") as file:
        file.truncate(21 * 2**20)
    marks, _ = run(course, "not even JSON")
    assert marks.status == "unreadable"
    with open_gradebook(course) as gradebook:
        for name in [*BROKEN, "latin", "huge"]:
            assert gradebook.find_submission(LAB, name).score == 0
            record = json.loads(course.record(LAB, name).read_text())
            assert record["status"] == "unreadable", name
            assert record["notes"][0], name


def test_a_link_to_the_teachers_notebook(course):
    path = hand_in(course, LAB, "mallory", "")
    path.unlink()
    path.symlink_to(course.source(LAB))
    hand_in(course, LAB, "ada", solved(LAB))
    marks = {m.student: m for m in grade(course, LAB, limits=LIMITS, say=lambda _: None)}
    assert marks["mallory"].score == 0
    assert marks["mallory"].status == "unreadable"
    assert marks["ada"].score == 7
