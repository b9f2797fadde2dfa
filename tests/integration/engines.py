"""Engines that start processes on several hosts, for tests: a real sshd, and a Slurm cluster of two nodes, on loopback."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Protocol

import pytest

from tests.integration.processes import BIN, Process, Processes, free_port, until

HOSTS = ("127.0.0.1", "127.0.0.2")
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
SSHD = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PidFile none
SetEnv HOME={folder}
"""
SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/ctl
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctl.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=p Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


class Engine(Protocol):
    """An engine that starts processes on several hosts."""

    def launch(self, processes: Processes, *words: object) -> Process:
        """Start kvps-launch by it, on two hosts."""


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def program(name: str) -> str:
    found = shutil.which(name, path=SBIN)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


class Ssh:
    """A server for ssh on two loopback addresses."""

    def __init__(self, folder: Path) -> None:
        sshd, keygen = program("sshd"), program("ssh-keygen")
        for name in ("host", "user"):
            command = [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        (port,) = free_ports(1)
        (folder / "config").write_text(SSHD.format(port=port, folder=folder))
        self._server = subprocess.Popen(
            [sshd, "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.DEVNULL
        )
        self.rsh = shlex.join(
            [
                *(program("ssh"), "-p", str(port), "-i", str(folder / "user")),
                *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
                *("-o", "LogLevel=ERROR", "-F", "none"),
            ]
        )
        command = [*shlex.split(self.rsh), "-o", "BatchMode=yes", "127.0.0.1", "true"]
        until(lambda: subprocess.run(command, capture_output=True).returncode == 0, "sshd")

    def launch(self, processes: Processes, *words: object) -> Process:
        """Start kvps-launch."""
        hosts = ",".join(f"{host}:2" for host in HOSTS)
        flags = ("--launcher", "ssh", "-H", hosts, "--rsh", self.rsh)
        flags += ("--python", str(processes.interpreter))
        return processes.kvps("launch", *flags, *words)

    def close(self) -> None:
        """End it."""
        self._server.terminate()
        self._server.wait()


class Slurm:
    """A Slurm cluster of two nodes."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("a Slurm cluster of its own needs root")
        munged, slurmctld, slurmd = map(program, ("munged", "slurmctld", "slurmd"))
        for name in ("munge", "ctl"):
            (folder / name).mkdir(mode=0o755)
        folder.chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        text = SLURM.format(folder=folder, ports=free_ports(3), host=socket.gethostname())
        (folder / "slurm.conf").write_text(text)
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        places["seed-file"] = "seed"
        own = [f"--{flag}={folder}/munge/{name}" for flag, name in places.items()]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._start(munged, "--foreground", "--force", *own)
        until((folder / "munge" / "socket").exists, "munged")
        self._start(slurmctld, "-D", "-c")
        for node in ("n1", "n2"):
            self._start(slurmd, "-D", "-N", node)

        def idle() -> bool:
            return self.ask("sinfo", "--noheader", "--states=idle", "--format=%D") == "2"

        until(idle, "nodes")

    def _start(self, *words: str) -> None:
        env = os.environ | self.env
        sink = subprocess.DEVNULL
        self._daemons.append(subprocess.Popen(words, env=env, stdout=sink, stderr=sink))

    def launch(self, processes: Processes, *words: object) -> Process:
        """Start kvps-launch in an allocation of its own."""
        allocation = (program("salloc"), "-N2", "--ntasks-per-node=2", "--quiet")
        command = (BIN / "kvps-launch", "--launcher", "slurm")
        flags = ("--python", processes.interpreter)
        return processes.start("salloc", *allocation, *command, *flags, *words, **self.env)

    def ask(self, command: str, *words: str) -> str:
        """Return what a command of Slurm prints, without the newline at its end."""
        done = subprocess.run(
            [program(command), *words], env=os.environ | self.env, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    def batch(self, processes: Processes, script: str, folder: Path, *options: str) -> Batch:
        """Submit a batch script, with options of sbatch."""
        path = processes.script(script, "job.sh")
        env = processes.env | self.env | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        out = folder / "job.out"
        words = [program("sbatch"), "--parsable", f"--output={out}", *options, str(path)]
        done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done
        return Batch(self, done.stdout.strip(), out)

    def close(self) -> None:
        """End it."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()


class Batch:
    """A batch job."""

    def __init__(self, slurm: Slurm, number: str, out: Path) -> None:
        self.number = number
        self._slurm = slurm
        self._out = out

    @property
    def out(self) -> str:
        """What it has printed, in all its runs."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    @property
    def state(self) -> str:
        """The state of the job, such as RUNNING."""
        fields = self._slurm.ask("scontrol", "show", "job", self.number)
        return fields.partition("JobState=")[2].partition(" ")[0]

    def expect(self, text: str, limit_s: float = 90.0) -> None:
        """Wait until it has printed ``text``."""
        try:
            until(lambda: text in self.out, text, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.state}: {self.out}") from None

    def wait(self, limit_s: float = 120.0) -> str:
        """Return the state in which it has ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        try:
            return until(lambda: state if (state := self.state) in over else "", "end", limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.state}: {self.out}") from None

    def requeue(self) -> None:
        """Put it into the queue again, as an operator does."""
        self._slurm.ask("scontrol", "requeue", self.number)

    def signal_shell(self) -> None:
        """Send TERM to its shell alone, as ``--signal=B:TERM`` does before the time limit."""
        self._slurm.ask("scancel", "--batch", "--signal=TERM", self.number)

    def cancel(self) -> None:
        """Cancel it."""
        self._slurm.ask("scancel", self.number)
