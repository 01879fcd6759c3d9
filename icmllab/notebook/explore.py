"""Explorables: a figure with controls, live in JupyterLab and pre-rendered on a static page."""

import base64
import html
import io
import json
import re
import traceback
import warnings
from collections.abc import Callable

from icmllab.notebook.presets import is_static

BUDGET = 250_000
"""Bytes that the pre-rendered frames of one explorable may take on the page."""

MAX_FRAMES = 16

_SCRIPT = """(() => {
const box = document.getElementById(ID), slider = box.querySelector("input"),
  said = box.querySelector("output"), texts = TEXTS;
slider.addEventListener("input", () => {
  const k = +slider.value;
  box.querySelectorAll("img").forEach((f, i) => { f.style.display = i === k ? "" : "none"; });
  said.textContent = texts[k];
  slider.setAttribute("aria-valuetext", texts[k]);
}); })()"""

_made: dict[str, int] = {}


def explore(draw: Callable, *, alt: str = "", **controls) -> None:
    """Show ``draw(**values)`` with ``controls`` that change the values.

    Live, every control works and the figure is drawn anew at each change. On a page without a
    kernel (``ICMLLAB_STATIC=1``) a slider goes through frames of the first control, drawn in
    advance, the others standing at their initial values.

    Args:
        draw: takes the controls' values by name and returns a matplotlib Figure.
        alt: what the figure shows, in words; each frame's text adds the first control's value.
        controls: ipywidgets value widgets by argument name; at least one.

    Raises:
        ValueError: no control, or something that is no value widget.
    """
    from IPython.display import display

    if not controls:
        raise ValueError("controls must name at least one widget: got none")
    for name, widget in controls.items():
        if not hasattr(widget, "value") or not hasattr(widget, "observe"):
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
    """The figure for ``values`` as PNG bytes; the figure is closed again."""
    import matplotlib.pyplot as plt

    figure = draw(**values)
    if not hasattr(figure, "savefig"):
        raise ValueError(f"draw must return a matplotlib Figure: got {type(figure).__name__}")
    try:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", **({} if dpi is None else {"dpi": dpi}))
        return buffer.getvalue()
    finally:
        plt.close(figure)


def live(draw: Callable, controls: dict, *, alt: str = ""):
    """The widget: controls above one image; an error in ``draw`` is shown below them."""
    import ipywidgets as widgets

    image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
    # the alternative text tells a screen reader what the picture shows
    image.add_class("icmllab-explore-image")
    message = widgets.HTML()
    state = {"values": None}

    def redraw(_=None):
        values = {name: widget.value for name, widget in controls.items()}
        if values == state["values"]:
            return
        state["values"] = values
        try:
            image.value = render(draw, values)
            message.value = ""
        except Exception:
            text = html.escape(traceback.format_exc(limit=-3))
            message.value = f'<pre role="alert">{text}</pre>'

    for widget in controls.values():
        widget.style.description_width = "initial"
        widget.observe(redraw, "value")
    redraw()
    caption = widgets.HTML(f"<small>{html.escape(alt)}</small>") if alt else message
    row = widgets.HBox(list(controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
    return widgets.VBox([row, image, *([caption] if alt else []), message])


def frame_values(widget) -> list:
    """The values of a control that its frames show: ends, initial value, and evenly between."""
    if hasattr(widget, "options"):
        # ipywidgets keeps (label, value) pairs beside the bare form that the caller gave
        values = [value for _, value in widget._options_full]
    elif isinstance(widget.value, bool):
        values = [False, True]
    elif hasattr(widget, "base"):
        count = round((widget.max - widget.min) / widget.step) + 1
        values = [widget.base ** (widget.min + i * widget.step) for i in range(count)]
    elif hasattr(widget, "min") and hasattr(widget, "max"):
        count = int((widget.max - widget.min) / widget.step + 1e-9) + 1
        values = [type(widget.value)(widget.min + i * widget.step) for i in range(count)]
    else:
        raise ValueError(f"the first control must be a slider, a choice or a box: got {widget!r}")
    return _thin(values, widget.value, MAX_FRAMES)


def _thin(values: list, initial: object, limit: int) -> list:
    """At most ``limit`` of the values, with both ends and the one nearest to ``initial``."""
    if len(values) <= limit:
        return values
    picked = {round(i * (len(values) - 1) / (limit - 1)) for i in range(limit)}
    if initial in values:
        start = values.index(initial)
    else:
        start = min(range(len(values)), key=lambda i: abs(values[i] - initial))
    inner = picked - {0, len(values) - 1}
    if start not in picked and inner:
        picked.remove(min(inner, key=lambda i: abs(i - start)))
        picked.add(start)
    return [values[i] for i in sorted(picked)]


def _compress(png: bytes) -> str:
    """A frame as a data URI: a palette PNG or WebP, whichever is smaller."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    small, webp = io.BytesIO(), io.BytesIO()
    picture.quantize(64).save(small, "PNG", optimize=True)
    picture.save(webp, "WEBP", quality=80, method=6)
    kind, data = min(
        (("png", small.getvalue()), ("webp", webp.getvalue())), key=lambda pair: len(pair[1])
    )
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def static_html(draw: Callable, controls: dict, *, alt: str = "", budget: int = BUDGET) -> str:
    """The explorable as HTML that needs no kernel: a slider over frames of the first control.

    Frames are dropped, then drawn smaller, until the whole fits ``budget`` bytes.

    Raises:
        ValueError: even two small frames do not fit.
    """
    name, widget = next(iter(controls.items()))
    rest = {n: w.value for n, w in controls.items() if n != name}
    values = frame_values(widget)
    pictures = {v: _compress(render(draw, {name: v, **rest})) for v in values}
    dpi = None
    while sum(len(pictures[v]) for v in values) > budget - 8_000:
        if len(values) > 6:
            values = _thin(values, widget.value, len(values) - 2)
            continue
        dpi = 80 if dpi is None else dpi - 15
        if dpi < 40:
            raise ValueError(f"draw: its frames do not fit {budget} bytes; draw less detail")
        warnings.warn(f"frames are drawn at {dpi} dpi to fit {budget} bytes", stacklevel=3)
        pictures = {v: _compress(render(draw, {name: v, **rest}, dpi=dpi)) for v in values}
    return _page(getattr(draw, "__name__", "draw"), widget, values, pictures, rest, controls, alt)


def _page(stem, widget, values, pictures, rest, controls, alt) -> str:
    """Put the frames, the slider and the script that joins them together."""
    label = html.escape(widget.description)
    shown = [_label(v, widget) for v in values]
    try:
        start = values.index(widget.value)
    except ValueError:
        start = min(range(len(values)), key=lambda i: abs(values[i] - widget.value))
    _made[stem] = _made.get(stem, 0) + 1
    ident = f"icmllab-{re.sub(r'[^a-z0-9]+', '-', stem.lower()).strip('-')}-{_made[stem]}"
    frames = "".join(
        f'<img src="{pictures[v]}" alt="{html.escape(f"{alt} {label}: {text}.".strip())}"'
        f' style="max-width:100%{"" if i == start else ";display:none"}">'
        for i, (v, text) in enumerate(zip(values, shown, strict=True))
    )
    others = ", ".join(
        f"{html.escape(controls[n].description)} = {html.escape(_label(v, controls[n]))}"
        for n, v in rest.items()
    )
    note = f" Other controls here: {others}." if others else ""
    script = _SCRIPT.replace("ID", json.dumps(ident)).replace("TEXTS", json.dumps(shown))
    return (
        f'<div class="icmllab-explore" id="{ident}">'
        f'<p><label for="{ident}-s">{label}</label> '
        f'<input id="{ident}-s" type="range" min="0" max="{len(values) - 1}" step="1" '
        f'value="{start}" aria-valuetext="{html.escape(shown[start])}" '
        f'style="width:min(20em,60%);vertical-align:middle"> '
        f'<output for="{ident}-s">{html.escape(shown[start])}</output></p>'
        f"<!--frames-->{frames}<!--/frames-->"
        f"<p><small>Frames drawn in advance.{note} In JupyterLab every control moves.</small></p>"
        f"<script>{script}</script></div>"
    )


def _label(value: object, widget) -> str:
    """A value as the page shows it: the option's label, or a short number."""
    if hasattr(widget, "_options_full"):
        return str(next((text for text, v in widget._options_full if v == value), value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
