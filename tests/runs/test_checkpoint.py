from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from regatta.errors import CheckpointError, StoreError
from regatta.runs.checkpoint import (
    Checkpoint,
    Which,
    list_checkpoints,
    load_checkpoint,
    prune,
    remove_after,
    save_checkpoint,
)
from regatta.store.base import Store, open_store
from regatta.types import Arrays


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "folder" else "memory:")


def make(iteration: int, return_mean: float | None = None, value: float | None = None) -> Checkpoint:
    array = np.full((4, 3), iteration if value is None else value, np.float32)
    state = {"iteration": iteration}
    return Checkpoint(iteration, iteration * 100, {"w": array}, state, return_mean)


def test_round_trip_is_exact(store: Store) -> None:
    arrays: Arrays = {
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0, 3), np.int64),
        "flags": np.array([True, False]),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "transposed": np.arange(6).reshape(2, 3).T,
        "strided": np.arange(10, dtype=np.int16)[::3],
        "half": np.array([np.nan, np.inf, -0.0], np.float16),
        "key": np.array([2**32 - 1, 0], np.uint32),
    }
    state = {"rng": {"state": 2**127 + 1}, "nan": math.nan, "inf": -math.inf, "x": 0.1, "t": None, "s": "é"}
    save_checkpoint(store, "run", Checkpoint(7, 700, arrays, state, np.float64(1.25), "final"))
    loaded, notes = load_checkpoint(store, "run")
    assert notes == []
    assert (loaded.iteration, loaded.steps, loaded.return_mean, loaded.kind) == (7, 700, 1.25, "final")
    assert loaded.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded.arrays[name].shape == array.shape, name
        assert loaded.arrays[name].dtype == array.dtype, name
        assert loaded.arrays[name].tobytes() == array.tobytes(), name
    assert loaded.state["rng"] == state["rng"]
    assert math.isnan(loaded.state["nan"])
    assert {k: v for k, v in loaded.state.items() if k != "nan"} == {k: v for k, v in state.items() if k != "nan"}
    assert store.list("run") == [
        f"run/checkpoints/000000007/{part}" for part in ("manifest.json", "state.json", "state.safetensors")
    ]


def test_no_arrays_and_no_state(store: Store) -> None:
    save_checkpoint(store, "run", Checkpoint(1, 1, {}, {}, math.nan))
    loaded, _ = load_checkpoint(store, "run")
    assert (loaded.arrays, loaded.state, loaded.return_mean) == ({}, {}, None)


def test_what_cannot_be_saved_is_refused_at_once(store: Store) -> None:
    with pytest.raises(CheckpointError, match="array 'w' has dtype object"):
        save_checkpoint(store, "run", Checkpoint(1, 1, {"w": np.array([None])}))
    with pytest.raises(CheckpointError, match=r"plain JSON: .*set"):
        save_checkpoint(store, "run", Checkpoint(1, 1, {}, {"x": {1, 2}}))
    assert store.list() == []


def test_which(store: Store) -> None:
    for iteration, mean in ((10, 1.0), (20, 9.0), (30, None), (40, 9.0), (50, 3.0)):
        save_checkpoint(store, "run", make(iteration, mean))
    assert load_checkpoint(store, "run")[0].iteration == 50
    assert load_checkpoint(store, "run", "best")[0].iteration == 40
    assert load_checkpoint(store, "run", 20)[0].arrays["w"][0, 0] == 20
    assert [m.iteration for m in list_checkpoints(store, "run")] == [10, 20, 30, 40, 50]
    with pytest.raises(CheckpointError, match=r"checkpoint 25 of run run .*; those there are: 10, 20, 30, 40, 50"):
        load_checkpoint(store, "run", 25)


def test_best_without_returns_is_the_last(store: Store) -> None:
    save_checkpoint(store, "run", make(1))
    save_checkpoint(store, "run", make(2))
    loaded, notes = load_checkpoint(store, "run", "best")
    assert loaded.iteration == 2
    assert notes == ["no checkpoint has a mean return yet", "using checkpoint 2 instead"]


def test_none_at_all(store: Store) -> None:
    whiches: list[Which] = ["last", "best"]
    for which in whiches:
        with pytest.raises(CheckpointError, match="run run has no checkpoint yet"):
            load_checkpoint(store, "run", which)


@pytest.mark.parametrize("part", ["state.safetensors", "state.json", "manifest.json"])
def test_damage_anywhere_is_noticed(tmp_path: Path, part: str) -> None:
    store = open_store(str(tmp_path))
    save_checkpoint(store, "run", make(10, 5.0))
    save_checkpoint(store, "run", make(20, 6.0))
    path = tmp_path / "run/checkpoints/000000020" / part
    good = path.read_bytes()
    spots = sorted({0, 1, 7, 8, 9, len(good) // 3, len(good) // 2, len(good) - 2, *range(0, len(good), 29)})
    damaged = [good[:i] for i in spots] + [good + b"\0"]
    damaged += [good[:i] + bytes([good[i] ^ 0x10]) + good[i + 1 :] for i in spots]
    for data in damaged:
        path.write_bytes(data)
        loaded, notes = load_checkpoint(store, "run")
        if loaded.iteration == 20:  # only a manifest may differ in bytes and still say exactly the same
            assert part == "manifest.json"
            assert json.loads(data) == json.loads(good)
            continue
        assert loaded.iteration == 10
        assert part in notes[0]
        assert notes[0].startswith("checkpoint 20 cannot be trusted: ")
        assert notes[1] == "using checkpoint 10 instead"
        assert load_checkpoint(store, "run", "best")[0].iteration == 10
        with pytest.raises(CheckpointError, match="checkpoint 20 of run run cannot be used"):
            load_checkpoint(store, "run", 20)
    path.unlink()
    loaded, notes = load_checkpoint(store, "run")
    assert loaded.iteration == 10
    assert f"{part} is missing" in notes[0]
    path.write_bytes(good)
    assert load_checkpoint(store, "run")[0].iteration == 20


def test_a_manifest_that_vouches_for_rubbish(tmp_path: Path) -> None:
    import hashlib

    import msgspec

    from regatta.runs.checkpoint import Manifest

    store = open_store(str(tmp_path))
    save_checkpoint(store, "run", make(10))
    save_checkpoint(store, "run", make(20))
    folder = tmp_path / "run/checkpoints/000000020"
    good = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)

    def vouch(part: str, data: bytes, file: str | None = None) -> str:
        entry = msgspec.structs.replace(
            good.parts[part], file=file or part, size=len(data), sha256=hashlib.sha256(data).hexdigest()
        )
        manifest = msgspec.structs.replace(good, parts={**good.parts, part: entry}).sealed()
        before = (folder / part).read_bytes()
        (folder / part).write_bytes(data)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        loaded, notes = load_checkpoint(store, "run")
        (folder / part).write_bytes(before)
        assert loaded.iteration == 10
        return notes[0]

    assert "state.json is not JSON" in vouch("state.json", b"{")
    assert "state.json is not JSON" in vouch("state.json", b"\xff\xfe{")
    assert "state.json is not JSON" in vouch("state.json", b"[" * 100_000)
    assert "state.json is not a JSON object" in vouch("state.json", b"[1]")
    assert "is not a safetensors file" in vouch("state.safetensors", b"")
    assert "is not a safetensors file" in vouch("state.safetensors", b"\xff" * 64)
    assert "outside its folder" in vouch("state.json", b"{}", file="../000000010/state.json")


def test_nothing_to_be_trusted_says_what_and_what_to_do(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    save_checkpoint(store, "run", make(10))
    save_checkpoint(store, "run", make(20))
    (tmp_path / "run/checkpoints/000000020/manifest.json").unlink()
    (tmp_path / "run/checkpoints/000000010/state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(store, "run")
    assert "no checkpoint of run run can be trusted: checkpoint 20 cannot be trusted: " in str(caught.value)
    assert "state.json has 2 bytes instead of" in str(caught.value)
    assert "backup" in str(caught.value)


def test_prune_keeps_the_last_and_the_best(store: Store) -> None:
    for iteration, mean in ((10, 1.0), (20, 9.0), (30, 2.0), (40, 3.0), (50, 4.0)):
        save_checkpoint(store, "run", make(iteration, mean))
    store.delete("run/checkpoints/000000030/manifest.json")
    store.put("run/checkpoints/000000060/state.json", b"half of the next one")
    prune(store, "run", 2)
    assert store.folders("run/checkpoints") == [f"{i:09d}" for i in (20, 40, 50, 60)]
    prune(store, "run", 1)
    assert [m.iteration for m in list_checkpoints(store, "run")] == [20, 50]
    prune(open_store("memory:"), "run", 1)


def test_remove_after(store: Store) -> None:
    for iteration in (10, 20, 30):
        save_checkpoint(store, "run", make(iteration))
    remove_after(store, "run", 10)
    assert store.folders("run/checkpoints") == ["000000010"]


def test_saving_again_replaces(store: Store) -> None:
    for value, kind in ((1.0, "boundary"), (1.0, "final"), (2.0, "interrupt"), (3.0, "final")):
        again = Checkpoint(10, 100, {"w": np.full(3, value)}, {}, None, kind)  # type: ignore[arg-type]
        save_checkpoint(store, "run", again)
        loaded, notes = load_checkpoint(store, "run")
        assert (loaded.arrays["w"][0], loaded.kind, notes) == (value, kind, [])
        assert len(store.list("run")) == 3


class Failing:
    """A store that fails at the n-th put from now on."""

    def __init__(self, store: Store, after: int) -> None:
        self._store = store
        self._left = after

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes) -> None:
        if self._left == 0:
            raise StoreError("cannot write: No space left on device")
        self._left -= 1
        self._store.put(key, data)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_failed_save_leaves_nothing_and_harms_nothing(store: Store, after: int) -> None:
    save_checkpoint(store, "run", make(10))
    for iteration in (20, 10):  # a new one, and over the good one
        with pytest.raises(StoreError):
            save_checkpoint(Failing(store, after), "run", make(iteration, value=99))  # type: ignore[arg-type]
        loaded, notes = load_checkpoint(store, "run")
        assert (loaded.iteration, loaded.arrays["w"][0, 0], notes) == (10, 10, [])
        assert len(store.list("run")) == 3
    save_checkpoint(store, "run", make(20))
    assert load_checkpoint(store, "run")[0].iteration == 20


WRITER = """
import sys, numpy as np
from regatta.runs.checkpoint import Checkpoint, save_checkpoint, prune
from regatta.store.base import open_store
store = open_store(sys.argv[1])
i = int(sys.argv[2])
while True:
    i += 1
    for kind in ("boundary", "final"):  # the second over the first
        w = np.full(60_000, i, np.float64)
        save_checkpoint(store, "run", Checkpoint(i, i, {"w": w}, {"i": i, "kind": kind}, float(i), kind))
    prune(store, "run", 1)
    print(i, flush=True)
"""


def test_a_killed_writer_always_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    random = np.random.default_rng(0)
    done = 0
    for _ in range(12):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(done)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            first = int(writer.stdout.readline())
            time.sleep(random.uniform(0.0, 0.06))
            os.kill(writer.pid, signal.SIGKILL)
            finished = max([first, *(int(line) for line in writer.stdout.read().split())])
        loaded, _ = load_checkpoint(store, "run")
        assert loaded.iteration >= finished > done
        assert loaded.state["i"] == loaded.iteration
        np.testing.assert_array_equal(loaded.arrays["w"], loaded.iteration)
        done = loaded.iteration
    store.sweep("run")
    assert not list(tmp_path.rglob("*#*"))
