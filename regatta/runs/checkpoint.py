"""Checkpoints: parts first, then a manifest with their hashes. What it does not vouch for is not trusted.

The manifest is the switch: until it is there, and after it is gone, the parts beside it mean nothing. Saving
over a good checkpoint of the same iteration keeps the good one whole until the new manifest replaces the old.
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from regatta.errors import CheckpointError, NotFound, StoreError
from regatta.runs.layout import ARRAYS, MANIFEST, STATE, Json, checkpoint_key, checkpoints_key
from regatta.store.base import Store
from regatta.types import Arrays

Kind = Literal["boundary", "interrupt", "final"]
Which = Literal["last", "best"] | int


@dataclass(frozen=True)
class Checkpoint:
    """Everything a learner needs to go on after `iteration` updates."""

    iteration: int
    steps: int
    arrays: Arrays
    state: dict[str, Json] = field(default_factory=dict)
    return_mean: float | None = None
    kind: Kind = "boundary"


class _Part(msgspec.Struct, frozen=True):
    file: str  # its name beside the manifest
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """manifest.json; `seal` is the hash of the rest of it."""

    iteration: int
    steps: int
    return_mean: float | None
    kind: Kind
    parts: dict[str, _Part]
    format: int = 1
    seal: str = ""

    def sealed(self) -> Manifest:
        bare = msgspec.structs.replace(self, seal="")
        return msgspec.structs.replace(self, seal=_sha256(msgspec.json.encode(bare)))


class Encoded(NamedTuple):
    """A checkpoint as bytes, independent of the arrays it was made from."""

    iteration: int
    steps: int
    return_mean: float | None
    kind: Kind
    parts: dict[str, bytes]


class _Broken(Exception):
    """Why one checkpoint cannot be trusted."""


def encode_checkpoint(checkpoint: Checkpoint) -> Encoded:
    """Copy a checkpoint into bytes, so that training may go on changing its arrays."""
    # safetensors takes the memory as it lies: an array in Fortran order would come back scrambled.
    arrays = {name: np.asarray(array, order="C") for name, array in checkpoint.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise CheckpointError(f"array {name!r} has dtype {array.dtype}; only numbers and booleans can be saved")
    try:
        # The json module rather than msgspec: states of random generators are integers of 128 bits, and NaN
        # must come back as NaN.
        state = json.dumps(checkpoint.state, indent=1).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state of a checkpoint must be plain JSON: {error}") from error
    mean = checkpoint.return_mean
    return Encoded(
        checkpoint.iteration,
        checkpoint.steps,
        float(mean) if mean is not None and math.isfinite(mean) else None,
        checkpoint.kind,
        {ARRAYS: save_arrays(arrays), STATE: state},
    )


def save_checkpoint(store: Store, run_id: str, checkpoint: Checkpoint) -> None:
    """Encode and write."""
    write_checkpoint(store, run_id, encode_checkpoint(checkpoint))


def write_checkpoint(store: Store, run_id: str, encoded: Encoded) -> None:
    """Write the parts, then the manifest. After a StoreError nothing of this attempt will be trusted."""
    iteration = encoded.iteration
    before: Manifest | None = None
    with suppress(_Broken):
        before = _manifest(store, run_id, iteration)
    parts = {name: _place(name, data, before) for name, data in encoded.parts.items()}
    manifest = Manifest(iteration, encoded.steps, encoded.return_mean, encoded.kind, parts).sealed()
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    try:
        for name, data in encoded.parts.items():
            store.put(checkpoint_key(run_id, iteration, parts[name].file), data)
        store.put(checkpoint_key(run_id, iteration, MANIFEST), text)
    except StoreError:
        with suppress(StoreError, _Broken):  # a full disk wants its space back now; a retry writes all again
            _take_back(store, run_id, iteration, before)
        raise
    if before is not None:
        _remove_strays(store, run_id, manifest)


def _take_back(store: Store, run_id: str, iteration: int, before: Manifest | None) -> None:
    if before is None:
        _remove(store, run_id, iteration)
    else:
        # Over a network a failed put may have arrived all the same: ask which manifest rules now.
        _remove_strays(store, run_id, _manifest(store, run_id, iteration))


def _remove_strays(store: Store, run_id: str, manifest: Manifest) -> None:
    """Remove what the manifest beside it does not name."""
    files = [MANIFEST, *(part.file for part in manifest.parts.values())]
    named = {checkpoint_key(run_id, manifest.iteration, file) for file in files}
    for key in store.list(_folder(run_id, manifest.iteration)):
        if key not in named:
            store.delete(key)


def _place(name: str, data: bytes, before: Manifest | None) -> _Part:
    """Where a part goes: beside a good checkpoint other bytes need a name of their own."""
    sha256 = _sha256(data)
    if before is None:
        return _Part(name, len(data), sha256)
    old = before.parts.get(name)
    stem, _, kind = name.partition(".")
    file = old.file if old is not None and old.sha256 == sha256 else f"{stem}-{sha256[:12]}.{kind}"
    return _Part(file, len(data), sha256)


def load_checkpoint(store: Store, run_id: str, which: Which = "last") -> tuple[Checkpoint, list[str]]:
    """The newest, the best, or that iteration's checkpoint, and notes on any that had to be passed over."""
    if isinstance(which, int):
        try:
            return _load(store, run_id, which), []
        except _Broken as broken:
            others = ", ".join(str(i) for i in _iterations(store, run_id)) or "none"
            raise CheckpointError(
                f"checkpoint {which} of run {run_id} cannot be used: {broken}; those there are: {others}"
            ) from broken
    notes: list[str] = []
    for iteration in _order(store, run_id, which, notes):
        try:
            checkpoint = _load(store, run_id, iteration)
        except _Broken as broken:
            if not store.list(_folder(run_id, iteration)):
                continue  # an empty folder is what a write that found no room leaves
            notes.append(f"checkpoint {iteration} cannot be trusted: {broken}")
            continue
        if notes:
            notes.append(f"using checkpoint {iteration} instead")
        return checkpoint, notes
    if not notes:
        raise CheckpointError(f"run {run_id} has no checkpoint yet; start it again under another name")
    raise CheckpointError(
        f"no checkpoint of run {run_id} can be trusted: {'; '.join(notes)}. "
        "Restore the run's checkpoints from a backup, or start it again under another name"
    )


def list_checkpoints(store: Store, run_id: str) -> list[Manifest]:
    """The manifests of all finished checkpoints, oldest first. The parts are not read."""
    found = []
    for iteration in _iterations(store, run_id):
        with suppress(_Broken):
            found.append(_manifest(store, run_id, iteration))
    return found


def prune(store: Store, run_id: str, keep: int) -> None:
    """Keep the last `keep` and the best; remove the others, and what failed attempts before the last left."""
    finished = {manifest.iteration: manifest for manifest in list_checkpoints(store, run_id)}
    if not finished:
        return
    kept = set(sorted(finished)[-keep:])
    best = _by_return(list(finished.values()))
    if best:
        kept.add(best[0].iteration)
    for iteration in _iterations(store, run_id):
        if iteration not in kept and iteration < max(finished):
            _remove(store, run_id, iteration)


def remove_after(store: Store, run_id: str, iteration: int) -> None:
    """Remove the checkpoints of a future that is about to be lived again."""
    for later in _iterations(store, run_id):
        if later > iteration:
            _remove(store, run_id, later)


def _remove(store: Store, run_id: str, iteration: int) -> None:
    store.delete(checkpoint_key(run_id, iteration, MANIFEST))
    for key in store.list(_folder(run_id, iteration)):
        store.delete(key)


def _folder(run_id: str, iteration: int) -> str:
    return checkpoint_key(run_id, iteration, "").rstrip("/")


def _iterations(store: Store, run_id: str) -> list[int]:
    return sorted(int(name) for name in store.folders(checkpoints_key(run_id)) if name.isdecimal())


def _by_return(manifests: list[Manifest]) -> list[Manifest]:
    """Best first; of equals the newest first; those without a return left out."""
    rated = [(m.return_mean, m.iteration, m) for m in manifests if m.return_mean is not None]
    return [m for _, _, m in sorted(rated, key=lambda row: row[:2], reverse=True)]


def _order(store: Store, run_id: str, which: Which, notes: list[str]) -> list[int]:
    if which == "last":
        return _iterations(store, run_id)[::-1]
    best = [manifest.iteration for manifest in _by_return(list_checkpoints(store, run_id))]
    if not best and (there := _iterations(store, run_id)[::-1]):
        notes.append("no checkpoint has a mean return yet")
        return there
    return best


def _load(store: Store, run_id: str, iteration: int) -> Checkpoint:
    manifest = _manifest(store, run_id, iteration)
    arrays = _part(store, run_id, manifest, ARRAYS)
    text = _part(store, run_id, manifest, STATE)
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Broken(f"{STATE} is not JSON ({error})") from error
    if not isinstance(state, dict):
        raise _Broken(f"{STATE} is not a JSON object")
    try:
        loaded = load_arrays(arrays)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Broken(f"{ARRAYS} is not a safetensors file ({error})") from error
    return Checkpoint(iteration, manifest.steps, loaded, state, manifest.return_mean, manifest.kind)


def _manifest(store: Store, run_id: str, iteration: int) -> Manifest:
    try:
        data = store.get(checkpoint_key(run_id, iteration, MANIFEST))
    except NotFound as error:
        raise _Broken(f"{MANIFEST} is missing: there is no such checkpoint, or its saving was not finished") from error
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Broken(f"{MANIFEST} is damaged ({error})") from error
    if manifest.sealed().seal != manifest.seal or manifest.iteration != iteration:
        raise _Broken(f"{MANIFEST} is damaged (its own hash does not hold)")
    if any("/" in part.file for part in manifest.parts.values()):
        raise _Broken(f"{MANIFEST} names files outside its folder")
    return manifest


def _part(store: Store, run_id: str, manifest: Manifest, name: str) -> bytes:
    part = manifest.parts.get(name)
    if part is None:
        raise _Broken(f"{MANIFEST} does not name {name}")
    try:
        data = store.get(checkpoint_key(run_id, manifest.iteration, part.file))
    except NotFound as error:
        raise _Broken(f"{part.file} is missing") from error
    if len(data) != part.size:
        raise _Broken(f"{part.file} has {len(data)} bytes instead of {part.size}")
    if _sha256(data) != part.sha256:
        raise _Broken(f"{part.file} is damaged (its hash does not hold)")
    return data


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
