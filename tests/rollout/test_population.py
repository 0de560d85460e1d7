"""Populations: who is scored how, whoever plays beside whom, and what fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import worlds
from gymnasium import spaces

from regatta.codec import encode
from regatta.errors import EnvError
from regatta.policies import noise
from regatta.policies.flat import Layout
from regatta.policies.networks import NetworkConfig
from regatta.policies.noise import noise_table
from regatta.policies.policy import Policy, PolicySpec
from regatta.rollout.envs import EnvConfig, probe
from regatta.rollout.population import MAX_FAULTS_PER_EPISODE, Population, misfit
from regatta.rollout.spaces import to_env
from regatta.rollout.watch import Watch
from regatta.seeding import seeds, stream
from regatta.types import Array, Arrays, Episode, Fault, Order, Result, Score

SEED = 7
Scored = tuple[Arrays, list[Episode], list[Fault]]


class Tagged(worlds.Counting):
    """Pays the tag it drew at reset, so that a score tells the seed."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observe(), self.tag, True, False, {}


class Echo(gymnasium.Env[Any, Any]):
    """The same at every reset: shows how many steps went by, pays the action times their number."""

    def __init__(self, steps: int = 5, shape: tuple[int, ...] = (1,)) -> None:
        image = len(shape) > 1
        self.observation_space = spaces.Box(0, 255, tuple(shape), np.uint8 if image else np.float32)
        self.action_space = spaces.Box(-10, 10, (1,))
        self.steps, self.count = steps, 0

    def observe(self) -> Any:
        return np.full(self.observation_space.shape or (), self.count, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.observe(), float(action[0]) * self.count, self.count == self.steps, False, {}


class Doubling:
    """A user's own network, which would not broadcast over a stack of parameters."""

    outputs = 2

    def init(self, rng: np.random.Generator) -> Arrays:
        return {"w": rng.standard_normal((2, 1)).astype(np.float32)}

    def apply(self, xp: Any, arrays: Any, x: Any) -> Any:
        assert arrays["w"].shape == (2, 1)
        return 2 * x @ arrays["w"].T


def doubling(shape: tuple[int, ...]) -> Doubling:
    return Doubling()


@pytest.fixture(autouse=True)
def _small_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(noise, "TABLE_LEAST", 2**16)
    noise_table.cache_clear()
    yield
    noise_table.cache_clear()


class Colony:
    """A population, its policy and a snapshot, with a wish for large weights so that members differ."""

    def __init__(
        self, config: EnvConfig, watch: Watch, network: NetworkConfig, normalized: bool, like: EnvConfig
    ) -> None:
        found = probe(like)
        self.policy = Policy(PolicySpec(found.obs, found.action, network, normalized, critic=False, head="exact"))
        self.config = config
        rng = stream(SEED, "init")
        self.arrays = {
            name: array + 0.3 * rng.standard_normal(array.shape).astype(np.float32)
            for name, array in self.policy.init(rng).items()
        }
        if normalized:
            self.arrays["stats/mean"] = np.full(found.obs.shape, 0.1, np.float32)
            self.arrays["stats/scale"] = np.full(found.obs.shape, 0.7, np.float32)
        worlds.Troubled.made = worlds.SecondReset.made = worlds.BadMask.made = 0
        self.population = Population(config, self.policy, SEED, watch)

    def score(self, task: Score, members: Array | None = None) -> Scored:
        arrays, episodes, faults = self.population.score(task, self.arrays, members)
        assert misfit(arrays, task, self.policy) is None
        return arrays, episodes, faults


@pytest.fixture
def colony(watch: Watch) -> Iterator[Callable[..., Colony]]:
    made: list[Colony] = []

    def build(
        config: EnvConfig, kind: str = "mlp", normalized: bool = False, like: EnvConfig | None = None, **network: Any
    ) -> Colony:
        settings = NetworkConfig(**({"kind": kind, "sizes": (8,)} | network))
        made.append(Colony(config, watch, settings, normalized, like or config))
        return made[-1]

    yield build
    for one in made:
        one.population.close()


def order(count: int = 6, first: int = 0, generation: int = 5, episodes: int = 2, **rest: Any) -> Score:
    settings: dict[str, Any] = {"sigma": 0.5, "mirrored": True, "seeding": "fresh"} | rest
    return Score(generation, 0, first, count, episodes, **settings)


# -- what is played ---------------------------------------------------------------------------------------


def test_every_member_plays_all_its_episodes(colony: Callable[..., Colony]) -> None:
    arrays, episodes, faults = colony(EnvConfig(id="worlds:Counting", kwargs={"end_at": 3}, lane_envs=4)).score(order())
    assert (arrays["scores"] == 1 + 2 + 3).all()
    assert (arrays["lengths"] == 3).all()
    assert arrays["scores"].shape == (6, 2)
    assert [(e.env, e.step, e.score, e.length) for e in episodes] == [(k, e, 6.0, 3) for k in range(6) for e in (0, 1)]
    assert not faults


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (EnvConfig(id="worlds:Counting", kwargs={"cut_at": 4}), 4),
        (EnvConfig(id="worlds:Counting", max_episode_steps=5), 5),
    ],
)
def test_time_limits_end_episodes(config: EnvConfig, length: int, colony: Callable[..., Colony]) -> None:
    arrays, _, _ = colony(config).score(order())
    assert (arrays["lengths"] == length).all()


def by_hand(colony: Colony, task: Score, member: int) -> tuple[list[float], list[Array]]:
    """A member's scores and observations, one step after another with a policy of its own."""
    layout = Layout(colony.arrays)
    offsets, signs = noise_table(SEED, layout.size).members(task.generation, task.first, task.count, task.mirrored)
    vector = layout.flatten(np, colony.arrays)
    vector = vector + np.float32(task.sigma * signs[member]) * noise_table(SEED, layout.size).slice(offsets[member])
    act = colony.policy.player(layout.split(vector) | {k: v for k, v in colony.arrays.items() if "stats/" in k})
    env = gymnasium.make(colony.config.id, max_episode_steps=colony.config.max_episode_steps)
    pair = (task.first + member) // 2
    numbers = seeds(SEED, "score", task.generation, count=(pair + 1) * task.episodes)[-task.episodes :]
    scores, seen = [], []
    for number in numbers:
        obs, _ = env.reset(seed=number)
        state, score, over = colony.policy.first_state(1), 0.0, False
        while not over:
            seen.append(np.asarray(obs, np.float32))
            action, state = act(seen[-1][None], None, None, state)
            obs, reward, end, cut, _ = env.step(to_env(env.action_space)(action)[0])
            score += float(reward)
            over = end or cut
        scores.append(score)
    return scores, seen


@pytest.mark.parametrize(("env", "kind"), [("CartPole-v1", "mlp"), ("Pendulum-v1", "lstm"), ("CartPole-v1", "elman")])
def test_scores_are_those_of_each_member_alone(env: str, kind: str, colony: Callable[..., Colony]) -> None:
    one = colony(EnvConfig(id=env, lane_envs=3, max_episode_steps=30), kind)
    task = order(count=6, first=4)
    arrays, _, _ = one.score(task)
    for member in range(6):
        np.testing.assert_allclose(arrays["scores"][member], by_hand(one, task, member)[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("env", "kind", "deviation"),
    [
        ("CartPole-v1", "mlp", 0.0),
        ("Pendulum-v1", "lstm", 0.2),
        ("Pendulum-v1", "linear", 0.0),
        ("CartPole-v1", "elman", 0.0),
    ],
)
def test_nothing_but_its_number_matters_to_a_member(
    env: str, kind: str, deviation: float, colony: Callable[..., Colony]
) -> None:
    """Bit for bit, whatever the batch and however the population is split."""
    found = []
    for lane_envs, shares in ((1, [18]), (4, [18]), (16, [18]), (5, [3, 1, 10, 4])):
        one = colony(EnvConfig(id=env, lane_envs=lane_envs, max_episode_steps=25), kind, True, sizes=(9, 5))
        parts, first = [], 0
        for count in shares:
            parts.append(one.score(order(count, first, action_noise=deviation))[0])
            first += count
        found.append([np.concatenate([part[name] for part in parts]) for name in ("scores", "lengths")])
    for scores, lengths in found[1:]:
        np.testing.assert_array_equal(scores, found[0][0])
        np.testing.assert_array_equal(lengths, found[0][1])
    assert len(np.unique(found[0][0])) > 2


def test_moments_do_not_depend_on_the_batch(colony: Callable[..., Colony]) -> None:
    found = [colony(EnvConfig(id="CartPole-v1", lane_envs=n), normalized=True).score(order())[0] for n in (1, 4)]
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name])


def test_moments_are_those_of_all_observations_acted_on(colony: Callable[..., Colony]) -> None:
    one = colony(EnvConfig(id="Pendulum-v1", lane_envs=4, max_episode_steps=20), normalized=True)
    task = order()
    arrays, _, _ = one.score(task)
    rows = np.array([obs for member in range(6) for obs in by_hand(one, task, member)[1]], np.float64)
    assert arrays["obs/count"][0] == len(rows) == arrays["lengths"].sum() == 6 * 2 * 20
    np.testing.assert_allclose(arrays["obs/mean"], rows.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(arrays["obs/m2"], ((rows - rows.mean(0)) ** 2).sum(0), rtol=1e-3)


def test_memory_begins_anew_with_every_episode(colony: Callable[..., Colony]) -> None:
    one = colony(EnvConfig(id="test_population:Echo", lane_envs=2), "lstm", sizes=(4,))
    arrays, _, _ = one.score(order(count=4, episodes=3))
    for row in arrays["scores"]:
        np.testing.assert_array_equal(row, row[0])
    assert len(np.unique(arrays["scores"])) == 4
    first = one.score(order(count=4, episodes=1))[0]["scores"]
    np.testing.assert_array_equal(first[:, 0], arrays["scores"][:, 0])


def test_members_that_come_with_the_order(colony: Callable[..., Colony]) -> None:
    """Linear, on an observation that counts 0, 1, 2: with weight w and bias b the score is by hand."""
    one = colony(EnvConfig(id="test_population:Echo", kwargs={"steps": 3}), "linear")
    rows = np.array([[0.5, 1.0], [-2.0, 0.25], [0.0, 0.0]], np.float32)  # bias, weight: names in sorted order
    arrays, _, _ = one.score(order(count=3, sigma=0.0, mirrored=False, episodes=1), rows)
    expected = [[sum((b + w * n) * (n + 1) for n in range(3))] for b, w in rows.tolist()]
    np.testing.assert_allclose(arrays["scores"], expected)
    with pytest.raises(EnvError, match=r"members are float32\(3, 1\), expected float32\(3, 2\)"):
        one.score(order(count=3, sigma=0.0, mirrored=False), rows[:, :1])


def test_without_sigma_the_snapshot_itself_plays(colony: Callable[..., Colony]) -> None:
    one = colony(EnvConfig(id="test_population:Echo", kwargs={"steps": 3}), "linear")
    b, w = (float(one.arrays[f"pi/out/{name}"].item()) for name in "bw")
    arrays, _, _ = one.score(order(count=2, sigma=0.0, mirrored=False, episodes=1))
    np.testing.assert_allclose(arrays["scores"], [[sum((b + w * n) * (n + 1) for n in range(3))]] * 2, rtol=1e-5)


def test_noise_on_actions(colony: Callable[..., Colony]) -> None:
    one = colony(EnvConfig(id="test_population:Echo", kwargs={"steps": 1}, lane_envs=8), "linear")
    quiet = one.score(order(count=400, episodes=1))[0]["scores"]
    loud = one.score(order(count=400, episodes=1, action_noise=0.5))[0]["scores"]
    assert abs((loud - quiet).mean()) < 0.1
    assert abs((loud - quiet).std() - 0.5) < 0.05
    assert len(np.unique(loud - quiet)) > 390  # the halves of a pair have noise of their own


# -- luck -------------------------------------------------------------------------------------------------


def tags(colony: Colony, seeding: str, generation: int = 5) -> Array:
    return colony.score(order(count=8, generation=generation, seeding=seeding))[0]["scores"]


def test_seeds_by_pair_by_generation_or_once(colony: Callable[..., Colony]) -> None:
    one = colony(EnvConfig(id="test_population:Tagged", lane_envs=3))
    fresh = tags(one, "fresh")
    np.testing.assert_array_equal(fresh[::2], fresh[1::2])
    assert len(np.unique(fresh)) > 6  # of eight: four pairs, two episodes
    assert (tags(one, "fresh", 6) != fresh).any()
    shared = tags(one, "generation")
    assert (shared == shared[0]).all()
    assert shared[0, 0] != shared[0, 1]
    assert (tags(one, "generation", 6) != shared).any()
    fixed = tags(one, "fixed")
    assert (fixed == fixed[0]).all()
    np.testing.assert_array_equal(tags(one, "fixed", 6), fixed)


def test_members_without_pairs_have_seeds_of_their_own(colony: Callable[..., Colony]) -> None:
    one = colony(EnvConfig(id="test_population:Tagged"))
    found = one.score(order(count=8, mirrored=False, episodes=1))[0]["scores"]
    assert len(np.unique(found)) > 6


# -- kinds of policies and actions --------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(6,), (3, 4)])
@pytest.mark.parametrize("in_dict", [False, True])
def test_masks_are_obeyed(sizes: tuple[int, ...], in_dict: bool, colony: Callable[..., Colony]) -> None:
    """The environment refuses what its mask forbids, which would be a fault."""
    kwargs = {"sizes": sizes, "in_dict": in_dict, "end_at": 20}
    arrays, _, faults = colony(EnvConfig(id="worlds:Masked", kwargs=kwargs, lane_envs=3)).score(order(count=8))
    assert not faults
    assert (arrays["lengths"] == 20).all()


def test_a_network_of_the_users_own(colony: Callable[..., Colony]) -> None:
    one = colony(EnvConfig(id="test_population:Echo", lane_envs=3), "test_population:doubling")
    several = one.score(order(count=7))[0]
    alone = colony(EnvConfig(id="test_population:Echo", lane_envs=1), "test_population:doubling").score(order(count=7))[
        0
    ]
    np.testing.assert_array_equal(several["scores"], alone["scores"])
    assert len(np.unique(several["scores"])) == 7


def test_a_compiled_network(colony: Callable[..., Colony]) -> None:
    config = EnvConfig(id="test_population:Echo", kwargs={"steps": 2, "shape": [36, 36, 1]}, lane_envs=2)
    arrays, _, faults = colony(config, "cnn", sizes=(4,)).score(order(count=4, episodes=1, sigma=0.05))
    assert not faults
    assert len(np.unique(arrays["scores"])) == 4


# -- failing environments -----------------------------------------------------------------------------------


def trouble(what: str, which: int | None = 1, at: int = 4) -> EnvConfig:
    kwargs = {"trouble": what, "at": at, "which": which, "end_at": 3}
    return EnvConfig(id="worlds:Troubled", kwargs=kwargs, lane_envs=2)


HEALTHY = EnvConfig(id="worlds:Counting", kwargs={"end_at": 3})


@pytest.mark.parametrize(
    "what",
    ["raise", "nan obs", "inf obs", "long obs", "no obs", "nan reward", "inf reward", "text reward", "no reward"],
)
def test_a_failed_episode_is_played_again_elsewhere(what: str, colony: Callable[..., Colony]) -> None:
    arrays, episodes, faults = colony(trouble(what), like=HEALTHY, normalized=True).score(order())
    assert len(faults) == 1
    assert (arrays["scores"] == 6).all()
    assert (arrays["lengths"] == 3).all()
    assert len(episodes) == 12
    assert arrays["obs/count"] == 36
    word = {"raise": "the wheel came off", "nan obs": "non-finite obs", "inf obs": "non-finite obs"}.get(what, "")
    assert (word or ("non-finite reward" if what in ("nan reward", "inf reward") else "Error")) in faults[0].text or (
        "BadObservation" in faults[0].text
    )


def test_the_seed_of_a_repeated_episode_is_another(colony: Callable[..., Colony]) -> None:
    """Both halves of a pair that fail alike are repeated alike."""
    calm = colony(EnvConfig(id="worlds:Counting", kwargs={"end_at": 3}, lane_envs=2), like=HEALTHY, normalized=True)
    before = calm.score(order(count=2, episodes=1))[0]["obs/mean"]
    broken = colony(trouble("raise", which=0, at=1), like=HEALTHY, normalized=True)
    arrays, _, faults = broken.score(order(count=2, episodes=1))
    assert [(fault.lane, fault.env) for fault in faults] == [(0, 0)]
    assert arrays["obs/mean"][0] != before[0]  # the mean tag
    again = colony(trouble("raise", which=0, at=1), like=HEALTHY, normalized=True).score(order(count=2, episodes=1))[0]
    np.testing.assert_array_equal(again["obs/mean"], arrays["obs/mean"])


def test_a_reset_that_fails(colony: Callable[..., Colony]) -> None:
    config = EnvConfig(id="worlds:SecondReset", kwargs={"end_at": 3}, lane_envs=2)
    arrays, _, faults = colony(config, like=HEALTHY).score(order())
    assert len(faults) == 1
    assert "reset is stuck" in faults[0].text
    assert (arrays["scores"] == 6).all()


@pytest.mark.parametrize(("what", "at"), [("raise", 1), ("nan obs", 1), ("nan obs", 0), ("raise", 0)])
def test_an_environment_that_always_fails_is_an_error(what: str, at: int, colony: Callable[..., Colony]) -> None:
    broken = colony(trouble(what, None, at), like=HEALTHY)
    with pytest.raises(EnvError, match="episode 0 of member 0 fails again and again"):
        broken.score(order())
    assert worlds.Troubled.made <= 2 * (1 + MAX_FAULTS_PER_EPISODE)


@pytest.mark.parametrize("bad", [None, [0, 0], [1]])
def test_a_bad_mask_is_a_fault(bad: list[int] | None, colony: Callable[..., Colony]) -> None:
    config = EnvConfig(id="worlds:BadMask", kwargs={"bad": bad}, max_episode_steps=4, lane_envs=2)
    _, _, faults = colony(config).score(order(count=2, episodes=1))
    assert ["BadObservation" in fault.text for fault in faults] == [True]


class TestHung:
    @pytest.fixture
    def timeout_s(self) -> float:
        return 0.3

    def test_a_hung_step_is_interrupted(self, colony: Callable[..., Colony]) -> None:
        arrays, _, faults = colony(trouble("sleep"), like=HEALTHY).score(order())
        assert ["StepTimeout" in fault.text for fault in faults] == [True]
        assert (arrays["scores"] == 6).all()


# -- what travels -----------------------------------------------------------------------------------------


def test_bytes_do_not_depend_on_the_number_of_parameters(colony: Callable[..., Colony]) -> None:
    sizes = set()
    for width in (12, 15_000):
        one = colony(EnvConfig(id="worlds:Counting", kwargs={"end_at": 3}), sizes=(width,))
        task = order()
        arrays, episodes, faults = one.score(task)
        result = Result(1, 0, int(arrays["lengths"].sum()), episodes, faults, 0.5)
        sizes.add((len(encode(Order(1, task))), len(encode(result, arrays))))
        assert Layout(one.arrays).size == width * 5 + 2
    assert len(sizes) == 1
    assert max(sizes)[0] < 200


def fitting() -> Arrays:
    return {
        "scores": np.zeros((6, 2)),
        "lengths": np.ones((6, 2), np.int32),
        "obs/count": np.array([12.0]),
        "obs/mean": np.zeros(2),
        "obs/m2": np.zeros(2),
    }


@pytest.mark.parametrize(
    ("name", "array", "what"),
    [
        ("scores", np.zeros((6, 1)), "scores is float64(6, 1), expected float64(6, 2)"),
        ("scores", np.full((6, 2), np.nan), "scores is not finite"),
        ("lengths", np.zeros((6, 2), np.int32), "an episode of no steps"),
        ("lengths", np.ones((6, 2)), "lengths is float64"),
        ("obs/count", np.array([13.0]), "moments"),
        ("obs/m2", np.array([0.0, -1.0]), "moments"),
        ("obs/mean", np.array([0.0, np.inf]), "obs/mean is not finite"),
        ("else", np.zeros(1), "arrays"),
    ],
)
def test_what_does_not_fit_is_said(name: str, array: Array, what: str, colony: Callable[..., Colony]) -> None:
    policy = colony(HEALTHY, normalized=True).policy
    assert misfit(fitting(), order(), policy) is None
    assert what in (misfit(fitting() | {name: array}, order(), policy) or "")
