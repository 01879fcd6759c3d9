r"""One decoding step's attention to a cache of pattern indices and low-bit residuals.

Keys are k̂_i = P[a_i] + s_G c_i + z_G with codes c, step s and minimum z of a channel in a group of
tokens; values v̂_i = V[b_i] + s_i c_i + z_i with those of a token. Neither is ever formed:

    logit_i = (q∘s)·c_i + q·z + u[a_i],  u = P q          o = Σ w_i (s_i c_i + z_i) + Σ_p h_p V[p]

u has P numbers a query, and h_p = Σ w_i [b_i = p] comes from a product with a one-hot matrix, so
that there are no atomics and two runs give the same bits.

A program takes one group of tokens for all query heads of a key head (padded to the 16 rows of a
product): it unpacks the bytes by shifts, multiplies, takes the softmax of its tokens and leaves
(m, l, o, h). A second kernel merges groups by log-sum-exp and adds Vᵀh; sinks and the
full-precision buffer are merged afterwards as further parts.

Bytes a token and key head, d channels, b bits, groups of d:

| | eager, dequantise and attend | fused |
|---|---|---|
| codes of key and value | 2 d b/8 | 2 d b/8 |
| steps and minima | 8 d/g | 8 d/g |
| indices | 2 | 2 |
| decoded keys and values, written and read in float16 | 8 d | none |
| logits and weights of a query | 8 | none |
| gathered pattern logits of a query | – | 4, from L1 |

At b = 2 and d = g = 128 that is 74 bytes beside more than 1.1 kB; a float16 cache has 512. The
limit is memory: a step reads the cache once, whatever the number of query heads that share it.

Source: "PatternKV: Flattening KV Representation Expands Quantization Headroom" (arXiv 2510.05176);
the kernel is our own.
"""

from typing import NamedTuple

import torch

from icmllab.kernels.runtime import (
    cdiv,
    check_dtype,
    check_same_device,
    jit,
    on_device,
    output,
    runs_triton,
    tl,
)

BITS = (1, 2, 4, 8)
PATTERNS = 32
"""Patterns of a one-hot tile."""

DTYPES = (torch.float16, torch.float32, torch.float64)
STORE = (torch.float16, torch.float32, torch.float64)


class Partial(NamedTuple):
    """Attention to the stored tokens, to be merged with others.

    Attributes:
        m: (B, Hq) largest logit.
        l: (B, Hq) Σ exp(logit − m).
        o: (B, Hq, d) Σ exp(logit − m) v̂, not divided by l.
    """

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor


@jit
def _codes(ptr, at, BITS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """(ROWS, BYTES · 8/BITS) codes of rows of packed bytes, lowest bits first."""
    PER: tl.constexpr = 8 // BITS
    packed = tl.load(ptr + at).to(tl.int32)
    shifts = tl.arange(0, PER) * BITS
    codes = (packed[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes, (ROWS, BYTES * PER))


@jit
def lowbit_attend_kernel(
    q_ptr,
    u_ptr,
    k_codes_ptr,
    k_scale_ptr,
    k_zero_ptr,
    k_index_ptr,
    v_codes_ptr,
    v_scale_ptr,
    v_zero_ptr,
    v_index_ptr,
    m_ptr,
    l_ptr,
    o_ptr,
    h_ptr,
    groups,
    ratio,
    P,
    V,
    scale,
    HALF: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One group of G tokens for the queries of one key head; grid (groups, B·H)."""
    K_BYTES: tl.constexpr = G * K_BITS // 8
    V_BYTES: tl.constexpr = D * V_BITS // 8
    group = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.arange(0, HEADS)
    mine = rows < ratio
    cols = tl.arange(0, D)
    tokens = tl.arange(0, G)
    block = head.to(tl.int64) * groups + group  # of all groups of all heads
    queries = head.to(tl.int64) * ratio + rows
    q = tl.load(q_ptr + queries[:, None] * D + cols[None, :], mask=mine[:, None], other=0.0)
    q = q.to(tl.float32)
    # keys: one step and minimum a channel
    step = tl.load(k_scale_ptr + block * D + cols).to(tl.float32)
    zero = tl.load(k_zero_ptr + block * D + cols).to(tl.float32)
    at = (block * D + cols)[:, None] * K_BYTES + tl.arange(0, K_BYTES)[None, :]
    codes = _codes(k_codes_ptr, at, K_BITS, D, K_BYTES)
    index = tl.load(k_index_ptr + block * G + tokens).to(tl.int32)
    u = tl.load(u_ptr + queries[:, None] * P + index[None, :], mask=mine[:, None], other=0.0)
    constant = tl.sum(q * zero[None, :], axis=1)
    if HALF:
        dots = tl.dot((q * step[None, :]).to(tl.float16), codes.to(tl.float16))
    else:
        dots = tl.dot(q * step[None, :], codes.to(tl.float32), input_precision="ieee")
    logits = (dots + constant[:, None] + u) * scale
    m = tl.max(logits, axis=1)
    w = tl.exp(logits - m[:, None])
    l = tl.sum(w, axis=1)
    # values: SPLITS steps and minima a token
    at = (block * G + tokens)[:, None] * V_BYTES + tl.arange(0, V_BYTES)[None, :]
    codes = _codes(v_codes_ptr, at, V_BITS, G, V_BYTES)
    parts = (block * G + tokens)[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    step = tl.load(v_scale_ptr + parts).to(tl.float32)
    zero = tl.load(v_zero_ptr + parts).to(tl.float32)
    values = tl.reshape(codes.to(tl.float32), (G, SPLITS, D // SPLITS))
    values = tl.reshape(values * step[:, :, None] + zero[:, :, None], (G, D))
    if HALF:
        o = tl.dot(w.to(tl.float16), values.to(tl.float16))
    else:
        o = tl.dot(w, values, input_precision="ieee")
    out = (block * ratio + rows).to(tl.int64)
    tl.store(m_ptr + out, m, mask=mine)
    tl.store(l_ptr + out, l, mask=mine)
    tl.store(o_ptr + out[:, None] * D + cols[None, :], o, mask=mine[:, None])
    index = tl.load(v_index_ptr + block * G + tokens).to(tl.int32)
    for start in range(0, V, TILE):
        names = start + tl.arange(0, TILE)
        hot = index[:, None] == names[None, :]
        if HALF:
            h = tl.dot(w.to(tl.float16), hot.to(tl.float16))
        else:
            h = tl.dot(w, hot.to(tl.float32), input_precision="ieee")
        keep = mine[:, None] & (names < V)[None, :]
        tl.store(h_ptr + out[:, None] * V + names[None, :], h, mask=keep)


@jit
def lowbit_merge_kernel(
    m_ptr,
    l_ptr,
    o_ptr,
    h_ptr,
    patterns_ptr,
    m_out_ptr,
    l_out_ptr,
    o_out_ptr,
    groups,
    ratio,
    V,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """All groups of one query head; grid (B·H, ratio)."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    cols = tl.arange(0, D)
    m = tl.load(m_ptr + head * groups * ratio + row)
    for group in range(1, groups):
        m = tl.maximum(m, tl.load(m_ptr + (head * groups + group) * ratio + row))
    l = 0.0
    o = tl.zeros((D,), dtype=tl.float32)
    for group in range(groups):
        at = (head * groups + group) * ratio + row
        f = tl.exp(tl.load(m_ptr + at) - m)
        l += f * tl.load(l_ptr + at)
        o += f * tl.load(o_ptr + at * D + cols)
    for start in range(0, V, TILE):
        names = start + tl.arange(0, TILE)
        here = names < V
        h = tl.zeros((TILE,), dtype=tl.float32)
        for group in range(groups):
            at = (head * groups + group) * ratio + row
            f = tl.exp(tl.load(m_ptr + at) - m)
            h += f * tl.load(h_ptr + at * V + names, mask=here, other=0.0)
        p = tl.load(
            patterns_ptr + (head * V + names)[:, None] * D + cols[None, :],
            mask=here[:, None],
            other=0.0,
        ).to(tl.float32)
        o += tl.sum(h[:, None] * p, axis=0)
    out = head * ratio + row
    tl.store(m_out_ptr + out, m)
    tl.store(l_out_ptr + out, l)
    tl.store(o_out_ptr + out * D + cols, o)


def settings(ratio: int) -> dict[str, int]:
    """Rows of a product and warps."""
    return {"HEADS": max(16, 1 << (ratio - 1).bit_length()), "TILE": PATTERNS, "num_warps": 8}


def fits(d: int, group: int, splits: int) -> bool:
    """Whether the kernel takes these sizes: powers of two, at least the 16 of a product."""
    whole = all(n & (n - 1) == 0 for n in (d, group, splits))
    return whole and 16 <= d <= 128 and 16 <= group <= 128


def launch(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    k_index: torch.Tensor,
    k_patterns: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    v_index: torch.Tensor,
    v_patterns: torch.Tensor,
    *,
    k_bits: int,
    v_bits: int,
    scale: float,
) -> Partial:
    """Run both Triton kernels on checked inputs, wherever they are."""
    B, Hq, d = q.shape
    H, groups = k_scale.shape[1:3]
    ratio, P, V = Hq // H, k_patterns.shape[2], v_patterns.shape[2]
    G = k_index.shape[2] // groups
    sizes = settings(ratio)
    parts = B * H * groups * ratio
    single = {"dtype": torch.float32, "device": q.device}
    m, l = output(parts, **single), output(parts, **single)
    o, h = output(parts, d, **single), output(parts, V, **single)
    ends = output(B, Hq, **single), output(B, Hq, **single), output(B, Hq, d, **single)
    u = torch.einsum(
        "bhrd,bhpd->bhrp", q.float().view(B, H, ratio, d), k_patterns.float()
    ).contiguous()
    with on_device(q):
        lowbit_attend_kernel[(groups, B * H)](
            q.contiguous(),
            u,
            k_codes.contiguous(),
            k_scale.contiguous(),
            k_zero.contiguous(),
            k_index.contiguous(),
            v_codes.contiguous(),
            v_scale.contiguous(),
            v_zero.contiguous(),
            v_index.contiguous(),
            m,
            l,
            o,
            h,
            groups,
            ratio,
            P,
            V,
            scale,
            HALF=q.dtype == torch.float16,
            K_BITS=k_bits,
            V_BITS=v_bits,
            G=G,
            D=d,
            SPLITS=v_scale.shape[3],
            **sizes,
        )
        lowbit_merge_kernel[(B * H, ratio)](
            m, l, o, h, v_patterns.contiguous(), *ends, groups, ratio, V, D=d, TILE=PATTERNS
        )
    return Partial(*ends)


def _unpack(codes: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, bits, device=codes.device)
    return ((codes[..., None].int() >> shifts) & ((1 << bits) - 1)).flatten(-2)[..., :n]


def decode(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    index: torch.Tensor,
    patterns: torch.Tensor,
    *,
    bits: int,
    keys: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(B, H, T, d) keys or values, written out."""
    d, T = patterns.shape[3], index.shape[2]
    if keys:  # (B, H, groups, d, tokens of a group)
        x = _unpack(codes, bits, T // max(scale.shape[2], 1)).to(dtype)
        x = x * scale.to(dtype)[..., None] + zero.to(dtype)[..., None]
        x = x.transpose(3, 4).reshape(*index.shape[:2], T, d)
    else:  # (B, H, T, splits, channels of a split)
        x = _unpack(codes, bits, d // scale.shape[3]).to(dtype)
        x = (x * scale.to(dtype)[..., None] + zero.to(dtype)[..., None]).flatten(3)
    rows = index.long()[..., None].expand(*index.shape, d)
    return x + patterns.to(dtype).gather(2, rows)


def reference(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    k_index: torch.Tensor,
    k_patterns: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    v_index: torch.Tensor,
    v_patterns: torch.Tensor,
    *,
    k_bits: int,
    v_bits: int,
    scale: float,
) -> Partial:
    """The same in plain PyTorch without decoding either, in float32 or wider."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, Hq, d = q.shape
    H, groups = k_scale.shape[1:3]
    T, ratio = k_index.shape[2], Hq // H
    x = q.to(wide).view(B, H, ratio, d)
    codes = _unpack(k_codes, k_bits, T // groups).to(wide)
    scaled = x[:, :, None] * k_scale.to(wide)[:, :, :, None]  # (B, H, groups, ratio, d)
    logits = scaled @ codes
    logits += (k_zero.to(wide) @ x.mT)[..., None]
    logits = logits.transpose(2, 3).reshape(B, H, ratio, T)
    u = x @ k_patterns.to(wide).mT
    logits += u.gather(3, k_index.long()[:, :, None].expand(B, H, ratio, T))
    logits *= scale
    m = logits.amax(dim=3)
    w = (logits - m[..., None]).exp()
    codes = _unpack(v_codes, v_bits, d // v_scale.shape[3]).to(wide)
    values = codes * v_scale.to(wide)[..., None] + v_zero.to(wide)[..., None]
    o = w @ values.flatten(3)
    h = w.new_zeros(B, H, ratio, v_patterns.shape[2])
    h.scatter_add_(3, v_index.long()[:, :, None].expand(B, H, ratio, T), w)
    o += h @ v_patterns.to(wide)
    return Partial(m.view(B, Hq), w.sum(dim=3).view(B, Hq), o.view(B, Hq, d))


def lowbit_attend(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    k_index: torch.Tensor,
    k_patterns: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    v_index: torch.Tensor,
    v_patterns: torch.Tensor,
    *,
    k_bits: int,
    v_bits: int,
    scale: float,
) -> Partial:
    """Attention of one query a head to T stored tokens, T in groups of g.

    Args:
        q: (B, Hq, d) float16, float32 or float64, Hq a multiple of H.
        k_codes: (B, H, T/g, d, g·k_bits/8) uint8, packed along tokens, lowest bits first.
        k_scale: (B, H, T/g, d) steps.
        k_zero: (B, H, T/g, d) minima.
        k_index: (B, H, T) uint8, pattern of each key; not checked.
        k_patterns: (B, H, P, d).
        v_codes: (B, H, T, s, d·v_bits/(8 s)) uint8, packed along channels.
        v_scale: (B, H, T, s) steps of s parts of the channels.
        v_zero: (B, H, T, s) minima.
        v_index: (B, H, T) uint8; not checked.
        v_patterns: (B, H, V, d).
        k_bits: 1, 2, 4 or 8.
        v_bits: 1, 2, 4 or 8.
        scale: of the logits.

    Returns:
        (m, l, o) in float32, or float64 for float64 queries. On a GPU float16 and float32 queries
        run the kernels where d and g are powers of two from 16 to 128.

    Raises:
        ValueError: shapes, dtypes, devices or bits that do not fit, or no stored token.
    """
    if q.ndim != 3 or k_index.ndim != 3 or k_scale.ndim != 4 or v_scale.ndim != 4:
        raise ValueError(
            "q must be (B, Hq, d), indices (B, H, T), scales (B, H, ·, ·): got "
            f"{tuple(q.shape)}, {tuple(k_index.shape)}, {tuple(k_scale.shape)}, "
            f"{tuple(v_scale.shape)}"
        )
    (B, Hq, d), (_, H, T) = q.shape, k_index.shape
    groups, splits = k_scale.shape[2], v_scale.shape[3]
    if not T or not groups or T % groups or Hq % H:
        raise ValueError(
            f"k_index must hold T >= 1 tokens in whole groups, and q a multiple of {H} heads: got "
            f"T = {T}, {groups} groups, {Hq} heads"
        )
    for name, bits in (("k_bits", k_bits), ("v_bits", v_bits)):
        if bits not in BITS:
            raise ValueError(f"{name} must be one of {BITS}: got {bits}")
    g, part = T // groups, d // splits
    wanted = {
        "k_codes": (k_codes, (B, H, groups, d, cdiv(g * k_bits, 8))),
        "k_scale": (k_scale, (B, H, groups, d)),
        "k_zero": (k_zero, (B, H, groups, d)),
        "k_index": (k_index, (B, H, T)),
        "k_patterns": (k_patterns, (B, H, k_patterns.shape[2], d)),
        "v_codes": (v_codes, (B, H, T, splits, cdiv(part * v_bits, 8))),
        "v_scale": (v_scale, (B, H, T, splits)),
        "v_zero": (v_zero, (B, H, T, splits)),
        "v_index": (v_index, (B, H, T)),
        "v_patterns": (v_patterns, (B, H, v_patterns.shape[2], d)),
    }
    for name, (value, shape) in wanted.items():
        if value.shape != shape:
            raise ValueError(f"{name} must be {shape}: got {tuple(value.shape)}")
        whole = name.endswith(("codes", "index"))
        check_dtype(name, value, (torch.uint8,) if whole else STORE)
    check_dtype("q", q, DTYPES)
    check_same_device(q=q, **{name: value for name, (value, _) in wanted.items()})
    tensors = [value for value, _ in wanted.values()]
    stored = torch.float64 in {t.dtype for t in tensors}
    fused = q.dtype != torch.float64 and not stored and runs_triton(q, *tensors)
    whole = g * k_bits % 8 == 0 and part * v_bits % 8 == 0
    run = launch if fused and whole and fits(d, g, splits) else reference
    return run(q, *tensors, k_bits=k_bits, v_bits=v_bits, scale=scale)
