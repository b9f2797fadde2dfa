"""The explanation of a step in words: the causes along the critical path of a trace, with their shares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median

from kvps.protocol.envelope import Node, Role
from kvps.tools.trace.chrome import MergedTrace
from kvps.tools.trace.critical_path import Cause, CriticalPath, Stretch
from kvps.tools.trace.member import SpanKind, TimeSpan

SHOWN_MIN = 0.02
"""Causes below this share are added up as one line."""
SLOW = 1.3
"""A worker is slow if it computes this many times as long as the median of the other workers."""
ONE_LINK = 0.75
"""A single link is named if it has this part of the time of all links."""
_AT_SERVER = ("reduce", "update", "reply", "serve")
_WORDS = {
    "reduce": "adding up gradients",
    "update": "optimizer steps",
    "reply": "making answers",
    "serve": "other requests",
}


_TITLES = {
    "compute": ("{0}'s compute", "the workers' compute"),
    **{"copies": ("{0}'s copies and sends",), "server": ("{0}'s work",), "scheduler": ("the scheduler",)},
    **{"link": ("the links of {0}", "the link between {0} and {1}"), "idle": ("pauses of {0}",)},
}
"""Cause -> its name, of a single node and of several."""
_ADVICE = {
    "slow": "{0} is slow: look at its input, its processor and its neighbours on that host; dist_async and "
    "dist_ssp do not wait for the slowest",
    "compute": "the training itself takes the time; kvps hides behind it",
    "copies": "use kv.empty_like() for gradients without a copy, fewer and larger keys, or compression",
    "server": "add servers (-s), or threads (KVPS_THREADS); its share falls with their number",
    "link": "compress (set_compression), aggregate on each host, or spread over more servers",
    "scheduler": "barriers and beats should take no time: look at the scheduler's host",
    "idle": "no request was under way there: a process may have been stopped, or starved",
}


@dataclass(frozen=True, slots=True)
class BoundingCause:
    """One thing that steps wait for."""

    what: str
    """``compute``, ``copies``, ``server``, ``link``, ``scheduler`` or ``idle``."""
    nodes: tuple[Node, ...]
    share: float
    """Part of the time of the trace, 0 to 1."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The causes that bound the steps of a trace."""

    seconds: float
    findings: tuple[BoundingCause, ...]
    """The largest first."""
    error_ms: float | None
    lost: int

    @property
    def text(self) -> str:
        """The explanation as lines."""
        return "\n".join(_lines(self))


def explain(trace: MergedTrace) -> Explanation:
    """Return what bounds the steps of ``trace``.

    Example:
        >>> explain(MergedTrace([])).text
        'no worker waited for a call in this trace: nothing can be said about its steps'
    """
    path = CriticalPath(trace).walk()
    total = sum([stretch.end - stretch.begin for stretch in path])
    lost = sum([process.lost for process in trace.processes])
    error_ns = trace.error_ns
    error_ms = None if error_ns is None else error_ns / 1e6
    if not total:
        return Explanation(0.0, (), error_ms, lost)
    times: Counter[Cause] = Counter()
    for stretch in path:
        times[stretch.cause] += stretch.end - stretch.begin
    findings = [*_computing(trace, path, times, total), *_at_nodes(times, total), *_links(times, total)]
    findings.sort(key=lambda finding: -finding.share)
    return Explanation(total / 1e9, tuple(findings), error_ms, lost)


# --- the causes ------------------------------------------------------------------------------------


def _computing(
    trace: MergedTrace, path: list[Stretch], times: Counter[Cause], total: int
) -> list[BoundingCause]:
    """Return the workers whose computation is waited for."""
    computed = {
        process.node: sum([span.took for span in process.spans if span.kind is SpanKind.COMPUTE])
        for process in trace.processes
        if process.node.role is Role.WORKER
    }
    found = []
    for cause, took in times.items():
        if cause.kind != "compute":
            continue
        node, detail = cause.node, ""
        others = [time for other, time in computed.items() if other != node]
        usual = median(others) if others else 0
        if usual and computed.get(node, 0) > SLOW * usual:
            times_as_long = computed[node] / usual
            waited = _waited_for(trace, path, node)
            detail = (
                f"{times_as_long:.1f} times the other workers' compute; waiting for rank {node.rank} "
                f"takes {100 * waited / total:.0f} % of the other workers' time"
            )
        found.append(BoundingCause("compute", (node,), took / total, detail))
    if len(found) > 1 and not any(cause.detail for cause in found):  # none is slow: they take turns
        nodes = tuple(sorted([cause.nodes[0] for cause in found]))
        return [BoundingCause("compute", nodes, sum([cause.share for cause in found]))]
    return found


def _waited_for(trace: MergedTrace, path: list[Stretch], node: Node) -> float:
    """Return for how long the other workers waited while ``node`` computed; nanoseconds, the mean of them."""
    computing = [stretch for stretch in path if stretch.cause == Cause("compute", node)]
    waited: list[int] = []
    for process in trace.processes:
        if process.node.role is not Role.WORKER or process.node == node:
            continue
        waits = [span for span in process.spans if span.kind is SpanKind.WAIT]
        waited.append(
            sum(
                max(0, min(stretch.end, span.end) - max(stretch.begin, span.begin))
                for stretch, span in _pairs(computing, waits)
            )
        )
    return sum(waited) / len(waited)


def _pairs(stretches: list[Stretch], waits: list[TimeSpan]) -> list[tuple[Stretch, TimeSpan]]:
    """Return the pairs that overlap; both lists are walked once."""
    pairs = []
    ascending, index = sorted(stretches, key=lambda stretch: stretch.begin), 0
    for span in waits:
        while index < len(ascending) and ascending[index].end <= span.begin:
            index += 1
        at = index
        while at < len(ascending) and ascending[at].begin < span.end:
            pairs.append((ascending[at], span))
            at += 1
    return pairs


def _at_nodes(times: Counter[Cause], total: int) -> list[BoundingCause]:
    """Return the loops that are waited for: of servers, of the scheduler, and the copies of workers."""
    by_node: dict[tuple[str, Node], Counter[str]] = {}
    for cause, took in times.items():
        if cause.kind in ("compute", "link"):
            continue
        what = "idle"
        if cause.kind != "idle":
            role = cause.node.role
            what = {Role.WORKER: "copies", Role.SERVER: "server"}.get(role, "scheduler")
        by_node.setdefault((what, cause.node), Counter())[cause.kind] += took
    found = []
    for (what, node), kinds in by_node.items():
        took, detail = kinds.total(), ""
        if what == "server":
            parts = [(kind, kinds[kind]) for kind in _AT_SERVER if kinds[kind]]
            parts.sort(key=lambda part: -part[1])
            detail = ", ".join(f"{_WORDS[kind]} {100 * ns / took:.0f} %" for kind, ns in parts[:2])
        found.append(BoundingCause(what, (node,), took / total, detail))
    return found


def _links(times: Counter[Cause], total: int) -> list[BoundingCause]:
    """Return the link, or the process whose links, packets are on for long."""
    pairs: Counter[tuple[Node, Node]] = Counter()
    up: Counter[tuple[Node, Node]] = Counter()
    for cause, took in times.items():
        if cause.kind == "link":
            assert cause.peer is not None
            first, second = sorted((cause.node, cause.peer), reverse=True)  # the worker first
            pairs[first, second] += took
            up[first, second] += took if cause.node == first else 0
    all_ns = pairs.total()
    if not all_ns:
        return []
    _, most = pairs.most_common(1)[0]
    if most >= ONE_LINK * all_ns:
        return [_link(pair, took, up[pair], total) for pair, took in pairs.items()]
    ends: Counter[Node] = Counter()
    for (first, second), took in pairs.items():
        ends[first] += took
        ends[second] += took
    node, touched = ends.most_common(1)[0]
    if touched >= ONE_LINK * all_ns:
        detail = ", ".join(
            f"{_other(pair, node)} {100 * took / all_ns:.0f} %"
            for pair, took in pairs.most_common(4)
            if node in pair
        )
        return [BoundingCause("link", (node,), all_ns / total, detail)]
    return [_link(pair, took, up[pair], total) for pair, took in pairs.items()]


def _other(pair: tuple[Node, Node], node: Node) -> Node:
    return pair[1] if pair[0] == node else pair[0]


def _link(pair: tuple[Node, Node], took: int, up: int, total: int) -> BoundingCause:
    towards = f"{100 * up / took:.0f} % of it towards {pair[1]}"
    return BoundingCause("link", pair, took / total, towards)


# --- the words -------------------------------------------------------------------------------------


def title(finding: BoundingCause) -> str:
    """Return the text of a finding."""
    return _TITLES[finding.what][len(finding.nodes) > 1].format(*finding.nodes)


def advice(finding: BoundingCause) -> str:
    """Return what may help."""
    what = "slow" if finding.what == "compute" and finding.detail else finding.what
    return _ADVICE[what].format(*finding.nodes)


def _lines(found: Explanation) -> list[str]:
    if not found.findings:
        return ["no worker waited for a call in this trace: nothing can be said about its steps"]
    first = found.findings[0]
    lines = [
        f"{title(first)} bounds the step: {100 * first.share:.0f} % of {found.seconds:.1f} s. "
        f"{_sentence(advice(first))}",
        "",
    ]
    rest = 0.0
    for finding in found.findings:
        if finding.share < SHOWN_MIN:
            rest += finding.share
            continue
        detail = f" ({finding.detail})" if finding.detail else ""
        lines.append(f"{100 * finding.share:5.0f} %  {title(finding)}{detail}")
    if rest >= 0.005:
        lines.append(f"{100 * rest:5.0f} %  all else")
    if found.error_ms is None:
        lines += ["", "The clocks of some processes could not be compared: their times may be wrong."]
    elif found.error_ms >= 0.05:
        lines += ["", f"The clocks of all processes agree within {found.error_ms:.1f} ms."]
    if found.lost:
        lines += [f"{found.lost} spans were left out, as too many waited: ask for a shorter trace."]
    return lines


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
