"""Lanes: chunks that follow each other without a seam, and are the same whoever collects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rigs import Chunk, Rig

from regatta.errors import EnvError
from regatta.rollout.envs import EnvConfig
from regatta.rollout.lane import misfit
from regatta.types import Arrays, Collect

Build = Callable[..., Rig]

CARTPOLE = EnvConfig(id="CartPole-v1", lane_envs=3, max_episode_steps=25)
REAL = {
    "CartPole-v1": None,
    "Pendulum-v1": None,
    "HalfCheetah-v5": ("mujoco", "mujoco"),
    "LunarLander-v3": ("Box2D", "box2d"),
}


def counting(lane_envs: int = 2, max_episode_steps: int | None = None, **ends: int) -> EnvConfig:
    return EnvConfig(id="worlds:Counting", kwargs=ends, lane_envs=lane_envs, max_episode_steps=max_episode_steps)


def same(one: Chunk, other: Chunk) -> bool:
    assert one[0].keys() == other[0].keys()
    return one[1:] == other[1:] and all(np.array_equal(one[0][name], other[0][name]) for name in one[0])


def test_a_chunk_starts_where_the_last_one_ended(rig: Build) -> None:
    for config in (CARTPOLE, counting(max_episode_steps=5)):
        built = rig(config)
        before, _, _ = built.collect(0, 16)
        for iteration in range(1, 4):
            after, _, _ = built.collect(iteration, 16)
            np.testing.assert_array_equal(after["obs"][0], before["last_obs"])
            before = after


def test_what_one_chunk_holds(rig: Build) -> None:
    arrays, episodes, faults = rig(counting(lane_envs=1, max_episode_steps=4)).collect(steps=10)
    assert arrays["obs"][:, 0, 1].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert arrays["last_obs"][0, 1] == 2
    assert arrays["rewards"][:, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert np.flatnonzero(arrays["truncated"][:, 0]).tolist() == [3, 7]
    assert not arrays["terminated"].any()
    assert arrays["valid"].all()
    assert [(e.env, e.step, e.score, e.length) for e in episodes] == [(0, 3, 10.0, 4), (0, 7, 10.0, 4)]
    assert faults == []


def _check_finals(arrays: Arrays, last_step: int) -> None:
    """There is one final observation for each cut, of the last step of the episode that was cut there."""
    index, rows = arrays["final_index"], arrays["final_obs"]
    assert sorted(map(tuple, index.tolist())) == [tuple(at) for at in np.argwhere(arrays["truncated"]).tolist()]
    for (t, i), row in zip(index.tolist(), rows, strict=True):
        assert row.tolist() == [arrays["obs"][t, i, 0], last_step]


@pytest.mark.parametrize(
    "config", [counting(3, max_episode_steps=5), counting(3, cut_at=5), counting(3, max_episode_steps=9, cut_at=5)]
)
def test_final_observations_are_exactly_at_cuts(rig: Build, config: EnvConfig) -> None:
    built = rig(config)
    for iteration in range(3):
        arrays, _, _ = built.collect(iteration, 12)
        assert arrays["truncated"].sum() >= 6
        assert not arrays["terminated"].any()
        _check_finals(arrays, 5)


def test_terminations_are_no_cuts(rig: Build) -> None:
    arrays, episodes, _ = rig(counting(2, end_at=5, max_episode_steps=9)).collect(steps=12)
    assert np.argwhere(arrays["terminated"]).tolist() == [[4, 0], [4, 1], [9, 0], [9, 1]]
    assert not arrays["truncated"].any()
    assert arrays["final_obs"].shape == (0, 2)
    assert arrays["final_index"].shape == (0, 2)
    assert len(episodes) == 4


def test_an_end_at_the_time_limit_is_an_end(rig: Build) -> None:
    arrays, _, _ = rig(counting(2, end_at=5, cut_at=5, max_episode_steps=5)).collect(steps=12)
    assert arrays["terminated"].sum() == 4
    assert not arrays["truncated"].any()


def test_a_cut_at_the_last_step_of_a_chunk(rig: Build) -> None:
    built = rig(counting(1, max_episode_steps=8))
    arrays, episodes, _ = built.collect(0, 8)
    _check_finals(arrays, 8)
    assert arrays["last_obs"][0, 1] == 0
    assert len(episodes) == 1
    assert built.collect(1, 8)[0]["obs"][0, 0].tolist() == arrays["last_obs"][0].tolist()


def test_episodes_reach_over_chunks(rig: Build) -> None:
    built = rig(counting(1, end_at=10))
    assert built.collect(0, 6)[1] == []
    [episode] = built.collect(1, 6)[1]
    assert (episode.step, episode.score, episode.length) == (3, 55.0, 10)


def test_one_environment_of_two_steps_in_a_lane_of_one(rig: Build) -> None:
    arrays, episodes, _ = rig(counting(1, end_at=1)).collect(steps=3)
    assert arrays["terminated"].all()
    assert [e.length for e in episodes] == [1, 1, 1]


def test_the_same_chunk_whoever_collects_it(rig: Build) -> None:
    one, other = rig(CARTPOLE), rig(CARTPOLE)
    for iteration in range(3):
        assert same(one.collect(iteration, 40), other.collect(iteration, 40))


def test_lanes_seeds_and_attempts_have_streams_of_their_own(rig: Build) -> None:
    chunks = [
        rig(CARTPOLE).collect(),
        rig(CARTPOLE, number=1).collect(),
        rig(CARTPOLE, seed=8).collect(),
        rig(CARTPOLE).collect(attempt=1),
        rig(CARTPOLE).collect(3, origin=3),
    ]
    for name in ("obs", "actions"):
        assert len({chunk[0][name].tobytes() for chunk in chunks}) == len(chunks), name
    starts = np.concatenate([chunk[0]["obs"][0] for chunk in chunks])
    assert len(np.unique(starts, axis=0)) == len(starts)


def test_a_lane_is_seeded_anew_at_its_origin(rig: Build) -> None:
    gone_on, fresh = rig(CARTPOLE), rig(CARTPOLE)
    gone_on.collect(0)
    gone_on.collect(1)
    assert same(gone_on.collect(2, origin=2), fresh.collect(2, origin=2))
    assert same(gone_on.collect(2, origin=2), fresh.collect(2, origin=2))
    assert same(gone_on.collect(2, origin=2, attempt=1), rig(CARTPOLE).collect(2, origin=2, attempt=1))


@pytest.mark.parametrize("id", REAL)
def test_a_lane_is_rebuilt_by_replay(rig: Build, need: Callable[[str, str], None], id: str) -> None:
    if (needed := REAL[id]) is not None:
        need(*needed)
    config = EnvConfig(id=id, lane_envs=2, max_episode_steps=45)
    held = rig(config)
    past = np.concatenate([held.collect(iteration, 40)[0]["actions"] for iteration in range(3)])
    past.flags.writeable = False
    task = Collect(0, 3, 0, 40, 0)
    expected, rebuilt = held.carry_out(task), rig(config).carry_out(task, past)
    assert expected[1], "no episode ended: its score and length are not compared"
    assert same(expected, rebuilt)


def test_a_held_lane_is_rebuilt_too_where_it_does_not_stand(rig: Build) -> None:
    ahead, held = rig(CARTPOLE), rig(CARTPOLE)
    past = held.collect(0)[0]["actions"]
    for iteration in range(3):
        ahead.collect(iteration)
    assert same(ahead.carry_out(Collect(0, 1, 0, 16, 0), past), held.collect(1))
    assert same(ahead.collect(2), held.collect(2))


def test_a_lane_that_is_not_held_needs_a_replay(rig: Build) -> None:
    with pytest.raises(EnvError, match="lane 5 is not held here at iteration 3 and no replay came"):
        rig(CARTPOLE, number=5).collect(3)


def test_arrays_are_allocated_once(rig: Build) -> None:
    built = rig(CARTPOLE)
    task = Collect(0, 0, 0, 16, 0)
    built.lane.place(task, None)
    first, _, _ = built.lane.collect(task, built.act)
    second, _, _ = built.lane.collect(Collect(0, 1, 0, 16, 0), built.act)
    for name in first.keys() - {"final_obs", "final_index"}:
        assert np.shares_memory(first[name], second[name]), name
    longer, _, _ = built.lane.collect(Collect(0, 2, 0, 20, 0), built.act)
    assert longer["obs"].shape == (20, 3, 4)
    assert not longer["terminated"][longer["truncated"]].any()


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"in_dict": True}, {"sizes": [3, 5, 2]}, {"sizes": [3, 5, 2], "in_dict": True}, {"sizes": [1, 2]}],
)
def test_masks_are_never_violated(rig: Build, kwargs: dict[str, Any]) -> None:
    built = rig(EnvConfig(id="worlds:Masked", kwargs=kwargs | {"end_at": 50}, lane_envs=4))
    loud = built.act
    built.act = lambda obs, noise, mask, state: loud(50 * obs, noise, mask, state)  # logits that prefer illegal choices
    sizes = kwargs.get("sizes", [6])
    for iteration in range(2):
        arrays, episodes, faults = built.collect(iteration, 500)
        assert faults == []
        assert len(episodes) == 40
        chosen = arrays["actions"].reshape(500, 4, -1) + np.cumsum([0, *sizes[:-1]])
        assert np.take_along_axis(arrays["mask"], chosen, -1).all()
        assert not arrays["mask"].all()


@pytest.mark.parametrize("config", [CARTPOLE, EnvConfig(id="Pendulum-v1"), EnvConfig(id="worlds:Masked")])
def test_chunks_fit_what_the_learner_expects(rig: Build, config: EnvConfig) -> None:
    built = rig(config)
    arrays, _, _ = built.collect(steps=30)
    task = Collect(0, 0, 0, 30, 0)

    def wrong(**changes: Any) -> str | None:
        return misfit({**arrays, **changes}, task, built.policy, config.lane_envs)

    assert wrong() is None
    assert "rewards is float64(30, " in str(wrong(rewards=arrays["rewards"].astype(np.float64)))
    assert "obs is float32(29, " in str(wrong(obs=arrays["obs"][1:]))
    assert "arrays" in str(wrong(extra=arrays["obs"]))
    for at in ([[30, 0]], [[0, config.lane_envs]], [[-1, 0]]):
        outside = wrong(final_obs=arrays["last_obs"][:1], final_index=np.array(at, np.int32))
        assert outside == "final_index points outside the chunk"
    del arrays["valid"]
    assert "expected" in str(wrong())
