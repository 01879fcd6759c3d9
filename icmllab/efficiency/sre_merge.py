r"""SRE-Merge: token merging that spares small discriminative details (ICML 2026).

A vision transformer gets cheaper when similar tokens are merged between layers, without training.
Person re-identification lives on details of a few patches, which are similar to their surroundings:
merging averages them away, and an average is shorter than what it is made of. SRE-Merge gives every
token a mass, from how much it differs from its neighbourhood and how focused its local attention
is; the mass decides what is merged into what and weighs the average, whose length is restored.

Known from the paper's abstract: three mechanisms (saliency from spatial structure and local
attention entropy; matching by similarity and mass; fusion weighted by mass that counters the loss
of variance) and about 24 % fewer GFLOPs for the base ViT. Every formula below, the split by mass,
the normaliser of the entropy, all data and all numbers are this book's reconstruction, built on
ToMe (bipartite soft matching, proportional attention).

Notation: x (B, 1+n, d) tokens of which the first is the class token, k keys, A attention, s sizes
(patches that a token stands for), p positions in patches, m masses, r merges a layer.
"""

import copy
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from icmllab.kernels import match_scores as kernel
from icmllab.kernels.fuse_scatter import Fused, fuse_scatter
from icmllab.toolbox.fit import fit

__all__ = [
    "SHIPPED",
    "ClsPruning",
    "MergePlan",
    "PiToMe",
    "RandomMerge",
    "SREMerge",
    "TinyViT",
    "ToMe",
    "Tokens",
    "bipartite_soft_matching",
    "check_clutter",
    "check_local_entropy",
    "check_norm_loss",
    "check_solve_r",
    "check_tome_step",
    "compress",
    "detail_recovery",
    "energy_merge",
    "epw_fuse",
    "hca_match",
    "image_run",
    "load_market1501",
    "local_contrast",
    "local_entropy",
    "make_merger",
    "make_pedestrian_tokens",
    "maxsim",
    "patch_vit",
    "pool_tokens",
    "ranking_metrics",
    "reid_metrics",
    "render_pedestrians",
    "solve_r",
    "spatial_entropic_mass",
    "study_run",
    "throughput",
    "token_run",
    "train_reid",
    "unmerge",
    "vit_flops",
]

TINY = 1e-9
"""Inside the logarithm of an entropy."""

LEAST_ENTROPY = 0.01
"""Windows with less entropy than this hold one token: nothing can be focused there."""

LEAST_TOKENS = 256
"""Patch tokens from which ``backend="auto"`` takes the fused matching on a GPU."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half precision as float32: masses and scores are never computed in less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of length 1; rows of zeros stay."""
    norm = x.norm(dim=-1, keepdim=True)
    return x / torch.where(norm > 0, norm, 1.0)


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x[b, index[b]]`` for (B, n, d) or (B, n) tensors."""
    if x.ndim == 2:
        return x.gather(1, index)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


# --------------------------------------------------------------------------------------------
# SES-Assess: how much a token matters


def _check_positive(name: str, x: torch.Tensor) -> None:
    """ValueError unless all entries are above 0; a GPU's are not looked at, the host would wait."""
    if not x.is_cuda and not bool((x > 0).all()):
        raise ValueError(f"{name} must be positive: got {float(x.min())}")


def _check_tokens(
    *,
    x: torch.Tensor | None = None,
    attn: torch.Tensor | None = None,
    sizes: torch.Tensor | None = None,
    pos: torch.Tensor | None = None,
    sigma: float = math.inf,
) -> None:
    """ValueError unless what is given fits together."""
    if not sigma > 0:
        raise ValueError(f"sigma must be > 0: got {sigma}")
    if x is not None and (x.ndim != 3 or 0 in x.shape):
        raise ValueError(f"x must be (B, 1+n, d) with B, n, d >= 1: got shape {tuple(x.shape)}")
    if attn is not None and (
        attn.ndim != 4 or attn.shape[2] != attn.shape[3] or attn.shape[2] < 2 or 0 in attn.shape
    ):
        raise ValueError(
            f"attn must be (B, H, 1+n, 1+n) with B, H, n >= 1: got shape {tuple(attn.shape)}"
        )
    if x is not None and attn is not None and (len(attn), attn.shape[2]) != tuple(x.shape[:2]):
        raise ValueError(
            f"attn must be ({len(x)}, H, {x.shape[1]}, {x.shape[1]}) like x: "
            f"got {tuple(attn.shape)}"
        )
    shape = tuple(x.shape[:2]) if x is not None else None
    if shape is None and attn is not None:
        shape = (len(attn), attn.shape[2])
    if sizes is not None:
        if sizes.shape != shape:
            raise ValueError(f"sizes must have shape {shape}: got {tuple(sizes.shape)}")
        _check_positive("sizes", sizes)
    if pos is None:
        if math.isfinite(sigma):
            raise ValueError(f"pos must be given for a window of finite sigma: got sigma={sigma}")
    elif pos.shape != (shape[0], shape[1] - 1, 2):
        raise ValueError(
            f"pos must have shape {(shape[0], shape[1] - 1, 2)}, one row a patch token: "
            f"got {tuple(pos.shape)}"
        )


def _window(
    pos: torch.Tensor | None, sigma: float, shape: tuple[int, int], like: torch.Tensor
) -> torch.Tensor:
    """N_ij = exp(-|p_i - p_j|²/(2σ²)): (B, n, n); 1 everywhere for infinite σ."""
    images, n = shape
    if pos is None or math.isinf(sigma):
        return like.new_ones(images, n, n)
    y, x = pos.to(like).unbind(dim=2)
    gap = (y[:, :, None] - y[:, None]).square_() + (x[:, :, None] - x[:, None]).square_()
    return gap.mul_(-1 / (2 * sigma * sigma)).exp_()


def _entropy(p: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of the last dimension, after division by its sum."""
    p = p / p.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    return -(p * torch.log(p + TINY)).sum(dim=-1)


def local_entropy(
    attn: torch.Tensor, pos: torch.Tensor | None, *, sigma: float = 1.5
) -> torch.Tensor:
    """How spread a token's attention is over its neighbourhood: (B, n) in [0, 1].

    The head mean of the attention among patch tokens is multiplied with a Gaussian window, rows are
    made to sum to 1, and their entropy is divided by that of the window alone. Uniform attention
    gives 1 at every place, corners included; infinite σ gives entropy / ln n.

    Args:
        attn: (B, H, 1+n, 1+n) attention weights.
        pos: (B, n, 2) positions in patches; None only with infinite ``sigma``.
        sigma: σ of the window, in patches.

    Raises:
        ValueError: shapes that do not fit, or σ not above 0.
    """
    _check_tokens(attn=attn, pos=pos, sigma=sigma)
    like = attn.new_empty(0, dtype=torch.promote_types(attn.dtype, torch.float32))
    return _focus(attn, _window(pos, sigma, (len(attn), attn.shape[2] - 1), like))


def _focus(attn: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    mean = _wide(attn)[:, :, 1:, 1:].mean(dim=1)
    return (_entropy(mean * window) / _entropy(window).clamp_min(LEAST_ENTROPY)).clamp(0, 1)


def local_contrast(
    x: torch.Tensor, sizes: torch.Tensor, pos: torch.Tensor | None, *, sigma: float = 1.5
) -> torch.Tensor:
    """c_i = 1 − cos(x_i, μ_i) with μ_i the mean of the neighbourhood: (B, n) in [0, 2].

    Args:
        x: (B, 1+n, d) tokens.
        sizes: (B, 1+n) > 0, which weigh the mean beside the window.
        pos: (B, n, 2); None only with infinite ``sigma``.
        sigma: σ of the window, in patches.

    Raises:
        ValueError: shapes that do not fit, sizes not positive, or σ not above 0.
    """
    _check_tokens(x=x, sizes=sizes, pos=pos, sigma=sigma)
    return _contrast(x, sizes, _window(pos, sigma, (len(x), x.shape[1] - 1), _wide(x)))


def _contrast(x: torch.Tensor, sizes: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    patches = _wide(x)[:, 1:]
    # the direction alone matters, so that no sum is divided by
    mean = window @ (sizes[:, 1:, None].to(patches) * patches)
    return (1 - (_unit(patches) * _unit(mean)).sum(dim=2)).clamp_min(0)


def spatial_entropic_mass(
    x: torch.Tensor,
    attn: torch.Tensor,
    sizes: torch.Tensor,
    pos: torch.Tensor | None,
    *,
    sigma: float = 1.5,
    beta: float = 2.0,
) -> torch.Tensor:
    """m_i = (c_i + 0.001) exp(β (1 − H_i)), over its mean in the image: (B, n).

    Args:
        x: (B, 1+n, d) tokens.
        attn: (B, H, 1+n, 1+n) attention weights.
        sizes: (B, 1+n) > 0.
        pos: (B, n, 2) positions in patches; None only with infinite ``sigma``.
        sigma: σ of both windows, in patches.
        beta: β, weight of focus; 0 leaves the contrast alone.

    Raises:
        ValueError: shapes that do not fit, sizes not positive, or σ not above 0.
    """
    _check_tokens(x=x, attn=attn, sizes=sizes, pos=pos, sigma=sigma)
    window = _window(pos, sigma, (len(x), x.shape[1] - 1), _wide(x))
    contrast = _contrast(x, sizes, window)
    mass = (contrast + 1e-3) * torch.exp(beta * (1 - _focus(attn, window).to(contrast)))
    return mass / mass.mean(dim=1, keepdim=True)


# --------------------------------------------------------------------------------------------
# HCA-Match: which tokens merge


class MergePlan(NamedTuple):
    """Which tokens go into which; all entries number tokens, with the class token as 0.

    Attributes:
        a_index: (B, n_A) sources in order.
        b_index: (B, n_B) targets in order.
        src: (B, r) sources that are merged away, best score first.
        dst: (B, r) targets that they go into.
        unmerged: (B, n_A − r) sources that stay, best score first.
    """

    a_index: torch.Tensor
    b_index: torch.Tensor
    src: torch.Tensor
    dst: torch.Tensor
    unmerged: torch.Tensor

    @property
    def keep(self) -> torch.Tensor:
        """(B, M) tokens that stay, in the order of the output: class token, unmerged, targets."""
        return torch.cat(
            [torch.zeros_like(self.b_index[:, :1]), self.unmerged, self.b_index], dim=1
        )

    @property
    def place(self) -> torch.Tensor:
        """(B, r) where in ``keep`` the targets of ``src`` are."""
        found = torch.searchsorted(self.b_index.contiguous(), self.dst.contiguous())
        return found + 1 + self.unmerged.shape[1]

    @property
    def new_index(self) -> torch.Tensor:
        """(B, 1+n) the place in ``keep`` of every token, that of its target for a source."""
        keep, place = self.keep, self.place
        places = torch.arange(keep.shape[1], device=keep.device).expand_as(keep)
        index = torch.empty(
            len(keep), keep.shape[1] + place.shape[1], dtype=torch.int64, device=keep.device
        )
        return index.scatter_(1, keep, places).scatter_(1, self.src, place)


def _check_keys(keys: torch.Tensor, r: int, *, most: int | None = None) -> int:
    """n patch tokens; ValueError unless r of them can merge."""
    if keys.ndim != 3 or keys.shape[1] < 2 or 0 in keys.shape:
        raise ValueError(
            f"keys must be (B, 1+n, d) with B, n, d >= 1: got shape {tuple(keys.shape)}"
        )
    n = keys.shape[1] - 1
    if isinstance(r, bool) or r != int(r) or not 0 <= r <= n // 2:
        raise ValueError(f"r must be a whole number in 0..n//2 = {n // 2}: got {r!r}")
    return n


def _best_edges(
    a: torch.Tensor, b: torch.Tensor, best: torch.Tensor, index: torch.Tensor, r: int
) -> MergePlan:
    """The r best edges of sources ``a`` (patches) to ``b[index]``, equal ones by index."""
    order = best.sort(dim=1, descending=True, stable=True).indices
    chosen, rest = order[:, :r], order[:, r:]
    dst = b.gather(1, index.gather(1, chosen))
    return MergePlan(a + 1, b + 1, a.gather(1, chosen) + 1, dst + 1, a.gather(1, rest) + 1)


def hca_match(
    keys: torch.Tensor,
    mass: torch.Tensor,
    pos: torch.Tensor | None,
    r: int,
    *,
    lam: float = 0.2,
    gamma: float = 0.6,
    sigma: float = 1.5,
    partition: str = "mass",
    backend: str = "auto",
) -> MergePlan:
    """Split the patch tokens, score every pair, and keep the r best edges.

    S_ij = cos(k_i, k_j) + λ N_ij − γ √(m_i m_j) / max m; each source takes its best target.

    Args:
        keys: (B, 1+n, d), mean over heads; the class token's row is not looked at.
        mass: (B, n) > 0.
        pos: (B, n, 2) positions in patches; None only with λ = 0 or infinite ``sigma``.
        r: merges, in 0..n//2.
        lam: λ, reward of nearness.
        gamma: γ, penalty of joining two heavy tokens.
        sigma: σ of the window N, in patches.
        partition: "mass": the ⌈n/2⌉ lightest are sources, so that a heavy token never is one;
            "alternate": every second token, as in ToMe.
        backend: "fused" for the kernel's op, "eager" for plain PyTorch, "auto" for the kernel on a
            GPU from 256 patch tokens.

    Raises:
        ValueError: r out of range, shapes that do not fit, masses not positive, unknown options.
    """
    n = _check_keys(keys, r)
    if mass.shape != (len(keys), n):
        raise ValueError(f"mass must have shape {(len(keys), n)}: got {tuple(mass.shape)}")
    _check_positive("mass", mass)
    if partition not in ("mass", "alternate"):
        raise ValueError(f"partition must be 'mass' or 'alternate': got {partition!r}")
    if backend not in ("auto", "fused", "eager"):
        raise ValueError(f"backend must be 'auto', 'fused' or 'eager': got {backend!r}")
    _check_tokens(x=keys, pos=pos, sigma=sigma if lam else math.inf)
    if partition == "mass":
        order = mass.sort(dim=1, stable=True).indices
        half = -(-n // 2)
        a, b = (part.sort(dim=1).values for part in (order[:, :half], order[:, half:]))
    else:
        places = torch.arange(n, device=keys.device).expand(len(keys), -1)
        a, b = places[:, ::2].contiguous(), places[:, 1::2].contiguous()
    if r == 0:
        none = a[:, :0]
        return MergePlan(a + 1, b + 1, none, none, a + 1)
    patches = keys[:, 1:]
    if pos is None:
        pos = mass.new_zeros(len(keys), n, 2)
    on_gpu = backend == "auto" and keys.is_cuda and n >= LEAST_TOKENS
    op = kernel.match_scores if backend == "fused" or on_gpu else kernel.reference
    found = op(patches, a, b, pos, mass, 1 / mass.amax(dim=1), lam=lam, gamma=gamma, sigma=sigma)
    return _best_edges(a, b, found.best, found.index, r)


def bipartite_soft_matching(keys: torch.Tensor, r: int) -> MergePlan:
    """ToMe: sources at even, targets at odd places of the patches, the r most similar pairs.

    Args:
        keys: (B, 1+n, d), mean over heads.
        r: merges, in 0..n//2.

    Raises:
        ValueError: r out of range, or keys of another shape.
    """
    n = _check_keys(keys, r)
    places = torch.arange(n, device=keys.device).expand(len(keys), -1)
    a, b = places[:, ::2], places[:, 1::2]
    if r == 0:
        return MergePlan(a + 1, b + 1, a[:, :0], a[:, :0], a + 1)
    unit = _unit(_wide(keys)[:, 1:])
    best, index = (unit[:, ::2] @ unit[:, 1::2].mT).max(dim=2)
    return _best_edges(a, b, best, index, r)


# --------------------------------------------------------------------------------------------
# EPW-Fuse: what a merged token is


def epw_fuse(
    x: torch.Tensor,
    sizes: torch.Tensor,
    pos: torch.Tensor | None,
    mass: torch.Tensor,
    plan: MergePlan,
    *,
    kappa: float = 1.5,
    weight: str = "mass",
) -> Fused:
    """Weighted means with their energy restored; sizes add, positions average by size.

    With w = s m, or s alone: x̄ = Σ w x / Σ w and e = Σ w ‖x‖ / Σ w over a target and its sources;
    the target becomes x̄ · min(e / max(‖x̄‖, 1e-6), κ). Everything else stays, bit by bit. A plan of
    no merges returns the very tensors.

    Args:
        x: (B, 1+n, d).
        sizes: (B, 1+n) > 0.
        pos: (B, n, 2), or None.
        mass: (B, n) > 0.
        plan: from :func:`hca_match` and its like.
        kappa: κ >= 1, most that a mean is lengthened; 1 leaves the mean.
        weight: "mass" or "size".

    Returns:
        Tokens (B, 1+n−r, d), sizes and positions, in the order of ``plan.keep``.

    Raises:
        ValueError: shapes that do not fit, sizes or masses not positive, unknown options.
    """
    _check_tokens(x=x, sizes=sizes, pos=pos)
    if weight not in ("mass", "size"):
        raise ValueError(f"weight must be 'mass' or 'size': got {weight!r}")
    if mass.shape != (len(x), x.shape[1] - 1):
        raise ValueError(
            f"mass must have shape {(len(x), x.shape[1] - 1)}: got {tuple(mass.shape)}"
        )
    _check_positive("mass", mass)
    if not plan.src.shape[1]:
        return Fused(x, sizes, pos)
    heavy = _wide(sizes) if weight == "size" else sizes * F.pad(mass, (1, 0), value=1.0)
    # the class token has no place, and needs none: nothing is merged into it
    places = (
        torch.zeros_like(x[..., :2], dtype=heavy.dtype) if pos is None else F.pad(pos, (0, 0, 1, 0))
    )
    found = fuse_scatter(x, heavy, sizes, places, plan.keep, plan.src, plan.place, kappa=kappa)
    return found._replace(pos=None if pos is None else found.pos[:, 1:])


class Tokens(NamedTuple):
    """Tokens on their way through a transformer.

    Attributes:
        x: (B, 1+n, d), the class token first.
        sizes: (B, 1+n) patches that each stands for.
        pos: (B, n, 2) positions in patches.
        source: (B, n₀) int64, the token that each original patch is in; −1 where it was dropped.
    """

    x: torch.Tensor
    sizes: torch.Tensor
    pos: torch.Tensor
    source: torch.Tensor


def start_tokens(x: torch.Tensor, pos: torch.Tensor) -> Tokens:
    """Unmerged tokens from (B, 1+n, d) and positions (B, n, 2) or (n, 2)."""
    images, n = len(x), x.shape[1] - 1
    source = torch.arange(1, n + 1, device=x.device).expand(images, -1)
    sizes = torch.ones_like(_wide(x[..., 0]))
    return Tokens(x, sizes, pos.expand(images, n, 2).to(sizes), source)


def unmerge(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Every original patch with the token that it is in: (B, n₀, d); zeros where it was dropped.

    Args:
        x: (B, 1+n, d).
        source: (B, n₀) as in :class:`Tokens`.
    """
    return _rows(x, source.clamp_min(0)) * (source >= 0)[..., None]


class Step(NamedTuple):
    """What a merger decided: a plan, the masses that weigh the average, and options of the fusion.

    Attributes:
        plan: which tokens merge.
        mass: (B, n).
        kappa: as for :func:`epw_fuse`.
        weight: as for :func:`epw_fuse`.
    """

    plan: MergePlan
    mass: torch.Tensor
    kappa: float = 1.0
    weight: str = "size"


class Merger:
    """Merges tokens between attention and MLP of a layer: ``merger(tokens, keys, attn, layer)``.

    Args:
        r: merges a layer, at most half of its patch tokens.
        keep_ratio: instead of ``r``, the share of patch tokens to keep, in [0.5, 1].

    Raises:
        ValueError: both or none given, or out of range.
    """

    def __init__(self, r: int | None = None, *, keep_ratio: float | None = None):
        if (r is None) == (keep_ratio is None):
            raise ValueError(f"give r or keep_ratio: got r={r}, keep_ratio={keep_ratio}")
        if r is not None and (isinstance(r, bool) or r != int(r) or r < 0):
            raise ValueError(f"r must be a whole number >= 0: got {r!r}")
        if keep_ratio is not None and not 0.5 <= keep_ratio <= 1:
            raise ValueError(f"keep_ratio must be in [0.5, 1]: got {keep_ratio}")
        self.r, self.keep_ratio = r, keep_ratio

    def count(self, n: int) -> int:
        """Merges of a layer with n patch tokens."""
        wanted = self.r if self.r is not None else n - math.ceil(self.keep_ratio * n)
        return min(int(wanted), n // 2)

    def step(
        self, tokens: Tokens, keys: torch.Tensor, attn: torch.Tensor, r: int, layer: int
    ) -> Step:
        """Decide r merges."""
        raise NotImplementedError

    def __call__(
        self, tokens: Tokens, keys: torch.Tensor, attn: torch.Tensor, layer: int = 0
    ) -> Tokens:
        """Merge; with nothing to merge the very tokens come back.

        Args:
            tokens: what the layer's attention gave.
            keys: (B, 1+n, head_dim), mean over heads.
            attn: (B, H, 1+n, 1+n).
            layer: number of the layer, from 0.
        """
        r = self.count(tokens.x.shape[1] - 1)
        return tokens if r == 0 else merge_tokens(tokens, self.step(tokens, keys, attn, r, layer))


def merge_tokens(tokens: Tokens, step: Step) -> Tokens:
    """Carry out a step."""
    x, sizes, pos = epw_fuse(
        tokens.x,
        tokens.sizes,
        tokens.pos,
        step.mass,
        step.plan,
        kappa=step.kappa,
        weight=step.weight,
    )
    if x is tokens.x:
        return tokens
    source = step.plan.new_index.gather(1, tokens.source.clamp_min(0))
    return Tokens(x, sizes, pos, torch.where(tokens.source < 0, -1, source))


class SREMerge(Merger):
    """SES-Assess, HCA-Match and EPW-Fuse.

    Args:
        r, keep_ratio: as for :class:`Merger`.
        sigma, beta: of :func:`spatial_entropic_mass`; σ also of the window of the matching.
        lam, gamma, partition, backend: of :func:`hca_match`.
        kappa, weight: of :func:`epw_fuse`.
        mass: ``mass(x, attn, sizes, pos)`` in place of :func:`spatial_entropic_mass`.
    """

    def __init__(
        self,
        r: int | None = None,
        *,
        keep_ratio: float | None = None,
        sigma: float = 1.5,
        beta: float = 2.0,
        lam: float = 0.2,
        gamma: float = 0.6,
        kappa: float = 1.5,
        partition: str = "mass",
        weight: str = "mass",
        mass: Callable | None = None,
        backend: str = "auto",
    ):
        super().__init__(r, keep_ratio=keep_ratio)
        self.sigma, self.beta, self.lam, self.gamma = sigma, beta, lam, gamma
        self.kappa, self.partition, self.weight = kappa, partition, weight
        self.mass, self.backend = mass, backend

    def masses(self, tokens: Tokens, attn: torch.Tensor) -> torch.Tensor:
        """(B, n) masses of the patch tokens."""
        x, sizes, pos, _ = tokens
        if self.mass is not None:
            return self.mass(x, attn, sizes, pos)
        return spatial_entropic_mass(x, attn, sizes, pos, sigma=self.sigma, beta=self.beta)

    def step(self, tokens, keys, attn, r, layer):
        """Decide r merges."""
        mass = self.masses(tokens, attn)
        plan = hca_match(
            keys,
            mass,
            tokens.pos,
            r,
            lam=self.lam,
            gamma=self.gamma,
            sigma=self.sigma,
            partition=self.partition,
            backend=self.backend,
        )
        return Step(plan, mass, self.kappa, self.weight)


# --------------------------------------------------------------------------------------------
# Baselines


class ToMe(Merger):
    """Token Merging (Bolya et al., 2023): most similar pairs, averages weighted by size."""

    def step(self, tokens, keys, attn, r, layer):
        """Decide r merges."""
        return Step(bipartite_soft_matching(keys, r), torch.ones_like(tokens.sizes[:, 1:]))


def energy_merge(keys: torch.Tensor, r: int, *, margin: float) -> MergePlan:
    """PiToMe (Tran et al., 2024): only the 2r tokens with the most similar company take part.

    E_i = mean_j f(cos_ij), f(x) = x if x >= margin else e^{x − margin} − 1. Sorted by energy, every
    second of the 2r is a source and goes to its most similar target among the others; all other
    tokens are protected, and counted among the targets of the plan.

    Args:
        keys: (B, 1+n, d), mean over heads.
        r: merges, in 0..n//2.
        margin: cosine from which company counts.

    Raises:
        ValueError: r out of range, or keys of another shape.
    """
    n = _check_keys(keys, r)
    places = torch.arange(n, device=keys.device).expand(len(keys), -1)
    if r == 0:
        return MergePlan(places[:, :0], places + 1, places[:, :0], places[:, :0], places[:, :0])
    unit = _unit(_wide(keys)[:, 1:])
    cos = unit @ unit.mT
    energy = torch.where(cos >= margin, cos, torch.expm1(cos - margin)).mean(dim=2)
    order = energy.sort(dim=1, descending=True, stable=True).indices[:, : 2 * r]
    a, b = order[:, ::2], order[:, 1::2]
    image = torch.arange(len(keys), device=keys.device)[:, None]
    best, index = cos[image[..., None], a[:, :, None], b[:, None]].max(dim=2)
    plan = _best_edges(a, b, best, index, r)
    stays = torch.ones_like(places, dtype=torch.bool).scatter_(1, a, False)
    others = places[stays].reshape(len(keys), n - r)
    return plan._replace(b_index=others + 1)


class PiToMe(Merger):
    """:func:`energy_merge` with the margin 0.9 − 0.9 · layer / n_layers."""

    def __init__(
        self, r: int | None = None, *, keep_ratio: float | None = None, n_layers: int = 12
    ):
        super().__init__(r, keep_ratio=keep_ratio)
        self.n_layers = n_layers

    def step(self, tokens, keys, attn, r, layer):
        """Decide r merges."""
        plan = energy_merge(keys, r, margin=0.9 - 0.9 * layer / self.n_layers)
        return Step(plan, torch.ones_like(tokens.sizes[:, 1:]))


class RandomMerge(Merger):
    """Random halves, random pairs; the same ones again for the same seed, image and layer."""

    def __init__(self, r: int | None = None, *, keep_ratio: float | None = None, seed: int = 0):
        super().__init__(r, keep_ratio=keep_ratio)
        self.seed = seed

    def step(self, tokens, keys, attn, r, layer):
        """Decide r merges."""
        images, n = len(tokens.x), tokens.x.shape[1] - 1
        g = _generator(1000 * self.seed + layer)
        order = torch.rand(images, n, generator=g).argsort(dim=1).to(keys.device)
        a, b = (
            part.sort(dim=1).values for part in (order[:, : -(-n // 2)], order[:, -(-n // 2) :])
        )
        best = torch.rand(a.shape, generator=g).to(keys.device)
        index = torch.randint(b.shape[1], a.shape, generator=g).to(keys.device)
        plan = _best_edges(a, b, best, index, r)
        return Step(plan, torch.ones_like(tokens.sizes[:, 1:]))


class ClsPruning(Merger):
    """Keep what the class token attends to most, as EViT does.

    Args:
        r, keep_ratio: as for :class:`Merger`.
        rest: fuse what is left out into one token, weighted by attention; without it the same
            number of tokens stays, and the rest is gone.
    """

    def __init__(self, r: int | None = None, *, keep_ratio: float | None = None, rest: bool = True):
        super().__init__(r, keep_ratio=keep_ratio)
        self.rest = rest

    def __call__(self, tokens, keys, attn, layer=0):
        """Prune; with nothing to prune the very tokens come back."""
        n = tokens.x.shape[1] - 1
        r = self.count(n)
        if r == 0:
            return tokens
        weight = _wide(attn)[:, :, 0, 1:].mean(dim=1)
        order = weight.sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, : n - r - self.rest].sort(dim=1).values
        keep = F.pad(chosen + 1, (1, 0))
        x, pos = _rows(tokens.x, keep), _rows(tokens.pos, chosen)
        index = torch.full_like(F.pad(order, (1, 0)), -1)
        index.scatter_(1, keep, torch.arange(keep.shape[1], device=keep.device).expand_as(keep))
        sizes = _rows(tokens.sizes, keep)
        if self.rest:
            left = order[:, n - r - 1 :]
            w = weight.gather(1, left)[..., None]
            w = w / w.sum(dim=1, keepdim=True)
            fused = (w * _rows(tokens.x[:, 1:], left)).sum(dim=1, keepdim=True)
            x = torch.cat([x, fused.to(x.dtype)], dim=1)
            pos = torch.cat([pos, (w * _rows(tokens.pos, left)).sum(dim=1, keepdim=True)], dim=1)
            sizes = F.pad(sizes, (0, 1), value=1.0)
            index = torch.where(index < 0, keep.shape[1], index)
        source = index.gather(1, tokens.source.clamp_min(0))
        return Tokens(x, sizes, pos, torch.where(tokens.source < 0, -1, source))


def pool_tokens(x: torch.Tensor, grid: tuple[int, int], pos: torch.Tensor | None = None) -> Tokens:
    """Uniform 2×2 pooling of the patch tokens.

    Args:
        x: (B, 1+h·w, d), h and w even.
        grid: (h, w).
        pos: (h·w, 2); None is the grid itself.

    Raises:
        ValueError: an odd grid, or one that is not the number of patches.
    """
    h, w = grid
    if h % 2 or w % 2 or h * w != x.shape[1] - 1:
        raise ValueError(f"grid must be even and have {x.shape[1] - 1} patches: got {grid}")
    pos = grid_positions(grid).to(_wide(x)) if pos is None else pos
    images = len(x)

    def pooled(v: torch.Tensor) -> torch.Tensor:
        cells = v.reshape(images, h // 2, 2, w // 2, 2, -1)
        return cells.mean(dim=(2, 4)).reshape(images, h * w // 4, -1)

    rows, cols = torch.meshgrid(torch.arange(h) // 2, torch.arange(w) // 2, indexing="ij")
    source = (1 + rows * (w // 2) + cols).reshape(1, -1).expand(images, -1).to(x.device)
    sizes = _wide(x).new_full((images, 1 + h * w // 4), 4.0)
    sizes[:, 0] = 1
    merged = torch.cat([x[:, :1], pooled(x[:, 1:])], dim=1)
    return Tokens(merged, sizes, pooled(pos.expand(images, -1, 2)), source)


def make_merger(name: str, r: int, *, seed: int = 0) -> Merger:
    """A merger from its name and options.

    Args:
        name: "sre", "tome", "pitome", "random", "evit" or "evit-drop"; "sre" takes options of
            :class:`SREMerge` behind it, as in "sre gamma=0 partition=alternate".
        r: merges a layer.
        seed: of "random".

    Raises:
        ValueError: an unknown name or option.
    """
    kind, *options = name.split()
    made = {
        "tome": lambda: ToMe(r),
        "pitome": lambda: PiToMe(r),
        "random": lambda: RandomMerge(r, seed=seed),
        "evit": lambda: ClsPruning(r),
        "evit-drop": lambda: ClsPruning(r, rest=False),
    }
    if kind in made and not options:
        return made[kind]()
    if kind != "sre":
        raise ValueError(
            f"name must be one of sre, {', '.join(made)}, and only sre takes options: got {name!r}"
        )
    known = {}
    for option in options:
        key, _, value = option.partition("=")
        if key in ("partition", "weight"):
            known[key] = value
        elif key in ("sigma", "beta", "lam", "gamma", "kappa"):
            known[key] = float(value)
        else:
            raise ValueError(f"name holds an unknown option: got {option!r}")
    return SREMerge(r, **known)


# --------------------------------------------------------------------------------------------
# Operations


def vit_flops(n: int, d: int, L: int, r: int) -> int:
    """Multiply-adds of a ViT's L blocks with r merges in each, between attention and MLP.

    F = Σ_l 4 n_l d² + 2 n_l² d + 8 (n_l − r_l) d², with r_l = min(r, ⌊(n_l − 1)/2⌋).

    Args:
        n: tokens, the class token included.
        d: width; the MLP is four times as wide.
        L: blocks.
        r: merges a block.

    Raises:
        ValueError: sizes out of range.
    """
    for name, value, least in (("n", n, 1), ("d", d, 1), ("L", L, 1), ("r", r, 0)):
        if isinstance(value, bool) or value != int(value) or value < least:
            raise ValueError(f"{name} must be a whole number >= {least}: got {value!r}")
    total = 0
    for _ in range(L):
        merged = min(r, (n - 1) // 2)
        total += 4 * n * d * d + 2 * n * n * d + 8 * (n - merged) * d * d
        n -= merged
    return total


def solve_r(n: int, d: int, L: int, target: float = 0.24) -> int:
    """The smallest r that saves at least the share ``target`` of the multiply-adds.

    Raises:
        ValueError: a target outside [0, 1), or one that no r reaches.
    """
    if not 0 <= target < 1:
        raise ValueError(f"target must be in [0, 1): got {target}")
    full = vit_flops(n, d, L, 0)
    for r in range(n // 2 + 1):
        if vit_flops(n, d, L, r) <= (1 - target) * full:
            return r
    best = 1 - vit_flops(n, d, L, n // 2) / full
    raise ValueError(f"target must be at most {best:.3f} for {n} tokens: got {target}")


# --------------------------------------------------------------------------------------------
# Measures


def _descriptors(name: str, x: object) -> torch.Tensor:
    x = torch.as_tensor(x)
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"{name} must be (N, tokens, d), not empty: got shape {tuple(x.shape)}")
    return _unit(_wide(x))


def maxsim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Similarity of token sets, mean_i max_j cos + mean_j max_i cos: (N_a, N_b) in [−2, 2].

    Args:
        a: (N_a, n_a, d) patch tokens.
        b: (N_b, n_b, d).

    Raises:
        ValueError: other shapes.
    """
    a, b = _descriptors("a", a), _descriptors("b", b)
    if a.shape[2] != b.shape[2]:
        raise ValueError(f"b must have {a.shape[2]} channels like a: got {b.shape[2]}")
    flat = b.reshape(-1, b.shape[2])
    out = []
    for rows in a:  # a matrix of all tokens of one set with those of all others
        cos = (rows @ flat.T).reshape(len(rows), len(b), -1)
        out.append(cos.amax(dim=2).mean(dim=0) + cos.amax(dim=0).mean(dim=1))
    return torch.stack(out)


def ranking_metrics(
    scores: torch.Tensor,
    query_ids: torch.Tensor,
    gallery_ids: torch.Tensor,
    cams: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, float]:
    """How early a query's own identity stands in the ranking of the gallery.

    Args:
        scores: (Q, G) similarities; equal ones rank by place in the gallery.
        query_ids: (Q,).
        gallery_ids: (G,).
        cams: cameras of queries and gallery; pictures of one person by one camera are left out.

    Returns:
        ``rank1`` and ``rank5``, the share of queries with a match among the first; ``mAP``, mean
        average precision (with one match a query, the mean reciprocal rank); ``mINP``, the mean of
        matches over the rank of the last one. Queries without a match are left out.

    Raises:
        ValueError: shapes that do not fit, scores that are not finite, or no query with a match.
    """
    scores, query_ids, gallery_ids = (torch.as_tensor(t) for t in (scores, query_ids, gallery_ids))
    if scores.shape != (len(query_ids), len(gallery_ids)) or query_ids.ndim != 1:
        raise ValueError(
            f"scores must be ({len(query_ids)}, {len(gallery_ids)}): got {tuple(scores.shape)}"
        )
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("scores must be finite")
    same = query_ids[:, None] == gallery_ids[None]
    out = torch.zeros_like(same)
    if cams is not None:
        query_cams, gallery_cams = (torch.as_tensor(c) for c in cams)
        if query_cams.shape != query_ids.shape or gallery_cams.shape != gallery_ids.shape:
            raise ValueError("cams must hold a camera for every query and every gallery picture")
        out = same & (query_cams[:, None] == gallery_cams[None])
    order = scores.double().masked_fill(out, -math.inf)
    order = order.sort(dim=1, descending=True, stable=True).indices
    hit = (same & ~out).gather(1, order)
    hit = hit[hit.any(dim=1)]
    if not len(hit):
        raise ValueError("gallery_ids must hold a match for at least one query")
    rank = torch.arange(1, hit.shape[1] + 1, dtype=torch.float64)
    found = hit.cumsum(dim=1)
    precision = (hit * found / rank).sum(dim=1) / found[:, -1]
    last = (hit * rank).amax(dim=1)
    return {
        "rank1": float(hit[:, 0].double().mean()),
        "rank5": float(hit[:, :5].any(dim=1).double().mean()),
        "mAP": float(precision.mean()),
        "mINP": float((found[:, -1] / last).mean()),
    }


def reid_metrics(
    query_feats: torch.Tensor,
    query_ids: torch.Tensor,
    gallery_feats: torch.Tensor,
    gallery_ids: torch.Tensor,
    cams: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, float]:
    """:func:`ranking_metrics` of the cosines of features (Q, d) and (G, d)."""
    q, g = (_unit(_wide(torch.as_tensor(f))) for f in (query_feats, gallery_feats))
    if q.ndim != 2 or g.ndim != 2 or q.shape[1] != g.shape[1]:
        raise ValueError(
            f"gallery_feats must be (G, d) for query_feats (Q, d): got {tuple(g.shape)} and "
            f"{tuple(q.shape)}"
        )
    return ranking_metrics(q @ g.T, query_ids, gallery_ids, cams)


def detail_recovery(original_detail_tokens: torch.Tensor, merged: torch.Tensor) -> float:
    """Best cosine between a detail's original token and any merged token, on average.

    Args:
        original_detail_tokens: (N, k, d).
        merged: (N, n, d) patch tokens of the same images.

    Raises:
        ValueError: other shapes.
    """
    a = _descriptors("original_detail_tokens", original_detail_tokens)
    b = _descriptors("merged", merged)
    if len(a) != len(b) or a.shape[2] != b.shape[2]:
        raise ValueError(f"merged must be ({len(a)}, n, {a.shape[2]}): got {tuple(b.shape)}")
    return float((a @ b.mT).amax(dim=2).double().mean())


def mean_norm(x: torch.Tensor) -> float:
    """Mean length of tokens (N, n, d)."""
    return float(x.norm(dim=2).double().mean())


def token_variance(x: torch.Tensor) -> float:
    """Mean squared distance of tokens (N, n, d) from their image's mean."""
    return float((x - x.mean(dim=1, keepdim=True)).square().sum(dim=2).double().mean())


# --------------------------------------------------------------------------------------------
# Data (A): token grids

GRID = (16, 8)
DIM = 48
N_OUTFITS, N_BACKGROUNDS = 12, 6
DETAIL, NOISE = 1.5, 0.3


class PedestrianTokens(NamedTuple):
    """Token grids of people.

    Attributes:
        tokens: (N, 128, 48) float32, a grid of 16 × 8 row by row.
        detail_mask: (N, 128) bool, the four tokens of the detail.
        ids: (N,) int64.
    """

    tokens: torch.Tensor
    detail_mask: torch.Tensor
    ids: torch.Tensor


def grid_positions(grid: tuple[int, int] = GRID) -> torch.Tensor:
    """(h·w, 2) rows and columns."""
    return torch.cartesian_prod(*(torch.arange(float(k)) for k in grid))


def make_pedestrian_tokens(
    n_ids: int = 60, seed: int = 0, *, clutter: float = 0.0, views: int = 1
) -> PedestrianTokens:
    """People with striped outfits before plain backgrounds, each with a detail of 2 × 2 tokens.

    Identity k wears outfit k mod 12 (four stripes of four rows, in columns 2–5); 1.5 times its own
    vector is added to four tokens at its own corner, which moves up or down by at most one row from
    view to view. Every vector is standard normal, every token has noise of 0.3.

    Args:
        n_ids: identities.
        seed: of everything.
        clutter: that multiple of an independent normal vector is added to each background token.
        views: pictures of an identity; the first ``n_ids`` rows are first views in random order,
            and so on.

    Raises:
        ValueError: sizes out of range.
    """
    for name, value in (("n_ids", n_ids), ("views", views)):
        if isinstance(value, bool) or value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number >= 1: got {value!r}")
    if not 0 <= clutter < math.inf:
        raise ValueError(f"clutter must be >= 0: got {clutter}")
    g = _generator(seed)
    h, w = GRID
    backgrounds = torch.randn(N_BACKGROUNDS, DIM, generator=g)
    stripes = torch.randn(N_OUTFITS, 4, DIM, generator=g)
    details = DETAIL * torch.randn(n_ids, DIM, generator=g)
    row = torch.randint(2, 13, (n_ids,), generator=g)
    col = torch.randint(2, 5, (n_ids,), generator=g)
    ids = torch.cat([torch.randperm(n_ids, generator=g) for _ in range(views)])
    N = len(ids)
    person = torch.zeros(h, w, dtype=torch.bool)
    person[:, 2:6] = True
    chosen = torch.randint(N_BACKGROUNDS, (N,), generator=g)
    x = backgrounds[chosen][:, None, None].repeat(1, h, w, 1)
    x += clutter * torch.randn(N, h, w, DIM, generator=g)
    worn = stripes[ids % N_OUTFITS].repeat_interleave(h // 4, dim=1)
    x = torch.where(person[..., None], worn[:, :, None], x)
    top = row[ids] + torch.randint(-1, 2, (N,), generator=g)
    rows, cols = torch.arange(h), torch.arange(w)
    high = (rows >= top[:, None]) & (rows < top[:, None] + 2)
    wide = (cols >= col[ids, None]) & (cols < col[ids, None] + 2)
    mask = high[:, :, None] & wide[:, None]
    x += mask[..., None] * details[ids][:, None, None]
    x += NOISE * torch.randn(N, h, w, DIM, generator=g)
    return PedestrianTokens(x.reshape(N, h * w, DIM), mask.reshape(N, h * w), ids)


TEMPERATURE = 0.25


def token_attention(
    tokens: Tokens, temperature: float = TEMPERATURE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and attention of tokens without weights: directions, softmax(cos / T + ln s).

    Returns:
        (B, 1+n, d) keys and (B, 1, 1+n, 1+n) attention.
    """
    keys = _unit(_wide(tokens.x))
    logits = keys @ keys.mT / temperature + tokens.sizes.to(keys).log()[:, None]
    return keys, logits.softmax(dim=2)[:, None]


class Trace(NamedTuple):
    """Tokens layer by layer.

    Attributes:
        layers: the tokens at the start and after each layer.
        steps: what was decided in each layer; empty for what is no merger of pairs.
    """

    layers: list[Tokens]
    steps: list[Step]

    @property
    def final(self) -> Tokens:
        """The tokens after the last layer."""
        return self.layers[-1]


def compress(
    tokens: torch.Tensor,
    merger: Merger,
    *,
    layers: int = 3,
    pos: torch.Tensor | None = None,
) -> Trace:
    """Merge token grids layer after layer, with no weights between.

    Args:
        tokens: (N, n, d) patch tokens; their mean is the class token.
        merger: what merges.
        layers: how often.
        pos: (n, 2) positions; None is the 16 × 8 grid.

    Raises:
        ValueError: tokens of another shape.
    """
    if tokens.ndim != 3 or 0 in tokens.shape:
        raise ValueError(f"tokens must be (N, n, d), not empty: got shape {tuple(tokens.shape)}")
    pos = grid_positions() if pos is None else pos
    x = torch.cat([tokens.mean(dim=1, keepdim=True), tokens], dim=1)
    state = start_tokens(x, pos.to(x.device))
    states, steps = [state], []
    for layer in range(layers):
        keys, attn = token_attention(state)
        r = merger.count(state.x.shape[1] - 1)
        if isinstance(merger, ClsPruning) or r == 0:
            state = merger(state, keys, attn, layer)
        else:
            steps.append(merger.step(state, keys, attn, r, layer))
            state = merge_tokens(state, steps[-1])
        states.append(state)
    return Trace(states, steps)


# --------------------------------------------------------------------------------------------
# A vision transformer that exposes what merging needs


class AttentionOut(NamedTuple):
    """What a layer's attention gives; a forward hook on ``block.attn`` sees all of it.

    Attributes:
        out: (B, 1+n, d).
        weights: (B, H, 1+n, 1+n).
        keys: (B, 1+n, d/H), mean over heads.
    """

    out: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor


class Attention(nn.Module):
    """Explicit multi-head attention, proportional to sizes: softmax(q kᵀ / √d + ln s)."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor | None = None) -> AttentionOut:
        """Attend; ``sizes`` (B, 1+n) or None for tokens of one patch each."""
        B, n, d = x.shape
        q, k, v = self.qkv(x).reshape(B, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT / math.sqrt(d // self.heads)
        if sizes is not None:
            logits = logits + sizes.log().to(logits)[:, None, None]
        weights = logits.softmax(dim=3)
        out = self.proj((weights @ v).transpose(1, 2).reshape(B, n, d))
        return AttentionOut(out, weights, k.mean(dim=1))


class Block(nn.Module):
    """Pre-norm attention, a merge, pre-norm MLP of four times the width."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, tokens: Tokens, merger: Merger | None, layer: int) -> Tokens:
        """One layer; merging happens between attention and MLP."""
        # sizes of 1 have logarithm 0: the first layer of any run is plain attention
        found = self.attn(self.norm1(tokens.x), None if merger is None else tokens.sizes)
        tokens = tokens._replace(x=tokens.x + found.out)
        if merger is not None:
            tokens = merger(tokens, found.keys, found.weights, layer)
        return tokens._replace(x=tokens.x + self.mlp(self.norm2(tokens.x)))


class TinyViT(nn.Module):
    """A ViT for pictures of any size, ViT-B/16 included, with a place for a merger.

    Args:
        img: (height, width) in pixels.
        patch: side of a patch.
        dim, depth, heads: of the transformer; the MLP is four times as wide.
        stride: step between patches; None is ``patch``, less lets them overlap.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(
        self,
        img: tuple[int, int] = (64, 32),
        patch: int = 4,
        dim: int = 64,
        depth: int = 4,
        heads: int = 4,
        *,
        stride: int | None = None,
    ):
        super().__init__()
        stride = patch if stride is None else stride
        if min(img) < patch or stride < 1:
            raise ValueError(f"img must be at least a patch of {patch}: got {img}")
        if dim % heads:
            raise ValueError(f"heads must divide dim: got heads={heads}, dim={dim}")
        self.img = tuple(img)
        self.grid = tuple((side - patch) // stride + 1 for side in img)
        self.embed = nn.Conv2d(3, dim, patch, stride)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.where = nn.Parameter(0.02 * torch.randn(1, 1 + math.prod(self.grid), dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        # positions in patches, whatever the stride
        self.register_buffer("pos", grid_positions(self.grid) * (stride / patch), persistent=False)
        self.merger: Merger | None = None

    def forward(self, images: torch.Tensor) -> Tokens:
        """Normalised tokens of images (B, 3, height, width).

        Raises:
            ValueError: images of another size.
        """
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, *self.img):
            raise ValueError(f"images must be (B, 3, {self.img}): got {tuple(images.shape)}")
        x = self.embed(images).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.where
        tokens = start_tokens(x, self.pos)
        for layer, block in enumerate(self.blocks):
            tokens = block(tokens, self.merger, layer)
        return tokens._replace(x=self.norm(tokens.x))


def patch_vit(model: TinyViT, merger: Merger | None) -> TinyViT:
    """The model with a merger, sharing all weights; the one given is left as it is."""
    if not isinstance(model, TinyViT):
        raise ValueError(f"model must be a TinyViT: got {type(model).__name__}")
    patched = copy.copy(model)
    patched.merger = merger
    return patched


# --------------------------------------------------------------------------------------------
# Data (B): pictures


def render_pedestrians(ids: torch.Tensor, cameras: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    """Pictures (N, 3, 64, 32) of people in [0, 1], the same factors as the token grids.

    Identity k wears outfit k mod 12, four stripes; its own texture of 8 × 8 pixels sits at its own
    corner. The seed chooses background, shift by up to two pixels and noise; camera 1 is darker
    and tinted.

    Args:
        ids: (N,) in 0..9999.
        cameras: (N,) 0 or 1.
        seed: of the view, not of the person.

    Raises:
        ValueError: numbers out of range.
    """
    ids, cameras = torch.as_tensor(ids), torch.as_tensor(cameras)
    if ids.ndim != 1 or ids.shape != cameras.shape or len(ids) == 0:
        raise ValueError(f"ids and cameras must be (N,): got {tuple(ids.shape)}")
    if int(ids.min()) < 0 or int(ids.max()) > 9999:
        raise ValueError("ids must be in 0..9999")
    if not bool(((cameras == 0) | (cameras == 1)).all()):
        raise ValueError("cameras must be 0 or 1")
    people = _generator(77)  # one world, whatever the seed
    stripes = torch.rand(N_OUTFITS, 4, 3, generator=people)
    texture = torch.rand(10_000, 4, 4, 3, generator=people)
    row = 4 * torch.randint(2, 13, (10_000,), generator=people)
    col = 4 * torch.randint(2, 5, (10_000,), generator=people)
    walls = torch.rand(N_BACKGROUNDS, 2, 3, generator=people)
    g = _generator(seed)
    N, h, w = len(ids), 64, 32
    ramp = torch.linspace(0, 1, h)[None, :, None, None]
    wall = walls[torch.randint(N_BACKGROUNDS, (N,), generator=g)][:, :, None, None]
    x = ((1 - ramp) * wall[:, 0] + ramp * wall[:, 1]).expand(N, h, w, 3).clone()
    x[:, :, 8:24] = stripes[ids % N_OUTFITS].repeat_interleave(16, dim=1)[:, :, None]
    rows, cols = torch.arange(h), torch.arange(w)
    in_row, in_col = rows - row[ids, None], cols - col[ids, None]
    inside = ((in_row >= 0) & (in_row < 8))[:, :, None] & ((in_col >= 0) & (in_col < 8))[:, None]
    picked = texture[
        ids[:, None, None],
        (in_row.clamp(0, 7) // 2)[:, :, None],
        (in_col.clamp(0, 7) // 2)[:, None],
    ]
    x = torch.where(inside[..., None], picked, x)
    down, right = torch.randint(-2, 3, (2, N, 1), generator=g)
    image = torch.arange(N)[:, None, None]
    x = x[image, ((rows - down) % h)[:, :, None], ((cols - right) % w)[:, None]]
    light = torch.tensor([[1.0, 1.0, 1.0], [0.7, 0.75, 0.85]])[cameras]
    x = x * light[:, None, None] + 0.03 * torch.randn(N, h, w, 3, generator=g)
    return x.clamp(0, 1).permute(0, 3, 1, 2).contiguous()


class CosineHead(nn.Module):
    """Logits 16 cos(f, w_k): the normalised softmax over identities."""

    def __init__(self, dim: int, n_ids: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_ids, dim))

    def forward(self, f: torch.Tensor) -> torch.Tensor:
        """(B, n_ids) from features (B, dim)."""
        return 16 * _unit(f) @ _unit(self.weight).T


def train_reid(
    model: TinyViT,
    *,
    n_ids: int = 150,
    steps: int = 500,
    batch: int = 64,
    lr: float = 1e-3,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Train on identities 0..n_ids−1, freshly drawn views every step.

    Returns:
        The losses.
    """  # fmt: skip
    torch.manual_seed(seed)
    whole = nn.ModuleDict(
        {"vit": model, "head": CosineHead(model.norm.normalized_shape[0], n_ids)}
    ).to(device)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=lr, weight_decay=0.05)
    g = _generator(seed)

    def batches():
        for step in range(steps):
            ids = torch.randint(n_ids, (batch,), generator=g)
            cameras = torch.randint(2, (batch,), generator=g)
            images = render_pedestrians(ids, cameras, seed=1_000_000 * seed + step)
            yield images.to(device), ids.to(device)

    def loss(whole: nn.ModuleDict, made: tuple) -> torch.Tensor:
        images, ids = made
        x = whole["vit"](images).x
        logits = whole["head"](x[:, 0]) + whole["head"](x[:, 1:].mean(dim=1))
        return F.cross_entropy(logits, ids)

    warm = max(1, steps // 20)
    history = fit(
        whole,
        loss,
        batches(),
        optimizer,
        schedule=lambda t: min((t + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * t / steps)),
        clip=1.0,
    )
    model.eval()
    return history.losses


def image_run(
    *,
    steps: int,
    seed: int = 0,
    r: int = 28,
    methods: Sequence[str] = ("none", "sre", "tome", "pitome", "random"),
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Train a TinyViT on 150 people, retrieve 150 others across cameras with each merger.

    Returns:
        ``<method>_rank1`` and ``<method>_mAP`` by MaxSim over tokens, ``<method>_cls`` the rank-1
        of the class token alone, and the last ``loss``.
    """  # fmt: skip
    torch.manual_seed(seed)
    model = TinyViT().to(device)
    losses = train_reid(model, steps=steps, seed=seed, device=device)
    ids = torch.arange(150, 300)
    cameras = torch.zeros_like(ids)
    views = [
        render_pedestrians(ids, cameras + c, seed=-1 - 2 * seed - c).to(device) for c in (0, 1)
    ]
    out = {"loss": float(losses[-20:].mean())}
    for method in methods:
        merger = None if method == "none" else make_merger(method, r, seed=seed)
        patched = patch_vit(model, merger)
        with torch.no_grad():
            q, g = (patched(v).x.cpu() for v in views)
        found = ranking_metrics(maxsim(q[:, 1:], g[:, 1:]), ids, ids)
        out |= {f"{method}_rank1": found["rank1"], f"{method}_mAP": found["mAP"]}
        out[f"{method}_cls"] = reid_metrics(q[:, 0], ids, g[:, 0], ids)["rank1"]
    return out


def throughput(model: TinyViT, *, batch: int = 32, repeats: int = 5) -> float:
    """Pictures a second on the model's device, after one run that warms up.

    Raises:
        ValueError: counts below 1.
    """
    if batch < 1 or repeats < 1:
        raise ValueError(f"batch and repeats must be >= 1: got {batch} and {repeats}")
    images = torch.rand(batch, 3, *model.img, device=model.cls.device)
    with torch.no_grad():
        for run in range(repeats + 1):
            model(images)
            if images.is_cuda:
                torch.cuda.synchronize(images.device)
            if run == 0:
                start = time.perf_counter()
    return batch * repeats / (time.perf_counter() - start)


class ReIDImages(NamedTuple):
    """A split of a data set on disk.

    Attributes:
        paths: files.
        ids: (N,) int64.
        cameras: (N,) int64.
    """

    paths: list[Path]
    ids: torch.Tensor
    cameras: torch.Tensor

    def images(self, index: Sequence[int], size: tuple[int, int] = (256, 128)) -> torch.Tensor:
        """(k, 3, height, width) in [0, 1]."""
        from PIL import Image

        made = []
        for i in index:
            with Image.open(self.paths[i]) as picture:
                small = picture.convert("RGB").resize(size[::-1], Image.Resampling.BILINEAR)
                made.append(torch.from_numpy(np.array(small)))
        return torch.stack(made).permute(0, 3, 1, 2).float() / 255


MARKET_SPLITS = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}


def load_market1501(root: str | Path, split: str) -> ReIDImages:
    """Read a split of a data set in the layout of Market-1501; nothing is downloaded.

    Args:
        root: the folder with ``bounding_box_train``, ``query`` and ``bounding_box_test``.
        split: "train", "query" or "gallery". Junk (identity −1) is left out; distractors of the
            gallery keep identity 0.

    Raises:
        ValueError: an unknown split, a folder that is not there, or one without such files.
    """
    if split not in MARKET_SPLITS:
        raise ValueError(f"split must be one of {', '.join(MARKET_SPLITS)}: got {split!r}")
    folder = Path(root) / MARKET_SPLITS[split]
    if not folder.is_dir():
        raise ValueError(f"root must hold the folder {MARKET_SPLITS[split]}: got {root}")
    found = []
    for path in sorted(folder.iterdir()):
        name = re.match(r"(-?\d+)_c(\d+)s\d+_\d+", path.name)
        if name and path.suffix.lower() in (".jpg", ".jpeg", ".png") and int(name[1]) >= 0:
            found.append((path, int(name[1]), int(name[2]) - 1))
    if not found:
        raise ValueError(
            f"root must hold pictures such as 0002_c1s1_000451_03.jpg: none in {folder}"
        )
    paths, ids, cameras = zip(*found, strict=True)
    return ReIDImages(list(paths), torch.tensor(ids), torch.tensor(cameras))


# --------------------------------------------------------------------------------------------
# Experiments

METHODS = ("sre", "tome", "pitome", "random", "pool", "evit", "evit-drop", "none")


def token_run(
    method: str,
    seed: int,
    *,
    r: int = 34,
    layers: int = 3,
    clutter: float = 0.0,
    retrieval: bool = True,
    mass: Callable | None = None,
) -> dict[str, float]:
    """One method on 60 people in two views each.

    Args:
        method: as for :func:`make_merger`; also "pool" (2 × 2, whatever ``r``) and "none".
        seed: of the data.
        r: merges a layer.
        layers: how often.
        clutter: as for :func:`make_pedestrian_tokens`.
        retrieval: whether to find people of the first view in the second.
        mass: another mass for "sre".

    Returns:
        ``tokens`` left; ``recovery`` of details; ``norm`` and ``variance`` over those at the start,
        and ``norm_l`` and ``variance_l`` after layer l; ``far_l``, mean distance of merged pairs in
        patches in layers 1–3; ``mAP`` (the mean reciprocal rank here) and ``rank1`` by MaxSim.
    """
    data = make_pedestrian_tokens(seed=seed, clutter=clutter, views=2)
    if method == "pool":
        x = torch.cat([data.tokens.mean(dim=1, keepdim=True), data.tokens], dim=1)
        trace = Trace([start_tokens(x, grid_positions()), pool_tokens(x, GRID)], [])
    elif method == "none":
        trace = compress(data.tokens, ToMe(0), layers=0)
    else:
        merger = make_merger(method, r, seed=seed)
        if mass is not None:
            merger.mass = mass
        trace = compress(data.tokens, merger, layers=layers)
    patches = trace.final.x[:, 1:]
    details = data.tokens[data.detail_mask].reshape(len(data.ids), 4, DIM)
    out = {
        "tokens": patches.shape[1],
        "recovery": detail_recovery(details, patches),
        "norm": mean_norm(patches) / mean_norm(data.tokens),
        "variance": token_variance(patches) / token_variance(data.tokens),
    }
    for layer, state in enumerate(trace.layers[1:4], start=1):
        out[f"norm_{layer}"] = mean_norm(state.x[:, 1:]) / mean_norm(data.tokens)
        out[f"variance_{layer}"] = token_variance(state.x[:, 1:]) / token_variance(data.tokens)
    for layer, (before, step) in enumerate(
        zip(trace.layers, trace.steps[:3], strict=False), start=1
    ):
        gap = _rows(before.pos, step.plan.src - 1) - _rows(before.pos, step.plan.dst - 1)
        out[f"far_{layer}"] = float(gap.norm(dim=2).double().mean())
    if retrieval:
        half = len(data.ids) // 2
        scores = maxsim(patches[:half], patches[half:])
        found = ranking_metrics(scores, data.ids[:half], data.ids[half:])
        out |= {"mAP": found["mAP"], "rank1": found["rank1"]}
    return out


ALTERNATE = "sre partition=alternate"
ABLATIONS = (
    ALTERNATE,
    f"{ALTERNATE} gamma=0",
    "sre gamma=0",
    "sre lam=0",
    "sre beta=0",
    "sre kappa=1",
    "sre weight=size",
)
"""SRE-Merge with one part changed, and the split of ToMe with and without the mass term."""

RATES = (5, 12, 20, 28, 34)
CLUTTERS = (0.5, 1.0)

RUNS = (
    *(f"{m}|{s}|34|3|0" for m in (*METHODS, *ABLATIONS) for s in range(8)),
    *(f"{m}|{s}|{r}|3|0" for m in (*METHODS[:4], "evit") for r in RATES[:-1] for s in range(3)),
    *(f"{m}|{s}|5|12|0" for m in ("sre", "tome", "pitome") for s in range(8)),
    *(f"{m}|{s}|34|3|{c}" for m in ("sre", "tome", "pitome", "pool") for c in CLUTTERS
      for s in range(4)),
)  # fmt: skip
"""The shipped runs: method, seed, merges a layer, layers, clutter."""


def study_run(run: str) -> dict[str, float]:
    """One of :data:`RUNS`.

    Raises:
        ValueError: an unknown run.
    """
    if run not in RUNS:
        raise ValueError(f"run must be one of RUNS, such as {RUNS[0]!r}: got {run!r}")
    method, seed, r, layers, clutter = run.split("|")
    return token_run(method, int(seed), r=int(r), layers=int(layers), clutter=float(clutter))


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=efficiency/sre_merge`` computes."""


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_tome_step(fn: Callable) -> None:
    """Exercise 1: ``fn(keys, r)`` gives the sources and targets of one step of ToMe.

    keys (n, d) is a NumPy array of patch keys; the answer is two lists of r patch numbers.

    Raises:
        AssertionError: with the first pair that differs.
    """
    rng = np.random.default_rng(0)
    for case in range(20):
        n, d = int(rng.integers(2, 40)), int(rng.integers(2, 9))
        r = int(rng.integers(1, n // 2 + 1))
        keys = rng.normal(size=(n, d))
        with_class = torch.from_numpy(np.concatenate([np.zeros((1, d)), keys]))[None]
        plan = bipartite_soft_matching(with_class, r)
        wanted = dict(zip((plan.src[0] - 1).tolist(), (plan.dst[0] - 1).tolist(), strict=True))
        src, dst = (np.asarray(v).ravel().tolist() for v in fn(keys.copy(), r))
        assert len(src) == len(dst) == r, (
            f"case {case}: {r} pairs are wanted: got {len(src)} sources and {len(dst)} targets"
        )
        got = dict(zip(src, dst, strict=True))
        odd = sorted(i for i in got if i % 2)
        assert not odd, f"case {case}: sources have even numbers: got {odd[0]}"
        assert set(got) == set(wanted), (
            f"case {case}: the {r} sources whose best cosine is largest are {sorted(wanted)}: got "
            f"{sorted(got)}"
        )
        for i, j in wanted.items():
            assert got[i] == j, f"case {case}: source {i} is most similar to {j}: got {got[i]}"


def check_local_entropy(fn: Callable) -> None:
    """Exercise 2: ``fn(attn, pos, sigma)`` is the local entropy (n,) of each row.

    NumPy arrays: attn (n, n) positive with rows that sum to 1, pos (n, 2). With a window of a
    million patches it must be the entropy over ln n; uniform attention must give 1 at every place.

    Raises:
        AssertionError: with the case that fails.
    """
    rng = np.random.default_rng(1)
    for case in range(8):
        h, w = (int(v) for v in rng.integers(2, 7, size=2))
        n = h * w
        pos = np.stack(np.meshgrid(np.arange(h), np.arange(w), indexing="ij"), -1).reshape(n, 2)
        attn = rng.dirichlet(np.full(n, 0.3), size=n) + 1e-4
        attn /= attn.sum(axis=1, keepdims=True)
        got = np.asarray(fn(attn.copy(), pos.astype(float), 1e6))
        assert got.shape == (n,), f"case {case}: one number a row, ({n},): got {got.shape}"
        wanted = -(attn * np.log(attn)).sum(axis=1) / np.log(n)
        gap = np.abs(got - wanted).max()
        assert gap < 1e-5, (
            f"case {case}: with an endless window it is the entropy over ln n: off by {gap:.2g}"
        )
        flat = np.asarray(fn(np.full((n, n), 1 / n), pos.astype(float), 1.0))
        gap = np.abs(flat - 1).max()
        assert gap < 1e-5, (
            f"case {case}: uniform attention must give 1 everywhere, corners included: off by "
            f"{gap:.2g}; divide by the entropy of the window itself"
        )
        mixed = torch.from_numpy(np.pad(attn, ((1, 0), (1, 0))))[None, None]
        wanted = local_entropy(mixed, torch.from_numpy(pos.astype(float))[None], sigma=1.0)[0]
        gap = np.abs(np.asarray(fn(attn.copy(), pos.astype(float), 1.0)) - wanted.numpy()).max()
        assert gap < 1e-5, (
            f"case {case}: with a window of one patch it is off by {gap:.2g}; is it clipped at 1?"
        )


def check_norm_loss(fn: Callable) -> None:
    """Exercise 3: ``fn(lengths, cosines, w)`` is ‖mean‖ over mean length of vectors.

    NumPy arrays: lengths (k,), cosines (k, k) between the vectors, weights w (k,); no vectors.

    Raises:
        AssertionError: with the set that fails.
    """
    rng = np.random.default_rng(2)
    for case in range(20):
        k, d = int(rng.integers(2, 9)), int(rng.integers(2, 12))
        X, w = rng.normal(size=(k, d)) + (case % 3), rng.uniform(0.1, 3, k)
        if case % 4 == 0:  # parallel vectors lose nothing
            X = rng.uniform(0.5, 2, (k, 1)) * X[:1]
        lengths = np.linalg.norm(X, axis=1)
        cosines = X @ X.T / np.outer(lengths, lengths)
        got = float(fn(lengths.copy(), cosines.copy(), w.copy()))
        wanted = np.linalg.norm((w[:, None] * X).sum(axis=0)) / (w * lengths).sum()
        kind = "parallel" if case % 4 == 0 else "random"
        assert abs(got - wanted) < 1e-7, (
            f"case {case}, {kind} vectors: the ratio is {wanted:.6f}: got {got:.6f}"
        )


def check_solve_r(fn: Callable) -> None:
    """Exercise 4: ``fn(n, d, L, target)`` is the smallest r that saves the target.

    Raises:
        AssertionError: with the case that fails.
    """
    for n, d, L, target, wanted in ((129, 768, 12, 0.24, 5), (211, 768, 12, 0.24, 9)):
        got = int(fn(n, d, L, target))
        share = 1 - vit_flops(n, d, L, got) / vit_flops(n, d, L, 0)
        assert got == wanted, (
            f"ViT-B with {n} tokens: r = {wanted} is the smallest that saves 24 %: got {got}, "
            f"which saves {share:.1%}"
        )
    for n, d, L, target in ((197, 384, 12, 0.4), (65, 64, 4, 0.5), (129, 192, 12, 0.0)):
        wanted, got = solve_r(n, d, L, target), int(fn(n, d, L, target))
        assert got == wanted, f"n={n}, d={d}, L={L}, target {target}: r = {wanted}: got {got}"


def check_clutter(fn: Callable) -> None:
    """Exercise 5: ``fn(x, attn, sizes, pos)`` is a mass (B, n) that clutter does not fool.

    x (B, 1+n, d), attn (B, H, 1+n, 1+n), sizes (B, 1+n) and pos (B, n, 2) are tensors. With r = 34,
    on four seeds that the chapter does not use, recovery in clutter must rise by 0.05 on average,
    and without clutter it must stay at 0.955 or above.

    Raises:
        AssertionError: with both numbers.
    """
    seeds = (900, 901, 902, 903)

    def mean(clutter: float, mass: Callable | None) -> float:
        runs = (token_run("sre", s, clutter=clutter, retrieval=False, mass=mass) for s in seeds)
        return float(np.mean([run["recovery"] for run in runs]))

    before, after, clean = mean(1.0, None), mean(1.0, fn), mean(0.0, fn)
    assert after >= before + 0.05, (
        f"in clutter the recovery must rise from {before:.3f} by 0.05: got {after:.3f}"
    )
    assert clean >= 0.955, f"without clutter it must stay at 0.955: got {clean:.3f}"
