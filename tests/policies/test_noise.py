"""The noise of populations: the same slices for everyone, mirrored pairs, and sums of slices."""

from __future__ import annotations

import numpy as np
import pytest

from regatta.policies import noise
from regatta.policies.flat import Layout
from regatta.policies.noise import NoiseTable, noise_table
from regatta.types import Array


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> NoiseTable:
    monkeypatch.setattr(noise, "TABLE_LEAST", 1000)
    return NoiseTable(3, 7)


def dense(table: NoiseTable, offsets: Array, weights: Array) -> Array:
    """The sum of weighted slices, straight from its definition."""
    rows = np.stack([table.slice(offset) for offset in offsets]).astype(np.float64)
    return np.asarray(weights @ rows)


def test_a_member_has_its_noise_by_number_alone(table: NoiseTable) -> None:
    whole, _ = table.members(5, 0, 12, mirrored=False)
    for first, count in ((0, 1), (3, 4), (11, 1)):
        part, signs = table.members(5, first, count, mirrored=False)
        np.testing.assert_array_equal(part, whole[first : first + count])
        assert (signs == 1).all()
    other, _ = table.members(6, 0, 12, mirrored=False)
    assert (other != whole).any()
    np.testing.assert_array_equal(NoiseTable(3, 7).numbers, table.numbers)
    assert (NoiseTable(4, 7).numbers != table.numbers).any()


def test_mirrored_members_share_a_draw_with_opposite_signs(table: NoiseTable) -> None:
    draws = table.offsets(5, 0, 3)
    offsets, signs = table.members(5, 0, 6, mirrored=True)
    np.testing.assert_array_equal(offsets, draws[[0, 0, 1, 1, 2, 2]])
    np.testing.assert_array_equal(signs, [1, -1, 1, -1, 1, -1])
    offsets, signs = table.members(5, 3, 2, mirrored=True)  # from the middle of a pair
    np.testing.assert_array_equal(offsets, draws[[1, 2]])
    np.testing.assert_array_equal(signs, [-1, 1])


def test_slices_lie_within_the_table_and_look_gaussian(table: NoiseTable) -> None:
    offsets = table.offsets(0, 0, 5000)
    assert offsets.min() >= 0
    assert offsets.max() + table.size == len(table.numbers) == 1000
    big = noise_table(0, 7)
    assert len(big.numbers) == 1000
    assert abs(big.numbers.mean()) < 0.1
    assert abs(big.numbers.std() - 1) < 0.1
    noise_table.cache_clear()


def test_the_table_outgrows_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "TABLE_LEAST", 100)
    assert len(NoiseTable(0, 50).numbers) == 50 * noise.TABLE_FACTOR


@pytest.mark.parametrize("block", [1, 3, 7, 64])
def test_a_sum_of_slices_is_the_dense_one(table: NoiseTable, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "SUM_BLOCK", block)
    offsets = table.offsets(1, 0, 20)
    weights = np.linspace(-0.5, 0.5, 20).astype(np.float32)
    weights[3] = 0
    np.testing.assert_allclose(table.combine(offsets, weights), dense(table, offsets, weights), rtol=1e-5, atol=1e-6)


def test_no_weights_no_sum(table: NoiseTable) -> None:
    np.testing.assert_array_equal(table.combine(table.offsets(0, 0, 4), np.zeros(4, np.float32)), np.zeros(7))


def test_statistics_are_no_parameters() -> None:
    arrays = {"b": np.arange(2.0), "a": np.arange(6.0).reshape(2, 3), "stats/mean": np.ones(4)}
    layout = Layout(arrays)
    assert layout.size == 8
    np.testing.assert_array_equal(layout.flatten(np, arrays), [0, 1, 2, 3, 4, 5, 0, 1])
    assert layout.split(np.arange(8)).keys() == {"a", "b"}


def test_rows_of_a_matrix_as_stacks() -> None:
    layout = Layout({"w": np.zeros((2, 3)), "b": np.zeros(3)})
    matrix = np.arange(18.0).reshape(2, 9)
    stacked = layout.stacked(matrix)
    assert stacked["b"].shape == (2, 1, 3)
    np.testing.assert_array_equal(stacked["w"][1], [[12, 13, 14], [15, 16, 17]])
    matrix[1, 0] = -1  # views, not copies
    assert stacked["b"][1, 0, 0] == -1
    x = np.array([[[1.0, 2.0]], [[0.5, 0.0]]])
    out = x @ stacked["w"] + stacked["b"]
    np.testing.assert_array_equal(out[0, 0], x[0, 0] @ stacked["w"][0] + stacked["b"][0, 0])
