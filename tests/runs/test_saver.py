from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from regatta.errors import StoreError
from regatta.runs.saver import Saver


@pytest.fixture
def saver() -> Iterator[Saver]:
    saver = Saver(first_retry_s=0.02, last_retry_s=0.1)
    yield saver
    saver.stop()


class Gate:
    """A job that holds the saver's thread until told."""

    def __init__(self, saver: Saver) -> None:
        self.open = threading.Event()
        begun = threading.Event()

        def hold() -> None:
            begun.set()
            assert self.open.wait(5)

        saver.submit("gate", hold)
        assert begun.wait(5)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_jobs_run_in_order(saver: Saver) -> None:
    done: list[int] = []
    for i in range(20):
        saver.submit(f"label {i}", lambda i=i: done.append(i))  # type: ignore[misc]
    assert saver.drain(5)
    assert done == list(range(20))
    assert saver.state() == (0, None, 0, 0)


def test_a_newer_job_replaces_one_that_has_not_begun(saver: Saver) -> None:
    done: list[str] = []
    gate = Gate(saver)
    saver.submit("status", lambda: done.append("status 1"))
    saver.submit("other", lambda: done.append("other"))
    saver.submit("status", lambda: done.append("status 2"))
    assert saver.state().pending == 3
    gate.open.set()
    assert saver.drain(5)
    assert done == ["status 2", "other"]  # in the turn of the one it replaces
    assert saver.state().dropped == 0


def test_queued_jobs_are_bounded_and_counted(saver: Saver) -> None:
    done: list[int] = []
    gate = Gate(saver)
    for i in range(5):
        saver.enqueue("checkpoint", lambda i=i: done.append(i), limit=2)  # type: ignore[misc]
    gate.open.set()
    assert saver.drain(5)
    assert done == [3, 4]
    assert saver.state().dropped == 3


def test_submitting_never_waits(saver: Saver) -> None:
    gate = Gate(saver)
    begin = time.monotonic()
    for _ in range(1_000):
        saver.enqueue("checkpoint", lambda: None)
        saver.submit("status", lambda: None)
    assert time.monotonic() - begin < 1.0
    assert saver.state().pending == 4
    gate.open.set()


def test_failures_are_retried_and_told_once(saver: Saver) -> None:
    attempts: list[float] = []
    done: list[str] = []
    full = True

    def job() -> None:
        attempts.append(time.monotonic())
        if full:
            raise StoreError("cannot write k to /x: No space left on device")
        done.append("job")

    saver.submit("a", job)
    saver.enqueue("b", job)
    until(lambda: len(attempts) >= 6)
    state = saver.state()
    assert state.failing == "cannot write k to /x: No space left on device"
    assert state.failures >= 6
    saver.submit("healthy", lambda: done.append("healthy"))
    until(lambda: done == ["healthy"])
    assert not saver.drain(0.05)
    full = False
    assert saver.drain(5)
    assert sorted(done) == ["healthy", "job", "job"]
    assert saver.warnings() == [
        "cannot write k to /x: No space left on device; training goes on, will try again",
        "saving works again",
    ]
    assert saver.warnings() == []
    assert saver.state()[:2] == (0, None)


def test_back_off_doubles_up_to_the_limit(saver: Saver) -> None:
    attempts: list[float] = []

    def job() -> None:
        attempts.append(time.monotonic())
        raise StoreError("no")

    saver.submit("a", job)
    until(lambda: len(attempts) >= 7)
    gaps = [later - earlier for earlier, later in pairwise(attempts)]
    for gap, least in zip(gaps, [0.02, 0.04, 0.08, 0.1, 0.1, 0.1], strict=False):
        assert gap >= least


def test_a_failing_job_gives_way_to_newer_ones(saver: Saver) -> None:
    tried: list[int] = []
    full = True

    def job(i: int) -> None:
        tried.append(i)
        if full:
            raise StoreError("full")

    for i in range(6):
        saver.enqueue("checkpoint", lambda i=i: job(i), limit=2)  # type: ignore[misc]
        saver.submit("status", lambda i=i: job(100 + i))  # type: ignore[misc]
        until(lambda i=i: 100 + i in tried)  # type: ignore[misc]
    until(lambda: saver.state().pending == 3)
    full = False
    tried.clear()
    assert saver.drain(5)
    assert tried == [105, 4, 5] or tried == [4, 5, 105] or tried == [4, 105, 5]
    assert saver.state().dropped == 4


def test_repeated_jobs(saver: Saver) -> None:
    beats: list[float] = []
    saver.repeat("status", 0.02, lambda: beats.append(time.monotonic()))
    until(lambda: len(beats) >= 5)
    assert beats[4] - beats[0] >= 0.07
    saver.stop()
    count = len(beats)
    time.sleep(0.06)
    assert len(beats) == count


def test_our_own_mistakes_reach_the_caller(saver: Saver) -> None:
    def job() -> None:
        raise KeyError("bug")

    saver.submit("a", job)
    with pytest.raises(KeyError, match="bug"):
        saver.drain(5)
    done: list[int] = []
    saver.submit("a", lambda: done.append(1))
    assert saver.drain(5)
    assert done == [1]
