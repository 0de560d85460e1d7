"""Go against GNU Go, as a Gymnasium environment: the rules, the engine at the other end of a pipe, a picture.

The rules are kept here, so that the legal moves are known without asking: captures, no suicide, no repetition of an
earlier position (positional superko). The engine plays the other colour and, when both have passed, says who won.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from regatta.errors import ConfigError, EnvError
from regatta.types import Array

EMPTY, BLACK, WHITE = 0, 1, -1
PASS = -1
LETTERS = "ABCDEFGHJKLMNOPQRST"  # GTP leaves out the I
GAMES = "/usr/games:/usr/local/games"  # where Debian puts them; seldom in PATH
STOP_TIMEOUT_S = 2.0
CELL_PIXELS = 28

Colour = Literal["black", "white"]


# -- the rules --------------------------------------------------------------------------------------------


@functools.cache
def neighbours(size: int) -> list[list[int]]:
    """Of each point, row by row from the top left, the two to four points beside it."""
    found = []
    for point in range(size * size):
        row, column = divmod(point, size)
        near = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        found.append([r * size + c for r, c in near if 0 <= r < size and 0 <= c < size])
    return found


@functools.cache
def signatures(size: int) -> dict[int, list[int]]:
    """A random number for each stone on each point: a position is the exclusive or of its stones' numbers."""
    rng = np.random.default_rng(0)
    return {colour: rng.integers(2**63, size=size * size).tolist() for colour in (BLACK, WHITE)}


class Board:
    """A position and the positions before it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stones = [EMPTY] * (size * size)
        self._near = neighbours(size)
        self._signatures = signatures(size)
        self._position = 0
        self._seen = {0}

    def _group(self, point: int) -> tuple[list[int], set[int]]:
        """The stones connected to the one at `point`, and their liberties."""
        colour, group, found, liberties = self.stones[point], [point], {point}, set()
        for stone in group:
            for near in self._near[stone]:
                if self.stones[near] == EMPTY:
                    liberties.add(near)
                elif self.stones[near] == colour and near not in found:
                    found.add(near)
                    group.append(near)
        return group, liberties

    def legal(self, colour: int) -> list[bool]:
        """For each point, whether `colour` may play there."""
        owners: list[int] = [-1] * len(self.stones)
        liberties: list[int] = []  # of each group, how many
        numbers: list[int] = []  # of each group, the exclusive or of its stones' numbers
        for point, stone in enumerate(self.stones):
            if stone != EMPTY and owners[point] < 0:
                group, free = self._group(point)
                number = 0
                for member in group:
                    owners[member] = len(liberties)
                    number ^= self._signatures[stone][member]
                liberties.append(len(free))
                numbers.append(number)
        return [
            stone == EMPTY and self._may_play(point, colour, owners, liberties, numbers)
            for point, stone in enumerate(self.stones)
        ]

    def _may_play(self, point: int, colour: int, owners: list[int], liberties: list[int], numbers: list[int]) -> bool:
        alive, captured = False, set()
        for near in self._near[point]:
            group = owners[near]
            if group < 0:
                alive = True
            elif self.stones[near] == colour:
                alive |= liberties[group] > 1
            elif liberties[group] == 1:
                captured.add(group)
        if not alive and not captured:
            return False
        position = self._position ^ self._signatures[colour][point]
        for group in captured:
            position ^= numbers[group]
        return position not in self._seen

    def play(self, point: int, colour: int) -> None:
        """Put a stone on a point where that is legal, and take off what it captures."""
        self.stones[point] = colour
        self._position ^= self._signatures[colour][point]
        for near in self._near[point]:
            if self.stones[near] == -colour:
                group, liberties = self._group(near)
                if not liberties:
                    for stone in group:
                        self.stones[stone] = EMPTY
                        self._position ^= self._signatures[-colour][stone]
        self._seen.add(self._position)


def vertex(point: int, size: int) -> str:
    """A point, or PASS, as GTP writes it."""
    if point == PASS:
        return "pass"
    row, column = divmod(point, size)
    return f"{LETTERS[column]}{size - row}"


def point_of(vertex: str, size: int) -> int:
    if vertex.lower() == "pass":
        return PASS
    return (size - int(vertex[1:])) * size + LETTERS.index(vertex[0].upper())


# -- the engine -------------------------------------------------------------------------------------------


def find_engine() -> str:
    found = shutil.which("gnugo") or shutil.which("gnugo", path=GAMES)
    if found is None:
        raise ConfigError("env.id: 'go9x9' plays against GNU Go, which is not installed here: apt-get install gnugo")
    return found


class Engine:
    """One GNU Go process. It ends when its input does, so it never outlives the process that asks it."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [find_engine(), "--mode", "gtp", "--quiet", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,  # Ctrl-C is for us, not for the engine
        )
        self.pid = self._process.pid

    def ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        lines: list[str] = []
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
            while (line := self._process.stdout.readline()).strip():
                lines.append(line.strip())
        except (OSError, ValueError):  # no one reads, or the pipe is closed already
            line = ""
        except BaseException:
            self._process.kill()  # interrupted half way: the rest of the answer would be taken for the next one
            self.stop()
            raise
        if not line:
            raise EnvError(f"GNU Go (process {self.pid}) {self._end()} when asked {command!r}")
        answer = "\n".join(lines)
        if not answer.startswith("="):
            raise EnvError(f"GNU Go refuses {command!r}: {answer}")
        return answer[1:].strip()

    def _end(self) -> str:
        self.stop()
        code = self._process.returncode
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    def stop(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass  # what was not yet written has no reader
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- the environment --------------------------------------------------------------------------------------


class Go(gymnasium.Env[Array, Any]):
    """A game of Go from the agent's side: three planes of 0 or 255, for own stones, the other's, and legal moves.

    An action is a point, row by row from the top left, or the last one to pass. `info["action_mask"]` is what is
    legal. Two passes in a row end the game: 1 for a win, -1 for a loss, 0 for a draw. After 4 x size x size moves
    it is cut off.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 2}  # noqa: RUF012 as Gymnasium has it

    def __init__(
        self,
        size: int = 9,
        komi: float = 5.5,
        level: int = 1,
        colour: Colour = "black",
        render_mode: str | None = None,
    ) -> None:
        for name, value, valid, fits in (
            ("size", size, "an integer, >= 5 and <= 19", isinstance(size, int) and 5 <= size <= 19),
            ("komi", komi, "a number, >= -400 and <= 400", isinstance(komi, int | float) and -400 <= komi <= 400),
            ("level", level, "an integer, >= 1 and <= 10", isinstance(level, int) and 1 <= level <= 10),
            ("colour", colour, 'one of "black", "white"', colour in ("black", "white")),
            ("render_mode", render_mode, 'none or "rgb_array"', render_mode in (None, "rgb_array")),
        ):
            if not fits:
                raise ConfigError(f"env.kwargs.{name} = {value!r}: expected {valid}")
        find_engine()
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(size * size + 1)
        self._size, self._komi, self._level = size, komi, level
        self._mine = BLACK if colour == "black" else WHITE
        self._engine: Engine | None = None
        self._board = Board(size)
        self._legal: list[bool] = []
        self._moves: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        # A new process, in a few milliseconds: what an old one remembers of other games could change its moves.
        self.close()
        self._engine = Engine(
            *("--level", str(self._level), "--boardsize", str(self._size), "--komi", str(self._komi)),
            *("--seed", str(self.np_random.integers(1, 2**31))),
            *("--never-resign", "--chinese-rules", "--forbid-suicide", "--positional-superko"),
        )
        self._board = Board(self._size)
        self._moves = []
        if self._mine == WHITE:
            self._answer()
        return self._look()

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self._engine is None:
            raise EnvError("go9x9: reset comes before step, and after a game is over")
        passes = int(action) == len(self._legal)
        if not passes and not (0 <= action < len(self._legal) and self._legal[action]):
            raise EnvError(f"go9x9: action {action} is illegal here; info['action_mask'] says what is legal")
        point = PASS if passes else int(action)
        self._engine.ask(f"play {self._name(self._mine)} {vertex(point, self._size)}")
        self._move(point, self._mine)
        if not self._over():
            self._answer()
        over = self._over()
        reward = self._result() if over else 0.0
        obs, info = self._look()
        return obs, reward, over, not over and len(self._moves) >= 4 * self._size**2, info

    def _answer(self) -> None:
        """The engine's move."""
        assert self._engine is not None
        answer = self._engine.ask(f"genmove {self._name(-self._mine)}")
        point = point_of(answer, self._size)
        if point != PASS and not self._board.legal(-self._mine)[point]:
            raise EnvError(f"go9x9: GNU Go plays {answer}, which is illegal here")
        self._move(point, -self._mine)

    def _move(self, point: int, colour: int) -> None:
        if point != PASS:
            self._board.play(point, colour)
        self._moves.append(point)

    def _over(self) -> bool:
        return self._moves[-2:] == [PASS, PASS]

    def _result(self) -> float:
        assert self._engine is not None
        score = self._engine.ask("final_score")  # B+3.5, W+12, 0
        if score[0] not in "BW":
            return 0.0
        return 1.0 if (score[0] == "B") == (self._mine == BLACK) else -1.0

    def _look(self) -> tuple[Array, dict[str, Any]]:
        self._legal = self._board.legal(self._mine)
        stones = np.array(self._board.stones)
        planes = np.stack([stones == self._mine, stones == -self._mine, self._legal], -1)
        obs = planes.reshape(self._size, self._size, 3) * np.uint8(255)
        return obs, {"action_mask": np.array([*self._legal, True])}

    def _name(self, colour: int) -> str:
        return "black" if colour == BLACK else "white"

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        last = self._moves[-1] if self._moves else PASS
        return picture(self._board, last)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.stop()
            self._engine = None


# -- the picture ------------------------------------------------------------------------------------------

WOOD, INK, IVORY, MARK = (220, 179, 92), (20, 20, 20), (245, 245, 240), (200, 40, 40)


def picture(board: Board, last: int) -> Array:
    """The board as an RGB image, with a mark on the last move."""
    size = board.size
    image = np.full((size * CELL_PIXELS, size * CELL_PIXELS, 3), WOOD, np.uint8)
    first, end = CELL_PIXELS // 2, size * CELL_PIXELS - CELL_PIXELS // 2
    for at in range(first, end + 1, CELL_PIXELS):
        image[at, first : end + 1] = INK
        image[first : end + 1, at] = INK
    across = np.arange(CELL_PIXELS) - (CELL_PIXELS - 1) / 2
    distance = np.hypot(across[:, None], across) / CELL_PIXELS  # from the middle of a point, in cells
    for point, stone in enumerate(board.stones):
        row, column = (CELL_PIXELS * i for i in divmod(point, size))
        cell = image[row : row + CELL_PIXELS, column : column + CELL_PIXELS]
        if stone != EMPTY:
            cell[distance < 0.46] = INK
            cell[distance < 0.43] = INK if stone == BLACK else IVORY
        if point == last:
            cell[distance < 0.14] = MARK
    return image
