"""Evolution beside EvoTorch and beside stepping alone: steps per second in three environments."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from contest import (
    Bench,
    Figures,
    Task,
    cores,
    environment,
    layers,
    normalised,
    ratios,
    section,
    spread,
    title,
    verdict,
)
from processes import markdown

import regatta
from regatta import config as configs
from regatta.policies.policy import Policy
from regatta.rollout import envs
from regatta.seeding import stream

TITLE = "Evolution on CartPole-v1, LunarLanderContinuous-v3 and Hopper-v5"
BARS = {"evotorch": 3.0, "stepping": 0.8}  # the lesser of these multiples of their speeds
POPULATION = 200
WARM_UP = 2  # generations that do not count: in the first, one worker or actor may not yet be there
SETTINGS = (
    *("env.lanes=2", "env.lane_envs=32", "algorithm.sigma=0.1", "algorithm.lr=0.01", "algorithm.weight_decay=0"),
    *("algorithm.evaluate_episodes=0", "algorithm.staleness=0"),
)


def sized(steps: int) -> tuple[str, ...]:
    """Fewer members for few steps: the first generations do not count, so there must be more."""
    return (f"algorithm.population={max(2, min(POPULATION, steps // 1000 * 2))}", f"run.steps={steps}")


def task(env: str, steps: int, *words: str) -> Task:
    return Task(env, ("es", f"env.id={env}", *SETTINGS, *words), steps, sized)


TASKS = (
    task("CartPole-v1", 300_000, "network.sizes=[64, 64]", "network.activation=tanh"),
    task("LunarLanderContinuous-v3", 200_000, "network.kind=linear"),
    task("Hopper-v5", 100_000, "network.sizes=[64, 64]", "network.activation=tanh"),
)


def es(bench: Bench) -> str:
    """Steps per second from the end of the second generation to the end of the last."""
    rows, said = [], []
    for task in TASKS:
        settings = bench.settings(bench.words(task), 0)
        figures, lengths = contest(bench, task)
        name = f"es-{settings['env']}"
        bench.raw[name] = {"unit": "steps/s", "settings": settings, "figures": figures, "steps_per_episode": lengths}
        rows += table(settings["env"], figures, lengths)
        said.append(f"{environment(settings)}: {layers(settings)}, {settings['steps']:,} steps")
    columns = ("task", "", ">steps/s", ">from – to", ">steps per episode")
    columns += (">Regatta is × as fast", ">from – to", ">bar", "")
    note = (
        f"{'; '.join(said)}. {described(settings)}. Counted from the end of generation {WARM_UP} to the end of the "
        f"last (stepping alone: from the first step to the last, random actions in {cores()} processes). The bar is "
        f"the lesser of {BARS['evotorch']:g} × EvoTorch and {100 * BARS['stepping']:.0f} % of stepping alone."
    )
    return section(TITLE, note, markdown(columns, rows))


def contest(bench: Bench, task: Task) -> tuple[Figures, Figures]:
    """Steps per second, and steps per episode: how alike the work was."""
    words = bench.words(task)
    lengths: Figures = {}

    def taken(who: str, figures: dict[str, Any]) -> dict[str, float]:
        if not figures["steps"]:
            raise SystemExit(f"--steps is too small for --task es: {task.title} had only {WARM_UP} generations")
        lengths.setdefault(who, []).append(figures["steps"] / max(1, figures["episodes"]))
        return {who: figures["steps"] / figures["seconds"]}

    def ours(seed: int) -> dict[str, float]:
        end, _, store = bench.regatta(words, seed)
        return taken("regatta", after_warm_up(regatta.load_run(end["run"], store=str(store)).metrics()))

    def theirs(seed: int) -> dict[str, float]:
        start = bench.children.folder / f"start-{task.title}-{seed}.npy"
        np.save(start, first_parameters(words, seed))
        settings = {**bench.settings(words, seed), "actors": cores(), "start": str(start), "warm_up": WARM_UP}
        return taken("evotorch", bench.peer("evotorch", "es", settings)[0])

    def stepping(seed: int) -> dict[str, float]:
        settings = bench.settings(words, seed)
        return taken("stepping", bench.stepping(settings, settings["steps"]))

    peers = {"evotorch": theirs} if "evotorch" in bench.pythons else {}
    return bench.rounds(f"es on {task.title}", {"regatta": ours, **peers, "stepping": stepping}), lengths


def after_warm_up(metrics: dict[str, list[Any]]) -> dict[str, float]:
    counted = {"steps": "steps", "episodes": "episodes", "seconds": "wall_s"}
    before = min(WARM_UP, len(metrics["steps"])) - 1
    return {name: metrics[column][-1] - metrics[column][before] for name, column in counted.items()}


def first_parameters(words: list[str], seed: int) -> Any:
    """What Regatta begins with, as PyTorch orders it: of each layer the weights [out, in], then the biases."""
    config = configs.resolve(words[0], overrides=words[1:], seed=seed)
    seen = envs.probe(config.env)
    policy = Policy(config.algorithm.policy(seen.obs, seen.action, seen.bounded, config.network))
    arrays = policy.init(stream(seed, "init"))
    return np.concatenate([array.T.reshape(-1) for array in arrays.values()])


def table(env: str, figures: Figures, lengths: Figures) -> list[list[str]]:
    rows = []
    for who in ("regatta", "evotorch", "stepping"):
        if who not in figures:
            rows.append([env, title(who), "–", "–", "–", "–", "–", "–", "not measured"])
            continue
        row = [env, title(who), *spread(figures[who], 0), f"{statistics.median(lengths[who]):,.0f}"]
        if who == "regatta":
            row += ["–", "–", *judged(figures)]
        else:
            row += [*spread(ratios(figures, "regatta", who), 2), "–", ""]
        rows.append(row)
    return rows


def judged(figures: Figures) -> tuple[str, str]:
    """The bar in steps per second, and whether it is met; without EvoTorch it may be lower than it seems."""
    wanted = [
        min(bar * figures[who][number] for who, bar in BARS.items() if who in figures)
        for number in range(len(figures["regatta"]))
    ]
    met = statistics.median(a / b for a, b in zip(figures["regatta"], wanted, strict=True)) >= 1
    said = f"≥ {statistics.median(wanted):,.0f}"
    return said, "not measured" if not met and "evotorch" not in figures else verdict(met)


def described(settings: dict[str, Any]) -> str:
    knobs = settings["algorithm"]
    return (
        f"Population {knobs['population']} in mirrored pairs, {knobs['episodes']} episode(s) each, "
        f"sigma {knobs['sigma']:g}, Adam {knobs['lr']:g} on centred ranks, {normalised(knobs)}, both from the same "
        f"first parameters. EvoTorch: PGPE with a fixed deviation, {cores()} actors"
    )
