"""PPO by Stable-Baselines3 with the settings given as JSON; run by speed.py with the peers' interpreter.

    python ppo_sb3.py '{"env": "CartPole-v1", ...}'                train and time; "save" keeps the model
    python ppo_sb3.py '{"env": "CartPole-v1", "evaluate": FILE}'   play episodes with a model saved before

The last line of the output is one JSON object. The clock starts when the first update has ended, so that imports
and compilation do not count, and stops when the last has: the same as Regatta's steps_per_s.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "elu": torch.nn.ELU, "silu": torch.nn.SiLU}


class Clock(BaseCallback):
    """Seconds and steps from the end of the first update, or of the one that reaches `skipped` steps, to the last's."""

    def __init__(self, skipped: int = 1) -> None:
        super().__init__()
        self.skipped = skipped
        self.started: tuple[float, int] | None = None
        self.seconds = 0.0
        self.steps = 0

    def _on_rollout_start(self) -> None:
        if self.started is None and self.model.num_timesteps >= self.skipped:
            self.started = (time.perf_counter(), self.model.num_timesteps)

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        if self.started is not None:
            self.seconds = time.perf_counter() - self.started[0]
            self.steps = self.model.num_timesteps - self.started[1]

    def figures(self) -> dict[str, Any]:
        return {"steps": self.steps, "seconds": self.seconds, "steps_per_s": self.steps / max(self.seconds, 1e-9)}


def schedule(first: float, kind: str) -> Any:
    return (lambda remaining: remaining * first) if kind == "linear" else first


def environments(settings: dict[str, Any]) -> Any:
    knobs = settings["algorithm"]
    name = settings["env"]
    envs: Any = make_vec_env(
        f"ale_py:{name}" if name.startswith("ALE/") else name,  # registered by that module, also in other processes
        settings["envs"],
        seed=settings["seed"],
        env_kwargs=settings["kwargs"],
        vec_env_cls=SubprocVecEnv if settings["vec_env"] == "subproc" else DummyVecEnv,
    )
    if knobs["normalize_obs"] or knobs["normalize_reward"]:
        envs = VecNormalize(
            envs, norm_obs=knobs["normalize_obs"], norm_reward=knobs["normalize_reward"], gamma=knobs["gamma"]
        )
    return envs


def train(ppo: Any, activations: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    knobs = settings["algorithm"]
    envs = environments(settings)
    model = ppo(
        "MlpPolicy",
        envs,
        learning_rate=schedule(knobs["lr"], knobs["lr_schedule"]),
        n_steps=knobs["rollout_steps"],
        batch_size=knobs["minibatch"],
        n_epochs=knobs["epochs"],
        gamma=knobs["gamma"],
        gae_lambda=knobs["gae_lambda"],
        clip_range=schedule(knobs["clip"], knobs["clip_schedule"]),
        clip_range_vf=knobs["value_clip"],
        normalize_advantage=knobs["normalize_advantages"],
        ent_coef=knobs["entropy_coef"],
        vf_coef=knobs["value_coef"],
        max_grad_norm=knobs["max_grad_norm"],
        target_kl=knobs["target_kl"],
        policy_kwargs={
            "net_arch": {"pi": settings["sizes"], "vf": settings["sizes"]},
            "activation_fn": activations[settings["activation"]],
            "log_std_init": settings["log_std"],
        },
        seed=settings["seed"],
        device="cpu",
    )
    clock = Clock()
    model.learn(settings["steps"], callback=clock)
    if "save" in settings:
        model.save(settings["save"])
    envs.close()
    return clock.figures()


def evaluate(ppo: Any, settings: dict[str, Any]) -> dict[str, Any]:
    model = ppo.load(settings["evaluate"], device="cpu")
    envs = make_vec_env(settings["env"], 1, seed=1_000_000)
    mean, _ = evaluate_policy(model, envs, n_eval_episodes=settings["episodes"], deterministic=True)
    return {"return_mean": float(mean)}


def main(ppo: Any, activations: dict[str, Any], libraries: list[str]) -> None:
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    figures = evaluate(ppo, settings) if "evaluate" in settings else train(ppo, activations, settings)
    print(json.dumps({**figures, "versions": {name: metadata.version(name) for name in libraries}}))


if __name__ == "__main__":
    main(PPO, ACTIVATIONS, ["stable-baselines3", "torch", "gymnasium", "numpy"])
