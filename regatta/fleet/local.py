"""Worker processes on this machine, each on a leash: a pipe on its stdin that the learner holds open.

When the learner dies, even of kill -9, the pipe closes; the worker notices, removes the learner's socket
folder and ends. So neither processes nor sockets outlive a run.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from regatta.errors import UsageError
from regatta.fleet.base import Exited

LEASH_ENV = "REGATTA_LEASH"  # set for workers on a leash; its value is the folder to remove at the end, or ''
TAIL_LINES = 200
GIVE_WAY = 10  # niceness; with two workers on two cores the update then keeps more than four fifths of its speed alone
_MAX_LINE_BYTES = 4096
_LEASH_LET_GO = 143  # as if by SIGTERM
_LAST_LOOK_S = 0.2


class _Process:
    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        # A session of its own: Ctrl-C in the terminal is for the learner, which stops its workers.
        self.popen = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.popen.stderr is not None
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._reader = threading.Thread(
            target=self._read, args=(self.popen.stderr,), name="regatta-stderr", daemon=True
        )
        self._reader.start()

    def _read(self, stderr: IO[bytes]) -> None:
        with stderr:
            while line := stderr.readline(_MAX_LINE_BYTES):
                self._tail.append(line)

    def kill(self) -> None:
        """The worker and whatever it started itself, such as a simulator's own processes."""
        if hasattr(os, "killpg"):
            try:
                os.killpg(self.popen.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # nobody is left; macOS says so in its own way
        else:
            self.popen.kill()

    def reap(self) -> str:
        """Let go of an exited process; what it wrote last."""
        self.popen.wait()
        # Only now: a leash let go while the learner lives would make the worker remove its socket.
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self._reader.join(timeout=0.5)  # a grandchild may hold stderr open for ever
        return b"".join(list(self._tail)).decode(errors="replace")


class LocalFleet:
    """`{name}` in `command` becomes the worker's name. `env` is added to our own environment; secrets go
    there. `cleanup` is the folder that an orphaned worker removes."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cleanup: str | None = None) -> None:
        self._command = list(command)
        self._env = {**os.environ, **env, LEASH_ENV: cleanup or ""}
        self._processes: dict[str, _Process] = {}

    def start(self, name: str) -> None:
        if name in self._processes:
            raise UsageError(f"worker {name!r} is already running; stop() or poll() it first")
        command = [part.replace("{name}", name) for part in self._command]
        try:
            self._processes[name] = _Process(command, self._env)
        except OSError as error:
            raise UsageError(f"cannot start a worker with {command[0]!r}: {error.strerror}") from error

    def pids(self) -> dict[str, int]:
        return {name: process.popen.pid for name, process in self._processes.items()}

    def poll(self) -> list[Exited]:
        exited = []
        for name, process in list(self._processes.items()):
            code = process.popen.poll()
            if code is not None:
                del self._processes[name]
                process.kill()
                exited.append(Exited(name, code, process.reap()))
        return exited

    def stop(self, name: str | None = None, grace_s: float = 1.0) -> None:
        names = [n for n in self._processes if name in (None, n)]
        processes = [self._processes.pop(n) for n in names]
        for process in processes:
            process.popen.terminate()
        deadline = time.monotonic() + grace_s
        for process in processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            process.kill()
            process.reap()


def leash() -> list[str] | None:
    """The folders to clean up when the leash is let go, or None if this process is on no leash."""
    value = os.environ.get(LEASH_ENV)
    return None if value is None else [value] if value else []


def watch_leash(cleanup: Sequence[str] = ()) -> None:
    """For a worker: end this process when the learner that started it is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        for folder in cleanup:
            if _is_ours(folder):
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(_LEASH_LET_GO)

    thread = threading.Thread(target=watch, name="regatta-leash", daemon=True)
    thread.start()
    # A broken connection may end us a moment before the leash does; the folder must still go.
    atexit.register(thread.join, _LAST_LOOK_S)


def give_way() -> None:
    """For a worker beside its learner: everyone waits for the learner, so it gets a core whenever it wants one."""
    if hasattr(os, "nice"):
        os.nice(GIVE_WAY)
    try:  # Linux shares time among sessions first; within a session of its own a worker's niceness means nothing
        Path("/proc/self/autogroup").write_text(str(GIVE_WAY))
    except OSError:
        pass


def _is_ours(folder: str) -> bool:
    """A path from the environment is not trusted further than our own temporary folders."""
    path = Path(folder)
    parents = {Path(tempfile.gettempdir()).resolve(), Path("/tmp").resolve()}
    return path.name.startswith("regatta-") and not path.is_symlink() and path.parent.resolve() in parents
