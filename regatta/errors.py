"""Every error Regatta raises on purpose, with the exit code the command ends with.

RegattaError (70)
├── ConfigError (64)        a knob, preset, override or config file is wrong
├── UsageError (64)         the command or call itself is wrong: options that exclude each other, unsafe binds
├── EnvError (65)           the environment cannot be made, has an unsupported space, or keeps failing
├── RunNotFound (66)        no run, or more than one, answers to that name
├── StoreError (74)         the store cannot be read or written
│   └── NotFound            that key is not there
├── CheckpointError (66)    no checkpoint of the run can be trusted
├── CodecError (76)         bytes that are not one of our frames
├── TransportError (69)     the learner or the workers cannot be reached
│   ├── Refused (77)        the other end does not accept our token
│   └── ConnectionLost      the session with the other end is over
├── NonFinite (71)          the update keeps producing NaN or infinity
└── Interrupted (130)       Ctrl-C or SIGTERM; a checkpoint was saved
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RegattaError(Exception):
    """The root: anything Regatta says on purpose."""

    exit_code = 70


class ConfigError(RegattaError):
    exit_code = 64


class UsageError(RegattaError):
    exit_code = 64


class EnvError(RegattaError):
    exit_code = 65


class RunNotFound(RegattaError):
    exit_code = 66


class StoreError(RegattaError):
    exit_code = 74


class NotFound(StoreError):
    pass


class CheckpointError(RegattaError):
    exit_code = 66


class CodecError(RegattaError):
    exit_code = 76


class TransportError(RegattaError):
    exit_code = 69


class Refused(TransportError):
    exit_code = 77


class ConnectionLost(TransportError):
    pass


class NonFinite(RegattaError):
    exit_code = 71


class Interrupted(RegattaError):
    exit_code = 130


def nearest(word: str, valid: Iterable[str]) -> str:
    """' did you mean 'x'?' when something close exists, else nothing."""
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f" did you mean {close[0]!r}?" if close else ""
