"""The proofs of :mod:`icmllab.kernels.perm_bilinear`."""

import torch

from icmllab.kernels import perm_bilinear as kernel
from icmllab.kernels.perm_bilinear import perm_bilinear
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Program, permutations
from icmllab.kernels.runtime import cdiv

# a tile's 4096 products are summed in float32, in a tree: some 12 roundings and one a product
TOLERANCE = {torch.float32: (1e-6,), torch.float64: (2e-15,)}


def _case(
    n: int,
    count: int,
    *,
    dtype: torch.dtype = torch.float32,
    symmetric: bool = False,
    strided: str = "",
    masks: bool = False,
    integers: bool = False,
    identity: bool = False,
    index: torch.dtype = torch.int32,
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        K, L = (torch.randn(n, n, generator=g, dtype=torch.float64) for _ in range(2))
        if symmetric:
            K, L = K + K.T, L + L.T
        if masks:
            K, L = (K > 1).double(), (L > 1).double()
        if integers:  # a tile's sum fits into float32, the sum of all tiles does not
            K, L = (torch.randint(0, 64, (n, n), generator=g).double() for _ in range(2))
        K, L = K.to(dtype), L.to(dtype)
        if strided == "columns":  # a transpose, and every second column of a wider matrix
            K = K.T
            L = torch.stack([L, -L], dim=2).reshape(n, 2 * n)[:, ::2]
        if strided == "rows":  # the left part of a wider matrix, and every third row
            K = torch.cat([K, -K[:, :7]], dim=1)[:, :n]
            L = torch.stack([L, -L, -L], dim=1).reshape(3 * n, n)[::3]
        perms = permutations(n, count, g).to(index)
        if identity:
            perms = torch.arange(n, dtype=index).expand(count, n)
        return {"K": K, "L": L, "perms": perms, "symmetric": symmetric}

    return Case(make, (0.0,) if masks or integers else TOLERANCE[dtype])


def _bytes(x: Inputs) -> int:
    """Whole K tiles once a group; what there is of L and the permutations, and a partial sum."""
    n, count, size = len(x["K"]), len(x["perms"]), x["K"].element_size()
    tile = kernel.TILE
    width = [min(tile, n - i * tile) for i in range(cdiv(n, tile))]
    groups = cdiv(count, kernel.PERMS_PER_PROGRAM)
    total = 0
    for i, rows in enumerate(width):
        for cols in width[i:] if x["symmetric"] else width:
            total += groups * (8 + size * tile * tile)
            total += count * (size * rows * cols + 4 * (rows + cols) + size)
    return total


def _program(
    dtype: str, *, symmetric: bool = False, odd: bool = False, smallest: bool = False
) -> Program:
    """``odd``: n is no multiple of 16, nor is the stride of L; the padded K still loads vectors."""
    types = {
        "k_ptr": f"*{dtype}",
        "l_ptr": f"*{dtype}",
        "perms_ptr": "*i32",
        "pairs_ptr": "*i32",
        "partials_ptr": f"*{dtype}",
        **dict.fromkeys(("n", "n_perms", "n_pairs", "k_row", "l_row"), "i32"),
    }
    # sizes of 1 are constants: one point, one permutation
    sizes = ("n", "n_perms", "n_pairs", "l_row") if smallest else ()
    constants = {
        **dict.fromkeys(sizes, 1),
        "SYMMETRIC": symmetric,
        "TILE": kernel.TILE,
        "PERMS": kernel.PERMS_PER_PROGRAM,
    }
    aligned = ["k_ptr", "l_ptr", "perms_ptr", "pairs_ptr", "partials_ptr"]
    aligned += ["k_row"] if odd else ["n", "k_row", "l_row"]
    return Program(
        kernel.perm_bilinear_kernel,
        {a: t for a, t in types.items() if a not in constants},
        constants,
        tuple(a for a in aligned if a not in constants),
        # K is read in rows; L is gathered entry by entry and cannot be
        wide_loads=kernel.TILE**2 * (4 if dtype == "fp32" else 8),
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {"K": torch.eye(4), "L": torch.eye(4), "perms": torch.arange(4)[None]}
    return BadCall(lambda: perm_bilinear(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    K, L = (torch.randn(1024, 1024, generator=g) for _ in range(2))
    K, L, perms = K + K.T, L + L.T, permutations(1024, 1000, g)
    return {"K": K.to(device), "L": L.to(device), "perms": perms.to(device), "symmetric": True}


def _eager(x: Inputs) -> torch.Tensor:
    """Gather, multiply, sum, in pieces of 64 permutations that memory holds."""
    pieces = []
    for perms in x["perms"].long().split(64):
        gathered = x["L"][perms[:, :, None], perms[:, None, :]]
        pieces.append((x["K"] * gathered).sum(dim=(1, 2)))
    return torch.cat(pieces)


SPEC = KernelSpec(
    name="perm_bilinear",
    op=lambda x: (perm_bilinear(x["K"], x["L"], x["perms"], symmetric=x["symmetric"]),),
    launch=lambda x: (kernel.launch(x["K"], x["L"], x["perms"], symmetric=x["symmetric"]),),
    truth=lambda x: (_eager(x),),
    scale=lambda x: (_eager({**x, "K": x["K"].abs(), "L": x["L"].abs()}),),
    cases={
        "float32 n=1": _case(1, 3),
        "float32 n=1 one permutation": _case(1, 1),
        "float32 n=4 one permutation": _case(4, 1),
        "float32 n=63 below a tile": _case(63, 4),
        "float32 n=64 a tile": _case(64, 5),
        "float32 n=65 past a tile": _case(65, 6, index=torch.int64),
        "float32 n=257": _case(257, 3),
        "float32 n=257 symmetric": _case(257, 5, symmetric=True),
        "float32 n=130 strided columns": _case(130, 5, strided="columns"),
        "float32 n=130 strided rows": _case(130, 5, strided="rows"),
        "float32 n=100 masks": _case(100, 9, masks=True),
        "float32 n=257 integers": _case(257, 3, integers=True),
        "float32 n=70 identity": _case(70, 2, identity=True),
        "float32 n=8 1000 permutations": _case(8, 1000),
        "float64 n=1": _case(1, 2, dtype=torch.float64),
        "float64 n=129": _case(129, 5, dtype=torch.float64),
        "float64 n=129 symmetric": _case(129, 5, dtype=torch.float64, symmetric=True),
        "float64 n=66 strided columns": _case(66, 3, dtype=torch.float64, strided="columns"),
    },
    bytes=_bytes,
    flops=lambda x: 2 * len(x["perms"]) * len(x["K"]) ** 2 // (2 if x["symmetric"] else 1),
    programs={
        "fp32": _program("fp32"),
        "fp32 symmetric": _program("fp32", symmetric=True),
        "fp32 odd n": _program("fp32", odd=True),
        "fp32 n=1": _program("fp32", smallest=True),
        "fp64 symmetric": _program("fp64", symmetric=True),
    },
    errors={
        "K empty": _bad("K must be a square matrix with n >= 1", K=torch.zeros(0, 0)),
        "K not square": _bad("K must be a square matrix", K=torch.zeros(3, 4)),
        "K a vector": _bad("K must be a square matrix", K=torch.zeros(4)),
        "K of integers": _bad("K must have dtype", K=torch.zeros(4, 4, dtype=torch.int64)),
        "K in bfloat16": _bad("K must have dtype", K=torch.zeros(4, 4, dtype=torch.bfloat16)),
        "L of another size": _bad("L must have the shape of K", L=torch.zeros(3, 3)),
        "L of another dtype": _bad("L must have dtype float32", L=torch.eye(4).double()),
        "perms of another size": _bad(r"perms must have shape \(B, 4\)", perms=torch.eye(3).long()),
        "perms a vector": _bad(r"perms must have shape \(B, 4\)", perms=torch.arange(4)),
        "perms of floats": _bad("perms must have dtype", perms=torch.zeros(2, 4)),
        "perms out of range": _bad(
            r"perms must hold .*0\.\.3: got 4", perms=torch.arange(1, 5)[None]
        ),
        "perms below zero": _bad(r"perms must hold .*: got -1", perms=torch.arange(-1, 3)[None]),
        "perms with repetition": _bad(
            "perms must hold permutations .*: row 1",
            perms=torch.tensor([[0, 1, 2, 3], [0, 1, 1, 3]]),
        ),
        "perms elsewhere": _bad(
            "must share a device", perms=torch.zeros(1, 4, dtype=torch.int64, device="meta")
        ),
    },
    bench=_bench,
    timed=lambda x: perm_bilinear(x["K"], x["L"], x["perms"], symmetric=x["symmetric"]),
    baselines={"eager": _eager},
    note="served by L2: the share of HBM's roofline may exceed 100 %",
)
