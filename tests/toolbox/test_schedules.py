"""Schedules: end points, shape, and agreement with torch's own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icmllab.toolbox.schedules import cosine_schedule, wsd_schedule


def test_wsd_rises_stays_and_falls_at_the_stated_steps():
    values = [wsd_schedule(t, 100, 5) for t in range(101)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(values[4:81]) == {1.0}
    assert values[81:100] == pytest.approx([k / 20 for k in range(19, 0, -1)])
    assert values[100] == 0.0


def test_cosine_ends_at_its_floor_and_is_half_way_at_half_time():
    assert cosine_schedule(0, 100) == 1.0
    assert cosine_schedule(50, 100) == pytest.approx(0.5)
    assert cosine_schedule(100, 100, floor=0.1) == 0.1
    assert cosine_schedule(55, 100, 10, floor=0.2) == pytest.approx(0.6)


def test_cosine_without_warmup_agrees_with_torch():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for t in range(40):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(cosine_schedule(t, 40), abs=1e-12)
        optimizer.step()
        scheduler.step()


@settings(deadline=None)
@given(
    total=st.integers(1, 500),
    warmup_share=st.floats(0, 0.5),
    decay_frac=st.floats(0, 0.5),
    floor=st.floats(0, 1),
)
def test_factors_stay_in_the_unit_interval_and_every_step_moves(
    total, warmup_share, decay_frac, floor
):
    warmup = math.floor(warmup_share * total)
    decay_frac = math.floor(decay_frac * total) / total
    for t in range(total):
        assert 0 < wsd_schedule(t, total, warmup, decay_frac) <= 1
        low = floor if t >= warmup else 0
        assert low <= cosine_schedule(t, total, warmup, floor) <= 1 + 1e-12


@pytest.mark.parametrize("schedule", [wsd_schedule, cosine_schedule])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [((-1, 10, 2), "step"), ((0, 0, 0), "total"), ((0, 10, 11), "warmup"), ((0, 10, -1), "warmup")],
)
def test_bad_arguments_are_named(schedule, arguments, name):
    with pytest.raises(ValueError, match=name):
        schedule(*arguments)


def test_parts_that_do_not_fit_the_run_are_refused():
    with pytest.raises(ValueError, match="warmup=9, decay=2"):
        wsd_schedule(0, 10, 9)
    with pytest.raises(ValueError, match="decay_frac"):
        wsd_schedule(0, 10, 0, 1.5)
    with pytest.raises(ValueError, match="floor"):
        cosine_schedule(0, 10, floor=-0.1)
