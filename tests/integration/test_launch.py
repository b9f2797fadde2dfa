"""kvps-launch as a process: a cluster on one machine that begins and ends as one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvps.core.scheduler.job import UNUSED
from tests.integration.processes import BIN, SUM, Process, Processes, until

CONTINUED = """
import os, pathlib, sys, time, zlib
import kvps, torch

torch.manual_seed(0)
keys, values = ["a", "b"], [torch.randn(1000), torch.randn(77)]
kv = kvps.create("dist_sync", name="model", deterministic=True)
kv.init(keys, values)
kv.set_optimizer("sgd", lr=0.1, momentum=0.9)
if list(pathlib.Path(sys.argv[1]).glob("cut-*/manifest.json")):
    kv.restore()
    kv.pull(keys, out=values)
begin = kv.version("a")
print("begins at", begin, flush=True)
for step in range(begin, int(os.environ.get("STEPS", 300))):
    generator = torch.Generator().manual_seed(100 * step + kv.rank)
    kv.pushpull(keys, [torch.randn(one.shape, generator=generator) - one for one in values], out=values)
    time.sleep(float(os.environ.get("STEP_S", 0.01)))
    if step % 10 == 0:
        print("step", step, "is done", flush=True)
print("bits", [zlib.crc32(one.numpy().tobytes()) for one in values], flush=True)
"""
"""A script that begins where the newest checkpoint in a directory has ended."""


def launch(processes: Processes, script: Path, *flags: object, **env: str) -> Process:
    return processes.kvps("launch", *flags, "--", sys.executable, script, **env)


@pytest.mark.usefixtures("fresh_interpreters")
def test_all_of_it_in_one(processes: Processes) -> None:
    script = processes.script(
        SUM + "import torch.distributed as dist\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')\n"
        "print('env', *(os.environ[name] for name in names), os.environ['COLOUR'])\n"
        "dist.init_process_group('gloo')\n"
        "one = torch.ones(1); dist.all_reduce(one); print('gloo', one.item())\n"
        "print('to stderr', file=sys.stderr)\n"
    )
    launched = launch(processes, script, "-n", 2, "-s", 1, "--env", "COLOUR=blue=green")
    assert launched.wait(90.0) == 0, launched
    lines = launched.out.splitlines()
    for rank in range(2):
        assert f"[worker {rank}] sum [3.0, 3.0, 3.0, 3.0]" in lines
        assert f"[worker {rank}] env {rank} {rank} 2 2 127.0.0.1 blue=green" in lines
        assert f"[worker {rank}] gloo 2.0" in lines
        assert f"[worker {rank}] to stderr" in launched.err.splitlines()
    assert len(lines) == 6, "silence when all is well"
    assert "kvps" not in launched.err
    processes.check_nothing_left(0.5)


@pytest.mark.parametrize("servers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_command_that_needs_no_cluster(processes: Processes, servers: int) -> None:
    """It ends before the servers have joined, and that is no fault of theirs; that it used none is said."""
    launched = processes.kvps("launch", "-n", 2, "-s", servers, "--", "echo", "hello")
    assert launched.wait() == 0, launched
    assert sorted(launched.out.splitlines()) == ["[worker 0] hello", "[worker 1] hello"]
    said = f"[scheduler] kvps-scheduler: warning: {UNUSED}\n" if servers else ""
    assert launched.err == said
    processes.check_nothing_left(0.5)


def test_threads_are_shared_out(processes: Processes) -> None:
    script = processes.script(SUM + "print('threads', os.environ['OMP_NUM_THREADS'])")
    cores = len(os.sched_getaffinity(0))
    launched = launch(processes, script, "-n", 1)
    assert launched.wait() == 0, launched
    assert f"threads {max(1, cores // 2)}" in launched.out
    launched = launch(processes, script, "-n", 1, OMP_NUM_THREADS="5")
    assert launched.wait() == 0
    assert "threads 5" in launched.out


def test_variables_of_another_cluster_do_not_mislead(processes: Processes, tmp_path: Path) -> None:
    launched = launch(
        processes,
        processes.script(SUM),
        "-n",
        1,
        KVPS_SCHEDULER="tcp://127.0.0.1:1",
        KVPS_BIND="tcp://127.0.0.1:1",
        KVPS_RANK="7",
        KVPS_STATE=str(tmp_path / "state"),
        DMLC_ROLE="server",
    )
    assert launched.wait() == 0, launched
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("sys.exit(3)", 3),
        pytest.param("raise ValueError('no')", 1, marks=pytest.mark.in_turn),
        pytest.param("os._exit(3)", 3, marks=pytest.mark.in_turn),
        pytest.param("os.kill(os.getpid(), 9)", 137, marks=pytest.mark.in_turn),
    ],
)
def test_a_failing_worker_ends_everything(processes: Processes, how: str, code: int) -> None:
    """Worker 1 waits in pull when worker 0 fails."""
    script = processes.script(
        SUM + "import time\nfrom pathlib import Path\n"
        "if kv.rank: Path('waits').touch(); kv.pull('w', min_version=9)\n"
        "while not Path('waits').exists(): time.sleep(0.01)\n" + how
    )
    launched = launch(processes, script, "-n", 2, "-s", 1)
    until((processes.folder / "waits").exists, "worker 1 in pull")
    launched.expect(r"\[worker 1\] kvps.errors.WorkerLost: worker 0")
    assert launched.wait() == code
    assert f"kvps-launch: error: worker 0 ended with exit code {code}" in launched.err
    assert "worker 1 ended" not in launched.err
    assert "still running" not in launched.err, "it was told at once"


def test_a_server_that_is_killed_ends_everything(processes: Processes) -> None:
    script = processes.script(SUM + "kv.pull('w', min_version=9)")
    launched = launch(processes, script, "-n", 2, "-s", 2)
    until(lambda: launched.out.count("sum") == 2, "both sums")
    (server,) = processes.pids(r"kvps\.cli\.server .*--rank 1")
    os.kill(server, signal.SIGKILL)
    launched.expect(r"\[worker (\d)\] kvps.errors.ServerLost: server 1")
    launched.expect(r"\[worker \d\] the same traceback as that of worker \d above")
    assert launched.wait() == 1, "the workers' exit code"
    assert "kvps-launch: error: server 1 ended with exit code 137" in launched.err
    assert "still running" not in launched.err, "they were told at once"


ROUNDS = """
import kvps, torch
from pathlib import Path
kv = kvps.create("dist_sync", timeout=60)
kv.init("w", torch.zeros(4))
kv.set_optimizer("test", rescale_grad=1.0)
rounds = 0
while not Path("enough").exists() or rounds < 3:
    kv.pushpull("w", torch.ones(4))
    rounds += 1
    if rounds == 3: print("rounds", flush=True)
    kv.barrier()
    if kv.rank == 0 and Path("wanted").exists(): Path("enough").touch()
    kv.barrier()
w = kv.pull("w")
assert w.eq(2.0 * rounds).all(), (rounds, w)
print("exact", flush=True)
"""


def kill_scheduler(processes: Processes, before: int = 0) -> int:
    """Kill the scheduler once it is another one than ``before``; return its number."""

    def another() -> int:
        found = processes.pids(r"kvps\.cli\.scheduler")
        return found[0] if found and found[0] != before else 0

    scheduler = until(another, "scheduler")
    os.kill(scheduler, signal.SIGKILL)
    return scheduler


def test_a_scheduler_that_is_killed_is_started_again(processes: Processes) -> None:
    launched = launch(processes, processes.script(ROUNDS), "-n", 2, "-s", 2, "--max-restarts", 2)
    until(lambda: launched.out.count("rounds") == 2, "rounds")
    (folder,) = processes.temp.glob("kvps-launch-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    first = kill_scheduler(processes)
    launched.expect(r"scheduler ended with exit code 137; starting it again \(1 of 2\)")
    kill_scheduler(processes, first)
    launched.expect(r"scheduler ended with exit code 137; starting it again \(2 of 2\)")
    (processes.folder / "wanted").touch()
    assert launched.wait(60.0) == 0, launched
    assert launched.out.count("exact") == 2
    assert launched.err.count("starting it again") == 2


def test_a_scheduler_that_is_asked_to_stop_is_not_started_again(processes: Processes) -> None:
    launched = processes.kvps("launch", "-n", 1, "-s", 0, "--max-restarts", 3, "--", "sleep", 61)
    until(lambda: processes.pids("^sleep 61"), "the worker")
    (scheduler,) = processes.pids(r"kvps\.cli\.scheduler")
    os.kill(scheduler, signal.SIGTERM)
    until(lambda: not processes.pids(r"kvps\.cli\.scheduler"), "end of the scheduler")
    launched.signal(signal.SIGTERM)
    assert launched.wait() != 0
    assert "scheduler ended" not in launched.err


def test_a_scheduler_with_a_wrong_flag_is_not_promised_a_restart(
    processes: Processes, tmp_path: Path
) -> None:
    launched = processes.kvps("launch", "-n", 1, "--keys", tmp_path / "none", "--", sys.executable, "-c", "")
    assert launched.wait() == 78
    launched.expect("scheduler ended with exit code 78; ending the job\n")


def test_a_scheduler_that_is_killed_ends_everything(processes: Processes) -> None:
    script = processes.script(SUM + "import time; time.sleep(60)")
    launched = launch(processes, script, "-n", 1)
    launched.expect("sum")
    assert not list(processes.temp.iterdir()), "nothing is kept that nobody is to read"
    (scheduler,) = processes.pids(r"kvps\.cli\.scheduler")
    os.kill(scheduler, signal.SIGKILL)
    launched.expect("scheduler ended with exit code 137; ending the job .with --max-restarts")
    launched.signal(signal.SIGTERM)
    assert launched.wait() in (137, 143)


def test_a_worker_that_does_not_notice_is_ended(processes: Processes) -> None:
    script = processes.script(
        SUM + "import pathlib, time\n"
        "sleeps = pathlib.Path('sleeps')\n"
        "if kv.rank: sleeps.touch(); time.sleep(60)\n"
        "while not sleeps.exists(): time.sleep(0.01)\n"
        "sys.exit(5)\n"
    )
    launched = launch(processes, script, "-n", 2, "-s", 1)
    assert launched.wait(40.0) == 5
    assert "still running: " in launched.err


def test_a_job_whose_stores_shrink_goes_on_without_a_failed_worker(processes: Processes) -> None:
    script = processes.script(
        "import pathlib, sys, time\nimport kvps, torch\n"
        "kv = kvps.create('dist_sync', timeout=60, on_worker_lost='shrink')\n"
        "kv.init('w', torch.zeros(4))\n"
        "kv.pushpull('w', torch.ones(4))\n"
        "if kv.rank == 1: sys.exit(5)\n"
        "steps = 0\n"
        "while not pathlib.Path('end').exists():\n"
        "    kv.pushpull('w', torch.ones(4)); steps += 1; time.sleep(0.01)\n"
        "    if steps % 100 == 0: print('steps', steps, flush=True)\n"
        "print('finished', flush=True)\n"
    )
    launched = launch(processes, script, "-n", 3, "-s", 1)
    launched.expect("worker 1 ended with exit code 5")
    until(lambda: "go on without it" in launched.err or "job goes on" in launched.err, "goes on")
    (processes.folder / "end").touch()
    assert launched.wait() == 5
    assert launched.out.count("finished") == 2
    assert "still running" not in launched.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_everything(processes: Processes, number: int, code: int) -> None:
    script = processes.script(SUM + "kv.pull('w', min_version=9)")
    # A worker whose signal comes later waits for a replacement of the other one: it is not told that the job fails.
    launched = launch(processes, script, "-n", 2, "--max-restarts", 1)
    until(lambda: launched.out.count("sum") == 2, "both sums")
    launched.signal(number)
    assert launched.wait() == code
    told = launched.err.count("KeyboardInterrupt") + launched.err.count("the same traceback as")
    assert told == (2 if number == signal.SIGINT else 0), launched
    assert "still running" not in launched.err


@pytest.mark.usefixtures("fresh_interpreters")
def test_signals_that_were_ignored_before_stay_so(processes: Processes) -> None:
    """As under nohup, and in a script that traps Ctrl-C."""
    script = processes.script(
        SUM + "import pathlib, time\nwhile not pathlib.Path('end').exists(): time.sleep(0.01)"
    )
    ignoring = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh", sys.executable, "-m", "kvps.cli.launch"]
    launched = processes.start("launch", *ignoring, "-n", 1, "--", sys.executable, script)
    launched.expect("sum")
    for number in (signal.SIGHUP, signal.SIGINT):
        for pid in (launched.pid, *processes.pids(r"kvps\.cli\.worker")):
            os.kill(pid, number)
    (processes.folder / "end").touch()
    assert launched.wait() == 0


def test_sigterm_with_grace_lets_everybody_finish_a_round(processes: Processes) -> None:
    script = processes.script(
        SUM + "try:\n"
        "    while True: kv.pushpull('w', torch.ones(4)); print('round', flush=True)\n"
        "finally: print('end', flush=True)\n"
    )
    launched = launch(processes, script, "-n", 2, "--grace", 30)
    until(lambda: {"[worker 0] round", "[worker 1] round"} <= set(launched.out.splitlines()), "rounds")
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 143, launched
    assert {"[worker 0] end", "[worker 1] end"} <= set(launched.out.splitlines())
    assert "Error" not in launched.err
    assert "lost" not in launched.err


def test_sigterm_with_checkpoints_writes_a_last_one_from_which_a_later_job_continues(
    processes: Processes, tmp_path: Path
) -> None:
    script, folder = processes.script(CONTINUED), tmp_path / "checkpoints"
    flags = ("-n", 2, "-s", 2, "--grace", 30, "--checkpoint-dir", folder)
    processes.env |= {"STEPS": "100", "STEP_S": "0"}
    first = processes.kvps("launch", *flags, "--", sys.executable, script, folder, STEP_S="0.05")
    first.expect("step 10 ")
    first.signal(signal.SIGTERM)
    assert first.wait() == 143, first
    assert "checkpoint 1 is written; ending the job" in first.err
    assert "bits" not in first.out
    assert len(list(folder.glob("cut-*/manifest.json"))) == 1
    again = processes.kvps("launch", *flags, "--", sys.executable, script, folder)
    straight = processes.kvps("launch", "-n", 2, "-s", 2, "--", sys.executable, script, tmp_path / "none")
    assert (again.wait(60.0), straight.wait(60.0)) == (0, 0), (again, straight)
    assert int(again.expect(r"begins at (\d+)")[1]) >= 10
    bits = [line.partition("bits")[2] for line in (again.out + straight.out).splitlines()]
    assert len({bit for bit in bits if bit}) == 1, (again, straight)


def test_a_server_that_is_lost_leaves_no_last_checkpoint(processes: Processes, tmp_path: Path) -> None:
    script = processes.script(SUM + "kv.pull('w', min_version=9)")
    launched = launch(
        processes, script, "-n", 1, "-s", 1, "--grace", 60, "--checkpoint-dir", tmp_path / "none"
    )
    launched.expect("sum")
    (server,) = processes.pids(r"kvps\.cli\.server")
    os.kill(server, signal.SIGSTOP)
    launched.signal(signal.SIGTERM)
    launched.expect("waiting for a last checkpoint")
    os.kill(server, signal.SIGKILL)
    launched.expect(r"no last checkpoint: (server|worker) 0 ended with exit code \d+; ending the job")
    assert launched.wait() == 143, launched


def test_ctrl_c_before_everything_is_there(processes: Processes) -> None:
    launched = launch(processes, processes.script(SUM), "-n", 2)
    until(lambda: processes.pids(r"kvps\.cli\.scheduler"), "scheduler")
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 143
    assert "still running" not in launched.err


@pytest.mark.in_turn
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_after_a_signal_kills_at_once(processes: Processes, number: signal.Signals, code: int) -> None:
    """Though the command has a minute after the first signal."""
    script = processes.script(
        SUM + "import signal, time\n"
        "for one in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(one, lambda *_: print('no', flush=True))\n"
        "print('there', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    launched = launch(processes, script, "-n", 1, "--grace", 60)
    launched.expect("there")
    launched.signal(number)
    launched.expect("no")
    launched.signal(signal.SIGINT)
    assert launched.wait() == code
    assert "still running" not in launched.err
    assert launched.out.count("no") == 1


def test_nothing_outlives_a_launch_that_is_killed(processes: Processes) -> None:
    script = processes.script(
        "import subprocess\n" + SUM + "subprocess.Popen(['sleep', '60'])\nkv.pull('w', min_version=9)\n"
    )
    launched = launch(processes, script, "-n", 2, "--max-restarts", 1)
    until(lambda: len(processes.pids("^sleep 60")) == 2, "grandchildren")
    launched.signal(signal.SIGKILL)
    assert launched.wait() == -signal.SIGKILL
    until(lambda: not processes.running(), "end of all processes")
    until(lambda: not list(processes.temp.iterdir()), "end of the folder")


@pytest.mark.usefixtures("fresh_interpreters")
def test_nothing_outlives_a_launch_that_is_killed_with_all_that_looks_like_it(processes: Processes) -> None:
    """As ``pkill -9 kvps-launch`` does: its reaper has the same name."""
    launched = processes.kvps("launch", "-n", 1, "-s", 1, "--", "sleep", 61)
    until(lambda: processes.pids("^sleep 61"), "the worker")
    both = processes.pids("kvps-launch -n 1")
    assert len(both) == 2
    for pid in sorted(both, reverse=True):
        os.kill(pid, signal.SIGKILL)
    assert launched.wait() == -signal.SIGKILL


def test_a_reader_that_goes_away_ends_everything(processes: Processes) -> None:
    script = processes.script(SUM + "while True: print('line')\n")
    command = (processes.interpreter, BIN / "kvps-launch")
    argv = [*command, "-n", "1", "--", sys.executable, script]
    with subprocess.Popen(
        argv, env=processes.env, cwd=processes.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as popen:
        assert popen.stdout is not None
        assert popen.stderr is not None
        assert popen.stdout.readline().startswith(b"[worker 0] ")
        popen.stdout.close()
        assert popen.wait(15.0) == 128 + signal.SIGPIPE
        assert b"Traceback" not in popen.stderr.read()


RESUMING = """
import os, sys
from pathlib import Path
import kvps, torch
kv = kvps.create("dist_sync", timeout=60)
kv.set_optimizer("test", rescale_grad=1.0)
kv.init("w", torch.zeros(1000))
kv.init("big", torch.zeros(300_000))
start = kv.resume(["w", "big"])
print("from round", start, flush=True)
for step in range(start, 8):
    if kv.rank == int(sys.argv[1]) and step == 3 and not Path("died").exists():
        Path("died").touch()
        kv.push("w", torch.full((1000,), kv.rank + 1.0))
        os.kill(os.getpid(), 9)
    kv.push(["w", "big"], [torch.full((n,), kv.rank + 1.0) for n in (1000, 300_000)])
    w, big = kv.pull(["w", "big"])
    want = 3.0 * (step + 1)
    assert w.eq(want).all() and big.eq(want).all(), (step, w, big)
print("exact", kv.version("w"), kv.version("big"))
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_worker_that_is_started_again_resumes(processes: Processes, rank: int) -> None:
    script = processes.script(RESUMING)
    argv = (sys.executable, script, rank)
    launched = processes.kvps("launch", "-n", 2, "--max-restarts", 1, "--", *argv)
    assert launched.wait(60.0) == 0, launched
    assert launched.out.count("exact 8 8") == 2
    assert launched.out.count("from round 0") == 2
    assert f"[worker {rank}] from round 3" in launched.out
    assert (
        f"kvps-launch: warning: worker {rank} ended with exit code 137; starting it again (1 of 1)"
        in launched.err
    )
    processes.check_nothing_left(0.5)


def test_restarts_are_used_up(processes: Processes) -> None:
    script = processes.script(
        "import os\nimport kvps\nkv = kvps.create('dist_sync', timeout=60)\n"
        "if kv.rank == 0: os._exit(4)\n"
        "kv.barrier()\n"
    )
    launched = launch(processes, script, "-n", 2, "-s", 1, "--max-restarts", 2)
    assert launched.wait(60.0) == 4
    assert launched.err.count("starting it again") == 2
    assert "worker 0 ended with exit code 4; ending the job" in launched.err
    assert "[worker 1] kvps.errors.WorkerLost: " in launched.err


def test_a_wrong_configuration_is_not_started_again(processes: Processes) -> None:
    script = processes.script("import sys; sys.exit(78)")
    launched = launch(processes, script, "-n", 1, "--max-restarts", 5)
    assert launched.wait() == 78
    assert "starting it again" not in launched.err


def test_wrong_line_of_four_workers_is_printed_once(processes: Processes) -> None:
    """The traceback of four workers, whose they are, and the exit code: nothing else of six other processes."""
    script = processes.script(SUM + "kv.push('w', torch.zeros(5))\n")
    launched = launch(processes, script, "-n", 4, "-s", 2)
    assert launched.wait(60.0) == 1
    told = [line.partition("] ")[2] or line for line in launched.err.splitlines()]
    assert told.count("Traceback (most recent call last):") == 1, launched
    assert sum(line.startswith("kvps.errors.Mismatch: key 'w'") for line in told) == 1, launched
    same = [line for line in told if line.startswith("the same traceback as that of worker ")]
    own = [line for line in told if line.startswith("kvps-")]
    assert 1 <= len(same) <= 3, launched
    assert len(own) == 1, launched
    assert own[0].startswith("kvps-launch: error: worker ")
    assert len([effect for effect in told if not effect.startswith("  ")]) == 3 + len(same), launched
