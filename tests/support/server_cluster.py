"""Several servers that hold one key together, and a post office between them that may lose what it likes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvps.core.placement import parts
from kvps.core.server.server import TELL_NORMS_EVERY_S
from kvps.protocol.membership import Error
from kvps.protocol.stores import Norms
from kvps.protocol.values import Push, Run
from tests.support.server_harness import Said, ServerStage, heard

COUNT = 1000
RULES = {
    "lars": {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1},
    "lamb": {"lr": 0.1},
    "sgd": {"lr": 0.5, "momentum": 0.9},
}


@dataclass
class Cluster:
    """Servers that hold one key, w, together; a push of it goes to each of them by itself."""

    servers: int
    mode: str = "sync"
    workers: int = 2
    rule: str | None = "lars"
    """None lets the sum be assigned."""
    policy: str = "wait"
    on_nonfinite: str = "apply"
    average: bool = False
    quorum: int = 0
    grace_s: float = -1.0
    post: list[tuple[int, Said]] = field(default_factory=list)
    """What servers have said to each other and was not delivered: (sender, what)."""

    def __post_init__(self) -> None:
        self.where = sorted(parts("w", COUNT, self.servers, bound=1))  # up to 3 servers have one part each
        self.stages = [ServerStage(self.workers, self.servers, part.server) for part in self.where]
        weight = torch.linspace(-1, 1, COUNT)
        for part, stage in zip(self.where, self.stages, strict=True):
            stage.open(
                self.mode,
                bigarray_bound=1,
                on_worker_lost=self.policy,
                on_nonfinite=self.on_nonfinite,
                average=self.average,
                quorum=self.quorum,
                grace_s=self.grace_s,
                bundles=not self.quorum,
            )
            row = weight[part.start : part.start + part.size]
            stage.declare("w", row, start=part.start, shape=(COUNT,))
            stage.load("w", row)
            if self.rule is not None:
                stage.optimizer(self.rule, **RULES[self.rule])

    def push(self, server: int, rank: int, number: int, whole: torch.Tensor | None = None) -> list[Said]:
        """One server gets its part of a push; what it tells others is posted."""
        part, stage = self.where[server], self.stages[server]
        whole = gradient(rank, number) if whole is None else whole
        row = whole[part.start : part.start + part.size]
        (piece,) = stage.pieces["w"]
        run = (Run(piece.start, piece.size, number),)
        return self.hand_over(server, stage.say(rank, Push(piece.chunk, 1, (rank,), 1.0, False, run), row))

    def hand_over(self, server: int, said: list[Said]) -> list[Said]:
        assert not heard(said, Error), said
        to_servers = [item for item in said if isinstance(item.message, Norms)]
        self.post.extend((server, item) for item in to_servers)
        return [item for item in said if item not in to_servers]

    def deliver(self, index: int = 0, *, keep: bool = False) -> list[Said]:
        """Deliver one letter."""
        sender, letter = self.post[index] if keep else self.post.pop(index)
        to = int(str(letter.to).removeprefix("server "))
        return self.hand_over(to, self.stages[to].other(sender, letter.message))

    def deliver_all(self) -> list[Said]:
        said = []
        while self.post:
            said += self.deliver()
        return said

    def push_in_any_order(
        self, chance: random.Random, rounds: int, row: Callable[[int, int], torch.Tensor | None]
    ) -> None:
        """Push ``row(rank, number)`` of ranks 0 and 1 for some rounds; letters are lost, doubled and shuffled."""
        left = [[(rank, number) for number in range(rounds) for rank in (0, 1)] for _ in self.stages]
        while any(left):
            server = chance.choice([index for index, some in enumerate(left) if some])
            rank = chance.choice([rank for rank, _ in left[server]])
            number = min(number for other, number in left[server] if other == rank)
            left[server].remove((rank, number))
            assert self.push(server, rank, number, row(rank, number))
            while self.post and chance.random() < 0.7:
                index, fate = chance.randrange(len(self.post)), chance.random()
                if fate < 0.3:
                    self.post.pop(index)
                else:
                    self.deliver(index, keep=fate < 0.5)
        for _ in range(20):
            self.tick()
            self.deliver_all()

    def tick(self) -> None:
        """Let the second pass after which servers tell again."""
        for server, stage in enumerate(self.stages):
            stage.now += TELL_NORMS_EVERY_S
            self.hand_over(server, stage.take(stage.server.on_timer(stage.now)))

    def values(self) -> torch.Tensor:
        in_order = sorted(self.where, key=lambda part: part.start)
        return torch.tensor([number for part in in_order for number in self.stages[part.server].values("w")])

    def versions(self) -> list[int]:
        return [stage.span("w").version for stage in self.stages]


def gradient(rank: int, number: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(100 * rank + number))
