"""``kvps checkpoint`` in this process: what it prints, and its exit codes."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from kvps.checkpoint import reports
from kvps.checkpoint.directory import CheckpointDirectory
from kvps.checkpoint.manifest import NAME, image_name
from kvps.checkpoint.reports import all_cuts, choose
from kvps.cli import checkpoint
from kvps.core.placement import parts
from kvps.core.server.snapshot.model import KeySnapshot, Snapshot, SnapshotPart, StoreSnapshot
from kvps.dtypes import Spec
from kvps.errors import StorageError
from kvps.phrases import bytes_in_words
from kvps.tensors import spec_of
from tests.support import snapshots

EXIT_CONFIG = 78
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPS_CHECKPOINT_DIR", raising=False)


def called(*words: object) -> int:
    return checkpoint.main([str(word) for word in words])


def apart(tmp_path: Path, cut: int, **more: object) -> list[Path]:
    """A cut of two servers that have a folder each."""
    folders = [tmp_path / str(server) for server in range(2)]
    shelves = [CheckpointDirectory(folder, server) for server, folder in enumerate(folders)]
    some = [snapshots.image(server, 2, **more) for server in range(2)]  # type: ignore[arg-type]
    manifest = snapshots.manifest_of(cut, shelves, some)
    for shelf in shelves:
        shelf.commit(manifest)
    return folders


def model_image(model: nn.Module, server: int, servers: int, name: str = "default") -> Snapshot:
    """What a server would hold of a model whose state_dict was pushed."""
    keys = []
    for key, value in model.state_dict().items():
        spec = spec_of(value)
        for part in parts(key, spec.count, servers, snapshots.BOUND, spec.width):
            if part.server == server:
                flat = value.flatten()[part.start : part.start + part.size]
                keys.append(
                    KeySnapshot(key, spec, 0, (SnapshotPart(part.start, snapshots.history(), flat, {}),))
                )
    store = StoreSnapshot(snapshots.opened(name), None, None, 0.0, 0, 0, tuple(keys))
    return Snapshot(server, servers, (store,))


# --- list -------------------------------------------------------------------------------------


def test_the_table(tmp_path: Path, capsys: Output) -> None:
    size = bytes_in_words(snapshots.put(tmp_path, 1, tag="best[1]").size)
    snapshots.put(tmp_path, 2, servers=3)
    CheckpointDirectory(tmp_path, 0).write(3, snapshots.image(0, 3))
    assert called("list", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    header, first, second, third = (line for line in lines if line.startswith(("┃", "│")))
    names = ["cut", "tag", "written", "servers", "store", "keys", "versions", "size", "complete"]
    assert [name.strip() for name in header.strip("┃").split("┃")] == names
    assert [cell.strip() for cell in first.strip("│").split("│")][:8] == [
        *("1", "best[1]", "", "2", "default", "12", "5 to 7", size)
    ]
    assert first.rstrip("│ ").endswith("yes")
    assert " 3 " in second
    assert "it has no manifest: it is being written, or was given up" in third


def test_an_empty_folder(tmp_path: Path, capsys: Output) -> None:
    assert called("list", tmp_path) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"
    assert called("verify", tmp_path) == 1
    assert "there is no complete checkpoint; there is: none" in capsys.readouterr().err


def test_folders_of_each_server(tmp_path: Path, capsys: Output) -> None:
    folders = apart(tmp_path, 7)
    assert called("list", *folders) == 0
    assert " yes " in capsys.readouterr().out
    assert called("verify", *folders) == 0
    assert called("verify", folders[0]) == 1
    told = capsys.readouterr().out
    assert f"{folders[0]}/cut-00000007/{image_name(1, 2)}" in told
    (folders[0] / "cut-00000007" / NAME).unlink()  # one manifest is enough
    assert called("verify", *folders) == 0


def test_folders_of_two_jobs(tmp_path: Path, capsys: Output) -> None:
    folders = apart(tmp_path, 7)
    shelf = CheckpointDirectory(folders[1])
    text = replace(shelf.manifest(7), job=bytes(16)).to_json()
    (folders[1] / "cut-00000007" / NAME).write_text(text)
    assert called("verify", *folders) == 1
    assert f"{NAME} differ" in capsys.readouterr().out


def test_the_variable_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    snapshots.put(tmp_path, 12)
    monkeypatch.setenv("KVPS_CHECKPOINT_DIR", str(tmp_path))
    assert called("verify") == 0
    assert "the newest good one is 12" in capsys.readouterr().out
    assert called("export", tmp_path / "model") == 0
    assert (tmp_path / "model").exists()


# --- verify -----------------------------------------------------------------------------------


def test_good_ones(tmp_path: Path, capsys: Output) -> None:
    for cut in (1, 2):
        size = bytes_in_words(snapshots.put(tmp_path, cut).size)
    CheckpointDirectory(tmp_path, 0).write(3, snapshots.image(0, 2))
    assert called("verify", tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"checkpoint 1 is good: 2 snapshots, {size}",
        f"checkpoint 2 is good: 2 snapshots, {size}",
        "checkpoint 3 is not complete, it has no manifest: it is being written, or was given up",
        "the newest good one is 2",
    ]
    assert called("verify", tmp_path, "--cut", 3) == 1
    assert "there is no good one" in capsys.readouterr().out


@pytest.mark.parametrize("place", [9, 200, -1])
def test_a_damaged_one(tmp_path: Path, capsys: Output, place: int) -> None:
    snapshots.put(tmp_path, 1, tag="best")
    snapshots.put(tmp_path, 2)
    path = tmp_path / "cut-00000002" / image_name(1, 2)
    octets = bytearray(path.read_bytes())
    octets[place] ^= 1
    path.write_bytes(octets)
    assert called("verify", tmp_path) == 1
    told = capsys.readouterr().out
    assert f"checkpoint 2 is damaged:\n  {path} is not what was written" in told
    assert told.endswith("the newest good one is 1 (best)\n")
    assert called("verify", tmp_path, "--cut", 1) == 0
    assert called("verify", tmp_path, "--tag", "best") == 0
    assert called("verify", tmp_path, "--cut", 2) == 1
    assert called("verify", tmp_path, "--tag", "worst") == 1
    assert "with the tag 'worst'; there is: 1 (best), 2" in capsys.readouterr().err
    assert called("export", tmp_path, tmp_path / "model", "--cut", 2) == 1
    assert not (tmp_path / "model").exists()


def test_a_manifest_that_is_none_is_damage(tmp_path: Path, capsys: Output) -> None:
    snapshots.put(tmp_path, 1)
    (tmp_path / "cut-00000001" / NAME).write_text("{}")
    assert called("verify", tmp_path) == 1
    assert "checkpoint 1 is damaged:\n  cannot read the manifest" in capsys.readouterr().out
    assert called("export", tmp_path, tmp_path / "model", "--cut", 1) == 1
    assert "checkpoint 1 is not complete: cannot read" in capsys.readouterr().err


def test_images_that_disagree_are_damage(tmp_path: Path, capsys: Output) -> None:
    """Each file is as it was written; together they are no cut."""
    shelves = [CheckpointDirectory(tmp_path, server) for server in range(2)]
    first, other = (snapshots.image(server, 2) for server in range(2))
    other = replace(other, stores=(replace(other.stores[0], rate_calls=9), other.stores[1]))
    shelves[0].commit(snapshots.manifest_of(1, shelves, [first, other]))
    assert called("verify", tmp_path) == 1
    assert "rate_calls is 3 on server 0 and 9 on server 1" in capsys.readouterr().out


def test_progress_is_shown_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots.put(tmp_path, 1)
    out = StringIO()
    terminal = Console(file=out, force_terminal=True, width=100)
    monkeypatch.setattr(reports, "_screen", lambda _: terminal)
    assert reports.verify([str(tmp_path)], None, None, out) == 0
    assert "━━━━" in out.getvalue()


# --- export -----------------------------------------------------------------------------------


def test_a_model_comes_out_as_it_was(tmp_path: Path, capsys: Output) -> None:
    torch.manual_seed(0)

    def made() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()

    model, other = made(), made()
    images = torch.rand(4, 3, 8, 8)
    shelves = [CheckpointDirectory(tmp_path, server) for server in range(3)]
    manifest = snapshots.manifest_of(4, shelves, [model_image(model, n, 3) for n in range(3)], "best")
    shelves[0].commit(manifest)
    assert not torch.equal(model(images), other(images))
    file = tmp_path / "model.safetensors"
    assert called("export", tmp_path, file, "--tag", "best") == 0
    assert "9 keys of store 'default'" in capsys.readouterr().out
    other.load_state_dict(load_file(file))
    assert torch.equal(model(images), other(images))
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "kvps.checkpoint": "4 (best)", "kvps.store": "default"}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]


def test_several_stores_must_be_told_apart(tmp_path: Path, capsys: Output) -> None:
    both = []
    for server in range(2):
        (left, _), (right, _) = (
            snapshots.image(server, 2, store=name, version=version).stores
            for name, version in (("default", 5), ("second", 6))
        )
        both.append(Snapshot(server, 2, (left, right)))
    shelves = [CheckpointDirectory(tmp_path, server) for server in range(2)]
    shelves[0].commit(snapshots.manifest_of(1, shelves, both))
    file = tmp_path / "model"
    assert called("export", tmp_path, file) == EXIT_CONFIG
    assert "name one of the stores with --store NAME; there is: default, second" in (capsys.readouterr().err)
    assert called("export", tmp_path, file, "--store", "third") == EXIT_CONFIG
    assert "--store='third'" in capsys.readouterr().err
    assert called("export", tmp_path, file, "--store", "second") == 0
    assert load_file(file).keys() == snapshots.KEYS.keys()
    assert called("list", tmp_path) == 0
    assert "│ second " in capsys.readouterr().out


def test_a_file_that_cannot_be_written_leaves_the_older_one(tmp_path: Path, capsys: Output) -> None:
    snapshots.put(tmp_path / "ckpt", 1)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for file in (tmp_path / "none" / "model", tmp_path / "file" / "model"):
        assert called("export", tmp_path / "ckpt", file) == 1
        assert f"cannot write {file}: " in capsys.readouterr().err
    for folder in (tmp_path / "full", ".", "/"):
        assert called("export", tmp_path / "ckpt", folder) == EXIT_CONFIG
        assert f"cannot write {folder}: it is a directory" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt", "file", "full"}


def test_an_export_with_one_name_lacks_the_other(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVPS_CHECKPOINT_DIR", raising=False)
    assert called("export", tmp_path) == EXIT_CONFIG
    assert f"export needs DIR and FILE, and was given {tmp_path} only" in capsys.readouterr().err


def test_a_key_that_safetensors_cannot_name(tmp_path: Path, capsys: Output) -> None:
    snapshots.put(tmp_path, 1, keys={"__metadata__": Spec("int8", (3,))})
    assert called("export", tmp_path, tmp_path / "model") == 1
    assert "'__metadata__'" in capsys.readouterr().err


# --- flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "required: ACTION; see kvps checkpoint --help"),
        (["lsit", "."], "'lsit' (choose from"),
        (["--log-level", "info", "list", "."], "write kvps checkpoint list --log-level"),
        (["list"], "give DIR, or set KVPS_CHECKPOINT_DIR"),
        (["list", "/nowhere"], "/nowhere is not an existing directory"),
        (["list", ".", "--cut", "1"], "--cut"),
        (["verify", ".", "--cut", "one"], "--cut='one' is not a number"),
        (["verify", ".", "--cut", "-1"], "--cut=-1 is not a whole number"),
        (["export"], "required: FILE"),
        (["list", ".", "--log-level", "loud"], "debug, info"),
    ],
)
def test_a_wrong_flag_is_named(words: list[str], says: str, capsys: Output) -> None:
    assert called(*words) == EXIT_CONFIG
    told = capsys.readouterr()
    assert says in told.err
    assert told.out == ""


def test_choose_takes_the_number_the_tag_or_the_newest_complete_cut(tmp_path: Path) -> None:
    snapshots.put(tmp_path, 1, tag="best")
    snapshots.put(tmp_path, 2)
    snapshots.put(tmp_path, 3)
    (tmp_path / "cut-00000003" / image_name(0, 2)).write_bytes(b"")
    found = all_cuts([tmp_path])
    assert choose(found).number == 2
    assert choose(found, number=1).number == 1
    assert choose(found, tag="best").number == 1
    with pytest.raises(StorageError, match=r"checkpoint 3 is not complete: .*has 0 octets"):
        choose(found, number=3)
    with pytest.raises(StorageError, match="the number 9; there is: 1"):
        choose(found, number=9)
