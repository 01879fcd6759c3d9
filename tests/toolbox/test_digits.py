"""The digits, cut into two views."""

import pytest
import torch
from sklearn.datasets import load_digits

from icmllab.toolbox.digits import (
    ENCODERS,
    coloured_digits,
    digits_encoders,
    digits_two_views,
    hue_palette,
    other_digits,
    paint,
    recoloured,
)


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


def greys_and_colours(x):
    """What a row of coloured digits shows: grey image (n, 64) and hue of each row, 0..9."""
    channels = x.reshape(len(x), 3, 64)
    grey = channels.amax(dim=1)
    total = channels.sum(dim=2) / grey.sum(dim=1)[:, None]  # the row's colour, (n, 3)
    return grey, torch.cdist(total, hue_palette()).argmin(dim=1)


def test_the_palette_is_ten_saturated_colours_with_one_channel_at_full_value():
    palette = hue_palette()
    assert palette.shape == (10, 3)
    assert torch.equal(palette.amax(dim=1), torch.ones(10, dtype=torch.float64))
    assert torch.equal(palette.amin(dim=1), torch.zeros(10, dtype=torch.float64))
    assert float(torch.cdist(palette, palette).fill_diagonal_(9).min()) > 0.3
    assert palette[0].tolist() == [1, 0, 0]
    assert palette[5].tolist() == [0, 1, 1]


@pytest.mark.parametrize("mode", ["shape", "colour", "both"])
def test_labels_of_coloured_digits_are_the_cue_that_the_mode_names(mode):
    data = coloured_digits(mode, 3)
    images = {tuple(row): t for row, t in zip(*load_digits(return_X_y=True), strict=True)}
    for x, y, cue in [
        (data.x_train, data.y_train, mode),
        (data.x_stitch, data.y_stitch, "both"),
        (data.x_test, data.y_test, "both"),
    ]:
        grey, colour = greys_and_colours(x)
        digit = torch.tensor([images[tuple((row * 16).round().tolist())] for row in grey])
        if cue in ("shape", "both"):
            assert torch.equal(y, digit)
        if cue in ("colour", "both"):
            assert torch.equal(y, colour)
        if cue != "both":  # the other cue is drawn whatever the label is
            other = colour if cue == "shape" else digit
            assert 0.05 < float((other == y).double().mean()) < 0.16
    assert [len(x) for x in data] == [900, 900, 500, 500, 397, 397]
    assert 0 <= float(data.x_train.min()) < float(data.x_train.max()) <= 1


def test_one_split_and_two_seeds_share_the_digits_and_no_row_stands_in_two_parts():
    a, b = (coloured_digits("shape", s, split=7) for s in (0, 1))
    assert torch.equal(a.x_test, b.x_test)
    assert torch.equal(a.y_train, b.y_train)
    assert not torch.equal(a.x_train, b.x_train)
    assert not torch.equal(a.x_test, coloured_digits("shape", 0).x_test)
    greys = [greys_and_colours(x)[0] for x in (a.x_train, a.x_stitch, a.x_test)]
    rows = {tuple(r) for g in greys for r in g.tolist()}
    assert len(rows) == len({tuple(r) for r in load_digits().data.tolist()})


def test_recolouring_changes_the_colour_alone_and_can_be_undone():
    x = coloured_digits("both", 0).x_test
    grey, colour = greys_and_colours(x)
    new = (colour + 3) % 10
    moved = recoloured(x, new)
    assert torch.equal(greys_and_colours(moved)[0], grey)
    assert torch.equal(greys_and_colours(moved)[1], new)
    assert torch.equal(recoloured(moved, colour), x)
    assert recoloured(x.float(), new).dtype == torch.float32


def test_other_digits_never_start_from_the_row_itself_and_draw_every_colour():
    x = coloured_digits("both", 0).x_test
    start = other_digits(x, torch.Generator().manual_seed(0))
    own, colour = greys_and_colours(x)[0], greys_and_colours(start)[1]
    assert not (greys_and_colours(start)[0] == own).all(dim=1).any()
    assert colour.bincount(minlength=10).min() > 20
    two = other_digits(x[:2], torch.Generator().manual_seed(0))
    assert torch.equal(greys_and_colours(two)[0], own[[1, 0]])
    with pytest.raises(ValueError, match="x must hold at least two rows"):
        other_digits(x[:1], torch.Generator())


def test_bad_arguments_of_coloured_digits_are_named():
    with pytest.raises(ValueError, match="mode must be one of"):
        coloured_digits("hue")
    with pytest.raises(ValueError, match="at most 1797 together"):
        coloured_digits("both", n_train=1500)
    with pytest.raises(ValueError, match="n_test"):
        coloured_digits("both", n_test=0)
    with pytest.raises(ValueError, match=r"colours must lie in 0\.\.9"):
        paint(torch.ones(1, 8, 8), torch.tensor([10]))
    with pytest.raises(ValueError, match="images must be"):
        paint(torch.ones(2, 8, 8), torch.tensor([1]))
