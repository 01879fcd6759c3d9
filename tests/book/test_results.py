"""Shipped results are what the module computes today: the code's hash, and one row done anew."""

import importlib
import random

import pytest

from icmllab.notebook import chapters
from icmllab.notebook.results import load_results, recompute_row, results_path
from icmllab.notebook.sweep import grid

SHIPPING = [
    name
    for name in chapters.chapter_names()
    if hasattr(importlib.import_module(f"icmllab.{name.replace('/', '.')}"), "SHIPPED")
]
RTOL = 1e-5
"""Relative difference allowed between processors and thread counts over a long training run."""


def test_no_results_file_without_a_module_that_makes_it():
    files = (chapters.root() / "book").glob("*/*.results.csv")
    names = {f"{f.parent.name}/{f.name.removesuffix('.results.csv')}" for f in files}
    assert names == set(SHIPPING)


@pytest.mark.parametrize("name", SHIPPING)
def test_results_cover_the_grid_and_belong_to_the_code(name):
    _, over = importlib.import_module(f"icmllab.{name.replace('/', '.')}").SHIPPED
    frame = load_results(name)  # raises when the module's code has changed
    rows = grid(over)
    assert len(frame) == len(rows)
    for row, (_, stored) in zip(rows, frame.iterrows(), strict=True):
        assert {k: stored[k] for k in row} == row
    assert results_path(name).stat().st_size < 200_000


@pytest.mark.parametrize("name", SHIPPING)
def test_a_row_picked_anew_each_run_is_computed_again(name):
    index = random.SystemRandom().randrange(len(load_results(name)))
    done = recompute_row(name, index)
    assert done.fresh
    for key, value in done.fresh.items():
        stored = done.stored[key]
        wanted = stored if isinstance(stored, str) else pytest.approx(stored, rel=RTOL)
        assert value == wanted, (index, done.arguments)
