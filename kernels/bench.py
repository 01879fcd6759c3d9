"""``make bench-kernels``: every kernel on this machine's GPU, beside eager and torch.compile.

Without a GPU it says so and prints what the kernels compile to instead.
"""

import torch

from icmllab.kernels.registry import KernelSpec, specs

# (bytes a second, float32 operations a second outside tensor cores), from the makers' data sheets
PEAKS = {
    "H200": (4.8e12, 67e12),
    "H100": (3.35e12, 67e12),
    "A100": (2.0e12, 19.5e12),
    "B200": (8.0e12, 80e12),
    "MI300X": (5.3e12, 163e12),
}


def peak(device: torch.device) -> tuple[float, float]:
    """Bytes and float32 operations a second of the card: its data sheet, else a measured copy."""
    name = torch.cuda.get_device_name(device)
    for key, value in PEAKS.items():
        if key in name:
            return value
    return copy_bandwidth(device), float("inf")


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy moves, reads and writes together."""
    source = torch.empty(2**28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / (1e-3 * milliseconds(lambda: target.copy_(source)))


def milliseconds(call) -> float:
    """Median time of a call on the GPU."""
    from triton.testing import do_bench

    return do_bench(call, warmup=50, rep=200, return_mode="median")


def row(spec: KernelSpec, device: torch.device) -> tuple[str, ...]:
    """One kernel's line: time, rate, share of the roofline, ratios to eager and compiled."""
    inputs = spec.bench(device)
    bytes_peak, flops_peak = peak(device)
    moved, flops = spec.bytes(inputs), spec.flops(inputs)
    ours = milliseconds(lambda: spec.run(inputs))
    eager = milliseconds(lambda: spec.eager(inputs))
    try:
        compiled = torch.compile(spec.eager)
        ratio = f"{milliseconds(lambda: compiled(inputs)) / ours:.2f}"
    except Exception as error:  # a bench goes on where a compiler gives up, and says so
        ratio = type(error).__name__
    least = 1e3 * max(moved / bytes_peak, flops / flops_peak)
    return (
        spec.name,
        f"{ours:.3f} ms",
        f"{moved / ours / 1e6:.0f} GB/s",
        f"{flops / ours / 1e9:.2f} TFLOP/s",
        f"{least / ours:.0%}",
        f"{eager / ours:.2f}",
        ratio,
        spec.notes,
    )


def main() -> int:
    """Print the table."""
    if not torch.cuda.is_available():
        print("No GPU on this machine: what the kernels compile to, instead of how fast they run.")
        from icmllab.kernels.aot import table

        print(table())
        print("\nbytes moved by the model, for the benchmark's inputs")
        for name, spec in specs().items():
            print(f"{name:<18} {spec.bytes(spec.bench(torch.device('cpu'))) / 1e6:,.1f} MB")
        return 0
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    head = ("kernel", "time", "rate", "work", "roofline", "× eager", "× compile", "note")
    rows = [head, *(row(s, device) for s in specs().values())]
    widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
    for line in rows:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
