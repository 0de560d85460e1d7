"""Making environments, and saying clearly why one cannot be made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium import wrappers

from regatta.errors import ConfigError, EnvError, UsageError
from regatta.policies.distributions import ActionSpec
from regatta.policies.networks import ObsSpec
from regatta.rollout.envs import EnvConfig, bare, close, make, probe, refuse_foreign
from regatta.rollout.spaces import Interface

HOME_MADE = """
import gymnasium

LIMIT = 3

def make(size=4, **kwargs):
    return gymnasium.make("CartPole-v1", **kwargs)

def make_nothing():
    return 42

def explode():
    raise OSError("no such arena")

def _hidden():
    pass

gymnasium.register("HomeMade-v0", entry_point=make)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with home-made environments, where the user stands."""
    (tmp_path / "home_made.py").write_text(HOME_MADE)
    (tmp_path / "needs_more.py").write_text("import a_library_nobody_has")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("home_made", "needs_more"):
        sys.modules.pop(name, None)
    gymnasium.registry.pop("HomeMade-v0", None)


@pytest.fixture
def registered() -> Iterator[None]:
    def missing(text: str) -> Any:
        raise gymnasium.error.DependencyNotInstalled(text)

    gymnasium.register("Missing-v0", entry_point=missing)
    yield
    gymnasium.registry.pop("Missing-v0")


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("CartPol-v1", r"unknown environment 'CartPol-v1': .*Did you mean: `CartPole`"),
        ("CartPole-v9", r"unknown environment 'CartPole-v9': .*`v1`"),
        ("Nowhere/CartPole-v1", r"unknown environment 'Nowhere/CartPole-v1'"),
        ("", "env.id"),
        ("what is this?", "env.id: cannot make 'what is this\\?'"),
    ],
)
def test_unknown_ids(id: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(EnvConfig(id=id))


@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
def test_environments_that_moved_elsewhere() -> None:
    with pytest.raises(ConfigError, match="gymnasium-robotics"):
        make(EnvConfig(id="Humanoid-v2"))


def test_kwargs_that_do_not_fit(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.kwargs: 'CartPole-v1' does not take {'speed': 3}.*'speed'"):
        make(EnvConfig(id="CartPole-v1", kwargs={"speed": 3}))
    with pytest.raises(ConfigError, match=r"env\.kwargs: 'home_made:make_nothing' does not take {'speed': 3}"):
        make(EnvConfig(id="home_made:make_nothing", kwargs={"speed": 3}))


@pytest.mark.parametrize(
    ("text", "extra"),
    [
        ("MuJoCo is not installed, run `pip install gymnasium[mujoco]`", "regatta-rl[mujoco]"),
        ("Box2D is not installed, run `pip install gymnasium[box2d]`", "regatta-rl[box2d]"),
        ("Stockfish is not installed", "Stockfish is not installed"),
    ],
)
def test_a_missing_part_says_how_to_get_it(registered: None, text: str, extra: str) -> None:
    with pytest.raises(ConfigError, match="needs a part that is not installed") as refused:
        make(EnvConfig(id="Missing-v0", kwargs={"text": text}))
    assert extra in str(refused.value)


@pytest.mark.parametrize(
    ("id", "module", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "regatta-rl[atari]"),
        ("VizdoomBasic-v1", "vizdoom.gymnasium_wrapper", "regatta-rl[doom]"),
    ],
)
def test_a_missing_package_says_how_to_get_it(
    id: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match="needs a package") as refused:
        make(EnvConfig(id=id))
    assert f"pip install '{extra}'" in str(refused.value)


@pytest.mark.parametrize(
    ("knobs", "fault"),
    [
        ({"frame_skip": 0}, "frame_skip"),
        ({"frame_stack": 0}, "frame_stack"),
        ({"noop_max": -1}, "noop_max"),
        ({"resize": [84]}, "resize"),
        ({"resize": [84, 84, 3]}, "resize"),
        ({"resize": [84, 0]}, "resize"),
        ({"hide": [-1]}, "hide"),
    ],
)
def test_knobs_out_of_range(knobs: dict[str, Any], fault: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=fault):
        msgspec.convert({"id": "CartPole-v1", **knobs}, EnvConfig)


def test_knobs_survive_the_way_through_json() -> None:
    config = EnvConfig(id="ALE/Pong-v5", frame_skip=4, grayscale=True, resize=(84, 84), hide=(1, 3), noop_max=30)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EnvConfig) == config


def test_a_function_of_a_module_here(folder: Path) -> None:
    env = make(EnvConfig(id="home_made:make", kwargs={"size": 9}))
    assert env.unwrapped.spec is not None
    assert env.unwrapped.spec.id == "CartPole-v1"
    env.close()


def test_an_id_that_a_module_here_registers(folder: Path) -> None:
    make(EnvConfig(id="home_made:HomeMade-v0")).close()
    with pytest.raises(ConfigError, match="unknown environment 'home_made:HomeMad-v0'"):
        make(EnvConfig(id="home_made:HomeMad-v0"))


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("away_made:make", "no module 'away_made' in {folder}"),
        ("home_made.sub:make", "no module 'home_made.sub'"),
        ("home_made:mak", "'home_made' has no callable 'mak'; it has make, make_nothing, explode$"),
        ("home_made:LIMIT", "no callable 'LIMIT'"),
        ("home_made:make_nothing", "returned int, not a gymnasium.Env"),
    ],
)
def test_functions_that_are_not_there(folder: Path, id: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.format(folder=folder)):
        make(EnvConfig(id=id))


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("needs_more:make", "while it is made: ModuleNotFoundError: .*a_library_nobody_has"),
        ("home_made:explode", "while it is made: OSError: no such arena"),
        (":make", "while it is made"),
    ],
)
def test_what_fails_while_it_is_made(folder: Path, id: str, words: str) -> None:
    with pytest.raises(EnvError, match=words):
        probe(EnvConfig(id=id))


def test_time_limits(folder: Path) -> None:
    def limit(**knobs: Any) -> int | None:
        env = make(EnvConfig(**knobs))
        stepper = bare(env)
        env.close()
        return stepper.limit

    assert limit(id="CartPole-v1") == 500
    assert limit(id="CartPole-v1", max_episode_steps=7) == 7
    assert limit(id="CartPole-v1", max_episode_steps=900) == 900
    assert limit(id="home_made:make") == 500
    assert limit(id="home_made:make", max_episode_steps=7) == 7
    assert limit(id="worlds:Counting") is None
    with pytest.raises(msgspec.ValidationError, match="max_episode_steps"):
        msgspec.convert({"id": "CartPole-v1", "max_episode_steps": 0}, EnvConfig)


def test_bare_peels_the_outer_wrappers_and_keeps_the_tightest_limit() -> None:
    core = gymnasium.make("CartPole-v1").unwrapped
    env = wrappers.TimeLimit(wrappers.OrderEnforcing(wrappers.TimeLimit(core, 9)), 20)
    assert bare(env).env is core
    assert bare(env).limit == 9
    assert bare(wrappers.TimeLimit(env, 4)).limit == 4
    assert bare(core).limit is None


def test_bare_stops_at_wrappers_that_do_something() -> None:
    core = gymnasium.make("CartPole-v1").unwrapped
    scaled = wrappers.TransformReward(wrappers.TimeLimit(core, 9), lambda r: 2 * float(r))
    assert bare(wrappers.TimeLimit(scaled, 20)).env is scaled
    assert bare(wrappers.TimeLimit(scaled, 20)).limit == 20


@pytest.mark.parametrize(
    ("config", "interface"),
    [
        (EnvConfig(id="CartPole-v1"), Interface(ObsSpec((4,)), ActionSpec("discrete", (2,)))),
        (EnvConfig(id="Pendulum-v1"), Interface(ObsSpec((3,)), ActionSpec("box", (1,)))),
        (EnvConfig(id="worlds:Masked"), Interface(ObsSpec((2,)), ActionSpec("discrete", (6,), True))),
        (
            EnvConfig(id="worlds:Masked", kwargs={"in_dict": True}),
            Interface(ObsSpec((2,)), ActionSpec("discrete", (6,), True)),
        ),
        (
            EnvConfig(id="worlds:Masked", kwargs={"sizes": [2, 5]}),
            Interface(ObsSpec((2,)), ActionSpec("multidiscrete", (2, 5), True)),
        ),
        (
            EnvConfig(id="worlds:Troubled", kwargs={"trouble": "close", "at": -1}),
            Interface(ObsSpec((2,)), ActionSpec("discrete", (2,))),
        ),
    ],
)
def test_probe(config: EnvConfig, interface: Interface) -> None:
    assert probe(config) == interface


@pytest.mark.parametrize(
    ("trouble", "at", "words"),
    [
        ("raise", 0, "RuntimeError: the wheel came off"),
        ("raise", 3, "RuntimeError: the wheel came off"),
        ("long obs", 0, r"BadObservation: observation has shape \(3,\)"),
        ("long obs", 3, r"BadObservation: observation has shape \(3,\)"),
        ("object obs", 1, "BadObservation: observation has dtype object"),
    ],
)
def test_probe_says_what_fails(trouble: str, at: int, words: str) -> None:
    with pytest.raises(EnvError, match=f"fails on its first steps: {words}"):
        probe(EnvConfig(id="worlds:Troubled", kwargs={"trouble": trouble, "at": at}))


def test_probe_refuses_unsupported_spaces() -> None:
    with pytest.raises(ConfigError, match="observation space Tuple"):
        probe(EnvConfig(id="Blackjack-v1"))


def test_close_never_fails() -> None:
    class Stubborn(gymnasium.Env[np.ndarray[Any, Any], int]):
        def close(self) -> None:
            raise OSError("no")

    close(Stubborn())


# -- what a learner may ask of a worker -------------------------------------------------------------------


@pytest.mark.parametrize(
    "env_id",
    [
        "os:system",
        "subprocess:run",
        "numpy:load",
        "gymnasium.envs:registration",
        "os:X-v0",
        "Vizdoom:system",
        "ALE/os:system",
        "envpool.python:X",
    ],
)
def test_modules_from_elsewhere_are_refused(env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--allow"):
        refuse_foreign(EnvConfig(id=env_id), [])


def test_own_allowed_and_registered_environments_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "package").mkdir()
    for env_id in ("CartPole-v1", "mine:make", "package.inner:make", "elsewhere.inner:make"):
        refuse_foreign(EnvConfig(id=env_id), ["elsewhere"])
    for env_id in ("ALE/Pong-v5", "VizdoomBasic-v1", "go9x9", "envpool:CartPole-v1"):
        refuse_foreign(EnvConfig(id=env_id, kwargs={"level": 3, "fast": True}), [])


@pytest.mark.parametrize(
    "kwargs", [{"vizdoom_path": "/bin/sh"}, {"game_args": ["+exec", "x"]}, {"config_file": {"a": "b"}}]
)
def test_a_learner_cannot_name_the_program_that_is_doom(kwargs: dict[str, Any]) -> None:
    """ViZDoom's arguments may say where its engine lies."""
    config = EnvConfig(id="VizdoomBasic-v1", kwargs={"screen_resolution": "RES_160X120", **kwargs})
    with pytest.raises(UsageError, match=f"{next(iter(kwargs))} is .*--allow vizdoom"):
        refuse_foreign(config, [])
    refuse_foreign(config, ["vizdoom"])
