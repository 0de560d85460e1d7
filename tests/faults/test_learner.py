"""A learner that is killed or interrupted leaves nothing behind; one whose disk is full goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from programs import SMALL, Recorder, fill, lives, wait_until

import regatta

GONE_S = 3.0


@pytest.mark.parametrize("url", [None, "tcp://127.0.0.1:0"], ids=["ipc", "tcp"])
def test_a_killed_learner_leaves_nothing(url: str | None, start: Any, store: Path, tmp_path: Path) -> None:
    """With a checkpoint after every iteration, so that the kill falls into the saving of one."""
    command = start(
        *("train", "cartpole-ppo", "run.steps=10000000", "algorithm.epochs=1", "run.checkpoint_every=1"),
        *("--store", store, "-w", 3, *(["--listen", url] if url else [])),
    )
    wait_until(lambda: len(list(store.glob("*/checkpoints/*/manifest.json"))) > 3, 30, command.err)
    workers = command.workers
    assert len(workers) == 3
    if url is None:
        assert list((tmp_path / "tmp").glob("regatta-*"))
    command.send(signal.SIGKILL)
    command.wait()
    began = time.monotonic()
    wait_until(lambda: not any(map(lives, workers.values())), GONE_S, f"workers {workers}")
    workers_s = time.monotonic() - began
    wait_until(lambda: not list((tmp_path / "tmp").glob("regatta-*")), GONE_S, "the socket's folder")
    print(f"workers gone after {workers_s:.2f} s, socket after {time.monotonic() - began:.2f} s")
    time.sleep(max(0.0, began + GONE_S - time.monotonic()))
    assert not list(store.rglob("*#*"))


def test_ctrl_c_once_saves_twice_ends_at_once(start: Any, store: Path, tmp_path: Path) -> None:
    """The second comes while the first is waiting for an update of many seconds."""
    command = start(
        *("train", "cartpole-ppo", "run.steps=1000000", "algorithm.rollout_steps=512", "algorithm.epochs=1000"),
        *("algorithm.minibatch=4", "--store", store, "-w", 2),
    )
    wait_until(lambda: len(command.workers) == 2 and "compiling" in command.out, 30, command.err)
    time.sleep(4)  # now it computes
    workers = command.workers
    command.send(signal.SIGINT)
    time.sleep(0.5)
    assert command.popen.poll() is None, "the update was shorter than this test needs"
    command.send(signal.SIGINT)
    began = time.monotonic()
    assert command.wait() == 130
    took_s = time.monotonic() - began
    gone_s = wait_until(lambda: not any(map(lives, workers.values())), GONE_S)
    print(f"second Ctrl-C: gone after {took_s:.2f} s, its workers after {gone_s:.2f} s")
    assert took_s < 1
    assert not list((tmp_path / "tmp").glob("regatta-*"))


def test_ctrl_c_in_the_terminal_reaches_the_learner_alone(start: Any, store: Path, tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to the whole foreground group, and workers must not die of it."""
    command = start("train", "cartpole-ppo", "run.steps=100000000", *SMALL, "--store", store, "-w", 2)
    wait_until(lambda: len(command.workers) == 2 and "training" in command.out, 30, command.err)
    for pid in command.workers.values():
        assert os.getpgid(pid) != os.getpgid(command.pid)
    workers = command.workers
    time.sleep(1)
    command.send(signal.SIGINT)
    began = time.monotonic()
    assert command.wait() == 130
    print(f"Ctrl-C: saved and gone after {time.monotonic() - began:.2f} s")
    assert not any(map(lives, workers.values()))
    assert not list((tmp_path / "tmp").glob("regatta-*"))
    run = regatta.load_run(store=str(store))
    assert run.status().status == "interrupted"
    assert run.status().restarts == 0
    assert run.checkpoint()[0].steps == run.status().steps


def test_training_goes_on_with_a_full_disk(small_disk: Path, environments: None, tmp_path: Path) -> None:
    flag = tmp_path / "slow"
    flag.touch()
    ballast = small_disk / "ballast"
    full_at_step = free_at_step = 0

    def act(progress: Any, now: float) -> None:
        nonlocal full_at_step, free_at_step
        said = [text for _, text in recorder.said]
        if not full_at_step and len(recorder.run.checkpoints()) >= 2:
            fill(ballast)
            full_at_step = progress.steps
        elif full_at_step and not free_at_step and progress.saving and progress.steps > full_at_step + 2000:
            ballast.unlink()
            free_at_step = progress.steps
        elif free_at_step and "saving works again" in said:
            flag.unlink(missing_ok=True)

    recorder = Recorder(act)
    settings = ["env.id=environments:paced", "run.steps=40000", *SMALL]
    slow = [f"env.kwargs.flag={flag}", "env.kwargs.sleep_s=0.0002"]
    run = regatta.train(
        "cartpole-ppo", [*settings, *slow], seed=1, workers=2, store=str(small_disk / "runs"), display=recorder
    )
    said = [text for _, text in recorder.said]
    print(f"full at step {full_at_step}, room at {free_at_step}; told: {said}")
    assert any("No space left on device; training goes on" in text for text in said)
    assert run.status().status == "done"
    assert run.checkpoint()[1] == []
    assert run.checkpoint()[0].steps == run.status().steps
    assert not list(small_disk.rglob("*#*"))
    calm = regatta.train("cartpole-ppo", settings, seed=1, workers=0, store=str(tmp_path / "calm"))
    assert run.status().weights_sha256 == calm.status().weights_sha256
    assert run.episodes() == calm.episodes()
