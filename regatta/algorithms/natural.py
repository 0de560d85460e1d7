"""Steps that know of curvature, as pure functions of one vector: conjugate gradients, line search, L-BFGS.

Everything here runs inside a compiled call; nothing knows of policies or rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOLVED = 1e-10  # of the squared residual's first value: beyond it float32 has no digits left to win
SUFFICIENT = 1e-4  # Armijo's constant: the share of the promised decrease that a step must bring
HALVINGS = 12


def conjugate_gradients(product: Callable[[Any], Any], b: Any, steps: int) -> tuple[Any, Any]:
    """x with A x = b, nearly, and the residual b - A x; `product` is v -> A v (Hestenes and Stiefel 1952).

    It stops early where it is solved, and where A turns out not to be positive definite.
    """
    import jax
    import jax.numpy as jnp

    def going(carry: Any) -> Any:
        k, _, _, _, rr = carry
        return (k < steps) & (rr > SOLVED * (b @ b))

    def step(carry: Any) -> Any:
        k, x, r, p, rr = carry
        z = product(p)
        curvature = p @ z
        alpha = rr / curvature
        following = r - alpha * z
        new_rr = following @ following
        further = (k + 1, x + alpha * p, following, following + (new_rr / rr) * p, new_rr)
        ended = (k + steps, x, r, p, rr)
        return _where(curvature > 0, further, ended)

    _, x, r, _, _ = jax.lax.while_loop(going, step, (0, jnp.zeros_like(b), b, b, b @ b))
    return x, r


def trust_region_step(product: Callable[[Any], Any], gradient: Any, steps: int, size: float) -> tuple[Any, Any, Any]:
    """The step s uphill along A^-1 gradient with s' A s / 2 = size, whether there is one, and the residual's norm.

    There is none where the gradient is zero, the curvature is not positive or a number is not finite; then s is zero.
    """
    import jax.numpy as jnp

    x, residual = conjugate_gradients(product, gradient, steps)
    curvature = x @ (gradient - residual)  # x' A x, without another product
    step = jnp.sqrt(2 * size / curvature) * x
    found = (curvature > 0) & jnp.isfinite(step).all()
    return jnp.where(found, step, 0.0), found, jnp.where(found, jnp.sqrt(residual @ residual), 0.0)


def backtrack(judge: Callable[[Any], Any], x: Any, step: Any, tries: int, shrink: float) -> tuple[Any, Any, Any, Any]:
    """The first of x + step, x + shrink * step, ... that `judge` accepts, else x itself.

    `judge` gives whether it accepts a vector, and figures about it. Returned are the vector, whether it moved, how
    many were tried, and the figures of the last.
    """
    import jax
    import jax.numpy as jnp

    def going(carry: Any) -> Any:
        tried, accepted, _ = carry
        return (tried < tries) & ~accepted

    def attempt(carry: Any) -> Any:
        tried, _, _ = carry
        return tried + 1, *judge(x + shrink**tried * step)

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(judge, x)[1])
    tried, accepted, figures = jax.lax.while_loop(going, attempt, (0, jnp.asarray(False), nothing))
    return jnp.where(accepted, x + shrink ** (tried - 1) * step, x), accepted, tried, figures


def lbfgs(loss: Callable[[Any], Any], x: Any, iterations: int, history: int = 10) -> Any:
    """Minimise from x on (Liu and Nocedal 1989), with steps halved until they bring enough; never worse than x."""
    import jax
    import jax.numpy as jnp

    evaluate = jax.value_and_grad(loss)

    def going(carry: Any) -> Any:
        k, _, (_, gradient), _, moved = carry
        return (k < iterations) & moved & (gradient @ gradient > 0)

    def iterate(carry: Any) -> Any:
        k, x, (value, gradient), pairs, _ = carry
        direction = -_two_loops(pairs, gradient)
        direction = jnp.where(direction @ gradient < 0, direction, -gradient)
        # Before there is a pair, the gradient's length says nothing about distances: begin with a step of one.
        first = jnp.where(k == 0, jnp.minimum(1.0, 1 / jnp.sqrt(gradient @ gradient)), 1.0)
        length, there = _halve(evaluate, x, value, direction, direction @ gradient, first)
        s, y = length * direction, there[1] - gradient
        moved = there[0] < value
        learnt = moved & (s @ y > 1e-10 * (y @ y))
        pairs = _where(learnt, _remember(pairs, s, y), pairs)
        x, here = _where(moved, (x + s, there), (x, (value, gradient)))
        return k + 1, x, here, pairs, moved

    nothing = jnp.zeros((history, x.shape[0]), x.dtype)
    pairs = (nothing, nothing, jnp.zeros(history, x.dtype))
    return jax.lax.while_loop(going, iterate, (0, x, evaluate(x), pairs, jnp.asarray(True)))[1]


def _halve(evaluate: Any, x: Any, value: Any, direction: Any, slope: Any, first: Any) -> tuple[Any, Any]:
    """How far to go, `first` or half of it and so on until the decrease suffices, and value and gradient there."""
    import jax
    import jax.numpy as jnp

    def going(carry: Any) -> Any:
        k, length, (new_value, _) = carry
        return (k < HALVINGS) & ~(new_value <= value + SUFFICIENT * length * slope)

    def attempt(carry: Any) -> Any:
        k, length, _ = carry
        return k + 1, 0.5 * length, evaluate(x + 0.5 * length * direction)

    _, length, there = jax.lax.while_loop(going, attempt, (-1, 2 * first, (jnp.full_like(value, jnp.inf), direction)))
    return length, there


def _where(condition: Any, these: Any, those: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), these, those)


def _remember(pairs: Any, s: Any, y: Any) -> Any:
    import jax.numpy as jnp

    steps, changes, rho = pairs
    rows = ((steps, s), (changes, y), (rho, 1 / (s @ y)))
    return tuple(jnp.concatenate([array[1:], jnp.asarray(row)[None]]) for array, row in rows)


def _two_loops(pairs: Any, gradient: Any) -> Any:
    """The inverse Hessian that the pairs tell of, times the gradient; rows not yet filled are zero and do nothing."""
    import jax
    import jax.numpy as jnp

    steps, changes, rho = pairs

    def back(q: Any, pair: Any) -> Any:
        s, y, r = pair
        alpha = r * (s @ q)
        return q - alpha * y, alpha

    def forth(q: Any, pair: Any) -> Any:
        s, y, r, alpha = pair
        return q + (alpha - r * (y @ q)) * s, None

    q, alphas = jax.lax.scan(back, gradient, pairs, reverse=True)
    scale = 1 / (rho[-1] * (changes[-1] @ changes[-1]))  # s'y / y'y of the newest pair
    q = jnp.where(rho[-1] > 0, scale, 1.0) * q
    return jax.lax.scan(forth, q, (steps, changes, rho, alphas))[0]
