"""Looking into networks: activations by forward hooks, and networks cut in two at a layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


def collect(
    module: nn.Module, names: Sequence[str], x: torch.Tensor, *, batch_size: int | None = None
) -> dict[str, torch.Tensor]:
    """What the named submodules put out while ``module`` sees ``x``.

    Runs without gradients and in evaluation mode; the module's modes are as before afterwards,
    also when it raises, and no hook stays behind.

    Args:
        module: the network.
        names: names of submodules, as in ``module.named_modules()``; "" is the module itself.
        x: (n, ...) inputs.
        batch_size: rows at a time; None takes all at once.

    Returns:
        Name → the output, (n, ...), in the order of ``names``.

    Raises:
        ValueError: a name that is no submodule, or is given twice; ``x`` without rows;
            ``batch_size`` below 1; a submodule that did not run once a batch, or whose output is
            no tensor.
    """
    known = dict(module.named_modules())
    for name in names:
        if name not in known:
            raise ValueError(f"names must be submodules of module: {name!r} is not one")
    if len(set(names)) != len(names):
        raise ValueError(f"names must differ from one another: got {list(names)}")
    if not len(x):
        raise ValueError("x must hold at least one row: got none")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be >= 1: got {batch_size}")
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def keeper(name: str) -> Callable:
        def keep(_module, _inputs, output):
            if not isinstance(output, torch.Tensor):
                raise ValueError(
                    f"names must be submodules that put out a tensor: {name!r} gave "
                    f"{type(output).__name__}"
                )
            # a copy: a later in-place activation would change what was seen here
            seen[name].append(output.detach().clone())

        return keep

    handles = [known[name].register_forward_hook(keeper(name)) for name in names]
    batches = [x] if batch_size is None else x.split(batch_size)
    try:
        with torch.no_grad(), evaluating(module):
            for batch in batches:
                module(batch)
    finally:
        for handle in handles:
            handle.remove()
    for name, parts in seen.items():
        if len(parts) != len(batches):
            raise ValueError(
                f"names must be submodules that run once a batch: {name!r} ran {len(parts)} "
                f"times for {len(batches)}"
            )
    return {name: torch.cat(parts) for name, parts in seen.items()}


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules in evaluation mode for a while; each submodule's own mode comes back after.

    Batch normalisation then uses its running statistics and does not update them, and dropout
    is off.
    """
    modes = [(m, m.training) for module in modules for m in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for m, training in modes:
            m.training = training


class Split(NamedTuple):
    """A sequential network cut in two: ``head(front(x))`` is the whole. Parameters are shared."""

    front: nn.Sequential
    head: nn.Sequential


def split_at(module: nn.Sequential, index: int) -> Split:
    """Cut a sequential network before its submodule ``index``.

    Args:
        module: (…) → (…), at least two submodules.
        index: 1 … len(module) - 1: the front holds that many submodules.

    Raises:
        ValueError: not an ``nn.Sequential``, or an index that leaves a side empty.
    """
    if not isinstance(module, nn.Sequential):
        raise ValueError(f"module must be an nn.Sequential: got {type(module).__name__}")
    if isinstance(index, bool) or index != int(index) or not 1 <= index <= len(module) - 1:
        raise ValueError(
            f"index must leave submodules on both sides, 1 to {len(module) - 1}: got {index}"
        )
    parts = list(module)
    return Split(nn.Sequential(*parts[:index]), nn.Sequential(*parts[index:]))


RANGES: Mapping[type[nn.Module], Callable[[torch.Tensor], torch.Tensor]] = {
    nn.ReLU: F.relu,
    nn.Sigmoid: lambda z: z.clamp(0, 1),
    nn.Tanh: lambda z: z.clamp(-1, 1),
}
"""The nearest value in the range of an activation. For ReLU that is the activation itself."""


class SplitModel(nn.Module):
    """A classifier cut at one layer: ``forward(x) = head(front(x))``.

    Args:
        front: inputs → features (n, k) or (n, k, height, width).
        head: features → logits (n, n_classes).
        layers: submodules of ``head``, in rising order, whose outputs count as layers of the
            network; by default the last one only, the logits.

    Attributes:
        into_range: the nearest feature that the front's last activation can put out, a callable;
            None where the last submodule of ``front`` is no activation of :data:`RANGES`.

    Raises:
        ValueError: ``layers`` that ``head`` has not, or not rising.
    """

    def __init__(self, front: nn.Module, head: nn.Sequential, layers: Sequence[int] | None = None):
        super().__init__()
        if not isinstance(head, nn.Sequential) or not len(head):
            raise ValueError(f"head must be an nn.Sequential with submodules: got {head!r}")
        layers = (len(head) - 1,) if layers is None else tuple(layers)
        rising = all(a < b for a, b in pairwise(layers))
        if not layers or not rising or layers[0] < 0 or layers[-1] >= len(head):
            raise ValueError(
                f"layers must be rising indices of the {len(head)} submodules of head: got {layers}"
            )
        self.front, self.head, self.layers = front, head, layers
        last = front[-1] if isinstance(front, nn.Sequential) and len(front) else front
        self.into_range = RANGES.get(type(last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.front(x))

    def trace(self, z: torch.Tensor) -> list[torch.Tensor]:
        """The features ``z`` themselves, then each layer of the head from them."""
        found = [z]
        for i, part in enumerate(self.head):
            z = part(z)
            if i in self.layers:
                found.append(z)
        return found
