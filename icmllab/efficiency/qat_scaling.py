r"""Scaling Law for Quantization-Aware Training (arXiv 2505.14302).

Quantization-aware training (QAT) rounds weights and activations in the forward pass. The loss that
this adds, next to a twin trained without rounding, follows a law in model size N, training data D
and group size G, the number of entries that share a scale:

    L_QAT = L_full(N, D) + δ(N, D, G),    δ = k · D^γ_D · (log2 G)^γ_G / N^γ_N

Known from the abstract and from reviews: the form of the law, that larger models lose less and that
more data and coarser groups cost more, that activations dominate at four bits because of outliers
at the input of the second feed-forward matrix (FC2), and that eight bits there bring weights and
activations to similar errors. The quantiser's details, the teacher and its students, the fitting
protocol, the kernels and all numbers are this book's reconstruction.

Notation: q_max = 2^(b−1) − 1, a group's scale s = max|x|/q_max, x̂ = s·clip(round(x/s), −2^(b−1),
q_max).
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from scipy import optimize, special
from torch import nn
from torch.nn import functional as F

from icmllab.kernels.group_fake_quant import group_fake_quant, group_fake_quant_backward
from icmllab.kernels.w4a4_linear import w4a4_linear
from icmllab.toolbox import fit as training
from icmllab.toolbox import quantization as grids
from icmllab.toolbox import text
from icmllab.toolbox.gpt import GPT, GPTConfig, RMSNorm, rope
from icmllab.toolbox.quantization import (
    FAKE_BITS,
    absmax_scale,
    check_group_size,
    lsq_scale,
    pack_bits,
    quantize_symmetric,
    unpack_bits,
)
from icmllab.toolbox.schedules import cosine_schedule

__all__ = [
    "SHIPPED",
    "ActivationStats",
    "ChinchillaLaw",
    "FitReport",
    "LSQQuantizer",
    "QATLaw",
    "QuantLinear",
    "QuantSpec",
    "Student",
    "Students",
    "absmax_scale",
    "activation_stats",
    "average_bits",
    "check_assignment",
    "check_group_mse",
    "check_law_fit",
    "check_missing_term",
    "check_ste",
    "convert",
    "delta_table",
    "effective_parameters",
    "error_decomposition",
    "fake_quant",
    "fit_with_offset",
    "gaussian_group_mse",
    "gpt_run",
    "make_planted_table",
    "make_teacher",
    "pack_int4",
    "quantize_int4",
    "run_pairs",
    "simulated_group_mse",
    "study_run",
    "train_students",
    "unpack_int4",
    "w4a4_linear",
    "with_linear_layers",
]

# --------------------------------------------------------------------------------------------
# The quantiser


class _KernelFakeQuant(torch.autograd.Function):
    """The fused kernel with its straight-through gradient."""

    @staticmethod
    def forward(ctx, x, scale, bits, group_size, scale_grad):
        ctx.save_for_backward(x, scale)
        ctx.settings = bits, group_size, scale_grad
        return group_fake_quant(x, bits, group_size, scales=scale).values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        if scale is None:  # nothing is clipped, and the scale is a constant
            return grad, None, None, None, None
        bits, group_size, scale_grad = ctx.settings
        done = group_fake_quant_backward(x, scale, grad, bits, group_size, factor=scale_grad)
        return done.x, done.scales.to(scale.dtype), None, None, None


def fake_quant(
    x: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    dim: int = -1,
    scale: torch.Tensor | None = None,
    scale_grad: float = 1.0,
    backend: str = "auto",
) -> torch.Tensor:
    """x rounded to its grid and back, with a straight-through gradient.

    Without ``scale`` a group's is max|x|/q_max, a constant: all entries lie inside the grid, and
    the gradient passes. With it, an entry passes its gradient where −2^(b−1) <= x/s <= q_max, and
    ds sums g·(round(x/s) − x/s) inside, g·(−2^(b−1)) below, g·q_max above.

    Args:
        x: floating tensor.
        bits: 2 to 8; 16 gives x itself.
        group_size: divides ``x.shape[dim]``.
        dim: the dimension that is grouped: the one that is contracted, the last of a weight
            (out, in) and of activations (..., in).
        scale: (..., n/g, ...) > 0; it may need a gradient.
        scale_grad: factor of that gradient.
        backend: "torch" runs passes of PyTorch, "kernel" the fused op of the package (its plain
            reference off a GPU), "auto" the kernel for CUDA tensors.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: bits, sizes or a backend that do not fit; values that are not finite (not
            looked at by the kernel on a GPU, where such a group becomes NaN).
    """
    if backend not in ("auto", "torch", "kernel"):
        raise ValueError(f"backend must be 'auto', 'torch' or 'kernel': got {backend!r}")
    if bits != 16 and (backend == "kernel" or (backend == "auto" and x.is_cuda)):
        moved = x.movedim(dim, -1)
        given = None if scale is None else scale.movedim(dim, -1)
        done = _KernelFakeQuant.apply(moved, given, bits, group_size, scale_grad)
        return done.movedim(-1, dim)
    return grids.fake_quant(x, bits, group_size, dim=dim, scale=scale, scale_grad=scale_grad)


class LSQQuantizer(nn.Module):
    """A learned scale for each group of a weight (learned step size quantisation).

    s starts at 2·mean|w|/√q_max; its gradient is multiplied by 1/√(G·q_max). A scale that training
    drives through 0 is used by its magnitude.

    Args:
        weight: (..., in), what is going to be rounded.
        bits: 2 to 8.
        group_size: divides ``in``.
    """

    def __init__(self, weight: torch.Tensor, bits: int, group_size: int):
        super().__init__()
        self.bits, self.group_size = bits, group_size
        self.scale = nn.Parameter(lsq_scale(weight.detach(), bits, group_size))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight on its grid."""
        return _on_grid(weight, self.bits, self.group_size, scale=self.scale)


def _on_grid(
    x: torch.Tensor,
    bits: int,
    group_size: int | str,
    *,
    scale: torch.Tensor | None = None,
    lead: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """``x`` rounded along its last dimension; the first ``lead`` dimensions share no scale."""
    if bits == 16:
        return x
    if group_size == "tensor":
        flat = x.flatten(lead)
        return fake_quant(flat, bits, flat.shape[-1], backend=backend).view_as(x)
    group = x.shape[-1] if group_size == "row" else group_size
    if scale is None:
        return fake_quant(x, bits, group, backend=backend)
    factor = 1 / math.sqrt(group * ((1 << (bits - 1)) - 1))
    used = scale.abs().clamp_min(1e-8)
    return fake_quant(x, bits, group, scale=used, scale_grad=factor, backend=backend)


METHODS = ("absmax", "lsq")
_SETTINGS = ("w_bits", "a_bits", "group_size", "w_method")


@dataclass(frozen=True)
class QuantSpec:
    """What a linear layer rounds, and how.

    Attributes:
        w_bits: of weights: 2 to 8, or 16 for none.
        a_bits: of the layer's inputs.
        group_size: entries along the inputs that share a scale; "row" for a whole row (a weight's
            output channel, an activation's token), "tensor" for one scale in all.
        w_method: "absmax", or "lsq" for learned scales of weights.
        overrides: layer → settings that differ there, such as ``{"fc2": {"a_bits": 8}}``; a layer
            is named by its last or by its whole dotted name.

    Raises:
        ValueError: settings out of range.
    """

    w_bits: int = 4
    a_bits: int = 4
    group_size: int | str = 32
    w_method: str = "absmax"
    overrides: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("w_bits", "a_bits"):
            value = getattr(self, name)
            if isinstance(value, bool) or value not in FAKE_BITS:
                allowed = ", ".join(map(str, FAKE_BITS))
                raise ValueError(f"{name} must be one of {allowed}: got {value!r}")
        group = self.group_size
        named = group in ("row", "tensor") if isinstance(group, str) else False
        if not named and (isinstance(group, str | bool) or group != int(group) or group < 1):
            raise ValueError(f"group_size must be >= 1, 'row' or 'tensor': got {group!r}")
        if self.w_method not in METHODS:
            raise ValueError(f"w_method must be one of {METHODS}: got {self.w_method!r}")
        if self.w_method == "lsq" and isinstance(group, str):
            raise ValueError(f"w_method 'lsq' needs a group_size in numbers: got {group!r}")
        for layer, settings in self.overrides.items():
            unknown = set(settings) - set(_SETTINGS)
            if unknown:
                raise ValueError(
                    f"overrides[{layer!r}] must name {', '.join(_SETTINGS)}: got {min(unknown)!r}"
                )
            self.rule(layer)  # checks the values

    def rule(self, layer: str) -> "QuantSpec":
        """The settings of one layer, without overrides."""
        last = layer.rsplit(".", 1)[-1]
        changes = {**self.overrides.get(last, {}), **self.overrides.get(layer, {})}
        return replace(self, overrides={}, **changes)

    @property
    def name(self) -> str:
        """Such as "W4A4" or "W4A4 fc2:A8"; the group size is left out."""
        words = [f"W{self.w_bits}A{self.a_bits}"]
        if self.w_method != "absmax":
            words.append(self.w_method)
        short = {"w_bits": "W", "a_bits": "A", "group_size": "G", "w_method": ""}
        for layer, settings in self.overrides.items():
            words.append(f"{layer}:" + "".join(f"{short[k]}{v}" for k, v in settings.items()))
        return " ".join(words)


FULL = QuantSpec(16, 16)
"""No rounding at all."""


class QuantLinear(nn.Module):
    """A linear layer that rounds its weight and its input in the forward pass.

    The master weight stays as it is; the optimiser sees it alone.

    Args:
        in_features, out_features: sizes.
        spec: what to round; overrides do not count here, :func:`convert` resolves them.
        bias: whether there is one; it is never rounded.

    Raises:
        ValueError: a group size that does not divide ``in_features``.
    """

    def __init__(self, in_features: int, out_features: int, spec: QuantSpec, bias: bool = False):
        super().__init__()
        if not isinstance(spec.group_size, str):
            check_group_size(in_features, spec.group_size, of="in_features")
        self.in_features, self.out_features = in_features, out_features
        self.spec = replace(spec, overrides={})
        plain = nn.Linear(in_features, out_features, bias=bias)
        self.weight, self.bias = plain.weight, plain.bias
        self.w_quant = None
        self._start_scales()

    def _start_scales(self) -> None:
        if self.spec.w_method == "lsq" and self.spec.w_bits != 16:
            self.w_quant = LSQQuantizer(self.weight, self.spec.w_bits, self.spec.group_size)

    @classmethod
    def of(cls, linear: nn.Linear, spec: QuantSpec) -> "QuantLinear":
        """The same weights, rounded as ``spec`` says."""
        made = cls(linear.in_features, linear.out_features, spec, bias=linear.bias is not None)
        made.weight, made.bias = linear.weight, linear.bias
        made._start_scales()
        return made

    def rounded_weight(self) -> torch.Tensor:
        """(out, in), the weight that the forward pass multiplies with."""
        if self.w_quant is not None:
            return self.w_quant(self.weight)
        return _on_grid(self.weight, self.spec.w_bits, self.spec.group_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) → (..., out)."""
        rounded = _on_grid(x, self.spec.a_bits, self.spec.group_size)
        return F.linear(rounded, self.rounded_weight(), self.bias)

    @torch.no_grad()
    def packed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same output from 4-bit codes, by :func:`w4a4_linear`: (..., out) float16 or float64.

        Raises:
            ValueError: not a W4A4 layer with AbsMax scales and groups given in numbers.
        """
        s = self.spec
        if (s.w_bits, s.a_bits, s.w_method) != (4, 4, "absmax") or isinstance(s.group_size, str):
            raise ValueError(
                f"spec must be W4A4 with AbsMax scales and a group_size in numbers: got {s}"
            )
        codes, sx = quantize_int4(x.flatten(0, -2), s.group_size)
        y = w4a4_linear(codes, sx, *quantize_int4(self.weight, s.group_size))
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.unflatten(0, x.shape[:-1])

    def extra_repr(self) -> str:
        """Sizes and what is rounded."""
        return (
            f"{self.in_features}, {self.out_features}, {self.spec.name}, G={self.spec.group_size}"
        )


def convert(
    model: nn.Module, spec: QuantSpec, *, skip: Sequence[str] = ("lm_head", "embed")
) -> nn.Module:
    """A copy of ``model`` whose linear layers round.

    Args:
        model: any module with ``nn.Linear`` layers.
        spec: settings; overrides are resolved by the layers' names.
        skip: parts of dotted names whose layers stay as they are.

    Raises:
        ValueError: no layer to convert, a group size that divides a layer's inputs not, or an
            override of a layer that there is not.
    """
    model = copy.deepcopy(model)
    found = []
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            whole = f"{name}.{child_name}" if name else child_name
            if type(child) is not nn.Linear or set(whole.split(".")) & set(skip):
                continue
            found.append(whole)
            setattr(module, child_name, QuantLinear.of(child, spec.rule(whole)))
    if not found:
        raise ValueError("model must have linear layers besides those to skip: it has none")
    known = {*found, *(name.rsplit(".", 1)[-1] for name in found)}
    missing = sorted(set(spec.overrides) - known)
    if missing:
        raise ValueError(f"overrides must name layers of the model: {missing[0]!r} is none")
    return model


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Codes −8 … 7, two a byte, the even one in the low half: (..., n) → (..., n/2) uint8."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes must have an even last dimension: got {codes.shape[-1]}")
    if codes.numel() and (int(codes.min()) < -8 or int(codes.max()) > 7):
        raise ValueError(f"codes must be in [-8, 7]: got {int(codes.min())}, {int(codes.max())}")
    return pack_bits(codes.long() & 15, 4)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Undo :func:`pack_int4`: (..., n/2) uint8 → (..., n) int8."""
    return unpack_bits(packed, 4, signed=True)


class Int4(NamedTuple):
    """Rows in four bits: ``packed`` (m, n/2) uint8, ``scales`` (m, n/G)."""

    packed: torch.Tensor
    scales: torch.Tensor


def quantize_int4(x: torch.Tensor, group_size: int) -> Int4:
    """Rows (m, n) as packed 4-bit codes with AbsMax scales, for :func:`w4a4_linear`."""
    made = quantize_symmetric(x, 4, group_size)
    return Int4(pack_int4(made.codes), made.scale)


def average_bits(spec: QuantSpec, layers: Sequence[str] = ("gate", "up", "fc2")) -> float:
    """Mean bits of the two numbers that a multiplication takes, layers having equally many."""
    rules = [spec.rule(layer) for layer in layers]
    return sum(r.w_bits + r.a_bits for r in rules) / (2 * len(rules))


# --------------------------------------------------------------------------------------------
# Why log2 G: the noise of a group


def gaussian_group_mse(bits: int, group_size: int) -> float:
    r"""Expected squared error of a number N(0, 1) in a group with AbsMax scale.

    The largest of the group is exact, each other one carries s²/12: (1 − 1/G) E[M²]/(12 q_max²)
    with E[M²] = ∫₀^∞ 2t (1 − (2Φ(t) − 1)^G) dt. It takes the error as uniform over a step, so that
    it is for 3 bits and more; 16 bits give 0.

    Raises:
        ValueError: bits or a group size that do not exist.
    """
    if isinstance(bits, bool) or bits not in FAKE_BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, FAKE_BITS))}: got {bits}")
    if isinstance(group_size, bool) or group_size != int(group_size) or group_size < 1:
        raise ValueError(f"group_size must be a whole number >= 1: got {group_size}")
    if bits == 16 or group_size == 1:
        return 0.0
    top = (1 << (bits - 1)) - 1
    return (1 - 1 / group_size) * _max_square(int(group_size)) / (12 * top**2)


@lru_cache(maxsize=256)
def _max_square(group_size: int) -> float:
    """E[M²] of the largest magnitude among ``group_size`` standard normals."""
    t, weight = np.polynomial.legendre.leggauss(400)
    t, weight = 6.5 * (t + 1), 6.5 * weight  # 0 to 13, beyond which nothing is left
    # 1 − (1 − p)^G with p = P(|x| > t), without cancellation
    tail = -np.expm1(group_size * np.log1p(-special.erfc(t / math.sqrt(2)).clip(max=1 - 1e-16)))
    return float((weight * 2 * t * tail).sum())


def simulated_group_mse(bits: int, group_size: int, seed: int, *, n: int = 1 << 20) -> float:
    """The same, measured on about ``n`` draws."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(max(1, n // group_size), group_size, generator=g, dtype=torch.float64)
    return float((fake_quant(x, bits, group_size) - x).square().mean())


# --------------------------------------------------------------------------------------------
# Laws


def _columns(table: object, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Columns of a DataFrame, a mapping of sequences, or a list of rows, as float64."""
    if not hasattr(table, "keys"):
        rows = list(table)
        if not rows:
            raise ValueError("table must hold rows: got none")
        table = {name: [row[name] for row in rows] for name in names if name in rows[0]}
    missing = [name for name in names if name not in table]
    if missing:
        raise ValueError(f"table must have the columns {', '.join(names)}: lacks {missing[0]!r}")
    made = {name: np.asarray(table[name], dtype=np.float64) for name in names}
    for name, values in made.items():
        if values.ndim != 1 or not np.isfinite(values).all():
            raise ValueError(f"table[{name!r}] must be a vector of finite numbers")
    for name in set(names) & {"N", "D", "G"}:
        if not (made[name] > 0).all():
            raise ValueError(f"table[{name!r}] must be > 0")
    return made


class FitReport(NamedTuple):
    """A fitted law and how well it fits.

    Attributes:
        law: what was fitted.
        r2: share of the variance explained, of ln δ, or of δ where the fit was in δ itself.
        mape: mean |δ̂/δ − 1|; mean |δ̂ − δ| over mean |δ| where the fit was in δ itself.
        ci: parameter → (low, high), 95 % by resampling rows.
        left_out: size N → the same error as ``mape`` on its rows, by a fit without them.
        residuals: (n,) ln δ − ln δ̂, or (δ − δ̂)/σ.
        in_logs: whether the fit was of ln δ.
    """

    law: object
    r2: float
    mape: float
    ci: dict[str, tuple[float, float]]
    left_out: dict[float, float]
    residuals: np.ndarray
    in_logs: bool


_TERMS = {"N": "gamma_n", "D": "gamma_d", "G": "gamma_g"}


@dataclass(frozen=True)
class QATLaw:
    """δ = k · D^γ_D · (log2 G)^γ_G / N^γ_N, the loss that rounding adds.

    Attributes:
        k: > 0.
        gamma_n, gamma_d, gamma_g: exponents; 0 leaves a term out.
    """

    k: float
    gamma_n: float = 0.0
    gamma_d: float = 0.0
    gamma_g: float = 0.0

    def predict(self, N, D, G) -> np.ndarray:
        """δ for arrays that broadcast; G = 1 gives 0, a group of one being exact.

        Raises:
            ValueError: N or D not positive, or G below 1.
        """
        N, D, G = (np.asarray(v, dtype=np.float64) for v in (N, D, G))
        if not ((N > 0).all() and (D > 0).all() and (G >= 1).all()):
            raise ValueError("N and D must be > 0 and G >= 1")
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = (
                math.log(self.k)
                + self.gamma_d * np.log(D)
                + self.gamma_g * np.log(np.log2(np.maximum(G, 1 + 1e-9)))
                - self.gamma_n * np.log(N)
            )
        return np.where(G == 1, 0.0, np.exp(logs))

    @classmethod
    def fit(
        cls,
        table: object,
        *,
        loss: str = "huber",
        n_restarts: int = 20,
        seed: int = 0,
        terms: Sequence[str] = ("N", "D", "G"),
        n_boot: int = 200,
    ) -> FitReport:
        """Fit the law to measured δ.

        Σ Huber_0.001(ln δ̂ − ln δ) is minimised by L-BFGS from the least-squares solution and from
        seeded perturbations of it. Where some δ is at most twice σ, the standard deviation over
        seeds, logarithms would favour the rows that noise made small: the fit is then of δ itself,
        Σ Huber_0.01((δ̂ − δ)/σ). Least squares over σ² is not robust: a few wrong rows move it.

        Args:
            table: columns N, D, G, delta and, if rows are seeds, seed.
            loss: "huber" or "ols" (least squares of the logarithms).
            n_restarts: perturbed starts.
            seed: of perturbations and resampling.
            terms: which of N, D, G are in the law; without a term its exponent is 0.
            n_boot: resamplings for the intervals; 0 leaves them out.

        Raises:
            ValueError: fewer rows than parameters, a column that a term needs and that does not
                vary, G below 2, δ <= 0 with "ols", or unknown options.

        Warns:
            UserWarning: some δ is <= 0 and σ is unknown; the median |δ| takes its place.
        """
        if loss not in ("huber", "ols"):
            raise ValueError(f"loss must be 'huber' or 'ols': got {loss!r}")
        if not set(terms) <= set(_TERMS) or len(set(terms)) != len(terms):
            raise ValueError(f"terms must be different ones of N, D, G: got {tuple(terms)}")
        data = _columns(table, ("N", "D", "G", "delta"))
        delta, n = data["delta"], len(data["delta"])
        if n < len(terms) + 1:
            raise ValueError(
                f"table must have as many rows as the law has parameters, {len(terms) + 1}: got {n}"
            )
        design = _Design.of(data, terms)
        sigma = _spread(table, data)
        if loss == "ols" and not (delta > 0).all():
            raise ValueError("loss 'ols' needs every delta > 0: use 'huber'")
        in_logs = bool((delta > 0).all()) if sigma is None else bool((delta > 2 * sigma).all())
        in_logs = in_logs or loss == "ols"
        if not in_logs and sigma is None:
            sigma = float(np.median(np.abs(delta)))
            warnings.warn(
                "some delta is <= 0 and the spread over seeds is unknown: fitted in delta itself, "
                f"in units of its median magnitude, {sigma:.2g}",
                stacklevel=2,
            )
        solve = _Solver(loss, in_logs, sigma)
        rng = np.random.default_rng(seed)
        theta = solve(design.X, delta, rng, n_restarts)
        ci = {}
        if n_boot:
            draws = np.array([design.law(t) for t in solve.resample(design, delta, rng, n_boot)])
            low, high = np.quantile(draws, (0.025, 0.975), axis=0)
            names = ("k", "gamma_n", "gamma_d", "gamma_g")
            kept = {"k", *(_TERMS[t] for t in terms)}
            ci = {
                m: (float(a), float(b))
                for m, a, b in zip(names, low, high, strict=True)
                if m in kept
            }
        left_out = {}
        for size in np.unique(data["N"]):
            out = data["N"] == size
            X = design.X[~out]
            if out.all() or np.linalg.matrix_rank(X) < X.shape[1]:
                continue
            other = solve(X, delta[~out], rng, 0)
            left_out[float(size)] = solve.error(design.X[out], delta[out], other)
        return FitReport(
            cls(*design.law(theta)),
            solve.r2(design.X, delta, theta),
            solve.error(design.X, delta, theta),
            ci,
            left_out,
            solve.residuals(design.X, delta, theta),
            in_logs,
        )


def _spread(table: object, data: dict[str, np.ndarray]) -> float | None:
    """σ over seeds, pooled over settings that have three or more; None without any."""
    has = "seed" in table if hasattr(table, "keys") else "seed" in next(iter(table))
    if not has:
        return None
    settings = np.stack([data[name] for name in ("N", "D", "G")], axis=1)
    _, which = np.unique(settings, axis=0, return_inverse=True)
    total = degrees = 0.0
    for group in range(which.max() + 1):
        values = data["delta"][which.ravel() == group]
        if len(values) >= 3:
            total += ((values - values.mean()) ** 2).sum()
            degrees += len(values) - 1
    return math.sqrt(total / degrees) if degrees and total > 0 else None


@dataclass(frozen=True)
class _Design:
    """Centred columns of the law in logarithms: ln δ = X θ."""

    X: np.ndarray
    means: np.ndarray
    terms: tuple[str, ...]

    @classmethod
    def of(cls, data: dict[str, np.ndarray], terms: Sequence[str]) -> "_Design":
        columns = []
        for term in terms:
            if term == "G" and not (data["G"] >= 2).all():
                raise ValueError("table['G'] must be >= 2 to take log2 G to a power")
            column = np.log(np.log2(data["G"])) if term == "G" else np.log(data[term])
            if np.ptp(column) < 1e-12:
                raise ValueError(f"table[{term!r}] must vary for the law to have its exponent")
            columns.append(-column if term == "N" else column)
        n = len(data["delta"])
        raw = np.stack(columns, axis=1) if columns else np.zeros((n, 0))
        means = raw.mean(axis=0)
        X = np.column_stack([np.ones(n), raw - means])
        if np.linalg.matrix_rank(X) < X.shape[1]:
            raise ValueError(f"table must vary {', '.join(terms)} independently of each other")
        return cls(X, means, tuple(terms))

    def law(self, theta: np.ndarray) -> tuple[float, float, float, float]:
        """(k, γ_N, γ_D, γ_G) of centred parameters."""
        powers = dict(zip(self.terms, theta[1:], strict=True))
        k = math.exp(theta[0] - float(self.means @ theta[1:]))
        return (k, *(float(powers.get(t, 0.0)) for t in ("N", "D", "G")))


@dataclass(frozen=True)
class _Solver:
    """Minimises the misfit of exp(X θ)."""

    loss: str
    in_logs: bool
    sigma: float | None

    def __call__(
        self, X: np.ndarray, delta: np.ndarray, rng: np.random.Generator, n_restarts: int
    ) -> np.ndarray:
        return self._best(X, delta, [self._start(X, delta)], rng, n_restarts)

    def _start(self, X: np.ndarray, delta: np.ndarray) -> np.ndarray:
        up = delta > 0
        if up.sum() >= X.shape[1] and np.linalg.matrix_rank(X[up]) == X.shape[1]:
            return np.linalg.lstsq(X[up], np.log(delta[up]), rcond=None)[0]
        start = np.zeros(X.shape[1])
        start[0] = math.log(np.median(np.abs(delta)) + 1e-12)
        return start

    def _best(self, X, delta, starts, rng, n_restarts) -> np.ndarray:
        if self.loss == "ols":
            return starts[0]
        first = starts[0]
        starts = [*starts, *(first + 0.1 * rng.standard_normal((n_restarts, len(first))))]
        runs = [
            optimize.minimize(self._misfit, s, args=(X, delta), jac=True, method="L-BFGS-B")
            for s in starts
        ]
        return min(runs, key=lambda run: run.fun).x

    def _misfit(self, theta, X, delta) -> tuple[float, np.ndarray]:
        """Huber sum over its width, and its gradient."""
        line = (X @ theta).clip(-80, 80)
        if self.in_logs:
            r, slope, width = line - np.log(delta), 1.0, 1e-3
        else:
            made = np.exp(line)
            r, slope, width = (made - delta) / self.sigma, made / self.sigma, 1e-2
        small = np.abs(r) <= width
        value = np.where(small, r**2 / (2 * width), np.abs(r) - width / 2).sum()
        return float(value), X.T @ (np.clip(r / width, -1, 1) * slope)

    def resample(self, design: _Design, delta, rng, count: int) -> list[np.ndarray]:
        """Fits to rows drawn with replacement; draws that leave an exponent open are drawn anew."""
        found = []
        while len(found) < count:
            rows = rng.integers(len(delta), size=len(delta))
            X = design.X[rows]
            if np.linalg.matrix_rank(X) == X.shape[1]:
                found.append(self(X, delta[rows], rng, 0))
        return found

    def residuals(self, X, delta, theta) -> np.ndarray:
        if self.in_logs:
            return np.log(delta) - X @ theta
        return (delta - np.exp(X @ theta)) / self.sigma

    def r2(self, X, delta, theta) -> float:
        target = np.log(delta) if self.in_logs else delta / self.sigma
        total = ((target - target.mean()) ** 2).sum()
        return float(1 - (self.residuals(X, delta, theta) ** 2).sum() / total) if total else 0.0

    def error(self, X, delta, theta) -> float:
        made = np.exp(X @ theta)
        if self.in_logs:
            return float(np.abs(made / delta - 1).mean())
        return float(np.abs(made - delta).mean() / np.abs(delta).mean())


class OffsetFit(NamedTuple):
    """δ = c + the law: ``offset`` c, ``law``, and ``mape``."""

    offset: float
    law: QATLaw
    mape: float


def fit_with_offset(table: object) -> OffsetFit:
    """An additive law, δ = c + k·D^γ_D·(log2 G)^γ_G/N^γ_N: does a constant help?

    Relative residuals under a Huber loss of width 0.01, from the law without a constant.

    Raises:
        ValueError: as in :meth:`QATLaw.fit`; fewer than five rows, or δ <= 0.
    """
    data = _columns(table, ("N", "D", "G", "delta"))
    if len(data["delta"]) < 5:
        raise ValueError(f"table must have 5 rows or more: got {len(data['delta'])}")
    start = QATLaw.fit(table, loss="ols", n_boot=0).law
    design = _Design.of(data, ("N", "D", "G"))
    delta = data["delta"]
    unit = float(np.median(delta))
    powers = np.array([start.gamma_n, start.gamma_d, start.gamma_g])
    first = [0.0, math.log(start.k) + float(design.means @ powers), *powers]

    def residuals(p: np.ndarray) -> np.ndarray:
        return (p[0] * unit + np.exp((design.X @ p[1:]).clip(-80, 80))) / delta - 1

    best = optimize.least_squares(residuals, first, loss="huber", f_scale=0.01)
    law = QATLaw(*design.law(best.x[1:]))
    return OffsetFit(float(best.x[0] * unit), law, float(np.abs(residuals(best.x)).mean()))


@dataclass(frozen=True)
class ChinchillaLaw:
    """L(N, D) = A/N^α + B/D^β + E, the loss without rounding."""

    A: float
    alpha: float
    B: float
    beta: float
    E: float = 0.0

    def predict(self, N, D) -> np.ndarray:
        """L for arrays that broadcast."""
        N, D = (np.asarray(v, dtype=np.float64) for v in (N, D))
        return self.A / N**self.alpha + self.B / D**self.beta + self.E

    @classmethod
    def fit(
        cls, table: object, *, irreducible: float | None = None, n_restarts: int = 8, seed: int = 0
    ) -> "ChinchillaLaw":
        """Minimise Σ Huber_0.001(ln L̂ − ln L) by L-BFGS from seeded starts.

        Args:
            table: columns N, D, loss (> 0).
            irreducible: E, if known: 0 for a loss from which the entropy was taken.
            n_restarts: starts besides the first.
            seed: of the starts.

        Raises:
            ValueError: fewer rows than parameters, or a loss that is not positive.
        """
        data = _columns(table, ("N", "D", "loss"))
        free = 5 if irreducible is None else 4
        if len(data["loss"]) < free:
            raise ValueError(f"table must have {free} rows or more: got {len(data['loss'])}")
        if not (data["loss"] > 0).all():
            raise ValueError("table['loss'] must be > 0")
        y = np.log(data["loss"])
        n, d = (np.log(data[c]) - np.log(data[c]).mean() for c in ("N", "D"))
        fixed = -np.inf if not irreducible else math.log(irreducible)

        def misfit(p: np.ndarray) -> tuple[float, np.ndarray]:
            last = p[4] if irreducible is None else fixed
            parts = np.stack([p[0] - p[1] * n, p[2] - p[3] * d, np.full_like(n, last)])
            r = special.logsumexp(parts, axis=0) - y
            share = special.softmax(parts, axis=0)
            value = np.where(np.abs(r) <= 1e-3, r**2 / 2e-3, np.abs(r) - 5e-4).sum()
            slope = np.clip(r / 1e-3, -1, 1)
            grad = [slope @ share[0], -(slope * n) @ share[0], slope @ share[1]]
            grad += [-(slope * d) @ share[1], slope @ share[2]]
            return float(value), np.array(grad[:free])

        rng = np.random.default_rng(seed)
        level = y.min() - math.log(3)
        first = np.array([y.mean() - 1, 0.5, y.mean() - 1, 0.5, level])[:free]
        starts = [first, *(first + rng.standard_normal((n_restarts, free)))]
        bounds = [(None, None), (0, 5), (None, None), (0, 5), (None, None)][:free]
        runs = [
            optimize.minimize(misfit, s, jac=True, method="L-BFGS-B", bounds=bounds) for s in starts
        ]
        p = min(runs, key=lambda run: run.fun).x
        mean = {c: float(np.log(data[c]).mean()) for c in ("N", "D")}
        E = math.exp(p[4]) if irreducible is None else float(irreducible)
        A = math.exp(p[0] + p[1] * mean["N"])
        return cls(A, float(p[1]), math.exp(p[2] + p[3] * mean["D"]), float(p[3]), E)


def effective_parameters(law: QATLaw, chinchilla: ChinchillaLaw, N, D, G) -> np.ndarray:
    """The size without rounding that has the loss of N rounded: L_full(N_eff, D) = L_QAT(N, D, G).

    In closed form: N_eff = (A / (A/N^α + δ))^(1/α).
    """
    N = np.asarray(N, dtype=np.float64)
    own = chinchilla.A / N**chinchilla.alpha
    return (chinchilla.A / (own + law.predict(N, D, G))) ** (1 / chinchilla.alpha)


PLANTED = QATLaw(0.16, 0.23, 0.08, 0.35)
"""An invented law: its exponents are not the paper's."""


def make_planted_table(seed: int, *, noise: float = 0.05) -> dict[str, np.ndarray]:
    """The table of a known law with lognormal noise, 64 settings in shuffled order.

    N in {1, 4, 16, 64}·10⁶, D in {1, 4, 16, 64}·10⁸, G in {8, 32, 128, 512}.
    """
    rng = np.random.default_rng(seed)
    sizes = np.array([1.0, 4.0, 16.0, 64.0])
    N, D, G = np.meshgrid(1e6 * sizes, 1e8 * sizes, np.array([8.0, 32.0, 128.0, 512.0]))
    table = {"N": N.ravel(), "D": D.ravel(), "G": G.ravel()}
    made = PLANTED.predict(**table) * np.exp(noise * rng.standard_normal(N.size))
    order = rng.permutation(N.size)
    return {name: column[order] for name, column in {**table, "delta": made}.items()}


def error_decomposition(table: object, *, mixed: str = "") -> object:
    """Weights against activations, in the mean over seeds.

    Args:
        table: rows with spec, N, D, G and delta, as :func:`run_pairs` gives.
        mixed: what the names of the activation parts end in, such as " fc2:A8".

    Returns:
        A DataFrame with N, D, G, ``weights`` (W4A16), ``activations`` (W16A4), ``both`` (W4A4),
        ``interaction`` = both − weights − activations, and ``ratio`` = activations / weights.

    Raises:
        ValueError: a setting without one of the three.
    """
    import pandas as pd

    frame = pd.DataFrame(table)
    mean = frame.groupby(["N", "D", "G", "spec"]).delta.mean().unstack("spec")
    parts = {"weights": "W4A16", "activations": f"W16A4{mixed}", "both": f"W4A4{mixed}"}
    missing = [name for name in parts.values() if name not in mean]
    if missing:
        raise ValueError(f"table must have rows of {', '.join(parts.values())}: lacks {missing[0]}")
    out = mean[list(parts.values())].set_axis(list(parts), axis=1).dropna()
    if out.empty:
        raise ValueError(f"table must have a setting with all of {', '.join(parts.values())}")
    out["interaction"] = out.both - out.weights - out.activations
    out["ratio"] = out.activations / out.weights
    return out.reset_index()


# --------------------------------------------------------------------------------------------
# Teacher and students

N_INPUTS, N_CLASSES, BATCH = 32, 10, 128
LAYERS = ("gate", "up", "fc2")


class Teacher(NamedTuple):
    """Logits 2·tanh(x T1) T2: ``first`` (32, n_hidden), ``second`` (n_hidden, 10), float64."""

    first: torch.Tensor
    second: torch.Tensor

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., 32) → (..., 10)."""
        return 2 * torch.tanh(x @ self.first) @ self.second


def make_teacher(n_hidden: int = 8, seed: int = 42, *, gain: float = 2.0) -> Teacher:
    """A teacher with T1 = 2·N/√32 and T2 = gain·N/√n_hidden, entries N standard normal.

    Args:
        n_hidden: 8 can nearly be learnt by the students; 64 cannot.
        seed: of the teacher.
        gain: of the second matrix.
    """
    if n_hidden < 1:
        raise ValueError(f"n_hidden must be >= 1: got {n_hidden}")
    g = torch.Generator().manual_seed(seed)
    first = torch.randn(N_INPUTS, n_hidden, generator=g, dtype=torch.float64)
    second = torch.randn(n_hidden, N_CLASSES, generator=g, dtype=torch.float64)
    return Teacher(2 * first / math.sqrt(N_INPUTS), gain * second / math.sqrt(n_hidden))


class _StudentBlock(nn.Module):
    """Norm, SwiGLU, add."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.fc2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        z = self.norm(h)
        return h + self.fc2(F.silu(self.gate(z)) * self.up(z))


class Student(nn.Module):
    """Two residual SwiGLU blocks between an embedding and a head; (..., 32) → (..., 10).

    Args:
        width: d; the blocks hold 12 d² weights.
        seed: of the start, U(±1/√fan_in) everywhere; the same for every precision.
    """

    def __init__(self, width: int, *, seed: int = 0):
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be >= 1: got {width}")
        self.embed = nn.Linear(N_INPUTS, width)
        self.blocks = nn.ModuleList(_StudentBlock(width) for _ in range(2))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, N_CLASSES)
        self.double()
        g = torch.Generator().manual_seed(1_000_003 * seed + 17)
        with torch.no_grad():
            for layer in (m for m in self.modules() if isinstance(m, nn.Linear)):
                edge = 1 / math.sqrt(layer.in_features)
                for p in layer.parameters():
                    p.copy_(edge * (2 * torch.rand(p.shape, generator=g, dtype=p.dtype) - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.lm_head(self.norm(h))


def _rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * gain[:, None]


def _rounded_weights(
    p: Mapping[str, torch.Tensor], rules: Mapping[str, QuantSpec]
) -> dict[str, torch.Tensor]:
    """The weights (S, out, in) that are multiplied with; what shares a grid is rounded at once."""
    out, alike = {}, {}
    for name, rule in rules.items():
        w, scale = p[f"{name}.weight"], p.get(f"{name}.w_quant.scale")
        if rule.w_bits == 16 or scale is not None or isinstance(rule.group_size, str):
            out[name] = _on_grid(w, rule.w_bits, rule.group_size, scale=scale, lead=1)
        else:
            alike.setdefault((rule.w_bits, rule.group_size), []).append(name)
    for (bits, group), names in alike.items():
        shapes = [p[f"{name}.weight"].shape for name in names]
        flat = torch.cat([p[f"{name}.weight"].flatten(1) for name in names], dim=1)
        parts = fake_quant(flat, bits, group).split([s[1] * s[2] for s in shapes], dim=1)
        out |= {n: w.view(s) for n, w, s in zip(names, parts, shapes, strict=True)}
    return out


def _batched_logits(
    p: Mapping[str, torch.Tensor], rules: Mapping[str, QuantSpec], x: torch.Tensor
) -> torch.Tensor:
    """Students whose parameters have a first dimension of seeds: x (S, n, 32) → (S, n, 10)."""

    weights = _rounded_weights(p, rules)

    def rounded(v: torch.Tensor, name: str) -> torch.Tensor:
        return _on_grid(v, rules[name].a_bits, rules[name].group_size, lead=1)

    h = torch.baddbmm(p["embed.bias"][:, None], x, p["embed.weight"].mT)
    for block in ("blocks.0", "blocks.1"):
        z = _rms(h, p[f"{block}.norm.gain"])
        gate, up = (f"{block}.{layer}" for layer in ("gate", "up"))
        seen = rounded(z, gate)
        same = (rules[gate].a_bits, rules[gate].group_size) == (
            rules[up].a_bits,
            rules[up].group_size,
        )
        seen_up = seen if same else rounded(z, up)
        a = F.silu(seen @ weights[gate].mT) * (seen_up @ weights[up].mT)
        h = h + rounded(a, f"{block}.fc2") @ weights[f"{block}.fc2"].mT
    z = _rms(h, p["norm.gain"])
    return torch.baddbmm(p["lm_head.bias"][:, None], z, p["lm_head.weight"].mT)


def _rules(spec: QuantSpec) -> dict[str, QuantSpec]:
    names = [f"blocks.{i}.{layer}" for i in range(2) for layer in LAYERS]
    unknown = sorted(set(spec.overrides) - {*LAYERS, *names})
    if unknown:
        raise ValueError(f"overrides must name gate, up or fc2: got {unknown[0]!r}")
    return {name: spec.rule(name) for name in names}


def _cross_entropy(logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """(S, n, 10) and probabilities → (S,) mean over points."""
    return -(probs * logits.log_softmax(dim=-1)).sum(dim=-1).mean(dim=-1)


@cache
def _fixed_points(n: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.randn(n, N_INPUTS, generator=g, dtype=torch.float64)


@dataclass(frozen=True)
class Students:
    """Students of several seeds, trained side by side.

    Attributes:
        width: d.
        spec: what they rounded in training.
        seeds: of starts and data.
        parameters: name → (S, ...) float64, names as in :class:`Student`.
        teacher: whom they learnt from.
    """

    width: int
    spec: QuantSpec
    seeds: tuple[int, ...]
    parameters: dict[str, torch.Tensor]
    teacher: Teacher

    @torch.no_grad()
    def losses(self, spec: QuantSpec | None = None, *, n_points: int = 8192) -> list[float]:
        """Excess cross-entropy in nats over the teacher's entropy, on fixed points, by seed.

        Args:
            spec: round as this says in place of ``self.spec``: rounding after training.
            n_points: how many points.
        """
        rules = _rules(self.spec if spec is None else spec)
        x = _fixed_points(n_points)
        teacher = self.teacher.logits(x).log_softmax(dim=-1)
        probs, total = teacher.exp(), torch.zeros(len(self.seeds), dtype=torch.float64)
        for rows in torch.arange(n_points).split(1024 if spec is None else n_points):
            each = x[rows].expand(len(self.seeds), -1, -1)
            logits = _batched_logits(self.parameters, rules, each).log_softmax(dim=-1)
            total += (probs[rows] * (teacher[rows] - logits)).sum(dim=(1, 2))
        return (total / n_points).tolist()

    def student(self, index: int) -> nn.Module:
        """The network of one seed, built of :class:`QuantLinear` where it rounds."""
        model = Student(self.width)
        if self.spec != FULL:
            model = convert(model, self.spec)
        model.load_state_dict({name: p[index] for name, p in self.parameters.items()})
        return model


def train_students(
    width: int,
    steps: int,
    spec: QuantSpec = FULL,
    *,
    seeds: Sequence[int],
    teacher: Teacher | None = None,
    soft_labels: bool = True,
) -> Students:
    """Train one student a seed, all of them together as batched matrices.

    AdamW (0.9, 0.95), weight decay 0.01, gradients of each seed clipped at 1, 20 steps of warm-up,
    cosine to 2 %, rate 0.003, a fresh batch of 128 a step. Starts and batches depend on the seed
    alone. In float64: a rounding that flips by another order of summation would otherwise carry the
    difference of two processors into the results.

    Args:
        width: d.
        steps: of training; D = 128·steps.
        spec: what to round.
        seeds: of starts and data.
        teacher: by default :func:`make_teacher`'s.
        soft_labels: whether the loss takes the teacher's probabilities, or classes drawn from them.

    Raises:
        ValueError: no seed, fewer than one step, or a group size that does not divide the width.
    """
    seeds = tuple(int(s) for s in seeds)
    if not seeds or steps < 1:
        raise ValueError(f"seeds and steps must be at least one: got {seeds} and {steps}")
    teacher = make_teacher() if teacher is None else teacher
    rules = _rules(spec)
    models = [Student(width, seed=s) for s in seeds]
    if spec != FULL:
        models = [convert(model, spec) for model in models]
    each = [dict(model.named_parameters()) for model in models]
    parameters = {
        name: torch.stack([e[name].detach() for e in each]).requires_grad_() for name in each[0]
    }
    values = list(parameters.values())
    optimizer = torch.optim.AdamW(values, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    warmup = min(20, steps)
    for step, (x, target) in enumerate(_batches(seeds, steps, teacher, soft_labels)):
        optimizer.param_groups[0]["lr"] = 3e-3 * cosine_schedule(step, steps, warmup, floor=0.02)
        loss = _cross_entropy(_batched_logits(parameters, rules, x), target).sum()
        grads = torch.autograd.grad(loss, values)
        norm = sum(g.flatten(1).square().sum(dim=1) for g in grads).sqrt()
        factor = (1 / (norm + 1e-6)).clamp(max=1)
        for p, g in zip(values, grads, strict=True):
            # a fused step reads both in the order of memory
            p.grad = (g * factor.view(-1, *[1] * (g.ndim - 1))).contiguous()
        optimizer.step()
    done = {name: p.detach() for name, p in parameters.items()}
    return Students(width, spec, seeds, done, teacher)


def _batches(seeds: Sequence[int], steps: int, teacher: Teacher, soft_labels: bool):
    """(x (S, 128, 32), targets (S, 128, 10)) of each step; a seed's do not depend on the others."""
    generators = [torch.Generator().manual_seed(1_000_003 * s + 29) for s in seeds]
    done = 0
    while done < steps:
        n = min(50, steps - done)
        shape = (n, BATCH, N_INPUTS)
        x = torch.stack([torch.randn(shape, generator=g, dtype=torch.float64) for g in generators])
        target = teacher.logits(x).softmax(dim=-1)
        if not soft_labels:
            drawn = [
                torch.multinomial(t.flatten(0, 1), 1, generator=g)[:, 0]
                for t, g in zip(target, generators, strict=True)
            ]
            target = F.one_hot(torch.stack(drawn), N_CLASSES).double().view_as(target)
        yield from zip(x.unbind(dim=1), target.unbind(dim=1), strict=True)
        done += n


def n_weights(width: int) -> int:
    """N: the weights that a student rounds."""
    return 12 * width**2


def run_pairs(
    width: int,
    steps: int,
    specs: Iterable[QuantSpec],
    *,
    seeds: Sequence[int],
    soft_labels: bool = True,
    teacher: Teacher | None = None,
) -> list[dict]:
    """Students with rounding beside twins without: same starts, same batches.

    Args:
        width, steps, seeds, soft_labels, teacher: as for :func:`train_students`.
        specs: what to round.

    Returns:
        A row for each spec and seed: spec (its name), seed, loss_full, loss_q, delta, N, D, G. For
        groups of a whole row G is 2·width, the inputs of FC2; for a whole tensor NaN.
    """
    options = {"seeds": seeds, "soft_labels": soft_labels, "teacher": teacher}
    full = train_students(width, steps, **options).losses()
    rows = []
    for spec in specs:
        made = train_students(width, steps, spec, **options).losses()
        group = {"row": 2 * width, "tensor": math.nan}.get(spec.group_size, spec.group_size)
        for seed, a, b in zip(seeds, full, made, strict=True):
            row = {"spec": spec.name, "seed": int(seed), "loss_full": a, "loss_q": b}
            row |= {"delta": b - a, "N": n_weights(width), "D": BATCH * steps, "G": group}
            rows.append(row)
    return rows


class ActivationStats(NamedTuple):
    """Inputs of a layer: kurtosis E(x−μ)⁴/σ⁴ (3 for a Gaussian), largest magnitude, rms."""

    kurtosis: float
    absmax: float
    rms: float


@torch.no_grad()
def activation_stats(model: nn.Module, batch: torch.Tensor) -> dict[str, ActivationStats]:
    """What the linear layers of ``model`` are given while it sees ``batch``, before rounding.

    Args:
        model: with ``nn.Linear`` or :class:`QuantLinear` layers.
        batch: its input.

    Returns:
        Layer's dotted name → statistics over all entries of its input.

    Raises:
        ValueError: no linear layer, or one that did not run.
    """
    kinds = (nn.Linear, QuantLinear)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
    if not layers:
        raise ValueError("model must have linear layers: it has none")
    found: dict[str, ActivationStats] = {}

    def keeper(name: str) -> Callable:
        def keep(_module, inputs):
            x = inputs[0].double()
            centred = x - x.mean()
            variance = centred.square().mean()
            kurtosis = centred.pow(4).mean() / variance.square()
            found[name] = ActivationStats(
                float(kurtosis), float(x.abs().max()), float(x.square().mean().sqrt())
            )

        return keep

    handles = [m.register_forward_pre_hook(keeper(name)) for name, m in layers.items()]
    try:
        model(batch)
    finally:
        for handle in handles:
            handle.remove()
    idle = sorted(set(layers) - set(found))
    if idle:
        raise ValueError(f"every linear layer must run: {idle[0]!r} did not")
    return {name: found[name] for name in layers}


# --------------------------------------------------------------------------------------------
# Character language models (the full preset)


class _LinearAttention(nn.Module):
    """The toolbox's attention with ``nn.Linear`` layers ``qkv`` and ``o``; no cache."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.config = attention.config
        d = self.config.d_model
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.qkv.weight, self.o.weight = attention.qkv, attention.out

    def forward(self, x: torch.Tensor, *, cache=None, layer: int = 0, past: int = 0):
        if cache is not None:
            raise ValueError("cache must be None: these layers are for training")
        batch, length, d = x.shape
        heads = (batch, length, self.config.n_heads, self.config.head_dim)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(x).split(d, dim=-1))
        if self.config.positions == "rope":
            at = torch.arange(length, device=x.device)
            q, k = (rope(t, at, base=self.config.rope_base) for t in (q, k))
        causal = self.config.causal and length > 1
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, d))


class _LinearMLP(nn.Module):
    """The toolbox's SwiGLU with ``nn.Linear`` layers ``gate``, ``up`` and ``fc2``."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        hidden, d = len(mlp.up) // 2, mlp.up.shape[1]
        self.gate, self.up = (nn.Linear(d, hidden, bias=False) for _ in range(2))
        self.fc2 = nn.Linear(hidden, d, bias=False)
        parts = mlp.up.detach().chunk(2)
        self.gate.weight, self.up.weight = (nn.Parameter(p.clone()) for p in parts)
        self.fc2.weight = mlp.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.silu(self.gate(x)) * self.up(x))


def with_linear_layers(model: GPT) -> GPT:
    """A copy of a toolbox GPT with SwiGLU whose weights are ``nn.Linear`` layers, for `convert`.

    Raises:
        ValueError: another kind of MLP.
    """
    if model.config.mlp != "swiglu":
        raise ValueError(f"model must have SwiGLU layers: got mlp={model.config.mlp!r}")
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attention, block.mlp = _LinearAttention(block.attention), _LinearMLP(block.mlp)
    return model


GPT_SIZES = {128: 4, 256: 6, 512: 8, 1024: 12}
"""Width → blocks of the character models."""


def gpt_run(
    d_model: int,
    n_characters: int,
    spec: QuantSpec = FULL,
    *,
    n_layers: int | None = None,
    context: int = 256,
    batch_size: int = 64,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """One character model on Python's documentation, trained with rounding.

    The same seed gives the same start and the same batches whatever is rounded.

    Args:
        d_model: width.
        n_characters: D, seen in training (the text repeats).
        spec: what to round in the linear layers of the blocks.
        n_layers: blocks; by default :data:`GPT_SIZES`'s.
        context, batch_size: of a step.
        seed: of start and batches.
        device: where.

    Returns:
        ``loss`` on held-out text in nats a character, N, D and the share of FC2's kurtosis over
        that of the other layers' inputs (``fc2_kurtosis``).
    """
    data = text.load_char_data()
    steps = n_characters // (context * batch_size)
    if steps < 1:
        raise ValueError(f"n_characters must fill a step, {context * batch_size}: {n_characters}")
    layers = GPT_SIZES[d_model] if n_layers is None else n_layers
    hidden = -(-8 * d_model // 3 // 128) * 128  # groups of up to 128 divide it
    config = GPTConfig(
        vocab_size=data.tokenizer.vocab_size,
        context=context,
        d_model=d_model,
        n_layers=layers,
        n_heads=max(2, d_model // 64),
        d_hidden=hidden,
    )
    model = with_linear_layers(GPT(config, seed=seed))
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    model = (model if spec == FULL else convert(model, spec)).to(device)
    starts = text.batch_starts(
        len(data.train), length=context + 1, batches=steps, batch_size=batch_size, seed=seed
    )
    batches = (text.windows(data.train, s, context + 1).to(device) for s in starts)
    rate = 3e-3 * math.sqrt(128 / d_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = min(20, steps)
    training.fit(
        model,
        lambda m, tokens: m.loss(tokens),
        batches,
        optimizer,
        schedule=lambda t: cosine_schedule(t, steps, warmup, floor=0.02),
        clip=1.0,
    )
    fixed = torch.arange(0, len(data.valid) - context - 1, context)
    model.eval()
    with torch.no_grad():
        parts = text.windows(data.valid, fixed, context + 1).to(device).split(batch_size)
        loss = sum(float(model.loss(p)) * len(p) for p in parts) / len(fixed)
        stats = activation_stats(model, parts[0][:, :-1])
    tails = {True: [], False: []}
    for name, s in stats.items():
        tails[name.endswith("fc2")].append(s.kurtosis)
    ratio = float(np.mean(tails[True]) / np.mean(tails[False]))
    seen = steps * context * batch_size
    return {"loss": loss, "N": weights, "D": seen, "fc2_kurtosis": ratio}


# --------------------------------------------------------------------------------------------
# Experiments

SEEDS = (0, 1, 2)
FC2_8 = {"fc2": {"a_bits": 8}}
SPECS: dict[str, Callable[[int | str], QuantSpec]] = {
    "W4A4": lambda g: QuantSpec(4, 4, g),
    "W4A16": lambda g: QuantSpec(4, 16, g),
    "W16A4": lambda g: QuantSpec(16, 4, g),
    "W4A4 fc2:A8": lambda g: QuantSpec(4, 4, g, overrides=FC2_8),
    "W16A4 fc2:A8": lambda g: QuantSpec(16, 4, g, overrides=FC2_8),
    "W4A4 lsq": lambda g: QuantSpec(4, 4, g, "lsq"),
    **{
        f"W16A16 {layer}:A4": (
            lambda g, layer=layer: QuantSpec(16, 16, g, overrides={layer: {"a_bits": 4}})
        )
        for layer in LAYERS
    },
}
"""Kinds of rounding by name, each for a group size."""

_PARTS = ("W4A16", "W16A4", "W4A4 fc2:A8", "W16A4 fc2:A8")


def _runs() -> tuple[str, ...]:
    runs = []
    for d in (16, 32, 64):
        for steps in (300, 1000, 3000):
            runs.append(f"{d},{steps},full,-")
            sizes = [g for g in (8, 16, 32) if g <= d]
            if (d, steps) == (64, 3000):
                sizes = [16]
            runs += [f"{d},{steps},W4A4,{g}" for g in sizes]
    for d, steps in ((16, 300), (16, 1000), (16, 3000), (32, 300), (32, 1000), (64, 1000)):
        runs += [f"{d},{steps},{part},16" for part in _PARTS]
    runs += [f"16,8000,{kind}" for kind in ("full,-", "W4A16,16", "W16A4 fc2:A8,16")]
    runs += [f"32,1000,W16A16 {layer}:A4,16" for layer in LAYERS]
    runs += [f"32,1000,W4A4,{g}" for g in ("row", "tensor")]
    runs += ["32,1000,W4A4 lsq,16", "32,1000,ptq,16", "16,1000,ptq,16"]
    for d in (16, 32):  # a teacher out of reach
        runs += [
            f"{d},{steps},{kind},64 units" for steps in (250, 1000) for kind in ("full", "W4A4")
        ]
    return tuple(runs)


RUNS = _runs()
"""The shipped runs: width, steps, what is rounded, group size. "64 units": groups of 16, but a
teacher of 64 units in place of 8."""


def study_run(run: str) -> dict[str, float]:
    """One of :data:`RUNS`: the losses of three seeds.

    Raises:
        ValueError: an unknown run.
    """
    if run not in RUNS:
        raise ValueError(f"run must be one of RUNS, such as {RUNS[0]!r}: got {run!r}")
    width, steps, kind, group = run.split(",")
    teacher = make_teacher(64, gain=4.0) if group == "64 units" else None
    size = {"row": "row", "tensor": "tensor", "64 units": 16, "-": 16}.get(group) or int(group)
    spec = FULL if kind in ("full", "ptq") else SPECS[kind](size)
    made = train_students(int(width), int(steps), spec, seeds=SEEDS, teacher=teacher)
    losses = made.losses(SPECS["W4A4"](size) if kind == "ptq" else None)
    return {f"loss_{s}": loss for s, loss in zip(SEEDS, losses, strict=True)}


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=efficiency/qat_scaling`` computes."""


def delta_table(frame: object) -> object:
    """Shipped results as rows of :func:`run_pairs`, with width, steps, group and units besides.

    Args:
        frame: a DataFrame with ``run`` and the losses of :func:`study_run`.

    Raises:
        ValueError: a run whose twin without rounding is not there.
    """
    import pandas as pd

    losses = {row["run"]: row for row in frame.to_dict("records")}
    rows = []
    for run, row in losses.items():
        width, steps, kind, group = run.split(",")
        if kind == "full":
            continue
        wide = group == "64 units"
        twin = f"{width},{steps},full,{'64 units' if wide else '-'}"
        if twin not in losses:
            raise ValueError(f"frame must hold the twin of {run!r}: lacks {twin!r}")
        d = int(width)
        size = {"row": 2.0 * d, "tensor": math.nan, "64 units": 16.0}.get(group) or float(group)
        for seed in SEEDS:
            full, made = losses[twin][f"loss_{seed}"], row[f"loss_{seed}"]
            rows.append(
                {
                    "spec": kind,
                    "seed": seed,
                    "loss_full": full,
                    "loss_q": made,
                    "delta": made - full,
                    "N": n_weights(d),
                    "D": BATCH * int(steps),
                    "G": size,
                    "width": d,
                    "steps": int(steps),
                    "group": "16" if wide else group,
                    "units": 64 if wide else 8,
                }
            )
    return pd.DataFrame(rows)


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_ste(fn: Callable) -> None:
    """Exercise 1: ``fn(x, s, bits, grad)`` gives (x̂, dx) for a NumPy vector and one scale.

    Raises:
        AssertionError: at the first entry that differs.
    """
    rng = np.random.default_rng(0)
    for bits in (4, 3, 8):
        half = 1 << (bits - 1)
        edges = [
            -half - 0.3,
            -half,
            -half + 0.5,
            half - 1,
            half - 0.6,
            half + 2,
            0.5,
            1.5,
            2.5,
            -0.5,
        ]
        u = np.concatenate([edges, rng.uniform(-1.5 * half, 1.5 * half, 50)])
        s, grad = 0.25, rng.normal(size=len(u))
        values, slope = (np.asarray(v) for v in fn(u * s, s, bits, grad.copy()))
        inside = (u >= -half) & (u <= half - 1)
        wanted = s * np.clip(np.round(u), -half, half - 1)
        for what, got, right in (("x̂", values, wanted), ("dx", slope, np.where(inside, grad, 0))):
            assert got.shape == u.shape, f"{what} must have shape {u.shape}: got {got.shape}"
            off = np.flatnonzero(np.abs(got - right) > 1e-12)
            assert not len(off), (
                f"{bits} bits: {what} at x/s = {u[off[0]]:g} must be {right[off[0]]:g}: got "
                f"{got[off[0]]:g}; halves go to even, and the clip looks at x/s before rounding"
            )


def check_law_fit(fn: Callable) -> None:
    """Exercise 2: ``fn(N, D, G, delta)`` gives (k, γ_N, γ_D, γ_G) of a hidden table.

    Raises:
        AssertionError: with the exponent that is off.
    """
    rng = np.random.default_rng(11)
    sizes = np.array([1.0, 4.0, 16.0, 64.0])
    for case in range(3):
        powers = rng.uniform((0.1, 0.05, 0.2), (0.4, 0.25, 0.8))
        N, D, G = (
            v.ravel() for v in np.meshgrid(1e6 * sizes, 1e8 * sizes, [8.0, 32.0, 128.0, 512.0])
        )
        delta = QATLaw(0.1, *powers).predict(N, D, G) * np.exp(0.02 * rng.standard_normal(N.size))
        got = np.asarray(fn(N.copy(), D.copy(), G.copy(), delta.copy()), dtype=np.float64)
        assert got.shape == (4,), f"give (k, gamma_n, gamma_d, gamma_g): got shape {got.shape}"
        for name, a, b in zip(("gamma_n", "gamma_d", "gamma_g"), got[1:], powers, strict=True):
            assert abs(a - b) <= 0.03, (
                f"table {case}: {name} must be {b:.3f} ± 0.03: got {a:.3f}; γ_N has a minus in the "
                "log form, and G enters as ln log2 G"
            )


def check_group_mse(fn: Callable) -> None:
    """Exercise 3: ``fn(bits, group_size)`` is the error of N(0, 1) in groups, to 1 %.

    Raises:
        AssertionError: with what a simulation gives.
    """
    for bits, group in ((4, 4), (4, 16), (5, 64), (4, 256), (6, 1024)):
        wanted = simulated_group_mse(bits, group, seed=5)
        got = float(fn(bits, group))
        assert abs(got / wanted - 1) <= 0.01, (
            f"{bits} bits, G={group}: a simulation gives {wanted:.6f}, the formula {got:.6f}, off "
            f"by {100 * (got / wanted - 1):+.1f} %; the largest of a group has no error"
        )


def check_missing_term(fn: Callable) -> None:
    """Exercise 4: ``fn(N, D, G, delta)`` gives log residuals of the best law without D.

    Raises:
        AssertionError: with what is wrong about the residuals.
    """
    table = make_planted_table(3)
    got = np.asarray(fn(*(table[c].copy() for c in ("N", "D", "G", "delta"))), dtype=np.float64)
    assert got.shape == table["delta"].shape, f"give one residual a row: got shape {got.shape}"
    logs = {"N": np.log(table["N"]), "G": np.log(np.log2(table["G"])), "D": np.log(table["D"])}
    assert abs(got.mean()) <= 1e-8, f"residuals of a fit with k have mean 0: got {got.mean():.3g}"
    for name in ("N", "G"):
        rho = np.corrcoef(got, logs[name])[0, 1]
        assert abs(rho) <= 1e-6, (
            f"{name} stays in the law: residuals must not correlate with its column, got {rho:.3f}"
        )
    rho = np.corrcoef(got, logs["D"])[0, 1]
    assert rho > 0.9, (
        f"residuals (measured minus fitted) of a law without D grow with ln D: correlation above "
        f"0.9, got {rho:.3f}"
    )


@cache
def _uniform_loss() -> tuple[float, float]:
    """Mean loss without rounding, and δ of W4A4, of the exercise's students."""
    rows = run_pairs(16, 300, [QuantSpec(4, 4, 16)], seeds=SEEDS)
    full = float(np.mean([r["loss_full"] for r in rows]))
    return full, float(np.mean([r["delta"] for r in rows]))


def check_assignment(spec: QuantSpec) -> float:
    """Exercise 5: a spec with at most 4.5 bits in the mean and at most 0.8 of W4A4's δ.

    Trains three students of width 16 for 300 steps with it, in groups of 16.

    Returns:
        δ over that of W4A4.

    Raises:
        AssertionError: with the bits, or both δ.
    """
    bits = average_bits(spec)
    assert bits <= 4.5 + 1e-9, f"average bits must be at most 4.5: {spec.name} has {bits:.3f}"
    sizes = {spec.rule(layer).group_size for layer in LAYERS}
    assert sizes == {16}, f"groups must be of 16: got {sizes}"
    full, uniform = _uniform_loss()
    delta = float(np.mean(train_students(16, 300, spec, seeds=SEEDS).losses())) - full
    assert delta <= 0.8 * uniform, (
        f"δ must be at most 0.8 of W4A4's {uniform:.5f}: {spec.name} has {delta:.5f}"
    )
    return delta / uniform
