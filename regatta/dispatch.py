"""From tasks to accepted results: the crew's decisions carried out over a transport, with a fleet kept alive.

Here, and only here, workers are met. Above it there are tasks and their results; what dies, hangs, repeats or lies
below it ends here as a note for the user, a rebuilt lane or an error that says why.
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec
import numpy as np

from regatta.codec import decode, encode
from regatta.crew import Crew, CrewConfig
from regatta.errors import CodecError, EnvError
from regatta.fleet.base import Exited
from regatta.fleet.supervisor import KILLED, Supervisor
from regatta.policies.policy import Policy
from regatta.rollout import population
from regatta.rollout.envs import EnvConfig
from regatta.rollout.lane import misfit
from regatta.transport.base import Event, Joined, LearnerEnd, Left, Message
from regatta.types import Array, Arrays, Collect, Failure, FromWorker, Order, Result, Score, Task

CRASHES_BEFORE_RESEED = 3  # a lane that crashes whoever replays it gets other seeds


class Settings(Protocol):
    """The parts of the config that are read here."""

    @property
    def env(self) -> EnvConfig: ...
    @property
    def crew(self) -> CrewConfig: ...


class WorkerView(msgspec.Struct, frozen=True):
    """One worker as the display shows it."""

    name: str
    state: str
    lanes: list[int]
    steps: int


class LaneLog(msgspec.Struct):
    """All that is needed to rebuild a lane anywhere: where it was seeded, and the actions since."""

    origin: int = 0
    attempt: int = 0
    actions: dict[int, Array] = {}  # by iteration, [T, N, ...] each
    states: dict[int, Array] = {}  # the policy's memory as an iteration begins, [N, S]

    def before(self, iteration: int) -> Array | None:
        """All actions up to where `iteration` begins, [S, N, ...]; None right after seeding."""
        past = [actions for number, actions in self.actions.items() if number < iteration]
        return np.concatenate(past) if past else None


class Dispatch:
    """`free`: nothing waits for anything. Orders are done with the newest snapshot there is when they are given out,
    and a lane that moves begins new episodes.
    """

    def __init__(
        self, settings: Settings, policy: Policy, end: LearnerEnd, supervisor: Supervisor, free: bool = False
    ) -> None:
        self._settings = settings
        self._free = free
        self._replays = settings.env.replay and not free
        self.newest = 0  # the version of the last snapshot published
        self._policy = policy
        self._end = end
        self._supervisor = supervisor
        self._crew = Crew(settings.crew, eager=self._replays, queued=free)
        self._logs = [LaneLog() for _ in range(settings.env.lanes)]
        self._tasks: dict[int, Task] = {}
        self._along: dict[int, Arrays] = {}  # by order: what its task takes along
        self._crashes: dict[int, int] = {}  # by order: how many workers crashed at it
        self._last_order: dict[str, int] = {}  # by worker: what it was at when it was lost
        self._results: dict[int, tuple[Result, Arrays]] = {}
        self._next_order = 0
        self._names: dict[int, str] = {}
        self._steps: dict[str, int] = {}
        self._notes: list[str] = []
        self.failures = 0

    # -- orders and results -------------------------------------------------------------------------------

    def order(self, tasks: list[tuple[Task, Arrays]]) -> list[int]:
        """Have these done; the numbers of the orders, for `ready` and `take`."""
        orders = []
        for task, along in tasks:
            lane = None
            if isinstance(task, Collect):
                lane = task.lane
                log = self._logs[lane]
                task = msgspec.structs.replace(task, origin=log.origin, attempt=log.attempt)
            number = self._next_order
            self._next_order += 1
            self._tasks[number] = task
            self._along[number] = along
            self._crew.submit(number, lane, work=_work(task))
            orders.append(number)
        self._send()
        return orders

    def ready(self, orders: list[int]) -> bool:
        return all(order in self._results for order in orders)

    def take(self, orders: list[int]) -> list[tuple[Result, Arrays]]:
        return [self._results.pop(order) for order in orders]

    def pump(self, timeout_s: float) -> None:
        """Wait for something to happen, take it in, and give out what is waiting."""
        deadline = self._crew.next_deadline()
        if deadline is not None:
            timeout_s = min(timeout_s, max(0.0, deadline - time.monotonic()))
        for event in self._end.receive(timeout_s):
            self._meet(event)
        now = time.monotonic()
        for exited in self._supervisor.step(now):
            for worker in [w for w, name in self._names.items() if name == exited.name]:
                self._end.dismiss(worker, "its process ended")
                self._lose(worker, f"exit code {exited.code}")
            self._count_crash(exited)
        for worker in self._crew.expire(now):
            self._notes.append(f"{self._names[worker]} is late; its lanes go to others")
        self._send()

    def _send(self) -> None:
        for assignment in self._crew.assign(time.monotonic()):
            task = self._tasks[assignment.order]
            arrays = dict(self._along[assignment.order])
            if self._free:
                task = self._tasks[assignment.order] = msgspec.structs.replace(task, version=self.newest)
            if isinstance(task, Collect) and assignment.fresh and task.origin != task.iteration:
                log = self._logs[task.lane]
                past = log.before(task.iteration)
                if past is not None and self._replays:
                    arrays["replay"] = past
                    if task.iteration in log.states:
                        arrays["state"] = log.states[task.iteration]
                    self._crew.add_work(assignment.order, len(past))
                else:
                    task = self._reseed(assignment.order, task)
            self._end.send(assignment.worker, encode(Order(assignment.order, task), arrays), task.version)

    # -- what comes in ------------------------------------------------------------------------------------

    def _meet(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._names[event.worker] = event.name
            self._steps.setdefault(event.name, 0)
            self._crew.joined(event.worker, time.monotonic())
        elif isinstance(event, Left):
            if event.worker in self._names:
                self._supervisor.replace(self._names[event.worker], time.monotonic())
                self._lose(event.worker, event.reason)
        elif event.worker in self._names:
            self._read(event)

    def _read(self, event: Message) -> None:
        try:
            message, arrays = decode(event.payload, FromWorker)
        except CodecError as error:
            self._notes.append(f"{self._names[event.worker]} sent what is not a result: {error}")
            self._end.dismiss(event.worker, "it sent a malformed result")
            self._lose(event.worker, str(error))
            return
        if isinstance(message, Failure):
            self._fail(event.worker, message)
        else:
            self._accept(event.worker, message, arrays)

    def _accept(self, worker: int, result: Result, arrays: Arrays) -> None:
        task = self._tasks.get(result.order)
        if task is not None:
            wrong = self._misfit(task, result, arrays)
            if wrong or (result.version != task.version and not self._free):
                text = wrong or f"snapshot {result.version}, ordered was {task.version}"
                self._fail(worker, Failure(result.order, f"the result does not fit its order: {text}"))
                return
        if not self._crew.result(worker, result.order, time.monotonic()):
            return
        del self._tasks[result.order], self._along[result.order]
        self._crashes.pop(result.order, None)
        self._results[result.order] = (result, arrays)
        self._supervisor.healthy(self._names[worker])
        self._steps[self._names[worker]] += result.steps

    def _misfit(self, task: Task, result: Result, arrays: Arrays) -> str | None:
        """What is wrong with a result, or None: bytes from a socket are not trusted."""
        if isinstance(task, Collect):
            wrong, steps = misfit(arrays, task, self._policy, self._settings.env.lane_envs), task.steps
            steps *= self._settings.env.lane_envs
        elif isinstance(task, Score):
            wrong = population.misfit(arrays, task, self._policy)
            steps = 0 if wrong else int(arrays["lengths"].sum())
        else:
            return None
        if result.lane != (task.lane if isinstance(task, Collect) else -1):
            return f"lane {result.lane}"
        return wrong or (f"{result.steps} steps, expected {steps}" if result.steps != steps else None)

    def _fail(self, worker: int, failure: Failure) -> None:
        failures = self._crew.failed(worker, failure.order, time.monotonic())
        if failures is None:
            return
        self.failures += 1
        self._notes.append(f"{self._names[worker]} could not carry out an order:\n{failure.text}")
        if failures >= self._settings.crew.max_failures:
            raise EnvError(f"the same order failed {failures} times; the last time:\n{failure.text}")
        self._try_other_seeds(failure.order, failures)

    def _lose(self, worker: int, reason: str) -> None:
        if worker not in self._names:
            return
        held = self._crew.left(worker, time.monotonic())
        name = self._names.pop(worker)
        self._notes.append(f"{name} is gone ({reason}){'; its lanes go to others' if held else ''}")
        if held:
            self._last_order[name] = held[0]  # orders are carried out in turn

    def _count_crash(self, exited: Exited) -> None:
        """A lane may be what crashed its worker, unless someone killed it."""
        order = self._last_order.pop(exited.name, None)
        if order not in self._tasks or exited.code in KILLED:
            return
        self._crashes[order] = self._crashes.get(order, 0) + 1
        if self._crashes[order] >= CRASHES_BEFORE_RESEED:
            self._try_other_seeds(order, self._crashes[order])

    # -- lanes --------------------------------------------------------------------------------------------

    def remember(self, iteration: int, results: list[tuple[Result, Arrays]]) -> None:
        """An iteration is whole: its actions are now part of where the lanes stand.

        A lane in which an environment was replaced cannot be replayed, so it begins new episodes, in every run alike.
        """
        for lane, (result, arrays) in enumerate(results):
            if "actions" not in arrays:
                continue  # no lane's
            if result.faults:
                self._logs[lane] = LaneLog(origin=iteration + 1)
            elif self._replays:
                log = self._logs[lane]
                log.actions[iteration] = arrays["actions"].copy()  # a view would keep its frame alive
                if "last_state" in arrays:
                    log.states = {iteration: arrays["state"].copy(), iteration + 1: arrays["last_state"].copy()}

    def begin_epoch(self, iteration: int) -> None:
        """All lanes are seeded anew at `iteration`; nothing before it is needed any more."""
        self._logs = [LaneLog(origin=iteration) for _ in self._logs]
        self._crew.release_lanes()

    def _try_other_seeds(self, order: int, attempt: int) -> None:
        task = self._tasks[order]
        if isinstance(task, Collect):
            self._reseed(order, task, attempt)

    def _reseed(self, order: int, task: Collect, attempt: int = 0) -> Collect:
        """The lane cannot or shall not be rebuilt as it was: new episodes from here on."""
        self._logs[task.lane] = LaneLog(origin=task.iteration, attempt=attempt)
        task = msgspec.structs.replace(task, origin=task.iteration, attempt=attempt)
        self._tasks[order] = task
        return task

    def state(self, iteration: int) -> tuple[list[dict[str, int]], Arrays]:
        """Where the lanes stand as `iteration` begins, for a checkpoint."""
        arrays: Arrays = {}
        for lane, log in enumerate(self._logs):
            past = log.before(iteration)
            if past is not None:
                arrays[f"{lane}/actions"] = past
            if iteration in log.states:
                arrays[f"{lane}/state"] = log.states[iteration]
        return [{"origin": log.origin, "attempt": log.attempt} for log in self._logs], arrays

    def restore(self, iteration: int, lanes: list[dict[str, int]], arrays: Arrays) -> None:
        for lane, log in enumerate(lanes):
            actions = arrays.get(f"{lane}/actions")
            past = {} if actions is None else {iteration - 1: actions}
            state = arrays.get(f"{lane}/state")
            states = {} if state is None else {iteration: state}
            self._logs[lane] = LaneLog(log["origin"], log["attempt"], past, states)

    # -- what is so ---------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """What the user should know of since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def workers(self) -> list[WorkerView]:
        views = [
            WorkerView(self._names[w], self._crew.standing(w), self._crew.lanes_of(w), self._steps[self._names[w]])
            for w in self._crew.workers
        ]
        return sorted(views, key=lambda view: view.name)

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def dropped(self) -> int:
        return self._crew.dropped + self._end.counters["frames_rejected"]


def _work(task: Task) -> float:
    """How much it is, in a measure that compares tasks of one kind."""
    if isinstance(task, Collect):
        return task.steps
    return float(task.count * task.episodes) if isinstance(task, Score) else float(task.episodes)
