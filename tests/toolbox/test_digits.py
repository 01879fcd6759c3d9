"""The digits, cut into two views."""

import pytest
import torch
from sklearn.datasets import load_digits

from icmllab.toolbox.digits import ENCODERS, digits_encoders, digits_two_views


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


def test_encoders_say_of_unseen_rows_what_their_networks_compute():
    made = digits_encoders(3, 1, 2)
    assert [tuple(f.shape) for f in made.features] == [(1197, 64), (1197, 96), (1197, 128)]
    assert made.train_images.shape == (600, 64)
    for net, head, features in zip(made.encoders, made.heads, made.features, strict=True):
        assert torch.equal(net(made.images), features)
        assert features.dtype == torch.float64
        assert head(features).shape == (1197, 10)
        assert not features.requires_grad
    rows = torch.cat([made.train_images, made.images])
    whole = torch.from_numpy(load_digits().data / 16.0)
    assert sorted(rows.tolist()) == sorted(whole.tolist())
    images = {tuple(row): t for row, t in zip(*load_digits(return_X_y=True), strict=True)}
    labels = torch.cat([made.train_labels, made.labels]).tolist()
    assert [images[tuple((row * 16).tolist())] for row in rows] == labels


def test_an_encoder_does_not_depend_on_how_many_are_trained_beside_it():
    few, more = digits_encoders(1, 2, 1), digits_encoders(2, 2, 1)
    assert torch.equal(few.features[0], more.features[0])
    assert not torch.equal(digits_encoders(1, 3, 1).features[0], few.features[0])


def test_encoders_are_trained_once_a_process_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    first = digits_encoders(1, 4, 1)
    assert torch.equal(torch.rand(3), wanted)
    assert digits_encoders(1, 4, 1) is first


def test_an_encoder_without_labels_has_no_head_and_the_sixth_is_the_first_again():
    made = digits_encoders(6, 0, 1)
    assert [h is None for h in made.heads] == [r.classify == 0 for r in ENCODERS] + [False]
    assert made.features[5].shape == made.features[0].shape
    assert not torch.equal(made.features[5], made.features[0])


def test_trained_encoders_classify_digits_that_they_never_saw():
    made = digits_encoders(1, 0, 15)
    right = made.heads[0](made.features[0]).argmax(dim=1) == made.labels
    assert float(right.double().mean()) > 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_models": 0}, "n_models must be a whole number >= 1: got 0"),
        ({"epochs": 1.5}, "epochs must be"),
        ({"n_train": 1797}, "n_train must be at most 1796: got 1797"),
    ],
)
def test_impossible_encoders_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        digits_encoders(**change)
