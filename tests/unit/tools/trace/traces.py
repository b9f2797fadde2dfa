"""Traces made up for tests: rounds of a few workers at servers, with times that the test chooses."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvps.protocol.envelope import Node, Role
from kvps.tools.trace.chrome import MergedTrace, Process
from kvps.tools.trace.member import NOBODY, SpanKind, TimeSpan

MS = 1_000_000
SERVER, WORKER = Role.SERVER.value, Role.WORKER.value


@dataclass
class Job:
    """Rounds of pushpull of one chunk per server; all times in milliseconds."""

    compute: tuple[int, ...] = (10, 10)
    """By rank."""
    servers: int = 1
    copy: int = 1
    link: dict[tuple[int, int], int] = field(default_factory=dict)
    """Rank and server -> time on the way to the server, beyond 1 ms."""
    back: int = 1
    reduce: int = 1
    update: int = 2
    slow_server: int | None = None
    slow_update: int = 0
    rounds: int = 6

    def trace(self) -> MergedTrace:
        """Play all rounds."""
        workers = [Process(Node(Role.WORKER, rank), 1, "a", 10 + rank) for rank in range(len(self.compute))]
        servers = [Process(Node(Role.SERVER, rank), 1, "b", 20 + rank) for rank in range(self.servers)]
        for worker in workers:
            worker.spans.append(TimeSpan(SpanKind.WAIT, NOBODY, 0, 0, MS // 2))
        ready = [MS // 2] * len(workers)
        for number in range(self.rounds):
            ready = self._round(number, 1 + number, ready, workers, servers)
        for process in (*workers, *servers):
            process.spans.sort(key=lambda span: (span.begin, -span.took))
        return MergedTrace([*servers, *workers])

    def _round(
        self, number: int, seq: int, ready: list[int], workers: list[Process], servers: list[Process]
    ) -> list[int]:
        arrivals: dict[int, list[tuple[int, int]]] = {item: [] for item in range(self.servers)}
        asked = []
        for rank, worker in enumerate(workers):
            at = ready[rank] + self.compute[rank] * MS
            worker.spans.append(TimeSpan(SpanKind.COMPUTE, NOBODY, 0, ready[rank], self.compute[rank] * MS))
            asked.append(at)
            for server in range(self.servers):
                ids = (seq, number, server, 4096)
                worker.spans.append(TimeSpan(SpanKind.COPY, SERVER, server, at, self.copy * MS, *ids))
                at += self.copy * MS
                worker.spans.append(TimeSpan(SpanKind.SEND, SERVER, server, at, MS // 10, *ids))
                at += MS // 10
                arrivals[server].append((at + (1 + self.link.get((rank, server), 0)) * MS, rank))
        answered = [0] * len(workers)
        for server in range(self.servers):
            busy = 0
            coming = sorted(arrivals[server])
            for place, (at, rank) in enumerate(coming):
                ids = (seq, number, server, 4096)
                begin = max(at, busy)
                spans = servers[server].spans
                spans.append(TimeSpan(SpanKind.REDUCE, WORKER, rank, begin, self.reduce * MS, *ids))
                busy = begin + self.reduce * MS
                if place == len(coming) - 1:
                    update = self.slow_update if server == self.slow_server else self.update
                    spans.append(TimeSpan(SpanKind.UPDATE, WORKER, rank, busy, update * MS, *ids))
                    busy += update * MS
                    for to in range(len(workers)):
                        spans.append(TimeSpan(SpanKind.REPLY, WORKER, to, busy, MS // 10, *ids))
                        busy += MS // 10
                        came = max(busy + self.back * MS, answered[to])
                        scatter = TimeSpan(SpanKind.SCATTER, SERVER, server, came, MS // 2, *ids)
                        workers[to].spans.append(scatter)
                        answered[to] = scatter.end
        for rank, worker in enumerate(workers):
            worker.spans.append(TimeSpan(SpanKind.WAIT, NOBODY, 0, asked[rank], answered[rank] - asked[rank]))
        return answered
