"""A course of its own for each test, and the helpers beside these tests."""

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from course_helpers import LABS, sandbox_missing

from icmllab.course.labs import register
from icmllab.course.paths import Course


@pytest.fixture(scope="session")
def sandbox():
    """Skip where no sandbox can be made; where one is required, fail."""
    reason = sandbox_missing()
    if reason and os.environ.get("ICMLLAB_REQUIRE_SANDBOX"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def made_course(tmp_path_factory) -> Course:
    """A course whose gradebook exists and knows the labs: making one takes seconds."""
    made = Course(tmp_path_factory.mktemp("made") / "course")
    shutil.copytree(LABS / "source", made.root / "source")
    for lab in made.labs():
        register(made, lab)
    return made


@pytest.fixture
def course(tmp_path, made_course) -> Course:
    """A course with the labs of this checkout and no submission."""
    shutil.copytree(made_course.root, tmp_path / "course")
    return Course(tmp_path / "course")
