"""Many runs of one function over a grid, on any executor, resumable, failures kept as rows."""

import functools
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
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from pathlib import Path

RESERVED = ("error", "seconds")
"""Columns that every sweep has."""


def grid(over: Mapping[str, Iterable]) -> list[dict]:
    """Every combination of the values in ``over``, the last argument changing fastest.

    Raises:
        ValueError: no argument, one without values, a bare text, or a reserved name.
    """
    values = {}
    for name, choices in over.items():
        if name in RESERVED:
            raise ValueError(f"over must not name an argument {name!r}: the result has that column")
        if isinstance(choices, str | bytes) or not isinstance(choices, Iterable):
            raise ValueError(f"over[{name!r}] must be a list of values: got {choices!r}")
        values[name] = [_plain(v) for v in choices]
        if not values[name]:
            raise ValueError(f"over[{name!r}] must hold at least one value: got none")
    if not values:
        raise ValueError("over must name at least one argument: got an empty mapping")
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
        fn: returns a number or a mapping of names to numbers (texts and truth values too). With
            an executor of processes it must be importable by them: a function of a module.
        over: argument name → values; 0-d arrays and tensors count as plain numbers.
        executor: any ``concurrent.futures`` executor (a Dask client's ``get_executor()`` too);
            None runs in this process.
        cache: folder in which each finished run is kept; a later call with the same function
            (its source, what it closes over, the functions and plain values of its module that
            it uses), arguments and package version reads it instead of running again. Failed
            runs are done again.

    Returns:
        A pandas DataFrame, one row a run in the grid's order: the arguments, the results (a bare
        number as ``value``), ``error`` (None, or the traceback of a run that failed) and
        ``seconds`` (NaN when the run's process died).

    Raises:
        ValueError: an empty grid, results that collide with argument names, a function that the
            executor's processes cannot import, or, with ``cache``, a function that cannot be
            told from another or arguments that JSON cannot hold.
    """
    import pandas as pd

    from icmllab.notebook.progress import progress

    combos = grid(over)
    store = None if cache is None else _Cache(Path(cache), fn)
    outcomes: list[dict | None] = [store.read(c) if store else None for c in combos]
    todo = [i for i, outcome in enumerate(outcomes) if outcome is None]

    def keep(i: int, outcome: dict) -> None:
        both = set(outcome["result"]) & {*over, *RESERVED}
        if both:
            raise ValueError(f"fn must not return the column {min(both)!r}: it is taken")
        outcomes[i] = outcome
        if store is not None and outcome["error"] is None:
            store.write(combos[i], outcome)

    label = getattr(fn, "__name__", "sweep")
    if executor is None:
        for i in progress(todo, label):
            keep(i, _call(fn, combos[i]))
    else:
        _check_importable(fn, executor)
        jobs = {}
        try:
            for i in todo:
                try:
                    jobs[executor.submit(_call, fn, combos[i])] = i
                except Exception:  # the pool broke while runs were handed in
                    keep(i, _lost())
            for job in progress(as_completed(jobs), label, total=len(jobs)):
                try:
                    outcome = job.result()
                except Exception:  # the worker died, or the result could not travel
                    outcome = _lost()
                keep(jobs[job], outcome)
        except BaseException:  # an interrupt must not leave the pool working on
            for job in jobs:
                job.cancel()
            raise

    rows = [{**c, **o["result"]} for c, o in zip(combos, outcomes, strict=True)]
    names = list(dict.fromkeys(itertools.chain(over, *(o["result"] for o in outcomes))))
    frame = pd.DataFrame({n: _column([row.get(n) for row in rows]) for n in names})
    frame["error"] = pd.Series([o["error"] for o in outcomes], dtype=object)
    frame["seconds"] = [float(o["seconds"]) for o in outcomes]
    return frame


def _column(values: list):
    """One column; sequences stay whole values."""
    import pandas as pd

    plain = all(v is None or isinstance(v, bool | int | float | str) for v in values)
    return pd.Series(values, dtype=None if plain else object)


def _check_importable(fn: Callable, executor: Executor) -> None:
    """Say at once what a process pool could only say by dying."""
    if not isinstance(executor, ProcessPoolExecutor):
        return
    plain = fn.func if isinstance(fn, functools.partial) else fn
    name = getattr(plain, "__qualname__", repr(plain))
    context = getattr(executor, "_mp_context", None)
    forked = context is not None and context.get_start_method() == "fork"
    if "<" in name or (getattr(plain, "__module__", "") == "__main__" and not forked):
        raise ValueError(
            f"fn must be a function of a module, for other processes to import it: got {name} "
            f"of {getattr(plain, '__module__', 'no module')}"
        )


def _lost() -> dict:
    """The outcome of a run whose own account never came back; call it while handling why."""
    return {"result": {}, "error": traceback.format_exc(), "seconds": float("nan")}


def _call(fn: Callable, arguments: dict) -> dict:
    """One run; whatever it raises is part of its outcome."""
    begin = time.perf_counter()
    try:
        result = numbers(fn(**arguments))
        error = None
    except (Exception, SystemExit):  # a run that calls sys.exit has failed, the sweep has not
        result, error = {}, traceback.format_exc()
    return {"result": result, "error": error, "seconds": time.perf_counter() - begin}


def numbers(value: object) -> dict:
    """What a run returned, as a mapping of names to plain values."""
    if isinstance(value, Mapping):
        return {str(k): _result(v) for k, v in value.items()}
    return {"value": _result(value)}


def _plain(value: object) -> object:
    """The plain value of a 0-d array or tensor, and any other value as it is."""
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and tuple(shape) == () else value


def _result(value: object):
    value = _plain(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"fn must return numbers or texts: got {type(value).__name__}")


def identity(fn: Callable) -> list:
    """What tells ``fn`` from another function or from its own earlier version, as plain data.

    Its name, source and default values, the values it closes over, and the functions and plain
    values of its own module that it uses, followed in turn.

    Raises:
        ValueError: it is a lambda, is not written in Python, or closes over values that JSON
            cannot hold.
    """
    return _identity(fn, set())


def _identity(fn: Callable, seen: set) -> list:
    if isinstance(fn, functools.partial):
        given = [_jsonable("partial's argument", v) for v in fn.args]
        named = {k: _jsonable(f"partial's {k}", v) for k, v in sorted(fn.keywords.items())}
        return ["partial", _identity(fn.func, seen), given, named]
    plain = inspect.unwrap(fn)
    if not inspect.isfunction(plain):
        raise ValueError(f"cache needs a function written in Python: got {fn!r}")
    if plain.__name__ == "<lambda>":
        raise ValueError("cache needs a function with a name: got a lambda")
    try:
        source = inspect.getsource(plain)
    except (OSError, TypeError):
        raise ValueError(f"cache needs a function whose source can be read: got {fn!r}") from None
    seen.add(plain)
    used = inspect.getclosurevars(plain)
    parts = {}
    for name, value in sorted({**used.globals, **used.nonlocals}.items()):
        here = inspect.isfunction(value) and value.__module__ == plain.__module__
        if here:
            inner = inspect.unwrap(value)
            if inner not in seen and inner.__name__ != "<lambda>":
                parts[name] = _identity(value, seen)
        elif name in used.nonlocals:
            parts[name] = _jsonable(f"a function that closes over {name}: it", value)
        elif type(value).__name__ == "Preset":
            parts[name] = repr(value)
        elif isinstance(value, bool | int | float | str | tuple | list | dict):
            try:
                parts[name] = _jsonable(name, value)
            except ValueError:
                continue  # a table of functions, say: its own entries are not followed
    defaults = {
        k: repr(p.default)
        for k, p in inspect.signature(plain).parameters.items()
        if isinstance(p.default, bool | int | float | str | tuple | None)
    }
    return [f"{plain.__module__}.{plain.__qualname__}", source, defaults, parts]


def _jsonable(name: str, value: object) -> object:
    value = _plain(value)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"cache: {name} must be a value that JSON can hold: got {type(value).__name__}"
        ) from None
    return value


class _Cache:
    """Finished runs as files; a file is there whole or not at all."""

    def __init__(self, folder: Path, fn: Callable):
        from icmllab import __version__

        self._identity = [identity(fn), __version__]
        self._folder = folder

    def _path(self, arguments: dict) -> Path:
        plain = {name: _jsonable(f"over[{name!r}]", v) for name, v in arguments.items()}
        text = json.dumps([self._identity, plain], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def read(self, arguments: dict) -> dict | None:
        """The kept outcome, or None; a damaged file is named, and its run done again."""
        path = self._path(arguments)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            result = {name: _result(value) for name, value in kept["result"].items()}
            return {"result": result, "error": None, "seconds": float(kept["seconds"])}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            warnings.warn(f"cache file {path.name} is damaged: its run is done again", stacklevel=4)
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
