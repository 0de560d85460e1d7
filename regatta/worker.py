"""The worker: capacity. It owns environments, carries out one order after another, and decides nothing.

As a program, `python -m regatta.worker URL`: what a local fleet starts, light enough to start quickly.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import sys
import time
import traceback
from collections.abc import Collection

import msgspec
from threadpoolctl import threadpool_limits

from regatta import named
from regatta.codec import decode, encode
from regatta.errors import CodecError, ConfigError, TransportError
from regatta.fleet.local import give_way, leash, watch_leash
from regatta.policies.policy import Act, Policy, PolicySpec
from regatta.rollout.envs import EnvConfig, refuse_foreign
from regatta.rollout.episodes import play
from regatta.rollout.lane import Lane
from regatta.rollout.population import Population
from regatta.rollout.watch import Watch
from regatta.transport.base import Goodbye, WorkerEnd, connect
from regatta.types import Arrays, Collect, Episode, Failure, Fault, Order, Play, Result, Score, SnapshotHeader, Task

TOKEN_ENV = "REGATTA_TOKEN"
IDLE_S = 1.0
FLUSH_S = 0.5  # for the last words of a process that is about to end itself


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker must know of a run; the learner's transport hands it out on joining, as JSON."""

    seed: int
    env: EnvConfig
    policy: PolicySpec


class Worker:
    """Serves one session with a learner; a new session needs a new Worker."""

    def __init__(self, end: WorkerEnd, modules: Collection[str] | None = None) -> None:
        """`modules`: the installed ones that the learner may name in env.id; None trusts it with all of them."""
        try:
            spec = msgspec.json.decode(end.spec, type=WorkerSpec)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"the learner's spec cannot be read: {error}; both sides need the same version of Regatta"
            ) from error
        if modules is not None:
            refuse_foreign(spec.env, modules)
            named.refuse_foreign("network.kind", spec.policy.network.kind, modules)
        self._end = end
        self._env = spec.env
        self._policy = Policy(spec.policy)
        self._seed = spec.seed
        self._lanes: dict[int, Lane] = {}
        self._population: Population | None = None
        self._snapshot: tuple[int, Arrays] = (-1, {})
        self._act: tuple[int, Act] | None = None
        self._order = -1
        self._watch = Watch(spec.env.step_timeout_s, self._last_words)

    def serve(self) -> None:
        """Carry out orders until the learner says goodbye (returns) or is lost (raises ConnectionLost)."""
        try:
            with threadpool_limits(1):
                while True:
                    self.serve_once(IDLE_S)
        except Goodbye:
            return
        finally:
            self.close()

    def serve_once(self, timeout_s: float) -> None:
        payload = self._end.receive(timeout_s)
        if payload is None:
            return
        order, arrays = decode(payload, Order)
        self._order = order.id
        started = time.perf_counter()
        try:
            reply = self._carry_out(order, arrays, started)
        except (TransportError, ConfigError):
            raise  # the learner made this environment before: what is missing is missing here, so this worker leaves
        except Exception:
            self._abandon(order.task)
            reply = encode(Failure(order.id, traceback.format_exc()))
        self._end.send(reply)

    def _carry_out(self, order: Order, arrays: Arrays, started: float) -> bytes:
        task = order.task
        if isinstance(task, Play):
            episodes = play(task, self._env, self._policy, self._acting(task.version), self._watch)
            return self._result(order, sum(e.length for e in episodes), episodes, [], started)
        if isinstance(task, Score):
            if self._population is None:
                self._population = Population(self._env, self._policy, self._seed, self._watch)
            scored, episodes, faults = self._population.score(task, self._arrays(task.version), arrays.get("members"))
            return self._result(order, int(scored["lengths"].sum()), episodes, faults, started, scored)
        lane = self._lanes.get(task.lane)
        if lane is None:
            lane = self._lanes[task.lane] = Lane(task.lane, self._env, self._policy, self._seed, self._watch)
        lane.place(task, arrays.get("replay"), arrays.get("state"))
        chunk, episodes, faults = lane.collect(task, self._acting(task.version))
        return self._result(order, chunk["rewards"].size, episodes, faults, started, chunk)

    def _result(
        self,
        order: Order,
        steps: int,
        episodes: list[Episode],
        faults: list[Fault],
        started: float,
        arrays: Arrays | None = None,
    ) -> bytes:
        seconds = time.perf_counter() - started
        lane = order.task.lane if isinstance(order.task, Collect) else -1
        return encode(Result(order.id, order.task.version, steps, episodes, faults, seconds, lane), arrays)

    def _arrays(self, version: int) -> Arrays:
        if self._snapshot[0] != version:
            header, arrays = decode(self._end.snapshot(version), SnapshotHeader)
            if header.version != version:
                raise CodecError(f"asked for snapshot {version}, got {header.version}")
            self._snapshot = (version, arrays)
        return self._snapshot[1]

    def _acting(self, version: int) -> Act:
        if self._act is None or self._act[0] != version:
            self._act = (version, self._policy.player(self._arrays(version)))
        return self._act[1]

    def _abandon(self, task: Task) -> None:
        """What an order failed in is in an unknown state."""
        if isinstance(task, Collect) and (lane := self._lanes.pop(task.lane, None)):
            lane.close()
        if isinstance(task, Score) and self._population is not None:
            self._population.close()
            self._population = None

    def _last_words(self, text: str) -> None:
        """Called by the watch while the main thread is stuck inside an environment, so the end is ours."""
        print(text, file=sys.stderr, flush=True)
        self._end.send(encode(Failure(self._order, text)))
        time.sleep(FLUSH_S)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        if self._population is not None:
            self._population.close()
        self._watch.close()
        self._end.close()


def join(url: str, name: str | None = None, token: str | None = None, modules: Collection[str] | None = None) -> Worker:
    """A worker for one session with the learner at `url`."""
    end = connect(url, name or f"{platform.node()}-{os.getpid()}", token)
    try:
        return Worker(end, modules)
    except BaseException:
        end.close()
        raise


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m regatta.worker", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--name")
    options = parser.parse_args()
    faulthandler.enable()  # a simulator that crashes the process leaves its stack in the last words
    cleanup = leash()
    if cleanup is not None:
        watch_leash(cleanup)
    worker = join(options.url, options.name, os.environ.get(TOKEN_ENV) or None)
    if cleanup is not None:
        give_way()
    worker.serve()


if __name__ == "__main__":
    main()
