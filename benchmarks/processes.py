"""Child processes of a benchmark: started under the same conditions, listened to, and gone when it ends.

Also the few things both benchmarks ask of Regatta's own command.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

# For every process alike: one thread per BLAS and OpenMP library (PyTorch with two threads on two cores is ten
# times slower than with one), and no accelerator. XLA's own threads are left as each program sets them: Regatta
# turns them off for itself, and SBX tends to be slower when they are turned off for it.
CONDITIONS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}
GRACE_S = 5.0  # between asking a child to end and ending it
TAIL = 15  # lines of a failed child's last words


class ChildFailed(Exception):
    """A child process ended with an error, or was told to end."""


class Finished(NamedTuple):
    stdout: str
    seconds: float  # from the start of the process to its exit

    def json(self) -> Any:
        """What the last line of its output says."""
        lines = self.stdout.strip().splitlines()
        if not lines:
            raise ChildFailed("it ended well but printed nothing")
        return json.loads(lines[-1])


class Children:
    """Starts processes in a folder of their own; leaving the context ends them and removes the folder.

    They work in that folder because some libraries (MuJoCo) leave log files where they are started.
    """

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="regatta-bench-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self._running: set[subprocess.Popen[str]] = set()
        self._closing = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        # Also under nohup and on SIGTERM, an interrupt must reach the clean-up below.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._temporary.cleanup()

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Finished:
        """Carry the command out; `on_line` sees each line it writes to stderr. ChildFailed unless it exits with 0."""
        last_words: deque[str] = deque(maxlen=TAIL)
        with tempfile.TemporaryFile("w+", dir=self.folder) as stdout:
            started = time.perf_counter()
            child = self._start(command, env or {}, stdout)
            try:
                assert child.stderr is not None
                for line in child.stderr:
                    last_words.append(line.rstrip())
                    if on_line is not None:
                        on_line(line.rstrip())
                code = child.wait()
                seconds = time.perf_counter() - started
            finally:
                _end(child)
                with self._lock:
                    self._running.discard(child)
            if code != 0:
                raise ChildFailed("\n".join([f"exit code {code}: {' '.join(command)}", *last_words]))
            stdout.seek(0)
            return Finished(stdout.read(), seconds)

    def _start(self, command: Sequence[str], env: Mapping[str, str], stdout: Any) -> subprocess.Popen[str]:
        with self._lock:
            if self._closing:
                raise ChildFailed("the benchmark is ending")
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **CONDITIONS, **env},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # its own children end with it, and a Ctrl-C is ours to pass on
            )
            self._running.add(child)
            return child

    def stop(self) -> None:
        """End what is running and start nothing more."""
        with self._lock:
            self._closing = True
            running = list(self._running)
        for child in running:
            _signal(child, signal.SIGTERM)
        for child in running:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is not None:
        return
    _signal(child, signal.SIGTERM)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _signal(child, signal.SIGKILL)
        child.wait()


def _signal(child: subprocess.Popen[str], number: signal.Signals) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        pass


# -- Regatta ------------------------------------------------------------------------------------------------


def regatta_command() -> list[str]:
    """The `regatta` installed beside this interpreter."""
    found = shutil.which("regatta", path=str(Path(sys.executable).parent))
    return [found] if found else [sys.executable, "-m", "regatta.cli.main"]


def train_command(words: Sequence[str], *, workers: str, seed: int, store: Path) -> list[str]:
    """The command a user would type for these settings."""
    options = ["--workers", workers, "--seed", str(seed), "--store", str(store), "--json"]
    return [*regatta_command(), "train", *words, *options]


def facts(children: Children, run: str, store: Path) -> dict[str, Any]:
    """What the run's record says of the machine and the versions it was made with."""
    shown = children.run([*regatta_command(), "show", run, "--store", str(store), "--json"]).json()
    return {name: shown[name] for name in ("cpu", "platform", "versions")}


def evaluate(children: Children, run: str, store: Path, episodes: int) -> float:
    """Mean return of the run's final policy."""
    options = ["--episodes", str(episodes), "--store", str(store), "--json"]
    figures = children.run([*regatta_command(), "evaluate", run, *options]).json()
    return float(figures["return_mean"])


# -- tables -------------------------------------------------------------------------------------------------


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that reads well in a terminal and in a page. Columns that begin with '>' stand to the right."""
    right = [name.startswith(">") for name in columns]
    names = [name.lstrip(">") for name in columns]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        put = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)]
        return f"| {' | '.join(put)} |"

    rule = [("-" * (w - 1) + ":") if r else "-" * w for w, r in zip(widths, right, strict=True)]
    return "\n".join([line(names), line(rule), *map(line, rows)])
