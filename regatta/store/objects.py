"""Stores over `obstore`: a folder, S3, Google Cloud Storage, Azure, or memory. The only user of obstore."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore, MemoryStore, from_url

from regatta.errors import NotFound, StoreError, UsageError
from regatta.store.base import Store, check_key, is_staged

BUCKETS = ("s3", "gs", "az")
# A saver retries by itself and a person waits at most this long for "cannot reach the bucket".
_RETRY = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
_OS_ERROR = re.compile(r"([^:]+) \(os error \d+\)$")
_QUERY = re.compile(r"\?\S+")  # Azure signs in the query string; it must not reach a log

_T = TypeVar("_T")


def open_objects(location: str) -> Store:
    """See `base.open_store`."""
    if location in ("memory:", "memory://"):
        return ObjectStore("memory:", MemoryStore())
    scheme, separator, rest = location.partition("://")
    if not separator:
        return FolderStore(location)
    if scheme == "file":
        return FolderStore(rest)
    if scheme not in BUCKETS:
        valid = ", ".join(f"{bucket}://" for bucket in BUCKETS)
        raise UsageError(f"unknown kind of store {scheme + '://'!r}; use a folder, or a URL with {valid}")
    url = urlsplit(location)
    shown = f"{scheme}://{url.netloc.rpartition('@')[2]}{url.path}".rstrip("/")
    try:
        return ObjectStore(shown, from_url(location, retry_config=_RETRY))
    except (BaseError, OSError, ValueError) as error:
        raise StoreError(f"cannot open store {shown}: {_reason(error)}") from error


class ObjectStore:
    """Keys in something obstore can talk to."""

    _multipart: bool | None = None  # obstore decides by size

    def __init__(self, location: str, objects: Any) -> None:
        self._location = location
        self._objects = objects

    @property
    def location(self) -> str:
        return self._location

    def __repr__(self) -> str:
        return f"open_store({self._location!r})"

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        objects = self._writable()
        self._do("write", "to", key, lambda: obstore.put(objects, key, data, **_multipart_option(self._multipart)))

    def put_new(self, key: str, data: bytes) -> bool:
        check_key(key)
        objects = self._writable()

        def create() -> bool:
            try:
                obstore.put(objects, key, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        return self._do("write", "to", key, create)

    def get(self, key: str) -> bytes:
        check_key(key)
        objects = self._readable()
        if objects is None:
            raise NotFound(f"no {key} in {self._location}")
        return self._do("read", "from", key, lambda: bytes(obstore.get(objects, key).bytes()))

    def folders(self, prefix: str = "") -> list[str]:
        if prefix:
            check_key(prefix)
        objects = self._readable()
        if objects is None:
            return []
        found = self._do("list", "in", prefix, lambda: obstore.list_with_delimiter(objects, prefix or None))
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    def list(self, prefix: str = "") -> list[str]:
        if prefix:
            check_key(prefix)
        objects = self._readable()
        if objects is None:
            return []
        rows = self._do("list", "in", prefix, lambda: obstore.list(objects, prefix or None).collect())
        return sorted(row["path"] for row in rows)

    def delete(self, key: str) -> None:
        check_key(key)
        objects = self._readable()
        if objects is None:
            return
        try:
            self._do("delete", "from", key, lambda: obstore.delete(objects, key))
        except NotFound:
            pass

    def sweep(self, prefix: str) -> int:
        return 0  # a bucket shows an object only when it is complete

    def _readable(self) -> Any | None:
        return self._objects

    def _writable(self) -> Any:
        return self._objects

    def _do(self, verb: str, preposition: str, key: str, call: Callable[[], _T]) -> _T:
        what = f"cannot {verb} {key or 'keys'} {preposition} {self._location}"
        try:
            return call()
        except FileNotFoundError as error:
            raise NotFound(f"no {key} in {self._location}") from error
        except (BaseError, OSError, ValueError) as error:
            raise StoreError(f"{what}: {_reason(error)}") from error


class FolderStore(ObjectStore):
    """A folder, opened lazily: looking for runs where there are none must not leave a folder behind."""

    _multipart = False  # one staged file, removed again when the write fails

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser().absolute()
        super().__init__(str(self._path), None)

    def put(self, key: str, data: bytes) -> None:
        if not self._put_nameless(check_key(key), data, replace=True):
            super().put(key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        written = self._put_nameless(check_key(key), data, replace=False)
        return super().put_new(key, data) if written is None else written

    def _put_nameless(self, key: str, data: bytes, *, replace: bool) -> bool | None:
        """Write to a file without a name, which a killed writer cannot leave behind, then give it one.

        None where the system or the file system has no such files; False if the key exists and may not be replaced.
        """
        flag = getattr(os, "O_TMPFILE", None)
        if flag is None:
            return None
        self._writable()
        path = self._path / key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(path.parent, flag | os.O_WRONLY, 0o644)
            except OSError:
                return None
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
                # A link cannot replace a file; a rename can, so the name goes through a staged one for an instant.
                name = path if not replace else path.with_name(f"{path.name}#{os.getpid()}{threading.get_ident()}")
                descriptors = os.open("/proc/self/fd", os.O_RDONLY)
                try:  # only with a folder's descriptor does Python follow the link to the file itself
                    os.link(str(fd), name, src_dir_fd=descriptors, follow_symlinks=True)
                finally:
                    os.close(descriptors)
            if replace:
                os.rename(name, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise StoreError(f"cannot write {key} to {self._location}: {_reason(error)}") from error
        return True

    def sweep(self, prefix: str) -> int:
        removed = 0
        for folder, _, names in os.walk(self._path / check_key(prefix)):
            for name in filter(is_staged, names):
                try:
                    Path(folder, name).unlink(missing_ok=True)
                except OSError as error:
                    raise StoreError(f"cannot sweep {prefix} in {self._location}: {_reason(error)}") from error
                removed += 1
        return removed

    def _readable(self) -> Any | None:
        if self._objects is None and self._path.exists():
            self._open()
        return self._objects

    def _writable(self) -> Any:
        if self._objects is None or not self._path.exists():
            self._open()
        return self._objects

    def _open(self) -> None:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._objects = LocalStore(self._path, automatic_cleanup=True)
        except (BaseError, OSError) as error:
            raise StoreError(f"cannot open store {self._location}: {_reason(error)}") from error


def _multipart_option(multipart: bool | None) -> dict[str, bool]:
    return {} if multipart is None else {"use_multipart": multipart}


def _reason(error: Exception) -> str:
    """The cause in a few words: obstore's messages go on with pages of debugging output."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = str(error).split("\n", 1)[0]
    system = _OS_ERROR.search(first)
    if system:
        return system.group(1).strip()
    return _QUERY.sub("", re.sub(r"^Generic \w+ error: ", "", first)).strip() or type(error).__name__
