"""Contrastive losses against closed forms and plain loops."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icmllab.kernels.triplet_loss import incidences, triplet_loss_fwd_bwd
from icmllab.toolbox.contrastive import (
    check_triplets,
    info_nce,
    triplet_accuracy,
    triplet_distances,
    triplet_loss,
)


def _views(seed, batch=6, dim=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, dim, generator=g, dtype=torch.float64).to(dtype) for _ in range(2)]


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_info_nce_is_the_mean_of_both_directions_of_a_plain_loop(dtype, tol):
    za, zb = _views(0, dtype=dtype)
    total = 0.0
    for x, y in ((za.double(), zb.double()), (zb.double(), za.double())):
        for i in range(len(x)):
            cosines = [float(x[i] @ row / x[i].norm() / row.norm()) / 0.3 for row in y]
            total += math.log(sum(math.exp(c) for c in cosines)) - cosines[i]
    assert float(info_nce(za, zb, temperature=0.3)) == pytest.approx(total / 12, abs=tol)


def test_info_nce_of_equal_rows_is_the_logarithm_of_the_batch():
    z = torch.ones(9, 3, dtype=torch.float64)
    assert float(info_nce(z, 5 * z, temperature=0.07)) == pytest.approx(math.log(9))


def test_info_nce_ignores_the_length_of_rows_and_a_common_rotation():
    za, zb = _views(1)
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    lengths = torch.rand(6, 1, dtype=torch.float64) + 0.5
    assert float(info_nce(za, zb)) == pytest.approx(
        float(info_nce(za @ rotation * lengths, zb @ rotation))
    )


def test_info_nce_of_orthogonal_pairs_has_its_closed_form():
    z = torch.eye(5, dtype=torch.float64)
    assert float(info_nce(z, z, temperature=1.0)) == pytest.approx(math.log(1 + 4 * math.exp(-1)))


def test_info_nce_passes_the_gradient_check():
    za, zb = (z.requires_grad_() for z in _views(2))
    assert torch.autograd.gradcheck(lambda a, b: info_nce(a, b, temperature=0.5), (za, zb))


@pytest.mark.parametrize(
    ("za", "zb", "temperature", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 5), 0.1, "one shape"),
        (torch.zeros(1, 4), torch.zeros(1, 4), 0.1, "batch >= 2"),
        (torch.zeros(3, 4), torch.zeros(3, 4), 0.0, "temperature"),
        (torch.zeros(3, 4), torch.zeros(3, 4), float("nan"), "temperature"),
    ],
)
def test_bad_input_is_named(za, zb, temperature, message):
    with pytest.raises(ValueError, match=message):
        info_nce(za, zb, temperature=temperature)


# Triplets


def random_triplets(n, m, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(n, generator=g)[:3] for _ in range(m)])


@settings(max_examples=30, deadline=None)
@given(n=st.integers(3, 12), d=st.integers(1, 4), m=st.integers(1, 40), seed=st.integers(0, 999))
def test_accuracy_counts_each_triplet_by_hand_and_exactly_on_whole_numbers(n, d, m, seed):
    g = torch.Generator().manual_seed(seed)
    X = torch.randint(-2, 3, (n, d), generator=g)
    triplets = random_triplets(n, m, seed)
    count = Fraction(0)
    for i, j, k in triplets.tolist():
        near, far = (sum((a - b) ** 2 for a, b in zip(X[i], X[o], strict=True)) for o in (j, k))
        count += Fraction(1) if near < far else Fraction(1, 2) if near == far else 0
    assert triplet_accuracy(X, triplets) == float(count / m)


def test_whole_numbers_beyond_the_mantissa_are_still_compared_exactly():
    X = torch.tensor([[0], [2**30], [2**30 + 1]])
    assert triplet_accuracy(X, [[0, 1, 2]]) == 1.0
    assert triplet_accuracy(X.float(), [[0, 1, 2]]) == 0.5  # float32 sees a tie


def test_a_constant_embedding_gets_what_ties_count():
    X, triplets = torch.ones(6, 3), random_triplets(6, 20)
    assert triplet_accuracy(X, triplets) == 0.5
    assert triplet_accuracy(X, triplets, ties=0.0) == 0.0
    assert triplet_accuracy(X, triplets, 1.0) == 1.0


def test_exchanging_near_and_far_turns_accuracy_over_and_motion_changes_nothing():
    g = torch.Generator().manual_seed(3)
    X = torch.randn(20, 3, generator=g, dtype=torch.float64)
    triplets = random_triplets(20, 200)
    there = triplet_accuracy(X, triplets)
    assert triplet_accuracy(X, triplets[:, [0, 2, 1]]) == pytest.approx(1 - there, abs=1e-15)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=g, dtype=torch.float64)).Q
    assert triplet_accuracy(3 * X @ turn + 5, triplets) == there


def test_loss_of_a_constant_embedding_is_log_2_and_large_scale_counts_errors():
    triplets = random_triplets(8, 50)
    X = torch.ones(8, 2, dtype=torch.float64)
    assert float(triplet_loss(X, triplets)) == pytest.approx(math.log(2), abs=1e-15)
    X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near, far = triplet_distances(X, triplets)
    hinge = (near - far).clamp(min=0).mean()
    assert float(triplet_loss(X, triplets, scale=1e6)) / 1e6 == pytest.approx(float(hinge))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_are_those_of_plain_autograd(dtype):
    g = torch.Generator().manual_seed(1)
    X = torch.randn(15, 4, generator=g, dtype=dtype, requires_grad=True)
    i, j, k = (triplets := random_triplets(15, 80)).unbind(1)
    z = 2.0 * ((X[i] - X[j]).square().sum(1) - (X[i] - X[k]).square().sum(1))
    wanted = torch.nn.functional.softplus(z).mean()
    (wanted_grad,) = torch.autograd.grad(3 * wanted, X)
    got = triplet_loss(X, triplets, scale=2.0)
    assert got.dtype == dtype
    (grad,) = torch.autograd.grad(3 * got, X)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(grad, wanted_grad)


def test_descending_the_loss_raises_the_accuracy():
    g = torch.Generator().manual_seed(2)
    P = torch.randn(30, 3, generator=g)
    near, far = triplet_distances(P, triplets := random_triplets(30, 600))
    triplets = torch.where((near < far)[:, None], triplets, triplets[:, [0, 2, 1]])
    X = torch.randn(30, 3, generator=g, requires_grad=True)
    before = triplet_accuracy(X, triplets)
    optimizer = torch.optim.Adam([X], lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        triplet_loss(X, triplets, scale=3.0).backward()
        optimizer.step()
    assert before < 0.6
    assert triplet_accuracy(X, triplets) > 0.9


def test_fused_step_returns_loss_hits_and_gradient_of_one_pass():
    g = torch.Generator().manual_seed(4)
    X = torch.randn(9, 3, generator=g, dtype=torch.float64)
    triplets = random_triplets(9, 40)
    step = triplet_loss_fwd_bwd(X, triplets, scale=1.5)
    assert float(step.loss) == float(triplet_loss(X, triplets, scale=1.5))
    assert float(step.hits) / 40 == triplet_accuracy(X, triplets)
    assert torch.autograd.gradcheck(
        lambda x: triplet_loss(x, triplets, scale=1.5), (X.requires_grad_(),)
    )
    torch.testing.assert_close(step.grad.sum(dim=0), torch.zeros(3, dtype=torch.float64))
    alone = triplet_loss_fwd_bwd(X, triplets, scale=1.5, gradient=False)
    assert alone.grad is None
    assert torch.equal(alone.loss, step.loss)


def test_a_second_derivative_is_refused_and_not_wrong():
    X = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    loss = triplet_loss(X, torch.tensor([[0, 1, 2]]))
    (grad,) = torch.autograd.grad(loss, X, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


def test_incidences_list_the_triplets_of_each_point_in_order():
    triplets = random_triplets(6, 20, seed=5)
    lists = incidences(triplets, 8)
    assert lists.starts[[0, -1]].tolist() == [0, 60]
    for point in range(8):
        wanted = [3 * t + r for t in range(20) for r in range(3) if int(triplets[t, r]) == point]
        assert lists.codes[lists.starts[point] : lists.starts[point + 1]].tolist() == wanted
    X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    ready = triplet_loss_fwd_bwd(X, triplets, deterministic=True, lists=lists)
    assert torch.equal(ready.grad, triplet_loss_fwd_bwd(X, triplets).grad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: triplet_accuracy(torch.zeros(3), [[0, 1, 2]]), r"X must have shape"),
        (lambda: triplet_accuracy(torch.zeros(3, 0), [[0, 1, 2]]), r"X must have shape"),
        (lambda: triplet_accuracy(torch.full((3, 1), math.nan), [[0, 1, 2]]), "X must be finite"),
        (lambda: triplet_accuracy(torch.zeros(3, 1), [[0, 1, 2]], ties=2), "ties must be in"),
        (lambda: check_triplets([], 3), r"triplets must have shape \(m, 3\) with m >= 1"),
        (lambda: check_triplets([[0, 1]], 3), r"triplets must have shape"),
        (lambda: check_triplets([[0.0, 1.0, 2.0]], 3), "whole numbers"),
        (lambda: check_triplets([[0, 1, 3]], 3), r"points in 0\.\.2: got 3"),
        (lambda: check_triplets([[0, -1, 2]], 3), r"points in 0\.\.2: got -1"),
        (lambda: check_triplets([[0, 1, 2], [1, 2, 2]], 3), r"row 1 is \[1, 2, 2\]"),
        (lambda: check_triplets([[1, 1, 2]], 3), r"three different points"),
        (lambda: check_triplets([[2, 1, 2]], 3), r"three different points"),
        (lambda: triplet_loss(torch.zeros(3, 1), torch.tensor([[0, 1, 3]])), "triplets must hold"),
    ],
)
def test_bad_triplets_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
