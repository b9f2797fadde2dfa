"""Files made from the table of metrics: alert rules, a Grafana dashboard, and the table in the documentation.

``docs/monitoring.py --write`` writes them; without the flag it checks them,
and ends with 1 where a file is not up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvps.errors import Unauthorized
from kvps.observe.metrics import METRICS, Metric

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- metrics -->\n", "<!-- end of metrics -->\n"


class Alert(NamedTuple):
    """One alert rule."""

    name: str
    expression: str
    summary: str
    minutes: int = 0
    severity: str = "warning"


ALERTS = (
    Alert(
        "KvpsRoundStalled",
        "kvps_round_age_seconds > 60",
        "A round has been open for {{ $value }} s: 'kvps status' names the ranks that it waits for.",
        minutes=2,
    ),
    Alert(
        "KvpsMemberLost",
        'sum by (job, role) (kvps_members{state=~"lost|gone"}) > 0',
        "{{ $value }} members of role {{ $labels.role }} are lost.",
        minutes=1,
        severity="critical",
    ),
    Alert(
        "KvpsMemoryNearLimit",
        "sum by (job, instance) (kvps_memory_bytes) / on (job, instance) kvps_memory_limit_bytes > 0.9",
        "A server has reserved {{ $value | humanizePercentage }} of its memory limit.",
        minutes=5,
    ),
    Alert(
        "KvpsMemoryShort",
        "kvps_memory_used_ratio > 0.9",
        "{{ $value | humanizePercentage }} of the memory of a server's host or container are in use.",
        minutes=1,
        severity="critical",
    ),
    Alert(
        "KvpsOverload",
        "sum by (job, instance, limit) (increase(kvps_overloads_total[5m])) > 0",
        "Requests are refused at limit {{ $labels.limit }}.",
    ),
    Alert(
        "KvpsUnauthorized",
        "sum by (job, instance) "
        f'(increase(kvps_refusals_total{{reason=~"{"|".join(Unauthorized.REASONS)}"}}[5m])) '
        "+ on (job, instance) sum by (job, instance) (increase(kvps_refused_connections_total[5m])) > 0",
        "A peer has a wrong key or asks for what its key does not allow.",
    ),
    Alert(
        "KvpsCheckpointFailed",
        'increase(kvps_checkpoints_total{result="failed"}[15m]) > 0',
        "A server could not write its part of a checkpoint.",
        severity="critical",
    ),
    Alert("KvpsRolledBack", "delta(kvps_epoch[15m]) > 0", "The job was rolled back to a checkpoint."),
    Alert(
        "KvpsLoopLag",
        "kvps_loop_lag_seconds > 1",
        "The loop of a process answers {{ $value }} s late.",
        minutes=2,
    ),
)


def rules() -> str:
    """Return the alert rules as YAML; every string in it is JSON, which YAML contains."""
    lines = ["# Made by docs/monitoring.py --write", "groups:", "  - name: kvps"]
    lines.append("    rules:")
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.minutes}m",
            f"        labels: {{severity: {alert.severity}}}",
            f"        annotations: {{summary: {json.dumps(alert.summary)}}}",
        ]
    return "\n".join(lines) + "\n"


def dashboard() -> str:
    """Return the dashboard as JSON, with one panel for each metric."""
    panels = [_panel(number, metric) for number, metric in enumerate(METRICS)]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    shown = {
        "uid": "kvps",
        "title": "kvps",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }
    return json.dumps(shown, indent=1) + "\n"


def _panel(number: int, metric: Metric) -> dict[str, object]:
    unit = "short"
    for part, name in (("_seconds", "s"), ("_bytes", "bytes")):
        unit = name if part in metric.name else unit
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": metric.name,
        "description": metric.help,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"h": 8, "w": 8, "x": number % 3 * 8, "y": number // 3 * 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": "A", "expr": expression(metric)}],
    }


def expression(metric: Metric) -> str:
    """Return the query of a metric's panel."""
    if metric.kind == "counter":
        return f"rate({metric.name}[$__rate_interval])"
    if metric.kind == "gauge":
        return metric.name
    rates = f"sum by (le, instance) (rate({metric.name}_bucket[$__rate_interval]))"
    return f"histogram_quantile(0.99, {rates})"


def page() -> str:
    """Return the table as Markdown, for the documentation."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {_labels(metric)} | {', '.join(metric.roles)} | {metric.help} |"
        for metric in METRICS
    ]
    return "\n".join(["| metric | type | labels | role | meaning |", "|---|---|---|---|---|", *rows])


def _labels(metric: Metric) -> str:
    if not metric.label:
        return ""
    values = f": {', '.join(metric.labels)}" if metric.labels else ""
    return f"`{metric.label}`{values}"


def files() -> dict[Path, str]:
    """Return the contents of every file that is made from the table."""
    docs = ROOT / "docs" / "observability.md"
    before, rest = docs.read_text("utf-8").split(BEGIN)
    folder = ROOT / "deploy" / "monitoring"
    return {
        docs: f"{before}{BEGIN}\n{page()}\n\n{END}{rest.split(END)[1]}",
        folder / "alerts.yml": rules(),
        folder / "dashboard.json": dashboard(),
    }


def main(arguments: Sequence[str]) -> int:
    """Write or check the files; return the exit code."""
    old = [path for path, text in files().items() if not path.exists() or path.read_text("utf-8") != text]
    if "--write" not in arguments:
        for path in old:
            sys.stderr.write(f"{path} is not up to date; run it with --write\n")
        return 1 if old else 0
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files()[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
