"""Plain data comes back as it was, to the bit and to the type; all else is refused by its path."""

import json
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastclip.monitor import Recovery
from fastclip.monitor.recovery.packing import NoMesh, Unpacker, pack
from tests.monitor.recovery.making import Tally

PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]  # a NaN that has a sign

VALUES: dict[str, Any] = {
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**64, 10**6000],
    "floats": [0.1, -0.0, 5e-324, 1e308, float("inf"), -float("inf"), float("nan"), PAYLOAD],
    "constants": [None, True, False, "", b"", b"\x00\xff", "ü\ud800\n", [], (), {}],
    "nested": ((1, [2, (3,)]), [[]], {"a": ({},)}),
    "keys": {0: "int", "0": "text", (1, "a"): "tuple", 1.5: "float", None: "none", b"k": 1},
    "marks": {"tensor": "no tensor", "tuple": [1], "int": "0x1", "metadata": {}},
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter({20: 1, 10: 2}),
}


def back(value: Any) -> Any:
    packed = pack({"it": value})
    unpacker = Unpacker(json.loads(json.dumps(packed.tree, allow_nan=False)), [])
    for name, tensor in packed.tensors.items():
        unpacker.templates[name].copy_(tensor)
    return unpacker.unpack()["it"]


def same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", two)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same(list(one.items()), list(two.items()))
    return bool(one == two)


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    assert same(back(VALUES[name]), VALUES[name])


KEYS = st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_any_plain_data(value: Any) -> None:
    assert same(back(value), value)


def test_numpy_scalars_are_numbers() -> None:
    given = [np.float64(0.1), np.float32(0.1), np.int64(7), np.bool_(True)]
    assert same(back(given), [0.1, float(np.float32(0.1)), 7, True])


DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool),
)


class Holder:
    """State that is what it is told to be."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def through_disk(folder: Path, value: Any, asynchronous: bool = False) -> Any:
    for each in (1, 2):  # the second into a folder that is there, by another object
        saved = Recovery(folder / str(each), {"it": Holder(value)}, asynchronous=asynchronous)
        steps = saved.steps(2)
        next(steps)
        steps.close()  # type: ignore[attr-defined]
    holder = Holder()
    Recovery(folder / "2", {"it": holder}).restore()
    return holder.value


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_tensors(tmp_path: Path, asynchronous: bool) -> None:
    """Of every type and shape, strided and aliased as they may be."""
    random = torch.randn(6, 4)
    tensors = {str(dtype): (random * 50).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 3), "one": torch.tensor(2.5), "nan": random / 0}
    tensors |= {"transposed": random.t(), "step": random[::2, 1:], "tied": random, "same": random}
    tensors |= {
        "expanded": torch.ones(1).expand(5),
        "conj": torch.randn(3, dtype=torch.cfloat).conj(),
    }
    loaded = through_disk(tmp_path, tensors, asynchronous)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        ours, theirs = (each.contiguous().resolve_conj() for each in (tensor, loaded[name]))
        if tensor.numel():
            assert torch.equal(ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8))


def test_names_that_look_alike(tmp_path: Path) -> None:
    values = {"a/b": {"c": torch.tensor(1)}, "a": {"b/c": torch.tensor(2)}, 0: torch.tensor(3)}
    loaded = through_disk(tmp_path, {**values, "0": torch.tensor(4)})
    assert [loaded["a/b"]["c"], loaded["a"]["b/c"], loaded[0], loaded["0"]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"seen": [1, {2, 3}]}, "state/it/value/seen/1 is a builtins.set"),
        ({"f": print}, "state/it/value/f is a builtins.builtin_function_or_method"),
        (np.ones(3), "state/it/value is a numpy.ndarray"),
        ({(1, torch.dtype): 0}, "state/it/value's key/1 is a builtins.type"),
        (torch.empty(2, device="meta"), "state/it/value is a tensor of a kind .*: meta"),
        (torch.eye(2).to_sparse(), "state/it/value is a tensor of a kind .*: torch.sparse_coo"),
    ],
    ids=["set", "function", "array", "key", "meta", "sparse"],
)
def test_what_is_refused(tmp_path: Path, value: Any, said: str) -> None:
    """Before anything is written."""
    steps = Recovery(tmp_path, {"tally": Tally(), "it": Holder(value)}).steps(3)
    with pytest.raises(TypeError, match=said):
        next(steps)
    assert [path.name for path in tmp_path.iterdir()] == ["recovery.json"]


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert back(state)._metadata == state._metadata  # type: ignore[attr-defined]


def test_a_mesh_that_is_not_here() -> None:
    about = {"tensor": "it", "dtype": "float32", "shape": [2], "placements": [["shard", 0]]}
    with pytest.raises(NoMesh, match=r"on the mesh of it: \[\[0, 1\], \['data'\]\]"):
        Unpacker({"it": {**about, "mesh": [[0, 1], ["data"]]}}, [torch.ones(1)])
