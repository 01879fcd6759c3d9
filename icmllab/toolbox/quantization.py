"""Numbers in few bits: grouped grids, packed codes, straight-through gradients, GPTQ.

A group is ``group_size`` consecutive elements along one dimension that share a scale. A tensor cut
into groups has that dimension replaced by the number of groups, and the group's elements last:
keys (B, H, T, d) grouped along T become (B, H, T/g, d, g), and their scales are (B, H, T/g, d).
Rounding is to the nearest, halves to even.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from icmllab.toolbox.cholesky import damped_cholesky
from icmllab.toolbox.linalg import as_matrix

# ------------------------------------------------------------------------------- packing


def _check_bits(bits: int, allowed: Sequence[int] = range(1, 9)) -> None:
    if isinstance(bits, bool) or bits not in allowed:
        raise ValueError(f"bits must be one of {', '.join(map(str, allowed))}: got {bits}")


def packed_size(n: int, bits: int) -> int:
    """How many bytes ``n`` codes of ``bits`` bits take."""
    return -(-n * bits // 8)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes as a stream of bits, lowest bit first, the first code lowest in the first byte.

    Args:
        codes: (..., n) integers in [0, 2^bits), or in [−2^(bits−1), 2^(bits−1)), which are kept in
            two's complement.
        bits: 1 to 8.

    Returns:
        (..., ⌈n·bits/8⌉) uint8; unused bits of the last byte are 0.

    Raises:
        ValueError: other bits, codes that are not integers or do not fit.
    """
    _check_bits(bits)
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes must be integers: got dtype {codes.dtype}")
    if codes.ndim < 1:
        raise ValueError("codes must have a last dimension to pack along: got a scalar")
    if codes.numel():
        low, high = int(codes.min()), int(codes.max())
        fits = high < (1 << bits) if low >= 0 else high < (1 << (bits - 1))
        if not fits or low < -(1 << (bits - 1)):
            raise ValueError(f"codes must fit {bits} bits: got values in [{low}, {high}]")
    n = codes.shape[-1]
    if bits == 8:
        return (codes.long() & 255).to(torch.uint8)
    if not codes.numel():
        return codes.new_zeros((*codes.shape[:-1], packed_size(n, bits)), dtype=torch.uint8)
    # a word is the fewest codes that fill whole bytes
    per_word = 8 // math.gcd(8, bits)
    codes = torch.nn.functional.pad(codes.long() & ((1 << bits) - 1), (0, -n % per_word))
    place = bits * torch.arange(per_word, device=codes.device)
    words = (codes.unflatten(-1, (-1, per_word)) << place).sum(dim=-1)
    byte = 8 * torch.arange(per_word * bits // 8, device=codes.device)
    stream = ((words[..., None] >> byte) & 255).to(torch.uint8).flatten(-2)
    return stream[..., : packed_size(n, bits)].contiguous()


def unpack_bits(
    packed: torch.Tensor, bits: int, n: int | None = None, *, signed: bool = False
) -> torch.Tensor:
    """The codes that :func:`pack_bits` packed.

    Args:
        packed: (..., n_bytes) uint8.
        bits: 1 to 8.
        n: how many codes; None takes all that fit.
        signed: read two's complement.

    Returns:
        (..., n) uint8, or int8 if signed.

    Raises:
        ValueError: other bits, another dtype, or fewer bytes than n codes take.
    """
    _check_bits(bits)
    if packed.dtype != torch.uint8 or packed.ndim < 1:
        raise ValueError(f"packed must be (..., n_bytes) uint8: got {packed.dtype}")
    size = packed.shape[-1]
    if n is None:
        n = 8 * size // bits
    if n < 0 or packed_size(n, bits) > size:
        raise ValueError(f"n must fit the bytes: got n={n} of {bits} bits in {size} bytes")
    if bits == 8:
        codes = packed[..., :n]
    elif n == 0:
        codes = packed[..., :0]
    else:
        per_word = 8 // math.gcd(8, bits)
        n_bytes = per_word * bits // 8
        padded = torch.nn.functional.pad(packed, (0, -size % n_bytes))
        # bytes suffice unless a code crosses their border
        wide = padded if n_bytes == 1 else padded.long()
        byte = 8 * torch.arange(n_bytes, device=packed.device, dtype=wide.dtype)
        words = wide if n_bytes == 1 else (wide.unflatten(-1, (-1, n_bytes)) << byte).sum(dim=-1)
        place = bits * torch.arange(per_word, device=packed.device, dtype=wide.dtype)
        codes = ((words[..., None] >> place) & ((1 << bits) - 1)).flatten(-2)[..., :n]
    if not signed:
        return codes.to(torch.uint8).contiguous()
    half = 1 << (bits - 1)
    return (((codes.to(torch.int16)) ^ half) - half).to(torch.int8)


# -------------------------------------------------------------------------------- groups


def check_group_size(size: int, group_size: int, *, of: str = "x") -> None:
    """Raise a ValueError that names the nearest divisors unless ``group_size`` divides ``size``."""
    if isinstance(group_size, bool) or group_size != int(group_size) or group_size < 1:
        raise ValueError(f"group_size must be a whole number >= 1: got {group_size}")
    if size % group_size:
        divisors = [g for g in range(1, size + 1) if size % g == 0]
        below = max(g for g in divisors if g < group_size)
        above = [g for g in divisors if g > group_size][:1]
        near = " or ".join(map(str, [below, *above]))
        raise ValueError(
            f"group_size must divide the grouped dimension of {of}: got group_size={group_size}, "
            f"size {size}; the nearest that do: {near}"
        )


def split_groups(x: torch.Tensor, dim: int, group_size: int) -> torch.Tensor:
    """Cut ``dim`` into groups: (..., n, ...) → (..., n/g, ..., g).

    Raises:
        ValueError: no such dimension, or a group size that does not divide it.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be a dimension of x: got dim={dim}, {x.ndim} dimensions")
    dim %= x.ndim
    check_group_size(x.shape[dim], group_size)
    shape = (x.shape[dim] // group_size, group_size)
    return x.unflatten(dim, shape).movedim(dim + 1, -1)


def join_groups(groups: torch.Tensor, dim: int) -> torch.Tensor:
    """Undo :func:`split_groups`: (..., n/g, ..., g) → (..., n, ...)."""
    dim %= groups.ndim - 1
    return groups.movedim(-1, dim + 1).flatten(dim, dim + 1)


def groupwise_bits(bits: int, group_size: int, *, overhead: int = 32) -> float:
    """Bits an element of a group takes, with ``overhead`` bits of scale and minimum a group."""
    return bits + overhead / group_size


class StoreOverflow(ValueError):
    """A group whose minimum or scale the storage type cannot hold; ``index`` says which."""

    def __init__(self, message: str, index: tuple[int, ...]):
        super().__init__(message)
        self.index = index


class GroupQuant(NamedTuple):
    """A tensor on grids of 2^bits levels from each group's minimum to its maximum.

    Attributes:
        codes: (..., n/g, ..., ⌈g·bits/8⌉) uint8, each group packed on its own.
        scale: (..., n/g, ...) step of each group, in the storage dtype.
        zero: same shape, the minimum of each group.
        bits: of a code.
        dim: which dimension is grouped, counted from the front.
        group_size: elements of a group.
        dtype: of the tensor that was quantised.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    bits: int
    dim: int
    group_size: int
    dtype: torch.dtype

    def unpack(self) -> torch.Tensor:
        """The codes as (..., n/g, ..., g) uint8."""
        return unpack_bits(self.codes, self.bits, self.group_size)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """q·scale + zero, in the shape that was quantised; computed in float32 or wider."""
        wide = compute_dtype(torch.promote_types(self.dtype, self.scale.dtype))
        scale, zero = (t.to(wide)[..., None] for t in (self.scale, self.zero))
        values = torch.addcmul(zero, self.unpack().to(wide), scale)
        return join_groups(values, self.dim).to(dtype or self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales and minima."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.zero))

    @property
    def n_bits(self) -> int:
        """Bits that count: codes, scales and minima, without the filling of last bytes."""
        stored = 8 * sum(t.element_size() for t in (self.scale, self.zero))
        return self.scale.numel() * (self.group_size * self.bits + stored)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def quantize_groupwise(
    x: torch.Tensor,
    bits: int,
    dim: int,
    group_size: int,
    *,
    store_dtype: torch.dtype = torch.float16,
) -> GroupQuant:
    """Uniform asymmetric grid: scale = (max − min)/(2^bits − 1), q = round((x − min)/scale).

    Scale and minimum are rounded to ``store_dtype`` first, and the codes are computed with the
    rounded ones. A group whose scale rounds to 0 gets codes 0. While the rounding of the minimum is
    small beside the scale, the error of every element is at most scale/2.

    Args:
        x: floating tensor; keys (B, H, T, d) take ``dim=-2``, values ``dim=-1``.
        bits: 1 to 8.
        dim: the dimension along which elements are grouped.
        group_size: divides ``x.shape[dim]``.
        store_dtype: of scales and minima.

    Raises:
        ValueError: bits or sizes that do not fit, x not floating or not finite; as
            :class:`StoreOverflow` when ``store_dtype`` cannot hold a scale or minimum.
    """
    _check_bits(bits)
    if not x.is_floating_point() or not store_dtype.is_floating_point:
        raise ValueError(
            f"x and store_dtype must be floating: got x {x.dtype}, store_dtype {store_dtype}"
        )
    groups = split_groups(x, dim, group_size)
    groups = groups.to(compute_dtype(torch.promote_types(x.dtype, store_dtype)))
    low, high = groups.aminmax(dim=-1)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise ValueError("x must be finite: it holds NaN or infinity")
    top = (1 << bits) - 1
    scale, zero = ((high - low) / top).to(store_dtype), low.to(store_dtype)
    bad = ~(torch.isfinite(scale) & torch.isfinite(zero))
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        raise StoreOverflow(
            f"x must have groups that {store_dtype} can hold: group {index} spans "
            f"[{low[index].item():.4g}, {high[index].item():.4g}]",
            index,
        )
    step, base = scale.to(groups.dtype)[..., None], zero.to(groups.dtype)[..., None]
    # scale 0: any positive step, the codes are set to 0
    codes = ((groups - base) / torch.where(step > 0, step, 1.0)).round_().clamp_(0, top)
    codes = torch.where(step > 0, codes, 0.0).to(torch.uint8)
    return GroupQuant(pack_bits(codes, bits), scale, zero, bits, dim % x.ndim, group_size, x.dtype)


def cat_groupwise(parts: Sequence[GroupQuant], dim: int) -> GroupQuant:
    """Join along a dimension of the scales: tensors quantised one after the other.

    Raises:
        ValueError: no parts, or parts of different grids.
    """
    if not parts:
        raise ValueError("parts must hold at least one GroupQuant: got none")
    first = parts[0]
    if any(p[3:] != first[3:] for p in parts):
        raise ValueError("parts must share bits, dim, group_size and dtype")
    dim %= first.scale.ndim
    joined = (torch.cat([p[i] for p in parts], dim=dim) for i in range(3))
    return GroupQuant(*joined, *first[3:])


# ------------------------------------------------------------- symmetric, for training

FAKE_BITS = (*range(2, 9), 16)
# the scale of a group of zeros: its codes are 0 with any
_ZERO_SCALE = 1e-8


def absmax_scale(x: torch.Tensor, bits: int, group_size: int, *, dim: int = -1) -> torch.Tensor:
    """Scale of each group: max|x| / q_max with q_max = 2^(bits−1) − 1; 1e-8 for a group of zeros.

    Args:
        x: floating tensor.
        bits: 2 to 8.
        group_size: divides ``x.shape[dim]``.
        dim: the dimension that is grouped.

    Returns:
        (..., n/g, ...) in float32, or float64 for such x.

    Raises:
        ValueError: bits or sizes that do not fit, or x not finite.
    """
    _check_bits(bits, FAKE_BITS[:-1])
    groups = split_groups(x, dim, group_size)
    return _absmax(groups.to(compute_dtype(x.dtype)), bits)


def _absmax(groups: torch.Tensor, bits: int) -> torch.Tensor:
    scale = groups.abs().amax(dim=-1) / ((1 << (bits - 1)) - 1)
    # one NaN or infinity makes its group's maximum one
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("x must be finite: it holds NaN or infinity")
    return torch.where(scale > 0, scale, _ZERO_SCALE)


def lsq_scale(x: torch.Tensor, bits: int, group_size: int, *, dim: int = -1) -> torch.Tensor:
    """Where a learned scale starts: 2·mean|x| / √q_max of each group, 1e-8 for one of zeros.

    Arguments, returns and errors as in :func:`absmax_scale`.
    """
    _check_bits(bits, FAKE_BITS[:-1])
    groups = split_groups(x, dim, group_size).to(compute_dtype(x.dtype))
    scale = 2 * groups.abs().mean(dim=-1) / math.sqrt((1 << (bits - 1)) - 1)
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("x must be finite: it holds NaN or infinity")
    return torch.where(scale > 0, scale, _ZERO_SCALE)


class SymmetricQuant(NamedTuple):
    """A tensor on grids around 0.

    Attributes:
        codes: shape of the tensor, int8.
        scale: (..., n/g, ...) step of each group.
        dim: which dimension is grouped, counted from the front.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    dim: int

    def dequantize(self) -> torch.Tensor:
        """codes · scale, in the scales' dtype."""
        group_size = self.codes.shape[self.dim] // self.scale.shape[self.dim]
        groups = split_groups(self.codes, self.dim, group_size).to(self.scale.dtype)
        return join_groups(groups * self.scale[..., None], self.dim)


def _check_scale(scale: torch.Tensor, groups: torch.Tensor) -> None:
    if scale.shape != groups.shape[:-1]:
        raise ValueError(
            f"scale must be {tuple(groups.shape[:-1])}, one a group: got {tuple(scale.shape)}"
        )
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError("scale must be finite and > 0")


def quantize_symmetric(
    x: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    dim: int = -1,
    scale: torch.Tensor | None = None,
) -> SymmetricQuant:
    """Codes clip(round(x/s), −2^(bits−1), 2^(bits−1) − 1) of each group's scale s.

    Args:
        x: floating tensor.
        bits: 2 to 8.
        group_size: divides ``x.shape[dim]``.
        dim: the dimension that is grouped.
        scale: (..., n/g, ...) > 0; None takes :func:`absmax_scale`.

    Raises:
        ValueError: bits or sizes that do not fit, x or scale not finite.
    """
    _check_bits(bits, FAKE_BITS[:-1])
    groups = split_groups(x, dim, group_size).to(compute_dtype(x.dtype))
    if scale is None:
        scale = _absmax(groups, bits)
    else:
        _check_scale(scale, groups)
        if not bool(torch.isfinite(groups).all()):
            raise ValueError("x must be finite: it holds NaN or infinity")
    codes = _codes(groups, scale.to(groups.dtype), bits).to(torch.int8)
    return SymmetricQuant(join_groups(codes, dim), scale, dim % x.ndim)


def _codes(groups: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    half = 1 << (bits - 1)
    return (groups / scale[..., None]).round_().clamp_(-half, half - 1)


class _AbsMaxFake(torch.autograd.Function):
    """Every element lies inside the grid, and the scale is a constant: the gradient passes."""

    @staticmethod
    def forward(ctx, x, bits, group_size, dim):
        groups = split_groups(x, dim, group_size).to(compute_dtype(x.dtype))
        scale = _absmax(groups, bits)
        return join_groups(_codes(groups, scale, bits) * scale[..., None], dim).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


class _ScaledFake(torch.autograd.Function):
    """With a scale of its own: clipped elements pass their gradient to the scale alone."""

    @staticmethod
    def forward(ctx, x, scale, bits, group_size, dim, scale_grad):
        ctx.save_for_backward(x, scale)
        ctx.settings = bits, group_size, dim, scale_grad
        groups = split_groups(x, dim, group_size).to(compute_dtype(x.dtype))
        wide = scale.to(groups.dtype)
        return join_groups(_codes(groups, wide, bits) * wide[..., None], dim).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        bits, group_size, dim, scale_grad = ctx.settings
        groups = split_groups(x, dim, group_size).to(compute_dtype(x.dtype))
        ratio = groups / scale.to(groups.dtype)[..., None]
        half = 1 << (bits - 1)
        inside = (ratio >= -half) & (ratio <= half - 1)
        dx = dscale = None
        if ctx.needs_input_grad[0]:
            dx = grad * join_groups(inside, dim)
        if ctx.needs_input_grad[1]:
            # inside: round(x/s) − x/s; outside: the end of the grid
            slope = ratio.round().clamp(-half, half - 1) - torch.where(inside, ratio, 0.0)
            wide = split_groups(grad, dim, group_size).to(groups.dtype)
            dscale = (scale_grad * (wide * slope).sum(dim=-1)).to(scale.dtype)
        return dx, dscale, None, None, None, None


def fake_quant(
    x: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    dim: int = -1,
    scale: torch.Tensor | None = None,
    scale_grad: float = 1.0,
) -> torch.Tensor:
    """x rounded to its grid and back, with a straight-through gradient.

    x̂ = s·clip(round(x/s), −2^(b−1), q_max) with q_max = 2^(b−1) − 1. Without ``scale``, s is the
    group's max|x|/q_max, taken as a constant: all elements lie inside, and the gradient of x is
    that of x̂, for the largest too. With it, dx = g·1[−2^(b−1) <= x/s <= q_max], and ds sums
    g·(round(x/s) − x/s) inside, g·(−2^(b−1)) below, g·q_max above.

    Args:
        x: floating tensor.
        bits: 2 to 8; 16 gives x itself.
        group_size: divides ``x.shape[dim]``.
        dim: the dimension that is grouped; for a weight (out, in) and activations (..., in), the
            last.
        scale: (..., n/g, ...) > 0, which may need a gradient (LSQ).
        scale_grad: factor of the scale's gradient; LSQ takes 1/√(group_size·q_max).

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: bits or sizes that do not fit, x or scale not finite.
    """
    _check_bits(bits, FAKE_BITS)
    if not x.is_floating_point():
        raise ValueError(f"x must be floating: got {x.dtype}")
    if bits == 16:
        return x
    if scale is None:
        return _AbsMaxFake.apply(x, bits, group_size, dim)
    _check_scale(scale.detach(), split_groups(x.detach(), dim, group_size))
    if not bool(torch.isfinite(x.detach()).all()):
        raise ValueError("x must be finite: it holds NaN or infinity")
    return _ScaledFake.apply(x, scale, bits, group_size, dim, scale_grad)


# --------------------------------------------------------------- what a layer's inputs say


class Covariance(NamedTuple):
    """Second moments of a layer's inputs.

    Attributes:
        sigma: (n, n) float64, Σ = (1/N) Σ x xᵀ with ``damp`` added to the diagonal.
        dead_mask: (n,) bool, inputs that hardly ever differ from 0.
        damp: what was added.
    """

    sigma: torch.Tensor
    dead_mask: torch.Tensor
    damp: float


class CovarianceAccumulator:
    """Σ over batches, in float64.

    Args:
        damping: what is added to the diagonal at the end, relative to its mean.
        dead_ratio: an input is dead below this share of the diagonal's median, or at 0. The test
            comes before the damping. The median: a few huge inputs must not make others dead.

    Raises:
        ValueError: a negative setting.
    """

    def __init__(self, *, damping: float = 1e-4, dead_ratio: float = 1e-3):
        if not damping >= 0 or not dead_ratio >= 0:
            raise ValueError(f"damping and dead_ratio must be >= 0: got {damping} and {dead_ratio}")
        self.damping, self.dead_ratio = damping, dead_ratio
        self.n_samples = 0
        self._sum: torch.Tensor | None = None

    def update(self, batch: torch.Tensor) -> None:
        """Add the rows of (..., n).

        Raises:
            ValueError: not finite, or another number of features than before.
        """
        X = as_matrix("batch", torch.as_tensor(batch).flatten(0, -2)).double()
        if self._sum is None:
            self._sum = X.new_zeros(X.shape[1], X.shape[1])
        if X.shape[1] != len(self._sum):
            raise ValueError(f"batch must have {len(self._sum)} features: got {X.shape[1]}")
        self._sum += X.T @ X
        self.n_samples += len(X)

    def finalize(self) -> Covariance:
        """The covariance of what was added; more may be added after.

        Raises:
            ValueError: nothing was added.
        """
        if self._sum is None:
            raise ValueError("finalize needs at least one batch: got none")
        sigma = self._sum / self.n_samples
        diagonal = sigma.diagonal().clone()
        dead = (diagonal < self.dead_ratio * diagonal.quantile(0.5)) | (diagonal <= 0)
        damp = self.damping * float(diagonal.mean())
        sigma.diagonal().add_(damp)
        return Covariance(sigma, dead, damp)


def activation_covariance(
    X: torch.Tensor, *, damping: float = 1e-4, dead_ratio: float = 1e-3
) -> Covariance:
    """Σ of the rows of X (N, n), as :class:`CovarianceAccumulator` forms it from batches."""
    moments = CovarianceAccumulator(damping=damping, dead_ratio=dead_ratio)
    moments.update(X)
    return moments.finalize()


def cross_covariance(X: torch.Tensor, Y: torch.Tensor) -> torch.Tensor:
    """(1/N) Σ x yᵀ of matched rows: (n_x, n_y) float64, nothing added.

    Raises:
        ValueError: rows that do not match, or values that are not finite.
    """
    X, Y = (as_matrix(name, t).double() for name, t in (("X", X), ("Y", Y)))
    if len(X) != len(Y):
        raise ValueError(f"X and Y must have the same number of rows: got {len(X)}, {len(Y)}")
    return X.T @ Y / len(X)


class GPTQResult(NamedTuple):
    """Rounded weights.

    Attributes:
        codes: (a, n) int32.
        weights: (a, n) float64, step·code + zero.
    """

    codes: torch.Tensor
    weights: torch.Tensor


def gptq_obs(
    W: torch.Tensor,
    sigma: torch.Tensor,
    step: float | torch.Tensor,
    *,
    zero: float | torch.Tensor = 0.0,
    levels: int | None = None,
    block_size: int = 64,
) -> GPTQResult:
    """GPTQ in its inverse-Hessian form, columns first to last.

    With U upper triangular, Σ^{-1} = Uᵀ U: column i is rounded, and e = (w_i − ŵ_i)/U_ii is taken
    from the columns still to come, W_j ← W_j − e U_ij. Updates right of a block wait for its end.

    Args:
        W: (a, n) weights.
        sigma: (n, n) covariance of the inputs, damped where it needs be.
        step: > 0, a number or broadcastable to (a, n): one, one a column (n,), one a row (a, 1).
        zero: the value of code 0, likewise.
        levels: codes are clipped to [0, levels); None leaves them unbounded.
        block_size: columns of a block.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, a step <= 0, a covariance
            not symmetric or not positive definite, codes beyond int32.
    """
    W = as_matrix("W", W).double()
    if W.shape[1] != len(sigma):
        raise ValueError(f"W must have {len(sigma)} columns, as sigma: got {W.shape[1]}")
    if block_size < 1:
        raise ValueError(f"block_size must be >= 1: got {block_size}")
    step, zero = (_grid(name, t, W) for name, t in (("step", step), ("zero", zero)))
    if not bool((step > 0).all()):
        raise ValueError("step must be > 0")
    inverse = torch.cholesky_inverse(damped_cholesky(sigma, name="sigma").factor)
    U = damped_cholesky(inverse, name="the inverse of sigma").factor.T
    rest, codes = W.clone(), torch.empty_like(W)
    n = W.shape[1]
    for start in range(0, n, block_size):
        end = min(start + block_size, n)
        errors = W.new_empty(len(W), end - start)
        for i in range(start, end):
            codes[:, i] = ((rest[:, i] - zero[:, i]) / step[:, i]).round()
            if levels is not None:
                codes[:, i].clamp_(0, levels - 1)
            e = (rest[:, i] - (codes[:, i] * step[:, i] + zero[:, i])) / U[i, i]
            rest[:, i + 1 : end] -= torch.outer(e, U[i, i + 1 : end])
            errors[:, i - start] = e
        rest[:, end:] -= errors @ U[start:end, end:]
    if float(codes.abs().max()) >= 2**31:
        raise ValueError("step must not be so small that codes leave int32")
    return GPTQResult(codes.int(), codes * step + zero)


def _grid(name: str, value: float | torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    value = torch.as_tensor(value, dtype=torch.float64, device=W.device)
    try:
        value = value.expand(W.shape)
    except RuntimeError:
        raise ValueError(
            f"{name} must be broadcastable to {tuple(W.shape)}: got {tuple(value.shape)}"
        ) from None
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} must be finite")
    return value


def gptq_fixed(W: torch.Tensor, sigma: torch.Tensor, bits: int) -> GPTQResult:
    """GPTQ with 2^bits levels from each row's minimum to its maximum: fixed-width codes.

    Args:
        W: (a, n) weights.
        sigma: (n, n) covariance of the inputs, damped.
        bits: 1 to 8.

    Raises:
        ValueError: as :func:`gptq_obs`.
    """
    _check_bits(bits)
    W = as_matrix("W", W).double()
    low, high = W.aminmax(dim=1, keepdim=True)
    step = (high - low) / ((1 << bits) - 1)
    step = torch.where(step > 0, step, 1.0)
    return gptq_obs(W, sigma, step, zero=low, levels=1 << bits)
