"""Between Gymnasium's spaces and arrays: observations written as rows of numbers or images, actions read back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from gymnasium import spaces

from regatta.errors import ConfigError
from regatta.policies.distributions import ActionSpec
from regatta.policies.networks import ObsSpec
from regatta.types import Array

MASK_KEY = "action_mask"
_NUMBER_KINDS = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}  # space dtype kind -> dtype kinds it may hold

Write = Callable[[Array, Any], None]


class BadObservation(Exception):
    """What the environment returned does not fit its own observation space."""


class Interface(msgspec.Struct, frozen=True):
    """An environment as the policy sees it."""

    obs: ObsSpec
    action: ActionSpec
    bounded: bool = True  # whether continuous actions have finite bounds


def observation_spec(space: spaces.Space[Any]) -> ObsSpec:
    """How observations are stored: images of bytes as they are, all else as one row of float32 numbers."""
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3):
        return ObsSpec(space.shape, "uint8")
    return ObsSpec((observation_size(space),))


def observation_size(space: spaces.Space[Any]) -> int:
    """How many float32 numbers an observation takes; ConfigError for spaces that cannot be flattened."""
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        assert space.shape is not None
        return math.prod(space.shape)
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, spaces.Dict):
        parts = {key: part for key, part in space.spaces.items() if key != MASK_KEY}
        if parts and not any(isinstance(part, spaces.Dict) for part in parts.values()):
            return sum(observation_size(part) for part in parts.values())
    raise ConfigError(
        f"env.id: observation space {space} is not supported; valid are Box, Discrete, MultiDiscrete, MultiBinary "
        "and a flat Dict of those (gymnasium.wrappers.FlattenObservation may help)"
    )


def writer(space: spaces.Space[Any]) -> Write:
    """A function that checks an observation and writes it into a row as `observation_spec` says."""
    if observation_spec(space).image:
        return _write_image(space.shape)
    if isinstance(space, spaces.Discrete):
        return _write_choice(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return _write_choices(space)
    if isinstance(space, spaces.Dict):
        return _write_dict(space)
    assert space.shape is not None
    return _write_numbers(space.shape, _NUMBER_KINDS.get(np.dtype(space.dtype).kind, ""))


def _write_numbers(shape: tuple[int, ...], kinds: str) -> Write:
    flat = len(shape) == 1

    def write(row: Array, obs: Any) -> None:
        if not isinstance(obs, np.ndarray):
            obs = np.asarray(obs)
        if obs.shape != shape:
            raise BadObservation(f"observation has shape {obs.shape}, its space says {shape}")
        if obs.dtype.kind not in kinds:
            raise BadObservation(f"observation has dtype {obs.dtype}, which its space cannot hold")
        row[:] = obs if flat else obs.reshape(-1)

    return write


def _write_image(shape: tuple[int, ...] | None) -> Write:
    def write(row: Array, obs: Any) -> None:
        if not isinstance(obs, np.ndarray) or obs.dtype != np.uint8:
            raise BadObservation(f"observation is {getattr(obs, 'dtype', type(obs).__name__)}, its space says uint8")
        if obs.shape != shape:
            raise BadObservation(f"observation has shape {obs.shape}, its space says {shape}")
        row[...] = obs

    return write


def _write_choice(n: int, start: int) -> Write:
    def write(row: Array, obs: Any) -> None:
        if isinstance(obs, np.ndarray) and obs.shape == ():
            obs = obs[()]
        if not isinstance(obs, int | np.integer) or not 0 <= int(obs) - start < n:
            raise BadObservation(f"observation {obs!r} is not one of the {n} choices from {start} on")
        row[:] = 0
        row[int(obs) - start] = 1

    return write


def _write_choices(space: spaces.MultiDiscrete) -> Write:
    nvec, start = space.nvec.reshape(-1), space.start.reshape(-1)
    offsets = np.concatenate([[0], np.cumsum(nvec)[:-1]])

    def write(row: Array, obs: Any) -> None:
        choice = np.asarray(obs)
        if choice.shape != space.shape or choice.dtype.kind not in "iu":
            raise BadObservation(f"observation {obs!r} does not fit {space}")
        choice = choice.reshape(-1) - start
        if ((choice < 0) | (choice >= nvec)).any():
            raise BadObservation(f"observation {obs!r} does not fit {space}")
        row[:] = 0
        row[offsets + choice] = 1

    return write


def _write_dict(space: spaces.Dict) -> Write:
    parts: list[tuple[str, slice, Write]] = []
    at = 0
    for key, part in space.spaces.items():
        if key != MASK_KEY:
            size = observation_size(part)
            parts.append((key, slice(at, at + size), writer(part)))
            at += size

    def write(row: Array, obs: Any) -> None:
        for key, cut, write_part in parts:
            if key not in obs:
                raise BadObservation(f"observation lacks key {key!r}; it has {sorted(obs)}")
            write_part(row[cut], obs[key])

    return write


def action_spec(space: spaces.Space[Any], masked: bool) -> ActionSpec:
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", (int(space.n),), masked)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return ActionSpec("multidiscrete", tuple(int(n) for n in space.nvec), masked)
    if not masked:
        if isinstance(space, spaces.MultiBinary) and space.shape is not None and len(space.shape) == 1:
            return ActionSpec("multibinary", (space.shape[0],))
        if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
            return ActionSpec("box", (math.prod(space.shape),))
    raise ConfigError(
        f"env.id: action space {space}{' with an action mask' if masked else ''} is not supported; valid are "
        "Discrete and MultiDiscrete (with or without mask), Box of floats and flat MultiBinary"
    )


def bounded(space: spaces.Space[Any]) -> bool:
    return not isinstance(space, spaces.Box) or bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())


def to_env(space: spaces.Space[Any], squashed: bool = False) -> Callable[[Array], list[Any]]:
    """A function that turns a lane's action array [N, ...] into what each environment's `step` takes.

    `squashed`: continuous actions lie in (-1, 1) and are stretched to the bounds; otherwise they are clipped to them.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return (lambda actions: (actions + start).tolist()) if start else (lambda actions: actions.tolist())
    if isinstance(space, spaces.MultiDiscrete):
        offset, dtype = space.start, space.dtype
        return lambda actions: list((actions + offset).astype(dtype))
    if isinstance(space, spaces.MultiBinary):
        return lambda actions: list(actions.astype(space.dtype))
    assert isinstance(space, spaces.Box)
    low, high, shape, kind = space.low.reshape(-1), space.high.reshape(-1), space.shape, space.dtype
    if squashed:
        half = (high - low) / 2
        return lambda actions: list(((actions + 1) * half + low).clip(low, high).astype(kind).reshape(-1, *shape))
    if len(shape) == 1:
        return lambda actions: list(actions.clip(low, high).astype(kind, copy=False))
    return lambda actions: list(actions.clip(low, high).astype(kind, copy=False).reshape(-1, *shape))


def mask_of(obs: Any, info: dict[str, Any]) -> Any:
    """The environment's action mask, from `info` or from a Dict observation; None where it gives none."""
    if MASK_KEY in info:
        return info[MASK_KEY]
    return obs.get(MASK_KEY) if isinstance(obs, dict) else None


def read_mask(mask: Any, sizes: tuple[int, ...]) -> Array:
    """The mask as one row; `sizes` are the choices per dimension, and each dimension needs a legal one."""
    if mask is None:
        raise BadObservation(f"the environment gave an action mask before, and none now (info[{MASK_KEY!r}])")
    flat = np.concatenate([np.asarray(m).reshape(-1) for m in mask]) if isinstance(mask, tuple) else np.asarray(mask)
    flat = flat.reshape(-1).astype(bool)
    if flat.size != sum(sizes):
        raise BadObservation(f"action mask has {flat.size} entries, the action space has {sum(sizes)} choices")
    at = 0
    for size in sizes:
        if not flat[at : at + size].any():
            raise BadObservation("action mask allows no action at all")
        at += size
    return flat
