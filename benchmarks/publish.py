"""Published weights: what a version costs the trainer, and how soon and how fast readers have it.

    kvps-launch -n 1 -s 2 -- .venv/bin/python benchmarks/publish.py [--mb 256] [--turns 5] [--readers 0 1 4]
    .venv/bin/python -m benchmarks.publish --link 1gbit [--mb 256] [--changed 0 0.02]      as root

The worker publishes ``--mb`` megabytes of bfloat16, as a state dict and as keys, with so many readers; the
last row has one reader that is stopped by SIGSTOP. With ``--changed``, that share of the elements changes
between versions: by default none, and with ``--link`` all. With ``--link``, the trainer and each reader are
hosts of their own, which are network namespaces behind links of that rate.

Printed are medians over the turns, in milliseconds: ``copy`` is one copy of these bytes by torch, ``publish``
the call in the trainer, ``learn`` from its return until the last reader knows the number, and ``read`` from
there until that reader has all tensors. ``share`` is the time in which as many bare processes copy these
bytes at once, divided by that. ``carried`` is what left by the trainer's link, in models: less than 1.00
where readers were told changes only, each by itself. ``transfers`` is ``learn`` and ``read`` together, by the
time that the bare link takes for one model.

On a machine with other work compare what does not wait: ``cpu``, the trainer's processor time in ``publish``
by that of one copy, ``faults``, the pages that the trainer touched first there, and both for the readers:
``read cpu`` by that of a copy of a bare process, and ``read faults`` of the reader that had most.

Beside them are a safetensors file, written and loaded, and a broadcast over gloo to as many processes.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import kvps

PIECES = 16
"""Tensors of the model."""
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
PORT = 9091
GLOO_PORT = 29517


def read(turns: int) -> None:
    """Read versions as they come; print when each was known, and read, and the time of a copy."""
    with kvps.subscribe("bench") as versions:
        number = versions.wait(timeout=60)
        versions.fetch()
        print("ready", flush=True)
        for _ in range(turns):
            number = versions.wait(newer_than=number, timeout=60)
            known, before = time.monotonic(), used()
            versions.fetch()
            got, after = time.monotonic(), used()
            print(number, known, got, after[0] - before[0], after[1] - before[1], flush=True)


def used() -> tuple[float, int]:
    """Return the seconds of a processor that this process has used, and the pages that it touched first."""
    use = resource.getrusage(resource.RUSAGE_SELF)
    return time.process_time(), use.ru_minflt


def copy_at_once(turns: int, count: int) -> None:
    """Copy so many bytes whenever a line comes; print the time, and that of the processor."""
    source, target = torch.ones(count, dtype=torch.uint8), torch.ones(count, dtype=torch.uint8)
    print("ready", flush=True)
    for _ in range(turns):
        input()
        began, before = time.monotonic(), used()
        target.copy_(source)
        print(time.monotonic() - began, used()[0] - before[0], flush=True)


def copies(hosts: Sequence[str], readers: int, turns: int, count: int) -> tuple[float, float]:
    """Return the median seconds in which so many processes copy these bytes, and one's processor time."""
    processes = [
        subprocess.Popen(
            command(host, "--copy", str(turns), str(count)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in hosts[:readers]
    ]
    rows = []
    for turn in range(-1, turns):
        for process in processes:
            if turn >= 0 and process.stdin is not None:
                process.stdin.write("\n")
                process.stdin.flush()
        lines = [process.stdout.readline().split() for process in processes if process.stdout]
        if turn >= 0 and lines:
            rows.append([max(float(line[column]) for line in lines) for column in (0, 1)])
    for process in processes:
        process.wait()
    wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True)) if rows else (0.0, 0.0)
    return wall, cpu


def join(rank: int, size: int, turns: int, at: str, count: int) -> None:
    """Take part in broadcasts; rank 0 prints the median time, until all ranks have the bytes."""
    torch.distributed.init_process_group("gloo", init_method=at, rank=rank, world_size=size)
    tensors = [torch.empty(count, dtype=torch.bfloat16) for _ in range(PIECES)]
    times = []
    for _ in range(turns + 1):
        torch.distributed.barrier()
        began = time.monotonic()
        for tensor in tensors:
            torch.distributed.broadcast(tensor, 0)
        torch.distributed.barrier()
        times.append(time.monotonic() - began)
    if rank == 0:
        print(f"gloo broadcast to {size - 1:>2}: {1e3 * statistics.median(times[1:]):.0f} ms", flush=True)
    torch.distributed.destroy_process_group()


def command(host: str, *arguments: str) -> list[str]:
    """Return the command that runs this file on a host; "" is this one."""
    return [*(["ip", "netns", "exec", host] if host else []), sys.executable, __file__, *arguments]


def bits_of(rate: str) -> float:
    """Return the bits in a second of a rate as tc has it, such as 100mbit."""
    number, unit = rate[:-4], rate[-4:]
    return float(number) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[unit]


def change(source: object, share: float) -> None:
    """Change so large a share of the elements of a state dict, in random places."""
    for tensor in source.values() if isinstance(source, dict) and share else ():
        at = torch.randperm(len(tensor))[: int(share * len(tensor))] if share < 1 else slice(None)
        tensor.view(torch.int16)[at] ^= 1


def measure(
    publish: Callable[[], int],
    change: Callable[[], None],
    hosts: Sequence[str],
    readers: int,
    turns: int,
    stops: bool,
) -> list[float]:
    """Return the medians of publish, learn and read in seconds, of bytes by the link, and of the processor
    time and faults of the trainer and the readers."""
    publish()
    processes = [
        subprocess.Popen(command(host, "--read", str(turns)), stdout=subprocess.PIPE, text=True)
        for host in hosts[: readers + stops]
    ]
    rows = []
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        if stops:
            os.kill(processes.pop().pid, signal.SIGSTOP)
        for _ in range(turns):
            sent = int(SENT.read_text()) if hosts[0] else 0
            change()
            began, before = time.monotonic(), used()
            number = publish()
            ended, after = time.monotonic(), used()
            lines = [process.stdout.readline().split() for process in processes if process.stdout]
            assert all(int(line[0]) == number for line in lines)
            known = max([float(line[1]) for line in lines], default=ended)
            got = max([float(line[2]) for line in lines], default=known)
            cpu, faults = (max([float(line[at]) for line in lines], default=0.0) for at in (3, 4))
            sent = int(SENT.read_text()) - sent if hosts[0] else 0
            own = after[0] - before[0], after[1] - before[1]
            rows.append((ended - began, max(0.0, known - ended), got - known, sent, *own, cpu, faults))
    finally:
        for process in processes:
            process.kill()
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def beside(state: dict[str, torch.Tensor], hosts: Sequence[str], readers: Sequence[int], turns: int) -> None:
    """Measure what kvps is compared with."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        path, times = Path(folder) / "model.safetensors", []
        for _ in range(turns if not hosts[0] else 0):
            began = time.monotonic()
            save_file(state, path)
            written = time.monotonic()
            loaded = load_file(path)
            for name, tensor in state.items():
                tensor.copy_(loaded[name])  # it was only mapped
            times.append((written - began, time.monotonic() - written))
        if times:
            write, load = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
            print(f"safetensors: write {write:.0f} ms, load {load:.0f} ms", flush=True)
    from benchmarks.compare.networks.namespaces import Namespaces

    address = Namespaces.address(0) if hosts[0] else "127.0.0.1"
    count = str(next(iter(state.values())).numel())
    for size in readers:
        ranks = [
            subprocess.Popen(
                command(
                    host,
                    "--join",
                    str(rank),
                    str(size + 1),
                    str(turns),
                    f"tcp://{address}:{GLOO_PORT}",
                    count,
                )
            )
            for rank, host in enumerate(["", *hosts[:size]] if size else [])
        ]
        for process in ranks:
            process.wait()


def on_links(rate: str, most: int, arguments: Sequence[str]) -> int:
    """Run this file as a job on hosts behind links."""
    from benchmarks.compare.networks.namespaces import Namespaces

    tools = Path(sys.executable).parent
    with Namespaces(1 + most, rate) as hosts:
        address = f"{hosts.address(0)}:{PORT}"
        scheduler = f"tcp://{address}"
        os.environ.update(
            KVPS_SCHEDULER=scheduler, KVPS_TRANSPORT="tcp", KVPS_INSECURE="1", GLOO_SOCKET_IFNAME="eth0"
        )
        server = [str(tools / "kvps-server"), "--bind", f"tcp://{hosts.address(0)}:0"]
        names = [hosts.inside(1 + index, [])[-1] for index in range(most)]
        worker = [str(tools / "kvps-worker"), "--", *command("", *arguments, "--hosts", *names)]
        commands = [
            [str(tools / "kvps-scheduler"), "--bind", scheduler, "--workers", "1", "--servers", "2"],
            *[server, server],
            worker,
        ]
        processes = [subprocess.Popen(hosts.inside(0, each)) for each in commands]
        try:
            return processes[-1].wait()
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Time publications and their readers.")
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--readers", type=int, nargs="*", default=[0, 1, 4])
    parser.add_argument("--changed", type=float, nargs="*")
    parser.add_argument("--link", help="the rate of each host's link, as tc has it")
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--join", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--copy", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hosts", nargs="*", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.read is not None:
        read(flags.read)
        return 0
    if flags.copy is not None:
        copy_at_once(*flags.copy)
        return 0
    if flags.join is not None:
        rank, size, turns, at, count = flags.join
        join(int(rank), int(size), int(turns), at, int(count))
        return 0
    if flags.link is not None and flags.hosts is None:
        return on_links(flags.link, max(flags.readers), sys.argv[1:])
    hosts = flags.hosts or [""] * (1 + max(flags.readers))
    shares = flags.changed if flags.changed is not None else [1.0 if flags.hosts else 0.0]
    count = flags.mb * 1_000_000 // 2 // PIECES
    state = {f"w{index}": torch.randn(count).bfloat16() for index in range(PIECES)}
    target = [tensor.clone() for tensor in state.values()]
    times = []
    for _ in range(flags.turns):
        began, before = time.monotonic(), used()
        for to, tensor in zip(target, state.values(), strict=True):
            to.copy_(tensor)
        times.append((time.monotonic() - began, used()[0] - before[0]))
    copy, copy_cpu = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{flags.mb} MB; copy {1e3 * copy:.0f} ms, of a processor {1e3 * copy_cpu:.0f} ms")
    at_once = {size: copies(hosts, size, flags.turns, flags.mb * 1_000_000) for size in {1, *flags.readers}}
    for size, (wall, cpu) in sorted(at_once.items()):
        if size:
            print(f"{size} bare copies at once: {1e3 * wall:.0f} ms, of a processor {1e3 * cpu:.0f} ms each")
    beside(state, hosts, flags.readers, flags.turns)
    titles = (
        "publish",
        "learn",
        "read",
        "share",
        "carried",
        "transfers",
        "cpu",
        "faults",
        "read cpu",
        "read faults",
    )
    print(f"{'source':12}{'changed':>8}{'readers':>18}" + "".join(f"{title:>12}" for title in titles))
    with kvps.create("dist_sync", name="bench") as kv:
        kv.init(list(state), list(state.values()))

        for title, source in (("state dict", state), ("keys", list(state))):
            for changed in shares if source is state else [0.0]:
                runs = [(readers, False) for readers in flags.readers]
                for readers, stops in runs if flags.hosts else [*runs, (1, True)]:
                    found = measure(
                        partial(kv.publish, "bench", source),
                        partial(change, source, changed),
                        hosts,
                        readers,
                        flags.turns,
                        stops,
                    )
                    called, learn, took, sent, cpu, faults, read_cpu, read_faults = found
                    wall, copied = at_once[readers]
                    who = f"{readers} and 1 stopped" if stops else f"{readers}"
                    cells = [
                        f"{1e3 * called:.1f}",
                        f"{1e3 * learn:.1f}",
                        f"{1e3 * took:.0f}",
                        f"{wall / took:.2f}" if took else "",
                        f"{sent / flags.mb / 1e6:.2f}" if flags.hosts else "",
                        f"{(learn + took) / (flags.mb * 8e6 / bits_of(flags.link)):.2f}"
                        if flags.hosts
                        else "",
                        f"{cpu / copy_cpu:.2f}",
                        f"{faults:.0f}",
                        f"{read_cpu / copied:.2f}" if took else "",
                        f"{read_faults:.0f}",
                    ]
                    numbers = "".join(f"{cell:>12}" for cell in cells)
                    print(f"{title:12}{changed:8.2f}{who:>18}{numbers}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
