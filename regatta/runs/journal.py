"""Journals: rows that only ever grow, over a store that cannot append.

Rows gather in a segment that is written whole at each save; when it is long enough the next one begins. A
session that resumes after iteration i first writes a segment holding only `{"resumed_after": i}`: a reader
that meets it forgets the earlier rows with a later iteration, because the session is about to repeat them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from regatta.errors import NotFound
from regatta.runs.layout import Json, plain, run_key, segment_key
from regatta.store.base import Store

SEGMENT_BYTES = 256 * 1024
MAX_UNSAVED_SEGMENTS = 64  # 16 MB: what a journal may hold in memory while the store cannot be written
MARK = "resumed_after"

_encoder = msgspec.json.Encoder(enc_hook=plain)
_decoder = msgspec.json.Decoder(dict[str, Any])


class Journal:
    """The writing end. `append` and `extend` only touch memory; `save` belongs to the saver's thread."""

    def __init__(
        self, store: Store, run_id: str, name: str, *, first: int = 0, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._name = name
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._full: deque[tuple[int, bytes]] = deque()
        self._index = first
        self._current = bytearray()
        self._saved_bytes = 0  # of the current segment
        self.dropped_segments = 0

    @classmethod
    def fresh(cls, store: Store, run_id: str, name: str) -> Journal:
        return cls(store, run_id, name)

    @classmethod
    def resumed(cls, store: Store, run_id: str, name: str, after: int) -> Journal:
        """A session that goes on after iteration `after`. The mark is in the store before any row can be."""
        index = max(_segments(store, run_id, name), default=-1) + 1
        store.put(segment_key(run_id, name, index), _encoder.encode({MARK: after}) + b"\n")
        return cls(store, run_id, name, first=index + 1)

    def append(self, row: Mapping[str, Json]) -> None:
        self._add(_encoder.encode(row) + b"\n")

    def extend(self, rows: Iterable[Mapping[str, Json]]) -> None:
        self._add(b"".join(_encoder.encode(row) + b"\n" for row in rows))

    def save(self) -> None:
        """Write what has not been written, segments in order: a later one implies the earlier are whole."""
        while True:
            with self._lock:
                if self._full:
                    index, data = self._full[0]
                elif len(self._current) > self._saved_bytes:
                    index, data = self._index, bytes(self._current)
                else:
                    return
            self._store.put(segment_key(self._run_id, self._name, index), data)
            with self._lock:
                if self._full and self._full[0] == (index, data):
                    self._full.popleft()
                elif index == self._index:
                    self._saved_bytes = len(data)
                    return

    def _add(self, lines: bytes) -> None:
        with self._lock:
            self._current += lines
            if len(self._current) < self._segment_bytes:
                return
            self._full.append((self._index, bytes(self._current)))
            self._index += 1
            self._current.clear()
            self._saved_bytes = 0
            if len(self._full) > MAX_UNSAVED_SEGMENTS:
                self._full.popleft()
                self.dropped_segments += 1


def read_journal(store: Store, run_id: str, name: str) -> list[dict[str, Json]]:
    """All rows that still count. Lines that are damaged are passed over: a journal is for looking at."""
    rows: list[dict[str, Json]] = []
    segments = _segments(store, run_id, name)
    for index in sorted(segments):
        try:
            data = store.get(segments[index])
        except NotFound:
            continue
        for line in data.splitlines():
            try:
                row = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            after = row.get(MARK)
            if isinstance(after, int):
                rows = [kept for kept in rows if _iteration(kept) <= after]
            else:
                rows.append(row)
    return rows


def columns(rows: list[dict[str, Json]]) -> dict[str, list[Json]]:
    """One list per key, all of one length; NaN where a row has no value."""
    keys = dict.fromkeys(key for row in rows for key in row)
    nan = float("nan")
    return {key: [nan if (value := row.get(key)) is None else value for row in rows] for key in keys}


def _iteration(row: dict[str, Json]) -> float:
    value = row.get("iteration")
    return value if isinstance(value, int | float) else -1


def _segments(store: Store, run_id: str, name: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for key in store.list(run_key(run_id, name)):
        stem, _, kind = key.rpartition("/")[2].partition(".")
        if kind == "jsonl" and stem.isdecimal():
            found[int(stem)] = key
    return found
