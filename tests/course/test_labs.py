"""The labs: right answers earn all, the students' version nothing, wrong answers lose theirs."""

import re

import nbformat
import pytest
from course_helpers import LABS, marks_in_process, solved, with_answers
from course_wrong import EXERCISES, PARTLY, WRONG
from nbgrader import utils

from icmllab.course.assemble import assemble, release, template
from icmllab.course.execute import execute
from icmllab.course.labs import content, is_in_step, make_release, read_text_half, register
from icmllab.course.paths import Course, open_gradebook
from icmllab.course.sandbox import Limits

COURSE = Course(LABS)
NAMES = COURSE.labs()
ALL_WRONG = [(lab, e, w) for lab in WRONG for e in WRONG[lab] for w in WRONG[lab][e]]


def source(lab):
    return COURSE.source(lab)


def points_of(nb) -> dict[str, float]:
    """Points of every test cell."""
    cells = [c for c in nb.cells if c.cell_type == "code" and utils.is_grade(c)]
    return {c.metadata.nbgrader.grade_id: float(c.metadata.nbgrader.points) for c in cells}


def test_there_are_labs_and_the_tables_of_wrong_answers_cover_them():
    assert {"orientation", "representations"} <= set(NAMES)
    for lab in NAMES:
        tests = {t for cells in EXERCISES[lab].values() for t in cells}
        assert tests == set(points_of(solved(lab))), lab
        assert set(WRONG[lab]) == set(EXERCISES[lab])
        assert all(len(answers) >= 3 for answers in WRONG[lab].values())


@pytest.mark.parametrize("lab", NAMES)
def test_the_text_half_and_the_notebook_agree_with_nbgraders_metadata(lab):
    assert is_in_step(COURSE, lab)
    text = read_text_half(source(lab).with_suffix(".md"))
    stored = nbformat.read(source(lab), as_version=4)
    nbformat.validate(stored)
    assert content(text) == content(stored)
    assert sum(bool(info) for _, _, info in content(text)) >= 8


@pytest.mark.parametrize("lab", NAMES)
def test_form_of_a_lab(lab):
    nb = solved(lab)
    assert not [o for c in nb.cells for o in c.get("outputs", ())]
    written = [c for c in nb.cells if c.cell_type == "markdown" and utils.is_grade(c)]
    assert written, "a lab has an answer that a person reads"
    assert all("=== BEGIN MARK SCHEME ===" in c.source for c in written)
    for cell in nb.cells:
        if cell.cell_type != "code" or not utils.is_grade(cell):
            continue
        compile(cell.source, cell.metadata.nbgrader.grade_id, "exec")  # no magics
        # every assertion says what was expected
        for line in re.findall(r"^ *assert .*$", cell.source, re.M):
            assert "," in line or "," in cell.source.split(line, 1)[1], line
    hidden = [c for c in nb.cells if "### BEGIN HIDDEN TESTS" in c.source]
    assert len(hidden) >= len(EXERCISES[lab])


@pytest.mark.parametrize("lab", NAMES)
def test_released_notebook_holds_no_solution_no_hidden_test_no_mark_scheme(lab, course):
    make_release(course, lab)
    released = course.released(lab).read_text(encoding="utf-8")
    secrets = []
    for cell in solved(lab).cells:
        for begin, end in [
            ("### BEGIN SOLUTION", "### END SOLUTION"),
            ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"),
            ("=== BEGIN MARK SCHEME ===", "=== END MARK SCHEME ==="),
        ]:
            for part in re.findall(rf"{begin}(.*?){end}", cell.source, re.S):
                secrets += [line.strip() for line in part.splitlines()]
    shown = "\n".join(
        re.sub(r"### BEGIN (SOLUTION|HIDDEN TESTS).*?### END \1", "", c.source, flags=re.S)
        for c in solved(lab).cells
    )
    # a line that also stands in the open (an import, a parenthesis) is no secret
    secrets = [s for s in secrets if len(s) > 8 and s not in shown]
    assert len(secrets) >= 20
    leaked = [s for s in secrets if s.replace('"', '\\"') in released]
    assert leaked == []
    assert "BEGIN" not in released
    assert released.count("raise NotImplementedError") >= len(EXERCISES[lab])


@pytest.mark.parametrize("lab", NAMES)
def test_right_answers_earn_full_marks_in_the_sandbox(lab, sandbox):
    nb = solved(lab)
    done = execute(assemble(template(source(lab)), nb), limits=Limits())
    assert done.notes == []
    for cell in done.notebook.cells:
        if cell.cell_type == "code" and utils.is_grade(cell):
            assert not cell.outputs, cell.outputs
            assert utils.determine_grade(cell)[0] == cell.metadata.nbgrader.points


@pytest.mark.parametrize("lab", NAMES)
def test_right_answers_earn_full_marks_where_the_student_runs_them(lab):
    assert marks_in_process(solved(lab)) == points_of(solved(lab))


@pytest.mark.parametrize("lab", NAMES)
def test_the_released_notebook_earns_nothing(lab, sandbox):
    untouched = release(source(lab))
    done = execute(assemble(template(source(lab)), untouched), limits=Limits())
    for cell in done.notebook.cells:
        if utils.is_grade(cell):
            assert utils.determine_grade(cell)[0] == 0, cell.metadata.nbgrader.grade_id


@pytest.mark.parametrize(("lab", "exercise", "wrong"), ALL_WRONG)
def test_a_wrong_answer_loses_exactly_its_exercises_points(lab, exercise, wrong):
    full = points_of(solved(lab))
    nb = with_answers(solved(lab), {exercise: WRONG[lab][exercise][wrong].strip()})
    got = marks_in_process(nb)
    expected = {t: 0.0 if t in EXERCISES[lab][exercise] else p for t, p in full.items()}
    assert got == expected


@pytest.mark.parametrize(
    ("lab", "number"), [(lab, i) for lab in PARTLY for i in range(len(PARTLY[lab]))]
)
def test_a_partly_right_answer_keeps_some_points(lab, number):
    exercise, answer, points = PARTLY[lab][number]
    full = points_of(solved(lab))
    got = marks_in_process(with_answers(solved(lab), {exercise: answer.strip()}))
    assert sum(got[t] for t in EXERCISES[lab][exercise]) == points
    assert points < sum(full[t] for t in EXERCISES[lab][exercise])
    assert all(got[t] == p for t, p in full.items() if t not in EXERCISES[lab][exercise])


@pytest.mark.parametrize(("lab", "exercise", "wrong"), ALL_WRONG)
def test_a_failing_message_says_what_was_expected(lab, exercise, wrong):
    nb = with_answers(solved(lab), {exercise: WRONG[lab][exercise][wrong].strip()})
    first = EXERCISES[lab][exercise][0]
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in nb.cells:
        info = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code" and not info.get("grade"):
            exec(cell.source, names)
        if info.get("grade_id") == first:
            with pytest.raises(Exception, match=r".{20}"):
                exec(cell.source, names)
            return
    raise AssertionError(f"no cell {first}")


def test_registering_again_keeps_the_points_and_refuses_a_changed_lab_with_marks(course):
    register(course, "orientation")
    register(course, "orientation")
    with open_gradebook(course) as gradebook:
        assert gradebook.find_assignment("orientation").max_score == 8
        gradebook.add_student("ada")
        gradebook.add_submission("orientation", "ada")
    path = course.source("orientation")
    nb = nbformat.read(path, as_version=4)
    nb.cells = [
        c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade_id") != "share-hidden"
    ]
    nbformat.write(nb, path)
    with pytest.raises(ValueError, match="has marks already"):
        register(course, "orientation")


def test_an_unknown_lab_is_named_with_a_near_one(course):
    with pytest.raises(ValueError, match="did you mean orientation"):
        make_release(course, "orientaton")
