"""Every kernel's Triton code, interpreted: right, in bounds, moving the bytes of its model."""

import pytest
import torch

from icmllab.kernels import check, runtime
from icmllab.kernels.check import interpret
from icmllab.kernels.registry import specs

pytestmark = pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton exists on Linux only")
CASES = [(name, case) for name, spec in specs().items() for case in spec.cases]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_kernel_agrees_with_the_float64_truth(name, case):
    result = interpret()[name, case]
    allowed = specs()[name].cases[case].tolerance
    assert len(result.errors) == len(allowed)
    for error, most in zip(result.errors, allowed, strict=True):
        assert error <= most, result


@pytest.mark.parametrize(("name", "case"), CASES)
def test_kernel_moves_the_bytes_of_its_model(name, case):
    result = interpret()[name, case]
    assert result.bytes == result.model


@pytest.mark.parametrize(("name", "case"), CASES)
def test_kernel_leaves_the_memory_around_its_tensors(name, case):
    assert interpret()[name, case].untouched


def test_float32_is_not_exact_so_that_the_errors_are_of_the_kernel_and_not_of_the_reference():
    assert max(interpret()["perm_bilinear", "float32 n=8 1000 permutations"].errors) > 1e-9
    assert max(interpret()["adamw_power_step", "float32 1025"].errors) > 1e-9


def test_checks_need_a_process_that_interprets(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert check.main([]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err


def test_checks_name_an_unknown_kernel():
    with pytest.raises(RuntimeError, match="no kernel nonsense: there is adamw_power_step"):
        interpret("nonsense")


def test_scaled_error_sees_nan_infinity_and_shape():
    one = torch.ones(3)
    inf, nan = float("inf"), float("nan")
    assert check.scaled_error(one, one, one) == 0.0
    assert check.scaled_error(one + 0.5, one, 2 * one) == 0.25
    assert check.scaled_error(torch.tensor([1.0, nan, 1.0]), one, one) == inf
    assert check.scaled_error(torch.ones(2), one, one) == inf
    both = torch.tensor([1.0, nan, inf])
    assert check.scaled_error(both, both, one) == 0.0
    assert check.scaled_error(torch.tensor([1.0, nan, -inf]), both, one) == inf
    assert check.scaled_error(torch.tensor([1.0, inf, inf]), both, one) == inf
    assert check.scaled_error(one, one.double() + 1e-9, torch.zeros(3)) == inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_guard_notices_a_write_before_between_and_after(dtype):
    tensor = torch.ones(4, 6, dtype=dtype)[:, ::2]
    span = (4 - 1) * 6 + (3 - 1) * 2 + 1
    for place in (check.GUARD - 1, check.GUARD + 1, check.GUARD + span):
        guard = check.Guarded(tensor)
        assert torch.equal(guard.view, tensor)
        assert guard.untouched()
        guard.view.zero_()
        assert guard.untouched()
        guard.buffer[place] = 0
        assert not guard.untouched()
