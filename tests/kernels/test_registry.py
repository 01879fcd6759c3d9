"""What the registry proves of every kernel: right, in bounds, bytes as modelled, compiled."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
import torch

from icmllab.kernels import runtime
from icmllab.kernels.registry import make_inputs, specs, to_double

needs_triton = pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton exists on Linux only")
CASES = [(name, case) for name, spec in specs().items() for case in spec.cases]
PROGRAMS = [(name, form) for name, spec in specs().items() for form in spec.programs]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@cache
def interpreted() -> dict[tuple[str, str], dict]:
    """Every case under the interpreter, in a process of its own."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "icmllab.kernels.check"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {(r["kernel"], r["case"]): r for r in lines}


@needs_triton
@pytest.mark.parametrize(("name", "case"), CASES)
def test_interpreted_kernel_agrees_with_float64(name, case):
    result = interpreted()[name, case]
    assert len(result["errors"]) == len(result["allowed"])
    for error, allowed in zip(result["errors"], result["allowed"], strict=True):
        assert error <= allowed, result


@needs_triton
@pytest.mark.parametrize(("name", "case"), CASES)
def test_kernel_moves_the_bytes_of_its_model(name, case):
    result = interpreted()[name, case]
    assert result["bytes"] == result["model"]


@needs_triton
@pytest.mark.parametrize(("name", "case"), CASES)
def test_kernel_leaves_the_memory_around_its_tensors(name, case):
    assert interpreted()[name, case]["untouched"]


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "form"), PROGRAMS)
def test_compiles_ahead_of_time_without_spills(name, form, target, tmp_path_factory, monkeypatch):
    from icmllab.kernels.aot import compile_program

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    made = compile_program(name, form, target)
    assert made.registers > 0
    assert made.spilled == 0
    if specs()[name].programs[form].wide:
        assert made.loads >= 128


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", specs()["adamw_power_step"].programs)
def test_adamw_power_step_stores_128_bits(form, target):
    from icmllab.kernels.aot import compile_program

    assert compile_program("adamw_power_step", form, target).stores == 128


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("name", "case"), CASES)
def test_compiled_kernel_agrees_with_float64_on_the_gpu(name, case, monkeypatch):
    from icmllab.kernels.check import relative_error

    monkeypatch.setattr(runtime, "POISON", True)
    spec = specs()[name]
    inputs = make_inputs(spec, case)
    truth = spec.truth(to_double(inputs))
    moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    for got, wanted, allowed in zip(
        spec.run(moved), truth, spec.tolerance[case.split()[0]], strict=True
    ):
        assert relative_error(got.cpu(), wanted) <= allowed


def test_every_kernel_file_is_registered():
    from pathlib import Path

    own = {"__init__", "aot", "bench", "check", "registry", "runtime"}
    files = {p.stem for p in Path(runtime.__file__).parent.glob("*.py")} - own
    assert files == set(specs())


def test_kernels_import_and_run_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; sys.modules['triton.language'] = None\n"
        "import torch\n"
        "from icmllab.kernels import registry, runtime\n"
        "assert not runtime.HAS_TRITON\n"
        "from icmllab.kernels.perm_bilinear import perm_bilinear\n"
        "K = torch.eye(4)\n"
        "assert perm_bilinear(K, K, torch.arange(4)[None]).item() == 4.0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_relative_error_sees_nan_and_shape():
    from icmllab.kernels.check import relative_error

    one = torch.ones(3)
    assert relative_error(one, one) == 0.0
    assert relative_error(torch.tensor([1.0, float("nan"), 1.0]), one) == float("inf")
    assert relative_error(torch.ones(2), one) == float("inf")


def test_guard_notices_a_write_outside():
    from icmllab.kernels.check import Guarded

    guard = Guarded(torch.ones(4, 6)[:, ::2])
    assert guard.untouched()
    torch.as_strided(guard.buffer, (1,), (1,), 64 + 1).fill_(0.0)  # between two entries
    assert not guard.untouched()
