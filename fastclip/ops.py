"""The operators that torch.compile and dispatch modes see: schemas, mutation, fakes.

Eager calls go round them: the operator layer costs about half a microsecond a tensor. An operator
takes any list that `fastclip.clip_grad_norm_` takes, but a gradient whose memory an earlier one
has already is counted and scaled once: its row of the table is that of an empty tensor.
"""

import torch
from torch import Tensor

from fastclip import passes
from fastclip import table as tables
from fastclip.gradients import Gradients, Listed

# What a backend keeps between calls (tables of addresses, partial sums) would lie in the
# memory pool of torch.compile's CUDA graphs, which takes that memory back before the next replay.
TAGS = [torch.Tag.cudagraph_unsafe]


@torch.library.custom_op("fastclip::measure", mutates_args=(), tags=TAGS)
def measure(grads: list[Tensor], p: float, inv_scale: Tensor | None = None) -> Tensor:
    if not grads:
        return tables.empty(p, 0, torch.device("cpu"))
    found, table = passes.measure(Listed(grads, None), p, inv_scale)
    return _every_row(found, table, len(grads), p)


@measure.register_fake
def _(grads: list[Tensor], p: float, inv_scale: Tensor | None = None) -> Tensor:
    return torch.empty(len(grads), tables.COLUMNS, dtype=torch.float64, device=_device(grads))


@torch.library.custom_op("fastclip::scale_", mutates_args=("grads",), tags=TAGS)
def scale_(grads: list[Tensor], coef: Tensor) -> None:
    if not grads:
        return
    listed = Listed(grads, None)
    if coef.dim() == 0:
        return passes.rescale_(listed, coef)
    found = passes.sort_out(listed)
    each = coef.unbind()
    passes.scale_(found, torch.stack([each[row] for row in _positions(found)]))


@scale_.register_fake
def _(grads: list[Tensor], coef: Tensor) -> None:
    torch._check(
        coef.dim() == 0 or tuple(coef.shape) == (len(grads),),
        lambda: f"coef must be 0-d or [{len(grads)}], got shape {tuple(coef.shape)}",
    )


@torch.library.custom_op("fastclip::clip_", mutates_args=("grads",), tags=TAGS)
def clip_(
    grads: list[Tensor],
    p: float,
    max_norm: Tensor,
    inv_scale: Tensor | None = None,
    skip: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    if not grads:
        table = tables.empty(p, 0, torch.device("cpu"))
        one = torch.ones((), dtype=torch.float64, device="cpu")
        return table, torch.zeros((), dtype=torch.float32, device="cpu"), one
    listed = Listed(grads, None)
    found, table, total, coef = passes.clip_measured_(listed, p, max_norm, inv_scale, skip)
    return _every_row(found, table, len(grads), p), total, coef


@clip_.register_fake
def _(
    grads: list[Tensor],
    p: float,
    max_norm: Tensor,
    inv_scale: Tensor | None = None,
    skip: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    device = _device(grads)
    table = torch.empty(len(grads), tables.COLUMNS, dtype=torch.float64, device=device)
    total = torch.empty((), dtype=tables.result_dtype(grads), device=device)
    return table, total, torch.empty((), dtype=torch.float64, device=device)


def _positions(found: Gradients) -> list[int]:
    """Where the rows were in the list, whose labels are positions."""
    return [int(name) for name in found.names]


def _every_row(found: Gradients, table: Tensor, n: int, p: float) -> Tensor:
    if len(table) == n:
        return table
    lines = dict(zip(_positions(found), table.unbind(), strict=True))
    blank = tables.empty(p, 1, table.device)[0]
    return torch.stack([lines.get(row, blank) for row in range(n)])


def _device(grads: list[Tensor]) -> torch.device:
    return grads[0].device if grads else torch.device("cpu")
