"""Reading tensors that torch.distributed.checkpoint wrote, without running what is in the files.

Its metadata is a pickle and so is every tensor. The latter torch reads with ``weights_only=True``;
the former is read here by an unpickler that knows the classes it is made of and nothing else.
Its third kind of content, pickled objects, is never written and refused.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _CLASSES
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint here does")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = (Path(self.path) / ".metadata").read_bytes()
        metadata = _Metadata(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"its metadata is a {type(metadata).__name__}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(
            f"{read_item.dest_index.fqn} is a pickled object, not a tensor"
        )


def read_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` with those of these names in the checkpoint at `path`."""
    reader, planner = _Reader(path), _Planner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
