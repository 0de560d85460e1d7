from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest

from regatta.errors import CheckpointError, RunNotFound, UsageError
from regatta.runs.checkpoint import Checkpoint, load_checkpoint
from regatta.runs.layout import Status, iso, utc_now
from regatta.runs.run import Run, RunConfig, RunWriter, find_run, list_runs
from regatta.store.base import Store, open_store


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "folder" else "memory:")


@contextlib.contextmanager
def writing(store: Store, name: str = "run", **options: object) -> Iterator[RunWriter]:
    given = {"preset": "cartpole-ppo", "config": {"run": {"steps": 5}}, "command": ["regatta", "train"]}
    writer = RunWriter.create(store, name=name, **{**given, **options})  # type: ignore[arg-type]
    try:
        yield writer
    finally:
        writer.close("done")


def checkpoint(iteration: int, return_mean: float | None = None) -> Checkpoint:
    arrays = {"w": np.full(10, iteration, np.float32)}
    return Checkpoint(iteration, 100 * iteration, arrays, {"i": iteration}, return_mean)


def test_a_whole_run(store: Store) -> None:
    with writing(store) as writer:
        for i in range(1, 4):
            writer.metrics({"iteration": i, "loss": 1.0 / i, "np": np.float32(i), "bad": math.nan})
            writer.episodes([{"iteration": i, "return": 10.0 * i, "length": 5}] * 2)
            writer.status(iterations=i, steps=100 * i, return_mean=np.float64(i), workers=2)
            writer.checkpoint(checkpoint(i, float(i)))
            assert writer.flush(5)
    run = find_run(store, "run")
    assert (run.id, run.config, run.facts.preset) == ("run", {"run": {"steps": 5}}, "cartpole-ppo")
    assert run.facts.versions["numpy"] == np.__version__
    assert run.facts.versions["python"] == platform.python_version()
    assert run.facts.cpu
    assert run.location == f"{store.location}/run"
    status = run.status()
    assert (status.status, status.steps, status.return_mean, status.error) == ("done", 300, 3.0, None)
    metrics = run.metrics()
    assert metrics["iteration"] == [1, 2, 3]
    assert metrics["loss"] == [1.0, 0.5, 1 / 3]
    assert metrics["np"] == [1.0, 2.0, 3.0]
    assert all(math.isnan(value) for value in metrics["bad"])
    assert run.episodes()["return"] == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0]
    assert [m.iteration for m in run.checkpoints()] == [1, 2, 3]
    assert run.checkpoint("best")[0].iteration == 3


def test_run_json_is_plain_and_holds_no_secret(store: Store) -> None:
    command = [
        "regatta",
        "train",
        "--token",
        "s3cret",
        "--api-key=s3cret",
        "redis://:s3cret@host:1/0",
        "x.y=1",
    ]
    command += ["transport.password=s3cret", "--token-file", "/run/token"]
    config = {"url": "redis://u:s3cret@h/0", "auth": {"token": "s3cret", "tokens": 3}, "list": ["a", 1, None]}
    with writing(store, command=command, config=config):
        pass
    text = store.get("run/run.json").decode()
    assert "s3cret" not in text
    facts = json.loads(text)
    assert facts["command"][-1] == "/run/token"
    assert "x.y=1" in facts["command"]
    assert facts["config"]["url"] == "redis://***@h/0"
    assert facts["config"]["auth"]["tokens"] == 3
    assert facts["config"]["list"] == ["a", 1, None]


def test_metrics_are_thinned_to_means(store: Store) -> None:
    with writing(store) as writer:
        writer.metrics({"iteration": 1, "steps": 10, "loss": 5.0})
        for i in range(2, 6):
            writer.metrics({"iteration": i, "steps": 10 * i, "loss": i, "note": f"n{i}", "rare": None})
        writer.metrics({"iteration": 6, "steps": 60, "loss": 1, "rare": 7.0})
        assert writer.flush(5)
        assert find_run(store, "run").metrics()["iteration"] == [1, 6]
        time.sleep(0.11)
        writer.metrics({"iteration": 7, "steps": 70, "loss": 1})
        writer.flush(5)
    metrics = find_run(store, "run").metrics()
    assert metrics["steps"] == [10, 60, 70]
    assert metrics["loss"] == [5.0, 3.0, 1]
    assert metrics["note"][1] == "n5"
    assert metrics["rare"][1] == 7.0


def test_a_metrics_row_costs_microseconds(store: Store) -> None:
    row = {f"metric_{i}": 0.1 * i for i in range(12)} | {"iteration": 1, "steps": 2}
    with writing(store) as writer:
        costs = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(1_000):
                writer.metrics(row)
                writer.status(steps=5, iterations=2)
            costs.append((time.perf_counter() - begin) / 1_000)
    assert min(costs) < 20e-6


def test_status_is_refreshed_while_the_learner_is_busy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regatta.runs.writer.SAVE_EVERY_S", 0.05)
    with writing(store) as writer:
        writer.status(steps=7)
        writer.metrics({"iteration": 1})
        writer.episodes([{"iteration": 1}])
        time.sleep(0.3)  # the learner compiles
        run = find_run(store, "run")
        first = run.status()
        assert (first.steps, first.status, first.pid) == (7, "running", os.getpid())
        assert run.metrics() == {"iteration": [1]}
        assert run.episodes() == {"iteration": [1]}
        time.sleep(0.2)
        assert run.status().updated > first.updated


def test_an_unknown_status_field_is_refused(store: Store) -> None:
    with writing(store) as writer, pytest.raises(TypeError, match="stepz"):
        writer.status(stepz=3)


def test_a_failed_run_says_why(store: Store) -> None:
    writer = RunWriter.create(store, preset="p", config={}, command=[], name="run")
    assert writer.close("failed", error="loss is NaN in lane 3")
    status = find_run(store, "run").status()
    assert (status.status, status.error) == ("failed", "loss is NaN in lane 3")
    assert list_runs(store)[0].problem == "loss is NaN in lane 3"


def test_old_checkpoints_are_pruned(store: Store) -> None:
    with writing(store, keep=2) as writer:
        for i in range(1, 7):
            writer.checkpoint(checkpoint(i, 100.0 if i == 2 else float(i)))
            assert writer.flush(5)
    assert [m.iteration for m in find_run(store, "run").checkpoints()] == [2, 5, 6]


def test_rows_are_saved_before_their_checkpoint(store: Store) -> None:
    """Seen from the store: whenever checkpoint i is there, so is row i."""
    put = store.put
    missing: list[int] = []

    def watched(key: str, data: bytes) -> None:
        put(key, data)
        if key.endswith("manifest.json"):
            iteration = json.loads(data)["iteration"]
            run = find_run(store, "run")
            if iteration not in run.metrics()["iteration"] or iteration not in run.episodes()["iteration"]:
                missing.append(iteration)

    store.put = watched  # type: ignore[method-assign]
    with writing(store) as writer:
        for i in range(1, 30):
            writer.metrics({"iteration": i})
            writer.episodes([{"iteration": i}])
            if i % 4 == 0:
                writer.checkpoint(checkpoint(i))
    assert missing == []


def test_arrays_may_change_after_checkpoint(store: Store) -> None:
    with writing(store) as writer:
        saved = checkpoint(1)
        writer.checkpoint(saved)
        saved.arrays["w"][:] = -1
    np.testing.assert_array_equal(find_run(store, "run").checkpoint()[0].arrays["w"], 1)


def test_resume_rewinds_the_record(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with writing(store) as writer:
        for i in range(1, 9):
            writer.metrics({"iteration": i, "session": 1})
            writer.episodes([{"iteration": i, "session": 1}])
            writer.flush()
            if i in (4, 8):
                writer.checkpoint(checkpoint(i))
        writer.status(restarts=3, weights_sha256="abc")
    (tmp_path / "run/checkpoints/000000008/state.json").write_bytes(b"")
    (tmp_path / "run/status.json#1").write_bytes(b"half")
    loaded, notes = load_checkpoint(store, "run")
    assert loaded.iteration == 4
    assert "state.json has 0 bytes" in notes[0]
    again = RunWriter.resume(store, "run", after=loaded.iteration)
    run = find_run(store, "run")
    assert run.metrics()["iteration"] == [1, 2, 3, 4]
    assert run.status().status == "running"
    assert run.status().weights_sha256 is None
    for i in range(5, 8):
        again.metrics({"iteration": i, "session": 2})
        again.episodes([{"iteration": i, "session": 2}])
        again.flush()
    again.checkpoint(checkpoint(7))
    again.close("done")
    assert run.metrics() == {"iteration": [1, 2, 3, 4, 5, 6, 7], "session": [1] * 4 + [2] * 3}
    assert run.episodes() == run.metrics()
    assert [m.iteration for m in run.checkpoints()] == [4, 7]
    assert run.status().restarts == 3
    assert not (tmp_path / "run/status.json#1").exists()


def test_resume_refuses_while_another_learner_lives(store: Store) -> None:
    with pytest.raises(RunNotFound, match="no run 'run'"):
        RunWriter.resume(store, "run", after=0)
    with writing(store):
        pass

    def claim(host: str, pid: int, age_s: float) -> None:
        updated = iso(utc_now() - timedelta(seconds=age_s))
        store.put("run/status.json", msgspec.json.encode(Status(host=host, pid=pid, updated=updated)))

    for host, pid in ((socket.gethostname(), os.getppid()), ("elsewhere", 1)):
        claim(host, pid, 5)
        with pytest.raises(UsageError, match=f"being trained by process {pid} on {host}, last heard of 5 s ago"):
            RunWriter.resume(store, "run", after=0)
        RunWriter.resume(store, "run", after=0, force=True).close("done")
        claim(host, pid, 31)
        RunWriter.resume(store, "run", after=0).close("done")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    claim(socket.gethostname(), gone.pid, 1)
    RunWriter.resume(store, "run", after=0).close("done")


LEARNER = """
import sys, time, numpy as np
from regatta.runs import writer as module
from regatta.runs.run import RunWriter
from regatta.runs.checkpoint import Checkpoint, load_checkpoint
from regatta.errors import CheckpointError
from regatta.store.base import open_store
module.SAVE_EVERY_S = 0.02
store = open_store(sys.argv[1])
try:
    i = load_checkpoint(store, "run")[0].iteration
except CheckpointError:
    i = 0
if store.list("run"):
    run = RunWriter.resume(store, "run", after=i)
else:
    run = RunWriter.create(store, preset="p", config={}, command=[], name="run")
print("ready", flush=True)
while True:
    i += 1
    run.episodes([{"iteration": i, "k": k} for k in range(3)])
    run.status(iterations=i)
    if i % 5 == 0:
        run.checkpoint(Checkpoint(i, i, {"w": np.full(20_000, i, np.float32)}, {"i": i}))
    time.sleep(0.001)
"""


def test_a_run_survives_being_killed_again_and_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    random = np.random.default_rng(1)
    reached = 0
    for _ in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", LEARNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as learner:
            assert learner.stdout is not None
            assert learner.stdout.readline() == "ready\n"
            time.sleep(random.uniform(0.02, 0.15))
            os.kill(learner.pid, signal.SIGKILL)
        run = find_run(store, "run")
        episodes = run.episodes()
        before = reached
        with contextlib.suppress(CheckpointError):
            reached = run.checkpoint()[0].iteration
        assert reached >= before
        if episodes:
            rows = list(zip(episodes["iteration"], episodes["k"], strict=True))
            assert rows == [(1 + n // 3, n % 3) for n in range(len(rows))]
            assert episodes["iteration"][-1] >= reached
    assert reached > 0


def test_finding(store: Store) -> None:
    with pytest.raises(RunNotFound, match=r"there are no runs in .*`regatta train`"):
        find_run(store, "last")
    for name in ("cart-brisk-otter", "cart-brisk-owl", "pole-calm-fox"):
        with writing(store, name):
            time.sleep(0.002)
    assert find_run(store, "cart-brisk-owl").id == "cart-brisk-owl"
    assert find_run(store, "pole").id == "pole-calm-fox"
    assert find_run(store, "last").id == "pole-calm-fox"
    with pytest.raises(RunNotFound, match="beginning of 2 runs: cart-brisk-otter, cart-brisk-owl; give more"):
        find_run(store, "cart")
    with pytest.raises(RunNotFound, match=r"did you mean 'pole-calm-fox'\? `regatta runs` lists all"):
        find_run(store, "pole-clam-fox")
    for ref in ("", "../x", "/etc", "a b", "zzz"):
        with pytest.raises(RunNotFound, match="no run"):
            find_run(store, ref)
    assert [summary.id for summary in list_runs(store)] == [
        "pole-calm-fox",
        "cart-brisk-owl",
        "cart-brisk-otter",
    ]


def test_a_prefix_that_is_also_a_name(store: Store) -> None:
    for name in ("a", "a-b"):
        with writing(store, name):
            pass
    assert find_run(store, "a").id == "a"


def test_broken_runs_are_listed_not_raised(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert list_runs(store) == []
    for name in ("good", "stale", "dead"):
        with writing(store, name):
            pass
    stale = Status(steps=5, updated=iso(utc_now() - timedelta(seconds=31)))
    store.put("stale/status.json", msgspec.json.encode(stale))
    store.put("dead/status.json", b'{"status": "ru')
    for name, text in {"torn": b'{"id": "to', "alien": b"[]", "zero": b"", "bytes": b"\xff\xfe"}.items():
        store.put(f"{name}/run.json", text)
    store.put("norun/other.txt", b"")
    store.put("dir/run.json/x", b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a file").write_text("")
    found = {summary.id: summary for summary in list_runs(store)}
    assert {name: summary.status for name, summary in found.items()} == {
        "good": "done",
        "stale": "lost",
        "dead": "lost",
        **dict.fromkeys(("torn", "alien", "zero", "bytes", "norun", "dir"), "unreadable"),
    }
    assert found["stale"].steps == 5
    assert "run.json is damaged" in (found["torn"].problem or "")
    assert found["norun"].problem == "there is no run.json"
    with pytest.raises(RunNotFound, match=r"run torn in .* cannot be read: run.json is damaged"):
        find_run(store, "torn")
    assert isinstance(find_run(store, "last"), Run)


def test_a_copied_folder_answers_to_its_new_name(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with writing(store, "old"):
        pass
    (tmp_path / "old").rename(tmp_path / "new")
    assert find_run(store, "new").status().status == "done"
    assert find_run(store, "new").id == "new"


def test_run_config() -> None:
    config = msgspec.convert({}, RunConfig)
    assert (config.steps, config.seed, config.checkpoint_every, config.keep) == (100_000, 0, 50_000, 3)
    for bad in (
        {"steps": 0},
        {"seed": -1},
        {"seed": 2**31},
        {"checkpoint_every": 0},
        {"keep": 0},
        {"step": 1},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, RunConfig)
    properties = msgspec.json.schema(RunConfig)["$defs"]["RunConfig"]["properties"]
    assert all("description" in knob for knob in properties.values())


def test_reading_runs_needs_no_jax() -> None:
    heavy = ("jax", "obstore", "gymnasium")
    code = f"import sys, regatta.runs.run; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
