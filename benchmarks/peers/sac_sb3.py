"""SAC by Stable-Baselines3 with the settings given as JSON; run by speed.py with the peers' interpreter.

    python sac_sb3.py '{"env": "HalfCheetah-v5", ...}'

It trains after every `group` steps of its environments, with as many gradient steps as Regatta makes for them. The
clock starts when `warm_up` gradient steps have been made and stops after the last one. The last line of the output is
one JSON object.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Any

import torch
from ppo_sb3 import ACTIVATIONS, Clock, environments
from stable_baselines3 import SAC


class LateClock(Clock):
    """Seconds, steps and gradient steps after the first `warm_up` gradient steps."""

    def __init__(self, warm_up: int) -> None:
        super().__init__()
        self.warm_up = warm_up
        self.updates_before = 0

    def _on_rollout_start(self) -> None:
        if self.started is None and self.model._n_updates >= self.warm_up:
            self.updates_before = self.model._n_updates
            super()._on_rollout_start()

    def figures(self) -> dict[str, Any]:
        updates = self.model._n_updates - self.updates_before if self.started else 0
        if updates <= 0 or updates != self.steps:
            sys.exit(f"{updates} gradient steps in {self.steps} steps after the first {self.warm_up}")
        return {**super().figures(), "updates": updates}


def train(sac: Any, activations: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    knobs = settings["algorithm"]
    for name in ("critic_lr", "alpha_lr", "target_entropy"):
        if knobs[name] is not None:
            sys.exit(f"algorithm.{name} = {knobs[name]} is not comparable: leave it at none")
    if knobs["normalize_obs"] or knobs["noise_colour"] or knobs["updates_per_step"] != 1:
        sys.exit("normalize_obs, noise_colour and other updates_per_step than 1 are not compared")
    envs = environments({**settings, "algorithm": {"normalize_obs": False, "normalize_reward": False}})
    model = sac(
        "MlpPolicy",
        envs,
        learning_rate=knobs["lr"],
        buffer_size=min(knobs["replay_size"], settings["steps"]),
        learning_starts=knobs["learning_starts"],
        batch_size=knobs["batch"],
        tau=knobs["tau"],
        gamma=knobs["gamma"],
        train_freq=settings["group"],
        gradient_steps=settings["group"] * settings["envs"],
        ent_coef=f"auto_{knobs['alpha']}",
        policy_kwargs={"net_arch": settings["sizes"], "activation_fn": activations[settings["activation"]]},
        seed=settings["seed"],
        device="cpu",
    )
    clock = LateClock(settings["warm_up"])
    model.learn(settings["steps"], callback=clock)
    envs.close()
    return clock.figures()


def main(sac: Any, activations: dict[str, Any], libraries: list[str]) -> None:
    torch.set_num_threads(1)
    figures = train(sac, activations, json.loads(sys.argv[1]))
    print(json.dumps({**figures, "versions": {name: metadata.version(name) for name in libraries}}))


if __name__ == "__main__":
    main(SAC, ACTIVATIONS, ["stable-baselines3", "torch", "gymnasium", "mujoco", "numpy"])
