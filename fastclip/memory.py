"""What a clipper keeps from step to step: its counters, and its rule's state by parameter name."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.rules import Rule, State

COUNTED = ("clipped", "skipped", "consecutive_skips")


class Counters:
    """Counts of steps, kept on the device of the last step."""

    def __init__(self) -> None:
        self.steps = 0
        self._counts = tuple(torch.zeros((), dtype=torch.int64, device="cpu") for _ in COUNTED)

    def count(self, clipped: Tensor, skipped: Tensor) -> None:
        """Count a step of these 0-d bools."""
        if self._counts[0].device != clipped.device:
            self._counts = tuple(_sent(count, clipped.device) for count in self._counts)
        all_clipped, all_skipped, consecutive = self._counts
        all_clipped += clipped
        all_skipped += skipped
        consecutive.add_(1).mul_(skipped)
        self.steps += 1

    def read(self) -> dict[str, Tensor]:
        """Copies, int64, 0-d."""
        counts = {name: count.clone() for name, count in zip(COUNTED, self._counts, strict=True)}
        return {"steps": torch.full_like(self._counts[0], self.steps)} | counts

    def load(self, saved: Mapping[str, Any]) -> None:
        self._counts = tuple(_own(saved[name]) for name in COUNTED)
        self.steps = int(saved["steps"])


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

    def dump(self) -> dict[str, Any]:
        """Copies: of a rule per tensor a dict for each name."""
        state = self._state or {}
        if not self._rule.per_tensor:
            return {key: part.clone() for key, part in state.items()}
        return {
            name: {key: part[row].clone() for key, part in state.items()}
            for name, row in self._rows.items()
        }

    def load(self, saved: Mapping[str, Any], known: Collection[str]) -> list[str]:
        """Take what `dump` gave, of the `known` names; the others are returned.

        Raises `ValueError`, with nothing changed, if it is not a state of this rule.
        """
        extra: list[str] = []
        names: list[str] = []
        if self._rule.per_tensor:
            extra = [name for name in saved if name not in known]
            names = [name for name in saved if name in known]
            for name in names:
                self._check(saved[name], f"the state of {name!r}", 1)
            template = self._rule.init(0, torch.device("cpu"))
            state = {
                key: torch.stack([saved[name][key] for name in names]) if names else part
                for key, part in template.items()
            }
        else:
            state = {key: _own(part) for key, part in saved.items()}
            if saved:
                self._check(saved, "the state", 0)
        self._state = state if saved else None
        self._rows = {name: row for row, name in enumerate(names)}
        self._asked, self._index = (), None
        return extra

    def _check(self, saved: Mapping[str, Tensor], what: str, dims: int) -> None:
        """Compare with a fresh state, whose first `dims` dimensions are those of the rows."""
        fresh = self._rule.init(1, torch.device("cpu"))
        wanted = {key: (tuple(part.shape[dims:]), part.dtype) for key, part in fresh.items()}
        found = {key: (tuple(part.shape), part.dtype) for key, part in saved.items()}
        if wanted != found:
            raise ValueError(
                f"{what} has {_described(found)}, where {type(self._rule).__name__} has "
                f"{_described(wanted)}"
            )


def _described(parts: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> str:
    listed = [f"{key} ({dtype}, shape {shape})" for key, (shape, dtype) in sorted(parts.items())]
    return ", ".join(listed) or "nothing"


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)  # else the copy waits
    return tensor.to(device)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
