"""Quantization-aware training: the quantiser, its noise, the law's fits, the paired students."""

import itertools
import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import nn

from icmllab.efficiency import qat_scaling as qat
from icmllab.efficiency.qat_scaling import QATLaw, QuantLinear, QuantSpec
from icmllab.kernels import aot, runtime
from icmllab.kernels.w4a4_linear import decode
from icmllab.toolbox.gpt import GPT, GPTConfig
from icmllab.toolbox.schedules import cosine_schedule

F32, F64 = torch.float32, torch.float64
W4A4 = QuantSpec(4, 4, 8)


def g(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=g(seed), dtype=F64).to(dtype)


# --------------------------------------------------------------------------------------------
# The quantiser


def test_a_group_by_hand():
    # largest 3.5: s = 0.5; halves go to even: 0.25 → 0, 0.75 → 1.0, 1.25 → 1.0
    x = torch.tensor([3.5, 0.25, 0.75, 1.25, -1.25, 0.0])
    assert qat.fake_quant(x, 4, 6).tolist() == [3.5, 0.0, 1.0, 1.0, -1.0, 0.0]
    assert float(qat.absmax_scale(x, 4, 6)) == 0.5


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("backend", ["torch", "kernel"])
def test_rounding_is_idempotent_odd_and_within_half_a_step(dtype, bits, backend):
    x = randn(5, 48, dtype=dtype)
    made = qat.fake_quant(x, bits, 12, backend=backend)
    eps = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(qat.fake_quant(made, bits, 12), made, rtol=eps, atol=0)
    assert torch.equal(qat.fake_quant(-x, bits, 12, backend=backend), -made)
    step = qat.absmax_scale(x, bits, 12).repeat_interleave(12, dim=1)
    assert bool(((made - x).abs() <= step / 2 * (1 + eps)).all())
    # at most 2^b − 1 values in a group, the largest magnitude among them, exactly
    groups = made.unflatten(1, (-1, 12))
    assert max(len(row.unique()) for row in groups.flatten(0, 1)) <= 2**bits - 1
    largest = x.unflatten(1, (-1, 12)).abs().amax(dim=-1)
    torch.testing.assert_close(groups.abs().amax(dim=-1), largest, rtol=eps, atol=0)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    size=st.integers(1, 9),
    bits=st.integers(2, 8),
    seed=st.integers(0, 999),
)
def test_both_backends_agree_in_value_and_gradient(rows, groups, size, bits, seed):
    x = randn(rows, groups * size, seed=seed)
    s = 0.2 + torch.rand(rows, groups, generator=g(seed), dtype=F64)
    up = randn(rows, groups * size, seed=seed + 1)
    for given_scale in (False, True):
        found = []
        for backend in ("torch", "kernel"):
            a, b = x.clone().requires_grad_(), s.clone().requires_grad_()
            scale = b if given_scale else None
            y = qat.fake_quant(a, bits, size, scale=scale, scale_grad=0.3, backend=backend)
            y.backward(up)
            found.append((y.detach(), a.grad, b.grad if given_scale else torch.zeros(1)))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_another_dimension_is_grouped_the_same_way():
    x = randn(12, 5)
    for backend in ("torch", "kernel"):
        across = qat.fake_quant(x, 4, 4, dim=0, backend=backend)
        assert torch.equal(across, qat.fake_quant(x.T, 4, 4).T)
    assert not torch.equal(qat.fake_quant(x[:, :4], 4, 4), qat.fake_quant(x[:, :4], 4, 4, dim=0))


def test_sixteen_bits_is_the_same_object_and_zeros_stay_zeros():
    x = randn(3, 8)
    assert qat.fake_quant(x, 16, 8) is x
    x[0] = 0
    for backend in ("torch", "kernel"):
        made = qat.fake_quant(x, 4, 4, backend=backend)
        assert bool((made[0] == 0).all())
        assert bool(torch.isfinite(made).all())


@pytest.mark.parametrize("backend", ["torch", "kernel"])
def test_absmax_passes_the_whole_gradient_the_largest_entry_included(backend):
    x, up = randn(4, 16).requires_grad_(), randn(4, 16, seed=1)
    qat.fake_quant(x, 4, 8, backend=backend).backward(up)
    assert torch.equal(x.grad, up)


@pytest.mark.parametrize("backend", ["torch", "kernel"])
def test_a_given_scale_masks_what_it_clips_edges_inside(backend):
    s = torch.tensor([0.5], dtype=F64)
    u = torch.tensor([-8.2, -8.0, -7.9, 6.9, 7.0, 7.2, 0.3, 20.0], dtype=F64)
    x = (u * 0.5).requires_grad_()
    qat.fake_quant(x, 4, 8, scale=s, backend=backend).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 0, 1, 0]


def test_lsq_starts_at_its_formula_and_its_gradient_is_the_formula():
    w = randn(3, 16).requires_grad_()
    q = qat.LSQQuantizer(w, 4, 8)
    start = 2 * w.detach().unflatten(1, (2, 8)).abs().mean(dim=-1) / math.sqrt(7)
    torch.testing.assert_close(q.scale.data, start)
    with torch.no_grad():
        q.scale.mul_(0.3)  # clips a part
    up = randn(3, 16, seed=1)
    q(w).backward(up)
    u = w.detach() / q.scale.detach().repeat_interleave(8, dim=1)
    slope = torch.where((u >= -8) & (u <= 7), u.round() - u, u.clamp(-8, 7))
    wanted = (up * slope).unflatten(1, (2, 8)).sum(dim=-1) / math.sqrt(8 * 7)
    torch.testing.assert_close(q.scale.grad, wanted, rtol=1e-12, atol=1e-12)
    assert bool((u > 7).any())
    assert bool((u < -8).any())
    torch.testing.assert_close(w.grad, torch.where((u >= -8) & (u <= 7), up, 0.0))


def test_a_learned_scale_below_zero_is_used_by_its_magnitude():
    w = randn(2, 8)
    q = qat.LSQQuantizer(w, 4, 8)
    made = q(w)
    with torch.no_grad():
        q.scale.neg_()
    assert torch.equal(q(w), made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 1}, "bits"),
        ({"bits": 9}, "bits"),
        ({"group_size": 5}, "group_size.*nearest"),
        ({"x": torch.full((2, 8), float("nan"))}, "finite"),
        ({"x": torch.full((2, 8), float("inf"))}, "finite"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_fake_quant_names_what_does_not_fit(change, message):
    good = {"x": randn(2, 8), "bits": 4, "group_size": 4}
    with pytest.raises(ValueError, match=message):
        qat.fake_quant(**{**good, **change})


# --------------------------------------------------------------------------------------------
# Layers


def test_spec_names_itself_and_resolves_overrides():
    spec = QuantSpec(4, 4, 16, overrides={"fc2": {"a_bits": 8}, "blocks.1.up": {"w_bits": 3}})
    assert spec.name == "W4A4 fc2:A8 blocks.1.up:W3"
    assert spec.rule("blocks.0.fc2") == QuantSpec(4, 8, 16)
    assert spec.rule("blocks.1.up") == QuantSpec(3, 4, 16)
    assert spec.rule("blocks.0.up") == QuantSpec(4, 4, 16)
    assert all(kind == make(16).name for kind, make in qat.SPECS.items())


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"w_bits": 1}, "w_bits"),
        ({"a_bits": 12}, "a_bits"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": "column"}, "group_size"),
        ({"w_method": "max"}, "w_method"),
        ({"w_method": "lsq", "group_size": "row"}, "lsq"),
        ({"overrides": {"fc2": {"bits": 8}}}, "overrides"),
        ({"overrides": {"fc2": {"a_bits": 9}}}, "a_bits"),
    ],
)
def test_spec_refuses_what_does_not_exist(settings_, message):
    with pytest.raises(ValueError, match=message):
        QuantSpec(**settings_)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_layer_multiplies_rounded_inputs_with_rounded_weights_in_groups_of_inputs(dtype):
    layer = QuantLinear(24, 5, W4A4, bias=True).to(dtype)
    x = randn(7, 24, dtype=dtype)

    def by_hand(t):
        t = t.detach().double().numpy().reshape(-1, 3, 8)
        s = np.abs(t).max(axis=2, keepdims=True) / 7
        return (np.clip(np.round(t / s), -8, 7) * s).reshape(-1, 24)

    wanted = by_hand(x) @ by_hand(layer.weight).T + layer.bias.detach().double().numpy()
    np.testing.assert_allclose(
        layer(x).detach().double().numpy(), wanted, atol=1e-5 if dtype == F32 else 1e-13
    )


def test_rows_and_tensors_are_groups_too():
    x = randn(6, 24)
    row = QuantLinear(24, 5, QuantSpec(4, 4, "row")).double()
    same = QuantLinear(24, 5, QuantSpec(4, 4, 24)).double()
    same.load_state_dict(row.state_dict())
    assert torch.equal(row(x), same(x))
    whole = QuantLinear(24, 5, QuantSpec(4, 16, "tensor")).double()
    levels = whole.rounded_weight() * 7 / whole.weight.abs().max()
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-9)


def test_master_weights_stay_and_take_the_gradient_of_the_rounded_ones():
    layer = QuantLinear(8, 3, QuantSpec(4, 16, 8)).double()
    before, x = layer.weight.detach().clone(), randn(5, 8)
    layer(x).sum().backward()
    assert torch.equal(layer.weight, before)
    torch.testing.assert_close(layer.weight.grad, x.sum(dim=0).expand(3, 8))


def test_convert_copies_skips_and_names():
    model = qat.Student(16, seed=3)
    made = qat.convert(model, QuantSpec(4, 4, 16, overrides={"fc2": {"a_bits": 8}}))
    kinds = {n: type(m) for n, m in made.named_modules() if isinstance(m, nn.Linear | QuantLinear)}
    assert {n for n, k in kinds.items() if k is nn.Linear} == {"embed", "lm_head"}
    assert sum(k is QuantLinear for k in kinds.values()) == 6
    assert made.blocks[1].fc2.spec.a_bits == 8
    assert made.blocks[1].up.spec.a_bits == 4
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert made.blocks[0].up.weight is not model.blocks[0].up.weight
    plain = qat.convert(model, QuantSpec(16, 16, 16))
    x = randn(4, 32)
    assert torch.equal(plain(x), model(x))
    assert not torch.equal(made(x), model(x))


@pytest.mark.parametrize(
    ("width", "spec", "message"),
    [
        (20, QuantSpec(4, 4, 16), "nearest that do: 10 or 20"),
        (16, QuantSpec(4, 4, 16, overrides={"fc3": {"a_bits": 8}}), "fc3"),
    ],
)
def test_convert_and_training_refuse_groups_and_layers_that_do_not_fit(width, spec, message):
    with pytest.raises(ValueError, match=message):
        qat.convert(qat.Student(width), spec)
    message = message if "nearest" in message else "overrides"
    with pytest.raises(ValueError, match=message):
        qat.train_students(width, 1, spec, seeds=[0])


def test_convert_needs_a_layer():
    with pytest.raises(ValueError, match="linear layers"):
        qat.convert(nn.Sequential(nn.ReLU()), W4A4)


def test_average_bits_by_hand():
    assert qat.average_bits(QuantSpec(4, 4, 16)) == 4
    assert qat.average_bits(QuantSpec(4, 4, 16, overrides={"fc2": {"a_bits": 8}})) == 28 / 6


# --------------------------------------------------------------------------------------------
# Four bits


def test_int4_packs_the_even_code_low_and_comes_back():
    codes = torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8)
    packed = qat.pack_int4(codes)
    assert packed.tolist() == [[0x78, 0xF0]]
    assert torch.equal(qat.unpack_int4(packed), codes)
    every = torch.tensor(list(itertools.product(range(-8, 8), repeat=2)))
    assert torch.equal(qat.unpack_int4(qat.pack_int4(every)), every.char())
    with pytest.raises(ValueError, match="even"):
        qat.pack_int4(codes[:, :3])
    with pytest.raises(ValueError, match=r"\[-8, 7\]"):
        qat.pack_int4(torch.tensor([8, 0]))


@pytest.mark.parametrize("group", [8, 32, 64])
def test_integer_product_is_that_of_the_rounded_matrices(group):
    x, w = randn(5, 128), randn(33, 128, seed=1)
    x[2, :group] = 0
    left, right = qat.quantize_int4(x, group), qat.quantize_int4(w, group)
    wanted = qat.fake_quant(x, 4, group) @ qat.fake_quant(w, 4, group).T
    torch.testing.assert_close(qat.w4a4_linear(*left, *right), wanted, rtol=1e-12, atol=1e-12)
    single = [t.float() if t.is_floating_point() else t for t in (*left, *right)]
    half = qat.w4a4_linear(*single)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.double(), wanted, rtol=1e-3, atol=1e-2)
    assert torch.equal(decode(*right), qat.fake_quant(w, 4, group))


def test_packed_layer_is_the_layer():
    layer = QuantLinear(64, 9, QuantSpec(4, 4, 32), bias=True).double()
    x = randn(2, 3, 64)
    torch.testing.assert_close(layer.packed_forward(x), layer(x).detach(), rtol=1e-12, atol=1e-12)
    for spec in (QuantSpec(4, 8, 32), QuantSpec(4, 4, "row"), QuantSpec(4, 4, 32, "lsq")):
        with pytest.raises(ValueError, match="W4A4"):
            QuantLinear(64, 9, spec).packed_forward(x)


INTEGER_PRODUCTS = {"sm_80": "IMMA", "sm_90": "IGMMA|IMMA", "gfx942": "v_mfma_i32"}


@pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton exists on Linux only")
@pytest.mark.parametrize("target", sorted(INTEGER_PRODUCTS))
@pytest.mark.parametrize("form", ["G=32 decode", "G=64 prefill"])
def test_codes_meet_on_integer_tensor_cores(target, form):
    import re

    made = aot.compile_program("w4a4_linear", form, target)
    assert re.search(INTEGER_PRODUCTS[target], made.assembly)
    assert not re.search(r"\bHMMA|v_mfma_f32", made.assembly)


# --------------------------------------------------------------------------------------------
# Noise


@pytest.mark.parametrize("group", [1, 2, 4, 37, 1024])
def test_largest_square_is_that_of_order_statistics(group):
    def density(t):  # of the largest magnitude
        return group * (2 * stats.norm.cdf(t) - 1) ** (group - 1) * 2 * stats.norm.pdf(t) * t**2

    wanted = integrate.quad(density, 0, 14, points=[1, 2, 3, 4], limit=200)[0]
    assert qat._max_square(group) == pytest.approx(wanted, rel=1e-6)


def test_known_values_of_the_largest_square():
    assert qat._max_square(1) == pytest.approx(1, rel=1e-9)
    assert qat._max_square(2) == pytest.approx(1 + 2 / math.pi, rel=1e-9)
    assert qat._max_square(4) == pytest.approx(2.4702, abs=1e-4)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [2, 8, 64, 1024])
def test_noise_of_a_group_is_as_simulated(bits, group):
    made = qat.simulated_group_mse(bits, group, seed=1)
    assert made == pytest.approx(qat.gaussian_group_mse(bits, group), rel=0.01)


def test_noise_edges():
    assert qat.gaussian_group_mse(4, 1) == 0
    assert qat.gaussian_group_mse(16, 64) == 0
    for bad in ({"bits": 1, "group_size": 4}, {"bits": 4, "group_size": 0}):
        with pytest.raises(ValueError):
            qat.gaussian_group_mse(**bad)


# --------------------------------------------------------------------------------------------
# Laws


def exact(law, **extra):
    N, D, G = (v.ravel() for v in np.meshgrid([1e6, 4e6, 3e7], [1e8, 1e9], [8.0, 64.0, 512.0]))
    return {"N": N, "D": D, "G": G, "delta": law.predict(N, D, G), **extra}


@settings(max_examples=15, deadline=None)
@given(
    k=st.floats(1e-3, 10),
    n=st.floats(-0.3, 0.6),
    d=st.floats(-0.3, 0.4),
    gg=st.floats(0.05, 1.5),
)
def test_an_exact_table_gives_its_law_back(k, n, d, gg):
    law = QATLaw(k, n, d, gg)
    for loss in ("ols", "huber"):
        report = QATLaw.fit(exact(law), loss=loss, n_boot=0)
        assert report.in_logs
        assert (report.law.gamma_n, report.law.gamma_d, report.law.gamma_g) == pytest.approx(
            (n, d, gg), abs=1e-5
        )
        assert report.law.k == pytest.approx(k, rel=1e-3)
        assert report.mape < 1e-5
        assert max(report.left_out.values()) < 1e-4


def test_prediction_by_hand_and_at_one_element():
    law = QATLaw(2.0, 0.5, 1.0, 2.0)
    assert law.predict(16, 3, 8) == pytest.approx(2 * 3 * 9 / 4)
    assert law.predict([16, 16], 3, [1, 2]) == pytest.approx([0, 1.5])
    assert QATLaw(2.0, 0.5, 1.0, 0.0).predict(16, 3, 1) == 0
    for bad in ((0, 1, 8), (1, -1, 8), (1, 1, 0.5)):
        with pytest.raises(ValueError):
            law.predict(*bad)


def test_order_and_container_of_the_table_change_nothing():
    table = qat.make_planted_table(0)
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    wanted = QATLaw.fit(table, n_boot=0).law
    for same in (rows, rows[::-1], pd.DataFrame(rows)):
        law = QATLaw.fit(same, n_boot=0).law
        assert law.gamma_d == pytest.approx(wanted.gamma_d, abs=2e-4)
        assert law.gamma_g == pytest.approx(wanted.gamma_g, abs=2e-3)


def test_least_squares_is_that_of_numpy():
    t = qat.make_planted_table(1)
    X = np.column_stack([np.ones(64), -np.log(t["N"]), np.log(t["D"]), np.log(np.log2(t["G"]))])
    wanted = np.linalg.lstsq(X, np.log(t["delta"]), rcond=None)[0]
    law = QATLaw.fit(t, loss="ols", n_boot=0).law
    got = [math.log(law.k), law.gamma_n, law.gamma_d, law.gamma_g]
    np.testing.assert_allclose(got, wanted, rtol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_intervals_hold_the_truth_and_shrink_with_the_noise(seed):
    wide = QATLaw.fit(qat.make_planted_table(seed, noise=0.1))
    narrow = QATLaw.fit(qat.make_planted_table(seed, noise=0.01))
    for name in ("gamma_n", "gamma_d", "gamma_g"):
        (a, b), (c, d) = wide.ci[name], narrow.ci[name]
        assert a - 0.02 <= getattr(qat.PLANTED, name) <= b + 0.02
        assert d - c < 0.3 * (b - a)


def test_a_law_without_a_term_has_exponent_zero_and_biased_residuals():
    table = qat.make_planted_table(0)
    report = QATLaw.fit(table, terms=("N", "G"), loss="ols")
    assert report.law.gamma_d == 0
    assert "gamma_d" not in report.ci
    assert np.corrcoef(report.residuals, np.log(table["D"]))[0, 1] > 0.9
    full = QATLaw.fit(table, loss="ols", n_boot=0)
    assert abs(np.corrcoef(full.residuals, np.log(table["D"]))[0, 1]) < 1e-6
    assert full.r2 > report.r2


def test_wrong_rows_hardly_move_the_robust_fit():
    table = qat.make_planted_table(2, noise=0.02)
    bad = {**table, "delta": table["delta"].copy()}
    bad["delta"][:5] *= 8
    law, ols = (QATLaw.fit(bad, loss=loss, n_boot=0).law for loss in ("huber", "ols"))
    for name in ("gamma_n", "gamma_d", "gamma_g"):
        assert abs(getattr(law, name) - getattr(qat.PLANTED, name)) < 0.05
    gaps = [abs(getattr(ols, n) - getattr(qat.PLANTED, n)) for n in ("gamma_n", "gamma_g")]
    assert max(gaps) > 0.05


def test_negative_rows_are_fitted_without_logarithms_and_said():
    table = qat.make_planted_table(2, noise=0.02)
    bad = {**table, "delta": table["delta"].copy()}
    bad["delta"][:3] *= -1
    with pytest.warns(UserWarning, match="<= 0"):
        report = QATLaw.fit(bad, n_boot=0)
    assert not report.in_logs
    assert abs(report.law.gamma_n - qat.PLANTED.gamma_n) < 0.03
    assert abs(report.law.gamma_d - qat.PLANTED.gamma_d) < 0.03
    assert abs(report.law.gamma_g - qat.PLANTED.gamma_g) < 0.06
    with pytest.raises(ValueError, match="delta > 0"):
        QATLaw.fit(bad, loss="ols")


def test_seeds_give_the_spread_that_decides_about_logarithms():
    base = exact(QATLaw(0.1, 0.2, 0.1, 0.5))
    rng = np.random.default_rng(0)
    for noise, in_logs in ((0.01, True), (0.8, False)):
        unit = noise * base["delta"].min()
        table = {k: np.tile(v, 3) for k, v in base.items()}
        table["delta"] = table["delta"] + unit * rng.standard_normal(len(table["N"]))
        table["seed"] = np.repeat(np.arange(3), len(base["N"]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the spread is known: nothing to warn of
            report = QATLaw.fit(table, n_boot=0)
        assert report.in_logs is in_logs
        assert abs(report.law.gamma_n - 0.2) < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v[:3] for k, v in t.items()}, "as many rows"),
        (lambda t: {**t, "G": np.where(t["G"] == 8, 1, t["G"])}, "'G'.*>= 2"),
        (lambda t: {**t, "D": np.full(64, 1e8)}, "'D'.*vary"),
        (lambda t: {**t, "D": 100 * t["N"]}, "independently"),
        (lambda t: {**t, "N": -t["N"]}, "'N'.*> 0"),
        (lambda t: {**t, "delta": np.full(64, np.nan)}, "finite"),
        (lambda t: {k: v for k, v in t.items() if k != "G"}, "lacks 'G'"),
        (lambda t: [], "got none"),
    ],
)
def test_fit_refuses_tables_that_cannot_tell(change, message):
    with pytest.raises(ValueError, match=message):
        QATLaw.fit(change(qat.make_planted_table(0)))


def test_fit_refuses_unknown_options():
    for options in ({"loss": "l1"}, {"terms": ("N", "X")}, {"terms": ("N", "N")}):
        with pytest.raises(ValueError, match="must be"):
            QATLaw.fit(qat.make_planted_table(0), **options)


def test_an_offset_is_found_where_there_is_one_and_not_where_there_is_none():
    law = QATLaw(0.1, 0.2, 0.1, 0.5)
    table = exact(law)
    assert abs(qat.fit_with_offset(table).offset) < 1e-5
    shifted = {**table, "delta": table["delta"] + 0.02}
    found = qat.fit_with_offset(shifted)
    assert found.offset == pytest.approx(0.02, abs=2e-4)
    assert found.law.gamma_n == pytest.approx(0.2, abs=0.01)
    assert found.mape < QATLaw.fit(shifted, n_boot=0).mape


@pytest.mark.parametrize("E", [1.7, 0.0])
def test_chinchilla_law_comes_back(E):
    law = qat.ChinchillaLaw(400.0, 0.34, 1800.0, 0.37, E)
    N, D = (v.ravel() for v in np.meshgrid(10.0 ** np.arange(6, 10), 10.0 ** np.arange(8, 11)))
    table = {"N": N, "D": D, "loss": law.predict(N, D)}
    made = qat.ChinchillaLaw.fit(table, irreducible=None if E else 0.0)
    assert (made.alpha, made.beta) == pytest.approx((0.34, 0.37), abs=2e-3)
    np.testing.assert_allclose(made.predict(N, D), table["loss"], rtol=1e-3)
    with pytest.raises(ValueError, match="rows"):
        qat.ChinchillaLaw.fit({k: v[:3] for k, v in table.items()})
    with pytest.raises(ValueError, match="> 0"):
        qat.ChinchillaLaw.fit({**table, "loss": table["loss"] - 10})


def test_effective_size_has_the_rounded_loss():
    law, full = QATLaw(0.2, 0.3, 0.05, 0.5), qat.ChinchillaLaw(400, 0.34, 1800, 0.37, 1.7)
    N, D, G = np.array([1e6, 1e7, 1e8]), 1e9, 32
    smaller = qat.effective_parameters(law, full, N, D, G)
    np.testing.assert_allclose(
        full.predict(smaller, D), full.predict(N, D) + law.predict(N, D, G), rtol=1e-12
    )
    assert (smaller < N).all()
    np.testing.assert_allclose(qat.effective_parameters(law, full, N, D, 1), N)


def test_decomposition_by_hand():
    rows = [
        {"spec": s, "N": 1, "D": 2, "G": 8, "seed": i, "delta": d + 0.1 * i}
        for s, d in (("W4A16", 1.0), ("W16A4", 3.0), ("W4A4", 5.0), ("W16A4 fc2:A8", 0.5))
        for i in (0, 1)
    ]
    out = qat.error_decomposition(rows).iloc[0]
    assert (out.weights, out.activations, out.both) == pytest.approx((1.05, 3.05, 5.05))
    assert out.interaction == pytest.approx(0.95)
    assert out.ratio == pytest.approx(3.05 / 1.05)
    with pytest.raises(ValueError, match="W4A4 fc2:A8"):
        qat.error_decomposition(rows, mixed=" fc2:A8")


# --------------------------------------------------------------------------------------------
# Students


def test_teacher_is_as_specified():
    t = qat.make_teacher()
    assert t.first.shape == (32, 8)
    assert t.second.shape == (8, 10)
    p = t.logits(qat._fixed_points(8192)).softmax(dim=1)
    assert float(-(p * p.log()).sum(dim=1).mean()) == pytest.approx(1.0, abs=0.02)
    assert torch.equal(t.first, qat.make_teacher().first)
    wide = qat.make_teacher(64, gain=4.0)
    assert float(wide.second.std()) == pytest.approx(0.5, rel=0.1)
    assert float(wide.first.std()) == pytest.approx(2 / math.sqrt(32), rel=0.1)


def plain_training(width, steps, spec, seed):
    """The same protocol with modules, torch's clipping and torch's AdamW, one seed alone."""
    model = qat.Student(width, seed=seed)
    model = model if spec == qat.FULL else qat.convert(model, spec)
    teacher = qat.make_teacher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step, (x, target) in enumerate(qat._batches([seed], steps, teacher, True)):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * cosine_schedule(step, steps, 20, floor=0.02)
        loss = -(target[0] * model(x[0]).log_softmax(dim=1)).sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


MANY = [
    qat.FULL,
    QuantSpec(4, 4, 8),
    QuantSpec(4, 4, "row"),
    QuantSpec(4, 4, "tensor"),
    QuantSpec(4, 16, 8, "lsq"),
    QuantSpec(4, 4, 8, overrides={"fc2": {"a_bits": 8}, "gate": {"w_bits": 3, "a_bits": 3}}),
]


@pytest.mark.parametrize("spec", MANY, ids=lambda s: f"{s.name} G={s.group_size}")
def test_batched_students_are_the_modules_trained_alone(spec):
    together = qat.train_students(16, 20, spec, seeds=[3, 5])
    alone = plain_training(16, 20, spec, 5)
    x = randn(50, 32, seed=9)
    torch.testing.assert_close(together.student(1)(x), alone(x), rtol=1e-5, atol=1e-6)
    # and far from where it started
    assert float((alone(x) - qat.Student(16, seed=5)(x)).detach().abs().max()) > 0.1


def test_a_seed_does_not_depend_on_its_company():
    spec = QuantSpec(4, 4, 8)
    three = qat.train_students(16, 20, spec, seeds=[1, 2, 3])
    one = qat.train_students(16, 20, spec, seeds=[2])
    for name, p in one.parameters.items():
        torch.testing.assert_close(p[0], three.parameters[name][1], rtol=1e-9, atol=1e-11)


def test_pairs_share_their_start_and_batches():
    rows = qat.run_pairs(16, 5, [QuantSpec(16, 16, 8), QuantSpec(4, 4, "row")], seeds=[0, 4])
    assert [r["delta"] for r in rows[:2]] == [0.0, 0.0]
    assert all(r["delta"] == r["loss_q"] - r["loss_full"] for r in rows)
    assert [(r["spec"], r["seed"]) for r in rows[2:]] == [("W4A4", 0), ("W4A4", 4)]
    assert rows[2]["N"] == 12 * 16**2
    assert rows[2]["D"] == 640
    assert rows[2]["G"] == 32
    assert rows[2]["delta"] != 0


def test_counts_of_weights_are_those_of_the_model():
    model = qat.convert(qat.Student(16), QuantSpec(4, 4, 8))
    count = sum(m.weight.numel() for m in model.modules() if isinstance(m, QuantLinear))
    assert count == qat.n_weights(16)


def test_loss_is_the_divergence_from_the_teacher():
    made = qat.train_students(16, 5, QuantSpec(4, 4, "row"), seeds=[1])
    x = qat._fixed_points(8192)
    teacher, model = made.teacher, made.student(0)
    kl = nn.functional.kl_div(
        model(x).log_softmax(dim=1),
        teacher.logits(x).log_softmax(dim=1),
        log_target=True,
        reduction="batchmean",
    )
    assert made.losses()[0] == pytest.approx(float(kl.detach()), rel=1e-10)


def test_rounding_after_training_is_the_plain_net_with_rounded_layers():
    made = qat.train_students(16, 30, seeds=[0, 1])
    spec = QuantSpec(4, 4, 8)
    x = qat._fixed_points(8192)
    teacher = made.teacher.logits(x).log_softmax(dim=1)
    for i, loss in enumerate(made.losses(spec)):
        found = qat.convert(made.student(i), spec)(x).log_softmax(dim=1)
        wanted = float((teacher.exp() * (teacher - found)).sum(dim=1).mean().detach())
        assert loss == pytest.approx(wanted, rel=1e-10)
        assert loss != made.losses()[i]


def test_hard_labels_train_too_and_differ():
    soft, hard = (
        qat.train_students(16, 30, seeds=[0], soft_labels=s).losses()[0] for s in (True, False)
    )
    assert soft != hard
    assert hard < qat.train_students(16, 1, seeds=[0]).losses()[0]


def test_training_refuses_nothing_to_do():
    for bad in ({"steps": 0, "seeds": [0]}, {"steps": 5, "seeds": []}):
        with pytest.raises(ValueError, match="at least one"):
            qat.train_students(16, **bad)


def test_statistics_are_of_the_layers_inputs_before_rounding():
    model = qat.convert(qat.Student(16, seed=1), QuantSpec(4, 4, 8))
    x = randn(500, 32)
    found = qat.activation_stats(model, x)
    assert next(iter(found)) == "embed"
    h = model.embed(x)
    z = model.blocks[0].norm(h).detach()
    assert found["blocks.0.gate"] == found["blocks.0.up"]
    assert found["blocks.0.gate"].kurtosis == pytest.approx(
        float(stats.kurtosis(z.numpy(), axis=None, fisher=False))
    )
    assert found["blocks.0.gate"].absmax == float(z.abs().max())
    assert found["embed"].rms == pytest.approx(float(x.square().mean().sqrt()))
    assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="linear layers"):
        qat.activation_stats(nn.ReLU(), x)

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(32, 3), nn.Linear(3, 3)
            self.double()

        def forward(self, v):
            return self.used(v)

    with pytest.raises(ValueError, match="'idle' did not"):
        qat.activation_stats(Lazy(), x)


# --------------------------------------------------------------------------------------------
# Character models and shipped runs


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_linear_layers_leave_the_gpt_as_it_was(positions):
    config = GPTConfig(
        vocab_size=11, context=12, d_model=32, n_layers=2, n_heads=2, positions=positions
    )
    model = GPT(config, seed=0).double()
    made = qat.with_linear_layers(model)
    tokens = torch.randint(11, (3, 9), generator=g())
    torch.testing.assert_close(made(tokens).logits, model(tokens).logits, rtol=1e-12, atol=1e-12)
    names = {n.rsplit(".", 1)[-1] for n, m in made.named_modules() if isinstance(m, nn.Linear)}
    assert names == {"qkv", "o", "gate", "up", "fc2"}
    rounded = qat.convert(made, QuantSpec(4, 4, 8))
    assert sum(isinstance(m, QuantLinear) for m in rounded.modules()) == 10
    assert not torch.equal(rounded(tokens).logits, made(tokens).logits)
    with pytest.raises(ValueError, match="SwiGLU"):
        qat.with_linear_layers(GPT(GPTConfig(vocab_size=11, context=12, mlp="gelu")))


def test_character_model_learns_with_four_bits_and_the_same_call_gives_the_same_loss():
    options = {"n_layers": 1, "context": 32, "batch_size": 16, "seed": 1}
    n = 40 * 32 * 16
    spec = QuantSpec(4, 4, 32, overrides={"fc2": {"a_bits": 8}})
    made = qat.gpt_run(32, n, spec, **options)
    assert made["D"] == n
    assert made["loss"] < math.log(103) - 0.5
    assert made == qat.gpt_run(32, n, spec, **options)
    assert made["loss"] != qat.gpt_run(32, n, **options)["loss"]
    with pytest.raises(ValueError, match="n_characters"):
        qat.gpt_run(32, 100, **options)


def test_shipped_runs_are_paired_and_known():
    assert len(set(qat.RUNS)) == len(qat.RUNS)
    frame = pd.DataFrame(
        [{"run": r, "loss_0": 0.1, "loss_1": 0.2, "loss_2": 0.3} for r in qat.RUNS]
    )
    table = qat.delta_table(frame)
    twins = sum(",full," in r for r in qat.RUNS)
    assert len(table) == 3 * (len(qat.RUNS) - twins)
    assert bool((table.delta == 0).all())
    assert set(table[table.units == 64].G) == {16.0}
    with pytest.raises(ValueError, match="twin"):
        qat.delta_table(frame[frame.run != "16,300,full,-"])
    with pytest.raises(ValueError, match="run must be"):
        qat.study_run("16,300,W3A3,8")


# --------------------------------------------------------------------------------------------
# Checkers


def test_checkers_refuse_plausible_slips():
    def ste(mask, rounding):
        def fn(x, s, bits, grad):
            half = 1 << (bits - 1)
            u = x / s
            return s * np.clip(rounding(u), -half, half - 1), grad * mask(u, half)

        return fn

    def inside(u, half):
        return (u >= -half) & (u <= half - 1)

    qat.check_ste(ste(inside, np.round))
    for mask, rounding in (
        (inside, lambda u: np.floor(u + 0.5)),
        (lambda u, half: np.abs(u) < half - 1, np.round),
        (lambda u, half: np.ones_like(u), np.round),
        (lambda u, half: inside(np.round(u), half), np.round),
    ):
        with pytest.raises(AssertionError, match="must be"):
            qat.check_ste(ste(mask, rounding))
    with pytest.raises(AssertionError, match="largest of a group"):
        qat.check_group_mse(lambda b, n: qat.gaussian_group_mse(b, n) / (1 - 1 / n))
    with pytest.raises(AssertionError, match=r"at most 4\.5"):
        qat.check_assignment(QuantSpec(4, 4, 16, overrides={"fc2": {"a_bits": 8}}))
    with pytest.raises(AssertionError, match="groups must be"):
        qat.check_assignment(QuantSpec(4, 4, 8))
    with pytest.raises(AssertionError, match=r"at most 0\.8"):
        qat.check_assignment(QuantSpec(4, 4, 16))


def test_the_law_without_d_and_the_planted_fit_pass_their_checkers():
    def fit(N, D, G, delta, **options):
        table = {"N": N, "D": D, "G": G, "delta": delta}
        return QATLaw.fit(table, loss="ols", n_boot=0, **options)

    def powers(law):
        return law.k, law.gamma_n, law.gamma_d, law.gamma_g

    qat.check_law_fit(lambda *t: powers(fit(*t).law))
    qat.check_missing_term(lambda *t: fit(*t, terms=("N", "G")).residuals)
    with pytest.raises(AssertionError, match="gamma_g"):
        qat.check_law_fit(lambda N, D, G, delta: powers(fit(N, D, np.exp2(G**0.5), delta).law))
    with pytest.raises(AssertionError, match="correlation"):
        qat.check_missing_term(lambda *t: fit(*t).residuals)
