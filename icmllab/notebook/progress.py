"""Progress bars that a stored notebook does not keep."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from icmllab.notebook.presets import is_static

Item = TypeVar("Item")


def progress(
    iterable: Iterable[Item], label: str = "", *, total: int | None = None
) -> Iterator[Item]:
    """Go through ``iterable`` behind a bar; silent where outputs are stored.

    A bar's text holds times, which differ from run to run, so a stored notebook shows none.

    Args:
        iterable: what to go through.
        label: text beside the bar.
        total: its length, for an iterable that does not know it.
    """
    if is_static():
        return iter(iterable)
    from tqdm.auto import tqdm

    return iter(tqdm(iterable, desc=label, total=total, leave=False))
