"""Losses that pull matched representations together and push others apart."""

import math

import torch
from torch.nn.functional import cross_entropy, normalize

from icmllab.kernels.triplet_loss import triplet_loss as triplet_loss_kernel


def info_nce(za: torch.Tensor, zb: torch.Tensor, *, temperature: float = 0.1) -> torch.Tensor:
    """Symmetric InfoNCE: each row must find its partner among the rows of the other view.

    The mean of both directions of cross-entropy over the cosines divided by the temperature
    (van den Oord et al., 2018, equation 4; the symmetric form is that of CLIP).

    Args:
        za: (batch, dim) floating; batch >= 2. Rows are normalised here.
        zb: (batch, dim), row i the positive partner of ``za[i]``, all others are negatives.
        temperature: > 0.

    Returns:
        scalar, >= 0; log(batch) when all rows are alike.

    Raises:
        ValueError: shapes that differ or are not 2-D, batch < 2, temperature not > 0.
    """
    if za.ndim != 2 or za.shape != zb.shape or len(za) < 2:
        raise ValueError(
            "za and zb must be (batch, dim) of one shape, batch >= 2: "
            f"got {tuple(za.shape)} and {tuple(zb.shape)}"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be > 0: got {temperature}")
    logits = normalize(za, dim=1) @ normalize(zb, dim=1).T / temperature
    target = torch.arange(len(za), device=za.device)
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


# --------------------------------------------------------------------------------------------
# Triplets


def check_triplets(triplets: object, n_points: int) -> torch.Tensor:
    """Triplets as an (m, 3) int64 tensor, each of three different points.

    Args:
        triplets: (m, 3) whole numbers, m >= 1; row (i, j, k) says that i is nearer to j than to k.
        n_points: n; every entry lies in 0..n-1. Entries on a GPU are looked at as well, for which
            the host waits.

    Raises:
        ValueError: another shape, no triplet, entries that are no whole numbers or out of range,
            or a triplet that names a point twice.
    """
    tensor = torch.as_tensor(triplets)
    if tensor.ndim != 2 or tensor.shape[1] != 3 or len(tensor) == 0:
        raise ValueError(f"triplets must have shape (m, 3) with m >= 1: got {tuple(tensor.shape)}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"triplets must hold whole numbers: got {tensor.dtype}")
    tensor = tensor.long()
    low, high = (int(v) for v in tensor.aminmax())
    if low < 0 or high >= n_points:
        raise ValueError(
            f"triplets must hold points in 0..{n_points - 1}: got {low if low < 0 else high}"
        )
    i, j, k = tensor.unbind(dim=1)
    repeated = (i == j) | (i == k) | (j == k)
    if bool(repeated.any()):
        row = int(repeated.nonzero()[0, 0])
        raise ValueError(
            f"triplets must name three different points each: row {row} is {tensor[row].tolist()}"
        )
    return tensor


def triplet_distances(X: torch.Tensor, triplets: torch.Tensor) -> torch.Tensor:
    """Squared distances to the near and the far point of each triplet.

    Args:
        X: (n, d) real or whole numbers; whole numbers are subtracted and squared as int64, exactly.
        triplets: (m, 3) int64, as `check_triplets` returns them.

    Returns:
        (2, m) in the dtype of ``X``, int64 for whole numbers.
    """
    if not X.is_floating_point():
        X = X.long()
    i, j, k = triplets.unbind(dim=1)
    return torch.stack([(X[i] - X[other]).square().sum(dim=1) for other in (j, k)])


def triplet_accuracy(X: object, triplets: object, ties: float = 0.5) -> float:
    """Share of the triplets (i, j, k) with i nearer to j than to k.

    Args:
        X: (n, d) points. Whole numbers are compared exactly.
        triplets: (m, 3), see `check_triplets`.
        ties: what an exact tie counts, in [0, 1]. With 1, a constant embedding would be perfect.

    Raises:
        ValueError: arguments that do not fit, or points that are not finite.
    """
    X = torch.as_tensor(X).detach()
    if X.ndim != 2 or X.shape[1] == 0:
        raise ValueError(f"X must have shape (n, d) with d >= 1: got {tuple(X.shape)}")
    if not 0 <= ties <= 1:
        raise ValueError(f"ties must be in [0, 1]: got {ties}")
    if X.is_floating_point() and not bool(X.isfinite().all()):
        raise ValueError("X must be finite: got inf or nan")
    triplets = check_triplets(triplets, len(X)).to(X.device)
    near, far = triplet_distances(X, triplets)
    hits, even = int((near < far).sum()), int((near == far).sum())
    return (hits + ties * even) / len(triplets)


def triplet_loss(
    X: torch.Tensor,
    triplets: torch.Tensor,
    *,
    scale: float = 1.0,
    deterministic: bool | None = None,
) -> torch.Tensor:
    """Mean softplus(scale (|x_i - x_j|² - |x_i - x_k|²)) over triplets (i, j, k).

    The smooth stand-in for 1 - `triplet_accuracy`. A CUDA or HIP device runs the fused kernel on
    float32 points, anything else the vectorised reference; see `icmllab.kernels.triplet_loss`.

    Args:
        X: (n, d) float32 or float64 points; the loss is differentiable in them, once.
        triplets: (m, 3) int32 or int64, m >= 1.
        scale: how sharply near - far counts, finite. The loss saturates where scale times squared
            distance is far from 1.
        deterministic: the same bits on every run, on a GPU too; None asks
            ``torch.are_deterministic_algorithms_enabled()``.

    Returns:
        () in the dtype of ``X``.

    Raises:
        ValueError: arguments that do not fit.
    """
    return triplet_loss_kernel(X, triplets, scale=scale, deterministic=deterministic)
