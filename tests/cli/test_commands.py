"""What the commands print: to people, to pipes, and as JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from programs import REGATTA, SMALL

import regatta
from regatta.cli.main import _run

KEYS = [
    "run",
    "preset",
    "status",
    "steps",
    "iterations",
    "episodes",
    "return_mean",
    "wall_s",
    "steps_per_s",
    "weights_sha256",
    "workers",
    "restarts",
    "results_dropped",
]
COMMANDS = ("train", "resume", "evaluate", "presets", "runs", "show", "worker")


@pytest.mark.parametrize("args", [[], *([command] for command in COMMANDS)], ids=str)
def test_help(args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert _run([*args, "--help"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "Usage: regatta" in out
    if not args:
        for command in COMMANDS:
            assert command in out
        assert "130 interrupted" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= max(120, int(os.environ.get("COLUMNS", 120)))


def test_no_arguments_is_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert _run([]) == 0
    assert "Usage: regatta" in capfd.readouterr().out


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(["--version"]) == 0
    assert capfd.readouterr().out == f"regatta {regatta.__version__}\n"


def test_presets(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert _run(["presets"]) == 0
    out = capfd.readouterr().out
    for name in ("cartpole-ppo", "acrobot-ppo", "pendulum-ppo", "lander-ppo", "halfcheetah-ppo"):
        assert name in out
    assert _run(["presets", "cartpole-ppo"]) == 0
    out = capfd.readouterr().out
    knob = " ".join(out.partition("algorithm.rollout_steps")[2].split()[:12])
    for word in ("32", "256", "steps per environment in one iteration", ">= 1"):
        assert word in knob, knob
    for knob in ("env.id", "network.", "run.checkpoint_every", "stop.return_mean", "crew.order_timeout_s"):
        assert knob in out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("commands") / "runs"
    regatta.train("cartpole-ppo", ["run.steps=4096", *SMALL], seed=1, workers=0, store=str(store), name="first")
    return store


def test_runs_and_show(trained: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    where = ["--store", str(trained)]
    assert _run(["runs", *where]) == 0
    out = capfd.readouterr().out
    assert re.search(r"first +done +4,096", out), out
    assert _run(["runs", "--json", *where]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert (row["id"], row["status"], row["steps"]) == ("first", "done", 4096)
    assert _run(["show", "fir", *where]) == 0
    out = capfd.readouterr().out
    status = regatta.load_run("first", store=str(trained)).status()
    for word in ("done", "4,096", str(trained), status.weights_sha256 or "?", "jax", "numpy"):
        assert word in out.replace("\n", ""), word
    assert _run(["show", "last", "--json", *where]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["id"] == "first"
    assert shown["config"]["run"]["seed"] == 1
    assert shown["weights_sha256"] == status.weights_sha256


def test_runs_of_an_empty_store(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(["runs", "--store", str(store)]) == 0
    assert "regatta train cartpole-ppo" in capfd.readouterr().out
    assert not store.exists()


def test_evaluate(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["evaluate", "first", "--episodes", "3", "--store", str(trained)]
    assert _run([*options, "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert list(figures) == ["return_mean", "return_std", "length_mean", "episodes"]
    assert figures["episodes"] == 3
    assert figures["return_mean"] == figures["length_mean"] > 0  # one a step
    assert _run(options) == 0
    assert f"return {figures['return_mean']:,.1f}" in capfd.readouterr().out
    assert _run([*options, "--json", "--checkpoint", "best", "--sample"]) == 0


def test_train_json(start: Any, store: Path) -> None:
    command = start("train", "cartpole-ppo", "run.steps=4096", *SMALL, "--seed", 1, "--store", store, "--json", "-w", 2)
    assert command.wait() == 0, command.err
    (line,) = command.out.splitlines()
    result = json.loads(line)
    assert list(result) == KEYS
    assert (result["preset"], result["status"], result["steps"], result["iterations"]) == (
        "cartpole-ppo",
        "done",
        4096,
        16,
    )
    assert re.fullmatch("[0-9a-f]{64}", result["weights_sha256"])
    assert result["workers"] == 2
    assert result["steps_per_s"] > 0
    assert "4,096 steps" in command.err  # progress
    assert result["run"] in command.err
    run = regatta.load_run(store=str(store))
    assert run.facts.command[:3] == ["regatta", "train", "cartpole-ppo"]


def test_plain_lines_without_a_terminal(start: Any, store: Path) -> None:
    command = start("train", "cartpole-ppo", "run.steps=4096", *SMALL, "--store", store, "-w", 1)
    assert command.wait() == 0, command.err
    assert command.err == ""
    assert "\x1b" not in command.out
    first, *_, last = command.out.splitlines()
    assert re.fullmatch(rf"run cartpole-ppo-\w+-\w+ in {store}/\S+", first)
    assert re.search(r"(compiling|training): [\d,]+/4,096 steps \(\d+ %\), [\d,]+ steps/s, return", command.out), (
        command.out
    )
    assert re.fullmatch(r"next: regatta evaluate \S+", last)


def test_the_panel_on_a_terminal(store: Path) -> None:
    """A real pseudo-terminal of 100 x 30 characters."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")} | {
        "TERM": "xterm-256color"
    }
    args = ("train", "cartpole-ppo", "run.steps=20480", "--store", str(store), "--name", "seen", "-w", "2")
    popen = subprocess.Popen([*REGATTA, *args], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            seen += os.read(ours, 65536)
    except OSError:  # EIO: the other side is closed
        pass
    finally:
        os.close(ours)
        popen.kill() if popen.poll() is None and time.monotonic() >= deadline else None
    assert popen.wait(10) == 0
    text = seen.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert text != plain
    for word in ("steps/s", "return", "length", "worker-0", "worker-1", "learner", "/ 20,480 steps", "seen"):
        assert word in plain, word
    assert any(bar in plain for bar in "▁▂▃▄▅▆▇█")
    end = plain.rpartition("done seen")[2]
    assert "next: regatta evaluate seen" in end
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is back
