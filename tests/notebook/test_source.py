"""The package's source in a chapter: the right lines, the same on every machine, legible."""

import functools
import html
import inspect
import re
from pathlib import Path

import pytest

from icmllab import show_source
from icmllab.notebook import presets, source
from icmllab.notebook.claims import Claims
from icmllab.notebook.presets import preset

ROOT = Path(__file__).resolve().parents[2]


def lines_of(shown: source.Source) -> str:
    """The lines that the caption names, read from the repository."""
    text = (ROOT / shown.file).read_text(encoding="utf-8").splitlines()
    return "\n".join(text[shown.first - 1 : shown.last])


@pytest.mark.parametrize("obj", [preset, Claims, presets, inspect.unwrap(show_source)])
def test_the_caption_names_the_lines_that_are_shown(obj):
    shown = show_source(obj)
    assert lines_of(shown).rstrip() == shown.text
    assert repr(shown).startswith(f"# {shown.file}, lines {shown.first}–{shown.last}\n")
    assert repr(shown).endswith(shown.text)


def test_methods_and_properties_are_dedented():
    for obj in (Claims.check, Claims("a/b").check):
        shown = show_source(obj)
        assert shown.text.startswith("def check(")
        assert shown.file == "icmllab/notebook/claims.py"
        assert lines_of(shown).startswith("    def check(")
    from icmllab.notebook.claims import Claim

    assert "def words" in show_source(Claim.words).text


def wrapped(fn):
    @functools.wraps(fn)
    def inner(*args):
        return fn(*args)

    return inner


class Jitted:
    """What triton.jit makes of a function, also twice (autotune around jit)."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self):
        raise RuntimeError("a kernel is not called")


@pytest.mark.parametrize(
    "decorate",
    [wrapped, functools.cache, functools.partial, Jitted, lambda f: Jitted(Jitted(wrapped(f)))],
)
def test_decorators_are_looked_through(decorate):
    assert show_source(decorate(preset)) == show_source(preset)


def test_kernels_show_under_their_place_in_the_repository():
    pytest.importorskip("triton")
    from importlib import import_module

    found = []
    for file in sorted((ROOT / "kernels").glob("*.py")):
        if "\n@jit" in file.read_text(encoding="utf-8"):
            module = import_module(f"icmllab.kernels.{file.stem}")
            own = [v for v in vars(module).values() if type(v).__module__.startswith("triton.")]
            kernels = [v for v in own if inspect.isfunction(getattr(v, "fn", None))]
            found += [(kernel, f"kernels/{file.name}") for kernel in kernels]
    assert found
    for kernel, file in found:
        shown = show_source(kernel)
        assert shown.file == file
        assert shown.text.startswith(("@jit\ndef ", "@triton."))
        assert lines_of(shown).rstrip() == shown.text


def test_package_files_are_named_with_their_folder():
    import icmllab.kernels
    import icmllab.toolbox

    assert show_source(icmllab.toolbox).file == "icmllab/toolbox/__init__.py"
    assert show_source(icmllab.kernels).file == "kernels/__init__.py"


@pytest.mark.parametrize(
    ("obj", "said"),
    [
        (3, "must be a function, class or kernel: got a int"),
        (Claims("a/b"), "of an object, show its class"),
        (len, "no Python source|must belong to icmllab"),
        (Path, "must belong to icmllab: .* belongs to pathlib"),
        (lines_of, "must belong to icmllab"),
    ],
)
def test_what_is_not_the_packages_is_named(obj, said):
    with pytest.raises(ValueError, match=said):
        show_source(obj)


def test_html_holds_the_same_text_and_no_place_of_this_machine():
    shown = show_source(Claims)
    page = shown._repr_html_()
    code = re.search(r"<code>(.*?)</code></pre>", page, re.DOTALL).group(1)
    assert html.unescape(re.sub(r"<[^>]+>", "", code)) == shown.text
    assert str(ROOT) not in page + repr(shown)
    assert f"{shown.file}, lines {shown.first}–{shown.last}</figcaption>" in page
    assert re.search(r'<pre tabindex="0" role="region" aria-label="[^"]+">', page)
    assert '<span class="k">class</span>' in page
    assert page == show_source(Claims)._repr_html_()


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("palette", [source._LIGHT, source._DARK], ids=["light", "dark"])
def test_every_colour_is_legible_on_its_ground(palette):
    colours = dict(re.findall(r"--(\w+):(#\w{6})", palette))
    ground = luminance(colours.pop("bg"))
    assert set(colours) == {"fg", *(mark for _, mark in source._CLASSES)}
    for name, colour in colours.items():
        high, low = sorted((luminance(colour), ground), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, name
