"""Many runs of one function over a grid, on any executor, resumable, failures kept as rows."""

import hashlib
import inspect
import itertools
import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, as_completed
from pathlib import Path


def grid(over: Mapping[str, Iterable]) -> list[dict]:
    """Every combination of the values in ``over``, the last argument changing fastest.

    Raises:
        ValueError: no argument, or one without values.
    """
    values = {name: list(choices) for name, choices in over.items()}
    if not values:
        raise ValueError("over must name at least one argument: got an empty mapping")
    for name, choices in values.items():
        if not choices:
            raise ValueError(f"over[{name!r}] must hold at least one value: got none")
    return [dict(zip(values, combo, strict=True)) for combo in itertools.product(*values.values())]


def sweep(
    fn: Callable,
    *,
    over: Mapping[str, Iterable],
    executor: Executor | None = None,
    cache: str | Path | None = None,
):
    """Call ``fn(**arguments)`` for every combination in ``over``.

    Args:
        fn: returns a number or a mapping of names to numbers. With an executor of processes it
            must be importable by them: a function of a module.
        over: argument name → values.
        executor: any ``concurrent.futures`` executor (a Dask client's ``get_executor()`` too);
            None runs in this process.
        cache: folder in which each finished run is kept; a later call with the same function
            source, arguments and package version reads it instead of running again.

    Returns:
        A pandas DataFrame, one row a run in the grid's order: the arguments, the results (a bare
        number as ``value``), ``error`` (None, or the traceback of a run that failed) and
        ``seconds``.

    Raises:
        ValueError: an empty grid, results that collide with argument names, or, with ``cache``,
            a function whose source cannot be read or arguments that JSON cannot hold.
    """
    import pandas as pd

    from icmllab.notebook.progress import progress

    combos = grid(over)
    store = None if cache is None else _Cache(Path(cache), fn)
    outcomes: list[dict | None] = [store.read(c) if store else None for c in combos]
    todo = [i for i, outcome in enumerate(outcomes) if outcome is None]

    def keep(i: int, outcome: dict) -> None:
        outcomes[i] = outcome
        if store is not None and outcome["error"] is None:
            store.write(combos[i], outcome)

    label = getattr(fn, "__name__", "sweep")
    if executor is None:
        for i in progress(todo, label):
            keep(i, _call(fn, combos[i]))
    else:
        jobs = {}
        for i in todo:
            try:
                jobs[executor.submit(_call, fn, combos[i])] = i
            except Exception:
                keep(i, {"result": {}, "error": traceback.format_exc(), "seconds": 0.0})
        for job in progress(as_completed(jobs), label, total=len(jobs)):
            try:
                outcome = job.result()
            except Exception:  # the worker died, or the result could not travel
                outcome = {"result": {}, "error": traceback.format_exc(), "seconds": 0.0}
            keep(jobs[job], outcome)

    clash = set(over) | {"error", "seconds"}
    rows = []
    for arguments, outcome in zip(combos, outcomes, strict=True):
        both = clash & set(outcome["result"])
        if both:
            raise ValueError(f"fn must not return the column {sorted(both)[0]!r}: it is taken")
        rows.append({**arguments, **outcome["result"]})
    frame = pd.DataFrame(rows)
    frame["error"] = pd.Series([o["error"] for o in outcomes], dtype=object)
    frame["seconds"] = [o["seconds"] for o in outcomes]
    return frame


def _call(fn: Callable, arguments: dict) -> dict:
    """One run; whatever it raises is part of its outcome."""
    begin = time.perf_counter()
    try:
        value = fn(**arguments)
        result = _numbers(value)
        error = None
    except Exception:
        result, error = {}, traceback.format_exc()
    return {"result": result, "error": error, "seconds": time.perf_counter() - begin}


def _numbers(value: object) -> dict:
    if isinstance(value, Mapping):
        return {str(k): _scalar(v) for k, v in value.items()}
    return {"value": _scalar(value)}


def _scalar(value: object):
    """A plain number, text or truth value from whatever array library it came from."""
    if hasattr(value, "item") and tuple(getattr(value, "shape", ())) == ():
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"fn must return numbers or texts: got {type(value).__name__}")


class _Cache:
    """Finished runs as files; a file is there whole or not at all."""

    def __init__(self, folder: Path, fn: Callable):
        from icmllab import __version__

        try:
            source = inspect.getsource(inspect.unwrap(fn))
        except (OSError, TypeError):
            raise ValueError(
                f"cache needs a function whose source can be read: got {fn!r}"
            ) from None
        self._identity = [f"{fn.__module__}.{fn.__qualname__}", source, __version__]
        self._folder = folder

    def _path(self, arguments: dict) -> Path:
        try:
            text = json.dumps([*self._identity, arguments], sort_keys=True)
        except TypeError as error:
            raise ValueError(f"over must hold values that JSON can hold: {error}") from None
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def read(self, arguments: dict) -> dict | None:
        """The kept outcome, or None; a damaged file is named, and its run done again."""
        path = self._path(arguments)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return {"result": kept["result"], "error": None, "seconds": kept["seconds"]}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            warnings.warn(f"cache file {path.name} is damaged: its run is done again", stacklevel=3)
            return None

    def write(self, arguments: dict, outcome: dict) -> None:
        """Keep an outcome."""
        kept = {"arguments": arguments, **outcome}
        write_text(self._path(arguments), json.dumps(kept))


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step: others see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
