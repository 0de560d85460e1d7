from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest
import worlds
from rigs import Rig

from regatta.policies.networks import NetworkConfig
from regatta.policies.policy import Policy, PolicySpec
from regatta.rollout.envs import EnvConfig, probe
from regatta.rollout.watch import Watch


@pytest.fixture
def timeout_s() -> float:
    return 60.0


@pytest.fixture
def watch(timeout_s: float) -> Iterator[Watch]:
    watch = Watch(timeout_s, lambda text: print(text, file=sys.stderr))
    yield watch
    watch.close()


@pytest.fixture
def rig(watch: Watch) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(config: EnvConfig, like: EnvConfig | None = None, *, number: int = 0, seed: int = 7) -> Rig:
        """`like` is probed instead of an environment that would not survive it."""
        found = probe(like or config)
        policy = Policy(PolicySpec(found.obs, found.action, NetworkConfig(sizes=(8,)), False))
        worlds.Troubled.made = worlds.SecondReset.made = worlds.BadMask.made = 0
        rigs.append(Rig(config, policy, watch, number, seed))
        return rigs[-1]

    yield build
    for built in rigs:
        built.lane.close()


@pytest.fixture
def need() -> Callable[[str, str], None]:
    return _need


def _need(module: str, extra: str) -> None:
    """Skip, or under CI fail, a test that cannot run here."""
    if find_spec(module) is None:
        report = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        report(f"needs {module}: pip install 'regatta-rl[{extra}]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Box2D's SWIG types warn on import, and crash where that is an error
        import_module(module)
