"""Claims: criteria, verdicts, what may differ between machines, and re-run cells."""

import json
import math
import re

import nbformat
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from icmllab import Claims
from icmllab.notebook.claims import claims_from_notebook, format_claims

NAN, INF = math.nan, math.inf


@pytest.fixture
def claims():
    return Claims("part/slug")


@pytest.mark.parametrize(
    ("criterion", "measured", "verdict"),
    [
        ({"above": 0.5}, 0.6, "holds"),
        ({"above": 0.5}, 0.5, "fails"),
        ({"above": 0.5}, INF, "holds"),
        ({"above": 0.5}, NAN, "fails"),
        ({"below": 0.5}, 0.4, "holds"),
        ({"below": 0.5}, 0.5, "fails"),
        ({"below": 0}, -INF, "holds"),
        ({"below": 0.5}, NAN, "fails"),
        ({"between": (1, 2)}, 1, "holds"),
        ({"between": (1, 2)}, 2, "holds"),
        ({"between": (1, 2)}, 2.0001, "fails"),
        ({"between": (1, 2)}, NAN, "fails"),
        ({"between": (1, 2)}, INF, "fails"),
        ({"close_to": (3, 0.5)}, 3.5, "holds"),
        ({"close_to": (3, 0.5)}, 2.4, "fails"),
        ({"close_to": (3, 0)}, 3, "holds"),
        ({"close_to": (3, 0.5)}, INF, "fails"),
        ({"close_to": (3, 0.5)}, NAN, "fails"),
        ({"holds": True}, None, "holds"),
        ({"holds": False}, None, "fails"),
        ({"holds": True}, NAN, "fails"),
        ({"holds": np.bool_(True)}, 3, "holds"),
        ({"holds": torch.tensor(False)}, 3, "fails"),
    ],
)
def test_a_criterion_gives_its_verdict(claims, criterion, measured, verdict):
    assert claims.check("It is so", measured=measured, **criterion).verdict == verdict


@pytest.mark.parametrize(
    "criteria", [{}, {"above": 1, "below": 2}, {"holds": True, "above": 0}, {"holds": None}]
)
def test_exactly_one_criterion_is_needed(claims, criteria):
    with pytest.raises(ValueError, match="exactly one of above, below, between, close_to, holds"):
        claims.check("It is so", measured=1, **criteria)
    assert len(claims) == 0


@pytest.mark.parametrize(
    "value",
    [np.float32(0.25), np.array(0.25), torch.tensor(0.25), torch.tensor(0.25, requires_grad=True)],
)
def test_scalars_of_array_libraries_are_numbers(claims, value, recwarn):
    claim = claims.check("It is so", measured=value, above=0.2)
    assert claim.measured == 0.25
    assert type(claim.measured) is float
    assert not recwarn.list


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (np.zeros(3), r"measured must be one value: got an array of shape \(3,\)"),
        (torch.zeros(1), r"measured must be one value: got an array of shape \(1,\)"),
        ([1.0], "measured must be a number: got list"),
        ("0.3", "measured must be a number: got '0.3'"),
        (1j, "measured must be a number: got complex"),
        (None, "measured is needed with above"),
    ],
)
def test_what_is_no_number_is_rejected_by_name(claims, measured, said):
    with pytest.raises(ValueError, match=said):
        claims.check("It is so", measured=measured, above=0)


@pytest.mark.parametrize(
    ("criterion", "said"),
    [
        ({"above": NAN}, "above must be finite: got nan"),
        ({"below": INF}, "below must be finite: got inf"),
        ({"between": (2, 1)}, "low <= high"),
        ({"between": (NAN, 1)}, "between must be finite: got nan"),
        ({"between": 3}, "between must be a pair"),
        ({"close_to": (1, -1)}, "tolerance >= 0"),
        ({"close_to": (INF, 1)}, "close_to must be finite"),
        ({"holds": 1}, "holds must be True or False: got 1"),
        ({"holds": np.float64(0.3)}, "holds must be True or False"),
        ({"holds": np.array([True, True])}, r"array of shape \(2,\)"),
    ],
)
def test_a_bad_criterion_is_rejected_by_name(claims, criterion, said):
    with pytest.raises(ValueError, match=said):
        claims.check("It is so", measured=1, **criterion)


@pytest.mark.parametrize("name", ["slug", "Part/slug", "part/slug/x", "part/", "part/slug\n", None])
def test_a_chapter_is_named_part_and_slug(name):
    with pytest.raises(ValueError, match="chapter must be 'part/slug'"):
        Claims(name)


def test_a_claim_shows_itself_without_its_number(claims):
    shown = [
        repr(claims.check("It is so", measured=0.123456, above=0)),
        repr(claims.check("It is not", measured=0.123456, above=1, expected_to_fail="small")),
        repr(claims.report("Seen", measured=0.123456, why="no criterion")),
    ]
    assert shown == [
        "✓ holds: It is so (> 0)",
        "✗ does not hold, as expected: It is not (> 1)",
        "○ reported: Seen",
    ]


def test_criteria_read_the_same_however_they_were_computed(claims):
    texts = [
        claims.check("a", measured=0, above=0.1 + 0.2).criterion,
        claims.check("b", measured=0, below=np.float64(1e-12)).criterion,
        claims.check("c", measured=0, between=(0, 1_000_000)).criterion,
        claims.check("d", measured=0, close_to=(0.5, 0.05)).criterion,
        claims.check("e", holds=True).criterion,
        claims.check("f", measured=0, above=0.123456).criterion,
    ]
    assert texts == [
        "> 0.3",
        "< 1e-12",
        "in [0, 1000000]",
        "= 0.5 ± 0.05",
        "is true",
        "> 0.123456",
    ]


def test_reports_need_a_reason_and_carry_no_verdict(claims):
    with pytest.raises(ValueError, match="why must be a text"):
        claims.report("Seen", measured=1, why=" ")
    claim = claims.report("Seen", measured="about half", why="needs a GPU", paper="0.7")
    assert (claim.verdict, claim.criterion, claim.measured) == ("reported", "", "about half")
    assert "○ reported" in repr(claims)
    assert "needs a GPU" in repr(claims)


def test_an_expected_failure_is_declared_and_one_that_holds_is_flagged(claims):
    claims.check("Fails", measured=1, above=2, expected_to_fail="too few samples")
    claims.check("Holds", measured=3, above=2, expected_to_fail="too few samples")
    claims.check("Surprise", measured=1, above=2)
    words = [c.words for c in claims]
    assert words[0] == "✗ does not hold, as expected"
    assert words[1] == "✓ holds, though expected to fail"
    assert words[2] == "✗ does not hold"
    flat = " ".join(repr(claims).split())
    assert "expected to fail" in flat
    assert "too few samples" in flat
    page = claims._repr_mimebundle_()[0]["text/html"]
    assert "✓ holds, though expected to fail" in page
    with pytest.raises(ValueError, match="expected_to_fail must be a text"):
        claims.check("Other", measured=1, above=2, expected_to_fail="")


@given(st.floats(), st.floats(allow_nan=False, allow_infinity=False))
def test_text_and_blanked_html_depend_on_the_verdict_alone(measured, bound):
    def shown(value):
        claims = Claims("part/slug")
        verdict = claims.check("It is so", measured=value, above=bound, paper="0.9").verdict
        data, metadata = claims._repr_mimebundle_()
        assert json.loads(json.dumps(metadata, allow_nan=False)) == metadata
        blank = re.sub(
            r'(?s)(<span class="icmllab-measured">).*?(</span>)', r"\1\2", data["text/html"]
        )
        return verdict, data["text/plain"], blank

    holds, fails, mine = shown(INF), shown(-INF), shown(measured)
    assert holds[:1] + fails[:1] == ("holds", "fails")
    assert mine == (holds if mine[0] == "holds" else fails)
    assert holds[1] != fails[1]
    assert holds[2] != fails[2]


def test_measured_numbers_stand_in_the_html_the_metadata_and_the_terminal(claims):
    claims.check("It is so", measured=0.123456, above=0)
    claims.check("It is not", measured=NAN, above=0, paper="<0.5 & more")
    data, metadata = claims._repr_mimebundle_()
    assert '<span class="icmllab-measured">0.1235</span>' in data["text/html"]
    assert "0.12" not in data["text/plain"]
    assert "&lt;0.5 &amp; more" in data["text/html"]
    payload = metadata["icmllab"]
    assert [c["measured"] for c in payload["claims"]] == [0.123456, "nan"]
    assert "0.1235" in claims.table(measured=True)
    assert format_claims(payload) == claims.table(measured=True)


def test_the_payload_says_how_it_was_measured(claims, monkeypatch):
    monkeypatch.setenv("ICMLLAB_SEED", "5")
    monkeypatch.setenv("ICMLLAB_PRESET", "full")
    claims.check("It is so", measured=2, above=1, paper="3")
    payload = claims.payload()
    assert payload["schema"] == 1
    assert (payload["chapter"], payload["seed"], payload["preset"]) == ("part/slug", 5, "full")
    assert payload["claims"] == [
        {
            "text": "It is so",
            "criterion": "> 1",
            "verdict": "holds",
            "measured": 2.0,
            "bounds": [1.0, None],
            "paper": "3",
            "why": None,
            "expected_to_fail": None,
        }
    ]


def test_the_payload_is_read_back_from_a_notebook(claims):
    claims.check("It is so", measured=2, above=1)
    data, metadata = claims._repr_mimebundle_()
    output = nbformat.v4.new_output("execute_result", data=data, metadata=metadata)
    other = nbformat.v4.new_output("stream", text="hello")
    cells = [nbformat.v4.new_markdown_cell("text"), nbformat.v4.new_code_cell("claims")]
    cells[1].outputs = [other, output]
    nb = nbformat.v4.new_notebook(cells=cells)
    assert claims_from_notebook(nb) == claims.payload()
    assert claims_from_notebook(json.loads(nbformat.writes(nb))) == claims.payload()
    assert claims_from_notebook(nbformat.v4.new_notebook()) is None
    output.metadata["icmllab"]["schema"] = 2
    with pytest.raises(ValueError, match="schema 2"):
        claims_from_notebook(nb)


def test_lines_of_the_text_table_fit_a_terminal(claims):
    claims.check("A claim of many words that goes on " * 4, measured=1, above=0, paper="so " * 30)
    lines = claims.table(measured=True).splitlines()
    assert max(map(len, lines[1:])) <= 130
    assert len(lines) > 5


def test_the_html_table_is_accessible_without_colour(claims):
    claims.check("It is so", measured=2, above=1)
    claims.check("It is not", measured=0, above=1)
    page = claims._repr_mimebundle_()[0]["text/html"]
    bare = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)  # as an untrusted page has it
    assert "<caption>Claims of part/slug: 1 ✓ holds, 1 ✗ does not hold" in bare
    assert bare.count('<th scope="col">') == 5
    assert bare.count('<th scope="row">') == 2
    assert ">✓ holds<" in bare
    assert ">✗ does not hold<" in bare
    for where in ("prefers-color-scheme:dark", "html[data-theme=dark]"):
        assert where in page
    assert "body[data-jp-theme-light=false]" in page


# ---- the same text twice


def test_the_same_text_from_two_lines_is_an_error(claims):
    claims.check("It is so", measured=2, above=1)
    with pytest.raises(ValueError, match=r"used twice in part/slug: 'It is so'.*run the cell with"):
        claims.check("It  is so ", measured=3, above=1)
    assert [c.measured for c in claims] == [2.0]


def test_the_same_line_twice_in_a_script_is_an_error(claims):
    def assert_it():
        claims.check("It is so", measured=2, above=1)

    assert_it()
    with pytest.raises(ValueError, match="used twice"):
        assert_it()


class Shell:
    """A real IPython shell as a front end drives it, with or without cell ids."""

    def __init__(self, *, ids: bool):
        InteractiveShell.clear_instance()
        no_history = Config({"HistoryManager": {"enabled": False}})
        self.ip = InteractiveShell.instance(config=no_history)
        self.ids, self.count = ids, 0
        if ids:
            self.ip.kernel = self
        elif hasattr(self.ip, "kernel"):
            del self.ip.kernel
        self.run("first", "from icmllab import Claims; claims = Claims('part/slug')")

    def get_parent(self, channel):
        assert channel == "shell"
        return {"header": {"msg_id": str(self.count)}, "metadata": {"cellId": self.cell}}

    def run(self, cell: str, code: str):
        self.cell, self.count = cell, self.count + 1
        self.ip.run_cell(code, store_history=True).raise_error()

    @property
    def shown(self) -> dict:
        return {c.text: c.measured for c in self.ip.user_ns["claims"]}


@pytest.fixture(params=[True, False], ids=["with cell ids", "without"])
def shell(request):
    yield Shell(ids=request.param)
    InteractiveShell.clear_instance()


ONE = "claims.check('One', measured=x, above=0)"
TWO = "claims.check('Two', measured=x, above=0)"


def test_a_cell_that_runs_again_replaces_its_claim_in_place(shell):
    shell.run("x", "x = 1")
    shell.run("a", ONE)
    shell.run("b", TWO)
    shell.run("x", "x = 5")
    shell.run("a", ONE)
    assert shell.shown == {"One": 5.0, "Two": 1.0}
    assert list(shell.shown) == ["One", "Two"]


def test_the_same_text_from_two_cells_is_an_error(shell):
    shell.run("a", f"x = 1\n{ONE}")
    with pytest.raises(ValueError, match="used twice"):
        shell.run("b", f"x = 2\n{ONE}")
    assert shell.shown == {"One": 1.0}


def test_the_same_text_twice_in_one_run_of_a_cell_is_an_error(shell):
    with pytest.raises(ValueError, match="used twice"):
        shell.run("a", f"for x in (1, 2):\n    {ONE}")


def test_the_same_text_through_one_helper_from_two_cells_is_an_error(shell):
    shell.run("h", f"def helper(x):\n    {ONE}")
    shell.run("a", "helper(1)")
    with pytest.raises(ValueError, match="used twice"):
        shell.run("b", "helper( 2 )")
    shell.run("a", "helper(1)")


def test_running_the_first_cell_again_starts_afresh(shell):
    shell.run("a", f"x = 1\n{ONE}")
    shell.run("first", "claims = Claims('part/slug')")
    assert shell.shown == {}
    shell.run("b", f"x = 2\n{ONE}")
    assert shell.shown == {"One": 2.0}


def test_a_claim_that_an_edited_cell_no_longer_makes_is_gone():
    shell = Shell(ids=True)
    shell.run("a", f"x = 1\n{ONE}")
    shell.run("b", TWO)
    shell.run("a", "claims.check('One, better said', measured=3, above=0)")
    assert shell.shown == {"Two": 1.0, "One, better said": 3.0}
    # and its text is free again
    shell.run("c", ONE)
    assert shell.shown == {"One": 1.0, "Two": 1.0, "One, better said": 3.0}
    InteractiveShell.clear_instance()


def test_a_real_kernel_knows_its_cells():
    """The messages of a real kernel hold what the above relies on."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:

        def run(code, cell=None):
            content = {
                "code": code,
                "silent": False,
                "store_history": True,
                "user_expressions": {"n": "[c.measured for c in claims]"},
                "allow_stdin": False,
                "stop_on_error": False,  # an error aborts what is already queued
            }
            message = client.session.msg("execute_request", content)
            message["metadata"] = {} if cell is None else {"cellId": cell}
            client.shell_channel.send(message)
            while True:
                reply = client.get_shell_msg(timeout=60)
                if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                    break
            if reply["content"]["status"] == "error":
                return reply["content"]["evalue"]
            return reply["content"]["user_expressions"]["n"]["data"]["text/plain"]

        run("from icmllab import Claims; claims = Claims('part/slug'); x = 1")
        assert run(ONE) == "[1.0]"
        run("x = 2")
        assert run(ONE) == "[2.0]"
        assert "used twice" in run(f"x = 3; {ONE}")
        assert run("claims = Claims('part/slug')", "first") == "[]"
        assert run(ONE, "a") == "[3.0]"
        assert run(f"x = 4; {ONE}", "a") == "[4.0]"
        assert "used twice" in run(ONE, "b")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
