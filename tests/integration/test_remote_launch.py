"""kvps-launch over ssh and within a Slurm allocation: real sshd, slurmctld and two slurmd, on loopback."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvps
from tests.integration.engines import Engine, Slurm, Ssh
from tests.integration.processes import BIN, Processes, has_checkpoint, until
from tests.integration.test_checkpoints import BEGIN, TRAIN, TRAINER

STEP = """
import kvps, torch, zlib

torch.manual_seed(0)
kv = kvps.create("dist_sync", deterministic=True)
keys, values = ["a", "b"], [torch.randn(1000), torch.randn(77)]
kv.init(keys, values)
kv.set_optimizer("sgd", lr=0.1, momentum=0.9)
for step in range(5):
    generator = torch.Generator().manual_seed(100 * step + kv.rank)
    kv.pushpull(keys, [torch.randn(1000, generator=generator), torch.randn(77, generator=generator)], out=values)
print("bits", [zlib.crc32(value.numpy().tobytes()) for value in values], flush=True)
"""
FOR_EVER = """
import kvps, torch

kv = kvps.create("dist_sync")
kv.init("w", torch.zeros(4))
for step in range(10**9):
    kv.pushpull("w", torch.ones(4))
    if step == 20:
        print("running", flush=True)
"""
TOLD_MAX_S = 45.0
"""In so long a busy machine names a host that does not start what it should; a job waits a minute for its members."""


@pytest.fixture(scope="module", params=["ssh", pytest.param("slurm", marks=pytest.mark.thorough)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = {"ssh": Ssh, "slurm": Slurm}[request.param](tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


def gone(processes: Processes) -> None:
    until(lambda: not processes.running(), "end of all processes", 30.0)


def test_weights_are_those_of_one_machine(processes: Processes, engine: Engine) -> None:
    words = ("-n", 3, "-s", 2, "--", sys.executable, processes.script(STEP))
    far, here = engine.launch(processes, *words), processes.kvps("launch", *words)
    assert (far.wait(60.0), here.wait(60.0)) == (0, 0), (far, here)
    bits = {line.partition("bits")[2] for line in (far.out + here.out).splitlines()}
    assert len(bits) == 1, bits
    assert far.out.count("bits") == 3
    assert far.err == ""


def test_a_killed_worker_and_a_killed_server_come_back(
    processes: Processes, engine: Engine, tmp_path: Path
) -> None:
    # A replacement makes other steps than the others, so the rate stays as it is.
    trainer = TRAINER.replace("trainer.set_learning_rate(rate)", "pass")
    options = {"update_on_kvstore": True}
    script = processes.script(f"{BEGIN}\nOPTIONS = {options}\n{trainer}\n{TRAIN}")
    enough, folder = tmp_path / "enough", tmp_path / "checkpoints"
    flags = ("-n", 2, "-s", 2, "--max-restarts", 3, "--checkpoint-dir", folder, "--checkpoint-every", 0.3)
    launch = engine.launch(processes, *flags, "--", sys.executable, script, enough)
    launch.expect("steps 40", 60.0)
    os.kill(processes.pids(r"kvps\.cli\.worker.*--rank 1")[0], signal.SIGKILL)
    launch.expect("worker 1 ended with exit code 137; starting it again")
    launch.expect("worker 1. steps 20(.|\n)*worker 1. steps 20", 60.0)
    until(lambda: has_checkpoint(folder), "checkpoint")
    os.kill(processes.pids(r"kvps\.cli\.server.*--rank 1")[0], signal.SIGKILL)
    launch.expect("all servers rolled back to the last checkpoint")
    enough.touch()
    assert launch.wait(90.0) == 0, launch
    ends = [line.partition("weights")[2] for line in launch.out.splitlines() if "weights" in line]
    assert len(ends) == 2, launch
    assert ends[0] == ends[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(processes: Processes, engine: Engine, number: signal.Signals) -> None:
    words = ("-n", 2, "-s", 1, "--", sys.executable, processes.script(FOR_EVER))
    launch = engine.launch(processes, *words)
    launch.expect("running", 60.0)
    launcher = processes.pids(r"^(\S*python\S* )?\S*kvps-launch")[0]
    os.kill(launcher, number)
    launch.wait(30.0)
    gone(processes)


def test_variables_of_a_role_reach_its_processes(processes: Processes, engine: Engine) -> None:
    script = processes.script("import os; print(*(os.environ.get(one) for one in 'ABC'))")
    words = ("-n", 2, "-s", 1, "--env-worker", "A:1", "--env-server", "B:2", "--env", "C=3")
    launch = engine.launch(processes, *words, sys.executable, script)
    assert launch.wait(60.0) == 0, launch
    assert launch.out.count("1 None 3") == 2, launch


def test_secrets_are_in_no_command_line(processes: Processes, engine: Engine) -> None:
    words = ("-n", 2, "-s", 1, "--log-level", "info", "--", sys.executable)
    launch = engine.launch(processes, *words, processes.script(FOR_EVER))
    place = launch.expect(r"--keys (/proc/\d+/fd/\d+)", 30.0).group(1)
    launch.expect("running", 60.0)
    text = Path(place).read_text()
    secrets = [line.partition(" = ")[2] for line in text.splitlines() if line.startswith("secret")]
    assert len(secrets) >= 4
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words_there = path.read_bytes() + path.with_name("environ").read_bytes()
        except OSError:
            continue
        assert not [secret for secret in secrets if secret.encode() in words_there], path
    launch.signal(signal.SIGTERM)
    launch.wait(30.0)
    gone(processes)


def test_a_host_that_does_not_answer_is_named(
    processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ssh = Ssh(tmp_path_factory.mktemp("ssh"))
    try:
        flags = ("--launcher", "ssh", "-H", "127.0.0.1,127.0.0.9", "--rsh", ssh.rsh)
        flags += ("--python", str(processes.interpreter))
        began = time.monotonic()
        launch = processes.kvps("launch", *flags, "-n", 2, "-s", 1, "--", "true")
        assert launch.wait(60.0) == 78
        assert time.monotonic() - began < TOLD_MAX_S
        assert "worker 1: host 127.0.0.9 could not start it (exit code 255)" in launch.err
        gone(processes)
    finally:
        ssh.close()


OLD_HOST = """
import os, sys
host, command = sys.argv[sys.argv.index("--") + 1 :]
if host == "127.0.0.2":
    old = "import kvps, runpy; kvps.__version__ = '0.0.9'; runpy.run_module('kvps.launchers.agent', run_name='__main__')"
    os.execv(sys.executable, [sys.executable, "-P", "-c", old])
os.execv("/bin/sh", ["sh", "-c", command])
"""
"""A remote shell to hosts that are this machine, of which the second has another version of kvps."""


def test_a_host_with_another_kvps_is_named(processes: Processes) -> None:
    rsh = f"{sys.executable} {processes.script(OLD_HOST, 'rsh.py')}"
    flags = ("--launcher", "ssh", "-H", "127.0.0.1,127.0.0.2", "--rsh", rsh, "-n", 2, "-s", 1)
    began = time.monotonic()
    launch = processes.kvps("launch", *flags, "--", "true")
    assert launch.wait(60.0) == 78, launch
    assert time.monotonic() - began < TOLD_MAX_S
    there = rf"\[worker 1\] host \S+ has kvps 0\.0\.9, and the launch has kvps {kvps.__version__}"
    assert re.search(f"{there}: install the same version on both", launch.err), launch
    assert "worker 1 ended with exit code 78; ending the job" in launch.err


def test_given_keys_reach_other_hosts_and_wrong_keys_end_at_once(
    processes: Processes, tmp_path: Path
) -> None:
    rsh = f"{sys.executable} {processes.script(OLD_HOST, 'rsh.py')}"
    folder = tmp_path / "keys"
    made = processes.start("keygen", BIN / "kvps", "keygen", folder)
    assert made.wait() == 0, made
    flags = ("--launcher", "ssh", "-H", "127.0.0.1:2", "--rsh", rsh, "-n", 2, "-s", 1)
    flags += ("--python", processes.interpreter, "--keys")
    command = ("--", sys.executable, processes.script(STEP))
    launch = processes.kvps("launch", *flags, folder, *command)
    assert launch.wait(90.0) == 0, launch
    assert launch.out.count("bits") == 2, launch
    (folder / "worker.key").write_text("role = worker\npublic = short\n")
    wrong = processes.kvps("launch", *flags, folder, *command)
    assert wrong.wait() == 78, wrong
    assert f"{folder / 'worker.key'}" in wrong.err, wrong
    missing = processes.kvps("launch", *flags, tmp_path / "none", *command)
    assert missing.wait() == 78, missing
    assert "Make keys with 'kvps keygen DIR', and give --keys DIR" in missing.err, missing


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--launcher", "ssh"), "--launcher ssh needs hosts"),
        (("--launcher", "local", "-H", "a"), "-H needs --launcher ssh"),
        (("-H", "a:1"), "-n 2 needs 2 slots"),
        (("--launcher", "pbs"), "--launcher 'pbs': use one of local, ssh, slurm"),
        (("--launcher", "ssh", "-H", "a:1"), "-n 2 needs 2 slots, but the 1 hosts have 1 (a: 1)"),
        (("--launcher", "slurm"), "in no Slurm allocation"),
        (("--launcher", "slurm", "-H", "a:2"), "omit -H"),
        (("--launcher", "ssh", "-H", "127.0.0.1:2", "--rsh", "no-such-shell"), "cannot start no-such-shell"),
    ],
)
def test_a_wrong_flag(processes: Processes, flags: tuple[str, ...], told: str) -> None:
    launch = processes.kvps("launch", *flags, "-n", 2, "-s", 1, "--", "true")
    assert launch.wait() == 78
    assert told in launch.err
