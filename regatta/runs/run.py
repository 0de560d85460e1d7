"""The reading end of a run, and finding runs in a store. Also the knobs every run has."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import msgspec

from regatta.errors import NotFound, RunNotFound, StoreError, nearest
from regatta.runs.checkpoint import Checkpoint, Manifest, Which, list_checkpoints, load_checkpoint
from regatta.runs.journal import columns, read_journal
from regatta.runs.layout import EPISODES, METRICS, RUN, STATUS, Facts, Json, Status, run_key, utc_now
from regatta.runs.names import is_name
from regatta.runs.writer import RunWriter
from regatta.store.base import Store

if TYPE_CHECKING:
    from regatta.runs.agent import Agent

__all__ = ["Run", "RunConfig", "RunSummary", "RunWriter", "find_run", "list_runs"]


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The knobs of the run itself."""

    steps: Annotated[int, msgspec.Meta(ge=1, description="environment steps to train for")] = 100_000
    seed: Annotated[
        int, msgspec.Meta(ge=0, le=2**31 - 1, description="where all of the run's random numbers come from")
    ] = 0
    checkpoint_every: Annotated[
        int,
        msgspec.Meta(ge=1, description="steps between checkpoints, rounded up to whole iterations"),
    ] = 50_000
    keep: Annotated[int, msgspec.Meta(ge=1, description="checkpoints kept besides the best")] = 3


class Run:
    """One run as its store has it now; every method reads anew."""

    def __init__(self, store: Store, facts: Facts) -> None:
        self._store = store
        self.facts = facts

    def __repr__(self) -> str:
        return f"<Run {self.id} in {self._store.location}>"

    @property
    def id(self) -> str:
        return self.facts.id

    @property
    def config(self) -> dict[str, Json]:
        return self.facts.config

    @property
    def location(self) -> str:
        return f"{self._store.location.rstrip('/')}/{self.id}"

    def status(self) -> Status:
        """How it stands; `lost` if its learner has not been heard of for a while."""
        return _read_status(self._store, self.id)

    def metrics(self) -> dict[str, list[Json]]:
        """Columns of equal length, NaN where a row has no value."""
        return columns(read_journal(self._store, self.id, METRICS))

    def episodes(self) -> dict[str, list[Json]]:
        return columns(read_journal(self._store, self.id, EPISODES))

    def checkpoints(self) -> list[Manifest]:
        """All finished checkpoints, oldest first."""
        return list_checkpoints(self._store, self.id)

    def checkpoint(self, which: Which = "last", *, blocks: bool = True) -> tuple[Checkpoint, list[str]]:
        """A checkpoint that holds, and notes on newer ones that do not. A policy alone needs none of its blocks."""
        return load_checkpoint(self._store, self.id, which, blocks=blocks)

    def policy(self, which: Which = "last", allow: Collection[str] = ()) -> Agent:
        """The trained policy, ready to act in its environment: `run.policy().act(obs)`.

        `allow`: installed modules that the run's env.id may name; those in the current folder always may.
        """
        from regatta import named
        from regatta.rollout.envs import EnvConfig, refuse_foreign
        from regatta.runs.agent import Agent

        env = msgspec.convert(self.config["env"], EnvConfig)
        refuse_foreign(env, allow)
        checkpoint, _ = self.checkpoint(which, blocks=False)
        named.refuse_foreign("network.kind", checkpoint.state["policy"]["network"]["kind"], allow)
        return Agent(checkpoint, env)


class RunSummary(msgspec.Struct, frozen=True):
    """One line of a list of runs. `status` is a State, or `unreadable` with the `problem`."""

    id: str
    status: str
    preset: str = ""
    created: str = ""
    updated: str = ""
    steps: int = 0
    episodes: int = 0
    return_mean: float | None = None
    steps_per_s: float | None = None
    wall_s: float | None = None
    problem: str | None = None


def list_runs(store: Store) -> list[RunSummary]:
    """All runs, newest first; those that cannot be read come last."""
    names = [name for name in store.folders() if is_name(name)]
    if not names:
        return []
    with ThreadPoolExecutor(min(8, len(names)), thread_name_prefix="regatta-list") as pool:
        found = [summary for summary in pool.map(lambda name: _summary(store, name), names) if summary]
    return sorted(found, key=lambda summary: (summary.created, summary.id), reverse=True)


def find_run(store: Store, ref: str) -> Run:
    """By id, by the beginning of an id if only one begins so, or the newest: `last`."""
    if ref == "last":
        newest = next((summary for summary in list_runs(store) if summary.created), None)
        if newest is None:
            raise RunNotFound(f"there are no runs in {store.location}; `regatta train` makes one")
        ref = newest.id
    if is_name(ref):
        try:
            return Run(store, _read_facts(store, ref))
        except NotFound:
            pass
        except _Unreadable as error:
            raise RunNotFound(f"run {ref} in {store.location} cannot be read: {error}") from error
    names = [summary.id for summary in list_runs(store) if summary.created]
    matches = [name for name in names if ref and name.startswith(ref)]
    if len(matches) == 1:
        return Run(store, _read_facts(store, matches[0]))
    if matches:
        shown = ", ".join(sorted(matches)[:8]) + (", ..." if len(matches) > 8 else "")
        raise RunNotFound(f"{ref!r} is the beginning of {len(matches)} runs: {shown}; give more of the name")
    raise RunNotFound(f"no run {ref!r} in {store.location};{nearest(ref, names)} `regatta runs` lists all")


class _Unreadable(Exception):
    """A record that is there and makes no sense."""


def _summary(store: Store, name: str) -> RunSummary | None:
    try:
        try:
            facts = _read_facts(store, name)
        except NotFound:
            if not store.list(name):
                return None  # an empty folder is no run
            return RunSummary(name, "unreadable", problem=f"there is no {RUN}")
        status = _read_status(store, name)
    except (_Unreadable, StoreError) as error:
        return RunSummary(name, "unreadable", problem=str(error))
    return RunSummary(
        id=name,
        status=status.status,
        preset=facts.preset,
        created=facts.created,
        updated=status.updated,
        steps=status.steps,
        episodes=status.episodes,
        return_mean=status.return_mean,
        steps_per_s=status.steps_per_s,
        wall_s=status.wall_s,
        problem=status.error,
    )


def _read_facts(store: Store, run_id: str) -> Facts:
    data = store.get(run_key(run_id, RUN))
    try:
        facts = msgspec.json.decode(data, type=Facts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Unreadable(f"{RUN} is damaged ({error})") from error
    # A folder that was copied or renamed answers to the name it has now.
    return msgspec.structs.replace(facts, id=run_id)


def _read_status(store: Store, run_id: str) -> Status:
    try:
        status = msgspec.json.decode(store.get(run_key(run_id, STATUS)), type=Status)
    except NotFound:
        return Status(status="lost")  # created, and killed before the first word
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Status(status="lost", error=f"{STATUS} is damaged ({error})")
    return status.seen(utc_now())
