"""A policy: observation statistics, network and action distribution as one pure function of a snapshot's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from regatta.policies.distributions import ActionSpec, distribution
from regatta.policies.networks import NetworkConfig, init_layer, mlp
from regatta.policies.normalize import normalize
from regatta.types import Array, Arrays

HIDDEN_GAIN = 2**0.5
POLICY_GAIN = 0.01  # near-uniform first actions (Andrychowicz et al. 2021)
VALUE_GAIN = 1.0


class PolicySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a policy but its numbers: what workers and run records need to rebuild it."""

    obs_size: int
    action: ActionSpec
    network: NetworkConfig
    normalized: bool  # by observation statistics, which are then part of every snapshot


class Policy:
    """Actor and critic over flat observations. Holds no parameters."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.obs_size = spec.obs_size
        self.action = spec.action
        self.network = spec.network
        self.distribution = distribution(spec.action)
        hidden = [f"{i}" for i in range(len(spec.network.sizes))]
        trunks = ("trunk", "trunk") if spec.network.shared else ("pi", "vf")
        self.actor_layers = [f"{trunks[0]}/{i}" for i in hidden] + ["pi/out"]
        self.critic_layers = [f"{trunks[1]}/{i}" for i in hidden] + ["vf/out"]

    def init(self, rng: np.random.Generator) -> Arrays:
        arrays: Arrays = {}
        for layers, outputs, gain in (
            (self.actor_layers, self.action.outputs, POLICY_GAIN),
            (self.critic_layers, 1, VALUE_GAIN),
        ):
            widths = (self.obs_size, *self.network.sizes, outputs)
            for i, name in enumerate(layers):
                if name + "/w" not in arrays:
                    last = i == len(layers) - 1
                    arrays |= init_layer(rng, name, widths[i], widths[i + 1], gain if last else HIDDEN_GAIN)
        if self.action.kind == "box":
            arrays["pi/log_std"] = np.full(self.action.outputs, self.network.log_std, np.float32)
        return arrays

    def act_out(self, xp: Any, arrays: Any, obs: Any) -> Any:
        """What the distribution needs, from normalised observations."""
        out = mlp(xp, arrays, self.actor_layers, self.network.activation, obs)
        return (out, arrays["pi/log_std"]) if self.action.kind == "box" else out

    def value(self, xp: Any, arrays: Any, obs: Any) -> Any:
        return mlp(xp, arrays, self.critic_layers, self.network.activation, obs)[..., 0]

    def act_and_value(self, xp: Any, arrays: Any, obs: Any) -> tuple[Any, Any]:
        if not self.network.shared:
            return self.act_out(xp, arrays, obs), self.value(xp, arrays, obs)
        features = mlp(xp, arrays, self.actor_layers[:-1], self.network.activation, obs, last=True)
        out = mlp(xp, arrays, ["pi/out"], "", features)
        value = mlp(xp, arrays, ["vf/out"], "", features)[..., 0]
        return ((out, arrays["pi/log_std"]) if self.action.kind == "box" else out), value

    def normalize(self, xp: Any, arrays: Any, obs: Any) -> Any:
        return normalize(xp, obs, arrays["stats/mean"], arrays["stats/scale"]) if self.spec.normalized else obs

    def player(self, arrays: Arrays) -> Callable[[Array, Array | None, Array | None], Array]:
        """A function (obs [N, D], noise or None, mask or None) -> actions [N, ...] in NumPy; no noise: the mode."""

        def play(obs: Array, noise: Array | None, mask: Array | None) -> Array:
            out = self.act_out(np, arrays, self.normalize(np, arrays, obs))
            if noise is None:
                return self.distribution.mode(out, mask)  # type: ignore[no-any-return]
            return self.distribution.sample(out, noise, mask)  # type: ignore[no-any-return]

        return play
