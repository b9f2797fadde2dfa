"""Processes that may open few files: they work, or say how many they need; libzmq aborts none of them."""

import sys

import pytest

from tests.integration.processes import Processes

RUN = """
import os, resource, signal, sys, traceback
limits = range(12, 91, int(sys.argv[1]))
import kvps, torch  # once, for all roles
from kvps.cli import launch, scheduler, server, worker
from kvps.errors import ConfigError, SchedulerLost

NOWHERE = "tcp://127.0.0.1:9"

def stop(*_):
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # else it would not end, but be killed
        os.kill(os.getpid(), signal.SIGTERM)

def run(what):
    if what == "scheduler":
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
        return scheduler.main(["--workers", "2", "--servers", "1", "--bind", "tcp://127.0.0.1:0"])
    if what == "server":
        return server.main(["--scheduler", NOWHERE])
    if what == "worker":
        return worker.main(["--scheduler", NOWHERE, "--", "true"])
    if what == "launch":
        return launch.main(["-n", "1", "-s", "0", "--max-restarts", "1", "--", "true"])
    if what == "plain":
        os.environ["KVPS_SCHEDULER"] = NOWHERE
    kv = kvps.create("dist_sync", timeout=30)
    kv.init("w", torch.zeros(400_000))
    assert kv.pushpull("w", torch.ones(400_000)).eq(1).all()
    kvps.shutdown()
    return 0

for what, limit in [(what, limit) for what in sys.argv[2:] for limit in limits]:
    pid = os.fork()
    if pid == 0:
        os.closerange(3, 64)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        code = 99
        try:
            code = run(what)
        except ConfigError as error:
            print(f"{what}: {error}", file=sys.stderr)
            code = 78
        except SchedulerLost:
            code = 75
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(code)
    print(what, limit, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


WORKS = {"scheduler": 0, "server": 75, "worker": 75, "plain": 75, "launch": 0, "embedded": 0}
"""What each role ends with where there are enough; some find no scheduler."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [26, pytest.param(1, marks=pytest.mark.slow)])
def test_few_file_descriptors(processes: Processes, step: int) -> None:
    ran = processes.python("-c", RUN, step, *WORKS, KVPS_JOIN_TIMEOUT="0.2")
    assert ran.wait(880.0) == 0, ran
    codes: dict[str, list[int]] = {what: [] for what in WORKS}
    for what, _, code in map(str.split, ran.out.splitlines()):
        codes[what].append(int(code))
    for what, found in codes.items():
        refused = found.count(78)
        assert 0 < refused < len(found) == len(range(12, 91, step)), (what, ran)
        assert found == [78] * refused + [WORKS[what]] * (len(found) - refused), (what, ran)
    assert ran.err.count("ulimit -n") == sum(found.count(78) for found in codes.values())
    assert "Traceback" not in ran.err
    assert "zmq" not in ran.err


def test_a_soft_limit_that_is_too_low_is_raised(processes: Processes) -> None:
    command = f"ulimit -Sn 24; exec {sys.executable} -c '{EMBEDDED}'"
    ran = processes.start("low", "bash", "-c", command)
    assert ran.wait(60.0) == 0, ran
    assert "ok" in ran.out


EMBEDDED = """
import kvps, torch
kv = kvps.create("dist_sync", timeout=30)
kv.init("w", torch.zeros(400_000))
kv.pull("w")
print("ok", flush=True)
"""
