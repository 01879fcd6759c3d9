"""The compiled kernels on a real GPU, over the same cases. Skipped without one."""

import pytest
import torch

from icmllab.kernels import check
from icmllab.kernels.adamw_power_step import adamw_power_step
from icmllab.kernels.perm_bilinear import perm_bilinear
from icmllab.kernels.registry import make_inputs, map_tensors, specs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
CASES = [(name, case) for name, spec in specs().items() for case in spec.cases]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_compiled_kernel_agrees_with_the_float64_truth_and_stays_in_bounds(name, case):
    result = check.run_case(specs()[name], case, device="cuda")
    for error, most in zip(result.errors, specs()[name].cases[case].tolerance, strict=True):
        assert error <= most
    assert result.untouched


@pytest.mark.parametrize(("name", "case"), CASES)
def test_op_on_the_gpu_agrees_with_the_float64_truth(name, case):
    spec = specs()[name]
    got = spec.op(map_tensors(lambda t: t.cuda(), make_inputs(spec, case)))
    assert all(t.is_cuda for t in got)
    for error, most in zip(check.errors(spec, case, got), spec.cases[case].tolerance, strict=True):
        assert error <= most


@pytest.mark.parametrize("name", list(specs()))
def test_op_is_the_same_on_every_run(name):
    spec = specs()[name]
    case = max(spec.cases, key=lambda c: spec.flops(make_inputs(spec, c)))
    runs = [spec.op(map_tensors(lambda t: t.cuda(), make_inputs(spec, case))) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_step_lets_the_host_run_ahead_even_when_it_looks_for_inf():
    options = {"step": 1, "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    tensors = [[torch.rand(5000, device="cuda")] for _ in range(4)]
    options |= {"weight_decay": 0.1, "p": 1.2, "skip_nonfinite": True}
    adamw_power_step(*tensors, **options)  # compiles, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        adamw_power_step(*tensors, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_large_matrices_need_64_bit_addresses():
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free GPU memory")
    n = 46400  # n * n exceeds 2**31
    K = torch.zeros(n, n, device="cuda")
    K[-1, -1] = 3.0
    L = torch.zeros(n, n, device="cuda")
    L[-1, -1] = 2.0
    perms = torch.arange(n, device="cuda", dtype=torch.int32)[None]
    assert perm_bilinear(K, L, perms).item() == 6.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_step_spans_two_gpus():
    lists = [[torch.rand(100, device=f"cuda:{i}") for i in range(2)] for _ in range(4)]
    before = [t.clone() for t in lists[0]]
    options = {"step": 1, "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    adamw_power_step(*lists, **options, weight_decay=0.1, p=1.2, skip_nonfinite=True)
    assert all(not torch.equal(a, b) for a, b in zip(before, lists[0], strict=True))
