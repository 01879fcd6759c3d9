"""Drafting, verifying and serving token trees."""

import re

import numpy as np
import pytest
import torch

from icmllab.efficiency import echo as ec
from icmllab.kernels.aot import compile_program
from icmllab.toolbox.gpt import GPT, GPTConfig


def table(seed=0, V=3):
    return ec.TableLM(V, seed)


GIVEN = [(0, 1), (2, 0), (1, 1)]


def tree(parent, token=None, score=None, request=0):
    n = len(parent)
    token = range(n) if token is None else token
    score = np.ones(n) if score is None else score
    return ec.TokenTree(
        np.array(parent, dtype=np.int32), np.array(list(token)), np.array(score), request
    )


# --------------------------------------------------------------------------------------------
# Trees


def test_trees_are_validated():
    tree([-1, 0, 0, 1]).validate()
    for bad, message in (
        (tree([1, -1]), "before its child"),
        (tree([-2]), "before its child"),
        (tree([-1, -1], token=[4, 4]), "siblings"),
        (ec.TokenTree(np.array([-1]), np.array([1, 2]), np.ones(1)), "one length"),
    ):
        with pytest.raises(ValueError, match=message):
            bad.validate()


def test_masks_and_depths_follow_the_parents():
    t = tree([-1, 0, -1, 1, 3])
    assert t.depth.tolist() == [1, 2, 1, 3, 4]
    wanted = {
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 2),
        (3, 0),
        (3, 1),
        (3, 3),
        *((4, i) for i in (0, 1, 3, 4)),
    }
    assert {tuple(p) for p in np.argwhere(t.mask()).tolist()} == wanted


def test_packing_lays_roots_before_their_nodes():
    batch = ec.SuperTree([tree([-1, 0, -1], [7, 8, 9]), tree([]), tree([-1], [5])], GIVEN, 2)
    packed = batch.pack()
    assert packed.tokens.tolist() == [1, 7, 8, 9, 0, 1, 5]
    assert packed.parent.tolist() == [-1, 0, 1, 0, -1, -1, 5]
    assert packed.offsets.tolist() == [0, 4, 5, 7]
    assert packed.positions.tolist() == [1, 2, 3, 2, 1, 1, 2]
    assert packed.most == 4
    assert (batch.n_nodes, batch.depth) == (4, 2)
    assert batch.node_contexts()[:4] == [(0, 1), (0, 1, 7), (0, 1, 7, 8), (0, 1, 9)]


# --------------------------------------------------------------------------------------------
# Policies


def scores_hold(planned, model):
    """Each score is the product of the draft's probabilities along its path."""
    for t, context in zip(planned.trees, planned.contexts, strict=True):
        t.validate()
        assert (np.diff(t.depth) >= 0).all()  # level order
        for i in range(len(t.parent)):
            path, node = [], i
            while node >= 0:
                path.append(int(t.token[node]))
                node = int(t.parent[node])
            score, before = 1.0, list(context)
            for token in path[::-1]:
                score *= float(model.probs([torch.tensor(before)])[0, token])
                before.append(token)
            assert t.score[i] == pytest.approx(score, rel=1e-12)


@pytest.mark.parametrize("policy", ec.POLICIES)
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 8, 40])
def test_plans_keep_the_budget_and_score_their_paths(policy, budget):
    planned = ec.plan(policy, table(), GIVEN, budget)
    assert planned.n_nodes <= budget
    scores_hold(planned, table())
    if policy == "none" or budget == 0:
        assert (planned.n_nodes, planned.levels) == (0, 0)
    if policy in ("global", "echo"):
        assert planned.n_nodes == budget


def test_sizes_of_the_plain_policies():
    lm = table(V=4)
    chain = ec.plan("chain", lm, GIVEN, 14)
    assert [t.depth.tolist() for t in chain.trees] == [[1, 2, 3, 4]] * 3
    assert chain.levels == 4
    assert ec.plan("chain", lm, GIVEN[:1], 40).n_nodes == 12
    static = ec.plan("static", lm, GIVEN, 27)
    assert [t.depth.tolist() for t in static.trees] == [[1, 1, 2, 2, 2, 2, 3, 4, 5]] * 3
    few = ec.plan("static", lm, GIVEN, 9)
    assert [t.depth.tolist() for t in few.trees] == [[1, 1, 2]] * 3
    dynamic = ec.plan("dynamic", lm, GIVEN, 8)
    assert [len(t.parent) for t in dynamic.trees] == [2, 2, 2]
    assert ec.plan("dynamic", lm, GIVEN, 8, rounding="ceil").n_nodes == 9


@pytest.mark.parametrize("seed", range(4))
def test_the_global_tree_is_the_best_closed_set(seed):
    lm = table(seed)
    planned = ec.plan("global", lm, GIVEN[:2], 5, max_depth=3, branch=3)
    best = ec.best_closed_set(lm, GIVEN[:2], 5, V=3, max_depth=3)
    assert ec.expected_accepted(planned) == pytest.approx(best, abs=1e-12)
    for policy in ("chain", "static", "dynamic", "echo"):
        other = ec.plan(policy, lm, GIVEN[:2], 5, max_depth=3, branch=3)
        assert ec.expected_accepted(other) <= best + 1e-12


def test_the_best_closed_set_by_hand():
    class Coin:
        order = 0

        def probs(self, contexts):
            return torch.tensor([[0.8, 0.2]]).double().expand(len(contexts), 2)

    # .8, .64, .512, .2, .16 (one of two) for five nodes of one request
    assert ec.best_closed_set(Coin(), [(0,)], 3, V=2, max_depth=3) == pytest.approx(1.952)
    assert ec.best_closed_set(Coin(), [(0,)], 4, V=2, max_depth=3) == pytest.approx(2.152)


def independent_echo(lm, contexts, K, gates=ec.GATES, tau0=0.2, max_depth=12, branch=6):
    """The method as its steps are written, with sorted lists in place of heaps."""

    def tops(context):
        row = lm.probs([torch.tensor(context)])[0].tolist()
        ranked = sorted((-q, token) for token, q in enumerate(row) if q > 0)
        return [(-q, token) for q, token in ranked[:branch]]

    nodes, pool, levels = [], [], 0  # node: score, request, path
    active = dict.fromkeys(range(len(contexts)), ())
    score_of = {}
    for d in range(1, max_depth + 1):
        if not active or len(nodes) >= K:
            break
        levels += 1
        proposals = []
        for r, path in active.items():
            base = score_of.get((r, path), 1.0)
            made = [(base * q, r, (*path, t)) for q, t in tops((*contexts[r], *path))]
            proposals.append(made[0])
            pool += made[1:]
        proposals.sort(key=lambda x: -x[0])
        left = K - len(nodes)
        if d in gates:
            everything = sorted((x[0] for x in proposals + pool), reverse=True)
            w = everything[left - 1] if len(everything) >= left else 0.0
            keep = [x for x in proposals if x[0] >= max(tau0, w)][:left]
        else:
            keep = proposals[:left]
        pool += [x for x in proposals if x not in keep]
        active = {}
        for s, r, path in keep:
            nodes.append((s, r, path))
            score_of[r, path] = s
            active[r] = path
    while len(nodes) < K and pool:
        pool.sort(key=lambda x: -x[0])
        left = K - len(nodes)
        wave = pool[: min(left, max(4, -(-left // 2)))]
        pool = pool[len(wave) :]
        for x in wave:
            nodes.append(x)
            score_of[x[1], x[2]] = x[0]
        left = K - len(nodes)
        if not left:
            break
        rest = sorted((x[0] for x in pool), reverse=True)
        w = rest[left - 1] if len(rest) >= left else 0.0
        fit = [x for x in wave if x[0] >= w and len(x[2]) < max_depth]
        levels += bool(fit)
        for s, r, path in fit:
            pool += [(s * q, r, (*path, t)) for q, t in tops((*contexts[r], *path))]
    return nodes, levels


@pytest.mark.parametrize("K", [1, 5, 12, 30])
@pytest.mark.parametrize("seed", range(3))
def test_echo_is_the_method_as_written(K, seed):
    lm = table(seed, V=5)
    given = [(a, b) for a in range(3) for b in range(3)]
    nodes, levels = independent_echo(lm, given, K)
    planned = ec.plan("echo", lm, given, K)
    assert planned.levels == levels
    found = set()
    for t in planned.trees:
        paths = []
        for p, x in zip(t.parent.tolist(), t.token.tolist(), strict=True):
            paths.append((*(paths[p] if p >= 0 else ()), x))
        found |= {(t.request, p) for p in paths}
    assert found == {(r, path) for _, r, path in nodes}


def test_confident_requests_are_drafted_deeper():
    class Sure:
        order = 1

        def probs(self, contexts):
            rows = [[0.97, 0.02, 0.01] if c[-1] == 0 else [0.25, 0.4, 0.35] for c in contexts]
            return torch.tensor(rows).double()

    planned = ec.plan("echo", Sure(), [(0,), (1,), (2,), (1,)], 12)
    sizes = [len(t.parent) for t in planned.trees]
    assert sizes[0] > 2 * max(sizes[1:])
    assert planned.trees[0].depth.max() > 4
    dynamic = ec.plan("dynamic", Sure(), [(0,), (1,), (2,), (1,)], 12)
    assert [len(t.parent) for t in dynamic.trees] == [3] * 4


def test_below_the_floor_there_is_width_only():
    class Flat:
        order = 0

        def probs(self, contexts):
            return torch.full((len(contexts), 6), 1 / 6).double()

    planned = ec.plan("echo", Flat(), [(0,), (1,)], 8)
    assert planned.n_nodes == 8
    assert planned.depth <= 2
    assert planned.levels >= 1


def test_fewer_nodes_than_budget_when_nothing_is_left():
    class Certain:
        order = 1

        def probs(self, contexts):
            return torch.eye(3)[[(int(c[-1]) + 1) % 3 for c in contexts]].double()

    planned = ec.plan("echo", Certain(), [(0,), (1,)], 100)
    assert planned.n_nodes == 24  # two chains of twelve; zeros are never proposed
    assert ec.plan("global", Certain(), [(0,)], 100).n_nodes == 12
    assert planned.scores.min() == 1.0


def test_no_budget_asks_the_draft_for_nothing():
    class Refusing:
        order = 1

        def probs(self, contexts):
            raise AssertionError("no draft pass was wanted")

    for policy in ec.POLICIES:
        assert ec.plan(policy, Refusing(), GIVEN, 0).n_nodes == 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ec.plan("eagle", table(), GIVEN, 3), "policy"),
        (lambda: ec.plan("echo", table(), [], 3), "contexts"),
        (lambda: ec.plan("echo", table(), GIVEN, -1), "budget"),
        (lambda: ec.plan("echo", table(), GIVEN, 1.5), "budget"),
        (lambda: ec.plan("dynamic", table(), GIVEN, 3, rounding="up"), "rounding"),
        (lambda: ec.plan("global", table(), GIVEN, 3, tau0=0.5), "tau0"),
        (lambda: ec.EchoScheduler(3, gates=(2, 2)), "gates"),
        (lambda: ec.EchoScheduler(3, gates=(0, 2)), "gates"),
        (lambda: ec.EchoScheduler(3, tau0=1.5), "tau0"),
        (lambda: ec.EchoScheduler(3, max_depth=0), "max_depth"),
        (lambda: ec.CostModel(0, 0.1), "knee"),
        (lambda: ec.CostModel(4, -0.1), "draft_cost"),
        (lambda: ec.NoisyLM(table(), -1.0), "sigma"),
        (lambda: ec.TinyGPTLM(torch.nn.Identity(), context_length=0), "context_length"),
        (lambda: ec.verify(table(), ec.plan("chain", table(), GIVEN, 3), temperature=-1), "temper"),
        (lambda: ec.walk(ec.plan("chain", table(), GIVEN, 3), [0, 1]), "samples"),
        (lambda: ec.serve("echo", table(), table(), GIVEN, 0, ec.CostModel(4, 0.0)), "rounds"),
    ],
)
def test_bad_calls_are_named(act, message):
    with pytest.raises(ValueError, match=message):
        act()


# --------------------------------------------------------------------------------------------
# Verification


def test_the_law_of_what_is_emitted_is_the_targets():
    draft, target = table(1), table(2)
    for policy in ("chain", "static", "global", "echo"):
        planned = ec.plan(policy, draft, GIVEN[:1], 6, max_depth=3)
        law = ec.law_of_walk(planned, target)
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        for word, weight in law.items():
            p, before = 1.0, list(GIVEN[0])
            for x in word:
                p *= float(target.probs([torch.tensor(before)])[0, x])
                before.append(x)
            assert weight == pytest.approx(p, abs=1e-12)


def test_walks_by_hand():
    batch = ec.SuperTree([tree([-1, -1, 0], [3, 5, 4]), tree([])], GIVEN[:2], 1)
    # packed: root, 3, 5, 4, root
    found = ec.walk(batch, [3, 4, 9, 8, 7])
    assert found.tokens == [[3, 4, 8], [7]]
    assert found.n_accepted.tolist() == [2, 0]
    assert found.bonus.tolist() == [8, 7]
    assert ec.walk(batch, [5, 4, 9, 8, 7]).tokens == [[5, 9], [7]]
    assert ec.walk(batch, [6, 4, 9, 8, 7]).tokens == [[6], [7]]


def test_expected_acceptance_is_what_sampling_shows():
    draft, target = table(1, V=4), table(2, V=4)
    planned = ec.plan("echo", draft, GIVEN, 10)
    rng = np.random.default_rng(0)
    counts = [ec.verify(target, planned, generator=rng).n_accepted.sum() for _ in range(4000)]
    exact = ec.expected_accepted(planned, target)
    error = np.std(counts) / np.sqrt(len(counts))
    assert abs(np.mean(counts) - exact) < 4 * error
    same = ec.plan("echo", draft, GIVEN, 10)
    assert ec.expected_accepted(same, draft) == pytest.approx(ec.expected_accepted(same))


@pytest.mark.parametrize("policy", ec.POLICIES)
def test_greedy_serving_is_greedy_decoding(policy):
    draft, target = table(1, V=5), table(2, V=5)
    now = list(GIVEN[0])
    plain = []
    for _ in range(30):
        plain.append(int(target.probs([torch.tensor(now)])[0].argmax()))
        now.append(plain[-1])
    out, now = [], list(GIVEN[0])
    while len(out) < 30:
        step = ec.verify_greedy(target, ec.plan(policy, draft, [now], 6))
        out += step.tokens[0]
        now += step.tokens[0]
    assert out[:30] == plain


def test_temperature_sharpens_and_flattens():
    target = table(3)
    planned = ec.plan("none", target, [(0, 1)] * 4000, 0)
    p = target.probs([torch.tensor([0, 1])])[0].numpy()
    for T in (0.5, 1.0, 2.0):
        found = ec.verify(target, planned, temperature=T, generator=np.random.default_rng(1))
        share = np.bincount(found.bonus, minlength=3) / 4000
        wanted = p ** (1 / T) / (p ** (1 / T)).sum()
        assert np.abs(share - wanted).max() < 0.03
    assert (ec.verify(target, planned, temperature=0).bonus == p.argmax()).all()


# --------------------------------------------------------------------------------------------
# Serving


def test_cost_and_budget():
    cost = ec.CostModel(64, 0.03)
    assert cost.time(10, 2) == pytest.approx(1.06)
    assert cost.time(128, 0) == 2.0
    assert [cost.budget(b) for b in (1, 2, 16, 64, 128)] == [24, 48, 48, 0, 0]


def test_plain_serving_emits_one_token_a_step():
    made = ec.serve("echo", table(), table(1), GIVEN, 10, ec.CostModel(3, 0.5))
    assert made.mean_tokens == 1.0
    assert (made.nodes, made.levels) == (0, 0)
    assert made.throughput == pytest.approx(3.0)
    assert [len(t) for t in made.tokens] == [10] * 3


def test_finished_requests_leave_the_batch_and_free_their_share():
    made = ec.serve("echo", table(2), table(1), GIVEN, 200, ec.CostModel(12, 0.0), eos=2, seed=1)
    for tokens in made.tokens:
        assert tokens[-1] == 2
        assert 2 not in tokens[:-1]
    again = ec.serve("echo", table(2), table(1), GIVEN, 200, ec.CostModel(12, 0.0), eos=2, seed=1)
    assert made == again


def test_throughput_is_tokens_over_time():
    cost = ec.CostModel(5, 0.1)
    made = ec.serve("chain", table(2), table(1), GIVEN, 50, cost, budget=6, seed=3)
    total = sum(map(len, made.tokens))
    time = 50 * (max(1, (3 + 6) / 5) + 0.1 * 2)
    assert made.throughput == pytest.approx(total / time)
    assert made.mean_tokens == pytest.approx(total / 150)


def test_noise_depends_on_the_context_alone():
    noisy = ec.NoisyLM(table(1), 0.7, seed=5)
    a = noisy.probs([torch.tensor([9, 0, 1]), torch.tensor([2, 2])])
    b = noisy.probs([torch.tensor([2, 2]), torch.tensor([4, 0, 1])])
    assert torch.equal(a, b.flip(0))
    torch.testing.assert_close(a.sum(1), torch.ones(2, dtype=a.dtype))
    plain = ec.NoisyLM(table(1), 0.0).probs([torch.tensor([0, 1])])
    torch.testing.assert_close(plain, table(1).probs([torch.tensor([0, 1])]))
    # the order of tokens is kept: only confidence changes
    assert torch.equal(
        a.argsort(), table(1).probs([torch.tensor([0, 1]), torch.tensor([2, 2])]).argsort()
    )


def test_a_gpt_can_draft_and_verify():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, context=16, d_model=16, n_layers=1, n_heads=2)).eval()
    lm = ec.TinyGPTLM(model, context_length=8)
    rows = lm.probs([torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([3, 2, 1])])
    assert rows.shape == (3, 11)
    alone = lm.probs([torch.tensor([4])])
    torch.testing.assert_close(rows[1], alone[0], atol=1e-6, rtol=0)
    planned = ec.plan("echo", lm, [(1, 2), (3,)], 6)
    assert planned.n_nodes == 6
    found = ec.verify(lm, planned)
    assert (found.n_accepted >= 0).all()
    with pytest.raises(ValueError, match="at least one token"):
        lm.probs([torch.tensor([], dtype=torch.int64)])


def test_the_test_bed_is_what_it_is_called():
    bed = ec.models()
    assert (bed.target.order, bed.draft.order) == (6, 3)
    assert re.fullmatch(r"[0-9a-f]{64}", bed.sha256)
    assert bed.vocab_size > 60
    given = ec.contexts(5, 3)
    assert given == ec.contexts(5, 3)
    assert all(len(c) == 12 for c in given)
    assert given != ec.contexts(5, 4)


def test_studies_show_the_gain_and_repeat():
    one, plain, dynamic = (
        ec.compare_run(p, 16, 48, 9, batches=4) for p in ("echo", "none", "dynamic")
    )
    assert one == ec.compare_run("echo", 16, 48, 9, batches=4)
    assert plain["tokens"] == 1.0
    assert one["tokens"] > dynamic["tokens"] > 2
    assert one["nodes"] <= 48
    assert len(set(ec.RUNS)) == len(ec.RUNS)
    assert ec.study_run(run="none 48 16 0 0")["throughput_0.03"] == pytest.approx(48.0)
    assert ec.overload_run("none", 0, B=8, K=0) == pytest.approx(8.0)


# --------------------------------------------------------------------------------------------
# Kernels


def test_tree_attention_sees_ancestors_and_prefix_only():
    """Changing a node that is no ancestor changes nothing."""
    g = torch.Generator().manual_seed(0)
    parent = torch.tensor([-1, 0, 0, 1, 2, 3], dtype=torch.int32)
    q, k, v = (torch.randn(6, 2, 16, generator=g) for _ in range(3))
    pages = torch.randn(2, 1, 8, 2, 16, generator=g)
    arguments = {
        "k_pages": pages[0],
        "v_pages": pages[1],
        "table": torch.zeros(1, 1, dtype=torch.int32),
        "lengths": torch.tensor([5], dtype=torch.int32),
        "parent": parent,
        "offsets": torch.tensor([0, 6], dtype=torch.int32),
        "most": 6,
        "depth": 3,
    }
    before = ec.tree_attention(q, k_nodes=k, v_nodes=v, **arguments)
    changed = v.clone()
    changed[2] += 100
    after = ec.tree_attention(q, k_nodes=k, v_nodes=changed, **arguments)
    same = (before - after).abs().amax(dim=(1, 2)) == 0
    assert same.tolist() == [True, True, False, True, False, True]
    pages[1][0, 5:] = 1e9  # behind the prefix
    assert torch.equal(ec.tree_attention(q, k_nodes=k, v_nodes=v, **arguments), before)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_tree_attention_runs_on_tensor_cores(target):
    made = compile_program("tree_attention", "fp16 64 rows", target)
    cores = "v_mfma" if target == "gfx942" else r"\b[HU]\w*MMA"
    assert re.search(cores, made.assembly)


def test_walks_of_the_kernel_are_those_of_a_plain_loop():
    rng = np.random.default_rng(4)
    for _ in range(20):
        planned = ec.plan("global", table(int(rng.integers(99))), GIVEN, 12)
        samples = rng.integers(3, size=planned.n_nodes + 3)
        found = ec.walk(planned, samples)
        at = 0
        for r, t in enumerate(planned.trees):
            node, word = -1, []
            while True:
                x = int(samples[at + node + 1])
                word.append(x)
                child = [i for i, p in enumerate(t.parent) if p == node and t.token[i] == x]
                if not child:
                    break
                node = child[0]
            assert found.tokens[r] == word
            at += len(t.parent) + 1


def test_two_tokens_have_the_targets_law_under_every_policy():
    draft, target = table(5), table(6)
    first = target.probs([torch.tensor(GIVEN[0])])[0].numpy()
    law = np.stack(
        [first[x] * target.probs([torch.tensor([*GIVEN[0], x])])[0].numpy() for x in range(3)]
    )
    n = 20_000
    for policy in ec.POLICIES:
        one = ec.plan(policy, draft, [GIVEN[0]], 4, max_depth=3)
        many = ec.SuperTree(one.trees * n, one.contexts * n, one.levels)
        rng = np.random.default_rng(7)
        words = ec.verify(target, many, generator=rng).tokens
        later = ec.verify(
            target, ec.plan("none", draft, [(*GIVEN[0], w[0]) for w in words], 0), generator=rng
        ).bonus
        count = np.zeros((3, 3))
        for word, x in zip(words, later, strict=True):
            count[word[0], word[1] if len(word) > 1 else x] += 1
        assert 0.5 * np.abs(count / n - law).sum() < 0.015
