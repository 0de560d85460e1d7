"""A lane: a fixed group of environments stepped together, with random streams of its own.

The arrays of a chunk are allocated once and overwritten by the next `collect`; whoever wants to keep them copies
them (encoding a result does). An environment that fails is replaced; its step is marked not `valid`.
"""

from __future__ import annotations

import time
import traceback
from typing import Any, NamedTuple

import numpy as np

from regatta.errors import EnvError
from regatta.policies.noise import action_noise
from regatta.policies.policy import Act, Policy
from regatta.rollout import envs, spaces
from regatta.rollout.watch import Watch
from regatta.seeding import seeds
from regatta.types import Array, Arrays, Collect, Episode, Fault

MAX_FAULTS_PER_ENV = 3  # in one chunk; more means that the environment is broken, not unlucky


class _Final(NamedTuple):
    """What a truncated episode would have gone on from: its value stands for the rest."""

    t: int
    env: int
    obs: Array
    state: Array | None


class Lane:
    """Lane number `number` of a run: its environments, where they stand, and the chunk being filled."""

    def __init__(self, number: int, config: envs.EnvConfig, policy: Policy, seed: int, watch: Watch) -> None:
        self.number = number
        self._config = config
        self._policy = policy
        self._seed = seed
        self._watch = watch
        count = config.lane_envs
        self._bank: Any = None  # what steps all environments at once, where something does
        self._envs: list[Any]
        self._limit = 2**62
        with watch:
            if config.id.startswith("envpool:"):
                from regatta.rollout.bank import Bank

                self._bank = Bank(config)
                self._envs = self._bank.members
            else:
                steppers = [self._make() for _ in range(count)]
                self._envs = [s.env for s in steppers]
                self._limit = steppers[0].limit or 2**62
        space = self._envs[0]
        self._write = spaces.writer(space.observation_space)
        self._to_env = spaces.to_env(space.action_space, policy.squashed)
        self._scores = np.zeros(count).tolist()
        self._lengths = [0] * count
        self._obs = np.zeros((count, *policy.obs.shape), policy.obs.dtype)
        self._state = policy.first_state(count)
        self._mask = np.ones((count, policy.action.outputs), bool) if policy.action.masked else None
        self._chunk: Arrays = {}
        self.stands_at: tuple[int, int, int] | None = None  # (origin, attempt, next iteration); None: nowhere

    def _make(self) -> envs.Stepper:
        self._watch.since = time.monotonic()
        return envs.bare(envs.make(self._config))

    # -- placing the lane ---------------------------------------------------------------------------------

    def place(self, task: Collect, replay: Array | None, state: Array | None = None) -> None:
        """Bring the environments to where the task begins, by going on, seeding afresh or replaying.

        `state` is the policy's memory there, which actions alone cannot bring back.
        """
        if self.stands_at == (task.origin, task.attempt, task.iteration) and task.iteration != task.origin:
            return
        first = task.origin == task.iteration
        if not first and replay is None:
            raise EnvError(f"lane {self.number} is not held here at iteration {task.iteration} and no replay came")
        with self._watch:
            numbers = seeds(self._seed, "reset", self.number, task.origin, task.attempt, count=len(self._envs))
            if self._bank is not None:
                self._bank.seed(numbers)
            for i, number in enumerate(numbers):
                self._reset(i, self._obs, number)
            self._state = self._policy.first_state(len(self._envs))
            if not first and replay is not None:
                self._replay(replay)
                self._state = None if state is None else np.array(state)

    def _replay(self, actions: Array) -> None:
        for row in actions:
            taken = self._to_env(row)
            if self._bank is not None:
                self._bank.step(taken)
            for i, action in enumerate(taken):
                self._watch.since = time.monotonic()
                obs, reward, terminated, truncated, info = self._envs[i].step(action)
                self._scores[i] += float(reward)
                self._lengths[i] += 1
                if terminated or truncated or self._lengths[i] >= self._limit:
                    self._reset(i, self._obs)
                else:
                    self._take(i, self._obs, obs, info)

    def _reset(self, i: int, rows: Array, seed: int | None = None) -> None:
        self._watch.since = time.monotonic()
        obs, info = self._envs[i].reset(seed=seed)
        self._take(i, rows, obs, info)
        if not np.isfinite(rows[i]).all():
            raise spaces.BadObservation("reset returned a non-finite observation")
        self._scores[i] = 0.0
        self._lengths[i] = 0

    def _take(self, i: int, rows: Array, obs: Any, info: dict[str, Any]) -> None:
        self._write(rows[i], obs)
        if self._mask is not None:
            self._mask[i] = spaces.read_mask(spaces.mask_of(obs, info), self._policy.action.sizes)

    # -- collecting ---------------------------------------------------------------------------------------

    def _allocate(self, steps: int) -> Arrays:
        if len(self._chunk.get("rewards", ())) != steps:
            n, action = len(self._envs), self._policy.action
            self._chunk = {
                "obs": np.zeros((steps + 1, n, *self._policy.obs.shape), self._policy.obs.dtype),
                "actions": np.zeros((steps, n, *action.shape), action.dtype),
                "rewards": np.zeros((steps, n), np.float32),
                "terminated": np.zeros((steps, n), bool),
                "truncated": np.zeros((steps, n), bool),
                "valid": np.ones((steps, n), bool),
            }
            if action.masked:
                self._chunk["mask"] = np.zeros((steps, n, action.outputs), bool)
        for name in ("terminated", "truncated"):
            self._chunk[name][:] = False
        self._chunk["valid"][:] = True
        return self._chunk

    def collect(self, task: Collect, act: Act) -> tuple[Arrays, list[Episode], list[Fault]]:
        """Step `task.steps` times. The arrays are Result's; they are this lane's own until it collects again."""
        self.stands_at = None  # until the chunk is whole
        chunk = self._allocate(task.steps)
        noise = action_noise(self._policy, self._seed, task, len(self._envs))
        obs, actions, masks = chunk["obs"], chunk["actions"], chunk.get("mask")
        rewards, terminated, truncated = chunk["rewards"], chunk["terminated"], chunk["truncated"]
        obs[0] = self._obs
        episodes: list[Episode] = []
        faults: list[Fault] = []
        finals: list[_Final] = []
        first_state = None if self._state is None else self._state.copy()
        state = self._state
        environments, scores, lengths = self._envs, self._scores, self._lengths
        write, watch, limit, clock = self._write, self._watch, self._limit, time.monotonic
        mask, sizes, bank = self._mask, self._policy.action.sizes, self._bank
        with watch:
            for t in range(task.steps):
                if masks is not None:
                    masks[t] = mask
                actions[t], state = act(obs[t], noise[t], mask, state)
                rows, row_rewards = obs[t + 1], rewards[t]
                taken = self._to_env(actions[t])
                if bank is not None:
                    bank.step(taken)
                for i, one in enumerate(taken):
                    try:
                        watch.since = clock()
                        seen, reward, end, cut, info = environments[i].step(one)
                        row_rewards[i] = reward
                        write(rows[i], seen)
                        scores[i] += float(reward)
                        lengths[i] += 1
                        if end or cut or lengths[i] >= limit:
                            episodes.append(Episode(i, t, scores[i], lengths[i]))
                            if end:
                                terminated[t, i] = True
                            else:
                                truncated[t, i] = True
                                finals.append(_Final(t, i, rows[i].copy(), None if state is None else state[i].copy()))
                            self._reset(i, rows)
                            if state is not None:
                                state[i] = 0
                        elif mask is not None:
                            mask[i] = spaces.read_mask(spaces.mask_of(seen, info), sizes)
                    except Exception:
                        faults.append(self._replace(task, t, i, traceback.format_exc(), len(faults)))
                        if state is not None:
                            state[i] = 0
            self._state = state
            self._condemn_non_finite(task, faults, episodes, finals)
        self._obs[:] = obs[-1]
        self.stands_at = (task.origin, task.attempt, task.iteration + 1)
        arrays = {name: array for name, array in chunk.items() if name != "obs"}
        arrays |= {"obs": obs[:-1], "last_obs": obs[-1], **self._finals(finals)}
        if first_state is not None and state is not None:
            arrays |= {"state": first_state, "last_state": state}
        return arrays, episodes, faults

    def _finals(self, finals: list[_Final]) -> Arrays:
        rows, spec = len(finals), self._policy.obs
        arrays: Arrays = {
            "final_obs": np.zeros((rows, *spec.shape), spec.dtype),
            "final_index": np.array([(final.t, final.env) for final in finals], np.int32).reshape(-1, 2),
        }
        if self._state is not None:
            arrays["final_state"] = np.zeros((rows, self._policy.state_size), np.float32)
        for k, final in enumerate(finals):
            arrays["final_obs"][k] = final.obs
            if final.state is not None:
                arrays["final_state"][k] = final.state
        return arrays

    # -- failing environments -----------------------------------------------------------------------------

    def _replace(self, task: Collect, t: int, i: int, text: str, before: int) -> Fault:
        """Environment i failed at step t: a new one takes its place, and the step counts for nothing."""
        if before >= MAX_FAULTS_PER_ENV * len(self._envs):
            raise EnvError(f"lane {self.number}: environments fail again and again; the last:\n{text}")
        chunk = self._chunk
        chunk["valid"][t, i] = False
        chunk["truncated"][t, i] = True
        chunk["terminated"][t, i] = False
        chunk["rewards"][t, i] = 0.0
        self._watch.since = time.monotonic()
        if self._bank is None:
            envs.close(self._envs[i])
            self._envs[i] = self._make().env
        number = seeds(self._seed, "reset", self.number, task.iteration, task.attempt, t, i, before, count=1)[0]
        self._reset(i, chunk["obs"][t + 1], number)
        return Fault(self.number, i, text)

    def _condemn_non_finite(
        self,
        task: Collect,
        faults: list[Fault],
        episodes: list[Episode],
        finals: list[_Final],
    ) -> None:
        """Once per chunk, as a check at every step would cost more than the step of a small environment."""
        chunk = self._chunk
        obs, rewards = chunk["obs"], chunk["rewards"]
        bytes_only = self._policy.obs.image  # no byte is infinite
        if np.isfinite(rewards).all() and (
            bytes_only or (np.isfinite(obs).all() and all(np.isfinite(final.obs).all() for final in finals))
        ):
            return
        bad = ~np.isfinite(rewards)
        if not bytes_only:
            bad |= ~np.isfinite(obs[1:]).all(-1)
        for final in finals:
            bad[final.t, final.env] |= not np.isfinite(final.obs).all()
        for i in np.flatnonzero(bad.any(0)).tolist():
            t = int(bad[:, i].argmax())
            what = "reward" if not np.isfinite(rewards[t, i]) else "observation"
            text = f"the environment returned a non-finite {what} at step {t} of iteration {task.iteration}"
            episodes[:] = [e for e in episodes if e.env != i or e.step < t]
            finals[:] = [final for final in finals if final.env != i or final.t < t]
            chunk["valid"][t:, i] = False
            chunk["truncated"][t:, i] = True
            chunk["terminated"][t:, i] = False
            chunk["rewards"][t:, i] = 0.0
            for array in (obs, chunk["actions"]):  # a policy answers NaN with NaN
                np.nan_to_num(array[:, i], copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            if self._state is not None:
                self._state[i] = 0
            fault = self._replace(task, len(rewards) - 1, i, text, len(faults))
            faults.append(fault)

    def close(self) -> None:
        for env in self._envs:
            envs.close(env)


def misfit(arrays: Arrays, task: Collect, policy: Policy, lane_envs: int) -> str | None:
    """What is wrong with the arrays a worker sent for this task, or None: bytes from a socket are not trusted."""
    t, n, obs, action = task.steps, lane_envs, policy.obs, policy.action
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "obs": (obs.dtype, (t, n, *obs.shape)),
        "last_obs": (obs.dtype, (n, *obs.shape)),
        "actions": (action.dtype, (t, n, *action.shape)),
        "rewards": ("float32", (t, n)),
        "terminated": ("bool", (t, n)),
        "truncated": ("bool", (t, n)),
        "valid": ("bool", (t, n)),
    }
    if action.masked:
        expected["mask"] = ("bool", (t, n, action.outputs))
    rows = len(arrays.get("final_obs", ()))
    expected |= {"final_obs": (obs.dtype, (rows, *obs.shape)), "final_index": ("int32", (rows, 2))}
    if policy.state_size:
        expected |= dict.fromkeys(("state", "last_state"), ("float32", (n, policy.state_size)))
        expected["final_state"] = ("float32", (rows, policy.state_size))
    if wrong := unlike(arrays, expected):
        return wrong
    index = arrays["final_index"]
    if rows and ((index < 0) | (index >= (t, n))).any():
        return "final_index points outside the chunk"
    return None


def unlike(arrays: Arrays, expected: dict[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """How arrays differ from the names, types and shapes they should have."""
    if arrays.keys() != expected.keys():
        return f"arrays {sorted(arrays)}, expected {sorted(expected)}"
    for name, (dtype, shape) in expected.items():
        if (arrays[name].dtype, arrays[name].shape) != (np.dtype(dtype), shape):
            return f"{name} is {arrays[name].dtype}{arrays[name].shape}, expected {dtype}{shape}"
    return None
