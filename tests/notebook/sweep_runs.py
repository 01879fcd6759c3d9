"""Functions that the sweep tests run in other processes, which must import them."""

import os
import time
from pathlib import Path


def area(width, height):
    return {"area": width * height, "square": width == height}


def slow_first(x):
    """Later runs finish first."""
    time.sleep(0.2 if x == 0 else 0)
    return x * 10


def one_bad(x):
    if x == 2:
        raise RuntimeError(f"no result for {x}")
    return x


def kills_its_process(x, folder):
    """A worker that the system kills (out of memory, say) at x = 2."""
    if x == 2:
        time.sleep(0.5)  # the first two are done by then
        os._exit(9)
    return x


def count_calls(x, folder):
    """Leaves a mark for each call."""
    marks = Path(folder)
    (marks / f"{x}.{time.monotonic_ns()}").touch()
    return {"y": x / 3, "name": f"run {x}"}


def count_then_wait(x, folder):
    """The first two runs are quick, the third never ends."""
    (Path(folder) / f"{x}.{time.monotonic_ns()}").touch()
    while x == 2 and not (Path(folder) / "go").exists():
        time.sleep(0.05)
    return {"y": x / 3}
