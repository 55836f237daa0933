"""Optimizers that apply the coefficient themselves.

A fused optimizer of torch divides the gradients by ``optimizer.grad_scale`` while it reads them,
and leaves parameters, moments and step counters alone if ``optimizer.found_inf`` is 1: a step
that clips or skips costs neither a pass over the gradients nor a wait for the device. The
attributes are the contract between torch.amp.GradScaler and its optimizers.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fastclip import table as tables
from fastclip.gradients import Gradients, Listed

_ATTRIBUTES = ("grad_scale", "found_inf")
_DECLARATION = "_step_supports_amp_scaling"

_CONTIGUOUS = Tensor.is_contiguous  # by map: half the time of a loop that calls it

SMALLEST = 2.0**-100  # one over it leaves a user's own grad_scale 27 binary orders of magnitude


def honours(optimizer: Optimizer) -> bool:
    """Whether the step that would run obeys both attributes.

    A wrapper may have all attributes of what it wraps and still swallow ours, so what counts is the
    function that runs, on this very object: torch's own, with every group fused, or that of a class
    which declares ``_step_supports_amp_scaling``, where no class overrides it that does not declare
    so itself.
    """
    step = _function(optimizer)
    if step is None:
        return False
    if step in _OF_TORCH:
        return all(group.get("fused") for group in optimizer.param_groups)
    kinds = type(optimizer).__mro__
    defined = [n for n, kind in enumerate(kinds) if _layers(vars(kind).get("step"))[-1] is step]
    declared = [n for n, kind in enumerate(kinds) if vars(kind).get(_DECLARATION) is True]
    if not (defined and declared and declared[0] <= defined[-1]):
        return False
    # An older contract: such a step asks the scaler instead.
    return "grad_scaler" not in inspect.signature(step).parameters


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether the step that would run is of one of torch's that have a fused form."""
    return _function(optimizer) in _OF_TORCH


def _function(optimizer: Optimizer) -> Any:
    """The function that ``optimizer.step()`` runs on this object in the end; None if that is not
    certain.

    Profiling hooks, ``torch.no_grad`` and schedulers decorate it. ``__wrapped__`` is a claim, made
    by ``functools.wraps`` for functions that call something else as well: it is believed of torch.
    """
    step = optimizer.step
    if getattr(step, "__self__", None) is not optimizer and not _refers_to(step, optimizer):
        return None
    *decorators, function = _layers(step)
    return function if all(map(_is_of_torch, decorators)) else None


def _layers(step: Any) -> list[Any]:
    """A function and those it decorates, the outermost first."""
    layers = [getattr(step, "__func__", step)]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    return layers


def _refers_to(step: Any, optimizer: Optimizer) -> bool:
    """Whether a scheduler has put this function there, for this object: it has a weak reference."""
    if not _is_of_torch(step):
        return False
    held = [cell.cell_contents for cell in step.__closure__ or ()]
    return any(isinstance(each, ref) and each() is optimizer for each in held)


def _is_of_torch(function: Any) -> bool:
    # not by __module__, which wraps() copies
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith("torch.")


_OF_TORCH = frozenset(_layers(kind.step)[-1] for kind in (Adam, AdamW, SGD, Adagrad))


def covers(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
    """Whether the optimizers' gradients together are those of `parameters`, no more and no fewer,
    and each once: one of a parameter that is listed twice would be divided twice."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    own = list(chain.from_iterable(groups))
    if len(own) == len(parameters) and all(map(is_, own, parameters)):
        return len(set(map(id, own))) == len(own)
    ids = _with_gradients(own)
    return len(set(ids)) == len(ids) and set(ids) == set(_with_gradients(parameters))


def aligned(parameters: Sequence[Tensor], listed: Listed) -> bool:
    """Whether each gradient lies in memory as its parameter does, without gaps.

    The fused kernels of torch for CPUs take it for granted: they go through both as through one run
    of memory, and write all of it when they divide.
    """
    if all(map(_CONTIGUOUS, parameters)) and all(map(_CONTIGUOUS, listed.grads)):
        return True
    pairs = zip(parameters, listed.tensors, strict=True)
    return all(grad is None or _alike(parameter, grad) for parameter, grad in pairs)


def suits(found: Gradients, listed: Listed) -> bool:
    """Whether dividing each gradient by one number is the same as rescaling them: not if one would
    be divided twice, nor on several devices, to which an optimizer sends it without waiting."""
    if found.tensors is listed.grads:  # a kernel has taken the list as it is
        return True
    same = len(found.tensors) == len(listed.grads) and all(map(is_, found.tensors, listed.grads))
    return same and len({tensor.device for tensor in found.tensors}) == 1


def split(factor: Tensor) -> tuple[Tensor, Tensor]:
    """`factor` as what is left to write, which is 1 for all but the smallest, and a `grad_scale`.

    One over the smallest factors is beyond float32, and gradients divided by infinity are 0.
    """
    share = factor.clamp(min=SMALLEST)
    return factor / share, share.reciprocal().to(torch.float32)


def ready_to_skip(optimizer: Optimizer) -> bool:
    """Whether a flag that is set leaves the state as if the step had not happened.

    The fused SGD of torch takes a momentum buffer that it has not written yet for written after a
    first step that the flag skipped, and raises TypeError where some parameters have a buffer and
    others, whose gradients come late, have none. Zeros give the same first momentum, ``momentum * 0
    + grad``, unless there is dampening: then the buffer has to stay missing.
    """
    if _function(optimizer) is not _layers(SGD.step)[-1]:
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
    if grad_scale is None and found_inf is None:
        yield
        return
    users = {name: vars(optimizer)[name] for name in _ATTRIBUTES if name in vars(optimizer)}
    own_scale, own_found = (users.get(name) for name in _ATTRIBUTES)
    is_1 = grad_scale is not None and tables.peek(grad_scale) == 1
    if is_1 and _function(optimizer) in _OF_TORCH:
        # its kernels write gradients back when they have divided them: 13 % of AdamW's CPU time
        grad_scale = None
    if grad_scale is not None and own_scale is not None:
        grad_scale = grad_scale * own_scale
    if found_inf is not None and own_found is not None:
        found_inf = torch.maximum(found_inf, own_found.to(found_inf.device))
    vars(optimizer)["grad_scale"] = own_scale if grad_scale is None else grad_scale
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


def _with_gradients(parameters: Sequence[Tensor]) -> list[int]:
    return [id(parameter) for parameter in parameters if parameter.grad is not None]


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    steps = _steps(a)
    sizes = [size for _, size in sorted(steps)]
    dense = [prod(sizes[:n]) for n in range(len(sizes))]
    return steps == _steps(b) and dense == [stride for stride, _ in sorted(steps)]


def _steps(x: Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension that is gone along."""
    return [pair for pair in zip(x.stride(), x.shape, strict=True) if pair[1] != 1]
