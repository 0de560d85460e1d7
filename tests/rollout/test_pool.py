"""EnvPool's environments: their dynamics, their resets, their repeatability."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from regatta.errors import ConfigError, EnvError, UsageError
from regatta.rollout.envs import EnvConfig, bare, make, probe, refuse_foreign

SEEDS = [11, 12, 13, 2**40 + 7]


@pytest.fixture(autouse=True)
def _library(need: Any) -> None:
    need("envpool", "envpool")


def pool_of(name: str, count: int = len(SEEDS), **knobs: Any) -> Any:
    from regatta.rollout.pool import Pool

    return Pool(EnvConfig(id=f"envpool:{name}", **knobs), count)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_cartpole_moves_as_gymnasiums() -> None:
    pool = pool_of("CartPole-v1")
    states = pool.reset(SEEDS)
    gym = gymnasium.make("CartPole-v1").unwrapped
    gym.reset(seed=0)
    rng = np.random.default_rng(0)
    ended = 0
    for _ in range(100):
        actions = rng.integers(2, size=4)
        after, rewards, terminated, truncated = pool.step(actions)
        for i in range(4):
            gym.state = tuple(states[i].astype(float))  # type: ignore[attr-defined]
            gym.steps_beyond_terminated = None  # type: ignore[attr-defined]
            expected, reward, end, _, _ = gym.step(int(actions[i]))
            np.testing.assert_allclose(after[i], expected, rtol=1e-4, atol=1e-5)
            assert (rewards[i], terminated[i]) == (reward, end)
        assert not truncated.any()
        states = after.copy()
        if terminated.any():
            ended += int(terminated.sum())
            states[terminated] = pool.reset_ids(np.flatnonzero(terminated))
            assert np.abs(states[terminated]).max() <= 0.05
    assert ended > 4
    pool.close()


def played(pool: Any, seeds: list[int], steps: int = 120) -> list[Any]:
    """All that is seen under actions that depend on nothing else."""
    rng = np.random.default_rng(1)
    seen = [pool.reset(seeds)]
    for _ in range(steps):
        obs, rewards, terminated, truncated = pool.step(rng.integers(2, size=len(seeds)))
        seen += [obs.copy(), rewards, terminated, truncated]
        over = np.flatnonzero(terminated | truncated)
        if over.size:
            seen.append(pool.reset_ids(over))
    return seen


def test_the_same_seeds_and_actions_give_the_same(need: Any) -> None:
    pool = pool_of("CartPole-v1")
    first = played(pool, SEEDS)
    assert all(map(np.array_equal, first, played(pool, SEEDS)))
    many = pool_of("CartPole-v1", kwargs={"num_threads": 3})
    assert all(map(np.array_equal, first, played(many, SEEDS)))
    assert not np.array_equal(first[0], played(pool, [1, 2, 3, 4], 0)[0])
    assert len({row.tobytes() for row in first[0]}) == 4
    pool.close()
    many.close()


def test_an_environment_does_not_depend_on_its_neighbours() -> None:
    pool, alone = pool_of("CartPole-v1"), pool_of("CartPole-v1", 1)
    assert np.array_equal(pool.reset(SEEDS)[2], alone.reset([SEEDS[2]])[0])
    pool.reset_ids([0, 3])
    assert np.array_equal(pool.step([0, 1, 1, 0])[0][2], alone.step([1])[0][0])
    pool.close()
    alone.close()


def test_a_reset_leaves_the_others_where_they_are() -> None:
    pool = pool_of("Pendulum-v1", 3)
    first = pool.reset([1, 2, 3])
    assert np.array_equal(pool.reset_ids([1]).shape, (1, 3))
    rested = pool.step(np.zeros((3, 1), np.float32))[0]
    again = pool_of("Pendulum-v1", 3)
    assert np.array_equal(again.reset([1, 2, 3]), first)
    plain = again.step(np.zeros((3, 1), np.float32))[0]
    assert [np.array_equal(rested[i], plain[i]) for i in range(3)] == [True, False, True]
    pool.close()
    again.close()


def test_time_limits_truncate() -> None:
    pool = pool_of("Pendulum-v1", 2, max_episode_steps=5)
    pool.reset([1, 2])
    for t in range(5):
        _, _, terminated, truncated = pool.step(np.zeros((2, 1), np.float32))
        assert not terminated.any()
        assert truncated.tolist() == [t == 4] * 2
    pool.close()


def test_threads_go_with_the_pool() -> None:
    pool = pool_of("CartPole-v1")
    pool.reset(SEEDS)
    running = threads()
    for _ in range(5):
        pool.reset(SEEDS)
    assert threads() == running
    pool.close()
    pool.close()
    assert threads() < running


def test_atari_has_its_channels_last() -> None:
    pool = pool_of("Pong-v5", 2)
    assert pool.observation_space == spaces.Box(0, 255, (84, 84, 4), np.uint8)
    obs = pool.reset([1, 2])
    assert (obs.shape, obs.dtype) == ((2, 84, 84, 4), np.uint8)
    assert pool.step([2, 3])[0].shape == (2, 84, 84, 4)
    pool.close()
    assert probe(EnvConfig(id="envpool:Pong-v5")).obs.shape == (84, 84, 4)


def test_a_dict_becomes_a_row() -> None:
    pool = pool_of("CheetahRun-v1", 2)
    assert pool.observation_space.shape == (17,)
    obs = pool.reset([1, 2])
    assert pool.observation_space.contains(obs[0])
    assert pool.step(np.zeros((2, 6)))[0].shape == (2, 17)
    pool.close()


def test_one_of_them_as_an_environment() -> None:
    env = make(EnvConfig(id="envpool:CartPole-v1"))
    assert bare(env).env is env
    pool = pool_of("CartPole-v1", 1)
    with pytest.raises(EnvError, match="reset comes before step"):
        env.step(0)
    for seed in (5, 6, 5):
        assert np.array_equal(env.reset(seed=seed)[0], pool.reset([seed])[0])
        for action in (0, 1, 1):
            obs, reward, terminated, truncated, _ = env.step(action)
            assert env.observation_space.contains(obs)
            assert np.array_equal(obs, pool.step([action])[0][0])
            assert (reward, terminated, truncated) == (1.0, False, False)
        assert np.array_equal(env.reset()[0], pool.reset_ids([0])[0])
    env.close()
    pool.close()
    env.reset()
    env.close()


def test_it_draws_itself() -> None:
    env = make(EnvConfig(id="envpool:CartPole-v1", kwargs={"render_mode": "rgb_array"}))
    env.reset(seed=1)
    image: Any = env.render()
    assert (image.ndim, image.dtype) == (3, np.uint8)
    env.close()


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        ("CartPol-v1", {}, r"EnvPool has no 'CartPol-v1'; did you mean 'CartPole-v1'\?"),
        ("Go9x9-v1", {}, "is for 2 players"),
        ("CartPole-v1", {"frame_skip": 4}, r"EnvPool has its own, as in env\.kwargs\.frame_skip"),
        ("CartPole-v1", {"kwargs": {"seed": 4}}, r"env\.kwargs\.seed: Regatta sets that itself"),
        ("CartPole-v1", {"kwargs": {"speed": 4}}, r"does not take .*'speed'"),
        ("CartPole-v1", {"kwargs": {"num_threads": "x"}}, "does not take [^\n]*$"),
    ],
)
def test_what_cannot_be_made(name: str, knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        probe(EnvConfig(id=f"envpool:{name}", **knobs))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from regatta.rollout import pool

    pool.library.cache_clear()
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"pip install 'regatta-rl\[envpool\]'"):
        make(EnvConfig(id="envpool:CartPole-v1"))


def test_workers_take_it_from_a_learner_but_for_its_programs() -> None:
    refuse_foreign(EnvConfig(id="envpool:CartPole-v1", kwargs={"num_threads": 2}), [])
    doom = EnvConfig(id="envpool:VizdoomCustom-v1", kwargs={"vzd_path": "/bin/sh"})
    with pytest.raises(UsageError, match=r"env\.kwargs\.vzd_path is '/bin/sh'.*--allow envpool"):
        refuse_foreign(doom, [])
    refuse_foreign(doom, ["envpool"])
