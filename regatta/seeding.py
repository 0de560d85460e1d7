"""Random streams by name. The same words give the same numbers, whoever asks and in whatever order.

A stream is a function of (run seed, purpose, numbers): lane 3 at iteration 17 draws the same noise on any
worker. Nothing here keeps state.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_PURPOSES: Final = {
    "init": 1,
    "reset": 2,
    "action": 3,
    "minibatch": 4,
    "play": 5,
    "table": 6,
    "member": 7,
    "score": 8,
    "replay": 9,
    "search": 10,
}


def stream(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A generator for this purpose and these numbers."""
    entropy = np.random.SeedSequence([seed, _PURPOSES[purpose], *numbers])
    return np.random.Generator(np.random.Philox(entropy))


def seeds(seed: int, purpose: str, *numbers: int, count: int) -> list[int]:
    """`count` independent seeds, each fit for `env.reset(seed=...)`."""
    return [int(n) for n in stream(seed, purpose, *numbers).integers(0, 2**31 - 1, size=count)]
