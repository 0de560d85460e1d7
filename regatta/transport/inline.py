"""Learner and workers in one process and one thread: no sockets, no copies, no waiting. Also the debugger.

The learner drives the workers: receive() with nothing to report lets an attached worker do one piece of work.
An exception from that work comes out of receive() as it is.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable

from regatta.errors import ConnectionLost, UsageError
from regatta.transport.base import Event, Goodbye, Joined, Left, Message, Snapshots, WorkerEnd, epochs

ServeOnce = Callable[[WorkerEnd], object]


class InlineLearner:
    address = "inline:"

    def __init__(self, spec: bytes) -> None:
        self.counters = {"frames_rejected": 0}
        self._spec = spec
        self._events: deque[Event] = deque()
        self._workers: dict[int, InlineWorker] = {}
        self._serve: dict[int, ServeOnce] = {}
        self._published: Snapshots[bytes] = Snapshots()

    def join(self, name: str) -> InlineWorker:
        """A worker that the caller drives itself."""
        worker = InlineWorker(self, next(epochs), name, self._spec)
        self._workers[worker.worker] = worker
        self._events.append(Joined(worker.worker, name, os.getpid(), platform.node()))
        return worker

    def attach(self, serve_once: ServeOnce, name: str = "inline") -> InlineWorker:
        """A worker that receive() drives: `serve_once` takes one payload from the end it is given and answers
        it. When dismissed it joins again by itself, under a new epoch."""
        worker = self.join(name)
        self._serve[worker.worker] = serve_once
        return worker

    def publish(self, version: int, payload: bytes) -> None:
        self._published.put(version, payload)

    def send(self, worker: int, payload: bytes, version: int | None = None) -> None:
        end = self._workers.get(worker)
        if end is None:
            return
        if version is not None and version not in end.snapshots:
            end.snapshots.put(version, self._published.get(version))
        end.inbox.append(payload)

    def receive(self, timeout_s: float) -> list[Event]:
        if not self._events and not self._work() and timeout_s > 0:
            time.sleep(timeout_s)  # one thread: nothing can come meanwhile, but callers count on the pause
        events = list(self._events)
        self._events.clear()
        return events

    def _work(self) -> bool:
        """Serve until there is something to report; False when nobody has anything to do."""
        while not self._events:
            ready = next((w for w in self._serve if self._workers[w].inbox), None)
            if ready is None:
                return False
            serve_once = self._serve.pop(ready)
            self._serve[ready] = serve_once  # to the end of the line
            serve_once(self._workers[ready])
        return True

    def dismiss(self, worker: int, reason: str) -> None:
        end = self._workers.pop(worker, None)
        if end is None:
            return
        stale = sum(isinstance(e, Message) and e.worker == worker for e in self._events)
        self.counters["frames_rejected"] += stale
        self._events = deque(e for e in self._events if e.worker != worker)
        end.over = ConnectionLost(f"dismissed by the learner ({reason}); connect again")
        serve_once = self._serve.pop(worker, None)
        if serve_once is not None:
            self.attach(serve_once, end.name)

    def close(self, reason: str = "done") -> None:
        for end in self._workers.values():
            end.over = Goodbye(reason)
        self._workers.clear()
        self._serve.clear()
        self._events.clear()

    def accept(self, end: InlineWorker, payload: bytes) -> None:
        self._events.append(Message(end.worker, payload))

    def depart(self, end: InlineWorker) -> None:
        if self._workers.pop(end.worker, None) is not None:
            self._serve.pop(end.worker, None)
            self._events.append(Left(end.worker, "it closed its end"))


class InlineWorker:
    def __init__(self, learner: InlineLearner, worker: int, name: str, spec: bytes) -> None:
        self.worker = worker
        self.name = name
        self.spec = spec
        self.inbox: deque[bytes] = deque()
        self.snapshots: Snapshots[bytes] = Snapshots()
        self.over: ConnectionLost | Goodbye | None = None
        self._learner = learner

    def receive(self, timeout_s: float) -> bytes | None:
        if self.over is not None:
            raise self.over
        if self.inbox:
            return self.inbox.popleft()
        if timeout_s > 0:
            time.sleep(timeout_s)
        return None

    def snapshot(self, version: int) -> bytes:
        return self.snapshots.get(version)

    def send(self, payload: bytes) -> None:
        if self.over is not None:
            raise self.over
        self._learner.accept(self, payload)

    def close(self) -> None:
        if self.over is None:
            self.over = ConnectionLost("this end is closed")
            self._learner.depart(self)


def listen(url: str, spec: bytes, token: str | None = None) -> InlineLearner:
    if url != "inline:":
        raise UsageError(f"{url!r}: inline takes no address; write 'inline:'")
    return InlineLearner(spec)


def connect(url: str, name: str, token: str | None = None, timeout_s: float = 30.0) -> InlineWorker:
    raise UsageError(
        "a worker cannot connect to 'inline:', its workers live inside the learner's process; "
        "start the learner with --listen ipc: or tcp://HOST:PORT to let others join"
    )
