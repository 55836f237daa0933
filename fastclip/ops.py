"""The operators for torch.compile: schemas, which arguments are mutated, and fakes.

Eager calls go round them: the operator layer costs about half a microsecond a tensor. Each stands
for the backend function of its name (`fastclip.backends.contract`) on the tensors' device.
"""

import torch
from torch import Tensor

from fastclip import backends
from fastclip import table as tables


@torch.library.custom_op("fastclip::measure", mutates_args=())
def measure(grads: list[Tensor], p: float, inv_scale: Tensor | None = None) -> Tensor:
    if not grads:
        return tables.empty(p, 0, torch.device("cpu"))
    return backends.choose(grads[0].device).measure(grads, p, inv_scale)


@measure.register_fake
def _(grads: list[Tensor], p: float, inv_scale: Tensor | None = None) -> Tensor:
    return torch.empty(len(grads), tables.COLUMNS, dtype=torch.float64, device=_device(grads))


@torch.library.custom_op("fastclip::scale_", mutates_args=("grads",))
def scale_(grads: list[Tensor], coef: Tensor) -> None:
    if grads:
        backends.choose(grads[0].device).scale_(grads, coef)


@scale_.register_fake
def _(grads: list[Tensor], coef: Tensor) -> None:
    torch._check(
        coef.dim() == 0 or tuple(coef.shape) == (len(grads),),
        lambda: f"coef must be 0-d or [{len(grads)}], got shape {tuple(coef.shape)}",
    )


@torch.library.custom_op("fastclip::clip_", mutates_args=("grads",))
def clip_(
    grads: list[Tensor], p: float, max_norm: Tensor, inv_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if not grads:
        table = tables.empty(p, 0, torch.device("cpu"))
        return table, torch.zeros((), device="cpu"), torch.ones((), dtype=torch.float64)
    return backends.choose(grads[0].device).clip_(grads, p, max_norm, inv_scale)


@clip_.register_fake
def _(
    grads: list[Tensor], p: float, max_norm: Tensor, inv_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    device = _device(grads)
    table = torch.empty(len(grads), tables.COLUMNS, dtype=torch.float64, device=device)
    total = torch.empty((), dtype=tables.result_dtype(grads), device=device)
    return table, total, torch.empty((), dtype=torch.float64, device=device)


def _device(grads: list[Tensor]) -> torch.device:
    return grads[0].device if grads else torch.device("cpu")
