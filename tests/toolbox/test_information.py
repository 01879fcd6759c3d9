"""Entropies against SciPy and closed forms; the Huffman code against bounds and itself."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy

from icmllab.toolbox.information import (
    HuffmanCode,
    code_entropy,
    column_entropies,
    count_entropy,
    huffman_lengths,
)


def draw(a: int, n: int, spread: float, seed: int = 0) -> torch.Tensor:
    x = torch.randn(a, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (spread * x).round().long()


def test_count_entropy_is_scipys():
    counts = torch.tensor([[5, 0, 3, 1], [2, 2, 2, 2], [9, 0, 0, 0]])
    found = count_entropy(counts, miller_madow=False)
    np.testing.assert_allclose(found, scipy_entropy(counts.numpy(), base=2, axis=1), atol=1e-12)
    corrected = count_entropy(counts)
    cells = torch.tensor([3, 4, 1])
    n = counts.sum(dim=1)
    torch.testing.assert_close(corrected - found, (cells - 1) / (2 * n.double() * math.log(2)))
    assert count_entropy(torch.zeros(3)).item() == 0


@pytest.mark.parametrize("spread", [0.2, 3.0, 1e6])
@pytest.mark.parametrize("miller_madow", [True, False])
def test_column_entropies_count_each_column_alone(spread, miller_madow):
    codes = draw(300, 5, spread)
    codes[:, 3] = -7
    codes[:, 4] += 10**9
    expected = [
        count_entropy(torch.unique(c, return_counts=True)[1], miller_madow=miller_madow)
        for c in codes.T
    ]
    found = column_entropies(codes, miller_madow=miller_madow)
    torch.testing.assert_close(found, torch.stack(expected))
    assert found[3] == 0
    mean = code_entropy(codes, "per_column", miller_madow=miller_madow)
    assert mean == pytest.approx(float(found.mean()))
    assert torch.equal(column_entropies(codes.int(), miller_madow=miller_madow), found)


def test_dense_and_sparse_counting_agree():
    codes = draw(500, 4, 2.0)
    wide = codes * 10**6  # the same classes, too far apart for a histogram
    torch.testing.assert_close(column_entropies(codes), column_entropies(wide))


def test_pooled_is_one_table_and_never_less():
    for seed in range(5):
        codes = draw(200, 6, 2.0, seed) * torch.tensor([1, 2, 5, 1, 9, 3])
        pooled = code_entropy(codes, "pooled", miller_madow=False)
        counts = np.unique(codes.numpy(), return_counts=True)[1]
        assert pooled == pytest.approx(scipy_entropy(counts, base=2))
        assert pooled >= code_entropy(codes, "per_column", miller_madow=False)


def test_miller_madow_removes_most_of_the_bias():
    p = torch.full((32,), 1 / 32, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    codes = torch.multinomial(p, 200 * 400, replacement=True, generator=g).view(200, 400)
    plain, corrected = (code_entropy(codes, miller_madow=m) for m in (False, True))
    assert 5 - plain > 0.1
    assert abs(5 - corrected) < 0.01


def test_uniform_rounding_of_a_normal_meets_high_rate_theory():
    codes = draw(400_000, 1, 8.0)
    expected = 0.5 * math.log2(2 * math.pi * math.e * 64)
    assert code_entropy(codes) == pytest.approx(expected, abs=0.003)


def _best_total(counts: list[int]) -> int:
    """Σ counts·length of the best full code, by trying all sorted length sets."""
    n = len(counts)
    best = math.inf
    for lengths in itertools.combinations_with_replacement(range(1, n), n):
        if sum(2.0**-l for l in lengths) <= 1:
            total = sum(c * l for c, l in zip(sorted(counts, reverse=True), lengths, strict=True))
            best = min(best, total)
    return best


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=6))
def test_huffman_lengths_are_optimal(counts):
    lengths = huffman_lengths(torch.tensor(counts))
    assert int((lengths * torch.tensor(counts)).sum()) == _best_total(counts)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-300, 300), min_size=1, max_size=200))
def test_code_has_kraft_sum_one_meets_its_bounds_and_round_trips(values):
    codes = torch.tensor(values)
    table = HuffmanCode.of(codes)
    assert table.kraft == 1
    counts = torch.unique(codes, return_counts=True)[1]
    H = count_entropy(counts, miller_madow=False).item()
    mean = table.n_bits(codes) / len(codes)
    if len(table) == 1:
        assert mean == 0
    else:
        assert H - 1e-12 <= mean < H + 1
    data = table.encode(codes)
    assert len(data) == -(-table.n_bits(codes) // 8)
    assert torch.equal(table.decode(data, len(codes)), codes)
    again = HuffmanCode.from_bytes(table.to_bytes() + data)
    assert len(table.to_bytes()) == table.table_nbytes == again.table_nbytes
    assert torch.equal(again.decode(data, len(codes)), codes)


def test_dyadic_counts_cost_exactly_their_entropy():
    codes = torch.tensor([0] * 8 + [1] * 4 + [2] * 2 + [3] * 1 + [4] * 1)
    table = HuffmanCode.of(codes)
    assert table.lengths.tolist() == [1, 2, 3, 4, 4]
    assert table.words.tolist() == [0b0, 0b10, 0b110, 0b1110, 0b1111]
    assert table.n_bits(codes) == 16 * 1.875
    assert table.encode(torch.tensor([4, 0, 1])) == bytes([0b11110100])


def test_words_are_a_prefix_code_in_canonical_order():
    table = HuffmanCode.of(draw(2000, 1, 4.0))
    words = [
        format(w, f"0{l}b")
        for w, l in zip(table.words.tolist(), table.lengths.tolist(), strict=True)
    ]
    assert not any(a != b and b.startswith(a) for a in words for b in words)
    order = sorted(range(len(table)), key=lambda i: (len(words[i]), int(table.symbols[i])))
    ranked = [words[i] for i in order]
    assert ranked == sorted(ranked)


def test_a_long_skewed_table_and_a_constant_one():
    fibonacci = [1, 1]
    while len(fibonacci) < 30:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    lengths = huffman_lengths(torch.tensor(fibonacci))
    assert int(lengths.max()) == 29
    table = HuffmanCode(torch.arange(30), lengths)
    codes = torch.arange(30).repeat(3)
    assert torch.equal(table.decode(table.encode(codes), 90), codes)
    constant = HuffmanCode.of(torch.full((5, 2), -3))
    assert constant.encode(torch.full((5, 2), -3)) == b""
    assert constant.decode(b"", 10).tolist() == [-3] * 10


def test_large_streams_round_trip_fast_enough_to_be_vectorised():
    codes = draw(100_000, 1, 6.0)[:, 0]
    table = HuffmanCode.of(codes)
    assert torch.equal(table.decode(table.encode(codes), len(codes)), codes)


def test_bad_calls_are_named():
    table = HuffmanCode.of(torch.tensor([1, 1, 2, 3]))
    with pytest.raises(ValueError, match="symbols of the table: got 9"):
        table.encode(torch.tensor([1, 9]))
    data = table.encode(torch.tensor([3, 3, 3, 3]))
    with pytest.raises(ValueError, match="ends early"):
        table.decode(data, 10)
    with pytest.raises(ValueError, match="no bytes"):
        table.decode(b"", 1)
    with pytest.raises(ValueError, match="Kraft"):
        HuffmanCode(torch.tensor([0, 1]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="rise"):
        HuffmanCode(torch.tensor([1, 0]), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="hold a table"):
        HuffmanCode.from_bytes(table.to_bytes()[:-1])
    with pytest.raises(ValueError, match="counts"):
        huffman_lengths(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="mode"):
        code_entropy(torch.ones(2, 2).long(), "rows")
    with pytest.raises(ValueError, match="integers"):
        code_entropy(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"\(a, n\)"):
        code_entropy(torch.ones(4).long())
    with pytest.raises(ValueError, match="counts must be >= 0"):
        count_entropy(torch.tensor([1, -1]))
