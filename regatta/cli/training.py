"""Commands that train: `train`, `resume` and `worker`."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from regatta import assemble
from regatta.cli.display import make_display
from regatta.errors import ConnectionLost, Interrupted, TransportError, UsageError
from regatta.runs.run import Run
from regatta.worker import TOKEN_ENV, join

RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)


def worker_count(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdigit():
        raise UsageError(f"--workers {text}: valid are 'auto', 0 (train in this process) and any whole number")
    return int(text)


def read_token(file: str | None) -> str | None:
    """From the file or the environment, never from an argument, which every user of the machine can read."""
    if file is None:
        return os.environ.get(TOKEN_ENV) or None
    path = Path(file)
    try:
        mode = path.stat().st_mode
        text = path.read_text("utf-8").strip()
    except OSError as error:
        raise UsageError(f"--token-file {file}: {error.strerror}") from error
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"--token-file {file}: others can read it; first: chmod 600 {file}")
    return text


def train(preset: str | None, overrides: Sequence[str], *, as_json: bool, **options: Any) -> None:
    command = ["regatta", *sys.argv[1:]]
    _show(
        lambda display: assemble.train(preset, overrides, display=display, command=command, **options),
        as_json,
    )


def resume(ref: str, *, as_json: bool, **options: Any) -> None:
    _show(lambda display: assemble.resume(ref, display=display, **options), as_json)


def _show(carry_out: Callable[[Any], Run], as_json: bool) -> None:
    display = make_display(Console(stderr=as_json))
    with display:
        try:
            run = carry_out(display)
        except Interrupted:
            if as_json and display.run is not None:
                print(json.dumps(_final(display.run)), flush=True)
            raise
    if as_json:
        print(json.dumps(_final(run)), flush=True)
    else:
        display.finish(run)


def _final(run: Run) -> dict[str, Any]:
    status = run.status()
    names = ("status", "steps", "iterations", "episodes", "return_mean", "wall_s", "steps_per_s")
    figures = {name: getattr(status, name) for name in names}
    rest = ("weights_sha256", "workers", "restarts", "results_dropped")
    return {
        "run": run.id,
        "preset": run.facts.preset,
        **figures,
        **{name: getattr(status, name) for name in rest},
    }


def work(url: str, name: str | None, token: str | None, modules: Sequence[str]) -> None:
    """Serve until the learner says that the run is over; breaks are bridged with growing pauses."""
    if name is not None and re.fullmatch(r"worker-\d+", name):
        raise UsageError(f"--name {name}: names like worker-0 are those of the learner's own; choose another")
    tries = 0
    while True:
        try:
            worker = join(url, name, token, modules)
            print(f"joined {url}; Ctrl-C leaves", file=sys.stderr)
            worker.serve()
        except ConnectionLost as error:
            tries = 0
            print(f"lost the learner: {error}; joining again", file=sys.stderr)
        except TransportError as error:
            if type(error) is not TransportError:
                raise
            print(f"{error}; trying again", file=sys.stderr)
        else:
            print("the run is over", file=sys.stderr)
            return
        time.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
        tries += 1
