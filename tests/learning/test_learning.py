"""PPO learns: rewards on small environments against bars, with seeds named beforehand. Figures: docs/results.md."""

from __future__ import annotations

from pathlib import Path

import pytest

import regatta


def trained(tmp_path: Path, preset: str, seed: int, **overrides: object) -> dict[str, float]:
    run = regatta.train(preset, overrides, seed=seed, workers=2, store=str(tmp_path))
    return regatta.evaluate(run.id, episodes=20, store=str(tmp_path))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_is_solved_within_100k_steps(tmp_path: Path, seed: int) -> None:
    assert trained(tmp_path, "cartpole-ppo", seed)["return_mean"] >= 475


@pytest.mark.parametrize("seed", [0, 1])
def test_pendulum_swings_up_within_100k_steps(tmp_path: Path, seed: int) -> None:
    assert trained(tmp_path, "pendulum-ppo", seed)["return_mean"] >= -300


def test_cartpole_is_learned_strictly_on_policy_with_normalised_observations(tmp_path: Path) -> None:
    overrides = {"algorithm.staleness": 0, "algorithm.normalize_obs": True}
    assert trained(tmp_path, "cartpole-ppo", 0, **overrides)["return_mean"] >= 475
