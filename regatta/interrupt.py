"""Ctrl-C and SIGTERM while training."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from regatta.errors import Interrupted


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM calls `stop`, which lets the learner save; the second ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(*_: object) -> None:
        stop()

    def count() -> None:
        # Python's own handlers wait until a compiled call returns, and then see two signals as one. The byte
        # that the interpreter writes for each comes at once.
        seen = 0
        while data := reader.recv(64):
            seen += sum(byte in numbers for byte in data)
            if seen > 1:
                os._exit(Interrupted.exit_code)  # workers notice by themselves: their leash is cut

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    counter = threading.Thread(target=count, name="regatta-signals", daemon=True)
    counter.start()
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        writer.close()
        counter.join()
        reader.close()
