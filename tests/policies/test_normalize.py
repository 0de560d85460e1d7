"""Running moments against NumPy, and reward scaling against the plain loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from regatta.policies.normalize import EPSILON, OBS_CLIP, Moments, RewardScale, normalize


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 40), max_size=6), offset=st.sampled_from([0, 1e4]))
def test_merging_any_split_gives_the_moments_of_the_whole(seed: int, cuts: list[int], offset: float) -> None:
    rows = (np.random.default_rng(seed).normal(size=(40, 3)) * [1.0, 10.0, 0.0] + offset).astype(np.float32)
    moments = Moments((3,))
    for part in np.split(rows, sorted(cuts)):
        moments.merge(part)
    exact = rows.astype(np.float64)
    assert moments.count == 40
    np.testing.assert_allclose(moments.mean, exact.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moments.std, np.sqrt(exact.var(0) + EPSILON), rtol=1e-8)


def test_moments_of_nothing_are_neutral() -> None:
    moments = Moments((2,))
    moments.merge(np.zeros((0, 2)))
    assert moments.count == 0
    np.testing.assert_array_equal(moments.mean, [0, 0])
    np.testing.assert_array_equal(moments.std, [1, 1])


def test_moments_state_round_trip_goes_on_identically() -> None:
    rng = np.random.default_rng(0)
    one, other = Moments((3,)), Moments((3,))
    one.merge(rng.normal(size=(10, 3)))
    state = {name: array.copy() for name, array in one.state("obs").items()}
    other.load(state, "obs")
    more = rng.normal(size=(5, 3))
    for moments in (one, other):
        moments.merge(more)
    assert all(np.array_equal(one.state("obs")[name], other.state("obs")[name]) for name in state)


def test_normalize_by_hand() -> None:
    obs = np.array([3.0, 1e6, -1e6], np.float32)
    np.testing.assert_allclose(normalize(np, obs, np.float32(1), np.float32(0.25)), [0.5, OBS_CLIP, -OBS_CLIP])


def plain_reward_scale(chunks: list[tuple[np.ndarray, np.ndarray]], gamma: float) -> list[np.ndarray]:
    """Environment by environment, step by step, with the variance of all returns seen up to each chunk's end."""
    running = [0.0] * chunks[0][0].shape[1]
    seen: list[float] = []
    scaled = []
    for rewards, done in chunks:
        for t in range(len(rewards)):
            for env in range(rewards.shape[1]):
                running[env] = gamma * running[env] + float(rewards[t, env])
                seen.append(running[env])
                if done[t, env]:
                    running[env] = 0.0
        scaled.append(np.clip(rewards / np.sqrt(np.var(seen) + EPSILON), -10, 10))
    return scaled


def test_reward_scale_against_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    chunks = [((rng.normal(size=(7, 3)) * 5 + 1).astype(np.float32), rng.random((7, 3)) < 0.2) for _ in range(4)]
    chunks[2][0][0, 0] = 500.0  # beyond the clip
    scale = RewardScale(0.9, 3)
    for (rewards, done), expected in zip(chunks, plain_reward_scale(chunks, 0.9), strict=True):
        scaled = scale.scale(rewards, done)
        assert scaled.dtype == np.float32
        np.testing.assert_allclose(scaled, expected, rtol=1e-5)


def test_reward_scale_restart_and_round_trip() -> None:
    rng = np.random.default_rng(1)
    one, other = RewardScale(0.9, 2), RewardScale(0.9, 2)
    never = np.zeros((4, 2), bool)
    one.scale(rng.normal(size=(4, 2)), never)
    assert one.discounted.any()
    other.load({name: array.copy() for name, array in one.state().items()})
    rewards = rng.normal(size=(4, 2))
    np.testing.assert_array_equal(one.scale(rewards, never), other.scale(rewards, never))
    count = one.moments.count
    one.restart()
    np.testing.assert_array_equal(one.discounted, [0, 0])
    assert one.moments.count == count
