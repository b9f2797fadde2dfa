"""The exceptions of kvps.

The tree::

    KvpsError
    ├── ConfigError              what you asked for cannot be (fix the program or the flags)
    ├── Timeout                  (also TimeoutError) not yet; nothing was cancelled
    ├── WorkerLost               a worker ended without leaving, and the round needs it
    ├── ServerLost               a server ended; its part of the model is gone
    ├── SchedulerLost            the scheduler does not answer
    ├── Fenced                   another process holds this rank now; stop
    ├── EpochChanged             the servers returned to an earlier cut
    ├── KeyNotFound              (also KeyError) nobody initialised that key
    ├── Mismatch                 (also ValueError) two sides disagree about one thing
    ├── NonFinite                NaN or infinity where a number is due
    ├── Unauthorized             the peer may not do that
    ├── ProtocolError            bytes or messages that no correct peer sends
    ├── Overload                 a limit is reached; the thing was refused, not lost
    └── StorageError             a file could not be written or read

Each class has a number, :attr:`KvpsError.code`, by which it travels between processes: an error
that a server finds is raised in the worker that caused it, as the same class.
"""

from __future__ import annotations

from typing import ClassVar


class KvpsError(Exception):
    """The root of the tree; raised itself only where no class below says more."""

    code: ClassVar[int] = 1

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; an error text is a sentence, not a repr.
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(KvpsError):
    """The request is wrong in itself: an unknown name, a bad value, half a configuration."""

    code = 2


class Timeout(KvpsError, TimeoutError):
    """The deadline passed. The operation is still pending and is applied at most once."""

    code = 3


class WorkerLost(KvpsError):
    """A worker ended without leaving and no replacement came in time."""

    code = 4


class ServerLost(KvpsError):
    """A server ended, and with it the parts of the keys that it held."""

    code = 5


class SchedulerLost(KvpsError):
    """The scheduler has not answered for longer than its silence limit."""

    code = 6


class Fenced(KvpsError):
    """A newer incarnation holds this rank; this process must stop."""

    code = 7


class EpochChanged(KvpsError):
    """The servers hold an earlier cut of the model than this worker has seen.

    Attributes:
        before: key -> version that this worker had seen.
        after: key -> version that the servers hold now; a key that they do not hold is not in it.
        has_optimizer: the servers have the optimizer that was set last.
    """

    code = 8

    def __init__(
        self,
        text: str = "",
        before: dict[str, int] | None = None,
        after: dict[str, int] | None = None,
        has_optimizer: bool = False,
    ) -> None:
        super().__init__(text)
        self.before = before or {}
        self.after = after or {}
        self.has_optimizer = has_optimizer
        self.was_raised = False
        """The caller knows; it is not raised again by itself."""


class KeyNotFound(KvpsError, KeyError):
    """The key was never initialised in this store."""

    code = 9


class Mismatch(KvpsError, ValueError):
    """Two declarations of one thing differ: shape, dtype, type of store, optimizer."""

    code = 10


class NonFinite(KvpsError):
    """NaN or infinity where a finite number is due."""

    code = 11


class Unauthorized(KvpsError):
    """The peer is known, and may not do this."""

    code = 12


class ProtocolError(KvpsError):
    """Bytes, or a message at a moment, that no correct peer sends."""

    code = 13


class Overload(KvpsError):
    """A named limit is reached; the request was refused and nothing was changed."""

    code = 14


class StorageError(KvpsError):
    """A file could not be written, read or verified."""

    code = 15


BY_CODE: dict[int, type[KvpsError]] = {
    cls.code: cls
    for cls in (
        KvpsError,
        ConfigError,
        Timeout,
        WorkerLost,
        ServerLost,
        SchedulerLost,
        Fenced,
        EpochChanged,
        KeyNotFound,
        Mismatch,
        NonFinite,
        Unauthorized,
        ProtocolError,
        Overload,
        StorageError,
    )
}
"""The class of each number; numbers are for ever (docs/protocol.md, Errors)."""


def unforeseen(me: str, error: Exception) -> KvpsError:
    """Return what a peer is told whose packet led to ``error``: itself, unless nobody foresaw it."""
    if isinstance(error, KvpsError):
        return error
    return KvpsError(
        f"{me} could not process this packet ({type(error).__name__}), and ignores it; its log has "
        "the traceback. If kvps sent the packet, please report this as a bug"
    )


def from_code(code: int, text: str) -> KvpsError:
    """Return the error that a peer described, ready to be raised here."""
    return BY_CODE.get(code, KvpsError)(text)


REFUSED = (ConfigError, KeyNotFound, Mismatch, ProtocolError, Overload, StorageError)
"""What a call fails with that was answered, and the answer is no: nobody was lost, or late."""

__all__ = ["BY_CODE", "REFUSED", "from_code", *sorted(cls.__name__ for cls in BY_CODE.values())]
