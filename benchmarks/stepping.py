"""An environment stepped with random actions in several processes, and nothing else; run by speed.py.

    python stepping.py '{"env": "CartPole-v1", "kwargs": {}, "seed": 0, "steps": 100000, "processes": 2}'

It is made and stripped of its outer wrappers as Regatta does it, so nothing that trains in it can step it faster.
The clock starts when every process has its environment and its actions, and stops when the last has taken its steps.
The last line of the output is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from typing import Any

ACTIONS = 1000  # drawn before the clock starts, and taken over and over


def step(work: dict[str, Any], number: int, steps: int, ready: Any, results: Any) -> None:
    from regatta.rollout import envs

    stepper = envs.bare(envs.make(envs.EnvConfig(id=work["env"], kwargs=work["kwargs"])))
    env, limit = stepper.env, stepper.limit or 2**62
    seed = work["seed"] * work["processes"] + number
    env.action_space.seed(seed)
    actions = [env.action_space.sample() for _ in range(ACTIONS)]
    env.reset(seed=seed)
    ready.wait()
    started = time.monotonic()
    episodes = length = 0
    for action in itertools.islice(itertools.cycle(actions), steps):
        _, _, terminated, truncated, _ = env.step(action)
        length += 1
        if terminated or truncated or length >= limit:
            env.reset()
            episodes += 1
            length = 0
    results.put((started, time.monotonic(), episodes))
    env.close()


def main() -> None:
    work = json.loads(sys.argv[1])
    count, steps = work["processes"], work["steps"]
    shares = [steps * (k + 1) // count - steps * k // count for k in range(count)]
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(count), context.SimpleQueue()
    processes = [
        context.Process(target=step, args=(work, number, share, ready, results), daemon=True)
        for number, share in enumerate(shares)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a stepping process failed")
    started, ended, episodes = zip(*(results.get() for _ in processes), strict=True)
    seconds = max(ended) - min(started)
    figures = {"steps": steps, "episodes": sum(episodes), "seconds": seconds, "steps_per_s": steps / seconds}
    print(json.dumps({**figures, "processes": count}))


if __name__ == "__main__":
    main()
