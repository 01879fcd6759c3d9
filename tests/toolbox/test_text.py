"""The corpus, its tokens and its batches."""

import hashlib
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icmllab.toolbox.text import (
    CharTokenizer,
    batch_starts,
    load_char_data,
    load_pydoc_topics,
    split_tokens,
    windows,
)


def test_corpus_holds_every_topic_in_the_order_of_their_names():
    from pydoc_data.topics import topics

    corpus = load_pydoc_topics()
    assert len(corpus.text) == sum(len(t) for t in topics.values()) > 300_000
    position = 0
    for name in sorted(topics):
        assert corpus.text.startswith(topics[name], position)
        position += len(topics[name])
    assert corpus.sha256 == hashlib.sha256(corpus.text.encode()).hexdigest()


def test_a_stripped_python_gets_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    load_pydoc_topics.cache_clear()
    with pytest.raises(ImportError, match="install a full Python"):
        load_pydoc_topics()
    monkeypatch.undo()
    assert load_pydoc_topics().text


@settings(deadline=None)
@given(st.text(alphabet="ab \n\té☃𝄞\x00", min_size=1, max_size=60))
def test_tokens_decode_to_their_text(text):
    tokenizer = CharTokenizer(text)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert int(tokens.max()) < tokenizer.vocab_size == len(set(text))


def test_tokenizer_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="'x'"):
        CharTokenizer("abc").encode("abx")
    with pytest.raises(ValueError, match="empty"):
        CharTokenizer("")


def test_data_are_cut_once_ninety_to_ten_without_overlap():
    data, text = load_char_data(), load_pydoc_topics().text
    assert data.tokenizer.decode(torch.cat([data.train, data.valid])) == text
    assert len(data.valid) == round(0.1 * len(text))
    assert data.sha256 == load_pydoc_topics().sha256


def test_windows_hold_consecutive_tokens_in_any_shape():
    tokens = torch.arange(100)
    out = windows(tokens, torch.tensor([[0, 5], [90, 93]]), 7)
    assert out.shape == (2, 2, 7)
    assert out[1, 0].tolist() == list(range(90, 97))
    assert out[1, 1].tolist() == list(range(93, 100))
    with pytest.raises(ValueError, match=r"\[0, 93\]"):
        windows(tokens, torch.tensor([94]), 7)


def test_batches_depend_on_the_seed_alone_and_reach_both_ends():
    draw = {"length": 3, "batches": 50, "batch_size": 8}
    first = batch_starts(12, seed=1, **draw)
    torch.manual_seed(123)
    assert torch.equal(first, batch_starts(12, seed=1, **draw))
    assert not torch.equal(first, batch_starts(12, seed=2, **draw))
    assert first.shape == (50, 8)
    assert set(first.unique().tolist()) == set(range(10))
    longer = batch_starts(12, seed=1, length=3, batches=60, batch_size=8)
    assert torch.equal(longer[:50], first), "a longer run must begin like a shorter one"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: split_tokens(torch.arange(5), valid_frac=1.0), "valid_frac"),
        (lambda: split_tokens(torch.arange(1), valid_frac=0.1), "tokens"),
        (lambda: windows(torch.arange(5), torch.tensor([0]), 0), "length"),
        (lambda: batch_starts(2, length=3, batches=1, batch_size=1, seed=0), "n_tokens"),
        (lambda: batch_starts(9, length=3, batches=0, batch_size=1, seed=0), "batches"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
