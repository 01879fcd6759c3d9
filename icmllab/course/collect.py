"""Submissions from an LMS's zip files, into the course's folders.

Archives come from strangers: only notebooks are taken, only into their student's folder, and only
as much as a notebook may hold.
"""

import re
import stat
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from icmllab.course.assemble import MAX_SUBMISSION
from icmllab.course.paths import STUDENT, Course

MAX_MEMBERS = 20_000
"""Files of one archive that are looked at."""


class Collected(NamedTuple):
    """What became of the archives.

    Attributes:
        taken: students whose notebook was put into ``submitted``.
        same: students whose notebook was there already.
        skipped: files that were not taken, each with the reason.
    """

    taken: list[str]
    same: list[str]
    skipped: list[str]


def student_of(member: str, lab: str, archive: str) -> str | None:
    """Whose notebook ``member`` of ``archive`` is, or None.

    Known forms: Moodle's ``Name_1234_assignsubmission_file_/any.ipynb``, Canvas's
    ``login_1234_5678_<lab>.ipynb`` (with ``_LATE``), ``<student>/<lab>.ipynb``,
    ``<student>/<lab>/<lab>.ipynb``, ``<student>_<lab>.ipynb``, and ``<lab>.ipynb`` in
    ``<student>.zip`` or ``<student>_<lab>.zip``.
    """
    path = PurePosixPath(member)
    if path.suffix != ".ipynb":
        return None
    folders = [p for p in path.parts[:-1] if p != lab]
    for folder in folders:
        found = re.fullmatch(r"(.+?_\d+)_assignsubmission_file_?", folder)
        if found:
            return _name(found[1])
    name = re.escape(lab)
    for form in (rf"(.+?)(?:_LATE)?_\d+_\d+_{name}(?:-\d+)?\.ipynb", rf"(.+)_{name}\.ipynb"):
        found = re.fullmatch(form, path.name)
        if found:
            return _name(found[1])
    if path.name != f"{lab}.ipynb":
        return None
    if folders:
        return _name(folders[-1])
    return _name(re.sub(rf"_{name}$", "", PurePosixPath(archive).stem))


def _name(text: str) -> str | None:
    name = re.sub(r"\s+", "-", text.strip())
    return name if STUDENT.fullmatch(name) else None


def collect_zip(course: Course, lab: str, archives: list[Path]) -> Collected:
    """Put the notebooks of ``archives`` into ``submitted/<student>/<lab>/``.

    An earlier submission with other content stays beside it, as ``<lab>.previous-1`` and so on.

    Args:
        course: where to.
        lab: the lab's name.
        archives: zip files.

    Raises:
        ValueError: no such lab, or no archive.
    """
    lab = course.find_lab(lab)
    if not archives:
        raise ValueError(
            f"there is no zip file: put the LMS's download into labs/downloaded/{lab}/, "
            "or name it with ZIP=path"
        )
    result = Collected([], [], [])
    for archive in archives:
        try:
            with zipfile.ZipFile(archive) as z:
                _collect_one(course, lab, archive.name, z, result)
        except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
            result.skipped.append(f"{archive.name}: not a readable zip file ({error})")
    return result


def _collect_one(
    course: Course, lab: str, name: str, archive: zipfile.ZipFile, result: Collected
) -> None:
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        result.skipped.append(f"{name}: more than {MAX_MEMBERS} files")
        return
    for member in members:
        if member.is_dir():
            continue
        where = f"{name}: {member.filename[:200]!r}"
        student = student_of(member.filename, lab, name)
        if student is None:
            result.skipped.append(f"{where}: whose it is cannot be told")
        elif stat.S_ISLNK(member.external_attr >> 16):
            result.skipped.append(f"{where}: a link")
        else:
            with archive.open(member) as stream:
                data = stream.read(MAX_SUBMISSION + 1)
            if len(data) > MAX_SUBMISSION:
                result.skipped.append(f"{where}: longer than {MAX_SUBMISSION // 2**20} MiB")
            else:
                _put(course.submitted(lab, student), data, student, result)


def _put(path: Path, data: bytes, student: str, result: Collected) -> None:
    if path.is_file():
        if path.read_bytes() == data:
            result.same.append(student)
            return
        number = 1
        while (old := path.with_suffix(f".previous-{number}")).exists():
            number += 1
        path.rename(old)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)
    result.taken.append(student)
