"""Explorables: live redraws, and the page without a kernel."""

import base64
import html
import io
import json
import os
import re
import shutil
import time

import ipywidgets as w
import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from icmllab import explore as explore_
from icmllab import use_style
from icmllab.notebook import explore as module
from icmllab.notebook.claims import Place
from icmllab.notebook.explore import BUDGET, SHARE, choices, live, render, static_html, thin

mpl.use("agg")
import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def fresh_kernel():
    module._used.clear()
    plt.close("all")
    with mpl.rc_context():
        use_style()
        yield
    assert plt.get_fignums() == []  # nothing of any test's stays open


def wave(k=1, shift=0.0, **_):
    figure, axes = plt.subplots(figsize=(3.2, 2))
    x = np.linspace(0, 6, 200)
    axes.plot(x, np.sin(k * x + shift), label="wave")
    axes.set(xlabel="time / s", ylabel="height / m")
    axes.legend()
    return figure


def confetti(k=1):
    """More detail than any page has room for at full sharpness."""
    figure, axes = plt.subplots(figsize=(6.4, 3))
    axes.imshow(np.random.default_rng(k).random((250, 600, 3)), interpolation="nearest")
    return figure


def frames_of(page: str) -> list[list[str]]:
    """What the page's script switches between: (text, alt, image), the initial image filled in."""
    frames = json.loads(re.search(r"frames = (\[\[.*?\]\]);", page, re.DOTALL).group(1))
    image = re.search(r'<img src="([^"]+)"', page).group(1)
    assert sum(source == "" for _, _, source in frames) == 1
    return [[text, alt, source or image] for text, alt, source in frames]


def picture(source: str) -> Image.Image:
    kind, data = re.fullmatch(r"data:image/(png|webp);base64,(.+)", source).groups()
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.format.lower() == kind
    return image.convert("RGB")


# ---- the frames of a control


@pytest.mark.parametrize(
    ("control", "values", "start"),
    [
        (w.IntSlider(value=3, min=1, max=6, step=2), [1, 3, 5], 1),
        (w.FloatSlider(value=0.3, min=0, max=0.4, step=0.1), [0, 0.1, 0.2, 0.3, 0.4], 3),
        (w.FloatLogSlider(value=10, min=0, max=2, step=1), [1, 10, 100], 1),
        (w.SelectionSlider(options=["a", "b"], value="b"), ["a", "b"], 1),
        (w.SelectionSlider(options=[("one", 1), ("ten", 10)], value=10), [1, 10], 1),
        (w.Dropdown(options={"x": [1, 2], "y": [3]}), [[1, 2], [3]], 0),
        (w.ToggleButtons(options=[2, 4, 8], value=4), [2, 4, 8], 1),
        (w.Checkbox(value=True), [False, True], 1),
        (w.BoundedIntText(value=2, min=0, max=3), [0, 1, 2, 3], 2),
    ],
)
def test_a_control_lists_its_states(control, values, start):
    got = choices(control)
    assert got.start == start
    if isinstance(values[0], str | list):
        assert got.values == values
    else:
        np.testing.assert_allclose(got.values, values, atol=1e-12)
    assert got.values[start] == control.value
    assert type(got.values[start]) is type(control.value)


@pytest.mark.parametrize(
    "control",
    [
        w.IntRangeSlider(value=(1, 2), min=0, max=3),
        w.SelectMultiple(options=[1, 2], value=[1]),
        w.SelectionRangeSlider(options=[1, 2, 3], index=(0, 1)),
        w.FloatText(1.0),
        w.Text("a"),
    ],
)
def test_controls_whose_states_cannot_be_listed_are_named(control):
    with pytest.raises(ValueError, match=f"first control must be .* got {type(control).__name__}"):
        choices(control)


@pytest.mark.parametrize("start", [0, 1, 49, 50, 97, 99])
@pytest.mark.parametrize("limit", [3, 6, 16, 99])
def test_thinning_keeps_both_ends_and_the_initial_state(start, limit):
    kept = thin(100, start, limit)
    assert len(kept) == limit
    assert {0, start, 99} <= set(kept)
    assert kept == sorted(set(kept))
    assert thin(limit, 0, 100) == list(range(limit))


# ---- the page without a kernel


def test_static_output_is_one_html_with_a_labelled_slider(monkeypatch):
    monkeypatch.setenv("ICMLLAB_STATIC", "1")
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    explore_(wave, k=w.IntSlider(value=2, min=1, max=4, description="frequency"))
    (output,) = shown
    from IPython.core.formatters import DisplayFormatter

    data, _ = DisplayFormatter().format(output)
    assert set(data) == {"text/plain", "text/html"}
    page = data["text/html"]
    ident = re.search(r'<input id="([^"]+)"', page).group(1)
    assert f'<label for="{ident}">frequency</label>' in page
    assert f'<output for="{ident}">2</output>' in page
    assert re.search(r'type="range" min="0" max="3" step="1" value="1" aria-valuetext="2"', page)


@pytest.mark.parametrize(
    ("control", "texts"),
    [
        (w.IntSlider(value=2, min=1, max=3), ["1", "2", "3"]),
        (w.FloatSlider(value=0.5, min=0, max=1, step=0.5), ["0.00", "0.50", "1.00"]),
        (w.FloatLogSlider(value=1, min=-2, max=0, step=1), ["0.01", "0.1", "1"]),
        (w.SelectionSlider(options=[("weak", 1), ("strong", 9)], value=1), ["weak", "strong"]),
        (w.Dropdown(options=["</script>", "<b>"]), ["</script>", "<b>"]),
        (w.Checkbox(value=False), ["no", "yes"]),
    ],
)
def test_frames_are_the_figures_for_the_first_controls_values(control, texts):
    control.description = "level"
    drawn = {}

    def draw(level, other):
        assert other == 7
        figure = wave(k=1 + len(drawn), shift=other)
        drawn[str(level)] = figure
        return figure

    page = static_html(draw, {"level": control, "other": w.IntSlider(value=7, description="o&")})
    frames = frames_of(page)
    assert [html.unescape(text) for text, _, _ in frames] == texts
    assert len({source for _, _, source in frames}) == len(texts)
    assert [alt for _, alt, _ in frames] == [f"Figure at level: {t}" for t in texts]
    assert page.count("</script>") == 1  # an option's text cannot end the script
    assert "The other controls stand at o&amp; = 7." in page


def test_a_frame_looks_like_the_figure():
    page = static_html(wave, {"k": w.IntSlider(value=2, min=1, max=3)})
    for k, (_, _, source) in zip((1, 2, 3), frames_of(page), strict=True):
        true = Image.open(io.BytesIO(render(wave, {"k": k}))).convert("RGB")
        got = picture(source)
        assert got.size == true.size
        error = np.asarray(got, float) - np.asarray(true, float)
        assert np.sqrt((error**2).mean()) < 4  # of 255
        other = Image.open(io.BytesIO(render(wave, {"k": k + 3}))).convert("RGB")
        assert np.sqrt(((np.asarray(got, float) - np.asarray(other)) ** 2).mean()) > 8


@pytest.mark.parametrize(
    ("alt", "said"),
    [
        ("", "Figure at k: 2"),
        ("A sine wave.", "A sine wave. k: 2"),
        (lambda k: f"{k} periods", "2 periods"),
    ],
)
def test_every_frame_says_in_words_what_it_shows(alt, said):
    control = w.IntSlider(value=2, min=1, max=3, description="k")
    page = static_html(wave, {"k": control}, alt=alt)
    assert re.search(r'<img [^>]*alt="([^"]+)"', page).group(1) == said
    assert [a for _, a, _ in frames_of(page)] == [said.replace("2", str(k)) for k in (1, 2, 3)]


def test_many_states_become_as_many_frames_as_fit():
    control = w.FloatSlider(value=0.37, min=0, max=5, step=0.01)
    page = static_html(wave, {"shift": control})
    texts = [t for t, _, _ in frames_of(page)]
    assert 12 <= len(texts) <= 16
    assert {"0.00", "0.37", "5.00"} <= set(texts)
    assert len(page) <= SHARE
    assert "Less sharp" not in page


def test_detail_that_does_not_fit_is_drawn_less_sharply_and_said():
    page = static_html(confetti, {"k": w.IntSlider(value=3, min=1, max=7)})
    assert len(page.encode()) <= SHARE
    assert len(frames_of(page)) >= 6
    assert "Less sharp than live, to keep the page small." in page
    width = picture(frames_of(page)[0][2]).width
    assert width < 700
    # and shown at the size of the sharp one
    shown = int(re.search(r'style="width:(\d+)px;max-width:100%"', page).group(1))
    assert abs(shown - 704) <= 8


def test_the_explorables_of_a_chapter_share_its_bytes(monkeypatch):
    control = {"k": w.IntSlider(value=3, min=1, max=8)}
    first = static_html(wave, control)
    monkeypatch.setattr(module, "BUDGET", len(first) + 40_000)
    second = static_html(wave, control)  # fewer, or less sharp
    assert len(second) <= 40_000 < len(first)
    assert len(frames_of(second)) >= 6
    with pytest.raises(ValueError, match="draw must give simpler figures"):
        static_html(wave, control)


def test_ids_differ_on_a_page_and_repeat_from_run_to_run():
    def ids(run):
        module._used.clear()
        control = w.Checkbox(value=True)
        pages = [static_html(f, {"k": control}) for f in (wave, wave, lambda k: wave())]
        return [i for p in pages for i in re.findall(r'id="([^"]+)"', p)], pages

    first, pages = ids(1)
    assert len(set(first)) == len(first) == 6
    assert ids(2) == (first, pages)  # to the byte


def test_a_cell_that_runs_again_keeps_its_id_and_its_share(monkeypatch):
    control = {"shift": w.FloatSlider(value=3, min=1, max=5, step=1)}
    pages = [static_html(wave, control, cell=Place("cell", "1"))]
    monkeypatch.setattr(module, "BUDGET", int(1.5 * len(pages[0])))  # not room for two
    pages.append(static_html(wave, control, cell=Place("cell", "2")))
    assert len(set(pages)) == 1
    monkeypatch.setattr(module, "BUDGET", 2 * BUDGET)
    other = static_html(wave, {"k": w.Checkbox()}, cell=Place("other", "9"))
    assert 'id="icmllab-wave-2"' in other  # another cell's is another


def test_a_draw_without_a_figure_is_an_error_on_the_page():
    def nothing(k):
        plt.subplots()

    with pytest.raises(ValueError, match="draw must return a matplotlib Figure: got NoneType"):
        static_html(nothing, {"k": w.Checkbox()})


@pytest.mark.parametrize(
    ("controls", "said"),
    [({}, "at least one widget"), ({"k": 3}, "k must be an ipywidgets value widget: got 3")],
)
def test_controls_are_widgets(controls, said):
    with pytest.raises(ValueError, match=said):
        explore_(wave, **controls)


# ---- live


def parts(box):
    row, image, _caption, message = box.children
    return row.children, image, message


def test_live_is_controls_above_one_image_without_an_output_widget(monkeypatch):
    monkeypatch.setenv("ICMLLAB_STATIC", "0")
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    controls = {"k": w.IntSlider(value=2, min=1, max=5), "shift": w.FloatSlider(description="φ")}
    explore_(wave, alt="A wave", **controls)
    (box,) = shown
    row, image, message = parts(box)
    assert list(row) == list(controls.values())
    assert [c.description for c in row] == ["k", "φ"]
    assert isinstance(image, w.Image)
    assert image.value == render(wave, {"k": 2, "shift": 0.0})
    assert "A wave. k: 2" in box.children[2].value
    assert image.tooltip is None  # a tooltip breaks the image view of ipywidgets in JupyterLab
    assert message.layout.display == "none"
    assert not any(isinstance(c, w.Output) for c in (*row, *box.children))


def test_every_control_redraws():
    controls = {"k": w.IntSlider(value=2, min=1, max=5), "shift": w.FloatSlider()}
    box = live(wave, controls)
    _, image, _ = parts(box)
    controls["k"].value = 4
    assert image.value == render(wave, {"k": 4, "shift": 0.0})
    assert ": 4" in box.children[2].value
    controls["shift"].value = 1.5
    assert image.value == render(wave, {"k": 4, "shift": 1.5})


def test_an_error_in_draw_is_shown_in_the_images_place_and_goes_away():
    def fragile(k):
        plt.subplots()  # half a figure, left behind
        if k == 3:
            raise ZeroDivisionError("<k> is three")
        plt.close()
        return wave(k)

    control = w.IntSlider(value=2, min=1, max=5)
    _, image, message = parts(live(fragile, {"k": control}))
    control.value = 3
    assert "ZeroDivisionError: &lt;k&gt; is three" in message.value
    assert 'role="alert"' in message.value
    assert (image.layout.display, message.layout.display) == ("none", None)
    control.value = 4
    assert (image.layout.display, message.layout.display) == (None, "none")
    assert message.value == ""
    assert image.value == render(wave, {"k": 4})


def test_a_slow_figure_follows_a_slider_when_it_is_let_go():
    def slow(k):
        time.sleep(0.15 if k == 3 else 0)
        figure = plt.figure(figsize=(1, 1))
        return figure

    control, fixed = w.IntSlider(value=2, min=1, max=5), w.IntSlider(continuous_update=False)
    live(lambda k, other: slow(k), {"k": control, "other": fixed})
    assert control.continuous_update is True
    control.value = 3
    assert control.continuous_update is False
    control.value = 4
    assert control.continuous_update is True
    assert fixed.continuous_update is False


def test_two_hundred_redraws_leave_no_figure_and_no_memory():
    import gc
    import resource
    import weakref

    made = []

    control = w.IntSlider(value=0, min=0, max=1000)

    def small(k):
        figure = plt.figure(figsize=(1, 1), layout="none")
        figure.add_axes((0, 0, 1, 1)).plot(np.arange(20_000) * (k + 1))  # 0.5 MB if it stays
        made.append(weakref.ref(figure))
        return figure

    live(small, {"k": control})

    def memory() -> int:
        gc.collect()
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[1]) * resource.getpagesize()

    for k in range(1, 21):  # caches fill
        control.value = k
    before = memory()
    begin = time.perf_counter()
    for k in range(21, 221):
        control.value = k
        assert plt.get_fignums() == []
    print(f"a redraw: {(time.perf_counter() - begin) / 200 * 1000:.0f} ms")
    # kept figures would take 100 MB; the allocator alone moves by some 10 MB
    assert memory() - before < 60e6
    assert sum(figure() is not None for figure in made) <= 1


# ---- in a browser


@pytest.fixture(scope="module")
def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def pair_of_pages():
    module._used.clear()
    slider = w.IntSlider(value=2, min=1, max=3, description="frequency")
    box = w.Checkbox(value=False, description="shifted")
    return static_html(wave, {"k": slider}) + static_html(wave, {"shift": box})


@pytest.mark.browser
def test_the_keyboard_moves_the_frames_of_one_explorable_only(chromium, pair_of_pages):
    page = chromium.new_page()
    page.set_content(pair_of_pages)
    sources = "() => [...document.images].map(i => [i.src, i.alt, i.naturalWidth > 0])"
    before = page.evaluate(sources)
    slider = page.get_by_label("frequency")
    slider.focus()
    page.keyboard.press("ArrowRight")
    after = page.evaluate(sources)
    assert after[0] == [after[0][0], "Figure at frequency: 3", True]
    assert after[0][0] != before[0][0]
    assert after[1] == before[1]
    assert slider.get_attribute("aria-valuetext") == "3"
    assert page.locator("output").first.inner_text() == "3"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(sources) == before
    page.close()


@pytest.mark.browser
def test_without_scripts_the_initial_frame_shows(chromium, pair_of_pages):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_content(pair_of_pages)
    assert page.locator("img").count() == 2
    assert page.locator("img").first.is_visible()
    assert page.locator("img").first.get_attribute("alt") == "Figure at frequency: 2"
    context.close()
