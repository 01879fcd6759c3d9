"""Submissions out of an LMS's archives."""

import stat
import zipfile

import nbformat
import pytest
from course_helpers import solved

from icmllab.course.collect import collect_zip, student_of

LAB = "orientation"
TEXT = nbformat.writes(solved(LAB))


@pytest.mark.parametrize(
    ("member", "archive", "student"),
    [
        ("ada/orientation.ipynb", "all.zip", "ada"),
        ("ada/orientation/orientation.ipynb", "all.zip", "ada"),
        ("export/ada/orientation.ipynb", "all.zip", "ada"),
        ("ada_orientation.ipynb", "all.zip", "ada"),
        ("orientation.ipynb", "ada.zip", "ada"),
        ("orientation.ipynb", "ada_orientation.zip", "ada"),
        ("Ada Lovelace_123_assignsubmission_file_/my lab.ipynb", "moodle.zip", "Ada-Lovelace_123"),
        ("Ada Lovelace_123_assignsubmission_file/orientation.ipynb", "m.zip", "Ada-Lovelace_123"),
        ("lovelaceada_123_4567_orientation.ipynb", "submissions.zip", "lovelaceada"),
        ("lovelaceada_LATE_123_4567_orientation-2.ipynb", "submissions.zip", "lovelaceada"),
        ("../../orientation.ipynb", "all.zip", None),
        ("../evil/orientation.ipynb", "all.zip", "evil"),
        ("ada/other.ipynb", "all.zip", None),
        ("ada/orientation.py", "all.zip", None),
        ("=cmd/orientation.ipynb", "all.zip", None),
    ],
)
def test_whose_submission_a_file_is(member, archive, student):
    assert student_of(member, LAB, archive) == student


def test_notebooks_are_put_where_grading_finds_them_and_old_ones_are_kept(course, tmp_path):
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("ada/orientation.ipynb", TEXT)
        z.writestr("bob/orientation.ipynb", TEXT)
        z.writestr("readme.txt", "hello")
    found = collect_zip(course, LAB, [archive])
    assert sorted(found.taken) == ["ada", "bob"]
    assert len(found.skipped) == 1
    assert course.students(LAB) == ["ada", "bob"]
    assert course.submitted(LAB, "ada").read_text(encoding="utf-8") == TEXT
    assert collect_zip(course, LAB, [archive]).same == ["ada", "bob"]
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("ada/orientation.ipynb", TEXT + " ")
    assert collect_zip(course, LAB, [archive]).taken == ["ada"]
    old = course.submitted(LAB, "ada").with_suffix(".previous-1")
    assert old.read_text(encoding="utf-8") == TEXT
    assert course.submitted(LAB, "bob").exists()


def test_archives_from_strangers_do_no_harm(course, tmp_path):
    link = zipfile.ZipInfo("eve/orientation.ipynb")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive = tmp_path / "bomb.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("mallory/orientation.ipynb", b"\0" * (25 * 2**20))
        z.writestr(link, "/etc/passwd")
        z.writestr("../../../../tmp/orientation.ipynb", TEXT)
        z.writestr("ada/orientation.ipynb", TEXT)
    before = set(tmp_path.rglob("*"))
    found = collect_zip(course, LAB, [archive])
    assert sorted(found.taken) == ["ada", "tmp"]  # the folder's name, inside of ours
    assert any("MiB" in s for s in found.skipped)
    assert any("link" in s for s in found.skipped)
    new = set(tmp_path.rglob("*")) - before
    assert all(p.is_relative_to(course.root / "submitted") for p in new)


def test_a_file_that_is_no_archive_is_named_and_the_others_are_taken(course, tmp_path):
    (tmp_path / "bad.zip").write_bytes(b"PK\x03\x04 not really")
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as z:
        z.writestr("ada_orientation.ipynb", TEXT)
    found = collect_zip(course, LAB, [tmp_path / "bad.zip", tmp_path / "good.zip"])
    assert found.taken == ["ada"]
    assert "bad.zip" in found.skipped[0]
    with pytest.raises(ValueError, match="there is no zip file"):
        collect_zip(course, LAB, [])
