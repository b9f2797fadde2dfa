"""Rates, quantiles and shares are those of the servers' counters, and findings name the culprit."""

import json
from typing import Any

import pytest

from kvps.core.counts import BOUNDS_S, LINK_BUSY, LINK_WATCHED, STALENESS
from kvps.core.scheduler.figures.measurements import ServerFigures
from kvps.observe.sampler import Sample
from kvps.protocol.membership import Count, Histogram, KeyTraffic, Measured, OldRound, StoreFigures
from kvps.tools.dashboard.model import HISTORY_MAX, LATENCY, JobModel
from kvps.tools.dashboard.tracks import WINDOW_S, added, quantile


def member(role: str, rank: int, state: str = "held") -> dict[str, object]:
    counters = dict.fromkeys(("incarnation", "rounds", "in_bytes", "out_bytes"), 0)
    return {"role": role, "rank": rank, "state": state, "presence": "alive", **counters}


STATUS: dict[str, object] = {
    "phase": "running",
    "reason": "all seats are taken",
    "members": [member("worker", 0), member("worker", 1), member("server", 0)],
    "faults": [],
    "checkpoints": {"failure": "", "every_s": 10.0, "kept_age_s": 3.0},
}


class Feed:
    """A cluster that is shown one sample per second."""

    def __init__(self) -> None:
        self.cluster = JobModel()
        self.now = 100.0
        self.number = 0

    def figures(
        self,
        rank: int = 0,
        counts: dict[tuple[str, str], float] | None = None,
        *,
        incarnation: int = 1,
        answer_s: float = 0.001,
        buckets: dict[str, tuple[int, ...]] | None = None,
        stores: tuple[StoreFigures, ...] = (),
        traffic: tuple[KeyTraffic, ...] = (),
        rounds: tuple[OldRound, ...] = (),
    ) -> ServerFigures:
        """Return an answer of a server, of now."""
        self.number += 1
        measured = Measured(
            self.number,
            tuple([Count(name, label, value) for (name, label), value in (counts or {}).items()]),
            tuple([Histogram(name, item, 1.0) for name, item in (buckets or {}).items()]),
            stores,
            traffic,
            rounds,
        )
        return ServerFigures(rank, incarnation, answer_s, 0.0, measured)

    def show(self, *figures: ServerFigures, lag_s: float = 0.0, **status: object) -> dict[str, Any]:
        """Show a sample with these answers; return the document."""
        values = {("kvps_loop_lag_seconds", ""): lag_s}
        sample = Sample(values, {}, True, "", {**STATUS, **status}, tuple(figures), self.now)
        found = self.cluster.add(sample)
        json.dumps(found, allow_nan=False)
        self.now += 1.0
        return found

    def texts(self, *figures: ServerFigures, **status: object) -> list[str]:
        """Return the findings of a sample."""
        return said(self.show(*figures, **status))


def counters(seconds: int, **rates: float) -> dict[tuple[str, str], float]:
    """Return counters that grow at these rates; a name is a metric without its prefix, and a label."""
    return {("kvps_" + at.split("__")[0], at.split("__")[1]): rate * seconds for at, rate in rates.items()}


def test_rates_are_those_between_the_last_two_answers() -> None:
    feed = Feed()
    found: dict[str, Any] = {}
    for second in range(3):
        counts = counters(
            second, payload_bytes_total__in=1000, payload_bytes_total__out=3000, worker_bytes_total__1=500
        )
        stores = (StoreFigures("a", "sync", 1, 7 * second), StoreFigures("b", "async", 1, 900 * second))
        traffic = (KeyTraffic("a", "w", 2, 4000 * second),)
        found = feed.show(feed.figures(0, counts, stores=stores, traffic=traffic))
    (server,) = found["servers"]
    assert (server["in_bytes_per_s"], server["out_bytes_per_s"]) == (1000, 3000)
    assert (
        server["rounds_per_s"] == found["totals"]["rounds_per_s"] == 7
    )  # the store without rounds does not count
    assert found["totals"]["has_rounds"]
    assert server["traffic_share"] == 1.0
    assert [item["bytes_per_s"] for item in found["workers"]] == [0, 500]
    (key,) = found["keys"]
    assert (key["key"], key["others"], key["bytes_per_s"], key["share"]) == ("w", 2, 4000, 1.0)
    assert feed.cluster.history()["rounds_per_s"] == [0.0, 7.0, 7.0]


def test_pushes_are_counted_where_no_store_has_rounds() -> None:
    feed = Feed()
    for second in range(2):
        found = feed.show(feed.figures(stores=(StoreFigures("b", "async", 1, 900 * second),)))
    assert (found["totals"]["rounds_per_s"], found["totals"]["has_rounds"]) == (900, False)


def test_an_answer_that_is_shown_again_changes_nothing_and_a_counter_that_falls_is_no_rate() -> None:
    feed = Feed()
    first = feed.figures(0, {("kvps_payload_bytes_total", "in"): 50.0})
    feed.show(first)
    found = feed.show(first._replace(age_s=1.0))
    assert found["servers"][0]["in_bytes_per_s"] == 0.0
    found = feed.show(feed.figures(0, {("kvps_payload_bytes_total", "in"): 20.0}))
    assert found["servers"][0]["in_bytes_per_s"] == 0.0


def test_a_server_that_was_replaced_begins_anew_and_one_that_is_lost_is_left_out() -> None:
    feed = Feed()
    for incarnation, size in ((1, 1e9), (1, 2e9), (2, 3e9)):
        counts = {("kvps_payload_bytes_total", "in"): size}
        found = feed.show(feed.figures(0, counts, incarnation=incarnation))
    assert found["servers"][0]["in_bytes_per_s"] == 0.0
    found = feed.show()
    assert (found["servers"], found["totals"]["imbalance"]) == ([], None)
    assert feed.cluster.history()["servers"] == {"0": [0.0, 1e9, 0.0, None]}


def test_latency_and_lateness_are_of_the_window() -> None:
    feed, slow = Feed(), [0] * (len(BOUNDS_S) + 1)
    slow[10] = 40  # above 0.25 s, before the window
    for second in range(int(WINDOW_S) + 10):
        buckets = slow.copy()
        buckets[3] += 10 * second
        counts = counters(
            second,
            straggler_seconds_total__0=0.0,
            straggler_seconds_total__1=0.5,
            straggler_pushes_total__0=10,
            straggler_pushes_total__1=10,
        )
        found = feed.show(feed.figures(0, counts, buckets={LATENCY: tuple(buckets)}))
    (server,) = found["servers"]
    assert 0.0025 < server["round_p50_s"] < server["round_p99_s"] <= 0.005
    assert [item["lateness_s"] for item in found["workers"]] == [0.0, pytest.approx(0.05)]
    assert found["totals"]["round_p99_s"] == server["round_p99_s"]


def test_quantiles() -> None:
    assert quantile(LATENCY, [], 0.5) is None
    assert quantile(LATENCY, [0] * 17, 0.5) is None
    assert quantile(LATENCY, [10], 0.5) == pytest.approx(0.00025)
    assert quantile(LATENCY, [*[0] * 16, 3], 0.99) == 60.0
    assert added([]) == []
    assert added([(1, 2), (), (3, 4)]) == [4, 6]


def test_staleness_and_compression_are_added_up() -> None:
    feed = Feed()
    counts = {("kvps_compressed_bytes_total", "in"): 100.0, ("kvps_uncompressed_bytes_total", "in"): 400.0}
    histogram = (5, 0, 2, *[0] * 7)
    found = feed.show(
        feed.figures(0, counts, buckets={STALENESS: histogram}),
        feed.figures(1, counts, buckets={STALENESS: histogram}),
    )
    assert found["staleness"]["counts"][:3] == [10, 0, 4]
    assert found["staleness"]["pushes"] == 14
    assert found["compression"]["in"] == {"bytes": 200, "uncompressed_bytes": 800, "ratio": 4.0}
    assert found["compression"]["out"]["ratio"] is None


def test_memory_and_its_limit() -> None:
    feed = Feed()
    counts = {
        ("kvps_memory_bytes", "weights"): 70.0,
        ("kvps_memory_bytes", "state"): 25.0,
        ("kvps_memory_limit_bytes", ""): 100.0,
    }
    (server,) = feed.show(feed.figures(0, counts))["servers"]
    assert (server["memory_bytes"], server["memory_share"]) == (95.0, 0.95)
    (server,) = feed.show(feed.figures(0, {}))["servers"]
    assert (server["memory_limit_bytes"], server["memory_share"]) == (None, None)


def test_the_history_is_bounded() -> None:
    feed = Feed()
    for _ in range(HISTORY_MAX + 5):
        feed.show()
    found = feed.cluster.history(feed.now)
    ages: Any = found["age_s"]
    assert len(ages) == HISTORY_MAX
    assert ages[-1] == 1.0
    assert found["sample"] == HISTORY_MAX + 5
    assert JobModel().history()["age_s"] == []


# --- findings -------------------------------------------------------------------------------------


def test_nothing_is_said_where_all_is_well() -> None:
    feed = Feed()
    assert feed.texts(feed.figures(0)) == []


def test_the_phase() -> None:
    feed = Feed()
    assert feed.texts(phase="forming", reason="worker 1 is missing") == [
        "The job is forming: worker 1 is missing."
    ]
    found = feed.show(phase="ending", reason="rank 1 is gone")["findings"]
    assert [item["level"] for item in found] == ["fail"]


def test_a_worker_that_holds_up_a_round() -> None:
    feed = Feed()
    rounds = (OldRound(0, "kv", "w", 5, (1,), 4.25), OldRound(0, "b", "w", 5, (1,), 2.0))
    (text,) = feed.texts(feed.figures(0, rounds=rounds))
    assert text.startswith("Worker 1 holds up a round: the others have waited 4.2 s")
    assert feed.texts(feed.figures(0, rounds=(OldRound(0, "kv", "w", 5, (1,), 0.5),))) == []
    gone = [member("worker", 0), member("worker", 1, "left")]
    assert feed.texts(feed.figures(0, rounds=rounds), members=gone) == []


def test_a_worker_that_is_late_in_each_round() -> None:
    def texts(late_s: float, rate: float) -> list[str]:
        feed = Feed()
        for second in range(3):
            counts = counters(
                second,
                straggler_seconds_total__1=late_s * rate,
                straggler_pushes_total__0=rate,
                straggler_pushes_total__1=rate,
            )
            stores = (StoreFigures("a", "sync", 1, int(rate * second)),)
            found = feed.texts(feed.figures(0, counts, stores=stores))
        return found

    (text,) = texts(0.1, 5.0)
    assert text.startswith("Worker 1 is slow: on average it pushes 100 ms after the first")
    (text,) = texts(3.0, 0.25)
    assert "3.0 s" in text
    assert texts(0.1, 1.0) == []  # a tenth of a step
    assert texts(0.005, 100.0) == []


def linked(
    busy: dict[int, dict[str, float]], late_s: float = 0.2, rate: float = 2.0, **more: Any
) -> dict[str, Any]:
    """Return the document of two servers whose links are busy for such shares: server -> {"rank,way": share}."""
    feed = Feed()
    found: dict[str, Any] = {}
    for second in range(3):
        stores = (StoreFigures("a", "sync", 1, int(rate * second)),)
        answers = []
        for server in (0, 1):
            counts = {(LINK_WATCHED, str(rank)): float(second) for rank in (0, 1)}
            counts |= {(LINK_WATCHED, "no rank"): float(second)}
            counts |= {(LINK_BUSY, at): share * second for at, share in busy.get(server, {}).items()}
            late = {"straggler_seconds_total__1": late_s * rate, "straggler_pushes_total__1": rate}
            answers.append(feed.figures(server, counts | counters(second, **late), stores=stores))
        found = feed.show(*[answer._replace(**more) for answer in answers])
    return found


def said(document: dict[str, Any]) -> list[str]:
    return [f"{item['text']} {item['advice']}".rstrip() for item in document["findings"]]


def test_the_busiest_link_of_each_worker() -> None:
    found = linked({0: {"1,in": 0.1}, 1: {"1,in": 0.25, "1,out": 0.5, "0,in": 0.125}}, late_s=0.0)
    assert [item["link"] for item in found["workers"]] == [
        {"server": 1, "in_share": 0.125, "out_share": 0.0, "share": 0.125, "usual_share": 0.75},
        {"server": 1, "in_share": 0.25, "out_share": 0.5, "share": 0.75, "usual_share": 0.125},
    ]
    assert [item["link_share"] for item in found["servers"]] == [pytest.approx(0.05), 0.4375]
    feed = Feed()
    found = feed.show(feed.figures())
    assert found["workers"][0]["link"] is found["servers"][0]["link_share"] is None


def test_a_worker_is_slow_by_its_link_or_by_its_computation() -> None:
    (text,) = said(linked({0: {"1,in": 0.2, "1,out": 0.2, "0,out": 0.01}}))
    assert text.startswith("Worker 1 is slow: on average it pushes 200 ms after the first")
    assert "The cause is its link to server 0: values are under way there for 40% of the" in text
    assert "for 1% on the links of the others" in text
    (text,) = said(linked({0: {"1,in": 0.05, "1,out": 0.05}}))
    assert "The cause is its computation or its input, and not its links" in text
    (text,) = said(linked({0: {f"{rank},in": 0.5 for rank in (0, 1)}}))
    assert "The cause is its computation" in text, "all links are as busy"


def test_a_full_link_is_that_of_a_worker_or_of_a_server_or_of_all() -> None:
    (text,) = said(linked({1: {"0,in": 0.5, "0,out": 0.4}}, late_s=0.0))
    assert text.startswith("The link between worker 0 and server 1 is full: ")
    assert "for 90% of the time (50% to the server, 40% back)" in text
    assert said(linked({1: {"0,in": 0.8, "1,in": 0.6}}, late_s=0.0)) == [], "nearly alike"
    both = {f"{rank},{way}": 0.45 for rank in (0, 1) for way in ("in", "out")}
    (text,) = said(linked({1: both}, late_s=0.0))
    assert text.startswith("The link of server 1 is full: ")
    document = linked({0: both, 1: both}, late_s=0.0)
    (text,) = said(document)
    assert text.startswith("Values are under way for 90% of the time, on all links alike")
    assert document["findings"][0]["level"] == "info"
    # A server that is slow keeps values waiting, too.
    texts = said(linked({1: both}, late_s=0.0, answer_s=2.0))
    assert [text for text in texts if "under way" in text] == []


def test_a_server_that_is_full_slow_or_refuses() -> None:
    feed = Feed()
    counts = {
        ("kvps_memory_bytes", "weights"): 950.0 * (1 << 20),
        ("kvps_memory_limit_bytes", ""): 1000.0 * (1 << 20),
        ("kvps_overloads_total", "memory"): 3.0,
    }
    texts = feed.texts(feed.figures(0), feed.figures(1, counts))
    assert texts[0].startswith("Server 1 is full: 950 MiB of its limit of 0.977 GiB are reserved (95%)")
    assert texts[1].startswith("Server 1 has refused 3 requests at a limit")
    short = feed.figures(1, {("kvps_memory_used_ratio", ""): 0.96})
    (text,) = feed.texts(feed.figures(0), short)
    assert text.startswith("Server 1 is short of memory: 96% of its host or container are in use.")
    (text,) = feed.texts(feed.figures(0), feed.figures(1, answer_s=0.4))
    assert text.startswith("Server 1 is slow: it took 400 ms to answer")
    assert feed.texts(feed.figures(0, answer_s=0.4), feed.figures(1, answer_s=0.4)) == []
    assert feed.texts(feed.figures(0, answer_s=0.4)) == []
    found = feed.show(feed.figures(0, answer_s=2.0))["findings"]
    assert [(item["level"], item["members"]) for item in found] == [("fail", ("server 0",))]


def test_a_cluster_out_of_balance() -> None:
    feed = Feed()
    for second in range(2):
        each = [counters(second, payload_bytes_total__in=rate) for rate in (9e6, 1e6)]
        texts = feed.texts(*[feed.figures(rank, counts) for rank, counts in enumerate(each)])
    (text,) = texts
    assert text.startswith("Server 0 carries 90% of the bytes")


def test_faults_until_they_are_old() -> None:
    feed = Feed()
    fault = {
        "member": "worker 1",
        "age_s": 5.0,
        "reason": "its connection broke",
        "steps": [],
        "is_over": False,
        "lasted_s": 5.0,
    }
    assert feed.texts(faults=[fault]) == ["Worker 1 is lost: its connection broke; nothing was done yet."]
    fault = {**fault, "is_over": True, "lasted_s": 2.0, "steps": [{"text": "replaced by b:7"}]}
    assert feed.texts(faults=[fault]) == [
        "Worker 1 was lost for 2.0 s (its connection broke): replaced by b:7."
    ]
    assert feed.texts(faults=[{**fault, "age_s": 100.0}]) == []


def test_checkpoints_that_fail_or_are_late() -> None:
    feed = Feed()
    checkpoints = {"failure": "no space left", "every_s": 1.0, "kept_age_s": 9.0}
    counts = {("kvps_checkpoints_total", "failed"): 1.0}
    texts = feed.texts(feed.figures(0, counts), checkpoints=checkpoints)
    assert texts == [
        "Checkpoints failed: no space left.",
        "The newest checkpoint is 9 s old, and one is due every 1 s.",
        "A server could not write its part of a checkpoint.",
    ]
    assert feed.texts(checkpoints=None) == []


def test_a_slow_scheduler() -> None:
    feed = Feed()
    found = feed.show(lag_s=2.0)["findings"]
    assert [item["text"] for item in found] == ["The scheduler itself is slow: its loop is 2.0 s late."]
