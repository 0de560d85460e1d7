"""The records that travel: orders, results, snapshots. Data only; no behaviour beyond derived values.

What crosses a process boundary is one small typed header from this file plus named arrays (`codec.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """Step lane `lane` `steps` times with snapshot `version`.

    A worker that does not hold the lane as it stood at the end of iteration `iteration - 1` rebuilds it:
    seed it as at iteration `origin`, then replay the actions in the order's `replay` array  [S, N, ...]; the
    memory of a recurrent policy comes along as `state` [N, S].
    """

    lane: int
    iteration: int
    version: int
    steps: int
    origin: int
    attempt: int = 0  # > 0 after the lane's environments failed here: other seeds, so other luck


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Play `episodes` whole episodes with each of `count` members of a population, from number `first` on.

    A member's parameters are the snapshot's plus `sigma` times the noise its number stands for (`policies/noise.py`),
    or, where they cannot be told from a number, its row in the order's `members` array  [count, P].
    """

    generation: int
    version: int
    first: int
    count: int
    episodes: int
    sigma: float
    mirrored: bool  # members 2k and 2k + 1 share noise, with opposite signs, and environment seeds
    seeding: Literal["fresh", "generation", "fixed"]  # environment seeds: per pair, per generation, once and for all
    action_noise: float = 0.0  # deviation of what is added to continuous actions


class Play(msgspec.Struct, frozen=True, tag="play"):
    """Play `episodes` whole episodes with snapshot `version` in environments of their own."""

    version: int
    episodes: int
    seed: int
    deterministic: bool = True


Task = Collect | Play | Score


class Order(msgspec.Struct, frozen=True, tag="order"):
    """What the learner wants done. `id` is unique within the run's process."""

    id: int
    task: Task


class Episode(msgspec.Struct, frozen=True, array_like=True):
    """One finished episode. `step` is its last step within the chunk it ended in."""

    env: int
    step: int
    score: float  # the undiscounted sum of the environment's own rewards
    length: int


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """An environment failed and was replaced; `text` is its own traceback."""

    lane: int
    env: int
    text: str


class Result(msgspec.Struct, frozen=True, tag="result"):
    """What came of an order; the arrays beside it depend on the task.

    Collect: obs [T, N, ...]  last_obs [N, ...]  actions [T, N, ...]  rewards [T, N]  terminated [T, N]
             truncated [T, N]  valid [T, N]  final_obs [K, ...]  final_index [K, 2] (t, env), and where the policy
             has them mask [T, N, A]  state, last_state [N, S]  final_state [K, S]
    Score:   scores [M, E]  lengths [M, E], and where observations are normalised their moments over all steps:
             obs/count [1]  obs/mean, obs/m2 [...]
    Play:    none; the episodes say it all.
    """

    order: int
    version: int
    steps: int  # taken in environments
    episodes: list[Episode]
    faults: list[Fault]
    seconds: float
    lane: int = -1  # whose chunk it is; -1: nobody's


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The worker could not carry out the order; `text` is the traceback."""

    order: int
    text: str


FromWorker = Result | Failure


class SnapshotHeader(msgspec.Struct, frozen=True, tag="snapshot"):
    version: int


class Snapshot(msgspec.Struct, frozen=True):
    """A policy as it is published, checkpointed, evaluated: its arrays and its observation statistics."""

    version: int
    arrays: Arrays
