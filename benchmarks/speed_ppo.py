"""PPO beside its peers: steps per second, time to a solved CartPole, and the learner's update in training and alone."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from contest import (
    HERE,
    LIBRARIES,
    RATE_COLUMNS,
    Bench,
    Contender,
    Figures,
    Task,
    environment,
    layers,
    normalised,
    rate_rows,
    section,
    spread,
    tempo,
    title,
    verdict,
)
from processes import evaluate, markdown

import regatta

EPISODES = 20
SOLVED = 475.0  # CartPole-v1's own threshold
TASKS = {
    "cartpole": Task(
        "PPO on CartPole-v1, rl-zoo's settings",
        ("cartpole-ppo",),
        200_000,
        bars={"sb3": 8.0, "sbx": 6.0},
    ),
    "halfcheetah": Task(
        "PPO on HalfCheetah-v5, Stable-Baselines3's defaults on 8 environments",
        (
            *("ppo", "env.id=HalfCheetah-v5", "env.lanes=2", "env.lane_envs=4"),
            *("algorithm.rollout_steps=256", "algorithm.epochs=10", "algorithm.minibatch=64", "algorithm.lr=3e-4"),
            *("network.sizes=[64, 64]", "network.activation=tanh"),
            *("algorithm.normalize_obs=false", "algorithm.normalize_reward=false"),
        ),
        200_000,
        bars={"sb3": 7.0},
    ),
}
STARTUP = Task("From the command to a solved CartPole and exit", ("cartpole-ppo",), 100_000)
STARTUP_BAR = 1 / 3  # of Stable-Baselines3's time
UPDATE_BAR = 0.9  # of the speed of the same function called alone


def cartpole(bench: Bench) -> str:
    return speed(bench, "cartpole")


def halfcheetah(bench: Bench) -> str:
    return speed(bench, "halfcheetah")


def speed(bench: Bench, name: str) -> str:
    """Steps per second, from the end of the first update to the end of the last."""
    task = TASKS[name]
    words = bench.words(task)

    def ours(seed: int) -> dict[str, float]:
        return {"regatta": bench.regatta(words, seed)[0]["steps_per_s"]}

    def theirs(peer: str) -> Contender:
        return lambda seed: {peer: bench.peer(peer, "ppo", bench.settings(words, seed))[0]["steps_per_s"]}

    figures = bench.rounds(name, {"regatta": ours, **{peer: theirs(peer) for peer in bench.peers("ppo")}})
    settings = bench.settings(words, 0)
    bench.raw[name] = {"unit": "steps/s", "settings": settings, "figures": figures}
    table = markdown(RATE_COLUMNS, rate_rows(figures, ["regatta", *LIBRARIES], task.bars))
    return section(task.title, described(settings), table)


def startup(bench: Bench) -> str:
    """Seconds from starting the process to its exit, with and without compiled programs from a run before."""
    words = bench.words(STARTUP, changed=False)
    returns: Figures = {}

    def ours(seed: int) -> dict[str, float]:
        cache = {"XDG_CACHE_HOME": str(bench.children.folder / f"cache-{seed}")}
        seconds = {}
        for who in ("cold", "warm"):
            end, seconds[who], store = bench.regatta(words, seed, cache)
            reached = evaluate(bench.children, end["run"], store, EPISODES)
            returns.setdefault(who, []).append(reached)
        return seconds

    def theirs(peer: str) -> Contender:
        def measure(seed: int) -> dict[str, float]:
            model = str(bench.children.folder / f"{peer}-{seed}.zip")
            settings = bench.settings(words, seed)
            _, seconds = bench.peer(peer, "ppo", {**settings, "save": model})
            played, _ = bench.peer(peer, "ppo", {**settings, "evaluate": model, "episodes": EPISODES})
            returns.setdefault(peer, []).append(played["return_mean"])
            return {peer: seconds}

        return measure

    peers = {peer: theirs(peer) for peer in bench.peers("ppo") if peer != "rllib"}  # it has no small script
    figures = bench.rounds("startup", {"regatta": ours, **peers})
    bench.raw["startup"] = {"unit": "seconds", "figures": figures, "returns": returns}
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
        f"{described(bench.settings(words, 0))}. Solved: a mean return of {SOLVED:g} over {EPISODES} episodes, "
        "played after the clock stopped. Cold: nothing compiled before; warm: the same command once more."
    )
    columns = ("", ">seconds", ">from – to", ">solved", ">of Stable-Baselines3's", ">bar", "")
    return section(STARTUP.title, note, markdown(columns, rows))


def update(bench: Bench) -> str:
    """The learner's update during training beside the same one in a process that does nothing else."""
    rows = []
    for name, task in TASKS.items():
        words = bench.words(task)

        def training(seed: int, words: list[str] = words) -> dict[str, float]:
            end, _, store = bench.regatta(words, seed)
            seconds = regatta.load_run(end["run"], store=str(store)).metrics()["learn_s"]
            later = [float(s) for s in seconds[1:] if isinstance(s, float)]  # the first one compiles
            if not later:
                raise SystemExit("--steps is too small for --task update: there was only one iteration")
            return {"training": 1000 * statistics.mean(later)}

        def alone(_: int, words: list[str] = words) -> dict[str, float]:
            command = [sys.executable, str(HERE / "update_alone.py"), str(bench.options.seconds), *words]
            figures = bench.children.run(command).json()
            return {"update": 1000 * figures["update_s"], "compiled": 1000 * figures["compiled_s"]}

        figures = bench.rounds(f"update of {name}", {"training": training, "alone": alone})
        bench.raw[f"update-{name}"] = {"unit": "ms", "words": words, "figures": figures}
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
        f"Training with --workers {bench.options.workers}: mean of learn_s without the first iteration. Alone: "
        f"on the data of a short training, {bench.options.seconds:g} s each; the whole of PPO.update (which "
        "arranges the data first), and its one compiled call."
    )
    columns = ("task", "", ">ms", ">from – to", ">speed in training", ">bar", "")
    return section("The update, in training and alone", note, markdown(columns, rows))


def described(settings: dict[str, Any]) -> str:
    knobs = settings["algorithm"]
    return (
        f"{environment(settings)}: {settings['envs']} environments × {knobs['rollout_steps']} steps, "
        f"{knobs['epochs']} epochs, minibatch {knobs['minibatch']}, {layers(settings)}, "
        f"lr {knobs['lr']:g} ({knobs['lr_schedule']}), clip {knobs['clip']:g} ({knobs['clip_schedule']}), "
        f"gamma {knobs['gamma']:g}, lambda {knobs['gae_lambda']:g}, {normalised(knobs)}; "
        f"{settings['steps']:,} steps; {tempo(knobs)}"
    )
