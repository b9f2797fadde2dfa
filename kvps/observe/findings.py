"""Findings: the sentences that say what is wrong with a cluster, whose fault it is, and what to do next.

They are made from the document that the dashboard shows. A rule says nothing where its figures are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

from kvps.phrases import bytes_in_words

MEMORY_FULL = 0.9
"""Share of its memory limit from which on a server is called full; and of its host's memory in use, short of it."""
ANSWER_SLOW_S, ANSWER_LATE_S = 0.25, 1.5
"""Seconds of an answer from which on a server is slow, if the others are not; or is late in any case."""
SLOWER = 4.0
"""Times the median of the others that such an answer takes."""
WAIT_S = 1.0
"""Seconds that a round is open before a finding names the ranks that it waits for."""
LATE_S, LATE_SHARE = 0.02, 0.25
"""Seconds, and share of a step, by which a worker must be late on average."""
LINK_FULL = 0.75
"""Share of the time in which values are under way, from which on a link is called full."""
LINK_BUSIER = 2.0
"""Times the share of the other workers' links to that server, from which on a worker's link is called full."""
LINK_CAUSE = 0.5
"""Share of a worker's lateness that a link must take, beyond the time of the others, to be its cause."""
IMBALANCE = 1.6
"""Times the mean that the busiest server carries before it is called out of balance."""
TRAFFIC_MIN = 1 << 20
"""Bytes per second below which balance does not matter."""
RECENT_S = 60.0
"""Seconds for which a fault that is over is still a finding."""
LAG_S = 1.0

BAD, WARN, INFO = "bad", "warn", "info"


class Finding(NamedTuple):
    """One sentence, how serious it is, and the panel with the figures."""

    level: str
    panel: str
    text: str
    member: str = ""
    """The member that it is about; empty for none."""


def findings(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what there is to say, the worst first; nothing if all is well."""
    found = [finding for rule in RULES for finding in rule(document)]
    order = (BAD, WARN, INFO)
    return [
        judged._asdict() for judged in sorted(found, key=lambda finding: order.index(finding.level))
    ]


def _phase(document: Mapping[str, Any]) -> Iterator[Finding]:
    phase = document.get("phase")
    if phase != "running":
        level = INFO if phase == "forming" else BAD
        yield Finding(level, "cluster", f"The job is {phase}: {document.get('reason')}.")


def _faults(document: Mapping[str, Any]) -> Iterator[Finding]:
    for fault in document.get("faults", ()):
        last = fault["steps"][-1]["text"] if fault["steps"] else "nothing was done yet"
        if not fault["is_over"]:
            what = f"{fault['member'].capitalize()} is lost: {fault['reason']}; {last}."
            yield Finding(BAD, "faults", what, fault["member"])
        elif fault["age_s"] - fault["lasted_s"] <= RECENT_S:
            what = f"{fault['member'].capitalize()} was lost for {fault['lasted_s']:.1f} s ({fault['reason']}): {last}."
            yield Finding(INFO, "faults", what, fault["member"])


def _waits(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Say why the job does not go on; before that is known, name the workers that the oldest open rounds wait for."""
    problems = document.get("problems", ())
    for problem in problems:
        text = f"{problem['text'][:1].upper()}{problem['text'][1:]}. {problem['advice'][:1].upper()}{problem['advice'][1:]}."
        member = f"worker {problem['ranks'][0]}" if len(problem["ranks"]) == 1 else ""
        yield Finding(BAD, "workers", text, member)
    if problems:
        return
    for worker in document["workers"]:
        waited_s = worker["waited_s"]
        if waited_s is not None and waited_s >= WAIT_S and worker["state"] in ("held", "lost"):
            yield Finding(
                BAD,
                "workers",
                f"Worker {worker['rank']} holds up a round: the others have waited {waited_s:.1f} s for its gradient. "
                f"It is {worker['presence']}. Look at its script, its host and its link.",
                f"worker {worker['rank']}",
            )


def _late(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Name the workers that are late in each round."""
    rate = document["totals"]["rounds_per_s"]
    least_s = max(LATE_S, LATE_SHARE / rate if rate else 0.0)
    workers = document["workers"]
    for worker in workers:
        others = [other["lateness_s"] or 0.0 for other in workers if other is not worker]
        late_s = worker["lateness_s"]
        is_slow = late_s is not None and late_s >= least_s and others
        if is_slow and late_s >= 2 * median(others) and (worker["waited_s"] or 0.0) < WAIT_S:
            yield Finding(
                WARN,
                "workers",
                f"Worker {worker['rank']} is slow: on average it pushes {_ms(late_s)} after the first worker of a round, "
                f"and the others wait for it. {_cause(worker, rate)}",
                f"worker {worker['rank']}",
            )


def _cause(worker: Mapping[str, Any], rate: float) -> str:
    """Say whether a slow worker's link or its computation makes it slow."""
    link = worker["link"]
    if link is None or not rate:
        return "Its computation, its input or its link is slower than theirs."
    if is_slow_link(worker, rate):
        return (
            f"The cause is its link to server {link['server']}: values are under way there for {link['share']:.0%} "
            f"of the time, and for {link['usual_share'] or 0.0:.0%} on the links of the others. Look at the "
            "network of its host; compression sends fewer bytes."
        )
    return (
        "The cause is its computation or its input, and not its links: values are under way there for "
        f"{link['share']:.0%} of the time."
    )


def is_slow_link(worker: Mapping[str, Any], rate: float) -> bool:
    """Whether a worker's link takes the larger part of its lateness, at ``rate`` rounds per second."""
    link, late_s = worker["link"], worker["lateness_s"]
    if link is None or not late_s or not rate:
        return False
    excess_s = (link["share"] - (link["usual_share"] or 0.0)) / rate
    return bool(excess_s >= LINK_CAUSE * late_s)


def _links(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Name full links: of a server, if those of the others are not as busy; else of a worker; or all of them."""
    shares = {server["rank"]: server["link_share"] or 0.0 for server in document["servers"]}
    # A server that answers late keeps values waiting, too.
    late = {server["rank"] for server in document["servers"] if server["answer_s"] >= ANSWER_SLOW_S}
    full = {rank for rank, share in shares.items() if share >= LINK_FULL} - late
    if full and len(full) == len(shares):
        yield Finding(
            INFO,
            "servers",
            f"Values are under way for {min(shares.values()):.0%} of the time, on all links alike: not the computation "
            "bounds the job, but the way to the servers and back. Compress, add servers, or use larger batches.",
        )
        return
    for rank in sorted(full):
        yield Finding(
            WARN,
            "servers",
            f"The link of server {rank} is full: values are under way between it and its workers for "
            f"{shares[rank]:.0%} of the time. Look at the network of its host, compress, or add servers on other hosts.",
            f"server {rank}",
        )
    for worker in document["workers"]:
        link = worker["link"]
        if link is None or link["server"] in full | late or not _is_full(link):
            continue
        yield Finding(
            WARN,
            "workers",
            f"The link between worker {worker['rank']} and server {link['server']} is full: values are under way there "
            f"for {link['share']:.0%} of the time ({link['in_share']:.0%} to the server, {link['out_share']:.0%} back). "
            "Look at the network of the worker's host, or compress.",
            f"worker {worker['rank']}",
        )


def _is_full(link: Mapping[str, Any]) -> bool:
    """Whether a link is full, and those of the other workers to its server are not."""
    usual = link["usual_share"]
    return usual is not None and link["share"] >= max(LINK_FULL, LINK_BUSIER * usual)


def _servers(document: Mapping[str, Any]) -> Iterator[Finding]:
    servers = document["servers"]
    for server in servers:
        name, share, answer_s = (
            f"Server {server['rank']}",
            server["memory_share"],
            server["answer_s"],
        )
        if share is not None and share >= MEMORY_FULL:
            used, limit = server["memory_bytes"], server["memory_limit_bytes"]
            yield Finding(
                WARN,
                "servers",
                f"{name} is full: {bytes_in_words(int(used))} of its limit of {bytes_in_words(int(limit))} are reserved "
                f"({share:.0%}), so larger keys or optimizers are refused. Add servers, or raise --memory-limit.",
                name.lower(),
            )
        if server["memory_used_ratio"] >= MEMORY_FULL:
            yield Finding(
                BAD,
                "servers",
                f"{name} is short of memory: {server['memory_used_ratio']:.0%} of its host or container are in use. From 95 % "
                "on (--limit used_memory) it refuses new work. End other processes there, give it more, or add servers.",
                name.lower(),
            )
        others = [other["answer_s"] for other in servers if other is not server]
        is_slower = bool(others) and answer_s >= SLOWER * median(others)
        if answer_s >= ANSWER_LATE_S or (answer_s >= ANSWER_SLOW_S and is_slower):
            yield Finding(
                BAD if answer_s >= ANSWER_LATE_S else WARN,
                "servers",
                f"{name} is slow: it took {_ms(answer_s)} to answer the scheduler. Its process is stopped or overloaded, "
                "or the link to it is full. Look at the processors of its host.",
                name.lower(),
            )
        if server["overloads"]:
            yield Finding(
                WARN,
                "servers",
                f"{name} has refused {server['overloads']:.0f} requests at a limit; its log names the limit.",
                name.lower(),
            )


def _balance(document: Mapping[str, Any]) -> Iterator[Finding]:
    totals = document["totals"]
    moved = totals["in_bytes_per_s"] + totals["out_bytes_per_s"]
    if (totals["imbalance"] or 0.0) >= IMBALANCE and moved >= TRAFFIC_MIN:
        busiest = max(document["servers"], key=lambda server: server["traffic_share"])
        yield Finding(
            WARN,
            "keys",
            f"Server {busiest['rank']} carries {busiest['traffic_share']:.0%} of the bytes. A key that is hot or large "
            "lies there; see the keys below. A lower bigarray_bound spreads large keys over all servers.",
        )


def _checkpoints(document: Mapping[str, Any]) -> Iterator[Finding]:
    ours = document.get("checkpoints")
    if not ours:
        return
    if ours["failure"]:
        yield Finding(BAD, "checkpoints", f"Checkpoints failed: {ours['failure']}.")
    every_s, age_s = ours["every_s"], ours["kept_age_s"]
    if every_s and age_s is not None and age_s > 3 * every_s:
        text = f"The newest checkpoint is {age_s:.0f} s old, and one is due every {every_s:g} s."
        yield Finding(WARN, "checkpoints", text)
    if any(server["snapshots_failed"] for server in document["servers"]):
        yield Finding(WARN, "checkpoints", "A server could not write its part of a checkpoint.")


def _loop(document: Mapping[str, Any]) -> Iterator[Finding]:
    if document["loop_lag_s"] >= LAG_S:
        text = f"The scheduler itself is slow: its loop is {document['loop_lag_s']:.1f} s late."
        yield Finding(WARN, "cluster", text)


RULES = (_phase, _faults, _waits, _late, _links, _servers, _balance, _checkpoints, _loop)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
