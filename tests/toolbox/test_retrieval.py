"""Finding partners: against plain loops, other libraries, and what a compiled kernel loads."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors

from icmllab.kernels import aot, runtime
from icmllab.kernels import topk_cosine as kernel
from icmllab.toolbox import retrieval
from icmllab.toolbox.retrieval import match_ranks, mutual_nearest, recall_at_k, top_k


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 4), (20, 31)])
def test_mutual_nearest_is_what_two_loops_find(seed, n, m):
    g = torch.Generator().manual_seed(seed)
    # few distinct costs: ties are frequent
    D1 = torch.randint(0, 5, (n, m), generator=g).float()
    D2 = torch.randint(0, 5, (m, n), generator=g).float()
    best = [min(range(m), key=lambda j: D1[i, j].item()) for i in range(n)]
    back = [min(range(n), key=lambda i: D2[j, i].item()) for j in range(m)]
    expected = [[i, best[i]] for i in range(n) if back[best[i]] == i]
    assert mutual_nearest(D1, D2).tolist() == expected


def test_a_permuted_copy_is_matched_row_by_row():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(40, 5, generator=g, dtype=torch.float64)
    perm = torch.randperm(40, generator=g)
    D = torch.cdist(X, X[perm])
    pairs = mutual_nearest(D, D.T)
    assert torch.equal(perm[pairs[:, 1]], pairs[:, 0])
    assert len(pairs) == 40


@pytest.mark.parametrize(
    ("D1", "D2", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 4), r"\(m, n\)"),
        (torch.zeros(0, 4), torch.zeros(4, 0), "not empty"),
        (torch.full((2, 2), float("nan")), torch.zeros(2, 2), "NaN"),
    ],
)
def test_bad_costs_are_refused(D1, D2, message):
    with pytest.raises(ValueError, match=message):
        mutual_nearest(D1, D2)


# ------------------------------------------------------------------------- ranks and recall


def _pairs(seed, n=60, m=80, d=5, noise=0.7):
    g = torch.Generator().manual_seed(seed)
    K = torch.randn(m, d, generator=g, dtype=torch.float64)
    return K[:n] + noise * torch.randn(n, d, generator=g, dtype=torch.float64), K


def _scores(Q, K, metric):
    if metric == "euclidean":
        return -np.linalg.norm(Q[:, None] - K[None], axis=2)
    unit = [m / np.linalg.norm(m, axis=1, keepdims=True) for m in (Q, K)]
    return unit[0] @ unit[1].T


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("seed", range(3))
def test_rank_is_the_place_in_a_sorted_row(seed, metric):
    Q, K = _pairs(seed)
    order = np.argsort(-_scores(Q.numpy(), K.numpy(), metric), axis=1, kind="stable")
    wanted = [int(np.flatnonzero(row == i)[0]) for i, row in enumerate(order)]
    ranks = match_ranks(Q, K, metric=metric)
    assert ranks.tolist() == wanted
    assert len(set(wanted)) > 5
    for k in (1, 3, 80):
        hits = np.mean([i in row[:k] for i, row in enumerate(order)])
        assert recall_at_k(Q, K, k, metric=metric) == pytest.approx(hits)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_among_equal_items_the_lowest_index_is_found(metric):
    K = torch.randn(6, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    K = K.repeat(4, 1)
    assert match_ranks(K, K, metric=metric).tolist() == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6


def test_ranks_in_blocks_are_the_ranks_of_the_whole(monkeypatch):
    Q, K = _pairs(1)
    whole = {m: match_ranks(Q, K, metric=m) for m in ("cosine", "euclidean")}
    near = top_k(Q, K, 7)
    monkeypatch.setattr(kernel, "_SCORED", 300)
    monkeypatch.setattr(retrieval, "_COMPARED", 300)
    for m, ranks in whole.items():
        assert torch.equal(match_ranks(Q, K, metric=m), ranks)
    assert torch.equal(top_k(Q, K, 7).indices, near.indices)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999), k=st.integers(1, 32), n=st.integers(1, 40), m=st.integers(1, 60))
def test_top_k_is_the_head_of_a_stable_sort_ties_included(seed, k, n, m):
    g = torch.Generator().manual_seed(seed)
    # few distinct rows, so that many scores are equal
    Q, K = (torch.randint(-1, 2, (r, 3), generator=g).double() for r in (n, m))
    unit = [torch.nn.functional.normalize(X, dim=1) for X in (Q, K)]
    s = (unit[0] @ unit[1].T).mul(1e9).round() / 1e9
    order = s.sort(dim=1, descending=True, stable=True).indices[:, :k]
    found = top_k(Q, K, k)
    assert torch.equal(found.indices[:, : order.shape[1]], order)
    assert bool((found.indices[:, order.shape[1] :] == -1).all())
    assert bool((found.scores[:, order.shape[1] :] == -torch.inf).all())
    kept = found.scores[:, : order.shape[1]]
    torch.testing.assert_close(kept, s.gather(1, order), atol=1e-8, rtol=0)


def test_top_k_is_scikit_learns_neighbours():
    Q, K = _pairs(2, n=50, m=200, d=16)
    model = NearestNeighbors(n_neighbors=8, metric="cosine").fit(K.numpy())
    distance, index = model.kneighbors(Q.numpy())
    found = top_k(Q.numpy(), K.numpy(), 8)
    assert found.indices.tolist() == index.tolist()
    np.testing.assert_allclose(1 - found.scores, distance, atol=1e-10)
    # float32 and half precision move scores by their rounding and no more
    for dtype, atol in ((torch.float32, 1e-6), (torch.float16, 2e-3)):
        low = top_k(Q.to(dtype), K.to(dtype), 8)
        assert low.scores.dtype == torch.float32
        np.testing.assert_allclose(1 - low.scores, distance, atol=atol)


def test_excluded_items_are_not_found():
    Q, K = _pairs(3, n=10, m=12)
    bounds = torch.tensor([[0, 0], [3, 9], [0, 12], [0, 11], [11, 12], [5, 5]] + [[2, 4]] * 4)
    found = top_k(Q, K, 12, exclude=bounds)
    free = top_k(Q, K, 12)
    for i, (low, high) in enumerate(bounds.tolist()):
        wanted = [j for j in free.indices[i].tolist() if not low <= j < high]
        assert found.indices[i].tolist() == wanted + [-1] * (12 - len(wanted))


def test_rows_of_zeros_and_rows_of_huge_or_tiny_entries_have_cosines():
    K = torch.tensor([[0.0, 0.0], [1e200, 0.0], [1e-200, 1e-200], [-3.0, 0.0]]).double()
    K[1, 0], K[2] = 1e200, 1e-200
    found = top_k(torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64), K, 4)
    assert found.indices.tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
    np.testing.assert_allclose(found.scores, [[1, 0.5**0.5, 0, -1], [0] * 4], atol=1e-12)


def test_nothing_to_look_for_is_no_error():
    K = torch.eye(3)
    assert kernel.match_rank(K[:0], K).shape == (0,)
    assert kernel.topk_cosine(K[:0], K, 2).indices.shape == (0, 2)
    assert kernel.topk_cosine(K, K[:0], 2).indices.tolist() == [[-1, -1]] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda Q, K: match_ranks(Q, K[:9]), "K must hold an item for each of the 60 rows"),
        (lambda Q, K: match_ranks(Q, K[:, :4]), "same number of columns: got 5 and 4"),
        (lambda Q, K: match_ranks(Q, K, metric="dot"), "metric must be one of cosine, euclidean"),
        (lambda Q, K: match_ranks(Q * float("nan"), K), "Q must be finite"),
        (lambda Q, K: recall_at_k(Q, K, 81), r"k must be a whole number in \[1, 80\]: got 81"),
        (lambda Q, K: recall_at_k(Q, K, 0), "k must be"),
        (lambda Q, K: top_k(Q, K, 33), r"k must be a whole number in \[1, 32\]: got 33"),
        (lambda Q, K: top_k(Q, K, 2, exclude=[[0, 1]]), r"exclude must have shape \(60, 2\)"),
    ],
)
def test_bad_calls_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(*_pairs(0))


@pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton exists on Linux only")
def test_compiled_tiles_of_keys_are_copied_by_128_bits():
    # asynchronous copies to shared memory, which the table of compiled kernels does not count
    assembly = aot.compile_program("topk_cosine", "fp32 k=10", "sm_90").assembly
    assert re.search(r"\bLDGSTS\S*\.128\b", assembly)
