"""Scoring a population: members with parameters of their own, stepped together, one in each environment.

A member's result depends on its number and on nothing else: not on who plays beside it, in which environment, or in
whose process. What travels is numbers of members and their scores, never parameters, unless the order brings them.
"""

from __future__ import annotations

import math
import time
import traceback
from typing import Any

import gymnasium
import numpy as np

from regatta.errors import EnvError
from regatta.policies.networks import Mlp
from regatta.policies.policy import Policy
from regatta.policies.recurrent import Recurrent
from regatta.rollout import envs, spaces
from regatta.rollout.lane import unlike
from regatta.rollout.members import ActionNoise, Genes, Luck, OneByOne, Players, Sums, Together
from regatta.rollout.watch import Watch
from regatta.types import Array, Arrays, Episode, Fault, Score

MAX_FAULTS_PER_EPISODE = 3  # more means that the environment is broken, not unlucky


class Population:
    """Up to `env.lane_envs` environments, for the members of whatever order comes."""

    def __init__(self, config: envs.EnvConfig, policy: Policy, seed: int, watch: Watch) -> None:
        self.config = config
        self.policy = policy
        self.seed = seed
        self.watch = watch
        self.envs: list[gymnasium.Env[Any, Any]] = []
        with watch:
            first = self._make()
        self.envs.append(first.env)
        self.limit = first.limit or 2**62
        self.write = spaces.writer(first.env.observation_space)
        self.to_env = spaces.to_env(first.env.action_space, policy.squashed)

    def score(self, task: Score, arrays: Arrays, members: Array | None) -> tuple[Arrays, list[Episode], list[Fault]]:
        """Play the task's members with the snapshot `arrays`. The arrays are Result's.

        Of an episode, `env` is the member within the order and `step` the episode's number: when it ended would depend
        on who played beside it.
        """
        with self.watch:
            while len(self.envs) < min(self.config.lane_envs, task.count):
                self.envs.append(self._make().env)
        game = _Game(self, task, arrays, members)  # unwatched: making a table of noise takes its time
        with self.watch:
            game.play()
        scores, lengths = game.scores.tolist(), game.lengths.tolist()
        numbers = [(k, e) for k in range(task.count) for e in range(task.episodes)]
        episodes = [Episode(k, e, scores[k][e], lengths[k][e]) for k, e in numbers]
        return {"scores": game.scores, "lengths": game.lengths} | game.moments(), episodes, game.faults

    def replace(self, number: int) -> gymnasium.Env[Any, Any]:
        self.watch.since = time.monotonic()
        envs.close(self.envs[number])
        self.envs[number] = self._make().env
        return self.envs[number]

    def _make(self) -> envs.Stepper:
        self.watch.since = time.monotonic()
        return envs.bare(envs.make(self.config))

    def close(self) -> None:
        for env in self.envs:
            envs.close(env)


class _Seat:
    """One environment, and who plays what in it."""

    __slots__ = ("env", "episode", "failures", "length", "member", "number", "row", "score", "step")

    def __init__(self, number: int, env: gymnasium.Env[Any, Any], row: Array) -> None:
        self.number = number  # of the environment
        self.row = row  # of the observations
        self.member = -1  # within the order
        self.episode = 0
        self.failures = 0  # of this episode
        self.score = 0.0
        self.length = 0
        self.take(env)

    def take(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.step = env.step


class _Game:
    """One order being carried out: row i of every array belongs to seat i, and nobody sits beyond the last seat."""

    def __init__(self, home: Population, task: Score, arrays: Arrays, members: Array | None) -> None:
        policy = home.policy
        self._home = home
        self._task = task
        self._policy = policy
        self.scores: Array = np.zeros((task.count, task.episodes))
        self.lengths: Array = np.zeros((task.count, task.episodes), np.int32)
        self.faults: list[Fault] = []
        count = min(home.config.lane_envs, task.count)
        genes = Genes(task, arrays, members, home.seed)
        together = isinstance(policy.network, Mlp | Recurrent)
        self._players: Players = (Together if together else OneByOne)(policy, genes, count)
        self._obs = np.zeros((count, *policy.obs.shape), policy.obs.dtype)
        self._mask = np.ones((count, policy.action.outputs), bool) if policy.action.masked else None
        noisy = task.action_noise > 0 and policy.action.kind == "box"
        self._noise = ActionNoise(home.seed, task, policy.action.outputs, count) if noisy else None
        self._sums = Sums(arrays["stats/mean"], count) if policy.spec.normalized else None
        self._seats = [_Seat(i, home.envs[i], self._obs[i]) for i in range(count)]
        self._waiting = iter(range(task.count))
        self._luck = Luck(home.seed, task)

    # -- playing ------------------------------------------------------------------------------------------

    def play(self) -> None:
        seats, watch, clock = self._seats, self._home.watch, time.monotonic
        write, to_env, limit = self._home.write, self._home.to_env, self._home.limit
        mask, sizes = self._mask, self._policy.action.sizes
        for i in range(len(seats)):
            self._enter(i, next(self._waiting))
        while seats:
            over: list[int] = []
            failed: list[tuple[int, str]] = []
            for i, action in enumerate(to_env(self._act())):
                seat = seats[i]
                try:
                    watch.since = clock()
                    seen, reward, end, cut, info = seat.step(action)
                    write(seat.row, seen)
                    seat.score += float(reward)
                    seat.length += 1
                    if end or cut or seat.length >= limit:
                        over.append(i)
                    elif mask is not None:
                        mask[i] = spaces.read_mask(spaces.mask_of(seen, info), sizes)
                except Exception:
                    failed.append((i, traceback.format_exc()))
            for i, text in failed:
                self._repeat(i, text)
            for i in reversed(over):  # downwards, as the last one fills the gap of one that leaves
                self._finish(i)

    def _act(self) -> Array:
        rows = self._obs[: len(self._seats)]
        if not self._policy.obs.image:  # no byte is infinite
            while not np.isfinite(rows).all():
                for i in np.flatnonzero(~np.isfinite(rows).all(-1)).tolist():
                    self._repeat(i, "the environment returned a non-finite observation")
        if self._sums is not None:
            self._sums.add(rows)
        actions = self._players.act(rows, None if self._mask is None else self._mask[: len(rows)])
        return actions if self._noise is None else actions + self._noise.draw(len(rows))

    def _finish(self, i: int) -> None:
        """The episode on seat i is over: on to the next one, of this member or of another."""
        seat = self._seats[i]
        if not math.isfinite(seat.score):
            self._repeat(i, "the environment returned a non-finite reward")
            return
        self.scores[seat.member, seat.episode] = seat.score
        self.lengths[seat.member, seat.episode] = seat.length
        if self._sums is not None:
            self._sums.keep(i, seat.member, seat.episode)
        if seat.episode + 1 < self._task.episodes:
            seat.episode += 1
            seat.failures = 0
            self._begin(i)
        elif (member := next(self._waiting, None)) is not None:
            self._enter(i, member)
        else:
            self._leave(i)

    def _enter(self, i: int, member: int) -> None:
        seat = self._seats[i]
        seat.member, seat.episode, seat.failures = member, 0, 0
        self._players.enter(i, member)
        if self._noise is not None:
            self._noise.enter(i, self._task.first + member)
        self._begin(i)

    def _leave(self, i: int) -> None:
        last = len(self._seats) - 1
        if i != last:
            seat = self._seats[i] = self._seats[last]
            seat.row = self._obs[i]
            for array in (self._obs, self._mask):
                if array is not None:
                    array[i] = array[last]
            for rows in (self._players, self._noise, self._sums):
                if rows is not None:
                    rows.move(last, i)
        self._seats.pop()
        self._players.keep(last)

    def _begin(self, i: int) -> None:
        seat = self._seats[i]
        seat.score, seat.length = 0.0, 0
        self._players.forget(i)
        if self._sums is not None:
            self._sums.forget(i)
        while True:
            try:
                self._home.watch.since = time.monotonic()
                obs, info = seat.env.reset(seed=self._luck.seed(seat.member, seat.episode, seat.failures))
                self._home.write(seat.row, obs)
                if self._mask is not None:
                    self._mask[i] = spaces.read_mask(spaces.mask_of(obs, info), self._policy.action.sizes)
                return
            except Exception:
                self._replace(seat, traceback.format_exc())

    # -- failing environments -----------------------------------------------------------------------------

    def _repeat(self, i: int, text: str) -> None:
        """The episode on seat i counts for nothing; it is played again with another seed in a new environment."""
        self._replace(self._seats[i], text)
        self._begin(i)

    def _replace(self, seat: _Seat, text: str) -> None:
        number = self._task.first + seat.member
        if seat.failures >= MAX_FAULTS_PER_EPISODE:
            raise EnvError(f"episode {seat.episode} of member {number} fails again and again; the last time:\n{text}")
        seat.failures += 1
        seat.take(self._home.replace(seat.number))
        self.faults.append(Fault(0, number, text))

    def moments(self) -> Arrays:
        return {} if self._sums is None else self._sums.moments(int(self.lengths.sum()))


def misfit(arrays: Arrays, task: Score, policy: Policy) -> str | None:
    """What is wrong with the arrays a worker sent for this task, or None: bytes from a socket are not trusted."""
    shape = (task.count, task.episodes)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {"scores": ("float64", shape), "lengths": ("int32", shape)}
    if policy.spec.normalized:
        expected["obs/count"] = ("float64", (1,))
        expected |= dict.fromkeys(("obs/mean", "obs/m2"), ("float64", policy.obs.shape))
    if wrong := unlike(arrays, expected):
        return wrong
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            return f"{name} is not finite"
    if (arrays["lengths"] < 1).any():
        return "an episode of no steps"
    if policy.spec.normalized and (arrays["obs/count"][0] != arrays["lengths"].sum() or (arrays["obs/m2"] < 0).any()):
        return "moments of observations that nobody can have made"
    return None
