"""What all searches by populations share: a generation's orders, its fitness, and the figures that describe it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import numpy as np

from regatta.algorithms.base import Metrics
from regatta.policies.normalize import Moments
from regatta.types import Array, Arrays, Result, Score, Task

Seeding = Literal["fresh", "generation", "fixed"]


def shares(population: int, lanes: int, whole: int = 1) -> list[tuple[int, int]]:
    """The population in at most `lanes` consecutive shares (first, count), never parting `whole` members."""
    groups = population // whole
    tasks = min(lanes, groups)
    bounds = [groups * k // tasks * whole for k in range(tasks + 1)]
    return [(first, end - first) for first, end in itertools.pairwise(bounds)]


def evaluation(iteration: int, version: int, population: int, episodes: int) -> list[tuple[Task, Arrays]]:
    """The order that has the snapshot itself played, to stand before all others: alone it gives no worker its fill."""
    if not episodes:
        return []
    return [(Score(iteration, version, population, episodes, 1, sigma=0.0, mirrored=False, seeding="fresh"), {})]


def fitness(results: list[tuple[Result, Arrays]]) -> Array:
    """Each member's mean score over its episodes, in the order of their numbers, [M]."""
    scores: Array = np.concatenate([arrays["scores"].mean(1) for _, arrays in results])
    return scores


def described(scores: Array, results: list[tuple[Result, Arrays]], evaluated: list[tuple[Result, Arrays]]) -> Metrics:
    """The population in a few figures, and how the snapshot itself played, if it did."""
    current = {"fitness_current": float(fitness(evaluated).mean())} if evaluated else {}
    return current | {
        "fitness_mean": float(scores.mean()),
        "fitness_best": float(scores.max()),
        "fitness_worst": float(scores.min()),
        "fitness_std": float(scores.std()),
        "steps_per_episode": float(np.concatenate([arrays["lengths"].reshape(-1) for _, arrays in results]).mean()),
    }


def take_in(moments: Moments, results: list[tuple[Result, Arrays]]) -> None:
    """Merge the moments that workers made of their observations."""
    for _, arrays in results:
        count, mean, m2 = float(arrays["obs/count"][0]), arrays["obs/mean"], arrays["obs/m2"]
        total = moments.count + count
        delta = mean - moments.mean
        moments.m2 = moments.m2 + m2 + delta**2 * (moments.count * count / total)
        moments.mean = moments.mean + delta * (count / total)
        moments.count = total


def too_few_steps(steps: int, population: int, episodes: int) -> Iterator[tuple[set[str], str]]:
    if steps < population * episodes:
        yield (
            {"run.steps", "algorithm.population", "algorithm.episodes"},
            f"run.steps = {steps}: too few for algorithm.population {population} x algorithm.episodes {episodes}; "
            "an episode has at least one step",
        )
