"""Action distributions, one per kind of action space, as pure functions over NumPy or jax.numpy.

Each takes `out`, what the policy network gave: logits, or for Gaussian a pair (mean, log_std). Noise for a whole
chunk is drawn at once by `noise` and used step by step, so sampling a step costs two array operations.
A mask, where the environment gives one, holds True for each legal choice.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from regatta.types import Array

LOG_STD_RANGE = (-20.0, 2.0)  # of the deviations a network gives (Haarnoja et al. 2018)
HALF_LOG_2PI = 0.9189385332046727
LOG_2 = 0.6931471805599453
ILLEGAL = -1e9  # finite, so that gradients and entropies stay finite; exp() of it is exactly zero


class ActionSpec(msgspec.Struct, frozen=True):
    """An action space in plain words, so that this layer needs no simulator library.

    `sizes`: (n,) for discrete, the choices per dimension for multidiscrete, (dimensions,) for the others.
    """

    kind: Literal["discrete", "multidiscrete", "multibinary", "box"]
    sizes: tuple[int, ...]
    masked: bool = False

    @property
    def outputs(self) -> int:
        """How many numbers the policy network must give."""
        return sum(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action as it is stored."""
        return () if self.kind == "discrete" else (len(self.sizes) if self.kind == "multidiscrete" else self.sizes[0],)

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "box" else "int32"


class Distribution(Protocol):
    def noise(self, rng: np.random.Generator, *shape: int) -> Array: ...
    def sample(self, out: Any, noise: Any, mask: Any = None) -> Any: ...
    def mode(self, out: Any, mask: Any = None) -> Any: ...
    def log_prob(self, xp: Any, out: Any, action: Any, mask: Any = None) -> Any: ...
    def entropy(self, xp: Any, out: Any, mask: Any = None) -> Any: ...


def log_softmax(xp: Any, logits: Any) -> Any:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(-1, keepdims=True))


def gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """argmax(logits + gumbel noise) is a sample of softmax(logits) (Gumbel 1954)."""
    uniform = rng.random(shape, dtype=np.float32)
    return -np.log(-np.log(np.clip(uniform, 1e-20, 1 - 1e-7)))


class Categorical:
    def __init__(self, size: int) -> None:
        self.size = size

    def noise(self, rng: np.random.Generator, *shape: int) -> Array:
        return gumbel(rng, (*shape, self.size))

    def sample(self, out: Any, noise: Any, mask: Any = None) -> Any:
        scores = out + noise
        return (scores if mask is None else np.where(mask, scores, -np.inf)).argmax(-1)

    def mode(self, out: Any, mask: Any = None) -> Any:
        return (out if mask is None else np.where(mask, out, -np.inf)).argmax(-1)

    def _log_probs(self, xp: Any, out: Any, mask: Any) -> Any:
        return log_softmax(xp, out if mask is None else xp.where(mask, out, ILLEGAL))

    def log_prob(self, xp: Any, out: Any, action: Any, mask: Any = None) -> Any:
        chosen = action[..., None] == xp.arange(self.size)  # a product, not a gather: its gradient is no scatter
        return xp.where(chosen, self._log_probs(xp, out, mask), 0).sum(-1)

    def entropy(self, xp: Any, out: Any, mask: Any = None) -> Any:
        logp = self._log_probs(xp, out, mask)
        return -(xp.exp(logp) * logp).sum(-1)

    def kl(self, xp: Any, old: Any, new: Any, mask: Any = None) -> Any:
        logp = self._log_probs(xp, old, mask)
        return (xp.exp(logp) * (logp - self._log_probs(xp, new, mask))).sum(-1)


class MultiCategorical:
    """Independent categoricals side by side; logits and masks are concatenated."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.parts = [Categorical(n) for n in sizes]
        bounds = np.cumsum((0, *sizes))
        self.slices = [slice(int(a), int(b)) for a, b in itertools.pairwise(bounds)]

    def noise(self, rng: np.random.Generator, *shape: int) -> Array:
        return gumbel(rng, (*shape, self.slices[-1].stop))

    def _each(self, *arrays: Any) -> Any:
        for part, cut in zip(self.parts, self.slices, strict=True):
            yield part, *(None if array is None else array[..., cut] for array in arrays)

    def sample(self, out: Any, noise: Any, mask: Any = None) -> Any:
        return np.stack([part.sample(o, n, m) for part, o, n, m in self._each(out, noise, mask)], -1)

    def mode(self, out: Any, mask: Any = None) -> Any:
        return np.stack([part.mode(o, m) for part, o, m in self._each(out, mask)], -1)

    def log_prob(self, xp: Any, out: Any, action: Any, mask: Any = None) -> Any:
        return sum(part.log_prob(xp, o, action[..., i], m) for i, (part, o, m) in enumerate(self._each(out, mask)))

    def entropy(self, xp: Any, out: Any, mask: Any = None) -> Any:
        return sum(part.entropy(xp, o, m) for part, o, m in self._each(out, mask))

    def kl(self, xp: Any, old: Any, new: Any, mask: Any = None) -> Any:
        return sum(part.kl(xp, o, n, m) for part, o, n, m in self._each(old, new, mask))


class Bernoulli:
    """Independent yes/no choices, one logit each."""

    def __init__(self, size: int) -> None:
        self.size = size

    def noise(self, rng: np.random.Generator, *shape: int) -> Array:
        uniform = np.clip(rng.random((*shape, self.size), dtype=np.float32), 1e-7, 1 - 1e-7)
        return np.log(uniform) - np.log1p(-uniform)  # logistic: logit + noise > 0 with probability sigmoid(logit)

    def sample(self, out: Any, noise: Any, mask: Any = None) -> Any:
        return ((out + noise) > 0).astype(np.int32)

    def mode(self, out: Any, mask: Any = None) -> Any:
        return (out > 0).astype(np.int32)

    def log_prob(self, xp: Any, out: Any, action: Any, mask: Any = None) -> Any:
        return -xp.logaddexp(0.0, xp.where(action > 0, -out, out)).sum(-1)

    def entropy(self, xp: Any, out: Any, mask: Any = None) -> Any:
        p = 1 / (1 + xp.exp(-out))
        return (xp.logaddexp(0.0, out) - out * p).sum(-1)

    def kl(self, xp: Any, old: Any, new: Any, mask: Any = None) -> Any:
        p = 1 / (1 + xp.exp(-old))
        return (p * (old - new) + xp.logaddexp(0.0, new) - xp.logaddexp(0.0, old)).sum(-1)


class Gaussian:
    """A diagonal Gaussian. Actions are stored as drawn; the environment gets them clipped to its bounds."""

    def __init__(self, size: int) -> None:
        self.size = size

    def noise(self, rng: np.random.Generator, *shape: int) -> Array:
        return rng.standard_normal((*shape, self.size), dtype=np.float32)

    def sample(self, out: Any, noise: Any, mask: Any = None) -> Any:
        mean, log_std = out
        return mean + np.exp(log_std) * noise

    def mode(self, out: Any, mask: Any = None) -> Any:
        return out[0]

    def log_prob(self, xp: Any, out: Any, action: Any, mask: Any = None) -> Any:
        mean, log_std = out
        z = (action - mean) * xp.exp(-log_std)
        return (-0.5 * z * z - log_std - HALF_LOG_2PI).sum(-1)

    def entropy(self, xp: Any, out: Any, mask: Any = None) -> Any:
        mean, log_std = out
        return xp.broadcast_to((log_std + 0.5 + HALF_LOG_2PI).sum(-1), mean.shape[:-1])

    def kl(self, xp: Any, old: Any, new: Any, mask: Any = None) -> Any:
        (mean, log_std), (new_mean, new_log_std) = old, new
        shift = (mean - new_mean) * xp.exp(-new_log_std)
        shrunk = log_std - new_log_std
        return (0.5 * (xp.exp(2 * shrunk) + shift * shift - 1) - shrunk).sum(-1)


class Squashed:
    """A Gaussian through tanh (Haarnoja et al. 2018). Actions lie in (-1, 1), to be stretched to the bounds."""

    def __init__(self, size: int) -> None:
        self.size = size

    def noise(self, rng: np.random.Generator, *shape: int) -> Array:
        return rng.standard_normal((*shape, self.size), dtype=np.float32)

    def sample(self, out: Any, noise: Any, mask: Any = None) -> Any:
        mean, log_std = out
        return np.tanh(mean + np.exp(log_std) * noise)

    def mode(self, out: Any, mask: Any = None) -> Any:
        return np.tanh(out[0])

    def log_prob(self, xp: Any, out: Any, action: Any, mask: Any = None) -> Any:
        return self._density(xp, out, xp.arctanh(xp.clip(action, -1 + 1e-6, 1 - 1e-6)))

    def entropy(self, xp: Any, out: Any, mask: Any = None) -> Any:
        """Of the Gaussian before it is squashed; the squashed one has no closed form."""
        return (out[1] + 0.5 + HALF_LOG_2PI).sum(-1)

    def sample_and_log_prob(self, xp: Any, out: Any, noise: Any) -> tuple[Any, Any]:
        """Differentiable, and without the loss of digits of an arctanh."""
        mean, log_std = out
        raw = mean + xp.exp(log_std) * noise
        return xp.tanh(raw), self._density(xp, out, raw)

    def _density(self, xp: Any, out: Any, raw: Any) -> Any:
        mean, log_std = out
        z = (raw - mean) * xp.exp(-log_std)
        gaussian = -0.5 * z * z - log_std - HALF_LOG_2PI
        # log(1 - tanh(u)^2), written so that it stays finite for large u
        slope = 2 * (LOG_2 - raw - xp.logaddexp(0.0, -2 * raw))
        return (gaussian - slope).sum(-1)


def distribution(spec: ActionSpec, *, squashed: bool = False) -> Distribution:
    if squashed:
        return Squashed(spec.sizes[0])
    if spec.kind == "discrete":
        return Categorical(spec.sizes[0])
    if spec.kind == "multidiscrete":
        return MultiCategorical(spec.sizes)
    if spec.kind == "multibinary":
        return Bernoulli(spec.sizes[0])
    return Gaussian(spec.sizes[0])
