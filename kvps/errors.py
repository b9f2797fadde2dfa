"""The exceptions of kvps.

The tree::

    KvpsError
    ├── ConfigError              an invalid request (fix the program or the flags)
    ├── Timeout                  (also TimeoutError) not yet; nothing was cancelled
    ├── WorkerLost               a worker ended without leaving, and the round needs it
    ├── ServerLost               a server ended; its part of the model is gone
    ├── SchedulerLost            the scheduler does not answer
    ├── Fenced                   another process has this rank now; stop
    ├── EpochChanged             the servers rolled back to an earlier cut
    ├── KeyNotFound              (also KeyError) the key was never initialised
    ├── Mismatch                 (also ValueError) two sides disagree about one thing
    ├── NonFinite                NaN or infinity instead of a finite number
    ├── Unauthorized             the peer does not have that permission
    ├── ProtocolError            bytes or messages that no correct peer sends
    ├── Overload                 a limit is reached; the request was refused, not lost
    └── StorageError             a file could not be written or read

Each class has a number, :attr:`KvpsError.code`, by which it travels between processes: an error
that a server finds is raised in the worker that caused it, as the same class.
"""

from __future__ import annotations

from typing import ClassVar


class KvpsError(Exception):
    """The root of the tree; raised itself only if no subclass is more specific.

    Attributes:
        reason: the label of the refusal in the metrics, where it is more than the class; empty in
            a process that was told of the refusal.
        exit_code: of a process that ends by this error.
        was_raised: the caller knows. Several calls may end with one error; the next call does not raise it
            once more.
    """

    code: ClassVar[int] = 1
    reason: str = ""
    exit_code: int = 1
    was_raised: bool = False

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; an error text is a sentence, not a repr.
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(KvpsError):
    """The request itself is invalid: an unknown name, a bad value, an incomplete configuration."""

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
        after: key -> version that the servers hold now; keys that they do not hold are absent.
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


class KeyNotFound(KvpsError, KeyError):
    """The key was never initialised in this store."""

    code = 9


class Mismatch(KvpsError, ValueError):
    """Two declarations of the same object differ: shape, dtype, type of store, optimizer."""

    code = 10


class NonFinite(KvpsError):
    """NaN or infinity instead of a finite number."""

    code = 11


class Unauthorized(KvpsError):
    """The peer is known, but does not have this permission."""

    code = 12
    REASONS: ClassVar[tuple[str, ...]] = (
        *("no_key", "key_may_not", "wrong_role", "other_member", "other_ranks", "rank_0_only"),
        "join_not_made",
    )

    def __init__(self, text: str = "", reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class ProtocolError(KvpsError):
    """Bytes, or a message at a moment, that no correct peer sends."""

    code = 13


class Overload(KvpsError):
    """A named limit is reached; the request was refused and nothing was changed."""

    code = 14

    def __init__(self, text: str = "", limit: str = "") -> None:
        super().__init__(text)
        self.reason = limit


class StorageError(KvpsError):
    """A file could not be written, read or verified."""

    code = 15


_CLASSES: list[type[KvpsError]] = [KvpsError, *KvpsError.__subclasses__()]
BY_CODE = {cls.code: cls for cls in _CLASSES}
"""The class of each number; numbers never change (docs/protocol.md, Errors)."""


def unforeseen(me: str, error: Exception) -> KvpsError:
    """Return the answer to a peer whose packet caused ``error``: the error itself, unless it was
    unexpected."""
    if isinstance(error, KvpsError):
        return error
    return KvpsError(
        f"{me} could not process this packet ({type(error).__name__}), and ignores it; its log has "
        "the traceback. If kvps sent the packet, please report this as a bug"
    )


def from_code(code: int, text: str) -> KvpsError:
    """Return the error that a peer described, to be raised here."""
    return BY_CODE.get(code, KvpsError)(text)


REFUSED = (ConfigError, KeyNotFound, Mismatch, ProtocolError, Overload, StorageError)
"""The errors of a call that a peer refused: no member was lost or late."""

__all__ = ["BY_CODE", "REFUSED", "from_code", *sorted(cls.__name__ for cls in BY_CODE.values())]
