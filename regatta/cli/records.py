"""Commands that read: `presets`, `runs`, `show` and `evaluate`."""

from __future__ import annotations

import json
from typing import Any, Literal, cast

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regatta import config as configs
from regatta.cli.display import LineDisplay, figure, sparkline
from regatta.errors import UsageError
from regatta.knobs import show as show_value
from regatta.runs.layout import age_s, utc_now
from regatta.runs.run import find_run, list_runs
from regatta.store.base import default_location, open_store

FIGURES = (("return_mean", 1), ("return_std", 1), ("length_mean", 0))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        name = column.lstrip(">")
        table.add_column(
            name, justify="right" if column.startswith(">") else "left", overflow="fold", no_wrap=name == "run"
        )
    return table


def presets(name: str | None) -> None:
    console = Console()
    if name is None:
        table = _table("preset", "what it is")
        for preset in configs.preset_names():
            table.add_row(f"[bold]{preset}[/]", Text(configs.preset_description(preset)))
        for algorithm in configs.ALGORITHMS:
            table.add_row(f"[bold]{algorithm}[/]", "the algorithm with its defaults; needs env.id=...")
        console.print(table)
        return
    config = configs.resolve(name, overrides=["env.id=..."] if name in configs.ALGORITHMS else [])
    for knob in configs.knobs(config):
        line = Text(f"{knob.path} = {show_value(knob.value)}", style="bold" if knob.changed else "")
        if knob.changed:
            line.append(f"   default {show_value(knob.default)}", style="not bold dim")
        console.print(line, soft_wrap=True)
        valid = f" ({knob.valid})" if knob.valid else ""
        console.print(Padding(Text(f"{knob.doc}{valid}", style="dim"), (0, 0, 0, 4)))


def runs(store: str | None, as_json: bool) -> None:
    place = open_store(store or default_location())
    found = list_runs(place)
    if as_json:
        print(json.dumps([msgspec.to_builtins(run) for run in found]))
        return
    console = Console()
    if not found:
        console.print(f"no runs in {place.location} yet; begin with: regatta train cartpole-ppo", markup=False)
        return
    table = _table("run", "status", ">steps", ">return", ">steps/s", ">seconds", ">begun")
    for run in found:
        table.add_row(
            run.id,
            run.problem or run.status,
            f"{run.steps:,}",
            figure(run.return_mean),
            figure(run.steps_per_s, 0),
            figure(run.wall_s),
            _ago(run.created),
        )
    console.print(table)


def _ago(stamp: str) -> str:
    passed_s = age_s(stamp, utc_now())
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if passed_s >= length_s:
            return f"{passed_s // length_s:.0f} {unit} ago" if passed_s != float("inf") else "–"
    return "just now"


def show(ref: str, store: str | None, as_json: bool) -> None:
    run = find_run(open_store(store or default_location()), ref)
    status = run.status()
    checkpoints = run.checkpoints()
    if as_json:
        facts = msgspec.to_builtins(run.facts)
        print(json.dumps({**facts, **msgspec.to_builtins(status), "location": run.location}))
        return
    console = Console()
    table = _table("", "")
    table.show_header = False
    curve = [value for value in run.metrics().get("return_mean", []) if isinstance(value, float) and value == value]
    rows = [
        ("run", run.id),
        ("status", status.status),
        ("place", run.location),
        ("created", run.facts.created),
        ("command", " ".join(run.facts.command)),
        ("steps", f"{status.steps:,} in {status.iterations:,} iterations, {status.episodes:,} episodes"),
        ("return", f"{figure(status.return_mean)}  {sparkline(curve, 40)}"),
        ("speed", f"{figure(status.steps_per_s, 0)} steps/s, {figure(status.wall_s)} s in all"),
        (
            "workers",
            f"{status.workers}, {status.restarts} restarts, {status.results_dropped} results dropped",
        ),
        ("weights", status.weights_sha256 or "–"),
        (
            "checkpoints",
            ", ".join(f"{c.iteration} (step {c.steps:,}, {figure(c.return_mean)})" for c in checkpoints),
        ),
        ("versions", ", ".join(f"{name} {number}" for name, number in run.facts.versions.items())),
    ]
    for name, text in rows:
        table.add_row(f"[dim]{name}[/]", Text(text))
    if status.error:
        table.add_row("[red]error[/]", Text(status.error))
    for text in status.warnings[-5:]:
        table.add_row("[yellow]warning[/]", Text(text))
    console.print(table)
    if status.status in ("interrupted", "lost", "failed"):
        console.print(f"go on with: regatta resume {run.id}")


def evaluate(ref: str, checkpoint: str, *, as_json: bool, **options: Any) -> None:
    from regatta import assemble

    if checkpoint not in ("last", "best") and not checkpoint.isdigit():
        raise UsageError(f"--checkpoint {checkpoint}: valid are last, best, or an iteration number")
    which = int(checkpoint) if checkpoint.isdigit() else cast(Literal["last", "best"], checkpoint)
    figures = assemble.evaluate(ref, checkpoint=which, display=LineDisplay(Console(stderr=True)), **options)
    if as_json:
        print(json.dumps(figures))
        return
    mean, std, length = (figure(figures[name], digits) for name, digits in FIGURES)
    text = f"return {mean} ± {std} over {figures['episodes']:.0f} episodes, {length} steps each"
    Console().print(text, highlight=False)
