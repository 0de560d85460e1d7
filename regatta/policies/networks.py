"""Networks as pure functions of named arrays, written once for NumPy (workers) and jax.numpy (learner)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from regatta.types import Array, Arrays


class NetworkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy's and the critic's network."""

    kind: Annotated[Literal["mlp"], Meta(description="the family of network")] = "mlp"
    sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=8192)], ...],
        Meta(min_length=1, max_length=16, description="units in each hidden layer"),
    ] = (64, 64)
    activation: Annotated[
        Literal["tanh", "relu", "elu", "silu"], Meta(description="function after each hidden layer")
    ] = "tanh"
    shared: Annotated[bool, Meta(description="one trunk for policy and critic instead of one each")] = False
    log_std: Annotated[
        float, Meta(ge=-10, le=4, description="initial log standard deviation of continuous actions")
    ] = 0.0


def activate(xp: Any, kind: str, x: Any) -> Any:
    if kind == "tanh":
        return xp.tanh(x)
    if kind == "relu":
        return xp.maximum(x, 0)
    if kind == "elu":
        return xp.where(x > 0, x, xp.expm1(xp.minimum(x, 0)))
    return 0.5 * x * (1 + xp.tanh(0.5 * x))  # silu: x * sigmoid(x), without an exp that overflows


def mlp(xp: Any, arrays: Any, names: list[str], activation: str, x: Any, *, last: bool = False) -> Any:
    """The layers `names` in order. The last one is linear unless `last` asks for its activation too."""
    for name in names[:-1]:
        x = activate(xp, activation, x @ arrays[name + "/w"] + arrays[name + "/b"])
    x = x @ arrays[names[-1] + "/w"] + arrays[names[-1] + "/b"]
    return activate(xp, activation, x) if last else x


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
