"""What the registry proves of every kernel without Triton: the op, its errors, its completeness."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from icmllab.kernels import check, runtime
from icmllab.kernels.registry import SUFFIX, make_inputs, map_tensors, specs, to_double

CASES = [(name, case) for name, spec in specs().items() for case in spec.cases]
ERRORS = [(name, error) for name, spec in specs().items() for error in spec.errors]
INFRASTRUCTURE = {"__init__", "aot", "bench", "check", "registry", "runtime"}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_op_on_the_cpu_agrees_with_the_float64_truth(name, case):
    spec = specs()[name]
    errors = check.errors(spec, case, spec.op(make_inputs(spec, case)))
    for error, most in zip(errors, spec.cases[case].tolerance, strict=True):
        assert error <= most


@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_bad_call_raises_an_error_that_names_the_argument(name, error):
    bad = specs()[name].errors[error]
    with pytest.raises(ValueError, match=bad.message):
        bad.call()


def test_every_kernel_file_has_its_spec():
    files = {p.stem for p in Path(runtime.__file__).parent.glob("*.py")} - INFRASTRUCTURE
    assert files == {file for name in specs() for file in (name, name + SUFFIX)}


# one head's pattern of 16 channels: a product takes no fewer
SMALLEST = {"lowbit_attend": 16}


@pytest.mark.parametrize("name", list(specs()))
def test_spec_is_complete(name):
    spec = specs()[name]
    assert {"eager"} <= set(spec.baselines)
    assert spec.beyond_baselines < set(spec.cases)  # some case is left to hold them against
    assert spec.programs
    assert spec.errors
    sizes = []
    for case in spec.cases:
        inputs = make_inputs(spec, case)
        map_tensors(lambda t, found=sizes: found.append(t.numel()), inputs)
        assert spec.bytes(inputs) >= 0
        assert spec.flops(inputs) >= 0
    assert min(n for n in sizes if n) == SMALLEST.get(name, 1)  # an edge shape


def test_inputs_of_a_case_are_the_same_on_every_call():
    spec = specs()["adamw_power_step"]
    first, second = (make_inputs(spec, "float32 five tensors") for _ in range(2))
    for a, b in zip(first["params"], second["params"], strict=True):
        assert torch.equal(a, b)
    assert to_double(first)["params"][0].dtype == torch.float64
    assert first["params"][0].dtype == torch.float32


def test_checks_see_an_output_that_is_not_written(monkeypatch):
    monkeypatch.setattr(runtime, "POISON", True)
    floats = runtime.output(3, dtype=torch.float32, device=torch.device("cpu"))
    whole = runtime.output(2, 2, dtype=torch.int32, device=torch.device("cpu"))
    assert floats.isnan().all()
    assert (whole == torch.iinfo(torch.int32).min).all()


def test_kernels_import_and_run_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from icmllab.kernels import aot, bench, check, registry, runtime\n"
        "assert not runtime.HAS_TRITON\n"
        "for spec in registry.specs().values():\n"
        "    case = next(iter(spec.cases))\n"
        "    spec.op(registry.make_inputs(spec, case))\n"
        "raise SystemExit(bench.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("No Triton on this platform")
