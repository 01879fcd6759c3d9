"""The digits, cut into two views."""

import pytest
import torch
from sklearn.datasets import load_digits

from icmllab.toolbox.digits import digits_two_views


def test_the_two_views_are_the_two_halves_of_the_same_images():
    views = digits_two_views(3)
    whole = torch.cat(
        [v.reshape(-1, 8, 4) for v in (views.a.x_test, views.b.x_test)], dim=2
    ).reshape(300, 64)
    images = {tuple(row): t for row, t in zip(*load_digits(return_X_y=True), strict=True)}
    for row, label in zip(whole, views.a.y_test, strict=True):
        assert images[tuple((row * 16).tolist())] == label
    assert (views.a.y_test == views.b.y_test).all()
    assert (views.a.y_train == views.b.y_train).all()


def test_sizes_types_and_range():
    a, b = digits_two_views(0)
    assert a.x_train.shape == b.x_train.shape == (1200, 32)
    assert a.x_test.shape == (300, 32)
    assert a.x_train.dtype == torch.float32
    assert a.y_train.dtype == torch.int64
    assert float(a.x_train.min()) == 0
    assert float(b.x_train.max()) == 1
    assert set(a.y_test.tolist()) == set(range(10))


def test_training_and_test_rows_are_disjoint_and_the_split_follows_the_seed():
    views = digits_two_views(0, n_train=1497, n_test=300)
    rows = torch.cat([torch.cat([v.x_train, v.x_test]) for v in views], dim=1)
    every = torch.from_numpy(load_digits().images / 16.0).float()
    halves = torch.cat([every[:, :, :4].reshape(1797, -1), every[:, :, 4:].reshape(1797, -1)], 1)
    assert torch.equal(torch.tensor(sorted(rows.tolist())), torch.tensor(sorted(halves.tolist())))
    again = digits_two_views(0, n_train=1497, n_test=300)
    assert torch.equal(again.a.x_test, views.a.x_test)
    assert not torch.equal(digits_two_views(1).a.x_test, digits_two_views(0).a.x_test)


@pytest.mark.parametrize(("n_train", "n_test"), [(0, 300), (1200, 0), (1500, 298)])
def test_sizes_that_do_not_fit_are_refused(n_train, n_test):
    with pytest.raises(ValueError, match="n_train and n_test"):
        digits_two_views(0, n_train=n_train, n_test=n_test)
