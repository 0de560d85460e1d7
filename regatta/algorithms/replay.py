"""The replay memory of off-policy algorithms: the newest transitions of every environment, drawn at random.

One ring per lane, [rows, envs] of steps in the order they were taken, with a head of its own: lanes may advance at
different speeds. An observation is stored once, since what follows a step is the next row of the same environment.
Where that does not hold, the observation that did follow lies in a table beside the ring and the step's link says
where: a truncated episode's final observation, or the last one before a lane was seeded anew. That is exact, takes
half the memory of storing both, and makes a lane's rows the same length, so that adding and saving are plain copies.

The ring is made of blocks of rows. A block whose rows are all written never changes, so a checkpoint saves each one
once; the ring has room for one block more than it keeps, so that the oldest is whole for as long as it is needed.

One thread at a time. How large it may be is asked before it is made: `nbytes`, `refuse_too_large`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from regatta.errors import CheckpointError, ConfigError
from regatta.types import Array, Arrays

Shape = tuple[int, ...]
Fields = dict[str, tuple[Shape, np.dtype[np.generic]]]

# A step's link. Zero is what memory that nobody has touched reads as.
NEVER = 0  # not to be drawn: no step, one that is not valid, or one whose following observation or mask is not known
NEXT = 1  # the next row follows
FIRST_SLOT = 2  # from here on: a row of the table of finals

# Changing these makes the replay memory of older checkpoints unreadable.
BLOCK_BYTES = 4 << 20
BLOCK_TRANSITIONS = 8192
BLOCKS_PER_LANE = 32  # at least, where there are rows enough: what is saved every time is at most a block per lane
STEPS_PER_FINAL = 64  # room for finals to begin with; with shorter truncated episodes the table grows


class Replay:
    """Keeps the newest `capacity // (lanes * lane_envs)` steps of every environment.

    With `mask_size`, action masks are kept too. The mask that belongs to an episode's final observation never
    arrives, and the one after a chunk's last step only with the next chunk: such transitions are not drawn (for good,
    or until it is there), since a guess would train on the values of illegal actions.
    """

    def __init__(
        self,
        capacity: int,
        lanes: int,
        lane_envs: int,
        obs_shape: Shape,
        obs_dtype: DTypeLike,
        action_shape: Shape,
        action_dtype: DTypeLike,
        mask_size: int | None = None,
    ) -> None:
        fields = _fields(obs_shape, obs_dtype, action_shape, action_dtype, mask_size)
        self._lanes, self._envs = lanes, lane_envs
        self._kept, self._block, self._rows = _geometry(capacity, lanes, lane_envs, fields)
        whole = (lanes, self._rows, lane_envs)
        self._link = np.zeros(whole, np.int32)
        self._ring = {name: np.zeros((*whole, *shape), dtype) for name, (shape, dtype) in fields.items()}
        self._finals = np.zeros((_first_slots(self._link.size), *obs_shape), obs_dtype)
        self._free: list[int] = []  # slots that were used before
        self._unused = FIRST_SLOT  # from this slot on none has been used yet
        self._heads = np.zeros(lanes, np.int64)  # rows ever written; the row there holds the last observation
        self._open = np.zeros((lanes, lane_envs), bool)  # the newest step's episode goes on, if the lane does
        self._live = np.zeros(lanes, np.int64)  # transitions that may be drawn

    @staticmethod
    def nbytes(
        capacity: int,
        lanes: int,
        lane_envs: int,
        obs_shape: Shape,
        obs_dtype: DTypeLike,
        action_shape: Shape,
        action_dtype: DTypeLike,
        mask_size: int | None = None,
    ) -> int:
        """What such a memory takes once it is full; nothing is allocated. Only frequent truncation makes it more."""
        fields = _fields(obs_shape, obs_dtype, action_shape, action_dtype, mask_size)
        _, _, rows = _geometry(capacity, lanes, lane_envs, fields)
        steps = lanes * rows * lane_envs
        final = math.prod(obs_shape) * np.dtype(obs_dtype).itemsize
        return steps * _step_bytes(fields) + _first_slots(steps) * final

    def __len__(self) -> int:
        """Transitions that may be drawn."""
        return int(self._live.sum())

    # -- adding -------------------------------------------------------------------------------------------

    def add(self, lane: int, arrays: Arrays) -> None:
        """Take a lane's chunk, the arrays of a Result; they are copied."""
        links = self._links(arrays)
        steps, obs = len(links), arrays["obs"]
        for start in range(0, steps, self._kept):  # a chunk longer than the ring goes through it in pieces
            piece = slice(start, min(start + self._kept, steps))
            following = obs[piece.stop] if piece.stop < steps else arrays["last_obs"]
            rows = {name: arrays[name][piece] for name in self._ring}
            self._append(lane, rows, links[piece], following)

    def _links(self, arrays: Arrays) -> Array:
        """A chunk's links [T, N], its final observations put into the table."""
        valid = arrays["valid"]
        cut = arrays["truncated"] & ~arrays["terminated"]
        links = (valid & ~cut).astype(np.int32)  # NEXT or NEVER
        if "mask" in self._ring or not cut.any():
            return links
        at = np.full(valid.shape, -1)
        steps, envs = arrays["final_index"].T
        at[steps, envs] = np.arange(len(steps))
        known = valid & cut & (at >= 0)
        links[known] = self._keep_finals(arrays["final_obs"][at[known]])
        return links

    def _keep_finals(self, obs: Array) -> Array:
        """The slots these observations now have."""
        slots = [self._free.pop() for _ in range(min(len(obs), len(self._free)))]
        fresh = self._unused + len(obs) - len(slots)
        if fresh > len(self._finals):
            grown = np.zeros((max(fresh, 2 * len(self._finals)), *self._finals.shape[1:]), self._finals.dtype)
            grown[: self._unused] = self._finals[: self._unused]
            self._finals = grown
        slots += range(self._unused, fresh)
        self._unused = fresh
        self._finals[slots] = obs
        return np.array(slots, np.int32)

    def _append(self, lane: int, rows: Arrays, links: Array, following: Array) -> None:
        """Write at most as many rows as are kept, and after them the observation that came last."""
        head, steps = int(self._heads[lane]), len(links)
        self._settle(lane, rows["obs"][0])
        self._live[lane] -= self._drawable(lane, head - self._kept, head - self._kept + steps)
        links, last = links.copy(), rows["terminated"][-1]
        self._open[lane] = (links[-1] == NEXT) & ~last
        if "mask" in self._ring:
            links[-1, self._open[lane]] = NEVER
        for part, source in self._spans(head, steps):
            self._let_go(lane, part)
            self._link[lane, part] = links[source]
            for name, array in rows.items():
                self._ring[name][lane, part] = array[source]
        self._live[lane] += np.count_nonzero(links)
        self._heads[lane] = head + steps
        self._place_last(lane, following)

    def _settle(self, lane: int, first_obs: Array) -> None:
        """The row after the newest steps has come: either it begins where they ended, or the lane was seeded anew."""
        head, open_ = int(self._heads[lane]), self._open[lane]
        if not open_.any():
            return
        last_obs = self._ring["obs"][lane, head % self._rows]
        goes_on = (last_obs == first_obs).reshape(self._envs, -1).all(1)
        newest = self._link[lane, (head - 1) % self._rows]
        if "mask" in self._ring:
            newest[open_ & goes_on] = NEXT
            self._live[lane] += np.count_nonzero(open_ & goes_on)
        elif (open_ & ~goes_on).any():
            newest[open_ & ~goes_on] = self._keep_finals(last_obs[open_ & ~goes_on])

    def _place_last(self, lane: int, obs: Array) -> None:
        """Where the next chunk will begin stands, until it comes, what followed the newest steps."""
        row = int(self._heads[lane]) % self._rows
        self._let_go(lane, slice(row, row + 1))
        self._link[lane, row] = NEVER
        self._ring["obs"][lane, row] = obs
        if "mask" in self._ring:
            self._ring["mask"][lane, row] = True  # seen after terminated steps only, whose next mask is not used

    def _let_go(self, lane: int, part: slice) -> None:
        old = self._link[lane, part]
        self._free += old[old >= FIRST_SLOT].tolist()

    def _spans(self, start: int, count: int) -> Iterator[tuple[slice, slice]]:
        """Where rows `start` to `start + count` lie in the ring, in one or two pieces, and which of them these are."""
        first = start % self._rows
        fit = min(count, self._rows - first)
        yield slice(first, first + fit), slice(0, fit)
        if fit < count:
            yield slice(0, count - fit), slice(fit, count)

    def _drawable(self, lane: int, start: int, stop: int) -> int:
        start, stop = max(0, start), max(0, stop)
        return sum(int(np.count_nonzero(self._link[lane, part])) for part, _ in self._spans(start, stop - start))

    # -- drawing ------------------------------------------------------------------------------------------

    def sample(self, rng: np.random.Generator, batches: int, size: int, out: Arrays | None = None) -> Arrays:
        """Uniformly, with replacement: obs, next_obs, actions, rewards, terminated, with masks mask and next_mask,
        [batches, size, ...] each. What follows a terminated step is not to be used.

        `out`: an earlier answer of that size which nobody reads any more, to be written over; new memory costs more
        time than the drawing itself.
        """
        assert len(self), "nothing to draw from yet"
        chosen = self._draw(rng, batches * size).reshape(batches, size)
        lane_steps = self._rows * self._envs
        following = chosen + self._envs
        following[following % lane_steps < self._envs] -= lane_steps  # past the ring's end
        links = self._link.reshape(-1).take(chosen)
        batch = {name: self._rows_at(name, chosen, name, out) for name in self._ring}
        batch["next_obs"] = self._rows_at("obs", following, "next_obs", out)
        if "mask" in self._ring:
            batch["next_mask"] = self._rows_at("mask", following, "next_mask", out)
        apart = links >= FIRST_SLOT
        batch["next_obs"][apart] = self._finals.take(links[apart], axis=0)
        return batch

    def _rows_at(self, field: str, places: Array, name: str, out: Arrays | None) -> Array:
        array = self._ring[field]
        # `take` copies whole rows, several times as fast as an index in brackets; `clip` since it buffers otherwise.
        into = None if out is None else out[name]
        return array.reshape(-1, *array.shape[3:]).take(places, axis=0, out=into, mode="clip")

    def _draw(self, rng: np.random.Generator, count: int) -> Array:
        """Places of transitions, as indices into the flattened ring.

        Counted back from each lane's head, so that they depend on what is kept and not on where it happens to lie.
        """
        filled = min(int(self._heads.max()), self._kept)
        candidates = self._lanes * filled * self._envs
        links = self._link.reshape(-1)
        if 2 * len(self) < candidates:  # lanes of very different ages, or steps that failed: find them all
            places = self._places(np.arange(candidates), filled)
            places = places[links.take(places) != NEVER]
            found: Array = places[rng.integers(len(places), size=count)]
            return found
        chosen = self._places(rng.integers(candidates, size=count), filled)
        wrong = np.flatnonzero(links.take(chosen) == NEVER)
        while len(wrong):
            again = self._places(rng.integers(candidates, size=len(wrong)), filled)
            chosen[wrong] = again
            wrong = wrong[links.take(again) == NEVER]
        return chosen

    def _places(self, numbers: Array, filled: int) -> Array:
        """Candidate numbers, by lane, age and environment, as indices. Beyond a young lane's age lies nothing."""
        ages, envs = numbers // self._envs, numbers % self._envs
        lanes = ages // filled
        rows = (self._heads.take(lanes) - 1 - (ages - lanes * filled)) % self._rows
        places: Array = (lanes * self._rows + rows) * self._envs + envs
        return places

    # -- checkpoints --------------------------------------------------------------------------------------

    def state(self) -> Arrays:
        """Where everything stands, and the rows of each lane that make no whole block yet; copies."""
        last = [self._ring["obs"][lane, head % self._rows] for lane, head in enumerate(self._heads.tolist())]
        arrays = {
            "geometry": self._geometry(),
            "heads": self._heads.copy(),
            "open": self._open.copy(),
            "last_obs": np.stack(last),
        }
        for lane in range(self._lanes):
            _, whole = self._blocks_of(lane)
            tail = self._saved(lane, whole * self._block, int(self._heads[lane]))
            arrays |= {f"{_tail_name(lane)}/{name}": array.copy() for name, array in tail.items()}
        return arrays

    def blocks(self) -> dict[str, Arrays]:
        """All whole blocks that are needed: what has a name never changes. Mostly views, good until the next `add`."""
        return {
            _block_name(lane, number): self._saved(lane, number * self._block, (number + 1) * self._block)
            for lane in range(self._lanes)
            for number in range(*self._blocks_of(lane))
        }

    def load(self, arrays: Arrays) -> None:
        """Stand where `state` was taken. `arrays`: that state, and its blocks' arrays as "<block name>/<array>".

        Blocks are taken out of `arrays` one by one: where nobody else holds them, they are not in memory twice.
        """
        if arrays["geometry"].tolist() != self._geometry().tolist():
            raise CheckpointError(
                f"the checkpoint's replay memory has another shape than this run's: {arrays['geometry'].tolist()} "
                f"instead of {self._geometry().tolist()} (steps kept and steps per block of an environment, lanes, "
                "environments per lane)"
            )
        self._link[:] = NEVER
        self._free, self._unused = [], FIRST_SLOT
        self._heads[:] = arrays["heads"]
        self._open[:] = arrays["open"]
        for lane, head in enumerate(self._heads.tolist()):
            first, whole = self._blocks_of(lane)
            for number in range(first, whole):
                self._restore(lane, number * self._block, _block_name(lane, number), arrays)
            self._restore(lane, whole * self._block, _tail_name(lane), arrays)
            self._place_last(lane, arrays["last_obs"][lane])
            self._live[lane] = self._drawable(lane, head - self._kept, head)

    def _geometry(self) -> Array:
        return np.array([self._kept, self._block, self._lanes, self._envs])

    def _blocks_of(self, lane: int) -> tuple[int, int]:
        """The first block that holds a kept row, and the first that is not whole.

        Whole needs the row after it as well: until then the links of its last row are not settled.
        """
        head = int(self._heads[lane])
        whole = max(0, head - 1) // self._block
        return min(max(0, head - self._kept) // self._block, whole), whole

    def _saved(self, lane: int, start: int, stop: int) -> Arrays:
        """Rows of one block, as they are stored."""
        first = start % self._rows
        part = slice(first, first + stop - start)
        links = self._link[lane, part]
        apart = np.flatnonzero(links.reshape(-1) >= FIRST_SLOT)
        arrays = {name: array[lane, part] for name, array in self._ring.items()}
        return arrays | {
            "drawn": links != NEVER,
            "final_index": np.stack(np.divmod(apart, self._envs), axis=1).astype(np.int32),
            "final_obs": self._finals.take(links.reshape(-1)[apart], axis=0),
        }

    def _restore(self, lane: int, start: int, name: str, arrays: Arrays) -> None:
        drawn, index = arrays.pop(f"{name}/drawn"), arrays.pop(f"{name}/final_index")
        first = start % self._rows
        part = slice(first, first + len(drawn))
        for field, array in self._ring.items():
            array[lane, part] = arrays.pop(f"{name}/{field}")
        links = self._link[lane, part]
        links[:] = drawn
        links[index[:, 0], index[:, 1]] = self._keep_finals(arrays.pop(f"{name}/final_obs"))


def _block_name(lane: int, number: int) -> str:
    return f"lane-{lane:03d}/{number:06d}"


def _tail_name(lane: int) -> str:
    return f"tail-{lane:03d}"


def _fields(
    obs_shape: Shape, obs_dtype: DTypeLike, action_shape: Shape, action_dtype: DTypeLike, mask_size: int | None
) -> Fields:
    fields: Fields = {
        "obs": (tuple(obs_shape), np.dtype(obs_dtype)),
        "actions": (tuple(action_shape), np.dtype(action_dtype)),
        "rewards": ((), np.dtype(np.float32)),
        "terminated": ((), np.dtype(bool)),
    }
    return fields if mask_size is None else fields | {"mask": ((mask_size,), np.dtype(bool))}


def _step_bytes(fields: Fields) -> int:
    link = np.dtype(np.int32).itemsize
    return link + sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields.values())


def _geometry(capacity: int, lanes: int, lane_envs: int, fields: Fields) -> tuple[int, int, int]:
    """Rows kept per lane, rows per block, rows per lane."""
    kept = capacity // (lanes * lane_envs)
    if kept < 1:
        raise ConfigError(
            f"algorithm.replay_size {capacity} is less than one transition for each of {lanes} lanes of {lane_envs} "
            f"environments; at least {lanes * lane_envs} are needed"
        )
    steps = min(BLOCK_TRANSITIONS, BLOCK_BYTES // _step_bytes(fields))
    block = max(1, min(steps // lane_envs, kept // BLOCKS_PER_LANE))
    return kept, block, (math.ceil(kept / block) + 1) * block


def _first_slots(steps: int) -> int:
    return FIRST_SLOT + steps // STEPS_PER_FINAL


# -- how much there may be --------------------------------------------------------------------------------


def refuse_too_large(needed_bytes: int) -> None:
    """Raise ConfigError if a replay memory of so many bytes cannot fit: filling it would get the learner killed."""
    available = available_bytes()
    if available is not None and needed_bytes > available:
        raise ConfigError(
            f"the replay memory needs {needed_bytes / 1e9:.1f} GB once it is full, and {available / 1e9:.1f} GB are "
            "available; a smaller algorithm.replay_size makes it smaller"
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory this process may still have: what the machine has free and its control groups allow; None: unknown."""
    if found := [*_free_bytes(root), *_group_limits(root)]:
        return min(found)
    try:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _free_bytes(root: Path) -> list[int]:
    lines = _lines(root / "proc/meminfo")
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _group_limits(root: Path) -> list[int]:
    """The limits of the control groups this process is in, of version 1 or 2, and of those above them."""
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.strip("/")
        # In a container the path may be the host's, of which only the top is to be seen.
        for folder in {top, group, *group.parents} - {*top.parents}:
            limits += [int(text) for text in _lines(folder / file) if text.isdecimal()]  # version 2 says "max" for none
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
