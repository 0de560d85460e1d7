"""What the learner asks of an algorithm, and the one way trajectories of many lanes become one batch."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from regatta.policies.policy import Policy
from regatta.types import Array, Arrays, Result, Snapshot, Task

Staleness = Literal[0, 1]
Metrics = dict[str, float]


class Algorithm(Protocol):
    """Pure of IO: it says what to order, learns from the results, and gives and takes its whole state."""

    policy: Policy
    staleness: Staleness
    steps_per_iteration: int
    total_iterations: int

    def tasks(self, iteration: int, version: int) -> list[Task]:
        """What iteration `iteration` needs, to be done with snapshot `version`."""
        ...

    def update(self, iteration: int, results: list[tuple[Result, Arrays]], behaviour: Snapshot) -> Metrics:
        """Learn from an iteration's results, in the order of its tasks, made with the snapshot `behaviour`.

        Raises NonFinite and leaves the policy as it was when the update cannot be trusted.
        """
        ...

    def snapshot(self, version: int) -> Snapshot:
        """The policy as it is now, under this version number."""
        ...

    def restart(self) -> None:
        """All lanes begin new episodes."""
        ...

    def state(self) -> Arrays: ...
    def load(self, arrays: Arrays) -> None: ...


def side_by_side(results: list[tuple[Result, Arrays]], name: str) -> Array:
    """Lane arrays [T, N, ...] joined in lane order to [T, M, ...]."""
    return np.concatenate([arrays[name] for _, arrays in results], axis=1)


def final_rows(results: list[tuple[Result, Arrays]]) -> tuple[Array, Array]:
    """Final observations of truncated episodes [K, ...], and where they stand in the batch [K, 2] as (t, column)."""
    rows, index, column = [], [], 0
    for _, arrays in results:
        rows.append(arrays["final_obs"])
        index.append(arrays["final_index"] + np.array([0, column], np.int32))
        column += arrays["rewards"].shape[1]
    return np.concatenate(rows), np.concatenate(index)
