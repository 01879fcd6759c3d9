"""The transformer: causality, positions, cache, tying, initial loss, sizes."""

import math

import pytest
import torch
from torch import nn

from icmllab.toolbox.gpt import GPT, GPTConfig, KVCache, RMSNorm, generate, rope

SHAPES = [
    {"positions": "rope", "mlp": "swiglu"},
    {"positions": "learned", "mlp": "gelu"},
    {"positions": "none", "mlp": "gelu", "tied": False},
    {"positions": "rope", "mlp": "moe", "top_k": 2},
    {"positions": "learned", "mlp": "moe", "n_experts": 3, "d_hidden": 10},
]


def make(*, seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> GPT:
    settings = {"vocab_size": 17, "context": 12, "d_model": 24, "n_layers": 2, "n_heads": 3}
    return GPT(GPTConfig(**settings | changes), seed=seed).to(dtype)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(17, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_future_does_not_change_the_past(shape):
    model, tokens = make(init_std=0.3, **shape), draw(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 17
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert (before[:, 7:] - after[:, 7:]).abs().max() > 1e-3


def test_an_encoder_sees_both_ways():
    model, tokens = make(causal=False, init_std=0.3), draw(1, 12)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 17
    assert (model(tokens).logits[:, 0] - model(changed).logits[:, 0]).abs().max() > 1e-6
    with pytest.raises(ValueError, match="causal"):
        model(tokens, cache=KVCache(2))


def test_rope_products_depend_on_the_difference_of_positions_alone():
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 16, generator=g, dtype=torch.float64) for _ in range(2))

    def product(i: int, j: int) -> float:
        return (rope(q, torch.tensor([i])) @ rope(k, torch.tensor([j])).T).item()

    for shift in (1, 17, 5000):
        assert product(9, 4) == pytest.approx(product(9 + shift, 4 + shift), abs=1e-10)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_rope_keeps_lengths_and_leaves_position_zero():
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = rope(x, torch.arange(5))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, 0], x[:, 0])
    with pytest.raises(ValueError, match="even"):
        rope(torch.zeros(2, 3), torch.arange(2))


def test_rope_model_without_absolute_positions_is_shift_equivariant():
    # a repeated token looks the same wherever it stands, if only differences of position count
    model = make(n_layers=1, init_std=0.5)
    logits = model(torch.full((1, 12), 3)).logits[0]
    torch.testing.assert_close(logits, logits[:1].expand_as(logits))
    learned = make(n_layers=1, init_std=0.5, positions="learned")
    spread = learned(torch.full((1, 12), 3)).logits[0]
    assert (spread - spread[:1]).abs().max() > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 4, 2], [12]])
def test_cache_gives_the_full_forward(shape, pieces):
    model, tokens = make(init_std=0.3, **shape), draw(2, 12)
    cache, parts = KVCache(2), []
    for part in tokens.split(pieces, dim=1):
        parts.append(model(part, cache=cache).logits)
    assert cache.length == 12
    full = model(tokens).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-10, atol=1e-12)


def test_tied_head_is_the_embedding_and_untied_is_not():
    tied, untied = make(), make(tied=False)
    assert not any(name == "head" for name, _ in tied.named_parameters())
    assert untied.head.shape == untied.embedding.shape
    tokens = draw(1, 6)
    out = tied(tokens).logits
    with torch.no_grad():
        tied.embedding.mul_(2)
    assert not torch.allclose(out, tied(tokens).logits)


@pytest.mark.parametrize("shape", SHAPES)
def test_initial_loss_is_that_of_a_uniform_guess(shape):
    model = make(**shape)
    loss = model.loss(draw(16, 13), balance_weight=0.0)
    assert loss.item() == pytest.approx(math.log(17), abs=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameter_count_follows_the_formula(shape):
    model = make(**shape)
    assert sum(p.numel() for p in model.parameters()) == model.config.n_params


def test_residual_stream_does_not_grow_with_depth_at_the_start():
    def size(n_layers: int) -> float:
        model = make(n_layers=n_layers, d_model=96, init_std=0.1)
        caught = []
        model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
        model(draw(4, 12))
        return caught[0].square().mean().sqrt().item()

    assert size(16) < 1.5 * size(1)


def test_rmsnorm_agrees_with_torch():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = nn.RMSNorm(6, eps=1e-6, dtype=torch.float64)
    torch.testing.assert_close(RMSNorm(6).double()(x), theirs(x))
    low = RMSNorm(6).bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16


def test_seed_fixes_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = make(seed=1)
    assert torch.equal(torch.rand(3), expected)
    second, other = make(seed=1), make(seed=2)
    assert torch.equal(first.embedding, second.embedding)
    assert not torch.equal(first.embedding, other.embedding)


def test_greedy_generation_follows_the_argmax_of_full_forwards():
    model, tokens = make(init_std=0.5), draw(2, 3)
    out = generate(model, tokens, 8, temperature=0)
    grown = tokens
    for _ in range(8):
        grown = torch.cat([grown, model(grown).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(out, grown)


def test_sampling_follows_its_generator_and_top_k():
    model, tokens = make(init_std=0.5), draw(1, 3)

    def sample(seed: int, **options) -> torch.Tensor:
        return generate(model, tokens, 9, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))
    assert torch.equal(sample(0, top_k=1), generate(model, tokens, 9, temperature=0))


def test_loss_has_a_gradient_for_every_parameter_and_training_lowers_it():
    model = make(dtype=torch.float32, mlp="moe", d_hidden=16, n_experts=2)
    tokens, optimizer = draw(8, 13), torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = model.loss(tokens)
    start.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * start.item()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"n_heads": 5}, "n_heads"),
        ({"n_layers": 0}, "n_layers"),
        ({"positions": "alibi"}, "positions"),
        ({"mlp": "relu"}, "mlp"),
        ({"d_model": 9, "n_heads": 3}, "even"),
        ({"mlp": "moe", "top_k": 5}, "top_k"),
        ({"dropout": 1.0}, "dropout"),
        ({"d_hidden": 0}, "d_hidden"),
    ],
)
def test_bad_shapes_are_named(changes, name):
    with pytest.raises(ValueError, match=name):
        make(**changes)


def test_bad_calls_are_named():
    model = make()
    with pytest.raises(ValueError, match="context=12"):
        model(draw(1, 13))
    with pytest.raises(ValueError, match="tokens"):
        model(draw(5))
    with pytest.raises(ValueError, match="at least one"):
        generate(model, draw(1, 0), 2)
    with pytest.raises(ValueError, match="temperature"):
        generate(model, draw(1, 2), 2, temperature=-1)
    with pytest.raises(ValueError, match="top_k"):
        generate(model, draw(1, 2), 2, top_k=0)
