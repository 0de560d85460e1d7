"""A pool's environments as a lane sees them: all stepped by one call, then read one by one like any others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regatta.rollout.envs import EnvConfig
from regatta.rollout.pool import Pool, Stepped


class Bank:
    def __init__(self, config: EnvConfig) -> None:
        self.pool = Pool(config, config.lane_envs)
        self.members = [Member(self, i) for i in range(config.lane_envs)]
        self.stepped: Stepped
        self.fresh: dict[int, Any] = {}  # first observations not yet taken

    def seed(self, numbers: Sequence[int]) -> None:
        """New environments with these seeds; each member's next reset gives its first observation."""
        self.fresh = dict(enumerate(self.pool.reset(numbers)))

    def step(self, actions: list[Any]) -> None:
        """Every member's next step gives its own part of this."""
        self.stepped = self.pool.step(np.asarray(actions))


class Member:
    """One environment of a bank, as far as a lane calls it."""

    def __init__(self, bank: Bank, index: int) -> None:
        self._bank = bank
        self._index = index
        self.observation_space = bank.pool.observation_space
        self.action_space = bank.pool.action_space

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        i, (obs, rewards, terminated, truncated) = self._index, self._bank.stepped
        return obs[i], float(rewards[i]), bool(terminated[i]), bool(truncated[i]), {}

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """A single member cannot be seeded again: its own stream goes on."""
        first = self._bank.fresh.pop(self._index, None)
        return (first if first is not None else self._bank.pool.reset_ids([self._index])[0]), {}

    def close(self) -> None:
        self._bank.pool.close()
