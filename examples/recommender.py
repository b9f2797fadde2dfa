"""A recommender, trained asynchronously: one slow worker holds nobody up.

    python examples/recommender.py                          # starts its own cluster: 3 workers, 2 servers

The data are real and on every machine: the "users" are the modules, classes and functions of Python's
standard library, the "items" the words of their documentation strings. As recommenders do, the model gives each
user and each item a vector, and learns which words belong to what; a tenth of the words is hidden and
has to be recommended again. Recommending what is popular is the baseline.

Worker 2 sleeps after each step and so is five times as slow as the others. With dist_async each push moves
the weights at once, and the others do not wait; with --store dist_sync all go at its pace.

When a worker is killed the job ends, since this script starts kvps-launch without ``--max-restarts``. With it, as in
``kvps-launch -n 3 -s 2 --max-restarts 2 -- python examples/recommender.py --worker``, the worker goes on.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from kvps.torch import DistributedOptimizer

WIDTH, BATCH, LR, DECAY = 32, 512, 0.02, 1e-4
WORKERS, SERVERS, SLOW = 3, 2, 5.0
FREQUENT = 30
"""Words that are used so often in all are items; and users have some of them."""


def words_of_documents() -> list[set[str]]:
    """Return the words of each documentation string of the standard library; nothing is run."""
    found: list[set[str]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            found.append(set(re.findall(r"[a-z]{3,}", (text or "").lower())))
    return found


def load() -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return pairs (user, item) to train with, pairs to test with, how many users, how many items."""
    documents = words_of_documents()
    uses = Counter(word for words in documents for word in words)
    items = {word: number for number, word in enumerate(sorted(uses)) if uses[word] >= FREQUENT}
    items = {word: number for number, word in enumerate(items)}
    kept = [sorted(items[word] for word in words if word in items) for words in documents]
    users = [words for words in kept if len(words) >= 10]
    pairs = torch.tensor([(user, item) for user, words in enumerate(users) for item in words])
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
    cut = len(pairs) * 9 // 10
    return pairs[order[:cut]], pairs[order[cut:]], len(users), len(items)


class Recommender(nn.Module):
    """A vector for each user and each item, and how popular an item is."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, WIDTH), nn.Embedding(items, WIDTH)
        self.popularity = nn.Parameter(torch.zeros(items))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        """Return a score of every item for each of these users."""
        scores: torch.Tensor = self.users(user) @ self.items.weight.T + self.popularity
        return scores


@torch.no_grad()
def hit_rate(scores: torch.Tensor, train: torch.Tensor, test: torch.Tensor, best: int = 10) -> float:
    """Return the share of hidden items that are among the ``best`` that are recommended.

    Args:
        scores: of each user and item.
        train: pairs that are known, and need no recommendation.
        test: pairs that were hidden.
        best: how many are recommended.
    """
    open_scores = scores.clone()
    open_scores[train[:, 0], train[:, 1]] = -torch.inf
    recommended = open_scores.topk(best).indices[test[:, 0]]
    return (recommended == test[:, 1:]).any(1).float().mean().item()


def train_for(seconds: float, store: str, picture: Path | None = None) -> int:
    """Be one worker for so long; return the exit code."""
    train, test, users, items = load()
    torch.manual_seed(0)
    model = Recommender(users, items)
    adam = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=DECAY)
    optimizer = DistributedOptimizer(adam, model, store, update_on_kvstore=True)
    kv = optimizer.kvstore
    is_slow = kv.num_workers > 1 and kv.rank == kv.num_workers - 1
    generator = torch.Generator().manual_seed(kv.rank)
    columns = (TextColumn("rank 0"), BarColumn(), TimeRemainingColumn())
    loss_now = TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}")
    is_shown = kv.rank == 0 and sys.stdout.isatty()
    kv.barrier()
    begin, steps, seen = time.perf_counter(), 0, []
    with Progress(*columns, loss_now, disable=not is_shown) as bar:
        task = bar.add_task("train", total=seconds, step=0, loss=0.0)
        while (now := time.perf_counter() - begin) < seconds:
            at = time.perf_counter()
            pairs = train[torch.randint(len(train), (BATCH,), generator=generator)]
            loss = F.cross_entropy(model(pairs[:, 0]), pairs[:, 1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            seen.append(loss.item())
            bar.update(task, completed=now, step=steps, loss=seen[-1])
            if is_slow:
                time.sleep((SLOW - 1) * (time.perf_counter() - at))
    if store == "dist_sync":
        kv.join()  # others may have begun another step
    kv.barrier()
    print(f"worker {kv.rank}{' (slow)' if is_slow else ''}: {steps} steps", flush=True)
    if kv.rank != 0:
        return 0
    for name, weight in model.named_parameters():
        kv.pull(name, out=weight.detach())
    with torch.no_grad():
        scores = model(torch.arange(users))
    result = hit_rate(scores, train, test)
    uses = torch.bincount(train[:, 1], minlength=items).float()
    baseline = hit_rate(uses.expand(users, items), train, test)
    print(f"{store}: {len(train):,} pairs of {users:,} users and {items:,} items")
    print(f"hidden items among the first 10: {result:.3f}; popular ones alone {baseline:.3f}")
    if picture:
        from digits import plot  # draws by matplotlib, if it is there

        plot({"loss": seen}, picture, f"A recommender, {store}, rank 0")
    if result <= baseline:
        print("that is no better than what is popular", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Start a cluster, or be a worker of one; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a recommender with one slow worker.")
    parser.add_argument("--store", default="dist_async", help="dist_async, dist_ssp or dist_sync")
    parser.add_argument("--seconds", type=float, default=30.0, help="to train for")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss")
    parser.add_argument("--worker", action="store_true", help="be one worker of a cluster")
    flags = parser.parse_args(arguments)
    if flags.worker:
        return train_for(flags.seconds, flags.store, flags.plot)
    script = [sys.executable, __file__, "--worker", "--store", flags.store]
    launch = [sys.executable, "-m", "kvps.cli.launch", "-n", str(WORKERS), "-s", str(SERVERS), "--"]
    picture = ["--plot", str(flags.plot)] if flags.plot else []
    return subprocess.call([*launch, *script, "--seconds", str(flags.seconds), *picture])


if __name__ == "__main__":
    sys.exit(main())
