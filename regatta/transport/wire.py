"""How the ZeroMQ ends speak: the kinds of frames, the sockets' settings, the keys, the ticker.

    worker -> learner   HELLO {protocol, name, pid, host} | BEAT | DATA payload | LEAVE
    learner -> worker   WELCOME spec | BEAT | SNAPSHOT version, payload | DATA payload
                        REJOIN reason | GOODBYE reason | DENY reason

Every frame begins with its kind and the session's epoch.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec
import zmq
from zmq.utils import z85

from regatta.errors import TransportError, UsageError

PROTOCOL = 1
TICK_S = 0.1
MAX_QUEUED = 1000  # messages per peer and direction
LINGER_MS = 400  # for a last goodbye, and short enough that close() takes no second
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MAX_PARTS = 4
_MAX_HELLO_BYTES = 4096

Socket = zmq.Socket[bytes]
HEAD = struct.Struct("<cQ")
VERSION = struct.Struct("<q")


class Kind:
    HELLO, BEAT, DATA, LEAVE = b"H", b"B", b"D", b"L"
    WELCOME, SNAPSHOT, REJOIN, GOODBYE, DENY = b"W", b"S", b"R", b"G", b"X"


_Short = Annotated[str, msgspec.Meta(max_length=255)]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    name: _Short = "?"
    pid: int = 0
    host: _Short = "?"


_hello_decoder = msgspec.msgpack.Decoder(Hello)


def read_hello(body: bytes) -> Hello | None:
    if len(body) > _MAX_HELLO_BYTES:
        return None
    try:
        return _hello_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def make_socket(context: zmq.Context[Socket], kind: int, max_frame_bytes: int) -> Socket:
    sock = context.socket(kind)
    sock.linger = LINGER_MS
    sock.sndhwm = sock.rcvhwm = MAX_QUEUED
    sock.maxmsgsize = max_frame_bytes
    sock.reconnect_ivl, sock.reconnect_ivl_max = 100, 1000
    sock.tcp_keepalive, sock.tcp_keepalive_idle = 1, 30
    sock.tcp_keepalive_intvl, sock.tcp_keepalive_cnt = 10, 3
    return sock


def read(sock: Socket) -> list[bytes] | None:
    """One whole message, or None if there is none; of one with too many parts, just enough to be wrong."""
    try:
        parts = [sock.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while sock.get(zmq.RCVMORE):
        part = sock.recv()
        if len(parts) <= _MAX_PARTS:
            parts.append(part)
    return parts


def bind(sock: Socket, url: str) -> None:
    try:
        sock.bind(url)
    except zmq.ZMQError as error:
        remedy = "choose another port, or :0 for any free one" if url.startswith("tcp") else "choose another path"
        raise TransportError(f"cannot listen on {url}: {error.strerror}; {remedy}") from error


def close(context: zmq.Context[Socket], sock: Socket, monitor: Socket, zap: Socket | None = None) -> None:
    sock.disable_monitor()
    monitor.close(linger=0)
    sock.close(linger=LINGER_MS)
    if zap is not None:
        zap.close(linger=0)
    context.term()


def start_ticker(lock: threading.RLock, tick: Callable[[], None]) -> Callable[[], None]:
    """Call `tick` now and then, but only while nobody else holds the lock: a holder does the work itself."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(TICK_S):
            if lock.acquire(blocking=False):
                try:
                    tick()
                finally:
                    lock.release()

    threading.Thread(target=run, name="regatta-zeromq", daemon=True).start()
    return stopped.set


def require_ipc() -> None:
    if not zmq.has("ipc"):
        raise UsageError("ZeroMQ has no ipc: on this system; use tcp://127.0.0.1:0")


def check_size(payload: bytes, limit: int) -> None:
    if len(payload) > limit:
        raise TransportError(
            f"a message of {len(payload):,} bytes is over the limit of {limit:,}; use smaller lanes or fewer steps"
        )


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def text(raw: bytes) -> str:
    return raw[:500].decode(errors="replace")


def _derive(token: str, whose: bytes) -> tuple[bytes, bytes]:
    """Public and secret key. Both ends derive both pairs, so a token is all that has to be shared."""
    raw = hashlib.blake2b(token.encode(), digest_size=32, person=whose).digest()
    secret = z85.encode(raw)
    return zmq.curve_public(secret), secret


def require_keys(sock: Socket, token: str) -> bytes:
    """Make `sock` a CURVE server; the raw public key of the one client to admit."""
    sock.curve_publickey, sock.curve_secretkey = _derive(token, b"regatta learner")
    sock.curve_server = True
    sock.zap_domain = b"regatta"
    sock.zap_enforce_domain = True
    return z85.decode(_derive(token, b"regatta worker")[0])


def present_keys(sock: Socket, token: str) -> None:
    sock.curve_serverkey, _ = _derive(token, b"regatta learner")
    sock.curve_publickey, sock.curve_secretkey = _derive(token, b"regatta worker")
