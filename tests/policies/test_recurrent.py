"""Networks with memory: by hand, step by step against unrolled, and through a real lane."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest

from regatta.errors import ConfigError
from regatta.policies.distributions import ActionSpec
from regatta.policies.networks import NetworkConfig, ObsSpec, network
from regatta.policies.noise import action_noise
from regatta.policies.policy import Policy, PolicySpec
from regatta.policies.recurrent import Recurrent
from regatta.rollout.envs import EnvConfig
from regatta.rollout.lane import Lane
from regatta.rollout.watch import Watch
from regatta.seeding import stream
from regatta.types import Collect

Kind = Literal["elman", "lstm"]
KINDS: list[Kind] = ["elman", "lstm"]


def policy_of(kind: Kind, obs: int = 3, action: ActionSpec | None = None) -> Policy:
    config = NetworkConfig(kind=kind, sizes=(5, 4))
    return Policy(PolicySpec(ObsSpec((obs,)), action or ActionSpec("discrete", (2,)), config, False))


def test_elman_by_hand() -> None:
    net = Recurrent(NetworkConfig(kind="elman", sizes=(1,)), ObsSpec((1,)))
    arrays = {"x/cell/w": np.array([[2.0]]), "x/cell/u": np.array([[0.5]]), "x/cell/b": np.array([0.25])}
    shown, state = net.apply(np, arrays, "x", np.array([[1.0]]), np.array([[-1.0]]))
    assert shown[0, 0] == state[0, 0] == pytest.approx(np.tanh(2.0 - 0.5 + 0.25))


def test_lstm_by_hand() -> None:
    net = Recurrent(NetworkConfig(kind="lstm", sizes=(1,)), ObsSpec((1,)))
    arrays = {
        "x/cell/w": np.array([[1.0, 2.0, 3.0, 4.0]]),  # take, keep, show, candidate
        "x/cell/u": np.array([[0.1, 0.2, 0.3, 0.4]]),
        "x/cell/b": np.array([0.0, 1.0, 0.0, 0.0]),
    }
    shown, state = net.apply(np, arrays, "x", np.array([[0.5]]), np.array([[2.0, 3.0]]))  # h = 2, c = 3
    take, keep, show = (1 / (1 + np.exp(-x)) for x in (0.5 + 0.2, 1.0 + 0.4 + 1.0, 1.5 + 0.6))
    kept = keep * 3.0 + take * np.tanh(2.0 + 0.8)
    np.testing.assert_allclose(state, [[show * np.tanh(kept), kept]], rtol=1e-12)
    np.testing.assert_array_equal(shown, state[:, :1])


def test_an_lstm_remembers_at_first() -> None:
    arrays = Recurrent(NetworkConfig(kind="lstm", sizes=(4,)), ObsSpec((2,))).init(stream(0, "init"), "x")
    np.testing.assert_array_equal(arrays["x/cell/b"], [0.0] * 4 + [1.0] * 4 + [0.0] * 8)


@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_is_step_by_step(kind: Kind) -> None:
    """Batched learning sees what acting saw: the same outputs, with the memory emptied where episodes begin."""
    policy, rng = policy_of(kind), np.random.default_rng(0)
    arrays = {name: array + 0.3 * rng.normal(size=array.shape).astype(np.float32)
              for name, array in policy.init(stream(1, "init")).items()}  # fmt: skip
    obs = rng.normal(size=(12, 4, 3)).astype(np.float32)
    starts = rng.random((12, 4)) < 0.2
    state = first = rng.normal(size=(4, policy.state_size)).astype(np.float32)
    outs, values, states = [], [], []
    for t in range(12):
        state = np.where(starts[t][:, None], 0, state).astype(np.float32)
        states.append(state)
        values.append(policy.value(np, arrays, obs[t], state))
        out, state = policy.step(np, arrays, obs[t], state)
        outs.append(out)
    unrolled, unrolled_values, unrolled_states = policy.unroll(jnp, arrays, obs, first, starts)
    np.testing.assert_allclose(unrolled, np.stack(outs), atol=2e-6)
    np.testing.assert_allclose(unrolled_values, np.stack(values), atol=2e-6)
    np.testing.assert_allclose(unrolled_states, np.stack(states), atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_carried_across_chunks_and_ends_with_the_episode(kind: Kind) -> None:
    """Two chunks of a real lane, unrolled from the memory each began with, explain every action taken."""
    config = EnvConfig(id="CartPole-v1", lane_envs=3, max_episode_steps=9)
    policy = policy_of(kind, 4)
    arrays = policy.init(stream(3, "init"))
    watch = Watch(60.0, lambda text: None)
    lane = Lane(0, config, policy, 7, watch)
    carried = policy.first_state(3)
    try:
        for iteration in (0, 1):
            task = Collect(0, iteration, 0, 16, 0)
            lane.place(task, None)
            chunk, episodes, _ = lane.collect(task, policy.player(arrays))
            assert episodes
            np.testing.assert_array_equal(chunk["state"], carried)
            done = chunk["terminated"] | chunk["truncated"]
            starts = np.concatenate([np.zeros_like(done[:1]), done[:-1]])
            out, _, states = policy.unroll(jnp, arrays, chunk["obs"], chunk["state"], starts)
            noise = action_noise(policy, 7, task, 3)
            expected = [policy.distribution.sample(np.asarray(out[t]), noise[t]) for t in range(16)]
            np.testing.assert_array_equal(chunk["actions"], expected)
            for k, (t, i) in enumerate(chunk["final_index"]):
                after = policy.step(np, arrays, chunk["obs"][t], np.asarray(states[t]))[1]
                np.testing.assert_allclose(chunk["final_state"][k], after[i], atol=1e-6)
            carried = chunk["last_state"].copy()
            assert (carried[done[-1]] == 0).all()
            assert (carried[~done[-1]] != 0).any()
    finally:
        lane.close()
        watch.close()


def test_memory_needs_one_trunk() -> None:
    config = NetworkConfig(kind="lstm", shared=False)
    with pytest.raises(ConfigError, match=r"network\.shared"):
        Policy(PolicySpec(ObsSpec((3,)), ActionSpec("discrete", (2,)), config, False))


def test_unknown_kinds_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lstm'"):
        network(NetworkConfig(kind="lstn"), ObsSpec((3,)))


def test_a_network_of_ones_own(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    (Path(str(tmp_path)) / "own_network.py").write_text(
        "class Squares:\n"
        "    outputs = 3\n"
        "    def __init__(self, shape): self.size = shape[0]\n"
        "    def init(self, rng): return {'w': rng.normal(size=(self.size, 3))}\n"
        "    def apply(self, xp, arrays, x): return (x @ arrays['w']) ** 2\n"
        "def make(shape): return Squares(shape)\n"
        "def broken(shape): return object()\n"
    )
    monkeypatch.chdir(str(tmp_path))
    spec = PolicySpec(ObsSpec((4,)), ActionSpec("discrete", (2,)), NetworkConfig(kind="own_network:make"), False)
    policy = Policy(spec)
    arrays = policy.init(stream(0, "init"))
    obs = np.ones((2, 4), np.float32)
    features = (obs @ arrays["pi/w"]) ** 2
    np.testing.assert_allclose(
        policy.act_out(np, arrays, obs), features @ arrays["pi/out/w"] + arrays["pi/out/b"], rtol=1e-6
    )
    for kind, what in (("own_network:broken", "outputs"), ("own_network:none", "no callable"), ("nowhere:f", "module")):
        with pytest.raises(ConfigError, match=what):
            network(NetworkConfig(kind=kind), ObsSpec((4,)))
