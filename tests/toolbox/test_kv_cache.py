"""Caches: exact parts, references, what they hold, what they count, and use in a model."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from icmllab.toolbox.gpt import GPT, GPTConfig
from icmllab.toolbox.kv_cache import (
    FullKVCache,
    KIVICache,
    KVBits,
    KVCache,
    ModelKVCache,
    PartialAttention,
    attend_partial,
    attention_error,
    attention_logits,
    bits_per_element,
    mean_cosine,
    merge_partials,
    relative_mse,
    softmax_parts,
    weighted_values,
)
from icmllab.toolbox.quantization import quantize_groupwise


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def exact(q, k, v, scale=None, mask=None):
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


# ------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 2), (7, 7)])
@pytest.mark.parametrize("n_q", [1, 5])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_one_part_is_attention(heads, n_q, scale):
    Hq, H = heads
    q, k, v = normal(2, Hq, n_q, 8), normal(2, H, 11, 8, seed=1), normal(2, H, 11, 8, seed=2)
    part = attend_partial(q, k, v, scale=scale)
    torch.testing.assert_close(part.output(), exact(q, k, v, scale))
    shared = k.repeat_interleave(Hq // H, dim=1)
    logits = (q @ shared.mT) * (1 / math.sqrt(8) if scale is None else scale)
    torch.testing.assert_close(attention_logits(q, k, scale), logits)
    torch.testing.assert_close(part.log_sum_exp(), logits.logsumexp(-1))
    weights = softmax_parts(logits)
    torch.testing.assert_close(weighted_values(weights.weights, v), part.o)


@pytest.mark.parametrize("cuts", [[11], [4, 7], [1] * 11, [0, 5, 0, 6, 0]])
def test_parts_merge_to_the_whole_in_any_order_and_grouping(cuts):
    q, k, v = normal(2, 4, 3, 8), normal(2, 2, 11, 8, seed=1) * 30, normal(2, 2, 11, 8, seed=2)
    parts = [
        attend_partial(q, a, b) for a, b in zip(k.split(cuts, 2), v.split(cuts, 2), strict=True)
    ]
    whole = exact(q, k, v)
    torch.testing.assert_close(merge_partials(parts).output(), whole)
    torch.testing.assert_close(merge_partials(parts[::-1]).output(), whole)
    nested = parts[0]
    for part in parts[1:]:
        nested = merge_partials([nested, part])
    torch.testing.assert_close(nested.output(), whole)


def test_averaging_the_outputs_of_parts_is_not_enough():
    q, k, v = normal(1, 1, 1, 8), normal(1, 1, 10, 8, seed=1), normal(1, 1, 10, 8, seed=2)
    parts = [
        attend_partial(q, k[:, :, :7], v[:, :, :7]),
        attend_partial(q, k[:, :, 7:], v[:, :, 7:]),
    ]
    mean = (parts[0].output() + parts[1].output()) / 2
    assert (mean - exact(q, k, v)).abs().max() > 1e-2


def test_masks_hide_tokens_and_a_part_that_shows_none_is_neutral():
    q, k, v = normal(2, 2, 4, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 8, seed=2)
    lens = torch.tensor([6, 2])
    mask = (torch.arange(6) < lens[:, None])[:, None, None]
    part = attend_partial(q, k, v, mask=mask)
    torch.testing.assert_close(part.output(), exact(q, k, v, mask=mask))
    nothing = attend_partial(q, k, v, mask=torch.zeros_like(mask))
    empty = attend_partial(q, k[:, :, :0], v[:, :, :0])
    for neutral in (nothing, empty):
        assert neutral.m.eq(float("-inf")).all()
        assert not neutral.l.any()
        assert not neutral.o.any()
        for order in ([neutral, part], [part, neutral], [neutral, part, neutral]):
            merged = merge_partials(order)
            torch.testing.assert_close(merged.output(), part.output())
            torch.testing.assert_close(merged.log_sum_exp(), part.log_sum_exp())
    alone = merge_partials([nothing, empty])
    assert torch.equal(alone.output(), torch.zeros_like(part.o))
    assert alone.log_sum_exp().eq(float("-inf")).all()


def test_logits_in_the_thousands_neither_overflow_nor_vanish():
    q, k, v = (
        normal(1, 1, 2, 4).float() * 1e3,
        normal(1, 1, 5, 4, seed=1).float(),
        normal(1, 1, 5, 4),
    )
    parts = [attend_partial(q, k[:, :, i : i + 1], v[:, :, i : i + 1].float()) for i in range(5)]
    torch.testing.assert_close(merge_partials(parts).output(), exact(q, k, v.float()))


def test_bad_attention_is_named():
    q, k = normal(2, 3, 1, 8), normal(2, 2, 5, 8)
    with pytest.raises(ValueError, match="multiple of the 2 heads"):
        attend_partial(q, k, k)
    with pytest.raises(ValueError, match="q and k"):
        attend_partial(q[..., :4], k, k)
    with pytest.raises(ValueError, match="k and v"):
        attend_partial(q, k, k[:, :, :3])
    with pytest.raises(ValueError, match="parts"):
        merge_partials([])


# ------------------------------------------------------------------------------ errors


def test_errors_meet_their_definitions():
    x, y = normal(5, 8), normal(5, 8, seed=1)
    assert relative_mse(x, x) == 0
    assert relative_mse(x, 0 * x) == pytest.approx(1)
    assert relative_mse(x, 1.1 * x) == pytest.approx(0.01)
    shifted = relative_mse(x + 100, y + 100, centre_dim=0)  # offsets do not count
    assert shifted == pytest.approx(relative_mse(x - x.mean(0), y - x.mean(0)))
    with pytest.raises(ValueError, match="constant"):
        relative_mse(torch.ones(3, 2), torch.zeros(3, 2), centre_dim=0)
    assert mean_cosine(x, 3 * x) == pytest.approx(1)
    expected = torch.nn.functional.cosine_similarity(x, y).mean().item()
    assert mean_cosine(x, y) == pytest.approx(expected)
    assert mean_cosine(x[:2], torch.stack([x[0], 0 * x[1]])) == pytest.approx(0.5)
    for wrong in (lambda: relative_mse(x, y[:2]), lambda: mean_cosine(x, y[:2])):
        with pytest.raises(ValueError, match="one shape"):
            wrong()
    with pytest.raises(ValueError, match="all 0"):
        relative_mse(0 * x, y)


def test_attention_error_against_plain_formulas():
    q, k, v = normal(1, 4, 3, 8) * 2, normal(1, 2, 9, 8, seed=1), normal(1, 2, 9, 8, seed=2)
    k2, v2 = k + 0.3 * normal(1, 2, 9, 8, seed=3), v + 0.2 * normal(1, 2, 9, 8, seed=4)
    found = attention_error(q, k, v, k2, v2)
    assert found.output == pytest.approx(relative_mse(exact(q, k, v), exact(q, k2, v2)))
    p, p2 = (attention_logits(q, x).softmax(-1) for x in (k, k2))
    assert found.kl == pytest.approx(((p * (p / p2).log()).sum(-1)).mean().item())
    assert found.top1 == pytest.approx((p.argmax(-1) == p2.argmax(-1)).double().mean().item())
    same = attention_error(q, k, v, k, v)
    assert (same.output, same.top1) == (0, 1)
    assert same.kl == pytest.approx(0)
    with pytest.raises(ValueError, match="shapes"):
        attention_error(q, k, v, k[:, :, :3], v)


# ----------------------------------------------------------------------------- caches


def caches(H: int = 2, d: int = 16):
    return [
        FullKVCache(H, d, store_dtype=torch.float64),
        KIVICache(H, d, group_size=8, residual_length=16, store_dtype=torch.float64),
        KIVICache(H, d, k_bits=4, v_bits=8, group_size=8, residual_length=8, sinks=3),
    ]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("pieces", [[50], [1] * 50, [20, 1, 13, 16], [2, 30, 18]])
def test_how_tokens_arrive_changes_nothing(which, pieces):
    k, v, q = normal(2, 2, 50, 16), normal(2, 2, 50, 16, seed=1), normal(2, 4, 1, 16, seed=2)
    whole, grown = caches()[which], caches()[which]
    whole.prefill(k, v)
    for a, b in zip(k.split(pieces, 2), v.split(pieces, 2), strict=True):
        grown.append(a, b)
    for cache in (whole, grown):
        assert cache.n_tokens == 50
        assert cache.keys().shape == cache.values().shape == (2, 2, 50, 16)
    assert torch.equal(whole.keys(), grown.keys())
    assert torch.equal(whole.values(), grown.values())
    assert whole.nbytes == grown.nbytes
    assert whole.bits_per_element == grown.bits_per_element
    torch.testing.assert_close(whole.attend(q), grown.attend(q))
    torch.testing.assert_close(whole.attend(q), exact(q, whole.keys(), whole.values()))
    torch.testing.assert_close(whole.attend(q, 0.7), exact(q, whole.keys(), whole.values(), 0.7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_full_cache_is_exact_in_its_dtype(dtype):
    k, v, q = normal(1, 2, 9, 8), normal(1, 2, 9, 8, seed=1), normal(1, 2, 1, 8, seed=2)
    cache = FullKVCache(2, 8, store_dtype=dtype)
    cache.append(k, v)
    assert torch.equal(cache.keys(), k.to(dtype).double())
    tolerance = {torch.float16: 2e-3, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    assert (cache.attend(q) - exact(q, k, v)).abs().max() < tolerance
    bits = torch.finfo(dtype).bits
    assert cache.bits_per_element == KVBits(bits, bits)
    assert cache.nbytes == 2 * 2 * 9 * 8 * bits // 8


def test_kivi_groups_keys_by_channel_and_values_by_token():
    k, v = normal(1, 2, 40, 16, dtype=torch.float32), normal(1, 2, 40, 16, seed=1).float()
    k[..., 5] *= 40  # an outlier channel spoils no other channel
    cache = KIVICache(2, 16, group_size=16, residual_length=16)
    cache.prefill(k, v)
    assert (cache.n_stored, cache.n_full) == (32, 8)
    keys = quantize_groupwise(k[:, :, :32], 2, -2, 16).dequantize()
    values = quantize_groupwise(v[:, :, :32], 2, -1, 16).dequantize()
    assert torch.equal(cache.keys(), torch.cat([keys, k[:, :, 32:]], dim=2))
    assert torch.equal(cache.values(), torch.cat([values, v[:, :, 32:]], dim=2))
    others = [c for c in range(16) if c != 5]
    by_token = quantize_groupwise(k[:, :, :32], 2, -1, 16).dequantize()
    assert relative_mse(k[:, :, :32, others], keys[..., others]) < 0.3 * relative_mse(
        k[:, :, :32, others], by_token[..., others]
    )


def test_buffer_only_and_sinks_stay_exact():
    k, v, q = (
        normal(1, 1, 15, 8).float(),
        normal(1, 1, 15, 8, seed=1).float(),
        normal(1, 1, 1, 8).float(),
    )
    cache = KIVICache(1, 8, group_size=16, residual_length=16)
    cache.prefill(k, v)
    assert (cache.attend(q) - exact(q, k, v)).abs().max() < 1e-6
    cache = KIVICache(1, 8, group_size=4, residual_length=4, sinks=3)
    cache.append(k[:, :, :2], v[:, :, :2])
    assert cache.n_full == 2
    cache.append(k[:, :, 2:], v[:, :, 2:])
    assert (cache.n_stored, cache.n_full) == (12, 3)
    assert torch.equal(cache.keys()[:, :, :3], k[:, :, :3])
    assert not torch.equal(cache.keys()[:, :, 3:], k[:, :, 3:])


def test_bits_and_bytes_follow_their_formulas():
    d, g, T = 128, 128, 1024
    k, v = normal(2, 3, T + 5, d).float(), normal(2, 3, T + 5, d, seed=1).float()
    cache = KIVICache(3, d)
    cache.prefill(k[:, :, :T], v[:, :, :T])
    assert cache.bits_per_element == KVBits(2.25, 2.25)
    # 72 bytes a token and head: 2·(32 + 4)
    assert cache.nbytes == 2 * 3 * T * 72
    cache.append(k[:, :, T:], v[:, :, T:])
    expected = bits_per_element(n_quantized=T, n_full=5, head_dim=d, token_bits=d * 2 + 32 * d / g)
    assert expected == pytest.approx((T * 288 + 5 * 2048) / ((T + 5) * 128))
    assert cache.bits_per_element == pytest.approx((expected, expected))
    assert cache.nbytes == 2 * 3 * (T * 72 + 5 * 2 * d * 4)
    narrow = KIVICache(1, 64, k_bits=4, v_bits=1, residual_length=256)  # value groups of 64
    narrow.prefill(normal(1, 1, 256, 64), normal(1, 1, 256, 64))
    assert narrow.bits_per_element == KVBits(4 + 32 / 128, 1 + 32 / 64)


def test_counting_formula_covers_patterns_and_codebooks():
    # PatternKV at d=g=128, 2 bit, 32 patterns, 2048 tokens
    found = bits_per_element(
        n_quantized=2048,
        n_full=0,
        head_dim=128,
        token_bits=256 + 32 + 5,
        constant_bits=16 * 128 * 32,
    )
    assert found == pytest.approx(2.5390625)
    # GSRQ: (n − n_fp)(8MG + 16) + 16·d·n_fp over n·d
    found = bits_per_element(n_quantized=964, n_full=36, head_dim=64, token_bits=8 * 4 + 16)
    assert found == pytest.approx((964 * 48 + 16 * 64 * 36) / 64_000)
    with pytest.raises(ValueError, match="n_quantized"):
        bits_per_element(n_quantized=0, n_full=0, head_dim=4, token_bits=1)


class Halved(KVCache):
    """Stores tokens as half their value: enough to see who handles what."""

    def _clear(self):
        self.stored, self.calls = [], []

    def _store(self, k, v):
        self.calls.append(k.shape[2])
        self.stored.append((k / 2, v / 2))

    def _stored_keys(self):
        return torch.cat([k for k, _ in self.stored], dim=2)

    def _stored_values(self):
        return torch.cat([v for _, v in self.stored], dim=2)

    def _stored_bits(self):
        return KVBits(1.0 * self._stored_keys().numel(), 3.0 * self._stored_keys().numel())

    def _stored_nbytes(self):
        return self._stored_keys().numel()


def test_a_sliding_window_keeps_the_last_tokens_exact():
    k, v = normal(1, 1, 20, 4), normal(1, 1, 20, 4, seed=1)
    cache = Halved(1, 4, residual_length=1, window=6, sinks=2)
    for i in range(20):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert cache.n_full == min(i + 1, 8)
    expected = torch.cat([k[:, :, :2], k[:, :, 2:14] / 2, k[:, :, 14:]], dim=2)
    assert torch.equal(cache.keys(), expected)
    at_once = Halved(1, 4, residual_length=1, window=6, sinks=2)
    at_once.prefill(k, v)
    assert torch.equal(at_once.keys(), expected)
    assert at_once.calls == [12]
    assert cache.bits_per_element == pytest.approx(((12 + 8 * 16) / 20, (36 + 8 * 16) / 20))
    assert cache.flush() == 0


def test_reset_forgets_all_and_a_new_batch_may_differ():
    cache = KIVICache(2, 8, group_size=4, residual_length=4)
    cache.prefill(normal(3, 2, 9, 8), normal(3, 2, 9, 8))
    cache.reset()
    assert (cache.n_tokens, cache.nbytes) == (0, 0)
    with pytest.raises(ValueError, match="empty"):
        cache.attend(normal(1, 2, 1, 8))
    cache.prefill(normal(1, 2, 9, 8).float(), normal(1, 2, 9, 8).float())
    assert cache.keys().dtype == torch.float32


def test_what_came_in_is_not_changed_nor_kept():
    k, v = normal(1, 1, 10, 8), normal(1, 1, 10, 8, seed=1)
    cache = KIVICache(1, 8, group_size=16, residual_length=16)
    cache.prefill(k, v)
    before = cache.keys()
    k.zero_()
    assert torch.equal(cache.keys(), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k_bits": 3}, "k_bits"),
        ({"v_bits": 16}, "v_bits"),
        ({"group_size": 7, "residual_length": 7}, "group_size"),
        ({"group_size": 4, "residual_length": 6}, "residual_length"),
        ({"n_kv_heads": 0}, "n_kv_heads"),
        ({"sinks": -1}, "sinks"),
    ],
)
def test_bad_settings_are_named(settings, message):
    base = {"n_kv_heads": 2, "head_dim": 8, "group_size": 8, "residual_length": 8}
    with pytest.raises(ValueError, match=message):
        KIVICache(**base | settings)


def test_bad_calls_are_named():
    cache = KIVICache(2, 8, group_size=4, residual_length=4)
    k = normal(1, 2, 9, 8)
    for empty in (cache.keys, cache.values, lambda: cache.bits_per_element):
        with pytest.raises(ValueError, match="empty"):
            empty()
    for bad, message in (
        ((k[:, :1], k[:, :1]), "k must be"),
        ((k, k[..., :4]), "v must be"),
        ((k, k[:, :, :3]), "share shape"),
        ((k, k.float()), "share shape"),
        ((k / 0, k), "finite"),
        ((k.long(), k.long()), "floating"),
        ((k[:, :, :0], k[:, :, :0]), "at least one token"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.append(*bad)
    cache.prefill(k, k)
    with pytest.raises(ValueError, match="empty cache"):
        cache.prefill(k, k)
    with pytest.raises(ValueError, match="continue a batch of 1"):
        cache.append(k.float(), k.float())
    with pytest.raises(ValueError, match="heads"):
        cache.attend(normal(1, 3, 1, 8))
    huge = k.clone()
    huge[0, 1, 2, 3] = 1e6
    fresh = KIVICache(2, 8, group_size=4, residual_length=4)
    with pytest.raises(ValueError, match=r"v must fit torch\.float16: head 1 of batch item 0"):
        fresh.append(k, huge)
    with pytest.raises(ValueError, match="overflows"):
        FullKVCache(2, 8).append(huge, k)

    class Needy(Halved):
        needs_prefill = True

    with pytest.raises(ValueError, match="prefill first"):
        Needy(2, 8).append(k, k)


# ------------------------------------------------------------------------- in a model


@pytest.fixture
def model():
    shape = {"vocab_size": 17, "context": 40, "d_model": 32, "n_layers": 2, "n_heads": 2}
    return GPT(GPTConfig(**shape, init_std=0.4), seed=0).double()


@pytest.mark.parametrize("pieces", [[12, *[1] * 20], [1] * 32, [20, 5, 7]])
def test_decoding_through_full_caches_is_the_full_forward(model, pieces):
    tokens = torch.randint(17, (2, 32), generator=torch.Generator().manual_seed(0))
    cache = ModelKVCache([FullKVCache(2, 16, store_dtype=torch.float64) for _ in range(2)])
    parts = [model(p, cache=cache).logits for p in tokens.split(pieces, dim=1)]
    assert cache.length == 32
    full = model(tokens).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-10, atol=1e-12)


def test_decoding_through_few_bits_comes_closer_with_more_of_them(model):
    tokens = torch.randint(17, (2, 32), generator=torch.Generator().manual_seed(0))
    full, off = model(tokens).logits[:, 16:], {}
    for bits in (1, 4, 8):
        layers = [
            KIVICache(2, 16, k_bits=bits, v_bits=bits, group_size=8, residual_length=8)
            for _ in range(2)
        ]
        cache = ModelKVCache(layers)
        parts = [model(p, cache=cache).logits for p in tokens.split([16, *[1] * 16], dim=1)]
        off[bits] = relative_mse(full, torch.cat(parts[1:], dim=1))
        assert layers[0].n_stored == 32
    assert off[8] < 1e-3 < off[4] < off[1]


def test_model_cache_needs_empty_layers(model):
    with pytest.raises(ValueError, match="layers"):
        ModelKVCache([])
    used = FullKVCache(2, 16)
    used.append(normal(1, 2, 1, 16), normal(1, 2, 1, 16))
    with pytest.raises(ValueError, match="empty cache"):
        ModelKVCache([used])


def test_neutral_part_can_be_written_by_hand():
    q, k, v = normal(1, 1, 1, 4), normal(1, 1, 3, 4, seed=1), normal(1, 1, 3, 4, seed=2)
    part = attend_partial(q, k, v)
    neutral = PartialAttention(
        torch.full_like(part.m, float("-inf")), torch.zeros_like(part.l), torch.zeros_like(part.o)
    )
    assert torch.equal(merge_partials([neutral, part]).output(), part.output())
