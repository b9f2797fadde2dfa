"""Hosts of a job: their slots, the host of each process, and agents on them, by ssh or by srun.

Hosts of a launch: their names and slots, and the host of each process.

Workers fill the slots of the hosts in the order of the list, so that neighbouring ranks share a host.
Servers take no slots, since their load is another one: they go round the hosts, one by one.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvps import config
from kvps.errors import ConfigError
from kvps.launchers.agent import MODULE, StartOrder
from kvps.launchers.children import start_there
from kvps.launchers.reaper import Reaper

_NAME = re.compile(r"(?:[A-Za-z0-9_.]+@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""No name begins with a hyphen, which ssh would take for an option."""
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class Host(NamedTuple):
    """A machine, and the number of workers that it takes."""

    name: str
    slots: int


def parse_hosts(given: str) -> list[Host]:
    """Return the hosts of a list ``a:4,b``, or of a file with lines ``a slots=4``.

    Args:
        given: the list, or the path of the file. A host without a number has one slot.

    Raises:
        ConfigError: naming the entry that is no host.
    """
    path = Path(given)
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
        entries = [words for line in lines if (words := line.partition("#")[0].split())]
        hosts = [_of_line(given, words) for words in entries]
    else:
        hosts = [_of_entry(entry) for entry in given.split(",")]
    if not hosts:
        raise ConfigError(f"-H {given}: the file names no host; write a line 'HOST slots=N' for each")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"-H {given}: host {name} is there twice; add its slots up")
    return hosts


def _of_entry(entry: str) -> Host:
    name, colon, slots = entry.strip().partition(":")
    return _host(f"-H {entry!r}", name, slots if colon else "1")


def _of_line(path: str, words: Sequence[str]) -> Host:
    where = f"-H {path}: the line {' '.join(words)!r}"
    name, *options = words
    slots = "1"
    for option in options:
        key, equals, value = option.partition("=")
        if key != "slots" or not equals:
            raise ConfigError(f"{where} has {option!r}; write it as 'HOST slots=N'")
        slots = value
    return _host(where, name, slots)


def _host(where: str, name: str, slots: str) -> Host:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name!r} is not the name or IPv4 address of a host")
    if not slots.isdecimal() or not 1 <= int(slots) <= 10_000:
        raise ConfigError(f"{where}: {slots!r} is no number of slots; use 1 or more")
    return Host(name, int(slots))


def of_slurm(env: Mapping[str, str], expand: Callable[[str], Sequence[str]]) -> list[Host]:
    """Return the hosts of the Slurm allocation that this process runs in.

    Args:
        env: the environment.
        expand: returns the names that a compressed list such as ``node[1-3]`` stands for.

    Raises:
        ConfigError: outside an allocation, or for half of one.
    """
    nodes, tasks = env.get("SLURM_JOB_NODELIST"), env.get("SLURM_TASKS_PER_NODE")
    if "SLURM_JOB_ID" not in env or nodes is None:
        raise ConfigError(
            "--launcher slurm: this process is in no Slurm allocation (SLURM_JOB_ID and "
            "SLURM_JOB_NODELIST are not set): run kvps-launch within sbatch or salloc"
        )
    names = list(expand(nodes))
    if tasks is None:
        raise ConfigError(
            f"--launcher slurm: the allocation {env['SLURM_JOB_ID']} does not say how many tasks a node "
            "takes (SLURM_TASKS_PER_NODE is not set): allocate with --ntasks or --ntasks-per-node"
        )
    slots = tasks_per_node(tasks)
    if len(slots) != len(names):
        raise ConfigError(
            f"--launcher slurm: SLURM_JOB_NODELIST={nodes} has {len(names)} nodes, but "
            f"SLURM_TASKS_PER_NODE={tasks} is of {len(slots)}: the two are not of one allocation"
        )
    return [_host("SLURM_JOB_NODELIST", *pair) for pair in zip(names, map(str, slots), strict=True)]


def tasks_per_node(text: str) -> list[int]:
    """Return the numbers that Slurm writes as ``2(x3),1``.

    Raises:
        ConfigError: for another text.
    """
    counts: list[int] = []
    for entry in text.split(","):
        found = _TASKS.fullmatch(entry)
        if found is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={text}: {entry!r} is not like '2(x3)'")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


class Placement:
    """The host of each process.

    Args:
        hosts: in the order of ranks.
        workers: the number of workers.
        servers: the number of servers.

    Raises:
        ConfigError: if the workers need more slots than there are.
    """

    def __init__(self, hosts: Sequence[Host], workers: int, servers: int) -> None:
        slots = [host.name for host in hosts for _ in range(host.slots)]
        if len(slots) < workers:
            raise ConfigError(
                f"-n {workers} needs {workers} slots, but the {len(hosts)} hosts have {len(slots)} "
                f"({', '.join(f'{host.name}: {host.slots}' for host in hosts[:8])}): give more "
                "slots, more hosts, or fewer workers"
            )
        names = [host.name for host in hosts]
        self._of = {("worker", rank): slots[rank] for rank in range(workers)}
        self._of |= {("server", rank): names[rank % len(names)] for rank in range(servers)}

    def host_of(self, role: str, rank: int) -> str:
        """Return the host of a worker or server."""
        known = self._of.get((role, rank))
        return self.hosts[rank % len(self.hosts)] if known is None else known  # one that came later

    def count_on(self, host: str, *roles: str) -> int:
        """Return how many processes of these roles a host has."""
        return sum(place == host and role in roles for (role, _), place in self._of.items())

    @property
    def hosts(self) -> list[str]:
        """The hosts that have a process, in the order of the list."""
        return list(dict.fromkeys(self._of.values()))


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
        replicas: how many copies of servers each server's process has memory for.
    """

    launcher: str
    rsh: Sequence[str]
    placement: Placement
    python: str
    env: Mapping[str, str]
    replicas: int = 0

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
            servers=self.placement.count_on(host, "server") * (1 + self.replicas) if role == "server" else 0,
            processes=self.placement.count_on(host, "server", "worker"),
        )
        agent = agent_command(self.python, config.text("PYTHONPATH"))
        return start_there(self._command(host, agent), order, reaper)

    def probe(self, host: str) -> str:
        """Return a command by which a user sees whether processes can be started on a host."""
        return shlex.join(self._command(host, [self.python, "-c", "import kvps"]))

    def _command(self, host: str, agent: Sequence[str]) -> list[str]:
        return (by_srun if self.launcher == "slurm" else by_ssh)(self.rsh, host, agent)
