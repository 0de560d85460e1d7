"""The writing end of a run, held by the learner. Nothing here waits for the store once the run is open, but for one
case: blocks of checkpoints that come faster than the store takes them, of which only so many bytes are held in memory.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from regatta.errors import NotFound, RunNotFound, StoreError, UsageError
from regatta.runs import facts
from regatta.runs.checkpoint import (
    Block,
    Checkpoint,
    encode_block,
    encode_checkpoint,
    prune,
    remove_after,
    remove_unnamed_blocks,
    stored_blocks,
    write_blocks,
    write_checkpoint,
)
from regatta.runs.journal import Journal
from regatta.runs.layout import (
    EPISODES,
    LOST_AFTER_S,
    METRICS,
    RUN,
    STATUS,
    Json,
    State,
    Status,
    age_s,
    block_key,
    encode_record,
    iso,
    plain,
    run_key,
    utc_now,
)
from regatta.runs.names import candidates, check_name
from regatta.runs.saver import Saver, SaverState
from regatta.store.base import Store
from regatta.types import Arrays

SAVE_EVERY_S = 2.0
ROW_EVERY_S = 0.1
WAITING_BLOCK_BYTES = 1 << 30  # of blocks that are not in the store yet, on top of what they were copied from
BLOCKS_TIMEOUT_S = 30.0
# Where these stand is what a row is about; of everything else it tells the mean since the row before.
COUNTERS = frozenset({"iteration", "steps", "episodes", "version", "wall_s", "restarts", "results_dropped"})


class RunWriter:
    """Made by `create` or `resume`. For one thread, the learner's; saving happens on the saver's."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        status: Status,
        journals: tuple[Journal, Journal],
        keep: int,
        blocks: dict[str, Block] | None = None,
    ) -> None:
        self.id = run_id
        self._store = store
        self._keep = keep
        self._metrics, self._episodes = journals
        self._row = _MeanRow()
        self._row_at = 0.0
        self._status = status
        self._status_lock = threading.Lock()
        self._segments_dropped = 0
        self._blocks: dict[str, Block] = blocks or {}  # of the newest checkpoint
        # Of all checkpoints still to be written: the saver works on one while two wait, and one is being made.
        self._unwritten: deque[Mapping[str, Block]] = deque(maxlen=4)
        self._blocks_lock = threading.Lock()
        self._given_up = 0
        self._missing: str | None = None  # why the newest checkpoint was given up
        self._told: list[str] = []
        self._saver = Saver()
        self._saver.repeat("metrics", SAVE_EVERY_S, self._metrics.save)
        self._saver.repeat("episodes", SAVE_EVERY_S, self._episodes.save)
        self._saver.repeat("status", SAVE_EVERY_S, self._save_status)

    @classmethod
    def create(
        cls,
        store: Store,
        *,
        preset: str,
        config: dict[str, Json],
        command: list[str],
        name: str | None = None,
        keep: int = 3,
    ) -> RunWriter:
        """A new run, under `name` or one of our own. Raises UsageError if the name is taken."""
        if name is not None:
            check_name(name)
        gathered = facts.gather(preset, config, command)
        for run_id in candidates(preset) if name is None else [name]:
            record = encode_record(msgspec.structs.replace(gathered, id=run_id))
            if store.put_new(run_key(run_id, RUN), record):
                # No sweep: it would take away what others who want the same name are writing just now.
                journals = (Journal.fresh(store, run_id, METRICS), Journal.fresh(store, run_id, EPISODES))
                status = _here(Status())
                _put_status(store, run_id, status)
                return cls(store, run_id, status, journals, keep)
        raise _taken(store, name)

    @classmethod
    def resume(cls, store: Store, run_id: str, *, after: int, keep: int = 3, force: bool = False) -> RunWriter:
        """Go on with a run after iteration `after` (0: from the start), forgetting what lies beyond it.

        Refuses while another learner seems to be writing it, unless `force`.
        """
        status = _stored_status(store, run_id)
        if not force:
            _check_free(run_id, status)
        store.sweep(run_id)
        remove_after(store, run_id, after)
        blocks = stored_blocks(store, run_id, after)  # by name alone others must not count: theirs was another future
        journals = (
            Journal.resumed(store, run_id, METRICS, after),
            Journal.resumed(store, run_id, EPISODES, after),
        )
        status = _here(msgspec.structs.replace(status, status="running", error=None, weights_sha256=None))
        _put_status(store, run_id, status)
        return cls(store, run_id, status, journals, keep, blocks)

    def metrics(self, row: Mapping[str, Json]) -> None:
        """One row, with its `iteration`. At most ten a second are kept; those between are averaged."""
        self._row.add(row)
        now = time.monotonic()
        if now - self._row_at >= ROW_EVERY_S:
            self._row_at = now
            self._metrics.append(self._row.take())

    def episodes(self, rows: Iterable[Mapping[str, Json]]) -> None:
        """Finished episodes, each with its `iteration`."""
        self._episodes.extend(rows)

    def status(self, **fields: Any) -> None:
        """Fields of `layout.Status` that have changed; written within seconds."""
        with self._status_lock:
            self._status = msgspec.structs.replace(self._status, **fields)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Save it soon, with every row up to here in the store before it; then prune the older ones."""
        if not self._take_blocks(checkpoint.blocks):
            self._given_up += 1
            self._missing = f"checkpoint {checkpoint.iteration} was given up"
            if self.saving().failing is None:  # of failures the saver tells
                self._told.append(f"{self._missing}: its blocks were not all saved after {BLOCKS_TIMEOUT_S:.0f} s")
            return
        self._missing = None
        encoded = encode_checkpoint(checkpoint, self._blocks)
        self._finish_row()

        def save() -> None:
            # A row that is only in memory when its checkpoint is resumed from would be missing for good.
            self._metrics.save()
            self._episodes.save()
            try:
                write_checkpoint(self._store, self.id, encoded)
            except StoreError:
                with suppress(StoreError):  # or a full disk would stay full of what given up checkpoints have left
                    remove_unnamed_blocks(self._store, self.id, self._awaited_blocks())
                raise
            self._written(encoded.blocks)
            prune(self._store, self.id, self._keep, self._awaited_blocks())

        self._saver.enqueue("checkpoint", save)

    def _take_blocks(self, blocks: dict[str, Arrays]) -> bool:
        """Encode those that are new; False if too many wait already and the store does not take them."""
        before = self._blocks
        self._blocks = taken = {name: before[name] for name in blocks if name in before}
        with self._blocks_lock:
            if self._missing is not None:
                self._unwritten.pop()  # of the one given up, which nobody waits for
            self._unwritten.append(taken)
        waiting = self._waiting_bytes()
        for name, arrays in blocks.items():
            if name in taken:
                continue
            if waiting > WAITING_BLOCK_BYTES:
                if not self._write_waiting():
                    return False
                waiting = 0
            block = encode_block(name, arrays)
            waiting += block.waiting_bytes
            with self._blocks_lock:
                taken[name] = block
        return True

    def _waiting_bytes(self) -> int:
        with self._blocks_lock:
            return sum(block.waiting_bytes for block in {b for some in self._unwritten for b in some.values()})

    def _write_waiting(self) -> bool:
        """Have all blocks written before the checkpoints they belong to; False if that does not work out."""
        if self.saving().failing is not None:
            return False
        with self._blocks_lock:
            unwritten = [dict(some) for some in self._unwritten]

        def write() -> None:
            for some in unwritten:
                write_blocks(self._store, self.id, some)

        self._saver.submit("blocks", write)
        deadline = time.monotonic() + BLOCKS_TIMEOUT_S
        while self._waiting_bytes():
            if self.saving().failing is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _written(self, blocks: Mapping[str, Block]) -> None:
        """A checkpoint with these is in the store; those before it will not come any more."""
        with self._blocks_lock:
            if any(some is blocks for some in self._unwritten):
                while self._unwritten.popleft() is not blocks:
                    pass

    def _awaited_blocks(self) -> set[str]:
        """Keys of blocks in the store that are named by no manifest yet but will be."""
        with self._blocks_lock:
            stored = [(name, block.stored) for some in self._unwritten for name, block in some.items()]
        return {block_key(self.id, name, block.sha256) for name, block in stored if block is not None}

    def flush(self, timeout_s: float = 0.0) -> bool:
        """Save everything now rather than soon; with a timeout, wait for it. Whether it is all saved."""
        self._finish_row()
        self._saver.submit("metrics", self._metrics.save)
        self._saver.submit("episodes", self._episodes.save)
        self._saver.submit("status", self._save_status)
        return timeout_s > 0 and self._saver.drain(timeout_s)

    def warnings(self) -> list[str]:
        """What to tell the user about saving since the last call."""
        told, self._told = [*self._saver.warnings(), *self._told], []
        dropped = self._metrics.dropped_segments + self._episodes.dropped_segments
        if dropped > self._segments_dropped:
            self._segments_dropped = dropped
            told.append("the store has failed for so long that the oldest unsaved metrics were dropped")
        return told

    def saving(self) -> SaverState:
        return self._saver.state()

    def close(self, status: State, error: str | None = None, timeout_s: float = 30.0) -> bool:
        """Save what is left and end with this status. False if not everything could be saved."""
        saved = False
        try:
            saved = self.flush(timeout_s) and self._missing is None
        finally:
            failing = self.saving().failing or self._missing or "out of time"
            self._saver.stop()
            lost = [] if saved else [f"not everything could be saved: {failing}"]
            if lost and status == "done":
                status, error = "failed", lost[0]  # so that it can be resumed once there is room
            self.status(status=status, error=error, warnings=[*self._status.warnings, *lost])
            try:
                self._save_status()
            except StoreError:
                saved = False
        return saved

    def _finish_row(self) -> None:
        if self._row:
            self._row_at = time.monotonic()
            self._metrics.append(self._row.take())

    def _save_status(self) -> None:
        with self._status_lock:
            status = self._status
        dropped = status.checkpoints_dropped + self._saver.state().dropped + self._given_up
        _put_status(self._store, self.id, msgspec.structs.replace(status, checkpoints_dropped=dropped))


def refuse_taken(store: Store, name: str) -> None:
    """Early, before anything starts; `create` makes sure."""
    if check_name(name) in store.folders():
        raise _taken(store, name)


def _taken(store: Store, name: str | None) -> UsageError:
    return UsageError(
        f"run {name!r} already exists in {store.location}; "
        f"choose another --name, or go on with it: regatta resume {name}"
    )


class _MeanRow:
    """Rows on their way to becoming one: means of numbers, last values of counters and of anything else."""

    def __init__(self) -> None:
        self._last: dict[str, Json] = {}
        self._sums: dict[str, tuple[float, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._last)

    def add(self, row: Mapping[str, Json]) -> None:
        for key, value in row.items():
            kind = type(value)
            if kind is not float and kind is not int and hasattr(value, "item"):
                value = plain(value)
                kind = type(value)
            if value is None:
                continue
            if (kind is float or kind is int) and key not in COUNTERS:
                total, count = self._sums.get(key, (0, 0))
                self._sums[key] = (total + value, count + 1)
            self._last[key] = value

    def take(self) -> dict[str, Json]:
        row = self._last
        for key, (total, count) in self._sums.items():
            if count > 1:
                row[key] = total / count
        self._last, self._sums = {}, {}
        return row


def _here(status: Status) -> Status:
    return msgspec.structs.replace(status, host=socket.gethostname(), pid=os.getpid())


def _put_status(store: Store, run_id: str, status: Status) -> None:
    record = msgspec.structs.replace(status, updated=iso(utc_now()))
    store.put(run_key(run_id, STATUS), encode_record(record))


def _stored_status(store: Store, run_id: str) -> Status:
    try:
        store.get(run_key(run_id, RUN))
    except NotFound as error:
        raise RunNotFound(f"no run {run_id!r} in {store.location}; `regatta runs` lists all") from error
    try:
        return msgspec.json.decode(store.get(run_key(run_id, STATUS)), type=Status)
    except (NotFound, msgspec.DecodeError, UnicodeDecodeError):
        return Status(status="failed")


def _check_free(run_id: str, status: Status) -> None:
    age = age_s(status.updated, utc_now())
    if status.status != "running" or age > LOST_AFTER_S:
        return
    if status.host == socket.gethostname() and not _alive(status.pid):
        return
    raise UsageError(
        f"run {run_id} is being trained by process {status.pid} on {status.host}, "
        f"last heard of {age:.0f} s ago; stop it first, or if it is gone wait until it has been silent "
        f"for {LOST_AFTER_S:.0f} s"
    )


def _alive(pid: int) -> bool:
    if pid <= 0 or pid == os.getpid():  # in a restarted container the pid of the one before is ours
        return False
    if os.name == "nt":  # there `kill` would end it; let the silence decide
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
