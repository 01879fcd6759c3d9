"""Losses that pull matched representations together and push others apart."""

import math

import torch
from torch.nn.functional import cross_entropy, normalize


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
