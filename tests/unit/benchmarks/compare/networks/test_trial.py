"""A trial on links of a set rate: rank 0 stands still while the traffic is read."""

import os
import sys

from benchmarks.compare.networks.trial import GatedGroup
from tests.unit.tools.bench.test_local import SAY, Held


def test_process_waits_at_the_gate_until_the_traffic_is_read() -> None:
    looked = []
    code = f"import os, sys; os.write(int(sys.argv[2]), b'.'); os.read(int(sys.argv[1]), 1); {SAY}"
    with GatedGroup(Held()) as group:
        passed, ask = group.gate(lambda: looked.append("once"))
        argv = [sys.executable, "-c", code, str(passed), str(ask)]
        group.start("worker", argv, os.environ, is_measured=True, pass_fds=(passed, ask))
        assert group.wait() == [[1.0, 2.0]]
    assert looked == ["once"]
