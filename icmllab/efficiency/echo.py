r"""ECHO: Elastic Speculative Decoding with Sparse Gating for High-Concurrency Scenarios.

arXiv 2604.09603. A draft model proposes a tree of tokens for each request, the target model
verifies all nodes in one pass. While the pass is limited by memory that is free; with many requests
it is limited by arithmetic, and every node that is not accepted costs time. ECHO spends one budget
of nodes over the whole batch: confident requests are drafted deeper, uncertain ones stop, and
confidence is looked at only at a few depths.

Known from the paper's abstract and a third party's summary: a super-tree under a global budget,
sparse gates, depth first and then width. Our reconstruction: the gates' schedule and thresholds,
the cost model, the statement on optimality, the n-gram test bed, the kernels, all numbers.

Notation: B requests, K nodes to verify in a step, roots not counted; s(v) = Π q(token | context)
along the path from the root, q the draft's distribution and p the target's.
"""

import hashlib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from icmllab.kernels.tree_attention import ancestors, tree_attention
from icmllab.kernels.verify_tree import verify_tree
from icmllab.toolbox.ngrams import NGramLM
from icmllab.toolbox.text import CharTokenizer, load_pydoc_topics, split_tokens

__all__ = [
    "GATES",
    "POLICIES",
    "SHIPPED",
    "CostModel",
    "EchoScheduler",
    "LanguageModel",
    "NGramLM",
    "NoisyLM",
    "ServeStats",
    "SuperTree",
    "TinyGPTLM",
    "TokenTree",
    "VerifyResult",
    "best_closed_set",
    "check_break_even",
    "check_gate",
    "check_global",
    "check_mask",
    "check_verify",
    "compare_run",
    "contexts",
    "expected_accepted",
    "models",
    "overload_run",
    "plan",
    "serve",
    "study_run",
    "tree_attention",
    "verify",
    "verify_greedy",
    "verify_tree",
    "walk",
]

POLICIES = ("none", "chain", "static", "dynamic", "global", "echo")

GATES = (1, 2, 4, 8)
"""Depths at which ECHO looks at confidences."""

MAX_DEPTH = 12
BRANCH = 6
"""Children of a node that are considered."""

Context = tuple[int, ...]


# --------------------------------------------------------------------------------------------
# Models


class LanguageModel(Protocol):
    """What drafts and what verifies."""

    def probs(self, contexts: list[torch.Tensor]) -> torch.Tensor:
        """(B, V) probabilities of the next token after each context (n_i,) int64."""


class TinyGPTLM:
    """A GPT as a language model for :func:`plan` and :func:`verify`.

    Args:
        model: (B, n) int64 tokens → (B, n, V) logits, or a tuple that begins with them.
        context_length: tokens that are looked at; the last ones.
    """

    def __init__(self, model: nn.Module, *, context_length: int):
        if context_length < 1:
            raise ValueError(f"context_length must be >= 1: got {context_length}")
        self.model, self.order = model, context_length

    @torch.no_grad()
    def probs(self, contexts: list[torch.Tensor]) -> torch.Tensor:
        """As :class:`LanguageModel`; contexts of one length share a pass."""
        groups: dict[int, list[int]] = {}
        cut = [torch.as_tensor(c)[-self.order :] for c in contexts]
        for i, c in enumerate(cut):
            groups.setdefault(len(c), []).append(i)
        rows: list[torch.Tensor | None] = [None] * len(cut)
        for n, members in groups.items():
            if not n:
                raise ValueError("contexts must hold at least one token each")
            out = self.model(torch.stack([cut[i] for i in members]))
            logits = out if isinstance(out, torch.Tensor) else out[0]
            for i, row in zip(members, logits[:, -1].double().softmax(dim=1), strict=True):
                rows[i] = row
        return torch.stack(rows)


class NoisyLM:
    """A language model with its confidence distorted: q^exp(σ η), renormalised.

    η ~ N(0, 1) is drawn from the context alone, so that every policy sees the same noise.

    Args:
        model: what is distorted.
        sigma: >= 0.
        seed: of the noise.
    """

    def __init__(self, model: LanguageModel, sigma: float, *, seed: int = 0):
        if not sigma >= 0:
            raise ValueError(f"sigma must be >= 0: got {sigma}")
        self.model, self.sigma, self.seed = model, sigma, seed
        self.order = getattr(model, "order", None)

    def probs(self, contexts: list[torch.Tensor]) -> torch.Tensor:
        """As :class:`LanguageModel`."""
        q = self.model.probs(contexts).double()
        keys = [_key(tuple(c.tolist()), self.order) for c in contexts]
        eta = [np.random.default_rng([self.seed, *key]).normal() for key in keys]
        power = torch.tensor([math.exp(self.sigma * e) for e in eta], dtype=torch.float64)
        bent = q ** power[:, None]
        return bent / bent.sum(dim=1, keepdim=True)


def _key(context: Context, order: int | None) -> Context:
    return context if order is None else context[len(context) - order :] if order else ()


class _Cached:
    """Distributions and likeliest tokens by context, computed once for each context that counts."""

    def __init__(self, model: LanguageModel):
        self.model = model
        self.order = getattr(model, "order", None)
        self._rows, self._top = _STORES.setdefault(model, ({}, {}))

    def rows(self, contexts: Sequence[Context]) -> list[np.ndarray]:
        """(V,) probabilities for each context."""
        keys = [_key(c, self.order) for c in contexts]
        new = list(dict.fromkeys(k for k in keys if k not in self._rows))
        if new:
            made = self.model.probs([torch.tensor(k, dtype=torch.int64) for k in new])
            for k, row in zip(new, made.double().numpy(), strict=True):
                self._rows[k] = row
        return [self._rows[k] for k in keys]

    def top(self, contexts: Sequence[Context], branch: int) -> list[tuple[list[int], list[float]]]:
        """The likeliest tokens with their probabilities, likeliest first, ties to the lowest token.

        Tokens of probability 0 are never proposed.
        """
        found = []
        for context, row in zip(contexts, self.rows(contexts), strict=True):
            key = (branch, *_key(context, self.order))
            if key not in self._top:
                order = np.argsort(-row, kind="stable")[:branch]
                order = order[row[order] > 0]
                self._top[key] = order.tolist(), row[order].tolist()
            found.append(self._top[key])
        return found


_STORES: WeakKeyDictionary = WeakKeyDictionary()
"""What was computed of a model, kept as long as the model: its weights must not change."""


def _cached(model: "LanguageModel | _Cached") -> _Cached:
    return model if isinstance(model, _Cached) else _Cached(model)


# --------------------------------------------------------------------------------------------
# Trees


@dataclass(frozen=True)
class TokenTree:
    """The drafted nodes of one request, parents before children.

    Attributes:
        parent: (n,) int32, place of the parent; −1 for a child of the root.
        token: (n,) int64.
        score: (n,) float64, Π q along the path.
        request: which request of the batch.
    """

    parent: np.ndarray
    token: np.ndarray
    score: np.ndarray
    request: int = 0

    @property
    def depth(self) -> np.ndarray:
        """(n,) int64, 1 for a child of the root."""
        found = np.zeros(len(self.parent), dtype=np.int64)
        for i, p in enumerate(self.parent):
            found[i] = 1 if p < 0 else found[p] + 1
        return found

    def validate(self) -> None:
        """Check the tree.

        Raises:
            ValueError: lengths that differ, a child before its parent, or siblings with one token.
        """
        n = len(self.parent)
        if len(self.token) != n or len(self.score) != n:
            raise ValueError(
                f"parent, token and score must have one length: got {n}, {len(self.token)}, "
                f"{len(self.score)}"
            )
        for i, p in enumerate(self.parent):
            if not -1 <= p < i:
                raise ValueError(f"parent must come before its child: node {i} has parent {p}")
        pairs = list(zip(self.parent.tolist(), self.token.tolist(), strict=True))
        if len(set(pairs)) != n:
            twice = next(pair for pair in pairs if pairs.count(pair) > 1)
            raise ValueError(f"token must differ among siblings: (parent, token) = {twice} twice")

    def mask(self) -> np.ndarray:
        """(n, n) bool, whether column is row itself or one of its drafted ancestors."""
        return ancestors(torch.as_tensor(self.parent.astype(np.int64))).numpy()


@dataclass(frozen=True)
class SuperTree:
    """The trees of a batch, and what drafting them took.

    Attributes:
        trees: one a request.
        contexts: what each request had before.
        levels: batched draft passes that were made.
    """

    trees: list[TokenTree]
    contexts: list[Context]
    levels: int

    @property
    def n_nodes(self) -> int:
        """Drafted nodes of all requests."""
        return sum(len(t.parent) for t in self.trees)

    @property
    def scores(self) -> np.ndarray:
        """Scores of all drafted nodes."""
        return np.concatenate([t.score for t in self.trees]) if self.trees else np.zeros(0)

    class Packed(NamedTuple):
        """All nodes in one array, each request's root first, then its nodes.

        Attributes:
            tokens: (N,) int32, of a root the last token of its context (−1 without one).
            positions: (N,) int32, tokens before.
            parent: (N,) int32, place in this array, −1 for roots.
            offsets: (B + 1,) int32, where requests begin.
        """

        tokens: torch.Tensor
        positions: torch.Tensor
        parent: torch.Tensor
        offsets: torch.Tensor

        @property
        def most(self) -> int:
            """Nodes of the largest request, root included."""
            return int(self.offsets.diff().max())

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return max((int(t.depth.max()) for t in self.trees if len(t.parent)), default=0)

    def pack(self) -> "SuperTree.Packed":
        """Lay all trees out for one verification pass."""
        tokens, positions, parent, offsets = [], [], [], [0]
        for tree, context in zip(self.trees, self.contexts, strict=True):
            start = offsets[-1]
            tokens += [context[-1] if context else -1, *tree.token.tolist()]
            before = max(len(context) - 1, 0)
            positions += [before, *(before + tree.depth).tolist()]
            parent += [-1, *(tree.parent + start + 1).tolist()]
            offsets.append(start + len(tree.parent) + 1)
        made = (torch.tensor(x, dtype=torch.int32) for x in (tokens, positions, parent, offsets))
        return SuperTree.Packed(*made)

    def node_contexts(self) -> list[Context]:
        """What precedes the next token at each packed node: (N,) contexts."""
        found: list[Context] = []
        for tree, context in zip(self.trees, self.contexts, strict=True):
            mine = [context]
            for p, x in zip(tree.parent.tolist(), tree.token.tolist(), strict=True):
                mine.append((*mine[p + 1], x))
            found += mine
        return found


class _Growing:
    """Trees while they are built."""

    def __init__(self, contexts: Sequence[Context]):
        self.contexts = list(contexts)
        B = len(self.contexts)
        self.parent: list[list[int]] = [[] for _ in range(B)]
        self.token: list[list[int]] = [[] for _ in range(B)]
        self.score: list[list[float]] = [[] for _ in range(B)]
        self.depth: list[list[int]] = [[] for _ in range(B)]
        self.context: list[list[Context]] = [[] for _ in range(B)]
        self.used = 0

    def at(self, request: int, node: int) -> tuple[Context, float, int]:
        """Context, score and depth at a node; −1 is the root."""
        if node < 0:
            return self.contexts[request], 1.0, 0
        return (
            self.context[request][node],
            self.score[request][node],
            self.depth[request][node],
        )

    def add(self, request: int, parent: int, token: int, score: float) -> int:
        """Append a node and return its place."""
        before, _, depth = self.at(request, parent)
        self.parent[request].append(parent)
        self.token[request].append(token)
        self.score[request].append(score)
        self.depth[request].append(depth + 1)
        self.context[request].append((*before, token))
        self.used += 1
        return len(self.parent[request]) - 1

    def finish(self, levels: int) -> SuperTree:
        """The trees with nodes in level order."""
        trees = []
        for r in range(len(self.contexts)):
            order = sorted(range(len(self.parent[r])), key=lambda i, r=r: (self.depth[r][i], i))
            place = {old: new for new, old in enumerate(order)}
            place[-1] = -1
            parent = np.array([place[self.parent[r][i]] for i in order], dtype=np.int32)
            token = np.array([self.token[r][i] for i in order], dtype=np.int64)
            score = np.array([self.score[r][i] for i in order], dtype=np.float64)
            trees.append(TokenTree(parent, token, score, r))
        return SuperTree(trees, self.contexts, levels)


# --------------------------------------------------------------------------------------------
# Policies


def _check_plan(contexts: Sequence[Context], budget: int, max_depth: int, branch: int) -> None:
    if not len(contexts):
        raise ValueError("contexts must hold at least one request: got none")
    if isinstance(budget, bool) or budget != int(budget) or budget < 0:
        raise ValueError(f"budget must be a whole number >= 0: got {budget}")
    if max_depth < 1 or branch < 1:
        raise ValueError(f"max_depth and branch must be >= 1: got {max_depth}, {branch}")


def plan(
    policy: str,
    drafter: LanguageModel,
    contexts: Sequence[Sequence[int]],
    budget: int,
    *,
    max_depth: int = MAX_DEPTH,
    branch: int = BRANCH,
    rounding: str = "floor",
    **echo: object,
) -> SuperTree:
    """Draft trees for a batch.

    Args:
        policy: "none" drafts nothing. "chain": the likeliest token, again and again,
            min(⌊K/B⌋, max_depth) deep. "static": the two likeliest at depths 1 and 2, then a chain,
            ⌊K/B⌋ nodes. "dynamic": for each request its ⌊K/B⌋ nodes of highest score. "global": the
            K nodes of highest score of the whole batch. "echo": :class:`EchoScheduler`.
        drafter: the draft model. What it says of a context is kept: its weights must not change.
        contexts: tokens of each request so far.
        budget: K, nodes to verify besides the roots.
        max_depth: of a node.
        branch: children of a node that are considered.
        rounding: of K/B for "dynamic": "floor", or "ceil", which may spend more than K.
        echo: further arguments of :class:`EchoScheduler`.

    Returns:
        The trees; ``levels`` is the depth of the deepest node, for "echo" the passes it made.

    Raises:
        ValueError: an unknown policy or rounding, no requests, a budget below 0.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}: got {policy!r}")
    if rounding not in ("floor", "ceil"):
        raise ValueError(f"rounding must be 'floor' or 'ceil': got {rounding!r}")
    _check_plan(contexts, budget, max_depth, branch)
    given = [tuple(int(t) for t in c) for c in contexts]
    lm, B = _cached(drafter), len(given)
    if policy == "echo":
        scheduler = EchoScheduler(budget, max_depth=max_depth, branch=branch, **echo)
        return scheduler.plan(drafter, given)
    if echo:
        raise ValueError(f"arguments must be those of plan: got {', '.join(echo)}")
    grown = _Growing(given)
    each = budget // B if rounding == "floor" else -(-budget // B)
    if policy == "chain":
        _grow_chains(grown, lm, min(each, max_depth))
    elif policy == "static":
        _grow_static(grown, lm, each, max_depth)
    elif policy == "dynamic":
        for r in range(B):
            _grow_best(grown, lm, [r], each, max_depth, branch)
    elif policy == "global":
        _grow_best(grown, lm, range(B), budget, max_depth, branch)
    deepest = max((max(d, default=0) for d in grown.depth), default=0)
    return grown.finish(deepest)


def _grow_chains(grown: _Growing, lm: _Cached, length: int) -> None:
    ends = [-1] * len(grown.contexts)
    for _ in range(length):
        rows = lm.top([grown.at(r, e)[0] for r, e in enumerate(ends)], 1)
        for r, (tokens, probs) in enumerate(rows):
            if tokens:
                score = grown.at(r, ends[r])[1] * probs[0]
                ends[r] = grown.add(r, ends[r], tokens[0], score)


def _grow_static(grown: _Growing, lm: _Cached, n: int, max_depth: int) -> None:
    """Two children at depths 1 and 2, level by level, then a chain from the likeliest path."""
    for r in range(len(grown.contexts) if n else 0):
        level, left = [-1], n
        for depth in range(1, max_depth + 1):
            width = 2 if depth <= 2 else 1
            following = []
            for node in level:
                context, score, _ = grown.at(r, node)
                tokens, probs = lm.top([context], width)[0]
                for token, q in zip(tokens, probs, strict=True):
                    if left:
                        following.append(grown.add(r, node, token, score * q))
                        left -= 1
            level = following if depth < 2 else following[:1]
            if not left or not level:
                break


def _grow_best(
    grown: _Growing,
    lm: _Cached,
    requests: Sequence[int],
    n: int,
    max_depth: int,
    branch: int,
) -> None:
    """Best first: scores fall from parent to child, so the n best are closed under parents."""
    heap: list[tuple[float, int, int, int]] = []

    def push(request: int, node: int) -> None:
        context, score, depth = grown.at(request, node)
        if depth == max_depth:
            return
        tokens, probs = lm.top([context], branch)[0]
        for token, q in zip(tokens, probs, strict=True):
            heapq.heappush(heap, (-score * q, request, node, token))

    if not n:
        return
    lm.rows([grown.contexts[r] for r in requests])  # one batch for all roots
    for r in requests:
        push(r, -1)
    for _ in range(n):
        if not heap:
            return
        score, request, node, token = heapq.heappop(heap)
        push(request, grown.add(request, node, token, -score))


@dataclass(frozen=True)
class EchoScheduler:
    """One budget for a batch: depth first, gated at a few depths, then width.

    At each depth every active request proposes its likeliest child; its other children go to a
    pool. At a gate, with L nodes of the budget left, the water level w is the L-th largest score
    among proposals and pool: requests whose proposal is below max(τ0, w) are frozen. Once nobody is
    active, the pool's best are added in waves, of which the best are expanded in one pass a wave.

    Attributes:
        budget: K >= 0, roots not counted.
        gates: depths at which confidence is looked at, rising, >= 1.
        tau0: least score that goes on at a gate.
        max_depth: of a node.
        branch: children of a node that are considered.
        reserve: gate by budget alone in place of scores: keep ⌊L/(next gate − d)⌋. For comparison.

    Raises:
        ValueError: a budget below 0, gates that do not rise, a number out of range.
    """

    budget: int
    gates: tuple[int, ...] = GATES
    tau0: float = 0.2
    max_depth: int = MAX_DEPTH
    branch: int = BRANCH
    reserve: bool = False

    def __post_init__(self):
        _check_plan([()], self.budget, self.max_depth, self.branch)
        gates = tuple(self.gates)
        if any(g < 1 for g in gates) or any(b <= a for a, b in pairwise(gates)):
            raise ValueError(f"gates must rise, from 1 on: got {gates}")
        if not 0 <= self.tau0 <= 1:
            raise ValueError(f"tau0 must be in [0, 1]: got {self.tau0}")

    def plan(self, drafter: LanguageModel, contexts: Sequence[Context]) -> SuperTree:
        """Draft the super-tree of a batch."""
        lm = _cached(drafter)
        grown = _Growing([tuple(c) for c in contexts])
        heap: list[tuple[float, int, int, int]] = []  # (−score, request, parent, token)
        levels = self._deepen(grown, lm, heap)
        levels += self._widen(grown, lm, heap)
        return grown.finish(levels)

    def _deepen(self, grown: _Growing, lm: _Cached, heap: list) -> int:
        ends = dict.fromkeys(range(len(grown.contexts)), -1)
        levels = 0
        for d in range(1, self.max_depth + 1):
            if not ends or grown.used >= self.budget:
                break
            rows = lm.top([grown.at(r, end)[0] for r, end in ends.items()], self.branch)
            levels += 1
            proposals = []
            for (r, end), (tokens, probs) in zip(ends.items(), rows, strict=True):
                score = grown.at(r, end)[1]
                made = [(-score * q, r, end, token) for token, q in zip(tokens, probs, strict=True)]
                proposals += made[:1]
                for item in made[1:]:
                    heapq.heappush(heap, item)
            proposals.sort()
            kept = self._gate(d, proposals, heap, self.budget - grown.used)
            for item in proposals[len(kept) :]:
                heapq.heappush(heap, item)
            ends = {r: grown.add(r, end, token, -s) for s, r, end, token in kept}
        return levels

    def _gate(self, depth: int, proposals: list, heap: list, left: int) -> list:
        """Which proposals go on; they are sorted, the best first."""
        if depth not in self.gates:
            return proposals[:left]
        if self.reserve:
            following = next((g for g in self.gates if g > depth), self.max_depth + 1)
            return proposals[: max(left // (following - depth), 0)]
        floor = max(self.tau0, _water_level([*proposals, *heap], left))
        return [item for item in proposals if -item[0] >= floor][:left]

    def _widen(self, grown: _Growing, lm: _Cached, heap: list) -> int:
        levels = 0
        while grown.used < self.budget and heap:
            left = self.budget - grown.used
            wave = min(left, max(4, -(-left // 2)), len(heap))
            popped = [heapq.heappop(heap) for _ in range(wave)]
            added = [(s, r, grown.add(r, parent, token, -s)) for s, r, parent, token in popped]
            left = self.budget - grown.used
            if not left:
                break
            floor = _water_level(heap, left)
            fit = [
                (r, node)
                for s, r, node in added
                if -s >= floor and grown.at(r, node)[2] < self.max_depth
            ]
            if not fit:
                continue
            rows = lm.top([grown.at(r, node)[0] for r, node in fit], self.branch)
            levels += 1
            for (r, node), (tokens, probs) in zip(fit, rows, strict=True):
                score = grown.at(r, node)[1]
                for token, q in zip(tokens, probs, strict=True):
                    heapq.heappush(heap, (-score * q, r, node, token))
        return levels


def _water_level(items: list, n: int) -> float:
    """The n-th largest score of (−score, …) items; 0 with fewer."""
    if n < 1 or len(items) < n:
        return 0.0
    return -heapq.nsmallest(n, (item[0] for item in items))[-1]


# --------------------------------------------------------------------------------------------
# Verification


class VerifyResult(NamedTuple):
    """What a step emits.

    Attributes:
        tokens: one list a request, accepted tokens and the bonus after them.
        n_accepted: (B,) int64, drafted tokens accepted.
        bonus: (B,) int64, the token after them.
    """

    tokens: list[list[int]]
    n_accepted: np.ndarray
    bonus: np.ndarray


def walk(tree: SuperTree, samples: Sequence[int]) -> VerifyResult:
    """Follow the target's samples through the trees.

    Args:
        tree: the batch's trees.
        samples: (N,) one sample of the target at each packed node, roots included.

    Raises:
        ValueError: not one sample a node.
    """
    packed = tree.pack()
    samples = torch.as_tensor(samples).to(torch.int32)
    if samples.shape != packed.tokens.shape:
        raise ValueError(
            f"samples must be ({len(packed.tokens)},), one a packed node: got "
            f"{tuple(samples.shape)}"
        )
    found = verify_tree(
        samples, packed.tokens, packed.parent, packed.offsets, most=packed.most, depth=tree.depth
    )
    accepted = found.accepted.numpy().astype(np.int64)
    tokens = [row[: n + 1] for row, n in zip(found.tokens.tolist(), accepted, strict=True)]
    return VerifyResult(tokens, accepted, np.array([row[-1] for row in tokens]))


def verify(
    target: LanguageModel,
    tree: SuperTree,
    *,
    temperature: float = 1.0,
    generator: np.random.Generator | None = None,
) -> VerifyResult:
    """Verify drafted trees without loss: each emitted token is a sample of the target.

    At every node the target draws x; if a child holds x it is accepted and the walk goes on there,
    else x is emitted and the walk ends.

    Args:
        target: the model whose law the output has.
        tree: the batch's trees.
        temperature: >= 0; the target's probabilities to the power 1/T, 0 takes the likeliest.
        generator: of the samples; None seeds one with 0.

    Raises:
        ValueError: a temperature below 0.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0: got {temperature}")
    rows = np.stack(_cached(target).rows(tree.node_contexts()))
    if temperature == 0:
        return walk(tree, rows.argmax(axis=1))
    if temperature != 1:
        rows = rows ** (1 / temperature)
    generator = np.random.default_rng(0) if generator is None else generator
    cumulative = rows.cumsum(axis=1)
    u = generator.random(len(rows)) * cumulative[:, -1]
    return walk(tree, (cumulative <= u[:, None]).sum(axis=1))


def verify_greedy(target: LanguageModel, tree: SuperTree) -> VerifyResult:
    """Verify against the target's likeliest tokens."""
    return verify(target, tree, temperature=0.0)


def expected_accepted(tree: SuperTree, target: LanguageModel | None = None) -> float:
    """Drafted tokens that a step accepts, in expectation.

    Args:
        tree: the batch's trees.
        target: gives the exact expectation, Σ_v Π p along v's path; without it the draft's own
            estimate Σ_v s(v), which is exact where the draft is the target.
    """
    if target is None:
        return float(tree.scores.sum())
    rows, at, total = _cached(target).rows(tree.node_contexts()), 0, 0.0
    for t in tree.trees:
        reach = [1.0]
        for p, x in zip(t.parent.tolist(), t.token.tolist(), strict=True):
            reach.append(reach[p + 1] * float(rows[at + p + 1][x]))
        total += sum(reach[1:])
        at += len(t.parent) + 1
    return total


# --------------------------------------------------------------------------------------------
# Serving


@dataclass(frozen=True)
class CostModel:
    """Time of a step: flat up to a knee of tokens, then proportional; and draft passes.

    Attributes:
        knee: tokens of a target pass at which arithmetic becomes the limit, >= 1.
        draft_cost: of a draft pass, in units of a memory-bound target pass, >= 0.

    Raises:
        ValueError: a number out of range.
    """

    knee: int
    draft_cost: float

    def __post_init__(self):
        if self.knee < 1 or not self.draft_cost >= 0:
            raise ValueError(
                f"knee must be >= 1 and draft_cost >= 0: got {self.knee}, {self.draft_cost}"
            )

    def time(self, n_tokens: int, levels: int) -> float:
        """max(1, n/knee) + draft_cost · levels."""
        return max(1.0, n_tokens / self.knee) + self.draft_cost * levels

    def budget(self, batch: int) -> int:
        """Nodes up to the knee, at most 24 a request; 0 beyond it."""
        return int(min(max(self.knee - batch, 0), 24 * batch))


class ServeStats(NamedTuple):
    """A run of the server.

    Attributes:
        tokens: what each request got.
        mean_tokens: emitted a request and step, the bonus included; 1 is plain decoding.
        nodes: verified a step, on average.
        levels: draft passes a step, on average.
        throughput: tokens a unit of time.
    """

    tokens: list[list[int]]
    mean_tokens: float
    nodes: float
    levels: float
    throughput: float


def serve(
    policy: str,
    target: LanguageModel,
    drafter: LanguageModel,
    contexts: Sequence[Sequence[int]],
    rounds: int,
    cost: CostModel,
    *,
    budget: int | None = None,
    seed: int = 0,
    eos: int | None = None,
    **options: object,
) -> ServeStats:
    """Serve a batch for some steps by sampling.

    Args:
        policy: one of ``POLICIES``.
        target: the model that is served.
        drafter: the draft model.
        contexts: tokens of each request so far.
        rounds: steps, >= 1.
        cost: time of a step, and the budget.
        budget: K; None takes ``cost.budget`` of the requests that are left.
        seed: of the samples.
        eos: token with which a request ends; it leaves the batch, and its share is the others'.
        options: further arguments of :func:`plan`.

    Raises:
        ValueError: rounds below 1, or what :func:`plan` refuses.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1: got {rounds}")
    rng = np.random.default_rng(seed)
    now = [tuple(int(t) for t in c) for c in contexts]
    out: list[list[int]] = [[] for _ in now]
    live = list(range(len(now)))
    emitted = time = 0.0
    nodes, levels, steps, served = 0, 0, 0, 0
    while live and steps < rounds:
        K = cost.budget(len(live)) if budget is None else budget
        tree = plan("none" if K == 0 else policy, drafter, [now[r] for r in live], K, **options)
        found = verify(target, tree, generator=rng)
        ended = []
        for r, tokens in zip(live, found.tokens, strict=True):
            if eos in tokens:
                tokens = tokens[: tokens.index(eos) + 1]
                ended.append(r)
            out[r] += tokens
            now[r] = (*now[r], *tokens)[-2 * MAX_DEPTH :]
            emitted += len(tokens)
        time += cost.time(len(live) + tree.n_nodes, tree.levels)
        nodes, levels = nodes + tree.n_nodes, levels + tree.levels
        steps, served = steps + 1, served + len(live)
        live = [r for r in live if r not in ended]
    return ServeStats(out, emitted / served, nodes / steps, levels / steps, emitted / time)


# --------------------------------------------------------------------------------------------
# Data

KNEE = 64


class Models(NamedTuple):
    """The test bed.

    Attributes:
        target: six characters of context.
        draft: three characters.
        held_out: (n,) int64, the last 15 % of the text.
        vocab_size: characters.
        sha256: of the text.
    """

    target: NGramLM
    draft: NGramLM
    held_out: np.ndarray
    vocab_size: int
    sha256: str


@cache
def models() -> Models:
    """Target and draft on Python's help texts. Kept for the rest of the process."""
    corpus = load_pydoc_topics()
    tokenizer = CharTokenizer(corpus.text)
    tokens = tokenizer.encode(corpus.text)
    train, held = split_tokens(tokens, valid_frac=0.15)
    V = tokenizer.vocab_size
    target, draft = (NGramLM(o).fit(train, vocab_size=V) for o in (6, 3))
    digest = hashlib.sha256(corpus.text.encode()).hexdigest()
    return Models(target, draft, np.asarray(held), V, digest)


def contexts(batch: int, seed: int) -> list[Context]:
    """The last twelve characters before random places of the held-out text."""
    held = models().held_out
    rng = np.random.default_rng((seed, 42))
    ends = rng.integers(MAX_DEPTH, len(held), size=batch)
    return [tuple(held[e - MAX_DEPTH : e].tolist()) for e in ends]


# --------------------------------------------------------------------------------------------
# Studies

BATCHES = {1: 100, 4: 30, 8: 15, 16: 10, 32: 6, 48: 6}
"""Batches a seed, by requests of a batch."""

SETTINGS = ((1, 24), (4, 60), (8, 56), (16, 48), (32, 32), (48, 16))
"""Requests and budget up to the knee."""

DRAFT_COSTS = (0.01, 0.03)

VARIANTS = {
    "none": ("none", {}),
    "chain": ("chain", {}),
    "static": ("static", {}),
    "dynamic": ("dynamic", {}),
    "dynamic-ceil": ("dynamic", {"rounding": "ceil"}),
    "global": ("global", {}),
    "echo": ("echo", {}),
    "echo-dense": ("echo", {"gates": tuple(range(1, MAX_DEPTH + 1))}),
    "echo-reserve": ("echo", {"reserve": True}),
}
"""Policies and variants by name."""


def compare_run(
    policy: str, B: int, K: int, seed: int, *, sigma: float = 0.0, batches: int | None = None
) -> dict[str, float]:
    """A policy on held-out contexts, evaluated exactly: tokens, nodes, passes, throughput.

    Args:
        policy: a name of ``VARIANTS``.
        B: requests.
        K: budget.
        seed: of the contexts.
        sigma: noise of the draft's confidence.
        batches: how many; None takes ``BATCHES``.
    """
    bed = models()
    name, options = VARIANTS[policy]
    draft = bed.draft if sigma == 0 else _noisy(sigma, seed)
    emitted = nodes = levels = 0.0
    times = dict.fromkeys(DRAFT_COSTS, 0.0)
    n = BATCHES.get(B, 6) if batches is None else batches
    for i in range(n):
        tree = plan(name, draft, contexts(B, 1000 * seed + i), K, **options)
        emitted += B + expected_accepted(tree, bed.target)
        nodes += tree.n_nodes
        levels += tree.levels
        for c in DRAFT_COSTS:
            times[c] += CostModel(KNEE, c).time(B + tree.n_nodes, tree.levels)
    return {
        "tokens": emitted / (n * B),
        "nodes": nodes / n,
        "levels": levels / n,
        **{f"throughput_{c:g}": emitted / t for c, t in times.items()},
    }


@cache
def _noisy(sigma: float, seed: int) -> NoisyLM:
    return NoisyLM(models().draft, sigma, seed=seed)


def overload_run(policy: str, seed: int, *, B: int = 128, K: int | None = None) -> float:
    """Throughput of sampled serving, 40 rounds, draft passes at 0.03.

    ``K`` None takes the cost model's budget.
    """
    bed = models()
    name, options = VARIANTS[policy]
    made = serve(
        name,
        bed.target,
        bed.draft,
        contexts(B, seed),
        40,
        CostModel(KNEE, 0.03),
        budget=K,
        seed=seed,
        **options,
    )
    return made.throughput


RUNS = [
    *(f"{p} {B} {K} 0 {s}" for s in range(3) for B, K in SETTINGS for p in VARIANTS),
    *(f"{p} 16 48 0.5 {s}" for s in range(3) for p in ("echo", "echo-dense", "dynamic")),
    *(f"{p} 16 {K} 0 {s}" for s in range(3) for K in (8, 16, 32, 96) for p in ("echo", "dynamic")),
    *(f"{p} {B} 0 0 0" for B in (64, 96, 128) for p in ("none",)),
    *(
        f"{p} {B} 64 0 {s}"
        for s in range(3)
        for B in (64, 96, 128)
        for p in ("echo", "dynamic-ceil")
    ),
]


def study_run(*, run: str) -> dict[str, float]:
    """One run of the study, by name: policy, requests, budget, noise, seed."""
    policy, B, K, sigma, seed = run.split()
    return compare_run(policy, int(B), int(K), int(seed), sigma=float(sigma))


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=efficiency/echo`` computes."""


class TableLM:
    """A language model from a table: for tests and small enumerations.

    Args:
        V: tokens.
        seed: of the distributions, drawn for each context from its last two tokens.
    """

    order = 2

    def __init__(self, V: int, seed: int):
        self.V, self.seed = V, seed

    def probs(self, contexts: list[torch.Tensor]) -> torch.Tensor:
        """As :class:`LanguageModel`."""
        rows = []
        for c in contexts:
            rng = np.random.default_rng([self.seed, *c.tolist()[-2:]])
            rows.append(rng.dirichlet(np.ones(self.V)))
        return torch.tensor(np.array(rows))


def best_closed_set(
    model: LanguageModel, contexts: Sequence[Context], budget: int, *, V: int, max_depth: int
) -> float:
    """The largest Σ s(v) over all sets of ``budget`` nodes closed under parents, each tried once.

    For tiny problems: no use is made of scores falling along a path.
    """
    lm = _cached(model)

    def children(context: Context, score: float, depth: int) -> list[tuple[Context, float, int]]:
        if depth == max_depth:
            return []
        row = lm.rows([context])[0]
        return [((*context, x), score * float(row[x]), depth + 1) for x in range(V)]

    def best(frontier: list[tuple[Context, float, int]], left: int) -> float:
        """Over sets that take nodes of the frontier and what is below them."""
        if not left:
            return 0.0
        found = -math.inf
        for i, (context, score, depth) in enumerate(frontier):
            # this one is taken, those before it are not, nor what is below them
            following = frontier[i + 1 :] + children(context, score, depth)
            found = max(found, score + best(following, left - 1))
        return found

    roots = [node for c in contexts for node in children(tuple(c), 1.0, 0)]
    return best(roots, budget)


def law_of_walk(tree: SuperTree, target: LanguageModel) -> dict[tuple[int, ...], float]:
    """The exact law of what :func:`walk` emits for one request, over all samples at its nodes."""
    rows = _cached(target).rows(tree.node_contexts())
    law: dict[tuple[int, ...], float] = {}

    def add(chosen: list[int], weight: float) -> None:
        if len(chosen) == len(rows):
            word = tuple(walk(tree, chosen).tokens[0])
            law[word] = law.get(word, 0.0) + weight
            return
        for x, p in enumerate(rows[len(chosen)]):
            if p > 0:
                add([*chosen, x], weight * float(p))

    add([], 1.0)
    return law


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_mask(fn: Callable) -> None:
    """Exercise 1: ``fn(parent)`` → (n, n) bool, whether column is row or one of its ancestors.

    Raises:
        AssertionError: with the tree that fails.
    """
    rng = np.random.default_rng(0)
    for case in range(20):
        n = int(rng.integers(1, 12))
        parent = np.array([int(rng.integers(-1, i)) if i else -1 for i in range(n)])
        wanted = np.zeros((n, n), dtype=bool)
        for i in range(n):
            j = i
            while j >= 0:
                wanted[i, j] = True
                j = parent[j]
        found = np.asarray(fn(parent.copy()), dtype=bool)
        assert found.shape == (n, n), f"tree {case}: the mask must be ({n}, {n}): {found.shape}"
        off = np.argwhere(found != wanted)
        assert not len(off), (
            f"parents {parent.tolist()}: node {off[0][0]} and node {off[0][1]} are wrong; a node "
            "sees itself and its ancestors, and nothing else"
        )


def check_verify(fn: Callable) -> None:
    """Exercise 2: ``fn(p, children, rng)`` → emitted tokens, by sample and match.

    ``p(path)`` is the target's distribution after a path, a tuple of tokens; ``children(path)`` the
    set of tokens drafted there.

    Raises:
        AssertionError: with the total variation.
    """
    tables = np.random.default_rng(3)
    row = {(): tables.dirichlet(np.ones(3))}
    for x in range(3):
        row[x,] = tables.dirichlet(np.ones(3))
        for y in range(3):
            row[x, y] = tables.dirichlet(np.ones(3))
    for drafted in ({(): {0, 1}, (0,): {2}}, {}):
        rng, n = np.random.default_rng(1), 20_000
        count = np.zeros((3, 3))
        for _ in range(n):
            word = list(fn(row.__getitem__, lambda path, d=drafted: d.get(path, set()), rng))
            assert word, "at least one token is emitted"
            if not drafted:
                assert len(word) == 1, "nothing was drafted: plain sampling emits one token"
            while len(word) < 2:
                word.append(int(rng.choice(3, p=row[tuple(word)])))
            count[word[0], word[1]] += 1
        law = np.array([[row[()][x] * row[x,][y] for y in range(3)] for x in range(3)])
        gap = 0.5 * np.abs(count / n - law).sum()
        assert gap < 0.015, (
            f"drafted {drafted}: the first two tokens are {gap:.3f} in total variation from the "
            "target's law"
        )


def check_global(fn: Callable) -> None:
    """Exercise 3: ``fn(top, B, K)`` → Σ s of the K best nodes of a batch.

    ``top(request, path)`` lists (token, q) of the children of a node.

    Raises:
        AssertionError: with the sum that is possible.
    """
    for seed in range(5):
        lm = TableLM(3, seed)
        given = [(0, 1), (2, 0)]

        def top(request: int, path: tuple[int, ...], lm=lm, given=given) -> list:
            context = torch.tensor([*given[request], *path])
            q = lm.probs([context])[0].tolist()
            return list(enumerate(q)) if len(path) < 3 else []

        found, wanted = float(fn(top, 2, 5)), best_closed_set(lm, given, 5, V=3, max_depth=3)
        assert abs(found - wanted) < 1e-10, (
            f"tables {seed}: 5 nodes can be accepted {wanted:.6f} times, yours {found:.6f}"
        )


def check_break_even(fn: Callable) -> None:
    """Exercise 4: ``fn(B, n, A, knee)`` is the acceptance from which one more node pays.

    B requests with n nodes, of which A are accepted; the pass takes max(1, (B+n)/knee).

    Raises:
        AssertionError: with the case that fails.
    """
    rng = np.random.default_rng(2)
    for _ in range(200):
        B, n = int(rng.integers(1, 100)), int(rng.integers(0, 200))
        A, knee = float(rng.uniform(0, n)), int(rng.integers(1, 120))
        told = float(fn(B, n, A, knee))
        before = (B + A) / max(1.0, (B + n) / knee)
        for a in (told - 1e-6, told + 1e-6):
            after = (B + A + a) / max(1.0, (B + n + 1) / knee)
            assert (after > before) == (a > told), (
                f"B = {B}, n = {n}, A = {A:.2f}, knee {knee}: a node accepted with {a:.4f} makes "
                f"{before:.4f} to {after:.4f}, you said it pays from {told:.4f}"
            )


def check_gate(fn: Callable) -> None:
    """Exercise 5: ``fn(left, depth, gates, max_depth)`` → how many requests a reserving gate keeps.

    ⌊left/(next gate − depth)⌋. The checker shows what it costs at B = K = 32.

    Raises:
        AssertionError: a wrong number, or a policy that does not lose.
    """
    for left, depth, wanted in ((32, 1, 32), (31, 2, 15), (20, 4, 5), (10, 8, 2), (0, 1, 0)):
        found = int(fn(left, depth, GATES, MAX_DEPTH))
        assert found == wanted, (
            f"{left} left at depth {depth}: reserve for every level to the next gate, {wanted}; "
            f"you keep {found}"
        )

    class Reserving(EchoScheduler):
        def _gate(self, depth: int, proposals: list, heap: list, left: int) -> list:
            if depth not in self.gates:
                return proposals[:left]
            return proposals[: max(int(fn(left, depth, self.gates, self.max_depth)), 0)]

    bed = models()
    for seed in (7001, 7002, 7003):
        tokens = []
        for scheduler in (Reserving(32), EchoScheduler(32)):
            total = 0.0
            for i in range(3):
                tree = scheduler.plan(bed.draft, contexts(32, 10 * seed + i))
                total += 32 + expected_accepted(tree, bed.target)
            tokens.append(total)
        assert tokens[0] <= 0.97 * tokens[1], (
            f"contexts {seed}: the reserving gate emits {tokens[0]:.1f} tokens, the default's "
            f"{tokens[1]:.1f}"
        )
