"""Checkpoints on disk: whole or absent, and with a checksum of every file.

A checkpoint is a folder: tensors in the format of torch.distributed.checkpoint, one
`rank-N.json` per rank with all else, and `manifest.json` with the checksums. It is written under
another name, brought to the disk and then renamed.
"""

import hashlib
import json
import threading
from ctypes import c_char
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from fastclip.monitor.recovery.files import (
    UNFINISHED,
    Damaged,
    checksum,
    remove,
    remove_whole,
    sync_folder,
    to_json,
    write_synced,
)
from fastclip.monitor.recovery.packing import NoMesh, Packed, Unpacker
from fastclip.monitor.recovery.ranks import Ranks
from fastclip.monitor.recovery.reading import read_tensors

VERSION = 1
_MANIFEST = "manifest.json"
_METADATA = ".metadata"


class Checkpoints:
    """The checkpoints in `folder`; everything here is done on all ranks together."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder = folder
        self._ranks = ranks
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._stager: DefaultStager | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def steps(self) -> list[int]:
        """Of this rank's view of the disk, ascending."""
        paths = [path for path in self.folder.glob("step-*") if path.name[5:].isdecimal()]
        steps = [int(path.name[5:]) for path in paths]
        return sorted(n for n, path in zip(steps, paths, strict=True) if path == self.path(n))

    def save(self, step: int, state: Packed, *, asynchronous: bool = False) -> None:
        """Write a checkpoint; nothing is left of it, and `OSError` raised, if that fails.

        With `asynchronous` it returns as soon as the tensors are copied to the host's memory, and
        the next call here waits for the rest and raises what has gone wrong.
        """
        self.wait()
        tensors = state.tensors
        if asynchronous or self._ranks.size > 1:
            tensors = self._staged(tensors)
        own = {"step": step, "tree": state.tree}
        if not asynchronous:
            self._write(step, own, tensors)
            return
        arguments = (step, own, tensors)
        self._writing = threading.Thread(target=self._write_later, args=arguments)
        self._writing.start()

    def wait(self) -> None:
        """Until no checkpoint is being written."""
        self.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def join(self) -> None:
        """The same; what has gone wrong is raised by the next `wait`."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def remove(self, steps: list[int]) -> None:
        def job() -> None:
            for step in steps:
                remove_whole(self.path(step))

        if steps:
            self._ranks.first("removing checkpoints", job)

    def verify(self, step: int) -> dict[str, str]:
        """The checksums of its files. `Damaged` on all ranks unless each is as it was written."""
        files: dict[str, str] = {}
        path, ranks = self.path(step), self._ranks

        def job() -> str:
            try:
                files.update(_files(path, step, ranks.size))
                for name in sorted(files)[ranks.rank :: ranks.size]:
                    if checksum(path / name) != files[name]:
                        return f"the checksum of {name} is wrong"
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                return f"{type(error).__name__}: {error}"
            return ""

        _raise_first(path, ranks.gather("verifying a checkpoint", job))
        return files

    def read(self, step: int, present: list[Tensor]) -> dict[str, Any]:
        """The state of this rank; DTensors take the meshes of those in `present`."""
        self.verify(step)
        path = self.path(step)
        made: dict[str, Any] = {}

        def job() -> str:
            try:
                own = json.loads((path / _of_rank(self._ranks.rank)).read_bytes())
                unpacker = Unpacker(own["tree"], present)
                names = own["names"]
                wanted = {names[name]: each for name, each in unpacker.templates.items()}
                read_tensors(path, wanted)
                made.update(unpacker.unpack())
            except NoMesh:
                raise
            # Whatever is in files whose checksums were made for it: it must not end the run as
            # long as there is an older checkpoint.
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return ""

        _raise_first(path, self._ranks.gather("reading a checkpoint", job))
        return made

    def _staged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy in the host's memory, which is used again for the next one."""
        if self._stager is None:
            on_device = torch.accelerator.is_available()
            options = StagingOptions(on_device, False, False, on_device)
            self._stager = DefaultStager(options)
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        return staged

    def _write_later(self, step: int, own: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        try:
            self._write(step, own, tensors)
        except Exception as error:
            self._failure = error

    def _write(self, step: int, own: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        unfinished = self.path(step).with_name(self.path(step).name + UNFINISHED)
        ranks = self._ranks
        try:
            ranks.first("making a folder", lambda: self._make_room(unfinished))
            names = self._stored_names(tensors)
            own["names"] = {name: stored for name, (stored, _) in names.items()}
            mine = {stored: tensors[name] for name, (stored, owned) in names.items() if owned}
            self._write_tensors(unfinished, mine)

            def finish() -> dict[str, str]:
                write_synced(unfinished / _of_rank(ranks.rank), to_json(own))
                files = [_of_rank(ranks.rank), *_names(unfinished, f"__{ranks.rank}_*")]
                return {name: checksum(unfinished / name) for name in files}

            sums = ranks.gather("writing a checkpoint", finish)
            ranks.first("finishing a checkpoint", lambda: self._finish(unfinished, step, sums))
        except Exception as error:
            if ranks.rank == 0:
                remove(unfinished)
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}; "
                "those from before it are as they were"
            ) from error

    def _make_room(self, unfinished: Path) -> None:
        for left in self.folder.glob(f"step-*{UNFINISHED}"):
            remove(left)
        unfinished.mkdir(parents=True)

    def _stored_names(self, tensors: dict[str, Tensor]) -> dict[str, tuple[str, bool]]:
        """Under which name each is stored, and whether this rank takes part in storing it.

        The name has the lowest of the ranks that hold it: the lowest of a DTensor's mesh, or of
        those where a plain tensor of that name has the same bits. So copies are stored once, and
        what is different on each rank as often.
        """
        rank = self._ranks.rank
        if self._ranks.size == 1:
            return {name: (name, True) for name in tensors}
        lowest = {
            name: int(each.device_mesh.mesh.min())
            for name, each in tensors.items()
            if isinstance(each, DTensor)
        }
        digests = self._ranks.gather(
            "comparing tensors",
            lambda: {name: digest(each) for name, each in tensors.items() if name not in lowest},
        )
        for name, own in digests[rank].items():
            lowest[name] = next(r for r, theirs in enumerate(digests) if theirs.get(name) == own)
        return {
            name: (f"{lowest[name]}:{name}", isinstance(each, DTensor) or lowest[name] == rank)
            for name, each in tensors.items()
        }

    def _write_tensors(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """As torch.distributed.checkpoint.save does, but over the group of its own, and without a
        warning where there is one rank.
        """
        ranks = self._ranks
        writer = _Writer(folder, sync_files=True, overwrite=False)
        planner = DefaultSavePlanner(flatten_state_dict=False)

        def plan() -> SavePlan:
            planner.set_up_planner(tensors, is_coordinator=ranks.rank == 0)
            writer.set_up_storage_writer(ranks.rank == 0)
            return writer.prepare_local_plan(planner.create_local_plan())

        plans, metadata = planner.create_global_plan(ranks.gather("planning", plan))
        own = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])
        results = ranks.gather("writing", lambda: writer.write_data(own, planner).value())
        ranks.first("writing metadata", lambda: writer.finish(metadata, results))

    def _finish(self, unfinished: Path, step: int, sums: list[dict[str, str]]) -> None:
        files = {name: value for each in sums for name, value in each.items()}
        files[_METADATA] = checksum(unfinished / _METADATA)
        about = {"version": VERSION, "step": step, "ranks": self._ranks.size, "files": files}
        write_synced(unfinished / _MANIFEST, to_json(about))
        sync_folder(unfinished)
        unfinished.rename(self.path(step))
        sync_folder(self.folder)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        return None  # it would have the path, pickled by a class of its own


def digest(tensor: Tensor) -> bytes:
    """Of the bits of a tensor; of a DTensor, of those that are here."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().cpu().contiguous()
    about = f"{local.dtype} {tuple(local.shape)}".encode()
    if local.numel() == 0:
        return about
    memory = (c_char * local.nbytes).from_address(local.data_ptr())
    return hashlib.blake2b(memory, digest_size=16, person=b"tensor").digest() + about


def _of_rank(rank: int) -> str:
    return f"rank-{rank}.json"


def _names(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)]


def _files(path: Path, step: int, size: int) -> dict[str, str]:
    """The checksums of a checkpoint's files; `ValueError` if it is not what it should be."""
    about = json.loads((path / _MANIFEST).read_bytes())
    if about["version"] != VERSION:
        raise ValueError(f"it has version {about['version']!r}, where {VERSION} is known")
    if about["ranks"] != size:
        raise ValueError(f"it is of {about['ranks']} ranks, and here are {size}")
    if about["step"] != step:
        raise ValueError(f"it is of step {about['step']!r}")
    files: dict[str, str] = about["files"]
    missing = {_METADATA, *map(_of_rank, range(size))} - files.keys()
    if missing:
        raise ValueError(f"it has no {min(missing)}")
    return files


def _raise_first(path: Path, faults: list[str]) -> None:
    for fault in faults:
        if fault:
            raise Damaged(f"{path}: {fault}")
