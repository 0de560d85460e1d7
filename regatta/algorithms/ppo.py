"""Proximal policy optimisation with a clipped surrogate (Schulman et al. 2017).

One iteration: every lane collects `rollout_steps` per environment; behaviour probabilities, values, advantages
and all epochs of minibatch updates are one compiled call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from regatta.algorithms.base import Metrics, final_rows, side_by_side
from regatta.algorithms.returns import gae, next_values
from regatta.errors import NonFinite
from regatta.policies.flat import Layout
from regatta.policies.normalize import Moments, RewardScale
from regatta.policies.policy import Policy
from regatta.seeding import stream
from regatta.types import Array, Arrays, Collect, Result, Snapshot, Task

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
    staleness: Annotated[
        Literal[0, 1],
        Meta(description="0: collect, then learn; 1: collect the next iteration while learning"),
    ] = 1

    def build(self, policy: Policy, lanes: int, lane_envs: int, seed: int, steps: int) -> PPO:
        iterations = steps // (lanes * lane_envs * self.rollout_steps)  # whole ones only: run.steps is a limit
        return PPO(self, policy, lanes, lane_envs, seed, iterations)


METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


def loss(xp: Any, policy: Policy, config: PPOConfig, params: Any, batch: Any, clip: Any) -> tuple[Any, tuple[Any, ...]]:
    """The clipped surrogate, the critic's error and the entropy bonus, over the valid samples of a minibatch.

    batch: obs [B, D] (normalised)  actions [B, ...]  logp, values, advantages, returns, weight [B]  mask [B, A] or None
    """
    weight = batch["weight"]
    total = weight.sum() + 1e-8

    def mean(x: Any) -> Any:
        return (x * weight).sum() / total

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
        """Flatten [T, M] to samples with their behaviour log-probabilities, advantages and returns."""
        then = layout.split(behaviour) | data["stats"]
        obs = data["obs"]  # [T + 1, M, D]
        out, values = policy.act_and_value(jnp, then, policy.normalize(jnp, then, obs))
        values, last_value = values[:-1], values[-1]
        heads = jax.tree.map(lambda x: x[:-1] if x.ndim > 1 else x, out)
        logp = policy.distribution.log_prob(jnp, heads, data["actions"], data["mask"])
        following = next_values(jnp, values, last_value, data["terminated"], data["truncated"], data["final_values"])
        done = data["terminated"] | data["truncated"]
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
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch), 1 - unexplained

    def update(
        theta: Any, opt_state: Any, behaviour: Any, stats: Any, data: Any, order: Any, lr: Any, clip: Any
    ) -> Any:
        batch, explained = samples(behaviour, stats, data)
        size = batch["weight"].shape[0]

        def descend(carry: Any, chosen: Any) -> Any:
            theta, state, _ = carry
            some = batch if chosen.shape[0] == size else jax.tree.map(lambda x: x[chosen], batch)
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
        arrays = policy.init(stream(seed, "init"))
        self.layout = Layout(arrays)
        self._theta: Any = self.layout.flatten(np, arrays)
        self._opt_state: Any = optimizer().init(self._theta)
        self._update = compile_update(policy, config, self.layout)
        self._moments = Moments((policy.obs_size,)) if config.normalize_obs else None
        self._rewards = RewardScale(config.gamma, lanes * lane_envs) if config.normalize_reward else None

    # -- the learner's side -------------------------------------------------------------------------------

    def tasks(self, iteration: int, version: int) -> list[Task]:
        return [Collect(k, iteration, version, self.config.rollout_steps, 0) for k in range(self.lanes)]

    def snapshot(self, version: int) -> Snapshot:
        return Snapshot(version, self.layout.split(np.array(self._theta)) | self._stats())

    def _stats(self) -> Arrays:
        if self._moments is None:
            return {}
        return {
            "stats/mean": self._moments.mean.astype(np.float32),
            "stats/scale": (1.0 / self._moments.std).astype(np.float32),
        }

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
            raise NonFinite(self._blame(data, behaviour))
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
        data["final_values"] = np.zeros_like(data["rewards"])
        rows, index = final_rows(results)
        if len(rows):
            # In NumPy, on as many rows as there are: the compiled call keeps one shape.
            values = self._values(behaviour, rows)
            data["final_values"][index[:, 0], index[:, 1]] = values
        if self._rewards is not None and np.isfinite(data["rewards"]).all():  # else the update is refused
            done = data["terminated"] | data["truncated"]
            data["rewards"] = self._rewards.scale(data["rewards"], done)
        return data

    def _values(self, behaviour: Snapshot, obs: Array) -> Array:
        then = behaviour.arrays
        values: Array = self.policy.value(np, then, self.policy.normalize(np, then, obs))
        return values

    def _order(self, iteration: int) -> Array:
        """Which samples each gradient step takes, [epochs * minibatches, minibatch]."""
        size, epochs = self.steps_per_iteration, self.config.epochs
        if self.config.minibatch == size:
            return np.zeros((epochs, size), np.int32)  # every step takes all: their order does not matter
        rng = stream(self.seed, "minibatch", iteration)
        rows = np.tile(np.arange(size, dtype=np.int32), (epochs, 1))
        return rng.permuted(rows, axis=1).reshape(-1, self.config.minibatch)

    def _blame(self, data: dict[str, Any], behaviour: Snapshot) -> str:
        """Name the tensor, lane and environment behind a non-finite update."""
        for name, array in behaviour.arrays.items():
            if not np.isfinite(array).all():
                return f"parameter {name} is not finite"
        envs = data["rewards"].shape[1] // self.lanes
        for name in ("obs", "rewards", "actions", "final_values"):
            bad = ~np.isfinite(data[name])
            if bad.any():
                column = int(np.argwhere(bad)[0][1])
                return f"{name} of lane {column // envs}, environment {column % envs} is not finite"
        size = np.abs(self._values(behaviour, data["obs"])).max(0)
        column = int(size.argmax())
        return (
            "the loss is not finite; the largest value estimate, "
            f"{size[column]:.3g}, is of lane {column // envs}, environment {column % envs}; a smaller algorithm.lr, "
            "normalize_obs or normalize_reward may help"
        )

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
