"""TRPO beside sb3-contrib and beside stepping alone: seconds for ten iterations on Pong's memory."""

from __future__ import annotations

import statistics
from typing import Any

from contest import (
    Bench,
    Figures,
    Task,
    environment,
    layers,
    normalised,
    ratios,
    section,
    spread,
    tempo,
    title,
    verdict,
)
from processes import ChildFailed, markdown

import regatta
from regatta.algorithms.base import nearest_divisor

ENVS = 2
COUNTED = 10  # iterations
WARM_UP = 2  # iterations before: one compiles, and the next may have been collected while it did
MINIBATCH = 128


def sized(steps: int) -> tuple[str, ...]:
    """So many steps in the iterations that count."""
    rollout = max(1, steps // (COUNTED * ENVS))
    samples = ENVS * rollout
    return (
        f"algorithm.rollout_steps={rollout}",
        f"algorithm.critic_minibatch={nearest_divisor(samples, MINIBATCH)}",
        f"run.steps={(COUNTED + WARM_UP) * samples}",
    )


TASK = Task(
    "TRPO on Pong from RAM, sb3-contrib's defaults on iterations of 10,000 steps",
    (
        *("trpo", "env.id=ALE/Pong-v5", "env.kwargs.obs_type=ram", f"env.lanes={ENVS}", "env.lane_envs=1"),
        *("algorithm.max_kl=0.01", "algorithm.cg_steps=15", "algorithm.cg_damping=0.1"),
        *("algorithm.line_search_steps=10", "algorithm.line_search_shrink=0.8"),
        *("algorithm.critic=adam", "algorithm.critic_lr=1e-3", "algorithm.critic_epochs=10"),
        *("network.sizes=[64, 64]", "network.activation=tanh"),
    ),
    100_000,
    sized,
    bars={"contrib": 1 / 4, "stepping": 1.5},  # Regatta's time by theirs, at most
)


def trpo(bench: Bench) -> str:
    """Seconds from the end of the second update to the end of the last; for as many steps in stepping alone."""
    words = bench.words(TASK)
    settings = bench.settings(words, 0)
    iteration = settings["envs"] * settings["algorithm"]["rollout_steps"]
    skipped = WARM_UP * iteration
    counted = settings["steps"] // iteration * iteration - skipped
    if counted <= 0:
        raise SystemExit(f"--task trpo: the first {WARM_UP} iterations do not count, and there were no more")

    def ours(seed: int) -> dict[str, float]:
        end, _, store = bench.regatta(words, seed)
        ended = regatta.load_run(end["run"], store=str(store)).metrics()["wall_s"]
        return {"regatta": ended[-1] - ended[WARM_UP - 1]}

    def theirs(seed: int, who: str, vec_env: str) -> dict[str, float]:
        settings = {**bench.settings(words, seed), "vec_env": vec_env, "skipped": skipped}
        figures, _ = bench.peer("contrib", "trpo", settings)
        if figures["steps"] != counted:
            raise ChildFailed(f"it was timed over {figures['steps']} steps instead of {counted}")
        return {who: figures["seconds"]}

    def stepping(seed: int) -> dict[str, float]:
        return {"stepping": bench.stepping(bench.settings(words, seed), counted)["seconds"]}

    contenders = {"regatta": ours}
    if "contrib" in bench.pythons:
        contenders["contrib"] = lambda seed: theirs(seed, "contrib", "dummy")
        contenders["contrib+subproc"] = lambda seed: theirs(seed, "contrib+subproc", "subproc")
    figures = bench.rounds("trpo", {**contenders, "stepping": stepping})
    bench.raw["trpo"] = {"unit": "seconds", "steps": counted, "settings": settings, "figures": figures}
    columns = ("", ">seconds", ">from – to", ">Regatta takes × as long", ">from – to", ">bar", "")
    note = (
        f"{described(settings)}. Seconds for {counted:,} steps, from the end of update {WARM_UP} to the end of the "
        "last; for stepping alone, from the first step to the last, with random actions in a process per core, "
        "without learning. The bar stands against the faster of sb3-contrib's two ways."
    )
    return section(TASK.title, note, markdown(columns, table(figures)))


def table(figures: Figures) -> list[list[str]]:
    ways = [who for who in ("contrib", "contrib+subproc") if who in figures]
    fastest = min(ways, key=lambda who: statistics.median(figures[who]), default="contrib")
    bars = {fastest: TASK.bars["contrib"], "stepping": TASK.bars["stepping"]}
    rows = []
    for who in ("regatta", "contrib", "contrib+subproc", "stepping"):
        if who == "regatta":
            rows.append([title(who), *spread(figures[who], 1), "–", "–", "–", ""])
        elif who in figures:
            taken = ratios(figures, "regatta", who)
            row = [title(who), *spread(figures[who], 1), *spread(taken, 2)]
            bar = bars.get(who)
            row += ["–", ""] if bar is None else [f"≤ {bar:g}", verdict(statistics.median(taken) <= bar)]
            rows.append(row)
        elif who in bars:
            rows.append([title(who), "–", "–", "–", "–", f"≤ {bars[who]:g}", "not measured"])
    return rows


def described(settings: dict[str, Any]) -> str:
    knobs = settings["algorithm"]
    critic = (
        f"critic by Adam, lr {knobs['critic_lr']:g}, {knobs['critic_epochs']} epochs, "
        f"minibatch {knobs['critic_minibatch']}"
    )
    return (
        f"{environment(settings)}: {settings['envs']} environments × {knobs['rollout_steps']:,} steps, "
        f"KL {knobs['max_kl']:g}, {knobs['cg_steps']} conjugate-gradient steps, damping {knobs['cg_damping']:g}, "
        f"up to {knobs['line_search_steps']} step lengths, each {knobs['line_search_shrink']:g} of the one before, "
        f"{critic}, {layers(settings)}, gamma {knobs['gamma']:g}, lambda {knobs['gae_lambda']:g}, {normalised(knobs)}; "
        f"{tempo(knobs)}"
    )
