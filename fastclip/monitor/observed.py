"""From what a training loop has in its hands to the fields of a record. Imports no torch."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastclip.monitor.layers import LayerTable, require_table
from fastclip.monitor.records import NAMES, checked

if TYPE_CHECKING:
    from torch import Tensor

    from fastclip.stats import GradStats


class Watch(Protocol):
    """Measures something of its own accord, for the Monitor to take along."""

    def take(self) -> Mapping[str, Any]:
        """Fields of a `StepRecord` measured since the last call: numbers, and tensors that may be
        on a device. `layers`, if it is there, is a `LayerTable`. Nothing measured: empty.
        """
        ...


class Later(NamedTuple):
    """What `make` gives of copies of `tensors` on the host, each in one dimension."""

    tensors: tuple["Tensor", ...]
    make: Callable[..., Any]


class Given(NamedTuple):
    """One call of observe: values of fields, checked where they are on the host, and what rows of
    layers are made of; `measured`, whether a watch gave some."""

    fields: dict[str, Any]
    layers: list[Later]
    measured: bool


def given(
    step: Any, stats: "GradStats | None", watches: Iterable[Watch], fields: Mapping[str, Any]
) -> Given:
    """What was given of a step; nothing has been read from a tensor on a device.

    Raises `TypeError` for a field that a record has not, and for a value of the wrong kind. Watches
    are asked last, so that nothing of theirs is lost by it.
    """
    unknown = fields.keys() - NAMES
    if unknown:
        raise TypeError(f"a record has no {min(unknown)!r}; its fields are {', '.join(NAMES)}")
    if step is None:
        raise TypeError("a record needs a step")
    own = {"step": step, **fields}
    table = own.pop("layers", None)
    own = {name: _taken_in(name, value) for name, value in own.items() if value is not None}
    found = {} if stats is None else _from_stats(stats)
    layers = [] if stats is None else [_layers_of(stats)]
    measured = False
    for watch in watches:
        taken = dict(watch.take())
        columns = taken.pop("layers", None)
        found.update(_from_watch(watch, taken))
        if columns is not None:
            layers.append(_of_table(columns))
            measured = True
    if isinstance(table, LayerTable):
        layers, measured = [_of_table(table)], True
    elif table is not None:
        own["layers"] = checked("layers", table)
    return Given({**found, **own}, layers, measured)


def _from_watch(watch: Watch, taken: Mapping[str, Any]) -> dict[str, Any]:
    unknown = taken.keys() - NAMES
    if unknown:
        raise TypeError(f"a {type(watch).__name__} gave {min(unknown)!r}, which a record has not")
    return {name: _taken_in(name, value) for name, value in taken.items() if value is not None}


def _from_stats(stats: "GradStats") -> dict[str, Any]:
    """The fields that statistics of the gradients fill."""
    return {
        "grad_norm": Later((stats.total_norm,), _number),
        "clip_coef": Later((stats.coef,), _smallest),
        "clipped": Later((stats.clipped,), _number),
        "nonfinite_count": Later((stats.table,), _nonfinite),
        "skipped": Later((stats.skipped,), _number),
    }


def _layers_of(stats: "GradStats") -> Later:
    names, numel, p, dtype = stats.names, stats.numel, stats.norm_type, stats.total_norm.dtype

    def make(flat: "Tensor") -> LayerTable:
        from fastclip import table as tables

        rows = flat.view(-1, tables.COLUMNS)
        norms = tables.norms(rows, p).to(dtype)
        bad = rows[:, tables.NAN] + rows[:, tables.INF]
        shares = [n and n / size for n, size in zip(bad.tolist(), numel, strict=True)]
        max_abs = rows[:, tables.MAX_ABS].tolist()
        columns = {"norm": norms.tolist(), "max_abs": max_abs, "nonfinite": shares}
        return LayerTable(names, columns)

    return Later((stats.table,), make)


def _of_table(table: LayerTable) -> Later:
    require_table(table)
    tensors: dict[str, Any] = {n: c for n, c in table.columns.items() if is_tensor(c)}
    for name, column in tensors.items():
        _require_readable(f"the column {name!r} of layers", column)
    # A copy: the caller may go on to change its lists.
    others = {name: list(c) for name, c in table.columns.items() if name not in tensors}
    names, measured = table.names, tuple(tensors)

    def make(*flat: "Tensor") -> LayerTable:
        read = {name: column.tolist() for name, column in zip(measured, flat, strict=True)}
        return LayerTable(names, {**others, **read})

    return Later(tuple(tensors.values()), make)


def _taken_in(name: str, value: Any) -> Any:
    """A field's value as a record has it; one with tensors, which are not read, as `Later`."""
    if name == "batch":
        return _batch(value)
    if is_tensor(value):
        _require_readable(name, value)
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise TypeError(f"{name} must be one number, got a tensor of shape {shape}")
        return Later((value,), _number)
    if hasattr(value, "item") and name != "layers":  # NumPy's scalars and arrays
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            shape = tuple(value.shape)
            raise TypeError(f"{name} must be one number, got an array of shape {shape}") from error
    return checked(name, value)


def _batch(value: Any) -> Any:
    """Metadata, in which tensors may be anywhere."""
    tensors: list[Tensor] = []

    def emptied(part: Any) -> Any:
        if is_tensor(part):
            _require_readable("batch", part)
            tensors.append(part)
            return _Place(len(tensors) - 1, tuple(part.shape))
        if isinstance(part, Mapping):
            return {key: emptied(item) for key, item in part.items()}
        return [emptied(item) for item in part] if isinstance(part, list | tuple) else part

    frame = emptied(value)
    if not tensors:
        return checked("batch", value)

    def filled(part: Any, flat: tuple["Tensor", ...]) -> Any:
        if isinstance(part, _Place):
            return flat[part.number].view(part.shape).tolist()
        if isinstance(part, Mapping):
            return {key: filled(item, flat) for key, item in part.items()}
        return [filled(item, flat) for item in part] if isinstance(part, list) else part

    return Later(tuple(tensors), lambda *flat: filled(frame, flat))


class _Place(NamedTuple):
    """Where a tensor was: which one, and its shape."""

    number: int
    shape: tuple[int, ...]


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _require_readable(name: str, tensor: "Tensor") -> None:
    """Raises `TypeError` for a tensor that has no plain numbers to copy."""
    import torch

    if tensor.device.type == "meta":
        raise TypeError(f"{name} is on the device meta, where tensors have no values")
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        raise TypeError(f"{name} must be a dense tensor of real numbers, got {tensor!r:.80}")


def _number(flat: "Tensor") -> Any:
    return flat.item()


def _smallest(flat: "Tensor") -> Any:
    """Of the coefficients of a rule per tensor; without a tensor nothing is scaled."""
    return flat.min().item() if flat.numel() else 1.0


def _nonfinite(flat: "Tensor") -> int:
    from fastclip import table as tables

    return int(flat.view(-1, tables.COLUMNS)[:, tables.NAN : tables.INF + 1].sum())
