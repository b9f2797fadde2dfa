"""A worker core that has opened the store ``kv``, with the key ``w`` or none, and what servers answer it."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvps.dtypes import BY_NAME
from kvps.protocol.membership import History, HistoryIs, Resume, Resumed
from kvps.protocol.values import Pulled, Push, Stand
from kvps.tensors import PRIVATE, Memory
from tests.support.worker_harness import Bench, push

FLOAT = BY_NAME["float32"].id
HOT = torch.arange(40.0)
"""A value that is cut over both servers."""


def bench(rank: int = 0, memory: Memory = PRIVATE, **options: object) -> Bench:
    worker = Bench(rank=rank, memory=memory)
    worker.open(**options)
    return worker


def ready(rank: int = 0, memory: Memory = PRIVATE, **options: object) -> Bench:
    """With one key, ``w``, of which server 0 has 16 elements and server 1 the other 24."""
    worker = bench(rank, memory, **options)
    worker.init({"w": HOT})
    return worker


def chunk(worker: Bench, server: int) -> int:
    """The chunk of ``w`` on a server."""
    return worker.core.stores["kv"].key("w").pieces[server].chunk


def stood(worker: Bench, seq: int, server: int, version: int, owed: int = 0) -> None:
    """Answer a pull of ``w`` without values."""
    size = (16, 24)[server]
    runs = (Stand(0, size, version, owed),)
    worker.server(server, Pulled(seq, chunk(worker, server), FLOAT, False, runs))


def pulled(worker: Bench, seq: int, server: int, version: int, value: float = 0.0) -> None:
    """Answer a pull of ``w``."""
    size = (16, 24)[server]
    runs = (Stand(0, size, version, 0),)
    answer = Pulled(seq, chunk(worker, server), FLOAT, True, runs)
    worker.server(server, answer, torch.full((size,), value))


def resumed(worker: Bench, *known: HistoryIs, replaced: bool = True, **barriers: int) -> None:
    """Answer RESUME, and HISTORY server by server; ``seq`` is filled in."""
    worker.scheduler(Resumed(worker.seqs(Resume)[-1], replaced, barriers))
    for server, answer in enumerate(known):
        worker.server(server, replace(answer, seq=worker.seqs(History, server)[-1]))


def small(**options: object) -> Bench:
    """One server, one key ``w`` of 4 elements in chunk 1."""
    worker = Bench(servers=1)
    worker.open(**options)
    worker.init({"w": torch.zeros(4)})
    return worker


def answer(worker: Bench, seq: int, value: float, version: int = 1) -> None:
    answer = Pulled(seq, 1, FLOAT, True, (Stand(0, 4, version, 0),))
    worker.server(0, answer, torch.full((4,), value))


def step(worker: Bench, *names: str) -> None:
    """Push each of these keys, and let the server take it in."""
    for name in names:
        ticket = worker.call(push({name: torch.ones(4)}))
        worker.ack(0, worker.seqs(Push)[-1])
        assert worker.is_done(ticket)
