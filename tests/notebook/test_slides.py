"""Slides of a chapter: what they show, and that they need no network."""

import re

import nbformat
import pytest

from icmllab.notebook import chapters
from icmllab.notebook.slides import (
    first_sentences,
    has_figure,
    plain,
    slide_notebook,
    write_slides,
)

NAMES = chapters.chapter_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_chapter_gives_title_opening_idea_experiments_and_claims(name):
    made = slide_notebook(chapters.read_notebook(name))
    kinds = [c.metadata.slideshow.slide_type for c in made.cells]
    texts = [c.source for c in made.cells if c.cell_type == "markdown"]
    assert 6 <= kinds.count("slide") <= 20
    assert texts[0].startswith("# ")
    assert any(t.startswith("## At a glance") for t in texts)
    assert texts[-1] == "## Claims"
    figures = [c for c in made.cells if has_figure(c)]
    assert len(figures) >= 4
    assert all(not c.source for c in made.cells if c.cell_type == "code")
    # an idea in words, apart from figures
    assert any(len(t) > 40 and t.startswith("## ") for t in texts)
    for cell in figures:
        for output in cell.outputs:
            if "image/png" in output.data:
                assert len(output.metadata["image/png"]["alt"]) > 20
    below = [t for t in texts if not t.startswith("#")]
    assert all(len(t) <= 400 for t in below)


def test_written_slides_load_nothing_from_a_network(tmp_path):
    name = "representations/aristotelian"
    path = write_slides(name, chapters.read_notebook(name), tmp_path)
    html = path.read_text(encoding="utf-8")
    loaded = re.findall(r"<(?:script|link|img)[^>]*?(?:src|href)=\"([^\"]+)\"", html)
    assert loaded
    for address in loaded:
        assert address.startswith(("../static/", "data:")), address
        if address.startswith("../static/"):
            assert (path.parent / address).resolve().is_file(), address
    theme = (tmp_path / "static/reveal/dist/theme/white.css").read_text()
    assert not re.search(r"(?:@import|url\()[^;]*https?:", theme)
    assert "No description has been provided" not in html
    assert html.count("<section") >= 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("See {cite:p}`a2024` for more.", "See for more."),
        ("The {term}`null` is here.", "The null is here."),
        ("As in [the book](other.md).", "As in the book."),
        ("```{note}\nhidden\n```\nShown.", "Shown."),
    ],
)
def test_the_books_own_marks_are_taken_off(text, expected):
    assert plain(text) == expected


def test_the_first_sentences_fit():
    text = "*Left: one. Right: two. " + "A longer sentence follows here. " * 20 + "*"
    assert first_sentences(text, most=40) == "Left: one. Right: two."
    assert first_sentences("One only, " + "x" * 500) == "One only, " + "x" * 500


def test_a_chapter_that_was_not_run_is_refused():
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title")])
    with pytest.raises(ValueError, match="run it first"):
        slide_notebook(nb)
