"""The critical path of a trace: what each moment waited for, walked from the end to the beginning.

Theory of operation
-------------------
The walk begins where the last wait of a script ended, and asks at each moment what that moment
waited for. It is in one process at a time, either in its loop or in its script:

* in a loop that handles a packet, it goes back to where the handling began, then to where the
  packet was sent. In between the packet was on its way; as far as the receiver's loop was busy
  with something else meanwhile, it waited for that.
* in a loop that sends a request of the script, it goes to the script.
* in a script that computes, it goes back to where that began: the end of a wait, and to the loop
  that ended it.

So a round that waits for a slow rank leads to the push that closed it, and from there to that
rank's script. The time between two stops is a *stretch*, and belongs to what kept it: the shares
of all stretches add up to the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from kvps.protocol.envelope import Node, Role
from kvps.tools.trace.chrome import MergedTrace, Process, RequestId, request_of
from kvps.tools.trace.member import NOBODY, SpanKind, TimeSpan

NEAR_NS = 300_000
"""Two spans of a loop with less between them follow from one another."""
STEPS_MAX = 2_000_000
INCOMING = (SpanKind.SERVE, SpanKind.REDUCE, SpanKind.UPDATE, SpanKind.SCATTER)
SCRIPT = (SpanKind.COMPUTE, SpanKind.WAIT)


class Cause(NamedTuple):
    """The cause of a stretch."""

    kind: str
    """``compute``, ``copy`` (of a worker's values), ``reduce``, ``update``, ``reply``, ``serve``,
    ``link`` or ``idle``."""
    node: Node
    """Where; of a link the sender."""
    peer: Node | None = None
    """The receiver of a link."""


class Stretch(NamedTuple):
    """Time that one cause kept."""

    begin: int
    end: int
    cause: Cause


_COPIES = (SpanKind.COPY, SpanKind.ENCODE, SpanKind.SEND, SpanKind.SCATTER)


class ProcessTrack:
    """The spans of one thread, by their time."""

    def __init__(self, spans: list[TimeSpan]) -> None:
        self.spans = spans
        self._begins = [span.begin for span in spans]

    def before(self, at: int) -> TimeSpan | None:
        """Return the last span that begins before ``at``."""
        index = bisect_right(self._begins, at - 1) - 1
        return self.spans[index] if index >= 0 else None

    def backwards(self, begin: int, end: int) -> Iterator[TimeSpan]:
        """Yield the spans that lie between ``begin`` and ``end`` or reach into it, the last first."""
        index = bisect_right(self._begins, end - 1) - 1
        while index >= 0 and self.spans[index].end > begin:
            yield self.spans[index]
            index -= 1


class CriticalPath:
    """The walk through one trace."""

    def __init__(self, trace: MergedTrace) -> None:
        self._trace = trace
        self._by_node: dict[Node, Process] = {}
        self._scripts: dict[Node, ProcessTrack] = {}
        self._loops: dict[Node, ProcessTrack] = {}
        self._sent: dict[tuple[RequestId, Node], list[TimeSpan]] = defaultdict(list)
        self._begin = trace.begin
        """Before that, not all workers were recorded."""
        for process in trace.processes:
            computing = [computed.begin for computed in process.spans if computed.kind is SpanKind.COMPUTE]
            self._begin = max(self._begin, min(computing, default=0))
            self._by_node[process.node] = process
            self._scripts[process.node] = ProcessTrack([s for s in process.spans if s.kind in SCRIPT])
            self._loops[process.node] = ProcessTrack([s for s in process.spans if s.kind not in SCRIPT])
            for span in process.spans:
                request = request_of(process, span)
                if request is not None and span.kind in (SpanKind.SEND, SpanKind.REPLY):
                    self._sent[request, process.node].append(span)

    def walk(self) -> list[Stretch]:
        """Return the stretches from the end of the trace to its beginning."""
        waits = [
            (span.end, node)
            for node, track in self._scripts.items()
            for span in track.spans[-1:]
            if span.kind is SpanKind.WAIT
        ]
        if not waits:
            return []
        at, node = max(waits)
        return list(self._walk(at, node))

    def _walk(self, at: int, node: Node) -> Iterator[Stretch]:
        begin, in_script = self._begin, False
        for _ in range(STEPS_MAX):
            if at <= begin:
                return
            stretches, at_next, node, in_script = (
                self._script_step(at, node) if in_script else self._loop_step(at, node)
            )
            for stretch in stretches:
                if stretch.end > max(begin, stretch.begin):
                    yield stretch._replace(begin=max(begin, stretch.begin))
            at = at_next

    # --- the script -----------------------------------------------------------------------------

    def _script_step(self, at: int, node: Node) -> tuple[list[Stretch], int, Node, bool]:
        """Go back through the work of the script at ``at``: it has just made a request."""
        span = self._scripts[node].before(at)
        if span is None:  # its work before the first wait is not known
            return ([Stretch(self._trace.begin, at, Cause("compute", node))], self._trace.begin, node, True)
        if span.kind is SpanKind.COMPUTE or span.end < at:
            # A gap behind a wait is computation that no later wait has ended yet.
            start = span.begin if span.kind is SpanKind.COMPUTE else span.end
            return [Stretch(start, at, Cause("compute", node))], start, node, False
        # It waits, and its loop was idle until now: something else than the script has woken it.
        previous = self._loops[node].before(at)
        start = max(span.begin, previous.end) if previous and previous.end < at else span.begin
        return [Stretch(start, at, Cause("idle", node))], start, node, start == span.begin

    # --- the loop -------------------------------------------------------------------------------

    def _loop_step(self, at: int, node: Node) -> tuple[list[Stretch], int, Node, bool]:
        """Go back through the work of the loop at ``at``."""
        span = self._loops[node].before(at)
        is_worker = node.role is Role.WORKER
        if span is None or span.end < at - NEAR_NS:
            if is_worker:
                return [], at, node, True
            start = self._trace.begin if span is None else span.end
            return [Stretch(start, at, Cause("idle", node))], start, node, False
        stretch = Stretch(span.begin, at, Cause(_word(span.kind), node))
        sender = self._sender(node, span) if span.kind in INCOMING else None
        if sender is None:
            return [stretch], span.begin, node, False
        their_node, their_span = sender
        stretches = [stretch, *self._way(their_node, their_span.end, node, span.begin)]
        return stretches, min(their_span.end, span.begin), their_node, False

    def _sender(self, node: Node, span: TimeSpan) -> tuple[Node, TimeSpan] | None:
        """Return the process that sent the packet that ``span`` handles, and the span in which it did."""
        request = request_of(self._by_node[node], span)
        if request is None or span.role == NOBODY:
            return None
        peer = Node(Role(span.role), span.rank)
        sent = [earlier for earlier in self._sent.get((request, peer), ()) if earlier.begin < span.begin]
        return (peer, sent[-1]) if sent else None

    def _way(self, sender: Node, sent: int, receiver: Node, looked_at: int) -> Iterator[Stretch]:
        """Yield the causes for which a packet waited between two loops, the last first."""
        at = looked_at
        for span in self._loops[receiver].backwards(sent, looked_at):
            if span.end < at:
                yield Stretch(max(sent, span.end), at, Cause("link", sender, receiver))
            start = max(sent, span.begin)
            if start < min(at, span.end):
                yield Stretch(start, min(at, span.end), Cause(_word(span.kind), receiver))
            at = min(at, start)
        if sent < at:
            yield Stretch(sent, at, Cause("link", sender, receiver))


def _word(kind: SpanKind) -> str:
    return "copy" if kind in _COPIES else kind.name.lower()
