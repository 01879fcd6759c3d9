"""Associative recall: find the value that was shown with a key."""

from typing import NamedTuple

import torch


class RecallBatch(NamedTuple):
    """Associative recall: pairs of a key and a value, then keys to look up.

    Attributes:
        tokens: (n, 2·(n_pairs + n_queries)) int64: k v k v … then key, answer, key, answer …;
            keys are below n_keys, values from there on.
        targets: same shape, the answer at each looked-up key, −100 elsewhere
            (``cross_entropy`` leaves that out): what the model should say after that position.
    """

    tokens: torch.Tensor
    targets: torch.Tensor


IGNORED = -100


def make_associative_recall(
    n_sequences: int,
    n_pairs: int,
    *,
    n_queries: int = 1,
    n_keys: int,
    n_values: int,
    seed: int = 0,
) -> RecallBatch:
    """Sequences of the recall task; keys differ within a sequence, values may repeat.

    Args:
        n_sequences: n.
        n_pairs: pairs shown, at most n_keys.
        n_queries: keys looked up, drawn among those shown, at most n_pairs, no two alike.
        n_keys, n_values: sizes of the two alphabets.
        seed: of the draws.

    Raises:
        ValueError: sizes that do not fit.
    """
    sizes = {"n_sequences": n_sequences, "n_pairs": n_pairs, "n_queries": n_queries}
    for name, value in {**sizes, "n_keys": n_keys, "n_values": n_values}.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1: got {value}")
    if n_pairs > n_keys or n_queries > n_pairs:
        raise ValueError(
            f"n_queries <= n_pairs <= n_keys must hold: got {n_queries}, {n_pairs}, {n_keys}"
        )
    g = torch.Generator().manual_seed(seed)
    keys = torch.rand(n_sequences, n_keys, generator=g).argsort(dim=1)[:, :n_pairs]
    values = torch.randint(n_keys, n_keys + n_values, (n_sequences, n_pairs), generator=g)
    asked = torch.rand(n_sequences, n_pairs, generator=g).argsort(dim=1)[:, :n_queries]
    all_keys = torch.cat([keys, keys.gather(1, asked)], dim=1)
    all_values = torch.cat([values, values.gather(1, asked)], dim=1)
    tokens = torch.stack([all_keys, all_values], dim=2).flatten(1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, 2 * n_pairs :: 2] = all_values[:, n_pairs:]
    return RecallBatch(tokens, targets)
