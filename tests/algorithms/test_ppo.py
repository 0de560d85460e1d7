"""PPO: its loss by hand, its compiled update against a plain one, and what must never influence either."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regatta.algorithms.ppo import METRICS, PPO, PPOConfig, loss
from regatta.errors import NonFinite
from regatta.policies.distributions import ActionSpec
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.normalize import Moments, RewardScale
from regatta.policies.policy import Policy, PolicySpec
from regatta.types import Arrays, Collect, Result, Snapshot

OBS, ACTIONS = 3, 2
DISCRETE = ActionSpec("discrete", (ACTIONS,))
LANES, ENVS, STEPS = 2, 2, 4
SIZE = LANES * ENVS * STEPS
SMALL = {"rollout_steps": STEPS, "epochs": 2, "minibatch": SIZE // 2, "lr": 0.01}

Results = list[tuple[Result, Arrays]]


def make_ppo(total_iterations: int = 4, seed: int = 7, **knobs: Any) -> PPO:
    config = PPOConfig(**(SMALL | knobs))
    network = NetworkConfig(sizes=(5,))
    spec = PolicySpec(ObsSpec((OBS,)), ActionSpec("discrete", (ACTIONS,)), network, normalized=config.normalize_obs)
    return PPO(config, Policy(spec), LANES, ENVS, seed, total_iterations)


def make_results(seed: int = 0) -> Results:
    """Two lanes with a termination, a time limit and, in lane 1, an environment that failed at step 1."""
    rng = np.random.default_rng(seed)
    results = []
    for number in range(LANES):
        arrays = {
            "obs": rng.normal(size=(STEPS, ENVS, OBS)).astype(np.float32) + 1,
            "last_obs": rng.normal(size=(ENVS, OBS)).astype(np.float32),
            "actions": rng.integers(0, ACTIONS, (STEPS, ENVS), dtype=np.int32),
            "rewards": rng.normal(size=(STEPS, ENVS)).astype(np.float32),
            "terminated": np.zeros((STEPS, ENVS), bool),
            "truncated": np.zeros((STEPS, ENVS), bool),
            "valid": np.ones((STEPS, ENVS), bool),
            "final_obs": rng.normal(size=(1, OBS)).astype(np.float32),
            "final_index": np.array([[2, 0]], np.int32),
        }
        arrays["truncated"][2, 0] = True
        arrays["terminated"][1, 1] = number == 0
        if number == 1:
            arrays["valid"][1, 1] = False
            arrays["truncated"][1, 1] = True
        results.append((Result(number, 0, 0, [], [], 0.0), arrays))
    return results


def copied(results: Results) -> Results:
    return [(result, {name: array.copy() for name, array in arrays.items()}) for result, arrays in results]


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


@pytest.fixture(scope="module")
def plain() -> PPO:
    """Compiled once; `fresh` puts it back to where it began."""
    return make_ppo()


@pytest.fixture(scope="module")
def beginning(plain: PPO) -> Arrays:
    return plain.state()


@pytest.fixture
def fresh(plain: PPO, beginning: Arrays) -> PPO:
    plain.load(beginning)
    return plain


# -- the loss ---------------------------------------------------------------------------------------------

# One hidden unit, relu: logits [0, obs * ln 3], value 2 * obs.
# obs 1: probabilities 1/4, 3/4, value 2;  obs 2: probabilities 1/10, 9/10, value 4.
HAND_PARAMS = {
    "pi/0/w": np.ones((1, 1)),
    "pi/0/b": np.zeros(1),
    "pi/out/w": np.array([[0.0, np.log(3.0)]]),
    "pi/out/b": np.zeros(2),
    "vf/0/w": np.ones((1, 1)),
    "vf/0/b": np.zeros(1),
    "vf/out/w": np.array([[2.0]]),
    "vf/out/b": np.zeros(1),
}
HAND_BATCH = {
    "obs": np.array([[1.0], [2.0]]),
    "actions": np.array([1, 0]),
    "logp": np.log([0.5, 0.2]),  # ratios 0.75 / 0.5 = 1.5 and 0.1 / 0.2 = 0.5
    "advantages": np.array([2.0, -1.0]),
    "values": np.array([1.0, 4.2]),
    "returns": np.array([3.0, 1.0]),
    "weight": np.ones(2),
    "mask": None,
}
HAND_ENTROPY = (0.5623351446 + 0.3250829734) / 2  # of (1/4, 3/4) and (1/10, 9/10)


def hand_loss(batch: dict[str, Any] = HAND_BATCH, clip: float = 0.2, **knobs: Any) -> dict[str, float]:
    policy = Policy(
        PolicySpec(
            ObsSpec((1,)), ActionSpec("discrete", (2,)), NetworkConfig(sizes=(1,), activation="relu"), normalized=False
        )
    )
    config = PPOConfig(**({"normalize_advantages": False, "value_coef": 0.5} | knobs))
    whole, metrics = loss(np, policy, config, HAND_PARAMS, batch, clip)
    return {"loss": float(whole)} | {name: float(v) for name, v in zip(METRICS, metrics, strict=False)}


def test_loss_with_the_clip_active() -> None:
    got = hand_loss(entropy_coef=0.1)
    # min(1.5 * 2, 1.2 * 2) = 2.4;  min(0.5 * -1, 0.8 * -1) = -0.8;  mean 0.8
    assert got["policy_loss"] == pytest.approx(-0.8)
    # (2 - 3)^2 = 1;  (4 - 1)^2 = 9;  mean 5
    assert got["value_loss"] == pytest.approx(5.0)
    assert got["entropy"] == pytest.approx(HAND_ENTROPY)
    # ratio - 1 - ln ratio: 0.5 - 0.4054651 = 0.0945349;  -0.5 + 0.6931472 = 0.1931472
    assert got["kl"] == pytest.approx(0.14384104)
    assert got["clip_fraction"] == pytest.approx(1.0)
    assert got["loss"] == pytest.approx(-0.8 + 0.5 * 5.0 - 0.1 * HAND_ENTROPY)


def test_loss_with_the_clip_inactive() -> None:
    got = hand_loss(clip=0.6)
    assert got["policy_loss"] == pytest.approx(-(1.5 * 2 + 0.5 * -1) / 2)
    assert got["clip_fraction"] == 0.0


def test_the_clip_never_hides_a_loss() -> None:
    # Where moving back would help, the unclipped term counts: min(1.5 * -1, 1.2 * -1) and min(0.5 * 2, 0.8 * 2).
    got = hand_loss(HAND_BATCH | {"advantages": np.array([-1.0, 2.0])})
    assert got["policy_loss"] == pytest.approx(-(-1.5 + 1.0) / 2)


def test_value_clip() -> None:
    # From 1 the value 2 may move to 1.5 only: max(1, (1.5 - 3)^2) = 2.25; 4.2 to 4 is allowed: 9. Mean 5.625.
    assert hand_loss(value_clip=0.5)["value_loss"] == pytest.approx(5.625)
    assert hand_loss(value_clip=100.0)["value_loss"] == pytest.approx(5.0)


def test_entropy_lowers_the_loss() -> None:
    without, with_bonus = hand_loss(entropy_coef=0.0), hand_loss(entropy_coef=1.0)
    assert without["loss"] - with_bonus["loss"] == pytest.approx(HAND_ENTROPY)


def test_advantages_are_normalised_over_the_minibatch() -> None:
    # 2 and -1 have mean 0.5 and deviation 1.5: they become 1 and -1. min(1.5, 1.2) = 1.2; min(-0.5, -0.8) = -0.8
    assert hand_loss(normalize_advantages=True)["policy_loss"] == pytest.approx(-0.2)


@pytest.mark.parametrize("normalized", [False, True])
def test_samples_without_weight_do_not_count(normalized: bool) -> None:
    garbage = {
        "obs": np.array([[50.0]]),
        "actions": np.array([0]),
        "logp": np.array([-90.0]),
        "advantages": np.array([1e6]),
        "values": np.array([-1e6]),
        "returns": np.array([1e6]),
        "weight": np.zeros(1),
    }
    both = {name: np.concatenate([HAND_BATCH[name], garbage[name]]) for name in garbage} | {"mask": None}
    knobs = {"normalize_advantages": normalized, "value_clip": 0.5, "entropy_coef": 0.1}
    got, expected = hand_loss(both, **knobs), hand_loss(**knobs)
    assert got == pytest.approx(expected)


def test_a_minibatch_without_valid_samples_gives_no_loss() -> None:
    got = hand_loss(HAND_BATCH | {"weight": np.zeros(2)}, normalize_advantages=True)
    assert set(got.values()) == {0.0}


# -- the compiled update ----------------------------------------------------------------------------------


def plain_update(ppo: PPO, results: Results, behaviour: Snapshot, iteration: int) -> np.ndarray:
    """The same iteration written down again, with loops: GAE per column, one Adam step per minibatch."""
    config, layout = ppo.config, ppo.layout

    def network(xp: Any, params: Any, obs: Any) -> tuple[Any, Any]:
        heads = []
        for trunk in ("pi", "vf"):
            hidden = xp.tanh(obs @ params[f"{trunk}/0/w"] + params[f"{trunk}/0/b"])
            heads.append(hidden @ params[f"{trunk}/out/w"] + params[f"{trunk}/out/b"])
        return heads[0] - xp.log(xp.exp(heads[0]).sum(-1, keepdims=True)), heads[1][..., 0]

    logps, obs, actions, values, advantages, valid = ([[None] * (LANES * ENVS) for _ in range(STEPS)] for _ in range(6))
    for number, (_, arrays) in enumerate(results):
        finals = {tuple(at): row for at, row in zip(arrays["final_index"].tolist(), arrays["final_obs"], strict=True)}
        for env in range(ENVS):
            m, after = number * ENVS + env, 0.0
            for t in reversed(range(STEPS)):
                logp, value = network(np, behaviour.arrays, arrays["obs"][t, env])
                if arrays["terminated"][t, env]:
                    following = 0.0
                elif arrays["truncated"][t, env]:
                    following = network(np, behaviour.arrays, finals[t, env])[1] if (t, env) in finals else 0.0
                else:
                    succ = arrays["obs"][t + 1, env] if t + 1 < STEPS else arrays["last_obs"][env]
                    following = network(np, behaviour.arrays, succ)[1]
                delta = float(arrays["rewards"][t, env] + config.gamma * following - value)
                done = arrays["terminated"][t, env] or arrays["truncated"][t, env]
                after = delta + (0.0 if done else config.gamma * config.gae_lambda * after)
                if not arrays["valid"][t, env]:
                    after = 0.0
                action = int(arrays["actions"][t, env])
                logps[t][m], values[t][m], advantages[t][m] = float(logp[action]), float(value), after
                obs[t][m], actions[t][m], valid[t][m] = arrays["obs"][t, env], action, arrays["valid"][t, env]

    def flat(rows: Any) -> np.ndarray:
        return np.array([entry for row in rows for entry in row])

    def objective(vector: Any, obs: Any, actions: Any, logp: Any, adv: Any, returns: Any) -> Any:
        now, value = network(jnp, layout.split(vector), obs)
        ratio = jnp.exp(jnp.take_along_axis(now, actions[:, None], -1)[:, 0] - logp)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        surrogate = jnp.minimum(ratio * adv, jnp.clip(ratio, 1 - config.clip, 1 + config.clip) * adv)
        entropy = -(jnp.exp(now) * now).sum(-1).mean()
        error = ((value - returns) ** 2).mean()
        return -surrogate.mean() + config.value_coef * error - config.entropy_coef * entropy

    keep = flat(valid)
    samples = (flat(obs), flat(actions), flat(logps), flat(advantages), flat(advantages) + flat(values))
    theta = layout.flatten(np, ppo.snapshot(0).arrays).astype(np.float64)
    m1, m2 = np.zeros_like(theta), np.zeros_like(theta)
    gradient = jax.jit(jax.grad(objective))
    for step, chosen in enumerate(ppo._order(iteration), start=1):
        rows = chosen[keep[chosen]]
        g = np.asarray(gradient(theta.astype(np.float32), *(array[rows] for array in samples)), np.float64)
        g *= min(1.0, config.max_grad_norm / np.linalg.norm(g))
        m1, m2 = 0.9 * m1 + 0.1 * g, 0.999 * m2 + 0.001 * g**2
        theta = theta - config.lr * (m1 / (1 - 0.9**step)) / (np.sqrt(m2 / (1 - 0.999**step)) + 1e-5)
    return theta


@pytest.mark.parametrize("grad_norm", [0.05, 100.0], ids=["gradients clipped", "not clipped"])
def test_compiled_update_is_the_plain_one(grad_norm: float) -> None:
    ppo = make_ppo(epochs=1, max_grad_norm=grad_norm, entropy_coef=0.01, gamma=0.9)
    results = make_results()
    behaviour = ppo.snapshot(0)
    expected = plain_update(ppo, results, behaviour, iteration=3)
    before = ppo.state()["theta"]
    metrics = ppo.update(3, results, behaviour)
    assert metrics["gradient_steps"] == 2
    assert (metrics["grad_norm"] > grad_norm) == (grad_norm < 1)
    assert np.abs(ppo.state()["theta"] - before).max() > 0.01
    np.testing.assert_allclose(ppo.state()["theta"], expected, atol=1e-5)


def test_behaviour_may_be_older_than_the_parameters(fresh: PPO) -> None:
    old = fresh.snapshot(0)
    first = fresh.update(0, make_results(0), old)
    second = fresh.update(1, make_results(1), old)
    assert 0 < first["kl"] < second["kl"], "the second begins away from the snapshot that acted"


def test_update_is_deterministic_and_changes_the_snapshot_only_by_version(fresh: PPO, beginning: Arrays) -> None:
    behaviour = fresh.snapshot(0)
    one = fresh.update(0, make_results(), behaviour)
    after = fresh.state()
    fresh.load(beginning)
    assert fresh.update(0, make_results(), behaviour) == one
    assert same(fresh.state(), after)
    assert same(behaviour.arrays, fresh.layout.split(beginning["theta"]))
    assert fresh.snapshot(9).version == 9
    assert same(fresh.snapshot(9).arrays, fresh.layout.split(after["theta"]))


def test_invalid_samples_have_no_influence(fresh: PPO, beginning: Arrays) -> None:
    clean = make_results()
    for name, rest in (("valid", False), ("truncated", True), ("terminated", False)):
        clean[1][1][name][1:, 1] = rest  # environment 1 of lane 1 is lost from step 1 on
    dirty = copied(clean)
    arrays = dirty[1][1]
    arrays["obs"][2:, 1] = 1e3
    arrays["last_obs"][1] = -1e3
    arrays["rewards"][1:, 1] = 1e6
    arrays["actions"][1:, 1] = 1 - arrays["actions"][1:, 1]
    behaviour = fresh.snapshot(0)
    fresh.update(0, clean, behaviour)
    expected = fresh.state()
    fresh.load(beginning)
    fresh.update(0, dirty, behaviour)
    assert same(fresh.state(), expected)


@pytest.mark.parametrize("what", ["final_obs", "terminated", "rewards"])
def test_what_must_have_an_influence_has(fresh: PPO, beginning: Arrays, what: str) -> None:
    behaviour = fresh.snapshot(0)
    fresh.update(0, make_results(), behaviour)
    before = fresh.state()
    fresh.load(beginning)
    changed = make_results()
    if what == "terminated":
        changed[0][1]["terminated"][0, 0] = True
    else:
        changed[0][1][what] += 1
    fresh.update(0, changed, behaviour)
    assert not same(fresh.state(), before)


@pytest.mark.parametrize(
    "action", [ActionSpec("discrete", (4,), masked=True), ActionSpec("box", (2,))], ids=lambda a: a.kind
)
def test_other_actions_and_a_shared_trunk(action: ActionSpec) -> None:
    spec = PolicySpec(ObsSpec((OBS,)), action, NetworkConfig(sizes=(5,), shared=True), normalized=False)
    ppo = PPO(PPOConfig(**SMALL), Policy(spec), LANES, ENVS, 1, 4)
    results = make_results()
    rng = np.random.default_rng(0)
    for _, arrays in results:
        if action.masked:
            arrays["mask"] = rng.random((STEPS, ENVS, 4)) < 0.5
            np.put_along_axis(arrays["mask"], arrays["actions"][..., None], True, -1)
        else:
            arrays["actions"] = rng.normal(size=(STEPS, ENVS, 2)).astype(np.float32)
    before = ppo.state()["theta"]
    metrics = ppo.update(0, results, ppo.snapshot(0))
    assert np.isfinite(list(metrics.values())).all()
    assert not np.array_equal(ppo.state()["theta"], before)


# -- tempo and schedules ----------------------------------------------------------------------------------


def test_target_kl_ends_the_epochs_early() -> None:
    ppo = make_ppo(target_kl=1e-4, epochs=6, lr=0.05)
    start = ppo.state()["theta"]
    steps = ppo.update(0, make_results(), ppo.snapshot(0))["gradient_steps"]
    assert 1 <= steps < 12
    # Adam moves each parameter by at most about lr per step, and the step that went too far is taken back.
    assert 0 < np.abs(ppo.state()["theta"] - start).max() <= 0.05 * (steps - 1) * 1.5


def test_a_generous_target_kl_changes_nothing(fresh: PPO) -> None:
    patient = make_ppo(target_kl=1e9)
    results, behaviour = make_results(), fresh.snapshot(0)
    assert patient.update(0, results, behaviour)["gradient_steps"] == 4
    fresh.update(0, results, behaviour)
    np.testing.assert_allclose(patient.state()["theta"], fresh.state()["theta"], atol=1e-6)


def test_linear_schedules_fall_evenly_and_waste_no_update() -> None:
    ppo = make_ppo(lr_schedule="linear", clip_schedule="linear", lr=0.08, clip=0.4)
    behaviour = ppo.snapshot(0)
    metrics = [ppo.update(i, make_results(i), behaviour) for i in range(4)]
    assert [m["lr"] for m in metrics] == pytest.approx([0.08, 0.06, 0.04, 0.02])
    assert [m["clip"] for m in metrics] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_constant_schedules_stay(fresh: PPO) -> None:
    metrics = [fresh.update(i, make_results(), fresh.snapshot(i)) for i in (0, 3)]
    assert [(m["lr"], m["clip"]) for m in metrics] == [(0.01, 0.2)] * 2


def test_every_epoch_takes_every_sample_once(fresh: PPO) -> None:
    order = fresh._order(0)
    assert order.shape == (4, SIZE // 2)
    for epoch in order.reshape(2, SIZE):
        assert sorted(epoch.tolist()) == list(range(SIZE))
    assert not np.array_equal(order[:2], order[2:])
    np.testing.assert_array_equal(order, fresh._order(0))
    assert not np.array_equal(order, fresh._order(1))


def test_tasks_cover_every_lane(fresh: PPO) -> None:
    assert fresh.tasks(5, 4) == [(Collect(0, 5, 4, STEPS, 0), {}), (Collect(1, 5, 4, STEPS, 0), {})]
    assert fresh.steps_per_iteration == SIZE


# -- updates that cannot be trusted -----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["rewards", "obs"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_non_finite_data_is_named_and_changes_nothing(fresh: PPO, beginning: Arrays, what: str, number: float) -> None:
    behaviour = fresh.snapshot(0)
    bad = make_results()
    bad[1][1][what][2, 1] = number
    with pytest.raises(NonFinite, match=f"{what} of lane 1, environment 1"):
        fresh.update(0, bad, behaviour)
    assert same(fresh.state(), beginning)
    assert np.isfinite(list(fresh.update(0, make_results(), behaviour).values())).all()


def test_a_non_finite_final_observation_is_named(fresh: PPO, beginning: Arrays) -> None:
    bad = make_results()
    bad[1][1]["final_obs"][:] = np.nan
    with pytest.raises(NonFinite, match="final_values of lane 1, environment 0"):
        fresh.update(0, bad, fresh.snapshot(0))
    assert same(fresh.state(), beginning)


def test_a_non_finite_parameter_is_named(fresh: PPO) -> None:
    behaviour = fresh.snapshot(0)
    behaviour.arrays["vf/out/b"] = np.array([np.nan], np.float32)
    with pytest.raises(NonFinite, match="parameter vf/out/b"):
        fresh.update(0, make_results(), behaviour)


def test_a_loss_beyond_all_numbers_says_what_may_help(fresh: PPO, beginning: Arrays) -> None:
    huge = make_results()
    huge[0][1]["rewards"][:] = 3e38
    with pytest.raises(NonFinite, match=r"lane \d, environment \d.*normalize_reward"):
        fresh.update(0, huge, fresh.snapshot(0))
    assert same(fresh.state(), beginning)


# -- statistics and state ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def normalizing() -> PPO:
    return make_ppo(normalize_obs=True, normalize_reward=True)


@pytest.fixture
def with_statistics(normalizing: PPO) -> PPO:
    normalizing.load(make_ppo(normalize_obs=True, normalize_reward=True).state())
    return normalizing


def test_observation_statistics_come_from_valid_steps_in_lane_order(with_statistics: PPO) -> None:
    ppo = with_statistics
    behaviour = ppo.snapshot(0)
    np.testing.assert_array_equal(behaviour.arrays["stats/mean"], np.zeros(OBS))
    np.testing.assert_array_equal(behaviour.arrays["stats/scale"], np.ones(OBS))
    results = make_results()
    ppo.update(0, results, behaviour)
    moments = Moments((OBS,))
    for _, arrays in results:
        rows = [arrays["obs"][t, e] for t in range(STEPS) for e in range(ENVS) if arrays["valid"][t, e]]
        moments.merge(np.array(rows))
    assert moments.count == SIZE - 1
    state = ppo.state()
    assert all(np.array_equal(state[name], array) for name, array in moments.state("obs").items())
    stats = ppo.snapshot(1).arrays
    np.testing.assert_array_equal(stats["stats/mean"], moments.mean.astype(np.float32))
    np.testing.assert_array_equal(stats["stats/scale"], (1 / moments.std).astype(np.float32))


def test_rewards_are_scaled_as_the_running_return_says(with_statistics: PPO) -> None:
    results = make_results()
    with_statistics.update(0, results, with_statistics.snapshot(0))
    rewards, terminated, truncated = (
        np.concatenate([arrays[name] for _, arrays in results], 1) for name in ("rewards", "terminated", "truncated")
    )
    scale = RewardScale(0.99, LANES * ENVS)
    scale.scale(rewards, terminated | truncated)
    state = with_statistics.state()
    assert all(np.array_equal(state[name], array) for name, array in scale.state().items())
    with_statistics.restart()
    np.testing.assert_array_equal(with_statistics.state()["reward/discounted"], np.zeros(LANES * ENVS))


def test_a_refused_update_leaves_the_statistics_alone(with_statistics: PPO) -> None:
    before = with_statistics.state()
    bad = make_results()
    bad[1][1]["rewards"][2, 1] = np.nan
    with pytest.raises(NonFinite, match="rewards of lane 1, environment 1"):
        with_statistics.update(0, bad, with_statistics.snapshot(0))
    assert same(with_statistics.state(), before)


def test_a_loaded_state_goes_on_identically(with_statistics: PPO) -> None:
    def iterate(ppo: PPO, iterations: range) -> list[dict[str, float]]:
        return [ppo.update(i, make_results(i), ppo.snapshot(i)) for i in iterations]

    one = with_statistics
    iterate(one, range(2))
    saved = {name: array.copy() for name, array in one.state().items()}
    for array in saved.values():
        array.flags.writeable = False
    other = make_ppo(normalize_obs=True, normalize_reward=True, seed=7)
    other.load(saved)
    assert same(other.state(), saved)
    assert same(other.snapshot(2).arrays, one.snapshot(2).arrays)
    assert iterate(one, range(2, 4)) == iterate(other, range(2, 4))
    assert same(one.state(), other.state())
    assert not same(one.state(), saved)


# -- memory -----------------------------------------------------------------------------------------------


def recurrent_results(algorithm: PPO, snapshot: Snapshot) -> list[tuple[Result, Arrays]]:
    """What two lanes would send, acting with the snapshot."""
    policy, rng = algorithm.policy, np.random.default_rng(5)
    play, results = policy.player(snapshot.arrays), []
    for lane in range(2):
        obs = rng.normal(size=(9, 2, OBS)).astype(np.float32)
        done = rng.random((8, 2)) < 0.3
        state = first = rng.normal(size=(2, policy.state_size)).astype(np.float32)
        actions = np.zeros((8, 2), np.int32)
        finals, final_states, index = [], [], []
        for t in range(8):
            actions[t], state = play(obs[t], policy.distribution.noise(rng, 2), None, state)
            for i in np.flatnonzero(done[t]):
                finals.append(rng.normal(size=OBS))
                final_states.append(state[i].copy())
                index.append((t, i))
                state[i] = 0
        arrays = {
            "obs": obs[:-1],
            "last_obs": obs[-1],
            "actions": actions,
            "rewards": rng.normal(size=(8, 2)).astype(np.float32),
            "terminated": np.zeros((8, 2), bool),
            "truncated": done,
            "valid": np.ones((8, 2), bool),
            "final_obs": np.array(finals, np.float32).reshape(-1, OBS),
            "final_index": np.array(index, np.int32).reshape(-1, 2),
            "state": first,
            "last_state": state,
            "final_state": np.array(final_states, np.float32).reshape(-1, policy.state_size),
        }
        results.append((Result(lane, 0, 16, [], [], 0.0, lane), arrays))
    return results


@pytest.mark.parametrize("kind", ["elman", "lstm"])
def test_with_memory_the_first_gradient_step_sees_what_was_acted(kind: str) -> None:
    config = PPOConfig(rollout_steps=8, segment=4, minibatch=32, epochs=1, normalize_obs=True)
    network = NetworkConfig(kind=kind, sizes=(5,))
    algorithm = config.build(Policy(config.policy(ObsSpec((OBS,)), DISCRETE, True, network)), 2, 2, 0, 1000)
    snapshot = algorithm.snapshot(0)
    metrics = algorithm.update(0, recurrent_results(algorithm, snapshot), snapshot)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert metrics["gradient_steps"] == 1


def test_with_memory_segments_make_the_same_gradient_as_whole_columns() -> None:
    """Of one gradient step, all but the reach back beyond a segment's beginning: none at segments of one chunk."""
    after = {}
    for segment in (4, 8):
        config = PPOConfig(rollout_steps=8, segment=segment, minibatch=32, epochs=1, normalize_advantages=False)
        network = NetworkConfig(kind="lstm", sizes=(5,))
        algorithm = config.build(Policy(config.policy(ObsSpec((OBS,)), DISCRETE, True, network)), 2, 2, 0, 1000)
        snapshot = algorithm.snapshot(0)
        metrics = algorithm.update(0, recurrent_results(algorithm, snapshot), snapshot)
        after[segment] = (metrics["policy_loss"], metrics["value_loss"], metrics["entropy"])
    np.testing.assert_allclose(after[4], after[8], rtol=1e-5, atol=1e-6)


def test_segments_must_divide_what_they_are_cut_from() -> None:
    config, network = PPOConfig(rollout_steps=10, segment=4, minibatch=8), NetworkConfig(kind="lstm")
    texts = [text for _, text in config.faults(network, 1, 4, 1000)]
    assert any("algorithm.segment = 4" in text and "algorithm.segment=2" in text for text in texts)
    assert not any("segment" in text for _, text in config.faults(NetworkConfig(), 1, 4, 1000))
