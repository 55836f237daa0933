"""Optimizers that apply the coefficient themselves.

A fused optimizer of torch divides the gradients by ``optimizer.grad_scale`` while it reads them,
and leaves parameters, moments and step counters alone if ``optimizer.found_inf`` is 1: a step
that clips or skips costs neither a pass over the gradients nor a wait for the device. The
attributes are the contract between torch.amp.GradScaler and its optimizers.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fastclip import table as tables
from fastclip.gradients import Gradients, Listed

_ATTRIBUTES = ("grad_scale", "found_inf")
_DECLARATION = "_step_supports_amp_scaling"

SMALLEST = 2.0**-100  # one over it leaves a user's own grad_scale 27 binary orders of magnitude


def _raw(function: Any) -> Any:
    """The function below decorators and methods."""
    raw = inspect.unwrap(function)
    return getattr(raw, "__func__", raw)


_OF_TORCH = frozenset(_raw(kind.step) for kind in (Adam, AdamW, SGD, Adagrad))


def honours(optimizer: Optimizer) -> bool:
    """Whether the step that would run obeys both attributes.

    A wrapper may have the attributes of what it wraps and still swallow ours, so what counts is
    the function that runs: torch's own, with every group fused, or that of a class which declares
    ``_step_supports_amp_scaling``, where no class overrides it that does not declare so itself.
    (Schedulers and profilers decorate a step, and say so by ``__wrapped__``.)
    """
    step = _raw(optimizer.step)
    if step in _OF_TORCH:
        return all(group.get("fused") for group in optimizer.param_groups)
    kinds = type(optimizer).__mro__
    defined = [n for n, kind in enumerate(kinds) if _raw(vars(kind).get("step", len)) is step]
    declared = [n for n, kind in enumerate(kinds) if vars(kind).get(_DECLARATION) is True]
    if not (defined and declared and declared[0] <= defined[-1]):
        return False
    # An older contract: such a step asks the scaler instead.
    return "grad_scaler" not in inspect.signature(step).parameters


def covers(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether the optimizer's gradients are those of `parameters`, no more and no fewer."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if set(map(id, own)) == set(map(id, parameters)):
        return True
    return _with_gradients(own) == _with_gradients(parameters)


def suits(found: Gradients, listed: Listed) -> bool:
    """Whether dividing each gradient by one float32 number is the same as rescaling them: not if
    one would be divided twice, nor in float64, for which that number is not exact enough."""
    return (
        len(found.tensors) == len(listed.grads)
        and all(map(is_, found.tensors, listed.grads))
        and len({(tensor.device, tensor.dtype in tables.WIDE) for tensor in found.tensors}) == 1
        and found.tensors[0].dtype not in tables.WIDE
    )


def split(factor: Tensor) -> tuple[Tensor, Tensor]:
    """`factor` as what is left to write, which is 1 for all but the smallest, and a `grad_scale`.

    One over the smallest factors is beyond float32, and gradients divided by infinity are 0.
    """
    share = factor.clamp(min=SMALLEST)
    return factor / share, share.reciprocal().to(torch.float32)


def ready_to_skip(optimizer: Optimizer) -> bool:
    """Whether a flag that is set leaves the state as if the step had not happened.

    The fused SGD of torch takes a momentum buffer that it has not written yet for written after a
    first step that the flag skipped. Zeros give the same first momentum, ``momentum * 0 + grad``,
    unless there is dampening: then the buffer has to stay missing.
    """
    if _raw(optimizer.step) is not _raw(SGD.step):
        return True
    for group in optimizer.param_groups:
        if not group["fused"] or group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is None or state.get("momentum_buffer") is not None:
                continue
            if group["dampening"] != 0:
                return False
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
    return True


@contextmanager
def handed(
    optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None, restore: bool
) -> Iterator[None]:
    """The two attributes, during a step; with what the user has set already, the product and the
    maximum. The user's are put back if `restore`, and after an error.
    """
    users = {name: vars(optimizer)[name] for name in _ATTRIBUTES if name in vars(optimizer)}
    own_scale, own_found = (users.get(name) for name in _ATTRIBUTES)
    if grad_scale is not None and own_scale is not None:
        grad_scale = grad_scale * own_scale
    if found_inf is not None and own_found is not None:
        found_inf = torch.maximum(found_inf, own_found.to(found_inf.device))
    grad_scale = own_scale if grad_scale is None else grad_scale
    if (
        grad_scale is not None
        and _raw(optimizer.step) in _OF_TORCH
        and tables.peek(grad_scale) == 1
    ):
        grad_scale = None  # torch's kernels write all gradients when they divide, be it by 1
    vars(optimizer)["grad_scale"] = grad_scale
    vars(optimizer)["found_inf"] = own_found if found_inf is None else found_inf
    try:
        yield
    except BaseException:
        restore = True
        raise
    finally:
        for name in _ATTRIBUTES:
            vars(optimizer).pop(name, None)
        if restore:
            vars(optimizer).update(users)


def _with_gradients(parameters: Sequence[Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters if parameter.grad is not None}
