"""A lane with a small policy, ready to collect."""

from __future__ import annotations

import numpy as np

from regatta.policies.policy import Policy
from regatta.rollout.envs import EnvConfig
from regatta.rollout.lane import Act, Lane
from regatta.rollout.watch import Watch
from regatta.types import Array, Arrays, Collect, Episode, Fault

Chunk = tuple[Arrays, list[Episode], list[Fault]]


class Rig:
    """A lane with a small policy of its own."""

    def __init__(self, config: EnvConfig, policy: Policy, watch: Watch, number: int, seed: int) -> None:
        self.policy = policy
        self.act: Act = policy.player(policy.init(np.random.default_rng(0)))
        self.lane = Lane(number, config, policy, seed, watch)

    def collect(self, iteration: int = 0, steps: int = 16, *, origin: int = 0, attempt: int = 0) -> Chunk:
        """A chunk that is ours to keep."""
        return self.carry_out(Collect(self.lane.number, iteration, 0, steps, origin, attempt))

    def carry_out(self, task: Collect, replay: Array | None = None) -> Chunk:
        self.lane.place(task, replay)
        arrays, episodes, faults = self.lane.collect(task, self.act)
        return {name: array.copy() for name, array in arrays.items()}, episodes, faults
