"""A small transformer: causal language model or encoder, with a key-value cache.

Pre-norm blocks with RMSNorm, rotary or learned positions, SwiGLU, GELU or mixture-of-experts
MLPs, an output head tied to the embedding. Residual projections start smaller by √(2·n_layers),
so that the stream's size at the start does not grow with depth.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from icmllab.toolbox.moe import MoEMLP


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a :class:`GPT`.

    Attributes:
        vocab_size: number of tokens.
        context: longest sequence.
        d_model: size of the residual stream.
        n_layers: number of blocks.
        n_heads: attention heads; must divide ``d_model``.
        positions: ``rope`` (even head size), ``learned`` or ``none``.
        mlp: ``swiglu``, ``gelu`` or ``moe``.
        d_hidden: hidden units of the MLP (of one expert); None means 4·d_model, for SwiGLU
            two thirds of it, rounded up to a multiple of 8.
        n_experts, top_k, gate_scale: of ``moe``; top_k > 1 renormalises.
        tied: whether the output head is the embedding.
        causal: whether a position sees only its past; False gives an encoder.
        dropout: probability, on residual branches, while training.
        init_std: standard deviation of the weights.
        rope_base: base of the rotary frequencies.

    Raises:
        ValueError: a size below 1, a choice that does not exist, or sizes that do not fit.
    """

    vocab_size: int
    context: int
    d_model: int = 48
    n_layers: int = 2
    n_heads: int = 3
    positions: Literal["rope", "learned", "none"] = "rope"
    mlp: Literal["swiglu", "gelu", "moe"] = "swiglu"
    d_hidden: int | None = None
    n_experts: int = 4
    top_k: int = 1
    gate_scale: float = 1.0
    tied: bool = True
    causal: bool = True
    dropout: float = 0.0
    init_std: float = 0.02
    rope_base: float = 10_000.0

    def __post_init__(self):
        for name in ("vocab_size", "context", "d_model", "n_layers", "n_heads", "n_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
        if self.d_hidden is not None and self.d_hidden < 1:
            raise ValueError(f"d_hidden must be >= 1: got {self.d_hidden}")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"n_heads must divide d_model: got n_heads={self.n_heads}, d_model={self.d_model}"
            )
        choices = {"positions": ("rope", "learned", "none"), "mlp": ("swiglu", "gelu", "moe")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}: got {getattr(self, name)!r}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rope needs an even d_model / n_heads: got {self.head_dim}")
        if self.mlp == "moe" and not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k must be in [1, n_experts={self.n_experts}]: got {self.top_k}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1): got {self.dropout}")

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.d_model // self.n_heads

    @property
    def hidden(self) -> int:
        """Hidden units of the MLP, or of one expert."""
        if self.d_hidden is not None:
            return self.d_hidden
        if self.mlp == "swiglu":
            return 8 * math.ceil(8 * self.d_model / 3 / 8)
        return 4 * self.d_model

    @property
    def n_params(self) -> int:
        """How many numbers a model of this shape learns."""
        d, h = self.d_model, self.hidden
        mlp = {
            "swiglu": 3 * d * h,
            "gelu": 2 * d * h,
            "moe": self.n_experts * (2 * d * h + d),
        }[self.mlp]
        total = self.vocab_size * d * (1 if self.tied else 2)
        total += self.context * d if self.positions == "learned" else 0
        return total + self.n_layers * (4 * d * d + mlp + 2 * d) + d


class RMSNorm(nn.Module):
    """x / rms(x) · gain over the last dimension, computed in float32 or wider."""

    def __init__(self, size: int, *, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., size) → same shape and dtype."""
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.gain


def rope(x: torch.Tensor, positions: torch.Tensor, *, base: float = 10_000.0) -> torch.Tensor:
    """Turn pairs of coordinates by an angle that grows with the position.

    Coordinate i is paired with i + head_dim/2; inner products of turned vectors depend only on
    the difference of their positions.

    Args:
        x: (..., n_positions, head_dim), head_dim even.
        positions: (n_positions,) int64.
        base: pair i turns by position · base^(−2i/head_dim).

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ValueError: an odd head_dim.
    """
    half, odd = divmod(x.shape[-1], 2)
    if odd:
        raise ValueError(f"x must have an even last dimension: got {x.shape[-1]}")
    # angles in float64: at position 10^5 float32 would be off by 10^-2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angles = positions.double()[:, None] * base**-exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class KVCache:
    """Keys and values of the positions seen so far, one pair a layer.

    Tensors are (batch, n_heads, n_positions, head_dim). A cache belongs to one model and one
    batch of sequences; start a new one for new sequences.
    """

    def __init__(self, n_layers: int):
        self.keys: list[torch.Tensor | None] = [None] * n_layers
        self.values: list[torch.Tensor | None] = [None] * n_layers

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return 0 if self.keys[-1] is None else self.keys[-1].shape[2]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put new positions behind the old ones of ``layer``."""
        if self.keys[layer] is not None:
            k = torch.cat([self.keys[layer], k], dim=2)
            v = torch.cat([self.values[layer], v], dim=2)
        self.keys[layer], self.values[layer] = k, v


class Attention(nn.Module):
    """Multi-head self-attention, causal or not."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        d, std = config.d_model, config.init_std
        self.qkv = nn.Parameter(torch.randn(3 * d, d) * std)
        self.out = nn.Parameter(torch.randn(d, d) * std / math.sqrt(2 * config.n_layers))

    def forward(
        self, x: torch.Tensor, *, cache: KVCache | None = None, layer: int = 0, past: int = 0
    ) -> torch.Tensor:
        """x (batch, n_positions, d_model) → same shape; ``past`` positions are in the cache."""
        batch, length, d = x.shape
        heads = (batch, length, self.config.n_heads, self.config.head_dim)
        q, k, v = ((t.view(heads).transpose(1, 2)) for t in (x @ self.qkv.T).split(d, dim=-1))
        if self.config.positions == "rope":
            at = torch.arange(past, past + length, device=x.device)
            q, k = (rope(t, at, base=self.config.rope_base) for t in (q, k))
        if cache is not None:
            cache.append(layer, k, v)
            k, v = cache.keys[layer], cache.values[layer]
        mask = None
        if self.config.causal and past and length > 1:
            # the built-in mask aligns the first query with the first key; here it has a past
            at = torch.arange(past + length, device=x.device)
            mask = at[None, :] <= at[past:, None]
        is_causal = self.config.causal and mask is None and length > 1
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return mixed.transpose(1, 2).reshape(batch, length, d) @ self.out.T


class MLP(nn.Module):
    """SwiGLU or GELU."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        d, h, std = config.d_model, config.hidden, config.init_std
        self.gated = config.mlp == "swiglu"
        self.up = nn.Parameter(torch.randn(h * (2 if self.gated else 1), d) * std)
        self.down = nn.Parameter(torch.randn(d, h) * std / math.sqrt(2 * config.n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., d_model) → same shape."""
        hidden = x @ self.up.T
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden)
        return hidden @ self.down.T


class Block(nn.Module):
    """Norm, attention, add; norm, MLP, add."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm_attention = RMSNorm(config.d_model)
        self.attention = Attention(config)
        self.norm_mlp = RMSNorm(config.d_model)
        if config.mlp == "moe":
            self.mlp = MoEMLP(
                config.d_model,
                config.hidden,
                n_experts=config.n_experts,
                top_k=config.top_k,
                renormalise=config.top_k > 1,
                gate_scale=config.gate_scale,
                init_std=config.init_std,
                out_std=config.init_std / math.sqrt(2 * config.n_layers),
            )
        else:
            self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)


class GPTOutput(NamedTuple):
    """What the model says.

    Attributes:
        logits: (batch, n_positions, vocab_size).
        balance_loss: scalar, the mean over layers of the mixtures' balance loss; 0 without.
    """

    logits: torch.Tensor
    balance_loss: torch.Tensor


class GPT(nn.Module):
    """The transformer.

    Args:
        config: its shape.
        seed: of the initial weights; None draws from torch's global generator.
    """

    def __init__(self, config: GPTConfig, *, seed: int | None = None):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            d, std = config.d_model, config.init_std
            self.embedding = nn.Parameter(torch.randn(config.vocab_size, d) * std)
            if config.positions == "learned":
                self.position_embedding = nn.Parameter(torch.randn(config.context, d) * std)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
            self.norm = RMSNorm(d)
            if not config.tied:
                self.head = nn.Parameter(torch.randn(config.vocab_size, d) * std)

    def embed(self, tokens: torch.Tensor, *, past: int = 0) -> torch.Tensor:
        """tokens (batch, n_positions) int64 → (batch, n_positions, d_model)."""
        x = F.embedding(tokens, self.embedding)
        if self.config.positions == "learned":
            x = x + self.position_embedding[past : past + tokens.shape[1]]
        return x

    def forward(self, tokens: torch.Tensor, *, cache: KVCache | None = None) -> GPTOutput:
        """Logits of the token after each position.

        Args:
            tokens: (batch, n_positions) int64.
            cache: keys and values of earlier positions, which it then extends; needs ``causal``.

        Raises:
            ValueError: tokens of another shape, more positions than ``context``, or a cache with
                an encoder.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be (batch, n_positions): got {tuple(tokens.shape)}")
        if cache is not None and not self.config.causal:
            raise ValueError("cache needs a causal model: got causal=False")
        past = 0 if cache is None else cache.length
        if past + tokens.shape[1] > self.config.context:
            raise ValueError(
                f"tokens must fit context={self.config.context}: got {past} cached and "
                f"{tokens.shape[1]} new positions"
            )
        x = self.embed(tokens, past=past)
        balance = x.new_zeros(())
        for layer, block in enumerate(self.blocks):
            x = x + block.drop(
                block.attention(block.norm_attention(x), cache=cache, layer=layer, past=past)
            )
            branch = block.mlp(block.norm_mlp(x))
            if self.config.mlp == "moe":
                balance = balance + branch.balance_loss / len(self.blocks)
                branch = branch.values
            x = x + block.drop(branch)
        head = self.embedding if self.config.tied else self.head
        return GPTOutput(self.norm(x) @ head.T, balance)

    def loss(self, tokens: torch.Tensor, *, balance_weight: float = 0.01) -> torch.Tensor:
        """Mean cross-entropy in nats of each token given those before it, plus balance.

        Args:
            tokens: (batch, n_positions + 1) int64.
            balance_weight: factor of the balance loss of mixtures.
        """
        out = self(tokens[:, :-1])
        logits = out.logits.flatten(0, 1)
        low = logits.dtype in (torch.float16, torch.bfloat16)
        entropy = F.cross_entropy(logits.float() if low else logits, tokens[:, 1:].flatten())
        if self.config.mlp != "moe":
            return entropy
        return entropy + balance_weight * out.balance_loss


@torch.no_grad()
def generate(
    model: GPT,
    tokens: torch.Tensor,
    n_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Continue each sequence by ``n_new`` tokens, each drawn given all before it.

    Args:
        model: a causal model.
        tokens: (batch, n_positions) int64, at least one position.
        n_new: how many tokens to add; all must fit the model's context.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: draw among the k most probable only.
        generator: source of randomness.

    Returns:
        (batch, n_positions + n_new) int64.

    Raises:
        ValueError: an empty prompt, a negative temperature, or a ``top_k`` below 1.
    """
    if tokens.shape[1] < 1:
        raise ValueError("tokens must hold at least one position: got none")
    if temperature < 0:
        raise ValueError(f"temperature must be >= 0: got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be >= 1: got {top_k}")
    cache, step = KVCache(model.config.n_layers), tokens
    for _ in range(n_new):
        logits = model(step, cache=cache).logits[:, -1]
        if top_k is not None and top_k < logits.shape[1]:
            edge = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < edge, float("-inf"))
        if temperature == 0:
            step = logits.argmax(dim=-1, keepdim=True)
        else:
            probs = (logits / temperature).softmax(dim=-1)
            step = torch.multinomial(probs, 1, generator=generator)
        tokens = torch.cat([tokens, step], dim=1)
    return tokens
