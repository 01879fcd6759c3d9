"""What a run is given from outside: its scale, its base seed, its device."""

import difflib
import os
from types import MappingProxyType

PRESETS = ("quick", "full")


class Preset:
    """A read-only set of named values; ``cfg.n_samples`` reads one."""

    def __init__(self, name: str, values: dict):
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_values", MappingProxyType(dict(values)))

    def __getattr__(self, key: str):
        try:
            return self._values[key]
        except KeyError:
            near = difflib.get_close_matches(key, self._values, n=1)
            hint = f"; did you mean {near[0]}?" if near else f": it has {', '.join(self._values)}"
            raise AttributeError(f"the preset has no value {key!r}{hint}") from None

    def __setattr__(self, key: str, value: object):
        raise AttributeError(f"a preset is read-only: {key} was not set")

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self._values.items())
        return f"{self._name}({inner})"


def preset(*, quick: dict, full: dict) -> Preset:
    """The values of the scale that ``ICMLLAB_PRESET`` names; ``quick`` when it names none.

    Args:
        quick: values for a laptop and for the tests.
        full: values for a GPU; the same keys.

    Raises:
        ValueError: the keys differ, or the environment names another preset.
    """
    if set(quick) != set(full):
        only = sorted(set(quick) ^ set(full))
        raise ValueError(f"quick and full must have the same keys: {', '.join(only)} stands in one")
    name = os.environ.get("ICMLLAB_PRESET", "quick")
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"ICMLLAB_PRESET must be quick or full: got {name!r}{hint}")
    return Preset(name, {"quick": quick, "full": full}[name])


def seed(offset: int = 0) -> int:
    """The base seed of this run (``ICMLLAB_SEED``, default 0) plus ``offset``."""
    text = os.environ.get("ICMLLAB_SEED", "0")
    try:
        return int(text) + offset
    except ValueError:
        raise ValueError(f"ICMLLAB_SEED must be a whole number: got {text!r}") from None


def device():
    """The torch device to compute on: CUDA (or HIP) when there is one, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_static() -> bool:
    """Whether outputs are for a page without a kernel (``ICMLLAB_STATIC=1``)."""
    return os.environ.get("ICMLLAB_STATIC", "") not in ("", "0")
