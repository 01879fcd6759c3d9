"""Run every kernel's Triton code under the interpreter and hold it against the float64 truth.

``TRITON_INTERPRET=1 python -m icmllab.kernels.check [kernel ...]`` prints one line of JSON a case:
the error of each output, the bytes that loads and stores moved, the model's bytes, and whether the
memory around the tensors was left alone. Triton decides at import whether it interprets, so that
the interpreter needs a process of its own: :func:`interpret` starts it and reads the lines.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache

import torch

from icmllab.kernels import runtime
from icmllab.kernels.registry import KernelSpec, Outputs, make_inputs, map_tensors, specs, to_double

GUARD = 64
"""Entries of NaN on each side of every tensor: a read outside spoils the result, a write shows."""


@dataclass(frozen=True)
class Result:
    """What running a case showed.

    Attributes:
        kernel: the kernel's name.
        case: the case's name.
        errors: the largest error of each output in units of its scale; infinite where NaN and
            infinities do not stand where the truth has them.
        bytes: what the loads and stores moved; 0 where they were not counted.
        model: what the specification says they move.
        untouched: whether everything around the tensors is as it was.
    """

    kernel: str
    case: str
    errors: list[float]
    bytes: int
    model: int
    untouched: bool


class Guarded:
    """A tensor inside a larger buffer whose rim holds NaN (or the lowest integer)."""

    def __init__(self, tensor: torch.Tensor, device: torch.device | str = "cpu"):
        span = 1 + sum((s - 1) * st for s, st in zip(tensor.shape, tensor.stride(), strict=True))
        span = span if tensor.numel() else 0
        self.rim = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        # a tensor that does not start at a multiple of 16 bytes must not start at one here
        start = GUARD + tensor.storage_offset() % 16
        self.buffer = torch.full((start + span + GUARD,), self.rim, dtype=tensor.dtype)
        # what lies between the entries of a strided tensor is rim too
        self.outside = torch.ones(len(self.buffer), dtype=torch.bool)
        places = torch.arange(len(self.buffer))
        places = torch.as_strided(places, tensor.shape, tensor.stride(), start).flatten()
        self.buffer[places] = tensor.flatten()
        self.outside[places] = False
        self.buffer = self.buffer.to(device)
        self.view = torch.as_strided(self.buffer, tensor.shape, tensor.stride(), start)

    def untouched(self) -> bool:
        """Whether everything around the tensor is as it was."""
        rest = self.buffer.cpu()[self.outside]
        return bool((rest.isnan() if self.rim != self.rim else rest == self.rim).all())


class ByteCounter:
    """Counts the bytes of the entries that the interpreter's loads and stores touch.

    An atomic operation reads and writes its entry.
    """

    def __init__(self):
        self.moved = 0

    def install(self) -> None:
        """Wrap the interpreter's masked load and store, plain ones go through them, and atomics."""
        from triton.runtime.interpreter import InterpreterBuilder, _get_np_dtype

        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        atomic = InterpreterBuilder.create_atomic_rmw
        counter = self

        def counted_load(builder, ptrs, mask, *rest, **named):
            size = _get_np_dtype(ptrs.get_element_ty()).itemsize
            counter.moved += int(mask.data.sum()) * size
            return load(builder, ptrs, mask, *rest, **named)

        def counted_store(builder, ptrs, value, mask, *rest, **named):
            size = _get_np_dtype(ptrs.get_element_ty()).itemsize
            counter.moved += int(mask.data.sum()) * size
            return store(builder, ptrs, value, mask, *rest, **named)

        def counted_atomic(builder, operation, ptrs, value, mask, *rest, **named):
            size = _get_np_dtype(ptrs.get_element_ty()).itemsize
            counter.moved += 2 * int(mask.data.sum()) * size
            return atomic(builder, operation, ptrs, value, mask, *rest, **named)

        InterpreterBuilder.create_atomic_rmw = counted_atomic
        InterpreterBuilder.create_masked_load = counted_load
        InterpreterBuilder.create_masked_store = counted_store


def scaled_error(got: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest \\|got - truth\\| / scale; infinite when shapes, NaN or infinities differ."""
    if got.shape != truth.shape:
        return float("inf")
    got, truth, scale = (t.detach().cpu().double() for t in (got, truth, scale))
    finite = truth.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return float("inf")
    if not torch.equal(got[~finite].nan_to_num(), truth[~finite].nan_to_num()):
        return float("inf")
    error = (got - truth)[finite].abs()
    # 0 / 0 is no error, anything else over 0 is
    ratio = torch.where(error == 0, 0.0, error / scale[finite])
    return ratio.max().item() if len(ratio) else 0.0


def errors(spec: KernelSpec, case: str, got: Outputs) -> list[float]:
    """The error of each output of a case."""
    truth = spec.truth(to_double(make_inputs(spec, case)))
    scale = spec.scale(to_double(make_inputs(spec, case)))
    return [scaled_error(*three) for three in zip(got, truth, scale, strict=True)]


def run_case(
    spec: KernelSpec,
    case: str,
    *,
    device: torch.device | str = "cpu",
    counter: ByteCounter | None = None,
) -> Result:
    """Launch the Triton kernel on a case's inputs, guarded and with poisoned outputs."""
    guards = []

    def guard(tensor: torch.Tensor) -> torch.Tensor:
        guards.append(Guarded(tensor, device))
        return guards[-1].view

    inputs = map_tensors(guard, make_inputs(spec, case))
    before = counter.moved if counter else 0
    runtime.POISON = True
    try:
        got = spec.launch(inputs)
    finally:
        runtime.POISON = False
    return Result(
        kernel=spec.name,
        case=case,
        errors=errors(spec, case, got),
        bytes=counter.moved - before if counter else 0,
        model=spec.bytes(make_inputs(spec, case)),
        untouched=all(g.untouched() for g in guards),
    )


def interpret(*kernels: str) -> dict[tuple[str, str], Result]:
    """Every case of the kernels (of all when none is named), run once in a process that interprets.

    Raises:
        RuntimeError: that process failed; the message holds the end of what it said.
    """
    done = _interpreter(*kernels)
    if done.returncode:
        raise RuntimeError(f"the interpreter's process failed:\n{done.stderr[-3000:]}")
    results = [Result(**json.loads(line)) for line in done.stdout.splitlines()]
    return {(r.kernel, r.case): r for r in results}


@cache  # failures too: each test that asks would else run the process again
def _interpreter(*kernels: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "icmllab.kernels.check", *kernels]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def main(kernels: list[str]) -> int:
    """Check every case of the named kernels, or of all."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        print("set TRITON_INTERPRET=1 before Python starts", file=sys.stderr)
        return 2
    unknown = sorted(set(kernels) - set(specs()))
    if unknown:
        print(f"no kernel {', '.join(unknown)}: there is {', '.join(specs())}", file=sys.stderr)
        return 2
    counter = ByteCounter()
    counter.install()
    for name in kernels or specs():
        for case in specs()[name].cases:
            result = run_case(specs()[name], case, counter=counter)
            print(json.dumps(asdict(result)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
