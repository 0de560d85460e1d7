"""SAC: its values, targets and steps by hand, its state to the bit, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from scipy import integrate, stats

from regatta.algorithms.sac import (
    METRICS,
    SAC,
    Critics,
    Learned,
    SACConfig,
    begin,
    compile_updates,
    critic_loss,
    soft_value,
    target_entropy,
)
from regatta.errors import ConfigError, NonFinite
from regatta.policies.distributions import ActionSpec
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.policy import Policy
from regatta.types import Arrays, Collect, Result

BOX = ActionSpec("box", (1,))
THREE = ActionSpec("discrete", (3,))
ONE = ObsSpec((1,))
LINEAR = NetworkConfig(kind="linear")
HALF_LOG_2PI = 0.9189385332

Results = list[tuple[Result, Arrays]]


def make_policy(config: SACConfig, action: ActionSpec, obs: ObsSpec = ONE, net: Any = LINEAR) -> Policy:
    return Policy(config.policy(obs, action, True, net))


def float32(**arrays: Any) -> Arrays:
    return {name.replace("__", "/"): np.array(array, np.float32) for name, array in arrays.items()}


# -- values by hand -----------------------------------------------------------------------------------------

# Mean 0 and deviation 1 whatever is seen; Q1 = 2 obs + 3 a + 1, Q2 = 4 obs - a.
HAND_ACTOR = float32(pi__out__w=[[0, 0]], pi__out__b=[0, 0])
HAND_CRITICS = float32(q1__out__w=[[2], [3]], q1__out__b=[1], q2__out__w=[[4], [-1]], q2__out__b=[0])
# Logits 0, ln 2, ln 3 whatever is seen: probabilities 1/6, 2/6, 3/6. Q1 = (1, 2, 3) obs, Q2 = (3, 2, 1) obs.
DISCRETE_ACTOR = float32(pi__out__w=[[0, 0, 0]], pi__out__b=np.log([1, 2, 3]))
DISCRETE_CRITICS = float32(q1__out__w=[[1, 2, 3]], q1__out__b=[0, 0, 0], q2__out__w=[[3, 2, 1]], q2__out__b=[0, 0, 0])


def values(action: ActionSpec, obs: Any, noise: Any, mask: Any = None, alpha: float = 0.5) -> tuple[Any, Any]:
    policy = make_policy(SACConfig(), action)
    box = action.kind == "box"
    arrays = (HAND_ACTOR, HAND_CRITICS) if box else (DISCRETE_ACTOR, DISCRETE_CRITICS)
    seen = np.array(obs, np.float32)[:, None]
    drawn = np.array(noise, np.float32)[:, None] if box else None
    return soft_value(np, policy, Critics(policy.spec), *arrays, alpha, seen, drawn, mask)


def test_the_value_is_the_smaller_critics_with_the_entropy() -> None:
    value, entropy = values(BOX, [1.0, 0.0], [0.0, 0.0])
    # Action 0, where the squashing has slope 1: log pi = -ln(2 pi) / 2. Q = (3, 4), then (1, 0).
    assert entropy == pytest.approx([HALF_LOG_2PI] * 2)
    assert value == pytest.approx([3 + 0.5 * HALF_LOG_2PI, 0.5 * HALF_LOG_2PI])


def test_the_value_of_a_drawn_action() -> None:
    value, entropy = values(BOX, [1.0], [1.0])
    # tanh 1 = 0.7615942, slope 1 - 0.7615942^2 = 0.4199743: log pi = -1/2 - ln(2 pi) / 2 - ln 0.4199743
    assert entropy == pytest.approx([0.5 + HALF_LOG_2PI - 0.8675617], abs=1e-6)
    # Q1 = 2 + 3 * 0.7615942 + 1 = 5.2847825, Q2 = 4 - 0.7615942 = 3.2384058
    assert value == pytest.approx([3.2384058 + 0.5 * 0.5513769], abs=1e-5)


def test_squashed_probabilities_against_scipy() -> None:
    policy = make_policy(SACConfig(), BOX)
    mean, log_std = 0.4, -0.3
    squashed: Any = policy.distribution
    out = (np.array([mean]), np.array([log_std]))

    def density(action: float) -> float:
        exact = stats.norm.pdf(np.arctanh(action), mean, np.exp(log_std)) / (1 - action**2)
        noise = np.array([(np.arctanh(action) - mean) / np.exp(log_std)])
        drawn, logp = squashed.sample_and_log_prob(np, out, noise)
        assert drawn == pytest.approx(action)
        assert np.exp(logp) == pytest.approx(exact)
        return float(exact)

    total, _ = integrate.quad(density, -1, 1)
    assert total == pytest.approx(1.0, abs=1e-6)


def test_the_mean_entropy_of_drawn_actions_is_the_squashed_gaussians() -> None:
    noise = np.random.default_rng(0).standard_normal(200_000)
    _, entropy = values(BOX, np.zeros_like(noise), noise)
    # Of tanh(u), u standard normal: the Gaussian's 1.4189385 plus E[ln(1 - tanh(u)^2)].
    shrinking, _ = integrate.quad(lambda u: stats.norm.pdf(u) * -2 * np.log(np.cosh(u)), -12, 12)
    assert entropy.mean() == pytest.approx(1.4189385 + shrinking, abs=0.01)


def test_discrete_values_are_expectations() -> None:
    value, entropy = values(THREE, [2.0], None)
    # Smaller values (2, 4, 2) with probabilities 1/6, 2/6, 3/6: 16/6. Entropy ln 6 - (2 ln 2 + 3 ln 3) / 6.
    assert entropy == pytest.approx([1.0114043], abs=1e-6)
    assert value == pytest.approx([16 / 6 + 0.5 * 1.0114043], abs=1e-6)


def test_illegal_actions_count_for_nothing() -> None:
    value, entropy = values(THREE, [2.0], None, np.array([[True, True, False]]))
    # 1/3 and 2/3 of the values 2 and 4: 10/3. Entropy ln 3 - (2 ln 2) / 3.
    assert entropy == pytest.approx([0.6365142], abs=1e-6)
    assert value == pytest.approx([10 / 3 + 0.5 * 0.6365142], abs=1e-6)


def test_critic_loss() -> None:
    critics = Critics(make_policy(SACConfig(), BOX).spec)
    batch = float32(obs=[[1], [0]], actions=[[0.5], [-0.5]])
    # Q1 = 4.5, -0.5; Q2 = 3.5, 0.5. Half the mean squares from (4, 0): (0.25 + 0.25) / 4, twice.
    loss, q_mean = critic_loss(np, critics, HAND_CRITICS, batch, np.array([4.0, 0.0]))
    assert loss == pytest.approx(0.25)
    assert q_mean == pytest.approx(2.0)


def test_critic_loss_of_the_discrete_action_that_was_taken() -> None:
    critics = Critics(make_policy(SACConfig(), THREE).spec)
    batch = float32(obs=[[1], [2]]) | {"actions": np.array([2, 0])}
    # Q1 = 3, 2; Q2 = 1, 6. From (3, 2): 0 and (4 + 16) / 4.
    loss, q_mean = critic_loss(np, critics, DISCRETE_CRITICS, batch, np.array([3.0, 2.0]))
    assert loss == pytest.approx(5.0)
    assert q_mean == pytest.approx(2.5)


def test_target_entropy() -> None:
    assert target_entropy(np, ActionSpec("box", (6,)), None, None) == -6
    assert target_entropy(np, BOX, -0.25, None) == -0.25
    assert target_entropy(np, THREE, None, None) == pytest.approx(0.98 * np.log(3))
    mask = np.array([[True, True, False], [False, True, False]])
    assert target_entropy(np, THREE, None, mask) == pytest.approx([0.98 * np.log(2), 0])


# -- one compiled update --------------------------------------------------------------------------------------

HAND = {"lr": 1e-3, "critic_lr": 1e-2, "alpha_lr": 0.1, "alpha": 0.5, "gamma": 0.9, "tau": 0.1, "target_entropy": 0.5}


class Once:
    """One update on two transitions, the second of which terminates: what was, what came out, and the report."""

    def __init__(self, **knobs: Any) -> None:
        self.config = SACConfig(**(HAND | knobs))
        policy = make_policy(self.config, BOX)
        critics = Critics(policy.spec)
        self._compiled = compile_updates(policy, critics, self.config)
        self.before = begin(policy, critics, self.config, 0)._replace(
            actor=HAND_ACTOR, critics=HAND_CRITICS, targets={name: 2 * a for name, a in HAND_CRITICS.items()}
        )
        self.after, self.report = self.update(self.before)

    def update(self, learned: Learned) -> tuple[Learned, dict[str, float]]:
        batches: dict[str, Any] = float32(
            obs=[[[1], [0]]],
            next_obs=[[[1], [1]]],
            actions=[[[0.5], [-0.5]]],
            rewards=[[1, -1]],
            noise=np.zeros((1, 2, 1)),
            next_noise=np.zeros((1, 2, 1)),
        )
        batches |= {"terminated": np.array([[False, True]]), "mask": None, "next_mask": None}
        after, report, finite = self._compiled(learned, {}, batches)
        assert finite
        return jax.tree.map(np.asarray, after), dict(zip(METRICS, np.asarray(report).tolist(), strict=True))


@pytest.fixture(scope="module")
def once() -> Once:
    return Once()


@pytest.fixture(scope="module")
def other() -> Once:
    """With a fixed temperature, and no future."""
    return Once(alpha_lr=0, gamma=1e-9)


def test_the_target_bootstraps_from_target_critics_unless_terminated(once: Once) -> None:
    # Doubled targets give min(6, 8) at the next observation: 1 + 0.9 (6 + 0.5 * 0.9189385) = 6.8135223. Terminated: -1.
    # Q1 = 4.5, -0.5, Q2 = 3.5, 0.5; errors 2.3135223, -0.5, 3.3135223, -1.5; squares over 4:
    assert once.report["critic_loss"] == pytest.approx((5.3523856 + 0.25 + 10.9794302 + 2.25) / 4, abs=1e-4)
    assert once.report["alpha"] == pytest.approx(0.5)
    assert once.report["entropy"] == pytest.approx(HALF_LOG_2PI)
    assert once.report["q_mean"] == pytest.approx(2.0)


def test_without_a_future_only_rewards_count(other: Once) -> None:
    # From (1, -1): 3.5, 0.5, 2.5, 1.5.
    assert other.report["critic_loss"] == pytest.approx((12.25 + 0.25 + 6.25 + 2.25) / 4, abs=1e-5)


def test_gradients_by_hand(other: Once) -> None:
    # Errors 3.5, 0.5 and 2.5, 1.5, halved, times obs 1, 0, action 0.5, -0.5 and 1:
    # Q1 (1.75, 0.75, 2), Q2 (1.25, 0.25, 2); the squares sum to 7.625 + 5.625.
    assert other.report["critic_grad_norm"] == pytest.approx(13.25**0.5)


def test_adams_first_step_is_the_learning_rate_long(once: Once) -> None:
    # Q1's mean error, 2.31 too low and 0.5 too high, is negative: its bias rises. Q2's too.
    for name in ("q1/out/b", "q2/out/b"):
        assert once.after.critics[name] - once.before.critics[name] == pytest.approx(1e-2, rel=1e-3)
    moved = np.abs(once.after.actor["pi/out/b"] - once.before.actor["pi/out/b"])
    assert moved == pytest.approx([1e-3, 1e-3], rel=1e-3)


def test_targets_follow_slowly(once: Once) -> None:
    for name, target in once.after.targets.items():
        assert target == pytest.approx(0.9 * once.before.targets[name] + 0.1 * once.after.critics[name], abs=1e-6)


def test_targets_begin_at_the_critics() -> None:
    config = SACConfig()
    policy = make_policy(config, BOX)
    learned = begin(policy, Critics(policy.spec), config, 3)
    assert all(np.array_equal(learned.targets[name], array) for name, array in learned.critics.items())


def test_the_temperature_falls_while_there_is_entropy_enough(once: Once) -> None:
    # The entropy is 0.919, the target 0.5.
    assert once.after.log_alpha - once.before.log_alpha == pytest.approx(-0.1, rel=1e-3)


def test_the_temperature_rises_while_there_is_not(once: Once) -> None:
    narrow = once.before._replace(actor=float32(pi__out__w=[[0, 0]], pi__out__b=[0, -1]))
    after, report = once.update(narrow)
    assert report["entropy"] == pytest.approx(HALF_LOG_2PI - 1)
    assert after.log_alpha - once.before.log_alpha == pytest.approx(0.1, rel=1e-3)


def test_a_fixed_temperature_stays(other: Once) -> None:
    assert other.after.log_alpha == other.before.log_alpha


def test_the_actor_climbs_the_smaller_critic(once: Once) -> None:
    # At observation 1 that is Q1, which rises with the action; at 0 it is Q2, which falls, but a third as fast.
    after, _ = once.update(once.before._replace(log_alpha=np.float32(-20)))
    assert after.actor["pi/out/b"][0] > 0


# -- the run ------------------------------------------------------------------------------------------------

LANES, ENVS, STEPS, OBS = 2, 2, 4, 3
SMALL = {"rollout_steps": STEPS, "batch": 8, "replay_size": 200, "learning_starts": 20, "lr": 0.01}
MASKED = ActionSpec("discrete", (3,), masked=True)


def make_sac(action: ActionSpec = BOX, seed: int = 7, net: NetworkConfig | None = None, **knobs: Any) -> SAC:
    config = SACConfig(**(SMALL | knobs))
    policy = make_policy(config, action, ObsSpec((OBS,)), net or NetworkConfig(sizes=(5,)))
    return config.build(policy, LANES, ENVS, seed, 1000)


def make_results(iteration: int, action: ActionSpec = BOX) -> Results:
    """Two lanes with a termination, a time limit and, in lane 1, an environment that failed at step 1."""
    rng = np.random.default_rng(iteration)
    results = []
    for lane in range(LANES):
        discrete = action.kind == "discrete"
        arrays = {
            "obs": rng.normal(size=(STEPS, ENVS, OBS)).astype(np.float32) + 1,
            "last_obs": rng.normal(size=(ENVS, OBS)).astype(np.float32),
            "actions": rng.integers(0, 3, (STEPS, ENVS), dtype=np.int32)
            if discrete
            else rng.uniform(-1, 1, (STEPS, ENVS, 1)).astype(np.float32),
            "rewards": rng.normal(size=(STEPS, ENVS)).astype(np.float32),
            "terminated": np.zeros((STEPS, ENVS), bool),
            "truncated": np.zeros((STEPS, ENVS), bool),
            "valid": np.ones((STEPS, ENVS), bool),
            "final_obs": rng.normal(size=(1, OBS)).astype(np.float32),
            "final_index": np.array([[2, 0]], np.int32),
        }
        arrays["truncated"][2, 0] = True
        arrays["terminated"][1, 1] = lane == 0
        if lane == 1:
            arrays["valid"][1, 1] = False
            arrays["truncated"][1, 1] = True
        if action.masked:
            arrays["mask"] = np.ones((STEPS, ENVS, 3), bool)
            arrays["mask"][..., 0] = arrays["actions"] == 0
        results.append((Result(lane, iteration, STEPS * ENVS, [], [], 0.0, lane), arrays))
    return results


def run(sac: SAC, iterations: range, action: ActionSpec = BOX) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for iteration in iterations:
        metrics = sac.update(iteration, make_results(iteration, action), sac.snapshot(iteration))
    return metrics


def whole_state(sac: SAC) -> Arrays:
    """As a checkpoint gives it back: the state, and each block's arrays under the block's name."""
    arrays = dict(sac.state())
    for block, inside in sac.blocks().items():
        arrays |= {f"{block}/{name}": np.array(array) for name, array in inside.items()}
    return arrays


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


@pytest.fixture(scope="module")
def plain() -> SAC:
    """Compiled once; `sac` puts it back to where it began."""
    return make_sac()


@pytest.fixture(scope="module")
def beginning(plain: SAC) -> Arrays:
    return whole_state(plain)


@pytest.fixture
def sac(plain: SAC, beginning: Arrays) -> SAC:
    plain.load(beginning)
    return plain


def test_tasks_and_steps(sac: SAC) -> None:
    assert sac.total_steps == 992  # 62 whole iterations of 2 lanes x 2 environments x 4 steps
    assert [task for task, _ in sac.tasks(3, 2)] == [Collect(0, 3, 2, STEPS, 0), Collect(1, 3, 2, STEPS, 0)]


def test_nothing_is_learnt_before_learning_starts(sac: SAC) -> None:
    before = sac.state()["learned/0"]
    assert run(sac, range(1)) == {"updates": 0.0, "updates_per_step": 0.0, "replay_size": 15.0}
    assert np.array_equal(sac.state()["learned/0"], before)
    metrics = run(sac, range(1, 2))
    assert metrics.keys() == {*METRICS, "updates", "updates_per_step", "replay_size"}
    assert (metrics["updates"], metrics["updates_per_step"], metrics["replay_size"]) == (16.0, 1.0, 30.0)


@pytest.mark.parametrize(("ratio", "updates"), [(0.5, 8), (0, 0), (2, 32)])
def test_updates_per_step(ratio: float, updates: int) -> None:
    sac = make_sac(updates_per_step=ratio, learning_starts=0)
    assert run(sac, range(1))["updates"] == updates


def test_freely_one_call_serves_however_many_results_came() -> None:
    sac = make_sac(staleness="free", learning_starts=0)
    results = make_results(0)
    metrics = sac.update(0, [*results, *make_results(1)], sac.snapshot(0))
    assert (metrics["updates"], metrics["updates_per_step"]) == (8.0, 0.25)
    metrics = sac.update(1, results[1:], sac.snapshot(1))  # lane 1 alone
    assert (metrics["updates"], metrics["updates_per_step"]) == (16.0, 1.0)


def test_a_time_limit_bootstraps_from_the_final_observation() -> None:
    """One transition, cut: what counts after it is the final observation, not the next episode's first."""
    config = SACConfig(rollout_steps=1, batch=1, learning_starts=0, gamma=0.5, alpha=1e-6, lr=1e-9, alpha_lr=0)
    sac = config.build(make_policy(config, BOX), 1, 1, 0, 10)
    zeros = jax.tree.map(lambda a: np.zeros_like(a), sac._learned.critics)
    values = zeros | float32(q1__out__w=[[1], [0]], q2__out__w=[[1], [0]])
    sac._learned = sac._learned._replace(critics=values, targets=values, actor=HAND_ACTOR)
    arrays = float32(obs=[[[2]]], last_obs=[[100]], actions=[[[0]]], rewards=[[3]], final_obs=[[8]])
    arrays |= {name: np.zeros((1, 1), bool) for name in ("terminated", "truncated")}
    arrays |= {"valid": np.ones((1, 1), bool), "final_index": np.array([[0, 0]], np.int32)}
    arrays["truncated"][0, 0] = True
    metrics = sac.update(0, [(Result(0, 0, 1, [], [], 0.0, 0), arrays)], sac.snapshot(0))
    # Target 3 + 0.5 * 8 = 7; both critics say 2: half of 25, twice.
    assert metrics["critic_loss"] == pytest.approx(25.0, abs=1e-3)


@pytest.mark.parametrize("action", [BOX, MASKED])
def test_a_loaded_run_goes_on_to_the_bit(action: ActionSpec) -> None:
    knobs: dict[str, Any] = {"normalize_obs": True}
    whole = make_sac(action, **knobs)
    run(whole, range(5), action)
    saved = whole_state(whole)
    resumed = make_sac(action, seed=7, **knobs)
    resumed.load(saved)
    assert same(whole_state(resumed), saved)
    assert run(whole, range(5, 20), action) == run(resumed, range(5, 20), action)
    assert same(whole_state(whole), whole_state(resumed))
    assert whole.blocks().keys()  # the replay memory went round, so some of it is in blocks


def test_the_seed_decides(sac: SAC) -> None:
    states = []
    for one in (sac, make_sac(seed=7), make_sac(seed=8)):
        run(one, range(3))
        states.append(one.snapshot(3).arrays)
    assert same(states[0], states[1])
    assert not same(states[0], states[2])


def test_statistics_of_all_that_was_seen_are_in_the_snapshot() -> None:
    sac = make_sac(normalize_obs=True)
    run(sac, range(3))
    seen = np.concatenate([arrays["obs"][arrays["valid"]] for i in range(3) for _, arrays in make_results(i)])
    arrays = sac.snapshot(3).arrays
    assert arrays["stats/mean"] == pytest.approx(seen.mean(0), abs=1e-5)
    assert arrays["stats/scale"] == pytest.approx(1 / seen.std(0), rel=1e-4)


@pytest.mark.parametrize("name", ["obs", "rewards", "actions", "last_obs", "final_obs"])
def test_what_is_not_finite_is_not_kept(sac: SAC, name: str) -> None:
    run(sac, range(2))
    before = whole_state(sac)
    results = make_results(2)
    bad = results[1][1][name]
    bad[(0, *(0,) * (bad.ndim - 1))] = np.nan
    with pytest.raises(NonFinite, match=f"{name} of lane 1, environment 0 is not finite"):
        sac.update(2, results, sac.snapshot(2))
    assert same(whole_state(sac), before)


def test_an_update_that_is_not_finite_is_rejected_as_a_whole(sac: SAC) -> None:
    run(sac, range(2))
    before = sac.state()
    results = make_results(2)
    results[0][1]["rewards"][:] = 1e30
    with pytest.raises(NonFinite, match=r"critic_loss is not finite any more; the largest reward was 1e\+30"):
        sac.update(2, results, sac.snapshot(2))
    after = sac.state()
    assert same(*({n: a for n, a in state.items() if n.startswith("learned/")} for state in (before, after)))


def test_images_pass_one_encoder_for_both_critics_and_one_for_the_actor() -> None:
    config = SACConfig(rollout_steps=2, batch=4, learning_starts=0, replay_size=50)
    net = NetworkConfig(kind="cnn", sizes=(16,), activation="relu")
    policy = Policy(config.policy(ObsSpec((36, 36, 2), "uint8"), ActionSpec("box", (2,)), True, net))
    sac = config.build(policy, 1, 1, 0, 100)
    before = jax.tree.map(np.array, sac._learned)
    encoders = {name for name in before.critics if "conv" in name}
    assert encoders == {f"encoder/conv{i}/{part}" for i in range(3) for part in "wb"}
    assert before.critics["q1/0/w"].shape == (18, 16)  # features and action
    rng = np.random.default_rng(0)
    arrays = {
        "obs": rng.integers(0, 256, (2, 1, 36, 36, 2), dtype=np.uint8),
        "last_obs": rng.integers(0, 256, (1, 36, 36, 2), dtype=np.uint8),
        "actions": rng.uniform(-1, 1, (2, 1, 2)).astype(np.float32),
        "rewards": np.ones((2, 1), np.float32),
        "terminated": np.zeros((2, 1), bool),
        "truncated": np.zeros((2, 1), bool),
        "valid": np.ones((2, 1), bool),
        "final_obs": np.zeros((0, 36, 36, 2), np.uint8),
        "final_index": np.zeros((0, 2), np.int32),
    }
    metrics = sac.update(0, [(Result(0, 0, 2, [], [], 0.0, 0), arrays)], sac.snapshot(0))
    assert metrics["updates"] == 2
    for old, new in ((before.critics, sac._learned.critics), (before.actor, sac._learned.actor)):
        assert all(not np.array_equal(array, new[name]) for name, array in old.items() if name.endswith("conv0/w"))


@pytest.mark.parametrize("action", [BOX, MASKED])
def test_it_learns_which_action_pays(action: ActionSpec) -> None:
    """Every episode is one step: action 0.5 pays most, or action 1 of those that are legal."""
    knobs = {"lr": 0.01, "batch": 64, "alpha": 0.01, "alpha_lr": 0, "learning_starts": 0, "replay_size": 2000}
    sac = make_sac(action, net=NetworkConfig(sizes=(16,)), **knobs)
    for iteration in range(40):
        results = make_results(iteration, action)
        for _, arrays in results:
            taken = arrays["actions"]
            arrays["rewards"] = (taken == 1) * 1.0 if action.kind == "discrete" else -((taken[..., 0] - 0.5) ** 2)
            arrays["rewards"] = arrays["rewards"].astype(np.float32)
            arrays["terminated"][:], arrays["truncated"][:], arrays["valid"][:] = True, False, True
        sac.update(iteration, results, sac.snapshot(iteration))
    act = sac.policy.player(sac.snapshot(40).arrays)
    obs = np.random.default_rng(0).normal(size=(50, OBS)).astype(np.float32) + 1
    mask = None if action.kind == "box" else np.ones((50, 3), bool)
    chosen, _ = act(obs, None, mask, None)
    assert np.mean(chosen == 1) > 0.95 if action.kind == "discrete" else abs(chosen.mean() - 0.5) < 0.1


# -- what it refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "bounded", "net", "knobs", "said"),
    [
        (ActionSpec("multidiscrete", (2, 3)), True, {}, {}, "multidiscrete actions; ppo, trpo and es"),
        (ActionSpec("multibinary", (2,)), True, {}, {}, "multibinary actions; ppo, trpo and es"),
        (BOX, False, {}, {}, "infinite; ppo, trpo and es"),
        (BOX, True, {"kind": "lstm"}, {}, "network.kind = 'lstm': sac takes networks without memory"),
        (BOX, True, {"shared": True}, {}, "network.shared = true"),
        (THREE, False, {}, {"noise_colour": 1.0}, "algorithm.noise_colour = 1.0: the actions are discrete"),
    ],
)
def test_refusals(action: ActionSpec, bounded: bool, net: Any, knobs: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SACConfig(**knobs).policy(ObsSpec((3,)), action, bounded, NetworkConfig(**net))


def test_statistics_of_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="normalize_obs"):
        SACConfig(normalize_obs=True).policy(ObsSpec((36, 36, 1), "uint8"), BOX, True, NetworkConfig(kind="cnn"))


def test_a_memory_that_cannot_fit_is_refused() -> None:
    config = SACConfig(replay_size=10**12)
    with pytest.raises(ConfigError, match=r"needs \d+\.\d GB once it is full"):
        config.build(make_policy(config, BOX), 1, 1, 0, 10**13)


def test_a_short_run_needs_no_room_for_a_long_one() -> None:
    config = SACConfig(replay_size=10**8)
    assert config.build(make_policy(config, BOX, ObsSpec((10_000,))), 1, 1, 0, 1000).total_steps == 1000


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"updates_per_step": 0.3}, r"updates_per_step = 0.3: a lane's 8 steps .* make 2.4 gradient steps.* 0.25 is"),
        ({"learning_starts": 5000}, "algorithm.learning_starts = 5000: run.steps 5000 end before anything is learnt"),
        ({"replay_size": 3}, "algorithm.replay_size = 3: less than one transition for each of the 4 environments"),
        ({"rollout_steps": 5000}, "run.steps = 5000: too few"),
    ],
)
def test_faults(knobs: dict[str, Any], said: str) -> None:
    config = SACConfig(**(SMALL | knobs))
    (fault,) = config.faults(NetworkConfig(), LANES, ENVS, 5000)
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(fault[1])


def test_no_faults() -> None:
    assert not list(SACConfig(updates_per_step=0.1, rollout_steps=30).faults(NetworkConfig(), 1, 1, 50_000))
