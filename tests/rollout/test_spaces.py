"""Between Gymnasium's spaces and flat rows of float32."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from regatta.errors import ConfigError
from regatta.policies.distributions import ActionSpec
from regatta.rollout.spaces import (
    BadObservation,
    action_spec,
    mask_of,
    observation_size,
    observation_spec,
    read_mask,
    to_env,
    writer,
)

BOX = spaces.Box(-1, 1, (3,))
GRID = spaces.Box(-1, 1, (2, 3), dtype=np.float64)
PIXELS = spaces.Box(0, 255, (2, 2), dtype=np.uint8)
INTS = spaces.Box(-5, 5, (2,), dtype=np.int32)
FLAGS = spaces.MultiBinary(3)
CHOICE = spaces.Discrete(4)
FROM_FIVE = spaces.Discrete(3, start=5)
BELOW_ZERO = spaces.Discrete(3, start=-1)
CHOICES = spaces.MultiDiscrete([2, 3])
CHOICES_FROM = spaces.MultiDiscrete([2, 3], start=[10, -1])
PARTS = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(2))
MASKED = spaces.Dict(action_mask=FLAGS, state=spaces.Box(-1, 1, (2,)))


def written(space: spaces.Space[Any], obs: Any) -> list[float]:
    spec = observation_spec(space)
    row = np.full(spec.shape, 9, spec.dtype)
    writer(space)(row, obs)
    numbers: list[float] = row.tolist()
    return numbers


@pytest.mark.parametrize(
    ("space", "obs", "row"),
    [
        (BOX, np.array([0.5, -1, 0]), [0.5, -1, 0]),
        (BOX, np.array([1, 2, 3]), [1, 2, 3]),
        (BOX, [0.25, 0, 1], [0.25, 0, 1]),
        (BOX, np.array([True, False, True]), [1, 0, 1]),
        (GRID, np.arange(6.0).reshape(2, 3), [0, 1, 2, 3, 4, 5]),
        (GRID, np.arange(6.0).reshape(3, 2).T, [0, 2, 4, 1, 3, 5]),
        (PIXELS, np.array([[0, 255], [7, 8]], np.uint8), [[0, 255], [7, 8]]),
        (INTS, np.array([-5, 4], np.int64), [-5, 4]),
        (spaces.Box(-1, 1, ()), np.float32(0.5), [0.5]),
        (spaces.Box(-1, 1, ()), 0.5, [0.5]),
        (FLAGS, np.array([1, 0, 1], np.int8), [1, 0, 1]),
        (spaces.MultiBinary((2, 2)), np.eye(2, dtype=np.int8), [1, 0, 0, 1]),
        (CHOICE, 2, [0, 0, 1, 0]),
        (CHOICE, np.int64(0), [1, 0, 0, 0]),
        (CHOICE, np.array(3), [0, 0, 0, 1]),
        (FROM_FIVE, 5, [1, 0, 0]),
        (FROM_FIVE, np.uint8(7), [0, 0, 1]),
        (BELOW_ZERO, -1, [1, 0, 0]),
        (BELOW_ZERO, np.uint8(1), [0, 0, 1]),
        (CHOICES, np.array([1, 2]), [0, 1, 0, 0, 1]),
        (CHOICES_FROM, np.array([10, 1]), [1, 0, 0, 0, 1]),
        (spaces.MultiDiscrete([[2, 2], [2, 2]]), np.eye(2, dtype=int), [0, 1, 1, 0, 1, 0, 0, 1]),
        (PARTS, {"b": 1, "a": np.array([0.5, -0.5])}, [0.5, -0.5, 0, 1]),
        (PARTS, {"b": 0, "a": np.zeros(2), "unasked": None}, [0, 0, 1, 0]),
        (MASKED, {"state": np.ones(2), "action_mask": np.ones(3, np.int8)}, [1, 1]),
    ],
)
def test_observations_become_rows(space: spaces.Space[Any], obs: Any, row: list[float]) -> None:
    assert written(space, obs) == row


@pytest.mark.parametrize(
    ("space", "obs", "words"),
    [
        (BOX, np.zeros(2), r"shape \(2,\), its space says \(3,\)"),
        (BOX, np.zeros((1, 3)), r"shape \(1, 3\)"),
        (BOX, 0.0, r"shape \(\)"),
        (GRID, np.zeros(6), r"shape \(6,\)"),
        (BOX, np.array([None, None, None]), "dtype object"),
        (BOX, np.zeros(3, complex), "dtype complex128"),
        (BOX, np.array(["1", "2", "3"]), "dtype <U1"),
        (INTS, np.array([0.5, 0.5]), "dtype float64"),
        (PIXELS, np.zeros((2, 2)), "float64, its space says uint8"),
        (PIXELS, np.zeros((2, 3), np.uint8), r"shape \(2, 3\), its space says \(2, 2\)"),
        (FLAGS, np.array([0.5, 0, 1]), "dtype float64"),
        (CHOICE, 4, "observation 4 is not one of the 4 choices from 0 on"),
        (CHOICE, -1, "not one of the 4 choices"),
        (CHOICE, 1.0, "not one of the 4 choices"),
        (CHOICE, np.array([1]), "not one of the 4 choices"),
        (CHOICE, None, "not one of the 4 choices"),
        (FROM_FIVE, 4, "3 choices from 5 on"),
        (FROM_FIVE, 8, "3 choices from 5 on"),
        (CHOICES, np.array([0, 3]), "does not fit MultiDiscrete"),
        (CHOICES, np.array([-1, 0]), "does not fit MultiDiscrete"),
        (CHOICES, np.array([0.0, 1.0]), "does not fit MultiDiscrete"),
        (CHOICES, np.array([0, 1, 1]), "does not fit MultiDiscrete"),
        (PARTS, {"a": np.zeros(2)}, r"lacks key 'b'; it has \['a'\]"),
        (PARTS, {"a": np.zeros(3), "b": 0}, r"shape \(3,\)"),
        (PARTS, {"a": np.zeros(2), "b": 2}, "observation 2 is not one of the 2 choices"),
    ],
)
def test_what_does_not_fit_its_space_is_named(space: spaces.Space[Any], obs: Any, words: str) -> None:
    with pytest.raises(BadObservation, match=words):
        written(space, obs)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Tuple([BOX, CHOICE]),
        spaces.Dict(inner=spaces.Dict(a=BOX)),
        spaces.Dict(action_mask=FLAGS),
        spaces.Dict(),
        spaces.Sequence(BOX),
    ],
    ids=lambda space: type(space).__name__,
)
def test_spaces_that_cannot_be_flattened_are_refused_by_name(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(space))) as refused:
        observation_size(space)
    assert "valid are Box, Discrete" in str(refused.value)


def test_a_dict_with_one_bad_part_names_that_part() -> None:
    with pytest.raises(ConfigError, match=re.escape(str(spaces.Text(5)))):
        observation_size(spaces.Dict(a=BOX, b=spaces.Text(5)))


@pytest.mark.parametrize(
    ("space", "masked", "spec"),
    [
        (FROM_FIVE, False, ActionSpec("discrete", (3,))),
        (FROM_FIVE, True, ActionSpec("discrete", (3,), True)),
        (CHOICES_FROM, True, ActionSpec("multidiscrete", (2, 3), True)),
        (FLAGS, False, ActionSpec("multibinary", (3,))),
        (GRID, False, ActionSpec("box", (6,))),
    ],
)
def test_action_specs(space: spaces.Space[Any], masked: bool, spec: ActionSpec) -> None:
    assert action_spec(space, masked) == spec


@pytest.mark.parametrize(
    ("space", "masked"),
    [
        (INTS, False),
        (BOX, True),
        (FLAGS, True),
        (spaces.MultiBinary((2, 2)), False),
        (spaces.MultiDiscrete([[2, 2]]), False),
        (PARTS, False),
        (spaces.Text(3), False),
    ],
)
def test_action_spaces_that_are_refused_by_name(space: spaces.Space[Any], masked: bool) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"action space {space}")) as refused:
        action_spec(space, masked)
    assert ("with an action mask" in str(refused.value)) is masked


@pytest.mark.parametrize("space", [CHOICE, FROM_FIVE, BELOW_ZERO, CHOICES, CHOICES_FROM, FLAGS, BOX, GRID])
def test_actions_are_what_the_environment_takes(space: spaces.Space[Any]) -> None:
    spec = action_spec(space, False)
    rng = np.random.default_rng(0)
    stored = np.zeros((50, *spec.shape), spec.dtype)
    if spec.kind == "box":
        stored[:] = 3 * rng.standard_normal(stored.shape)
    else:
        stored[:] = rng.integers(0, {"multibinary": 2, "discrete": spec.sizes[0]}.get(spec.kind, spec.sizes))
    kept = stored.copy()
    given = to_env(space)(stored)
    assert len(given) == 50
    assert all(space.contains(action) for action in given)
    np.testing.assert_array_equal(stored, kept)


def test_actions_by_number() -> None:
    assert to_env(CHOICE)(np.array([0, 3])) == [0, 3]
    assert to_env(FROM_FIVE)(np.array([0, 2])) == [5, 7]
    assert all(type(action) is int for action in to_env(FROM_FIVE)(np.array([0, 2])))
    assert [a.tolist() for a in to_env(CHOICES_FROM)(np.array([[0, 0], [1, 2]]))] == [[10, -1], [11, 1]]


def test_box_actions_are_clipped_per_dimension_and_shaped() -> None:
    space = spaces.Box(np.array([[-1, 0], [0, -2]]), np.array([[1, 5], [1, 2]]), dtype=np.float64)
    action = to_env(space)(np.array([[-9, 9, 0.5, -9]], np.float32))[0]
    assert action.tolist() == [[-1, 5], [0.5, -2]]
    assert (action.dtype, action.shape) == (np.float64, (2, 2))


def test_masks_come_from_info_or_from_a_dict() -> None:
    assert mask_of(np.zeros(2), {}) is None
    assert mask_of({"state": 1}, {}) is None
    assert mask_of(np.zeros(2), {"action_mask": [1, 0]}) == [1, 0]
    assert mask_of({"action_mask": [0, 1]}, {}) == [0, 1]
    assert mask_of({"action_mask": [0, 1]}, {"action_mask": [1, 0]}) == [1, 0]


@pytest.mark.parametrize(
    "mask", [[1, 0, 1], np.array([1, 0, 1], np.int8), np.array([True, False, True]), np.array([[1.0, 0.0, 1.0]])]
)
def test_masks_are_read(mask: Any) -> None:
    assert read_mask(mask, (3,)).tolist() == [True, False, True]


def test_masks_of_several_choices_may_be_a_tuple() -> None:
    assert read_mask((np.array([1, 0]), [0, 0, 1]), (2, 3)).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("mask", "sizes", "words"),
    [
        ([1, 0], (3,), "2 entries, the action space has 3 choices"),
        ([1, 0, 1, 1], (3,), "4 entries"),
        ([], (3,), "0 entries"),
        ([0, 0, 0], (3,), "no action at all"),
        ([1, 1, 0, 0, 0], (2, 3), "no action at all"),
        (None, (3,), "gave an action mask before, and none now"),
    ],
)
def test_bad_masks_are_refused(mask: Any, sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(BadObservation, match=words):
        read_mask(mask, sizes)
