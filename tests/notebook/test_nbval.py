"""The book's comparison of notebooks, on real ones: what may differ passes, the rest fails."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITISER = ROOT / "book" / "nbval_sanitize.cfg"

SETUP = """
from icmllab import Claims, explore, preset, progress, seed, show_source, sweep, use_style
from ipywidgets import IntSlider
import matplotlib.pyplot as plt
use_style()
claims = Claims("part/slug")
def draw(k, size=3):
    figure, axes = plt.subplots(figsize=(3, 2))
    axes.plot(range(k), label=str(size))
    return figure
for x in progress(range(3), "steps"):
    pass
table = sweep(lambda x: x * x, over={"x": range(3)})
claims.check("Squares grow", measured=table["value"].max() + 0.125, above=2, paper="4 (Fig. 2)")
claims.check("Three is large", measured=3.5, above=10, paper="3", expected_to_fail="it is small")
claims.report("Seen", measured=seed(), why="needs 2 B parameters", paper="0.95")
plt.plot([1, 2])
plt.show()
preset(quick=dict(n=3), full=dict(n=9))"""
TABLE = "claims"
FRAMES = "explore(draw, k=IntSlider(value=2, min=1, max=4), size=IntSlider(value=5))"
CHECK = "import time; claims.check('Time passes', measured=time.time(), above=0)"
SOURCE = "show_source(Claims.report)"


def substitute(pattern: str, replacement: str, kinds=("text/html",)):
    """A change of a cell's stored outputs, which must find its place in each kind."""

    def change(cell) -> None:
        for kind in kinds:
            data = cell.outputs[0].data
            data[kind], count = re.subn(pattern, replacement, data[kind], flags=re.DOTALL)
            assert count, (kind, pattern)

    change.__name__ = f"{pattern} -> {replacement}"
    return change


def other_metadata(cell) -> None:
    for claim in cell.outputs[0].metadata["icmllab"]["claims"]:
        claim["measured"] = 7.0


BOTH = ("text/plain", "text/html")

# The cell, what another machine's stored file might say instead, whether it is the same chapter.
CASES = [
    (SETUP, None, True),
    (TABLE, None, True),
    (TABLE, substitute(r'(<span class="icmllab-measured">)[^<]*', r"\g<1>0.9&lt;\n1"), True),
    (TABLE, other_metadata, True),
    (TABLE, substitute("✓ holds", "✗ does not hold", BOTH), False),
    (TABLE, substitute(">✓ holds<", ">✗ does not hold<"), False),
    (TABLE, substitute("✗ does not hold,", "✓ holds,     ", ("text/plain",)), False),
    (TABLE, substitute("&gt; 2<", "&gt; 1<"), False),
    (TABLE, substitute(r"4 \(Fig\. 2\)", "5 (Fig. 2)"), False),
    (TABLE, substitute("it is small", "it is large"), False),
    (FRAMES, None, True),
    (
        FRAMES,
        substitute('"data:image/(png|webp);base64,[^"]*"', '"data:image/png;base64,A="'),
        True,
    ),
    (FRAMES, substitute('max="3" step="1" value="1"', 'max="9" step="1" value="4"'), True),
    (FRAMES, substitute("4 frames, drawn", "10 frames, less sharply drawn"), True),
    (FRAMES, substitute("stand at size = 5", "stand at size = 6"), False),
    (FRAMES, substitute('id="icmllab-draw', 'id="icmllab-other'), False),
    (CHECK, None, True),  # its value is shown, without the number
    (SOURCE, None, True),
    (SOURCE, substitute(">def<", ">class<"), False),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> nbformat.NotebookNode:
    """A chapter that uses every tool, run once."""
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(source.strip()) for source, _, _ in CASES]
    nb = nbformat.v4.new_notebook(cells=cells)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nb.metadata["kernelspec"] = kernel
    before = os.environ.get("ICMLLAB_STATIC")
    os.environ["ICMLLAB_STATIC"] = "1"
    try:
        NotebookClient(nb, timeout=120, kernel_name="python3").execute()
    finally:
        if before is None:
            del os.environ["ICMLLAB_STATIC"]
        else:
            os.environ["ICMLLAB_STATIC"] = before
    return nb


def test_the_stored_notebook_holds_nothing_volatile_outside_the_markers(stored):
    kinds = [[o.output_type for o in cell.outputs] for cell in stored.cells]
    assert kinds[0] == ["display_data", "execute_result"]  # the figure and the preset: no bar
    assert all(k in (["display_data"], ["execute_result"]) for k in kinds[1:])
    for cell in stored.cells:
        for output in cell.outputs:
            assert not any("widget" in kind for kind in output.data)
            assert "0x" not in output.data["text/plain"]
            assert str(ROOT) not in str(output.data)
    claims = stored.cells[1].outputs[0].metadata["icmllab"]["claims"]
    assert [c["measured"] for c in claims] == [4.125, 3.5, 0.0]


def test_nbval_passes_what_may_differ_and_fails_the_rest(stored, tmp_path):
    nb = copy.deepcopy(stored)
    for cell, (_, change, _) in zip(nb.cells, CASES, strict=True):
        if change is not None:
            change(cell)
    path = tmp_path / "chapter.ipynb"
    nbformat.write(nb, path)
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "-p", "no:cacheprovider"]
    command += ["--nbval-sanitize-with", str(SANITISER), "--rootdir", str(tmp_path), str(path)]
    env = {**os.environ, "ICMLLAB_STATIC": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    failed = {int(i) for i in re.findall(r"^FAILED \S+::Cell (\d+)", done.stdout, re.MULTILINE)}
    wanted = {i for i, (_, _, same) in enumerate(CASES) if not same}
    names = {i: getattr(CASES[i][1], "__name__", "as stored") for i in failed ^ wanted}
    assert not names, done.stdout[-3000:]
    assert f"{len(wanted)} failed, {len(CASES) - len(wanted)} passed" in done.stdout
