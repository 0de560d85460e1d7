"""The learner: owns the parameters and the run record, and turns results into the next snapshot.

The loop is one sentence: gather an iteration's results, order the next one if the tempo allows, learn, publish,
record. What is random or timed about workers ends here: results are used in the order of their tasks.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from regatta.algorithms.base import Algorithm, Metrics
from regatta.codec import decode, encode
from regatta.crew import Crew, CrewConfig
from regatta.errors import CodecError, EnvError, NonFinite, RegattaError
from regatta.fleet.supervisor import Supervisor
from regatta.rollout.envs import EnvConfig
from regatta.rollout.lane import misfit
from regatta.runs.checkpoint import Checkpoint
from regatta.runs.run import Run, RunConfig, RunWriter
from regatta.transport.base import Event, Joined, LearnerEnd, Left, Message
from regatta.types import (
    Array,
    Arrays,
    Collect,
    Episode,
    Failure,
    Fault,
    FromWorker,
    Order,
    Result,
    Snapshot,
    SnapshotHeader,
    Task,
)

RETURN_WINDOW = 100  # episodes in return_mean
MAX_NON_FINITE = 3  # updates in a row before the run ends
MAX_FAULTY_ITERATIONS = 20  # iterations in a row in which environments fail before the run ends
SHOW_EVERY_S = 0.1
MAX_WARNINGS = 50  # kept in the run record


class StopConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reasons to end before run.steps."""

    return_mean: Annotated[
        float | None,
        Meta(description=f"stop once the mean return of the last {RETURN_WINDOW} episodes reaches this"),
    ] = None
    wall_s: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="stop after this many seconds of training")
    ] = None


class Settings(Protocol):
    """The parts of the config the learner reads."""

    @property
    def env(self) -> EnvConfig: ...
    @property
    def run(self) -> RunConfig: ...
    @property
    def stop(self) -> StopConfig: ...
    @property
    def crew(self) -> CrewConfig: ...


class WorkerView(msgspec.Struct, frozen=True):
    """One worker as the display shows it."""

    name: str
    state: str
    lanes: list[int]
    steps: int


class Progress(msgspec.Struct):
    """Where the run stands; what displays show and the last line of `--json` says."""

    total_steps: int
    steps: int = 0
    iterations: int = 0
    episodes: int = 0
    return_mean: float | None = None
    length_mean: float | None = None
    wall_s: float = 0.0
    steps_per_s: float = 0.0
    learn_s: float = 0.0  # learning, waiting for results, and the workers' own time, all summed
    wait_s: float = 0.0
    collect_s: float = 0.0
    restarts: int = 0
    results_dropped: int = 0
    env_faults: int = 0
    non_finite: int = 0
    workers: list[WorkerView] = []
    curve: list[float] = []  # return_mean over the run, for a small curve
    phase: str = "starting"
    saving: str | None = None  # why the record cannot be saved at the moment


class Display(Protocol):
    def opened(self, run: Run) -> None: ...
    def show(self, progress: Progress) -> None: ...
    def say(self, text: str) -> None: ...


class LaneLog(msgspec.Struct):
    """All that is needed to rebuild a lane anywhere: where it was seeded, and the actions since."""

    origin: int = 0
    attempt: int = 0
    actions: dict[int, Array] = {}  # by iteration, [T, N, ...] each

    def before(self, iteration: int) -> Array | None:
        """All actions up to where `iteration` begins, [S, N, ...]; None right after seeding."""
        past = [actions for number, actions in self.actions.items() if number < iteration]
        return np.concatenate(past) if past else None


class Learner:
    def __init__(
        self,
        settings: Settings,
        algorithm: Algorithm,
        end: LearnerEnd,
        supervisor: Supervisor,
        record: RunWriter,
        display: Display,
    ) -> None:
        self._settings = settings
        self._algorithm = algorithm
        self._end = end
        self._supervisor = supervisor
        self._record = record
        self._display = display
        self._crew = Crew(settings.crew, eager=settings.env.replay)
        self._logs = [LaneLog() for _ in range(settings.env.lanes)]
        self._tasks: dict[int, Task] = {}
        self._results: dict[int, tuple[Result, Arrays]] = {}
        self._snapshots: dict[int, Snapshot] = {}  # what outstanding and coming orders are done with
        self._next_order = 0
        self._names: dict[int, str] = {}
        self._worker_steps: dict[str, int] = {}
        self._window: deque[Episode] = deque(maxlen=RETURN_WINDOW)
        self._last_fault: Fault | None = None
        self._faulty_iterations = 0
        self._non_finite_row = 0
        self._warnings: list[str] = []
        self._phase = ""
        self._shown_at = 0.0
        self._totals: dict[str, float] = {}
        self._started = time.monotonic()
        self._wall_before = 0.0
        self._first_update: tuple[float, int] | None = None
        self.iteration = 0
        self.stop_requested = False
        self.progress = Progress(total_steps=self.total_iterations * algorithm.steps_per_iteration)

    @property
    def total_iterations(self) -> int:
        return math.ceil(self._settings.run.steps / self._algorithm.steps_per_iteration)

    @property
    def checkpoint_period(self) -> int:
        """Iterations between checkpoints; there the overlap is drained and all lanes are seeded anew."""
        return math.ceil(self._settings.run.checkpoint_every / self._algorithm.steps_per_iteration)

    # -- the loop -----------------------------------------------------------------------------------------

    def train(self) -> str:
        """Run to the budget, a stop condition or an interrupt; 'done' or 'interrupted'. The last state is saved."""
        self._started = time.monotonic()
        if self.iteration not in self._snapshots:
            self._snapshots[self.iteration] = self._algorithm.snapshot(self.iteration)
        for snapshot in self._snapshots.values():
            self._publish(snapshot)
        try:
            self._loop()
        except RegattaError:
            self._checkpoint("interrupt")  # whatever ended the run, what it had learned is kept
            raise
        finished = self._finished()
        if finished:
            self._begin_epoch()
        self._checkpoint("final" if finished else "interrupt")
        self._phase = "done" if finished else "interrupted"
        self._show(force=True)
        return self._phase

    def _loop(self) -> None:
        orders = [] if self._finished() else self._order_next(self.iteration)
        while orders:
            results = self._gather(orders)
            if self.stop_requested:
                return
            self._remember_actions(results)
            ahead = self._order_next(self.iteration + 1) if self._may_overlap() else []
            metrics = self._learn(results)
            self.iteration += 1
            self._publish(self._algorithm.snapshot(self.iteration))
            self._note(results, metrics)
            if self._finished() or self.stop_requested:
                return
            if self.iteration % self.checkpoint_period == 0:
                self._begin_epoch()
                self._checkpoint("boundary")
            orders = ahead or self._order_next(self.iteration)

    @property
    def weights_sha256(self) -> str:
        return fingerprint(self._snapshots[self.iteration])

    def _finished(self) -> bool:
        stop = self._settings.stop
        if self.iteration >= self.total_iterations:
            return True
        if stop.wall_s is not None and time.monotonic() - self._started + self._wall_before >= stop.wall_s:
            return True
        mean = self.progress.return_mean
        return (
            stop.return_mean is not None
            and mean is not None
            and len(self._window) == RETURN_WINDOW
            and mean >= stop.return_mean
        )

    def _may_overlap(self) -> bool:
        following = self.iteration + 1
        return (
            self._algorithm.staleness > 0
            and following < self.total_iterations
            and following % self.checkpoint_period != 0
        )

    def _learn(self, results: list[tuple[Result, Arrays]]) -> Metrics:
        started = time.perf_counter()
        try:
            behaviour = self._snapshots[results[0][0].version]
            metrics = self._algorithm.update(self.iteration, results, behaviour)
            self._non_finite_row = 0
        except NonFinite as error:
            self._non_finite_row += 1
            self.progress.non_finite += 1
            self._say(f"iteration {self.iteration}: update skipped, the last good policy is kept: {error}")
            if self._non_finite_row >= MAX_NON_FINITE:
                raise NonFinite(f"{MAX_NON_FINITE} updates in a row were not finite; the last: {error}") from error
            metrics = {}
        self.progress.learn_s += time.perf_counter() - started
        return metrics

    def _publish(self, snapshot: Snapshot) -> None:
        recent = {v: s for v, s in self._snapshots.items() if v >= snapshot.version - self._algorithm.staleness}
        self._snapshots = recent | {snapshot.version: snapshot}
        self._end.publish(snapshot.version, encode(SnapshotHeader(snapshot.version), snapshot.arrays))

    def _remember_actions(self, results: list[tuple[Result, Arrays]]) -> None:
        for log, (_, arrays) in zip(self._logs, results, strict=True):
            log.actions[self.iteration] = arrays["actions"].copy()  # a view would keep its whole frame alive

    def _begin_epoch(self) -> None:
        """The same at every checkpoint of every run, so that one resumed there goes on just like this one."""
        self._logs = [LaneLog(origin=self.iteration) for _ in self._logs]
        self._snapshots = {self.iteration: self._snapshots[self.iteration]}
        self._crew.release_lanes()
        self._algorithm.restart()

    # -- orders and results -------------------------------------------------------------------------------

    def _order_next(self, iteration: int) -> list[int]:
        """Order an iteration's tasks with the snapshot its tempo says: under overlap, the one before."""
        overlapped = iteration - self._algorithm.staleness
        version = overlapped if overlapped in self._snapshots else iteration
        orders = []
        for task in self._algorithm.tasks(iteration, version):
            lane = None
            if isinstance(task, Collect):
                lane = task.lane
                log = self._logs[lane]
                task = msgspec.structs.replace(task, origin=log.origin, attempt=log.attempt)
            number = self._next_order
            self._next_order += 1
            self._tasks[number] = task
            self._crew.submit(number, lane, work=task.steps if isinstance(task, Collect) else 1.0)
            orders.append(number)
        self._dispatch()
        return orders

    def _dispatch(self) -> None:
        for assignment in self._crew.assign(time.monotonic()):
            task = self._tasks[assignment.order]
            arrays: Arrays = {}
            if isinstance(task, Collect) and assignment.fresh and task.origin != task.iteration:
                past = self._logs[task.lane].before(task.iteration)
                if past is not None and self._settings.env.replay:
                    arrays["replay"] = past
                    self._crew.add_work(assignment.order, len(past))
                else:
                    task = self._reseed(assignment.order, task)
            self._end.send(assignment.worker, encode(Order(assignment.order, task), arrays), task.version)

    def _reseed(self, order: int, task: Collect, attempt: int = 0) -> Collect:
        """The lane cannot or shall not be rebuilt as it was: new episodes from here on."""
        self._logs[task.lane] = LaneLog(origin=task.iteration, attempt=attempt)
        task = msgspec.structs.replace(task, origin=task.iteration, attempt=attempt)
        self._tasks[order] = task
        return task

    def _gather(self, orders: list[int]) -> list[tuple[Result, Arrays]]:
        """Wait until every order has one accepted result; fewer if a stop is requested meanwhile."""
        started = time.perf_counter()
        while not self.stop_requested and any(order not in self._results for order in orders):
            self._pump()
        self.progress.wait_s += time.perf_counter() - started
        return [self._results.pop(order) for order in orders if order in self._results]

    def _pump(self) -> None:
        """Take in what has happened, then give out what is waiting."""
        now = time.monotonic()
        deadline = self._crew.next_deadline()
        timeout_s = SHOW_EVERY_S if deadline is None else min(SHOW_EVERY_S, max(0.0, deadline - now))
        for event in self._end.receive(timeout_s):
            self._take(event)
        now = time.monotonic()
        for exited in self._supervisor.step(now):
            for worker, name in list(self._names.items()):
                if name == exited.name:
                    self._end.dismiss(worker, "its process ended")
                    self._lose(worker, f"exit code {exited.code}")
        for worker in self._crew.expire(now):
            self._say(f"worker {self._names[worker]} is late; its lanes go to others")
        self._dispatch()
        self._show()

    def _take(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._names[event.worker] = event.name
            self._worker_steps.setdefault(event.name, 0)
            self._crew.joined(event.worker, time.monotonic())
            return
        if isinstance(event, Left):
            self._lose(event.worker, event.reason)
            if event.worker in self._names:
                self._supervisor.replace(self._names[event.worker], time.monotonic())
            return
        assert isinstance(event, Message)
        try:
            message, arrays = decode(event.payload, FromWorker)
        except CodecError as error:
            self._say(f"worker {self._names.get(event.worker)} sent what is not a result: {error}")
            self._end.dismiss(event.worker, "it sent a malformed result")
            self._lose(event.worker, str(error))
            return
        if isinstance(message, Failure):
            self._take_failure(event.worker, message)
        else:
            self._take_result(event.worker, message, arrays)

    def _lose(self, worker: int, reason: str) -> None:
        held = self._crew.left(worker, time.monotonic())
        name = self._names.get(worker, "?")
        if held:
            self._say(f"worker {name} is gone ({reason}); its lanes go to others")

    def _take_failure(self, worker: int, failure: Failure) -> None:
        if failure.fatal:
            raise EnvError(failure.text)
        failures = self._crew.failed(worker, failure.order, time.monotonic())
        if failures is None:
            return
        self.progress.env_faults += 1
        self._say(f"worker {self._names[worker]} could not carry out an order:\n{failure.text}")
        if failures >= self._settings.crew.max_failures:
            raise EnvError(f"the same order failed {failures} times; the last time:\n{failure.text}")
        task = self._tasks[failure.order]
        if isinstance(task, Collect):
            self._reseed(failure.order, task, attempt=failures)

    def _take_result(self, worker: int, result: Result, arrays: Arrays) -> None:
        task = self._tasks.get(result.order)
        if isinstance(task, Collect):
            wrong = misfit(arrays, task, self._algorithm.policy, self._settings.env.lane_envs)
            if wrong or result.version != task.version:
                text = wrong or f"snapshot {result.version}, ordered was {task.version}"
                self._take_failure(worker, Failure(result.order, f"the result does not fit its order: {text}"))
                return
        if not self._crew.result(worker, result.order, time.monotonic()):
            return
        del self._tasks[result.order]
        self._results[result.order] = (result, arrays)
        self._supervisor.healthy(self._names[worker])
        if isinstance(task, Collect):
            self._worker_steps[self._names[worker]] += arrays["rewards"].size

    # -- the record ---------------------------------------------------------------------------------------

    def _note(self, results: list[tuple[Result, Arrays]], metrics: Metrics) -> None:
        """Everything an iteration leaves in the run record."""
        now = time.monotonic()
        progress = self.progress
        progress.iterations = self.iteration
        progress.steps = self.iteration * self._algorithm.steps_per_iteration
        rows = []
        faults: list[Fault] = []
        for lane, (result, _) in enumerate(results):
            progress.collect_s += result.seconds
            faults += result.faults
            for episode in sorted(result.episodes, key=lambda e: (e.step, e.env)):
                self._window.append(episode)
                rows.append(
                    {
                        "iteration": self.iteration,
                        "steps": progress.steps,
                        "lane": lane,
                        "env": episode.env,
                        "return": episode.score,
                        "length": episode.length,
                    }
                )
        self._note_faults(faults)
        progress.episodes += len(rows)
        if self._window:
            progress.return_mean = float(np.mean([e.score for e in self._window]))
            progress.length_mean = float(np.mean([e.length for e in self._window]))
        progress.wall_s = self._wall_before + now - self._started
        if self._first_update is None:
            self._first_update = (now, progress.steps)
        elif now > self._first_update[0]:
            progress.steps_per_s = (progress.steps - self._first_update[1]) / (now - self._first_update[0])
        if rows:
            self._record.episodes(rows)
        self._record.metrics(self._row(metrics))
        self._show()

    def _row(self, metrics: Metrics) -> dict[str, Any]:
        progress = self.progress
        return {
            "iteration": progress.iterations,
            "steps": progress.steps,
            "episodes": progress.episodes,
            "wall_s": progress.wall_s,
            "return_mean": progress.return_mean,
            "length_mean": progress.length_mean,
            "steps_per_s": progress.steps_per_s,
            **self._spent(),
            **metrics,
        }

    def _spent(self) -> dict[str, float]:
        """Where this iteration's time went."""
        totals = {name: getattr(self.progress, name) for name in ("learn_s", "wait_s", "collect_s")}
        spent = {name: total - self._totals.get(name, 0.0) for name, total in totals.items()}
        self._totals = totals
        return spent

    def _note_faults(self, faults: list[Fault]) -> None:
        self._faulty_iterations = self._faulty_iterations + 1 if faults else 0
        if not faults:
            return
        self.progress.env_faults += len(faults)
        first = self._last_fault is None or self._last_fault.text != faults[-1].text
        self._last_fault = faults[-1]
        if first:
            where = f"lane {faults[-1].lane}, environment {faults[-1].env}"
            self._say(f"{where} failed and was replaced:\n{faults[-1].text}")
        if self._faulty_iterations >= MAX_FAULTY_ITERATIONS:
            raise EnvError(
                f"environments failed in {MAX_FAULTY_ITERATIONS} iterations in a row; the last:\n{faults[-1].text}"
            )

    def _show(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._shown_at < SHOW_EVERY_S:
            return
        self._shown_at = now
        progress = self.progress
        progress.wall_s = self._wall_before + now - self._started
        progress.restarts = self._supervisor.restarts
        progress.results_dropped = self._crew.dropped + self._end.counters["frames_rejected"]
        active = {w: self._names[w] for w in self._crew.workers}
        progress.workers = [
            WorkerView(name, self._crew.standing(w), self._crew.lanes_of(w), self._worker_steps[name])
            for w, name in sorted(active.items(), key=lambda item: item[1])
        ]
        progress.phase = self._phase or ("waiting for workers" if not active else "training")
        if progress.return_mean is not None:
            progress.curve.append(progress.return_mean)
            if len(progress.curve) > 400:
                progress.curve = progress.curve[::2]
        for text in self._record.warnings():
            self._say(text)
        progress.saving = self._record.saving().failing
        self._record.status(warnings=self._warnings, **self.summary())
        self._display.show(progress)

    def _say(self, text: str) -> None:
        self._warnings = [*self._warnings[-MAX_WARNINGS + 1 :], text]
        self._display.say(text)

    def summary(self) -> dict[str, Any]:
        """The figures of the run record's status, also the last line of `--json`."""
        progress = self.progress
        return {
            "steps": progress.steps,
            "iterations": progress.iterations,
            "episodes": progress.episodes,
            "return_mean": progress.return_mean,
            "wall_s": round(progress.wall_s, 3),
            "steps_per_s": round(progress.steps_per_s, 1),
            "workers": len(progress.workers),
            "restarts": progress.restarts,
            "results_dropped": progress.results_dropped,
        }

    # -- checkpoints --------------------------------------------------------------------------------------

    def _checkpoint(self, kind: Literal["boundary", "interrupt", "final"]) -> None:
        arrays = {f"algorithm/{name}": array for name, array in self._algorithm.state().items()}
        for lane, log in enumerate(self._logs):
            past = log.before(self.iteration)
            if past is not None:
                arrays[f"lanes/{lane}/actions"] = past
        for version, snapshot in self._snapshots.items():
            arrays |= {f"snapshots/{version}/{name}": array for name, array in snapshot.arrays.items()}
        progress = self.progress
        state = {
            "episodes": progress.episodes,
            "wall_s": progress.wall_s,
            "env_faults": progress.env_faults,
            "window": [msgspec.to_builtins(e) for e in self._window],
            "lanes": [{"origin": log.origin, "attempt": log.attempt} for log in self._logs],
            "snapshots": list(self._snapshots),
            "policy": msgspec.to_builtins(self._algorithm.policy.spec),
            "weights_sha256": self.weights_sha256,
        }
        self._record.checkpoint(Checkpoint(self.iteration, progress.steps, arrays, state, progress.return_mean, kind))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; called before `train`."""
        self._algorithm.load(_under("algorithm/", checkpoint.arrays))
        state = checkpoint.state
        self.iteration = checkpoint.iteration
        self._snapshots = {
            version: Snapshot(version, _under(f"snapshots/{version}/", checkpoint.arrays))
            for version in state["snapshots"]
        }
        self._window.extend(msgspec.convert(e, Episode) for e in state["window"])
        for lane, log in enumerate(state["lanes"]):
            actions = checkpoint.arrays.get(f"lanes/{lane}/actions")
            past = {} if actions is None else {checkpoint.iteration - 1: actions}
            self._logs[lane] = LaneLog(log["origin"], log["attempt"], past)
        self._wall_before = state["wall_s"]
        progress = self.progress
        progress.iterations, progress.steps = checkpoint.iteration, checkpoint.steps
        progress.episodes, progress.env_faults = state["episodes"], state["env_faults"]
        progress.return_mean = checkpoint.return_mean


def _under(prefix: str, arrays: Arrays) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def fingerprint(snapshot: Snapshot) -> str:
    """SHA-256 over names, shapes and bytes of everything a policy is."""
    digest = hashlib.sha256()
    for name in sorted(snapshot.arrays):
        array = snapshot.arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
