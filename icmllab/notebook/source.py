"""The package's real source, shown in a chapter."""

import html
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path

from icmllab.notebook.style import unboxed

# Each colour has a contrast of at least 4.5 on its ground.
_LIGHT = "--bg:#f6f8fa;--fg:#1f2328;--k:#a0111f;--s:#0a3069;--c:#57606a;--n:#6639ba;--m:#0550ae"
_DARK = "--bg:#1b1f24;--fg:#e6edf3;--k:#ff9492;--s:#a5d6ff;--c:#a3acb6;--n:#dbb7ff;--m:#91cbff"
_CSS = f"""<style>{unboxed("icmllab-source")}
.icmllab-source{{margin:.5em 0;{_LIGHT}}}
.icmllab-source pre,.icmllab-source pre code{{background:var(--bg)!important;
color:var(--fg)!important}}
.icmllab-source pre{{padding:.7em;overflow:auto;max-height:32em;line-height:1.35;font-size:.85em;
border:1px solid #8888;border-radius:4px}}
.icmllab-source pre code{{padding:0;border:0;font-size:inherit}}
.icmllab-source figcaption{{font-size:.85em;margin-bottom:.3em;text-align:left;
font-family:monospace}}
.icmllab-source .k{{color:var(--k);font-weight:600}}.icmllab-source .s{{color:var(--s)}}
.icmllab-source .c{{color:var(--c);font-style:italic}}.icmllab-source .n{{color:var(--n)}}
.icmllab-source .m{{color:var(--m)}}
@media (prefers-color-scheme:dark){{html:not([data-theme]) body:not([data-jp-theme-light])
.icmllab-source{{{_DARK}}}}}
html[data-theme=dark] .icmllab-source,body[data-jp-theme-light=false] .icmllab-source{{{_DARK}}}
</style>"""

_CLASSES = (
    ("Keyword", "k"),
    ("Comment", "c"),
    ("String", "s"),
    ("Number", "m"),
    ("Name.Function", "n"),
)


@dataclass(frozen=True)
class Source:
    """A piece of the package's source: the text, and where it stands."""

    text: str
    file: str
    first: int
    last: int

    def __repr__(self) -> str:
        return f"# {self.file}, lines {self.first}–{self.last}\n{self.text}"

    def _repr_html_(self) -> str:
        caption = html.escape(f"{self.file}, lines {self.first}–{self.last}")
        return (
            f'{_CSS}<figure class="icmllab-source"><figcaption>{caption}</figcaption>'
            f'<pre tabindex="0" role="region" aria-label="Source of {caption}"><code>'
            f"{_highlight(self.text)}</code></pre></figure>"
        )


def show_source(obj: object) -> Source:
    """The source of a function, method, class or kernel of icmllab, highlighted.

    Args:
        obj: the object; decorators, Triton's ``jit`` among them, are looked through.

    Raises:
        ValueError: the object is not written in Python inside the package.
    """
    plain = _unwrap(obj)
    try:
        lines, first = inspect.getsourcelines(plain)
        file = Path(inspect.getsourcefile(plain))
    except (TypeError, OSError):
        raise ValueError(f"obj has no Python source: {obj!r}") from None
    module = inspect.getmodule(plain).__name__
    if module.split(".")[0] != "icmllab":
        raise ValueError(f"obj must belong to icmllab: {obj!r} belongs to {module}")
    first = max(first, 1)  # a module's lines count from 0
    text = textwrap.dedent("".join(lines))
    return Source(text.rstrip("\n"), _shown_path(file, module), first, first + len(lines) - 1)


def _unwrap(obj: object) -> object:
    """The function, class or module behind decorators, kernels, partials and properties."""
    plain = obj
    while True:
        plain = inspect.unwrap(plain) if callable(plain) else plain
        if inspect.isclass(plain) or inspect.isroutine(plain) or inspect.ismodule(plain):
            return plain
        inner = next(
            (i for n in ("fn", "func", "fget", "__func__") if (i := getattr(plain, n, None))), None
        )
        if not callable(inner):
            raise ValueError(
                f"obj must be a function, class or kernel: got a {type(obj).__name__}; of an "
                "object, show its class"
            )
        plain = inner


def _shown_path(file: Path, module: str) -> str:
    """The file's place in the repository, the same on every machine."""
    parts = module.split(".")
    if file.name != "__init__.py":
        parts = parts[:-1]
    if parts[:2] == ["icmllab", "kernels"]:
        parts = parts[1:]
    return "/".join([*parts, file.name])


def _highlight(text: str) -> str:
    """Highlighted HTML with a handful of classes that are legible on the box's own ground."""
    from pygments.lexers import PythonLexer

    out = []
    for kind, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        name = str(kind)
        mark = next((c for key, c in _CLASSES if f".{key}" in name), None)
        escaped = html.escape(value, quote=False)
        out.append(f'<span class="{mark}">{escaped}</span>' if mark else escaped)
    return "".join(out)
