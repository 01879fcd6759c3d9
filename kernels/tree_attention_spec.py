"""The proofs of :mod:`icmllab.kernels.tree_attention`: both of its kernels."""

import torch

from icmllab.kernels import tree_attention as kernel
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv
from icmllab.kernels.tree_attention import tree_attention

HALF = torch.float16
OPTIONS = ("most", "depth", "scale")


def _make(
    g: torch.Generator,
    nodes: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    H: int = 1,
    ratio: int = 1,
    d: int = 16,
    page: int = 16,
    chain: bool = False,
    flat: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """``nodes`` drafted ones of each request; chains, stars or random trees."""
    parent, offsets, deepest = [], [0], 0
    for n in nodes:
        start = offsets[-1]
        levels = [0]
        parent.append(-1)
        for i in range(1, n + 1):
            low = i - 1 if chain else 0
            high = 1 if flat else i
            mine = int(torch.randint(low, high, (1,), generator=g))
            parent.append(start + mine)
            levels.append(levels[mine] + 1)
        deepest = max(deepest, *levels)
        offsets.append(start + n + 1)
    N, B = offsets[-1], len(nodes)
    per = max(1, cdiv(max(lengths), page))
    order = torch.randperm(B * per, generator=g)
    size = (B * per, page, H, d)
    made = {
        "q": torch.randn(N, H * ratio, d, generator=g),
        "k_pages": torch.randn(size, generator=g),
        "v_pages": torch.randn(size, generator=g),
        "table": order.view(B, per).int(),
        "lengths": torch.tensor(lengths).int(),
        "k_nodes": torch.randn(N, H, d, generator=g),
        "v_nodes": torch.randn(N, H, d, generator=g),
        "parent": torch.tensor(parent).int(),
        "offsets": torch.tensor(offsets).int(),
    }
    made = {k: t.to(dtype) if t.is_floating_point() else t for k, t in made.items()}
    return {**made, "most": max(nodes) + 1, "depth": deepest, "scale": d**-0.5}


def _case(
    nodes: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Case:
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    return Case(lambda g: _make(g, nodes, lengths, dtype=dtype, **options), (tolerance,))


def _scale(x: Inputs) -> Outputs:
    """Values averaged by their magnitude, times what an error of the logits does to weights."""
    size = {n: t.abs() if n == "v_pages" or n == "v_nodes" else t for n, t in x.items()}
    spread = 1 + float(x["q"].abs().amax() * x["k_pages"].abs().amax()) * x["scale"]
    return (kernel.reference(**size) * spread + 1e-30,)


def _bytes(x: Inputs) -> int:
    """Of the words: parents to the root for each word. Then prefix and nodes for each row tile."""
    (N, Hq, d), e = x["q"].shape, x["q"].element_size()
    H, B = x["k_nodes"].shape[1], len(x["lengths"])
    ratio, n_words = Hq // H, kernel.word_count(x["most"])
    rows_of = kernel.settings(x["most"] * ratio, x["q"].dtype)["ROWS"]
    walked = int(kernel.ancestors(x["parent"]).sum())
    words = 8 * B * cdiv(x["most"], kernel.WORD) + 4 * n_words * (walked + N)
    moved = 12 * B * H * cdiv(x["most"] * ratio, rows_of)
    for b, T in enumerate(x["lengths"].tolist()):
        n = int(x["offsets"][b + 1] - x["offsets"][b])
        tiles = cdiv(n * ratio, rows_of)
        idle = cdiv(x["most"] * ratio, rows_of) - tiles
        prefix = T * (2 * d * e + 4)
        tree = 2 * d * e * n
        moved += H * (tiles * (prefix + tree) + idle * tree)
        moved += H * n * ratio * (2 * d * e + 4 * n_words)
    return words + moved


def _program(dtype: str = "fp16", *, d: int = 128, rows: int = 64, words: int = 1) -> Program:
    data = ("q_ptr", "k_pages_ptr", "v_pages_ptr", "k_nodes_ptr", "v_nodes_ptr", "out_ptr")
    types = {
        **dict.fromkeys(data, f"*{dtype}"),
        **dict.fromkeys(("table_ptr", "lengths_ptr", "offsets_ptr"), "*i32"),
        "words_ptr": "*i32",
        **dict.fromkeys(("heads", "ratio", "page", "pages"), "i32"),
        "scale": "fp32",
    }
    sizes = kernel.settings(rows, HALF if dtype == "fp16" else torch.float32)
    num_warps = sizes.pop("num_warps")
    return Program(
        kernel.tree_attention_kernel,
        types,
        {"HALF": dtype == "fp16", "N_WORDS": words, "D": d, **sizes},
        (*(a for a in types if a.endswith("_ptr")), "page"),
        num_warps=num_warps,
    )


def _words_program(words: int) -> Program:
    types = {"parent_ptr": "*i32", "offsets_ptr": "*i32", "words_ptr": "*i32", "steps": "i32"}
    return Program(
        kernel.tree_words_kernel,
        types,
        {"N_WORDS": words, "NODES": kernel.WORD},
        tuple(a for a in types if a.endswith("_ptr")),
        num_warps=2,
    )


def _eager(x: Inputs) -> torch.Tensor:
    """All requests at once with a dense mask over padded keys."""
    q, ratio = x["q"], x["q"].shape[1] // x["k_nodes"].shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    page = x["k_pages"].shape[1]
    T = x["table"].shape[1] * page
    request = torch.bucketize(
        torch.arange(len(q), device=q.device), x["offsets"][1:].long(), right=True
    )
    k, v = (x[f"{n}_pages"][x["table"].long()].flatten(1, 2)[request] for n in "kv")
    logits = torch.einsum("nhd,nthd->nht", q.to(wide), k.to(wide).repeat_interleave(ratio, dim=2))
    tree = torch.einsum(
        "nhd,mhd->nhm", q.to(wide), x["k_nodes"].to(wide).repeat_interleave(ratio, dim=1)
    )
    there = torch.arange(T, device=q.device) < x["lengths"].long()[request][:, None]
    mask = torch.cat([there, kernel.ancestors(x["parent"])], dim=1)
    logits = torch.cat([logits, tree], dim=2) * x["scale"]
    w = logits.masked_fill(~mask[:, None], -torch.inf).softmax(dim=2)
    own = x["v_nodes"].to(wide).repeat_interleave(ratio, dim=1)
    out = torch.einsum("nht,nthd->nhd", w[..., :T], v.to(wide).repeat_interleave(ratio, dim=2))
    return (out + torch.einsum("nhm,mhd->nhd", w[..., T:], own)).to(q.dtype)


def _bad(message: str, **change: object) -> BadCall:
    def call() -> object:
        good = _make(torch.Generator().manual_seed(0), (2, 1), (3, 0))
        return tree_attention(**{**good, **change})

    return BadCall(call, message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator().manual_seed(0)
    made = _make(g, (15,) * 16, (2048,) * 16, H=8, ratio=4, d=128, page=64, dtype=HALF)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}


SPEC = KernelSpec(
    name="tree_attention",
    op=lambda x: (tree_attention(**x),),
    launch=lambda x: (kernel.launch(**x),),
    truth=lambda x: (kernel.reference(**x),),
    scale=_scale,
    cases={
        "roots alone": _case((0,), (5,)),
        "no prefix": _case((3,), (0,)),
        "a request without nodes": _case((4, 0, 7), (9, 20, 1)),
        "31 packed": _case((30,), (10,)),
        "32 packed": _case((31,), (10,)),
        "33 packed": _case((32, 2), (10, 3)),
        "64 packed": _case((63,), (10,)),
        "65 packed": _case((64, 2), (10, 3)),
        "130 packed, five words": _case((129,), (7,)),
        "a chain": _case((12, 5), (33, 70), chain=True),
        "depth 1": _case((9,), (12,), flat=True),
        "4 query heads": _case((7, 3), (40, 17), H=2, ratio=4),
        "8 query heads": _case((20,), (40,), ratio=8),
        "d=64 pages of 32": _case((6, 9), (100, 31), d=64, page=32, H=2),
        "float16": _case((7, 30), (90, 64), H=2, ratio=4, d=64, dtype=HALF),
    },
    bytes=_bytes,
    flops=lambda x: (
        4
        * x["q"].shape[1]
        * x["q"].shape[2]
        * int(((x["offsets"].diff()) * (x["lengths"] + x["offsets"].diff())).sum())
    ),
    programs={
        "fp16 64 rows": _program(),
        "fp16 16 rows": _program(rows=16),
        "fp16 two words": _program(words=2),
        "fp16 d=64": _program(d=64),
        "fp32 d=64": _program("fp32", d=64),
        "words": _words_program(1),
        "two words": _words_program(2),
    },
    errors={
        "q a matrix": _bad("q must be", q=torch.ones(5, 16)),
        "q of integers": _bad("q must have dtype", q=torch.ones(5, 1, 16).long()),
        "pages of other channels": _bad("k_pages must be", k_pages=torch.ones(2, 16, 1, 8)),
        "values of another shape": _bad("v_nodes must be", v_nodes=torch.ones(4, 1, 16)),
        "parents of another size": _bad("parent must be", parent=torch.zeros(4).int()),
        "parents of another dtype": _bad("parent must have", parent=torch.zeros(5).long()),
        "offsets of another size": _bad("offsets must be", offsets=torch.zeros(2).int()),
        "table of another size": _bad("table must be", table=torch.zeros(3, 1).int()),
        "most": _bad("most must be", most=0),
        "pages of another dtype": _bad(
            "k_pages must have", k_pages=torch.ones(2, 16, 1, 16).double()
        ),
        "elsewhere": _bad("must share a device", lengths=torch.zeros(2, device="meta").int()),
    },
    bench=_bench,
    timed=lambda x: tree_attention(**x),
    baselines={"eager": _eager},
    note="the prefix is read once for 64 rows: verifying nodes is free while memory is the limit",
)
