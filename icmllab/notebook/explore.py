"""Explorables: a figure with controls, live in JupyterLab and pre-rendered on a static page."""

import base64
import html
import io
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from icmllab.notebook.claims import Place, calling_cell
from icmllab.notebook.presets import is_static
from icmllab.notebook.style import unboxed

BUDGET = 250_000
"""Bytes that the explorables of one chapter may take on the page, in all."""

SHARE = 200_000
"""Bytes that one explorable may take, so that a chapter has room for a small second one."""

MAX_FRAMES = 16


class Level(NamedTuple):
    """How sharp a frame is: dots per inch, colours of its palette, quality as WebP.

    ``fewest`` frames must fit, or the next level is tried.
    """

    dpi: int
    colours: int
    quality: int
    fewest: int


LEVELS = (
    Level(110, 64, 80, 12),
    Level(110, 32, 60, 9),
    Level(95, 32, 55, 7),
    Level(80, 24, 50, 6),
    Level(65, 16, 45, 6),
    Level(50, 16, 40, 6),
)
"""Tried in this order until the first at which enough frames fit."""

SLOW = 0.1
"""Seconds a redraw may take for the figure to follow a slider while it is dragged."""

# Frames stand in the script, so that where scripts do not run only the initial one shows.
_SCRIPT = """(() => {
const box = document.getElementById(ID), slider = box.querySelector("input"),
  said = box.querySelector("output"), image = box.querySelector("img"),
  initial = image.src, frames = FRAMES;
const show = () => {
  const [text, alt, source] = frames[+slider.value];
  image.src = source || initial; image.alt = alt; said.textContent = text;
  slider.setAttribute("aria-valuetext", text);
};
slider.addEventListener("input", show); show(); })()"""


class _Shown(NamedTuple):
    """A static explorable of this kernel: the cell that made it and its bytes on the page."""

    cell: Place | None
    size: int


_used: dict[str, _Shown] = {}


class Frame(NamedTuple):
    """One pre-rendered state: the control's value in words, the alternative text, the image."""

    text: str
    alt: str
    source: str


class Frames(NamedTuple):
    """The frames of a static explorable, the initial one's index, sharpness, width in pixels."""

    frames: list[Frame]
    start: int
    level: Level
    width: int


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
        cell = calling_cell(sys._getframe(1))
        display(_Static(static_html(draw, controls, alt=alt, cell=cell)))
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
    caption = widgets.HTML()
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
            # the image widget takes no alternative text, and a tooltip breaks its view: the
            # caption says what the image shows, to screen readers too
            text = _alt(alt, first, first.value, _label(first.value, first))
            caption.value = f"<small>{html.escape(text)}</small>"
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
    return widgets.VBox([row, image, caption, message])


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


class Picture(NamedTuple):
    """A compressed picture as a data URI, and its width in pixels."""

    source: str
    width: int


def compress(png: bytes, *, colours: int, quality: int) -> Picture:
    """The smallest of a palette PNG, the same palette as lossless WebP, and lossy WebP."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    flat = picture.quantize(colours, dither=Image.Dither.NONE)
    candidates = []
    for kind, image, options in (
        ("png", flat, {"optimize": True}),
        ("webp", flat.convert("RGB"), {"lossless": True, "quality": 80, "method": 4}),
        ("webp", picture, {"quality": quality, "method": 4}),
    ):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        candidates.append((len(buffer.getvalue()), kind, buffer.getvalue()))
    _, kind, data = min(candidates)
    return Picture(f"data:image/{kind};base64,{base64.b64encode(data).decode()}", picture.width)


def pre_render(draw: Callable, controls: dict, *, alt: str | Callable, budget: int) -> Frames:
    """Frames of the first control whose images take at most ``budget`` bytes in all.

    As many frames as fit at full sharpness; less sharp ones only where few would fit.

    Raises:
        ValueError: not even the least sharp fit.
    """
    name, widget = next(iter(controls.items()))
    rest = {n: w.value for n, w in controls.items() if n != name}
    values, start = choices(widget)
    limit = min(len(values), MAX_FRAMES)
    for level in LEVELS if budget > 0 else ():
        fewest = min(limit, level.fewest)
        made: dict[int, Picture] = {}

        def size(picked, made=made, level=level) -> int:
            for i in picked:
                if i not in made:
                    png = render(draw, {name: values[i], **rest}, dpi=level.dpi)
                    made[i] = compress(png, colours=level.colours, quality=level.quality)
            return sum(len(made[i].source) for i in picked)

        # three frames tell how many to try, so that few are drawn in vain
        probe = sorted({0, start, len(values) - 1})
        count = min(limit, int(budget * len(probe) / size(probe) * 1.1))
        while count >= fewest:
            picked = thin(len(values), start, count)
            if size(picked) > budget:
                count -= 1
                continue
            texts = [_label(values[i], widget) for i in picked]
            frames = [
                Frame(text, _alt(alt, widget, values[i], text), made[i].source)
                for i, text in zip(picked, texts, strict=True)
            ]
            width = round(made[start].width * LEVELS[0].dpi / level.dpi)
            return Frames(frames, picked.index(start), level, width)
    raise ValueError(
        f"draw must give simpler figures: {min(limit, LEVELS[-1].fewest)} frames at "
        f"{LEVELS[-1].dpi} dpi take more than the {max(budget, 0)} bytes that are left for this "
        "explorable on its page"
    )


def static_html(
    draw: Callable, controls: dict, *, alt: str | Callable = "", cell: Place | None = None
) -> str:
    """The explorable as HTML that needs no kernel: a slider over frames of the first control.

    The explorables of one kernel share ``BUDGET`` bytes; one takes at most ``SHARE``. Whatever
    may differ between machines stands between ``<!--frames-->`` and ``<!--/frames-->``.

    Args:
        draw: as for :func:`explore`.
        controls: the widgets by argument name.
        alt: as for :func:`explore`.
        cell: where the explorable is made; what the cell made in an earlier run is forgotten.

    Raises:
        ValueError: the frames do not fit.
    """
    for known, shown in list(_used.items()):
        if cell and shown.cell and shown.cell.cell == cell.cell and shown.cell.run != cell.run:
            del _used[known]
    stem = re.sub(r"[^a-z0-9]+", "-", getattr(draw, "__name__", "draw").lower()).strip("-")
    number = next(n for n in range(1, len(_used) + 2) if f"icmllab-{stem}-{n}" not in _used)
    ident = f"icmllab-{stem}-{number}"
    room = min(SHARE, BUDGET - sum(shown.size for shown in _used.values()))
    texts = 8_000  # what stands around the images
    page = _page(ident, controls, pre_render(draw, controls, alt=alt, budget=room - texts))
    if len(page.encode()) > room:
        raise ValueError(f"alt must be shorter: the texts of {ident} take more than {texts} bytes")
    _used[ident] = _Shown(cell, len(page.encode()))
    return page


def _page(ident: str, controls: dict, made: Frames) -> str:
    """The frames, the slider and the script that joins them together."""
    (_, widget), *others = controls.items()
    frames, start, level, width = made
    initial = frames[start]
    # the initial frame's image is on the page already
    listed = [f._replace(source="") if f is initial else f for f in frames]
    label = html.escape(widget.description)
    # "</" would end the script inside one of its texts
    data = json.dumps(listed, ensure_ascii=False).replace("</", "<\\/")
    script = _SCRIPT.replace("ID", json.dumps(ident), 1).replace("FRAMES", data, 1)
    rest = ", ".join(f"{w.description} = {_label(w.value, w)}" for _, w in others)
    rest = f" The other controls stand at {html.escape(rest)}." if rest else ""
    note = "" if level == LEVELS[0] else " Less sharp than live, to keep the page small."
    return (
        f'<div class="icmllab-explore" id="{ident}">'
        f"<style>{unboxed('icmllab-explore')}</style><!--frames-->"
        f'<p><label for="{ident}-s">{label}</label> '
        f'<input id="{ident}-s" type="range" min="0" max="{len(frames) - 1}" step="1" '
        f'value="{start}" aria-valuetext="{html.escape(initial.text)}" autocomplete="off" '
        f'style="width:min(20em,60%);vertical-align:middle"> '
        f'<output for="{ident}-s">{html.escape(initial.text)}</output></p>'
        f'<img src="{initial.source}" alt="{html.escape(initial.alt)}" '
        f'style="width:{width}px;max-width:100%">'
        f"<script>{script}</script>"
        f"<p><small>{len(frames)} frames, drawn in advance.{note}</small><!--/frames-->"
        f"<small>{rest} In JupyterLab, run this cell to move every control.</small></p></div>"
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
