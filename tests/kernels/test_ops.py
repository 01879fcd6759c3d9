"""The public ops on the CPU: identities, invariances, other libraries, edge values."""

from itertools import permutations as all_permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icmllab.kernels.adamw_power_step import adamw_power_step, reference, sign_power_eager
from icmllab.kernels.perm_bilinear import perm_bilinear
from icmllab.kernels.perm_knn_overlap import perm_knn_overlap

OPTIONS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def permutations(n: int, count: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(n, generator=g) for _ in range(count)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 4, 257])
def test_perm_bilinear_is_a_trace_with_permutation_matrices(n, dtype):
    g = torch.Generator().manual_seed(n)
    K, L = (torch.randn(n, n, generator=g, dtype=dtype) for _ in range(2))
    perms = permutations(n, 3)
    eye = np.eye(n)
    wanted = [
        np.trace(K.double().numpy().T @ eye[p] @ L.double().numpy() @ eye[p].T)
        for p in perms.numpy()
    ]
    np.testing.assert_allclose(perm_bilinear(K, L, perms).numpy(), wanted, atol=1e-13 * n * n)


def test_mean_over_all_permutations_is_that_of_the_traces_and_the_rest():
    n = 6
    K, L = torch.randn(2, n, n, dtype=torch.float64)
    perms = torch.tensor(list(all_permutations(range(n))))
    (k, l), (k_rest, l_rest) = ([m.trace() for m in (K, L)], [m.sum() - m.trace() for m in (K, L)])
    wanted = k * l / n + k_rest * l_rest / (n * (n - 1))
    torch.testing.assert_close(perm_bilinear(K, L, perms).mean(), wanted, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 70), count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_permuting_one_matrix_is_permuting_the_other_back(n, count, seed):
    g = torch.Generator().manual_seed(seed)
    K, L = (torch.randn(n, n, generator=g, dtype=torch.float64) for _ in range(2))
    perms = permutations(n, count, seed)
    there = perm_bilinear(K, L, perms)
    torch.testing.assert_close(there, perm_bilinear(L, K, torch.argsort(perms, dim=1)))


def test_many_permutations_in_pieces_are_the_same_as_one_by_one():
    K, L = torch.randn(2, 40, 40)
    perms = permutations(40, 1000)
    single = torch.cat([perm_bilinear(K, L, p[None]) for p in perms])
    torch.testing.assert_close(perm_bilinear(K, L, perms), single, rtol=1e-12, atol=1e-12)


def test_strides_and_index_types_change_nothing():
    K, L = torch.randn(2, 33, 33)
    perms = permutations(33, 3)
    wanted = perm_bilinear(K, L, perms)
    wide = torch.randn(33, 99)
    wide[:, ::3] = K
    assert torch.equal(perm_bilinear(wide[:, ::3], L, perms), wanted)
    assert torch.equal(perm_bilinear(K, L.T.contiguous().T, perms.int()), wanted)


def test_identity_permutation_gives_the_inner_product_and_one_permutation_on_both_changes_nothing():
    K, L = torch.randn(2, 50, 50, dtype=torch.float64)
    same = perm_bilinear(K, L, torch.arange(50)[None])
    torch.testing.assert_close(same[0], (K * L).sum())
    (perm,) = permutations(50, 1)
    both = perm_bilinear(K[perm][:, perm], L, perm[None])
    torch.testing.assert_close(both[0], (K * L).sum())


def test_float32_matrices_are_summed_in_float64():
    n = 1024
    K = torch.full((n, n), 1.0)
    K[0, 0] = 2.0**25  # adding ones to this in float32 loses them
    out = perm_bilinear(K, torch.ones(n, n), torch.arange(n)[None])
    assert out.item() == 2.0**25 + n * n - 1


def test_no_permutation_gives_an_empty_result():
    none = torch.empty(0, 5, dtype=torch.int64)
    assert perm_bilinear(torch.eye(5), torch.eye(5), none).shape == (0,)
    lists = torch.zeros(5, 1, dtype=torch.int64)
    assert perm_knn_overlap(lists, lists, none).shape == (0,)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 30), k=st.integers(1, 6), seed=st.integers(0, 1000))
def test_knn_overlap_is_the_bilinear_form_of_the_masks(n, k, seed):
    k = min(k, n)
    rng = np.random.default_rng(seed)
    lists = [np.stack([rng.permutation(n)[:k] for _ in range(n)]) for _ in range(2)]
    masks = [torch.zeros(n, n, dtype=torch.float64) for _ in range(2)]
    for mask, index in zip(masks, lists, strict=True):
        mask.scatter_(1, torch.from_numpy(index), 1.0)
    perms = permutations(n, 4, seed)
    counts = perm_knn_overlap(*map(torch.from_numpy, lists), perms)
    assert counts.tolist() == perm_bilinear(*masks, perms).long().tolist()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_power_one_is_adamw_of_torch(dtype, maximize):
    start = torch.randn(7, 5, dtype=dtype)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW(
        [theirs], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, maximize=maximize
    )
    ours, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, 51):
        grad = torch.randn(7, 5, dtype=dtype)
        theirs.grad = grad.clone()
        optimizer.step()
        adamw_power_step([ours], [grad], [m], [v], step=step, p=1.0, maximize=maximize, **OPTIONS)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(ours, theirs.data, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.2, 2.0])
@pytest.mark.parametrize("maximize", [False, True])
def test_the_op_agrees_with_its_reference_over_several_tensors(p, maximize):
    shapes = [(3, 4), (1,), (1025,), ()]
    extra = {"step": 7, "p": p, "maximize": maximize, "grad_scale": 0.5, "clip_scale": 0.3}
    made = [[torch.randn(s, dtype=torch.float64) for s in shapes] for _ in range(3)]
    params, grads, first = made
    second = [torch.rand(s, dtype=torch.float64) for s in shapes]
    wanted = [
        reference(*four, **OPTIONS, **extra)
        for four in zip(params, grads, first, second, strict=True)
    ]
    kept = [g.clone() for g in grads]
    adamw_power_step(params, grads, first, second, **OPTIONS, **extra)
    for i, step in enumerate(wanted):
        torch.testing.assert_close(params[i], step.param, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(first[i], step.exp_avg, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(second[i], step.exp_avg_sq, rtol=1e-12, atol=1e-14)
        assert torch.equal(grads[i], kept[i])


def test_100_float32_steps_drift_less_than_1e_minus_5():
    g = torch.Generator().manual_seed(0)
    x32 = torch.randn(1000, generator=g)
    m32, v32 = torch.zeros(1000), torch.zeros(1000)
    x64, m64, v64 = x32.double(), m32.double(), v32.double()
    for step in range(1, 101):
        grad = torch.randn(1000, generator=g) * 1e-3
        adamw_power_step([x32], [grad], [m32], [v32], step=step, p=1.2, **OPTIONS)
        done = reference(x64, grad.double(), m64, v64, step=step, p=1.2, **OPTIONS)
        x64, m64, v64 = done
    assert ((x32 - x64).abs().max() / x64.abs().max()).item() < 1e-5


def test_bfloat16_parameters_keep_float32_state():
    x = torch.randn(100, dtype=torch.bfloat16)
    grad, m, v = torch.randn(100).bfloat16(), torch.zeros(100), torch.zeros(100)
    truth = reference(x.double(), grad.double(), m.double(), v.double(), step=1, p=1.2, **OPTIONS)
    adamw_power_step([x], [grad], [m], [v], step=1, p=1.2, **OPTIONS)
    assert (x.dtype, m.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(m.double(), truth.exp_avg, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(x.double(), truth.param, rtol=1e-2, atol=1e-3)


def test_edge_gradients_zero_denormal_and_inf():
    grad = torch.tensor([0.0, -0.0, 1e-40, float("inf"), float("nan")])
    x, m, v = torch.ones(5), torch.zeros(5), torch.zeros(5)
    adamw_power_step([x], [grad], [m], [v], step=1, p=1.2, **{**OPTIONS, "weight_decay": 0.0})
    assert x[:2].tolist() == [1.0, 1.0]
    assert torch.isfinite(x[2])
    assert torch.isinf(m[3])
    assert torch.isnan(x[4])


def test_skip_nonfinite_leaves_every_tensor_as_it_was():
    tensors = [torch.ones(3), torch.ones(2)]
    state = [torch.zeros(3), torch.zeros(2)]
    grads = [torch.ones(3), torch.tensor([1.0, float("inf")])]
    adamw_power_step(
        tensors,
        grads,
        state,
        [s.clone() for s in state],
        step=1,
        p=1.2,
        skip_nonfinite=True,
        **OPTIONS,
    )
    assert all((t == 1).all() for t in tensors)
    assert all((s == 0).all() for s in state)


def test_skip_looks_at_every_gradient_and_finite_ones_pass():
    for bad in (None, float("inf"), float("-inf"), float("nan")):
        grads = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.tensor(1.0)]
        if bad is not None:
            grads[1][0] = bad
        lists = [[torch.zeros(g.shape) for g in grads] for _ in range(3)]
        adamw_power_step(
            lists[0], grads, lists[1], lists[2], step=1, p=1.2, skip_nonfinite=True, **OPTIONS
        )
        assert all(bool((t != 0).all()) == (bad is None) for tensors in lists for t in tensors)


def test_step_works_on_leaves_that_require_gradients_and_leaves_no_graph():
    param = torch.nn.Parameter(torch.ones(3))
    (param**2).sum().backward()
    state = [[torch.zeros(3)], [torch.zeros(3)]]
    adamw_power_step([param], [param.grad], *state, step=1, p=1.2, **OPTIONS)
    assert param.requires_grad
    assert param.is_leaf
    assert bool((param < 1).all())


def test_nothing_to_do_is_no_error():
    adamw_power_step([], [], [], [], step=1, p=1.2, skip_nonfinite=True, **OPTIONS)
    empty = [[torch.zeros(0, 3)] for _ in range(4)]
    adamw_power_step(*empty, step=1, p=1.2, skip_nonfinite=True, **OPTIONS)


@pytest.mark.parametrize("p", [0.5, 1.2, 2.0])
def test_unscaling_comes_before_the_power(p):
    # a power of two, so that scaling is exact
    start, grad = torch.randn(2, 100, dtype=torch.float64)
    plain, scaled = (
        [[start.clone()], [grad * s], [torch.zeros_like(grad)], [torch.zeros_like(grad)]]
        for s in (1.0, 1024.0)
    )
    adamw_power_step(*plain, step=1, p=p, **OPTIONS)
    adamw_power_step(*scaled, step=1, p=p, grad_scale=1 / 4096, clip_scale=4.0, **OPTIONS)
    for a, b in zip(plain[0] + plain[2:][0], scaled[0] + scaled[2:][0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.2])
def test_scaling_every_gradient_leaves_the_trajectory_when_eps_is_zero(p):
    paths = []
    for scale in (1.0, 1000.0):
        g = torch.Generator().manual_seed(1)
        x, m, v = torch.ones(50), torch.zeros(50), torch.zeros(50)
        for step in range(1, 21):
            grad = scale * torch.randn(50, generator=g)
            adamw_power_step([x], [grad], [m], [v], step=step, p=p, **{**OPTIONS, "eps": 0.0})
        paths.append(x)
    torch.testing.assert_close(*paths, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_eps_an_entry_whose_second_moment_is_zero_only_decays(dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, grad = torch.ones(2, dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)
    m, v = torch.zeros(2, dtype=wide), torch.zeros(2, dtype=wide)
    options = {**OPTIONS, "lr": 0.5, "weight_decay": 0.5, "eps": 0.0, "step": 1, "p": 1.2}
    done = reference(x, grad, m, v, **options)
    adamw_power_step([x], [grad], [m], [v], **options)
    assert x[0] == done.param[0] == 0.75
    torch.testing.assert_close(x, torch.tensor([0.75, 0.25], dtype=dtype))
    torch.testing.assert_close(x, done.param)


def test_first_step_moves_by_the_learning_rate_against_the_gradient_and_decays_first():
    # m̂ / √v̂ is the sign at the first step, whatever the power
    x, grad = torch.tensor([2.0, -4.0]), torch.tensor([3.0, -0.01])
    options = {"lr": 0.5, "beta1": 0.9, "beta2": 0.95, "eps": 0.0, "weight_decay": 0.25}
    adamw_power_step([x], [grad], [torch.zeros(2)], [torch.zeros(2)], step=1, p=1.7, **options)
    torch.testing.assert_close(x, torch.tensor([2.0 * 0.875 - 0.5, -4.0 * 0.875 + 0.5]))


@settings(max_examples=50, deadline=None)
@given(
    size=st.floats(1e-6, 1e3),
    sign=st.sampled_from([-1, 0, 1]),
    p=st.floats(0.1, 4),
    q=st.floats(0.1, 4),
)
def test_sign_powers_compose_and_are_odd(size, sign, p, q):
    x = torch.tensor([size * sign], dtype=torch.float64)
    twice = sign_power_eager(sign_power_eager(x, q), p)
    torch.testing.assert_close(twice, sign_power_eager(x, p * q), rtol=1e-10, atol=0.0)
    assert torch.equal(sign_power_eager(-x, p), -sign_power_eager(x, p))
