"""Every chapter's files: the pair agrees, the record is fresh, failures are declared, form kept."""

import re

import nbformat
import pytest
import yaml

from icmllab.notebook import chapters
from icmllab.notebook.claims import claims_from_notebook
from icmllab.notebook.commands import undeclared_failures

NAMES = chapters.chapter_names()
NOTEBOOKS = chapters.notebook_names()
ROOT = chapters.root()


def test_there_are_chapters():
    assert {"representations/aristotelian", "training/gradpower"} <= set(NAMES)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_shows_what_its_source_says(name):
    assert chapters.stale_reason(name) is None


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_run_is_whole_and_in_order(name):
    nb = chapters.read_notebook(name)
    nbformat.validate(nb)
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert not [o for c in code for o in c.outputs if o.output_type == "error"]


@pytest.mark.parametrize("name", NAMES)
def test_every_stored_failure_is_declared(name):
    payload = claims_from_notebook(chapters.read_notebook(name))
    assert payload["chapter"] == name
    assert payload["claims"]
    assert undeclared_failures(payload) == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_chapter_stays_within_its_budgets(name):
    path = chapters.notebook_path(name)
    assert path.stat().st_size <= 600_000
    record = chapters.read_notebook(name).metadata["icmllab"]
    assert record["peak_mb"] <= 2048


@pytest.mark.parametrize("name", NAMES)
def test_chapter_has_the_anatomy(name):
    text = chapters.source_path(name).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    wanted = ["problem", "explore", "kernel", "claims", "could not reproduce", "exercises"]
    wanted += ["going further", "references"]
    lowered = [h.lower() for h in headings]
    missing = [w for w in wanted if not any(w in h for h in lowered)]
    assert not missing, f"no heading speaks of: {missing}"
    assert text.count("{exercise}") + text.count("{exercise-start}") >= 3
    exercises = re.findall(r"\{exercise(?:-start)?\}.*?\n:label: (\S+)", text)
    solutions = re.findall(r"\{solution(?:-start)?\} (\S+)", text)
    assert sorted(exercises) == sorted(solutions)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_code_cells_are_short_and_local(name):
    for cell in chapters.read_source(name).cells:
        if cell.cell_type != "code":
            continue
        lines = [line for line in cell.source.splitlines() if line.strip()]
        if "hide-input" not in cell.metadata.get("tags", ()):
            assert len(lines) <= 15, cell.source
        assert not re.search(r"^\s*[!%]|https?://|[\"']/\w", cell.source, re.M), cell


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_figure_has_alt_text(name):
    for cell in chapters.read_notebook(name).cells:
        images = [o for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
        if images:
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert len(alt) > 20, cell.source


def test_contents_list_every_chapter_and_part():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    text = (ROOT / "_toc.yml").read_text()
    papers = yaml.safe_load((ROOT / "book/papers.yml").read_text(encoding="utf-8"))
    assert toc["root"] == "book/index"
    for name in NAMES:
        assert f"file: book/{name}\n" in text
    for part in {p["part"] for p in papers}:
        assert f"file: book/{part}/index\n" in text


def test_papers_are_the_76_each_once():
    papers = yaml.safe_load((ROOT / "book/papers.yml").read_text(encoding="utf-8"))
    assert [p["number"] for p in papers] == list(range(1, 77))
    assert len({(p["part"], p["slug"]) for p in papers}) == 76
    assert len({p["part"] for p in papers}) == 12
    assert {tuple(n.split("/")) for n in NAMES} <= {(p["part"], p["slug"]) for p in papers}
    for paper in papers:
        assert 20 <= len(paper["shows"]) <= 160, paper
        assert len(paper["keywords"]) >= 3


def test_text_halves_carry_no_tool_version():
    for name in NOTEBOOKS:
        assert "jupytext_version" not in chapters.source_path(name).read_text(encoding="utf-8")
