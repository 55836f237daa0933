"""What one step left behind, and what a detector says about it: plain data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, NamedTuple

Level = Literal["info", "warn", "critical"]
LEVELS: tuple[Level, ...] = ("info", "warn", "critical")  # ascending


class LayerRow(NamedTuple):
    """One layer in one step: its gradient before clipping, and its parameter.

    Attributes:
        name: of the parameter.
        norm: of the gradient, without a loss scale.
        max_abs: the largest finite magnitude in the gradient, without a loss scale.
        nonfinite: the share of the gradient's elements that are NaN or infinite, 0 to 1.
        param_norm: the 2-norm of the parameter after the update.
        update_ratio: the 2-norm of the update over that of the parameter before it.
    """

    name: str
    norm: float | None = None
    max_abs: float | None = None
    nonfinite: float | None = None
    param_norm: float | None = None
    update_ratio: float | None = None


COLUMNS = LayerRow._fields[1:]  # the numbers of a layer


@dataclass(frozen=True)
class StepRecord:
    """What was measured in one step. Everything but `step` may be missing: None.

    | field             | update    | meaning                                                     |
    |-------------------|-----------|-------------------------------------------------------------|
    | `step`            |           | the number of updates before this one                       |
    | `loss`            | before    | of the training batch                                       |
    | `val_loss`        | after     | on validation data                                          |
    | `grad_norm`       | before    | of all gradients, before clipping, without a loss scale     |
    | `clip_coef`       | before    | what gradients were multiplied by, the smallest; 0 to 1     |
    | `clipped`         | before    | whether any gradient was multiplied by less than 1          |
    | `lr`              | during    | the learning rate of this update                            |
    | `loss_scale`      | before    | the scale that this step's loss was multiplied by           |
    | `nonfinite_count` | before    | gradient elements that are NaN or infinite                  |
    | `skipped`         | during    | whether the update was left out                             |
    | `activation_max`  | before    | the largest magnitude among the activations                 |
    | `param_norm`      | after     | 2-norm of all parameters                                    |
    | `update_ratio`    | after     | 2-norm of the update over that of the parameters before it  |
    | `batch`           |           | number or description of the batch, of what JSON has        |
    | `attempt`         |           | rollbacks before this step; (attempt, step) is unique       |
    | `layers`          | see there | one `LayerRow` per layer; only some records have them       |

    The second column says whether a metric is of the model before or after the update of this step:
    a bad update shows in those from before it one record later. All of a record is of one call of
    `Monitor.observe`, however much later its numbers came back from a device.
    """

    step: int
    loss: float | None = None
    val_loss: float | None = None
    grad_norm: float | None = None
    clip_coef: float | None = None
    clipped: bool | None = None
    lr: float | None = None
    loss_scale: float | None = None
    nonfinite_count: int | None = None
    skipped: bool | None = None
    activation_max: float | None = None
    param_norm: float | None = None
    update_ratio: float | None = None
    batch: Any = None
    attempt: int = 0
    layers: tuple[LayerRow, ...] | None = None


@dataclass(frozen=True)
class Event:
    """What a detector found in the record of `step`.

    Where numbers come from a device, that is not the step at which `Monitor.observe` returns it: a
    record is judged once it is complete, `Telemetry.lag` steps later.

    `kind` is the detector's, `value` is what was judged and `baseline` what against, both in the
    unit of `metric`. `onset` is the first step at which any metric left its normal band, and
    `onset_metric` says which; a detector leaves both to the Monitor. `message` is a sentence.

    A band is of the last 100 values within it of `loss`, `val_loss`, `grad_norm`, `activation_max`,
    `param_norm` or `update_ratio`. Outside, once there are 20, is a value that is not finite or
    that `RobustSpike` with k = 7 would name, in logarithms where all are positive. Ten records in a
    row within all bands end what began at the onset.

    Raises `ValueError` for a level that is not "info", "warn" or "critical".
    """

    step: int
    kind: str
    level: Level
    metric: str
    value: float
    baseline: float | None = None
    onset: int | None = None
    onset_metric: str | None = None
    message: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            names = ", ".join(map(repr, LEVELS))
            raise ValueError(f"the level of an event must be one of {names}, got {self.level!r}")


# What detectors can judge: the fields that are numbers.
METRICS = (
    *("loss", "val_loss", "grad_norm", "clip_coef", "lr", "loss_scale", "nonfinite_count"),
    *("activation_max", "param_norm", "update_ratio"),
)
# Those that are not finite only when something is wrong; the normal bands are theirs.
WATCHED = ("loss", "val_loss", "grad_norm", "activation_max", "param_norm", "update_ratio")


def _real(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return value


def _number(value: Any) -> float:
    return float(_real(value))


def _whole(value: Any) -> int:
    whole = int(_real(value))
    if whole != value:
        raise TypeError
    return whole


def _count(value: Any) -> int:
    whole = _whole(value)
    if whole < 0:
        raise ValueError
    return whole


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise TypeError
    return bool(value)


def _json(value: Any) -> Any:
    """Lists, dicts, strings and numbers as JSON has them; tensors and arrays as lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError


def _layer(row: Any) -> LayerRow:
    if hasattr(row, "numel"):  # a LayerStats
        share = (row.nan + row.inf) / max(row.numel, 1)
        return LayerRow(str(row.name), float(row.norm), float(row.max_abs), share)
    values = row._asdict() if isinstance(row, LayerRow) else row
    numbers = {name: None if values.get(name) is None else float(values[name]) for name in COLUMNS}
    return LayerRow(str(values["name"]), **numbers)


def _layers(value: Iterable[Any]) -> tuple[LayerRow, ...]:
    return tuple(map(_layer, value))


# How each field is made of what it is given, and what that has to be.
_FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(METRICS, (_number, "a number")),
    "nonfinite_count": (_count, "a whole number of at least 0"),
    "clipped": (_flag, "true or false"),
    "skipped": (_flag, "true or false"),
    "step": (_whole, "a whole number"),
    "batch": (_json, "what JSON has"),
    "attempt": (_count, "a whole number of at least 0"),
    "layers": (_layers, "a sequence of LayerRow"),
}
NOT_NUMBERS = frozenset(("batch", "layers"))
# Of such a type nothing has to be checked, which is most of the time that a check takes.
AS_IT_IS = {**dict.fromkeys(METRICS, float), "clipped": bool, "skipped": bool, "step": int}
del AS_IT_IS["nonfinite_count"]
NAMES = tuple(field.name for field in fields(StepRecord))
_DEFAULTS = {field.name: field.default for field in fields(StepRecord)}


def checked(name: str, value: Any) -> Any:
    """A field's value on the host, other than None, as a record has it.

    Raises `TypeError` naming the field if it is of the wrong kind.
    """
    if type(value) is AS_IT_IS.get(name):
        return value
    convert, what = _FIELDS[name]
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError) as error:
        raise TypeError(f"{name} must be {what}, got {value!r:.80}") from error


def make_record(values: Mapping[str, Any]) -> StepRecord:
    """The record of values on the host, each checked; None is as good as missing.

    Raises `TypeError` naming a field of the wrong kind, or `step` if that is missing.
    """
    made = {name: checked(name, value) for name, value in values.items() if value is not None}
    if "step" not in made:
        raise TypeError("a record needs a step")
    return unchecked(made)


def unchecked(values: Mapping[str, Any]) -> StepRecord:
    """The record of values that were checked, `step` among them.

    As `StepRecord(**values)`, which sets the fields of a frozen dataclass one by one: 0.5 us, not
    2.1.
    """
    record = object.__new__(StepRecord)
    vars(record).update(_DEFAULTS, **values)
    return record
