"""What is written down when a run is created: where, with what, by which command. Never a secret."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

from regatta.runs.layout import Facts, Json, iso, utc_now

LIBRARIES = (
    *(
        "regatta-rl",
        "jax",
        "jaxlib",
        "optax",
        "numpy",
        "gymnasium",
        "msgspec",
        "obstore",
        "safetensors",
        "pyzmq",
    ),
    *("ale-py", "box2d", "envpool", "mujoco", "nevergrad", "ray", "redis", "vizdoom"),
)
HIDDEN = "***"
_SECRET = re.compile(r"(^|[-_.])(token|password|passwd|secret|credentials?|api[-_]key|access[-_]key)$", re.I)
_USERINFO = re.compile(r"(?<=://)[^/\s@]+@")


def gather(preset: str, config: dict[str, Json], command: list[str]) -> Facts:
    """All but the id."""
    return Facts(
        id="",
        preset=preset,
        created=iso(utc_now()),
        command=hide_in_command(command),
        versions=_versions(),
        platform=platform.platform(),
        cpu=_cpu(),
        config=hide(config),
    )


def hide(value: Json) -> Json:
    """The same JSON without passwords: in URLs, and under keys that are called so."""
    if isinstance(value, str):
        return _USERINFO.sub(f"{HIDDEN}@", value)
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(item, str) and item and _SECRET.search(key) else hide(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [hide(item) for item in value]
    return value


def hide_in_command(command: list[str]) -> list[str]:
    """`--token x`, `--token=x`, `key.password=x` and `redis://:x@host` without the x."""
    shown: list[str] = []
    secret_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        if secret_next:
            shown.append(HIDDEN)
        elif equals and _SECRET.search(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(hide(word))
        secret_next = not secret_next and word.startswith("-") and not equals and bool(_SECRET.search(word))
    return shown


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        model = platform.processor() or model
    return f"{model}, {os.cpu_count() or 1} cores"
