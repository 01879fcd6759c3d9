"""What a run is given from outside: its scale, its base seed, its device."""

import difflib
import keyword
import os
from types import MappingProxyType

PRESETS = ("quick", "full")


class Preset:
    """A read-only set of named values; ``cfg.n_samples`` reads one."""

    __slots__ = ("_name", "_values")

    def __init__(self, name: str, values: dict):
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_values", MappingProxyType(dict(values)))

    def __getattr__(self, key: str):
        # copy and pickle ask an empty object for special names
        if key.startswith("_"):
            raise AttributeError(key)
        try:
            return self._values[key]
        except KeyError:
            near = difflib.get_close_matches(key, self._values, n=1)
            hint = f"; did you mean {near[0]}?" if near else f": it has {', '.join(self._values)}"
            raise AttributeError(f"the preset has no value {key!r}{hint}") from None

    def __setattr__(self, key: str, value: object):
        raise AttributeError(f"a preset is read-only: {key} was not set")

    def __delattr__(self, key: str):
        raise AttributeError(f"a preset is read-only: {key} was not removed")

    def __reduce__(self):
        return Preset, (self._name, dict(self._values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Preset) and self.__reduce__() == other.__reduce__()

    __hash__ = None  # the values may be lists

    def __dir__(self):
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self._values.items())
        return f"{self._name}({inner})"


def preset(*, quick: dict, full: dict) -> Preset:
    """The values of the scale that ``ICMLLAB_PRESET`` names; ``quick`` when it names none.

    Args:
        quick: values for a laptop and for the tests.
        full: values for a GPU; the same keys.

    Raises:
        ValueError: the keys differ or cannot be attributes, or the environment names another
            preset.
    """
    for name, values in (("quick", quick), ("full", full)):
        if not isinstance(values, dict):
            raise ValueError(f"{name} must be a dict: got {type(values).__name__}")
        for key in values:
            if not (isinstance(key, str) and key.isidentifier()) or keyword.iskeyword(key):
                raise ValueError(f"{name} must have names as keys: got {key!r}")
            if key.startswith("_"):
                raise ValueError(f"{name} must have keys without a leading underscore: got {key!r}")
    if set(quick) != set(full):
        only = [
            f"only in {name}: {', '.join(sorted(set(one) - set(other)))}"
            for name, one, other in (("quick", quick, full), ("full", full, quick))
            if set(one) - set(other)
        ]
        raise ValueError(f"quick and full must have the same keys; {'; '.join(only)}")
    name = preset_name()
    return Preset(name, {"quick": quick, "full": full}[name])


def preset_name() -> str:
    """The scale that ``ICMLLAB_PRESET`` names: ``quick`` (also when it is unset) or ``full``.

    Raises:
        ValueError: it names another.
    """
    name = os.environ.get("ICMLLAB_PRESET") or "quick"
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"ICMLLAB_PRESET must be quick or full: got {name!r}{hint}")
    return name


def seed(offset: int = 0) -> int:
    """The base seed of this run (``ICMLLAB_SEED``, default 0) plus ``offset``.

    Raises:
        ValueError: the environment's seed is not a whole number.
    """
    text = os.environ.get("ICMLLAB_SEED") or "0"
    try:
        base = int(text)
    except ValueError:
        raise ValueError(f"ICMLLAB_SEED must be a whole number: got {text!r}") from None
    return base + offset


def device():
    """The torch device to compute on: CUDA (or HIP) when there is one, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_static() -> bool:
    """Whether outputs are for a page without a kernel (``ICMLLAB_STATIC=1``)."""
    return os.environ.get("ICMLLAB_STATIC", "") not in ("", "0")
