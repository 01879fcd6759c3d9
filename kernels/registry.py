"""Every kernel with what its proofs need; tests, compilation table and benchmarks come from here.

To add a kernel, write its file and one :class:`KernelSpec` in :func:`specs`; README.md in this
folder says how.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from icmllab.kernels import adamw_power_step as adamw
from icmllab.kernels import perm_bilinear as bilinear
from icmllab.kernels import perm_knn_overlap as overlap
from icmllab.kernels.runtime import cdiv

Inputs = dict[str, object]


@dataclass(frozen=True)
class Program:
    """One compiled form of a kernel: argument types, constants, and what it must contain.

    Attributes:
        kernel: the ``@jit`` function.
        signature: argument name → Triton type (``*fp32``, ``i32``, ``fp32``), constants left out.
        constants: argument name → value, for ``constexpr`` arguments and strides known to be 1.
        divisible: arguments that are multiples of 16 (pointers and sizes); without it loads
            stay scalar.
        num_warps: warps a program.
        wide: whether loads and stores must be 128 bits wide on every target.
    """

    kernel: Callable
    signature: dict[str, str]
    constants: dict[str, object]
    divisible: tuple[str, ...]
    num_warps: int = 4
    wide: bool = False


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and everything that proves it.

    Attributes:
        name: the file's name.
        run: launches the Triton kernel on ``inputs`` and returns its outputs, wherever they are.
        truth: the reference on float64 copies of ``inputs``; same outputs.
        cases: name → maker of inputs from a seeded generator; edge shapes and dtypes.
        tolerance: dtype name in the case's name → relative error allowed for each output, with
            the largest entry of the truth as unit.
        bytes: what loads and stores move for ``inputs``, as the kernel's model says.
        flops: floating-point operations for ``inputs``.
        programs: name → compiled form.
        bench: maker of large inputs for a device.
        eager: the same work as people write it in PyTorch, for the benchmark.
    """

    name: str
    run: Callable[[Inputs], tuple[torch.Tensor, ...]]
    truth: Callable[[Inputs], tuple[torch.Tensor, ...]]
    cases: dict[str, Callable[[torch.Generator], Inputs]]
    tolerance: dict[str, tuple[float, ...]]
    bytes: Callable[[Inputs], int]
    flops: Callable[[Inputs], int]
    programs: dict[str, Program]
    bench: Callable[[torch.device], Inputs]
    eager: Callable[[Inputs], object]
    notes: str = field(default="")


def _permutations(n: int, count: int, g: torch.Generator) -> torch.Tensor:
    return torch.stack([torch.randperm(n, generator=g) for _ in range(count)]).to(torch.int32)


# perm_bilinear


def _bilinear_case(
    n: int,
    count: int,
    dtype: torch.dtype,
    *,
    symmetric: bool = False,
    strided: bool = False,
    masks: bool = False,
    identity: bool = False,
):
    def make(g: torch.Generator) -> Inputs:
        K, L = (torch.randn(n, n, generator=g, dtype=torch.float64) for _ in range(2))
        if symmetric:
            K, L = K + K.T, L + L.T
        if masks:
            K, L = (K > 1).double(), (L > 1).double()
        K, L = K.to(dtype), L.to(dtype)
        if strided:  # a transpose and every second column of a wider matrix
            K = K.T
            L = torch.stack([L, L], dim=2).reshape(n, 2 * n)[:, ::2]
        perms = _permutations(n, count, g)
        if identity:
            perms = torch.arange(n, dtype=torch.int32).expand(count, n).contiguous()
        return {"K": K, "L": L, "perms": perms, "symmetric": symmetric}

    return make


def _bilinear_bytes(x: Inputs) -> int:
    """K tiles once a group of permutations; L tiles, permutations and a partial sum for each."""
    n, count, size = len(x["K"]), len(x["perms"]), x["K"].element_size()
    tile = bilinear.TILE
    width = [min(tile, n - i * tile) for i in range(cdiv(n, tile))]
    groups = cdiv(count, bilinear.PERMS_PER_PROGRAM)
    total = 0
    for i, rows in enumerate(width):
        for cols in width[i:] if x["symmetric"] else width:
            total += groups * (8 + size * rows * cols)
            total += count * (size * rows * cols + 4 * (rows + cols) + size)
    return total


def _bilinear_program(dtype: str, *, symmetric: bool) -> Program:
    signature = {
        "k_ptr": f"*{dtype}",
        "l_ptr": f"*{dtype}",
        "perms_ptr": "*i32",
        "pairs_ptr": "*i32",
        "partials_ptr": f"*{dtype}",
        "n": "i32",
        "n_perms": "i32",
        "n_pairs": "i32",
        "k_row": "i32",
        "l_row": "i32",
    }
    constants = {
        "k_col": 1,
        "l_col": 1,
        "SYMMETRIC": symmetric,
        "TILE": bilinear.TILE,
        "PERMS": bilinear.PERMS_PER_PROGRAM,
    }
    divisible = ("k_ptr", "l_ptr", "perms_ptr", "pairs_ptr", "partials_ptr", "n", "k_row", "l_row")
    # K is read in rows, 128 bits at a time; L is gathered entry by entry and cannot be
    return Program(bilinear.perm_bilinear_kernel, signature, constants, divisible, wide=True)


def _bilinear_bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    K, L = (torch.randn(1024, 1024, generator=g) for _ in range(2))
    K, L, perms = K + K.T, L + L.T, _permutations(1024, 1000, g)
    return {"K": K.to(device), "L": L.to(device), "perms": perms.to(device), "symmetric": True}


def _bilinear_eager(x: Inputs) -> torch.Tensor:
    """Gather, multiply, sum, in pieces of 64 permutations that memory holds."""
    pieces = []
    for perms in x["perms"].long().split(64):
        gathered = x["L"][perms[:, :, None], perms[:, None, :]]
        pieces.append((x["K"] * gathered).sum(dim=(1, 2)))
    return torch.cat(pieces)


PERM_BILINEAR = KernelSpec(
    name="perm_bilinear",
    run=lambda x: (bilinear.launch(x["K"], x["L"], x["perms"], symmetric=x["symmetric"]),),
    truth=lambda x: (bilinear.reference(x["K"], x["L"], x["perms"]),),
    cases={
        "float32 n=1": _bilinear_case(1, 3, torch.float32),
        "float32 n=4 one permutation": _bilinear_case(4, 1, torch.float32),
        "float32 n=63 below a tile": _bilinear_case(63, 4, torch.float32),
        "float32 n=64 a tile": _bilinear_case(64, 5, torch.float32),
        "float32 n=65 past a tile": _bilinear_case(65, 6, torch.float32),
        "float32 n=257 symmetric": _bilinear_case(257, 5, torch.float32, symmetric=True),
        "float32 n=130 strided": _bilinear_case(130, 5, torch.float32, strided=True),
        "float32 n=100 masks": _bilinear_case(100, 9, torch.float32, masks=True),
        "float32 n=70 identity": _bilinear_case(70, 2, torch.float32, identity=True),
        "float32 n=8 1000 permutations": _bilinear_case(8, 1000, torch.float32),
        "float64 n=129": _bilinear_case(129, 5, torch.float64),
        "float64 n=129 symmetric": _bilinear_case(129, 5, torch.float64, symmetric=True),
    },
    tolerance={"float32": (2e-6,), "float64": (1e-13,)},
    bytes=_bilinear_bytes,
    flops=lambda x: 2 * len(x["perms"]) * len(x["K"]) ** 2 // (2 if x["symmetric"] else 1),
    programs={
        "fp32": _bilinear_program("fp32", symmetric=False),
        "fp32 symmetric": _bilinear_program("fp32", symmetric=True),
        "fp64 symmetric": _bilinear_program("fp64", symmetric=True),
    },
    bench=_bilinear_bench,
    eager=_bilinear_eager,
    notes="served by L2: the share of the HBM roofline may exceed 1",
)


# perm_knn_overlap


def _overlap_case(n: int, k: int, count: int):
    def make(g: torch.Generator) -> Inputs:
        lists = [
            torch.stack([torch.randperm(n, generator=g)[:k] for _ in range(n)]).to(torch.int32)
            for _ in range(2)
        ]
        return {"idx_x": lists[0], "idx_y": lists[1], "perms": _permutations(n, count, g)}

    return make


def _overlap_bytes(x: Inputs) -> int:
    """Each list, and the inverse at its entries, once a permutation; a partial sum a tile."""
    n, k = x["idx_x"].shape
    tiles = cdiv(n, overlap.POINTS)
    return len(x["perms"]) * (4 * n * (1 + 3 * k) + 4 * tiles)


def _overlap_bench(device: torch.device) -> Inputs:
    made = _overlap_case(4096, 16, 500)(torch.Generator().manual_seed(0))
    return {name: tensor.to(device) for name, tensor in made.items()}


def _overlap_eager(x: Inputs) -> torch.Tensor:
    counts = []
    for perm in x["perms"].long():
        theirs = torch.argsort(perm)[x["idx_y"].long()[perm]]
        counts.append((x["idx_x"][:, :, None] == theirs[:, None, :]).sum())
    return torch.stack(counts)


PERM_KNN_OVERLAP = KernelSpec(
    name="perm_knn_overlap",
    run=lambda x: (overlap.launch(x["idx_x"], x["idx_y"], x["perms"]),),
    truth=lambda x: (overlap.reference(x["idx_x"], x["idx_y"], x["perms"]),),
    cases={
        "exact n=1 k=1": _overlap_case(1, 1, 2),
        "exact n=7 k=3": _overlap_case(7, 3, 5),
        "exact n=64 k=5": _overlap_case(64, 5, 4),
        "exact n=65 k=10": _overlap_case(65, 10, 4),
        "exact n=200 k=1": _overlap_case(200, 1, 3),
        "exact n=20 k=20 all points": _overlap_case(20, 20, 3),
    },
    tolerance={"exact": (0.0,)},
    bytes=_overlap_bytes,
    flops=lambda x: len(x["perms"]) * x["idx_x"].numel() * x["idx_x"].shape[1],
    programs={
        "k<=16": Program(
            overlap.perm_knn_overlap_kernel,
            {
                **{f"{a}_ptr": "*i32" for a in ("x", "y", "perms", "inverse", "partials")},
                **dict.fromkeys(("n", "n_tiles", "k"), "i32"),
            },
            {"POINTS": overlap.POINTS, "K_BLOCK": 16},
            tuple(f"{a}_ptr" for a in ("x", "y", "perms", "inverse", "partials")),
        )
    },
    bench=_overlap_bench,
    eager=_overlap_eager,
    notes="gathers of 4 bytes: bound by L2 requests, not by bytes",
)


# adamw_power_step

OPTIONS = {
    "step": 3,
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "p": 1.2,
}


def _adamw_case(shape, dtype: torch.dtype, *, special: bool = False, **options):
    def make(g: torch.Generator) -> Inputs:
        param, grad, exp_avg = (torch.randn(shape, generator=g) for _ in range(3))
        exp_avg_sq = torch.rand(shape, generator=g)
        grad = grad * 10 ** (-6 * torch.rand(shape, generator=g))
        if special:
            grad.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-12, -1e-12])
            exp_avg_sq.view(-1)[0] = 0.0
            exp_avg.view(-1)[0] = 0.0
        return {
            "param": param.to(dtype),
            "grad": grad.to(dtype),
            "exp_avg": 0.1 * exp_avg,
            "exp_avg_sq": exp_avg_sq,
            "options": {**OPTIONS, **options},
        }

    return make


def _adamw_run(x: Inputs) -> tuple[torch.Tensor, ...]:
    adamw.launch([x["param"]], [x["grad"]], [x["exp_avg"]], [x["exp_avg_sq"]], **x["options"])
    return x["param"], x["exp_avg"], x["exp_avg_sq"]


def _adamw_truth(x: Inputs) -> tuple[torch.Tensor, ...]:
    options = dict(x["options"])
    if options.pop("skip_nonfinite", False) and not torch.isfinite(x["grad"]).all():
        return x["param"], x["exp_avg"], x["exp_avg_sq"]
    return adamw.reference(x["param"], x["grad"], x["exp_avg"], x["exp_avg_sq"], **options)


def _adamw_skipped(g: torch.Generator) -> Inputs:
    made = _adamw_case(1025, torch.float32, skip_nonfinite=True)(g)
    made["grad"][1000] = float("inf")
    return made


def _adamw_bytes(x: Inputs) -> int:
    """x, g, m, v read; x, m, v written; a flag a program where one is asked for."""
    n, skip = x["param"].numel(), x["options"].get("skip_nonfinite", False)
    flag = 4 * cdiv(n, adamw.BLOCK) if skip else 0
    if skip and not torch.isfinite(x["grad"]).all():
        return flag
    return n * (2 * x["param"].element_size() + x["grad"].element_size() + 16) + flag


def _adamw_program(dtype: str, *, power_is_one: bool = False, skip: bool = False) -> Program:
    scalars = ("scale", "p", "beta1", "beta2", "one_minus_beta1", "one_minus_beta2")
    scalars += ("decay", "step_size", "root_bias2", "eps")
    signature = {
        "param_ptr": f"*{dtype}",
        "grad_ptr": f"*{dtype}",
        "exp_avg_ptr": "*fp32",
        "exp_avg_sq_ptr": "*fp32",
        "finite_ptr": "*i32",
        "n": "i32",
        **dict.fromkeys(scalars, "fp32"),
    }
    constants = {"POWER_IS_ONE": power_is_one, "SKIP_NONFINITE": skip, "BLOCK": adamw.BLOCK}
    divisible = ("param_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "n")
    return Program(adamw.adamw_power_kernel, signature, constants, divisible, wide=True)


def _adamw_bench(device: torch.device) -> Inputs:
    made = _adamw_case(2**26, torch.float32)(torch.Generator().manual_seed(0))
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}


def _adamw_eager(x: Inputs) -> object:
    return adamw.reference(x["param"], x["grad"], x["exp_avg"], x["exp_avg_sq"], **x["options"])


ADAMW_POWER_STEP = KernelSpec(
    name="adamw_power_step",
    run=_adamw_run,
    truth=_adamw_truth,
    cases={
        "float32 one entry": _adamw_case(1, torch.float32),
        "float32 1023": _adamw_case(1023, torch.float32),
        "float32 1024 zeros": _adamw_case(1024, torch.float32, special=True),
        "float32 1025": _adamw_case(1025, torch.float32),
        "float32 (3, 7, 50)": _adamw_case((3, 7, 50), torch.float32),
        "float32 p=1": _adamw_case(1025, torch.float32, p=1.0),
        "float32 p=0.5": _adamw_case(1025, torch.float32, p=0.5),
        "float32 p=2": _adamw_case(300, torch.float32, p=2.0),
        "float32 scaled and clipped": _adamw_case(
            1025, torch.float32, grad_scale=1 / 1024, clip_scale=0.3
        ),
        "float32 maximize": _adamw_case(500, torch.float32, maximize=True),
        "float32 first step": _adamw_case(500, torch.float32, step=1, weight_decay=0.0),
        "float32 finite, skip asked for": _adamw_case(1025, torch.float32, skip_nonfinite=True),
        "float32 inf skipped": _adamw_skipped,
        "bfloat16 1025": _adamw_case(1025, torch.bfloat16),
        "bfloat16 p=1.5": _adamw_case(400, torch.bfloat16, p=1.5),
    },
    tolerance={"float32": (1e-6, 1e-5, 2e-5), "bfloat16": (1e-2, 1e-5, 2e-5)},
    bytes=_adamw_bytes,
    flops=lambda x: 20 * x["param"].numel(),
    programs={
        "fp32": _adamw_program("fp32"),
        "fp32 p=1": _adamw_program("fp32", power_is_one=True),
        "fp32 skip": _adamw_program("fp32", skip=True),
        "bf16": _adamw_program("bf16"),
    },
    bench=_adamw_bench,
    eager=_adamw_eager,
)


def specs() -> dict[str, KernelSpec]:
    """Every kernel by name."""
    return {s.name: s for s in (ADAMW_POWER_STEP, PERM_BILINEAR, PERM_KNN_OVERLAP)}


def make_inputs(spec: KernelSpec, case: str) -> Inputs:
    """The inputs of a case, the same on every call."""
    return spec.cases[case](torch.Generator().manual_seed(20260))


def to_double(inputs: Inputs) -> Inputs:
    """Copies of the inputs with every floating tensor in float64."""
    return {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
