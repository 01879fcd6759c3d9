r"""DITRON: Distributed Multi-level Tiling Compiler for Parallel Tensor Programs (arXiv 2605.02953).

A layer that is split over R accelerators has to gather rows before a matrix product, or to reduce
and scatter sums after one. Done one after the other, links idle while units compute and the other
way round. DITRON writes such programs at three levels: tiles of one core, chunks that move between
memories and raise signals, and tasks of one persistent kernel with a scoreboard. The order in which
tiles run decides whether anything overlaps.

Known from the paper's abstract and summaries, and from its authors' open repository of the same
primitives: the three levels, rank swizzles, signals, two-level gathers, mega kernels. Our
reconstruction: the tile IR, the executor with its coroutines, the simulator with all its
parameters, every number.

Notation: R ranks, S units of a rank, t_c the time of a tile, t_x that of a chunk on its way. A
tensor of M rows has R chunks of M/R rows; chunk r is rank r's own. ρ = (R−1) t_x / T_comp.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from icmllab.kernels.ag_gemm_consumer import ag_gemm_consumer
from icmllab.kernels.mega_mlp import mega_mlp
from icmllab.toolbox.kv_cache import PartialAttention, attend_partial, merge_partials

__all__ = [
    "CLUSTERS",
    "GEMM",
    "PASSES",
    "PATTERNS",
    "SHIPPED",
    "SWIZZLES",
    "Bounds",
    "Cluster",
    "DeadlockError",
    "Move",
    "SimResult",
    "TaskGraph",
    "TaskOp",
    "TileIR",
    "Token",
    "Trace",
    "World",
    "ag_gemm",
    "ag_gemm_consumer",
    "all_gather",
    "arrivals",
    "autotune",
    "best_swizzle",
    "bounds",
    "broken_programs",
    "check_chunks",
    "check_deadlock",
    "check_gather",
    "check_merge",
    "check_swizzle",
    "chunk_order",
    "decode_graph",
    "gemm_allreduce",
    "gemm_rs",
    "lower",
    "mega_mlp",
    "megakernel",
    "moe_ep",
    "moves",
    "overlapped_ag_gemm",
    "simulate",
    "sp_flash_decode",
    "study_run",
    "toy",
    "ulysses_attention",
]

SWIZZLES = ("none", "rank", "rank-reverse", "node-rank")
"""Orders of chunks: 0 … R−1; own and up; own and down; by node, own first, then by local rank."""

PATTERNS = ("pull", "push", "push-forward", "ring", "two_level")
"""How chunks are moved. pull and push bring r+1, r+2, …; push-forward and ring r−1, r−2, …"""

GROUP_M = 8
"""Row tiles that are computed together, column after column, for the sake of the cache."""


# --------------------------------------------------------------------------------------------
# The machine


@dataclass(frozen=True)
class Cluster:
    """Accelerators, their units and their links.

    Attributes:
        n_nodes: nodes.
        ranks_per_node: accelerators of a node.
        units: compute units (multiprocessors) of one.
        unit_flops: FLOP/s of a unit at its best tile.
        intra_bw: bytes/s into and out of a rank, inside a node.
        inter_bw: bytes/s into and out of a rank, between nodes.
        latency: seconds a transfer.
        launch: seconds a kernel launch.
        fixed_tile: time of a tile whatever its shape; None takes it from shape and FLOP/s.
        fixed_chunk: time of a chunk whatever its size; None takes it from size and link.

    Raises:
        ValueError: a number out of range.
    """

    n_nodes: int
    ranks_per_node: int
    units: int
    unit_flops: float
    intra_bw: float
    inter_bw: float
    latency: float
    launch: float
    fixed_tile: float | None = None
    fixed_chunk: float | None = None

    def __post_init__(self):
        for name in ("n_nodes", "ranks_per_node", "units"):
            value = getattr(self, name)
            if isinstance(value, bool) or value != int(value) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1: got {value}")
        for name in ("unit_flops", "intra_bw", "inter_bw"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0: got {getattr(self, name)}")
        for name in ("latency", "launch", "fixed_tile", "fixed_chunk"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be >= 0: got {value}")

    @property
    def ranks(self) -> int:
        """All accelerators."""
        return self.n_nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        """Which node a rank is on."""
        return rank // self.ranks_per_node

    def tile_time(self, BM: int, BN: int, K: int) -> float:
        """Seconds of one output tile: 64 × 64 reaches half of a unit's peak, 128 × 128 all."""
        if self.fixed_tile is not None:
            return self.fixed_tile
        share = min(1.0, BM * BN / (64 * (BM + BN)))
        return 2 * BM * BN * K / (self.unit_flops * share)

    def chunk_time(self, nbytes: float, *, inter: bool = False, comm_units: int = 0) -> float:
        """Seconds of one transfer.

        ``comm_units`` of the compute units drive the link, 8 of them fill it; 0 leaves it to copy
        engines, which fill it but cost a launch each.
        """
        if self.fixed_chunk is not None:
            return self.fixed_chunk
        bandwidth = self.inter_bw if inter else self.intra_bw
        if comm_units:
            return nbytes / (bandwidth * min(1.0, comm_units / 8)) + self.latency
        return nbytes / bandwidth + self.latency + self.launch


CLUSTERS = {
    "h800x8": Cluster(1, 8, 132, 7.5e12, 200e9, 50e9, 2e-6, 3e-6),
    "h800x8x2": Cluster(2, 8, 132, 7.5e12, 200e9, 50e9, 2e-6, 3e-6),
    "mi300x8": Cluster(1, 8, 304, 4.3e12, 64e9, 50e9, 2e-6, 3e-6),
}
"""Machines to simulate, by name."""


@dataclass(frozen=True)
class GEMM:
    """A matrix product split over all ranks, with its collective.

    Attributes:
        kind: "ag": rows of A are gathered first, a rank has columns of B. "rs": a rank has a part
            of the inner dimension, sums are reduced and rows scattered.
        M: rows of the whole product, a multiple of the ranks.
        N: columns of the whole product.
        K: inner dimension of the whole product.
        tile: (BM, BN), powers of two >= 16.
        comm_units: units given to communication.
        itemsize: bytes of an element.
    """

    kind: str
    M: int
    N: int
    K: int
    tile: tuple[int, int] = (128, 128)
    comm_units: int = 0
    itemsize: int = 2

    def __post_init__(self):
        if self.kind not in ("ag", "rs"):
            raise ValueError(f"kind must be 'ag' or 'rs': got {self.kind!r}")
        for name in ("M", "N", "K"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
        _check_tile(self.tile)
        if self.comm_units < 0:
            raise ValueError(f"comm_units must be >= 0: got {self.comm_units}")

    def columns(self, cluster: Cluster) -> int:
        """Columns that one rank computes."""
        return -(-self.N // cluster.ranks) if self.kind == "ag" else self.N

    def inner(self, cluster: Cluster) -> int:
        """Inner dimension of one rank's product."""
        return self.K if self.kind == "ag" else -(-self.K // cluster.ranks)

    def chunk_rows(self, cluster: Cluster) -> int:
        """Rows of a chunk."""
        if self.M % cluster.ranks:
            raise ValueError(f"M must be a multiple of the {cluster.ranks} ranks: got {self.M}")
        return self.M // cluster.ranks

    def chunk_bytes(self, cluster: Cluster) -> int:
        """Bytes of a chunk: rows of A to gather, or of sums in float32 to scatter."""
        rows = self.chunk_rows(cluster)
        return rows * self.K * self.itemsize if self.kind == "ag" else 4 * rows * self.N


def _check_tile(tile: Sequence[int]) -> None:
    for size in tile:
        if size < 16 or size & (size - 1):
            raise ValueError(f"tile must hold powers of two >= 16: got {tuple(tile)}")


def toy(
    rho: float,
    *,
    kind: str = "ag",
    ranks: int = 8,
    units: int = 132,
    tiles: tuple[int, int] = (16, 64),
) -> tuple[GEMM, Cluster]:
    """A product and a machine with t_c = 1 and a given ratio of communication to computing.

    Args:
        rho: (R−1) t_x / T_comp, >= 0.
        kind: "ag" or "rs".
        ranks: R.
        units: S.
        tiles: rows and columns of tiles in a chunk.

    Raises:
        ValueError: a number out of range.
    """
    if not rho >= 0:
        raise ValueError(f"rho must be >= 0: got {rho}")
    down, across = tiles
    N = 64 * across * (ranks if kind == "ag" else 1)
    op = GEMM(kind, 64 * down * ranks, N, 64, tile=(64, 64))
    compute = math.ceil(ranks * down * across / units)
    chunk = rho * compute / max(ranks - 1, 1)
    machine = Cluster(1, ranks, units, 1.0, 1.0, 1.0, 0.0, 0.0, fixed_tile=1.0, fixed_chunk=chunk)
    return op, machine


# --------------------------------------------------------------------------------------------
# Moving chunks


class Move(NamedTuple):
    """One chunk from one rank to another.

    Attributes:
        chunk: whose rows.
        src: sender.
        dst: receiver.
        initiator: who starts it, in the order of its own list.
        inter: whether it crosses between nodes.
    """

    chunk: int
    src: int
    dst: int
    initiator: int
    inter: bool


def moves(pattern: str, cluster: Cluster) -> list[Move]:
    """The transfers of an all-gather; each initiator's in the order in which it starts them.

    Raises:
        ValueError: an unknown pattern.
    """
    _check_pattern(pattern)
    R, L = cluster.ranks, cluster.ranks_per_node

    def move(chunk: int, src: int, dst: int, initiator: int) -> Move:
        return Move(chunk, src, dst, initiator, cluster.node(src) != cluster.node(dst))

    made = []
    for r in range(R):
        for j in range(1, R):
            if pattern == "pull":
                made.append(move((r + j) % R, (r + j) % R, r, r))
            elif pattern == "push":
                made.append(move(r, r, (r - j) % R, r))
            elif pattern == "push-forward":
                made.append(move(r, r, (r + j) % R, r))
            elif pattern == "ring":
                made.append(move((r - j + 1) % R, r, (r + 1) % R, r))
        if pattern == "two_level":
            node, local = divmod(r, L)
            others = [(node - k) % cluster.n_nodes for k in range(1, cluster.n_nodes)]
            # the slow link first; what has come over it goes on inside the node
            made += [move(r, r, other * L + local, r) for other in others]
            peers = [node * L + (local - k) % L for k in range(1, L)]
            mine = [r] + [
                ((node + k) % cluster.n_nodes) * L + local for k in range(1, cluster.n_nodes)
            ]
            made += [move(chunk, r, peer, r) for chunk in mine for peer in peers]
    return made


def _check_pattern(pattern: str) -> None:
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)}: got {pattern!r}")


class Timed(NamedTuple):
    """A transfer with its times."""

    move: Move
    start: float
    end: float


def _run_transfers(
    plan: Iterable[Move],
    ready: Callable[[Move], float | None],
    cost: Callable[[Move], float],
    arrived: Callable[[Move, float], None],
) -> list[Timed]:
    """Ports carry one chunk at a time; what is ready first is served first at both of its ports.

    A rank has an ingress and an egress port inside its node and one of each between nodes, and an
    initiator starts its chunks in order. Of those ready at once, the earlier in their lists go
    first. ``ready`` says when the chunk is at its source, None while that is unknown.
    """
    queues: dict[tuple, list[tuple[int, Move]]] = {}
    for m in plan:
        queue = queues.setdefault((m.initiator, m.inter), [])
        queue.append((len(queue), m))
    free: dict[tuple, float] = {}
    done = []
    while queues:
        waiting = [
            (there, step, key)
            for key, ((step, m), *_) in queues.items()
            if (there := ready(m)) is not None
        ]
        if not waiting:
            raise ValueError("pattern must not wait for chunks that never come")
        there, _, key = min(waiting)
        _, m = queues[key].pop(0)
        if not queues[key]:
            del queues[key]
        out, into = ("out", m.src, m.inter), ("in", m.dst, m.inter)
        start = max(there, free.get(out, 0.0), free.get(into, 0.0))
        free[out] = free[into] = end = start + cost(m)
        arrived(m, end)
        done.append(Timed(m, start, end))
    return done


class Arrivals(NamedTuple):
    """When chunks are where.

    Attributes:
        times: (R, R), rank and chunk; 0 for a rank's own.
        transfers: all transfers.
    """

    times: np.ndarray
    transfers: list[Timed]


@lru_cache(maxsize=64)
def arrivals(
    pattern: str, cluster: Cluster, *, nbytes: float = 1.0, comm_units: int = 0
) -> Arrivals:
    """Arrival times of an all-gather of chunks of ``nbytes``. Kept: do not write into them."""
    R = cluster.ranks
    times = np.full((R, R), np.inf)
    np.fill_diagonal(times, 0.0)

    def ready(m: Move) -> float | None:
        there = times[m.src, m.chunk]
        return float(there) if np.isfinite(there) else None

    def arrived(m: Move, end: float) -> None:
        times[m.dst, m.chunk] = end

    def cost(m: Move) -> float:
        return cluster.chunk_time(nbytes, inter=m.inter, comm_units=comm_units)

    return Arrivals(times, _run_transfers(moves(pattern, cluster), ready, cost, arrived))


# --------------------------------------------------------------------------------------------
# The order of tiles


def chunk_order(swizzle: str, rank: int, cluster: Cluster, *, kind: str = "ag") -> list[int]:
    """In which order a rank's tiles go through the chunks.

    For "ag" a rank starts with its own chunk. For "rs" it ends with it, since that one needs no
    sending: "rank" is r+1, r+2, …, r.

    Raises:
        ValueError: an unknown swizzle, or a rank out of range.
    """
    R, L = cluster.ranks, cluster.ranks_per_node
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle must be one of {', '.join(SWIZZLES)}: got {swizzle!r}")
    if not 0 <= rank < R:
        raise ValueError(f"rank must be in [0, {R}): got {rank}")
    if swizzle == "none":
        return list(range(R))
    if swizzle == "rank":
        order = [(rank + j) % R for j in range(R)]
    elif swizzle == "rank-reverse":
        order = [(rank - j) % R for j in range(R)]
    else:
        node, local = divmod(rank, L)
        order = [
            ((node + k) % cluster.n_nodes) * L + (local + j) % L
            for k in range(cluster.n_nodes)
            for j in range(L)
        ]
    return order if kind == "ag" else order[1:] + order[:1]


def touched_chunks(row_tile: int, BM: int, M: int, chunk_rows: int) -> range:
    """The chunks whose rows a row tile has: from ⌊m0/M_r⌋ to ⌊(m1−1)/M_r⌋."""
    m0 = row_tile * BM
    m1 = min(m0 + BM, M)
    return range(m0 // chunk_rows, (m1 - 1) // chunk_rows + 1)


class TileOrder(NamedTuple):
    """A rank's tiles in the order in which they run.

    Attributes:
        rows: (n,) row tiles.
        cols: (n,) column tiles.
        place: (n,) place in the order of chunks that decides a tile's turn.
    """

    rows: np.ndarray
    cols: np.ndarray
    place: np.ndarray


def tile_order(op: GEMM, cluster: Cluster, swizzle: str, rank: int) -> TileOrder:
    """Row tiles by their chunk's turn, in groups of ``GROUP_M`` inside a chunk.

    A tile of two chunks waits for the later arrival ("ag"), or serves the earlier send ("rs").
    """
    BM, BN = op.tile
    turn = {c: i for i, c in enumerate(chunk_order(swizzle, rank, cluster, kind=op.kind))}
    down, across = -(-op.M // BM), -(-op.columns(cluster) // BN)
    rows_of = op.chunk_rows(cluster)
    pick = max if op.kind == "ag" else min
    place = np.array(
        [pick(turn[c] for c in touched_chunks(t, BM, op.M, rows_of)) for t in range(down)]
    )
    by_turn = np.argsort(place, kind="stable")
    rows, cols = [], []
    start = 0
    while start < down:
        same = by_turn[start : start + GROUP_M]
        same = same[place[same] == place[same[0]]]
        rows.append(np.tile(same, across))
        cols.append(np.repeat(np.arange(across), len(same)))
        start += len(same)
    all_rows = np.concatenate(rows)
    return TileOrder(all_rows, np.concatenate(cols), place[all_rows])


# --------------------------------------------------------------------------------------------
# The simulator


class Bounds(NamedTuple):
    """What no schedule can beat, and what one without overlap takes.

    Attributes:
        lower: of the makespan, with one chunk a transfer.
        sequential: collective and product one after the other.
        compute: ⌈tiles/S⌉ t_c.
        communicate: the collective alone.
    """

    lower: float
    sequential: float
    compute: float
    communicate: float


def bounds(op: GEMM, cluster: Cluster, *, pattern: str = "pull") -> Bounds:
    """Bounds on the makespan: max(T_comp, T_comm + T_comp/R) for both kinds."""
    BM, BN = op.tile
    tiles = -(-op.M // BM) * -(-op.columns(cluster) // BN)
    units = cluster.units - op.comm_units
    if units < 1:
        raise ValueError(f"comm_units must leave a unit of {cluster.units}: got {op.comm_units}")
    compute = math.ceil(tiles / units) * cluster.tile_time(BM, BN, op.inner(cluster))
    R = cluster.ranks
    if R == 1:
        return Bounds(compute, compute, compute, 0.0)
    nbytes = op.chunk_bytes(cluster)
    comm = float(arrivals(pattern, cluster, nbytes=nbytes, comm_units=op.comm_units).times.max())
    return Bounds(max(compute, comm + compute / R), comm + compute, compute, comm)


@dataclass(frozen=True)
class SimResult:
    """A simulated run.

    Attributes:
        makespan: time at which the slowest rank has everything.
        units: one a rank: (n, 4) of unit, start, end, chunk (or operator) of each tile.
        transfers: the collective's transfers.
        bounds: of the problem; None for a task graph.
        order: names of what the last column of ``units`` counts.
    """

    makespan: float
    units: list[np.ndarray]
    transfers: list[Timed]
    bounds: Bounds | None
    order: tuple[str, ...] = ()

    @property
    def overlap_efficiency(self) -> float:
        """(T_seq − T)/min(T_comp, T_comm): 1 hides all that can be hidden, 0 nothing."""
        least = min(self.bounds.compute, self.bounds.communicate)
        return (self.bounds.sequential - self.makespan) / least if least else 0.0

    def busy(self, times: np.ndarray, rank: int = 0) -> np.ndarray:
        """How many units of a rank work at each of some times."""
        start, end = np.sort(self.units[rank][:, 1]), np.sort(self.units[rank][:, 2])
        return np.searchsorted(start, times, "right") - np.searchsorted(end, times, "right")


def _waves(ready: np.ndarray, units: int, t_c: float, begin: float = 0.0) -> np.ndarray:
    """Round robin: unit u runs tiles u, u+S, …; (n, 3) of unit, start, end."""
    n = len(ready)
    free = np.full(units, begin)
    out = np.empty((n, 3))
    for first in range(0, n, units):
        some = ready[first : first + units]
        start = np.maximum(free[: len(some)], some)
        free[: len(some)] = start + t_c
        out[first : first + units] = np.stack(
            [np.arange(len(some)), start, free[: len(some)]], axis=1
        )
    return out


POLICIES = ("static", "chunked", "sequential")


def simulate(
    program: "GEMM | TaskGraph",
    cluster: Cluster,
    *,
    swizzle: str = "auto",
    policy: str = "static",
    pattern: str = "pull",
) -> SimResult:
    """When everything is done, and who did what until then.

    Args:
        program: a split product, or a graph of tasks.
        cluster: the machine.
        swizzle: order of chunks, one of ``SWIZZLES``; "auto" takes the best. Products only.
        policy: of products: "static", one persistent kernel, tiles dealt to units in turn;
            "chunked", a kernel for each chunk; "sequential", no overlap. Of graphs: "kernels", an
            operator after the other with a launch each; "graph", without launches; "static";
            "dynamic", a queue of ready tiles.
        pattern: how an all-gather moves its chunks, one of ``PATTERNS``. Products only.

    Raises:
        ValueError: an unknown name, or rows that ranks do not divide.
    """
    if isinstance(program, TaskGraph):
        return _simulate_tasks(program, cluster, policy)
    _check_pattern(pattern)
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}: got {policy!r}")
    if swizzle == "auto":
        swizzle = best_swizzle(program, cluster, policy=policy, pattern=pattern)
    limit = bounds(program, cluster, pattern=pattern)
    run = _simulate_ag if program.kind == "ag" else _simulate_rs
    return run(program, cluster, swizzle, policy, pattern, limit)


def best_swizzle(
    op: GEMM, cluster: Cluster, *, policy: str = "static", pattern: str = "pull"
) -> str:
    """The order with the least simulated makespan."""
    options = {"policy": policy, "pattern": pattern}
    return min(SWIZZLES, key=lambda s: simulate(op, cluster, swizzle=s, **options).makespan)


def _simulate_ag(
    op: GEMM, cluster: Cluster, swizzle: str, policy: str, pattern: str, limit: Bounds
) -> SimResult:
    BM, BN = op.tile
    t_c = cluster.tile_time(BM, BN, op.inner(cluster))
    S, R = cluster.units - op.comm_units, cluster.ranks
    came = arrivals(pattern, cluster, nbytes=op.chunk_bytes(cluster), comm_units=op.comm_units)
    rows_of = op.chunk_rows(cluster)
    spans = [touched_chunks(t, BM, op.M, rows_of) for t in range(-(-op.M // BM))]
    units, ends = [], []
    for r in range(R):
        order = tile_order(op, cluster, swizzle, r)
        by_row = np.array([max(came.times[r, c] for c in span) for span in spans])
        ready = by_row[order.rows]
        if policy == "sequential":
            ready = np.full(len(ready), came.times[r].max())
        chunk = np.array([span[0] for span in spans])[order.rows]
        if policy == "chunked":
            parts, free = [], 0.0
            for place in range(R):
                mine = ready[order.place == place]
                if not len(mine):
                    continue
                begin = max(free, mine.max()) + cluster.launch
                parts.append(_waves(np.zeros(len(mine)), S, t_c, begin))
                free = parts[-1][:, 2].max()
            table = np.concatenate(parts)
        else:
            table = _waves(ready, S, t_c)
        units.append(np.column_stack([table, chunk]))
        ends.append(table[:, 2].max())
    return SimResult(float(max(ends)), units, came.transfers, limit)


def _simulate_rs(
    op: GEMM, cluster: Cluster, swizzle: str, policy: str, pattern: str, limit: Bounds
) -> SimResult:
    """Finished chunks are pushed to their owner, one after the other, through both ports."""
    BM, BN = op.tile
    t_c = cluster.tile_time(BM, BN, op.inner(cluster))
    S, R = cluster.units - op.comm_units, cluster.ranks
    rows_of = op.chunk_rows(cluster)
    spans = [touched_chunks(t, BM, op.M, rows_of) for t in range(-(-op.M // BM))]
    first, last = (np.array([span[i] for span in spans]) for i in (0, -1))
    units, ready, plan, ends = [], {}, [], []
    for r in range(R):
        order = tile_order(op, cluster, swizzle, r)
        if policy == "chunked":
            parts, free = [], 0.0
            for place in range(R):
                n = int((order.place == place).sum())
                if n:
                    parts.append(_waves(np.zeros(n), S, t_c, free + cluster.launch))
                    free = parts[-1][:, 2].max()
            table = np.concatenate(parts)
        else:
            table = _waves(np.zeros(len(order.rows)), S, t_c)
        units.append(np.column_stack([table, first[order.rows]]))
        ends.append(table[:, 2].max())
        for c in range(R):
            mine = (first[order.rows] <= c) & (last[order.rows] >= c)
            ready[r, c] = float(table[mine, 2].max())
            if policy == "sequential":
                ready[r, c] = float(ends[-1])
        sends = [c for c in chunk_order(swizzle, r, cluster, kind="rs") if c != r]
        if policy == "sequential":  # a collective of its own, whose steps collide nowhere
            sends = chunk_order("rank", r, cluster, kind="rs")[:-1]
        crosses = [cluster.node(r) != cluster.node(c) for c in sends]
        plan += [Move(c, r, c, r, x) for c, x in zip(sends, crosses, strict=True)]
    nbytes = op.chunk_bytes(cluster)
    done = _run_transfers(
        plan,
        lambda m: ready[m.src, m.chunk],
        lambda m: cluster.chunk_time(nbytes, inter=m.inter, comm_units=op.comm_units),
        lambda m, end: None,
    )
    return SimResult(float(max(ends + [t.end for t in done])), units, done, limit)


# --------------------------------------------------------------------------------------------
# Tasks


class TaskOp(NamedTuple):
    """An operator cut into tiles.

    Attributes:
        tiles: how many.
        time: of one tile.
        needs: operators whose results it reads.
    """

    tiles: int
    time: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskGraph:
    """Operators, and which row blocks of one wait for which of another.

    Tile i of an operator with n tiles belongs to row block ⌊B i/n⌋ and waits for all tiles of that
    row block in each operator that it needs (of the nearest one before it where that block has no
    tile).

    Attributes:
        ops: operator by name.
        row_blocks: B.

    Raises:
        ValueError: a cycle, an operator that is needed and not there, or sizes out of range.
    """

    ops: Mapping[str, TaskOp]
    row_blocks: int = 8
    order: tuple[str, ...] = field(init=False)

    def __post_init__(self):
        if self.row_blocks < 1:
            raise ValueError(f"row_blocks must be >= 1: got {self.row_blocks}")
        for name, op in self.ops.items():
            if op.tiles < 1 or not op.time >= 0:
                raise ValueError(f"ops must have tiles >= 1 and time >= 0: got {name} = {op}")
            missing = [n for n in op.needs if n not in self.ops]
            if missing:
                raise ValueError(f"ops must hold what they need: {name} needs {missing[0]!r}")
        order: list[str] = []
        left = dict(self.ops)
        while left:
            free = [name for name, op in left.items() if all(n in order for n in op.needs)]
            if not free:
                raise ValueError(f"ops must not need one another in a cycle: {', '.join(left)}")
            order.append(free[0])
            del left[free[0]]
        object.__setattr__(self, "order", tuple(order))

    def block(self, name: str, tile: int) -> int:
        """The row block of a tile."""
        return self.row_blocks * tile // self.ops[name].tiles

    def blocks(self, name: str) -> list[int]:
        """Tiles of each row block: (B,)."""
        count = [0] * self.row_blocks
        for i in range(self.ops[name].tiles):
            count[self.block(name, i)] += 1
        return count

    def waits(self, name: str, tile: int) -> list[tuple[str, int]]:
        """Counters (operator, row block) that a tile waits for."""
        b, found = self.block(name, tile), []
        for need in self.ops[name].needs:
            count = self.blocks_of[need]
            nearest = next((c for c in range(b, -1, -1) if count[c]), None)
            if nearest is not None:
                found.append((need, nearest))
        return found

    @property
    def blocks_of(self) -> dict[str, list[int]]:
        """Tiles of each row block, by operator."""
        return _blocks_of(self.row_blocks, tuple((n, op.tiles) for n, op in self.ops.items()))

    def critical_path(self) -> float:
        """Time with units without number."""
        done: dict[str, float] = {}
        for name in self.order:
            op = self.ops[name]
            done[name] = op.time + max((done[n] for n in op.needs), default=0.0)
        return max(done.values())


@cache
def _blocks_of(row_blocks: int, sizes: tuple[tuple[str, int], ...]) -> dict[str, list[int]]:
    counts = {}
    for name, tiles in sizes:
        count = [0] * row_blocks
        for i in range(tiles):
            count[row_blocks * i // tiles] += 1
        counts[name] = count
    return counts


DECODE = (
    ("qkv", 40, 1.0),
    ("attention", 66, 2.0),
    ("output", 32, 1.0),
    ("norm 1", 8, 0.2),
    ("gate-up", 150, 1.0),
    ("down", 32, 2.0),
    ("norm 2", 8, 0.2),
)
"""Operators of one decode layer: name, tiles, time of a tile."""


def decode_graph(layers: int = 8, *, row_blocks: int = 8) -> TaskGraph:
    """Decode layers one after the other, each operator needing the one before it."""
    ops: dict[str, TaskOp] = {}
    before: tuple[str, ...] = ()
    for layer in range(layers):
        for name, tiles, time in DECODE:
            ops[f"{layer} {name}"] = TaskOp(tiles, time, before)
            before = (f"{layer} {name}",)
    return TaskGraph(ops, row_blocks)


TASK_POLICIES = ("kernels", "graph", "static", "dynamic")


def _simulate_tasks(graph: TaskGraph, cluster: Cluster, policy: str) -> SimResult:
    if policy not in TASK_POLICIES:
        raise ValueError(f"policy must be one of {', '.join(TASK_POLICIES)}: got {policy!r}")
    S = cluster.units
    if policy in ("kernels", "graph"):
        now, parts = 0.0, []
        for n, name in enumerate(graph.order):
            op = graph.ops[name]
            now += cluster.launch if policy == "kernels" else 0.0
            table = _waves(np.zeros(op.tiles), S, op.time, now)
            parts.append(np.column_stack([table, np.full(op.tiles, n)]))
            now = float(table[:, 2].max())
        return SimResult(now, [np.concatenate(parts)], [], None, graph.order)
    run = _tasks_static if policy == "static" else _tasks_dynamic
    table = run(graph, S)
    return SimResult(float(table[:, 2].max()), [table], [], None, graph.order)


def megakernel(graph: TaskGraph, cluster: Cluster, *, policy: str = "dynamic") -> SimResult:
    """All operators in one persistent kernel: "dynamic" or "static" scheduling of its tasks."""
    if policy not in ("static", "dynamic"):
        raise ValueError(f"policy must be 'static' or 'dynamic': got {policy!r}")
    return simulate(graph, cluster, policy=policy)


def _tasks_static(graph: TaskGraph, units: int) -> np.ndarray:
    """Task k of the topological order on unit k mod S, whoever is free."""
    free = np.zeros(units)
    done: dict[tuple[str, int], float] = {}
    rows = []
    k = 0
    for n, name in enumerate(graph.order):
        op = graph.ops[name]
        for tile in range(op.tiles):
            unit = k % units
            start = max([float(free[unit])] + [done[w] for w in graph.waits(name, tile)])
            free[unit] = end = start + op.time
            key = (name, graph.block(name, tile))
            done[key] = max(done.get(key, 0.0), end)
            rows.append((unit, start, end, n))
            k += 1
    return np.array(rows)


def _tasks_dynamic(graph: TaskGraph, units: int) -> np.ndarray:
    """A scoreboard of counters, and a queue of tiles whose counters are full."""
    left = {
        (name, b): count
        for name in graph.order
        for b, count in enumerate(graph.blocks_of[name])
        if count
    }
    number = {name: n for n, name in enumerate(graph.order)}
    pending: dict[tuple[str, int], int] = {}
    waiting: dict[tuple[str, int], list[tuple[str, int]]] = {}
    queue: list[tuple[int, int]] = []  # by operator, then tile
    for name in graph.order:
        for tile in range(graph.ops[name].tiles):
            waits = graph.waits(name, tile)
            if waits:
                pending[name, tile] = len(waits)
                for w in waits:
                    waiting.setdefault(w, []).append((name, tile))
            else:
                heapq.heappush(queue, (number[name], tile))
    idle = list(range(units))
    running: list[tuple[float, int, int, int]] = []
    rows, now = [], 0.0
    while queue or running:
        while queue and idle:
            n, tile = heapq.heappop(queue)
            unit = heapq.heappop(idle)
            end = now + graph.ops[graph.order[n]].time
            heapq.heappush(running, (end, unit, n, tile))
            rows.append((unit, now, end, n))
        now = running[0][0]
        while running and running[0][0] <= now:
            _, unit, n, tile = heapq.heappop(running)
            heapq.heappush(idle, unit)
            key = (graph.order[n], graph.block(graph.order[n], tile))
            left[key] -= 1
            for task in waiting.get(key, ()) if not left[key] else ():
                pending[task] -= 1
                if not pending[task]:
                    heapq.heappush(queue, (number[task[0]], task[1]))
    return np.array(rows)


# --------------------------------------------------------------------------------------------
# The executor: ranks as coroutines, with memories and signals of their own


class Token(NamedTuple):
    """Proof that a wait is over; loads that depend on it take it."""

    signal: str
    index: int
    value: int
    rank: int


class _Wait(NamedTuple):
    signal: str
    index: int
    value: int
    count: int
    rank: int


class Unmet(NamedTuple):
    """A wait that nobody will end.

    Attributes:
        rank: who waits.
        signal: for which array of signals,
        index: at which place,
        value: for which value,
        found: and what it holds.
    """

    rank: int
    signal: str
    index: int
    value: int
    found: int


class DeadlockError(RuntimeError):
    """All ranks wait and nothing is on its way.

    Attributes:
        unmet: the waits, a list of :class:`Unmet`.
    """

    def __init__(self, unmet: list[Unmet]):
        self.unmet = unmet
        lines = "; ".join(
            f"rank {u.rank} waits for {u.signal}[{u.index}] >= {u.value}, it is {u.found}"
            for u in unmet
        )
        super().__init__(f"no rank can go on: {lines}")


class Trace(NamedTuple):
    """What a run did.

    Attributes:
        steps: how often the executor chose who goes on.
        elements: (R, R) int64, elements that went from one rank to another.
        chunks: (R, R) int64, transfers between them.
    """

    steps: int
    elements: np.ndarray
    chunks: np.ndarray


class _Transfer:
    """A copy under way: first the data, then, some time later, the signal."""

    def __init__(self, dst, src, deliver):
        self.dst, self.src, self.deliver = dst, src, deliver
        self.copied = False

    def step(self) -> bool:
        """Do the next half; True when it was the last."""
        if not self.copied:
            self.dst.copy_(self.src)
            self.copied = True
            return self.deliver is None
        self.deliver()
        return True


class World:
    """R ranks in one process. Each has tensors and signals of its own; a copy between ranks is
    under way for a while, and the order of everything that no signal orders is random.

    Args:
        R: ranks.
        seed: of the order in which ranks and copies get on.
        drop: number of a signal that gets lost, counted from 0; None loses none. For tests.

    Fresh tensors hold NaN, so that what is read before it came shows.

    Raises:
        ValueError: no ranks.
    """

    def __init__(self, R: int, seed: int = 0, *, drop: int | None = None):
        if R < 1:
            raise ValueError(f"R must be >= 1: got {R}")
        self.R, self.drop = R, drop
        self._random = random.Random(seed)
        self._buffers: dict[str, list[torch.Tensor]] = {}
        self._signals: dict[str, torch.Tensor] = {"barrier": torch.zeros(R, 1, dtype=torch.int32)}
        self._pending: list[_Transfer] = []
        self._delivered = 0
        self._elements = np.zeros((R, R), dtype=np.int64)
        self._chunks = np.zeros((R, R), dtype=np.int64)

    def alloc(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        """A symmetric tensor: one of this shape on each rank."""
        fill = math.nan if dtype.is_floating_point else -1
        self._buffers[name] = [torch.full(shape, fill, dtype=dtype) for _ in range(self.R)]

    def place(self, name: str, shards: Sequence[torch.Tensor]) -> None:
        """Tensors that are on the ranks from the start; their shapes may differ.

        Raises:
            ValueError: not one a rank.
        """
        if len(shards) != self.R:
            raise ValueError(f"shards must be one a rank, {self.R}: got {len(shards)}")
        self._buffers[name] = list(shards)

    def alloc_signals(self, name: str, n: int) -> None:
        """An int32 array of n zeros on each rank."""
        self._signals[name] = torch.zeros(self.R, n, dtype=torch.int32)

    def run(self, programs: Sequence[Sequence[Callable]]) -> tuple[list, Trace]:
        """Run generator functions, each called with its rank's context, until all have ended.

        Args:
            programs: for each rank its coroutines. They yield to let others go on, and yield
                ``ctx.wait(...)`` to stop until a signal has come.

        Returns:
            What each rank's first coroutine returned, and the trace.

        Raises:
            DeadlockError: everybody waits and nothing is under way.
            ValueError: not one list a rank.
        """
        if len(programs) != self.R:
            raise ValueError(f"programs must be one list a rank, {self.R}: got {len(programs)}")
        outputs: list = [None] * self.R
        alive: list[list] = []  # generator, what it waits for, rank, number
        for rank, mine in enumerate(programs):
            for number, program in enumerate(mine):
                alive.append([program(Context(self, rank)), None, rank, number])
        steps = 0
        while alive or self._pending:
            ready = [job for job in alive if self._met(job[1])]
            if not ready and not self._pending:
                raise DeadlockError([self._unmet(job[1]) for job in alive])
            pick = self._random.randrange(len(ready) + len(self._pending))
            steps += 1
            if pick >= len(ready):
                transfer = self._pending[pick - len(ready)]
                if transfer.step():
                    self._pending.remove(transfer)
                continue
            job = ready[pick]
            wait = job[1]
            token = Token(wait.signal, wait.index, wait.value, wait.rank) if wait else None
            try:
                job[1] = job[0].send(token)
            except StopIteration as stop:
                alive.remove(job)
                if job[3] == 0:
                    outputs[job[2]] = stop.value
        return outputs, Trace(steps, self._elements, self._chunks)

    def _met(self, wait: _Wait | None) -> bool:
        if wait is None:
            return True
        values = self._signals[wait.signal][wait.rank]
        return bool((values[wait.index : wait.index + wait.count] >= wait.value).all())

    def _unmet(self, wait: _Wait) -> Unmet:
        values = self._signals[wait.signal][wait.rank].tolist()
        span = range(wait.index, wait.index + wait.count)
        index = next(i for i in span if values[i] < wait.value)
        return Unmet(wait.rank, wait.signal, index, wait.value, values[index])

    def _signal(self, name: str, rank: int, index: int, value: int, op: str) -> None:
        self._check_signal(name, index, 1)
        if op not in ("set", "add"):
            raise ValueError(f"op must be 'set' or 'add': got {op!r}")
        number = self._delivered
        self._delivered += 1
        if number == self.drop:
            return
        if op == "set":
            self._signals[name][rank, index] = value
        else:
            self._signals[name][rank, index] += value

    def _check_signal(self, name: str, index: int, count: int) -> None:
        if name not in self._signals:
            raise ValueError(f"signal must be one of {', '.join(self._signals)}: got {name!r}")
        n = self._signals[name].shape[1]
        if index < 0 or count < 1 or index + count > n:
            raise ValueError(f"index must lie in the {n} signals of {name!r}: got {index}")


class Context:
    """What a rank's coroutine sees of the world."""

    def __init__(self, world: World, rank: int):
        self.world, self.rank, self.R = world, rank, world.R
        self._epoch = 0

    def symm_at(self, name: str, rank: int | None = None) -> torch.Tensor:
        """A rank's tensor of that name; its own without ``rank``."""
        return self.world._buffers[name][self.rank if rank is None else rank]

    def put(
        self,
        dst: torch.Tensor,
        src: torch.Tensor,
        rank: int,
        signal: str | None = None,
        index: int = 0,
        value: int = 1,
        *,
        op: str = "set",
        source: int | None = None,
    ) -> None:
        """Start a copy to a rank, and raise a signal there once the data are visible.

        Args:
            dst: where to, a view of a tensor of ``rank``.
            src: what, read when the copy gets on, not now.
            rank: receiver.
            signal: name of the signals; None raises none.
            index: which one.
            value: what to set it to or add.
            op: "set" or "add".
            source: sender, for a copy that the receiver starts; default this rank.

        Raises:
            ValueError: shapes that differ, a signal that is not there.
        """
        if dst.shape != src.shape:
            raise ValueError(f"dst must have the shape of src: got {dst.shape}, {src.shape}")
        source = self.rank if source is None else source
        deliver = None
        if signal is not None:
            self.world._check_signal(signal, index, 1)

            def deliver():
                self.world._signal(signal, rank, index, value, op)

        if source != rank:
            self.world._elements[source, rank] += src.numel()
            self.world._chunks[source, rank] += 1
        self.world._pending.append(_Transfer(dst, src, deliver))

    def notify(
        self, signal: str, index: int, rank: int, value: int = 1, *, op: str = "set"
    ) -> None:
        """Raise a signal on a rank, after this rank's earlier stores."""
        self.world._signal(signal, rank, index, value, op)

    def wait(self, signal: str, index: int, value: int = 1, count: int = 1) -> _Wait:
        """To be yielded: go on when ``count`` own signals from ``index`` are at least ``value``."""
        self.world._check_signal(signal, index, count)
        return _Wait(signal, index, value, count, self.rank)

    def consume(self, x: torch.Tensor, token: Token) -> torch.Tensor:
        """``x``, ordered behind a wait.

        Raises:
            ValueError: no token of this rank: the wait was not yielded.
        """
        if not isinstance(token, Token) or token.rank != self.rank:
            raise ValueError(f"token must come from a wait that this rank yielded: got {token!r}")
        return x

    def barrier_all(self) -> Generator:
        """``yield from`` it: go on when all ranks have come here."""
        self._epoch += 1
        for rank in range(self.R):
            self.notify("barrier", 0, rank, 1, op="add")
        yield self.wait("barrier", 0, self.R * self._epoch)


# --------------------------------------------------------------------------------------------
# The tile IR


class TileOp(NamedTuple):
    """One operation of a tile task: load_tile, wait, dot, reduce, store_tile, put or notify."""

    kind: str
    args: tuple

    def __str__(self):
        return f"{self.kind} {' '.join(map(str, self.args))}"


class TileTask(NamedTuple):
    """A rectangle of the output and what is done for it.

    Attributes:
        rows: (m0, m1).
        cols: (n0, n1).
        ops: in order.
    """

    rows: tuple[int, int]
    cols: tuple[int, int]
    ops: tuple[TileOp, ...]


PASSES = ("split", "wait", "swizzle", "epilogue")
"""In the order in which they apply."""


@dataclass(frozen=True)
class TileIR:
    """A split product as lists of tile tasks, one list a rank.

    Attributes:
        op: the product.
        cluster: the machine.
        programs: a list of tasks for each rank.
        passes: names of what was applied.
        swizzle: the order that the swizzle pass chose.
    """

    op: GEMM
    cluster: Cluster
    programs: tuple[tuple[TileTask, ...], ...]
    passes: tuple[str, ...] = ()
    swizzle: str = "none"

    def apply(self, name: str, *, swizzle: str = "auto", pattern: str = "pull") -> "TileIR":
        """The IR after one more pass.

        "split" cuts the product into output tiles; "wait" puts before each tile waits for the
        chunks that its rows touch ("ag"), or counts what a chunk still lacks ("rs"); "swizzle"
        orders tiles, by the cost model unless an order is named; "epilogue" makes the last tile
        of a chunk send it ("rs"; nothing to do for "ag").

        Raises:
            ValueError: an unknown pass, or one before its turn.
        """
        if name not in PASSES:
            raise ValueError(f"name must be one of {', '.join(PASSES)}: got {name!r}")
        due = PASSES[len(self.passes)] if len(self.passes) < len(PASSES) else "none"
        if name != due:
            raise ValueError(f"name must be the next pass, {due!r}: got {name!r}")
        made = {
            "split": self._split,
            "wait": self._wait,
            "swizzle": lambda: self._swizzle(swizzle, pattern),
            "epilogue": self._epilogue,
        }[name]()
        return replace(made, passes=(*self.passes, name))

    def _each(self, change: Callable[[int, tuple[TileTask, ...]], Iterable[TileTask]]) -> "TileIR":
        programs = tuple(tuple(change(r, tasks)) for r, tasks in enumerate(self.programs))
        return replace(self, programs=programs)

    def _split(self) -> "TileIR":
        BM, BN = self.op.tile
        N = self.op.columns(self.cluster)

        def cut(_: int, tasks: tuple[TileTask, ...]) -> list[TileTask]:
            return [
                TileTask((m, min(m + BM, self.op.M)), (n, min(n + BN, N)), tasks[0].ops)
                for m in range(0, self.op.M, BM)
                for n in range(0, N, BN)
            ]

        return self._each(cut)

    def chunks(self, task: TileTask) -> range:
        """The chunks whose rows a task has."""
        size = self.op.chunk_rows(self.cluster)
        return range(task.rows[0] // size, (task.rows[1] - 1) // size + 1)

    def _wait(self) -> "TileIR":
        def attach(rank: int, tasks: tuple[TileTask, ...]) -> list[TileTask]:
            made = []
            for task in tasks:
                if self.op.kind == "ag":
                    ops = tuple(
                        TileOp("wait", ("chunk", c)) for c in self.chunks(task) if c != rank
                    )
                    made.append(task._replace(ops=ops + task.ops))
                else:
                    ops = tuple(TileOp("notify", ("left", c)) for c in self.chunks(task))
                    made.append(task._replace(ops=task.ops + ops))
            return made

        return self._each(attach)

    def _swizzle(self, swizzle: str, pattern: str) -> "TileIR":
        if swizzle == "auto":
            swizzle = best_swizzle(self.op, self.cluster, pattern=pattern)
        across = -(-self.op.columns(self.cluster) // self.op.tile[1])

        def sort(rank: int, tasks: tuple[TileTask, ...]) -> list[TileTask]:
            order = tile_order(self.op, self.cluster, swizzle, rank)
            return [tasks[m * across + n] for m, n in zip(order.rows, order.cols, strict=True)]

        return replace(self._each(sort), swizzle=swizzle)

    def _epilogue(self) -> "TileIR":
        if self.op.kind == "ag":
            return self

        def fuse(rank: int, tasks: tuple[TileTask, ...]) -> list[TileTask]:
            last = {c: i for i, task in enumerate(tasks) for c in self.chunks(task)}
            made = []
            for i, task in enumerate(tasks):
                done = [c for c in self.chunks(task) if last[c] == i]
                made.append(
                    task._replace(ops=task.ops + tuple(TileOp("put", ("chunk", c)) for c in done))
                )
            own = self.op.chunk_rows(self.cluster)
            sums = tuple(TileOp("wait", ("sum", s)) for s in range(self.cluster.ranks))
            rows = (rank * own, (rank + 1) * own)
            ops = (*sums, TileOp("reduce", ("chunk", rank)), TileOp("store_tile", ("C",)))
            return [*made, TileTask(rows, (0, self.op.N), ops)]

        return self._each(fuse)

    def text(self, rank: int = 0, *, limit: int = 6) -> str:
        """The first tasks of a rank, readable."""
        tasks = self.programs[rank]
        head = f"{self.op.kind}-gemm rank {rank}: {len(tasks)} tasks, {self.swizzle} order"
        lines = [
            f"  [{t.rows[0]}:{t.rows[1]}, {t.cols[0]}:{t.cols[1]}] " + "; ".join(map(str, t.ops))
            for t in tasks[:limit]
        ]
        more = [f"  … {len(tasks) - limit} more"] if len(tasks) > limit else []
        return "\n".join([head, *lines, *more])


def lower(op: GEMM, cluster: Cluster) -> TileIR:
    """The product as one task a rank, before any pass."""
    op.chunk_rows(cluster)
    ops = (
        TileOp("load_tile", ("A",)),
        TileOp("load_tile", ("B",)),
        TileOp("dot", ("A", "B")),
        TileOp("store_tile", ("C" if op.kind == "ag" else "partial",)),
    )
    whole = TileTask((0, op.M), (0, op.columns(cluster)), ops)
    return TileIR(op, cluster, ((whole,),) * cluster.ranks)


def _compile(op: GEMM, cluster: Cluster, swizzle: str, pattern: str) -> TileIR:
    ir = lower(op, cluster)
    for name in PASSES:
        ir = ir.apply(name, swizzle=swizzle, pattern=pattern)
    return ir


def _tile_program(ir: TileIR, tile_k: int, *, deterministic: bool = True) -> Callable:
    """A coroutine that carries out its rank's tasks."""
    kind, size = ir.op.kind, ir.op.chunk_rows(ir.cluster)

    def program(ctx: Context) -> Generator:
        A, B = ctx.symm_at("A"), ctx.symm_at("B")
        C = ctx.symm_at("C")
        partial = ctx.symm_at("partial") if kind == "rs" else None
        total = None
        tasks = ir.programs[ctx.rank]
        counts = (op.args[1] for task in tasks for op in task.ops if op.kind == "notify")
        tiles = Counter(counts)  # that a chunk needs before it is sent
        for task in tasks:
            rows, cols = slice(*task.rows), slice(*task.cols)
            loaded = {}
            summed: list[int] = []
            for step in task.ops:
                what = step.args[0]
                if step.kind == "wait":
                    name = "arrived" if what == "chunk" else "sums"
                    if what == "sum" and not deterministic:
                        continue
                    token = yield ctx.wait(name, step.args[1])
                    ctx.consume(A, token)
                    if what == "sum":
                        summed.append(step.args[1])
                elif step.kind == "load_tile":
                    loaded[what] = A[rows] if what == "A" else B[:, cols]
                elif step.kind == "dot":
                    left, right = (loaded[n] for n in step.args)
                    total = left.new_zeros(len(left), right.shape[1])
                    for k in range(0, left.shape[1], tile_k):
                        total += left[:, k : k + tile_k] @ right[k : k + tile_k]
                elif step.kind == "store_tile":
                    if kind == "rs" and what == "C":
                        C.copy_(total)
                    else:
                        (C if what == "C" else partial)[rows, cols] = total
                elif step.kind == "notify":
                    ctx.notify("left", step.args[1], ctx.rank, op="add")
                elif step.kind == "put":
                    c = step.args[1]
                    yield ctx.wait("left", c, tiles[c])
                    dst = ctx.symm_at("inbox", c)[ctx.rank]
                    ctx.put(dst, partial[c * size : (c + 1) * size], c, "sums", ctx.rank)
                elif step.kind == "reduce":
                    inbox = ctx.symm_at("inbox")
                    if deterministic:
                        total = inbox[0].clone()
                        for s in summed[1:]:
                            total += inbox[s]
                    else:
                        total = yield from _sum_as_they_come(ctx, inbox)
            yield  # another rank, or a copy, may get on between two tiles
        return C

    return program


def _sum_as_they_come(ctx: Context, inbox: torch.Tensor) -> Generator:
    """Add what has come, in the order of its coming."""
    total, left = torch.zeros_like(inbox[0]), set(range(ctx.R))
    while left:
        values = ctx.world._signals["sums"][ctx.rank]
        here = [s for s in sorted(left) if values[s] >= 1]
        for s in here:
            total += inbox[s]
            left.discard(s)
        if left and not here:
            # any of them will do; the lowest is waited for only when nothing else is under way
            yield ctx.wait("sums", min(left)) if not ctx.world._pending else None
    return total


def _gather_program(pattern: str, cluster: Cluster, rows: int) -> Callable:
    """A coroutine that starts its rank's transfers of an all-gather."""
    plan = moves(pattern, cluster)

    def program(ctx: Context) -> Generator:
        for m in plan:
            if m.initiator != ctx.rank:
                continue
            if m.chunk != m.src:  # to be passed on, once it is here
                yield ctx.wait("arrived", m.chunk)
            part = slice(m.chunk * rows, (m.chunk + 1) * rows)
            dst, src = ctx.symm_at("A", m.dst)[part], ctx.symm_at("A", m.src)[part]
            ctx.put(dst, src, m.dst, "arrived", m.chunk, source=m.src)
            yield

    return program


# --------------------------------------------------------------------------------------------
# Operators


def _flat(R: int) -> Cluster:
    """One node with a few units: what an operator without a machine is ordered for."""
    return Cluster(1, R, 4, 1e9, 1e9, 1e9, 1e-6, 0.0)


def _check_shards(name: str, shards: Sequence[torch.Tensor], R: int | None = None) -> None:
    if not len(shards) or (R is not None and len(shards) != R):
        raise ValueError(
            f"{name} must hold one tensor a rank{f', {R}' if R else ''}: got {len(shards)}"
        )
    first = shards[0]
    for i, shard in enumerate(shards):
        if shard.ndim != 2 or shard.shape != first.shape or shard.dtype != first.dtype:
            raise ValueError(
                f"{name} must be matrices of one shape and dtype: rank {i} has "
                f"{tuple(shard.shape)} {shard.dtype}, rank 0 {tuple(first.shape)} {first.dtype}"
            )
        if not shard.is_floating_point():
            raise ValueError(f"{name} must be floating-point: got {shard.dtype}")


def _pad_rows(shards: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    sizes = [len(s) for s in shards]
    most = max(sizes)
    return [F.pad(s, (0, 0, 0, most - len(s))) for s in shards], sizes


def all_gather(
    shards: Sequence[torch.Tensor],
    *,
    cluster: Cluster | None = None,
    pattern: str = "pull",
    seed: int = 0,
    drop: int | None = None,
) -> tuple[list[torch.Tensor], Trace]:
    """Every rank gets the rows of all: (R·m, d) each.

    Args:
        shards: (m, d) of each rank.
        cluster: which ranks share a node; default all.
        pattern: one of ``PATTERNS``.
        seed: of the interleaving.
        drop: a signal to lose, for tests.

    Raises:
        ValueError: shapes that differ.
        DeadlockError: a signal was lost.
    """
    R = len(shards)
    _check_shards("shards", shards)
    cluster = _flat(R) if cluster is None else cluster
    if cluster.ranks != R:
        raise ValueError(f"cluster must have {R} ranks: got {cluster.ranks}")
    rows = len(shards[0])
    world = World(R, seed, drop=drop)
    world.alloc("A", R * rows, shards[0].shape[1], dtype=shards[0].dtype)
    world.alloc_signals("arrived", R)

    def wait_for_all(ctx: Context) -> Generator:
        for c in range(R):
            if c != ctx.rank:
                yield ctx.wait("arrived", c)
        return ctx.symm_at("A")

    for r, shard in enumerate(shards):
        world._buffers["A"][r][r * rows : (r + 1) * rows] = shard
    gather = _gather_program(pattern, cluster, rows)
    return world.run([[wait_for_all, gather]] * R)


def ag_gemm(
    a_shards: Sequence[torch.Tensor],
    b_shards: Sequence[torch.Tensor],
    *,
    tile: tuple[int, int, int] = (64, 64, 32),
    swizzle: str = "auto",
    pattern: str = "pull",
    cluster: Cluster | None = None,
    seed: int = 0,
    pad: bool = False,
    drop: int | None = None,
) -> list[torch.Tensor]:
    """All-gather the rows of A, multiply by a rank's columns of B, tile by tile as rows arrive.

    Args:
        a_shards: (M/R, K) of each rank.
        b_shards: (K, N/R) of each rank, dtype of A.
        tile: (BM, BN, BK), powers of two >= 16.
        swizzle: one of ``SWIZZLES``, or "auto" for what the simulator finds best.
        pattern: one of ``PATTERNS``.
        cluster: which ranks share a node; default all.
        seed: of the interleaving.
        pad: fill shards of fewer rows with zeros, which are cut off again.
        drop: a signal to lose, for tests.

    Returns:
        (M, N/R) for each rank, added up in the dtype of the shards.

    Raises:
        ValueError: shapes that do not fit.
        DeadlockError: a signal was lost.
    """
    R = len(a_shards)
    sizes = None
    if pad:
        a_shards, sizes = _pad_rows(a_shards)
    _check_shards("a_shards", a_shards)
    _check_shards("b_shards", b_shards, R)
    (rows, K), (K_b, N) = a_shards[0].shape, b_shards[0].shape
    if K_b != K or a_shards[0].dtype != b_shards[0].dtype:
        raise ValueError(
            f"b_shards must be ({K}, N/R) {a_shards[0].dtype}: got {tuple(b_shards[0].shape)} "
            f"{b_shards[0].dtype}"
        )
    _check_tile(tile)
    cluster = _flat(R) if cluster is None else cluster
    op = GEMM("ag", R * rows, R * N, K, tile=tuple(tile[:2]))
    ir = _compile(op, cluster, swizzle, pattern)
    world = World(R, seed, drop=drop)
    world.alloc("A", R * rows, K, dtype=a_shards[0].dtype)
    world.alloc("C", R * rows, N, dtype=a_shards[0].dtype)
    world.place("B", b_shards)
    world.alloc_signals("arrived", R)
    for r, shard in enumerate(a_shards):
        world._buffers["A"][r][r * rows : (r + 1) * rows] = shard
    jobs = [_tile_program(ir, tile[2]), _gather_program(pattern, cluster, rows)]
    outputs, _ = world.run([jobs] * R)
    if sizes is None:
        return outputs
    keep = torch.cat([torch.arange(n) + r * rows for r, n in enumerate(sizes)])
    return [C[keep] for C in outputs]


def gemm_rs(
    a_shards: Sequence[torch.Tensor],
    b_shards: Sequence[torch.Tensor],
    *,
    tile: tuple[int, int, int] = (64, 64, 32),
    swizzle: str = "auto",
    cluster: Cluster | None = None,
    seed: int = 0,
    pad: bool = False,
    deterministic: bool = True,
    drop: int | None = None,
) -> list[torch.Tensor]:
    """Multiply parts of the inner dimension, reduce over ranks and scatter rows.

    A chunk is sent when its last tile is done, and added up where it belongs.

    Args:
        a_shards: (M, K/R) of each rank, M a multiple of R.
        b_shards: (K/R, N) of each rank.
        tile: as in :func:`ag_gemm`.
        swizzle: one of ``SWIZZLES``, or "auto".
        cluster: which ranks share a node; default all.
        seed: of the interleaving.
        pad: fill up rows to a multiple of R, and cut them off again.
        deterministic: add by source rank; otherwise in the order of coming.
        drop: a signal to lose, for tests.

    Returns:
        (M/R, N) for each rank (the last ones shorter with ``pad``).

    Raises:
        ValueError: shapes that do not fit, M not a multiple of R.
        DeadlockError: a signal was lost.
    """
    R = len(a_shards)
    _check_shards("a_shards", a_shards)
    _check_shards("b_shards", b_shards, R)
    M = len(a_shards[0])
    if pad and M % R:
        a_shards = [F.pad(a, (0, 0, 0, -M % R)) for a in a_shards]
    (rows, K), (K_b, N) = a_shards[0].shape, b_shards[0].shape
    if rows % R:
        raise ValueError(f"a_shards must have a multiple of {R} rows, or pad=True: got {rows}")
    if K_b != K or a_shards[0].dtype != b_shards[0].dtype:
        raise ValueError(
            f"b_shards must be ({K}, N) {a_shards[0].dtype}: got {tuple(b_shards[0].shape)} "
            f"{b_shards[0].dtype}"
        )
    _check_tile(tile)
    cluster = _flat(R) if cluster is None else cluster
    op = GEMM("rs", rows, N, R * K, tile=tuple(tile[:2]))
    ir = _compile(op, cluster, swizzle, "pull")
    dtype = a_shards[0].dtype
    world = World(R, seed, drop=drop)
    world.place("A", a_shards)
    world.place("B", b_shards)
    world.alloc("partial", rows, N, dtype=dtype)
    world.alloc("inbox", R, rows // R, N, dtype=dtype)
    world.alloc("C", rows // R, N, dtype=dtype)
    world.alloc_signals("sums", R)
    world.alloc_signals("left", R)
    program = _tile_program(ir, tile[2], deterministic=deterministic)
    outputs, _ = world.run([[program]] * R)
    if rows == M:
        return outputs
    size = rows // R
    return [C[: max(0, min(size, M - r * size))] for r, C in enumerate(outputs)]


def gemm_allreduce(
    a_shards: Sequence[torch.Tensor],
    b_shards: Sequence[torch.Tensor],
    *,
    tile: tuple[int, int, int] = (64, 64, 32),
    one_shot: bool | None = None,
    seed: int = 0,
    drop: int | None = None,
) -> list[torch.Tensor]:
    """Multiply parts of the inner dimension; every rank gets the whole sum.

    Args:
        a_shards: (M, K/R) of each rank.
        b_shards: (K/R, N) of each rank.
        tile: as in :func:`ag_gemm`.
        one_shot: every rank sends its whole partial product to all others, one step in place of
            two; None does so up to 64 rows. Otherwise reduce-scatter, then all-gather.
        seed: of the interleaving.
        drop: a signal to lose, for tests.

    Returns:
        (M, N) for each rank, bit for bit the same on all.

    Raises:
        ValueError: shapes that do not fit.
        DeadlockError: a signal was lost.
    """
    R = len(a_shards)
    _check_shards("a_shards", a_shards)
    M = len(a_shards[0])
    if one_shot is None:
        one_shot = M <= 64
    if not one_shot:
        parts = gemm_rs(a_shards, b_shards, tile=tile, seed=seed, pad=True, drop=drop)
        size = len(parts[0])
        filled = [F.pad(p, (0, 0, 0, size - len(p))) for p in parts]
        whole, _ = all_gather(filled, seed=seed + 1)
        return [w[:M] for w in whole]
    _check_shards("b_shards", b_shards, R)
    if a_shards[0].shape[1] != len(b_shards[0]):
        raise ValueError(
            f"b_shards must be ({a_shards[0].shape[1]}, N): got {tuple(b_shards[0].shape)}"
        )
    N, dtype = b_shards[0].shape[1], a_shards[0].dtype
    world = World(R, seed, drop=drop)
    world.place("A", a_shards)
    world.place("B", b_shards)
    world.alloc("inbox", R, M, N, dtype=dtype)
    world.alloc_signals("sums", R)

    def program(ctx: Context) -> Generator:
        A, B = ctx.symm_at("A"), ctx.symm_at("B")
        mine = A.new_zeros(M, N)
        for k in range(0, A.shape[1], tile[2]):
            mine += A[:, k : k + tile[2]] @ B[k : k + tile[2]]
            yield
        for j in range(ctx.R):
            to = (ctx.rank + j) % ctx.R
            ctx.put(ctx.symm_at("inbox", to)[ctx.rank], mine, to, "sums", ctx.rank)
            yield
        token = yield ctx.wait("sums", 0, 1, ctx.R)
        inbox = ctx.consume(ctx.symm_at("inbox"), token)
        total = inbox[0].clone()
        for s in range(1, ctx.R):
            total += inbox[s]
        return total

    return world.run([[program]] * R)[0]


def moe_ep(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_w: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    R: int,
    *,
    seed: int = 0,
    drop: int | None = None,
) -> torch.Tensor:
    """A mixture of experts whose experts live on different ranks.

    Counts of (rank, expert) go to everybody; from them each rank knows where in an expert's buffer
    its tokens belong. Tokens are sent there, each expert runs on its rows at once, results come
    back, and a token's are added up with its weights, in the order of its experts.

    Args:
        x: (T, d) tokens, rank r holding rows [r T/R, (r+1) T/R).
        topk_idx: (T, k) int64 experts of each token.
        topk_w: (T, k) their weights, dtype of ``x``.
        w1: (E, d, h) first matrices; SiLU follows.
        w2: (E, h, d) second matrices.
        R: ranks, a divisor of T and of E.
        seed: of the interleaving.
        drop: a signal to lose, for tests.

    Returns:
        (T, d).

    Raises:
        ValueError: shapes that do not fit, sizes that R does not divide, experts out of range.
        DeadlockError: a signal was lost.
    """
    (T, d), E = x.shape, len(w1)
    if R < 1 or T % R or E % R:
        raise ValueError(f"R must divide {T} tokens and {E} experts: got {R}")
    k = topk_idx.shape[-1]
    if topk_idx.shape != (T, k) or topk_w.shape != (T, k):
        raise ValueError(
            f"topk_idx and topk_w must be ({T}, k): got {tuple(topk_idx.shape)}, "
            f"{tuple(topk_w.shape)}"
        )
    if w1.shape[1] != d or w2.shape != (E, w1.shape[2], d):
        raise ValueError(f"w1 must be (E, {d}, h) and w2 (E, h, {d}): got {w1.shape}, {w2.shape}")
    if topk_idx.numel() and not 0 <= int(topk_idx.min()) <= int(topk_idx.max()) < E:
        raise ValueError(f"topk_idx must lie in 0..{E - 1}: got up to {int(topk_idx.max())}")
    t, local = T // R, E // R
    world = World(R, seed, drop=drop)
    world.alloc("counts", R, E, dtype=torch.int64)
    world.alloc("rows", T * k, d, dtype=x.dtype)
    world.alloc("results", T * k, d, dtype=x.dtype)
    world.alloc("back", t * k, d, dtype=x.dtype)
    for name, n in (("counts", R), ("tokens", 1), ("back", 1)):
        world.alloc_signals(name, n)

    def program(ctx: Context) -> Generator:
        r = ctx.rank
        mine = slice(r * t, (r + 1) * t)
        experts = topk_idx[mine].flatten()
        order = experts.argsort(stable=True)  # token slots by expert
        send = x[mine][order // k]
        count = torch.bincount(experts, minlength=E)
        for j in range(R):
            to = (r + j) % R
            ctx.put(ctx.symm_at("counts", to)[r], count, to, "counts", r)
            yield
        token = yield ctx.wait("counts", 0, 1, R)
        counts = ctx.consume(ctx.symm_at("counts"), token)
        starts = count.cumsum(0) - count
        blocks = _expert_blocks(counts, local)
        for e in _from_own(range(E), r * local):
            if not int(count[e]):
                continue
            owner = e // local
            at = blocks[owner, e % local, r]
            dst = ctx.symm_at("rows", owner)[at : at + int(count[e])]
            src = send[int(starts[e]) : int(starts[e] + count[e])]
            ctx.put(dst, src, owner, "tokens", op="add")
            yield
        here = counts[:, r * local : (r + 1) * local]
        token = yield ctx.wait("tokens", 0, int((here > 0).sum()))
        rows = ctx.consume(ctx.symm_at("rows"), token)
        results = ctx.symm_at("results")
        for i in range(local):
            first = blocks[r, i, 0]
            n = int(here[:, i].sum())
            if n:
                e = r * local + i
                results[first : first + n] = F.silu(rows[first : first + n] @ w1[e]) @ w2[e]
            yield
        for i in range(local):
            for source in _from_own(range(R), r):
                n = int(here[source, i])
                if n:
                    e = r * local + i
                    at = int(counts[source, :e].sum())
                    dst = ctx.symm_at("back", source)[at : at + n]
                    src = results[blocks[r, i, source] : blocks[r, i, source] + n]
                    ctx.put(dst, src, source, "back", op="add")
                    yield
        token = yield ctx.wait("back", 0, int((count > 0).sum()))
        back = ctx.consume(ctx.symm_at("back"), token)
        by_slot = torch.empty_like(back)
        by_slot[order] = back
        y = torch.zeros_like(x[mine])
        for j in range(k):
            y += topk_w[mine][:, j : j + 1] * by_slot.view(t, k, d)[:, j]
        return y

    return torch.cat(world.run([[program]] * R)[0])


def _expert_blocks(counts: torch.Tensor, local: int) -> dict[tuple[int, int, int], int]:
    """Where the tokens of (owner, local expert, source) begin in the owner's buffer."""
    R = len(counts)
    found = {}
    for owner in range(R):
        at = 0
        for i in range(local):
            for source in range(R):
                found[owner, i, source] = at
                at += int(counts[source, owner * local + i])
    return found


def _from_own(items: Sequence[int], own: int) -> list[int]:
    """Starting from one's own, so that not all ranks send to the same one at once."""
    return [*items[own:], *items[:own]]


def sp_flash_decode(
    q: torch.Tensor,
    k_shards: Sequence[torch.Tensor],
    v_shards: Sequence[torch.Tensor],
    lens: torch.Tensor,
    *,
    scale: float | None = None,
    seed: int = 0,
    drop: int | None = None,
) -> list[torch.Tensor]:
    """Attention of a few queries to a cache whose tokens are spread over ranks.

    Each rank attends to its tokens, sends (m, l, o) to all, and merges them in the order of ranks.

    Args:
        q: (B, Hq, n_q, d), on every rank.
        k_shards: (B, H, T, d) of each rank, Hq a multiple of H.
        v_shards: (B, H, T, d) of each rank.
        lens: (R, B) int64, how many tokens of its T a rank holds for each sequence; 0 and up.
        scale: None means 1/√d.
        seed: of the interleaving.
        drop: a signal to lose, for tests.

    Returns:
        (B, Hq, n_q, d) for each rank, the same on all; 0 where a sequence has no token.

    Raises:
        ValueError: shapes that do not fit.
        DeadlockError: a signal was lost.
    """
    R = len(k_shards)
    B, Hq, n_q, d = q.shape
    if len(v_shards) != R or lens.shape != (R, B):
        raise ValueError(
            f"v_shards and lens must be one a rank, {R}: got {len(v_shards)}, {tuple(lens.shape)}"
        )
    for r, (keys, values) in enumerate(zip(k_shards, v_shards, strict=True)):
        if keys.shape != values.shape or keys.shape[0] != B or keys.shape[3] != d:
            raise ValueError(
                f"k_shards and v_shards must be ({B}, H, T, {d}): rank {r} has "
                f"{tuple(keys.shape)}, {tuple(values.shape)}"
            )
        if not bool(((lens[r] >= 0) & (lens[r] <= keys.shape[2])).all()):
            raise ValueError(f"lens must be in [0, {keys.shape[2]}] on rank {r}: got {lens[r]}")
    world = World(R, seed, drop=drop)
    world.alloc("m", R, B, Hq, n_q, dtype=q.dtype)
    world.alloc("l", R, B, Hq, n_q, dtype=q.dtype)
    world.alloc("o", R, B, Hq, n_q, d, dtype=q.dtype)
    world.alloc_signals("parts", R)

    def program(ctx: Context) -> Generator:
        r = ctx.rank
        seen = torch.arange(k_shards[r].shape[2]) < lens[r][:, None]
        mine = attend_partial(q, k_shards[r], v_shards[r], scale=scale, mask=seen[:, None, None])
        yield
        for j in range(R):
            to = (r + j) % R
            for name, part in zip(("m", "l", "o"), mine, strict=True):
                ctx.put(ctx.symm_at(name, to)[r], part, to, "parts", r, op="add")
                yield
        token = yield ctx.wait("parts", 0, 3, R)
        m, l, o = (ctx.consume(ctx.symm_at(name), token) for name in ("m", "l", "o"))
        return merge_partials([PartialAttention(m[s], l[s], o[s]) for s in range(R)]).output()

    return world.run([[program]] * R)[0]


def ulysses_attention(
    q_shards: Sequence[torch.Tensor],
    k_shards: Sequence[torch.Tensor],
    v_shards: Sequence[torch.Tensor],
    *,
    causal: bool = False,
    seed: int = 0,
    drop: int | None = None,
) -> list[torch.Tensor]:
    """Attention over a sequence that is split over ranks, by exchanging tokens for heads.

    An all-to-all gives each rank all tokens of a few heads; a second one gives them back.

    Args:
        q_shards: (T/R, H, d) of each rank, H a multiple of R.
        k_shards: likewise.
        v_shards: likewise.
        causal: a token sees itself and those before it.
        seed: of the interleaving.
        drop: a signal to lose, for tests.

    Returns:
        (T/R, H, d) for each rank.

    Raises:
        ValueError: shapes that do not fit.
        DeadlockError: a signal was lost.
    """
    R = len(q_shards)
    t, H, d = q_shards[0].shape
    for name, shards in (("q", q_shards), ("k", k_shards), ("v", v_shards)):
        if len(shards) != R or any(s.shape != (t, H, d) for s in shards):
            raise ValueError(f"{name}_shards must be {R} of shape {(t, H, d)}")
    if H % R:
        raise ValueError(f"q_shards must have a multiple of {R} heads: got {H}")
    h = H // R
    world = World(R, seed, drop=drop)
    for name in ("q", "k", "v"):
        world.alloc(name, R * t, h, d, dtype=q_shards[0].dtype)
    world.alloc("o", t, H, d, dtype=q_shards[0].dtype)
    world.alloc_signals("tokens", R)
    world.alloc_signals("heads", R)

    def program(ctx: Context) -> Generator:
        r = ctx.rank
        for j in range(R):
            to = (r + j) % R
            for name, shards in (("q", q_shards), ("k", k_shards), ("v", v_shards)):
                dst = ctx.symm_at(name, to)[r * t : (r + 1) * t]
                ctx.put(dst, shards[r][:, to * h : (to + 1) * h], to, "tokens", r, op="add")
                yield
        token = yield ctx.wait("tokens", 0, 3, R)
        q, k, v = (
            ctx.consume(ctx.symm_at(n), token).transpose(0, 1)[None] for n in ("q", "k", "v")
        )
        i = torch.arange(R * t)
        mask = i[None, :] <= i[:, None] if causal else None
        out = attend_partial(q, k, v, mask=mask).output()[0].transpose(0, 1)
        for j in range(R):
            to = (r + j) % R
            dst = ctx.symm_at("o", to)[:, r * h : (r + 1) * h]
            ctx.put(dst, out[to * t : (to + 1) * t], to, "heads", r)
            yield
        token = yield ctx.wait("heads", 0, 1, R)
        return ctx.consume(ctx.symm_at("o"), token)

    return world.run([[program]] * R)[0]


def overlapped_ag_gemm(
    shards: Sequence[torch.Tensor], B: torch.Tensor, *, rank: int = 0, order: int = 1
) -> torch.Tensor:
    """All-gather and product on one GPU: chunks are copied on a second stream meanwhile.

    Args:
        shards: (M/R, K) of each rank, anywhere that the GPU can copy from.
        B: (K, N) on the GPU (or, without one, on the CPU: then copies come first).
        rank: whose chunk is copied first.
        order: 1 copies rank+1, rank+2, … next, −1 rank−1, rank−2, …

    Returns:
        (M, N).

    Raises:
        ValueError: shapes that do not fit.
    """
    _check_shards("shards", shards)
    R, (rows, K) = len(shards), shards[0].shape
    A = torch.empty(R * rows, K, dtype=B.dtype, device=B.device)
    flags = torch.zeros(R, dtype=torch.int32, device=B.device)
    one = torch.ones(1, dtype=torch.int32, device=B.device)

    def copy() -> None:
        for j in range(R):
            c = (rank + order * j) % R
            A[c * rows : (c + 1) * rows].copy_(shards[c], non_blocking=True)
            flags[c : c + 1].copy_(one, non_blocking=True)

    if B.is_cuda:
        stream = torch.cuda.Stream(B.device)
        stream.wait_stream(torch.cuda.current_stream(B.device))
        with torch.cuda.stream(stream):  # enqueued before the product, which waits for it
            copy()
    else:
        copy()
    C = ag_gemm_consumer(A, B, flags, rank=rank, order=order)
    if B.is_cuda:
        torch.cuda.current_stream(B.device).wait_stream(stream)
    return C


# --------------------------------------------------------------------------------------------
# The autotuner

TILES = tuple((m, n) for m in (64, 128, 256) for n in (64, 128, 256) if (m, n) != (256, 256))
"""256 × 256 is left out: its float32 sums are all the registers of a unit."""

COMM_UNITS = (0, 2, 4, 8, 12, 16)


class Tuned(NamedTuple):
    """The best point of the grid, and the grid.

    Attributes:
        op: the product with the best tile and units.
        swizzle: the best order.
        makespan: its time.
        table: a DataFrame with a row for each of the 192 points.
    """

    op: GEMM
    swizzle: str
    makespan: float
    table: object


def autotune(op: GEMM, cluster: Cluster, *, pattern: str = "pull") -> Tuned:
    """Simulate every tile size, number of communication units and order; take the best."""
    import pandas as pd

    rows = []
    for tile in TILES:
        for units in COMM_UNITS:
            candidate = replace(op, tile=tile, comm_units=units)
            for swizzle in SWIZZLES:
                made = simulate(candidate, cluster, swizzle=swizzle, pattern=pattern)
                rows.append((*tile, units, swizzle, made.makespan))
    table = pd.DataFrame(rows, columns=["BM", "BN", "comm_units", "swizzle", "makespan"])
    best = table.loc[table.makespan.idxmin()]
    tile = (int(best.BM), int(best.BN))
    chosen = replace(op, tile=tile, comm_units=int(best.comm_units))
    return Tuned(chosen, str(best.swizzle), float(best.makespan), table)


# --------------------------------------------------------------------------------------------
# Studies


def _close(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).abs().max() / truth.abs().max())


def _layers(seed: int, R: int) -> dict:
    g = torch.Generator().manual_seed(seed)
    M, K, N = 256, 96, 128
    A, B = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g)
    T, E, d, h = 64 * R, 8, 32, 48
    # popular experts are drawn much more often, the last ones never
    share = 1.0 / torch.arange(1, E + 1) ** 1.5
    share[-2:] = 0
    moe = {
        "x": torch.randn(T, d, generator=g),
        "topk_idx": torch.multinomial(share.repeat(T, 1), 2, generator=g),
        "topk_w": torch.rand(T, 2, generator=g),
        "w1": torch.randn(E, d, h, generator=g) / d**0.5,
        "w2": torch.randn(E, h, d, generator=g) / h**0.5,
    }
    q = torch.randn(3, 8, 1, 16, generator=g)
    k, v = (torch.randn(R, 3, 4, 40, 16, generator=g) for _ in range(2))
    lens = torch.randint(2, 41, (R, 3), generator=g)
    lens[0, 0] = 1
    if R > 1:
        lens[-1, 1] = 0
    seq = [torch.randn(R * 12, 8, 16, generator=g) for _ in range(3)]
    return {"A": A, "B": B, "moe": moe, "q": q, "k": k, "v": v, "lens": lens, "seq": seq}


OPERATORS = ("ag_gemm", "gemm_rs", "gemm_allreduce", "moe_ep", "sp_flash_decode", "ulysses")


def exactness_run(operator: str, R: int, seed: int, interleavings: int = 20) -> dict:
    """An operator under many interleavings: error against float64, and whether bits agree."""
    x = _layers(seed, R)
    run, truth = _operator(operator, x, R)
    made = [run(i) for i in range(interleavings)]
    first = made[0]
    return {
        "off": max(_close(m, truth) for m in made),
        "identical": all(torch.equal(m, first) for m in made),
    }


def _operator(name: str, x: dict, R: int) -> tuple[Callable, torch.Tensor]:
    """The operator as a function of the seed of the interleaving, and its result in float64."""
    A, B = x["A"], x["B"]
    inner = [list(A.chunk(R, dim=1)), list(B.chunk(R, dim=0))]
    product = A.double() @ B.double()
    if name == "ag_gemm":
        shards = list(A.chunk(R)), [b.contiguous() for b in B.chunk(R, dim=1)]
        return lambda s, **k: torch.cat(ag_gemm(*shards, seed=s, **k), dim=1), product
    if name == "gemm_rs":
        return lambda s, **k: torch.cat(gemm_rs(*inner, seed=s, **k)), product
    if name == "gemm_allreduce":
        return lambda s, **k: torch.stack(gemm_allreduce(*inner, seed=s, **k)), product
    if name == "moe_ep":
        moe = {n: t.double() if t.is_floating_point() else t for n, t in x["moe"].items()}
        y = torch.zeros_like(moe["x"])
        for j in range(2):
            for e in range(len(moe["w1"])):
                rows = moe["topk_idx"][:, j] == e
                h = F.silu(moe["x"][rows] @ moe["w1"][e]) @ moe["w2"][e]
                y[rows] += moe["topk_w"][rows, j : j + 1] * h
        return lambda s, **k: moe_ep(**x["moe"], R=R, seed=s, **k), y
    if name == "sp_flash_decode":
        k, v, lens = x["k"], x["v"], x["lens"]
        seen = (torch.arange(40) < lens[..., None]).permute(1, 0, 2).flatten(1)
        keys, values = (t.permute(1, 2, 0, 3, 4).flatten(2, 3).double() for t in (k, v))
        weights = x["q"].double() @ keys.repeat_interleave(2, dim=1).mT / 4
        weights = weights.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1)
        wanted = weights @ values.repeat_interleave(2, dim=1)
        return (
            lambda s, **o: torch.stack(
                sp_flash_decode(x["q"], list(k), list(v), lens, seed=s, **o)
            ),
            wanted,
        )
    if name == "ulysses":
        shards = [list(t.chunk(R)) for t in x["seq"]]
        q, k, v = (t.double().transpose(0, 1) for t in x["seq"])
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        return lambda s, **o: torch.cat(
            ulysses_attention(*shards, causal=True, seed=s, **o)
        ), wanted
    raise ValueError(f"operator must be one of {', '.join(OPERATORS)}: got {name!r}")


def dropped_run(operator: str, R: int, seed: int, drop: int) -> bool:
    """Whether an operator that loses a signal stops with a deadlock, and not with a result."""
    run, _ = _operator(operator, _layers(seed, R), R)
    try:
        run(seed, drop=drop)
    except DeadlockError:
        return True
    return False


def aot_run(kernel: str, form: str, target: str) -> dict:
    """Compile a kernel ahead of time: registers, spills, tensor-core instructions."""
    import re

    from icmllab.kernels.aot import compile_program

    made = compile_program(kernel, form, target)
    cores = "v_mfma" if target.startswith("gfx") else r"\b[HU]\w*MMA"
    return {
        "registers": made.registers,
        "spilled": made.spilled,
        "tensor_cores": len(re.findall(cores, made.assembly)),
    }


RUNS = [
    f"{kernel} {target}"
    for kernel in ("ag_gemm_consumer:fp16", "mega_mlp:fp16_M=64", "mega_mlp:fp16_decode")
    for target in ("sm_80", "sm_90", "gfx942")
]


def study_run(*, run: str) -> dict:
    """One compilation, by name."""
    kernel, target = run.split()
    name, form = kernel.split(":")
    return aot_run(name, form.replace("_", " "), target)


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=efficiency/ditron`` computes."""


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_chunks(fn: Callable) -> None:
    """Exercise 1: ``fn(m0, BM, M, chunk_rows)`` lists the chunks that rows [m0, m0+BM) touch.

    Raises:
        AssertionError: with the tile that fails.
    """
    for M, rows, BM in ((64, 16, 16), (60, 12, 16), (60, 15, 32), (48, 3, 16), (40, 20, 64)):
        for m0 in range(0, M, BM):
            wanted = sorted({m // rows for m in range(m0, min(m0 + BM, M))})
            found = list(fn(m0, BM, M, rows))
            assert found == wanted, (
                f"rows [{m0}, {min(m0 + BM, M)}) of {M}, chunks of {rows} rows: they lie in "
                f"chunks {wanted}, you said {found}"
            )


def check_swizzle(fn: Callable) -> None:
    """Exercise 2: ``fn(rank, R, arrivals)`` is the order of chunks for "pull" and "ring" arrivals.

    Raises:
        AssertionError: with the makespan that your order gives.
    """
    for R in range(2, 9):
        op, cluster = toy(1.0, ranks=R, tiles=(4, 33))
        for pattern in ("pull", "ring"):
            limit = bounds(op, cluster, pattern=pattern)
            came = arrivals(pattern, cluster).times
            for rank in range(R):
                order = [int(c) for c in fn(rank, R, pattern)]
                assert sorted(order) == list(range(R)), (
                    f"R = {R}, rank {rank}: the order must hold every chunk once: {order}"
                )
                ready = np.repeat(came[rank][order], 4 * 33)
                makespan = _waves(ready, cluster.units, 1.0)[:, 2].max()
                assert makespan <= limit.lower + 1 + 1e-9, (
                    f"R = {R}, {pattern}, rank {rank}: chunks arrive at "
                    f"{np.round(came[rank], 2)}; your order {order} takes {makespan:.2f}, within "
                    f"a wave of {limit.lower:.2f} is possible"
                )


def check_merge(fn: Callable) -> None:
    """Exercise 3: ``fn(parts)`` merges (m, l, o) of shards, for one query, to the output (d,).

    Raises:
        AssertionError: with the difference.
    """
    rng = np.random.default_rng(0)
    for sizes in ((5, 3), (4, 0, 7), (0, 1), (2, 2, 2, 2)):
        parts, scores, values = [], [], []
        for n in sizes:
            s, v = rng.normal(size=n) * 20, rng.normal(size=(n, 3))
            m = s.max() if n else -math.inf
            w = np.exp(s - m) if n else np.zeros(0)
            parts.append((m, w.sum(), w @ v))
            scores.append(s)
            values.append(v)
        s, v = np.concatenate(scores), np.concatenate(values)
        w = np.exp(s - s.max())
        found = np.asarray(fn([(m, l, o.copy()) for m, l, o in parts]), dtype=float)
        gap = np.abs(found - w @ v / w.sum()).max()
        assert gap < 1e-10, f"shards of {sizes} tokens: off by {gap:.3g} (NaN: an empty shard)"


def broken_programs(R: int = 4) -> World:
    """A world in which each rank passes a token on to the next, with a mistake in it.

    ``run_broken`` carries it out.
    """
    world = World(R, seed=1)
    world.alloc("token", R)
    world.alloc_signals("passed", R)
    return world


def run_broken(world: World) -> None:
    """Rank r waits for passed[r], then raises passed[r + 1] on rank r + 1; rank 0 begins."""

    def program(ctx: Context) -> Generator:
        if ctx.rank > 0:
            yield ctx.wait("passed", ctx.rank)
        following = ctx.rank + 1
        if following < ctx.R:
            # the mistake: rank 1 raises its own signal again
            index = following if ctx.rank != 1 else ctx.rank
            ctx.notify("passed", index, following)
        yield

    world.run([[program]] * world.R)


def check_deadlock(fn: Callable) -> None:
    """Exercise 4: ``fn()`` is the (rank, index) of the first wait in :func:`run_broken` that
    never ends.

    Raises:
        AssertionError: a wrong answer.
    """
    try:
        run_broken(broken_programs())
    except DeadlockError as error:
        first = min(error.unmet)
    found = tuple(int(v) for v in fn())
    assert found == (first.rank, first.index), (
        f"rank {found[0]} does not wait in vain for passed[{found[1]}] first: run it and read "
        "the unmet waits of the DeadlockError"
    )


def check_gather(fn: Callable) -> None:
    """Exercise 5: ``fn(nodes, local)`` lists the transfers (src, dst, chunk) of an all-gather.

    Each sends a chunk that its source has by then; the slow link may be crossed (nodes−1) times
    a chunk.

    Raises:
        AssertionError: with what is missing or too much.
    """
    for nodes, local in ((2, 4), (1, 3), (3, 2)):
        R = nodes * local
        has = [{r} for r in range(R)]
        slow = 0
        for src, dst, chunk in fn(nodes, local):
            assert chunk in has[src], f"rank {src} sends chunk {chunk} before it has it"
            has[dst].add(chunk)
            slow += src // local != dst // local
        for r in range(R):
            missing = sorted(set(range(R)) - has[r])
            assert not missing, f"{nodes} × {local}: rank {r} never gets chunks {missing}"
        assert slow == (nodes - 1) * R, (
            f"{nodes} × {local}: {slow} chunks cross between nodes, {(nodes - 1) * R} suffice"
        )
