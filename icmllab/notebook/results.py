"""Results that a chapter ships because they do not fit its time budget.

``book/<part>/<slug>.results.csv`` holds one row a run, written by ``make results`` alone from the
module's ``SHIPPED = (function, grid)``. Its header carries a hash of the module's code: a changed
module makes the file stale, and a stale file is an error.
"""

import datetime
import importlib
import platform
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from icmllab.notebook.chapters import code_hash, hardware, root
from icmllab.notebook.sweep import grid, sweep, write_text


class Recomputed(NamedTuple):
    """A shipped row and the same run done anew: argument values, stored and fresh results."""

    arguments: dict
    stored: dict
    fresh: dict


def results_path(chapter: str) -> Path:
    """Where the shipped results of ``chapter`` stand."""
    return root() / "book" / f"{chapter}.results.csv"


def _module(chapter: str):
    return importlib.import_module(f"icmllab.{chapter.replace('/', '.')}")


def read_header(chapter: str) -> dict[str, str]:
    """The ``# key: value`` lines of a results file.

    Raises:
        FileNotFoundError: there is none; the message names the command that makes it.
    """
    path = results_path(chapter)
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing: make results CHAPTER={chapter}")
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    return dict(pairs)


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

    header = read_header(chapter)
    if header.get("code") != code_hash(Path(_module(chapter).__file__)):
        raise ValueError(
            f"chapter {chapter}: its shipped results were computed by other code than the "
            f"module's: make results CHAPTER={chapter}"
        )
    return pd.read_csv(results_path(chapter), comment="#", float_precision="round_trip")


def write_results(chapter: str, *, executor: Executor | None = None) -> Path:
    """Run the chapter's ``SHIPPED`` grid and write its file, in one step at the end.

    Finished runs are kept in a cache, so that an interrupted call goes on where it was.

    Raises:
        ValueError: the module ships nothing.
        RuntimeError: a run failed; no file is written.
    """
    import torch

    module = _module(chapter)
    if not hasattr(module, "SHIPPED"):
        raise ValueError(f"chapter {chapter} ships no results: its module defines no SHIPPED")
    fn, over = module.SHIPPED
    frame = sweep(fn, over=over, executor=executor, cache=root() / ".icmllab" / "sweeps")
    failed = frame[frame["error"].notna()]
    if len(failed):
        raise RuntimeError(f"{len(failed)} of {len(frame)} runs failed:\n{failed['error'].iloc[0]}")
    import icmllab

    header = {
        "chapter": chapter,
        "code": code_hash(Path(module.__file__)),
        "function": fn.__name__,
        "versions": f"python {platform.python_version()}, torch {torch.__version__.split('+')[0]}, "
        f"icmllab {icmllab.__version__}",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
    }
    lines = "".join(f"# {key}: {value}\n" for key, value in header.items())
    table = frame.drop(columns=["error", "seconds"]).to_csv(index=False)
    path = results_path(chapter)
    write_text(path, lines + table)
    return path


def recompute_row(chapter: str, index: int) -> Recomputed:
    """Do the run of row ``index`` again, for a test that compares."""
    fn, over = _module(chapter).SHIPPED
    arguments = grid(over)[index]
    row = load_results(chapter).iloc[index].to_dict()
    fresh = dict(fn(**arguments))
    return Recomputed(arguments, {k: row[k] for k in fresh}, fresh)
