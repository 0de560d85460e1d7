"""Evolution strategies (Salimans et al. 2017): gradient ascent on the score, smoothed by noise on the parameters.

One iteration is a generation: members in mirrored pairs, the parameters plus and minus the same noise, are ranked by
their scores, and the parameters follow the noise of those that rank high. Noise never travels: a member's number says
which slice of a table that everyone has is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from regatta.algorithms.base import Metrics, refuse_image_statistics
from regatta.algorithms.generation import Seeding, described, evaluation, fitness, shares, take_in, too_few_steps
from regatta.errors import NonFinite
from regatta.policies.distributions import ActionSpec
from regatta.policies.flat import Layout
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.noise import noise_table
from regatta.policies.normalize import Moments
from regatta.policies.policy import Policy, PolicySpec
from regatta.seeding import stream
from regatta.types import Array, Arrays, Result, Score, Snapshot, Task

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # of Adam


class ESConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="es"):
    """Evolution strategies."""

    population: Annotated[int, Meta(ge=2, le=10**6, description="members of a generation, in mirrored pairs")] = 128
    episodes: Annotated[int, Meta(ge=1, description="episodes each member plays; its score is their mean")] = 1
    sigma: Annotated[float, Meta(gt=0, le=100, description="deviation of the noise on the parameters")] = 0.02
    lr: Annotated[float, Meta(gt=0, le=10, description="Adam's learning rate")] = 0.01
    lr_schedule: Annotated[
        Literal["constant", "linear"], Meta(description="linear: the rate falls to zero over run.steps")
    ] = "constant"
    weight_decay: Annotated[float, Meta(ge=0, le=1, description="pull of the parameters towards zero")] = 0.005
    seeding: Annotated[
        Seeding,
        Meta(description="environment seeds: fresh for each pair, one set per generation, or fixed for the run"),
    ] = "fresh"
    action_noise: Annotated[
        float, Meta(ge=0, le=100, description="deviation of noise on continuous actions while members are scored")
    ] = 0.0
    normalize_obs: Annotated[bool, Meta(description="scale observations by their running mean and deviation")] = False
    evaluate_episodes: Annotated[
        int, Meta(ge=0, description="episodes played each generation without noise, for the record; 0: none")
    ] = 1
    staleness: Annotated[
        Literal[0, 1],
        Meta(description="0: score, then learn; 1: score the next generation while learning"),
    ] = 0

    def policy(self, obs: ObsSpec, action: ActionSpec, bounded: bool, network: NetworkConfig) -> PolicySpec:
        refuse_image_statistics(obs, self.normalize_obs)
        return PolicySpec(obs, action, network, self.normalize_obs, critic=False, head="exact")

    def faults(self, network: NetworkConfig, lanes: int, lane_envs: int, steps: int) -> Iterator[tuple[set[str], str]]:
        yield from too_few_steps(steps, self.population, self.episodes)
        if self.population % 2:
            yield (
                {"algorithm.population"},
                f"algorithm.population = {self.population}: members come in pairs; "
                f"algorithm.population={self.population + 1} is even",
            )

    def build(self, policy: Policy, lanes: int, lane_envs: int, seed: int, steps: int) -> ES:
        return ES(self, policy, lanes, seed, steps)


def centred_ranks(scores: Array) -> Array:
    """From -0.5 for the worst to 0.5 for the best; equal scores share their mean rank, so that they weigh the same."""
    _, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
    upper = counts.cumsum()
    ranks = (upper - 1 + upper - counts) / 2
    centred: Array = (ranks[where] / (len(scores) - 1) - 0.5).astype(np.float32)
    return centred


class Adam:
    """Kingma and Ba 2015, on one vector."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean: Array = np.zeros(size, np.float32)
        self.square: Array = np.zeros(size, np.float32)

    def step(self, gradient: Array, lr: float) -> Array:
        """How far to go against the gradient."""
        self.count += 1
        self.mean = BETA1 * self.mean + (1 - BETA1) * gradient
        self.square = BETA2 * self.square + (1 - BETA2) * gradient**2
        rate = lr * (1 - BETA2**self.count) ** 0.5 / (1 - BETA1**self.count)
        change: Array = -rate * self.mean / (np.sqrt(self.square) + EPSILON)
        return change

    def state(self) -> Arrays:
        return {"adam/count": np.array([self.count]), "adam/mean": self.mean, "adam/square": self.square}

    def load(self, arrays: Arrays) -> None:
        self.count = int(arrays["adam/count"][0])
        self.mean, self.square = np.array(arrays["adam/mean"]), np.array(arrays["adam/square"])


class ES:
    """The state of one run: parameters, Adam's moments, and those of the observations."""

    def __init__(self, config: ESConfig, policy: Policy, lanes: int, seed: int, steps: int) -> None:
        self.config = config
        self.policy = policy
        self.staleness = config.staleness
        self.total_steps = steps
        self._seed = seed
        self._shares = shares(config.population, lanes, whole=2)
        arrays = policy.init(stream(seed, "init"))
        self.layout = Layout(arrays)
        self._theta: Array = self.layout.flatten(np, arrays)
        self._adam = Adam(self.layout.size)
        self._moments = Moments(policy.obs.shape) if config.normalize_obs else None
        self._steps = 0

    def tasks(self, iteration: int, version: int) -> list[tuple[Task, Arrays]]:
        config = self.config
        orders: list[tuple[Task, Arrays]] = [
            (
                Score(
                    *(iteration, version, first, count, config.episodes),
                    sigma=config.sigma,
                    mirrored=True,
                    seeding=config.seeding,
                    action_noise=config.action_noise,
                ),
                {},
            )
            for first, count in self._shares
        ]
        return evaluation(iteration, version, config.population, config.evaluate_episodes) + orders

    def update(self, iteration: int, results: list[tuple[Result, Arrays]], behaviour: Snapshot) -> Metrics:
        config = self.config
        evaluated = 1 if config.evaluate_episodes else 0
        scores = fitness(results[evaluated:])
        gradient = self.gradient(iteration, scores)
        # As in the paper's own code: no division by sigma, and the decay is part of what Adam sees.
        descent = config.weight_decay * self._theta - gradient
        if not np.isfinite(scores).all() or not np.isfinite(descent).all():
            raise NonFinite(self._blame(scores))
        remaining = max(0.0, 1.0 - self._steps / self.total_steps)
        lr = config.lr * (remaining if config.lr_schedule == "linear" else 1.0)
        change = self._adam.step(descent, lr)
        length = float(np.linalg.norm(self._theta))
        self._theta = self._theta + change
        self._steps += sum(result.steps for result, _ in results)
        if self._moments is not None:
            take_in(self._moments, results)
        return {
            **described(scores, results[evaluated:], results[:evaluated]),
            "grad_norm": float(np.linalg.norm(gradient)),
            "update_ratio": float(np.linalg.norm(change)) / max(length, 1e-12),
            "lr": lr,
        }

    def gradient(self, iteration: int, scores: Array) -> Array:
        """Of the expected rank, by the parameters [P], up to a factor of sigma."""
        weights = centred_ranks(scores)
        table = noise_table(self._seed, self.layout.size)
        offsets, _ = table.members(iteration, 0, len(scores), True)
        return table.combine(offsets[::2], (weights[::2] - weights[1::2]) / len(scores))

    def _blame(self, scores: Array) -> str:
        for name, array in self.layout.split(self._theta).items():
            if not np.isfinite(array).all():
                return f"parameter {name} is not finite"
        return f"the score of member {int(np.argmin(np.isfinite(scores)))} is not finite"

    def snapshot(self, version: int) -> Snapshot:
        stats = {} if self._moments is None else self._moments.stats()
        return Snapshot(version, self.layout.split(self._theta.copy()) | stats)

    def restart(self) -> None:
        """Every generation begins new episodes anyway."""

    def state(self) -> Arrays:
        moments = {} if self._moments is None else self._moments.state("obs")
        return {"theta": self._theta, "steps": np.array([self._steps])} | self._adam.state() | moments

    def blocks(self) -> dict[str, Arrays]:
        return {}

    def load(self, arrays: Arrays) -> None:
        self._theta = np.array(arrays["theta"])
        self._steps = int(arrays["steps"][0])
        self._adam.load(arrays)
        if self._moments is not None:
            self._moments.load(arrays, "obs")
