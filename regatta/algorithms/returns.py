"""Advantages and returns from trajectories that end in two ways: terminated, or cut by a time limit."""

from __future__ import annotations

from typing import Any


def next_values(xp: Any, values: Any, last_value: Any, terminated: Any, truncated: Any, final_values: Any) -> Any:
    """The value of what follows each step: nothing after a termination, the final observation's after a cut.

    values, terminated, truncated, final_values: [T, M]; last_value: [M].
    """
    following = xp.concatenate([values[1:], last_value[None]])
    return xp.where(terminated, 0.0, xp.where(truncated, final_values, following))


def gae(rewards: Any, values: Any, following: Any, done: Any, valid: Any, gamma: float, lam: float) -> Any:
    """Generalised advantage estimation (Schulman et al. 2016), [T, M] each, in one reverse scan.

    A step that is not valid contributes nothing and ends the sum, as if the trajectory stopped before it.
    """
    import jax
    import jax.numpy as jnp

    deltas = jnp.where(valid, rewards + gamma * following - values, 0.0)
    carries = gamma * lam * (valid & ~done)

    def back(advantage: Any, step: Any) -> Any:
        delta, carry = step
        advantage = delta + carry * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(back, jnp.zeros_like(deltas[0]), (deltas, carries), reverse=True)
    return advantages
