"""The book's generated pages: the list of papers and the scorecard.

``{icmllab-papers}`` lists ``papers.yml``, all of it or one part; ``{icmllab-scorecard}`` collects
every claim of every chapter from the metadata of the notebooks' outputs. Nothing is typed in:
a chapter that is not in the book is "in preparation", a claim that fails is shown failing.
"""

from collections import Counter
from pathlib import Path

import nbformat
import yaml
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxDirective

from icmllab.notebook.chapters import chapter_names, notebook_names
from icmllab.notebook.claims import WORDS, claims_from_notebook

BOOK = Path(__file__).resolve().parents[1]


def read_papers() -> list[dict]:
    """The entries of ``papers.yml``, in the papers' order."""
    return yaml.safe_load((BOOK / "papers.yml").read_text(encoding="utf-8"))


def in_book(paper: dict) -> bool:
    """Whether the paper's chapter is there to be read."""
    return (BOOK / paper["part"] / f"{paper['slug']}.ipynb").is_file()


def document_link(docname: str, text: str) -> pending_xref:
    """A link to a page of the book, resolved like any other reference."""
    link = pending_xref(
        "",
        nodes.inline("", text),
        refdomain="std",
        reftype="doc",
        reftarget=f"/{docname}",
        refexplicit=True,
        refwarn=True,
    )
    return link


def table(
    header: list[str], rows: list[list], widths: list[int], classes: list[str]
) -> nodes.table:
    """A docutils table; a cell is a text or a list of inline nodes."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=w) for w in widths]

    def line(cells: list) -> nodes.row:
        row = nodes.row()
        for cell in cells:
            inline = [nodes.Text(cell)] if isinstance(cell, str) else cell
            row += nodes.entry("", nodes.paragraph("", "", *inline))
        return row

    group += nodes.thead("", line(header))
    group += nodes.tbody("", *[line(r) for r in rows])
    return nodes.table("", group, classes=["icmllab-table", *classes])


class Papers(SphinxDirective):
    """``{icmllab-papers} [part]``: the papers, with the chapters that exist linked."""

    optional_arguments = 1
    option_spec = {"filter": directives.flag}  # noqa: RUF012 - docutils' own form

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(BOOK / "papers.yml"))
        part = self.arguments[0] if self.arguments else None
        papers = [p for p in read_papers() if part in (None, p["part"])]
        if not papers:
            raise self.error(f"no paper in papers.yml has part: {part}")
        rows = [self.row(p, with_part=part is None) for p in papers]
        header = ["No.", "Paper", *(["Part"] if part is None else []), "What its chapter shows"]
        widths = [6, 34, *([14] if part is None else []), 46]
        made = table(header, rows, widths, ["icmllab-papers"])
        if "filter" not in self.options:
            return [made]
        control = nodes.raw(
            "",
            '<p class="icmllab-filter"><label for="icmllab-filter">Filter the papers</label> '
            '<input id="icmllab-filter" type="search" autocomplete="off" '
            'placeholder="a word of the title, part, status or subject"> '
            '<output for="icmllab-filter" aria-live="polite"></output></p>',
            format="html",
        )
        return [control, made]

    def row(self, paper: dict, *, with_part: bool) -> list:
        """One paper's line."""
        where = f"book/{paper['part']}/{paper['slug']}"
        status = "in preparation"
        if in_book(paper):
            status = "chapter"
            title = [document_link(where, paper["title"])]
        else:
            title = [nodes.Text(paper["title"])]
        title.append(nodes.inline("", f" {status}", classes=["icmllab-status", status.split()[0]]))
        shows = [
            nodes.Text(paper["shows"]),
            nodes.inline("", " " + ", ".join(paper["keywords"]), classes=["icmllab-keywords"]),
        ]
        part = document_link(f"book/{paper['part']}/index", paper["part"])
        return [str(paper["number"]), title, *([[part]] if with_part else []), shows]


class Scorecard(SphinxDirective):
    """``{icmllab-scorecard}``: every claim of every chapter, from the stored runs."""

    def run(self) -> list[nodes.Node]:
        titles = {f"{p['part']}/{p['slug']}": p["title"] for p in read_papers()}
        cards = []
        for name in chapter_names():
            path = BOOK / f"{name}.ipynb"
            if not path.is_file():
                continue
            self.env.note_dependency(str(path))
            notebook = nbformat.read(path, as_version=4)
            payload = claims_from_notebook(notebook)
            if payload is None:
                raise self.error(f"{name}: the notebook carries no claims table")
            cards.append((name, titles[name], notebook.metadata["icmllab"], payload["claims"]))
        return [self.totals(cards), *[self.card(*c) for c in cards]]

    def totals(self, cards: list[tuple]) -> nodes.table:
        """How many claims hold, fail and are reported, by chapter and in all."""
        rows, total = [], Counter()
        for name, title, record, claims in cards:
            count = Counter(c["verdict"] for c in claims)
            total += count
            numbers = [str(count[v]) for v in WORDS]
            link = [document_link(f"book/{name}", title)]
            rows.append([link, *numbers, f"{record['seconds']:.0f} s", f"{record['peak_mb']} MB"])
        rows.append(["All chapters", *[str(total[v]) for v in WORDS], "", ""])
        header = ["Chapter", *[f"{s} {w}" for s, w in WORDS.values()], "Run time", "Memory"]
        return table(header, rows, [40, 12, 12, 12, 12, 12], ["icmllab-totals"])

    def card(self, name: str, title: str, record: dict, claims: list[dict]) -> nodes.section:
        """One chapter's claims."""
        section = nodes.section(ids=[nodes.make_id(name)], names=[name])
        section += nodes.title("", title)
        text = (
            f"Measured in {record['seconds']:.0f} s at the {record['preset']} preset, seed "
            f"{record['seed']}, on {record['hardware']}, Python {record['python']}. "
        )
        section += nodes.paragraph(
            "", text, document_link(f"book/{name}", "Read the chapter"), nodes.Text(".")
        )
        rows = []
        for claim in claims:
            symbol, word = WORDS[claim["verdict"]]
            measured = claim["measured"]
            shown = f"{measured:.4g}" if isinstance(measured, float) else str(measured)
            notes = [t for t in (claim.get("why"), claim.get("expected_to_fail")) if t]
            rows.append(
                [
                    [nodes.inline("", f"{symbol} {word}", classes=["icmllab-verdict", word[:4]])],
                    claim["text"] + "".join(f" ({n})" for n in notes),
                    claim["criterion"] or "–",
                    shown if measured is not None else "–",
                    claim["paper"] or "–",
                ]
            )
        header = ["Verdict", "Claim", "Criterion", "Measured here", "The paper reports"]
        section += table(header, rows, [14, 36, 16, 14, 20], ["icmllab-claims-list"])
        self.state.document.note_explicit_target(section, section)
        return section


def exclude_text_halves(app: Sphinx, config: Config) -> None:
    """Build a chapter from its notebook half, which has the outputs."""
    config.exclude_patterns += [f"book/{name}.md" for name in notebook_names()]


def leave_out_thebe(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Drop the theme's hook for remote kernels: it names a server outside and is not used."""

    def wanted(script) -> bool:
        text = f"{getattr(script, 'filename', script)} {getattr(script, 'attributes', '')}"
        return "thebe" not in text.lower()

    context["script_files"] = [s for s in context.get("script_files", ()) if wanted(s)]


def setup(app: Sphinx) -> dict:
    """Register the directives."""
    app.add_directive("icmllab-papers", Papers)
    app.add_directive("icmllab-scorecard", Scorecard)
    app.connect("config-inited", exclude_text_halves)
    app.connect("html-page-context", leave_out_thebe, priority=900)
    app.add_js_file("icmllab.js", loading_method="defer")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
