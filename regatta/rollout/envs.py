"""Making environments: by Gymnasium id, `module:function` or `envpool:Name`, and seen as the config wants them.

They are checked once, then stripped to what stepping needs. The wrappers themselves are in images.py.
"""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import gymnasium
import msgspec
import numpy as np
from gymnasium import wrappers
from msgspec import Meta

from regatta import named
from regatta.errors import ConfigError, EnvError, UsageError
from regatta.rollout import images, spaces

CHECKED_STEPS = 20
_EXTRAS = {"box2d": "box2d", "mujoco": "mujoco"}
_OURS = {"go9x9": "regatta.rollout.go:Go"}
_ENVPOOL, _ATARI, _DOOM = "envpool:", "ALE/", "Vizdoom"


class _Plugin(NamedTuple):
    """A package that brings environments of its own, registered once its module is imported."""

    module: str
    extra: str
    skip: str  # its own argument for skipping frames


_PLUGINS = {
    _ATARI: _Plugin("ale_py", "atari", "frameskip"),
    _DOOM: _Plugin("vizdoom.gymnasium_wrapper", "doom", "frame_skip"),
}
_HARMLESS_TEXTS = {"render_mode", "screen_format", "screen_resolution"}  # arguments that are never a path


class EnvConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The environment, and how many of it make the experiment."""

    id: Annotated[
        str,
        Meta(
            description="a Gymnasium id, module:function for a callable that returns an environment, "
            "envpool:Name for one of EnvPool's, or go9x9"
        ),
    ] = ""
    kwargs: Annotated[dict[str, Any], Meta(description="arguments for making the environment")] = {}
    max_episode_steps: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(
            description="time limit of an episode, in the agent's steps (frame_skip frames are one); none keeps the "
            "environment's own"
        ),
    ] = None
    frame_skip: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="frames an action lasts: it is repeated and rewards add up; the last two images merge",
        ),
    ] = 1
    noop_max: Annotated[
        int, Meta(ge=0, le=1000, description="the most frames of action 0 after a reset; their number is random")
    ] = 0
    grayscale: Annotated[bool, Meta(description="images as luminance, without colour")] = False
    resize: Annotated[
        Annotated[tuple[Annotated[int, Meta(ge=1, le=4096)], ...], Meta(min_length=2, max_length=2)] | None,
        Meta(description="height and width of images, averaged over each new pixel's area; none keeps their own"),
    ] = None
    hide: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(description="indices of a flat observation that the agent does not see; [1,3] are CartPole's velocities"),
    ] = ()
    frame_stack: Annotated[
        int,
        Meta(ge=1, le=64, description="observations seen at once, the newest last; images stack as further channels"),
    ] = 1
    lanes: Annotated[
        int,
        Meta(ge=1, le=4096, description="groups of environments; the most workers that can share the work"),
    ] = 2
    lane_envs: Annotated[int, Meta(ge=1, le=4096, description="environments stepped together in one lane")] = 4
    step_timeout_s: Annotated[
        float, Meta(gt=0, description="a step or reset that takes longer counts as hung and is replaced")
    ] = 60.0
    replay: Annotated[
        bool,
        Meta(
            description="a lane that moves to another worker is rebuilt exactly by replaying its actions since "
            "the last checkpoint; false starts new episodes, cheaper where steps are slow"
        ),
    ] = True

    @property
    def view(self) -> images.View:
        return images.View(
            frame_skip=self.frame_skip,
            noop_max=self.noop_max,
            grayscale=self.grayscale,
            resize=self.resize,
            hide=self.hide,
            frame_stack=self.frame_stack,
            pick=_plugin_of(self.id) == _DOOM,
        )


def _plugin_of(env_id: str) -> str | None:
    """The prefix of _PLUGINS that the id has; what has a colon names a module, whatever its first letters."""
    return None if ":" in env_id else next((prefix for prefix in _PLUGINS if env_id.startswith(prefix)), None)


class Stepper(msgspec.Struct):
    """An environment without its outer bookkeeping wrappers, and the time limit they enforced."""

    env: gymnasium.Env[Any, Any]
    limit: int | None


def refuse_foreign(config: EnvConfig, modules: Collection[str]) -> None:
    """For a config from a socket or a store: only what this folder holds, or what is allowed by name, may run."""
    if config.id.startswith(_ENVPOOL) or _plugin_of(config.id) == _DOOM:
        _refuse_foreign_paths(config, modules)
    else:
        named.refuse_foreign("env.id", config.id, modules)


def _refuse_foreign_paths(config: EnvConfig, modules: Collection[str]) -> None:
    """Both start ViZDoom's engine, a program, from wherever an argument of theirs says."""
    package = "envpool" if config.id.startswith(_ENVPOOL) else "vizdoom"
    for name, value in config.kwargs.items():
        if package not in modules and name not in _HARMLESS_TEXTS and not isinstance(value, int | float | None):
            raise UsageError(
                f"env.kwargs.{name} is {value!r}, as someone else says, which may name a program; only numbers go "
                f"without saying, or allow the rest: --allow {package}"
            )


def make(config: EnvConfig, *, checked: bool = False) -> gymnasium.Env[Any, Any]:
    """The environment as the config wants it seen; what is wrong with the id or a knob is a ConfigError."""
    if config.id.startswith(_ENVPOOL):
        from regatta.rollout.pool import Single

        return Single(config)
    kwargs, view = _plugged_in(config)
    if view == images.View():
        return _build(config, kwargs, config.max_episode_steps, checked)
    env = _build(config, kwargs, None, checked)
    own = bare(env)
    try:
        # The outer wrappers go under ours only for the check; the limit counts the agent's steps, so it goes outside.
        seen = images.view(env if checked else own.env, view)
    except Exception:
        close(env)
        raise
    limit = config.max_episode_steps or (own.limit and -(-own.limit // view.frame_skip))
    return wrappers.TimeLimit(seen, limit) if limit else seen


def _plugged_in(config: EnvConfig) -> tuple[dict[str, Any], images.View]:
    """The arguments and the view, once the package that an id belongs to is loaded, with what it can do itself."""
    kwargs, view = dict(config.kwargs), config.view
    if config.id in _OURS and config.id not in gymnasium.registry:
        gymnasium.register(config.id, entry_point=_OURS[config.id])
    prefix = _plugin_of(config.id)
    if prefix is None:
        return kwargs, view
    plugin = _PLUGINS[prefix]
    try:
        module = importlib.import_module(plugin.module)
    except ImportError as error:
        raise ConfigError(
            f"env.id: {config.id!r} needs a package ({error}): pip install 'regatta-rl[{plugin.extra}]'"
        ) from error
    if view.frame_skip > 1 and plugin.skip in kwargs:
        raise ConfigError(f"env.frame_skip and env.kwargs.{plugin.skip} say the same thing: give one of them")
    if prefix == _ATARI:
        module.ALEInterface.setLoggerMode(module.LoggerMode.Error)  # or it greets us, once in every worker
        if view.frame_skip > 1:
            kwargs[plugin.skip] = 1  # in place of the id's own
        if view.grayscale:
            kwargs.setdefault("obs_type", "grayscale")
    else:
        if view.frame_skip > 1:  # without drawing what nobody sees; nothing flickers in Doom, so nothing is merged
            kwargs[plugin.skip], view = view.frame_skip, msgspec.structs.replace(view, frame_skip=1)
        if view.grayscale:
            kwargs.setdefault("screen_format", "GRAY8")
        kwargs.setdefault("doom_config_path", os.devnull)  # or every engine reads and writes ./_vizdoom.ini
        try:
            Path("_vizdoom").mkdir(exist_ok=True)  # the engine makes it, and fails where another was faster
        except OSError:
            pass  # the engine says why it cannot go on without
    return kwargs, view


def _build(
    config: EnvConfig, kwargs: dict[str, Any], max_episode_steps: int | None, checked: bool
) -> gymnasium.Env[Any, Any]:
    """The environment as its author built it."""
    if ":" in config.id:
        named.look_here()
    if ":" in config.id and config.id.rpartition(":")[2].isidentifier():
        return _call(config, kwargs, max_episode_steps)  # what is no identifier is Gymnasium's own module:Name-v0
    try:
        return gymnasium.make(config.id, max_episode_steps=max_episode_steps, disable_env_checker=not checked, **kwargs)
    except (
        gymnasium.error.UnregisteredEnv,
        gymnasium.error.DeprecatedEnv,
        gymnasium.error.NameNotFound,
    ) as error:
        raise ConfigError(f"env.id: unknown environment {config.id!r}: {error}") from error
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ConfigError(f"env.id: {config.id!r} needs a part that is not installed: {_remedy(error)}") from error
    except TypeError as error:
        raise ConfigError(f"env.kwargs: {config.id!r} does not take {kwargs}: {error}") from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"env.id: cannot make {config.id!r}: {error}") from error
    except OSError as error:
        if _plugin_of(config.id) != _ATARI:
            raise
        raise ConfigError(
            f"env.id: {config.id!r} lacks its ROM ({error}); it comes with the package, pip install --force-reinstall "
            "ale-py, or from the folder that ALE_ROMS_DIR names"
        ) from error


def _call(config: EnvConfig, kwargs: dict[str, Any], max_episode_steps: int | None) -> gymnasium.Env[Any, Any]:
    function = named.function("env.id", config.id)
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"env.kwargs: {config.id!r} does not take {kwargs}: {error}") from error
    except ValueError:
        pass  # written in C, without a signature
    env: gymnasium.Env[Any, Any] = function(**kwargs)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"env.id: {config.id!r} returned {type(env).__name__}, not a gymnasium.Env")
    if max_episode_steps is not None:
        env = wrappers.TimeLimit(env, max_episode_steps)
    return env


def _remedy(error: Exception) -> str:
    text = str(error)
    for word, extra in _EXTRAS.items():
        if word in text.lower():
            return f"{text} (Regatta's own way: pip install 'regatta-rl[{extra}]')"
    return text


def bare(env: gymnasium.Env[Any, Any]) -> Stepper:
    """Peel the wrappers whose work the lane does itself: they cost as much as a small environment's step."""
    limit: int | None = None
    while isinstance(env, wrappers.TimeLimit | wrappers.OrderEnforcing | wrappers.PassiveEnvChecker):
        if isinstance(env, wrappers.TimeLimit):
            steps = env._max_episode_steps
            limit = steps if limit is None else min(limit, steps)
        env = env.env
    return Stepper(env, limit)


def close(env: gymnasium.Env[Any, Any]) -> None:
    try:
        env.close()
    except Exception:
        pass  # nobody needs it any more: that it cannot even close is no news


def probe(config: EnvConfig) -> spaces.Interface:
    """Make one environment with Gymnasium's checker on, play a little, and learn its shapes."""
    env: gymnasium.Env[Any, Any] | None = None
    try:
        env = make(config, checked=True)
        obs_spec = spaces.observation_spec(env.observation_space)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the checker's opinions; what matters is checked at every step
            obs, info = env.reset(seed=0)
            masked = spaces.mask_of(obs, info) is not None
            action = spaces.action_spec(env.action_space, masked)
            write = spaces.writer(env.observation_space)
            row = np.zeros(obs_spec.shape, obs_spec.dtype)
            write(row, obs)
            env.action_space.seed(0)
            for _ in range(0 if masked else CHECKED_STEPS):
                obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
                write(row, obs)
                if terminated or truncated:
                    break
        return spaces.Interface(obs_spec, action, spaces.bounded(env.action_space))
    except (ConfigError, EnvError):
        raise
    except Exception as error:
        raise EnvError(
            f"environment {config.id!r} fails {'while it is made' if env is None else 'on its first steps'}: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        if env is not None:
            close(env)
