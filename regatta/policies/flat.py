"""One vector for all parameters: what optimisers, snapshots and evolution handle, and the named arrays in it."""

from __future__ import annotations

import math
from typing import Any

from regatta.types import Arrays


class Layout:
    """Where each named array lies in the vector; names in sorted order."""

    def __init__(self, arrays: Arrays) -> None:
        self.names = sorted(arrays)
        self.shapes = {name: arrays[name].shape for name in self.names}
        self.slices: dict[str, slice] = {}
        start = 0
        for name in self.names:
            size = math.prod(self.shapes[name])
            self.slices[name] = slice(start, start + size)
            start += size

    def flatten(self, xp: Any, arrays: Any) -> Any:
        return xp.concatenate([arrays[name].reshape(-1) for name in self.names])

    def split(self, vector: Any) -> Any:
        """Named views of `vector`."""
        return {name: vector[self.slices[name]].reshape(self.shapes[name]) for name in self.names}
