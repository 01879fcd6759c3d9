"""The proofs of :mod:`icmllab.kernels.ag_gemm_consumer`."""

import torch

from icmllab.kernels import ag_gemm_consumer as kernel
from icmllab.kernels.ag_gemm_consumer import ag_gemm_consumer
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv

HALF = torch.float16
TOLERANCE = {torch.float32: 1e-6, HALF: 1e-3, torch.bfloat16: 8e-3}


def _case(
    M: int,
    K: int,
    N: int,
    R: int,
    *,
    rank: int = 0,
    order: int = 1,
    epoch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        return {
            "A": torch.randn(M, K, generator=g).to(dtype),
            "B": torch.randn(K, N, generator=g).to(dtype),
            "flags": torch.full((R,), epoch, dtype=torch.int32),
            "rank": rank,
            "order": order,
            "epoch": epoch,
        }

    return Case(make, (TOLERANCE[dtype],))


def _bytes(x: Inputs) -> int:
    """A once for each column of tiles, B once for each row of them, C, a flag a tile and chunk."""
    (M, K), N, R = x["A"].shape, x["B"].shape[1], len(x["flags"])
    sizes = kernel.settings(x["A"].dtype, kernel.is_small(M, N))
    down, across = cdiv(M, sizes["BM"]), cdiv(N, sizes["BN"])
    chunk = M // R
    waits = sum(
        (min((t + 1) * sizes["BM"], M) - 1) // chunk - t * sizes["BM"] // chunk + 1
        for t in range(down)
    )
    e = x["A"].element_size()
    return e * (across * M * K + down * K * N + M * N) + 8 * across * waits


def _truth(x: Inputs) -> Outputs:
    return (x["A"] @ x["B"],)


def _program(dtype: str, *, odd: bool = False, small: bool = False) -> Program:
    types = {
        "a_ptr": f"*{dtype}",
        "b_ptr": f"*{dtype}",
        "flags_ptr": "*i32",
        "c_ptr": f"*{dtype}",
        **dict.fromkeys(("M", "N", "K", "chunk", "epoch", "first", "order", "group"), "i32"),
        "programs": "i32",
    }
    dtypes = {"fp16": HALF, "bf16": torch.bfloat16, "fp32": torch.float32}
    sizes = kernel.settings(dtypes[dtype], small)
    num_warps = sizes.pop("num_warps")
    aligned = [a for a in types if a.endswith("_ptr")] + ([] if odd else ["M", "N", "K", "chunk"])
    # loads are asynchronous copies to shared memory; the tests of the chapter look at them
    return Program(kernel.ag_gemm_kernel, types, sizes, tuple(aligned), num_warps=num_warps)


def _bad(message: str, **change: object) -> BadCall:
    good = {
        "A": torch.ones(4, 3),
        "B": torch.ones(3, 5),
        "flags": torch.ones(2, dtype=torch.int32),
    }
    return BadCall(lambda: ag_gemm_consumer(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    made = {
        "A": torch.randn(8192, 4096, generator=g).half(),
        "B": torch.randn(4096, 4096, generator=g).half(),
        "flags": torch.ones(8, dtype=torch.int32),
    }
    made = {name: t.to(device) for name, t in made.items()}
    return {**made, "rank": 3, "order": 1, "epoch": 1}


SPEC = KernelSpec(
    name="ag_gemm_consumer",
    op=lambda x: (ag_gemm_consumer(**x),),
    launch=lambda x: (kernel.launch(**x),),
    truth=_truth,
    scale=lambda x: (x["A"].abs() @ x["B"].abs(),),
    cases={
        "one row": _case(1, 16, 8, 1),
        "R=1": _case(40, 20, 30, 1),
        "R=4 rank 2": _case(128, 48, 65, 4, rank=2),
        "R=4 rank 2 descending": _case(128, 48, 65, 4, rank=2, order=-1),
        "tiles over two chunks": _case(120, 33, 70, 5, rank=3, epoch=7),
        "tiles over two chunks descending": _case(120, 33, 70, 5, rank=0, order=-1),
        "chunks smaller than a tile": _case(48, 17, 16, 16, rank=9),
        "chunks smaller than a tile descending": _case(48, 17, 16, 16, rank=0, order=-1),
        "float16": _case(96, 64, 80, 3, rank=1, dtype=HALF),
        "float16 large tiles": _case(160, 72, 144, 2, rank=1, dtype=HALF),
        "bfloat16": _case(64, 40, 64, 2, dtype=torch.bfloat16),
    },
    bytes=_bytes,
    flops=lambda x: 2 * x["A"].numel() * x["B"].shape[1],
    programs={
        "fp16": _program("fp16"),
        "bf16": _program("bf16"),
        "fp32": _program("fp32"),
        "fp16 small": _program("fp16", small=True),
        "fp32 odd": _program("fp32", odd=True),
    },
    errors={
        "A a vector": _bad("A must be", A=torch.ones(4)),
        "A strided": _bad("A must be", A=torch.ones(3, 4).T),
        "B of another size": _bad("B must be", B=torch.ones(4, 5)),
        "flags that do not divide": _bad("flags must be", flags=torch.ones(3, dtype=torch.int32)),
        "flags of another dtype": _bad("flags must have dtype", flags=torch.ones(2)),
        "A of integers": _bad("A must have dtype", A=torch.ones(4, 3).long()),
        "B of another dtype": _bad("B must have dtype", B=torch.ones(3, 5).double()),
        "rank": _bad("rank must be", rank=2),
        "order": _bad("order must be", order=0),
        "a chunk that never comes": _bad("chunks \\[1\\]", flags=torch.tensor([1, 0]).int()),
        "elsewhere": _bad("must share a device", B=torch.ones(3, 5, device="meta")),
    },
    bench=_bench,
    timed=lambda x: ag_gemm_consumer(**x),
    baselines={"eager": lambda x: x["A"] @ x["B"]},
    note="here all chunks are there; the gain is the copy time that it hides",
)
