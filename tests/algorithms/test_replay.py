"""The replay memory against a plain list of what happened, and against numbers worked out by hand."""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from regatta.algorithms.replay import Replay, available_bytes, refuse_too_large
from regatta.errors import CheckpointError, ConfigError
from regatta.types import Arrays

ACTIONS = 5


@dataclass
class Step:
    """One transition of the list; observations are numbers that occur once."""

    obs: int
    after: int | None  # None: terminated
    valid: bool
    cut: bool
    followed: bool = False  # the step after it, in the same episode, has come


def picture(number: int) -> np.ndarray:
    """An observation that tells its number, as an image of bytes."""
    return np.array([number]).astype("<u4").view(np.uint8).reshape(2, 2)


def legal(number: int) -> np.ndarray:
    return np.random.default_rng(number).random(ACTIONS) < 0.5


@dataclass
class World:
    """Lanes of environments in which episodes end, fail and are seeded anew at random, and the list of it all."""

    rng: np.random.Generator
    lanes: int
    envs: int
    images: bool
    masked: bool
    failing: float = 0.1
    numbers: int = 0
    now: dict[tuple[int, int], int] = field(default_factory=dict)
    steps: dict[tuple[int, int], list[Step]] = field(default_factory=dict)

    def new(self) -> int:
        self.numbers += 1
        return self.numbers

    def show(self, numbers: Iterable[int]) -> np.ndarray:
        rows = [picture(n) if self.images else np.array([n, -n], np.float32) for n in numbers]
        empty = np.zeros((0, 2, 2), np.uint8) if self.images else np.zeros((0, 2), np.float32)
        return np.stack(rows) if rows else empty

    def chunk(self, lane: int, count: int) -> Arrays:
        fresh = self.rng.random() < 0.3
        flags = {name: np.zeros((count, self.envs), bool) for name in ("terminated", "truncated")}
        flags["valid"] = np.ones((count, self.envs), bool)
        seen = np.zeros((count + 1, self.envs), int)
        finals: list[tuple[int, int, int]] = []
        for env in range(self.envs):
            past = self.steps.setdefault((lane, env), [])
            now = self.now.get((lane, env))
            if now is None or fresh:
                now = self.new()
            elif past:
                past[-1].followed = past[-1].valid and not past[-1].cut and past[-1].after is not None
            for t in range(count):
                seen[t, env] = now
                kind = self.rng.choice(["on", "end", "cut", "fault"], p=[0.8 - self.failing, 0.1, 0.1, self.failing])
                after = self.new()
                past.append(Step(now, None if kind == "end" else after, kind != "fault", kind in ("cut", "fault")))
                flags["terminated"][t, env] = kind == "end"
                flags["truncated"][t, env] = kind in ("cut", "fault")
                flags["valid"][t, env] = kind != "fault"
                if kind == "cut" or (kind == "fault" and self.rng.random() < 0.5):  # a reset after a cut may fail too
                    finals.append((t, env, after))
                past[-1].followed = kind == "on" and t + 1 < count
                now = after if kind == "on" else self.new()
            seen[count, env] = self.now[lane, env] = now
        self.rng.shuffle(finals)
        arrays = {
            "obs": np.stack([self.show(row) for row in seen[:-1]]),
            "last_obs": self.show(seen[-1]),
            "actions": seen[:-1, :, None].astype(np.int64) * [1, 10],
            "rewards": seen[:-1].astype(np.float32) / 2,
            "final_obs": self.show(number for _, _, number in finals),
            "final_index": np.array([final[:2] for final in finals], np.int32).reshape(-1, 2),
            **flags,
        }
        if self.masked:
            arrays["mask"] = np.stack([legal(n) for n in seen[:-1].ravel()]).reshape(count, self.envs, ACTIONS)
        return arrays

    def drawable(self, kept: int) -> dict[int, Step]:
        newest = [step for past in self.steps.values() for step in past[-kept:]]
        return {s.obs: s for s in newest if s.valid and (not self.masked or s.after is None or s.followed)}

    def replay(self, kept: int) -> Replay:
        shape, dtype = ((2, 2), np.uint8) if self.images else ((2,), np.float32)
        columns = self.lanes * self.envs
        capacity = kept * columns + columns - 1  # what does not make a step for every environment is not used
        mask = ACTIONS if self.masked else None
        return Replay(capacity, self.lanes, self.envs, shape, dtype, (2,), np.int64, mask)

    def number(self, obs: np.ndarray) -> int:
        if not self.images:
            assert obs[1] == -obs[0]
        return int(obs.reshape(-1).view("<u4")[0] if self.images else obs[0])


def worlds(seed: int) -> tuple[World, int]:
    rng = np.random.default_rng(seed)
    world = World(rng, int(rng.integers(1, 4)), int(rng.integers(1, 4)), bool(seed & 1), bool(seed & 2))
    return world, int(rng.choice([1, 2, 3, 7, 33, 70, 200]))


def compare(world: World, replay: Replay, kept: int) -> None:
    """Everything that may be drawn is drawn, nothing else, and each with what belongs to it."""
    expected = world.drawable(kept)
    assert len(replay) == len(expected)
    if not expected:
        return
    batch = replay.sample(world.rng, 2, 15 * len(expected))
    names = {"obs", "next_obs", "actions", "rewards", "terminated"}
    assert batch.keys() == (names | {"mask", "next_mask"} if world.masked else names)
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()}
    drawn = set()
    for i, obs in enumerate(flat["obs"]):
        number = world.number(obs)
        step = expected[number]
        if number in drawn:
            continue
        drawn.add(number)
        assert flat["actions"][i].tolist() == [number, 10 * number]
        assert flat["rewards"][i] == np.float32(number) / 2
        assert flat["terminated"][i] == (step.after is None)
        if world.masked:
            np.testing.assert_array_equal(flat["mask"][i], legal(number))
        if step.after is not None:
            assert world.number(flat["next_obs"][i]) == step.after
            if world.masked:
                np.testing.assert_array_equal(flat["next_mask"][i], legal(step.after))
    assert len(drawn) >= 0.99 * len(expected)


@pytest.mark.parametrize("seed", range(24))
def test_it_holds_what_a_list_would_hold(seed: int) -> None:
    world, kept = worlds(seed)
    replay = world.replay(kept)
    speeds = world.rng.random(world.lanes) + 0.05
    for _ in range(60):
        lane = int(world.rng.choice(world.lanes, p=speeds / speeds.sum()))
        replay.add(lane, world.chunk(lane, int(world.rng.choice([1, 2, 3, 10, 45]))))
        if world.rng.random() < 0.3:
            compare(world, replay, kept)
    compare(world, replay, kept)


@pytest.mark.parametrize("seed", range(16))
def test_saved_and_loaded_it_draws_the_same(seed: int) -> None:
    world, kept = worlds(seed)
    replay = world.replay(kept)
    stored: dict[str, dict[str, bytes]] = {}  # every block ever saved
    for _ in range(40):
        lane = int(world.rng.integers(world.lanes))
        chunk = world.chunk(lane, int(world.rng.choice([1, 2, 9, 40])))
        replay.add(lane, chunk)
        if world.rng.random() < 0.5:
            continue
        blocks = replay.blocks()
        for name, arrays in blocks.items():
            content = {key: array.tobytes() for key, array in arrays.items()}
            assert stored.setdefault(name, content) == content
        merged = replay.state()
        merged |= {f"{name}/{key}": array.copy() for name, arrays in blocks.items() for key, array in arrays.items()}
        again = world.replay(kept)
        if world.rng.random() < 0.5:
            again.add(0, chunk)  # what was there before is forgotten
        again.load(merged)
        assert not any(name.startswith(("lane-", "tail-")) for name in merged)
        assert len(again) == len(replay)
        assert again.blocks().keys() == blocks.keys()
        if len(replay):
            draw_seed = int(world.rng.integers(2**31))
            one, two = (memory.sample(np.random.default_rng(draw_seed), 5, 40) for memory in (replay, again))
            assert {name: array.tobytes() for name, array in one.items()} == {n: a.tobytes() for n, a in two.items()}
        if world.rng.random() < 0.5:
            replay = again  # and goes on like it
    compare(world, replay, kept)
    assert kept < 3 or world.numbers < 200 or stored


def chunk_of(
    numbers: list[int], last: int, *, terminated: tuple[int, ...] = (), cut: dict[int, int] | None = None
) -> Arrays:
    """One environment's steps; `cut`: the final observation after that step."""
    count, cut = len(numbers), cut or {}
    flags = {name: np.zeros((count, 1), bool) for name in ("terminated", "truncated")}
    flags["terminated"][list(terminated)] = True
    flags["truncated"][list(cut)] = True
    return {
        "obs": np.array(numbers, np.float32)[:, None, None],
        "last_obs": np.array([[last]], np.float32),
        "actions": np.zeros((count, 1), np.int64),
        "rewards": np.zeros((count, 1), np.float32),
        "valid": np.ones((count, 1), bool),
        "final_obs": np.array(list(cut.values()), np.float32)[:, None],
        "final_index": np.array([(t, 0) for t in cut], np.int32).reshape(-1, 2),
        **flags,
    }


def small(capacity: int, lanes: int = 1, mask_size: int | None = None) -> Replay:
    return Replay(capacity, lanes, 1, (1,), np.float32, (), np.int64, mask_size)


def pairs(replay: Replay) -> set[tuple[int, int]]:
    batch = replay.sample(np.random.default_rng(0), 4, 100)
    obs, following = (batch[name].ravel().astype(int).tolist() for name in ("obs", "next_obs"))
    return set(zip(obs, following, strict=True))


def test_by_hand() -> None:
    replay = small(4)
    replay.add(0, chunk_of([1, 2], 3))
    assert pairs(replay) == {(1, 2), (2, 3)}
    replay.add(0, chunk_of([3, 10], 11, cut={0: 9}))  # 3 was cut short at 9; 10 begins an episode
    assert pairs(replay) == {(1, 2), (2, 3), (3, 9), (10, 11)}
    replay.add(0, chunk_of([20], 21))  # seeded anew: 10 still led to 11
    assert pairs(replay) == {(2, 3), (3, 9), (10, 11), (20, 21)}
    replay.add(0, chunk_of([21, 22, 23, 24, 25], 26))  # more than it keeps
    assert pairs(replay) == {(22, 23), (23, 24), (24, 25), (25, 26)}


def test_the_next_mask_has_to_be_there() -> None:
    replay = small(10, mask_size=2)
    masks = np.array([[True, False], [False, True], [True, True], [False, True]])
    replay.add(0, chunk_of([1, 2], 3) | {"mask": masks[:2, None]})
    assert pairs(replay) == {(1, 2)}  # the mask at 3 is not known yet
    replay.add(0, chunk_of([3, 5], 6, terminated=(1,), cut={0: 4}) | {"mask": masks[2:, None]})
    batch = replay.sample(np.random.default_rng(0), 1, 200)
    drawn = {int(o): m.tolist() for o, m in zip(batch["obs"].ravel(), batch["next_mask"][0], strict=True)}
    assert drawn.keys() == {1, 2, 5}  # 3 led to 4, whose mask never comes; 5 was the end
    assert (drawn[1], drawn[2]) == ([False, True], [True, True])
    replay.add(0, chunk_of([30], 31) | {"mask": masks[:1, None]})
    replay.add(0, chunk_of([40], 41) | {"mask": masks[:1, None]})  # seeded anew: the mask at 31 never comes
    assert {obs for obs, _ in pairs(replay)} == {1, 2, 5}


def test_a_truncation_without_its_final_observation_is_not_drawn() -> None:
    replay = small(10)
    chunk = chunk_of([1, 2, 3], 4, cut={1: 9})
    replay.add(0, chunk | {"final_obs": chunk["final_obs"][:0], "final_index": chunk["final_index"][:0]})
    assert pairs(replay) == {(1, 2), (3, 4)}


def test_the_table_of_final_observations_grows() -> None:
    replay = small(1000)
    for i in range(30):  # every step is cut short: as if both observations were stored
        first = 1000 * i
        replay.add(0, chunk_of(list(range(first, first + 100)), 0, cut={t: 500_000 + first + t for t in range(100)}))
    batch = replay.sample(np.random.default_rng(0), 10, 1000)
    np.testing.assert_array_equal(batch["next_obs"], batch["obs"] + 500_000)
    assert batch["obs"].min() == 20_000


def test_room_for_final_observations_is_used_again() -> None:
    replay = small(320)
    tracemalloc.start()
    for i in range(200):  # 20,000 final observations in all, 320 at a time
        replay.add(0, chunk_of([i] * 100, 0, cut=dict.fromkeys(range(100), i)))
        if i == 20:
            before, _ = tracemalloc.get_traced_memory()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 20_000


def test_terminated_and_truncated_at_once_is_terminated() -> None:
    replay = small(10)
    replay.add(0, chunk_of([1, 2, 3], 4, terminated=(1,), cut={1: 9}))
    assert len(replay) == 3
    replay = small(10, mask_size=1)
    replay.add(0, chunk_of([1, 2, 3], 4, terminated=(1,), cut={1: 9}) | {"mask": np.ones((3, 1, 1), bool)})
    assert len(replay) == 2  # all but the last


@pytest.mark.parametrize("share", [1.0, 0.8, 0.1])
def test_drawing_is_uniform(share: float) -> None:
    rng = np.random.default_rng(0)
    replay = Replay(2000, 2, 2, (1,), np.float32, (), np.int64)
    count = 0
    for lane, steps in ((0, 700), (1, 90), (1, 210)):
        obs = np.arange(count, count + 2 * steps, dtype=np.float32).reshape(steps, 2, 1)
        count += 2 * steps
        never = np.zeros((steps, 2), bool)
        replay.add(
            lane,
            {
                "obs": obs,
                "last_obs": obs[0],
                "actions": np.zeros((steps, 2), np.int64),
                "rewards": np.zeros((steps, 2), np.float32),
                "terminated": never,
                "truncated": never,
                "valid": rng.random((steps, 2)) < share,
                "final_obs": obs[0, :0],
                "final_index": np.zeros((0, 2), np.int32),
            },
        )
    each = 100
    batch = replay.sample(rng, each, len(replay))
    hits = np.bincount(batch["obs"].ravel().astype(int), minlength=count)
    assert np.count_nonzero(hits) == len(replay)
    chi_square = ((hits[hits > 0] - each) ** 2 / each).sum()
    freedom = len(replay) - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_memory_can_be_used_again() -> None:
    replay = small(50)
    replay.add(0, chunk_of(list(range(40)), 40, cut={7: 99}))
    first = replay.sample(np.random.default_rng(0), 3, 7)
    assert first["next_obs"].shape == (3, 7, 1)
    second = replay.sample(np.random.default_rng(1), 3, 7)
    again = replay.sample(np.random.default_rng(1), 3, 7, out=first)
    for name, array in second.items():
        assert again[name] is first[name]
        np.testing.assert_array_equal(again[name], array)


def test_a_checkpoint_of_another_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"another shape than this run's: \[100, 3, 1, 1\] instead of \[200, 6,"):
        small(200).load(small(100).state())


def test_less_than_a_step_each_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.replay_size 7 .* at least 8 are needed"):
        Replay(7, 4, 2, (1,), np.float32, (), np.int64)


# -- size and speed ---------------------------------------------------------------------------------------


def test_what_is_saved_every_time_stays_small() -> None:
    rng = np.random.default_rng(0)
    replay = Replay(4000, 2, 1, (64,), np.uint8, (), np.int64)
    largest, count = 0, 0
    for i in range(300):
        obs = rng.integers(0, 255, (18, 1, 64), np.uint8)
        chunk = chunk_of(list(range(17)), 0) | {"obs": obs[:-1], "last_obs": obs[-1], "final_obs": obs[:0, 0]}
        replay.add(i % 2, chunk)
        largest = max(largest, sum(array.nbytes for array in replay.state().values()))
        count = max(count, len(replay.blocks()))
    assert largest < 4000 * 64 / 20
    assert 64 <= count <= 70


def test_bytes_before_and_after() -> None:
    # 640 steps of one environment in blocks of 20 rows, and one block more: 660 rows.
    # Each has 3 * 4 of observation, 8 of action, 4 of reward, 1 of terminated, 2 of mask and 4 of link; 12 finals.
    described = (640, 1, 1, (3,), np.float32, (), np.int64, 2)
    assert Replay.nbytes(*described) == 660 * 31 + 12 * 12
    big = (200_000, 4, 2, (84, 84), np.uint8, (6,), np.float32)
    tracemalloc.start()
    replay = Replay(*big)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert Replay.nbytes(*big) <= taken < Replay.nbytes(*big) * 1.001
    assert Replay.nbytes(*big) < 1.1 * 200_000 * 84 * 84  # one observation each, not two
    assert len(replay) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_as_it_is_filled() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    replay = Replay(1_000_000, 4, 2, (64, 64), np.uint8, (6,), np.float32)
    assert Replay.nbytes(1_000_000, 4, 2, (64, 64), np.uint8, (6,), np.float32) > 4e9
    assert resident() - before < 50e6
    assert len(replay) == 0


def test_too_large_is_refused_with_what_to_do() -> None:
    refuse_too_large(1)
    with pytest.raises(
        ConfigError, match=r"needs 1000000\.0 GB .* and \d+\.\d GB are available; .*algorithm\.replay_size"
    ):
        refuse_too_large(10**15)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, 8_192_000),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "4000", "sys/fs/cgroup/a/memory.max": "5000"}, 4000),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "3000"}, 3000),
        ("0::/../of/the/host\n", {"sys/fs/cgroup/memory.max": "3000"}, 3000),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max"}, 8_192_000),
        ("3:cpu:/\n7:memory,x:/docker/1\n0::/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "2000"}, 2000),
        ("7:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, 8_192_000),
    ],
)
def test_available_memory(tmp_path: Path, groups: str, limits: dict[str, str], expected: int) -> None:
    files = {"proc/meminfo": "MemTotal: 16000 kB\nMemAvailable:    8000 kB\n", "proc/self/cgroup": groups, **limits}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == expected


def test_available_memory_elsewhere(tmp_path: Path) -> None:
    found = available_bytes(tmp_path)
    assert found is None or found > 1e8


def test_drawing_many_batches_takes_milliseconds() -> None:
    replay = Replay(500_000, 4, 1, (8,), np.float32, (), np.int64)
    steps = 130_000
    obs = np.zeros((steps + 1, 1, 8), np.float32)
    chunk = chunk_of([0] * steps, 0) | {"obs": obs[:-1], "last_obs": obs[-1], "final_obs": obs[:0, 0]}
    for lane in range(4):
        replay.add(lane, chunk)
    rng = np.random.default_rng(0)
    out = replay.sample(rng, 256, 256)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        replay.sample(rng, 256, 256, out)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.1  # some 6 ms on an idle machine
