"""The composition root: the only file that wires config, algorithm, transport, fleet, store and record together."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from threadpoolctl import threadpool_limits

from regatta import config as configs
from regatta import named
from regatta.account import Progress
from regatta.algorithms.base import Algorithm
from regatta.codec import decode, encode
from regatta.config import Config
from regatta.errors import ConfigError, EnvError, Interrupted, RegattaError, UsageError
from regatta.fleet.local import LocalFleet
from regatta.fleet.supervisor import Supervisor
from regatta.interrupt import interruptible
from regatta.learner import Display, Learner
from regatta.policies.compiled import prepare_jax
from regatta.policies.policy import Policy
from regatta.rollout import envs
from regatta.runs.agent import policy_of
from regatta.runs.checkpoint import Checkpoint
from regatta.runs.facts import hide
from regatta.runs.layout import MANIFEST, checkpoints_key
from regatta.runs.run import Run, RunWriter, find_run
from regatta.runs.writer import refuse_taken
from regatta.store.base import default_location, open_store
from regatta.transport.base import LearnerEnd, Message, WorkerEnd, listen
from regatta.transport.inline import InlineLearner
from regatta.types import Episode, Failure, FromWorker, Order, Play, SnapshotHeader
from regatta.worker import TOKEN_ENV, Worker, WorkerSpec

Workers = int | Literal["auto"]


class Silent:
    """A display that shows nothing."""

    def opened(self, run: Run) -> None: ...
    def show(self, progress: Progress) -> None: ...
    def say(self, text: str) -> None: ...


class Site(msgspec.Struct, frozen=True):
    """Who does the work and where they meet; no part of the experiment."""

    workers: Workers = "auto"
    listen: str | None = None
    token: str | None = None


# -- what users call ----------------------------------------------------------------------------------------


def train(
    preset: str | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    file: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    name: str | None = None,
    store: str | None = None,
    workers: Workers = "auto",
    listen: str | None = None,
    token: str | None = None,
    display: Display | None = None,
    command: Sequence[str] | None = None,
) -> Run:
    """Train an agent and return its run.

        run = regatta.train("cartpole-ppo", {"algorithm.lr": 3e-4}, seed=1, workers=2)

    `preset` is a preset or an algorithm (then give env.id); `workers` are processes on this machine, 0 trains in
    this one. With `listen` (such as "tcp://127.0.0.1:4444") other workers can join. An interrupt saves the run
    and raises Interrupted.
    """
    texts = _texts(overrides)
    config = configs.resolve(preset, file=file, overrides=texts, seed=seed)
    record_config = msgspec.json.decode(configs.to_json(config))
    if hide(record_config) != record_config:
        raise ConfigError(
            "env.kwargs holds what looks like a secret. It would be hidden in the run's record, and the run could not "
            "be resumed: let the environment read it from a variable or a file instead"
        )
    place = open_store(store or default_location())
    if name is not None:
        refuse_taken(place, name)
    with _session(config, Site(workers, listen, token)) as (algorithm, end, supervisor):
        record = RunWriter.create(
            place,
            preset=config.preset,
            config=record_config,
            command=list(command or ["regatta", "train", config.preset, *texts]),
            name=name,
            keep=config.run.keep,
        )
        run = find_run(place, record.id)
        display = display or Silent()
        display.opened(run)
        _say_who_works(display, config, Site(workers, listen, token), end)
        _carry_through(Learner(config, algorithm, end, supervisor, record, display), record)
    return run


def resume(
    ref: str,
    *,
    store: str | None = None,
    workers: Workers = "auto",
    listen: str | None = None,
    token: str | None = None,
    allow: Collection[str] = (),
    display: Display | None = None,
) -> Run:
    """Go on with a run from its newest trustworthy checkpoint, as if it had never stopped.

    `allow`: installed modules that the run's env.id may name; those in the current folder always may.
    """
    place = open_store(store or default_location())
    display = display or Silent()
    run = find_run(place, ref)
    if run.status().status == "done":
        raise UsageError(f"run {run.id} is done; for a longer one: regatta train {run.facts.preset} run.steps=NUMBER")
    config = _recorded_config(run, allow)
    checkpoint: Checkpoint | None = None
    if any(key.endswith(f"/{MANIFEST}") for key in place.list(checkpoints_key(run.id))):
        checkpoint, notes = run.checkpoint()
        for note in notes:
            display.say(note)
    with _session(config, Site(workers, listen, token)) as (algorithm, end, supervisor):
        after = 0 if checkpoint is None else checkpoint.iteration
        record = RunWriter.resume(place, run.id, after=after, keep=config.run.keep)
        display.opened(run)
        _say_who_works(display, config, Site(workers, listen, token), end)
        learner = Learner(config, algorithm, end, supervisor, record, display)
        if checkpoint is None:
            display.say("no checkpoint was reached before the run stopped; starting from the beginning")
        else:
            learner.restore(checkpoint)
        _carry_through(learner, record)
    return run


def evaluate(
    ref: str,
    *,
    episodes: int = 20,
    store: str | None = None,
    checkpoint: Literal["last", "best"] | int = "last",
    seed: int = 1_000_000,
    deterministic: bool = True,
    allow: Collection[str] = (),
    display: Display | None = None,
) -> dict[str, float]:
    """Play whole episodes with a run's policy and its own statistics, in environments seeded for this alone."""
    if episodes < 1:
        raise UsageError(f"--episodes {episodes}: at least one is needed")
    run = find_run(open_store(store or default_location()), ref)
    config = _recorded_config(run, allow)
    found, notes = run.checkpoint(checkpoint, blocks=False)
    for note in notes:
        (display or Silent()).say(note)
    policy, arrays = policy_of(found)
    with threadpool_limits(1), _inline(_spec(config, policy)) as end:
        end.publish(found.iteration, encode(SnapshotHeader(found.iteration), arrays))
        played = _play(end, Play(found.iteration, episodes, seed, deterministic))
    scores = np.array([episode.score for episode in played])
    return {
        "return_mean": float(scores.mean()),
        "return_std": float(scores.std()),
        "length_mean": float(np.mean([episode.length for episode in played])),
        "episodes": len(played),
    }


def load_run(ref: str = "last", *, store: str | None = None) -> Run:
    """A run by id, unambiguous prefix or 'last'."""
    return find_run(open_store(store or default_location()), ref)


def _recorded_config(run: Run, allow: Collection[str]) -> Config:
    """A run's config, from a store that others may write to: it must not name code of just any module."""
    config = configs.from_json(msgspec.json.encode(run.config))
    envs.refuse_foreign(config.env, allow)
    named.refuse_foreign("network.kind", config.network.kind, allow)
    return config


# -- wiring -------------------------------------------------------------------------------------------------


@contextmanager
def _session(config: Config, site: Site) -> Iterator[tuple[Algorithm, LearnerEnd, Supervisor]]:
    """Everything a learner needs, checked and started; all of it is gone afterwards."""
    workers = _worker_count(config, site)
    interface = envs.probe(config.env)
    policy = Policy(config.algorithm.policy(interface.obs, interface.action, interface.bounded, config.network))
    with threadpool_limits(1):
        if workers == 0 and site.listen is None:
            with _inline(_spec(config, policy)) as inline:
                yield _algorithm(config, policy), inline, Supervisor()
            return
        end = listen(site.listen or _local_url(), _spec(config, policy), site.token)
        supervisor = Supervisor(_fleet(end, site), workers, config.crew.max_failures)
        try:
            supervisor.start()  # before the algorithm: workers start up while the learner imports and compiles
            yield _algorithm(config, policy), end, supervisor
        finally:
            end.close()
            supervisor.stop()


def _algorithm(config: Config, policy: Policy) -> Algorithm:
    prepare_jax()
    env, run = config.env, config.run
    return config.algorithm.build(policy, env.lanes, env.lane_envs, run.seed, run.steps)


def _worker_count(config: Config, site: Site) -> int:
    if site.workers == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, config.env.lanes) if site.listen is None else 0
    if site.workers < 0:
        raise UsageError(f"--workers {site.workers}: 'auto', 0 (this process) or more")
    return site.workers


def _say_who_works(display: Display, config: Config, site: Site, end: LearnerEnd) -> None:
    count, lanes = _worker_count(config, site), config.env.lanes
    if site.listen is not None:
        secret = " --token-file FILE" if site.token else ""
        display.say(f"workers join with: regatta worker {end.address}{secret}")
        if count == 0:
            display.say("none are started on this machine; --workers N starts some")
    if count > lanes:
        display.say(
            f"{count} workers share {lanes} lane{'s' * (lanes > 1)}: {count - lanes} will be idle (see env.lanes)"
        )


def _local_url() -> str:
    return "ipc:" if sys.platform != "win32" else "tcp://127.0.0.1:0"


def _fleet(end: LearnerEnd, site: Site) -> LocalFleet:
    secret = {TOKEN_ENV: site.token or ""}  # always set: they must not inherit one this run does not use
    command = [sys.executable, "-m", "regatta.worker", end.address, "--name", "{name}"]
    ours = site.listen in (None, "ipc:", "ipc://") and end.address.startswith("ipc:")  # the transport made the folder
    cleanup = str(Path(end.address.removeprefix("ipc://")).parent) if ours else None
    return LocalFleet(command, secret, cleanup)


def _spec(config: Config, policy: Policy) -> bytes:
    return msgspec.json.encode(WorkerSpec(config.run.seed, config.env, policy.spec))


@contextmanager
def _inline(spec: bytes) -> Iterator[InlineLearner]:
    """Learner's end with one worker in this process."""
    end = InlineLearner(spec)
    serving: dict[int, Worker] = {}

    def serve_once(worker_end: WorkerEnd) -> None:
        if worker_end.worker not in serving:
            for dismissed in serving.values():
                dismissed.close()
            serving.clear()
            serving[worker_end.worker] = Worker(worker_end)
        serving[worker_end.worker].serve_once(0.0)

    end.attach(serve_once, "inline")
    try:
        yield end
    finally:
        end.close()
        for worker in serving.values():
            worker.close()


def _play(end: LearnerEnd, task: Play) -> list[Episode]:
    """The task's episodes, from the first worker that joins."""
    worker: int | None = None
    while True:
        for event in end.receive(1.0):
            if worker is None:
                worker = event.worker
                end.send(worker, encode(Order(0, task)), task.version)
            elif isinstance(event, Message):
                reply, _ = decode(event.payload, FromWorker)
                if isinstance(reply, Failure):
                    raise EnvError(reply.text)
                episodes: list[Episode] = reply.episodes
                return episodes


# -- carrying a run through ---------------------------------------------------------------------------------


def _carry_through(learner: Learner, record: RunWriter) -> None:
    """Train to the end; whatever that end is, the record says so."""
    with interruptible(learner.request_stop):
        try:
            outcome = learner.train()
        except RegattaError as error:
            record.close("failed", str(error))
            raise
        except BaseException as error:
            record.close("failed", f"{type(error).__name__}: {error}")
            raise
        record.status(weights_sha256=learner.weights_sha256, **learner.progress.summary())
        saved = record.close("done" if outcome == "done" else "interrupted")
    if not saved:
        raise RegattaError(f"run {record.id} ended, but not everything could be saved: {record.saving().failing}")
    if outcome != "done":
        raise Interrupted(
            f"interrupted and saved at step {learner.progress.steps:,}; go on with: regatta resume {record.id}"
        )


def _texts(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    if isinstance(overrides, Mapping):
        return [f"{key}={_text(value)}" for key, value in overrides.items()]
    return list(overrides)


def _text(value: Any) -> str:
    """As it would be typed on the command line."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
