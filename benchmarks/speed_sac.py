"""SAC beside its peers: steps per second once it learns, one gradient step for each step in the environment."""

from __future__ import annotations

from typing import Any

from contest import RATE_COLUMNS, Bench, Contender, Task, environment, layers, normalised, rate_rows, section, tempo
from processes import markdown

import regatta

LEARNING_STARTS = 1000
WARM_UP = 64  # gradient steps that do not count: the first ones compile, and so does acting


def sized(steps: int) -> tuple[str, ...]:
    return (f"algorithm.learning_starts={min(LEARNING_STARTS, steps // 3)}", f"run.steps={steps}")


TASK = Task(
    "SAC on HalfCheetah-v5, 256x256, batch 256, one update per step",
    ("halfcheetah-sac", "env.lanes=1", "env.lane_envs=1", "network.sizes=[256, 256]", "algorithm.batch=256"),
    3_000,
    sized,
    bars={"sb3": 2.0, "sbx": 1.15},
)


def sac(bench: Bench) -> str:
    """Steps per second after the first gradient steps."""
    words = bench.words(TASK)

    def ours(seed: int) -> dict[str, float]:
        end, _, store = bench.regatta(words, seed)
        return {"regatta": learning_rate(regatta.load_run(end["run"], store=str(store)).metrics())}

    def theirs(peer: str, who: str, group: int) -> Contender:
        def measure(seed: int) -> dict[str, float]:
            settings = {**bench.settings(words, seed), "group": group, "warm_up": WARM_UP}
            return {who: bench.peer(peer, "sac", settings)[0]["steps_per_s"]}

        return measure

    settings = bench.settings(words, 0)
    contenders: dict[str, Contender] = {"regatta": ours}
    contenders |= {peer: theirs(peer, peer, 1) for peer in bench.peers("sac")}
    if "sbx" in contenders:
        contenders["sbx+grouped"] = theirs("sbx", "sbx+grouped", settings["algorithm"]["rollout_steps"])
    figures = bench.rounds("sac", contenders)
    bench.raw["sac"] = {"unit": "steps/s", "settings": settings, "figures": figures}
    table = markdown(RATE_COLUMNS, rate_rows(figures, ["regatta", "sb3", "sbx", "sbx+grouped"], TASK.bars))
    return section(TASK.title, described(settings), table)


def learning_rate(metrics: dict[str, list[Any]]) -> float:
    """Steps per second from the end of the iteration that brought the last of the warm-up's gradient steps."""
    rows = list(zip(metrics["steps"], metrics["wall_s"], metrics["updates"], strict=True))
    warm = [row for row in rows if row[2] >= WARM_UP]
    if len(warm) < 2:
        raise SystemExit(f"--steps is too small for --task sac: only {rows[-1][2]:g} gradient steps were made")
    (steps, seconds, updates), (last_steps, last_seconds, last_updates) = warm[0], warm[-1]
    if last_updates - updates != last_steps - steps:
        raise SystemExit("--task sac: the peers make one gradient step for each step; so must Regatta")
    return float((last_steps - steps) / (last_seconds - seconds))


def described(settings: dict[str, Any]) -> str:
    knobs = settings["algorithm"]
    return (
        f"{environment(settings)}: {settings['envs']} environment(s), {layers(settings)}, batch {knobs['batch']}, "
        f"{knobs['updates_per_step']:g} gradient step(s) per step, lr {knobs['lr']:g}, tau {knobs['tau']:g}, "
        f"gamma {knobs['gamma']:g}, temperature learned from {knobs['alpha']:g}, {normalised(knobs)}, learning from "
        f"step {knobs['learning_starts']:,} on; {settings['steps']:,} steps, counted from {WARM_UP} gradient steps on; "
        f"{tempo(knobs)}. Regatta takes {knobs['rollout_steps']} steps and then as many gradient steps; the peers, "
        "as is their default, one after each step, and SBX once more with Regatta's grouping, which compiles a group "
        "into one call"
    )
