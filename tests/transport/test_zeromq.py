"""What only sockets can do to us: silence, crashes, strangers, garbage."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from regatta.errors import ConnectionLost, Refused, TransportError
from regatta.transport import wire
from regatta.transport.base import Event, Joined, Left, Message
from regatta.transport.wire import HEAD, Kind
from regatta.transport.zeromq import ZmqLearner, ZmqWorker

TOKEN = "a-token-for-tests-only"
OTHER = "some-other-token-altogether"
TCP = "tcp://127.0.0.1:0"

ECHO = """
import sys
from regatta.errors import ConnectionLost
from regatta.transport.base import Goodbye
from regatta.transport.zeromq import ZmqWorker
while True:
    worker = ZmqWorker(sys.argv[1], "echo", heartbeat_s=0.1, silence_s=float(sys.argv[2]))
    try:
        while True:
            payload = worker.receive(1.0)
            if payload is not None:
                worker.send(payload)
    except ConnectionLost:
        worker.close()
    except Goodbye:
        worker.close()
        break
"""


@contextmanager
def echo_process(learner: ZmqLearner, silence_s: float = 60.0) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", ECHO, learner.address, str(silence_s)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def learner_at(url: str, token: str | None = None, **options: float) -> Iterator[ZmqLearner]:
    learner = ZmqLearner(url, b"spec", token, **options)  # type: ignore[arg-type]
    try:
        yield learner
    finally:
        learner.close()


@contextmanager
def stranger(address: str, prepare: Callable[[wire.Socket], object] | None = None) -> Iterator[wire.Socket]:
    """A bare DEALER socket, for saying what no worker of ours would."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        if prepare is not None:
            prepare(sock)
        sock.connect(address)
        yield sock


def collect(learner: ZmqLearner, count: int, timeout_s: float = 10.0) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + timeout_s
    while len(events) < count and time.monotonic() < deadline:
        events += learner.receive(0.1)
    return events


def wait_until(holds: Callable[[], bool], learner: ZmqLearner, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, learner.counters
        learner.receive(0.02)


def is_served(learner: ZmqLearner, worker: ZmqWorker) -> bool:
    learner.send(worker.worker, b"still there?")
    assert worker.receive(5.0) == b"still there?"
    worker.send(b"yes")
    return Message(worker.worker, b"yes") in collect(learner, 1)


def hello(protocol: int = wire.PROTOCOL) -> list[bytes]:
    body = msgspec.msgpack.encode(wire.Hello(protocol, "stranger", 1, "nowhere"))
    return [HEAD.pack(Kind.HELLO, 0), body]


# Coming and going


def test_a_silent_worker_has_left() -> None:
    with learner_at(TCP, heartbeat_s=0.05, silence_s=0.4) as learner, stranger(learner.address) as sock:
        sock.send_multipart(hello())
        started = time.monotonic()
        joined, left = collect(learner, 2)
        assert isinstance(joined, Joined)
        assert isinstance(left, Left)
        assert "silent" in left.reason
        assert 0.3 < time.monotonic() - started < 2.0


def test_a_silent_worker_is_noticed_while_the_learner_is_busy_too() -> None:
    with learner_at(TCP, heartbeat_s=0.05, silence_s=0.4) as learner, stranger(learner.address) as sock:
        sock.send_multipart(hello())
        time.sleep(1.2)
        assert [type(event) for event in learner.receive(0.0)] == [Joined, Left]


def test_heartbeats_flow_while_both_sides_compute() -> None:
    with learner_at(TCP, heartbeat_s=0.05, silence_s=0.5) as learner:
        worker = ZmqWorker(learner.address, "anna", heartbeat_s=0.05, silence_s=0.5)
        time.sleep(1.2)
        assert [type(event) for event in learner.receive(0.0)] == [Joined]
        assert is_served(learner, worker)
        worker.close()


def test_a_stopped_worker_has_to_rejoin() -> None:
    with learner_at("ipc:", heartbeat_s=0.1, silence_s=0.5) as learner, echo_process(learner) as process:
        [first] = collect(learner, 1)
        os.kill(process.pid, signal.SIGSTOP)
        [left] = collect(learner, 1)
        assert isinstance(left, Left)
        assert left.worker == first.worker
        os.kill(process.pid, signal.SIGCONT)
        [second] = collect(learner, 1)
        assert isinstance(second, Joined)
        assert second.worker > first.worker
        learner.send(second.worker, b"again")
        assert collect(learner, 1) == [Message(second.worker, b"again")]


def test_a_stopped_learner_does_not_blame_its_workers() -> None:
    """Both sleep for longer than the silence, as when a laptop's lid is closed."""
    code = """
import sys, time
from regatta.transport.zeromq import ZmqLearner
learner = ZmqLearner("tcp://127.0.0.1:0", b"spec", heartbeat_s=0.1, silence_s=1.0)
print(learner.address, flush=True)
while True:
    for event in learner.receive(1.0):
        print(type(event).__name__, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().decode().strip()
        worker = ZmqWorker(address, "anna", heartbeat_s=0.1, silence_s=60.0)
        assert process.stdout.readline() == b"Joined\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.3)
        worker.send(b"x")
        assert process.stdout.readline() == b"Message\n"
        worker.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("url", ["ipc:", TCP])
def test_a_killed_worker_is_noticed_at_once(url: str) -> None:
    with learner_at(url) as learner, echo_process(learner) as process:
        [joined] = collect(learner, 1)
        process.kill()
        started = time.monotonic()
        [left] = collect(learner, 1)
        assert isinstance(left, Left)
        assert left.worker == joined.worker
        assert time.monotonic() - started < 2.0  # not only after the silence


def test_a_learner_that_dies_is_noticed_at_once() -> None:
    code = "from regatta.transport.zeromq import ZmqLearner as L; l = L('tcp://127.0.0.1:0', b''); "
    code += "print(l.address, flush=True); l.receive(60)\nwhile True: l.receive(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        worker = ZmqWorker(process.stdout.readline().decode().strip(), "anna")
        process.kill()
        process.wait()
        with pytest.raises(ConnectionLost, match="broke"):
            worker.receive(2.0)
        worker.close()


def test_a_silent_learner_is_lost() -> None:
    with learner_at(TCP, heartbeat_s=60.0, silence_s=60.0) as learner:
        worker = ZmqWorker(learner.address, "anna", heartbeat_s=0.05, silence_s=0.4)
        with pytest.raises(ConnectionLost, match="no sign of the learner"):
            worker.receive(5.0)
        worker.close()


def test_a_worker_that_takes_nothing_has_left_and_nobody_waited() -> None:
    with learner_at("ipc:") as learner, stranger(learner.address) as sock:
        sock.rcvhwm = 1
        sock.send_multipart(hello())
        [joined] = collect(learner, 1)
        started = time.monotonic()
        for _ in range(2 * wire.MAX_QUEUED):
            learner.send(joined.worker, bytes(10_000))
        assert time.monotonic() - started < 2.0
        [left] = collect(learner, 1)
        assert isinstance(left, Left)
        assert "did not take" in left.reason


def test_closing_does_not_wait_for_a_stopped_worker() -> None:
    learner = ZmqLearner(TCP, b"spec")
    with echo_process(learner) as process:
        [joined] = collect(learner, 1)
        os.kill(process.pid, signal.SIGSTOP)
        learner.send(joined.worker, bytes(50_000_000))
        started = time.monotonic()
        learner.close()
        assert time.monotonic() - started < 1.0


def test_a_second_hello_ends_the_first_session() -> None:
    with learner_at(TCP) as learner, stranger(learner.address) as sock:
        sock.send_multipart(hello())
        sock.send_multipart(hello())
        first, left, second = collect(learner, 3)
        assert isinstance(left, Left)
        assert left.worker == first.worker
        assert isinstance(second, Joined)
        assert second.worker > first.worker


def test_an_old_epoch_is_rejected_counted_and_told() -> None:
    with learner_at(TCP) as learner, stranger(learner.address) as sock:
        sock.send_multipart([HEAD.pack(Kind.DATA, 4_000_000), b"result"])
        wait_until(lambda: learner.counters["frames_rejected"] == 1, learner)
        assert sock.poll(2000)
        assert HEAD.unpack(sock.recv_multipart()[0]) == (Kind.REJOIN, 4_000_000)


def test_nobody_can_speak_for_another_worker() -> None:
    with learner_at(TCP) as learner:
        worker = ZmqWorker(learner.address, "anna")
        with stranger(learner.address) as sock:
            sock.send_multipart([HEAD.pack(Kind.DATA, worker.worker), b"forged"])
            sock.send_multipart([HEAD.pack(Kind.LEAVE, worker.worker)])
            wait_until(lambda: learner.counters["frames_rejected"] >= 1, learner)
        time.sleep(0.2)
        assert learner.receive(0.0) == []
        assert is_served(learner, worker)
        worker.close()


def test_another_protocol_version_is_refused_by_name() -> None:
    with learner_at(TCP) as learner, stranger(learner.address) as sock:
        sock.send_multipart(hello(protocol=99))
        assert sock.poll(2000)
        head, text = sock.recv_multipart()
        assert head[:1] == Kind.DENY
        assert b"protocol" in text
        assert learner.receive(0.0) == []


def test_no_learner_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(TransportError, match=rf"no learner at tcp://127.0.0.1:{port} after 0.3 s"):
        ZmqWorker(f"tcp://127.0.0.1:{port}", "anna", timeout_s=0.3)
    assert time.monotonic() - started < 2.0


def test_a_worker_may_come_before_its_learner() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    code = "import sys; from regatta.transport.zeromq import ZmqWorker as W; W(sys.argv[1], 'early').close()"
    process = subprocess.Popen([sys.executable, "-c", code, address])
    time.sleep(0.7)
    with learner_at(address) as learner:
        assert [type(event) for event in collect(learner, 2)] == [Joined, Left]
    assert process.wait() == 0


def test_a_learner_may_come_back_at_the_same_address() -> None:
    with learner_at(TCP) as learner:
        address = learner.address
        worker = ZmqWorker(address, "anna")
        worker.close()
    with learner_at(address):
        worker = ZmqWorker(address, "anna", timeout_s=5.0)
        worker.close()


# Tokens


@pytest.mark.parametrize(
    ("learner_token", "worker_token", "says"),
    [(TOKEN, OTHER, "not with this token"), (TOKEN, None, "wants the run's token"), (None, TOKEN, "without a token")],
    ids=["wrong", "missing", "needless"],
)
@pytest.mark.parametrize("url", ["ipc:", TCP])
def test_tokens_that_do_not_match(url: str, learner_token: str | None, worker_token: str | None, says: str) -> None:
    with learner_at(url, learner_token) as learner:
        started = time.monotonic()
        with pytest.raises(Refused, match=says) as refusal:
            ZmqWorker(learner.address, "anna", worker_token)
        assert time.monotonic() - started < 2.0
        assert TOKEN not in str(refusal.value)
        assert OTHER not in str(refusal.value)
        assert learner.receive(0.0) == []
        wait_until(lambda: learner.counters["handshakes_failed"] > 0, learner)


def test_the_learners_key_alone_does_not_open_the_door() -> None:
    def prepare(sock: wire.Socket) -> None:
        wire.present_keys(sock, TOKEN)
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()

    with learner_at(TCP, TOKEN) as learner, stranger(learner.address, prepare) as sock:
        sock.send_multipart(hello())
        wait_until(lambda: learner.counters["handshakes_failed"] > 0, learner)
        assert learner.receive(0.2) == []
        worker = ZmqWorker(learner.address, "anna", TOKEN)
        assert isinstance(collect(learner, 1)[0], Joined)
        assert is_served(learner, worker)
        worker.close()


def test_what_travels_under_a_token_cannot_be_read() -> None:
    secret = b"the weights of the policy"
    seen = bytearray()
    with learner_at(TCP, TOKEN) as learner, socket.create_server(("127.0.0.1", 0)) as door:
        relay = subprocess.Popen(
            [sys.executable, "-c", RELAY, str(door.fileno()), learner.address.rpartition(":")[2]],
            pass_fds=[door.fileno()],
            stdout=subprocess.PIPE,
        )
        worker = ZmqWorker(f"tcp://127.0.0.1:{door.getsockname()[1]}", "anna", TOKEN)
        learner.send(worker.worker, secret)
        assert worker.receive(5.0) == secret
        worker.close()
        seen += relay.communicate(timeout=10)[0]
    assert len(seen) > 200
    assert secret not in seen
    assert b"anna" not in seen


RELAY = """
import selectors, socket, sys
door = socket.socket(fileno=int(sys.argv[1]))
near, _ = door.accept()
far = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
both = selectors.DefaultSelector()
both.register(near, selectors.EVENT_READ, far)
both.register(far, selectors.EVENT_READ, near)
while True:
    for key, _ in both.select():
        data = key.fileobj.recv(65536)
        if not data:
            sys.exit()
        sys.stdout.buffer.write(data)
        key.data.sendall(data)
"""


# Garbage


GARBAGE: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"H"],
    [b"\xff" * 9, b"x"],
    [HEAD.pack(Kind.HELLO, 0)],
    [HEAD.pack(Kind.HELLO, 0), b""],
    [HEAD.pack(Kind.HELLO, 0), b"\x91" * 5000],
    [HEAD.pack(Kind.HELLO, 0), b"\x91" * 4000],
    [HEAD.pack(Kind.HELLO, 0), b"x" * 10_000_000],
    [HEAD.pack(Kind.HELLO, 0), msgspec.msgpack.encode([wire.PROTOCOL, "x" * 256, 1, "host"])],
    [HEAD.pack(Kind.HELLO, 0), msgspec.msgpack.encode([wire.PROTOCOL, 7])],
    [HEAD.pack(Kind.HELLO, 0), b"\x94\x01\xa2\xff\xfe\x01\xa1h"],
    [*hello(), b"more"],
    [HEAD.pack(Kind.DATA, 1)],
    [HEAD.pack(Kind.DATA, 1), b"x", b"y"],
    [HEAD.pack(Kind.DATA, 2**64 - 1), b"x"],
    [HEAD.pack(Kind.WELCOME, 1), b"spec"],
    [b"H"] * 5000,
]


@pytest.mark.parametrize("url", ["ipc:", TCP])
def test_garbage_is_counted_and_dropped(url: str) -> None:
    with learner_at(url) as learner:
        worker = ZmqWorker(learner.address, "anna")
        assert len(collect(learner, 1)) == 1
        with stranger(learner.address) as sock:
            for frame in GARBAGE:
                sock.send_multipart(frame)
            wait_until(lambda: learner.counters["frames_rejected"] == len(GARBAGE), learner)
        assert learner.receive(0.0) == []
        assert is_served(learner, worker)
        worker.close()


def test_bytes_that_are_not_even_zeromq() -> None:
    rng = random.Random(1)
    with learner_at(TCP) as learner:
        worker = ZmqWorker(learner.address, "anna")
        assert len(collect(learner, 1)) == 1
        host, port = "127.0.0.1", int(learner.address.rpartition(":")[2])
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
        for start in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\xff" * 100, greeting, greeting + b"\x02" + b"\xff" * 8):
            for _ in range(5):
                with socket.create_connection((host, port)) as sock:
                    sock.sendall(start + rng.randbytes(rng.randrange(2000)))
        assert is_served(learner, worker)
        assert learner.receive(0.0) == []
        worker.close()


def test_a_frame_over_the_limit_costs_only_the_sender() -> None:
    with learner_at(TCP, max_frame_bytes=100_000) as learner:
        worker = ZmqWorker(learner.address, "anna")
        with stranger(learner.address) as sock:
            sock.send_multipart(hello())
            assert len(collect(learner, 2)) == 2
            sock.send_multipart([HEAD.pack(Kind.DATA, worker.worker), bytes(200_000)])
            [left] = collect(learner, 1)
            assert isinstance(left, Left)
            assert left.worker != worker.worker
        assert is_served(learner, worker)
        worker.close()


def test_our_own_ends_refuse_to_send_over_the_limit() -> None:
    with learner_at(TCP, max_frame_bytes=100) as learner:
        worker = ZmqWorker(learner.address, "anna", max_frame_bytes=100)
        for send in (worker.send, lambda data: learner.send(1, data), lambda data: learner.publish(1, data)):
            with pytest.raises(TransportError, match="101 bytes is over the limit of 100"):
                send(bytes(101))
        worker.close()


def mutated(rng: random.Random, frame: list[bytes]) -> list[bytes]:
    parts = [bytearray(part) for part in frame]
    for _ in range(rng.randint(1, 4)):
        part = rng.choice(parts)
        match rng.randrange(6):
            case 0 if part:
                part[rng.randrange(len(part))] = rng.randrange(256)
            case 1 if part:
                del part[rng.randrange(len(part)) :]
            case 2:
                part += rng.randbytes(rng.randrange(20))
            case 3:
                parts.append(bytearray(rng.randbytes(rng.randrange(20))))
            case 4 if len(parts) > 1:
                parts.pop(rng.randrange(len(parts)))
            case 5:
                rng.shuffle(parts)
    return [bytes(part) for part in parts]


def test_ten_thousand_mutations_of_good_frames() -> None:
    rng = random.Random(0)
    with learner_at(TCP) as learner:
        worker = ZmqWorker(learner.address, "anna")
        assert len(collect(learner, 1)) == 1
        good = [
            hello(),
            [HEAD.pack(Kind.BEAT, worker.worker)],
            [HEAD.pack(Kind.DATA, worker.worker), b"a result"],
            [HEAD.pack(Kind.LEAVE, worker.worker)],
            [HEAD.pack(Kind.WELCOME, worker.worker), b"spec"],
        ]
        with stranger(learner.address) as sock:
            sock.sndhwm = 0
            for n in range(10_000):
                sock.send_multipart(mutated(rng, rng.choice(good)))
                if n % 500 == 0:
                    events = learner.receive(0.0)
                    assert all(event.worker != worker.worker for event in events)
            wait_until(lambda: learner.counters["frames_rejected"] > 5000, learner)
            learner.send(worker.worker, b"still there?")
            assert worker.receive(5.0) == b"still there?"
            worker.send(b"yes")
            deadline = time.monotonic() + 5.0
            while Message(worker.worker, b"yes") not in learner.receive(0.1):
                assert time.monotonic() < deadline
        worker.close()


def test_a_worker_survives_a_babbling_learner() -> None:
    rng = random.Random(3)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        code = "import sys; from regatta.transport.zeromq import ZmqWorker as W\n"
        code += "w = W(sys.argv[1], 'x'); assert w.receive(20) == b'the end'; w.close()"
        process = subprocess.Popen([sys.executable, "-c", code, f"tcp://127.0.0.1:{port}"])
        identity, *_ = router.recv_multipart()
        router.send_multipart([identity, HEAD.pack(Kind.WELCOME, 5), b"spec"])
        good = [
            [HEAD.pack(Kind.BEAT, 5)],
            [HEAD.pack(Kind.DATA, 6), b"not for you"],
            [HEAD.pack(Kind.SNAPSHOT, 5), wire.VERSION.pack(1), b"weights"],
        ]
        over = (Kind.GOODBYE, Kind.DENY, Kind.REJOIN, Kind.DATA)
        for _ in range(3000):
            frame = mutated(rng, rng.choice(good))
            if frame[0][:1] not in over:
                router.send_multipart([identity, *frame])
        router.send_multipart([identity, HEAD.pack(Kind.DATA, 5), b"the end"])
        assert process.wait(20) == 0
