"""Shipped results: round trip, staleness, resumption, and a row done again."""

import importlib
import math
import os
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

import icmllab
from icmllab import load_results
from icmllab.notebook import chapters, results

MODULE = '''
    """A paper."""
    from pathlib import Path

    MARKS = Path({marks!r})

    def run(*, n, method):
        """One run."""
        (MARKS / f"{{n}}.{{method}}.{{len(list(MARKS.iterdir()))}}").touch()
        if (MARKS / "fail").exists() and n == 2:
            raise RuntimeError("no luck")
        return {{"score": n / 3, "tiny": 1e-300 * n, "odd": float("nan"), "label": "NA # 1"}}

    SHIPPED = (run, {{"n": (1, 2), "method": ("ours", "None")}})
'''


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a paper's module ``icmllab.toy.paper`` of its own."""
    monkeypatch.setattr(chapters, "root", lambda: tmp_path / "repo")
    package = tmp_path / "repo" / "icmllab"
    (package / "toy").mkdir(parents=True)
    (package / "toy" / "__init__.py").touch()
    (tmp_path / "marks").mkdir()
    monkeypatch.setattr(icmllab, "__path__", [*icmllab.__path__, str(package)])
    monkeypatch.chdir(tmp_path)
    write_module(tmp_path)
    yield tmp_path
    forget()


def forget():
    importlib.invalidate_caches()
    for name in [n for n in sys.modules if n.startswith("icmllab.toy")]:
        del sys.modules[name]
    vars(icmllab).pop("toy", None)


def write_module(tmp_path, change=lambda s: s):
    import linecache

    source = textwrap.dedent(MODULE).format(marks=str(tmp_path / "marks"))
    file = tmp_path / "repo/icmllab/toy/paper.py"
    file.write_text(change(source))
    for kept in file.parent.glob("__pycache__/*"):  # same size and second: Python would not see it
        kept.unlink()
    linecache.clearcache()
    forget()


def runs_done(tmp_path) -> int:
    return sum(p.name != "fail" for p in (tmp_path / "marks").iterdir())


def test_what_is_written_is_read_back_to_the_last_bit(checkout):
    path = results.write_results("toy/paper")
    assert path == checkout / "repo/book/toy/paper.results.csv"
    frame = load_results("toy/paper")
    assert list(frame.columns) == ["n", "method", "score", "tiny", "odd", "label"]
    assert frame["n"].tolist() == [1, 1, 2, 2]
    assert frame["method"].tolist() == ["ours", "None"] * 2
    assert frame["score"].tolist() == [1 / 3, 1 / 3, 2 / 3, 2 / 3]
    assert frame["tiny"].tolist() == [1e-300, 1e-300, 2e-300, 2e-300]
    assert frame["odd"].isna().all()
    assert frame["label"].tolist() == ["NA # 1"] * 4


def test_the_header_says_what_made_the_file(checkout):
    import numpy
    import torch

    results.write_results("toy/paper")
    header = results.read_header("toy/paper")
    assert header["chapter"] == "toy/paper"
    assert header["function"] == "run"
    assert header["code"] == chapters.code_hash(checkout / "repo/icmllab/toy/paper.py")
    for part in ("python 3.", torch.__version__.split("+")[0], numpy.__version__, "icmllab"):
        assert part in header["versions"]
    assert len(header["date"]) == 10
    assert header["hardware"]
    text = (checkout / "repo/book/toy/paper.results.csv").read_text()
    assert str(checkout) not in text


def test_changed_code_makes_the_file_stale_and_a_comment_does_not(checkout):
    results.write_results("toy/paper")
    write_module(checkout, lambda s: s.replace('"""One run."""', '"""Otherwise said."""  # why'))
    assert len(load_results("toy/paper")) == 4
    write_module(checkout, lambda s: s.replace("n / 3", "n / 4"))
    with pytest.raises(ValueError, match=r"by other code.*make results CHAPTER=toy/paper"):
        load_results("toy/paper")
    results.write_results("toy/paper")
    assert load_results("toy/paper")["score"][0] == 0.25


def test_changed_helpers_are_run_anew_although_the_runs_are_kept(checkout):
    results.write_results("toy/paper")
    assert runs_done(checkout) == 4
    results.write_results("toy/paper")
    assert runs_done(checkout) == 4  # kept
    # a constant that the module reaches in a way that no search of the function finds
    write_module(checkout, lambda s: s + "\nrun.__doc__ = 'x'\n")
    results.write_results("toy/paper")
    assert runs_done(checkout) == 8


def test_a_failed_run_writes_nothing_and_loses_nothing(checkout):
    (checkout / "marks/fail").touch()
    with (
        pytest.raises(RuntimeError, match=r"2 of 4 runs failed(.|\n)*RuntimeError: no luck"),
        ThreadPoolExecutor(2) as executor,
    ):
        results.write_results("toy/paper", executor=executor)
    assert not (checkout / "repo/book").exists()
    (checkout / "marks/fail").unlink()
    assert runs_done(checkout) == 4
    results.write_results("toy/paper")
    assert runs_done(checkout) == 6  # the two that failed
    assert len(load_results("toy/paper")) == 4


def test_a_file_that_cannot_be_finished_leaves_the_old_one(checkout, monkeypatch):
    path = results.write_results("toy/paper")
    before = path.read_bytes()

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        results.write_results("toy/paper")
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_row_is_done_again_with_its_own_arguments(checkout):
    results.write_results("toy/paper")
    row = results.recompute_row("toy/paper", 3)
    assert row.arguments == {"n": 2, "method": "None"}
    assert row.stored["score"] == row.fresh["score"] == 2 / 3
    assert math.isnan(row.stored["odd"])
    assert set(row.stored) == set(row.fresh) == {"score", "tiny", "odd", "label"}
    for index in (-1, 4):
        with pytest.raises(ValueError, match=f"index must be a row of the 4: got {index}"):
            results.recompute_row("toy/paper", index)


def test_an_edited_number_is_seen_by_a_row_done_again(checkout):
    path = results.write_results("toy/paper")
    path.write_text(path.read_text().replace(repr(1 / 3), "0.334"))
    row = results.recompute_row("toy/paper", 0)
    assert row.stored["score"] != row.fresh["score"]


def test_results_are_found_beside_the_running_notebook(checkout, monkeypatch):
    results.write_results("toy/paper")
    elsewhere = checkout / "copy/book/toy"
    elsewhere.mkdir(parents=True)
    (checkout / "repo/book/toy/paper.results.csv").rename(elsewhere / "paper.results.csv")
    with pytest.raises(FileNotFoundError):
        load_results("toy/paper")
    for place in (elsewhere, checkout / "copy"):
        monkeypatch.chdir(place)
        assert len(load_results("toy/paper")) == 4


def test_missing_results_and_modules_that_ship_none_are_named(checkout):
    with pytest.raises(FileNotFoundError, match="make results CHAPTER=toy/paper"):
        load_results("toy/paper")
    write_module(checkout, lambda s: s.replace("SHIPPED", "KEPT"))
    with pytest.raises(ValueError, match="toy/paper ships no results"):
        results.write_results("toy/paper")
    with pytest.raises(ValueError, match="chapter must be 'part/slug'"):
        load_results("../etc/passwd")


def test_another_module_may_be_given(checkout):
    import icmllab.toy.paper as module

    assert results.write_results("toy/paper", module).is_file()
