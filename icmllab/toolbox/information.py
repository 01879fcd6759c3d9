"""How many bits integer codes need: entropies, and a Huffman code that spends them.

Entropies are of the empirical distribution, in bits. The plug-in estimate is low by about
(K − 1)/(2 n ln 2) bits for K distinct values in n samples; the Miller–Madow estimate adds that.
"""

import heapq
import math
from dataclasses import dataclass
from functools import cached_property

import torch

MODES = ("per_column", "pooled")

# cells of a histogram held at once, as a multiple of the codes counted
_DENSE = 8
# bits of a window that int64 still holds
_MAX_LENGTH = 62


def count_entropy(counts: torch.Tensor, *, miller_madow: bool = True) -> torch.Tensor:
    """Entropy in bits of each histogram.

    H = −Σ (c/n) log2(c/n), plus (K − 1)/(2 n ln 2) with K cells that are not empty.

    Args:
        counts: (..., n_cells) counts >= 0.
        miller_madow: False leaves the correction out.

    Returns:
        (...) float64; 0 for a histogram without samples.

    Raises:
        ValueError: negative counts, or none.
    """
    counts = torch.as_tensor(counts)
    if counts.ndim < 1 or counts.shape[-1] < 1:
        raise ValueError(f"counts must be (..., n_cells), not empty: got {tuple(counts.shape)}")
    if counts.numel() and float(counts.min()) < 0:
        raise ValueError(f"counts must be >= 0: got {float(counts.min())}")
    counts = counts.double()
    total = counts.sum(dim=-1)
    n = total.clamp_min(1.0)
    entropy = n.log2() - torch.special.xlogy(counts, counts).sum(dim=-1) / (n * math.log(2))
    # of one value, rounding may leave −1e-16
    entropy = entropy.clamp_min(0.0) * (total > 0)
    if miller_madow:
        cells = (counts > 0).sum(dim=-1)
        entropy = entropy + (cells - 1).clamp_min(0) / (2 * n * math.log(2))
    return entropy


def _as_codes(codes: object) -> torch.Tensor:
    codes = torch.as_tensor(codes)
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes must be integers: got dtype {codes.dtype}")
    if codes.ndim != 2 or 0 in codes.shape:
        raise ValueError(f"codes must be (a, n), not empty: got shape {tuple(codes.shape)}")
    return codes.long()


def column_entropies(codes: object, *, miller_madow: bool = True) -> torch.Tensor:
    """Entropy in bits of each column's values: what the column costs a row, with its own table.

    Args:
        codes: (a, n) integers.
        miller_madow: False gives the plug-in estimate.

    Returns:
        (n,) float64.

    Raises:
        ValueError: codes that are not integers, not two-dimensional, or empty.
    """
    codes = _as_codes(codes)
    a, n = codes.shape
    low = codes.amin(dim=0)
    width = int((codes.amax(dim=0) - low).max()) + 1
    if width >= 2**62 // n:
        raise ValueError(f"codes must span less than 2^62 / n values: got {width} in {n} columns")
    keys = (codes - low + width * torch.arange(n, device=codes.device)).flatten()
    if n * width <= _DENSE * keys.numel():
        counts = torch.bincount(keys, minlength=n * width).view(n, width)
        return count_entropy(counts, miller_madow=miller_madow)
    values, counts = torch.unique(keys, return_counts=True)
    column = torch.div(values, width, rounding_mode="floor")
    weight = counts.double()
    zero = torch.zeros(n, dtype=torch.float64, device=codes.device)
    spread = zero.index_add(0, column, weight * weight.log2())
    entropy = (math.log2(a) - spread / a).clamp_min(0.0)
    if miller_madow:
        cells = zero.index_add(0, column, torch.ones_like(weight))
        entropy = entropy + (cells - 1) / (2 * a * math.log(2))
    return entropy


def code_entropy(codes: object, mode: str = "per_column", *, miller_madow: bool = True) -> float:
    """Bits per code of a matrix of integers.

    ``per_column``: the mean of the columns' entropies, a table for each. ``pooled``: the entropy of
    all codes under one table; never less, as plug-in estimates.

    Args:
        codes: (a, n) integers.
        mode: "per_column" or "pooled".
        miller_madow: False gives the plug-in estimate.

    Raises:
        ValueError: as in :func:`column_entropies`, or an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}: got {mode!r}")
    codes = _as_codes(codes)
    if mode == "pooled":
        codes = codes.reshape(-1, 1)
    return float(column_entropies(codes, miller_madow=miller_madow).mean())


def huffman_lengths(counts: object) -> torch.Tensor:
    """Code lengths of least total Σ counts·length of any prefix code.

    Args:
        counts: (K,) positive whole numbers.

    Returns:
        (K,) int64; one symbol alone gets length 0.

    Raises:
        ValueError: no symbols, counts below 1, or a code longer than 62 bits.
    """
    counts = torch.as_tensor(counts)
    if counts.ndim != 1 or not len(counts):
        raise ValueError(f"counts must be (K,), not empty: got shape {tuple(counts.shape)}")
    if counts.is_floating_point() or int(counts.min()) < 1:
        raise ValueError(f"counts must be whole numbers >= 1: got {counts.min().item()}")
    n = len(counts)
    parent = [0] * (2 * n - 1)
    heap = [(c, i) for i, c in enumerate(counts.tolist())]
    heapq.heapify(heap)
    for node in range(n, 2 * n - 1):
        # among equal counts the older node first, which keeps the longest code short
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        parent[first[1]] = parent[second[1]] = node
        heapq.heappush(heap, (first[0] + second[0], node))
    depth = [0] * (2 * n - 1)
    for node in range(2 * n - 3, -1, -1):
        depth[node] = depth[parent[node]] + 1
    if max(depth) > _MAX_LENGTH:
        raise ValueError(f"counts must not need codes beyond {_MAX_LENGTH} bits: {max(depth)}")
    return torch.tensor(depth[:n], dtype=torch.int64)


@dataclass(frozen=True)
class HuffmanCode:
    """A canonical Huffman code: symbols and code lengths say everything.

    Code words rise with (length, symbol); bits are written most significant first.

    Attributes:
        symbols: (K,) int64, rising.
        lengths: (K,) int64 bits of each symbol's word.

    Raises:
        ValueError: symbols that do not rise, or lengths that no full prefix code has.
    """

    symbols: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self):
        if self.symbols.ndim != 1 or self.symbols.shape != self.lengths.shape or not len(self):
            raise ValueError(
                "symbols and lengths must be (K,), not empty: "
                f"got {tuple(self.symbols.shape)} and {tuple(self.lengths.shape)}"
            )
        if len(self) > 1 and not bool((self.symbols.diff() > 0).all()):
            raise ValueError("symbols must rise strictly")
        if not bool(((self.lengths >= 0) & (self.lengths <= _MAX_LENGTH)).all()):
            raise ValueError(f"lengths must be in [0, {_MAX_LENGTH}]: got {self.lengths.tolist()}")
        if sum(1 << (_MAX_LENGTH - l) for l in self.lengths.tolist()) != 1 << _MAX_LENGTH:
            raise ValueError(f"lengths must have Kraft sum 1: got {self.kraft}")

    @classmethod
    def of(cls, codes: object) -> "HuffmanCode":
        """The code for integers of any shape, from how often each occurs.

        Raises:
            ValueError: no codes, or codes that are not integers.
        """
        codes = _as_codes(torch.as_tensor(codes).reshape(-1, 1))
        symbols, counts = torch.unique(codes.cpu(), return_counts=True)
        return cls(symbols, huffman_lengths(counts))

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def kraft(self) -> float:
        """Σ 2^−length: 1 when no word could be added."""
        return float(torch.exp2(-self.lengths.double()).sum())

    @cached_property
    def _order(self) -> torch.Tensor:
        """Symbol numbers by (length, symbol): the order in which words rise."""
        return torch.sort(self.lengths, stable=True).indices

    @cached_property
    def _aligned(self) -> torch.Tensor:
        """Each word, in that order, at the top of a window as long as the longest word."""
        span = torch.ones_like(self.lengths) << (self._longest - self.lengths[self._order])
        return span.cumsum(0) - span

    @cached_property
    def _longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def words(self) -> torch.Tensor:
        """(K,) int64, the word of each symbol as a number of ``lengths`` bits."""
        words = torch.empty_like(self.lengths)
        words[self._order] = self._aligned >> (self._longest - self.lengths[self._order])
        return words

    def _numbers(self, codes: object) -> torch.Tensor:
        codes = torch.as_tensor(codes).flatten().cpu()
        if not codes.numel():
            return codes.long()
        codes = _as_codes(codes[:, None])[:, 0]
        at = torch.searchsorted(self.symbols, codes).clamp_max(len(self) - 1)
        unknown = self.symbols[at] != codes
        if bool(unknown.any()):
            raise ValueError(f"codes must be symbols of the table: got {int(codes[unknown][0])}")
        return at

    def n_bits(self, codes: object) -> int:
        """How many bits the integers take, table not counted."""
        return int(self.lengths[self._numbers(codes)].sum())

    def encode(self, codes: object) -> bytes:
        """Integers of any shape, row by row, as a stream filled up to whole bytes by zeros.

        Raises:
            ValueError: an integer that the table lacks.
        """
        number = self._numbers(codes)
        lengths, words = self.lengths[number], self.words[number]
        starts = lengths.cumsum(0) - lengths
        bits = torch.zeros(-(-int(lengths.sum()) // 8) * 8, dtype=torch.uint8)
        for k in range(self._longest):
            longer = lengths > k
            bit = (words[longer] >> (lengths[longer] - 1 - k)) & 1
            bits[starts[longer] + k] = bit.to(torch.uint8)
        place = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)
        return (bits.view(-1, 8) * place).sum(dim=1, dtype=torch.uint8).numpy().tobytes()

    def decode(self, data: bytes, n: int) -> torch.Tensor:
        """The first ``n`` integers of a stream.

        Every bit position is decoded as if a word began there; the words that do begin there are
        then found by doubling the steps from the first.

        Returns:
            (n,) int64.

        Raises:
            ValueError: a stream that ends early, or n < 0.
        """
        if n < 0:
            raise ValueError(f"n must be >= 0: got {n}")
        if self._longest == 0 or n == 0:
            return self.symbols[:1].repeat(n)
        if not data:
            raise ValueError(f"data must hold {n} words: got no bytes")
        stream = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        shift = torch.arange(7, -1, -1, dtype=torch.uint8)
        bits = ((stream[:, None] >> shift) & 1).flatten()
        padded = torch.cat([bits, bits.new_zeros(self._longest)]).long()
        window = torch.zeros(len(bits), dtype=torch.int64)
        for k in range(self._longest):
            window = (window << 1) | padded[k : k + len(bits)]
        rank = torch.searchsorted(self._aligned, window, right=True) - 1
        number = self._order[rank]
        end = len(bits)
        # where the next word begins; behind the last bit every step stays
        jump = torch.arange(end) + self.lengths[number]
        jump = torch.cat([jump.clamp_max(end + 1), torch.tensor([end, end + 1])])
        jump[end] = end + 1
        at = torch.zeros(1, dtype=torch.int64)
        while len(at) < n + 1:
            at = torch.cat([at, jump[at]])
            jump = jump[jump]
        if int(at[n]) > end:
            raise ValueError(f"data must hold {n} words: the stream ends early")
        return self.symbols[number[at[:n]]]

    @property
    def table_nbytes(self) -> int:
        """Length of :meth:`to_bytes`."""
        return 4 + 9 * len(self)

    def to_bytes(self) -> bytes:
        """The table: K as 4 bytes, then symbols of 8 and lengths of 1 byte, little-endian."""
        symbols = self.symbols.numpy().astype("<i8").tobytes()
        return len(self).to_bytes(4, "little") + symbols + bytes(self.lengths.tolist())

    @classmethod
    def from_bytes(cls, data: bytes) -> "HuffmanCode":
        """The table that ``data`` begins with; what follows it is left alone.

        Raises:
            ValueError: data that end early, or that are no table.
        """
        size = int.from_bytes(data[:4], "little")
        if not size or len(data) < 4 + 9 * size:
            raise ValueError(f"data must hold a table of {size} symbols: got {len(data)} bytes")
        symbols = [
            int.from_bytes(data[4 + 8 * i : 12 + 8 * i], "little", signed=True) for i in range(size)
        ]
        lengths = list(data[4 + 8 * size : 4 + 9 * size])
        return cls(torch.tensor(symbols), torch.tensor(lengths))
