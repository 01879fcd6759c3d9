"""Slides of a chapter: its title, opening figure, idea, each experiment's figure, and the claims.

Cells tagged ``slide`` become slides: a code cell shows its figure and the first sentences of the
text below it, a text cell its heading, first paragraph and first displayed formula. The first
figure and the table of claims are always shown. nbconvert makes reveal.js slides of them that need
no network.
"""

import re
import shutil
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path

import nbformat

TAG = "slide"

# The stock template loads its scripts from the network; this one from beside the slides.
TEMPLATE = """
{%- extends 'index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}
<script>
MathJax = {tex: {inlineMath: [['$', '$']], displayMath: [['$$', '$$']], processEscapes: true}};
</script>
<script src="{{ resources.mathjax_url }}"></script>
{%- endblock -%}
{%- block html_head_css -%}
<style>
.reveal .slides { text-align: left; }
.reveal h1, .reveal h2 { text-transform: none; letter-spacing: 0; }
.reveal h1 { font-size: 48px; } .reveal h2 { font-size: 34px; }
.reveal .jp-RenderedMarkdown p, .reveal .jp-RenderedMarkdown li { font-size: 25px;
  line-height: 1.4; }
.reveal .jp-OutputArea-output img { height: auto; width: auto; min-width: 62%; max-height: 430px;
  max-width: 100%; margin: 0 auto; display: block; }
.reveal .jp-OutputArea-output table { font-size: 15px; }
.reveal .jp-OutputArea-output:has(table) { max-height: 560px; overflow-y: auto; }
.reveal .jp-Cell, .reveal .jp-OutputArea-output { background: transparent; }
.reveal .jp-OutputPrompt, .reveal .jp-InputPrompt { display: none; }
</style>
{%- endblock -%}
{%- block data_png scoped -%}
<div class="jp-RenderedImage jp-OutputArea-output">
<img src="data:image/png;base64,{{ output.data['image/png'] }}"
     alt="{{ (output | get_metadata('alt', 'image/png') or '') | escape_html }}">
</div>
{%- endblock -%}
{%- block footer_js -%}
<script src="{{ resources.reveal.url_prefix }}/dist/reveal.js"></script>
<script>
Reveal.initialize({controls: true, progress: true, hash: true, slideNumber: 'c/t', center: false,
                   width: 1100, height: 720, transition: 'none'});
</script>
{%- endblock -%}
"""


def has_figure(cell) -> bool:
    """Whether a cell's stored outputs hold a picture."""
    return any("image/png" in o.get("data", {}) for o in cell.get("outputs", ()))


def plain(text: str) -> str:
    """Markdown without the book's own roles, directives and links to its pages."""
    text = re.sub(r"^```.*?^```\s*", "", text, flags=re.S | re.M)
    text = re.sub(r"^(:::|\+\+\+|\([\w-]+\)=).*$", "", text, flags=re.M)
    text = re.sub(r"\s*\{cite(?::\w+)?\}`[^`]*`", "", text)
    text = re.sub(r"\{[\w:-]+\}`([^`<]*?)\s*(?:<[^`]*>)?`", r"\1", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\([^)]*\)", r"\1", text).strip()


def paragraphs(text: str) -> list[str]:
    """The blocks of a Markdown text that are neither headings nor empty."""
    blocks = (b.strip() for b in re.split(r"\n\s*\n", plain(text)))
    return [b for b in blocks if b and not b.startswith("#")]


def first_sentences(text: str, *, most: int = 280) -> str:
    """The first sentences of a text, as many as fit into ``most`` characters, at least one."""
    flat = " ".join(text.strip().strip("*_").split())
    kept = ""
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z$])", flat):
        if kept and len(kept) + len(sentence) > most:
            break
        kept = f"{kept} {sentence}".strip()
    return kept


def heading_of(text: str) -> str | None:
    """The last heading of a Markdown text, without its marks."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return plain(found[-1]) if found else None


def slide_notebook(nb):
    """The slides of a chapter as a notebook of nbconvert's slideshow form.

    Args:
        nb: the chapter with its stored outputs.

    Raises:
        ValueError: the chapter has no figure or no table of claims to show.
    """
    cells = nb.cells
    opening = next((i for i, c in enumerate(cells) if has_figure(c)), None)
    claims = [i for i, c in enumerate(cells) if any(_is_claims(o) for o in c.get("outputs", ()))]
    if opening is None or not claims:
        raise ValueError("the chapter has no figure or no claims: run it first (make sync)")
    first = next(c for c in cells if c.cell_type == "markdown")
    title = re.search(r"^# (.+)$", first.source, re.M)
    slides = [_text(f"# {plain(title[1])}\n\n{paragraphs(first.source)[0]}")]
    heading = "At a glance"
    for number, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            heading = heading_of(cell.source) or heading
            if TAG in cell.metadata.get("tags", ()):
                slides.append(_text(f"## {heading}\n\n{_essence(cell.source)}"))
            continue
        if number == opening or (TAG in cell.metadata.get("tags", ()) and has_figure(cell)):
            name = "At a glance" if number == opening else heading
            below = cells[number + 1] if number + 1 < len(cells) else None
            slides += _figure(name, cell, below)
    table = cells[claims[-1]]
    slides += [_text("## Claims"), _shown(table, "-")]
    made = nbformat.v4.new_notebook(cells=slides, metadata=dict(nb.metadata))
    made.metadata["title"] = plain(title[1])
    return made


def _is_claims(output) -> bool:
    return "icmllab" in output.get("metadata", {})


def _text(source: str, kind: str = "slide"):
    return nbformat.v4.new_markdown_cell(source, metadata={"slideshow": {"slide_type": kind}})


def _essence(source: str) -> str:
    """The first paragraph below a text's last heading, and the first displayed formula there."""
    blocks = paragraphs(re.split(r"^#+ .+$", plain(source), flags=re.M)[-1])
    formula = next((b for b in blocks if b.startswith("$$")), None)
    words = next((b for b in blocks if not b.startswith("$$")), "")
    return "\n\n".join(part for part in (words, formula) if part)


def _figure(heading: str, cell, below) -> list:
    made = [_text(f"## {heading}"), _shown(cell, "-")]
    if below is not None and below.cell_type == "markdown" and paragraphs(below.source):
        made.append(_text(first_sentences(paragraphs(below.source)[0]), "-"))
    return made


def _shown(cell, kind: str):
    """A code cell's figures or table, without its code."""
    alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
    outputs = []
    for output in cell.outputs:
        if "data" not in output:
            continue
        kept = nbformat.from_dict(output)
        if "image/png" in kept.data:
            kept.metadata["image/png"] = {"alt": alt}
        outputs.append(kept)
    made = nbformat.v4.new_code_cell("", outputs=outputs)
    made.metadata["slideshow"] = {"slide_type": kind}
    return made


def static_files(folder: Path) -> None:
    """Put reveal.js and MathJax beside the slides, from the packages that bundle them."""
    reveal = Path(find_spec("sphinx_revealjs").origin).parent / "_static" / "revealjs"
    # the package's folder has a name that cannot be imported
    inside = next(f for f in files("sphinx-mathjax-offline") if f.name == "tex-svg.js")
    for name, source in (("reveal", reveal), ("mathjax", Path(inside.locate()).parent)):
        if not (folder / name).is_dir():
            part = folder / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(source, part)
            part.rename(folder / name)


def write_slides(name: str, nb, folder: Path) -> Path:
    """Write the slides of chapter ``name`` to ``folder/<part>/<slug>.html``; returns the path."""
    from jinja2 import DictLoader
    from nbconvert import SlidesExporter

    from icmllab.notebook.sweep import write_text

    exporter = SlidesExporter(
        extra_loaders=[DictLoader({"icmllab.html.j2": TEMPLATE})],
        template_file="icmllab.html.j2",
        reveal_url_prefix="../static/reveal",
        mathjax_url="../static/mathjax/tex-svg.js",
        font_awesome_url="",
        reveal_theme="white",
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
    )
    html, _ = exporter.from_notebook_node(slide_notebook(nb))
    static_files(folder / "static")
    path = folder / f"{name}.html"
    write_text(path, html)
    return path
