"""The learning rate that is cut while an optimizer steps, and at no other time."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Cut:
    """Multiplies the learning rates of `optimizers` by `factor()` around their steps.

    Hooks of `Optimizer.step` do it, so a scheduler, which reads and sets the rates between steps,
    never sees a cut one. After a step that raised, the hook that puts the rates back is not called:
    the next step does it, or whoever calls `restore`.
    """

    def __init__(self, optimizers: Iterable[Optimizer], factor: Callable[[], float]) -> None:
        self._optimizers = tuple(optimizers)
        self._factor = factor
        self._before: dict[int, list[tuple[dict[str, Any], Any]]] = {}  # rates to put back
        self._handles: list[Any] = []

    def attach(self) -> bool:
        """False if it is already."""
        if self._handles:
            return False
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._lower))
            self._handles.append(optimizer.register_step_post_hook(self._raise))
        return True

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.restore()

    def restore(self) -> None:
        """Put back what a step that raised has left cut."""
        for optimizer in self._optimizers:
            self._put_back(optimizer)

    def _lower(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back(optimizer)
        factor = self._factor()
        if factor == 1.0:
            return
        groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
        self._before[id(optimizer)] = [(group, _copied(group["lr"])) for group in groups]
        lowered: set[int] = set()  # groups may share a tensor
        for group in groups:
            rate = group["lr"]
            if not isinstance(rate, Tensor):
                group["lr"] = rate * factor
            elif id(rate) not in lowered:
                lowered.add(id(rate))
                with torch.no_grad():
                    rate.mul_(factor)

    def _raise(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back(optimizer)

    def _put_back(self, optimizer: Optimizer) -> None:
        for group, before in self._before.pop(id(optimizer), ()):
            rate = group["lr"]
            if isinstance(rate, Tensor) and isinstance(before, Tensor):
                with torch.no_grad():
                    rate.copy_(before)
            else:
                group["lr"] = before


def _copied(rate: Any) -> Any:
    """A rate that is a tensor is changed in place, since compiled steps hold on to it."""
    return rate.detach().clone() if isinstance(rate, Tensor) else rate
