"""From a preset's name, a file and `key.path=value` overrides to one checked `Config`, and to JSON and back.

Knobs are not declared here: each lives in a frozen struct beside the code that reads it. This module merges
the layers (preset, file, overrides; the later wins), converts and checks every value, and reports all faults
at once before anything starts.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from regatta.algorithms.blackbox import BlackboxConfig
from regatta.algorithms.es import ESConfig
from regatta.algorithms.ppo import PPOConfig
from regatta.algorithms.sac import SACConfig
from regatta.algorithms.trpo import TRPOConfig
from regatta.crew import CrewConfig
from regatta.errors import ConfigError, nearest
from regatta.knobs import Given, converted, described, fields, is_utf8, show
from regatta.learner import StopConfig
from regatta.policies.networks import NetworkConfig
from regatta.rollout.envs import EnvConfig
from regatta.runs.run import RunConfig

AlgorithmConfig = PPOConfig | TRPOConfig | SACConfig | ESConfig | BlackboxConfig
ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "ppo": PPOConfig,
    "trpo": TRPOConfig,
    "sac": SACConfig,
    "es": ESConfig,
    "blackbox": BlackboxConfig,
}
SECTIONS = ("env", "network", "algorithm", "run", "stop", "crew")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything an experiment is, apart from who carries it out."""

    preset: str  # the preset or algorithm it started from; empty for a file that names none
    env: EnvConfig
    network: NetworkConfig
    algorithm: AlgorithmConfig
    run: RunConfig
    stop: StopConfig
    crew: CrewConfig


class Knob(msgspec.Struct, frozen=True):
    """One line of `regatta presets NAME`."""

    path: str
    type: str
    value: Any
    default: Any
    doc: str
    valid: str
    changed: bool


Layer = dict[str, dict[str, Given]]  # section -> knob -> what was given


# ---- presets


def preset_names() -> list[str]:
    folder = resources.files("regatta") / "presets"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def preset_text(name: str) -> dict[str, Any]:
    """The preset's own sparse settings."""
    return tomllib.loads(_preset_source(name))


def preset_description(name: str) -> str:
    """The comment on the preset's first line."""
    return _preset_source(name).partition("\n")[0].lstrip("# ")


def _preset_source(name: str) -> str:
    names = preset_names()
    if name not in names:
        remedy = " a config file is given with --config;" if name.endswith(".toml") else ""
        close = nearest(name, [*names, *ALGORITHMS])
        raise ConfigError(f"unknown preset {name!r};{close}{remedy} `regatta presets` lists all")
    return (resources.files("regatta") / "presets" / f"{name}.toml").read_text("utf-8")


# ---- resolving


def resolve(
    preset: str | None = None,
    *,
    file: str | PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
) -> Config:
    """The preset's or algorithm's settings, with the file's on top, then the overrides, then the seed."""
    faults: list[str] = []
    complete = True
    document: dict[str, Any] = {}
    if file is not None:
        try:
            document = _read(file)
        except ConfigError as error:
            faults.append(str(error))
            complete = False
    named = document.pop("preset", None)
    if named is not None and (not isinstance(named, str) or preset not in (None, named)):
        remedy = f"the call says {preset!r}; give one" if preset else "expected the name of a preset"
        faults.append(f"preset = {show(named)} (in {file}): {remedy}")
        complete = False
    elif preset is None:
        preset = named
    if preset is None and file is None:
        faults.append("no preset: name one (`regatta presets` lists all), or an algorithm, or a config file")
        complete = False

    layer: Layer = {}
    if preset in ALGORITHMS:
        layer = {"algorithm": {"name": Given(preset)}}
    elif preset is not None:
        try:
            layer = _layer(preset_text(preset), f" (in preset {preset})", faults)
        except ConfigError as error:
            faults.append(str(error))
            complete = False
    for section, knobs_given in _layer(document, f" (in {file})", faults).items():
        for name, given in knobs_given.items():
            below = layer.setdefault(section, {}).get(name)
            layer[section][name] = given._replace(value=_laid_over(below and below.value, given.value))
    for text in overrides:
        _override(layer, text, faults)
    if seed is not None:
        layer.setdefault("run", {})["seed"] = Given(seed)
    return _build(preset or "", layer, faults, complete=complete)


def _read(file: str | PathLike[str]) -> dict[str, Any]:
    try:
        # Editors on Windows begin a file with a byte-order mark, which TOML does not allow.
        text = Path(file).read_text("utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the config file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text; a config file is TOML") from error
    except ValueError as error:  # not only TOMLDecodeError: an integer of 5000 digits
        last = f"at line {text.count(chr(10)) + 1}, the end of the file"
        raise ConfigError(f"{file}: not TOML: {str(error).replace('at end of document', last)}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: nested too deeply") from error


def _layer(document: dict[str, Any], where: str, faults: list[str]) -> Layer:
    layer: Layer = {}
    for section, content in document.items():
        if section not in SECTIONS:
            faults.append(_unknown(section, where))
        elif not isinstance(content, dict):
            faults.append(f"{section} = {show(content)}{where}: it is a section; write its knobs below [{section}]")
        else:
            layer[section] = {name: Given(value, where) for name, value in content.items()}
    return layer


def _laid_over(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _laid_over(below.get(key), value) for key, value in above.items()}


def _override(layer: Layer, text: str, faults: list[str]) -> None:
    key, equals, typed = text.partition("=")
    section, *path = key.strip().split(".")
    if not equals or not all((section, *path)):
        faults.append(f"{text!r} is not an override; write key.path=value, as in algorithm.lr=3e-4")
        return
    if section == "preset" and not path:
        faults.append("preset cannot be overridden; name the preset itself instead")
        return
    if section not in SECTIONS:
        faults.append(_unknown(key.strip()))
        return
    if not path:
        faults.append(f"{section} is a section; set one of its knobs, as in {section}.{_names(section)[0]}=...")
        return
    try:
        given = _parse(typed.strip())
    except ValueError as error:
        faults.append(f"{key.strip()} = {typed.strip()}: not TOML: {error}")
        return
    name, *inner = path
    if inner:
        value = given.value
        for part in reversed(inner):
            value = {part: value}
        below = layer.get(section, {}).get(name)
        given = Given(_laid_over(below and below.value, value))
    layer.setdefault(section, {})[name] = given


def _parse(typed: str) -> Given:
    """A TOML value, `none`, a number as people write it (.5), or a bare word; ValueError: broken TOML."""
    if typed == "none":
        return Given(None, text=typed)
    if re.fullmatch(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?", typed):
        return Given(float(typed), text=typed)
    try:
        # Inside brackets a comment or a second value cannot be swallowed silently.
        document = tomllib.loads(f"value = [{typed}]")
        if document.keys() == {"value"} and len(document["value"]) == 1 and not typed.endswith(","):
            return Given(document["value"][0], text=None if typed[0] in "\"'" else typed)
    except ValueError as error:
        if typed[:1] in ("[", "{", '"', "'"):
            raise ValueError(re.sub(r" \(at .*", "", str(error))) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return Given(typed, text=typed)


# ---- building and checking


def _build(preset: str, layer: Layer, faults: list[str], *, complete: bool = True, strict: bool = False) -> Config:
    """Convert every value; give the config or raise ConfigError with all faults, one on each line.

    Not `complete`: the preset or file could not be read, so what is missing is no fault of its own.
    `strict` is for JSON, whose types are already exact: no `1e6` for an integer, no word for none.
    """
    algorithm = _algorithm(layer.get("algorithm", {}).get("name"), faults, complete)
    wrong: set[str] = set()
    built: dict[str, Any] = {}
    for section in SECTIONS:
        struct = algorithm if section == "algorithm" else _struct(section)
        if struct is None:
            continue
        declared, values = fields(struct), {}
        for name, given in layer.get(section, {}).items():
            if (section, name) == ("algorithm", "name"):
                continue
            path = f"{section}.{name}"
            try:
                if name not in declared:
                    raise ConfigError(_unknown(path, given.where, struct))
                values[name] = converted(path, declared[name], given, strict)
            except ConfigError as error:
                faults.append(str(error))
                wrong.add(path)
        built[section] = struct(**values)
    if complete and algorithm is not None:
        config = Config(preset=preset, **built)
        # A check that reads a knob already reported would only repeat the fault in other words.
        faults.extend(text for reads, text in _crossed(config) if not wrong & reads)
        if not faults:
            return config
    # What the user typed may hold bytes that are not text; the message must be printable all the same.
    raise ConfigError("\n".join(dict.fromkeys(faults)).encode("utf-8", "backslashreplace").decode())


def check(config: Config) -> list[str]:
    """The faults between knobs that are each valid alone."""
    return [text for _, text in _crossed(config)]


def _crossed(config: Config) -> Iterator[tuple[set[str], str]]:
    """Each fault between knobs, after the knobs it depends on."""
    env, run = config.env, config.run
    if not env.id:
        yield {"env.id"}, "env.id is not set: add env.id=..., as in env.id=CartPole-v1"
    yield from config.algorithm.faults(config.network, env.lanes, env.lane_envs, run.steps)


def _algorithm(given: Given | None, faults: list[str], complete: bool) -> type[AlgorithmConfig] | None:
    valid = f"expected one of {', '.join(ALGORITHMS)}"
    if given is None:
        if complete:
            faults.append(f"algorithm.name is not set: {valid}")
        return None
    name = given.value
    if not isinstance(name, str) or name not in ALGORITHMS:
        close = nearest(str(name), ALGORITHMS)
        faults.append(f"algorithm.name = {show(name)}{given.where}: {valid}{close and ';' + close}")
        return None
    return ALGORITHMS[name]


def _unknown(path: str, where: str = "", struct: type[msgspec.Struct] | None = None) -> str:
    """The fault of a key whose section, or (given its struct) whose name within the section, is unknown."""
    section, _, name = path.partition(".")
    if struct is None:
        valid = f"the sections are {', '.join(SECTIONS)}"
        close = difflib.get_close_matches(section, SECTIONS, n=1)
        guesses = [f"{word}.{name}".rstrip(".") for word in close]
    else:
        known = [*(["name"] if section == "algorithm" else []), *fields(struct)]
        valid = f"valid in {section}: {', '.join(known)}"
        guesses = [f"{section}.{word}" for word in difflib.get_close_matches(name, known, n=1)]
    # The right name in the wrong section, or in none: `lr=3e-4`.
    guesses += [f"{other}.{word}" for other in SECTIONS for word in _names(other) if word == (name or section)]
    guesses = [guess for guess in guesses if guess != path]  # one of another algorithm's
    close_text = f" did you mean {guesses[0]!r}?" if guesses else ""
    return f"unknown key {path!r}{where};{close_text} {valid}"


def _struct(section: str) -> type[msgspec.Struct]:
    struct: type[msgspec.Struct] = get_type_hints(Config)[section]
    return struct


def _names(section: str) -> list[str]:
    structs = ALGORITHMS.values() if section == "algorithm" else [_struct(section)]
    return [name for struct in structs for name in fields(struct)]


# ---- showing and shipping


def knobs(config: Config) -> list[Knob]:
    """Every knob of the config, in the order of their declaration."""
    listed = []
    for section in SECTIONS:
        struct: msgspec.Struct = getattr(config, section)
        if section == "algorithm":
            name = next(name for name, kind in ALGORITHMS.items() if isinstance(struct, kind))
            valid = f"one of {', '.join(map(show, ALGORITHMS))}"
            listed.append(Knob("algorithm.name", "choice", name, name, "how it learns", valid, False))
        for name, field in fields(type(struct)).items():
            value, (kind, valid) = getattr(struct, name), described(field.info)
            changed = value != field.default
            listed.append(Knob(f"{section}.{name}", kind, value, field.default, field.doc, valid, changed))
    return listed


def to_json(config: Config) -> bytes:
    """The same config always gives the same bytes."""
    return msgspec.json.encode(config, order="deterministic")


def from_json(payload: bytes) -> Config:
    """The config back from `to_json`, for bytes nobody vouches for: ConfigError on anything wrong.

    A knob that is missing takes its default, so that runs recorded before the knob existed can be read.
    """
    faults: list[str] = []
    try:
        document = msgspec.json.decode(payload, type=dict[str, Any])
        preset = document.pop("preset", None)
        if not isinstance(preset, str) or not is_utf8(preset):
            faults.append(f"preset = {show(preset)}: expected text")
        return _build(str(preset), _layer(document, "", faults), faults, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not a config in JSON: {error}") from error
