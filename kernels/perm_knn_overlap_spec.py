"""The proofs of :mod:`icmllab.kernels.perm_knn_overlap`."""

import torch

from icmllab.kernels import perm_knn_overlap as kernel
from icmllab.kernels.perm_knn_overlap import perm_knn_overlap
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Program, permutations
from icmllab.kernels.runtime import cdiv


def _lists(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.rand(n, n, generator=g).argsort(dim=1)[:, :k]


def _case(
    n: int, k: int, count: int, *, strided: bool = False, index: torch.dtype = torch.int32
) -> Case:
    def make(g: torch.Generator) -> Inputs:
        x, y = _lists(n, k, g).to(index), _lists(n, k, g).to(index)
        if strided:  # a transpose, and every second column
            x, y = x.T.contiguous().T, y.repeat_interleave(2, dim=1)[:, ::2]
        return {"idx_x": x, "idx_y": y, "perms": permutations(n, count, g).to(index)}

    return Case(make, tolerance=(0.0,))


def _bytes(x: Inputs) -> int:
    """For each permutation: itself, Y's lists and their inverse, X's lists a piece, the sums."""
    n, k = x["idx_x"].shape
    pieces = cdiv(k, kernel.SLOTS)
    return 4 * len(x["perms"]) * (n * (1 + 2 * k + pieces * k) + cdiv(n, kernel.POINTS))


def _program(*, smallest: bool = False) -> Program:
    pointers = tuple(f"{a}_ptr" for a in ("x", "y", "perms", "inverse", "partials"))
    sizes = ("n", "n_tiles", "k")
    constants = {"POINTS": kernel.POINTS, "SLOTS": kernel.SLOTS}
    if smallest:  # sizes of 1 are constants
        constants |= dict.fromkeys(sizes, 1)
    types = {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(sizes, "i32")}
    return Program(
        kernel.perm_knn_overlap_kernel,
        {a: t for a, t in types.items() if a not in constants},
        constants,
        pointers,
    )


def _bad(message: str, **change: object) -> BadCall:
    lists = torch.tensor([[1], [2], [0]])
    good = {"idx_x": lists, "idx_y": lists, "perms": torch.arange(3)[None]}
    return BadCall(lambda: perm_knn_overlap(**{**good, **change}), message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    n, k, count = 4096, 16, 500
    made = {"idx_x": _lists(n, k, g), "idx_y": _lists(n, k, g), "perms": permutations(n, count, g)}
    return {name: tensor.to(torch.int32).to(device) for name, tensor in made.items()}


def _eager(x: Inputs) -> torch.Tensor:
    """Rename, compare all pairs of neighbours, count, in pieces of 8 permutations."""
    counts = []
    for perms in x["perms"].long().split(8):
        images = x["idx_y"].long()[perms]
        names = torch.argsort(perms, dim=1).gather(1, images.flatten(1)).view(images.shape)
        same = x["idx_x"][None, :, :, None] == names[:, :, None, :]
        counts.append(same.sum(dim=(1, 2, 3)))
    return torch.cat(counts)


SPEC = KernelSpec(
    name="perm_knn_overlap",
    op=lambda x: (perm_knn_overlap(x["idx_x"], x["idx_y"], x["perms"]),),
    launch=lambda x: (kernel.launch(x["idx_x"], x["idx_y"], x["perms"]),),
    truth=lambda x: (_eager(x),),
    scale=lambda x: (torch.ones(len(x["perms"]), dtype=torch.float64),),
    cases={
        "n=1 k=1": _case(1, 1, 2),
        "n=7 k=3": _case(7, 3, 5),
        "n=63 k=4": _case(63, 4, 2),
        "n=64 k=5": _case(64, 5, 4),
        "n=65 k=10 int64": _case(65, 10, 4, index=torch.int64),
        "n=200 k=1": _case(200, 1, 3),
        "n=20 k=20 all points": _case(20, 20, 3),
        "n=90 k=33 three pieces": _case(90, 33, 2),
        "n=40 k=6 strided": _case(40, 6, 3, strided=True),
        "n=12 k=3 300 permutations": _case(12, 3, 300),
    },
    bytes=_bytes,
    flops=lambda x: len(x["perms"]) * x["idx_x"].numel() * x["idx_x"].shape[1],
    programs={"int32": _program(), "int32 n=k=1": _program(smallest=True)},
    errors={
        "idx_x empty": _bad("idx_x must be", idx_x=torch.zeros(0, 2, dtype=torch.int64)),
        "idx_x without neighbours": _bad("idx_x must be", idx_x=torch.zeros(3, 0).long()),
        "idx_x a vector": _bad("idx_x must be", idx_x=torch.zeros(3, dtype=torch.int64)),
        "idx_x of floats": _bad("idx_x must have dtype", idx_x=torch.zeros(3, 1)),
        "idx_x out of range": _bad(r"idx_x must hold .*0\.\.2: got 3", idx_x=torch.full((3, 1), 3)),
        "idx_y below zero": _bad(r"idx_y must hold .*: got -1", idx_y=torch.full((3, 1), -1)),
        "idx_y of another size": _bad("idx_y must have the shape", idx_y=torch.zeros(3, 2).long()),
        "perms of another size": _bad(r"perms must have shape \(B, 3\)", perms=torch.eye(4).long()),
        "perms with repetition": _bad("perms must hold perm", perms=torch.zeros(1, 3).long()),
        "perms elsewhere": _bad(
            "must share a device", perms=torch.zeros(1, 3, dtype=torch.int64, device="meta")
        ),
    },
    bench=_bench,
    timed=lambda x: perm_knn_overlap(x["idx_x"], x["idx_y"], x["perms"]),
    baselines={"eager": _eager},
    note="4-byte gathers: bound by L2's request rate, not by bytes",
)
