"""The saver: one thread that writes to the store while training goes on, and keeps trying when it fails.

A job belongs to a label. Labels fail and wait on their own: a checkpoint that does not fit on a full disk
holds up neither the status nor the journals. Training never waits for a job, except in `drain`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from regatta.errors import StoreError

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0

Job = Callable[[], None]


class SaverState(NamedTuple):
    pending: int  # jobs waiting or under way
    failing: str | None  # why the store cannot be written at present
    failures: int  # attempts that failed, ever
    dropped: int  # jobs given up for newer ones without having been done


@dataclass(frozen=True, eq=False)
class _Waiting:
    label: str
    job: Job
    limit: int


class _Repeat:
    def __init__(self, label: str, job: Job, every_s: float, due: float) -> None:
        self.label, self.job, self.every_s, self.due = label, job, every_s, due


@dataclass
class _Outage:
    reason: str
    wait_s: float
    retry_at: float


class Saver:
    """Jobs run in the order they came, each label's retries apart. Any thread may call any method."""

    def __init__(self, first_retry_s: float = FIRST_RETRY_S, last_retry_s: float = LAST_RETRY_S) -> None:
        self._first_retry_s = first_retry_s
        self._last_retry_s = last_retry_s
        self._changed = threading.Condition()
        self._queue: list[_Waiting] = []
        self._repeats: list[_Repeat] = []
        self._running: _Waiting | None = None
        self._outages: dict[str, _Outage] = {}
        self._failures = 0
        self._dropped = 0
        self._warnings: list[str] = []
        self._bug: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="regatta-saver", daemon=True)
        self._thread.start()

    def submit(self, label: str, job: Job) -> None:
        """Do this soon; it replaces a job of the same label that has not begun, whose work it includes."""
        self._add(_Waiting(label, job, limit=1))

    def enqueue(self, label: str, job: Job, limit: int = 2) -> None:
        """Do this in turn; when more than `limit` of the label wait, the oldest is given up and counted."""
        self._add(_Waiting(label, job, limit))

    def repeat(self, label: str, every_s: float, job: Job) -> None:
        """Submit this job now and every so often, until `stop`."""
        with self._changed:
            self._repeats.append(_Repeat(label, job, every_s, time.monotonic()))
            self._changed.notify_all()

    def state(self) -> SaverState:
        with self._changed:
            failing = next((outage.reason for outage in self._outages.values()), None)
            return SaverState(self._pending(), failing, self._failures, self._dropped)

    def warnings(self) -> list[str]:
        """What the user should hear, once."""
        with self._changed:
            told, self._warnings = self._warnings, []
            return told

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; False if that takes too long, as when the store keeps failing."""
        with self._changed:
            for outage in self._outages.values():
                outage.retry_at, outage.wait_s = 0.0, self._first_retry_s
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._bug is not None or not self._pending(), timeout_s)
            self._raise_bug()
            return done

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; what has not begun is not done."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _add(self, waiting: _Waiting) -> None:
        with self._changed:
            self._raise_bug()
            self._queue.append(waiting)
            self._trim(waiting)
            self._changed.notify_all()

    def _trim(self, newest: _Waiting) -> None:
        same = [waiting for waiting in self._queue if waiting.label == newest.label]
        for old in same[: max(0, len(same) - newest.limit)]:
            if newest.limit == 1:
                # The newer job takes the older one's turn, or a steady stream of them would never be served.
                self._queue.remove(newest)
                self._queue[self._queue.index(old)] = newest
            else:
                self._queue.remove(old)
                self._dropped += 1

    def _pending(self) -> int:
        return len(self._queue) + (self._running is not None)

    def _raise_bug(self) -> None:
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug

    def _work(self) -> None:
        while (waiting := self._next()) is not None:
            error: Exception | None = None
            try:
                waiting.job()
            except Exception as raised:  # a StoreError is retried; anything else is ours and goes to the caller
                error = raised
            with self._changed:
                self._running = None
                if isinstance(error, StoreError):
                    self._failed(waiting, error)
                elif error is not None:
                    self._bug = error
                else:
                    self._succeeded(waiting.label)
                self._changed.notify_all()

    def _next(self) -> _Waiting | None:
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                for repeat in self._repeats:
                    if repeat.due <= now:
                        repeat.due = now + repeat.every_s
                        waiting = _Waiting(repeat.label, repeat.job, limit=1)
                        self._queue.append(waiting)
                        self._trim(waiting)
                for waiting in self._queue:
                    outage = self._outages.get(waiting.label)
                    if outage is None or outage.retry_at <= now:
                        self._queue.remove(waiting)
                        self._running = waiting
                        return waiting
                times = [repeat.due for repeat in self._repeats]
                times += [self._outages[waiting.label].retry_at for waiting in self._queue]
                self._changed.wait(max(0.0, min(times) - now) if times else None)
            return None

    def _failed(self, waiting: _Waiting, error: StoreError) -> None:
        self._failures += 1
        if not self._outages:
            self._warnings.append(f"{error}; training goes on, will try again")
        before = self._outages.get(waiting.label)
        wait_s = min(2 * before.wait_s, self._last_retry_s) if before else self._first_retry_s
        self._outages[waiting.label] = _Outage(str(error), wait_s, time.monotonic() + wait_s)
        same = [other for other in self._queue if other.label == waiting.label]
        if len(same) < waiting.limit:
            self._queue.insert(0, waiting)  # older than anything of its label that waits
        elif waiting.limit > 1:
            self._dropped += 1

    def _succeeded(self, label: str) -> None:
        if self._outages.pop(label, None) is not None and not self._outages:
            self._warnings.append("saving works again")
