"""What a clipper keeps from step to step: its counters, and its rule's state by parameter name."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fastclip.checks import LARGEST
from fastclip.rules import Rule, State

COUNTED = ("clipped", "skipped", "consecutive_skips")


class Counters:
    """Counts of steps, kept on the device of the last step."""

    def __init__(self) -> None:
        self.steps = 0
        self._counts = tuple(map(_counter, [0] * len(COUNTED)))

    def count(self, clipped: Tensor, skipped: Tensor) -> None:
        """Count a step of these 0-d bools."""
        if self._counts[0].device != clipped.device:
            self._counts = tuple(_sent(count, clipped.device) for count in self._counts)
        all_clipped, all_skipped, consecutive = self._counts
        # Not in place: tensors that were made in inference mode would not have it.
        self._counts = (all_clipped + clipped, all_skipped + skipped, (consecutive + 1) * skipped)
        self.steps += 1

    def read(self) -> dict[str, Tensor]:
        """Copies, int64, 0-d."""
        counts = {name: count.clone() for name, count in zip(COUNTED, self._counts, strict=True)}
        return {"steps": torch.full_like(self._counts[0], self.steps)} | counts

    def load(self, saved: Any) -> None:
        """Take what `read` gave, or the same as ints. Raises `ValueError`, with nothing changed, if
        it is not that."""
        if not isinstance(saved, Mapping):
            raise ValueError(f"the counters must be a mapping, got {type(saved).__name__}")
        steps, *counts = (_whole(saved, name) for name in ("steps", *COUNTED))
        self.steps, self._counts = steps, tuple(map(_counter, counts))


def _whole(saved: Mapping[str, Any], name: str) -> int:
    """The value of a counter."""
    if name not in saved:
        raise ValueError(f"the counters have no {name!r}")
    value = saved[name]
    number = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
    whole = isinstance(number, Integral) and not isinstance(number, bool)
    if not whole or not 0 <= int(number) < LARGEST:
        raise ValueError(
            f"the counter {name!r} must be a whole number of at least 0, got {value!r:.80}"
        )
    return int(number)


def _counter(value: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.int64, device="cpu")


class Remembered:
    """A rule's state. That of a rule per tensor is kept by name: a tensor without a gradient keeps
    its row for later, and a new name gets a new one.

    Nothing is changed in place: a shallow copy can be asked without being remembered.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._state: State | None = None
        self._rows: dict[str, int] = {}  # per tensor: where a name's row is
        self._asked: tuple[str, ...] = ()
        self._index: Tensor | None = None  # the rows of `_asked`; None: all of them in order

    def rows(self, names: tuple[str, ...], device: torch.device) -> State:
        """The state for gradients of these names, on their device."""
        if self._state is None:
            self._state = self._rule.init(0 if self._rule.per_tensor else len(names), device)
        if any(part.device != device for part in self._state.values()):
            self._state = {key: _sent(part, device) for key, part in self._state.items()}
            self._asked = ()
        if not self._rule.per_tensor or not self._state:
            return self._state
        if names != self._asked:
            self._ask(names, device)
        if self._index is None:
            return self._state
        return {key: part.index_select(0, self._index) for key, part in self._state.items()}

    def keep(self, new: State) -> None:
        """Take the state after a step, of the names that `rows` was asked for last."""
        if self._index is None or self._state is None:
            self._state = new
        else:
            index, old = self._index, self._state
            self._state = {key: old[key].index_copy(0, index, new[key]) for key in old}

    def _ask(self, names: tuple[str, ...], device: torch.device) -> None:
        fresh = [name for name in names if name not in self._rows]
        if fresh and self._state is not None:
            added = self._rule.init(len(fresh), device)
            self._state = {key: torch.cat([old, added[key]]) for key, old in self._state.items()}
            added_rows = {name: len(self._rows) + row for row, name in enumerate(fresh)}
            self._rows = self._rows | added_rows
        self._asked = names
        self._index = None
        if names != tuple(self._rows):
            index = torch.tensor([self._rows[name] for name in names], device="cpu")
            self._index = _sent(index, device)

    def checksum(self) -> int:
        """Of the state, with six digits of each number: the same on all ranks that have loaded the
        same. Waits for a device that it is on."""
        parts = sorted((self._state or {}).items())
        numbers = (f"{x:.6g}" for _, part in parts for x in part.flatten().tolist())
        return zlib.crc32(" ".join([*self._rows, *numbers]).encode())

    def dump(self) -> dict[str, Any]:
        """Copies: of a rule per tensor a dict for each name."""
        state = self._state or {}
        if not self._rule.per_tensor:
            return {key: part.clone() for key, part in state.items()}
        return {
            name: {key: part[row].clone() for key, part in state.items()}
            for name, row in self._rows.items()
        }

    def load(self, saved: Any, known: Collection[str]) -> list[str]:
        """Take what `dump` gave, of the `known` names; the others are returned.

        Raises `ValueError`, with nothing changed, if it is not a state of this rule.
        """
        if not isinstance(saved, Mapping):
            raise ValueError(f"the rule's state must be a mapping, got {type(saved).__name__}")
        rule, fresh = type(self._rule).__name__, self._rule.init(1, torch.device("cpu"))
        names: list[str] = []
        with torch.inference_mode(False):
            if self._rule.per_tensor:
                for name, parts in saved.items():
                    _check(parts, f"the state of {name!r:.80}", fresh, 1, rule)
                known = set(known)
                names = [name for name in saved if name in known]
                state = {
                    key: torch.stack([_own(saved[name][key]) for name in names]) if names else part
                    for key, part in self._rule.init(0, torch.device("cpu")).items()
                }
            else:
                if saved:
                    _check(saved, "the state", fresh, 0, rule)
                state = {key: _own(part) for key, part in saved.items()}
        for key, part in state.items():
            # a state that starts infinite may be so
            if fresh[key].isfinite().all() and not part.isfinite().all():
                raise ValueError(f"the state has a {key} that is not finite{_whose(part, names)}")
        self._state = state if saved else None
        self._rows = {name: row for row, name in enumerate(names)}
        self._asked, self._index = (), None
        return [str(name) for name in saved if name not in known] if self._rule.per_tensor else []


def _check(parts: Any, what: str, fresh: State, dims: int, rule: str) -> None:
    """Compare with a fresh state, whose first `dims` dimensions are those of the rows."""
    if not isinstance(parts, Mapping):
        raise ValueError(f"{what} must be a mapping of tensors, got {type(parts).__name__}")
    wanted = {key: _kind(part, dims) for key, part in fresh.items()}
    found = {key: _kind(part, 0) for key, part in parts.items()}
    if wanted != found:
        raise ValueError(f"{what} has {_described(found)}, where {rule} has {_described(wanted)}")


def _kind(part: Any, dims: int) -> str:
    if not isinstance(part, Tensor):
        return f"of type {type(part).__name__}"
    shape = f"{part.dtype}, shape {tuple(part.shape[dims:])}"
    return shape if part.layout == torch.strided else f"{shape}, {part.layout}"


def _described(kinds: Mapping[Any, str]) -> str:
    listed = sorted(f"{key} ({kind})" for key, kind in kinds.items())
    return ", ".join(listed) or "nothing"


def _whose(part: Tensor, names: Sequence[str]) -> str:
    """The first of `names` whose row is not finite, to end a sentence with."""
    if not names:
        return ""
    finite = part.isfinite().reshape(len(names), -1).all(1).tolist()
    return f", of {names[finite.index(False)]!r}"


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)  # else the copy waits
    return tensor.to(device)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
