"""Evolution by EvoTorch's PGPE with the settings given as JSON; run by speed.py with the peers' interpreter.

    python es_evotorch.py '{"env": "CartPole-v1", ...}'

The search begins with the parameters in the file `start`, and its deviation stays as it is: with Adam and centred ranks
that is evolution strategies. The clock starts after `warm_up` generations, of which the first starts the actors,
and stops after the generation that reaches `steps`. The last line of the output is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from importlib import metadata
from typing import Any

import local_ray  # before Ray, which EvoTorch imports
import numpy as np
import torch
from evotorch.algorithms import PGPE
from evotorch.neuroevolution import GymNE

ACTIVATIONS = {"tanh": "Tanh", "relu": "ReLU", "elu": "ELU", "silu": "SiLU"}


def network(settings: dict[str, Any]) -> str:
    """In EvoTorch's own words: Linear(obs_length, 64) >> Tanh() >> Linear(64, act_length)."""
    widths = ["obs_length", *settings["sizes"], "act_length"]
    layers = [f"Linear({a}, {b})" for a, b in itertools.pairwise(widths)]
    return f" >> {ACTIVATIONS[settings['activation']]}() >> ".join(layers)


def search(settings: dict[str, Any]) -> PGPE:
    knobs = settings["algorithm"]
    if knobs["weight_decay"] or knobs["lr_schedule"] != "constant" or knobs["evaluate_episodes"]:
        sys.exit("PGPE has no weight_decay, lr_schedule or evaluate_episodes: turn them off on both sides")
    problem = GymNE(
        settings["env"],
        network(settings),
        env_config=settings["kwargs"],
        observation_normalization=knobs["normalize_obs"],
        num_episodes=knobs["episodes"],
        action_noise_stdev=knobs["action_noise"] or None,
        num_actors=settings["actors"],
    )
    return PGPE(
        problem,
        popsize=knobs["population"],
        center_learning_rate=knobs["lr"],
        stdev_learning_rate=0.0,
        stdev_init=knobs["sigma"],
        optimizer="adam",
        ranking_method="centered",
        center_init=torch.as_tensor(np.load(settings["start"])),
    )


def train(settings: dict[str, Any]) -> dict[str, Any]:
    searcher = search(settings)
    for _ in range(settings["warm_up"]):
        searcher.step()
    before, started = counts(searcher), time.perf_counter()
    while counts(searcher)[0] < settings["steps"]:
        searcher.step()
    seconds = time.perf_counter() - started
    steps, episodes = (after - first for after, first in zip(counts(searcher), before, strict=True))
    searcher.problem.kill_actors()
    return {"steps": steps, "episodes": episodes, "seconds": seconds, "steps_per_s": steps / max(seconds, 1e-9)}


def counts(searcher: PGPE) -> tuple[int, int]:
    return searcher.problem.interaction_count, searcher.problem.episode_count


def main() -> None:
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    torch.manual_seed(settings["seed"])  # a seed of the problem's own ends its actors (EvoTorch 0.6)
    with local_ray.started(num_cpus=settings["actors"]):
        figures = train(settings)
    versions = {name: metadata.version(name) for name in ("evotorch", "ray", "torch", "gymnasium", "numpy")}
    print(json.dumps({**figures, "versions": versions}))


if __name__ == "__main__":
    main()
