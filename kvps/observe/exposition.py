"""The text of /metrics, in Prometheus' format, made from a sample and the table of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, cast

from kvps import __version__
from kvps.core.counts import Durations, bounds_of
from kvps.observe.metrics import Metric, of_role
from kvps.observe.sampler import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MISSING = "/metrics needs the package prometheus-client: pip install 'kvps[metrics]'"


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
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

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
                samples.add_metric(label.split(",") if names else [], value)
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
