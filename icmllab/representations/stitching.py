r"""Grounding Functional Similarity by Invariance-Aware Model Stitching (arXiv 2505.20142).

A stitch T carries the features of a frozen sender A into a frozen receiver B. If B's head then
solves the task, A and B are *forward compatible*, and stitching calls them similar. That is too
generous: T only has to carry class clusters onto class clusters. What A ignores and what B
ignores, their invariances, are never looked at. So we also go *backward*: find an input that B
regards as the stitched features, and ask whether A still recognises it.

Task stitching, output and stitch-level matching and functional latent alignment follow their
published definitions. The precise form of backward compatibility (inversion through the
receiver), the linear theorem, the score, the objective with a latent term, the data and all
numbers are this book's reconstruction from the paper's abstract.

Notation: A = h_A∘g_A, B = h_B∘g_B, z_A = g_A(x), z_B = g_B(x), T(z) = a(Wz + b) with a the
projection onto the range of the receiver's activation (ReLU).
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from icmllab.toolbox.digits import ColouredDigits, coloured_digits, other_digits, recoloured
from icmllab.toolbox.hooks import Split, SplitModel, evaluating, split_at
from icmllab.toolbox.similarity import cka_linear

__all__ = [
    "CORE",
    "MODELS",
    "OBJECTIVES",
    "SHIPPED",
    "AffineStitch",
    "BackwardResult",
    "ColouredDigits",
    "ForwardResult",
    "InversionResult",
    "Journey",
    "Labelled",
    "LinearCompatibility",
    "Report",
    "SimilarityMatrix",
    "SmallNet",
    "Split",
    "SplitModel",
    "StitchData",
    "StitchedModel",
    "backward_compatibility",
    "check_cue_finder",
    "check_invert",
    "check_linear_defects",
    "check_mixed_cues",
    "check_slm",
    "clustered_noise",
    "coloured_digits",
    "cue_models",
    "cue_rows",
    "cue_world",
    "fit_stitch",
    "forward_compatibility",
    "harmonic_similarity",
    "identity_stitch",
    "invariance_aware_similarity",
    "invert",
    "journeys",
    "linear_compatibility",
    "linear_draw",
    "metamers",
    "nearest_inversion",
    "other_digits",
    "pair_run",
    "pair_study",
    "recoloured",
    "shared_invariance",
    "similarity_matrix",
    "split_at",
    "study_run",
    "target_variance",
    "total_variation",
    "train_classifier",
    "train_cue_model",
]

OBJECTIVES = ("task", "output", "slm", "fula", "invariance")
"""Ways to fit a stitch, see `fit_stitch`."""

REACH = 0.05
"""A mean residual above this means: the targets lie off the receiver's image."""

ROOM = 0.05
"""BC₀ - c below this leaves no room to tell recognition from chance."""

DEAD = 1e-8
"""A unit with a smaller variance over the targets is dead."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------------------------
# Stitches


class AffineStitch(nn.Module):
    """T(z) = a(Wz + b); on feature maps the same at each place, a 1×1 convolution.

    Args:
        k_in: features (channels) of the sender.
        k_out: features (channels) of the receiver.
        activation: a, applied last; None for none. The receiver's own ReLU keeps the result in
            the range of its layer.

    Raises:
        ValueError: a width below 1.
    """

    def __init__(
        self,
        k_in: int,
        k_out: int,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        super().__init__()
        for name, value in (("k_in", k_in), ("k_out", k_out)):
            if isinstance(value, bool) or value != int(value) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1: got {value}")
        self.linear = nn.Linear(k_in, k_out)
        self.activation = activation

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """(n, k_in) → (n, k_out), or (n, k_in, height, width) → (n, k_out, height, width)."""
        channels = z.shape[1] if z.ndim in (2, 4) else None
        if channels != self.linear.in_features:
            raise ValueError(
                f"z must be (n, {self.linear.in_features}) or (n, {self.linear.in_features}, "
                f"height, width): got {tuple(z.shape)}"
            )
        mapped = self.linear(z.movedim(1, -1)).movedim(-1, 1)
        return mapped if self.activation is None else self.activation(mapped)


def _new_stitch(z_a: torch.Tensor, z_b: torch.Tensor, B: SplitModel) -> AffineStitch:
    """A stitch of the right widths; the global generator, from which layers draw, is left alone."""
    with torch.random.fork_rng(devices=[]):
        return AffineStitch(z_a.shape[1], z_b.shape[1], B.into_range).to(z_b)


def identity_stitch(model: SplitModel, x: torch.Tensor) -> AffineStitch:
    """T = I for a model stitched to itself; exact, since the range is left as it is.

    Args:
        model: sender and receiver in one.
        x: (n, ...) inputs, from which the width is read.
    """
    with torch.no_grad(), evaluating(model):
        z = model.front(x[:1])
    stitch = _new_stitch(z, z, model)
    with torch.no_grad():
        stitch.linear.weight.copy_(torch.eye(z.shape[1]))
        stitch.linear.bias.zero_()
    return stitch.requires_grad_(False)


class StitchedModel(nn.Module):
    """h_B∘T∘g_A: the sender's front, a stitch, the receiver's head."""

    def __init__(self, sender_front: nn.Module, receiver_head: nn.Module, stitch: nn.Module):
        super().__init__()
        self.sender_front, self.receiver_head = sender_front, receiver_head
        self.stitch = stitch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.receiver_head(self.stitch(self.sender_front(x)))


Sender = SplitModel | torch.Tensor
"""A network, or its features alone (n, k), row by row those of the inputs beside it."""


def _check_rows(x: torch.Tensor, name: str = "x") -> None:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.ndim < 2:
        raise ValueError(f"{name} must be a floating tensor (n, ...): got {x!r:.60}")
    if not len(x):
        raise ValueError(f"{name} must hold at least one row: got an empty batch")


def _check_labels(y: torch.Tensor, n: int, n_classes: int) -> None:
    if not isinstance(y, torch.Tensor) or y.is_floating_point() or y.shape != (n,):
        raise ValueError(f"y must be ({n},) whole numbers: got {y!r:.60}")
    if not 0 <= int(y.min()) <= int(y.max()) < n_classes:
        raise ValueError(
            f"y must lie in 0..{n_classes - 1}, the receiver's classes: got "
            f"{int(y.min())}..{int(y.max())}"
        )


def _features(A: Sender, x: torch.Tensor) -> torch.Tensor:
    """z_A of the rows of x."""
    if isinstance(A, SplitModel):
        with torch.no_grad(), evaluating(A):
            return A.front(x)
    if len(A) != len(x):
        raise ValueError(f"A must hold one row of features an input: got {len(A)} and {len(x)}")
    return A


def _rows(z: torch.Tensor) -> torch.Tensor:
    """(n, k) as it is, (n, k, h, w) as (n·h·w, k)."""
    return z if z.ndim == 2 else z.movedim(1, -1).reshape(-1, z.shape[1])


def _total_variance(z: torch.Tensor) -> torch.Tensor:
    """tr Var of a batch, over its rows; dead units count for nothing."""
    variance = z.flatten(1).var(dim=0, correction=0)
    return torch.where(variance < DEAD, 0.0, variance).sum()


@torch.no_grad()
def _fit_slm(stitch: AffineStitch, z_a: torch.Tensor, z_b: torch.Tensor, rho: float) -> None:
    """W, b = argmin Σ‖W z_A + b − z_B‖² + ρ‖W‖², from the normal equations in float64."""
    if z_a.ndim != z_b.ndim or z_a.shape[2:] != z_b.shape[2:]:
        raise ValueError(
            "A and B must put out maps of the same size to be matched place by place: got "
            f"{tuple(z_a.shape)} and {tuple(z_b.shape)}"
        )
    X, Y = _rows(z_a).double(), _rows(z_b).double()
    mean_x, mean_y = X.mean(dim=0), Y.mean(dim=0)
    X, Y = X - mean_x, Y - mean_y
    # a dead sender unit is a zero row and column here: ρ keeps the matrix invertible
    gram = X.T @ X + rho * torch.eye(X.shape[1], dtype=torch.float64, device=X.device)
    W = torch.linalg.solve(gram, X.T @ Y).T
    stitch.linear.weight.copy_(W)
    stitch.linear.bias.copy_(mean_y - W @ mean_x)


def _stitch_loss(
    objective: str, B: SplitModel, layers: list[torch.Tensor], y: torch.Tensor, beta: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(stitched features, rows) → loss. ``layers``: what B itself says, from the stitch on."""
    if objective == "task":
        return lambda t, rows: F.cross_entropy(B.head(t), y[rows])
    if objective == "output":
        log_p = layers[-1].log_softmax(dim=1)
        return lambda t, rows: F.kl_div(
            B.head(t).log_softmax(dim=1), log_p[rows], log_target=True, reduction="batchmean"
        )
    if objective == "invariance":
        scale = _positive("z_B", _total_variance(layers[0]))

        def both(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            latent = (t - layers[0][rows]).flatten(1).square().sum(dim=1).mean() / scale
            return F.cross_entropy(B.head(t), y[rows]) + beta * latent

        return both
    scales = [_positive("a layer of B", _total_variance(z)) for z in layers]

    def fula(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        terms = [
            (mine - theirs[rows]).flatten(1).square().sum(dim=1).mean() / scale
            for mine, theirs, scale in zip(B.trace(t), layers, scales, strict=True)
        ]
        return torch.stack(terms).mean()

    return fula


def _positive(what: str, variance: torch.Tensor) -> torch.Tensor:
    if not float(variance) > 0:
        raise ValueError(
            f"x must give {what} some variance to be measured by: it is 0 (one row, equal rows, or "
            "all units dead)"
        )
    return variance


def fit_stitch(
    A: Sender,
    B: SplitModel,
    x: torch.Tensor,
    y: torch.Tensor,
    objective: str = "invariance",
    *,
    beta: float = 1.0,
    rho: float = 1e-2,
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int = 64,
    start: str | None = None,
    generator: torch.Generator | None = None,
) -> AffineStitch:
    """Fit W and b of a stitch from A to B; neither network changes.

    Objectives:

    - "task": E CE(h_B(T z_A), y), task loss matching.
    - "output": E KL(softmax B(x) ‖ softmax h_B(T z_A)).
    - "slm": min Σ‖W z_A + b − z_B‖² + ρ‖W‖², stitch-level matching, closed form in float64.
    - "fula": mean over B's layers l from the stitch on of E‖B_{s→l}(T z_A) − B_l(x)‖²/Var(B_l),
      functional latent alignment. The layers are those of ``B.layers`` and the stitched one.
    - "invariance": task loss + β E‖T z_A − z_B‖²/tr Var(z_B), started at the "slm" solution. The
      second term keeps T z_A where inputs can reach it; a random start leaves the directions
      in which z_A hardly varies as they were drawn.

    Networks run in evaluation mode and no gradient reaches their parameters.

    Args:
        A: sender; or its features (n, k_A) for the rows of ``x``.
        B: receiver.
        x: (n, ...) inputs.
        y: (n,) int64 labels.
        objective: one of :data:`OBJECTIVES`.
        beta: β >= 0, of "invariance" only.
        rho: ρ > 0, of "slm" and of the start there.
        epochs: passes; None takes 20 for "invariance" and 60 for the others.
        lr: of Adam; None takes 1e-3 for "invariance" and 3e-3 for the others.
        batch_size: rows a step, >= 1.
        start: "slm" or "random" (``nn.Linear``'s own); None takes "slm" for "invariance" and
            "random" for the others.
        generator: draws the random start and the batches; None is seeded with 0.

    Returns:
        The stitch, with the activation of B's layer, its parameters frozen.

    Raises:
        ValueError: an unknown objective or start, a number out of range, an empty batch, labels
            that B has not, features that do not fit the rows, a receiver without variance.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {OBJECTIVES}: got {objective!r}")
    start = start or ("slm" if objective == "invariance" else "random")
    if start not in ("slm", "random"):
        raise ValueError(f"start must be 'slm' or 'random': got {start!r}")
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta must be finite and >= 0: got {beta}")
    if not 0 < rho < math.inf:
        raise ValueError(f"rho must be finite and > 0: got {rho}")
    epochs = epochs if epochs is not None else (20 if objective == "invariance" else 60)
    lr = lr if lr is not None else (1e-3 if objective == "invariance" else 3e-3)
    if epochs < 0 or batch_size < 1 or not 0 < lr < math.inf:
        raise ValueError(
            "epochs must be >= 0, batch_size >= 1 and lr finite and > 0: got "
            f"{epochs}, {batch_size} and {lr}"
        )
    _check_rows(x)
    z_a = _features(A, x)
    with torch.no_grad(), evaluating(B):
        layers = B.trace(B.front(x))
    _check_labels(y, len(x), layers[-1].shape[1])
    generator = generator or _generator(0)
    stitch = _new_stitch(z_a, layers[0], B)
    if objective == "slm" or start == "slm":
        _fit_slm(stitch, z_a, layers[0], rho)
    else:
        bound = 1 / math.sqrt(z_a.shape[1])  # as nn.Linear draws, but from our generator
        with torch.no_grad():
            for p in stitch.parameters():
                p.copy_((2 * torch.rand(p.shape, generator=generator) - 1) * bound)
    if objective != "slm":
        loss = _stitch_loss(objective, B, layers, y, beta)
        with torch.enable_grad(), evaluating(B):
            _descend(stitch, z_a, loss, epochs, lr, batch_size, generator)
    return stitch.requires_grad_(False)


def _descend(
    stitch: AffineStitch,
    z_a: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    epochs: int,
    lr: float,
    batch_size: int,
    generator: torch.Generator,
) -> None:
    """Adam on W and b alone."""
    parameters = list(stitch.parameters())
    optimizer = torch.optim.Adam(parameters, lr=lr)
    for _ in range(epochs):
        for rows in torch.randperm(len(z_a), generator=generator).split(batch_size):
            value = loss(stitch(z_a[rows]), rows)
            # not backward(): that would also fill .grad of the receiver's parameters
            for p, g in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
                p.grad = g
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# --------------------------------------------------------------------------------------------
# Inversion


class InversionResult(NamedTuple):
    """Inputs that a front regards as the targets.

    Attributes:
        x: (n, ...), within the bounds.
        residual: (n,) float64, ‖g(x) − t‖²/tr Var(t) at the end.
        trace: (steps + 1,) float64, the mean residual at the start and after each step.
        path: (len(keep), n, ...) inputs after the steps in ``keep``.
    """

    x: torch.Tensor
    residual: torch.Tensor
    trace: torch.Tensor
    path: torch.Tensor


def target_variance(target: torch.Tensor) -> float:
    """tr Var of a whole set of targets (n, ...), the unit of residuals; units below 1e-8 left out.

    Raises:
        ValueError: it is 0: one row, equal rows, or all units dead.
    """
    _check_rows(target, "target")
    total = float(_total_variance(target))
    if not total > 0:
        raise ValueError(
            "target must have some variance over its rows to measure residuals by: it is 0 (one "
            "row, equal rows, or all units dead)"
        )
    return total


def invert(
    front: nn.Module,
    target: torch.Tensor,
    x0: torch.Tensor,
    *,
    steps: int = 200,
    lr: float = 0.05,
    bounds: tuple[float, float] = (0.0, 1.0),
    variance: float | None = None,
    prior: Callable[[torch.Tensor], torch.Tensor] | None = None,
    keep: Sequence[int] = (),
) -> InversionResult:
    """x̃ = argmin over the box of ‖g(x') − t‖²/tr Var(t), by Adam from x₀, clamped each step.

    Rows do not see one another: with a given ``variance`` a batch gives what its parts give.

    Args:
        front: g, inputs → features; left as it is, run in evaluation mode.
        target: (n, k) features.
        x0: (n, ...) where to start, clamped to the bounds first.
        steps: of Adam, >= 0; with 0 the start comes back.
        lr: step size of Adam, > 0.
        bounds: (lo, hi) of each input value.
        variance: the unit of the residual; None takes ``target_variance(target)``. Give that of
            the whole target set when inverting a part of it.
        prior: (n, ...) → (n,), added to the residual that is minimised and not to the one that is
            reported; for instance a small multiple of :func:`total_variation`.
        keep: steps, rising, after which the inputs are kept.

    Raises:
        ValueError: targets that do not fit what the front puts out, another number of rows,
            bounds with lo >= hi, steps or lr out of range, targets without variance.
    """
    _check_rows(x0, "x0")
    _check_rows(target, "target")
    lo, hi = bounds
    if not lo < hi:
        raise ValueError(f"bounds must be (lo, hi) with lo < hi: got {bounds}")
    if isinstance(steps, bool) or steps != int(steps) or steps < 0 or not 0 < lr < math.inf:
        raise ValueError(
            f"steps must be a whole number >= 0 and lr finite and > 0: got {steps}, {lr}"
        )
    if any(not 0 <= k <= steps for k in keep):
        raise ValueError(f"keep must hold steps between 0 and {steps}: got {list(keep)}")
    variance = target_variance(target) if variance is None else float(variance)
    if not 0 < variance < math.inf:
        raise ValueError(f"variance must be finite and > 0: got {variance}")
    x = x0.detach().clone().clamp_(lo, hi).requires_grad_(True)
    optimizer = torch.optim.Adam([x], lr=lr)
    trace, kept = [], {}
    with torch.enable_grad(), evaluating(front):
        for step in range(steps + 1):
            z = front(x)
            if z.shape != target.shape:
                raise ValueError(
                    f"target must be {tuple(z.shape)}, what front puts out for x0: got "
                    f"{tuple(target.shape)}"
                )
            residual = (z - target).flatten(1).square().sum(dim=1) / variance
            trace.append(float(residual.detach().mean()))
            if step in keep:
                kept[step] = x.detach().clone()
            if step == steps:
                break
            loss = residual if prior is None else residual + prior(x)
            (x.grad,) = torch.autograd.grad(loss.sum(), x)
            optimizer.step()
            with torch.no_grad():
                x.clamp_(lo, hi)
    path = torch.stack([kept[k] for k in keep]) if len(keep) else x.new_empty(0, *x.shape)
    return InversionResult(
        x.detach(),
        residual.detach().double(),
        torch.tensor(trace, dtype=torch.float64),
        path,
    )


def total_variation(x: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of neighbouring pixels: (n, channels, height, width) → (n,).

    A prior for inversions of large images, whose fine grain many features ignore.
    """
    if x.ndim != 4 or min(x.shape[2:]) < 2:
        raise ValueError(
            f"x must be images (n, channels, height, width) of 2 pixels or more a side: got "
            f"{tuple(x.shape)}"
        )
    down, right = (x.diff(dim=d).abs().flatten(1).mean(dim=1) for d in (2, 3))
    return down + right


def metamers(
    B: SplitModel,
    x: torch.Tensor,
    x0: torch.Tensor,
    *,
    steps: int = 200,
    lr: float = 0.05,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> InversionResult:
    """Inputs that B cannot tell from x: the inversion of g_B at g_B(x), from x₀.

    Args:
        B: the network.
        x: (n, ...) inputs.
        x0: (n, ...) starts, none of them equal to its x.
        steps: as in :func:`invert`, and so are ``lr`` and ``bounds``.

    Raises:
        ValueError: as :func:`invert`, or a start that is its own x.
    """
    _check_starts(x, x0)
    return invert(B.front, _features(B, x), x0, steps=steps, lr=lr, bounds=bounds)


def _check_starts(x: torch.Tensor, x0: torch.Tensor) -> None:
    _check_rows(x)
    _check_rows(x0, "x0")
    if x.shape != x0.shape:
        raise ValueError(f"x0 must have the shape of x, {tuple(x.shape)}: got {tuple(x0.shape)}")
    same = int((x == x0).flatten(1).all(dim=1).sum())
    if same:
        raise ValueError(
            f"x0 must differ from x in every row: {same} of {len(x)} are identical. An inversion "
            "that starts at x ends there, and then every sender recognises it: start from another "
            "input with another nuisance"
        )


# --------------------------------------------------------------------------------------------
# Forward and backward compatibility


class ForwardResult(NamedTuple):
    """How well the receiver's head takes the sender's features.

    Attributes:
        accuracy: of the stitched model h_B∘T∘g_A.
        receiver: accuracy of B itself on the same rows.
        fc: accuracy / receiver; nan when B has none.
    """

    accuracy: float
    receiver: float
    fc: float


def forward_compatibility(
    A: Sender, B: SplitModel, T: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> ForwardResult:
    """FC(A→B) = acc(h_B∘T∘g_A)/acc(B) on held-out rows.

    Args:
        A: sender; or its features (n, k_A).
        B: receiver.
        T: a stitch from A to B.
        x: (n, ...) inputs.
        y: (n,) int64 labels.
    """
    _check_rows(x)
    z_a = _features(A, x)
    with torch.no_grad(), evaluating(B, T):
        stitched, own = B.head(T(z_a)), B(x)
    _check_labels(y, len(x), own.shape[1])
    accuracy, receiver = (
        float((logits.argmax(dim=1) == y).double().mean()) for logits in (stitched, own)
    )
    return ForwardResult(accuracy, receiver, accuracy / receiver if receiver else math.nan)


class BackwardResult(NamedTuple):
    """Whether the sender recognises what the receiver regards as its stitched features.

    Attributes:
        bc: Pr[A(x̃) = A(x)], by the class that A's whole network gives.
        reach: mean residual of the inversion; above 0.05 the target is off the receiver's image.
        self_check: Pr[B(x̃) = h_B(t)], whether the receiver itself is satisfied.
        chance: Σ_k p_k q_k with the frequencies of A's classes on x and on x̃.
        start: Pr[A(x₀) = A(x)], what the inversion began with.
        inversion: the inputs x̃ and how they were reached.
    """

    bc: float
    reach: float
    self_check: float
    chance: float
    start: float
    inversion: InversionResult

    @property
    def off_image(self) -> bool:
        """Whether the targets lie off the receiver's image, so that ``bc`` is depressed."""
        return not self.reach <= REACH


def _classes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), evaluating(model):
        return model(x).argmax(dim=1)


def _agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).double().mean())


def _chance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Agreement of two sequences of classes if they were independent."""
    n_classes = int(max(a.max(), b.max())) + 1
    p, q = (torch.bincount(c, minlength=n_classes).double() / len(c) for c in (a, b))
    return float(p @ q)


def backward_compatibility(
    A: SplitModel,
    B: SplitModel,
    T: nn.Module,
    x: torch.Tensor,
    x0: torch.Tensor,
    *,
    steps: int = 200,
    lr: float = 0.05,
    bounds: tuple[float, float] = (0.0, 1.0),
    keep: Sequence[int] = (),
) -> BackwardResult:
    """BC(A→B): invert the receiver at T(g_A(x)), starting at x₀, and ask A about the result.

    Args:
        A: sender, a whole network.
        B: receiver.
        T: a stitch from A to B, its activation included.
        x: (n, ...) inputs.
        x0: (n, ...) other inputs, with another class and another nuisance by chance.
        steps: as in :func:`invert`, and so are ``lr``, ``bounds`` and ``keep``.

    Raises:
        ValueError: as :func:`invert`; a start that is its own x; a sender without a network.
    """
    if not isinstance(A, SplitModel):
        raise ValueError(
            f"A must be a SplitModel, which can be asked about new inputs: got {type(A).__name__}"
        )
    _check_starts(x, x0)
    with torch.no_grad(), evaluating(A, T):
        target = T(A.front(x))
    found = invert(B.front, target, x0, steps=steps, lr=lr, bounds=bounds, keep=keep)
    said, again, before = (_classes(A, v) for v in (x, found.x, x0))
    with torch.no_grad(), evaluating(B):
        wanted = B.head(target).argmax(dim=1)
    return BackwardResult(
        bc=_agreement(again, said),
        reach=float(found.residual.mean()),
        self_check=_agreement(_classes(B, found.x), wanted),
        chance=_chance(said, again),
        start=_agreement(before, said),
        inversion=found,
    )


def shared_invariance(
    A: SplitModel,
    B: SplitModel,
    x: torch.Tensor,
    x0: torch.Tensor,
    *,
    steps: int = 200,
    lr: float = 0.05,
    bounds: tuple[float, float] = (0.0, 1.0),
    found: InversionResult | None = None,
) -> float:
    """SI(A|B) = Pr[A(x̃) = A(x)] for B's metamers x̃ of x: no stitch needed.

    SI(B|B) is the ceiling BC₀ of every backward compatibility with receiver B.

    Args:
        A: asked about the metamers.
        B: whose metamers they are.
        x: (n, ...) inputs.
        x0: (n, ...) starts.
        steps: as in :func:`invert`, and so are ``lr`` and ``bounds``.
        found: what :func:`metamers` gave for B, x and x0, to save the inversion.
    """
    if found is None:
        found = metamers(B, x, x0, steps=steps, lr=lr, bounds=bounds)
    elif found.x.shape != x.shape:
        raise ValueError(
            f"found must hold a metamer for each row of x, {tuple(x.shape)}: got "
            f"{tuple(found.x.shape)}"
        )
    return _agreement(_classes(A, found.x), _classes(A, x))


@dataclass(frozen=True)
class Report:
    """Forward and backward compatibility of one ordered pair, and what is needed to read them.

    Attributes:
        accuracy: of the stitched model.
        receiver: accuracy of B.
        fc: accuracy / receiver.
        bc: Pr[A(x̃) = A(x)]; nan for a sender without a network.
        fc_norm: FĈ = (accuracy − 1/C)/(receiver − 1/C), clipped to [0, 1]; nan for a receiver at
            or below 1/C.
        bc_norm: BĈ = (bc − chance)/(ceiling − chance), clipped; nan where that leaves no room.
        ias: harmonic mean of both.
        reach: mean residual of the inversion.
        self_check: Pr[B(x̃) = h_B(t)].
        chance: c.
        start: Pr[A(x₀) = A(x)].
        ceiling: BC₀ = SI(B|B) from the same starts.
        shared_invariance: SI(A|B), the control without a stitch.
        off_image: whether ``reach`` exceeds 0.05, so that ``bc`` is depressed.
    """

    accuracy: float
    receiver: float
    fc: float
    bc: float
    fc_norm: float
    bc_norm: float
    ias: float
    reach: float
    self_check: float
    chance: float
    start: float
    ceiling: float
    shared_invariance: float
    off_image: bool


def harmonic_similarity(fc_norm: float, bc_norm: float) -> float:
    """IAS: the harmonic mean of two numbers in [0, 1]; 0 when either is 0, nan when either is.

    >>> harmonic_similarity(1.0, 0.5)
    0.6666666666666666
    """
    if math.isnan(fc_norm) or math.isnan(bc_norm):
        return math.nan
    for name, value in (("fc_norm", fc_norm), ("bc_norm", bc_norm)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie in [0, 1]: got {value}")
    if min(fc_norm, bc_norm) == 0:
        return 0.0
    return 2 * fc_norm * bc_norm / (fc_norm + bc_norm)


def _clip(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def invariance_aware_similarity(
    A: Sender,
    B: SplitModel,
    T: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    x0: torch.Tensor,
    *,
    steps: int = 200,
    lr: float = 0.05,
    bounds: tuple[float, float] = (0.0, 1.0),
    found: InversionResult | None = None,
) -> Report:
    """IAS(A→B): the harmonic mean of normalised forward and backward compatibility.

    Args:
        A: sender; for features alone (n, k_A) everything backward is nan.
        B: receiver.
        T: a stitch from A to B.
        x: (n, ...) held-out inputs.
        y: (n,) int64 labels.
        x0: (n, ...) starts of the inversions.
        steps: as in :func:`invert`, and so are ``lr`` and ``bounds``.
        found: what :func:`metamers` gave for B, x and x0 with the same options; None computes it.

    Warns:
        UserWarning: a receiver at or below chance, or a ceiling within 0.05 of chance; the score
            is then nan.
    """
    forward = forward_compatibility(A, B, T, x, y)
    with torch.no_grad(), evaluating(B):
        floor = 1 / B(x[:1]).shape[1]
    fc_norm = math.nan
    if forward.receiver > floor:
        fc_norm = _clip((forward.accuracy - floor) / (forward.receiver - floor))
    else:
        warnings.warn(
            f"the receiver's accuracy {forward.receiver:.3f} is not above 1/C = {floor:.3f}: "
            "forward compatibility has no scale, IAS is nan",
            stacklevel=2,
        )
    if found is None:
        found = metamers(B, x, x0, steps=steps, lr=lr, bounds=bounds)
    ceiling = shared_invariance(B, B, x, x0, found=found)
    if not isinstance(A, SplitModel):
        return Report(
            accuracy=forward.accuracy,
            receiver=forward.receiver,
            fc=forward.fc,
            bc=math.nan,
            fc_norm=fc_norm,
            bc_norm=math.nan,
            ias=math.nan,
            reach=math.nan,
            self_check=math.nan,
            chance=math.nan,
            start=math.nan,
            ceiling=ceiling,
            shared_invariance=math.nan,
            off_image=False,
        )
    backward = backward_compatibility(A, B, T, x, x0, steps=steps, lr=lr, bounds=bounds)
    bc_norm = math.nan
    if ceiling - backward.chance >= ROOM:
        bc_norm = _clip((backward.bc - backward.chance) / (ceiling - backward.chance))
    else:
        warnings.warn(
            f"the ceiling {ceiling:.3f} is within {ROOM} of chance {backward.chance:.3f}: "
            "backward compatibility has no scale, IAS is nan",
            stacklevel=2,
        )
    return Report(
        accuracy=forward.accuracy,
        receiver=forward.receiver,
        fc=forward.fc,
        bc=backward.bc,
        fc_norm=fc_norm,
        bc_norm=bc_norm,
        ias=harmonic_similarity(fc_norm, bc_norm),
        reach=backward.reach,
        self_check=backward.self_check,
        chance=backward.chance,
        start=backward.start,
        ceiling=ceiling,
        shared_invariance=shared_invariance(A, B, x, x0, found=found),
        off_image=backward.off_image,
    )


class StitchData(NamedTuple):
    """Rows to fit stitches on, rows to test on, and where inversions of the latter start."""

    x_stitch: torch.Tensor
    y_stitch: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    x0: torch.Tensor


class SimilarityMatrix(NamedTuple):
    """Every ordered pair of models; entry (i, j) has sender i and receiver j.

    Attributes:
        names: of the models, in order.
        reports: (sender, receiver) → :class:`Report`.
    """

    names: tuple[str, ...]
    reports: dict[tuple[str, str], Report]

    def table(self, field: str) -> np.ndarray:
        """One number of the reports as an (m, m) float64 array, senders down, receivers across."""
        if field not in Report.__dataclass_fields__:
            raise ValueError(
                f"field must be one of {', '.join(Report.__dataclass_fields__)}: got {field!r}"
            )
        rows = [[float(getattr(self.reports[a, b], field)) for b in self.names] for a in self.names]
        return np.array(rows)

    def symmetric(self) -> np.ndarray:
        """IAS without a direction: the mean of both, (m, m) float64."""
        ias = self.table("ias")
        return (ias + ias.T) / 2


def similarity_matrix(
    models: Mapping[str, SplitModel],
    data: StitchData,
    objective: str = "invariance",
    *,
    steps: int = 200,
    generator: torch.Generator | None = None,
) -> SimilarityMatrix:
    """Stitch every model to every other and to itself (T = I), and report both directions.

    Args:
        models: name → network; at least one.
        data: rows to fit on and to test on.
        objective: of the stitches, see :func:`fit_stitch`.
        steps: of each inversion.
        generator: draws starts and batches; None is seeded with 0.

    Raises:
        ValueError: no models, or what the parts raise.
    """
    if not models:
        raise ValueError("models must name at least one network: got none")
    generator = generator or _generator(0)
    reports = {}
    for b, B in models.items():
        found = metamers(B, data.x_test, data.x0, steps=steps)
        for a, A in models.items():
            if a == b:
                T = identity_stitch(A, data.x_test)
            else:
                T = fit_stitch(A, B, data.x_stitch, data.y_stitch, objective, generator=generator)
            reports[a, b] = invariance_aware_similarity(
                A, B, T, data.x_test, data.y_test, data.x0, steps=steps, found=found
            )
    return SimilarityMatrix(tuple(models), reports)


# --------------------------------------------------------------------------------------------
# The linear theorem


class LinearCompatibility(NamedTuple):
    """How far two linear networks are from being stitched forward and backward.

    Attributes:
        forward_defect: f = ‖G_B(I − G_A⁺G_A)‖²/‖G_B‖²: what B sees and A ignores. 0 exactly when
            an exact forward stitch exists.
        backward_defect: r = ‖G_A(I − G_B⁺G_B)‖²/‖G_A‖²: what A sees and B ignores. 0 exactly
            when A recognises every nearest inversion through B.
    """

    forward_defect: float
    backward_defect: float


def _as_linear(name: str, G: object) -> torch.Tensor:
    G = torch.as_tensor(np.asarray(G) if not isinstance(G, torch.Tensor) else G).detach().double()
    if G.ndim != 2 or not G.numel() or not bool(torch.isfinite(G).all()) or not bool(G.any()):
        raise ValueError(
            f"{name} must be a finite matrix (k, n_inputs) that is not zero: got shape "
            f"{tuple(G.shape)}"
        )
    return G


def linear_compatibility(G_A: object, G_B: object) -> LinearCompatibility:
    """Both defects of z_A = G_A x and z_B = G_B x, of any rank, in float64.

    (i) W with W G_A = G_B exists ⇔ null(G_A) ⊆ null(G_B) ⇔ f = 0. (ii) With the nearest inversion
    x̃ = x₀ + G_B⁺(G_B x − G_B x₀), G_A x̃ = G_A x for all x and x₀ ⇔ null(G_B) ⊆ null(G_A) ⇔ r = 0.
    Both hold exactly when the null spaces are equal: the same invariances.

    Args:
        G_A: (k_A, n_inputs) array or tensor, the sender.
        G_B: (k_B, n_inputs), the receiver.

    Raises:
        ValueError: no matrices over the same inputs, entries that are not finite, or a zero one.
    """
    G_A, G_B = _as_linear("G_A", G_A), _as_linear("G_B", G_B)
    if G_A.shape[1] != G_B.shape[1]:
        raise ValueError(
            f"G_A and G_B must read the same inputs: got {G_A.shape[1]} and {G_B.shape[1]} columns"
        )

    def unseen(seen: torch.Tensor, by: torch.Tensor) -> float:
        """The share of ``seen`` that lies in the null space of ``by``."""
        rest = seen - (seen @ torch.linalg.pinv(by)) @ by
        return float(rest.square().sum() / seen.square().sum())

    return LinearCompatibility(unseen(G_B, G_A), unseen(G_A, G_B))


def nearest_inversion(G_B: object, x: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
    """x̃ = x₀ + G_B⁺(G_B x − G_B x₀), the input nearest to x₀ that B cannot tell from x.

    Args:
        G_B: (k_B, n_inputs).
        x: (n, n_inputs) float64.
        x0: (n, n_inputs) float64.
    """
    G_B = _as_linear("G_B", G_B)
    return x0 + (x - x0) @ G_B.T @ torch.linalg.pinv(G_B).T


# --------------------------------------------------------------------------------------------
# Networks and data


class SmallNet(nn.Sequential):
    """Linear(192, w)-ReLU-Linear(w, w)-ReLU | Linear(w, w)-ReLU-Linear(w, 10).

    Args:
        width: w, >= 1.
        seed: initial weights, as ``nn.Linear`` draws them; the global generator stays as it is.

    All in float64, so that every machine trains the same network but for the last digits.
    """

    def __init__(self, width: int = 64, *, seed: int = 0):
        if isinstance(width, bool) or width != int(width) or width < 1:
            raise ValueError(f"width must be a whole number >= 1: got {width}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [nn.Linear(192, width), nn.ReLU()]
            for _ in range(2):
                layers += [nn.Linear(width, width), nn.ReLU()]
            layers.append(nn.Linear(width, 10))
        super().__init__(*layers)
        self.double()

    def split(self, layer: int = 2) -> SplitModel:
        """The network cut after hidden layer 1, 2 or 3; weights are shared.

        Every later hidden layer and the logits count as layers of the receiver.
        """
        if layer not in (1, 2, 3):
            raise ValueError(f"layer must be 1, 2 or 3: got {layer}")
        front, head = split_at(self, 2 * layer)
        hidden = range(1, len(head) - 1, 2)
        return SplitModel(front, head, (*hidden, len(head) - 1))


class Labelled(NamedTuple):
    """Rows and their labels: (n, ...) and (n,) int64."""

    x: torch.Tensor
    y: torch.Tensor


def cue_rows(
    mode: str, seed: int, *, split: int | None = None
) -> Callable[[torch.Generator], Labelled]:
    """The training rows of one pass, with the cue that is not the label drawn anew.

    A nuisance that stayed the same in every pass could be learned by heart; drawn anew, it has
    to be ignored. In mode "both" there is nothing to draw.

    Args:
        mode: "shape", "colour" or "both".
        seed: as in :func:`coloured_digits`, and so is ``split``.
    """
    data = coloured_digits(mode, seed, split=split)
    if mode == "both":
        return lambda generator: Labelled(data.x_train, data.y_train)

    def drawn(generator: torch.Generator) -> Labelled:
        colours = torch.randint(10, (len(data.x_train),), generator=generator)
        x = recoloured(data.x_train, colours)
        return Labelled(x, colours if mode == "colour" else data.y_train)

    return drawn


def train_classifier(
    net: nn.Module,
    rows: Callable[[torch.Generator], Labelled],
    epochs: int,
    *,
    lr: float = 2e-3,
    batch_size: int = 64,
    generator: torch.Generator,
) -> None:
    """Train in place by Adam on the cross-entropy; then evaluation mode, parameters frozen.

    Args:
        net: inputs → logits.
        rows: gives the rows of one pass, see :func:`cue_rows`.
        epochs: passes, >= 0.
        lr: step size.
        batch_size: rows a step.
        generator: draws what ``rows`` draws, and the batches.

    Raises:
        ValueError: epochs out of range, or a pass without rows.
    """
    if isinstance(epochs, bool) or epochs != int(epochs) or epochs < 0:
        raise ValueError(f"epochs must be a whole number >= 0: got {epochs}")
    net.train()
    # foreach changes how the update is carried out, not the update: fewer, larger calls
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, foreach=True)
    for _ in range(epochs):
        x, y = rows(generator)
        _check_rows(x)
        for batch in torch.randperm(len(x), generator=generator).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    optimizer.zero_grad()
    net.requires_grad_(False).eval()


EPOCHS = {"shape": 40, "colour": 20, "both": 40}
"""How long a network trains by default: the colour is learned fast."""


def train_cue_model(
    mode: str, seed: int = 0, epochs: int | None = None, *, split: int | None = None
) -> SmallNet:
    """A network of width 64 that reads one cue of the coloured digits.

    Args:
        mode: "shape", "colour" or "both", see :func:`cue_rows`.
        seed: initial weights, batches and colours.
        epochs: passes; None takes :data:`EPOCHS`; 0 leaves it untrained.
        split: of the digits; None takes ``seed``.

    Returns:
        The network, in evaluation mode, frozen.
    """
    rows = cue_rows(mode, seed, split=split)
    net = SmallNet(seed=seed)
    epochs = EPOCHS[mode] if epochs is None else epochs
    train_classifier(net, rows, epochs, generator=_generator(seed))
    return net


def clustered_noise(
    y: torch.Tensor,
    width: int = 64,
    generator: torch.Generator | None = None,
    *,
    means: torch.Tensor | None = None,
    spread: float = 0.3,
) -> torch.Tensor:
    """Features that hold the label and nothing else: a mean for each class, and noise around it.

    A sender without an input, after the critique of stitching by Smith et al. (2025).

    Args:
        y: (n,) int64 labels.
        width: features, >= 1.
        generator: draws means, then noise; None is seeded with 0.
        means: (n_classes, width), to draw more rows around the same means; None draws N(0, I).
        spread: standard deviation within a class, >= 0.

    Returns:
        (n, width) float64.
    """
    if not len(y) or y.is_floating_point() or int(y.min()) < 0:
        raise ValueError(f"y must hold whole numbers >= 0, at least one: got {y!r:.60}")
    if isinstance(width, bool) or width != int(width) or width < 1 or not 0 <= spread < math.inf:
        raise ValueError(
            f"width must be a whole number >= 1 and spread finite and >= 0: got {width}, {spread}"
        )
    generator = generator or _generator(0)
    if means is None:
        n_classes = int(y.max()) + 1
        means = torch.randn(n_classes, width, generator=generator, dtype=torch.float64)
    elif means.ndim != 2 or len(means) <= int(y.max()) or means.shape[1] != width:
        raise ValueError(
            f"means must be ({int(y.max()) + 1} or more, {width}): got {tuple(means.shape)}"
        )
    noise = torch.randn(len(y), width, generator=generator, dtype=torch.float64)
    return means[y] + spread * noise


MODELS = ("shape 1", "shape 2", "colour 1", "colour 2", "both")
"""The five networks of the study: a cue and a seed each."""


@cache
def cue_models(seed: int, short: bool = False) -> dict[str, SmallNet]:
    """The five trained networks of :data:`MODELS` and an untrained one, on one split of the digits.

    Kept for the rest of the process: do not change them.

    Args:
        seed: of the split; each network has a seed of its own derived from it.
        short: 25 epochs (colour and both: 12) in place of 40 (colour: 20).
    """
    nets = {}
    for i, name in enumerate(MODELS):
        mode = name.split()[0]
        epochs = (25 if mode == "shape" else 12) if short else None
        nets[name] = train_cue_model(mode, 100 * seed + i, epochs, split=seed)
    nets["untrained"] = train_cue_model("shape", 100 * seed + 5, 0, split=seed)
    return nets


@cache
def cue_world(seed: int, n_test: int = 397) -> StitchData:
    """Stitch and test rows of a split, cues agreeing, with a start for each inversion."""
    data = coloured_digits("both", seed, split=seed, n_test=n_test)
    x0 = other_digits(data.x_test, _generator(seed))
    return StitchData(*data[2:], x0)


# --------------------------------------------------------------------------------------------
# Experiments: one run each, from a seed to numbers


@cache
def _metamers(receiver: str, seed: int, short: bool, n_test: int, steps: int) -> InversionResult:
    B, data = cue_models(seed, short)[receiver].split(), cue_world(seed, n_test)
    return metamers(B, data.x_test, data.x0, steps=steps)


def pair_run(
    *,
    sender: str,
    receiver: str,
    seed: int,
    objective: str,
    beta: float = 1.0,
    start: str | None = None,
    layer: int = 2,
    short: bool = False,
    n_test: int = 397,
    steps: int = 200,
) -> Report:
    """Stitch one network of :func:`cue_models` to another and report both directions.

    Args:
        sender: a name in :data:`MODELS`, or "untrained".
        receiver: a name in :data:`MODELS`; the sender itself is stitched by T = I.
        seed: of the split, the networks, the starts and the stitch.
        objective: as in :func:`fit_stitch`, and so are ``beta`` and ``start``.
        layer: hidden layer of the sender that is stitched onto hidden layer 2 of the receiver.
        short: as in :func:`cue_models`.
        n_test: test rows.
        steps: of each inversion.
    """
    nets, data = cue_models(seed, short), cue_world(seed, n_test)
    A, B = nets[sender].split(layer), nets[receiver].split()
    if sender == receiver and layer == 2:
        T = identity_stitch(A, data.x_test)
    else:
        random = start == "random" and objective == "invariance"
        T = fit_stitch(
            A,
            B,
            data.x_stitch,
            data.y_stitch,
            objective,
            beta=beta,
            start=start,
            # the latent term from a random start needs a larger step to get anywhere
            lr=1e-2 if random else None,
            generator=_generator(seed),
        )
    found = _metamers(receiver, seed, short, n_test, steps)
    return invariance_aware_similarity(
        A, B, T, data.x_test, data.y_test, data.x0, steps=steps, found=found
    )


def pair_study(
    *,
    sender: str,
    receiver: str,
    seed: int,
    layer: int = 2,
    short: bool = False,
    n_test: int = 397,
    steps: int = 200,
    backward: Sequence[str] = ("task", "slm", "invariance"),
    forward: Sequence[str] = (),
) -> dict[str, float]:
    """One ordered pair by several objectives, with the measures that need no stitch.

    Args:
        sender: as in :func:`pair_run`, and so are the others; "noise" are the features of
            :func:`clustered_noise`, of which only the forward numbers exist.
        backward: objectives whose stitch is measured both ways.
        forward: further objectives, measured forward only.

    Returns:
        Each objective's name and "_" before accuracy and fc, and, where measured, bc, reach,
        fc_norm, bc_norm and ias; self_check, chance and start of the "slm" stitch if it is among
        them; receiver_accuracy, ceiling, shared_invariance, cka. What is nan is left out.
    """
    nets, data = cue_models(seed, short), cue_world(seed, n_test)
    B = nets[receiver].split()
    if sender == "noise":
        g = _generator(seed)
        means = torch.randn(10, 64, generator=g, dtype=torch.float64)
        fit_on, test_on = (
            clustered_noise(y, generator=g, means=means) for y in (data.y_stitch, data.y_test)
        )
        backward, forward = (), (*backward, *forward)
    else:
        fit_on = test_on = nets[sender].split(layer)
    out: dict[str, float] = {}
    for objective in forward:
        T = fit_stitch(
            fit_on, B, data.x_stitch, data.y_stitch, objective, generator=_generator(seed)
        )
        found = forward_compatibility(test_on, B, T, data.x_test, data.y_test)
        out |= {f"{objective}_accuracy": found.accuracy, f"{objective}_fc": found.fc}
    for objective in backward:
        report = pair_run(
            sender=sender,
            receiver=receiver,
            seed=seed,
            objective=objective,
            layer=layer,
            short=short,
            n_test=n_test,
            steps=steps,
        )
        for field in ("accuracy", "fc", "bc", "reach", "fc_norm", "bc_norm", "ias"):
            out[f"{objective}_{field}"] = getattr(report, field)
        if objective == "slm":
            out |= {field: getattr(report, field) for field in ("self_check", "chance", "start")}
        out |= {
            "receiver_accuracy": report.receiver,
            "ceiling": report.ceiling,
            "shared_invariance": report.shared_invariance,
        }
    out["cka"] = cka_linear(_features(test_on, data.x_test), _features(B, data.x_test))
    return {k: v for k, v in out.items() if not (isinstance(v, float) and math.isnan(v))}


class Journey(NamedTuple):
    """Inversions on their way: images and what both networks say of them.

    Attributes:
        x: (n, 192) the inputs that were stitched.
        path: (n_steps, n, 192) from x₀ to x̃.
        sender_x: (n,) what A says of x.
        sender: (n_steps, n) what A says on the way.
        receiver: (n_steps, n) what B says.
    """

    x: torch.Tensor
    path: torch.Tensor
    sender_x: torch.Tensor
    sender: torch.Tensor
    receiver: torch.Tensor


def journeys(
    models: Mapping[str, SplitModel],
    data: StitchData,
    *,
    n: int = 8,
    steps: int = 200,
    every: int = 10,
) -> dict[tuple[str, str], Journey]:
    """The first ``n`` test rows through every ordered pair of models, stitched by "slm".

    All senders of a receiver are inverted in one batch.

    Args:
        models: name → network.
        data: rows to fit on, to test on, and starts.
        n: rows, >= 1.
        steps: of each inversion.
        every: keep the inputs after 0, every, 2·every, … steps.
    """
    x, x0, marks = data.x_test[:n], data.x0[:n], range(0, steps + 1, every)
    _check_starts(x, x0)
    found = {}
    for b, B in models.items():
        targets = []
        for a, A in models.items():
            T = (
                identity_stitch(A, x)
                if a == b
                else fit_stitch(A, B, data.x_stitch, data.y_stitch, "slm")
            )
            targets.append(T(A.front(x)))
        batch = invert(
            B.front,
            torch.cat(targets),
            x0.repeat(len(models), 1),
            steps=steps,
            variance=target_variance(_features(B, data.x_test)),
            keep=marks,
        )
        for (a, A), path in zip(models.items(), batch.path.split(n, dim=1), strict=True):
            said, answered = (
                torch.stack([_classes(model, images) for images in path]) for model in (A, B)
            )
            found[a, b] = Journey(x, path, _classes(A, x), said, answered)
    return found


BETAS = (0.0, 0.1, 1.0, 10.0, 100.0)
SEEDS = (0, 1, 2)
CORE = tuple((f"{a} 1", f"{b} 2") for a in ("shape", "colour") for b in ("shape", "colour"))
"""Sender and receiver of the four pairs that are measured by every objective."""


RUNS = tuple(
    f"{what} | seed={seed}"
    for seed in SEEDS
    for what in (
        *(f"{a} > {b}" for a in MODELS for b in MODELS if a != b),
        "untrained > shape 2",
        "noise > shape 2",
        "layer 1 of shape 1 > shape 2",
        *(f"beta={beta:g} from {start}" for beta in BETAS for start in ("slm", "random")),
    )
)
"""The shipped runs: each ordered pair, three controls, and the weight of the latent term."""


def study_run(run: str) -> dict[str, float | str]:
    """One of :data:`RUNS`: a pair by its objectives, or shape 1 > shape 2 at one β.

    Raises:
        ValueError: an unknown run.
    """
    if run not in RUNS:
        raise ValueError(f"run must be one of RUNS, such as {RUNS[0]!r}: got {run!r}")
    what, tail = run.split(" | ")
    seed = int(tail.removeprefix("seed="))
    if what.startswith("beta="):
        beta, start = what.removeprefix("beta=").split(" from ")
        report = pair_run(
            sender="shape 1",
            receiver="shape 2",
            seed=seed,
            objective="invariance",
            beta=float(beta),
            start=start,
        )
        return {
            "beta": float(beta),
            "start_from": start,
            "invariance_accuracy": report.accuracy,
            "invariance_bc": report.bc,
            "invariance_reach": report.reach,
        }
    sender, receiver = what.split(" > ")
    layer = 1 if sender.startswith("layer 1") else 2
    sender = sender.removeprefix("layer 1 of ")
    with warnings.catch_warnings():
        # an untrained sender has no room above chance: the missing score says so
        warnings.simplefilter("ignore", UserWarning)
        if (sender, receiver) in CORE and layer == 2:
            measured = pair_study(sender=sender, receiver=receiver, seed=seed, backward=OBJECTIVES)
        else:
            measured = pair_study(
                sender=sender,
                receiver=receiver,
                seed=seed,
                layer=layer,
                backward=("slm", "invariance"),
                forward=("task",),
            )
    return {"sender": sender, "receiver": receiver, "layer": layer, **measured}


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=representations/stitching`` computes."""


class LinearDraw(NamedTuple):
    """A pair of linear networks, its defects, and what random starts say.

    Attributes:
        forward_defect: f.
        backward_defect: r.
        forward_error: relative error of the best W with W G_A = G_B, squared.
        backward_error: mean ‖G_A x̃ − G_A x‖²/mean ‖G_A x‖² over nearest inversions from random x₀.
    """

    forward_defect: float
    backward_defect: float
    forward_error: float
    backward_error: float


LINEAR_CASES = ("equal", "nested", "independent")


def linear_draw(case: str, seed: int, *, n: int = 100) -> LinearDraw:
    """Random linear networks on 12 inputs: a sender with 5 features and a receiver.

    Args:
        case: "equal": G_B = R G_A with R (5×5); "nested": R (3×5), B ignores more; "independent":
            G_B (5×12) of its own.
        seed: of all entries, N(0, 1).
        n: pairs of x and x₀.

    Raises:
        ValueError: an unknown case.
    """
    if case not in LINEAR_CASES:
        raise ValueError(f"case must be one of {LINEAR_CASES}: got {case!r}")
    g = _generator(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    G_A = normal(5, 12)
    G_B = {
        "equal": lambda: normal(5, 5) @ G_A,
        "nested": lambda: normal(3, 5) @ G_A,
        "independent": lambda: normal(5, 12),
    }[case]()
    x, x0 = normal(n, 12), normal(n, 12)
    W = torch.linalg.lstsq(G_A.T, G_B.T).solution.T
    forward = (W @ G_A - G_B).square().sum() / G_B.square().sum()
    said, again = (v @ G_A.T for v in (x, nearest_inversion(G_B, x, x0)))
    backward = (again - said).square().sum() / said.square().sum()
    return LinearDraw(*linear_compatibility(G_A, G_B), float(forward), float(backward))


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_slm(fn: Callable) -> None:
    """Exercise 1: ``fn(z_a, z_b, rho)`` returns (W, b) of stitch-level matching.

    Compared with NumPy's least squares on 20 random problems, some with dead units.

    Raises:
        AssertionError: with the first problem that differs, and what was expected.
    """
    rng = np.random.default_rng(0)
    for case in range(20):
        n, k_a, k_b = int(rng.integers(12, 60)), int(rng.integers(2, 9)), int(rng.integers(2, 9))
        z_a = np.maximum(rng.normal(0.3, 1, (n, k_a)), 0)
        z_b = rng.normal(size=(n, k_b)) + 3
        if case % 3 == 1:
            z_a[:, 0] = 0
        rho = float(10 ** rng.uniform(-2, 1))
        # the penalty as further rows; a last column for b, which they leave alone
        rows = np.hstack([z_a, np.ones((n, 1))])
        extra = np.hstack([math.sqrt(rho) * np.eye(k_a), np.zeros((k_a, 1))])
        both = np.vstack([rows, extra]), np.vstack([z_b, np.zeros((k_a, k_b))])
        solution = np.linalg.lstsq(*both, rcond=None)[0].T
        W, b = (np.asarray(v, dtype=float) for v in fn(z_a.copy(), z_b.copy(), rho))
        hint = f"case {case}: n={n}, k_A={k_a}, k_B={k_b}, rho={rho:.3g}"
        assert W.shape == (k_b, k_a), f"{hint}: W must be (k_B, k_A): got {W.shape}"
        assert b.shape == (k_b,), f"{hint}: b must be (k_B,): got {b.shape}"
        gap = max(np.abs(W - solution[:, :-1]).max(), np.abs(b - solution[:, -1]).max())
        assert gap <= 1e-6, (
            f"{hint}: W and b must minimise Σ‖W z_A + b − z_B‖² + ρ‖W‖², b without a penalty: they "
            f"differ from the least squares solution by {gap:.2g}"
        )


def check_invert(fn: Callable) -> None:
    """Exercise 2: ``fn(front, target, x0)`` returns inputs in [0, 1] that reach the targets.

    Two trained shape networks and the targets of an SLM stitch between them.

    Raises:
        AssertionError: a mean residual above 0.05, an input outside the box, or a front or a
            start that was changed.
    """
    for seed in (0, 1):
        A, B = (train_cue_model("shape", 10 * seed + i, 12, split=seed).split() for i in range(2))
        data = cue_world(seed)
        T = fit_stitch(A, B, data.x_stitch, data.y_stitch, "slm")
        target, x0 = T(A.front(data.x_test[:100])), data.x0[:100]
        before = [p.clone() for p in B.parameters()]
        start = x0.clone()
        x = fn(B.front, target, start)
        assert isinstance(x, torch.Tensor), f"fn must return a tensor: got {type(x).__name__}"
        assert x.shape == x0.shape, f"fn must return {tuple(x0.shape)}: got {tuple(x.shape)}"
        assert torch.equal(start, x0), "fn must leave x0 as it is: work on a copy"
        assert all(torch.equal(a, b) for a, b in zip(before, B.parameters(), strict=True)), (
            "fn must leave the front's parameters as they are: only x is free"
        )
        low, high = float(x.min()), float(x.max())
        assert 0 <= low <= high <= 1, f"inputs must lie in [0, 1]: got {low:.3f} to {high:.3f}"
        with torch.no_grad():
            residual = (B.front(x) - target).square().sum(dim=1).mean() / target_variance(target)
        assert float(residual) <= REACH, (
            f"the mean residual ‖g_B(x) − t‖²/tr Var(t) must be at most {REACH}: got "
            f"{float(residual):.3f}"
        )


def check_linear_defects(fn: Callable) -> None:
    """Exercise 3: ``fn(G_A, G_B)`` returns (f, r) for NumPy matrices of any rank.

    Raises:
        AssertionError: with the pair that differs, and what was expected.
    """
    rng = np.random.default_rng(1)
    for case in range(24):
        n, k = int(rng.integers(6, 14)), int(rng.integers(3, 6))
        G_A = rng.normal(size=(k, n))
        kind = ("nested", "equal", "independent", "rank deficient")[case % 4]
        G_B = {
            "nested": lambda G=G_A, k=k: rng.normal(size=(k - 1, k)) @ G,
            "equal": lambda G=G_A, k=k: rng.normal(size=(k, k)) @ G,
            "independent": lambda n=n, k=k: rng.normal(size=(k, n)),
            "rank deficient": lambda G=G_A, k=k: rng.normal(size=(k + 2, 2)) @ G[:2],
        }[kind]()
        expected = linear_compatibility(G_A, G_B)
        got = [float(v) for v in fn(G_A.copy(), G_B.copy())]
        for name, mine, theirs in zip(("f", "r"), expected, got, strict=True):
            # an exact 0 may come out as rounding, squared
            tolerance = 1e-12 if mine < 1e-12 else 1e-9
            assert abs(mine - theirs) <= tolerance, (
                f"case {case}, {kind} {G_A.shape} and {G_B.shape}: {name} must be {mine:.6g}, got "
                f"{theirs:.6g}"
            )


def check_cue_finder(fn: Callable) -> None:
    """Exercise 4: ``fn(sender, shape, colour, data)`` returns (cue, bc_shape, bc_colour).

    ``sender`` is a network whose cue is to be found, "shape" or "colour"; the other two are
    receivers that read a known cue; ``data`` is a :class:`StitchData`. Tried on networks
    trained on both cues and on others.

    Raises:
        AssertionError: a wrong cue, or a backward compatibility more than 0.1 from ours.
    """
    for seed in (0, 1):
        nets = cue_models(seed, True)
        data = cue_world(seed, 150)
        shape, colour = (nets[f"{cue} 2"].split() for cue in ("shape", "colour"))
        for name, expected in (("both", "colour"), ("shape 1", "shape"), ("colour 1", "colour")):
            A = nets[name].split()
            cue, *numbers = fn(A, shape, colour, data)
            ours = []
            for B in (shape, colour):
                T = fit_stitch(A, B, data.x_stitch, data.y_stitch, "slm")
                ours.append(backward_compatibility(A, B, T, data.x_test, data.x0).bc)
            what = "the network trained on both cues" if name == "both" else "another network"
            assert cue == expected, (
                f"seed {seed}: {what} uses the {expected}: BC towards shape is {ours[0]:.2f} and "
                f"towards colour {ours[1]:.2f}, and fn said {cue!r}"
            )
            for receiver, mine, theirs in zip(("shape", "colour"), ours, numbers, strict=True):
                assert abs(mine - float(theirs)) <= 0.1, (
                    f"seed {seed}, {what}: BC towards {receiver} must be within 0.1 of {mine:.2f}: "
                    f"got {float(theirs):.2f}"
                )


def check_mixed_cues(fn: Callable) -> None:
    """Exercise 5: ``fn(seed)`` returns (net, bc_shape, bc_colour) of a network that uses both cues.

    ``net`` is a :class:`SmallNet`, trained on shape rows and colour rows in equal parts; split,
    receivers, test rows and starts are those of ``cue_models(seed, True)`` and ``cue_world(seed)``.

    Raises:
        AssertionError: a network that leans on one cue alone or does not solve the task, or a
            backward compatibility more than 0.1 from ours.
    """
    for seed in (0, 1):
        net, *numbers = fn(seed)
        data = cue_world(seed)
        accuracy = _agreement(_classes(net, data.x_test), data.y_test)
        assert accuracy >= 0.9, f"seed {seed}: accuracy must be >= 0.9 where cues agree: {accuracy}"
        colours = torch.randint(10, data.y_test.shape, generator=_generator(seed))
        torn = colours != data.y_test
        said = _classes(net, recoloured(data.x_test, colours))[torn]
        for cue, answer in (("shape", data.y_test), ("colour", colours)):
            share = _agreement(said, answer[torn])
            assert share >= 0.15, (
                f"seed {seed}: where shape and colour disagree, the network must go by its {cue} "
                f"in at least 15 % of cases: got {share:.2f}; half of its batches must teach each"
            )
        A = net.split()
        for name, theirs in zip(("shape 2", "colour 2"), numbers, strict=True):
            B = cue_models(seed, True)[name].split()
            T = fit_stitch(A, B, data.x_stitch, data.y_stitch, "slm")
            mine = backward_compatibility(A, B, T, data.x_test, data.x0).bc
            assert abs(mine - float(theirs)) <= 0.1, (
                f"seed {seed}: BC towards {name} must be within 0.1 of {mine:.2f}: got "
                f"{float(theirs):.2f}"
            )
