"""Whole episodes for evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import worlds

from regatta.policies.networks import NetworkConfig
from regatta.policies.policy import Policy, PolicySpec
from regatta.rollout.envs import EnvConfig, probe
from regatta.rollout.episodes import play
from regatta.rollout.spaces import BadObservation
from regatta.rollout.watch import StepTimeout, Watch
from regatta.types import Episode, Play

SANE = EnvConfig(id="worlds:Counting")


def played(watch: Watch, config: EnvConfig, like: EnvConfig | None = None, **task: Any) -> list[Episode]:
    found = probe(like or config)
    policy = Policy(PolicySpec(found.obs, found.action, NetworkConfig(sizes=(8,)), False))
    worlds.Troubled.made = 0
    act = policy.player(policy.init(np.random.default_rng(0)))
    return play(Play(**{"version": 0, "episodes": 4, "seed": 1, **task}), config, policy, act, watch)


def test_episodes_are_counted_and_summed(watch: Watch) -> None:
    config = EnvConfig(id="worlds:Counting", kwargs={"end_at": 6})
    assert played(watch, config) == [Episode(0, 5, 21.0, 6)] * 4
    assert played(watch, config, episodes=0) == []
    cut = EnvConfig(id="worlds:Counting", kwargs={"end_at": 6}, max_episode_steps=3)
    assert played(watch, cut, episodes=2) == [Episode(0, 2, 6.0, 3)] * 2


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
def test_the_seed_decides(watch: Watch, id: str, deterministic: bool) -> None:
    config = EnvConfig(id=id, max_episode_steps=300)
    first = played(watch, config, deterministic=deterministic)
    assert played(watch, config, deterministic=deterministic) == first
    assert played(watch, config, deterministic=deterministic, seed=2) != first
    assert len({episode.score for episode in first}) > 1
    assert played(watch, config, deterministic=deterministic, episodes=2) == first[:2]


def test_noise_is_the_only_difference(watch: Watch) -> None:
    config = EnvConfig(id="CartPole-v1")
    assert played(watch, config, deterministic=True) != played(watch, config, deterministic=False)


@pytest.mark.parametrize("kwargs", [{}, {"in_dict": True}, {"sizes": [2, 3]}])
@pytest.mark.parametrize("deterministic", [True, False])
def test_masks_hold(watch: Watch, kwargs: dict[str, Any], deterministic: bool) -> None:
    config = EnvConfig(id="worlds:Masked", kwargs=kwargs, max_episode_steps=200)
    assert [e.length for e in played(watch, config, deterministic=deterministic)] == [200] * 4


@pytest.mark.parametrize("trouble", ["nan obs", "inf obs", "nan reward", "inf reward"])
def test_a_score_of_what_is_no_number_is_no_score(watch: Watch, trouble: str) -> None:
    config = EnvConfig(id="worlds:Troubled", kwargs={"trouble": trouble, "at": 3, "end_at": 5})
    with pytest.raises(BadObservation, match=r"non-finite .* at step [23] of episode 0"):
        played(watch, config, SANE)


def test_what_fails_is_raised_and_closing_is_forgiven(watch: Watch) -> None:
    with pytest.raises(RuntimeError, match="the wheel came off"):
        played(watch, EnvConfig(id="worlds:Troubled", kwargs={"trouble": "raise", "at": 3}), SANE)
    config = EnvConfig(id="worlds:Troubled", kwargs={"trouble": "close", "at": -1, "end_at": 3})
    assert len(played(watch, config, SANE)) == 4


@pytest.mark.parametrize("timeout_s", [0.5])
@pytest.mark.parametrize("at", [0, 3])
def test_hanging_is_interrupted(watch: Watch, at: int) -> None:
    with pytest.raises(StepTimeout):
        played(watch, EnvConfig(id="worlds:Troubled", kwargs={"trouble": "sleep", "at": at}), SANE)
