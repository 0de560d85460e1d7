"""Networks with memory: Elman's (1990) and the long short-term memory (Hochreiter and Schmidhuber 1997).

The memory is one array [..., S] per policy, zero at the start of every episode. Workers carry it from step to step,
the learner unrolls whole chunks from the memory they began with.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from regatta.policies.networks import NetworkConfig, ObsSpec, dense, init_layer, init_layers
from regatta.types import Arrays

FORGET_BIAS = 1.0  # remember at first (Jozefowicz et al. 2015)


class Memory(Protocol):
    """A network with memory, in two halves."""

    def driven(self, xp: Any, arrays: Any, prefix: str, x: Any) -> Any:
        """What the observations alone give the cell: no memory in it, so any number of steps at once."""
        ...

    def cell(self, xp: Any, arrays: Any, prefix: str, driven: Any, state: Any) -> tuple[Any, Any]:
        """One step: features, and the memory after it."""
        ...


def unroll(network: Memory, arrays: Any, prefix: str, obs: Any, state: Any, starts: Any) -> tuple[Any, Any]:
    """Features [T, B, F] of the observations [T, B, ...], and the memory before each of them [T, B, S].

    It begins with `state` [B, S], and anew wherever an episode begins: `starts` [T, B].
    """
    import jax
    import jax.numpy as jnp

    def step(state: Any, now: Any) -> Any:
        driven, start = now
        state = jnp.where(start[:, None], 0.0, state)
        features, after = network.cell(jnp, arrays, prefix, driven, state)
        return after, (features, state)

    _, (features, states) = jax.lax.scan(step, state, (network.driven(jnp, arrays, prefix, obs), starts))
    return features, states


class Recurrent:
    """Dense layers, then one memory cell; its features are what the cell shows."""

    needs_jax = False

    def __init__(self, config: NetworkConfig, obs: ObsSpec) -> None:
        self.widths = (int(np.prod(obs.shape)), *config.sizes[:-1])
        self.units = self.outputs = config.sizes[-1]
        self.lstm = config.kind == "lstm"
        self.state_size = 2 * self.units if self.lstm else self.units
        self.activation = config.activation
        self.rank = len(obs.shape)

    def init(self, rng: np.random.Generator, prefix: str) -> Arrays:
        arrays = init_layers(rng, prefix, self.widths)
        gates = 4 if self.lstm else 1
        cell = init_layer(rng, f"{prefix}/cell", self.widths[-1], gates * self.units, 1.0)
        blocks = [init_layer(rng, "", self.units, self.units, 1.0)["/w"] for _ in range(gates)]
        cell[f"{prefix}/cell/u"] = np.concatenate(blocks, axis=1)
        if self.lstm:
            cell[f"{prefix}/cell/b"][self.units : 2 * self.units] = FORGET_BIAS
        return arrays | cell

    def apply(self, xp: Any, arrays: Any, prefix: str, x: Any, state: Any) -> tuple[Any, Any]:
        return self.cell(xp, arrays, prefix, self.driven(xp, arrays, prefix, x), state)

    def driven(self, xp: Any, arrays: Any, prefix: str, x: Any) -> Any:
        if self.rank > 1:
            x = x.reshape(*x.shape[: -self.rank], -1)
        x = dense(xp, arrays, prefix, len(self.widths) - 1, self.activation, x)
        return x @ arrays[f"{prefix}/cell/w"] + arrays[f"{prefix}/cell/b"]

    def cell(self, xp: Any, arrays: Any, prefix: str, driven: Any, state: Any) -> tuple[Any, Any]:
        n = self.units
        total = driven + state[..., :n] @ arrays[f"{prefix}/cell/u"]
        if not self.lstm:
            shown = xp.tanh(total)
            return shown, shown
        take, keep, show = (_sigmoid(xp, total[..., i * n : (i + 1) * n]) for i in range(3))
        kept = keep * state[..., n:] + take * xp.tanh(total[..., 3 * n :])
        shown = show * xp.tanh(kept)
        return shown, xp.concatenate([shown, kept], -1)


def _sigmoid(xp: Any, x: Any) -> Any:
    return 0.5 * (1 + xp.tanh(0.5 * x))
