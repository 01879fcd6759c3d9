"""The package's real source, shown in a chapter."""

import html
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path

_CSS = """<style>
.icmllab-source{margin:.5em 0}
.icmllab-source pre{background:#f6f8fa;color:#1f2328;padding:.7em;overflow:auto;
max-height:32em;line-height:1.35;font-size:.85em;border:1px solid #8886;border-radius:4px}
.icmllab-source figcaption{font-size:.85em;margin-bottom:.3em}
.icmllab-source .k{color:#a0111f;font-weight:600}.icmllab-source .s{color:#0a3069}
.icmllab-source .c{color:#57606a;font-style:italic}.icmllab-source .n{color:#6639ba}
.icmllab-source .m{color:#0550ae}
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
            f'{_CSS}<figure class="icmllab-source"><figcaption><code>{caption}</code></figcaption>'
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
    plain = inspect.unwrap(obj) if callable(obj) else obj
    while not (inspect.isclass(plain) or inspect.isroutine(plain) or inspect.ismodule(plain)):
        inner = getattr(plain, "fn", None) or getattr(plain, "__func__", None)
        if inner is None:
            raise ValueError(f"obj must be a function, class or kernel: got {type(obj).__name__}")
        plain = inspect.unwrap(inner)
    try:
        lines, first = inspect.getsourcelines(plain)
        file = Path(inspect.getsourcefile(plain))
    except (TypeError, OSError):
        raise ValueError(f"obj has no Python source: {obj!r}") from None
    module = getattr(plain, "__module__", None) or getattr(plain, "__name__", "")
    if module.split(".")[0] != "icmllab":
        raise ValueError(f"obj must belong to icmllab: {obj!r} belongs to {module}")
    first = max(first, 1)
    text = textwrap.dedent("".join(lines))
    return Source(text.rstrip("\n"), _shown_path(file, module), first, first + len(lines) - 1)


def _shown_path(file: Path, module: str) -> str:
    """The file's place in the repository, the same on every machine."""
    parts = module.split(".")
    if parts[:2] == ["icmllab", "kernels"]:
        return "/".join(["kernels", *parts[2:-1], file.name])
    return "/".join([*parts[:-1], file.name])


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
