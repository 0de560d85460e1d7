"""How well Regatta's presets learn: each trained with several seeds, evaluated, and set beside published results."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from processes import ChildFailed, Children, evaluate, facts, markdown, train_command
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import regatta
from regatta import config as configs

BEGIN, END = "<!-- learning:begin -->", "<!-- learning:end -->"
NAMED = ("regatta-rl", "jax", "gymnasium", "numpy")  # versions in each row


@dataclass(frozen=True)
class Reference:
    """A published result, and the mean return a seed must reach to stand beside it."""

    mean: float
    deviation: float | None
    source: str
    bar: float | None = None  # where it is not the mean less the deviation

    @property
    def reached(self) -> float:
        return self.mean - (self.deviation or 0.0) if self.bar is None else self.bar

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {number(self.deviation)}"
        return f"{number(self.mean)}{spread} ({self.source})"


REFERENCES = {
    "cartpole-ppo": Reference(500, 0, "rl-zoo PPO, 100 k", bar=475),
    "acrobot-ppo": Reference(-83, 19, "rl-zoo TRPO, 100 k"),
    "pendulum-ppo": Reference(-172, 104, "rl-zoo PPO, 100 k"),
    "lander-ppo": Reference(242, 32, "rl-zoo PPO, 1 M"),
    "lander-continuous-ppo": Reference(271, 32, "rl-zoo PPO, 1 M"),
    "halfcheetah-ppo": Reference(5784, 1244, "Tianshou PPO, 1 M"),
    "reacher-ppo": Reference(-4.1, None, "Tianshou PPO, 1 M"),
    "cartpole-partial-ppo": Reference(475, None, "Gymnasium's threshold, all seen"),
    "pendulum-partial-ppo": Reference(-172, 104, "rl-zoo PPO, all seen, 100 k"),
    "cartpole-trpo": Reference(500, 0, "rl-zoo TRPO, 100 k", bar=475),
    "acrobot-trpo": Reference(-83, 19, "rl-zoo TRPO, 100 k", bar=-100),
    "lander-continuous-trpo": Reference(262, 21, "rl-zoo TRPO, 200 k", bar=230),
    "hopper-trpo": Reference(3372, 215, "sb3-contrib TRPO, 1 M"),
    "pendulum-sac": Reference(-157, 89, "rl-zoo SAC, 20 k", bar=-200),
    "mountaincar-continuous-sac": Reference(94.7, 1.1, "rl-zoo SAC, 50 k", bar=90),
    "lander-continuous-sac": Reference(260, 66, "rl-zoo SAC, 500 k"),
    "halfcheetah-sac": Reference(9635, 1424, "CleanRL SAC, 1 M"),
    "cartpole-es": Reference(500, 0, "rl-zoo ARS, 50 k", bar=475),
    "cartpole-cem": Reference(475, None, "Gymnasium's threshold"),
    "lander-es": Reference(200, None, "Gymnasium's threshold"),
    "lander-nevergrad": Reference(200, None, "Gymnasium's threshold"),
    "inverted-pendulum-es": Reference(1000, None, "Salimans et al. 2017, 455 k"),
}


@dataclass(frozen=True)
class Job:
    preset: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What one seed came to."""

    job: Job
    steps: int
    evaluated: float  # mean return of the final policy
    trained: float | None  # mean return of the last episodes of training
    seconds: float  # from starting the command to its exit
    weights_sha256: str
    versions: dict[str, str]
    cpu: str


class Study:
    """One invocation: all jobs, so many at a time, each with a line of its own while it runs."""

    def __init__(self, options: argparse.Namespace, children: Children, progress: Progress) -> None:
        self.options = options
        self.children = children
        self.progress = progress
        self.failed: list[Job] = []
        self._store = options.store or children.folder / "runs"
        self._lock = threading.Lock()

    def carry_out(self) -> list[Outcome]:
        jobs = [Job(preset, seed) for preset in self.options.presets for seed in self.options.seeds]
        total = self.progress.add_task("all", total=len(jobs), said="")
        outcomes: list[Outcome] = []
        pool = ThreadPoolExecutor(self.options.parallel)
        waiting: dict[Future[Outcome], Job] = {pool.submit(self._learn, job): job for job in jobs}
        try:
            while waiting:
                # With a timeout, so that an interrupt is heard while nothing ends.
                done, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    job = waiting.pop(future)
                    self._take(job, future, outcomes)
                    self.progress.advance(total)
        finally:
            self.children.stop()
            pool.shutdown(cancel_futures=True)
        return outcomes

    def _take(self, job: Job, future: Future[Outcome], outcomes: list[Outcome]) -> None:
        label = f"{job.preset} seed {job.seed}"
        try:
            outcome = future.result()
        except ChildFailed as error:
            self.failed.append(job)
            self.progress.console.print(f"{label} failed:\n{escape(str(error))}", highlight=False, soft_wrap=True)
            return
        outcomes.append(outcome)
        said = f"{label}: {outcome.evaluated:.1f} after {outcome.steps:,} steps in {outcome.seconds:.0f} s"
        self.progress.console.print(said, highlight=False)

    def _learn(self, job: Job) -> Outcome:
        line = self.progress.add_task(f"{job.preset} seed {job.seed}", total=None, said="starting")
        try:
            words = [job.preset, *self.options.set]
            command = train_command(words, workers=self.options.workers, seed=job.seed, store=self._store)
            finished = self.children.run(
                command, on_line=lambda text: self.progress.update(line, said=escape(shortened(text)))
            )
            end = finished.json()
            self.progress.update(line, said=f"playing {self.options.episodes} episodes")
            evaluated = evaluate(self.children, end["run"], self._store, self.options.episodes)
            shown = facts(self.children, end["run"], self._store)
        finally:
            self.progress.remove_task(line)
        return Outcome(
            job,
            end["steps"],
            evaluated,
            end["return_mean"],
            finished.seconds,
            end["weights_sha256"],
            shown["versions"],
            shown["cpu"],
        )


def shortened(line: str) -> str:
    return line if len(line) <= 90 else line[:87] + "..."


# -- the table ----------------------------------------------------------------------------------------------

COLUMNS = (
    "settings",
    ">steps",
    "seeds",
    ">mean return [95 %]",
    ">lowest",
    ">highest",
    ">seeds at the bar",
    "reference",
    ">s per seed",
    "made with",
)


def row(options: argparse.Namespace, preset: str, outcomes: list[Outcome]) -> list[str]:
    returns = [outcome.evaluated for outcome in outcomes]
    reference = REFERENCES.get(preset)
    seeds = compact([outcome.job.seed for outcome in outcomes])
    at_bar = "–"
    if reference is not None:
        count = sum(value >= reference.reached for value in returns)
        at_bar = f"{count} of {len(returns)} (≥ {number(reference.reached)})"
    versions = outcomes[0].versions
    made = [f"{name} {versions[name]}" for name in NAMED if name in versions]
    seconds = statistics.mean(outcome.seconds for outcome in outcomes)
    return [
        " ".join([preset, *options.set]),
        f"{outcomes[0].steps:,}",
        f"{seeds} × {options.episodes} episodes",
        interval(returns),
        number(min(returns)),
        number(max(returns)),
        at_bar,
        "–" if reference is None else str(reference),
        f"{seconds:,.0f} ({options.parallel} at once)",
        ", ".join([*made, outcomes[0].cpu, date.today().isoformat()]),
    ]


def interval(values: list[float]) -> str:
    """The mean over seeds and Student's 95 % interval for it."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{number(mean)} [one seed]"
    from scipy import stats

    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{number(mean)} [{number(mean - half)}, {number(mean + half)}]"


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0").replace("-", "−")


def compact(seeds: list[int]) -> str:
    """0, 1, 2, 5 as 0–2, 5."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)


LEGEND = """\
Each row: `python benchmarks/learning.py --presets SETTINGS --seeds SEEDS`. Every seed is one training from
nothing; its final policy plays the episodes with its likeliest actions. The mean is over seeds, with Student's
95 % interval; the bar is said with the count: where no other is set, the reference's mean less its own deviation.
"""


# -- the page -----------------------------------------------------------------------------------------------


class Page:
    """A Markdown file with our table between two markers; the rest of it is not ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before, self._after = "# What it learns\n\n", "\n"
        self._rows: dict[str, list[str]] = {}
        if path.exists():
            self._read(path.read_text("utf-8"))

    def _read(self, text: str) -> None:
        if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
            raise SystemExit(f"--write {self.path}: it needs the line {BEGIN} and after it {END}, once each")
        self._before, rest = text.split(BEGIN)
        block, self._after = rest.split(END)
        lines = [line for line in block.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        if cells and cells[0] != [name.lstrip(">") for name in COLUMNS]:
            raise SystemExit(f"--write {self.path}: its table has other columns; empty it between the markers")
        self._rows = {row[0]: row for row in cells[2:]}

    def write(self, rows: list[list[str]]) -> None:
        """New rows take the place of those with the same settings; all others stay."""
        self._rows |= {row[0]: row for row in rows}
        table = markdown(COLUMNS, list(self._rows.values()))
        block = f"{BEGIN}\n{LEGEND}\n{table}\n{END}"
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text(self._before + block + self._after, "utf-8")
        temporary.replace(self.path)


# -- the command --------------------------------------------------------------------------------------------

EPILOG = """\
examples
  python benchmarks/learning.py --presets cartpole-ppo --seeds 0-9
  python benchmarks/learning.py --presets acrobot-ppo pendulum-ppo lander-ppo --seeds 0-4 --write docs/results.md
  python benchmarks/learning.py --presets cartpole-ppo --seeds 0 --set run.steps=5000      does everything work?
  python benchmarks/learning.py --presets pendulum-ppo --set algorithm.lr=3e-4 --store runs  keep what was trained

Each seed trains in one process (--workers 0), so as many run at once as there are cores; the result does not depend
on it. The table goes to stdout as Markdown, progress to stderr. Ctrl-C ends all trainings and leaves nothing
behind. `regatta presets` lists presets. Needs: pip install -e '.[test]'
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="learning.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--presets", nargs="+", required=True, metavar="PRESET", help="what to train, such as cartpole-ppo")
    add("--seeds", type=seed_list, default=seed_list("0-4"), help="such as 0-9 or 0,3,7 (default 0-4)")
    add("--parallel", type=positive, default=2, help="trainings at a time (default 2)")
    add("--episodes", type=positive, default=20, help="episodes each final policy plays (default 20)")
    add("--workers", default="0", help="Regatta's --workers for each training (default 0)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override for all; may be repeated")
    add("--store", type=Path, metavar="DIR", help="keep the runs there (default: they are removed at the end)")
    add("--write", type=Path, metavar="FILE", help="put the rows into this page; rows of other settings stay")
    add("--json", type=Path, metavar="FILE", help="write every seed's figures there")
    options = parser.parse_args(argv)
    options.presets = list(dict.fromkeys(options.presets))
    for name in ("write", "json"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"--{name} {path}: there is no such folder")
    if options.store is not None:
        options.store = options.store.absolute()
    return options


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number, at least 1")
    return int(text)


def seed_list(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise argparse.ArgumentTypeError(f"{text}: seeds are given as 0-9 or 0,3,7")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text}: no seeds")
    return list(dict.fromkeys(seeds))


def main() -> int:
    options = parse()
    console = Console(stderr=True)
    try:
        for preset in options.presets:  # faults are said before hours of training, not after
            configs.resolve(preset, overrides=options.set)
        page = None if options.write is None else Page(options.write)
        display = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[said]}"),
            console=console,
        )
        with Children() as children, display:
            study = Study(options, children, display)
            outcomes = study.carry_out()
        incomplete = {job.preset for job in study.failed}
        rows = [
            row(options, preset, [outcome for outcome in outcomes if outcome.job.preset == preset])
            for preset in options.presets
            if preset not in incomplete
        ]
        if rows:
            print(f"{markdown(COLUMNS, rows)}\n\n{LEGEND}", end="")
            if page is not None:
                page.write(rows)
        if options.json is not None:
            options.json.write_text(json.dumps([record(outcome) for outcome in outcomes], indent=1) + "\n")
        if incomplete:
            console.print(f"no row for {', '.join(sorted(incomplete))}: {len(study.failed)} seeds failed")
            return 1
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left behind")
        return 130
    except (ChildFailed, regatta.RegattaError) as error:
        console.print(f"error: {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    return 0


def record(outcome: Outcome) -> dict[str, Any]:
    return {"preset": outcome.job.preset, "seed": outcome.job.seed} | {
        name: value for name, value in vars(outcome).items() if name != "job"
    }


if __name__ == "__main__":
    sys.exit(main())
