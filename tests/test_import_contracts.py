"""The import contracts of pyproject.toml, checked on the package as it is installed.

``icmllab.kernels`` lives in ``kernels/``, where import-linter's static search does not look,
so the check runs on a tree of links in which every subpackage stands at its installed place.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def installed_tree(folder: Path) -> Path:
    """A copy of the sources with kernels/ moved to its installed place."""
    tree = folder / "tree"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "icmllab", tree / "icmllab", ignore=ignore)
    shutil.copytree(ROOT / "kernels", tree / "icmllab" / "kernels", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def lint(tree: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)


def test_imports_flow_one_way(tmp_path):
    result = lint(installed_tree(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_contracts_catch_a_paper_that_imports_a_paper_and_a_toolbox_that_imports_a_paper(tmp_path):
    tree = installed_tree(tmp_path)
    (tree / "icmllab/toolbox/wrong.py").write_text("import icmllab.training\n")
    (tree / "icmllab/training/wrong.py").write_text(
        "import icmllab.representations.aristotelian\nimport icmllab.notebook\n"
    )
    result = lint(tree)
    assert result.returncode != 0
    assert result.stdout.count("BROKEN") >= 3, result.stdout
