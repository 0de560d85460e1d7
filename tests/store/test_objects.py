"""What every store promises, on every kind there is here."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from regatta.errors import NotFound, StoreError, UsageError
from regatta.store.base import Store, default_location, open_store

BAD_KEYS = ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/", "./a", "a\\b", "a\nb", "a/b.json#1"]


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "runs") if request.param == "folder" else "memory:")


def test_put_get_replace(store: Store) -> None:
    store.put("run/a.json", b"one")
    store.put("run/a.json", b"two")
    assert store.get("run/a.json") == b"two"
    store.put("run/empty", b"")
    assert store.get("run/empty") == b""


def test_large_values(store: Store) -> None:
    data = bytes(range(256)) * 60_000
    store.put("big", data)
    assert store.get("big") == data


def test_missing_keys(store: Store) -> None:
    with pytest.raises(NotFound, match=r"no run/a.json in "):
        store.get("run/a.json")
    store.put("run/b.json", b"")
    with pytest.raises(NotFound):
        store.get("run/a.json")
    store.delete("run/a.json")
    assert store.list("nowhere") == []
    assert store.folders("nowhere") == []


def test_list_is_sorted_and_by_folder(store: Store) -> None:
    for key in ("r1/b", "r1/a/z", "r1/a/y", "r10/a", "top"):
        store.put(key, b"x")
    assert store.list("r1") == ["r1/a/y", "r1/a/z", "r1/b"]
    assert store.list() == ["r1/a/y", "r1/a/z", "r1/b", "r10/a", "top"]
    assert store.folders() == ["r1", "r10"]
    assert store.folders("r1") == ["a"]


def test_delete(store: Store) -> None:
    store.put("r/a", b"1")
    store.put("r/b", b"2")
    store.delete("r/a")
    assert store.list("r") == ["r/b"]


def test_put_new_lets_one_win(store: Store) -> None:
    assert store.put_new("r/run.json", b"first")
    assert not store.put_new("r/run.json", b"second")
    assert store.get("r/run.json") == b"first"

    wins: list[int] = []
    start = threading.Barrier(8)

    def race(me: int) -> None:
        start.wait()
        if store.put_new("r/contested", str(me).encode()):
            wins.append(me)

    _in_threads(race, 8)
    assert len(wins) == 1
    assert store.get("r/contested") == str(wins[0]).encode()


def test_put_is_atomic_for_readers(store: Store) -> None:
    size = 300_000
    store.put("r/a", b"0" * size)
    torn: list[bytes] = []
    stop = threading.Event()

    def read(_: int) -> None:
        while not stop.is_set():
            data = store.get("r/a")
            if len(data) != size or data.count(data[:1]) != size:
                torn.append(data)

    reader = threading.Thread(target=read, args=(0,))
    reader.start()
    for i in range(100):
        store.put("r/a", str(i % 10).encode() * size)
    stop.set()
    reader.join()
    assert not torn


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_are_checked(store: Store, key: str) -> None:
    for verb in (store.get, store.delete, lambda k: store.put(k, b""), lambda k: store.put_new(k, b"")):
        with pytest.raises(StoreError, match="is no key"):
            verb(key)


def test_a_folder_that_is_only_read_is_not_made(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "runs"))
    assert store.list() == []
    assert store.folders() == []
    store.delete("a")
    store.sweep("a")
    assert not (tmp_path / "runs").exists()


def test_a_folder_removed_under_us_is_made_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "runs"))
    store.put("a", b"1")
    (tmp_path / "runs" / "a").unlink()
    (tmp_path / "runs").rmdir()
    store.put("b", b"2")
    assert store.list() == ["b"]


def test_deleting_leaves_no_empty_folders(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("r/checkpoints/1/a", b"")
    store.put("r/b", b"")
    store.delete("r/checkpoints/1/a")
    assert [path.name for path in tmp_path.rglob("*")] == ["r", "b"]


def test_sweep_removes_unfinished_writes_only(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("r/a", b"good")
    store.put("r/deep/b", b"good")
    for leftover in ("r/a#1", "r/deep/b#23", "other#1"):
        (tmp_path / leftover).write_bytes(b"half")
    assert store.list() == ["r/a", "r/deep/b"]
    assert store.sweep("r") == 2
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["a", "b", "other#1"]
    assert open_store("memory:").sweep("r") == 0


def test_errors_name_store_key_and_cause(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("r/a", b"")
    with pytest.raises(StoreError) as caught:
        store.put("r/a/b", b"")
    assert str(caught.value) == f"cannot write r/a/b to {tmp_path}: Not a directory"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot open store .*/file/runs: Not a directory"):
        open_store(str(tmp_path / "file" / "runs")).put("a", b"")


def test_reading_a_folder_as_a_key_is_a_store_error(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("r/a/b", b"")
    with pytest.raises(StoreError):
        store.get("r/a")


def test_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"unknown kind of store 'ftp://'; use a folder, or .* s3://"):
        open_store("ftp://host/runs")
    store = open_store(f"file://{tmp_path}")
    store.put("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"
    monkeypatch.delenv("REGATTA_STORE", raising=False)
    assert default_location() == "./runs"
    monkeypatch.setenv("REGATTA_STORE", "s3://bucket/x")
    assert default_location() == "s3://bucket/x"
    monkeypatch.chdir(tmp_path)
    relative = open_store("sub")
    monkeypatch.chdir("/")
    relative.put("k", b"")
    assert (tmp_path / "sub" / "k").exists()


def test_a_location_is_shown_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = open_store("s3://user:hunter2@bucket/runs")
    assert store.location == "s3://bucket/runs"
    assert "hunter2" not in repr(store)


def test_a_bucket_out_of_reach_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://bucket/runs")
    with pytest.raises(StoreError, match=r"cannot write r/a to s3://bucket/runs: ") as caught:
        store.put("r/a", b"")
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_importing_the_store_is_cheap() -> None:
    code = (
        "import sys, regatta.store.base as b; assert 'obstore' not in sys.modules\n"
        "b.open_store('memory:').put('a', b'')\n"
        "print([m for m in ('jax', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _in_threads(target: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=target, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
