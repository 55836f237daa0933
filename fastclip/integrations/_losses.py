"""The loss of a training step, as the model returned it."""

from typing import Any

import torch
from torch import Tensor, nn


class Losses:
    """The losses that a model returned since the last step, one for each batch."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._summed = False  # whether they are parts of a mean over all batches of the step
        self._handle: Any = None

    def attach(self, model: Any) -> None:
        self._handle = model.register_forward_hook(self._keep, with_kwargs=True)

    def detach(self) -> None:
        self._found = []
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _keep(self, model: nn.Module, inputs: Any, named: dict[str, Any], outputs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._found.append(loss.detach())
            self._summed = named.get("num_items_in_batch") is not None

    def take(self, ranks: int, whole: bool) -> Tensor | None:
        """Of this step, the same on all `ranks`; the next step begins. None if there was none.

        `whole`: parts of a mean are of one over the batches of all ranks, not of each rank.
        """
        found, self._found = self._found, []
        if not found:
            return None
        loss = torch.stack(found).sum()
        if not self._summed:
            loss /= len(found)
        if ranks > 1:
            torch.distributed.all_reduce(loss)
            if not (self._summed and whole):
                loss /= ranks
        return loss
