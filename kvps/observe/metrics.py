"""The table of all metrics: names, types, labels and roles; and the text of /metrics.

The samples of a process, ``docs/observability.md``, the alert rules and the Grafana dashboard are
made from this table. The page of the scheduler itself shows the figures of :mod:`kvps.tools.dashboard.model`.
The cores count by the same names (:mod:`kvps.core.counts`).

The text of /metrics, in Prometheus' format, is made from a sample and the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

from kvps import __version__
from kvps.core.counts import LINK_BUSY, LINK_WATCHED, REASONS, STALENESS, Durations, bounds_of
from kvps.observe.sampler import Sample

SCHEDULER, SERVER = "scheduler", "server"
BOTH = (SCHEDULER, SERVER)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MISSING = "/metrics needs the package prometheus-client: pip install 'kvps[metrics]'"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    help: str
    label: str = ""
    """The name of its label; empty for none."""
    labels: tuple[str, ...] = ()
    """Values of the label that are shown from the beginning; others are shown when they occur."""
    kind: str = "counter"
    """``counter``, ``gauge`` or ``histogram``."""
    roles: tuple[str, ...] = BOTH


_of_server = partial(Metric, roles=(SERVER,))
_of_scheduler = partial(Metric, roles=(SCHEDULER,))

METRICS = (
    Metric("kvps_up_info", "1; the label is the version of kvps.", label="version", kind="gauge"),
    Metric("kvps_loop_lag_seconds", "Delay until the loop ran the newest sample request.", kind="gauge"),
    Metric("kvps_loop_lag_max_seconds", "Longest such delay since the process began.", kind="gauge"),
    Metric("kvps_ready", "1 if /readyz answers 200.", kind="gauge"),
    Metric(
        "kvps_refusals_total",
        "Requests that were answered by an error, by its class or, if a permission is missing, by which one.",
        label="reason",
        labels=REASONS,
    ),
    Metric(
        "kvps_overloads_total",
        "Requests that were refused because a named limit was reached, or delayed (checkpoints).",
        label="limit",
        labels=(
            *("pending", "keys", "waiting_keys", "rows", "memory", "stores", "barriers", "barrier_names"),
            *("checkpoints", "waiting_checkpoints", "tagged_checkpoints", "rendezvous", "used_memory"),
            *("publications", "readers", "watches"),
        ),
    ),
    Metric(
        "kvps_dropped_packets_total",
        "Packets that were dropped without an answer: bytes that are no packet (bytes), answers that are "
        "refused (untold), packets that the core does not hear now (unheard), packets of an ignored "
        "connection (ignored), status queries above the rate limit (looks), and requests of readers beyond "
        "their limits (reads).",
        label="reason",
        labels=("bytes", "untold", "unheard", "ignored", "looks", "reads"),
    ),
    Metric("kvps_unread_answers_total", "Answers that were not sent: the peer does not read."),
    Metric(
        "kvps_ignored_connections_total",
        "How often a connection became ignored because too many of its packets were refused.",
    ),
    Metric(
        "kvps_refused_connections_total",
        "Connections that were not made: a peer without keys where there are some, or the other way round "
        "(no_key), with a key that is not known here (unknown_key), that expects another key here "
        "(wrong_server_key), of another user of this host (other_user), or that ended before or within its "
        "handshake (no_handshake), as that of a peer without keys may. Seconds in which all file "
        "descriptors were in use (no_descriptor). Connections to a server's port for streams without a "
        "pass (no_pass).",
        label="reason",
        labels=(
            *("no_key", "unknown_key", "wrong_server_key", "other_user", "no_handshake"),
            *("no_descriptor", "no_pass"),
        ),
    ),
    Metric(
        "kvps_closed_connections_total",
        "Connections that were closed because too much of an incomplete message waited (unfinished), or "
        "because they sent nothing, like many others (idle).",
        label="reason",
        labels=("unfinished", "idle"),
    ),
    Metric("kvps_epoch", "How often the job was rolled back to a checkpoint.", kind="gauge"),
    Metric("kvps_view", "Number of the newest view of the members.", kind="gauge"),
    _of_server("kvps_incarnation", "Incarnation of this server.", kind="gauge"),
    _of_server("kvps_requests_total", "Requests of workers, by message.", "message"),
    _of_server(
        "kvps_payload_bytes_total", "Bytes of values in packets, by direction.", "direction", ("in", "out")
    ),
    _of_server(
        "kvps_pushes_total",
        "Pushes, by verdict: counted, duplicate, or early (not taken in, and sent again).",
        "verdict",
        ("counted", "duplicate", "early"),
    ),
    _of_server(
        "kvps_round_duration_seconds", "Time from the first push of a round to its close.", kind="histogram"
    ),
    _of_server(
        "kvps_short_rounds_total",
        "Rounds that closed without the gradient of a lost worker (on_worker_lost='shrink').",
    ),
    _of_server(
        "kvps_straggler_seconds_total",
        "Time by which pushes came after the first push of their round, by worker.",
        "rank",
    ),
    _of_server(
        "kvps_straggler_pushes_total",
        "Pushes to rounds, by worker: what kvps_straggler_seconds_total is the sum over.",
        "rank",
    ),
    _of_server("kvps_worker_pushes_total", "Counted pushes, by worker.", "rank"),
    _of_server("kvps_worker_bytes_total", "Bytes of counted pushes, as they travelled, by worker.", "rank"),
    _of_server(
        LINK_WATCHED,
        "Time for which the link to a worker was watched: while the scheduler serves the dashboard.",
        "rank",
    ),
    _of_server(
        LINK_BUSY,
        "Of that time, values were under way from the worker (in) or to it (out): sent, and not "
        "known to have arrived.",
        "rank,direction",
    ),
    _of_server(
        STALENESS,
        "Versions that a key had moved on from when its worker read it to when it pushed (async and ssp).",
        kind="histogram",
    ),
    _of_server(
        "kvps_compressed_bytes_total", "Bytes of compressed values, by direction.", "direction", ("in", "out")
    ),
    _of_server(
        "kvps_uncompressed_bytes_total",
        "Bytes that the same values have uncompressed, by direction.",
        "direction",
        ("in", "out"),
    ),
    _of_server(
        "kvps_round_age_seconds",
        "Age of the oldest open round, as of the last look (every 5 s, or each second while the "
        "scheduler serves the dashboard).",
        kind="gauge",
    ),
    _of_server("kvps_stores", "Open stores.", kind="gauge"),
    _of_server("kvps_publications", "Publications (kv.publish).", kind="gauge"),
    _of_server("kvps_published_versions", "Versions of publications that are held.", kind="gauge"),
    _of_server("kvps_publication_version", "Newest version, by publication.", "publication", kind="gauge"),
    _of_server(
        "kvps_publication_age_seconds",
        "Time since the newest version became complete, by publication.",
        "publication",
        kind="gauge",
    ),
    _of_server(
        "kvps_publication_bytes",
        "Bytes of the versions that are held, by publication.",
        "publication",
        kind="gauge",
    ),
    _of_server(
        "kvps_publication_readers",
        "Readers that use a version, by version and publication.",
        "version,publication",
        kind="gauge",
    ),
    _of_server("kvps_readers", "Readers of publications that were heard within 60 s.", kind="gauge"),
    _of_server("kvps_pending_requests", "Requests that wait for an answer.", kind="gauge"),
    _of_server(
        "kvps_memory_bytes",
        "Reserved memory, by what it is for.",
        "kind",
        ("weights", "copies", "sums", "state", "residuals", "tables", "publications"),
        kind="gauge",
    ),
    _of_server("kvps_memory_limit_bytes", "Memory limit of the server; +Inf for none.", kind="gauge"),
    _of_server(
        "kvps_memory_used_ratio",
        "Memory in use, by this process or its container, as a fraction of what the machine or "
        "container has.",
        kind="gauge",
    ),
    _of_server(
        "kvps_checkpoints_total", "Snapshots of this server, by result.", "result", ("written", "failed")
    ),
    _of_server("kvps_checkpoint_bytes_total", "Bytes of written snapshots."),
    _of_server(
        "kvps_checkpoint_duration_seconds",
        "Time from the order of a snapshot until it is on the disk, or failed.",
        kind="histogram",
    ),
    _of_server(
        "kvps_rollbacks_total", "Rollbacks of this server, by result.", "result", ("restored", "failed")
    ),
    _of_scheduler("kvps_members", "Seats, by role and state.", "role,state", kind="gauge"),
    _of_scheduler(
        "kvps_members_lost_total",
        "Members that were silent for too long, by role.",
        "role",
        ("server", "worker"),
    ),
    _of_scheduler("kvps_promotions_total", "Standbys that have taken the seats of lost servers."),
    _of_scheduler("kvps_moves_total", "Servers whose seat another process has taken, as asked."),
    _of_scheduler("kvps_barriers_passed_total", "Waits of workers at barriers that ended well."),
    _of_scheduler(
        "kvps_waits_failed_total", "Waits of workers at barriers and for checkpoints that ended by an error."
    ),
    _of_scheduler("kvps_checkpoint_begun", "Number of the newest checkpoint.", kind="gauge"),
    _of_scheduler("kvps_checkpoint_kept", "Number of the newest complete checkpoint.", kind="gauge"),
)
"""All metrics."""
BY_NAME = {metric.name: metric for metric in METRICS}


def of_role(role: str) -> list[Metric]:
    """Return the metrics of a role."""
    return [metric for metric in METRICS if role in metric.roles]


def has_library() -> bool:
    """Return whether the package that writes the format is installed."""
    try:
        import prometheus_client  # noqa: F401, an extra
    except ImportError:
        return False
    return True


def text_of(role: str, sample: Sample) -> bytes:
    """Return all metrics of a role."""
    from prometheus_client import CollectorRegistry, generate_latest  # an extra

    registry = CollectorRegistry()  # our own: a plug-in's metrics are not ours
    registry.register(cast(Any, _Families(role, sample)))
    return generate_latest(registry)


class _Families:
    """One sample, as prometheus_client asks for it."""

    def __init__(self, role: str, sample: Sample) -> None:
        self._role, self._sample = role, sample

    def describe(self) -> Iterable[Any]:
        """Return nothing: names need no check against other collectors."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the family of each metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for metric in of_role(self._role):
            if metric.kind == "histogram":
                family = HistogramMetricFamily(metric.name, metric.help)
                none = Durations((0,) * (len(bounds_of(metric.name)) + 1), 0.0)
                durations = self._sample.durations.get(metric.name, none)
                family.add_metric([], _buckets(metric.name, durations), durations.total_s)
                yield family
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            names = metric.label.split(",") if metric.label else []
            samples = kind(metric.name, metric.help, labels=names)
            for label, value in sorted(_values(metric, self._sample.values).items()):
                samples.add_metric(label.split(",", len(names) - 1) if names else [], value)
            yield samples


def _values(metric: Metric, values: Mapping[tuple[str, str], float]) -> dict[str, float]:
    if metric.name == "kvps_up_info":
        return {__version__: 1.0}
    found = dict.fromkeys(metric.labels or ([] if metric.label else [""]), 0.0)
    found.update({label: value for (name, label), value in values.items() if name == metric.name})
    return found


def _buckets(name: str, durations: Durations) -> list[tuple[str, float]]:
    bounds = [*bounds_of(name), math.inf]
    sums = accumulate(durations.buckets)
    return [
        ("+Inf" if math.isinf(bound) else str(float(bound)), total)
        for bound, total in zip(bounds, sums, strict=True)
    ]
