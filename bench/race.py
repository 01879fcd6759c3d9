"""Two ways of doing the same work, timed in turns."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Row(NamedTuple):
    """One comparison: what, against what, seconds of both, and how far results differ."""

    what: str
    beside: str
    ours: float
    theirs: float
    agreement: str

    @property
    def ratio(self) -> float:
        """Their time over ours."""
        return self.theirs / self.ours


def race(ours: Callable, theirs: Callable, *, rounds: int = 5) -> tuple[float, float]:
    """Median seconds of two calls that take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, kept in zip((ours, theirs), times, strict=True):
            begin = time.perf_counter()
            call()
            kept.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])
