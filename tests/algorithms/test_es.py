"""Evolution strategies: ranks, gradient and step by hand, states that go on exactly, and a slope that is climbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from regatta.algorithms.es import ES, Adam, ESConfig, centred_ranks
from regatta.algorithms.generation import shares
from regatta.errors import ConfigError, NonFinite
from regatta.policies import noise
from regatta.policies.distributions import ActionSpec
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.noise import noise_table
from regatta.policies.policy import Policy
from regatta.types import Array, Arrays, Result, Score

SEED = 7
Results = list[tuple[Result, Arrays]]


@pytest.fixture(autouse=True)
def _small_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(noise, "TABLE_LEAST", 2**16)
    noise_table.cache_clear()
    yield
    noise_table.cache_clear()


def make(lanes: int = 3, steps: int = 10_000, **knobs: Any) -> ES:
    config = ESConfig(**({"population": 12, "evaluate_episodes": 0} | knobs))
    spec = config.policy(ObsSpec((2,)), ActionSpec("box", (1,)), True, NetworkConfig(kind="linear"))
    return config.build(Policy(spec), lanes, 1, SEED, steps)


def theta(es: ES) -> Array:
    return np.array(es.layout.flatten(np, es.snapshot(0).arrays))


def member(es: ES, task: Score, number: int) -> Array:
    """A member's parameters from their definition."""
    if not task.sigma:
        return theta(es)
    table = noise_table(SEED, es.layout.size)
    offset = table.offsets(task.generation, 0, number // 2 + 1)[-1]
    return theta(es) + (1 - 2 * (number % 2)) * task.sigma * table.slice(offset)


def play(es: ES, iteration: int, score: Callable[[Array], float]) -> Results:
    """What workers would send if a member's score were a function of its parameters."""
    results = []
    for task, _ in es.tasks(iteration, iteration):
        assert isinstance(task, Score)
        numbers = range(task.first, task.first + task.count)
        scores = np.array([[score(member(es, task, number))] * task.episodes for number in numbers])
        arrays = {"scores": scores, "lengths": np.full(scores.shape, 3, np.int32)}
        if es.config.normalize_obs:
            arrays |= {
                "obs/count": np.array([float(arrays["lengths"].sum())]),
                "obs/mean": np.array([iteration, task.first / 10]),
                "obs/m2": np.array([1.0, 2.0]),
            }
        results.append((Result(0, iteration, int(arrays["lengths"].sum()), [], [], 0.0), arrays))
    return results


def learn(es: ES, iterations: range, score: Callable[[Array], float]) -> dict[str, float]:
    metrics = {}
    for iteration in iterations:
        metrics = es.update(iteration, play(es, iteration, score), es.snapshot(iteration))
    return metrics


def quadratic(vector: Array) -> float:
    return -float(((vector - np.array([1.0, -2.0, 0.5])) ** 2).sum())


# -- by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "ranks"),
    [
        ([3.0, 1.0, 2.0], [0.5, -0.5, 0.0]),
        ([10.0, -500.0], [0.5, -0.5]),
        ([1.0, 2.0, 2.0, 3.0], [-0.5, 0.0, 0.0, 0.5]),
        ([5.0, 5.0, 1.0, 5.0, 0.0], [0.25, 0.25, -0.25, 0.25, -0.5]),  # ranks 2, 3, 4 shared: 3 of 0 to 4
        ([500.0] * 4, [0.0] * 4),
    ],
)
def test_centred_ranks(scores: list[float], ranks: list[float]) -> None:
    np.testing.assert_allclose(centred_ranks(np.array(scores)), ranks, atol=1e-7)


def test_the_gradient_from_numbers_is_the_dense_one() -> None:
    es = make(population=12)
    scores = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8.0])
    task = es.tasks(4, 4)[0][0]
    assert isinstance(task, Score)
    unit = msgspec.structs.replace(task, sigma=1.0)
    signed = np.stack([member(es, unit, number) - theta(es) for number in range(12)])
    expected = centred_ranks(scores) @ signed / 12
    np.testing.assert_allclose(es.gradient(4, scores), expected, rtol=1e-4, atol=1e-6)


def test_adam_by_hand() -> None:
    """Gradients 2 and then -1: moments 0.2, 0.004 and then 0.08, 0.004996."""
    adam = Adam(1)
    np.testing.assert_allclose(adam.step(np.array([2.0], np.float32), 0.1), [-0.1], rtol=1e-6)
    mean, square = 0.08 / (1 - 0.9**2), 0.004996 / (1 - 0.999**2)
    np.testing.assert_allclose(adam.step(np.array([-1.0], np.float32), 0.1), [-0.1 * mean / square**0.5], rtol=1e-5)
    assert adam.mean.dtype == adam.square.dtype == np.float32


def test_one_update_by_hand() -> None:
    """Adam's first step is the rate times the sign of ascent, here with the decay turned the other way."""
    es = make(lr=0.1, weight_decay=0.0)
    before = theta(es)
    results = play(es, 0, quadratic)
    gradient = es.gradient(0, np.concatenate([arrays["scores"][:, 0] for _, arrays in results]))
    metrics = es.update(0, results, es.snapshot(0))
    np.testing.assert_allclose(theta(es), before + 0.1 * np.sign(gradient), rtol=1e-4)
    scores = np.concatenate([arrays["scores"].mean(1) for _, arrays in results])
    assert metrics["fitness_mean"] == pytest.approx(scores.mean())
    assert (metrics["fitness_best"], metrics["fitness_worst"]) == (scores.max(), scores.min())
    assert metrics["fitness_std"] == pytest.approx(scores.std())
    assert metrics["grad_norm"] == pytest.approx(float(np.linalg.norm(gradient)))
    assert metrics["update_ratio"] == pytest.approx(0.1 * 3**0.5 / float(np.linalg.norm(before)), rel=1e-4)
    assert metrics["steps_per_episode"] == 3
    assert "fitness_current" not in metrics


def test_decay_pulls_towards_zero() -> None:
    es = make(lr=0.01, weight_decay=0.5)
    before = theta(es)
    learn(es, range(1), lambda vector: 0.0)  # all equal: no gradient
    np.testing.assert_allclose(theta(es), before - 0.01 * np.sign(before), rtol=1e-3, atol=1e-6)


def test_the_rate_falls_with_the_steps_taken() -> None:
    es = make(lr=0.1, lr_schedule="linear", steps=144)  # 36 steps a generation
    rates = [learn(es, range(i, i + 1), quadratic)["lr"] for i in range(5)]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])


# -- orders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("population", "lanes", "expected"),
    [
        (12, 3, [(0, 4), (4, 4), (8, 4)]),
        (10, 3, [(0, 2), (2, 4), (6, 4)]),
        (4, 8, [(0, 2), (2, 2)]),
        (2, 1, [(0, 2)]),
    ],
)
def test_shares_never_part_a_pair(population: int, lanes: int, expected: list[tuple[int, int]]) -> None:
    assert shares(population, lanes, whole=2) == expected
    tasks = [task for task, _ in make(lanes, population=population).tasks(3, 2)]
    assert [(task.first, task.count) for task in tasks if isinstance(task, Score)] == expected


def test_orders_say_all_that_workers_need() -> None:
    knobs = {"sigma": 0.3, "episodes": 2, "seeding": "fixed", "action_noise": 0.1, "evaluate_episodes": 5}
    evaluation, *orders = make(**knobs).tasks(3, 2)
    assert evaluation == (Score(3, 2, 12, 5, 1, 0.0, False, "fresh"), {})
    assert orders[0] == (Score(3, 2, 0, 4, 2, 0.3, True, "fixed", 0.1), {})


def test_the_snapshot_itself_is_played_and_never_ranked() -> None:
    plain, watched = make(), make(evaluate_episodes=4)
    learn(plain, range(3), quadratic)
    start = quadratic(theta(watched))
    metrics = learn(watched, range(1), quadratic)
    assert metrics["fitness_current"] == pytest.approx(start)
    learn(watched, range(1, 3), quadratic)
    np.testing.assert_array_equal(theta(plain), theta(watched))


# -- states -----------------------------------------------------------------------------------------------


def test_a_state_goes_on_exactly() -> None:
    knobs = {"normalize_obs": True, "evaluate_episodes": 2, "lr_schedule": "linear"}
    whole, first, second = make(**knobs), make(**knobs), make(**knobs)
    learn(whole, range(6), quadratic)
    learn(first, range(3), quadratic)
    second.load({name: array.copy() for name, array in first.state().items()})
    learn(second, range(3, 6), quadratic)
    for name, array in whole.snapshot(6).arrays.items():
        np.testing.assert_array_equal(second.snapshot(6).arrays[name], array)
    assert whole.state().keys() == second.state().keys()
    assert second.blocks() == {}


def test_observation_moments_are_merged_in_order() -> None:
    es = make(normalize_obs=True, lanes=2)
    learn(es, range(2), quadratic)
    # Four orders of 18 steps: means (0, 0), (0, .6), (1, 0), (1, .6), each with m2 (1, 2) of its own.
    state = es.state()
    assert state["obs/count"][0] == 72
    np.testing.assert_allclose(state["obs/mean"], [0.5, 0.3])
    np.testing.assert_allclose(state["obs/m2"], [4 + 72 * 0.25, 8 + 72 * 0.09])
    np.testing.assert_allclose(es.snapshot(2).arrays["stats/mean"], [0.5, 0.3], rtol=1e-6)


def test_what_is_not_finite_is_named_and_changes_nothing() -> None:
    es, twin = make(), make()
    results = play(es, 0, quadratic)
    results[1][1]["scores"][2] = np.inf
    with pytest.raises(NonFinite, match="the score of member 6 is not finite"):
        es.update(0, results, es.snapshot(0))
    for name, array in twin.state().items():
        np.testing.assert_array_equal(es.state()[name], array)
    es._theta[1] = np.nan
    with pytest.raises(NonFinite, match="parameter pi/out/w is not finite"):
        es.update(0, play(twin, 0, quadratic), es.snapshot(0))


# -- learning, and what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1])
def test_it_climbs(staleness: int) -> None:
    es = make(population=40, sigma=0.1, lr=0.05, weight_decay=0.0)
    late: Results = []
    for iteration in range(150):
        results = play(es, iteration, quadratic)
        if staleness and late:
            es.update(iteration - 1, late, es.snapshot(iteration))
        late = results
        if not staleness:
            es.update(iteration, results, es.snapshot(iteration))
    np.testing.assert_allclose(theta(es), [1.0, -2.0, 0.5], atol=0.1)


def test_populations_are_even_and_runs_long_enough() -> None:
    network = NetworkConfig()
    assert not list(ESConfig().faults(network, 2, 4, 100_000))
    odd = list(ESConfig(population=7).faults(network, 2, 4, 100_000))
    assert odd == [
        ({"algorithm.population"}, "algorithm.population = 7: members come in pairs; algorithm.population=8 is even")
    ]
    short = list(ESConfig(population=100, episodes=3).faults(network, 2, 4, 200))
    assert "run.steps = 200: too few for algorithm.population 100 x algorithm.episodes 3" in short[0][1]


def test_a_population_smaller_than_two_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"`int` >= 2.*population"):
        msgspec.convert({"name": "es", "population": 1}, ESConfig)


def test_any_network_will_do_but_no_statistics_of_images() -> None:
    config = ESConfig(normalize_obs=True)
    for kind in ("mlp", "linear", "elman", "lstm"):
        spec = config.policy(ObsSpec((3,)), ActionSpec("discrete", (2,)), True, NetworkConfig(kind=kind))
        assert (spec.critic, spec.head, spec.normalized) == (False, "exact", True)
    with pytest.raises(ConfigError, match="normalize_obs"):
        config.policy(ObsSpec((8, 8, 3), "uint8"), ActionSpec("discrete", (2,)), True, NetworkConfig(kind="cnn"))
