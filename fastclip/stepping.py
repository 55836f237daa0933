"""Taking the step of one optimizer or of several, or not."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastclip import caller, folding, scaling
from fastclip.scaling import WithoutScaler

_SINGLE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


def refuse_closure(optimizer: Optimizer) -> None:
    """Raise `TypeError` if the optimizer's step cannot be called without an argument."""
    step, of_class = optimizer.step, getattr(type(optimizer), "step", None)
    if of_class is not None and getattr(step, "__func__", None) is of_class:
        needed = _of_class(of_class)
    else:
        needed = None if folding.is_of_torch(optimizer) else _needed(step)
    if needed is not None:
        raise TypeError(
            f"the step of {type(optimizer).__name__} needs an argument ({needed}), and closures "
            "are not supported: call clip_ inside the closure, after backward, and the optimizer's "
            'step yourself. Nothing is skipped then: nonfinite="error" raises instead'
        )


def refuse_second(scaler: object) -> None:
    """Raise `TypeError` if it is an optimizer, passed behind the first."""
    if isinstance(scaler, Optimizer):
        raise TypeError(
            f"scaler must be a torch.amp.GradScaler, got the optimizer {type(scaler).__name__}: "
            "several optimizers are passed as a list, clipper.step([first, second])"
        )


def _needed(step: Callable[..., object]) -> str | None:
    """The first argument without which it cannot be called."""
    for parameter in inspect.signature(step).parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in _SINGLE
        if required and parameter.name != "self":  # which a scheduler's wrapper shows
            return parameter.name
    return None


# Looking takes 40 us. Not for functions of objects: they would be kept alive, with all they hold.
_of_class = lru_cache(maxsize=64)(_needed)


def warn_of_strangers(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
    """Warn of an optimizer that has none of the clipper's parameters; whether there was one."""
    mine = set(map(id, parameters))
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups if group["params"]]
        if mine and groups and not any(id(each) in mine for own in groups for each in own):
            warnings.warn(
                f"{type(optimizer).__name__} has none of the clipper's parameters, so the "
                "gradients that it steps with are not clipped. Give the clipper the parameters "
                "that the optimizer has, best as the module; only for an optimizer that makes "
                "copies of them (master weights) is this as it should be",
                stacklevel=caller.line()[1],
            )
            return True
    return False


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
    if honours and skip is None:
        folding.ready_to_skip(optimizer)  # for its other purpose: gradients that come late
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
