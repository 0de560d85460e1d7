"""Proximal policy optimisation with a clipped surrogate (Schulman et al. 2017).

One iteration: every lane collects `rollout_steps` per environment; behaviour probabilities, values, advantages
and all epochs of minibatch updates are one compiled call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from regatta.algorithms.base import (
    SIZES,
    Metrics,
    blame,
    final_rows,
    final_values,
    nearest_divisor,
    product,
    refuse_image_statistics,
    side_by_side,
    too_few_steps,
    trajectories,
)
from regatta.algorithms.returns import gae, next_values
from regatta.errors import ConfigError, NonFinite
from regatta.policies.distributions import ActionSpec
from regatta.policies.flat import Layout
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.normalize import Moments, RewardScale
from regatta.policies.policy import Policy, PolicySpec
from regatta.seeding import stream
from regatta.types import Array, Arrays, Result, Snapshot, Task

Schedule = Literal["constant", "linear"]


class PPOConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="ppo"):
    """Proximal policy optimisation."""

    rollout_steps: Annotated[int, Meta(ge=1, description="steps per environment in one iteration")] = 256
    epochs: Annotated[int, Meta(ge=1, le=1000, description="passes over an iteration's data")] = 10
    minibatch: Annotated[int, Meta(ge=1, description="samples per gradient step")] = 64
    lr: Annotated[float, Meta(gt=0, le=10, description="Adam's learning rate")] = 3e-4
    lr_schedule: Annotated[Schedule, Meta(description="linear: the rate falls to zero over run.steps")] = "constant"
    clip: Annotated[float, Meta(gt=0, le=10, description="how far the probability ratio may move from 1")] = 0.2
    clip_schedule: Annotated[Schedule, Meta(description="linear: the clip falls to zero over run.steps")] = "constant"
    gamma: Annotated[float, Meta(gt=0, le=1, description="discount per step")] = 0.99
    gae_lambda: Annotated[float, Meta(ge=0, le=1, description="advantage estimation: 0 is one step, 1 the return")] = (
        0.95
    )
    value_coef: Annotated[float, Meta(ge=0, description="weight of the critic's loss")] = 0.5
    value_clip: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="how far a value may move per iteration; none: freely")
    ] = None
    entropy_coef: Annotated[float, Meta(ge=0, description="weight of the entropy bonus")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="gradients longer than this are scaled down")] = 0.5
    target_kl: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="stop an iteration's epochs once the KL exceeds 1.5 times this; none: never"),
    ] = None
    normalize_advantages: Annotated[bool, Meta(description="zero mean and unit deviation in each minibatch")] = True
    normalize_obs: Annotated[bool, Meta(description="scale observations by their running mean and deviation")] = False
    normalize_reward: Annotated[bool, Meta(description="scale rewards by the deviation of the running return")] = False
    segment: Annotated[
        int,
        Meta(ge=1, description="networks with memory: steps in a row that a gradient reaches back through"),
    ] = 16
    staleness: Annotated[
        Literal[0, 1],
        Meta(description="0: collect, then learn; 1: collect the next iteration while learning"),
    ] = 1

    def policy(self, obs: ObsSpec, action: ActionSpec, bounded: bool, network: NetworkConfig) -> PolicySpec:
        refuse_image_statistics(obs, self.normalize_obs)
        return PolicySpec(obs, action, network, self.normalize_obs)

    def faults(self, network: NetworkConfig, lanes: int, lane_envs: int, steps: int) -> Iterator[tuple[set[str], str]]:
        samples = lanes * lane_envs * self.rollout_steps
        yield from too_few_steps(steps, lanes, lane_envs, self.rollout_steps)
        if samples % self.minibatch:
            fits = nearest_divisor(samples, self.minibatch)
            yield (
                {*SIZES, "algorithm.minibatch"},
                f"algorithm.minibatch = {self.minibatch}: it does not divide the "
                f"{product(lanes, lane_envs, self.rollout_steps)}; algorithm.minibatch={fits} does",
            )
        if self.minibatch == 1 and self.normalize_advantages:
            yield (
                {"algorithm.minibatch", "algorithm.normalize_advantages"},
                "algorithm.minibatch = 1: one sample's normalised advantage is always 0: nothing is learnt; "
                "take a larger one or algorithm.normalize_advantages=false",
            )
        if network.kind in ("elman", "lstm"):
            for name, whole in (("rollout_steps", self.rollout_steps), ("minibatch", self.minibatch)):
                if whole % self.segment:
                    yield (
                        {f"algorithm.{name}", "algorithm.segment", "network.kind"},
                        f"algorithm.segment = {self.segment}: it does not divide algorithm.{name} {whole}; "
                        f"algorithm.segment={math.gcd(self.rollout_steps, self.minibatch)} divides both",
                    )

    def build(self, policy: Policy, lanes: int, lane_envs: int, seed: int, steps: int) -> PPO:
        iterations = steps // (lanes * lane_envs * self.rollout_steps)  # whole ones only: run.steps is a limit
        return PPO(self, policy, lanes, lane_envs, seed, iterations)


METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


def loss(xp: Any, policy: Policy, config: PPOConfig, params: Any, batch: Any, clip: Any) -> tuple[Any, tuple[Any, ...]]:
    """The clipped surrogate, the critic's error and the entropy bonus, over the valid samples of a minibatch.

    batch: obs [B, D] (normalised)  actions [B, ...]  logp, values, advantages, returns, weight [B]  mask [B, A] or None
    For a policy with memory they are [L, B, ...], L steps in a row, and there are state [B, S] and starts [L, B].
    """
    weight = batch["weight"]
    total = weight.sum() + 1e-8

    def mean(x: Any) -> Any:
        return (x * weight).sum() / total

    if policy.state_size:
        out, value, _ = policy.unroll(xp, params, batch["obs"], batch["state"], batch["starts"])
    else:
        out, value = policy.act_and_value(xp, params, batch["obs"])
    log_ratio = policy.distribution.log_prob(xp, out, batch["actions"], batch["mask"]) - batch["logp"]
    ratio = xp.exp(log_ratio)
    advantages = batch["advantages"]
    if config.normalize_advantages:
        centred = advantages - mean(advantages)
        advantages = centred / (xp.sqrt(mean(centred**2)) + 1e-8)
    surrogate = xp.minimum(ratio * advantages, xp.clip(ratio, 1 - clip, 1 + clip) * advantages)
    policy_loss = -mean(surrogate)
    error = (value - batch["returns"]) ** 2
    if config.value_clip is not None:
        moved = batch["values"] + xp.clip(value - batch["values"], -config.value_clip, config.value_clip)
        error = xp.maximum(error, (moved - batch["returns"]) ** 2)
    value_loss = mean(error)
    entropy = mean(policy.distribution.entropy(xp, out, batch["mask"]))
    kl = mean(ratio - 1 - log_ratio)  # Schulman's low-variance estimate
    clipped = mean((xp.abs(ratio - 1) > clip) * 1.0)
    whole = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    return whole, (policy_loss, value_loss, entropy, kl, clipped)


def optimizer() -> Any:
    import optax

    return optax.scale_by_adam(eps=1e-5)


def compile_update(policy: Policy, config: PPOConfig, layout: Layout) -> Callable[..., Any]:
    """One call for a whole iteration: advantages, then every epoch and minibatch in a scan."""
    import jax
    import jax.numpy as jnp

    optimise = optimizer()

    def samples(behaviour: Any, stats: Any, data: Any) -> tuple[Any, Any]:
        """The chunk [T, M] with its behaviour log-probabilities, advantages and returns, cut into samples."""
        then = layout.split(behaviour) | data["stats"]
        obs = data["obs"]  # [T + 1, M, ...]
        done = data["terminated"] | data["truncated"]
        seen = policy.normalize(jnp, then, obs)
        starts = jnp.concatenate([jnp.zeros_like(done[:1]), done])
        if policy.state_size:
            out, values, states = policy.unroll(jnp, then, seen, data["state"], starts)
        else:
            out, values = policy.act_and_value(jnp, then, seen)
        values, last_value = values[:-1], values[-1]
        heads = jax.tree.map(lambda x: x[:-1] if x.ndim > 1 else x, out)
        logp = policy.distribution.log_prob(jnp, heads, data["actions"], data["mask"])
        following = next_values(jnp, values, last_value, data["terminated"], data["truncated"], data["final_values"])
        advantages = gae(data["rewards"], values, following, done, data["valid"], config.gamma, config.gae_lambda)
        batch = {
            "obs": policy.normalize(jnp, stats, obs[:-1]),
            "actions": data["actions"],
            "mask": data["mask"],
            "logp": logp,
            "values": values,
            "advantages": advantages,
            "returns": advantages + values,
            "weight": data["valid"].astype(jnp.float32),
        }
        unexplained = jnp.var(advantages) / (jnp.var(batch["returns"]) + 1e-8)
        if policy.state_size:
            batch = jax.tree.map(cut, batch | {"starts": starts[:-1]}) | {"state": cut(states[:-1])[:, 0]}
        else:
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        return batch, 1 - unexplained

    def cut(x: Any) -> Any:
        """[T, M, ...] to segments [M * T / L, L, ...]: with memory, the unit a minibatch is made of."""
        columns = jnp.swapaxes(x, 0, 1)
        return columns.reshape(-1, config.segment, *x.shape[2:])

    def pick(batch: Any, chosen: Any) -> Any:
        some = batch if chosen.shape[0] == len(batch["weight"]) else jax.tree.map(lambda x: x[chosen], batch)
        if not policy.state_size:
            return some
        return {name: x if name == "state" or x is None else jnp.swapaxes(x, 0, 1) for name, x in some.items()}

    def update(
        theta: Any, opt_state: Any, behaviour: Any, stats: Any, data: Any, order: Any, lr: Any, clip: Any
    ) -> Any:
        batch, explained = samples(behaviour, stats, data)

        def descend(carry: Any, chosen: Any) -> Any:
            theta, state, _ = carry
            some = pick(batch, chosen)
            differentiate = jax.grad(lambda p: loss(jnp, policy, config, p, some, clip), has_aux=True)
            grads, metrics = differentiate(layout.split(theta))
            gradient = layout.flatten(jnp, grads)  # one vector: a few large operations instead of many small ones
            norm = jnp.sqrt((gradient**2).sum())
            gradient = gradient * jnp.minimum(1.0, config.max_grad_norm / (norm + 1e-12))
            direction, new_state = optimise.update(gradient, state)
            new = theta - lr * direction
            if config.target_kl is None:
                return (new, new_state, False), (jnp.stack([*metrics, norm]), 1.0)
            far = metrics[3] > 1.5 * config.target_kl
            kept = jax.tree.map(lambda a, b: jnp.where(far, b, a), (new, new_state), (theta, state))
            return (*kept, far), (jnp.stack([*metrics, norm]), 1.0)

        def step(carry: Any, chosen: Any) -> Any:
            if config.target_kl is None:
                return descend(carry, chosen)
            rest = (carry, (jnp.zeros(len(METRICS)), 0.0))
            return jax.lax.cond(carry[2], lambda: rest, lambda: descend(carry, chosen))

        (new_theta, new_state, _), (metrics, counted) = jax.lax.scan(step, (theta, opt_state, False), order)
        sums = metrics.sum(0)
        finite = jnp.isfinite(new_theta).all() & jnp.isfinite(sums).all()
        theta, opt_state = jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), (new_theta, new_state), (theta, opt_state)
        )
        report = jnp.concatenate(
            [sums / counted.sum(), jnp.stack([explained, counted.sum(), finite.astype(jnp.float32)])]
        )
        return theta, opt_state, report

    return jax.jit(update, donate_argnums=(0, 1))


class PPO:
    """The state of one PPO run. `lanes` columns of `lane_envs` environments make the batch."""

    def __init__(
        self, config: PPOConfig, policy: Policy, lanes: int, lane_envs: int, seed: int, total_iterations: int
    ) -> None:
        self.config = config
        self.policy = policy
        self.staleness = config.staleness
        self.lanes = lanes
        self.seed = seed
        self.total_iterations = total_iterations
        self.steps_per_iteration = lanes * lane_envs * config.rollout_steps
        self.total_steps = total_iterations * self.steps_per_iteration
        if policy.state_size and (config.rollout_steps % config.segment or config.minibatch % config.segment):
            raise ConfigError(f"algorithm.segment = {config.segment}: it must divide rollout_steps and minibatch")
        arrays = policy.init(stream(seed, "init"))
        self.layout = Layout(arrays)
        self._theta: Any = self.layout.flatten(np, arrays)
        self._opt_state: Any = optimizer().init(self._theta)
        self._update = compile_update(policy, config, self.layout)
        self._moments = Moments(policy.obs.shape) if config.normalize_obs else None
        self._rewards = RewardScale(config.gamma, lanes * lane_envs) if config.normalize_reward else None

    # -- the learner's side -------------------------------------------------------------------------------

    def tasks(self, iteration: int, version: int) -> list[tuple[Task, Arrays]]:
        return trajectories(self.lanes, iteration, version, self.config.rollout_steps)

    def snapshot(self, version: int) -> Snapshot:
        return Snapshot(version, self.layout.split(np.array(self._theta)) | self._stats())

    def _stats(self) -> Arrays:
        return {} if self._moments is None else self._moments.stats()

    def update(self, iteration: int, results: list[tuple[Result, Arrays]], behaviour: Snapshot) -> Metrics:
        scale_before = self._rewards.state() if self._rewards is not None else {}
        data = self._data(results, behaviour)
        remaining = max(0.0, 1.0 - iteration / self.total_iterations)
        lr = self.config.lr * (remaining if self.config.lr_schedule == "linear" else 1.0)
        clip = self.config.clip * (remaining if self.config.clip_schedule == "linear" else 1.0)
        self._theta, self._opt_state, report = self._update(
            self._theta,
            self._opt_state,
            self.layout.flatten(np, behaviour.arrays),
            self._stats(),
            data,
            self._order(iteration),
            np.float32(lr),
            np.float32(clip),
        )
        *values, finite = np.asarray(report).tolist()
        if not finite:
            if self._rewards is not None:
                self._rewards.load(scale_before)
            raise NonFinite(blame(behaviour.arrays, data, self.lanes))
        if self._moments is not None:
            for _, arrays in results:
                self._moments.merge(arrays["obs"][arrays["valid"]])
        names = (*METRICS, "explained_variance", "gradient_steps")
        return dict(zip(names, values, strict=True)) | {"lr": lr, "clip": clip}

    def _data(self, results: list[tuple[Result, Arrays]], behaviour: Snapshot) -> dict[str, Any]:
        data: dict[str, Any] = {
            name: side_by_side(results, name) for name in ("actions", "rewards", "terminated", "truncated", "valid")
        }
        last = np.concatenate([arrays["last_obs"] for _, arrays in results])
        data["obs"] = np.concatenate([side_by_side(results, "obs"), last[None]])
        data["mask"] = side_by_side(results, "mask") if self.policy.action.masked else None
        data["stats"] = {name: behaviour.arrays[name] for name in self._stats()}
        state = None
        if self.policy.state_size:
            data["state"] = np.concatenate([arrays["state"] for _, arrays in results])
            state = np.concatenate([arrays["final_state"] for _, arrays in results])
        rows, index = final_rows(results)
        data["final_values"] = final_values(self.policy, behaviour.arrays, rows, index, data["rewards"].shape, state)
        if self._rewards is not None and np.isfinite(data["rewards"]).all():  # else the update is refused
            done = data["terminated"] | data["truncated"]
            data["rewards"] = self._rewards.scale(data["rewards"], done)
        return data

    def _order(self, iteration: int) -> Array:
        """Which samples each gradient step takes, [epochs * minibatches, minibatch]."""
        unit = self.config.segment if self.policy.state_size else 1
        size, minibatch, epochs = self.steps_per_iteration // unit, self.config.minibatch // unit, self.config.epochs
        if minibatch == size:
            return np.zeros((epochs, size), np.int32)  # every step takes all: their order does not matter
        rng = stream(self.seed, "minibatch", iteration)
        rows = np.tile(np.arange(size, dtype=np.int32), (epochs, 1))
        return rng.permuted(rows, axis=1).reshape(-1, minibatch)

    # -- checkpoints --------------------------------------------------------------------------------------

    def restart(self) -> None:
        if self._rewards is not None:
            self._rewards.restart()

    def state(self) -> Arrays:
        import jax

        arrays: Arrays = {"theta": np.array(self._theta)}
        for i, leaf in enumerate(jax.tree.leaves(self._opt_state)):
            arrays[f"opt/{i}"] = np.array(leaf)
        if self._moments is not None:
            arrays |= self._moments.state("obs")
        if self._rewards is not None:
            arrays |= self._rewards.state()
        return arrays

    def blocks(self) -> dict[str, Arrays]:
        return {}

    def load(self, arrays: Arrays) -> None:
        import jax

        self._theta = np.array(arrays["theta"])
        structure: Any = jax.tree.structure(self._opt_state)
        leaves = [np.array(arrays[f"opt/{i}"]) for i in range(structure.num_leaves)]
        self._opt_state = jax.tree.unflatten(structure, leaves)
        if self._moments is not None:
            self._moments.load(arrays, "obs")
        if self._rewards is not None:
            self._rewards.load(arrays)
