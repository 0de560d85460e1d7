"""Frames: one typed header (msgpack) followed by named arrays, in one block of bytes.

    magic 4 | header length u32 | array table length u32 | header | array table | padding to 8 | array bytes ...

Decoding checks every length and type before it touches the data, never runs anything, and returns read-only
views into the frame. What does not fit exactly is a CodecError. This module knows no transport.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import numpy as np

from regatta.errors import CodecError
from regatta.types import Array, Arrays

MAGIC = b"RGT1"
MAX_ARRAYS = 4096
MAX_DIMS = 8
MAX_EXTENT = 2**62  # bytes, counting empty dimensions as one: NumPy cannot describe more even where no data follows
_PREFIX = struct.Struct("<4sII")
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
# By dtype, as its `name` is computed anew each time it is asked for; big-endian ones travel as little-endian.
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NAMES |= {dtype.newbyteorder(">"): name for name, dtype in _DTYPES.items()}


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_table_decoder = msgspec.msgpack.Decoder(list[_Entry])
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(header: msgspec.Struct, arrays: Arrays | None = None) -> bytes:
    """One frame. Arrays are copied once, into C order and little-endian."""
    entries: list[_Entry] = []
    blobs: list[bytes | memoryview] = []
    for name, array in (arrays or {}).items():
        kind = _NAMES.get(array.dtype)
        if kind is None:
            raise CodecError(f"array {name!r} has dtype {array.dtype}, which does not travel")
        flat = np.ascontiguousarray(array, dtype=_DTYPES[kind])
        entries.append(_Entry(name, kind, array.shape))
        blobs.append(flat.reshape(-1).view(np.uint8).data)
    head = _encoder.encode(header)
    table = _encoder.encode(entries)
    padding = b"\0" * (-(_PREFIX.size + len(head) + len(table)) % 8)
    parts: list[bytes | memoryview] = [_PREFIX.pack(MAGIC, len(head), len(table)), head, table, padding]
    for blob in blobs:
        parts.append(blob)
        parts.append(b"\0" * (-len(blob) % 8))
    return b"".join(parts)


def decode(frame: bytes | memoryview, kind: Any) -> tuple[Any, Arrays]:
    """The header, as `kind` (a Struct type or a union of tagged ones), and the arrays."""
    view = memoryview(frame)
    if len(view) < _PREFIX.size:
        raise CodecError(f"frame of {len(view)} bytes is too short")
    magic, head_len, table_len = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise CodecError("not a Regatta frame")
    offset = _PREFIX.size + head_len + table_len
    if offset > len(view):
        raise CodecError("frame is cut short in its header")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        header = decoder.decode(view[_PREFIX.size : _PREFIX.size + head_len])
        table = _table_decoder.decode(view[_PREFIX.size + head_len : offset])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"frame header: {error}") from error
    if len(table) > MAX_ARRAYS:
        raise CodecError(f"frame names {len(table)} arrays, at most {MAX_ARRAYS} are allowed")
    offset += -offset % 8
    arrays: Arrays = {}
    for entry in table:
        array, offset = _array(view, entry, offset)
        if entry.name in arrays:
            raise CodecError(f"array {entry.name!r} appears twice")
        arrays[entry.name] = array
    if offset != len(view):
        raise CodecError(f"frame has {len(view)} bytes, its table accounts for {offset}")
    return header, arrays


def _array(view: memoryview, entry: _Entry, offset: int) -> tuple[Array, int]:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CodecError(f"array {entry.name!r} has unknown dtype {entry.dtype!r}")
    if len(entry.shape) > MAX_DIMS or any(n < 0 for n in entry.shape):
        raise CodecError(f"array {entry.name!r} has impossible shape {entry.shape}")
    if math.prod(max(n, 1) for n in entry.shape) * dtype.itemsize > MAX_EXTENT:
        raise CodecError(f"array {entry.name!r} has impossible shape {entry.shape}")
    count = math.prod(entry.shape)
    nbytes = count * dtype.itemsize
    if offset + nbytes > len(view):
        raise CodecError(f"array {entry.name!r} is cut short")
    array = np.frombuffer(view[offset : offset + nbytes], dtype=dtype).reshape(entry.shape)
    array.flags.writeable = False
    if entry.dtype == "bool" and count and int(array.view(np.uint8).max()) > 1:
        raise CodecError(f"array {entry.name!r} holds bytes that are neither true nor false")
    return array, offset + nbytes + (-nbytes % 8)
