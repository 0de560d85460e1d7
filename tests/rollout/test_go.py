"""Go: the rules against hand-made positions and against GNU Go's own, then whole games."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regatta.errors import ConfigError, EnvError
from regatta.rollout import go
from regatta.rollout.envs import EnvConfig, bare, make, probe
from regatta.rollout.go import BLACK, PASS, WHITE, Board, Engine, Go, point_of, vertex


def set_up(picture: str) -> Board:
    """A board from its rows: X is black, O is white."""
    rows = picture.split()
    board = Board(len(rows))
    for point, sign in enumerate("".join(rows)):
        if sign != ".":
            board.play(point, BLACK if sign == "X" else WHITE)
    return board


def look(board: Board) -> str:
    signs = "".join({BLACK: "X", WHITE: "O"}.get(stone, ".") for stone in board.stones)
    return " ".join(signs[at : at + board.size] for at in range(0, len(signs), board.size))


# -- the rules --------------------------------------------------------------------------------------------


def test_a_group_without_liberties_is_taken() -> None:
    board = set_up("XXO.. .OO.. ..... ..... .....")
    board.play(point_of("A4", 5), WHITE)
    assert look(board) == "..O.. OOO.. ..... ..... ....."
    board = set_up(".XO.. OO... ..... ..... .....")
    board.play(0, WHITE)
    assert look(board) == "O.O.. OO... ..... ..... ....."


def test_several_groups_are_taken_at_once() -> None:
    board = set_up(".OX.. OX... X.... ..... .....")
    board.play(0, BLACK)
    assert look(board) == "X.X.. .X... X.... ..... ....."


def test_suicide_is_illegal_unless_it_captures() -> None:
    board = set_up(".O... OO... ..... ..... .....")
    assert not board.legal(BLACK)[0]
    assert board.legal(WHITE)[0]
    board = set_up(".OX.. OX... X.... ..... .....")
    assert board.legal(BLACK)[0]
    several = set_up("X.O.. OO... ..... ..... .....")  # two black stones in the corner would have no liberty
    assert not several.legal(BLACK)[1]


def test_a_ko_is_not_taken_back_at_once() -> None:
    board = set_up(".XO.. XO.O. .XO.. ..... .....")
    into, back = point_of("C4", 5), point_of("B4", 5)
    board.play(into, BLACK)
    assert board.stones[back] == 0
    assert not board.legal(WHITE)[back]
    board.play(point_of("E1", 5), WHITE)
    board.play(point_of("A1", 5), BLACK)
    assert board.legal(WHITE)[back]


def test_vertices_leave_out_the_letter_i() -> None:
    assert [vertex(point, 9) for point in (0, 8, 80, PASS)] == ["A9", "J9", "J1", "pass"]
    assert all(point_of(vertex(point, 19), 19) == point for point in range(-1, 361))


# -- against the engine -----------------------------------------------------------------------------------


@pytest.fixture
def engine() -> None:
    """Skip, or under CI fail, where GNU Go is missing."""
    try:
        go.find_engine()
    except ConfigError as missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(str(missing))


@pytest.mark.parametrize(("size", "moves"), [(3, 120), (5, 250), (9, 120), (19, 20)])
def test_the_rules_are_the_engines(engine: None, size: int, moves: int) -> None:
    """Random games long enough for kos and longer repetitions; the small boards are full of them."""
    rng, board = random.Random(size), Board(size)
    other = Engine("--boardsize", str(size), "--positional-superko", "--forbid-suicide")
    names = {BLACK: "black", WHITE: "white"}
    for move in range(moves):
        colour = (BLACK, WHITE)[move % 2]
        for side in (BLACK, WHITE):
            legal = {vertex(point, size) for point, may in enumerate(board.legal(side)) if may}
            assert legal == set(other.ask(f"all_legal {names[side]}").split()), look(board)
        points = [point for point, may in enumerate(board.legal(colour)) if may]
        point = rng.choice(points) if points and rng.random() > 0.03 else PASS
        other.ask(f"play {names[colour]} {vertex(point, size)}")
        if point != PASS:
            board.play(point, colour)
    other.stop()


@pytest.fixture
def game(engine: None, request: pytest.FixtureRequest) -> Iterator[Go]:
    env = Go(**getattr(request, "param", {}))
    yield env
    env.close()


def play_out(env: Any, seed: int, choices: int) -> tuple[list[bytes], float, bool]:
    """A whole game of random legal moves: what was seen, the result, and whether it was cut off."""
    rng = random.Random(choices)
    obs, info = env.reset(seed=seed)
    seen = [obs.tobytes()]
    while True:
        assert env.observation_space.contains(obs)
        legal = np.flatnonzero(info["action_mask"])
        obs, reward, over, cut, info = env.step(int(rng.choice(legal)))
        seen.append(obs.tobytes())
        if over or cut:
            return seen, reward, cut
        assert reward == 0


@pytest.mark.parametrize("game", [{}, {"colour": "white"}], indirect=True)
def test_games_repeat(game: Go) -> None:
    first = play_out(game, 4, 1)
    play_out(game, 5, 2)
    assert play_out(game, 4, 1) == first
    assert first[1:] == (-1.0, False)


def test_the_planes_are_ours_theirs_and_the_legal(game: Go) -> None:
    obs, info = game.reset(seed=0)
    assert obs.shape == (9, 9, 3)
    assert not obs[..., :2].any()
    assert (obs[..., 2] == 255).all()
    assert info["action_mask"].all()
    obs, *_, info = game.step(40)
    assert obs[4, 4].tolist() == [255, 0, 0]
    assert [(obs[..., plane] > 0).sum() for plane in range(3)] == [1, 1, 79]
    assert ((obs[..., 2] > 0).reshape(-1) == info["action_mask"][:-1]).all()


@pytest.mark.parametrize("game", [{"colour": "white", "size": 5}], indirect=True)
def test_black_begins(game: Go) -> None:
    obs, _ = game.reset(seed=0)
    assert [(obs[..., plane] > 0).sum() for plane in range(3)] == [0, 1, 24]


@pytest.mark.parametrize(
    ("game", "result"),
    [
        ({"size": 5}, -1.0),
        ({"size": 5, "komi": -30}, 1.0),  # white has the whole board, 25 points
        ({"size": 5, "komi": -25}, 0.0),
        ({"size": 5, "colour": "white"}, -1.0),
        ({"size": 5, "colour": "white", "komi": 30}, 1.0),
    ],
    indirect=["game"],
)
def test_two_passes_end_the_game_and_the_engine_counts(game: Go, result: float) -> None:
    game.reset(seed=0)
    for _ in range(30):
        _, reward, over, cut, _ = game.step(25)
        if over:
            break
        assert (reward, cut) == (0.0, False)
    assert (over, cut, reward) == (True, False, result)


@pytest.mark.parametrize("game", [{"size": 5}], indirect=True)
def test_long_games_are_cut_off(game: Go) -> None:
    _, info = game.reset(seed=0)
    game._moves = [0] * (4 * 25 - 4)
    for cut_off in (False, True):
        action = int(np.flatnonzero(info["action_mask"])[12])
        _, reward, over, cut, info = game.step(action)
        assert (reward, over, cut) == (0.0, False, cut_off)


def test_illegal_moves_are_refused(game: Go) -> None:
    game.reset(seed=0)
    game.step(40)
    for action in (40, 82, -1):
        with pytest.raises(EnvError, match=f"action {action} is illegal"):
            game.step(action)


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether the process ends; one that nobody has reaped yet has ended too."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def engine_of(game: Go) -> int:
    assert game._engine is not None
    return game._engine.pid


def test_an_engine_that_is_killed(game: Go) -> None:
    game.reset(seed=0)
    pid = engine_of(game)
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EnvError, match=f"GNU Go .process {pid}. was killed by signal 9 when asked 'play black"):
            game.step(40)
    game.reset(seed=0)
    game.step(40)
    assert engine_of(game) != pid


def test_an_engine_that_is_interrupted_is_not_asked_again(game: Go) -> None:
    """As a step that takes too long: half an answer must not be taken for the next one."""

    class Enough(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Enough

    game.reset(seed=0)
    pid = engine_of(game)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        os.kill(pid, signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Enough):
            game.step(40)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gone(pid)
    game.reset(seed=0)


def test_nothing_is_left_behind(game: Go) -> None:
    game.reset(seed=0)
    first = engine_of(game)
    game.reset()
    second = engine_of(game)
    assert gone(first, 0.1)
    game.close()
    game.close()
    assert gone(second, 0.1)
    with pytest.raises(EnvError, match="reset comes before step"):
        game.step(0)


def test_the_engine_goes_when_we_are_killed(engine: None) -> None:
    script = (
        "import os, signal\nfrom regatta.rollout.go import Go\nenv = Go()\nenv.reset(seed=0)\n"
        "print(env._engine.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert gone(int(done.stdout))


# -- as an environment of a run ---------------------------------------------------------------------------


def test_go_by_its_id(engine: None) -> None:
    found = probe(EnvConfig(id="go9x9"))
    assert (found.obs.shape, found.obs.dtype) == ((9, 9, 3), "uint8")
    assert (found.action.sizes, found.action.masked) == ((82,), True)
    assert probe(EnvConfig(id="go9x9", kwargs={"size": 5})).action.sizes == (26,)
    env = make(EnvConfig(id="go9x9", max_episode_steps=7))
    assert bare(env).limit == 7
    env.close()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"size": 4}, r"env\.kwargs\.size = 4: expected an integer, >= 5 and <= 19"),
        ({"size": 9.5}, r"env\.kwargs\.size"),
        ({"komi": "much"}, r"env\.kwargs\.komi"),
        ({"level": 0}, r"env\.kwargs\.level"),
        ({"colour": "red"}, r"env\.kwargs\.colour = 'red': expected one of"),
        ({"render_mode": "ansi"}, r"env\.kwargs\.render_mode"),
        ({"speed": 3}, r"env\.kwargs: 'go9x9' does not take"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode:UserWarning")
def test_arguments_that_do_not_fit(engine: None, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(EnvConfig(id="go9x9", kwargs=kwargs))


def test_without_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(go, "GAMES", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install gnugo"):
        make(EnvConfig(id="go9x9"))


@pytest.mark.parametrize("game", [{"render_mode": "rgb_array"}], indirect=True)
def test_the_picture(game: Go) -> None:
    game.reset(seed=0)
    empty = game.render()
    game.step(0)
    image = game.render()
    cell = go.CELL_PIXELS
    assert image.shape == empty.shape == (9 * cell, 9 * cell, 3)
    assert image[cell // 2, cell // 2].tolist() == list(go.INK)
    assert tuple(empty[cell // 2 + 3, cell // 2 + 3]) == go.WOOD
    changed = (image != empty).any(-1).reshape(9, cell, 9, cell).any((1, 3))
    assert changed.sum() == 2
    answer = int(np.flatnonzero(np.array(game._board.stones) == WHITE)[0])
    row, column = (i * cell + cell // 2 for i in divmod(answer, 9))
    assert tuple(image[row, column]) == go.MARK
