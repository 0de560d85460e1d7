"""The benchmarks' own logic, without measuring anything: what is timed is never asserted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import learning

    return learning


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import speed

    return speed


@pytest.mark.parametrize("script", ["speed.py", "learning.py"])
def test_help_teaches_by_examples(script: str) -> None:
    shown = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"python benchmarks/{script}" in shown.stdout


def test_interval_is_students(learning: ModuleType) -> None:
    # mean 3, deviation sqrt(2.5), t(0.975, 4) = 2.776: half-width 1.963
    assert learning.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == "3 [1, 5]"
    assert learning.interval([10.0, 12.0]) == "11 [−1.7, 23.7]"


def test_page_keeps_the_rows_of_other_settings(learning: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "results.md"
    file.write_text(f"# Mine\n\n{learning.BEGIN}\n{learning.END}\n\nmine too\n")
    width = len(learning.COLUMNS)
    learning.Page(file).write([["a", *"1" * (width - 1)], ["b", *"1" * (width - 1)]])
    learning.Page(file).write([["b", *"2" * (width - 1)], ["c", *"2" * (width - 1)]])
    text = file.read_text()
    rows = [line.split() for line in text.splitlines() if line.startswith("|")][2:]
    assert [(row[1], row[3]) for row in rows] == [("a", "1"), ("b", "2"), ("c", "2")]
    assert text.startswith("# Mine\n")
    assert text.endswith("\nmine too\n")


def test_page_without_markers_is_refused_before_any_training(learning: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "results.md"
    file.write_text("# Mine\n")
    with pytest.raises(SystemExit, match="learning:begin"):
        learning.Page(file)


def test_seeds_are_read_and_written_alike(learning: ModuleType) -> None:
    assert learning.compact(learning.seed_list("0-2,5")) == "0–2, 5"


# -- speed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [None, 500, 5000])
def test_every_task_is_a_valid_config_that_peers_can_have(speed: ModuleType, steps: int | None) -> None:
    for name, entry in speed.ENTRIES.items():
        if steps == 500 and entry.algorithm == "ppo":
            continue  # their iterations are not cut down
        options = speed.parse(["--task", name, *(["--steps", str(steps)] if steps else [])])
        bench = speed.Bench(options, None, None)
        for task in entry.tasks:
            settings = bench.settings(bench.words(task), 0)
            assert settings["algorithm"]["name"] == entry.algorithm
            assert json.loads(json.dumps(settings)) == settings


def test_trpo_counts_ten_iterations_after_two_in_the_presets_environment(speed: ModuleType) -> None:
    bench = speed.Bench(speed.parse(["--task", "trpo"]), None, None)
    settings = bench.settings(bench.words(speed.speed_trpo.TASK), 0)
    assert settings["envs"] * settings["algorithm"]["rollout_steps"] == 10_000
    assert settings["steps"] == 120_000
    preset = bench.settings(["pong-ram-trpo"], 0)
    assert [settings[name] for name in ("env", "kwargs", "sizes")] == [
        preset[name] for name in ("env", "kwargs", "sizes")
    ]


def test_trpo_is_held_against_the_faster_of_the_peers_two_ways(speed: ModuleType) -> None:
    figures = {"regatta": [20.0], "contrib": [100.0], "contrib+subproc": [78.0], "stepping": [13.0]}
    rows = [row[3:] for row in speed.speed_trpo.table(figures)]
    assert rows[1] == ["0.20", "0.20 – 0.20", "–", ""]
    assert rows[2] == ["0.26", "0.26 – 0.26", "≤ 0.25", "NOT met"]
    assert rows[3] == ["1.54", "1.54 – 1.54", "≤ 1.5", "NOT met"]
    alone = speed.speed_trpo.table({"regatta": [20.0], "stepping": [14.0]})
    assert [row[-1] for row in alone] == ["", "not measured", "met"]


def test_sac_is_timed_only_once_it_learns(speed: ModuleType) -> None:
    metrics = {
        "steps": [32, 64, 96, 128, 160],
        "wall_s": [0.1, 9.0, 9.5, 9.7, 9.9],
        "updates": [0.0, 32.0, 64.0, 96.0, 128.0],
    }
    assert math.isclose(speed.speed_sac.learning_rate(metrics), 64 / 0.4)
    with pytest.raises(SystemExit, match="too small"):
        speed.speed_sac.learning_rate({name: column[:3] for name, column in metrics.items()})
    with pytest.raises(SystemExit, match="one gradient step"):
        speed.speed_sac.learning_rate({**metrics, "updates": [0.0, 64.0, 65.0, 66.0, 67.0]})


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"regatta": [35.0], "evotorch": [10.0], "stepping": [100.0]}, ("≥ 30", "met")),
        ({"regatta": [35.0], "evotorch": [20.0], "stepping": [50.0]}, ("≥ 40", "NOT met")),
        ({"regatta": [35.0], "stepping": [40.0]}, ("≥ 32", "met")),
        ({"regatta": [35.0], "stepping": [50.0]}, ("≥ 40", "not measured")),  # EvoTorch might lower the bar
    ],
)
def test_evolution_is_held_against_the_lesser_of_two_bars(
    speed: ModuleType, figures: dict[str, list[float]], expected: tuple[str, str]
) -> None:
    assert speed.speed_es.judged(figures) == expected


def test_evolution_is_timed_after_two_generations(speed: ModuleType) -> None:
    metrics = {"steps": [100, 300, 450], "episodes": [10, 20, 24], "wall_s": [5.0, 9.0, 9.5]}
    assert speed.speed_es.after_warm_up(metrics) == {"steps": 150, "episodes": 4, "seconds": 0.5}
    short = {name: column[:1] for name, column in metrics.items()}
    assert speed.speed_es.after_warm_up(short)["steps"] == 0


def test_peers_of_evolution_begin_with_regattas_parameters(speed: ModuleType) -> None:
    words = ["es", "env.id=CartPole-v1", "network.sizes=[3]"]
    parameters = speed.speed_es.first_parameters(words, 0)
    first, biases = parameters[:12].reshape(3, 4), parameters[12:15]  # [out, in], as PyTorch has it
    assert len(parameters) == 4 * 3 + 3 + 3 * 2 + 2
    assert abs(first @ first.T / 2 - [[1, 0, 0], [0, 1, 0], [0, 0, 1]]).max() < 1e-5  # orthogonal, gain sqrt 2
    assert not biases.any()


def test_stepping_alone_shares_the_steps_among_its_processes() -> None:
    work = {"env": "CartPole-v1", "kwargs": {}, "seed": 0, "steps": 301, "processes": 2}
    command = [sys.executable, str(BENCHMARKS / "stepping.py"), json.dumps(work)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    figures = json.loads(shown.stdout)
    assert figures["steps"] == 301
    assert 4 <= figures["episodes"] <= 40  # random play lasts some twenty steps
    assert math.isclose(figures["steps_per_s"], 301 / figures["seconds"])


def test_a_section_takes_the_place_of_the_one_with_its_heading(speed: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "results.md"
    file.write_text("# Mine\n\n<!-- speed:begin -->\nHow.\n\n### A\n\none\n\n### B\n\ntwo\n<!-- speed:end -->\nend\n")
    page = speed.Page(file)
    page.put("## B\n\nthree\n")
    file.write_text(file.read_text().replace("# Mine", "# Others write too"))
    page.put("## C\n\nfour\n")
    assert file.read_text() == (
        "# Others write too\n\n<!-- speed:begin -->\nHow.\n\n### A\n\none\n\n### B\n\nthree\n\n### C\n\nfour\n"
        "<!-- speed:end -->\nend\n"
    )
    file.write_text("# Mine\n")
    with pytest.raises(SystemExit, match="speed:begin"):
        speed.Page(file)


def test_a_task_is_estimated_by_its_steps_and_rounds(speed: ModuleType) -> None:
    entry = speed.ENTRIES["trpo"]
    options = speed.parse(["--task", "trpo", "--rounds", "2", "--steps", "50_000"])
    assert entry.seconds(options) == 2 * (entry.start_s + entry.work_s / 2)
