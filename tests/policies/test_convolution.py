"""Convolutions: shapes, one window by hand, and a compiled player that agrees with the learner's function."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest

from regatta.errors import ConfigError
from regatta.policies.convolution import Convolution, patches, shrunk, slide
from regatta.policies.distributions import ActionSpec
from regatta.policies.networks import NetworkConfig, ObsSpec
from regatta.policies.policy import Policy, PolicySpec
from regatta.seeding import stream


def test_one_window_by_hand() -> None:
    image = np.arange(9, dtype=np.float32).reshape(1, 3, 3, 1)
    arrays = {"c/w": np.array([[1], [0], [0], [-1]], np.float32), "c/b": np.array([0.5], np.float32)}
    # each output: upper left minus lower right = -4, plus 0.5
    np.testing.assert_array_equal(slide(np, arrays, "c", image, 2, 1)[0, :, :, 0], np.full((2, 2), -3.5))


def test_the_largest_of_nine_by_hand() -> None:
    image = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.float32).reshape(1, 3, 3, 1)
    np.testing.assert_array_equal(shrunk(np, image)[0, :, :, 0], [[5, 6], [8, 9]])


@pytest.mark.parametrize(("window", "stride"), [(8, 4), (4, 2), (3, 1), (3, 2), (2, 2)])
def test_patches_hold_every_pixel_of_their_window_once(window: int, stride: int) -> None:
    image = np.arange(13 * 17 * 2).reshape(1, 13, 17, 2)
    found = patches(np, image, window, stride)
    assert found.shape[1:3] == ((13 - window) // stride + 1, (17 - window) // stride + 1)
    for i in range(found.shape[1]):
        for j in range(found.shape[2]):
            own = image[0, i * stride : i * stride + window, j * stride : j * stride + window]
            assert sorted(found[0, i, j]) == sorted(own.reshape(-1))


def test_members_of_a_population_have_weights_of_their_own() -> None:
    config = NetworkConfig(kind="cnn", convolutions="residual", sizes=(5,))
    net = Convolution(config, ObsSpec((9, 8, 2), "uint8"))
    members = [net.init(np.random.default_rng(k), "pi") for k in range(3)]
    images = np.random.default_rng(9).random((3, 1, 9, 8, 2), dtype=np.float32)
    together = {n: np.stack([m[n] if m[n].ndim > 1 else m[n][None] for m in members]) for n in members[0]}
    found, _ = net.apply(np, together, "pi", images, None)
    for k, member in enumerate(members):
        np.testing.assert_allclose(found[k], net.apply(np, member, "pi", images[k], None)[0], atol=1e-5)


@pytest.mark.parametrize("convolutions", ["nature", "residual"])
@pytest.mark.parametrize("shape", [(44, 40, 4), (36, 48)])
def test_player_and_learner_agree(convolutions: Literal["nature", "residual"], shape: tuple[int, ...]) -> None:
    config = NetworkConfig(kind="cnn", convolutions=convolutions, sizes=(16,), activation="relu", shared=True)
    policy = Policy(PolicySpec(ObsSpec(shape, "uint8"), ActionSpec("discrete", (3,)), config, False))
    arrays = policy.init(stream(0, "init"))
    obs = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
    out, value = policy.act_and_value(jnp, arrays, policy.normalize(jnp, arrays, obs))
    assert out.shape == (2, 3)
    assert value.shape == (2,)
    actions, state = policy.player(arrays)(obs, None, None, None)
    assert state is None
    np.testing.assert_array_equal(actions, np.asarray(out).argmax(-1))
    again, _ = policy.act_and_value(jnp, arrays, policy.normalize(jnp, arrays, obs[None]))
    np.testing.assert_allclose(again[0], out, atol=1e-6)


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="no image; mlp"):
        Convolution(NetworkConfig(kind="cnn"), ObsSpec((4,)))
    with pytest.raises(ConfigError, match="too small"):
        Convolution(NetworkConfig(kind="cnn"), ObsSpec((20, 84, 1), "uint8"))


def test_an_mlp_takes_images_too() -> None:
    policy = Policy(PolicySpec(ObsSpec((6, 5, 2), "uint8"), ActionSpec("discrete", (3,)), NetworkConfig(), False))
    arrays = policy.init(stream(0, "init"))
    obs = np.full((3, 6, 5, 2), 255, np.uint8)
    np.testing.assert_array_equal(policy.normalize(np, arrays, obs), np.ones(obs.shape, np.float32))
    assert policy.player(arrays)(obs, None, None, None)[0].shape == (3,)
