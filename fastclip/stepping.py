"""Taking the step of one optimizer or of several, or not."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastclip import folding, scaling
from fastclip.scaling import WithoutScaler


def take(
    optimizers: Sequence[Optimizer],
    loss_scale: WithoutScaler,
    skip: Tensor | None,
    grad_scale: Tensor | None,
) -> None:
    """Step all unless `skip`, 0-d float32, is 1, and then none; None never skips. `grad_scale` is
    what the gradients are still to be divided by, for optimizers that honour it.

    An optimizer skips by itself where it can; for all others the flag is read on the host, once.
    """
    if skip is not None:
        # a list: each optimizer is to be made ready to skip, whatever the others need
        unable = [each for each in optimizers if not _skips(each, loss_scale)]
        if unable and skip.item() == 1:
            for each in optimizers:
                loss_scale.note_stepped(each)
            return
    for each in optimizers:
        _take(each, loss_scale, skip, grad_scale)


def _skips(optimizer: Optimizer, loss_scale: WithoutScaler) -> bool:
    """Whether the step that would be called heeds the flag: the optimizer's or the scaler's."""
    if loss_scale.enabled and not scaling.claims_flags(optimizer):
        return True  # the scaler reads it
    return folding.honours(optimizer) and folding.ready_to_skip(optimizer)


def _take(
    optimizer: Optimizer, loss_scale: WithoutScaler, skip: Tensor | None, grad_scale: Tensor | None
) -> None:
    honours = folding.honours(optimizer)
    if loss_scale.enabled and scaling.claims_flags(optimizer) and not honours:
        # scaler.step would trust it with the flag, which would be lost
        optimizer.step()
        loss_scale.note_stepped(optimizer)
        return
    if skip is None and grad_scale is not None:
        skip = torch.zeros_like(grad_scale)  # where there is one attribute, a class may expect both
    if loss_scale.enabled:
        skip = None  # has been recorded with the scaler, which hands it
    handed = folding.handed(optimizer, grad_scale, skip, restore=not loss_scale.enabled)
    with handed if honours else nullcontext():
        loss_scale.step(optimizer)
