"""Router, balance loss, mixture: against dense sums and closed forms."""

import pytest
import torch
from torch.nn import functional as F

from icmllab.toolbox.moe import MoEMLP, load_balance_loss, route_top_k


def test_router_picks_the_most_probable_and_ties_go_to_the_lower_index():
    routing = route_top_k(torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 1.0]]), 2)
    assert routing.experts.tolist() == [[1, 2], [0, 1]]
    assert torch.allclose(routing.probs.sum(dim=1), torch.ones(2))
    assert torch.equal(routing.weights, routing.probs.gather(1, routing.experts))


def test_renormalised_weights_sum_to_the_scale():
    logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    routing = route_top_k(logits, 3, renormalise=True, scale=2.0)
    assert torch.allclose(routing.weights.sum(dim=1), torch.full((20,), 2.0))


def test_balance_loss_is_one_when_uniform_and_n_when_collapsed():
    even = route_top_k(torch.eye(4) * 1e-9, 1)
    assert load_balance_loss(even).item() == pytest.approx(1.0, abs=1e-6)
    alone = route_top_k(torch.tensor([[50.0, 0, 0, 0]]).repeat(6, 1), 1)
    assert load_balance_loss(alone).item() == pytest.approx(4.0, abs=1e-6)


def test_balance_loss_pushes_against_the_favourite():
    logits = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64).repeat(4, 1).requires_grad_()
    load_balance_loss(route_top_k(logits, 1)).backward()
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 1:] < 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("top_k", "renormalise"), [(1, False), (2, True), (4, False)])
def test_mixture_equals_the_dense_weighted_sum(dtype, top_k, renormalise):
    torch.manual_seed(0)
    layer = MoEMLP(
        6, 10, n_experts=4, top_k=top_k, renormalise=renormalise, gate_scale=1.5, init_std=0.5
    ).to(dtype)
    x = torch.randn(2, 7, 6, dtype=dtype)
    out = layer(x)
    tokens = x.reshape(-1, 6)
    probs = (tokens @ layer.router.T).softmax(dim=-1)
    gates = torch.zeros_like(probs).scatter(1, probs.topk(top_k).indices, 1.0) * probs
    if renormalise:
        gates = gates / gates.sum(dim=1, keepdim=True)
    dense = torch.einsum("td,edh->teh", tokens, layer.up)
    dense = torch.einsum("teh,ehd->ted", F.gelu(dense), layer.down)
    expected = 1.5 * torch.einsum("te,ted->td", gates, dense).reshape(x.shape)
    torch.testing.assert_close(out.values, expected)


def test_an_expert_without_tokens_gets_a_zero_gradient_and_the_router_learns():
    torch.manual_seed(0)
    layer = MoEMLP(4, 8, n_experts=3, init_std=0.5)
    with torch.no_grad():
        layer.router.zero_()
        layer.router[0, 0] = 5.0
    x = torch.rand(9, 4) + 0.5
    layer(x).values.sum().backward()
    assert layer.up.grad[0].abs().sum() > 0
    assert layer.up.grad[1:].abs().sum() == 0
    assert layer.router.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: route_top_k(torch.zeros(3), 1), "logits"),
        (lambda: route_top_k(torch.zeros(2, 3), 4), "top_k"),
        (lambda: MoEMLP(4, 0, n_experts=2), "d_hidden"),
        (lambda: MoEMLP(4, 4, n_experts=2, top_k=3), "top_k"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
