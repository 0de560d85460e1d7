"""Regatta: distributed reinforcement learning. One learner, any number of workers, the same answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regatta.assemble import evaluate, load_run, resume, train
    from regatta.errors import RegattaError

__version__ = "0.1.0"
__all__ = ["RegattaError", "evaluate", "load_run", "resume", "train"]

_HOMES = {"RegattaError": "regatta.errors"}


def __getattr__(name: str) -> Any:
    """Names load on first use, so that the command line answers `--help` without NumPy or Gymnasium."""
    if name not in __all__:
        raise AttributeError(f"module 'regatta' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "regatta.assemble")), name)
