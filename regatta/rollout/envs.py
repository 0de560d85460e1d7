"""Making environments: by Gymnasium id or `module:function`, checked once, then stripped to what stepping needs."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import msgspec
import numpy as np
from gymnasium import wrappers
from msgspec import Meta

from regatta.errors import ConfigError, EnvError, UsageError
from regatta.rollout import spaces

CHECKED_STEPS = 20
_EXTRAS = {"box2d": "box2d", "mujoco": "mujoco"}


class EnvConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The environment, and how many of it make the experiment."""

    id: Annotated[
        str, Meta(description="a Gymnasium id, or module:function for a callable that returns an environment")
    ] = ""
    kwargs: Annotated[dict[str, Any], Meta(description="arguments for making the environment")] = {}
    max_episode_steps: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(description="time limit of an episode; none keeps the environment's own"),
    ] = None
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


class Stepper(msgspec.Struct):
    """An environment without its outer bookkeeping wrappers, and the time limit they enforced."""

    env: gymnasium.Env[Any, Any]
    limit: int | None


def refuse_foreign(config: EnvConfig, modules: Collection[str]) -> None:
    """For a config from a socket or a store: only code that lies in this folder, or is allowed by name, may run.

    Without this, whoever plays the learner or writes to the store could call any function of any installed module.
    """
    module, colon, _ = config.id.rpartition(":")
    package = module.partition(".")[0]
    here = Path.cwd()
    if colon and package not in modules and not (here / f"{package}.py").exists() and not (here / package).is_dir():
        raise UsageError(
            f"env.id is {config.id!r}, as someone else says, and {package!r} is not in {here}; run this where it lies, "
            f"or allow it by name: --allow {package}"
        )


def make(config: EnvConfig, *, checked: bool = False) -> gymnasium.Env[Any, Any]:
    """The environment as its author built it; what is wrong with the id or its arguments is a ConfigError."""
    kwargs = dict(config.kwargs)
    if ":" in config.id and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # console scripts, unlike `python -m`, do not look here
    if ":" in config.id and config.id.rpartition(":")[2].isidentifier():
        return _call(config, kwargs)  # what is no identifier is Gymnasium's own module:Name-v0
    try:
        return gymnasium.make(
            config.id, max_episode_steps=config.max_episode_steps, disable_env_checker=not checked, **kwargs
        )
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


def _call(config: EnvConfig, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    module_name, _, function_name = config.id.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in (module_name, module_name.partition(".")[0]):
            raise
        raise ConfigError(
            f"env.id: no module {module_name!r} in {os.getcwd()} or among the installed ones; run where it lies, "
            "or install it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name in vars(module) if callable(getattr(module, name)) and not name.startswith("_")]
        raise ConfigError(f"env.id: {module_name!r} has no callable {function_name!r}; it has {', '.join(names)}")
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"env.kwargs: {config.id!r} does not take {kwargs}: {error}") from error
    except ValueError:
        pass  # written in C, without a signature
    env: gymnasium.Env[Any, Any] = function(**kwargs)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"env.id: {config.id!r} returned {type(env).__name__}, not a gymnasium.Env")
    if config.max_episode_steps is not None:
        env = wrappers.TimeLimit(env, config.max_episode_steps)
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
        size = spaces.observation_size(env.observation_space)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the checker's opinions; what matters is checked at every step
            obs, info = env.reset(seed=0)
            masked = spaces.mask_of(obs, info) is not None
            action = spaces.action_spec(env.action_space, masked)
            write = spaces.writer(env.observation_space)
            row = np.zeros(size, np.float32)
            write(row, obs)
            env.action_space.seed(0)
            for _ in range(0 if masked else CHECKED_STEPS):
                obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
                write(row, obs)
                if terminated or truncated:
                    break
        return spaces.Interface(size, action)
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
