"""icmllab: the methods, kernels and notebook tools behind the icmllab book.

``import icmllab`` is light: the names below load on first use (PEP 562), and no
torch, matplotlib or scikit-learn is imported before a module that needs it.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_EXPORTS = {
    "Claims": "icmllab.notebook.claims",
    "device": "icmllab.notebook.presets",
    "explore": "icmllab.notebook.explore",
    "load_results": "icmllab.notebook.results",
    "preset": "icmllab.notebook.presets",
    "progress": "icmllab.notebook.progress",
    "seed": "icmllab.notebook.presets",
    "show_source": "icmllab.notebook.source",
    "sweep": "icmllab.notebook.sweep",
    "use_style": "icmllab.notebook.style",
}

__all__ = ["__version__", *sorted(_EXPORTS)]

try:
    __version__ = version("icmllab")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str):
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'icmllab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
