"""Messages of checkpoints: how a cut is taken, written, and returned to."""

from __future__ import annotations

from typing import NamedTuple

from kvps.protocol.envelope import Answer, Message, tag


@tag(80)
class Halt(Message):
    """Scheduler to worker: begin no step that changes values, until you are told to proceed."""

    cut: int
    least: dict[str, int]
    """By synchronous store, how many pushes of a key to make before; the others have made them."""


@tag(81)
class Halted(Message):
    """Worker to scheduler: I stand, and nothing that I began is under way; or I go on to there."""

    cut: int
    numbers: dict[str, int]
    """By synchronous store, how many pushes of a key were made."""
    stands: bool = True
    """False for a worker in the middle of a step, which may need the pushes of others."""


@tag(82)
class Proceed(Message):
    """Scheduler to worker: go on."""

    cut: int


@tag(83)
class Proceeding(Message):
    """Worker to scheduler: I go on, and had halted all the time (or had not)."""

    cut: int
    stood: bool


@tag(84)
class TakeImage(Message):
    """Scheduler to server: remember what you hold now, and write it down."""

    cut: int


@tag(85)
class ImageTaken(Message):
    """Server to scheduler: it cannot change any more."""

    cut: int


class StoreSum(NamedTuple):
    """One store in an image or a cut: how many keys begin there, and which versions they have."""

    store: str
    begins: int
    lowest: int
    highest: int


@tag(86)
class ImageKept(Message):
    """Server to scheduler: it is on the disk; or it is not, and why."""

    cut: int
    size: int
    sha256: str
    stores: tuple[StoreSum, ...]
    error: str = ""


class ImageSum(NamedTuple):
    """The file of one server's image."""

    size: int
    sha256: str


@tag(87)
class Commit(Message):
    """Scheduler to server: all images are on their disks; write the manifest."""

    cut: int
    tag: str
    epoch: int
    images: tuple[ImageSum, ...]
    """By server."""
    stores: tuple[StoreSum, ...]
    kept: int = 0
    """The newest cut that all servers have, which must stay until this one is; 0 if there is none."""


@tag(88)
class Committed(Message):
    """Server to scheduler: this cut is complete here; or it is not, and why."""

    cut: int
    error: str = ""


@tag(89)
class GiveUp(Message):
    """Scheduler to server: there will be no such cut."""

    cut: int


@tag(90)
class Recall(Message):
    """Scheduler to server: which cuts of this job do you have?"""

    epoch: int


@tag(91)
class Shelf(Message):
    """Answer to RECALL."""

    epoch: int
    keeps: bool
    """It has a place for cuts."""
    every_s: float
    """How often it should be given one; 0 for never by itself."""
    cuts: tuple[int, ...]
    """The complete ones of this job."""
    highest: int
    """The highest number of any cut that is there."""


@tag(92)
class Restore(Message):
    """Scheduler to server: restore the values that you held in this cut, and drop all others."""

    epoch: int
    cut: int


@tag(93)
class Restored(Message):
    """Server to scheduler: I hold it; or I cannot, and why."""

    epoch: int
    cut: int
    error: str = ""


@tag(94)
class Checkpoint(Message):
    """Worker to scheduler: I want a cut now, as all others do."""

    store: str
    tag: str
    number: int
    """The number of this call, as with barriers."""


@tag(95)
class Checkpointed(Answer):
    """Answer to CHECKPOINT: this cut is complete."""

    cut: int


@tag(96)
class Revive(Message):
    """Worker to server: give this store the values that it had in this cut; or, which have you?"""

    store: str
    tag: str
    """The tag of the requested cuts; empty for any."""
    cut: int
    """0 asks which there are."""


@tag(97)
class Revived(Answer):
    """Answer to REVIVE."""

    cuts: tuple[int, ...]
    """The cut whose values the store has now; or those that are complete here, if that was asked."""
    versions: tuple[int, ...] = ()
    """One more than the highest version of the store in each of these, 0 for a cut without it; if
    they were asked for."""
