"""How fast Regatta trains beside its peers: same task, same settings, one machine, alternating rounds.

Absolute figures differ from machine to machine and from hour to hour; only the ratios of one invocation count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import speed_es
import speed_ppo
import speed_sac
import speed_trpo
from contest import LIBRARIES, Bench, Task
from processes import ChildFailed, Children
from rich.console import Console
from rich.markup import escape
from sections import Page

import regatta


@dataclass(frozen=True)
class Entry:
    """What --task names: how it is measured, and about how long a round with all peers but RLlib takes on two cores."""

    measure: Callable[[Bench], str]
    algorithm: str
    tasks: tuple[Task, ...]
    start_s: float  # imports and compilation of all who take part
    work_s: float  # the rest, at the default number of steps

    def seconds(self, options: argparse.Namespace) -> float:
        default = sum(task.steps for task in self.tasks)
        wanted = len(self.tasks) * options.steps if options.steps else default
        return float(options.rounds * (self.start_s + self.work_s * wanted / default))


PPO_TASKS = tuple(speed_ppo.TASKS.values())
ENTRIES = {
    "cartpole": Entry(speed_ppo.cartpole, "ppo", PPO_TASKS[:1], 20, 150),
    "halfcheetah": Entry(speed_ppo.halfcheetah, "ppo", PPO_TASKS[1:], 20, 245),
    "startup": Entry(speed_ppo.startup, "ppo", (speed_ppo.STARTUP,), 40, 80),
    "update": Entry(speed_ppo.update, "ppo", PPO_TASKS, 40, 50),
    "trpo": Entry(speed_trpo.trpo, "trpo", (speed_trpo.TASK,), 30, 360),
    "sac": Entry(speed_sac.sac, "sac", (speed_sac.TASK,), 35, 80),
    "es": Entry(speed_es.es, "es", speed_es.TASKS, 45, 165),
}
CHOICES = (*ENTRIES, "all")

EPILOG = """\
tasks
  cartpole, halfcheetah   PPO: steps per second, counted from the end of the first update to the end of the last,
                          for all alike: imports and compilation do not count. Peers are timed by a callback inside
                          one learn() (Stable-Baselines3, SBX), or around train() after the first (RLlib).
  startup                 seconds from starting `regatta train cartpole-ppo` to its exit, beside a script of
                          Stable-Baselines3's with the same settings; the trained policies are then evaluated.
  update                  the learner's update during training beside the same function called alone.
  trpo                    seconds for ten iterations of 10,000 steps on Pong from RAM, after two that do not
                          count, beside sb3-contrib's (both environments in its process, and one process each)
                          and beside the same number of random steps on all cores, without learning.
  sac                     steps per second on HalfCheetah with one gradient step for each, after the first 64.
  es                      steps per second of evolution in three environments, after two generations, beside
                          EvoTorch with an actor per core and beside random steps on all cores.
  A round takes about:    {durations}
                          with all peers but RLlib, on two cores with nothing else to do.

peers
  pip install 'torch==2.13.0' stable-baselines3 sb3-contrib sbx-rl evotorch ale-py 'gymnasium[mujoco,box2d]'
                                                                                in a venv of their own
  pip install 'torch==2.13.0' 'ray[rllib]==2.60.*' 'gymnasium[mujoco]'          in another: it wants another Gymnasium

examples
  python benchmarks/speed.py --task cartpole --peers-python ~/venvs/sb3/bin/python
  python benchmarks/speed.py --task trpo sac es --rounds 1 --write docs/results.md \\
      --peers-python ~/venvs/sb3/bin/python
  python benchmarks/speed.py --task all --cores 2 --json speed.json \\
      --peers-python ~/venvs/sb3/bin/python --peers-python ~/venvs/rllib/bin/python
  python benchmarks/speed.py --task halfcheetah --set algorithm.staleness=0     without overlap
  python benchmarks/speed.py --task all --steps 5000 --rounds 1                 does everything work?

Tables go to stdout as Markdown, progress to stderr. Leave the machine alone meanwhile: the figures of a busy one
mean nothing. A bar that is not met is said and is no error.
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    durations = ", ".join(f"{name} {said_s(entry.start_s + entry.work_s)}" for name, entry in ENTRIES.items())
    parser = argparse.ArgumentParser(
        prog="speed.py",
        description=__doc__,
        epilog=EPILOG.format(durations=durations),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--task", nargs="+", choices=CHOICES, default=["all"], metavar="TASK", help=f"{', '.join(CHOICES)} (default)")
    add("--rounds", type=positive, default=3, help="each contender is measured this many times (default 3)")
    add("--steps", type=positive, help="environment steps of one measurement (default: the task's, 3 k to 300 k)")
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
        help="override of Regatta's config in every task but startup; the peers follow. May be repeated",
    )
    add(
        "--vec-env",
        choices=("dummy", "subproc"),
        default="dummy",
        help="how Stable-Baselines3 and SBX step environments: in their process (default, as rl-zoo), or one each",
    )
    add("--env-runners", type=int, default=0, help="RLlib's processes for environments (default 0: in its own)")
    add("--seconds", type=float, default=5.0, help="how long the update is called alone (default 5)")
    add("--write", type=Path, metavar="FILE", help="put the tables into this page; those of other tasks stay")
    add("--json", type=Path, metavar="FILE", help="write all raw figures there")
    options = parser.parse_args(argv)
    options.task = list(ENTRIES) if "all" in options.task else list(dict.fromkeys(options.task))
    # Children work in a folder of their own; and a venv's interpreter must not be resolved to the one it links to.
    options.peers_python = [os.path.abspath(os.path.expanduser(p)) for p in options.peers_python or [sys.executable]]
    for name in ("write", "json"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"--{name} {path}: there is no such folder")
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


def said_s(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def main() -> int:
    options = parse()
    progress = Console(stderr=True)
    entries = {name: ENTRIES[name] for name in options.task}
    try:
        page = None if options.write is None else Page(options.write)
        with Children() as children:
            bench = Bench(options, children, progress)
            for name, entry in entries.items():  # faults in --set are said before anything is measured
                for task in entry.tasks:
                    bench.settings(bench.words(task, changed=name != "startup"), 0)
            estimates = {name: entry.seconds(options) for name, entry in entries.items()}
            bench.say(
                f"about {said_s(sum(estimates.values()))} on two cores with all peers: "
                + ", ".join(f"{name} {said_s(seconds)}" for name, seconds in estimates.items())
            )
            bench.find_peers({entry.algorithm for entry in entries.values()})
            measure(bench, entries, page)
    except KeyboardInterrupt:
        progress.print("interrupted; finished tasks are kept, nothing else is left behind")
        return 130
    except (ChildFailed, regatta.RegattaError) as error:
        progress.print(f"error: {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    return 0


def measure(bench: Bench, entries: dict[str, Entry], page: Page | None) -> None:
    """Every task in turn; what is finished is printed and written at once."""
    versions: dict[str, Any] = {}
    for entry in entries.values():
        bench.versions = {}
        text = f"{entry.measure(bench)}\n{bench.about()}\n"
        versions |= bench.versions
        print(text, flush=True)
        if page is not None:
            page.put(text)
    if bench.options.json is not None:
        record = {"machine": bench.machine, "versions": versions, "rounds": bench.options.rounds}
        record |= {"workers": bench.options.workers, "tasks": bench.raw}
        bench.options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
