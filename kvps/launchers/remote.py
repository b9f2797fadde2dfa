"""Command lines that start an agent on another host: by ssh, or by srun within an allocation."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvps import config
from kvps.errors import ConfigError
from kvps.launchers.agent import MODULE, StartOrder
from kvps.launchers.children import start_there
from kvps.launchers.hosts import Placement
from kvps.launchers.reaper import Reaper

LOST_S = 10
"""Seconds after which ssh gives a host up that does not answer, at the start or later."""
SSH_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to type a password
    "ConnectTimeout": str(LOST_S),
    "ServerAliveInterval": "3",
    "ServerAliveCountMax": "3",
}
SRUN_OPTIONS = ("--nodes=1", "--ntasks=1", "--overlap", "--unbuffered", "--kill-on-bad-exit=0")


def agent_command(python: str, path: str | None) -> list[str]:
    """Return the command that is the agent.

    Args:
        python: the interpreter there.
        path: PYTHONPATH for it, if any.
    """
    words = [python, "-P", "-m", MODULE]
    return words if path is None else ["env", f"PYTHONPATH={path}", *words]


def by_ssh(rsh: Sequence[str], host: str, agent: Sequence[str]) -> list[str]:
    """Return the command that runs the agent on a host by ssh.

    Args:
        rsh: ssh with options of the user's, which count before ours.
        host: the host.
        agent: the agent's command.
    """
    options = [word for name, value in SSH_OPTIONS.items() for word in ("-o", f"{name}={value}")]
    return [*rsh, *options, "--", host, shlex.join(agent)]


def by_srun(rsh: Sequence[str], host: str, agent: Sequence[str]) -> list[str]:
    """Return the command that runs the agent on a node of this allocation, as a step of its own."""
    return [*rsh, *SRUN_OPTIONS, f"--nodelist={host}", *agent]


def hostnames(nodes: str) -> list[str]:
    """Return the names that Slurm's list of nodes stands for, by ``scontrol show hostnames``.

    Raises:
        ConfigError: if scontrol is not there, or refuses.
    """
    return _scontrol("hostnames", nodes).split()


def node_address(name: str) -> str:
    """Return the address by which Slurm reaches a node; names need not be known to anybody else.

    Raises:
        ConfigError: as :func:`hostnames`.
    """
    found = re.search(r"\bNodeAddr=(\S+)", _scontrol("node", name))
    return name if found is None else found[1]


def _scontrol(what: str, name: str) -> str:
    command = ["scontrol", "show", what, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        raise ConfigError(
            f"--launcher slurm: cannot ask Slurm for its nodes: {shlex.join(command)} failed: "
            f"{str(told).strip()}"
        ) from error
    return done.stdout


def here() -> str:
    """Return the working directory, by the name that the shell has for it.

    Hosts that share a directory may reach it by a link, and then this name is what they share.
    """
    logical = config.text("PWD", "") or ""
    is_this = os.path.isdir(logical) and os.path.samefile(logical, ".")
    return logical if is_this else os.getcwd()


@dataclass(frozen=True, slots=True)
class Remote:
    """The other hosts of a launch, and the way to them.

    Args:
        launcher: ``ssh`` or ``slurm``.
        rsh: the command that reaches a host, with its options.
        placement: which host has which process.
        python: the interpreter on the hosts.
        env: variables for all processes, of ``--env``.
    """

    launcher: str
    rsh: Sequence[str]
    placement: Placement
    python: str
    env: Mapping[str, str]

    def own_address(self) -> str:
        """Return the address of this machine that the last host sees.

        The first host often is this machine, and its name may mean loopback here.

        Raises:
            ConfigError: if the name of that host is not known, or there is no way to it.
        """
        name = self.placement.hosts[-1].rpartition("@")[2]
        address = name if self.launcher == "ssh" else node_address(name)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # of a datagram socket: nothing is sent
            except OSError as error:
                raise ConfigError(
                    f"cannot find a way to host {name}: {error.strerror or error}. Check its name in "
                    f"{'-H' if self.launcher == 'ssh' else 'SLURM_JOB_NODELIST'}"
                ) from error
            return str(probe.getsockname()[0])

    def start(
        self, role: str, rank: int, words: list[str], env: Mapping[str, str], keys: str | None, reaper: Reaper
    ) -> subprocess.Popen[bytes]:
        """Start a worker or server on its host.

        Args:
            role: ``worker`` or ``server``.
            rank: its rank.
            words: the flags of its command.
            env: variables for it, besides those for all processes.
            keys: the keys of the job, as text, if it has its own.
            reaper: ends the way to the host when we end.

        Raises:
            ConfigError: as :func:`~kvps.launchers.children.start_there`.
        """
        host = self.placement.host_of(role, rank)
        order = StartOrder(
            f"kvps.cli.{role}",
            words,
            {**config.shared(), **self.env, **env},
            here(),
            keys=keys,
            has_report=role == "worker",
            servers=self.placement.count_on(host, "server") if role == "server" else 0,
            processes=self.placement.count_on(host, "server", "worker"),
        )
        agent = agent_command(self.python, config.text("PYTHONPATH"))
        return start_there(self._command(host, agent), order, reaper)

    def probe(self, host: str) -> str:
        """Return a command by which a user sees whether processes can be started on a host."""
        return shlex.join(self._command(host, [self.python, "-c", "import kvps"]))

    def _command(self, host: str, agent: Sequence[str]) -> list[str]:
        return (by_srun if self.launcher == "slurm" else by_ssh)(self.rsh, host, agent)
