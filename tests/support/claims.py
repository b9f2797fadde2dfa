"""The lines of docs/guarantees.md and docs/security.md that say what holds, and the everyday tests that show it.

A line names its test in the last column. Where that test takes minutes, and so does not run every day,
:data:`EVERYDAY` names another that does, of the same rule on a smaller scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST = re.compile(r"\| `(tests/[\w/]+/test_\w+\.py)(?:::(test_\w+))?` \|$")
HEADING = "| what holds"

EVERYDAY = {
    "tests/faults/test_workers.py::test_pushes_count_once_whenever_workers_are_killed": (
        "tests/faults/test_workers.py::test_pushes_count_once_if_workers_are_killed"
    ),
    "tests/faults/test_hosts.py::test_a_host_that_is_lost_for_good": (
        "tests/simulation/test_cluster.py::test_a_vanished_host_is_noticed_within_fifteen_seconds"
    ),
    "tests/integration/compat/test_horovod_three.py::test_an_elastic_job_ends_as_if_no_rank_had_been_lost": (
        "tests/integration/compat/test_horovod_elastic.py::test_a_failure_returns_to_the_last_commit"
    ),
    "tests/integration/test_replacement.py::test_at_every_moment_of_a_script": (
        "tests/integration/test_replacement.py::test_a_script_that_runs_again_arrives_where_the_others_are"
    ),
    "tests/hostile/test_floods.py": (
        "tests/unit/core/server/test_requests_allowed.py::test_stores_are_bounded"
    ),
    "tests/hostile/test_inputs.py::test_more_connections_than_there_are_descriptors": (
        "tests/unit/net/test_descriptors.py::test_exhausted_descriptors_are_reported"
    ),
    "tests/integration/test_memory_pressure.py::test_a_server_that_is_short_of_memory_refuses_keys_and_lives": (
        "tests/unit/core/server/test_memory_pressure.py::test_new_work_is_refused_until_there_is_memory_again"
    ),
}
"""A test that a line names, and does not run every day -> an everyday test of the same rule."""


def lines() -> list[str]:
    """Return all lines that say what holds."""
    guarantees, security = (
        (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("guarantees.md", "security.md")
    )
    shown = guarantees + security.partition("## Shown by")[2]
    return [line for line in shown.splitlines() if line.startswith("| ") and not line.startswith(HEADING)]


def faults(everyday: Iterable[str]) -> list[str]:
    """Say which lines none of the tests shows whose node ids are ``everyday``."""
    functions = {node.partition("[")[0] for node in everyday}
    run = functions | {node.partition("::")[0] for node in functions}
    named = {match[0].strip("| `") for line in lines() if (match := TEST.search(line))}
    found = [
        f"a line of docs/guarantees.md or docs/security.md names {test}, which does not run every "
        "day: see EVERYDAY in tests/support/claims.py"
        for test in sorted(named)
        if EVERYDAY.get(test, test) not in run
    ]
    found += [
        f"tests/support/claims.py: no line of the docs names {test}" for test in EVERYDAY.keys() - named
    ]
    return found
