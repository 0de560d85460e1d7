"""What a store is: keys to bytes. A folder and a bucket behave alike; callers never ask which one they have.

Cheap to import: the library behind a store loads when one is opened. This module knows no RL and no arrays.
"""

from __future__ import annotations

import os
import re
from typing import Protocol

from regatta.errors import StoreError

_STAGED = re.compile(r"#\d+$")  # how a folder store names a file that is not complete yet


class Store(Protocol):
    """Keys are relative paths with `/` between their parts. Every verb raises StoreError when it cannot."""

    @property
    def location(self) -> str:
        """Where this is, for people; never with credentials."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write or replace, atomically: a reader sees the old bytes or the new ones, never a mixture."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Write if the key is free; False, and nothing changed, if it is taken. One of many callers wins."""
        ...

    def get(self, key: str) -> bytes:
        """The bytes; NotFound if there are none."""
        ...

    def folders(self, prefix: str = "") -> list[str]:
        """Names (not keys) of the folders directly below `prefix`, sorted. Empty ones may be among them."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """All keys below the folder `prefix`, at any depth, sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove; a key that is not there is no error."""
        ...

    def sweep(self, prefix: str) -> int:
        """Remove what killed writers left unfinished below `prefix`; how many. For the only writer there."""
        ...


def check_key(key: str) -> str:
    """The key, if it is one every kind of store can hold."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise StoreError(f"{key!r} is no key: it must be relative, without empty parts, '.' or '..'")
    if "\\" in key or not key.isprintable():
        raise StoreError(f"{key!r} is no key: backslashes and unprintable characters are not allowed")
    if any(_STAGED.search(part) for part in parts):
        raise StoreError(f"{key!r} is no key: names ending in # and digits are taken for unfinished writes")
    return key


def is_staged(name: str) -> bool:
    """Whether a file of this name is an unfinished write of a folder store."""
    return _STAGED.search(name) is not None


def default_location() -> str:
    """Where runs are kept unless told otherwise: $REGATTA_STORE, or ./runs."""
    return os.environ.get("REGATTA_STORE") or "./runs"


def open_store(location: str) -> Store:
    """A folder, s3://, gs:// or az:// URL, or `memory:` (a fresh one, gone with the process).

    A folder that does not exist reads as empty and is made by the first write. Buckets take their credentials
    from the environment variables and metadata services their vendors document.
    """
    from regatta.store.objects import open_objects

    return open_objects(location)
