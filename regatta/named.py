"""Code by name: `module:function` in a config, and whose word is taken for it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from regatta.errors import ConfigError, UsageError


def look_here() -> None:
    """Console scripts, unlike `python -m`, do not look for modules in the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def function(knob: str, name: str) -> Callable[..., Any]:
    """What `module:function` names, looked for in the current folder first; ConfigError if it is not there."""
    module_name, _, function_name = name.partition(":")
    look_here()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in (module_name, module_name.partition(".")[0]):
            raise
        raise ConfigError(
            f"{knob}: no module {module_name!r} in {os.getcwd()} or among the installed ones; run where it lies, "
            "or install it"
        ) from error
    found: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(found):
        names = [name for name in vars(module) if callable(getattr(module, name)) and not name.startswith("_")]
        raise ConfigError(f"{knob}: {module_name!r} has no callable {function_name!r}; it has {', '.join(names)}")
    return found


def refuse_foreign(knob: str, name: str, modules: Collection[str]) -> None:
    """For a config from a socket or a store: only code that lies in this folder, or is allowed by name, may run.

    Without this, whoever plays the learner or writes to the store could call any function of any installed module.
    """
    module, colon, _ = name.rpartition(":")
    package = module.partition(".")[0]
    here = Path.cwd()
    if colon and package not in modules and not (here / f"{package}.py").exists() and not (here / package).is_dir():
        raise UsageError(
            f"{knob} is {name!r}, as someone else says, and {package!r} is not in {here}; run this where it lies, "
            f"or allow it by name: --allow {package}"
        )
