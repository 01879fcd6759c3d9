"""The set-up script: one clear line where a prerequisite is missing, no half-made environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A folder with the set-up script and a lock of one package."""
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "bin" / "venv", tmp_path / "bin")
    (tmp_path / "requirements.txt").write_text("tqdm==4.66.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '0'\n")
    return tmp_path


def setup(checkout: Path, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON", "VIRTUAL"))}
    return subprocess.run(
        [checkout / "bin" / "venv"],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(folder: Path, version: str, *, venv: bool = True) -> str:
    """A stand-in for an interpreter that answers the questions the script asks."""
    path = folder / "python-stand-in"
    major, minor = version.split(".")[:2]
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"*version_info*) [ {major} = 3 ] && [ {minor} -ge 11 ] && [ {minor} -le 13 ]; exit;;\n"
        f"*ensurepip*) exit {0 if venv else 1};;\n"
        f"*) echo 'Python {version}';;\nesac\n"
    )
    path.chmod(0o755)
    return str(path)


def last_line(result: subprocess.CompletedProcess) -> str:
    assert result.returncode != 0
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("version", ["3.10.2", "3.14.0", "2.7.18"])
def test_a_wrong_python_is_named(checkout, version):
    result = setup(checkout, PYTHON=fake_python(checkout, version))
    assert "Python 3.11, 3.12 or 3.13 is needed" in last_line(result)
    assert version in last_line(result)
    assert not (checkout / ".venv").exists()


def test_a_python_without_venv_says_what_to_install(checkout):
    result = setup(checkout, PYTHON=fake_python(checkout, "3.12.1", venv=False))
    assert "apt install python3-venv" in last_line(result)


def test_a_python_that_is_not_there_is_named(checkout):
    assert "cannot be run" in last_line(setup(checkout, PYTHON=str(checkout / "nowhere")))


def test_a_part_of_a_checkout_is_noticed(checkout):
    (checkout / "requirements.txt").unlink()
    assert "requirements.txt is missing" in last_line(setup(checkout, PYTHON=sys.executable))


def test_no_network_is_said_in_one_line_and_leaves_nothing_that_passes_for_whole(checkout):
    half = checkout / ".venv"
    half.mkdir()
    (half / "left-over").write_text("of an interrupted set-up")
    env = {
        "PYTHON": sys.executable,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
    }
    result = setup(checkout, **env)
    assert "no network" in last_line(result), result.stderr
    assert not (half / "left-over").exists()
    assert not (half / ".ready").exists()
    again = setup(checkout, **env)
    assert again.returncode != 0


def test_make_names_its_commands_and_near_chapters():
    helped = subprocess.run(
        ["make", "-C", ROOT, "help"], capture_output=True, text=True, check=True
    )
    wanted = "lab test run book serve stress results bench bench-kernels sync lock clean help"
    listed = [line.split()[0] for line in helped.stdout.splitlines() if line.startswith("  ")]
    assert set(wanted.split()) <= set(listed)
    assert len(listed) == len(set(listed))
    command = [sys.executable, "-m", "icmllab", "run", "training/gradpowr"]
    wrong = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "did you mean training/gradpower" in wrong.stderr
