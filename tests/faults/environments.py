"""Environments that make trouble, for `env.id=environments:NAME`. Trouble of some kinds is for workers only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit


def in_worker() -> bool:
    """Not in the learner's process, which tries an environment out before it starts anything."""
    return "REGATTA_LEASH" in os.environ


class Paced(CartPoleEnv):
    """CartPole that takes `sleep_s` a step for as long as the file `flag` is there. What it computes is the same."""

    def __init__(self, flag: str, sleep_s: float) -> None:
        super().__init__()
        self._flag, self._sleep_s = flag, sleep_s

    def step(self, action: Any) -> Any:
        if self._flag and in_worker() and os.path.exists(self._flag):
            time.sleep(self._sleep_s)
        return super().step(action)


def paced(flag: str = "", sleep_s: float = 0.002) -> gymnasium.Env[Any, Any]:
    return TimeLimit(Paced(flag, sleep_s), 500)


class Broken(CartPoleEnv):
    """CartPole that fails on its `after`-th step: `how` names the way."""

    def __init__(self, how: str, after: int, once: str) -> None:
        super().__init__()
        if how == "construct" and (in_worker() or after == 0):
            raise RuntimeError("the boat has no hull")
        self._how, self._after, self._once = how, after, once
        self._steps = 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps > self._after and (in_worker() or self._how == "raise everywhere"):
            self._fail_unless_done()
        return super().step(action)

    def _fail_unless_done(self) -> None:
        if self._once:
            try:
                Path(self._once).touch(exist_ok=False)  # one of all the workers' environments wins
            except FileExistsError:
                return
        self._fail()

    def _fail(self) -> None:
        if self._how.startswith("raise"):
            raise RuntimeError("the motor is on fire")
        if self._how == "exit":
            os._exit(3)
        if self._how == "segfault":
            ctypes.string_at(0)
        if self._how == "deaf":  # no signal reaches it: only ending the process helps
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        if self._how in ("hang", "deaf"):
            time.sleep(600)


def broken(how: str, after: int = 0, once: str = "") -> gymnasium.Env[Any, Any]:
    """`once`: a file that is made by the first failure and prevents any other."""
    return TimeLimit(Broken(how, after, once), 500)


class Overpaid(CartPoleEnv):
    """Its rewards are finite; their squares are not, in float32."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after
        self._steps = 0

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        self._steps += 1
        return obs, 1e38 if self._steps > self._after else reward, terminated, truncated, info


def overpaid(after: int = 0) -> gymnasium.Env[Any, Any]:
    return TimeLimit(Overpaid(after), 500)


class Salary(gymnasium.Env[Any, Any]):
    """Pays 1 a step for ever. `ends` says what happens after ten steps: 'truncated' or 'terminated'."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, ends: str) -> None:
        self._ends = ends
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        over = self._steps == 10
        return np.ones(1, np.float32), 1.0, over and self._ends == "terminated", over and self._ends == "truncated", {}


def salary(ends: str) -> gymnasium.Env[Any, Any]:
    return Salary(ends)


class Masked(gymnasium.Env[Any, Any]):
    """Each step allows some actions and raises at any other."""

    observation_space = spaces.Box(0, 1, (5,), np.float32)
    action_space = spaces.Discrete(5)

    def _draw(self) -> Any:
        self._legal = self.np_random.random(5) < 0.4
        self._legal[self.np_random.integers(5)] = True
        return self._legal.astype(np.float32), {"action_mask": self._legal.copy()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._left = 20
        return self._draw()

    def step(self, action: Any) -> Any:
        if not self._legal[action]:
            raise AssertionError(f"illegal action {action}: {self._legal}")
        self._left -= 1
        obs, info = self._draw()
        return obs, float(action), self._left == 0, False, info


def masked() -> gymnasium.Env[Any, Any]:
    return Masked()


class Shapeless(gymnasium.Env[Any, Any]):
    observation_space = spaces.Sequence(spaces.Discrete(3))
    action_space = spaces.Discrete(2)


def shapeless() -> gymnasium.Env[Any, Any]:
    return Shapeless()
