"""Measures what an embedding table takes on its servers, and how many rows a second go in and out.

    .venv/bin/kvps-launch -n 1 -s 2 -- .venv/bin/python benchmarks/tables.py

One worker makes 10 million rows of 16 float32 under random ids (640 MB raw), then pushes to some of them
and pulls some, uniformly and as words are used (a few very often). Memory is the growth of both server
processes' private memory since they had nothing; what a worker lends them is the worker's. Linux.

With ``--steps``, it measures training steps instead: a pull and a push of the same ids, by Zipf's law with
``--exponent``. To have a table larger than memory, name a directory and a limit. ``--cgroup`` puts the
servers into a control group, of which they may take so many bytes; it needs root:

    KVPS_TABLE_DIR=/var/tmp KVPS_MEMORY_LIMIT=150M .venv/bin/kvps-launch -n 1 -s 1 -- \
        .venv/bin/python benchmarks/tables.py --rows 1000000 --dim 64 --optimizer adagrad --batch 10000 \
        --steps 200 --cgroup 400000000
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import kvps

MB = 1e6


def servers() -> list[int]:
    """Return the process ids of this job's servers."""
    address = os.environ["KVPS_SCHEDULER"].encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if b"server" in command and address in command.split(b"\0"):
            found.append(int(folder.name))
    return found


def memory(pids: list[int]) -> float:
    """Return the MB of private memory that these processes have now, together."""
    total = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/status").read_text()
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:"))
    return total * 1024 / MB


def zipf(count: int, size: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return indices below ``count``, of which k comes about as often as 1 / k."""
    return (count ** generator.random(size)).astype(np.int64) % count


def by_zipf(count: int, size: int, exponent: float, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return indices below ``count``, of which k comes about as often as 1 / k ** exponent; that is not 1."""
    rest = 1.0 - exponent
    drawn = 1.0 - generator.random(size) * (1.0 - (count + 1.0) ** rest)
    return (drawn ** (1.0 / rest)).astype(np.int64) - 1


def confine(pids: list[int], size: int) -> Path:
    """Put processes into a control group that may take ``size`` bytes from now on; return the group."""
    root = Path("/sys/fs/cgroup/memory")
    name = "memory.limit_in_bytes" if root.exists() else "memory.max"
    group = (root if root.exists() else root.parent) / f"kvps-tables-{os.getpid()}"
    group.mkdir()
    (group / name).write_text(str(size))
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    return group


def processor(pids: list[int]) -> float:
    """Return the seconds of a processor that these processes have taken."""
    words = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in words) / os.sysconf("SC_CLK_TCK")


def measure_steps(
    table: kvps.EmbeddingTable, ids: npt.NDArray[np.int64], flags: argparse.Namespace, pids: list[int]
) -> None:
    """Print the time of training steps, a half for warming up and a half that counts."""
    generator = np.random.default_rng(1)
    gradients = torch.randn(flags.batch, flags.dim)
    for what in ("first steps", "steps"):
        table.version()  # nothing is under way
        begin, used = time.perf_counter(), processor(pids)
        for _ in range(flags.steps // 2):
            some = ids[by_zipf(len(ids), flags.batch, flags.exponent, generator)]
            table.pull(some)
            table.push(some, gradients)
        table.version()
        each = flags.steps // 2 / 1000
        print(
            f"{what}: {(time.perf_counter() - begin) / each:.1f} ms each, of which the servers' processor "
            f"{(processor(pids) - used) / each:.1f}; their memory {memory(pids):.0f} MB",
            flush=True,
        )


def main() -> None:
    """Fill a table, use it, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=50_000)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--cgroup", type=int, default=0)
    flags = parser.parse_args()
    kv = kvps.create("dist_async")
    table = kv.embedding("table", flags.dim, optimizer=flags.optimizer, lr=0.01)
    pids = servers()
    before = memory(pids)
    if flags.cgroup:
        confine(pids, flags.cgroup)
    generator = np.random.default_rng(0)
    ids = generator.permutation(flags.rows) * 1_000_003
    gradients = torch.randn(flags.batch, flags.dim)

    def timed(name: str, batches: list[npt.NDArray[np.int64]], is_push: bool) -> None:
        table.version()  # nothing is under way
        begin = time.perf_counter()
        for some in batches:
            if is_push:
                table.push(some, gradients[: len(some)])
            else:
                table.pull(some)
        table.version()
        seconds = time.perf_counter() - begin
        rows = sum(map(len, batches))
        print(f"{name}: {rows / seconds:,.0f} rows/s", flush=True)

    whole = [ids[at : at + flags.batch] for at in range(0, flags.rows, flags.batch)]
    timed("rows made", whole, is_push=True)
    assert len(table) == flags.rows
    raw = flags.rows * flags.dim * 4 / MB
    now = memory(pids) - before
    print(
        f"{flags.rows:,} rows of {flags.dim} ({flags.optimizer}) on {len(pids)} servers, raw {raw:.0f} MB: "
        f"{now:.0f} MB ({now / raw:.2f}x)",
        flush=True,
    )
    if flags.steps:
        measure_steps(table, ids, flags, pids)
        return
    uniform = [ids[generator.integers(0, flags.rows, flags.batch)] for _ in range(20)]
    skewed = [ids[zipf(flags.rows, flags.batch, generator)] for _ in range(20)]
    for name, batches in (("uniform", uniform), ("as words are used", skewed)):
        timed(f"pushes, {name}", batches, is_push=True)
        timed(f"pulls, {name}", batches, is_push=False)
    small = [item[at : at + 1000] for item in uniform for at in range(0, 10_000, 1000)]
    timed("pushes of 1,000", small, is_push=True)
    timed("pulls of 1,000", small, is_push=False)


if __name__ == "__main__":
    main()
