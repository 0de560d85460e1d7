"""Real processes: started, stopped, crashed, orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from regatta.errors import UsageError
from regatta.fleet.base import Exited
from regatta.fleet.local import LEASH_ENV, TAIL_LINES, LocalFleet, leash

PYTHON = [sys.executable, "-c"]
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def fleets() -> Iterator[Callable[..., LocalFleet]]:
    made: list[LocalFleet] = []

    def make(code: str, *args: str, env: dict[str, str] | None = None, cleanup: str | None = None) -> LocalFleet:
        made.append(LocalFleet([*PYTHON, code, *args], env or {}, cleanup))
        return made[-1]

    yield make
    for fleet in made:
        fleet.stop(grace_s=0.0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def exits(fleet: LocalFleet, count: int = 1) -> list[Exited]:
    found: list[Exited] = []
    deadline = time.monotonic() + 10.0
    while len(found) < count:
        assert time.monotonic() < deadline
        found += fleet.poll()
        time.sleep(0.02)
    return found


def test_a_crash_is_reported_once_with_its_traceback(fleets: Callable[..., LocalFleet]) -> None:
    fleet = fleets("import sys; print('on stdout'); 1 / 0")
    fleet.start("w0")
    [exited] = exits(fleet)
    assert (exited.name, exited.code) == ("w0", 1)
    assert "ZeroDivisionError" in exited.stderr_tail
    assert "on stdout" not in exited.stderr_tail
    assert fleet.poll() == []
    assert fleet.pids() == {}


def test_the_tail_is_bounded(fleets: Callable[..., LocalFleet]) -> None:
    fleet = fleets(
        "import sys\nfor n in range(5000): print('line', n, file=sys.stderr)\nprint('x' * 10**6, file=sys.stderr)"
    )
    fleet.start("w0")
    [exited] = exits(fleet)
    assert len(exited.stderr_tail) <= TAIL_LINES * 4096
    assert exited.stderr_tail.endswith("x\n")


def test_a_signal_shows_in_the_code(fleets: Callable[..., LocalFleet]) -> None:
    fleet = fleets(SLEEP)
    fleet.start("w0")
    os.kill(fleet.pids()["w0"], signal.SIGKILL)
    assert exits(fleet)[0].code == -signal.SIGKILL


def test_name_environment_and_leash_reach_the_worker(fleets: Callable[..., LocalFleet], tmp_path: Path) -> None:
    code = "import os, sys; open(sys.argv[1], 'w').write(sys.argv[2] + os.environ['SECRET'] + os.environ['PATH'])"
    fleet = fleets(code, str(tmp_path / "{name}"), "name={name} ", env={"SECRET": "s3cret "})
    fleet.start("w7")
    assert exits(fleet)[0].code == 0
    assert (tmp_path / "w7").read_text() == f"name=w7 s3cret {os.environ['PATH']}"


def test_stop_one_then_all_and_a_name_may_be_used_again(fleets: Callable[..., LocalFleet]) -> None:
    fleet = fleets(SLEEP)
    for name in ("a", "b", "c"):
        fleet.start(name)
    with pytest.raises(UsageError, match="already running"):
        fleet.start("a")
    pids = fleet.pids()
    assert sorted(pids) == ["a", "b", "c"]
    fleet.stop("a")
    assert not is_running(pids["a"])
    assert is_running(pids["b"])
    fleet.start("a")
    pids.update(fleet.pids())
    fleet.stop()
    assert fleet.pids() == {}
    assert fleet.poll() == []
    assert not any(is_running(pid) for pid in pids.values())


def test_who_does_not_listen_is_killed_with_its_children(fleets: Callable[..., LocalFleet], tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
        "open(sys.argv[1], 'w').write(str(child.pid) + ' '); time.sleep(60)"
    )
    note = tmp_path / "child"
    fleet = fleets(code, str(note))
    fleet.start("w0")
    wait_until(lambda: note.exists() and note.read_text().endswith(" "))
    started = time.monotonic()
    fleet.stop(grace_s=0.2)
    assert 0.1 < time.monotonic() - started < 2.0
    wait_until(lambda: not is_running(int(note.read_text())))


def test_a_stopped_process_can_be_stopped(fleets: Callable[..., LocalFleet]) -> None:
    fleet = fleets(SLEEP)
    fleet.start("w0")
    pid = fleet.pids()["w0"]
    os.kill(pid, signal.SIGSTOP)
    fleet.stop(grace_s=0.1)
    assert not is_running(pid)


def test_ctrl_c_in_the_terminal_does_not_reach_workers(fleets: Callable[..., LocalFleet]) -> None:
    fleet = fleets(SLEEP)
    fleet.start("w0")
    assert os.getpgid(fleet.pids()["w0"]) != os.getpgid(0)


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no-such-program"):
        LocalFleet(["no-such-program"], {}).start("w0")


def test_leash_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEASH_ENV, raising=False)
    assert leash() is None
    monkeypatch.setenv(LEASH_ENV, "")
    assert leash() == []
    monkeypatch.setenv(LEASH_ENV, "/tmp/regatta-x")
    assert leash() == ["/tmp/regatta-x"]


WORKER = """
import sys, time
from regatta.fleet.local import leash, watch_leash
from regatta.transport.base import connect
watch_leash(leash())
end = connect(sys.argv[1], "{name}")
while True:
    end.receive(1.0)
"""

PARENT = f"""
import sys
from regatta.fleet.local import LocalFleet
from regatta.transport.base import listen
from regatta.transport.access import parse_ipc
import os
learner = listen("ipc:", b"spec")
folder = os.path.dirname(parse_ipc(learner.address))
fleet = LocalFleet([sys.executable, "-c", {WORKER!r}, learner.address], {{}}, folder)
fleet.start("a"); fleet.start("b")
joined = 0
while joined < 2:
    joined += len(learner.receive(10.0))
print(folder, *fleet.pids().values(), flush=True)
if sys.argv[1:]:
    fleet.stop("a")
    os.read(0, 1)
    print(os.path.exists(folder), flush=True)
learner.receive(60.0)
while True:
    learner.receive(60.0)
"""


def test_after_kill_9_of_the_learner_nothing_is_left() -> None:
    parent = subprocess.Popen([*PYTHON, PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        folder, *pids = parent.stdout.readline().decode().split()
        assert len(pids) == 2
        assert Path(folder, "socket").is_socket()
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(is_running(int(pid)) for pid in pids), timeout_s=3.0)
        assert not Path(folder).exists()


def test_stopping_a_worker_leaves_the_learners_socket_alone() -> None:
    parent = subprocess.Popen([*PYTHON, PARENT, "stop-one"], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdin is not None
    with parent.stdout, parent.stdin:
        folder, *pids = parent.stdout.readline().decode().split()
        parent.stdin.write(b"x")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"True\n"
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(is_running(int(pid)) for pid in pids), timeout_s=3.0)
        assert not Path(folder).exists()


@pytest.mark.parametrize("where", ["other-name", "regatta-sub/regatta-x", "regatta-link"])
def test_an_orphan_removes_only_our_own_temporary_folders(where: str) -> None:
    with tempfile.TemporaryDirectory() as outer:
        precious = Path(outer, where)
        precious.parent.mkdir(exist_ok=True)
        Path(outer, "target").mkdir()
        Path(outer, "target", "file").write_text("precious")
        if where == "regatta-link":
            precious.symlink_to(Path(outer, "target"))
        else:
            precious.mkdir()
        code = "import sys, time; from regatta.fleet.local import watch_leash as w; w(sys.argv[1:]); time.sleep(60)"
        env = {**os.environ, "TMPDIR": outer}
        done = subprocess.run([*PYTHON, code, str(precious)], stdin=subprocess.DEVNULL, env=env, timeout=10)
        assert done.returncode == 143
        assert precious.exists()
        assert Path(outer, "target", "file").exists()
