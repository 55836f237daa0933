"""The loss of a training step, as the model returned it."""

from typing import Any

import torch
from torch import Tensor, nn


class Losses:
    """The losses that a model returned since the last step.

    A Trainer may call its model several times for one batch, so the loss of a batch is the mean
    over its calls.
    """

    def __init__(self) -> None:
        self._calls: tuple[Tensor | float, int] = 0.0, 0  # the sum, of a batch that is going on
        self._batches: tuple[Tensor | float, int] = 0.0, 0
        self._summed = False  # whether they are parts of a mean over all batches of the step
        self._handle: Any = None

    def attach(self, model: Any) -> None:
        self._handle = model.register_forward_hook(self._keep, with_kwargs=True)

    def detach(self) -> None:
        self._calls = self._batches = 0.0, 0
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _keep(self, model: nn.Module, inputs: Any, named: dict[str, Any], outputs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
        if isinstance(loss, Tensor) and loss.ndim == 0:
            total, calls = self._calls
            self._calls = total + loss.detach(), calls + 1
            self._summed = named.get("num_items_in_batch") is not None

    def end_batch(self) -> None:
        (loss, calls), (total, batches) = self._calls, self._batches
        if calls:
            self._batches = total + loss / calls, batches + 1
        self._calls = 0.0, 0

    def take(self, ranks: int, whole: bool) -> Tensor | None:
        """Of this step, the same on all `ranks`; the next step begins. None if there was none.

        `whole`: parts of a mean are of one over the batches of all ranks, not of each rank.
        """
        self.end_batch()
        (loss, batches), self._batches = self._batches, (0.0, 0)
        if not isinstance(loss, Tensor):
            return None
        if not self._summed:
            loss = loss / batches
        if ranks > 1:
            torch.distributed.all_reduce(loss)
            if not (self._summed and whole):
                loss = loss / ranks
        return loss
