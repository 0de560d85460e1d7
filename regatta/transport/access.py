"""Who may reach a learner: parsing of tcp and ipc URLs, what counts as loopback, which tokens will do.

Only an address proven to be loopback is treated as one; a name is resolved here and the number is what gets
bound, so the judgement and the bind cannot differ.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from pathlib import Path

from regatta.errors import TransportError, UsageError

MIN_TOKEN_CHARS = 16
MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
_TCP = re.compile(r"tcp://(?P<host>\[[^\]/@]+\]|[^\[\]:/@]+):(?P<port>\d{1,5})")


def check_token(token: str) -> None:
    if len(token) < MIN_TOKEN_CHARS:
        raise UsageError(
            f"the token has {len(token)} characters, at least {MIN_TOKEN_CHARS} are needed; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))' > token && chmod 600 token"
        )


def parse_tcp(url: str) -> tuple[str, int]:
    """Host, without brackets, and port."""
    match = _TCP.fullmatch(url)
    if match is None or int(match["port"]) > 65535:
        raise UsageError(
            f"{url!r} is not of the form tcp://HOST:PORT (tcp://127.0.0.1:5555, tcp://[::1]:5555; "
            "port 0 lets the system choose)"
        )
    return match["host"].strip("[]"), int(match["port"])


def bind_host(host: str) -> str:
    """The number to bind for `host`; IPv4 is preferred where a name has both."""
    if host == "*":
        return "0.0.0.0"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    numbers = resolve(host)
    if not numbers:
        raise UsageError(
            f"cannot listen on {host!r}: the name does not resolve here; use an address of this machine, "
            "or 127.0.0.1 for this machine only"
        )
    return next((number for number in numbers if ":" not in number), numbers[0])


def resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in found]


def is_loopback(number: str) -> bool:
    return ipaddress.ip_address(number).is_loopback


def check_bind(url: str, number: str, token: str | None) -> None:
    if token is None and not is_loopback(number):
        raise UsageError(
            f"{url} can be reached from other machines, so it needs a token: give --token-file FILE "
            "(the same file to every worker), or listen on tcp://127.0.0.1:PORT or ipc:"
        )


def reachable_host(number: str) -> str:
    """What others call this machine when it listens on every interface."""
    if not ipaddress.ip_address(number).is_unspecified:
        return number
    name = socket.gethostname()
    return name if resolve(name) else "127.0.0.1"


def needs_ipv6(host: str) -> bool:
    """Only then: ZeroMQ with IPv6 on takes a name's IPv6 number first, and 'localhost' usually has one."""
    if ":" in host:
        return True
    numbers = resolve(host)
    return bool(numbers) and all(":" in number for number in numbers)


def parse_ipc(url: str) -> str:
    """The socket's path, '' where none is given."""
    path = url.removeprefix("ipc:").removeprefix("//")
    if path.startswith("@"):
        raise UsageError(f"{url!r}: abstract sockets are open to every user; give a path, or just 'ipc:'")
    if path and not path.startswith("/"):
        raise UsageError(f"{url!r}: the socket's path must be absolute, as in ipc:///tmp/run/socket")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"{url!r}: a socket's path may have {MAX_SOCKET_PATH_BYTES} bytes; use a shorter one, or 'ipc:'"
        )
    return path


class SocketFile:
    """The file an ipc: learner listens on; in a private temporary folder unless a path is given."""

    def __init__(self, path: str) -> None:
        self.folder: str | None = None
        if path:
            _check_free(path)
        else:
            self.folder = _private_folder()
            path = os.path.join(self.folder, "socket")
        self.path = path

    def remove(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            Path(self.path).unlink(missing_ok=True)


def _private_folder() -> str:
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) + len("/regatta-12345678/socket") <= MAX_SOCKET_PATH_BYTES:
            return tempfile.mkdtemp(prefix="regatta-", dir=parent)  # mkdtemp makes it 0700
    raise UsageError("no temporary folder with a short enough name; set TMPDIR, or listen on ipc:///PATH")


def _check_free(path: str) -> None:
    """ZeroMQ unlinks whatever is at the path before it binds: not a live learner, not your file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"ipc://{path} exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise TransportError(f"another learner listens on ipc://{path}; stop it or choose another path")
