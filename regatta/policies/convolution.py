"""Convolutions for images [height, width, channels], as matrix products over windows.

XLA's own, on a CPU and inside a scan, run in plain loops: one update of Pong took longer than ten minutes. Written as
products they are fast there, and NumPy has them too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regatta.errors import ConfigError
from regatta.policies.networks import HIDDEN_GAIN, NetworkConfig, ObsSpec, dense, init_layer, init_layers, linear
from regatta.types import Arrays

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # (channels, window, stride) of Mnih et al. 2015
RESIDUAL = (16, 32, 32)  # channels of each section, as in IMPALA (Espeholt et al. 2018), one block each
LOWEST = -3e38


class Convolution:
    """Convolutions, then the dense layers of network.sizes."""

    state_size = 0
    needs_jax = False

    def __init__(self, config: NetworkConfig, obs: ObsSpec) -> None:
        if len(obs.shape) not in (2, 3):
            raise ConfigError(
                f"network.kind = 'cnn': observations have shape {obs.shape}, which is no image; mlp takes them"
            )
        self.shape = (*obs.shape, 1) if len(obs.shape) == 2 else obs.shape
        self.rank = len(obs.shape)
        self.residual = config.convolutions == "residual"
        self.activation = config.activation
        self.sizes = config.sizes
        self.outputs = config.sizes[-1]
        height, width, _ = self.shape
        if self.residual:
            for _ in RESIDUAL:
                height, width = -(-height // 2), -(-width // 2)
            self.flat = height * width * RESIDUAL[-1]
            return
        for _, window, stride in NATURE:
            height, width = (height - window) // stride + 1, (width - window) // stride + 1
        if min(height, width) < 1:
            raise ConfigError(
                f"network.convolutions = 'nature': an image of {self.shape[0]} x {self.shape[1]} is too small (36 x 36 "
                "is the least); env.resize makes it larger, network.convolutions=residual takes any size"
            )
        self.flat = height * width * NATURE[-1][0]

    def init(self, rng: np.random.Generator, prefix: str) -> Arrays:
        arrays: Arrays = {}
        inputs = self.shape[-1]
        if self.residual:
            for i, channels in enumerate(RESIDUAL):
                arrays |= init_layer(rng, f"{prefix}/conv{i}", 9 * inputs, channels, HIDDEN_GAIN)
                for j in range(2):
                    arrays |= init_layer(rng, f"{prefix}/conv{i}/{j}", 9 * channels, channels, HIDDEN_GAIN)
                inputs = channels
        else:
            for i, (channels, window, _) in enumerate(NATURE):
                arrays |= init_layer(rng, f"{prefix}/conv{i}", window * window * inputs, channels, HIDDEN_GAIN)
                inputs = channels
        return arrays | init_layers(rng, prefix, (self.flat, *self.sizes))

    def apply(self, xp: Any, arrays: Any, prefix: str, x: Any, state: Any) -> tuple[Any, Any]:
        leading = x.shape[: -self.rank]
        x = x.reshape(*leading, *self.shape)
        x = self._sections(xp, arrays, prefix, x) if self.residual else self._layers(xp, arrays, prefix, x)
        x = x.reshape(*leading, self.flat)
        return dense(xp, arrays, prefix, len(self.sizes), self.activation, x), state

    def _layers(self, xp: Any, arrays: Any, prefix: str, x: Any) -> Any:
        for i, (_, window, stride) in enumerate(NATURE):
            x = xp.maximum(slide(xp, arrays, f"{prefix}/conv{i}", x, window, stride), 0)
        return x

    def _sections(self, xp: Any, arrays: Any, prefix: str, x: Any) -> Any:
        for i in range(len(RESIDUAL)):
            x = slide(xp, arrays, f"{prefix}/conv{i}", framed(xp, x, 0.0), 3, 1)
            x = shrunk(xp, x)
            inner = x
            for j in range(2):
                inner = slide(xp, arrays, f"{prefix}/conv{i}/{j}", framed(xp, xp.maximum(inner, 0), 0.0), 3, 1)
            x = x + inner
        return xp.maximum(x, 0)


def slide(xp: Any, arrays: Any, name: str, x: Any, window: int, stride: int) -> Any:
    """Each window x window patch of x [..., H, W, C] times the weights, whose rows are in the order of `patches`."""
    x = patches(xp, x, window, stride)
    *leading, count, height, width, size = x.shape
    rows = x.reshape(*leading, count * height * width, size)  # of a population, each member has weights of its own
    out = linear(arrays, name, rows)
    return out.reshape(*leading, count, height, width, out.shape[-1])


def patches(xp: Any, x: Any, window: int, stride: int) -> Any:
    """All windows of x [..., H, W, C], laid out flat: [..., H', W', window * window * C]."""
    if stride > 1 and window % stride == 0:  # stride x stride pixels become one with as many more channels
        *leading, height, width, channels = x.shape
        high, wide = height // stride, width // stride
        x = x[..., : high * stride, : wide * stride, :].reshape(*leading, high, stride, wide, stride, channels)
        x = xp.moveaxis(x, -4, -3).reshape(*leading, high, wide, stride * stride * channels)
        window, stride = window // stride, 1
    height, width = ((n - window) // stride + 1 for n in x.shape[-3:-1])
    return xp.concatenate(list(shifts(x, window, stride, height, width)), -1)


def shifts(x: Any, window: int, stride: int, height: int, width: int) -> Any:
    """Every pixel's neighbours, one place in the window after the other, [..., height, width, C] each."""
    for i in range(window):
        for j in range(window):
            yield x[..., i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride, :]


def framed(xp: Any, x: Any, value: float) -> Any:
    """With one pixel of `value` around."""
    return xp.pad(x, [(0, 0)] * (x.ndim - 3) + [(1, 1), (1, 1), (0, 0)], constant_values=value)


def shrunk(xp: Any, x: Any) -> Any:
    """Half the size, each pixel the largest of 3 x 3."""
    height, width = (math.ceil(n / 2) for n in x.shape[-3:-1])
    first, *others = shifts(framed(xp, x, LOWEST), 3, 2, height, width)
    for other in others:
        first = xp.maximum(first, other)
    return first
