"""Regatta beside its peers in one invocation of speed.py: who takes part, single measurements, alternating rounds.

What a task measures and how its table reads is said in the speed_*.py of its algorithm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
from processes import ChildFailed, Children, facts, train_command
from rich.console import Console
from rich.markup import escape

from regatta import config as configs
from regatta.rollout.envs import EnvConfig

HERE = Path(__file__).resolve().parent


def run_steps(steps: int) -> tuple[str, ...]:
    return (f"run.steps={steps}",)


@dataclass(frozen=True)
class Task:
    """What is trained, as it would be typed after `regatta train`, and how much faster than whom it shall be."""

    title: str
    words: tuple[str, ...]
    steps: int  # in environments, of one measurement
    sized: Callable[[int], tuple[str, ...]] = run_steps  # further words for so many steps
    bars: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Library:
    title: str
    needs: tuple[str, ...]  # distributions
    scripts: dict[str, str]  # by algorithm, in peers/


LIBRARIES = {
    "sb3": Library("Stable-Baselines3", ("stable-baselines3",), {"ppo": "ppo_sb3.py", "sac": "sac_sb3.py"}),
    "sbx": Library("SBX", ("sbx-rl",), {"ppo": "ppo_sbx.py", "sac": "sac_sbx.py"}),
    # EvoTorch brings Ray without what RLlib needs.
    "rllib": Library("RLlib", ("ray", "ormsgpack"), {"ppo": "ppo_rllib.py"}),
    "contrib": Library("sb3-contrib", ("sb3-contrib",), {"trpo": "trpo_contrib.py"}),
    "evotorch": Library("EvoTorch", ("evotorch",), {"es": "es_evotorch.py"}),
}

Figures = dict[str, list[float]]  # who -> one figure per round
Contender = Callable[[int], dict[str, float]]  # seed -> figures


class Bench:
    """One invocation: its options, its child processes, and what they have said so far."""

    def __init__(self, options: argparse.Namespace, children: Children, progress: Console) -> None:
        self.options = options
        self.children = children
        self.progress = progress
        self.pythons: dict[str, str] = {}  # peer -> the interpreter that has it
        self.versions: dict[str, dict[str, str]] = {}  # of who took part in the task at hand
        self.machine: dict[str, Any] = {}
        self.raw: dict[str, Any] = {}
        self._own_versions: dict[str, str] = {}
        self._count = 0

    # -- who takes part -----------------------------------------------------------------------------------

    def find_peers(self, algorithms: Collection[str]) -> None:
        for name, library in LIBRARIES.items():
            if name not in self.options.peers or not library.scripts.keys() & set(algorithms):
                continue
            for python in self.options.peers_python:
                found = f"from importlib import metadata; [metadata.version(name) for name in {library.needs}]"
                try:
                    self.children.run([python, "-c", found])
                except ChildFailed:
                    continue
                except OSError as error:
                    raise SystemExit(f"--peers-python {python}: {error.strerror}") from error
                self.pythons[name] = python
                break
            else:
                self.say(
                    f"{library.title} is not measured: no {' with '.join(library.needs)} in "
                    f"{', '.join(self.options.peers_python)}; make a venv for it and give --peers-python"
                )

    def peers(self, algorithm: str) -> list[str]:
        return [name for name in self.pythons if algorithm in LIBRARIES[name].scripts]

    def say(self, text: str) -> None:
        self.progress.print(escape(text), highlight=False, soft_wrap=True)

    # -- one measurement each -----------------------------------------------------------------------------

    def steps(self, task: Task) -> int:
        return int(self.options.steps or task.steps)

    def words(self, task: Task, *, changed: bool = True) -> list[str]:
        """All that is typed for the task, with what --set changes."""
        return [*task.words, *task.sized(self.steps(task)), *(self.options.set if changed else ())]

    def regatta(
        self, words: Sequence[str], seed: int, env: dict[str, str] | None = None
    ) -> tuple[dict[str, Any], float, Path]:
        """Train by the real command. What it says at its end, seconds from start to exit, and the store."""
        self._count += 1
        store = self.children.folder / f"runs-{self._count}"
        command = train_command(words, workers=self.options.workers, seed=seed, store=store)
        finished = self.children.run(command, env=env)
        end = finished.json()
        if end["restarts"] or end["results_dropped"]:
            self.say(f"mind: {end['restarts']} workers restarted, {end['results_dropped']} results dropped")
        if not self.machine:
            shown = facts(self.children, end["run"], store)
            self._own_versions = shown.pop("versions")
            self.machine = {**shown, "cores_used": cores()}
        self.versions["regatta"] = self._own_versions
        return end, finished.seconds, store

    def peer(self, name: str, algorithm: str, settings: dict[str, Any]) -> tuple[dict[str, Any], float]:
        script = HERE / "peers" / LIBRARIES[name].scripts[algorithm]
        finished = self.children.run([self.pythons[name], str(script), json.dumps(settings)])
        figures = finished.json()
        self.versions[name] = figures.pop("versions")
        return figures, finished.seconds

    def stepping(self, settings: dict[str, Any], steps: int) -> dict[str, Any]:
        """Random actions in the same environment on every core, and nothing else."""
        work = {**{name: settings[name] for name in ("env", "kwargs", "seed")}, "steps": steps, "processes": cores()}
        figures: dict[str, Any] = self.children.run(
            [sys.executable, str(HERE / "stepping.py"), json.dumps(work)]
        ).json()
        return figures

    def settings(self, words: Sequence[str], seed: int) -> dict[str, Any]:
        """The same settings for a peer, read from Regatta's own resolved config so that they cannot differ."""
        config = configs.resolve(words[0], overrides=words[1:], seed=seed)
        env = config.env
        if env.view != EnvConfig(id=env.id).view or env.max_episode_steps:
            raise SystemExit("peers get the environment as it is made: change env.id and env.kwargs only")
        if config.network.kind not in ("mlp", "linear"):
            raise SystemExit(f"network.kind={config.network.kind}: peers have mlp and linear")
        return {
            "env": env.id,
            "kwargs": env.kwargs,
            "envs": env.lanes * env.lane_envs,
            "steps": config.run.steps,
            "seed": seed,
            "sizes": [] if config.network.kind == "linear" else list(config.network.sizes),
            "activation": config.network.activation,
            "log_std": config.network.log_std,
            "algorithm": msgspec.to_builtins(config.algorithm),
            "vec_env": self.options.vec_env,
            "env_runners": self.options.env_runners,
        }

    def rounds(self, what: str, contenders: dict[str, Contender]) -> Figures:
        """Every contender once per round, each round beginning with another one. Who fails takes no further part."""
        figures: Figures = {}
        names = list(contenders)
        for number in range(self.options.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if name not in contenders:
                    continue
                label = f"{what}, round {number + 1} of {self.options.rounds}: {title(name)}"
                try:
                    with self.progress.status(label):
                        measured = contenders[name](number)
                except ChildFailed as error:
                    if library(name) is None:
                        raise
                    self.say(f"{title(name)} is left out of {what}, it failed:\n{error}")
                    del contenders[name]
                    figures.pop(name, None)
                    continue
                for key, value in measured.items():
                    figures.setdefault(key, []).append(value)
                self.say(f"{label}: {', '.join(f'{value:,.4g}' for value in measured.values())}")
        return figures

    def about(self) -> str:
        """The conditions of the task at hand, and the versions of all who took part in it."""
        made = [
            f"{title(name)}: {', '.join(f'{library} {number}' for library, number in versions.items())}"
            for name, versions in self.versions.items()
        ]
        conditions = (
            f"{self.machine['cpu']}, {self.machine['cores_used']} used; {self.machine['platform']}; "
            f"{date.today().isoformat()}. Medians of {self.options.rounds} alternating round(s). One BLAS and OpenMP "
            f"thread each. Regatta with --workers {self.options.workers}."
        )
        return "\n\n".join([conditions, *made])


# -- words and figures --------------------------------------------------------------------------------------

TITLES = {
    "regatta": "Regatta",
    "cold": "Regatta, cold",
    "warm": "Regatta, warm",
    "training": "in training",
    "alone": "alone",
    "update": "PPO.update alone",
    "compiled": "compiled call alone",
    "contrib+subproc": "sb3-contrib, a process per environment",
    "sbx+grouped": "SBX, updates grouped as Regatta's",
    "stepping": "stepping alone",
}


def library(name: str) -> Library | None:
    """Whose contender it is; variants of one have a plus sign."""
    return LIBRARIES.get(name.partition("+")[0])


def title(name: str) -> str:
    return LIBRARIES[name].title if name in LIBRARIES else TITLES[name]


def spread(values: list[float], digits: int) -> tuple[str, str]:
    median = statistics.median(values)
    return f"{median:,.{digits}f}", f"{min(values):,.{digits}f} – {max(values):,.{digits}f}"


def ratios(figures: Figures, one: str, other: str) -> list[float]:
    """Round by round, as only figures taken one after another compare."""
    return [a / b for a, b in zip(figures[one], figures[other], strict=True)]


def against(ratios: list[float], bar: float | None) -> tuple[str, str, str, str]:
    """The median of the rounds' ratios, their range, the bar and whether it is met."""
    ratio, said = statistics.median(ratios), f"{min(ratios):.2f} – {max(ratios):.2f}"
    return (f"{ratio:.2f}", said, *(("–", "") if bar is None else (f"≥ {bar:g}", verdict(ratio >= bar))))


RATE_COLUMNS = ("", ">steps/s", ">from – to", ">Regatta is × as fast", ">from – to", ">bar", "")


def rate_rows(figures: Figures, contenders: Sequence[str], bars: dict[str, float]) -> list[list[str]]:
    rows = []
    for who in contenders:
        if who == "regatta":
            rows.append([title(who), *spread(figures[who], 0), "–", "–", "–", ""])
        elif who in figures:
            said = against(ratios(figures, "regatta", who), bars.get(who))
            rows.append([title(who), *spread(figures[who], 0), *said])
        elif who in bars:
            rows.append([title(who), "–", "–", "–", "–", f"≥ {bars[who]:g}", "not measured"])
    return rows


def verdict(met: bool) -> str:
    return "met" if met else "NOT met"


def section(heading: str, note: str, table: str) -> str:
    return f"## {heading}\n\n{note}\n\n{table}\n"


def environment(settings: dict[str, Any]) -> str:
    made = ", ".join(f"{name}={value!r}" for name, value in settings["kwargs"].items())
    return f"{settings['env']} ({made})" if made else str(settings["env"])


def layers(settings: dict[str, Any]) -> str:
    sizes = "x".join(map(str, settings["sizes"]))
    return f"{sizes} {settings['activation']}" if sizes else "linear"


def normalised(knobs: dict[str, Any]) -> str:
    names = [name for name in ("obs", "reward") if knobs.get(f"normalize_{name}")]
    return f"normalised: {' and '.join(names) or 'nothing'}"


def tempo(knobs: dict[str, Any]) -> str:
    return (
        f"Regatta collects {'while it learns' if knobs['staleness'] else 'and learns in turn'} "
        f"(algorithm.staleness={knobs['staleness']}), the peers in turn"
    )


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
