"""The 1797 handwritten digits that scikit-learn bundles, cut in ways that several papers use."""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

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


class EncoderRecipe(NamedTuple):
    """How one encoder of :func:`digits_encoders` differs from the others.

    Attributes:
        width: of both layers, and so of the features.
        activation: name of a module of ``torch.nn``, after the first layer and after the second.
        classify: weight of the cross-entropy of a linear head on the features.
        reconstruct: weight of the squared error per pixel of a linear decoder.
    """

    width: int
    activation: str
    classify: float
    reconstruct: float


ENCODERS = (
    EncoderRecipe(64, "ReLU", 1.0, 0.0),
    EncoderRecipe(96, "Tanh", 1.0, 10.0),
    EncoderRecipe(128, "GELU", 0.3, 10.0),
    EncoderRecipe(64, "Tanh", 0.0, 10.0),
    EncoderRecipe(96, "ReLU", 1.0, 3.0),
)
"""Five encoders that want different things: a classifier, an autoencoder, three in between."""


class DigitsEncoders(NamedTuple):
    """Independently trained encoders of the digits, and what they say of rows they never saw.

    Attributes:
        features: one (n_held, width) float64 each, on the held-out rows, in a shuffled order.
        heads: the linear head that each encoder was trained with, features → 10 logits; None for
            an encoder that was not taught the labels.
        labels: (n_held,) int64.
        encoders: the networks, 64 pixels → features, in evaluation mode.
        images: (n_held, 64) float64 in [0, 1], the held-out rows.
        train_images: (n_train, 64) float64.
        train_labels: (n_train,) int64.
    """

    features: list[torch.Tensor]
    heads: list[nn.Linear | None]
    labels: torch.Tensor
    encoders: list[nn.Sequential]
    images: torch.Tensor
    train_images: torch.Tensor
    train_labels: torch.Tensor


@cache
def digits_encoders(
    n_models: int = 5, seed: int = 0, epochs: int = 30, n_train: int = 600
) -> DigitsEncoders:
    """Train ``n_models`` encoders apart from one another, on the same images.

    Two layers each, by the recipes of :data:`ENCODERS` in turn (the sixth model has the first
    recipe and other initial weights); Adam at 2e-3, batches of 64, Gaussian noise of 0.1 on the
    pixels. Model m of a seed is the same whatever ``n_models`` is. All in float64, so that every
    machine trains the same encoders but for the last digits. Kept for the rest of the process: do
    not write into the result.

    Args:
        n_models: how many, >= 1.
        seed: picks the split, the initial weights, the batches and the noise.
        epochs: passes over the training rows, >= 1.
        n_train: training rows; the other 1797 − n_train are held out.

    Raises:
        ValueError: a count out of range.
    """
    for name, value, most in (
        ("n_models", n_models, None),
        ("epochs", epochs, None),
        ("n_train", n_train, N_DIGITS - 1),
    ):
        if isinstance(value, bool) or value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number >= 1: got {value}")
        if most is not None and value > most:
            raise ValueError(f"{name} must be at most {most}: got {value}")
    images, target = _digits()
    order = np.random.default_rng(seed).permutation(N_DIGITS)
    x = torch.from_numpy(images.reshape(N_DIGITS, -1)[order].astype(np.float64))
    y = torch.from_numpy(target[order].astype(np.int64))
    train, held = slice(0, n_train), slice(n_train, None)
    made = [
        _train_encoder(ENCODERS[m % len(ENCODERS)], x[train], y[train], epochs, (seed, m))
        for m in range(n_models)
    ]
    with torch.no_grad():
        features = [net(x[held]) for net, _ in made]
    nets, heads = [net for net, _ in made], [head for _, head in made]
    return DigitsEncoders(features, heads, y[held], nets, x[held], x[train], y[train])


def _train_encoder(
    recipe: EncoderRecipe,
    x: torch.Tensor,
    y: torch.Tensor,
    epochs: int,
    stream: tuple[int, int],
) -> tuple[nn.Sequential, nn.Linear | None]:
    """One encoder and its head; ``stream`` = (seed, model) is all its randomness."""
    state = int(np.random.SeedSequence(stream).generate_state(1)[0])
    with torch.random.fork_rng(devices=[]):  # layers draw from the global generator
        torch.manual_seed(state)
        activation = getattr(nn, recipe.activation)
        net = nn.Sequential(
            nn.Linear(x.shape[1], recipe.width),
            activation(),
            nn.Linear(recipe.width, recipe.width),
            activation(),
        ).to(x.dtype)
        head = nn.Linear(recipe.width, 10, dtype=x.dtype)
        decoder = nn.Linear(recipe.width, x.shape[1], dtype=x.dtype)
    g = torch.Generator().manual_seed(state)
    parameters = [p for part in (net, head, decoder) for p in part.parameters()]
    # foreach changes how the update is carried out, not the update: fewer, larger calls
    optimizer = torch.optim.Adam(parameters, lr=2e-3, foreach=True)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=g).split(64):
            clean = x[rows]
            z = net(clean + 0.1 * torch.randn(clean.shape, generator=g, dtype=x.dtype))
            loss = torch.zeros((), dtype=x.dtype)
            if recipe.classify:
                loss = loss + recipe.classify * F.cross_entropy(head(z), y[rows])
            if recipe.reconstruct:
                loss = loss + recipe.reconstruct * F.mse_loss(decoder(z), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for part in (net, head):
        part.requires_grad_(False).eval()
    return net, head if recipe.classify else None


# --------------------------------------------------------------------------------------------
# Coloured digits: two cues, the shape and the colour

CUES = ("shape", "colour", "both")
N_COLOURS = 10


class ColouredDigits(NamedTuple):
    """Digits in colour: rows to train a network on, rows to fit on, and rows to test on.

    A row is 192 features in [0, 1]: red, green and blue of an 8×8 image, one after the other.

    Attributes:
        x_train: (n_train, 192) float64; what colour and label mean depends on the mode.
        y_train: (n_train,) int64 labels 0..9.
        x_stitch: (n_stitch, 192) float64; colour, digit and label agree.
        y_stitch: (n_stitch,) int64.
        x_test: (n_test, 192) float64; colour, digit and label agree.
        y_test: (n_test,) int64.
    """

    x_train: torch.Tensor
    y_train: torch.Tensor
    x_stitch: torch.Tensor
    y_stitch: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor


def hue_palette() -> torch.Tensor:
    """Ten saturated colours, (10, 3) float64: hue i/10, saturation 1, value 1."""
    from colorsys import hsv_to_rgb

    rows = [hsv_to_rgb(i / N_COLOURS, 1.0, 1.0) for i in range(N_COLOURS)]
    return torch.tensor(rows, dtype=torch.float64)


def paint(images: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
    """Grey images in colours of :func:`hue_palette`.

    The value of a pixel stays the grey level, so that only the hue tells the colour, and a black
    pixel has none.

    Args:
        images: (n, 8, 8) in [0, 1].
        colours: (n,) int64 in 0..9.

    Returns:
        (n, 192), the dtype of ``images``.

    Raises:
        ValueError: lengths that differ, or a colour out of range.
    """
    if images.ndim != 3 or colours.shape != images.shape[:1]:
        raise ValueError(
            "images must be (n, height, width) and colours (n,): got "
            f"{tuple(images.shape)} and {tuple(colours.shape)}"
        )
    if len(colours) and not 0 <= int(colours.min()) <= int(colours.max()) < N_COLOURS:
        raise ValueError(f"colours must lie in 0..{N_COLOURS - 1}: got up to {int(colours.max())}")
    palette = hue_palette().to(images)[colours]
    return (images[:, None] * palette[:, :, None, None]).reshape(len(images), -1)


def coloured_digits(
    mode: str,
    seed: int = 0,
    *,
    split: int | None = None,
    n_train: int = 900,
    n_stitch: int = 500,
    n_test: int = 397,
) -> ColouredDigits:
    """Digits whose label is their shape, their colour, or both at once.

    Args:
        mode: of the training rows. "shape": the label is the digit, the colour is drawn at
            random; "colour": the label is the colour, drawn at random whatever the digit;
            "both": colour and label are the digit. The other rows are always as in "both".
        seed: draws the colours of the training rows.
        split: shuffles the digits and cuts them; None takes ``seed``. Networks that meet on the
            same test rows need one split and may have different seeds.
        n_train: training rows, >= 1.
        n_stitch: rows to fit on, >= 1.
        n_test: test rows, >= 1; at most 1797 together.

    Raises:
        ValueError: an unknown mode, or sizes that do not fit.
    """
    if mode not in CUES:
        raise ValueError(f"mode must be one of {CUES}: got {mode!r}")
    sizes = (n_train, n_stitch, n_test)
    if min(sizes) < 1 or sum(sizes) > N_DIGITS:
        raise ValueError(
            "n_train, n_stitch and n_test must be >= 1 and at most "
            f"{N_DIGITS} together: got {sizes}"
        )
    images, target = _digits()
    order = np.random.default_rng(seed if split is None else split).permutation(N_DIGITS)
    grey = torch.from_numpy(images[order].astype(np.float64))
    digit = torch.from_numpy(target[order].astype(np.int64))
    cuts = np.cumsum((0, *sizes))
    train, stitch, test = (slice(a, b) for a, b in pairwise(cuts))
    # a stream of its own: with split = seed the shuffle has used the plain one
    drawn = np.random.default_rng((seed, 1)).integers(N_COLOURS, size=n_train)
    colour = digit[train] if mode == "both" else torch.from_numpy(drawn)
    label = colour if mode == "colour" else digit[train]
    both = [(paint(grey[rows], digit[rows]), digit[rows]) for rows in (stitch, test)]
    return ColouredDigits(paint(grey[train], colour), label, *both[0], *both[1])


def recoloured(x: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
    """Coloured digits in other colours: (n, 192) rows of :func:`paint` and (n,) colours.

    A saturated colour has a channel at full value, so that the largest channel is the grey level.
    """
    grey = x.reshape(len(x), 3, 8, 8).amax(dim=1)
    return paint(grey, colours)


def other_digits(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """For each row another row, at random, in a colour at random: what an inversion starts from.

    Args:
        x: (n, 192) coloured digits, n >= 2.
        generator: draws the rows and the colours.

    Raises:
        ValueError: fewer than two rows.
    """
    n = len(x)
    if n < 2:
        raise ValueError(f"x must hold at least two rows, each to start from another: got {n}")
    # 1..n-1 places further on: never the row itself
    step = torch.randint(1, n, (n,), generator=generator)
    rows = (torch.arange(n) + step) % n
    colours = torch.randint(N_COLOURS, (n,), generator=generator)
    return recoloured(x[rows], colours)
