"""How long evolution's gradient takes beside reading the same noise once from memory.

    python benchmarks/es_update.py
    python benchmarks/es_update.py --parameters 1000000 --members 200

Both go over the slices of a generation's mirrored pairs. Times are the best of several rounds, alternating, of one
thread's processor time: other work on the machine then counts for little. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_limits

from regatta.algorithms.es import centred_ranks
from regatta.policies.noise import NoiseTable


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=166_000)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    table = NoiseTable(0, options.parameters)
    offsets, _ = table.members(0, 0, options.members, True)
    scores = np.random.default_rng(0).standard_normal(options.members)

    def read() -> None:
        for offset in offsets[::2]:
            table.slice(offset).max()  # faster than a sum, so nearer to reading alone

    def gradient() -> None:
        weights = centred_ranks(scores)
        table.combine(offsets[::2], weights[::2] - weights[1::2])

    best = {"read_s": float("inf"), "gradient_s": float("inf")}
    with threadpool_limits(1):
        for _ in range(options.rounds):
            for name, work in (("read_s", read), ("gradient_s", gradient)):
                best[name] = min(best[name], seconds(work))
    ratio = best["gradient_s"] / best["read_s"]
    print(f"{options.parameters} parameters, {options.members} members in pairs")
    print(f"reading the noise once  {best['read_s'] * 1e3:7.1f} ms")
    print(f"the gradient            {best['gradient_s'] * 1e3:7.1f} ms, {ratio:.2f} times as long")
    print(json.dumps(best | {"ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
