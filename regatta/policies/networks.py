"""Networks as pure functions of named arrays, written once for NumPy (workers) and jax.numpy (learner).

A network turns an observation into features; the policy puts its heads on them. Convolutions and memory have files
of their own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from regatta.errors import ConfigError, nearest
from regatta.named import function
from regatta.types import Array, Arrays

HIDDEN_GAIN = 2**0.5
KINDS = ("mlp", "linear", "cnn", "elman", "lstm")


class NetworkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy's and the critic's network."""

    kind: Annotated[
        str, Meta(description="mlp, linear, cnn, elman, lstm, or module:function that makes a network of your own")
    ] = "mlp"
    sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=8192)], ...],
        Meta(
            min_length=1,
            max_length=16,
            description="units in each hidden layer; elman, lstm: the last is the memory; cnn: after the convolutions",
        ),
    ] = (64, 64)
    activation: Annotated[
        Literal["tanh", "relu", "elu", "silu"], Meta(description="function after each hidden layer")
    ] = "tanh"
    convolutions: Annotated[
        Literal["nature", "residual"],
        Meta(description="cnn: three layers as in Mnih et al. 2015, or a small residual one"),
    ] = "nature"
    shared: Annotated[
        bool | None,
        Meta(description="one trunk for policy and critic instead of one each; none: with memory or for images"),
    ] = None
    log_std: Annotated[
        float, Meta(ge=-10, le=4, description="initial log standard deviation of continuous actions")
    ] = 0.0


class ObsSpec(msgspec.Struct, frozen=True):
    """An observation as it is stored: flat numbers, or an image [height, width, channels] of bytes."""

    shape: tuple[int, ...]
    dtype: Literal["float32", "uint8"] = "float32"

    @property
    def image(self) -> bool:
        return self.dtype == "uint8"


class Network(Protocol):
    """Between observation and heads. `prefix` names its arrays, so that one network can stand twice in a policy.

    A user's own network is an object with these members; `state_size` and `needs_jax` may be left out.
    """

    outputs: int
    state_size: int  # numbers of memory per environment; 0: none
    needs_jax: bool  # `xp` must be jax.numpy, in workers too

    def init(self, rng: np.random.Generator, prefix: str) -> Arrays: ...

    def apply(self, xp: Any, arrays: Any, prefix: str, x: Any, state: Any) -> tuple[Any, Any]:
        """Features of the observations x [..., *shape], and the memory after them (None where there is none)."""
        ...


def network(config: NetworkConfig, obs: ObsSpec) -> Network:
    from regatta.policies.convolution import Convolution
    from regatta.policies.recurrent import Recurrent

    if ":" in config.kind:
        return _users_own(config.kind, obs)
    if config.kind not in KINDS:
        close = nearest(config.kind, KINDS)
        raise ConfigError(
            f"network.kind = {config.kind!r}: expected {', '.join(KINDS)} or module:function{close and ';' + close}"
        )
    if config.kind == "cnn":
        return Convolution(config, obs)
    if config.kind in ("elman", "lstm"):
        return Recurrent(config, obs)
    return Mlp(config if config.kind == "mlp" else None, obs)


class Mlp:
    """Dense layers; without a config none at all, which makes the policy linear."""

    state_size = 0
    needs_jax = False

    def __init__(self, config: NetworkConfig | None, obs: ObsSpec) -> None:
        sizes = config.sizes if config is not None else ()
        self.widths = (int(np.prod(obs.shape)), *sizes)
        self.outputs = self.widths[-1]
        self.activation = config.activation if config is not None else ""
        self.rank = len(obs.shape)

    def init(self, rng: np.random.Generator, prefix: str) -> Arrays:
        return init_layers(rng, prefix, self.widths)

    def apply(self, xp: Any, arrays: Any, prefix: str, x: Any, state: Any) -> tuple[Any, Any]:
        if self.rank > 1:
            x = x.reshape(*x.shape[: -self.rank], -1)
        return dense(xp, arrays, prefix, len(self.widths) - 1, self.activation, x), state


class UsersOwn:
    """A network from the user's module, with what its object may leave out filled in."""

    def __init__(self, made: Any) -> None:
        self.outputs = int(made.outputs)
        self.state_size = int(getattr(made, "state_size", 0))
        self.needs_jax = bool(getattr(made, "needs_jax", False))
        self._made = made

    def init(self, rng: np.random.Generator, prefix: str) -> Arrays:
        return {f"{prefix}/{name}": np.asarray(array, np.float32) for name, array in self._made.init(rng).items()}

    def driven(self, xp: Any, arrays: Any, prefix: str, x: Any) -> Any:
        return x

    def cell(self, xp: Any, arrays: Any, prefix: str, driven: Any, state: Any) -> tuple[Any, Any]:
        return self.apply(xp, arrays, prefix, driven, state)

    def apply(self, xp: Any, arrays: Any, prefix: str, x: Any, state: Any) -> tuple[Any, Any]:
        own = {name.removeprefix(prefix + "/"): a for name, a in arrays.items() if name.startswith(prefix + "/")}
        if self.state_size:
            features, state = self._made.apply(xp, own, x, state)
            return features, state
        return self._made.apply(xp, own, x), state


def _users_own(kind: str, obs: ObsSpec) -> UsersOwn:
    make = function("network.kind", kind)
    try:
        return UsersOwn(make(obs.shape))
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"network.kind = {kind!r}: {error}. It must name a function that takes the observation's shape and returns "
            "an object with outputs, init(rng) and apply(xp, arrays, x)"
        ) from error


def activate(xp: Any, kind: str, x: Any) -> Any:
    if kind == "tanh":
        return xp.tanh(x)
    if kind == "relu":
        return xp.maximum(x, 0)
    if kind == "elu":
        return xp.where(x > 0, x, xp.expm1(xp.minimum(x, 0)))
    return 0.5 * x * (1 + xp.tanh(0.5 * x))  # silu: x * sigmoid(x), without an exp that overflows


def linear(arrays: Any, name: str, x: Any) -> Any:
    return x @ arrays[name + "/w"] + arrays[name + "/b"]


def dense(xp: Any, arrays: Any, prefix: str, count: int, activation: str, x: Any) -> Any:
    """The hidden layers prefix/0, prefix/1, ..."""
    for i in range(count):
        x = activate(xp, activation, linear(arrays, f"{prefix}/{i}", x))
    return x


def init_layers(rng: np.random.Generator, prefix: str, widths: tuple[int, ...]) -> Arrays:
    arrays: Arrays = {}
    for i in range(len(widths) - 1):
        arrays |= init_layer(rng, f"{prefix}/{i}", widths[i], widths[i + 1], HIDDEN_GAIN)
    return arrays


def init_layer(rng: np.random.Generator, name: str, rows: int, columns: int, gain: float) -> Arrays:
    """Orthogonal weights (Saxe et al. 2014) times `gain`, and zero biases."""
    return {
        name + "/w": (gain * orthogonal(rng, rows, columns)).astype(np.float32),
        name + "/b": np.zeros(columns, np.float32),
    }


def orthogonal(rng: np.random.Generator, rows: int, columns: int) -> Array:
    tall = rng.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(tall)
    q = q * np.sign(np.diagonal(r))  # makes the decomposition, and so the distribution, unique
    matrix: Array = q if rows >= columns else q.T
    return matrix
