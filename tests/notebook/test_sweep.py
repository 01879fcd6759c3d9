"""Sweeps: order, failures as rows, resumption after a kill, any executor."""

import functools
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from icmllab import preset, sweep
from icmllab.notebook.sweep import identity

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # worker processes get this path too
import sweep_runs as runs  # noqa: E402


@pytest.fixture
def pool():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        yield executor


def calls(folder: Path) -> list[int]:
    return sorted(int(p.name.split(".")[0]) for p in folder.glob("*.*"))


def test_a_row_for_each_combination_in_order():
    frame = sweep(runs.area, over={"width": [1, 2], "height": (3, 1, 2)})
    assert list(frame.columns) == ["width", "height", "area", "square", "error", "seconds"]
    assert frame["width"].tolist() == [1, 1, 1, 2, 2, 2]
    assert frame["height"].tolist() == [3, 1, 2, 3, 1, 2]
    assert frame["area"].tolist() == [3, 1, 2, 6, 2, 4]
    assert frame["square"].tolist() == [False, True, False, False, False, True]
    assert frame["error"].tolist() == [None] * 6
    assert (frame["seconds"] >= 0).all()


def test_order_is_the_grids_whichever_run_ends_first():
    with ThreadPoolExecutor(3) as executor:
        frame = sweep(runs.slow_first, over={"x": range(3)}, executor=executor)
    assert frame["x"].tolist() == [0, 1, 2]
    assert frame["value"].tolist() == [0, 10, 20]
    assert frame["seconds"][0] >= 0.2 > frame["seconds"][1]


def test_a_failed_run_is_a_row_with_its_traceback_and_the_rest_goes_on():
    frame = sweep(runs.one_bad, over={"x": [2, 3, 4]})
    assert list(frame.columns) == ["x", "value", "error", "seconds"]
    assert math.isnan(frame["value"][0])
    assert frame["value"].tolist()[1:] == [3, 4]
    assert "RuntimeError: no result for 2" in frame["error"][0]
    assert "in one_bad" in frame["error"][0]
    assert frame["error"].tolist()[1:] == [None, None]


def leaves(x):
    if x:
        sys.exit("stopped")
    return x


def returns_array(x):
    return {"y": np.zeros(3)}


@pytest.mark.parametrize(
    ("fn", "said"), [(leaves, "SystemExit: stopped"), (returns_array, "numbers or texts")]
)
def test_leaving_and_returning_what_is_no_number_are_failures_too(fn, said):
    assert said in sweep(fn, over={"x": [1]})["error"][0]


def test_interrupts_get_out():
    def stops(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(stops, over={"x": [1]})


def test_values_of_array_libraries_become_plain():
    def double(x):
        assert type(x) in (int, float)
        return {"a": torch.tensor(x * 2), "b": np.float64(x), "c": "text", "d": None}

    frame = sweep(double, over={"x": np.arange(2)})
    assert frame["error"].tolist() == [None, None]
    assert frame["a"].tolist() == [0, 2]
    assert frame["a"].dtype == frame["x"].dtype == np.int64
    frame = sweep(double, over={"x": torch.tensor([0.5])})
    assert frame["b"].tolist() == [0.5]


def test_sequences_are_values_of_one_column():
    frame = sweep(lambda widths: sum(widths), over={"widths": [(1, 2), (3, 4, 5)]})
    assert frame["widths"].tolist() == [(1, 2), (3, 4, 5)]
    assert frame["value"].tolist() == [3, 12]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({}, "over must name at least one argument"),
        ({"x": []}, r"over\['x'\] must hold at least one value"),
        ({"x": "abc"}, r"over\['x'\] must be a list of values: got 'abc'"),
        ({"x": 3}, r"over\['x'\] must be a list of values: got 3"),
        ({"error": [1]}, "must not name an argument 'error'"),
    ],
)
def test_a_bad_grid_is_named(over, said):
    with pytest.raises(ValueError, match=said):
        sweep(runs.one_bad, over=over)


def test_a_result_that_hides_an_argument_stops_the_sweep_at_once():
    seen = []

    def clash(x):
        seen.append(x)
        return {"x": 1}

    with pytest.raises(ValueError, match="must not return the column 'x'"):
        sweep(clash, over={"x": range(100)})
    assert seen == [0]
    with ThreadPoolExecutor(1) as executor, pytest.raises(ValueError, match="column 'x'"):
        sweep(clash, over={"x": range(100)}, executor=executor)


# ---- executors


def test_processes_give_the_same_table(pool):
    over = {"width": [1, 2], "height": [3, 1]}
    here, there = sweep(runs.area, over=over), sweep(runs.area, over=over, executor=pool)
    pd.testing.assert_frame_equal(here.drop(columns="seconds"), there.drop(columns="seconds"))


def test_a_dead_worker_fails_its_runs_and_loses_no_other(tmp_path):
    over = {"x": range(4), "folder": [str(tmp_path)]}
    cache = tmp_path / "cache"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        frame = sweep(runs.kills_its_process, over=over, executor=pool, cache=cache)
    assert frame["value"].tolist()[:2] == [0, 1]
    assert frame["error"][:2].tolist() == [None, None]
    assert "BrokenProcessPool" in frame["error"][2]
    assert "BrokenProcessPool" in frame["error"][3]
    assert math.isnan(frame["seconds"][2])
    assert len(list(cache.glob("*.json"))) == 2
    # a pool that is broken from the start is no different
    broken = sweep(runs.kills_its_process, over=over, executor=pool, cache=cache)
    assert broken["value"].tolist()[:2] == [0, 1]
    assert broken["error"].notna().tolist() == [False, False, True, True]


def test_what_processes_cannot_import_is_named_before_anything_runs(pool):
    def local(x):
        return x

    with pytest.raises(ValueError, match="fn must be a function of a module"):
        sweep(local, over={"x": [1]}, executor=pool)
    with pytest.raises(ValueError, match="fn must be a function of a module"):
        sweep(lambda x: x, over={"x": [1]}, executor=pool)
    # threads share this process
    with ThreadPoolExecutor(1) as threads:
        assert sweep(local, over={"x": [1]}, executor=threads)["value"].tolist() == [1]


def test_a_dask_cluster_is_an_executor_like_any_other(tmp_path):
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None}
    (tmp_path / "marks").mkdir()
    with (
        distributed.LocalCluster(local_directory=tmp_path, **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        executor = client.get_executor()
        frame = sweep(runs.one_bad, over={"x": range(4)}, executor=executor)
        over = {"x": range(3), "folder": [str(tmp_path / "marks")]}
        for _ in range(2):
            counted = sweep(
                runs.count_calls, over=over, executor=executor, cache=tmp_path / "cache"
            )
    assert frame["value"].tolist()[:2] == [0, 1]
    assert "no result for 2" in frame["error"][2]
    assert frame["value"][3] == 3
    assert counted["y"].tolist() == [0, 1 / 3, 2 / 3]
    assert calls(tmp_path / "marks") == [0, 1, 2]


# ---- the cache


@pytest.fixture
def counted(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    return {"x": [0, 1, 2], "folder": [str(marks)]}, tmp_path / "cache", marks


def test_finished_runs_are_read_and_only_new_ones_done(counted):
    over, cache, marks = counted
    first = sweep(runs.count_calls, over=over, cache=cache)
    again = sweep(runs.count_calls, over=over, cache=cache)
    pd.testing.assert_frame_equal(first, again)  # floats and seconds to the last bit
    sweep(runs.count_calls, over={**over, "x": [1, 5]}, cache=cache)
    assert calls(marks) == [0, 1, 2, 5]


def test_failures_are_done_again(tmp_path):
    done = tmp_path / "done"

    def sometimes(x):
        if not done.exists():
            raise OSError("not yet")
        return x

    def once_more(x, path):
        return 1 if Path(path).exists() else 1 / 0

    over = {"x": [1], "path": [str(done)]}
    assert "ZeroDivisionError" in sweep(once_more, over=over, cache=tmp_path / "c")["error"][0]
    done.touch()
    assert sweep(once_more, over=over, cache=tmp_path / "c")["error"][0] is None
    with pytest.raises(ValueError, match="closes over done: it must be a value that JSON can hold"):
        sweep(sometimes, over={"x": [1]}, cache=tmp_path / "c")


@pytest.mark.parametrize("damage", ["", '{"result": {"y"', "[]", '{"result": 3}', b"\xff\x00"])
def test_a_damaged_file_is_named_and_its_run_done_again(counted, damage):
    over, cache, marks = counted
    first = sweep(runs.count_calls, over=over, cache=cache)
    victim = sorted(cache.glob("*.json"))[1]
    victim.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    with pytest.warns(UserWarning, match=f"{victim.name} is damaged"):
        again = sweep(runs.count_calls, over=over, cache=cache)
    assert again.drop(columns="seconds").equals(first.drop(columns="seconds"))
    assert len(calls(marks)) == 4
    json.loads(victim.read_text())


def test_nan_and_infinity_survive_the_cache(tmp_path):
    def odd(x):
        return {"a": math.nan, "b": math.inf, "c": 0.1 + 0.2, "d": 2**70, "e": True, "f": None}

    first = sweep(odd, over={"x": [1]}, cache=tmp_path)
    again = sweep(odd, over={"x": [1]}, cache=tmp_path)
    pd.testing.assert_frame_equal(first, again)
    assert again["c"][0] == 0.30000000000000004


def load(folder: Path, source: str):
    """A module written on the fly, so that two versions of a function can be compared."""
    path = folder / f"version_{len(list(folder.glob('version_*.py')))}.py"
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location("versioned", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BASE = """
    SCALE = 2
    TABLE = {"a": 1}
    def helper(x):
        return x + 1
    def run(x, *, shift=3):
        return helper(x) * SCALE + shift + TABLE["a"]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x + 2"),
        ("SCALE = 2", "SCALE = 5"),
        ('"a": 1', '"a": 7'),
        ("shift=3", "shift=4"),
        ("* SCALE", "/ SCALE"),
        ("def helper(x):", "def helper(x, y=0):"),
    ],
)
def test_changed_code_is_never_served_from_an_old_run(tmp_path, old, new):
    changed = BASE.replace(old, new, 1)
    assert changed != BASE
    one, other = load(tmp_path, BASE).run, load(tmp_path, changed).run
    assert identity(one) == identity(load(tmp_path, BASE).run)
    sweep(one, over={"x": [1, 2]}, cache=tmp_path / "c")
    kept = sweep(other, over={"x": [1, 2]}, cache=tmp_path / "c")
    assert kept["value"].tolist() == [other(1), other(2)]


def test_a_preset_that_the_function_reads_tells_runs_apart(tmp_path, monkeypatch):
    def module(name):
        monkeypatch.setenv("ICMLLAB_PRESET", name)
        made = load(tmp_path, "def run(x):\n        return cfg.n")
        made.cfg = preset(quick={"n": 1}, full={"n": 2})
        return made

    values = [
        sweep(module(p).run, over={"x": [1]}, cache=tmp_path / "c")["value"][0]
        for p in ("quick", "full", "quick")
    ]
    assert values == [1, 2, 1]


def test_closures_and_partials_are_told_apart_by_what_they_hold(tmp_path):
    def make(n):
        def run(x):
            return x + n

        return run

    values = [
        sweep(f, over={"x": [1]}, cache=tmp_path)["value"][0]
        for f in (make(1), make(2), functools.partial(make(2)), functools.partial(make(1)))
    ]
    assert values == [2, 3, 3, 2]
    got = [
        sweep(functools.partial(runs.area, height=h), over={"width": [2]}, cache=tmp_path)["area"][
            0
        ]
        for h in (5, 6)
    ]
    assert got == [10, 12]


def test_the_package_version_is_part_of_the_key(counted, monkeypatch):
    over, cache, marks = counted
    sweep(runs.count_calls, over=over, cache=cache)
    monkeypatch.setattr("icmllab.__version__", "99.0")
    sweep(runs.count_calls, over=over, cache=cache)
    assert len(calls(marks)) == 6


def test_one_one_point_nought_and_true_are_different_arguments(tmp_path):
    def kind(x):
        return type(x).__name__

    for value in (1, 1.0, True, "1"):
        got = sweep(kind, over={"x": [value]}, cache=tmp_path)["value"][0]
        assert got == type(value).__name__


@pytest.mark.parametrize(
    ("fn", "over", "said"),
    [
        (lambda x: x, {"x": [1]}, "function with a name: got a lambda"),
        (abs, {"x": [1]}, "function written in Python"),
        (runs.one_bad, {"x": [{1, 2}]}, r"over\['x'\] must be a value that JSON can hold: got set"),
    ],
)
def test_what_a_cache_cannot_key_is_named(tmp_path, fn, over, said):
    with pytest.raises(ValueError, match=said):
        sweep(fn, over=over, cache=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_function_without_source_is_named(tmp_path):
    space = {"__name__": "nowhere"}
    exec("def made(x):\n    return x", space)
    with pytest.raises(ValueError, match="whose source can be read"):
        sweep(space["made"], over={"x": [1]}, cache=tmp_path)
    assert sweep(space["made"], over={"x": [1]})["value"].tolist() == [1]


def test_kill_dash_nine_loses_the_run_in_flight_and_no_other(counted):
    over, cache, marks = counted
    script = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import sweep_runs as runs; from icmllab import sweep\n"
        f"sweep(runs.count_then_wait, over={over!r}, cache={str(cache)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ})
    deadline = time.monotonic() + 60
    while calls(marks) != [0, 1, 2]:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert len(list(cache.glob("*.json"))) == 2
    (marks / "go").touch()
    frame = sweep(runs.count_then_wait, over=over, cache=cache)
    assert frame["y"].tolist() == [0, 1 / 3, 2 / 3]
    (marks / "go").unlink()
    assert calls(marks) == [0, 1, 2, 2]  # only the third ran again


def test_a_half_written_file_is_never_seen_under_its_name(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fails)

    def run(x):
        return x

    with pytest.raises(OSError, match="disk full"):
        sweep(run, over={"x": [1]}, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
