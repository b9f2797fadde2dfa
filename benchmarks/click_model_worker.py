"""One worker of click_model.py: trains a click model in one way, and reports its losses and times.

It runs in the environment of kvps and in that of TorchRec, so only functions import either.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

if __package__:
    from benchmarks.step import cpu_ms
else:
    from step import cpu_ms

DENSE = 13
"""Features of an example that are numbers, as in Criteo's data."""
SEED = 7
ZIPF = 1.05
BOUND = 0.25
"""First values of rows are uniform between this and its negative."""
RATES = {"sgd": 0.3, "adagrad": 0.2}
"""Optimizer of the tables -> its learning rate; that of sgd is for a sum over the examples of a worker."""
DENSE_RATE = 0.1
WARM_UP = 5
PHASES = ("lookup", "dense", "push", "step")

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Task(NamedTuple):
    """What to train, equal for all ways."""

    tables: int
    rows: int
    """Rows of each table."""
    dim: int
    """Elements of a row."""
    batch: int
    """Examples of one worker in one step."""
    steps: int
    """Timed steps; WARM_UP come before."""
    optimizer: str
    """Of the tables: a name of RATES. The dense part has sgd."""
    dtype: str = "float32"
    """Of the rows that servers of kvps hold."""
    pull_dtype: str | None = None
    """``"int8"`` for rows that travel so."""

    @property
    def rate(self) -> float:
        """The learning rate of the tables, for means."""
        return RATES[self.optimizer] * (self.batch if self.optimizer == "sgd" else 1)

    @property
    def all_steps(self) -> int:
        """Steps in all."""
        return WARM_UP + self.steps


class Batch(NamedTuple):
    """The examples of one worker in one step."""

    dense: torch.Tensor
    """[batch, DENSE]"""
    ids: torch.Tensor
    """[batch, tables], int64: one id of each table."""
    clicks: torch.Tensor
    """[batch], 0.0 or 1.0."""


class Lookup(NamedTuple):
    """The tables of one way."""

    rows: Callable[[torch.Tensor], torch.Tensor]
    """Return rows [batch, tables, dim] for ids [batch, tables]; their backward updates tables, or pushes."""
    finish: Callable[[], None]
    """End the step of the tables."""
    sent: Callable[[], float]
    """Return the bytes that the whole way has sent."""
    ahead: Callable[[torch.Tensor], None] = lambda ids: None
    """Ask for the rows of the next batch, behind the push of this one."""


def zipf(rows: int, shape: tuple[int, ...], generator: np.random.Generator) -> Ids:
    """Return ids below ``rows`` of which the k-th most frequent comes as often as k ** -ZIPF.

    Frequent ids are not neighbours: real ids are numbered by hashes, or as they came.
    """
    power = 1 - ZIPF
    places = ((rows + 1) ** power - 1) * generator.random(shape) + 1
    ranks = (places ** (1 / power)).astype(np.int64).clip(1, rows) - 1
    return ranks * 1_000_003 % rows


def batch_of(task: Task, rank: int, step: int) -> Batch:
    """Return the examples of a rank in a step: the same in every way and in every process."""
    generator = np.random.default_rng((SEED, rank, step))
    ids = zipf(task.rows, (task.batch, task.tables), generator)
    dense = generator.standard_normal((task.batch, DENSE), np.float32)
    taste = np.sin(ids * 12.9898 + np.arange(task.tables)).sum(1)  # what an id adds to its clicks
    score = 0.3 * taste + 0.5 * dense[:, :4].sum(1) - 0.5
    clicks = generator.random(task.batch) < 1 / (1 + np.exp(-score))
    parts = (dense, ids, clicks.astype(np.float32))
    return Batch(*[torch.from_numpy(part) for part in parts])


class Tower(nn.Module):
    """The dense part of a DLRM: two small networks, and the products of all pairs of vectors between them."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        pairs = (tables + 1) * tables // 2
        self.below = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.above = nn.Sequential(nn.Linear(dim + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1), persistent=False)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [batch] from numbers [batch, DENSE] and rows [batch, tables, dim]."""
        numbers = self.below(dense)
        vectors = torch.cat([numbers[:, None], rows], 1)
        products = vectors @ vectors.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.above(torch.cat([numbers, crossed], 1)).squeeze(1)
        return logits


# --- the ways -----------------------------------------------------------------------------------------


STORES = {
    "kvps sync": ("dist_sync", "dist_sync"),
    "kvps apart": ("dist_sync", "dist_sync"),
    "kvps async": ("dist_async", "dist_async"),
    "kvps ahead": ("dist_async", "dist_async"),
    "kvps hybrid": ("dist_async", "dist_sync"),
}
"""Way -> the store of the tables, and that of the dense part."""


def with_kvps(way: str, task: Task, tower: nn.Module) -> tuple[Lookup, nn.Module, Any]:
    """Return the tables, the dense part and its optimizer in the stores of kvps."""
    import kvps
    import kvps.torch

    tables, dense = STORES[way]
    kv = kvps.create(tables, name="tables")
    rates = {kind: 1.0 if kind == "dist_sync" else 1 / kv.num_workers for kind in (tables, dense)}
    rate = task.rate * rates[tables]  # without rounds each worker's mean is a step of its own
    hyper = {"init": ("uniform", BOUND), "optimizer": task.optimizer, "lr": rate}
    hyper |= {"dtype": task.dtype, "pull_dtype": task.pull_dtype}
    names = [name_of(table) for table in range(task.tables)]
    modules = {name: kvps.torch.Embedding(kv.embedding(name, task.dim, **hyper)) for name in names}
    sgd = torch.optim.SGD(tower.parameters(), lr=DENSE_RATE * rates[dense])
    optimizer = kvps.torch.DistributedOptimizer(
        sgd, tower, dense, update_on_kvstore=dense == "dist_async", overlap_forward=True
    )

    def each(ids: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: modules[name](some) for name, some in ids.items()}

    look_up = each if way == "kvps apart" else kvps.torch.EmbeddingCollection(modules)

    def features(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(names, ids.unbind(1), strict=True))

    def rows(ids: torch.Tensor) -> torch.Tensor:
        found = look_up(features(ids))
        return torch.stack(list(found.values()), 1)

    def sent() -> float:
        return kv.metrics()["sent_bytes"] + optimizer.kvstore.metrics()["sent_bytes"]

    lookup = Lookup(rows, lambda: None, sent)
    if way == "kvps ahead":
        lookup = lookup._replace(ahead=lambda ids: look_up.prefetch(features(ids)))
    return lookup, tower, optimizer


def name_of(table: int) -> str:
    """Return the name of a table, which decides its first values."""
    return f"feature_{table}"


def first_values(task: Task, workers: int, file: Path) -> None:
    """Write the first values of all rows that a run uses, as the tables of kvps have them."""
    import kvps

    every = [batch_of(task, rank, step).ids for rank in range(workers) for step in range(task.all_steps)]
    ids = torch.cat(every)
    with kvps.create("local") as kv:
        found = {}
        for table in range(task.tables):
            used = ids[:, table].unique()
            rows = kv.embedding(name_of(table), task.dim, init=("uniform", BOUND), lr=1.0).pull(used)
            found |= {f"ids {table}": used.numpy(), f"rows {table}": rows.numpy()}
    np.savez(file, **found)


def filled(weight: torch.Tensor, first: Any, table: int, start: int = 0) -> None:
    """Give the rows of a table that begin at ``start`` their first values; unused rows get any."""
    with torch.no_grad():
        weight.uniform_(-BOUND, BOUND)
        ids, rows = (torch.from_numpy(first[f"{what} {table}"]) for what in ("ids", "rows"))
        own = (ids >= start) & (ids < start + len(weight))
        weight[ids[own] - start] = rows[own]


class Bags(nn.Module):
    """A torch.nn.EmbeddingBag with sparse gradients for each table."""

    def __init__(self, task: Task, first: Any) -> None:
        super().__init__()
        self.bags = nn.ModuleList()
        for table in range(task.tables):
            weight = torch.empty(task.rows, task.dim)
            filled(weight, first, table)
            self.bags.append(nn.EmbeddingBag(task.rows, task.dim, _weight=weight, mode="sum", sparse=True))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [batch, tables, dim] of ids [batch, tables]."""
        return torch.stack([bag(ids[:, at, None]) for at, bag in enumerate(self.bags)], 1)


def with_ddp(task: Task, tower: nn.Module, first: Any) -> tuple[Lookup, nn.Module, Any]:
    """Return the tables, the dense part and its optimizer in DistributedDataParallel."""
    torch.distributed.init_process_group("gloo")
    torch.sparse.check_sparse_tensor_invariants.disable()  # as they are, without a warning
    bags = nn.parallel.DistributedDataParallel(Bags(task, first))
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[task.optimizer]
    optimizer = kind(bags.parameters(), lr=task.rate)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    dense = nn.parallel.DistributedDataParallel(tower)
    return Lookup(bags, finish, written), dense, torch.optim.SGD(tower.parameters(), lr=DENSE_RATE)


def with_torchrec(task: Task, tower: nn.Module, first: Any) -> tuple[Lookup, nn.Module, Any]:
    """Return the tables of TorchRec, as its planner shards them, and the dense part in DDP."""
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    torch.distributed.init_process_group("gloo")
    device = torch.device("cpu")
    names = [name_of(table) for table in range(task.tables)]
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=task.dim, num_embeddings=task.rows, feature_names=[name]
        )
        for name in names
    ]
    kind = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD}[task.optimizer]
    fused = {"optimizer": kind, "learning_rate": task.rate, "eps": 1e-10}
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params=fused)]
    collection = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    size = torch.distributed.get_world_size()
    topology = Topology(world_size=size, local_world_size=size, compute_device="cpu", ddr_cap=1 << 36)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=task.batch)
    plan = planner.collective_plan(collection, sharders, torch.distributed.GroupMember.WORLD)
    tables = DistributedModelParallel(collection, device=device, plan=plan, sharders=sharders)
    for name, value in tables.state_dict().items():
        table = names.index(name.split(".")[-2])
        parts = value.local_shards() if hasattr(value, "local_shards") else []
        for part in parts:
            filled(part.tensor, first, table, part.metadata.shard_offsets[0])
        if not hasattr(value, "local_shards"):
            filled(value, first, table)
    lengths = torch.ones(task.tables * task.batch, dtype=torch.int32)

    def rows(ids: torch.Tensor) -> torch.Tensor:
        features = torchrec.KeyedJaggedTensor(names, ids.T.reshape(-1), lengths=lengths)
        pooled = tables(features)
        pooled = pooled.wait() if hasattr(pooled, "wait") else pooled
        places = {name: at for at, name in enumerate(pooled.keys())}  # as the tables lie on the ranks
        vectors = pooled.values().view(task.batch, task.tables, task.dim)
        return vectors[:, [places[name] for name in names]]

    dense = nn.parallel.DistributedDataParallel(tower)
    return Lookup(rows, lambda: None, written), dense, torch.optim.SGD(tower.parameters(), lr=DENSE_RATE)


def alone(task: Task, tower: nn.Module, first: Any) -> tuple[Lookup, nn.Module, Any]:
    """Return constant rows instead of tables, and the dense part without an exchange."""
    rows = torch.from_numpy(first["rows 0"])
    few = nn.Parameter(rows[torch.arange(task.batch * task.tables) % len(rows)])
    shape = (task.batch, task.tables, task.dim)
    tables = Lookup(lambda ids: few.view(shape), lambda: few.grad.zero_(), written)
    return tables, tower, torch.optim.SGD(tower.parameters(), lr=DENSE_RATE)


PEERS = {"alone": alone, "ddp gloo": with_ddp, "torchrec": with_torchrec}


# --- the steps ----------------------------------------------------------------------------------------


def written() -> float:
    """Return the bytes that this process has written so far, as gloo does to its sockets (Linux)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def train(task: Task, way: str, rank: int, first: Any, parent: int = 0) -> dict[str, Any]:
    """Make all steps; return the loss of each, and what the timed steps took.

    The processor time is that of all processes that ``parent`` has started.
    """
    torch.manual_seed(SEED)
    tower: nn.Module = Tower(task.tables, task.dim)
    is_ours = way.startswith("kvps")
    tables, dense, optimizer = with_kvps(way, task, tower) if is_ours else PEERS[way](task, tower, first)
    batches = [batch_of(task, rank, step) for step in range(task.all_steps)]
    losses, times = [], []
    sent = spent = 0.0
    for number, batch in enumerate(batches):
        if number == WARM_UP:
            sent, spent = tables.sent(), cpu_ms(parent)
        clock = [time.perf_counter()]
        rows = tables.rows(batch.ids)
        clock.append(time.perf_counter())
        leaf = rows.detach().requires_grad_()
        loss = binary_cross_entropy_with_logits(dense(batch.dense, leaf), batch.clicks)
        loss.backward()
        clock.append(time.perf_counter())
        rows.backward(leaf.grad)
        if number + 1 < len(batches):
            tables.ahead(batches[number + 1].ids)
        clock.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        tables.finish()
        clock.append(time.perf_counter())
        losses.append(loss.item())
        times.append([1000 * (end - begin) for begin, end in itertools.pairwise(clock)])
    sent, spent = tables.sent() - sent, cpu_ms(parent) - spent
    figures = {"sent": sent / task.steps, "cpu": spent / task.steps}
    return {"losses": losses, "times": times[WARM_UP:], **figures}


def main() -> None:
    """Be one worker, and write its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way")
    parser.add_argument("folder", type=Path)
    parser.add_argument("parent", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    task = Task(**json.loads((given.folder / "task.json").read_text()))
    first = None if given.way.startswith("kvps") else np.load(given.folder / "first.npz")
    found = train(task, given.way, rank, first, given.parent)
    (given.folder / f"{rank}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
