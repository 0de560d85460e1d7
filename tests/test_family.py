"""Every algorithm keeps the promises: the same weights for any workers, exact resume, and workers that may die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from programs import Recorder, workers_of

import regatta
from regatta.errors import Interrupted

BLIND = ("env.id=CartPole-v1", "env.hide=[1,3]", "env.max_episode_steps=40", "env.lane_envs=2")
SWING = ("env.id=Pendulum-v1", "env.max_episode_steps=40", "env.lane_envs=2", "network.sizes=[16]")
PPO = ("ppo", "network.sizes=[8]", "algorithm.rollout_steps=32", "algorithm.minibatch=64", "algorithm.epochs=2")
SEARCH = ("network.sizes=[8]", "env.lanes=3", "algorithm.episodes=2", "run.steps=4000", "run.checkpoint_every=1500")
SHORT = ("run.steps=1024", "run.checkpoint_every=384")
FAMILY: dict[str, tuple[str, ...]] = {
    "ppo, lstm": (*PPO, *BLIND, *SHORT, "network.kind=lstm", "algorithm.normalize_obs=true"),
    "ppo, elman": (*PPO, *BLIND, *SHORT, "network.kind=elman", "algorithm.normalize_reward=true"),
    "trpo": ("trpo", *SWING, *SHORT, "algorithm.rollout_steps=32", "algorithm.normalize_obs=true"),
    "trpo, lbfgs": (
        *("trpo", *BLIND, *SHORT, "network.sizes=[8]", "algorithm.rollout_steps=32"),
        *("algorithm.critic=lbfgs", "algorithm.time_feature=40", "algorithm.normalize_reward=true"),
    ),
    "sac": (
        *("sac", *SWING, *SHORT, "algorithm.rollout_steps=16", "algorithm.batch=32", "algorithm.replay_size=600"),
        *("algorithm.learning_starts=128", "algorithm.noise_colour=1.0", "algorithm.updates_per_step=0.25"),
    ),
    "sac, discrete": (
        *("sac", *BLIND, *SHORT, "network.sizes=[8]", "algorithm.rollout_steps=16", "algorithm.batch=32"),
        *("algorithm.learning_starts=64", "algorithm.updates_per_step=0.25"),
    ),
    "es": ("es", *BLIND, *SEARCH, "algorithm.population=12", "algorithm.normalize_obs=true"),
    "es, lstm": ("es", *BLIND, *SEARCH, "algorithm.population=12", "network.kind=lstm"),
    "blackbox, CMA": ("blackbox", *SWING, *SEARCH, "algorithm.optimizer=CMA", "algorithm.population=8"),
    "blackbox, CEM": ("blackbox", *BLIND, *SEARCH, "algorithm.optimizer=CEM", "algorithm.population=8"),
}
TEMPOS = [(name, tempo) for name in FAMILY for tempo in (0, 1) if tempo == 0 or "blackbox" not in name]


def train(kin: str, tempo: int, store: Path, **options: Any) -> regatta.assemble.Run:
    algorithm, *overrides = FAMILY[kin]
    if "blackbox" not in kin:
        overrides.append(f"algorithm.staleness={tempo}")
    return regatta.train(algorithm, overrides, seed=4, store=str(store), **options)


def sha(run: regatta.assemble.Run) -> str:
    found = run.status().weights_sha256
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "tempo"), TEMPOS)
def test_same_weights_for_any_workers_and_after_any_interrupt(
    name: str, tempo: int, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(name, tempo, store, workers=0)
    assert whole.status().iterations > 3
    for workers, url in ((2, "ipc:"), (3, "tcp://127.0.0.1:0")):
        run = train(name, tempo, store, workers=workers, listen=url)
        assert sha(run) == sha(whole), f"{workers} workers over {url}"
        assert run.episodes() == whole.episodes()
    monkeypatch.setattr("regatta.learner.SHOW_EVERY_S", 0.0)
    stopped_at = []
    for turn in (4, 9, 12):
        shown = 0

        def interrupt(progress: Any, now: float, turn: int = turn) -> None:
            nonlocal shown
            shown += 1
            if shown == turn:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(Interrupted):
            train(name, tempo, store, workers=0, name=f"cut-{turn}", display=Recorder(interrupt))
        cut = regatta.load_run(f"cut-{turn}", store=str(store))
        stopped_at.append(cut.status().iterations)
        regatta.resume(f"cut-{turn}", workers=0, store=str(store))
        assert sha(cut) == sha(whole), f"interrupted at turn {turn}, iteration {stopped_at[-1]}"
        assert cut.episodes() == whole.episodes()
    print(f"{name}: {whole.status().iterations} iterations, interrupted at {stopped_at}")


@pytest.mark.parametrize("name", ["ppo, lstm", "es"])
def test_killed_workers_change_nothing(name: str, store: Path, tmp_path: Path, environments: None) -> None:
    """Lanes are rebuilt elsewhere, with the memory of their policy; members of a population are scored once."""
    flag = tmp_path / "slow"
    flag.touch()
    algorithm, *others = FAMILY[name]
    overrides = [*others, "env.id=environments:paced", "run.steps=8192", "run.checkpoint_every=4096"]
    whole = regatta.train(algorithm, overrides, seed=2, workers=0, store=str(store))
    kills: list[float] = []

    def kill(progress: Any, now: float) -> None:
        if len(kills) == 3:
            flag.unlink(missing_ok=True)
        elif sum(view.steps > 0 for view in progress.workers) == 2 and now - (kills or [0.0])[-1] > 0.4:
            os.kill(workers_of(os.getpid())[f"worker-{len(kills) % 2}"], signal.SIGKILL)
            kills.append(now)

    slow = [f"env.kwargs.flag={flag}", "env.kwargs.sleep_s=0.001"]
    run = regatta.train(algorithm, [*overrides, *slow], seed=2, workers=2, store=str(store), display=Recorder(kill))
    assert len(kills) == 3
    assert sha(run) == sha(whole)
    assert run.episodes() == whole.episodes()


# -- nothing waits for anything -----------------------------------------------------------------------------


def test_free_mode_records_the_age_of_its_data_and_can_be_resumed(store: Path) -> None:
    algorithm, *overrides = FAMILY["sac"]
    overrides.append('algorithm.staleness="free"')
    run = regatta.train(algorithm, overrides, seed=1, workers=2, store=str(store))
    metrics = run.metrics()
    assert run.status().status == "done"
    assert run.status().steps >= 1024
    assert all(age >= 0 for name in ("age_versions", "age_s") for age in metrics[name])
    assert max(metrics["age_s"]) > 0

    def interrupt(progress: Any, now: float) -> None:
        if progress.steps >= 512 and not done:
            done.append(now)
            os.kill(os.getpid(), signal.SIGINT)

    done: list[float] = []
    with pytest.raises(Interrupted):
        regatta.train(
            algorithm, overrides, seed=1, workers=2, store=str(store), name="cut", display=Recorder(interrupt)
        )
    before = regatta.load_run("cut", store=str(store)).status().steps
    assert 512 <= before < 1024
    resumed = regatta.resume("cut", workers=2, store=str(store))
    assert resumed.status().status == "done"
    assert resumed.metrics()["replay_size"][-1] > 0
