"""The proofs of :mod:`icmllab.kernels.verify_tree`."""

import torch

from icmllab.kernels import verify_tree as kernel
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.verify_tree import Walked, verify_tree


def _make(g: torch.Generator, nodes: tuple[int, ...], *, V: int = 3, chain: bool = False) -> Inputs:
    """Random trees whose siblings differ, and samples of a small alphabet, so that paths go on."""
    token, parent, offsets, deepest = [], [], [0], 0
    for n in nodes:
        start, levels, taken = offsets[-1], [0], set()
        token.append(0)
        parent.append(-1)
        while len(levels) <= n:
            high = len(levels)
            mine = high - 1 if chain else int(torch.randint(high, (1,), generator=g))
            x = int(torch.randint(V, (1,), generator=g))
            if (mine, x) in taken:
                continue
            taken.add((mine, x))
            token.append(x)
            parent.append(start + mine)
            levels.append(levels[mine] + 1)
        deepest = max(deepest, *levels)
        offsets.append(start + n + 1)
    samples = torch.randint(V, (len(token),), generator=g).int()
    if chain:  # all accepted
        for i, p in enumerate(parent):
            if p >= 0:
                samples[p] = token[i]
    made = {"token": torch.tensor(token), "parent": torch.tensor(parent)}
    made["offsets"] = torch.tensor(offsets)
    made = {"samples": samples, **{k: t.int() for k, t in made.items()}}
    return {**made, "most": max(nodes) + 1, "depth": deepest}


def _case(nodes: tuple[int, ...], **options: object) -> Case:
    return Case(lambda g: _make(g, nodes, **options), (0.0, 0.0))


def _outputs(found: Walked) -> Outputs:
    return tuple(found)


def _bytes(x: Inputs) -> int:
    """Parents and tokens once, a sample a step, what comes out."""
    B = len(x["offsets"]) - 1
    steps = int(kernel.reference(**x).accepted.sum()) + B
    return 8 * B + 8 * len(x["samples"]) + 4 * steps + 4 * B * (x["depth"] + 2)


def _eager(x: Inputs) -> Outputs:
    """One level after the other, for all requests at once."""
    at, B = x["offsets"][:-1].long(), len(x["offsets"]) - 1
    tokens = torch.full((B, x["depth"] + 1), -1, dtype=torch.int32, device=at.device)
    accepted = torch.zeros(B, dtype=torch.int32, device=at.device)
    alive = torch.ones(B, dtype=torch.bool, device=at.device)
    names = torch.arange(len(x["samples"]), device=at.device)
    for step in range(x["depth"] + 1):
        drawn = x["samples"][at]
        tokens[:, step] = torch.where(alive, drawn, -1)
        match = (x["parent"] == at[:, None]) & (x["token"] == drawn[:, None])
        child = torch.where(match, names, -1).amax(dim=1)
        alive = alive & (child >= 0)
        accepted += alive.int()
        at = torch.where(alive, child, at)
    return tokens, accepted


def _program(nodes: int = 64, width: int = 16) -> Program:
    names = ("samples_ptr", "token_ptr", "parent_ptr", "offsets_ptr", "tokens_ptr", "accepted_ptr")
    types = {**dict.fromkeys(names, "*i32"), "width": "i32"}
    return Program(
        kernel.verify_tree_kernel,
        types,
        {"NODES": nodes, "WIDTH": width},
        names,
        num_warps=1 if nodes <= 128 else 4,
    )


def _bad(message: str, **change: object) -> BadCall:
    def call() -> object:
        good = _make(torch.Generator().manual_seed(0), (2, 1))
        return verify_tree(**{**good, **change})

    return BadCall(call, message)


def _bench(device: torch.device) -> Inputs:
    made = _make(torch.Generator().manual_seed(0), (31,) * 256, V=6)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}


SPEC = KernelSpec(
    name="verify_tree",
    op=lambda x: _outputs(verify_tree(**x)),
    launch=lambda x: _outputs(kernel.launch(**x)),
    truth=lambda x: _outputs(kernel.reference(**x)),
    scale=lambda x: tuple(torch.ones_like(t, dtype=torch.float64) for t in kernel.reference(**x)),
    cases={
        "a root alone": _case((0,)),
        "one node": _case((1,)),
        "three requests": _case((5, 0, 9)),
        "63 nodes": _case((63,)),
        "64 nodes": _case((64,), V=2),
        "150 nodes": _case((150, 3), V=4),
        "a chain, all accepted": _case((12, 7), chain=True),
        "many requests": _case((6,) * 40, V=2),
    },
    bytes=_bytes,
    flops=lambda x: 2 * len(x["samples"]),
    programs={"64 nodes": _program(), "256 nodes": _program(256)},
    errors={
        "samples a matrix": _bad("samples must be", samples=torch.ones(2, 2).int()),
        "token of another size": _bad("token must be", token=torch.ones(3).int()),
        "parent of another dtype": _bad("parent must have", parent=torch.ones(5)),
        "offsets too short": _bad("offsets must be", offsets=torch.zeros(1).int()),
        "most": _bad("most must be", most=0),
        "elsewhere": _bad("must share a device", offsets=torch.zeros(3, device="meta").int()),
    },
    bench=_bench,
    timed=lambda x: verify_tree(**x).tokens,
    baselines={"eager": _eager},
    note="latency of a few dependent loads; what it saves are host round trips",
)
