"""A language model of counted n-grams, interpolated by Witten and Bell's rule.

With N continuations of a context seen, T of them distinct,

    p_o(x | c) = (count(c x) + T p_{o−1}(x | c')) / (N + T),

c' being c without its first token, down to p_{−1} = 1/V. A context never seen gives what the
shorter one gives.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class _Level(NamedTuple):
    """The n-grams of one length, as numbers in base V; contexts are their leading digits.

    grams (G,) rising, counts (G,); contexts (C,) rising, with first gram, N and T of each.
    """

    grams: torch.Tensor
    counts: torch.Tensor
    contexts: torch.Tensor
    first: torch.Tensor
    total: torch.Tensor
    distinct: torch.Tensor


def _find(keys: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Where each wanted number stands among rising ``keys``; −1 where it does not."""
    at = torch.searchsorted(keys, wanted).clamp_max(len(keys) - 1)
    return torch.where(keys[at] == wanted, at, -1)


class NGramLM:
    """The model: counts of every context up to ``order`` tokens.

    Args:
        order: longest context, in tokens; 0 looks at none.
        smoothing: "witten_bell".

    Attributes:
        vocab_size: V, once fitted.

    Raises:
        ValueError: a negative order, or an unknown smoothing.
    """

    def __init__(self, order: int, smoothing: str = "witten_bell"):
        if isinstance(order, bool) or order != int(order) or order < 0:
            raise ValueError(f"order must be a whole number >= 0: got {order}")
        if smoothing != "witten_bell":
            raise ValueError(f"smoothing must be 'witten_bell': got {smoothing!r}")
        self.order, self.smoothing = int(order), smoothing
        self.vocab_size: int | None = None
        self._levels: list[_Level] = []

    def fit(self, ids: torch.Tensor, *, vocab_size: int | None = None) -> "NGramLM":
        """Count the n-grams of one text.

        Args:
            ids: (n,) int64 tokens, more than ``order`` of them.
            vocab_size: V; None takes the largest token plus one.

        Returns:
            self.

        Raises:
            ValueError: too few tokens, tokens outside [0, V), or V^(order+1) beyond int64.
        """
        if ids.ndim != 1 or len(ids) <= self.order:
            raise ValueError(
                f"ids must be (n,) with n > order={self.order}: got {tuple(ids.shape)}"
            )
        V = int(ids.max()) + 1 if vocab_size is None else vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= V:
            raise ValueError(
                f"ids must be in [0, vocab_size={V}): got {int(ids.min())} to {int(ids.max())}"
            )
        if V ** (self.order + 1) >= 2**63:
            raise ValueError(f"order must keep V^(order+1) below 2^63: got V={V}, {self.order}")
        self.vocab_size, self._levels = V, []
        code = torch.zeros(len(ids), dtype=torch.int64)
        ids = ids.long().cpu()
        for o in range(self.order + 1):
            # code of the o + 1 tokens that end at each position from o on
            code = ids[o:] if o == 0 else code[:-1] * V + ids[o:]
            grams, counts = torch.unique(code, return_counts=True)
            contexts, distinct = torch.unique_consecutive(
                torch.div(grams, V, rounding_mode="floor"), return_counts=True
            )
            first = distinct.cumsum(0) - distinct
            running = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            total = running[first + distinct] - running[first]
            self._levels.append(_Level(grams, counts, contexts, first, total, distinct))
        return self

    def _check(self) -> None:
        if self.vocab_size is None:
            raise ValueError("the model must be fitted first: call fit(ids)")

    def _ends(self, contexts: Sequence[torch.Tensor] | torch.Tensor):
        """The last ``order`` tokens of each context, right-aligned, and how many there are."""
        if not len(contexts):
            raise ValueError("contexts must hold at least one context: got none")
        if isinstance(contexts, torch.Tensor):
            if contexts.ndim != 2:
                raise ValueError(f"contexts must be (B, length): got {tuple(contexts.shape)}")
            tails = contexts[:, max(0, contexts.shape[1] - self.order) :].long().cpu()
            length = torch.full((len(tails),), tails.shape[1])
            tails = torch.nn.functional.pad(tails, (self.order - tails.shape[1], 0))
        else:
            cut = [c[max(0, len(c) - self.order) :].long().cpu() for c in contexts]
            length = torch.tensor([len(c) for c in cut])
            tails = torch.zeros(len(cut), self.order, dtype=torch.int64)
            inside = torch.arange(self.order) >= self.order - length[:, None]
            tails[inside] = torch.cat(cut)
        if tails.numel() and not 0 <= int(tails.min()) <= int(tails.max()) < self.vocab_size:
            raise ValueError(f"contexts must hold tokens in [0, {self.vocab_size})")
        return tails, length

    def probs(self, contexts: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """The distribution of the next token after each context.

        Args:
            contexts: B tensors (n_i,) int64, any lengths, or one (B, n); only the last ``order``
                tokens count.

        Returns:
            (B, V) float64, every entry > 0.

        Raises:
            ValueError: no contexts, tokens outside [0, V), or a model not fitted.
        """
        self._check()
        tails, length = self._ends(contexts)
        V = self.vocab_size
        p = torch.full((len(tails), V), 1 / V, dtype=torch.float64)
        code, going = torch.zeros(len(tails), dtype=torch.int64), torch.ones(len(tails)).bool()
        for o, level in enumerate(self._levels):
            if o:
                code = code + tails[:, self.order - o] * V ** (o - 1)
            at = _find(level.contexts, code)
            going = going & (o <= length) & (at >= 0)
            rows = going.nonzero()[:, 0]
            if not len(rows):
                break
            at = at[rows]
            distinct, total = level.distinct[at], level.total[at]
            counts = torch.zeros(len(rows), V, dtype=torch.float64)
            # each row's run of n-grams, laid end to end
            row = torch.arange(len(rows)).repeat_interleave(distinct)
            offset = torch.arange(len(row)) - (distinct.cumsum(0) - distinct)[row]
            gram = level.first[at][row] + offset
            counts[row, level.grams[gram] % V] = level.counts[gram].double()
            T = distinct[:, None].double()
            p[rows] = (counts + T * p[rows]) / (total[:, None] + T)
        return p

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        """ln p of each token given those before it in its row; the first has no context.

        Args:
            ids: (B, n) int64, or (n,).

        Returns:
            The shape of ``ids``, float64.

        Raises:
            ValueError: tokens outside [0, V), another shape, or a model not fitted.
        """
        self._check()
        if ids.ndim not in (1, 2) or not ids.numel():
            raise ValueError(f"ids must be (B, n) or (n,), not empty: got {tuple(ids.shape)}")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise ValueError(f"ids must be in [0, vocab_size={self.vocab_size})")
        V = self.vocab_size
        rows = ids.long().cpu().reshape(-1, ids.shape[-1])
        p = torch.full(rows.shape, 1 / V, dtype=torch.float64)
        going = torch.ones(rows.shape, dtype=torch.bool)
        code = torch.zeros_like(rows)
        for o, level in enumerate(self._levels):
            if o:
                # the o tokens before each position; what reaches before the row's start stops
                earlier = torch.nn.functional.pad(rows, (o, 0))[:, : rows.shape[1]]
                code = code + earlier * V ** (o - 1)
                going = going & (torch.arange(rows.shape[1]) >= o)
            at = _find(level.contexts, code)
            going = going & (at >= 0)
            gram = _find(level.grams, code * V + rows)
            count = torch.where(gram >= 0, level.counts[gram], 0).double()
            T, N = level.distinct[at].double(), level.total[at].double()
            p = torch.where(going, (count + T * p) / (N + T), p)
        return p.log().view(ids.shape)

    def sample(
        self,
        contexts: Sequence[torch.Tensor] | torch.Tensor,
        n_new: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Continue each context by ``n_new`` tokens.

        Args:
            contexts: as in :meth:`probs`.
            n_new: >= 0.
            temperature: p^(1/temperature), renormalised; 0 takes the most probable token.
            generator: source of randomness.

        Returns:
            (B, n_new) int64, the new tokens alone.

        Raises:
            ValueError: a negative temperature or count, or as :meth:`probs`.
        """
        self._check()
        if temperature < 0 or n_new < 0:
            raise ValueError(f"temperature and n_new must be >= 0: got {temperature} and {n_new}")
        texts = [c.long().cpu() for c in contexts]
        new = torch.empty(len(texts), n_new, dtype=torch.int64)
        for i in range(n_new):
            p = self.probs(texts)
            if temperature == 0:
                token = p.argmax(dim=1)
            else:
                p = torch.softmax(p.log() / temperature, dim=1)
                token = torch.multinomial(p, 1, generator=generator)[:, 0]
            new[:, i] = token
            texts = [
                torch.cat([c, t[None]])[-self.order - 1 :]
                for c, t in zip(texts, token, strict=True)
            ]
        return new
