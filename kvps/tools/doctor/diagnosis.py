"""The findings of ``kvps doctor``: what measurements of one process and its way to the scheduler
mean, and what to do.

Everything here is decided from :class:`Measurements`, which :mod:`kvps.tools.doctor.examination` takes. A
finding is one line: what was looked at, whether it is well, the figure, and the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvps import __version__
from kvps.core.liveness import SILENT_AFTER_S
from kvps.net import descriptors
from kvps.observe.findings import Finding, Level, problems_of
from kvps.phrases import bytes_in_words, some_of
from kvps.protocol.envelope import PROTOCOL, Node, Role
from kvps.protocol.membership import Seen, Sight

RTT_SLOW_S = 0.01
"""Least round trip of a link that counts as slow."""
LINK_SLOW_BITS_S = 200e6
"""Bandwidth below which a link counts as slow, in bits per second: an ordinary gradient of 100 MB
takes 4 s there."""
SKEW_MAX_S = 1.0
"""Difference of clocks from which logs and traces of two hosts contradict each other."""
MEMBERS_SHOWN = 5


class FileLimits(NamedTuple):
    """The file descriptors of this process."""

    open: int
    soft: int
    hard: int
    """-1 stands for no limit."""


Results = Sequence[tuple[Level, str, str]]
"""Level, text and advice of each finding of one check; none if it could not be made."""
NO_LIMITS = FileLimits(0, -1, -1)


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of one process; an empty text or None means that something was not measured."""

    scheduler: str
    """Its address, as ``tcp://HOST:PORT``."""
    addresses: tuple[str, ...] = ()
    """The addresses of its host's name."""
    resolve_error: str = ""
    connect_s: float | None = None
    """Seconds until a TCP connection stood."""
    connect_error: str = ""
    """``refused``, ``silent`` for no answer, or another error."""
    mechanism: str | None = None
    """The security mechanism that the listener announces: ``NULL``, ``CURVE``, or another text, as
    a relay or another service does; empty if it announces none."""
    has_keys: bool = False
    """This process was given keys."""
    keys_error: str = ""
    """Why the keys that were given cannot be read."""
    refusal: str = ""
    """Why the scheduler does not serve this process."""
    look_error: str = ""
    """Why there is no answer to LOOK, other than a refusal."""
    seen: Seen | None = None
    """The answer to LOOK."""
    round_trips_s: tuple[float, ...] = ()
    """Times of PINGs without payload."""
    transfers: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds) of PINGs that carried bytes there and back."""
    clock_ahead_s: float | None = None
    """By how much the scheduler's clock is ahead of this process's."""
    limits: FileLimits = NO_LIMITS
    shared_memory_error: str = ""
    """Why this process cannot share memory with others of its host; empty if it can."""
    transport: str = "auto"
    """KVPS_TRANSPORT."""
    bind: str = ""
    """An address that a process here is to listen at; empty for none."""
    bind_error: str = ""
    bind_holder: str = ""
    """The process that has this port, if it is known."""
    software: str = field(default=__version__)
    """The version of this process."""


def diagnose(m: Measurements) -> list[Finding]:
    """Return the findings, in the order in which a connection is made.

    Example:
        >>> found = diagnose(Measurements("tcp://head:9091", resolve_error="Name or service not known"))
        >>> found[0].topic, found[0].level.value
        ('address', 'fail')
    """
    checks = {
        "address": _address,
        "connection": _connection,
        "keys": _keys,
        "answer": _answer,
        "versions": _versions,
        "members": _members,
        "progress": _progress,
        "round trip": _round_trip,
        "bandwidth": _bandwidth,
        "clock": _clock,
        "shared memory": _shared_memory,
        "file descriptors": _descriptors,
        **({"port": _bind} if m.bind else {}),
    }
    return [
        Finding(level, name, text, advice)
        for name, check in checks.items()
        for level, text, advice in check(m) or [(Level.SKIP, "not measured", "")]
    ]


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if anything failed, else 0."""
    return int(any(finding.level is Level.FAIL for finding in findings))


def _address(m: Measurements) -> Results:
    if m.resolve_error:
        advice = (
            "check the name in --scheduler (KVPS_SCHEDULER) and the DNS of this host; getent hosts NAME "
            "must print an address"
        )
        return [(Level.FAIL, f"{m.scheduler}: {m.resolve_error}", advice)]
    return [(Level.OK, f"{m.scheduler} is {some_of(m.addresses, 3)}", "")]


def _connection(m: Measurements) -> Results:
    if m.resolve_error:
        return []
    if m.connect_error == "refused":
        advice = (
            "no process listens there: start kvps-scheduler, or give --scheduler the address of its --bind. "
            "If it is bound to 127.0.0.1, other hosts cannot reach it"
        )
        return [(Level.FAIL, f"{m.scheduler} refuses connections", advice)]
    if m.connect_error:
        advice = (
            "the address is wrong, its host is down, or a firewall drops packets: check "
            "--scheduler, and allow the port"
        )
        return [(Level.FAIL, f"{m.scheduler}: {m.connect_error}", advice)]
    assert m.connect_s is not None
    if m.mechanism not in ("NULL", "CURVE"):
        told = f"announces {m.mechanism!r}" if m.mechanism else "does not greet as ZeroMQ does"
        advice = "another service has this port, or a relay without its target: check --scheduler"
        return [(Level.FAIL, f"{m.scheduler} accepts connections, and {told}", advice)]
    return [(Level.OK, f"connected in {_ms(m.connect_s)}", "")]


def _keys(m: Measurements) -> Results:
    if m.keys_error:
        return [(Level.FAIL, m.keys_error, "correct --keys (KVPS_KEYS)")]
    if m.mechanism not in ("NULL", "CURVE"):
        return []
    needs = m.mechanism == "CURVE"
    if needs and not m.has_keys:
        advice = (
            "give --keys DIR (KVPS_KEYS) the directory of this job; kvps-launch --log-level info shows it"
        )
        return [(Level.FAIL, "the scheduler has keys, and this command none", advice)]
    if m.has_keys and not needs:
        advice = "leave --keys and KVPS_KEYS out, or start the scheduler with --keys"
        return [(Level.FAIL, "this command has keys, and the scheduler none", advice)]
    if m.refusal:
        advice = "use the keys of this job: 'look' or 'admin' of the directory that kvps keygen made for it"
        return [(Level.FAIL, m.refusal, advice)]
    if needs:
        return [(Level.OK, "the scheduler accepts the key, packets are encrypted", "")]
    return [(Level.OK, "no keys on either side: use them where others reach the network", "")]


def _answer(m: Measurements) -> Results:
    if m.seen is not None:
        return [(Level.OK, f"the job is {m.seen.phase}: {m.seen.reason}", "")]
    if not m.look_error:
        return []
    if "version" in m.look_error:
        advice = "install one version of kvps on all hosts"
    else:
        advice = (
            "this may be the port of a server or of another kvps process, the scheduler may be stopped or "
            "overloaded, or its protocol another: compare kvps --version on both hosts"
        )
    return [(Level.FAIL, m.look_error, advice)]


def _versions(m: Measurements) -> Results:
    ours = f"this is kvps {m.software} (protocol {PROTOCOL[0]}.{PROTOCOL[1]})"
    if m.seen is None:
        return []
    theirs = m.seen.software
    others = [
        f"{_node(member)} has {figures.software}"
        for member, figures in zip(m.seen.members, m.seen.figures, strict=False)
        if member.state == "held" and figures.software not in ("", m.software)
    ]
    if theirs != m.software:
        others.insert(0, f"the scheduler has {theirs or 'an older version'}")
    if others:
        figure = f"{ours}; {some_of(others, MEMBERS_SHOWN)}"
        advice = (
            "install one version of kvps on all hosts (pip install kvps==VERSION), and start the job again"
        )
        return [(Level.WARN, figure, advice)]
    return [(Level.OK, f"kvps {m.software} everywhere", "")]


def _members(m: Measurements) -> Results:
    if m.seen is None:
        return []
    found = []
    lost = [member for member in m.seen.members if member.state in ("lost", "gone")]
    silent = [
        member for member in m.seen.members if member.state == "held" and member.heard_s >= SILENT_AFTER_S
    ]
    empty = [member for member in m.seen.members if member.state == "empty"]
    servers = [member for member in lost if member.role == Role.SERVER]
    workers = [member for member in lost if member.role == Role.WORKER]
    for bad, advice in (
        (
            servers,
            "start kvps-server again with the same --rank and the --checkpoint-dir that has its files: the "
            "job continues from the last checkpoint. Without checkpoints start the job again",
        ),
        (workers, "start kvps-worker again with the same --rank, or create the store with on_worker_lost"),
    ):
        if bad:
            told = [f"{_node(member)} ({member.host}) is {member.presence}" for member in bad]
            found.append((Level.FAIL, some_of(told, MEMBERS_SHOWN), advice))
    if silent:
        told = [f"{_node(member)} ({member.host}:{member.pid}) is {member.presence}" for member in silent]
        advice = "its process is stopped, its host overloaded, or the network between them cut: look there"
        found.append((Level.WARN, some_of(told, MEMBERS_SHOWN), advice))
    if empty:
        told = [_node(member) for member in empty]
        advice = "start them, or expect fewer with kvps-scheduler --workers and --servers"
        figure = f"not joined yet: {some_of(told, MEMBERS_SHOWN)}"
        found.append((Level.WARN, figure, advice))
    return found or [(Level.OK, f"all {len(m.seen.members)} members are well", "")]


def _progress(m: Measurements) -> Results:
    if m.seen is None:
        return []
    return [(problem.level, problem.text, problem.advice) for problem in problems_of(m.seen)] or [
        (Level.OK, "no worker waits for long", "")
    ]


def _round_trip(m: Measurements) -> Results:
    if not m.round_trips_s:
        return []
    median_s = _median(m.round_trips_s)
    worst_s = max(m.round_trips_s)
    figure = f"{_ms(median_s)} (median of {len(m.round_trips_s)}, longest {_ms(worst_s)})"
    if median_s < RTT_SLOW_S:
        return [(Level.OK, figure, "")]
    advice = (
        "a push and pull takes at least this long: place servers nearer to workers, and push many "
        "keys in one call"
    )
    return [(Level.WARN, figure, advice)]


def bits_s(m: Measurements) -> float | None:
    """Return the bandwidth of the way to the scheduler in bits per second; None if it was not measured.

    It is the bandwidth of the largest transfer: the bytes go there and come back, and the round
    trip is subtracted.
    """
    if not m.transfers or not m.round_trips_s:
        return None
    size, seconds = max(m.transfers)
    left_s = max(seconds - _median(m.round_trips_s), seconds / 100)
    return 2 * size * 8 / left_s


def _bandwidth(m: Measurements) -> Results:
    rate = bits_s(m)
    if rate is None:
        return []
    size, _ = max(m.transfers)
    figure = f"{_bits(rate)} to the scheduler ({bytes_in_words(size)} there and back)"
    if rate >= LINK_SLOW_BITS_S:
        return [(Level.OK, figure, "")]
    seconds = 100e6 * 8 / rate
    advice = (
        f"a gradient of 100 MB takes {seconds:.0f} s each way: use kv.set_gradient_compression(), place "
        "servers where the link is wider, or check the network (ethtool, iperf3)"
    )
    return [(Level.WARN, f"slow link: {figure}", advice)]


def _clock(m: Measurements) -> Results:
    if m.clock_ahead_s is None:
        return []
    ahead = m.clock_ahead_s
    figure = f"the scheduler's clock is {abs(ahead):.3f} s {'ahead' if ahead > 0 else 'behind'}"
    if abs(ahead) < SKEW_MAX_S:
        return [(Level.OK, figure, "")]
    advice = (
        "logs, traces and the dates of keys disagree between hosts: let chrony or systemd-timesyncd set the "
        "clocks (timedatectl); training itself does not depend on them"
    )
    return [(Level.WARN, figure, advice)]


def _shared_memory(m: Measurements) -> Results:
    if m.shared_memory_error:
        advice = (
            "values travel in packets, also on one host: allow memfd_create and raise RLIMIT_FSIZE (ulimit "
            "-f unlimited) and the memory of the container"
        )
        level = Level.FAIL if m.transport == "shm" else Level.WARN
        return [(level, m.shared_memory_error, advice)]
    if m.transport == "tcp":
        advice = "unset KVPS_TRANSPORT to share memory between processes of one host"
        return [(Level.WARN, "KVPS_TRANSPORT=tcp turns it off", advice)]
    return [(Level.OK, "this process can share memory with others of its host and user", "")]


def _descriptors(m: Measurements) -> Results:
    limits = m.limits
    counts = [0, 0]
    if m.seen is not None:
        for member in m.seen.members:
            counts[member.role == Role.SERVER] += 1
    workers, servers = max(1, counts[0]), max(1, counts[1])
    needs = {
        "worker": max(descriptors.of_worker(workers, servers), descriptors.LEAST),
        "server": max(descriptors.of_server(workers, servers), descriptors.LEAST),
    }
    who, count = max(needs.items(), key=lambda need: need[1])
    need = limits.open + count + descriptors.SPARE
    hard = "no limit" if limits.hard < 0 else f"{limits.hard:,}"
    job = f"a {who} of this job" if m.seen is not None else "the smallest job"
    figure = f"{limits.open} open, limit {hard}; {job} needs {need:,}"
    if limits.hard < 0 or need <= limits.hard:
        return [(Level.OK, figure, "")]
    advice = (
        f"raise the limit to {need:,} or more: ulimit -n {need}; LimitNOFILE= in systemd; "
        "--ulimit nofile= in docker"
    )
    return [(Level.FAIL, figure, advice)]


def _bind(m: Measurements) -> Results:
    if not m.bind_error:
        return [(Level.OK, f"{m.bind} is free", "")]
    holder = f", held by {m.bind_holder}" if m.bind_holder else ""
    advice = "end that process, choose another port with --bind, or port 0 for a free one"
    if "in use" not in m.bind_error:
        advice = "give --bind an address of this host: ip address shows them; 0.0.0.0 is all of them"
    return [(Level.FAIL, f"{m.bind}: {m.bind_error}{holder}", advice)]


# --- words -------------------------------------------------------------------------------------------


def _node(sight: Sight) -> str:
    return str(Node(Role(sight.role), sight.rank))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


def _bits(rate: float) -> str:
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if rate < 1000:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.3g} Gbit/s"
