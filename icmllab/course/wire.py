"""Values as plain data between the process that tests and the one that runs a student's code.

Nothing here executes what it reads: a message is JSON, arrays are raw bytes with a dtype and a
shape. Both sides use it; the testing side believes nothing that it decodes but its own checks.
"""

import base64
import json
import math
from collections import namedtuple
from typing import NamedTuple

import numpy as np

MAX_BYTES = 8 * 2**20
"""Longest message that is read, in bytes."""

MAX_DEPTH = 40
"""How deep lists, tuples and dicts may be nested."""

_DTYPES = frozenset("?bhilqBHILQefdFD")
_TORCH = frozenset(
    (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("uint8", "int8", "int16", "int32", "int64", "bool"),
    )
)


class WireError(ValueError):
    """A value that cannot be sent, or a message that is not one."""


class Handle(NamedTuple):
    """An object that stays where it is, known to the other side by a number.

    Attributes:
        number: its number on the side that owns it.
        kind: the name of its type, for messages.
        callable: whether it can be called.
    """

    number: int
    kind: str
    callable: bool


def dumps(value: object, *, keep: object = None) -> str:
    """``value`` as one line of JSON.

    Args:
        value: None, booleans, numbers, strings, bytes, NumPy arrays and scalars, torch tensors and
            generators, :class:`Handle`, and lists, tuples, named tuples, sets and dicts of these.
        keep: called with any other object, returns its :class:`Handle`; None refuses such objects.

    Raises:
        WireError: an object that can't be sent, nesting that is too deep, a message too long.
    """
    text = json.dumps(_encode(value, keep, 0), allow_nan=False, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        raise WireError(f"a value of {len(text)} bytes is too long: at most {MAX_BYTES}")
    return text


def loads(text: str, *, resolve: object = None) -> object:
    """The value of a message.

    Args:
        text: what :func:`dumps` gave, perhaps forged.
        resolve: called with each :class:`Handle`, returns what stands for it; None keeps handles.

    Raises:
        WireError: a message that is malformed or too long.
    """
    if len(text) > MAX_BYTES:
        raise WireError(f"a message of {len(text)} bytes is too long: at most {MAX_BYTES}")
    try:
        return _decode(json.loads(text), resolve, 0)
    except WireError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise WireError(f"malformed message: {type(error).__name__}: {error}") from None


def _encode(value: object, keep: object, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise WireError(f"a value is nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 2**53 else {"t": "int", "v": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"t": "float", "v": repr(value)}
    if kind is complex:
        return {"t": "complex", "v": [_encode(p, keep, depth) for p in (value.real, value.imag)]}
    if kind in (bytes, bytearray):
        return {"t": "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.char in _DTYPES:
        return _encode_array(np.asarray(value), scalar=isinstance(value, np.generic))
    if isinstance(value, Handle):
        return {"t": "handle", "v": list(value)}
    if kind in (list, tuple, set, frozenset):
        return {"t": kind.__name__, "v": [_encode(v, keep, depth + 1) for v in value]}
    if kind is dict:
        pairs = [[_encode(p, keep, depth + 1) for p in item] for item in value.items()]
        return {"t": "dict", "v": pairs}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        items = [_encode(v, keep, depth + 1) for v in value]
        return {"t": "named", "n": kind.__name__, "f": list(kind._fields), "v": items}
    found = _encode_torch(value)
    if found is not None:
        return found
    if keep is None:
        raise WireError(f"a {kind.__name__} cannot be sent: only data can")
    return _encode(keep(value), None, depth)


def _encode_array(array: np.ndarray, *, scalar: bool = False) -> dict:
    array = np.ascontiguousarray(array).reshape(array.shape)
    dtype = array.dtype.newbyteorder("<")
    data = base64.b64encode(array.astype(dtype, copy=False).tobytes()).decode()
    return {"t": "array", "d": dtype.str, "s": list(array.shape), "v": data, "scalar": scalar}


def _encode_torch(value: object) -> dict | None:
    import sys

    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.Generator):
        return {"t": "generator", "v": _encode_array(value.get_state().numpy())}
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in _TORCH or value.layout != torch.strided:
            raise WireError(f"a tensor of {value.dtype} and layout {value.layout} cannot be sent")
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if name == "bfloat16":
            plain = plain.view(torch.int16)
        return {"t": "tensor", "d": name, "v": _encode_array(plain.numpy())}
    return None


def _decode(value: object, resolve: object, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise WireError(f"a message is nested deeper than {MAX_DEPTH}")
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise WireError("malformed message: a list without a type")
        return value
    kind, v = value["t"], value["v"]

    def items() -> list:
        return [_decode(x, resolve, depth + 1) for x in v]

    if kind == "int":
        return int(str(v))
    if kind == "float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[v]
    if kind == "complex":
        return complex(*(_decode(x, resolve, depth + 1) for x in v))
    if kind == "bytes":
        return base64.b64decode(v, validate=True)
    if kind == "array":
        return _decode_array(value)
    if kind == "tensor":
        return _decode_tensor(value)
    if kind == "generator":
        import torch

        state = torch.from_numpy(np.array(_decode_array(v)))
        generator = torch.Generator()
        generator.set_state(state)
        return generator
    if kind == "handle":
        number, name, called = v
        found = Handle(int(number), str(name)[:100], bool(called))
        return found if resolve is None else resolve(found)
    if kind in ("list", "tuple", "set", "frozenset"):
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items())
    if kind == "dict":
        return dict([_decode(x, resolve, depth + 1) for x in pair] for pair in v)
    if kind == "named":
        names = [str(f) for f in value["f"]]
        return namedtuple(str(value["n"])[:100], names)(*items())
    raise WireError(f"malformed message: unknown type {str(kind)[:40]!r}")


def _decode_array(value: dict) -> np.ndarray | np.generic:
    dtype = np.dtype(str(value["d"]))
    if dtype.char not in _DTYPES:
        raise WireError(f"malformed message: dtype {dtype}")
    shape = tuple(int(n) for n in value["s"])
    data = base64.b64decode(value["v"], validate=True)
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(f"malformed message: shape {shape} does not fit {len(data)} bytes")
    array = np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))
    return array[()] if value.get("scalar") and not shape else array


def _decode_tensor(value: dict) -> object:
    import torch

    name = str(value["d"])
    if name not in _TORCH:
        raise WireError(f"malformed message: tensor dtype {name[:40]!r}")
    array = np.asarray(_decode_array(value["v"]))
    tensor = torch.from_numpy(np.array(array))
    wanted = getattr(torch, name)
    if name == "bfloat16" and tensor.dtype == torch.int16:
        return tensor.view(torch.bfloat16)
    if tensor.dtype != wanted:
        raise WireError(f"malformed message: tensor dtype {name} holds {tensor.dtype}")
    return tensor
