"""WaterSIC, its limit, its baselines and the storage of what it makes."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize
from torch import nn

from icmllab.efficiency import watersic as ws
from icmllab.toolbox.quantization import Covariance, gptq_fixed

F32, F64 = torch.float32, torch.float64
METHODS = [ws.watersic_quantize, ws.gptq_quantize, ws.rtn_quantize]


def g(seed=0):
    return torch.Generator().manual_seed(seed)


def problem(a=40, n=10, *, seed=0, dtype=F64):
    W = torch.randn(a, n, generator=g(seed), dtype=F64)
    M = torch.randn(n, n + 4, generator=g(seed + 1), dtype=F64)
    return W.to(dtype), M @ M.T / n


# --------------------------------------------------------------------------------------------
# The limit


@pytest.mark.parametrize("seed", range(5))
def test_waterfilling_solves_its_equations(seed):
    lam = 10 ** (4 * torch.rand(12, generator=g(seed), dtype=F64) - 3)
    for share in (0.01, 0.2, 0.7, 0.99):
        D = share * float(lam.mean())
        found = ws.waterfilling(lam, distortion=D)
        theta = brentq(lambda x, D=D: float(lam.clamp_max(x).mean()) - D, 1e-9, float(lam.max()))
        assert found.theta == pytest.approx(theta, rel=1e-9)
        bits = 0.5 * (lam / theta).log2().clamp_min(0).mean()
        assert found.rate == pytest.approx(float(bits), abs=1e-9)
        assert found.distortion == pytest.approx(D, rel=1e-12)
        assert found.active == int((lam > theta).sum())
        back = ws.waterfilling(lam, rate=found.rate)
        assert back.distortion == pytest.approx(D, rel=1e-9)
        assert back.active == found.active


def test_waterfilling_by_hand_and_at_its_ends():
    assert ws.waterfilling([4.0, 1.0], distortion=0.5).rate == pytest.approx(1.0)
    half = ws.waterfilling([4.0, 1.0], distortion=1.25)
    assert half.theta == pytest.approx(1.5)
    assert half.rate == pytest.approx(0.35376, abs=1e-5)
    nothing = ws.waterfilling([4.0, 1.0, 0.0], distortion=9.0)
    assert nothing == (0.0, 5 / 3, 4.0, 0)
    assert ws.waterfilling([4.0, 1.0, 0.0], rate=0.0) == (0.0, 5 / 3, 4.0, 0)
    assert ws.waterfilling([2.0, 0.0], rate=3.0).active == 1
    assert ws.waterfilling([0.0, 0.0], rate=1.0).distortion == 0.0
    assert ws.waterfilling([1.0] * 7, rate=2.5).distortion == pytest.approx(2**-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distortion": 1.0, "rate": 1.0}, "exactly one"),
        ({}, "exactly one"),
        ({"distortion": 0.0}, "distortion"),
        ({"rate": -1.0}, "rate"),
        ({"rate": math.nan}, "rate"),
    ],
)
def test_waterfilling_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        ws.waterfilling([1.0, 2.0], **arguments)
    for lam in ([-1.0, 2.0], [], [math.nan]):
        with pytest.raises(ValueError, match="eigvals"):
            ws.waterfilling(lam, rate=1.0)


# --------------------------------------------------------------------------------------------
# The loop


@pytest.mark.parametrize("seed", range(5))
def test_gptq_is_the_loop_with_equal_steps(seed):
    W, sigma = problem(64, 48, seed=seed)
    ours = ws.sic(W, sigma, torch.full((48,), 0.3, dtype=F64), lmmse=False)
    theirs = ws.gptq_obs(W.flip(1), sigma.flip(0, 1), 0.3)
    assert torch.equal(ours.codes, theirs.codes.flip(1))


@pytest.mark.parametrize("lmmse", [True, False])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_residual_is_the_error_seen_through_the_factor(lmmse, dtype):
    W, sigma = problem(dtype=dtype)
    L = torch.linalg.cholesky(sigma)
    alpha = 0.4 / L.diagonal()
    found = ws.sic(W, sigma, alpha, lmmse=lmmse)
    decoded = found.codes * (alpha * found.gamma)
    torch.testing.assert_close((W.double() - decoded) @ L, found.residual, atol=1e-12, rtol=0)
    if not lmmse:  # each column ends within half a step of the output
        assert float(found.residual.abs().max()) <= 0.2 + 1e-12
        assert torch.equal(found.gamma, torch.ones(10, dtype=F64))


def test_the_loop_rounds_the_last_column_first_and_feeds_back():
    """By hand: one row, two columns."""
    sigma = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=F64)
    W, alpha = torch.tensor([[0.9, 0.7]], dtype=F64), torch.ones(2, dtype=F64)
    found = ws.sic(W, sigma, alpha, lmmse=False)
    # column 1 rounds 0.7 to 1, an error of −0.3 that column 0 sees as −0.3 · L_10/L_00 = −0.15
    assert found.codes.tolist() == [[1, 1]]
    one = ws.sic(torch.tensor([[0.6, 0.7]], dtype=F64), sigma, alpha, lmmse=False)
    assert one.codes.tolist() == [[0, 1]]  # 0.45: rounding by itself would give 1


@pytest.mark.parametrize("lmmse", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 7, 64])
def test_blocks_change_nothing(lmmse, block_size):
    W, sigma = problem(30, 23)
    alpha = 0.2 + torch.rand(23, generator=g(5), dtype=F64)
    whole = ws.sic(W, sigma, alpha, lmmse=lmmse)
    part = ws.sic(W, sigma, alpha, lmmse=lmmse, block_size=block_size)
    assert torch.equal(whole.codes, part.codes)
    torch.testing.assert_close(whole.residual, part.residual, atol=1e-12, rtol=0)


def test_more_columns_than_a_block():
    W, sigma = problem(20, 150)
    L = torch.linalg.cholesky(sigma)
    alpha = torch.full((150,), 0.3, dtype=F64)
    for lmmse in (True, False):
        found = ws.sic(W, sigma, alpha, lmmse=lmmse)
        left = (W - found.codes * (alpha * found.gamma)) @ L
        torch.testing.assert_close(left, found.residual, atol=1e-10, rtol=0)


def test_a_gain_is_the_projection_and_later_columns_see_it():
    W, sigma = problem(200, 2, seed=3)
    L = torch.linalg.cholesky(sigma)
    alpha = 1.5 / L.diagonal()
    found = ws.sic(W, sigma, alpha)
    Y = W @ L
    z = (Y[:, 1] / 1.5).round()
    gain = float((z @ Y[:, 1]) / (1.5 * z @ z))
    assert float(found.gamma[1]) == pytest.approx(gain, rel=1e-12)
    left = Y[:, 0] - gain * float(alpha[1]) * z * L[1, 0]
    assert torch.equal(found.codes[:, 0], (left / 1.5).round().int())
    # orthogonal to the codes: no other gain of the column leaves less
    assert abs(float(found.residual[:, 1] @ z)) < 1e-9
    plain = ws.sic(W, sigma, alpha, lmmse=False)
    assert found.residual.square().sum() < plain.residual.square().sum()


def test_a_column_of_zero_codes_has_gain_zero():
    W, sigma = problem()
    alpha = torch.full((10,), 0.5, dtype=F64)
    alpha[4] = 1e4
    found = ws.sic(W, sigma, alpha)
    assert float(found.gamma[4]) == 0.0
    assert not bool(found.codes[:, 4].any())


def test_another_target_takes_the_place_of_the_weights():
    W, sigma = problem()
    L = torch.linalg.cholesky(sigma)
    other = W + 0.3
    alpha = 0.4 / L.diagonal()
    a, b = ws.sic(other, sigma, alpha), ws.sic(W, sigma, alpha, y0=other @ L)
    assert torch.equal(a.codes, b.codes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": torch.eye(9, dtype=F64)}, "sigma"),
        ({"sigma": -torch.eye(10, dtype=F64)}, "positive definite"),
        ({"sigma": torch.eye(10, dtype=F64) + torch.ones(10, 10).triu(1)}, "symmetric"),
        ({"alpha": torch.zeros(10)}, "alpha"),
        ({"alpha": torch.ones(9)}, "alpha"),
        ({"alpha": torch.full((10,), 1e-12)}, "alpha"),
        ({"y0": torch.zeros(3, 10)}, "y0"),
        ({"block_size": 65}, "block_size"),
        ({"backend": "cuda"}, "backend"),
        ({"backend": "triton"}, "backend"),
        ({"W": torch.full((40, 10), math.nan)}, "W"),
    ],
)
@pytest.mark.parametrize("lmmse", [True, False])
def test_the_loop_refuses(change, message, lmmse):
    W, sigma = problem()
    arguments = {"W": W, "sigma": sigma, "alpha": torch.ones(10)} | change
    with pytest.raises(ValueError, match=message):
        ws.sic(**arguments, lmmse=lmmse)


def test_few_rows_are_warned_about():
    W, sigma = problem(1, 3)
    with pytest.warns(UserWarning, match="fits the gains"):
        found = ws.sic(W, sigma, torch.full((3,), 0.2, dtype=F64))
    assert float(found.residual.abs().max()) < 1e-12  # one row: the gain makes it exact
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ws.sic(W, sigma, torch.full((3,), 0.2, dtype=F64), lmmse=False)


# --------------------------------------------------------------------------------------------
# The gaps


@pytest.mark.parametrize("kind", ws.COVARIANCES)
def test_the_gap_is_that_of_a_scalar_quantiser_for_every_covariance(kind):
    found = ws.gap_run(kind, "watersic", 3)
    assert found["gap"] == pytest.approx(ws.SCALAR_LOSS, abs=0.012)


@pytest.mark.parametrize("kind", ["toeplitz", "power"])
def test_steps_from_the_diagonal_are_worse(kind):
    """What a wrong implementation would take: the diagonal of Σ for that of L."""
    sigma, W = ws.covariance(kind, seed=3), ws.gaussian_weights(8192, 64, 3)
    L = torch.linalg.cholesky(sigma)
    alpha = 1 / sigma.diagonal().sqrt()
    alpha *= (
        math.sqrt(12) * 2**-4 * float((L.diagonal() / (alpha * L.diagonal())).log().mean().exp())
    )
    done = ws.sic(W, sigma, alpha)
    ones = torch.ones(64, dtype=F64)
    q = ws.QuantizedWeight(
        done.codes, alpha, done.gamma, W.new_ones(len(W)), torch.zeros_like(ones).bool()
    )
    assert ws.gap(q, W, sigma) > ws.SCALAR_LOSS + 0.04


def test_predicted_gaps_hold_and_grow_without_bound():
    found = ws.family_run(7, draws=5)
    assert found["gptq_error"] < 0.02
    assert abs(found["smallest"] - ws.SCALAR_LOSS) < 0.012
    for k in (2, 4):
        two = ws.two_inputs_run(5, k)
        assert two["watersic"] <= 0.27
        L = torch.diag(torch.tensor([1.0, 10 ** (-k / 2)]))
        assert two["gptq"] == pytest.approx(ws.predicted_gap(L, "gptq"), abs=0.03)
        closed = ws.SCALAR_LOSS + 0.5 * math.log2((1 + 10.0**-k) / (2 * 10 ** (-k / 2)))
        assert ws.predicted_gap(L, "gptq") == pytest.approx(closed, abs=1e-5)
    assert pytest.approx(0.2546, abs=5e-5) == ws.SCALAR_LOSS
    L = torch.linalg.cholesky(ws.covariance("toeplitz"))
    assert ws.predicted_gap(L, "watersic") == ws.SCALAR_LOSS
    rtn = ws.gap_run("toeplitz", "rtn", 2)
    assert rtn["gap"] == pytest.approx(ws.predicted_gap(L, "rtn"), abs=0.02)


def test_rates_are_unequal_by_the_logarithm_of_the_diagonal():
    sigma, W = ws.covariance("diagonal"), ws.gaussian_weights(8192, 64, 1)
    q = ws.watersic_quantize(W, sigma, rate=4, rescale=False, search=False)
    high = sigma.diagonal() > 1e-3  # the others are coded to little more than nothing
    slope = np.polyfit(0.5 * sigma.diagonal()[high].log2(), q.column_rates()[high], 1)[0]
    assert slope == pytest.approx(1, abs=0.02)
    assert q.rate("pooled", overhead=False) - q.rate(overhead=False) > 0.7
    flat = ws.gptq_quantize(W, sigma, rate=4, rescale=False, search=False).column_rates()
    assert float(flat.max() - flat.min()) < 0.1  # noise of 8192 samples


def test_predicted_gap_refuses():
    with pytest.raises(ValueError, match="method"):
        ws.predicted_gap(torch.eye(2), "awq")
    with pytest.raises(ValueError, match="L must"):
        ws.predicted_gap(-torch.eye(2), "gptq")


# --------------------------------------------------------------------------------------------
# Rescalers


def test_rescalers_descend_to_where_the_derivative_is_zero():
    W, sigma = problem(60, 8)
    A = (2 * W).round() / 2
    found = ws.optimal_rescalers(A, W, sigma, clip=(-math.inf, math.inf), tol=0.0, max_iter=200)
    assert max(np.diff(found.history)) < 1e-12
    t, scale = found.t.clone().requires_grad_(), found.g.clone().requires_grad_()
    P = W - t[:, None] * A * scale
    D = ((P @ sigma) * P).sum() / W.numel()
    assert float(D.detach()) == pytest.approx(found.history[-1], rel=1e-9)
    D.backward()
    assert float(t.grad.abs().max()) < 1e-6
    assert float(scale.grad.abs().max()) < 1e-6
    assert float(found.t.abs().mean()) == pytest.approx(1, abs=1e-12)


def test_rescalers_agree_with_a_general_optimiser():
    W, sigma = problem(6, 3, seed=4)
    A = (2 * W).round() / 2

    def D(v):
        P = W - torch.from_numpy(v[:6])[:, None] * A * torch.from_numpy(v[6:])
        return float(((P @ sigma) * P).sum()) / 18

    best = minimize(D, np.ones(9), method="BFGS", options={"gtol": 1e-10}).fun
    found = ws.optimal_rescalers(A, W, sigma, clip=(-9, 9), tol=0, max_iter=500)
    assert found.history[-1] == pytest.approx(best, rel=1e-5)
    assert found.history[0] == pytest.approx(D(np.ones(9)))


def test_rescalers_start_stop_and_clip():
    W, sigma = problem(60, 8)
    A = (2 * W).round() / 2
    A[:, 3] = 0
    A[5] = 0
    found = ws.optimal_rescalers(A, W, sigma)
    assert float(found.g[3]) == 0.0
    assert bool(torch.isfinite(found.t).all())
    tiny = ws.optimal_rescalers(1e-3 * A, W, sigma, max_iter=1)
    assert float(tiny.g.abs().max() / tiny.t.abs().mean()) > 1e-9
    clipped = ws.optimal_rescalers(1e-3 * A, W, sigma, clip=(-0.1, 1.5), max_iter=1)
    # the gains wanted are about 1000; clipped to 1.5 they leave the rest to the rows
    assert float((clipped.g / clipped.g.abs().max()).max()) == pytest.approx(1.0)
    nothing = ws.optimal_rescalers(torch.zeros_like(A), W, sigma)
    assert len(nothing.history) == 1
    one = ws.optimal_rescalers(A, W, sigma, t0=2 * torch.ones(60), g0=0.5 * torch.ones(8))
    assert one.history[0] == pytest.approx(found.history[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W": torch.ones(3, 8)}, "W must"),
        ({"sigma": torch.eye(7)}, "sigma"),
        ({"t0": torch.ones(8)}, "t0"),
        ({"g0": torch.ones(9)}, "g0"),
        ({"clip": (1.0, 1.0)}, "clip"),
    ],
)
def test_rescalers_refuse(change, message):
    W, sigma = problem(60, 8)
    with pytest.raises(ValueError, match=message):
        ws.optimal_rescalers(**({"A": W, "W": W, "sigma": sigma} | change))


# --------------------------------------------------------------------------------------------
# Quantising to a rate


@pytest.mark.parametrize("quantize", METHODS)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_entropy_is_what_was_asked_for(quantize, dtype):
    W, sigma = problem(400, 24, dtype=dtype)
    for rate in (0.8, 2.0, 4.0):
        for mode in ("per_column", "pooled"):
            q = quantize(W, sigma, rate=rate, rate_mode=mode)
            assert q.rate(mode, overhead=False) == pytest.approx(rate, abs=0.03)


def test_the_search_keeps_its_best_evaluation():
    seen = []

    def steps(R):
        seen.append(R)
        return math.floor(4 * R) / 4  # nothing is within 0.005 of 1.13

    found = ws.search_rate(steps, 1.13)
    assert found.evaluations == len(seen) == 6
    assert found.entropy in (1.0, 1.25)
    assert abs(found.entropy - 1.13) == min(abs(steps(R) - 1.13) for R in seen[:6])
    linear = ws.search_rate(lambda R: R + 0.2546, 3.0)
    assert linear.evaluations == 2
    assert pytest.approx(3 - 0.2546) == linear.R
    flat = ws.search_rate(lambda R: 5.0, 100.0)
    assert abs(flat.R) <= 100


def test_at_one_entropy_the_order_is_that_of_the_theory():
    sigma, W = ws.covariance("power"), ws.gaussian_weights(2048, 64, 0)
    made = [quantize(W, sigma, rate=2.5) for quantize in METHODS]
    errors = [q.distortion(W, sigma) for q in made]
    assert errors[0] < 0.95 * errors[1] < errors[1] < errors[2]


def test_gains_inside_the_loop_and_rescalers_pay_at_low_rate():
    found = ws.low_rate_run(4)
    assert found["inside"] < found["after"] - 0.08
    assert found["after"] < found["plain"]
    assert found["rise"] <= 0
    assert found["last"] < 1


def test_the_search_may_look_at_a_tenth_of_the_rows():
    sigma, W = ws.covariance("toeplitz", 16), ws.gaussian_weights(4096, 16, 0)
    one, two = (ws.watersic_quantize(W, sigma, rate=2.0, seed=s) for s in (0, 0))
    assert torch.equal(one.codes, two.codes)
    assert one.rate(overhead=False) == pytest.approx(2.0, abs=0.03)
    assert ws.watersic_quantize(W, sigma, rate=2.0, seed=1).alpha[0] != one.alpha[0]


@pytest.mark.parametrize("quantize", METHODS)
def test_dead_inputs_cost_nothing_and_decode_to_zero(quantize):
    X = torch.randn(500, 12, generator=g(), dtype=F64)
    X[:, [2, 7]] = 0
    X[:, 5] *= 1e-4
    made = ws.activation_covariance(X)
    assert made.dead_mask.nonzero().flatten().tolist() == [2, 5, 7]
    W = torch.randn(300, 12, generator=g(1), dtype=F64)
    q = quantize(W, made, rate=2.0)
    assert not bool(q.codes[:, [2, 5, 7]].any())
    assert not bool(q.dequantize()[:, [2, 5, 7]].any())
    assert q.rate(overhead=False) == pytest.approx(2.0, abs=0.03)
    live = ~made.dead_mask
    whole = quantize(W, made, rate=2.0, search=False)
    alone = quantize(W[:, live], made.sigma[live][:, live], rate=2.0 * 12 / 9, search=False)
    assert torch.equal(whole.codes[:, live], alone.codes)
    torch.testing.assert_close(whole.dequantize()[:, live], alone.dequantize())
    by_hand = quantize(W, made.sigma, rate=2.0, dead=made.dead_mask)
    assert torch.equal(by_hand.codes, q.codes)
    everything = quantize(W, made.sigma, rate=2.0, dead=torch.ones(12, dtype=torch.bool))
    assert everything.rate(overhead=False) == 0.0
    assert not bool(everything.dequantize().any())


def test_the_median_decides_what_is_dead():
    X = torch.randn(400, 9, generator=g(), dtype=F64)
    X[:, 0] *= 1e4  # a mean would call every other input dead
    assert not bool(ws.activation_covariance(X).dead_mask.any())


@pytest.mark.parametrize("quantize", METHODS)
def test_zero_weights_and_one_column(quantize):
    sigma = torch.tensor([[2.0]], dtype=F64)
    W = torch.randn(500, 1, generator=g(), dtype=F64)
    q = quantize(W, sigma, rate=3.0)
    assert q.rate(overhead=False) == pytest.approx(3.0, abs=0.03)
    zero = quantize(torch.zeros(50, 4), torch.eye(4), rate=3.0)
    assert zero.rate(overhead=False) == 0.0
    assert zero.distortion(torch.zeros(50, 4), torch.eye(4)) == 0.0
    W = torch.randn(200, 4, generator=g(2), dtype=F64)
    W[:, 1] = 0
    some = quantize(W, torch.eye(4), rate=2.0)
    assert not bool(some.codes[:, 1].any())
    assert some.rate(overhead=False) == pytest.approx(2.0, abs=0.03)


@pytest.mark.parametrize("quantize", METHODS[:2])
def test_without_drift_the_drift_target_changes_nothing(quantize):
    W, sigma = problem(100, 9)
    plain = quantize(W, sigma, rate=2.0)
    same = quantize(W, sigma, rate=2.0, sigma_cross=sigma)
    assert torch.equal(plain.codes, same.codes)
    torch.testing.assert_close(plain.dequantize(), same.dequantize(), atol=1e-9, rtol=0)
    # with a damped covariance the damping enters the target too
    X = torch.randn(60, 9, generator=g(8), dtype=F64)
    made = ws.activation_covariance(X, damping=0.1)
    cross = X.T @ X / 60
    a, b = quantize(W, made, rate=2.0), quantize(W, made, rate=2.0, sigma_cross=cross)
    assert torch.equal(a.codes, b.codes)


def test_the_drift_target_minimises_the_error_against_the_true_outputs():
    W = torch.randn(64, 6, generator=g(), dtype=F64)
    X = torch.randn(4000, 6, generator=g(1), dtype=F64)
    M = torch.eye(6, dtype=F64) + 0.4 * torch.randn(6, 6, generator=g(2), dtype=F64)
    X_hat = X @ M.T
    sigma = X_hat.T @ X_hat / 4000
    cross = X.T @ X_hat / 4000

    def error(q):
        return float((X @ W.T - X_hat @ q.dequantize().T).square().mean())

    fine = ws.watersic_quantize(W, sigma, rate=9.0, sigma_cross=cross)
    torch.testing.assert_close(
        fine.dequantize(), W @ torch.linalg.inv(M), atol=0.02, rtol=0
    )  # the layer undoes the drift
    with_drift = ws.watersic_quantize(W, sigma, rate=3.0, sigma_cross=cross)
    without = ws.watersic_quantize(W, sigma, rate=3.0)
    assert error(with_drift) < 0.2 * error(without)
    # a residual stream that is off by R: the layer may make up for it
    R = 0.5 * torch.randn(64, 6, generator=g(3), dtype=F64)
    extra = R @ X.T @ X_hat / 4000
    both = ws.watersic_quantize(W, sigma, rate=9.0, sigma_cross=cross, residual_cross=extra)
    torch.testing.assert_close(both.dequantize(), (W + R) @ torch.linalg.inv(M), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": torch.eye(9)}, "sigma"),
        ({"sigma": None}, "sigma"),
        ({"rate": 0.0}, "rate"),
        ({"rate": math.inf}, "rate"),
        ({"rate_mode": "rows"}, "rate_mode"),
        ({"dead": torch.zeros(9, dtype=torch.bool)}, "dead"),
        ({"dead": torch.zeros(10)}, "dead"),
        ({"sigma_cross": torch.eye(9)}, "sigma_cross"),
        ({"residual_cross": torch.ones(40, 10)}, "residual_cross"),
        ({"sigma_cross": torch.eye(10), "residual_cross": torch.ones(10, 10)}, "residual_cross"),
        ({"W": torch.full((40, 10), math.inf)}, "W"),
        ({"sigma": torch.zeros(10, 10)}, "positive definite"),
        ({"rate": 60.0, "search": False}, "int32"),
    ],
)
@pytest.mark.parametrize("quantize", METHODS)
def test_quantisers_refuse(quantize, change, message):
    W, sigma = problem()
    if quantize is ws.rtn_quantize and message == "int32":
        change = {"rate": 60.0, "search": False, "lmmse": False}
    with pytest.raises(ValueError, match=message):
        quantize(**({"W": W, "sigma": sigma, "rate": 2.0} | change))


# --------------------------------------------------------------------------------------------
# Storage


@pytest.mark.parametrize("mode", ["per_column", "pooled"])
@pytest.mark.parametrize("rescale", [True, False])
def test_bytes_come_back_as_the_same_weight(mode, rescale):
    W, sigma = problem(100, 9)
    dead = torch.zeros(9, dtype=torch.bool)
    dead[4] = True
    q = ws.watersic_quantize(W[:, :9], sigma[:9, :9], rate=2.0, rescale=rescale, dead=dead)
    back = ws.QuantizedWeight.decode(q.encode(mode))
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.dead, q.dead)
    assert torch.equal(back.dequantize(), q.dequantize())
    assert back.rate() == q.rate()
    half = ws.QuantizedWeight.decode(q.encode(mode, scale_dtype=torch.float16))
    torch.testing.assert_close(half.dequantize(), q.dequantize(), atol=5e-3, rtol=2e-3)


def test_huffman_spends_less_than_a_bit_above_the_entropy():
    sigma, W = ws.covariance("toeplitz", 8), ws.gaussian_weights(20_000, 8, 0)
    q = ws.watersic_quantize(W, sigma, rate=3.0)
    plain = q.rate(overhead=False, miller_madow=False)
    for mode in ("per_column", "pooled"):
        spent = 8 * len(q.encode(mode, scale_dtype=torch.float16)) / W.numel()
        entropy = q.rate(mode, overhead=False, miller_madow=False)
        assert entropy < spent < entropy + 1 + 16 / 8
    table = sum(4 + 9 * len(q.codes[:, i].unique()) + 4 for i in range(8))
    exact = len(q.encode(scale_dtype=torch.float16)) - table - 16 - 1 - 2 * 8 - 2 * 20_000
    assert plain <= 8 * exact / W.numel() < plain + 0.1


def test_overhead_is_counted():
    W, sigma = problem(100, 9)
    sigma = sigma[:9, :9]
    q = ws.watersic_quantize(W[:, :9], sigma, rate=2.0)
    assert q.rate() - q.rate(overhead=False) == pytest.approx(16 / 100 + 16 / 9)
    q = ws.watersic_quantize(W[:, :9], sigma, rate=2.0, rescale=False)
    assert q.rate() - q.rate(overhead=False) == pytest.approx(16 / 100)
    dead = torch.zeros(9, dtype=torch.bool)
    dead[0] = True
    q = ws.watersic_quantize(W[:, :9], sigma, rate=2.0, rescale=False, dead=dead)
    assert q.rate() - q.rate(overhead=False) == pytest.approx(16 * 8 / 900 + 1 / 100)


def test_spoilt_bytes_are_refused():
    W, sigma = problem(30, 4)
    data = ws.watersic_quantize(W[:, :4], sigma[:4, :4], rate=2.0).encode()
    for end in (0, 3, 10, 16, 40, len(data) - 1):
        with pytest.raises(ValueError, match="data"):
            ws.QuantizedWeight.decode(data[:end])
    with pytest.raises(ValueError, match="version 1"):
        ws.QuantizedWeight.decode(b"x" + data[1:])
    q = ws.QuantizedWeight.decode(data)
    with pytest.raises(ValueError, match="mode"):
        q.encode("rows")
    with pytest.raises(ValueError, match="mode"):
        q.rate("rows")
    with pytest.raises(ValueError, match="scale_dtype"):
        q.encode(scale_dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_the_layer_computes_with_the_codes(dtype):
    W, sigma = problem(40, 10)
    q = ws.watersic_quantize(W, sigma, rate=3.0)
    bias = torch.randn(40, generator=g(4))
    layer = q.to_linear(bias.to(dtype))
    x = torch.randn(2, 3, 10, generator=g(5)).to(dtype)
    wanted = x.double() @ q.dequantize().T + bias.to(dtype).double()
    rtol = {torch.float16: 2e-3, torch.bfloat16: 2e-2, F32: 1e-5, F64: 1e-6}[dtype]
    torch.testing.assert_close(layer(x).double(), wanted, atol=2 * rtol, rtol=rtol)
    assert layer(x).dtype == dtype
    assert layer.codes.dtype == torch.int8
    again = q.to_linear(bias)
    again.load_state_dict(layer.state_dict())
    wide = ws.watersic_quantize(W, sigma, rate=9.0).to_linear()
    assert wide.code_dtype == torch.int16
    assert wide(x[0]).shape == (3, 40)


# --------------------------------------------------------------------------------------------
# Networks


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 5)
        )


def test_a_network_is_quantised_within_its_budget():
    model, X = network(), torch.randn(400, 20, generator=g())
    before = [p.clone() for p in model.parameters()]
    found = ws.quantize_model(model, X, rate=2.5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert list(found.weights) == [0, 2]
    assert isinstance(found.model[4], nn.Linear)
    assert found.rate == pytest.approx(2.5, abs=0.02)
    spent = {i: q.rate(overhead=False) * q.codes.numel() for i, q in found.weights.items()}
    assert sum(spent.values()) == pytest.approx(found.rate * (20 * 64 + 64 * 48))
    more = ws.quantize_model(model, X, rate=2.5, multipliers={0: 1.5})
    ratio = more.weights[0].rate(overhead=False) / more.weights[2].rate(overhead=False)
    assert ratio == pytest.approx(1.5, abs=0.05)
    assert more.rate == pytest.approx(2.5, abs=0.02)


def test_the_budget_left_pays_for_the_layers_left():
    """A layer that spends too little leaves its bits to the next."""
    model, X = network(), torch.randn(400, 20, generator=g())
    with torch.no_grad():
        model[0].weight.mul_(0)  # nothing to code in the first layer
    found = ws.quantize_model(model, X, rate=1.0, sequential=False)
    assert found.weights[0].rate(overhead=False) == 0.0
    # hidden units without variance are dead, the others share what is left
    assert found.weights[2].rate(overhead=False) >= 1.0


def test_layers_errors_are_those_of_their_outputs():
    model, X = network(), torch.randn(400, 20, generator=g())
    found = ws.quantize_model(model, X, rate=2.0, sequential=False)
    x = X.double()
    y, y_hat = x @ model[0].weight.detach().double().T, x @ found.weights[0].dequantize().T
    wanted = float((y - y_hat).square().sum() / y.square().sum())
    assert found.errors[0] == pytest.approx(wanted)
    with_drift = ws.quantize_model(model, X, rate=1.0)
    without = ws.quantize_model(model, X, rate=1.0, drift=False)
    assert torch.equal(with_drift.weights[0].codes, without.weights[0].codes)
    assert with_drift.errors[2] < without.errors[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "awq"}, "method"),
        ({"layers": [1]}, "layers"),
        ({"layers": []}, "layers"),
        ({"multipliers": {0: 0.0}}, "multipliers"),
        ({"multipliers": {4: 1.0}}, "multipliers"),
        ({"model": nn.Linear(20, 20)}, "model"),
        ({"rate": math.nan}, "rate"),
    ],
)
def test_quantize_model_refuses(change, message):
    arguments = {"model": network(), "calib": torch.randn(50, 20, generator=g()), "rate": 2.0}
    with pytest.raises(ValueError, match=message):
        ws.quantize_model(**(arguments | change))


def test_fixed_width_codes_stay_within_their_levels():
    W, sigma = problem(50, 10)
    found = gptq_fixed(W, sigma, 3)
    assert int(found.codes.min()) >= 0
    assert int(found.codes.max()) <= 7


def test_studies_are_deterministic_and_named():
    assert len(set(ws.RUNS)) == len(ws.RUNS)
    one, two = (ws.study_run(run="watersic 1.5 0") for _ in range(2))
    assert one == two
    assert one["rate"] == pytest.approx(1.5, abs=0.03)
    assert set(ws.study_run(run="drift-gptq 1 0")) == {"with", "without", "ratio"}
    with pytest.raises(ValueError, match="kind"):
        ws.covariance("wishart")
    assert isinstance(ws.activation_covariance(torch.randn(9, 3)), Covariance)


@pytest.mark.parametrize("kind", ws.COVARIANCES)
def test_covariances_are_what_they_are_called(kind):
    sigma = ws.covariance(kind, 12, 1)
    lam = torch.linalg.eigvalsh(sigma)
    assert torch.equal(sigma, sigma.T)
    assert float(lam.min()) > 0
    if kind == "power":
        wanted = torch.arange(12, 0, -1, dtype=F64) ** -1.5
        torch.testing.assert_close(lam, wanted, atol=1e-12, rtol=1e-9)
    if kind == "diagonal":
        assert float(lam.max() / lam.min()) == pytest.approx(1e4)


# --------------------------------------------------------------------------------------------
# Kernels


def test_the_matrix_product_runs_on_tensor_cores():
    from icmllab.kernels.aot import compile_program

    wanted = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "TCGEN05|UTCHMMA|HMMA|UTC"}
    import re

    for target, instruction in wanted.items():
        for form in ("fp16 prefill", "bf16 prefill"):
            assembly = compile_program("dequant_matmul", form, target).assembly
            assert re.search(instruction, assembly), (target, form)
    # codes come by asynchronous copies of 128 bits, which go past the registers
    decode = compile_program("dequant_matmul", "fp16 decode", "sm_90").assembly
    assert re.search(r"LDGSTS\.E\.BYPASS\.128", decode)


def test_rows_first_differ_only_at_a_tie():
    """In float32 a code may flip where Y/c is close to a half; then the rest of its row does."""
    g0 = g(11)
    Y = 50 * torch.randn(400, 64, generator=g0)
    L = torch.randn(64, 64, generator=g0).tril(-1) / 8 + torch.eye(64)
    alpha = torch.full((64,), 0.5)
    single = ws.sic_block(Y, L, alpha)
    double = ws.sic_block(Y.double(), L.double(), alpha.double())
    differ = single.codes != double.codes
    rows = differ.any(dim=1).nonzero().flatten()
    q = double.scaled
    for r in rows.tolist():
        j = int(differ[r].nonzero().max())  # the first in processing order
        u = (Y[r, j].double() - q[r, j + 1 :] @ L[j + 1 :, j].double()) / (0.5 * L[j, j])
        assert abs(float(u - u.floor()) - 0.5) < 1e-4
    D = [float(b.residual.double().square().mean()) for b in (single, double)]
    assert D[0] == pytest.approx(D[1], rel=1e-3)
