"""The transport contract: what a learner's end and a worker's end do, and which URL brings which one.

A transport moves bytes and knows nothing of reinforcement learning. Each end is used by one thread at a time.
A worker is known by its epoch: an integer the learner hands out on joining and never again in its process.
Once a session is over, nothing more of it is delivered, in either direction.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from regatta.errors import TransportError, UsageError, nearest

KEPT_SNAPSHOTS = 4  # versions both ends keep; strict and overlapped tempos need two

_MODULES = {
    "inline": "regatta.transport.inline",
    "ipc": "regatta.transport.zeromq",
    "tcp": "regatta.transport.zeromq",
}
_EXAMPLES = "inline:, ipc:, ipc:///path/to/socket, tcp://127.0.0.1:5555"

epochs = itertools.count(1)
_Payload = TypeVar("_Payload")


class Joined(msgspec.Struct, frozen=True):
    worker: int
    name: str
    pid: int
    host: str


class Left(msgspec.Struct, frozen=True):
    """The worker is gone: closed, died, fell silent, or joined anew under another epoch."""

    worker: int
    reason: str


class Message(msgspec.Struct, frozen=True):
    worker: int
    payload: bytes


Event = Joined | Left | Message


class Goodbye(Exception):
    """The learner closed its end: the run is over and the worker may go home. Not an error."""


class LearnerEnd(Protocol):
    @property
    def address(self) -> str:
        """What a worker connects to."""
        ...

    @property
    def counters(self) -> dict[str, int]:
        """What was dropped since the start; always has `frames_rejected`."""
        ...

    def publish(self, version: int, payload: bytes) -> None:
        """Keep this snapshot, and the few before it, for workers that will need it."""
        ...

    def send(self, worker: int, payload: bytes, version: int | None = None) -> None:
        """Never blocks. Snapshot `version` reaches the worker before the payload. To a worker that is gone:
        nothing happens; its Left event came or comes."""
        ...

    def receive(self, timeout_s: float) -> list[Event]:
        """All events there are; waits for the first one, at most `timeout_s`."""
        ...

    def dismiss(self, worker: int, reason: str) -> None:
        """Forget this worker: no more events of it, not even Left. It is told to rejoin."""
        ...

    def close(self, reason: str = "done") -> None:
        """Send the workers home and free everything, within a second."""
        ...


class WorkerEnd(Protocol):
    @property
    def spec(self) -> bytes:
        """The run's spec, received on joining."""
        ...

    @property
    def worker(self) -> int:
        """Our epoch."""
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """The next payload, or None at the timeout. ConnectionLost: rejoin. Goodbye: the run is over."""
        ...

    def snapshot(self, version: int) -> bytes:
        """A snapshot that some payload was sent with."""
        ...

    def send(self, payload: bytes) -> None:
        """Raises what receive() raises."""
        ...

    def close(self) -> None: ...


class _Module(Protocol):
    def listen(self, url: str, spec: bytes, token: str | None) -> LearnerEnd: ...

    def connect(self, url: str, name: str, token: str | None, timeout_s: float) -> WorkerEnd: ...


def listen(url: str, spec: bytes, token: str | None = None) -> LearnerEnd:
    """The learner's end at `url`; `spec` is given to each worker that joins."""
    return _module(url).listen(url, spec, token)


def connect(url: str, name: str, token: str | None = None, timeout_s: float = 30.0) -> WorkerEnd:
    """Join the learner at `url`, which may still be starting."""
    return _module(url).connect(url, name, token, timeout_s)


def _module(url: str) -> _Module:
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in _MODULES:
        raise UsageError(
            f"{url!r} is no transport URL: unknown scheme {scheme!r};{nearest(scheme, _MODULES)} "
            f"valid are {', '.join(_MODULES)} (for example {_EXAMPLES})"
        )
    return cast(_Module, import_module(_MODULES[scheme]))


class Snapshots(Generic[_Payload]):
    """The last few versions to arrive. Both ends evict alike, so the learner knows what a worker has."""

    def __init__(self) -> None:
        self._kept: dict[int, _Payload] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._kept

    def put(self, version: int, payload: _Payload) -> None:
        self._kept.pop(version, None)
        self._kept[version] = payload
        while len(self._kept) > KEPT_SNAPSHOTS:
            del self._kept[next(iter(self._kept))]

    def get(self, version: int) -> _Payload:
        if version not in self._kept:
            have = ", ".join(map(str, self._kept)) or "none"
            raise TransportError(
                f"snapshot {version} is not here (kept: {have}); publish it, or order with a newer one"
            )
        return self._kept[version]
