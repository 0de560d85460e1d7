"""The scheduler against a model of what it promises, and a few cases worth reading one by one."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from regatta.crew import (
    FIRST_TIMEOUT_S,
    LEAST_TIMEOUT_S,
    MAX_DOUBLINGS,
    QUEUED,
    TIMEOUT_FACTOR,
    Assignment,
    Crew,
    CrewConfig,
)

WORKERS = st.integers(0, 11)  # some of them never joined
ORDERS = st.integers(0, 30)  # some of them never submitted


class AnyCrew(RuleBasedStateMachine):
    """Workers join, leave, hang, answer, repeat, fail and lie; the model keeps who may still be believed."""

    @initialize(eager=st.booleans(), queued=st.booleans(), timeout_s=st.sampled_from([None, 0.5, 7.0]))
    def start(self, eager: bool, queued: bool, timeout_s: float | None) -> None:
        self.crew = Crew(CrewConfig(order_timeout_s=timeout_s), eager=eager, queued=queued)
        self.eager, self.queued = eager, queued
        self.now = 0.0
        self.next_worker = 0
        self.next_order = 0
        self.lane: dict[int, int | None] = {}  # of each outstanding order
        self.claim: dict[int, int | None] = {}  # who an outstanding order was last given to
        self.waiting: set[int] = set()
        self.late: set[int] = set()
        self.workers: set[int] = set()
        self.taken_over: dict[int, set[int]] = {}  # order: workers that lost it to another
        self.accepted: set[int] = set()
        self.failures: dict[int, int] = {}
        self.dropped = 0

    def heard(self, worker: int) -> None:
        if worker in self.late:
            self.late.discard(worker)
            self.waiting -= {order for order, claimant in self.claim.items() if claimant == worker}

    def may_answer(self, worker: int, order: int) -> bool:
        return worker in self.workers and order in self.lane and self.claim[order] == worker

    def forget(self, order: int) -> None:
        del self.lane[order], self.claim[order]
        self.waiting.discard(order)

    # -- what may happen ----------------------------------------------------------------------------------

    @precondition(lambda self: self.next_worker < 10)
    @rule()
    def join(self) -> None:
        self.crew.joined(self.next_worker, self.now)
        self.workers.add(self.next_worker)
        self.next_worker += 1

    @rule(worker=WORKERS)
    def join_again(self, worker: int) -> None:
        if worker in self.workers:
            self.crew.joined(worker, self.now)

    @rule(worker=WORKERS)
    def leave(self, worker: int) -> None:
        held = {order for order, claimant in self.claim.items() if claimant == worker}
        released = self.crew.left(worker, self.now)
        assert set(released) == held - self.waiting
        self.workers.discard(worker)
        self.late.discard(worker)
        self.waiting |= held
        self.claim |= dict.fromkeys(held, None)

    @precondition(lambda self: self.next_order < 28)
    @rule(lane=st.none() | st.integers(0, 5), work=st.sampled_from([0.0, 1.0, 128.0]))
    def submit(self, lane: int | None, work: float) -> None:
        if lane is not None and lane in self.lane.values():
            return
        order, self.next_order = self.next_order, self.next_order + 1
        self.crew.submit(order, lane, work)
        self.lane[order], self.claim[order] = lane, None
        self.waiting.add(order)
        self.taken_over[order] = set()
        self.failures[order] = 0

    @rule()
    def assign(self) -> None:
        holding = {lane: worker for worker in self.workers for lane in self.crew.lanes_of(worker)}
        given = self.crew.assign(self.now)
        for one in given:
            assert one.order in self.waiting, "given out while another has it"
            assert one.worker in self.workers - self.late
            before = self.claim[one.order]
            if before is not None and before != one.worker:
                self.taken_over[one.order].add(before)
            self.taken_over[one.order].discard(one.worker)
            self.claim[one.order] = one.worker
            self.waiting.discard(one.order)
            lane = self.lane[one.order]
            if lane is None:
                assert not one.fresh
            else:
                assert one.fresh == (holding.get(lane) != one.worker)
                assert lane in self.crew.lanes_of(one.worker)
                if not self.eager:
                    assert holding.get(lane, one.worker) == one.worker
        ready = [self.held_by(worker) for worker in self.workers - self.late]
        for order in self.waiting:
            if self.lane[order] is None:
                assert all(held >= QUEUED for held in ready), "an order waits while a worker is ready"
            else:
                assert not ready or (self.queued and max(ready) >= QUEUED)

    def held_by(self, worker: int) -> int:
        return sum(claimant == worker and order not in self.waiting for order, claimant in self.claim.items())

    @rule(worker=WORKERS, order=ORDERS)
    def answer(self, worker: int, order: int) -> None:
        """Honest, repeated, late or a lie: whichever it happens to be."""
        expected = self.may_answer(worker, order)
        accepted = self.crew.result(worker, order, self.now)
        self.heard(worker)
        assert accepted == expected
        if accepted:
            assert order not in self.accepted
            assert worker not in self.taken_over[order]
            self.accepted.add(order)
            self.forget(order)
        else:
            self.dropped += 1

    @rule(data=st.data())
    def answer_honestly(self, data: st.DataObject) -> None:
        claims = sorted((order, worker) for order, worker in self.claim.items() if worker is not None)
        if claims:
            order, worker = data.draw(st.sampled_from(claims))
            self.answer(worker, order)
            assert order in self.accepted

    @rule(worker=WORKERS, order=ORDERS)
    def fail(self, worker: int, order: int) -> None:
        expected = self.may_answer(worker, order)
        failures = self.crew.failed(worker, order, self.now)
        self.heard(worker)
        if expected:
            self.failures[order] += 1
            assert failures == self.failures[order]
            self.claim[order] = None
            self.waiting.add(order)
        else:
            assert failures is None
            self.dropped += 1

    @rule(worker=WORKERS)
    def speak(self, worker: int) -> None:
        self.crew.forgive(worker)
        self.heard(worker)

    @rule(seconds=st.sampled_from([0.0, 0.1, 3.0, 70.0, 1e5]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.crew.expire(self.now):
            owed = {order for order, claimant in self.claim.items() if claimant == worker}
            assert worker in self.workers - self.late
            assert owed - self.waiting, "late without owing anything"
            self.late.add(worker)
            self.waiting |= owed
            assert self.crew.lanes_of(worker) == []

    @rule(order=ORDERS, work=st.sampled_from([1.0, 1e4]))
    def add_work(self, order: int, work: float) -> None:
        if order in self.lane:
            self.crew.add_work(order, work)

    @rule()
    def release_lanes(self) -> None:
        self.crew.release_lanes()
        assert all(self.crew.lanes_of(worker) == [] for worker in self.workers)

    # -- what always holds --------------------------------------------------------------------------------

    @invariant()
    def no_lane_has_two_holders(self) -> None:
        lanes = [lane for worker in self.workers for lane in self.crew.lanes_of(worker)]
        assert len(lanes) == len(set(lanes))

    @invariant()
    def the_books_agree(self) -> None:
        assert sorted(self.crew.outstanding) == sorted(self.lane)
        assert set(self.crew.workers) == self.workers
        assert self.crew.dropped == self.dropped
        assert self.eager or self.crew.moved == 0

    @invariant()
    def standings_agree(self) -> None:
        busy = {claimant for order, claimant in self.claim.items() if order not in self.waiting}
        for worker in self.workers:
            expected = "late" if worker in self.late else "busy" if worker in busy else "idle"
            assert self.crew.standing(worker) == expected

    @invariant()
    def every_debt_has_a_deadline(self) -> None:
        busy = any(self.crew.standing(worker) == "busy" for worker in self.workers)
        deadline = self.crew.next_deadline()
        assert (deadline is not None) == busy
        assert deadline is None or math.isfinite(deadline)

    def teardown(self) -> None:
        """Whatever has happened: one worker that answers is enough for everything to end."""
        if not hasattr(self, "crew"):
            return
        good = 1000
        self.crew.joined(good, self.now)
        self.workers.add(good)
        rounds = len(self.workers) + len(self.lane) + 1
        while self.lane and rounds:
            rounds -= 1
            self.wait(0.0)
            self.assign()
            for order in [order for order, claimant in self.claim.items() if claimant == good]:
                self.now += 0.1
                self.answer(good, order)
            if self.lane.keys() - self.waiting:
                deadline = self.crew.next_deadline()
                assert deadline is not None, "orders are out, and nobody will ever be late"
                self.wait(max(0.0, deadline - self.now))
        assert not self.lane


TestAnyCrew = AnyCrew.TestCase
TestAnyCrew.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


# -- examples ---------------------------------------------------------------------------------------------


def crew_of(workers: int, *, eager: bool = True, timeout_s: float | None = None) -> Crew:
    crew = Crew(CrewConfig(order_timeout_s=timeout_s), eager=eager)
    for worker in range(workers):
        crew.joined(worker, 0.0)
    return crew


def submit(crew: Crew, first: int, lanes: int) -> None:
    for lane in range(lanes):
        crew.submit(first + lane, lane, 1.0)


def finish(crew: Crew, given: list[Assignment], now: float) -> None:
    for one in given:
        assert crew.result(one.worker, one.order, now)


def test_lanes_spread_evenly_and_stay() -> None:
    crew = crew_of(3)
    submit(crew, 0, 8)
    first = crew.assign(0.0)
    assert sorted(len(crew.lanes_of(worker)) for worker in range(3)) == [2, 3, 3]
    assert all(one.fresh for one in first)
    finish(crew, first, 1.0)
    submit(crew, 8, 8)
    second = crew.assign(1.0)
    assert [one.worker for one in second] == [one.worker for one in first]
    assert not any(one.fresh for one in second)
    assert crew.moved == 0


def test_a_newcomer_gets_lanes_once_that_evens_the_load() -> None:
    crew = crew_of(1)
    submit(crew, 0, 4)
    finish(crew, crew.assign(0.0), 1.0)
    crew.joined(1, 1.0)
    submit(crew, 4, 4)
    given = crew.assign(1.0)
    assert crew.lanes_of(0) == [2, 3]
    assert crew.lanes_of(1) == [0, 1]
    assert [one.fresh for one in given] == [True, True, False, False]
    assert crew.moved == 2


def test_one_lane_more_is_no_reason_to_move() -> None:
    crew = crew_of(2)
    submit(crew, 0, 3)
    finish(crew, crew.assign(0.0), 1.0)
    submit(crew, 3, 3)
    crew.assign(1.0)
    assert [len(crew.lanes_of(worker)) for worker in range(2)] == [2, 1]
    assert crew.moved == 0


def test_a_newcomer_waits_for_released_lanes_where_lanes_cannot_move() -> None:
    crew = crew_of(1, eager=False)
    submit(crew, 0, 4)
    finish(crew, crew.assign(0.0), 1.0)
    crew.joined(1, 1.0)
    submit(crew, 4, 4)
    finish(crew, crew.assign(1.0), 2.0)
    assert crew.lanes_of(0) == [0, 1, 2, 3]
    crew.release_lanes()
    submit(crew, 8, 4)
    assert all(one.fresh for one in crew.assign(2.0))
    assert [len(crew.lanes_of(worker)) for worker in range(2)] == [2, 2]


def test_orders_without_a_lane_go_to_the_least_busy() -> None:
    crew = crew_of(2)
    for order in range(4):
        crew.submit(order, None, 1.0)
    assert [one.worker for one in crew.assign(0.0)] == [0, 1, 0, 1]


def test_nothing_is_given_out_while_nobody_is_there() -> None:
    crew = crew_of(0)
    submit(crew, 0, 2)
    assert crew.assign(0.0) == []
    assert crew.next_deadline() is None
    crew.joined(0, 5.0)
    assert len(crew.assign(5.0)) == 2


def test_a_late_worker_is_believed_until_another_has_its_order() -> None:
    crew = crew_of(1, timeout_s=10.0)
    submit(crew, 0, 2)
    crew.assign(0.0)
    assert crew.next_deadline() == 10.0
    assert crew.expire(9.9) == []
    assert crew.expire(10.0) == [0]
    assert crew.standing(0) == "late"
    assert crew.result(0, 0, 11.0)
    assert crew.lanes_of(0) == [0, 1]
    assert crew.assign(11.0) == [], "it spoke, so the other order is still on its way"
    assert crew.expire(21.0) == [0]
    crew.joined(1, 22.0)
    assert crew.assign(22.0) == [Assignment(worker=1, order=1, fresh=True)]
    assert not crew.result(0, 1, 23.0)
    assert crew.dropped == 1
    assert crew.result(1, 1, 24.0)
    assert not crew.result(1, 1, 24.0), "a repeat"
    assert crew.dropped == 2


def test_a_late_worker_that_can_only_report_failure_gets_work_again() -> None:
    crew = crew_of(1, timeout_s=10.0)
    submit(crew, 0, 1)
    crew.assign(0.0)
    assert crew.expire(10.0) == [0]
    assert crew.failed(0, 0, 11.0) == 1
    assert crew.standing(0) == "idle"
    assert crew.assign(11.0) == [Assignment(worker=0, order=0, fresh=True)]


def test_a_failed_order_tries_another_worker_first() -> None:
    crew = crew_of(3)
    submit(crew, 0, 6)
    crew.assign(0.0)
    broken = next(worker for worker in range(3) if 0 in crew.lanes_of(worker))
    assert crew.failed(broken, 0, 1.0) == 1
    (second,) = crew.assign(1.0)
    assert second.worker != broken
    assert crew.failed(second.worker, 0, 1.0) == 2
    (third,) = crew.assign(1.0)
    assert third.worker not in (broken, second.worker)
    assert crew.failed(third.worker, 0, 1.0) == 3
    assert len(crew.assign(1.0)) == 1, "all have failed: any may try again"


def test_an_order_slower_than_its_deadline_is_not_sent_twice_to_the_only_worker() -> None:
    """The worker takes 100 s for each order, one after the other; the first deadline is 60 s."""
    crew = crew_of(1)
    submit(crew, 0, 4)
    queue = [one.order for one in crew.assign(0.0)]
    sent, now, accepted, lates = len(queue), 0.0, 0, 0
    while queue:
        done_at = now + 100.0
        while (deadline := crew.next_deadline()) is not None and deadline < done_at:
            lates += len(crew.expire(deadline))
            again = crew.assign(deadline)
            sent += len(again)
            queue += [one.order for one in again]
        now = done_at
        accepted += crew.result(0, queue.pop(0), now)
        again = crew.assign(now)
        sent += len(again)
        queue += [one.order for one in again]
    assert (accepted, sent, lates) == (4, 4, 1), "and one late answer teaches it the pace"


def test_patience_doubles_each_time_and_is_restored_by_an_answer() -> None:
    crew = crew_of(1, timeout_s=10.0)
    crew.submit(0, 0, 1.0)
    crew.assign(0.0)
    now = 0.0
    for doublings in range(MAX_DOUBLINGS + 3):
        deadline = crew.next_deadline()
        assert deadline is not None
        assert deadline - now == 10.0 * 2 ** min(doublings, MAX_DOUBLINGS)
        assert crew.expire(deadline) == [0]
        now = deadline
        assert crew.failed(0, 0, now) is not None
        crew.assign(now)
    assert crew.result(0, 0, now)
    crew.submit(1, 0, 1.0)
    crew.assign(now)
    assert crew.next_deadline() == now + 10.0


def test_timeouts_follow_the_pace_of_results() -> None:
    crew = crew_of(1)
    crew.submit(0, 0, work=100.0)
    crew.assign(0.0)
    assert crew.next_deadline() == FIRST_TIMEOUT_S
    assert crew.result(0, 0, 20.0)  # 0.2 s per unit of work
    crew.submit(1, 0, work=50.0)
    crew.assign(20.0)
    assert crew.next_deadline() == 20.0 + TIMEOUT_FACTOR * 0.2 * 50.0
    crew.add_work(1, 50.0)
    assert crew.next_deadline() == 20.0 + TIMEOUT_FACTOR * 0.2 * 100.0
    assert crew.result(0, 1, 20.0)
    crew.submit(2, 0, work=0.01)
    crew.assign(20.0)
    assert crew.next_deadline() == 20.0 + LEAST_TIMEOUT_S


def test_a_worker_with_a_queue_is_late_only_if_it_stops_answering() -> None:
    crew = crew_of(1, timeout_s=10.0)
    submit(crew, 0, 5)
    given = crew.assign(0.0)
    for i, one in enumerate(given):
        now = 8.0 * (i + 1)
        assert crew.expire(now) == []
        assert crew.result(one.worker, one.order, now)
    assert crew.next_deadline() is None


def test_a_leaver_gives_back_its_orders_at_once() -> None:
    crew = crew_of(2)
    submit(crew, 0, 4)
    crew.assign(0.0)
    assert crew.left(0, 1.0) == [0, 2]
    assert crew.left(0, 1.0) == []
    again = crew.assign(1.0)
    assert [(one.worker, one.order, one.fresh) for one in again] == [(1, 0, True), (1, 2, True)]
    assert not crew.result(0, 0, 2.0)


def test_a_late_worker_that_left_has_no_claim_under_its_old_number() -> None:
    crew = crew_of(1, timeout_s=10.0)
    submit(crew, 0, 1)
    crew.assign(0.0)
    crew.expire(10.0)
    crew.left(0, 11.0)
    crew.joined(0, 12.0)
    assert not crew.result(0, 0, 13.0)
    assert len(crew.assign(13.0)) == 1
    assert crew.result(0, 0, 14.0)
