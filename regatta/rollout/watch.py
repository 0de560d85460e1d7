"""Hung environments: a thread that interrupts a step which takes too long, and ends the process if that fails."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

EXIT_HUNG = 75


class StepTimeout(Exception):
    """The environment's step or reset took longer than env.step_timeout_s."""


class Watch:
    """`with watch:` around calls into environments, `watch.since = time.monotonic()` before each.

    At the limit the main thread gets a signal, whose handler raises StepTimeout inside the environment's own
    code: that ends Python loops, sleeps and waits. Code that never returns to the interpreter cannot be
    interrupted, nor can code that swallows the exception and goes on; after twice the limit `give_up` is
    called with the stack, and the process ends.
    """

    def __init__(self, timeout_s: float, give_up: Callable[[str], None]) -> None:
        self.timeout_s = timeout_s
        self.since = 0.0
        self._interrupted_at = -1.0
        self._inside = False
        self._give_up = give_up
        self._main = threading.current_thread()
        self._stop = threading.Event()
        self._can_interrupt = hasattr(signal, "pthread_kill") and self._main is threading.main_thread()
        self._previous: Any = None
        if self._can_interrupt:
            self._previous = signal.signal(signal.SIGALRM, self._interrupt)
        self._thread = threading.Thread(target=self._watch, name="regatta-watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watch:
        self.since = time.monotonic()
        self._inside = True
        return self

    def __exit__(self, *_: object) -> None:
        self._inside = False

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._can_interrupt:
            signal.signal(signal.SIGALRM, self._previous)

    def _interrupt(self, *_: object) -> None:
        # Checked again here: the step may have ended between the thread's look and the signal.
        if self._inside and time.monotonic() - self.since > self.timeout_s:
            self.since = self._interrupted_at = time.monotonic()
            raise StepTimeout(f"no answer for {self.timeout_s:g} s (env.step_timeout_s)")

    def _watch(self) -> None:
        period_s = min(1.0, self.timeout_s / 4)
        while not self._stop.wait(period_s):
            stuck_s = time.monotonic() - self.since
            if not self._inside or stuck_s <= self.timeout_s:
                continue
            swallowed = self.since == self._interrupted_at
            if stuck_s > 2 * self.timeout_s or swallowed or not self._can_interrupt:
                try:
                    self._give_up(self._stack())
                finally:
                    os._exit(EXIT_HUNG)
            signal.pthread_kill(self._main.ident or 0, signal.SIGALRM)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main.ident or 0)
        lines = traceback.format_stack(frame) if frame else ["(no stack)\n"]
        return "".join(lines) + f"StepTimeout: no answer for {self.timeout_s:g} s (env.step_timeout_s)"
