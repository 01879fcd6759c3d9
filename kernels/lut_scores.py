r"""Attention logits of residual-quantised keys: look-ups in place of multiply-adds.

    score_hi = scale_i * sum_j LUT[h, j, code_ij],    LUT[h, j, k] = <q_h, codeword_jk>

j counts the G groups and M stages of a key, side by side. The table is one small matrix product a
query; after it a token costs G M bytes of codes and as many look-ups, and no key is decoded.

Bytes moved for n tokens, h queries of one head, J = G M codes a token:

| | decode, then multiply | fused |
|---|---|---|
| decoded keys of d channels, written and read, float16 | 4 n d | none |
| codes | n J | n J |
| codewords, or entries of the table, float32 | 4 n d M | 4 h n J, from L1 |
| token scales, scores | 4 n + 4 h n | 4 n + 4 h n |

A table of J = 8, K = 256 takes 8 kB a query and stays in L1. HBM sees n (J + 4 + 4 h) bytes: for
d = 64 at 1 bit an element, 16 bytes a token for one query where float16 keys are 128. What limits
it is the rate of the gather; sums run in a fixed order, so that every run gives the same bits.

Source: asymmetric distance look-ups are standard in product quantisation; their use for caches at
under one bit follows "GSRQ", the kernel is ours.
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

CODES = 4096
"""Codes that a program holds: at least 16 bytes a thread."""


@jit
def lut_scores_kernel(
    lut_ptr,
    codes_ptr,
    scale_ptr,
    out_ptr,
    n,
    heads,
    J,
    K,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Scores of TOKENS tokens for all queries; grid (token tiles,)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.arange(0, WIDTH)
    inside = tokens < n
    mine = inside[:, None] & (slots < J)[None, :]
    at = tokens.to(tl.int64)[:, None] * J + slots[None, :]
    codes = tl.load(codes_ptr + at, mask=mine, other=0).to(tl.int32)
    entry = slots[None, :] * K + codes
    scale = tl.load(scale_ptr + tokens, mask=inside, other=0.0)
    place = tokens.to(tl.int64)
    for h in range(heads):
        found = tl.load(lut_ptr + h * J * K + entry, mask=mine, other=0.0)
        tl.store(out_ptr + place, tl.sum(found, axis=1) * scale, mask=inside)
        place += n


def _sizes(J: int) -> dict[str, int]:
    width = 1 << (J - 1).bit_length()
    return {"TOKENS": max(16, CODES // width), "WIDTH": width}


def launch(lut: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Run the Triton kernel on checked float32 inputs, wherever they are."""
    (heads, J, K), n = lut.shape, len(codes)
    out = output(heads, n, dtype=torch.float32, device=lut.device)
    sizes = _sizes(J)
    with on_device(lut):
        lut_scores_kernel[(cdiv(n, sizes["TOKENS"]),)](
            lut.contiguous(),
            codes.contiguous(),
            scale.contiguous(),
            out,
            n,
            heads,
            J,
            K,
            **sizes,
            num_warps=4,
        )
    return out


def reference(lut: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch, summed in float64."""
    total = lut.new_zeros(len(lut), len(codes), dtype=torch.float64)
    for j in range(lut.shape[1]):
        total += lut[:, j].double()[:, codes[:, j].long()]
    return (total * scale.double()).to(lut.dtype)


def lut_scores(lut: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scores of coded tokens.

    Args:
        lut: (h, J, K) float32 or float64 table, K <= 256.
        codes: (n, J) uint8, each below K; not checked, since reading them all would cost as much
            as the work itself.
        scale: (n,), dtype of ``lut``.

    Returns:
        (h, n) in the dtype of ``lut``. On a GPU float32 is summed in float32, elsewhere in float64.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if lut.ndim != 3 or lut.numel() == 0 or lut.shape[2] > 256:
        raise ValueError(f"lut must be (h, J, K) with K in 1..256: got shape {tuple(lut.shape)}")
    if codes.ndim != 2 or codes.shape[1] != lut.shape[1]:
        raise ValueError(f"codes must be (n, {lut.shape[1]}): got {tuple(codes.shape)}")
    if scale.shape != codes.shape[:1]:
        raise ValueError(f"scale must be ({len(codes)},): got {tuple(scale.shape)}")
    check_dtype("lut", lut, (torch.float32, torch.float64))
    check_dtype("codes", codes, (torch.uint8,))
    check_dtype("scale", scale, (lut.dtype,))
    check_same_device(lut=lut, codes=codes, scale=scale)
    if len(codes) == 0:
        return lut.new_empty(len(lut), 0)
    fused = lut.dtype == torch.float32 and runs_triton(lut, codes, scale)
    return (launch if fused else reference)(lut, codes, scale)
