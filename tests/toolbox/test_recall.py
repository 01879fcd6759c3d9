"""The recall task: answers are those shown, and chance is what it should be."""

import pytest
import torch

from icmllab.toolbox.recall import IGNORED, make_associative_recall


def test_answers_are_the_values_shown_with_their_keys():
    batch = make_associative_recall(50, 6, n_queries=4, n_keys=20, n_values=9, seed=3)
    assert batch.tokens.shape == batch.targets.shape == (50, 20)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        shown = dict(zip(tokens[0:12:2], tokens[1:12:2], strict=True))
        assert len(shown) == 6
        assert all(k < 20 for k in shown)
        assert all(20 <= v < 29 for v in shown.values())
        assert targets[:12] == [IGNORED] * 12
        asked = tokens[12::2]
        assert len(set(asked)) == 4
        assert [shown[k] for k in asked] == targets[12::2] == tokens[13::2]
        assert targets[13::2] == [IGNORED] * 4


def test_places_keys_and_values_are_uniform_and_seeded():
    batch = make_associative_recall(4000, 4, n_keys=5, n_values=3, seed=0)
    place = (batch.tokens[:, 0:8:2] == batch.tokens[:, 8:9]).long().argmax(dim=1)
    assert (place.bincount(minlength=4) / 4000 - 0.25).abs().max() < 0.03
    assert (batch.tokens[:, 9].sub(5).bincount(minlength=3) / 4000 - 1 / 3).abs().max() < 0.03
    assert (batch.tokens[:, 0].bincount(minlength=5) / 4000 - 0.2).abs().max() < 0.03
    again = make_associative_recall(4000, 4, n_keys=5, n_values=3, seed=0)
    other = make_associative_recall(4000, 4, n_keys=5, n_values=3, seed=1)
    assert torch.equal(batch.tokens, again.tokens)
    assert not torch.equal(batch.tokens, other.tokens)


@pytest.mark.parametrize(
    "sizes", [{"n_pairs": 6}, {"n_queries": 5}, {"n_values": 0}, {"n_sequences": 0}]
)
def test_sizes_that_do_not_fit_are_named(sizes):
    settings = {"n_sequences": 2, "n_pairs": 4, "n_queries": 1, "n_keys": 5, "n_values": 3}
    with pytest.raises(ValueError, match=next(iter(sizes))):
        make_associative_recall(**settings | sizes)
