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
            named = dict(gradients.without_ddp(self._module).named_parameters())
            entries, names = list(named.values()), list(named)
        trained = [entry if entry.requires_grad else None for entry in entries]
        listed = Listed(trained, names)
        if not listed.grads:
            return None
        with listed.attended():
            found = gradients.sort_out(listed)
            copies = [tensor.clone() for tensor in found.tensors]
        return Before(trained, names, replace(found, tensors=copies))


@dataclass(frozen=True)
class Before:
    """The parameters, each in its place, and what they were before an update."""

    parameters: list[Tensor | None]
    names: list[str] | None
    copies: Gradients

    @torch.no_grad()
    def measured(self) -> dict[str, Any]:
        """Fields of a record, on the device. The copies become the update."""
        listed = Listed(self.parameters, self.names)
        with listed.attended():
            after = gradients.sort_out(listed)
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
