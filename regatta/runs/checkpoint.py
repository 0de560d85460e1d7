"""Checkpoints: parts first, then a manifest with their hashes. What it does not vouch for is not trusted.

The manifest is the switch: until it is there, and after it is gone, the parts beside it mean nothing. Saving
over a good checkpoint of the same iteration keeps the good one whole until the new manifest replaces the old.

Blocks are what would be saved over and over: arrays that never change once they are there, as those of a replay
memory. A block is stored once, in a folder all checkpoints of a run share, and every manifest that needs it names it
with its hash. The hash is also in its key: a run that goes back to an earlier checkpoint may live through another
future, with other content under the same name. Blocks come before the manifest that names them and go after the last
one that did, so that a kill in between leaves at most blocks that nobody needs, which the next clearing takes away.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from regatta.errors import CheckpointError, NotFound, StoreError
from regatta.runs.layout import (
    ARRAYS,
    MANIFEST,
    STATE,
    Json,
    block_key,
    blocks_key,
    checkpoint_key,
    checkpoints_key,
)
from regatta.store.base import Store
from regatta.types import Arrays

Kind = Literal["boundary", "interrupt", "final"]
Which = Literal["last", "best"] | int

READERS = 4  # a bucket answers slowly, and several questions at a time
_BLOCK_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """Everything a learner needs to go on after `iteration` updates.

    `blocks` are given for saving, by a name that means the same content for as long as the process lives. In what is
    loaded their arrays stand among the others, array `a` of block `b` as "b/a".
    """

    iteration: int
    steps: int
    arrays: Arrays
    state: dict[str, Json] = field(default_factory=dict)
    return_mean: float | None = None
    kind: Kind = "boundary"
    blocks: dict[str, Arrays] = field(default_factory=dict)


class _Part(msgspec.Struct, frozen=True):
    file: str  # its name beside the manifest
    size: int
    sha256: str


class Stored(msgspec.Struct, frozen=True):
    """A block as manifests name it; where it lies follows from its name and hash."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """manifest.json; `seal` is the hash of the rest of it."""

    iteration: int
    steps: int
    return_mean: float | None
    kind: Kind
    parts: dict[str, _Part]
    blocks: dict[str, Stored] = {}
    format: int = 1
    seal: str = ""

    def sealed(self) -> Manifest:
        bare = msgspec.structs.replace(self, seal="")
        return msgspec.structs.replace(self, seal=_sha256(msgspec.json.encode(bare)))


class Block:
    """A block of a checkpoint: its bytes until they are in the store, from then on only what a manifest says of it."""

    def __init__(self, data: bytes | None, stored: Stored | None = None) -> None:
        self.data = data
        self.stored = stored

    @property
    def waiting_bytes(self) -> int:
        data = self.data  # the saver's thread may let go of it at any moment
        return 0 if data is None else len(data)


class Encoded(NamedTuple):
    """A checkpoint as bytes, independent of the arrays it was made from."""

    iteration: int
    steps: int
    return_mean: float | None
    kind: Kind
    parts: dict[str, bytes]
    blocks: Mapping[str, Block]


class _Broken(Exception):
    """Why one checkpoint cannot be trusted."""


def encode_checkpoint(checkpoint: Checkpoint, blocks: Mapping[str, Block] | None = None) -> Encoded:
    """Copy a checkpoint into bytes, so that training may go on changing its arrays.

    `blocks`: all of the checkpoint's, some of which may be in the store already; if not given, all are encoded.
    """
    if blocks is None:
        blocks = {name: encode_block(name, arrays) for name, arrays in checkpoint.blocks.items()}
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
        {ARRAYS: _encode_arrays(checkpoint.arrays), STATE: state},
        blocks,
    )


def encode_block(name: str, arrays: Arrays) -> Block:
    """Copy a block into bytes."""
    if not _BLOCK_NAME.fullmatch(name):
        raise CheckpointError(f"{name!r} cannot name a block: only letters, digits, _, ., - and / between them can")
    return Block(_encode_arrays(arrays))


def _encode_arrays(arrays: Arrays) -> bytes:
    # safetensors takes the memory as it lies: an array in Fortran order would come back scrambled.
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    for name, array in ordered.items():
        if array.dtype.kind not in "biuf":
            raise CheckpointError(f"array {name!r} has dtype {array.dtype}; only numbers and booleans can be saved")
    data: bytes = save_arrays(ordered)
    return data


def save_checkpoint(store: Store, run_id: str, checkpoint: Checkpoint) -> None:
    """Encode and write."""
    write_checkpoint(store, run_id, encode_checkpoint(checkpoint))


def write_checkpoint(store: Store, run_id: str, encoded: Encoded) -> None:
    """Write the blocks that are not stored yet, the parts, then the manifest.

    After a StoreError nothing of this attempt will be trusted. Blocks that were written stay for the next attempt.
    """
    iteration = encoded.iteration
    before: Manifest | None = None
    with suppress(_Broken):
        before = _manifest(store, run_id, iteration)
    blocks = write_blocks(store, run_id, encoded.blocks)
    parts = {name: _place(name, data, before) for name, data in encoded.parts.items()}
    manifest = Manifest(iteration, encoded.steps, encoded.return_mean, encoded.kind, parts, blocks).sealed()
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


def write_blocks(store: Store, run_id: str, blocks: Mapping[str, Block]) -> dict[str, Stored]:
    """Write those that are not in the store yet and let go of their bytes; what a manifest says of them all."""
    named = {}
    for name, block in blocks.items():
        if block.data is not None:
            block.stored = block.stored or Stored(len(block.data), _sha256(block.data))
            store.put(block_key(run_id, name, block.stored.sha256), block.data)
            block.data = None
        assert block.stored is not None
        named[name] = block.stored
    return named


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


def load_checkpoint(
    store: Store, run_id: str, which: Which = "last", *, blocks: bool = True
) -> tuple[Checkpoint, list[str]]:
    """The newest, the best, or that iteration's checkpoint, and notes on any that had to be passed over.

    Without `blocks` they are neither read nor verified: the policy is all there without them.
    """
    if isinstance(which, int):
        try:
            return _load(store, run_id, which, blocks), []
        except _Broken as broken:
            others = ", ".join(str(i) for i in _iterations(store, run_id)) or "none"
            raise CheckpointError(
                f"checkpoint {which} of run {run_id} cannot be used: {broken}; those there are: {others}"
            ) from broken
    notes: list[str] = []
    for iteration in _order(store, run_id, which, notes):
        try:
            checkpoint = _load(store, run_id, iteration, blocks)
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


def stored_blocks(store: Store, run_id: str, iteration: int) -> dict[str, Block]:
    """What a run that goes on from this checkpoint need not write again: the blocks its manifest names."""
    with suppress(_Broken):
        manifest = _manifest(store, run_id, iteration)
        return {name: Block(None, stored) for name, stored in manifest.blocks.items()}
    return {}


def prune(store: Store, run_id: str, keep: int, spare: Iterable[str] = ()) -> None:
    """Keep the last `keep` and the best; remove the others, and what failed attempts before the last left.

    `spare`: keys of blocks that a checkpoint about to be written counts on.
    """
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
    _remove_unnamed(store, run_id, [finished[iteration] for iteration in kept], spare)


def remove_after(store: Store, run_id: str, iteration: int) -> None:
    """Remove the checkpoints of a future that is about to be lived again, and blocks that no checkpoint needs."""
    for later in _iterations(store, run_id):
        if later > iteration:
            _remove(store, run_id, later)
    remove_unnamed_blocks(store, run_id)


def remove_unnamed_blocks(store: Store, run_id: str, spare: Iterable[str] = ()) -> None:
    """Remove what attempts that came to nothing have left, but for the keys in `spare`."""
    _remove_unnamed(store, run_id, list_checkpoints(store, run_id), spare)


def _remove_unnamed(store: Store, run_id: str, manifests: list[Manifest], spare: Iterable[str]) -> None:
    needed = {
        block_key(run_id, name, stored.sha256) for manifest in manifests for name, stored in manifest.blocks.items()
    }
    for key in set(store.list(blocks_key(run_id))) - needed - set(spare):
        store.delete(key)


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


def _load(store: Store, run_id: str, iteration: int, blocks: bool) -> Checkpoint:
    manifest = _manifest(store, run_id, iteration)
    data = _part(store, run_id, manifest, ARRAYS)
    text = _part(store, run_id, manifest, STATE)
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Broken(f"{STATE} is not JSON ({error})") from error
    if not isinstance(state, dict):
        raise _Broken(f"{STATE} is not a JSON object")
    arrays = _decode_arrays(ARRAYS, data)
    if blocks and manifest.blocks:
        with ThreadPoolExecutor(READERS, thread_name_prefix="regatta-load") as pool:
            for loaded in pool.map(lambda item: _load_block(store, run_id, *item), manifest.blocks.items()):
                arrays |= loaded
    return Checkpoint(iteration, manifest.steps, arrays, state, manifest.return_mean, manifest.kind)


def _load_block(store: Store, run_id: str, name: str, stored: Stored) -> Arrays:
    what = f"block {name}"
    data = _verified(store, block_key(run_id, name, stored.sha256), what, stored.size, stored.sha256)
    return {f"{name}/{array_name}": array for array_name, array in _decode_arrays(what, data).items()}


def _decode_arrays(what: str, data: bytes) -> Arrays:
    try:
        arrays: Arrays = load_arrays(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Broken(f"{what} is not a safetensors file ({error})") from error
    return arrays


def _manifest(store: Store, run_id: str, iteration: int) -> Manifest:
    try:
        data = store.get(checkpoint_key(run_id, iteration, MANIFEST))
    except NotFound as error:
        raise _Broken(f"{MANIFEST} is missing: there is no such checkpoint, or its saving was not finished") from error
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        # As it was written rather than as it is understood: what this version does not know is sealed as well.
        seal = _sha256(msgspec.json.encode(msgspec.json.decode(data, type=dict[str, Json]) | {"seal": ""}))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Broken(f"{MANIFEST} is damaged ({error})") from error
    if seal != manifest.seal or manifest.iteration != iteration:
        raise _Broken(f"{MANIFEST} is damaged (its own hash does not hold)")
    if any("/" in part.file for part in manifest.parts.values()):
        raise _Broken(f"{MANIFEST} names files outside its folder")
    for name, stored in manifest.blocks.items():
        if not (_BLOCK_NAME.fullmatch(name) and _SHA256.fullmatch(stored.sha256)):
            raise _Broken(f"{MANIFEST} names a block that cannot be one, {name!r}")
    return manifest


def _part(store: Store, run_id: str, manifest: Manifest, name: str) -> bytes:
    part = manifest.parts.get(name)
    if part is None:
        raise _Broken(f"{MANIFEST} does not name {name}")
    return _verified(store, checkpoint_key(run_id, manifest.iteration, part.file), part.file, part.size, part.sha256)


def _verified(store: Store, key: str, what: str, size: int, sha256: str) -> bytes:
    try:
        data = store.get(key)
    except NotFound as error:
        raise _Broken(f"{what} is missing") from error
    if len(data) != size:
        raise _Broken(f"{what} has {len(data)} bytes instead of {size}")
    if _sha256(data) != sha256:
        raise _Broken(f"{what} is damaged (its hash does not hold)")
    return data


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
