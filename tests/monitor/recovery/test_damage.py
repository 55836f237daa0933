"""Damaged checkpoints, disks that are full, and files made to run code."""

import io
import json
import os
import pickle
import resource
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from fastclip.monitor import Recovery, RollbackPolicy
from fastclip.monitor.recovery.files import checksum
from tests.monitor.recovery.making import Run, Tally, event

FILES = [".metadata", "__0_0.distcp", "manifest.json", "rank-0.json"]
NEWEST = "step-000000020"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of the steps 10, 15 and 20, the first two confirmed."""
    Run(tmp_path / "run", keep=2).advance(20)
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_there(folder: Path) -> None:
    assert names(folder) == ["recovery.json", "step-000000010", "step-000000015", NEWEST]
    assert names(folder / NEWEST) == FILES


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "flipped": flip,
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damage_is_found_and_the_previous_one_serves(folder: Path, file: str, damage: str) -> None:
    DAMAGES[damage](folder / NEWEST / file)
    run = Run(folder, keep=2)
    with pytest.warns(UserWarning, match=f"passed over a damaged checkpoint, .*{NEWEST}: "):
        run.advance(25)
    assert run.used[0] == (15, 15)
    assert run.bits() == Run(folder.parent / "whole").advance(25).bits()
    assert names(folder)[-2:] == [NEWEST, "step-000000025"]
    assert run.recovery.restore(20) == 20  # written anew


def test_none_left(folder: Path) -> None:
    for step in (10, 15, 20):
        flip(folder / f"step-{step:09d}" / "__0_0.distcp")
    run = Run(folder)
    with pytest.warns(UserWarning, match="damaged") as caught:
        with pytest.raises(RuntimeError, match="no intact checkpoint"):
            run.advance(25)
    assert [str(each.message).count("__0_0.distcp is wrong") for each in caught] == [1, 1, 1]
    assert run.used == []


def test_a_rollback_passes_over_a_damaged_target(tmp_path: Path) -> None:
    recovery = Recovery(tmp_path, {"tally": Tally()}, RollbackPolicy(confirm=5), every=10)
    for _, batch in recovery.steps(40):
        if batch == 29:
            flip(tmp_path / NEWEST / "rank-0.json")
            with pytest.warns(UserWarning, match=NEWEST):
                assert recovery.handle([event(29, 25)])
    assert [rollback.target for rollback in recovery.rollbacks] == [10]


class Trap:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def sign(checkpoint: Path) -> None:
    """Make the checksums anew, as who changes files on purpose would."""
    manifest = checkpoint / "manifest.json"
    about = json.loads(manifest.read_bytes())
    about["files"] = {name: checksum(checkpoint / name) for name in about["files"]}
    manifest.write_text(json.dumps(about))


@contextmanager
def refused(folder: Path, tmp_path: Path) -> Iterator[None]:
    """Nothing runs, and the checkpoint before it is loaded."""
    yield
    with pytest.warns(UserWarning, match=NEWEST):
        assert Run(folder).recovery.restore() == 15
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("file", FILES)
def test_a_planted_pickle_does_not_run(folder: Path, tmp_path: Path, file: str) -> None:
    with refused(folder, tmp_path):
        (folder / NEWEST / file).write_bytes(pickle.dumps(Trap(tmp_path / "trapped"), 2))
        if file != "manifest.json":
            sign(folder / NEWEST)


def test_the_trap_would_work(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "trapped"), 2))
    assert (tmp_path / "trapped").is_dir()


def test_a_pickle_within_a_tensor_does_not_run(folder: Path, tmp_path: Path) -> None:
    """Every tensor is a file of torch.save; here each has another pickle in it."""
    with refused(folder, tmp_path):
        path = folder / NEWEST
        metadata = pickle.loads((path / ".metadata").read_bytes())
        written = io.BytesIO()
        for info in metadata.storage_data.values():
            one = io.BytesIO()
            torch.save(torch.ones(1), one)
            trapped = io.BytesIO()
            with zipfile.ZipFile(one) as old, zipfile.ZipFile(trapped, "w") as new:
                for item in old.namelist():
                    trap = pickle.dumps(Trap(tmp_path / "trapped"), 2)
                    new.writestr(item, trap if item.endswith("data.pkl") else old.read(item))
            info.offset, info.length = written.tell(), len(trapped.getvalue())
            written.write(trapped.getvalue())
        (path / "__0_0.distcp").write_bytes(written.getvalue())
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        sign(path)


def test_an_object_in_the_place_of_a_tensor_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    """torch.distributed.checkpoint would read it with pickle."""
    with refused(folder, tmp_path):
        path = folder / NEWEST
        metadata = pickle.loads((path / ".metadata").read_bytes())
        saved = io.BytesIO()
        torch.save(Trap(tmp_path / "trapped"), saved)
        for name in metadata.state_dict_metadata:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(saved.getvalue())
        (path / "__0_0.distcp").write_bytes(saved.getvalue())
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        sign(path)


def test_what_an_interrupted_save_left_is_removed(folder: Path) -> None:
    (folder / f"{NEWEST}.tmp").mkdir()
    (folder / f"{NEWEST}.tmp" / "__0_0.distcp").write_bytes(b"half")
    (folder / "recovery.json.tmp").write_bytes(b"{")
    run = Run(folder)
    assert [each.step for each in run.recovery.checkpoints] == [10, 15, 20]
    run.advance(25)
    assert not [name for name in names(folder) if name.endswith(".tmp")]


@pytest.mark.parametrize("left", ["folder", "file", "link"])
def test_what_is_in_the_way_of_removing_one(folder: Path, tmp_path: Path, left: str) -> None:
    """A checkpoint is renamed first, to a name that something else may have; and it may have been
    moved to another disk: then the link goes, and what it points to stays."""
    moved = tmp_path / "moved"
    (folder / "step-000000010").rename(moved)
    (folder / "step-000000010").symlink_to(moved)
    for step in (10, 15):
        way = folder / f"step-{step:09d}.tmp"
        if left == "folder":
            way.mkdir()
            (way / "file").touch()
        elif left == "file":
            way.touch()
        else:
            way.symlink_to(moved)
    (folder / "step-7").mkdir()  # somebody else's
    (folder / "step-000000021").touch()
    with pytest.warns(UserWarning, match="step-000000021: NotADirectoryError"):
        run = Run(folder, keep=1).advance(25)
    assert names(folder) == ["recovery.json", NEWEST, "step-000000025", "step-7"]
    assert names(moved) == FILES
    assert run.used[0] == (20, 20)


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk(tmp_path: Path, asynchronous: bool) -> None:
    """Writing fails on the way; it says so, leaves nothing, and what was there can be loaded."""
    folder = tmp_path / "run"
    run = Run(folder, width=2000, asynchronous=asynchronous).advance(12)
    said = f"the checkpoint of step 15 could not be written to {folder}: .* are as they were"
    with files_limited_to(40_000), pytest.raises(OSError, match=said):
        run.advance(40)
    assert [name for name in names(folder) if "15" in name] == []
    run = Run(folder, width=2000).advance(22)
    assert run.used[0] == (12, 12)
    assert run.bits() == Run(tmp_path / "whole", width=2000).advance(22).bits()


def test_a_full_disk_at_a_decision(tmp_path: Path) -> None:
    """Nothing is decided that is not on disk."""
    recovery = Recovery(tmp_path, {"tally": Tally()}, RollbackPolicy(confirm=0), every=2)
    steps = recovery.steps(9)
    assert [next(steps)[0] for _ in range(4)] == [0, 1, 2, 3]
    with files_limited_to(10):
        with pytest.raises(OSError, match=r"recovery.json could not be written: .*; it is as it"):
            recovery.handle([event(3)])
    assert recovery.rollbacks == Recovery(tmp_path, {"tally": Tally()}).rollbacks == []
    assert recovery.handle([event(3)])
    assert next(steps) == (2, 4)
