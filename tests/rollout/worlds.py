"""Small environments whose every number is known, and ones that fail in every way there is."""

from __future__ import annotations

import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counting(gymnasium.Env[Any, Any]):
    """Observes (a tag drawn at reset, the step); pays the step's number. Ends and cuts where it is told to."""

    def __init__(self, end_at: int | None = None, cut_at: int | None = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,))
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        self.end_at, self.cut_at = end_at, cut_at
        self.count, self.tag = 0, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.tag = 0, float(self.np_random.integers(1, 1000))
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([self.tag, self.count], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        ended, cut = self.count == self.end_at, self.count == self.cut_at
        return self.observe(), float(self.count), ended, cut, {}


def _refuse() -> None:
    raise RuntimeError("the wheel came off")


def _swallow() -> None:
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)


DEEDS = {"raise": _refuse, "sleep": lambda: time.sleep(30), "swallow": _swallow, "block": _block}
SAYS: dict[str, Any] = {
    "nan obs": np.array([np.nan, 1], np.float32),
    "inf obs": np.array([1, -np.inf], np.float32),
    "long obs": np.zeros(3, np.float32),
    "object obs": np.array([None, {}], object),
    "text obs": np.array(["a", "b"]),
    "complex obs": np.array([1j, 2]),
    "no obs": None,
}
PAYS: dict[str, Any] = {
    "nan reward": np.nan,
    "inf reward": np.inf,
    "text reward": "plenty",
    "no reward": None,
    "list reward": [1.0, 2.0],
}


class Troubled(Counting):
    """Does, says or pays `trouble` in its `at`-th step (0: at every reset); only the `which`-th one made, or all."""

    made = 0

    def __init__(self, trouble: str, at: int, which: int | None = None, **ends: int) -> None:
        super().__init__(**ends)
        self.trouble = trouble if which in (None, Troubled.made) else ""
        self.at, self.total = at, 0
        Troubled.made += 1

    def strike(self, obs: Any, reward: Any) -> tuple[Any, Any]:
        if self.trouble in DEEDS:
            DEEDS[self.trouble]()
        return SAYS.get(self.trouble, obs), PAYS.get(self.trouble, reward)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        return (self.strike(obs, None)[0] if self.at == 0 else obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        self.total += 1
        if self.total == self.at:
            obs, reward = self.strike(obs, reward)
        return obs, reward, *rest

    def close(self) -> None:
        if self.trouble in ("close", "raise"):
            raise OSError("cannot even close")


class SecondReset(Counting):
    """Its first instance cannot be reset a second time."""

    made = 0

    def __init__(self, **ends: int) -> None:
        super().__init__(**ends)
        self.broken = SecondReset.made == 0
        self.resets = 0
        SecondReset.made += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        if self.broken and self.resets == 2:
            raise RuntimeError("reset is stuck")
        return super().reset(seed=seed)


class Continuous(Troubled):
    """Box actions, and no patience for actions that are not numbers within its bounds."""

    def __init__(self, trouble: str = "", at: int = -1, which: int | None = None) -> None:
        super().__init__(trouble, at, which)
        self.action_space = spaces.Box(-0.5, 0.5, (2,))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.trouble or self.action_space.contains(action), action
        return super().step(action)


class Masked(Counting):
    """A new random mask at every step, in `info` or in a Dict observation; an illegal action is an error."""

    def __init__(self, sizes: tuple[int, ...] = (6,), in_dict: bool = False, **ends: int) -> None:
        super().__init__(**ends)
        self.sizes, self.in_dict = tuple(sizes), in_dict
        self.action_space = spaces.Discrete(sizes[0], start=3) if len(sizes) == 1 else spaces.MultiDiscrete(list(sizes))
        if in_dict:
            self.observation_space = spaces.Dict(
                state=spaces.Box(-np.inf, np.inf, (2,)), action_mask=spaces.MultiBinary(sum(sizes))
            )
        self.masks: list[Any] = []

    def _draw(self, obs: Any) -> tuple[Any, dict[str, Any]]:
        self.masks = [self.np_random.random(n) < 0.3 for n in self.sizes]
        for mask in self.masks:
            mask[self.np_random.integers(len(mask))] = True
        joined = np.concatenate(self.masks).astype(np.int8)
        if self.in_dict:
            return {"state": obs, "action_mask": joined}, {}
        return obs, {"action_mask": joined if len(self.sizes) == 1 else tuple(self.masks)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._draw(super().reset(seed=seed)[0])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        chosen = [action - 3] if len(self.sizes) == 1 else action
        for choice, mask in zip(chosen, self.masks, strict=True):
            assert mask[choice], f"illegal choice {choice} of {mask}"
        obs, reward, ended, cut, _ = super().step(action)
        obs, info = self._draw(obs)
        return obs, reward, ended, cut, info


class BadMask(Counting):
    """Gives `bad` as its mask at step 2: of the wrong size, all false, or none."""

    made = 0

    def __init__(self, bad: list[int] | None, which: int = 0) -> None:
        super().__init__()
        self.bad, self.mine = bad, BadMask.made == which
        BadMask.made += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {"action_mask": [1, 1]}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, ended, cut, _ = super().step(action)
        mask = self.bad if self.mine and self.count == 2 else [1, 0]
        return obs, reward, ended, cut, {} if mask is None else {"action_mask": mask}


class WorseReplacement(Troubled):
    """Three say NaN; the one that replaces the first hangs."""

    def __init__(self) -> None:
        first = Troubled.made < 3
        super().__init__("nan obs" if first else "sleep", 2 if first else 0)
