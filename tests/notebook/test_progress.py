"""Progress bars: shown live, silent where outputs are stored."""

import sys

import pytest

from icmllab import progress, sweep


def test_static_runs_show_nothing_and_load_no_bar(monkeypatch, capsys):
    monkeypatch.setenv("ICMLLAB_STATIC", "1")
    monkeypatch.delitem(sys.modules, "tqdm.auto", raising=False)
    assert list(progress(range(5), "steps")) == [0, 1, 2, 3, 4]
    sweep(abs, over={"x": [1]})
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", "")
    assert "tqdm.auto" not in sys.modules


@pytest.mark.parametrize("value", ["", "0"])
def test_live_runs_show_the_label_and_pass_every_item(monkeypatch, capsys, value):
    monkeypatch.setenv("ICMLLAB_STATIC", value)
    assert list(progress((i for i in range(5)), "steps", total=5)) == [0, 1, 2, 3, 4]
    err = capsys.readouterr().err
    assert "steps" in err
    assert "/5" in err


def test_an_error_in_the_loop_gets_out(monkeypatch):
    monkeypatch.setenv("ICMLLAB_STATIC", "0")

    def items():
        yield 1
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        list(progress(items(), "steps"))
