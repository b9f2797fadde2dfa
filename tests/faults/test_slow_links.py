"""Links of a set rate: what crosses them takes hardly longer than they need for it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow_links.py"
LIMIT = 1.3
SECONDS = 40


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.spec("R222")
def test_no_act_takes_much_longer_than_its_link(has_namespaces: None) -> None:
    """At 0.5, 1 and 8 Mbit/s, with two workers, all at once."""
    argv = [sys.executable, SCRIPT, "--seconds", SECONDS, "--queue", "100ms", "--limit", LIMIT]
    done = subprocess.run([str(argument) for argument in argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ratios = [float(item) for item in re.findall(r"ratio +([0-9.]+)", done.stdout)]
    assert len(ratios) == 3 * 5
    assert max(ratios) <= LIMIT
