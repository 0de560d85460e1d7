"""The learner's update called alone in a loop, in a process that does nothing else; run by speed.py.

    python update_alone.py SECONDS PRESET KEY=VALUE ...

A short training in this one process records what the last iterations gave to `PPO.update` and what that gave to
its compiled function. Both are then called over and over on those data, for SECONDS each. The last line of the
output is one JSON object with the mean seconds of a call.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import regatta
from regatta import config as configs
from regatta.algorithms import ppo

ITERATIONS = 12
KEPT = 8  # iterations whose data the loops go through


class Recorder:
    """Stands between PPO and its compiled function, and while `on` keeps what passes."""

    def __init__(self) -> None:
        self.on = True
        self.algorithm: Any = None
        self.compiled: Any = None
        self.updates: deque[tuple[Any, ...]] = deque(maxlen=KEPT)  # (iteration, results, behaviour)
        self.calls: deque[tuple[Any, ...]] = deque(maxlen=KEPT)  # all arguments of the compiled function

    def attach(self) -> None:
        update, compile_update = ppo.PPO.update, ppo.compile_update

        def recorded_update(algorithm: Any, *arguments: Any) -> Any:
            self.algorithm = algorithm
            if self.on:
                self.updates.append(arguments)
            return update(algorithm, *arguments)

        def recorded_compile(*arguments: Any) -> Any:
            self.compiled = compile_update(*arguments)
            return self._call

        ppo.PPO.update = recorded_update  # type: ignore[method-assign,assignment]
        ppo.compile_update = recorded_compile  # type: ignore[assignment]

    def _call(self, theta: Any, opt_state: Any, *data: Any) -> Any:
        if self.on:
            import jax

            # Copies, because the compiled function overwrites these two.
            self.calls.append((*jax.tree.map(np.array, (theta, opt_state)), *data))
        return self.compiled(theta, opt_state, *data)


def mean_seconds(call: Callable[[int], None], seconds: float) -> tuple[float, int]:
    """Mean time of a call, after one round over all data that does not count."""
    for i in range(KEPT):
        call(i)
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        call(done)
        done += 1
    return spent / done, done


def main() -> None:
    seconds, preset, *overrides = float(sys.argv[1]), *sys.argv[2:]
    config = configs.resolve(preset, overrides=overrides)
    per_iteration = config.env.lanes * config.env.lane_envs * config.algorithm.rollout_steps
    recorder = Recorder()
    recorder.attach()
    with tempfile.TemporaryDirectory() as store:
        short = f"run.steps={ITERATIONS * per_iteration}"
        regatta.train(preset, [*overrides, short], store=store, workers=0)
    recorder.on = False

    theta, opt_state = recorder.calls[-1][:2]

    def compiled(i: int) -> None:
        nonlocal theta, opt_state
        theta, opt_state, report = recorder.compiled(theta, opt_state, *recorder.calls[i % KEPT][2:])
        np.asarray(report)  # waits for it

    def update(i: int) -> None:
        recorder.algorithm.update(*recorder.updates[i % KEPT])

    with threadpool_limits(1):
        update_s, updates = mean_seconds(update, seconds)
        compiled_s, calls = mean_seconds(compiled, seconds)
    print(json.dumps({"update_s": update_s, "updates": updates, "compiled_s": compiled_s, "calls": calls}))


if __name__ == "__main__":
    main()
