"""What a run has come to so far: counters, the last episodes, where the time went, and which environments failed.

It turns an iteration's results into rows of the run record and into the figures that displays show. It decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from regatta.algorithms.base import Metrics
from regatta.dispatch import WorkerView
from regatta.errors import EnvError
from regatta.types import Arrays, Episode, Fault, Result

RETURN_WINDOW = 100  # episodes in return_mean
MAX_FAULTY_ITERATIONS = 20  # iterations in a row in which environments fail before the run ends
CURVE_POINTS = 400

Results = list[tuple[Result, Arrays]]


class Progress(msgspec.Struct):
    """Where the run stands; what displays show and the last line of `--json` says."""

    total_steps: int
    steps: int = 0
    iterations: int = 0
    episodes: int = 0
    return_mean: float | None = None
    length_mean: float | None = None
    wall_s: float = 0.0
    steps_per_s: float = 0.0
    learn_s: float = 0.0  # learning, waiting for results, and the workers' own time, all summed
    wait_s: float = 0.0
    collect_s: float = 0.0
    restarts: int = 0
    results_dropped: int = 0
    env_faults: int = 0
    non_finite: int = 0
    workers: list[WorkerView] = []
    curve: list[float] = []  # return_mean over the run, for a small curve
    phase: str = "starting"
    saving: str | None = None  # why the record cannot be saved at the moment

    def summary(self) -> dict[str, Any]:
        """The figures of the run record's status, also the last line of `--json`."""
        return {
            "steps": self.steps,
            "iterations": self.iterations,
            "episodes": self.episodes,
            "return_mean": self.return_mean,
            "wall_s": round(self.wall_s, 3),
            "steps_per_s": round(self.steps_per_s, 1),
            "workers": len(self.workers),
            "restarts": self.restarts,
            "results_dropped": self.results_dropped,
        }


class Account:
    def __init__(self, total_steps: int) -> None:
        self.progress = Progress(total_steps=total_steps)
        self.env_faults = 0
        self._window: deque[Episode] = deque(maxlen=RETURN_WINDOW)
        self._last_fault: Fault | None = None
        self._faulty_iterations = 0
        self._totals: dict[str, float] = {}
        self._began = time.monotonic()
        self._wall_before = 0.0  # of the sessions before this one
        self._first_update: tuple[float, int] | None = None

    def begin(self) -> None:
        """The clock starts."""
        self._began = time.monotonic()

    @property
    def wall_s(self) -> float:
        return self._wall_before + time.monotonic() - self._began

    @property
    def learning(self) -> bool:
        """Whether the first update is done, and with it all compilation."""
        return self._first_update is not None

    def reached(self, return_mean: float) -> bool:
        mean = self.progress.return_mean
        return mean is not None and len(self._window) == RETURN_WINDOW and mean >= return_mean

    # -- an iteration -------------------------------------------------------------------------------------

    def take_in(self, iteration: int, results: Results) -> list[dict[str, Any]]:
        """Count an iteration's results; its episodes as rows of the record."""
        progress = self.progress
        progress.iterations = iteration
        progress.steps += taken(results)
        rows = []
        for share, (result, _) in enumerate(results):
            lane = result.lane if result.lane >= 0 else share
            progress.collect_s += result.seconds
            for episode in sorted(result.episodes, key=lambda e: (e.step, e.env)):
                self._window.append(episode)
                rows.append(
                    {
                        "iteration": iteration,
                        "steps": progress.steps,
                        "lane": lane,
                        "env": episode.env,
                        "return": episode.score,
                        "length": episode.length,
                    }
                )
        progress.episodes += len(rows)
        self._average()
        self._measure()
        return rows

    def _average(self) -> None:
        if self._window:
            self.progress.return_mean = float(np.mean([episode.score for episode in self._window]))
            self.progress.length_mean = float(np.mean([episode.length for episode in self._window]))

    def _measure(self) -> None:
        now, progress = time.monotonic(), self.progress
        progress.wall_s = self.wall_s
        if self._first_update is None:
            self._first_update = (now, progress.steps)
        elif now > self._first_update[0]:
            progress.steps_per_s = (progress.steps - self._first_update[1]) / (now - self._first_update[0])

    def row(self, metrics: Metrics) -> dict[str, Any]:
        """The iteration in the record."""
        progress = self.progress
        totals = {name: getattr(progress, name) for name in ("learn_s", "wait_s", "collect_s")}
        spent = {name: total - self._totals.get(name, 0.0) for name, total in totals.items()}
        self._totals = totals
        return {
            "iteration": progress.iterations,
            "steps": progress.steps,
            "episodes": progress.episodes,
            "wall_s": progress.wall_s,
            "return_mean": progress.return_mean,
            "length_mean": progress.length_mean,
            "steps_per_s": progress.steps_per_s,
            "workers": len(progress.workers),
            "results_dropped": progress.results_dropped,
            **spent,
            **metrics,
        }

    def blame(self, results: Results) -> str | None:
        """What to say of environments that failed and were replaced: the same failure is told once."""
        faults = [fault for result, _ in results for fault in result.faults]
        self._faulty_iterations = self._faulty_iterations + 1 if faults else 0
        if not faults:
            return None
        self.env_faults += len(faults)
        last = faults[-1]
        new = self._last_fault is None or self._last_fault.text != last.text
        self._last_fault = last
        if self._faulty_iterations >= MAX_FAULTY_ITERATIONS:
            raise EnvError(
                f"environments failed in {MAX_FAULTY_ITERATIONS} iterations in a row; the last:\n{last.text}"
            )
        return f"lane {last.lane}, environment {last.env} failed and was replaced:\n{last.text}" if new else None

    def draw(self) -> None:
        """One more point of the small curve."""
        progress = self.progress
        if progress.return_mean is not None:
            progress.curve.append(progress.return_mean)
            if len(progress.curve) > CURVE_POINTS:
                progress.curve = progress.curve[::2]

    # -- checkpoints --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "episodes": self.progress.episodes,
            "wall_s": self.progress.wall_s,
            "env_faults": self.progress.env_faults,
            "window": [msgspec.to_builtins(episode) for episode in self._window],
        }

    def load(self, iteration: int, steps: int, state: dict[str, Any]) -> None:
        progress = self.progress
        self._window.extend(msgspec.convert(episode, Episode) for episode in state["window"])
        self._wall_before, self.env_faults = state["wall_s"], state["env_faults"]
        progress.iterations, progress.steps, progress.episodes = iteration, steps, state["episodes"]
        self._average()


def taken(results: Results) -> int:
    """Steps in environments, all together."""
    return sum(result.steps for result, _ in results)
