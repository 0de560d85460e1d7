"""Frames: whatever goes in comes out, and whatever else arrives is a CodecError, quickly."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from regatta.codec import MAGIC, MAX_ARRAYS, decode, encode
from regatta.errors import CodecError
from regatta.types import (
    Arrays,
    Collect,
    Episode,
    Failure,
    Fault,
    FromWorker,
    Order,
    Play,
    Result,
    SnapshotHeader,
)

DTYPES = ["bool", *(f"{s}int{n}" for s in ("", "u") for n in (8, 16, 32, 64)), "float16", "float32", "float64"]
KINDS = [Order, FromWorker, SnapshotHeader]


def frame(head: bytes, table: bytes, data: bytes = b"") -> bytes:
    start = struct.pack("<4sII", MAGIC, len(head), len(table)) + head + table
    return start + b"\0" * (-len(start) % 8) + data


def described(*entries: tuple[str, str, tuple[int, ...]], data: bytes = b"") -> bytes:
    return frame(msgspec.msgpack.encode(SnapshotHeader(1)), msgspec.msgpack.encode(entries), data)


def result_frame() -> bytes:
    rng = np.random.default_rng(0)
    header = Result(7, 3, 12, [Episode(0, 2, 1.5, 9)], [Fault(1, 0, "Traceback: é")], 0.25)
    return encode(
        header,
        {
            "obs": rng.standard_normal((3, 2, 4)).astype(np.float32),
            "valid": np.array([[True, False]] * 3),
            "final_obs": np.zeros((0, 4), np.float32),
            "final_index": np.array([[1, 0]], np.int32),
        },
    )


def assert_same(arrays: Arrays, decoded: Arrays) -> None:
    assert list(arrays) == list(decoded)
    for name, array in arrays.items():
        assert decoded[name].dtype == array.dtype.newbyteorder("<")
        assert decoded[name].shape == array.shape
        np.testing.assert_array_equal(decoded[name], array)
        assert not decoded[name].flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (0, 1000), (1000, 0), (2, 1, 3, 1, 2, 1, 1, 2)])
def test_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype)
    header, arrays = decode(encode(SnapshotHeader(5), {"x": array}), SnapshotHeader)
    assert header == SnapshotHeader(5)
    assert_same({"x": array}, arrays)


def test_layouts_that_are_not_plain_c_order() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {
        "transposed": base.T,
        "fortran": np.asfortranarray(base),
        "strided": base[::2, ::-3],
        "broadcast": np.broadcast_to(np.float32(3), (2, 5)),
        "big-endian": base.astype(">f4"),
        "big-endian scalar": np.array(-2, ">i8"),
        "unaligned": np.frombuffer(b"\0" + base.tobytes(), np.float32, offset=1),
    }
    assert_same(arrays, decode(encode(SnapshotHeader(0), arrays), SnapshotHeader)[1])


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (Order(1, Collect(0, 2, 3, 4, 5, attempt=1)), Order),
        (Order(2, Play(1, 10, 2**31, deterministic=False)), Order),
        (Result(1, 2, 5, [Episode(0, 1, -0.5, 3)], [Fault(0, 1, "x")], 1.0), FromWorker),
        (Failure(3, "no"), FromWorker),
        (SnapshotHeader(2**60), SnapshotHeader),
    ],
)
def test_headers_round_trip(header: msgspec.Struct, kind: object) -> None:
    assert decode(encode(header), kind) == (header, {})
    assert decode(memoryview(encode(header)), kind) == (header, {})


array_sets = st.dictionaries(
    st.text(max_size=12),
    hnp.arrays(st.sampled_from(DTYPES).map(np.dtype), hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)),
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(arrays=array_sets)
def test_any_arrays_round_trip(arrays: Arrays) -> None:
    assert_same(arrays, decode(encode(SnapshotHeader(1), arrays), SnapshotHeader)[1])


def test_array_bytes_begin_on_multiples_of_eight() -> None:
    arrays = {"a": np.ones(3, np.uint8), "b": np.ones(3), "c": np.ones(1, np.int16), "d": np.ones(1)}
    for array in decode(encode(Failure(0, "odd"), arrays), FromWorker)[1].values():
        assert array.flags.aligned


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.zeros(2, complex), np.zeros(1, "M8[s]")])
def test_other_dtypes_do_not_travel(array: np.ndarray) -> None:
    with pytest.raises(CodecError, match="does not travel"):
        encode(SnapshotHeader(1), {"x": array})


def test_cut_short_at_any_byte() -> None:
    whole = result_frame()
    for length in range(len(whole)):
        with pytest.raises(CodecError):
            decode(whole[:length], FromWorker)
    for more in (1, 7, 8, 100):
        with pytest.raises(CodecError):
            decode(whole + b"\0" * more, FromWorker)


def test_the_wrong_kind_of_header() -> None:
    with pytest.raises(CodecError):
        decode(result_frame(), Order)
    with pytest.raises(CodecError):
        decode(encode(SnapshotHeader(1)), FromWorker)


def test_mutated_frames_decode_or_are_refused() -> None:
    rng = random.Random(1)
    order = encode(Order(1, Collect(0, 2, 3, 4, 5)), {"replay": np.zeros((3, 2), np.int32)})
    snapshot = encode(SnapshotHeader(4), {"w": np.ones((2, 2)), "b": np.zeros((), bool)})
    originals = [(result_frame(), FromWorker), (order, Order), (snapshot, SnapshotHeader)]
    refused = 0
    for _ in range(10_000):
        whole, kind = rng.choice(originals)
        mutant = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(mutant))
            what = rng.randrange(5)
            if what == 0:
                mutant[at] = rng.randrange(256)
            elif what == 1:
                mutant[at] ^= 1 << rng.randrange(8)
            elif what == 2:
                del mutant[at : at + rng.randrange(1, 9)]
                mutant += b"\0" * (12 - len(mutant))
            elif what == 3:
                mutant[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                mutant[at : at + 5] = rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + b"\xff" * 4
        try:
            decode(bytes(mutant), kind)
        except CodecError:
            refused += 1
    assert refused > 5000


@settings(max_examples=300, deadline=None)
@given(head=st.binary(max_size=80), table=st.binary(max_size=80), data=st.binary(max_size=40), whole=st.booleans())
def test_arbitrary_bytes_are_refused_or_decoded(head: bytes, table: bytes, data: bytes, whole: bool) -> None:
    for kind in KINDS:
        try:
            decode(frame(head, table, data) if whole else head + table + data, kind)
        except CodecError:
            pass


entries = st.tuples(
    st.text(max_size=3),
    st.sampled_from([*DTYPES, "object", "float128", "V8", ">f4", ""]),
    st.lists(st.sampled_from([-1, 0, 1, 2, 3, 1000, 2**31, 2**60, 2**63, 2**64 - 1]), max_size=10),
)


@settings(max_examples=300, deadline=None)
@given(table=st.lists(entries, max_size=4), data=st.binary(max_size=64))
def test_any_array_table_is_refused_or_decoded(table: list, data: bytes) -> None:
    head = msgspec.msgpack.encode(SnapshotHeader(1))
    try:
        decode(frame(head, msgspec.msgpack.encode(table), data), SnapshotHeader)
    except CodecError:
        pass


HUGE = {
    "2**60 elements": described(("x", "float64", (2**60,))),
    "a product beyond 64 bits": described(("x", "int8", (2**64 - 1, 2**64 - 1))),
    "no elements, but too wide for NumPy": described(("x", "int8", (0, *(1000,) * 7))),
    "no elements at its end": described(("x", "float32", (*(10**6,) * 7, 0))),
    "negative": described(("x", "int8", (-1, -8)), data=bytes(8)),
    "nine dimensions": described(("x", "int8", (1,) * 9), data=bytes(8)),
    "an array table of 2**32": frame(msgspec.msgpack.encode(SnapshotHeader(1)), b"\xdd" + b"\xff" * 4),
    "a shape of 2**32": frame(msgspec.msgpack.encode(SnapshotHeader(1)), b"\x91\x93\xa1x\xa4bool\xdd" + b"\xff" * 4),
    "a header of 2**32 keys": frame(b"\xdf" + b"\xff" * 4, b"\x90"),
    "a header of 2**32 bytes": MAGIC + b"\xff" * 8,
    "deep nesting": frame(b"\x82\xa4type\xa8snapshot\xa1q" + b"\x91" * 100_000, b"\x90"),
    "text that is not UTF-8": frame(msgspec.msgpack.encode(SnapshotHeader(1)), b"\x91\x93\xa1\xff\xa4bool\x90"),
}


@pytest.mark.parametrize("name", HUGE)
def test_impossible_claims_are_refused_at_once(name: str) -> None:
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(CodecError):
            decode(HUGE[name], SnapshotHeader)
        assert time.perf_counter() - started < 1.0
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_too_many_arrays() -> None:
    names = [(str(i), "int8", (0,)) for i in range(MAX_ARRAYS + 1)]
    assert len(decode(described(*names[:-1]), SnapshotHeader)[1]) == MAX_ARRAYS
    with pytest.raises(CodecError, match="at most"):
        decode(described(*names), SnapshotHeader)


def test_a_name_twice() -> None:
    with pytest.raises(CodecError, match="twice"):
        decode(described(("x", "int8", (0,)), ("x", "int8", (0,))), SnapshotHeader)


def test_bytes_that_are_no_booleans() -> None:
    assert decode(described(("x", "bool", (2,)), data=b"\1\0" + bytes(6)), SnapshotHeader)
    with pytest.raises(CodecError, match="neither true nor false"):
        decode(described(("x", "bool", (2,)), data=b"\1\2" + bytes(6)), SnapshotHeader)


def test_decoding_runs_and_copies_nothing() -> None:
    whole = encode(SnapshotHeader(1), {"x": np.arange(1000.0)})
    array = decode(whole, SnapshotHeader)[1]["x"]
    assert np.shares_memory(array, np.frombuffer(whole, np.uint8))
