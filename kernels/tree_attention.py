r"""Attention of the nodes of drafted token trees: shared prefix, and ancestors only.

A speculative step verifies B requests at once. Request b has a root, its last token, and n_b
drafted nodes; a node attends to the request's prefix and to its own ancestors, itself included. All
nodes stand packed in one array of N = B + Σ n_b, root first.

A program takes one request, one key head and up to 64 rows, a row being a node and a query head of
the group that shares the key head. It goes over the prefix once for all its rows with an online
softmax, and then over the nodes with a mask of bits: word w of a node has bit c set where node
32 w + c of its request is an ancestor. A small kernel makes the words before, each node walking its
parent pointers, so that no (N, N) mask exists.

Bytes for a request with T prefix tokens, n nodes, and ``r`` rows of a key head, e bytes a number:

| | a program a node | fused |
|---|---|---|
| prefix keys and values | 2 n T d e | 2 ceil(r/64) T d e |
| page table | 4 n T | 4 ceil(r/64) T |
| keys and values of nodes | 2 n² d e | 2 ceil(r/64) n d e |
| mask | n (T + n), eager | 4 r a word, and 4 (depth + 1) a node to make it |
| queries and outputs | 2 r d e | 2 r d e |

The limit is memory: the prefix is read once up to 64 rows, as in plain decoding. That is what makes
verifying more nodes free until arithmetic takes over.

Source: tree attention of speculative decoding, for "ECHO: Elastic Speculative Decoding with Sparse
Gating for High-Concurrency Scenarios" (arXiv 2604.09603). The kernel is our own.
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

DTYPES = (torch.float16, torch.float32, torch.float64)
WORD = 32
ROWS = 64
TOKENS = 32


@jit
def tree_words_kernel(
    parent_ptr,
    offsets_ptr,
    words_ptr,
    steps,
    N_WORDS: tl.constexpr,
    NODES: tl.constexpr,
):
    """Ancestor bits of NODES nodes of one request; grid (requests, node tiles)."""
    request = tl.program_id(0)
    start = tl.load(offsets_ptr + request)
    end = tl.load(offsets_ptr + request + 1)
    nodes = start + tl.program_id(1) * NODES + tl.arange(0, NODES)
    inside = nodes < end
    for w in tl.static_range(N_WORDS):
        word = tl.zeros((NODES,), dtype=tl.int32)
        at = tl.where(inside, nodes, -1)
        for _ in range(steps):
            here = at >= 0
            place = tl.where(here, at - start, 0)
            bit = tl.full((NODES,), 1, dtype=tl.int32) << (place % 32)
            word = word | tl.where(here & (place // 32 == w), bit, 0)
            at = tl.load(parent_ptr + at, mask=here, other=-1)
        tl.store(words_ptr + nodes * N_WORDS + w, word, mask=inside)


@jit
def _attend(q, k, v, seen, m, l, acc, scale, HALF: tl.constexpr):
    """One more block of keys, by online softmax."""
    if HALF:
        s = tl.dot(q, tl.trans(k)) * scale
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, axis=1))
    shift = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp(s - shift[:, None])
    f = tl.exp(m - shift)
    l = l * f + tl.sum(w, axis=1)
    if HALF:
        acc = acc * f[:, None] + tl.dot(w.to(tl.float16), v)
    else:
        acc = acc * f[:, None] + tl.dot(w, v, input_precision="ieee")
    return top, l, acc


@jit
def tree_attention_kernel(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    table_ptr,
    lengths_ptr,
    k_nodes_ptr,
    v_nodes_ptr,
    offsets_ptr,
    words_ptr,
    out_ptr,
    heads,
    ratio,
    page,
    pages,
    scale,
    HALF: tl.constexpr,
    N_WORDS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """ROWS rows of one request and key head; grid (row tiles, key heads, requests)."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    start = tl.load(offsets_ptr + request)
    end = tl.load(offsets_ptr + request + 1)
    length = tl.load(lengths_ptr + request)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < (end - start) * ratio
    length = tl.where(tl.program_id(0) * ROWS < (end - start) * ratio, length, 0)
    nodes = start + rows // ratio
    cols = tl.arange(0, D)
    place = (nodes.to(tl.int64) * heads + head) * ratio + rows % ratio
    at = place[:, None] * D + cols[None, :]
    q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
    m = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, D), dtype=tl.float32)
    for first in tl.range(0, length, TOKENS, num_stages=2):
        tokens = first + tl.arange(0, TOKENS)
        here = tokens < length
        block = tl.load(table_ptr + request * pages + tokens // page, mask=here, other=0)
        row = (block * page + tokens % page).to(tl.int64) * heads + head
        prefix = row[:, None] * D + cols[None, :]
        k = tl.load(k_pages_ptr + prefix, mask=here[:, None], other=0.0)
        v = tl.load(v_pages_ptr + prefix, mask=here[:, None], other=0.0)
        m, l, acc = _attend(q, k, v, here[None, :], m, l, acc, scale, HALF)
    for w in tl.range(0, N_WORDS, num_stages=1):
        names = start + w * 32 + tl.arange(0, 32)
        here = names < end
        word = tl.load(words_ptr + nodes * N_WORDS + w, mask=inside, other=0)
        bits = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1
        tree = (names.to(tl.int64) * heads + head)[:, None] * D + cols[None, :]
        k = tl.load(k_nodes_ptr + tree, mask=here[:, None], other=0.0)
        v = tl.load(v_nodes_ptr + tree, mask=here[:, None], other=0.0)
        m, l, acc = _attend(q, k, v, bits != 0, m, l, acc, scale, HALF)
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def settings(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and warps."""
    if rows <= 16 or dtype == torch.float32:
        return {"ROWS": 16, "TOKENS": TOKENS, "num_warps": 4 if dtype == torch.float16 else 8}
    return {"ROWS": ROWS, "TOKENS": TOKENS, "num_warps": 8}


def word_count(most: int) -> int:
    """Words for requests of up to ``most`` packed nodes."""
    return cdiv(most, WORD)


def launch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    k_nodes: torch.Tensor,
    v_nodes: torch.Tensor,
    parent: torch.Tensor,
    offsets: torch.Tensor,
    *,
    most: int,
    depth: int,
    scale: float,
) -> torch.Tensor:
    """Run both Triton kernels on checked inputs, wherever they are."""
    (N, Hq, d), B = q.shape, len(lengths)
    heads = k_nodes.shape[1]
    ratio, n_words = Hq // heads, word_count(most)
    sizes = settings(most * ratio, q.dtype)
    words = output(N, n_words, dtype=torch.int32, device=q.device)
    out = output(N, Hq, d, dtype=q.dtype, device=q.device)
    with on_device(q):
        tree_words_kernel[(B, cdiv(most, WORD))](
            parent.contiguous(),
            offsets.contiguous(),
            words,
            depth + 1,
            N_WORDS=n_words,
            NODES=WORD,
            num_warps=2,
        )
        tree_attention_kernel[(cdiv(most * ratio, sizes["ROWS"]), heads, B)](
            q.contiguous(),
            k_pages.contiguous(),
            v_pages.contiguous(),
            table.contiguous(),
            lengths.contiguous(),
            k_nodes.contiguous(),
            v_nodes.contiguous(),
            offsets.contiguous(),
            words,
            out,
            heads,
            ratio,
            k_pages.shape[1],
            table.shape[1],
            scale,
            HALF=q.dtype == torch.float16,
            N_WORDS=n_words,
            D=d,
            **sizes,
        )
    return out


def ancestors(parent: torch.Tensor) -> torch.Tensor:
    """(N, N) bool, whether column is row itself or one of its ancestors."""
    N = len(parent)
    seen = torch.zeros(N, N, dtype=torch.bool, device=parent.device)
    at = torch.arange(N, device=parent.device)
    rows = at.clone()
    while len(rows):
        seen[rows, at] = True
        at = parent.long()[at]
        keep = at >= 0
        rows, at = rows[keep], at[keep]
    return seen


def reference(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    k_nodes: torch.Tensor,
    v_nodes: torch.Tensor,
    parent: torch.Tensor,
    offsets: torch.Tensor,
    *,
    most: int,
    depth: int,
    scale: float,
) -> torch.Tensor:
    """The same in plain PyTorch, request by request with a dense mask, in float32 or wider."""
    del most, depth
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    ratio = q.shape[1] // k_nodes.shape[1]
    out = torch.empty_like(q)
    page = k_pages.shape[1]
    seen = ancestors(parent)
    for b, T in enumerate(lengths.tolist()):
        part = slice(int(offsets[b]), int(offsets[b + 1]))
        blocks = table[b, : cdiv(T, page)].long()
        k, v = (
            torch.cat([pages[blocks].flatten(0, 1)[:T], nodes[part]])
            .to(wide)
            .repeat_interleave(ratio, dim=1)
            .transpose(0, 1)
            for pages, nodes in ((k_pages, k_nodes), (v_pages, v_nodes))
        )
        logits = q[part].to(wide).transpose(0, 1) @ k.mT * scale
        n = part.stop - part.start
        prefix = torch.ones(n, T, dtype=torch.bool, device=q.device)
        mask = torch.cat([prefix, seen[part, part]], dim=1)
        weights = logits.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        out[part] = (weights @ v).transpose(0, 1).to(q.dtype)
    return out


def tree_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    k_nodes: torch.Tensor,
    v_nodes: torch.Tensor,
    parent: torch.Tensor,
    offsets: torch.Tensor,
    *,
    most: int,
    depth: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of packed tree nodes.

    Args:
        q: (N, Hq, d) float16, float32 or float64, Hq a multiple of H.
        k_pages: (pages, page, H, d) prefix keys; one page a request is a contiguous cache.
        v_pages: likewise, values.
        table: (B, n) int32, which page holds tokens [i page, (i+1) page) of a request.
        lengths: (B,) int32 prefix tokens, 0 and up.
        k_nodes: (N, H, d) keys of the nodes themselves.
        v_nodes: likewise, values.
        parent: (N,) int32, place of the parent in the packed array, −1 for a root; before the node.
        offsets: (B + 1,) int32, where requests begin; offsets[b] is the root of request b.
        most: packed nodes of the largest request, known to the host.
        depth: of the deepest node, known to the host.
        scale: of the logits; None means 1/√d.

    Returns:
        (N, Hq, d) in the dtype of ``q``, added up in float32 (float64 for float64). On a GPU
        float16 and float32 run the kernels where d is a power of two from 16 to 128.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if q.ndim != 3 or k_nodes.ndim != 3 or 0 in q.shape:
        raise ValueError(f"q must be (N, Hq, d), not empty: got {tuple(q.shape)}")
    (N, Hq, d), H, B = q.shape, k_nodes.shape[1], len(lengths)
    if k_pages.ndim != 4 or k_pages.shape[2:] != (H, d):
        raise ValueError(f"k_pages must be (pages, page, {H}, {d}): got {tuple(k_pages.shape)}")
    if Hq % H:
        raise ValueError(f"q must have a multiple of {H} heads: got {Hq}")
    if table.ndim != 2 or len(table) != B:
        raise ValueError(f"table must be ({B}, n): got {tuple(table.shape)}")
    shapes = {
        "v_pages": (v_pages, k_pages.shape),
        "k_nodes": (k_nodes, (N, H, d)),
        "v_nodes": (v_nodes, (N, H, d)),
        "parent": (parent, (N,)),
        "offsets": (offsets, (B + 1,)),
        "lengths": (lengths, (B,)),
    }
    for name, (value, shape) in shapes.items():
        if value.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}: got {tuple(value.shape)}")
    if most < 1 or depth < 0:
        raise ValueError(f"most must be >= 1 and depth >= 0: got {most}, {depth}")
    check_dtype("q", q, DTYPES)
    for name, value in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_dtype(name, value, (q.dtype,))
    for name in ("k_nodes", "v_nodes"):
        check_dtype(name, shapes[name][0], (q.dtype,))
    whole = {"table": table, "lengths": lengths, "parent": parent, "offsets": offsets}
    for name, value in whole.items():
        check_dtype(name, value, (torch.int32,))
    check_same_device(q=q, k_pages=k_pages, v_pages=v_pages, **whole)
    scale = d**-0.5 if scale is None else scale
    fits = 16 <= d <= 128 and d & (d - 1) == 0
    fused = q.dtype != torch.float64 and fits and runs_triton(q, k_pages, v_pages, parent)
    run = launch if fused else reference
    tensors = (q, k_pages, v_pages, table, lengths, k_nodes, v_nodes, parent, offsets)
    return run(*tensors, most=most, depth=depth, scale=scale)
