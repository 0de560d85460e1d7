"""Keeps a number of worker processes alive: restarts with back-off, and an end to it when none ever works."""

from __future__ import annotations

from collections import deque

import msgspec

from regatta.errors import EnvError
from regatta.fleet.base import Exited, Fleet

FIRST_BACKOFF_S = 0.25
LAST_BACKOFF_S = 10.0
LAST_WORDS_S = 0.3
KILLED = (-9, -15)  # by someone or for lack of memory: not the environment's own doing
MAX_CRASHES = 10
CRASH_WINDOW_S = 60.0


class _Place(msgspec.Struct):
    """One worker's place: the process may change, the name stays."""

    failures: int = 0  # ends in a row without a result between
    restart_at: float | None = None
    condemned_at: float | None = None  # when to end a process that is out of reach


class Supervisor:
    """`count` workers on `fleet`; with none, a supervisor of nothing."""

    def __init__(self, fleet: Fleet | None = None, count: int = 0, max_failures: int = 5) -> None:
        self._fleet = fleet
        self._max_failures = max_failures
        self._places = {f"worker-{i}": _Place() for i in range(count)}
        self._crashes: deque[float] = deque()
        self.restarts = 0

    def start(self) -> None:
        if self._fleet is not None:
            for name in self._places:
                self._fleet.start(name)

    def step(self, now: float) -> list[Exited]:
        """Who has ended since the last step; those whose time has come are started again."""
        if self._fleet is None:
            return []
        exits = self._fleet.poll()
        for exited in exits:
            self._count_crash(exited, now)
            self._plan_restart(exited, now)
        for name, place in self._places.items():
            if place.condemned_at is not None and now >= place.condemned_at:
                self._fleet.stop(name, grace_s=0.0)
                exits.append(Exited(name, -9, "it did not answer and was replaced"))
                self._plan_restart(exits[-1], now)
            if place.restart_at is not None and now >= place.restart_at:
                place.restart_at = None
                self.restarts += 1
                self._fleet.start(name)
        return exits

    def _count_crash(self, exited: Exited, now: float) -> None:
        """Results between the crashes do not make it well: a run that crawls from crash to crash is at its end."""
        if exited.code in KILLED:
            return
        self._crashes.append(now)
        while now - self._crashes[0] > CRASH_WINDOW_S:
            self._crashes.popleft()
        if len(self._crashes) > max(MAX_CRASHES, 2 * len(self._places)):
            raise EnvError(
                f"workers crashed {len(self._crashes)} times within {CRASH_WINDOW_S:g} s (exit code {exited.code}); "
                f"the last words of {exited.name}:\n{exited.stderr_tail or '(none)'}"
            )

    def _plan_restart(self, exited: Exited, now: float) -> None:
        place = self._places[exited.name]
        place.condemned_at = None
        place.failures += 1
        if place.failures > self._max_failures:
            raise EnvError(
                f"{exited.name} ended {place.failures} times in a row without a result (exit code {exited.code}); "
                f"its last words:\n{exited.stderr_tail or '(none)'}"
            )
        backoff_s = 0.0 if place.failures == 1 else FIRST_BACKOFF_S * 2 ** (place.failures - 2)
        place.restart_at = now + min(backoff_s, LAST_BACKOFF_S)

    def replace(self, name: str, now: float) -> None:
        """The worker is out of reach. If it is ours and does not end by itself, with its last words, we end it."""
        place = self._places.get(name)
        if place is not None and place.restart_at is None:
            place.condemned_at = now + LAST_WORDS_S

    def healthy(self, name: str) -> None:
        """A result of this worker was accepted."""
        place = self._places.get(name)
        if place is not None:
            place.failures = 0

    def stop(self) -> None:
        if self._fleet is not None:
            self._fleet.stop()
