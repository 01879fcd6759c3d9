"""Finding the row of one matrix that belongs to a row of another."""

import torch

from icmllab.kernels.topk_cosine import TopK, match_rank, topk_cosine
from icmllab.toolbox.linalg import as_matrix

# distances held at a time where no kernel streams them: 16 MB of float64
_COMPARED = 1 << 21


def mutual_nearest(D1: torch.Tensor, D2: torch.Tensor) -> torch.Tensor:
    """The pairs that choose each other: j is the cheapest for i by D1, i the cheapest for j by D2.

    Args:
        D1: (n, m) costs of giving row i of X the row j of Y.
        D2: (m, n) costs of giving row j of Y the row i of X; ``D1.T`` for one symmetric cost.

    Returns:
        (n_pairs, 2) int64 pairs (i, j), by rising i. Ties go to the lower index.

    Raises:
        ValueError: shapes that do not match, or costs that are NaN.
    """
    if D1.ndim != 2 or D2.shape != D1.T.shape or 0 in D1.shape:
        raise ValueError(
            "D1 and D2 must be (n, m) and (m, n), not empty: "
            f"got {tuple(D1.shape)} and {tuple(D2.shape)}"
        )
    if torch.isnan(D1).any() or torch.isnan(D2).any():
        raise ValueError("D1 and D2 must not hold NaN")
    forward, backward = _first_smallest(D1), _first_smallest(D2)
    rows = torch.arange(len(D1), device=D1.device)
    chosen = backward[forward] == rows
    return torch.stack([rows[chosen], forward[chosen]], dim=1)


def _first_smallest(D: torch.Tensor) -> torch.Tensor:
    """argmin of each row, the lowest index among ties (torch.argmin promises none)."""
    columns = torch.arange(D.shape[1], device=D.device)
    smallest = D.amin(dim=1, keepdim=True) == D
    return torch.where(smallest, columns, D.shape[1]).amin(dim=1)


METRICS = ("cosine", "euclidean")


def _pair(Q: object, K: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as matrices of one dtype, a row of K for each row of Q."""
    Q, K = as_matrix("Q", Q), as_matrix("K", K)
    if Q.shape[1] != K.shape[1]:
        raise ValueError(
            f"Q and K must have the same number of columns: got {Q.shape[1]} and {K.shape[1]}"
        )
    if Q.device != K.device:
        raise ValueError(f"Q and K must share a device: got {Q.device} and {K.device}")
    dtype = torch.promote_types(Q.dtype, K.dtype)
    return Q.to(dtype), K.to(dtype)


def match_ranks(Q: object, K: object, *, metric: str = "cosine") -> torch.Tensor:
    """The rank of each query's own item: row i of Q belongs to row i of K.

    rank_i = #{j : s_ij > s_ii} + #{j < i : s_ij = s_ii}: 0 is a hit at 1, and among equal items the
    lowest index counts as found. Exact for every k at once; the score matrix is never stored.

    Args:
        Q: (n_q, d) tensor or array.
        K: (n_k, d), n_k >= n_q.
        metric: "cosine", or "euclidean" for the smallest distance.

    Returns:
        (n_q,) int64.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, an unknown metric.
    """
    Q, K = _pair(Q, K)
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}: got {metric!r}")
    if len(K) < len(Q):
        raise ValueError(f"K must hold an item for each of the {len(Q)} rows of Q: got {len(K)}")
    if metric == "cosine":
        return match_rank(Q, K)
    Q, K = Q.double(), K.double()
    columns = torch.arange(len(K), device=K.device)
    ranks = []
    for rows in columns[: len(Q)].split(max(1, _COMPARED // len(K))):
        # differences and not the expanded square, which loses equal distances to rounding
        D = torch.cdist(Q[rows], K, compute_mode="donot_use_mm_for_euclid_dist")
        mine = D.gather(1, rows[:, None])
        before = (mine > D) | ((mine == D) & (columns < rows[:, None]))
        ranks.append(before.sum(dim=1))
    return torch.cat(ranks)


def recall_at_k(Q: object, K: object, k: int = 1, *, metric: str = "cosine") -> float:
    """The share of queries whose own item is among the k nearest.

    Args:
        Q: (n_q, d) tensor or array; row i belongs to row i of K.
        K: (n_k, d), n_k >= n_q.
        k: in [1, n_k].
        metric: as in :func:`match_ranks`.

    Raises:
        ValueError: as in :func:`match_ranks`, or k out of range.
    """
    ranks = match_ranks(Q, K, metric=metric)
    if isinstance(k, bool) or k != int(k) or not 1 <= k <= len(K):
        raise ValueError(f"k must be a whole number in [1, {len(K)}]: got {k}")
    return float((ranks < k).double().mean())


def top_k(Q: object, K: object, k: int, *, exclude: object = None) -> TopK:
    """The k items of largest cosine for each query, streamed: the scores are never stored.

    Args:
        Q: (n_q, d) tensor or array.
        K: (n_k, d).
        k: in [1, 32].
        exclude: (n_q, 2) integers, the items low <= j < high that a query must not get; or None.

    Returns:
        ``TopK(scores, indices)``, (n_q, k) each, most similar first, ties to the lower index;
        −∞ and −1 where a query has fewer than k items left.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, k out of range.
    """
    Q, K = _pair(Q, K)
    bounds = None if exclude is None else torch.as_tensor(exclude, device=Q.device)
    return topk_cosine(Q, K, k, exclude=bounds)
