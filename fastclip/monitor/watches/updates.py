"""What an update does to parameters: measured from a copy of them and from what they are then."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastclip import gradients, passes
from fastclip import table as tables
from fastclip.gradients import Gradients, Listed, Parameters
from fastclip.monitor.layers import LayerTable

_FLOAT32 = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


class Watched:
    """Parameters as the caller passed them: a module is read again for each update."""

    def __init__(self, parameters: Parameters) -> None:
        self._module = parameters if isinstance(parameters, nn.Module) else None
        self._entries: tuple[list[Tensor], list[str] | None] = ([], None)
        if self._module is None:
            self._entries = gradients.entries_of(parameters, none_allowed=False)

    @torch.no_grad()
    def before(self) -> "Before | None":
        """A copy of those that require a gradient; None if none does."""
        entries, names = self._entries
        if self._module is not None:
            named = _named(self._module)
            entries, names = list(named.values()), list(named)
        trained = [entry if entry.requires_grad else None for entry in entries]
        listed = Listed(trained, names)
        if not listed.grads:
            return None
        with listed.attended():
            found = gradients.sort_out(listed)
            copies = [tensor.clone() for tensor in found.tensors]
        return Before(self._module, trained, names, replace(found, tensors=copies))


@dataclass(frozen=True)
class Before:
    """The parameters, each in its place, and what they were before an update."""

    module: nn.Module | None
    parameters: list[Tensor | None]
    names: list[str] | None
    copies: Gradients

    @torch.no_grad()
    def measured(self) -> dict[str, Any]:
        """Fields of a record, on the device. The copies become the update. `RuntimeError` if a
        parameter has gone or has another shape."""
        listed = Listed(self._now(), self.names)
        with listed.attended():
            after = gradients.sort_out(listed)
            _require_the_same(self.copies, after)
            of_copies = passes.measure_again(self.copies, 2.0)
            of_parameters = passes.measure_again(after, 2.0)
            _subtract_(self.copies.tensors, after.tensors)
            of_update = passes.measure_again(self.copies, 2.0)
        dtype = tables.result_dtype(after.tensors)
        ratio = _ratio(tables.total_norm(of_update, 2.0), tables.total_norm(of_copies, 2.0))
        ratios = _ratio(tables.norms(of_update, 2.0), tables.norms(of_copies, 2.0))
        columns = {
            "param_norm": tables.norms(of_parameters, 2.0).to(dtype),
            "update_ratio": ratios.to(dtype),
        }
        return {
            "param_norm": tables.total_norm(of_parameters, 2.0).to(dtype),
            "update_ratio": ratio.to(dtype),
            "layers": LayerTable(after.names, columns),
        }

    def _now(self) -> list[Tensor | None]:
        """The parameters that the module has now, which ``load_state_dict(assign=True)`` exchanges
        for others; of an iterable, those that it had."""
        if self.module is None or self.names is None:
            return self.parameters
        named, pairs = _named(self.module), zip(self.names, self.parameters, strict=True)
        return [None if each is None else named.get(name) for name, each in pairs]


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(gradients.unwrapped(module).named_parameters())


def _require_the_same(before: Gradients, after: Gradients) -> None:
    shapes = {name: t.shape for name, t in zip(after.names, after.tensors, strict=True)}
    for name, tensor in zip(before.names, before.tensors, strict=True):
        if shapes.get(name) != tensor.shape:
            raise RuntimeError(
                f"within the block of a ParameterWatch the parameter {name!r} was removed or "
                "replaced by one of another shape: a block goes around one update"
            )


def _subtract_(copies: list[Tensor], parameters: list[Tensor]) -> None:
    """Make of each copy the update, but for its sign. In its own dtype a half type would round the
    difference of a parameter that changed its magnitude."""
    exact = []
    for place, parameter in enumerate(parameters):
        wide = _FLOAT32.get(parameter.dtype)
        if wide is None:
            exact.append(place)
        else:
            copies[place] = copies[place].to(wide).sub_(parameter)
    if exact:
        torch._foreach_sub_([copies[n] for n in exact], [parameters[n] for n in exact])


def _ratio(update: Tensor, before: Tensor) -> Tensor:
    return torch.where(update == 0, 0.0, update / before)
