"""Workers that die, hang, or come and go: training goes on, soon, and with the same answer."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import Recorder, free_port, wait_until, workers_of

import regatta

# Three lanes of 16 x 2 steps: 96 steps an iteration, of at least 64 ms while the environments are slow.
SETTINGS = (
    "env.id=environments:paced",
    "env.lanes=3",
    "env.lane_envs=2",
    "algorithm.rollout_steps=16",
    "algorithm.epochs=2",
    "algorithm.minibatch=96",
    "run.checkpoint_every=480",
)
NAMES = ("worker-0", "worker-1", "worker-2")
RECOVERY_S = 3.0
DEADLINE_S = 2.0  # crew.order_timeout_s where a worker hangs


class Course:
    """One training whose environments are slow until `finish`."""

    def __init__(self, store: Path, flag: Path) -> None:
        self.store = str(store)
        self.flag = flag
        flag.touch()
        self.recorder = Recorder()
        self.settings: list[str] = []

    def train(self, act: Callable[[Any, float], None], steps: int, *overrides: str, **site: Any) -> None:
        """`act(progress, now)` is called again and again while training."""
        self.settings = [*SETTINGS, f"run.steps={steps}", *overrides]
        self.recorder.act = act
        settings = [*self.settings, f"env.kwargs.flag={self.flag}"]
        regatta.train("cartpole-ppo", settings, seed=11, store=self.store, display=self.recorder, **site)

    def finish(self) -> None:
        self.flag.unlink(missing_ok=True)

    def check_answer(self) -> None:
        """As a calm run: nothing was left out and nothing was trained on twice."""
        calm = regatta.train("cartpole-ppo", self.settings, seed=11, workers=0, store=self.store)
        run = self.recorder.run
        assert run.status().status == "done"
        assert run.status().weights_sha256 == calm.status().weights_sha256
        assert run.episodes() == calm.episodes()


@pytest.fixture
def course(store: Path, tmp_path: Path, environments: None) -> Course:
    return Course(store, tmp_path / "slow")


def all_at_work(progress: Any, count: int = 3) -> bool:
    """Also the learner: its first update, which compiles, is over."""
    return progress.iterations > 3 and len(progress.workers) == count and all(view.steps for view in progress.workers)


@pytest.mark.parametrize("names", [NAMES[1:2], NAMES], ids=["one", "all"])
def test_killed_workers_are_back_within_three_seconds(names: tuple[str, ...], course: Course) -> None:
    killed_at = 0.0

    def act(progress: Any, now: float) -> None:
        nonlocal killed_at
        if not killed_at and all_at_work(progress):
            pids = workers_of(os.getpid())
            killed_at = now
            for name in names:
                os.kill(pids[name], signal.SIGKILL)
        elif killed_at and all(course.recorder.first_result(name, killed_at) for name in names):
            course.finish()

    course.train(act, 12_000, workers=3)
    back_s = [(course.recorder.first_result(name, killed_at) or float("inf")) - killed_at for name in names]
    stall_s = course.recorder.longest_stall(killed_at, killed_at + max(back_s))
    print(f"{len(names)} killed: first results after {', '.join(f'{s:.2f}' for s in back_s)} s, stall {stall_s:.2f} s")
    assert max(back_s) < RECOVERY_S
    assert course.recorder.run.status().restarts == len(names)
    assert any("is gone" in text for _, text in course.recorder.said)
    course.check_answer()


def test_a_random_worker_killed_every_two_seconds(course: Course) -> None:
    lasting_s = float(os.environ.get("REGATTA_TEST_KILLING_S", 30))
    seed = int(os.environ.get("REGATTA_TEST_SEED", time.time_ns() % 10**6))
    print(f"victims drawn with REGATTA_TEST_SEED={seed}")
    draw = random.Random(seed)
    kills: list[float] = []
    began_at = 0.0

    def act(progress: Any, now: float) -> None:
        nonlocal began_at
        if not began_at:
            began_at = now if all_at_work(progress) else 0.0
        elif now - began_at > lasting_s:
            course.finish()
        elif now - (kills or [began_at])[-1] >= 2.0:
            pids = workers_of(os.getpid())
            if pids:
                os.kill(pids[draw.choice(sorted(pids))], signal.SIGKILL)
                kills.append(now)

    course.train(act, int(800 * lasting_s), "env.kwargs.sleep_s=0.004", workers=3)
    stall_s = course.recorder.longest_stall(began_at, began_at + lasting_s)
    status = course.recorder.run.status()
    print(f"{len(kills)} killed in {lasting_s:.0f} s: {status.restarts} restarts, longest stall {stall_s:.2f} s")
    assert len(kills) >= lasting_s / 2 - 2
    assert status.restarts >= len(kills) - 1
    assert stall_s < RECOVERY_S
    course.check_answer()


def test_stopped_workers_hold_nobody_up(course: Course, start: Any) -> None:
    """SIGSTOP for 20 s: one of the learner's own workers, and one from outside, which it cannot restart."""
    address = f"tcp://127.0.0.1:{free_port()}"
    guest = start("worker", address, "--allow", "environments", "--name", "guest")
    stopped_at = continued_at = 0.0
    pids: dict[str, int] = {}

    def act(progress: Any, now: float) -> None:
        nonlocal stopped_at, continued_at
        if not stopped_at and all_at_work(progress):
            pids.update(workers_of(os.getpid()) | {"guest": guest.pid})
            stopped_at = now
            for name in ("worker-1", "guest"):
                os.kill(pids[name], signal.SIGSTOP)
        elif stopped_at and not continued_at and now - stopped_at > 20:
            continued_at = now
            os.kill(guest.pid, signal.SIGCONT)
        elif continued_at and course.recorder.first_result("guest", continued_at):
            course.finish()

    patience = f"crew.order_timeout_s={DEADLINE_S}"
    course.train(act, 40_000, patience, workers=2, listen=address)
    stall_s = course.recorder.longest_stall(stopped_at, continued_at)
    replaced = course.recorder.first_result("worker-1", stopped_at + DEADLINE_S) or float("inf")
    rejoined = course.recorder.first_result("guest", continued_at) or float("inf")
    status = course.recorder.run.status()
    print(
        f"stopped for 20 s: longest stall {stall_s:.2f} s with a deadline of {DEADLINE_S} s; own worker replaced after "
        f"{replaced - stopped_at:.1f} s, guest back {rejoined - continued_at:.2f} s after it could go on; "
        f"{status.results_dropped} late results dropped"
    )
    assert stall_s < DEADLINE_S + 1
    assert replaced - stopped_at < 10
    assert rejoined - continued_at < 5
    assert any("is late" in text for _, text in course.recorder.said)
    assert guest.wait(10) == 0, guest.err  # sent home at the end
    course.check_answer()


def test_workers_come_and_go(course: Course, start: Any) -> None:
    """A learner without workers of its own: the first guest joins and is killed, then two more join."""
    address = f"tcp://127.0.0.1:{free_port()}"
    guests = [start("worker", address, "--allow", "environments", "--name", "first")]
    killed_at = 0.0

    def act(progress: Any, now: float) -> None:
        nonlocal killed_at
        if not killed_at and all_at_work(progress, 1):
            killed_at = now
            guests[0].send(signal.SIGKILL)
            guests.extend(
                start("worker", address, "--allow", "environments", "--name", name) for name in ("second", "third")
            )
        elif killed_at and progress.workers and all_at_work(progress, 2):
            course.finish()

    course.train(act, 10_000, workers=0, listen=address)
    assert [guest.wait(10) for guest in guests] == [-signal.SIGKILL, 0, 0]
    joined = course.recorder.first_result("second", killed_at) or float("inf")
    print(f"another guest's first result {joined - killed_at:.2f} s after the first guest's death")
    assert course.recorder.run.status().restarts == 0
    course.check_answer()


def test_a_worker_rejoins_a_learner_that_died_and_came_back(start: Any, store: Path, tmp_path: Path) -> None:
    flag = tmp_path / "slow"
    flag.touch()
    address = f"tcp://127.0.0.1:{free_port()}"
    site = ("--workers", 0, "--listen", address, "--store", store, "--json")
    guest = start("worker", address, "--allow", "environments")
    settings = (*SETTINGS, f"env.kwargs.flag={flag}", "run.steps=5000")
    learner = start("train", "cartpole-ppo", *settings, "--seed", 11, "--name", "r", *site)
    wait_until(lambda: list(store.glob("r/checkpoints/*/manifest.json")), 30, learner.err)
    learner.send(signal.SIGKILL)
    learner.wait()
    wait_until(lambda: "joining again" in guest.err, 10, guest.err)
    learner = start("resume", "r", *site)
    flag.unlink()
    assert learner.wait(60) == 0, learner.err
    assert guest.wait(10) == 0, guest.err
    calm = start(
        "train", "cartpole-ppo", *SETTINGS, "run.steps=5000", "--seed", 11, "-w", 0, "--store", store, "--json"
    )
    assert calm.wait() == 0, calm.err
    assert learner.result["weights_sha256"] == calm.result["weights_sha256"]
