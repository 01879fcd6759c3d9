"""Finding the row of one matrix that belongs to a row of another."""

import torch


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
