r"""PatternKV: Flattening KV Representation Expands Quantization Headroom (arXiv 2510.05176).

At two bits a number has four levels over its group's range, and the range of keys and values is
wide because each group mixes several clusters. Take from each vector the nearest of a few pattern
vectors first: what remains is narrow and flat, and the same two bits give smaller steps. Keys drift
with the context, so patterns are mined at prefill and extended while decoding.

Known from the paper's abstract and its repository's defaults: two bits, groups and buffer of 128,
32 patterns for keys and for values. Our reconstruction: mining, the rule for extending a bank, the
accounting of bits, the kernels, all data and numbers.

Notation: K, V (B, H, T, d); b bits, groups of g tokens (keys) or channels (values), a buffer of R
tokens; patterns P (P, d) of one head.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from icmllab.kernels.align_quantize import align_quantize
from icmllab.kernels.lowbit_attend import lowbit_attend
from icmllab.toolbox.clustering import kmeans, nearest_centroid
from icmllab.toolbox.kv_cache import (
    FullKVCache,
    KIVICache,
    KVBits,
    KVCache,
    PartialAttention,
    attend_partial,
    attention_error,
    check_cache_settings,
    quantize_kv,
    relative_mse,
)
from icmllab.toolbox.linalg import as_matrix
from icmllab.toolbox.quantization import (
    GroupQuant,
    cat_groupwise,
    pack_bits,
    quantize_groupwise,
    unpack_bits,
)

__all__ = [
    "SHIPPED",
    "FullKVCache",
    "KIVICache",
    "PatternBank",
    "PatternKVCache",
    "RangeStats",
    "Scatter",
    "align_quantize",
    "assign_patterns",
    "check_break",
    "check_logits",
    "check_pack",
    "check_scatter",
    "check_shift",
    "control_run",
    "drift_run",
    "drifting",
    "group_range_stats",
    "lowbit_attend",
    "mine_patterns",
    "pack_bits",
    "quantize_groupwise",
    "recall_run",
    "scatter_decomposition",
    "structured",
    "structured_run",
    "study_run",
    "unpack_bits",
]

MAX_PATTERNS = 256
"""An index is one byte."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------------------------
# Patterns


def mine_patterns(
    x: torch.Tensor,
    n_patterns: int,
    *,
    max_iter: int = 15,
    sample: int = 4096,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Centroids of k-means: what to take from each vector before it is quantised.

    Args:
        x: (T, d) vectors of one head; keys as they are cached, after the rotary embedding.
        n_patterns: P >= 1. With fewer distinct vectors these are the patterns; empty clusters are
            dropped.
        max_iter: rounds of Lloyd's algorithm from a k-means++ start.
        sample: at most this many rows are looked at, drawn without repeats.
        generator: of the start and the sample.

    Returns:
        (P', d), P' <= P, dtype of ``x`` (float32 for half types).

    Raises:
        ValueError: x not (T, d) or not finite, or numbers out of range.
    """
    x = as_matrix("x", x)
    _check_count("n_patterns", n_patterns, MAX_PATTERNS)
    if sample < 1 or max_iter < 0:
        raise ValueError(f"sample must be >= 1 and max_iter >= 0: got {sample}, {max_iter}")
    x = x if x.dtype == torch.float64 else x.float()
    if len(x) > sample:
        order = torch.randperm(len(x), generator=generator, device=x.device)
        x = x[order[:sample]]
    distinct = torch.unique(x, dim=0)
    if len(distinct) <= n_patterns:
        return distinct
    found = kmeans(x, n_patterns, max_iter=max_iter, generator=generator)
    return found.centroids[found.counts > 0]


def _check_count(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or value != int(value) or not 1 <= value <= most:
        raise ValueError(f"{name} must be a whole number in [1, {most}]: got {value}")


class Assigned(NamedTuple):
    """The nearest pattern of each row.

    Attributes:
        index: (T,) int64, ties to the lowest.
        distance: (T,) Euclidean.
    """

    index: torch.Tensor
    distance: torch.Tensor


def assign_patterns(x: torch.Tensor, patterns: torch.Tensor) -> Assigned:
    """Nearest pattern and its distance; never an array of (T, P, d).

    Args:
        x: (T, d).
        patterns: (P, d).

    Raises:
        ValueError: shapes that do not fit, or values that are not finite.
    """
    x, patterns = as_matrix("x", x), as_matrix("patterns", patterns)
    if x.shape[1] != patterns.shape[1] or not len(patterns):
        raise ValueError(f"patterns must be (P, {x.shape[1]}): got {tuple(patterns.shape)}")
    found = nearest_centroid(x, patterns)
    return Assigned(found.labels, found.squared_distance.clamp_min(0).sqrt())


class PatternBank:
    """The patterns of one head. What is in it never changes; it only grows.

    A stored token keeps the index of its pattern, so that a pattern which changed would change the
    token with it.

    Args:
        patterns: (P, d), in the dtype in which they are stored.
        max_patterns: at most this many, <= 256, what one byte can name.
        seed: of the k-means that finds further patterns.

    Attributes:
        patterns: (P, d).
        version_count: how often it was extended.
        tau0: mean distance of the prefill's vectors; None until :meth:`calibrate`.

    Raises:
        ValueError: no patterns, or more than allowed.
    """

    def __init__(self, patterns: torch.Tensor, max_patterns: int = MAX_PATTERNS, *, seed: int = 0):
        _check_count("max_patterns", max_patterns, MAX_PATTERNS)
        if patterns.ndim != 2 or not 1 <= len(patterns) <= max_patterns:
            raise ValueError(
                f"patterns must be (P, d) with P in [1, {max_patterns}]: got "
                f"{tuple(patterns.shape)}"
            )
        self._patterns = patterns.clone()
        self.max_patterns = max_patterns
        self.version_count = 0
        self.tau0: float | None = None
        self._generator = _generator(seed)

    @property
    def patterns(self) -> torch.Tensor:
        """(P, d); a copy, since tokens refer to the rows."""
        return self._patterns.clone()

    def __len__(self) -> int:
        return len(self._patterns)

    def assign(self, x: torch.Tensor) -> Assigned:
        """The nearest pattern of each row of (T, d)."""
        return assign_patterns(x, self._patterns.to(x.dtype))

    def calibrate(self, x: torch.Tensor) -> None:
        """Take the mean distance of (T, d) as what is normal."""
        self.tau0 = float(self.assign(x).distance.mean())

    def maybe_extend(
        self,
        x: torch.Tensor,
        tau_ratio: float = 1.5,
        far_fraction: float = 0.25,
        k_new: int = 4,
    ) -> int:
        """Add patterns when these vectors are far from those there are.

        With τ = ``tau_ratio`` · :attr:`tau0`: when the mean distance exceeds τ, or more than
        ``far_fraction`` of the distances do, k-means with min(``k_new``, far ones) clusters on the
        far vectors gives the new patterns. A full bank stays as it is.

        Args:
            x: (T, d) vectors about to be stored.
            tau_ratio: > 0.
            far_fraction: in [0, 1].
            k_new: >= 1.

        Returns:
            How many were added.

        Raises:
            ValueError: no :meth:`calibrate` before, or numbers out of range.
        """
        if self.tau0 is None:
            raise ValueError("maybe_extend needs tau0: call calibrate first")
        if not tau_ratio > 0 or not 0 <= far_fraction <= 1 or k_new < 1:
            raise ValueError(
                "tau_ratio must be > 0, far_fraction in [0, 1], k_new >= 1: "
                f"got {tau_ratio}, {far_fraction}, {k_new}"
            )
        distance = self.assign(x).distance
        tau = tau_ratio * self.tau0
        far = distance > tau
        room = min(k_new, int(far.sum()), self.max_patterns - len(self))
        needed = float(distance.mean()) > tau or float(far.double().mean()) > far_fraction
        if not needed or room < 1:
            return 0
        new = mine_patterns(x[far], room, generator=self._generator)
        self._patterns = torch.cat([self._patterns, new.to(self._patterns.dtype)])
        self.version_count += 1
        return len(new)


class Scatter(NamedTuple):
    """Squared distances, summed.

    Attributes:
        total: to the mean of all.
        within: to the mean of the own cluster.
        between: of the clusters' means to the mean of all, by size.
    """

    total: float
    within: float
    between: float


def scatter_decomposition(x: torch.Tensor, labels: torch.Tensor) -> Scatter:
    """total = within + between, for the means of any partition. η² = between/total.

    Args:
        x: (T, d).
        labels: (T,) int64.

    Raises:
        ValueError: shapes that do not fit.
    """
    x = as_matrix("x", x).double()
    if labels.shape != (len(x),):
        raise ValueError(f"labels must be ({len(x)},): got {tuple(labels.shape)}")
    names, place = labels.unique(return_inverse=True)
    counts = torch.bincount(place).double()
    means = torch.zeros(len(names), x.shape[1], dtype=x.dtype).index_add_(0, place, x)
    means /= counts[:, None]
    centre = x.mean(dim=0)
    total = float((x - centre).square().sum())
    within = float((x - means[place]).square().sum())
    between = float((counts * (means - centre).square().sum(dim=1)).sum())
    return Scatter(total, within, between)


class RangeStats(NamedTuple):
    """Ranges of groups, before and after alignment.

    Attributes:
        raw: mean range of the vectors' groups.
        residual: mean range of the residuals' groups.
        wider: share of the groups whose residual is wider than they were.
    """

    raw: float
    residual: float
    wider: float


def group_range_stats(
    x: torch.Tensor, patterns: torch.Tensor, group_size: int, *, dim: int
) -> RangeStats:
    """How much narrower groups become.

    Args:
        x: (T, d).
        patterns: (P, d).
        group_size: divides ``x.shape[dim]``.
        dim: 0 for keys (tokens of a channel), 1 for values (channels of a token).

    Raises:
        ValueError: sizes that do not fit.
    """
    x = as_matrix("x", x)
    residual = x - patterns[assign_patterns(x, patterns).index].to(x.dtype)
    spans = []
    for part in (x, residual):
        moved = part.movedim(dim, -1)
        if moved.shape[-1] % group_size:
            raise ValueError(f"group_size must divide {moved.shape[-1]}: got {group_size}")
        low, high = moved.unflatten(-1, (-1, group_size)).aminmax(dim=-1)
        spans.append(high - low)
    raw, left = spans
    wider = (left > raw).double().mean()
    return RangeStats(float(raw.mean()), float(left.mean()), float(wider))


# --------------------------------------------------------------------------------------------
# The cache


class _Side:
    """Keys or values of all heads: banks, indices, grids."""

    def __init__(self):
        self.banks: list[list[PatternBank]] = []
        self.index: torch.Tensor | None = None
        self.grid: GroupQuant | None = None

    def stacked(self) -> torch.Tensor:
        """All banks as one tensor (B, H, P, d), the shorter ones filled up with zeros."""
        most = max(len(bank) for row in self.banks for bank in row)
        rows = [
            torch.nn.functional.pad(bank._patterns, (0, 0, 0, most - len(bank)))
            for row in self.banks
            for bank in row
        ]
        return torch.stack(rows).view(len(self.banks), -1, *rows[0].shape)

    def count(self) -> torch.Tensor:
        """(B·H,) int32, patterns of each head."""
        found = [len(bank) for row in self.banks for bank in row]
        return torch.tensor(found, dtype=torch.int32)

    def decoded(self) -> torch.Tensor:
        """(B, H, T, d)."""
        residual = self.grid.dequantize()
        wide = torch.promote_types(residual.dtype, torch.float32)
        rows = self.index.long()[..., None].expand(residual.shape)
        patterns = self.stacked().to(wide).gather(2, rows)
        return (residual.to(wide) + patterns).to(self.grid.dtype)


class PatternKVCache(KVCache):
    """Keys and values as an index of a pattern and a residual in few bits.

    Args:
        n_kv_heads: H.
        head_dim: d.
        k_bits: 1, 2, 4 or 8.
        v_bits: 1, 2, 4 or 8.
        group_size: tokens of a key group; a value group has min(group_size, d) channels.
        residual_length: tokens of the full-precision buffer, R; a multiple of ``group_size``.
        n_k_patterns: patterns mined for keys, 1 to ``max_patterns``.
        n_v_patterns: and for values.
        update_keys: extend key banks at each flush where vectors are far.
        update_values: extend value banks too.
        sinks: first tokens kept in full precision.
        max_patterns: of a bank, <= 256.
        store_dtype: of steps, minima and patterns. Patterns are rounded to it before residuals are
            formed, steps and minima before codes are.
        seed: of the mining.

    Attributes:
        key_banks: ``key_banks[b][h]``, a :class:`PatternBank` each.
        value_banks: likewise.

    Raises:
        ValueError: bits, sizes or numbers that do not fit.
    """

    needs_prefill = True

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        k_bits: int = 2,
        v_bits: int = 2,
        group_size: int = 128,
        residual_length: int = 128,
        n_k_patterns: int = 32,
        n_v_patterns: int = 32,
        update_keys: bool = True,
        update_values: bool = False,
        sinks: int = 0,
        max_patterns: int = MAX_PATTERNS,
        store_dtype: torch.dtype = torch.float16,
        seed: int = 0,
    ):
        check_cache_settings(
            head_dim,
            k_bits=k_bits,
            v_bits=v_bits,
            group_size=group_size,
            residual_length=residual_length,
        )
        _check_count("max_patterns", max_patterns, MAX_PATTERNS)
        _check_count("n_k_patterns", n_k_patterns, max_patterns)
        _check_count("n_v_patterns", n_v_patterns, max_patterns)
        self.k_bits, self.v_bits, self.group_size = k_bits, v_bits, group_size
        self.n_patterns = (n_k_patterns, n_v_patterns)
        self.update = (update_keys, update_values)
        self.max_patterns, self.store_dtype, self.seed = max_patterns, store_dtype, seed
        super().__init__(n_kv_heads, head_dim, residual_length=residual_length, sinks=sinks)

    @property
    def key_banks(self) -> list[list[PatternBank]]:
        """Banks of keys by batch item and head."""
        return self._sides[0].banks

    @property
    def value_banks(self) -> list[list[PatternBank]]:
        """Banks of values by batch item and head."""
        return self._sides[1].banks

    def _clear(self) -> None:
        self._sides = (_Side(), _Side())

    def _stored_dtype(self, x: torch.Tensor) -> torch.Tensor:
        rounded = x.to(self.store_dtype)
        if not bool(torch.isfinite(rounded).all()):
            raise ValueError(f"k and v must fit {self.store_dtype}: a pattern overflows")
        return rounded

    def _calibrate(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._clear()
        for s, (side, x) in enumerate(zip(self._sides, (k, v), strict=True)):
            for b, item in enumerate(x):
                row = []
                for h, head in enumerate(item):
                    g = _generator(1000 * self.seed + 2 * (b * self.n_kv_heads + h) + s)
                    wide = head if head.dtype == torch.float64 else head.float()
                    mined = mine_patterns(wide.cpu(), self.n_patterns[s], generator=g)
                    bank = PatternBank(
                        self._stored_dtype(mined).to(x.device), self.max_patterns, seed=self.seed
                    )
                    bank.calibrate(wide)
                    row.append(bank)
                side.banks.append(row)

    def _store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        R = self.residual_length
        for start in range(0, k.shape[2], R):
            chunk = slice(start, start + R)
            self._flush_one(k[:, :, chunk], v[:, :, chunk])

    def _flush_one(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """A buffer's worth of tokens: extend banks, align, quantise, append."""
        wide = [x if x.dtype == torch.float64 else x.float() for x in (k, v)]
        for side, x, update in zip(self._sides, wide, self.update, strict=True):
            for row, item in zip(side.banks, x, strict=True):
                for bank, head in zip(row, item, strict=True) if update else ():
                    bank.maybe_extend(head)
        run = self._aligned_by_kernel if self._by_kernel(wide[0]) else self._aligned
        for side, x, (index, grid) in zip(self._sides, (k, v), run(*wide), strict=True):
            grid = grid._replace(dtype=x.dtype)
            side.grid = grid if side.grid is None else cat_groupwise([side.grid, grid], dim=2)
            side.index = index if side.index is None else torch.cat([side.index, index], dim=2)

    def _by_kernel(self, x: torch.Tensor) -> bool:
        """Whether a flush is one kernel: on a GPU, stored in float16, groups of whole bytes."""
        return x.is_cuda and self.store_dtype == torch.float16 and self._whole_bytes()

    def _whole_bytes(self) -> bool:
        part = min(self.group_size, self.head_dim)
        return not self.group_size * self.k_bits % 8 and not part * self.v_bits % 8

    def _aligned(self, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, GroupQuant]]:
        """Indices and grids of keys and of values."""
        indices, residuals = [], []
        for side, x in zip(self._sides, (k, v), strict=True):
            rows = [
                torch.stack([bank.assign(head).index for bank, head in zip(row, item, strict=True)])
                for row, item in zip(side.banks, x, strict=True)
            ]
            index = torch.stack(rows)
            taken = side.stacked().to(x.dtype).gather(2, index[..., None].expand(x.shape))
            indices.append(index.to(torch.uint8))
            residuals.append(x - taken)
        grids = quantize_kv(
            *residuals,
            k_bits=self.k_bits,
            v_bits=self.v_bits,
            group_size=self.group_size,
            store_dtype=self.store_dtype,
        )
        return list(zip(indices, grids, strict=True))

    def _aligned_by_kernel(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> list[tuple[torch.Tensor, GroupQuant]]:
        """The same by ``align_quantize``, all heads at once."""
        made = []
        lead = k.shape[:2]
        part = min(self.group_size, self.head_dim)
        plan = ((k, self.k_bits, self.group_size, True), (v, self.v_bits, part, False))
        for side, (x, bits, size, keys) in zip(self._sides, plan, strict=True):
            patterns = side.stacked().flatten(0, 1)
            count = side.count().to(x.device)
            found = align_quantize(
                x.flatten(0, 1), patterns, count, bits=bits, group_size=size, keys=keys
            )
            index, codes, scale, zero = (t.unflatten(0, lead) for t in found)
            bad = ~(torch.isfinite(scale) & torch.isfinite(zero))
            if bool(bad.any()):
                b, h = bad.nonzero()[0, :2].tolist()
                raise ValueError(
                    f"{'k' if keys else 'v'} must fit torch.float16: head {h} of batch item {b} "
                    "does not"
                )
            dim = 2 if keys else 3
            made.append((index, GroupQuant(codes, scale, zero, bits, dim, size, x.dtype)))
        return made

    def _stored_keys(self) -> torch.Tensor:
        return self._sides[0].decoded()

    def _stored_values(self) -> torch.Tensor:
        return self._sides[1].decoded()

    def _stored_bits(self) -> KVBits:
        found = []
        for side in self._sides:
            bits = float(side.grid.n_bits)
            for row in side.banks:
                for bank in row:
                    bits += self.n_stored * math.ceil(math.log2(len(bank)))
                    bits += 8 * self.store_dtype.itemsize * self.head_dim * len(bank)
            found.append(bits)
        return KVBits(*found)

    def _stored_nbytes(self) -> int:
        total = 0
        for side in self._sides:
            total += side.grid.nbytes + side.index.numel()
            banks = [bank for row in side.banks for bank in row]
            total += sum(len(b) for b in banks) * self.head_dim * self.store_dtype.itemsize
        return total

    def _attend_stored(self, q: torch.Tensor, scale: float | None) -> PartialAttention:
        """Without decoding: pattern logits once, residual codes with scaled queries."""
        if q.shape[2] != 1:
            return attend_partial(q, self._stored_keys(), self._stored_values(), scale=scale)
        keys, values = self._sides
        found = lowbit_attend(
            q[:, :, 0],
            keys.grid.codes,
            keys.grid.scale,
            keys.grid.zero,
            keys.index,
            keys.stacked(),
            values.grid.codes,
            values.grid.scale,
            values.grid.zero,
            values.index,
            values.stacked(),
            k_bits=self.k_bits,
            v_bits=self.v_bits,
            scale=1 / math.sqrt(self.head_dim) if scale is None else scale,
        )
        return PartialAttention(found.m[..., None], found.l[..., None], found.o[:, :, None])


# --------------------------------------------------------------------------------------------
# Data

DIM = 128
TOKENS = 2048
N_QUERIES = 256


class KVData(NamedTuple):
    """Keys, values and queries of one head.

    Attributes:
        k: (T, d) float32.
        v: (T, d).
        q: (n, d).
        topic: (T,) int64 of each key.
        classes: (T,) int64 of each value.
        class_vectors: (16, d).
        noise: (T, d), the keys' own part.
        shared: (m, d), what keys have in common: topics and the offset.
    """

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    topic: torch.Tensor
    classes: torch.Tensor
    class_vectors: torch.Tensor
    noise: torch.Tensor
    shared: torch.Tensor


def _offsets(rng: np.random.Generator) -> np.ndarray:
    """A constant a channel, large in a few."""
    size = np.where(rng.random(DIM) < 0.06, 6.0, 0.5)
    return rng.normal(size=DIM) * size


def _values(rng: np.random.Generator, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    classes, vectors = rng.integers(16, size=T), rng.normal(size=(16, DIM))
    return vectors[classes] + 0.5 * rng.normal(size=(T, DIM)), classes, vectors


def _f32(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float32))


def structured(seed: int, *, noise: float = 0.4, T: int = TOKENS) -> KVData:
    """Keys in a few drifting clusters on a large constant offset, values in sixteen classes.

    Args:
        seed: of everything.
        noise: of the keys.
        T: tokens.
    """
    rng = np.random.default_rng((seed, 13))
    offset, topics = _offsets(rng), rng.normal(size=(8, DIM))
    redraw = rng.random(T) < 0.02
    redraw[0] = True
    drawn = rng.integers(8, size=T)
    topic = drawn[np.maximum.accumulate(np.where(redraw, np.arange(T), 0))]
    walk = np.cumsum(0.01 * rng.normal(size=(T, DIM)), axis=0)
    own = noise * rng.normal(size=(T, DIM))
    k = offset + 1.2 * topics[topic] + walk + own
    v, classes, vectors = _values(rng, T)
    picked = rng.integers(T, size=N_QUERIES)
    q = k[picked] - k.mean(axis=0) + rng.normal(size=(N_QUERIES, DIM))
    return KVData(
        _f32(k),
        _f32(v),
        _f32(q),
        torch.from_numpy(topic),
        torch.from_numpy(classes),
        _f32(vectors),
        _f32(own),
        _f32(np.vstack([topics, offset])),
    )


def drifting(seed: int, T: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys whose topics move on: of 40, eight at a time. (T, d) keys and values."""
    rng = np.random.default_rng((seed, 14))
    offset, topics = _offsets(rng), rng.normal(size=(40, DIM))
    t = np.arange(T)
    drawn = 30 * t // T + rng.integers(8, size=T)
    redraw = rng.random(T) < 0.05
    redraw[0] = True
    topic = drawn[np.maximum.accumulate(np.where(redraw, t, 0))]
    k = offset + 1.2 * topics[topic] + 0.4 * rng.normal(size=(T, DIM))
    return _f32(k), _f32(_values(rng, T)[0])


# --------------------------------------------------------------------------------------------
# Studies

METHODS = ("patternkv", "kivi", "kivi32", "centred", "per_token", "hadamard")
"""The last four: KIVI with groups of 32, one pattern, keys by token, rotated and by token."""


def _heads(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [x[None, None] for x in xs]


def hadamard(d: int) -> torch.Tensor:
    """An orthogonal matrix of ±1/√d: (d, d), d a power of two."""
    H = torch.ones(1, 1)
    while len(H) < d:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    if len(H) != d:
        raise ValueError(f"d must be a power of two: got {d}")
    return H / math.sqrt(d)


class Coded(NamedTuple):
    """What a method makes of keys and values, and what it spends.

    Attributes:
        k: (T, d) decoded.
        v: (T, d) decoded.
        bits: an element, mean of keys and values.
    """

    k: torch.Tensor
    v: torch.Tensor
    bits: float


def code(
    method: str,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bits: int = 2,
    n_patterns: int = 32,
    seed: int = 0,
) -> Coded:
    """Quantise (T, d) keys and values by one of ``METHODS``.

    Raises:
        ValueError: an unknown method.
    """
    d = k.shape[1]
    options = {"k_bits": bits, "v_bits": bits}
    if method in ("patternkv", "centred"):
        n = 1 if method == "centred" else n_patterns
        cache = PatternKVCache(1, d, n_k_patterns=n, n_v_patterns=n, seed=seed, **options)
    elif method == "kivi":
        cache = KIVICache(1, d, **options)
    elif method == "kivi32":
        cache = KIVICache(1, d, group_size=32, **options)
    elif method in ("per_token", "hadamard"):
        Q = hadamard(d) if method == "hadamard" else torch.eye(d)
        made = [quantize_groupwise(x @ Q, bits, -1, d) for x in (k, v)]
        decoded = [grid.dequantize() @ Q.T for grid in made]
        spent = sum(grid.n_bits for grid in made) / (k.numel() + v.numel())
        return Coded(*decoded, spent)
    else:
        raise ValueError(f"method must be one of {', '.join(METHODS)}: got {method!r}")
    cache.prefill(*_heads(k, v))
    return Coded(cache.keys()[0, 0], cache.values()[0, 0], sum(cache.bits_per_element) / 2)


def _errors(data: KVData, made: Coded) -> dict[str, float]:
    k, v, k_hat, v_hat = _heads(data.k, data.v, made.k, made.v)
    found = attention_error(data.q[None, None], k, v, k_hat, v_hat)
    return {
        "key": relative_mse(k, k_hat, centre_dim=2),
        "value": relative_mse(v, v_hat, centre_dim=2),
        "output": found.output,
        "kl": found.kl,
        "bits": made.bits,
    }


def structured_run(
    method: str, seed: int, *, bits: int = 2, n_patterns: int = 32
) -> dict[str, float]:
    """One method on structured data: errors of keys, values and attention's output, bits."""
    data = structured(seed)
    made = code(method, data.k, data.v, bits=bits, n_patterns=n_patterns, seed=seed)
    return _errors(data, made)


def flatness_run(seed: int) -> dict[str, float]:
    """Ranges of groups and scatter of structured data, before and after alignment."""
    data = structured(seed)
    found = {}
    for name, x, dim in (("key", data.k, 0), ("value", data.v, 1)):
        patterns = mine_patterns(x, 32, generator=_generator(seed))
        ranges = group_range_stats(x, patterns, 128, dim=dim)
        labels = assign_patterns(x, patterns).index
        scatter = scatter_decomposition(x, labels)
        found[f"{name}_range"] = ranges.residual / ranges.raw
        found[f"{name}_wider"] = ranges.wider
        found[f"{name}_within"] = scatter.within / scatter.total
        gap = scatter.total - scatter.within - scatter.between
        found[f"{name}_identity"] = abs(gap) / scatter.total
    return found


def control_run(kind: str, seed: int) -> dict[str, float]:
    """Key error without a reason to gain.

    "noise": N(0, I) keys, over KIVI's; "rows": 32 random rows as patterns, not mined; "random": 32
    vectors of N(0, I) as patterns; the last two as relative errors, with KIVI's beside them.

    Raises:
        ValueError: an unknown kind.
    """
    data = structured(seed)
    if kind == "noise":
        g = _generator(seed)
        k, v = (torch.randn(TOKENS, DIM, generator=g) for _ in range(2))
        ours, theirs = (code(m, k, v, seed=seed).k for m in ("patternkv", "kivi"))
        kivi = relative_mse(*_heads(k, theirs), centre_dim=2)
        return {"key": relative_mse(*_heads(k, ours), centre_dim=2), "kivi": kivi}
    g = _generator(seed)
    if kind == "rows":
        patterns = data.k[torch.randperm(TOKENS, generator=g)[:32]]
    elif kind == "random":
        patterns = torch.randn(32, DIM, generator=g)
    else:
        raise ValueError(f"kind must be noise, rows or random: got {kind!r}")
    patterns = patterns.half().float()
    taken = patterns[assign_patterns(data.k, patterns).index]
    grid = quantize_groupwise((data.k - taken)[None, None], 2, -2, 128)
    decoded = grid.dequantize() + taken
    kivi = code("kivi", data.k, data.v).k
    return {
        "key": relative_mse(data.k[None, None], decoded, centre_dim=2),
        "kivi": relative_mse(*_heads(data.k, kivi), centre_dim=2),
    }


def drift_flushes(seed: int, *, prefill: int = 512) -> dict[str, np.ndarray]:
    """Mean squared key error of each flush on drifting keys, by method, and patterns added."""
    k, v = drifting(seed)
    caches = {
        "kivi": KIVICache(1, DIM),
        "static": PatternKVCache(1, DIM, update_keys=False, seed=seed),
        "online": PatternKVCache(1, DIM, seed=seed),
    }
    added = []
    for cache in caches.values():
        cache.prefill(*_heads(k[:prefill], v[:prefill]))
    for start in range(prefill, len(k), 128):
        part = slice(start, start + 128)
        before = len(caches["online"].key_banks[0][0])
        for cache in caches.values():
            cache.append(*_heads(k[part], v[part]))
        added.append(len(caches["online"].key_banks[0][0]) - before)
    errors = {
        name: (cache.keys()[0, 0] - k).square().view(-1, 128 * DIM).mean(dim=1).numpy()
        for name, cache in caches.items()
    }
    bank = caches["online"].key_banks[0][0]
    return {
        **errors,
        "added": np.array(added),
        "patterns": np.array(len(bank)),
        "extensions": np.array(bank.version_count),
    }


def drift_run(seed: int) -> dict[str, float]:
    """Error over KIVI's in the last eight flushes, with and without further mining."""
    found = drift_flushes(seed)
    last = {name: float(found[name][-8:].mean()) for name in ("kivi", "static", "online")}
    return {
        "online": last["online"] / last["kivi"],
        "static": last["static"] / last["kivi"],
        "patterns": int(found["patterns"]),
        "extensions": int(found["extensions"]),
    }


def recall_run(method: str, seed: int, *, bits: int = 2) -> float:
    """Share of queries whose attention output is nearest to the class of the key that they ask for.

    A query looks at a key's own part alone: topics and offset are projected out of it. ``method``
    "exact" quantises nothing.
    """
    data = structured(seed, noise=0.15)
    rng = np.random.default_rng((seed, 15))
    asked = torch.from_numpy(rng.integers(TOKENS, size=512))
    own = data.noise[asked] / 0.15
    Q = torch.linalg.qr(data.shared.double().T).Q.float()
    q = own - (own @ Q) @ Q.T + 0.5 * _f32(rng.normal(size=own.shape))
    k, v = data.k, data.v
    if method != "exact":
        made = code(method, k, v, bits=bits, seed=seed)
        k, v = made.k, made.v
    weights = torch.softmax(8 * q @ k.T / math.sqrt(DIM), dim=1)
    found = nearest_centroid(weights @ v, data.class_vectors).labels
    return float((found == data.classes[asked]).double().mean())


def memory_run(T: int = 8192) -> dict[str, float]:
    """Bytes that caches of T tokens hold, over those of float16."""
    g = _generator(0)
    k, v = (torch.randn(1, 1, T, DIM, generator=g).half() for _ in range(2))
    held = {}
    for name, cache in (
        ("full", FullKVCache(1, DIM)),
        ("patternkv", PatternKVCache(1, DIM)),
        ("kivi", KIVICache(1, DIM)),
    ):
        cache.prefill(k, v)
        held[name] = cache.nbytes
    return {name: held["full"] / held[name] for name in ("patternkv", "kivi")}


SEEDS = range(8)
PATTERN_COUNTS = (1, 2, 4, 8, 16, 32, 64)
RUNS = [
    *(f"{m} {b} 32 {s}" for s in SEEDS for m in METHODS for b in (2, 4)),
    *(f"patternkv 2 {p} {s}" for s in range(3) for p in PATTERN_COUNTS if p != 32),
    *(f"patternkv {b} 32 {s}" for s in range(3) for b in (1, 8)),
    *(f"kivi {b} 32 {s}" for s in range(3) for b in (1, 8)),
]


def study_run(*, run: str) -> dict[str, float]:
    """One run of the study, by name: method, bits, patterns, seed."""
    method, bits, patterns, seed = run.split()
    return structured_run(method, int(seed), bits=int(bits), n_patterns=int(patterns))


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=efficiency/patternkv`` computes."""


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_pack(pack: Callable, unpack: Callable | None = None) -> None:
    """Exercise 1: ``pack(codes)`` → bytes, 4 codes of 2 bits each, the first one lowest.

    ``pack`` may be a pair (pack, unpack); ``unpack(data, n)`` gives the codes back.

    Raises:
        AssertionError: with the length that fails.
    """
    if unpack is None:
        pack, unpack = pack
    rng = np.random.default_rng(0)
    for n in range(1, 8):
        codes = rng.integers(4, size=n).astype(np.uint8)
        data = np.asarray(pack(codes.copy()))
        wanted = pack_bits(torch.from_numpy(codes), 2).numpy()
        assert data.shape == wanted.shape, (
            f"{n} codes take {len(wanted)} bytes, you made {data.shape}"
        )
        assert np.array_equal(data, wanted), (
            f"codes {codes.tolist()} are the bytes {wanted.tolist()}, lowest bits first: you made "
            f"{data.tolist()}"
        )
        back = np.asarray(unpack(data.copy(), n))
        assert np.array_equal(back, codes), f"{codes.tolist()} came back as {back.tolist()}"


def check_scatter(fn: Callable) -> None:
    """Exercise 2: ``fn(x, labels)`` → (total, within, between) of NumPy arrays.

    Raises:
        AssertionError: with the difference.
    """
    rng = np.random.default_rng(1)
    for case in range(10):
        x = rng.normal(size=(40, 5)) + 10 * case
        labels = rng.integers(4, size=40)
        found = [float(v) for v in fn(x.copy(), labels.copy())]
        wanted = scatter_decomposition(torch.from_numpy(x), torch.from_numpy(labels))
        for name, mine, right in zip(wanted._fields, found, wanted, strict=True):
            assert abs(mine - right) <= 1e-10 * wanted.total, (
                f"problem {case}: {name} is {right:.6f}, you said {mine:.6f}"
            )


def check_shift(fn: Callable) -> None:
    """Exercise 3: ``fn(x, pattern, bits, by)`` is x quantised after ``pattern`` was taken away.

    ``by`` is "channel" or "token". By channel the result must not depend on the pattern; by token
    it does.

    Raises:
        AssertionError: with the difference.
    """
    rng = np.random.default_rng(2)
    x, pattern = rng.normal(size=(32, 8)), 3 * rng.normal(size=8)
    for by, dim in (("channel", -2), ("token", -1)):
        zero = np.asarray(fn(x.copy(), np.zeros(8), 2, by))
        group = x.shape[dim]
        grid = quantize_groupwise(torch.from_numpy(x), 2, dim, group, store_dtype=torch.float64)
        gap = np.abs(zero - grid.dequantize().numpy()).max()
        assert gap < 1e-9, f"by {by}, without a pattern: off by {gap:.3g} from the plain grid"
        moved = np.abs(np.asarray(fn(x.copy(), pattern.copy(), 2, by)) - zero).max()
        if by == "channel":
            assert moved < 1e-9, (
                f"by channel a constant shift changes nothing: yours changed by {moved:.3g}"
            )
        else:
            assert moved > 1e-3, "by token the pattern changes the range: yours changed nothing"


def check_logits(fn: Callable) -> None:
    """Exercise 4: ``fn(q, codes, step, zero, index, patterns)`` → logits without decoding keys.

    q (d,), codes (T, d) of one token group, step and zero (d,), index (T,), patterns (P, d).

    Raises:
        AssertionError: with the difference.
    """
    rng = np.random.default_rng(3)
    for case in range(10):
        T, d, P = 16, 6, 3
        q, patterns = rng.normal(size=d), rng.normal(size=(P, d))
        codes, index = rng.integers(4, size=(T, d)), rng.integers(P, size=T)
        step, zero = rng.random(d), rng.normal(size=d)
        wanted = (patterns[index] + codes * step + zero) @ q
        found = np.asarray(fn(q.copy(), codes.copy(), step.copy(), zero.copy(), index, patterns))
        gap = np.abs(found - wanted).max()
        assert gap < 1e-4, f"problem {case}: off by {gap:.3g} from the logits of decoded keys"


def check_break(fn: Callable) -> None:
    """Exercise 5: ``fn()`` → (x (T, d), patterns (P, d)) with a channel whose residual is wider.

    Patterns must be assigned by distance, and the group is all T tokens.

    Raises:
        AssertionError: with the ranges.
    """
    x, patterns = (torch.as_tensor(np.asarray(v, dtype=float)) for v in fn())
    assert len(patterns) >= 2, "with one pattern every range stays as it is: use two or more"
    left = x - patterns[assign_patterns(x, patterns).index]
    raw, residual = (v.amax(dim=0) - v.amin(dim=0) for v in (x, left))
    assert bool((residual > raw + 1e-9).any()), (
        "no channel's residual is wider than it was: ranges "
        f"{raw.tolist()} became {residual.tolist()}"
    )
    total = float((x - x.mean(dim=0)).square().sum())
    assert float(left.square().sum()) < total, (
        "the patterns must still be of use: the residuals' squares must add up to less than those "
        "of the centred vectors"
    )
