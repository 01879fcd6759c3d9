"""Grids, packed codes, straight-through gradients, covariances and GPTQ."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icmllab.toolbox.quantization import (
    CovarianceAccumulator,
    StoreOverflow,
    absmax_scale,
    activation_covariance,
    cat_groupwise,
    cross_covariance,
    fake_quant,
    gptq_fixed,
    gptq_obs,
    groupwise_bits,
    join_groups,
    lsq_scale,
    pack_bits,
    packed_size,
    quantize_groupwise,
    quantize_symmetric,
    split_groups,
    unpack_bits,
)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=gen(seed), dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [*range(18), 127, 128, 129])
def test_packing_round_trips_every_width_and_tail(bits, n):
    codes = torch.randint(0, 1 << bits, (3, 2, n), generator=gen(n), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (3, 2, -(-n * bits // 8)) == (3, 2, packed_size(n, bits))
    assert torch.equal(unpack_bits(packed, bits, n), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_bytes_are_the_little_endian_number_of_the_codes(bits):
    codes = torch.randint(0, 1 << bits, (29,), generator=gen(bits))
    number = sum(int(c) << (bits * i) for i, c in enumerate(codes))
    expected = number.to_bytes(packed_size(29, bits), "little")
    assert bytes(pack_bits(codes, bits).tolist()) == expected


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 8), st.integers(0, 40), st.integers(0, 10**6))
def test_signed_codes_round_trip(bits, n, seed):
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (2, n), generator=gen(seed), dtype=torch.int8)
    assert torch.equal(unpack_bits(pack_bits(codes, bits), bits, n, signed=True), codes)


def test_the_low_nibble_is_the_even_element():
    packed = pack_bits(torch.tensor([1, -2, 7, -8]), 4)
    assert packed.tolist() == [0xE1, 0x87]


@pytest.mark.parametrize(
    ("codes", "bits", "message"),
    [
        (torch.tensor([4]), 2, "fit 2 bits"),
        (torch.tensor([-3]), 2, "fit 2 bits"),
        (torch.tensor([-1, 2]), 2, "fit 2 bits"),
        (torch.tensor([1.0]), 2, "integers"),
        (torch.tensor([1]), 9, "bits"),
        (torch.tensor([1]), 0, "bits"),
        (torch.tensor(1), 2, "last dimension"),
    ],
)
def test_codes_that_do_not_fit_are_refused(codes, bits, message):
    with pytest.raises(ValueError, match=message):
        pack_bits(codes, bits)


def test_unpacking_more_than_there_is_is_refused():
    with pytest.raises(ValueError, match="n must fit"):
        unpack_bits(torch.zeros(3, dtype=torch.uint8), 3, 9)
    with pytest.raises(ValueError, match="uint8"):
        unpack_bits(torch.zeros(3), 3)
    assert len(unpack_bits(torch.zeros(3, dtype=torch.uint8), 3)) == 8


# -------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_groups_are_consecutive_and_join_again(dim):
    x = normal(4, 6, 8)
    groups = split_groups(x, dim, 2)
    moved = x.movedim(dim, -1)
    of_one = groups.movedim(dim % 3, -2)  # (rest, n/g, g)
    assert torch.equal(of_one.flatten(-2), moved)
    assert torch.equal(join_groups(groups, dim), x)


def test_key_groups_have_the_layout_that_packs_tokens_of_one_channel():
    k = normal(2, 3, 8, 5)
    grid = quantize_groupwise(k, 2, -2, 4)
    assert grid.codes.shape == (2, 3, 2, 5, 1)
    assert grid.scale.shape == grid.zero.shape == (2, 3, 2, 5)
    assert torch.equal(grid.zero, k.view(2, 3, 2, 4, 5).amin(dim=3).half())


def test_a_group_size_that_does_not_divide_names_the_nearest():
    with pytest.raises(ValueError, match=r"group_size=5, size 12; the nearest that do: 4 or 6"):
        split_groups(normal(12), 0, 5)
    with pytest.raises(ValueError, match=r"group_size=64, size 12; the nearest that do: 12"):
        split_groups(normal(12), 0, 64)
    with pytest.raises(ValueError, match="group_size"):
        split_groups(normal(12), 0, 0)
    with pytest.raises(ValueError, match="dim"):
        split_groups(normal(12), 1, 3)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("store", [torch.float16, torch.float64])
def test_error_is_at_most_half_a_stored_step_on_heavy_tails(bits, dtype, store):
    noise = np.random.default_rng(bits).standard_t(2.5, (3, 2, 256, 32))
    x = torch.from_numpy(noise).to(dtype)
    for dim, g in ((-2, 128), (-1, 32)):
        grid = quantize_groupwise(x, bits, dim, g, store_dtype=store)
        error = split_groups((grid.dequantize(torch.float64) - x.double()).abs(), dim, g)
        bound = grid.scale.double()[..., None] / 2
        size = split_groups(x.double().abs(), dim, g).amax(-1, keepdim=True)
        slack = 4 * torch.finfo(dtype).eps * size
        if bits == 8 and store == torch.float16:
            slack = slack + 2.0**-10 * size  # the grid's end, rounded, may lie below the largest
        assert bool((error <= bound + slack).all())


def test_codes_use_the_rounded_scale_and_minimum():
    x = normal(64, 128, seed=3, dtype=torch.float32) * 3 + 5
    grid = quantize_groupwise(x, 8, -1, 128)
    scale, zero = grid.scale.float()[..., None], grid.zero.float()[..., None]
    expected = ((x.view(64, 1, 128) - zero) / scale).round().clamp(0, 255)
    assert torch.equal(grid.unpack().float(), expected)
    low, high = x.aminmax(dim=1, keepdim=True)
    unrounded = ((x - low) / ((high - low) / 255)).round()
    assert (unrounded != expected[:, 0]).float().mean() > 0.01  # the wrong way shows


def test_minimum_and_maximum_are_met_and_a_shift_changes_nothing():
    x = normal(7, 64)
    grid = quantize_groupwise(x, 2, -1, 32, store_dtype=torch.float64)
    found = grid.dequantize().view(7, 2, 32)
    values = x.view(7, 2, 32)
    torch.testing.assert_close(found.amin(-1), values.amin(-1))
    torch.testing.assert_close(found.amax(-1), values.amax(-1))
    shifted = quantize_groupwise(x + 7.25, 2, -1, 32, store_dtype=torch.float64)
    torch.testing.assert_close(shifted.dequantize() - 7.25, grid.dequantize())


def test_a_constant_group_is_exact_and_a_tiny_range_falls_to_its_minimum():
    x = torch.full((2, 8), 0.75, dtype=torch.float32)
    x[1] += 1e-9 * torch.arange(8)
    tiny = torch.zeros(1, 8, dtype=torch.float64)
    tiny[0, 3] = 1e-9  # below the smallest step of float16
    for values in (x, tiny):
        grid = quantize_groupwise(values, 2, -1, 8)
        assert not grid.scale.any()
        assert not grid.unpack().any()
        assert torch.equal(grid.dequantize(), values[:, :1].half().to(values).expand_as(values))


def test_halves_go_to_even():
    x = torch.tensor([[0.0, 0.5, 1.5, 2.5, 3.0]])  # scale 1 at 2 bits
    assert quantize_groupwise(x, 2, -1, 5).unpack().flatten().tolist() == [0, 0, 2, 2, 3]


def test_bits_and_bytes_are_counted_to_the_last():
    grid = quantize_groupwise(normal(4, 2, 256, 64, dtype=torch.float32), 2, -2, 128)
    per_element = grid.n_bits / (4 * 2 * 256 * 64)
    assert per_element == groupwise_bits(2, 128) == 2.25
    assert grid.nbytes == 4 * 2 * 256 * 64 * 2.25 / 8
    odd = quantize_groupwise(normal(5, 3), 3, -1, 3)
    assert (odd.n_bits, odd.nbytes) == (5 * (9 + 32), 5 * (2 + 4))


def test_parts_join_to_what_the_whole_gives():
    x = normal(2, 3, 32, 8, dtype=torch.float32)
    for dim, g in ((-2, 8), (-1, 4)):
        whole = quantize_groupwise(x, 2, dim, g)
        parts = [quantize_groupwise(p, 2, dim, g) for p in x.split([8, 24], dim=2)]
        joined = cat_groupwise(parts, dim=2)
        assert torch.equal(joined.codes, whole.codes)
        assert torch.equal(joined.dequantize(), whole.dequantize())
    with pytest.raises(ValueError, match="share"):
        cat_groupwise([whole, quantize_groupwise(x, 4, -1, 4)], dim=2)


def test_what_a_grid_cannot_hold_is_named():
    x = normal(2, 3, 8, 4, dtype=torch.float32)
    x[1, 2, 5, 0] = 3e5
    with pytest.raises(StoreOverflow) as caught:
        quantize_groupwise(x, 2, -1, 4)
    assert caught.value.index[:3] == (1, 2, 5)
    assert quantize_groupwise(x, 2, -1, 4, store_dtype=torch.float32).scale.isfinite().all()
    with pytest.raises(ValueError, match="finite"):
        quantize_groupwise(torch.full((4,), float("nan")), 2, -1, 4)
    with pytest.raises(ValueError, match="bits"):
        quantize_groupwise(x, 9, -1, 4)
    with pytest.raises(ValueError, match="floating"):
        quantize_groupwise(torch.arange(4), 2, -1, 4)


# ---------------------------------------------------------------------------- symmetric


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_absmax_codes_against_plain_numpy(bits, dtype):
    x = normal(5, 24, dtype=dtype)
    q_max = 2 ** (bits - 1) - 1
    groups = x.numpy().reshape(5, 3, 8)
    scale = np.abs(groups).max(-1) / q_max
    codes = np.clip(np.rint(groups / scale[..., None]), -q_max - 1, q_max)
    found = quantize_symmetric(x, bits, 8)
    assert np.array_equal(found.scale.numpy(), scale.astype(found.scale.numpy().dtype))
    assert np.array_equal(found.codes.numpy(), codes.reshape(5, 24).astype(np.int8))
    assert torch.equal(fake_quant(x, bits, 8), found.dequantize().to(dtype))
    assert torch.equal(absmax_scale(x, bits, 8), found.scale)
    across = quantize_symmetric(x.T.contiguous(), bits, 8, dim=0)
    assert torch.equal(across.dequantize(), found.dequantize().T)


def test_the_largest_element_is_exact_and_noise_meets_the_closed_form():
    x = normal(200_000, 4, seed=1).reshape(-1)
    error = (fake_quant(x, 4, 4) - x).view(-1, 4)
    at = x.view(-1, 4).abs().argmax(dim=1, keepdim=True)
    assert error.gather(1, at).abs().max() < 1e-12
    # (1 − 1/G) E[M²] / (12 q_max²), E[M²] = 2.4702 for four normals
    assert error.square().mean().item() == pytest.approx(0.75 * 2.4702 / (12 * 49), rel=0.01)


def test_a_group_of_one_is_exact_and_of_zeros_is_zero():
    x = normal(3, 7)
    torch.testing.assert_close(fake_quant(x, 2, 1), x)
    zeros = torch.zeros(2, 8)
    assert torch.equal(fake_quant(zeros, 4, 4), zeros)
    assert absmax_scale(zeros, 4, 4).eq(1e-8).all()
    small = 1e-12 * normal(1, 8)
    torch.testing.assert_close(fake_quant(small, 4, 8) * 1e12, fake_quant(small * 1e12, 4, 8))


def test_sixteen_bits_give_the_same_tensor():
    x = normal(3, 7)
    assert fake_quant(x, 16, 2) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_absmax_gradient_is_the_identity_for_every_element(dtype):
    x = normal(6, 16, dtype=dtype).requires_grad_()
    g = normal(6, 16, seed=9, dtype=dtype)
    fake_quant(x, 4, 8).backward(g)
    assert torch.equal(x.grad, g)  # the largest of a group too, and nothing from its scale


def test_scaled_gradient_follows_the_definition():
    x = torch.tensor([[-9.0, -8.5, -8.0, -2.3, 0.5, 6.9, 7.0, 7.2]], dtype=torch.float64)
    scale = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    x.requires_grad_()
    g = torch.arange(1.0, 9.0, dtype=torch.float64)[None]
    out = fake_quant(x, 4, 8, scale=scale, scale_grad=0.5)
    assert out.tolist() == [[-8, -8, -8, -2, 0, 7, 7, 7]]
    out.backward(g)
    inside = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]])
    assert torch.equal(x.grad, g * inside)
    slope = torch.tensor([-8, -8, 0, 0.3, -0.5, 0.1, 0, 7], dtype=torch.float64)
    assert scale.grad.item() == pytest.approx(0.5 * float((g[0] * slope).sum()))


def test_scale_gradient_is_the_derivative_where_no_code_flips():
    x, scale = normal(4, 32), torch.full((4, 2), 0.17, dtype=torch.float64)
    weight = normal(4, 32, seed=5)
    scale.requires_grad_()
    (fake_quant(x, 3, 16, scale=scale) * weight).sum().backward()
    codes = quantize_symmetric(x, 3, 16, scale=scale.detach()).codes
    # x̂ = s·code: with codes fixed the slope is the code; straight through, x/s comes off inside
    ratio = x.view(4, 2, 16) / 0.17
    inside = (ratio >= -4) & (ratio <= 3)
    slope = codes.view(4, 2, 16).double() - torch.where(inside, ratio, 0.0)
    torch.testing.assert_close(scale.grad, (weight.view(4, 2, 16) * slope).sum(-1))


def test_lsq_scale_and_its_gradient_through_other_dimensions():
    x = normal(8, 6)
    expected = 2 * x.view(2, 4, 6).abs().mean(dim=1) / math.sqrt(7)
    torch.testing.assert_close(lsq_scale(x, 4, 4, dim=0), expected)
    a = lsq_scale(x, 4, 4, dim=0).requires_grad_()
    b = a.detach().T.contiguous().requires_grad_()
    g = normal(8, 6, seed=2)
    fake_quant(x, 4, 4, dim=0, scale=a).backward(g)
    fake_quant(x.T, 4, 4, scale=b).backward(g.T)
    torch.testing.assert_close(a.grad.T, b.grad)


def test_half_precision_is_computed_wide():
    x = normal(4, 32, dtype=torch.float16)
    out = fake_quant(x, 8, 32)
    assert out.dtype == torch.float16
    assert torch.equal(out, fake_quant(x.float(), 8, 32).half())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: fake_quant(x, 1, 4), "bits"),
        (lambda x: fake_quant(x, 9, 4), "bits"),
        (lambda x: fake_quant(x, 4, 3), "group_size"),
        (lambda x: fake_quant(x / 0, 4, 4), "finite"),
        (lambda x: fake_quant(x, 4, 4, scale=torch.ones(3)), "scale must be"),
        (lambda x: fake_quant(x, 4, 4, scale=torch.zeros(2, 2)), "> 0"),
        (lambda x: fake_quant(x / 0, 4, 4, scale=torch.ones(2, 2)), "finite"),
        (lambda x: fake_quant(x.long(), 4, 4), "floating"),
        (lambda x: quantize_symmetric(x, 16, 4), "bits"),
    ],
)
def test_bad_fake_quantisation_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(normal(2, 8))


# --------------------------------------------------------------------- covariance and GPTQ


def test_covariance_of_batches_is_that_of_all_rows():
    X = normal(50, 6, dtype=torch.float32)
    moments = CovarianceAccumulator(damping=0.01)
    for part in X.split(13):
        moments.update(part.view(1, -1, 6))
    found, whole = moments.finalize(), activation_covariance(X, damping=0.01)
    expected = X.double().T @ X.double() / 50
    damp = 0.01 * float(expected.diagonal().mean())
    assert found.sigma.dtype == torch.float64
    torch.testing.assert_close(found.sigma, expected + damp * torch.eye(6).double())
    torch.testing.assert_close(found.sigma, whole.sigma)
    assert found.damp == pytest.approx(damp)
    moments.update(X)  # finalising does not end it, nor damp twice
    torch.testing.assert_close(moments.finalize().sigma, whole.sigma)


def test_dead_inputs_are_found_before_damping_and_by_the_median():
    X = normal(400, 9)
    X[:, 2] = 0
    X[:, 5] *= 1e-3
    X[:, 7] *= 1e4  # by the mean this one would make all others dead
    found = activation_covariance(X, damping=0.5)
    assert found.dead_mask.nonzero().flatten().tolist() == [2, 5]
    assert activation_covariance(torch.zeros(3, 4)).dead_mask.all()


def test_covariance_errors_and_cross():
    with pytest.raises(ValueError, match="at least one batch"):
        CovarianceAccumulator().finalize()
    moments = CovarianceAccumulator()
    moments.update(normal(3, 4))
    with pytest.raises(ValueError, match="4 features"):
        moments.update(normal(3, 5))
    with pytest.raises(ValueError, match="finite"):
        moments.update(torch.full((2, 4), float("inf")))
    with pytest.raises(ValueError, match="damping"):
        CovarianceAccumulator(damping=-1)
    X, Y = normal(30, 3), normal(30, 5, seed=1)
    torch.testing.assert_close(cross_covariance(X, Y), torch.einsum("ti,tj->ij", X, Y) / 30)
    torch.testing.assert_close(cross_covariance(X, X), activation_covariance(X, damping=0).sigma)
    with pytest.raises(ValueError, match="rows"):
        cross_covariance(X, Y[:-1])


def toeplitz(n: int, rho: float) -> torch.Tensor:
    at = torch.arange(n, dtype=torch.float64)
    return rho ** (at[:, None] - at).abs()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("block", [1, 7, 64])
def test_gptq_is_successive_cancellation_on_reversed_columns(seed, block):
    n, a, step = 48, 64, 0.35
    W, A = normal(a, n, seed=seed), normal(96, n, seed=seed + 50)
    sigma = A.T @ A / 96
    L = torch.linalg.cholesky(sigma)
    Y, codes = W @ L, torch.empty(a, n, dtype=torch.int32)
    for i in reversed(range(n)):
        z = (Y[:, i] / (step * L[i, i])).round()
        Y -= torch.outer(step * z, L[i])
        codes[:, i] = z.int()
    found = gptq_obs(W.flip(1), sigma.flip(0, 1), step, block_size=block)
    assert torch.equal(found.codes.flip(1), codes)


def test_gptq_without_correlation_is_rounding_and_with_it_beats_it():
    W = normal(40, 24, dtype=torch.float32)
    plain = gptq_obs(W, torch.diag(torch.rand(24, generator=gen()) + 0.1), 0.5)
    assert torch.equal(plain.codes, (W.double() / 0.5).round().int())
    sigma = toeplitz(24, 0.95)
    found = gptq_obs(W, sigma, 0.5)

    def distortion(weights):
        E = W.double() - weights
        return float(((E @ sigma) * E).sum())

    assert distortion(found.weights) < 0.3 * distortion(plain.weights)


def test_fixed_width_gptq_keeps_to_its_levels():
    W, sigma = normal(20, 16), toeplitz(16, 0.9)
    found = gptq_fixed(W, sigma, 3)
    assert 0 <= int(found.codes.min()) <= int(found.codes.max()) <= 7
    low, high = W.aminmax(dim=1, keepdim=True)
    torch.testing.assert_close(found.weights, low + found.codes * (high - low) / 7)
    constant = gptq_fixed(torch.full((1, 16), 2.0), sigma, 3)
    torch.testing.assert_close(constant.weights, torch.full((1, 16), 2.0).double())


def test_gptq_steps_by_column_and_row():
    W, sigma = normal(10, 6), toeplitz(6, 0.5)
    steps = torch.rand(6, generator=gen(1)) + 0.2
    scaled = gptq_obs(W / steps, sigma * steps * steps[:, None], 1.0)
    assert torch.equal(gptq_obs(W, sigma, steps).codes, scaled.codes)
    rows = torch.rand(10, 1, generator=gen(2)) + 0.2
    assert torch.equal(gptq_obs(W, sigma, rows).codes, gptq_obs(W / rows, sigma, 1.0).codes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"W": normal(3, 5)}, "4 columns"),
        ({"sigma": normal(4, 4)}, "symmetric"),
        ({"sigma": -torch.eye(4).double()}, "positive definite"),
        ({"step": 0.0}, "step must be > 0"),
        ({"step": torch.ones(3)}, "step must be broadcastable"),
        ({"step": 1e-12}, "int32"),
        ({"W": torch.full((2, 4), float("nan"))}, "finite"),
    ],
)
def test_bad_gptq_is_named(changes, message):
    settings = {"W": normal(3, 4), "sigma": toeplitz(4, 0.5), "step": 0.5} | changes
    with pytest.raises(ValueError, match=message):
        gptq_obs(**settings)
