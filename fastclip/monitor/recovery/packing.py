"""State as JSON and named tensors, and back: what is loaded is data, and never code.

Whatever has a `state_dict` gives plain data, which comes back exactly as it was: ints of any size,
floats bit for bit, tuples as tuples, keys that are no strings. Its tensors are put aside under the
path that leads to them (``optimizer/state/0/exp_avg``).
"""

import base64
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.distributed.tensor.placement_types import _StridedShard

_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_LARGE = 1 << 63  # ints from here on are written in hexadecimal: reading decimals is limited


class NoMesh(ValueError):
    """A DTensor of a checkpoint is on a mesh that no tensor of the run is on."""


class Packed(NamedTuple):
    tree: Any  # of what JSON has
    tensors: dict[str, Tensor]  # by path; DTensors among them


def pack(state: Mapping[str, Any]) -> Packed:
    """`TypeError` naming the path of the first value that is no plain data."""
    packer = _Packer()
    return Packed({name: packer.pack(value, name) for name, value in state.items()}, packer.tensors)


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[Any, str] = {}  # where a tensor's memory was met first

    def pack(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), path)
        if isinstance(value, int):
            return int(value) if -_LARGE < value < _LARGE else {"int": hex(value)}
        if isinstance(value, float):
            exact = float(value)
            finite = math.isfinite(exact)
            return exact if finite else {"float": struct.pack(">d", exact).hex()}
        if isinstance(value, str):
            return str(value)
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if type(value) in (list, tuple):
            items = [self.pack(item, f"{path}/{place}") for place, item in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        if type(value) in _DICTS:
            return self._dict(value, path)
        if _is_numpy_scalar(value):
            return self.pack(value.item(), path)
        raise TypeError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, and a checkpoint "
            "holds plain data: tensors, numbers, strings, bytes, None, lists, tuples and dicts"
        )

    def _dict(self, value: Any, path: str) -> Any:
        pairs = []
        for key, item in value.items():
            if isinstance(key, Tensor):
                raise TypeError(f"{path} has a tensor among its keys")
            pairs.append([self.pack(key, f"{path}'s key"), self.pack(item, f"{path}/{key}")])
        packed = {_DICTS[type(value)]: pairs}
        if hasattr(value, "_metadata"):  # the versions of the modules in a model's state
            packed["metadata"] = self.pack(dict(value._metadata), f"{path}._metadata")
        return packed

    def _tensor(self, value: Tensor, path: str) -> Any:
        if value.is_meta or value.layout is not torch.strided or value.is_quantized:
            kind = "meta" if value.is_meta else "quantized" if value.is_quantized else value.layout
            raise TypeError(f"{path} is a tensor of a kind that cannot be saved: {kind}")
        local = value.to_local() if isinstance(value, DTensor) else value
        memory = (local.untyped_storage().data_ptr(), local.storage_offset(), local.shape)
        key = (type(value), *memory, local.stride(), local.dtype, local.is_conj(), local.is_neg())
        name = self._known.get(key) if local.numel() else None
        if name is None:
            while path in self.tensors:  # where keys have slashes in them
                path += "'"
            name = self._known[key] = path
            self.tensors[name] = value.resolve_conj().resolve_neg()
        about: dict[str, Any] = {"tensor": name, "dtype": _dtype_name(value.dtype)}
        about["shape"] = list(value.shape)
        if isinstance(value, DTensor):
            about["mesh"] = _mesh_key(value.device_mesh)
            about["placements"] = [_placed(each, path) for each in value.placements]
        elif value.ndim == 0 and value.device.type != "cpu":
            # Of an optimizer: a learning rate, a number of steps. All others copy to their place.
            about["device"] = str(value.device)
        return about


def _is_numpy_scalar(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mesh_key(mesh: DeviceMesh) -> list[Any]:
    return [mesh.mesh.tolist(), list(mesh.mesh_dim_names or ())]


def _placed(placement: Placement, path: str) -> list[Any]:
    if isinstance(placement, _StridedShard):
        return ["strided", placement.dim, placement.split_factor]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    if isinstance(placement, Replicate):
        return ["replicate"]
    if isinstance(placement, Partial):
        return ["partial", placement.reduce_op]
    raise TypeError(f"{path} is placed as {placement!r}, which is not known")


_PLACEMENTS: dict[str, Callable[..., Placement]] = {
    "strided": lambda dim, factor: _StridedShard(dim, split_factor=factor),
    "shard": Shard,
    "replicate": Replicate,
    "partial": Partial,
}


class Unpacker:
    """Makes state of a tree that `pack` made.

    `templates` are empty tensors for all that the tree names; once they are filled, `unpack` puts
    them in their places. DTensors take the mesh of one of `present`.
    """

    def __init__(self, tree: Any, present: Iterable[Tensor]) -> None:
        self._tree = tree
        meshes = (each.device_mesh for each in present if isinstance(each, DTensor))
        self._meshes = {repr(_mesh_key(mesh)): mesh for mesh in meshes}
        self.templates: dict[str, Tensor] = {}
        self._devices: dict[str, str] = {}
        self._visit(tree)

    def unpack(self) -> Any:
        for name, device in self._devices.items():
            self.templates[name] = self.templates[name].to(device)
        return {name: self._made(value) for name, value in self._tree.items()}

    def _visit(self, value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                self._visit(item)
        elif isinstance(value, dict):
            if "tensor" in value:
                self._empty(value)
            else:
                self._visit(list(value.values()))

    def _empty(self, about: dict[str, Any]) -> None:
        name, shape, dtype = about["tensor"], about["shape"], getattr(torch, about["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has the type {about['dtype']!r}, which is not one of tensors")
        if "mesh" not in about:
            self.templates[name] = torch.empty(shape, dtype=dtype)
            if "device" in about:
                self._devices[name] = about["device"]
            return
        mesh = self._meshes.get(repr(about["mesh"]))
        if mesh is None:
            text = f"no module or optimizer has a tensor on the mesh of {name}: {about['mesh']}"
            raise NoMesh(text)
        placements = [_PLACEMENTS[kind](*options) for kind, *options in about["placements"]]
        self.templates[name] = empty_dtensor(
            shape, dtype=dtype, device_mesh=mesh, placements=placements
        )

    def _made(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._made(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return self.templates[value["tensor"]]
        kind = next(iter(value))
        content = value[kind]
        if kind == "tuple":
            return tuple(self._made(item) for item in content)
        if kind in _SCALARS:
            return _SCALARS[kind](content)
        made = _EMPTY[kind]()
        for key, item in content:
            made[self._made(key)] = self._made(item)
        if "metadata" in value:
            made._metadata = self._made(value["metadata"])
        return made


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": lambda content: struct.unpack(">d", bytes.fromhex(content))[0],
    "bytes": base64.b64decode,
}
_EMPTY: dict[str, Callable[[], Any]] = {name: kind for kind, name in _DICTS.items()}
