"""From a preset's name, a file and `key.path=value` overrides to one checked `Config`, and to JSON and back.

Knobs are not declared here: each lives in a frozen struct beside the code that reads it. This module merges
the layers (preset, file, overrides; the later wins), converts and checks every value, and reports all faults
at once before anything starts.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import inspect

from regatta.algorithms.ppo import PPOConfig
from regatta.crew import CrewConfig
from regatta.errors import ConfigError, nearest
from regatta.learner import StopConfig
from regatta.policies.networks import NetworkConfig
from regatta.rollout.envs import EnvConfig
from regatta.runs.run import RunConfig

ALGORITHMS: dict[str, type[PPOConfig]] = {"ppo": PPOConfig}
DEEPEST = 16  # levels of nesting in a knob's value
SECTIONS = ("env", "network", "algorithm", "run", "stop", "crew")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything an experiment is, apart from who carries it out."""

    preset: str  # the preset or algorithm it started from; empty for a file that names none
    env: EnvConfig
    network: NetworkConfig
    algorithm: PPOConfig
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


class Given(NamedTuple):
    """A value as someone wrote it. `text` is what was typed on the command line, unless it was quoted."""

    value: Any
    where: str = ""
    text: str | None = None


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
        fields, values = _fields(struct), {}
        for name, given in layer.get(section, {}).items():
            if (section, name) == ("algorithm", "name"):
                continue
            path = f"{section}.{name}"
            try:
                if name not in fields:
                    raise ConfigError(_unknown(path, given.where, struct))
                values[name] = _converted(path, fields[name], given, strict)
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
    env, ppo, run = config.env, config.algorithm, config.run
    if not env.id:
        yield {"env.id"}, "env.id is not set: add env.id=..., as in env.id=CartPole-v1"
    sizes = {"env.lanes", "env.lane_envs", "algorithm.rollout_steps"}
    samples = env.lanes * env.lane_envs * ppo.rollout_steps
    product = (
        f"{samples} samples an iteration (env.lanes {env.lanes} x env.lane_envs {env.lane_envs} x "
        f"algorithm.rollout_steps {ppo.rollout_steps})"
    )
    if samples % ppo.minibatch:
        fits = _nearest_divisor(samples, ppo.minibatch)
        yield (
            sizes | {"algorithm.minibatch"},
            f"algorithm.minibatch = {ppo.minibatch}: it does not divide the {product}; algorithm.minibatch={fits} does",
        )
    if ppo.minibatch == 1 and ppo.normalize_advantages:
        yield (
            {"algorithm.minibatch", "algorithm.normalize_advantages"},
            "algorithm.minibatch = 1: one sample's normalised advantage is always 0: nothing is learnt; "
            "take a larger one or algorithm.normalize_advantages=false",
        )
    if run.steps < samples:
        yield (
            sizes | {"run.steps"},
            f"run.steps = {run.steps}: too few for the {product}; run.steps={samples} is one iteration",
        )


def _nearest_divisor(number: int, start: int) -> int:
    if start >= number:
        return number
    # The bound keeps absurd sizes from searching for ever; 1 always divides.
    for distance in range(min(start, 100_000)):
        for divisor in (start - distance, start + distance):
            if number % divisor == 0:
                return divisor
    return math.gcd(number, start)


def _algorithm(given: Given | None, faults: list[str], complete: bool) -> type[PPOConfig] | None:
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
        known = [*(["name"] if section == "algorithm" else []), *_fields(struct)]
        valid = f"valid in {section}: {', '.join(known)}"
        guesses = [f"{section}.{word}" for word in difflib.get_close_matches(name, known, n=1)]
    # The right name in the wrong section, or in none: `lr=3e-4`.
    guesses += [f"{other}.{word}" for other in SECTIONS for word in _names(other) if word == (name or section)]
    close_text = f" did you mean {guesses[0]!r}?" if guesses else ""
    return f"unknown key {path!r}{where};{close_text} {valid}"


def _names(section: str) -> list[str]:
    structs = ALGORITHMS.values() if section == "algorithm" else [_struct(section)]
    return [name for struct in structs for name in _fields(struct)]


# ---- one knob


class Field(NamedTuple):
    annotation: Any
    info: inspect.Type
    doc: str
    default: Any


def _struct(section: str) -> type[msgspec.Struct]:
    struct: type[msgspec.Struct] = get_type_hints(Config)[section]
    return struct


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, Field]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    annotations = get_type_hints(struct, include_extras=True)
    fields = {}
    for field in info.fields:
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        assert default is not msgspec.NODEFAULT, f"{struct.__name__}.{field.name} needs a default"
        fields[field.name] = Field(annotations[field.name], field.type, _doc(field.type), default)
    return fields


def _converted(path: str, field: Field, given: Given, strict: bool) -> Any:
    value = given.value if strict else _coerced(field.info, given.value, given.text)
    default = f" (default {show(field.default)})"
    for inner, item, reason in _unsound(value):
        expected = f"{_expected(field.info)}: {reason}" if not inner else reason
        raise ConfigError(f"{path}{inner} = {show(item)}{given.where}: expected {expected}{default}")
    try:
        return msgspec.convert(value, field.annotation, strict=True)
    except msgspec.ValidationError as error:
        choices = [str(choice) for choice in _choices(field.info)]
        close = nearest(value, choices) if isinstance(value, str) else ""
        expected = f"{_expected(field.info)}{close and ';' + close}"
        raise ConfigError(f"{path} = {show(value)}{given.where}: expected {expected}{default}") from error


def _coerced(info: inspect.Type, value: Any, text: str | None = None) -> Any:
    """`value` as the knob's type where nothing is lost by it: 1e6 for an integer, "none" for none."""
    match info:
        case inspect.Metadata():
            return _coerced(info.type, value, text)
        case inspect.UnionType():
            if info.includes_none and value in (None, "none"):
                return None
            members = [member for member in info.types if not isinstance(member, inspect.NoneType)]
            return _coerced(members[0], value, text) if len(members) == 1 else value
        case inspect.StrType():
            return value if text is None else text
        case inspect.IntType() | inspect.LiteralType():
            return int(value) if isinstance(value, float) and value.is_integer() else value
        case inspect.VarTupleType() | inspect.ListType() if isinstance(value, list):
            return [_coerced(info.item_type, item) for item in value]
    return value


def _unsound(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any, str]]:
    """What no knob may hold because it would not survive the way through JSON."""
    if isinstance(value, dict | list) and depth == DEEPEST:
        yield path, value, f"at most {DEEPEST} levels of nesting"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unsound(key, f"{path} key")
            yield from _unsound(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unsound(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, value, "a finite number"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path, value, "an integer of at most 64 bits"
    elif isinstance(value, str) and not _is_utf8(value):
        yield path, value, "UTF-8 text"
    elif not isinstance(value, dict | list | float | int | str | None):
        yield path, value, "a number, text, true, false, a list or a table; quote dates and times"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _doc(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata():
            return str((info.extra_json_schema or {}).get("description", "")) or _doc(info.type)
        case inspect.UnionType():
            return next(filter(None, map(_doc, info.types)), "")
    return ""


def _choices(info: inspect.Type) -> list[Any]:
    match info:
        case inspect.Metadata():
            return _choices(info.type)
        case inspect.UnionType():
            return [choice for member in info.types for choice in _choices(member)]
        case inspect.LiteralType():
            return list(info.values)
    return []


def _expected(info: inspect.Type) -> str:
    kind, valid = _described(info)
    if kind == "choice":
        return valid
    return f"{kind}, {valid}" if valid else kind


def _described(info: inspect.Type) -> tuple[str, str]:
    """The knob's type and its valid range, in words."""
    match info:
        case inspect.Metadata():
            return _described(info.type)
        case inspect.UnionType():
            # None is said last: "number or none".
            members = sorted(info.types, key=lambda member: isinstance(member, inspect.NoneType))
            said = [_described(member) for member in members]
            return " or ".join(kind for kind, _ in said), ", ".join(valid for _, valid in said if valid)
        case inspect.IntType() | inspect.FloatType():
            kind = "integer" if isinstance(info, inspect.IntType) else "number"
            bounds = ((">", info.gt), (">=", info.ge), ("<", info.lt), ("<=", info.le))
            return kind, " and ".join(f"{sign} {show(bound)}" for sign, bound in bounds if bound is not None)
        case inspect.LiteralType():
            return "choice", f"one of {', '.join(map(show, info.values))}"
        case inspect.BoolType():
            return "true or false", ""
        case inspect.StrType():
            return "text", ""
        case inspect.VarTupleType() | inspect.ListType():
            kind, each = _described(info.item_type)
            ranges = [f"each {each}"] if each else []
            ranges += [f"at least {info.min_length}"] if info.min_length else []
            ranges += [f"at most {info.max_length}"] if info.max_length else []
            return f"list of {kind}", ", ".join(ranges)
        case inspect.DictType():
            return "table", ""
        case inspect.NoneType():
            return "none", ""
    return "any value", ""


# ---- showing and shipping


def show(value: Any, depth: int = DEEPEST) -> str:
    """The value as one would write it in TOML or in an override."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int() if value.bit_length() > 256:  # Python refuses to print very long integers
            return f"an integer of {value.bit_length()} bits"
        case str():
            return msgspec.json.encode(value.encode("utf-8", "backslashreplace").decode()).decode()
        case list() | tuple() | dict() if not depth:
            return "..."
        case list() | tuple():
            return f"[{', '.join(show(item, depth - 1) for item in value)}]"
        case dict():
            inner = ", ".join(f"{key} = {show(item, depth - 1)}" for key, item in value.items())
            return f"{{{inner}}}"
    return str(value)


def knobs(config: Config) -> list[Knob]:
    """Every knob of the config, in the order of their declaration."""
    listed = []
    for section in SECTIONS:
        struct: msgspec.Struct = getattr(config, section)
        if section == "algorithm":
            name = next(name for name, kind in ALGORITHMS.items() if isinstance(struct, kind))
            valid = f"one of {', '.join(map(show, ALGORITHMS))}"
            listed.append(Knob("algorithm.name", "choice", name, name, "how it learns", valid, False))
        for name, field in _fields(type(struct)).items():
            value, (kind, valid) = getattr(struct, name), _described(field.info)
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
        if not isinstance(preset, str) or not _is_utf8(preset):
            faults.append(f"preset = {show(preset)}: expected text")
        return _build(str(preset), _layer(document, "", faults), faults, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not a config in JSON: {error}") from error
