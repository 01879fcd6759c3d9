"""Claims: what a chapter asserts, the criterion it must meet, and the verdict.

The text form of a table holds no measured number, so that it is the same on every machine on
which the verdicts are the same. The numbers stand in the HTML, in a class that the notebook
tests blank, and in the output's metadata, from which the book's scorecard is made.
"""

import html
import math
import os
import re
import sys
from dataclasses import asdict, dataclass
from typing import Literal

SCHEMA = 1
"""Version of the payload in ``output.metadata["icmllab"]``."""

Verdict = Literal["holds", "fails", "reported"]

WORDS: dict[str, tuple[str, str]] = {
    "holds": ("✓", "holds"),
    "fails": ("✗", "does not hold"),
    "reported": ("○", "reported"),
}


@dataclass(frozen=True)
class Claim:
    """One line of a chapter's table.

    Attributes:
        text: the claim, a sentence.
        criterion: the condition in words and numbers; empty for a reported value.
        verdict: ``holds``, ``fails`` or ``reported``.
        measured: the value seen in this run; None where the criterion is a bare truth value.
        bounds: (low, high) of the values that hold, None on an open side; None without a range.
        paper: what the paper reports at its scale.
        why: for a reported value, why it carries no criterion.
        expected_to_fail: the declared reason for a ✗; None for a claim that is meant to hold.
    """

    text: str
    criterion: str
    verdict: Verdict
    measured: float | str | None
    bounds: tuple[float | None, float | None] | None
    paper: str
    why: str | None
    expected_to_fail: str | None

    @property
    def words(self) -> str:
        """The verdict as symbol and words."""
        symbol, word = WORDS[self.verdict]
        if self.expected_to_fail and self.verdict == "fails":
            return f"{symbol} {word} (declared: {self.expected_to_fail})"
        if self.expected_to_fail:
            return f"{symbol} {word}, though declared to fail"
        return f"{symbol} {word}"


class Claims:
    """The claims of one chapter, in the order in which they were checked.

    Args:
        chapter: the chapter's name, ``part/slug``.

    Raises:
        ValueError: the name does not have that form.

    Make one in a chapter's first code cell, call :meth:`check` and :meth:`report` where the
    numbers arise, and end the chapter with the object itself: it shows as a table. Running a
    cell again replaces that cell's claims; the same text from two places is an error.
    """

    def __init__(self, chapter: str):
        if not isinstance(chapter, str) or not re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", chapter):
            raise ValueError(f"chapter must be 'part/slug' in lower case: got {chapter!r}")
        self.chapter = chapter
        self._entries: dict[str, Claim] = {}
        self._places: dict[str, _Place] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self):
        return iter(self._entries.values())

    def check(
        self,
        text: str,
        *,
        measured: float | None = None,
        above: float | None = None,
        below: float | None = None,
        between: tuple[float, float] | None = None,
        close_to: tuple[float, float] | None = None,
        holds: bool | None = None,
        paper: str = "",
        expected_to_fail: str | None = None,
    ) -> Claim:
        """Hold a measured value against exactly one criterion.

        Args:
            text: the claim; unique in its chapter.
            measured: the value, a real number (0-d arrays and tensors count). Not needed with
                ``holds``. NaN never holds.
            above: the value must be larger than this.
            below: the value must be smaller than this.
            between: (low, high); the value must lie in the closed interval.
            close_to: (target, tolerance); abs(value - target) must be at most the tolerance.
            holds: the truth of the claim itself, for what is no single number.
            paper: what the paper reports.
            expected_to_fail: declare a ✗, with the reason.

        Returns:
            The claim with its verdict.

        Raises:
            ValueError: no or several criteria, a bad number, or a text used elsewhere.
        """
        given = {
            name: value
            for name, value in {
                "above": above,
                "below": below,
                "between": between,
                "close_to": close_to,
                "holds": holds,
            }.items()
            if value is not None
        }
        if len(given) != 1:
            names = ", ".join(given) or "none"
            raise ValueError(
                f"exactly one of above, below, between, close_to, holds is needed: got {names}"
            )
        ((kind, limit),) = given.items()
        if kind == "holds":
            value = None if measured is None else _number("measured", measured)
            truth = _truth(limit)
            bounds, criterion = None, "is true"
        else:
            if measured is None:
                raise ValueError(f"measured is needed with {kind}")
            value = _number("measured", measured)
            bounds, criterion = _criterion(kind, limit)
            truth = _within(kind, value, bounds)
        claim = Claim(
            text=_sentence(text),
            criterion=criterion,
            verdict="holds" if truth else "fails",
            measured=_plain(value),
            bounds=bounds,
            paper=paper,
            why=None,
            expected_to_fail=expected_to_fail,
        )
        return self._add(claim)

    def report(self, text: str, *, measured: object, why: str, paper: str = "") -> Claim:
        """Show a value without a criterion, and say why there is none.

        Args:
            text: what is reported; unique in its chapter.
            measured: a number or a short text.
            why: the reason, e.g. ``"not seen at this scale: the paper trains 2 B parameters"``.
            paper: what the paper reports.

        Raises:
            ValueError: ``why`` is empty, or the text is used elsewhere.
        """
        if not why:
            raise ValueError("why must say why the value carries no criterion: got an empty text")
        value = measured if isinstance(measured, str) else _plain(_number("measured", measured))
        claim = Claim(_sentence(text), "", "reported", value, None, paper, why, None)
        return self._add(claim)

    def _add(self, claim: Claim) -> Claim:
        place = _place(sys._getframe(2))
        text = claim.text
        if text in self._entries and not place.may_replace(self._places[text]):
            raise ValueError(
                f"text is used twice in {self.chapter}: {text!r}. Each claim needs its own "
                "sentence; to start afresh, run the cell that makes Claims(...) again"
            )
        self._entries[text] = claim
        self._places[text] = place
        return claim

    def payload(self) -> dict:
        """The table as plain data, with its schema's version; it can be written as JSON."""
        return {
            "schema": SCHEMA,
            "chapter": self.chapter,
            "seed": int(os.environ.get("ICMLLAB_SEED", "0")),
            "preset": os.environ.get("ICMLLAB_PRESET", "quick"),
            "claims": [
                {**asdict(c), "bounds": None if c.bounds is None else list(c.bounds)} for c in self
            ],
        }

    def table(self, *, measured: bool = False) -> str:
        """The table as text; with ``measured`` it holds the numbers of this run."""
        return format_claims(self.payload(), measured=measured)

    def __repr__(self) -> str:
        return self.table()

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"text/plain": self.table(), "text/html": _html(self)}
        return bundle, {"icmllab": self.payload()}


def claims_from_notebook(nb) -> dict | None:
    """The claims payload stored in a notebook's outputs, or None if there is none.

    Raises:
        ValueError: the payload has a schema that this version does not read.
    """
    found = None
    for cell in nb["cells"]:
        for output in cell.get("outputs", ()):
            payload = output.get("metadata", {}).get("icmllab")
            if payload is not None and "claims" in payload:
                found = payload
    if found is not None and found.get("schema") != SCHEMA:
        raise ValueError(f"claims schema {found.get('schema')} is not {SCHEMA}: run the chapter")
    return found


def format_claims(payload: dict, *, measured: bool = True) -> str:
    """A claims payload as a text table for terminals."""
    claims = [Claim(**c) for c in payload["claims"]]
    rows = []
    for c in claims:
        row = [WORDS[c.verdict][0], c.text, c.criterion or "–"]
        if measured:
            row.append(_show(c.measured))
        rows.append([*row, c.paper or "–"])
    head = ["", "claim", "criterion", *(["measured"] if measured else []), "the paper reports"]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head) - 1)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in [head, *rows]
    ]
    notes = [
        f"{WORDS[c.verdict][0]} {c.text}: {note}"
        for c in claims
        for note in (c.why, c.words.partition(" ")[2] if c.expected_to_fail else None)
        if note
    ]
    count = {v: sum(c.verdict == v for c in claims) for v in WORDS}
    total = ", ".join(f"{count[v]} {s} {w}" for v, (s, w) in WORDS.items())
    return "\n".join([f"{payload['chapter']}: {total}", *(x.rstrip() for x in lines), *notes])


def _sentence(text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must be a sentence: got {text!r}")
    return text.strip()


def _number(name: str, value: object) -> float:
    shape = getattr(value, "shape", ())
    if tuple(shape) != ():
        raise ValueError(f"{name} must be one number: got an array of shape {tuple(shape)}")
    if isinstance(value, str | bytes) or value is None:
        raise ValueError(f"{name} must be a number: got {value!r}")
    try:
        return float(value)
    except TypeError:
        raise ValueError(f"{name} must be a number: got {type(value).__name__}") from None


def _truth(value: object) -> bool:
    if tuple(getattr(value, "shape", ())) != ():
        raise ValueError("holds must be one truth value: got an array; use all() or any()")
    if isinstance(value, float | int) and not isinstance(value, bool):
        raise ValueError(f"holds must be a truth value: got the number {value!r}")
    return bool(value)


def _pair(name: str, value: object) -> tuple[float, float]:
    try:
        first, second = value
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a pair of numbers: got {value!r}") from None
    return _number(name, first), _number(name, second)


def _criterion(kind: str, limit) -> tuple[tuple[float | None, float | None], str]:
    """The interval of values that hold, and the criterion in words."""
    if kind in ("between", "close_to"):
        first, second = _pair(kind, limit)
        if math.isnan(first) or math.isnan(second):
            raise ValueError(f"{kind} must not hold NaN: got {limit!r}")
        if kind == "between":
            if first > second:
                raise ValueError(f"between must be (low, high) with low <= high: got {limit!r}")
            return (first, second), f"in [{first:g}, {second:g}]"
        if second < 0:
            raise ValueError(f"close_to must be (target, tolerance >= 0): got {limit!r}")
        return (first - second, first + second), f"= {first:g} ± {second:g}"
    edge = _number(kind, limit)
    if math.isnan(edge):
        raise ValueError(f"{kind} must not be NaN")
    return ((edge, None), f"> {edge:g}") if kind == "above" else ((None, edge), f"< {edge:g}")


def _within(kind: str, value: float, bounds: tuple[float | None, float | None]) -> bool:
    low, high = bounds
    if kind == "above":
        return value > low
    if kind == "below":
        return value < high
    return low <= value <= high


def _plain(value: float | None) -> float | str | None:
    """A number that JSON can hold: NaN and the infinities become words."""
    return value if value is None or math.isfinite(value) else str(value)


def _show(value: float | str | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:.4g}"


@dataclass(frozen=True)
class _Place:
    """Which cell made a claim, and in which of its executions."""

    cell: str
    execution: int | None

    def may_replace(self, other: "_Place") -> bool:
        """Whether a claim from here takes the place of one from ``other``: the cell ran again."""
        return (
            self.execution is not None
            and self.cell == other.cell
            and self.execution != other.execution
        )


def _place(frame) -> _Place:
    """The notebook cell that runs now; in a plain script, the line.

    A front end that sends cell ids lets a cell be edited and run again; without ids a cell is
    known by its file name, which IPython derives from the cell's text.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return _Place(f"{frame.f_code.co_filename}:{frame.f_lineno}", None)
    kernel = getattr(shell, "kernel", None)
    header = kernel.get_parent("shell") if kernel is not None else {}
    cell = (header.get("metadata") or {}).get("cellId") or frame.f_code.co_filename
    return _Place(cell, shell.execution_count)


_STYLE = """<style>
.icmllab-claims{border-collapse:collapse;font-size:.9em;margin:.5em 0;
--ok:#0b6623;--no:#a11212;--so:#5a5a5a;--rule:#8888}
.icmllab-claims caption{text-align:left;font-weight:600;padding:.3em 0}
.icmllab-claims th,.icmllab-claims td{text-align:left!important;vertical-align:top;
padding:.35em .6em;border-bottom:1px solid var(--rule);white-space:normal}
.icmllab-claims .holds{color:var(--ok);font-weight:600}
.icmllab-claims .fails{color:var(--no);font-weight:600}
.icmllab-claims .reported{color:var(--so);font-weight:600}
@media (prefers-color-scheme:dark){html:not([data-theme]) body:not([data-jp-theme-light])
.icmllab-claims{--ok:#7ddc97;--no:#ff9a9a;--so:#c8c8c8}}
html[data-theme=dark] .icmllab-claims,body[data-jp-theme-light=false] .icmllab-claims{
--ok:#7ddc97;--no:#ff9a9a;--so:#c8c8c8}
</style>"""


def _html(claims: Claims) -> str:
    """The table as HTML: symbol and word carry the verdict, colour only repeats it."""
    rows = []
    for c in claims:
        note = f"<br><small>{html.escape(c.why)}</small>" if c.why else ""
        measured = f'<span class="icmllab-measured">{html.escape(_show(c.measured))}</span>'
        cells = [html.escape(c.criterion) or "–", measured, html.escape(c.paper) or "–"]
        rows.append(
            f'<tr><td class="{c.verdict}">{html.escape(c.words)}</td>'
            f'<th scope="row" style="font-weight:normal">{html.escape(c.text)}{note}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    head = ["Verdict", "Claim", "Criterion", "Measured here", "The paper reports"]
    return (
        f'{_STYLE}<table class="icmllab-claims"><caption>Claims of {claims.chapter}</caption>'
        + "<thead><tr>"
        + "".join(f'<th scope="col">{h}</th>' for h in head)
        + "</tr></thead><tbody>"
        + "".join(rows)
        + "</tbody></table>"
    )
