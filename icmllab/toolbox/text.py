"""Text to learn from without a download: Python's own documentation, as characters.

``pydoc_data.topics`` comes with every full Python build and holds the language reference's help
topics, some 465 000 characters. It changes a little between Python versions: a chapter that
measures on it reports :attr:`Corpus.sha256`.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Corpus:
    """A text and its fingerprint.

    Attributes:
        text: the whole text.
        sha256: hex digest of its UTF-8 bytes.
    """

    text: str
    sha256: str


@lru_cache(maxsize=1)
def load_pydoc_topics() -> Corpus:
    """The help topics of this Python, joined in the order of their names.

    Raises:
        ImportError: this Python was built without its documentation.
    """
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ImportError(
            "the corpus is Python's bundled documentation, and this Python lacks the module "
            "pydoc_data.topics (stripped builds leave it out): install a full Python"
        ) from error
    text = "".join(topics[name] for name in sorted(topics))
    return Corpus(text, hashlib.sha256(text.encode()).hexdigest())


class CharTokenizer:
    """Characters to numbers and back; the numbers follow the sorted alphabet.

    Args:
        text: every character in it gets a number.

    Raises:
        ValueError: an empty text.
    """

    def __init__(self, text: str):
        if not text:
            raise ValueError("text must hold at least one character: got an empty text")
        self.alphabet = "".join(sorted(set(text)))
        self._number = {c: i for i, c in enumerate(self.alphabet)}

    @property
    def vocab_size(self) -> int:
        """How many characters there are."""
        return len(self.alphabet)

    def encode(self, text: str) -> torch.Tensor:
        """``text`` as (n_chars,) int64.

        Raises:
            ValueError: a character that the alphabet lacks.
        """
        unknown = sorted(set(text) - set(self.alphabet))
        if unknown:
            raise ValueError(f"text must keep to the alphabet: got {''.join(unknown)!r}")
        return torch.tensor([self._number[c] for c in text], dtype=torch.int64)

    def decode(self, tokens: torch.Tensor) -> str:
        """The text that (n_chars,) ``tokens`` stand for."""
        return "".join(self.alphabet[i] for i in tokens.tolist())


class Split(NamedTuple):
    """Tokens to train on and tokens held out, each (n,) int64."""

    train: torch.Tensor
    valid: torch.Tensor


def split_tokens(tokens: torch.Tensor, *, valid_frac: float = 0.1) -> Split:
    """Cut once: the first part trains, the last ``valid_frac`` is held out.

    A text is not shuffled before it is cut: neighbouring windows share their characters, and
    would leak.

    Raises:
        ValueError: a share outside (0, 1), or a part without tokens.
    """
    if not 0 < valid_frac < 1:
        raise ValueError(f"valid_frac must be in (0, 1): got {valid_frac}")
    cut = len(tokens) - round(len(tokens) * valid_frac)
    if not 0 < cut < len(tokens):
        raise ValueError(f"tokens must fill both parts: got {len(tokens)} tokens")
    return Split(tokens[:cut], tokens[cut:])


class CharData(NamedTuple):
    """A corpus ready for a language model.

    Attributes:
        train: (n_train,) int64 tokens.
        valid: (n_valid,) int64 tokens.
        tokenizer: between text and tokens.
        sha256: fingerprint of the corpus.
    """

    train: torch.Tensor
    valid: torch.Tensor
    tokenizer: CharTokenizer
    sha256: str


@lru_cache(maxsize=1)
def load_char_data() -> CharData:
    """Python's documentation as characters, 90 % to train on and 10 % held out.

    The tensors are shared between calls: read them, do not write.
    """
    corpus = load_pydoc_topics()
    tokenizer = CharTokenizer(corpus.text)
    split = split_tokens(tokenizer.encode(corpus.text))
    return CharData(split.train, split.valid, tokenizer, corpus.sha256)


def windows(tokens: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """``length`` tokens from each start.

    Args:
        tokens: (n_tokens,) int64.
        starts: int64 of any shape, each in [0, n_tokens - length].
        length: tokens in a window.

    Returns:
        ``starts.shape + (length,)`` int64.

    Raises:
        ValueError: a window that leaves the text.
    """
    if length < 1:
        raise ValueError(f"length must be >= 1: got {length}")
    if starts.numel() and not (
        int(starts.min()) >= 0 and int(starts.max()) + length <= len(tokens)
    ):
        raise ValueError(
            f"starts must be in [0, {len(tokens) - length}]: got {int(starts.min())} to "
            f"{int(starts.max())}"
        )
    return tokens[starts[..., None] + torch.arange(length, device=starts.device)]


def batch_starts(n_tokens: int, *, length: int, batches: int, batch_size: int, seed: int):
    """Where the windows of each batch start: (batches, batch_size) int64, uniform.

    The draws depend on ``seed`` alone, so that runs to be compared see the same batches.

    Raises:
        ValueError: a text shorter than a window, or counts below 1.
    """
    if n_tokens < length:
        raise ValueError(f"n_tokens must be >= length={length}: got {n_tokens}")
    if batches < 1 or batch_size < 1:
        raise ValueError(f"batches and batch_size must be >= 1: got {batches}, {batch_size}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(n_tokens - length + 1, (batches, batch_size), generator=generator)
