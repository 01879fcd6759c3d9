r"""A flush of the cache: nearest pattern, subtract it, quantise what is left, pack.

    a_i = argmin_p ‖x_i − P_p‖²,   r_i = x_i − P[a_i]
    s = (max r − min r)/(2^b − 1),   q = round((r − min r)/s)

Keys have one step and minimum for each channel of a group of tokens, values for each token and part
of its channels. Steps and minima are rounded to float16 *before* the codes are computed, since they
are what decoding will use.

Bytes for T tokens of d channels, P patterns, in float32 in and b bits out:

| | eager | fused |
|---|---|---|
| rows read: distances, residual | 8 T d | 4 T d; keys again for the codes, from L2 |
| (T, P) distances written and read | 8 T P | none |
| residual written, read for the range, read for the codes | 12 T d | none |
| patterns, from L2 | 4 P d, 4 T d gathered | 4 P d each 16 tokens, 4 T d gathered (keys twice) |
| codes before packing, written and read | 2 T d | none |
| out: codes, steps and minima, indices | T d b/8 + 4 T d/g + T | the same |

A program of keys goes through its group of tokens 16 at a time, once for the range of each channel
and once for the codes; one of values needs its 16 tokens only once. Distances come from IEEE
float32 products with tiles of 32 patterns, which are the limit while P is large; for P = 32 it is
memory.
Rounding is half to even, by adding 1.5·2²³ and taking it away again.

Source: "PatternKV: Flattening KV Representation Expands Quantization Headroom" (arXiv 2510.05176);
the kernel is our own.
"""

from typing import NamedTuple

import torch

from icmllab.kernels.runtime import (
    check_dtype,
    check_same_device,
    jit,
    on_device,
    output,
    runs_triton,
    tl,
)

BITS = (1, 2, 4, 8)
TILE = 32
DTYPES = (torch.float16, torch.float32, torch.float64)


class Aligned(NamedTuple):
    """Residuals in few bits.

    Attributes:
        index: (N, T) uint8, the pattern of each row.
        codes: keys (N, T/g, d, g·b/8), values (N, T, d/g, g·b/8) uint8, lowest bits first.
        scale: keys (N, T/g, d), values (N, T, d/g) float16.
        zero: likewise, minima.
    """

    index: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


@jit
def _pack(codes, ROWS: tl.constexpr, COLS: tl.constexpr, BITS: tl.constexpr):
    """(ROWS, COLS · BITS/8) bytes of (ROWS, COLS) codes."""
    PER: tl.constexpr = 8 // BITS
    split = tl.reshape(codes, (ROWS, COLS // PER, PER))
    shifts = tl.arange(0, PER) * BITS
    return tl.sum(split << shifts[None, None, :], axis=2)


@jit
def _align(
    x_ptr,
    patterns_ptr,
    rows,
    head,
    count,
    P,
    D: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows, the nearest pattern of each, and what is left of them."""
    cols = tl.arange(0, D)
    x = tl.load(x_ptr + rows[:, None] * D + cols[None, :]).to(tl.float32)
    best = tl.full((SUB,), float("inf"), dtype=tl.float32)
    index = tl.zeros((SUB,), dtype=tl.int32)
    for start in tl.range(0, P, TILE, num_stages=1):
        names = start + tl.arange(0, TILE)
        here = names < count
        p = tl.load(
            patterns_ptr + (head * P + names)[:, None] * D + cols[None, :],
            mask=here[:, None],
            other=0.0,
        ).to(tl.float32)
        dots = tl.dot(x, tl.trans(p), input_precision="ieee")
        far = tl.where(here, tl.sum(p * p, axis=1), float("inf"))
        first, where = tl.min(
            far[None, :] - 2.0 * dots,
            axis=1,
            return_indices=True,
            return_indices_tie_break_left=True,
        )
        index = tl.where(first < best, start + where, index)
        best = tl.minimum(best, first)
    return index, x


@jit
def _levels(r, step, zero, TOP: tl.constexpr):
    """Codes of residuals with their steps and minima, both of the shape of r."""
    MAGIC: tl.constexpr = 12582912.0  # 1.5 · 2²³: to the nearest whole number, half to even
    u = tl.div_rn(r - zero, tl.where(step > 0, step, 1.0))
    q = tl.minimum(tl.maximum((u + MAGIC) - MAGIC, 0.0), TOP)
    return tl.where(step > 0, q, 0.0).to(tl.int32)


@jit
def align_keys_kernel(
    x_ptr,
    patterns_ptr,
    count_ptr,
    index_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    groups,
    P,
    BITS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
):
    """G tokens of one head, SUB at a time: once for the range, once for codes.

    Grid (token groups, heads).
    """
    TOP: tl.constexpr = (1 << BITS) - 1
    BYTES: tl.constexpr = G * BITS // 8
    PIECE: tl.constexpr = SUB * BITS // 8
    head = tl.program_id(1).to(tl.int64)
    block = head * groups + tl.program_id(0)
    cols = tl.arange(0, D)
    count = tl.load(count_ptr + head)
    low = tl.full((D,), float("inf"), dtype=tl.float32)
    high = tl.full((D,), float("-inf"), dtype=tl.float32)
    for sub in tl.range(0, G // SUB, num_stages=1):
        rows = block * G + sub * SUB + tl.arange(0, SUB)
        index, x = _align(x_ptr, patterns_ptr, rows, head, count, P, D, SUB, TILE)
        tl.store(index_ptr + rows, index.to(tl.uint8))
        nearest = (head * P + index)[:, None] * D + cols[None, :]
        r = x - tl.load(patterns_ptr + nearest).to(tl.float32)
        low = tl.minimum(low, tl.min(r, axis=0))
        high = tl.maximum(high, tl.max(r, axis=0))
    step = ((high - low) / TOP).to(tl.float16)
    zero = low.to(tl.float16)
    tl.store(scale_ptr + block * D + cols, step)
    tl.store(zero_ptr + block * D + cols, zero)
    tl.debug_barrier()  # indices that other threads wrote are read below
    for sub in tl.range(0, G // SUB, num_stages=1):
        rows = block * G + sub * SUB + tl.arange(0, SUB)
        x = tl.load(x_ptr + rows[:, None] * D + cols[None, :]).to(tl.float32)
        index = tl.load(index_ptr + rows).to(tl.int32)
        nearest = (head * P + index)[:, None] * D + cols[None, :]
        r = x - tl.load(patterns_ptr + nearest).to(tl.float32)
        flat = tl.zeros_like(r)
        q = _levels(
            r,
            flat + step.to(tl.float32)[None, :],
            flat + zero.to(tl.float32)[None, :],
            TOP,
        )
        packed = _pack(tl.trans(q), D, SUB, BITS)
        at = (block * D + cols)[:, None] * BYTES + sub * PIECE + tl.arange(0, PIECE)[None, :]
        tl.store(codes_ptr + at, packed.to(tl.uint8))


@jit
def align_values_kernel(
    x_ptr,
    patterns_ptr,
    count_ptr,
    index_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    groups,
    P,
    BITS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
):
    """SUB tokens of one head; grid (token blocks, heads)."""
    TOP: tl.constexpr = (1 << BITS) - 1
    BYTES: tl.constexpr = D * BITS // 8
    head = tl.program_id(1).to(tl.int64)
    rows = (head * groups + tl.program_id(0)) * SUB + tl.arange(0, SUB)
    cols = tl.arange(0, D)
    count = tl.load(count_ptr + head)
    index, x = _align(x_ptr, patterns_ptr, rows, head, count, P, D, SUB, TILE)
    tl.store(index_ptr + rows, index.to(tl.uint8))
    nearest = (head * P + index)[:, None] * D + cols[None, :]
    r = x - tl.load(patterns_ptr + nearest).to(tl.float32)
    parts = tl.reshape(r, (SUB, SPLITS, D // SPLITS))
    low = tl.min(parts, axis=2)
    step = ((tl.max(parts, axis=2) - low) / TOP).to(tl.float16)
    zero = low.to(tl.float16)
    slots = rows[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    tl.store(scale_ptr + slots, step)
    tl.store(zero_ptr + slots, zero)
    flat = tl.zeros_like(parts)
    q = _levels(
        parts,
        flat + step.to(tl.float32)[:, :, None],
        flat + zero.to(tl.float32)[:, :, None],
        TOP,
    )
    packed = _pack(tl.reshape(q, (SUB, D)), SUB, D, BITS)
    at = rows[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    tl.store(codes_ptr + at, packed.to(tl.uint8))


WARPS = {True: 8, False: 4}
"""Of a program of keys, and of values."""

SUB = 16
"""Tokens whose distances a program holds at once; more would leave its registers no room."""


def launch(
    x: torch.Tensor,
    patterns: torch.Tensor,
    count: torch.Tensor,
    *,
    bits: int,
    group_size: int,
    keys: bool,
) -> Aligned:
    """Run the Triton kernel on checked inputs, wherever they are."""
    (N, T, d), P = x.shape, patterns.shape[1]
    parts = 1 if keys else d // group_size
    index = output(N, T, dtype=torch.uint8, device=x.device)
    lead = (N, T // group_size, d) if keys else (N, T, parts)
    codes = output(*lead, group_size * bits // 8, dtype=torch.uint8, device=x.device)
    scale = output(*lead, dtype=torch.float16, device=x.device)
    zero = output(*lead, dtype=torch.float16, device=x.device)
    blocks = T // group_size if keys else T // SUB
    made = (index, codes, scale, zero)
    tensors = (x.contiguous(), patterns.contiguous(), count.contiguous(), *made)
    sizes = {"BITS": bits, "D": d, "SUB": SUB, "TILE": TILE, "num_warps": WARPS[keys]}
    with on_device(x):
        if keys:
            align_keys_kernel[(blocks, N)](*tensors, blocks, P, G=group_size, **sizes)
        else:
            align_values_kernel[(blocks, N)](*tensors, blocks, P, SPLITS=parts, **sizes)
    return Aligned(*made)


def nearest(x: torch.Tensor, patterns: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """(N, T) int64, the nearest of each head's first ``count`` patterns; ties to the lowest."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    p = patterns.to(wide)
    beyond = torch.arange(p.shape[1], device=p.device) >= count[:, None]
    far = p.square().sum(dim=2).masked_fill(beyond, torch.inf)
    return (far[:, None] - 2 * (x.to(wide) @ p.mT)).argmin(dim=2)


def reference(
    x: torch.Tensor,
    patterns: torch.Tensor,
    count: torch.Tensor,
    *,
    bits: int,
    group_size: int,
    keys: bool,
) -> Aligned:
    """The same in plain PyTorch, in float32 (float64 for float64); steps in float16 either way."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    N, T, d = x.shape
    index = nearest(x, patterns, count)
    r = x.to(wide) - patterns.to(wide).gather(1, index[..., None].expand(N, T, d))
    g = group_size
    r = r.view(N, T // g, g, d).transpose(2, 3) if keys else r.view(N, T, d // g, g)
    low, high = r.aminmax(dim=-1)
    top = (1 << bits) - 1
    scale, zero = ((high - low) / top).half(), low.half()
    s = scale.to(wide)[..., None]
    q = ((r - zero.to(wide)[..., None]) / torch.where(s > 0, s, 1.0)).round().clamp(0, top)
    q = torch.where(s > 0, q, 0.0).int().unflatten(-1, (g * bits // 8, 8 // bits))
    packed = (q << torch.arange(0, 8, bits, device=x.device)).sum(dim=-1)
    return Aligned(index.to(torch.uint8), packed.to(torch.uint8), scale, zero)


def fits(d: int, group_size: int) -> bool:
    """Whether the kernel takes these sizes: powers of two, at least the 16 of a product."""
    return all(n & (n - 1) == 0 and 16 <= n <= 128 for n in (d, group_size))


def align_quantize(
    x: torch.Tensor,
    patterns: torch.Tensor,
    count: torch.Tensor,
    *,
    bits: int,
    group_size: int,
    keys: bool,
) -> Aligned:
    """Align rows with patterns and quantise the residuals.

    Args:
        x: (N, T, d) float16, float32 or float64, N heads.
        patterns: (N, P, d) of the same kinds, P <= 256, already rounded to what is stored.
        count: (N,) int32, how many of them a head has, 1 <= count <= P; not checked on a GPU.
        bits: 1, 2, 4 or 8.
        group_size: g: tokens that share a step (keys), or channels (values).
        keys: by channel over g tokens, or else by token over g channels.

    Returns:
        Indices, packed codes, steps and minima in float16. On a GPU float16 and float32 rows run
        the kernel where d and g are powers of two from 16 to 128.

    Raises:
        ValueError: shapes, dtypes, devices or settings that do not fit.
    """
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"x must be (N, T, d), not empty: got {tuple(x.shape)}")
    N, T, d = x.shape
    if patterns.ndim != 3 or patterns.shape[::2] != (N, d) or not 1 <= patterns.shape[1] <= 256:
        raise ValueError(f"patterns must be ({N}, 1..256, {d}): got {tuple(patterns.shape)}")
    if count.shape != (N,):
        raise ValueError(f"count must be ({N},): got {tuple(count.shape)}")
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}: got {bits}")
    if group_size < 1 or (T if keys else d) % group_size or group_size * bits % 8:
        raise ValueError(
            f"group_size must divide {T if keys else d} and fill bytes at {bits} bits: "
            f"got {group_size}"
        )
    check_dtype("x", x, DTYPES)
    check_dtype("patterns", patterns, DTYPES)
    check_dtype("count", count, (torch.int32,))
    check_same_device(x=x, patterns=patterns, count=count)
    if not count.is_cuda and not bool(((count >= 1) & (count <= patterns.shape[1])).all()):
        raise ValueError(f"count must be in [1, {patterns.shape[1]}]: got {count.tolist()}")
    single = torch.float64 not in (x.dtype, patterns.dtype)
    whole = fits(d, group_size) and (keys or T % 16 == 0)
    fused = single and whole and runs_triton(x, patterns, count)
    run = launch if fused else reference
    return run(x, patterns, count, bits=bits, group_size=group_size, keys=keys)
