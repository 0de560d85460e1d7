"""What training shows: a live panel on a terminal, one plain line every few seconds elsewhere."""

from __future__ import annotations

import itertools
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from regatta.account import Progress
from regatta.runs.run import Run

REDRAW_S = 0.25
LINE_EVERY_S = 3.0
BARS = "▁▂▃▄▅▆▇█"
MARKS = {"busy": "[green]●[/]", "idle": "[dim]○[/]", "late": "[red]◌[/]"}


def make_display(console: Console) -> PanelDisplay | LineDisplay:
    return PanelDisplay(console) if console.is_terminal and not console.is_dumb_terminal else LineDisplay(console)


def sparkline(values: list[float], width: int) -> str:
    """The curve in `width` characters; each stands for the mean of its share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((m - low) / span * (len(BARS) - 1))] for m in means)


def figure(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def shares(progress: Progress) -> tuple[float, float]:
    """The share of time the learner learns, and the workers collect, in percent."""
    wall_s = max(progress.learn_s + progress.wait_s, 1e-9)
    workers = max(len(progress.workers), 1)
    return 100 * progress.learn_s / wall_s, min(100.0, 100 * progress.collect_s / (wall_s * workers))


class _Display:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.run: Run | None = None
        self._drawn_at = 0.0

    def opened(self, run: Run) -> None:
        self.run = run

    def finish(self, run: Run) -> None:
        status = run.status()
        for line in (
            f"[bold]{status.status}[/] {run.id}",
            f"{status.steps:,} steps in {figure(status.wall_s)} s ({figure(status.steps_per_s, 0)} steps/s)",
            f"return {figure(status.return_mean)} over the last {min(100, status.episodes)} episodes",
            f"kept in {escape(run.location)}",
            f"next: regatta evaluate {run.id}",
        ):
            self.console.print(line, highlight=False, soft_wrap=True)


class LineDisplay(_Display):
    """For logs and pipes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def opened(self, run: Run) -> None:
        super().opened(run)
        self._print(f"run {run.id} in {run.location}")

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._drawn_at < LINE_EVERY_S:
            return
        self._drawn_at = now
        learn, collect = shares(progress)
        self._print(
            f"{progress.phase}: {progress.steps:,}/{progress.total_steps:,} steps "
            f"({100 * progress.steps / progress.total_steps:.0f} %), {figure(progress.steps_per_s, 0)} steps/s, "
            f"return {figure(progress.return_mean)}, length {figure(progress.length_mean, 0)}, "
            f"learner {learn:.0f} %, workers {len(progress.workers)} at {collect:.0f} %"
        )

    def say(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class PanelDisplay(_Display):
    """For people."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._live.update(Text("starting …", style="dim"), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._live.update(self._panel(progress), refresh=True)

    def say(self, text: str) -> None:
        self.console.print(Text(text, style="yellow"))

    def _panel(self, progress: Progress) -> RenderableType:
        name = self.run.id if self.run else ""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"[bold]{name}[/]",
            ProgressBar(total=progress.total_steps, completed=progress.steps, width=30),
            f"{progress.steps:,} / {progress.total_steps:,} steps",
            self._remaining(progress),
        )
        learn, collect = shares(progress)
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim", justify="right")
        curve = f"[cyan]{sparkline(progress.curve, 40)}[/]"
        body.add_row("return", f"[bold]{figure(progress.return_mean)}[/]  {curve}")
        body.add_row("length", f"{figure(progress.length_mean, 0)}  [dim]episodes[/] {progress.episodes:,}")
        body.add_row("speed", f"{figure(progress.steps_per_s, 0)} steps/s")
        body.add_row("time", f"learner {learn:.0f} %  workers {collect:.0f} %")
        body.add_row("workers", self._workers(progress))
        if self.run is not None:
            body.add_row("place", escape(self.run.location))
        if progress.saving:
            body.add_row("saving", f"[red]{escape(progress.saving)}[/]")
        return Group(head, body)

    def _remaining(self, progress: Progress) -> str:
        if progress.phase != "training" or not progress.steps_per_s:
            return f"[dim]{progress.phase}[/]"
        left_s = (progress.total_steps - progress.steps) / progress.steps_per_s
        return f"[dim]{left_s // 60:.0f}:{left_s % 60:02.0f} left[/]"

    def _workers(self, progress: Progress) -> str:
        if not progress.workers:
            return "[yellow]none yet[/]"
        shown = [
            f"{MARKS[w.state]} {escape(w.name)} [dim]lanes {','.join(map(str, w.lanes)) or '–'}[/]"
            for w in progress.workers[:4]
        ]
        more = f"  and {len(progress.workers) - 4} more" if len(progress.workers) > 4 else ""
        counts = [
            f"{count} {what}"
            for count, what in (
                (progress.restarts, "restarts"),
                (progress.results_dropped, "dropped"),
                (progress.env_faults, "environment faults"),
                (progress.non_finite, "updates skipped"),
            )
            if count
        ]
        return "  ".join(shown) + more + (f"  [yellow]{', '.join(counts)}[/]" if counts else "")
