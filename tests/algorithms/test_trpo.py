"""TRPO: its pieces by hand and against SciPy, its compiled update against a plain one, and steps it must not take."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from regatta.algorithms.natural import backtrack, conjugate_gradients, lbfgs, trust_region_step
from regatta.algorithms.trpo import METRICS, TRPO, Critic, TRPOConfig, fisher_product, fit, improve, steps_in_episode
from regatta.errors import ConfigError, NonFinite
from regatta.policies.distributions import ActionSpec, Bernoulli, Categorical, Gaussian, MultiCategorical
from regatta.policies.flat import Layout
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.normalize import RewardScale
from regatta.policies.policy import Policy, PolicySpec
from regatta.types import Arrays, Collect, Result, Snapshot

OBS, ACTIONS = 3, 2
LANES, ENVS, STEPS = 2, 2, 4
SIZE = LANES * ENVS * STEPS
SMALL = {"rollout_steps": STEPS, "critic_minibatch": SIZE // 2, "critic_epochs": 2, "critic_lr": 0.01}
DISCRETE = ActionSpec("discrete", (ACTIONS,))
KINDS = [
    DISCRETE,
    ActionSpec("discrete", (4,), masked=True),
    ActionSpec("multidiscrete", (2, 3), masked=True),
    ActionSpec("multibinary", (2,)),
    ActionSpec("box", (2,)),
]

Results = list[tuple[Result, Arrays]]


def make_trpo(action: ActionSpec = DISCRETE, **knobs: Any) -> TRPO:
    config = TRPOConfig(**(SMALL | knobs))
    spec = config.policy(ObsSpec((OBS,)), action, True, NetworkConfig(sizes=(5,)))
    return config.build(Policy(spec), LANES, ENVS, 7, 4 * SIZE)


@functools.cache
def compiled(*settings: Any) -> tuple[TRPO, Arrays]:
    trpo = make_trpo(settings[0], **dict(settings[1:]))
    return trpo, trpo.state()


def at_its_start(action: ActionSpec = DISCRETE, **knobs: Any) -> TRPO:
    """As `make_trpo`, but compiled once for all tests with the same knobs."""
    trpo, beginning = compiled(action, *knobs.items())
    trpo.load(beginning)
    return trpo


def make_results(seed: int = 0, action: ActionSpec = DISCRETE) -> Results:
    """Two lanes with a termination, a time limit and, in lane 1, an environment that failed at step 1."""
    rng = np.random.default_rng(seed)
    results = []
    for number in range(LANES):
        arrays = {
            "obs": rng.normal(size=(STEPS, ENVS, OBS)).astype(np.float32) + 1,
            "last_obs": rng.normal(size=(ENVS, OBS)).astype(np.float32),
            "rewards": rng.normal(size=(STEPS, ENVS)).astype(np.float32),
            "terminated": np.zeros((STEPS, ENVS), bool),
            "truncated": np.zeros((STEPS, ENVS), bool),
            "valid": np.ones((STEPS, ENVS), bool),
            "final_obs": rng.normal(size=(1, OBS)).astype(np.float32),
            "final_index": np.array([[2, 0]], np.int32),
        }
        arrays |= some_actions(rng, action, STEPS, ENVS)
        arrays["truncated"][2, 0] = True
        arrays["terminated"][1, 1] = number == 0
        if number == 1:
            arrays["valid"][1, 1] = False
            arrays["truncated"][1, 1] = True
        results.append((Result(number, 0, STEPS * ENVS, [], [], 0.0), arrays))
    return results


def some_actions(rng: np.random.Generator, action: ActionSpec, *shape: int) -> Arrays:
    if action.kind == "box":
        return {"actions": rng.normal(size=(*shape, *action.sizes)).astype(np.float32)}
    if action.kind == "multibinary":
        return {"actions": rng.integers(0, 2, (*shape, *action.sizes), dtype=np.int32)}
    chosen = np.stack([rng.integers(0, n, shape, dtype=np.int32) for n in action.sizes], -1)
    arrays = {"actions": chosen[..., 0] if action.kind == "discrete" else chosen}
    if action.masked:
        one_hot = [np.arange(n) == chosen[..., i, None] for i, n in enumerate(action.sizes)]
        arrays["mask"] = np.concatenate(one_hot, -1) | (rng.random((*shape, action.outputs)) < 0.6)
    return arrays


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


@pytest.fixture
def fresh() -> TRPO:
    return at_its_start()


NORMALIZING = {"normalize_obs": True, "normalize_reward": True}


# -- how far two policies are apart -----------------------------------------------------------------------


def two_outputs(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.normal(size=(6, size)) * 2, rng.normal(size=(6, size)) * 2


def test_kl_of_categoricals_against_scipy() -> None:
    old, new = two_outputs(4)
    expected = stats.entropy(special.softmax(old, -1), special.softmax(new, -1), axis=-1)
    np.testing.assert_allclose(Categorical(4).kl(np, old, new), expected, rtol=1e-6)


def test_kl_of_masked_categoricals_counts_what_is_legal() -> None:
    old, new = two_outputs(4)
    mask = np.broadcast_to(np.array([True, False, True, True]), old.shape)
    p, q = (special.softmax(out[:, [0, 2, 3]], -1) for out in (old, new))
    np.testing.assert_allclose(Categorical(4).kl(np, old, new, mask), stats.entropy(p, q, axis=-1), rtol=1e-6)


def test_kl_of_multicategoricals_is_the_sum_of_their_parts() -> None:
    old, new = two_outputs(5)
    mask = np.ones(old.shape, bool)
    mask[:, 4] = False
    expected = sum(
        stats.entropy(special.softmax(old[:, cut], -1), special.softmax(new[:, cut], -1), axis=-1)
        for cut in (slice(0, 2), slice(2, 4))
    )
    np.testing.assert_allclose(MultiCategorical((2, 3)).kl(np, old, new, mask), expected, rtol=1e-6)


def test_kl_of_bernoullis_against_scipy() -> None:
    old, new = two_outputs(3)
    p, q = special.expit(old), special.expit(new)
    expected = (special.rel_entr(p, q) + special.rel_entr(1 - p, 1 - q)).sum(-1)
    np.testing.assert_allclose(Bernoulli(3).kl(np, old, new), expected, rtol=1e-6)


def test_kl_of_gaussians_is_the_integral() -> None:
    old, new = (np.array([[1.0, -2.0]]), np.log([0.5, 2.0])), (np.array([[0.0, 1.0]]), np.log([1.5, 1.0]))
    x = np.linspace(-40, 40, 400_001)
    expected = 0.0
    for i in range(2):
        p = stats.norm(old[0][0, i], np.exp(old[1][i]))
        q = stats.norm(new[0][0, i], np.exp(new[1][i]))
        expected += np.trapezoid(p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), x)
    np.testing.assert_allclose(Gaussian(2).kl(np, old, new), [expected], rtol=1e-6)


@pytest.mark.parametrize("action", KINDS, ids=lambda a: a.kind + "-masked" * a.masked)
def test_kl_is_zero_at_home_and_the_same_in_both_libraries(action: ActionSpec) -> None:
    policy = Policy(PolicySpec(ObsSpec((OBS,)), action, NetworkConfig(), normalized=False, critic=False))
    distribution: Any = policy.distribution
    rng = np.random.default_rng(0)
    mask = some_actions(rng, action, 6).get("mask")
    old, new = (out.astype(np.float32) for out in two_outputs(action.outputs))
    if action.kind == "box":
        old, new = (old, old[0] / 4), (new, new[0] / 4)
    np.testing.assert_allclose(distribution.kl(np, old, old, mask), np.zeros(6), atol=1e-6)
    ours, theirs = (distribution.kl(xp, old, new, mask) for xp in (np, jnp))
    assert ours.shape == (6,)
    assert (ours > -1e-6).all()
    assert ours.max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


# -- steps that know of curvature -------------------------------------------------------------------------


def positive_definite(size: int) -> np.ndarray:
    root = np.random.default_rng(2).normal(size=(size, size))
    return (root @ root.T + np.eye(size)).astype(np.float32)


def test_conjugate_gradients_solve_a_positive_definite_system() -> None:
    a, b = positive_definite(6), np.arange(6, dtype=np.float32)
    x, residual = conjugate_gradients(lambda v: a @ v, jnp.asarray(b), 30)
    np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=1e-3, atol=1e-3)
    assert np.abs(residual).max() < 1e-3


def test_one_conjugate_gradient_step_by_hand() -> None:
    # b = (1, 1), A = diag(1, 3): alpha = b'b / b'Ab = 2 / 4; x = (.5, .5), residual = b - A x = (.5, -.5)
    x, residual = conjugate_gradients(lambda v: jnp.array([1.0, 3.0]) * v, jnp.ones(2), 1)
    np.testing.assert_allclose(x, [0.5, 0.5])
    np.testing.assert_allclose(residual, [0.5, -0.5])


def test_conjugate_gradients_stop_where_the_curvature_is_not_positive() -> None:
    # Along b = (1, 1) the curvature is 1 - 3 < 0 at once: nothing is known of x.
    x, residual = conjugate_gradients(lambda v: jnp.array([1.0, -3.0]) * v, jnp.ones(2), 10)
    np.testing.assert_array_equal(x, [0, 0])
    np.testing.assert_array_equal(residual, [1, 1])


def test_a_step_reaches_the_edge_of_the_trust_region() -> None:
    a, gradient = positive_definite(5), jnp.arange(1.0, 6.0)
    step, found, _ = trust_region_step(lambda v: a @ v, gradient, 30, 0.02)
    assert found
    assert 0.5 * step @ a @ step == pytest.approx(0.02, rel=1e-3)
    natural = np.linalg.solve(a, gradient)
    np.testing.assert_allclose(step / np.linalg.norm(step), natural / np.linalg.norm(natural), atol=1e-3)


@pytest.mark.parametrize(
    ("curvature", "gradient"),
    [([1.0, 1.0], [0.0, 0.0]), ([-1.0, -1.0], [1.0, 2.0]), ([0.0, 0.0], [1.0, 2.0]), ([1.0, 1.0], [np.nan, 1.0])],
    ids=["zero gradient", "negative curvature", "no curvature", "not finite"],
)
def test_there_may_be_no_step(curvature: list[float], gradient: list[float]) -> None:
    step, found, residual = trust_region_step(lambda v: jnp.array(curvature) * v, jnp.array(gradient), 10, 0.01)
    assert not found
    np.testing.assert_array_equal(step, [0, 0])
    assert residual == 0


def test_backtracking_takes_the_first_that_is_accepted() -> None:
    x, accepted, tried, figures = backtrack(lambda c: (c[0] < 1.3, c[0] * 2), jnp.ones(1), jnp.ones(1), 10, 0.5)
    assert (float(x[0]), bool(accepted), int(tried), float(figures)) == (1.25, True, 3, 2.5)


def test_backtracking_leaves_the_vector_as_it_was_if_none_is() -> None:
    start = jnp.array([0.1, 1e-30])
    x, accepted, tried, _ = backtrack(lambda c: (c[0] > 1e9, c[0]), start, jnp.ones(2), 4, 0.5)
    assert np.array_equal(x, start)
    assert (bool(accepted), int(tried)) == (False, 4)


def test_lbfgs_reaches_the_least_squares_optimum() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(40, 8)).astype(np.float32), rng.normal(size=40).astype(np.float32)
    x = jax.jit(lambda x: lbfgs(lambda v: ((a @ v - b) ** 2).mean(), x, 40))(jnp.full(8, 5.0))
    np.testing.assert_allclose(x, np.linalg.lstsq(a, b)[0], atol=1e-3)


def test_lbfgs_goes_round_a_bend() -> None:
    def rosenbrock(v: Any) -> Any:
        return (1 - v[0]) ** 2 + 100 * (v[1] - v[0] ** 2) ** 2

    x = jax.jit(lambda x: lbfgs(rosenbrock, x, 100))(jnp.array([-1.2, 1.0]))
    np.testing.assert_allclose(x, [1, 1], atol=1e-2)


def test_lbfgs_never_ends_worse_than_it_began() -> None:
    start = jnp.array([0.3, -0.2])
    assert np.array_equal(lbfgs(lambda v: jnp.nan * v.sum(), start, 5), start)
    assert np.array_equal(lbfgs(lambda v: 0.0 * v.sum(), start, 5), start)


# -- the Fisher matrix ------------------------------------------------------------------------------------


def make_batch(policy: Policy, theta: Any, layout: Layout, samples: int = 12) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    obs = rng.normal(size=(samples, OBS)).astype(np.float32)
    taken = some_actions(rng, policy.action, samples)
    out = policy.act_out(np, layout.split(theta), obs)
    mask = taken.get("mask")
    return {
        "obs": obs,
        "actions": taken["actions"],
        "mask": mask,
        "logp": policy.distribution.log_prob(np, out, taken["actions"], mask),
        "advantages": rng.normal(size=samples).astype(np.float32),
        "weight": (np.arange(samples) != 3).astype(np.float32),
    }


def improved(
    policy: Policy, layout: Layout, theta: Any, batch: Any, **knobs: Any
) -> tuple[Any, bool, dict[str, float]]:
    compiled = jax.jit(lambda theta, batch: improve(policy, TRPOConfig(**knobs), layout, theta, batch))
    new, moved, figures = compiled(theta, batch)
    return np.asarray(new), bool(moved), dict(zip(METRICS, map(float, figures), strict=False))


def tiny(action: ActionSpec) -> tuple[Policy, Layout, np.ndarray]:
    network = NetworkConfig(sizes=(4,), log_std=-0.5)
    policy = Policy(PolicySpec(ObsSpec((OBS,)), action, network, normalized=False, critic=False))
    layout = Layout(policy.init(np.random.default_rng(0)))
    size = sum(int(np.prod(shape)) for shape in layout.shapes.values())
    return policy, layout, 0.5 * np.random.default_rng(3).normal(size=size).astype(np.float32)


@pytest.mark.parametrize("action", KINDS, ids=lambda a: a.kind + "-masked" * a.masked)
def test_fisher_product_is_the_hessian_of_the_mean_kl(action: ActionSpec) -> None:
    policy, layout, theta = tiny(action)
    batch = make_batch(policy, theta, layout)
    keep = batch["weight"] > 0
    distribution: Any = policy.distribution
    old = policy.act_out(jnp, layout.split(theta), batch["obs"][keep])

    def mean_kl(vector: Any) -> Any:
        new = policy.act_out(jnp, layout.split(vector), batch["obs"][keep])
        return distribution.kl(jnp, old, new, batch["mask"] if batch["mask"] is None else batch["mask"][keep]).mean()

    hessian = jax.jit(jax.hessian(mean_kl))(theta)
    times = fisher_product(policy, layout, theta, batch, 0.25)
    got = jax.jit(jax.vmap(times))(jnp.eye(len(theta)))
    np.testing.assert_allclose(got, hessian + 0.25 * np.eye(len(theta)), atol=2e-5)
    assert np.abs(hessian).max() > 0.01
    if action.kind == "box":
        # Of log_std alone: 2 for each dimension, whatever the network says.
        at = layout.slices["pi/log_std"]
        np.testing.assert_allclose(got[at, at], 2.25 * np.eye(2), atol=1e-5)


@pytest.mark.parametrize("action", KINDS, ids=lambda a: a.kind + "-masked" * a.masked)
def test_a_step_improves_the_surrogate_within_the_trust_region(action: ActionSpec) -> None:
    policy, layout, theta = tiny(action)
    new, moved, figures = improved(policy, layout, theta, make_batch(policy, theta, layout), max_kl=0.02)
    assert moved
    assert figures["surrogate_after"] > figures["surrogate_before"]
    assert 0 < figures["kl"] <= 0.02
    assert figures["step_norm"] == pytest.approx(np.linalg.norm(new - theta), rel=1e-4)
    if action.kind == "box":
        at = layout.slices["pi/log_std"]
        assert (new[at] != theta[at]).all()


def test_the_line_search_shortens_a_step_that_goes_too_far() -> None:
    # So far away the curvature here says little about the KL there.
    policy, layout, theta = tiny(DISCRETE)
    batch = make_batch(policy, theta, layout)
    _, moved, figures = improved(policy, layout, theta, batch, max_kl=1.0, cg_damping=1e-4)
    assert moved
    assert figures["line_search_steps"] > 1
    assert figures["kl"] <= 1.0
    assert figures["surrogate_after"] > figures["surrogate_before"]


@pytest.mark.parametrize(("max_kl", "worse"), [(1.0, "kl"), (10.0, "surrogate")])
def test_with_no_other_length_to_try_such_a_step_is_refused(max_kl: float, worse: str) -> None:
    policy, layout, theta = tiny(DISCRETE)
    batch = make_batch(policy, theta, layout)
    knobs = {"max_kl": max_kl, "cg_damping": 1e-4}
    new, moved, figures = improved(policy, layout, theta, batch, **knobs, line_search_steps=1)
    assert not moved
    assert np.array_equal(new, theta)
    assert figures["kl"] == figures["step_norm"] == 0
    assert figures["surrogate_after"] == figures["surrogate_before"]


def test_a_single_legal_action_leaves_nothing_to_learn() -> None:
    # The policy cannot change what it does: gradient and, without damping, curvature are zero.
    policy, layout, theta = tiny(KINDS[1])
    batch = make_batch(policy, theta, layout)
    batch["mask"] = np.arange(4) == batch["actions"][:, None]
    new, moved, _ = improved(policy, layout, theta, batch, cg_damping=0.0)
    assert not moved
    assert np.array_equal(new, theta)


def test_an_entropy_bonus_raises_the_entropy() -> None:
    policy, layout, theta = tiny(ActionSpec("box", (2,)))
    _, _, figures = improved(policy, layout, theta, make_batch(policy, theta, layout), entropy_coef=1e4)
    assert figures["entropy_after"] > figures["entropy_before"]


def test_the_fisher_matrix_may_take_every_other_sample() -> None:
    policy, layout, theta = tiny(DISCRETE)
    batch = make_batch(policy, theta, layout)
    whole = improved(policy, layout, theta, batch)[0] - theta
    half = improved(policy, layout, theta, batch, fisher_every=2)[0] - theta
    assert not np.array_equal(whole, half)
    assert whole @ half / np.linalg.norm(whole) / np.linalg.norm(half) > 0.8


# -- the step within the episode --------------------------------------------------------------------------


def test_steps_in_an_episode_by_hand() -> None:
    done = np.array([[0, 0], [0, 1], [1, 1], [0, 0]], bool)
    got = steps_in_episode(done, np.array([5, 0]))
    np.testing.assert_array_equal(got, [[5, 0], [6, 1], [7, 0], [0, 0], [1, 1]])


def test_the_critic_sees_the_time_beside_the_observation() -> None:
    critic = Critic(PolicySpec(ObsSpec((2,)), DISCRETE, NetworkConfig(sizes=(4,)), normalized=False), 100)
    arrays = critic.init(np.random.default_rng(0))
    assert arrays["critic/0/w"].shape == (3, 4)
    inputs = critic.inputs(np, np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0.25, 0.5]))
    np.testing.assert_array_equal(inputs, [[1, 2, 0.25], [3, 4, 0.5]])
    board = ObsSpec((3, 3, 2), "uint8")
    critic = Critic(PolicySpec(board, DISCRETE, NetworkConfig(sizes=(4,)), normalized=False), 100)
    assert critic.inputs(np, np.zeros((5, 6, 3, 3, 2)), np.zeros((5, 6))).shape == (5, 6, 19)


PLAIN = {"cg_steps": 50, "gamma": 0.9, "max_kl": 0.05, "critic_mix": 1.0}


def test_the_step_within_the_episode_is_carried_on_and_restarts() -> None:
    trpo = at_its_start(critic="lbfgs", time_feature=10, **PLAIN)
    trpo.update(0, make_results(), trpo.snapshot(0))
    # Column by column: cut after step 2; terminated after step 1; cut after step 2; failed at step 1.
    np.testing.assert_array_equal(trpo.state()["episode_steps"], [1, 2, 1, 2])
    data = trpo._data(make_results(), trpo.snapshot(1))
    np.testing.assert_allclose(data["times"][:, 0], [0.1, 0.2, 0.3, 0.0, 0.1], rtol=1e-6)
    trpo.restart()
    np.testing.assert_array_equal(trpo.state()["episode_steps"], [0, 0, 0, 0])


def test_final_observations_are_one_step_later() -> None:
    trpo = make_trpo(time_feature=10)
    results = make_results()
    values = trpo._data(results, trpo.snapshot(0))["final_values"]
    assert (np.flatnonzero(values.any(1)).tolist(), np.flatnonzero(values.any(0)).tolist()) == ([2], [0, 2])
    arrays = trpo.critic_layout.split(trpo.state()["critic"])
    for lane, (_, got) in enumerate(results):
        inputs = np.append(got["final_obs"][0], np.float32(0.3))  # cut at the end of the third step
        assert values[2, 2 * lane] == pytest.approx(trpo.critic.value(np, arrays, inputs), rel=1e-5)


# -- the compiled update ----------------------------------------------------------------------------------


def plain_samples(trpo: TRPO, results: Results, behaviour: Snapshot) -> dict[str, np.ndarray]:
    """The valid samples with their advantages, one column after the other, step by step."""
    config = trpo.config
    critic = trpo.critic_layout.split(trpo.state()["critic"])

    def value(obs: np.ndarray, step: int) -> float:
        x = np.append(obs, step / 10)
        hidden = np.tanh(x @ critic["critic/0/w"] + critic["critic/0/b"])
        return float((hidden @ critic["critic/out/w"] + critic["critic/out/b"])[0])

    rows: dict[str, list[Any]] = {name: [] for name in ("obs", "actions", "logp", "advantages", "inputs", "returns")}
    for _, arrays in results:
        finals = {tuple(at): row for at, row in zip(arrays["final_index"].tolist(), arrays["final_obs"], strict=True)}
        for env in range(ENVS):
            step, clock = 0, []
            for t in range(STEPS):
                clock.append(step)
                step = 0 if arrays["terminated"][t, env] or arrays["truncated"][t, env] else step + 1
            after = 0.0
            for t in reversed(range(STEPS)):
                obs = arrays["obs"][t, env]
                if arrays["terminated"][t, env]:
                    following = 0.0
                elif arrays["truncated"][t, env]:
                    following = value(finals[t, env], clock[t] + 1) if (t, env) in finals else 0.0
                else:
                    succ = arrays["obs"][t + 1, env] if t + 1 < STEPS else arrays["last_obs"][env]
                    following = value(succ, clock[t] + 1)
                now = value(obs, clock[t])
                done = arrays["terminated"][t, env] or arrays["truncated"][t, env]
                delta = float(arrays["rewards"][t, env]) + config.gamma * following - now
                after = delta + (0.0 if done else config.gamma * config.gae_lambda * after)
                if not arrays["valid"][t, env]:
                    after = 0.0
                    continue
                out = trpo.policy.act_out(np, behaviour.arrays, obs)
                rows["logp"].append(special.log_softmax(out)[arrays["actions"][t, env]])
                rows["obs"].append(obs)
                rows["actions"].append(arrays["actions"][t, env])
                rows["advantages"].append(after)
                rows["inputs"].append(np.append(obs, clock[t] / 10))
                rows["returns"].append(after + now)
    return {name: np.array(row) for name, row in rows.items()}


def plain_step(trpo: TRPO, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The policy's step from the whole Fisher matrix, solved directly."""
    config, layout = trpo.config, trpo.layout
    theta = trpo.state()["theta"]
    advantages = (batch["advantages"] - batch["advantages"].mean()) / batch["advantages"].std()

    def log_probs(vector: Any) -> Any:
        return jax.nn.log_softmax(trpo.policy.act_out(jnp, layout.split(vector), batch["obs"]))

    def surrogate(vector: Any) -> Any:
        taken = jnp.take_along_axis(log_probs(vector), batch["actions"][:, None], -1)[:, 0]
        return (jnp.exp(taken - batch["logp"]) * advantages).mean()

    def kl(vector: Any) -> Any:
        old = jax.lax.stop_gradient(log_probs(theta))
        return (jnp.exp(old) * (old - log_probs(vector))).sum(-1).mean()

    matrix = np.asarray(jax.jit(jax.hessian(kl))(theta), np.float64) + config.cg_damping * np.eye(len(theta))
    x = np.linalg.solve(matrix, np.asarray(jax.grad(surrogate)(theta), np.float64))
    full = np.sqrt(2 * config.max_kl / (x @ matrix @ x)) * x
    for k in range(config.line_search_steps):
        new = theta + config.line_search_shrink**k * full
        if surrogate(new) > surrogate(theta) and kl(new) <= config.max_kl:
            return new
    raise AssertionError("no step in the plain update")


@pytest.mark.parametrize("stale", [False, True], ids=["its own data", "data of an older policy"])
def test_compiled_update_is_the_plain_one(stale: bool) -> None:
    trpo = at_its_start(critic="lbfgs", time_feature=10, **PLAIN)
    behaviour = trpo.snapshot(0)
    if stale:
        trpo.update(0, make_results(5), behaviour)
        trpo.restart()
    batch = plain_samples(trpo, make_results(), behaviour)
    expected = plain_step(trpo, batch)
    before = trpo.state()
    metrics = trpo.update(1, make_results(), behaviour)
    after = trpo.state()
    assert np.abs(after["theta"] - before["theta"]).max() > 0.01
    np.testing.assert_allclose(after["theta"], expected, atol=2e-4)
    # The critic comes after the advantages, and fits the returns as far as its small weights allow.
    fitted = trpo.critic.value(np, trpo.critic_layout.split(after["critic"]), batch["inputs"].astype(np.float32))
    assert metrics["critic_loss"] == pytest.approx(((fitted - batch["returns"]) ** 2).mean(), rel=1e-3)
    assert metrics["explained_variance_after"] > max(0.5, metrics["explained_variance_before"])
    assert metrics["explained_variance_before"] == pytest.approx(
        1 - np.var(batch["advantages"]) / np.var(batch["returns"]), abs=1e-4
    )


def test_adam_fits_the_critic_step_by_step(fresh: TRPO) -> None:
    losses = [fresh.update(i, make_results(), fresh.snapshot(i))["critic_loss"] for i in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_mix_asks_the_critic_for_less() -> None:
    # Without noise to fit, a tenth of the way is a ninth of the error left behind.
    critic = Critic(PolicySpec(ObsSpec((2,)), DISCRETE, NetworkConfig(kind="linear"), normalized=False), None)
    layout = Layout(critic.init(np.random.default_rng(0)))
    obs = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    batch = {"inputs": obs, "values": np.zeros(50), "returns": obs @ np.array([1.0, -2.0]) + 3, "weight": np.ones(50)}
    for mix in (1.0, 0.1):
        config = TRPOConfig(critic="lbfgs", critic_mix=mix, critic_l2=0.0)
        phi, _ = fit(critic, config, layout, jnp.zeros(3), (), batch, None)
        arrays = layout.split(np.asarray(phi))
        np.testing.assert_allclose(arrays["critic/out/w"][:, 0], [mix, -2 * mix], atol=1e-3)
        np.testing.assert_allclose(arrays["critic/out/b"], [3 * mix], atol=1e-3)


@pytest.mark.parametrize("action", [KINDS[2], KINDS[4]], ids=lambda a: a.kind)
def test_other_actions_learn_too_and_publish_no_critic(action: ActionSpec) -> None:
    trpo = make_trpo(action)
    before = trpo.snapshot(0)
    assert not [name for name in before.arrays if name.startswith(("critic", "vf"))]
    metrics = trpo.update(0, make_results(action=action), before)
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["steps_refused"] == 0
    changed = {
        name for name, array in trpo.snapshot(1).arrays.items() if not np.array_equal(array, before.arrays[name])
    }
    assert changed == set(before.arrays), "log_std among them"


def image_results(trpo: TRPO) -> Results:
    results, rng, shape = make_results(), np.random.default_rng(0), trpo.policy.obs.shape
    for _, arrays in results:
        for name, leading in (("obs", (STEPS, ENVS)), ("last_obs", (ENVS,)), ("final_obs", (1,))):
            arrays[name] = rng.integers(0, 256, (*leading, *shape), dtype=np.uint8)
    return results


def make_image_trpo(network: NetworkConfig, **knobs: Any) -> TRPO:
    config = TRPOConfig(**(SMALL | knobs))
    spec = config.policy(ObsSpec((8, 8, 2), "uint8"), DISCRETE, True, network)
    return config.build(Policy(spec), LANES, ENVS, 0, SIZE)


def test_a_board_and_the_time_go_into_a_flat_network() -> None:
    trpo = make_image_trpo(NetworkConfig(sizes=(6,)), time_feature=50)
    metrics = trpo.update(0, image_results(trpo), trpo.snapshot(0))
    assert metrics["steps_refused"] == 0
    assert metrics["surrogate_after"] > metrics["surrogate_before"]


def test_the_critic_convolves_as_the_policy_does() -> None:
    trpo = make_image_trpo(NetworkConfig(kind="cnn", convolutions="residual", sizes=(6,)))
    results = image_results(trpo)
    arrays = trpo.critic_layout.split(trpo.state()["critic"])
    values = trpo._data(results, trpo.snapshot(0))["final_values"]
    for lane, (_, got) in enumerate(results):
        expected = trpo.critic.value(jnp, arrays, trpo.policy.normalize(jnp, {}, got["final_obs"]))
        np.testing.assert_allclose(values[2, 2 * lane], expected[0], rtol=1e-4)


# -- updates that cannot be trusted -----------------------------------------------------------------------


def test_without_a_gradient_the_policy_stays_and_that_is_counted(fresh: TRPO) -> None:
    nothing = make_results()
    for _, arrays in nothing:
        arrays["valid"][:] = False
    before = fresh.state()["theta"]
    for count in (1, 2):
        metrics = fresh.update(0, nothing, fresh.snapshot(0))
        assert metrics["steps_refused"] == count
        assert metrics["step_norm"] == 0
        assert metrics["surrogate_after"] == metrics["surrogate_before"]
    assert np.array_equal(fresh.state()["theta"], before)
    assert fresh.update(0, make_results(), fresh.snapshot(0))["steps_refused"] == 2


@pytest.mark.parametrize("critic", ["adam", "lbfgs"])
@pytest.mark.parametrize(("what", "number"), [("rewards", np.nan), ("rewards", np.inf), ("obs", np.nan)])
def test_non_finite_data_is_named_counted_and_changes_nothing(critic: str, what: str, number: float) -> None:
    trpo = at_its_start(critic=critic, time_feature=10, **NORMALIZING)
    before = trpo.state()
    bad = make_results()
    bad[1][1][what][2, 1] = number
    with pytest.raises(NonFinite, match=f"{what} of lane 1, environment 1"):
        trpo.update(0, bad, trpo.snapshot(0))
    after = trpo.state()
    assert after.pop("steps_refused") == before.pop("steps_refused") + 1
    # Episodes went on in the lanes, whatever became of the update.
    np.testing.assert_array_equal(after.pop("episode_steps"), [1, 2, 1, 2])
    before.pop("episode_steps")
    assert same(after, before)
    assert trpo.update(1, make_results(), trpo.snapshot(0))["steps_refused"] == 1


def test_a_loss_beyond_all_numbers_says_what_may_help(fresh: TRPO) -> None:
    huge = make_results()
    huge[0][1]["rewards"][:] = 3e38
    before = fresh.state()
    with pytest.raises(NonFinite, match="normalize_reward"):
        fresh.update(0, huge, fresh.snapshot(0))
    assert np.array_equal(fresh.state()["theta"], before["theta"])
    assert np.array_equal(fresh.state()["critic"], before["critic"])


def test_a_non_finite_critic_is_named(fresh: TRPO) -> None:
    state = fresh.state()
    fresh.load(state | {"critic": np.full_like(state["critic"], np.nan)})
    with pytest.raises(NonFinite, match="parameter critic/"):
        fresh.update(0, make_results(), fresh.snapshot(0))


def test_invalid_samples_have_no_influence(fresh: TRPO) -> None:
    beginning, states = fresh.state(), []
    for garbage in (0.0, 1e3):
        results = make_results()
        arrays = results[1][1]
        for name, rest in (("valid", False), ("truncated", True), ("terminated", False)):
            arrays[name][1:, 1] = rest  # environment 1 of lane 1 is lost from step 1 on
        arrays["obs"][2:, 1] += garbage
        arrays["last_obs"][1] -= garbage
        arrays["rewards"][1:, 1] += garbage
        fresh.load(beginning)
        fresh.update(0, results, fresh.snapshot(0))
        states.append(fresh.state())
    assert same(*states)


# -- tempo, statistics and state --------------------------------------------------------------------------


def test_tasks_cover_every_lane(fresh: TRPO) -> None:
    assert fresh.tasks(5, 4) == [(Collect(0, 5, 4, STEPS, 0), {}), (Collect(1, 5, 4, STEPS, 0), {})]
    assert (fresh.steps_per_iteration, fresh.total_steps) == (SIZE, 4 * SIZE)


def test_behaviour_may_be_older_than_the_policy(fresh: TRPO) -> None:
    old = fresh.snapshot(0)
    assert fresh.update(0, make_results(0), old)["surrogate_before"] == pytest.approx(0, abs=1e-6)
    second = fresh.update(1, make_results(1), old)
    assert abs(second["surrogate_before"]) > 1e-4, "the ratios are to the policy that acted"
    assert second["kl"] <= fresh.config.max_kl, "the trust region is around the policy as it is"


def test_rewards_are_scaled_as_the_running_return_says() -> None:
    trpo = at_its_start(critic="adam", time_feature=10, **NORMALIZING)
    results = make_results()
    trpo.update(0, results, trpo.snapshot(0))
    rewards, terminated, truncated = (
        np.concatenate([arrays[name] for _, arrays in results], 1) for name in ("rewards", "terminated", "truncated")
    )
    scale = RewardScale(0.99, LANES * ENVS)
    scale.scale(rewards, terminated | truncated)
    state = trpo.state()
    assert all(np.array_equal(state[name], array) for name, array in scale.state().items())


@pytest.mark.parametrize("critic", ["adam", "lbfgs"])
def test_a_loaded_state_goes_on_identically(critic: str) -> None:
    knobs: Any = {"critic": critic, "time_feature": 10} | NORMALIZING

    def iterate(trpo: TRPO, iterations: range) -> list[dict[str, float]]:
        return [trpo.update(i, make_results(i), trpo.snapshot(i)) for i in iterations]

    one = at_its_start(**knobs)
    iterate(one, range(2))
    saved = {name: array.copy() for name, array in one.state().items()}
    for array in saved.values():
        array.flags.writeable = False
    other = make_trpo(**knobs)
    other.load(saved)
    assert same(other.state(), saved)
    assert same(other.snapshot(2).arrays, one.snapshot(2).arrays)
    assert iterate(one, range(2, 4)) == iterate(other, range(2, 4))
    assert same(one.state(), other.state())
    assert not same(one.state(), saved)
    assert one.blocks() == {}


# -- what it refuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obs", "network", "knobs", "text"),
    [
        (ObsSpec((3,)), NetworkConfig(kind="lstm"), {}, "network.kind = 'lstm'.*without memory"),
        (ObsSpec((3,)), NetworkConfig(shared=True), {}, "network.shared = true"),
        (ObsSpec((40, 40, 1), "uint8"), NetworkConfig(kind="cnn"), {"time_feature": 9}, "algorithm.time_feature = 9"),
        (ObsSpec((40, 40, 1), "uint8"), NetworkConfig(), {"normalize_obs": True}, "algorithm.normalize_obs = true"),
    ],
    ids=["memory", "shared", "time beside convolutions", "statistics of images"],
)
def test_what_it_cannot_serve_is_refused(obs: ObsSpec, network: NetworkConfig, knobs: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TRPOConfig(**knobs).policy(obs, DISCRETE, True, network)


def test_faults_between_knobs() -> None:
    def faults(**knobs: Any) -> list[str]:
        return [text for _, text in TRPOConfig(**knobs).faults(NetworkConfig(), 2, 4, 1000)]

    assert faults(rollout_steps=64) == []
    assert faults(rollout_steps=100, critic="lbfgs") == []
    (wrong,) = faults(rollout_steps=100)
    assert wrong.endswith("algorithm.critic_minibatch=100 does")
    assert "run.steps = 1000: too few" in faults(rollout_steps=256)[0]
