"""The proofs of :mod:`icmllab.kernels.align_quantize`."""

import torch

from icmllab.kernels import align_quantize as kernel
from icmllab.kernels.align_quantize import Aligned, align_quantize
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv

HALF = torch.float16


def _case(
    N: int,
    T: int,
    d: int,
    P: int,
    *,
    bits: int = 2,
    group_size: int = 32,
    keys: bool = True,
    dtype: torch.dtype = torch.float32,
    few: bool = False,
    constant: bool = False,
    ties: bool = False,
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        patterns = (2 * torch.randn(N, P, d, generator=g)).half()
        near = torch.randint(P, (N, T), generator=g)
        x = patterns.float().gather(1, near[..., None].expand(N, T, d))
        x = x + 0.5 * torch.randn(N, T, d, generator=g)
        if constant:  # channels (or tokens) on their pattern: a step of 0
            exact = patterns.float().gather(1, near[..., None].expand(N, T, d))
            x[..., ::2] = exact[..., ::2]
            x[:, ::2] = exact[:, ::2]
        if ties:  # every pattern twice: the lower index
            patterns = patterns[:, : cdiv(P, 2)].repeat(1, 2, 1)[:, :P].contiguous()
        count = torch.full((N,), max(1, P // 2) if few else P, dtype=torch.int32)
        made = {"x": x.to(dtype), "patterns": patterns, "count": count}
        return {**made, "bits": bits, "group_size": group_size, "keys": keys}

    return Case(make, (0.0, 0.0, 0.0, 0.0))


def _outputs(found: Aligned) -> Outputs:
    return tuple(t.double() for t in found)


def _truth(x: Inputs) -> Outputs:
    """In float32 as the kernel: a step that rounds the other way in float64 would be no error."""
    options = {n: x[n] for n in ("bits", "group_size", "keys")}
    return _outputs(kernel.reference(x["x"].float(), x["patterns"], x["count"], **options))


def _bytes(x: Inputs) -> int:
    """Rows, a head's patterns for each 16 tokens, the chosen ones, and what comes out.

    Keys read rows, indices and chosen patterns a second time.
    """
    (N, T, d), e = x["x"].shape, x["x"].element_size()
    size = x["patterns"].element_size()
    programs = N * T // (x["group_size"] if x["keys"] else kernel.SUB)
    twice = 2 if x["keys"] else 1
    tables = T // kernel.SUB * size * d * int(x["count"].sum())
    read = twice * N * T * d * (e + size) + tables + 4 * programs + (twice - 1) * N * T
    return read + N * T + N * T * d * x["bits"] // 8 + 4 * N * T * d // x["group_size"]


def _eager(x: Inputs) -> Outputs:
    """Distances by cdist, then group by group."""
    wide = torch.float64 if x["x"].dtype == torch.float64 else torch.float32
    v, p = x["x"].to(wide), x["patterns"].to(wide)
    options = {n: x[n] for n in ("bits", "group_size", "keys")}
    return _outputs(kernel.reference(v, p, x["count"], **options))


def _program(
    *, x: str = "fp16", bits: int = 2, d: int = 128, group: int = 128, keys: bool = True
) -> Program:
    types = {
        "x_ptr": f"*{x}",
        "patterns_ptr": "*fp16",
        "count_ptr": "*i32",
        "index_ptr": "*u8",
        "codes_ptr": "*u8",
        "scale_ptr": "*fp16",
        "zero_ptr": "*fp16",
        "groups": "i32",
        "P": "i32",
    }
    own = {"G": group} if keys else {"SPLITS": d // min(group, d)}
    sizes = {"BITS": bits, "D": d, "SUB": kernel.SUB, "TILE": kernel.TILE}
    return Program(
        kernel.align_keys_kernel if keys else kernel.align_values_kernel,
        types,
        {**sizes, **own},
        tuple(a for a in types if a.endswith("_ptr")),
        num_warps=kernel.WARPS[keys],
        # with 64 channels AMD's wider warps have less than 16 bytes a thread
        wide_loads=2 * kernel.SUB * d if d == 128 else 0,
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "x": torch.ones(2, 32, 16),
        "patterns": torch.ones(2, 3, 16),
        "count": torch.tensor([3, 2]).int(),
        "bits": 2,
        "group_size": 16,
        "keys": True,
    }
    return BadCall(lambda: align_quantize(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    made = _case(256, 1024, 128, 32, group_size=128, dtype=HALF).make(g)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}


SPEC = KernelSpec(
    name="align_quantize",
    op=lambda x: _outputs(align_quantize(**x)),
    launch=lambda x: _outputs(kernel.launch(**x)),
    truth=_truth,
    scale=lambda x: tuple(torch.ones_like(t) for t in _truth(x)),
    cases={
        "keys": _case(2, 64, 32, 5),
        "keys g=128 d=128": _case(1, 128, 128, 32, group_size=128),
        "keys 1 bit": _case(2, 64, 16, 3, bits=1),
        "keys 4 bit": _case(1, 32, 64, 33, bits=4),
        "keys 8 bit": _case(1, 32, 16, 2, bits=8, group_size=16),
        "one pattern": _case(2, 32, 16, 1),
        "70 patterns": _case(1, 64, 32, 70),
        "a bank half full": _case(3, 32, 16, 40, few=True),
        "constant channels": _case(2, 32, 16, 4, constant=True),
        "equal patterns": _case(1, 64, 16, 40, ties=True),
        "values": _case(2, 64, 32, 5, keys=False),
        "values in two parts": _case(2, 32, 64, 5, keys=False),
        "values 4 bit, 16 tokens": _case(1, 16, 32, 7, keys=False, bits=4),
        "values constant": _case(2, 32, 32, 4, keys=False, constant=True),
        "float16": _case(2, 64, 64, 9, dtype=HALF),
        "float16 values": _case(2, 64, 64, 9, dtype=HALF, keys=False, group_size=64),
    },
    bytes=_bytes,
    flops=lambda x: 2 * x["x"].numel() * x["patterns"].shape[1],
    programs={
        "fp16 keys": _program(),
        "fp16 values": _program(keys=False),
        "fp16 keys 4 bit": _program(bits=4),
        "fp32 keys d=64": _program(x="fp32", d=64, group=64),
    },
    errors={
        "x a matrix": _bad("x must be", x=torch.ones(32, 16)),
        "x of integers": _bad("x must have dtype", x=torch.ones(2, 32, 16).long()),
        "patterns of other channels": _bad("patterns must be", patterns=torch.ones(2, 3, 8)),
        "257 patterns": _bad("patterns must be", patterns=torch.ones(2, 257, 16)),
        "count of another size": _bad("count must be", count=torch.ones(3).int()),
        "count too large": _bad("count must be in", count=torch.tensor([4, 1]).int()),
        "count of another dtype": _bad("count must have", count=torch.ones(2)),
        "bits": _bad("bits must be", bits=3),
        "group_size": _bad("group_size must", group_size=24),
        "elsewhere": _bad("must share a device", patterns=torch.ones(2, 3, 16, device="meta")),
    },
    bench=_bench,
    timed=lambda x: align_quantize(**x).codes,
    baselines={"eager": _eager},
    note="a flush happens once in 128 tokens; reading the buffer once is what counts",
)
