"""A trained policy for use outside training: takes the environment's own observations, gives its actions."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from regatta.policies.policy import Policy, PolicySpec
from regatta.rollout import envs, spaces
from regatta.runs.checkpoint import Checkpoint
from regatta.types import Arrays


def policy_of(checkpoint: Checkpoint) -> tuple[Policy, Arrays]:
    """The policy a checkpoint holds, with the observation statistics it was trained with."""
    prefix = f"snapshots/{checkpoint.iteration}/"
    arrays = {n.removeprefix(prefix): a for n, a in checkpoint.arrays.items() if n.startswith(prefix)}
    return Policy(msgspec.convert(checkpoint.state["policy"], PolicySpec)), arrays


class Agent:
    """`act(obs)` for one observation as the environment gives it."""

    def __init__(self, checkpoint: Checkpoint, env: envs.EnvConfig, seed: int = 0) -> None:
        self.policy, self.arrays = policy_of(checkpoint)
        self.iteration, self.steps = checkpoint.iteration, checkpoint.steps
        self._play = self.policy.player(self.arrays)
        made = envs.make(env)
        self._write = spaces.writer(made.observation_space)
        self._to_env = spaces.to_env(made.action_space, self.policy.squashed)
        made.close()
        self._rng = np.random.default_rng(seed)
        self.reset()

    def reset(self) -> None:
        """A new episode begins: a policy with memory forgets the last one."""
        self._state = self.policy.first_state(1)

    def act(self, obs: Any, *, mask: Any = None, deterministic: bool = True) -> Any:
        """The action for `obs`, ready for `env.step`. `mask` is info["action_mask"] where the policy needs one."""
        row = np.zeros((1, *self.policy.obs.shape), self.policy.obs.dtype)
        self._write(row[0], obs)
        legal = None
        if self.policy.action.masked:
            given = spaces.mask_of(obs, {} if mask is None else {spaces.MASK_KEY: mask})
            legal = spaces.read_mask(given, self.policy.action.sizes)[None]
        noise = None if deterministic else self.policy.distribution.noise(self._rng, 1)
        action, self._state = self._play(row, noise, legal, self._state)
        return self._to_env(action)[0]
