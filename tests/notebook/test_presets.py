"""Presets, seeds and devices: what a run is given from outside."""

import copy
import pickle

import pytest

from icmllab import device, preset, seed


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("ICMLLAB_PRESET", "ICMLLAB_SEED"):
        monkeypatch.delenv(name, raising=False)


def test_quick_is_the_default_and_the_environment_picks(monkeypatch):
    assert preset(quick={"n": 3}, full={"n": 300}).n == 3
    monkeypatch.setenv("ICMLLAB_PRESET", "full")
    cfg = preset(quick={"n": 3}, full={"n": 300})
    assert cfg.n == 300
    assert repr(cfg) == "full(n=300)"
    monkeypatch.setenv("ICMLLAB_PRESET", "")
    assert preset(quick={"n": 3}, full={"n": 300}).n == 3


@pytest.mark.parametrize(("wrong", "hint"), [("fulll", "full"), ("Quick", "quick"), ("qick", "q")])
def test_a_wrong_preset_names_the_near_one(monkeypatch, wrong, hint):
    monkeypatch.setenv("ICMLLAB_PRESET", wrong)
    with pytest.raises(ValueError, match=rf"quick or full: got '{wrong}'; did you mean {hint}"):
        preset(quick={}, full={})


def test_an_unlike_preset_lists_both(monkeypatch):
    monkeypatch.setenv("ICMLLAB_PRESET", "zzz")
    with pytest.raises(ValueError, match=r"must be quick or full: got 'zzz'$"):
        preset(quick={}, full={})


def test_both_presets_have_the_same_keys():
    with pytest.raises(ValueError, match="only in quick: a, b; only in full: c"):
        preset(quick={"a": 1, "b": 1, "n": 1}, full={"c": 1, "n": 1})


@pytest.mark.parametrize("key", ["two words", "_name", "lambda", 3])
def test_keys_are_attribute_names(key):
    with pytest.raises(ValueError, match="quick must have"):
        preset(quick={key: 1}, full={key: 1})


def test_a_preset_is_read_only_and_a_typo_is_named():
    cfg = preset(quick={"n_samples": 3}, full={"n_samples": 4})
    with pytest.raises(AttributeError, match="read-only"):
        cfg.n_samples = 5
    with pytest.raises(AttributeError, match="read-only"):
        del cfg.n_samples
    with pytest.raises(AttributeError, match="did you mean n_samples"):
        cfg.n_sample  # noqa: B018
    assert "n_samples" in dir(cfg)


def test_a_preset_travels_to_other_processes():
    cfg = preset(quick={"n": [1, 2]}, full={"n": [3]})
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    other = copy.deepcopy(cfg)
    assert other == cfg
    assert other.n is not cfg.n


def test_changing_the_given_dict_does_not_change_the_preset():
    values = {"n": 1}
    cfg = preset(quick=values, full={"n": 2})
    values["n"] = 99
    assert cfg.n == 1


def test_seed_adds_to_the_base_of_the_run(monkeypatch):
    assert (seed(), seed(7)) == (0, 7)
    monkeypatch.setenv("ICMLLAB_SEED", "40")
    assert (seed(), seed(2)) == (40, 42)
    monkeypatch.setenv("ICMLLAB_SEED", "forty")
    with pytest.raises(ValueError, match="ICMLLAB_SEED must be a whole number: got 'forty'"):
        seed()


def test_device_is_where_a_tensor_can_be_made():
    import torch

    assert device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.zeros(1, device=device()).device.type == device().type
