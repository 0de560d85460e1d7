"""The worker: orders in, results or failures out, whatever the environment does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest

from regatta.codec import decode, encode
from regatta.errors import CodecError, ConfigError, ConnectionLost, TransportError
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.policy import Policy, PolicySpec
from regatta.rollout.envs import EnvConfig, probe
from regatta.rollout.lane import misfit
from regatta.rollout.watch import EXIT_HUNG
from regatta.transport.base import Message, listen
from regatta.transport.inline import InlineLearner
from regatta.types import Arrays, Collect, Failure, FromWorker, Order, Play, Result, SnapshotHeader
from regatta.worker import Worker, WorkerSpec

CARTPOLE = EnvConfig(id="CartPole-v1", lane_envs=2, max_episode_steps=25)
WORLDS = Path(__file__).parent / "rollout"


class Broken(gymnasium.Env[Any, Any]):
    """Sound until it is stepped."""

    def __init__(self, trouble: str = "raise") -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (4,))
        self.action_space = gymnasium.spaces.Discrete(2)
        self.trouble = trouble

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.trouble == "reset":
            raise RuntimeError("will not start")
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.trouble == "sleep":
            time.sleep(30)
        raise RuntimeError("will not move")


class Bench:
    """A learner's end and one worker that it drives."""

    def __init__(self, config: EnvConfig) -> None:
        self.policy = _policy(CARTPOLE)
        self.end = InlineLearner(_spec(config, self.policy))
        self.worker = Worker(self.end.join("bench"))
        self.number = self.end.receive(0)[0].worker
        self.arrays = self.policy.init(np.random.default_rng(0))
        self.end.publish(0, encode(SnapshotHeader(0), self.arrays))

    def order(self, task: Collect | Play, replay: Any = None) -> tuple[Result | Failure, Arrays]:
        return self.payload(encode(Order(11, task), {} if replay is None else {"replay": replay}), task.version)

    def payload(self, payload: bytes, version: int | None = None) -> tuple[Result | Failure, Arrays]:
        self.end.send(self.number, payload, version)
        self.worker.serve_once(0)
        [message] = self.end.receive(0)
        assert isinstance(message, Message)
        reply, arrays = decode(message.payload, FromWorker)
        assert reply.order == 11
        return reply, arrays


def _policy(config: EnvConfig) -> Policy:
    found = probe(config)
    return Policy(PolicySpec(found.obs, found.action, NetworkConfig(sizes=(8,)), False))


def _spec(config: EnvConfig, policy: Policy) -> bytes:
    return msgspec.json.encode(WorkerSpec(7, config, policy.spec))


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def build(config: EnvConfig = CARTPOLE) -> Bench:
        benches.append(Bench(config))
        return benches[-1]

    yield build
    for built in reversed(benches):  # each took the alarm signal from the one before
        built.worker.close()


def collect(iteration: int = 0, lane: int = 0, **fields: int) -> Collect:
    return Collect(**{"lane": lane, "iteration": iteration, "version": 0, "steps": 30, "origin": 0, **fields})


def test_collect(bench: Callable[..., Bench]) -> None:
    built = bench()
    before: Arrays = {}
    for iteration in range(3):
        task = collect(iteration)
        result, arrays = built.order(task)
        assert isinstance(result, Result)
        assert (result.version, result.faults) == (0, [])
        assert result.episodes
        assert result.seconds > 0
        assert misfit(arrays, task, built.policy, 2) is None
        if before:
            np.testing.assert_array_equal(arrays["obs"][0], before["last_obs"])
        before = arrays


def test_a_lane_moves_to_another_worker(bench: Callable[..., Bench]) -> None:
    one, other = bench(), bench()
    past = np.concatenate([one.order(collect(i, lane=3))[1]["actions"] for i in range(2)])
    (result, arrays), (moved, rebuilt) = one.order(collect(2, lane=3)), other.order(collect(2, lane=3), past)
    assert isinstance(result, Result)
    assert isinstance(moved, Result)
    assert result.episodes == moved.episodes
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], rebuilt[name])


def test_play(bench: Callable[..., Bench]) -> None:
    built = bench()
    built.order(collect())
    first, arrays = built.order(Play(0, 3, seed=5))
    again, _ = built.order(Play(0, 3, seed=5))
    assert isinstance(first, Result)
    assert isinstance(again, Result)
    assert len(first.episodes) == 3
    assert first.episodes == again.episodes
    assert arrays == {}
    fresh = bench()
    fresh.order(collect())
    assert (built.order(collect(1))[1]["obs"] == fresh.order(collect(1))[1]["obs"]).all(), "lanes do not notice"


def test_an_unknown_lane_without_a_replay_is_a_failure(bench: Callable[..., Bench]) -> None:
    built = bench()
    failure, _ = built.order(collect(4, lane=2))
    assert isinstance(failure, Failure)
    assert "lane 2 is not held here at iteration 4 and no replay came" in failure.text
    assert isinstance(built.order(collect(4, lane=2, origin=4))[0], Result)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("raise", "environments fail again and again; the last:\nTraceback"),
        ("raise", 'raise RuntimeError("will not move")'),
        ("reset", "RuntimeError: will not start"),
    ],
)
def test_an_environment_that_always_fails(bench: Callable[..., Bench], trouble: str, words: str) -> None:
    built = bench(EnvConfig(id="test_worker:Broken", kwargs={"trouble": trouble}, lane_envs=2))
    for task in (collect(), collect(1), collect(1, origin=1, attempt=1)):
        failure, _ = built.order(task)
        assert isinstance(failure, Failure)
        if task.origin == task.iteration:
            assert words in failure.text
        else:
            assert "not held here" in failure.text, "a failed lane is let go"
    failure, _ = built.order(Play(0, 1, seed=0))
    assert isinstance(failure, Failure)
    assert "RuntimeError: will not" in failure.text


def test_a_hanging_environment_is_a_failure_not_the_end(bench: Callable[..., Bench]) -> None:
    config = EnvConfig(id="test_worker:Broken", kwargs={"trouble": "sleep"}, lane_envs=1, step_timeout_s=0.4)
    failure, _ = bench(config).order(collect())
    assert isinstance(failure, Failure)
    assert "StepTimeout: no answer for 0.4 s" in failure.text
    assert "time.sleep(30)" in failure.text


@pytest.mark.parametrize("task", [collect(), Play(0, 1, seed=0)])
def test_a_worker_that_lacks_the_environment_leaves(bench: Callable[..., Bench], task: Collect | Play) -> None:
    """Others may have it: the run goes on without this worker."""
    with pytest.raises(ConfigError, match="unknown environment 'CartPol-v1'"):
        bench(EnvConfig(id="CartPol-v1")).order(task)


@pytest.mark.parametrize("payload", [b"", b"RGT1", b"garbage" * 9, encode(SnapshotHeader(0)), encode(Failure(11, "?"))])
def test_garbage_for_an_order_ends_the_session(bench: Callable[..., Bench], payload: bytes) -> None:
    built = bench()
    built.end.send(built.number, payload)
    with pytest.raises(CodecError):
        built.worker.serve_once(0)
    assert built.end.receive(0) == []


@pytest.mark.parametrize("snapshot", [b"garbage", encode(Failure(11, "?")), encode(SnapshotHeader(4))])
def test_garbage_for_a_snapshot_is_a_failure(bench: Callable[..., Bench], snapshot: bytes) -> None:
    built = bench()
    built.end.publish(3, snapshot)
    for task in (collect(version=3), Play(3, 1, seed=0)):
        failure, _ = built.order(task)
        assert isinstance(failure, Failure)
        assert "CodecError" in failure.text
    assert isinstance(built.order(collect())[0], Result)


def test_a_replay_that_does_not_fit_is_a_failure(bench: Callable[..., Bench]) -> None:
    built = bench()
    for replay in (np.full((5, 2), 9, np.int32), np.zeros((5, 2, 2), np.int32), np.zeros((5, 3), np.int32)):
        failure, _ = built.order(collect(1), replay)
        assert isinstance(failure, Failure), replay.shape
    assert isinstance(built.order(collect())[0], Result)


def test_a_snapshot_that_never_came_ends_the_session(bench: Callable[..., Bench]) -> None:
    built = bench()
    built.end.send(built.number, encode(Order(11, collect(version=9))))
    with pytest.raises(TransportError, match="snapshot 9 is not here"):
        built.worker.serve_once(0)


def test_a_new_snapshot_is_used(bench: Callable[..., Bench]) -> None:
    built, other = bench(), bench()
    for end in (built, other):
        end.end.publish(1, encode(SnapshotHeader(1), end.arrays | {"pi/out/b": np.array([9, -9], np.float32)}))
    built.order(collect())
    result, arrays = built.order(collect(version=1))
    assert isinstance(result, Result)
    assert result.version == 1
    assert not arrays["actions"].any()
    np.testing.assert_array_equal(arrays["obs"], other.order(collect(version=1))[1]["obs"])


@pytest.mark.parametrize("spec", [b"", b"{}", b'{"seed": "x"}', b"\xff"])
def test_a_spec_of_another_version(spec: bytes) -> None:
    with pytest.raises(TransportError, match="both sides need the same version of Regatta"):
        Worker(InlineLearner(spec).join("stranger"))


def test_serve_ends_with_the_session() -> None:
    spec = _spec(CARTPOLE, _policy(CARTPOLE))
    learner = InlineLearner(spec)
    worker = Worker(learner.join("one"))
    learner.close()
    worker.serve()
    learner = InlineLearner(spec)
    end = learner.join("two")
    worker = Worker(end)
    learner.dismiss(end.worker, "late")
    with pytest.raises(ConnectionLost, match="late"):
        worker.serve()


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows has no signal masks")
@pytest.mark.parametrize(
    ("trouble", "place"), [("block", "in _block\n    time.sleep(60)"), ("swallow", "in _swallow\n")]
)
def test_what_cannot_be_interrupted_ends_the_process(trouble: str, place: str) -> None:
    like = EnvConfig(id="CartPole-v1", lane_envs=1)
    policy = Policy(PolicySpec(ObsSpec((2,)), _policy(like).action, NetworkConfig(sizes=(8,)), False))
    kwargs = {"trouble": trouble, "at": 3}
    config = EnvConfig(id="worlds:Troubled", kwargs=kwargs, lane_envs=1, step_timeout_s=0.8)
    end = listen("ipc:", _spec(config, policy))
    end.publish(0, encode(SnapshotHeader(0), policy.init(np.random.default_rng(0))))
    process = subprocess.Popen(
        [sys.executable, "-m", "regatta.worker", end.address], cwd=WORLDS, stderr=subprocess.PIPE
    )
    try:
        failure = None
        deadline = time.monotonic() + 20
        while failure is None and time.monotonic() < deadline:
            for event in end.receive(0.5):
                if isinstance(event, Message):
                    failure, _ = decode(event.payload, FromWorker)
                else:
                    end.send(event.worker, encode(Order(11, collect())), 0)
        assert isinstance(failure, Failure)
        assert failure.order == 11
        assert place in failure.text
        assert failure.text.endswith("StepTimeout: no answer for 0.8 s (env.step_timeout_s)")
        assert process.wait(10) == EXIT_HUNG
    finally:
        process.kill()
        process.communicate()
        end.close()
