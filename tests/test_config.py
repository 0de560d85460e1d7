"""Presets, files, overrides, their faults, and the way through JSON."""

from __future__ import annotations

import string
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import gymnasium
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regatta import config as configs
from regatta.algorithms.ppo import PPOConfig
from regatta.config import ALGORITHMS, Config, from_json, knobs, preset_names, resolve, show, to_json
from regatta.errors import ConfigError
from regatta.rollout.envs import EnvConfig

PRESETS = preset_names()


def faults(preset: str | None = "cartpole-ppo", *overrides: str, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(preset, file=file, overrides=overrides)
    return str(caught.value).splitlines()


def fault(*overrides: str) -> str:
    (line,) = faults("cartpole-ppo", *overrides)
    return line


# ---- presets


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_short_sparse_and_described(name: str) -> None:
    text = (resources.files("regatta") / "presets" / f"{name}.toml").read_text()
    assert len(text.splitlines()) < 30
    assert text.startswith("# ")
    assert "\n# Settings: " in text, "the source of the settings"
    assert len(configs.preset_description(name)) < 90
    given = {f"{section}.{key}" for section, table in configs.preset_text(name).items() for key in table} - {
        "algorithm.name"
    }
    assert given == {knob.path for knob in knobs(resolve(name)) if knob.changed}, "only what differs"


@pytest.mark.parametrize("name", PRESETS)
def test_preset_resolves_to_a_registered_environment_and_back_from_json(name: str) -> None:
    config = resolve(name)
    assert config.preset == name
    assert config.env.id in gymnasium.registry or config.env.id.startswith(("ALE/", "Vizdoom", "go9x9"))
    assert 4 <= config.run.steps / config.run.checkpoint_every <= 6
    assert from_json(to_json(config)) == config
    assert to_json(from_json(to_json(config))) == to_json(config)


def test_presets_are_all_there() -> None:
    wanted = "acrobot cartpole mountaincar mountaincar-continuous pendulum lander lander-continuous halfcheetah"
    for name in [*wanted.split(), "hopper", "reacher"]:
        assert f"{name}-ppo" in PRESETS
    coach = resolve("cartpole-ppo-coach")
    ppo = coach.algorithm
    assert (ppo.clip, ppo.gae_lambda, ppo.gamma, ppo.lr, ppo.epochs) == (0.2, 0.95, 0.99, 3e-4, 10)
    assert (ppo.minibatch, ppo.normalize_obs, coach.network.shared) == (64, True, None)
    assert (coach.network.sizes, coach.network.activation) == ((64, 64), "tanh")
    assert coach.env.lanes * coach.env.lane_envs * ppo.rollout_steps == 2048


def test_every_knob_is_described_once_and_shown() -> None:
    listed = knobs(resolve("cartpole-ppo", overrides=["env.kwargs.render_fps=30"]))
    assert len({knob.path for knob in listed}) == len(listed)
    for knob in listed:
        assert knob.doc, knob.path
        assert knob.type != "any value", knob.path
    by_path = {knob.path: knob for knob in listed}
    assert by_path["algorithm.epochs"].value == 20
    assert by_path["algorithm.epochs"].default == 10
    assert by_path["algorithm.epochs"].changed
    assert not by_path["algorithm.clip"].changed
    assert by_path["env.lanes"].type == "integer"
    assert by_path["env.lanes"].valid.startswith(">= 1")
    assert by_path["env.max_episode_steps"].type == "integer or none"
    assert by_path["network.activation"].valid == 'one of "elu", "relu", "silu", "tanh"'
    assert by_path["network.sizes"].type == "list of integer"
    assert by_path["env.kwargs"].changed
    assert by_path["algorithm.name"].value == "ppo"


def test_algorithm_names_are_their_tags() -> None:
    for name, struct in configs.ALGORITHMS.items():
        assert struct.__struct_config__.tag == name
        assert name not in PRESETS


def test_config_loads_without_jax() -> None:
    code = "import sys, regatta.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- layers


def test_an_algorithm_by_name_takes_its_defaults() -> None:
    config = resolve("ppo", overrides=["env.id=Acrobot-v1"])
    assert config.preset == "ppo"
    assert config.algorithm == PPOConfig()
    assert faults("ppo") == ["env.id is not set: add env.id=..., as in env.id=CartPole-v1"]


def test_overrides_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '\ufeffpreset = "cartpole-ppo"\n[algorithm]\nlr = 1\nepochs = 7\n[stop]\nreturn_mean = "none"\n'
        "[env.kwargs]\na = {x = 1, y = 2}\nb = 1\n"
    )
    config = resolve(file=file, overrides=["algorithm.epochs=8", "env.kwargs.a.y=3", "env.kwargs.c.d=4"], seed=5)
    assert config.preset == "cartpole-ppo"
    assert (config.algorithm.lr, config.algorithm.epochs, config.algorithm.gamma) == (1.0, 8, 0.98)
    assert isinstance(config.algorithm.lr, float)
    assert config.env.kwargs == {"a": {"x": 1, "y": 3}, "b": 1, "c": {"d": 4}}
    assert config.run.seed == 5
    assert resolve("cartpole-ppo", file=file).algorithm.epochs == 7
    assert resolve(file=file, overrides=["env.kwargs={}"]).env.kwargs == {}
    assert resolve("cartpole-ppo", overrides=["run.seed=1", "run.seed=2"]).run.seed == 2


def test_a_file_without_a_preset_names_its_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[env]\nid = "Acrobot-v1"\n')
    assert faults(None, file=file) == [f"algorithm.name is not set: expected one of {', '.join(ALGORITHMS)}"]
    file.write_text('[env]\nid = "Acrobot-v1"\n[algorithm]\nname = "ppo"\n')
    assert resolve(file=file).preset == ""


@pytest.mark.parametrize(
    ("typed", "path", "value"),
    [
        ("run.steps=1e6", "run.steps", 1_000_000),
        ("run.steps=1_000_000", "run.steps", 1_000_000),
        ("run.steps = 300000", "run.steps", 300_000),
        ("algorithm.lr=3e-4", "algorithm.lr", 3e-4),
        ("algorithm.lr=.001", "algorithm.lr", 0.001),
        ("algorithm.lr=1", "algorithm.lr", 1.0),
        ("algorithm.normalize_obs=true", "algorithm.normalize_obs", True),
        ("algorithm.target_kl=0.02", "algorithm.target_kl", 0.02),
        ("algorithm.target_kl=none", "algorithm.target_kl", None),
        ("algorithm.staleness=0", "algorithm.staleness", 0),
        ("network.sizes=[32, 1.6e1]", "network.sizes", (32, 16)),
        ("network.activation=relu", "network.activation", "relu"),
        ('network.activation="relu"', "network.activation", "relu"),
        ("env.id=ALE/Pong-v5", "env.id", "ALE/Pong-v5"),
        ("env.id=my.module:make", "env.id", "my.module:make"),
        ("env.id=2048", "env.id", "2048"),
        ("env.id=none", "env.id", "none"),
        ("env.id=a=b#c", "env.id", "a=b#c"),
        ("env.kwargs.gravity=9.8", "env.kwargs", {"gravity": 9.8}),
        ("env.kwargs.mode=none", "env.kwargs", {"mode": None}),
        ("env.kwargs.mode='none'", "env.kwargs", {"mode": "none"}),
        ("env.kwargs.mode=human", "env.kwargs", {"mode": "human"}),
        ("env.kwargs={a = [1, 2.5, 'x'], b = false}", "env.kwargs", {"a": [1, 2.5, "x"], "b": False}),
    ],
)
def test_override_values(typed: str, path: str, value: object) -> None:
    (found,) = (knob.value for knob in knobs(resolve("cartpole-ppo", overrides=[typed])) if knob.path == path)
    assert found == value
    assert type(found) is type(value)


# ---- faults


def test_unknown_presets() -> None:
    assert faults("cartpole-pp0") == [
        "unknown preset 'cartpole-pp0'; did you mean 'cartpole-ppo'? `regatta presets` lists all"
    ]
    assert faults("zzz") == ["unknown preset 'zzz'; `regatta presets` lists all"]
    assert "given with --config" in faults("mine.toml")[0]
    assert "unknown preset" in faults("../presets/cartpole-ppo")[0]
    assert faults(None)[0].startswith("no preset: ")


def test_unknown_keys_name_the_nearest_and_the_valid() -> None:
    line = fault("algorithm.epoch=3")
    assert line.startswith("unknown key 'algorithm.epoch'; did you mean 'algorithm.epochs'? valid in algorithm: ")
    assert "gae_lambda" in line
    assert fault("algo.lr=1").startswith("unknown key 'algo.lr'; did you mean 'algorithm.lr'? the sections are env, ")
    assert "did you mean 'algorithm.lr'?" in fault("lr=1")
    assert "did you mean 'algorithm.lr'?" in fault("env.lr=1")
    assert "did you mean" not in fault("qqqq.zzzz=1")
    assert fault("env=1").startswith("env is a section; ")
    assert "name the preset itself" in fault("preset=x")


@pytest.mark.parametrize("text", ["", "x", "=", "=3", "algorithm..lr=1", ".lr=1", "algorithm.=1"])
def test_what_is_no_override(text: str) -> None:
    assert fault(text) == f"{text!r} is not an override; write key.path=value, as in algorithm.lr=3e-4"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("env.lanes=two", 'env.lanes = "two": expected integer, >= 1 and <= '),
        ("env.lanes=1.5", "env.lanes = 1.5: expected integer"),
        ("env.lanes=true", "env.lanes = true: expected integer"),
        ("env.lanes=0", "env.lanes = 0: expected integer, >= 1"),
        ("env.lanes=none", "env.lanes = none: expected integer"),
        ("env.lanes=", 'env.lanes = "": expected integer'),
        ("env.lanes=2 # two", 'env.lanes = "2 # two": expected integer'),
        ("env.lanes=2,", 'env.lanes = "2,": expected integer'),
        ("algorithm.lr=-1", "algorithm.lr = -1: expected number, > 0"),
        ("algorithm.lr=nan", "algorithm.lr = nan: expected number, > 0"),
        ("algorithm.lr=inf", "a finite number (default 0.0003)"),
        ("algorithm.lr=1e999", "a finite number (default 0.0003)"),
        ("algorithm.gamma=1.5", "algorithm.gamma = 1.5: expected number, > 0 and <= 1 (default 0.99)"),
        ("algorithm.gamma=0", "algorithm.gamma = 0: expected number, > 0 and <= 1"),
        ("algorithm.normalize_obs=1", "algorithm.normalize_obs = 1: expected true or false (default false)"),
        ("algorithm.normalize_obs=yes", 'algorithm.normalize_obs = "yes": expected true or false'),
        ("algorithm.staleness=2", "algorithm.staleness = 2: expected one of 0, 1 (default 1)"),
        ("algorithm.target_kl=big", 'algorithm.target_kl = "big": expected number or none'),
        ("algorithm.target_kl=-1", "algorithm.target_kl = -1: expected number or none, > 0"),
        ("algorithm.lr.x=1", "algorithm.lr = {x = 1}: expected number"),
        ("algorithm.name=pp", 'algorithm.name = "pp": expected one of ppo, trpo, sac, es, blackbox; did you mean'),
        ("algorithm.name=3", "algorithm.name = 3: expected one of ppo"),
        ("network.activation=reluu", 'expected one of "elu", "relu", "silu", "tanh"; did you mean \'relu\'?'),
        ("network.sizes=[]", "network.sizes = []: expected list of integer, each >= 1"),
        ("network.sizes=[64, 0]", "network.sizes = [64, 0]: expected list of integer, each >= 1"),
        ("network.sizes=64", "network.sizes = 64: expected list of integer"),
        ("network.sizes=[64", "network.sizes = [64: not TOML: Unclosed array"),
        ("env.id='x", "env.id = 'x: not TOML: "),
        ("env.max_episode_steps=0", "env.max_episode_steps = 0: expected integer or none, > 0"),
        ("env.kwargs=3", "env.kwargs = 3: expected table"),
        ("env.kwargs.a.b=inf", "env.kwargs.a.b = inf: expected a finite number"),
        ("env.kwargs.a=[1, nan]", "env.kwargs.a[1] = nan: expected a finite number"),
        ("env.kwargs.day=2020-01-01", "env.kwargs.day = 2020-01-01: expected a number, text, "),
        ("env.kwargs.n=9223372036854775808", "expected an integer of at most 64 bits"),
        ("env.kwargs.n=0x" + "f" * 5000, "env.kwargs.n = an integer of 20000 bits: expected"),
        ("env.kwargs.s=\udc80", 'env.kwargs.s = "\\\\udc80": expected UTF-8 text'),
        ("env.kwargs.\udc80=1", "expected UTF-8 text"),
        ("env.kwargs." + "a." * 5000 + "a=1", "expected at most 16 levels of nesting"),
        ("env.kwargs.a=" + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("run.steps=1e30", "expected integer, >= 1: an integer of at most 64 bits"),
        ("run.steps=" + "9" * 5000, "expected integer"),
        ("run.seed=-1", "run.seed = -1: expected integer, >= 0"),
    ],
)
def test_wrong_values_name_key_value_and_what_is_valid(override: str, said: str) -> None:
    line = fault(override)
    assert said in line
    line.encode()


def test_faults_between_knobs() -> None:
    product = "256 samples an iteration (env.lanes 1 x env.lane_envs 8 x algorithm.rollout_steps 32)"
    assert fault("algorithm.minibatch=100") == (
        f"algorithm.minibatch = 100: it does not divide the {product}; algorithm.minibatch=128 does"
    )
    assert fault("algorithm.minibatch=1000").endswith("algorithm.minibatch=256 does")
    assert fault("algorithm.rollout_steps=9", "algorithm.minibatch=70").endswith("algorithm.minibatch=72 does")
    assert fault("run.steps=200") == f"run.steps = 200: too few for the {product}; run.steps=256 is one iteration"
    assert "always 0" in fault("algorithm.minibatch=1")
    assert resolve("cartpole-ppo", overrides=["algorithm.minibatch=1", "algorithm.normalize_advantages=false"])
    huge = fault("algorithm.rollout_steps=1e15", "algorithm.minibatch=999999999999937", "run.steps=9e18")
    assert "does not divide" in huge
    assert configs.check(resolve("cartpole-ppo")) == []
    assert len(configs.check(msgspec.structs.replace(resolve("cartpole-ppo"), env=EnvConfig(lanes=3)))) == 2


def test_all_faults_come_at_once_each_on_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('wrong = 1\nnetwork = 3\n[algorithm]\nclip = "x"\nlrr = 1\n')
    said = faults("cartpole-ppo", "env.lanes=0", "stop.wall=3", "algorithm.minibatch=7", "run.steps=1", file=file)
    where = f" (in {file})"
    starts = [
        f"unknown key 'wrong'{where};",
        f"network = 3{where}: it is a section",
        "env.lanes = 0: expected",
        f'algorithm.clip = "x"{where}: expected number',
        f"unknown key 'algorithm.lrr'{where}; did you mean 'algorithm.lr'?",
        "unknown key 'stop.wall'; did you mean 'stop.wall_s'?",
    ]
    assert len(said) == len(starts), "checks that need env.lanes say nothing while it is wrong"
    for line, start in zip(said, starts, strict=True):
        assert line.startswith(start)
    assert len(faults("zzz", "env.lanes=0", "x", file=tmp_path / "no.toml")) == 4


def test_faults_of_the_file_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    assert faults("ppo", file=file) == [f"{file}: cannot read the config file: No such file or directory"]
    assert "cannot read the config file" in faults("ppo", file=tmp_path)[0]
    for text, said in [
        ("[env]\nid =\n", "not TOML: Invalid value (at line 2, column 5)"),
        ("[env]\n\n\nid = [1", "not TOML: Unclosed array (at line 4, the end of the file)"),
        ("[run]\nsteps = " + "9" * 5000, "not TOML: "),
        ("a = " + "[" * 5000, "nested too deeply"),
        ("preset = 3", f"preset = 3 (in {file}): expected the name of a preset"),
        ('preset = "cartpole-pp0"', "did you mean 'cartpole-ppo'?"),
    ]:
        file.write_text(text)
        (line,) = faults(None, file=file)
        assert said in line
    file.write_bytes(b"\xff\xfe")
    assert faults(None, file=file) == [f"{file}: not UTF-8 text; a config file is TOML"]
    file.write_text('preset = "lander-ppo"')
    assert "the call says 'cartpole-ppo'; give one" in faults("cartpole-ppo", file=file)[0]


# ---- through JSON

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([name for name in PRESETS if name.endswith("-ppo") and not resolve(name).env.kwargs]),
    st.floats(min_value=1e-300, max_value=10),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(1, 8192), min_size=1, max_size=4),
    st.dictionaries(st.text(string.ascii_letters, min_size=1), scalars.filter(lambda v: not isinstance(v, str))),
)
def test_round_trip_of_overrides(name: str, lr: float, seed: int, sizes: list[int], kwargs: dict[str, object]) -> None:
    inner = [f"env.kwargs.{key}={show(value)}" for key, value in kwargs.items()]
    config = resolve(name, overrides=[f"algorithm.lr={lr}", f"network.sizes={sizes}", *inner], seed=seed)
    assert (config.algorithm.lr, config.run.seed, config.network.sizes) == (lr, seed, tuple(sizes))
    assert config.env.kwargs == kwargs
    assert from_json(to_json(config)) == config


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_round_trip_of_any_environment_arguments(kwargs: dict[str, object]) -> None:
    config = resolve("cartpole-ppo")
    config = msgspec.structs.replace(config, env=msgspec.structs.replace(config.env, kwargs=kwargs))
    again = from_json(to_json(config))
    assert again == config
    assert to_json(again) == to_json(config)


def accepts(payload: bytes) -> Config | None:
    try:
        return from_json(payload)
    except ConfigError:
        return None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_bytes_give_a_config_error_or_a_config_that_holds(data: st.DataObject) -> None:
    payload = bytearray(to_json(resolve("cartpole-ppo", overrides=["env.kwargs={a = [1, 2.5]}"])))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(payload)))
        end = data.draw(st.integers(start, min(len(payload), start + 6)))
        payload[start:end] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"null", b"-1", b"1e999", b"NaN", b"{}", b"[]", b'"x"', b"1.5"])
        )
    config = accepts(bytes(payload))
    if config is not None:
        assert from_json(to_json(config)) == config
        assert configs.check(config) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_values_give_a_config_error_or_a_config_that_holds(data: st.DataObject) -> None:
    document = msgspec.json.decode(to_json(resolve("cartpole-ppo")))
    section = data.draw(st.sampled_from(sorted(document)))
    if isinstance(document[section], dict) and data.draw(st.booleans()):
        document[section][data.draw(st.sampled_from(sorted(document[section])) | st.text())] = data.draw(values)
    else:
        document[section] = data.draw(values)
    config = accepts(msgspec.json.encode(document))
    if config is not None:
        assert from_json(to_json(config)) == config


def test_json_is_strict() -> None:
    good = to_json(resolve("cartpole-ppo"))
    assert accepts(good.replace(b'"epochs":20', b'"epochs":21')) is not None
    for old, new in [
        (b'"epochs":20', b'"epochs":20.0'),
        (b'"epochs":20', b'"epochs":"20"'),
        (b'"epochs":20', b'"epochs":true'),
        (b'"epochs":20', b'"epoch":20'),
        (b'"target_kl":null', b'"target_kl":"none"'),
        (b'"name":"ppo"', b'"name":"trpo"'),
        (b'"name":"ppo",', b""),
        (b'"preset":"cartpole-ppo",', b""),
        (b'"minibatch":256', b'"minibatch":255'),
        (b"CartPole-v1", b""),
    ]:
        assert old in good
        assert accepts(good.replace(old, new)) is None, new
    for payload in (b"", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000, b'{"env":' * 100_000, good + b"x"):
        assert accepts(payload) is None
    deep = b'{"a":' * 500 + b"1" + b"}" * 500
    assert accepts(good.replace(b'"kwargs":{}', b'"kwargs":' + deep)) is None


def test_json_of_before_a_knob_existed_takes_its_default() -> None:
    good = to_json(resolve("cartpole-ppo"))
    older = good.replace(b'"target_kl":null,', b"")
    assert older != good
    assert from_json(older) == from_json(good)


def test_show_reads_back() -> None:
    for value in (True, 3, 2.5e-7, "a \"b\" 'c'", [1, [2.0, "x"]], {"a": {"b": False}}):
        assert tomllib.loads(f"v = {show(value)}")["v"] == value
    assert show(None) == "none"
