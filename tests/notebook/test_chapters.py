"""Running and storing chapters: near matches, atomic replacement, no churn, faults."""

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from icmllab.notebook import chapters, commands
from icmllab.notebook.claims import claims_from_notebook

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """---
jupytext:
  formats: ipynb,md:myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# A chapter

```{{code-cell}} python3
import time
from icmllab import Claims, seed
claims = Claims("toy/one")
```

```{{code-cell}} python3
{body}
```

```{{code-cell}} python3
claims
```
"""
GOOD = 'claims.check("Seeds are small", measured=float(seed()), below=2.5, paper="-")'


def write_chapter(root: Path, slug: str, body: str) -> str:
    page = root / "book" / "toy" / f"{slug}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(SOURCE.format(body=body).replace("toy/one", f"toy/{slug}"), encoding="utf-8")
    return f"toy/{slug}"


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A checkout with chapters of its own."""
    (tmp_path / "book").mkdir()
    shutil.copy(ROOT / "book" / "nbval_sanitize.cfg", tmp_path / "book")
    (tmp_path / "book" / "toy").mkdir()
    (tmp_path / "book" / "toy" / "index.md").write_text("# A part\n")
    monkeypatch.setattr(chapters, "root", lambda: tmp_path)
    write_chapter(tmp_path, "one", GOOD)
    return tmp_path


def test_part_pages_are_no_chapters(book):
    assert chapters.chapter_names() == ["toy/one"]
    assert chapters.notebook_names() == ["toy/one"]


def test_a_part_page_may_be_a_notebook_that_runs_without_claims(book):
    page = SOURCE.split("```{{")[0] + "```{code-cell} python3\n1 + 1\n```\n"
    (book / "book" / "toy" / "index.md").write_text(page)
    assert chapters.chapter_names() == ["toy/one"]
    assert chapters.notebook_names() == ["toy/index", "toy/one"]
    with pytest.raises(ValueError, match="did you mean"):
        chapters.find_chapter("toy/index")
    assert chapters.find_notebook("toy/index") == "toy/index"
    from icmllab.__main__ import main

    assert main(["run", "toy/index"]) == 0
    assert chapters.stale_reason("toy/index") is None


@pytest.mark.parametrize("wrong", ["toy/onne", "one", "tpy/one"])
def test_a_wrong_name_lists_near_matches(book, wrong):
    with pytest.raises(ValueError, match="did you mean toy/one"):
        chapters.find_chapter(wrong)


def test_a_missing_name_says_what_is_wanted(book):
    with pytest.raises(ValueError, match="CHAPTER must name a chapter as part/slug"):
        chapters.find_chapter("")


def test_a_run_is_recorded_and_a_second_one_changes_nothing(book, capsys):
    args = ["run", "toy/one"]
    from icmllab.__main__ import main

    assert main(args) == 0
    path = chapters.notebook_path("toy/one")
    first, stamp = path.read_bytes(), path.stat().st_mtime_ns
    assert "Seeds are small" in capsys.readouterr().out
    nb = nbformat.read(path, as_version=4)
    record = nb.metadata["icmllab"]
    assert record["chapter"] == "toy/one"
    assert record["peak_mb"] > 10
    assert claims_from_notebook(nb)["claims"][0]["measured"] == 0.0
    assert "resource" not in str(nb.cells[-1].source)

    assert main(args) == 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (first, stamp)
    assert "nothing new" in capsys.readouterr().out
    assert chapters.stale_reason("toy/one") is None


def test_an_edited_source_is_stale_until_synced(book):
    chapters.store("toy/one", chapters.execute("toy/one").notebook)
    page = chapters.source_path("toy/one")
    page.write_text(page.read_text().replace("# A chapter", "# A better chapter"))
    assert "differ" in chapters.stale_reason("toy/one")
    from icmllab.__main__ import main

    assert main(["sync", "--check"]) == 1
    assert main(["sync"]) == 0
    assert chapters.stale_reason("toy/one") is None


def test_a_cell_that_raises_leaves_the_stored_notebook(book, capsys):
    chapters.store("toy/one", chapters.execute("toy/one").notebook)
    before = chapters.notebook_path("toy/one").read_bytes()
    write_chapter(book, "one", "raise RuntimeError('no such luck')")
    from icmllab.__main__ import main

    assert main(["run", "toy/one"]) == 1
    assert "no such luck" in capsys.readouterr().err
    assert chapters.notebook_path("toy/one").read_bytes() == before
    assert [p.name for p in (book / "book/toy").iterdir() if p.suffix == ".part"] == []


def test_a_failing_claim_gives_exit_code_1_unless_declared(book):
    from icmllab.__main__ import main

    write_chapter(book, "one", GOOD.replace("below=2.5", "below=-1"))
    assert main(["run", "toy/one"]) == 1
    declared = GOOD.replace("below=2.5", "below=-1, expected_to_fail='too strict'")
    write_chapter(book, "one", declared)
    assert main(["run", "toy/one"]) == 0
    assert (
        commands.undeclared_failures(claims_from_notebook(chapters.read_notebook("toy/one"))) == []
    )


def test_verdicts_and_texts_count_as_changes_and_measured_numbers_do_not(book):
    old = chapters.execute("toy/one").notebook
    new = copy.deepcopy(old)
    new.metadata["icmllab"]["seconds"] = 99.0
    for output in new.cells[-1].outputs:
        output.data["text/html"] = output.data["text/html"].replace(
            '<span class="icmllab-measured">0', '<span class="icmllab-measured">0.25'
        )
    assert str(old) != str(new)
    assert chapters.same(old, new)
    for output in new.cells[-1].outputs:
        output.data["text/plain"] = output.data["text/plain"].replace("✓", "✗")
    assert not chapters.same(old, new)
    other = copy.deepcopy(old)
    other.metadata["icmllab"]["code"] = "different"
    assert not chapters.same(old, other)


def test_other_presets_and_seeds_are_kept_apart_from_the_book(book):
    from icmllab.__main__ import main

    assert main(["run", "toy/one", "--seed", "2"]) == 0
    assert not chapters.notebook_path("toy/one").exists()
    kept = nbformat.read(book / ".icmllab/runs/toy/one.quick.2.ipynb", as_version=4)
    assert claims_from_notebook(kept)["claims"][0]["measured"] == 2.0


def test_a_wrong_preset_is_refused_in_one_line_before_anything_runs(book, capsys):
    from icmllab.__main__ import main

    assert main(["run", "toy/one", "--preset", "fulll"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip() == (
        "icmllab: PRESET must be quick or full: got fulll; did you mean full?"
    )


def test_code_hash_sees_code_and_not_comments(tmp_path):
    file = tmp_path / "m.py"
    file.write_text('"""Doc."""\ndef f(x):\n    """Doc."""\n    return x + 1\n')
    first = chapters.code_hash(file)
    file.write_text('"""Other."""\n\n# why\ndef f(x):\n    return (x + 1)\n')
    assert chapters.code_hash(file) == first
    file.write_text("def f(x):\n    return x + 2\n")
    assert chapters.code_hash(file) != first


def test_stress_counts_seeds_and_finds_the_worst(book, capsys):
    # holds for seeds 0, 1 and 2 of 0…3
    from icmllab.__main__ import main

    with pytest.raises(ValueError, match="SEEDS must be at least 1"):
        commands.stress(
            __import__("argparse").Namespace(chapter="toy/one", seeds=0, threads=[1], workers=1)
        )
    outcomes = []
    for number in (0, 1, 2, 3):
        run = chapters.execute("toy/one", seed=number, threads=1)
        outcomes.append({"seed": number, "threads": 1, "claims": run.claims["claims"]})
    (row,) = commands.stress_table(outcomes, total=4)
    assert (row.held, row.total, row.worst, row.worst_seed) == (3, 4, "3", 3)
    assert not row.enough
    assert main(["stress", "toy/nothing"]) == 2


def test_interrupting_a_run_leaves_committed_files_untouched(tmp_path):
    # a real checkout layout in a folder of its own, interrupted with SIGKILL and with SIGINT
    shutil.copytree(ROOT / "icmllab", tmp_path / "icmllab")
    (tmp_path / "book" / "toy").mkdir(parents=True)
    shutil.copy(ROOT / "book" / "nbval_sanitize.cfg", tmp_path / "book")
    (tmp_path / "_toc.yml").write_text("")
    write_chapter(tmp_path, "one", "open('started', 'w').close()\ntime.sleep(60)")
    stored = tmp_path / "book/toy/one.ipynb"
    stored.write_text("the committed notebook")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for stop in (signal.SIGINT, signal.SIGKILL):
        (tmp_path / "book/toy/started").unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "icmllab", "run", "toy/one"],
            cwd=tmp_path,
            env=env,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not (tmp_path / "book/toy/started").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, stop)
        process.wait(timeout=30)
        assert stored.read_text() == "the committed notebook"
        assert sorted(p.name for p in stored.parent.iterdir()) == ["one.ipynb", "one.md", "started"]
