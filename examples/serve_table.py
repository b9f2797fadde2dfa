"""A service that answers from embedding tables, while workers train them.

    python examples/serve_table.py     # it starts its own cluster

Two workers learn one score for each user: the mean of what is observed. Rank 0 publishes the table
every few steps. The service is a process without a rank: it takes each newest version, and looks up rows in its own
memory. All rows of an answer are of one version, and a user that nobody has seen has a score, too. The workers are
threads of one process, so there is no worker to kill.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

import kvps

USERS, STRANGER = 1000, 2**40
GIVE_UP_S = 60.0


def truth(users: torch.Tensor) -> torch.Tensor:
    """Return the score that each user should get."""
    return torch.sin(users.float())


def serve(scheduler: str, keys: str | None, last: int) -> int:
    """Answer from the newest version until number ``last``; print how wrong each version is."""
    users, error = torch.arange(USERS), 1.0
    print("the service waits for the first version", flush=True)
    with kvps.subscribe("scores", scheduler, keys) as scores:
        while scores.version is None or scores.version < last:
            version = scores.wait(newer_than=scores.version, timeout=GIVE_UP_S)
            began = time.perf_counter()
            rows = scores.lookup("scores", [*users.tolist(), STRANGER])
            took_ms = (time.perf_counter() - began) * 1e3
            error = (rows[:-1, 0] - truth(users)).abs().mean().item()
            print(
                f"version {version:3}  error {error:.3f}  a stranger's score {rows[-1, 0]:.3f}  {took_ms:.1f} ms"
            )
    return 0 if error < 0.3 else 1


def train(rank: int, steps: int, every: int, pause: float) -> None:
    """Learn scores from what this worker observes, and publish them."""
    torch.manual_seed(rank)
    with kvps.create("dist_sync") as kv:
        table = kv.embedding("scores", 1, init="zeros", optimizer="adagrad", lr=0.5)
        for step in range(1, steps + 1):
            users = torch.randint(USERS, (400,))
            observed = truth(users) + 0.1 * torch.randn(len(users))
            table.push(users, table.pull(users) - observed[:, None])
            time.sleep(pause)  # a model would compute here
            if step % every == 0:
                kv.publish("scores", tables=[table])


def main(arguments: list[str] | None = None) -> int:
    """Start a cluster and the service, and train."""
    parser = argparse.ArgumentParser(description="Serve rows of a table that is trained meanwhile.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two versions")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds of each step")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.serve:
        return serve(flags.serve, flags.keys, flags.steps // flags.every)
    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        command = [sys.executable, __file__, "--serve", cluster.scheduler]
        command += ["--keys", cluster.keys] if cluster.keys else []
        command += ["--steps", str(flags.steps), "--every", str(flags.every)]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert service.stdout is not None
        try:
            print(service.stdout.readline(), end="", flush=True)  # it is ready
            cluster.run(lambda rank: train(rank, flags.steps, flags.every, flags.pause))
            print(service.stdout.read(), end="")
            return service.wait(GIVE_UP_S)
        finally:
            service.kill()
            service.wait()


if __name__ == "__main__":
    sys.exit(main())
