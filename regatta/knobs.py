"""One knob: its declaration read back from the struct, what someone wrote turned into its type, all in words.

A knob is `name: Annotated[type, Meta(range, description)] = default` in some frozen struct. This module knows how
to read, check and describe such a thing; which structs there are is config.py's business.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import inspect

from regatta.errors import ConfigError, nearest

DEEPEST = 16  # levels of nesting in a knob's value


class Given(NamedTuple):
    """A value as someone wrote it. `text` is what was typed on the command line, unless it was quoted."""

    value: Any
    where: str = ""
    text: str | None = None


class Field(NamedTuple):
    annotation: Any
    info: inspect.Type
    doc: str
    default: Any


@functools.cache
def fields(struct: type[msgspec.Struct]) -> dict[str, Field]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    annotations = get_type_hints(struct, include_extras=True)
    found = {}
    for field in info.fields:
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        assert default is not msgspec.NODEFAULT, f"{struct.__name__}.{field.name} needs a default"
        found[field.name] = Field(annotations[field.name], field.type, _doc(field.type), default)
    return found


def converted(path: str, field: Field, given: Given, strict: bool) -> Any:
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
    elif isinstance(value, str) and not is_utf8(value):
        yield path, value, "UTF-8 text"
    elif not isinstance(value, dict | list | float | int | str | None):
        yield path, value, "a number, text, true, false, a list or a table; quote dates and times"


def is_utf8(text: str) -> bool:
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
    kind, valid = described(info)
    if kind == "choice":
        return valid
    return f"{kind}, {valid}" if valid else kind


def described(info: inspect.Type) -> tuple[str, str]:
    """The knob's type and its valid range, in words."""
    match info:
        case inspect.Metadata():
            return described(info.type)
        case inspect.UnionType():
            # None is said last: "number or none".
            members = sorted(info.types, key=lambda member: isinstance(member, inspect.NoneType))
            said = [described(member) for member in members]
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
            kind, each = described(info.item_type)
            ranges = [f"each {each}"] if each else []
            ranges += [f"at least {info.min_length}"] if info.min_length else []
            ranges += [f"at most {info.max_length}"] if info.max_length else []
            return f"list of {kind}", ", ".join(ranges)
        case inspect.DictType():
            return "table", ""
        case inspect.NoneType():
            return "none", ""
    return "any value", ""


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
