"""The rules, the dashboard and the page are those of the table."""

import json
import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

from kvps.observe.metrics import METRICS
from tests.support.scripts import script

needs_promtool = pytest.mark.skipif(which("promtool") is None, reason="promtool is not installed")
UNIT = """
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'kvps_round_age_seconds{job="kvps", instance="a"}'
        values: '0 61 61 61 61 0'
      - series: 'kvps_memory_bytes{job="kvps", instance="a", kind="weights"}'
        values: '95x10'
      - series: 'kvps_memory_limit_bytes{job="kvps", instance="a"}'
        values: '100x10'
      - series: 'kvps_overloads_total{job="kvps", instance="a", limit="memory"}'
        values: '0 0 1 1'
    alert_rule_test:
      - {alertname: KvpsRoundStalled, eval_time: 1m}
      - alertname: KvpsRoundStalled
        eval_time: 4m
        exp_alerts:
          - exp_labels: {severity: warning, job: kvps, instance: a}
            exp_annotations:
              summary: "A round has been open for 61 s: 'kvps status' names the ranks that it waits for."
      - {alertname: KvpsOverload, eval_time: 1m}
      - alertname: KvpsOverload
        eval_time: 3m
        exp_alerts:
          - exp_labels: {severity: warning, job: kvps, instance: a, limit: memory}
            exp_annotations: {summary: "Requests are refused at limit memory."}
"""
monitoring = script("docs/monitoring.py")


def test_the_files_are_up_to_date() -> None:
    assert monitoring.main([]) == 0


def test_alerts_name_metrics_of_the_table() -> None:
    names = {field.name for field in METRICS}
    for alert in monitoring.ALERTS:
        found = set(re.findall(r"kvps_\w+", alert.expression))
        assert found
        assert found <= names


def test_the_dashboard_has_a_panel_for_each_metric() -> None:
    panels = json.loads(monitoring.dashboard())["panels"]
    assert [panel["title"] for panel in panels] == [field.name for field in METRICS]
    assert len({panel["id"] for panel in panels}) == len(panels)


@needs_promtool
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(monitoring.rules())
    (tmp_path / "test.yml").write_text(UNIT)
    for words in (("check", "rules", "alerts.yml"), ("test", "rules", "test.yml")):
        ran = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
