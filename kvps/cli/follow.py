"""``kvps follow``: writes each version of a publication as a safetensors file.

Writes what a trainer publishes with kv.publish(NAME, ...) as DIR/version-NUMBER.safetensors, for programs that know
nothing of kvps. It waits for the first version, and skips versions that come faster than the disk takes them.
A file is there as a whole or not at all. The job neither waits for this command nor notices its end.

examples:
  kvps follow policy --to weights --scheduler tcp://10.0.0.1:9091
  kvps follow policy --to weights --keep 10
  kvps follow policy --to weights --once          the newest version, then exit
  python -c 'import safetensors.torch as s; print(s.load_file("weights/version-00000012.safetensors").keys())'

The oldest files beyond --keep are removed. In a job with keys, --keys needs reader.key and public/scheduler.pub.
Exit code 75 says that the job is over, or that its scheduler does not answer; 1 that the disk takes no more.

{exit_codes}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError, KeyNotFound, ServerLost, StorageError

if TYPE_CHECKING:
    import torch

NAME = "kvps follow"
KEEP = 2
FILE = re.compile(r"version-\d{8,}\.safetensors(?P<aside>\.\w+\.tmp)?")
log = logging.getLogger("kvps")


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_argument("name", metavar="NAME", help="the publication")
    parser.add_flags(
        {
            "--to DIR": "the directory to write to; created if it does not exist",
            "--keep K": f"how many files stay ({KEEP})",
            "--once": "write the newest version, and exit",
            **flags.SCHEDULER,
        }
    )
    parsed = parser.parse_args(argv)
    flags.start_log(NAME, parsed)
    if parsed.to is None:
        raise ConfigError("no directory to write to: give --to DIR")
    keep = KEEP if parsed.keep is None else config.as_whole("--keep", parsed.keep)
    if keep < 1:
        raise ConfigError(f"--keep {keep}: at least one file must stay")
    follow(parsed.name, flags.scheduler_of(parsed), parsed.keys, Path(parsed.to), keep, is_once=parsed.once)
    return 0


def follow(
    name: str, scheduler: str, keys: str | None, folder: Path, keep: int, *, is_once: bool = False
) -> None:
    """Write each version of a publication into a folder.

    Args:
        name: of the publication.
        scheduler: the scheduler's address.
        keys: as :func:`kvps.subscribe` has it.
        folder: where files go.
        keep: how many files stay.
        is_once: return after the first.

    Raises:
        StorageError: if a file cannot be written; those before stay.
        SchedulerLost: if the job is over.
    """
    from kvps.checkpoint import atomic_file
    from kvps.checkpoint.safetensors_writer import Column, stream_of
    from kvps.subscriber import subscribe
    from kvps.tensors import NAMES

    def written(tensors: dict[str, torch.Tensor], number: int) -> Path:
        columns = {
            key: Column(NAMES.get(tensor.dtype, "bool"), [tensor.reshape(-1)], tuple(tensor.shape))
            for key, tensor in tensors.items()
        }
        path = folder / f"version-{number:08d}.safetensors"
        stream = stream_of(columns, {"publication": name, "version": str(number), "format": "pt"})
        try:
            atomic_file.make_folder(folder)
            atomic_file.put(path, stream.write)
            own = sorted(
                [(file.stat().st_mtime_ns, file) for file in folder.iterdir() if FILE.fullmatch(file.name)]
            )
            aside = [file for _, file in own if file.name.endswith(".tmp")]  # of a process that was killed
            whole = [file for _, file in own if file not in aside and file != path]
            for file in aside + whole[: len(whole) - keep + 1]:
                atomic_file.remove(file)
        except OSError as error:
            raise StorageError(
                f"version {number} of {name!r} cannot be written to {path}: {error.strerror or error}. The files "
                "before it stay, and the job is unharmed. Make room (--keep), or use another --to"
            ) from error
        return path

    number: int | None = None
    with subscribe(name, scheduler, keys) as versions:
        while True:
            try:
                number = versions.wait(newer_than=number)
                tensors = dict(versions.tensors())
            except (KeyNotFound, ServerLost) as error:  # a newer version will come
                log.warning("%s", error)
                continue
            path = written(tensors, number)
            print(f"wrote {path}", flush=True)
            if is_once:
                return
