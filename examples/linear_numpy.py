"""Linear regression with numpy alone: a store needs no model, no autograd and no Trainer.

    python examples/linear_numpy.py                                  # one process
    kvps-launch -n 3 -s 2 -- python examples/linear_numpy.py         # 3 workers, 2 servers

Each worker has examples that no other one has. In each round it pushes the gradient of its own
examples; the servers add the gradients up, take the step, and send the new weights back.

Add ``--max-restarts 2`` to kvps-launch: a worker that is killed is started again, and asks for the round of the others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import kvps

FEATURES, EXAMPLES, BATCH = 20, 2000, 100
NOISE = 0.1


def main(arguments: list[str] | None = None) -> int:
    """Find the weights that made the data; return the exit code."""
    parser = argparse.ArgumentParser(description="Linear regression with numpy gradients.")
    parser.add_argument("--store", default="dist_sync", help="any store of kvps.create")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the distance")
    flags = parser.parse_args(arguments)

    true_weights = np.random.default_rng(0).normal(size=FEATURES)  # the same on every worker
    with kvps.create(flags.store) as kv:
        mine = np.random.default_rng(1 + kv.rank)
        inputs = mine.normal(size=(EXAMPLES, FEATURES))
        targets = inputs @ true_weights + NOISE * mine.normal(size=EXAMPLES)

        weights = np.zeros(FEATURES)
        distances = []
        # What is pushed is a sum over examples; rescale_grad makes a mean of the total.
        kv.set_optimizer("sgd", lr=flags.lr, rescale_grad=1 / (BATCH * kv.num_workers))
        kv.init("weights", weights)
        start = kv.resume("weights")  # 0, or the round at which a replacement goes on
        kv.pull("weights", out=weights)
        for number in range(flags.rounds):
            batch = mine.integers(EXAMPLES, size=BATCH)
            if number < start:
                continue
            errors = inputs[batch] @ weights - targets[batch]
            kv.pushpull("weights", inputs[batch].T @ errors, out=weights)
            distances.append(float(np.linalg.norm(weights - true_weights)))
            if kv.rank == 0 and (number + 1) % (flags.rounds // 5 or 1) == 0:
                print(f"round {number + 1:4}  distance to the true weights {distances[-1]:.4f}")
        if flags.plot and kv.rank == 0:
            from digits import plot  # draws by matplotlib, if it is there

            axes = {"ylabel": "distance to the true weights", "xlabel": "round"}
            plot({"distance": distances}, flags.plot, "Linear regression", **axes)

    found = np.linalg.norm(weights - true_weights) < NOISE
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
