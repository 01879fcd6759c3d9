r"""The value half of attention over residual-quantised tokens: weights summed by code.

    b[h, j, k] = sum_i p_hi scale_i [code_ij = k],     output_h = sum_jk b[h, j, k] codeword_jk

No value is decoded: a token adds its weight to one entry of each of its J = G M histograms, and the
codewords come in at the end, in one small matrix product.

Integer histograms have an instruction, weighted ones do not, and float atomics add in another
order on every run. So a block of 64 tokens becomes a one-hot matrix (64, 64) for a range of codes,
multiplied with the (h, 64) weights; blocks of a program follow one another, partial sums of
programs are written out and added in a fixed order. Two runs give the same bits.

Bytes moved for n tokens, h queries, J codes a token, K codewords, S = ceil(n / 1024) programs a
code and range of 64 codewords:

| | decode, then multiply | fused |
|---|---|---|
| decoded values of d channels, written and read, float16 | 4 n d | none |
| codes, scales, weights | n J + 4 n + 4 h n | J ceil(K / 64) n (5 + 4 h), mostly from L2 |
| partial histograms | none | 4 S h J K |

HBM sees n (J + 4 + 4 h) bytes. What limits it is the one-hot product, 2 n J K max(h, 16)
operations on tensor cores (TF32 would round the weights: it runs as three products, "ieee").

Source: "GSRQ" states sub-one-bit caches; the histogram form of the value sum is our reconstruction.
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

BLOCK = 64
TILE = 64
CHUNK = 1024
"""Tokens of a program."""

MAX_HEADS = 64


@jit
def histogram_values_kernel(
    p_ptr,
    codes_ptr,
    scale_ptr,
    out_ptr,
    n,
    heads,
    J,
    K,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One chunk of tokens, one code, one range of codewords; grid (chunks, J, K tiles)."""
    chunk = tl.program_id(0)
    slot = tl.program_id(1)
    words = tl.program_id(2) * TILE + tl.arange(0, TILE)
    rows = tl.arange(0, HEADS)
    total = tl.zeros((HEADS, TILE), dtype=tl.float32)
    for block in range(CHUNK // BLOCK):
        tokens = chunk * CHUNK + block * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < n
        at = tokens.to(tl.int64)
        codes = tl.load(codes_ptr + at * J + slot, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scale_ptr + tokens, mask=inside, other=0.0)
        p = tl.load(
            p_ptr + rows.to(tl.int64)[:, None] * n + at[None, :],
            mask=(rows < heads)[:, None] & inside[None, :],
            other=0.0,
        )
        hot = (codes[:, None] == words[None, :]).to(tl.float32)
        total += tl.dot(p * scale[None, :], hot, input_precision="ieee")
    place = ((chunk * heads + rows)[:, None] * J + slot) * K + words[None, :]
    tl.store(out_ptr + place, total, mask=(rows < heads)[:, None] & (words < K)[None, :])


def _heads(heads: int) -> int:
    return max(16, 1 << (heads - 1).bit_length())


def launch(p: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, K: int) -> torch.Tensor:
    """Run the Triton kernel on checked float32 inputs, wherever they are."""
    (heads, n), J = p.shape, codes.shape[1]
    chunks = cdiv(n, CHUNK)
    parts = output(chunks, heads, J, K, dtype=torch.float32, device=p.device)
    with on_device(p):
        histogram_values_kernel[(chunks, J, cdiv(K, TILE))](
            p.contiguous(),
            codes.contiguous(),
            scale.contiguous(),
            parts,
            n,
            heads,
            J,
            K,
            BLOCK=BLOCK,
            TILE=TILE,
            CHUNK=CHUNK,
            HEADS=_heads(heads),
            num_warps=4,
        )
    return parts.sum(dim=0)


def reference(p: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, K: int) -> torch.Tensor:
    """The same in plain PyTorch, summed in float64."""
    weight = p.double() * scale.double()
    out = weight.new_zeros(len(p), codes.shape[1], K)
    for j in range(codes.shape[1]):
        out[:, j].index_add_(1, codes[:, j].long(), weight)
    return out.to(p.dtype)


def histogram_values(
    p: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, K: int
) -> torch.Tensor:
    """Attention weights summed by code.

    Args:
        p: (h, n) float32 or float64 weights, h <= 64.
        codes: (n, J) uint8, each below K; not checked.
        scale: (n,), dtype of ``p``.
        K: codewords, in 1..256.

    Returns:
        (h, J, K) in the dtype of ``p``, the same on every run. On a GPU float32 is summed in
        float32, elsewhere in float64.

    Raises:
        ValueError: shapes, dtypes, devices or a number of codewords that do not fit.
    """
    if p.ndim != 2 or not 1 <= len(p) <= MAX_HEADS:
        raise ValueError(f"p must be (h, n) with h in 1..{MAX_HEADS}: got shape {tuple(p.shape)}")
    if codes.ndim != 2 or len(codes) != p.shape[1] or codes.shape[1] == 0:
        raise ValueError(f"codes must be ({p.shape[1]}, J): got {tuple(codes.shape)}")
    if scale.shape != (p.shape[1],):
        raise ValueError(f"scale must be ({p.shape[1]},): got {tuple(scale.shape)}")
    if isinstance(K, bool) or not 1 <= K <= 256:
        raise ValueError(f"K must be in 1..256: got {K}")
    check_dtype("p", p, (torch.float32, torch.float64))
    check_dtype("codes", codes, (torch.uint8,))
    check_dtype("scale", scale, (p.dtype,))
    check_same_device(p=p, codes=codes, scale=scale)
    if p.shape[1] == 0:
        return p.new_zeros(len(p), codes.shape[1], K)
    fused = p.dtype == torch.float32 and runs_triton(p, codes, scale)
    return (launch if fused else reference)(p, codes, scale, K)
