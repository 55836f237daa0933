"""One batch in several precisions."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fastclip.monitor.batch.faults import backward_origin, forward_origin, largest

if TYPE_CHECKING:
    from torch import Tensor, nn

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class PrecisionReport(NamedTuple):
    """What a batch did in one precision.

    `loss`; `grad_norm`, the 2-norm of all gradients of the model's parameters; `activation_max`,
    the largest magnitude in any module's output: infinite where one is, NaN where one is;
    `nonfinite`, the name of the first module at fault, as `find_first_nonfinite` finds it: "" is
    the model itself, None that there is none.
    """

    loss: float
    grad_norm: float
    activation_max: float
    nonfinite: str | None

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def compare_precisions(
    model: "nn.Module",
    forward: "Callable[[], Tensor]",
    precisions: Sequence[str] = ("fp32", "bf16", "fp16"),
) -> dict[str, PrecisionReport]:
    """The same batch in each of `precisions`: loss, gradient norm, largest activation, the fault.

    >>> reports = compare_precisions(model, lambda: loss_function(model(batch), target))
    >>> for name, report in reports.items():
    ...     print(f"{name}  {report.loss:8.4g} {report.grad_norm:8.4g} "
    ...           f"{report.activation_max:8.4g}  {report.nonfinite}")
    fp32     6.931    2.417 9.13e+04  None
    bf16     6.938    2.422 9.11e+04  None
    fp16       nan      nan      inf  blocks.3.mlp.up

    `forward()` is called once per precision under `torch.autocast` of the devices of the model (the
    CPU for one without tensors), from the same state and the same random numbers; the backward pass
    is run without autocast. No loss is scaled but by `forward()`: without it, fp16 gradients under
    6e-8 are zero. An autocast within `forward()` wins over the one around it.

    "fp32" is autocast switched off, so parameters in 16 bits are computed with as they are; a
    `UserWarning` names one. What stays as it was, and what is raised for `forward()`, is as for
    `find_first_nonfinite`. `ValueError` for another precision, `RuntimeError` for one that the
    device does not have.
    """
    unknown = [name for name in precisions if name not in DTYPES]
    if unknown:
        raise ValueError(f"a precision is one of {', '.join(DTYPES)}, got {unknown[0]!r}")
    if "fp32" in precisions:
        _warn_of_halves(model)
    return {name: _report(model, forward, DTYPES[name]) for name in precisions}


def _report(model: "nn.Module", forward: "Callable[[], Tensor]", dtype: str) -> PrecisionReport:
    from fastclip.monitor.batch.probing import autocast, probed

    with probed(model) as probe:
        with autocast(model, dtype):
            loss = probe.forward(forward)
        probe.backward(loss)
        value, outputs = loss.item(), probe.outputs()
        origin = forward_origin(outputs, value)
        origin = origin or backward_origin(probe.gradients(), probe.leaves_finite())
        activation_max = largest(output.returned for output in outputs)
        module = None if origin is None else origin.module
        return PrecisionReport(value, probe.grad_norm(), activation_max, module)


def _warn_of_halves(model: "nn.Module") -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() < 4:
            text = (
                f"fp32 switches autocast off, and no more: parameter {name!r} is {parameter.dtype}"
            )
            warnings.warn(text, stacklevel=3)
            return
