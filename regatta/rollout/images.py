"""What the agent sees and how often it acts: thin wrappers, one per knob, in NumPy alone.

An image is an array of bytes, height x width or height x width x channels, and stays one. Which wrappers are put on,
and in which order, is `view`'s business; making the environment is that of envs.py.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import msgspec
import numpy as np
from gymnasium import spaces

from regatta.errors import ConfigError
from regatta.rollout.spaces import MASK_KEY, BadObservation, mask_of
from regatta.types import Array

LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601

AnyEnv = gymnasium.Env[Any, Any]
Start = tuple[Any, dict[str, Any]]
Step = tuple[Any, Any, bool, bool, dict[str, Any]]


class View(msgspec.Struct, frozen=True):
    """The knobs of EnvConfig that lie between the environment and the agent; see there."""

    frame_skip: int = 1
    noop_max: int = 0
    grayscale: bool = False
    resize: tuple[int, ...] | None = None
    hide: tuple[int, ...] = ()
    frame_stack: int = 1
    pick: bool = False  # take the image out of a Dict, even where no other knob needs one


def view(env: AnyEnv, knobs: View) -> AnyEnv:
    """The environment seen through the knobs.

    Idle steps and skipping come first, as they are about the game's own frames; stacking last, as it keeps copies.
    """
    wants_image = knobs.pick or knobs.grayscale or knobs.resize is not None or knobs.frame_stack > 1
    if wants_image and isinstance(env.observation_space, spaces.Dict):
        env = Pick(env)
    if knobs.noop_max:
        env = Idle(env, knobs.noop_max)
    if knobs.frame_skip > 1:
        env = skipping(env, knobs.frame_skip)
    if knobs.grayscale:
        env = Gray(env)
    if knobs.resize is not None:
        env = Resize(env, *knobs.resize)
    if knobs.hide:
        env = Hide(env, knobs.hide)
    if knobs.frame_stack > 1:
        env = Stack(env, knobs.frame_stack)
    return env


def is_image(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def _image(env: AnyEnv, knob: str) -> tuple[int, ...]:
    space = env.observation_space
    if not isinstance(space, spaces.Box) or not is_image(space):
        raise ConfigError(f"{knob}: observations are {space}, not images of bytes")
    return space.shape


def _bytes(shape: tuple[int, ...]) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


class Pick(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The one image of a Dict observation, or the one called screen. An action mask moves to `info`."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        images = {key: part for key, part in env.observation_space.spaces.items() if is_image(part)}
        if len(images) != 1 and "screen" not in images:
            raise ConfigError(
                f"env.id: one image is wanted (env.grayscale, env.resize, env.frame_stack), and the observation has "
                f"{len(images)}: {env.observation_space}"
            )
        self._key = "screen" if "screen" in images else next(iter(images))
        self.observation_space = images[self._key]

    def _split(self, obs: Any, info: dict[str, Any]) -> Start:
        return obs[self._key], {**info, MASK_KEY: obs[MASK_KEY]} if MASK_KEY in obs else info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        return self._split(*self.env.reset(seed=seed, options=options))

    def step(self, action: Any) -> Step:
        obs, reward, end, cut, info = self.env.step(action)
        obs, info = self._split(obs, info)
        return obs, reward, end, cut, info


class Idle(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Up to `most` steps of action 0 after each reset, as many as the environment's own generator says."""

    def __init__(self, env: AnyEnv, most: int) -> None:
        super().__init__(env)
        self._most = most
        space = env.action_space
        self._action: Any = None
        if isinstance(space, spaces.Discrete):
            self._action = int(space.start)
        elif isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            self._action = np.zeros(space.shape, space.dtype)
        if not space.contains(self._action):
            raise ConfigError(f"env.noop_max: 0 is no action of {space}")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        obs, info = self.env.reset(seed=seed, options=options)
        _refuse_mask(obs, info, "env.noop_max")
        for _ in range(int(self.env.unwrapped.np_random.integers(self._most + 1))):
            obs, _, end, cut, info = self.env.step(self._action)
            if end or cut:
                obs, info = self.env.reset(options=options)
        return obs, info


class Skip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Each action `times` times, or until the episode ends; rewards add up.

    Of images the last two are merged, the brighter pixel of both: some games draw a sprite only every other frame
    (Mnih et al. 2015, Methods).
    """

    def __init__(self, env: AnyEnv, times: int) -> None:
        super().__init__(env)
        self._times = times
        self._merge = is_image(env.observation_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        obs, info = self.env.reset(seed=seed, options=options)
        _refuse_mask(obs, info, "env.frame_skip")
        return obs, info

    def step(self, action: Any) -> Step:
        total, before = 0.0, np.empty(0)
        for _ in range(self._times - 1):
            before, reward, end, cut, info = self.env.step(action)
            total += float(reward)
            if end or cut:
                return before, total, end, cut, info
        obs, reward, end, cut, info = self.env.step(action)
        return np.maximum(before, obs) if self._merge else obs, total + float(reward), end, cut, info


class AtariSkip(Skip):
    """Skip where the emulator itself runs through the frames nobody looks at: drawing one costs a fifth of it."""

    def __init__(self, env: AnyEnv, times: int) -> None:
        super().__init__(env, times)
        self._core: Any = env.unwrapped

    def step(self, action: Any) -> Step:
        core = self._core
        core._frameskip = self._times - 1
        try:
            before, total, end, cut, info = self.env.step(action)
        finally:
            core._frameskip = 1
        if end or cut:
            return before, float(total), end, cut, info
        obs, reward, end, cut, info = self.env.step(action)
        return np.maximum(before, obs) if self._merge else obs, float(total) + float(reward), end, cut, info


def skipping(env: AnyEnv, times: int) -> Skip:
    core = env.unwrapped
    atari = hasattr(core, "ale") and getattr(core, "_frameskip", None) == 1
    return AtariSkip(env, times) if atari else Skip(env, times)


def _refuse_mask(obs: Any, info: dict[str, Any], knob: str) -> None:
    if mask_of(obs, info) is not None:
        raise ConfigError(f"{knob}: the environment masks actions, and one that is repeated may become illegal")


class Gray(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Luminance, height x width."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        shape = _image(env, "env.grayscale")
        if shape[2:] not in ((), (1,), (3,)):
            raise ConfigError(f"env.grayscale: images are {shape}, expected 1 or 3 channels last")
        self._channels = shape[2] if len(shape) == 3 else 0
        self.observation_space = _bytes(shape[:2])

    def observation(self, observation: Any) -> Any:
        if self._channels == 3:
            return (observation @ LUMINANCE + np.float32(0.5)).astype(np.uint8)
        return observation[..., 0] if self._channels else observation


def shares(length: int, wanted: int) -> Array:
    """[length, wanted]: how much of each pixel of a line goes into each pixel of a line of another length."""
    edges = np.linspace(0, length, wanted + 1)
    pixels = np.arange(length)[:, None]
    overlap = np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels)
    return (overlap.clip(0) * (wanted / length)).astype(np.float32)


class Resize(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Height x width by the average over each new pixel's area: one matrix product for each axis.

    The shares repeat along an axis as often as the greatest common divisor of old and new length says; only one
    period is multiplied out, which makes the products several times smaller (160 to 84: 4 periods of 40 to 21).
    """

    def __init__(self, env: AnyEnv, height: int, width: int) -> None:
        super().__init__(env)
        shape = _image(env, "env.resize")
        self._tall, self._wide = math.gcd(shape[0], height), math.gcd(shape[1], width)
        self._rows = shares(shape[0] // self._tall, height // self._tall).T.copy()
        self._columns = shares(shape[1] // self._wide, width // self._wide)
        self._size = (height, width)
        self.observation_space = _bytes((height, width, *shape[2:]))

    def observation(self, observation: Any) -> Any:
        planes = observation if observation.ndim == 2 else observation.transpose(2, 0, 1)
        x = np.ascontiguousarray(planes, np.float32)
        x = self._rows @ x.reshape(-1, self._rows.shape[1], planes.shape[-1])
        x = x.reshape(-1, len(self._columns)) @ self._columns
        x += np.float32(0.5)
        small = x.astype(np.uint8).reshape(*planes.shape[:-2], *self._size)
        return small if observation.ndim == 2 else small.transpose(1, 2, 0)


class Hide(gymnasium.ObservationWrapper[Any, Any, Any]):
    """A flat observation without the numbers at these indices."""

    def __init__(self, env: AnyEnv, indices: tuple[int, ...]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(f"env.hide: observations are {space}, not one row of numbers")
        if wrong := [index for index in indices if not 0 <= index < space.shape[0]]:
            raise ConfigError(
                f"env.hide = {list(indices)}: observations end at index {space.shape[0] - 1}, not {wrong}"
            )
        self._keep = np.setdiff1d(np.arange(space.shape[0]), indices)
        if not self._keep.size:
            raise ConfigError(f"env.hide = {list(indices)}: nothing would be left to see")
        self._shape = space.shape
        self.observation_space = spaces.Box(space.low[self._keep], space.high[self._keep], dtype=space.dtype.type)

    def observation(self, observation: Any) -> Any:
        row = np.asarray(observation)
        if row.shape != self._shape:
            raise BadObservation(f"observation has shape {row.shape}, its space says {self._shape}")
        return row[self._keep]


class Stack(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The last `count` observations along the last axis, the newest last; after a reset, the first one repeated."""

    def __init__(self, env: AnyEnv, count: int) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or not space.shape:
            raise ConfigError(f"env.frame_stack: observations are {space}, not arrays")
        # What has two axes gets a third to be stacked along: height x width becomes height x width x count.
        self._shape = space.shape if len(space.shape) in (1, 3) else (*space.shape, 1)
        self._plane = self._shape[-1]
        self._dtype = space.dtype
        self._count = count
        self._frames: list[Any] = []
        low, high = (np.concatenate([bound.reshape(self._shape)] * count, axis=-1) for bound in (space.low, space.high))
        self.observation_space = spaces.Box(low, high, dtype=space.dtype.type)

    def _stacked(self) -> Array:
        if len(self._shape) == 1:
            return np.concatenate(self._frames)
        plane = self._plane
        stacked = np.empty((*self._shape[:-1], plane * self._count), self._dtype)
        for k, frame in enumerate(self._frames):
            stacked[..., k * plane : (k + 1) * plane] = frame
        return stacked

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        obs, info = self.env.reset(seed=seed, options=options)
        self._frames = [self._frame(obs)] * self._count
        return self._stacked(), info

    def step(self, action: Any) -> Step:
        obs, reward, end, cut, info = self.env.step(action)
        del self._frames[0]
        self._frames.append(self._frame(obs))
        return self._stacked(), reward, end, cut, info

    def _frame(self, obs: Any) -> Array:
        """A copy with the axis to stack along: an environment may write into the same array again."""
        return np.array(obs).reshape(self._shape)
