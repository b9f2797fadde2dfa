"""Findings: what is wrong with a job, whose fault it is, and what to do next.

``kvps status``, ``kvps top``, ``kvps doctor`` and the dashboard show these findings. Why a job
does not go on follows from the answer to LOOK, in which waits have their age: no clock is asked.
The other rules need the figures of servers, in the document of :mod:`kvps.observe.job`. A rule
says nothing where its figures are unknown.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from kvps.phrases import and_more, bytes_in_words, ranks_in_words
from kvps.protocol.envelope import Role
from kvps.protocol.membership import OldRound, Seen, Wait

CIRCLE_S, STUCK_S = 5.0, 10.0
"""Seconds after which workers that wait for each other are named; and any other wait, or an open round."""
KEY_SHOWN, SHOWN_MAX = 40, 3
"""Characters of a key, and waits of a kind, that are shown."""
MEMORY_FULL = 0.9
"""Least share of its memory limit at which a server is called full; and of its host's memory,
short of memory."""
ANSWER_SLOW_S, ANSWER_LATE_S = 0.25, 1.5
"""Least seconds of an answer by which a server is slow, if the others are not; and is late in any case."""
SLOWER = 4.0
"""Times the median of the others that such an answer takes."""
WAIT_S = 1.0
"""Seconds that a round is open before a finding names the ranks that it waits for."""
LATE_S, LATE_SHARE = 0.02, 0.25
"""Seconds, and share of a step, by which a worker must be late on average."""
LINK_FULL = 0.75
"""Least share of the time in which values are under way on a link that is called full."""
LINK_BUSIER = 2.0
"""Times the share of the other workers' links to that server, at which a worker's link is called full."""
LINK_CAUSE = 0.5
"""Share of a worker's lateness that a link must take, beyond the time of the others, to be its cause."""
IMBALANCE = 1.6
"""Times the mean that the busiest server carries before it is called out of balance."""
TRAFFIC_MIN = 1 << 20
"""Bytes per second below which balance does not matter."""
RECENT_S = 60.0
"""Seconds for which a fault that is over is still a finding."""
LAG_S = 1.0


class Level(enum.StrEnum):
    """How grave a finding is."""

    FAIL = "fail"
    """It does not work."""
    WARN = "warn"
    """It works, and may be slow or confusing."""
    INFO = "info"
    OK = "ok"
    SKIP = "skip"
    """It could not be looked at, as something before it failed."""


class Finding(NamedTuple):
    """A sentence about a job, or about the way of a process to its scheduler."""

    level: Level
    topic: str
    """The panel of the dashboard that has the figures, or the check of ``kvps doctor``."""
    text: str
    """The fault, with its figure and unit, and the member that causes it."""
    advice: str = ""
    """The next step; empty if there is nothing to do."""
    members: tuple[str, ...] = ()
    """The members to look at."""


def judge(
    waits: Sequence[Wait], rounds: Sequence[OldRound], presence: Callable[[int], str] = lambda rank: ""
) -> list[Finding]:
    """Return why a job does not go on, the gravest first; nothing where it does.

    A finding is a failure if the job cannot go on by itself, else a warning: the job may be slow.

    Args:
        waits: the calls in which workers wait.
        rounds: the oldest open rounds.
        presence: returns how a worker stands, in words.

    Example:
        >>> circle = [Wait(0, "push()", 9.0, (1,)), Wait(1, "barrier()", 8.0, (0,))]
        >>> judge(circle, [])[0].text
        'worker 0 has waited in push() for worker 1 for 9 s; worker 1 has waited in barrier() for
        worker 0 for 8 s'
    """
    by_rank = {wait.rank: wait for wait in waits}
    circle = _circle({rank: wait for rank, wait in by_rank.items() if wait.waited_s >= CIRCLE_S})
    if circle:
        told = [_told(by_rank[rank]) for rank in circle[:SHOWN_MAX]]
        return [
            Finding(
                Level.FAIL,
                "workers",
                "; ".join(told) + and_more(len(circle) - SHOWN_MAX),
                "they wait for each other, and none can go on: every worker must make the same calls in "
                "the same order. Look at these calls in the script, and start the job again",
                _workers(circle),
            )
        ]
    stuck = [round_ for round_ in rounds if round_.age_s >= STUCK_S and round_.missing]
    found = [
        Finding(
            Level.WARN,
            "workers",
            f"round {round_.number} of key {round_.key[:KEY_SHOWN]!r} of store {round_.store!r} has been "
            f"open for {round_.age_s:.0f} s, and waits for {ranks_in_words(round_.missing, presence)}",
            "look at the script, the host and the link of what it waits for",
            _workers(round_.missing),
        )
        for round_ in stuck
    ]
    named = {rank for round_ in stuck for rank in round_.missing}
    rest = [wait for wait in waits if wait.waited_s >= STUCK_S and not named.intersection(wait.ranks)]
    for wait in sorted(rest, key=lambda wait: -wait.waited_s)[:SHOWN_MAX]:
        if not wait.ranks and stuck:
            continue  # for that round, in all likelihood
        who = f", for {ranks_in_words(wait.ranks, presence)}" if wait.ranks else ""
        found.append(
            Finding(
                Level.WARN,
                "workers",
                f"worker {wait.rank} has waited in {wait.call} for {wait.waited_s:.0f} s{who}",
                "look at the scripts, hosts and links of these workers, or at the servers if none is named",
                _workers(wait.ranks or (wait.rank,)),
            )
        )
    return found


def problems_of(seen: Seen) -> list[Finding]:
    """Return why a job does not go on, by the answer to LOOK."""
    presence = {member.rank: member.presence for member in seen.members if member.role == Role.WORKER}
    return [
        *judge(seen.waits, seen.rounds, lambda rank: presence.get(rank, "")),
        *_copies(seen),
        *_moves(seen),
    ]


def _copies(seen: Seen) -> Iterator[Finding]:
    """Yield what the loss of a server would cost now, in a job with copies."""
    if seen.phase == "forming":
        return
    for copy in seen.copies:
        if copy.state == "level":
            continue
        how, advice = f"its copy at {copy.who} has {copy.copied} % of the values", "wait until it has all"
        if copy.reason:
            advice = "a store that cannot be copied needs checkpoints (--checkpoint-dir)"
        if not copy.who:
            how, advice = "it has no copy", "start another kvps-server, which becomes its standby"
        cost = (
            f"the steps since checkpoint {seen.checkpoint}" if seen.checkpoint else "its part of the values"
        )
        text = f"the loss of server {copy.rank} would now cost {cost}: {how}"
        why = f" ({copy.reason})" if copy.reason else ""
        yield Finding(Level.WARN, "copies", text + why, advice, (f"server {copy.rank}",))


def _moves(seen: Seen) -> Iterator[Finding]:
    """Yield the seats of servers that are to move, and have not for a while."""
    for move in [move for move in seen.moves if not move.is_over and move.ago_s >= STUCK_S]:
        why = f"{move.who} has not taken it" if move.who else "no process is there that may take it"
        advice = "it takes the seat once it has all values and no round is open; see the open rounds"
        yield Finding(
            Level.WARN,
            "servers",
            f"the seat of server {move.rank} has been due to move for {move.ago_s:.0f} s: {why}",
            advice
            if move.who
            else "start kvps-server; kvps-launch -s S:MAX and kvps scale start it themselves",
            (f"server {move.rank}",),
        )


def _workers(ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple([f"worker {rank}" for rank in ranks])


def _told(wait: Wait) -> str:
    who = f"worker{'s' * (len(wait.ranks) != 1)} {', '.join(map(str, wait.ranks[:SHOWN_MAX]))}"
    more = and_more(len(wait.ranks) - SHOWN_MAX)
    return f"worker {wait.rank} has waited in {wait.call} for {who}{more} for {wait.waited_s:.0f} s"


def _circle(waits: Mapping[int, Wait]) -> list[int]:
    """Return workers each of which waits for the next, and the last for the first; none where
    there is no such circle."""
    over: set[int] = set()
    for start in sorted(waits):
        path, left = [start], [iter(waits[start].ranks)]
        while path:
            rank = next(left[-1], None)
            if rank is None:
                over.add(path.pop())
                left.pop()
            elif rank in path:
                return path[path.index(rank) :]
            elif rank in waits and rank not in over:
                path.append(rank)
                left.append(iter(waits[rank].ranks))
    return []


# --- rules for figures over time -----------------------------------------------------------------


def findings(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what there is to say of a job, the worst first; nothing if all is well."""
    found = [finding for rule in RULES for finding in rule(document)]
    order = list(Level)
    return [finding._asdict() for finding in sorted(found, key=lambda finding: order.index(finding.level))]


def _phase(document: Mapping[str, Any]) -> Iterator[Finding]:
    phase = document.get("phase")
    if phase != "running":
        level = Level.INFO if phase == "forming" else Level.FAIL
        yield Finding(level, "cluster", f"The job is {phase}: {document.get('reason')}.")


def _faults(document: Mapping[str, Any]) -> Iterator[Finding]:
    for fault in document.get("faults", ()):
        name, level = fault["member"], Level.FAIL
        last = fault["steps"][-1]["text"] if fault["steps"] else "nothing was done yet"
        text = f"{name.capitalize()} is lost: {fault['reason']}; {last}."
        if fault["is_over"]:
            if fault["age_s"] - fault["lasted_s"] > RECENT_S:
                continue
            text = f"{name.capitalize()} was lost for {fault['lasted_s']:.1f} s ({fault['reason']}): {last}."
            level = Level.INFO
        yield Finding(level, "faults", text, "", (name,))


def _waits(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Say why the job does not go on; before that is known, name the workers that the oldest open
    rounds wait for."""
    problems = document.get("problems", ())
    for problem in problems:
        text, advice = [f"{part[:1].upper()}{part[1:]}." for part in (problem["text"], problem["advice"])]
        yield Finding(Level.FAIL, "workers", text, advice, problem["members"])
    if problems:
        return
    for worker in document["workers"]:
        waited_s = worker["waited_s"]
        if waited_s is not None and waited_s >= WAIT_S and worker["state"] in ("held", "lost"):
            yield Finding(
                Level.FAIL,
                "workers",
                f"Worker {worker['rank']} holds up a round: the others have waited {waited_s:.1f} s for its "
                f"gradient. It is {worker['presence']}.",
                "Look at its script, its host and its link.",
                _workers([worker["rank"]]),
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
            cause, advice = _cause(worker, rate)
            yield Finding(
                Level.WARN,
                "workers",
                f"Worker {worker['rank']} is slow: on average it pushes {_ms(late_s)} after the first "
                f"worker of a round, and the others wait for it. {cause}",
                advice,
                _workers([worker["rank"]]),
            )


def _cause(worker: Mapping[str, Any], rate: float) -> tuple[str, str]:
    """Say whether a slow worker's link or its computation makes it slow, and what to do."""
    link = worker["link"]
    if link is None or not rate:
        return "Its computation, its input or its link is slower than theirs.", ""
    if is_slow_link(worker, rate):
        return (
            f"The cause is its link to server {link['server']}: values are under way there for "
            f"{link['share']:.0%} of the time, and for {link['usual_share'] or 0.0:.0%} on the links of the "
            "others.",
            "Look at the network of its host; compression sends fewer bytes.",
        )
    return (
        "The cause is its computation or its input, and not its links: values are under way there for "
        f"{link['share']:.0%} of the time.",
        "",
    )


def is_slow_link(worker: Mapping[str, Any], rate: float) -> bool:
    """Whether a worker's link takes the larger part of its lateness, at ``rate`` rounds per second."""
    link, late_s = worker["link"], worker["lateness_s"]
    if link is None or not late_s or not rate:
        return False
    excess_s = (link["share"] - (link["usual_share"] or 0.0)) / rate
    return bool(excess_s >= LINK_CAUSE * late_s)


def _links(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Name full links: of a server, if the other servers' links are not as busy; else of a worker;
    or all of them."""
    shares = {server["rank"]: server["link_share"] or 0.0 for server in document["servers"]}
    # A server that answers late keeps values waiting, too.
    late = {server["rank"] for server in document["servers"] if server["answer_s"] >= ANSWER_SLOW_S}
    full = {rank for rank, share in shares.items() if share >= LINK_FULL} - late
    if full and len(full) == len(shares):
        yield Finding(
            Level.INFO,
            "servers",
            f"Values are under way for {min(shares.values()):.0%} of the time, on all links alike: not the "
            "computation bounds the job, but the way to the servers and back.",
            "Compress, add servers, or use larger batches.",
        )
        return
    for rank in sorted(full):
        yield Finding(
            Level.WARN,
            "servers",
            f"The link of server {rank} is full: values are under way between it and its workers for "
            f"{shares[rank]:.0%} of the time.",
            "Look at the network of its host, compress, or add servers on other hosts.",
            (f"server {rank}",),
        )
    for worker in document["workers"]:
        link = worker["link"]
        if link is None or link["server"] in full | late or not _is_full(link):
            continue
        yield Finding(
            Level.WARN,
            "workers",
            f"The link between worker {worker['rank']} and server {link['server']} is full: values are "
            f"under way there for {link['share']:.0%} of the time ({link['in_share']:.0%} to the server, "
            f"{link['out_share']:.0%} back).",
            "Look at the network of the worker's host, or compress.",
            _workers([worker["rank"]]),
        )


def _is_full(link: Mapping[str, Any]) -> bool:
    """Whether a link is full, and the other workers' links to its server are not."""
    usual = link["usual_share"]
    return usual is not None and link["share"] >= max(LINK_FULL, LINK_BUSIER * usual)


def _servers(document: Mapping[str, Any]) -> Iterator[Finding]:
    for server in document["servers"]:
        for level, text, advice in _faults_of(server, document["servers"]):
            name = f"Server {server['rank']}"
            yield Finding(level, "servers", f"{name} {text}", advice, (name.lower(),))


def _faults_of(
    server: Mapping[str, Any], servers: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Level, str, str]]:
    """Yield the level, the text behind its name and the advice of each fault of a server."""
    share, answer_s, used_ratio = [server[name] for name in ("memory_share", "answer_s", "memory_used_ratio")]
    if share is not None and share >= MEMORY_FULL:
        used, limit = [bytes_in_words(int(server[name])) for name in ("memory_bytes", "memory_limit_bytes")]
        text = (
            f"is full: {used} of its limit of {limit} are reserved ({share:.0%}), so larger keys "
            "or optimizers are refused."
        )
        yield Level.WARN, text, "Add servers, or raise --memory-limit."
    if used_ratio >= MEMORY_FULL:
        text = (
            f"is short of memory: {used_ratio:.0%} of its host or container are in use. From 95 % on "
            "(--limit used_memory) it refuses new work."
        )
        yield Level.FAIL, text, "End other processes there, give it more, or add servers."
    others = [other["answer_s"] for other in servers if other is not server]
    is_slower = bool(others) and answer_s >= SLOWER * median(others)
    if answer_s >= ANSWER_LATE_S or (answer_s >= ANSWER_SLOW_S and is_slower):
        text = (
            f"is slow: it took {_ms(answer_s)} to answer the scheduler. Its process is stopped or "
            "overloaded, or the link to it is full."
        )
        level = Level.FAIL if answer_s >= ANSWER_LATE_S else Level.WARN
        yield level, text, "Look at the processors of its host."
    if server["overloads"]:
        text = f"has refused {server['overloads']:.0f} requests at a limit; its log names the limit."
        yield Level.WARN, text, ""


def _balance(document: Mapping[str, Any]) -> Iterator[Finding]:
    totals = document["totals"]
    moved = totals["in_bytes_per_s"] + totals["out_bytes_per_s"]
    if (totals["imbalance"] or 0.0) >= IMBALANCE and moved >= TRAFFIC_MIN:
        busiest = max(document["servers"], key=lambda server: server["traffic_share"])
        yield Finding(
            Level.WARN,
            "keys",
            f"Server {busiest['rank']} carries {busiest['traffic_share']:.0%} of the bytes. A key that is "
            "hot or large lies there; see the keys below.",
            "A lower bigarray_bound spreads large keys over all servers.",
        )


def _checkpoints(document: Mapping[str, Any]) -> Iterator[Finding]:
    ours = document.get("checkpoints")
    if not ours:
        return
    if ours["failure"]:
        yield Finding(Level.FAIL, "checkpoints", f"Checkpoints failed: {ours['failure']}.")
    every_s, age_s = ours["every_s"], ours["kept_age_s"]
    if every_s and age_s is not None and age_s > 3 * every_s:
        text = f"The newest checkpoint is {age_s:.0f} s old, and one is due every {every_s:g} s."
        yield Finding(Level.WARN, "checkpoints", text)
    if any(server["snapshots_failed"] for server in document["servers"]):
        text = "A server could not write its part of a checkpoint."
        yield Finding(Level.WARN, "checkpoints", text)


def _loop(document: Mapping[str, Any]) -> Iterator[Finding]:
    if document["loop_lag_s"] >= LAG_S:
        text = f"The scheduler itself is slow: its loop is {document['loop_lag_s']:.1f} s late."
        yield Finding(Level.WARN, "cluster", text)


RULES = (_phase, _faults, _waits, _late, _links, _servers, _balance, _checkpoints, _loop)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
