"""Black-box search: CEM by hand, Nevergrad's optimisers asked in parallel and rebuilt exactly, and what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from regatta.algorithms import blackbox
from regatta.algorithms.blackbox import Blackbox, BlackboxConfig, CrossEntropy, Nevergrad
from regatta.errors import ConfigError
from regatta.policies.distributions import ActionSpec
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.policy import Policy
from regatta.types import Array, Arrays, Result, Score

SEED = 7
GOAL = np.array([1.0, -2.0, 0.5])
Results = list[tuple[Result, Arrays]]


@pytest.fixture
def nevergrad() -> Any:
    """The library, or the reason why not."""
    if importlib.util.find_spec("nevergrad") is None:
        report = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        report("needs nevergrad: pip install 'regatta-rl[nevergrad]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("nevergrad")


def make(lanes: int = 3, steps: int = 100_000, **knobs: Any) -> Blackbox:
    config = BlackboxConfig(**({"population": 10, "evaluate_episodes": 0} | knobs))
    spec = config.policy(ObsSpec((2,)), ActionSpec("box", (1,)), True, NetworkConfig(kind="linear"))
    return config.build(Policy(spec), lanes, 1, SEED, steps)


def score(vectors: Array) -> Array:
    return np.asarray(-((vectors - GOAL) ** 2).sum(-1))


def play(search: Blackbox, iteration: int) -> Results:
    results = []
    for task, along in search.tasks(iteration, iteration):
        assert isinstance(task, Score)
        vectors = along.get("members", np.tile(centre(search), (task.count, 1)))
        scores = np.repeat(score(vectors)[:, None], task.episodes, 1)
        arrays = {"scores": scores, "lengths": np.full(scores.shape, 4, np.int32)}
        if search.config.normalize_obs:
            arrays |= {"obs/count": np.array([4.0]), "obs/mean": np.ones(2), "obs/m2": np.ones(2)}
        results.append((Result(0, iteration, int(arrays["lengths"].sum()), [], [], 0.0), arrays))
    return results


def centre(search: Blackbox) -> Array:
    return np.array(search.layout.flatten(np, search.snapshot(0).arrays))


def learn(search: Blackbox, iterations: range) -> dict[str, float]:
    metrics = {}
    for iteration in iterations:
        metrics = search.update(iteration, play(search, iteration), search.snapshot(iteration))
    return metrics


# -- the cross-entropy method -------------------------------------------------------------------------------


def test_cem_by_hand() -> None:
    config = BlackboxConfig(population=5, elite=0.4, sigma=2.0, extra_noise=0.5, noise_generations=2)
    cem = CrossEntropy(config, np.array([1.0, 0.0]), SEED)
    members = cem.ask()
    np.testing.assert_array_equal(members, cem.ask())
    cem.tell(np.array([0.0, 3.0, -1.0, 9.0, 3.0]))  # of the two with 3, the first is elite
    elite = members[[3, 1]]
    np.testing.assert_allclose(cem.centre, elite.mean(0))
    np.testing.assert_allclose(cem.state()["search/deviation"], np.sqrt(elite.var(0) + 0.5**2))
    members = cem.ask()
    cem.tell(np.array([5.0, 0.0, 0.0, 4.0, 0.0]))
    np.testing.assert_allclose(cem.state()["search/deviation"], np.sqrt(members[[0, 3]].var(0) + 0.25**2))
    members = cem.ask()
    cem.tell(np.array([5.0, 0.0, 0.0, 4.0, 0.0]))
    np.testing.assert_allclose(cem.state()["search/deviation"], members[[0, 3]].std(0))


def test_cem_begins_around_the_first_parameters() -> None:
    cem = CrossEntropy(BlackboxConfig(population=2000, sigma=0.3), np.array([5.0, -5.0]), SEED)
    members = cem.ask()
    np.testing.assert_allclose(members.mean(0), [5, -5], atol=0.05)
    np.testing.assert_allclose(members.std(0), [0.3, 0.3], atol=0.02)


def test_cem_starts_without_nevergrad() -> None:
    code = (
        "import sys; from regatta.algorithms.blackbox import BlackboxConfig, CrossEntropy; import numpy as np\n"
        "CrossEntropy(BlackboxConfig(), np.zeros(2), 0).ask(); assert 'nevergrad' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- Nevergrad ----------------------------------------------------------------------------------------------


def test_cma_asks_whole_generations(nevergrad: Any) -> None:
    """Told that scores are noisy, the library takes plain CMA with as many members as are asked in parallel."""
    search = Nevergrad(BlackboxConfig(optimizer="CMA", population=24), np.zeros(3), SEED, 100_000)
    for generation in range(3):
        vectors = search.ask()
        assert vectors.shape == (24, 3)
        np.testing.assert_array_equal(vectors, search.ask())
        search.tell(score(vectors))
        inner = search._inner._es
        assert (inner.popsize, inner.countiter) == (24, generation + 1)
    np.testing.assert_allclose(search.centre, 0.5 * inner.mean)
    first = Nevergrad(BlackboxConfig(optimizer="CMA", population=500, sigma=0.3), np.full(3, 2.0), SEED, 100_000).ask()
    np.testing.assert_allclose(first.mean(0), [2.0] * 3, atol=0.1)
    np.testing.assert_allclose(first.std(0), [0.3] * 3, atol=0.05)


@pytest.mark.parametrize("optimizer", ["CEM", "CMA", "DiagonalCMA", "TBPSA", "DE", "OnePlusOne", "NGOpt", "CMALn"])
def test_a_search_goes_on_exactly(optimizer: str, nevergrad: Any) -> None:
    knobs = {"optimizer": optimizer, "normalize_obs": True, "evaluate_episodes": 2}
    whole, first, second = make(**knobs), make(**knobs), make(**knobs)
    learn(whole, range(8))
    learn(first, range(4))
    first.tasks(4, 4)  # asked, and then stopped before anyone answered
    second.load({name: array.copy() for name, array in first.state().items()})
    for name, array in first.snapshot(4).arrays.items():
        np.testing.assert_array_equal(second.snapshot(4).arrays[name], array)
    learn(second, range(4, 8))
    for name, array in whole.snapshot(8).arrays.items():
        np.testing.assert_array_equal(second.snapshot(8).arrays[name], array)
    assert second.blocks() == {}


@pytest.mark.parametrize("optimizer", ["CEM", "CMA", "TBPSA", "DE"])
def test_it_finds_the_top(optimizer: str, nevergrad: Any) -> None:
    search = make(optimizer=optimizer, population=30, sigma=1.0)
    before = float(score(centre(search)))
    metrics = learn(search, range(25))
    assert float(score(centre(search))) > -0.2 > before
    assert metrics["fitness_best"] <= 0
    assert metrics["fitness_mean"] > before


def test_what_converged_cma_left_counts_until_the_new_one_is_better() -> None:
    class Es:
        def __init__(self, *mean: float) -> None:
            self.mean = np.array(mean)

    means = blackbox._Means()
    assert means.best(None, 1.0) is None
    old, new = Es(1.0), Es(0.0)
    for search, level, expected in (
        (old, 5.0, 1.0),
        (old, 9.0, 1.0),
        (new, 2.0, 1.0),
        (new, 8.0, 1.0),
        (new, 10.0, 0.0),
    ):
        best = means.best(search, level)
        assert best is not None
        assert best.tolist() == [expected]


def test_flat_scores_do_not_lose_what_was_found(nevergrad: Any) -> None:
    """Where all reach the highest score, CMA takes itself for converged, and starts again far away."""
    search = Nevergrad(BlackboxConfig(optimizer="CMA", population=10, sigma=1.0), np.zeros(3), SEED, 100_000)
    restarts: set[int] = set()
    for _ in range(80):
        search.tell(np.minimum(score(search.ask()), -0.5))
        restarts.add(id(search._inner._es))
    assert len(restarts) > 1
    assert float(score(search.centre)) > -0.6


# -- orders and records -------------------------------------------------------------------------------------


def test_members_travel_with_their_orders() -> None:
    search = make(lanes=3, episodes=2, evaluate_episodes=5, seeding="fixed", action_noise=0.1)
    evaluation, *orders = search.tasks(3, 3)
    assert evaluation == (Score(3, 3, 10, 5, 1, 0.0, False, "fresh"), {})
    assert orders[0][0] == Score(3, 3, 0, 3, 2, 0.0, False, "fixed", 0.1)
    vectors = np.concatenate([along["members"] for _, along in orders])
    assert (vectors.dtype, vectors.shape) == (np.float32, (10, 3))
    np.testing.assert_array_equal(vectors, search._search.ask().astype(np.float32))
    again = np.concatenate([along["members"] for _, along in search.tasks(3, 3)[1:]])
    np.testing.assert_array_equal(vectors, again)


def test_figures_of_a_generation() -> None:
    search = make(evaluate_episodes=2)
    start = centre(search)
    scores = score(search._search.ask().astype(np.float32))
    metrics = learn(search, range(1))
    assert metrics["fitness_current"] == pytest.approx(float(score(start)))
    assert metrics["fitness_best"] == pytest.approx(scores.max())
    assert metrics["fitness_worst"] == pytest.approx(scores.min())
    assert metrics["steps_per_episode"] == 4


# -- what is refused ----------------------------------------------------------------------------------------


def test_an_unknown_name_is_told_its_neighbour(nevergrad: Any) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.optimizer = 'DiagonalCMS': .*did you mean 'DiagonalCMA'\?"):
        make(optimizer="DiagonalCMS")


def test_a_missing_library_is_told_how_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blackbox, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'regatta-rl\[nevergrad\]'"):
        make(optimizer="CMA")


def test_one_at_a_time_optimisers_say_so(nevergrad: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"'NelderMead'.* one member at a time, and algorithm.population is 10; set it to 1"
    ):
        make(optimizer="NelderMead")
    search = make(optimizer="NelderMead", population=1, steps=1000)
    learn(search, range(5))


def test_what_fails_in_the_library_is_said(nevergrad: Any) -> None:
    lacking = [name for name in ("FCMA", "BayesOptimBO") if name in nevergrad.optimizers.registry]
    for name, needs in (("FCMA", "fcmaes"), ("BayesOptimBO", "bayes_optim")):
        if name in lacking and importlib.util.find_spec(needs) is None:
            with pytest.raises(ConfigError, match=rf"'{name}': Nevergrad fails with it here: .*{needs}"):
                make(optimizer=name, population=1).tasks(0, 0)


def test_the_processs_own_random_numbers_are_left_alone(nevergrad: Any) -> None:
    np.random.seed(3)
    random.seed(3)
    expected = np.random.random(), random.random()
    np.random.seed(3)
    random.seed(3)
    learn(make(optimizer="CMA"), range(2))
    assert (np.random.random(), random.random()) == expected


def test_full_covariance_of_too_many_parameters(nevergrad: Any) -> None:
    start = np.zeros(blackbox.COVARIANCE_LIMIT + 1)
    with pytest.raises(ConfigError, match=r"3001 are too many .*DiagonalCMA or es"):
        Nevergrad(BlackboxConfig(optimizer="CMA"), start, SEED, 100_000)
    Nevergrad(BlackboxConfig(optimizer="DiagonalCMA"), start, SEED, 100_000)


def test_faults_between_knobs() -> None:
    network = NetworkConfig()
    assert not list(BlackboxConfig().faults(network, 2, 4, 10_000))
    assert "at least 2" in next(iter(BlackboxConfig(population=1).faults(network, 2, 4, 10_000)))[1]
    assert not list(BlackboxConfig(population=1, optimizer="NelderMead").faults(network, 2, 4, 10_000))
    assert "run.steps = 10" in next(iter(BlackboxConfig().faults(network, 2, 4, 10)))[1]
