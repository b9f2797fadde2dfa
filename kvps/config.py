"""Settings from the environment; the only module that reads it.

Settings come from flags, then ``KVPS_*`` variables, then defaults. MXNet's ``DMLC_*`` variables are
understood too. A process without a configured cluster starts an embedded cluster. An incomplete configuration
is an error that names the missing part, because a silent guess would train the wrong thing.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple
from urllib.parse import urlsplit

from kvps.core.limits import TABLE, Limit, Limits, limits_of_role
from kvps.core.liveness import DROP_GRACE_S, SILENCE_MAX_S, SILENT_AFTER_S
from kvps.core.membership_client import JOIN_MAX_S
from kvps.errors import ConfigError

DEFAULT_SCHEDULER = "tcp://127.0.0.1:9091"
BIGARRAY_VARIABLES = ("KVPS_BIGARRAY_BOUND", "MXNET_KVSTORE_BIGARRAY_BOUND")
SILENCE, GRACE = "KVPS_SILENCE_MAX", "KVPS_DROP_GRACE"
TRANSPORTS = ("auto", "shm", "tcp")
SWITCH_INTERVAL_S = 0.0001
_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Launchers of other projects, and the variables in which each tells a process its rank and how
many there are. srun sets Slurm's; a batch script, which is one process, has SLURM_NTASKS alone."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_UNITS_OF_RATE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_DMLC = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE = (
    *("KVPS_SCHEDULER", "KVPS_BIND", "KVPS_WORKERS", "KVPS_SERVERS", "KVPS_STATE"),
    "KVPS_REPLICAS",
    *("KVPS_RANK", "KVPS_INCARNATION", "KVPS_JOB", "KVPS_MOST_WORKERS", "KVPS_KEYS", *_DMLC, "DMLC_ROLE"),
)
"""Variables that describe the place of one process in one cluster, and would mislead another process."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a cluster is, and what this process is to be in it."""

    scheduler: str
    role: str = "worker"
    rank: int | None = None
    incarnation: int = 0
    """The incarnation of the seat that a supervisor holds for this process; 0 without a supervisor."""
    job: bytes = bytes(16)
    """The job of that seat."""
    workers: int | None = None
    servers: int | None = None


class Launched(NamedTuple):
    """The place that another project's launcher gave this process."""

    launcher: str
    rank: int
    size: int
    size_variable: str


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that torchrun, kvps-worker or kvps-launch started, and which one this process is."""

    rank: int
    size: int
    address: str
    """Where rank 0's process lets the others meet."""
    port: int


def text(name: str, default: str | None = None, env: Mapping[str, str] | None = None) -> str | None:
    """Return a variable; an empty one counts as unset."""
    return (os.environ if env is None else env).get(name) or default


def number(name: str, default: float | None = None, env: Mapping[str, str] | None = None) -> float | None:
    """Return a variable as a number.

    Raises:
        ConfigError: if it is set to something else.
    """
    given = text(name, env=env)
    return default if given is None else as_number(name, given)


def whole(name: str, default: int | None = None, env: Mapping[str, str] | None = None) -> int | None:
    """Return a variable as a whole number from 0 on.

    Raises:
        ConfigError: if it is set to something else.
    """
    given = text(name, env=env)
    return default if given is None else as_whole(name, given)


def switch(name: str, env: Mapping[str, str] | None = None, *, default: bool = False) -> bool:
    """Return whether a variable says yes; unset it says ``default``.

    Raises:
        ConfigError: if it says neither yes nor no.
    """
    given = text(name, "1" if default else "0", env=env)
    if given is None or given.lower() not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{name}={given!r} is neither 1 nor 0; correct or unset it")
    return given.lower() in _TRUE


def choice(name: str, choices: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return a variable that has one of some values, of which the first is the default.

    Raises:
        ConfigError: if it has another value.
    """
    given = text(name, choices[0], env=env) or choices[0]
    if given not in choices:
        raise ConfigError(f"{name}={given!r}: use one of {', '.join(choices)}")
    return given


def as_number(name: str, given: str) -> float:
    """Return what the flag or variable ``name`` was given, as a finite number.

    Raises:
        ConfigError: if it is none.
    """
    try:
        value = float(given)
    except ValueError as error:
        raise ConfigError(f"{name}={given!r} is not a number; correct or unset it") from error
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"{name}={given!r} is not a finite number; correct or unset it")
    return value


def as_whole(name: str, given: str) -> int:
    """Return what ``name`` was given, as a whole number from 0 on.

    Raises:
        ConfigError: if it is none.
    """
    value = as_number(name, given)
    if value != int(value) or value < 0:
        raise ConfigError(f"{name}={value:g} is not a whole number of 0 or more; correct or unset it")
    return int(value)


def as_range(name: str, given: str, role: str = "workers") -> tuple[int, int]:
    """Return the numbers of ``N`` or ``N:MAX``, and 0 for a missing ``MAX``.

    Raises:
        ConfigError: if it is neither.
    """
    first, colon, most = given.partition(":")
    begins, limit = as_whole(name, first), as_whole(name, most) if colon else 0
    if colon and limit < begins:
        raise ConfigError(
            f"{name}={given}: the second number is the most {role} that the job may have, and cannot be "
            "below the first"
        )
    return begins, limit


def as_ranks(name: str, given: str) -> tuple[int, ...]:
    """Return the ranks in ``R`` or ``R,R,...``.

    Raises:
        ConfigError: if they are none.
    """
    return tuple([as_whole(name, rank) for rank in given.split(",")])


def as_replicas(name: str, given: str) -> int:
    """Return what ``name`` was given, as a number of copies of each server.

    Raises:
        ConfigError: if it is neither 0 nor 1.
    """
    if given not in ("0", "1"):
        raise ConfigError(f"{name}={given}: a server has 0 or 1 copies; correct or unset it")
    return int(given)


def as_bytes(name: str, given: str) -> int:
    """Return what ``name`` was given, as a number of bytes: 1048576, 512M, 2G.

    Raises:
        ConfigError: if it is none.
    """
    amount = given.upper().removesuffix("B").removesuffix("I")
    unit = amount[-1:] if amount[-1:] in _UNITS else ""
    try:
        count = float(amount.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        count = 0.0
    if not 1 <= count < 2**63:
        raise ConfigError(f"{name}={given!r} is not a number of bytes; write it as 512M or 2G")
    return int(count)


def as_rate(name: str, given: str) -> float:
    """Return what ``name`` was given, as bytes per second: ``400mbit``, as tc writes it, is 50,000,000.

    Raises:
        ConfigError: if it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", given.lower())
    rate = float(found[1]) * _UNITS_OF_RATE[found[2]] / 8 if found else 0.0
    if rate <= 0:
        raise ConfigError(f"{name}={given!r} is not a rate; write it as 400mbit or 1gbit")
    return rate


def as_address(name: str, given: str) -> str:
    """Return what ``name`` was given, as an address that may be connected to.

    Raises:
        ConfigError: if it is none.
    """
    if port_of(name, given) == 0:
        raise ConfigError(f"{name}={given!r} has no port; write it as tcp://HOST:PORT")
    return given


def as_bind(name: str, given: str) -> str:
    """Return what ``name`` was given, as an address that may be listened on.

    Raises:
        ConfigError: if it is none.
    """
    port = port_of(name, given)
    return f"tcp://127.0.0.1:{port}" if host_of(given) == "localhost" else given


def port_of(name: str, address: str) -> int:
    """Return the port in an address.

    Raises:
        ConfigError: unless it reads ``tcp://HOST:PORT``.
    """
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None or parts.path:
        raise ConfigError(
            f"{name}={address!r} is not an address; write it as tcp://HOST:PORT, with a port up to 65535"
        )
    return port


def host_of(address: str) -> str:
    """Return the host in an address."""
    return urlsplit(address).hostname or ""


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address; of a name, other than localhost, unknown."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def demand_loopback(bind: str, is_allowed: bool) -> None:
    """Refuse to listen where other machines could send anything, if there are no keys.

    Raises:
        ConfigError: if ``bind`` is not loopback, and there are no keys and the operator did not insist.
    """
    if not is_allowed and not is_loopback(bind):
        raise ConfigError(
            f"other machines can reach {bind}, and without keys any process that reaches it can change the "
            "model. Make keys with 'kvps keygen DIR' and give --keys DIR (KVPS_KEYS), or bind to "
            "tcp://127.0.0.1:PORT. In a network that you trust, you can give --insecure (KVPS_INSECURE=1) "
            "instead"
        )


def keys_path(env: Mapping[str, str] | None = None) -> str | None:
    """Return where this process's keys are; None where it has none."""
    return text("KVPS_KEYS", env=env)


def server_bind(scheduler: str, is_allowed: bool) -> str:
    """Return where a server listens that was told nothing but where its scheduler is.

    Raises:
        ConfigError: if that would be where no worker of another machine reaches it.
    """
    if is_loopback(scheduler):
        return "tcp://127.0.0.1:0"
    if is_allowed:
        return "tcp://0.0.0.0:0"
    raise ConfigError(
        f"the scheduler at {scheduler} may be on another machine, and a server without keys "
        "listens on loopback, where other machines cannot reach it. Give --keys DIR (KVPS_KEYS) with "
        "keys from 'kvps keygen'; or --bind tcp://0.0.0.0:0 --insecure (KVPS_INSECURE=1) in a network "
        "that you trust; or --bind tcp://127.0.0.1:0 if all workers are on this machine"
    )


def scheduler_bind(scheduler: str) -> str:
    """Return where the scheduler listens that others know as ``scheduler``."""
    bind = as_bind("DMLC_PS_ROOT_URI", scheduler)
    try:
        ipaddress.ip_address(host_of(bind))
    except ValueError:  # a socket binds to addresses, not to names
        return f"tcp://0.0.0.0:{port_of('DMLC_PS_ROOT_PORT', bind)}"
    return bind


def transport(env: Mapping[str, str] | None = None) -> str:
    """Return how payload travels: ``auto``, ``shm`` or ``tcp``.

    Raises:
        ConfigError: for anything else.
    """
    return choice("KVPS_TRANSPORT", TRANSPORTS, env)


def checksums(env: Mapping[str, str] | None = None) -> bool:
    """Return whether packets that leave by TCP have a checksum: yes, unless the variable says no.

    Raises:
        ConfigError: if it says neither.
    """
    return switch("KVPS_CHECKSUM", env, default=True)


def streams(env: Mapping[str, str] | None = None) -> bool:
    """Return whether packets between hosts travel along streams: no, unless the variable says yes.

    Raises:
        ConfigError: if it says neither.
    """
    return switch("KVPS_STREAMS", env, default=False)


def switch_interval_s(env: Mapping[str, str] | None = None) -> float:
    """Return the interpreter's switch interval while calls are in flight, in seconds; 0 leaves it as it is.

    Raises:
        ConfigError: unless it is a number of seconds, 0 to 1.
    """
    name = "KVPS_SWITCH_INTERVAL"
    seconds = number(name, env=env)
    if seconds is None:
        return SWITCH_INTERVAL_S
    if not 0 <= seconds <= 1:
        raise ConfigError(f"{name}={seconds:g}: use a number of seconds from 0 to 1; 0 changes nothing")
    return seconds


def host_aggregation(given: bool | None, env: Mapping[str, str] | None = None) -> bool:
    """Return whether workers of one host push as one: as ``given``, or as the variable says.

    Raises:
        ConfigError: if ``given`` is neither yes nor no, nor nothing; or the variable neither.
    """
    if given is None:
        return switch("KVPS_HOST_AGGREGATION", env, default=True)
    if type(given) is not bool:
        raise ConfigError(f"host_aggregation={given!r}: use True or False")
    return given


def chunk_bytes(env: Mapping[str, str] | None = None) -> int | None:
    """Return how much should travel at once, if the operator knows better than kvps.

    Raises:
        ConfigError: unless it is a number of bytes, such as ``1M``.
    """
    given = text("KVPS_CHUNK_BYTES", env=env)
    return None if given is None else as_bytes("KVPS_CHUNK_BYTES", given)


def limits(
    given: Sequence[str] = (), role: str | None = None, env: Mapping[str, str] | None = None
) -> Limits:
    """Return the named limits: each from ``--limit``, else from KVPS_LIMITS, else its default.

    Args:
        given: what ``--limit`` was given, ``NAME=NUMBER`` each.
        role: the process that they are for; ``given`` has only limits of this role. The variable may have
            those of all roles, as all processes of a job inherit it.
        env: in place of this process's environment.

    Raises:
        ConfigError: for an unknown name, or a value that is no number from 1 on.

    Example:
        >>> limits(["stores=8"], "server", env={"KVPS_LIMITS": "keys=50,stores=9"}).stores
        8
    """
    inherited = [limit for limit in (text("KVPS_LIMITS", env=env) or "").split(",") if limit.strip()]
    values = dict([_limit("KVPS_LIMITS", limit, TABLE) for limit in inherited])
    known = TABLE if role is None else limits_of_role(role)
    values.update([_limit("--limit", limit, known) for limit in given])
    return Limits(**values)


def _limit(source: str, given: str, known: Mapping[str, Limit]) -> tuple[str, int]:
    """Return the name and the number in ``NAME=NUMBER``.

    Raises:
        ConfigError: for an unknown name, or a value that is no number from 1 on.
    """
    name, _, amount = [part.strip() for part in given.partition("=")]
    limit = known.get(name)
    if limit is None:
        raise ConfigError(
            f"{source}={given!r:.80} is not a limit; write it as NAME=NUMBER, with one of {', '.join(known)}"
        )
    number = (as_bytes if limit.is_bytes else as_whole)(f"{source} {name}", amount)
    if number < 1:
        raise ConfigError(f"{source} {name}={amount}: use 1 or more")
    return name, number


def checkpoint_dir(env: Mapping[str, str] | None = None) -> str | None:
    """Return the directory of the checkpoints; None where there are to be none."""
    return text("KVPS_CHECKPOINT_DIR", env=env)


def checkpoint_every_s(given: str | None, env: Mapping[str, str] | None = None) -> float:
    """Return how often a checkpoint is written, in seconds; 0 only when it is asked for.

    Raises:
        ConfigError: unless it is a number from 0 on.
    """
    name = "KVPS_CHECKPOINT_EVERY" if given is None else "--checkpoint-every"
    found = number(name, 0.0, env=env) if given is None else as_number(name, given)
    assert found is not None
    if found < 0:
        raise ConfigError(
            f"{name}={found:g}: use a number of seconds, or 0 to write checkpoints only on kv.checkpoint()"
        )
    return found


def most_workers() -> int:
    """Return the most workers of this process's job, as kvps-worker tells its command; 0 where none come and
    go."""
    return whole("KVPS_MOST_WORKERS", 0) or 0


def join_max_s(env: Mapping[str, str] | None = None) -> float:
    """Return how long a process tries to reach its scheduler.

    Raises:
        ConfigError: unless it is over 0.
    """
    given = text("KVPS_JOIN_TIMEOUT", env=env)
    return JOIN_MAX_S if given is None else as_seconds("KVPS_JOIN_TIMEOUT", given)


def silence_max_s(given: str | None = None, env: Mapping[str, str] | None = None) -> float:
    """Return how long a member of the cluster may say nothing before the others count it as lost.

    Raises:
        ConfigError: if it is so short that a member which lives would be lost.
    """
    name, given = ("--silence-max", given) if given else (SILENCE, text(SILENCE, env=env))
    limit_s = SILENCE_MAX_S if given is None else as_number(name, given)
    if limit_s < SILENT_AFTER_S:
        raise ConfigError(
            f"{name}={limit_s:g}: members send a beat each second, and a beat may be late; "
            f"use {SILENT_AFTER_S:g} seconds or more"
        )
    return limit_s


def drop_grace_s(given: str | None = None, env: Mapping[str, str] | None = None) -> float:
    """Return how long a member whose connection broke has to open another before it is lost.

    Raises:
        ConfigError: unless it is over 0.
    """
    name, given = ("--drop-grace", given) if given else (GRACE, text(GRACE, env=env))
    return DROP_GRACE_S if given is None else as_seconds(name, given)


def as_seconds(name: str, given: str) -> float:
    """Return what ``name`` was given, as a time.

    Raises:
        ConfigError: unless they are over 0.
    """
    seconds = as_number(name, given)
    if seconds <= 0:
        raise ConfigError(f"{name}={seconds:g}: use a number of seconds above 0")
    return seconds


def environment(
    changes: Mapping[str, str], defaults: Mapping[str, str], env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for a process that is started: this one's, but for its place.

    Args:
        changes: settings that win over the environment.
        defaults: settings that hold where the environment has none.
        env: in place of this process's environment.
    """
    given = os.environ if env is None else env
    return {**defaults, **{name: value for name, value in given.items() if name not in _PLACE}, **changes}


def announce(scheduler: str) -> None:
    """Have the processes that this one starts find the scheduler, unless they are told of another."""
    os.environ.setdefault("KVPS_SCHEDULER", scheduler)


def shared(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of kvps that hold for all processes of a job, on whatever host."""
    return {k: v for k, v in variables("KVPS_", env).items() if k not in _PLACE}


def is_place(name: str) -> bool:
    """Return whether a variable describes the place of one process, so that it misleads another."""
    return name in _PLACE


def variables(prefix: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return all variables whose names begin with ``prefix``."""
    given = os.environ if env is None else env
    return {name: value for name, value in given.items() if name.startswith(prefix)}


def cluster(env: Mapping[str, str] | None = None) -> Cluster | None:
    """Return the cluster that the environment describes; None if it describes none.

    Raises:
        ConfigError: if it describes half of a cluster; the text names the missing variables.
    """
    scheduler = text("KVPS_SCHEDULER", env=env)
    if scheduler is not None:
        return Cluster(
            as_address("KVPS_SCHEDULER", scheduler),
            rank=worker_rank(env),
            incarnation=whole("KVPS_INCARNATION", 0, env=env) or 0,
            job=_job(env),
        )
    found = dmlc_cluster(env)
    if found is not None:
        return found
    if text("KVPS_RANK", env=env) is not None:
        raise ConfigError("KVPS_RANK is set but KVPS_SCHEDULER is not; set it to tcp://HOST:PORT")
    place = launched(env)
    if place is not None:
        raise ConfigError(
            f"{place.launcher} started {place.size} processes ({place.size_variable}) but KVPS_SCHEDULER "
            "is not set, so each of them would train alone; start kvps-scheduler and set "
            "KVPS_SCHEDULER=tcp://HOST:PORT for all of them"
        )
    return None


def check_alone(env: Mapping[str, str] | None = None) -> None:
    """Check that a process that is about to begin a cluster of its own is not one of torchrun's many.

    :func:`cluster` does not: local and allreduce stores, and gloo's and NCCL's process groups,
    need no scheduler.

    Raises:
        ConfigError: if it is.
    """
    if text("TORCHELASTIC_RUN_ID", env=env) is None:
        return
    size = whole("WORLD_SIZE", env=env)
    if size is not None and size > 1:
        raise ConfigError(
            f"torchrun started {size} processes (WORLD_SIZE) but KVPS_SCHEDULER is not set, so each of them "
            f"would train alone; start kvps-scheduler --workers {size} and kvps-server, and set "
            "KVPS_SCHEDULER=tcp://HOST:PORT for torchrun. Where one process is to be alone, unset "
            "TORCHELASTIC_RUN_ID"
        )


def worker_rank(env: Mapping[str, str] | None = None) -> int | None:
    """Return the rank of a worker: that of KVPS_RANK, or else of another project's launcher; None for any.

    torchrun comes before the others: it may have been started by them, and then its workers have
    their variables.

    Raises:
        ConfigError: as :func:`launched`, or for a malformed number.
    """
    rank = whole("KVPS_RANK", env=env)
    if rank is None and text("TORCHELASTIC_RUN_ID", env=env) is not None:
        rank = whole("RANK", env=env)
    place = launched(env) if rank is None else None
    return rank if place is None else place.rank


def launched(env: Mapping[str, str] | None = None) -> Launched | None:
    """Return the place that MPI or Slurm gave this process; None if it started no other.

    Raises:
        ConfigError: if what it says cannot be.

    Example:
        >>> launched({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})[:3]
        ('Open MPI', 1, 4)
    """
    for launcher, rank_variable, size_variable in _LAUNCHERS:
        rank, size = whole(rank_variable, env=env), whole(size_variable, env=env)
        if size is None or size <= 1:
            continue
        if rank is None or rank >= size:
            said = "is not set" if rank is None else f"is {rank}"
            raise ConfigError(
                f"{launcher} says {size_variable}={size}, but {rank_variable} {said}; ranks begin at 0. "
                f"Start the script with the launcher, or unset {size_variable}"
            )
        return Launched(launcher, rank, size, size_variable)
    return None


def world(env: Mapping[str, str] | None = None) -> World | None:
    """Return the world that torchrun's variables describe; None if nothing says there is one.

    Rank and size may be those of MPI or Slurm, if MASTER_ADDR and MASTER_PORT say where rank 0 is.

    Raises:
        ConfigError: if they describe half of one, or other variables say that there are others.
    """
    rank, size = whole("RANK", env=env), whole("WORLD_SIZE", env=env)
    address, port = text("MASTER_ADDR", env=env), whole("MASTER_PORT", env=env)
    if rank is None and size is None and address is not None and (place := launched(env)):
        rank, size = place.rank, place.size
    found = dict(zip(_WORLD, (rank, size, address, port), strict=True))
    missing = [name for name, value in found.items() if value is None]
    if not missing or size == 1:
        if not (rank or 0) < (size or 1):
            raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={size}; ranks begin at 0")
        return World(rank or 0, size or 1, address or "", port or 0)
    if len(missing) < len(_WORLD):
        present = [name for name in _WORLD if name not in missing]
        raise ConfigError(
            f"{', '.join(present)} is set but {', '.join(missing)} is not, and allreduce needs all of "
            "them; start the script with kvps-launch, torchrun, or a kvps-worker for each rank"
        )
    if cluster(env) is not None:
        raise ConfigError(
            f"a cluster is configured, but its ranks are not: {', '.join(_WORLD)} are not set; "
            "for allreduce, start the script with kvps-launch, or with a kvps-worker for each rank"
        )
    return None


def _job(env: Mapping[str, str] | None) -> bytes:
    given = text("KVPS_JOB", "", env=env) or ""
    try:
        job = bytes.fromhex(given)
    except ValueError:
        job = b"?"
    if len(job) not in (0, 16):
        raise ConfigError(f"KVPS_JOB={given!r} is not the name of a job; unset it (kvps-worker sets it)")
    return job or bytes(16)


def dmlc_cluster(env: Mapping[str, str] | None = None) -> Cluster | None:
    """Return the cluster that MXNet's variables describe; None if they describe none.

    Raises:
        ConfigError: if they describe half of one.
    """
    names = (*_DMLC, "DMLC_ROLE")
    if all(text(name, env=env) is None for name in names):
        return None
    missing = [name for name in _DMLC if text(name, env=env) is None]
    if missing:
        present = [name for name in names if text(name, env=env) is not None]
        raise ConfigError(
            f"{', '.join(present)} is set but {', '.join(missing)} is not; a DMLC cluster needs "
            "all of them, and DMLC_ROLE in every process"
        )
    role = text("DMLC_ROLE", "worker", env=env)
    if role not in ("worker", "server", "scheduler"):
        raise ConfigError(f"DMLC_ROLE={role!r}: use worker, server or scheduler")
    host, port = text("DMLC_PS_ROOT_URI", env=env), whole("DMLC_PS_ROOT_PORT", env=env)
    return Cluster(
        as_address("DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT", f"tcp://{host}:{port}"),
        role,
        rank=worker_rank(env) if role == "worker" else None,
        workers=whole("DMLC_NUM_WORKER", env=env),
        servers=whole("DMLC_NUM_SERVER", env=env),
    )


def bigarray_bound(given: int | None, default: int) -> int:
    """Return the elements from which a key is cut over all servers.

    Raises:
        ConfigError: unless it is a whole number, 1 to 2**63 - 1.
    """
    for name in BIGARRAY_VARIABLES:
        if given is None:
            given = whole(name)
    bound = default if given is None else given
    if type(bound) is not int or not 1 <= bound < 1 << 63:
        raise ConfigError(f"bigarray_bound={bound!r}: use a number of elements, 1 to 2**63 - 1")
    return bound


RECORDS = ("ring", "full", "off")


def record() -> str:
    """Return how this process records what its core is given: ``ring``, ``full`` or ``off``.

    Raises:
        ConfigError: if KVPS_RECORD is something else.
    """
    return choice("KVPS_RECORD", RECORDS)


def record_dir() -> Path:
    """Return where records go: KVPS_RECORD_DIR, or a directory of this user's among temporary files."""
    given = text("KVPS_RECORD_DIR")
    return Path(given) if given else Path(gettempdir()) / f"kvps-records-{os.geteuid()}"
