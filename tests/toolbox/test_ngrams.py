"""The n-gram model against counts in dictionaries, and its samples against its own law."""

import math
from collections import Counter, defaultdict

import pytest
import torch

from icmllab.toolbox.ngrams import NGramLM
from icmllab.toolbox.text import load_char_data


def text(n: int, V: int, seed: int = 0) -> torch.Tensor:
    """A Markov text in which some contexts are rare."""
    g = torch.Generator().manual_seed(seed)
    steps = torch.rand(n, generator=g).square() * V
    return steps.long().cumsum(0) % V


def by_hand(ids: list[int], order: int, V: int):
    """p(next | context) by the definition, from dictionaries."""
    follow = defaultdict(Counter)
    for o in range(order + 1):
        for i in range(o, len(ids)):
            follow[tuple(ids[i - o : i])][ids[i]] += 1

    def p(context: list[int]) -> list[float]:
        probs = [1 / V] * V
        for o in range(min(order, len(context)) + 1):
            seen = follow.get(tuple(context[len(context) - o :]))
            if seen is None:
                break
            N, T = sum(seen.values()), len(seen)
            probs = [(seen[x] + T * probs[x]) / (N + T) for x in range(V)]
        return probs

    return p


@pytest.mark.parametrize("order", [0, 1, 2, 4])
@pytest.mark.parametrize("V", [3, 11])
def test_probabilities_follow_the_definition(order, V):
    ids = text(300, V)
    model, p = NGramLM(order).fit(ids, vocab_size=V + 2), by_hand(ids.tolist(), order, V + 2)
    g = torch.Generator().manual_seed(1)
    contexts = [torch.randint(0, V + 2, (k,), generator=g) for k in (0, 1, 2, 3, 5, 9, 4, 4)]
    contexts += [ids[i : i + 5] for i in range(0, 50, 7)]
    found = model.probs(contexts)
    expected = torch.tensor([p(c.tolist()) for c in contexts], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.sum(1), torch.ones(len(contexts)).double())
    assert float(found.min()) > 0


def test_equal_lengths_may_come_as_a_matrix():
    ids = text(200, 5)
    model = NGramLM(3).fit(ids)
    rows = ids[:60].view(6, 10)
    assert torch.equal(model.probs(rows), model.probs(list(rows)))
    assert torch.equal(model.probs(rows), model.probs(rows[:, -3:]))
    assert torch.equal(model.probs(rows[:, :2]), model.probs(list(rows[:, :2])))


@pytest.mark.parametrize("order", [0, 2, 3])
def test_log_probs_are_those_of_growing_contexts(order):
    ids = text(400, 6)
    model = NGramLM(order).fit(ids[:300], vocab_size=6)
    rows = torch.stack([ids[300:320], ids[330:350]])
    found = model.log_probs(rows)
    for b in range(2):
        p = model.probs([rows[b, :i] for i in range(20)])
        expected = p.gather(1, rows[b][:, None])[:, 0].log()
        torch.testing.assert_close(found[b], expected, rtol=1e-12, atol=0)
    assert torch.equal(model.log_probs(rows[0]), found[0])


def test_the_cut_between_levels_is_the_first_context_not_seen():
    ids = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    model = NGramLM(2).fit(ids, vocab_size=4)
    # 3 was never seen: a context that ends in it gives what no context gives
    empty = model.probs([torch.tensor([], dtype=torch.int64)])
    assert torch.equal(model.probs([torch.tensor([1, 3])]), empty)
    # (2, 1) was not seen, (1) was
    assert torch.equal(model.probs([torch.tensor([2, 1])]), model.probs([torch.tensor([1])]))


def test_samples_follow_the_law_of_their_contexts():
    ids = text(500, 4)
    model = NGramLM(2).fit(ids)
    context = ids[10:13]
    n = 40_000
    drawn = model.sample(context.expand(n, -1), 2, generator=torch.Generator().manual_seed(0))
    first = model.probs([context])[0]
    second = torch.stack(
        [model.probs([torch.cat([context, torch.tensor([x])])])[0] for x in range(4)]
    )
    law = (first[:, None] * second).flatten()
    share = (drawn[:, 0] * 4 + drawn[:, 1]).bincount(minlength=16) / n
    assert 0.5 * (share - law).abs().sum() < 0.015
    again = model.sample(context.expand(n, -1), 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)


def test_temperature_sharpens_and_zero_takes_the_largest():
    ids = text(500, 5)
    model = NGramLM(1).fit(ids)
    contexts = torch.arange(5)[:, None]
    p = model.probs(contexts)
    assert torch.equal(model.sample(contexts, 1, temperature=0)[:, 0], p.argmax(1))
    many = contexts[:1].expand(30_000, -1)
    drawn = model.sample(many, 1, temperature=0.5, generator=torch.Generator().manual_seed(3))
    law = p[0].square() / p[0].square().sum()
    share = drawn[:, 0].bincount(minlength=5) / 30_000
    assert (share - law).abs().max() < 0.01


def test_context_predicts_held_out_text():
    data = load_char_data()
    V = data.tokenizer.vocab_size
    bits = {}
    for order in (0, 3, 6):
        model = NGramLM(order).fit(data.train, vocab_size=V)
        held_out = data.valid[:20_000].view(20, 1000)
        bits[order] = -float(model.log_probs(held_out).mean()) / math.log(2)
    assert bits[0] < math.log2(V) - 1
    # six characters are hardly better than three on other pages, and never as bad as none
    assert max(bits[3], bits[6]) < 0.6 * bits[0]


def test_bad_calls_are_named():
    ids = text(50, 5)
    with pytest.raises(ValueError, match="order"):
        NGramLM(-1)
    with pytest.raises(ValueError, match="smoothing"):
        NGramLM(2, "kneser_ney")
    with pytest.raises(ValueError, match="fitted"):
        NGramLM(2).probs(ids[None])
    with pytest.raises(ValueError, match="ids must be in"):
        NGramLM(2).fit(ids, vocab_size=3)
    with pytest.raises(ValueError, match="n > order"):
        NGramLM(2).fit(ids[:2])
    with pytest.raises(ValueError, match=r"V\^\(order\+1\)"):
        NGramLM(9).fit(ids, vocab_size=103)
    model = NGramLM(2).fit(ids)
    for contexts, message in (([], "at least one"), (ids, "length"), (ids[None] + 5, "tokens in")):
        with pytest.raises(ValueError, match=message):
            model.probs(contexts)
    with pytest.raises(ValueError, match="ids"):
        model.log_probs(ids + 5)
    with pytest.raises(ValueError, match="temperature"):
        model.sample(ids[None], 1, temperature=-1)
