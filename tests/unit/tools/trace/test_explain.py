"""What bounds a step, said of traces whose times are known."""

import itertools

import pytest

from kvps.protocol.envelope import Node, Role
from kvps.tools.trace.chrome import MergedTrace, Process
from kvps.tools.trace.critical_path import Cause, CriticalPath
from kvps.tools.trace.explain import explain
from kvps.tools.trace.member import NOBODY, SpanKind, TimeSpan
from tests.unit.tools.trace.traces import MS, Job

W0, W1, W2 = (Node(Role.WORKER, rank) for rank in range(3))
S0, S1 = (Node(Role.SERVER, rank) for rank in range(2))


@pytest.mark.parametrize(
    "job", [Job(), Job(compute=(10, 40)), Job(servers=3), Job(link={(0, 0): 30}), Job(compute=(5, 5, 5))]
)
def test_the_stretches_add_up_to_the_whole(job: Job) -> None:
    trace = job.trace()
    path = CriticalPath(trace).walk()
    for later, earlier in itertools.pairwise(path):
        assert later.begin == earlier.end
    assert path[0].end == trace.end
    assert path[-1].begin == MS // 2, "from where all workers were recorded"
    assert sum([finding.share for finding in explain(trace).findings]) == pytest.approx(1.0)


def test_a_slow_worker() -> None:
    found = explain(Job(compute=(10, 40)).trace())
    first = found.findings[0]
    assert (first.what, first.nodes) == ("compute", (W1,))
    assert first.share == pytest.approx(40 / 46.8, abs=0.03)
    assert found.text.startswith("worker 1's compute bounds the step: 8")
    assert "Worker 1 is slow" in found.text
    assert "4.0 times the other workers' compute" in found.text
    assert "waiting for rank 1 takes 6" in found.text


def test_workers_that_take_turns() -> None:
    found = explain(Job(compute=(30, 30, 30)).trace())
    assert found.findings[0].what == "compute"
    assert found.text.startswith(
        "the workers' compute bounds the step" if len(found.findings[0].nodes) > 1 else "worker"
    )
    assert "slow" not in found.text


def test_a_slow_link_of_one_worker() -> None:
    found = explain(Job(link={(1, 0): 50}).trace())
    first = found.findings[0]
    assert (first.what, first.nodes) == ("link", (W1, S0))
    assert first.share > 0.6
    assert "the link between worker 1 and server 0 bounds the step" in found.text
    assert "of it towards server 0" in found.text


def test_slow_links_of_one_server() -> None:
    slow = {(0, 1): 50, (1, 1): 49, (0, 0): 0}
    trace = Job(servers=2, link=slow, rounds=3).trace()
    # In turns: the last push that arrives is now of one rank, now of the other.
    other = Job(servers=2, link={(0, 1): 49, (1, 1): 50}, rounds=3).trace()
    shift = trace.end
    for mine, theirs in zip(trace.processes, other.processes, strict=True):
        mine.spans += [span._replace(begin=span.begin + shift) for span in theirs.spans]
    found = explain(trace)
    links = [finding for finding in found.findings if finding.what == "link"]
    assert found.findings[0].what == "link"
    assert all(S1 in link.nodes for link in links)
    assert "server 1" in found.text.splitlines()[0]


def test_a_slow_server() -> None:
    found = explain(Job(servers=2, slow_server=1, slow_update=60).trace())
    first = found.findings[0]
    assert (first.what, first.nodes) == ("server", (S1,))
    assert first.share > 0.7
    assert "server 1's work bounds the step" in found.text
    assert "optimizer steps 9" in found.text
    assert "add servers" in found.text.lower()


def test_copies() -> None:
    found = explain(Job(compute=(2, 2), copy=30).trace())
    assert found.findings[0].what == "copies"
    assert "copies and sends bounds the step" in found.text
    assert "empty_like" in found.text


def test_a_busy_server_is_no_slow_link() -> None:
    """A push that waits while the server works on another one waits for the server."""
    found = explain(Job(compute=(10, 10), reduce=30).trace())
    assert (found.findings[0].what, found.findings[0].nodes) == ("server", (S0,))
    assert sum([finding.share for finding in found.findings if finding.what == "link"]) < 0.1


def test_a_stopped_process_is_a_pause() -> None:
    trace = Job(rounds=2).trace()
    worker = trace.processes[-1]
    last = worker.spans[-1]
    worker.spans[-1] = last._replace(took=max(last.took, 0))
    worker.spans.append(TimeSpan(SpanKind.WAIT, NOBODY, 0, trace.end, 500 * MS))
    found = explain(trace)
    assert found.findings[0].what == "idle"
    assert "pauses of worker 1 bounds the step" in found.text


def test_a_barrier_leads_to_the_rank_that_came_last() -> None:
    """Worker 0 waits at a barrier; worker 1 computes for long before it comes."""
    scheduler = Process(Node(Role.SCHEDULER, 0), 0, "a", 1)
    first, second = Process(W0, 1, "a", 2), Process(W1, 1, "a", 3)
    of_scheduler = Role.SCHEDULER.value
    for process, compute in ((first, 10), (second, 90)):
        process.spans += [
            TimeSpan(SpanKind.WAIT, NOBODY, 0, 0, MS),
            TimeSpan(SpanKind.COMPUTE, NOBODY, 0, MS, compute * MS),
            TimeSpan(SpanKind.SEND, of_scheduler, 0, (1 + compute) * MS, MS // 10, 5),
            TimeSpan(SpanKind.SERVE, of_scheduler, 0, 95 * MS, MS // 10, 5),
            TimeSpan(SpanKind.WAIT, NOBODY, 0, (1 + compute) * MS, (95 - 1 - compute) * MS + MS // 5),
        ]
    for rank, at in ((0, 12), (1, 92)):
        scheduler.spans.append(TimeSpan(SpanKind.SERVE, 2, rank, at * MS, MS // 10, 5))
    for rank in (0, 1):
        at = 92 * MS + MS // 10 * (1 + rank)
        scheduler.spans.append(TimeSpan(SpanKind.REPLY, 2, rank, at, MS // 10, 5))
    found = explain(MergedTrace([scheduler, first, second]))
    assert (found.findings[0].what, found.findings[0].nodes) == ("compute", (W1,))
    assert found.findings[0].share > 0.9


def test_nothing_to_explain() -> None:
    assert "no worker waited for a call" in explain(MergedTrace([])).text
    alone = Process(W0, 1, "a", 1, [TimeSpan(SpanKind.COMPUTE, NOBODY, 0, 0, MS)])
    assert explain(MergedTrace([alone])).findings == ()


def test_uncertain_clocks_and_lost_spans_are_named() -> None:
    trace = Job().trace()
    trace.processes[0].error_ns = 2_500_000
    trace.processes[1].lost = 17
    text = explain(trace).text
    assert "The clocks of all processes agree within 2.5 ms." in text
    assert "17 spans were left out" in text
    trace.processes[0].error_ns = None
    assert "clocks of some processes could not be compared" in explain(trace).text


def test_a_cause_names_both_ends_of_a_link() -> None:
    path = CriticalPath(Job(link={(1, 0): 50}).trace()).walk()
    assert Cause("link", W1, S0) in {item.cause for item in path}
    assert W2 not in {item.cause.node for item in path}
