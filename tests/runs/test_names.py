from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from regatta.errors import UsageError
from regatta.runs.names import ADJECTIVES, ANIMALS, candidates, check_name, is_name
from regatta.runs.writer import RunWriter
from regatta.store.base import open_store


def test_word_lists_make_good_names() -> None:
    for words in (ADJECTIVES, ANIMALS):
        assert len(words) == len(set(words)) >= 120
        assert all(word.isalpha() and word.islower() and word.isascii() for word in words)


def test_candidates_are_valid_whatever_the_preset() -> None:
    for preset in ("cartpole-ppo", "My Preset!", "", "../../etc", "x" * 200, "half.cheetah-"):
        for name in itertools.islice(candidates(preset), 40):
            assert is_name(name), name
    assert next(candidates("cartpole-ppo")).startswith("cartpole-ppo-")


@pytest.mark.parametrize("name", ["a", "my-run", "v1.2", "0", "x" * 64])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "Upper", "a b", "-x", ".x", "..", "x.", "x-", "a/b", "é", "x" * 65, "a\n"])
def test_bad_names(name: str) -> None:
    with pytest.raises(UsageError, match="lower-case letters, digits, dashes and dots"):
        check_name(name)


def test_last_is_taken() -> None:
    with pytest.raises(UsageError, match="newest run"):
        check_name("last")


def test_names_are_unique_under_concurrency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regatta.runs.names.ADJECTIVES", ("brisk", "calm"))
    monkeypatch.setattr("regatta.runs.names.ANIMALS", ("otter", "owl"))
    store = open_store(str(tmp_path))
    ids: list[str] = []

    def create() -> None:
        for _ in range(5):
            writer = RunWriter.create(store, preset="p", config={}, command=[])
            ids.append(writer.id)
            writer.close("done")

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == len(set(ids)) == 40
    assert store.folders() == sorted(ids)


def test_a_taken_name_is_refused_with_the_remedy(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    RunWriter.create(store, preset="p", config={}, command=[], name="mine").close("done")
    with pytest.raises(UsageError, match=r"'mine' already exists in .*; choose another --name, or .* resume mine"):
        RunWriter.create(store, preset="p", config={}, command=[], name="mine")
