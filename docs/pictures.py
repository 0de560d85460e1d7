"""Draws the README's pictures from real runs: the terminal display, and the learning curves of five seeds.

python docs/pictures.py
"""

from __future__ import annotations

import os
import re
import tempfile
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

import regatta
from regatta.account import Progress
from regatta.cli.display import PanelDisplay

IMAGES = Path(__file__).parent / "images"
PRESET = "cartpole-ppo"
SEEDS = range(5)
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 44
COLOURS = ("#2563eb", "#059669", "#d97706", "#db2777", "#7c3aed")
FULL = 500.0  # the longest episode of CartPole-v1


class Photographer(PanelDisplay):
    """Keeps the panel as it stood when three quarters of the steps were done."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.panel: Any = None

    def show(self, progress: Progress) -> None:
        if self.panel is None and progress.steps >= 0.75 * progress.total_steps:
            self.panel = self._panel(progress)


def draw_terminal() -> None:
    # A console of its own for each: what the training says while it runs is not part of the picture.
    display = Photographer(Console(file=StringIO(), width=116))
    run = regatta.train(PRESET, display=display)
    paper = Console(file=StringIO(), record=True, width=116, force_terminal=True)
    paper.print(f"[dim]$[/] regatta train {PRESET}", highlight=False)
    paper.print(display.panel)
    display.console = paper
    display.finish(run)
    picture = paper.export_svg(title="regatta", unique_id="regatta")
    picture = picture.replace(str(Path.cwd()).replace(" ", "&#160;"), ".")  # where it was drawn is nobody's business
    # Rich would fetch a font from the network; every system has a monospaced one of its own.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    (IMAGES / "terminal.svg").write_text(picture, "utf-8")


def draw_curves() -> None:
    runs = [regatta.train(PRESET, seed=seed).metrics() for seed in SEEDS]
    most = max(run["steps"][-1] for run in runs)

    def x(steps: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * steps / most

    def y(score: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * score / FULL

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#475569">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="13">{PRESET}, seeds {SEEDS[0]} to {SEEDS[-1]}: '
        "mean return of the last 100 training episodes</text>",
    ]
    for score in range(0, 501, 100):
        parts.append(f'<path d="M{LEFT} {y(score):.1f}H{WIDTH - RIGHT}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(score) + 4:.1f}" text-anchor="end">{score}</text>')
    for steps in range(0, int(most) + 1, 20_000):
        parts.append(f'<text x="{x(steps):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{steps // 1000} k</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">steps</text>')
    for run, colour in zip(runs, COLOURS, strict=True):
        points = [
            f"{x(steps):.1f} {y(score):.1f}"
            for steps, score in zip(run["steps"], run["return_mean"], strict=True)
            if score == score
        ]
        parts.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    (IMAGES / "learning.svg").write_text("\n".join([*parts, "</svg>", ""]), "utf-8")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        here = Path.cwd()
        os.chdir(folder)
        try:
            draw_terminal()
            draw_curves()
        finally:
            os.chdir(here)


if __name__ == "__main__":
    main()
