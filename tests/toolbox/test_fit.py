"""The training loop, the averaged model, and paired comparisons."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from icmllab.toolbox.fit import EMA, PairedRuns, compare_paired, fit


def line(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 1).double()


def batches(n: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 3, generator=g, dtype=torch.float64) for _ in range(n)]


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(1) - x.sum(dim=1)).square().mean()


def test_loop_equals_the_one_written_by_hand():
    mine, theirs = line(), line()
    history = fit(
        mine,
        loss_fn,
        batches(20),
        torch.optim.Adam(mine.parameters(), lr=0.1),
        schedule=lambda t: 1 / (t + 1),
        clip=0.5,
    )
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1)
    losses = []
    for t, x in enumerate(batches(20)):
        optimizer.param_groups[0]["lr"] = 0.1 / (t + 1)
        optimizer.zero_grad()
        loss = loss_fn(theirs, x)
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-12, atol=0)
    np.testing.assert_allclose(history.losses, losses, rtol=1e-12)
    assert (history.grad_norms > 0).all()


def test_accumulated_parts_give_the_gradient_of_the_whole_batch():
    whole, parts = line(), line()
    histories = [
        fit(
            model,
            loss_fn,
            batches(6),
            torch.optim.SGD(model.parameters(), lr=0.1),
            accumulate=n,
        )
        for model, n in ((whole, 1), (parts, 3))  # 8 samples in parts of 3, 3 and 2
    ]
    torch.testing.assert_close(whole.weight, parts.weight)
    np.testing.assert_allclose(histories[0].losses, histories[1].losses)


def test_rates_return_to_their_peaks_and_several_optimisers_are_stepped():
    model = line()
    weight = torch.optim.SGD([model.weight], lr=0.1)
    bias = torch.optim.SGD([model.bias], lr=0.2)
    start = [p.detach().clone() for p in model.parameters()]
    fit(model, loss_fn, batches(5), [weight, bias], schedule=lambda t: 0.5)
    assert all((a != b).any() for a, b in zip(start, model.parameters(), strict=True))
    assert weight.param_groups[0]["lr"] == 0.1
    assert bias.param_groups[0]["lr"] == 0.2


def test_evaluation_comes_at_its_steps_and_once_at_the_end_in_eval_mode():
    model, modes, seen = line(), [], []
    history = fit(
        model,
        loss_fn,
        batches(7),
        torch.optim.SGD(model.parameters(), lr=0.0),
        evaluate=lambda m: modes.append(m.training) or 1.0,
        eval_every=3,
        on_step=lambda t, loss: seen.append(t),
    )
    assert history.eval_steps.tolist() == [3, 6, 7]
    assert modes == [False] * 3
    assert model.training
    assert seen == list(range(7))


def test_average_is_the_exponential_sum_of_the_iterates():
    model = line()
    ema, weights = EMA(model, decay=0.8), [model.weight.detach().clone()]
    fit(
        model,
        loss_fn,
        batches(6),
        torch.optim.SGD(model.parameters(), lr=0.1),
        ema=ema,
        on_step=lambda t, loss: weights.append(model.weight.detach().clone()),
    )
    expected = 0.8**6 * weights[0] + sum(0.2 * 0.8 ** (6 - t) * weights[t] for t in range(1, 7))
    torch.testing.assert_close(ema.model.weight.data, expected)
    assert not any(p.requires_grad for p in ema.model.parameters())


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step():
    model = line()
    bad = batches(4)
    bad[2] = bad[2] * math.inf
    with pytest.raises(FloatingPointError, match="step 2"):
        fit(model, loss_fn, bad, torch.optim.SGD(model.parameters(), lr=1e-3))


def test_pairing_takes_out_the_spread_between_seeds():
    def run(arm: str, seed: int) -> float:
        rng = np.random.default_rng(seed)
        return 10 * rng.standard_normal() + (0.1 if arm == "b" else 0.0) + 0.01 * rng.random()

    runs = compare_paired(run, arms=["a", "b"], seeds=range(6))
    gap = runs.difference("b", "a")
    assert np.allclose(gap.per_seed, 0.1)
    assert runs.scores["a"].std() > 1
    assert gap.low <= 0.1 <= gap.high + 1e-12


def test_interval_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 9))
    gap = PairedRuns({"a": a, "b": b}).difference("a", "b")
    theirs = stats.ttest_rel(a, b).confidence_interval()
    assert (gap.low, gap.high) == pytest.approx((theirs.low, theirs.high))
    assert gap.sem == pytest.approx(stats.sem(a - b))
    single = PairedRuns({"a": [1.0], "b": [3.0]}).difference("a", "b")
    assert single.mean == -2
    assert math.isnan(single.sem)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: EMA(line(), decay=1.0), "decay"),
        (lambda: fit(line(), loss_fn, [], [], clip=0.0), "clip"),
        (lambda: fit(line(), loss_fn, [], [], eval_every=0), "eval_every"),
        (lambda: fit(line(), loss_fn, [], [], accumulate=0), "accumulate"),
        (lambda: PairedRuns({"a": [1.0], "b": [1.0, 2.0]}), "one length"),
        (lambda: PairedRuns({}), "scores"),
        (lambda: PairedRuns({"a": [1.0]}).difference("a", "c"), "against"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
