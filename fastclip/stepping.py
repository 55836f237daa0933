"""Taking an optimizer's step, or not."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastclip import folding, scaling
from fastclip.scaling import WithoutScaler


def take(
    optimizer: Optimizer, loss_scale: WithoutScaler, skip: Tensor | None, grad_scale: Tensor | None
) -> None:
    """Step unless `skip`, 0-d float32, is 1; None never skips. `grad_scale` is what the gradients
    are still to be divided by, for an optimizer that honours it.

    The optimizer skips by itself where it can, else the flag is read on the host.
    """
    honours = folding.honours(optimizer)
    claims = loss_scale.enabled and scaling.claims_flags(optimizer)
    scaler_reads = loss_scale.enabled and not claims
    if skip is not None and not scaler_reads and not (honours and folding.ready_to_skip(optimizer)):
        if skip.item() == 1:
            loss_scale.note_stepped(optimizer)
            return
    if claims and not honours:  # scaler.step would trust it with the flag, which would be lost
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
