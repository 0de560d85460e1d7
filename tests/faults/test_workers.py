"""Workers that die, hang, or come and go: training goes on, soon, and with the same answer."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from programs import Recorder, free_port, lives, wait_until, workers_of

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
RECOVERY_S = 3.0


class Course:
    """One training, slow until `finish`, and the same one without disturbances to compare with."""

    def __init__(self, steps: int, store: Path, flag: Path) -> None:
        self.flag = flag
        self.steps = steps
        self.store = store
        flag.touch()

    def train(self, act: Any, *overrides: str, workers: int = 3, listen: str | None = None) -> Recorder:
        recorder = Recorder(act)
        pace = (f"env.kwargs.flag={self.flag}", f"run.steps={self.steps}")
        regatta.train(
            "cartpole-ppo",
            [*SETTINGS, *pace, *overrides],
            seed=11,
            workers=workers,
            listen=listen,
            store=str(self.store),
            display=recorder,
        )
        return recorder

    def finish(self) -> None:
        self.flag.unlink(missing_ok=True)

    def check_answer(self, recorder: Recorder) -> None:
        """Same weights and the very same episodes: nothing was left out, nothing was trained on twice."""
        calm = regatta.train(
            "cartpole-ppo", [*SETTINGS, f"run.steps={self.steps}"], seed=11, workers=0, store=str(self.store)
        )
        run = recorder.run
        assert run.status().status == "done"
        assert run.status().weights_sha256 == calm.status().weights_sha256
        assert run.episodes() == calm.episodes()


@pytest.fixture
def course(store: Path, tmp_path: Path, environments: None) -> Any:
    return lambda steps: Course(steps, store, tmp_path / "slow")


def everyone_works(progress: Any, count: int = 3) -> bool:
    return len(progress.workers) == count and all(view.steps > 0 for view in progress.workers)


@pytest.mark.parametrize("names", [("worker-1",), ("worker-0", "worker-1", "worker-2")], ids=["one", "all"])
def test_killed_workers_are_replaced_within_three_seconds(names: tuple[str, ...], course: Any) -> None:
    race = course(40_000)
    killed: list[float] = []

    def act(progress: Any, now: float) -> None:
        if not killed and everyone_works(progress):
            pids = workers_of(os.getpid())
            killed.append(time.monotonic())
            for name in names:
                os.kill(pids[name], signal.SIGKILL)
        elif killed and all(recorder.first_result(name, killed[0]) for name in names):
            race.finish()

    recorder = Recorder(act)
    recorder = _run(race, recorder)
    back = {name: recorder.first_result(name, killed[0]) - killed[0] for name in names}
    stall = recorder.longest_stall(killed[0], killed[0] + RECOVERY_S)
    print(f"first result back after {', '.join(f'{s:.2f} s' for s in back.values())}; longest stall {stall:.2f} s")
    assert max(back.values()) < RECOVERY_S
    assert recorder.run.status().restarts == len(names)
    race.check_answer(recorder)


def _run(race: Course, recorder: Recorder, *overrides: str, **options: Any) -> Recorder:
    return race.train_with(recorder, *overrides, **options)
