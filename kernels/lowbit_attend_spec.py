"""The proofs of :mod:`icmllab.kernels.lowbit_attend`: both of its kernels."""

import torch

from icmllab.kernels import lowbit_attend as kernel
from icmllab.kernels.lowbit_attend import lowbit_attend
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program

HALF = torch.float16
OPTIONS = ("k_bits", "v_bits", "scale")


def _make(
    g: torch.Generator,
    *,
    H: int = 1,
    ratio: int = 1,
    d: int = 64,
    group: int = 32,
    groups: int = 2,
    P: int = 5,
    V: int = 7,
    k_bits: int = 2,
    v_bits: int = 2,
    splits: int = 1,
    B: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    T = group * groups

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(256, shape, generator=g).to(torch.uint8)

    def reals(*shape: int, positive: bool = False) -> torch.Tensor:
        x = torch.randn(*shape, generator=g)
        return (0.1 + x.abs() / 4 if positive else x).to(HALF)

    return {
        "q": torch.randn(B, H * ratio, d, generator=g).to(dtype),
        "k_codes": codes(B, H, groups, d, group * k_bits // 8),
        "k_scale": reals(B, H, groups, d, positive=True),
        "k_zero": reals(B, H, groups, d),
        "k_index": torch.randint(P, (B, H, T), generator=g).to(torch.uint8),
        "k_patterns": reals(B, H, P, d),
        "v_codes": codes(B, H, T, splits, d * v_bits // 8 // splits),
        "v_scale": reals(B, H, T, splits, positive=True),
        "v_zero": reals(B, H, T, splits),
        "v_index": torch.randint(V, (B, H, T), generator=g).to(torch.uint8),
        "v_patterns": reals(B, H, V, d),
        "k_bits": k_bits,
        "v_bits": v_bits,
        "scale": d**-0.5,
    }


def _case(*, dtype: torch.dtype = torch.float32, constant: bool = False, **sizes: int) -> Case:
    def make(g: torch.Generator) -> Inputs:
        made = _make(g, dtype=dtype, **sizes)
        if constant:  # a step of 0: codes say nothing
            made["k_scale"][:] = 0
            made["v_scale"][:] = 0
        return made

    return Case(make, (1e-6,) * 3 if dtype == torch.float32 else (1e-3,) * 3)


def _split(x: Inputs) -> tuple[dict, dict]:
    return {k: v for k, v in x.items() if k not in OPTIONS}, {k: x[k] for k in OPTIONS}


def _written_out(x: Inputs, *, absolute: bool = False) -> Outputs:
    """Keys and values decoded, then plain attention."""
    q = x["q"].double()
    Hq = q.shape[1]
    made = []
    for side in "kv":
        parts = [x[f"{side}_{n}"] for n in ("codes", "scale", "zero", "index", "patterns")]
        bits = x[f"{side}_bits"]
        made.append(kernel.decode(*parts, bits=bits, keys=side == "k", dtype=torch.float64))
    ratio = Hq // x["k_index"].shape[1]
    k, v = (t.repeat_interleave(ratio, dim=1) for t in made)
    logits = (k @ q[..., None])[..., 0] * x["scale"]
    m = logits.amax(dim=2)
    w = (logits - m[..., None]).exp()
    if not absolute:
        return m, w.sum(dim=2), (w[:, :, None] @ v)[:, :, 0]
    size = (k.abs() @ q.abs()[..., None])[..., 0].amax(dim=2) * x["scale"]
    total = 1 + size
    return total, w.sum(dim=2) * total, (w[:, :, None] @ v.abs())[:, :, 0] * total[..., None]


def _bytes(x: Inputs) -> int:
    """A group once for all its queries; then what the groups left, maxima one more time a pass."""
    B, Hq, d = x["q"].shape
    groups = x["k_scale"].shape[2]
    T, V = x["k_index"].shape[2], x["v_patterns"].shape[2]
    e = x["q"].element_size()
    stored = sum(x[n].numel() for n in ("k_codes", "v_codes", "k_index", "v_index"))
    stored += 2 * sum(x[n].numel() for n in ("k_scale", "k_zero", "v_scale", "v_zero"))
    queries = B * Hq * (groups * d * e + 4 * T)  # and a pattern logit a token
    left = B * Hq * groups * 4 * (2 + d + V)
    passes = -(-V // kernel.PATTERNS)
    merged = B * Hq * (4 * groups * (2 + passes) + 4 * groups * (1 + d + V) + 2 * V * d)
    return stored + queries + left + merged + B * Hq * 4 * (2 + d)


def _eager(x: Inputs) -> Outputs:
    """Decode, then attend."""
    tensors, _ = _split(x)
    wide = torch.float64 if x["q"].dtype == torch.float64 else torch.float32
    q = x["q"].to(wide)
    made = []
    for side in "kv":
        parts = [tensors[f"{side}_{n}"] for n in ("codes", "scale", "zero", "index", "patterns")]
        bits = x[f"{side}_bits"]
        made.append(kernel.decode(*parts, bits=bits, keys=side == "k", dtype=wide))
    ratio = q.shape[1] // x["k_index"].shape[1]
    k, v = (t.repeat_interleave(ratio, dim=1) for t in made)
    logits = (k @ q[..., None])[..., 0] * x["scale"]
    m = logits.amax(dim=2)
    w = (logits - m[..., None]).exp()
    return m, w.sum(dim=2), (w[:, :, None] @ v)[:, :, 0]


def _program(
    dtype: str = "fp16", *, bits: int = 2, d: int = 128, group: int = 128, ratio: int = 4
) -> Program:
    half = dict.fromkeys(("k_scale_ptr", "k_zero_ptr", "v_scale_ptr", "v_zero_ptr"), "*fp16")
    byte = dict.fromkeys(("k_codes_ptr", "k_index_ptr", "v_codes_ptr", "v_index_ptr"), "*u8")
    left = dict.fromkeys(("u_ptr", "m_ptr", "l_ptr", "o_ptr", "h_ptr"), "*fp32")
    types = {
        "q_ptr": f"*{dtype}",
        **half,
        **byte,
        **left,
        **dict.fromkeys(("groups", "ratio", "P", "V"), "i32"),
        "scale": "fp32",
    }
    sizes = kernel.settings(ratio)
    num_warps = sizes.pop("num_warps")
    constants = {"HALF": dtype == "fp16", "K_BITS": bits, "V_BITS": bits, "G": group, "D": d}
    return Program(
        kernel.lowbit_attend_kernel,
        types,
        {**constants, "SPLITS": 1, **sizes},
        tuple(a for a in types if a.endswith("_ptr")),
        num_warps=num_warps,
        # codes of keys and of values; with 2 bits AMD's wider warps have 8 bytes a thread
        wide_loads=2 * d * group * bits // 8 if bits == 4 else 0,
    )


def _merge_program(d: int = 128) -> Program:
    names = ("m_ptr", "l_ptr", "o_ptr", "h_ptr", "m_out_ptr", "l_out_ptr", "o_out_ptr")
    types = {
        **dict.fromkeys(names, "*fp32"),
        "patterns_ptr": "*fp16",
        **dict.fromkeys(("groups", "ratio", "V"), "i32"),
    }
    return Program(
        kernel.lowbit_merge_kernel,
        types,
        {"D": d, "TILE": kernel.PATTERNS},
        tuple(a for a in types if a.endswith("_ptr")),
    )


def _good() -> Inputs:
    return _make(torch.Generator().manual_seed(0))


def _bad(message: str, **change: object) -> BadCall:
    return BadCall(lambda: lowbit_attend(**{**_good(), **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    made = _make(g, H=8, ratio=4, d=128, group=128, groups=256, P=32, V=32, B=4, dtype=HALF)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}


SPEC = KernelSpec(
    name="lowbit_attend",
    op=lambda x: tuple(lowbit_attend(**x)),
    launch=lambda x: tuple(kernel.launch(**x)),
    truth=_written_out,
    scale=lambda x: _written_out(x, absolute=True),
    cases={
        "one group": _case(groups=1),
        "d=128 g=128": _case(d=128, group=128, groups=2),
        "4 query heads": _case(H=2, ratio=4),
        "7 query heads": _case(ratio=7, B=2),
        "1 bit": _case(k_bits=1, v_bits=1, group=64),
        "4 bit": _case(k_bits=4, v_bits=4),
        "8 and 1 bit": _case(k_bits=8, v_bits=1, group=16),
        "one pattern": _case(P=1, V=1),
        "40 value patterns": _case(P=200, V=40, groups=3),
        "values in two parts": _case(splits=2),
        "d=16 g=16": _case(d=16, group=16, groups=5),
        "constant groups": _case(constant=True),
        "float16": _case(dtype=HALF, H=2, ratio=4, d=128, group=128),
    },
    bytes=_bytes,
    flops=lambda x: 4 * x["q"].numel() * x["k_index"].shape[2],
    programs={
        "fp16 2 bit": _program(),
        "fp16 4 bit": _program(bits=4),
        "fp16 1 bit": _program(bits=1),
        "fp16 d=64": _program(d=64, group=64),
        "fp32 2 bit": _program("fp32", d=64, group=32),
        "merge": _merge_program(),
    },
    errors={
        "q of another rank": _bad("q must be", q=torch.ones(64)),
        "q of integers": _bad("q must have dtype", q=torch.ones(1, 1, 64).long()),
        "no tokens": _bad("T >= 1", k_index=torch.ones(1, 1, 0).byte()),
        "bits": _bad("k_bits must be", k_bits=3),
        "codes of another size": _bad("k_codes must be", k_codes=torch.ones(1, 1, 2, 64, 9).byte()),
        "zero of another size": _bad("v_zero must be", v_zero=torch.ones(1, 1, 64, 2)),
        "index of another dtype": _bad("v_index must have", v_index=torch.ones(1, 1, 64)),
        "patterns of other channels": _bad("k_patterns must", k_patterns=torch.ones(1, 1, 5, 32)),
        "scale in integers": _bad("k_scale must have", k_scale=torch.ones(1, 1, 2, 64).long()),
        "elsewhere": _bad("must share a device", v_zero=torch.ones(1, 1, 64, 1, device="meta")),
    },
    bench=_bench,
    timed=lambda x: lowbit_attend(**x).o,
    baselines={"eager": _eager},
    note="memory sets the limit: 74 bytes a token and head at 2 bits, beside 512 in float16",
)
