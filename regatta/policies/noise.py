"""Random numbers that need not travel: the noise actions are drawn with, and the noise of a population's members.

Both are functions of the run's seed and of numbers everyone knows, so learner and workers make them alike.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from regatta.policies.policy import Policy
from regatta.seeding import stream
from regatta.types import Array, Collect

COLOUR_BLOCK = 1024  # steps over which coloured noise is correlated
TABLE_LEAST = 2**24
TABLE_FACTOR = 16  # the table is at least this many times as long as one member's noise
SUM_BLOCK = 9984  # numbers: OpenBLAS shares more than 10,000 among threads, which take cores from workers


def action_noise(policy: Policy, seed: int, task: Collect, envs: int) -> Array:
    """What the actions of one chunk are drawn with, [T, N, ...].

    Coloured noise, whose power falls with frequency to the power of the colour (Eberhard et al. 2023), explores further
    than white noise. It comes in blocks longer than a chunk, of which each chunk takes its part.
    """
    numbers = (seed, "action", task.lane)
    colour = policy.spec.noise_colour
    if not colour:
        return policy.distribution.noise(stream(*numbers, task.iteration, task.attempt), task.steps, envs)
    begin = task.iteration * task.steps
    block, end = begin // COLOUR_BLOCK, (begin + task.steps - 1) // COLOUR_BLOCK
    blocks = [
        coloured(policy.distribution.noise(stream(*numbers, number, task.attempt), COLOUR_BLOCK, envs), colour)
        for number in range(block, end + 1)
    ]
    start = begin - block * COLOUR_BLOCK
    return np.concatenate(blocks)[start : start + task.steps]


def coloured(white: Array, colour: float) -> Array:
    """White noise [T, ...] with its spectrum tilted along time, at unit variance."""
    spectrum = np.fft.rfft(white, axis=0)
    frequency = np.fft.rfftfreq(len(white))
    frequency[0] = frequency[1]
    tilt = frequency ** (-colour / 2)
    tilt /= np.sqrt((tilt**2).mean())
    shaped: Array = np.fft.irfft(spectrum * tilt.reshape(-1, *(1,) * (white.ndim - 1)), len(white), axis=0)
    return shaped.astype(np.float32)


class NoiseTable:
    """One long row of Gaussian numbers, of which each member's noise is a slice (Salimans et al. 2017)."""

    def __init__(self, seed: int, size: int) -> None:
        """`size`: how many numbers one member needs."""
        self.seed = seed
        self.size = size
        length = max(TABLE_LEAST, TABLE_FACTOR * size)
        self.numbers = stream(seed, "table").standard_normal(length, dtype=np.float32)

    def offsets(self, generation: int, first: int, count: int) -> Array:
        """Where the slices of `count` draws begin; draw k of a generation is the same whoever asks."""
        highest = len(self.numbers) - self.size
        drawn = stream(self.seed, "member", generation).integers(0, highest + 1, size=first + count)
        chosen: Array = drawn[first:]
        return chosen

    def members(self, generation: int, first: int, count: int, mirrored: bool) -> tuple[Array, Array]:
        """Offset and sign of each member's noise. Mirrored, members 2k and 2k + 1 share draw k with opposite signs."""
        numbers = np.arange(first, first + count)
        if not mirrored:
            return self.offsets(generation, first, count), np.ones(count, np.float32)
        pairs = numbers // 2
        draws = self.offsets(generation, int(pairs[0]), int(pairs[-1] - pairs[0]) + 1)
        return draws[pairs - pairs[0]], (1 - 2 * (numbers % 2)).astype(np.float32)

    def slice(self, offset: int) -> Array:
        return self.numbers[offset : offset + self.size]

    def combine(self, offsets: Array, weights: Array) -> Array:
        """The sum of the slices at `offsets`, each times its weight, [P]: little more than reading them once."""
        from scipy.linalg.blas import saxpy

        total = np.zeros(self.size, np.float32)
        terms = list(zip(offsets.tolist(), weights.tolist(), strict=True))
        for begin in range(0, self.size, SUM_BLOCK):
            block = total[begin : begin + SUM_BLOCK]
            for offset, weight in terms:
                start = offset + begin
                saxpy(self.numbers[start : start + len(block)], block, a=weight)
        return total


@lru_cache(maxsize=1)
def noise_table(seed: int, size: int) -> NoiseTable:
    """Made once per process: it takes a tenth of a second."""
    return NoiseTable(seed, size)
