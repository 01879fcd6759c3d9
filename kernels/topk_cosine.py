r"""The k most cosine-similar keys of each query, and the rank of its own key, without the scores.

    s_ij = ⟨q_i, k_j⟩ / (‖q_i‖ ‖k_j‖),        top k of each row of s, ties to the lower index

    rank_i = #{j : s_ij > s_ii} + #{j < i : s_ij = s_ii}

A row of zeros is at cosine 0 to everything. ``topk_cosine`` keeps a running list of k candidates a
query, ``match_rank`` one running integer: row i of the queries belongs to row i of the keys, and
recall at every k follows from the ranks at once.

Bytes moved, entries of s bytes, n_q queries, n_k keys, d features, tiles of Q queries:

| | eager | fused |
|---|---|---|
| normalise | 2 s (n_q + n_k) d | none |
| reads of queries and keys | s (n_q + n_k) d | s n_q d n_k / N + s n_k d n_q / Q |
| scores written, then read | 8 n_q n_k | none |
| results | 12 n_q k | 12 n_q k |

The keys are read once for every Q queries and the queries once for every N keys (32 and 64 for the
lists, 128 and 128 for the ranks), from L2 as long as they stay there; HBM then sees each once.
What is saved is the score matrix: at n_q = n_k = 100 000 it is 40 GB, and the lists are 12 MB.

Scores are accumulated in float32 ("ieee", not TF32). d is filled up with zeros to a multiple of 16,
as ``tl.dot`` and 128-bit loads want, and cut into pieces of ``FEATURES``. A score and its index
travel as one 64-bit integer, the score's bits made monotonic in the upper half and the index
complemented in the lower, so that the order of integers is the order wanted, ties included. The
list is a set: the best key of a tile takes the place of the set's worst as long as any query of the
program gains by it, which soon is not once a tile.

Source: nearest neighbours by cosine as every retrieval score uses them; the kernel is ours.
"""

from typing import NamedTuple

import torch

from icmllab.kernels.runtime import (
    cdiv,
    check_dtype,
    check_same_device,
    jit,
    on_device,
    output,
    runs_triton,
    tl,
)

QUERIES = 32
KEYS = 64
FEATURES = 16
# ranks need no lists, so that their square tiles can be larger
RANKED = 128
MOST = 32
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# the CPU scores this many pairs at a time: 16 MB of float64
_SCORED = 1 << 21
# cosines nearer than this tie: equal keys can differ in the last bits of a matrix product
_GRID = 2.0**40


class TopK(NamedTuple):
    """The nearest keys of each query, most similar first.

    Attributes:
        scores: (n_q, k) float32 (float64 for float64 inputs), −∞ where there are fewer than k keys.
        indices: (n_q, k) int64, −1 there.
    """

    scores: torch.Tensor
    indices: torch.Tensor


@jit
def _cosines(
    q_ptr,
    k_ptr,
    rows,
    cols,
    n_q,
    n_k,
    d,
    q_row,
    k_row,
    WIDEN: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Cosines of a tile of queries with a tile of keys: (QUERIES, KEYS) float32."""
    dots = tl.zeros((QUERIES, KEYS), dtype=tl.float32)
    q_norm = tl.zeros((QUERIES,), dtype=tl.float32)
    k_norm = tl.zeros((KEYS,), dtype=tl.float32)
    q_at = q_ptr + rows.to(tl.int64)[:, None] * q_row
    k_at = k_ptr + cols.to(tl.int64)[:, None] * k_row
    for start in range(0, d, FEATURES):
        at = start + tl.arange(0, FEATURES)
        inside = (at < d)[None, :]
        q = tl.load(q_at + at[None, :], mask=(rows < n_q)[:, None] & inside, other=0.0)
        k = tl.load(k_at + at[None, :], mask=(cols < n_k)[:, None] & inside, other=0.0)
        q_wide = q.to(tl.float32)
        k_wide = k.to(tl.float32)
        if WIDEN:  # TF32 holds every bfloat16, so that nothing is lost
            dots = tl.dot(q_wide, tl.trans(k_wide), dots, input_precision="tf32")
        else:
            dots = tl.dot(q, tl.trans(k), dots, input_precision="ieee")
        q_norm += tl.sum(q_wide * q_wide, axis=1)
        k_norm += tl.sum(k_wide * k_wide, axis=1)
    # a row of zeros has no direction: its products are 0, and stay so
    q_unit = 1.0 / tl.sqrt(tl.where(q_norm > 0, q_norm, 1.0))
    k_unit = 1.0 / tl.sqrt(tl.where(k_norm > 0, k_norm, 1.0))
    return dots * q_unit[:, None] * k_unit[None, :]


@jit
def topk_cosine_kernel(
    q_ptr,
    k_ptr,
    exclude_ptr,
    scores_ptr,
    indices_ptr,
    n_q,
    n_k,
    d,
    q_row,
    k_row,
    top,
    EXCLUDE: tl.constexpr,
    WIDEN: tl.constexpr,
    TOP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """The ``top`` best keys of QUERIES queries, TOP a power of two; grid (query tiles,)."""
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    row_in = rows < n_q
    if EXCLUDE:
        low = tl.load(exclude_ptr + 2 * rows, mask=row_in, other=0)
        high = tl.load(exclude_ptr + 2 * rows + 1, mask=row_in, other=0)
    # below every real candidate, and different from one another
    best = tl.full((QUERIES, TOP), -(2**63), dtype=tl.int64) + tl.arange(0, TOP)[None, :]
    for start in range(0, n_k, KEYS):
        cols = start + tl.arange(0, KEYS)
        s = _cosines(
            q_ptr,
            k_ptr,
            rows,
            cols,
            n_q,
            n_k,
            d,
            q_row,
            k_row,
            WIDEN,
            QUERIES,
            KEYS,
            FEATURES,
        )
        s = s + 0.0  # -0 and 0 are one score
        bits = s.to(tl.int32, bitcast=True)
        # negative floats order backwards as integers
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        packed = (ordered << 32) | (0x7FFFFFFF - cols).to(tl.int64)[None, :]
        allowed = (cols < n_k)[None, :]
        if EXCLUDE:
            allowed = allowed & ((cols[None, :] < low[:, None]) | (cols[None, :] >= high[:, None]))
        packed = tl.where(allowed, packed, -(2**63))
        # the tile's best takes the place of the list's worst, until no query gains by it
        first = tl.max(packed, axis=1)
        worst = tl.min(best, axis=1)
        while tl.max((first > worst).to(tl.int32), axis=0) > 0:
            taken = (best == worst[:, None]) & (first > worst)[:, None]
            best = tl.where(taken, first[:, None], best)
            packed = tl.where(packed == first[:, None], -(2**63), packed)
            first = tl.max(packed, axis=1)
            worst = tl.min(best, axis=1)
    # the list is a set until here: read it out in falling order
    at = rows.to(tl.int64) * top
    for place in range(top):
        first = tl.max(best, axis=1)
        best = tl.where(best == first[:, None], -(2**63), best)
        found = first >= -(2**63) + TOP
        ordered = (first >> 32).to(tl.int32)
        bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
        score = tl.where(found, bits.to(tl.float32, bitcast=True), float("-inf"))
        index = tl.where(found, 0x7FFFFFFF - (first & 0x7FFFFFFF).to(tl.int32), -1)
        tl.store(scores_ptr + at + place, score, mask=row_in)
        tl.store(indices_ptr + at + place, index, mask=row_in)


@jit
def match_rank_kernel(
    q_ptr,
    k_ptr,
    ranks_ptr,
    n_q,
    n_k,
    d,
    q_row,
    k_row,
    WIDEN: tl.constexpr,
    QUERIES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """How many keys stand before a query's own; square tiles; grid (query tiles,)."""
    tile = tl.program_id(0)
    rows = tile * QUERIES + tl.arange(0, QUERIES)
    places = tl.arange(0, QUERIES)
    # the query's own score from the same dot that scores the others, so that equal keys tie
    own = _cosines(
        q_ptr, k_ptr, rows, rows, n_q, n_k, d, q_row, k_row, WIDEN, QUERIES, QUERIES, FEATURES
    )
    on_diagonal = places[:, None] == places[None, :]
    mine = tl.sum(tl.where(on_diagonal, own, 0.0), axis=1)
    count = tl.zeros((QUERIES,), dtype=tl.int32)
    for start in range(0, n_k, QUERIES):
        cols = start + places
        s = _cosines(
            q_ptr, k_ptr, rows, cols, n_q, n_k, d, q_row, k_row, WIDEN, QUERIES, QUERIES, FEATURES
        )
        before = (s > mine[:, None]) | ((s == mine[:, None]) & (cols[None, :] < rows[:, None]))
        before = before & (cols < n_k)[None, :]
        count += tl.sum(before.to(tl.int32), axis=1)
    tl.store(ranks_ptr + rows, count, mask=rows < n_q)


def _whole(m: torch.Tensor) -> torch.Tensor:
    """Rows of a multiple of 16 features, zeros at the end, that start at multiples of 16 bytes.

    Loads are then vectors whatever d is; a copy costs nothing beside scoring all pairs.
    """
    pad = -m.shape[1] % 16
    if pad:
        return torch.nn.functional.pad(m, (0, pad))
    aligned = m.stride(1) == 1 and m.stride(0) % 16 == 0 and m.data_ptr() % 16 == 0
    return m if aligned else m.clone(memory_format=torch.contiguous_format)


def _power_of_two(k: int) -> int:
    return 1 << (k - 1).bit_length()


def launch_topk(
    Q: torch.Tensor, K: torch.Tensor, k: int, *, exclude: torch.Tensor | None = None
) -> TopK:
    """Run the Triton kernel on checked inputs, wherever they are."""
    if Q.dtype == torch.bfloat16 and k > 16:
        # registers do not hold a long list beside a widened tile
        Q, K = Q.float(), K.float()
    Q, K = _whole(Q), _whole(K)
    scores = output(len(Q), k, dtype=torch.float32, device=Q.device)
    indices = output(len(Q), k, dtype=torch.int32, device=Q.device)
    has = exclude is not None
    bounds = exclude.to(torch.int32).contiguous() if has else indices
    with on_device(Q):
        topk_cosine_kernel[(cdiv(len(Q), QUERIES),)](
            Q,
            K,
            bounds,
            scores,
            indices,
            len(Q),
            len(K),
            Q.shape[1],
            Q.stride(0),
            K.stride(0),
            k,
            EXCLUDE=has,
            WIDEN=Q.dtype == torch.bfloat16,
            TOP=_power_of_two(k),
            QUERIES=QUERIES,
            KEYS=KEYS,
            FEATURES=FEATURES,
            num_warps=8,
        )
    return TopK(scores, indices.long())


def launch_rank(Q: torch.Tensor, K: torch.Tensor) -> torch.Tensor:
    """Run the Triton kernel on checked inputs, wherever they are."""
    Q, K = _whole(Q), _whole(K)
    ranks = output(len(Q), dtype=torch.int32, device=Q.device)
    with on_device(Q):
        match_rank_kernel[(cdiv(len(Q), RANKED),)](
            Q,
            K,
            ranks,
            len(Q),
            len(K),
            Q.shape[1],
            Q.stride(0),
            K.stride(0),
            WIDEN=Q.dtype == torch.bfloat16,
            QUERIES=RANKED,
            FEATURES=FEATURES,
            num_warps=8,
        )
    return ranks.long()


def _unit(X: torch.Tensor) -> torch.Tensor:
    """Rows of length 1 in float64; rows of zeros stay."""
    X = X.double()
    # by the largest entry first, so that no square overflows or vanishes
    X = X / X.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(X.dtype).tiny)
    norm = X.norm(dim=1, keepdim=True)
    return torch.where(norm > 0, X / norm.clamp(min=0.5), 0.0)


def _score_blocks(Q: torch.Tensor, K: torch.Tensor):
    """(start, cosines of a block of queries with all keys), rounded so that equal keys tie."""
    Q, K = _unit(Q), _unit(K)
    block = max(1, _SCORED // len(K))
    for start in range(0, len(Q), block):
        s = Q[start : start + block] @ K.T
        yield start, s.mul_(_GRID).round_().div_(_GRID).add_(0.0)


def reference_topk(
    Q: torch.Tensor, K: torch.Tensor, k: int, *, exclude: torch.Tensor | None = None
) -> TopK:
    """The same lists in plain PyTorch, in float64, a block of queries at a time."""
    kept = min(k, len(K))
    columns = torch.arange(len(K), device=Q.device)
    scores = torch.full((len(Q), k), -torch.inf, dtype=torch.float64, device=Q.device)
    indices = torch.full((len(Q), k), -1, dtype=torch.int64, device=Q.device)
    for start, s in _score_blocks(Q, K):
        rows = slice(start, start + len(s))
        if exclude is not None:
            low, high = exclude[rows].long().split(1, dim=1)
            s = s.masked_fill((columns >= low) & (columns < high), -torch.inf)
        found = s.topk(min(kept + 1, len(K)), dim=1)
        picked = found.indices[:, :kept].sort(dim=1).values
        # topk promises nothing about ties; only where one lies across the cut does it matter
        if found.values.shape[1] > kept:
            torn = found.values[:, kept - 1] == found.values[:, kept]
            if bool(torn.any()):
                order = s[torn].sort(dim=1, descending=True, stable=True).indices
                picked[torn] = order[:, :kept].sort(dim=1).values
        values, order = s.gather(1, picked).sort(dim=1, descending=True, stable=True)
        scores[rows, :kept] = values
        none = values == -torch.inf
        indices[rows, :kept] = picked.gather(1, order).masked_fill(none, -1)
    wide = torch.promote_types(Q.dtype, torch.float32)
    return TopK(scores.to(wide), indices)


def reference_rank(Q: torch.Tensor, K: torch.Tensor) -> torch.Tensor:
    """The same ranks in plain PyTorch, in float64, a block of queries at a time."""
    columns = torch.arange(len(K), device=Q.device)
    ranks = torch.empty(len(Q), dtype=torch.int64, device=Q.device)
    for start, s in _score_blocks(Q, K):
        own = columns[start : start + len(s), None]
        mine = s.gather(1, own)
        before = (s > mine) | ((s == mine) & (columns < own))
        ranks[start : start + len(s)] = before.sum(dim=1)
    return ranks


def _check(Q: torch.Tensor, K: torch.Tensor) -> None:
    for name, m in (("Q", Q), ("K", K)):
        if m.ndim != 2:
            raise ValueError(f"{name} must be (rows, features): got shape {tuple(m.shape)}")
    if Q.shape[1] != K.shape[1] or Q.shape[1] == 0:
        raise ValueError(
            "Q and K must have the same number of features, at least 1: "
            f"got {Q.shape[1]} and {K.shape[1]}"
        )
    check_dtype("Q", Q, DTYPES)
    check_dtype("K", K, (Q.dtype,))
    check_same_device(Q=Q, K=K)


def _compiles(Q: torch.Tensor, K: torch.Tensor) -> bool:
    # no matrix unit of gfx942 multiplies float64 through tl.dot
    return runs_triton(Q, K) and Q.dtype != torch.float64


def topk_cosine(
    Q: torch.Tensor, K: torch.Tensor, k: int, *, exclude: torch.Tensor | None = None
) -> TopK:
    """The k keys of largest cosine for each query; the (n_q, n_k) scores are never stored.

    Args:
        Q: (n_q, d) float16, bfloat16, float32 or float64, d >= 1, any strides. Norms are taken
            here. On a GPU squares are summed in float32, so entries must stay within 1e±15 there.
        K: (n_k, d), dtype and device of ``Q``.
        k: how many, in [1, 32]; more than n_k leaves the last places empty.
        exclude: (n_q, 2) int32 or int64, the keys low <= j < high that a query must not get, or
            None.

    Returns:
        ``TopK(scores, indices)``, most similar first, ties to the lower index. A GPU accumulates
        in float32 and compares those sums; the CPU computes in float64, where cosines
        within 2⁻⁴⁰ tie.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or k out of range.
    """
    _check(Q, K)
    if isinstance(k, bool) or k != int(k) or not 1 <= k <= MOST:
        raise ValueError(f"k must be a whole number in [1, {MOST}]: got {k}")
    if exclude is not None:
        if exclude.shape != (len(Q), 2):
            raise ValueError(f"exclude must have shape ({len(Q)}, 2): got {tuple(exclude.shape)}")
        check_dtype("exclude", exclude, (torch.int32, torch.int64))
        check_same_device(Q=Q, exclude=exclude)
    if len(Q) == 0 or len(K) == 0:
        wide = torch.promote_types(Q.dtype, torch.float32)
        shape = (len(Q), int(k))
        return TopK(
            torch.full(shape, -torch.inf, dtype=wide, device=Q.device),
            torch.full(shape, -1, dtype=torch.int64, device=Q.device),
        )
    run = launch_topk if _compiles(Q, K) else reference_topk
    return run(Q, K, int(k), exclude=exclude)


def match_rank(Q: torch.Tensor, K: torch.Tensor) -> torch.Tensor:
    """For each query, how many keys stand before its own, row i of K for row i of Q.

    The share of ranks below k is recall at k, for every k at once. The scores are never stored.

    Args:
        Q: (n_q, d) float16, bfloat16, float32 or float64, d >= 1, any strides.
        K: (n_k, d), n_k >= n_q, dtype and device of ``Q``.

    Returns:
        (n_q,) int64 in 0..n_k−1: #{j : s_ij > s_ii} + #{j < i : s_ij = s_ii}.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    _check(Q, K)
    if len(K) < len(Q):
        raise ValueError(f"K must hold a key for each of the {len(Q)} queries: got {len(K)}")
    if len(Q) == 0:
        return torch.empty(0, dtype=torch.int64, device=Q.device)
    run = launch_rank if _compiles(Q, K) else reference_rank
    return run(Q, K)
