"""What cores count has a name in the table of metrics, and a label of a small set."""

import re
from pathlib import Path

import kvps.core
from kvps.core.counts import Counts
from kvps.observe.metrics import BY_NAME

CORE = Path(next(iter(kvps.core.__path__)))


def test_counters_are_copied() -> None:
    counts = Counts()
    counts.add("pushes", "counted")
    counts.add("pushes", "counted", by=4)
    before = counts.values()
    counts.add("pushes", "early")
    assert before == {("pushes", "counted"): 5}
    assert counts.values() == {("pushes", "counted"): 5, ("pushes", "early"): 1}


def test_the_table_has_each_name_that_a_core_counts() -> None:
    source = "".join([path.read_text() for path in CORE.rglob("*.py")])
    names = set(re.findall(r'(?:add|observe)\(\s*"(kvps_\w+)"', source))
    assert names
    assert names <= BY_NAME.keys()


def test_each_limit_of_a_core_is_in_the_table() -> None:
    folders = CORE, CORE.parent / "checkpoint"
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    limits = [found for source in sources for found in re.findall(r'limit="(\w+)"', source)]
    raised = sum([len(re.findall(r"\bOverload\(", source)) for source in sources])
    assert len(limits) == len(set(limits)) == raised
    assert set(limits) == set(BY_NAME["kvps_overloads_total"].labels)


def test_the_table_of_limits_names_their_metrics() -> None:
    """docs/security.md has each limit once, with a metric and labels that exist."""
    page = (CORE.parents[1] / "docs/security.md").read_text()
    section = page.partition("\n## Limits\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [line for line in lines if not line.startswith(("| limit |", "|---"))]
    named: list[tuple[str, str]] = []
    for row in rows:
        words = re.findall(r"`(\w+)`", row.rsplit("|", 2)[1])
        assert words, row
        for word in words:
            if word.startswith("kvps_"):
                name = word
                assert name in BY_NAME, row
            else:
                assert word in BY_NAME[name].labels, row
                named.append((name, word))
    limits = BY_NAME["kvps_overloads_total"].labels
    assert sorted(label for name, label in named if name == "kvps_overloads_total") == sorted(limits)
