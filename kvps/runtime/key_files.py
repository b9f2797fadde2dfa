"""Key files: made, read and checked; and keys of one job, kept in memory.

A key is a section of text::

    role = worker
    public = rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7
    secret = JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6

A folder of keys has a file ``ROLE.key`` for each role, and ``public/`` with the public halves, which is all
that others need: the scheduler of all roles, everybody else of the scheduler. One file may hold several
sections; so does the memory in which a job keeps keys of its own.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kvps.core.key_roles import ROLES, RoleKey, is_key
from kvps.errors import ConfigError
from kvps.net.zap import KeyPair, Keys, new_pair

PUBLIC = "public"
READER = "reader"
"""The role whose key servers accept, too: readers of publications speak by no other."""
SESSION = "session"
"""In place of a role: a session key, for the command that a supervisor runs."""
FILE_BYTES_MAX = 1 << 20
_LAUNCHS = re.compile(r"/proc/(\d+)/fd/\d+")
"""The path of keys that only live in the memory of a process, such as kvps-launch."""


class Section(NamedTuple):
    """One key, or its public half."""

    role: str
    public: str
    secret: str = ""
    until: float | None = None

    @property
    def pair(self) -> KeyPair:
        """Both halves."""
        return KeyPair(self.public, self.secret)

    def text(self, *, with_secret: bool) -> str:
        """Return it as it stands in a file."""
        lines = [f"role = {self.role}", f"public = {self.public}"]
        if with_secret:
            lines.append(f"secret = {self.secret}")
        if self.until is not None:
            lines.append(f"until = {datetime.fromtimestamp(self.until, UTC).isoformat()}")
        return "\n".join(lines) + "\n"

    @property
    def public_half(self) -> Section:
        """The section without its secret key."""
        return self._replace(secret="")


def generate(roles: Iterable[str] = ROLES) -> list[Section]:
    """Return a new key for each role."""
    return [Section(role, *new_pair()) for role in roles]


# --- reading --------------------------------------------------------------------------------------


def load(path: str, role: str) -> Keys:
    """Return the keys of a process.

    Args:
        path: a folder of keys, or a file that has them.
        role: what the process is: ``scheduler``, ``server``, ``worker``, ``reader`` or ``look``.

    Raises:
        ConfigError: if they are not there, or others can read or change them; the text says what to do.
    """
    return of(_found(path, role), role, path)


def text_for(path: str, role: str) -> str:
    """Return the keys of a process as one text, to be handed to it on another host.

    Args:
        path: as for :func:`load`.
        role: ``server`` or ``worker``.

    Raises:
        ConfigError: as :func:`load`.
    """
    found = _found(path, role)
    of(found, role, path)
    return "".join([section.text(with_secret=bool(section.secret)) for section in found])


def _found(path: str, role: str) -> list[Section]:
    """Return the keys of a folder that a role needs, or all keys of a file."""
    place = Path(path)
    if not place.is_dir():
        return _read(place)
    names = ("look", "admin") if role == "look" else (role,)
    files = [place / f"{name}.key" for name in names]
    own = next((candidate for candidate in files if candidate.exists()), files[0])
    public = sorted((place / PUBLIC).glob("*.pub"))
    return _read(own) + [each.public_half for path in public for each in _read(path, is_public=True)]


def reader_keys(path: str | None) -> list[Section]:
    """Return the keys of readers that are there, for a command that also has a key of its own: none or one.

    Args:
        path: as for :func:`load`; None for no keys.

    Raises:
        ConfigError: as :func:`load`.
    """
    place = Path(path or "")
    file = place / f"{READER}.key" if place.is_dir() else place
    found = _read(file) if path and file.exists() else []
    return [section for section in found if section.role == READER and section.secret]


def load_if_any(path: str | None, role: str) -> Keys | None:
    """Return the keys of a process; None where none were given.

    Raises:
        ConfigError: as :func:`load`.
    """
    return None if path is None else load(path, role)


def of(sections: Iterable[Section], role: str, path: str = "memory") -> Keys:
    """Return the keys of a process of ``role`` out of these.

    Raises:
        ConfigError: if a key that the role needs is missing.
    """
    found = list(sections)
    pinned = tuple(dict.fromkeys([section.public for section in found if section.role == "scheduler"]))
    if not pinned:
        raise ConfigError(
            f"--keys {path} has no public key of the scheduler: put {PUBLIC}/scheduler.pub from "
            "'kvps keygen' there"
        )
    session = next((section for section in found if section.role == SESSION and section.secret), None)
    if session is not None and role != READER:
        return Keys(pinned, None, session.pair, is_enrolled=True)
    wanted = ("look", "admin") if role == "look" else (role,)
    own = next(
        (section for name in wanted for section in found if section.role == name and section.secret), None
    )
    if own is None:
        raise ConfigError(
            f"--keys {path} has no secret key of the role {role}: put {role}.key from 'kvps keygen' there"
        )
    opens = {
        section.public: RoleKey(section.role, section.until)
        for section in found
        if (role == "scheduler" != section.role) or (role in ("server", READER) and section.role == READER)
    }
    return Keys(pinned, own.pair, opens=opens)


def _read(path: Path, is_public: bool = False) -> list[Section]:
    try:
        with open(path, "rb") as file:
            (_demand_own if is_public else _demand_secret)(path, os.fstat(file.fileno()))
            text = file.read(FILE_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        next_step = "Make keys with 'kvps keygen DIR', and give --keys DIR"
        if (launch := _LAUNCHS.fullmatch(str(path))) and isinstance(error, FileNotFoundError):
            next_step = (
                f"The kvps-launch that held it, process {launch[1]}, has ended, and its job with it: unset "
                "KVPS_KEYS and KVPS_SCHEDULER, or set them to those of the job that runs now"
            )
        raise ConfigError(f"cannot read the key {path}: {error}. {next_step}") from error
    return parse(text, str(path))


def parse(text: str, path: str) -> list[Section]:
    """Return the keys that a file spells.

    Raises:
        ConfigError: if it spells something else.
    """
    found: list[dict[str, str]] = []
    for line in text.splitlines():
        name, equals, value = (part.strip() for part in line.partition(" = "))
        if not line.strip() or line.startswith("#"):
            continue
        if name == "role":
            found.append({})
        if not equals or not found or name in found[-1]:
            raise ConfigError(f"{path} is not a file of keys: {line!r:.60}")
        found[-1][name] = value
    return [_section(body, path) for body in found]


def _section(fields: dict[str, str], path: str) -> Section:
    role, public, secret = (fields.get(name, "") for name in ("role", "public", "secret"))
    is_whole = role in (*ROLES, SESSION) and is_key(public) and (not secret or is_key(secret))
    until = None
    with suppress(ValueError):
        until = datetime.fromisoformat(fields["until"]).timestamp() if "until" in fields else None
        if is_whole and fields.keys() <= {"role", "public", "secret", "until"}:
            return Section(role, public, secret, until)
    raise ConfigError(f"{path} has a malformed key of the role {role!r:.40}")


def _demand_own(path: Path, status: os.stat_result) -> None:
    """Refuse a file that another user owns or may change; a folder may be any user's, as a pod's is."""
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        raise ConfigError(
            f"the key {path} is user {status.st_uid}'s with mode {stat.S_IMODE(status.st_mode):04o}: any "
            "user that can change it decides which processes may join. It must belong to you or root, and "
            "no other user may have write permission"
        )


def _demand_secret(path: Path, status: os.stat_result) -> None:
    is_ours = status.st_uid in (os.geteuid(), 0)
    # Kubernetes gives secrets to a pod as files of root that the pod's group can read.
    is_given = status.st_uid == 0 and status.st_gid in {os.getegid(), *os.getgroups()}
    open_to = stat.S_IRWXO | (0 if is_given else stat.S_IRWXG)
    if not is_ours or status.st_mode & open_to:
        raise ConfigError(
            f"the key {path} is user {status.st_uid}'s with mode {stat.S_IMODE(status.st_mode):04o}, so "
            f"other users can read it: chmod 600 {path}"
        )


# --- writing --------------------------------------------------------------------------------------


def write(folder: Path, sections: Iterable[Section]) -> list[Path]:
    """Write keys into a folder of keys; return the files.

    Raises:
        ConfigError: if one is there already, or it cannot be written.
    """
    written = []
    try:
        for place in (folder, folder / PUBLIC):
            place.mkdir(0o700, parents=True, exist_ok=True)
        for section in sections:
            for path, content in (
                (folder / f"{section.role}.key", _secret_text(section)),
                (folder / PUBLIC / f"{section.role}.pub", section.text(with_secret=False)),
            ):
                _put(path, content)
                written.append(path)
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename} exists already, and kvps keygen overwrites no key. Use another directory, or "
            "--rotate ROLE for another key of that role"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write keys to {folder}: {error}") from error
    return written


def rotate(folder: Path, role: str) -> list[Path]:
    """Give a role a new key beside its old one, which goes on to open the door; return the new files.

    Raises:
        ConfigError: if there is none to replace, or it cannot be written.
    """
    old = folder / f"{role}.key"
    if not old.exists():
        raise ConfigError(f"{old} does not exist: make keys with 'kvps keygen {folder}' first")
    (new,) = generate([role])
    try:
        public = _free(folder / PUBLIC, role)
        _put(public, new.text(with_secret=False))
        aside = folder / f".{role}.{secrets.token_hex(8)}"
        _put(aside, _secret_text(new))
        aside.replace(old)
    except OSError as error:
        raise ConfigError(f"cannot write keys to {folder}: {error}") from error
    return [old, public]


def retire(folder: Path) -> list[Path]:
    """Remove the public halves of all keys whose secret half is not there any more; return them.

    Raises:
        ConfigError: if they cannot be removed.
    """
    files = [folder / f"{role}.key" for role in ROLES]
    current = {section.public for path in files if path.exists() for section in _read(path)}
    gone = []
    for path in sorted((folder / PUBLIC).glob("*.pub")):
        (section,) = _read(path, is_public=True)
        if section.public not in current:
            try:
                path.unlink()
            except OSError as error:
                raise ConfigError(f"cannot remove {path}: {error}") from error
            gone.append(path)
    return gone


def _secret_text(section: Section) -> str:
    made = datetime.fromtimestamp(time.time(), UTC).date().isoformat()
    head = f"# The key of the role {section.role} of a kvps cluster, made {made}. Keep it secret.\n"
    return head + section.text(with_secret=True)


def _free(folder: Path, role: str) -> Path:
    numbers = range(2, 1000)
    return next(path for number in numbers if not (path := folder / f"{role}-{number}.pub").exists())


def _put(path: Path, content: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# --- in memory ------------------------------------------------------------------------------------


class KeyMemory:
    """Keys in a file without a name, which is gone when no process has it open.

    Args:
        sections: the keys.
    """

    def __init__(self, sections: Iterable[Section]) -> None:
        self.fd = os.memfd_create("kvps-keys", os.MFD_CLOEXEC)
        os.fchmod(self.fd, 0o600)
        text = "".join([section.text(with_secret=bool(section.secret)) for section in sections])
        os.write(self.fd, text.encode())

    @property
    def path(self) -> str:
        """Where other processes of this user, on this host, find it while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Close it; processes that have opened it keep it."""
        os.close(self.fd)
