"""Fails what reads a tensor's value on the host: on a GPU that is a wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip import table as tables

aten = torch.ops.aten
OPERATORS = (
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
)
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


class HostRead(AssertionError):
    """A value was read on the host."""


class NoReads(TorchDispatchMode):
    """Refuses the operators behind ``item()``, ``if tensor``, ``tensor[mask]`` and the like."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        masked = func is aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masked or func in OPERATORS:
            raise HostRead(f"{func} reads a value on the host")
        return func(*args, **(kwargs or {}))


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise HostRead(f"Tensor.{name} reads a value on the host")

    return refuse


@contextmanager
def no_methods() -> Iterator[None]:
    """The methods of Tensor that read its value raise. Unlike under a dispatch mode, fastclip takes
    the way it takes in training; what it looks up on the CPU alone is unknown, as elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "peek", lambda number: None)
        for name in READS:
            patch.setattr(Tensor, name, _refuse(name))
        yield


MODES: dict[str, Callable[[], Any]] = {"dispatch": NoReads, "methods": no_methods}
