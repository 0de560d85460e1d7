"""The learner: owns the parameters and the run record, and turns results into the next snapshot.

The loop is one sentence: gather an iteration's results, order the next one if the tempo allows, learn, publish,
record. What is random or timed about workers ends here: results are used in the order of their tasks.
"""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from regatta import dispatch
from regatta.account import RETURN_WINDOW, Account, Progress, Results, taken
from regatta.algorithms.base import Algorithm, Metrics
from regatta.codec import encode
from regatta.dispatch import Dispatch
from regatta.errors import NonFinite, RegattaError
from regatta.fleet.supervisor import Supervisor
from regatta.runs.checkpoint import Checkpoint
from regatta.runs.run import Run, RunConfig, RunWriter
from regatta.transport.base import LearnerEnd
from regatta.types import Arrays, Snapshot, SnapshotHeader

MAX_NON_FINITE = 3  # updates in a row before the run ends
SHOW_EVERY_S = 0.1
REMEMBERED_VERSIONS = 10_000  # whose time of publication is known, to tell the age of data
LEARNING_POLL_S = 0.002  # while a thread learns, whose end wakes nobody
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
        self._free = algorithm.staleness == "free"
        self._dispatch = Dispatch(settings, algorithm.policy, end, supervisor, self._free)
        self._record = record
        self._display = display
        self._snapshots: dict[int, Snapshot] = {}  # what outstanding and coming orders are done with
        self._account = Account(algorithm.total_steps)
        self._non_finite_row = 0
        self._warnings: list[str] = []
        self._phase = ""
        self._shown_at = 0.0
        self.iteration = 0
        self.stop_requested = False
        self._published_at: dict[int, float] = {}  # by version
        self._next_chunk = 0  # under "free": a number no lane has used yet

    @property
    def progress(self) -> Progress:
        return self._account.progress

    def request_stop(self) -> None:
        """Save and end as soon as can be."""
        self.stop_requested = True

    # -- the loop -----------------------------------------------------------------------------------------

    def train(self) -> str:
        """Run to the budget, a stop condition or an interrupt; 'done' or 'interrupted'. The last state is saved."""
        self._account.begin()
        if self.iteration not in self._snapshots:
            self._snapshots[self.iteration] = self._algorithm.snapshot(self.iteration)
        for snapshot in self._snapshots.values():
            self._publish(snapshot)
        try:
            self._loop_free() if self._free else self._loop()
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
            boundary = self._crosses_boundary(results)
            ahead = self._order(self.iteration + 1) if self._may_overlap(results, boundary) else []
            metrics = self._learn(results)
            self.iteration += 1
            self._publish(self._algorithm.snapshot(self.iteration))
            self._note(results, metrics)
            if self._finished():
                return
            if boundary:  # also when about to stop: a resumed run goes on alike
                self._begin_epoch()
                self._checkpoint("boundary")
            if self.stop_requested:
                return
            orders = ahead or self._order(self.iteration)

    def _loop_free(self) -> None:
        """Every lane always has an order; what has come is learned from in a thread, and nobody waits for that."""
        if self._finished():
            return
        self._dispatch.begin_epoch(self._next_chunk)
        first = self._algorithm.tasks(self._next_chunk, self.iteration)
        chunks = [self._next_chunk] * len(first)
        lanes = {order: lane for lane, order in enumerate(self._dispatch.order(first))}
        come: Results = []
        learning: Future[Metrics] | None = None
        used: Results = []
        with ThreadPoolExecutor(1, "regatta-learn") as thread:
            while True:
                self._dispatch.pump(SHOW_EVERY_S if learning is None else LEARNING_POLL_S)
                for order in [order for order in lanes if self._dispatch.ready([order])]:
                    lane = lanes.pop(order)
                    come += self._dispatch.take([order])
                    chunks[lane] += 1
                    self._next_chunk = max(self._next_chunk, chunks[lane] + 1)
                    task = self._algorithm.tasks(chunks[lane], self.iteration)[lane]
                    lanes[self._dispatch.order([task])[0]] = lane
                self._show()
                if learning is not None and learning.done():
                    self._learned_freely(used, learning.result())
                    learning = None
                    if self._finished():
                        return
                if learning is None and self.stop_requested:
                    return
                if learning is None and come:
                    used, come = come, []
                    learning = thread.submit(self._learn, used)

    def _learned_freely(self, results: Results, metrics: Metrics) -> None:
        versions = [result.version for result, _ in results]
        first = next(iter(self._published_at.values()))  # stands for all that is older
        published = [self._published_at.get(version, first) for version in versions]
        age = {
            "age_versions": float(np.mean([self.iteration - version for version in versions])),
            "age_s": time.monotonic() - float(np.mean(published)),
        }
        boundary = self._crosses_boundary(results)
        self.iteration += 1
        self._publish(self._algorithm.snapshot(self.iteration))
        self._note(results, metrics | age)
        if boundary and not self._finished():
            self._checkpoint("boundary")

    def _crosses_boundary(self, results: Results) -> bool:
        """Whether these steps reach the next checkpoint; there the overlap is drained and all lanes are seeded anew."""
        every, steps = self._settings.run.checkpoint_every, self.progress.steps
        return (steps + taken(results)) // every > steps // every

    @property
    def weights_sha256(self) -> str:
        return fingerprint(self._snapshots[self.iteration])

    def _finished(self) -> bool:
        stop = self._settings.stop
        if self.progress.steps >= self._algorithm.total_steps:
            return True
        if stop.wall_s is not None and self._account.wall_s >= stop.wall_s:
            return True
        return stop.return_mean is not None and self._account.reached(stop.return_mean)

    def _may_overlap(self, results: Results, boundary: bool) -> bool:
        last = self.progress.steps + taken(results) >= self._algorithm.total_steps
        return self._algorithm.staleness == 1 and not last and not boundary

    def _learn(self, results: Results) -> Metrics:
        started = time.perf_counter()
        try:
            behaviour = self._snapshots[self.iteration if self._free else results[0][0].version]
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
        overlap = 1 if self._algorithm.staleness == 1 else 0
        recent = {v: s for v, s in self._snapshots.items() if v >= snapshot.version - overlap}
        self._published_at[snapshot.version] = time.monotonic()
        if len(self._published_at) > REMEMBERED_VERSIONS:
            del self._published_at[next(iter(self._published_at))]
        self._dispatch.newest = snapshot.version
        self._snapshots = recent | {snapshot.version: snapshot}
        self._end.publish(snapshot.version, encode(SnapshotHeader(snapshot.version), snapshot.arrays))

    def _begin_epoch(self) -> None:
        """The same at every checkpoint of every run, so that one resumed there goes on just like this one."""
        self._dispatch.begin_epoch(self.iteration)
        self._snapshots = {self.iteration: self._snapshots[self.iteration]}
        self._algorithm.restart()

    def _order(self, iteration: int) -> list[int]:
        """Order an iteration's tasks with the snapshot its tempo says: under overlap, the one before."""
        overlapped = iteration - 1
        version = overlapped if self._algorithm.staleness == 1 and overlapped in self._snapshots else iteration
        return self._dispatch.order(self._algorithm.tasks(iteration, version))

    def _gather(self, orders: list[int]) -> Results:
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

    def _note(self, results: Results, metrics: Metrics) -> None:
        """Everything an iteration leaves in the run record."""
        rows = self._account.take_in(self.iteration, results)
        if rows:
            self._record.episodes(rows)
        self._record.metrics(self._account.row(metrics))
        failed = self._account.blame(results)
        if failed:
            self._say(failed)
        self._show()

    def _show(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._shown_at < SHOW_EVERY_S:
            return
        self._shown_at = now
        progress = self.progress
        progress.wall_s = self._account.wall_s
        progress.restarts = self._dispatch.restarts
        progress.env_faults = self._account.env_faults + self._dispatch.failures
        progress.results_dropped = self._dispatch.dropped
        progress.workers = self._dispatch.workers()
        progress.phase = self._phase or self._activity()
        self._account.draw()
        for text in (*self._dispatch.notes(), *self._record.warnings()):
            self._say(text)
        progress.saving = self._record.saving().failing
        self._record.status(warnings=self._warnings, **progress.summary())
        self._display.show(progress)

    def _activity(self) -> str:
        if not self.progress.workers:
            return "waiting for workers"
        return "training" if self._account.learning else "compiling"

    def _say(self, text: str) -> None:
        self._warnings = [*self._warnings[-MAX_WARNINGS + 1 :], text]
        self._display.say(text)

    # -- checkpoints --------------------------------------------------------------------------------------

    def _checkpoint(self, kind: Literal["boundary", "interrupt", "final"]) -> None:
        arrays = {f"algorithm/{name}": array for name, array in self._algorithm.state().items()}
        lanes, actions = self._dispatch.state(self.iteration)
        arrays |= {f"lanes/{name}": array for name, array in actions.items()}
        for version, snapshot in self._snapshots.items():
            arrays |= {f"snapshots/{version}/{name}": array for name, array in snapshot.arrays.items()}
        progress = self.progress
        state = self._account.state() | {
            "lanes": lanes,
            "snapshots": list(self._snapshots),
            "policy": msgspec.to_builtins(self._algorithm.policy.spec),
            "weights_sha256": self.weights_sha256,
            "next_chunk": self._next_chunk,
        }
        blocks = {f"algorithm/{name}": arrays for name, arrays in self._algorithm.blocks().items()}
        self._record.checkpoint(
            Checkpoint(self.iteration, progress.steps, arrays, state, progress.return_mean, kind, blocks)
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, whose arrays are used up by it; called before `train`."""
        self._algorithm.load(_under("algorithm/", checkpoint.arrays))
        state = checkpoint.state
        self.iteration = checkpoint.iteration
        self._snapshots = {
            version: Snapshot(version, _under(f"snapshots/{version}/", checkpoint.arrays))
            for version in state["snapshots"]
        }
        self._dispatch.restore(checkpoint.iteration, state["lanes"], _under("lanes/", checkpoint.arrays))
        self._account.load(checkpoint.iteration, checkpoint.steps, state)
        self._next_chunk = state["next_chunk"]


def _under(prefix: str, arrays: Arrays) -> Arrays:
    """Taken out, not copied: a replay memory fills the machine's, and must not stand in it twice."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays.pop(name) for name in names}


def fingerprint(snapshot: Snapshot) -> str:
    """SHA-256 over names, shapes and bytes of everything a policy is."""
    digest = hashlib.sha256()
    for name in sorted(snapshot.arrays):
        array = snapshot.arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
