"""Mixtures of experts: a top-k router, its balance loss, and an MLP made of experts."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
        experts: (n_tokens, top_k) int64, the best first; ties go to the lower index.
        weights: (n_tokens, top_k), the factor of each chosen expert's output.
        probs: (n_tokens, n_experts), the router's softmax.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    probs: torch.Tensor


def route_top_k(
    logits: torch.Tensor, top_k: int, *, renormalise: bool = False, scale: float = 1.0
) -> Routing:
    """Send each token to its ``top_k`` most probable experts.

    Args:
        logits: (n_tokens, n_experts) floating.
        top_k: experts a token, in [1, n_experts].
        renormalise: whether the chosen probabilities are made to sum to one.
        scale: a factor of every weight.

    Raises:
        ValueError: logits that are no matrix, or a ``top_k`` out of range.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be (n_tokens, n_experts): got shape {tuple(logits.shape)}")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k must be in [1, n_experts={logits.shape[1]}]: got {top_k}")
    probs = logits.softmax(dim=-1)
    # topk leaves the order of ties open; a stable sort does not
    chosen = probs.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = probs.gather(1, chosen)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(chosen, scale * weights, probs)


def load_balance_loss(routing: Routing) -> torch.Tensor:
    """n_experts · Σ_e f_e P_e: f the share of choices, P the mean probability of each expert.

    It is 1 when both are uniform and n_experts when one expert takes everything (the balance
    loss of the Switch Transformer). Only P carries a gradient.

    Returns:
        A scalar.
    """
    n_experts = routing.probs.shape[1]
    share = F.one_hot(routing.experts, n_experts).to(routing.probs.dtype).mean(dim=(0, 1))
    return n_experts * (share * routing.probs.mean(dim=0)).sum()


class MoEOutput(NamedTuple):
    """What a mixture gives: values in the input's shape, and the balance loss, a scalar."""

    values: torch.Tensor
    balance_loss: torch.Tensor


class MoEMLP(nn.Module):
    """An MLP whose hidden layer is one of several experts, chosen for each token.

    Args:
        d_model: size of a token.
        d_hidden: hidden units of one expert.
        n_experts: how many there are.
        top_k: how many a token visits.
        renormalise: whether the chosen probabilities sum to one.
        gate_scale: a factor of the router's weights; 2 keeps a top-1 mixture's output near its
            size when the router is undecided between two.
        init_std: standard deviation of the weights.
        out_std: the same for the experts' output; None means ``init_std``.

    Raises:
        ValueError: sizes below 1, or a ``top_k`` that exceeds ``n_experts``.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        n_experts: int,
        top_k: int = 1,
        renormalise: bool = False,
        gate_scale: float = 1.0,
        init_std: float = 0.02,
        out_std: float | None = None,
    ):
        super().__init__()
        for name, value in (("d_model", d_model), ("d_hidden", d_hidden), ("n_experts", n_experts)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1: got {value}")
        if not 1 <= top_k <= n_experts:
            raise ValueError(f"top_k must be in [1, n_experts={n_experts}]: got {top_k}")
        self.top_k, self.renormalise, self.gate_scale = top_k, renormalise, gate_scale
        self.router = nn.Parameter(torch.randn(n_experts, d_model) * init_std)
        self.up = nn.Parameter(torch.randn(n_experts, d_model, d_hidden) * init_std)
        self.down = nn.Parameter(torch.randn(n_experts, d_hidden, d_model) * (out_std or init_std))

    def forward(self, x: torch.Tensor) -> MoEOutput:
        """Mix the experts: x (..., d_model) → values (..., d_model) and the balance loss."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = route_top_k(
            tokens @ self.router.T,
            self.top_k,
            renormalise=self.renormalise,
            scale=self.gate_scale,
        )
        out = torch.zeros_like(tokens)
        for expert in range(len(self.router)):
            token, choice = torch.nonzero(routing.experts == expert, as_tuple=True)
            hidden = F.gelu(tokens[token] @ self.up[expert])
            weighted = (hidden @ self.down[expert]) * routing.weights[token, choice, None]
            out = out.index_add(0, token, weighted.to(out.dtype))
        return MoEOutput(out.reshape(x.shape), load_balance_loss(routing))
