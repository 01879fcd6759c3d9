"""Gain-shape k-means, residual quantisation and the cache that uses them."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from icmllab.efficiency import gsrq
from icmllab.toolbox.gpt import rope
from icmllab.toolbox.kv_cache import attend_partial

F32, F64 = torch.float32, torch.float64


def g(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(n=200, d=6, *, seed=0, dtype=F64):
    z = torch.randn(n, 1, generator=g(seed + 1), dtype=F64)
    return (torch.exp(z / 2) * torch.randn(n, d, generator=g(seed), dtype=F64)).to(dtype)


# --------------------------------------------------------------------------------------------
# One step


def test_a_codeword_is_the_weighted_mean_of_its_cell_for_any_partition():
    X, labels = rows(), torch.randint(7, (200,), generator=g(2))
    w = 0.1 + torch.rand(200, generator=g(3), dtype=F64)
    shapes, gains = gsrq.gskm_update(X, labels, 7, sample_weight=w)
    for k in range(7):
        cell = labels == k
        mean = (w[cell, None] * X[cell]).sum(0) / w[cell].sum()
        assert float((gains[k] * shapes[k] - mean).abs().max()) < 1e-12
    unit = gsrq.gskm_update(X, labels, 7, sample_weight=w, shape="unit")
    assert float((unit.gains[:, None] * unit.shapes - gains[:, None] * shapes).abs().max()) > 1e-3


@pytest.mark.parametrize("shape", ["sum", "unit"])
def test_the_gain_minimises_the_error_of_its_shape(shape):
    X, labels = rows(), torch.randint(3, (200,), generator=g(2))
    found = gsrq.gskm_update(X, labels, 3, shape=shape)

    def error(gains):
        return float((X - (gains[:, None] * found.shapes)[labels]).square().sum())

    best = error(found.gains)
    free = (found.gains > 0).double()  # the others stopped at 0
    assert int(free.sum()) >= 2
    for step in (-1e-3, 1e-3):
        assert error(found.gains + step * free) > best
    long = gsrq.gskm_update(X, labels, 3, gain="mean_norm")
    assert (long.gains > found.gains).all()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_labels_ignore_the_length_of_a_row_and_ties_go_to_the_lowest(dtype):
    X = rows(dtype=dtype)
    shapes = X[:9] / X[:9].norm(dim=1, keepdim=True)
    labels = gsrq.gskm_assign(X, shapes)
    scaled = X * (0.1 + torch.rand(200, 1, generator=g(4), dtype=F64).to(dtype) * 5)
    assert torch.equal(gsrq.gskm_assign(scaled, shapes), labels)
    assert torch.equal(gsrq.gskm_assign(X, torch.cat([shapes, shapes])), labels)
    assert int(gsrq.gskm_assign(-X[:1], torch.stack([X[0], -X[0]]))[0]) == 1  # the sign matters


def test_cells_without_a_direction_keep_their_shape_and_get_no_gain():
    X = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [3.0, 0.0]], dtype=F64)
    old = torch.eye(2, dtype=F64)[[1, 0, 0]]
    shapes, gains = gsrq.gskm_update(X, torch.tensor([0, 0, 1]), 3, previous=old)
    assert torch.equal(shapes[0], old[0])  # members cancel
    assert torch.equal(shapes[2], old[2])  # no members
    assert gains.tolist() == [0, 3, 0]


def test_a_gain_against_its_shape_stops_at_zero():
    X = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-10.0, 0.0]], dtype=F64)
    shapes, gains = gsrq.gskm_update(X, torch.zeros(3, dtype=torch.int64), 1, shape="unit")
    assert float(shapes[0, 0]) > 0.99
    assert gains.tolist() == [0]


def test_mean_length_counts_weights():
    X, w = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([3.0, 1.0])
    found = gsrq.gskm_update(
        X, torch.zeros(2, dtype=torch.int64), 1, sample_weight=w, gain="mean_norm"
    )
    assert found.gains.tolist() == [4]


def test_tiny_rows_have_a_direction_as_long_as_they_agree():
    X = 1e-15 * torch.tensor([[3.0, 4.0], [3.0, 4.0]], dtype=F64)
    found = gsrq.gskm_update(X, torch.zeros(2, dtype=torch.int64), 1)
    assert found.shapes[0].tolist() == pytest.approx([0.6, 0.8])


def test_shrinkage_is_the_resultant_length_where_lengths_are_equal():
    X = rows(60, 4)
    X = 2 * X / X.norm(dim=1, keepdim=True)
    labels = torch.arange(60) % 3
    found = gsrq.centroid_shrinkage(X, labels)
    for k in range(3):
        unit = X[labels == k] / 2
        assert float(found[k]) == pytest.approx(float(unit.mean(0).norm()), rel=1e-12)


# --------------------------------------------------------------------------------------------
# The estimator


def fitted(X, K=12, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return gsrq.GainShapeKMeans(K, **options).fit(X)


@pytest.mark.parametrize("seed", range(5))
def test_alignment_never_falls_and_the_distortion_has_its_closed_form(seed):
    X = rows(seed=seed)
    w = 0.5 + torch.rand(200, generator=g(seed), dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        km = gsrq.GainShapeKMeans(12, random_state=seed, tol=0).fit(X, sample_weight=w)
    assert (np.diff(km.alignment_history_) >= -1e-9).all()
    assert len(km.alignment_history_) > 2
    weight = torch.zeros(12, dtype=F64).index_add_(0, km.labels_, w)
    closed = (w * X.square().sum(1)).sum() - (weight * km.gains_.square()).sum()
    assert km.inertia_ == pytest.approx(float(closed), rel=1e-12)
    assert torch.allclose(km.shapes_.norm(dim=1), torch.ones(12, dtype=F64))


def test_each_round_is_one_assignment_and_one_update_written_out():
    X = rows(80, 3)
    start = X[:4].clone()
    km = fitted(X, 4, init=start, max_iter=3, tol=0)
    shapes = start / start.norm(dim=1, keepdim=True)
    for _ in range(3):
        labels = (X @ shapes.T).argmax(1)
        gains = shapes.new_zeros(4)
        for k in range(4):
            mean = X[labels == k].mean(0)
            shapes[k], gains[k] = mean / mean.norm(), mean.norm()
    assert torch.equal(km.labels_, labels)
    assert torch.allclose(km.shapes_, shapes, atol=1e-12)
    assert torch.allclose(km.cluster_centers_, gains[:, None] * shapes, atol=1e-12)


def test_weighted_channels_are_plain_k_means_of_scaled_channels():
    X, h = rows(), torch.tensor([0.2, 1, 4, 9, 1, 0.5], dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        a = gsrq.GainShapeKMeans(8).fit(X, channel_weight=h)
        b = gsrq.GainShapeKMeans(8).fit(X * h.sqrt())
    assert torch.equal(a.labels_, b.labels_)
    assert torch.allclose(a.cluster_centers_, b.cluster_centers_ / h.sqrt())
    assert torch.equal(a.predict(X), b.predict(X * h.sqrt()))
    assert torch.allclose(a.transform(X), b.transform(X * h.sqrt()))


def test_scaling_all_rows_scales_gains_and_nothing_else():
    X = rows()
    a, b = fitted(X), fitted(1e-6 * X)
    assert torch.equal(a.labels_, b.labels_)
    assert torch.allclose(b.gains_, 1e-6 * a.gains_, rtol=1e-9)
    assert a.n_iter_ == b.n_iter_


def test_empty_cells_take_the_rows_that_are_served_worst():
    X = rows(40, 3)
    same = X[0].expand(5, 3)
    km = fitted(X, 5, init=same, max_iter=30)
    assert len(km.labels_.unique()) == 5


def test_an_empty_cell_takes_the_worst_served_row_if_a_round_follows():
    X = torch.tensor([[1.0, 0.0], [1.2, 0.0], [1.0, 3.0], [1.0, -0.5]], dtype=F64)
    start = np.array([[1.0, 0.0], [1.0, 0.0]])
    two = fitted(X, 2, init=start, max_iter=2, tol=0)
    # one cell first: (1, 3) is farthest from the mean (1.05, 0.625)
    assert two.labels_.tolist() == [0, 0, 1, 0]
    one = fitted(X, 2, init=start, max_iter=1)
    assert one.labels_.tolist() == [0, 0, 0, 0]
    assert one.gains_[1] == 0


def test_more_starts_find_no_less_alignment():
    X = rows()
    once, often = ([fitted(X, n_init=n, random_state=s) for s in range(4)] for n in (1, 5))
    last = [[km.alignment_history_[-1] for km in kms] for kms in (once, often)]
    assert all(b >= a for a, b in zip(*last, strict=True))
    assert sum(last[1]) > sum(last[0])


def test_a_looser_tolerance_stops_sooner():
    X = rows()
    assert fitted(X, tol=0.5).n_iter_ == 2 < fitted(X, tol=0).n_iter_


def test_plus_plus_starts_leave_out_rows_without_weight():
    X = torch.cat([torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 9.0]])]).repeat_interleave(20, 0)
    X = X + 0.1 * torch.randn(40, 2, generator=g(3))
    w = torch.tensor([1.0, 1e-12]).repeat_interleave(20)
    km = gsrq.GainShapeKMeans(2, init="k-means++")
    shapes, found = km._start(X, w, torch.ones(2), g(0))
    assert found == 2
    assert (shapes[:, 0] > 0.9).all()


def test_rows_on_a_half_line_use_one_codeword_and_stop_after_two_rounds():
    X = torch.arange(1.0, 21)[:, None] * torch.tensor([[1.0, 2.0, 2.0]])
    with pytest.warns(ConvergenceWarning, match="1 of 4 codewords are used"):
        km = gsrq.GainShapeKMeans(4).fit(X)
    assert km.n_iter_ == 2
    assert km.labels_.tolist() == [0] * 20


def test_one_dimension_has_two_shapes():
    X = torch.tensor([[1.0], [2.0], [-3.0], [-5.0]])
    km = fitted(X, 2, init=np.array([[4.0], [-1.0]]))
    assert sorted(km.shapes_.flatten().tolist()) == [-1, 1]
    assert sorted(km.cluster_centers_.flatten().tolist()) == [-4, 1.5]
    assert fitted(rows(), 1).cluster_centers_.shape == (1, 6)


def test_gain_shape_and_euclidean_assignment_nearly_agree_where_lengths_are_equal():
    X = rows(500, 16, dtype=F32)
    X = X / X.norm(dim=1, keepdim=True)
    km = fitted(X, 8, max_iter=20)
    centres = km.cluster_centers_
    nearest = torch.cdist(X, centres).argmin(1)
    # the gains of the cells differ a little, and nothing else separates the two
    assert float((nearest == km.labels_).double().mean()) > 0.7
    equal = km.shapes_ * km.gains_.mean()
    assert torch.equal(torch.cdist(X, equal).argmin(1), km.predict(X))


BAD = [
    ({"n_clusters": 0}, {}, "n_clusters must be a whole number"),
    ({"max_iter": 0}, {}, "max_iter must be"),
    ({"init": "best"}, {}, "init must be"),
    ({"init": np.ones((3, 2))}, {}, r"init must be \(12, 6\)"),
    ({"init": np.zeros((12, 6))}, {}, "init must hold no zero row"),
    ({"shape": "mean"}, {}, "shape must be"),
    ({"gain": "norm"}, {}, "gain must be"),
    ({"spare": "drop"}, {}, "spare must be"),
    ({"n_clusters": 300}, {}, "n_clusters must be at most"),
    ({}, {"sample_weight": np.zeros(200)}, "sample_weight must be"),
    ({}, {"sample_weight": np.ones(3)}, "sample_weight must be"),
    ({}, {"channel_weight": -np.ones(6)}, "channel_weight must be"),
]


@pytest.mark.parametrize(("options", "weights", "message"), BAD)
def test_bad_arguments_are_named(options, weights, message):
    with pytest.raises(ValueError, match=message):
        gsrq.GainShapeKMeans(**{"n_clusters": 12, **options}).fit(rows(), **weights)


@pytest.mark.parametrize("X", [torch.ones(3), torch.ones(0, 3), torch.full((4, 2), math.nan)])
def test_rows_that_are_none_are_refused(X):
    with pytest.raises(ValueError, match="X must be"):
        gsrq.GainShapeKMeans(2).fit(X)


def test_spare_codewords_are_never_chosen():
    X = rows(5, 3)
    with pytest.warns(ConvergenceWarning, match="5 of 9"):
        km = gsrq.GainShapeKMeans(9, spare="unused").fit(X)
    assert int(km.predict(rows(400, 3, seed=5)).max()) < 5
    with pytest.raises(NotFittedError):
        gsrq.GainShapeKMeans(2).predict(X)
    with pytest.raises(ValueError, match="X must have 3 columns"):
        km.predict(torch.ones(2, 4))


# --------------------------------------------------------------------------------------------
# Residual quantisation


@pytest.mark.parametrize("kind", ["gskm", "lloyd", KMeans(n_init=1, max_iter=5)])
def test_codes_are_those_of_stage_by_stage_search(kind):
    X, new = rows(300, 8, dtype=F32), rows(50, 8, seed=9, dtype=F32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        q = gsrq.ResidualQuantizer(3, 16, kmeans=kind).fit(X)
    codes = q.encode(new)
    assert codes.dtype == torch.uint8
    r = new.double()
    for m in range(3):
        words = q.codebooks_[m].double()
        if kind == "gskm":
            wanted = (r @ q.stages_[m].shapes_.double().T).argmax(1)
        else:
            wanted = torch.cdist(r, words).argmin(1)
        assert torch.equal(codes[:, m].long(), wanted)
        r = r - words[wanted]
    assert torch.allclose(q.decode(codes).double(), new.double() - r, atol=1e-5)
    assert torch.allclose(q.residual_, X - q.decode(q.encode(X)), atol=1e-5)
    assert q.bits_per_element == 3 * 4 / 8


@pytest.mark.parametrize("kind", ["gskm", "lloyd"])
def test_beam_search_is_no_worse_for_any_row_and_better_in_sum(kind):
    X = rows(300, 8, dtype=F32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        q = gsrq.ResidualQuantizer(4, 16, kmeans=kind).fit(X)
    greedy = (X - q.decode(q.encode(X))).square().sum(1)
    q.beam = 4
    beam = (X - q.decode(q.encode(X))).square().sum(1)
    assert bool((beam <= greedy * (1 + 1e-5) + 1e-6).all())
    assert float(beam.sum()) < 0.99 * float(greedy.sum())
    one = gsrq.encode_beam(X, q, 1)
    assert bool(((X - q.decode(one)).square().sum(1) <= greedy * (1 + 1e-5) + 1e-6).all())


@pytest.mark.parametrize("kind", ["gskm", "lloyd"])
def test_weighted_channels_are_coded_in_their_metric(kind):
    X, h = rows(300, 6), torch.tensor([0.2, 1, 4, 9, 1, 0.5], dtype=F64)
    w = 0.1 + torch.rand(300, generator=g(3), dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        a = gsrq.ResidualQuantizer(2, 12, kmeans=kind).fit(X, w, h)
        b = gsrq.ResidualQuantizer(2, 12, kmeans=kind).fit(X * h.sqrt(), w)
    assert torch.allclose(a.codebooks_ * h.sqrt(), b.codebooks_)
    assert torch.equal(a.encode(X), b.encode(X * h.sqrt()))
    # the last update of either algorithm is the weighted mean of the cells it was made from
    if kind == "gskm":
        labels = a.stages_[0].labels_
        for k in range(12):
            mean = (w[labels == k, None] * X[labels == k]).sum(0) / w[labels == k].sum()
            assert torch.allclose(a.codebooks_[0, k], mean)
    else:
        gap = ((X[:, None] - a.codebooks_[0]).square() * h).sum(2)
        assert torch.equal(a.encode(X)[:, 0].long(), gap.argmin(1))


def test_stages_start_from_the_same_rows_or_from_new_ones():
    for starts, wanted in (("same", [7, 7]), ("new", [7, 8])):
        q = gsrq.ResidualQuantizer(2, 4, random_state=7, starts=starts).fit(rows())
        assert [stage.random_state for stage in q.stages_] == wanted
    with pytest.raises(ValueError, match="starts must be"):
        gsrq.ResidualQuantizer(2, starts="old")


def test_a_beam_that_holds_everything_finds_the_best_codes_in_the_metric():
    X, h = rows(60, 6), torch.tensor([0.2, 1, 4, 9, 1, 0.5], dtype=F64)
    q = gsrq.ResidualQuantizer(3, 4, kmeans="lloyd", beam=64).fit(X, channel_weight=h)
    every = torch.cartesian_prod(*[torch.arange(4, dtype=torch.uint8)] * 3)
    error = ((X[:, None] - q.decode(every)).square() * h).sum(2)
    found = ((X - q.decode(q.encode(X))).square() * h).sum(1)
    assert torch.allclose(found, error.min(1).values)
    q.beam, q.bias_[:, 2:] = 2, -math.inf
    assert int(q.encode(X).max()) == 1


def test_later_stages_with_nothing_left_leave_codewords_over():
    X = 2 * torch.eye(4, dtype=F64)  # coded without rounding: zeros are left
    with pytest.warns(ConvergenceWarning, match="of 4 codewords are used"):
        q = gsrq.ResidualQuantizer(2, 4).fit(X)
    assert torch.equal(q.decode(q.encode(X)), X)
    assert not bool(q.residual_.any())


def test_bad_quantisers_are_refused():
    with pytest.raises(ValueError, match="n_clusters must be at most 256"):
        gsrq.ResidualQuantizer(1, 257)
    with pytest.raises(ValueError, match="n_stages must be a whole number"):
        gsrq.ResidualQuantizer(0)
    with pytest.raises(ValueError, match="kmeans must be one of"):
        gsrq.ResidualQuantizer(1, kmeans="k")
    with pytest.raises(NotFittedError):
        gsrq.ResidualQuantizer(1).encode(rows())
    q = gsrq.ResidualQuantizer(2, 4).fit(rows())
    with pytest.raises(ValueError, match=r"codes must be \(n, 2\) uint8"):
        q.decode(torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="X must have 6 columns"):
        q.encode(torch.ones(2, 5))


# --------------------------------------------------------------------------------------------
# The cache


def tokens(B=2, H=2, n=150, d=16, *, seed=0):
    return (torch.randn(B, H, n, d, generator=g(seed + i)) for i in range(2))


def made(**options):
    k, v = tokens(seed=20, n=300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        settings = {"n_clusters": 16, "sinks": 4, "window": 32, **options}
        return gsrq.KVQuantizer(16, 8, 3, **settings).fit(k, v)


@pytest.mark.parametrize("token_scale", [True, False])
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_without_decoding_is_attention_to_the_decoded_cache(token_scale, heads):
    cache = made(token_scale=token_scale).cache()
    k, v = tokens()
    cache.prefill(k[:, :, :100], v[:, :, :100])
    for t in range(100, 150, 7):
        cache.append(k[:, :, t : t + 7], v[:, :, t : t + 7])
    assert cache.n_tokens == 150
    assert cache.n_stored == 150 - 4 - 32
    q = torch.randn(2, heads, 3, 16, generator=g(9))
    wanted = attend_partial(q, cache.keys(), cache.values()).output()
    assert torch.allclose(gsrq.attention(q, cache), wanted, atol=1e-5)
    # the ends are exact
    for held, x in ((cache.keys(), k), (cache.values(), v)):
        assert torch.equal(held[:, :, :4], x[:, :, :4])
        assert torch.equal(held[:, :, -32:], x[:, :, -32:])
        assert not torch.equal(held[:, :, 4:-32], x[:, :, 4:-32])


def test_bits_are_counted_as_the_text_says():
    cache = made().cache()
    k, v = tokens()
    cache.prefill(k, v)
    full = 4 + 32
    token = 3 * 2 * 4 + 16  # three stages and two groups of four bits, and the scale
    wanted = ((150 - full) * token + 16 * 16 * full) / (150 * 16)
    assert cache.bits_per_element.keys == cache.bits_per_element.values == pytest.approx(wanted)
    codes = 2 * 2 * (150 - full) * (3 * 2 + 2) * 2
    assert cache.nbytes == codes + 2 * (2 * 2 * full * 16 * 4)
    bare = made(token_scale=False).cache()
    bare.prefill(k, v)
    assert bare.bits_per_element.keys == pytest.approx(
        ((150 - full) * 24 + 16 * 16 * full) / (150 * 16)
    )
    quantizer = made()
    assert quantizer.codebook_bytes == 2 * 2 * (2 * 2 * 3 * 16 * 8)


def test_a_zero_token_decodes_to_zero_with_code_zero():
    cache = made(sinks=0, window=0).cache()
    k, v = tokens()
    k[:, :, 7], v[0, 1, 9] = 0, 0
    cache.prefill(k, v)
    assert not bool(cache.keys()[:, :, 7].any())
    assert not bool(cache.values()[0, 1, 9].any())
    assert not bool(cache._codes[0][:, :, 7].any())


def test_keys_before_rope_are_rotated_when_they_are_read():
    before, after = made(rope_keys="before").cache(), made().cache()
    k, v = tokens()
    before.prefill(k, v)
    after.prefill(k, v)
    turned = rope(after.keys(), torch.arange(150))
    assert torch.allclose(before.keys(), turned, atol=1e-6)
    q = torch.randn(2, 2, 1, 16, generator=g(3))
    wanted = attend_partial(q, turned, after.values()).output()
    assert torch.allclose(before.attend(q), wanted, atol=1e-5)


def test_weights_come_from_queries_and_attention_of_their_own_head():
    k, v = tokens(seed=20, n=300)
    q = torch.randn(2, 4, 50, 16, generator=g(5)) * torch.linspace(0.1, 3, 16)
    attn = torch.rand(2, 4, 50, 300, generator=g(6)).softmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit = gsrq.KVQuantizer(16, 8, 2, n_clusters=8).fit(k, v, q, attn)
    h = q[:, 2:].reshape(-1, 16).square().mean(0)
    assert torch.allclose(fit.key_quantizers[1][1].channel_weight_, h[8:])
    assert torch.equal(fit.value_quantizers[1][1].channel_weight_, torch.ones(8))


def test_codebooks_of_a_head_and_group_are_those_of_its_rows_and_weights():
    k, v = tokens(seed=20, n=300)
    q = torch.randn(2, 4, 50, 16, generator=g(5)) * torch.linspace(0.1, 3, 16)
    attn = torch.rand(2, 4, 5, 300, generator=g(6)).pow(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit = gsrq.KVQuantizer(16, 8, 2, n_clusters=8).fit(k, v, q, attn)
        mass = attn[:, 2:].mean(dim=(1, 2)).flatten()
        w = torch.maximum(mass, 0.1 * mass.mean())
        assert 0 < int((w > mass).sum()) < len(w) / 2
        h = q[:, 2:].reshape(-1, 16).square().mean(0)[8:]
        for x, books, metric in ((k, fit.key_codebooks, h), (v, fit.value_codebooks, None)):
            part = x[:, 1].reshape(-1, 16)
            part = part / (part.norm(dim=1, keepdim=True) / 4).half().float()
            alone = gsrq.ResidualQuantizer(2, 8).fit(part[:, 8:], w, metric)
            assert torch.allclose(books[1, 1], alone.codebooks_, atol=1e-5)


def test_a_token_is_its_half_precision_scale_times_its_codewords():
    cache = made(sinks=0, window=0).cache()
    k, v = tokens()
    cache.prefill(k, v)
    rho = (k.norm(dim=-1) / 4).half()
    assert torch.equal(cache._scales[0], rho)
    quantizer = cache.quantizer.key_quantizers[1][0]
    rows_ = k[0, 1, :, :8] / rho[0, 1, :, None]
    wanted = quantizer.decode(quantizer.encode(rows_)) * rho[0, 1, :, None]
    assert torch.allclose(cache.keys()[0, 1, :, :8], wanted)


def test_bad_caches_are_refused():
    k, v = tokens()
    with pytest.raises(ValueError, match="group_dim must divide head_dim"):
        gsrq.KVQuantizer(16, 5)
    with pytest.raises(ValueError, match="rope_keys must be"):
        gsrq.KVQuantizer(16, rope_keys="no")
    with pytest.raises(ValueError, match="sinks must be"):
        gsrq.KVQuantizer(16, sinks=-1)
    with pytest.raises(ValueError, match="window must be"):
        gsrq.KVQuantizer(16, window=1.5)
    with pytest.raises(ValueError, match=r"K must be \(B, H, n, 16\)"):
        gsrq.KVQuantizer(16, 8).fit(k[..., :8], v)
    with pytest.raises(ValueError, match="K and V must have one shape"):
        gsrq.KVQuantizer(16, 8).fit(k, v[:, :, :5])
    with pytest.raises(ValueError, match="Q must be"):
        gsrq.KVQuantizer(16, 8).fit(k, v, torch.ones(2, 3, 4, 16))
    with pytest.raises(NotFittedError):
        gsrq.KVQuantizer(16, 8).cache()
    assert gsrq.KVQuantizer(128).group_dim == 64
    assert gsrq.KVQuantizer(32).group_dim == 32


@pytest.mark.parametrize("dtype", [F32, F64])
def test_look_ups_and_histograms_are_products_with_decoded_rows(dtype):
    G, M, K, w, n = 2, 3, 16, 4, 70
    books = torch.randn(G, M, K, w, generator=g(1), dtype=dtype)
    codes = torch.randint(K, (n, G, M), generator=g(2)).to(torch.uint8)
    scale = 0.5 + torch.rand(n, generator=g(3), dtype=dtype)
    rows_ = (
        torch.stack(
            [sum(books[i, m][codes[:, i, m].long()] for m in range(M)) for i in range(G)], dim=1
        ).reshape(n, G * w)
        * scale[:, None]
    )
    q = torch.randn(5, G * w, generator=g(4), dtype=dtype)
    p = torch.rand(100, n, generator=g(5), dtype=dtype)
    tolerance = 1e-4 if dtype == F32 else 1e-11
    assert torch.allclose(gsrq.lut_scores(q, codes, books, scale), q @ rows_.T, atol=tolerance)
    assert torch.allclose(
        gsrq.histogram_values(p, codes, books, scale), p @ rows_, atol=10 * tolerance
    )


def test_bad_look_ups_are_named():
    books, codes = torch.randn(2, 3, 16, 4), torch.zeros(7, 2, 3, dtype=torch.uint8)
    scale, q, p = torch.ones(7), torch.ones(2, 8), torch.ones(2, 7)
    for call, message in [
        (lambda: gsrq.lut_scores(q[:, :7], codes, books, scale), r"q must be \(h, 8\)"),
        (lambda: gsrq.lut_scores(q, codes[:, :1], books, scale), r"codes must be \(n, 2, 3\)"),
        (lambda: gsrq.lut_scores(q, codes, books[0], scale), "codebooks must be"),
        (lambda: gsrq.histogram_values(p[:, 1:], codes, books, scale), r"p must be \(h, 7\)"),
        (lambda: gsrq.histogram_values(p, codes[..., :2], books, scale), "codes must be"),
        (lambda: gsrq.gskm_assign(q, books[0, 0]), "X and shapes must be"),
        (lambda: gsrq.gskm_update(q, torch.zeros(2).long(), 1, previous=p), "previous must be"),
        (lambda: gsrq.topk_retrieval(q, q, p), "q, k and k_hat must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# --------------------------------------------------------------------------------------------
# Studies and measures


def test_heavy_tails_lose_direction_under_k_means_and_not_under_gain_and_shape():
    ours, theirs = (gsrq.quantizer_run("A", m, 0, n_stages=1) for m in ("gskm", "random"))
    assert ours["cos_1"] > theirs["cos_1"] + 0.08
    assert ours["mse_1"] <= 1.015 * theirs["mse_1"]
    assert ours["usage_1"] > 225 > theirs["usage_1"]
    assert ours["singles"] == 0
    assert ours["shrinkage"] > theirs["shrinkage"]


def test_equal_lengths_tie_in_one_stage():
    ours, theirs = (
        gsrq.quantizer_run("C", m, 0, token_scale=True, n_stages=1) for m in ("gskm", "random")
    )
    assert ours["mse_1"] == pytest.approx(theirs["mse_1"], rel=0.01)
    assert ours["cos_1"] == pytest.approx(theirs["cos_1"], rel=0.01)


def test_k_means_ties_in_later_stages_if_they_start_from_the_same_rows():
    ours, same, new = (
        gsrq.quantizer_run("C", m, 0, token_scale=True, n_stages=4)
        for m in ("gskm", "random", "fresh")
    )
    assert same["mse_4"] == pytest.approx(ours["mse_4"], rel=0.01)
    assert new["mse_4"] > 1.02 * same["mse_4"]


def test_data_sets_are_what_the_text_says():
    length = gsrq.heavy_tailed(4000, 1).norm(dim=1).log()
    assert float(length.std()) == pytest.approx(math.sqrt(0.25 + 1 / 128), rel=0.05)
    assert float(gsrq.isotropic(4000, 1).std()) == pytest.approx(1, rel=0.02)
    a, b = (gsrq.kv_like(4000, seed).std(dim=0) for seed in (1, 2))
    assert torch.allclose(a, b, rtol=0.25)  # one model, whatever the seed
    assert float(a.log().std()) > 0.5
    train, test = gsrq.split("A", 0)
    assert (len(train), len(test)) == (6000, 2000)
    assert not torch.equal(train[:2000], test)
    scaled = gsrq.split("B", 0, token_scale=True)[1]
    assert torch.allclose(scaled.norm(dim=1), torch.tensor(8.0))


def test_logits_of_exact_keys_have_a_deviation_of_three():
    probe = gsrq.retrieval_probe("A", 0)
    logits = probe.scale * probe.queries @ probe.keys.T
    assert float(logits.std()) == pytest.approx(3, rel=1e-4)
    exact = probe.errors(probe.keys)
    assert exact["top1"] == 1
    assert exact["output"] == pytest.approx(0, abs=1e-9)


def test_the_mean_length_is_too_long_a_gain():
    control = gsrq.quantizer_run("A", "mean_norm", 0, n_stages=1)
    assert control["mse_1"] > 1


def test_weighting_by_the_queries_serves_the_logits_and_not_the_rows():
    found = gsrq.weighting_run(0)
    assert found["channels_logit"] < 0.75 * found["plain_logit"]
    assert found["channels_mse"] > 1.3 * found["plain_mse"]


def test_ema_quantiser_learns_clusters():
    centres = torch.tensor([[5.0, 0], [0, 5], [-5, -5]])
    X = centres.repeat(200, 1) + 0.1 * torch.randn(600, 2, generator=g(1))
    ema = gsrq.EMAQuantizer(3, random_state=4, epochs=40).fit(X)
    error = (X - ema.cluster_centers_[ema.predict(X)]).square().sum(1)
    assert float(error.median()) < 0.1
    for options in ({"decay": 1.0}, {"n_clusters": 700}):
        with pytest.raises(ValueError, match=next(iter(options))):
            gsrq.EMAQuantizer(**{"n_clusters": 3, **options}).fit(X)


def test_retrieval_by_hand():
    k = torch.eye(3)
    q = torch.tensor([[1.0, 0.2, 0.1], [0.1, 1, 0.2], [0.1, 0.2, 1]])
    assert gsrq.topk_retrieval(q, k, k) == 1
    swapped = k[[1, 0, 2]]
    assert gsrq.topk_retrieval(q, k, swapped) == pytest.approx(1 / 3)
    assert gsrq.topk_retrieval(q, k, swapped, top=3) == 1
    with pytest.raises(ValueError, match="top must be"):
        gsrq.topk_retrieval(q, k, k, top=4)


def test_unknown_data_methods_and_runs_are_named():
    for call, message in [
        (lambda: gsrq.split("D", 0), "data must be one of"),
        (lambda: gsrq.quantizer("best", 1, 0), "method must be one of"),
        (lambda: gsrq.study_run("A gskm 99"), "run must be one of RUNS"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert len(set(gsrq.RUNS)) == len(gsrq.RUNS)


# --------------------------------------------------------------------------------------------
# Checkers


def test_checkers_take_the_right_answer_and_refuse_a_slip():
    def gain(X, s, w):
        return (w * (X @ s)).sum() / w.sum()

    gsrq.check_gain(gain)
    with pytest.raises(AssertionError, match="derivative"):
        gsrq.check_gain(lambda X, s, w: (X @ s).mean())

    def step(X, shapes, w):
        labels, shapes = (X @ shapes.T).argmax(1), shapes.copy()
        gains = np.zeros(len(shapes))
        for k in set(labels.tolist()):
            mean = (w[labels == k, None] * X[labels == k]).sum(0) / w[labels == k].sum()
            gains[k] = np.linalg.norm(mean)
            shapes[k] = mean / gains[k]
        return labels, shapes, gains

    gsrq.check_gskm_step(step)
    with pytest.raises(AssertionError, match="largest inner product"):
        gsrq.check_gskm_step(lambda X, s, w: step(X, -s, w))

    def lut(q, codes, books, scale):
        table = np.einsum("hd,mkd->hmk", q, books)
        return sum(table[:, m][:, codes[:, m]] for m in range(len(books))) * scale

    gsrq.check_lut(lut)
    with pytest.raises(AssertionError, match="token scale"):
        gsrq.check_lut(lambda q, c, b, s: lut(q, c, b, np.ones_like(s)))


def test_checker_of_the_beam_wants_less_distortion_than_greedy():
    def beam(X, books, width):
        rest, codes = X[:, None], torch.zeros(len(X), 1, 0, dtype=torch.int64)
        at = torch.arange(len(X))[:, None]
        for words in books:
            gap = (rest[:, :, None] - words).square().sum(3).flatten(1)
            best = gap.topk(width, largest=False).indices
            rest = rest[at, best // len(words)] - words[best % len(words)]
            codes = torch.cat([codes[at, best // len(words)], best[..., None] % len(words)], 2)
        return codes[:, 0]

    gsrq.check_beam(beam)
    with pytest.raises(AssertionError, match="must not exceed"):
        gsrq.check_beam(lambda X, books, width: torch.zeros(len(X), 4, dtype=torch.uint8))
