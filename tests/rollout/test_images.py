"""What the agent sees: each knob on small environments with known numbers, then on the games themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from regatta.errors import ConfigError
from regatta.rollout.envs import EnvConfig, bare, make, probe
from regatta.rollout.images import View, shares, view
from regatta.rollout.spaces import BadObservation

Need = Callable[[str, str], None]


class Flicker(gymnasium.Env[Any, Any]):
    """Images of `shape` in which only one row is lit, by the frame's number, and another one in the next frame."""

    def __init__(self, shape: tuple[int, ...] = (2, 3), end_at: int = 100) -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.action_space: spaces.Space[Any] = spaces.Discrete(3)
        self.end_at, self.count, self.acted = end_at, 0, [0]

    def look(self) -> Any:
        assert self.observation_space.shape is not None
        image = np.zeros(self.observation_space.shape, np.uint8)
        image[self.count % 2] = self.count
        return image

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.acted = 0, []
        return self.look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.acted.append(action)
        return self.look(), float(self.count), self.count == self.end_at, False, {}


class Painted(Flicker):
    """Always the same picture."""

    def __init__(self, picture: Any) -> None:
        super().__init__(picture.shape)
        self.picture = picture

    def look(self) -> Any:
        return self.picture


class Rich(Flicker):
    """A picture among other things."""

    def __init__(self, *images: str, masked: bool = False) -> None:
        super().__init__()
        numbers = spaces.Box(0, 9, (2,))
        flags = {"action_mask": spaces.MultiBinary(3)} if masked else {}
        self.observation_space = spaces.Dict(numbers=numbers, **dict.fromkeys(images, self.observation_space), **flags)

    def look(self) -> Any:
        assert isinstance(self.observation_space, spaces.Dict)
        picture = np.full((2, 3), self.count, np.uint8)
        made = {"numbers": np.zeros(2, np.float32), "action_mask": np.array([1, 0, 1], np.int8)}
        return {key: made.get(key, picture) for key in self.observation_space}


def seen_of(picture: Any, **knobs: Any) -> Any:
    """The picture through the knobs; the space must fit it."""
    env = view(Painted(picture), View(**knobs))
    obs, _ = env.reset()
    assert env.observation_space.contains(obs), (env.observation_space, obs.shape, obs.dtype)
    return obs


# -- skipping ---------------------------------------------------------------------------------------------


def test_a_skip_repeats_the_action_adds_rewards_and_merges_the_last_two_images() -> None:
    env = view(Flicker(), View(frame_skip=4))
    env.reset()
    obs, reward, *_ = env.step(2)
    assert obs.tolist() == [[4, 4, 4], [3, 3, 3]]
    assert reward == 1 + 2 + 3 + 4
    assert env.unwrapped.acted == [2, 2, 2, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("end_at", "reward"), [(5, 5.0), (6, 5.0 + 6), (8, 5.0 + 6 + 7 + 8)])
def test_a_skip_stops_where_the_episode_does(end_at: int, reward: float) -> None:
    env = view(Flicker(end_at=end_at), View(frame_skip=4))
    env.reset()
    env.step(0)
    obs, paid, ended, cut, _ = env.step(0)
    assert (paid, ended, cut) == (reward, True, False)
    assert obs[end_at % 2, 0] == end_at


def test_numbers_are_not_merged() -> None:
    env = make(EnvConfig(id="worlds:Counting", frame_skip=3))
    first, _ = env.reset(seed=1)
    assert env.step(0)[0].tolist() == [first[0], 3.0]
    assert env.step(0)[1] == 4 + 5 + 6


def test_time_limits_count_the_agents_steps() -> None:
    def limit(**knobs: Any) -> int | None:
        env = make(EnvConfig(**knobs))
        stepper = bare(env)
        env.close()
        return stepper.limit

    assert limit(id="CartPole-v1", frame_skip=4) == 125
    assert limit(id="CartPole-v1", frame_skip=3) == 167
    assert limit(id="CartPole-v1", frame_skip=4, max_episode_steps=7) == 7
    assert limit(id="CartPole-v1", hide=(1, 3)) == 500
    assert limit(id="CartPole-v1", hide=(1, 3), max_episode_steps=900) == 900
    assert limit(id="worlds:Counting", frame_skip=2) is None


def test_a_limit_cuts_once_whether_peeled_or_not() -> None:
    env = make(EnvConfig(id="worlds:Counting", frame_skip=2, max_episode_steps=3))
    env.reset()
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]
    inner = bare(env).env
    inner.reset()
    assert not any(inner.step(0)[3] for _ in range(9))


def test_the_plain_wrappers_are_peeled_below_ours() -> None:
    env = make(EnvConfig(id="CartPole-v1", frame_stack=2))
    assert bare(env).env.env is env.unwrapped  # type: ignore[attr-defined]


# -- idle steps -------------------------------------------------------------------------------------------


def idle_steps(seed: int) -> int:
    env = view(Flicker(), View(noop_max=5))
    env.reset(seed=seed)
    assert set(env.unwrapped.acted) <= {0}  # type: ignore[attr-defined]
    return int(env.unwrapped.count)  # type: ignore[attr-defined]


def test_idle_steps_are_drawn_from_the_seed() -> None:
    drawn = [idle_steps(seed) for seed in range(60)]
    assert drawn == [idle_steps(seed) for seed in range(60)]
    assert set(drawn) == {0, 1, 2, 3, 4, 5}


def test_an_episode_that_ends_idly_begins_anew() -> None:
    env = view(Flicker(end_at=1), View(noop_max=5))
    for seed in range(9):
        obs, _ = env.reset(seed=seed)
        assert not obs.any()


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])])
def test_idle_actions_of_other_kinds_are_zeros(space: spaces.Space[Any]) -> None:
    flicker = Flicker()
    flicker.action_space = space
    env = view(flicker, View(noop_max=50))
    env.reset(seed=0)
    assert all(space.contains(action) and not np.any(action) for action in flicker.acted)
    flicker.action_space = spaces.Box(1, 2, (2,))
    with pytest.raises(ConfigError, match=r"env\.noop_max: 0 is no action of Box"):
        view(flicker, View(noop_max=1))


# -- pictures ---------------------------------------------------------------------------------------------


def test_luminance() -> None:
    primaries = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0]]], np.uint8)
    assert seen_of(primaries, grayscale=True).tolist() == [[76, 150, 29, 255, 0]]
    one_channel = np.array([[[7], [8]]], np.uint8)
    assert seen_of(one_channel, grayscale=True).tolist() == [[7, 8]]
    assert seen_of(one_channel[..., 0], grayscale=True).tolist() == [[7, 8]]


def test_shares_of_a_pixel() -> None:
    assert shares(4, 2).tolist() == [[0.5, 0], [0.5, 0], [0, 0.5], [0, 0.5]]
    assert shares(2, 4).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    np.testing.assert_allclose(shares(3, 2), [[2 / 3, 0], [1 / 3, 1 / 3], [0, 2 / 3]])


def test_resizing_averages_areas() -> None:
    picture = np.array([[0, 10, 20, 30], [40, 50, 60, 70]], np.uint8)
    assert seen_of(picture, resize=(1, 2)).tolist() == [[25, 45]]
    assert seen_of(picture, resize=(2, 4)).tolist() == picture.tolist()
    assert seen_of(picture, resize=(2, 3)).tolist() == [[3, 15, 28], [43, 55, 68]]  # 2.5, 15, 27.5, ...
    assert seen_of(picture[:, :1], resize=(4, 2)).tolist() == [[0, 0], [0, 0], [40, 40], [40, 40]]
    coloured = np.stack([picture, picture + 100], -1)
    assert seen_of(coloured, resize=(1, 2)).tolist() == [[[25, 125], [45, 145]]]


@pytest.mark.parametrize("shape", [(210, 160), (210, 160, 3), (96, 96, 3), (241, 319)])
def test_resizing_whole_screens(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, shape).astype(np.uint8)
    rows = np.tensordot(shares(shape[0], 84).T, picture.astype(float), 1)
    exact = np.moveaxis(np.tensordot(shares(shape[1], 84).T, rows, (1, 1)), 0, 1)
    assert np.abs(seen_of(picture, resize=(84, 84)) - exact).max() < 0.51
    white = np.full(shape, 255, np.uint8)
    assert (seen_of(white, resize=(84, 84)) == 255).all()


def test_a_stack_of_images_grows_channels_and_starts_with_the_first() -> None:
    env = view(Flicker((2, 3)), View(frame_stack=3))
    assert env.observation_space == spaces.Box(0, 255, (2, 3, 3), np.uint8)
    obs, _ = env.reset()
    assert not obs.any()
    env.step(0)
    obs = env.step(0)[0]
    assert obs[:, 0].tolist() == [[0, 0, 2], [0, 1, 0]]
    assert env.step(0)[0][:, 0].tolist() == [[0, 2, 0], [1, 0, 3]]
    assert obs[:, 0].tolist() == [[0, 0, 2], [0, 1, 0]]  # still ours
    assert not env.reset()[0].any()


def test_colours_stay_together_in_a_stack() -> None:
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert seen_of(picture, frame_stack=2)[1, 0].tolist() == [6, 7, 8, 6, 7, 8]


def test_a_stack_of_rows_is_a_longer_row() -> None:
    env = make(EnvConfig(id="worlds:Counting", frame_stack=3))
    tag = float(env.reset(seed=1)[0][0])
    env.step(0)
    assert env.step(0)[0].tolist() == [tag, 0, tag, 1, tag, 2]
    assert env.observation_space.shape == (6,)


def test_hidden_numbers() -> None:
    plain, hidden = (make(EnvConfig(id="CartPole-v1", hide=hide)) for hide in ((), (3, 1)))
    assert hidden.reset(seed=3)[0].tolist() == plain.reset(seed=3)[0][[0, 2]].tolist()
    assert hidden.step(1)[0].tolist() == plain.step(1)[0][[0, 2]].tolist()
    assert hidden.observation_space == spaces.Box(
        plain.observation_space.low[[0, 2]],  # type: ignore[attr-defined]
        plain.observation_space.high[[0, 2]],  # type: ignore[attr-defined]
    )
    assert probe(EnvConfig(id="Pendulum-v1", hide=(2,), frame_stack=4)).obs.shape == (8,)


def test_what_does_not_fit_its_space_is_not_hidden() -> None:
    env = make(EnvConfig(id="worlds:Troubled", kwargs={"trouble": "long obs", "at": 1}, hide=(0,)))
    env.reset()
    with pytest.raises(BadObservation, match=r"shape \(3,\)"):
        env.step(0)


# -- a picture among other things -------------------------------------------------------------------------


def test_the_image_is_taken_out_of_a_dict() -> None:
    for images in (["eye"], ["depth", "screen"]):
        env = view(Rich(*images), View(frame_stack=2))
        assert env.observation_space == spaces.Box(0, 255, (2, 3, 2), np.uint8)
        env.reset()
        assert env.step(0)[0][0, 0].tolist() == [0, 1]
    for images in ([], ["left", "right"]):
        with pytest.raises(ConfigError, match=f"one image is wanted .* has {len(images)}"):
            view(Rich(*images), View(resize=(1, 1)))


def test_its_mask_goes_along() -> None:
    env = view(Rich("eye", masked=True), View(pick=True))
    assert env.reset()[1]["action_mask"].tolist() == [1, 0, 1]
    assert env.step(0)[4]["action_mask"].tolist() == [1, 0, 1]


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "knobs", "words"),
    [
        ("CartPole-v1", {"grayscale": True}, r"env\.grayscale: observations are Box.*not images"),
        ("CartPole-v1", {"resize": (4, 4)}, r"env\.resize: observations are Box.*not images"),
        ("CartPole-v1", {"hide": (4, 1)}, r"env\.hide = \[4, 1\].*index 3, not \[4\]"),
        ("CartPole-v1", {"hide": (0, 1, 2, 3)}, r"nothing would be left"),
        ("FrozenLake-v1", {"hide": (0,)}, r"env\.hide: observations are Discrete"),
        ("FrozenLake-v1", {"frame_stack": 2}, r"env\.frame_stack: observations are Discrete"),
        ("worlds:Masked", {"frame_skip": 2}, r"env\.frame_skip: the environment masks actions"),
        ("worlds:Masked", {"noop_max": 2}, r"env\.noop_max: .*"),
    ],
)
def test_knobs_that_do_not_fit(id: str, knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        probe(EnvConfig(id=id, **knobs))


def test_masks_in_a_dict_do_not_fit_either() -> None:
    with pytest.raises(ConfigError, match=r"env\.frame_skip"):
        probe(EnvConfig(id="worlds:Masked", kwargs={"in_dict": True}, frame_skip=2))


def test_images_with_strange_channels_have_no_luminance() -> None:
    with pytest.raises(ConfigError, match=r"\(2, 2, 5\), expected 1 or 3 channels"):
        seen_of(np.zeros((2, 2, 5), np.uint8), grayscale=True)


# -- the games themselves ---------------------------------------------------------------------------------

CLASSIC: dict[str, Any] = {"frame_skip": 4, "grayscale": True, "resize": (84, 84), "frame_stack": 4}


def played(config: EnvConfig, steps: int, seed: int = 5) -> tuple[list[Any], list[float]]:
    """All observations and rewards under actions that depend on the seed alone."""
    env = bare(make(config)).env
    env.action_space.seed(seed)
    images, rewards = [env.reset(seed=seed)[0]], []
    for _ in range(steps):
        obs, reward, ended, cut, _ = env.step(env.action_space.sample())
        assert env.observation_space.contains(obs)
        images.append(obs)
        rewards.append(float(reward))
        if ended or cut:
            images.append(env.reset()[0])
    env.close()
    return images, rewards


def same(one: tuple[list[Any], list[float]], other: tuple[list[Any], list[float]]) -> bool:
    return one[1] == other[1] and all(map(np.array_equal, one[0], other[0]))


def test_pong(need: Need) -> None:
    need("ale_py", "atari")
    found = probe(EnvConfig(id="ALE/Pong-v5", **CLASSIC))
    assert (found.obs.shape, found.obs.dtype, found.action.sizes) == ((84, 84, 4), "uint8", (6,))
    assert probe(EnvConfig(id="ALE/Pong-v5")).obs.shape == (210, 160, 3)
    assert probe(EnvConfig(id="ALE/Pong-v5", kwargs={"obs_type": "ram"}, frame_skip=4)).obs.shape == (128,)


def test_pong_repeats(need: Need) -> None:
    need("ale_py", "atari")
    config = EnvConfig(id="ALE/Pong-v5", noop_max=30, **CLASSIC)
    first, again = played(config, 60), played(config, 60)
    assert same(first, again)
    assert not same(first, played(config, 60, seed=6))


@pytest.mark.parametrize("obs_type", ["grayscale", "rgb", "ram"])
def test_pong_is_skipped_as_frame_by_frame(need: Need, obs_type: str) -> None:
    need("ale_py", "atari")
    skipped = make(EnvConfig(id="ALE/Pong-v5", kwargs={"obs_type": obs_type}, frame_skip=4))
    frames = make(EnvConfig(id="ALE/Pong-v5", kwargs={"obs_type": obs_type, "frameskip": 1}))
    skipped.reset(seed=2)
    frames.reset(seed=2)
    points = 0.0
    for t in range(200):
        obs, reward, *_ = skipped.step(t % 6)
        last = [frames.step(t % 6) for _ in range(4)]
        merged = last[3][0] if obs_type == "ram" else np.maximum(last[2][0], last[3][0])
        assert (obs == merged).all()
        assert reward == sum(float(step[1]) for step in last)
        points += abs(float(reward))
    assert points > 0


def test_two_ways_to_say_the_same_thing(need: Need) -> None:
    need("ale_py", "atari")
    with pytest.raises(ConfigError, match=r"env\.frame_skip and env\.kwargs\.frameskip"):
        make(EnvConfig(id="ALE/Pong-v5", kwargs={"frameskip": 2}, frame_skip=4))


def test_a_rom_that_is_not_there(need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("ale_py", "atari")
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"lacks its ROM .*pip install --force-reinstall ale-py"):
        make(EnvConfig(id="ALE/Pong-v5"))


def test_doom(need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("vizdoom", "doom")
    monkeypatch.chdir(tmp_path)
    assert probe(EnvConfig(id="VizdoomBasic-v1")).obs.shape == (240, 320, 3)
    config = EnvConfig(id="VizdoomBasic-v1", **{**CLASSIC, "resize": (60, 80)})
    assert probe(config).obs.shape == (60, 80, 4)
    first = played(config, 30)
    assert same(first, played(config, 30))
    assert first[0][0].any()
    assert len({image.tobytes() for image in first[0]}) > 15
    assert [path.name for path in tmp_path.iterdir()] == ["_vizdoom"]


def test_car_racing(need: Need) -> None:
    need("Box2D", "box2d")
    config = EnvConfig(id="CarRacing-v3", **CLASSIC)
    assert probe(config).obs.shape == (84, 84, 4)
    assert same(played(config, 4), played(config, 4))
