"""The prediction of ``kvps doctor --predict``: whether several machines pay, and with which way to
exchange what they learn.

Theory of operation
-------------------
Each machine has a worker, and a link of B bytes per second each way. An exchange of M bytes of gradients
takes as long as the fullest link::

    servers on machines of their own   worker's link  M                            each way
                                       server's link  n M / k                      for n workers, k servers
    servers beside the workers         M (1 - 1/k) + (n - 1) M / k                 their own share stays there
    a ring without servers             2 (n - 1) / n M

Pushes and pulls of different chunks are under way at once, so the two directions of a link count apart. A
codec makes M smaller, and takes processor time at both ends. Gradients leave while the backward pass
computes: a step is the longer of computation and exchange, but for the part of the forward pass before the
first gradient, and of the exchange after the last. Local steps exchange once in many steps, and wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

FRAME = 1514 / 1448
"""Bytes on a link for each byte of payload: the headers of Ethernet, IP and TCP."""
FILL = 0.94
"""The share of a link that is filled during an exchange (88 % of M/B with headers: ``benchmarks/LOG.md``)."""
COPY_S = 2e-9
"""Processor seconds per byte of payload at either end: sockets, encryption, and the sum."""
CALL_S, ARRAY_S = 2e-3, 10e-6
"""Seconds of an exchange that do not depend on bytes, for the call and for each array."""
CHUNK_BYTES = 384 << 10
"""Bytes of float32 that a server sums before it answers."""
BUCKET_BYTES, GLOO_BUCKET_BYTES = 4 << 20, 25 << 20
"""Bytes of gradients that leave together."""
PAYS = 1.2
"""The least speed of several machines, beside one, that is worth their trouble."""
ENOUGH = 0.8
"""The share of perfect speed from which no coarser way is advised."""
NEAR = 1.05
"""More servers are advised if a step without them takes longer by this factor."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training job, as one machine would run it.

    Example:
        >>> job = Job(model_bytes=100_000_000, arrays=161, step_s=0.5, link_bytes_s=12.5e6)
        >>> round(step_s(job, WAYS[0], machines=4, servers=4), 1)
        13.6
    """

    model_bytes: int
    """Bytes of all gradients in float32."""
    arrays: int
    step_s: float
    """Seconds that a step computes."""
    link_bytes_s: float
    """Bytes per second of a machine's link, each way."""
    backward: float = 2 / 3
    """The share of a step in which gradients come up."""
    is_apart: bool = False
    """Servers have machines of their own."""
    round_trip_s: float = 5e-4
    shared_cores: int = 0
    """Cores that all processes share, in a trial on one machine; 0 if each machine has its own."""


class Way(NamedTuple):
    """A way to exchange what workers learn."""

    name: str
    code: str
    """The text in a script."""
    share: float = 1.0
    """Bytes that travel for each byte of float32."""
    codec_s: float = 0.0
    """Processor seconds per byte of float32, to write and to read."""
    every: int = 1
    """Steps between two exchanges."""
    has_servers: bool = True


_OPTIMIZER = 'DistributedOptimizer(..., compression={{"type": "{}", "pull": True}})'
WAYS = (
    Way("float32", "DistributedOptimizer(...)"),
    Way("float32, gloo", 'init_process_group("gloo"), DistributedDataParallel', has_servers=False),
    Way("fp16", _OPTIMIZER.format("fp16"), 1 / 2, 0.4e-9),
    Way("int8", _OPTIMIZER.format("int8"), 0.254, 0.7e-9),
    Way("2bit", _OPTIMIZER.format("2bit"), 1 / 16, 0.6e-9),
    Way("10 local steps", "DiLoCo(..., sync_every=10)", every=10),
    Way("30 local steps", "DiLoCo(..., sync_every=30)", every=30),
    Way("100 local steps", "DiLoCo(..., sync_every=100)", every=100),
    Way(
        "100 local steps, e3m0",
        'DiLoCo(..., sync_every=100, compression={"type": "e3m0", "pull": True})',
        share=0.126,
        codec_s=5e-9,
        every=100,
    ),
)
"""The ways, from the exact one to those that lose most."""


class Prediction(NamedTuple):
    """A way on a number of machines."""

    way: Way
    machines: int
    servers: int
    """The fewest that are enough; 0 where there are none."""
    step_s: float
    speed: float
    """Times as fast as one machine."""


def step_s(job: Job, way: Way, machines: int, servers: int) -> float:
    """Return the seconds of a step, with one worker on each machine."""
    exchange_s = _exchange_s(job, way, machines, servers)
    call_s = 2 * job.round_trip_s + CALL_S + ARRAY_S * job.arrays
    if way.every > 1:
        return job.step_s + (exchange_s + call_s) / way.every
    bucket = min(job.model_bytes, BUCKET_BYTES if way.has_servers else GLOO_BUCKET_BYTES)
    until_first_s = job.step_s * (1 - job.backward * (1 - bucket / job.model_bytes))
    last_s = _exchange_s(replace(job, model_bytes=bucket), way, machines, servers)
    return max(until_first_s + exchange_s, job.step_s + last_s) + call_s


def _exchange_s(job: Job, way: Way, machines: int, servers: int) -> float:
    """Return the seconds in which all gradients are pushed and pulled."""
    wire = job.model_bytes * way.share
    rate = job.link_bytes_s / FRAME * FILL
    if not way.has_servers:
        return 2 * (machines - 1) / machines * wire / rate
    of_link = max(wire, machines * wire / servers)
    if not job.is_apart:
        of_link = wire + (machines - 2) * wire / servers
    # The pull of the last chunk follows its push.
    chunks = max(1.0, job.model_bytes / servers / min(CHUNK_BYTES, job.model_bytes / job.arrays))
    worker_s = 2 * wire * COPY_S + job.model_bytes * way.codec_s
    server_s = machines / servers * worker_s
    busy_s = max(worker_s, server_s)
    if job.shared_cores:
        busy_s = (machines * worker_s + servers * server_s) / job.shared_cores
    return max(of_link / rate * (1 + 1 / chunks), busy_s)


def predict(job: Job, way: Way, machines: int) -> Prediction:
    """Return a way's step on so many machines, with the fewest servers that are enough."""
    counts = [1 << power for power in range(machines.bit_length()) if 1 << power < machines] + [machines]
    steps = [(count, step_s(job, way, machines, count)) for count in (counts if way.has_servers else [0])]
    least_s = min([seconds for _, seconds in steps])
    servers, seconds = next((count, s) for count, s in steps if s <= NEAR * least_s)
    return Prediction(way, machines, servers, seconds, machines * job.step_s / seconds)


def advise(job: Job, machines: int) -> Prediction | None:
    """Return the least lossy way that is fast enough, else the fastest; None if machines do not pay."""
    found = [predict(job, way, machines) for way in WAYS]
    enough = [each for each in found if each.speed >= ENOUGH * machines]
    best = enough[0] if enough else max(found, key=lambda each: each.speed)
    return best if best.speed >= PAYS else None


def computed_s(job: Job, machines: int, servers: int) -> float:
    """Return how long a step computes in a running job of float32 gradients, whose steps take ``job.step_s``
    with the exchange: the computation for which that would be the prediction."""
    low, high = 0.0, job.step_s
    for _ in range(40):
        middle = (low + high) / 2
        if step_s(replace(job, step_s=middle), WAYS[0], machines, servers) < job.step_s:
            low = middle
        else:
            high = middle
    return high


def report(job: Job, machines: Sequence[int]) -> str:
    """Return the table of all ways, and the advice for each number of machines."""
    heads = [f"{count} machines" for count in machines]
    lines = [
        f"a step computes {_time(job.step_s)}, {job.arrays:,} gradients have {job.model_bytes / 1e6:,.3g} "
        f"MB, a link carries {8e-6 * job.link_bytes_s:,.4g} Mbit/s each way",
        f"servers are {'on machines of their own' if job.is_apart else 'beside the workers'}; times as fast "
        "as one machine (a step; servers):",
        "",
        f"{'':<22}" + "".join([f"{head:>24}" for head in heads]),
    ]
    for way in WAYS:
        cells = [predict(job, way, count) for count in machines]
        texts = [f"{each.speed:.2f} ({_time(each.step_s)}; {each.servers})" for each in cells]
        lines.append(f"{way.name:<22}" + "".join([f"{text:>24}" for text in texts]))
    lines.append("")
    for count in machines:
        best = advise(job, count)
        if best is None:
            lines.append(f"-> {count} machines do not pay: the links are too slow for steps this short")
            continue
        servers = f" and {best.servers} server{'s' * (best.servers > 1)}" if best.servers else ""
        lines.append(f"-> {count} machines: {best.speed:.1f} times as fast, with {best.way.code}{servers}")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
