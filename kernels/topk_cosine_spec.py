"""The proofs of :mod:`icmllab.kernels.topk_cosine`: both of its kernels."""

import torch

from icmllab.kernels import topk_cosine as kernel
from icmllab.kernels.registry import BadCall, Case, Inputs, KernelSpec, Outputs, Program
from icmllab.kernels.runtime import cdiv
from icmllab.kernels.topk_cosine import match_rank, topk_cosine

# a cosine is a sum of d products in float32, of terms that add up to 1 at most; indices are exact
TOLERANCE = (1e-6, 0.0)
EXACT = (0.0, 0.0)


def _case(
    n_q: int,
    n_k: int,
    d: int,
    k: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    exclude: str = "",
    ties: bool = False,
    zeros: bool = False,
    strided: bool = False,
    tolerance: tuple[float, ...] | None = None,
) -> Case:
    """``k`` None asks for the ranks."""

    def make(g: torch.Generator) -> Inputs:
        Q, K = (torch.randn(n, d, generator=g, dtype=torch.float64) for n in (n_q, n_k))
        if k is None:  # keys that lie near their queries, so that ranks are small
            K[:n_q] += Q
        if ties:  # four entries of ±1 a row: norms and products are exact, equal scores are many
            Q, K = (_signs(n, d, g) for n in (n_q, n_k))
        if zeros:
            Q[0], K[:: 3 if n_k > 1 else 1] = 0, 0
        Q, K = Q.to(dtype), K.to(dtype)
        if strided:  # a transpose, and every second row of a wider matrix
            Q = Q.T.contiguous().T
            K = torch.cat([K, -K[:, :1]], dim=1).repeat_interleave(2, dim=0)[::2, :d]
        inputs = {"Q": Q, "K": K, "k": k}
        if exclude:
            low = torch.randint(0, n_k + 1, (n_q,), generator=g)
            width = n_k if exclude == "all" else n_k // 3
            bounds = torch.stack([low, low + width], dim=1)
            if exclude == "all":
                bounds[:, 0] = 0
            inputs["exclude"] = bounds.to(torch.int32)
        return inputs

    if tolerance is None:
        tolerance = EXACT if ties else TOLERANCE
    return Case(make, tolerance if k is not None else (0.0,))


def _signs(n: int, d: int, g: torch.Generator) -> torch.Tensor:
    places = torch.rand(n, d, generator=g).argsort(dim=1)[:, :4]
    signs = torch.randint(0, 2, (n, 4), generator=g).double() * 2 - 1
    return torch.zeros(n, d, dtype=torch.float64).scatter_(1, places, signs)


def _run(x: Inputs, top: object, rank: object) -> Outputs:
    if x["k"] is None:
        return (rank(x["Q"], x["K"]),)
    return tuple(top(x["Q"], x["K"], x["k"], exclude=x.get("exclude")))


def _eager(x: Inputs) -> Outputs:
    """Normalise, multiply, sort: the whole score matrix."""
    unit = [torch.nn.functional.normalize(m, dim=1, eps=1e-300) for m in (x["Q"], x["K"])]
    s = unit[0] @ unit[1].T
    columns = torch.arange(s.shape[1], device=s.device)
    if x["k"] is None:
        own = columns[: len(s), None]
        mine = s.gather(1, own)
        return (((s > mine) | ((s == mine) & (columns < own))).sum(dim=1),)
    if "exclude" in x:
        low, high = x["exclude"].long().split(1, dim=1)
        s = s.masked_fill((columns >= low) & (columns < high), -torch.inf)
    found = s.sort(dim=1, descending=True, stable=True)
    scores, indices = found.values[:, : x["k"]], found.indices[:, : x["k"]]
    missing = x["k"] - scores.shape[1]
    scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    indices = torch.nn.functional.pad(indices, (0, missing), value=-1)
    return scores, indices.masked_fill(scores == -torch.inf, -1)


def _scale(x: Inputs) -> Outputs:
    """A cosine's absolute terms add up to at most 1; indices are counted in whole numbers."""
    if x["k"] is None:
        return (torch.ones(len(x["Q"]), dtype=torch.float64),)
    return (torch.ones(len(x["Q"]), x["k"], dtype=torch.float64),) * 2


def _bytes(x: Inputs) -> int:
    """Queries once for each tile of keys, keys once for each tile of queries, and the results."""
    (n_q, d), n_k, size = x["Q"].shape, len(x["K"]), x["Q"].element_size()
    if x["Q"].dtype == torch.bfloat16 and (x["k"] or 0) > 16:
        size = 4  # widened before the kernel
    d += -d % 16
    if x["k"] is None:
        tile, tiles = kernel.RANKED, cdiv(n_q, kernel.RANKED)
        passes = cdiv(n_k, tile)
        # the first pass scores each tile of queries with its own keys
        own = n_q + min(tiles * tile, n_k)
        return size * d * (passes * n_q + tiles * n_k + own) + 4 * n_q
    loads = size * d * (cdiv(n_k, kernel.KEYS) * n_q + cdiv(n_q, kernel.QUERIES) * n_k)
    bounds = 8 * n_q if "exclude" in x else 0
    return loads + bounds + 8 * n_q * x["k"]


def _program(dtype: str, *, top: int | None = 16, exclude: bool = False) -> Program:
    """``top`` None is the rank kernel. Rows are padded, so that d and both strides are whole."""
    types = {"q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}"}
    if top is None:
        types["ranks_ptr"] = "*i32"
    else:
        types |= {"exclude_ptr": "*i32", "scores_ptr": "*fp32", "indices_ptr": "*i32"}
    pointers = tuple(types)
    types |= dict.fromkeys(("n_q", "n_k", "d", "q_row", "k_row"), "i32")
    constants = {"QUERIES": kernel.QUERIES, "FEATURES": kernel.FEATURES, "WIDEN": dtype == "bf16"}
    if top is None:
        constants["QUERIES"] = kernel.RANKED
    else:
        types["top"] = "i32"
        constants |= {"EXCLUDE": exclude, "TOP": top, "KEYS": kernel.KEYS}
        if top == 1:
            constants["top"] = 1
            del types["top"]
    return Program(
        kernel.match_rank_kernel if top is None else kernel.topk_cosine_kernel,
        types,
        constants,
        # NVIDIA's loads are asynchronous copies to shared memory, which wide_loads does not
        # count; tests/toolbox/test_retrieval.py looks at them
        (*pointers, "d", "q_row", "k_row"),
        num_warps=8,
    )


def _bad(message: str, **change: object) -> BadCall:
    good = {"Q": torch.eye(4), "K": torch.eye(4), "k": 2, "exclude": None}

    def call() -> object:
        x = {**good, **change}
        return topk_cosine(x["Q"], x["K"], x["k"], exclude=x["exclude"])

    return BadCall(call, message)


def _bench(device: torch.device) -> Inputs:
    g = torch.Generator(device=device).manual_seed(0)
    Q, K = (torch.randn(16384, 256, generator=g, device=device) for _ in range(2))
    return {"Q": Q.half(), "K": K.half(), "k": 10}


def _eager_topk(x: Inputs) -> Outputs:
    """Normalise, multiply, ``torch.topk``, a block of 4096 queries at a time."""
    Q, K = (torch.nn.functional.normalize(m, dim=1) for m in (x["Q"], x["K"]))
    return tuple(
        torch.cat(p) for p in zip(*((q @ K.T).topk(x["k"]) for q in Q.split(4096)), strict=True)
    )


SPEC = KernelSpec(
    name="topk_cosine",
    op=lambda x: _run(x, topk_cosine, match_rank),
    launch=lambda x: _run(x, kernel.launch_topk, kernel.launch_rank),
    truth=_eager,
    scale=_scale,
    cases={
        "float32 one pair k=1": _case(1, 1, 1, 1),
        "float32 fewer keys than k": _case(3, 2, 5, 4),
        "float32 tiles less one k=5": _case(31, 63, 31, 5),
        "float32 whole tiles k=8": _case(32, 64, 32, 8),
        "float32 tiles and one k=10": _case(33, 65, 33, 10),
        "float32 d=100 k=32": _case(40, 200, 100, 32),
        "float32 d=7 k=1": _case(20, 150, 7, 1),
        "float32 strided": _case(35, 70, 32, 3, strided=True),
        "float32 ties": _case(40, 300, 6, 12, ties=True),
        "float32 zero rows": _case(5, 40, 8, 30, zeros=True),
        "float32 excluded thirds": _case(34, 130, 16, 6, exclude="some"),
        "float32 all excluded": _case(3, 30, 16, 4, exclude="all"),
        "float16 k=7": _case(33, 190, 48, 7, dtype=torch.float16),
        "bfloat16 k=4": _case(18, 130, 40, 4, dtype=torch.bfloat16),
        "bfloat16 k=20": _case(4, 40, 20, 20, dtype=torch.bfloat16),
        "bfloat16 rank": _case(20, 40, 20, dtype=torch.bfloat16),
        "float32 rank one pair": _case(1, 1, 3),
        "float32 rank tile less one": _case(127, 127, 31),
        "float32 rank tile and one": _case(129, 129, 5),
        "float32 rank more keys": _case(140, 300, 33),
        "float32 rank ties": _case(200, 260, 6, ties=True),
        "float32 rank zero rows": _case(40, 40, 8, zeros=True),
        "float32 rank strided": _case(35, 70, 16, strided=True),
        "float16 rank": _case(65, 100, 48, dtype=torch.float16),
    },
    bytes=_bytes,
    flops=lambda x: 2 * len(x["Q"]) * len(x["K"]) * x["Q"].shape[1],
    programs={
        "fp32 k=10": _program("fp32"),
        "fp16 k=10": _program("fp16"),
        "bf16 k=16": _program("bf16", top=16),
        "fp16 k=1": _program("fp16", top=1),
        "fp32 k=8 excluding": _program("fp32", top=8, exclude=True),
        "fp32 k=32": _program("fp32", top=32),
        "fp32 rank": _program("fp32", top=None),
        "fp16 rank": _program("fp16", top=None),
        "bf16 rank": _program("bf16", top=None),
    },
    errors={
        "Q a vector": _bad("Q must be", Q=torch.ones(4)),
        "K a vector": _bad("K must be", K=torch.ones(4)),
        "features differ": _bad("same number of features.*4 and 3", K=torch.ones(5, 3)),
        "no features": _bad("at least 1", Q=torch.ones(2, 0), K=torch.ones(2, 0)),
        "Q of integers": _bad("Q must have dtype", Q=torch.ones(4, 4, dtype=torch.int64)),
        "K of another dtype": _bad("K must have dtype float32", K=torch.eye(4).double()),
        "K elsewhere": _bad("must share a device", K=torch.ones(4, 4, device="meta")),
        "k zero": _bad(r"k must be a whole number in \[1, 32\]: got 0", k=0),
        "k too large": _bad(r"k must be .*: got 33", k=33),
        "k a fraction": _bad("k must be", k=1.5),
        "exclude of another shape": _bad(
            r"exclude must have shape \(4, 2\)", exclude=torch.zeros(3, 2, dtype=torch.int32)
        ),
        "exclude of floats": _bad("exclude must have dtype", exclude=torch.zeros(4, 2)),
        "fewer keys than queries": BadCall(
            lambda: match_rank(torch.eye(4), torch.eye(4)[:3]), "K must hold a key for each"
        ),
    },
    bench=_bench,
    timed=lambda x: topk_cosine(x["Q"], x["K"], x["k"]),
    baselines={"eager": _eager_topk},
    note="the eager scores are 4096 rows at a time; all of them would be 0.5 GB in float16",
    # torch.topk gives no ranks, wants k keys, excludes none, and promises no order among equals
    beyond_baselines=frozenset(
        {
            "float32 fewer keys than k",
            "float32 ties",
            "float32 zero rows",
            "float32 excluded thirds",
            "float32 all excluded",
            "bfloat16 rank",
            "float32 rank one pair",
            "float32 rank tile less one",
            "float32 rank tile and one",
            "float32 rank more keys",
            "float32 rank ties",
            "float32 rank zero rows",
            "float32 rank strided",
            "float16 rank",
        }
    ),
)
