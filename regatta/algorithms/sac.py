"""Soft actor-critic with two critics and a learned temperature (Haarnoja et al. 2018), also for discrete actions
(Christodoulou 2019).

One iteration: every lane collects a few steps into the replay memory; then batches for all updates of a lane's steps
are drawn at once, and the updates are one compiled call. The critics never travel: workers need only the actor.

Images: both critics share one encoder, which the critics' loss trains; the actor has an encoder of its own, trained by
its own loss, so that neither disturbs the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from regatta.algorithms.base import SIZES, Metrics, refuse_image_statistics, too_few_steps, trajectories
from regatta.algorithms.replay import Replay, refuse_too_large
from regatta.errors import ConfigError, NonFinite
from regatta.policies.distributions import ILLEGAL, ActionSpec, log_softmax
from regatta.policies.networks import NetworkConfig, ObsSpec, init_layer, linear, network
from regatta.policies.normalize import Moments
from regatta.policies.policy import VALUE_GAIN, Policy, PolicySpec
from regatta.seeding import stream
from regatta.types import Arrays, Result, Snapshot, Task

DISCRETE_SHARE = 0.98  # of the greatest entropy there can be: Christodoulou's target


class SACConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="sac"):
    """Soft actor-critic."""

    rollout_steps: Annotated[int, Meta(ge=1, description="steps per environment in one iteration")] = 8
    updates_per_step: Annotated[
        float, Meta(ge=0, le=1000, description="gradient steps for each step taken in an environment")
    ] = 1.0
    learning_starts: Annotated[int, Meta(ge=0, description="steps collected before the first gradient step")] = 1000
    replay_size: Annotated[int, Meta(ge=1, description="transitions kept; the newest replace the oldest")] = 1_000_000
    batch: Annotated[int, Meta(ge=1, le=1_000_000, description="transitions per gradient step")] = 256
    lr: Annotated[float, Meta(gt=0, le=10, description="Adam's learning rate of the actor")] = 3e-4
    critic_lr: Annotated[
        Annotated[float, Meta(gt=0, le=10)] | None, Meta(description="Adam's learning rate of the critics; none: lr")
    ] = None
    alpha: Annotated[float, Meta(gt=0, description="temperature, the worth of entropy, to begin with")] = 1.0
    alpha_lr: Annotated[
        Annotated[float, Meta(ge=0, le=10)] | None,
        Meta(description="Adam's learning rate of the temperature; 0: it stays at alpha; none: lr"),
    ] = None
    target_entropy: Annotated[
        float | None,
        Meta(
            description="entropy the temperature steers to; none: minus the action's dimensions, or for discrete ones "
            f"{DISCRETE_SHARE} of the greatest possible"
        ),
    ] = None
    gamma: Annotated[float, Meta(gt=0, le=1, description="discount per step")] = 0.99
    tau: Annotated[float, Meta(gt=0, le=1, description="how far target critics follow with each gradient step")] = 0.005
    noise_colour: Annotated[
        float,
        Meta(ge=0, le=2, description="exploration over time: 0 white noise, 1 pink, 2 red, which keeps its direction"),
    ] = 0.0
    normalize_obs: Annotated[bool, Meta(description="scale observations by their running mean and deviation")] = False
    staleness: Annotated[
        Literal[0, 1, "free"],
        Meta(
            description="0: collect, then learn; 1: collect the next iteration while learning; free: nobody waits, and "
            "if steps come too fast there are fewer updates_per_step"
        ),
    ] = 1

    def policy(self, obs: ObsSpec, action: ActionSpec, bounded: bool, network: NetworkConfig) -> PolicySpec:
        refuse_image_statistics(obs, self.normalize_obs)
        if action.kind not in ("box", "discrete"):
            raise ConfigError(f"algorithm.name = 'sac': it has no {action.kind} actions; ppo, trpo and es do")
        if action.kind == "box" and not bounded:
            raise ConfigError(
                "algorithm.name = 'sac': it squashes actions into their bounds, and some of this environment's are "
                "infinite; ppo, trpo and es take them"
            )
        if action.kind == "discrete" and self.noise_colour:
            raise ConfigError(
                f"algorithm.noise_colour = {self.noise_colour}: the actions are discrete, whose noise has no colour; "
                "set it to 0"
            )
        spec = PolicySpec(obs, action, network, self.normalize_obs, False, "squashed", self.noise_colour)
        if Policy(spec).state_size:
            raise ConfigError(
                f"network.kind = {network.kind!r}: sac takes networks without memory; "
                "ppo, es and blackbox take this one"
            )
        if network.shared:
            raise ConfigError("network.shared = true: sac's critics are networks of their own; leave it at none")
        return spec

    def faults(self, network: NetworkConfig, lanes: int, lane_envs: int, steps: int) -> Iterator[tuple[set[str], str]]:
        yield from too_few_steps(steps, lanes, lane_envs, self.rollout_steps)
        per_lane = self.rollout_steps * lane_envs
        updates = self.updates_per_step * per_lane
        if not math.isclose(updates, round(updates), rel_tol=1e-9):
            yield (
                {"env.lane_envs", "algorithm.rollout_steps", "algorithm.updates_per_step"},
                f"algorithm.updates_per_step = {self.updates_per_step:g}: a lane's {per_lane} steps an iteration "
                f"(env.lane_envs {lane_envs} x algorithm.rollout_steps {self.rollout_steps}) make {updates:g} gradient "
                f"steps, which is no whole number; {max(1, round(updates)) / per_lane:g} is the nearest that makes one",
            )
        if steps <= self.learning_starts:
            yield (
                {"run.steps", "algorithm.learning_starts"},
                f"algorithm.learning_starts = {self.learning_starts}: run.steps {steps} end before anything is learnt; "
                f"algorithm.learning_starts={steps // 10} leaves most of them",
            )
        if self.replay_size < lanes * lane_envs:
            yield (
                {*SIZES[:2], "algorithm.replay_size"},
                f"algorithm.replay_size = {self.replay_size}: less than one transition for each of the "
                f"{lanes * lane_envs} environments (env.lanes {lanes} x env.lane_envs {lane_envs})",
            )

    def build(self, policy: Policy, lanes: int, lane_envs: int, seed: int, steps: int) -> SAC:
        iterations = steps // (lanes * lane_envs * self.rollout_steps)  # whole ones only: run.steps is a limit
        return SAC(self, policy, lanes, lane_envs, seed, iterations)


METRICS = ("critic_loss", "actor_loss", "alpha", "entropy", "q_mean", "critic_grad_norm", "actor_grad_norm")


# -- the mathematics --------------------------------------------------------------------------------------


class Critics:
    """Two action values, each of a network of its own; the smaller of them errs less on the high side.

    Dense networks take observation and action side by side. Other kinds make features of the observation, the same for
    both critics, and one dense layer each takes the features and the action. Of discrete actions each gives all values.
    """

    names = ("q1", "q2")

    def __init__(self, spec: PolicySpec) -> None:
        whole = spec.network
        self.rank = len(spec.obs.shape)
        self.encoder = None if whole.kind in ("mlp", "linear") else network(whole, spec.obs)
        if self.encoder is None:
            inputs = math.prod(spec.obs.shape)
        else:
            inputs = self.encoder.outputs
            whole = NetworkConfig(sizes=whole.sizes[-1:], activation=whole.activation)
        self.discrete = spec.action.kind == "discrete"
        self.outputs = spec.action.outputs if self.discrete else 1
        self.head = network(whole, ObsSpec((inputs if self.discrete else inputs + spec.action.outputs,)))

    def init(self, rng: np.random.Generator) -> Arrays:
        arrays = {} if self.encoder is None else self.encoder.init(rng, "encoder")
        for name in self.names:
            arrays |= self.head.init(rng, name)
            arrays |= init_layer(rng, name + "/out", self.head.outputs, self.outputs, VALUE_GAIN)
        return arrays

    def values(self, xp: Any, arrays: Any, obs: Any, actions: Any) -> tuple[Any, Any]:
        """Of the actions [B, A], [B] each; for discrete ones of every action, [B, A] each, whatever `actions` is."""
        if self.encoder is None:
            x = obs.reshape(*obs.shape[: -self.rank], -1)
        else:
            x, _ = self.encoder.apply(xp, arrays, "encoder", obs, None)
        if not self.discrete:
            x = xp.concatenate([x, actions], -1)
        one, other = (linear(arrays, q + "/out", self.head.apply(xp, arrays, q, x, None)[0]) for q in self.names)
        return (one, other) if self.discrete else (one[..., 0], other[..., 0])


def soft_value(
    xp: Any, policy: Policy, critics: Critics, actor: Any, values: Any, alpha: Any, obs: Any, noise: Any, mask: Any
) -> tuple[Any, Any]:
    """What an observation is worth with the entropy to come: min Q(s, a) - alpha log pi(a|s), and the entropy, [B].

    Of one action drawn with `noise`; of discrete actions the expectation. `actor` and `values` are the arrays of the
    policy and of the critics.
    """
    out = policy.act_out(xp, actor, obs)
    if not critics.discrete:
        squashed: Any = policy.distribution
        actions, logp = squashed.sample_and_log_prob(xp, out, noise)
        return xp.minimum(*critics.values(xp, values, obs, actions)) - alpha * logp, -logp
    logp = log_softmax(xp, out if mask is None else xp.where(mask, out, ILLEGAL))
    p = xp.exp(logp)
    entropy = -(p * logp).sum(-1)
    return (p * xp.minimum(*critics.values(xp, values, obs, None))).sum(-1) + alpha * entropy, entropy


def critic_loss(xp: Any, critics: Critics, values: Any, batch: Any, target: Any) -> tuple[Any, Any]:
    """Both critics' squared distance from the target [B], and the mean of what the first says."""
    pair = critics.values(xp, values, batch["obs"], batch["actions"])
    if critics.discrete:
        chosen = batch["actions"][..., None] == xp.arange(critics.outputs)
        pair = tuple(xp.where(chosen, q, 0).sum(-1) for q in pair)
    return sum(0.5 * ((q - target) ** 2).mean() for q in pair), pair[0].mean()


def target_entropy(xp: Any, action: ActionSpec, given: float | None, mask: Any) -> Any:
    if given is not None:
        return given
    if action.kind == "box":
        return -float(action.outputs)
    return DISCRETE_SHARE * xp.log(action.outputs if mask is None else xp.maximum(mask.sum(-1), 1))


class Learned(NamedTuple):
    """All that gradient steps change: named arrays, and what Adam remembers of each."""

    actor: Any
    critics: Any
    targets: Any
    log_alpha: Any
    actor_adam: Any
    critics_adam: Any
    alpha_adam: Any


def begin(policy: Policy, critics: Critics, config: SACConfig, seed: int) -> Learned:
    adam = optimizer()
    actor, values = policy.init(stream(seed, "init")), critics.init(stream(seed, "init", 1))
    log_alpha = np.float32(math.log(config.alpha))
    return Learned(actor, values, values, log_alpha, adam.init(actor), adam.init(values), adam.init(log_alpha))


def optimizer() -> Any:
    import optax

    return optax.scale_by_adam()


def compile_updates(policy: Policy, critics: Critics, config: SACConfig) -> Callable[..., Any]:
    """One call for many gradient steps, one on each of the batches  [updates, batch, ...].

    Nothing is donated: the caller keeps what it had until it knows that what came out is finite. Parameters stay named
    arrays: in one flat vector, copying them in and out costs a tenth of the time at 256 x 256 units.
    """
    import jax
    import jax.numpy as jnp

    adam = optimizer()
    critic_lr = config.lr if config.critic_lr is None else config.critic_lr
    alpha_lr = config.lr if config.alpha_lr is None else config.alpha_lr

    def descend(parameters: Any, gradient: Any, memory: Any, lr: float) -> tuple[Any, Any]:
        direction, memory = adam.update(gradient, memory)
        return jax.tree.map(lambda p, d: p - lr * d, parameters, direction), memory

    def norm(gradient: Any) -> Any:
        return jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))

    def update(learned: Learned, batch: Any) -> tuple[Learned, Any]:
        alpha = jnp.exp(learned.log_alpha)
        now = (alpha, batch["obs"], batch["noise"], batch["mask"])
        following = (alpha, batch["next_obs"], batch["next_noise"], batch["next_mask"])

        next_value, _ = soft_value(jnp, policy, critics, learned.actor, learned.targets, *following)
        target = batch["rewards"] + config.gamma * jnp.where(batch["terminated"], 0.0, next_value)
        differentiate = jax.value_and_grad(
            lambda values: critic_loss(jnp, critics, values, batch, target), has_aux=True
        )
        (critic_cost, q_mean), critic_gradient = differentiate(learned.critics)
        values, critics_adam = descend(learned.critics, critic_gradient, learned.critics_adam, critic_lr)
        targets = jax.tree.map(lambda slow, fast: slow + config.tau * (fast - slow), learned.targets, values)

        def actor_loss(actor: Any) -> tuple[Any, Any]:
            value, entropy = soft_value(jnp, policy, critics, actor, values, *now)
            return -value.mean(), entropy

        (actor_cost, entropy), actor_gradient = jax.value_and_grad(actor_loss, has_aux=True)(learned.actor)
        actor, actor_adam = descend(learned.actor, actor_gradient, learned.actor_adam, config.lr)

        # Of log alpha * (entropy - wanted): descending in the logarithm keeps alpha positive.
        wanted = target_entropy(jnp, policy.action, config.target_entropy, batch["mask"])
        log_alpha, alpha_adam = descend(learned.log_alpha, (entropy - wanted).mean(), learned.alpha_adam, alpha_lr)

        report = (critic_cost, actor_cost, alpha, entropy.mean(), q_mean, norm(critic_gradient), norm(actor_gradient))
        return Learned(actor, values, targets, log_alpha, actor_adam, critics_adam, alpha_adam), jnp.stack(report)

    def updates(learned: Learned, stats: Any, batches: Any) -> tuple[Learned, Any, Any]:
        def on(learned: Learned, batch: Any) -> tuple[Learned, Any]:
            seen = {name: policy.normalize(jnp, stats, batch[name]) for name in ("obs", "next_obs")}
            return update(learned, batch | seen)

        learned, reports = jax.lax.scan(on, learned, batches)
        finite = jnp.isfinite(reports).all()
        for array in jax.tree.leaves((learned.actor, learned.critics, learned.log_alpha)):
            finite &= jnp.isfinite(array).all()
        return learned, reports.mean(0), finite

    return jax.jit(updates)


# -- the run ----------------------------------------------------------------------------------------------


class SAC:
    """The state of one SAC run."""

    def __init__(
        self, config: SACConfig, policy: Policy, lanes: int, lane_envs: int, seed: int, total_iterations: int
    ) -> None:
        self.config = config
        self.policy = policy
        self.staleness = config.staleness
        self.lanes = lanes
        self.seed = seed
        self.total_steps = total_iterations * lanes * lane_envs * config.rollout_steps
        self.updates_per_call = round(config.rollout_steps * lane_envs * config.updates_per_step)
        self._replay = self._make_replay(lane_envs)
        self._drawn: Arrays | None = None
        self._moments = Moments(policy.obs.shape) if config.normalize_obs else None
        critics = Critics(policy.spec)
        self._learned = begin(policy, critics, config, seed)
        self._compiled = compile_updates(policy, critics, config)
        self._steps = 0
        self._updates = 0

    def _make_replay(self, lane_envs: int) -> Replay:
        obs, action = self.policy.obs, self.policy.action
        size = min(self.config.replay_size, self.total_steps)  # a short run needs no room for a long one's
        mask_size = action.outputs if action.masked else None
        sizes = (size, self.lanes, lane_envs, obs.shape, obs.dtype, action.shape, action.dtype, mask_size)
        refuse_too_large(Replay.nbytes(*sizes))
        return Replay(*sizes)

    # -- the learner's side -------------------------------------------------------------------------------

    def tasks(self, iteration: int, version: int) -> list[tuple[Task, Arrays]]:
        return trajectories(self.lanes, iteration, version, self.config.rollout_steps)

    def snapshot(self, version: int) -> Snapshot:
        return Snapshot(version, {name: np.array(array) for name, array in self._learned.actor.items()} | self._stats())

    def _stats(self) -> Arrays:
        return {} if self._moments is None else self._moments.stats()

    def update(self, iteration: int, results: list[tuple[Result, Arrays]], behaviour: Snapshot) -> Metrics:
        for result, arrays in results:
            self._refuse_non_finite(result, arrays)
        for result, arrays in results:
            self._replay.add(result.lane, arrays)
            self._steps += result.steps
            if self._moments is not None:
                self._moments.merge(arrays["obs"][arrays["valid"]])
        calls = 1 if self.staleness == "free" else len(results)
        if self._steps < self.config.learning_starts or not len(self._replay) or not self.updates_per_call:
            return self._counts(0, results)
        learned, reports = self._learned, []
        for call in range(calls):
            learned, report, finite = self._compiled(learned, self._stats(), self._batches(iteration, call))
            reports.append(np.asarray(report))
            if not finite:
                raise NonFinite(self._blame(reports[-1]))
        self._learned = learned
        means = np.mean(reports, axis=0).tolist()
        return dict(zip(METRICS, means, strict=True)) | self._counts(calls * self.updates_per_call, results)

    def _counts(self, updates: int, results: list[tuple[Result, Arrays]]) -> Metrics:
        self._updates += updates
        return {
            "updates": float(self._updates),
            "updates_per_step": updates / max(1, sum(result.steps for result, _ in results)),
            "replay_size": float(len(self._replay)),
        }

    def _batches(self, iteration: int, call: int) -> dict[str, Any]:
        """What one compiled call learns from, [updates, batch, ...] each; good until the next one is drawn."""
        rng = stream(self.seed, "replay", iteration, call)
        count, size = self.updates_per_call, self.config.batch
        self._drawn = self._replay.sample(rng, count, size, self._drawn)
        batches: dict[str, Any] = {"mask": None, "next_mask": None, "noise": None, "next_noise": None} | self._drawn
        if self.policy.squashed:
            for name in ("noise", "next_noise"):
                batches[name] = self.policy.distribution.noise(rng, count, size)
        return batches

    def _refuse_non_finite(self, result: Result, arrays: Arrays) -> None:
        """Before anything is kept: what the replay memory takes in comes back again and again."""
        for name in ("obs", "last_obs", "final_obs", "actions", "rewards"):
            bad = np.argwhere(~np.isfinite(arrays[name]))
            if len(bad):
                first = bad[0].tolist()
                if name == "final_obs":
                    first = arrays["final_index"][first[0]].tolist()
                env = first[0] if name == "last_obs" else first[1]
                raise NonFinite(f"{name} of lane {result.lane}, environment {env} is not finite")

    def _blame(self, report: Any) -> str:
        for name, array in {**self._learned.actor, **self._learned.critics}.items():
            if not np.isfinite(np.asarray(array)).all():
                return f"parameter {name} is not finite"
        wrong = [name for name, value in zip(METRICS, report, strict=True) if not np.isfinite(value)]
        largest = 0.0 if self._drawn is None else float(np.abs(self._drawn["rewards"]).max())
        return (
            f"{wrong[0] if wrong else 'a parameter'} is not finite any more; the largest reward was {largest:.3g}; "
            "a smaller algorithm.lr or algorithm.gamma, or normalize_obs, may help"
        )

    # -- checkpoints --------------------------------------------------------------------------------------

    def restart(self) -> None:
        pass  # the replay memory sees by itself that a lane begins elsewhere

    def state(self) -> Arrays:
        import jax

        arrays: Arrays = {"counts": np.array([self._steps, self._updates])}
        for i, leaf in enumerate(jax.tree.leaves(self._learned)):
            arrays[f"learned/{i}"] = np.array(leaf)
        if self._moments is not None:
            arrays |= self._moments.state("moments")
        return arrays | {f"replay/{name}": array for name, array in self._replay.state().items()}

    def blocks(self) -> dict[str, Arrays]:
        return {f"replay/{name}": arrays for name, arrays in self._replay.blocks().items()}

    def load(self, arrays: Arrays) -> None:
        import jax

        self._steps, self._updates = arrays["counts"].tolist()
        structure: Any = jax.tree.structure(self._learned)
        leaves = [np.array(arrays[f"learned/{i}"]) for i in range(structure.num_leaves)]
        self._learned = jax.tree.unflatten(structure, leaves)
        if self._moments is not None:
            self._moments.load(arrays, "moments")
        prefix = "replay/"
        self._replay.load({name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)})
