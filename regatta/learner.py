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

from regatta import dispatch
from regatta.algorithms.base import Algorithm, Metrics
from regatta.codec import encode
from regatta.dispatch import Dispatch, WorkerView
from regatta.errors import EnvError, NonFinite, RegattaError
from regatta.fleet.supervisor import Supervisor
from regatta.runs.checkpoint import Checkpoint
from regatta.runs.run import Run, RunConfig, RunWriter
from regatta.transport.base import LearnerEnd
from regatta.types import Arrays, Episode, Fault, Result, Snapshot, SnapshotHeader

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


class Settings(dispatch.Settings, Protocol):
    """The parts of the config that the learner reads."""

    @property
    def run(self) -> RunConfig: ...
    @property
    def stop(self) -> StopConfig: ...


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
        self._dispatch = Dispatch(settings, algorithm.policy, end, supervisor)
        self._record = record
        self._display = display
        self._snapshots: dict[int, Snapshot] = {}  # what outstanding and coming orders are done with
        self._window: deque[Episode] = deque(maxlen=RETURN_WINDOW)
        self._last_fault: Fault | None = None
        self._env_faults = 0
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
        self.progress = Progress(total_steps=algorithm.total_iterations * algorithm.steps_per_iteration)

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
        orders = [] if self._finished() else self._order(self.iteration)
        while orders:
            results = self._gather(orders)
            if not results:
                return
            self._dispatch.remember(self.iteration, results)
            ahead = self._order(self.iteration + 1) if self._may_overlap() else []
            metrics = self._learn(results)
            self.iteration += 1
            self._publish(self._algorithm.snapshot(self.iteration))
            self._note(results, metrics)
            if self._finished():
                return
            if self.iteration % self.checkpoint_period == 0:  # also when about to stop: a resumed run goes on alike
                self._begin_epoch()
                self._checkpoint("boundary")
            if self.stop_requested:
                return
            orders = ahead or self._order(self.iteration)

    @property
    def weights_sha256(self) -> str:
        return fingerprint(self._snapshots[self.iteration])

    def _finished(self) -> bool:
        stop = self._settings.stop
        if self.iteration >= self._algorithm.total_iterations:
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
            and following < self._algorithm.total_iterations
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

    def _begin_epoch(self) -> None:
        """The same at every checkpoint of every run, so that one resumed there goes on just like this one."""
        self._dispatch.begin_epoch(self.iteration)
        self._snapshots = {self.iteration: self._snapshots[self.iteration]}
        self._algorithm.restart()

    def _order(self, iteration: int) -> list[int]:
        """Order an iteration's tasks with the snapshot its tempo says: under overlap, the one before."""
        overlapped = iteration - self._algorithm.staleness
        version = overlapped if overlapped in self._snapshots else iteration
        return self._dispatch.order(self._algorithm.tasks(iteration, version))

    def _gather(self, orders: list[int]) -> list[tuple[Result, Arrays]]:
        """Wait until every order has its result; nothing if a stop is requested meanwhile."""
        started = time.perf_counter()
        while not self._dispatch.ready(orders):
            if self.stop_requested:
                return []
            self._dispatch.pump(SHOW_EVERY_S)
            self._show()
        self.progress.wait_s += time.perf_counter() - started
        return self._dispatch.take(orders)

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
        progress.episodes += len(rows)
        self._average()
        progress.wall_s = self._wall_before + now - self._started
        if self._first_update is None:
            self._first_update = (now, progress.steps)
        elif now > self._first_update[0]:
            progress.steps_per_s = (progress.steps - self._first_update[1]) / (now - self._first_update[0])
        if rows:
            self._record.episodes(rows)
        self._record.metrics(self._row(metrics))
        self._note_faults(faults)
        self._show()

    def _average(self) -> None:
        if self._window:
            self.progress.return_mean = float(np.mean([episode.score for episode in self._window]))
            self.progress.length_mean = float(np.mean([episode.length for episode in self._window]))

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
        self._env_faults += len(faults)
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
        progress.restarts = self._dispatch.restarts
        progress.env_faults = self._env_faults + self._dispatch.failures
        progress.results_dropped = self._dispatch.dropped
        progress.workers = self._dispatch.workers()
        progress.phase = self._phase or self._activity()
        if progress.return_mean is not None:
            progress.curve.append(progress.return_mean)
            if len(progress.curve) > 400:
                progress.curve = progress.curve[::2]
        for text in (*self._dispatch.notes(), *self._record.warnings()):
            self._say(text)
        progress.saving = self._record.saving().failing
        self._record.status(warnings=self._warnings, **self.summary())
        self._display.show(progress)

    def _activity(self) -> str:
        if not self.progress.workers:
            return "waiting for workers"
        return "training" if self._first_update else "compiling"

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
        lanes, actions = self._dispatch.state(self.iteration)
        arrays |= {f"lanes/{name}": array for name, array in actions.items()}
        for version, snapshot in self._snapshots.items():
            arrays |= {f"snapshots/{version}/{name}": array for name, array in snapshot.arrays.items()}
        progress = self.progress
        state = {
            "episodes": progress.episodes,
            "wall_s": progress.wall_s,
            "env_faults": progress.env_faults,
            "window": [msgspec.to_builtins(e) for e in self._window],
            "lanes": lanes,
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
        self._dispatch.restore(checkpoint.iteration, state["lanes"], _under("lanes/", checkpoint.arrays))
        self._wall_before = state["wall_s"]
        progress = self.progress
        progress.iterations, progress.steps = checkpoint.iteration, checkpoint.steps
        progress.episodes, self._env_faults = state["episodes"], state["env_faults"]
        self._average()


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
