"""Policy gradients from rollouts of other processes: two trainers publish, three readers play.

    python examples/rollouts.py     # it starts its own cluster

Each rollout process reads the newest version of the policy, plays with it, and sends what it did to the trainers. It has
no rank. Reader 1 is killed at half time, and reader 2 is slow. The trainers neither wait for a reader nor notice, and
print how many versions old the rollouts of each were. The trainers are threads of one process: there is no worker to kill.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

import torch

import kvps.torch

CONTEXTS, ACTIONS, PLAYS = 16, 8, 128
RECORD = struct.Struct(f"<qq{PLAYS}B{PLAYS}B")
"""A rollout: its reader, the version, contexts and actions. One write to a pipe, since it is below 4096 bytes."""
READERS, KILLED, SLOW = 3, 1, 2
GIVE_UP_S = 60.0


def make_policy() -> torch.nn.Module:
    """Return a policy: scores of all actions in each context."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(CONTEXTS, 32), torch.nn.Tanh(), torch.nn.Linear(32, ACTIONS)
    )


def reward_of(contexts: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return 1 for the right action in a context, else 0."""
    return (actions == (3 * contexts + 1) % ACTIONS).float()


def play(reader: int, scheduler: str, keys: str | None, pipes: list[int]) -> None:
    """Play with the newest policy until the job is over."""
    torch.set_num_threads(1)
    policy, turn = make_policy(), 0
    torch.manual_seed(reader)
    with kvps.subscribe("policy", scheduler, keys) as versions:
        while True:
            version = versions.wait(timeout=GIVE_UP_S)
            versions.load(policy)
            contexts = torch.randint(CONTEXTS, (PLAYS,))
            with torch.no_grad():
                actions = torch.distributions.Categorical(logits=policy(contexts)).sample()
            record = RECORD.pack(reader, version, *contexts.tolist(), *actions.tolist())
            os.write(pipes[turn % len(pipes)], record)  # blocks while the trainer has enough
            turn += 1
            if reader == SLOW:
                time.sleep(0.2)


def train(rank: int, pipe: int, readers: list[subprocess.Popen[bytes]], steps: int) -> dict[str, list[float]]:
    """Train on what the readers play; return rewards, and for each reader the ages of its rollouts."""
    policy, kv = make_policy(), kvps.create("dist_sync", name="readers")
    trainer = torch.optim.Adam(policy.parameters(), lr=0.02)
    optimizer = kvps.torch.DistributedOptimizer(trainer, policy)
    newest = kv.publish("policy", policy)
    seen: dict[str, list[float]] = {"reward": []}
    for step in range(steps):
        if not select.select([pipe], [], [], GIVE_UP_S)[0]:
            raise TimeoutError("no reader plays any more")
        reader, version, *numbers = RECORD.unpack(os.read(pipe, RECORD.size))
        contexts, actions = torch.tensor(numbers).view(2, PLAYS)
        rewards = reward_of(contexts, actions)
        chosen = policy(contexts).log_softmax(1).gather(1, actions[:, None])[:, 0]
        optimizer.zero_grad()
        (-(rewards - rewards.mean()) * chosen).mean().backward()
        optimizer.step()
        seen.setdefault(f"reader {reader}", []).append(newest - version)
        seen["reward"].append(rewards.mean().item())
        newest = kv.publish("policy", policy)
        if rank == 0 and step == steps // 2:
            readers[KILLED].kill()
        if rank == 0 and (step + 1) % max(1, steps // 5) == 0:
            print(
                f"step {step + 1:4}  version {newest:4}  reward {sum(seen['reward'][-20:]) / 20:.2f}",
                flush=True,
            )
    kv.close()
    return seen


def main(arguments: list[str] | None = None) -> int:
    """Start a cluster and the readers, train, and print what came of it."""
    parser = argparse.ArgumentParser(description="Train a policy on the rollouts of other processes.")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--min-reward", type=float, default=0.7)
    parser.add_argument("--reader", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scheduler", help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    parser.add_argument("--pipes", type=int, nargs="*", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.reader is not None:
        play(flags.reader, flags.scheduler, flags.keys, flags.pipes)
        return 0
    ends = [os.pipe() for _ in range(2)]
    writers = [write for _, write in ends]
    for write in writers:  # room for 15 rollouts: more would only grow old there
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    readers: list[subprocess.Popen[bytes]] = []
    try:
        with kvps.LocalCluster(workers=2, servers=2) as cluster:
            keys = ["--keys", cluster.keys] if cluster.keys else []
            for reader in range(READERS):
                words = [sys.executable, __file__, "--reader", str(reader), "--scheduler", cluster.scheduler]
                command = [*words, *keys, "--pipes", *map(str, writers)]
                readers.append(subprocess.Popen(command, pass_fds=writers))
            seen = cluster.run(lambda rank: train(rank, ends[rank][0], readers, flags.steps))
            states = [reader.poll() for reader in readers]
    finally:
        for process in readers:
            process.kill()
            process.wait()
        for pair in ends:
            for end in pair:
                os.close(end)
    for reader, state in enumerate(states):
        ages = [age for one in seen for age in one.get(f"reader {reader}", [])]
        how = "killed" if state is not None else "slow" if reader == SLOW else "alive"
        mean = sum(ages) / max(1, len(ages))
        print(f"reader {reader} ({how}): {len(ages)} rollouts, on average {mean:.1f} versions old")
    first, last = (
        sum(part) / len(part)
        for part in (
            [r for one in seen for r in one["reward"][:20]],
            [r for one in seen for r in one["reward"][-20:]],
        )
    )
    print(f"reward {first:.2f} at first, {last:.2f} at last")
    return 0 if last >= flags.min_reward else 1


if __name__ == "__main__":
    sys.exit(main())
