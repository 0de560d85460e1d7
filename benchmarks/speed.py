"""How fast Regatta trains beside its peers: same task, same settings, one machine, alternating rounds.

Absolute figures differ from machine to machine and from hour to hour; only the ratios of one invocation count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from processes import ChildFailed, Children, evaluate, facts, markdown, train_command
from rich.console import Console
from rich.markup import escape

import regatta
from regatta import config as configs

HERE = Path(__file__).resolve().parent
EPISODES = 20
SOLVED = 475.0  # CartPole-v1's own threshold


@dataclass(frozen=True)
class Task:
    """What is trained, as it would be typed after `regatta train`, and how much faster than whom it shall be."""

    title: str
    words: tuple[str, ...]
    bars: dict[str, float] = field(default_factory=dict)


TASKS = {
    "cartpole": Task(
        "PPO on CartPole-v1, rl-zoo's settings",
        ("cartpole-ppo", "run.steps=200_000"),
        {"sb3": 8.0, "sbx": 6.0},
    ),
    "halfcheetah": Task(
        "PPO on HalfCheetah-v5, Stable-Baselines3's defaults on 8 environments",
        (
            *("ppo", "env.id=HalfCheetah-v5", "env.lanes=2", "env.lane_envs=4", "run.steps=200_000"),
            *("algorithm.rollout_steps=256", "algorithm.epochs=10", "algorithm.minibatch=64", "algorithm.lr=3e-4"),
            *("network.sizes=[64, 64]", "network.activation=tanh"),
            *("algorithm.normalize_obs=false", "algorithm.normalize_reward=false"),
        ),
        {"sb3": 7.0},
    ),
}
STARTUP = Task("From the command to a solved CartPole and exit", ("cartpole-ppo", "run.steps=100_000"))
STARTUP_BAR = 1 / 3  # of Stable-Baselines3's time
UPDATE_BAR = 0.9  # of the speed of the same function called alone
CHOICES = (*TASKS, "startup", "update", "all")


@dataclass(frozen=True)
class Library:
    title: str
    distribution: str
    script: str


LIBRARIES = {
    "sb3": Library("Stable-Baselines3", "stable-baselines3", "ppo_sb3.py"),
    "sbx": Library("SBX", "sbx-rl", "ppo_sbx.py"),
    "rllib": Library("RLlib", "ray", "ppo_rllib.py"),
}

Figures = dict[str, list[float]]  # who -> one figure per round


class Bench:
    """One invocation: its options, its child processes, and what they have said so far."""

    def __init__(self, options: argparse.Namespace, children: Children, progress: Console) -> None:
        self.options = options
        self.children = children
        self.progress = progress
        self.pythons: dict[str, str] = {}  # peer -> the interpreter that has it
        self.versions: dict[str, dict[str, str]] = {}
        self.machine: dict[str, Any] = {}
        self.raw: dict[str, Any] = {}
        self._count = 0

    # -- who takes part -----------------------------------------------------------------------------------

    def find_peers(self) -> None:
        for name, library in LIBRARIES.items():
            if name not in self.options.peers:
                continue
            for python in self.options.peers_python:
                found = f"from importlib import metadata; metadata.version({library.distribution!r})"
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
                    f"{library.title} is not measured: no {library.distribution} in "
                    f"{', '.join(self.options.peers_python)}; make a venv for it and give --peers-python"
                )

    def say(self, text: str) -> None:
        self.progress.print(escape(text), highlight=False, soft_wrap=True)

    # -- one measurement each -----------------------------------------------------------------------------

    def words(self, task: Task) -> list[str]:
        words = [*task.words, *self.options.set]
        return words if self.options.steps is None else [*words, f"run.steps={self.options.steps}"]

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
            self.versions["regatta"] = shown.pop("versions")
            self.machine = {**shown, "cores_used": cores()}
        return end, finished.seconds, store

    def peer(self, name: str, settings: dict[str, Any]) -> tuple[dict[str, Any], float]:
        script = HERE / "peers" / LIBRARIES[name].script
        finished = self.children.run([self.pythons[name], str(script), json.dumps(settings)])
        figures = finished.json()
        self.versions[name] = figures.pop("versions")
        return figures, finished.seconds

    def settings(self, words: Sequence[str], seed: int) -> dict[str, Any]:
        """The same settings for a peer, read from Regatta's own resolved config so that they cannot differ."""
        config = configs.resolve(words[0], overrides=words[1:], seed=seed)
        return {
            "env": config.env.id,
            "envs": config.env.lanes * config.env.lane_envs,
            "steps": config.run.steps,
            "seed": seed,
            "sizes": list(config.network.sizes),
            "activation": config.network.activation,
            "log_std": config.network.log_std,
            "algorithm": msgspec.to_builtins(config.algorithm),
            "vec_env": self.options.vec_env,
            "env_runners": self.options.env_runners,
        }

    def rounds(self, what: str, contenders: dict[str, Callable[[int], dict[str, float]]]) -> Figures:
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
                    if name not in LIBRARIES:
                        raise
                    self.say(f"{title(name)} is left out of {what}, it failed:\n{error}")
                    del contenders[name]
                    figures.pop(name, None)
                    continue
                for key, value in measured.items():
                    figures.setdefault(key, []).append(value)
                self.say(f"{label}: {', '.join(f'{value:,.4g}' for value in measured.values())}")
        return figures

    # -- the tasks ----------------------------------------------------------------------------------------

    def speed(self, name: str) -> str:
        """Steps per second, from the end of the first update to the end of the last."""
        task = TASKS[name]
        words = self.words(task)

        def ours(seed: int) -> dict[str, float]:
            return {"regatta": self.regatta(words, seed)[0]["steps_per_s"]}

        def theirs(peer: str) -> Callable[[int], dict[str, float]]:
            return lambda seed: {peer: self.peer(peer, self.settings(words, seed))[0]["steps_per_s"]}

        figures = self.rounds(name, {"regatta": ours, **{peer: theirs(peer) for peer in self.pythons}})
        settings = self.settings(words, 0)
        self.raw[name] = {"unit": "steps/s", "settings": settings, "figures": figures}
        rows = []
        for who in ["regatta", *LIBRARIES]:
            if who in figures:
                ratios = [a / b for a, b in zip(figures["regatta"], figures[who], strict=True)]
                rows.append([title(who), *spread(figures[who], 0), *against(who, ratios, task.bars.get(who))])
            elif who in task.bars:
                rows.append([title(who), "–", "–", "–", "–", f"≥ {task.bars[who]:g}", "not measured"])
        columns = ("", ">steps/s", ">from – to", ">Regatta is × as fast", ">from – to", ">bar", "")
        return section(task.title, described(settings), markdown(columns, rows))

    def startup(self) -> str:
        """Seconds from starting the process to its exit, with and without compiled programs from a run before."""
        words = list(STARTUP.words)
        if self.options.steps is not None:
            words.append(f"run.steps={self.options.steps}")
        returns: Figures = {}

        def ours(seed: int) -> dict[str, float]:
            cache = {"XDG_CACHE_HOME": str(self.children.folder / f"cache-{seed}")}
            seconds = {}
            for who in ("cold", "warm"):
                end, seconds[who], store = self.regatta(words, seed, cache)
                reached = evaluate(self.children, end["run"], store, EPISODES)
                returns.setdefault(who, []).append(reached)
            return seconds

        def theirs(peer: str) -> Callable[[int], dict[str, float]]:
            def measure(seed: int) -> dict[str, float]:
                model = str(self.children.folder / f"{peer}-{seed}.zip")
                settings = self.settings(words, seed)
                _, seconds = self.peer(peer, {**settings, "save": model})
                played, _ = self.peer(peer, {**settings, "evaluate": model, "episodes": EPISODES})
                returns.setdefault(peer, []).append(played["return_mean"])
                return {peer: seconds}

            return measure

        peers = {peer: theirs(peer) for peer in self.pythons if peer != "rllib"}  # it has no small script
        figures = self.rounds("startup", {"regatta": ours, **peers})
        self.raw["startup"] = {"unit": "seconds", "figures": figures, "returns": returns}
        rows = []
        for who in ("cold", "warm", *peers):
            if who not in figures:
                continue
            solved = sum(reached >= SOLVED for reached in returns[who])
            row = [title(who), *spread(figures[who], 2), f"{solved} of {len(returns[who])}"]
            if who in ("cold", "warm") and "sb3" in figures:
                share = statistics.median(a / b for a, b in zip(figures[who], figures["sb3"], strict=True))
                row += [f"{share:.2f}", f"≤ {STARTUP_BAR:.2f}", verdict(share <= STARTUP_BAR)]
            else:
                row += ["–", "–", ""]
            rows.append(row)
        note = (
            f"{described(self.settings(words, 0))}. Solved: a mean return of {SOLVED:g} over {EPISODES} episodes, "
            "played after the clock stopped. Cold: nothing compiled before; warm: the same command once more."
        )
        columns = ("", ">seconds", ">from – to", ">solved", ">of Stable-Baselines3's", ">bar", "")
        return section(STARTUP.title, note, markdown(columns, rows))

    def update(self) -> str:
        """The learner's update during training beside the same one in a process that does nothing else."""
        rows = []
        for name, task in TASKS.items():
            words = self.words(task)

            def training(seed: int, words: list[str] = words) -> dict[str, float]:
                end, _, store = self.regatta(words, seed)
                seconds = regatta.load_run(end["run"], store=str(store)).metrics()["learn_s"]
                later = [float(s) for s in seconds[1:] if isinstance(s, float)]  # the first one compiles
                if not later:
                    raise SystemExit("--steps is too small for --task update: there was only one iteration")
                return {"training": 1000 * statistics.mean(later)}

            def alone(_: int, words: list[str] = words) -> dict[str, float]:
                command = [sys.executable, str(HERE / "update_alone.py"), str(self.options.seconds), *words]
                figures = self.children.run(command).json()
                return {"update": 1000 * figures["update_s"], "compiled": 1000 * figures["compiled_s"]}

            figures = self.rounds(f"update of {name}", {"training": training, "alone": alone})
            self.raw[f"update-{name}"] = {"unit": "ms", "words": words, "figures": figures}
            for who in ("training", "update", "compiled"):
                row = [name, title(who), *spread(figures[who], 2)]
                if who == "training":
                    row += ["–", "–", ""]
                else:
                    pairs = zip(figures[who], figures["training"], strict=True)
                    share = statistics.median(a / b for a, b in pairs)
                    row += [f"{100 * share:.0f} %", f"≥ {100 * UPDATE_BAR:.0f} %", verdict(share >= UPDATE_BAR)]
                rows.append(row)
        note = (
            f"Training with --workers {self.options.workers}: mean of learn_s without the first iteration. Alone: "
            f"on the data of a short training, {self.options.seconds:g} s each; the whole of PPO.update (which "
            "arranges the data first), and its one compiled call."
        )
        columns = ("task", "", ">ms", ">from – to", ">speed in training", ">bar", "")
        return section("The update, in training and alone", note, markdown(columns, rows))

    def about(self) -> str:
        made = [
            f"{title(name)}: {', '.join(f'{library} {number}' for library, number in versions.items())}"
            for name, versions in self.versions.items()
        ]
        conditions = (
            f"{self.machine['cpu']}, {self.machine['cores_used']} used; {self.machine['platform']}. "
            f"Medians of {self.options.rounds} alternating round(s). One BLAS and OpenMP thread each. "
            f"Regatta with --workers {self.options.workers}."
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
}


def title(name: str) -> str:
    return LIBRARIES[name].title if name in LIBRARIES else TITLES[name]


def spread(values: list[float], digits: int) -> tuple[str, str]:
    median = statistics.median(values)
    return f"{median:,.{digits}f}", f"{min(values):,.{digits}f} – {max(values):,.{digits}f}"


def against(who: str, ratios: list[float], bar: float | None) -> tuple[str, str, str, str]:
    """The median of the rounds' ratios, their range, the bar and whether it is met."""
    if who == "regatta":
        return "–", "–", "–", ""
    ratio, said = statistics.median(ratios), f"{min(ratios):.2f} – {max(ratios):.2f}"
    return (f"{ratio:.2f}", said, *(("–", "") if bar is None else (f"≥ {bar:g}", verdict(ratio >= bar))))


def verdict(met: bool) -> str:
    return "met" if met else "NOT met"


def section(heading: str, note: str, table: str) -> str:
    return f"## {heading}\n\n{note}\n\n{table}\n"


def described(settings: dict[str, Any]) -> str:
    knobs = settings["algorithm"]
    sizes = "x".join(map(str, settings["sizes"]))
    normalised = [name for name in ("obs", "reward") if knobs[f"normalize_{name}"]]
    return (
        f"{settings['env']}: {settings['envs']} environments × {knobs['rollout_steps']} steps, "
        f"{knobs['epochs']} epochs, minibatch {knobs['minibatch']}, {sizes} {settings['activation']}, "
        f"lr {knobs['lr']:g} ({knobs['lr_schedule']}), clip {knobs['clip']:g} ({knobs['clip_schedule']}), "
        f"gamma {knobs['gamma']:g}, lambda {knobs['gae_lambda']:g}, "
        f"normalised: {' and '.join(normalised) or 'nothing'}; {settings['steps']:,} steps; "
        f"Regatta collects {'while it learns' if knobs['staleness'] else 'and learns in turn'} "
        f"(algorithm.staleness={knobs['staleness']}), the peers in turn"
    )


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- the command --------------------------------------------------------------------------------------------

EPILOG = """\
tasks
  cartpole, halfcheetah   steps per second, counted from the end of the first update to the end of the last, for
                          all alike: imports and compilation do not count. Peers are timed by a callback inside
                          one learn() (Stable-Baselines3, SBX), or around train() after the first (RLlib).
  startup                 seconds from starting `regatta train cartpole-ppo` to its exit, beside a script of
                          Stable-Baselines3's with the same settings; the trained policies are then evaluated.
  update                  the learner's update during training beside the same function called alone.

peers
  pip install 'torch==2.13.0' stable-baselines3 sbx-rl 'gymnasium[mujoco]'      in a venv of their own
  pip install 'torch==2.13.0' 'ray[rllib]==2.60.*' 'gymnasium[mujoco]'          in another: it wants another Gymnasium

examples
  python benchmarks/speed.py --task cartpole --peers-python ~/venvs/sb3/bin/python
  python benchmarks/speed.py --task all --cores 2 --json speed.json \\
      --peers-python ~/venvs/sb3/bin/python --peers-python ~/venvs/rllib/bin/python
  python benchmarks/speed.py --task halfcheetah --set algorithm.staleness=0     without overlap
  python benchmarks/speed.py --task all --steps 5000 --rounds 1                 does everything work?

Tables go to stdout as Markdown, progress to stderr. Leave the machine alone meanwhile: the figures of a busy one
mean nothing. A bar that is not met is said and is no error.
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="speed.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", nargs="+", choices=CHOICES, default=["all"], metavar="TASK", help=f"{', '.join(CHOICES)} (default)")
    add("--rounds", type=positive, default=3, help="each contender is measured this many times (default 3)")
    add("--steps", type=positive, help="environment steps of one measurement (default: the task's, 100 k to 200 k)")
    add(
        "--peers",
        nargs="*",
        choices=list(LIBRARIES),
        default=list(LIBRARIES),
        metavar="PEER",
        help=f"who to measure beside Regatta: {', '.join(LIBRARIES)} (default: all installed); none: Regatta alone",
    )
    add(
        "--peers-python",
        action="append",
        metavar="FILE",
        help="interpreter with peers installed; may be repeated (default: this one)",
    )
    add("--workers", default="auto", help="Regatta's --workers (default auto)")
    add("--cores", type=positive, help="use only this many cores, for all alike (default: all)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override of Regatta's config in cartpole, halfcheetah and update; the peers follow. May be repeated",
    )
    add(
        "--vec-env",
        choices=("dummy", "subproc"),
        default="dummy",
        help="how Stable-Baselines3 and SBX step environments: in their process (default, as rl-zoo), or one each",
    )
    add("--env-runners", type=int, default=0, help="RLlib's processes for environments (default 0: in its own)")
    add("--seconds", type=float, default=5.0, help="how long the update is called alone (default 5)")
    add("--json", type=Path, metavar="FILE", help="write all raw figures there")
    options = parser.parse_args(argv)
    options.task = [*TASKS, "startup", "update"] if "all" in options.task else list(dict.fromkeys(options.task))
    # Children work in a folder of their own; and a venv's interpreter must not be resolved to the one it links to.
    options.peers_python = [os.path.abspath(os.path.expanduser(p)) for p in options.peers_python or [sys.executable]]
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    if options.cores is not None:
        limit_cores(parser, options.cores)
    return options


def positive(text: str) -> int:
    number = int(text.replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


def limit_cores(parser: argparse.ArgumentParser, wanted: int) -> None:
    if not hasattr(os, "sched_setaffinity"):
        parser.error("--cores: this system cannot limit the cores of a process")
    have = sorted(os.sched_getaffinity(0))
    if wanted > len(have):
        parser.error(f"--cores {wanted}: there are {len(have)}")
    os.sched_setaffinity(0, have[:wanted])  # children inherit it


def main() -> int:
    options = parse()
    progress = Console(stderr=True)
    try:
        for name in options.task:
            if name in TASKS:  # faults in --set are said before anything is measured
                configs.resolve(TASKS[name].words[0], overrides=[*TASKS[name].words[1:], *options.set])
        with Children() as children:
            bench = Bench(options, children, progress)
            bench.find_peers()
            for name in options.task:
                print(bench.speed(name) if name in TASKS else getattr(bench, name)(), flush=True)
            print(bench.about())
            if options.json is not None:
                record = {"machine": bench.machine, "versions": bench.versions, "rounds": options.rounds}
                record |= {"workers": options.workers, "tasks": bench.raw}
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    except KeyboardInterrupt:
        progress.print("interrupted; nothing is left behind")
        return 130
    except (ChildFailed, regatta.RegattaError) as error:
        progress.print(f"error: {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
