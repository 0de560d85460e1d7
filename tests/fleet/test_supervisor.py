"""Workers are restarted with back-off, and a fleet that only crashes ends the run with its last words."""

from __future__ import annotations

import pytest

from regatta.errors import EnvError
from regatta.fleet.base import Exited
from regatta.fleet.supervisor import CRASH_WINDOW_S, LAST_WORDS_S, MAX_CRASHES, Supervisor


class Harbour:
    """A fleet whose processes are names; `sink` ends one."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.started: list[str] = []
        self._exited: list[Exited] = []

    def start(self, name: str) -> None:
        assert name not in self.running
        self.running[name] = len(self.started)
        self.started.append(name)

    def sink(self, name: str, code: int = 1, words: str = "glug") -> None:
        del self.running[name]
        self._exited.append(Exited(name, code, words))

    def pids(self) -> dict[str, int]:
        return dict(self.running)

    def poll(self) -> list[Exited]:
        exited, self._exited = self._exited, []
        return exited

    def stop(self, name: str | None = None, grace_s: float = 1.0) -> None:
        for gone in [n for n in self.running if name in (None, n)]:
            del self.running[gone]


def test_a_first_end_is_made_good_at_once_and_later_ones_after_growing_pauses() -> None:
    harbour = Harbour()
    supervisor = Supervisor(harbour, 1)
    supervisor.start()
    now, pauses = 0.0, []
    for _ in range(4):
        harbour.sink("worker-0", code=-9)
        supervisor.step(now)
        began = now
        while not harbour.running:
            now += 0.05
            supervisor.step(now)
        pauses.append(now - began)
    assert pauses == pytest.approx([0.0, 0.25, 0.5, 1.0], abs=0.06)
    assert supervisor.restarts == 4


def test_a_result_makes_a_worker_healthy_again() -> None:
    harbour = Harbour()
    supervisor = Supervisor(harbour, 1, max_failures=2)
    supervisor.start()
    for turn in range(10):
        harbour.sink("worker-0", code=-9)
        supervisor.step(float(turn))
        supervisor.healthy("worker-0")


def test_ends_without_a_result_between_end_the_run_with_the_last_words() -> None:
    harbour = Harbour()
    supervisor = Supervisor(harbour, 2, max_failures=2)
    supervisor.start()
    for turn in range(2):
        harbour.sink("worker-1", code=-9)
        supervisor.step(100.0 * turn)
        supervisor.step(100.0 * turn + 50)
    harbour.sink("worker-1", code=-9)
    with pytest.raises(EnvError, match=r"worker-1 ended 3 times in a row(.|\n)*glug"):
        supervisor.step(300.0)


def test_crashes_close_together_end_the_run_though_results_came_between() -> None:
    harbour = Harbour()
    supervisor = Supervisor(harbour, 1)
    supervisor.start()
    for turn in range(MAX_CRASHES):
        harbour.sink("worker-0", code=7)
        supervisor.step(float(turn))
        supervisor.healthy("worker-0")
    harbour.sink("worker-0", code=7)
    with pytest.raises(EnvError, match=rf"crashed {MAX_CRASHES + 1} times(.|\n)*glug"):
        supervisor.step(float(MAX_CRASHES))


@pytest.mark.parametrize(("code", "pause_s"), [(-9, 1.0), (-15, 1.0), (7, CRASH_WINDOW_S)])
def test_kills_and_rare_crashes_do_not(code: int, pause_s: float) -> None:
    harbour = Harbour()
    supervisor = Supervisor(harbour, 1)
    supervisor.start()
    for turn in range(5 * MAX_CRASHES):
        harbour.sink("worker-0", code=code)
        supervisor.step(pause_s * turn)
        supervisor.healthy("worker-0")
    assert supervisor.restarts == 5 * MAX_CRASHES


def test_one_out_of_reach_gets_time_for_its_last_words_and_is_then_replaced() -> None:
    harbour = Harbour()
    supervisor = Supervisor(harbour, 1)
    supervisor.start()
    supervisor.replace("worker-0", 10.0)
    supervisor.replace("a stranger", 10.0)
    assert supervisor.step(10.0 + LAST_WORDS_S / 2) == []
    [exited] = supervisor.step(10.0 + LAST_WORDS_S)
    assert exited.name == "worker-0"
    assert harbour.started == ["worker-0", "worker-0"]


def test_a_supervisor_of_nothing() -> None:
    supervisor = Supervisor()
    supervisor.start()
    assert supervisor.step(0.0) == []
    supervisor.replace("worker-0", 0.0)
    supervisor.healthy("worker-0")
    supervisor.stop()
