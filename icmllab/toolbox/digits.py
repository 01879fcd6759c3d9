"""The 1797 handwritten digits that scikit-learn bundles, cut in ways that several papers use."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

N_DIGITS = 1797


class View(NamedTuple):
    """One view of the digits: features and labels of the training and the test rows.

    Attributes:
        x_train: (n_train, n_features) float32 in [0, 1].
        y_train: (n_train,) int64 digits 0..9.
        x_test: (n_test, n_features) float32.
        y_test: (n_test,) int64.
    """

    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor


class TwoViews(NamedTuple):
    """Two views of the same digits, row by row: ``a`` sees the left half, ``b`` the right."""

    a: View
    b: View


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    bundle = load_digits()
    return bundle.images / 16.0, bundle.target


def digits_two_views(seed: int, *, n_train: int = 1200, n_test: int = 300) -> TwoViews:
    """Left and right halves of the 8×8 digits, 32 features each.

    Args:
        seed: picks the split; the rows are shuffled, and both views have the same rows.
        n_train: training rows, >= 1.
        n_test: test rows, >= 1; together at most 1797.

    Raises:
        ValueError: sizes that do not fit.
    """
    if n_train < 1 or n_test < 1 or n_train + n_test > N_DIGITS:
        raise ValueError(
            f"n_train and n_test must be >= 1 and at most {N_DIGITS} together: "
            f"got {n_train} and {n_test}"
        )
    images, target = _digits()
    order = np.random.default_rng(seed).permutation(N_DIGITS)
    train, test = order[:n_train], order[n_train : n_train + n_test]
    labels = [torch.from_numpy(target[rows].astype(np.int64)) for rows in (train, test)]

    def view(columns: slice) -> View:
        half = images[:, :, columns].reshape(N_DIGITS, -1).astype(np.float32)
        x_train, x_test = (torch.from_numpy(half[rows]) for rows in (train, test))
        return View(x_train, labels[0], x_test, labels[1])

    return TwoViews(view(slice(0, 4)), view(slice(4, 8)))
