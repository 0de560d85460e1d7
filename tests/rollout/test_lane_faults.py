"""Environments that fail: replaced, their steps marked, and nothing that is no number gets any further."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rigs import Chunk, Rig
from test_lane import counting, same

from regatta.errors import EnvError
from regatta.rollout.envs import EnvConfig
from regatta.rollout.lane import MAX_FAULTS_PER_ENV
from regatta.rollout.spaces import BadObservation
from regatta.rollout.watch import StepTimeout

Build = Callable[..., Rig]

hasty = pytest.mark.parametrize("timeout_s", [0.5])
SANE = counting()


def troubled(trouble: str, at: int, which: int | None = 1, **ends: int) -> EnvConfig:
    return EnvConfig(id="worlds:Troubled", kwargs={"trouble": trouble, "at": at, "which": which, **ends}, lane_envs=3)


def check_clean(chunk: Chunk) -> None:
    arrays, episodes, _ = chunk
    for name in ("obs", "last_obs", "rewards", "final_obs", "actions"):
        assert np.isfinite(arrays[name]).all(), name
    assert np.isfinite([e.score for e in episodes]).all()
    assert not arrays["rewards"][~arrays["valid"]].any()
    assert arrays["truncated"][~arrays["valid"]].all()
    assert not arrays["terminated"][~arrays["valid"]].any()
    finals = {tuple(at) for at in arrays["final_index"].tolist()}
    assert finals == {tuple(at) for at in np.argwhere(arrays["truncated"] & arrays["valid"]).tolist()}


def others(arrays: dict[str, Any], env: int) -> list[Any]:
    return [np.delete(arrays[name], env, 1).tolist() for name in ("obs", "rewards", "valid", "truncated")]


AT_ONCE = ["raise", "long obs", "object obs", "text obs", "complex obs", "no obs", "text reward", "no reward"]


@pytest.mark.parametrize("trouble", [*AT_ONCE, "list reward"])
def test_a_failing_environment_is_replaced(rig: Build, trouble: str) -> None:
    chunk = rig(troubled(trouble, 5), SANE).collect(steps=12)
    arrays, _, [fault] = chunk
    check_clean(chunk)
    assert np.argwhere(~arrays["valid"]).tolist() == [[4, 1]]
    assert np.argwhere(arrays["truncated"]).tolist() == [[4, 1]]
    assert (fault.lane, fault.env) == (0, 1)
    assert "Traceback" in fault.text
    assert arrays["obs"][:, 1, 1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
    assert arrays["obs"][5, 1, 0] != arrays["obs"][4, 1, 0], "a new environment begins a new episode"
    untouched, _, _ = rig(counting(lane_envs=3)).collect(steps=12)
    assert others(arrays, 1) == others(untouched, 1)


def test_the_traceback_is_the_environments_own(rig: Build) -> None:
    _, _, [fault] = rig(troubled("raise", 5), SANE).collect()
    assert 'raise RuntimeError("the wheel came off")' in fault.text
    assert "worlds.py" in fault.text
    assert fault.text.rstrip().endswith("RuntimeError: the wheel came off")


def test_what_a_step_returned_is_in_the_message(rig: Build) -> None:
    _, _, [fault] = rig(troubled("long obs", 5), SANE).collect()
    assert "BadObservation: observation has shape (3,), its space says (2,)" in fault.text


def test_a_fault_is_replaced_alike_everywhere(rig: Build) -> None:
    config = troubled("long obs", 5)
    assert same(rig(config, SANE).collect(steps=12), rig(config, SANE).collect(steps=12))


@pytest.mark.parametrize("ends", [{"end_at": 4}, {"cut_at": 4}])
def test_a_reset_that_fails(rig: Build, ends: dict[str, int]) -> None:
    chunk = rig(EnvConfig(id="worlds:SecondReset", kwargs=ends, lane_envs=2), SANE).collect(steps=12)
    arrays, episodes, [fault] = chunk
    assert "RuntimeError: reset is stuck" in fault.text
    assert np.argwhere(~arrays["valid"]).tolist() == [[3, 0]]
    assert np.isfinite(arrays["obs"]).all()
    assert arrays["obs"][:, 0, 1].tolist() == [0, 1, 2, 3] * 3
    assert [(e.env, e.step, e.score) for e in episodes if e.env == 0] == [(0, t, 10.0) for t in (3, 7, 11)]


def test_the_first_reset_fails(rig: Build) -> None:
    with pytest.raises(RuntimeError, match="the wheel came off"):
        rig(troubled("raise", 0), SANE).collect()
    with pytest.raises(BadObservation, match="reset returned a non-finite observation"):
        rig(troubled("nan obs", 0), SANE).collect()


@pytest.mark.parametrize("trouble", ["raise", "object obs", "text reward"])
def test_what_always_fails_is_an_error(rig: Build, trouble: str) -> None:
    built = rig(troubled(trouble, 1, None), SANE)
    with pytest.raises(EnvError, match="lane 0: environments fail again and again; the last:\nTraceback"):
        built.collect(steps=50)
    assert built.lane.stands_at is None


def test_some_bad_luck_is_tolerated(rig: Build) -> None:
    each = MAX_FAULTS_PER_ENV * 4
    _, _, faults = rig(troubled("raise", 4, None), SANE).collect(steps=each)
    assert len(faults) == 3 * MAX_FAULTS_PER_ENV
    with pytest.raises(EnvError, match="the wheel came off"):
        rig(troubled("raise", 4, None), SANE).collect(steps=each + 4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("trouble", ["nan obs", "inf obs", "nan reward", "inf reward"])
@pytest.mark.parametrize("ends", [{}, {"end_at": 5}, {"cut_at": 5}, {"end_at": 7}])
def test_from_a_non_finite_number_on_nothing_counts(rig: Build, trouble: str, ends: dict[str, int]) -> None:
    if "obs" in trouble and ends == {"end_at": 5}:
        ends = {"end_at": 6}
    built = rig(troubled(trouble, 5, **ends), SANE)
    chunk = built.collect(0, 12)
    arrays, episodes, [fault] = chunk
    check_clean(chunk)
    assert fault.env == 1
    assert f"non-finite {trouble.split()[1].replace('obs', 'observation')} at step 4" in fault.text
    assert arrays["valid"][:4].all()
    assert not arrays["valid"][4:, 1].any()
    assert [e for e in episodes if e.env == 1] == []
    untouched = rig(counting(lane_envs=3, **ends)).collect(0, 12)
    assert others(arrays, 1) == others(untouched[0], 1)
    assert [e for e in episodes if e.env != 1] == [e for e in untouched[1] if e.env != 1]
    assert arrays["last_obs"][1, 1] == 0

    after = built.collect(1, 4)
    check_clean(after)
    assert after[0]["valid"].all()
    assert after[0]["obs"][:, 1, 1].tolist() == [0, 1, 2, 3]
    assert after[2] == []


def test_episodes_before_a_non_finite_number_count(rig: Build) -> None:
    chunk = rig(troubled("nan reward", 8, cut_at=3), SANE).collect(steps=12)
    check_clean(chunk)
    assert [e.step for e in chunk[1] if e.env == 0] == [2, 5, 8, 11]
    assert [e.step for e in chunk[1] if e.env == 1] == [2, 5]
    assert chunk[0]["valid"][:, 1].tolist() == [True] * 7 + [False] * 5


def test_what_an_episode_ends_on_is_not_looked_at(rig: Build) -> None:
    """Simulators that diverge end the episode with what they have; nothing is computed from it."""
    chunk = rig(troubled("nan obs", 5, end_at=5), SANE).collect(steps=12)
    check_clean(chunk)
    assert chunk[2] == []
    assert chunk[0]["terminated"].sum() == 6


@pytest.mark.parametrize("trouble", ["nan obs", "nan reward"])
def test_non_finite_every_time(rig: Build, trouble: str) -> None:
    built = rig(troubled(trouble, 2, None), SANE)
    for iteration in range(3):
        chunk = built.collect(iteration, 8)
        check_clean(chunk)
        assert len(chunk[2]) == 3
        assert chunk[0]["valid"].sum() == 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("trouble", ["nan obs", "inf obs"])
def test_actions_that_answer_a_non_finite_observation_are_no_poison(rig: Build, trouble: str) -> None:
    kwargs = {"trouble": trouble, "at": 5, "which": 1}
    config = EnvConfig(id="worlds:Continuous", kwargs=kwargs, lane_envs=2)
    check_clean(rig(config, EnvConfig(id="worlds:Continuous")).collect(steps=12))


@pytest.mark.parametrize(
    ("bad", "words"),
    [([1, 1, 1], "3 entries"), ([0, 0], "no action at all"), (None, "and none now")],
)
def test_bad_masks_are_faults(rig: Build, bad: list[int] | None, words: str) -> None:
    config = EnvConfig(id="worlds:BadMask", kwargs={"bad": bad}, lane_envs=2)
    chunk = rig(config).collect(steps=6)
    arrays, _, [fault] = chunk
    check_clean(chunk)
    assert words in fault.text
    assert np.argwhere(~arrays["valid"]).tolist() == [[1, 0]]
    assert arrays["mask"][:, 0].tolist() == [[1, 1], [1, 0], [1, 1], [1, 0], [1, 0], [1, 0]]


@hasty
def test_a_hanging_step_is_interrupted(rig: Build) -> None:
    started = time.monotonic()
    chunk = rig(troubled("sleep", 5), SANE).collect(steps=12)
    assert time.monotonic() - started < 10
    arrays, _, [fault] = chunk
    check_clean(chunk)
    assert np.argwhere(~arrays["valid"]).tolist() == [[4, 1]]
    assert "StepTimeout: no answer for 0.5 s (env.step_timeout_s)" in fault.text
    assert "time.sleep(30)" in fault.text


@hasty
def test_a_hanging_first_reset_is_interrupted(rig: Build) -> None:
    with pytest.raises(StepTimeout):
        rig(troubled("sleep", 0), SANE).collect()


@hasty
def test_several_hang_and_the_slow_do_not_count_together(rig: Build) -> None:
    chunk = rig(troubled("sleep", 2, None), SANE).collect(steps=3)
    check_clean(chunk)
    assert len(chunk[2]) == 3


def test_environments_that_cannot_close(rig: Build) -> None:
    built = rig(troubled("close", -1, None), SANE)
    check_clean(built.collect())
    built.lane.close()


@hasty
def test_a_replacement_that_hangs_is_interrupted_too(rig: Build) -> None:
    with pytest.raises(StepTimeout):
        rig(EnvConfig(id="worlds:WorseReplacement", lane_envs=3), SANE).collect()
