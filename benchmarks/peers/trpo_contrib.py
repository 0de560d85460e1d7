"""TRPO by sb3-contrib; the environments and the output are ppo_sb3.py's, and so is the clock, after `skipped` steps."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Any

import torch
from ppo_sb3 import ACTIVATIONS, Clock, environments
from sb3_contrib import TRPO

# What sb3-contrib does not have, and what it must then be in Regatta.
FIXED = {"critic": "adam", "time_feature": None, "entropy_coef": 0.0, "fisher_every": 1}


def train(settings: dict[str, Any]) -> dict[str, Any]:
    knobs = settings["algorithm"]
    for name, value in FIXED.items():
        if knobs[name] != value:
            sys.exit(f"algorithm.{name} = {knobs[name]!r} is not comparable in sb3-contrib: let it be {value!r}")
    envs = environments(settings)
    model = TRPO(
        "MlpPolicy",
        envs,
        learning_rate=knobs["critic_lr"],
        n_steps=knobs["rollout_steps"],
        batch_size=knobs["critic_minibatch"],
        gamma=knobs["gamma"],
        cg_max_steps=knobs["cg_steps"],
        cg_damping=knobs["cg_damping"],
        line_search_shrinking_factor=knobs["line_search_shrink"],
        line_search_max_iter=knobs["line_search_steps"],
        n_critic_updates=knobs["critic_epochs"],
        gae_lambda=knobs["gae_lambda"],
        normalize_advantage=knobs["normalize_advantages"],
        target_kl=knobs["max_kl"],
        policy_kwargs={
            "net_arch": {"pi": settings["sizes"], "vf": settings["sizes"]},
            "activation_fn": ACTIVATIONS[settings["activation"]],
            "log_std_init": settings["log_std"],
        },
        seed=settings["seed"],
        device="cpu",
    )
    clock = Clock(settings["skipped"])
    model.learn(settings["steps"], callback=clock)
    envs.close()
    return clock.figures()


def main() -> None:
    torch.set_num_threads(1)
    figures = train(json.loads(sys.argv[1]))
    libraries = ("sb3-contrib", "stable-baselines3", "torch", "gymnasium", "ale-py", "numpy")
    print(json.dumps({**figures, "versions": {name: metadata.version(name) for name in libraries}}))


if __name__ == "__main__":
    main()
