"""One vector for all parameters: what optimisers, snapshots and evolution handle, and the named arrays in it."""

from __future__ import annotations

import math
from typing import Any

from regatta.types import Array, Arrays


class Layout:
    """Where each named array lies in the vector; names in sorted order. Observation statistics are no parameters."""

    def __init__(self, arrays: Arrays) -> None:
        self.names = sorted(name for name in arrays if not name.startswith("stats/"))
        self.shapes = {name: arrays[name].shape for name in self.names}
        self.slices: dict[str, slice] = {}
        start = 0
        for name in self.names:
            size = math.prod(self.shapes[name])
            self.slices[name] = slice(start, start + size)
            start += size
        self.size = start

    def flatten(self, xp: Any, arrays: Any) -> Any:
        return xp.concatenate([arrays[name].reshape(-1) for name in self.names])

    def split(self, vector: Any) -> Any:
        """Named views of `vector`."""
        return {name: vector[self.slices[name]].reshape(self.shapes[name]) for name in self.names}

    def stacked(self, matrix: Array) -> Arrays:
        """Named views of the rows of `matrix` [K, P], for `x @ w + b` with a row of its own for each x [K, 1, D].

        Matrices are [K, D, H] and vectors [K, 1, H].
        """
        views = {}
        for name, cut in self.slices.items():
            shape = self.shapes[name]
            views[name] = matrix[:, cut].reshape(len(matrix), *((1, *shape) if len(shape) < 2 else shape))
        return views
