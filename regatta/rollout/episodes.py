"""Whole episodes, for evaluation: environments of their own, one stream of noise per episode."""

from __future__ import annotations

import math
import time

import numpy as np

from regatta.policies.policy import Act, Policy
from regatta.rollout import envs, spaces
from regatta.rollout.watch import Watch
from regatta.seeding import seeds, stream
from regatta.types import Episode, Play


def play(task: Play, config: envs.EnvConfig, policy: Policy, act: Act, watch: Watch) -> list[Episode]:
    """Play the task's episodes one after another; episode k is the same whoever plays it."""
    found: list[Episode] = []
    with watch:
        stepper = envs.bare(envs.make(config))
        write, to_env = (
            spaces.writer(stepper.env.observation_space),
            spaces.to_env(stepper.env.action_space, policy.squashed),
        )
        row = np.zeros((1, *policy.obs.shape), policy.obs.dtype)
        limit = stepper.limit or 2**62
        try:
            for k, seed in enumerate(seeds(task.seed, "play", count=task.episodes)):
                rng = stream(task.seed, "play", k + 1)
                watch.since = time.monotonic()
                obs, info = stepper.env.reset(seed=seed)
                score, length, over = 0.0, 0, False
                state = policy.first_state(1)
                while not over:
                    write(row[0], obs)
                    if not np.isfinite(row).all():
                        raise spaces.BadObservation(f"non-finite observation at step {length} of episode {k}")
                    mask = (
                        spaces.read_mask(spaces.mask_of(obs, info), policy.action.sizes)[None]
                        if (policy.action.masked)
                        else None
                    )
                    noise = None if task.deterministic else policy.distribution.noise(rng, 1)
                    watch.since = time.monotonic()
                    action, state = act(row, noise, mask, state)
                    obs, reward, end, cut, info = stepper.env.step(to_env(action)[0])
                    score += float(reward)
                    if not math.isfinite(score):
                        raise spaces.BadObservation(f"non-finite reward at step {length} of episode {k}")
                    length += 1
                    over = bool(end or cut or length >= limit)
                found.append(Episode(0, length - 1, score, length))
        finally:
            envs.close(stepper.env)
    return found
