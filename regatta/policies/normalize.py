"""Running moments of observations and returns, and the normalisation a policy applies with them.

Moments are merged by the learner alone, in lane order, in float64; a snapshot carries what a worker needs of
them as float32 arrays `stats/mean` and `stats/scale`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regatta.types import Array, Arrays

OBS_CLIP = 10.0
EPSILON = 1e-8


class Moments:
    """Count, mean and sum of squared deviations, merged batch by batch (Chan et al. 1979)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0.0
        self.mean = np.zeros(shape)
        self.m2 = np.zeros(shape)

    def merge(self, batch: Array) -> None:
        """Add the rows of `batch` [rows, ...]."""
        if len(batch) == 0:
            return
        rows = batch.astype(np.float64)
        count, mean = float(len(rows)), rows.mean(0)
        delta = mean - self.mean
        total = self.count + count
        self.m2 = self.m2 + ((rows - mean) ** 2).sum(0) + delta**2 * (self.count * count / total)
        self.mean = self.mean + delta * (count / total)
        self.count = total

    @property
    def std(self) -> Array:
        return np.sqrt(self.m2 / self.count + EPSILON) if self.count else np.ones_like(self.mean)

    def stats(self) -> Arrays:
        """What a snapshot carries of them."""
        return {
            "stats/mean": self.mean.astype(np.float32),
            "stats/scale": (1.0 / self.std).astype(np.float32),
        }

    def state(self, prefix: str) -> Arrays:
        return {
            prefix + "/count": np.array([self.count]),
            prefix + "/mean": np.asarray(self.mean),
            prefix + "/m2": np.asarray(self.m2),
        }

    def load(self, arrays: Arrays, prefix: str) -> None:
        self.count = float(arrays[prefix + "/count"][0])
        self.mean = np.array(arrays[prefix + "/mean"])
        self.m2 = np.array(arrays[prefix + "/m2"])


def normalize(xp: Any, obs: Any, mean: Any, scale: Any) -> Any:
    return xp.clip((obs - mean) * scale, -OBS_CLIP, OBS_CLIP)


class RewardScale:
    """Divides rewards by the running deviation of the discounted return, per environment, never shifting them."""

    CLIP = 10.0

    def __init__(self, gamma: float, envs: int) -> None:
        self.gamma = gamma
        self.moments = Moments(())
        self.discounted = np.zeros(envs)

    def scale(self, rewards: Array, done: Array) -> Array:
        """Rewards [T, M] scaled; the moments take in this chunk first."""
        sums = np.empty(rewards.shape)
        for t, row in enumerate(rewards):
            self.discounted = self.discounted * self.gamma + row
            sums[t] = self.discounted
            self.discounted = np.where(done[t], 0.0, self.discounted)
        self.moments.merge(sums.reshape(-1))
        scaled: Array = np.clip(rewards / self.moments.std, -self.CLIP, self.CLIP).astype(np.float32)
        return scaled

    def restart(self) -> None:
        """The lanes begin new episodes."""
        self.discounted = np.zeros_like(self.discounted)

    def state(self) -> Arrays:
        return self.moments.state("reward") | {"reward/discounted": self.discounted}

    def load(self, arrays: Arrays) -> None:
        self.moments.load(arrays, "reward")
        self.discounted = np.array(arrays["reward/discounted"])
