r"""WaterSIC: information-theoretically (near) optimal linear layer quantization (arXiv 2603.04956).

A linear layer y = W x is stored in few bits; what counts is the error of y, and so the covariance
Σ of the inputs. GPTQ rounds the columns one after the other and feeds each one's error into those
still to come, with one step size for all. WaterSIC runs the same loop with the step c/ℓ_ii for
column i, Σ = L Lᵀ: then every column leaves the same output error, the columns get different rates,
as reverse waterfilling does, and of the distance to the information-theoretic limit only the
0.2546 bit remain that any scalar quantiser loses.

Known from the paper and the authors' public code: the loop, the gain inside it, the rescalers, the
drift-corrected target, dead inputs, the search for a rate. Our reconstruction: the derivation of
the two gap formulas, the Huffman coder, the kernels, all experiments and their numbers.

Notation: W (a, n) with a outputs and n inputs; L (n, n) lower triangular with diagonal ℓ; codes Z
(a, n) whole numbers; α (n,) steps; γ (n,) gains of columns; t (a,) gains of rows;
Ŵ = diag(t)(Z∘αγ). Rates are bits per weight over all a·n weights.
"""

import math
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from icmllab.kernels.dequant_matmul import dequant_matmul
from icmllab.kernels.runtime import runs_triton
from icmllab.kernels.sic_block import BLOCK, sic_block
from icmllab.toolbox.cholesky import damped_cholesky
from icmllab.toolbox.fit import fit
from icmllab.toolbox.information import MODES, HuffmanCode, code_entropy, column_entropies
from icmllab.toolbox.linalg import as_matrix
from icmllab.toolbox.quantization import (
    Covariance,
    CovarianceAccumulator,
    activation_covariance,
    cross_covariance,
    gptq_fixed,
    gptq_obs,
)

__all__ = [
    "COVARIANCES",
    "METHODS",
    "SCALAR_LOSS",
    "SHIPPED",
    "Covariance",
    "CovarianceAccumulator",
    "QuantizedModel",
    "QuantizedWeight",
    "Rescalers",
    "SICResult",
    "WaterSICLinear",
    "WaterfillingResult",
    "activation_covariance",
    "check_huffman",
    "check_predicted_gap",
    "check_rescaler",
    "check_sic",
    "check_waterfilling",
    "code_entropy",
    "covariance",
    "dequant_matmul",
    "digits_network",
    "digits_run",
    "drift_run",
    "family_run",
    "gap",
    "gap_run",
    "gptq_obs",
    "gptq_quantize",
    "low_rate_run",
    "optimal_rescalers",
    "predicted_gap",
    "quantize_model",
    "random_covariance",
    "rtn_quantize",
    "search_rate",
    "sic",
    "study_run",
    "two_inputs_run",
    "waterfilling",
    "watersic_quantize",
]

METHODS = ("watersic", "gptq", "rtn")

SCALAR_LOSS = 0.5 * math.log2(2 * math.pi * math.e / 12)
"""Bits that rounding to whole numbers loses against the best code at high rate: 0.2546."""

FEW_ROWS = 16
"""Below this many rows a column's gain fits its few entries instead of shrinking them."""

RATE_LIMITS = (0.05, 16.0)
"""Rates that a layer's share of the budget is clamped to."""


# --------------------------------------------------------------------------------------------
# The limit


class WaterfillingResult(NamedTuple):
    """A point of the rate-distortion curve.

    Attributes:
        rate: bits per component, (1/n) Σ max(0, ½ log2(λ_i/θ)).
        distortion: (1/n) Σ min(θ, λ_i).
        theta: the water level θ.
        active: how many components lie above it.
    """

    rate: float
    distortion: float
    theta: float
    active: int


def waterfilling(
    eigvals: object, *, distortion: float | None = None, rate: float | None = None
) -> WaterfillingResult:
    """Reverse waterfilling: what any code of a Gaussian vector can do at best.

    For a weight matrix with rows N(0, σ²I) and inputs of covariance Σ give the eigenvalues of σ²Σ.
    The level comes from sorted sums, exactly, without bisection.

    Args:
        eigvals: (n,) variances >= 0.
        distortion: mean squared error > 0, or
        rate: bits per component >= 0.

    Raises:
        ValueError: both or neither of the two, one out of range, or negative eigenvalues.
    """
    lam = torch.as_tensor(eigvals, dtype=torch.float64).flatten()
    if not len(lam) or not bool(torch.isfinite(lam).all()) or bool((lam < 0).any()):
        raise ValueError("eigvals must be (n,) finite numbers >= 0")
    if (distortion is None) == (rate is None):
        raise ValueError("exactly one of distortion and rate must be given")
    n, lam = len(lam), lam.sort(descending=True).values
    total = float(lam.sum())
    if rate is not None:
        if not (rate >= 0 and math.isfinite(rate)):
            raise ValueError(f"rate must be a finite number >= 0: got {rate}")
        logs = lam[lam > 0].log2()
        m = int((2 * n * rate > logs.cumsum(0) - logs * torch.arange(1, len(logs) + 1)).sum())
        theta = float(2 ** (logs[:m].mean() - 2 * n * rate / m)) if m else float(lam[0])
    else:
        if not (distortion > 0 and math.isfinite(distortion)):
            raise ValueError(f"distortion must be a finite number > 0: got {distortion}")
        tail = total - lam.cumsum(0)
        # the distortion at which the water reaches λ_m falls with m
        m = int((n * distortion < lam * torch.arange(1, n + 1) + tail).sum())
        theta = float((n * distortion - tail[m - 1]) / m) if m else float(lam[0])
    above = lam[:m]
    bits = float((above / theta).log2().sum() / (2 * n)) if m else 0.0
    return WaterfillingResult(bits, float(lam.clamp_max(theta).mean()), theta, m)


def predicted_gap(L: object, method: str) -> float:
    """Bits above the limit at high rate, for weights with equal variance.

    WaterSIC: ½ log2(2πe/12). GPTQ: ½ log2(AM/GM) of ℓ² more. Rounding without feedback: the same
    with the mean of diag Σ in place of AM(ℓ²).

    Args:
        L: (n, n) Cholesky factor of the covariance.
        method: one of ``METHODS``.

    Raises:
        ValueError: an unknown method, or a diagonal that is not positive.
    """
    L = as_matrix("L", L).double()
    _check_method(method)
    squares = L.diagonal().square()
    if L.shape[0] != L.shape[1] or not bool((L.diagonal() > 0).all()):
        raise ValueError("L must be square with a positive diagonal")
    if method == "watersic":
        return SCALAR_LOSS
    mean = squares.mean() if method == "gptq" else L.square().sum() / len(L)
    return SCALAR_LOSS + 0.5 * float(mean.log2() - squares.log2().mean())


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}: got {method!r}")


# --------------------------------------------------------------------------------------------
# The loop


class SICResult(NamedTuple):
    """What the loop leaves.

    Attributes:
        codes: (a, n) int32.
        gamma: (n,) float64 gains, 1 without LMMSE, 0 for a column of zero codes with it.
        residual: (a, n) float64, (W − Ŵ) L.
    """

    codes: torch.Tensor
    gamma: torch.Tensor
    residual: torch.Tensor


def sic(
    W: torch.Tensor,
    sigma: torch.Tensor,
    alpha: torch.Tensor,
    *,
    lmmse: bool = True,
    y0: torch.Tensor | None = None,
    block_size: int = BLOCK,
    backend: str = "auto",
) -> SICResult:
    """Successive interference cancellation: columns last to first, each error fed to the others.

    Y = W L;  z_i = round(Y_i/(α_i ℓ_i));  γ_i = ⟨z_i, Y_i⟩/(α_i ℓ_i ⟨z_i, z_i⟩);
    Y ← Y − γ_i α_i z_i L[i, :].  The mean squared output error is ‖Y‖²/(a n) at the end.

    Args:
        W: (a, n) weights.
        sigma: (n, n) covariance, damped where it needs be.
        alpha: (n,) steps > 0.
        lmmse: the gain γ, inside the loop; without it γ = 1.
        y0: (a, n) what to start from in place of W L, for a target that is not W itself.
        block_size: columns of a block, 1 to 64; what stands left of it waits for its end.
        backend: "auto" runs the kernel in float32 for CUDA weights without LMMSE and float64
            elsewhere; "reference" and "triton" insist.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, a covariance not symmetric
            or not positive definite, steps <= 0, an unknown or impossible backend, codes that
            leave int32.
    """
    W = as_matrix("W", W)
    a, n = W.shape
    if sigma.shape != (n, n):
        raise ValueError(f"sigma must be ({n}, {n}), as W has columns: got {tuple(sigma.shape)}")
    L = damped_cholesky(sigma, name="sigma").factor
    Y = W.double() @ L if y0 is None else as_matrix("y0", y0).double().clone()
    if Y.shape != W.shape:
        raise ValueError(f"y0 must be {(a, n)}: got {tuple(Y.shape)}")
    alpha = torch.as_tensor(alpha, dtype=torch.float64, device=W.device)
    if alpha.shape != (n,) or not bool((torch.isfinite(alpha) & (alpha > 0)).all()):
        raise ValueError(f"alpha must be ({n},) finite numbers > 0: got {alpha!r:.80}")
    if not 1 <= block_size <= BLOCK:
        raise ValueError(f"block_size must be in [1, {BLOCK}]: got {block_size}")
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f"backend must be auto, reference or triton: got {backend!r}")
    on_kernel = runs_triton(Y, L) and not lmmse
    if backend == "triton" and not on_kernel:
        raise ValueError(
            "backend='triton' needs CUDA weights and lmmse=False: a gain is a sum over all rows"
        )
    if lmmse and a < FEW_ROWS:
        warnings.warn(
            f"lmmse with {a} rows fits the gains to their few entries; with one row the result "
            "looks exact",
            stacklevel=2,
        )
    if lmmse:
        return _sic_lmmse(Y, L, alpha, block_size)
    return _sic_rows(Y, L, alpha, block_size, single=on_kernel and backend != "reference")


def _sic_rows(
    Y: torch.Tensor, L: torch.Tensor, alpha: torch.Tensor, block_size: int, *, single: bool
) -> SICResult:
    """The loop with γ = 1, in which rows are independent: a kernel for a block, then a product."""
    if single:
        Y, L, alpha = Y.float(), L.float(), alpha.float()
    codes = torch.empty(Y.shape, dtype=torch.int32, device=Y.device)
    for start in reversed(range(0, Y.shape[1], block_size)):
        block = slice(start, min(start + block_size, Y.shape[1]))
        done = sic_block(Y[:, block], L[block, block], alpha[block])
        codes[:, block], Y[:, block] = done.codes, done.residual
        Y[:, :start] -= done.scaled @ L[block, :start]
    gamma = torch.ones(Y.shape[1], dtype=torch.float64, device=Y.device)
    return SICResult(codes, gamma, Y.double())


def _sic_lmmse(Y: torch.Tensor, L: torch.Tensor, alpha: torch.Tensor, block_size: int) -> SICResult:
    """The loop with the gain inside: the columns still to come see the error that remains."""
    codes, gamma = torch.zeros_like(Y), Y.new_zeros(Y.shape[1])
    for start in reversed(range(0, Y.shape[1], block_size)):
        end = min(start + block_size, Y.shape[1])
        slab, scaled = Y[:, start:end].clone(), Y.new_zeros(len(Y), end - start)
        for i in reversed(range(start, end)):
            j, c = i - start, alpha[i] * L[i, i]
            z = (slab[:, j] / c).round()
            square = z @ z
            if float(square):
                gamma[i] = (z @ slab[:, j]) / (c * square)
            q = gamma[i] * alpha[i] * z
            slab[:, : j + 1] -= torch.outer(q, L[i, start : i + 1])
            codes[:, i], scaled[:, j] = z, q
        Y[:, start:end] = slab
        Y[:, :start] -= scaled @ L[start:end, :start]
    if not float(codes.abs().max()) < 2**31:
        raise ValueError("alpha must not be so small that codes leave int32")
    return SICResult(codes.int(), gamma, Y)


class Rescalers(NamedTuple):
    """Gains of rows and columns.

    Attributes:
        t: (a,) float64, mean magnitude 1.
        g: (n,) float64.
        history: output errors, before the first step and after each.
    """

    t: torch.Tensor
    g: torch.Tensor
    history: list[float]


def optimal_rescalers(
    A: torch.Tensor,
    W: torch.Tensor,
    sigma: torch.Tensor,
    *,
    t0: torch.Tensor | None = None,
    g0: torch.Tensor | None = None,
    clip: tuple[float, float] = (-0.1, 1.5),
    tol: float = 3e-4,
    max_iter: int = 1000,
) -> Rescalers:
    """Gains for Ŵ = diag(t) A diag(g) that minimise the output error, in turns.

    Each half-step solves its block exactly, so that the error does not rise unless ``clip`` acts:
    [Σ ∘ (Aᵀ diag(t²) A) + ε I] g = Σ_r t_r (A_r ∘ B_r) with B = W Σ, and
    t_r = ⟨B_r, A_r∘g⟩ / ((A_r∘g) Σ (A_r∘g)ᵀ).

    Args:
        A: (a, n) codes times steps, Z∘α.
        W: (a, n) what to be near to.
        sigma: (n, n) covariance.
        t0: (a,) start, 1 without it.
        g0: (n,) start, 1 without it.
        clip: range of g. A column that is coded to almost nothing would get an enormous gain.
        tol: stops when the error changes by less than this share of itself.
        max_iter: rounds at most.

    Raises:
        ValueError: shapes that do not fit, or a range that is none.
    """
    A, W = (as_matrix(name, x).double() for name, x in (("A", A), ("W", W)))
    a, n = A.shape
    if W.shape != A.shape:
        raise ValueError(f"W must be {(a, n)}, as A: got {tuple(W.shape)}")
    if sigma.shape != (n, n):
        raise ValueError(f"sigma must be ({n}, {n}): got {tuple(sigma.shape)}")
    if not clip[0] < clip[1]:
        raise ValueError(f"clip must be (low, high) with low < high: got {clip}")
    sigma = sigma.double()
    t = A.new_ones(a) if t0 is None else torch.as_tensor(t0, dtype=A.dtype, device=A.device)
    g = A.new_ones(n) if g0 is None else torch.as_tensor(g0, dtype=A.dtype, device=A.device)
    for name, x, size in (("t0", t, a), ("g0", g, n)):
        if x.shape != (size,):
            raise ValueError(f"{name} must be ({size},): got {tuple(x.shape)}")
    B = W @ sigma
    constant = (B * W).sum()

    def error(t: torch.Tensor, g: torch.Tensor) -> float:
        P = t[:, None] * A * g
        return float((constant - 2 * (B * P).sum() + ((P @ sigma) * P).sum()) / (a * n))

    history = [error(t, g)]
    if not bool(A.any()):
        return Rescalers(t, g, history)
    for _ in range(max_iter):
        system = sigma * (A.T @ (t.square()[:, None] * A))
        system.diagonal().add_(1e-8 * system.diagonal().mean())
        g = torch.linalg.solve(system, (t[:, None] * A * B).sum(dim=0)).clamp(*clip)
        P = A * g
        square = ((P @ sigma) * P).sum(dim=1)
        t = torch.where(square > 0, (B * P).sum(dim=1) / square, 1.0)
        size = t.abs().mean()
        t, g = t / size, g * size
        history.append(error(t, g))
        if abs(history[-2] - history[-1]) <= tol * abs(history[-2]):
            break
    return Rescalers(t, g, history)


# --------------------------------------------------------------------------------------------
# A quantised weight

_SCALES = {torch.float64: ("d", "<f8"), torch.float32: ("f", "<f4"), torch.float16: ("e", "<f2")}
_HEAD = "<4sBBcII"
_MAGIC, _VERSION = b"wsic", 1


@dataclass(frozen=True)
class QuantizedWeight:
    """Ŵ = diag(t) (Z∘α) diag(γ) as it is stored.

    Attributes:
        codes: (a, n) int32, 0 in dead columns.
        alpha: (n,) float64 steps.
        gamma: (n,) float64 gains of columns.
        t: (a,) float64 gains of rows.
        dead: (n,) bool, columns that were left out and decode to 0.
        rescaled: whether t is stored, which costs 16 bits a row.
        history: output errors of the rescalers' rounds; empty without them.
    """

    codes: torch.Tensor
    alpha: torch.Tensor
    gamma: torch.Tensor
    t: torch.Tensor
    dead: torch.Tensor
    rescaled: bool = False
    history: tuple[float, ...] = ()

    @property
    def col_scale(self) -> torch.Tensor:
        """(n,) float64, α∘γ."""
        return self.alpha * self.gamma

    def dequantize(self) -> torch.Tensor:
        """(a, n) float64."""
        return self.t[:, None] * (self.codes.double() * self.col_scale)

    def distortion(self, W: torch.Tensor, sigma: torch.Tensor) -> float:
        """Mean squared output error against W: tr((W−Ŵ) Σ (W−Ŵ)ᵀ)/(a n)."""
        gap = as_matrix("W", W).double() - self.dequantize()
        return float(((gap @ sigma.double()) * gap).sum() / gap.numel())

    def rate(
        self, mode: str = "per_column", *, overhead: bool = True, miller_madow: bool = True
    ) -> float:
        """Bits per weight over all a·n weights.

        Args:
            mode: "per_column", a table for each column, or "pooled", one for all.
            overhead: add 16 bits a column, 16 a row where t is stored, and the mask of dead
                columns where there are any.
            miller_madow: the entropy estimate with its bias removed.

        Raises:
            ValueError: an unknown mode.
        """
        a, n = self.codes.shape
        live = ~self.dead
        kept = int(live.sum())
        bits = 0.0
        if kept:
            bits = code_entropy(self.codes[:, live], mode, miller_madow=miller_madow) * kept / n
        elif mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}: got {mode!r}")
        if overhead:
            bits += 16 * kept / (a * n) + (16 / n if self.rescaled else 0.0)
            bits += 1 / a if kept < n else 0.0
        return bits

    def column_rates(self) -> torch.Tensor:
        """(n,) float64 bits a row of each column, 0 for dead ones."""
        return column_entropies(self.codes).masked_fill(self.dead, 0.0)

    def encode(
        self, mode: str = "per_column", *, scale_dtype: torch.dtype = torch.float64
    ) -> bytes:
        """Everything that is needed to decode, as bytes: canonical Huffman codes and scales.

        Args:
            mode: "per_column" or "pooled" tables.
            scale_dtype: float64 decodes to the same weights; float16 is what ``rate`` counts.

        Raises:
            ValueError: an unknown mode or dtype, or scales that the dtype does not hold.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}: got {mode!r}")
        if scale_dtype not in _SCALES:
            raise ValueError(f"scale_dtype must be float16, float32 or float64: got {scale_dtype}")
        a, n = self.codes.shape
        live = ~self.dead
        letter, kind = _SCALES[scale_dtype]
        flags = int(self.rescaled) | 2 * int(mode == "pooled")
        parts = [struct.pack(_HEAD, _MAGIC, _VERSION, flags, letter.encode(), a, n)]
        parts.append(np.packbits(self.dead.cpu().numpy()).tobytes())
        scales = [self.col_scale[live]] + ([self.t] if self.rescaled else [])
        for scale in scales:
            stored = scale.cpu().to(scale_dtype)
            if not bool(torch.isfinite(stored).all()):
                raise ValueError(f"scale_dtype must hold the scales: {scale_dtype} overflows")
            parts.append(stored.numpy().astype(kind).tobytes())
        columns = self.codes.cpu()[:, live]
        streams = [columns] if mode == "pooled" else list(columns.T)
        for stream in streams if columns.numel() else []:
            table = HuffmanCode.of(stream)
            data = table.encode(stream)
            parts += [table.to_bytes(), struct.pack("<I", len(data)), data]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> "QuantizedWeight":
        """What :meth:`encode` wrote; step and gain of a column come back as one number, in alpha.

        Raises:
            ValueError: bytes that are none of this format, or that end early.
        """
        try:
            return cls._decode(data)
        except struct.error:
            raise ValueError("data must hold a whole weight: it ends early") from None

    @classmethod
    def _decode(cls, data: bytes) -> "QuantizedWeight":
        magic, version, flags, letter, a, n = struct.unpack_from(_HEAD, data)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError("data must be an encoded weight of version 1")
        at = struct.calcsize(_HEAD)

        def take(size: int) -> bytes:
            nonlocal at
            if at + size > len(data):
                raise ValueError("data must hold a whole weight: it ends early")
            at += size
            return data[at - size : at]

        mask = np.unpackbits(np.frombuffer(take(-(-n // 8)), dtype=np.uint8))[:n]
        dead = torch.from_numpy(mask.astype(bool))
        kinds = dict(_SCALES.values())
        kind = np.dtype(kinds[letter.decode()])

        def scales(count: int) -> torch.Tensor:
            raw = np.frombuffer(take(count * kind.itemsize), dtype=kind)
            return torch.from_numpy(raw.astype(np.float64))

        live = ~dead
        kept = int(live.sum())
        alpha = torch.ones(n, dtype=torch.float64)
        alpha[live] = scales(kept)
        rescaled, pooled = bool(flags & 1), bool(flags & 2)
        t = scales(a) if rescaled else torch.ones(a, dtype=torch.float64)

        def stream(count: int) -> torch.Tensor:
            table = HuffmanCode.from_bytes(data[at:])
            take(table.table_nbytes)
            (size,) = struct.unpack("<I", take(4))
            return table.decode(take(size), count)

        codes = torch.zeros(a, n, dtype=torch.int32)
        if a and kept and pooled:
            codes[:, live] = stream(a * kept).view(a, kept).int()
        elif a and kept:
            codes[:, live] = torch.stack([stream(a) for _ in range(kept)], dim=1).int()
        ones = torch.ones(n, dtype=torch.float64)
        return cls(codes, alpha, ones, t, dead, rescaled)

    def to_linear(self, bias: torch.Tensor | None = None) -> "WaterSICLinear":
        """A layer that computes with the codes."""
        return WaterSICLinear(self, bias)


class WaterSICLinear(nn.Module):
    """A linear layer that keeps whole numbers and two scales in place of its weight.

    Args:
        weight: the quantised weight (out, in).
        bias: (out,) or None.

    The codes are int8 where they fit, else int16, else int32. Takes inputs (..., in) in float16,
    bfloat16, float32 or float64.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None):
        super().__init__()
        most = int(weight.codes.abs().max()) if weight.codes.numel() else 0
        self.code_dtype = (
            torch.int8 if most <= 127 else torch.int16 if most <= 32767 else torch.int32
        )
        self.out_features, self.in_features = weight.codes.shape
        self.register_buffer("codes", weight.codes.to(self.code_dtype))
        self.register_buffer("col_scale", weight.col_scale.float())
        self.register_buffer("row_scale", weight.t.float())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) → (..., out)."""
        rows = x.reshape(-1, self.in_features)
        y = dequant_matmul(rows, self.codes, self.col_scale, self.row_scale, self.bias)
        return y.reshape(*x.shape[:-1], self.out_features)


# --------------------------------------------------------------------------------------------
# Quantising to a rate


class Searched(NamedTuple):
    """The best evaluation of a search.

    Attributes:
        R: what was given to the steps.
        entropy: what they then cost.
        evaluations: how many were made.
    """

    R: float
    entropy: float
    evaluations: int


def search_rate(
    entropy_of: Callable[[float], float],
    target: float,
    *,
    tol: float = 0.005,
    max_evaluations: int = 6,
) -> Searched:
    """Find R with ``entropy_of(R)`` = target: one Newton step of slope 1, then secants.

    The entropy is a step function of R, so that the best evaluation is returned, not the last.

    Args:
        entropy_of: bits at R, rising but for noise.
        target: bits wanted.
        tol: stops within this.
        max_evaluations: at most.
    """
    R, tried = target, []
    while True:
        tried.append((R, entropy_of(R)))
        now = tried[-1][1]
        if abs(now - target) < tol or len(tried) == max_evaluations:
            break
        slope = 1.0
        if len(tried) > 1:
            (R0, h0), (R1, h1) = tried[-2:]
            slope = (h1 - h0) / (R1 - R0) if R1 != R0 else 1.0
            slope = slope if slope >= 0.05 else 1.0
        R = min(max(R + (target - now) / slope, -10.0), 10.0)
    R, entropy = min(tried, key=lambda pair: abs(pair[1] - target))
    return Searched(R, entropy, len(tried))


def _steps(method: str, R: float, variance: torch.Tensor, ell: torch.Tensor) -> torch.Tensor:
    """α (n,): the high-rate entropy is R + 0.2546 for WaterSIC and for GPTQ alike."""
    used = variance > 0  # a column of zeros has no logarithm, and costs nothing
    logs = (12 * variance[used] * ell[used].square()).log()
    c = math.exp(0.5 * float(logs.mean()) - R * math.log(2)) if len(logs) else 1.0
    return (
        c / ell if method == "watersic" else torch.full_like(ell, c / float(ell.log().mean().exp()))
    )


def _round(W: torch.Tensor, alpha: torch.Tensor, lmmse: bool) -> SICResult:
    """Every entry by itself; the residual is the weight error."""
    z = (W / alpha).round()
    if z.numel() and not float(z.abs().max()) < 2**31:
        raise ValueError("rate must not be so high that codes leave int32")
    gamma = torch.ones_like(alpha)
    if lmmse:
        square = z.square().sum(dim=0)
        gain = (z * W).sum(dim=0) / (alpha * square.clamp_min(1.0))
        gamma = torch.where(square > 0, gain, 0.0)
    return SICResult(z.int(), gamma, W - z * (alpha * gamma))


def _quantize(
    method: str,
    W: torch.Tensor,
    sigma: torch.Tensor | Covariance,
    *,
    rate: float,
    rate_mode: str = "per_column",
    rescale: bool = True,
    lmmse: bool = True,
    dead: torch.Tensor | None = None,
    sigma_cross: torch.Tensor | None = None,
    residual_cross: torch.Tensor | None = None,
    search: bool = True,
    seed: int = 0,
) -> QuantizedWeight:
    W = as_matrix("W", W).detach().double()
    a, n = W.shape
    damp = 0.0
    if isinstance(sigma, Covariance):
        dead = sigma.dead_mask if dead is None else dead
        sigma, damp = sigma.sigma, sigma.damp
    if sigma is None:
        raise ValueError("sigma must be the covariance of the inputs that the layer will see")
    sigma = as_matrix("sigma", sigma).double()
    if sigma.shape != (n, n):
        raise ValueError(f"sigma must be ({n}, {n}), as W has columns: got {tuple(sigma.shape)}")
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"rate must be a finite number > 0: got {rate}")
    if rate_mode not in MODES:
        raise ValueError(f"rate_mode must be one of {', '.join(MODES)}: got {rate_mode!r}")
    dead = torch.zeros(n, dtype=torch.bool) if dead is None else torch.as_tensor(dead)
    if dead.shape != (n,) or dead.dtype != torch.bool:
        raise ValueError(f"dead must be ({n},) bool: got {tuple(dead.shape)} {dead.dtype}")
    live = ~dead.to(W.device)
    kept = int(live.sum())
    blank = QuantizedWeight(
        torch.zeros(a, n, dtype=torch.int32, device=W.device),
        W.new_ones(n),
        W.new_ones(n),
        W.new_ones(a),
        ~live,
    )
    if not kept:
        return blank
    L = damped_cholesky(sigma[live][:, live], name="sigma").factor
    target, Y = W[:, live], None
    if residual_cross is not None and sigma_cross is None:
        raise ValueError("residual_cross needs sigma_cross, the drift that it corrects")
    if sigma_cross is not None:
        B = _drift_target(W, sigma_cross, residual_cross, damp)[:, live]
        # Y L^T = B; the weight whose output error is the same is B Σ^{-1} = Y L^{-1}
        Y = torch.linalg.solve_triangular(L, B.T, upper=False).T
        target = torch.linalg.solve_triangular(L.T, Y.T, upper=True).T
    source = W[:, live]
    ell, variance = L.diagonal(), source.square().mean(dim=0)
    inner = sigma[live][:, live]

    def code(R: float, rows: slice | torch.Tensor) -> tuple[torch.Tensor, SICResult]:
        alpha = _steps(method, R * n / kept, variance, ell)
        if method == "rtn":
            return alpha, _round(source[rows], alpha, lmmse)
        start = None if Y is None else Y[rows]
        return alpha, sic(source[rows], inner, alpha, lmmse=lmmse, y0=start)

    def entropy(R: float) -> float:
        rows = some if some is not None else slice(None)
        made[R] = code(R, rows)
        return code_entropy(made[R][1].codes, rate_mode) * kept / n

    made: dict[float, tuple[torch.Tensor, SICResult]] = {}
    some = None
    R = rate
    if search:
        if a >= 4096:
            g = torch.Generator().manual_seed(seed)
            some = torch.randperm(a, generator=g)[: a // 10].to(W.device)
        R = search_rate(entropy, rate).R
    alpha, done = made[R] if search and some is None else code(R, slice(None))
    gamma, t, history = done.gamma, blank.t, ()
    if rescale:
        found = optimal_rescalers(done.codes * alpha, target, inner, g0=gamma)
        gamma, t, history = found.g, found.t, tuple(found.history)
    for whole, part in ((blank.codes, done.codes), (blank.alpha, alpha), (blank.gamma, gamma)):
        whole[..., live] = part.to(whole)
    return replace(blank, t=t, rescaled=rescale, history=history)


def _drift_target(
    W: torch.Tensor,
    sigma_cross: torch.Tensor,
    residual_cross: torch.Tensor | None,
    damp: float,
) -> torch.Tensor:
    """B = W (Σ_{x x̂} + δ'I) + Σ_{Δr,x̂}: (a, n)."""
    a, n = W.shape
    cross = as_matrix("sigma_cross", sigma_cross).double()
    if cross.shape != (n, n):
        raise ValueError(f"sigma_cross must be ({n}, {n}): got {tuple(cross.shape)}")
    B = W @ cross + damp * W
    if residual_cross is None:
        return B
    extra = as_matrix("residual_cross", residual_cross).double()
    if extra.shape != (a, n):
        raise ValueError(f"residual_cross must be ({a}, {n}): got {tuple(extra.shape)}")
    return B + extra


def watersic_quantize(
    W: torch.Tensor,
    sigma: torch.Tensor | Covariance,
    *,
    rate: float,
    rate_mode: str = "per_column",
    rescale: bool = True,
    lmmse: bool = True,
    dead: torch.Tensor | None = None,
    sigma_cross: torch.Tensor | None = None,
    residual_cross: torch.Tensor | None = None,
    search: bool = True,
    seed: int = 0,
) -> QuantizedWeight:
    """Quantise a weight with the step c/ℓ_i for column i.

    Args:
        W: (a, n) weights.
        sigma: (n, n) covariance of the inputs that the layer will see, damped, or a
            :class:`Covariance`, which also names dead inputs and what was added to its diagonal.
        rate: bits per weight > 0, without overhead: the entropy wanted with ``search``, else the
            waterfilling rate R that sets c; the entropy is then about R + 0.2546 at high rate.
        rate_mode: which entropy is meant, "per_column" or "pooled".
        rescale: gains of rows and columns after the loop.
        lmmse: gains of columns inside the loop.
        dead: (n,) bool, inputs whose columns are left out; default those of a ``Covariance``.
        sigma_cross: (n, n) E[x x̂ᵀ] of true inputs x and those seen, x̂, where earlier layers are
            quantised; sigma is then that of x̂.
        residual_cross: (a, n) E[(r − r̂) x̂ᵀ] for a layer that writes to a residual stream.
        search: find the step for which the entropy is ``rate``.
        seed: picks the tenth of the rows that the search looks at when there are 4096 or more.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, a covariance not symmetric
            or not positive definite, a rate <= 0, an unknown mode, codes that leave int32.
    """
    arguments = locals()
    return _quantize("watersic", **arguments)


def gptq_quantize(
    W: torch.Tensor,
    sigma: torch.Tensor | Covariance,
    *,
    rate: float,
    rate_mode: str = "per_column",
    rescale: bool = True,
    lmmse: bool = True,
    dead: torch.Tensor | None = None,
    sigma_cross: torch.Tensor | None = None,
    residual_cross: torch.Tensor | None = None,
    search: bool = True,
    seed: int = 0,
) -> QuantizedWeight:
    """The same loop with one step for all columns, entropy-coded: GPTQ.

    Arguments and errors as in :func:`watersic_quantize`.
    """
    arguments = locals()
    return _quantize("gptq", **arguments)


def rtn_quantize(
    W: torch.Tensor,
    sigma: torch.Tensor | Covariance,
    *,
    rate: float,
    rate_mode: str = "per_column",
    rescale: bool = True,
    lmmse: bool = True,
    dead: torch.Tensor | None = None,
    sigma_cross: torch.Tensor | None = None,
    residual_cross: torch.Tensor | None = None,
    search: bool = True,
    seed: int = 0,
) -> QuantizedWeight:
    """Each entry rounded by itself, with GPTQ's step, entropy-coded.

    Without feedback; only the rescalers look at the covariance. Arguments and errors as in
    :func:`watersic_quantize`.
    """
    arguments = locals()
    return _quantize("rtn", **arguments)


QUANTIZERS = {"watersic": watersic_quantize, "gptq": gptq_quantize, "rtn": rtn_quantize}


def gap(q: QuantizedWeight, W: torch.Tensor, sigma: torch.Tensor, *, mode: str = "per_column"):
    """Bits per weight, scales not counted, above the limit at the same output error.

    For W with entries of variance 1, of which the eigenvalues of Σ are the spectrum.
    """
    limit = waterfilling(torch.linalg.eigvalsh(sigma), distortion=q.distortion(W, sigma))
    return q.rate(mode, overhead=False) - limit.rate


# --------------------------------------------------------------------------------------------
# Networks


class QuantizedModel(NamedTuple):
    """A network with quantised layers.

    Attributes:
        model: the network; quantised layers are :class:`WaterSICLinear`.
        weights: position in the network → quantised weight.
        errors: position → output error over the output's power, on the calibration inputs that
            the layer sees: E‖Wx − Ŵx̂‖²/E‖Wx‖².
        rate: bits per quantised weight, scales not counted.
    """

    model: nn.Sequential
    weights: dict[int, QuantizedWeight]
    errors: dict[int, float]
    rate: float


@torch.no_grad()
def quantize_model(
    model: nn.Sequential,
    calib: torch.Tensor,
    *,
    rate: float,
    method: str = "watersic",
    sequential: bool = True,
    drift: bool = True,
    layers: Sequence[int] | None = None,
    multipliers: Mapping[int, float] | None = None,
    damping: float = 1e-2,
    rate_mode: str = "per_column",
    rescale: bool = True,
) -> QuantizedModel:
    """Quantise the linear layers of a network, first to last, within one budget of bits.

    After each layer what is left of ``rate`` times the number of weights is divided anew over the
    weights still to come.

    Args:
        model: an ``nn.Sequential``; it is left as it is.
        calib: (N, ...) calibration inputs.
        rate: bits per quantised weight, scales not counted.
        method: one of ``METHODS``.
        sequential: a layer is calibrated on what the quantised layers before it put out; else
            on what the full-precision network does.
        drift: with ``sequential``, aim at the true outputs, by the cross-covariance of true and
            seen inputs; else at the layer's own weights.
        layers: positions of the layers to quantise; default all linear ones but the last.
        multipliers: position → factor of that layer's share.
        damping: of the covariances, relative to their mean diagonal.
        rate_mode: "per_column" or "pooled".
        rescale: gains of rows and columns.

    Raises:
        ValueError: not an ``nn.Sequential``, a position without a linear layer, an unknown
            method, a factor <= 0, or what the quantisers refuse.
    """
    _check_method(method)
    if not isinstance(model, nn.Sequential):
        raise ValueError(f"model must be an nn.Sequential: got {type(model).__name__}")
    linear = [i for i, part in enumerate(model) if isinstance(part, nn.Linear)]
    chosen = linear[:-1] if layers is None else list(layers)
    if not chosen or not set(chosen) <= set(linear):
        raise ValueError(f"layers must be positions of linear layers, of {linear}: got {chosen}")
    factors = {i: float((multipliers or {}).get(i, 1.0)) for i in chosen}
    if min(factors.values()) <= 0 or set(multipliers or {}) - set(chosen):
        raise ValueError(f"multipliers must be > 0, for layers of {chosen}: got {multipliers}")
    sizes = {i: model[i].weight.numel() for i in chosen}
    budget = rate * sum(sizes.values())
    weights, errors = {}, {}
    parts, true, seen = [], calib, calib
    for i, part in enumerate(model):
        if i not in sizes:
            parts.append(part)
            true, seen = part(true), part(seen)
            continue
        left = {j: sizes[j] for j in sizes if j not in weights}
        share = budget * factors[i] / sum(factors[j] * left[j] for j in left)
        x, x_hat = (v.reshape(-1, part.in_features) for v in (true, seen if sequential else true))
        cross = cross_covariance(x, x_hat) if sequential and drift else None
        q = QUANTIZERS[method](
            part.weight,
            activation_covariance(x_hat, damping=damping),
            rate=min(max(share, RATE_LIMITS[0]), RATE_LIMITS[1]),
            rate_mode=rate_mode,
            rescale=rescale,
            sigma_cross=cross,
        )
        budget -= q.rate(rate_mode, overhead=False) * sizes[i]
        weights[i] = q
        y = x.double() @ part.weight.double().T
        y_hat = x_hat.double() @ q.dequantize().T
        errors[i] = float((y - y_hat).square().sum() / y.square().sum())
        parts.append(q.to_linear(part.bias))
        true, seen = part(true), parts[-1](seen)
    spent = sum(q.rate(rate_mode, overhead=False) * sizes[i] for i, q in weights.items())
    return QuantizedModel(nn.Sequential(*parts), weights, errors, spent / sum(sizes.values()))


# --------------------------------------------------------------------------------------------
# Data

COVARIANCES = ("identity", "toeplitz", "power", "diagonal")


def covariance(kind: str, n: int = 64, seed: int = 0) -> torch.Tensor:
    """A covariance to test on: (n, n) float64.

    Args:
        kind: "identity"; "toeplitz", 0.95^|i−j|; "power", eigenvalues i^−1.5 in random
            directions; "diagonal", 10^0 … 10^−4.
        n: inputs, >= 1.
        seed: picks the directions.

    Raises:
        ValueError: an unknown kind.
    """
    i = torch.arange(n, dtype=torch.float64)
    if kind == "identity":
        return torch.eye(n, dtype=torch.float64)
    if kind == "toeplitz":
        return 0.95 ** (i[:, None] - i).abs()
    if kind == "power":
        return _turned((i + 1) ** -1.5, seed)
    if kind == "diagonal":
        return torch.diag(10 ** torch.linspace(0, -4, n, dtype=torch.float64))
    raise ValueError(f"kind must be one of {', '.join(COVARIANCES)}: got {kind!r}")


def random_covariance(seed: int, n: int = 32) -> torch.Tensor:
    """Eigenvalues 10^u with u uniform on (−r, 0), r uniform on (0, 4), in random directions."""
    rng = np.random.default_rng((seed, 1))
    spread = rng.uniform(0, 4)
    return _turned(torch.from_numpy(10 ** rng.uniform(-spread, 0, n)), seed)


def _turned(eigvals: torch.Tensor, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(len(eigvals), len(eigvals), generator=g).double()).Q
    S = (Q * eigvals) @ Q.T
    return (S + S.T) / 2


def gaussian_weights(a: int, n: int, seed: int) -> torch.Tensor:
    """(a, n) float64 of N(0, 1)."""
    g = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(a, n, generator=g, dtype=torch.float64)


class DigitsNetwork(NamedTuple):
    """A trained network and its data.

    Attributes:
        model: 64-128-128-10, ReLU.
        train: (1200, 64) float32 images in [0, 1], which calibrate.
        test: (597, 64).
        labels: (597,) int64, of the test images.
    """

    model: nn.Sequential
    train: torch.Tensor
    test: torch.Tensor
    labels: torch.Tensor


@cache
def digits_network(seed: int = 0, *, epochs: int = 60) -> DigitsNetwork:
    """Train the digits network: AdamW at 1e-3, batches of 100. Kept for the rest of the process."""
    from sklearn.datasets import load_digits

    images, target = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    x = torch.from_numpy((images[order] / 16).astype(np.float32))
    y = torch.from_numpy(target[order].astype(np.int64))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )
    g = torch.Generator().manual_seed(seed)
    batches = [rows for _ in range(epochs) for rows in torch.randperm(1200, generator=g).split(100)]
    fit(
        model,
        lambda net, rows: F.cross_entropy(net(x[rows]), y[rows]),
        batches,
        torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    )
    model.requires_grad_(False).eval()
    return DigitsNetwork(model, x[:1200], x[1200:], y[1200:])


def output_kl(model: nn.Module, other: nn.Module, x: torch.Tensor) -> float:
    """Mean KL(model ‖ other) of the classes, in nats."""
    p, q = (F.log_softmax(net(x).double(), dim=1) for net in (model, other))
    return float((p.exp() * (p - q)).sum(dim=1).mean())


# --------------------------------------------------------------------------------------------
# Studies


def gap_run(kind: str, method: str, seed: int, *, R: float = 4.0, a: int = 8192) -> dict:
    """Gap of one method on one covariance at the step for R, without rescalers."""
    sigma, W = covariance(kind, seed=seed), gaussian_weights(a, 64, seed)
    q = QUANTIZERS[method](W, sigma, rate=R, rescale=False, search=False)
    L = torch.linalg.cholesky(sigma)
    return {
        "gap": gap(q, W, sigma),
        "pooled": gap(q, W, sigma, mode="pooled"),
        "predicted": predicted_gap(L, method),
        "rate": q.rate(overhead=False),
        "distortion": q.distortion(W, sigma),
    }


def family_run(seed: int, draws: int = 20) -> dict[str, float]:
    """Both methods on random covariances, each at a rate that is high for it."""
    ours, theirs, errors, conditions = [], [], [], []
    for draw in range(draws):
        sigma = random_covariance(1000 * seed + draw)
        lam = torch.linalg.eigvalsh(sigma)
        R = min(7.0, 3 + 0.5 * float(lam.log2().mean() - lam[0].log2()))
        W = gaussian_weights(8192, len(sigma), 1000 * seed + draw)
        L = torch.linalg.cholesky(sigma)
        water, gptq = (
            gap(QUANTIZERS[m](W, sigma, rate=R, rescale=False, search=False), W, sigma)
            for m in ("watersic", "gptq")
        )
        ours.append(water)
        theirs.append(gptq)
        errors.append(abs(gptq - predicted_gap(L, "gptq")))
        conditions.append(float(lam[-1] / lam[0]))
    return {
        "smallest": min(ours),
        "largest": max(ours),
        "gptq_largest": max(theirs),
        "gptq_error": max(errors),
        "ours": ours,
        "gptq": theirs,
        "conditions": conditions,
    }


def two_inputs_run(seed: int, k: int) -> dict[str, float]:
    """Gaps for Σ = diag(1, 10^−k) at a rate that is high for both inputs."""
    sigma = torch.diag(torch.tensor([1.0, 10.0**-k], dtype=torch.float64))
    W = gaussian_weights(65536, 2, seed)
    R = 4 + k / 4 * math.log2(10)
    made = {m: QUANTIZERS[m](W, sigma, rate=R, rescale=False, search=False) for m in METHODS[:2]}
    return {m: gap(q, W, sigma) for m, q in made.items()}


def low_rate_run(seed: int) -> dict[str, float]:
    """What gains inside the loop and rescalers are worth at one bit, on the power law.

    ``inside``: γ in the loop, then rescalers. ``after``: γ = 1, then rescalers.
    """
    sigma, W = covariance("power", seed=seed), gaussian_weights(1024, 64, seed)
    made = {
        "inside": watersic_quantize(W, sigma, rate=1.0, search=False),
        "after": watersic_quantize(W, sigma, rate=1.0, search=False, lmmse=False),
        "plain": watersic_quantize(W, sigma, rate=1.0, search=False, lmmse=False, rescale=False),
    }
    history = np.array(made["inside"].history)
    return {
        **{name: gap(q, W, sigma) for name, q in made.items()},
        "rise": float(np.diff(history).max() / history[0]),
        "last": float(history[-1] / history[0]),
    }


def _network_numbers(found: QuantizedModel, net: DigitsNetwork) -> dict[str, float]:
    first, second = found.errors.values()
    hits = (found.model(net.test).argmax(dim=1) == net.labels).double().mean()
    return {
        "first": first,
        "second": second,
        "kl": output_kl(net.model, found.model, net.test),
        "accuracy": float(hits),
        "rate": found.rate,
    }


def digits_run(
    method: str, bits: float, seed: int, *, mode: str = "per_column", rescale: bool = False
) -> dict[str, float]:
    """One method at one rate on the digits network: layers' errors, output KL, accuracy.

    ``bits`` a weight, in which scales are not counted.

    Layers are calibrated apart, on full-precision inputs. Without rescalers: with 128 columns the
    gains of rows cost an eighth of a bit, which the rate does not count. ``method`` "fixed" is
    GPTQ with 2^bits levels a row.
    """
    net = digits_network(seed)
    if method == "fixed":
        return _fixed_run(int(bits), net)
    found = quantize_model(
        net.model,
        net.train,
        rate=bits,
        method=method,
        sequential=False,
        rate_mode=mode,
        rescale=rescale,
    )
    return _network_numbers(found, net)


@torch.no_grad()
def _fixed_run(bits: int, net: DigitsNetwork) -> dict[str, float]:
    """Fixed-width GPTQ: every code takes the same bits."""
    parts, errors, x = [], {}, net.train
    for i, part in enumerate(net.model):
        quantised = part
        if i in (0, 2):
            sigma = activation_covariance(x, damping=1e-2).sigma
            weights = gptq_fixed(part.weight, sigma, bits).weights
            y = x.double() @ part.weight.double().T
            error = (x.double() @ (part.weight.double() - weights).T).square().sum()
            errors[i] = float(error / y.square().sum())
            quantised = nn.Linear(part.in_features, part.out_features)
            quantised.weight.copy_(weights)
            quantised.bias.copy_(part.bias)
        parts.append(quantised)
        x = part(x)
    found = QuantizedModel(nn.Sequential(*parts), {}, errors, float(bits))
    return _network_numbers(found, net)


def drift_run(method: str, rate: float, seed: int) -> dict[str, float]:
    """In sequence, with and without the target that corrects for drift: output KL."""
    net = digits_network(seed)
    made = {
        name: quantize_model(
            net.model, net.train, rate=rate, method=method, drift=drift, rescale=False
        )
        for name, drift in (("with", True), ("without", False))
    }
    kl = {name: output_kl(net.model, found.model, net.test) for name, found in made.items()}
    return {**kl, "ratio": kl["with"] / kl["without"]}


RATES = (1.0, 1.5, 2.0, 3.0)
RUNS = [
    *(f"{m} {r:g} {s}" for s in range(8) for m in METHODS for r in RATES),
    *(f"fixed {b} {s}" for s in range(8) for b in (1, 2, 3)),
    *(f"pooled-{m} {r:g} {s}" for s in range(8) for m in METHODS[:2] for r in (1.0, 1.5)),
    *(f"rescaled-{m} 1.5 {s}" for s in range(8) for m in METHODS),
    *(f"drift-{m} 1 {s}" for s in range(8) for m in METHODS[:2]),
]


def study_run(*, run: str) -> dict[str, float]:
    """One run of the digits study, by name."""
    name, rate, seed = run.split()
    kind, _, method = name.rpartition("-")
    if kind == "drift":
        return drift_run(method, float(rate), int(seed))
    mode = "pooled" if kind == "pooled" else "per_column"
    return digits_run(method, float(rate), int(seed), mode=mode, rescale=kind == "rescaled")


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=efficiency/watersic`` computes."""


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_waterfilling(fn: Callable) -> None:
    """Exercise 1: ``fn(eigvals, distortion)`` → (rate, theta).

    Raises:
        AssertionError: with the case that fails.
    """
    rng = np.random.default_rng(0)
    cases = [(np.array([4.0, 1.0]), 0.5), (np.array([4.0, 1.0]), 1.25)]
    for _ in range(30):
        lam = 10 ** rng.uniform(-3, 1, int(rng.integers(1, 20)))
        cases.append((lam, float(lam.mean() * rng.uniform(0.05, 0.95))))
    for lam, D in cases:
        rate, theta = (float(v) for v in fn(lam.copy(), D))
        level = float(np.minimum(theta, lam).mean())
        assert abs(level - D) <= 1e-4 * D, (
            f"eigenvalues {np.round(lam, 3)}, D = {D:.4g}: the mean of min(θ, λ) must be D, at "
            f"your θ = {theta:.5g} it is {level:.5g}"
        )
        wanted = float(np.maximum(0, 0.5 * np.log2(lam / theta)).mean())
        assert abs(rate - wanted) <= 1e-4, (
            f"eigenvalues {np.round(lam, 3)}, D = {D:.4g}: the rate at θ = {theta:.5g} is "
            f"{wanted:.5f} bits a component, you gave {rate:.5f}"
        )


def check_sic(fn: Callable) -> None:
    """Exercise 2: ``fn(W, L, alpha)`` → (codes, residual), without gains.

    Raises:
        AssertionError: with the case that fails.
    """
    rng = np.random.default_rng(1)
    for case in range(10):
        a, n = int(rng.integers(1, 30)), int(rng.integers(1, 12))
        W, M = rng.normal(size=(a, n)), rng.normal(size=(n, n + 3))
        L = np.linalg.cholesky(M @ M.T / n)
        alpha = rng.uniform(0.1, 1, n)
        codes, rest = (np.asarray(v, dtype=float) for v in fn(W.copy(), L.copy(), alpha.copy()))
        gap = np.abs((W - codes * alpha) @ L - rest).max()
        assert gap <= 1e-10, (
            f"problem {case}: (W − Ŵ) L must be the residual, they differ by {gap:.2g}"
        )
        bound = alpha * L.diagonal() / 2
        worst = (np.abs(rest) / bound).max()
        assert worst <= 1 + 1e-9, (
            f"problem {case}: column i of the residual must lie within α_i ℓ_i/2, it reaches "
            f"{worst:.2f} times that: process the last column first"
        )


def check_predicted_gap(fn: Callable) -> None:
    """Exercise 3: ``fn(L)`` is GPTQ's gap to the limit in bits, against measurements.

    Raises:
        AssertionError: with the case that fails.
    """
    for case in range(3):
        sigma = random_covariance(case, n=12)
        L = torch.linalg.cholesky(sigma)
        W = gaussian_weights(8192, 12, case)
        q = gptq_quantize(W, sigma, rate=7.0, rescale=False, search=False)
        measured, told = gap(q, W, sigma), float(fn(L.numpy().copy()))
        assert abs(measured - told) <= 0.02, (
            f"covariance {case}: measured {measured:.3f} bits above the limit, you said {told:.3f}"
        )


def check_rescaler(fn: Callable) -> None:
    """Exercise 4: ``fn(A, W, sigma, t)`` is the g that minimises the output error.

    Raises:
        AssertionError: with the derivative at the answer.
    """
    rng = np.random.default_rng(2)
    for case in range(10):
        a, n = int(rng.integers(8, 40)), int(rng.integers(1, 8))
        W, M = rng.normal(size=(a, n)), rng.normal(size=(n, n + 2))
        sigma, t = M @ M.T / n, rng.uniform(0.5, 1.5, a)
        A = np.round(2 * W) / 2 + 0.5 * (rng.random((a, n)) < 0.2)
        g = np.asarray(fn(A.copy(), W.copy(), sigma.copy(), t.copy()), dtype=float)
        P = t[:, None] * A
        slope = 2 * (((P * g - W) @ sigma) * P).sum(axis=0) / (a * n)
        worst = np.abs(slope).max()
        assert g.shape == (n,), f"problem {case}: g must be ({n},): got {g.shape}"
        assert worst < 1e-6, (
            f"problem {case}: the derivative of D by g must be 0 at your g, it reaches {worst:.2g}"
        )


def check_huffman(fn: Callable) -> None:
    """Exercise 5: ``fn(column)`` → {value: code word as a text of 0 and 1}, a prefix code.

    Raises:
        AssertionError: with the column that fails.
    """
    rng = np.random.default_rng(3)
    columns = [np.full(50, 7), np.array([0, 1, 1, 2, 2, 2, 2])]
    columns += [np.round(rng.normal(size=400) * s).astype(int) for s in (0.3, 1, 5)]
    for column in columns:
        words = {int(value): str(word) for value, word in fn(column.copy()).items()}
        values, counts = np.unique(column, return_counts=True)
        where = f"column with {len(values)} values"
        assert set(words) == set(values.tolist()), f"{where}: a word for each value is wanted"
        lengths = np.array([len(words[int(v)]) for v in values])
        mean = float((counts * lengths).sum() / counts.sum())
        if len(values) == 1:
            assert mean == 0, f"{where}: it needs no bits, you spend {mean:g} a value"
            continue
        kraft = float((2.0**-lengths).sum())
        assert abs(kraft - 1) < 1e-12, f"{where}: Σ 2^−length must be 1, it is {kraft:g}"
        p = counts / counts.sum()
        entropy = float(-(p * np.log2(p)).sum())
        assert entropy - 1e-9 <= mean < entropy + 1, (
            f"{where}: the mean length must lie in [H, H+1), H = {entropy:.3f}, it is {mean:.3f}"
        )
        best = float((counts * HuffmanCode.of(column).lengths.numpy()).sum() / counts.sum())
        assert mean <= best + 1e-9, (
            f"{where}: Huffman's code needs {best:.4f} bits a value, yours {mean:.4f}"
        )
        ordered = sorted(words.values())
        for first, second in pairwise(ordered):
            assert not second.startswith(first), f"{where}: {first} begins {second}"
        stream, back, at = "".join(words[int(v)] for v in column), [], 0
        reading = {word: value for value, word in words.items()}
        for end in range(1, len(stream) + 1):
            if stream[at:end] in reading:
                back.append(reading[stream[at:end]])
                at = end
        assert back == column.tolist(), f"{where}: the stream does not decode to the column"
