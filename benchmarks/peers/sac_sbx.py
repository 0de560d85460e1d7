"""SAC by SBX, Stable-Baselines3's interface over JAX; the settings, the clock and the output are sac_sb3.py's."""

from __future__ import annotations

from ppo_sbx import ACTIVATIONS
from sac_sb3 import main
from sbx import SAC

if __name__ == "__main__":
    main(SAC, ACTIVATIONS, ["sbx-rl", "jax", "stable-baselines3", "torch", "gymnasium", "mujoco", "numpy"])
