"""For tests that run whole programs: `regatta` as a process, its workers, and what it listens on."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
REGATTA = (sys.executable, "-m", "regatta.cli.main")
# Four iterations of 256 steps between checkpoints, and cheap updates: what is tested here is not learning.
SMALL = ("algorithm.epochs=4", "run.checkpoint_every=1024")


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str = "") -> float:
    """Seconds until the condition held; fails after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - began


def lives(pid: int) -> bool:
    """A zombie that nobody has reaped yet is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_of(learner: int) -> dict[str, int]:
    """Pids of the worker processes a learner has started, by name."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == learner and "regatta.worker" in words and lives(int(folder.name)):
            found[words[words.index("--name") + 1]] = int(folder.name)
    return found


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass


class Command:
    """One `regatta` process. Its output goes to files, so it can be read while the process runs."""

    def __init__(self, args: tuple[str, ...], folder: Path, env: dict[str, str], cwd: Path) -> None:
        self._files = [folder / "stdout", folder / "stderr"]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.popen = subprocess.Popen(
                [*REGATTA, *args], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd
            )
        self.pid = self.popen.pid

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    @property
    def result(self) -> dict[str, Any]:
        """What `--json` printed."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def workers(self) -> dict[str, int]:
        return workers_of(self.pid)

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.popen.wait(timeout_s)

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()


def listeners(pid: int) -> list[str]:
    """Addresses, as hexadecimal text, of the TCP sockets that a process listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.append(words[1].partition(":")[0])
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Recorder:
    """A display that keeps what it was shown, and lets a test act in the learner's own thread."""

    def __init__(self, act: Callable[[Any, float], None] = lambda progress, now: None) -> None:
        self.act = act
        self.run: Any = None
        self.said: list[tuple[float, str]] = []
        self.steps: list[tuple[float, int]] = []  # when, and how many steps had been trained on
        self.by_worker: list[tuple[float, dict[str, int]]] = []

    def opened(self, run: Any) -> None:
        self.run = run

    def show(self, progress: Any) -> None:
        now = time.monotonic()
        self.steps.append((now, progress.steps))
        self.by_worker.append((now, {view.name: view.steps for view in progress.workers}))
        self.act(progress, now)

    def say(self, text: str) -> None:
        self.said.append((time.monotonic(), text))

    def first_result(self, worker: str, after: float) -> float | None:
        """When this worker's first result after that moment had come."""
        before = max((steps.get(worker, 0) for now, steps in self.by_worker if now <= after), default=0)
        return next((now for now, steps in self.by_worker if now > after and steps.get(worker, 0) > before), None)

    def longest_stall(self, begin: float, end: float) -> float:
        """The longest time in which no iteration was finished."""
        moments = [begin]
        last = max((steps for now, steps in self.steps if now <= begin), default=0)
        for now, steps in self.steps:
            if begin < now < end and steps > last:
                last = steps
                moments.append(now)
        return max(b - a for a, b in itertools.pairwise([*moments, end]))
