r"""Walk drafted trees along the target's samples: which tokens are accepted, and what comes after.

At a node whose target sample is x, go to the child that holds x and go on; without one, emit x and
stop. Every emitted token is a sample of the target, so that its law is the target's, whatever was
drafted.

A program takes one request, holds its parents and tokens in registers, and follows the path with
one load of a sample a step. The host waits for nothing: emitted tokens are written with −1 behind
the last.

Bytes: 8 a packed node, 4 a step for the sample, 4 (depth + 1) + 4 a request out, 8 for its offsets.
With eager PyTorch each step is a comparison over all nodes and a copy to the host.

Source: sample-and-match verification of speculative decoding, for "ECHO: Elastic Speculative
Decoding with Sparse Gating for High-Concurrency Scenarios" (arXiv 2604.09603). The code is our own.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from icmllab.kernels.runtime import (
    check_dtype,
    check_same_device,
    jit,
    on_device,
    output,
    runs_triton,
    tl,
)


class Walked(NamedTuple):
    """Paths through the trees.

    Attributes:
        tokens: (B, depth + 1) int32, accepted tokens and the one after them, then −1.
        accepted: (B,) int32, drafted tokens that were accepted.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor


@jit
def verify_tree_kernel(
    samples_ptr,
    token_ptr,
    parent_ptr,
    offsets_ptr,
    tokens_ptr,
    accepted_ptr,
    width,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The path of one request; grid (requests,)."""
    request = tl.program_id(0)
    start = tl.load(offsets_ptr + request)
    end = tl.load(offsets_ptr + request + 1)
    nodes = start + tl.arange(0, NODES)
    inside = nodes < end
    parent = tl.load(parent_ptr + nodes, mask=inside, other=-2)
    token = tl.load(token_ptr + nodes, mask=inside, other=-2)
    places = tl.arange(0, WIDTH)
    path = tl.full((WIDTH,), -1, dtype=tl.int32)
    node = start
    step = 0
    while node >= 0:
        x = tl.load(samples_ptr + node)
        path = tl.where(places == step, x, path)
        match = (parent == node) & (token == x)
        node = tl.max(tl.where(match, nodes, -1), axis=0)
        step += 1
    tl.store(tokens_ptr + request * width + places, path, mask=places < width)
    tl.store(accepted_ptr + request, step - 1)


def _power_of_two(n: int) -> int:
    return max(2, 1 << (n - 1).bit_length())


def launch(
    samples: torch.Tensor,
    token: torch.Tensor,
    parent: torch.Tensor,
    offsets: torch.Tensor,
    *,
    most: int,
    depth: int,
) -> Walked:
    """Run the Triton kernel on checked inputs, wherever they are."""
    B, width = len(offsets) - 1, depth + 1
    tokens = output(B, width, dtype=torch.int32, device=samples.device)
    accepted = output(B, dtype=torch.int32, device=samples.device)
    with on_device(samples):
        verify_tree_kernel[(B,)](
            samples.contiguous(),
            token.contiguous(),
            parent.contiguous(),
            offsets.contiguous(),
            tokens,
            accepted,
            width,
            NODES=_power_of_two(most),
            WIDTH=_power_of_two(width),
            num_warps=1 if most <= 128 else 4,
        )
    return Walked(tokens, accepted)


def reference(
    samples: torch.Tensor,
    token: torch.Tensor,
    parent: torch.Tensor,
    offsets: torch.Tensor,
    *,
    most: int,
    depth: int,
) -> Walked:
    """The same in plain Python, request by request."""
    del most
    rows, accepted = [], []
    drawn, held, above = samples.tolist(), token.tolist(), parent.tolist()
    bounds = offsets.tolist()
    for start, end in pairwise(bounds):
        child = {(above[i], held[i]): i for i in range(start + 1, end)}
        node, path = start, []
        while node is not None:
            path.append(drawn[node])
            node = child.get((node, drawn[node]))
        rows.append(path + [-1] * (depth + 1 - len(path)))
        accepted.append(len(path) - 1)
    options = {"dtype": torch.int32, "device": samples.device}
    tokens = torch.tensor(rows, **options).view(len(rows), depth + 1)
    return Walked(tokens, torch.tensor(accepted, **options))


def verify_tree(
    samples: torch.Tensor,
    token: torch.Tensor,
    parent: torch.Tensor,
    offsets: torch.Tensor,
    *,
    most: int,
    depth: int,
) -> Walked:
    """Paths that the target's samples take through packed trees.

    Args:
        samples: (N,) int32, one sample of the target at each packed node, roots included.
        token: (N,) int32, what a node holds; of a root it is not looked at.
        parent: (N,) int32, place of the parent in the packed array, −1 for a root. Siblings hold
            different tokens; not checked here.
        offsets: (B + 1,) int32, where requests begin; offsets[b] is the root of request b.
        most: packed nodes of the largest request, known to the host.
        depth: of the deepest node, known to the host.

    Returns:
        Emitted tokens and the number accepted.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if samples.ndim != 1 or not len(samples):
        raise ValueError(f"samples must be (N,), not empty: got {tuple(samples.shape)}")
    named = {"samples": samples, "token": token, "parent": parent}
    for name, value in named.items():
        if value.shape != samples.shape:
            raise ValueError(f"{name} must be ({len(samples)},): got {tuple(value.shape)}")
    if offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"offsets must be (B + 1,) with B >= 1: got {tuple(offsets.shape)}")
    if most < 1 or depth < 0:
        raise ValueError(f"most must be >= 1 and depth >= 0: got {most}, {depth}")
    for name, value in {**named, "offsets": offsets}.items():
        check_dtype(name, value, (torch.int32,))
    check_same_device(**named, offsets=offsets)
    run = launch if runs_triton(samples, token, parent, offsets) else reference
    return run(samples, token, parent, offsets, most=most, depth=depth)
