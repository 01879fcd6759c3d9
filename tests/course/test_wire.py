"""Values between the processes: what goes comes back, and what is forged is refused."""

import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from icmllab.course import wire

Pair = namedtuple("Pair", ["p", "tau"])

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_equal_and_of_their_type(value):
    back = wire.loads(wire.dumps(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i8", "f2", "f4", "f8", "c16", ">f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_keep_dtype_shape_and_bits(dtype, shape):
    rng = np.random.default_rng(0)
    array = (10 * rng.normal(size=shape)).astype(dtype)
    back = wire.loads(wire.dumps(array))
    np.testing.assert_array_equal(back, array)
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("=")
    if shape == (2, 3, 4):
        np.testing.assert_array_equal(wire.loads(wire.dumps(array.T)), array.T)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_tensors_keep_dtype_shape_and_bits(dtype):
    tensor = (10 * torch.randn(4, 5)).to(dtype)
    for value in (tensor, tensor.T, tensor[:, ::2], tensor[0, 0], tensor[:0]):
        back = wire.loads(wire.dumps(value))
        assert back.dtype == dtype
        assert torch.equal(back, value)
    assert not wire.loads(wire.dumps(torch.ones(2, requires_grad=True))).requires_grad


def test_generators_named_tuples_and_special_numbers_come_back():
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    copy = wire.loads(wire.dumps(generator))
    assert torch.equal(torch.rand(4, generator=copy), torch.rand(4, generator=generator))
    back = wire.loads(wire.dumps(Pair(0.5, float("inf"))))
    assert back == (0.5, math.inf)
    assert back.tau == math.inf
    assert math.isnan(wire.loads(wire.dumps(float("nan"))))
    scalar = wire.loads(wire.dumps(np.float32(0.1)))
    assert type(scalar) is np.float32
    assert wire.loads(wire.dumps({1: {2, 3}, (4, 5): frozenset("a")})) == {1: {2, 3}, (4, 5): {"a"}}


class Odd(float):
    """Claims to be equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize(
    "value", [object(), lambda: 1, Odd(3), np.array([object()]), torch.nn.Linear(1, 1), range(3)]
)
def test_what_is_no_data_is_refused_or_stays_where_it_is(value):
    with pytest.raises(wire.WireError):
        wire.dumps(value)
    handle = wire.Handle(4, "thing", True)
    assert wire.loads(wire.dumps([value], keep=lambda _: handle)) == [handle]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"t":"list"}',
        '{"t":"eval","v":"1"}',
        '{"t":"array","d":"O","s":[1],"v":"AAAAAAAAAAA="}',
        '{"t":"array","d":"<f8","s":[1000000000000],"v":""}',
        '{"t":"array","d":"<f8","s":[-1],"v":""}',
        '{"t":"array","d":"f8,f8","s":[1],"v":"AAAAAAAAAAAAAAAAAAAAAA=="}',
        '{"t":"array","d":"<f8","s":[1],"v":"!!!!"}',
        '{"t":"tensor","d":"qint8","v":{"d":"<i8","s":[0],"v":""}}',
        '{"t":"tensor","d":"float32","v":{"d":"<i8","s":[0],"v":""}}',
        '{"t":"named","n":"x","f":["a b"],"v":[1]}',
        '{"t":"named","n":"x","f":["a"],"v":[1,2]}',
        '{"t":"generator","v":{"d":"|u1","s":[1],"v":"AA=="}}',
        '{"t":"float","v":"1e400"}',
        '{"t":"dict","v":[[1]]}',
        '{"t":"dict","v":[[{"t":"list","v":[]},1]]}',
        '{"t":"handle","v":[1]}',
        "[" * 100_000,
        '{"t":"list","v":[' * 60 + "]}" * 60,
    ],
)
def test_forged_messages_are_refused(text):
    with pytest.raises(wire.WireError):
        wire.loads(text)


def test_a_long_message_is_neither_written_nor_read():
    with pytest.raises(wire.WireError, match="too long"):
        wire.dumps(np.zeros(2**21))
    with pytest.raises(wire.WireError, match="too long"):
        wire.loads(" " * (wire.MAX_BYTES + 1))
