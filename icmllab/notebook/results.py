"""Results that a chapter ships because they do not fit its time budget.

``book/<part>/<slug>.results.csv`` holds one row a run, written by ``make results`` alone from the
module's ``SHIPPED = (function, grid)``. Its header carries a hash of the module's code: a changed
module makes the file stale, and a stale file is an error.
"""

import contextlib
import csv
import datetime
import hashlib
import importlib
import io
import platform
import re
from concurrent.futures import Executor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from icmllab.notebook import chapters
from icmllab.notebook.chapters import code_hash, hardware
from icmllab.notebook.sweep import grid, numbers, sweep, write_text


class Recomputed(NamedTuple):
    """A shipped row and the same run done anew: argument values, stored and fresh results."""

    arguments: dict
    stored: dict
    fresh: dict


def results_path(chapter: str) -> Path:
    """Where the shipped results of ``chapter`` are written.

    Raises:
        ValueError: ``chapter`` is not of the form ``part/slug``.
        FileNotFoundError: the package was not installed from a checkout.
    """
    _check(chapter)
    return chapters.root() / "book" / f"{chapter}.results.csv"


def _check(chapter: str) -> None:
    if not isinstance(chapter, str) or not re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", chapter):
        raise ValueError(f"chapter must be 'part/slug' in lower case: got {chapter!r}")


def find_results(chapter: str) -> Path:
    """The results file of ``chapter``: beside the running notebook, below here, or in the checkout.

    Raises:
        FileNotFoundError: there is none; the message names the command that makes it.
    """
    _check(chapter)
    part, slug = chapter.split("/")
    here = Path.cwd()
    places = [here / "book" / f"{chapter}.results.csv"]
    if here.name == part:
        places.insert(0, here / f"{slug}.results.csv")
    with contextlib.suppress(FileNotFoundError):  # a wheel: only the places near here are left
        places.append(results_path(chapter))
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"book/{chapter}.results.csv is missing: make it with make results CHAPTER={chapter}"
    )


def _module(chapter: str) -> ModuleType:
    _check(chapter)
    return importlib.import_module(f"icmllab.{chapter.replace('/', '.')}")


def _shipped(chapter: str, module: ModuleType):
    if not hasattr(module, "SHIPPED"):
        raise ValueError(f"chapter {chapter} ships no results: its module defines no SHIPPED")
    return module.SHIPPED


class _Stored(NamedTuple):
    """A results file: its ``# key: value`` lines and its table."""

    header: dict[str, str]
    table: str


def _read(path: Path) -> _Stored:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    count = next((i for i, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    pairs = (line[2:].rstrip("\n").split(": ", 1) for line in lines[:count] if ": " in line)
    return _Stored(dict(pairs), "".join(lines[count:]))


def read_header(chapter: str) -> dict[str, str]:
    """The ``# key: value`` lines of a results file.

    Raises:
        FileNotFoundError: there is none; the message names the command that makes it.
    """
    return _read(find_results(chapter)).header


def load_results(chapter: str):
    """The shipped results of ``chapter``, one row a run.

    Args:
        chapter: ``part/slug``.

    Returns:
        A pandas DataFrame: a column for each argument, then one for each result.

    Raises:
        FileNotFoundError: nothing is shipped.
        ValueError: the module's code has changed since the results were computed.
    """
    import pandas as pd

    stored = _read(find_results(chapter))
    if stored.header.get("code") != code_hash(Path(_module(chapter).__file__)):
        raise ValueError(
            f"chapter {chapter}: its shipped results were computed by other code than the "
            f"module's: make results CHAPTER={chapter}"
        )
    head, *rows = csv.reader(io.StringIO(stored.table))
    return pd.DataFrame({n: _typed([row[i] for row in rows]) for i, n in enumerate(head)})


def _typed(texts: list[str]) -> list:
    """A column's values, as the narrowest of int, float, bool and str that fits them all.

    A float comes back to the last bit; an empty field is NaN; "NA" and "None" are words.
    """
    for read in (int, lambda t: float(t or "nan"), {"True": True, "False": False}.__getitem__):
        try:
            return [read(t) for t in texts]
        except (ValueError, KeyError):
            continue
    return texts


def write_results(
    chapter: str, module: ModuleType | None = None, *, executor: Executor | None = None
) -> Path:
    """Run the grid that the chapter's module ships and write its file, in one step at the end.

    Finished runs are kept below ``.icmllab/``, so that an interrupted call goes on where it was;
    a change of the code they ran makes them count no more.

    Args:
        chapter: ``part/slug``.
        module: defines ``SHIPPED = (fn, {argument: values})``; by default ``icmllab.part.slug``.
        executor: any ``concurrent.futures`` executor; None runs in this process.

    Returns:
        The file's path.

    Raises:
        ValueError: the module ships nothing.
        RuntimeError: a run failed; no file is written, and the finished runs are kept.
    """
    import numpy
    import torch

    import icmllab

    path = results_path(chapter)
    module = _module(chapter) if module is None else module
    fn, over = _shipped(chapter, module)
    name = f"{chapter.replace('/', '.')}.{_code_below(Path(module.__file__))[:12]}"
    frame = sweep(fn, over=over, executor=executor, cache=chapters.root() / ".icmllab" / name)
    failed = frame[frame["error"].notna()]
    if len(failed):
        raise RuntimeError(
            f"chapter {chapter}: {len(failed)} of {len(frame)} runs failed, no file was written; "
            f"the {len(frame) - len(failed)} others are kept for the next call. The first "
            f"failure:\n{failed['error'].iloc[0]}"
        )
    header = {
        "chapter": chapter,
        "code": code_hash(Path(module.__file__)),
        "function": fn.__name__,
        "versions": f"python {platform.python_version()}, torch {torch.__version__.split('+')[0]}, "
        f"numpy {numpy.__version__}, icmllab {icmllab.__version__}",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
    }
    lines = "".join(f"# {key}: {value}\n" for key, value in header.items())
    table = frame.drop(columns=["error", "seconds"]).to_csv(index=False, lineterminator="\n")
    write_text(path, lines + table)
    return path


def _code_below(file: Path) -> str:
    """A hash of a module's code and of the toolbox and kernels that it may call."""
    package = Path(chapters.__file__).resolve().parents[1]
    shared = [
        found
        for folder in (package / "toolbox", package / "kernels", package.parent / "kernels")
        for found in sorted(folder.rglob("*.py"))
    ]
    hashes = (code_hash(f) for f in [file, *shared])
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def recompute_row(chapter: str, index: int) -> Recomputed:
    """Do the run of row ``index`` again, for a test that compares.

    Args:
        chapter: ``part/slug``.
        index: the row, from 0.

    Raises:
        ValueError: there is no such row, or the results are stale.
    """
    fn, over = _shipped(chapter, _module(chapter))
    frame, combos = load_results(chapter), grid(over)
    if not 0 <= index < len(frame):
        raise ValueError(f"index must be a row of the {len(frame)}: got {index}")
    fresh = numbers(fn(**combos[index]))
    return Recomputed(combos[index], {k: frame[k].iloc[index] for k in fresh}, fresh)
