"""PPO by RLlib with the settings nearest to those given as JSON; the output is ppo_sb3.py's.

RLlib has no schedule for the clip range, and its critic's loss is not halved, so `value_coef` is passed as it is.
Its KL penalty, which PPO with a clipped surrogate lacks, is off. The clock starts when the first call of train(),
one rollout and one update, has returned.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from typing import Any

import local_ray  # before Ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def config(settings: dict[str, Any]) -> PPOConfig:
    knobs = settings["algorithm"]
    if knobs["normalize_obs"] or knobs["normalize_reward"]:
        sys.exit("normalisation is not comparable in RLlib: turn it off on both sides")
    if settings["kwargs"]:
        sys.exit("env.kwargs is not passed on to RLlib: leave it empty on both sides")
    linear = knobs["lr_schedule"] == "linear"
    rate = [[0, knobs["lr"]], [settings["steps"], 0.0]] if linear else knobs["lr"]
    return (
        PPOConfig()
        .environment(settings["env"])
        .env_runners(
            num_env_runners=settings["env_runners"],
            num_envs_per_env_runner=settings["envs"] // max(settings["env_runners"], 1),
            rollout_fragment_length=knobs["rollout_steps"],
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=settings["envs"] * knobs["rollout_steps"],
            minibatch_size=knobs["minibatch"],
            num_epochs=knobs["epochs"],
            lr=rate,
            gamma=knobs["gamma"],
            lambda_=knobs["gae_lambda"],
            clip_param=knobs["clip"],
            vf_clip_param=float("inf"),
            vf_loss_coeff=knobs["value_coef"],
            entropy_coeff=knobs["entropy_coef"],
            grad_clip=knobs["max_grad_norm"],
            grad_clip_by="global_norm",
            use_kl_loss=False,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=settings["sizes"], fcnet_activation=settings["activation"], vf_share_layers=False
            )
        )
        .debugging(seed=settings["seed"], log_level="ERROR")
    )


def main() -> None:
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    with local_ray.started():
        steps, seconds = train(settings)
    versions = {name: metadata.version(name) for name in ("ray", "torch", "gymnasium", "numpy")}
    figures = {"steps": steps, "seconds": seconds, "steps_per_s": steps / max(seconds, 1e-9)}
    print(json.dumps({**figures, "versions": versions}))


def train(settings: dict[str, Any]) -> tuple[int, float]:
    algorithm = config(settings).build_algo()
    first = steps = sampled(algorithm.train())
    started = time.perf_counter()
    while steps < settings["steps"]:
        steps = sampled(algorithm.train())
    seconds = time.perf_counter() - started
    algorithm.stop()
    return steps - first, seconds


def sampled(result: dict[str, Any]) -> int:
    return int(result["num_env_steps_sampled_lifetime"])


if __name__ == "__main__":
    main()
