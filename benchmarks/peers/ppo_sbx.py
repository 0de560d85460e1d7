"""PPO by SBX, Stable-Baselines3's interface over JAX; the settings, the clock and the output are ppo_sb3.py's."""

from __future__ import annotations

import flax.linen as nn
from ppo_sb3 import main
from sbx import PPO

ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "elu": nn.elu, "silu": nn.silu}

if __name__ == "__main__":
    main(PPO, ACTIVATIONS, ["sbx-rl", "jax", "stable-baselines3", "torch", "gymnasium", "numpy"])
