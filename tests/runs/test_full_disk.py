"""A disk that is really full: training goes on, says so, and saves again when there is room."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from programs import fill

from regatta.runs.checkpoint import Checkpoint
from regatta.runs.run import RunWriter, find_run
from regatta.store.base import open_store


def test_training_goes_on_with_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regatta.runs.writer.SAVE_EVERY_S", 0.05)
    store = open_store(str(small_disk / "runs"))
    writer = RunWriter.create(store, preset="p", config={}, command=[], name="run")
    warnings: list[str] = []
    iteration = 0
    slowest = 0.0

    def train_until(condition: Callable[[], bool]) -> None:
        nonlocal iteration, slowest
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, (writer.saving(), warnings)
            begin = time.monotonic()
            iteration += 1
            writer.metrics({"iteration": iteration})
            writer.episodes([{"iteration": iteration, "return": 1.0}])
            writer.status(iterations=iteration)
            if iteration % 10 == 0:
                w = np.full(50_000, iteration, np.float64)  # 400 kB
                writer.checkpoint(Checkpoint(iteration, iteration, {"w": w}, {"i": iteration}, None))
            warnings.extend(writer.warnings())
            slowest = max(slowest, time.monotonic() - begin)
            time.sleep(0.005)

    run = find_run(store, "run")
    train_until(lambda: len(run.checkpoints()) == 3)
    assert warnings == []

    fill(small_disk / "ballast")
    train_until(lambda: bool(warnings))
    assert warnings[0].startswith("cannot write run/")
    assert warnings[0].endswith(": No space left on device; training goes on, will try again")
    full_at = iteration
    train_until(lambda: iteration > full_at + 100 and writer.saving().dropped > 0)
    assert "No space left on device" in (writer.saving().failing or "")
    good, notes = run.checkpoint()
    assert good.iteration <= full_at
    assert notes == []  # the failed attempts left nothing that looks like a checkpoint
    np.testing.assert_array_equal(good.arrays["w"], good.iteration)

    (small_disk / "ballast").unlink()
    train_until(lambda: "saving works again" in warnings and run.checkpoint()[0].iteration > full_at + 50)
    assert writer.close("done")
    assert run.checkpoint()[1] == []
    assert run.status().status == "done"
    assert run.status().checkpoints_dropped > 0
    assert run.episodes()["iteration"] == list(range(1, iteration + 1))  # nothing is missing
    assert run.metrics()["iteration"][-1] == iteration
    assert slowest < 0.5
    assert not list(small_disk.rglob("*#*"))


def test_closing_with_a_full_disk_ends(small_disk: Path) -> None:
    store = open_store(str(small_disk / "runs"))
    writer = RunWriter.create(store, preset="p", config={}, command=[], name="run")
    writer.checkpoint(Checkpoint(1, 1, {"w": np.zeros(10)}))
    assert writer.flush(5)
    fill(small_disk / "ballast")
    writer.checkpoint(Checkpoint(2, 2, {"w": np.zeros(500_000)}))
    begin = time.monotonic()
    assert not writer.close("done", timeout_s=0.5)
    assert time.monotonic() - begin < 3
    assert "No space left on device" in writer.warnings()[0]
    assert find_run(store, "run").checkpoint()[0].iteration == 1
