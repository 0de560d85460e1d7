"""Learner and workers as processes, on this machine (ipc:) or on many (tcp://): ROUTER and DEALER sockets.

A frame that does not fit is counted and dropped; a worker that speaks for another epoch is told to rejoin.

Whoever holds the lock owns the socket. A caller inside receive() holds it and does the housekeeping itself
(heartbeats, joining, silence), so a message goes from the socket to the caller without a thread switch; a
small ticker thread does the housekeeping while the caller computes. ZeroMQ's own threads move data either way.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from regatta.errors import ConnectionLost, Refused, RegattaError, TransportError, UsageError
from regatta.transport import wire
from regatta.transport.access import (
    SocketFile,
    bind_host,
    check_bind,
    check_token,
    needs_ipv6,
    parse_ipc,
    parse_tcp,
    reachable_host,
)
from regatta.transport.base import Event, Goodbye, Joined, Left, Message, Snapshots, epochs
from regatta.transport.wire import HEAD, VERSION, Kind, Socket

HEARTBEAT_S = 0.5
SILENCE_S = 6.0
MAX_FRAME_BYTES = 256 * 2**20
_MAX_AT_ONCE = 4096  # messages taken in one go, so a flood cannot keep receive() from returning
_AWAY_S = 1.0  # who has not come to look for so long was stopped, or kept from running
_FAILED_HANDSHAKES = 3  # one may be a learner that died in the middle of it


class _Peer:
    def __init__(self, identity: bytes, worker: int) -> None:
        self.identity = identity
        self.worker = worker
        self.heard = time.monotonic()
        self.has: Snapshots[None] = Snapshots()  # mirrors what the worker keeps


class ZmqLearner:
    def __init__(
        self,
        url: str,
        spec: bytes,
        token: str | None = None,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.counters = {"frames_rejected": 0, "handshakes_failed": 0}
        self._spec = spec
        self._heartbeat_s, self._silence_s, self._max_frame_bytes = heartbeat_s, silence_s, max_frame_bytes
        self._events: deque[Event] = deque()
        self._by_worker: dict[int, _Peer] = {}
        self._by_identity: dict[bytes, _Peer] = {}
        self._unreachable: dict[int, str] = {}
        self._published: Snapshots[zmq.Frame] = Snapshots()
        self._beat_at = self._ticked = time.monotonic()
        if token is not None:
            check_token(token)
        self._lock = threading.RLock()
        with contextlib.ExitStack() as undo:
            self._context = undo.enter_context(zmq.Context())
            self._socket = wire.make_socket(self._context, zmq.ROUTER, max_frame_bytes)
            undo.callback(self._socket.close, linger=0)
            self._zap: Socket | None = None
            if token is not None:
                self._client_key = wire.require_keys(self._socket, token)
                self._zap = self._context.socket(zmq.REP)
                undo.callback(self._zap.close, linger=0)
                self._zap.bind("inproc://zeromq.zap.01")
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | wire.HANDSHAKE_FAILED)
            undo.callback(self._monitor.close, linger=0)
            undo.callback(self._socket.disable_monitor)
            self._file: SocketFile | None = None
            self.address = self._bind(url, token)
            undo.pop_all()
        self._poller = zmq.Poller()
        for sock in (self._socket, self._monitor, self._zap):
            if sock is not None:
                self._poller.register(sock, zmq.POLLIN)
        self._stop_ticker = wire.start_ticker(self._lock, lambda: self._turn(0.0))

    def _bind(self, url: str, token: str | None) -> str:
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        if url.startswith("tcp:"):
            host, port = parse_tcp(url)
            number = bind_host(host)
            check_bind(url, number, token)
            self._socket.ipv6 = ":" in number
            wire.bind(self._socket, f"tcp://{wire.bracketed(number)}:{port}")
            real_port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            return f"tcp://{wire.bracketed(reachable_host(number))}:{real_port}"
        wire.require_ipc()
        self._file = SocketFile(parse_ipc(url))
        try:
            wire.bind(self._socket, f"ipc://{self._file.path}")
            os.chmod(self._file.path, 0o600)
        except BaseException:
            self._file.remove()
            raise
        return f"ipc://{self._file.path}"

    def publish(self, version: int, payload: bytes) -> None:
        wire.check_size(payload, self._max_frame_bytes)
        with self._lock:
            self._published.put(version, zmq.Frame(payload))  # one copy, shared by all the sends

    def send(self, worker: int, payload: bytes, version: int | None = None) -> None:
        wire.check_size(payload, self._max_frame_bytes)
        with self._lock:
            peer = self._by_worker.get(worker)
            if peer is None or worker in self._unreachable:
                return
            if version is not None and version not in peer.has:
                snapshot = self._published.get(version)
                peer.has.put(version, None)
                self._post(peer, Kind.SNAPSHOT, VERSION.pack(version), snapshot)
            self._post(peer, Kind.DATA, payload)

    def receive(self, timeout_s: float) -> list[Event]:
        now = time.monotonic()
        deadline = now + timeout_s
        with self._lock:
            while not self._events:
                self._turn(min(deadline, self._beat_at) - now)
                now = time.monotonic()
                if now >= deadline:
                    break
            events = list(self._events)
            self._events.clear()
            return events

    def dismiss(self, worker: int, reason: str) -> None:
        with self._lock:
            peer = self._by_worker.get(worker)
            if peer is not None:
                self._post(peer, Kind.REJOIN, reason.encode())
                self._forget(peer)
            stale = sum(isinstance(event, Message) and event.worker == worker for event in self._events)
            self.counters["frames_rejected"] += stale
            self._events = deque(event for event in self._events if event.worker != worker)

    def close(self, reason: str = "done") -> None:
        with self._lock:
            if self._socket.closed:
                return
            for peer in list(self._by_worker.values()):
                self._post(peer, Kind.GOODBYE, reason.encode())
            self._by_worker.clear()
            self._by_identity.clear()
            self._events.clear()
            self._stop_ticker()
            wire.close(self._context, self._socket, self._monitor, self._zap)
            if self._file is not None:
                self._file.remove()

    def _turn(self, wait_s: float) -> None:
        """Wait for the sockets at most this long, take in what is there, and do what is due."""
        if self._socket.closed:
            return
        ready = dict(self._poller.poll(0 if self._unreachable else max(0, math.ceil(wait_s * 1000))))
        if self._zap in ready:
            self._admit()
        if self._monitor in ready:
            self._watch()
        drained = self._take_in() if self._socket in ready else True
        now = time.monotonic()
        if now - self._ticked > _AWAY_S:
            # It is us who were away; their heartbeats may still be on the way.
            for peer in self._by_worker.values():
                peer.heard = now
        self._ticked = now
        if now >= self._beat_at:
            self._beat_at = now + self._heartbeat_s
            for peer in list(self._by_worker.values()):
                if drained and now - peer.heard > self._silence_s:
                    self._unreachable.setdefault(peer.worker, f"silent for {now - peer.heard:.1f} s")
                self._post(peer, Kind.BEAT)
        # A dead worker's last messages may still be in the socket; they come before its Left.
        if self._unreachable and self._take_in():
            for worker, reason in self._unreachable.items():
                self._left(worker, reason)
            self._unreachable.clear()

    def _take_in(self) -> bool:
        """True if nothing is left in the socket."""
        for _ in range(_MAX_AT_ONCE):
            parts = wire.read(self._socket)
            if parts is None:
                return True
            if not self._take(parts):
                self.counters["frames_rejected"] += 1
        return False

    def _take(self, parts: list[bytes]) -> bool:
        """False if the frame is none of ours."""
        if len(parts) < 2 or len(parts[1]) != HEAD.size:
            return False
        identity, head, *body = parts
        kind, worker = HEAD.unpack(head)
        if kind == Kind.HELLO:
            return len(body) == 1 and self._welcome(identity, body[0])
        if len(body) != {Kind.BEAT: 0, Kind.LEAVE: 0, Kind.DATA: 1}.get(kind):
            return False
        peer = self._by_identity.get(identity)
        if peer is None or peer.worker != worker:
            self._reply(identity, worker, Kind.REJOIN, "the learner no longer counts on it")
            return bool(kind != Kind.DATA)  # nothing is lost with a heartbeat
        peer.heard = time.monotonic()
        if kind == Kind.DATA:
            self._events.append(Message(worker, body[0]))
        elif kind == Kind.LEAVE:
            self._left(worker, "it closed its end")
        return True

    def _welcome(self, identity: bytes, body: bytes) -> bool:
        hello = wire.read_hello(body)
        if hello is None:
            return False
        if hello.protocol != wire.PROTOCOL:
            text = f"the learner speaks protocol {wire.PROTOCOL}, this worker {hello.protocol}"
            self._reply(identity, 0, Kind.DENY, text)
            return False
        before = self._by_identity.get(identity)
        if before is not None:
            self._left(before.worker, "it joined anew")
        peer = _Peer(identity, next(epochs))
        self._by_identity[identity] = self._by_worker[peer.worker] = peer
        self._events.append(Joined(peer.worker, hello.name, hello.pid, hello.host))
        self._post(peer, Kind.WELCOME, self._spec)
        return True

    def _left(self, worker: int, reason: str) -> None:
        peer = self._by_worker.get(worker)
        if peer is not None:
            self._forget(peer)
            self._events.append(Left(worker, reason))

    def _forget(self, peer: _Peer) -> None:
        del self._by_worker[peer.worker]
        if self._by_identity.get(peer.identity) is peer:
            del self._by_identity[peer.identity]

    def _post(self, peer: _Peer, kind: bytes, *body: bytes | zmq.Frame) -> None:
        try:
            self._socket.send_multipart([peer.identity, HEAD.pack(kind, peer.worker), *body], flags=zmq.NOBLOCK)
        except zmq.Again:
            self._unreachable.setdefault(peer.worker, f"it did not take {wire.MAX_QUEUED} messages in a row")
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.ECONNRESET):
                raise
            self._unreachable.setdefault(peer.worker, "its connection broke: it died or was cut off")

    def _reply(self, identity: bytes, worker: int, kind: bytes, text: str) -> None:
        """To a stranger, who may claim any epoch: whether it gets there says nothing about our workers."""
        with contextlib.suppress(zmq.ZMQError):
            parts = [identity, HEAD.pack(kind, worker), text.encode()]
            self._socket.send_multipart(parts, flags=zmq.NOBLOCK)

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                # It does not say who. A heartbeat to all finds out, once the socket has noticed as well.
                self._beat_at = min(self._beat_at, time.monotonic() + 0.02)
            else:
                self.counters["handshakes_failed"] += 1

    def _admit(self) -> None:
        """Answer ZeroMQ's question (RFC 27, ZAP): does this client hold the token's key?"""
        assert self._zap is not None
        while self._zap.poll(0):
            request = self._zap.recv_multipart()
            version, number = (*request, b"", b"")[:2]
            good = len(request) == 7 and request[5] == b"CURVE" and request[6] == self._client_key
            status = (b"200", b"OK") if good else (b"400", b"not this run's token")
            self._zap.send_multipart([version, number, *status, b"", b""])


class ZmqWorker:
    def __init__(
        self,
        url: str,
        name: str,
        token: str | None = None,
        timeout_s: float = 30.0,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.spec = b""
        self.worker = 0
        self._url, self._name, self._has_token = url, name, token is not None
        self._heartbeat_s, self._silence_s, self._max_frame_bytes = heartbeat_s, silence_s, max_frame_bytes
        self._inbox: deque[bytes] = deque()
        self._snapshots: Snapshots[bytes] = Snapshots()
        self._over: Callable[[], RegattaError | Goodbye] | None = None
        self._failed_handshakes = 0
        self._beat_at = self._ticked = self._heard = time.monotonic()
        if token is not None:
            check_token(token)
        if url.startswith("tcp:"):
            ipv6 = needs_ipv6(parse_tcp(url)[0])
        else:
            wire.require_ipc()
            ipv6 = False
            if not parse_ipc(url):
                raise UsageError("a worker needs the learner's whole address, as in ipc:///tmp/regatta-x/socket")
        self._lock = threading.RLock()
        self._stop_ticker: Callable[[], None] = lambda: None
        self._context = zmq.Context()
        self._socket = wire.make_socket(self._context, zmq.DEALER, max_frame_bytes)
        self._socket.ipv6 = ipv6
        self._socket.routing_id = b"w" + os.urandom(15)
        if token is not None:
            wire.present_keys(self._socket, token)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | wire.HANDSHAKE_FAILED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._join(timeout_s)
        except BaseException:
            self.close()
            raise
        self._stop_ticker = wire.start_ticker(self._lock, lambda: self._turn(0.0))

    def _join(self, timeout_s: float) -> None:
        try:
            self._socket.connect(self._url)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot connect to {self._url}: {error}") from error
        deadline = time.monotonic() + timeout_s
        while not self.worker:
            self._raise_if_over()
            now = time.monotonic()
            if now >= deadline:
                raise TransportError(
                    f"no learner at {self._url} after {timeout_s:g} s; "
                    "check that it is running and that this is its address"
                )
            self._turn(min(deadline - now, 1.0))

    def receive(self, timeout_s: float) -> bytes | None:
        now = time.monotonic()
        deadline = now + timeout_s
        with self._lock:
            while not self._inbox and self._over is None:
                self._turn(min(deadline, self._beat_at) - now)
                now = time.monotonic()
                if now >= deadline:
                    break
            self._raise_if_over()
            return self._inbox.popleft() if self._inbox else None

    def snapshot(self, version: int) -> bytes:
        with self._lock:
            return self._snapshots.get(version)

    def send(self, payload: bytes) -> None:
        wire.check_size(payload, self._max_frame_bytes)
        with self._lock:
            self._raise_if_over()
            deadline = time.monotonic() + self._silence_s
            while not self._post(Kind.DATA, payload):
                # The learner is slow to take our results; that is no reason to lose one.
                if time.monotonic() > deadline:
                    self._end(ConnectionLost, f"the learner at {self._url} takes no more results")
                self._socket.poll(20, zmq.POLLOUT)
                self._turn(0.0)
                self._raise_if_over()

    def close(self) -> None:
        with self._lock:
            if self._socket.closed:
                return
            if self.worker and self._over is None:
                self._post(Kind.LEAVE)
            self._end(ConnectionLost, "this end is closed")
            self._stop_ticker()
            wire.close(self._context, self._socket, self._monitor)

    def _turn(self, wait_s: float) -> None:
        """Wait for the sockets at most this long, take in what is there, and do what is due."""
        if self._over is not None:
            return
        ready = dict(self._poller.poll(max(0, math.ceil(wait_s * 1000))))
        if self._socket in ready:
            self._take_in()
        if self._monitor in ready:
            self._watch()
        now = time.monotonic()
        if now - self._ticked > _AWAY_S:
            self._heard = now  # it is us who were away; the learner's heartbeats may still be on the way
        self._ticked = now
        if self.worker and now >= self._beat_at:
            self._beat_at = now + self._heartbeat_s
            self._post(Kind.BEAT)
            if now - self._heard > self._silence_s:
                self._end(ConnectionLost, f"no sign of the learner at {self._url} for {self._silence_s:g} s")

    def _take_in(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            parts = wire.read(self._socket)
            if parts is None:
                return
            self._take(parts)

    def _take(self, parts: list[bytes]) -> None:
        head, *body = parts
        if len(head) != HEAD.size:
            return
        kind, worker = HEAD.unpack(head)
        ours = worker == self.worker
        self._heard = time.monotonic()
        match kind, body:
            case (Kind.WELCOME, [spec]) if not self.worker:
                self.worker, self.spec = worker, spec
            case (Kind.DATA, [payload]) if ours:
                self._inbox.append(payload)
            case (Kind.SNAPSHOT, [version, payload]) if ours and len(version) == VERSION.size:
                self._snapshots.put(VERSION.unpack(version)[0], payload)
            case (Kind.REJOIN, [reason]) if ours:
                self._end(ConnectionLost, f"dismissed by the learner ({wire.text(reason)}); connect again")
            case (Kind.GOODBYE, [reason]):
                self._end(Goodbye, wire.text(reason))
            case (Kind.DENY, [reason]):
                self._end(Refused, f"{wire.text(reason)}; install the same version of regatta on both sides")

    def _watch(self) -> None:
        while self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            event, value = int(message["event"]), int(message["value"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # One HELLO for each connection: the learner may have been replaced since the last.
                hello = wire.Hello(wire.PROTOCOL, self._name[:255], os.getpid(), platform.node()[:255])
                self._post(Kind.HELLO, msgspec.msgpack.encode(hello))
            elif event == zmq.EVENT_DISCONNECTED:
                self._take_in()  # a goodbye may have come just before the end
                if self.worker:
                    self._end(ConnectionLost, f"the connection to the learner at {self._url} broke")
            else:
                self._failed_handshakes += 1
                self._refused(event, value)

    def _refused(self, event: int, value: int) -> None:
        mismatch = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and mismatch and self._has_token:
            why = "it runs without a token, but this worker was given one; start the learner with --token-file"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._failed_handshakes < _FAILED_HANDSHAKES:
            return  # it hung up; ZeroMQ tries again
        elif self._has_token:
            why = "not with this token; use the learner's --token-file, or none if it runs without a token"
        else:
            why = "it wants the run's token; give this worker the learner's --token-file"
        self._end(Refused, f"the learner at {self._url} refused us: {why}")

    def _post(self, kind: bytes, *body: bytes) -> bool:
        try:
            self._socket.send_multipart([HEAD.pack(kind, self.worker), *body], flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _end(self, error: type[RegattaError] | type[Goodbye], text: str) -> None:
        if self._over is None:
            self._over = lambda: error(text)

    def _raise_if_over(self) -> None:
        if self._over is not None:
            raise self._over()


def listen(url: str, spec: bytes, token: str | None = None) -> ZmqLearner:
    return ZmqLearner(url, spec, token)


def connect(url: str, name: str, token: str | None = None, timeout_s: float = 30.0) -> ZmqWorker:
    return ZmqWorker(url, name, token, timeout_s)
