"""k-means against scikit-learn, plain loops and its own invariants."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from icmllab.toolbox.clustering import (
    cluster_sums,
    kmeans,
    kmeans_plus_plus,
    nearest_centroid,
    usage_perplexity,
)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cloud(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(*shape, generator=gen(seed), dtype=torch.float64)
    return (x * torch.exp(0.5 * torch.randn(*shape[:-1], 1, generator=gen(seed + 1)))).to(dtype)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("max_iter", [1, 5, 300])
def test_lloyd_is_scikit_learns_from_the_same_start(seed, weighted, max_iter):
    X, start = cloud(400, 5, seed=seed), cloud(7, 5, seed=seed + 9)
    weight = torch.rand(400, generator=gen(seed), dtype=torch.float64) if weighted else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        theirs = KMeans(
            7, init=start.numpy(), n_init=1, max_iter=max_iter, tol=0, algorithm="lloyd"
        )
        theirs.fit(X.numpy(), sample_weight=None if weight is None else weight.numpy())
    ours = kmeans(X, 7, init=start, max_iter=max_iter, empty="farthest", sample_weight=weight)
    assert np.array_equal(ours.labels.numpy(), theirs.labels_)
    np.testing.assert_allclose(ours.centroids, theirs.cluster_centers_, rtol=1e-9, atol=1e-12)
    assert ours.inertia.item() == pytest.approx(theirs.inertia_, rel=1e-9)
    assert torch.equal(ours.counts, torch.bincount(ours.labels, minlength=7))


def test_float32_reaches_the_same_distortion():
    X, start = cloud(3000, 16), cloud(32, 16, seed=5)
    wide = kmeans(X, 32, init=start)
    narrow = kmeans(X.float(), 32, init=start.float())
    assert narrow.centroids.dtype == torch.float32
    assert narrow.inertia.item() == pytest.approx(wide.inertia.item(), rel=5e-3)
    assert kmeans(X.half(), 32, init=start).centroids.dtype == torch.float32


@pytest.mark.parametrize("empty", ["keep", "farthest"])
@pytest.mark.parametrize("tol", [0.0, 1e-3])
def test_a_batch_gives_what_its_problems_give(empty, tol):
    X, start = cloud(2, 3, 120, 4), cloud(2, 3, 6, 4, seed=8)
    start[0, 1, 2:] += 50  # empty clusters in one problem
    weight = torch.rand(2, 3, 120, generator=gen(2)) + 0.1
    options = {"max_iter": 40, "empty": empty, "tol": tol}
    whole = kmeans(X, 6, init=start, sample_weight=weight, **options)
    for i in range(2):
        for j in range(3):
            alone = kmeans(X[i, j], 6, init=start[i, j], sample_weight=weight[i, j], **options)
            assert torch.equal(whole.labels[i, j], alone.labels)
            torch.testing.assert_close(whole.centroids[i, j], alone.centroids)
            assert bool(whole.converged[i, j]) == bool(alone.converged)


def test_inertia_never_rises_and_the_end_is_a_fixed_point():
    X, start = cloud(500, 3), cloud(9, 3, seed=4)
    inertia = [kmeans(X, 9, init=start, max_iter=m).inertia.item() for m in range(12)]
    assert all(b <= a + 1e-9 for a, b in pairwise(inertia))
    end = kmeans(X, 9, init=start, max_iter=200)
    assert bool(end.converged)
    sums = cluster_sums(X, end.labels, 9)
    torch.testing.assert_close(end.centroids, sums.sums / sums.weights[:, None])
    total = (X - X.mean(0)).square().sum()
    between = (sums.weights * (end.centroids - X.mean(0)).square().sum(-1)).sum()
    torch.testing.assert_close(end.inertia + between, total)


def test_weights_count_like_repeats():
    X, start = cloud(60, 3), cloud(4, 3, seed=3)
    times = torch.randint(1, 5, (60,), generator=gen(1))
    weighted = kmeans(X, 4, init=start, sample_weight=times.double(), max_iter=50)
    repeated = kmeans(X.repeat_interleave(times, dim=0), 4, init=start, max_iter=50)
    torch.testing.assert_close(weighted.centroids, repeated.centroids)
    torch.testing.assert_close(weighted.inertia, repeated.inertia)


def test_ties_go_to_the_lowest_index():
    X = torch.zeros(50, 2)
    C = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]]).repeat(20, 1)
    assert not nearest_centroid(X, C).labels.any()
    X = torch.tensor([[2.0, 0.0], [0.0, -3.0]])
    assert nearest_centroid(X, C).labels.tolist() == [0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
def test_nearest_centroid_is_the_argmin_of_distances(lead, dtype):
    X, C = cloud(*lead, 700, 6, dtype=dtype), cloud(*lead, 40, 6, seed=7, dtype=dtype)
    D = torch.cdist(X.double(), C.double())
    found = nearest_centroid(X, C)
    assert torch.equal(found.labels, D.argmin(dim=-1))
    expected = D.amin(dim=-1).square().to(dtype)
    torch.testing.assert_close(found.squared_distance, expected, rtol=1e-4, atol=1e-6)


def test_distance_to_a_row_met_is_exactly_zero_far_from_the_origin():
    X = cloud(20, 4, dtype=torch.float32) + 1e4
    assert not nearest_centroid(X, X.clone()).squared_distance.any()


def test_cluster_sums_are_what_a_loop_adds():
    X, labels = cloud(2, 30, 4), torch.randint(0, 5, (2, 30), generator=gen(1))
    labels[labels == 3] = 2
    weight = torch.rand(2, 30, generator=gen(3), dtype=torch.float64)
    found = cluster_sums(X, labels, 5, weight)
    for b in range(2):
        for c in range(5):
            mine = labels[b] == c
            expected = (weight[b, mine, None] * X[b, mine]).sum(0)
            torch.testing.assert_close(found.sums[b, c], expected)
            torch.testing.assert_close(found.weights[b, c], weight[b, mine].sum())
    assert torch.equal(
        cluster_sums(X, labels, 5).weights[0].long(), labels[0].bincount(minlength=5)
    )


def test_empty_clusters_stay_or_take_the_farthest_rows():
    X = torch.tensor([[0.0], [1.0], [2.0], [3.0], [40.0], [50.0]])
    start = torch.tensor([[0.0], [1e6], [2e6]])
    kept = kmeans(X, 3, init=start, max_iter=20)
    assert kept.counts.tolist() == [6, 0, 0]
    assert kept.centroids[1:].flatten().tolist() == [1e6, 2e6]
    once = kmeans(X, 3, init=start, max_iter=1, empty="farthest")
    assert once.centroids.flatten().tolist() == [1.5, 50, 40]  # farthest first, out of the old one
    end = kmeans(X, 3, init=start, max_iter=20, empty="farthest")
    assert int(end.counts.min()) >= 1


def test_more_clusters_than_distinct_rows_leaves_the_spare_ones_empty():
    X = torch.tensor([[0.0, 1.0], [5.0, 5.0]]).repeat_interleave(8, dim=0)
    for empty in ("keep", "farthest"):
        found = kmeans(X, 5, empty=empty, generator=gen())
        assert found.inertia == 0
        assert int((found.counts > 0).sum()) == 2
        assert bool(torch.isfinite(found.centroids).all())


def test_seeding_spreads_and_is_reproducible():
    centres = torch.tensor([[0.0, 0], [100, 0], [0, 100], [100, 100]])
    X = centres.repeat(50, 1) + cloud(200, 2, dtype=torch.float32)
    for seed in range(20):
        rows = kmeans_plus_plus(X, 4, generator=gen(seed))
        assert len(set((rows % 4).tolist())) == 4  # random rows would do so 9 times of 100
    a, b = (kmeans_plus_plus(X, 10, generator=gen(3)) for _ in range(2))
    assert torch.equal(a, b)
    assert len(set(a.tolist())) == 10


def test_seeding_draws_by_squared_distance_and_weight():
    # one row at 0, others at distance 1 and 3: the second is drawn 1 : 9, then by weight 1 : 1
    X = torch.tensor([[0.0], [1.0], [3.0]]).expand(20_000, 3, 1)
    weight = torch.tensor([1.0, 0.0, 0.0]).expand(20_000, 3)
    first = kmeans_plus_plus(X, 1, sample_weight=weight, generator=gen())
    assert not first.any()
    for w, share in ((1.0, 0.9), (1 / 9, 0.5)):
        weight = torch.tensor([1e9, 1.0, w]).expand(20_000, 3)
        second = kmeans_plus_plus(X, 2, sample_weight=weight, generator=gen(1))[:, 1]
        assert float((second == 2).double().mean()) == pytest.approx(share, abs=0.01)


def test_a_repeat_far_from_the_origin_is_not_drawn_again():
    X = torch.tensor([[1000.0, 1000.0], [1000.5, 1000.0], [1000.0, 1000.5]])
    X = X.repeat_interleave(30, dim=0)
    for seed in range(30):
        rows = kmeans_plus_plus(X, 3, generator=gen(seed))
        assert len({int(r) // 30 for r in rows}) == 3


def test_random_start_takes_distinct_rows():
    X = torch.arange(10.0)[:, None]
    found = kmeans(X, 10, init="random", max_iter=0, generator=gen())
    assert sorted(found.centroids.flatten().tolist()) == X.flatten().tolist()
    assert found.n_iter == 0


def test_perplexity_counts_clusters_in_use():
    counts = torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0], [10, 10, 0, 0]])
    torch.testing.assert_close(usage_perplexity(counts), torch.tensor([4.0, 1, 2]).double())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda X: kmeans(X, 0), "n_clusters"),
        (lambda X: kmeans(X, 11), "n_clusters"),
        (lambda X: kmeans(X[0], 1), r"\(\.\.\., n, d\)"),
        (lambda X: kmeans(X / 0, 2), "finite"),
        (lambda X: kmeans(X.long(), 2), "floating"),
        (lambda X: kmeans(X, 2, init="best"), "init"),
        (lambda X: kmeans(X, 2, init=X), "init must be"),
        (lambda X: kmeans(X, 2, init=X[:2] * float("nan")), "init must be finite"),
        (lambda X: kmeans(X, 2, empty="drop"), "empty"),
        (lambda X: kmeans(X, 2, tol=-1), "tol"),
        (lambda X: kmeans(X, 2, sample_weight=-torch.ones(10)), "sample_weight"),
        (lambda X: kmeans(X, 2, sample_weight=torch.zeros(10)), "all 0"),
        (lambda X: kmeans(X, 2, sample_weight=torch.ones(9)), "sample_weight"),
        (lambda X: nearest_centroid(X, X[:, :1]), "centroids"),
        (lambda X: cluster_sums(X, torch.full((10,), 3), 3), "labels"),
        (lambda X: cluster_sums(X, torch.zeros(9).long(), 3), "labels"),
    ],
)
def test_bad_calls_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(cloud(10, 3))
