"""The ``kvps checkpoint`` command: list cuts, verify them, and export a model from one.

Several directories of checkpoints are seen as one. Servers that have a folder each have a snapshot of every
cut in each of them, and all of them together are what one shared folder would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvps.checkpoint import atomic_file, reading
from kvps.checkpoint.directory import CheckpointDirectory
from kvps.checkpoint.manifest import NAME, Manifest
from kvps.checkpoint.reading import read_image, shown, verified
from kvps.checkpoint.reshard import gathered, merged
from kvps.checkpoint.safetensors_writer import Column, stream_of
from kvps.core.server.snapshot.model import Snapshot
from kvps.errors import ConfigError, StorageError
from kvps.phrases import bytes_in_words
from kvps.tensors import NAMES

WIDTH = 160
"""Columns of a table that goes into a file."""


def list_cuts(folders: Sequence[str], out: TextIO) -> int:
    """Print a table of all cuts; return the exit code."""
    table = Table()
    for name in ("cut", "tag", "written"):
        table.add_column(name)
    table.add_column("servers", justify="right")
    table.add_column("store")
    for name in ("keys", "versions", "size"):
        table.add_column(name, justify="right")
    table.add_column("complete", overflow="fold")
    found = all_cuts(folders)
    for cut in found:
        table.add_row(*map(escape, _row(cut)))
    screen = _screen(out)
    if found:
        screen.print(table)
    else:
        screen.print(f"no checkpoints in {escape(', '.join(folders))}", soft_wrap=True)
    return 0


def _row(cut: LocatedCut) -> list[str]:
    complete = f"no: {cut.wrong}" if cut.wrong else "yes"
    manifest = cut.manifest
    if manifest is None:
        return [str(cut.number), *[""] * 7, complete]
    stores = manifest.stores.items()
    return [
        str(cut.number),
        manifest.tag,
        manifest.written,
        str(manifest.servers),
        "\n".join(name for name, _ in stores),
        "\n".join(f"{store.keys:,}" for _, store in stores),
        "\n".join(_versions(store.lowest, store.highest) for _, store in stores),
        bytes_in_words(manifest.size),
        complete,
    ]


def _versions(lowest: int, highest: int) -> str:
    return str(lowest) if lowest == highest else f"{lowest} to {highest}"


def verify(folders: Sequence[str], number: int | None, tag: str | None, out: TextIO) -> int:
    """Read cuts whole, and say of each whether it is good; return the exit code."""
    found = [cut for cut in all_cuts(folders) if matches(cut, number, tag)]
    if not found:
        choose(all_cuts(folders), number, tag)  # says what there is
    screen = _screen(out)
    good: list[LocatedCut] = []
    is_all_good = True
    for cut in found:
        wrong = _verify(cut, screen)
        if not wrong:
            good.append(cut)
            assert cut.manifest is not None  # a good one has one
            text = f"good: {cut.manifest.servers} snapshots, {bytes_in_words(cut.manifest.size)}"
        elif cut.under_way and number is None:
            text = f"not complete, {cut.wrong}"  # and so nothing that ever counted
        else:
            is_all_good = False
            text = "damaged:\n  " + "\n  ".join(wrong)
        screen.print(f"checkpoint {escape(f'{cut} is {text}')}", soft_wrap=True, highlight=False)
    newest = f"the newest good one is {good[-1]}" if good else "there is no good one"
    screen.print(escape(newest), soft_wrap=True, highlight=False)
    return 0 if good and is_all_good else 1


def _verify(cut: LocatedCut, screen: Console) -> list[str]:
    """Return the faults of a cut."""
    if cut.manifest is None:
        return [cut.wrong]
    snapshots: list[Snapshot] = []
    wrong: list[str] = []
    with shown(f"checkpoint {cut}", cut.manifest.size, screen) as step:
        for server, path in enumerate(cut.paths):
            try:
                for size in verified(path, cut.manifest.images[server]):
                    step(size)
                snapshots.append(read_image(path, cut.manifest, server))
            except StorageError as error:
                wrong.append(str(error))
    if not wrong:
        try:
            gathered(snapshots)
        except StorageError as error:
            wrong.append(str(error))
    return wrong


def export(
    folders: Sequence[str], file: str, number: int | None, tag: str | None, store: str | None, out: TextIO
) -> int:
    """Write the weights of one store to a safetensors file; return the exit code.

    Raises:
        ConfigError: if there are several stores and none is named, or there is none of that name;
            or if ``file`` is a directory.
        StorageError: if the cut cannot be read, or the file cannot be written.
    """
    if Path(file).is_dir():
        raise ConfigError(f"cannot write {file}: it is a directory; name the file to write last")
    screen = _screen(out)
    cut = choose(all_cuts(folders), number, tag)
    snapshots = _images(cut, screen)
    name = _store_of(snapshots, store)
    weights = merged(snapshots, name)
    if "__metadata__" in weights:
        raise StorageError(f"store {name!r} has a key '__metadata__', which no safetensors file has")
    columns = {
        key: Column(NAMES[weight.dtype], [weight.flatten()], tuple(weight.shape))
        for key, weight in weights.items()
    }
    stream = stream_of(columns, {"format": "pt", "kvps.checkpoint": str(cut), "kvps.store": name})
    path = Path(file)
    try:
        with shown(f"writing {file}", stream.size, screen) as step:
            atomic_file.put(path, lambda sink: stream.write(sink, step), mode=0o666)
    except OSError as error:
        raise StorageError(
            f"cannot write {file}: {error} (need {bytes_in_words(stream.size)}). An older file there is "
            "kept; free space or choose another path"
        ) from error
    text = f"{file}: {len(weights):,} keys of store {name!r}, {bytes_in_words(stream.size)}, "
    screen.print(escape(text + f"from checkpoint {cut}"), soft_wrap=True, highlight=False)
    return 0


def _images(cut: LocatedCut, screen: Console) -> list[Snapshot]:
    manifest = cut.manifest
    assert manifest is not None  # it was chosen
    with shown(f"reading {cut}", manifest.size, screen) as step:
        for server, path in enumerate(cut.paths):
            for size in verified(path, manifest.images[server]):
                step(size)
    return [read_image(path, manifest, server) for server, path in enumerate(cut.paths)]


def _store_of(snapshots: Sequence[Snapshot], wanted: str | None) -> str:
    """Return the store with this name, or without a name the only store with keys or tables."""
    stores = gathered(snapshots)
    names = [store.name for store in stores]
    with_keys = [store.name for store in stores if store.keys or store.tables]
    listed = ", ".join(names) or "none"
    if wanted is not None:
        if wanted not in names:
            raise ConfigError(f"--store={wanted!r}: there is no such store; there is: {listed}")
        return wanted
    if len(with_keys) != 1:
        raise ConfigError(f"name one of the stores with --store NAME; there is: {listed}")
    return with_keys[0]


def _screen(out: TextIO) -> Console:
    screen = Console(file=out)
    return screen if screen.is_terminal else Console(file=out, width=WIDTH)


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


def choose(cuts: Sequence[LocatedCut], number: int | None = None, tag: str | None = None) -> LocatedCut:
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
        if reading.size_of(path) is not None:
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
    there = [path for path in paths if reading.size_of(path) is not None]
    whole = [path for path in there if reading.size_of(path) == size]
    return (*whole, *there, *paths)[0]


def _wrong(manifest: Manifest, paths: Sequence[Path]) -> str:
    for path, image in zip(paths, manifest.images, strict=True):
        size = reading.size_of(path)
        if size is None:
            return f"{path} is missing; if that server has a folder of its own, give this folder too"
        if size != image.size:
            return f"{path} has {size} octets, and its manifest says {image.size}"
    return ""
