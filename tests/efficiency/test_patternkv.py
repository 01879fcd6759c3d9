"""Pattern banks, the cache that uses them, and what they are measured on."""

import math
import re

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from icmllab.efficiency import patternkv as pk
from icmllab.kernels.aot import compile_program
from icmllab.toolbox.kv_cache import attend_partial

F16, F32, F64 = torch.float16, torch.float32, torch.float64


def g(seed=0):
    return torch.Generator().manual_seed(seed)


def clustered(T=256, d=32, *, k=5, seed=0, dtype=F32, B=1, H=2):
    """(B, H, T, d) with k clusters a head."""
    centres = 3 * torch.randn(B, H, k, d, generator=g(seed))
    pick = torch.randint(k, (B, H, T, 1), generator=g(seed + 1)).expand(B, H, T, d)
    return (centres.gather(2, pick) + 0.4 * torch.randn(B, H, T, d, generator=g(seed + 2))).to(
        dtype
    )


def cache(H=2, d=32, **options):
    settings = {"group_size": 32, "residual_length": 32, "n_k_patterns": 8, "n_v_patterns": 8}
    return pk.PatternKVCache(H, d, **(settings | options))


# --------------------------------------------------------------------------------------------
# Patterns


@pytest.mark.parametrize("dtype", [F16, F32, F64])
def test_mined_patterns_are_centroids_of_their_cells(dtype):
    x = clustered(400, 6, dtype=dtype)[0, 0]
    patterns = pk.mine_patterns(x, 5, max_iter=100, generator=g(1))
    wide = x.to(patterns.dtype)
    assert patterns.dtype == (F64 if dtype == F64 else F32)
    labels = pk.assign_patterns(wide, patterns).index
    for p in range(len(patterns)):
        torch.testing.assert_close(patterns[p], wide[labels == p].mean(0), atol=1e-4, rtol=1e-4)
    inertia = float((wide - patterns[labels]).square().sum())
    best = KMeans(5, n_init=10, random_state=0).fit(wide.double().numpy()).inertia_
    assert inertia <= 1.3 * best


def test_few_or_equal_rows_are_their_own_patterns():
    x = torch.randn(4, 3, generator=g())
    assert torch.equal(pk.mine_patterns(x, 9), x.unique(dim=0))
    twice = torch.cat([x, x])
    assert len(pk.mine_patterns(twice, 8)) == 4
    assert len(pk.mine_patterns(torch.zeros(50, 3), 8)) == 1
    # more distinct rows than patterns, some of them equal: no empty cluster is kept
    mixed = torch.cat([torch.zeros(40, 3), torch.randn(5, 3, generator=g(2))])
    found = pk.mine_patterns(mixed, 4, generator=g(3))
    counts = torch.bincount(pk.assign_patterns(mixed, found).index, minlength=len(found))
    assert bool((counts > 0).all())


def test_mining_samples_and_repeats():
    x = torch.randn(3000, 4, generator=g())
    one, two = (pk.mine_patterns(x, 8, sample=500, generator=g(1)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, pk.mine_patterns(x, 8, sample=500, generator=g(2)))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda x: pk.mine_patterns(x, 0), "n_patterns"),
        (lambda x: pk.mine_patterns(x, 257), "n_patterns"),
        (lambda x: pk.mine_patterns(x, 2, sample=0), "sample"),
        (lambda x: pk.mine_patterns(x[0], 2), "x must"),
        (lambda x: pk.mine_patterns(x * math.nan, 2), "x must"),
        (lambda x: pk.assign_patterns(x, x[:, :2]), "patterns"),
        (lambda x: pk.PatternBank(x[:0]), "patterns"),
        (lambda x: pk.PatternBank(x, 3), "patterns"),
        (lambda x: pk.PatternBank(x, 300), "max_patterns"),
        (lambda x: pk.PatternBank(x).maybe_extend(x), "tau0"),
        (lambda x: pk.scatter_decomposition(x, torch.zeros(3).long()), "labels"),
        (lambda x: pk.group_range_stats(x, x[:2], 3, dim=0), "group_size"),
    ],
)
def test_patterns_refuse(act, message):
    with pytest.raises(ValueError, match=message):
        act(torch.randn(8, 4, generator=g()))


def test_assignment_is_the_nearest_with_its_distance():
    x, p = torch.randn(50, 6, generator=g()), torch.randn(7, 6, generator=g(1))
    found = pk.assign_patterns(x, p)
    all_distances = torch.cdist(x.double(), p.double())
    assert torch.equal(found.index, all_distances.argmin(dim=1))
    torch.testing.assert_close(
        found.distance.double(), all_distances.amin(dim=1), atol=1e-5, rtol=0
    )


def bank(seed=0):
    x = clustered(200, 8, seed=seed)[0, 0]
    made = pk.PatternBank(pk.mine_patterns(x, 5, generator=g()), 12)
    made.calibrate(x)
    return made, x


def test_a_bank_grows_when_vectors_are_far_and_never_changes_what_it_has():
    made, x = bank()
    before = made.patterns
    assert made.maybe_extend(x) == 0
    assert made.version_count == 0
    far = x + 20
    assert made.maybe_extend(far) == 4
    assert made.version_count == 1
    assert torch.equal(made.patterns[:5], before)
    assert float(made.assign(far).distance.mean()) < float(torch.cdist(far, before).amin(1).mean())
    made.patterns[:] = 0  # a copy
    assert torch.equal(made.patterns[:5], before)


@pytest.mark.parametrize(
    ("far", "distance", "added"), [(20, 1.6, False), (30, 1.6, True), (20, 9.0, True)]
)
def test_a_bank_is_extended_by_a_quarter_of_far_vectors_or_a_far_mean(far, distance, added):
    """Of 100 vectors some lie far; with normal distance 1, what lies beyond 1.5 is far."""
    made = pk.PatternBank(torch.zeros(1, 4))
    made.tau0 = 1.0
    x = torch.zeros(100, 4)
    x[:, 0] = 0.5
    x[:far, 0] = distance
    assert (made.maybe_extend(x) > 0) == added


def test_a_full_bank_stays_and_room_limits_what_is_added():
    made, x = bank()
    assert made.maybe_extend(x + 20) == 4
    assert made.maybe_extend(x - 20) == 3  # 12 at most
    assert made.maybe_extend(x * 30) == 0
    assert len(made) == 12
    one, x = bank()
    assert one.maybe_extend(x[:1] + 50) == 1  # as many as are far
    with pytest.raises(ValueError, match="far_fraction"):
        one.maybe_extend(x, far_fraction=2.0)


def test_scatter_adds_up_for_any_partition():
    x = torch.randn(100, 7, generator=g(), dtype=F64) + 30
    labels = torch.randint(6, (100,), generator=g(1)) * 3  # names with gaps
    found = pk.scatter_decomposition(x, labels)
    assert found.total == pytest.approx(found.within + found.between, rel=1e-12)
    assert found.total == pytest.approx(float(x.var(dim=0, unbiased=False).sum() * 100))
    same = pk.scatter_decomposition(x, torch.zeros(100).long())
    assert same.between == pytest.approx(0, abs=1e-8)
    own = pk.scatter_decomposition(x, torch.arange(100))
    assert own.within == 0


def test_ranges_by_hand():
    x = torch.tensor([[0.0, 0.0], [1.0, 10.0], [0.0, 1.0], [1.0, 11.0]])
    patterns = torch.tensor([[0.0, 0.5], [1.0, 10.5]])
    keys = pk.group_range_stats(x, patterns, 4, dim=0)
    assert (keys.raw, keys.residual) == ((1 + 11) / 2, (0 + 1) / 2)
    values = pk.group_range_stats(x, patterns, 2, dim=1)
    assert values.raw == (0 + 9 + 1 + 10) / 4
    assert values.residual == 0.5
    assert values.wider == 0.25  # the first row's range was 0


# --------------------------------------------------------------------------------------------
# The cache


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_every_element_is_within_half_a_step(dtype, bits):
    k, v = clustered(96, dtype=dtype), clustered(96, seed=5, dtype=dtype)
    made = cache(k_bits=bits, v_bits=bits)
    made.prefill(k, v)
    for x, got, side, axis in ((k, made.keys(), 0, -2), (v, made.values(), 1, -1)):
        grid = made._sides[side].grid
        step = grid.scale.double()[..., None].expand(*grid.scale.shape, 32)
        if axis == -2:
            step = step.transpose(-1, -2).reshape(x.shape)
        else:
            step = step.reshape(x.shape)
        slack = 2e-3 * grid.zero.double().abs().max() + 1e-6  # the minimum is float16
        assert bool(((x - got).double().abs() <= step / 2 + slack).all())


def test_one_pattern_changes_nothing_for_keys_and_something_for_values():
    k, v = clustered(128, dtype=F64) + 4, clustered(128, seed=3, dtype=F64) + 4
    options = {"group_size": 32, "residual_length": 32, "store_dtype": F64}
    one = pk.PatternKVCache(2, 32, n_k_patterns=1, n_v_patterns=1, update_keys=False, **options)
    kivi = pk.KIVICache(2, 32, **options)
    for c in (one, kivi):
        c.prefill(k, v)
    torch.testing.assert_close(one.keys(), kivi.keys(), atol=1e-9, rtol=0)
    assert float((one.values() - kivi.values()).abs().max()) > 1e-3


def test_patterns_beat_kivi_on_clusters():
    k, v = clustered(256), clustered(256, seed=9)
    made, kivi = cache(), pk.KIVICache(2, 32, group_size=32, residual_length=32)
    for c in (made, kivi):
        c.prefill(k, v)
    assert float((made.keys() - k).square().mean()) < 0.3 * float((kivi.keys() - k).square().mean())
    assert float((made.values() - v).square().mean()) < 0.3 * float(
        (kivi.values() - v).square().mean()
    )


def test_tokens_do_not_depend_on_how_they_are_appended():
    k, v = clustered(300), clustered(300, seed=4)
    made = []
    for steps in ((200,), (1,) * 7 + (193,), (33, 67, 100)):
        c = cache()
        c.prefill(k[:, :, :100], v[:, :, :100])
        at = 100
        for n in steps:
            c.append(k[:, :, at : at + n], v[:, :, at : at + n])
            at += n
        assert c.n_tokens == 300
        assert (c.n_stored, c.n_full) == (288, 12)
        made.append(c)
    for c in made[1:]:
        assert torch.equal(c.keys(), made[0].keys())
        assert torch.equal(c.values(), made[0].values())
        assert c.bits_per_element == made[0].bits_per_element


def test_what_is_stored_never_changes_while_the_bank_grows():
    k, v = clustered(64), clustered(64, seed=4)
    c = cache()
    c.prefill(k, v)
    before = c.keys()
    for step in range(4):
        c.append(k[:, :, :32] + 15 * (step + 1), v[:, :, :32])
    assert c.key_banks[0][0].version_count == 4
    assert len(c.key_banks[0][0]) > 8
    assert len(c.value_banks[0][0]) == 8  # fixed after prefill
    assert torch.equal(c.keys()[:, :, :64], before)
    moved = cache(update_values=True)
    moved.prefill(k, v)
    moved.append(k[:, :, :32], v[:, :, :32] + 15)
    assert len(moved.value_banks[0][0]) > 8
    still = cache(update_keys=False)
    still.prefill(k, v)
    still.append(k[:, :, :32] + 15, v[:, :, :32])
    assert len(still.key_banks[0][0]) == 8


@pytest.mark.parametrize("ratio", [1, 4, 7])
@pytest.mark.parametrize(("k_bits", "v_bits", "sinks"), [(2, 2, 0), (1, 4, 3), (8, 2, 0)])
def test_attention_without_decoding_is_attention_to_what_is_decoded(ratio, k_bits, v_bits, sinks):
    k, v = clustered(140, B=2), clustered(140, seed=6, B=2)
    c = cache(k_bits=k_bits, v_bits=v_bits, sinks=sinks)
    c.prefill(k, v)
    q = torch.randn(2, 2 * ratio, 1, 32, generator=g(8))
    for scale in (None, 0.3):
        wanted = attend_partial(q, c.keys(), c.values(), scale=scale).output()
        torch.testing.assert_close(c.attend(q, scale=scale), wanted, atol=2e-5, rtol=1e-4)
    several = torch.randn(2, 2 * ratio, 3, 32, generator=g(9))
    wanted = attend_partial(several, c.keys(), c.values()).output()
    torch.testing.assert_close(c.attend(several), wanted, atol=2e-5, rtol=1e-4)


def test_a_cache_that_is_all_buffer_is_exact():
    k, v = clustered(20), clustered(20, seed=3)
    c = cache()
    c.prefill(k, v)
    assert c.n_stored == 0
    assert torch.equal(c.keys(), k)
    q = torch.randn(1, 4, 1, 32, generator=g(1))
    torch.testing.assert_close(c.attend(q), attend_partial(q, k, v).output(), atol=1e-6, rtol=0)
    assert c.bits_per_element == (16.0, 16.0)


def test_bits_and_bytes_are_counted():
    k, v = clustered(110, H=1), clustered(110, seed=3, H=1)
    c = pk.PatternKVCache(
        1, 32, group_size=32, residual_length=32, n_k_patterns=5, n_v_patterns=3, k_bits=2, v_bits=4
    )
    c.prefill(k, v)
    stored, full, d = 96, 14, 32
    keys = stored * (d * 2 + 32 * d / 32 + 3) + 16 * d * 5 + 16 * d * full
    values = stored * (d * 4 + 32 * d / 32 + 2) + 16 * d * 3 + 16 * d * full
    assert c.bits_per_element.keys == pytest.approx(keys / (110 * d))
    assert c.bits_per_element.values == pytest.approx(values / (110 * d))
    held = stored * (d * 2 // 8 + d * 4 // 8) + 2 * stored  # codes, indices
    held += 2 * 4 * (d * stored // 32) + 2 * d * (5 + 3) + 2 * 4 * d * full  # float32 buffer
    assert c.nbytes == held


def test_reset_forgets_everything():
    k, v = clustered(64), clustered(64, seed=3)
    c = cache()
    c.prefill(k, v)
    first = c.keys()
    c.reset()
    assert c.n_tokens == 0
    with pytest.raises(ValueError, match="prefill first"):
        c.append(k, v)
    with pytest.raises(ValueError, match="empty"):
        c.attend(torch.randn(1, 2, 1, 32))
    c.prefill(k, v)
    assert torch.equal(c.keys(), first)


def test_half_types_come_back_as_they_came():
    k, v = clustered(64, dtype=F16), clustered(64, seed=3, dtype=F16)
    c = cache()
    c.prefill(k, v)
    assert c.keys().dtype == F16
    q = torch.randn(1, 2, 1, 32, generator=g()).half()
    assert c.attend(q).dtype == F16
    assert bool(torch.isfinite(c.attend(q)).all())


def test_constant_groups_are_exact_and_large_channels_stay_finite():
    k, v = torch.ones(1, 1, 64, 32), torch.full((1, 1, 64, 32), 0.5)
    c = cache(H=1)
    c.prefill(k, v)
    assert torch.equal(c.keys(), k)
    assert torch.equal(c.values(), v)
    v = clustered(64, H=1)
    v[..., 3] *= 1000
    c = cache(H=1)
    c.prefill(clustered(64, H=1), v)
    assert bool(torch.isfinite(c.values()).all())
    with pytest.raises(ValueError, match="float16"):
        cache(H=1).prefill(clustered(64, H=1), v * 1e3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_bits": 3}, "k_bits"),
        ({"v_bits": 16}, "v_bits"),
        ({"group_size": 24}, "residual_length|head_dim"),
        ({"residual_length": 48}, "residual_length"),
        ({"n_k_patterns": 0}, "n_k_patterns"),
        ({"n_v_patterns": 9, "max_patterns": 8}, "n_v_patterns"),
        ({"max_patterns": 257}, "max_patterns"),
        ({"sinks": -1}, "sinks"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        cache(**options)


def test_tokens_are_checked():
    k, v = clustered(64), clustered(64, seed=3)
    for bad, message in (
        ((k[:, :1], v[:, :1]), "k must be"),
        ((k, v[:, :, :5]), "share shape"),
        ((k, v.double()), "share shape, dtype"),
        ((k * math.nan, v), "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            cache().prefill(*bad)


def test_a_flush_by_the_kernel_is_the_same_flush():
    """What a GPU runs, here by the op's reference."""
    for options in ({}, {"k_bits": 1, "v_bits": 4}, {"group_size": 16, "residual_length": 32}):
        k, v = clustered(96, B=2), clustered(96, seed=4, B=2)
        plain, other = cache(**options), cache(**options)
        other._by_kernel = lambda x: True
        for c in (plain, other):
            c.prefill(k, v)
            c.append(k[:, :, :32] + 9, v[:, :, :32])
        assert torch.equal(plain.keys(), other.keys())
        assert torch.equal(plain.values(), other.values())
        assert plain.nbytes == other.nbytes
    wide = clustered(64)
    wide[:, 1, :, 2] *= 1e6
    c = cache(update_keys=False)
    c._by_kernel = lambda x: True
    c.prefill(clustered(64), clustered(64))
    with pytest.raises(ValueError, match="head 1"):
        c.append(wide, clustered(64))


# --------------------------------------------------------------------------------------------
# Data and studies


def test_data_are_what_they_are_called():
    data = pk.structured(3)
    assert data.k.shape == (2048, 128)
    changes = float((data.topic[1:] != data.topic[:-1]).double().mean())
    assert 0.008 < changes < 0.03
    rest = data.k - data.noise
    for t in data.topic.unique().tolist():
        rows = rest[data.topic == t]
        assert float((rows - rows.mean(0)).square().mean()) < 0.1  # what the walk leaves
    near = torch.cdist(data.v, data.class_vectors).argmin(dim=1)
    assert torch.equal(near, data.classes)
    again = pk.structured(3)
    assert torch.equal(again.k, data.k)
    k, _ = pk.drifting(1)
    early, late = k[:512].mean(0), k[-512:].mean(0)
    assert float((early - late).square().mean()) > 0.1


def test_hadamard_is_orthogonal():
    H = pk.hadamard(16)
    torch.testing.assert_close(H @ H.T, torch.eye(16))
    with pytest.raises(ValueError, match="power of two"):
        pk.hadamard(12)


def test_methods_cost_what_they_say():
    data = pk.structured(0)
    bits = {m: pk.code(m, data.k, data.v).bits for m in pk.METHODS}
    assert bits["patternkv"] == pytest.approx(2 + 32 / 128 + 5 / 128 + 16 * 32 / 2048)
    assert bits["kivi"] == 2.25
    assert bits["kivi32"] == 3.0
    assert bits["per_token"] == bits["hadamard"] == 2.25
    with pytest.raises(ValueError, match="method"):
        pk.code("fp8", data.k, data.v)
    with pytest.raises(ValueError, match="kind"):
        pk.control_run("sorted", 0)


def test_the_gain_is_there_and_not_without_structure():
    ours, kivi = (pk.structured_run(m, 5) for m in ("patternkv", "kivi"))
    for field in ("key", "value", "output"):
        assert ours[field] < 0.45 * kivi[field]
    noise = pk.control_run("noise", 5)
    assert 0.9 < noise["key"] / noise["kivi"] <= 1
    random = pk.control_run("random", 5)
    assert random["key"] > random["kivi"]


def test_drift_needs_mining_while_decoding():
    found = pk.drift_run(4)
    assert found["online"] < 0.5
    assert found["static"] > 1.15
    assert found["patterns"] <= 256


def test_recall_hangs_on_the_keys_own_part():
    exact, ours = (pk.recall_run(m, 2) for m in ("exact", "patternkv"))
    assert exact > 0.4  # of 16 classes
    assert ours > exact - 0.06


def test_memory_ratio_is_the_arithmetic_one():
    found = pk.memory_run()
    tokens = 2 * 128 * 2 // 8 + 2 * 4 + 2
    assert found["patternkv"] == pytest.approx(512 / (tokens + 2 * 32 * 256 / 8192))
    assert found["kivi"] == pytest.approx(512 / (tokens - 2))


def test_runs_are_named_and_repeat():
    assert len(set(pk.RUNS)) == len(pk.RUNS)
    assert pk.study_run(run="kivi 2 32 0") == pk.study_run(run="kivi 2 32 0")


# --------------------------------------------------------------------------------------------
# Kernels


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_use_tensor_cores_and_read_codes_in_words(target):
    made = compile_program("lowbit_attend", "fp16 2 bit", target)
    cores = "v_mfma" if target == "gfx942" else r"\b[HU]\w*MMA"
    assert re.search(cores, made.assembly)
    assert made.load_bits >= (64 if target == "gfx942" else 128)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_nearest_pattern_of_the_kernel_is_the_banks(dtype):
    x = clustered(64, dtype=dtype)
    patterns = 3 * torch.randn(2, 9, 32, generator=g(7)).half()
    count = torch.tensor([9, 4], dtype=torch.int32)
    found = pk.align_quantize(x[0], patterns, count, bits=2, group_size=32, keys=True)
    for h in range(2):
        wanted = pk.assign_patterns(x[0, h], patterns[h, : count[h]].to(dtype)).index
        assert torch.equal(found.index[h].long(), wanted)


def test_checkers_accept_arrays():
    def pack(codes):
        padded = np.concatenate([codes, np.zeros(-len(codes) % 4, dtype=np.uint8)]).reshape(-1, 4)
        return (padded << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=1).astype(np.uint8)

    def unpack(data, n):
        return ((data[:, None] >> np.arange(0, 8, 2)) & 3).reshape(-1)[:n]

    pk.check_pack(pack, unpack)
    pk.check_pack((pack, unpack))
    with pytest.raises(AssertionError, match="lowest bits first"):
        pk.check_pack(lambda c: pack(c[::-1]), unpack)
