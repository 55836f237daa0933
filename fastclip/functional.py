"""Gradient clipping and gradient statistics: drop-in for the functions of ``torch.nn.utils``.

`parameters` is a Tensor, an iterable of Tensors or of ``(name, Tensor)`` pairs, or a Module.
Gradients may be of any floating or complex dtype, mixed dtypes and devices, dense with any strides
or sparse COO. `foreach` is accepted for compatibility and has no effect.

Gradients may be DTensors (FSDP2, tensor parallel), of several meshes and beside ordinary tensors,
which then are taken to be the same on every process. Each process measures and rescales what it
holds; one small collective per mesh combines the statistics. Results are ordinary tensors, of the
whole gradients and with the same bits on every process. All processes of a mesh have to call, with
the same parameters; one without gradients takes part too.
"""

import math

import torch
from torch import Tensor

from fastclip import gradients, passes, watching
from fastclip import table as tables
from fastclip.checks import norm_order, number
from fastclip.gradients import Parameters, Tensors
from fastclip.policy import refuse
from fastclip.stats import GradStats

INSTEAD = "error_if_nonfinite=False clips all the same"


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Rescale all gradients in place so that their norm, as one vector, is at most `max_norm`.

    >>> total_norm = fastclip.clip_grad_norm_(model.parameters(), 1.0)

    As in torch they are multiplied by ``min(1, max_norm / (total_norm + 1e-6))``, unless that is 1.

    Args:
        parameters: what to clip the gradients of: a Tensor, an iterable of Tensors or of ``(name,
            Tensor)`` pairs, or an ``nn.Module``.
        max_norm: the threshold; infinity only measures. A one-element Tensor stays on its
            device, and its value is not checked.
        norm_type: the order p of the norm ``sum(abs(x)**p) ** (1 / p)``, any number or ``"inf"``;
            0 counts non-zero elements. See ``torch.linalg.vector_norm``.
        error_if_nonfinite: raise, not clip, if an element is NaN or infinite; waits for the device.
        foreach: accepted for compatibility, has no effect.

    Returns:
        The norm before clipping, 0-d, on the first gradient's device; float32, or float64 if any
        gradient is float64 or complex128. CPU float32 0 if there are no gradients.

    Raises:
        ValueError: `max_norm` is negative or NaN, or `norm_type` is NaN.
        TypeError: a gradient's dtype, layout or type is not supported.
        RuntimeError: a gradient's elements share memory; or `error_if_nonfinite` found a NaN or an
            infinity, and the message names the parameters. No gradient has been changed.
    """
    listed = gradients.of_parameters(parameters)
    with listed.attended():
        p, limit = norm_order(norm_type), _max_norm(max_norm)
        if not listed.grads:
            return torch.zeros((), device="cpu", dtype=torch.float32)
        done = watching.clips(listed.parameters, limit)
        listed.agree_on("clip_grad_norm_", p, limit, error_if_nonfinite)
        if error_if_nonfinite:
            found, table = passes.active(listed).measure(listed, p)
            refuse(table, listed, found, p, INSTEAD)
            total = tables.total_norm(table, p)
            passes.active(found).scale_(found, tables.coefficient(total, limit))
            total = total.to(tables.result_dtype(found.tensors))
        else:
            total = passes.active(listed).clip_(listed, p, limit)
    done()
    return total


def get_total_norm(
    tensors: Tensors,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all `tensors` as one vector. Nothing is changed.

    Args:
        tensors: a Tensor, or an iterable of Tensors or of ``(name, Tensor)`` pairs, which are
            measured themselves and not their ``.grad``; None entries are skipped.
        norm_type: the order p of the norm, as in `clip_grad_norm_`.
        error_if_nonfinite: raise if an element is NaN or infinite; waits for the device.
        foreach: accepted for compatibility, has no effect.

    Returns:
        The norm, 0-d, on the first tensor's device; float32, or float64 if any tensor is float64 or
        complex128. CPU float32 0 if there are no tensors.

    Raises:
        ValueError: `norm_type` is NaN.
        TypeError: the dtype, layout or type of a tensor is not supported.
        RuntimeError: a tensor's elements share memory; or `error_if_nonfinite` found a NaN or an
            infinity, and the message names the tensors.
    """
    listed = gradients.of_tensors(tensors)
    with listed.attended():
        p = norm_order(norm_type)
        if not listed.grads:
            return torch.zeros((), device="cpu", dtype=torch.float32)
        listed.agree_on("get_total_norm", p, error_if_nonfinite)
        found, table = passes.active(listed).measure(listed, p)
    if error_if_nonfinite:
        refuse(table, listed, found, p, INSTEAD)
    return tables.total_norm(table, p).to(tables.result_dtype(found.tensors))


def clip_grads_with_norm_(
    parameters: Parameters,
    max_norm: float | Tensor,
    total_norm: float | Tensor,
    foreach: bool | None = None,
) -> None:
    """Rescale all gradients in place by ``min(1, max_norm / (total_norm + 1e-6))``.

    The second half of `clip_grad_norm_`, for a norm that is known already. When the factor is 1 no
    gradient is written.

    Args:
        parameters: what to rescale the gradients of, as in `clip_grad_norm_`.
        max_norm: the threshold, as in `clip_grad_norm_`.
        total_norm: a number of at least 0 or a one-element Tensor, whose value is not checked; say
            from `get_total_norm` and reduced over processes.
        foreach: accepted for compatibility, has no effect.

    Raises:
        ValueError: `max_norm` or `total_norm` is negative or NaN, or has not one element.
        TypeError: a gradient's dtype, layout or type is not supported.
        RuntimeError: a gradient's elements share memory. No gradient has been changed.
    """
    limit = _max_norm(max_norm)
    if not isinstance(total_norm, Tensor):
        total_norm = torch.tensor(
            _at_least_0(total_norm, "total_norm must be a number of at least 0 or a Tensor"),
            dtype=torch.float64,
            device="cpu",
        )
    if total_norm.numel() != 1:
        raise ValueError(f"total_norm must have one element, got shape {tuple(total_norm.shape)}")
    listed = gradients.of_parameters(parameters)
    if listed.grads:
        done = watching.clips(listed.parameters, limit)
        total = gradients.whole(total_norm).to(listed.grads[0].device, torch.float64).reshape(())
        passes.active(listed).rescale_(listed, tables.coefficient(total, limit))
        done()


@torch.no_grad()
def clip_grad_value_(
    parameters: Parameters, clip_value: float, foreach: bool | None = None
) -> None:
    """Clamp every gradient element in place to ``[-clip_value, clip_value]``; NaN stays NaN.

    As ``torch.nn.utils.clip_grad_value_`` does. This turns the gradient, where a clip by norm only
    shortens it. Sparse gradients are clamped by their coalesced values, DTensors without a
    collective.

    Args:
        parameters: what to clamp the gradients of, as in `clip_grad_norm_`.
        clip_value: the largest magnitude of an element, a number of at least 0.
        foreach: accepted for compatibility, has no effect.

    Raises:
        ValueError: `clip_value` is negative or NaN.
        TypeError: a gradient is complex, a DTensor that has not been reduced, or its dtype, layout
            or type is not supported.
        RuntimeError: a gradient's elements share memory.
    """
    value = _at_least_0(clip_value, "clip_value must be a number of at least 0")
    listed = gradients.of_parameters(parameters)
    if listed.spread is not None:
        listed.spread.refuse_partial(listed.labels(), listed.called)
    found = passes.active(listed).sort_out(listed)
    for name, tensor in zip(found.names, found.tensors, strict=True):
        if tensor.is_complex():
            raise TypeError(
                f"{listed.called(name)} is complex ({tensor.dtype}), which has no order"
            )
    done = watching.clips(listed.parameters, value)
    for tensor in found.tensors:
        # clamp_ refuses a finite bound that the dtype does not hold.
        bound = value if value == math.inf else min(value, torch.finfo(tensor.dtype).max)
        tensor.clamp_(-bound, bound)
    for gradient, coalesced in found.sparse.values():
        gradient.copy_(coalesced)
    done()


def grad_stats(parameters: Parameters, norm_type: float | str = 2.0) -> GradStats:
    """Norm, maximum, NaN, infinity and zero counts of every gradient, from one read of them.

    >>> stats = fastclip.grad_stats(model)
    >>> print(stats.cpu())

    Nothing is changed and nothing waits for the device.

    Args:
        parameters: what to measure the gradients of, as in `clip_grad_norm_`; without a gradient a
            parameter has no row.
        norm_type: the order p of the norms, as in `clip_grad_norm_`.

    Returns:
        `GradStats` with a row for each gradient, on the first gradient's device.

    Raises:
        ValueError: `norm_type` is NaN.
        TypeError: a gradient's dtype, layout or type is not supported.
        RuntimeError: a gradient's elements share memory.
    """
    listed = gradients.of_parameters(parameters)
    with listed.attended():
        p = norm_order(norm_type)
        if not listed.grads:
            none = tables.empty(p, 0, torch.device("cpu"))
            return GradStats.measured(gradients.Gradients.of_rows(()), none, p, torch.float32)
        listed.agree_on("grad_stats", p)
        found, table = passes.active(listed).measure(listed, p)
    return GradStats.measured(found, table, p, tables.result_dtype(found.tensors))


def _at_least_0(value: object, rule: str) -> float:
    found = number(value, rule)
    if not found >= 0:  # NaN too
        raise ValueError(f"{rule}, got {value}")
    return found


def _max_norm(max_norm: float | Tensor) -> float | Tensor:
    """The threshold as a float of at least 0 or a 0-d Tensor, whose value is not looked at."""
    if isinstance(max_norm, Tensor):
        if max_norm.numel() != 1:
            raise ValueError(f"max_norm must have one element, got shape {tuple(max_norm.shape)}")
        return max_norm.detach().reshape(())
    return _at_least_0(max_norm, "max_norm must be a number of at least 0 or a one-element Tensor")
