"""Claims: what a chapter asserts, the criterion it must meet, and the verdict.

The text form of a table holds no measured number, so that it is the same on every machine on
which the verdicts are the same. The numbers stand in the HTML, in a class that the notebook
tests blank, and in the output's metadata, from which the book's scorecard is made.
"""

import html
import linecache
import math
import re
import sys
import textwrap
from dataclasses import asdict, dataclass, fields
from typing import Literal

from icmllab.notebook.presets import preset_name, seed
from icmllab.notebook.style import unboxed

SCHEMA = 1
"""Version of the payload in ``output.metadata["icmllab"]``."""

Verdict = Literal["holds", "fails", "reported"]

WORDS: dict[str, tuple[str, str]] = {
    "holds": ("✓", "holds"),
    "fails": ("✗", "does not hold"),
    "reported": ("○", "reported"),
}


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        # a cell that ends with a check shows this: no measured number, the same everywhere
        criterion = f" ({self.criterion})" if self.criterion else ""
        return f"{self.words}: {self.text}{criterion}"

    @property
    def words(self) -> str:
        """The verdict as symbol and words."""
        symbol, word = WORDS[self.verdict]
        if self.expected_to_fail and self.verdict == "fails":
            return f"{symbol} {word}, as expected"
        if self.expected_to_fail:
            return f"{symbol} {word}, though expected to fail"
        return f"{symbol} {word}"

    @property
    def notes(self) -> list[str]:
        """What the table adds below the claim."""
        expected = self.expected_to_fail and f"Expected to fail: {self.expected_to_fail}"
        return [note for note in (self.why, expected) if note]


class Claims:
    """The claims of one chapter, in the order in which they were first checked.

    Args:
        chapter: the chapter's name, ``part/slug``.

    Raises:
        ValueError: the name does not have that form.

    Make one in a chapter's first code cell, call :meth:`check` and :meth:`report` where the
    numbers arise, and end the chapter with the object itself: it shows as a table.

    In a live notebook, a cell that runs again replaces the claims of its earlier run, in their
    old places; running the cell with ``Claims(...)`` starts the table afresh. The same text from
    two places, or twice in one run of a cell, is an error.
    """

    def __init__(self, chapter: str):
        if not isinstance(chapter, str) or not re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", chapter):
            raise ValueError(f"chapter must be 'part/slug' in lower case: got {chapter!r}")
        self.chapter = chapter
        self._entries: dict[str, tuple[Claim, Place]] = {}
        self._latest: dict[str, str] = {}  # cell -> its latest run that made a claim

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self):
        for claim, place in self._entries.values():
            # what a cell asserted in an earlier run only no longer stands
            if self._latest[place.cell] == place.run:
                yield claim

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
            truth = _truth(limit) and not (value is not None and math.isnan(value))
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
            paper=_phrase("paper", paper),
            why=None,
            expected_to_fail=None
            if expected_to_fail is None
            else _phrase("expected_to_fail", expected_to_fail, needed=True),
        )
        return self._add(claim, calling_cell(sys._getframe(1)))

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
        value = measured if isinstance(measured, str) else _plain(_number("measured", measured))
        claim = Claim(
            text=_sentence(text),
            criterion="",
            verdict="reported",
            measured=value,
            bounds=None,
            paper=_phrase("paper", paper),
            why=_phrase("why", why, needed=True),
            expected_to_fail=None,
        )
        return self._add(claim, calling_cell(sys._getframe(1)))

    def _add(self, claim: Claim, place: "Place") -> Claim:
        known = self._entries.get(claim.text)
        if known is not None:
            before = known[1]
            rerun = place.cell == before.cell and place.run != before.run
            outdated = self._latest[before.cell] != before.run
            if not rerun and not outdated:
                raise ValueError(
                    f"text is used twice in {self.chapter}: {claim.text!r}. Each claim needs its "
                    "own sentence. After editing or moving cells, run the cell with Claims(...) "
                    "and the ones below it again: that starts the table afresh"
                )
        self._entries[claim.text] = (claim, place)
        self._latest[place.cell] = place.run
        return claim

    def payload(self) -> dict:
        """The table as plain data, with its schema's version; it can be written as JSON."""
        return {
            "schema": SCHEMA,
            "chapter": self.chapter,
            "seed": seed(),
            "preset": preset_name(),
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


# Widest a column gets before its text wraps; fixed, so that the text is the same everywhere.
_WIDTHS = {"verdict": 16, "claim": 46, "criterion": 18, "measured": 12, "the paper reports": 30}


def format_claims(payload: dict, *, measured: bool = True) -> str:
    """A claims payload as a text table for terminals.

    Args:
        payload: as :func:`claims_from_notebook` gives it.
        measured: whether to show the numbers of the run.
    """
    known = {f.name for f in fields(Claim)}
    blank = dict.fromkeys(known)
    claims = [Claim(**{**blank, **{k: c[k] for k in c if k in known}}) for c in payload["claims"]]
    head = [name for name in _WIDTHS if measured or name != "measured"]
    rows = []
    for c in claims:
        cells = {
            "verdict": c.words,
            "claim": " ".join([c.text, *(f"({note})" for note in c.notes)]),
            "criterion": c.criterion or "–",
            "measured": _show(c.measured),
            "the paper reports": c.paper or "–",
        }
        rows.append([textwrap.wrap(cells[name], _WIDTHS[name]) for name in head])
    table = [[[name] for name in head], *rows]
    widths = [max(len(line) for row in table for line in row[i]) for i in range(len(head))]
    lines = []
    for row in [table[0], [["─" * w] for w in widths], *rows]:
        for i in range(max(map(len, row))):
            parts = [cell[i] if i < len(cell) else "" for cell in row]
            line = "  ".join(p.ljust(w) for p, w in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
    return "\n".join([f"{payload['chapter']}: {_count(claims)}", *lines])


def _count(claims: list[Claim]) -> str:
    """How many claims have each verdict, in words."""
    number = {v: sum(c.verdict == v for c in claims) for v in WORDS}
    return ", ".join(f"{number[v]} {symbol} {word}" for v, (symbol, word) in WORDS.items())


def _sentence(text: str) -> str:
    return _phrase("text", text, needed=True)


def _phrase(name: str, text: str, *, needed: bool = False) -> str:
    """A text on one line."""
    if not isinstance(text, str) or (needed and not text.strip()):
        raise ValueError(f"{name} must be a text: got {text!r}")
    return " ".join(text.split())


def _scalar(name: str, value: object) -> object:
    """The plain value of a 0-d array or tensor, and any other value as it is."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return value
    if tuple(shape) != ():
        raise ValueError(f"{name} must be one value: got an array of shape {tuple(shape)}")
    return value.item()


def _number(name: str, value: object) -> float:
    value = _scalar(name, value)
    if isinstance(value, str | bytes):
        raise ValueError(f"{name} must be a number: got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number: got {type(value).__name__}") from None


def _truth(value: object) -> bool:
    value = _scalar("holds", value)
    if not isinstance(value, bool):
        raise ValueError(f"holds must be True or False: got {value!r}")
    return value


def _pair(name: str, value: object) -> tuple[float, float]:
    try:
        first, second = value
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a pair of numbers: got {value!r}") from None
    return _limit(name, first), _limit(name, second)


def _criterion(kind: str, limit) -> tuple[tuple[float | None, float | None], str]:
    """The interval of values that hold, and the criterion in words."""
    if kind == "between":
        low, high = _pair(kind, limit)
        if low > high:
            raise ValueError(f"between must be (low, high) with low <= high: got {limit!r}")
        return (low, high), f"in [{_digits(low)}, {_digits(high)}]"
    if kind == "close_to":
        target, tolerance = _pair(kind, limit)
        if tolerance < 0:
            raise ValueError(f"close_to must be (target, tolerance >= 0): got {limit!r}")
        bounds = (target - tolerance, target + tolerance)
        return bounds, f"= {_digits(target)} ± {_digits(tolerance)}"
    edge = _limit(kind, limit)
    if kind == "above":
        return (edge, None), f"> {_digits(edge)}"
    return (None, edge), f"< {_digits(edge)}"


def _limit(name: str, value: object) -> float:
    """A finite number: nothing can be said to lie beyond infinity or beyond NaN."""
    number = _number(name, value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite: got {value!r}")
    return number


def _digits(value: float) -> str:
    """A criterion's number: short, and the same for 0.3 and for 0.1 + 0.2."""
    return f"{value:.10g}"


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
class Place:
    """Which cell made a claim, and in which of its runs."""

    cell: str
    run: str


def calling_cell(frame) -> Place:
    """The notebook cell that runs now; outside IPython, the calling line, which runs once.

    JupyterLab sends a cell's id, so that an edited cell is still the same one. Other front ends
    do not: there a cell is known by its text, which IPython keeps under the name of a file.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return Place(f"{frame.f_code.co_filename}:{frame.f_lineno}", "once")
    kernel = getattr(shell, "kernel", None)
    message = (kernel.get_parent("shell") if kernel is not None else None) or {}
    run = message.get("header", {}).get("msg_id") or str(shell.execution_count)
    cell = message.get("metadata", {}).get("cellId")
    if cell is None:
        # the outermost frame in the user's namespace is the cell, whatever helper it called
        while frame is not None:
            if frame.f_globals is shell.user_ns and frame.f_code.co_name == "<module>":
                name = frame.f_code.co_filename
                cell = "".join(linecache.getlines(name)) or name
            frame = frame.f_back
    return Place(str(cell), run)


_STYLE = (
    f"<style>{unboxed('icmllab-claims')}"
    + """
.icmllab-claims{border-collapse:collapse;font-size:.9em;margin:.5em 0!important;
--bg:#fff;--fg:#1f2328;--ok:#0b6623;--no:#a11212;--so:#555;--rule:#8a8a8a66}
.icmllab-claims,.icmllab-claims tr,.icmllab-claims th,.icmllab-claims td,.icmllab-claims caption{
background:var(--bg)!important;color:var(--fg)!important}
.icmllab-claims caption{caption-side:top;text-align:left;font-weight:600;padding:.35em .6em}
.icmllab-claims th,.icmllab-claims td{text-align:left!important;vertical-align:top!important;
padding:.35em .6em;border:0;border-bottom:1px solid var(--rule)!important;
white-space:normal!important;max-width:26em}
.icmllab-claims td.v{font-weight:600}.icmllab-claims tbody th{font-weight:400}
.icmllab-claims td.holds{color:var(--ok)!important}
.icmllab-claims td.fails{color:var(--no)!important}
.icmllab-claims td.reported{color:var(--so)!important}
@media (prefers-color-scheme:dark){html:not([data-theme]) body:not([data-jp-theme-light])
.icmllab-claims{--bg:#16181c;--fg:#e6e6e6;--ok:#7ddc97;--no:#ff9a9a;--so:#c0c0c0}}
html[data-theme=dark] .icmllab-claims,body[data-jp-theme-light=false] .icmllab-claims{
--bg:#16181c;--fg:#e6e6e6;--ok:#7ddc97;--no:#ff9a9a;--so:#c0c0c0}
</style>"""
)


def _html(claims: Claims) -> str:
    """The table as HTML: symbol and words carry the verdict, colour only repeats it."""
    rows = []
    for c in claims:
        notes = "".join(f"<br><small>{html.escape(note)}</small>" for note in c.notes)
        measured = f'<span class="icmllab-measured">{html.escape(_show(c.measured))}</span>'
        cells = [html.escape(c.criterion) or "–", measured, html.escape(c.paper) or "–"]
        rows.append(
            f'<tr><td class="v {c.verdict}">{html.escape(c.words)}</td>'
            f'<th scope="row">{html.escape(c.text)}{notes}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    head = ["Verdict", "Claim", "Criterion", "Measured here", "The paper reports"]
    return (
        f'{_STYLE}<table class="icmllab-claims"><caption>Claims of {claims.chapter}: '
        f"{_count(list(claims))}</caption><thead><tr>"
        + "".join(f'<th scope="col">{h}</th>' for h in head)
        + "</tr></thead><tbody>"
        + "".join(rows)
        + "</tbody></table>"
    )
