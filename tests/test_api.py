"""Regatta from Python, as the README shows it."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import regatta
from regatta.errors import ConfigError, UsageError


def test_train_and_use(store: Path) -> None:
    run = regatta.train("cartpole-ppo", {"run.steps": 5000}, seed=1, workers=2, store=str(store))
    metrics = run.metrics()
    assert {"iteration", "steps", "return_mean", "policy_loss", "value_loss", "entropy"} <= metrics.keys()
    assert len({len(column) for column in metrics.values()}) == 1
    assert metrics["steps"][-1] == run.status().steps
    assert sum(run.episodes()["length"]) <= run.status().steps

    policy = run.policy()
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    for _ in range(10):
        action = policy.act(obs)
        assert env.action_space.contains(np.int64(action))
        obs, *_ = env.step(action)
    assert {policy.act(obs, deterministic=False) for _ in range(200)} == {0, 1}
    env.close()

    figures = regatta.evaluate(run.id, episodes=2, store=str(store))
    assert figures["episodes"] == 2
    assert regatta.load_run(store=str(store)).id == run.id
    assert run.id in repr(run)


def test_twice_in_one_process_and_from_another_thread(store: Path) -> None:
    """Signals are handled in the main thread only; elsewhere training works without them."""
    settings = {"run.steps": 1024, "algorithm.epochs": 2}
    runs = [regatta.train("cartpole-ppo", settings, seed=2, workers=0, store=str(store)) for _ in range(2)]
    for workers in (0, 1):
        thread = threading.Thread(
            target=lambda n=workers: runs.append(
                regatta.train("cartpole-ppo", settings, seed=2, workers=n, store=str(store))
            )
        )
        thread.start()
        thread.join(60)
    assert len(runs) == 4
    assert len({run.id for run in runs}) == 4
    assert len({run.status().weights_sha256 for run in runs}) == 1


def test_errors_are_exceptions(store: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.lr"):
        regatta.train("cartpole-ppo", {"algorithm.lr": "fast"}, store=str(store))
    with pytest.raises(ConfigError, match=r"unknown key"):
        regatta.train("cartpole-ppo", {"speed": 3}, store=str(store))
    with pytest.raises(UsageError, match="--workers -1"):
        regatta.train("cartpole-ppo", workers=-1, store=str(store))
    with pytest.raises(regatta.RegattaError):
        regatta.train("cartpole-ppo", listen="tcp://0.0.0.0:0", store=str(store))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        regatta.trian  # noqa: B018
    assert not store.exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_illegal_action_is_never_taken(workers: int, store: Path, environments: None) -> None:
    """The environment raises at one; that would be a fault of a lane."""
    run = regatta.train(
        "ppo",
        {"env.id": "environments:masked", "run.steps": 8192, "algorithm.rollout_steps": 64, "algorithm.lr": 3e-3},
        workers=workers,
        store=str(store),
    )
    assert run.status().warnings == []
    assert run.checkpoint()[0].state["env_faults"] == 0
    regatta.evaluate(run.id, episodes=5, store=str(store))
    policy = run.policy()
    for allowed in range(5):
        mask = np.arange(5) == allowed
        assert policy.act(mask.astype(np.float32), mask=mask) == allowed
    assert run.status().return_mean > 2.2 * 20  # a random legal action is worth 2 a step


def test_nothing_is_left_running(store: Path) -> None:
    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        regatta.train("cartpole-ppo", {"run.steps": 512}, workers=1, store=str(store))
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("regatta")]
    assert left == []
