r"""The triplet loss of an embedding and its gradient, in one pass over the triplets.

A triplet (i, j, k) asks for point i to lie nearer to j than to k. With

    near = |x_i - x_j|^2,   far = |x_i - x_k|^2,   z = scale * (near - far)
    loss = mean softplus(z),   hits = sum of 1 where near < far, 1/2 where near = far
    q    = scale * sigmoid(z) / m
    grad_i += 2 q (x_k - x_j),   grad_j += 2 q (x_j - x_i),   grad_k += 2 q (x_i - x_k)

the three rows that the loss needs are the three rows that the gradient needs, so that they are
gathered once and the gradient leaves before they do.

Words of 4 bytes moved for m triplets of n points in d dimensions:

| | eager, forward and backward | fused, atomic | fused, deterministic |
|---|---|---|---|
| rows gathered | 3 md written, 3 md read | 3 md read | 3 md + 6 md read |
| differences, squares, sums | about 17 md | none | none |
| gradient | about 15 md | 3 md atomic adds (each reads and writes) | nd written |
| indices, q, incidences | small | 3 m | 16 m |
| in all | about 38 md | about 9 md | about 9 md |

The atomic form adds in the order in which programs happen to arrive: two runs differ in the last
bits. The deterministic form stores q, then one program a point (and slice of columns) walks the
list of triplets that the point is in, in their order. The list takes one sort of 3m keys; a loop
over fixed triplets builds it once (`incidences`) and hands it in. Above 1024 dimensions the rows
no longer fit into a program's registers, and the fused pass sweeps over them twice.

What limits both is the gather: rows lie in scattered order, each is contiguous. While the points
fit into the L2 cache, memory sees little more than the indices. A point in very many triplets is
slow in both forms: its atomics queue, or its one program walks a long list.

Source: triplets as supervision are those of "Provable Accuracy Collapse in Embedding-Based
Representations under Dimensionality Mismatch"; the loss is the usual smooth one, the kernel ours.
"""

from typing import NamedTuple

import torch

from icmllab.kernels.runtime import (
    cdiv,
    check_dtype,
    check_indices,
    check_same_device,
    jit,
    on_device,
    output,
    runs_triton,
    tl,
)

DTYPES = (torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)

MAX_COLUMNS = 1024
"""Columns that a program holds at once; wider points are swept over twice."""

TILE = 2048
"""Entries of each of the three gathered rows that a program holds."""

MAX_TRIPLETS = 128
"""Triplets of a program at most: one a thread."""

WALK = 16
"""Incidences that a program of the deterministic form takes at a time, at most."""

# the CPU gathers this many entries at a time: three such buffers stay within a core's cache
_GATHERED = 1 << 17


class TripletStep(NamedTuple):
    """One pass over the triplets.

    Attributes:
        loss: () the mean loss, in the dtype of the points.
        hits: () float64, satisfied triplets, a tie counting one half; hits / m is the accuracy.
        grad: (n, d) gradient of the loss in the dtype of the points, None where not asked for.
    """

    loss: torch.Tensor
    hits: torch.Tensor
    grad: torch.Tensor | None


class Incidences(NamedTuple):
    """For each point the triplets that it is in.

    Attributes:
        starts: (n+1,) int32, where the list of each point begins; the last is 3m.
        codes: (3m,) int32, 3 * triplet + role (0 anchor, 1 near, 2 far), triplets in order.
    """

    starts: torch.Tensor
    codes: torch.Tensor


@jit
def triplet_loss_kernel(
    x_ptr,
    triplet_ptr,
    loss_ptr,
    hits_ptr,
    q_ptr,
    grad_ptr,
    n_triplets,
    d,
    scale,
    scale_over_m,
    ATOMIC: tl.constexpr,
    STORE_Q: tl.constexpr,
    ONE_SWEEP: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Loss, hits and gradient of BLOCK_T triplets; grid (blocks of triplets,).

    WHOLE: d is BLOCK_D, so that the columns need no mask and rows load as vectors.
    """
    program = tl.program_id(0)
    t = program * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < n_triplets
    at = triplet_ptr + 3 * t.to(tl.int64)
    row_i = tl.load(at, mask=inside, other=0).to(tl.int64)[:, None] * d
    row_j = tl.load(at + 1, mask=inside, other=0).to(tl.int64)[:, None] * d
    row_k = tl.load(at + 2, mask=inside, other=0).to(tl.int64)[:, None] * d
    cols = tl.arange(0, BLOCK_D)[None, :]
    if ONE_SWEEP:
        if WHOLE:
            here = inside[:, None]
        else:
            here = inside[:, None] & (cols < d)
        x_i = tl.load(x_ptr + row_i + cols, mask=here, other=0.0)
        x_j = tl.load(x_ptr + row_j + cols, mask=here, other=0.0)
        x_k = tl.load(x_ptr + row_k + cols, mask=here, other=0.0)
        near = tl.sum((x_i - x_j) * (x_i - x_j), axis=1)
        far = tl.sum((x_i - x_k) * (x_i - x_k), axis=1)
    else:
        near = tl.zeros((BLOCK_T,), dtype=tl.float32)
        far = tl.zeros((BLOCK_T,), dtype=tl.float32)
        for first in range(0, d, BLOCK_D):
            col = first + cols
            here = inside[:, None] & (col < d)
            x_i = tl.load(x_ptr + row_i + col, mask=here, other=0.0)
            x_j = tl.load(x_ptr + row_j + col, mask=here, other=0.0)
            x_k = tl.load(x_ptr + row_k + col, mask=here, other=0.0)
            near += tl.sum((x_i - x_j) * (x_i - x_j), axis=1)
            far += tl.sum((x_i - x_k) * (x_i - x_k), axis=1)
    z = scale * (near - far)
    u = tl.exp(-tl.abs(z))
    # log(1 + u) loses a small u; multiplied by u / ((1 + u) - 1) it does not
    v = 1.0 + u
    log1p = tl.where(v == 1.0, u, tl.log(v) * (u / tl.where(v == 1.0, 1.0, v - 1.0)))
    losses = tl.where(inside, tl.maximum(z, 0.0) + log1p, 0.0)
    hit = tl.where(near < far, 1.0, tl.where(near == far, 0.5, 0.0))
    tl.store(loss_ptr + program, tl.sum(losses, axis=0))
    tl.store(hits_ptr + program, tl.sum(tl.where(inside, hit, 0.0), axis=0))
    q = scale_over_m * tl.where(z >= 0.0, 1.0 / v, u / v)
    if STORE_Q:
        tl.store(q_ptr + t, q, mask=inside)
    if ATOMIC:
        w = 2.0 * q[:, None]
        if ONE_SWEEP:
            tl.atomic_add(grad_ptr + row_i + cols, w * (x_k - x_j), mask=here, sem="relaxed")
            tl.atomic_add(grad_ptr + row_j + cols, w * (x_j - x_i), mask=here, sem="relaxed")
            tl.atomic_add(grad_ptr + row_k + cols, w * (x_i - x_k), mask=here, sem="relaxed")
        else:
            for first in range(0, d, BLOCK_D):
                col = first + cols
                here = inside[:, None] & (col < d)
                x_i = tl.load(x_ptr + row_i + col, mask=here, other=0.0)
                x_j = tl.load(x_ptr + row_j + col, mask=here, other=0.0)
                x_k = tl.load(x_ptr + row_k + col, mask=here, other=0.0)
                tl.atomic_add(grad_ptr + row_i + col, w * (x_k - x_j), mask=here, sem="relaxed")
                tl.atomic_add(grad_ptr + row_j + col, w * (x_j - x_i), mask=here, sem="relaxed")
                tl.atomic_add(grad_ptr + row_k + col, w * (x_i - x_k), mask=here, sem="relaxed")


@jit
def triplet_gather_kernel(
    x_ptr,
    triplet_ptr,
    q_ptr,
    starts_ptr,
    codes_ptr,
    grad_ptr,
    d,
    n_slices,
    WHOLE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One slice of one point's gradient from its triplets, in order; grid (points * slices,)."""
    point = tl.program_id(0) // n_slices
    cols = (tl.program_id(0) % n_slices) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(starts_ptr + point)
    end = tl.load(starts_ptr + point + 1)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for first in range(begin, end, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        inside = e < end
        code = tl.load(codes_ptr + e, mask=inside, other=0)
        t = code // 3
        role = code - 3 * t
        at = triplet_ptr + 3 * t.to(tl.int64)
        # anchor: x_k - x_j; near: x_j - x_i; far: x_i - x_k
        plus = tl.load(at + 2 - role, mask=inside, other=0).to(tl.int64)[:, None] * d
        minus = tl.load(at + (4 - role) % 3, mask=inside, other=0).to(tl.int64)[:, None] * d
        q = tl.load(q_ptr + t, mask=inside, other=0.0)
        if WHOLE:
            here = inside[:, None]
        else:
            here = inside[:, None] & (cols < d)[None, :]
        x_plus = tl.load(x_ptr + plus + cols[None, :], mask=here, other=0.0)
        x_minus = tl.load(x_ptr + minus + cols[None, :], mask=here, other=0.0)
        total += tl.sum(q[:, None] * (x_plus - x_minus), axis=0)
    out = grad_ptr + point.to(tl.int64) * d + cols
    if WHOLE:
        tl.store(out, 2.0 * total)
    else:
        tl.store(out, 2.0 * total, mask=cols < d)


def block_sizes(d: int) -> tuple[int, int]:
    """Triplets and columns of a program for points of d dimensions."""
    columns = min(MAX_COLUMNS, 1 << (d - 1).bit_length())
    return min(MAX_TRIPLETS, TILE // columns), columns


def incidences(triplets: torch.Tensor, n_points: int) -> Incidences:
    """The triplets that each point is in, for the deterministic form.

    Args:
        triplets: (m, 3) int32 or int64, entries in 0..n_points-1, 3m < 2^31.
        n_points: n.

    Raises:
        ValueError: shape, dtype or entries that do not fit.
    """
    _check_triplets(triplets, n_points)
    flat = triplets.flatten().long()
    codes = torch.argsort(flat, stable=True).to(torch.int32)
    starts = torch.zeros(n_points + 1, dtype=torch.int32, device=triplets.device)
    starts[1:] = torch.bincount(flat, minlength=n_points).cumsum(0)
    return Incidences(starts, codes)


def launch(
    X: torch.Tensor,
    triplets: torch.Tensor,
    *,
    scale: float = 1.0,
    gradient: bool = True,
    deterministic: bool = False,
    lists: Incidences | None = None,
) -> TripletStep:
    """Run the Triton kernels on checked inputs, wherever they are."""
    (n, d), m = X.shape, len(triplets)
    X, triplets = X.contiguous(), triplets.to(torch.int32).contiguous()
    block_t, block_d = block_sizes(d)
    programs = cdiv(m, block_t)
    make = {"dtype": torch.float32, "device": X.device}
    losses, hits = (output(programs, **make) for _ in range(2))
    atomic, store_q = gradient and not deterministic, gradient and deterministic
    # atomics add to what is there
    grad = torch.zeros(n, d, **make) if atomic else losses
    q = output(m, **make) if store_q else losses
    with on_device(X):
        triplet_loss_kernel[(programs,)](
            X,
            triplets,
            losses,
            hits,
            q,
            grad,
            m,
            d,
            float(scale),
            float(scale) / m,
            ATOMIC=atomic,
            STORE_Q=store_q,
            ONE_SWEEP=d <= MAX_COLUMNS,
            WHOLE=d == block_d,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            num_warps=4,
        )
        if store_q:
            lists = incidences(triplets, n) if lists is None else lists
            grad = output(n, d, **make)
            slices = cdiv(d, block_d)
            triplet_gather_kernel[(n * slices,)](
                X,
                triplets,
                q,
                lists.starts,
                lists.codes,
                grad,
                d,
                slices,
                WHOLE=d == slices * block_d,
                BLOCK_E=min(WALK, block_t),
                BLOCK_D=block_d,
                num_warps=4,
            )
    loss = (losses.sum(dtype=torch.float64) / m).to(X.dtype)
    return TripletStep(loss, hits.sum(dtype=torch.float64), grad if gradient else None)


def reference(
    X: torch.Tensor, triplets: torch.Tensor, *, scale: float = 1.0, gradient: bool = True
) -> TripletStep:
    """The same in plain PyTorch, in the dtype of the points; float64 gives the truth.

    The triplets go through in pieces that a core's cache holds.
    """
    m, d = len(triplets), X.shape[1]
    loss = torch.zeros((), dtype=torch.float64, device=X.device)
    hits = torch.zeros((), dtype=torch.float64, device=X.device)
    grad = torch.zeros_like(X) if gradient else None
    for part in triplets.long().split(max(1, _GATHERED // d)):
        i, j, k = part.unbind(dim=1)
        x_i, x_j, x_k = (X.index_select(0, index) for index in (i, j, k))
        to_near, to_far = x_i - x_j, x_i - x_k
        near, far = to_near.square().sum(dim=1), to_far.square().sum(dim=1)
        z = scale * (near - far)
        loss += torch.nn.functional.softplus(z, threshold=40.0).sum(dtype=torch.float64)
        hits += (near < far).sum() + 0.5 * (near == far).sum()
        if gradient:
            w = (2 * scale / m) * torch.sigmoid(z)[:, None]
            to_near *= w
            to_far *= w
            grad.index_add_(0, i, to_near - to_far)
            grad.index_add_(0, j, to_near, alpha=-1)
            grad.index_add_(0, k, to_far)
    return TripletStep((loss / m).to(X.dtype), hits, grad)


def triplet_loss_fwd_bwd(
    X: torch.Tensor,
    triplets: torch.Tensor,
    *,
    scale: float = 1.0,
    gradient: bool = True,
    deterministic: bool | None = None,
    lists: Incidences | None = None,
) -> TripletStep:
    """Loss, satisfied triplets and gradient, each triplet's rows gathered once.

    Args:
        X: (n, d) float32 or float64 points, d >= 1. float64 runs the reference on every device.
        triplets: (m, 3) int32 or int64, m >= 1, rows (i, j, k) that ask for i to be nearer to j
            than to k. Entries are checked on the CPU alone: on a GPU the host would have to wait.
        scale: the factor of near - far inside the softplus, finite.
        gradient: whether to compute it; False leaves ``grad`` None.
        deterministic: the same bits on every run, on a GPU too. None asks
            ``torch.are_deterministic_algorithms_enabled()``.
        lists: ``incidences(triplets, n)``, which the deterministic form else builds at each call.

    Raises:
        ValueError: shapes, dtypes, devices, entries or a scale that do not fit.
    """
    _check(X, triplets, scale)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if lists is not None:
        check_same_device(X=X, lists=lists.starts)
        if len(lists.starts) != len(X) + 1 or len(lists.codes) != 3 * len(triplets):
            raise ValueError(
                f"lists must belong to {len(X)} points and {len(triplets)} triplets: got "
                f"{len(lists.starts) - 1} points and {len(lists.codes) / 3:g} triplets"
            )
    X = X.detach()
    if X.dtype == torch.float32 and runs_triton(X, triplets):
        return launch(
            X, triplets, scale=scale, gradient=gradient, deterministic=deterministic, lists=lists
        )
    return reference(X, triplets, scale=scale, gradient=gradient)


class _TripletLoss(torch.autograd.Function):
    """The forward pass computes the gradient too, while the rows are at hand."""

    @staticmethod
    def forward(ctx, X, triplets, scale, deterministic, lists):
        wanted = ctx.needs_input_grad[0]
        step = triplet_loss_fwd_bwd(
            X, triplets, scale=scale, gradient=wanted, deterministic=deterministic, lists=lists
        )
        if wanted:
            ctx.save_for_backward(step.grad)
        return step.loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return upstream * grad, None, None, None, None


def triplet_loss(
    X: torch.Tensor,
    triplets: torch.Tensor,
    *,
    scale: float = 1.0,
    deterministic: bool | None = None,
    lists: Incidences | None = None,
) -> torch.Tensor:
    """Mean softplus(scale * (|x_i - x_j|^2 - |x_i - x_k|^2)), differentiable once in the points.

    Args:
        X: (n, d) float32 or float64.
        triplets: (m, 3), as in :func:`triplet_loss_fwd_bwd`; so are the options.

    Returns:
        () in the dtype of ``X``.

    Raises:
        ValueError: as in :func:`triplet_loss_fwd_bwd`.
    """
    return _TripletLoss.apply(X, triplets, scale, deterministic, lists)


def _check(X: torch.Tensor, triplets: torch.Tensor, scale: float) -> None:
    if X.ndim != 2 or X.shape[1] == 0:
        raise ValueError(f"X must have shape (n, d) with d >= 1: got {tuple(X.shape)}")
    check_dtype("X", X, DTYPES)
    check_same_device(X=X, triplets=triplets)
    _check_triplets(triplets, len(X))
    if not abs(scale) < float("inf"):
        raise ValueError(f"scale must be finite: got {scale}")


def _check_triplets(triplets: torch.Tensor, n_points: int) -> None:
    if triplets.ndim != 2 or triplets.shape[1] != 3 or len(triplets) == 0:
        raise ValueError(
            f"triplets must have shape (m, 3) with m >= 1: got {tuple(triplets.shape)}"
        )
    check_dtype("triplets", triplets, INDEX_DTYPES)
    if 3 * len(triplets) >= 2**31:
        raise ValueError(f"triplets must be fewer than 2^31 / 3: got {len(triplets)}")
    check_indices("triplets", triplets, n_points)
