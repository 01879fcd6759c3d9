"""Chapters as files: find them, run them in a clean kernel, keep the two halves of a pair in step.

A chapter is ``book/<part>/<slug>.md`` (what people edit) and ``<slug>.ipynb`` (the same inputs
with outputs). Everything here works on these pairs; the command line is ``python -m icmllab``.
"""

import ast
import base64
import difflib
import hashlib
import io
import itertools
import json
import os
import platform
import re
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SCHEMA = 1
"""Version of the run record that a chapter's notebook carries in ``metadata.icmllab``."""

CELL_TIMEOUT = 600
"""Seconds one cell may take at the quick preset before the run is given up."""


class ChapterError(RuntimeError):
    """A chapter that could not be run to its end; the message says which cell and why."""


@cache
def root() -> Path:
    """The repository's root: the folder above the package that holds the book."""
    here = Path(__file__).resolve().parents[2]
    if not (here / "_toc.yml").is_file():
        raise FileNotFoundError(
            f"the book is not beside the package (no _toc.yml in {here.name}/): "
            "install icmllab from a checkout, in editable mode"
        )
    return here


PART_PAGE = "index"
"""Slug of a part's own page, which may be a notebook too."""


def notebook_names() -> list[str]:
    """Every notebook of the book, as ``part/slug``, sorted: the chapters and some part pages."""
    pages = (root() / "book").glob("*/*.md")
    return sorted(f"{p.parent.name}/{p.stem}" for p in pages if is_notebook_source(p))


def chapter_names() -> list[str]:
    """The chapters there are, as ``part/slug``, sorted."""
    return [name for name in notebook_names() if not name.endswith(f"/{PART_PAGE}")]


def is_notebook_source(page: Path) -> bool:
    """Whether ``page`` is the text half of a notebook, not a plain page."""
    with page.open(encoding="utf-8") as lines:
        head = list(itertools.islice(lines, 5))
    return head[:1] == ["---\n"] and "jupytext:\n" in head


def find_chapter(name: str | None) -> str:
    """``name`` if there is such a chapter; else a ValueError that lists near matches."""
    return _find(name, chapter_names())


def find_notebook(name: str | None) -> str:
    """``name`` if there is such a chapter or part page; else a ValueError with near matches."""
    return _find(name, notebook_names())


def _find(name: str | None, names: list[str]) -> str:
    if name in names:
        return name
    slug_matches = [n for n in names if name and n.split("/")[1] == name.strip("/").split("/")[-1]]
    near = slug_matches or difflib.get_close_matches(name or "", names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the chapters are: {', '.join(names)}"
    if not name:
        raise ValueError(f"CHAPTER must name a chapter as part/slug; {hint}")
    raise ValueError(f"CHAPTER={name} is not a chapter; {hint}")


def source_path(name: str) -> Path:
    """The text half of chapter ``name``."""
    return root() / "book" / f"{name}.md"


def notebook_path(name: str) -> Path:
    """The notebook half of chapter ``name``, which may not exist yet."""
    return root() / "book" / f"{name}.ipynb"


def read_source(name: str):
    """Chapter ``name`` as a notebook without outputs, read from its text half."""
    import jupytext

    nb = jupytext.read(source_path(name), fmt="md:myst")
    # the format's version numbers belong to the tool of the day, not to the chapter
    nb.metadata.get("jupytext", {}).pop("text_representation", None)
    for number, cell in enumerate(nb.cells):
        # ids are random by default; the same chapter must give the same file
        cell["id"] = f"cell-{number:03d}"
    return nb


def read_notebook(name: str):
    """Chapter ``name`` with its stored outputs, or None when there is no notebook half."""
    import nbformat

    path = notebook_path(name)
    return nbformat.read(path, as_version=4) if path.is_file() else None


def inputs(nb) -> list[tuple]:
    """What a person wrote in ``nb``: each cell's kind, text, tags and figure options."""
    return [
        (
            cell.cell_type,
            cell.source.strip(),
            tuple(cell.metadata.get("tags", ())),
            json.dumps(cell.metadata.get("mystnb", {}), sort_keys=True),
        )
        for cell in nb.cells
    ]


def sanitiser() -> list[tuple[re.Pattern, str]]:
    """The rules by which stored and fresh outputs are compared, as nbval applies them."""
    import configparser

    rules = configparser.ConfigParser(interpolation=None)
    rules.read(root() / "book" / "nbval_sanitize.cfg", encoding="utf-8")
    return [(re.compile(rules[s]["regex"]), rules[s]["replace"]) for s in rules.sections()]


def visible_outputs(nb) -> list[list]:
    """The outputs of ``nb`` that must agree between runs: text and HTML, sanitised."""
    rules = sanitiser()

    def clean(text: str) -> str:
        for pattern, replacement in rules:
            text = pattern.sub(replacement, text)
        return text

    def visible(output) -> tuple:
        if output.output_type == "stream":
            return ("stream", output.name, clean(output.text))
        if output.output_type == "error":
            return ("error", output.ename, clean(output.evalue))
        data = output.data
        texts = {k: clean(v) for k, v in data.items() if k.startswith("text/")}
        # the size of a figure in text/plain and the figure's bytes differ between machines
        if any(k.startswith("image/") for k in data):
            texts = {"image": "present"}
        return (output.output_type, json.dumps(texts, sort_keys=True))

    return [[visible(o) for o in cell.get("outputs", ())] for cell in nb.cells]


def code_hash(path: Path) -> str:
    """A hash of a Python file's code that comments, docstrings and layout leave unchanged."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            node.body = body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def hardware() -> str:
    """What machine this is, in a few words: processor, cores, GPU if torch sees one."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        model = found.group(1).strip() if found else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()}"


@dataclass(frozen=True)
class Run:
    """One execution of a chapter: the notebook with outputs, and what it cost."""

    notebook: object
    seconds: float
    peak_mb: float
    claims: dict | None = field(repr=False)


# Runs as the last cell: how much memory the kernel took, and which of the package's own files
# it used. It is taken out again before the notebook is kept.
_PROBE = """
import json as _j, resource as _r, sys as _s
_peak = _r.getrusage(_r.RUSAGE_SELF).ru_maxrss / (1024 if _s.platform != "darwin" else 1024**2)
_files = sorted(
    m.__file__ for n, m in list(_s.modules.items())
    if n.startswith("icmllab.") and not n.startswith("icmllab.notebook")
    and getattr(m, "__file__", None)
)
_gpu = _s.modules["torch"].cuda.get_device_name() if (
    "torch" in _s.modules and _s.modules["torch"].cuda.is_available()) else None
print(_j.dumps({"peak_mb": _peak, "files": _files, "gpu": _gpu}))
"""


def execute(
    name: str,
    *,
    preset: str = "quick",
    seed: int = 0,
    threads: int | None = None,
    timeout: int | None = CELL_TIMEOUT,
) -> Run:
    """Run chapter ``name`` top to bottom in a clean kernel; nothing on disk is changed.

    Args:
        name: the chapter, as ``part/slug``.
        preset: ``quick`` or ``full``; reaches the chapter as ``ICMLLAB_PRESET``.
        seed: base seed, as ``ICMLLAB_SEED``.
        threads: ``OMP_NUM_THREADS`` of the kernel; None leaves it as it is.
        timeout: seconds a cell may take; None waits for ever.

    Returns:
        The run, its notebook carrying a record in ``metadata.icmllab``.

    Raises:
        ChapterError: a cell raised or ran too long.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    from icmllab.notebook.claims import claims_from_notebook

    nb = read_source(name)
    nb.cells.append(nbformat.v4.new_code_cell(_PROBE, id="probe"))
    env = {
        **os.environ,
        "ICMLLAB_STATIC": "1",
        "ICMLLAB_PRESET": preset,
        "ICMLLAB_SEED": str(seed),
        "PYTHONHASHSEED": "0",
    }
    if threads is not None:
        env |= {v: str(threads) for v in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    client = NotebookClient(
        nb,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(source_path(name).parent)}},
    )
    begin = time.perf_counter()
    try:
        client.execute(env=env)
    except CellExecutionError as error:
        raise ChapterError(
            f"{name}: a cell raised {error.ename}: {error.evalue}\n{error}"
        ) from None
    except CellTimeoutError as error:
        raise ChapterError(f"{name}: a cell ran longer than {timeout} s\n{error}") from None
    except DeadKernelError:
        raise ChapterError(f"{name}: the kernel died (out of memory?)") from None
    seconds = time.perf_counter() - begin

    probe = json.loads(nb.cells.pop().outputs[0].text)
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller_png(output.data["image/png"])
    files = {Path(f).resolve() for f in probe["files"]}
    sources = sorted(f.relative_to(_package_folder()).as_posix() for f in files)
    nb.metadata["icmllab"] = {
        "schema": SCHEMA,
        "chapter": name,
        "preset": preset,
        "seed": seed,
        "code": _code_digest(sources),
        "sources": sources,
        "seconds": round(seconds, 1),
        "peak_mb": round(probe["peak_mb"]),
        "hardware": hardware() + (f", {probe['gpu']}" if probe["gpu"] else ""),
        "python": platform.python_version(),
    }
    nb.metadata.pop("language_info", None)
    nb.metadata.pop("widgets", None)
    return Run(nb, seconds, probe["peak_mb"], claims_from_notebook(nb))


def smaller_png(encoded: str) -> str:
    """A base64 PNG with a palette of 256 colours, where that is smaller; plots lose nothing."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    buffer = io.BytesIO()
    picture.quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    small = base64.b64encode(buffer.getvalue()).decode()
    return small if len(small) < len(encoded) else encoded


def _package_folder() -> Path:
    """The folder above the package's code (the checkout, for an editable install)."""
    return Path(__file__).resolve().parents[2]


def _code_digest(sources: list[str]) -> str:
    """One hash for the code of several files, given relative to the package's folder."""
    hashes = (code_hash(_package_folder() / s) for s in sources)
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def same(old, new) -> bool:
    """Whether two notebooks agree in inputs, package code, verdicts and every text they show."""
    record = [nb.metadata.get("icmllab", {}) for nb in (old, new)]
    return (
        inputs(old) == inputs(new)
        and visible_outputs(old) == visible_outputs(new)
        and record[0].get("code") == record[1].get("code")
        and record[0].get("schema") == record[1].get("schema")
    )


def store(name: str, nb) -> bool:
    """Make ``nb`` the chapter's notebook half, unless the stored one says the same already.

    Returns:
        Whether the file was written. It is replaced in one step: a reader or an interrupt
        meets the old file or the new one, never a part.
    """
    old = read_notebook(name)
    if old is not None and same(old, nb):
        return False
    write_notebook(notebook_path(name), nb)
    return True


def write_notebook(path: Path, nb) -> None:
    """Write ``nb`` to ``path`` in one step."""
    import nbformat

    from icmllab.notebook.sweep import write_text

    write_text(path, nbformat.writes(nb) + "\n")


def stale_reason(name: str) -> str | None:
    """Why the notebook half does not show what the text half says, or None when it does."""
    nb = read_notebook(name)
    if nb is None:
        return "there is no .ipynb"
    if inputs(nb) != inputs(read_source(name)):
        return "the .md and the .ipynb differ in their inputs"
    record = nb.metadata.get("icmllab")
    if not record or record.get("schema") != SCHEMA:
        return "the .ipynb carries no record of its run"
    if record["preset"] != "quick" or record["seed"] != 0:
        return "the .ipynb was not run at the quick preset with seed 0"
    missing = [s for s in record["sources"] if not (_package_folder() / s).is_file()]
    if missing:
        return f"code that the chapter ran is gone: {', '.join(missing)}"
    if _code_digest(record["sources"]) != record["code"]:
        return "the package code that the chapter runs has changed"
    return None
