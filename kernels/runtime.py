"""What every kernel file needs: Triton where it exists, dispatch by device, buffers, checks.

Triton is installed on Linux only. Elsewhere the names below stand in, so that a kernel's file
imports and its op runs the reference.
"""

import contextlib

import torch

try:
    import triton
    import triton.language as tl
    from triton import jit

    HAS_TRITON = True
except ImportError:  # macOS, Windows: the reference runs instead
    triton = None
    HAS_TRITON = False

    class _Language:
        """Stands for ``triton.language`` in annotations."""

        constexpr = object

        def __getattr__(self, name: str):
            raise ImportError(f"triton.language.{name} needs Triton, which this platform lacks")

    tl = _Language()

    def jit(fn):
        """Leave a kernel as it is: it is never launched here."""
        return fn


POISON = False
"""Set by the checks: fresh outputs are filled with NaN, so that what is not written shows."""


def runs_triton(*tensors: torch.Tensor) -> bool:
    """Whether the op compiles for these tensors: all of them on one CUDA or HIP device."""
    return HAS_TRITON and all(t.is_cuda for t in tensors)


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's GPU the current one: Triton launches on the current device and stream."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def cdiv(a: int, b: int) -> int:
    """The number of blocks of ``b`` that hold ``a``."""
    return -(-a // b)


def output(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer for a kernel to fill; holds NaN (or the largest negative) under the checks."""
    buffer = torch.empty(shape, dtype=dtype, device=device)
    if POISON:
        buffer.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min)
    return buffer


def check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """ValueError unless ``tensor`` has one of the ``allowed`` dtypes."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ValueError(f"{name} must have dtype {names}: got {tensor.dtype}")


def check_same_device(**tensors: torch.Tensor) -> None:
    """ValueError unless the named tensors share a device."""
    if len({t.device for t in tensors.values()}) > 1:
        where = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise ValueError(f"{', '.join(tensors)} must share a device: got {where}")


def check_permutations(name: str, perms: torch.Tensor, n: int) -> None:
    """ValueError unless ``perms`` is (B, n) int32 or int64 with permutations as rows.

    On a GPU the rows themselves are not looked at, which would make the host wait.
    """
    if perms.ndim != 2 or perms.shape[1] != n:
        raise ValueError(f"{name} must have shape (B, {n}): got {tuple(perms.shape)}")
    check_dtype(name, perms, (torch.int32, torch.int64))
    if perms.is_cuda or len(perms) == 0:
        return
    check_indices(name, perms, n)
    seen = torch.zeros(perms.shape, dtype=torch.bool).scatter_(1, perms.long(), True)
    wrong = (~seen.all(dim=1)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"{name} must hold permutations of 0..{n - 1}: row {wrong[0]} repeats an entry"
        )


def check_indices(name: str, index: torch.Tensor, n: int) -> None:
    """ValueError unless every entry is in 0..n-1; tensors on a GPU are not looked at."""
    if index.is_cuda or index.numel() == 0:
        return
    low, high = (int(x) for x in index.aminmax())
    if low < 0 or high >= n:
        raise ValueError(f"{name} must hold entries in 0..{n - 1}: got {low if low < 0 else high}")
