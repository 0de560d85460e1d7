"""The fleet contract: start and stop worker processes somewhere. Commands and names, no learning."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Exited(msgspec.Struct, frozen=True):
    """A worker process that ended without being asked to. A negative code is the signal that killed it."""

    name: str
    code: int
    stderr_tail: str


class Fleet(Protocol):
    def start(self, name: str) -> None:
        """Start one worker under a name that no running one has."""
        ...

    def pids(self) -> dict[str, int]: ...

    def poll(self) -> list[Exited]:
        """Who exited since the last poll, not counting those that were stopped."""
        ...

    def stop(self, name: str | None = None, grace_s: float = 1.0) -> None:
        """End one worker, or all: politely, then by force. None of them is left when this returns."""
        ...
