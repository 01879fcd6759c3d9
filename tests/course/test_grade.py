"""Grading as a whole: sixty submissions, a run that is killed, late and repeated submissions."""

import json
import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from course_helpers import hand_in, solved, with_answers
from course_wrong import WRONG

from icmllab.course import grade as grading
from icmllab.course.grade import grade
from icmllab.course.grades import COLUMNS, table, write_csv
from icmllab.course.paths import open_gradebook
from icmllab.course.sandbox import Limits, SandboxError

LAB = "orientation"
LIMITS = Limits(cell=30, notebook=120)

pytestmark = pytest.mark.usefixtures("sandbox")


def kinds():
    """Submissions of every sort, with the points they must earn."""
    right = solved(LAB)
    for exercise, answers in WRONG[LAB].items():
        lost = {"mean-square": 2, "share": 3, "settings": 2}[exercise]
        for answer in answers.values():
            yield with_answers(right, {exercise: answer.strip()}), 7 - lost
    yield right, 7
    yield with_answers(right, {"share": "1 / 0", "settings": "import os; os.abort()"}), 2
    yield "{broken", 0


def hand_in_sixty(course) -> dict[str, float]:
    """Sixty students, each with a submission of a known worth."""
    sorts = list(kinds())
    worth = {}
    for number in range(60):
        student = f"student-{number:02d}"
        nb, points = sorts[number % len(sorts)]
        hand_in(course, LAB, student, nb)
        worth[student] = float(points)
    return worth


def scores(course) -> dict[str, float]:
    """Every student's marks, from nbgrader's gradebook."""
    with open_gradebook(course) as gradebook:
        return {s.student.id: s.score for s in gradebook.find_assignment(LAB).submissions}


def start(course):
    """The command of a run, in a process of its own."""
    command = [sys.executable, "-m", "icmllab.course", "--course", str(course.root), "grade", LAB]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kernels_of(process) -> list:
    """The processes that a run has started."""
    import psutil

    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.timeout(900)
def test_sixty_submissions_survive_a_kill_and_none_is_lost_or_wrong(course):
    worth = hand_in_sixty(course)
    killed = start(course)
    seen = 0
    for line in killed.stdout:
        seen += "student-" in line
        if seen == 20:
            break
    family = kernels_of(killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(p.is_running() for p in family):
        time.sleep(0.1)
    left = [p for p in family if p.is_running() and p.status() != "zombie"]
    assert left == [], "processes went on after the run was killed"
    kept = len(list(course.root.glob(f"autograded/*/{LAB}/grading.json")))
    assert 20 <= kept < 60

    again = start(course)
    output, _ = again.communicate(timeout=800)
    assert again.returncode == 0, output
    assert f"{kept} of 60 have their marks from before" in output
    assert scores(course) == worth
    for student in worth:
        record = json.loads(course.record(LAB, student).read_text())
        assert record["status"] in ("graded", "unreadable")


def test_a_second_run_does_nothing_and_a_changed_submission_is_graded_anew(course):
    for student in ("ada", "bob"):
        hand_in(course, LAB, student, solved(LAB))
    grade(course, LAB, limits=LIMITS, say=lambda _: None)
    said = []
    marks = grade(course, LAB, limits=LIMITS, say=said.append)
    assert said == ["2 of 2 have their marks from before"]
    assert [m.score for m in marks] == [7, 7]
    hand_in(course, LAB, "bob", next(kinds())[0])
    said.clear()
    marks = grade(course, LAB, limits=LIMITS, say=said.append)
    assert [m.score for m in marks] == [7, 5]
    assert "1 of 2 have their marks from before" in said[0]


@pytest.mark.parametrize("where", ["write_notebook", "preprocess", "write_text"])
def test_a_run_that_ends_between_its_writes_is_done_again(course, monkeypatch, where):
    hand_in(course, LAB, "ada", solved(LAB))
    calls = []

    def stop(*args, **kwargs):
        calls.append(args)
        raise KeyboardInterrupt

    real = getattr(grading, where)
    if where == "preprocess":
        # the second step of two: the marks are in, the penalties are not
        def stop(nb, steps, resources):
            real(nb, steps[:1], resources)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "write_text":
            # the children write their outcome by the same name: let them
            own = os.getpid()
            patch.setattr(grading, where, lambda *a: stop(*a) if os.getpid() == own else real(*a))
        else:
            patch.setattr(grading, where, stop)
        with pytest.raises(KeyboardInterrupt):
            grade(course, LAB, limits=LIMITS, say=lambda _: None)
    assert not course.record(LAB, "ada").exists()
    (marks,) = grade(course, LAB, limits=LIMITS, say=lambda _: None)
    assert marks.score == 7
    assert scores(course) == {"ada": 7}


def test_a_fault_that_is_not_the_students_costs_nothing_and_is_tried_again(course, monkeypatch):
    hand_in(course, LAB, "ada", solved(LAB))
    path = course.source(LAB)
    good = path.read_text(encoding="utf-8")
    broken = nbformat.reads(good, as_version=4)
    for cell in broken.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == "setup":
            cell.source += "\nimport no_such_module"
    path.write_text(nbformat.writes(broken), encoding="utf-8")
    (marks,) = grade(course, LAB, limits=LIMITS, say=lambda _: None)
    assert marks.status == "failed"
    assert marks.score is None
    assert "set-up cell" in marks.notes[0]
    assert own_rows(course).status.tolist() == ["not graded"]
    path.write_text(good, encoding="utf-8")
    (marks,) = grade(course, LAB, limits=LIMITS, say=lambda _: None)
    assert marks.score == 7


def test_written_answers_wait_for_a_person_and_their_marks_survive_a_new_run(course):
    nb = with_answers(solved(LAB), {"margin-written": "The margin is too small; try 20 seeds."})
    hand_in(course, LAB, "ada", nb)
    hand_in(course, LAB, "lazy", with_answers(nb, {"margin-written": blank_written()}))
    grade(course, LAB, limits=LIMITS, say=lambda _: None)
    rows = own_rows(course)
    assert rows.loc["ada", "needs_manual_grade"] is True
    assert rows.loc["lazy", "needs_manual_grade"] is False
    with open_gradebook(course) as gradebook:
        entry = gradebook.find_grade("margin-written", LAB, LAB, "ada")
        entry.manual_score, entry.needs_manual_grade = 1.0, False
        gradebook.db.commit()
    assert own_rows(course).loc["ada", "score"] == 8
    grade(course, LAB, limits=LIMITS, say=lambda _: None, again=True)
    assert own_rows(course).loc["ada", "score"] == 8


def own_rows(course):
    """The table's rows of this lab, by student."""
    rows = table(course)
    return rows[rows.lab == LAB].set_index("student")


def blank_written() -> str:
    """The written answer as it is released."""
    from course_helpers import LABS

    from icmllab.course.assemble import release

    nb = release(LABS / "source" / LAB / f"{LAB}.ipynb")
    (cell,) = [
        c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade_id") == "margin-written"
    ]
    return cell.source


def test_grades_are_a_table_with_late_and_missing_students(course, tmp_path):
    hand_in(course, LAB, "ada", solved(LAB))
    path = hand_in(course, LAB, "bob", solved(LAB))
    path.with_name("timestamp.txt").write_text("2026-12-02 12:00:00 UTC")
    with open_gradebook(course) as gradebook:
        gradebook.update_or_create_assignment(LAB, duedate="2026-12-02 11:00:00 UTC")
        gradebook.add_student("carol")
    grade(course, LAB, limits=LIMITS, say=lambda _: None)
    assert write_csv(course, tmp_path / "grades.csv") == 6  # three students, two labs
    rows = table(course)
    assert list(rows.columns) == COLUMNS
    rows = rows[rows.lab == LAB].set_index("student")
    assert rows.score.to_dict() == {"ada": 7, "bob": 7, "carol": 0}
    assert rows.status.to_dict() == {"ada": "graded", "bob": "graded", "carol": "missing"}
    assert rows.late_seconds.to_dict()["bob"] == 3600
    assert (tmp_path / "grades.csv").read_text().splitlines()[0] == ",".join(COLUMNS)


def test_names_that_could_leave_their_folder_are_no_students(course):
    for name in ("..", ".hidden", "a b", "=cmd", "x" * 65):
        (course.root / "submitted" / "x" / ".." / name / LAB).mkdir(parents=True, exist_ok=True)
    assert course.students(LAB) == []


def test_without_bubblewrap_nothing_is_run_and_the_message_says_what_to_install(
    course, monkeypatch
):
    hand_in(course, LAB, "ada", solved(LAB))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxError, match=r"apt install bubblewrap.*SANDBOX=off"):
        grade(course, LAB, limits=LIMITS)
    assert not (course.root / "autograded").exists()


def test_without_the_sandbox_the_marks_are_the_same(course):
    for number, (nb, _) in enumerate(list(kinds())[:4]):
        hand_in(course, LAB, f"s{number}", nb)
    inside = grade(course, LAB, limits=LIMITS, say=lambda _: None)
    outside = grade(course, LAB, limits=LIMITS, sandboxed=False, say=lambda _: None)
    assert [m.score for m in inside] == [m.score for m in outside]
