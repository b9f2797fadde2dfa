"""kvps-worker as a process: its seat, its command, and how either ends; and plain workers."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from kvps.core.liveness import SILENCE_MAX_S
from tests.integration.processes import SUM, Process, Processes, free_port, until


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        pytest.param("raise ValueError", 1, marks=pytest.mark.thorough),
        pytest.param("import os; os._exit(200)", 200, marks=pytest.mark.thorough),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_exit_code_is_that_of_the_command(processes: Processes, code: str, exit_code: int) -> None:
    cluster = processes.scheduler(1, 0)
    worker = cluster.worker(sys.executable, "-c", code, flags=["--no-replacement"])
    assert worker.wait() == exit_code
    assert cluster.process.wait() == (1 if exit_code else 0)


def test_a_program_that_cannot_be_started(processes: Processes) -> None:
    cluster = processes.scheduler(1, 0)
    broken = processes.script("#!/no/such/interpreter\n", "broken")
    broken.chmod(0o755)
    worker = cluster.worker(broken, flags=["--no-replacement"])
    assert worker.wait() == 126
    assert "cannot start" in worker.err
    assert cluster.process.wait() == 1
    assert "cannot start" in cluster.process.err


@pytest.mark.usefixtures("fresh_interpreters")
def test_command_finds_its_seat_in_its_environment(processes: Processes) -> None:
    cluster = processes.scheduler(2, 0)
    show = "import os; print(sorted(os.environ.items()))"
    workers = [
        cluster.worker(
            sys.executable,
            "-c",
            show,
            flags=["--rank", rank],
            DMLC_ROLE="worker",
            DMLC_PS_ROOT_URI="127.0.0.1",
            DMLC_PS_ROOT_PORT="1",
            DMLC_NUM_WORKER="9",
            DMLC_NUM_SERVER="9",
        )
        for rank in (1, 0)
    ]
    assert [worker.wait() for worker in workers] == [0, 0]
    seen = [dict(eval(worker.out)) for worker in reversed(workers)]
    for rank, item in enumerate(seen):
        assert item["KVPS_SCHEDULER"] == cluster.endpoint
        assert item["KVPS_RANK"] == item["RANK"] == item["LOCAL_RANK"] == str(rank)
        assert item["WORLD_SIZE"] == item["LOCAL_WORLD_SIZE"] == "2"
        assert int(item["KVPS_INCARNATION"]) > 0
        assert item["MASTER_ADDR"] == "127.0.0.1"
        assert not [name for name in item if name.startswith("DMLC_")]
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert cluster.process.wait() == 0


def test_nobody_there_ends_with_75(processes: Processes) -> None:
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    worker = processes.kvps("worker", "--scheduler", nowhere, "--", "true", KVPS_JOIN_TIMEOUT="0.5")
    plain = processes.python(processes.script(SUM), KVPS_SCHEDULER=nowhere, KVPS_JOIN_TIMEOUT="0.5")
    assert worker.wait() == 75
    assert plain.wait() == 1
    for item in (worker, plain):
        assert nowhere in item.err
        assert "0.5 s" in item.err
    assert "SchedulerLost" in plain.err


def test_a_wrong_address_in_a_plain_worker(processes: Processes) -> None:
    plain = processes.python(processes.script(SUM), KVPS_SCHEDULER="localhost:9091")
    assert plain.wait() == 1
    assert "ConfigError: KVPS_SCHEDULER='localhost:9091'" in plain.err


def test_too_many_workers_are_refused(processes: Processes) -> None:
    cluster = processes.scheduler(2, 1)
    script = processes.script(SUM)
    first = cluster.worker(sys.executable, script, flags=["--rank", 0])
    cluster.process.expect("worker 0 joined")
    twice = cluster.worker("true", flags=["--rank", 0])
    assert twice.wait() == 78
    assert "rank 0 is alive" in twice.err
    assert "started twice" in twice.err
    beyond = cluster.worker("true", KVPS_RANK="7")
    assert beyond.wait() == 78
    assert "there is no worker 7" in beyond.err
    second = cluster.worker(sys.executable, script)
    cluster.process.expect("worker 1 joined")
    third = cluster.worker("true")
    assert third.wait() == 78
    assert "already has 2 workers" in third.err
    plain = cluster.plain(script)
    assert plain.wait() == 1
    assert "ConfigError: the job already has 2 workers" in plain.err
    server = cluster.server()
    assert [item.wait() for item in (first, second, server, cluster.process)] == [0, 0, 0, 0]
    assert all("sum [3.0, 3.0, 3.0, 3.0]" in item.out for item in (first, second))


def test_roles_may_start_in_any_order(processes: Processes) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    script = processes.script(SUM)
    plain = processes.python(script, KVPS_SCHEDULER=endpoint)
    worker = processes.kvps("worker", "--scheduler", endpoint, "--", sys.executable, script)
    server = processes.kvps("server", KVPS_SCHEDULER=endpoint)
    until(lambda: len(processes.running()) >= 3, "three processes")
    scheduler = processes.kvps("scheduler", "--workers", 2, "--servers", 1, "--bind", endpoint)
    every = (plain, worker, server, scheduler)
    assert [item.wait() for item in every] == [0, 0, 0, 0]
    assert "sum [3.0, 3.0, 3.0, 3.0]" in plain.out
    assert "sum [3.0, 3.0, 3.0, 3.0]" in worker.out


PATIENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("there", flush=True)
time.sleep(60)
"""
STUBBORN = """
import signal, sys, time
for one in (signal.SIGTERM, signal.SIGINT):
    signal.signal(one, lambda number, _: print("no", number, flush=True))
print("there", flush=True)
while True:
    time.sleep(60)
"""


def test_signals_are_passed_on(processes: Processes) -> None:
    for number, code, told in ((signal.SIGTERM, 7, ""), (signal.SIGINT, 130, "KeyboardInterrupt")):
        cluster = processes.scheduler(1, 0)
        worker = cluster.worker(sys.executable, "-c", PATIENT, flags=["--no-replacement"])
        worker.expect("there")
        worker.signal(number)
        assert worker.wait() == code
        assert told in worker.err
        assert cluster.process.wait() == 1


def test_a_command_that_does_not_end_is_killed(processes: Processes) -> None:
    cluster = processes.scheduler(1, 0)
    worker = cluster.worker(sys.executable, "-c", STUBBORN, flags=["--no-replacement"])
    worker.expect("there")
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    worker.expect("no 15")
    assert worker.wait() == 137
    assert 4.0 <= time.monotonic() - began <= 30.0
    assert cluster.process.wait() == 1


def test_the_second_signal_kills_at_once(processes: Processes) -> None:
    cluster = processes.scheduler(1, 0)
    flags = ["--no-replacement", "--grace", 60]
    worker = cluster.worker(sys.executable, "-c", STUBBORN, flags=flags)
    worker.expect("there")
    worker.signal(signal.SIGTERM)
    worker.expect("no 15")
    worker.signal(signal.SIGINT)
    assert worker.wait() == 137
    assert "no 2" not in worker.out
    assert cluster.process.wait() == 1


def test_a_signal_while_it_waits_for_others(processes: Processes) -> None:
    cluster = processes.scheduler(2, 0)
    worker = cluster.worker("true")
    cluster.process.expect("worker 0 joined")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 143
    both = [cluster.worker("true"), cluster.worker("true")]
    assert [item.wait() for item in (*both, cluster.process)] == [0, 0, 0]


FAMILY = """
import subprocess, sys, time
subprocess.Popen(["sh", "-c", "echo grandchild; sleep 60"])
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["worker", "command"])
def test_children_of_the_command_end_with_it(processes: Processes, end: str) -> None:
    cluster = processes.scheduler(1, 0)
    worker = cluster.worker(sys.executable, processes.script(FAMILY))
    worker.expect("grandchild")
    if end == "worker":
        worker.signal(signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL
    else:
        (command,) = processes.pids(r"^\S*python\S* \S*train.py")
        os.kill(command, signal.SIGKILL)
        assert worker.wait() == 137
    cluster.process.expect("worker 0 .*lost", SILENCE_MAX_S - 1.0)
    cluster.process.signal(signal.SIGTERM)
    assert cluster.process.wait() == 0
    processes.check_nothing_left()


def test_a_command_may_go_on_after_it_left(processes: Processes, tmp_path: Path) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server()
    script = processes.script(
        SUM + "kvps.shutdown()\n"
        "import pathlib, sys, time\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
        "print('saved')\n"
    )
    worker = cluster.worker(sys.executable, script, tmp_path / "go")
    assert [item.wait() for item in (server, cluster.process)] == [0, 0]
    (tmp_path / "go").touch()
    assert worker.wait() == 0
    assert "saved" in worker.out


def test_command_may_run_several_processes_in_turn(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server()
    script = processes.script(SUM)
    python = processes.interpreter
    worker = cluster.worker("sh", "-c", f"{python} {script} && {python} {script}")
    assert worker.wait() == 0, worker
    assert worker.out.count("sum") == 2
    assert [item.wait() for item in (server, cluster.process)] == [0, 0]


def test_two_processes_of_one_command_at_a_time_are_refused(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server()
    script = processes.script(
        SUM + "import subprocess\n"
        f"print('second', subprocess.run(['{processes.interpreter}', '-c', "
        "'import kvps; kvps.create(\"dist_sync\")'], capture_output=True, text=True).stderr)\n"
    )
    worker = cluster.worker(sys.executable, script)
    assert worker.wait() == 0, worker
    assert "started twice" in worker.out
    assert [item.wait() for item in (server, cluster.process)] == [0, 0]


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('no')",
        pytest.param("import sys; sys.exit(3)", marks=pytest.mark.in_turn),
        pytest.param("import os; os._exit(3)", marks=pytest.mark.in_turn),
    ],
)
def test_a_plain_worker_that_ends_badly_is_lost(processes: Processes, code: str) -> None:
    cluster = processes.scheduler(2, 1)
    server = cluster.server()
    begin = SUM.replace("timeout=60", "timeout=60, on_worker_lost='fail'")
    bad = processes.script(begin + code, "bad.py")
    good = processes.script(begin + "kv.pull('w', min_version=9)", "good.py")
    workers = [cluster.plain(bad, KVPS_RANK="1"), cluster.plain(good, KVPS_RANK="0")]
    assert workers[0].wait() in (1, 3)
    assert workers[1].wait(SILENCE_MAX_S - 1.0) == 1
    assert "WorkerLost: worker 1" in workers[1].err
    cluster.process.signal(signal.SIGTERM)
    assert cluster.process.wait() == 0
    assert server.wait() == 75


def test_large_pushes_still_leave_when_the_script_is_over(processes: Processes) -> None:
    """The interpreter ends, and with it whatever others have registered for its end."""
    cluster = processes.scheduler(2, 1)
    cluster.server(KVPS_TRANSPORT="tcp")
    processes.may_fork = False
    script = processes.script(
        "import kvps, torch\n"
        "kv = kvps.create('dist_sync')\n"
        "kv.init('w', torch.zeros(4_000_000))\n"
        "for _ in range(6): kv.push('w', torch.randn(4_000_000), async_op=True)\n"
    )
    workers = [cluster.plain(script, KVPS_TRANSPORT="tcp") for _ in range(2)]
    assert [item.wait(60.0) for item in (*workers, cluster.process)] == [0, 0, 0], workers
    assert [worker.err for worker in workers] == ["", ""]


def test_a_push_that_is_lost_at_the_end_fails_the_process(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server()
    script = processes.script(
        "import kvps, os, time, torch\n"
        "kv = kvps.create('dist_sync', timeout=30)\n"
        "kv.init('w', torch.zeros(4))\n"
        "print('ready', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "kv.push('w', torch.ones(4))\n"
        "print('end', flush=True)\n"
    )
    plain = cluster.plain(script)
    plain.expect("ready")
    server.signal(signal.SIGSTOP)
    (processes.folder / "go").touch()
    plain.expect("end")
    server.signal(signal.SIGKILL)
    assert plain.wait() == 1, plain
    assert "at exit: server 0 " in plain.err, plain
    cluster.process.signal(signal.SIGTERM)
    cluster.process.wait()


def test_hung_worker_is_named_and_is_not_lost(processes: Processes) -> None:
    """The command of worker 1 is stopped in the middle; when it goes on, so does the job."""
    cluster = processes.scheduler(2, 1)
    server = cluster.server("--log-level", "warning")
    script = processes.script(
        "import kvps, os, time, torch\n"
        "kv = kvps.create('dist_sync', timeout=60)\n"
        "kv.init('w', torch.zeros(4))\n"
        "kv.pushpull('w', torch.ones(4))\n"
        "print('pid', os.getpid(), flush=True)\n"
        "if kv.rank: \n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "for call in (lambda: kv.pushpull('w', torch.ones(4), timeout=12), lambda: kv.barrier(timeout=3)):\n"
        "    try: call()\n"
        "    except kvps.Timeout as error: print(error, flush=True)\n"
        "kv.barrier()\n"
        "print('sum', kv.pull('w').tolist())\n"
    )
    workers = [cluster.worker(sys.executable, script, flags=["--rank", rank]) for rank in (0, 1)]
    pid = int(workers[1].expect(r"pid (\d+)").group(1))
    os.kill(pid, signal.SIGSTOP)
    try:
        stalls = r"waits for a push of rank 1 \(alive, but no progress for \d+ s\)"
        workers[0].expect(stalls)
        workers[0].expect(r"barrier.* waits for rank 1 \(hangs: .* has been silent for \d+ s\)")
        server.expect(r"waits for rank 1 \(alive, but no progress for \d+ s\)")
    finally:
        (processes.folder / "go").touch()
        os.kill(pid, signal.SIGCONT)
    for worker in workers:
        assert worker.wait() == 0, worker
        assert "sum [2.0, 2.0, 2.0, 2.0]" in worker.out
    assert [server.wait(), cluster.process.wait()] == [0, 0]
    assert "lost" not in cluster.process.err


STEPS = """
import kvps, os, time, torch
kv = kvps.create("dist_sync", timeout=60)
for key in ("a", "b"):
    kv.init(key, torch.zeros(4))
try:
    for step in range(6):
        if step == 3 and kv.rank == 0:
            print("waits", flush=True)
            while not os.path.exists("go"): time.sleep(0.01)
        first = kv.pushpull("a", torch.ones(4), async_op=True)
        print("in", step, flush=True)
        sums = [one[0].item() for one in (kv.pushpull("b", torch.ones(4)), first.wait())]
        print("step", step, sums, flush=True)
finally:
    print("end", os.getpid(), flush=True)
"""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    (line,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(line, 16) >> (number - 1) & 1)


def leaves_in_step_3(processes: Processes, workers: list[Process], pid: int) -> None:
    """Worker 1 gets SIGTERM in the middle of step 3, in which worker 0 keeps it waiting."""
    workers[0].expect("waits")
    workers[1].expect("in 3")
    workers[1].signal(signal.SIGTERM)
    until(lambda: not catches(pid, signal.SIGTERM), "SIGTERM in the command")
    (processes.folder / "go").touch()
    assert [worker.wait() for worker in workers] == [0, 0], workers
    both, alone = [2.0, 2.0], [1.0, 1.0]
    for step in range(4):
        assert all(f"step {step} {both}" in worker.out for worker in workers)
    for step in (4, 5):
        assert f"step {step} {alone}" in workers[0].out
        assert f"step {step}" not in workers[1].out
    assert all("end" in worker.out for worker in workers)


def test_sigterm_lets_a_command_leave_behind_its_round(processes: Processes) -> None:
    cluster = processes.scheduler(2, 2)
    servers = [cluster.server() for _ in range(2)]
    script = processes.script("import os; print('pid', os.getpid(), flush=True)\n" + STEPS)
    workers = [
        cluster.worker(sys.executable, script, flags=["--rank", rank, "--grace", 30]) for rank in (0, 1)
    ]
    pid = int(workers[1].expect(r"pid (\d+)").group(1))
    leaves_in_step_3(processes, workers, pid)
    assert [item.wait() for item in (*servers, cluster.process)] == [0, 0, 0]


def test_sigterm_lets_a_plain_worker_leave_that_wants_it_so(processes: Processes) -> None:
    cluster = processes.scheduler(2, 1)
    server = cluster.server()
    script = processes.script("import kvps; kvps.leave_at_sigterm()\n" + STEPS)
    workers = [cluster.plain(script, KVPS_RANK=str(rank)) for rank in (0, 1)]
    leaves_in_step_3(processes, workers, workers[1].pid)
    assert [item.wait() for item in (server, cluster.process)] == [0, 0]


def test_a_grace_must_be_a_time(processes: Processes) -> None:
    worker = processes.kvps("worker", "--grace", "0", "--", "true")
    assert worker.wait() == 78
    assert "--grace=0: use a number of seconds above 0" in worker.err
