"""Several directories of checkpoints seen as one: where each snapshot of each cut lies.

Servers that have a folder each have a snapshot of every cut in each of them, and all of them together
are what one shared folder would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvps.checkpoint import regular_file
from kvps.checkpoint.directory import CheckpointDirectory
from kvps.checkpoint.manifest import NAME, Manifest
from kvps.errors import StorageError


@dataclass(frozen=True, slots=True)
class LocatedCut:
    """One cut, as far as it is there."""

    number: int
    manifest: Manifest | None
    """None where none was written, or none can be read."""
    paths: tuple[Path, ...] = ()
    """The paths of all snapshots in order, whether they exist or not."""
    wrong: str = ""
    """The fault that keeps it from being complete; only a full reading finds more."""
    under_way: bool = False
    """There is no manifest at all: it is being written, or was given up."""

    def __str__(self) -> str:
        return str(self.number if self.manifest is None else self.manifest)


def all_cuts(folders: Iterable[str | Path]) -> list[LocatedCut]:
    """Return every cut in some folders, lowest number first."""
    directories = [CheckpointDirectory(folder) for folder in folders]
    numbers = {number for directory in directories for number in directory.numbers()}
    return [_cut(number, directories) for number in sorted(numbers)]


def choose(
    cuts: Sequence[LocatedCut], number: int | None = None, tag: str | None = None
) -> LocatedCut:
    """Return the newest complete cut, or the one with a number, or the newest with a tag.

    Raises:
        StorageError: if there is none, with those that there are; or if it is not complete.
    """
    for cut in reversed(cuts):
        if number is not None and cut.number == number and cut.wrong:
            raise StorageError(f"checkpoint {cut} is not complete: {cut.wrong}")
        if not cut.wrong and matches(cut, number, tag):
            return cut
    there = ", ".join([str(cut) for cut in cuts if not cut.wrong]) or "none"
    what = "" if tag is None else f" with the tag {tag!r}"
    what += "" if number is None else f" with the number {number}"
    raise StorageError(f"there is no complete checkpoint{what}; there is: {there}")


def matches(cut: LocatedCut, number: int | None, tag: str | None) -> bool:
    """Whether a cut is the one that is asked for, where one is."""
    if number not in (None, cut.number):
        return False
    return tag is None or (cut.manifest is not None and cut.manifest.tag == tag)


def _cut(number: int, directories: Sequence[CheckpointDirectory]) -> LocatedCut:
    found: dict[Path, Manifest] = {}
    errors = []
    for directory in directories:
        path = directory.cut_folder(number) / NAME
        if regular_file.size_of(path) is not None:
            try:
                found[path] = directory.manifest(number)
            except StorageError as error:
                errors.append(str(error))
    if errors or not found:
        wrong = errors[0] if errors else "it has no manifest: it is being written, or was given up"
        return LocatedCut(number, None, (), wrong, under_way=not errors)
    (first, manifest), *others = found.items()
    for path, other in others:
        if other != manifest:
            return LocatedCut(number, None, (), f"{first} and {path} differ")
    paths = tuple(_path_of(number, file.name, file.size, directories) for file in manifest.images)
    return LocatedCut(number, manifest, paths, _wrong(manifest, paths))


def _path_of(number: int, name: str, size: int, directories: Sequence[CheckpointDirectory]) -> Path:
    """Return where a snapshot lies, whole if it is whole anywhere."""
    paths = [directory.cut_folder(number) / name for directory in directories]
    there = [path for path in paths if regular_file.size_of(path) is not None]
    whole = [path for path in there if regular_file.size_of(path) == size]
    return (*whole, *there, *paths)[0]


def _wrong(manifest: Manifest, paths: Sequence[Path]) -> str:
    for path, image in zip(paths, manifest.images, strict=True):
        size = regular_file.size_of(path)
        if size is None:
            return (
                f"{path} is missing; if that server has a folder of its own, give this folder too"
            )
        if size != image.size:
            return f"{path} has {size} octets, and its manifest says {image.size}"
    return ""
