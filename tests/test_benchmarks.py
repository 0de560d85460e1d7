"""The benchmarks' own logic, without measuring anything: what is timed is never asserted."""

from __future__ import annotations

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
