"""A click model with embedding tables, trained synchronously, asynchronously, and in a hybrid of both.

    kvps-launch -n 2 -s 2 -- python examples/click_model.py           # 2 workers, 2 servers
    python examples/click_model.py                                    # one process
    python examples/click_model.py --serve click_model                # afterwards: no server, no kvps

The data are made on the spot. Each user, item, query and so on has hidden numbers; they give an example
its probability of a click, and a draw says whether it was clicked. So the best AUC is known: that of
these probabilities, the planted optimum.

The model is a small DLRM: a vector from an embedding table for each id, the products of all pairs of vectors,
and a dense network. Three models begin with the same weights. In all-sync, tables and dense network are in
dist_sync. In hybrid, each push of the tables is applied at once, and the dense network has rounds. In
all-async, neither has rounds.

Rank 0 exports the tables of hybrid, and its dense network, as safetensors. From these files ``--serve`` scores
examples. An id without a row has zeros there.

The dense network's optimizer runs on the workers. So a worker that is killed cannot be replaced alone: start
the job again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import kvps
from kvps.torch import DistributedOptimizer, Embedding, EmbeddingCollection

TABLES = {
    **{"user": 2000, "item": 1000, "query": 1500, "page": 500},
    **{"city": 300, "shop": 200, "device": 40, "hour": 24},
}
"""Feature -> how many ids it has in the data; a table of kvps need not know."""
NUMBERS, WIDTH = 6, 8
"""Features that are numbers, and the elements of a row."""
TRAIN, TEST, BATCH = 240_000, 50_000, 1024
TABLE_RATE, DENSE_RATE = 0.05, 2e-3
MODES = {
    "all-sync": ("dist_sync", "dist_sync"),
    "hybrid": ("dist_async", "dist_sync"),
    "all-async": ("dist_async", "dist_async"),
}
"""Mode -> the store of the tables, and that of the dense network."""


class Clicks(NamedTuple):
    """Examples."""

    numbers: torch.Tensor
    """[n, NUMBERS]"""
    ids: torch.Tensor
    """[n, tables]"""
    chances: torch.Tensor
    """[n]: the planted probabilities, which no model sees."""
    clicks: torch.Tensor
    """[n], 0.0 or 1.0."""

    def at(self, rows: torch.Tensor | slice) -> Clicks:
        """Return some of the examples."""
        return Clicks(*[part[rows] for part in self])


def plant(count: int, seed: int) -> Clicks:
    """Return that many examples of one world: other seeds give other examples of the same."""
    world, dice = (torch.Generator().manual_seed(number) for number in (0, seed))
    sizes = torch.tensor(list(TABLES.values()))
    ids = (torch.rand(count, len(sizes), generator=dice) ** 3 * sizes).long()  # some come often
    numbers = torch.randn(count, NUMBERS, generator=dice)
    score = 0.4 * numbers @ torch.randn(NUMBERS, generator=world) - 1.0
    vectors = []
    for at, size in enumerate(TABLES.values()):
        score += 0.4 * torch.randn(size, generator=world)[ids[:, at]]
        vectors.append(torch.randn(size, 4, generator=world)[ids[:, at]])
    score += 0.25 * (vectors[0] * vectors[1]).sum(1)  # which items a user likes
    chances = score.sigmoid()
    return Clicks(numbers, ids, chances, (torch.rand(count, generator=dice) < chances).float())


class Tower(nn.Module):
    """The dense network: numbers and rows in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        count = len(TABLES) + 1
        self.below = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        inputs = count * (count - 1) // 2 + count * WIDTH
        self.above = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.triu_indices(count, count, 1))

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n] from numbers [n, NUMBERS] and rows [n, tables, WIDTH]."""
        vectors = torch.cat([self.below(numbers)[:, None], rows], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.above(torch.cat([vectors.flatten(1), products], 1)).squeeze(1)
        return logits


class ClickModel(nn.Module):
    """Tables in a store, and a dense network in this process."""

    def __init__(self, kv: kvps.KVStore, seed: int) -> None:
        super().__init__()
        recipe = {"init": ("normal", 0.05), "optimizer": "adagrad", "lr": TABLE_RATE}
        self.tables = {
            name: kv.embedding(name, WIDTH, **recipe, seed=1000 * seed + at) for at, name in enumerate(TABLES)
        }
        self.rows = EmbeddingCollection({name: Embedding(table) for name, table in self.tables.items()})
        self.tower = Tower()

    def forward(self, clicks: Clicks) -> torch.Tensor:
        """Return logits; the rows of all tables come in one request to each server."""
        rows = self.rows(dict(zip(TABLES, clicks.ids.T.contiguous().unbind(), strict=True)))
        logits: torch.Tensor = self.tower(clicks.numbers, torch.stack([rows[name] for name in TABLES], 1))
        return logits


def auc(scores: torch.Tensor, clicks: torch.Tensor) -> float:
    """Return how often an example with a click has the higher score of two."""
    ranks = scores.argsort().argsort().double() + 1
    found = clicks.double().sum()
    above = (ranks * clicks).sum() - found * (found + 1) / 2
    return (above / (found * (len(clicks) - found))).item()


@torch.no_grad()
def scores_of(model: ClickModel, clicks: Clicks) -> torch.Tensor:
    """Return the probabilities that a model says."""
    model.eval()
    parts = [clicks.at(slice(at, at + 8192)) for at in range(0, len(clicks.ids), 8192)]
    return torch.cat([model(part) for part in parts]).sigmoid()


def train(
    mode: str, seed: int, clicks: Clicks, is_shown: bool
) -> tuple[kvps.KVStore, ClickModel, list[float]]:
    """Train one model on this rank's part of the examples; return the losses, too."""
    tables, dense = MODES[mode]
    kv = kvps.create(tables, name=f"{mode} {seed}")
    torch.manual_seed(seed)
    model = ClickModel(kv, seed)
    has_rounds = dense == "dist_sync"
    # Without rounds each worker makes steps of its own, as many as there are workers for one of dist_sync.
    adam = torch.optim.Adam(model.tower.parameters(), DENSE_RATE / (1 if has_rounds else kv.num_workers))
    optimizer = DistributedOptimizer(adam, model.tower, dense, update_on_kvstore=not has_rounds)
    order = torch.randperm(len(clicks.ids), generator=torch.Generator().manual_seed(seed))
    batches = order[: len(order) // (BATCH * kv.num_workers) * BATCH * kv.num_workers].split(BATCH)
    losses = []
    columns = (TextColumn(mode), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not is_shown) as bar:
        for batch in bar.track(batches[kv.rank :: kv.num_workers]):
            some = clicks.at(batch)
            loss = binary_cross_entropy_with_logits(model(some), some.clicks)
            optimizer.zero_grad()
            loss.backward()  # the gradients of the rows leave here
            optimizer.step()
            losses.append(loss.item())
    kv.barrier()  # the pushes of all ranks are in
    if not has_rounds:
        optimizer.kvstore.barrier()
        for name, weight in model.tower.named_parameters():
            optimizer.kvstore.pull(name, out=weight.detach())
    return kv, model, losses


def export(model: ClickModel, folder: Path) -> None:
    """Write the tables and the dense network."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in model.tables.items():
        table.export(folder / f"{name}.safetensors")
    save_file(model.tower.state_dict(), folder / "tower.safetensors")


@torch.no_grad()
def served(folder: Path, clicks: Clicks) -> torch.Tensor:
    """Return the probabilities that the model in a folder says; nothing of kvps takes part."""
    tower = Tower()
    tower.load_state_dict(load_file(folder / "tower.safetensors"))
    rows = []
    for name, wanted in zip(TABLES, clicks.ids.T.contiguous(), strict=True):
        table = load_file(folder / f"{name}.safetensors")
        ids, order = table["ids"].sort()
        places = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
        found = table["rows"][order[places]]
        rows.append(torch.where((ids[places] == wanted)[:, None], found, 0.0))
    return tower(clicks.numbers, torch.stack(rows, 1)).sigmoid()


def serve(folder: Path) -> int:
    """Score a few examples from files."""
    some = plant(5, seed=3)
    for chance, score in zip(some.chances.tolist(), served(folder, some).tolist(), strict=True):
        print(f"score {score:.3f}, planted probability {chance:.3f}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train, compare and export; or serve. Return the exit code."""
    parser = argparse.ArgumentParser(description="Train a click model with embedding tables in three modes.")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seeds", type=int, default=1, help="train each mode from so many seeds")
    parser.add_argument("--examples", type=int, default=TRAIN, help="to train with")
    parser.add_argument("--export", type=Path, default=Path("click_model"), help="folder for the files")
    parser.add_argument(
        "--serve", type=Path, metavar="FOLDER", help="score examples from these files, and end"
    )
    parser.add_argument("--min-auc", type=float, default=0.8, help="below it the exit code is 1")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss of each mode")
    flags = parser.parse_args(arguments)
    if flags.serve:
        return serve(flags.serve)

    clicks, test = plant(flags.examples, seed=1), plant(TEST, seed=2)
    code, seen = 0, {}
    for mode in flags.modes:
        found = []
        for seed in range(flags.seeds):
            begin = time.perf_counter()
            kv, model, losses = train(mode, seed, clicks, sys.stdout.isatty())
            took_s = time.perf_counter() - begin
            if kv.rank == 0:
                seen.setdefault(mode, losses)
                scores = scores_of(model, test)
                found.append(auc(scores, test.clicks))
                if mode == "hybrid" and seed == 0:
                    export(model, flags.export)
                    worst = (served(flags.export, test) - scores).abs().max().item()
                    print(f"hybrid is in {flags.export}; scores from there differ by {worst:.0e} at most")
            kv.barrier()  # ranks begin the next one together
        if kv.rank == 0:
            each = " ".join(f"{one:.4f}" for one in found)
            rate = 1e3 * took_s / len(losses)
            print(
                f"{mode}: AUC {each}; {len(losses)} steps of {rate:.0f} ms on each of {kv.num_workers} workers"
            )
            code |= min(found) < flags.min_auc
    if kv.rank != 0:
        return 0
    print(f"planted optimum: AUC {auc(test.chances, test.clicks):.4f}", flush=True)
    if flags.plot:
        from digits import plot  # draws by matplotlib, if it is there

        plot(seen, flags.plot, "A click model")
    if code:
        print(f"an AUC is below {flags.min_auc}", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
