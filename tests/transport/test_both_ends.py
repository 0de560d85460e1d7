"""The transport contract, on every implementation, with real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from regatta.errors import ConnectionLost, TransportError
from regatta.transport import wire
from regatta.transport.base import (
    KEPT_SNAPSHOTS,
    Event,
    Goodbye,
    Joined,
    LearnerEnd,
    Left,
    Message,
    WorkerEnd,
    connect,
    listen,
)
from regatta.transport.inline import InlineLearner

TOKEN = "a-token-for-tests-only"
PLACES = {
    "inline": ("inline:", None),
    "ipc": ("ipc:", None),
    "tcp": ("tcp://127.0.0.1:0", None),
    "tcp+token": ("tcp://127.0.0.1:0", TOKEN),
}


class Rig:
    """Both ends in one thread."""

    def __init__(self, url: str, token: str | None) -> None:
        self._token = token
        self.learner: LearnerEnd = listen(url, b"the spec", token)
        self.workers: list[WorkerEnd] = []

    def join(self, name: str) -> WorkerEnd:
        if isinstance(self.learner, InlineLearner):
            worker: WorkerEnd = self.learner.join(name)
        else:
            worker = connect(self.learner.address, name, self._token, timeout_s=10.0)
        self.workers.append(worker)
        return worker

    def joined(self, name: str) -> WorkerEnd:
        """A worker whose Joined event is already taken."""
        worker = self.join(name)
        assert self.events(1)[0].worker == worker.worker
        return worker

    def events(self, count: int) -> list[Event]:
        events: list[Event] = []
        deadline = time.monotonic() + 10.0
        while len(events) < count and time.monotonic() < deadline:
            events += self.learner.receive(0.0 if isinstance(self.learner, InlineLearner) else 0.2)
        assert len(events) == count, events
        return events

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.learner.close()


@pytest.fixture(params=PLACES)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(wire, "TICK_S", 0.01)  # a learner in our own thread can only welcome workers at its ticks
    rig = Rig(*PLACES[request.param])
    yield rig
    rig.close()


def payload(worker: WorkerEnd) -> bytes:
    got = worker.receive(10.0)
    assert got is not None
    return got


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_joining_gives_the_spec_and_an_event(rig: Rig) -> None:
    worker = rig.join("anna")
    assert worker.spec == b"the spec"
    [event] = rig.events(1)
    assert isinstance(event, Joined)
    assert (event.worker, event.name) == (worker.worker, "anna")
    assert event.pid > 0
    assert event.host


def test_messages_keep_their_order_both_ways(rig: Rig) -> None:
    worker = rig.joined("anna")
    numbers = [b"%d" % n for n in range(600)]
    for number in numbers:
        rig.learner.send(worker.worker, number)
    assert [payload(worker) for _ in numbers] == numbers
    for number in numbers:
        worker.send(number)
    assert rig.events(len(numbers)) == [Message(worker.worker, number) for number in numbers]


def test_a_worker_may_send_more_than_a_queue_holds(rig: Rig) -> None:
    worker = rig.joined("anna")
    for _ in range(5000):
        worker.send(b"x")
    assert len(rig.events(5000)) == 5000


def test_empty_and_odd_bytes_travel(rig: Rig) -> None:
    worker = rig.joined("anna")
    for message in (b"", b"\0", bytes(range(256))):
        rig.learner.send(worker.worker, message)
        assert payload(worker) == message
        worker.send(message)
        assert rig.events(1) == [Message(worker.worker, message)]


def test_twenty_megabytes(rig: Rig) -> None:
    worker = rig.joined("anna")
    big = bytes(range(250)) * 80_000
    rig.learner.publish(1, big)
    rig.learner.send(worker.worker, big, version=1)
    assert payload(worker) == big
    assert worker.snapshot(1) == big
    worker.send(big)
    assert rig.events(1) == [Message(worker.worker, big)]


def test_the_snapshot_is_there_before_the_payload(rig: Rig) -> None:
    worker = rig.joined("anna")
    for version in range(20):
        rig.learner.publish(version, b"weights %d" % version)
        rig.learner.send(worker.worker, b"order", version=version)
        assert payload(worker) == b"order"
        assert worker.snapshot(version) == b"weights %d" % version


def test_late_joiners_get_the_snapshot_too(rig: Rig) -> None:
    rig.learner.publish(7, b"weights")
    worker = rig.joined("anna")
    rig.learner.send(worker.worker, b"order", version=7)
    payload(worker)
    assert worker.snapshot(7) == b"weights"


def test_both_ends_keep_only_the_last_few_snapshots(rig: Rig) -> None:
    worker = rig.joined("anna")
    for version in range(KEPT_SNAPSHOTS + 1):
        rig.learner.publish(version, b"weights")
        rig.learner.send(worker.worker, b"order", version=version)
        payload(worker)
    with pytest.raises(TransportError, match="snapshot 0 is not here"):
        worker.snapshot(0)
    with pytest.raises(TransportError, match="snapshot 0 is not here"):
        rig.learner.send(worker.worker, b"order", version=0)
    for version in range(1, KEPT_SNAPSHOTS + 1):
        assert worker.snapshot(version) == b"weights"


def test_an_unknown_snapshot_is_an_error(rig: Rig) -> None:
    worker = rig.joined("anna")
    with pytest.raises(TransportError, match="kept: none"):
        worker.snapshot(3)


def test_two_workers_are_addressed_separately(rig: Rig) -> None:
    anna, ben = rig.joined("anna"), rig.joined("ben")
    rig.learner.send(ben.worker, b"for ben")
    rig.learner.send(anna.worker, b"for anna")
    assert payload(anna) == b"for anna"
    assert payload(ben) == b"for ben"
    anna.send(b"from anna")
    assert rig.events(1) == [Message(anna.worker, b"from anna")]
    ben.send(b"from ben")
    assert rig.events(1) == [Message(ben.worker, b"from ben")]


def test_waiting_ends_at_the_timeout(rig: Rig) -> None:
    worker = rig.joined("anna")
    started = time.monotonic()
    assert worker.receive(0.05) is None
    assert rig.learner.receive(0.05) == []
    assert 0.09 < time.monotonic() - started < 1.0
    assert worker.receive(0.0) is None
    assert rig.learner.receive(0.0) == []


def test_goodbye_reaches_every_worker(rig: Rig) -> None:
    workers = [rig.joined("anna"), rig.joined("ben")]
    rig.learner.close("solved")
    for worker in workers:
        with pytest.raises(Goodbye, match="solved"):
            worker.receive(5.0)
        with pytest.raises(Goodbye):
            worker.send(b"too late")


def test_closing_is_quick_and_may_be_repeated(rig: Rig) -> None:
    worker = rig.joined("anna")
    started = time.monotonic()
    worker.close()
    worker.close()
    rig.learner.close()
    rig.learner.close()
    assert time.monotonic() - started < 1.0


def test_a_closed_end_says_so(rig: Rig) -> None:
    worker = rig.joined("anna")
    worker.close()
    with pytest.raises(ConnectionLost, match="closed"):
        worker.receive(0.0)
    with pytest.raises(ConnectionLost, match="closed"):
        worker.send(b"x")


def test_a_worker_that_leaves_is_reported_after_its_last_words(rig: Rig) -> None:
    worker = rig.joined("anna")
    worker.send(b"last words")
    worker.close()
    message, left = rig.events(2)
    assert message == Message(worker.worker, b"last words")
    assert isinstance(left, Left)
    assert left.worker == worker.worker
    rig.learner.send(worker.worker, b"to nobody")
    assert rig.learner.receive(0.0) == []


def test_sending_to_a_worker_that_never_was_does_nothing(rig: Rig) -> None:
    rig.learner.send(123_456, b"x")
    rig.learner.dismiss(123_456, "no reason")
    assert rig.learner.receive(0.0) == []


def test_rejoining_gives_a_new_epoch(rig: Rig) -> None:
    first = rig.joined("anna")
    first.close()
    assert isinstance(rig.events(1)[0], Left)
    second = rig.joined("anna")
    assert second.worker > first.worker
    rig.learner.publish(1, b"weights")
    rig.learner.send(second.worker, b"order", version=1)
    assert payload(second) == b"order"
    assert second.snapshot(1) == b"weights"


def test_a_dismissed_worker_is_not_heard_and_has_to_rejoin(rig: Rig) -> None:
    worker = rig.joined("anna")
    worker.send(b"too late")
    rig.learner.dismiss(worker.worker, "took too long")
    with pytest.raises(ConnectionLost, match="took too long"):
        worker.receive(5.0)
    with pytest.raises(ConnectionLost):
        worker.send(b"even later")
    assert rig.learner.receive(0.0) == []
    wait_until(lambda: rig.learner.counters["frames_rejected"] >= 1)
    again = rig.joined("anna")
    assert again.worker > worker.worker
    again.send(b"here")
    assert rig.events(1) == [Message(again.worker, b"here")]


def test_dismissing_one_leaves_the_others_alone(rig: Rig) -> None:
    anna, ben = rig.joined("anna"), rig.joined("ben")
    rig.learner.dismiss(anna.worker, "test")
    rig.learner.send(ben.worker, b"order")
    assert payload(ben) == b"order"
    ben.send(b"result")
    assert rig.events(1) == [Message(ben.worker, b"result")]
