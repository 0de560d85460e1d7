"""What the README and docs say is true: commands parse and run, links lead somewhere, tables are whole."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import typer
from programs import REGATTA

from regatta import config as configs
from regatta import errors
from regatta.cli.main import app

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
INSTALL = "pip install -e . && regatta train cartpole-ppo"
TEST = "pip install -e '.[test]' && pytest"
TRAINED = "my-run"  # the run the pages' commands speak of


class Block(NamedTuple):
    page: Path
    language: str
    text: str


def blocks(language: str) -> list[Block]:
    return [
        Block(page, language, text)
        for page in PAGES
        for text in re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    ]


def commands() -> list[str]:
    """Every `regatta` command in a shell block, once each."""
    parts = [part for block in blocks("sh") for line in block.text.splitlines() for part in line.split(" && ")]
    return list(dict.fromkeys(part for part in parts if part.startswith("regatta ")))


def parsed(command: str) -> tuple[str, dict[str, Any]]:
    """The subcommand and its options, as the command line itself reads them; nothing is run."""
    group: Any = typer.main.get_command(app)
    words = shlex.split(command)[1:]
    with group.make_context("regatta", list(words)) as outer:
        name, sub, rest = group.resolve_command(outer, list(words))
        with sub.make_context(name, rest, parent=outer) as inner:
            return name, dict(inner.params)


def resolved(options: dict[str, Any], more: tuple[str, ...] = ()) -> configs.Config:
    words = list(options["args"] or [])
    preset = words.pop(0) if words and "=" not in words[0] else None
    return configs.resolve(preset, file=options["config"], overrides=[*words, *more], seed=options["seed"])


def to_run() -> list[str]:
    """Of those that train the first of each preset; none that waits for another machine or for a run to go on with."""
    alone = [c for c in commands() if not re.search(r"--listen|--config|regatta worker|regatta resume", c)]
    firsts = {c.split()[2]: c for c in reversed(alone) if c.startswith("regatta train")}
    return [c for c in alone if not c.startswith("regatta train") or c in firsts.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages assume it: the example module, the config file, and a run called my-run."""
    made = tmp_path_factory.mktemp("reader")
    corridor = next(b.text for b in blocks("python") if "class Corridor" in b.text)
    (made / "my_module.py").write_text(corridor)
    (made / "experiment.toml").write_text(blocks("toml")[0].text)
    for options in ((), ("--store", "experiments")):
        words = ("train", "cartpole-ppo", "run.steps=512", "--workers", "0", "--name", TRAINED, *options)
        done = run((*REGATTA, *words), made)
        assert done.returncode == 0, done.stderr
    return made


def run(words: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("REGATTA_")}
    return subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", commands())
def test_every_command_parses(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    name, options = parsed(command)
    if name == "train":
        resolved(options)


@pytest.mark.parametrize("command", to_run())
def test_commands_run(command: str, folder: Path) -> None:
    words = shlex.split(command)[1:]
    name, options = parsed(command)
    if name == "train":  # the same, for one iteration and under a name that is free
        env, algorithm = (config := resolved(options)).env, config.algorithm
        knobs = msgspec.structs.asdict(algorithm)
        steps = env.lanes * env.lane_envs * knobs.get("rollout_steps", 0)
        words.append(f"run.steps={steps or knobs['population'] * knobs['episodes']}")
        small = {"epochs": 1, "critic_epochs": 1, "learning_starts": 0}
        words += [f"algorithm.{knob}={value}" for knob, value in small.items() if knob in knobs]
        if options["name"]:
            words[words.index("--name") + 1] = f"{TRAINED}-again-{len(list(folder.glob('*/my-run*')))}"
    if name == "evaluate":
        words += ["--episodes", "2"]
    done = run((*REGATTA, *words), folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_config_file_trains(folder: Path) -> None:
    done = run((*REGATTA, "train", "--config", "experiment.toml", "run.steps=256", "--workers", "0"), folder)
    assert done.returncode == 0, done.stderr


def test_the_token_recipe_makes_one_that_is_accepted(folder: Path) -> None:
    recipe = next(line for line in README.read_text("utf-8").splitlines() if "token_urlsafe" in line)
    with_this_python = recipe.replace("python", sys.executable, 1)
    assert run(("sh", "-c", with_this_python), folder).returncode == 0
    listening = ("--listen", "tcp://127.0.0.1:0", "--token-file", "token", "--workers", "1", "run.steps=512")
    done = run((*REGATTA, "train", "cartpole-ppo", *listening), folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "block", [b for b in blocks("python") if "import regatta" in b.text], ids=lambda block: block.page.stem
)
def test_python_examples_run(block: Block, folder: Path) -> None:
    short = block.text.replace('{"algorithm.lr": 3e-4}', '{"algorithm.lr": 3e-4, "run.steps": 512}')
    done = run((sys.executable, "-c", short), folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        there = page.parent / target if target else page
        assert there.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads], link


def test_every_page_is_linked_from_the_readme() -> None:
    text = README.read_text("utf-8")
    assert [page.name for page in PAGES[1:] if page.name not in text] == []


def test_the_readme_holds_the_two_commands_each_on_a_line() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert INSTALL in lines
    assert TEST in lines


def test_the_readme_names_every_preset_and_its_environment() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([\w/-]+)", README.read_text("utf-8"), re.MULTILINE)
    assert dict(rows) == {name: configs.resolve(name).env.id for name in configs.preset_names()}


def test_every_exit_code_is_told() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    codes = {0, *(kind.exit_code for kind in kinds)}
    table = README.read_text("utf-8").partition("## Exit codes")[2].partition("##")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes
    failures = (ROOT / "docs" / "failures.md").read_text("utf-8")
    assert [code for code in codes if code and not re.search(rf"\b{code}\b", failures)] == []


def test_settings_name_every_knob_and_no_other() -> None:
    text = (ROOT / "docs" / "settings.md").read_text("utf-8")
    told = {}
    for section, row in re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE):
        told[section] = set(re.findall(r"`(\w+)`", row))
    knobs = [knob.path.split(".") for knob in configs.knobs(configs.resolve("cartpole-ppo"))]
    for section in configs.SECTIONS:
        real = {name for other, name in knobs if other == section}
        assert told[section] == ({"name"} if section == "algorithm" else real)
    for name, struct in configs.ALGORITHMS.items():
        assert told[name] == set(struct.__struct_fields__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_speaks_of_one_machine(page: Path) -> None:
    assert not re.search(r"/(home|root|work|Users|tmp)/", page.read_text("utf-8"))


def test_pictures_are_small_and_fetch_nothing() -> None:
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert sum(picture.stat().st_size for picture in pictures) < 200_000
    for picture in pictures:
        assert not re.search(r"(href|src|url)\s*[=(]\s*[\"']?http", picture.read_text("utf-8"))


def test_results_keep_their_markers() -> None:
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    for name in ("learning", "speed"):
        assert 0 < text.find(f"<!-- {name}:begin -->") < text.find(f"<!-- {name}:end -->")
