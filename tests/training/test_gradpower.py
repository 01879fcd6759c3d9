"""GradPower: the transform, the optimisers, the theory, the experiments' own machinery."""

import copy
import math
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats
from torch import nn

from icmllab.training import gradpower as G
from icmllab.training.gradpower import (
    AdamWPower,
    GradPower,
    MuonPower,
    best_drift_power,
    best_power,
    burst_gain,
    drift,
    drift_curve,
    gain_factor,
    newton_schulz5,
    noise_stats,
    score_power,
    sign_power,
    sign_power_,
    tempered_logit,
)

LAWS = ["uniform", "gaussian", "laplace", ("gennorm", 1.5), ("gennorm", 3.0), ("gennorm", 4.0)]
SCIPY = {
    "uniform": stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)),
    "gaussian": stats.norm(),
    "laplace": stats.laplace(scale=math.sqrt(0.5)),
}


def scipy_law(noise):
    if isinstance(noise, str):
        return SCIPY[noise]
    return stats.gennorm(noise[1], scale=1 / stats.gennorm(noise[1]).std())


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# The transform

exponents = st.floats(0.2, 4.0)
entries = st.lists(
    st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-6), min_size=1, max_size=8
)


@settings(deadline=None)
@given(entries, exponents, exponents)
def test_powers_compose(values, p, q):
    g = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(
        sign_power(sign_power(g, q), p), sign_power(g, p * q), rtol=1e-12, atol=0
    )


@settings(deadline=None)
@given(entries, exponents, st.floats(1e-3, 1e3))
def test_transform_is_odd_and_homogeneous(values, p, scale):
    g = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(sign_power(-g, p), -sign_power(g, p))
    torch.testing.assert_close(
        sign_power(scale * g, p), scale**p * sign_power(g, p), rtol=1e-12, atol=0
    )


def test_small_power_tends_to_the_sign():
    g = normal(50)
    torch.testing.assert_close(sign_power(g, 1e-9), g.sign(), rtol=1e-7, atol=0)


def test_power_one_returns_the_same_tensor_untouched():
    g = normal(5)
    version = g._version
    assert sign_power(g, 1.0) is g
    assert sign_power(g, 1.0, out=g) is g
    assert g._version == version
    out = torch.empty_like(g)
    assert sign_power(g, 1, out=out) is out
    assert torch.equal(out, g)


def test_zero_nan_and_infinities_pass():
    g = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -4.0])
    out = sign_power(g, 0.5)
    assert out[:2].tolist() == [0, 0]
    assert out[2:4].tolist() == [math.inf, -math.inf]
    assert out[4].isnan()
    assert out[5] == -2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_raised_in_float32_and_rounded_once(dtype):
    g = normal(200, dtype=torch.float32).to(dtype)
    out = sign_power(g, 1.2)
    assert out.dtype == dtype
    assert torch.equal(out, sign_power(g.float(), 1.2).to(dtype))


def test_float32_carries_the_rounding_of_the_exponent_alone():
    # p = 1.2 is off by 4e-8 in float32, which log|g| = -27.6 turns into a relative 1.3e-6
    g = 10 ** torch.linspace(-12, 0, 500) * normal(500, dtype=torch.float32).sign()
    for p in (0.5, 1.2, 2.0):
        torch.testing.assert_close(
            sign_power(g, p).double(), sign_power(g.double(), p), rtol=2e-6, atol=0
        )


def test_powers_underflow_where_the_docstring_says():
    p = 1.2
    edge = 2.0 ** (-126 / p)
    above = sign_power(torch.tensor([1.01 * edge]), p)
    assert above.item() >= torch.finfo(torch.float32).tiny
    root = 2.0 ** (-63 / p)
    assert root == pytest.approx(1.6e-16, rel=0.05)
    assert sign_power(torch.tensor([1e-3 * root]), p).square().item() < 2.0**-126


def test_gradients_are_powered_in_place_and_missing_ones_skipped():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    a.grad = torch.tensor([-4.0, 0.0, 9.0])
    where = a.grad.data_ptr()
    sign_power_([a, b], 0.5)
    assert a.grad.tolist() == [-2.0, 0.0, 3.0]
    assert a.grad.data_ptr() == where
    assert b.grad is None


@pytest.mark.parametrize("p", [0.0, -1.0, math.inf, math.nan, "1.2", True, None])
def test_bad_powers_are_refused_everywhere(p):
    weight = nn.Parameter(torch.ones(2, 2))
    sgd = torch.optim.SGD([weight], lr=0.1)
    for call in (
        lambda: sign_power(torch.ones(2), p),
        lambda: sign_power_([weight], p),
        lambda: AdamWPower([weight], p=p),
        lambda: MuonPower([weight], p=p),
        lambda: GradPower(sgd, p=p),
        lambda: gain_factor(p, "gaussian"),
        lambda: drift(p, 1.0, 1.0, "gaussian"),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()


def test_sparse_and_complex_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    for optimizer in (AdamWPower(table.parameters()), MuonPower(table.parameters())):
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
    with pytest.raises(RuntimeError, match="sparse"):
        GradPower(torch.optim.SGD(table.parameters(), lr=0.1)).step()
    number = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex64"):
        AdamWPower([number])
    with pytest.raises(ValueError, match="complex64"):
        GradPower(torch.optim.SGD([number], lr=0.1))
    with pytest.raises(ValueError, match="complex64"):
        sign_power(number, 1.2)


# AdamWPower


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    shapes = [(4, 3), (5,), (1,)]
    return [nn.Parameter(normal(*s, seed=i).to(dtype)) for i, s in enumerate(shapes)]


def give_gradients(params: list[nn.Parameter], step: int, *, scale: float = 1.0) -> None:
    for i, param in enumerate(params):
        g = scale * normal(*param.shape, seed=100 * step + i)
        param.grad = g.to(param.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("maximize", [False, True])
def test_power_one_is_torch_adamw_bit_for_bit(dtype, maximize):
    mine, theirs = weights(dtype), weights(dtype)
    ours = AdamWPower(mine, p=1.0, maximize=maximize, fused=False)
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    torchs = torch.optim.AdamW(theirs, maximize=maximize, foreach=True, **settings)
    for t in range(50):
        give_gradients(mine, t)
        give_gradients(theirs, t)
        ours.step()
        torchs.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("p", [0.5, 1.2, 2.0])
def test_power_equals_torch_adamw_on_powered_gradients(p):
    mine, theirs = weights(), weights()
    ours = AdamWPower(mine, p=p, fused=False)
    torchs = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for t in range(20):
        give_gradients(mine, t)
        give_gradients(theirs, t)
        for x in theirs:
            x.grad = x.grad.sign() * x.grad.abs() ** p
        ours.step()
        torchs.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [1.0, 1.2])
def test_kernel_path_agrees_with_the_foreach_path(dtype, p):
    mine, theirs = weights(dtype), weights(dtype)
    fused = AdamWPower(mine, p=p, fused=True, maximize=True, eps_mode="power")
    plain = AdamWPower(theirs, p=p, fused=False, maximize=True, eps_mode="power")
    for t in range(20):
        give_gradients(mine, t)
        give_gradients(theirs, t)
        fused.step()
        plain.step()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("p", [0.5, 1.2, 2.0])
def test_scaling_the_gradient_changes_nothing_without_eps(p):
    mine, theirs = weights(), weights()
    ours, scaled = (AdamWPower(x, p=p, eps=0.0, fused=False) for x in (mine, theirs))
    for t in range(50):
        give_gradients(mine, t)
        give_gradients(theirs, t, scale=1e3)
        ours.step()
        scaled.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_eps_mode_power_keeps_tiny_gradients_moving():
    moved = {}
    for mode in ("plain", "power"):
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = AdamWPower([weight], p=1.4, eps_mode=mode, weight_decay=0.0)
        for _ in range(10):
            weight.grad = torch.full((1,), 1e-6, dtype=torch.float64)
            optimizer.step()
        moved[mode] = -weight.item() / 1e-2
    # |g|^p = 10^-8.4 is below eps = 10^-8; eps^p = 10^-11.2 is far below it
    assert moved["plain"] == pytest.approx(1 / (1 + 10**0.4), rel=1e-3)
    assert moved["power"] == pytest.approx(1, rel=5e-3)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_zero_gradients_leave_a_weight_where_decay_puts_it(eps, fused):
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamWPower([weight], lr=0.1, weight_decay=0.5, eps=eps, fused=fused)
    weight.grad = torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.full((3,), 0.95))


def test_groups_have_powers_of_their_own_and_late_parameters_their_own_step():
    mine, theirs = weights(), weights()
    groups = [{"params": mine[:1], "p": 0.7}, {"params": mine[1:], "p": 1.5}]
    together = AdamWPower(groups, fused=False)
    apart = [AdamWPower(theirs[:1], p=0.7), AdamWPower(theirs[1:], p=1.5)]
    for t in range(6):
        for params in (mine, theirs):
            give_gradients(params, t)
            if t < 3:
                params[2].grad = None
        together.step()
        for o in apart:
            o.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
    assert int(together.state[mine[2]]["step"]) == 3
    fresh = AdamWPower(weights()[2:], p=1.5, fused=False)
    give_gradients(fresh.param_groups[0]["params"], 9)
    fresh.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [AdamWPower, MuonPower])
def test_state_dict_round_trip_goes_on_as_if_nothing_had_happened(make, dtype):
    mine = [nn.Parameter(normal(4, 3, seed=i).to(dtype)) for i in range(2)]
    optimizer = make([{"params": mine[:1], "p": 0.8}, {"params": mine[1:]}], lr=0.1)
    for t in range(5):
        give_gradients(mine, t)
        optimizer.step()
    theirs = [nn.Parameter(x.detach().clone()) for x in mine]
    other = make([{"params": theirs[:1]}, {"params": theirs[1:]}], lr=0.7)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["p"] == 0.8
    for t in range(5, 10):
        give_gradients(mine, t)
        give_gradients(theirs, t)
        optimizer.step()
        other.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_torch_adamw_goes_on_as_adamw():
    mine, theirs = weights(), weights()
    torchs = torch.optim.AdamW(theirs, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    give_gradients(theirs, 0)
    torchs.step()
    ours = AdamWPower(mine, p=1.2, fused=False)
    # the two must share no state afterwards, not even the step count
    ours.load_state_dict(torchs.state_dict())
    assert ours.param_groups[0]["p"] == 1.0
    with torch.no_grad():
        for a, b in zip(mine, theirs, strict=True):
            a.copy_(b)
    give_gradients(mine, 1)
    give_gradients(theirs, 1)
    ours.step()
    torchs.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fused", [False, True])
def test_without_eps_a_square_that_underflows_makes_no_step(fused):
    weight = nn.Parameter(torch.ones(2))
    optimizer = AdamWPower([weight], lr=0.1, weight_decay=0.0, eps=0.0, p=1.0, fused=fused)
    weight.grad = torch.tensor([1e-30, 1.0])
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"][0] > 0
    torch.testing.assert_close(weight.data, torch.tensor([1.0, 0.9]))


@pytest.mark.parametrize("fused", [False, True])
def test_bfloat16_moments_of_torch_adamw_are_widened(fused):
    mine, theirs = weights(torch.bfloat16), weights(torch.bfloat16)
    torchs = torch.optim.AdamW(theirs)
    give_gradients(theirs, 0)
    torchs.step()
    ours = AdamWPower(mine, fused=fused)
    ours.load_state_dict(torchs.state_dict())
    for a, b in zip(mine, theirs, strict=True):
        assert torchs.state[b]["exp_avg"].dtype == torch.bfloat16
        for name in ("exp_avg", "exp_avg_sq"):
            assert ours.state[a][name].dtype == torch.float32
            assert torch.equal(ours.state[a][name], torchs.state[b][name].float())
    give_gradients(mine, 1)
    ours.step()
    assert all(ours.state[x]["step"] == 2 for x in mine)


def test_bfloat16_weights_keep_float32_moments():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamWPower([weight], lr=0.1)
    weight.grad = torch.full((4,), 0.1, dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
    assert weight.dtype == torch.bfloat16
    assert weight[0].item() == pytest.approx(0.89, abs=0.01)


def test_closures_run_once_a_step_with_gradients():
    weight = nn.Parameter(torch.ones(2, 2))
    base = torch.optim.SGD([weight], lr=0.1)
    for optimizer in (AdamWPower([weight]), MuonPower([weight]), GradPower(base)):
        calls = []

        def closure(optimizer=optimizer, calls=calls):
            calls.append(1)
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
        assert calls == [1]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"eps": -1e-8}, "eps"),
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"eps_mode": "scaled"}, "eps_mode"),
    ],
)
def test_bad_adamw_settings_are_named(settings, name):
    with pytest.raises(ValueError, match=name):
        AdamWPower(weights(), **settings)
    optimizer = AdamWPower(weights())
    extra = {"params": [nn.Parameter(torch.ones(1))], **settings}
    with pytest.raises(ValueError, match=name):
        optimizer.add_param_group(extra)
    assert len(optimizer.param_groups) == 1


# Muon


def test_newton_schulz_keeps_singular_vectors_and_brings_values_near_one():
    for shape in ((8, 20), (20, 8), (12, 12)):
        M = normal(*shape)
        U, _, V = torch.linalg.svd(M, full_matrices=False)
        core = U.T @ newton_schulz5(M) @ V.T
        values = core.diagonal()
        torch.testing.assert_close(core, values.diag(), rtol=0, atol=1e-10)
        assert values.min() > 0.65
        assert values.max() < 1.2


def test_newton_schulz_commutes_with_transposition_and_scale():
    M = normal(6, 11)
    torch.testing.assert_close(newton_schulz5(M.T), newton_schulz5(M).T)
    torch.testing.assert_close(newton_schulz5(1e4 * M), newton_schulz5(M), rtol=1e-5, atol=1e-7)
    assert newton_schulz5(torch.zeros(3, 4)).abs().sum() == 0
    assert newton_schulz5(M.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_power_one_moves_like_torch_muon(shape, nesterov):
    mine, theirs = (nn.Parameter(normal(*shape, dtype=torch.float32)) for _ in range(2))
    start = mine.detach().clone()
    settings = {"lr": 1e-2, "momentum": 0.95, "nesterov": nesterov, "weight_decay": 0.0}
    ours = MuonPower([mine], p=1.0, **settings)
    torchs = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    for t in range(5):
        for x in (mine, theirs):
            x.grad = normal(*shape, seed=t, dtype=torch.float32)
        ours.step()
        torchs.step()
    assert ((mine - theirs).norm() / (theirs - start).norm()).item() <= 0.03


@pytest.mark.parametrize("p", [0.7, 1.0, 1.2])
def test_muon_does_not_see_the_scale_of_the_gradient(p):
    mine, theirs = (nn.Parameter(normal(6, 9)) for _ in range(2))
    ours, scaled = (MuonPower([x], lr=1e-2, p=p) for x in (mine, theirs))
    for t in range(10):
        mine.grad, theirs.grad = normal(6, 9, seed=t), 1e3 * normal(6, 9, seed=t)
        ours.step()
        scaled.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_muon_decays_and_refuses_what_is_no_matrix():
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = MuonPower([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.zeros(2, 3)
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.full((2, 3), 0.95))
    with pytest.raises(ValueError, match=r"params\[0\] must be a matrix"):
        MuonPower([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="momentum"):
        MuonPower([weight], momentum=1.0)
    with pytest.raises(ValueError, match="ns_steps"):
        MuonPower([weight], ns_steps=0)
    with pytest.raises(ValueError, match="ns_steps"):
        MuonPower([{"params": [weight], "ns_steps": 0}])
    with pytest.raises(ValueError, match="matrix"):
        newton_schulz5(torch.ones(3))
    with pytest.raises(ValueError, match="steps"):
        newton_schulz5(torch.ones(3, 3), 0)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_at_a_power_is_muon_on_powered_gradients(nesterov):
    mine, theirs = (nn.Parameter(normal(7, 5)) for _ in range(2))
    powered = MuonPower([mine], lr=1e-2, p=1.2, nesterov=nesterov, weight_decay=0.1)
    plain = MuonPower([theirs], lr=1e-2, p=1.0, nesterov=nesterov, weight_decay=0.1)
    for t in range(10):
        g = normal(7, 5, seed=t)
        mine.grad, theirs.grad = g.clone(), g.sign() * g.abs() ** 1.2
        powered.step()
        plain.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_muon_decays_bfloat16_weights_in_float32():
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MuonPower([weight], lr=2e-3, weight_decay=0.9)
    weight.grad = normal(4, 4, seed=1).bfloat16()
    truth = nn.Parameter(torch.ones(4, 4))
    wide = MuonPower([truth], lr=2e-3, weight_decay=0.9)
    truth.grad = weight.grad.float()
    optimizer.step()
    wide.step()
    # a decay of 1.8e-3 alone leaves 1 in bfloat16, and so do these steps: only the sum counts
    assert torch.equal(weight.data, truth.data.bfloat16())
    assert torch.tensor(1 - 1.8e-3).bfloat16() == 1
    assert (weight != 1).any()


def test_a_checkpoint_of_torch_muon_is_refused_with_a_reason():
    mine, theirs = (nn.Parameter(normal(3, 4)) for _ in range(2))
    torchs = torch.optim.Muon([theirs])
    theirs.grad = normal(3, 4, seed=1)
    torchs.step()
    with pytest.raises(ValueError, match="must come from MuonPower"):
        MuonPower([mine]).load_state_dict(torchs.state_dict())


# The wrapper


@pytest.mark.parametrize("base", ["AdamW", "SGD"])
def test_a_gradient_scaler_unscales_before_the_power_and_skips_infinities(base):
    def make(params):
        return GradPower(getattr(torch.optim, base)(params, lr=0.1, fused=True), p=1.2)

    mine, theirs = (weights(torch.float32) for _ in range(2))
    scaled, plain = make(mine), make(theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(5):
        give_gradients(mine, t)
        give_gradients(theirs, t)
        scaler.scale(torch.ones(()))
        for x in mine:
            x.grad *= 1024.0
        scaler.step(scaled)
        scaler.update()
        plain.step()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    kept = [x.detach().clone() for x in mine]
    scaler.scale(torch.ones(()))
    give_gradients(mine, 9)
    mine[0].grad[0, 0] = math.inf
    scaler.step(scaled)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert scaled.steps_done == 5
    for a, b in zip(mine, kept, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_with_a_scheduler_attached_steps_itself_alone(duplicate):
    mine = weights()
    optimizer = GradPower(torch.optim.AdamW(mine, lr=0.1), p=1.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    give_gradients(mine, 0)
    optimizer.step()
    scheduler.step()
    other = duplicate(optimizer)
    theirs = other.param_groups[0]["params"]
    assert other.param_groups[0]["lr"] == 0.05
    kept = [x.detach().clone() for x in mine]
    give_gradients(theirs, 1)
    other.step()
    assert (optimizer.steps_done, other.steps_done) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(mine, kept, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    give_gradients(mine, 1)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_wrapper_powers_the_gradients_of_a_closure():
    weight, other = (nn.Parameter(normal(4)) for _ in range(2))
    wrapped = GradPower(torch.optim.SGD([weight], lr=0.1), p=1.2)

    def closure():
        wrapped.zero_grad()
        loss = weight.pow(4).sum()
        loss.backward()
        return loss

    for _ in range(3):
        wrapped.step(closure)
        with torch.no_grad():
            g = 4 * other**3
            other -= 0.1 * g.sign() * g.abs() ** 1.2
    torch.testing.assert_close(weight, other, rtol=1e-12, atol=1e-14)


def test_wrapped_adamw_is_adamwpower():
    mine, theirs = weights(), weights()
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    wrapped = GradPower(torch.optim.AdamW(mine, **settings), p=1.2)
    own = AdamWPower(theirs, p=1.2, fused=False)
    for t in range(10):
        give_gradients(mine, t)
        give_gradients(theirs, t)
        wrapped.step()
        own.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_wrapper_at_one_leaves_gradients_untouched():
    params = weights()
    optimizer = GradPower(torch.optim.SGD(params, lr=0.1), p=1.0)
    give_gradients(params, 0)
    grads = [(x.grad, x.grad._version) for x in params]
    optimizer.step()
    for x, (grad, version) in zip(params, grads, strict=True):
        assert x.grad is grad
        assert grad._version == version


def test_schedulers_and_groups_act_through_the_wrapper():
    params = weights()
    base = torch.optim.SGD([{"params": params[:1], "power": 1.0}, {"params": params[1:]}], lr=1.0)
    optimizer = GradPower(base, p=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    start = [x.detach().clone() for x in params]
    give_gradients(params, 0)
    grads = [x.grad.clone() for x in params]
    optimizer.step()
    scheduler.step()
    assert base.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups is base.param_groups
    for x, x0, g, p in zip(params, start, grads, (1, 2, 2), strict=True):
        torch.testing.assert_close(x.data, x0 - sign_power(g, p))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(base.param_groups) == 3
    optimizer.zero_grad()
    assert all(x.grad is None for x in params)


def test_scheduled_power_follows_the_step_and_survives_a_checkpoint():
    def make() -> GradPower:
        base = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return GradPower(base, schedule=lambda t: 1.0 + t)

    optimizer = make()
    weight = optimizer.param_groups[0]["params"][0]
    for p in (1, 2, 3):
        before = weight.item()
        assert optimizer.current_p == p
        weight.grad = torch.tensor([0.5])
        optimizer.step()
        assert before - weight.item() == pytest.approx(0.5**p)
    other = make()
    other.load_state_dict(optimizer.state_dict())
    assert other.current_p == 4
    bad = GradPower(torch.optim.SGD([weight], lr=1.0), schedule=lambda t: -1.0)
    with pytest.raises(ValueError, match="schedule"):
        bad.step()


def test_state_dict_stores_the_power_and_a_bare_checkpoint_loads_too():
    base = torch.optim.Adam(weights(), lr=0.1)
    optimizer = GradPower(base, p=1.3)
    assert optimizer.state_dict()["grad_power"] == {"p": 1.3, "steps_done": 0}
    other = GradPower(torch.optim.Adam(weights(), lr=0.5), p=0.7)
    other.load_state_dict(optimizer.state_dict())
    assert other.p == 1.3
    assert other.param_groups[0]["lr"] == 0.1
    other.load_state_dict(base.state_dict())
    assert other.p == 1.3


def test_wrapper_can_be_copied_and_pickled_and_shows_its_power():
    optimizer = GradPower(torch.optim.SGD(weights(), lr=0.1), p=1.3)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.p == 1.3
        assert twin.base is not optimizer.base
        params = twin.param_groups[0]["params"]
        before = params[0].detach().clone()
        give_gradients(params, 0)
        twin.step()
        assert not torch.equal(before, params[0])
    assert "p=1.3" in repr(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_powering_twice_is_refused():
    base = torch.optim.SGD(weights(), lr=0.1)
    for inner in (GradPower(base), AdamWPower(weights()), MuonPower([weights()[0]])):
        with pytest.raises(ValueError, match="already"):
            GradPower(inner)
    with pytest.raises(ValueError, match="torch Optimizer"):
        GradPower(weights())


def test_order_of_clip_and_power_matters_as_documented():
    # phi after the clip is the algorithm; before it is another one
    g = normal(6)
    clipped = g * 0.5
    assert not torch.allclose(sign_power(clipped, 1.5), 0.5 * sign_power(g, 1.5))
    halves = [g, normal(6, seed=1)]
    summed = sign_power(halves[0] + halves[1], 1.5)
    assert not torch.allclose(summed, sign_power(halves[0], 1.5) + sign_power(halves[1], 1.5))


# Theory


@pytest.mark.parametrize("noise", LAWS)
@pytest.mark.parametrize("p", [0.3, 0.8, 1.0, 1.2, 2.0, 3.0])
def test_gain_agrees_with_scipy_moments(noise, p):
    law = scipy_law(noise)
    low = law.expect(lambda x: np.abs(x) ** (p - 1), lb=0, ub=law.support()[1], limit=200) * 2
    square = law.expect(lambda x: np.abs(x) ** (2 * p), limit=200)
    assert gain_factor(p, noise) == pytest.approx(p * low / math.sqrt(square), rel=1e-5)


def test_gains_of_the_specification():
    values = [gain_factor(1.2, n) for n in ("rademacher", "uniform", "gaussian", "laplace")]
    assert values == pytest.approx([1.2, 1.0646, 0.9957, 0.9024], abs=5e-5)
    assert gain_factor(1.2, ("gennorm", 3.0)) == pytest.approx(1.02550, abs=5e-6)
    for noise in ("rademacher", *LAWS):
        assert gain_factor(1.0, noise) == pytest.approx(1.0, abs=1e-12)


@settings(deadline=None)
@given(st.floats(0.05, 6.0))
def test_gaussian_noise_gains_nothing_at_any_power(p):
    assert gain_factor(p, "gaussian") <= 1 + 1e-12
    assert gain_factor(p, "gaussian") == pytest.approx(gain_factor(p, ("gennorm", 2.0)))


def test_gain_from_samples_approaches_the_closed_form():
    rng = np.random.default_rng(0)
    for noise in ("gaussian", "uniform", ("gennorm", 3.0)):
        xi = G.draw_noise(noise, (200_000,), rng)
        assert gain_factor(1.2, xi) == pytest.approx(gain_factor(1.2, noise), rel=5e-3)
        assert gain_factor(1.2, torch.tensor(xi)) == gain_factor(1.2, xi)
    with pytest.raises(ValueError, match="mean 0"):
        gain_factor(1.2, 3 + xi)
    with pytest.raises(ValueError, match="samples"):
        gain_factor(1.2, [1.0])


@pytest.mark.parametrize("noise", LAWS)
@pytest.mark.parametrize(("mu", "sigma"), [(0.01, 1.0), (0.5, 1.0), (1.0, 0.3), (-2.0, 1.0)])
def test_drift_agrees_with_adaptive_quadrature(noise, mu, sigma):
    law = scipy_law(noise)
    edge = min(law.support()[1], law.isf(1e-16))
    cuts = sorted({-edge, 0.0, edge} | ({-mu / sigma} if abs(mu / sigma) < edge else set()))

    def expect(fn) -> float:
        panels = pairwise(cuts)
        return sum(
            integrate.quad(lambda x: fn(mu + sigma * x) * law.pdf(x), a, b, epsabs=1e-12)[0]
            for a, b in panels
        )

    powers = [0.5, 1.0, 1.7]
    curve = drift_curve(powers, mu, sigma, noise)
    for p, value in zip(powers, curve, strict=True):
        top = expect(lambda g, p=p: np.sign(g) * np.abs(g) ** p)
        bottom = expect(lambda g, p=p: np.abs(g) ** (2 * p))
        assert value == pytest.approx(top / math.sqrt(bottom), abs=2e-6)
        assert drift(p, mu, sigma, noise) == pytest.approx(value, abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(
    mu=st.floats(-3, 3).filter(lambda x: x == 0 or abs(x) > 1e-6),
    log_sigma=st.floats(-4, 4),
    p=st.floats(0.1, 4),
    law=st.sampled_from(["rademacher", *LAWS]),
)
def test_drift_is_odd_bounded_and_free_of_scale(mu, log_sigma, p, law):
    sigma = 10**log_sigma
    value = drift(p, mu, sigma, law)
    assert abs(value) <= 1 + 1e-9
    assert drift(p, -mu, sigma, law) == pytest.approx(-value, abs=1e-9)
    assert drift(p, 1e3 * mu, 1e3 * sigma, law) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("noise", ["rademacher", *LAWS])
def test_high_noise_limit_is_the_gain(noise):
    for p in (0.8, 1.2, 2.0):
        slope = drift(p, 1e-4, 1.0, noise) / drift(1.0, 1e-4, 1.0, noise)
        assert slope == pytest.approx(gain_factor(p, noise), rel=1e-4)


def test_low_noise_limit_prefers_small_powers():
    for noise in ("rademacher", "uniform", "gaussian"):
        for p in (0.5, 1.0, 2.0):
            sigma = 0.01
            assert drift(p, 1.0, sigma, noise) == pytest.approx(
                1 - p**2 * sigma**2 / 2, abs=5 * sigma**3
            )
    values = [drift(p, 1.0, 0.3, "rademacher") for p in (0.5, 1, 1.2, 2)]
    assert values == pytest.approx([0.98842, 0.95783, 0.94231, 0.87605], abs=1e-5)


@pytest.mark.parametrize("k", [1.5, 2.0, 2.5, 3.0, 4.0])
def test_best_power_is_the_score_exponent_and_its_gain_the_fisher_root(k):
    def gain(p: float) -> float:
        return drift(p, 1e-5, 1.0, ("gennorm", k)) / 1e-5

    found = optimize.minimize_scalar(
        lambda p: -gain(p), bounds=(0.05, 6), method="bounded", options={"xatol": 1e-9}
    )
    best = score_power(k)
    assert found.x == pytest.approx(k - 1, abs=1e-4)
    assert best.p == k - 1
    assert gain(found.x) == pytest.approx(best.gain, abs=1e-4)
    # the Fisher information, from the density alone
    law = scipy_law(("gennorm", k))
    score = integrate.quad(
        lambda x: (law.logpdf(x + 1e-5) - law.logpdf(x - 1e-5)) ** 2 / 4e-10 * law.pdf(x), 0, 9
    )
    assert best.gain**2 == pytest.approx(2 * score[0], rel=1e-3)


def test_best_power_between_the_limits():
    found = [best_drift_power(1.0, s, ("gennorm", 4.0)) for s in (0.5, 1, 2, 5, 20)]
    assert found == pytest.approx([0.10, 0.65, 1.47, 2.44, 2.95], abs=0.011)
    found = [best_drift_power(1.0, s, "gaussian") for s in (0.5, 1, 2, 5, 20)]
    assert found == pytest.approx([0.17, 0.48, 0.76, 0.95, 1.00], abs=0.011)
    low, high = (best_drift_power(1.0, s, "rademacher", low=0.1, high=4) for s in (0.9, 1.1))
    assert (low, high) == (0.1, 4.0)


def test_rare_events_leave_the_best_power_where_it_was():
    # with probability 1 - q the gradient is zero: moments scale with q, u_p with its root
    rng = np.random.default_rng(0)
    g = 0.5 + rng.standard_normal(100_000)
    rare = np.concatenate([g, np.zeros(900_000)])
    for p in (0.7, 1.0, 1.5):

        def u(x, p=p):
            return np.mean(np.sign(x) * np.abs(x) ** p) / np.sqrt(np.mean(np.abs(x) ** (2 * p)))

        assert u(rare) == pytest.approx(math.sqrt(0.1) * u(g))


def test_density_and_samples_are_those_of_scipy():
    x = np.linspace(-4, 4, 101)
    rng = np.random.default_rng(0)
    for noise in LAWS:
        law = scipy_law(noise)
        np.testing.assert_allclose(G.noise_density(noise, x), law.pdf(x), rtol=1e-10, atol=1e-300)
        sample = G.draw_noise(noise, (4000,), rng)
        assert stats.kstest(sample, law.cdf).pvalue > 1e-4
    two = G.draw_noise("rademacher", (1000,), rng)
    assert set(two) == {-1.0, 1.0}
    assert abs(two.mean()) < 0.15


@pytest.mark.parametrize("noise", ["uniform", "gaussian", ("gennorm", 3.0)])
@pytest.mark.parametrize("p", [0.5, 1.0, 1.7])
def test_powered_density_has_unit_mass_the_drift_as_mean_and_unit_mean_square(noise, p):
    mu, sigma = 0.4, 1.0

    def moment(q: int) -> float:
        def integrand(z: float) -> float:
            return z**q * float(G.powered_density(np.array(z), p, mu, sigma, noise))

        # a cut at the powered edges of bounded noise
        edges = [G.powered_density(np.linspace(-9, 9, 4001), p, mu, sigma, noise)]
        inside = np.linspace(-9, 9, 4001)[edges[0] > 0]
        low, high = inside.min() - 0.01, inside.max() + 0.01
        return sum(integrate.quad(integrand, a, b, limit=400)[0] for a, b in ((low, 0), (0, high)))

    assert moment(0) == pytest.approx(1, abs=2e-3)
    assert moment(1) == pytest.approx(drift(p, mu, sigma, noise), abs=2e-3)
    assert moment(2) == pytest.approx(1, abs=2e-3)


def test_burst_gain_of_the_specification_and_its_limits():
    assert burst_gain(1.2, 0.2, 0.3) == pytest.approx(1.0503, abs=5e-5)
    assert burst_gain(1.5, 0.1, 0.3) == pytest.approx(1.1781, abs=5e-5)
    for p in (0.8, 1.2, 2.0):
        gauss = gain_factor(p, "gaussian")
        assert burst_gain(p, 0.2, 0.0) == pytest.approx(gauss)
        assert burst_gain(p, 1.0, 0.3) == pytest.approx(gauss)
        assert burst_gain(p, 0.2, 1.0) == pytest.approx(gauss)


def test_burst_gain_is_the_drift_of_the_mixture():
    p, q, r0, mu = 1.3, 0.25, 0.4, 1e-4

    def drift_of_mixture(p: float) -> float:
        def moment(fn, mean: float, sigma: float) -> float:
            return integrate.quad(
                lambda x: fn(mean + sigma * x) * stats.norm.pdf(x), -12, 12, points=[-mean / sigma]
            )[0]

        odd = q * moment(lambda g: math.copysign(abs(g) ** p, g), mu, 1.0)
        even = q * moment(lambda g: abs(g) ** (2 * p), mu, 1.0)
        even += (1 - q) * moment(lambda g: abs(g) ** (2 * p), 0.0, r0)
        return odd / math.sqrt(even)

    ratio = drift_of_mixture(p) / drift_of_mixture(1.0)
    assert ratio == pytest.approx(burst_gain(p, q, r0), rel=1e-4)


def test_tempered_logit_solves_its_balance():
    for q in (0.05, 0.3, 0.5, 0.9):
        for p in (0.7, 1.2, 2.0):
            pi = 1 / (1 + math.exp(-tempered_logit(q, p)))
            assert q * (1 - pi) ** p == pytest.approx((1 - q) * pi**p)
    assert tempered_logit(0.1, 1.2) == pytest.approx(-1.831, abs=5e-4)


def test_averaging_samples_takes_the_bias_away():
    truth = math.log(0.1 / 0.9)
    bias = [tempered_logit(0.1, 1.2, batch=b) - truth for b in (1, 4, 16, 64, 256)]
    assert bias[0] == pytest.approx(0.366, abs=5e-4)
    assert all(a > b > 0 for a, b in pairwise(bias))
    assert tempered_logit(0.3, 1.0, batch=8) == pytest.approx(math.log(3 / 7), abs=1e-9)


@pytest.mark.parametrize("k", [1.5, 2.0, 2.5, 3.0])
def test_best_power_finds_the_planted_exponent(k):
    grads = G.make_gradients(k, rng=np.random.default_rng(1))
    found = best_power(grads)
    assert abs(found.p - (k - 1)) <= 0.1
    assert found.curve.shape == found.powers.shape
    assert found.curve.max() == pytest.approx(score_power(k).gain, rel=0.03)


def test_best_power_does_not_depend_on_units_or_offsets():
    grads = G.make_gradients(3.0, n_coords=100, rng=np.random.default_rng(2))
    first = best_power(grads)
    rng = np.random.default_rng(3)
    moved = best_power(rng.uniform(0.5, 2, 100) * grads + rng.uniform(-1e-3, 1e-3, 100))
    assert moved.p == pytest.approx(first.p, abs=1e-6)
    constant = np.concatenate([grads, np.full((200, 3), 0.7)], axis=1)
    np.testing.assert_allclose(best_power(constant).curve, first.curve)
    np.testing.assert_allclose(best_power(torch.tensor(grads)).curve, first.curve)


@pytest.mark.parametrize("k", [2.0, 3.0])
def test_best_power_looks_at_the_law_of_gradients_that_come(k):
    # a coordinate that is mostly zero has the best power of its other gradients
    rng = np.random.default_rng(0)
    grads = G.make_gradients(k, n_batches=3000, n_coords=300, rng=rng)
    grads *= rng.random(grads.shape) < rng.uniform(0.01, 0.1, 300)
    assert abs(best_power(grads).p - (k - 1)) <= 0.15
    # noise that is standardised together with the zeros would look heavy-tailed
    xi = (grads - grads.mean(axis=0)) / grads.std(axis=0)
    assert (xi**4).mean() > 15
    with pytest.raises(ValueError, match="at least 32 values other than 0"):
        best_power(grads[:100])


def test_symmetric_difference_gets_two_point_noise_right_where_the_plug_in_does_not():
    rng = np.random.default_rng(0)
    grads = G.draw_noise("rademacher", (400, 400), rng)
    estimate = best_power(grads, powers=[0.8, 1.0, 1.2, 2.0])
    np.testing.assert_allclose(estimate.curve, [0.8, 1.0, 1.2, 2.0], rtol=0.02)
    three_points = rng.choice([-1.0, 0.0, 1.0], (400, 400), p=[0.25, 0.5, 0.25])
    assert np.isfinite(best_power(three_points, powers=[0.5, 1.0, 2.0]).curve).all()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: best_power(np.zeros((4, 3))), "n_batches"),
        (lambda: best_power(np.zeros((10, 3))), "vary"),
        (lambda: best_power(np.full((10, 3), np.nan)), "finite"),
        (lambda: best_power(normal(9, 3), h=0.0), "h must"),
        (lambda: best_power(normal(9, 3), powers=[1.0, 2.0]), "powers"),
        (lambda: best_power(normal(9, 3), powers=[1.0, 0.5, 2.0]), "powers"),
        (lambda: gain_factor(1.2, "cauchy"), "noise"),
        (lambda: gain_factor(0.9, np.array([-1.2, 0.0, 1.2])), "best_power"),
        (lambda: gain_factor(1.2, ("gennorm", -1.0)), "k"),
        (lambda: drift(1.2, 1.0, 0.0, "gaussian"), "sigma"),
        (lambda: drift(1.2, math.inf, 1.0, "gaussian"), "mu"),
        (lambda: best_drift_power(1.0, 1.0, "gaussian", low=2.0, high=1.0), "low"),
        (lambda: score_power(1.0), "k must"),
        (lambda: G.powered_density(np.ones(1), 1.2, 0.1, 1.0, "rademacher"), "noise"),
        (lambda: burst_gain(1.2, 0.0, 0.3), "q must"),
        (lambda: burst_gain(1.2, 0.5, 1.3), "r0"),
        (lambda: tempered_logit(1.0, 1.2), "q must"),
        (lambda: tempered_logit(0.5, 1.2, batch=0), "batch"),
        (lambda: G.noise_density("rademacher", np.zeros(1)), "noise"),
        (lambda: G.simulate_drift(["gaussian"], [1.2], n_coords=3), "n_coords"),
        (lambda: G.simulate_bursts([1.2], n_coords=3), "n_coords"),
        (lambda: G.simulate_bursts([1.2], q=2.0), "q must"),
        (lambda: G.river_valley([1.2], n_replicas=5), "n_replicas"),
        (lambda: G.simulate_tempering([0.0], [1.2]), "rates"),
        (lambda: G.train_char_lm([], [0], lr=1e-3, steps=1), "powers"),
        (lambda: G.train_gpt(1.0, 0, lr=1e-3, steps=1, schedule="step"), "schedule"),
        (lambda: G.study_run(run="none"), "run"),
        (lambda: G.rate_gap(None, "late", 3.0), "p=3"),
        (lambda: G.paired_losses(None, "none", 1.0), "study"),
        (lambda: G.paired_losses(None, "late", 1.0), "lr"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()


class Slope(nn.Module):
    """A parameter whose gradient is the batch."""

    def __init__(self, n: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return self.weight @ g


def test_noise_stats_find_the_moments_that_were_planted():
    rng = np.random.default_rng(0)
    scale = 10 ** rng.uniform(-3, 0, 400)
    for noise, kurtosis in (("rademacher", 1.0), ("uniform", 1.8), ("gaussian", 3.0)):
        g = scale * (0.5 + G.draw_noise(noise, (300, 400), rng))
        model = Slope(400)
        stats_ = noise_stats(model, lambda m, x: m(x), torch.tensor(g))
        assert stats_["weight"].kurtosis == pytest.approx(kurtosis, rel=0.05)
        assert stats_["weight"].snr == pytest.approx(0.5, rel=0.1)
        assert math.isnan(stats_["unused"].kurtosis)
        assert model.weight.grad is None
    with pytest.raises(ValueError, match="at least 2"):
        noise_stats(Slope(2), lambda m, x: m(x), [torch.ones(2, dtype=torch.float64)])
    with pytest.raises(ValueError, match="at least one"):
        noise_stats(Slope(2), lambda m, x: m(x), [])


# Experiments


def test_simulated_adam_drifts_as_the_theory_says():
    laws, powers = ["rademacher", "laplace"], [0.8, 1.5]
    ratios = G.simulate_drift(laws, powers, steps=1500, seed=3)
    theory = [[gain_factor(p, noise) for p in powers] for noise in laws]
    np.testing.assert_allclose(ratios, theory, rtol=0.025)


def test_array_adam_is_torch_adam():
    rng = np.random.default_rng(0)
    adam = G._AdamArrays([1.0, 1.3], (5,), (0.9, 0.95))
    params = [nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(2)]
    groups = [{"params": [x], "p": p} for x, p in zip(params, (1.0, 1.3), strict=True)]
    optimizer = AdamWPower(groups, lr=1.0, eps=0.0, weight_decay=0.0, fused=False)
    moved = np.zeros((2, 5))
    for _ in range(10):
        g = rng.standard_normal(5)
        moved -= adam.step(g)
        for x in params:
            x.grad = torch.tensor(g)
        optimizer.step()
    for x, row in zip(params, moved, strict=True):
        np.testing.assert_allclose(x.detach().numpy(), row, rtol=1e-9)


def test_valley_falls_to_its_floor_and_rivers_flow_at_the_power():
    valley = G.river_valley([0.8, 1.0, 1.2], steps=1200, seed=1)
    assert valley.x.shape == valley.y.shape == (3, 1201)
    assert (np.abs(valley.x[:, -200:].mean(axis=1)) < 0.02).all()
    ratio = valley.y[:, -1] / valley.y[1, -1]
    np.testing.assert_allclose(ratio, [0.8, 1.0, 1.2], atol=0.02)


def test_bursts_and_tempering_follow_their_formulas():
    ratio = G.simulate_bursts([1.2], steps=2500, seed=1)
    assert ratio[0] == pytest.approx(burst_gain(1.2, 0.2, 0.3), rel=0.01)
    logits = G.simulate_tempering([0.3], [0.7, 1.5], seed=1)
    assert logits[0] == pytest.approx([tempered_logit(0.3, p) for p in (0.7, 1.5)], abs=0.02)
    many = G.simulate_tempering([0.1], [1.2], batch=16, seed=1)
    assert many[0, 0] == pytest.approx(tempered_logit(0.1, 1.2, batch=16), abs=0.02)


@pytest.mark.parametrize("n_experts", [0, 4])
def test_a_replica_alone_is_the_replica_among_others(n_experts):
    settings = {"lr": 2e-3, "steps": 60, "n_experts": n_experts, "batch": 8}
    together = G.train_char_lm([0.8, 1.2], [0, 1, 2], **settings)
    alone = G.train_char_lm([1.2], [1], **settings)
    assert together.losses[-1, 1, 1] == pytest.approx(alone.losses[-1, 0, 0], abs=1e-10)
    assert together.losses[-1, 0, 1] != pytest.approx(alone.losses[-1, 0, 0], abs=1e-6)


def test_replica_adam_is_the_public_optimiser_after_a_clip():
    stacked = G.train_char_lm([1.2], [3], lr=2e-3, steps=40, batch=8)

    def make(params):
        return [AdamWPower(params.values(), lr=2e-3, eps=1e-12, weight_decay=0.0, p=1.2)]

    public = G.train_char_lm_with(make, 3, steps=40, batch=8)
    for a, b in zip(stacked.model.parameters(), public.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_char_model_starts_alike_for_a_seed_and_near_a_uniform_guess():
    model = G.CharLM(103, [4, 5, 4])
    assert torch.equal(model.hidden[0], model.hidden[2])
    assert not torch.equal(model.hidden[0], model.hidden[1])
    rows = torch.randint(103, (3, 64, 7), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model.losses(rows), torch.full((3,), math.log(103)).double(), atol=0.3)


def test_mixture_sends_each_context_to_its_favourite_expert_alone():
    model = G.CharLM(20, [0], n_experts=3)
    context = torch.randint(20, (1, 5, 6), generator=torch.Generator().manual_seed(1))
    x = model.embedding[0][context[0]].flatten(1)
    probs = (x @ model.router[0]).softmax(dim=1)
    expected = []
    for row, prob in zip(x, probs, strict=True):
        e = int(prob.argmax())
        hidden = torch.tanh(row @ model.hidden[0][:, 64 * e : 64 * (e + 1)])
        expected.append(2 * prob[e] * hidden @ model.head[0])
    torch.testing.assert_close(model(context)[0], torch.stack(expected))


def test_gpt_trains_with_either_schedule_and_depends_on_its_seed_alone():
    config = G.GPTConfig(vocab_size=103, context=8, d_model=12, n_layers=1, n_heads=2)
    settings = {"lr": 1e-2, "steps": 25, "batch": 4, "config": config}
    first = G.train_gpt(1.2, 0, eval_every=10, **settings)
    torch.manual_seed(99)
    again = G.train_gpt(1.2, 0, **settings)
    assert first.steps.tolist() == [10, 20, 25]
    assert first.losses[-1] == again.losses[-1] < math.log(103)
    cosine = G.train_gpt(1.2, 0, schedule="cosine", **settings)
    assert cosine.losses[-1] != first.losses[-1]
    own = G.train_gpt(1.2, 0, tokens=torch.arange(2000) % 5, **settings)
    assert own.losses[-1] < first.losses[-1]


def test_the_power_reaches_the_gpt():
    config = G.GPTConfig(vocab_size=103, context=8, d_model=12, n_layers=1, n_heads=2)
    settings = {"lr": 1e-2, "steps": 10, "batch": 4, "config": config}
    losses = [G.train_gpt(p, 0, **settings).losses[-1] for p in (0.7, 1.0, 1.2)]
    assert np.isfinite(losses).all()
    assert all(abs(a - b) > 1e-4 for a, b in ((losses[0], losses[1]), (losses[1], losses[2])))


def test_runs_are_named_once_and_gaps_come_from_pairs():
    import pandas as pd

    assert len(set(G.RUNS)) == len(G.RUNS)
    values = np.random.default_rng(0).random(len(G.RUNS))
    frame = pd.DataFrame({"run": G.RUNS, "loss": values})
    pairs = G.paired_losses(frame, "batch 32", 4e-3)
    rows = [G.RUNS.index(f"batch 32 | lr=0.004 | p=1.2 | seed={s}") for s in range(4)]
    assert pairs.scores[1.2].tolist() == values[rows].tolist()
    gap = G.rate_gap(frame, "batch 32", 1.2)
    assert gap.gaps[2] == pytest.approx(pairs.difference(1.2, 1.0).mean)
    best = [
        min(G.paired_losses(frame, "batch 32", lr).scores[p].mean() for lr in gap.rates)
        for p in (1.2, 1.0)
    ]
    assert gap.best == pytest.approx(best[0] - best[1])


def test_shipped_results_hold_every_run_in_order():
    from icmllab import load_results

    frame = load_results("training/gradpower")
    assert tuple(frame["run"]) == G.RUNS
    assert np.isfinite(frame.drop(columns="run").to_numpy(dtype=float)).all()
    assert (frame["loss"] == frame["loss_8"]).all()
