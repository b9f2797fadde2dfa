"""The exceptions of Horovod, under their names there."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks do not fit together, or a rank was lost; the text says which.

    In a function that :func:`kvps.compat.horovod.elastic.run` runs, it means: return to the last commit.
    """


class InvalidArgument(HorovodInternalError, ValueError):
    """An argument of this rank's call cannot be; the other ranks get a HorovodInternalError that says so.

    Horovod raises a ValueError for some of these and a HorovodInternalError for others, and this
    is both. In a function that :func:`kvps.compat.horovod.elastic.run` runs, it ends the function.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed. A job of kvps has a fixed number of workers, so kvps
    never raises it.

    Args:
        skip_sync: whether the state need not be synchronised.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync
