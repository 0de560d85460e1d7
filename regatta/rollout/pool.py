"""EnvPool: many environments stepped by one call into C++, with resets of our own choosing.

`Pool` is for a lane; `Single` is one such environment behind Gymnasium's interface, for whoever wants just one.
Games for several players at once are not for here.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from regatta.errors import ConfigError, EnvError, nearest
from regatta.rollout.envs import EnvConfig
from regatta.rollout.images import View, is_image
from regatta.types import Array

PREFIX = "envpool:"

Stepped = tuple[Array, Array, Array, Array]


@functools.cache
def library() -> types.ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports warns of its own future
        try:
            import envpool
        except ImportError as error:
            raise ConfigError(
                f"env.id: {PREFIX}... needs EnvPool ({error}): pip install 'regatta-rl[envpool]'"
            ) from error
    return envpool


class Pool:
    """`count` environments of the kind that config.id names, stepped together; all arrays are [count, ...].

    Its threads are its own: `env.kwargs.num_threads`, one unless told otherwise, as workers are what we have many of.
    An episode that ends in the very step of EnvPool's time limit counts as truncated, as EnvPool has it.
    """

    def __init__(self, config: EnvConfig, count: int) -> None:
        self._name = config.id.removeprefix(PREFIX)
        self._id = config.id
        self._options = _options(config, count)
        self._pool: Any = None
        spec = self._checked(library().make_spec)
        if spec.config.max_num_players > 1:
            raise ConfigError(f"env.id: {config.id!r} is for {spec.config.max_num_players} players, not for one")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bounds that lose precision as float32
            space: spaces.Space[Any] = spec.observation_space
            self.action_space: spaces.Space[Any] = spec.action_space
        self._flat = isinstance(space, spaces.Dict)
        self._channels_first = _has_channels_first(space)
        self.observation_space = _seen(space)

    def _checked(self, make: Any, **more: Any) -> Any:
        """EnvPool's own complaints, in terms of the config."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return make(self._name, **self._options, **more)
            except ImportError as error:
                raise ConfigError(f"env.id: {self._id!r} needs a part that is not installed: {error}") from error
            except (TypeError, ValueError, AssertionError, RuntimeError) as error:
                first_line = str(error).partition("\n")[0]
                raise ConfigError(f"env.kwargs: {self._id!r} does not take {self._options}: {first_line}") from error

    def reset(self, seeds: Sequence[int]) -> Array:
        """All environments anew: EnvPool seeds an environment when it makes it, and only then."""
        self.close()
        self._pool = self._checked(library().make_gymnasium, seed=[int(seed) % 2**31 for seed in seeds])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it makes its spaces only now, and warns of their bounds once more
            return self._see(self._pool.reset()[0])

    def step(self, actions: Any) -> Stepped:
        """Observations, rewards, terminated, truncated. What has ended must be reset before the next step.

        The actions are as the environments take them: within bounds, and a start other than 0 added.
        """
        obs, rewards, terminated, truncated, _ = self._pool.step(np.asarray(actions))
        return self._see(obs), rewards, terminated, truncated

    def reset_ids(self, ids: Any) -> Array:
        """New episodes in these environments, each going on with its own random stream; their first observations."""
        return self._see(self._pool.reset(np.asarray(ids, np.int32))[0])

    def render(self) -> Array:
        """Pictures of the first environment, [1, height, width, 3]; needs render_mode in env.kwargs."""
        frames: Array = self._pool.render()
        return frames

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None  # with the last reference its threads end

    def _see(self, obs: Any) -> Array:
        if self._flat:
            leaves = [np.asarray(leaf, np.float32) for leaf in _leaves(obs)]
            return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)
        seen: Array = np.moveaxis(obs, 1, -1) if self._channels_first else obs
        return seen


def _options(config: EnvConfig, count: int) -> dict[str, Any]:
    name = config.id.removeprefix(PREFIX)
    known = library().list_all_envs()
    if name not in known:
        raise ConfigError(f"env.id: EnvPool has no {name!r};{nearest(name, known)} `envpool.list_all_envs()` has all")
    if config.view != View():
        raise ConfigError(
            f"env.id: {config.id!r} goes without Regatta's knobs for frames and observations; EnvPool has its own, as "
            "in env.kwargs.frame_skip=4 env.kwargs.stack_num=4"
        )
    for taken in ("num_envs", "batch_size", "seed", "env_seed"):
        if taken in config.kwargs:
            raise ConfigError(f"env.kwargs.{taken}: Regatta sets that itself (env.lane_envs, run.seed)")
    options = {"num_envs": count, "num_threads": 1, **config.kwargs}
    if config.max_episode_steps is not None:
        options["max_episode_steps"] = config.max_episode_steps
    return options


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in _leaves(tree[key])]
    return [tree]


def _has_channels_first(space: spaces.Space[Any]) -> bool:
    """The Atari, Doom and Procgen games have the channels first; elsewhere, and in Regatta, they are last."""
    return (
        isinstance(space, spaces.Box) and is_image(space) and len(space.shape) == 3 and space.shape[0] < space.shape[2]
    )


def _seen(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """A Dict becomes one row of numbers; images get their channels last."""
    if isinstance(space, spaces.Dict):
        size = sum(int(np.prod(part.shape or ())) for part in _parts(space))
        return spaces.Box(-np.inf, np.inf, (size,), np.float32)
    if isinstance(space, spaces.Box) and _has_channels_first(space):
        return spaces.Box(np.moveaxis(space.low, 0, -1), np.moveaxis(space.high, 0, -1), dtype=np.uint8)
    return space


def _parts(space: spaces.Space[Any]) -> list[spaces.Space[Any]]:
    if isinstance(space, spaces.Dict):
        return [part for inner in space.spaces.values() for part in _parts(inner)]
    return [space]


class Single(gymnasium.Env[Array, Any]):
    """A pool of one."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 as Gymnasium has it

    def __init__(self, config: EnvConfig) -> None:
        self._pool = Pool(config, 1)
        self.observation_space = self._pool.observation_space
        self.action_space = self._pool.action_space
        self.render_mode = config.kwargs.get("render_mode")
        self._begun = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None and self._begun:
            return self._pool.reset_ids([0])[0], {}
        self._begun = True
        return self._pool.reset([int(self.np_random.integers(2**31)) if seed is None else seed])[0], {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if not self._begun:
            raise EnvError("reset comes before step")
        obs, rewards, terminated, truncated = self._pool.step(np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        return self._pool.render()[0] if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._pool.close()
        self._begun = False
