from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from regatta.errors import StoreError
from regatta.runs import journal as journal_module
from regatta.runs.journal import Journal, columns, read_journal
from regatta.store.base import Store, open_store


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "folder" else "memory:")


def iterations(store: Store) -> list[int]:
    return [row["iteration"] for row in read_journal(store, "run", "metrics")]


def rows(*which: int, **more: object) -> list[dict[str, object]]:
    return [{"iteration": i, **more} for i in which]


def test_rows_come_back_in_order_across_segments(store: Store) -> None:
    journal = Journal(store, "run", "metrics", segment_bytes=200)
    for i in range(100):
        journal.append({"iteration": i // 7, "n": i, "x": np.float32(0.5), "k": np.int64(3)})
        if i % 9 == 0:
            journal.save()
    journal.save()
    assert [row["n"] for row in read_journal(store, "run", "metrics")] == list(range(100))
    keys = store.list("run/metrics")
    assert len(keys) > 10
    assert keys[0] == "run/metrics/00000.jsonl"
    assert all(len(store.get(key)) < 300 for key in keys)


def test_saving_without_news_writes_nothing(store: Store) -> None:
    journal = Journal.fresh(store, "run", "metrics")
    journal.save()
    assert store.list() == []
    journal.append({"iteration": 1})
    journal.save()
    store.delete("run/metrics/00000.jsonl")
    journal.save()
    assert store.list() == []


def test_rewinding(store: Store) -> None:
    first = Journal.fresh(store, "run", "metrics")
    first.extend(rows(1, 2, 2, 3, 4, 5, old=True))
    first.save()
    second = Journal.resumed(store, "run", "metrics", after=2)
    assert iterations(store) == [1, 2, 2]
    second.extend(rows(4, 4, 6))
    second.save()
    assert iterations(store) == [1, 2, 2, 4, 4, 6]
    third = Journal.resumed(store, "run", "metrics", after=4)
    third.append({"iteration": 5})
    third.save()
    assert iterations(store) == [1, 2, 2, 4, 4, 5]
    Journal.resumed(store, "run", "metrics", after=0)
    assert iterations(store) == []


def test_rewinding_is_exact_with_many_segments(store: Store) -> None:
    """Against a list that simply forgets, with segments that end in the middle of an iteration."""
    random = np.random.default_rng(3)
    truth: list[tuple[int, int]] = []
    reached, serial = 0, 0
    for session in range(8):
        if session == 0:
            journal = Journal(store, "run", "metrics", segment_bytes=150)
        else:
            reached = int(random.integers(0, reached + 1))
            journal = Journal.resumed(store, "run", "metrics", reached)
            journal._segment_bytes = 150
            truth = [pair for pair in truth if pair[0] <= reached]
        for _ in range(int(random.integers(0, 12))):
            reached += 1
            for _ in range(int(random.integers(0, 5))):
                serial += 1
                truth.append((reached, serial))
                journal.append({"iteration": reached, "serial": serial})
            if random.random() < 0.3:
                journal.save()
        journal.save()
        found = [(row["iteration"], row["serial"]) for row in read_journal(store, "run", "metrics")]
        assert found == truth


def test_read_while_being_written(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    journal = Journal(store, "run", "metrics", segment_bytes=2_000)
    stop = threading.Event()

    def write() -> None:
        n = 0
        while not stop.is_set():
            journal.append({"iteration": n, "n": n})
            n += 1
            if n % 5 == 0:
                journal.save()

    writer = threading.Thread(target=write)
    writer.start()
    last, reads = 0, 0
    deadline = time.monotonic() + 10
    try:
        while last < 300 or reads < 30:
            assert time.monotonic() < deadline
            found = iterations(store)
            assert found == list(range(len(found)))
            assert len(found) >= last
            reads += len(found) > last
            last = len(found)
    finally:
        stop.set()
        writer.join()


def test_appending_while_saving_loses_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_UNSAVED_SEGMENTS", 10_000)
    journal = Journal(store, "run", "metrics", segment_bytes=500)
    stop = threading.Event()

    def save() -> None:
        while not stop.is_set():
            journal.save()

    saver = threading.Thread(target=save)
    saver.start()
    for i in range(3_000):
        journal.append({"iteration": i})
    stop.set()
    saver.join()
    journal.save()
    assert iterations(store) == list(range(3_000))


def test_damaged_lines_are_passed_over(store: Store) -> None:
    store.put("run/metrics/00000.jsonl", b'{"iteration": 1}\n{"itera\n\xff\xfe\n[1]\n\n{"iteration": 2}')
    store.put("run/metrics/notes.txt", b"not ours")
    store.put("run/metrics/00001.jsonl", b"")
    assert iterations(store) == [1, 2]


def test_memory_is_bounded_while_the_store_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_UNSAVED_SEGMENTS", 3)

    class Down:
        up = False

        def __init__(self) -> None:
            self.real = open_store("memory:")

        def put(self, key: str, data: bytes) -> None:
            if not self.up:
                raise StoreError("down")
            self.real.put(key, data)

    down = Down()
    journal = Journal(down, "run", "metrics", segment_bytes=100)  # type: ignore[arg-type]
    for i in range(200):
        journal.append({"iteration": i})
        with pytest.raises(StoreError):
            journal.save()
    assert journal.dropped_segments > 10
    down.up = True
    journal.save()
    kept = iterations(down.real)
    assert kept == list(range(200 - len(kept), 200))
    assert len(kept) > 10


def test_columns() -> None:
    table = columns([{"a": 1, "b": "x"}, {"a": None, "c": 2.5}])
    assert list(table) == ["a", "b", "c"]
    assert table["a"][0] == 1
    assert math.isnan(table["a"][1])
    assert table["b"][0] == "x"
    assert math.isnan(table["c"][0])
    assert columns([]) == {}
