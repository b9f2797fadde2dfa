"""The scheduler's state on disk is for its owner alone, and nobody else's is taken for it."""

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from kvps.checkpoint.atomic_file import make_folder, put
from kvps.errors import ConfigError, StorageError
from kvps.runtime.scheduler_process import STATE_FILE, StateFile


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with closing(StateFile(str(folder))) as kept:
        kept.save(b"one")
        kept.save(b"two")
        assert kept.read() == b"two"
    assert (mode(folder), mode(folder / STATE_FILE)) == (0o700, 0o600)
    assert [path.name for path in folder.iterdir()] == [STATE_FILE]


def test_a_link_that_somebody_has_put_there_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    folder = tmp_path / "state"
    with closing(StateFile(str(folder))) as kept:
        (folder / STATE_FILE).with_suffix(".tmp").symlink_to(other)
        kept.save(b"mine")
        assert kept.read() == b"mine"
    assert other.read_bytes() == b"precious"


def test_a_state_that_others_may_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)  # as Kubernetes makes an emptyDir
    with closing(StateFile(str(tmp_path))) as kept:
        kept.save(b"mine")
        (tmp_path / STATE_FILE).chmod(0o666)
        with pytest.raises(ConfigError, match="chmod 700"):
            kept.read()


def test_a_link_in_place_of_the_state_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"theirs")
    with closing(StateFile(str(tmp_path))) as kept:
        (tmp_path / STATE_FILE).symlink_to(tmp_path / "other")
        with pytest.raises(StorageError):
            kept.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_state_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with closing(StateFile(str(tmp_path))) as kept:
        kept.save(b"theirs")
        os.chown(tmp_path / STATE_FILE, 12345, -1)
        with pytest.raises(ConfigError, match="is user 12345's"):
            kept.read()


def test_nobody_else_reads_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_folder(folder)
    put(folder / "image", lambda sink: sink.write(b"weights"), folder / ".aside")
    assert (mode(folder.parent), mode(folder), mode(folder / "image")) == (0o700, 0o700, 0o600)
