"""What a run leaves in its store: the names of its keys, and the records they hold.

    <run id>/run.json                          what was true when the run was created; never rewritten
             status.json                       how it stands; rewritten every few seconds
             metrics/00000.jsonl ...           journals: one JSON object a line, in segments
             episodes/00000.jsonl ...
             checkpoints/blocks/<name>-<hash>.safetensors  what never changes, shared by all checkpoints
             checkpoints/000000050/state.safetensors, state.json, then manifest.json

Iterations are counted from 1: row `iteration: i` and checkpoint i both speak of the state after i updates.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

RUN = "run.json"
STATUS = "status.json"
METRICS = "metrics"
EPISODES = "episodes"
CHECKPOINTS = "checkpoints"
BLOCKS = "blocks"
ARRAYS = "state.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"

LOST_AFTER_S = 30.0  # a run that says it is running and has been silent for longer has lost its learner

State = Literal["running", "done", "interrupted", "failed", "lost"]
Json = Any  # what the json module reads and writes


def run_key(run_id: str, name: str) -> str:
    return f"{run_id}/{name}"


def segment_key(run_id: str, journal: str, index: int) -> str:
    return f"{run_id}/{journal}/{index:05d}.jsonl"


def checkpoints_key(run_id: str) -> str:
    return f"{run_id}/{CHECKPOINTS}"


def blocks_key(run_id: str) -> str:
    return f"{run_id}/{CHECKPOINTS}/{BLOCKS}"


def block_key(run_id: str, name: str, sha256: str) -> str:
    return f"{run_id}/{CHECKPOINTS}/{BLOCKS}/{name}-{sha256[:12]}.safetensors"


def checkpoint_key(run_id: str, iteration: int, part: str) -> str:
    return f"{run_id}/{CHECKPOINTS}/{iteration:09d}/{part}"


class Facts(msgspec.Struct, frozen=True):
    """run.json."""

    id: str
    preset: str
    created: str
    command: list[str]
    versions: dict[str, str]
    platform: str
    cpu: str
    config: dict[str, Json]


class Status(msgspec.Struct, frozen=True):
    """status.json. `lost` is never written: a reader concludes it from `updated`."""

    status: State = "running"
    steps: int = 0
    iterations: int = 0
    episodes: int = 0
    return_mean: float | None = None
    wall_s: float | None = None
    steps_per_s: float | None = None
    weights_sha256: str | None = None
    workers: int = 0
    restarts: int = 0
    results_dropped: int = 0
    checkpoints_dropped: int = 0
    warnings: list[str] = []
    error: str | None = None
    updated: str = ""
    host: str = ""  # of the learner, with pid: whether it still lives can be asked on the same machine
    pid: int = 0

    def seen(self, now: datetime) -> Status:
        """As a reader should take it at `now`."""
        if self.status == "running" and age_s(self.updated, now) > LOST_AFTER_S:
            return msgspec.structs.replace(self, status="lost")
        return self


def utc_now() -> datetime:
    return datetime.now(UTC)


def iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age_s(stamp: str, now: datetime) -> float:
    """Seconds since an ISO stamp; endless for one that cannot be read."""
    try:
        return (now - datetime.fromisoformat(stamp)).total_seconds()
    except (ValueError, TypeError):
        return float("inf")


def plain(value: Any) -> Any:
    """NumPy scalars as Python numbers, for msgspec's encoders."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} cannot be written as JSON; pass numbers, text, lists or dicts")
    return item()


_encoder = msgspec.json.Encoder(enc_hook=plain)


def encode_record(record: msgspec.Struct) -> bytes:
    """Indented JSON with a final newline: people read these files."""
    return msgspec.json.format(_encoder.encode(record), indent=2) + b"\n"
