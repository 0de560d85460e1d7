"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from regatta.algorithms.base import final_rows, side_by_side
from regatta.algorithms.returns import gae, next_values
from regatta.types import Arrays, Result

GAMMA, LAMBDA = 0.5, 0.5  # carries 0.25 of each advantage to the step before
NO, YES = False, True


def column(*numbers: float) -> np.ndarray:
    return np.array(numbers)[:, None]


def advantages_of(
    rewards: np.ndarray,
    values: np.ndarray,
    last_value: float,
    *,
    terminated: np.ndarray | None = None,
    truncated: np.ndarray | None = None,
    final_values: np.ndarray | None = None,
    valid: np.ndarray | None = None,
) -> list[float]:
    never = np.zeros(rewards.shape, bool)
    terminated = never if terminated is None else terminated
    truncated = never if truncated is None else truncated
    final_values = np.zeros(rewards.shape) if final_values is None else final_values
    following = next_values(jnp, values, np.array([last_value]), terminated, truncated, final_values)
    valid = ~never if valid is None else valid
    result = gae(rewards, values, following, terminated | truncated, valid, GAMMA, LAMBDA)
    return np.asarray(result)[:, 0].tolist()


def test_one_long_episode() -> None:
    # deltas, last to first: 3 + 0.5 * 8 - 4 = 3;  2 + 0.5 * 4 - 2 = 2;  1 + 0.5 * 2 - 1 = 1
    # advantages:             3;                    2 + 0.25 * 3 = 2.75;  1 + 0.25 * 2.75 = 1.6875
    assert advantages_of(column(1, 2, 3), column(1, 2, 4), 8.0) == [1.6875, 2.75, 3.0]


def test_nothing_follows_a_termination() -> None:
    # deltas: 3;  2 + 0 - 2 = 0 (terminated);  1 + 0.5 * 2 - 1 = 1
    # advantages: 3;  0, the 3 belongs to the next episode;  1 + 0.25 * 0 = 1
    got = advantages_of(column(1, 2, 3), column(1, 2, 4), 8.0, terminated=column(NO, YES, NO))
    assert got == [1.0, 0.0, 3.0]


def test_a_time_limit_is_bootstrapped_from_the_final_observation() -> None:
    # delta of the cut step: 2 + 0.5 * 6 - 2 = 3, with the final observation's value 6, not the next reset's 4
    # advantages: 3;  3;  1 + 0.25 * 3 = 1.75
    got = advantages_of(
        column(1, 2, 3), column(1, 2, 4), 8.0, truncated=column(NO, YES, NO), final_values=column(0, 6, 0)
    )
    assert got == [1.75, 3.0, 3.0]


def test_termination_wins_over_truncation() -> None:
    got = advantages_of(
        column(1), column(2), 8.0, terminated=column(YES), truncated=column(YES), final_values=column(6)
    )
    assert got == [-1.0]


def test_final_values_count_at_truncations_only() -> None:
    got = advantages_of(column(1, 2, 3), column(1, 2, 4), 8.0, final_values=column(100, 100, 100))
    assert got == [1.6875, 2.75, 3.0]


def test_an_invalid_step_contributes_nothing_and_ends_the_sum() -> None:
    # step 1 failed: its advantage is 0 and step 0 sees only its own delta, 1 + 0.5 * 2 - 1 = 1
    for truncated in (column(NO, NO, NO), column(NO, YES, NO)):
        got = advantages_of(column(1, 1e6, 3), column(1, 2, 4), 8.0, truncated=truncated, valid=column(YES, NO, YES))
        assert got == [1.0, 0.0, 3.0]


def test_the_last_step_may_end_in_either_way() -> None:
    assert advantages_of(column(3), column(4), 8.0, terminated=column(YES)) == [-1.0]
    assert advantages_of(column(3), column(4), 8.0, truncated=column(YES), final_values=column(2)) == [0.0]
    assert advantages_of(column(3), column(4), 8.0) == [3.0]


def test_columns_do_not_mix() -> None:
    rewards = np.hstack([column(1, 2, 3), column(1, 2, 3)])
    values = np.hstack([column(1, 2, 4), column(1, 2, 4)])
    terminated = np.hstack([column(NO, NO, NO), column(NO, YES, NO)])
    never = np.zeros((3, 2), bool)
    following = next_values(np, values, np.array([8.0, 8.0]), terminated, never, np.zeros((3, 2)))
    got = np.asarray(gae(rewards, values, following, terminated, ~never, GAMMA, LAMBDA))
    np.testing.assert_array_equal(got.T, [[1.6875, 2.75, 3.0], [1.0, 0.0, 3.0]])


# -- lanes side by side -----------------------------------------------------------------------------------


def lane(number: int, envs: int, finals: list[tuple[int, int]]) -> tuple[Result, Arrays]:
    arrays = {
        "rewards": np.full((3, envs), number, np.float32),
        "final_obs": np.array([[10.0 * number + t] for t, _ in finals], np.float32).reshape(-1, 1),
        "final_index": np.array(finals, np.int32).reshape(-1, 2),
    }
    return Result(number, 0, 0, [], [], 0.0), arrays


def test_lanes_are_joined_in_their_order() -> None:
    results = [lane(0, 2, [(2, 1)]), lane(1, 2, []), lane(2, 2, [(0, 0), (1, 1)])]
    np.testing.assert_array_equal(side_by_side(results, "rewards"), [[0, 0, 1, 1, 2, 2]] * 3)
    rows, index = final_rows(results)
    np.testing.assert_array_equal(rows, [[2.0], [20.0], [21.0]])
    np.testing.assert_array_equal(index, [[2, 1], [0, 4], [1, 5]])
