"""A policy: observation statistics, network and action distribution as one pure function of a snapshot's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from regatta.errors import ConfigError
from regatta.policies.compiled import prepare_jax
from regatta.policies.distributions import LOG_STD_RANGE, ActionSpec, distribution
from regatta.policies.networks import NetworkConfig, ObsSpec, init_layer, linear, network
from regatta.policies.normalize import normalize
from regatta.policies.recurrent import unroll
from regatta.types import Array, Arrays

POLICY_GAIN = 0.01  # near-uniform first actions (Andrychowicz et al. 2021)
VALUE_GAIN = 1.0

# (obs [N, ...], noise or None, mask or None, memory or None) -> actions [N, ...], memory; no noise: the mode
Act = Callable[[Array, Array | None, Array | None, Array | None], tuple[Array, Array | None]]


class PolicySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a policy but its numbers: what workers and run records need to rebuild it.

    `head`: actions drawn around an output with a deviation of its own ("drawn"), drawn with a deviation that the
    network gives and squashed into the action's bounds ("squashed"), or the network's output itself ("exact").
    """

    obs: ObsSpec
    action: ActionSpec
    network: NetworkConfig
    normalized: bool  # by observation statistics, which are then part of every snapshot
    critic: bool = True
    head: Literal["drawn", "squashed", "exact"] = "drawn"
    noise_colour: float = 0.0  # of the noise actions are drawn with: 0 white, 1 pink, 2 red


class Policy:
    """Actor, and critic where the algorithm has one, on one network or one each. Holds no parameters."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.obs = spec.obs
        self.action = spec.action
        self.distribution = distribution(spec.action, squashed=self.squashed)
        self.network = network(spec.network, spec.obs)
        self.state_size = self.network.state_size
        shared = spec.network.shared
        if shared is None:
            shared = bool(self.state_size) or self.obs.image
        if self.state_size and not shared:
            raise ConfigError("network.shared = false: a network with memory is one trunk for policy and critic")
        self.shared = shared and spec.critic
        self._actor, self._critic = ("trunk", "trunk") if self.shared else ("pi", "vf")
        self._step: Any = None

    @property
    def squashed(self) -> bool:
        return self.spec.head == "squashed" and self.action.kind == "box"

    def init(self, rng: np.random.Generator) -> Arrays:
        outputs = self.action.outputs * (2 if self.squashed else 1)
        arrays = self.network.init(rng, self._actor)
        arrays |= init_layer(rng, "pi/out", self.network.outputs, outputs, POLICY_GAIN)
        if self.spec.critic:
            if not self.shared:
                arrays |= self.network.init(rng, self._critic)
            arrays |= init_layer(rng, "vf/out", self.network.outputs, 1, VALUE_GAIN)
        if self.action.kind == "box" and self.spec.head == "drawn":
            arrays["pi/log_std"] = np.full(self.action.outputs, self.spec.network.log_std, np.float32)
        return arrays

    # -- pure functions of arrays and normalised observations -----------------------------------------------

    def normalize(self, xp: Any, arrays: Any, obs: Any) -> Any:
        """As the network takes them: images as fractions, the rest by their statistics."""
        if self.obs.image:
            return obs.astype(xp.float32) * xp.float32(1 / 255)
        return normalize(xp, obs, arrays["stats/mean"], arrays["stats/scale"]) if self.spec.normalized else obs

    def step(self, xp: Any, arrays: Any, obs: Any, state: Any) -> tuple[Any, Any]:
        """What the distribution needs, and the memory afterwards."""
        features, state = self.network.apply(xp, arrays, self._actor, obs, state)
        return self._out(xp, arrays, features), state

    def act_out(self, xp: Any, arrays: Any, obs: Any) -> Any:
        """What the distribution needs, for networks without memory."""
        return self.step(xp, arrays, obs, None)[0]

    def value(self, xp: Any, arrays: Any, obs: Any, state: Any = None) -> Any:
        features, _ = self.network.apply(xp, arrays, self._critic, obs, state)
        return linear(arrays, "vf/out", features)[..., 0]

    def act_and_value(self, xp: Any, arrays: Any, obs: Any) -> tuple[Any, Any]:
        if not self.shared:
            return self.act_out(xp, arrays, obs), self.value(xp, arrays, obs)
        features, _ = self.network.apply(xp, arrays, self._actor, obs, None)
        return self._out(xp, arrays, features), linear(arrays, "vf/out", features)[..., 0]

    def unroll(self, xp: Any, arrays: Any, obs: Any, state: Any, starts: Any) -> tuple[Any, Any, Any]:
        """Outputs and values of whole sequences [T, B, ...], and the memory before each step [T, B, S]."""
        memory: Any = self.network
        features, states = unroll(memory, arrays, self._actor, obs, state, starts)
        return self._out(xp, arrays, features), linear(arrays, "vf/out", features)[..., 0], states

    def _out(self, xp: Any, arrays: Any, features: Any) -> Any:
        out = linear(arrays, "pi/out", features)
        if self.action.kind != "box":
            return out
        if self.spec.head == "exact":
            return out, None
        if self.spec.head == "drawn":
            return out, arrays["pi/log_std"]
        n = self.action.outputs
        return out[..., :n], xp.clip(out[..., n:], *LOG_STD_RANGE)

    # -- acting ---------------------------------------------------------------------------------------------

    def first_state(self, count: int) -> Array | None:
        """The memory of `count` environments as their episodes begin."""
        return np.zeros((count, self.state_size), np.float32) if self.state_size else None

    def player(self, arrays: Arrays) -> Act:
        """Actions from raw observations, in NumPy, or compiled where the network needs it."""
        if self.network.needs_jax:
            return self._compiled_player(arrays)

        def play(obs: Array, noise: Array | None, mask: Array | None, state: Array | None) -> tuple[Array, Any]:
            out, state = self.step(np, arrays, self.normalize(np, arrays, obs), state)
            return self._choose(out, noise, mask), state

        return play

    def _choose(self, out: Any, noise: Array | None, mask: Array | None) -> Array:
        if noise is None:
            return self.distribution.mode(out, mask)  # type: ignore[no-any-return]
        return self.distribution.sample(out, noise, mask)  # type: ignore[no-any-return]

    def _compiled_player(self, arrays: Arrays) -> Act:
        prepare_jax()
        import jax
        import jax.numpy as jnp

        if self._step is None:
            self._step = jax.jit(lambda a, obs, state: self.step(jnp, a, self.normalize(jnp, a, obs), state))
        placed = jax.device_put(arrays)

        def play(obs: Array, noise: Array | None, mask: Array | None, state: Array | None) -> tuple[Array, Any]:
            out, after = self._step(placed, obs, state)
            out = jax.tree.map(np.asarray, out)
            return self._choose(out, noise, mask), None if after is None else np.array(after)

        return play
