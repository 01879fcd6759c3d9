"""scikit-learn's bundled handwritten digits: 1797 images of 8 x 8, ten classes, no download."""

from typing import NamedTuple

import torch


class View(NamedTuple):
    """One way of looking at the digits.

    Attributes:
        train_x: (n_train, n_features) float32.
        train_y: (n_train,) int64 labels 0..9.
        test_x: (n_test, n_features) float32.
        test_y: (n_test,) int64.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


class TwoViews(NamedTuple):
    """Left and right halves of the same digits, rows in the same order."""

    left: View
    right: View


def load_digits(*, n_train: int = 1200, n_test: int = 300, seed: int = 0) -> View:
    """Whole images, pixels in [0, 1], split by a seeded permutation.

    Args:
        n_train: training rows.
        n_test: test rows; at most 1797 in all.
        seed: of the permutation.
    """
    from sklearn.datasets import load_digits as bundled

    data = bundled()
    total = len(data.target)
    if n_train < 1 or n_test < 1 or n_train + n_test > total:
        raise ValueError(
            f"n_train and n_test must be at least 1 and at most {total} in all: got {n_train}, {n_test}"
        )
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    x = torch.from_numpy(data.data).float()[order] / 16
    y = torch.from_numpy(data.target).long()[order]
    end = n_train + n_test
    return View(x[:n_train], y[:n_train], x[n_train:end], y[n_train:end])


def digits_two_views(seed: int = 0, *, n_train: int = 1200, n_test: int = 300) -> TwoViews:
    """Two "modalities" of each digit: its left four columns and its right four, 32 features each.

    Args:
        seed: of the split.
        n_train: training rows.
        n_test: test rows.
    """
    whole = load_digits(n_train=n_train, n_test=n_test, seed=seed)

    def half(columns: slice) -> View:
        train, test = (
            x.reshape(-1, 8, 8)[:, :, columns].reshape(-1, 32)
            for x in (whole.train_x, whole.test_x)
        )
        return View(train, whole.train_y, test, whole.test_y)

    return TwoViews(half(slice(0, 4)), half(slice(4, 8)))
