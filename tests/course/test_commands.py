"""The course's commands, and nbgrader's own, which must be as safe."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from course_helpers import LABS, hand_in, solved, with_answers

from icmllab.course.__main__ import main
from icmllab.course.labs import make_release
from icmllab.course.paths import open_gradebook

LAB = "orientation"


def run(course, *arguments) -> int:
    """One command on a course."""
    return main(["--course", str(course.root), *arguments])


def test_a_term_from_release_to_grades(course, capsys, sandbox):
    assert run(course, "release", LAB) == 0
    assert "release/orientation/orientation.ipynb" in capsys.readouterr().out
    done = with_answers(nbformat.read(course.released(LAB), as_version=4), {})
    archive = course.root / "downloaded" / LAB / "all.zip"
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("ada_orientation.ipynb", nbformat.writes(solved(LAB)))
        z.writestr("bob_orientation.ipynb", nbformat.writes(done))
    assert run(course, "collect-zip", LAB) == 0
    assert "2 submissions taken" in capsys.readouterr().out
    assert run(course, "grade", LAB, "--workers", "2") == 0
    shown = capsys.readouterr().out
    assert "ada  7/8" in shown
    assert "bob  0/8" in shown
    assert run(course, "grades") == 0
    rows = (course.root / "grades.csv").read_text().splitlines()
    assert any(r.startswith("ada,orientation,7.0,8.0") for r in rows)


@pytest.mark.parametrize("command", ["release", "collect-zip", "grade"])
def test_an_unknown_lab_is_one_clear_line(course, capsys, command):
    assert run(course, command, "orientatoin") == 2
    assert "did you mean orientation" in capsys.readouterr().err
    assert run(course, command) == 2
    assert "the labs are:" in capsys.readouterr().err


def test_grading_without_the_sandbox_warns(course, capsys):
    assert run(course, "grade", LAB, "--sandbox", "off") == 0
    captured = capsys.readouterr()
    assert "WARNING: SANDBOX=off" in captured.err
    assert "nobody has handed in orientation" in captured.out


def test_without_bubblewrap_the_command_says_what_to_install(course, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert run(course, "grade", LAB) == 2
    assert "sudo apt install bubblewrap" in capsys.readouterr().err


def test_a_text_half_that_differs_is_named_and_written(course, capsys):
    path = course.source(LAB).with_suffix(".md")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("About 15 minutes.", "A quarter of an hour."), encoding="utf-8")
    assert run(course, "sync", "--check") == 1
    assert "orientation: the .md and the .ipynb differ" in capsys.readouterr().out
    assert run(course, "sync") == 0
    assert run(course, "sync", "--check") == 0


def test_nbgraders_own_autograde_runs_in_the_sandbox_and_agrees(course, sandbox, monkeypatch):
    monkeypatch.setenv("ICMLLAB_TEST_SECRET", "hunter2-hunter2")
    shutil.copy(LABS / "nbgrader_config.py", course.root)
    make_release(course, LAB)
    hand_in(course, LAB, "ada", solved(LAB))
    spy = "import os\nprint(dict(os.environ), os.listdir('/'), os.path.exists({!r}))\nos._exit(0)"
    nb = with_answers(solved(LAB), {"share": spy.format(str(course.root))})
    hand_in(course, LAB, "mallory", nb)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in ("autograde", "generate_feedback"):
        done = subprocess.run(
            ["nbgrader", command, LAB],
            cwd=course.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    with open_gradebook(course) as gradebook:
        scores = {s.student.id: s.score for s in gradebook.find_assignment(LAB).submissions}
    assert scores == {"ada": 7, "mallory": 2}
    text = course.autograded(LAB, "mallory").read_text(encoding="utf-8")
    assert "hunter2" not in text
    page = course.root / "feedback" / "ada" / LAB / f"{LAB}.html"
    assert "mean-square-hidden" in page.read_text(encoding="utf-8")


def test_nbgraders_validate_agrees_with_the_marks(course, tmp_path):
    make_release(course, LAB)
    validate = [sys.executable, "-m", "nbgrader", "validate"]
    good, bad = tmp_path / "good.ipynb", tmp_path / "bad.ipynb"
    nbformat.write(solved(LAB), good)
    shutil.copy(course.released(LAB), bad)
    for path, word in ((good, "Success"), (bad, "FAILED")):
        done = subprocess.run(
            [*validate, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert word in done.stdout, done.stdout + done.stderr
