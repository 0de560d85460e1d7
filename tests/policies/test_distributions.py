"""Action distributions against SciPy, masks that are never overstepped, and NumPy against jax.numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from regatta.policies.distributions import (
    ActionSpec,
    Bernoulli,
    Categorical,
    Distribution,
    Gaussian,
    MultiCategorical,
    distribution,
)

DRAWS = 20_000


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def repeated(out: np.ndarray) -> np.ndarray:
    return np.broadcast_to(out, (DRAWS, *out.shape))


def some_mask(rng: np.random.Generator, *shape: int) -> np.ndarray:
    mask = rng.random(shape) < 0.5
    mask[..., 0] |= ~mask.any(-1)
    return mask


# -- against SciPy ----------------------------------------------------------------------------------------


def test_categorical_against_scipy(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(6, 4)) * 3
    actions = rng.integers(0, 4, 6)
    dist = Categorical(4)
    p = special.softmax(logits, -1)
    expected = [stats.rv_discrete(values=(range(4), row)).logpmf(a) for row, a in zip(p, actions, strict=True)]
    np.testing.assert_allclose(dist.log_prob(np, logits, actions), expected, rtol=1e-6)
    np.testing.assert_allclose(dist.entropy(np, logits), stats.entropy(p, axis=-1), rtol=1e-6)
    np.testing.assert_array_equal(dist.mode(logits), p.argmax(-1))


def test_multicategorical_against_scipy(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(5, 9))
    actions = np.stack([rng.integers(0, n, 5) for n in (2, 3, 4)], -1)
    dist = MultiCategorical((2, 3, 4))
    parts = [special.log_softmax(part, -1) for part in np.split(logits, [2, 5], -1)]
    expected = sum(part[np.arange(5), actions[:, i]] for i, part in enumerate(parts))
    np.testing.assert_allclose(dist.log_prob(np, logits, actions), expected, rtol=1e-6)
    entropy = sum(stats.entropy(np.exp(part), axis=-1) for part in parts)
    np.testing.assert_allclose(dist.entropy(np, logits), entropy, rtol=1e-6)
    np.testing.assert_array_equal(dist.mode(logits), np.stack([part.argmax(-1) for part in parts], -1))


def test_bernoulli_against_scipy(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(5, 3)) * 4
    actions = rng.integers(0, 2, (5, 3))
    dist = Bernoulli(3)
    exact = stats.bernoulli(special.expit(logits))
    np.testing.assert_allclose(dist.log_prob(np, logits, actions), exact.logpmf(actions).sum(-1), rtol=1e-6)
    np.testing.assert_allclose(dist.entropy(np, logits), exact.entropy().sum(-1), rtol=1e-6)
    np.testing.assert_array_equal(dist.mode(logits), special.expit(logits) > 0.5)


def test_gaussian_against_scipy(rng: np.random.Generator) -> None:
    mean, log_std = rng.normal(size=(5, 3)), rng.normal(size=3)
    actions = rng.normal(size=(5, 3))
    dist = Gaussian(3)
    exact = stats.norm(mean, np.exp(log_std))
    np.testing.assert_allclose(dist.log_prob(np, (mean, log_std), actions), exact.logpdf(actions).sum(-1), rtol=1e-6)
    np.testing.assert_allclose(dist.entropy(np, (mean, log_std)), exact.entropy().sum(-1), rtol=1e-6)
    np.testing.assert_array_equal(dist.mode((mean, log_std)), mean)


# -- sampling ---------------------------------------------------------------------------------------------


def test_categorical_frequencies(rng: np.random.Generator) -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0], np.float32)
    dist = Categorical(4)
    drawn = dist.sample(repeated(logits), dist.noise(rng, DRAWS))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / DRAWS, special.softmax(logits), atol=0.02)


def test_multicategorical_frequencies(rng: np.random.Generator) -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.0], np.float32)
    dist = MultiCategorical((2, 3))
    drawn = dist.sample(repeated(logits), dist.noise(rng, DRAWS))
    assert drawn.shape == (DRAWS, 2)
    joint = np.histogram2d(drawn[:, 0], drawn[:, 1], bins=(range(3), range(4)))[0] / DRAWS
    expected = np.outer(special.softmax(logits[:2]), special.softmax(logits[2:]))
    np.testing.assert_allclose(joint, expected, atol=0.02)


def test_bernoulli_frequencies(rng: np.random.Generator) -> None:
    logits = np.array([-2.0, 0.0, 1.0], np.float32)
    dist = Bernoulli(3)
    drawn = dist.sample(repeated(logits), dist.noise(rng, DRAWS))
    assert drawn.dtype == np.int32
    np.testing.assert_allclose(drawn.mean(0), special.expit(logits), atol=0.02)


def test_gaussian_moments(rng: np.random.Generator) -> None:
    mean, log_std = np.array([1.0, -3.0], np.float32), np.array([0.0, 1.0], np.float32)
    dist = Gaussian(2)
    drawn = dist.sample((repeated(mean), log_std), dist.noise(rng, DRAWS))
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.1)
    np.testing.assert_allclose(drawn.std(0), np.exp(log_std), rtol=0.05)


SPECS = [
    ActionSpec("discrete", (5,)),
    ActionSpec("multidiscrete", (2, 4, 3)),
    ActionSpec("multibinary", (4,)),
    ActionSpec("box", (3,)),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_shapes_and_noise_of_each_kind(spec: ActionSpec) -> None:
    dist = distribution(spec)
    out = np.zeros((7, spec.outputs), np.float32)
    given = (out, np.zeros(spec.outputs, np.float32)) if spec.kind == "box" else out
    noise = dist.noise(np.random.default_rng(1), 6, 7)
    assert noise.shape == (6, 7, spec.outputs)
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    np.testing.assert_array_equal(noise, dist.noise(np.random.default_rng(1), 6, 7))
    for actions in (dist.sample(given, noise[0]), dist.mode(given)):
        assert actions.shape == (7, *spec.shape)
        assert dist.log_prob(np, given, actions).shape == (7,)
    assert dist.entropy(np, given).shape == (7,)


# -- masks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logit_scale", [1.0, 50.0])
def test_masked_categorical_never_oversteps(rng: np.random.Generator, logit_scale: float) -> None:
    logits = (rng.normal(size=(DRAWS, 6)) * logit_scale).astype(np.float32)
    mask = some_mask(rng, DRAWS, 6)
    dist = Categorical(6)
    rows = np.arange(DRAWS)
    for actions in (dist.sample(logits, dist.noise(rng, DRAWS), mask), dist.mode(logits, mask)):
        assert mask[rows, actions].all()
        logp = dist.log_prob(np, logits, actions, mask)
        assert np.isfinite(logp).all()
        assert (logp <= 1e-6).all()
    entropy = dist.entropy(np, logits, mask)
    assert np.isfinite(entropy).all()
    assert (entropy > -1e-6).all()
    assert (entropy <= np.log(mask.sum(-1)) + 1e-5).all()
    every = np.stack([np.exp(dist.log_prob(np, logits, np.full(DRAWS, a), mask)) for a in range(6)], -1)
    assert (every[~mask] == 0).all()
    np.testing.assert_allclose(every.sum(-1), 1, rtol=1e-5)


def test_masked_categorical_is_the_softmax_of_what_is_legal(rng: np.random.Generator) -> None:
    logits = np.array([[1.0, 9.0, 2.0, 0.5]], np.float32)
    mask = np.array([[True, False, True, False]])
    dist = Categorical(4)
    p = special.softmax([1.0, 2.0])
    np.testing.assert_allclose(dist.log_prob(np, logits, np.array([2]), mask), np.log(p[1]), rtol=1e-6)
    np.testing.assert_allclose(dist.entropy(np, logits, mask), stats.entropy(p), rtol=1e-6)
    drawn = dist.sample(repeated(logits[0]), dist.noise(rng, DRAWS), repeated(mask[0]))
    np.testing.assert_allclose((drawn == 2).mean(), p[1], atol=0.02)


def test_a_single_legal_choice_is_certain(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(50, 4)).astype(np.float32)
    mask = np.eye(4, dtype=bool)[rng.integers(0, 4, 50)]
    dist = Categorical(4)
    actions = dist.sample(logits, dist.noise(rng, 50), mask)
    np.testing.assert_array_equal(actions, mask.argmax(-1))
    np.testing.assert_allclose(dist.log_prob(np, logits, actions, mask), 0, atol=1e-6)
    np.testing.assert_allclose(dist.entropy(np, logits, mask), 0, atol=1e-6)


def test_masked_multicategorical_never_oversteps(rng: np.random.Generator) -> None:
    sizes = (3, 2, 4)
    logits = (rng.normal(size=(DRAWS, 9)) * 5).astype(np.float32)
    mask = np.concatenate([some_mask(rng, DRAWS, n) for n in sizes], -1)
    dist = MultiCategorical(sizes)
    starts = np.array([0, 3, 5])
    for actions in (dist.sample(logits, dist.noise(rng, DRAWS), mask), dist.mode(logits, mask)):
        assert np.take_along_axis(mask, actions + starts, -1).all()
        assert np.isfinite(dist.log_prob(np, logits, actions, mask)).all()
    assert np.isfinite(dist.entropy(np, logits, mask)).all()


# -- both array libraries ---------------------------------------------------------------------------------

CASES: list[tuple[Distribution, int, tuple[int, ...], bool]] = [
    (Categorical(5), 5, (), False),
    (Categorical(5), 5, (), True),
    (MultiCategorical((2, 3)), 5, (2,), True),
    (Bernoulli(5), 5, (5,), False),
    (Gaussian(5), 5, (5,), False),
]


@pytest.mark.parametrize(("dist", "outputs", "shape", "masked"), CASES)
def test_numpy_and_jax_agree(
    rng: np.random.Generator, dist: Distribution, outputs: int, shape: tuple[int, ...], masked: bool
) -> None:
    logits = rng.normal(size=(8, outputs)).astype(np.float32)
    out = (logits, np.linspace(-1, 1, outputs, dtype=np.float32)) if isinstance(dist, Gaussian) else logits
    mask = np.concatenate([some_mask(rng, 8, 2), some_mask(rng, 8, outputs - 2)], -1) if masked else None
    actions = dist.sample(out, dist.noise(rng, 8), mask)
    assert actions.shape == (8, *shape)
    for name, inputs in (("log_prob", (out, actions, mask)), ("entropy", (out, mask))):
        ours, theirs = (getattr(dist, name)(xp, *inputs) for xp in (np, jnp))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
