"""What the learner asks of an algorithm, and the one way trajectories of many lanes become one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from regatta.errors import ConfigError
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.policy import Policy
from regatta.types import Array, Arrays, Collect, Result, Snapshot, Task

Staleness = Literal[0, 1, "free"]
Metrics = dict[str, float]


class Algorithm(Protocol):
    """Pure of IO: it says what to order, learns from the results, and gives and takes its whole state."""

    policy: Policy
    total_steps: int  # in environments; the run ends with the iteration that reaches it

    @property
    def staleness(self) -> Staleness: ...

    def tasks(self, iteration: int, version: int) -> list[tuple[Task, Arrays]]:
        """What iteration `iteration` needs, to be done with snapshot `version`, with the arrays that go along."""
        ...

    def update(self, iteration: int, results: list[tuple[Result, Arrays]], behaviour: Snapshot) -> Metrics:
        """Learn from an iteration's results, in the order of its tasks, made with the snapshot `behaviour`.

        Under staleness "free" they are whatever has come, made with snapshots of several ages.

        Raises NonFinite and leaves the policy as it was when the update cannot be trusted.
        """
        ...

    def snapshot(self, version: int) -> Snapshot:
        """The policy as it is now, under this version number."""
        ...

    def restart(self) -> None:
        """All lanes begin new episodes."""
        ...

    def state(self) -> Arrays:
        """All that a checkpoint must hold, apart from the blocks."""
        ...

    def blocks(self) -> dict[str, Arrays]:
        """What never changes once it is there, by a name that is never used again: saved once, not every time."""
        ...

    def load(self, arrays: Arrays) -> None:
        """`state` again, and each block's arrays under the block's name."""
        ...


def trajectories(lanes: int, iteration: int, version: int, steps: int) -> list[tuple[Task, Arrays]]:
    """The tasks of an iteration in which every lane collects."""
    return [(Collect(lane, iteration, version, steps, 0), {}) for lane in range(lanes)]


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


def final_values(
    policy: Policy, arrays: Arrays, rows: Array, index: Array, shape: tuple[int, ...], state: Array | None = None
) -> Array:
    """The values of final observations `rows` where they stand in the batch, zero elsewhere, [T, M]."""
    values = np.zeros(shape, np.float32)
    if len(rows):
        # Beside the compiled call, which keeps one shape, on as many rows as there are.
        xp: Any = np
        if policy.network.needs_jax:
            import jax.numpy as xp
        found = policy.value(xp, arrays, policy.normalize(xp, arrays, rows), state)
        values[index[:, 0], index[:, 1]] = np.asarray(found)
    return values


def blame(parameters: Arrays, data: Mapping[str, Any], lanes: int) -> str:
    """Name the tensor, lane and environment behind a non-finite update, or the likeliest if all came in finite."""
    for name, array in parameters.items():
        if not np.isfinite(array).all():
            return f"parameter {name} is not finite"
    envs = data["rewards"].shape[1] // lanes
    for name in ("obs", "rewards", "actions", "final_values"):
        bad = ~np.isfinite(data[name])
        if bad.any():
            column = int(np.argwhere(bad)[0][1])
            return f"{name} of lane {column // envs}, environment {column % envs} is not finite"
    size = np.abs(data["rewards"]).max(0)
    column = int(size.argmax())
    return (
        f"the loss is not finite; the largest reward, {size[column]:.3g}, is of lane {column // envs}, environment "
        f"{column % envs}; a smaller learning rate, normalize_obs or normalize_reward may help"
    )


# -- faults between knobs that several algorithms share -------------------------------------------------------

SIZES = ("env.lanes", "env.lane_envs", "algorithm.rollout_steps")


def product(lanes: int, lane_envs: int, rollout_steps: int) -> str:
    return (
        f"{lanes * lane_envs * rollout_steps} samples an iteration (env.lanes {lanes} x env.lane_envs {lane_envs} x "
        f"algorithm.rollout_steps {rollout_steps})"
    )


def too_few_steps(steps: int, lanes: int, lane_envs: int, rollout_steps: int) -> Iterator[tuple[set[str], str]]:
    samples = lanes * lane_envs * rollout_steps
    if steps < samples:
        yield (
            {*SIZES, "run.steps"},
            f"run.steps = {steps}: too few for the {product(lanes, lane_envs, rollout_steps)}; "
            f"run.steps={samples} is one iteration",
        )


def nearest_divisor(number: int, start: int) -> int:
    if start >= number:
        return number
    # The bound keeps absurd sizes from searching for ever; 1 always divides.
    for distance in range(min(start, 100_000)):
        for divisor in (start - distance, start + distance):
            if number % divisor == 0:
                return divisor
    return math.gcd(number, start)


def refuse_image_statistics(obs: ObsSpec, normalize_obs: bool) -> None:
    if normalize_obs and obs.image:
        raise ConfigError(
            "algorithm.normalize_obs = true: the observations are images, whose bytes are scaled to fractions already; "
            "set it to false"
        )


def refuse_memory(network: NetworkConfig, algorithm: str) -> None:
    if network.kind in ("elman", "lstm"):
        raise ConfigError(
            f"network.kind = {network.kind!r}: {algorithm} takes networks without memory; "
            "ppo, es and blackbox take this one"
        )
