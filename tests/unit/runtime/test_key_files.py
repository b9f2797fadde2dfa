"""Key files: who may have them, what they spell, and how they are turned."""

import os
import stat
from pathlib import Path

import pytest

from kvps.core.key_roles import ROLES, RoleKey
from kvps.errors import ConfigError
from kvps.runtime import key_files as files
from kvps.runtime.key_files import (
    PUBLIC,
    SESSION,
    KeyMemory,
    Section,
    generate,
    load,
    of,
    parse,
    reader_keys,
)
from tests.vectors.packets import KEY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "keys"
    files.write(place, generate())
    return place


def section(folder: Path, role: str) -> Section:
    (item,) = parse((folder / f"{role}.key").read_text(), role)
    return item


def test_files_are_for_their_owner_alone(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {*(f"{role}.key" for role in ROLES), PUBLIC}
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    for role in ROLES:
        public = (folder / PUBLIC / f"{role}.pub").read_text()
        assert "secret" not in public
        assert section(folder, role).public in public


def test_each_role_gets_what_it_needs(folder: Path) -> None:
    pinned = (section(folder, "scheduler").public,)
    scheduler = load(str(folder), "scheduler")
    assert scheduler.role == section(folder, "scheduler").pair
    assert {key.role for key in scheduler.opens.values()} == set(ROLES) - {"scheduler"}
    for role in ("server", "worker", "look", "reader"):
        member = load(str(folder), role)
        assert (member.scheduler, member.role) == (pinned, section(folder, role).pair)
        assert {key.role for key in member.opens.values()} == (
            {"reader"} if role in ("server", "reader") else set()
        )
        assert member.session.public != load(str(folder), role).session.public, "made anew each time"
        assert not member.is_enrolled
    assert section(folder, "worker").secret not in repr(load(str(folder), "worker"))


def test_command_of_a_worker_gets_the_key_of_readers_if_it_is_there(folder: Path) -> None:
    (found,) = reader_keys(str(folder))
    assert found.pair == section(folder, "reader").pair
    (folder / "reader.key").unlink()
    assert reader_keys(str(folder)) == reader_keys(None) == []
    memory = KeyMemory(generate())
    (found,) = reader_keys(memory.path)
    assert found.role == "reader"
    memory.close()


def test_look_falls_back_to_the_key_of_admin(folder: Path) -> None:
    (folder / "look.key").unlink()
    assert load(str(folder), "look").role == section(folder, "admin").pair


def test_a_folder_with_the_keys_of_one_role_will_do(folder: Path) -> None:
    for role in ("scheduler", "server", "admin", "look"):
        (folder / f"{role}.key").unlink()
        if role != "scheduler":
            (folder / PUBLIC / f"{role}.pub").unlink()
    assert load(str(folder), "worker").role
    with pytest.raises(ConfigError, match=r"server.key.*kvps keygen"):
        load(str(folder), "server")


def test_the_public_key_of_the_scheduler_is_needed(folder: Path) -> None:
    (folder / PUBLIC / "scheduler.pub").unlink()
    with pytest.raises(ConfigError, match=r"public/scheduler.pub"):
        load(str(folder), "worker")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    path = folder / "worker.key"
    if os.geteuid() == 0 and not mode & 0o007:
        os.chown(path, 0, 12345)  # a group that is not ours
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        load(str(folder), "worker")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_key_of_another_user_is_refused(folder: Path) -> None:
    path = folder / "worker.key"
    path.chmod(0o440)
    os.chown(path, 0, os.getegid())
    assert load(str(folder), "worker").role, "so Kubernetes gives secrets to a pod"
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="is user 12345's"):
        load(str(folder), "worker")
    os.chown(path, 0, -1)
    os.chown(folder / PUBLIC / "admin.pub", 12345, -1)
    with pytest.raises(ConfigError, match="decides which processes may join"):
        load(str(folder), "scheduler")


def test_a_public_key_that_others_may_change_is_refused(folder: Path) -> None:
    folder.chmod(0o1777)  # as Kubernetes mounts secrets
    assert load(str(folder), "worker").role
    (folder / PUBLIC / "scheduler.pub").chmod(0o666)
    with pytest.raises(ConfigError, match=r"decides which processes may join"):
        load(str(folder), "worker")


def test_missing_key_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the key.*kvps keygen"):
        load(str(tmp_path / "nowhere"), "worker")


def test_keys_of_a_launch_that_has_ended() -> None:
    with pytest.raises(ConfigError, match=r"process 4194305, has ended, .*: unset KVPS_KEYS and"):
        load("/proc/4194305/fd/7", "look")  # Linux has no process of this number


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        f"public = {KEY}",
        "role = worker",
        f"role = worker\npublic = {KEY}\npublic = {KEY}",
        f"role = root\npublic = {KEY}",
        f"role = worker\npublic = {KEY[1:]}",
        f"role = worker\npublic = {KEY}\nsecret = short",
        f"role = worker\npublic = {KEY}\nuntil = soon",
        f"role = worker\npublic = {KEY}\nmore = no",
    ],
)
def test_malformed_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text, "somewhere")


def test_a_key_may_end() -> None:
    (item,) = parse(f"role = worker\npublic = {KEY}\nuntil = 2027-01-01T00:00:00+00:00\n", "x")
    assert item.until == 1798761600.0
    assert parse(item.text(with_secret=False), "x") == [item]
    scheduler = Section("scheduler", KEY[::-1], KEY)
    assert of([item, scheduler], "scheduler").opens == {KEY: RoleKey("worker", 1798761600.0)}


def test_no_key_is_overwritten(folder: Path) -> None:
    before = (folder / "worker.key").read_text()
    with pytest.raises(ConfigError, match="exists already"):
        files.write(folder, generate())
    assert (folder / "worker.key").read_text() == before


def test_turning_a_key(folder: Path) -> None:
    old = section(folder, "worker")
    files.rotate(folder, "worker")
    new = section(folder, "worker")
    assert new.public != old.public
    opens = load(str(folder), "scheduler").opens
    assert opens.keys() >= {old.public, new.public}, "both open the door"
    (gone,) = files.retire(folder)
    assert gone.name == "worker.pub"
    opens = load(str(folder), "scheduler").opens
    assert new.public in opens
    assert old.public not in opens
    assert files.retire(folder) == []
    files.rotate(folder, "scheduler")
    assert len(load(str(folder), "worker").scheduler) == 2, "clients try both"


def test_rotation_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make keys with 'kvps keygen"):
        files.rotate(tmp_path, "worker")


def test_keys_in_memory() -> None:
    made = generate()
    memory = KeyMemory(made)
    path = memory.path
    for _ in range(2):
        keys = load(path, "worker")
        assert keys.role == next(member for member in made if member.role == "worker").pair
        assert load(f"/dev/fd/{memory.fd}", "scheduler").opens
    memory.close()
    with pytest.raises(ConfigError):
        load(path, "worker")


def test_the_key_of_a_session_is_lent_to_a_command() -> None:
    scheduler, session = Section("scheduler", KEY), Section(SESSION, *files.new_pair())
    memory = KeyMemory([session, scheduler])
    keys = load(memory.path, "worker")
    assert (keys.session, keys.role, keys.is_enrolled) == (session.pair, None, True)
    assert keys.scheduler == (KEY,)
    memory.close()


def test_none_given() -> None:
    assert files.load_if_any(None, "worker") is None
