"""The members of an order: their parameters, their luck, and how they act side by side.

Row i of everything here belongs to whoever sits on seat i (`population.py`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from regatta.errors import EnvError
from regatta.policies.flat import Layout
from regatta.policies.noise import noise_table
from regatta.policies.policy import Act, Policy
from regatta.seeding import seeds, stream
from regatta.types import Array, Arrays, Score

NOISE_BLOCK = 64  # steps of action noise drawn at once


class Luck:
    """The seeds of environments, the same for both halves of a pair."""

    def __init__(self, seed: int, task: Score) -> None:
        self._seed = seed
        self._numbers = () if task.seeding == "fixed" else (task.generation,)
        self._rows = np.zeros(task.count, np.intp)  # of the table below, by member
        if task.seeding == "fresh":
            self._rows = np.arange(task.first, task.first + task.count) // (2 if task.mirrored else 1)
        self._table = seeds(seed, "score", *self._numbers, count=(int(self._rows[-1]) + 1) * task.episodes)
        self._episodes = task.episodes

    def seed(self, member: int, episode: int, failures: int) -> int:
        row = int(self._rows[member])
        if not failures:
            return self._table[row * self._episodes + episode]
        return seeds(self._seed, "score", *self._numbers, row, episode, failures, count=1)[0]


class Genes:
    """The parameters of the members of one order."""

    def __init__(self, task: Score, arrays: Arrays, members: Array | None, seed: int) -> None:
        self.layout = Layout(arrays)
        self.stats = {name: array for name, array in arrays.items() if name not in self.layout.slices}
        self._centre: Array = self.layout.flatten(np, arrays)
        self._given = members
        self._sigma = task.sigma
        if members is not None and (members.dtype, members.shape) != (np.float32, (task.count, self.layout.size)):
            raise EnvError(
                f"members are {members.dtype}{members.shape}, expected float32{(task.count, self.layout.size)}"
            )
        if members is None and task.sigma:
            self._table = noise_table(seed, self.layout.size)
            self._offsets, self._signs = self._table.members(task.generation, task.first, task.count, task.mirrored)

    def write(self, member: int, row: Array) -> None:
        if self._given is not None:
            row[:] = self._given[member]
        elif not self._sigma:
            row[:] = self._centre
        else:
            np.multiply(self._table.slice(self._offsets[member]), self._sigma * float(self._signs[member]), out=row)
            row += self._centre


class Players(Protocol):
    """Who sits where, with parameters and memory."""

    def enter(self, i: int, member: int) -> None: ...
    def forget(self, i: int) -> None: ...
    def move(self, origin: int, to: int) -> None: ...
    def keep(self, count: int) -> None: ...
    def act(self, obs: Array, mask: Array | None) -> Array: ...


class Together:
    """One product per layer for all members.

    NumPy multiplies the matrices of a stack one after another, so no member's numbers depend on the rest of the stack.
    """

    def __init__(self, policy: Policy, genes: Genes, count: int) -> None:
        self._policy = policy
        self._genes = genes
        self._matrix = np.zeros((count, genes.layout.size), np.float32)
        self._state = np.zeros((count, 1, policy.state_size), np.float32) if policy.state_size else None
        self.keep(count)

    def enter(self, i: int, member: int) -> None:
        self._genes.write(member, self._matrix[i])

    def forget(self, i: int) -> None:
        if self._state is not None:
            self._state[i] = 0

    def move(self, origin: int, to: int) -> None:
        self._matrix[to] = self._matrix[origin]
        if self._state is not None:
            self._state[to] = self._state[origin]

    def keep(self, count: int) -> None:
        self._arrays = self._genes.layout.stacked(self._matrix[:count]) | self._genes.stats
        if self._state is not None:
            self._state = self._state[:count]

    def act(self, obs: Array, mask: Array | None) -> Array:
        policy = self._policy
        x = policy.normalize(np, self._arrays, obs[:, None])
        out, self._state = policy.step(np, self._arrays, x, self._state)
        chosen: Array = policy.distribution.mode(out, None if mask is None else mask[:, None])
        return chosen[:, 0]


class OneByOne:
    """For networks that are compiled, or a user's own: what they do with a stack of parameters is not known."""

    def __init__(self, policy: Policy, genes: Genes, count: int) -> None:
        self._policy = policy
        self._genes = genes
        self._acts: list[Act | None] = [None] * count
        self._states: list[Array | None] = [None] * count

    def enter(self, i: int, member: int) -> None:
        vector = np.zeros(self._genes.layout.size, np.float32)
        self._genes.write(member, vector)
        self._acts[i] = self._policy.player(self._genes.layout.split(vector) | self._genes.stats)

    def forget(self, i: int) -> None:
        self._states[i] = self._policy.first_state(1)

    def move(self, origin: int, to: int) -> None:
        self._acts[to], self._states[to] = self._acts[origin], self._states[origin]

    def keep(self, count: int) -> None:
        del self._acts[count:], self._states[count:]

    def act(self, obs: Array, mask: Array | None) -> Array:
        chosen = []
        for i, act in enumerate(self._acts):
            assert act is not None
            rows = slice(i, i + 1)
            action, self._states[i] = act(obs[rows], None, None if mask is None else mask[rows], self._states[i])
            chosen.append(action)
        return np.concatenate(chosen)


class ActionNoise:
    """What is added to continuous actions: a stream for each member, drawn ahead in blocks."""

    def __init__(self, seed: int, task: Score, outputs: int, count: int) -> None:
        self._numbers = (seed, "action", task.generation)
        self._deviation = np.float32(task.action_noise)
        self._streams = [stream(*self._numbers)] * count
        self._blocks = np.zeros((count, NOISE_BLOCK, outputs), np.float32)
        self._used = np.zeros(count, np.intp)

    def enter(self, i: int, number: int) -> None:
        self._streams[i] = stream(*self._numbers, number)
        self._used[i] = NOISE_BLOCK

    def move(self, origin: int, to: int) -> None:
        self._streams[to] = self._streams[origin]
        self._blocks[to] = self._blocks[origin]
        self._used[to] = self._used[origin]

    def draw(self, count: int) -> Array:
        used = self._used[:count]
        for i in np.flatnonzero(used == NOISE_BLOCK).tolist():
            self._streams[i].standard_normal(dtype=np.float32, out=self._blocks[i])
            used[i] = 0
        rows: Array = self._blocks[np.arange(count), used] * self._deviation
        used += 1
        return rows


class Sums:
    """Sums of observations and of their squares, by episode, so that the total is always added up in one order.

    Taken from the mean known so far: squares of large numbers would leave no digits for a small deviation.
    """

    def __init__(self, mean: Array, count: int) -> None:
        self._origin = mean.astype(np.float64)
        self._sums = np.zeros((2, count, *mean.shape))
        self._kept: dict[tuple[int, int], Array] = {}

    def add(self, rows: Array) -> None:
        off = rows - self._origin
        self._sums[0, : len(rows)] += off
        off *= off
        self._sums[1, : len(rows)] += off

    def keep(self, i: int, member: int, episode: int) -> None:
        self._kept[member, episode] = self._sums[:, i].copy()

    def forget(self, i: int) -> None:
        self._sums[:, i] = 0

    def move(self, origin: int, to: int) -> None:
        self._sums[:, to] = self._sums[:, origin]

    def moments(self, count: int) -> Arrays:
        first, second = np.stack([self._kept[key] for key in sorted(self._kept)]).sum(0)
        mean = first / count
        return {
            "obs/count": np.array([float(count)]),
            "obs/mean": self._origin + mean,
            "obs/m2": np.maximum(second - first * mean, 0.0),
        }
