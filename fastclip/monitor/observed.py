"""From what a training loop has in its hands to the fields of a record. Imports no torch."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastclip.monitor.layers import LayerTable, merged, require_table
from fastclip.monitor.records import AS_IT_IS, NAMES, checked

if TYPE_CHECKING:
    from typing import SupportsFloat

    from torch import Tensor
    from typing_extensions import TypedDict

    from fastclip.monitor.records import LayerRow
    from fastclip.stats import GradStats, LayerStats

    Number = SupportsFloat | None  # of Python or NumPy, or a tensor of one element

    class Fields(TypedDict, total=False):
        """What `Monitor.observe` takes beside the step and the statistics, as a type checker has
        to know it: the fields of `StepRecord`."""

        loss: Number
        val_loss: Number
        grad_norm: Number
        clip_coef: Number
        clipped: Number
        lr: Number
        loss_scale: Number
        nonfinite_count: Number
        skipped: Number
        activation_max: Number
        param_norm: Number
        update_ratio: Number
        batch: Any
        attempt: int
        layers: LayerTable | Sequence[LayerRow | LayerStats] | None


_KNOWN = frozenset(NAMES)
_NO_LAYERS = LayerTable((), {})


class Watch(Protocol):
    """Measures something of its own accord, for the Monitor to take along."""

    def take(self) -> Mapping[str, Any]:
        """Fields of a `StepRecord` measured since the last call: numbers, and tensors that may be
        on a device. `layers`, if it is there, is a `LayerTable`. Nothing measured: empty.
        """
        ...


class Later(NamedTuple):
    """What `make` gives of copies of `tensors` on the host. `fixed`: nobody changes those, so on
    the CPU they need no copy."""

    tensors: tuple["Tensor", ...]
    make: Callable[..., Any]
    fixed: bool = False


class Given(NamedTuple):
    """One call of observe.

    `fields` of the record: what is on the host is checked; a tensor of one element, and `Later`,
    are yet to be read. `layers` is what rows of layers can be made of, and `measured` says whether
    a watch gave some of that.
    """

    fields: dict[str, Any]
    layers: list[Later]
    measured: bool


def given(
    step: Any, stats: "GradStats | None", watches: Iterable[Watch], fields: Mapping[str, Any]
) -> Given:
    """What was given of a step; nothing has been read from a tensor.

    Raises `TypeError` for a field that a record has not, and for a value of the wrong kind. Watches
    are asked last, so that nothing of theirs is lost by it.
    """
    own = {}
    for name, value in fields.items():
        if name not in _KNOWN:
            raise TypeError(f"a record has no {name!r}; its fields are {', '.join(NAMES)}")
        if value is not None:
            plain = type(value) is AS_IT_IS.get(name)
            own[name] = value if plain else _taken_in(name, value)
    if step is None:
        raise TypeError("a record needs a step")
    own["step"] = step if type(step) is int else _taken_in("step", step)
    layers: list[Later] = []
    found: dict[str, Any] = {}
    if stats is not None:
        found = _from_stats(stats)
        layers.append(_layers_of(stats))
    measured = False
    for watch in watches:
        taken = _from_watch(watch)
        rows = taken.pop("layers", None)
        found.update((name, _taken_in(name, value)) for name, value in taken.items())
        if rows is not None:
            layers.append(_of_table(rows))
            measured = True
    found.update(own)
    return Given(found, layers, measured)


def _from_watch(watch: Watch) -> dict[str, Any]:
    kind = type(watch).__name__
    measured = watch.take()
    if not isinstance(measured, Mapping):
        raise TypeError(f"{kind}.take() must give a mapping of fields, gave {measured!r:.80}")
    taken = {name: value for name, value in measured.items() if value is not None}
    for name in taken:
        if name not in _KNOWN:
            raise TypeError(f"{kind}.take() gave {name!r}, which a record has not")
    if not isinstance(taken.get("layers", _NO_LAYERS), LayerTable):
        raise TypeError(f"the layers of {kind}.take() must be a LayerTable")
    return taken


def _from_stats(stats: "GradStats") -> dict[str, Any]:
    """The fields that statistics of the gradients fill. What takes an operator more than a copy
    (the number of non-finite elements, the smallest coefficient) is computed on the host.

    The table is as fixed as `GradStats` itself: each step makes one. Copying it all the same would
    take 5 us on the CPU for 300 gradients and 9 for 2,000, a tenth and a sixth of a step's cost.
    """
    if not hasattr(stats, "total_norm"):
        raise TypeError(f"stats must be GradStats, got {stats!r:.80}; a norm alone is grad_norm=")
    coef = stats.coef
    found = {
        "grad_norm": stats.total_norm,
        "clip_coef": Later((coef,), _smallest) if coef.dim() else coef,
        "clipped": stats.clipped,
        "nonfinite_count": Later((stats.table,), _nonfinite, fixed=True),
        "skipped": stats.skipped,
    }
    if stats.inv_scale is not None:
        found["loss_scale"] = Later((stats.inv_scale,), _inverted, fixed=True)
    return found


def _inverted(inv_scale: "Tensor") -> float:
    (number,) = inv_scale.reshape(1).tolist()
    return 1 / number if number else math.inf


def _smallest(coef: "Tensor") -> Any:
    """Of the coefficients of a rule per tensor; without a tensor nothing is scaled."""
    return coef.min().tolist() if coef.numel() else 1.0


def _nonfinite(table: "Tensor") -> int:
    from fastclip import table as tables

    # 3 us for 2,000 rows, where the sum of the two columns alone takes 30
    totals = table.sum(0).tolist()
    return int(totals[tables.NAN] + totals[tables.INF])


def _layers_of(stats: "GradStats") -> Later:
    names, numel, p, dtype = stats.names, stats.numel, stats.norm_type, stats.total_norm.dtype

    def make(table: "Tensor") -> LayerTable:
        from fastclip import table as tables

        norms = tables.norms(table, p).to(dtype)
        shares = [0.0] * len(names)
        if _nonfinite(table):
            bad = table[:, tables.NAN] + table[:, tables.INF]
            shares = [n and n / size for n, size in zip(bad.tolist(), numel, strict=True)]
        max_abs = table[:, tables.MAX_ABS].tolist()
        columns = {"norm": norms.tolist(), "max_abs": max_abs, "nonfinite": shares}
        return LayerTable(names, columns)

    return Later((stats.table,), make, fixed=True)


def _taken_in(name: str, value: Any) -> Any:
    """A field's value as `Given` has it."""
    if name == "batch":
        return _batch(value)
    if name == "layers":
        return _rows(value) if isinstance(value, LayerTable) else checked(name, value)
    if is_tensor(value):
        number = _readable(name, value)
        if number.numel() != 1:
            shape = tuple(number.shape)
            raise TypeError(f"{name} must be one number, got a tensor of shape {shape}")
        return number.reshape(()) if number.dim() else number
    if hasattr(value, "item"):  # NumPy's scalars and arrays
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            shape = tuple(value.shape)
            raise TypeError(f"{name} must be one number, got an array of shape {shape}") from error
    return checked(name, value)


def _of_table(table: LayerTable) -> Later:
    require_table(table)
    tensors: dict[str, Tensor] = {}
    for name, column in table.columns.items():
        if is_tensor(column):
            tensors[name] = _readable(f"the column {name!r} of layers", column)
    others = {name: _column(name, c) for name, c in table.columns.items() if name not in tensors}
    names, measured = table.names, tuple(tensors)

    def make(*columns: "Tensor") -> LayerTable:
        read = {name: column.tolist() for name, column in zip(measured, columns, strict=True)}
        return LayerTable(names, {**others, **read})

    return Later(tuple(tensors.values()), make)


def _column(name: str, numbers: Iterable[Any]) -> list[Any]:
    """A copy, for the caller may go on to change its own."""
    try:
        return [None if number is None else float(number) for number in numbers]
    except (TypeError, ValueError) as error:
        raise TypeError(f"the column {name!r} of layers must be numbers: {error}") from error


def _rows(table: LayerTable) -> Later:
    tensors, make, _ = _of_table(table)
    return Later(tensors, lambda *columns: merged([make(*columns)]))


class _Place(int):
    """Where in the metadata of a batch a tensor was, and which one."""


def _batch(value: Any) -> Any:
    """Metadata, in which tensors may be anywhere."""
    if type(value) is int:
        return value
    tensors: list[Tensor] = []

    def emptied(part: Any) -> Any:
        if is_tensor(part):
            tensors.append(_readable("batch", part))
            return _Place(len(tensors) - 1)
        if isinstance(part, Mapping):
            return {key: emptied(item) for key, item in part.items()}
        return [emptied(item) for item in part] if isinstance(part, list | tuple) else part

    frame = checked("batch", emptied(value))
    return Later(tuple(tensors), partial(_filled, frame)) if tensors else frame


def _filled(part: Any, *tensors: "Tensor") -> Any:
    if isinstance(part, _Place):
        return tensors[part].tolist()
    if isinstance(part, dict):
        return {key: _filled(item, *tensors) for key, item in part.items()}
    return [_filled(item, *tensors) for item in part] if isinstance(part, list) else part


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _readable(name: str, tensor: Any) -> "Tensor":
    """The tensor, outside of any graph. `TypeError` for one without plain numbers to copy."""
    import torch

    if tensor.is_meta:
        raise TypeError(f"{name} is on the device meta, where tensors have no values")
    if type(tensor) is not torch.Tensor and hasattr(tensor, "full_tensor"):
        raise TypeError(f"{name} is a DTensor: pass what its full_tensor() gives, on every rank")
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        kind = f"{tensor.dtype}, {tensor.layout}"
        raise TypeError(f"{name} must be a dense tensor of real numbers, got one of {kind}")
    return tensor.detach() if tensor.requires_grad else tensor
