"""Mutual nearest neighbours against a plain double loop."""

import pytest
import torch

from icmllab.toolbox.retrieval import mutual_nearest


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
