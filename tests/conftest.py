"""Fixtures for tests that run whole programs: they leave no process behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import TESTS, Command, lives, wait_until

Start = Callable[..., Command]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(*args, env={}, cwd=...): run `regatta ARGS`; its environment modules are those of tests/faults."""
    started: list[Command] = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def begin(*args: object, env: dict[str, str] | None = None, cwd: Path = TESTS / "faults") -> Command:
        folder = tmp_path / f"command-{len(started)}"
        folder.mkdir()
        clean = {key: value for key, value in os.environ.items() if not key.startswith("REGATTA_")}
        whole = clean | {"TMPDIR": str(temporary), "COLUMNS": "200"} | (env or {})
        started.append(Command(tuple(map(str, args)), folder, whole, cwd))
        return started[-1]

    yield begin
    for command in started:
        workers = command.workers
        command.stop()
        wait_until(lambda pids=workers: not any(map(lives, pids.values())), 5, "workers outlive their learner")


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training in this process finds tests/faults/environments.py, and so do its workers."""
    monkeypatch.chdir(TESTS / "faults")
    monkeypatch.syspath_prepend(str(TESTS / "faults"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB, to be filled."""
    path = tmp_path / "disk"
    path.mkdir()
    reason = "needs root on Linux to mount a 4 MB tmpfs: run `sudo -E pytest`"
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)
