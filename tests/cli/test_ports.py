"""Who can reach a learner and what they learn: listeners, tokens, garbage."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from programs import SMALL, free_port, listeners, wait_until

import regatta

TOKEN = "correct-horse-battery-staple-0123456789"
LOOPBACK = ("0100007F", "00000000000000000000000001000000")


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    flag = tmp_path / "slow"
    flag.touch()
    return flag


def settings(flag: Path) -> list[str]:
    return ["env.id=environments:paced", f"env.kwargs.flag={flag}", "run.steps=16384", *SMALL]


@pytest.mark.parametrize(("url", "count"), [(None, 0), ("ipc:", 0), ("tcp://127.0.0.1:0", 1)])
def test_no_listener_off_loopback(url: str | None, count: int, start: Any, store: Path, slow: Path) -> None:
    listen = ["--listen", url] if url else []
    command = start("train", "cartpole-ppo", *settings(slow), "--store", store, "-w", 2, *listen)
    wait_until(lambda: list(store.glob("*/checkpoints/*/manifest.json")), 30, command.err)
    found = [address for pid in (command.pid, *command.workers.values()) for address in listeners(pid)]
    assert len(found) == count
    assert set(found) <= set(LOOPBACK)


def test_a_token_stays_secret(start: Any, store: Path, slow: Path, tmp_path: Path) -> None:
    """Nowhere but in the file and the environment: not in argv, output or record; without it nobody gets in."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    wrong = tmp_path / "wrong"
    wrong.write_text("another-token-altogether-9876543210\n")
    wrong.chmod(0o600)
    address = f"tcp://127.0.0.1:{free_port()}"
    learner = start(
        *("train", "cartpole-ppo", *settings(slow), "--seed", 1, "--store", store, "--name", "r"),
        *("--listen", address, "--token-file", file, "-w", 1, "--json"),
    )
    wait_until(lambda: list(store.glob("*/checkpoints/*/manifest.json")), 30, learner.err)
    strangers = [start("worker", address), start("worker", address, "--token-file", wrong)]
    for stranger in strangers:
        assert stranger.wait(30) == 77, stranger.err
        assert "--token-file" in stranger.err
    guest = start("worker", address, "--allow", "environments", "--name", "guest", env={"REGATTA_TOKEN": TOKEN})
    wait_until(lambda: "workers 2 at" in learner.err, 30, guest.err)
    commands = [learner, guest, *strangers]
    pids = [learner.pid, guest.pid, *learner.workers.values()]
    for pid in pids:
        assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    slow.unlink()
    assert learner.wait() == 0, learner.err
    assert guest.wait(10) == 0, guest.err
    texts = [text for command in commands for text in (command.out, command.err)]
    files = [path for path in store.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        data = path.read_bytes()
        assert TOKEN.encode() not in data, path
    for text in texts:
        assert TOKEN not in text
        assert "another-token" not in text
    calm = regatta.train("cartpole-ppo", ["run.steps=16384", *SMALL], seed=1, workers=0, store=str(store))
    assert learner.result["weights_sha256"] == calm.status().weights_sha256


def test_garbage_on_the_port(start: Any, store: Path, slow: Path) -> None:
    """Random bytes, half a ZeroMQ greeting, a greeting with garbage after it, HTTP, and connections left open."""
    port = free_port()
    learner = start(
        *("train", "cartpole-ppo", *settings(slow), "--seed", 1, "--store", store),
        *("--listen", f"tcp://127.0.0.1:{port}", "-w", 2, "--json"),
    )
    wait_until(lambda: list(store.glob("*/checkpoints/*/manifest.json")), 30, learner.err)
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    letters = [
        os.urandom(10_000),
        greeting[:20],
        greeting + os.urandom(5_000),
        greeting + ready + b"\x02" + (2**62).to_bytes(8, "big"),  # a frame of four exabytes
        greeting + ready + b"\x00\x05\x00garb" + b"\x00\x80" + os.urandom(128),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    kept = []
    for letter in letters * 5:
        peer = socket.create_connection(("127.0.0.1", port))
        kept.append(peer)
        try:
            peer.sendall(letter)
        except OSError:
            pass  # it has hung up on us already: just as well
    assert learner.popen.poll() is None
    slow.unlink()
    assert learner.wait() == 0, learner.err
    for peer in kept:
        peer.close()
    assert learner.result["restarts"] == 0
    calm = regatta.train("cartpole-ppo", ["run.steps=16384", *SMALL], seed=1, workers=0, store=str(store))
    assert learner.result["weights_sha256"] == calm.status().weights_sha256


def test_a_worker_without_a_learner_keeps_trying_until_told_to_stop(start: Any) -> None:
    command = start("worker", f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(Exception, match="timed out"):
        command.wait(4)
    command.send(signal.SIGINT)
    assert command.wait(5) == 130, command.err
    assert "Traceback" not in command.err
