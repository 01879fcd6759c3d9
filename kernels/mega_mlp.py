r"""A whole gated MLP as one persistent kernel over a list of tile tasks.

    n = RMSNorm(x) w,   h = SiLU(n G) ∘ (n U),   y = h D

Run as kernels, each operator waits for the slowest tile of the one before it, and each launch costs
microseconds. Here every tile of every operator is a task (operator, row block, column block), and
program p takes tasks p, p + P, … of one list. A scoreboard of counters says how far a row block is:

| operator | waits until | then adds 1 to |
|---|---|---|
| 0, norm of a row block | – | norms[row block] |
| 1, a tile of h | norms[row block] = 1 | hidden[row block] |
| 2, a tile of y | hidden[row block] = all column blocks of h | – |

The list is in topological order and programs take it in order, so that a waiting task only ever
waits for tasks that were taken before it: no deadlock, as long as all P programs are resident. That
is why P is the number of units, and under the interpreter, which runs one program after the other,
1. After a tile's stores a barrier and an atomic addition with release semantics publish it; a
reader spins on an atomic addition of 0 with acquire semantics.

Bytes moved, M rows, D channels, H hidden, row blocks and column blocks of T:

| | |
|---|---|
| norm: x twice, w once a row block, n written | e (3 M D + D ceil(M/T)) |
| h: n twice a column block, G, U once a row block | e (2 M D ceil(H/T) + 2 D H ceil(M/T) + M H) |
| y: the same with h and the down matrix | e (M H ceil(D/T) + H D ceil(M/T) + M D) |
| tasks and counters | 12 a task, 8 an atomic |

The intermediate n and h are written once and come back from L2. What limits it in decoding (M of
16 or so) is reading the three matrices once, 3 D H e bytes.

Source: the task level of "DITRON: Distributed Multi-level Tiling Compiler for Parallel Tensor
Programs" (arXiv 2605.02953) and the mega-kernel of its authors' repository. The code is our own.
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
NORM, HIDDEN, DOWN = 0, 1, 2


@jit
def _arrived(counter_ptr, needed):
    """Spin until a counter has reached what is needed."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < needed:
        pass


@jit
def _publish(counter_ptr):
    """All threads' stores first, then one addition that readers wait for."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@jit
def _tile(a_ptr, b_ptr, rows, cols, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """(BM, BN) float32 of a product of a (M, K) and b (K, N)."""
    total = tl.zeros((BM, BN), dtype=tl.float32)
    a_at = a_ptr + rows.to(tl.int64)[:, None] * K
    for k in range(0, K, BK):
        inner = k + tl.arange(0, BK)
        a = tl.load(
            a_at + inner[None, :], mask=(rows < M)[:, None] & (inner < K)[None, :], other=0.0
        )
        b = tl.load(
            b_ptr + inner.to(tl.int64)[:, None] * N + cols[None, :],
            mask=(inner < K)[:, None] & (cols < N)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@jit
def mega_mlp_kernel(
    tasks_ptr,
    counters_ptr,
    x_ptr,
    weight_ptr,
    gate_ptr,
    up_ptr,
    down_ptr,
    norm_ptr,
    hidden_ptr,
    y_ptr,
    n_tasks,
    M,
    D,
    H,
    eps,
    programs,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Tasks p, p + programs, …; counters are norms, then hidden tiles, of each row block."""
    blocks = tl.cdiv(M, BM)
    for task in range(tl.program_id(0), n_tasks, programs):
        op = tl.load(tasks_ptr + 3 * task)
        block = tl.load(tasks_ptr + 3 * task + 1)
        col = tl.load(tasks_ptr + 3 * task + 2)
        rows = block * BM + tl.arange(0, BM)
        row_in = (rows < M)[:, None]
        if op == 0:
            at = rows.to(tl.int64)[:, None] * D
            square = tl.zeros((BM,), dtype=tl.float32)
            for k in range(0, D, BK):
                inner = k + tl.arange(0, BK)
                x = tl.load(
                    x_ptr + at + inner[None, :], mask=row_in & (inner < D)[None, :], other=0.0
                ).to(tl.float32)
                square += tl.sum(x * x, axis=1)
            scale = 1.0 / tl.sqrt(square / D + eps)
            for k in range(0, D, BK):
                inner = k + tl.arange(0, BK)
                inside = row_in & (inner < D)[None, :]
                x = tl.load(x_ptr + at + inner[None, :], mask=inside, other=0.0).to(tl.float32)
                w = tl.load(weight_ptr + inner, mask=inner < D, other=0.0).to(tl.float32)
                n = (x * scale[:, None] * w[None, :]).to(norm_ptr.dtype.element_ty)
                tl.store(norm_ptr + at + inner[None, :], n, mask=inside)
            _publish(counters_ptr + block)
        else:
            cols = col * BN + tl.arange(0, BN)
            if op == 1:
                _arrived(counters_ptr + block, 1)
                gate = _tile(norm_ptr, gate_ptr, rows, cols, M, H, D, BM, BN, BK)
                up = _tile(norm_ptr, up_ptr, rows, cols, M, H, D, BM, BN, BK)
                h = gate / (1.0 + tl.exp(-gate)) * up
                tl.store(
                    hidden_ptr + rows.to(tl.int64)[:, None] * H + cols[None, :],
                    h.to(hidden_ptr.dtype.element_ty),
                    mask=row_in & (cols < H)[None, :],
                )
                _publish(counters_ptr + blocks + block)
            else:
                _arrived(counters_ptr + blocks + block, tl.cdiv(H, BN))
                y = _tile(hidden_ptr, down_ptr, rows, cols, M, D, H, BM, BN, BK)
                tl.store(
                    y_ptr + rows.to(tl.int64)[:, None] * D + cols[None, :],
                    y.to(y_ptr.dtype.element_ty),
                    mask=row_in & (cols < D)[None, :],
                )


def settings(M: int, D: int, H: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and warps; two accumulators live at once in the gate and up products."""
    odd = bool(D % 16 or H % 16)  # scalar loads, each with an address of its own
    if dtype == torch.float32:
        return {"BM": 16 if M <= 16 else 32, "BN": 32, "BK": 32, "num_warps": 8 if odd else 4}
    return {"BM": 16 if M <= 16 else 64, "BN": 64, "BK": 64, "num_warps": 4 if M <= 16 else 8}


def task_list(M: int, D: int, H: int, BM: int, BN: int) -> torch.Tensor:
    """Tasks in topological order: (n, 3) int32 of operator, row block, column block."""
    blocks = range(cdiv(M, BM))
    tasks = [(NORM, r, 0) for r in blocks]
    tasks += [(HIDDEN, r, c) for r in blocks for c in range(cdiv(H, BN))]
    tasks += [(DOWN, r, c) for r in blocks for c in range(cdiv(D, BN))]
    return torch.tensor(tasks, dtype=torch.int32)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Run the Triton kernel on checked inputs, wherever they are."""
    (M, D), H = x.shape, gate.shape[1]
    sizes = settings(M, D, H, x.dtype)
    tasks = task_list(M, D, H, sizes["BM"], sizes["BN"]).to(x.device)
    counters = torch.zeros(2 * cdiv(M, sizes["BM"]), dtype=torch.int32, device=x.device)
    norm = output(M, D, dtype=x.dtype, device=x.device)
    hidden = output(M, H, dtype=x.dtype, device=x.device)
    y = output(M, D, dtype=x.dtype, device=x.device)
    programs = 1  # the interpreter runs programs one after the other: a second would wait for ever
    if x.is_cuda:
        units = torch.cuda.get_device_properties(x.device).multi_processor_count
        programs = min(len(tasks), units)
    with on_device(x):
        mega_mlp_kernel[(programs,)](
            tasks,
            counters,
            x.contiguous(),
            weight.contiguous(),
            gate.contiguous(),
            up.contiguous(),
            down.contiguous(),
            norm,
            hidden,
            y,
            len(tasks),
            M,
            D,
            H,
            eps,
            programs,
            **sizes,
        )
    return y


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The same in plain PyTorch, in float32 (float64 for float64); n and h in the dtype of x."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    v = x.to(wide)
    n = v * (v.square().mean(dim=1, keepdim=True) + eps).rsqrt() * weight.to(wide)
    n = n.to(x.dtype).to(wide)
    h = torch.nn.functional.silu(n @ gate.to(wide)) * (n @ up.to(wide))
    return (h.to(x.dtype).to(wide) @ down.to(wide)).to(x.dtype)


def mega_mlp(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    eps: float = 1e-6,
) -> torch.Tensor:
    """RMSNorm and a gated MLP in one kernel.

    Args:
        x: (M, D) float16, float32 or float64.
        weight: (D,) of the norm, dtype of ``x``.
        gate: (D, H), dtype of ``x``.
        up: (D, H), dtype of ``x``.
        down: (H, D), dtype of ``x``.
        eps: added to the mean square, > 0.

    Returns:
        (M, D) in the dtype of ``x``, without the residual connection.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or eps <= 0.
    """
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"x must be (M, D) with D >= 1: got {tuple(x.shape)}")
    D = x.shape[1]
    if weight.shape != (D,):
        raise ValueError(f"weight must be ({D},): got {tuple(weight.shape)}")
    if gate.ndim != 2 or gate.shape[0] != D or not gate.shape[1]:
        raise ValueError(f"gate must be ({D}, H) with H >= 1: got {tuple(gate.shape)}")
    H = gate.shape[1]
    for name, value, shape in (("up", up, (D, H)), ("down", down, (H, D))):
        if value.shape != shape:
            raise ValueError(f"{name} must be {shape}: got {tuple(value.shape)}")
    if not eps > 0:
        raise ValueError(f"eps must be > 0: got {eps}")
    check_dtype("x", x, DTYPES)
    named = {"weight": weight, "gate": gate, "up": up, "down": down}
    for name, value in named.items():
        check_dtype(name, value, (x.dtype,))
    check_same_device(x=x, **named)
    if len(x) == 0:
        return x.new_empty(0, D)
    fused = x.dtype != torch.float64 and runs_triton(x, *named.values())
    return (launch if fused else reference)(x, weight, gate, up, down, eps=eps)
