"""The scheduler: which worker holds which lane, which orders are out, who is late, what is accepted.

Events in, instructions out: no IO, no clock (time is an argument), no knowledge of what an order asks for.
Two rules carry the weight. An order is accepted once, and only from the worker it was last given to. A worker
that holds orders and sends nothing for `timeout_s` loses them to another, and its late answers are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

import msgspec
from msgspec import Meta

FIRST_TIMEOUT_S = 60.0  # before any result has shown how long an order takes
LEAST_TIMEOUT_S = 5.0
TIMEOUT_FACTOR = 8.0  # a worker eight times slower than usual is late
MAX_DOUBLINGS = 8
QUEUED = 2  # orders given ahead to one worker where any other could take them: the next one is there when it is done


class CrewConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How patient the learner is with its workers."""

    order_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="a worker silent on an order this long loses it; none: 8 times the usual, at least 5 s"),
    ] = None
    max_failures: Annotated[
        int,
        Meta(ge=1, description="how often one order, or one worker after another, may fail before the run ends"),
    ] = 5


class Assignment(msgspec.Struct, frozen=True):
    """Give this order to this worker. `fresh`: it does not hold the order's lane yet."""

    worker: int
    order: int
    fresh: bool


class _Order(msgspec.Struct):
    lane: int | None
    work: float
    worker: int | None = None
    waiting: bool = True  # to be assigned, for the first time or again
    failed_by: list[int] = msgspec.field(default_factory=list)


class _Worker(msgspec.Struct):
    since: float  # its last sign of progress, or when it got work after having none
    orders: OrderedDict[int, None] = msgspec.field(default_factory=OrderedDict)
    lanes: set[int] = msgspec.field(default_factory=set)
    late: bool = False
    doublings: int = 0


class Crew:
    """`eager`: a lane may move whenever that evens the load; otherwise only when nobody holds it.

    `queued`: orders for lanes are given out as workers get to them, like orders for none, and not all at once.
    """

    def __init__(self, config: CrewConfig, eager: bool = True, queued: bool = False) -> None:
        self._config = config
        self._eager = eager
        self._queued = queued
        self._orders: OrderedDict[int, _Order] = OrderedDict()
        self._workers: dict[int, _Worker] = {}
        self._pace_s: float | None = None  # seconds per unit of work, smoothed
        self.dropped = 0
        self.moved = 0  # lanes taken from one worker that held them for another

    # -- events -------------------------------------------------------------------------------------------

    def joined(self, worker: int, now: float) -> None:
        self._workers.setdefault(worker, _Worker(since=now))

    def left(self, worker: int, now: float) -> list[int]:
        """The orders it held, now waiting again."""
        gone = self._workers.pop(worker, None)
        for order in self._orders.values():
            if order.worker == worker:
                order.worker, order.waiting = None, True
        return [] if gone is None else list(gone.orders)

    def submit(self, order: int, lane: int | None, work: float) -> None:
        """A new order; no two orders for the same lane may be out at once."""
        self._orders[order] = _Order(lane=lane, work=work)

    def result(self, worker: int, order: int, now: float) -> bool:
        """Whether to accept what this worker sent for this order."""
        self.forgive(worker)
        holder = self._workers.get(worker)
        found = self._orders.get(order)
        if holder is None or found is None or found.worker != worker:
            self.dropped += 1
            return False
        pace_s = (now - holder.since) / max(found.work, 1e-9)
        if self._pace_s is not None:  # one that was stopped for an hour says little about the next
            pace_s = 0.8 * self._pace_s + 0.2 * min(pace_s, TIMEOUT_FACTOR * self._pace_s)
        self._pace_s = pace_s
        if found.lane is not None and found.lane not in holder.lanes:
            self._hold(found.lane, worker)  # lanes were released meanwhile
        del holder.orders[order]
        holder.since = now
        holder.doublings = 0
        del self._orders[order]
        return True

    def failed(self, worker: int, order: int, now: float) -> int | None:
        """This worker could not do it. How often that order has failed now, or None if it was not its to do."""
        self.forgive(worker)
        holder = self._workers.get(worker)
        found = self._orders.get(order)
        if holder is None or found is None or found.worker != worker:
            self.dropped += 1
            return None
        holder.since = now
        del holder.orders[order]
        if found.lane is not None:
            holder.lanes.discard(found.lane)
        found.worker, found.waiting = None, True
        found.failed_by.append(worker)
        return len(found.failed_by)

    def forgive(self, worker: int) -> None:
        """It spoke, about whatever: it may have work again, and what nobody else got meanwhile is still its own.

        Those orders are not sent again: a worker slower than its deadline would pile up copies without end.
        """
        found = self._workers.get(worker)
        if found is None or not found.late:
            return
        found.late = False
        for number, order in self._orders.items():
            if order.waiting and order.worker == worker:
                order.waiting = False
                found.orders[number] = None
                if order.lane is not None:
                    self._hold(order.lane, worker)

    def release_lanes(self) -> None:
        """Every lane starts anew: whoever is free may take any."""
        for worker in self._workers.values():
            worker.lanes.clear()

    # -- instructions -------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[int]:
        """Workers that have just become late; their orders are waiting again."""
        late = []
        for number, worker in self._workers.items():
            if worker.orders and not worker.late and now >= self._deadline(worker):
                worker.late = True
                worker.doublings = min(worker.doublings + 1, MAX_DOUBLINGS)
                for order in worker.orders:  # its answers still count until another gets them
                    self._orders[order].waiting = True
                worker.orders.clear()
                worker.lanes.clear()
                late.append(number)
        return late

    def assign(self, now: float) -> list[Assignment]:
        """Who does what of all that is waiting."""
        assignments = []
        for number, order in self._orders.items():
            if not order.waiting:
                continue
            worker = self._choose(order)
            if worker is None:
                continue
            holder = self._workers[worker]
            fresh = order.lane is not None and order.lane not in holder.lanes
            if order.lane is not None and fresh:
                self._hold(order.lane, worker)
            if not holder.orders:
                holder.since = now
            holder.orders[number] = None
            order.worker, order.waiting = worker, False
            assignments.append(Assignment(worker, number, fresh))
        return assignments

    def next_deadline(self) -> float | None:
        """When `expire` should be asked again; None while nobody can be late."""
        deadlines = [self._deadline(w) for w in self._workers.values() if w.orders and not w.late]
        return min(deadlines, default=None)

    def add_work(self, order: int, work: float) -> None:
        """The order takes longer than it was said to: its worker has to catch up first."""
        self._orders[order].work += work

    # -- what is so ---------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> list[int]:
        return list(self._orders)

    @property
    def workers(self) -> list[int]:
        return list(self._workers)

    def standing(self, worker: int) -> str:
        """'late', 'busy' or 'idle'."""
        found = self._workers[worker]
        return "late" if found.late else "busy" if found.orders else "idle"

    def lanes_of(self, worker: int) -> list[int]:
        return sorted(self._workers[worker].lanes)

    # -- inside -------------------------------------------------------------------------------------------

    def _hold(self, lane: int, worker: int) -> None:
        for other in self._workers.values():
            if lane in other.lanes:
                other.lanes.discard(lane)
                self.moved += 1
        self._workers[worker].lanes.add(lane)

    def _choose(self, order: _Order) -> int | None:
        ready = {n: w for n, w in self._workers.items() if not w.late}
        if not ready:
            return None
        ready = {n: w for n, w in ready.items() if n not in order.failed_by} or ready
        if order.lane is None:
            least = min(ready, key=lambda n: (len(ready[n].orders), n))
            return least if len(ready[least].orders) < QUEUED else None
        chosen = self._holder(order.lane, ready)
        return None if self._queued and len(ready[chosen].orders) >= QUEUED else chosen

    def _holder(self, lane: int, ready: dict[int, _Worker]) -> int:
        least = min(ready, key=lambda n: (len(ready[n].lanes), n))
        for number, worker in ready.items():
            if lane in worker.lanes:
                uneven = len(worker.lanes) - len(ready[least].lanes) >= 2
                return least if uneven and self._eager else number
        return least

    def _deadline(self, worker: _Worker) -> float:
        if self._config.order_timeout_s is not None:
            timeout_s = self._config.order_timeout_s
        elif self._pace_s is None:
            timeout_s = FIRST_TIMEOUT_S
        else:
            work = max(self._orders[number].work for number in worker.orders)
            timeout_s = max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * self._pace_s * work)
        return worker.since + timeout_s * float(2**worker.doublings)
