"""Bad input: the command says what is wrong and what would be right, with its exit code, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import regatta
from regatta.cli.main import _run
from regatta.errors import ConfigError, RunNotFound

TRAIN = ("train", "cartpole-ppo")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "cartpole-pp0"], ["'cartpole-pp0'", "did you mean 'cartpole-ppo'", "regatta presets"]),
        (["train"], ["no preset", "regatta presets"]),
        (["train", "ppo"], ["env.id is not set"]),
        ([*TRAIN, "algorithm.lrr=1e-3"], ["'algorithm.lrr'", "did you mean 'algorithm.lr'"]),
        ([*TRAIN, "lr=1e-3"], ["'lr'", "did you mean 'algorithm.lr'"]),
        ([*TRAIN, "algorithm.lr"], ["'algorithm.lr' is not an override", "key.path=value"]),
        ([*TRAIN, "algorithm.lr=fast"], ["algorithm.lr", "fast"]),
        ([*TRAIN, "algorithm.lr=-1"], ["algorithm.lr", "-1"]),
        ([*TRAIN, "algorithm.epochs=2.5"], ["algorithm.epochs", "2.5"]),
        ([*TRAIN, "algorithm.minibatch=100"], ["algorithm.minibatch = 100", "does not divide"]),
        ([*TRAIN, "run.steps=0"], ["run.steps", "0"]),
        ([*TRAIN, "--seed", "-1"], ["run.seed", "-1"]),
        ([*TRAIN, "env.id=CartPoleX-v1"], ["env.id", "CartPoleX"]),
        ([*TRAIN, "env.id=no_such_module:make"], ["env.id", "no_such_module"]),
        ([*TRAIN, "env.id=environments:nothing"], ["env.id", "'nothing'", "paced"]),
        ([*TRAIN, "env.id=environments:shapeless"], ["observation space", "Sequence", "valid are Box"]),
        ([*TRAIN, "env.kwargs.colour=red"], ["env.kwargs", "colour"]),
        ([*TRAIN, "--workers", "many"], ["--workers many", "'auto'"]),
        ([*TRAIN, "--workers", "-1"], ["--workers"]),
        ([*TRAIN, "--wrokers", "2"], ["--wrokers", "regatta train --help"]),
        ([*TRAIN, "--listen", "udp://127.0.0.1:5"], ["'udp'", "ipc", "tcp"]),
        ([*TRAIN, "--listen", "tcp://127.0.0.1"], ["tcp://HOST:PORT"]),
        ([*TRAIN, "--listen", "tcp://0.0.0.0:0"], ["needs a token", "--token-file"]),
        ([*TRAIN, "--listen", "tcp://*:0"], ["needs a token", "--token-file"]),
        ([*TRAIN, "--token-file", "nowhere"], ["--token-file nowhere", "No such file"]),
        ([*TRAIN, "--name", "../escape"], ["../escape"]),
        (["trian", "cartpole-ppo"], ["trian", "regatta"]),
        (["worker", "carrier-pigeon:"], ["carrier-pigeon"]),
        (["presets", "cartpole-pp0"], ["did you mean 'cartpole-ppo'"]),
        (["evaluate", "x", "--episodes", "0"], ["--episodes 0"]),
        (["evaluate", "x", "--checkpoint", "worst"], ["--checkpoint worst", "last, best"]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value, list) else None,
)
def test_bad_usage_is_64(
    args: list[str], words: list[str], store: Path, environments: None, capfd: pytest.CaptureFixture[str]
) -> None:
    option = ["--store", str(store)] if args[0] in ("train", "evaluate") else []
    assert _run([*args, *option]) == 64
    out, err = capfd.readouterr()
    assert out == ""
    for word in words:
        assert word in err, err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert not store.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('preset = "cartpole-ppo"\n[algoritm]\nlr = 1e-3\n', ["'algoritm'", "did you mean 'algorithm'"]),
        ('preset = "cartpole-ppo"\n[algorithm]\nlearning_rate = 1e-3\n', ["'algorithm.learning_rate'", "valid in"]),
        ('preset = "cartpole-ppo"\n[run]\nsteps = "many"\n', ["run.steps", "many"]),
        ('preset = "cartpole-ppo"\n[run\n', ["not TOML", "line 2"]),
        ('preset = "cartpole"\n', ["unknown preset 'cartpole'"]),
    ],
)
def test_a_config_file_with_a_typo(
    text: str, words: list[str], store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(text)
    assert _run(["train", "--config", str(file), "--store", str(store)]) == 64
    err = capfd.readouterr().err
    for word in words:
        assert word in err, err
    assert not store.exists()


def test_all_faults_are_told_at_once(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run([*TRAIN, "algorithm.lrr=1", "run.steps=no", "env.lanes=0", "--store", str(store)]) == 64
    err = capfd.readouterr().err
    for word in ("algorithm.lrr", "run.steps", "env.lanes"):
        assert word in err


def test_a_missing_config_file(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(["train", "--config", "nowhere.toml", "--store", str(store)]) == 64
    assert "nowhere.toml: cannot read the config file" in capfd.readouterr().err
    assert not store.exists()


def test_tokens_must_be_private_and_long(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef0123\n")
    file.chmod(0o644)
    options = ["--listen", "tcp://127.0.0.1:0", "--token-file", str(file), "--store", str(store)]
    assert _run([*TRAIN, *options]) == 64
    assert f"chmod 600 {file}" in capfd.readouterr().err
    file.write_text("short-secret")
    file.chmod(0o600)
    assert _run([*TRAIN, *options]) == 64
    err = capfd.readouterr().err
    assert "at least 16" in err
    assert "short-secret" not in err
    file.write_text("\n")
    assert _run([*TRAIN, *options]) == 64
    assert not store.exists()


@pytest.mark.parametrize("command", ["evaluate", "resume", "show"])
def test_a_run_that_is_not_there_is_66(command: str, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run([command, "cartpole-ppo-brisk-otter", "--store", str(store)]) == 66
    assert "no run 'cartpole-ppo-brisk-otter'" in capfd.readouterr().err
    assert _run([command, "last", "--store", str(store)]) == 66
    assert "there are no runs" in capfd.readouterr().err
    assert not store.exists()


@pytest.fixture
def damaged(store: Path) -> Path:
    """A run of which the newest checkpoint is truncated; it was interrupted, so that it can be resumed."""
    overrides = ["run.steps=4096", "run.checkpoint_every=1024", "algorithm.epochs=1"]
    regatta.train("cartpole-ppo", overrides, workers=0, store=str(store), name="r")
    newest = sorted(store.glob("r/checkpoints/*"))[-1]
    part = newest / "state.safetensors"
    part.write_bytes(part.read_bytes()[:1000])
    status = store / "r" / "status.json"
    status.write_text(status.read_text().replace('"done"', '"interrupted"'))
    return newest


def test_a_truncated_checkpoint_falls_back_to_the_one_before(
    damaged: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _run(["evaluate", "r", "--episodes", "1", "--store", str(store)]) == 0
    out, err = capfd.readouterr()
    assert "return" in out
    assert "1000 bytes" in err, err
    assert _run(["resume", "r", "--workers", "0", "--store", str(store)]) == 0
    told = "".join(capfd.readouterr())
    assert "1000 bytes" in told, told
    assert "done" in told
    assert regatta.load_run("r", store=str(store)).status().steps == 4096


def test_no_checkpoint_that_can_be_trusted_is_66(store: Path, damaged: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for part in store.glob("r/checkpoints/*/state.safetensors"):
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
    for command in ("evaluate", "resume"):
        assert _run([command, "r", "--store", str(store)]) == 66
        err = capfd.readouterr().err
        assert "its hash does not hold" in err, err


def test_a_finished_run_is_not_resumed(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    regatta.train("cartpole-ppo", ["run.steps=256"], workers=0, store=str(store), name="r")
    assert _run(["resume", "r", "--store", str(store)]) == 64
    assert "run r is done" in capfd.readouterr().err


def test_a_name_that_is_taken(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    regatta.train("cartpole-ppo", ["run.steps=256"], workers=0, store=str(store), name="r")
    assert _run([*TRAIN, "run.steps=256", "--workers", "0", "--name", "r", "--store", str(store)]) == 64
    assert "already exists" in capfd.readouterr().err


def test_python_raises_what_the_command_says(store: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'cartpole-ppo'"):
        regatta.train("cartpole-pp0", store=str(store))
    with pytest.raises(RunNotFound, match="no run 'nothing'"):
        regatta.load_run("nothing", store=str(store))
    assert not store.exists()
