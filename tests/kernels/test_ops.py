"""The public ops on this device: identities, other libraries, edge values, bad input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icmllab.kernels.adamw_power_step import adamw_power_step, reference, sign_power_eager
from icmllab.kernels.perm_bilinear import perm_bilinear
from icmllab.kernels.perm_knn_overlap import perm_knn_overlap

OPTIONS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


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
    tolerance = 1e-12 * n * n if dtype == torch.float64 else 1e-6 * n * n
    np.testing.assert_allclose(perm_bilinear(K, L, perms).numpy(), wanted, atol=tolerance)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"K": torch.zeros(0, 0)}, "K must be a square matrix"),
        ({"K": torch.zeros(3, 4)}, "K must be a square matrix"),
        ({"L": torch.zeros(3, 3)}, "L must have the shape of K"),
        ({"L": torch.zeros(4, 4, dtype=torch.float64)}, "L must have dtype float32"),
        ({"K": torch.zeros(4, 4, dtype=torch.int64)}, "K must have dtype"),
        ({"perms": torch.zeros(2, 3, dtype=torch.int64)}, r"perms must be \(B, 4\)"),
        ({"perms": torch.zeros(2, 4)}, "perms must have dtype"),
    ],
)
def test_perm_bilinear_names_bad_arguments(change, message):
    good = {"K": torch.eye(4), "L": torch.eye(4), "perms": torch.arange(4)[None]}
    with pytest.raises(ValueError, match=message):
        perm_bilinear(**{**good, **change})


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_power_one_is_adamw_of_torch(dtype):
    start = torch.randn(7, 5, dtype=dtype)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    ours, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, 51):
        grad = torch.randn(7, 5, dtype=dtype)
        theirs.grad = grad.clone()
        optimizer.step()
        adamw_power_step([ours], [grad], [m], [v], step=step, p=1.0, **OPTIONS)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 0.0}, "p must be > 0"),
        ({"p": float("nan")}, "p must be finite"),
        ({"lr": float("inf")}, "lr must be finite"),
        ({"step": 0}, "step must be >= 1"),
        ({"eps": -1.0}, "eps must be >= 0"),
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\)"),
        ({"grads": [torch.ones(3)]}, "must have the shape of"),
        ({"grads": []}, "must have one length"),
        ({"exp_avgs": [torch.zeros(4, dtype=torch.float64)]}, "must have dtype float32"),
        ({"params": [torch.zeros(4, dtype=torch.complex64)]}, "must have dtype"),
        ({"grads": [torch.ones(8)[::2]]}, "must be contiguous"),
    ],
)
def test_adamw_power_step_names_bad_arguments(change, message):
    good = {
        "params": [torch.ones(4)],
        "grads": [torch.ones(4)],
        "exp_avgs": [torch.zeros(4)],
        "exp_avg_sqs": [torch.zeros(4)],
        "step": 1,
        "p": 1.2,
        **OPTIONS,
    }
    with pytest.raises(ValueError, match=message):
        adamw_power_step(**{**good, **change})


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
