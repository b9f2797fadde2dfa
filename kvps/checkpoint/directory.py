"""One directory of checkpoints as one server sees it; all servers may share it, or none.

::

    DIR/cut-00000012/server-0-of-2.safetensors
                     server-1-of-2.safetensors
                     manifest.json              written last: with it the cut is complete

In a folder of one server's own, only that server's snapshot lies beside the manifest. Servers that share
a folder write to it at the same time and never wait for each other: every file comes from a name
that its writer alone uses, and a file that another has removed already is removed.

:mod:`kvps.checkpoint.manifest` decides which cuts are kept. A cut is removed manifest first, so
that no moment shows a manifest without its snapshots. A file that lies there is never replaced: if
the number of a cut is taken, another job writes into the folder.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kvps.checkpoint import atomic_file, reading, snapshot_writer
from kvps.checkpoint.atomic_file import HashedFile, Written
from kvps.checkpoint.manifest import NAME, ImageFile, Manifest, further, image_name, superfluous
from kvps.checkpoint.reading import load_image, restoring
from kvps.checkpoint.reshard import regroup
from kvps.core.limits import TABLE, remedy
from kvps.core.scheduler.cut import CUT_MAX
from kvps.core.server.snapshot.model import Snapshot
from kvps.errors import Overload, StorageError
from kvps.phrases import bytes_in_words

log = logging.getLogger("kvps")

SPARE = 1.05
"""Free space that a snapshot needs, as a multiple of its size, which is known to the byte.

More would refuse checkpoints that fit: the older ones still lie there, so that a factor of 2 asks
for a disk of four times the model. It would protect nothing: a snapshot for which there is no room
after all, because other servers write beside this one, is removed again, and no complete
checkpoint is touched.
"""
MANIFEST_MAX = 8 << 20
"""Bytes of the longest manifest that is read; that of 1,500 servers and 4,096 stores has 1 MiB."""
_FOLDER = re.compile(r"cut-(\d{8,})", re.ASCII)
_OURS = re.compile(r"manifest\.json|server-\d+-of-\d+\.safetensors|server-\d+\.[0-9a-f]+\.tmp")


class CheckpointDirectory:
    """A directory of checkpoints.

    Args:
        folder: the directory; it is made when something is written.
        server: whose view this is; None for a reader, which writes nothing. A server has one directory,
            and uses it from one thread at a time, but for reading.
        throttle: seconds to sleep for each second of writing.
        tagged_max: checkpoints with a tag that are kept; another is refused.

    Example::

        directory = CheckpointDirectory("/ckpt", server=0)
        written = directory.write(12, snapshot)
        directory.commit(manifest)  # once all servers have written
        snapshot = directory.load(directory.find(), server=0, servers=2)
    """

    def __init__(
        self,
        folder: str | Path,
        server: int | None = None,
        throttle: float = 0.0,
        tagged_max: int = TABLE["tagged_checkpoints"].default,
    ) -> None:
        self.folder = Path(folder)
        self.server = server
        self._throttle = throttle
        self._tagged_max = tagged_max
        self._under_way: set[Path] = set()

    # --- writing ----------------------------------------------------------------------------

    def write(self, cut: int, snapshot: Snapshot) -> Written:
        """Write this server's snapshot of a cut; return its size and SHA-256.

        Raises:
            StorageError: if it cannot be written, with the bytes needed and free. Then nothing
                half-written is left, and the cuts that are complete are as they were.
        """
        stream = snapshot_writer.stream(snapshot)
        folder = self.cut_folder(cut)
        path = folder / image_name(snapshot.server, snapshot.servers)

        def fill(sink: HashedFile) -> None:
            stream.write(sink)
            self._demand_free(path)  # again: it took a while

        try:
            atomic_file.make_folder(folder)
            self._demand_free(path)
            self._remove_leftovers()
            if shutil.disk_usage(folder).free < SPARE * stream.size:  # before it is full for others, too
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self._put(path, fill)
        except OSError as error:
            with suppress(OSError):
                atomic_file.remove_empty(folder)  # no order to remove follows a write that failed
            raise self._refusal(cut, stream.size, error) from error

    def _demand_free(self, path: Path) -> None:
        """Check that no other job has written this cut.

        Raises:
            StorageError: if a file of that name is there; it is left alone.
        """
        manifest = path.with_name(NAME)
        if path.exists() or manifest.exists():
            raise StorageError(
                f"{path if path.exists() else manifest} is there already: does another job write its "
                f"checkpoints into {self.folder}, too? Give each job that runs at the same time a directory "
                "of its own"
            )

    def commit(self, manifest: Manifest, common: int = 0, is_resumed: bool = True) -> None:
        """Write the manifest, which makes a cut complete; then remove older cuts that are superfluous.

        Several servers may do this in one folder with equal manifests. That an older cut cannot be
        removed is logged, and no error.

        Args:
            manifest: of the cut.
            common: the newest cut of this job that all servers have, which stays: other servers
                may fail to complete this one; 0 for none.
            is_resumed: whether the job continues from an older cut; if not, the log tells once of
                those there are.

        Raises:
            StorageError: if the manifest cannot be written, or the snapshot of it that should be here
                is not.
            Overload: if it has a tag, like as many others as are kept.
        """
        self._demand_room_for_tag(manifest)
        folder = self.cut_folder(manifest.cut)
        if self.server is not None and self.server not in self.here(manifest):
            raise StorageError(
                f"checkpoint {manifest} not completed: the snapshot of server {self.server} is not in "
                f"{folder}, or has another size than its manifest says"
            )
        octets = manifest.to_json().encode()
        try:
            atomic_file.make_folder(folder)
            self._remove_leftovers()
            if (folder / NAME).exists() and self.manifest(manifest.cut).job != manifest.job:
                self._demand_free(folder / NAME)
            self._put(folder / NAME, lambda sink: sink.write(octets))
        except OSError as error:
            raise self._refusal(manifest.cut, len(octets), error) from error
        try:
            self._tidy(common, is_resumed)
        except (OSError, StorageError) as error:
            log.warning("old checkpoints in %s could not be removed: %s", self.folder, error)

    def _demand_room_for_tag(self, manifest: Manifest) -> None:
        """Refuse one more checkpoint that is kept for ever, if there are too many."""
        if not manifest.tag:
            return
        others = [cut for cut in self.numbers() if cut != manifest.cut and self._has_tag(cut)]
        if len(others) >= self._tagged_max:
            raise Overload(
                f"checkpoint {manifest} not completed: {self.folder} already has {len(others)} checkpoints "
                "with a tag, which are never removed. Remove some with 'kvps checkpoint rm', or "
                f"{remedy('tagged_checkpoints')}",
                limit="tagged_checkpoints",
            )

    def drop(self, cut: int) -> None:
        """Remove this server's snapshot of a cut that was given up; a complete cut is left alone.

        Raises:
            StorageError: if it cannot be removed.
        """
        folder = self.cut_folder(cut)
        try:
            if (folder / NAME).exists():
                return
            for path in atomic_file.files(folder):
                if re.match(rf"server-{self.server}\b", path.name):
                    atomic_file.remove(path)
            atomic_file.remove_empty(folder)
        except OSError as error:
            raise StorageError(
                f"checkpoint {cut}, which was given up, cannot be removed from {folder}: {error}"
            ) from error

    def _put(self, path: Path, fill: Callable[[HashedFile], None]) -> Written:
        if self.server is None:
            raise ValueError("a directory of no server is for reading")
        aside = path.with_name(f"server-{self.server}.{secrets.token_hex(8)}.tmp")
        self._under_way.add(aside)
        try:
            return atomic_file.put(path, fill, aside, self._throttle)
        finally:
            self._under_way.discard(aside)

    def _refusal(self, cut: int, need: int, error: OSError) -> StorageError:
        try:
            free = f"free {bytes_in_words(shutil.disk_usage(self.folder).free)} on {self.folder}"
            complete = self.complete()
        except (OSError, StorageError):
            free, complete = f"{self.folder} cannot be read", []
        last = f"The last complete one is {complete[-1]}" if complete else "None is complete yet"
        return StorageError(
            f"checkpoint {cut} not written: {error.strerror or error} (need {bytes_in_words(need)}, {free}). "
            f"{last}; training goes on"
        )

    # --- reading ----------------------------------------------------------------------------

    def cut_folder(self, cut: int) -> Path:
        """Return where the files of a cut lie."""
        return self.folder / _folder_name(cut)

    def numbers(self) -> list[int]:
        """Return the numbers of all cuts, complete or not, lowest first.

        Raises:
            StorageError: if the folder is there and cannot be read.
        """
        try:
            return sorted(_numbers(self.folder))
        except OSError as error:
            raise StorageError(f"cannot read {self.folder}: {error.strerror or error}") from error

    def highest(self) -> int:
        """Return the highest number of any cut, complete or not; 0 if there is none.

        Raises:
            StorageError: as :meth:`numbers`.
        """
        return max(self.numbers(), default=0)

    def manifest(self, cut: int) -> Manifest:
        """Return the manifest of a cut.

        Raises:
            StorageError: if it is not there, or is no manifest of that cut.
        """
        path = self.cut_folder(cut) / NAME
        try:
            octets = b""
            for block in reading.blocks(path):
                octets += block
                if len(octets) > MANIFEST_MAX:
                    break
            if len(octets) > MANIFEST_MAX:
                raise ValueError(f"it has over {MANIFEST_MAX} octets")
            found = Manifest.from_json(octets.decode())
            if found.cut != cut:
                raise ValueError(f"it is of cut {found.cut}, and lies in the folder of {cut}")
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot read the manifest {path}: {error}") from error
        return found

    def here(self, manifest: Manifest) -> frozenset[int]:
        """Return the servers whose snapshots of a cut lie in this folder with the right size."""
        folder = self.cut_folder(manifest.cut)
        sizes = ((server, reading.size_of(folder / image.name), image) for server, image in _each(manifest))
        return frozenset(server for server, size, image in sizes if size == image.size)

    def complete(
        self, job: bytes | None = None, server: int | None = None, servers: int | None = None
    ) -> list[Manifest]:
        """Return the manifests of the complete cuts, oldest first.

        Args:
            job: of this job only.
            server, servers: only cuts of which everything is here that :meth:`load` would read for
                that server. Without ``servers``, as many as wrote the cut, if it is one of these.
                Without both, every snapshot that lies here must have the right size, and there must be
                one.

        Raises:
            StorageError: as :meth:`numbers`. A manifest that cannot be read makes no cut complete.
        """
        found = []
        for cut in self.numbers():
            try:
                manifest = self.manifest(cut)
            except StorageError:
                continue
            if job in (None, manifest.job) and self._is_complete(manifest, server, servers):
                found.append(manifest)
        return found

    def _is_complete(self, manifest: Manifest, server: int | None, servers: int | None) -> bool:
        whole = self.here(manifest)
        if server is not None:
            if servers is None and server < manifest.servers:
                return server in whole
            return whole.issuperset(_needed(manifest, server, servers))
        folder = self.cut_folder(manifest.cut)
        found = {
            number for number, image in _each(manifest) if reading.size_of(folder / image.name) is not None
        }
        return bool(whole) and whole == found

    def find(self, tag: str | None = None, server: int | None = None, servers: int | None = None) -> Manifest:
        """Return the newest complete cut, or the newest that has a tag.

        Args:
            tag: its tag; None for any.
            server, servers: as in :meth:`complete`.

        Raises:
            StorageError: if there is none, with those that there are.
        """
        complete = self.complete(None, server, servers)
        for manifest in reversed(complete):
            if tag in (None, manifest.tag):
                return manifest
        there = ", ".join(map(str, complete)) or "none"
        what = "complete checkpoint" if tag is None else f"complete checkpoint with the tag {tag!r}"
        raise StorageError(f"there is no {what} in {self.folder}; there is: {there}")

    def load(self, manifest: Manifest, server: int, servers: int) -> Snapshot:
        """Return what one server holds of a cut, every file that is read being verified.

        Args:
            manifest: of the cut.
            server, servers: whose snapshot is wanted. If as many servers wrote the cut, by the present
                rule of placement, only that one's file is read, else all of them.

        Raises:
            StorageError: if a file is missing, damaged, or of something else.
        """
        folder, needed = self.cut_folder(manifest.cut), _needed(manifest, server, servers)
        total = sum([manifest.images[number].size for number in needed])
        with restoring(manifest.cut, total) as step:
            some = [
                load_image(folder / manifest.images[number].name, manifest, number, step) for number in needed
            ]
        return some[0] if manifest.is_for(servers) else regroup(some, server, servers, manifest.placement)

    # --- removing ---------------------------------------------------------------------------

    def _tidy(self, common: int, is_resumed: bool) -> None:
        """Remove the cuts that are no longer needed."""
        complete = self.complete(server=self.server)
        there = [manifest.cut for manifest in complete]
        old = further(complete) if complete else None
        if old is not None and not is_resumed and not self.server:
            log.warning(
                "checkpoint %s is the first of this job, which has not called restore(), beside checkpoint "
                "%s of an earlier job in %s: %s. The older one is kept until this job has passed it; "
                "kv.restore(), after set_optimizer(), continues from it",
                complete[-1],
                old,
                self.folder,
                _compared(complete[-1], old),
            )
        gone = [manifest.cut for manifest in superfluous(complete, common)] if complete else []
        for cut in self.numbers():
            if cut in gone or (cut not in there and cut < max(there, default=0) and not self._has_tag(cut)):
                self._remove(self.cut_folder(cut))

    def _has_tag(self, cut: int) -> bool:
        """Whether a cut has a name; damaged or not, it is then not ours to remove."""
        try:
            return bool(self.manifest(cut).tag)
        except StorageError:
            return False

    def _remove(self, folder: Path) -> None:
        if (folder / NAME).exists():
            atomic_file.remove(folder / NAME)
            atomic_file.force_if_there(folder)
        for path in atomic_file.files(folder):
            if _OURS.fullmatch(path.name):
                atomic_file.remove(path)
        atomic_file.remove_empty(folder)

    def _remove_leftovers(self) -> None:
        """Remove what a writer of this rank was writing when it was killed."""
        for folder in map(self.cut_folder, self.numbers()):
            for path in atomic_file.files(folder):
                is_mine = path.name.startswith(f"server-{self.server}.")
                if is_mine and path.name.endswith(".tmp") and path not in self._under_way:
                    atomic_file.remove(path)


def _needed(manifest: Manifest, server: int, servers: int | None) -> Iterable[int]:
    """Return the servers whose snapshots hold the values of ``server`` of ``servers``."""
    if servers is not None and not 0 <= server < servers:
        raise ValueError(f"there is no server {server} of {servers}")
    return (server,) if manifest.is_for(servers) else range(manifest.servers)


def _each(manifest: Manifest) -> Iterable[tuple[int, ImageFile]]:
    return enumerate(manifest.images)


def _compared(newer: Manifest, older: Manifest) -> str:
    """Return the versions of the stores that two cuts have in common, in words."""
    common = [name for name in newer.stores if name in older.stores]
    return "; ".join(
        f"store {name!r} has version {newer.stores[name].highest} here and {older.stores[name].highest} there"
        for name in common[:3]
    )


def _folder_name(cut: int) -> str:
    return f"cut-{cut:08d}"


def _numbers(folder: Path) -> Iterator[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        found = _FOLDER.fullmatch(name)
        if found is None or _folder_name(int(found[1])) != name:
            continue
        if int(found[1]) <= CUT_MAX and not (folder / name).is_symlink():  # not followed, nor removed
            yield int(found[1])
        elif (path := folder / name) not in _odd:
            _odd.add(path)
            log.warning("%s is passed over: it is no folder of a checkpoint that kvps has made", path)


_odd: set[Path] = set()
"""Folders of which that was said."""
