"""The figures' look: the same for every reader, and told apart with any colour vision."""

import itertools

import matplotlib as mpl
import numpy as np
import pytest

from icmllab import use_style
from icmllab.notebook.style import GROUND, PALETTE


@pytest.fixture(autouse=True)
def restore_settings():
    with mpl.rc_context():
        yield


def linear(colour: str) -> np.ndarray:
    """A hex colour as linear RGB."""
    c = np.array(mpl.colors.to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


# Viénot, Brettel and Mollon (1999): what a reader without red or green cones sees, linear RGB
DICHROMAT = {
    "normal": np.eye(3),
    "protan": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
    "deutan": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
}


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear RGB under D65."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", DICHROMAT)
def test_colours_differ_for_every_colour_vision(vision):
    seen = {n: lab(DICHROMAT[vision] @ linear(c)) for n, c in PALETTE.items()}
    for one, other in itertools.combinations(seen, 2):
        # 2.3 is just noticeable side by side; lines lie apart
        assert np.linalg.norm(seen[one] - seen[other]) > 9, (one, other)


def test_the_first_four_colours_are_legible_as_lines_and_text_is_as_text():
    for colour in list(PALETTE.values())[:4]:
        assert contrast(colour, GROUND) >= 3
    assert contrast("black", GROUND) > 15
    assert contrast(PALETTE["grey"], GROUND) >= 4.3


def test_a_readers_own_settings_do_not_leak_into_figures():
    use_style()
    ours = {k: v for k, v in mpl.rcParams.items() if k != "backend"}
    mpl.rcParams.update({"axes.facecolor": "black", "text.usetex": True, "lines.linewidth": 9})
    mpl.rcParams["savefig.transparent"] = True
    use_style()
    assert {k: v for k, v in mpl.rcParams.items() if k != "backend"} == ours
    assert mpl.rcParams["savefig.transparent"] is False


def test_the_backend_stays():
    before = mpl.rcParams._get_backend_or_none()
    use_style()
    assert mpl.rcParams._get_backend_or_none() == before


def test_a_figure_is_one_column_wide_on_its_own_ground(tmp_path):
    import matplotlib.pyplot as plt
    from PIL import Image

    use_style()
    figure, axes = plt.subplots()
    axes.plot([0, 1])
    figure.savefig(tmp_path / "f.png")
    plt.close(figure)
    picture = Image.open(tmp_path / "f.png").convert("RGBA")
    assert abs(picture.width - 700) <= 10
    assert picture.getpixel((1, 1)) == (*(int(GROUND[i : i + 2], 16) for i in (1, 3, 5)), 255)
