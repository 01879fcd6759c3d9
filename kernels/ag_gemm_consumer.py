r"""All-gather and matrix product in one kernel: a tile starts when its own rows have arrived.

C = A B, where A (M, K) is being filled while the kernel runs: chunk c, rows [c·m, (c+1)·m), is
copied by another stream or another GPU, which afterwards writes ``epoch`` to flags[c]. A tile waits
for the flags of the chunks that its rows touch, one or two or more, and for nothing else.

The order of the tiles decides whether anything is hidden. Rank r has its own chunk from the start;
the others arrive as r+1, r+2, … (``order`` 1) or r−1, r−2, … (−1). Row tiles run in that order, a
tile that touches two chunks with the later of them; inside, tiles go in groups of ``GROUP`` rows,
whose rows of A and columns of B stay in L2.

Bytes: those of the plain product, (M K ceil(N/BN) + K N ceil(M/BM) + M N) e, and a flag of 4 bytes
read and written back for each tile and chunk. What is gained is time: after the last chunk has come
only its own tiles are left.

The kernel is persistent: program p computes tiles p, p + P, … of P programs. A flag is read by an
atomic addition of 0 with acquire semantics and system scope, since a copy engine or another GPU
wrote it; that becomes one thread's load behind which the tile's loads stay. The limit is that of
the product, or of the link. **The copies must be enqueued before the kernel, on another stream**,
and must not need the units that the kernel occupies (copy engines don't), else it spins for ever.

Source: the overlapped all-gather GEMM of "DITRON: Distributed Multi-level Tiling Compiler for
Parallel Tensor Programs" (arXiv 2605.02953) and its authors' open repository. The code is our own.
"""

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

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ORDERS = (1, -1)
GROUP = 8


@jit
def ag_gemm_kernel(
    a_ptr,
    b_ptr,
    flags_ptr,
    c_ptr,
    M,
    N,
    K,
    chunk,
    epoch,
    first,
    order,
    group,
    programs,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Tiles p, p + programs, …; ``first`` is the row tile that runs first, ``order`` ±1."""
    row_tiles = tl.cdiv(M, BM)
    col_tiles = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), row_tiles * col_tiles, programs):
        # groups of rows, and in each of them column after column
        slab = group * col_tiles
        start = tile // slab * group
        height = tl.minimum(row_tiles - start, group)
        place = start + (tile % slab) % height
        col = (tile % slab) // height
        row = (first + order * place + row_tiles) % row_tiles
        rows = row * BM + tl.arange(0, BM)
        cols = col * BN + tl.arange(0, BN)
        last = tl.minimum(row * BM + BM, M) - 1
        for c in range(row * BM // chunk, last // chunk + 1):
            while tl.atomic_add(flags_ptr + c, 0, sem="acquire", scope="sys") != epoch:
                pass
        total = tl.zeros((BM, BN), dtype=tl.float32)
        a_at = a_ptr + rows.to(tl.int64)[:, None] * K
        b_at = b_ptr + cols[None, :]
        for k in range(0, K, BK):
            inner = k + tl.arange(0, BK)
            a = tl.load(
                a_at + inner[None, :], mask=(rows < M)[:, None] & (inner < K)[None, :], other=0.0
            )
            b = tl.load(
                b_at + inner.to(tl.int64)[:, None] * N,
                mask=(inner < K)[:, None] & (cols < N)[None, :],
                other=0.0,
            )
            if WIDEN:  # TF32 holds every bfloat16
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        tl.store(
            c_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :],
            total.to(c_ptr.dtype.element_ty),
            mask=(rows < M)[:, None] & (cols < N)[None, :],
        )


def settings(dtype: torch.dtype, small: bool) -> dict[str, object]:
    """Tile sizes and warps: 128 × 128 × 64 with 8 warps for half types, less for float32."""
    if dtype == torch.float32:
        return {"PRECISION": "ieee", "WIDEN": False, "BM": 32, "BN": 64, "BK": 32, "num_warps": 4}
    widen = dtype == torch.bfloat16
    size = 32 if small else 128
    return {
        "PRECISION": "tf32" if widen else "ieee",
        "WIDEN": widen,
        "BM": size,
        "BN": size,
        "BK": 32 if widen or small else 64,
        "num_warps": 4 if small else 8,
    }


def first_tile(chunk: int, rank: int, order: int, M: int, BM: int) -> int:
    """The first row tile that needs no chunk but the rank's own, or the one that comes next.

    A tile with rows of the last chunk to arrive goes to the end of the rotation.
    """
    tiles = cdiv(M, BM)
    if order > 0:
        return cdiv(rank * chunk, BM) % tiles
    end = (rank + 1) * chunk
    return (tiles if end == M else end // BM) - 1 if end >= BM or end == M else tiles - 1


def is_small(M: int, N: int) -> bool:
    """Whether tiles of 128 would leave most units without one."""
    return M * N < 128 * 128


def launch(
    A: torch.Tensor,
    B: torch.Tensor,
    flags: torch.Tensor,
    *,
    rank: int = 0,
    order: int = 1,
    epoch: int = 1,
) -> torch.Tensor:
    """Run the Triton kernel on checked inputs, wherever they are."""
    (M, K), N, R = A.shape, B.shape[1], len(flags)
    C = output(M, N, dtype=A.dtype, device=A.device)
    sizes = settings(A.dtype, is_small(M, N))
    chunk = M // R
    tiles = cdiv(M, sizes["BM"]) * cdiv(N, sizes["BN"])
    units = tiles
    if A.is_cuda:
        units = torch.cuda.get_device_properties(A.device).multi_processor_count
    programs = min(tiles, units)
    with on_device(A):
        ag_gemm_kernel[(programs,)](
            A,
            B,
            flags,
            C,
            M,
            N,
            K,
            chunk,
            epoch,
            first_tile(chunk, rank, order, M, sizes["BM"]),
            order,
            max(1, min(GROUP, chunk // sizes["BM"])),
            programs,
            **sizes,
        )
    return C


def reference(
    A: torch.Tensor,
    B: torch.Tensor,
    flags: torch.Tensor,
    *,
    rank: int = 0,
    order: int = 1,
    epoch: int = 1,
) -> torch.Tensor:
    """The product in plain PyTorch, once everything has arrived.

    Raises:
        ValueError: a chunk has not arrived; here nobody would ever set its flag.
    """
    late = (flags != epoch).nonzero().flatten().tolist()
    if late:
        raise ValueError(f"flags must hold epoch {epoch} for every chunk: chunks {late} don't")
    wide = torch.float64 if A.dtype == torch.float64 else torch.float32
    return (A.to(wide) @ B.to(wide)).to(A.dtype)


def ag_gemm_consumer(
    A: torch.Tensor,
    B: torch.Tensor,
    flags: torch.Tensor,
    *,
    rank: int = 0,
    order: int = 1,
    epoch: int = 1,
) -> torch.Tensor:
    """A matrix product whose left factor arrives in chunks of rows.

    Args:
        A: (M, K) float16, bfloat16, float32 or float64, contiguous: the buffer that fills up.
        B: (K, N), dtype of ``A``, contiguous.
        flags: (R,) int32, one a chunk of M/R rows; a chunk is there when its flag is ``epoch``.
        rank: whose chunk is there from the start, 0 <= rank < R.
        order: 1 when chunks rank+1, rank+2, … arrive next, −1 for rank−1, rank−2, …
        epoch: what a flag must hold. Count it up from call to call and never reset flags: a reset
            would race with the next copy.

    Returns:
        (M, N) in the dtype of ``A``, added up in float32 (float64 for float64).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, M not a multiple of R, a rank or
            order out of range, and on the CPU a flag that is not set.
    """
    if A.ndim != 2 or 0 in A.shape or not A.is_contiguous():
        raise ValueError(f"A must be (M, K), contiguous and not empty: got {tuple(A.shape)}")
    if B.ndim != 2 or B.shape[0] != A.shape[1] or not B.shape[1] or not B.is_contiguous():
        raise ValueError(f"B must be ({A.shape[1]}, N), contiguous: got {tuple(B.shape)}")
    if flags.ndim != 1 or not len(flags) or len(A) % len(flags):
        raise ValueError(
            f"flags must be (R,) with R a divisor of {len(A)} rows: got {tuple(flags.shape)}"
        )
    check_dtype("A", A, DTYPES)
    check_dtype("B", B, (A.dtype,))
    check_dtype("flags", flags, (torch.int32,))
    if not 0 <= rank < len(flags):
        raise ValueError(f"rank must be in [0, {len(flags)}): got {rank}")
    if order not in ORDERS:
        raise ValueError(f"order must be 1 or -1: got {order}")
    check_same_device(A=A, B=B, flags=flags)
    fused = A.dtype != torch.float64 and runs_triton(A, B, flags)
    run = launch if fused else reference
    return run(A, B, flags, rank=rank, order=order, epoch=epoch)
