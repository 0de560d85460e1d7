"""URLs, loopback and tokens: every refusal happens before a socket is open, and names the remedy."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from regatta.errors import TransportError, UsageError
from regatta.transport.access import bind_host, is_loopback, needs_ipv6, parse_ipc, parse_tcp
from regatta.transport.base import connect, listen

TOKEN = "a-token-for-tests-only"


@pytest.mark.parametrize("url", ["tpc://127.0.0.1:0", "zmq", "", "http://x", "TCP://127.0.0.1:1"])
def test_unknown_schemes_name_the_valid_ones(url: str) -> None:
    with pytest.raises(UsageError, match="valid are inline, ipc, tcp"):
        listen(url, b"")
    with pytest.raises(UsageError, match="valid are inline, ipc, tcp"):
        connect(url, "anna")


def test_a_near_miss_is_named() -> None:
    with pytest.raises(UsageError, match="did you mean 'tcp'"):
        listen("tpc://127.0.0.1:0", b"")


@pytest.mark.parametrize(
    "url",
    [
        *("tcp:", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:http", "tcp://:5555"),
        *("tcp://127.0.0.1:70000", "tcp://u@127.0.0.1:1", "tcp://127.0.0.1:1/x", "tcp://::1:5555"),
    ],
)
def test_bad_tcp_urls_are_refused_on_both_sides(url: str) -> None:
    with pytest.raises(UsageError, match="tcp://HOST:PORT"):
        listen(url, b"", TOKEN)
    with pytest.raises(UsageError, match="tcp://HOST:PORT"):
        connect(url, "anna", TOKEN)


def test_hosts_and_ports() -> None:
    assert parse_tcp("tcp://[::1]:0") == ("::1", 0)
    assert parse_tcp("tcp://*:5555") == ("*", 5555)
    assert parse_tcp("tcp://node-7.cluster:65535") == ("node-7.cluster", 65535)
    assert needs_ipv6("::1")
    assert not needs_ipv6("127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "127.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(bind_host(host))


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "0", "[::]", "10.0.0.1", "192.168.1.1", "[::ffff:127.0.0.1]", "[fe80::1]"]
)
def test_anything_else_needs_a_token(host: str) -> None:
    with pytest.raises(UsageError, match="--token-file"):
        listen(f"tcp://{host}:0", b"")


def test_a_name_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(UsageError, match="does not resolve"):
        listen("tcp://no-such-host.invalid:0", b"", TOKEN)


@pytest.mark.parametrize("token", ["", "short", "fifteen-chars.."])
def test_short_tokens_are_refused_with_a_remedy_and_without_an_echo(token: str) -> None:
    with pytest.raises(UsageError, match="token_urlsafe") as refusal:
        listen("tcp://127.0.0.1:0", b"", token)
    assert not token or token not in str(refusal.value)
    with pytest.raises(UsageError, match="token_urlsafe"):
        connect("tcp://127.0.0.1:1", "anna", token)


def test_no_repr_shows_the_token() -> None:
    learner = listen("tcp://127.0.0.1:0", b"", TOKEN)
    worker = connect(learner.address, "anna", TOKEN)
    try:
        assert TOKEN not in f"{learner!r} {vars(learner)!r} {worker!r} {vars(worker)!r}"
    finally:
        worker.close()
        learner.close()


def test_a_public_bind_with_token_gives_an_address_that_works() -> None:
    learner = listen("tcp://*:0", b"spec", TOKEN)
    try:
        assert "0.0.0.0" not in learner.address
        port = learner.address.rpartition(":")[2]
        worker = connect(f"tcp://127.0.0.1:{port}", "anna", TOKEN)
        assert worker.spec == b"spec"
        worker.close()
    finally:
        learner.close()


def test_ipv6_loopback() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here; enable it with: sysctl net.ipv6.conf.lo.disable_ipv6=0")
    learner = listen("tcp://[::1]:0", b"spec")
    try:
        assert learner.address.startswith("tcp://[::1]:")
        connect(learner.address, "anna").close()
    finally:
        learner.close()


def test_localhost_works_on_both_sides() -> None:
    learner = listen("tcp://localhost:0", b"spec")
    try:
        port = learner.address.rpartition(":")[2]
        connect(f"tcp://localhost:{port}", "anna", timeout_s=5.0).close()
    finally:
        learner.close()


def test_a_port_in_use_is_named() -> None:
    learner = listen("tcp://127.0.0.1:0", b"")
    try:
        with pytest.raises(TransportError, match=rf"{learner.address}.*choose another port"):
            listen(learner.address, b"")
    finally:
        learner.close()


def test_ipc_lives_in_a_private_folder_that_close_removes() -> None:
    learner = listen("ipc:", b"")
    path = Path(parse_ipc(learner.address))
    assert path.parent.name.startswith("regatta-")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.is_socket()
    learner.close()
    assert not path.parent.exists()


def test_ipc_with_a_long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    learner = listen("ipc:", b"spec")
    try:
        connect(learner.address, "anna").close()
    finally:
        learner.close()


def test_ipc_at_a_path_of_ones_own() -> None:
    with tempfile.TemporaryDirectory(prefix="regatta-test-") as folder:
        url = f"ipc://{folder}/s"
        learner = listen(url, b"")
        assert learner.address == url
        assert stat.S_IMODE(os.stat(f"{folder}/s").st_mode) == 0o600
        with pytest.raises(TransportError, match="another learner"):
            listen(url, b"")
        connect(url, "anna").close()
        learner.close()
        assert os.listdir(folder) == []


def test_a_stale_socket_is_replaced_but_a_file_never() -> None:
    with tempfile.TemporaryDirectory(prefix="regatta-test-") as folder:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"{folder}/stale")
        listen(f"ipc://{folder}/stale", b"").close()
        Path(folder, "diary").write_text("dear diary")
        with pytest.raises(UsageError, match="not a socket"):
            listen(f"ipc://{folder}/diary", b"")
        assert Path(folder, "diary").read_text() == "dear diary"


@pytest.mark.parametrize("url", ["ipc://@abstract", "ipc:relative/path", "ipc:///" + "x" * 110])
def test_bad_ipc_paths(url: str) -> None:
    with pytest.raises(UsageError):
        listen(url, b"")
    with pytest.raises(UsageError):
        connect(url, "anna")


def test_a_worker_needs_the_whole_ipc_address() -> None:
    with pytest.raises(UsageError, match="whole address"):
        connect("ipc:", "anna")


def test_an_ipc_folder_that_does_not_exist() -> None:
    with pytest.raises(TransportError, match="cannot listen on"):
        listen("ipc:///no/such/folder/s", b"")
