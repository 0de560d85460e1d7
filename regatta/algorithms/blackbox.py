"""Black-box search: the cross-entropy method of our own, and every optimiser that Nevergrad has.

An optimiser asks for a generation of parameter vectors at once; workers play them; it is told their scores. Nothing
else is known of the policy, so anything that can be played can be searched.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from regatta.algorithms.base import Metrics, refuse_image_statistics
from regatta.algorithms.generation import Seeding, described, evaluation, fitness, shares, take_in, too_few_steps
from regatta.errors import ConfigError, RegattaError, nearest
from regatta.policies.distributions import ActionSpec
from regatta.policies.flat import Layout
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.normalize import Moments
from regatta.policies.policy import Policy, PolicySpec
from regatta.seeding import stream
from regatta.types import Array, Arrays, Result, Score, Snapshot, Task

OWN = "CEM"
STEPS_PER_EPISODE = 200  # a guess, for optimisers that plan ahead
COVARIANCE_LIMIT = 3000  # parameters: a step of full CMA takes seconds beyond, and memory by the square


class BlackboxConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="blackbox"):
    """Black-box search."""

    optimizer: Annotated[
        str, Meta(description="CEM, or any name in Nevergrad's registry, such as CMA, DiagonalCMA, TBPSA, DE, NGOpt")
    ] = OWN
    population: Annotated[int, Meta(ge=1, le=10**6, description="members asked for and played at once")] = 32
    episodes: Annotated[int, Meta(ge=1, description="episodes each member plays; its score is their mean")] = 1
    sigma: Annotated[
        float, Meta(gt=0, le=1000, description="how far around the first parameters the search begins")
    ] = 0.5
    elite: Annotated[float, Meta(gt=0, le=1, description="CEM: the share of members that make the next mean")] = 0.2
    extra_noise: Annotated[
        float, Meta(ge=0, le=1000, description="CEM: deviation added at first, so that the search does not end early")
    ] = 0.0
    noise_generations: Annotated[int, Meta(ge=1, description="CEM: generations until that has fallen to zero")] = 20
    budget: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="evaluations Nevergrad plans with; none: run.steps at "
            f"{STEPS_PER_EPISODE} steps an episode. The run ends with run.steps either way"
        ),
    ] = None
    seeding: Annotated[
        Seeding,
        Meta(description="environment seeds: fresh for each member, one set per generation, or fixed for the run"),
    ] = "generation"
    action_noise: Annotated[
        float, Meta(ge=0, le=100, description="deviation of noise on continuous actions while members are scored")
    ] = 0.0
    normalize_obs: Annotated[bool, Meta(description="scale observations by their running mean and deviation")] = False
    evaluate_episodes: Annotated[
        int, Meta(ge=0, description="episodes played each generation by what the search recommends; 0: none")
    ] = 1

    def policy(self, obs: ObsSpec, action: ActionSpec, bounded: bool, network: NetworkConfig) -> PolicySpec:
        refuse_image_statistics(obs, self.normalize_obs)
        if self.optimizer != OWN:
            _refuse_parallel(self.optimizer, self.population)
        return PolicySpec(obs, action, network, self.normalize_obs, critic=False, head="exact")

    def faults(self, network: NetworkConfig, lanes: int, lane_envs: int, steps: int) -> Iterator[tuple[set[str], str]]:
        yield from too_few_steps(steps, self.population, self.episodes)
        if self.optimizer == OWN and self.population < 2:
            yield (
                {"algorithm.population", "algorithm.optimizer"},
                f"algorithm.population = {self.population}: CEM chooses among members; it needs at least 2",
            )

    def build(self, policy: Policy, lanes: int, lane_envs: int, seed: int, steps: int) -> Blackbox:
        return Blackbox(self, policy, lanes, seed, steps)


class Search(Protocol):
    """Vectors out, scores in. What it does is a function of its seed and the scores it was told."""

    centre: Array  # [P], what it would recommend now

    def ask(self) -> Array:
        """A generation [M, P]; the same one until it is told the scores."""
        ...

    def tell(self, scores: Array) -> None: ...
    def state(self) -> Arrays: ...
    def load(self, arrays: Arrays) -> None: ...


class CrossEntropy:
    """Draw from a Gaussian, keep the elite, fit the Gaussian to it (Rubinstein 1999).

    Noise that fades keeps it from settling too early (Szita and Lőrincz 2006).
    """

    def __init__(self, config: BlackboxConfig, start: Array, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._generation = 0
        self.centre: Array = start
        self._deviation: Array = np.full(len(start), config.sigma)
        self._elite = max(1, round(config.elite * config.population))

    def ask(self) -> Array:
        noise = stream(self._seed, "search", self._generation).standard_normal(
            (self._config.population, len(self.centre))
        )
        return self.centre + self._deviation * noise

    def tell(self, scores: Array) -> None:
        elite = self.ask()[np.argsort(-scores, kind="stable")[: self._elite]]
        left = max(0.0, 1.0 - self._generation / self._config.noise_generations)
        self.centre = elite.mean(0)
        self._deviation = np.sqrt(elite.var(0) + (left * self._config.extra_noise) ** 2)
        self._generation += 1

    def state(self) -> Arrays:
        return {
            "search/generation": np.array([self._generation]),
            "search/centre": self.centre,
            "search/deviation": self._deviation,
        }

    def load(self, arrays: Arrays) -> None:
        self._generation = int(arrays["search/generation"][0])
        self.centre = np.array(arrays["search/centre"])
        self._deviation = np.array(arrays["search/deviation"])


class Nevergrad:
    """One of Nevergrad's optimisers.

    Its state cannot be saved but by pickling, which we never do. But it is a function of what it was told, so a
    checkpoint holds the scores, and loading asks and tells all over again: about a millisecond for each member.
    """

    def __init__(self, config: BlackboxConfig, start: Array, seed: int, steps: int) -> None:
        self._config = config
        self._start = start
        self._seed = seed
        self._budget = config.budget or max(config.population, steps // (STEPS_PER_EPISODE * config.episodes))
        self._begin()

    def _begin(self) -> None:
        config = self._config
        self._told: list[Array] = []
        self._asked: list[Any] = []
        self._means = _Means()
        self.centre: Array = self._start
        rng = stream(self._seed, "search")
        self._library = _Library(config.optimizer, int(rng.integers(2**32)))
        with self._library:
            import nevergrad

            space = nevergrad.p.Array(init=self._start).set_mutation(sigma=config.sigma)
            space.random_state = np.random.RandomState(rng.integers(2**32, dtype=np.uint32))
            # Said so, the library chooses what copes with noise: of its many CMAs the one without elitism.
            space.function.deterministic = config.seeding == "fixed" and not config.action_noise
            self._optimizer = _named(config.optimizer)(space, self._budget, num_workers=config.population)
            self._inner = _innermost(self._optimizer)
        self._refuse_size()

    def _refuse_size(self) -> None:
        settings = getattr(self._inner, "_config", None)
        full = type(self._inner).__name__ == "_CMA" and not getattr(settings, "diagonal", False)
        if full and len(self._start) > COVARIANCE_LIMIT:
            raise ConfigError(
                f"algorithm.optimizer = {self._config.optimizer!r}: it keeps a covariance of all parameters, and "
                f"{len(self._start)} are too many (at most {COVARIANCE_LIMIT}); DiagonalCMA or es take them, "
                "network.kind=linear or smaller network.sizes make them fewer"
            )

    def ask(self) -> Array:
        if not self._asked:
            with self._library:
                self._asked = [self._optimizer.ask() for _ in range(self._config.population)]
        return np.stack([candidate.value for candidate in self._asked])

    def tell(self, scores: Array) -> None:
        self.ask()
        with self._library:
            for candidate, score in zip(self._asked, scores.tolist(), strict=True):
                self._optimizer.tell(candidate, -score)  # it minimises
            mean = self._means.best(getattr(self._inner, "_es", None), float(scores.mean()))
            if mean is None:
                self.centre = np.array(self._optimizer.provide_recommendation().value)
            else:
                self.centre = self._start + self._config.sigma * mean
        self._asked = []
        self._told.append(np.array(scores))

    def state(self) -> Arrays:
        return {"search/scores": np.array(self._told).reshape(-1, self._config.population)}

    def load(self, arrays: Arrays) -> None:
        self._begin()
        for scores in arrays["search/scores"]:
            self.tell(scores)


class _Means:
    """The mean of CMA's distribution, which noise does not flatter as it does the best member ever seen.

    CMA that has converged starts again from the beginning; the mean it left counts until the new one scores higher.
    """

    def __init__(self) -> None:
        self._search: Any = None
        self._last: tuple[float, Array] | None = None
        self._left: tuple[float, Array] | None = None

    def best(self, search: Any, score: float) -> Array | None:
        """`search` is pycma's object; None where another optimiser is at work."""
        mean = getattr(search, "mean", None)
        if mean is None:
            return None
        if search is not self._search and self._last is not None:
            self._left = max(filter(None, (self._left, self._last)), key=lambda pair: pair[0])
        self._search = search
        self._last = (score, np.array(mean))
        return self._left[1] if self._left is not None and self._left[0] > score else self._last[1]


class _Library:
    """`with library:` around every call into Nevergrad.

    It and what it stands on warn freely, of nothing that a user of ours could change. Some of its optimisers draw from
    the process's own random numbers, which are therefore lent to it. What fails in it fails as a config does.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._numpy: Any = np.random.RandomState(seed).get_state()
        self._python = random.Random(seed).getstate()

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        self._swap()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._swap()
        self._warnings.__exit__(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, RegattaError):
            text = str(error) or type(error).__name__
            raise ConfigError(f"algorithm.optimizer = {self._name!r}: Nevergrad fails with it here: {text}") from error

    def _swap(self) -> None:
        ours: Any = np.random.get_state()
        np.random.set_state(self._numpy)
        self._numpy = ours
        python = random.getstate()
        random.setstate(self._python)
        self._python = python


def _named(name: str) -> Any:
    if find_spec("nevergrad") is None:
        raise ConfigError(
            f"algorithm.optimizer = {name!r}: it is one of Nevergrad's, which is not installed: "
            f"pip install 'regatta-rl[nevergrad]'. {OWN} needs nothing more"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nevergrad
    registry = nevergrad.optimizers.registry
    if name not in registry:
        raise ConfigError(
            f"algorithm.optimizer = {name!r}: expected {OWN} or one of the {len(registry)} names in "
            f"nevergrad.optimizers.registry;{nearest(name, [OWN, *registry])}"
        )
    return registry[name]


def _refuse_parallel(name: str, population: int) -> None:
    if _named(name).no_parallelization and population > 1:
        raise ConfigError(
            f"algorithm.optimizer = {name!r}: it asks for one member at a time, and algorithm.population is "
            f"{population}; set it to 1"
        )


def _innermost(optimizer: Any) -> Any:
    """Many of Nevergrad's optimisers only choose another."""
    while (inner := getattr(optimizer, "optim", None)) is not None:
        optimizer = inner
    return optimizer


class Blackbox:
    """The state of one run: the search, and the moments of the observations."""

    staleness: Literal[0] = 0  # nobody can be asked before being told

    def __init__(self, config: BlackboxConfig, policy: Policy, lanes: int, seed: int, steps: int) -> None:
        self.config = config
        self.policy = policy
        self.total_steps = steps
        self._shares = shares(config.population, lanes)
        arrays = policy.init(stream(seed, "init"))
        self.layout = Layout(arrays)
        start = self.layout.flatten(np, arrays).astype(np.float64)
        self._search: Search = (
            CrossEntropy(config, start, seed) if config.optimizer == OWN else Nevergrad(config, start, seed, steps)
        )
        self._moments = Moments(policy.obs.shape) if config.normalize_obs else None

    def tasks(self, iteration: int, version: int) -> list[tuple[Task, Arrays]]:
        config = self.config
        vectors = self._search.ask().astype(np.float32)
        orders: list[tuple[Task, Arrays]] = [
            (
                Score(
                    *(iteration, version, first, count, config.episodes),
                    sigma=0.0,
                    mirrored=False,
                    seeding=config.seeding,
                    action_noise=config.action_noise,
                ),
                {"members": vectors[first : first + count]},
            )
            for first, count in self._shares
        ]
        return evaluation(iteration, version, config.population, config.evaluate_episodes) + orders

    def update(self, iteration: int, results: list[tuple[Result, Arrays]], behaviour: Snapshot) -> Metrics:
        evaluated = 1 if self.config.evaluate_episodes else 0
        scores = fitness(results[evaluated:])
        self._search.tell(scores)
        if self._moments is not None:
            take_in(self._moments, results)
        return described(scores, results[evaluated:], results[:evaluated])

    def snapshot(self, version: int) -> Snapshot:
        stats = {} if self._moments is None else self._moments.stats()
        return Snapshot(version, self.layout.split(self._search.centre.astype(np.float32)) | stats)

    def restart(self) -> None:
        """Every generation begins new episodes anyway."""

    def state(self) -> Arrays:
        return self._search.state() | ({} if self._moments is None else self._moments.state("obs"))

    def blocks(self) -> dict[str, Arrays]:
        return {}

    def load(self, arrays: Arrays) -> None:
        self._search.load(arrays)
        if self._moments is not None:
            self._moments.load(arrays, "obs")
