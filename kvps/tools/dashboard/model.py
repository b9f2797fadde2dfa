"""The model of a job over time: rates, quantiles, shares and findings, made of one look at the job
after another.

A process sends counters and gauges; all that is shown of them is computed here, once, so that
``kvps top``, /statusz and the dashboard cannot differ. A look is the document of an answer to
LOOK, which has the counters of each member's newest beat; a scheduler adds the answers of its
servers to MEASURE. Rates are those between the last two of these answers, or of the beats of the
last :data:`BEATS_S` seconds. Latencies and lateness are of the last 30 seconds; quantiles are
interpolated within the buckets of the histogram. A member whose process was replaced begins anew.

The dashboard: the model of a job, and the files of the page that draws it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from statistics import fmean, median
from typing import Any

from kvps.core.counts import STALENESS, STALENESS_BOUNDS
from kvps.core.scheduler.figures.measurements import ServerFigures
from kvps.observe.findings import findings
from kvps.observe.sampler import Sample
from kvps.tools.dashboard.tracks import Moment, Track, added, quantile, track_of

BEATS_S = 5.0
"""Seconds over which rates of beats are taken, of which there is about one per second."""
BEAT_COUNTERS = ("rounds", "in_bytes", "out_bytes")
HISTORY_MAX = 600
"""Samples of the history: ten minutes."""
LINES_MAX = 16
"""Servers, and workers, whose lines the history has."""
KEYS_MAX = 10
"""Keys that are shown, of all servers."""
LATENCY = "kvps_round_duration_seconds"
Links = Mapping[int, Mapping[int, tuple[float, float]]]
"""Server -> worker -> the shares of the time in which values to the server, and to the worker,
were under way."""


class JobModel:
    """A job over time.

    Example:
        >>> from kvps.observe.document import document_of
        >>> from kvps.protocol.membership import Seen
        >>> look = document_of(b"job!", Seen(1, "running", "all are here", (), ()))
        >>> JobModel().take(look, now=0.0)["totals"]["rounds_per_s"]
        0.0
    """

    def __init__(self) -> None:
        self._job = ""
        self._tracks: dict[int, Track] = {}
        """The answers of each server."""
        self._beats: dict[tuple[str, int], Track] = {}
        """The beats of each member, by role and rank."""
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_MAX)
        self._number = 0

    def add(self, sample: Sample) -> dict[str, Any]:
        """Take in the newest sample of the scheduler; return the document that is shown."""
        lag_s = sample.values.get(("kvps_loop_lag_seconds", ""), 0.0)
        return self.take(sample.status, sample.at, sample.figures, lag_s)

    def take(
        self,
        look: Mapping[str, Any],
        now: float,
        answers: Sequence[ServerFigures] = (),
        loop_lag_s: float = 0.0,
    ) -> dict[str, Any]:
        """Take in a look at the job; return the document that is shown.

        Args:
            look: the document of an answer to LOOK.
            now: seconds on any clock.
            answers: of the servers to MEASURE.
            loop_lag_s: seconds by which the scheduler's loop is late.
        """
        if look.get("job", "") != self._job:
            self._job, self._beats = look.get("job", ""), {}
        self._number += 1
        for figures in answers:
            track = track_of(self._tracks, figures.rank, figures.incarnation)
            track.stores = figures.measured.stores
            track.add(Moment.of(figures, now))
        for rank in self._tracks.keys() - {figures.rank for figures in answers}:
            del self._tracks[rank]
        document: dict[str, Any] = {"sample": self._number, **look}
        document["members"] = [self._member(member, now) for member in look["members"]]
        links = {rank: track.links() for rank, track in self._tracks.items()}
        document["servers"] = servers = [self._server(figures, links) for figures in answers]
        document["workers"] = self._workers(document, links)
        document["totals"] = self._totals(document["members"], servers)
        document["staleness"] = self._staleness()
        document["keys"] = self._keys(answers)
        document["compression"] = {way: self._compression(way) for way in ("in", "out")}
        document["loop_lag_s"] = loop_lag_s
        document["findings"] = findings(document)
        self._history.append(_line(document, now))
        return document

    def history(self, now: float | None = None) -> dict[str, object]:
        """Return the lines of the charts, one list for each, the oldest first."""
        lines = list(self._history)
        end = now if now is not None else lines[-1]["at"] if lines else 0.0
        servers = sorted({rank for line in lines for rank in line["servers"]})
        return {
            "sample": self._number,
            "age_s": [end - line["at"] for line in lines],
            "rounds_per_s": [line["rounds_per_s"] for line in lines],
            "p50_s": [line["p50_s"] for line in lines],
            "p99_s": [line["p99_s"] for line in lines],
            "servers": {str(rank): [line["servers"].get(rank) for line in lines] for rank in servers},
        }

    # --- the parts of the document ----------------------------------------------------------

    def _member(self, look: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Return a member with its rates: of a server's answers where there are some, else of its beats."""
        beats = track_of(self._beats, (look["role"], look["rank"]), look["incarnation"], BEATS_S)
        beats.add(Moment(now, self._number, {(name, ""): look[name] for name in BEAT_COUNTERS}))
        answers = self._tracks.get(look["rank"]) if look["role"] == "server" else None
        rates = {f"{name}_per_s": beats.mean_rate(name) for name in BEAT_COUNTERS}
        if answers is not None:
            for way in ("in", "out"):
                rates[f"{way}_bytes_per_s"] = answers.rate("kvps_payload_bytes_total", way)
        return {**look, **rates}

    def _server(self, figures: ServerFigures, links: Links) -> dict[str, Any]:
        track = self._tracks[figures.rank]
        last = track.last
        buckets = track.grown_buckets(LATENCY)
        memory = {kind: size for (of, kind), size in last.values.items() if of == "kvps_memory_bytes"}
        limit = last.values.get(("kvps_memory_limit_bytes", ""))
        used = sum(memory.values())
        return {
            "rank": figures.rank,
            "incarnation": figures.incarnation,
            "answer_s": figures.answer_s,
            "age_s": figures.age_s,
            "rounds_per_s": track.rounds_rate(),
            "in_bytes_per_s": track.rate("kvps_payload_bytes_total", "in"),
            "out_bytes_per_s": track.rate("kvps_payload_bytes_total", "out"),
            "round_p50_s": quantile(LATENCY, buckets, 0.5),
            "round_p99_s": quantile(LATENCY, buckets, 0.99),
            "round_buckets": buckets,
            "memory_bytes": used,
            "memory_by_kind": memory,
            "memory_limit_bytes": limit,
            "memory_share": used / limit if limit else None,
            "memory_used_ratio": last.value("kvps_memory_used_ratio"),
            "link_share": _median([min(1.0, sum(shares)) for shares in links[figures.rank].values()]),
            "pending_requests": last.value("kvps_pending_requests"),
            "short_rounds": last.value("kvps_short_rounds_total"),
            "duplicates": last.value("kvps_pushes_total", "duplicate"),
            "refusals": last.total("kvps_refusals_total"),
            "overloads": last.total("kvps_overloads_total"),
            "snapshots_written": last.value("kvps_checkpoints_total", "written"),
            "snapshots_failed": last.value("kvps_checkpoints_total", "failed"),
            "snapshot_bytes": last.value("kvps_checkpoint_bytes_total"),
            "rollbacks": last.value("kvps_rollbacks_total", "restored"),
            "stores": [store._asdict() for store in figures.measured.stores],
            "rounds": [round_._asdict() for round_ in figures.measured.rounds],
        }

    def _workers(self, document: Mapping[str, Any], links: Links) -> list[dict[str, Any]]:
        """Return each worker: how late it pushes, how long a round has waited for it, and its
        busiest link."""
        waits: dict[int, float] = {}
        for server in document["servers"]:
            for stalled in server["rounds"]:
                for rank in stalled["missing"]:
                    waits[rank] = max(waits.get(rank, 0.0), stalled["age_s"])
        found = []
        for member in document.get("members", ()):
            if member["role"] != "worker":
                continue
            rank = member["rank"]
            label = str(rank)
            late = self._grown("kvps_straggler_seconds_total", label)
            pushes = self._grown("kvps_straggler_pushes_total", label)
            tracks = self._tracks.values()
            found.append(
                {
                    "rank": rank,
                    "state": member["state"],
                    "presence": member["presence"],
                    "lateness_s": late / pushes if pushes else None,
                    "waited_s": waits.get(rank),
                    "link": busiest(links, rank),
                    "bytes_per_s": sum([track.rate("kvps_worker_bytes_total", label) for track in tracks]),
                    "pushes_per_s": sum([track.rate("kvps_worker_pushes_total", label) for track in tracks]),
                }
            )
        return found

    def _grown(self, name: str, label: str) -> float:
        return sum([track.growth(name, label) for track in self._tracks.values()])

    def _totals(
        self, members: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]]
    ) -> dict[str, object]:
        counted = servers or [member for member in members if member["role"] == "worker"]
        in_s, out_s = [
            sum([member[name] for member in members if member["role"] == "server"])
            for name in ("in_bytes_per_s", "out_bytes_per_s")
        ]
        buckets = added([server["round_buckets"] for server in servers])
        moved = [server["in_bytes_per_s"] + server["out_bytes_per_s"] for server in servers]
        for server, each in zip(servers, moved, strict=True):
            server["traffic_share"] = each / sum(moved) if sum(moved) else None  # type: ignore[index]
        return {
            "has_rounds": any(store["mode"] == "sync" for server in servers for store in server["stores"]),
            "rounds_per_s": max([member["rounds_per_s"] for member in counted], default=0.0),
            "in_bytes_per_s": in_s,
            "out_bytes_per_s": out_s,
            "round_p50_s": quantile(LATENCY, buckets, 0.5),
            "round_p99_s": quantile(LATENCY, buckets, 0.99),
            "short_rounds": sum([server["short_rounds"] for server in servers]),
            "imbalance": max(moved) / fmean(moved) if moved and sum(moved) else None,
        }

    def _staleness(self) -> dict[str, object]:
        """Return how many pushes were how stale, since the servers began."""
        counts = added([track.last.buckets.get(STALENESS, ()) for track in self._tracks.values()])
        return {"bounds": list(STALENESS_BOUNDS), "counts": counts, "pushes": sum(counts)}

    def _keys(self, all_figures: Iterable[ServerFigures]) -> list[dict[str, Any]]:
        """Return the keys with the most traffic; parts of one key on several servers are separate."""
        found = [
            {
                "server": figures.rank,
                **traffic._asdict(),
                "bytes_per_s": self._tracks[figures.rank].moved_rate((traffic.store, traffic.key)),
            }
            for figures in all_figures
            for traffic in figures.measured.traffic
        ]
        found.sort(key=lambda key_line: -key_line["moved_bytes"])
        total = sum([key_line["moved_bytes"] for key_line in found])
        for key_line in found:
            key_line["share"] = key_line["moved_bytes"] / total if total else 0.0
        return found[:KEYS_MAX]

    def _compression(self, direction: str) -> dict[str, object]:
        tracks = self._tracks.values()
        size, uncompressed = [
            sum([track.last.value(name, direction) for track in tracks])
            for name in ("kvps_compressed_bytes_total", "kvps_uncompressed_bytes_total")
        ]
        ratio = uncompressed / size if size else None
        return {"bytes": size, "uncompressed_bytes": uncompressed, "ratio": ratio}


def _line(document: Mapping[str, Any], at: float) -> dict[str, Any]:
    """Return one moment of the history."""
    totals = document["totals"]
    return {
        "at": at,
        "rounds_per_s": totals["rounds_per_s"],
        "p50_s": totals["round_p50_s"],
        "p99_s": totals["round_p99_s"],
        "servers": {
            server["rank"]: server["in_bytes_per_s"] + server["out_bytes_per_s"]
            for server in document["servers"][:LINES_MAX]
        },
    }


def busiest(links: Links, rank: int) -> dict[str, Any] | None:
    """Return the busiest link of a worker, and how busy the others' links to the same server are.

    Example:
        >>> found = busiest({0: {0: (0.25, 0.5), 1: (0.0, 0.125)}}, 0)
        >>> found["server"], found["share"], found["usual_share"]
        (0, 0.75, 0.125)
    """
    own = {server: shares[rank] for server, shares in links.items() if rank in shares}
    if not own:
        return None
    server = max(own, key=lambda rank_of_server: sum(own[rank_of_server]))
    others = [min(1.0, sum(shares)) for other, shares in links[server].items() if other != rank]
    in_share, out_share = own[server]
    return {
        "server": server,
        "in_share": in_share,
        "out_share": out_share,
        "share": min(1.0, in_share + out_share),
        "usual_share": _median(others),
    }


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/format.js": ("format.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uplot.css": ("uplot.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
}
"""By path: the file, and its content type."""


@cache
def read(path: str) -> tuple[str, bytes]:
    """Return the content type and the content of a file of the dashboard.

    Raises:
        KeyError: if there is none at this path.
    """
    name, kind = FILES[path]
    return kind, (resources.files("kvps.tools.dashboard") / "page" / name).read_bytes()


class Dashboard(JobModel):
    """The dashboard that a scheduler serves: the model of its job, and the files of the page."""

    def file(self, path: str) -> tuple[str, bytes] | None:
        """Return the content type and the content of the file at ``path``; None if there is none."""
        return read(path) if path in FILES else None
