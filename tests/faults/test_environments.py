"""Environments that raise, crash or hang: replaced where that helps; otherwise the run ends and says why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from programs import SMALL

import regatta

ENDS_S = 60.0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["the motor is on fire", "environments.py", "Traceback"]),
        ("construct", ["the boat has no hull", "environments.py", "Traceback"]),
        ("exit", ["(exit code 3); "]),
        ("segfault", ["(exit code -11); ", "environments.py"]),
    ],
)
def test_a_hopeless_environment_ends_the_run_within_a_minute(
    how: str, words: list[str], start: Any, store: Path
) -> None:
    """It passes the learner's own trial and fails in every worker."""
    began = time.monotonic()
    command = start(
        *("train", "cartpole-ppo", "env.id=environments:broken", f"env.kwargs.how={how}", "env.kwargs.after=5"),
        *("--store", store, "--name", "hopeless", "-w", 2),
    )
    assert command.wait(ENDS_S) == 65, command.err
    print(f"{how}: over after {time.monotonic() - began:.1f} s")
    for word in words:
        assert word in command.err
    assert "internal error" not in command.err
    status = regatta.load_run("hopeless", store=str(store)).status()
    assert status.status == "failed"
    assert words[0] in (status.error or "")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (["env.kwargs.how=raise everywhere"], ["fails on its first steps", "the motor is on fire"]),
        (["env.kwargs.how=construct"], ["the boat has no hull"]),
    ],
)
def test_what_fails_at_once_starts_nothing(kwargs: list[str], words: list[str], start: Any, store: Path) -> None:
    command = start("train", "cartpole-ppo", "env.id=environments:broken", *kwargs, "--store", store)
    assert command.wait() == 65, command.err
    for word in words:
        assert word in command.err
    assert "internal error" not in command.err
    assert not store.exists()


@pytest.mark.parametrize("how", ["raise", "exit", "segfault", "hang", "deaf"])
def test_a_single_failure_is_survived(how: str, start: Any, store: Path, tmp_path: Path) -> None:
    """A hang that no signal ends costs the process, any other failure of Python code only the environment."""
    command = start(
        *("train", "cartpole-ppo", "env.id=environments:broken", f"env.kwargs.how={how}", "env.kwargs.after=50"),
        *(f"env.kwargs.once={tmp_path / 'failed'}", "env.step_timeout_s=0.5", "run.steps=8192", *SMALL),
        *("--store", store, "-w", 2, "--json"),
    )
    assert command.wait(60) == 0, command.err
    assert (tmp_path / "failed").exists()
    result = command.result
    print(f"{how}: done in {result['wall_s']:.1f} s with {result['restarts']} restarts")
    assert result["status"] == "done"
    assert result["steps"] == 8192
    assert result["restarts"] == (0 if how in ("raise", "hang") else 1)
    told = {"raise": "the motor is on fire", "hang": "StepTimeout", "deaf": "StepTimeout"}.get(how, "is gone")
    assert told in command.err


def test_one_that_hangs_now_and_then(store: Path, environments: None) -> None:
    """Each environment hangs at its hundredth step, for good: each is replaced, and the next one too."""
    run = regatta.train(
        "cartpole-ppo",
        [
            *("env.id=environments:broken", "env.kwargs.how=hang", "env.kwargs.after=100"),
            *(
                "env.step_timeout_s=0.2",
                "env.lanes=2",
                "env.lane_envs=1",
                "algorithm.minibatch=64",
                "run.steps=640",
                *SMALL,
            ),
        ],
        workers=2,
        store=str(store),
    )
    status = run.status()
    assert status.status == "done"
    assert any("StepTimeout" in text for text in status.warnings)
