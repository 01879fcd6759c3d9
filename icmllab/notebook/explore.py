"""Explorables: a figure with controls, live in JupyterLab and pre-rendered on a static page."""

import base64
import html
import io
import json
import re
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from icmllab.notebook.presets import is_static

BUDGET = 250_000
"""Bytes that the explorables of one chapter may take on the page, in all."""

SHARE = 150_000
"""Bytes that one explorable may take, so that a chapter has room for a second."""

MAX_FRAMES = 16
MIN_FRAMES = 5
DPIS = (110, 95, 80, 70, 60)
"""Resolutions tried, in this order, until enough frames fit."""

SLOW = 0.1
"""Seconds a redraw may take for the figure to follow a slider while it is dragged."""

# Frames stand in the script, so that where scripts do not run only the initial one shows.
_SCRIPT = """(() => {
const box = document.getElementById(ID), slider = box.querySelector("input"),
  said = box.querySelector("output"), image = box.querySelector("img"), frames = FRAMES;
const show = () => {
  const [text, alt, source] = frames[+slider.value];
  image.src = source; image.alt = alt; said.textContent = text;
  slider.setAttribute("aria-valuetext", text);
};
slider.addEventListener("input", show); show(); })()"""

_used: dict[str, int] = {}
"""Bytes on the page by explorable id, for the explorables of this kernel."""


class Frame(NamedTuple):
    """One pre-rendered state: the control's value in words, the alternative text, the image."""

    text: str
    alt: str
    source: str


class Frames(NamedTuple):
    """The frames of a static explorable, the index of the initial one, their resolution."""

    frames: list[Frame]
    start: int
    dpi: int


def explore(draw: Callable, *, alt: str | Callable[[object], str] = "", **controls) -> None:
    """Show ``draw(**values)`` with ``controls`` that change the values.

    Live, every control works and the figure is drawn anew at each change. On a page without a
    kernel (``ICMLLAB_STATIC=1``) a slider goes through frames of the first control, drawn in
    advance, the others standing at their initial values.

    Args:
        draw: takes the controls' values by name and returns a matplotlib Figure.
        alt: what the figure shows, in words; or a function of the first control's value that
            says so. By default the first control's name and value.
        controls: ipywidgets value widgets by argument name; at least one. For static pages the
            first is a slider (``SelectionSlider`` too), a choice or a checkbox.

    Raises:
        ValueError: no control, something that is no value widget, frames that do not fit the
            page, or a ``draw`` that returns no Figure on a static page.
    """
    from IPython.display import display

    if not controls:
        raise ValueError("controls must name at least one widget: got none")
    for name, widget in controls.items():
        if not (hasattr(widget, "value") and hasattr(widget, "observe")):
            raise ValueError(f"{name} must be an ipywidgets value widget: got {widget!r}")
        widget.description = widget.description or name
    if is_static():
        display(_Static(static_html(draw, controls, alt=alt)))
    else:
        display(live(draw, controls, alt=alt))


class _Static:
    """Pre-rendered frames; the text form says what stands there."""

    def __init__(self, text: str):
        self._html = text

    def __repr__(self) -> str:
        return "An explorable figure: run this cell in JupyterLab to move all its controls."

    def _repr_html_(self) -> str:
        return self._html


def render(draw: Callable, values: dict, *, dpi: int | None = None) -> bytes:
    """The figure for ``values`` as PNG bytes; no figure that ``draw`` made stays open.

    Raises:
        ValueError: ``draw`` returned no Figure.
    """
    import matplotlib.pyplot as plt

    before = set(plt.get_fignums())
    figure = None
    try:
        figure = draw(**values)
        if not hasattr(figure, "savefig"):
            raise ValueError(f"draw must return a matplotlib Figure: got {type(figure).__name__}")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi="figure" if dpi is None else dpi)
        return buffer.getvalue()
    finally:
        if hasattr(figure, "savefig"):
            plt.close(figure)
        for number in set(plt.get_fignums()) - before:  # half-made ones, when draw raised
            plt.close(number)


def live(draw: Callable, controls: dict, *, alt: str | Callable = ""):
    """The widget: controls above one image; an error in ``draw`` stands in the image's place.

    A slider redraws while it is dragged as long as a redraw is quick, else when it is let go.
    """
    import ipywidgets as widgets

    first = next(iter(controls.values()))
    image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
    message = widgets.HTML(layout=widgets.Layout(display="none"))
    dragged = [w for w in controls.values() if getattr(w, "continuous_update", False)]
    shown = None

    def redraw(_=None):
        nonlocal shown
        values = {name: widget.value for name, widget in controls.items()}
        if values == shown:
            return
        shown = values
        begin = time.perf_counter()
        try:
            image.value = render(draw, values)
            # an image without a name is silent to a screen reader; its tooltip names it
            image.tooltip = _alt(alt, first, first.value, _label(first.value, first))
        except Exception:
            trace = html.escape(traceback.format_exc())
            message.value = (
                f'<div role="alert"><p>draw failed for {html.escape(str(values))}:</p>'
                f'<pre style="overflow:auto">{trace}</pre></div>'
            )
            message.layout.display, image.layout.display = None, "none"
            return
        message.value = ""
        message.layout.display, image.layout.display = "none", None
        for widget in dragged:
            widget.continuous_update = time.perf_counter() - begin < SLOW

    for widget in controls.values():
        widget.style.description_width = "initial"
        widget.observe(redraw, "value")
    redraw()
    row = widgets.HBox(list(controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
    return widgets.VBox([row, image, message])


class Choice(NamedTuple):
    """The states of a control, in order, and the index of the one it stands at."""

    values: list
    start: int


def choices(widget) -> Choice:
    """All states of a slider, a choice or a checkbox.

    Raises:
        ValueError: another kind of control, whose states cannot be listed.
    """
    if hasattr(widget, "_options_full") and hasattr(widget, "index"):
        # ipywidgets keeps (label, value) pairs beside the bare form that the caller gave
        values = [value for _, value in widget._options_full]
        if values and (widget.index is None or isinstance(widget.index, int)):
            return Choice(values, widget.index or 0)
    elif isinstance(widget.value, bool):
        return Choice([False, True], int(widget.value))
    elif all(hasattr(widget, name) for name in ("min", "max", "step")) and isinstance(
        widget.value, int | float
    ):
        step = widget.step or (widget.max - widget.min) / (MAX_FRAMES - 1) or 1
        count = int((widget.max - widget.min) / step + 1e-9) + 1
        values = [widget.min + i * step for i in range(count)]
        if hasattr(widget, "base"):
            values = [widget.base**exponent for exponent in values]
        if isinstance(widget.value, int):
            values = [int(v) for v in values]
        start = min(range(count), key=lambda i: abs(values[i] - widget.value))
        values[start] = widget.value  # 0.30000000000000004 where the caller says 0.3
        return Choice(values, start)
    raise ValueError(
        "the first control must be a slider of one value, a choice of one or a checkbox: "
        f"got {type(widget).__name__}"
    )


def thin(count: int, start: int, limit: int) -> list[int]:
    """At most ``limit`` of ``range(count)``, even, with both ends and ``start``."""
    if count <= limit:
        return list(range(count))
    picked = {round(i * (count - 1) / (limit - 1)) for i in range(limit)}
    if start not in picked:
        picked.remove(min(picked - {0, count - 1}, key=lambda i: abs(i - start)))
        picked.add(start)
    return sorted(picked)


def compress(png: bytes) -> str:
    """A picture as a data URI: a palette PNG or WebP, whichever is smaller."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    candidates = []
    for kind, image, options in (
        ("png", picture.quantize(64, dither=Image.Dither.NONE), {"optimize": True}),
        ("webp", picture, {"quality": 80, "method": 4}),
    ):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        candidates.append((len(buffer.getvalue()), kind, buffer.getvalue()))
    _, kind, data = min(candidates)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def pre_render(draw: Callable, controls: dict, *, alt: str | Callable, budget: int) -> Frames:
    """Frames of the first control whose images take at most ``budget`` bytes in all.

    As many frames as fit at full resolution; a lower one only where fewer than ``MIN_FRAMES``
    (or all, of a control with fewer states) would fit.

    Raises:
        ValueError: not even the lowest resolution fits.
    """
    name, widget = next(iter(controls.items()))
    rest = {n: w.value for n, w in controls.items() if n != name}
    values, start = choices(widget)
    limit = min(len(values), MAX_FRAMES)
    fewest = min(limit, MIN_FRAMES)
    for dpi in DPIS:
        made: dict[int, str] = {}
        for count in range(limit, fewest - 1, -1):
            size, picked = 0, thin(len(values), start, count)
            # the initial frame first: when it alone is far too large, the rest is not drawn
            for i in sorted(picked, key=lambda i: i != start):
                if i not in made:
                    made[i] = compress(render(draw, {name: values[i], **rest}, dpi=dpi))
                size += len(made[i])
                if size > budget or len(made[start]) * fewest > 1.5 * budget:
                    break
            else:
                texts = [_label(values[i], widget) for i in picked]
                frames = [
                    Frame(text, _alt(alt, widget, values[i], text), made[i])
                    for i, text in zip(picked, texts, strict=True)
                ]
                return Frames(frames, picked.index(start), dpi)
    raise ValueError(
        f"draw must give simpler figures: {fewest} frames at {DPIS[-1]} dpi take more than the "
        f"{budget} bytes that are left for this explorable on its page"
    )


def static_html(draw: Callable, controls: dict, *, alt: str | Callable = "") -> str:
    """The explorable as HTML that needs no kernel: a slider over frames of the first control.

    The explorables of one kernel share ``BUDGET`` bytes; one takes at most ``SHARE``. Whatever
    may differ between machines stands between ``<!--frames-->`` and ``<!--/frames-->``.

    Raises:
        ValueError: the frames do not fit.
    """
    stem = re.sub(r"[^a-z0-9]+", "-", getattr(draw, "__name__", "draw").lower()).strip("-")
    number = 1 + sum(known.rpartition("-")[0] == f"icmllab-{stem}" for known in _used)
    ident = f"icmllab-{stem}-{number}"
    room = min(SHARE, BUDGET - sum(_used.values()))
    # the initial frame stands twice on the page: as the image, and in the script
    frames = pre_render(draw, controls, alt=alt, budget=room * 4 // 5)
    page = _page(ident, controls, frames)
    if len(page.encode()) > room:
        frames = pre_render(draw, controls, alt=alt, budget=room * 3 // 5)
        page = _page(ident, controls, frames)
    if len(page.encode()) > room:
        raise ValueError(f"alt must be shorter: the explorable does not fit {room} bytes")
    _used[ident] = len(page.encode())
    return page


def _page(ident: str, controls: dict, made: Frames) -> str:
    """The frames, the slider and the script that joins them together."""
    (_, widget), *others = controls.items()
    frames, start, dpi = made
    initial = frames[start]
    label = html.escape(widget.description)
    # "</" would end the script inside one of its texts
    data = json.dumps(frames, ensure_ascii=False).replace("</", "<\\/")
    script = _SCRIPT.replace("ID", json.dumps(ident), 1).replace("FRAMES", data, 1)
    rest = ", ".join(f"{w.description} = {_label(w.value, w)}" for _, w in others)
    rest = f" The other controls stand at {html.escape(rest)}." if rest else ""
    note = "" if dpi == DPIS[0] else f" Drawn at {dpi} dpi, to keep the page small."
    return (
        f'<div class="icmllab-explore" id="{ident}">'
        f"<!--frames-->"
        f'<p><label for="{ident}-s">{label}</label> '
        f'<input id="{ident}-s" type="range" min="0" max="{len(frames) - 1}" step="1" '
        f'value="{start}" aria-valuetext="{html.escape(initial.text)}" autocomplete="off" '
        f'style="width:min(20em,60%);vertical-align:middle"> '
        f'<output for="{ident}-s">{html.escape(initial.text)}</output></p>'
        f'<img src="{initial.source}" alt="{html.escape(initial.alt)}" style="max-width:100%">'
        f"<script>{script}</script>"
        f"<small>{len(frames)} frames, drawn in advance.{note}</small><!--/frames-->"
        f"<small>{rest} In JupyterLab, run this cell to move every control.</small></div>"
    )


def _alt(alt: str | Callable, widget, value: object, text: str) -> str:
    """What a frame shows, in words."""
    if callable(alt):
        return str(alt(value))
    state = f"{widget.description}: {text}"
    return f"{alt.rstrip('. ')}. {state}" if alt else f"Figure at {state}"


def _label(value: object, widget) -> str:
    """A value as the page shows it: the option's label, or the number in the slider's format."""
    if hasattr(widget, "_options_full") and isinstance(widget.index, int):
        same = [text for text, v in widget._options_full if v is value]
        return str(same[0] if same else value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        try:
            return format(value, getattr(widget, "readout_format", ".3g"))
        except ValueError:  # a format of d3 that Python does not know
            return f"{value:.3g}"
    return str(value)
