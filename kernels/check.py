"""Run every kernel's Triton code under the interpreter and hold it against the float64 truth.

``TRITON_INTERPRET=1 python -m icmllab.kernels.check`` prints one line of JSON a case: the error of
each output in units of the largest entry of its truth, the bytes that loads and stores moved, the
model's bytes, and whether memory around the tensors was left alone. The tests read these lines;
the interpreter needs a process of its own, since Triton decides at import.
"""

import json
import os
import sys

import torch

GUARD = 64
"""Entries of NaN on each side of every tensor: a read outside spoils the result, a write shows."""


class Guarded:
    """A tensor inside a larger buffer whose rim holds NaN (or a large negative integer)."""

    def __init__(self, tensor: torch.Tensor):
        span = 1 + sum((s - 1) * st for s, st in zip(tensor.shape, tensor.stride(), strict=True))
        rim = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        self.buffer = torch.full((span + 2 * GUARD,), rim, dtype=tensor.dtype)
        self.view = torch.as_strided(self.buffer, tensor.shape, tensor.stride(), GUARD)
        self.view.copy_(tensor)
        # what lies between the entries of a strided tensor is rim too
        outside = torch.ones(span + 2 * GUARD, dtype=torch.bool)
        torch.as_strided(outside, tensor.shape, tensor.stride(), GUARD).fill_(False)
        self.outside = outside

    def untouched(self) -> bool:
        """Whether everything around the tensor is as it was."""
        rest = self.buffer[self.outside]
        if self.buffer.is_floating_point():
            return bool(torch.isnan(rest).all())
        return bool((rest == torch.iinfo(self.buffer.dtype).min).all())


class ByteCounter:
    """Counts the bytes of the entries that the interpreter's loads and stores touch."""

    def __init__(self):
        self.moved = 0

    def install(self) -> None:
        """Wrap the interpreter's masked load and store; plain ones go through them."""
        from triton.runtime.interpreter import InterpreterBuilder, _get_np_dtype

        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        counter = self

        def counted_load(builder, ptrs, mask, *rest):
            size = _get_np_dtype(ptrs.get_element_ty()).itemsize
            counter.moved += int(mask.data.sum()) * size
            return load(builder, ptrs, mask, *rest)

        def counted_store(builder, ptrs, value, mask, *rest):
            size = _get_np_dtype(ptrs.get_element_ty()).itemsize
            counter.moved += int(mask.data.sum()) * size
            return store(builder, ptrs, value, mask, *rest)

        InterpreterBuilder.create_masked_load = counted_load
        InterpreterBuilder.create_masked_store = counted_store


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error in units of the truth's largest entry; NaN anywhere gives infinity."""
    if got.shape != truth.shape:
        return float("inf")
    if truth.numel() == 0:
        return 0.0
    error = (got.double() - truth.double()).abs().max().item()
    unit = truth.double().abs().max().item() or 1.0
    return error / unit if error == error else float("inf")


def check_case(spec, case: str, counter: ByteCounter) -> dict:
    """Run one case and describe what came out."""
    from icmllab.kernels.registry import make_inputs, to_double

    inputs = make_inputs(spec, case)
    truth = spec.truth(to_double(inputs))
    model = spec.bytes(inputs)
    guards = {k: Guarded(v) for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    counter.moved = 0
    got = spec.run({**inputs, **{k: g.view for k, g in guards.items()}})
    return {
        "kernel": spec.name,
        "case": case,
        "errors": [relative_error(a, b) for a, b in zip(got, truth, strict=True)],
        "allowed": spec.tolerance[case.split()[0]],
        "bytes": counter.moved,
        "model": model,
        "untouched": all(g.untouched() for g in guards.values()),
    }


def main() -> int:
    """Check every case of every kernel, or of those named on the command line."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        print("set TRITON_INTERPRET=1 before Python starts", file=sys.stderr)
        return 2
    from icmllab.kernels import runtime
    from icmllab.kernels.registry import specs

    runtime.POISON = True
    counter = ByteCounter()
    counter.install()
    wanted = sys.argv[1:] or list(specs())
    for name in wanted:
        for case in specs()[name].cases:
            print(json.dumps(check_case(specs()[name], case, counter)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
