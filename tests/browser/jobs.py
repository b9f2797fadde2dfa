"""A job that trains as long as a test wants, with a dashboard, and ways to make it slow, full or broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.processes import Cluster, Process, Processes, until
from tests.support.scraping import HTTP, get, url_of

SCRIPT = """
import os, pathlib, time, torch, kvps
kv = kvps.create("dist_sync", timeout=120, **({"on_worker_lost": "shrink"} if os.environ.get("SHRINK") else {}))
kv.set_optimizer("sgd", lr=0.01)
shapes = {"embedding.weight": 400_000, "encoder.weight": 250_000, "encoder.bias": 512, "head.weight": 50_000, "head.bias": 100}
for key, size in shapes.items():
    kv.init(key, torch.zeros(size))
kv.set_gradient_compression({"type": "int8", "min_bytes": 1_500_000})
gradients = {key: torch.ones(size) for key, size in shapes.items()}
outs = {key: torch.zeros(size) for key, size in shapes.items()}
keys = list(shapes)
stale = kvps.create("dist_async", timeout=120) if os.environ.get("ASYNC") else None
if stale is not None:
    stale.set_optimizer("sgd", lr=0.01)
    stale.init("clicks", torch.zeros(2000))
    seen = torch.zeros(2000)
folder, step = pathlib.Path("."), 0
print("trains", flush=True)
while not (folder / "end").exists():
    slow = folder / f"slow-{kv.rank}"
    time.sleep(float(slow.read_text()) if slow.exists() else 0.03)
    try:
        kv.pushpull(keys, [gradients[key] for key in keys], out=[outs[key] for key in keys])
        if stale is not None:
            stale.pull("clicks", out=seen)
            for _ in range(1 + 2 * kv.rank):
                stale.push("clicks", torch.ones(2000))
    except kvps.ServerLost:
        continue
    step += 1
print("over", flush=True)
"""


class Training:
    """A scheduler with a dashboard, servers and workers."""

    def __init__(self, processes: Processes, workers: int = 2, servers: int = 2, **env: str) -> None:
        """Start the job, and wait until it trains.

        Args:
            processes: of the test.
            workers: how many.
            servers: how many.
            env: added to the environment of workers.
        """
        self.processes, self.env = processes, env
        self.folder: Path = processes.folder
        self.script = processes.script(SCRIPT)
        self.cluster: Cluster = processes.scheduler(workers, servers, "--http", "127.0.0.1:0")
        self.url = url_of(self.cluster.process)
        self.checkpoints = self.folder / "checkpoints"
        self.servers = [self.serve(rank) for rank in range(servers)]
        self.workers = [self.work(rank) for rank in range(workers)]
        for worker in self.workers:
            worker.expect("trains", 120.0)

    def serve(self, rank: int) -> Process:
        """Start a server of this rank."""
        flags = (
            *(*HTTP, "--rank", rank, "--memory-limit", 64 << 20),
            *("--checkpoint-dir", self.checkpoints, "--checkpoint-every", "2"),
        )
        return self.cluster.server(*flags)

    def work(self, rank: int) -> Process:
        """Start a worker of this rank."""
        return self.cluster.plain(self.script, KVPS_RANK=str(rank), **self.env)

    def slow(self, rank: int, seconds: float) -> None:
        """Have each step of a worker take so long."""
        (self.folder / f"slow-{rank}").write_text(str(seconds))

    def status(self) -> dict[str, Any]:
        """Return /statusz of the scheduler."""
        for attempt in range(10):
            try:
                code, text = get(f"{self.url}/statusz")
                break
            except ConnectionError:  # on a busy machine: of many connections the oldest is cut off
                assert attempt < 9, "the scheduler serves nobody"
        assert code == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def until_busy(self) -> None:
        """Wait until rounds are measured on every server, and there is a checkpoint."""

        def is_busy() -> bool:
            now = self.status()
            servers = now.get("servers", [])
            is_measured = len(servers) == len(self.servers) and all(
                server["round_p50_s"] for server in servers
            )
            return is_measured and bool(now["checkpoints"]["kept"])

        until(is_busy, "measured rounds and a checkpoint", 120.0)

    def end(self) -> None:
        """Let the workers end, and the job with them."""
        (self.folder / "end").touch()
        self.cluster.process.wait(60.0)
