"""What only the inline transport does: the learner drives its workers."""

from __future__ import annotations

import pytest

from regatta.errors import UsageError
from regatta.transport.base import Joined, Message, WorkerEnd, connect, listen
from regatta.transport.inline import InlineLearner


def shout(end: WorkerEnd) -> None:
    payload = end.receive(0.0)
    assert payload is not None
    end.send(payload.upper())


def test_receive_lets_attached_workers_work_in_turn() -> None:
    learner = InlineLearner(b"spec")
    a, b = learner.attach(shout, "a").worker, learner.attach(shout, "b").worker
    assert [event.worker for event in learner.receive(0.0)] == [a, b]
    for worker, text in ((a, b"one"), (a, b"two"), (b, b"three")):
        learner.send(worker, text)
    assert [learner.receive(0.0) for _ in range(3)] == [
        [Message(a, b"ONE")],
        [Message(b, b"THREE")],
        [Message(a, b"TWO")],
    ]
    assert learner.receive(0.0) == []


def test_a_dismissed_attached_worker_rejoins_by_itself() -> None:
    learner = InlineLearner(b"spec")
    first = learner.attach(shout, "a").worker
    learner.receive(0.0)
    learner.dismiss(first, "too slow")
    [joined] = learner.receive(0.0)
    assert isinstance(joined, Joined)
    assert joined.worker > first
    learner.send(joined.worker, b"hello")
    assert learner.receive(0.0) == [Message(joined.worker, b"HELLO")]


def test_a_workers_exception_comes_out_of_receive() -> None:
    def fail(end: WorkerEnd) -> None:
        end.receive(0.0)
        raise ZeroDivisionError

    learner = InlineLearner(b"spec")
    worker = learner.attach(fail).worker
    learner.receive(0.0)
    learner.send(worker, b"x")
    with pytest.raises(ZeroDivisionError):
        learner.receive(0.0)


def test_inline_cannot_be_joined_from_outside() -> None:
    with pytest.raises(UsageError, match="tcp://HOST:PORT"):
        connect("inline:", "anna")
    with pytest.raises(UsageError, match="takes no address"):
        listen("inline:somewhere", b"")
