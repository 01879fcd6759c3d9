"""What a kernel must bring for its proofs; tests, compilation table and benchmark come from here.

A kernel is a file ``<name>.py`` and, beside it, ``<name>_spec.py`` with one :class:`KernelSpec`
called ``SPEC``; :func:`specs` finds them. README.md in this folder says how to add one.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

Inputs = dict[str, object]
Outputs = tuple[torch.Tensor, ...]

SUFFIX = "_spec"


@dataclass(frozen=True)
class Case:
    """One set of inputs.

    Attributes:
        make: the inputs from a seeded generator; values are tensors, lists of them, or options.
        tolerance: the error allowed for each output, in units of ``KernelSpec.scale``.
    """

    make: Callable[[torch.Generator], Inputs]
    tolerance: tuple[float, ...]


@dataclass(frozen=True)
class BadCall:
    """A call of the op that must raise ValueError.

    Attributes:
        call: makes the call.
        message: a regular expression that the message must contain; it names the argument.
    """

    call: Callable[[], object]
    message: str


@dataclass(frozen=True)
class Program:
    """One compiled form of a kernel: argument types, constants, and what it must contain.

    Attributes:
        kernel: the ``@jit`` function.
        signature: argument name → Triton type (``*fp32``, ``i32``, ``fp32``), constants left out.
        constants: argument name → value, for ``constexpr`` arguments and for integers that are 1,
            which Triton makes constants when a kernel is launched.
        divisible: arguments that are multiples of 16 (pointers and sizes); without it loads
            stay scalar.
        num_warps: warps a program.
        wide_loads: bytes that a program must read by loads of 128 bits or more, on every target.
        wide_stores: the same for stores.
    """

    kernel: Callable
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    divisible: tuple[str, ...]
    num_warps: int = 4
    wide_loads: int = 0
    wide_stores: int = 0


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and everything that proves it.

    Attributes:
        name: the file's name.
        op: the public op on ``inputs``, which picks Triton or the reference by device.
        launch: the Triton kernel on ``inputs``, wherever they are.
        truth: the reference on ``inputs`` whose floating tensors are float64.
        scale: what the errors are measured in, entry by entry, from the same float64 inputs: the
            sum of the absolute terms of each output, which rounding errors are proportional to.
        cases: edge shapes and dtypes by name.
        bytes: what the kernel's loads and stores move for ``inputs``; must equal the count.
        flops: arithmetic operations for ``inputs``.
        programs: compiled forms by name.
        errors: bad calls by name.
        bench: large inputs on a device, for the benchmark.
        timed: the public op as users call it; the benchmark times this.
        baselines: the same work as others do it, on ``inputs``; ``eager`` must be one of them, and
            the benchmark also gives it to ``torch.compile``.
        note: what to know when reading the kernel's line of the benchmark.
        beyond_baselines: cases that ask for more than the baselines do.
    """

    name: str
    op: Callable[[Inputs], Outputs]
    launch: Callable[[Inputs], Outputs]
    truth: Callable[[Inputs], Outputs]
    scale: Callable[[Inputs], Outputs]
    cases: Mapping[str, Case]
    bytes: Callable[[Inputs], int]
    flops: Callable[[Inputs], int]
    programs: Mapping[str, Program]
    errors: Mapping[str, BadCall]
    bench: Callable[[torch.device], Inputs]
    timed: Callable[[Inputs], object]
    baselines: Mapping[str, Callable[[Inputs], object]]
    note: str = ""
    beyond_baselines: frozenset[str] = frozenset()


@cache
def specs() -> dict[str, KernelSpec]:
    """Every kernel by name, in alphabetical order."""
    package = importlib.import_module("icmllab.kernels")
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
    found = (
        importlib.import_module(f"{package.__name__}.{name}").SPEC
        for name in names
        if name.endswith(SUFFIX)
    )
    return {spec.name: spec for spec in found}


def make_inputs(spec: KernelSpec, case: str) -> Inputs:
    """The inputs of a case, the same on every call."""
    return spec.cases[case].make(torch.Generator().manual_seed(20260))


def map_tensors(fn: Callable[[torch.Tensor], object], value: object) -> object:
    """``value`` with ``fn`` applied to every tensor in its dicts and lists."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {k: map_tensors(fn, v) for k, v in value.items()}
    if isinstance(value, list):
        return [map_tensors(fn, v) for v in value]
    return value


def to_double(inputs: Inputs) -> Inputs:
    """Copies of the inputs with every floating tensor in float64."""
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t.clone(), inputs)


def permutations(n: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Random permutations of 0..n-1: (count, n) int32."""
    rows = [torch.randperm(n, generator=generator) for _ in range(count)]
    return torch.stack(rows).to(torch.int32)
