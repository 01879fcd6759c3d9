"""Caches of keys and values for decoding: one interface, exact partial attention, references.

A cache holds, in this order, ``sinks`` first tokens, tokens in few bits, and a buffer of the last
ones; sinks and buffer keep the precision they came in and count 16 bits an element. ``append``
puts tokens into the buffer and then flushes: all whole chunks of ``residual_length`` tokens that
stand before the last ``window`` ones are quantised. KIVI and PatternKV take ``window=0`` and a
long chunk; a sliding window of full precision is ``window=W, residual_length=1``.

Attention over the parts is exact: each gives (m, l, o), its largest logit, sum of weights and
weighted sum of values, and the parts merge by log-sum-exp.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from icmllab.toolbox.quantization import (
    GroupQuant,
    StoreOverflow,
    cat_groupwise,
    check_group_size,
    compute_dtype,
    quantize_groupwise,
)

FULL_BITS = 16
"""What an element kept in full precision counts."""

CACHE_BITS = (1, 2, 4, 8)
"""Codes that fill a byte without crossing its border."""


# ------------------------------------------------------------------- attention in parts


class PartialAttention(NamedTuple):
    """Attention over some of the tokens; the neutral part is (−∞, 0, 0).

    Attributes:
        m: (B, Hq, n_q) largest logit, −∞ where no token is seen.
        l: (B, Hq, n_q) Σ exp(logit − m).
        o: (B, Hq, n_q, d) Σ exp(logit − m) v, not divided by l.
    """

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor

    def output(self) -> torch.Tensor:
        """o / l: (B, Hq, n_q, d); 0 where no token was seen."""
        seen = self.l > 0
        return self.o / torch.where(seen, self.l, 1.0)[..., None]

    def log_sum_exp(self) -> torch.Tensor:
        """m + ln l: (B, Hq, n_q), −∞ where no token was seen."""
        return self.m + self.l.log()


class SoftmaxParts(NamedTuple):
    """Weights exp(logit − m) (..., n_tokens), with m and l = their sum, (...) each."""

    m: torch.Tensor
    l: torch.Tensor
    weights: torch.Tensor


def softmax_parts(logits: torch.Tensor, mask: torch.Tensor | None = None) -> SoftmaxParts:
    """Softmax before its division, of (..., n_tokens) logits.

    Args:
        logits: (..., n_tokens), n_tokens may be 0.
        mask: broadcastable bool, True where a token is seen; None shows all.
    """
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if logits.shape[-1] == 0:
        m = logits.new_full(logits.shape[:-1], float("-inf"))
        return SoftmaxParts(m, torch.zeros_like(m), logits)
    m = logits.amax(dim=-1)
    # −∞ − (−∞) would be NaN: a row that sees nothing is shifted by 0
    shift = torch.where(m == float("-inf"), 0.0, m)
    weights = (logits - shift[..., None]).exp()
    return SoftmaxParts(m, weights.sum(dim=-1), weights)


def _heads_of(q: torch.Tensor, k: torch.Tensor) -> int:
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q and k must be (B, Hq, n_q, d) and (B, H, T, d): "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q must have a multiple of the {k.shape[1]} heads of k: got {q.shape[1]}")
    return q.shape[1] // k.shape[1]


def attention_logits(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """scale · q kᵀ with grouped heads: (B, Hq, n_q, T), in float32 or wider.

    Args:
        q: (B, Hq, n_q, d), Hq a multiple of H; head h reads head ⌊h·H/Hq⌋ of k.
        k: (B, H, T, d).
        scale: None means 1/√d.

    Raises:
        ValueError: shapes that do not fit.
    """
    share = _heads_of(q, k)
    dtype = compute_dtype(torch.promote_types(q.dtype, k.dtype))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    grouped = q.to(dtype).unflatten(1, (k.shape[1], share)).flatten(2, 3)
    logits = scale * (grouped @ k.to(dtype).transpose(2, 3))
    return logits.unflatten(2, (share, q.shape[2])).flatten(1, 2)


def weighted_values(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Σ_t weight_t v_t with grouped heads: (B, Hq, n_q, T), (B, H, T, d) → (B, Hq, n_q, d)."""
    share = weights.shape[1] // v.shape[1]
    grouped = weights.unflatten(1, (v.shape[1], share)).flatten(2, 3)
    mixed = grouped @ v.to(weights.dtype)
    return mixed.unflatten(2, (share, weights.shape[2])).flatten(1, 2)


def attend_partial(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> PartialAttention:
    """Attention over the tokens of k and v, to be merged with that over others.

    Args:
        q: (B, Hq, n_q, d), Hq a multiple of H.
        k, v: (B, H, T, d) and (B, H, T, d_v); T may be 0.
        scale: None means 1/√d.
        mask: bool, broadcastable to (B, Hq, n_q, T), True where a token is seen.

    Raises:
        ValueError: shapes that do not fit.
    """
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must agree but for the last dimension: got {tuple(k.shape)}, {tuple(v.shape)}"
        )
    m, l, weights = softmax_parts(attention_logits(q, k, scale), mask)
    return PartialAttention(m, l, weighted_values(weights, v))


def merge_partials(parts: Sequence[PartialAttention]) -> PartialAttention:
    """One part for the tokens of all, as if they had been attended to together.

    Raises:
        ValueError: no parts.
    """
    if not parts:
        raise ValueError("parts must hold at least one part: got none")
    m = torch.stack([p.m for p in parts]).amax(dim=0)
    shift = torch.where(m == float("-inf"), 0.0, m)
    factors = [(p.m - shift).exp() for p in parts]
    l = sum(f * p.l for f, p in zip(factors, parts, strict=True))
    o = sum(f[..., None] * p.o for f, p in zip(factors, parts, strict=True))
    return PartialAttention(m, l, o)


# ------------------------------------------------------------------------------- errors


def relative_mse(x: torch.Tensor, x_hat: torch.Tensor, *, centre_dim: int | None = None) -> float:
    """‖x − x̂‖² / ‖x − c‖² over all elements, summed in float64.

    Args:
        x, x_hat: of one shape.
        centre_dim: c is the mean of x over this dimension; None takes c = 0. Keys have large
            constant offsets in some channels, which no query's softmax sees: beside their
            variation over tokens (dimension 2 of (B, H, T, d)) the error is larger.

    Raises:
        ValueError: shapes that differ, or x without any size or variation.
    """
    _check_shapes(x, x_hat)
    x, x_hat = x.detach().double(), x_hat.detach().double()
    centred = x if centre_dim is None else x - x.mean(dim=centre_dim, keepdim=True)
    size = float(centred.square().sum())
    if size == 0:
        raise ValueError("x must not be all 0, nor constant where it is centred")
    return float((x - x_hat).square().sum()) / size


def _check_shapes(x: torch.Tensor, x_hat: torch.Tensor) -> None:
    if x.shape != x_hat.shape:
        raise ValueError(
            f"x and x_hat must have one shape: got {tuple(x.shape)}, {tuple(x_hat.shape)}"
        )


def mean_cosine(x: torch.Tensor, x_hat: torch.Tensor) -> float:
    """Mean cosine of matched rows (..., d); 0 for a row that either has at 0.

    Raises:
        ValueError: shapes that differ.
    """
    _check_shapes(x, x_hat)
    x, x_hat = x.detach().double(), x_hat.detach().double()
    sizes = x.norm(dim=-1) * x_hat.norm(dim=-1)
    cosines = (x * x_hat).sum(dim=-1) / torch.where(sizes > 0, sizes, 1.0)
    return float(cosines.mean())


class AttentionError(NamedTuple):
    """How far attention is from what it would be with exact keys and values.

    Attributes:
        output: relative mean squared error of the outputs, ‖o − ô‖² / ‖o‖² over all queries.
        kl: mean over queries of KL(p ‖ p̂), in nats.
        top1: share of queries whose heaviest token is the same.
    """

    output: float
    kl: float
    top1: float


def attention_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_hat: torch.Tensor,
    v_hat: torch.Tensor,
    *,
    scale: float | None = None,
) -> AttentionError:
    """Compare attention over (k̂, v̂) with attention over (k, v), in float64.

    Args:
        q: (B, Hq, n_q, d), each query sees all tokens.
        k, v, k_hat, v_hat: (B, H, T, d).
        scale: of the logits, the same for both; None means 1/√d.

    Raises:
        ValueError: shapes that do not fit.
    """
    if k.shape != k_hat.shape or v.shape != v_hat.shape:
        raise ValueError("k_hat and v_hat must have the shapes of k and v")
    exact = attention_logits(q.double(), k.double(), scale).log_softmax(dim=-1)
    found = attention_logits(q.double(), k_hat.double(), scale).log_softmax(dim=-1)
    p = exact.exp()
    return AttentionError(
        relative_mse(weighted_values(p, v), weighted_values(found.exp(), v_hat)),
        float((p * (exact - found)).sum(dim=-1).mean()),
        float((exact.argmax(dim=-1) == found.argmax(dim=-1)).double().mean()),
    )


# ---------------------------------------------------------------------------- interface


class KVBits(NamedTuple):
    """Bits an element, of keys and of values."""

    keys: float
    values: float


def bits_per_element(
    *, n_quantized: int, n_full: int, head_dim: int, token_bits: float, constant_bits: float = 0.0
) -> float:
    """[n_quantized·token_bits + constant_bits + 16·head_dim·n_full] / (n·head_dim).

    Args:
        n_quantized: tokens in few bits.
        n_full: tokens in full precision: sinks, window, buffer.
        head_dim: d.
        token_bits: of a quantised token: codes, its share of scales, its index.
        constant_bits: of what is held once: patterns.

    Raises:
        ValueError: no tokens, or negative counts.
    """
    if min(n_quantized, n_full) < 0 or n_quantized + n_full < 1 or head_dim < 1:
        raise ValueError(
            "n_quantized + n_full and head_dim must be >= 1: "
            f"got {n_quantized}, {n_full}, {head_dim}"
        )
    bits = n_quantized * token_bits + constant_bits + FULL_BITS * head_dim * n_full
    return bits / ((n_quantized + n_full) * head_dim)


class KVCache:
    """The interface, and all of it but how tokens are stored.

    A subclass stores tokens by ``_store(k, v)``, gives them back by ``_stored_keys()`` and
    ``_stored_values()``, counts them by ``_stored_bits()`` and ``_stored_nbytes()``, and forgets
    them in ``_clear()``. It may attend to them without decoding, by ``_attend_stored(q, scale)``,
    and prepare on the first tokens, in ``_calibrate(k, v)``.

    Args:
        n_kv_heads: H.
        head_dim: d.
        residual_length: tokens quantised at a time.
        window: last tokens that are never quantised.
        sinks: first tokens that are never quantised.

    Attributes:
        needs_prefill: whether ``append`` must wait for ``prefill``.

    Raises:
        ValueError: sizes below 1, or a negative window or number of sinks.
    """

    needs_prefill = False

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        residual_length: int = 128,
        window: int = 0,
        sinks: int = 0,
    ):
        sizes = {"n_kv_heads": n_kv_heads, "head_dim": head_dim, "residual_length": residual_length}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be >= 1: got {value}")
        for name, value in {"window": window, "sinks": sinks}.items():
            if value < 0:
                raise ValueError(f"{name} must be >= 0: got {value}")
        self.n_kv_heads, self.head_dim = n_kv_heads, head_dim
        self.residual_length, self.window, self.sinks = residual_length, window, sinks
        self.reset()

    # what a subclass gives

    def _calibrate(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """See the prefill's tokens (B, H, T, d) before any is stored."""

    def _store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take (B, H, n·residual_length, d), as n calls with one chunk each would."""
        raise NotImplementedError

    def _stored_keys(self) -> torch.Tensor:
        """(B, H, n_stored, d) decoded; called only when some are stored."""
        raise NotImplementedError

    def _stored_values(self) -> torch.Tensor:
        """As :meth:`_stored_keys`."""
        raise NotImplementedError

    def _stored_bits(self) -> KVBits:
        """Bits that count, in total over batch and heads, of what is stored and what it needs."""
        raise NotImplementedError

    def _stored_nbytes(self) -> int:
        """Bytes held by what is stored and what it needs."""
        raise NotImplementedError

    def _clear(self) -> None:
        """Forget what is stored."""

    def _attend_stored(self, q: torch.Tensor, scale: float | None) -> PartialAttention:
        """Attend to what is stored; called only when there is some."""
        return attend_partial(q, self._stored_keys(), self._stored_values(), scale=scale)

    # what all share

    def reset(self) -> None:
        """Forget all tokens."""
        self._sinks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._buffer: tuple[torch.Tensor, torch.Tensor] | None = None
        self.n_stored = 0
        self._clear()

    @property
    def n_full(self) -> int:
        """Tokens in full precision."""
        return sum(0 if part is None else part[0].shape[2] for part in (self._sinks, self._buffer))

    @property
    def n_tokens(self) -> int:
        """Tokens held."""
        return self.n_stored + self.n_full

    def _check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            if x.ndim != 4 or x.shape[1] != self.n_kv_heads or x.shape[3] != self.head_dim:
                raise ValueError(
                    f"{name} must be (B, {self.n_kv_heads}, T, {self.head_dim}): "
                    f"got {tuple(x.shape)}"
                )
            if not x.is_floating_point():
                raise ValueError(f"{name} must be floating: got {x.dtype}")
        if k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
            raise ValueError(
                f"k and v must share shape, dtype and device: got {tuple(k.shape)} {k.dtype} "
                f"{k.device} and {tuple(v.shape)} {v.dtype} {v.device}"
            )
        if not k.shape[0] or not k.shape[2]:
            raise ValueError(f"k and v must hold at least one token: got {tuple(k.shape)}")
        for name, x in (("k", k), ("v", v)):
            if not bool(torch.isfinite(x).all()):
                raise ValueError(f"{name} must be finite: it holds NaN or infinity")
        held = self._buffer
        if held is not None and (
            held[0].shape[0] != k.shape[0] or held[0].dtype != k.dtype or held[0].device != k.device
        ):
            raise ValueError(
                f"k and v must continue a batch of {held[0].shape[0]} in {held[0].dtype} on "
                f"{held[0].device}: got {k.shape[0]} in {k.dtype} on {k.device}"
            )

    def prefill(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take the first tokens, (B, H, T, d) each.

        Raises:
            ValueError: tokens are held already, or as :meth:`append`.
        """
        self._check(k, v)
        if self.n_tokens:
            raise ValueError(f"prefill needs an empty cache: it holds {self.n_tokens} tokens")
        self._calibrate(k, v)
        self._push(k, v)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take any number of further tokens, (B, H, T, d) each, and flush.

        Raises:
            ValueError: other shapes, dtype or device than before, values that are not finite, or
                a cache that needs ``prefill`` first.
        """
        self._check(k, v)
        if self.needs_prefill and not self.n_tokens:
            raise ValueError("append needs prefill first: the cache is empty")
        self._push(k, v)

    def _push(self, k: torch.Tensor, v: torch.Tensor) -> None:
        room = self.sinks - (0 if self._sinks is None else self._sinks[0].shape[2])
        if room > 0:
            self._sinks = _join(self._sinks, (k[:, :, :room], v[:, :, :room]))
            k, v = k[:, :, room:], v[:, :, room:]
        self._buffer = _join(self._buffer, (k, v))
        self.flush()

    def flush(self) -> int:
        """Quantise all whole chunks before the window; ``append`` does so by itself.

        Returns:
            How many tokens moved.
        """
        if self._buffer is None:
            return 0
        k, v = self._buffer
        n = (k.shape[2] - self.window) // self.residual_length * self.residual_length
        if n <= 0:
            return 0
        self._store(k[:, :, :n], v[:, :, :n])
        self.n_stored += n
        # a copy: a view would keep what was flushed
        self._buffer = k[:, :, n:].clone(), v[:, :, n:].clone()
        return n

    def _part(self, i: int) -> list[torch.Tensor]:
        parts = [] if self._sinks is None else [self._sinks[i]]
        if self.n_stored:
            parts.append(self._stored_values() if i else self._stored_keys())
        if self._buffer is not None:
            parts.append(self._buffer[i])
        if not parts:
            raise ValueError("the cache must hold at least one token: it is empty")
        return parts

    def keys(self) -> torch.Tensor:
        """(B, H, n_tokens, d), decoded, in the dtype of what came in."""
        parts = self._part(0)
        return torch.cat([p.to(parts[-1].dtype) for p in parts], dim=2)

    def values(self) -> torch.Tensor:
        """As :meth:`keys`."""
        parts = self._part(1)
        return torch.cat([p.to(parts[-1].dtype) for p in parts], dim=2)

    def attend(self, q: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Attention of each query to all tokens held.

        Args:
            q: (B, Hq, n_q, d), Hq a multiple of H; n_q is 1 while decoding.
            scale: of the logits; None means 1/√d.

        Returns:
            (B, Hq, n_q, d) in the dtype of q, computed in float32 or wider.

        Raises:
            ValueError: an empty cache, or shapes that do not fit.
        """
        if not self.n_tokens:
            raise ValueError("attend needs at least one token: the cache is empty")
        _heads_of(q, self._buffer[0])
        full = [p for p in (self._sinks, self._buffer) if p is not None and p[0].shape[2]]
        parts = [attend_partial(q, k, v, scale=scale) for k, v in full]
        if self.n_stored:
            parts.append(self._attend_stored(q, scale))
        return merge_partials(parts).output().to(q.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes really held."""
        full = [t for part in (self._sinks, self._buffer) if part is not None for t in part]
        held = sum(t.numel() * t.element_size() for t in full)
        return held + (self._stored_nbytes() if self.n_stored else 0)

    @property
    def bits_per_element(self) -> KVBits:
        """Bits that count, of keys and of values: full precision as 16, no filling of bytes.

        Raises:
            ValueError: an empty cache.
        """
        if not self.n_tokens:
            raise ValueError("bits_per_element needs at least one token: the cache is empty")
        per_token = self._buffer[0].shape[0] * self.n_kv_heads * self.head_dim
        stored = self._stored_bits() if self.n_stored else KVBits(0.0, 0.0)
        full, size = FULL_BITS * self.n_full * per_token, self.n_tokens * per_token
        return KVBits((stored.keys + full) / size, (stored.values + full) / size)


def _join(held, new):
    if held is None:
        return tuple(t.clone() for t in new)
    return tuple(torch.cat([a, b], dim=2) for a, b in zip(held, new, strict=True))


class FullKVCache(KVCache):
    """Nothing quantised: every token in ``store_dtype``.

    Args:
        n_kv_heads: H.
        head_dim: d.
        store_dtype: float16 is the reference; a wider one is exact.

    Raises:
        ValueError: sizes below 1; later, values that ``store_dtype`` cannot hold.
    """

    def __init__(self, n_kv_heads: int, head_dim: int, *, store_dtype: torch.dtype = torch.float16):
        self.store_dtype = store_dtype
        super().__init__(n_kv_heads, head_dim, residual_length=1)

    def _clear(self) -> None:
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    def _store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        new = k.to(self.store_dtype), v.to(self.store_dtype)
        for name, x in zip("kv", new, strict=True):
            if not bool(torch.isfinite(x).all()):
                raise ValueError(f"{name} must fit {self.store_dtype}: a value overflows")
        self._held = _join(self._held, new)

    def _stored_keys(self) -> torch.Tensor:
        return self._held[0]

    def _stored_values(self) -> torch.Tensor:
        return self._held[1]

    def _stored_bits(self) -> KVBits:
        return KVBits(*(float(8 * t.numel() * t.element_size()) for t in self._held))

    def _stored_nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._held)


class KVGrids(NamedTuple):
    """Grids of keys and of values."""

    keys: GroupQuant
    values: GroupQuant


def quantize_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_bits: int,
    v_bits: int,
    group_size: int,
    store_dtype: torch.dtype = torch.float16,
) -> KVGrids:
    """Keys by channel, values by token, as KIVI: the grids that its cache and others hold.

    Keys: groups of ``group_size`` consecutive tokens in one channel. Values: groups of
    min(group_size, d) channels in one token.

    Args:
        k, v: (B, H, T, d), T a multiple of ``group_size``.
        k_bits, v_bits: 1 to 8.
        group_size: g.
        store_dtype: of scales and minima.

    Returns:
        Keys with codes (B, H, T/g, d, ⌈g·bits/8⌉) and scales (B, H, T/g, d); values with codes
        (B, H, T, d/g, ⌈g·bits/8⌉) and scales (B, H, T, d/g).

    Raises:
        ValueError: sizes that do not fit; a value that ``store_dtype`` cannot hold, naming the
            head.
    """
    made = []
    plan = (("k", k, k_bits, -2, group_size), ("v", v, v_bits, -1, min(group_size, v.shape[-1])))
    for name, x, bits, dim, g in plan:
        try:
            made.append(quantize_groupwise(x, bits, dim, g, store_dtype=store_dtype))
        except StoreOverflow as error:
            raise ValueError(
                f"{name} must fit {store_dtype}: head {error.index[1]} of batch item "
                f"{error.index[0]} does not ({error})"
            ) from None
    return KVGrids(*made)


class KIVICache(KVCache):
    """KIVI (Liu et al., 2024): asymmetric grids, keys by channel, values by token.

    Args:
        n_kv_heads: H.
        head_dim: d.
        k_bits, v_bits: 1, 2, 4 or 8.
        group_size: tokens of a key group; a value group has min(group_size, d) channels.
        residual_length: tokens of the full-precision buffer; a multiple of ``group_size``.
        sinks: first tokens kept in full precision.
        store_dtype: of scales and minima.

    Raises:
        ValueError: bits or sizes that do not fit.
    """

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        k_bits: int = 2,
        v_bits: int = 2,
        group_size: int = 128,
        residual_length: int = 128,
        sinks: int = 0,
        store_dtype: torch.dtype = torch.float16,
    ):
        check_cache_settings(
            head_dim,
            k_bits=k_bits,
            v_bits=v_bits,
            group_size=group_size,
            residual_length=residual_length,
        )
        self.k_bits, self.v_bits, self.group_size = k_bits, v_bits, group_size
        self.store_dtype = store_dtype
        super().__init__(n_kv_heads, head_dim, residual_length=residual_length, sinks=sinks)

    def _clear(self) -> None:
        self._grids: KVGrids | None = None

    def _store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        new = quantize_kv(
            k,
            v,
            k_bits=self.k_bits,
            v_bits=self.v_bits,
            group_size=self.group_size,
            store_dtype=self.store_dtype,
        )
        if self._grids is not None:
            pairs = zip(self._grids, new, strict=True)
            new = KVGrids(*(cat_groupwise(pair, dim=2) for pair in pairs))
        self._grids = new

    def _stored_keys(self) -> torch.Tensor:
        return self._grids[0].dequantize()

    def _stored_values(self) -> torch.Tensor:
        return self._grids[1].dequantize()

    def _stored_bits(self) -> KVBits:
        return KVBits(*(float(g.n_bits) for g in self._grids))

    def _stored_nbytes(self) -> int:
        return sum(g.nbytes for g in self._grids)


def check_cache_settings(
    head_dim: int, *, k_bits: int, v_bits: int, group_size: int, residual_length: int
) -> None:
    """Raise a ValueError that names the setting unless these describe grouped grids."""
    for name, bits in (("k_bits", k_bits), ("v_bits", v_bits)):
        if isinstance(bits, bool) or bits not in CACHE_BITS:
            raise ValueError(f"{name} must be one of {CACHE_BITS}: got {bits}")
    if group_size < 1:
        raise ValueError(f"group_size must be >= 1: got {group_size}")
    check_group_size(head_dim, min(group_size, head_dim), of="a value (head_dim)")
    if residual_length < 1 or residual_length % group_size:
        raise ValueError(
            "residual_length must be a multiple of group_size: "
            f"got residual_length={residual_length}, group_size={group_size}"
        )


# ------------------------------------------------------------------------- in a model


class ModelKVCache:
    """One cache a layer, for :class:`icmllab.toolbox.gpt.GPT`'s ``cache=``.

    The first call's tokens are attended to as they are, as KIVI does in prefill; from then on
    attention reads what the caches decode.

    Args:
        layers: an empty cache for each layer.

    Raises:
        ValueError: no layers, or a cache that holds tokens.
    """

    def __init__(self, layers: Sequence[KVCache]):
        if not layers or any(cache.n_tokens for cache in layers):
            raise ValueError("layers must hold an empty cache for each layer")
        self.layers = list(layers)
        self.keys: list[torch.Tensor | None] = [None] * len(layers)
        self.values: list[torch.Tensor | None] = [None] * len(layers)

    @property
    def length(self) -> int:
        """How many positions the last layer holds."""
        return self.layers[-1].n_tokens

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put new positions behind the old ones of ``layer``."""
        cache = self.layers[layer]
        if cache.n_tokens == 0:
            cache.prefill(k, v)
            self.keys[layer], self.values[layer] = k, v
            return
        cache.append(k, v)
        self.keys[layer], self.values[layer] = cache.keys(), cache.values()
