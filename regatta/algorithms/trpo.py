"""Trust region policy optimisation (Schulman et al. 2015), with generalised advantages (Schulman et al. 2016).

One iteration: every lane collects `rollout_steps` per environment; advantages, the natural gradient, the line search
and the critic's fit are one compiled call. The critic is a network of its own and never travels: workers need none.
"""

from __future__ import annotations

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
    nearest_divisor,
    product,
    refuse_image_statistics,
    side_by_side,
    too_few_steps,
    trajectories,
)
from regatta.algorithms.natural import backtrack, lbfgs, trust_region_step
from regatta.algorithms.returns import gae, next_values
from regatta.errors import ConfigError, NonFinite
from regatta.policies.distributions import ActionSpec
from regatta.policies.flat import Layout
from regatta.policies.networks import NetworkConfig, ObsSpec, init_layer, linear, network
from regatta.policies.normalize import Moments, RewardScale
from regatta.policies.policy import VALUE_GAIN, Policy, PolicySpec
from regatta.seeding import stream
from regatta.types import Array, Arrays, Result, Snapshot, Task


class TRPOConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="trpo"):
    """Trust region policy optimisation."""

    rollout_steps: Annotated[int, Meta(ge=1, description="steps per environment in one iteration")] = 256
    gamma: Annotated[float, Meta(gt=0, le=1, description="discount per step")] = 0.99
    gae_lambda: Annotated[float, Meta(ge=0, le=1, description="advantage estimation: 0 is one step, 1 the return")] = (
        0.95
    )
    max_kl: Annotated[float, Meta(gt=0, le=10, description="mean KL by which an iteration may move the policy")] = 0.01
    cg_steps: Annotated[int, Meta(ge=1, le=1000, description="conjugate-gradient steps to the natural gradient")] = 10
    cg_damping: Annotated[float, Meta(ge=0, description="multiple of the identity added to the Fisher matrix")] = 0.1
    fisher_every: Annotated[int, Meta(ge=1, description="the Fisher matrix takes only every n-th sample")] = 1
    line_search_steps: Annotated[int, Meta(ge=1, le=100, description="step lengths tried before none is taken")] = 10
    line_search_shrink: Annotated[float, Meta(gt=0, lt=1, description="from one tried step length to the next")] = 0.8
    entropy_coef: Annotated[float, Meta(ge=0, description="weight of the entropy bonus")] = 0.0
    critic: Annotated[
        Literal["adam", "lbfgs"], Meta(description="how the critic is fitted: in minibatches, or all at once")
    ] = "adam"
    critic_lr: Annotated[float, Meta(gt=0, le=10, description="adam: learning rate")] = 1e-3
    critic_epochs: Annotated[int, Meta(ge=1, le=1000, description="adam: passes over an iteration's data")] = 10
    critic_minibatch: Annotated[int, Meta(ge=1, description="adam: samples per gradient step")] = 128
    critic_iterations: Annotated[int, Meta(ge=1, le=1000, description="lbfgs: steps in one iteration")] = 25
    critic_l2: Annotated[float, Meta(ge=0, description="lbfgs: weight of the parameters' sum of squares")] = 1e-3
    critic_mix: Annotated[
        float, Meta(gt=0, le=1, description="lbfgs: how far the critic is asked to go from its values to the returns")
    ] = 0.1
    time_feature: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(description="the critic also sees the step within the episode divided by this; none: it does not"),
    ] = None
    normalize_advantages: Annotated[bool, Meta(description="zero mean and unit deviation in each iteration")] = True
    normalize_obs: Annotated[bool, Meta(description="scale observations by their running mean and deviation")] = False
    normalize_reward: Annotated[bool, Meta(description="scale rewards by the deviation of the running return")] = False
    staleness: Annotated[
        Literal[0, 1],
        Meta(description="0: collect, then learn; 1: collect the next iteration while learning"),
    ] = 0

    def policy(self, obs: ObsSpec, action: ActionSpec, bounded: bool, network: NetworkConfig) -> PolicySpec:
        refuse_image_statistics(obs, self.normalize_obs)
        spec = PolicySpec(obs, action, network, self.normalize_obs, critic=False)
        if Policy(spec).state_size:
            raise ConfigError(
                f"network.kind = {network.kind!r}: trpo takes networks without memory; "
                "ppo, es and blackbox take this one"
            )
        if network.shared:
            raise ConfigError("network.shared = true: trpo's critic is always a network of its own; leave it at none")
        if self.time_feature and obs.image and network.kind not in ("mlp", "linear"):
            raise ConfigError(
                f"algorithm.time_feature = {self.time_feature}: observations are images, and network.kind = "
                f"{network.kind!r} has no place for a number beside them; leave it at none"
            )
        return spec

    def faults(self, network: NetworkConfig, lanes: int, lane_envs: int, steps: int) -> Iterator[tuple[set[str], str]]:
        samples = lanes * lane_envs * self.rollout_steps
        yield from too_few_steps(steps, lanes, lane_envs, self.rollout_steps)
        if self.critic == "adam" and samples % self.critic_minibatch:
            fits = nearest_divisor(samples, self.critic_minibatch)
            yield (
                {*SIZES, "algorithm.critic", "algorithm.critic_minibatch"},
                f"algorithm.critic_minibatch = {self.critic_minibatch}: it does not divide the "
                f"{product(lanes, lane_envs, self.rollout_steps)}; algorithm.critic_minibatch={fits} does",
            )

    def build(self, policy: Policy, lanes: int, lane_envs: int, seed: int, steps: int) -> TRPO:
        iterations = steps // (lanes * lane_envs * self.rollout_steps)  # whole ones only: run.steps is a limit
        return TRPO(self, policy, lanes, lane_envs, seed, iterations)


METRICS = (
    *("surrogate_before", "surrogate_after", "kl", "entropy_before", "entropy_after"),
    *("step_norm", "cg_residual", "line_search_steps"),
    *("critic_loss", "explained_variance_before", "explained_variance_after"),
)


class Critic:
    """The value of an observation and, where it is told, of the step within the episode."""

    def __init__(self, spec: PolicySpec, time_feature: int | None) -> None:
        self.timed = time_feature is not None
        self.network = network(spec.network, ObsSpec((int(np.prod(spec.obs.shape)) + 1,)) if self.timed else spec.obs)

    def init(self, rng: np.random.Generator) -> Arrays:
        return self.network.init(rng, "critic") | init_layer(rng, "critic/out", self.network.outputs, 1, VALUE_GAIN)

    def value(self, xp: Any, arrays: Any, inputs: Any) -> Any:
        features, _ = self.network.apply(xp, arrays, "critic", inputs, None)
        return linear(arrays, "critic/out", features)[..., 0]

    def inputs(self, xp: Any, obs: Any, times: Any) -> Any:
        """From normalised observations [..., *shape] and times [...]."""
        if not self.timed:
            return obs
        return xp.concatenate([obs.reshape(*times.shape, -1), times[..., None]], -1)


# -- the policy's step ------------------------------------------------------------------------------------


def fisher_product(policy: Policy, layout: Layout, theta: Any, batch: Any, damping: float) -> Callable[[Any], Any]:
    """v -> (F + damping) v, with F the Hessian of the mean KL at theta, as in the paper's appendix C.

    F = J' M J: J is the Jacobian of the network's outputs, M the Hessian of the KL in those outputs. Linearised once,
    each product costs one pass forth and one back.
    """
    import jax
    import jax.numpy as jnp

    distribution: Any = policy.distribution
    weight = batch["weight"] / (batch["weight"].sum() + 1e-8)
    out, forth = jax.linearize(lambda vector: policy.act_out(jnp, layout.split(vector), batch["obs"]), theta)
    back = jax.linear_transpose(forth, theta)

    def divergence(new: Any) -> Any:
        return (weight * distribution.kl(jnp, out, new, batch["mask"])).sum()

    def times(v: Any) -> Any:
        _, bent = jax.jvp(jax.grad(divergence), (out,), (forth(v),))
        return back(bent)[0] + damping * v

    return times


def improve(policy: Policy, config: TRPOConfig, layout: Layout, theta: Any, batch: Any) -> tuple[Any, Any, Any]:
    """One step of the policy within the trust region around theta: the new vector, whether it moved, METRICS.

    batch: obs [B, ...] (normalised)  actions [B, ...]  logp, advantages, weight [B]  mask [B, A] or None; the
    probabilities `logp` are those of whoever acted, which may be an older policy than theta.
    """
    import jax
    import jax.numpy as jnp

    distribution: Any = policy.distribution
    weight = batch["weight"] / (batch["weight"].sum() + 1e-8)

    def outputs(theta: Any) -> Any:
        return policy.act_out(jnp, layout.split(theta), batch["obs"])

    def worth(out: Any) -> tuple[Any, Any]:
        """The surrogate, with its entropy bonus, and the entropy."""
        ratio = jnp.exp(distribution.log_prob(jnp, out, batch["actions"], batch["mask"]) - batch["logp"])
        entropy = (weight * distribution.entropy(jnp, out, batch["mask"])).sum()
        return (weight * ratio * batch["advantages"]).sum() + config.entropy_coef * entropy, entropy

    differentiate = jax.value_and_grad(lambda theta: worth(outputs(theta)), has_aux=True)
    (before, entropy), gradient = differentiate(theta)
    some = jax.tree.map(lambda x: x[:: config.fisher_every], batch)
    fisher = fisher_product(policy, layout, theta, some, config.cg_damping)
    step, found, residual = trust_region_step(fisher, gradient, config.cg_steps, config.max_kl)
    old = outputs(theta)

    def judge(candidate: Any) -> tuple[Any, Any]:
        out = outputs(candidate)
        after, entropy_after = worth(out)
        kl = (weight * distribution.kl(jnp, old, out, batch["mask"])).sum()
        return found & (after > before) & (kl <= config.max_kl), (after, entropy_after, kl)

    new, moved, tried, figures = backtrack(judge, theta, step, config.line_search_steps, config.line_search_shrink)
    after, entropy_after, kl = (jnp.where(moved, a, b) for a, b in zip(figures, (before, entropy, 0.0), strict=True))
    norm = jnp.sqrt(((new - theta) ** 2).sum())
    return new, moved, (before, after, kl, entropy, entropy_after, norm, residual, tried)


# -- the critic's fit -------------------------------------------------------------------------------------


def optimizer() -> Any:
    import optax

    return optax.scale_by_adam(eps=1e-5)


def fit(critic: Critic, config: TRPOConfig, layout: Layout, phi: Any, opt_state: Any, batch: Any, order: Any) -> Any:
    """The critic and its optimiser's state after an iteration's fit.

    batch: inputs [B, ...]  values, returns, weight [B]
    """
    import jax
    import jax.numpy as jnp

    def error(phi: Any, batch: Any) -> Any:
        values = critic.value(jnp, layout.split(phi), batch["inputs"])
        return (batch["weight"] * (values - batch["returns"]) ** 2).sum() / (batch["weight"].sum() + 1e-8)

    if config.critic == "lbfgs":
        mixed = batch | {"returns": batch["values"] + config.critic_mix * (batch["returns"] - batch["values"])}
        return lbfgs(lambda phi: error(phi, mixed) + config.critic_l2 * phi @ phi, phi, config.critic_iterations), ()
    optimise = optimizer()

    def descend(carry: Any, chosen: Any) -> Any:
        phi, state = carry
        direction, state = optimise.update(jax.grad(error)(phi, jax.tree.map(lambda x: x[chosen], batch)), state)
        return (phi - config.critic_lr * direction, state), None

    return jax.lax.scan(descend, (phi, opt_state), order)[0]


def compile_update(
    policy: Policy, critic: Critic, config: TRPOConfig, layout: Layout, critic_layout: Layout
) -> Callable[..., Any]:
    """One call for a whole iteration."""
    import jax
    import jax.numpy as jnp

    def samples(phi: Any, behaviour: Any, stats: Any, data: Any) -> Any:
        """The chunk [T, M] with its behaviour log-probabilities, advantages and returns, as one row of samples."""
        then = layout.split(behaviour) | data["stats"]
        out = policy.act_out(jnp, then, policy.normalize(jnp, then, data["obs"][:-1]))
        obs = policy.normalize(jnp, stats, data["obs"])  # [T + 1, M, ...]
        inputs = critic.inputs(jnp, obs, data["times"])
        values = critic.value(jnp, critic_layout.split(phi), inputs)
        values, last_value = values[:-1], values[-1]
        done = data["terminated"] | data["truncated"]
        following = next_values(jnp, values, last_value, data["terminated"], data["truncated"], data["final_values"])
        advantages = gae(data["rewards"], values, following, done, data["valid"], config.gamma, config.gae_lambda)
        batch = {
            "obs": obs[:-1],
            "inputs": inputs[:-1],
            "actions": data["actions"],
            "mask": data["mask"],
            "logp": policy.distribution.log_prob(jnp, out, data["actions"], data["mask"]),
            "values": values,
            "advantages": advantages,
            "returns": advantages + values,
            "weight": data["valid"].astype(jnp.float32),
        }
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)

    def update(theta: Any, phi: Any, opt_state: Any, behaviour: Any, stats: Any, data: Any, order: Any) -> Any:
        batch = samples(phi, behaviour, stats, data)
        weight, returns = batch["weight"], batch["returns"]

        def mean(x: Any) -> Any:
            return (weight * x).sum() / (weight.sum() + 1e-8)

        def variance(x: Any) -> Any:
            return mean((x - mean(x)) ** 2)

        if config.normalize_advantages:
            centred = batch["advantages"] - mean(batch["advantages"])
            batch["advantages"] = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)
        new_theta, moved, of_policy = improve(policy, config, layout, theta, batch)
        fitted = {name: batch[name] for name in ("inputs", "values", "returns", "weight")}
        new_phi, new_state = fit(critic, config, critic_layout, phi, opt_state, fitted, order)
        values = critic.value(jnp, critic_layout.split(new_phi), batch["inputs"])
        explained = [1 - variance(returns - v) / (variance(returns) + 1e-8) for v in (batch["values"], values)]
        metrics = jnp.stack([*of_policy, mean((values - returns) ** 2), *explained])
        # The candidate step is judged in `improve`; what is not finite here came in with the data or the critic.
        finite = jnp.isfinite(metrics).all() & jnp.isfinite(new_phi).all()
        kept = jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), (new_theta, new_phi, new_state), (theta, phi, opt_state)
        )
        return *kept, jnp.concatenate([metrics, jnp.stack([moved & finite, finite]).astype(jnp.float32)])

    return jax.jit(update, donate_argnums=(0, 1, 2))


# -- the run ----------------------------------------------------------------------------------------------


def steps_in_episode(done: Array, first: Array) -> Array:
    """How far each episode is before each step and after the last, [T + 1, M], when it begins at `first` [M]."""
    starts = np.concatenate([np.zeros_like(done[:1]), done])
    now = np.arange(len(starts))[:, None]
    steps: Array = now - np.maximum.accumulate(np.where(starts, now, -first), axis=0)
    return steps


class TRPO:
    """The state of one TRPO run. `lanes` columns of `lane_envs` environments make the batch."""

    def __init__(
        self, config: TRPOConfig, policy: Policy, lanes: int, lane_envs: int, seed: int, total_iterations: int
    ) -> None:
        self.config = config
        self.policy = policy
        self.staleness = config.staleness
        self.lanes = lanes
        self.seed = seed
        self.steps_per_iteration = lanes * lane_envs * config.rollout_steps
        self.total_steps = total_iterations * self.steps_per_iteration
        self.critic = Critic(policy.spec, config.time_feature)
        arrays, critic_arrays = policy.init(stream(seed, "init")), self.critic.init(stream(seed, "init", 1))
        self.layout, self.critic_layout = Layout(arrays), Layout(critic_arrays)
        self._theta: Any = self.layout.flatten(np, arrays)
        self._phi: Any = self.critic_layout.flatten(np, critic_arrays)
        self._opt_state: Any = optimizer().init(self._phi) if config.critic == "adam" else ()
        self._update = compile_update(policy, self.critic, config, self.layout, self.critic_layout)
        self._moments = Moments(policy.obs.shape) if config.normalize_obs else None
        self._rewards = RewardScale(config.gamma, lanes * lane_envs) if config.normalize_reward else None
        self._episode_steps = np.zeros(lanes * lane_envs, np.int64)
        self._refused = 0

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
        self._theta, self._phi, self._opt_state, report = self._update(
            self._theta,
            self._phi,
            self._opt_state,
            self.layout.flatten(np, behaviour.arrays),
            self._stats(),
            data,
            self._order(iteration),
        )
        *values, moved, finite = np.asarray(report).tolist()
        self._refused += not moved
        if not finite:
            if self._rewards is not None:
                self._rewards.load(scale_before)
            raise NonFinite(self._blame(data, behaviour))
        if self._moments is not None:
            for _, arrays in results:
                self._moments.merge(arrays["obs"][arrays["valid"]])
        return dict(zip(METRICS, values, strict=True)) | {"steps_refused": float(self._refused)}

    def _data(self, results: list[tuple[Result, Arrays]], behaviour: Snapshot) -> dict[str, Any]:
        data: dict[str, Any] = {
            name: side_by_side(results, name) for name in ("actions", "rewards", "terminated", "truncated", "valid")
        }
        last = np.concatenate([arrays["last_obs"] for _, arrays in results])
        data["obs"] = np.concatenate([side_by_side(results, "obs"), last[None]])
        data["mask"] = side_by_side(results, "mask") if self.policy.action.masked else None
        data["stats"] = {name: behaviour.arrays[name] for name in self._stats()}
        done = data["terminated"] | data["truncated"]
        steps = steps_in_episode(done, self._episode_steps)
        self._episode_steps = steps[-1]
        data["times"] = (steps / (self.config.time_feature or 1)).astype(np.float32)
        data["final_values"] = self._final_values(results, data)
        if self._rewards is not None and np.isfinite(data["rewards"]).all():  # else the update is refused
            data["rewards"] = self._rewards.scale(data["rewards"], done)
        return data

    def _final_values(self, results: list[tuple[Result, Arrays]], data: dict[str, Any]) -> Array:
        """The values of final observations where they stand in the batch, zero elsewhere, [T, M]."""
        values: Array = np.zeros_like(data["rewards"])
        rows, index = final_rows(results)
        if len(rows):
            # Beside the compiled call, which keeps one shape, on as many rows as there are.
            xp: Any = np
            if self.critic.network.needs_jax:
                import jax.numpy as xp
            one_later = 1 / (self.config.time_feature or 1)
            at = index[:, 0], index[:, 1]
            inputs = self.critic.inputs(
                xp, self.policy.normalize(xp, self._stats(), rows), data["times"][at] + np.float32(one_later)
            )
            values[at] = np.asarray(self.critic.value(xp, self._critic_arrays(), inputs))
        return values

    def _critic_arrays(self) -> Arrays:
        arrays: Arrays = self.critic_layout.split(np.array(self._phi))
        return arrays

    def _order(self, iteration: int) -> Array:
        """Which samples each of Adam's steps takes, [epochs * minibatches, minibatch]; none for L-BFGS."""
        size, epochs = self.steps_per_iteration, self.config.critic_epochs
        if self.config.critic == "lbfgs":
            return np.zeros((0, 1), np.int32)
        rng = stream(self.seed, "minibatch", iteration)
        rows = np.tile(np.arange(size, dtype=np.int32), (epochs, 1))
        return rng.permuted(rows, axis=1).reshape(-1, self.config.critic_minibatch)

    def _blame(self, data: dict[str, Any], behaviour: Snapshot) -> str:
        found = blame(behaviour.arrays | self._critic_arrays(), data, self.lanes)
        return found or "the loss is not finite; normalize_obs or normalize_reward may help"

    # -- checkpoints --------------------------------------------------------------------------------------

    def restart(self) -> None:
        self._episode_steps = np.zeros_like(self._episode_steps)
        if self._rewards is not None:
            self._rewards.restart()

    def state(self) -> Arrays:
        import jax

        arrays: Arrays = {
            "theta": np.array(self._theta),
            "critic": np.array(self._phi),
            "episode_steps": self._episode_steps.copy(),
            "steps_refused": np.array([self._refused]),
        }
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
        self._phi = np.array(arrays["critic"])
        self._episode_steps = np.array(arrays["episode_steps"])
        self._refused = int(arrays["steps_refused"][0])
        structure: Any = jax.tree.structure(self._opt_state)
        leaves = [np.array(arrays[f"opt/{i}"]) for i in range(structure.num_leaves)]
        self._opt_state = jax.tree.unflatten(structure, leaves)
        if self._moments is not None:
            self._moments.load(arrays, "obs")
        if self._rewards is not None:
            self._rewards.load(arrays)
