"""The findings of ``kvps doctor``: what measurements of one process and its way to the scheduler
mean, and what to do.

Everything here is decided from :class:`Measurements`, which :mod:`kvps.tools.doctor.examination` takes. A
finding is one line: the thing measured, whether it is well, the figure, and the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


Results = Iterator[tuple[Level, str, str]]
"""Findings of one check: level, figure, and what to do; empty if it could not be looked at."""
OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL
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


ADVICE = {
    "name": "check the name in --scheduler (KVPS_SCHEDULER) and the DNS of this host; getent hosts NAME must "
    "print an address",
    "refused": "no process listens there: start kvps-scheduler, or give --scheduler the address of its "
    "--bind. If it is bound to 127.0.0.1, other hosts cannot reach it",
    "unreached": "the address is wrong, its host is down, or a firewall drops packets: check --scheduler, "
    "and allow the port",
    "stranger": "another service has this port, or a relay without its target: check --scheduler",
    "bad keys": "correct --keys (KVPS_KEYS)",
    "no keys": "give --keys DIR (KVPS_KEYS) the directory of this job; kvps-launch --log-level info shows it",
    "surplus keys": "leave --keys and KVPS_KEYS out, or start the scheduler with --keys",
    "other keys": "use the keys of this job: 'look' or 'admin' of the directory that kvps keygen made for it",
    "version": "install one version of kvps on all hosts",
    "no answer": "this may be the port of a server or of another kvps process, the scheduler may be stopped "
    "or overloaded, or its protocol another: compare kvps --version on both hosts",
    "versions": "install one version of kvps on all hosts (pip install kvps==VERSION), and start the job "
    "again",
    "servers": "start kvps-server again with the same --rank and the --checkpoint-dir that has its files: "
    "the job continues from the last checkpoint. Without checkpoints start the job again",
    "workers": "start kvps-worker again with the same --rank, or create the store with on_worker_lost",
    "silent": "its process is stopped, its host overloaded, or the network between them cut: look there",
    "empty": "start them, or expect fewer with kvps-scheduler --workers and --servers",
    "slow": "a push and pull takes at least this long: place servers nearer to workers, and push many keys "
    "in one call",
    "narrow": "a gradient of 100 MB takes {seconds:.0f} s each way: use kv.set_gradient_compression(), place "
    "servers where the link is wider, or check the network (ethtool, iperf3)",
    "clock": "logs, traces and the dates of keys disagree between hosts: let chrony or systemd-timesyncd set "
    "the clocks (timedatectl); training itself does not depend on them",
    "unshared": "values travel in packets, also on one host: allow memfd_create and raise RLIMIT_FSIZE "
    "(ulimit -f unlimited) and the memory of the container",
    "tcp": "unset KVPS_TRANSPORT to share memory between processes of one host",
    "descriptors": "raise the limit to {need:,} or more: ulimit -n {need}; LimitNOFILE= in systemd; --ulimit "
    "nofile= in docker",
    "in use": "end that process, choose another port with --bind, or port 0 for a free one",
    "no address": "give --bind an address of this host: ip address shows them; 0.0.0.0 is all of them",
}
"""The advice for each fault."""


def diagnose(m: Measurements) -> list[Finding]:
    """Return the findings, in the order in which a connection is made.

    Example:
        >>> found = diagnose(Measurements("tcp://head:9091", resolve_error="Name or service not known"))
        >>> found[0].topic, found[0].level.value
        ('address', 'fail')
    """
    checks = {
        **{"address": _address, "connection": _connection, "keys": _keys, "answer": _answer},
        **{"versions": _versions, "members": _members, "progress": _progress, "round trip": _round_trip},
        **{"bandwidth": _bandwidth, "clock": _clock, "shared memory": _shared_memory},
        **{"file descriptors": _descriptors, **({"port": _bind} if m.bind else {})},
    }
    return [
        Finding(level, name, text, advice)
        for name, check in checks.items()
        for level, text, advice in list(check(m)) or [(Level.SKIP, "not measured", "")]
    ]


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if anything failed, else 0."""
    return int(any(finding.level is FAIL for finding in findings))


def _address(m: Measurements) -> Results:
    if m.resolve_error:
        yield FAIL, f"{m.scheduler}: {m.resolve_error}", ADVICE["name"]
    else:
        yield OK, f"{m.scheduler} is {some_of(m.addresses, 3)}", ""


def _connection(m: Measurements) -> Results:
    if m.resolve_error:
        return
    if m.connect_error == "refused":
        yield FAIL, f"{m.scheduler} refuses connections", ADVICE["refused"]
    elif m.connect_error:
        yield FAIL, f"{m.scheduler}: {m.connect_error}", ADVICE["unreached"]
    elif m.mechanism not in ("NULL", "CURVE"):
        told = f"announces {m.mechanism!r}" if m.mechanism else "does not greet as ZeroMQ does"
        yield FAIL, f"{m.scheduler} accepts connections, and {told}", ADVICE["stranger"]
    else:
        assert m.connect_s is not None
        yield OK, f"connected in {_ms(m.connect_s)}", ""


def _keys(m: Measurements) -> Results:
    needs = m.mechanism == "CURVE"
    if m.keys_error:
        yield FAIL, m.keys_error, ADVICE["bad keys"]
    elif m.mechanism not in ("NULL", "CURVE"):
        return
    elif needs and not m.has_keys:
        yield FAIL, "the scheduler has keys, and this command none", ADVICE["no keys"]
    elif m.has_keys and not needs:
        yield FAIL, "this command has keys, and the scheduler none", ADVICE["surplus keys"]
    elif m.refusal:
        yield FAIL, m.refusal, ADVICE["other keys"]
    elif needs:
        yield OK, "the scheduler accepts the key, packets are encrypted", ""
    else:
        yield OK, "no keys on either side: use them where others reach the network", ""


def _answer(m: Measurements) -> Results:
    if m.seen is not None:
        yield OK, f"the job is {m.seen.phase}: {m.seen.reason}", ""
    elif m.look_error:
        yield FAIL, m.look_error, ADVICE["version" if "version" in m.look_error else "no answer"]


def _versions(m: Measurements) -> Results:
    if m.seen is None:
        return
    theirs = m.seen.software
    others = [] if theirs == m.software else [f"the scheduler has {theirs or 'an older version'}"]
    for member, figures in zip(m.seen.members, m.seen.figures, strict=False):
        if member.state == "held" and figures.software not in ("", m.software):
            others.append(f"{_node(member)} has {figures.software}")
    if others:
        ours = f"this is kvps {m.software} (protocol {PROTOCOL[0]}.{PROTOCOL[1]})"
        yield WARN, f"{ours}; {some_of(others, MEMBERS_SHOWN)}", ADVICE["versions"]
    else:
        yield OK, f"kvps {m.software} everywhere", ""


def _members(m: Measurements) -> Results:
    if m.seen is None:
        return
    members, is_well = [each for each in m.seen.members if each.role != Role.STANDBY], True
    lost = [member for member in members if member.state in ("lost", "gone")]
    silent = [member for member in members if member.state == "held" and member.heard_s >= SILENT_AFTER_S]
    for role, what in ((Role.SERVER, "servers"), (Role.WORKER, "workers")):
        if told := [f"{_node(each)} ({each.host}) is {each.presence}" for each in lost if each.role == role]:
            is_well = False
            yield FAIL, some_of(told, MEMBERS_SHOWN), ADVICE[what]
    if silent:
        told = [f"{_node(member)} ({member.host}:{member.pid}) is {member.presence}" for member in silent]
        yield WARN, some_of(told, MEMBERS_SHOWN), ADVICE["silent"]
    if empty := [_node(member) for member in members if member.state == "empty"]:
        yield WARN, f"not joined yet: {some_of(empty, MEMBERS_SHOWN)}", ADVICE["empty"]
    if is_well and not silent and not empty:
        yield OK, f"all {len(members)} members are well", ""


def _progress(m: Measurements) -> Results:
    if m.seen is None:
        return
    problems = problems_of(m.seen)
    yield from [(problem.level, problem.text, problem.advice) for problem in problems]
    if not problems:
        yield OK, "no worker waits for long", ""


def _round_trip(m: Measurements) -> Results:
    if m.round_trips_s:
        median_s, worst_s = _median(m.round_trips_s), max(m.round_trips_s)
        figure = f"{_ms(median_s)} (median of {len(m.round_trips_s)}, longest {_ms(worst_s)})"
        yield (OK, figure, "") if median_s < RTT_SLOW_S else (WARN, figure, ADVICE["slow"])


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
        return
    size, _ = max(m.transfers)
    figure = f"{_bits(rate)} to the scheduler ({bytes_in_words(size)} there and back)"
    if rate >= LINK_SLOW_BITS_S:
        yield OK, figure, ""
    else:
        yield WARN, f"slow link: {figure}", ADVICE["narrow"].format(seconds=100e6 * 8 / rate)


def _clock(m: Measurements) -> Results:
    if m.clock_ahead_s is not None:
        ahead = m.clock_ahead_s
        figure = f"the scheduler's clock is {abs(ahead):.3f} s {'ahead' if ahead > 0 else 'behind'}"
        yield (OK, figure, "") if abs(ahead) < SKEW_MAX_S else (WARN, figure, ADVICE["clock"])


def _shared_memory(m: Measurements) -> Results:
    if m.shared_memory_error:
        yield FAIL if m.transport == "shm" else WARN, m.shared_memory_error, ADVICE["unshared"]
    elif m.transport == "tcp":
        yield WARN, "KVPS_TRANSPORT=tcp turns it off", ADVICE["tcp"]
    else:
        yield OK, "this process can share memory with others of its host and user", ""


def _descriptors(m: Measurements) -> Results:
    roles = [] if m.seen is None else [member.role for member in m.seen.members]
    servers = roles.count(Role.SERVER)
    sizes = max(1, len(roles) - servers), max(1, servers)
    needs = {"worker": descriptors.of_worker, "server": descriptors.of_server}
    who, count = max(
        ((who, max(of_role(*sizes), descriptors.LEAST)) for who, of_role in needs.items()),
        key=lambda need: need[1],
    )
    need, hard = m.limits.open + count + descriptors.SPARE, m.limits.hard
    job = f"a {who} of this job" if m.seen is not None else "the smallest job"
    limit = "no limit" if hard < 0 else f"{hard:,}"
    figure = f"{m.limits.open} open, limit {limit}; {job} needs {need:,}"
    is_enough = hard < 0 or need <= hard
    yield (OK, figure, "") if is_enough else (FAIL, figure, ADVICE["descriptors"].format(need=need))


def _bind(m: Measurements) -> Results:
    if not m.bind_error:
        yield OK, f"{m.bind} is free", ""
        return
    holder = f", held by {m.bind_holder}" if m.bind_holder else ""
    what = "in use" if "in use" in m.bind_error else "no address"
    yield FAIL, f"{m.bind}: {m.bind_error}{holder}", ADVICE[what]


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
