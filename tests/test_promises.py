"""The promises of the design, each kept by whole programs: what `docs/promises.md` says is what is asserted here."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import SMALL, Recorder, wait_until, workers_of

import regatta
from regatta.errors import Interrupted, NonFinite
from regatta.rollout.envs import EnvConfig, make

PENDULUM = (
    "env.id=Pendulum-v1",
    "env.lane_envs=2",
    "algorithm.rollout_steps=64",
    "algorithm.epochs=2",
    "algorithm.normalize_obs=true",
    "algorithm.normalize_reward=true",
    "run.steps=2048",
    "run.checkpoint_every=768",
)
SLOW_MS = 0.2  # of a paced environment's step: an iteration of 256 steps then takes at least 25 ms


def sha(run: regatta.assemble.Run) -> str:
    found = run.status().weights_sha256
    assert found is not None
    return found


# -- 1: the same answer for any number of workers over any transport ----------------------------------------


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("task", ["cartpole", "pendulum, normalised"])
def test_workers_and_transport_do_not_change_the_answer(task: str, staleness: int, store: Path) -> None:
    preset, overrides = ("cartpole-ppo", ("run.steps=4096", "env.lanes=4", "env.lane_envs=2", *SMALL))
    if task != "cartpole":
        preset, overrides = "ppo", PENDULUM
    everyone = [(0, None)] + [(n, url) for n in (1, 2, 4) for url in ("ipc:", "tcp://127.0.0.1:0")]
    if task != "cartpole":
        everyone = [(0, None), (2, "ipc:"), (3, "tcp://127.0.0.1:0")]
    found = {}
    for workers, url in everyone:
        run = regatta.train(
            preset,
            [*overrides, f"algorithm.staleness={staleness}"],
            seed=3,
            workers=workers,
            listen=url,
            store=str(store),
        )
        found[workers, url] = sha(run)
        assert run.status().results_dropped == 0
    assert len(set(found.values())) == 1, found


def test_staleness_and_seed_do_change_the_answer(store: Path) -> None:
    hashes = [
        sha(
            regatta.train(
                "ppo", [*PENDULUM, f"algorithm.staleness={staleness}"], seed=seed, workers=0, store=str(store)
            )
        )
        for staleness, seed in ((0, 1), (1, 1), (0, 2))
    ]
    assert len(set(hashes)) == 3


# -- 2: killed or interrupted at any moment, and resumed ----------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1])
def test_killed_twice_at_random_moments_and_resumed(
    staleness: int, start: Any, store: Path, tmp_path: Path, environments: None
) -> None:
    seed = int(os.environ.get("REGATTA_TEST_SEED", time.time_ns() % 10**6))
    print(f"moments drawn with REGATTA_TEST_SEED={seed}")
    moments = random.Random(seed)
    flag = tmp_path / "slow"
    flag.touch()
    overrides = ["env.id=environments:paced", "run.steps=25600", f"algorithm.staleness={staleness}", *SMALL]
    slow = [f"env.kwargs.flag={flag}", f"env.kwargs.sleep_s={SLOW_MS / 1000}"]
    whole = regatta.train("cartpole-ppo", overrides, seed=5, workers=0, store=str(store), name="whole")
    command = start("train", "cartpole-ppo", *overrides, *slow, "--seed", 5, "--store", store, "--name", "cut", "-w", 2)
    for _ in range(2):
        wait_until(lambda c=command: (store / "cut").exists() and len(c.workers) == 2, 30, command.err)
        after_s = moments.uniform(0, 2.5)
        time.sleep(after_s)
        steps = regatta.load_run("cut", store=str(store)).status().steps
        command.send(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL, command.err
        print(f"killed {after_s:.2f} s after it began, at about step {steps}")
        command = start("resume", "cut", "--store", store, "-w", 2, "--json")
    flag.unlink()
    assert command.wait() == 0, command.err
    assert command.result["weights_sha256"] == sha(whole)
    cut = regatta.load_run("cut", store=str(store))
    assert cut.episodes() == whole.episodes()  # none is missing, none counted twice


@pytest.mark.parametrize("staleness", [0, 1])
def test_interrupted_at_every_turn_and_resumed(staleness: int, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts at consecutive turns of the loop: while waiting, right after an update, at a checkpoint."""
    monkeypatch.setattr("regatta.learner.SHOW_EVERY_S", 0.0)
    overrides = [*PENDULUM, f"algorithm.staleness={staleness}"]
    whole = regatta.train("ppo", overrides, seed=1, workers=0, store=str(store))
    stopped_at = []
    for turn in (1, *range(6, 13)):
        shown = 0

        def interrupt(progress: Any, now: float, turn: int = turn) -> None:
            nonlocal shown
            shown += 1
            if shown == turn:
                os.kill(os.getpid(), signal.SIGINT)

        name = f"cut-{turn}"
        with pytest.raises(Interrupted, match=f"regatta resume {name}"):
            regatta.train("ppo", overrides, seed=1, workers=0, store=str(store), name=name, display=Recorder(interrupt))
        cut = regatta.load_run(name, store=str(store))
        assert cut.status().status == "interrupted"
        stopped_at.append(cut.status().iterations)
        regatta.resume(name, workers=0, store=str(store))
        assert sha(cut) == sha(whole), f"interrupted at turn {turn}, iteration {stopped_at[-1]}"
        assert cut.episodes() == whole.episodes()
    print(f"interrupted at iterations {stopped_at}")
    assert any(iteration % 3 == 0 for iteration in stopped_at)  # checkpoints are every third


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_130(
    number: signal.Signals, start: Any, store: Path, tmp_path: Path, environments: None
) -> None:
    flag = tmp_path / "slow"
    flag.touch()
    overrides = ["env.id=environments:paced", "run.steps=10240", *SMALL]
    whole = regatta.train("cartpole-ppo", overrides, seed=5, workers=0, store=str(store))
    command = start(
        *("train", "cartpole-ppo", *overrides, f"env.kwargs.flag={flag}"),
        *("--seed", 5, "--store", store, "--name", "cut", "-w", 2, "--json"),
    )
    wait_until(lambda: "training" in command.err, 30, command.err)
    time.sleep(1.0)
    command.send(number)
    began = time.monotonic()
    assert command.wait() == 130, command.err
    print(f"{number.name}: saved and gone after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 3
    assert command.result["status"] == "interrupted"
    assert 0 < command.result["steps"] < 10240
    assert "go on with: regatta resume cut" in command.err
    flag.unlink()
    regatta.resume("cut", workers=1, store=str(store))
    assert sha(regatta.load_run("cut", store=str(store))) == sha(whole)


# -- 3: workers may die -------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1])
def test_killed_workers_do_not_change_the_answer(
    staleness: int, store: Path, tmp_path: Path, environments: None
) -> None:
    flag = tmp_path / "slow"
    flag.touch()
    lanes = ("env.lanes=2", "env.lane_envs=4")
    overrides = ["env.id=environments:paced", "run.steps=20480", f"algorithm.staleness={staleness}", *lanes, *SMALL]
    whole = regatta.train("cartpole-ppo", overrides, seed=2, workers=0, store=str(store))
    kills: list[float] = []

    def kill(progress: Any, now: float) -> None:
        ready = sum(view.steps > 0 for view in progress.workers) == 2
        if len(kills) == 3:
            flag.unlink(missing_ok=True)
        elif ready and now - (kills or [0.0])[-1] > 0.4:
            os.kill(workers_of(os.getpid())[f"worker-{len(kills) % 2}"], signal.SIGKILL)
            kills.append(now)

    slow = [f"env.kwargs.flag={flag}", "env.kwargs.sleep_s=0.0005"]
    run = regatta.train(
        "cartpole-ppo", [*overrides, *slow], seed=2, workers=2, store=str(store), display=Recorder(kill)
    )
    assert len(kills) == 3
    assert run.status().restarts == 3
    assert sha(run) == sha(whole)
    assert run.episodes() == whole.episodes()  # nothing was trained on twice


# -- 4: nothing that arrives can run code -------------------------------------------------------------------

AUDIT = '''
"""Writes to $AUDIT_LOG whatever looks like code made from data; loaded by every Python process of the run."""
import os
import sys

READERS = ("/codec.py", "/transport/", "/store/", "/runs/", "/learner.py", "/worker.py", "/crew.py")


def ours(name):
    return "/regatta/" in name and any(part in name for part in READERS)


def audit(event, args):
    if event not in ("pickle.find_class", "exec", "compile", "marshal.loads"):
        return
    frame = sys._getframe().f_back
    stack = []
    while frame is not None:
        stack.append(frame.f_code.co_filename)
        frame = frame.f_back
    if event != "pickle.find_class":
        if not stack or stack[0].endswith("/typing.py"):  # the interpreter itself; annotations in our own source
            return
        # Importing executes code, and so does defining a dataclass while a module is being imported.
        upto = next((i for i, name in enumerate(stack) if "importlib" in name), len(stack))
        direct = "/regatta/" in stack[0]
        if upto < len(stack) and not direct or not (direct or any(map(ours, stack[:upto]))):
            return
    with open(os.environ["AUDIT_LOG"], "a") as log:
        log.write(f"{event} {str(args)[:80]} {[name for name in stack if 'site-packages' not in name][:6]}\\n")


sys.addaudithook(audit)
with open(os.environ["AUDIT_LOG"] + ".seen", "a") as seen:
    seen.write(" ".join(sys.orig_argv[-4:]) + "\\n")
'''


def test_a_whole_training_under_an_audit_hook(start: Any, store: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AUDIT)
    log = tmp_path / "audit.log"
    env = {"PYTHONPATH": str(tmp_path), "AUDIT_LOG": str(log)}
    where = ("--store", store)
    command = start(
        *("train", "cartpole-ppo", "run.steps=1000000", "algorithm.normalize_obs=true", *SMALL),
        *("--name", "watched", "-w", 2, "--listen", "tcp://127.0.0.1:0", *where),
        env=env,
    )
    wait_until(lambda: list(store.glob("watched/checkpoints/*/manifest.json")), 30, command.err)
    command.send(signal.SIGINT)
    assert command.wait() == 130, command.err
    command = start("resume", "watched", "-w", 1, *where, env=env)
    wait_until(lambda: "training" in command.out, 30, command.err)
    command.send(signal.SIGINT)
    assert command.wait() == 130, command.err
    assert start("evaluate", "watched", "-n", 2, *where, env=env).wait() == 0
    seen = Path(f"{log}.seen").read_text()
    assert seen.count("regatta.worker") + seen.count("--name worker-") >= 3, seen  # the hook was there, in workers too
    assert not log.exists(), log.read_text()


def test_the_audit_hook_would_notice(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AUDIT)
    (tmp_path / "regatta").mkdir()
    (tmp_path / "regatta" / "codec.py").write_text(
        "import pickle, collections\npickle.loads(pickle.dumps(collections.Counter()))\nexec('1')\n"
    )
    log = tmp_path / "audit.log"
    env = os.environ | {"PYTHONPATH": str(tmp_path), "AUDIT_LOG": str(log)}
    subprocess.run([sys.executable, str(tmp_path / "regatta" / "codec.py")], env=env, check=True)
    assert {line.split()[0] for line in log.read_text().splitlines()} >= {"pickle.find_class", "exec", "compile"}


# -- 6: the statistics the policy was trained with ----------------------------------------------------------


def test_evaluation_and_export_use_the_trained_statistics(store: Path) -> None:
    run = regatta.train("ppo", PENDULUM, seed=4, workers=2, store=str(store), name="a")
    agent = run.policy()
    assert agent.arrays["stats/mean"].any()
    assert not np.allclose(agent.arrays["stats/scale"], 1)

    # A policy that acts by itself earns what `evaluate` says, to the last bit: same arrays, same statistics.
    env = make(EnvConfig(id="Pendulum-v1"))
    from regatta.seeding import seeds

    scores = []
    for seed in seeds(1_000_000, "play", count=3):
        obs, _ = env.reset(seed=seed)
        score, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(agent.act(obs))
            score += float(reward)
            over = terminated or truncated
        scores.append(score)
    env.close()
    figures = regatta.evaluate("a", episodes=3, store=str(store))
    assert figures["return_mean"] == pytest.approx(np.mean(scores), rel=1e-12)


def test_evaluation_after_resume_is_that_of_the_whole_run(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regatta.learner.SHOW_EVERY_S", 0.0)  # so that no iteration goes by unseen
    regatta.train("ppo", PENDULUM, seed=4, workers=0, store=str(store), name="whole")
    killed: list[float] = []

    def interrupt(progress: Any, now: float) -> None:
        if progress.iterations >= 2 and not killed:
            killed.append(now)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        regatta.train("ppo", PENDULUM, seed=4, workers=1, store=str(store), name="cut", display=Recorder(interrupt))
    regatta.resume("cut", workers=1, store=str(store))
    whole, cut = (regatta.load_run(name, store=str(store)).policy() for name in ("whole", "cut"))
    assert whole.arrays.keys() == cut.arrays.keys()
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(array, cut.arrays[name], err_msg=name)
    assert regatta.evaluate("cut", episodes=2, store=str(store)) == regatta.evaluate(
        "whole", episodes=2, store=str(store)
    )


# -- 7: what is not finite ----------------------------------------------------------------------------------


def test_a_diverging_run_ends_with_71_and_keeps_the_last_good_policy(start: Any, store: Path) -> None:
    command = start(
        *("train", "cartpole-ppo", "env.id=environments:overpaid", "env.kwargs.after=400", "run.steps=100000", *SMALL),
        *("--store", store, "--name", "rich", "-w", 2),
    )
    assert command.wait() == 71, command.err
    assert "3 updates in a row were not finite" in command.err
    assert "lane" in command.err
    assert "environment" in command.err
    run = regatta.load_run("rich", store=str(store))
    assert run.status().status == "failed"
    assert "not finite" in (run.status().error or "")
    checkpoint, notes = run.checkpoint()
    assert notes == []
    assert checkpoint.iteration > 0
    for name, array in run.policy(allow=["environments"]).arrays.items():
        assert np.isfinite(array).all(), name


def test_divergence_is_an_exception_in_python(store: Path, environments: None) -> None:
    with pytest.raises(NonFinite, match="3 updates in a row"):
        regatta.train("cartpole-ppo", ["env.id=environments:overpaid"], workers=0, store=str(store))


# -- 8: time limits are not ends ----------------------------------------------------------------------------


@pytest.mark.parametrize(("ends", "low", "high"), [("truncated", 9.5, 10.5), ("terminated", 3.0, 6.6)])
def test_time_limits_are_bootstrapped(ends: str, low: float, high: float, store: Path, environments: None) -> None:
    """One a step with discount 0.9 is worth 1 / (1 - 0.9) = 10 for ever, and at most 6.5 over ten steps."""
    run = regatta.train(
        "ppo",
        {
            "env.id": "environments:salary",
            "env.kwargs.ends": ends,
            "algorithm.gamma": 0.9,
            "algorithm.rollout_steps": 32,
            "algorithm.lr": 1e-2,
            "run.steps": 30_000,
        },
        workers=0,
        store=str(store),
    )
    agent = run.policy()
    value = float(agent.policy.value(np, agent.arrays, np.ones((1, 1), np.float32))[0])
    print(f"{ends}: value {value:.2f}")
    assert low < value < high
    assert set(run.episodes()["length"]) == {10}
