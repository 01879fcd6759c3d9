"""``make bench-kernels``: every kernel on this machine's GPU, beside what people would use instead.

On a GPU: time, rate, share of the roofline, and the ratio of every baseline's time to the kernel's,
``torch.compile`` of the eager one among them. Without a GPU it says so, and prints what the kernels
compile to, and the bytes that they move under the interpreter beside their model.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from icmllab.kernels import aot, runtime
from icmllab.kernels.check import interpret
from icmllab.kernels.registry import Inputs, KernelSpec, specs

# name of the card → (bytes a second, float32 operations a second outside tensor cores), from the
# makers' data sheets; the first that matches counts
PEAKS = {
    r"\bG?B200\b": (8.0e12, 75e12),
    r"\bH200\b": (4.8e12, 67e12),
    r"\bH100 PCIe\b": (2.0e12, 51e12),
    r"\bH100 NVL\b": (3.9e12, 60e12),
    r"\bH100\b": (3.35e12, 67e12),
    r"\bA100\b.*\b40GB\b": (1.555e12, 19.5e12),
    r"\bA100\b": (1.935e12, 19.5e12),
    r"\bL40S\b": (0.864e12, 91.6e12),
    r"\bL4\b": (0.3e12, 30.3e12),
    r"\bA10G?\b": (0.6e12, 31.2e12),
    r"\bT4\b": (0.32e12, 8.1e12),
    r"\bV100\b": (0.9e12, 15.7e12),
    r"\bRTX 4090\b": (1.008e12, 82.6e12),
    r"\bMI300X\b": (5.3e12, 163.4e12),
}

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Roofline:
    """What a card can do at most.

    Attributes:
        bytes_per_second: of its memory.
        flops_per_second: float32, outside tensor cores; infinite where unknown.
        source: where the numbers come from.
    """

    bytes_per_second: float
    flops_per_second: float
    source: str

    def least_milliseconds(self, moved: int, flops: int) -> float:
        """The time below which no kernel with this traffic and arithmetic can go."""
        return 1e3 * max(moved / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True)
class Timing:
    """One kernel's benchmark.

    Attributes:
        name: the kernel.
        milliseconds: the median time of its op.
        moved: bytes that its loads and stores move.
        flops: its arithmetic operations.
        ratios: baseline → its time over the kernel's, or why there is none.
        note: what to know when reading the line.
    """

    name: str
    milliseconds: float
    moved: int
    flops: int
    ratios: dict[str, str]
    note: str


def roofline(name: str, timer: Timer) -> Roofline:
    """The limits of the card of that name: from its data sheet, else from a copy timed on it."""
    for pattern, (moved, flops) in PEAKS.items():
        if re.search(pattern, name):
            return Roofline(moved, flops, "data sheet")
    return Roofline(copy_bandwidth(timer, torch.device("cuda")), float("inf"), "a copy timed here")


def copy_bandwidth(timer: Timer, device: torch.device, numel: int = 2**28) -> float:
    """Bytes a second that a large copy moves, reads and writes together."""
    source = torch.empty(numel, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * timer(lambda: target.copy_(source)))


def gpu_timer(call: Callable[[], object]) -> float:
    """Median milliseconds of a call on the GPU, its L2 cache cleared before each."""
    from triton.testing import do_bench

    return do_bench(call, warmup=50, rep=200, return_mode="median")


def measure(spec: KernelSpec, inputs: Inputs, timer: Timer) -> Timing:
    """Time a kernel's op and its baselines; those that work in place go on from where they are."""
    moved, flops = spec.bytes(inputs), spec.flops(inputs)
    ours = timer(lambda: spec.timed(inputs))
    baselines = {**spec.baselines, "compiled": torch.compile(spec.baselines["eager"])}
    ratios = {}
    for name, baseline in baselines.items():
        try:
            ratios[name] = f"{timer(lambda call=baseline: call(inputs)) / ours:.2f}"
        except (
            RuntimeError
        ) as error:  # out of memory, or a compiler that gives up: said in the table
            ratios[name] = type(error).__name__
    return Timing(spec.name, ours, moved, flops, ratios, spec.note)


def gpu_lines(timings: list[Timing], limit: Roofline) -> str:
    """The timings as a table."""
    head = ("kernel", "time", "rate", "work", "of the roofline", "others' time over ours", "note")
    lines = [
        (
            t.name,
            f"{t.milliseconds:.3f} ms",
            f"{t.moved / t.milliseconds / 1e6:.0f} GB/s",
            f"{t.flops / t.milliseconds / 1e9:.2f} Tops/s",
            f"{limit.least_milliseconds(t.moved, t.flops) / t.milliseconds:.0%}",
            ", ".join(f"{name} {ratio}" for name, ratio in t.ratios.items()),
            t.note,
        )
        for t in timings
    ]
    return aot.table(head, lines)


def byte_lines() -> str:
    """Bytes counted by the interpreter beside the model's, summed over each kernel's cases."""
    results = interpret().values()
    lines = []
    for name in specs():
        own = [r for r in results if r.kernel == name]
        equal = sum(r.bytes == r.model for r in own)
        moved, model = sum(r.bytes for r in own), sum(r.model for r in own)
        lines.append((name, f"{equal} of {len(own)}", f"{moved:,}", f"{model:,}"))
    return aot.table(("kernel", "cases equal", "bytes moved", "bytes of the model"), lines)


def main() -> int:
    """Print the tables."""
    if torch.cuda.is_available() and runtime.HAS_TRITON:
        name = torch.cuda.get_device_name()
        limit = roofline(name, gpu_timer)
        print(
            f"{name}, torch {torch.__version__}. Roofline from {limit.source}: "
            f"{limit.bytes_per_second / 1e12:.2f} TB/s, {limit.flops_per_second / 1e12:.0f} Tops/s"
        )
        device = torch.device("cuda")
        timings = [measure(spec, spec.bench(device), gpu_timer) for spec in specs().values()]
        print(gpu_lines(timings, limit))
        return 0
    if not runtime.HAS_TRITON:
        print("No Triton on this platform: there is nothing to time or to compile.")
        return 0
    print("No GPU on this machine. Instead of how fast the kernels run, what they compile to:")
    print(aot.table(aot.HEAD, aot.rows()))
    print("\nand what their loads and stores move, counted under the interpreter:")
    print(byte_lines())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
