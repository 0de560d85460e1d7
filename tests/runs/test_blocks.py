"""Blocks: what never changes is stored once, shared by checkpoints, verified like the rest, cleared away in time."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from programs import fill

from regatta.errors import CheckpointError, StoreError
from regatta.runs.checkpoint import (
    Block,
    Checkpoint,
    Manifest,
    list_checkpoints,
    load_checkpoint,
    prune,
    remove_after,
    save_checkpoint,
)
from regatta.runs.layout import block_key
from regatta.runs.run import RunWriter
from regatta.store.base import Store, open_store
from regatta.types import Arrays

POISON: Arrays = {"x": np.array([None])}  # cannot be encoded


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "folder" else "memory:")


def block(number: int, future: int = 0) -> Arrays:
    return {"x": np.full((3, 2), number, np.float32), "future": np.array([future])}


def make(iteration: int, blocks: dict[str, Arrays], return_mean: float | None = None) -> Checkpoint:
    w = np.full(4, iteration, np.float32)
    return Checkpoint(iteration, iteration * 100, {"algorithm/w": w}, {"i": iteration}, return_mean, "boundary", blocks)


def window(first: int, last: int, future: int = 0) -> dict[str, Arrays]:
    """Blocks first to last, as a memory that forgets the oldest would have them."""
    return {f"algorithm/lane-0/{i:03d}": block(i, future) for i in range(first, last + 1)}


def held(checkpoint: Checkpoint) -> dict[str, float]:
    """By block, the number its array tells."""
    names = [name for name in checkpoint.arrays if name.endswith("/x")]
    return {name.removesuffix("/x"): float(checkpoint.arrays[name][0, 0]) for name in names}


def stored(store: Store) -> list[str]:
    """Names of the blocks in the store, without their hashes."""
    keys = store.list("run/checkpoints/blocks")
    return [key.removeprefix("run/checkpoints/blocks/").rpartition("-")[0] for key in keys]


class Watched:
    """A store that counts what is put and deleted, fails when told to, and can end the process at the n-th change."""

    def __init__(self, store: Store, changes: int = 10**9) -> None:
        self._store = store
        self._left = changes
        self.puts: list[str] = []
        self.failing = ""  # keys that contain it cannot be written
        self.full_after = 10**9  # puts of blocks

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def _change(self) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1

    def put(self, key: str, data: bytes) -> None:
        self._change()
        if "/blocks/" in key:
            self.full_after -= 1
        if (self.failing and self.failing in key) or self.full_after < 0:
            raise StoreError("cannot write: No space left on device")
        self._store.put(key, data)
        self.puts.append(key)

    def delete(self, key: str) -> None:
        self._change()
        self._store.delete(key)

    @property
    def blocks(self) -> list[str]:
        return [key for key in self.puts if "/blocks/" in key]


class Killed(BaseException):
    """As if the process had ended here."""


def create(store: object, **options: int) -> RunWriter:
    return RunWriter.create(store, preset="p", config={}, command=[], name="run", **options)  # type: ignore[arg-type]


def test_blocks_come_back_among_the_arrays(store: Store) -> None:
    save_checkpoint(
        store, "run", make(1, {"algorithm/replay/3": block(3), "b": {}, "c": block(4) | {"y/z": np.eye(2)}})
    )
    loaded, notes = load_checkpoint(store, "run")
    assert notes == []
    assert set(loaded.arrays) == {
        "algorithm/w",
        *("algorithm/replay/3/x", "algorithm/replay/3/future"),
        *("c/x", "c/future", "c/y/z"),
    }
    np.testing.assert_array_equal(loaded.arrays["algorithm/replay/3/x"], np.full((3, 2), 3, np.float32))
    assert loaded.blocks == {}
    assert stored(store) == ["algorithm/replay/3", "b", "c"]
    without, _ = load_checkpoint(store, "run", blocks=False)
    assert set(without.arrays) == {"algorithm/w"}


def test_what_cannot_be_a_block_is_refused_at_once(store: Store) -> None:
    for name in ("", "/a", "a/", "a//b", "../a", "a/../b", ".a", "a b", "a\\b", "ä", "a\n"):
        with pytest.raises(CheckpointError, match="cannot name a block"):
            save_checkpoint(store, "run", make(1, {name: block(1)}))
    with pytest.raises(CheckpointError, match="array 'x' has dtype object"):
        save_checkpoint(store, "run", make(1, {"a": POISON}))
    assert store.list() == []


def test_each_block_is_encoded_and_written_once(store: Store) -> None:
    watched = Watched(store)
    writer = create(watched, keep=2)
    writer.checkpoint(make(1, window(0, 2)))
    assert writer.flush(5)
    assert len(watched.blocks) == 3
    known = dict.fromkeys(window(1, 2), POISON)  # what is stored is not even looked at
    writer.checkpoint(make(2, known | window(3, 4)))
    writer.checkpoint(make(3, known | dict.fromkeys(window(3, 4), POISON) | window(5, 5)))
    assert writer.close("interrupted")
    assert len(watched.blocks) == len(set(watched.blocks)) == 6
    assert held(load_checkpoint(store, "run", 2)[0]) == {name: float(i) for i, name in enumerate(window(1, 4), 1)}
    assert held(load_checkpoint(store, "run", 3)[0]) == {name: float(i) for i, name in enumerate(window(1, 5), 1)}
    assert stored(store) == list(window(1, 5))  # 0 went with checkpoint 1
    puts = len(watched.blocks)

    again = RunWriter.resume(watched, "run", after=3, keep=2)  # type: ignore[arg-type]
    again.checkpoint(make(4, dict.fromkeys(window(2, 5), POISON) | window(6, 6)))
    assert again.close("done")
    assert [key.split("/")[-1][:3] for key in watched.blocks[puts:]] == ["006"]
    assert held(load_checkpoint(store, "run")[0]) == {name: float(i) for i, name in enumerate(window(2, 6), 2)}


def test_arrays_of_blocks_may_change_after_checkpoint(store: Store) -> None:
    writer = create(store)
    blocks = window(0, 1)
    writer.checkpoint(make(1, blocks))
    for arrays in blocks.values():
        arrays["x"][:] = -1
    assert writer.close("done")
    assert list(held(load_checkpoint(store, "run")[0]).values()) == [0.0, 1.0]


def test_damage_to_a_block_is_noticed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    save_checkpoint(store, "run", make(10, window(0, 1)))
    save_checkpoint(store, "run", make(20, window(1, 2)))
    (path,) = tmp_path.glob("run/checkpoints/blocks/algorithm/lane-0/002-*.safetensors")
    good = path.read_bytes()
    spots = range(0, len(good), 7)
    damaged = [good[:i] for i in spots] + [good + b"\0"]
    damaged += [good[:i] + bytes([good[i] ^ 0x10]) + good[i + 1 :] for i in spots]
    for data in damaged:
        path.write_bytes(data)
        loaded, notes = load_checkpoint(store, "run")
        assert (loaded.iteration, list(held(loaded).values())) == (10, [0.0, 1.0])
        assert notes[0].startswith("checkpoint 20 cannot be trusted: block algorithm/lane-0/002 ")
        assert notes[1] == "using checkpoint 10 instead"
    path.unlink()
    assert load_checkpoint(store, "run")[1][0].endswith("block algorithm/lane-0/002 is missing")
    with pytest.raises(CheckpointError, match=r"checkpoint 20 of run run cannot be used: block .* is missing"):
        load_checkpoint(store, "run", 20)
    assert load_checkpoint(store, "run", blocks=False)[0].iteration == 20  # its policy is whole
    path.write_bytes(good)
    assert load_checkpoint(store, "run")[0].iteration == 20


def test_a_manifest_that_names_no_blocks_of_ours(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    (tmp_path / "secret-aaaaaaaaaaaa.safetensors").write_bytes(b"")
    save_checkpoint(store, "run", make(10, {}))
    save_checkpoint(store, "run", make(20, window(0, 0)))
    path = tmp_path / "run/checkpoints/000000020/manifest.json"
    good = msgspec.json.decode(path.read_bytes(), type=Manifest)
    (name,) = good.blocks
    evil = {
        "../../../secret": msgspec.structs.replace(good.blocks[name], sha256="a" * 64),
        "a": msgspec.structs.replace(good.blocks[name], sha256="/../../../../secret"),
        "": good.blocks[name],
    }
    for key, named in evil.items():
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(good, blocks={key: named}).sealed()))
        loaded, notes = load_checkpoint(store, "run")
        assert loaded.iteration == 10
        assert "names a block that cannot be one" in notes[0]
    rubbish = b"rubbish"
    vouched = msgspec.structs.replace(good.blocks[name], size=7, sha256=hashlib.sha256(rubbish).hexdigest())
    store.put(block_key("run", name, vouched.sha256), rubbish)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(good, blocks={name: vouched}).sealed()))
    assert "is not a safetensors file" in load_checkpoint(store, "run")[1][0]


def test_a_manifest_from_before_there_were_blocks(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    save_checkpoint(store, "run", make(10, {}))
    path = tmp_path / "run/checkpoints/000000010/manifest.json"
    old = json.loads(path.read_bytes())
    del old["blocks"]
    old["seal"] = hashlib.sha256(msgspec.json.encode(old | {"seal": ""})).hexdigest()
    path.write_bytes(msgspec.json.encode(old))
    assert load_checkpoint(store, "run")[0].iteration == 10


def test_blocks_go_with_the_last_checkpoint_that_needs_them(store: Store) -> None:
    for iteration, mean in ((1, 1.0), (2, 9.0), (3, 2.0), (4, 3.0), (5, 4.0)):
        save_checkpoint(store, "run", make(iteration, window(iteration, iteration + 2), mean))
    store.put("run/checkpoints/blocks/algorithm/left-over-123456789abc.safetensors", b"of an attempt")
    prune(store, "run", 2)
    assert [m.iteration for m in list_checkpoints(store, "run")] == [2, 4, 5]  # 2 is the best
    assert stored(store) == list(window(2, 7))
    prune(store, "run", 1)
    assert stored(store) == [*window(2, 4), *window(5, 7)]
    assert list(held(load_checkpoint(store, "run", 2)[0]).values()) == [2.0, 3.0, 4.0]
    remove_after(store, "run", 2)
    assert stored(store) == list(window(2, 4))
    remove_after(store, "run", 0)
    assert store.list() == []


def test_another_future_has_blocks_of_its_own(store: Store) -> None:
    writer = create(store)
    writer.checkpoint(make(10, window(0, 1), 5.0))
    writer.checkpoint(make(20, window(0, 3)))
    assert writer.close("interrupted")
    again = RunWriter.resume(store, "run", after=10)
    assert stored(store) == list(window(0, 1))
    known = dict.fromkeys(window(0, 1), POISON)
    again.checkpoint(make(20, known | window(2, 3, future=1)))
    assert again.close("interrupted")
    loaded, notes = load_checkpoint(store, "run")
    assert notes == []
    futures = [loaded.arrays[f"{name}/future"][0] for name in window(0, 3)]
    assert futures == [0, 0, 1, 1]
    once_more = RunWriter.resume(store, "run", after=0)  # from the start: nothing counts as stored
    once_more.checkpoint(make(5, window(0, 1, future=2)))
    assert once_more.close("done")
    loaded, _ = load_checkpoint(store, "run")
    assert [loaded.arrays[f"{name}/future"][0] for name in window(0, 1)] == [2, 2]


def test_a_future_beside_the_one_it_replaces(store: Store) -> None:
    """Content under a name that an older checkpoint uses for something else leaves the older one whole."""
    save_checkpoint(store, "run", make(10, window(0, 1), 9.0))
    save_checkpoint(store, "run", make(20, window(1, 2, future=1)))
    prune(store, "run", 1)
    assert stored(store) == ["algorithm/lane-0/000", *["algorithm/lane-0/001"] * 2, "algorithm/lane-0/002"]
    assert load_checkpoint(store, "run", "best")[0].arrays["algorithm/lane-0/001/future"] == 0
    assert load_checkpoint(store, "run")[0].arrays["algorithm/lane-0/001/future"] == 1


@pytest.mark.parametrize("over", [False, True])
def test_killed_between_any_two_steps(over: bool) -> None:
    """Saving, pruning and going back, ended at each change to the store: what is named is always there."""
    changes = 0
    finished = False
    while not finished:
        store = open_store("memory:")
        for iteration in (1, 2):
            save_checkpoint(store, "run", make(iteration, window(iteration, iteration + 2)))
        dying = Watched(store, changes)
        third = 2 if over else 3
        try:
            save_checkpoint(dying, "run", make(third, window(3, 5)))  # type: ignore[arg-type]
            prune(dying, "run", 1)  # type: ignore[arg-type]
            remove_after(dying, "run", 1)  # type: ignore[arg-type]
            finished = True
        except Killed:
            changes += 1
        for manifest in list_checkpoints(store, "run"):
            loaded, _ = load_checkpoint(store, "run", manifest.iteration)
            assert len(held(loaded)) == 3
        there = [manifest.iteration for manifest in list_checkpoints(store, "run")]
        assert there or changes > 8
        if there:  # going on from the newest leaves no block that is not needed
            remove_after(store, "run", there[-1])
            named = {name for m in list_checkpoints(store, "run") for name in m.blocks}
            assert stored(store) == sorted(named)
    assert changes > 8


def wait_until(condition: object, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_a_store_that_fails_for_a_while(store: Store) -> None:
    watched = Watched(store)
    writer = create(watched, keep=2)
    writer.checkpoint(make(1, window(0, 1)))
    assert writer.flush(5)
    watched.full_after = 1  # one more block fits, then nothing
    writer.checkpoint(make(2, window(0, 3)))
    wait_until(lambda: writer.saving().failures > 0, "no failure")
    assert load_checkpoint(store, "run")[0].iteration == 1
    for iteration in (3, 4, 5):  # given up for newer ones while the store fails
        writer.checkpoint(make(iteration, window(iteration - 1, iteration + 1)))
    assert writer.saving().dropped > 0
    watched.full_after = 10**9
    assert writer.close("done")
    loaded, notes = load_checkpoint(store, "run")
    assert (loaded.iteration, notes) == (5, [])
    assert list(held(loaded).values()) == [4.0, 5.0, 6.0]
    assert len(watched.blocks) == len(set(watched.blocks))  # what had been written before it failed is not again
    assert set(stored(store)) == {name for m in list_checkpoints(store, "run") for name in m.blocks}


def test_what_given_up_checkpoints_have_left_does_not_stay(store: Store) -> None:
    """Blocks fit, the rest does not, again and again: the disk must not fill up with blocks nobody will name."""
    watched = Watched(store)
    writer = create(watched)
    writer.checkpoint(make(1, window(0, 1)))
    assert writer.flush(5)
    watched.failing = "state.json"
    for iteration in range(2, 12):
        failures = writer.saving().failures
        writer.checkpoint(make(iteration, window(10 * iteration, 10 * iteration + 1)))
        writer.flush(0.05)  # tries at once
        wait_until(lambda before=failures: writer.saving().failures > before, "no failure")
    assert len(stored(store)) <= 2 + 4 * 2  # of the good one, and of the few that may still be written
    watched.failing = ""
    assert writer.close("done")
    loaded, _ = load_checkpoint(store, "run")
    assert held(loaded) == {name: float(name[-3:]) for name in window(110, 111)}


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    store = open_store(str(small_disk / "runs"))
    writer = create(store)
    sizes = {f"b/{i:02d}": {"x": np.full((1000, 25), i, np.float32)} for i in range(20)}  # 100 kB each
    names = list(sizes)
    writer.checkpoint(make(1, {name: sizes[name] for name in names[:3]}))
    assert writer.flush(5)
    fill(small_disk / "ballast")
    with (small_disk / "ballast").open("r+b") as ballast:
        ballast.truncate(ballast.seek(0, os.SEEK_END) - 500_000)  # room for some of what comes
    writer.checkpoint(make(2, {name: sizes[name] for name in names[3:12]}))
    wait_until(lambda: writer.saving().failing, "no failure")
    writer.checkpoint(make(3, {name: sizes[name] for name in names[6:15]}))
    assert "No space left on device" in writer.warnings()[0]
    loaded, notes = load_checkpoint(store, "run")
    assert (loaded.iteration, notes) == (1, [])
    (small_disk / "ballast").unlink()
    assert writer.close("done")
    loaded, notes = load_checkpoint(store, "run")
    assert (loaded.iteration, notes) == (3, [])
    assert list(held(loaded).values()) == [float(i) for i in range(6, 15)]
    assert not list(small_disk.rglob("*#*"))


class Slow(Watched):
    """Puts of blocks wait until they are let through."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.open = threading.Event()

    def put(self, key: str, data: bytes) -> None:
        if "/blocks/" in key:
            assert self.open.wait(20)
        super().put(key, data)


def test_two_waiting_checkpoints_share_their_blocks(store: Store) -> None:
    slow = Slow(store)
    writer = create(slow)
    writer.checkpoint(make(1, window(0, 1)))
    writer.checkpoint(make(2, dict.fromkeys(window(0, 1), POISON) | window(2, 2)))
    slow.open.set()
    assert writer.close("done")
    assert len(slow.blocks) == 3
    assert list(held(load_checkpoint(store, "run", 1)[0]).values()) == [0.0, 1.0]
    assert list(held(load_checkpoint(store, "run", 2)[0]).values()) == [0.0, 1.0, 2.0]


def large(first: int, last: int) -> dict[str, Arrays]:
    return {f"b/{i:03d}": {"x": np.full((1000, 25), i, np.float32)} for i in range(first, last + 1)}  # 100 kB each


def test_a_large_catch_up_does_not_copy_everything_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regatta.runs.writer.WAITING_BLOCK_BYTES", 250_000)
    slow = Slow(store)
    writer = create(slow)
    timer = threading.Timer(0.2, slow.open.set)
    timer.start()
    begin = time.monotonic()
    writer.checkpoint(make(1, large(0, 19)))  # 2 MB, of which three blocks may wait: the rest waits for the store
    assert time.monotonic() - begin > 0.15
    assert len(slow.blocks) >= 16
    assert writer.close("done")
    timer.join()
    assert len(slow.blocks) == 20
    assert list(held(load_checkpoint(store, "run")[0]).values()) == [float(i) for i in range(20)]


def copied_bytes() -> int:
    """Of all encoded blocks in memory."""
    gc.collect()
    return sum(thing.waiting_bytes for thing in gc.get_objects() if isinstance(thing, Block))


def test_memory_is_bounded_while_the_store_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regatta.runs.writer.WAITING_BLOCK_BYTES", 250_000)
    watched = Watched(store)
    writer = create(watched)
    watched.failing = "/blocks/"
    before = copied_bytes()
    said = []
    for iteration in range(1, 11):
        begin = time.monotonic()
        writer.checkpoint(make(iteration, large(iteration, iteration + 1)))
        wait_until(lambda: writer.saving().failing, "no failure")
        said += writer.warnings()
        assert time.monotonic() - begin < 2
    assert said == ["cannot write: No space left on device; training goes on, will try again"]
    assert copied_bytes() - before < 400_000
    assert not writer.close("done", timeout_s=0.2)
    assert list_checkpoints(store, "run") == []
    status = json.loads(store.get("run/status.json"))
    assert status["status"] == "failed"
    assert status["checkpoints_dropped"] >= 5


def test_a_store_that_is_too_slow(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regatta.runs.writer.WAITING_BLOCK_BYTES", 250_000)
    monkeypatch.setattr("regatta.runs.writer.BLOCKS_TIMEOUT_S", 0.1)
    slow = Slow(store)
    writer = create(slow)
    writer.checkpoint(make(1, large(0, 9)))
    assert writer.warnings() == ["checkpoint 1 was given up: its blocks were not all saved after 0 s"]
    slow.open.set()
    assert not writer.close("done")  # the newest is not there, so the run is not done
    assert json.loads(store.get("run/status.json"))["error"] == (
        "not everything could be saved: checkpoint 1 was given up"
    )


def test_a_checkpoint_given_up_is_made_up_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regatta.runs.writer.WAITING_BLOCK_BYTES", 250_000)
    watched = Watched(store)
    writer = create(watched)
    watched.failing = "/blocks/"
    writer.checkpoint(make(1, large(1, 4)))
    wait_until(lambda: writer.saving().failing, "no failure")
    for iteration in range(2, 9):
        writer.checkpoint(make(iteration, large(iteration, iteration + 3)))
    watched.failing = ""
    assert writer.flush(5)
    writer.checkpoint(make(9, large(9, 12)))
    assert writer.close("done")
    loaded, notes = load_checkpoint(store, "run")
    assert (loaded.iteration, notes) == (9, [])
    assert list(held(loaded).values()) == [9.0, 10.0, 11.0, 12.0]
    for manifest in list_checkpoints(store, "run"):
        load_checkpoint(store, "run", manifest.iteration)
    assert set(stored(store)) == {name for m in list_checkpoints(store, "run") for name in m.blocks}


# -- a replay memory in a run that is killed --------------------------------------------------------------

LEARNER = """
import hashlib, sys, time
import numpy as np
from regatta.algorithms.replay import Replay
from regatta.errors import CheckpointError
from regatta.runs.checkpoint import Checkpoint, load_checkpoint
from regatta.runs.run import RunWriter
from regatta.store.base import open_store

def chunk(i):
    rng = np.random.default_rng(i)
    obs = rng.integers(0, 255, (20, 2, 30), np.uint8)
    cut = rng.random((19, 2)) < 0.1
    index = np.argwhere(cut).astype(np.int32)
    return {
        "obs": obs[:-1], "last_obs": obs[-1], "actions": rng.integers(0, 5, (19, 2)),
        "rewards": rng.random((19, 2), np.float32), "terminated": rng.random((19, 2)) < 0.05, "truncated": cut,
        "valid": rng.random((19, 2)) < 0.9, "final_index": index,
        "final_obs": rng.integers(0, 255, (len(index), 30), np.uint8),
    }

def digest(replay, i):
    batch = replay.sample(np.random.default_rng(i), 4, 64)
    return hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()

def new():
    return Replay(4000, 2, 2, (30,), np.uint8, (), np.int64)

if __name__ == "__main__":
    store = open_store(sys.argv[1])
    replay, i = new(), 0
    try:
        found, notes = load_checkpoint(store, "run")
        assert not any("block" in note for note in notes), notes
        i = found.iteration
        replay.load({n.removeprefix("algorithm/"): a for n, a in found.arrays.items()})
        assert digest(replay, i) == found.state["digest"]
    except CheckpointError:
        pass
    if store.list("run"):
        run = RunWriter.resume(store, "run", after=i, keep=2, force=True)
    else:
        run = RunWriter.create(store, preset="p", config={}, command=[], name="run", keep=2)
    print("ready", i, flush=True)
    while True:
        i += 1
        replay.add(i % 2, chunk(i))
        if i % 7 == 0:
            arrays = {f"algorithm/{n}": a for n, a in replay.state().items()}
            blocks = {f"algorithm/{n}": b for n, b in replay.blocks().items()}
            run.checkpoint(Checkpoint(i, i, arrays, {"digest": digest(replay, i)}, blocks=blocks))
        time.sleep(0.002)
"""


def test_a_replay_memory_survives_being_killed_again_and_again(tmp_path: Path) -> None:
    program = tmp_path / "learner.py"
    program.write_text(LEARNER)
    store = open_store(str(tmp_path / "runs"))
    random = np.random.default_rng(0)
    reached = kills = 0
    while reached < 150:  # the ring is full after 105
        kills += 1
        assert kills < 60
        command = [sys.executable, str(program), str(tmp_path / "runs")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as learner:
            assert learner.stdout is not None
            ready, at = learner.stdout.readline().split()
            assert (ready, int(at)) == ("ready", reached)
            time.sleep(random.uniform(0.2, 0.5))
            os.kill(learner.pid, signal.SIGKILL)
        loaded, notes = load_checkpoint(store, "run")
        assert not any("block" in note for note in notes), notes  # at most one was not finished
        assert loaded.iteration >= reached
        reached = loaded.iteration
    learner_module = runpy.run_path(str(program))
    replay = learner_module["new"]()
    for i in range(1, reached + 1):
        replay.add(i % 2, learner_module["chunk"](i))
    assert learner_module["digest"](replay, reached) == loaded.state["digest"]
    assert kills > 1
    remove_after(store, "run", reached)
    named = {block_key("run", n, s.sha256) for m in list_checkpoints(store, "run") for n, s in m.blocks.items()}
    assert set(store.list("run/checkpoints/blocks")) == named
    assert len(named) > 20
