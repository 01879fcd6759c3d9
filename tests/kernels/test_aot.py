"""What every kernel compiles to for GPUs that this machine does not have, and the benchmark."""

import os
import re
import time

import pytest
import torch

from icmllab.kernels import aot, bench, runtime
from icmllab.kernels.registry import make_inputs, specs, to_double

needs_triton = pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton exists on Linux only")
PROGRAMS = [(name, form) for name, spec in specs().items() for form in spec.programs]


@needs_triton
@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize(("name", "form"), PROGRAMS)
def test_compiles_without_spills_and_as_wide_as_specified(name, form, target):
    made = aot.compile_program(name, form, target)
    program = specs()[name].programs[form]
    assert made.registers > 0
    assert made.spilled == 0
    assert made.wide_loads >= program.wide_loads
    assert made.wide_stores >= program.wide_stores


@needs_triton
def test_unaligned_tensors_compile_to_narrow_accesses():
    # so that the widths asked for above are no matter of course
    assert aot.compile_program("adamw_power_step", "fp32 unaligned", "sm_90").store_bits == 32


@needs_triton
def test_compiling_leaves_the_cache_of_triton_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    aot.compile_program.__wrapped__("perm_knn_overlap", "int32", "sm_90")
    assert os.listdir(tmp_path) == []
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("none", "fp32", "sm_90"), "kernel must be one of adamw_power_step, .*: got 'none'"),
        (("perm_bilinear", "fp8", "sm_90"), "program must be one of fp32, .*: got 'fp8'"),
        (("perm_bilinear", "fp32", "sm_70"), "target must be one of sm_80, .*: got 'sm_70'"),
    ],
)
def test_unknown_names_are_named(names, message):
    with pytest.raises(ValueError, match=message):
        aot.compile_program(*names)


def test_widths_are_read_from_assembly():
    sass = "LDG.E R1 ; @P0 LDG.E.64.CONSTANT R2 ; LDG.E.EF.128 R4 ; STG.E.U8 [R2] ; LDS.128 R3 ;"
    assert aot._sass_bits(sass, "LDG") == [32, 64, 128]
    assert aot._sass_bits(sass, "STG") == [32]
    amd = "global_load_dwordx4 v[0:3] ; global_load_ushort v4 ; buffer_store_dwordx2 v[0:1]"
    assert aot._amd_bits(amd, "load") == [128, 32]
    assert aot._amd_bits(amd, "store") == [64]
    assert aot._wide([32, 128, 256], threads=64) == 64 * (16 + 32)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_benchmark_without_a_gpu_says_so_and_prints_the_compiled_table(capsys):
    assert bench.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "No GPU on this machine" in lines[0]
    assert lines[1].split() == " ".join(aot.HEAD).split()
    assert sum(bool(re.search(r" (sm_\d+|gfx942) ", line)) for line in lines) == 4 * len(PROGRAMS)
    for name, spec in specs().items():
        assert any(re.match(rf"{name} +{len(spec.cases)} of {len(spec.cases)} ", x) for x in lines)


def wall_clock(call) -> float:
    call()
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


@pytest.mark.parametrize("name", list(specs()))
def test_benchmark_measures_a_kernel_beside_its_baselines(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn: fn)  # a C++ compiler may be missing here
    spec = specs()[name]
    inputs = make_inputs(spec, next(iter(spec.cases)))
    timing = bench.measure(spec, inputs, wall_clock)
    assert set(timing.ratios) == {*spec.baselines, "compiled"}
    assert all(float(ratio) > 0 for ratio in timing.ratios.values())
    assert timing.moved == spec.bytes(inputs)
    limit = bench.Roofline(1e12, 1e12, "a test")
    assert name in bench.gpu_lines([timing], limit)


def test_benchmark_goes_on_when_a_baseline_fails_and_says_so(monkeypatch):
    spec = specs()["perm_knn_overlap"]
    inputs = make_inputs(spec, "n=7 k=3")

    def broken(_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "compile", lambda _: broken)
    assert bench.measure(spec, inputs, wall_clock).ratios["compiled"] == "OutOfMemoryError"


def test_roofline_is_the_larger_of_memory_and_arithmetic():
    limit = bench.Roofline(bytes_per_second=1e12, flops_per_second=1e13, source="a test")
    assert limit.least_milliseconds(moved=10**9, flops=10**9) == pytest.approx(1.0)
    assert limit.least_milliseconds(moved=10**9, flops=10**11) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("card", "terabytes"),
    [
        ("NVIDIA H200", 4.8),
        ("NVIDIA H100 80GB HBM3", 3.35),
        ("NVIDIA H100 PCIe", 2.0),
        ("NVIDIA A100-SXM4-40GB", 1.555),
        ("NVIDIA A100-SXM4-80GB", 1.935),
        ("NVIDIA GB200", 8.0),
        ("AMD Instinct MI300X", 5.3),
    ],
)
def test_roofline_knows_common_cards(card, terabytes):
    found = bench.roofline(card, wall_clock)
    assert found.bytes_per_second == terabytes * 1e12
    assert found.source == "data sheet"


def test_copy_bandwidth_counts_reads_and_writes():
    # 1024 floats in 2 ms
    assert bench.copy_bandwidth(lambda _: 2.0, torch.device("cpu"), 1024) == 2 * 4096 / 2e-3


BASELINES = [(name, other) for name, spec in specs().items() for other in spec.baselines]


@pytest.mark.parametrize(("name", "other"), BASELINES)
def test_a_baseline_does_the_same_work(name, other):
    spec = specs()[name]
    for case, settings in spec.cases.items():
        if case in spec.beyond_baselines:
            continue
        inputs = to_double(make_inputs(spec, case))
        options = inputs.get("options", {})
        # what the baselines leave out
        if "inf" in case or any(k.startswith(("grad_", "clip", "max", "skip")) for k in options):
            continue
        if len(inputs.get("grads", [0])) > 1 or "nothing" in case or "tensors" in case:
            continue
        truth = spec.truth(to_double(make_inputs(spec, case)))
        got = spec.baselines[other](inputs)
        if name == "adamw_power_step":
            got = [inputs[k][0].flatten() for k in ("params", "exp_avgs", "exp_avg_sqs")]
        else:
            got = list(got) if isinstance(got, tuple) else [got]
        assert len(settings.tolerance) == len(got)
        for mine, theirs in zip(truth, got, strict=True):
            torch.testing.assert_close(
                theirs.double(), mine.double(), rtol=1e-9, atol=1e-12, equal_nan=True
            )
