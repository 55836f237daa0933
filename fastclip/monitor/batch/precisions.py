"""One batch in several precisions."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fastclip.monitor.batch.faults import backward_origin, forward_origin, largest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastclip.monitor.batch.probing import Probe

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class PrecisionReport(NamedTuple):
    """What a batch did in one precision.

    Attributes:
        loss: what `forward()` returned.
        grad_norm: the 2-norm of all gradients of the model's parameters.
        activation_max: the largest magnitude in any module's output; infinite where one is, NaN
            where one is.
        nonfinite: the name of the first module at fault, as `find_first_nonfinite` finds it: "" is
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
    `find_first_nonfinite`. `ValueError` for another precision.

    A precision that the device does not have, or in which a `RuntimeError` is raised (by an LSTM in
    fp16 on most CPUs), does not stop the others: once all have run, a `RuntimeError` names it and
    the module, and tells the reports of the others.
    """
    unknown = [name for name in precisions if name not in DTYPES]
    if unknown:
        raise ValueError(f"a precision is one of {', '.join(DTYPES)}, got {unknown[0]!r}")
    if "fp32" in precisions:
        _warn_of_halves(model)
    reports: dict[str, PrecisionReport] = {}
    failures: dict[str, _Failure] = {}
    for name in precisions:
        found = _run(model, forward, DTYPES[name])
        if isinstance(found, _Failure):
            failures[name] = found
        else:
            reports[name] = found
    if failures:
        first = next(iter(failures.values()))
        raise RuntimeError(_told(failures, reports)) from first.error
    return reports


class _Failure(NamedTuple):
    """An error, and the module that raised it; None: no module did."""

    error: RuntimeError
    module: str | None


def _run(
    model: "nn.Module", forward: "Callable[[], Tensor]", dtype: str
) -> PrecisionReport | _Failure:
    from fastclip.monitor.batch.probing import probed

    with probed(model) as probe:
        try:
            return _report(probe, model, forward, dtype)
        except RuntimeError as error:
            return _Failure(error, probe.raised_in(error))


def _report(
    probe: "Probe", model: "nn.Module", forward: "Callable[[], Tensor]", dtype: str
) -> PrecisionReport:
    from fastclip.monitor.batch.probing import autocast

    with autocast(model, dtype):
        loss = probe.forward(forward)
    probe.backward(loss)
    value, outputs = loss.item(), probe.outputs()
    origin = forward_origin(outputs, value)
    origin = origin or backward_origin(probe.gradients(), probe.leaves_finite())
    activation_max = largest(output.returned for output in outputs)
    module = None if origin is None else origin.module
    return PrecisionReport(value, probe.grad_norm(), activation_max, module)


def _told(failures: Mapping[str, _Failure], reports: Mapping[str, PrecisionReport]) -> str:
    lines = []
    for name, (error, module) in failures.items():
        by = "" if module is None else f"module {module!r} raised "
        lines.append(f"the model does not run in {name}: {by}{type(error).__name__}: {error}")
    if reports:
        lines.append(f"It does with precisions={tuple(reports)}:")
        lines += [f"{name}: {report}" for name, report in reports.items()]
    return "\n".join(lines)


def _warn_of_halves(model: "nn.Module") -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() < 4:
            text = (
                f"fp32 switches autocast off, and no more: parameter {name!r} is {parameter.dtype}"
            )
            warnings.warn(text, stacklevel=3)
            return
