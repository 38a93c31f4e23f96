"""What workers tell each other in place of pickle: back as it was sent, and never anything but data."""

import contextlib
import math
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.encoding import Malformed, decode, encode

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(max_size=40)
ARRAYS = hnp.arrays(
    st.one_of(hnp.scalar_dtypes(), hnp.unicode_string_dtypes(min_len=1), hnp.byte_string_dtypes(min_len=1)),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
VALUES = st.recursive(
    SIMPLE | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one, other):
    """Alike in every type and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and (
                all(map(same, one.reshape(-1).tolist(), other.reshape(-1).tolist()))
                if one.dtype == object
                else one.tobytes() == other.tobytes()
            )
        )
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.slow
@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_a_value_comes_back_as_it_was(value):
    assert same(decode(encode(value)), value)


def test_the_kinds_that_batches_logs_and_callbacks_hold():
    value = {
        "x": (np.array([b"a", b"\xff\x00"], object), np.array([["one", "z"]]), np.zeros((0, 3), ">i2")),
        "y": [np.float32(0.1), np.arange(3, dtype=ml_dtypes.bfloat16), None, np.array(["", None, 5], object)],
        "logs": {"loss": float("nan"), "best": -math.inf, 3: True},
        "big": 2**200,
        "strange": "\ud800\U0001f600",
        "long": "x" * 100_000,
        "bool": np.array([True, False]),
        "when": np.array(["2024-01-01"], "datetime64[D]"),
    }
    assert same(decode(encode(value)), value)
    tensors = decode(
        encode(
            {
                "a": tf.constant([1.5]),
                "b": tf.Variable(2),
                "c": tf.constant(["text"]),
                "empty": np.array([], "U0"),
                "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
            }
        )
    )
    assert (
        tensors["a"].dtype == np.float32
        and tensors["b"] == 2
        and tensors["c"].tolist() == [b"text"]
        and tensors["empty"].shape == (0,)
        and tensors["fortran"].tolist() == [[0, 1, 2], [3, 4, 5]]
    )
    tensors["a"][0] = 1.0  # arrays that came can be written


class Evil:
    ran = []

    def __reduce__(self):
        return Evil.ran.append, ("executed",)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Evil(),
        lambda: 1,
        {1, 2},
        [1j],
        np.array([Evil()], object),
        np.zeros(2, [("a", "i4")]),
        type("Pair", (tuple,), {})((1, 2)),
        tf.sparse.from_dense([[1]]),
    ],
)
def test_what_is_no_data_is_refused_in_a_sentence(value):
    with pytest.raises(ConfigError, match="cannot be sent to the other workers: use numbers"):
        encode({"value": value})


def test_what_is_too_deep_is_refused():
    value = []
    for _ in range(200):
        value = [value]
    with pytest.raises(ConfigError, match="nested deeper"):
        encode(value)


def test_a_pickle_executes_nothing():
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(Malformed):
            decode(pickle.dumps(Evil(), protocol))
    assert not Evil.ran


def message(tree, blocks=b""):
    return struct.pack("!4sI", b"TFD1", len(tree)) + tree + blocks


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"TFD1",
        message(b"")[:6],
        struct.pack("!4sI", b"TFD1", 2**32 - 1),
        message(b"null", b"x"),
        message(b"{}"),
        message(b"0.5"),
        message(b"NaN"),
        message(b"[]"),
        message(b'["list"'),
        message(b"[" * 100_000),
        message(b'["list",' * 200 + b"1" + b"]" * 200),
        message(b'["eval","1"]'),
        message(b'["__class__"]'),
        message(b'[["list"]]'),
        message(b'["dict",[["list"],1]]'),
        message(b'["dict",[1]]'),
        message(b'["bytes",5]', b"1234"),
        message(b'["bytes",-1]'),
        message(b'["bytes",true]', b"x"),
        message(b'["bytes","5"]'),
        message(b'["float",5]'),
        message(b'["float","x"]'),
        message(b'["array","<f4",[2]]', b"1234"),
        message(b'["array","<f4",[-1]]'),
        message(b'["array","<f4",[4611686018427387904,4]]'),
        message(b'["array","|O",[1]]', b"12345678"),
        message(b'["array","|V8",[1]]', b"12345678"),
        message(b'["array","i4,O",[1]]', b"1" * 12),
        message(b'["array","<U0",[70000000000]]'),
        message(b'["array",{"names":["a"],"formats":["O"]},[1]]', b"12345678"),
        message(b'["array","nonsense",[1]]', b"1"),
        message(b'["scalar","<f4",[1]]', b"1234"),
        message(b'["objects",[2],1]'),
        message(b'["objects",[1099511627776,0]]', b"x"),
        message(b'["array","<f4",' + b"[1]" + b',"more"]', b"1234"),
    ],
)
def test_malformed_bytes_are_refused(data):
    with pytest.raises(Malformed):
        decode(data)


@given(VALUES, st.data())
@settings(max_examples=200, deadline=None)
def test_damage_anywhere_is_refused_or_only_changes_the_value(value, data):
    encoded = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Malformed):
        decode(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))
