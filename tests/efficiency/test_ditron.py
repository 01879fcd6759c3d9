"""Split products, their executor, their simulator and their tile IR."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from icmllab.efficiency import ditron as dt
from icmllab.kernels import ag_gemm_consumer as consumer
from icmllab.kernels.aot import compile_program

F32, F64 = torch.float32, torch.float64
ONE_NODE = dt.Cluster(1, 8, 132, 7.5e12, 200e9, 50e9, 2e-6, 3e-6)
TWO_NODES = dt.Cluster(2, 4, 16, 1.0, 1.0, 1.0, 0.0, 0.0, fixed_tile=1.0, fixed_chunk=1.0)


def g(seed=0):
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------------------------
# The machine


def test_tiles_and_transfers_take_the_time_of_their_formulas():
    flops = 2 * 64 * 64 * 512
    assert ONE_NODE.tile_time(64, 64, 512) == pytest.approx(flops / (7.5e12 * 0.5))
    assert ONE_NODE.tile_time(128, 128, 512) == pytest.approx(4 * flops / 7.5e12)
    assert ONE_NODE.tile_time(256, 128, 512) == pytest.approx(8 * flops / 7.5e12)
    assert ONE_NODE.chunk_time(1e6) == pytest.approx(1e6 / 200e9 + 2e-6 + 3e-6)
    assert ONE_NODE.chunk_time(1e6, comm_units=4) == pytest.approx(2e6 / 200e9 + 2e-6)
    assert ONE_NODE.chunk_time(1e6, comm_units=16) == pytest.approx(1e6 / 200e9 + 2e-6)
    assert ONE_NODE.chunk_time(1e6, inter=True) == pytest.approx(1e6 / 50e9 + 5e-6)
    assert dt.CLUSTERS["h800x8x2"].ranks == 16
    assert dt.CLUSTERS["mi300x8"].units == 304


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dt.Cluster(0, 8, 1, 1, 1, 1, 0, 0), "n_nodes"),
        (lambda: dt.Cluster(1, 8, 1.5, 1, 1, 1, 0, 0), "units"),
        (lambda: dt.Cluster(1, 8, 1, 0, 1, 1, 0, 0), "unit_flops"),
        (lambda: dt.Cluster(1, 8, 1, 1, 1, 1, -1, 0), "latency"),
        (lambda: dt.GEMM("ar", 8, 8, 8), "kind"),
        (lambda: dt.GEMM("ag", 0, 8, 8), "M must"),
        (lambda: dt.GEMM("ag", 8, 8, 8, tile=(48, 64)), "tile"),
        (lambda: dt.GEMM("ag", 8, 8, 8, tile=(8, 64)), "tile"),
        (lambda: dt.GEMM("ag", 8, 8, 8, comm_units=-1), "comm_units"),
        (lambda: dt.simulate(dt.GEMM("ag", 12, 8, 8), ONE_NODE), "M must"),
        (lambda: dt.simulate(dt.GEMM("ag", 8, 8, 8, comm_units=132), ONE_NODE), "comm_units"),
        (lambda: dt.simulate(dt.GEMM("ag", 8, 8, 8), ONE_NODE, swizzle="up"), "swizzle"),
        (lambda: dt.simulate(dt.GEMM("ag", 8, 8, 8), ONE_NODE, policy="graph"), "policy"),
        (lambda: dt.simulate(dt.GEMM("ag", 8, 8, 8), ONE_NODE, pattern="tree"), "pattern"),
        (lambda: dt.simulate(dt.decode_graph(1), ONE_NODE, policy="chunked"), "policy"),
        (lambda: dt.megakernel(dt.decode_graph(1), ONE_NODE, policy="graph"), "policy"),
        (lambda: dt.moves("tree", ONE_NODE), "pattern"),
        (lambda: dt.chunk_order("up", 0, ONE_NODE), "swizzle"),
        (lambda: dt.chunk_order("rank", 8, ONE_NODE), "rank"),
        (lambda: dt.toy(-1.0), "rho"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --------------------------------------------------------------------------------------------
# Chunks


@pytest.mark.parametrize("pattern", dt.PATTERNS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 4), (3, 2)])
def test_every_chunk_comes_to_every_rank_once(pattern, shape):
    cluster = dt.Cluster(*shape, 4, 1.0, 1.0, 1.0, 0.0, 0.0, fixed_chunk=1.0)
    R = cluster.ranks
    plan = dt.moves(pattern, cluster)
    got = sorted((m.dst, m.chunk) for m in plan)
    assert got == sorted((r, c) for r in range(R) for c in range(R) if r != c)
    for m in plan:
        assert m.inter == (m.src // shape[1] != m.dst // shape[1])
    times = dt.arrivals(pattern, cluster).times
    assert np.isfinite(times).all()
    assert (times.diagonal() == 0).all()
    # nothing is sent before it has come, and no port carries two chunks at once
    ports = {}
    for move, start, end in dt.arrivals(pattern, cluster).transfers:
        assert start >= times[move.src, move.chunk]
        assert times[move.dst, move.chunk] == end
        for port in (("in", move.dst, move.inter), ("out", move.src, move.inter)):
            ports.setdefault(port, []).append((start, end))
    for spans in ports.values():
        for (_, before), (after, _) in itertools.pairwise(sorted(spans)):
            assert after >= before


@pytest.mark.parametrize(
    ("pattern", "step"), [("pull", 1), ("push", 1), ("push-forward", -1), ("ring", -1)]
)
def test_chunks_arrive_one_a_step_in_the_stated_direction(pattern, step):
    cluster = dt.toy(1.0)[1]
    times = dt.arrivals(pattern, cluster).times
    for r in range(8):
        for j in range(8):
            assert times[r, (r + step * j) % 8] == pytest.approx(j * cluster.fixed_chunk)


def test_a_two_level_gather_crosses_the_slow_link_once_a_chunk_and_node():
    shards = [torch.randn(5, 3, generator=g(r)) for r in range(8)]
    node = np.arange(8) // 4
    across = node[:, None] != node
    counts = {}
    for pattern in dt.PATTERNS:
        whole, trace = dt.all_gather(shards, cluster=TWO_NODES, pattern=pattern, seed=3)
        assert all(torch.equal(w, torch.cat(shards)) for w in whole)
        counts[pattern] = int(trace.chunks[across].sum())
        assert trace.elements.sum() == 8 * 7 * 15
    assert counts["two_level"] == 8
    assert counts["ring"] == 14
    assert counts["pull"] == counts["push"] == 32
    _, trace = dt.all_gather(shards, cluster=TWO_NODES, pattern="two_level")
    assert (np.where(across, trace.elements, 0).sum(axis=1) == 15).all()  # (nodes−1)·M/R·K


@pytest.mark.parametrize("kind", ["ag", "rs"])
@pytest.mark.parametrize("swizzle", dt.SWIZZLES)
def test_orders_are_permutations_that_begin_or_end_with_ones_own(kind, swizzle):
    for r in range(8):
        order = dt.chunk_order(swizzle, r, TWO_NODES, kind=kind)
        assert sorted(order) == list(range(8))
        if swizzle != "none":
            assert order[0 if kind == "ag" else -1] == r
    order = dt.chunk_order("node-rank", 6, TWO_NODES)
    assert order == [6, 7, 4, 5, 2, 3, 0, 1]


@pytest.mark.parametrize("kind", ["ag", "rs"])
@pytest.mark.parametrize("M", [96, 120, 48])
def test_tiles_run_once_each_and_those_of_two_chunks_with_the_right_one(kind, M):
    cluster = dt.Cluster(1, 6, 4, 1.0, 1.0, 1.0, 0.0, 0.0)
    op = dt.GEMM(kind, M, 6 * 40, 64, tile=(16, 16))
    across = -(-op.columns(cluster) // 16)
    for swizzle in dt.SWIZZLES:
        for r in range(6):
            order = dt.tile_order(op, cluster, swizzle, r)
            seen = sorted(zip(order.rows.tolist(), order.cols.tolist(), strict=True))
            assert seen == list(itertools.product(range(-(-M // 16)), range(across)))
            assert (np.diff(order.place) >= 0).all()
            turn = dt.chunk_order(swizzle, r, cluster, kind=kind)
            for row, place in zip(order.rows, order.place, strict=True):
                touched = {m // (M // 6) for m in range(row * 16, min(row * 16 + 16, M))}
                turns = [turn.index(c) for c in touched]
                assert place == (max(turns) if kind == "ag" else min(turns))


# --------------------------------------------------------------------------------------------
# The simulator


def brute_force(op, cluster, swizzle, pattern):
    """Tile by tile: unit u takes tiles u, u+S, …, none before its rows have come."""
    came = dt.arrivals(pattern, cluster, nbytes=op.chunk_bytes(cluster)).times
    t_c = cluster.tile_time(*op.tile, op.inner(cluster))
    size, worst = op.chunk_rows(cluster), 0.0
    for r in range(cluster.ranks):
        order = dt.tile_order(op, cluster, swizzle, r)
        free = [0.0] * cluster.units
        for i, row in enumerate(order.rows):
            rows = range(row * op.tile[0], min((row + 1) * op.tile[0], op.M))
            there = max(came[r, m // size] for m in rows)
            free[i % cluster.units] = max(free[i % cluster.units], there) + t_c
        worst = max(worst, *free)
    return worst


@pytest.mark.parametrize("swizzle", dt.SWIZZLES)
@pytest.mark.parametrize("pattern", ["pull", "ring", "two_level"])
def test_the_recursion_over_waves_is_the_plain_schedule(swizzle, pattern):
    cluster = dt.Cluster(2, 3, 7, 1e9, 1e9, 2e8, 1e-6, 0.0)
    op = dt.GEMM("ag", 6 * 40, 6 * 100, 64, tile=(32, 32))
    found = dt.simulate(op, cluster, swizzle=swizzle, pattern=pattern)
    assert found.makespan == pytest.approx(brute_force(op, cluster, swizzle, pattern), rel=1e-12)
    limit = dt.bounds(op, cluster, pattern=pattern)
    assert limit.compute <= found.makespan <= limit.sequential + 1e-12


@pytest.mark.parametrize("rho", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [("pull", "rank", "rank-reverse"), ("ring", "rank-reverse", "rank")],
)
def test_the_order_of_arrival_meets_the_bound_and_no_other_does(rho, pattern, right, wrong):
    op, cluster = dt.toy(rho)
    limit = dt.bounds(op, cluster, pattern=pattern)
    best = dt.simulate(op, cluster, swizzle=right, pattern=pattern)
    assert limit.lower <= best.makespan <= limit.lower + 1
    naive = dt.simulate(op, cluster, swizzle="none", pattern=pattern)
    assert naive.makespan == pytest.approx(limit.sequential)
    assert naive.overlap_efficiency == pytest.approx(0)
    if rho >= 0.5:
        against = dt.simulate(op, cluster, swizzle=wrong, pattern=pattern)
        assert limit.sequential / against.makespan < 1.12
    auto = dt.simulate(op, cluster, pattern=pattern)
    assert auto.makespan == best.makespan
    assert dt.best_swizzle(op, cluster, pattern=pattern) in (right, "node-rank")


def test_chunk_kernels_lose_waves():
    for rho in (0.25, 0.5):
        op, cluster = dt.toy(rho, tiles=(4, 36))
        limit = dt.bounds(op, cluster)
        chunked = dt.simulate(op, cluster, swizzle="rank", policy="chunked")
        assert chunked.makespan == 16
        assert limit.compute == 9
        assert dt.simulate(op, cluster, swizzle="rank").makespan == 9
        assert dt.simulate(op, cluster, policy="sequential").makespan == limit.sequential


@pytest.mark.parametrize("rho", [0.25, 1.0, 2.0])
def test_reduce_scatter_has_its_own_order(rho):
    op, cluster = dt.toy(rho, kind="rs")
    limit = dt.bounds(op, cluster)
    best = dt.simulate(op, cluster, swizzle="rank")
    assert limit.lower * (1 - 1e-12) <= best.makespan <= 1.01 * limit.lower
    naive = dt.simulate(op, cluster, swizzle="none").makespan
    if rho >= 1:
        assert naive > {1.0: 1.05, 2.0: 1.3}[rho] * limit.sequential
    assert dt.simulate(op, cluster, policy="sequential").makespan == pytest.approx(limit.sequential)
    received = dict.fromkeys(range(8), 0)
    for move, _, _ in best.transfers:
        assert move.chunk == move.dst
        received[move.dst] += 1
    assert set(received.values()) == {7}
    chunked = dt.simulate(op, cluster, swizzle="rank", policy="chunked")
    assert chunked.makespan >= best.makespan


def test_one_rank_has_nothing_to_wait_for():
    op, cluster = dt.toy(1.0, ranks=1)
    for kind in ("ag", "rs"):
        op = dt.GEMM(kind, op.M, op.N, op.K, tile=op.tile)
        found = dt.simulate(op, cluster)
        assert found.makespan == dt.bounds(op, cluster).compute
        assert not found.transfers
        assert found.overlap_efficiency == 0
    A, B = torch.randn(40, 24, generator=g()), torch.randn(24, 10, generator=g(1))
    torch.testing.assert_close(dt.ag_gemm([A], [B])[0], A @ B)
    torch.testing.assert_close(dt.gemm_rs([A], [B])[0], A @ B)


def test_units_work_on_one_tile_at_a_time():
    op, cluster = dt.toy(1.0, ranks=3, units=5, tiles=(2, 3))
    made = dt.simulate(op, cluster, swizzle="rank")
    for table in made.units:
        assert len(table) == 18
        for u in range(5):
            mine = table[table[:, 0] == u]
            mine = mine[mine[:, 1].argsort()]
            assert (mine[1:, 1] >= mine[:-1, 2] - 1e-12).all()
    assert made.busy(np.array([0.5]))[0] == 5
    assert made.busy(np.array([made.makespan + 1]))[0] == 0


# --------------------------------------------------------------------------------------------
# Tasks


def check_schedule(graph, table, units):
    """No unit does two things, nothing starts before what it waits for has ended."""
    done, tiles = {}, {}
    for _, _, end, n in table:
        name = graph.order[int(n)]
        tile = tiles.get(name, 0)
        tiles[name] = tile + 1
        key = (name, graph.block(name, tile))
        done[key] = max(done.get(key, 0.0), end)
    tiles = {}
    for _, start, end, n in table:
        name = graph.order[int(n)]
        tile = tiles.get(name, 0)
        tiles[name] = tile + 1
        assert end - start == pytest.approx(graph.ops[name].time)
        for wait in graph.waits(name, tile):
            assert start >= done[wait] - 1e-9
    for u in range(units):
        mine = table[table[:, 0] == u]
        mine = mine[mine[:, 1].argsort(kind="stable")]
        assert (mine[1:, 1] >= mine[:-1, 2] - 1e-9).all()
    assert {name: op.tiles for name, op in graph.ops.items()} == tiles


@pytest.mark.parametrize("policy", ["static", "dynamic"])
@pytest.mark.parametrize("seed", range(4))
def test_tasks_respect_their_graph(policy, seed):
    rng = np.random.default_rng(seed)
    ops = {}
    for i in range(8):
        needs = tuple(f"op{j}" for j in range(i) if rng.random() < 0.4)
        ops[f"op{i}"] = dt.TaskOp(int(rng.integers(1, 20)), float(rng.integers(1, 4)), needs)
    graph = dt.TaskGraph(ops, row_blocks=int(rng.integers(1, 6)))
    cluster = dt.Cluster(1, 1, 6, 1.0, 1.0, 1.0, 0.0, 0.5)
    made = dt.simulate(graph, cluster, policy=policy)
    check_schedule(graph, made.units[0], 6)
    work = sum(op.tiles * op.time for op in ops.values())
    assert made.makespan >= max(work / 6, max(op.time for op in ops.values())) - 1e-9
    serial = dt.simulate(graph, cluster, policy="graph").makespan
    assert dt.simulate(graph, cluster, policy="kernels").makespan == pytest.approx(serial + 4)


def test_the_decode_layers_take_what_they_take():
    graph = dt.decode_graph()
    cluster = dt.Cluster(1, 1, 132, 1.0, 1.0, 1.0, 0.0, 0.3)
    times = {p: dt.simulate(graph, cluster, policy=p).makespan for p in dt.TASK_POLICIES}
    assert graph.critical_path() == pytest.approx(59.2)
    assert times["kernels"] == pytest.approx(84.0)
    assert times["graph"] == pytest.approx(67.2)
    for policy in ("static", "dynamic"):
        assert times[policy] == pytest.approx(60.2)
        check_schedule(graph, dt.megakernel(graph, cluster, policy=policy).units[0], 132)
        coarse = dt.megakernel(dt.decode_graph(row_blocks=1), cluster, policy=policy)
        assert coarse.makespan == pytest.approx(67.2)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ({"a": dt.TaskOp(1, 1.0, ("b",)), "b": dt.TaskOp(1, 1.0, ("a",))}, "cycle"),
        ({"a": dt.TaskOp(1, 1.0, ("c",))}, "'c'"),
        ({"a": dt.TaskOp(0, 1.0)}, "tiles"),
        ({"a": dt.TaskOp(1, -1.0)}, "time"),
    ],
)
def test_bad_graphs_are_refused(ops, message):
    with pytest.raises(ValueError, match=message):
        dt.TaskGraph(ops)
    with pytest.raises(ValueError, match="row_blocks"):
        dt.TaskGraph({"a": dt.TaskOp(1, 1.0)}, row_blocks=0)


def test_operators_may_be_given_in_any_order():
    ops = {"c": dt.TaskOp(2, 1.0, ("b",)), "a": dt.TaskOp(2, 1.0), "b": dt.TaskOp(2, 1.0, ("a",))}
    graph = dt.TaskGraph(ops, row_blocks=2)
    assert graph.order == ("a", "b", "c")
    assert graph.waits("b", 1) == [("a", 1)]
    # a block without a tile waits for the nearest before it
    few = dt.TaskGraph({"a": dt.TaskOp(1, 1.0), "b": dt.TaskOp(8, 1.0, ("a",))}, row_blocks=4)
    assert few.waits("b", 7) == [("a", 0)]


# --------------------------------------------------------------------------------------------
# The executor


def test_data_are_visible_before_their_signal_and_not_at_once():
    def run(seed):
        world = dt.World(2, seed)
        world.alloc("x", 3)
        world.alloc_signals("here", 1)
        early = []

        def sender(ctx):
            ctx.put(ctx.symm_at("x", 1), torch.ones(3), 1, "here")
            yield

        def receiver(ctx):
            early.append(bool(ctx.symm_at("x").isnan().any()))
            token = yield ctx.wait("here", 0)
            return ctx.consume(ctx.symm_at("x"), token).clone()

        outputs, trace = world.run([[sender], [receiver]])
        assert torch.equal(outputs[1], torch.ones(3))
        assert trace.elements[0, 1] == 3
        return early[0]

    assert True in {run(s) for s in range(20)}


def test_a_copy_reads_its_source_when_it_gets_on():
    """Overwriting a buffer that is being sent is a race, and shows as one."""
    seen = set()
    for seed in range(40):
        world = dt.World(2, seed)
        world.alloc("x", 1)
        world.alloc_signals("here", 1)
        source = torch.zeros(1)

        def sender(ctx, source=source):
            ctx.put(ctx.symm_at("x", 1), source, 1, "here")
            yield
            source.fill_(9)

        def receiver(ctx):
            yield ctx.wait("here", 0)
            return float(ctx.symm_at("x"))

        seen.add(world.run([[sender], [receiver]])[0][1])
    assert seen == {0.0, 9.0}


def test_a_wait_for_nothing_is_a_deadlock_that_says_who_waits():
    world = dt.World(3, 0)
    world.alloc_signals("flag", 4)

    def program(ctx):
        if ctx.rank == 1:
            yield ctx.wait("flag", 2, value=5)
        if ctx.rank == 2:
            ctx.notify("flag", 0, 2)
            yield ctx.wait("flag", 0, count=2)

    with pytest.raises(dt.DeadlockError, match=r"rank 1 waits for flag\[2\] >= 5") as caught:
        world.run([[program]] * 3)
    assert [(u.rank, u.index, u.found) for u in caught.value.unmet] == [(1, 2, 0), (2, 1, 0)]


def test_barriers_hold_everybody_each_time():
    for seed in range(10):
        world = dt.World(4, seed)
        log = []

        def program(ctx, log=log):
            for phase in range(3):
                log.append(phase)
                yield from ctx.barrier_all()
            return ctx.rank

        outputs, _ = world.run([[program]] * 4)
        assert outputs == [0, 1, 2, 3]
        assert log == sorted(log)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda ctx: ctx.wait("flag", 2), "index"),
        (lambda ctx: ctx.wait("flag", 1, count=2), "index"),
        (lambda ctx: ctx.wait("flags", 0), "signal"),
        (lambda ctx: ctx.notify("flag", -1, 0), "index"),
        (lambda ctx: ctx.notify("flag", 0, 0, op="max"), "op"),
        (lambda ctx: ctx.put(torch.ones(2), torch.ones(3), 0), "dst"),
        (lambda ctx: ctx.put(torch.ones(2), torch.ones(2), 0, "flag", 9), "index"),
        (lambda ctx: ctx.consume(torch.ones(2), None), "token"),
        (lambda ctx: ctx.consume(torch.ones(2), dt.Token("flag", 0, 1, 1)), "token"),
    ],
)
def test_the_primitives_refuse(act, message):
    world = dt.World(2, 0)
    world.alloc_signals("flag", 2)

    def program(ctx):
        if ctx.rank == 0:
            act(ctx)
        yield

    with pytest.raises(ValueError, match=message):
        world.run([[program]] * 2)
    with pytest.raises(ValueError, match="programs"):
        world.run([[program]])
    with pytest.raises(ValueError, match="shards"):
        world.place("x", [torch.ones(1)])
    with pytest.raises(ValueError, match="R must"):
        dt.World(0)


# --------------------------------------------------------------------------------------------
# Operators


@pytest.mark.parametrize("operator", dt.OPERATORS)
@pytest.mark.parametrize("R", [1, 2, 4, 8])
def test_operators_are_exact_and_the_same_in_every_interleaving(operator, R):
    found = dt.exactness_run(operator, R, seed=R, interleavings=4)
    assert found["off"] < 1e-6
    assert found["identical"]


@pytest.mark.parametrize("operator", dt.OPERATORS)
@pytest.mark.parametrize("drop", [0, 3, 7])
def test_a_lost_signal_stops_them(operator, drop):
    assert dt.dropped_run(operator, 4, 1, drop)


@pytest.mark.parametrize("pattern", dt.PATTERNS)
@pytest.mark.parametrize("swizzle", ["auto", *dt.SWIZZLES])
def test_no_order_changes_the_product(pattern, swizzle):
    cluster = dt.Cluster(2, 2, 4, 1e9, 1e9, 1e9, 0.0, 0.0)
    A = [torch.randn(24, 40, generator=g(r), dtype=F64) for r in range(4)]
    B = [torch.randn(40, 18, generator=g(9 + r), dtype=F64) for r in range(4)]
    made = dt.ag_gemm(A, B, tile=(16, 16, 32), pattern=pattern, swizzle=swizzle, cluster=cluster)
    torch.testing.assert_close(torch.cat(made, dim=1), torch.cat(A) @ torch.cat(B, dim=1))
    parts = dt.gemm_rs([torch.cat([a] * 2) for a in A], B, tile=(16, 32, 16), swizzle=swizzle)
    wanted = sum(torch.cat([a] * 2) @ b for a, b in zip(A, B, strict=True))
    torch.testing.assert_close(torch.cat(parts), wanted)


def test_a_program_without_its_waits_reads_what_is_not_there():
    """The waits are what makes it right: without their pass NaN shows up."""
    cluster = dt.Cluster(1, 4, 4, 1e9, 1e9, 1e9, 0.0, 0.0)
    A = [torch.randn(16, 16, generator=g(r)) for r in range(4)]
    ir = dt.lower(dt.GEMM("ag", 64, 64, 16, tile=(16, 16)), cluster).apply("split")
    world = dt.World(4, 0)
    world.alloc("A", 64, 16)
    world.alloc("C", 64, 16)
    world.place("B", A)
    world.alloc_signals("arrived", 4)
    for r, a in enumerate(A):
        world._buffers["A"][r][16 * r : 16 * r + 16] = a
    jobs = [dt._tile_program(ir, 16), dt._gather_program("pull", cluster, 16)]
    outputs, _ = world.run([jobs] * 4)
    assert any(bool(C.isnan().any()) for C in outputs)


def test_adding_as_they_come_is_right_and_not_always_the_same():
    A = [torch.randn(64, 200, generator=g(r)) * 10 ** (r - 2) for r in range(4)]
    B = [torch.randn(200, 32, generator=g(9 + r)) for r in range(4)]
    made = [torch.cat(dt.gemm_rs(A, B, seed=s, deterministic=False)) for s in range(12)]
    truth = sum(a.double() @ b.double() for a, b in zip(A, B, strict=True))
    for m in made:
        torch.testing.assert_close(m.double(), truth, atol=1e-6 * float(truth.abs().max()), rtol=0)
    assert any(not torch.equal(m, made[0]) for m in made)
    fixed = [torch.cat(dt.gemm_rs(A, B, seed=s)) for s in range(6)]
    assert all(torch.equal(m, fixed[0]) for m in fixed)
    with pytest.raises(dt.DeadlockError):
        dt.gemm_rs(A, B, deterministic=False, drop=2)


def test_rows_that_ranks_do_not_divide_are_padded_on_request():
    A = [torch.randn(n, 20, generator=g(n)) for n in (7, 7, 5)]
    B = [torch.randn(20, 8, generator=g(9 + r)) for r in range(3)]
    with pytest.raises(ValueError, match="a_shards"):
        dt.ag_gemm(A, B, tile=(16, 16, 16))
    made = dt.ag_gemm(A, B, tile=(16, 16, 16), pad=True)
    torch.testing.assert_close(torch.cat(made, dim=1), torch.cat(A) @ torch.cat(B, dim=1))
    A = [torch.randn(17, 20, generator=g(r)) for r in range(3)]
    with pytest.raises(ValueError, match="multiple of 3"):
        dt.gemm_rs(A, B)
    wanted = sum(a @ b for a, b in zip(A, B, strict=True))
    for R_parts in (dt.gemm_rs(A, B, pad=True), [dt.gemm_allreduce(A, B, one_shot=False)[0]]):
        torch.testing.assert_close(torch.cat(R_parts), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("one_shot", [True, False, None])
def test_all_reduce_gives_every_rank_the_same_bits(one_shot):
    A = [torch.randn(30, 50, generator=g(r)) for r in range(4)]
    B = [torch.randn(50, 12, generator=g(9 + r)) for r in range(4)]
    made = dt.gemm_allreduce(A, B, one_shot=one_shot)
    assert all(torch.equal(m, made[0]) for m in made)
    truth = sum(a.double() @ b.double() for a, b in zip(A, B, strict=True))
    torch.testing.assert_close(made[0].double(), truth, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: dt.ag_gemm(a, b[:1]), "b_shards"),
        (lambda a, b: dt.ag_gemm(a, [x[:3] for x in b]), "b_shards"),
        (lambda a, b: dt.ag_gemm(a, [x.double() for x in b]), "b_shards"),
        (lambda a, b: dt.ag_gemm([a[0], a[1][:2]], b), "a_shards"),
        (lambda a, b: dt.ag_gemm([], b), "a_shards"),
        (lambda a, b: dt.ag_gemm([x.long() for x in a], b), "a_shards"),
        (lambda a, b: dt.ag_gemm(a, b, tile=(24, 16, 16)), "tile"),
        (lambda a, b: dt.gemm_rs(a, [x[:3] for x in b]), "b_shards"),
        (lambda a, b: dt.gemm_allreduce(a, [x[:3] for x in b]), "b_shards"),
        (lambda a, b: dt.all_gather(a, cluster=TWO_NODES), "cluster"),
    ],
)
def test_split_products_refuse(call, message):
    a = [torch.randn(16, 8, generator=g(r)) for r in range(2)]
    b = [torch.randn(8, 4, generator=g(r)) for r in range(2)]
    with pytest.raises(ValueError, match=message):
        call(a, b)


def test_experts_refuse_and_may_be_empty():
    x, w1, w2 = torch.randn(8, 4), torch.randn(4, 4, 6), torch.randn(4, 6, 4)
    idx, w = torch.full((8, 2), 3), torch.ones(8, 2)
    made = dt.moe_ep(x, idx, w, w1, w2, 2)
    torch.testing.assert_close(made, 2 * torch.nn.functional.silu(x @ w1[3]) @ w2[3])
    for change, message in (
        ({"R": 3}, "R must"),
        ({"topk_w": torch.ones(8, 1)}, "topk_idx and topk_w"),
        ({"topk_idx": torch.full((8, 2), 4)}, "topk_idx"),
        ({"w2": torch.randn(4, 5, 4)}, "w2"),
    ):
        arguments = {"x": x, "topk_idx": idx, "topk_w": w, "w1": w1, "w2": w2, "R": 2} | change
        with pytest.raises(ValueError, match=message):
            dt.moe_ep(**arguments)


def test_a_sequence_without_tokens_attends_to_nothing():
    q = torch.randn(2, 4, 1, 8, generator=g())
    k, v = (torch.randn(3, 2, 2, 5, 8, generator=g(s)) for s in (1, 2))
    lens = torch.tensor([[0, 1], [0, 0], [0, 5]])
    made = dt.sp_flash_decode(q, list(k), list(v), lens)
    assert all(torch.equal(m, made[0]) for m in made)
    assert not bool(made[0][0].any())
    keys = torch.cat([k[0, 1, :, :1], k[2, 1]], dim=1).repeat_interleave(2, dim=0)
    values = torch.cat([v[0, 1, :, :1], v[2, 1]], dim=1).repeat_interleave(2, dim=0)
    wanted = torch.softmax(q[1] @ keys.mT / math.sqrt(8), dim=-1) @ values
    torch.testing.assert_close(made[0][1], wanted)
    for change, message in (
        ({"lens": lens + 3}, "lens"),
        ({"v_shards": list(v)[:2]}, "v_shards"),
        ({"k_shards": [t[..., :4] for t in k]}, "k_shards"),
    ):
        arguments = {"q": q, "k_shards": list(k), "v_shards": list(v), "lens": lens} | change
        with pytest.raises(ValueError, match=message):
            dt.sp_flash_decode(**arguments)


def test_ulysses_needs_as_many_heads_as_ranks():
    x = [torch.randn(3, 4, 8, generator=g(r)) for r in range(3)]
    with pytest.raises(ValueError, match="heads"):
        dt.ulysses_attention(x, x, x)
    with pytest.raises(ValueError, match="k_shards"):
        dt.ulysses_attention(x, x[:2], x)
    x = [torch.randn(3, 6, 8, generator=g(r)) for r in range(3)]
    q = torch.cat(x).transpose(0, 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(0, 1)
    torch.testing.assert_close(torch.cat(dt.ulysses_attention(x, x, x)), wanted)


def gloo_rank(rank, port, path):
    """A real all-gather between two processes, then the product."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    A = torch.randn(2, 24, 40, generator=g(5))
    B = torch.randn(2, 40, 16, generator=g(6))
    parts = [torch.empty(24, 40) for _ in range(2)]
    dist.all_gather(parts, A[rank])
    torch.save(torch.cat(parts) @ B[rank], f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_two_real_processes_get_the_same_product(tmp_path):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(gloo_rank, args=(port, str(tmp_path)), nprocs=2)
    A = torch.randn(2, 24, 40, generator=g(5))
    B = torch.randn(2, 40, 16, generator=g(6))
    made = dt.ag_gemm(list(A), list(B), tile=(16, 16, 16))
    for rank in range(2):
        torch.testing.assert_close(made[rank], torch.load(tmp_path / f"{rank}.pt"))


# --------------------------------------------------------------------------------------------
# The IR


def test_passes_build_the_program_step_by_step():
    cluster = dt.Cluster(1, 4, 4, 1.0, 1.0, 1.0, 0.0, 0.0, fixed_tile=1.0, fixed_chunk=1.0)
    ir = dt.lower(dt.GEMM("ag", 80, 4 * 32, 64, tile=(16, 16)), cluster)
    assert [len(p) for p in ir.programs] == [1] * 4
    assert [o.kind for o in ir.programs[0][0].ops] == [
        "load_tile",
        "load_tile",
        "dot",
        "store_tile",
    ]
    split = ir.apply("split")
    assert len(split.programs[0]) == 5 * 2
    waits = split.apply("wait")
    first, second = waits.programs[0][0], waits.programs[0][2]
    assert [o.kind for o in first.ops][:1] == ["load_tile"]  # own rows
    assert second.rows == (16, 32)  # chunks of 20 rows: the tile has rows of 0 and 1
    assert [str(o) for o in second.ops][:2] == ["wait chunk 1", "load_tile A"]
    ordered = waits.apply("swizzle")
    assert ordered.swizzle in ("rank", "node-rank")
    starts = [t.rows[0] // 20 for t in ordered.programs[2]]
    assert starts[0] == 2
    done = ordered.apply("epilogue")
    assert done.passes == dt.PASSES
    assert "wait chunk" in done.text(1)
    assert "… " in done.text(1, limit=2)
    with pytest.raises(ValueError, match="next pass"):
        ir.apply("wait")
    with pytest.raises(ValueError, match="name must be one of"):
        ir.apply("fuse")
    with pytest.raises(ValueError, match="next pass"):
        done.apply("epilogue")


def test_the_epilogue_sends_a_chunk_with_its_last_tile():
    cluster = dt.Cluster(1, 4, 4, 1.0, 1.0, 1.0, 0.0, 0.0, fixed_tile=1.0, fixed_chunk=1.0)
    ir = dt.lower(dt.GEMM("rs", 80, 32, 64, tile=(16, 16)), cluster)
    for name in dt.PASSES:
        ir = ir.apply(name)
    for r, tasks in enumerate(ir.programs):
        sent = [o.args[1] for t in tasks for o in t.ops if o.kind == "put"]
        assert sorted(sent) == [0, 1, 2, 3]
        assert sent[-1] == r
        for c in range(4):
            last = max(i for i, t in enumerate(tasks[:-1]) if c in ir.chunks(t))
            assert ("put", ("chunk", c)) in [tuple(o) for o in tasks[last].ops]
        assert [o.kind for o in tasks[-1].ops] == ["wait"] * 4 + ["reduce", "store_tile"]


def test_the_autotuner_tries_everything_and_takes_the_best():
    op = dt.GEMM("ag", 1024, 8 * 1024, 2048)
    tuned = dt.autotune(op, ONE_NODE)
    assert len(tuned.table) == 192
    assert tuned.makespan == tuned.table.makespan.min()
    again = dt.simulate(tuned.op, ONE_NODE, swizzle=tuned.swizzle)
    assert again.makespan == tuned.makespan
    assert (256, 256) not in set(zip(tuned.table.BM, tuned.table.BN, strict=True))
    for row in tuned.table.sample(5, random_state=0).itertuples():
        one = dt.GEMM("ag", 1024, 8 * 1024, 2048, (row.BM, row.BN), row.comm_units)
        assert dt.simulate(one, ONE_NODE, swizzle=row.swizzle).makespan == row.makespan


# --------------------------------------------------------------------------------------------
# Kernels


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("M", "R", "BM"), [(128, 4, 16), (120, 5, 32), (48, 16, 32), (90, 3, 16)])
def test_the_kernel_starts_where_nothing_has_to_be_waited_for(order, M, R, BM):
    """Along its rotation, the latest arrival that a row tile needs never goes back."""
    chunk, tiles = M // R, -(-M // BM)
    for rank in range(R):
        turn = {(rank + order * j) % R: j for j in range(R)}
        first = consumer.first_tile(chunk, rank, order, M, BM)
        rows = [(first + order * place) % tiles for place in range(tiles)]
        assert sorted(rows) == list(range(tiles))
        waits = [max(turn[c] for c in dt.touched_chunks(t, BM, M, chunk)) for t in rows]
        assert waits == sorted(waits)


@pytest.mark.parametrize("order", [1, -1])
def test_overlapped_product_without_a_gpu_copies_first(order):
    shards = [torch.randn(6, 10, generator=g(r)) for r in range(3)]
    B = torch.randn(10, 7, generator=g(9))
    made = dt.overlapped_ag_gemm(shards, B, rank=1, order=order)
    torch.testing.assert_close(made, torch.cat(shards) @ B)
    with pytest.raises(ValueError, match="shards"):
        dt.overlapped_ag_gemm([shards[0], shards[1][:2]], B)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_overlapped_product_on_a_gpu_ends():
    """With pinned chunks on the host, a copy engine fills the buffer while the kernel spins."""
    shards = [torch.randn(32, 64, generator=g(r)).half().pin_memory() for r in range(4)]
    B = torch.randn(64, 48, generator=g(9)).half().cuda()
    made = dt.overlapped_ag_gemm(shards, B, rank=2)
    done = torch.cuda.Event()
    done.record()
    import time

    stop = time.monotonic() + 20
    while not done.query():
        assert time.monotonic() < stop, "the kernel waits for a chunk that never comes"
        time.sleep(0.01)
    wanted = torch.cat(shards).float() @ B.cpu().float()
    torch.testing.assert_close(made.cpu().float(), wanted, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_multiply_on_tensor_cores_and_acquire_flags(target):
    for kernel, form in (("ag_gemm_consumer", "fp16"), ("mega_mlp", "fp16 M=64")):
        made = compile_program(kernel, form, target)
        cores = r"v_mfma" if target == "gfx942" else r"\b[HU]\w*MMA"
        assert re.search(cores, made.assembly), (kernel, target)
        assert made.spilled == 0


def test_a_list_of_tasks_is_in_topological_order():
    from icmllab.kernels.mega_mlp import DOWN, HIDDEN, NORM, task_list

    tasks = task_list(70, 40, 100, 16, 32).tolist()
    assert len(tasks) == 5 * (1 + 4 + 2)
    seen = set()
    for op, block, col in tasks:
        if op == HIDDEN:
            assert (NORM, block, 0) in seen
        if op == DOWN:
            assert all((HIDDEN, block, c) in seen for c in range(4))
        seen.add((op, block, col))


def test_studies_are_named_and_recomputable():
    assert len(set(dt.RUNS)) == 9
    found = dt.study_run(run=dt.RUNS[0])
    assert found["spilled"] == 0
    assert found["tensor_cores"] > 0
    with pytest.raises(ValueError, match="operator"):
        dt.exactness_run("scan", 2, 0)
