"""Networks and the policy built of them."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from regatta.policies.distributions import ActionSpec
from regatta.policies.flat import Layout
from regatta.policies.networks import (
    HIDDEN_GAIN,
    NetworkConfig,
    ObsSpec,
    activate,
    dense,
    init_layer,
    linear,
    orthogonal,
)
from regatta.policies.policy import POLICY_GAIN, VALUE_GAIN, Policy, PolicySpec
from regatta.seeding import stream

DISCRETE = ActionSpec("discrete", (3,))
BOX = ActionSpec("box", (2,))


def policy_of(
    action: ActionSpec = DISCRETE, *, shared: bool = False, normalized: bool = False, activation: str = "tanh"
) -> Policy:
    network = NetworkConfig(sizes=(8, 6), shared=shared, log_std=-0.5, activation=activation)  # type: ignore[arg-type]
    return Policy(PolicySpec(ObsSpec((4,)), action, network, normalized))


# -- networks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (9, 4), (4, 9), (1, 7), (7, 1)])
def test_orthogonal(rows: int, columns: int) -> None:
    q = orthogonal(np.random.default_rng(0), rows, columns)
    assert q.shape == (rows, columns)
    product = q.T @ q if rows >= columns else q @ q.T
    np.testing.assert_allclose(product, np.eye(min(rows, columns)), atol=1e-12)
    np.testing.assert_array_equal(q, orthogonal(np.random.default_rng(0), rows, columns))
    assert not np.array_equal(q, orthogonal(np.random.default_rng(1), rows, columns))


def test_init_layer_scales_by_its_gain() -> None:
    arrays = init_layer(np.random.default_rng(0), "a/0", 6, 3, gain=2.0)
    assert {name: (array.shape, array.dtype.name) for name, array in arrays.items()} == {
        "a/0/w": ((6, 3), "float32"),
        "a/0/b": ((3,), "float32"),
    }
    np.testing.assert_allclose(arrays["a/0/w"].T @ arrays["a/0/w"], 4 * np.eye(3), atol=1e-5)
    assert not arrays["a/0/b"].any()


def test_activations_by_hand() -> None:
    x = np.array([-2.0, 0.0, 3.0])
    np.testing.assert_allclose(activate(np, "tanh", x), [-0.96402758, 0.0, 0.99505475])
    np.testing.assert_allclose(activate(np, "relu", x), [0.0, 0.0, 3.0])
    np.testing.assert_allclose(activate(np, "elu", x), [-0.86466472, 0.0, 3.0])
    np.testing.assert_allclose(activate(np, "silu", x), [-0.23840584, 0.0, 2.85772238])


@pytest.mark.parametrize("kind", ["tanh", "relu", "elu", "silu"])
def test_activations_stay_finite_without_warnings(kind: str) -> None:
    x = np.array([-1e4, -200.0, 200.0, 1e4], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(activate(np, kind, x)).all()


def test_dense_layers_by_hand() -> None:
    arrays = {
        "pi/0/w": np.array([[1.0, -1.0]]),
        "pi/0/b": np.array([0.0, 1.0]),
        "pi/1/w": np.array([[2.0], [3.0]]),
        "pi/1/b": np.array([-5.0]),
    }
    x = np.array([[2.0], [-1.0]])
    # hidden: relu([2, -1]) = [2, 0], relu([-1, 2]) = [0, 2]; then 4 - 5 and 6 - 5
    hidden = dense(np, arrays, "pi", 1, "relu", x)
    np.testing.assert_array_equal(hidden, [[2.0, 0.0], [0.0, 2.0]])
    np.testing.assert_array_equal(linear(arrays, "pi/1", hidden), [[-1.0], [1.0]])
    np.testing.assert_array_equal(dense(np, arrays, "pi", 2, "relu", x), [[0.0], [1.0]])


# -- the policy -------------------------------------------------------------------------------------------


def test_separate_networks() -> None:
    arrays = policy_of().init(stream(1, "init"))
    shapes = {name: array.shape for name, array in arrays.items() if name.endswith("/w")}
    assert shapes == {
        "pi/0/w": (4, 8),
        "pi/1/w": (8, 6),
        "pi/out/w": (6, 3),
        "vf/0/w": (4, 8),
        "vf/1/w": (8, 6),
        "vf/out/w": (6, 1),
    }
    for name, gain in (("pi/1", HIDDEN_GAIN), ("vf/1", HIDDEN_GAIN), ("pi/out", POLICY_GAIN), ("vf/out", VALUE_GAIN)):
        np.testing.assert_allclose(np.linalg.norm(arrays[name + "/w"], 2), gain, rtol=1e-5)


def test_shared_trunk() -> None:
    arrays = policy_of(shared=True).init(stream(1, "init"))
    assert sorted(name for name in arrays if name.endswith("/w")) == [
        "pi/out/w",
        "trunk/0/w",
        "trunk/1/w",
        "vf/out/w",
    ]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=["discrete", "box"])
def test_policy_shapes_and_agreement(action: ActionSpec, shared: bool) -> None:
    policy = policy_of(action, shared=shared)
    arrays = policy.init(stream(1, "init"))
    assert ("pi/log_std" in arrays) == (action is BOX)
    obs = np.random.default_rng(0).normal(size=(5, 7, 4)).astype(np.float32)
    out, value = policy.act_and_value(np, arrays, obs)
    head = out[0] if action is BOX else out
    assert head.shape == (5, 7, action.outputs)
    assert value.shape == (5, 7)
    alone = policy.act_out(np, arrays, obs)
    np.testing.assert_array_equal(head, alone[0] if action is BOX else alone)
    np.testing.assert_array_equal(value, policy.value(np, arrays, obs))
    if action is BOX:
        np.testing.assert_array_equal(out[1], np.full(2, -0.5, np.float32))
    other, other_value = policy.act_and_value(jnp, arrays, obs)
    np.testing.assert_allclose(head, other[0] if action is BOX else other, atol=1e-6)
    np.testing.assert_allclose(value, other_value, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "elu", "silu"])
def test_numpy_and_jax_networks_agree(activation: str) -> None:
    policy = policy_of(activation=activation)
    arrays = policy.init(stream(2, "init"))
    obs = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32) * 5
    np.testing.assert_allclose(policy.value(np, arrays, obs), policy.value(jnp, arrays, obs), rtol=1e-4, atol=1e-5)


def test_init_depends_on_the_seed_alone() -> None:
    one, same, other = (policy_of().init(stream(seed, "init")) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["pi/0/w"], other["pi/0/w"])


@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=["discrete", "box"])
def test_player_is_deterministic(action: ActionSpec) -> None:
    policy = policy_of(action)
    arrays = policy.init(stream(1, "init"))
    obs = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    noise = policy.distribution.noise(np.random.default_rng(1), 6)
    one, other = policy.player(arrays), policy.player(arrays)
    for given in (noise, None):
        actions, state = one(obs, given, None, None)
        assert actions.shape == (6, *action.shape)
        assert state is None
        np.testing.assert_array_equal(actions, one(obs, given, None, None)[0])
        np.testing.assert_array_equal(actions, other(obs, given, None, None)[0])
    np.testing.assert_array_equal(
        one(obs, None, None, None)[0], policy.distribution.mode(policy.act_out(np, arrays, obs))
    )


def test_player_applies_the_statistics_of_its_snapshot() -> None:
    plain, normalized = policy_of(BOX), policy_of(BOX, normalized=True)
    arrays = plain.init(stream(1, "init"))
    stats = {"stats/mean": np.full(4, 2.0, np.float32), "stats/scale": np.full(4, 0.5, np.float32)}
    obs = np.array([[2.0, 4.0, 0.0, 1e9]], np.float32)
    expected, _ = plain.player(arrays)(np.array([[0.0, 1.0, -1.0, 10.0]], np.float32), None, None, None)
    np.testing.assert_array_equal(normalized.player(arrays | stats)(obs, None, None, None)[0], expected)


def test_player_obeys_the_mask() -> None:
    policy = policy_of(ActionSpec("discrete", (3,), masked=True))
    arrays = policy.init(stream(1, "init"))
    mask = np.array([[False, True, False], [True, False, False]])
    obs = np.zeros((2, 4), np.float32)
    noise = policy.distribution.noise(np.random.default_rng(0), 2)
    for given in (noise, None):
        np.testing.assert_array_equal(policy.player(arrays)(obs, given, mask, None)[0], [1, 0])


# -- one vector -------------------------------------------------------------------------------------------


def test_layout_round_trip() -> None:
    arrays = policy_of(BOX, shared=True).init(stream(1, "init")) | {"scalar": np.array(3.0, np.float32)}
    layout = Layout(arrays)
    vector = layout.flatten(np, arrays)
    assert vector.shape == (sum(array.size for array in arrays.values()),)
    assert vector.dtype == np.float32
    back = layout.split(vector)
    assert list(back) == sorted(arrays)
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)
    assert all(np.shares_memory(back[name], vector) for name in arrays)
    np.testing.assert_array_equal(layout.flatten(jnp, layout.split(jnp.asarray(vector))), vector)


def test_layout_does_not_depend_on_the_order_of_names() -> None:
    arrays = {"b": np.array([1.0]), "a": np.array([2.0, 3.0])}
    backwards = dict(reversed(arrays.items()))
    np.testing.assert_array_equal(Layout(arrays).flatten(np, arrays), [2.0, 3.0, 1.0])
    np.testing.assert_array_equal(Layout(backwards).flatten(np, backwards), [2.0, 3.0, 1.0])
