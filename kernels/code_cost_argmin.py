r"""Which point of Y has the code of a point of X, when the codes are distances to anchors.

    cost_ij = sum_l w_il (dx_il - scale * DYt[idx_il, j])^2,     w_il = 1 / max(dx_il, 0.01)

over the r anchors idx_i that are nearest to point i of X; dx are its distances to them, DYt the
distances of all anchors to all points of Y. Only the smallest cost of each i is wanted, where it
is, and the second smallest. Equal costs: the lowest j.

Bytes moved for n points of X, m of Y, p anchors, r in a code, in float32, with N and M the sizes
n and m rounded up to whole tiles of 16 x 128:

| | eager: expand the square, two matrix products | fused |
|---|---|---|
| (n, m) costs written, read, written again, read for the argmin | 16 n m | none |
| weights (n, p), twice written and twice read | 16 n p | none |
| DYt and its square | 16 p m | 4 n M r gathered, from L2 while 4 p m fits there |
| codes, reread for each tile of Y from L1 | 8 n r | 8 n r M / 128 |
| results | 4 n | 12 n |

HBM sees 4 p M + 8 n r + 12 n. Flops: 3 n m r, against 4 n m p for the two products over all p
anchors: it pays when p > r. The difference is squared as it stands, so that short distances lose
nothing to cancellation as they do in the expanded square.

What limits it is the rate at which L2 serves the gathered rows. A row of DYt is contiguous in m,
so that each gather is a run of 128-bit loads; DYt is padded with infinity to whole tiles. A program
walks over all of Y for its 16 points: the running minimum stays in registers, nothing is atomic,
and the result is the same on every run.

Source: the reference-distance codes of "Vector Linking via Cross-Model Local Isometric
Consistency", whose exact form, and the kernel, are ours.
"""

import math
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

ROWS = 16
COLS = 128
FLOOR = 0.01
"""The distance below which an anchor weighs no more: 1 / FLOOR is the largest weight."""

DTYPES = (torch.float32, torch.float64)

# the CPU works on this many costs at a time: 1 MB of float64, which a core's cache holds
_COSTS = 1 << 17


class CodeMatch(NamedTuple):
    """The best match of each point.

    Attributes:
        best_j: (n,) int32, the lowest index among equal costs.
        best_cost: (n,) in the dtype of the distances.
        second_cost: (n,), the smallest cost elsewhere; equal to ``best_cost`` for a tie, infinite
            when Y has one point.
    """

    best_j: torch.Tensor
    best_cost: torch.Tensor
    second_cost: torch.Tensor


@jit
def code_cost_argmin_kernel(
    dx_ptr,
    idx_ptr,
    y_ptr,
    best_ptr,
    cost_ptr,
    second_ptr,
    n,
    r,
    tiles,
    y_row,
    scale,
    FLOOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Best and second cost of ROWS points over all of Y; grid (row tiles,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    at = rows.to(tl.int64) * r
    lanes = tl.arange(0, COLS)
    best = tl.full((ROWS,), float("inf"), tl.float32)
    second = tl.full((ROWS,), float("inf"), tl.float32)
    best_j = tl.zeros((ROWS,), dtype=tl.int32)
    for tile in range(tiles):
        cols = tile * COLS + lanes
        cost = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for slot in range(r):
            dx = tl.load(dx_ptr + at + slot, mask=inside, other=1.0)
            anchor = tl.load(idx_ptr + at + slot, mask=inside, other=0).to(tl.int64)
            # whole tiles: a row's mask does not break its 128-bit loads
            y = tl.load(
                y_ptr + anchor[:, None] * y_row + cols[None, :], mask=inside[:, None], other=0.0
            )
            gap = dx[:, None] - scale * y
            cost += gap * gap / tl.maximum(dx, FLOOR)[:, None]
        first, where = tl.min(cost, axis=1, return_indices=True, return_indices_tie_break_left=True)
        rest = tl.min(tl.where(lanes[None, :] == where[:, None], float("inf"), cost), axis=1)
        # the loser of the two best, or the better of the two seconds
        second = tl.minimum(tl.maximum(best, first), tl.minimum(second, rest))
        # strictly less: among equal costs the earlier tile has the lower index
        best_j = tl.where(first < best, tile * COLS + where, best_j)
        best = tl.minimum(best, first)
    tl.store(best_ptr + rows, best_j, mask=inside)
    tl.store(cost_ptr + rows, best, mask=inside)
    tl.store(second_ptr + rows, second, mask=inside)


def launch(dx: torch.Tensor, idx: torch.Tensor, DYt: torch.Tensor, scale: float) -> CodeMatch:
    """Run the Triton kernel on checked float32 inputs, wherever they are."""
    (n, r), m = dx.shape, DYt.shape[1]
    tiles = cdiv(m, COLS)
    # beside n r passes over the rows of DYt a copy costs nothing; infinity is nobody's best match
    padded = torch.full((len(DYt), tiles * COLS), math.inf, dtype=DYt.dtype, device=DYt.device)
    padded[:, :m] = DYt
    found = CodeMatch(
        output(n, dtype=torch.int32, device=dx.device),
        output(n, dtype=torch.float32, device=dx.device),
        output(n, dtype=torch.float32, device=dx.device),
    )
    with on_device(dx):
        code_cost_argmin_kernel[(cdiv(n, ROWS),)](
            dx.contiguous(),
            idx.to(torch.int32).contiguous(),
            padded,
            *found,
            n,
            r,
            tiles,
            padded.stride(0),
            float(scale),
            FLOOR=FLOOR,
            ROWS=ROWS,
            COLS=COLS,
            num_warps=4,
        )
    return found


def reference(dx: torch.Tensor, idx: torch.Tensor, DYt: torch.Tensor, scale: float) -> CodeMatch:
    """The same in plain PyTorch, in float64.

    The square is expanded and each point sums 2r weighted rows of DYt and its square; where a code
    takes more than a quarter of the anchors, one matrix product is faster. Rounding may split
    equal costs of the expanded form, so that costs within 1e-12 of the smallest, relative to the
    terms that cancel, count as equal to it.
    """
    (n, r), (p, m) = dx.shape, DYt.shape
    code, anchors = dx.double(), idx.long()
    weight = 1 / code.clamp_min(FLOOR)
    constant = (weight * code.square()).sum(dim=1, keepdim=True)
    scaled = DYt.double() * scale
    table = torch.cat([scaled, scaled.square()])
    anchors = torch.cat([anchors, anchors + p], dim=1)
    weight = torch.cat([-2 * weight * code, weight], dim=1)
    best_j = torch.empty(n, dtype=torch.int32, device=dx.device)
    best, second = (torch.empty(n, dtype=torch.float64, device=dx.device) for _ in range(2))
    columns = torch.arange(m, device=dx.device)
    chunk = max(1, _COSTS // m)
    for start in range(0, n, chunk):
        part = slice(start, start + chunk)
        if 4 * r > p:
            W = table.new_zeros(len(code[part]), 2 * p)
            cost = W.scatter_add_(1, anchors[part], weight[part]) @ table
        else:
            cost = torch.nn.functional.embedding_bag(
                anchors[part], table, per_sample_weights=weight[part], mode="sum"
            )
        cost = cost.add_(constant[part]).clamp_min_(0.0)
        least = cost.amin(dim=1, keepdim=True)
        where = torch.where(cost <= least + 1e-12 * constant[part], columns, m)
        where = where.amin(dim=1, keepdim=True)
        best_j[part] = where[:, 0].to(torch.int32)
        best[part] = least[:, 0]
        second[part] = cost.scatter_(1, where, math.inf).amin(dim=1)
    return CodeMatch(best_j, best.to(dx.dtype), second.to(dx.dtype))


def code_cost_argmin(
    dx: torch.Tensor, idx: torch.Tensor, DYt: torch.Tensor, scale: float
) -> CodeMatch:
    """For each point of X, the point of Y whose distances to the same anchors fit best.

    Args:
        dx: (n, r) float32 or float64, distances of each point of X to the anchors of its code.
        idx: (n, r) int32 or int64, which anchors these are, in 0..p-1; checked on the CPU alone:
            on a GPU the host would have to wait.
        DYt: (p, m), dtype and device of ``dx``: distances of the anchors to the points of Y, any
            strides.
        scale: the factor from distances of Y to those of X, > 0.

    Returns:
        Index and cost of the best match, and the second-best cost. On a GPU float32 is summed in
        float32; everything else is summed in float64.

    Raises:
        ValueError: shapes, dtypes, devices, indices or a scale that do not fit.
    """
    if dx.ndim != 2 or dx.shape[1] == 0:
        raise ValueError(f"dx must be (n, r) with r >= 1: got shape {tuple(dx.shape)}")
    if idx.shape != dx.shape:
        raise ValueError(
            f"idx must have the shape of dx, {tuple(dx.shape)}: got {tuple(idx.shape)}"
        )
    if DYt.ndim != 2 or DYt.numel() == 0:
        raise ValueError(f"DYt must be (p, m) with p, m >= 1: got shape {tuple(DYt.shape)}")
    check_dtype("dx", dx, DTYPES)
    check_dtype("DYt", DYt, (dx.dtype,))
    check_dtype("idx", idx, (torch.int32, torch.int64))
    check_same_device(dx=dx, idx=idx, DYt=DYt)
    check_indices("idx", idx, len(DYt))
    if not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"scale must be a number > 0 and finite: got {scale!r}")
    if len(dx) == 0:
        empty = dx.new_empty(0)
        return CodeMatch(empty.to(torch.int32), empty, empty)
    # Triton passes a float argument as float32, which float64 distances would feel
    fused = dx.dtype == torch.float32 and runs_triton(dx, idx, DYt)
    return (launch if fused else reference)(dx, idx, DYt, scale)
