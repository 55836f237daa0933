"""Whether code would make the host wait for a device, asked of tensors on the CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class NoWaiting(TorchDispatchMode):
    """Within this ``with`` block, what would wait were the tensors on a GPU is an `AssertionError`:
    ``item()``, ``if tensor``, ``tensor[mask]``, ``nonzero()``, ``torch.equal`` and
    ``torch.tensor(...)``, which would have to be sent there."""

    REFUSED = frozenset(
        {
            *(aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default),
            *(aten.nonzero.default, aten.index.Tensor, aten.masked_select.default),
            aten.lift_fresh.default,  # torch.tensor(...)
        }
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in self.REFUSED:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
