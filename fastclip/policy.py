"""What to do about gradients with NaN or infinite elements."""

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fastclip import passes
from fastclip import table as tables
from fastclip.gradients import Gradients, Listed
from fastclip.ranks import said

Policy = Literal["skip", "zero", "error", "propagate"]
POLICIES: tuple[str, ...] = get_args(Policy)

SHOWN = 10  # offenders an error message lists
_COMPILED = (
    "to raise for gradients that are not finite the host looks at a value, which ends the graph: "
    "leave out error_if_nonfinite=True, call fastclip outside of what is compiled, or compile "
    "without fullgraph=True"
)


def refuse(table: Tensor, listed: Listed, found: Gradients, p: float, instead: str) -> None:
    """Raise `RuntimeError` if an element is NaN or infinite, and say what could be done `instead`.

    The counts tell, where a norm may just overflow. Waits for the device.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=_COMPILED)
    counts = table[:, tables.NAN : tables.INF + 1].tolist()
    bad = [(row, nan, inf) for row, (nan, inf) in enumerate(counts) if nan or inf]
    if not bad:
        return
    held = found.contributions
    where = ["" for _ in counts]
    if held is not None:
        where = [f"; on {said(ranks)}" if ranks else "" for ranks in held.offenders()]
    shown = ", ".join(
        f"{listed.called(found.names[row])} ({nan:.0f} NaN, {inf:.0f} inf{where[row]})"
        for row, nan, inf in bad[:SHOWN]
    )
    more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    named = ""
    if listed.names is None:
        named = ". Pass the module or (name, Tensor) pairs to have names instead of positions"
    raise RuntimeError(
        f"the gradients are not finite, so their norm of order {p:g} means nothing: {shown}{more}"
        f"{named}. No gradient has been changed; {instead}"
    )


def zero_(found: Gradients, table: Tensor, p: float) -> Tensor:
    """Set elements that are not finite to 0, and return the table with the norms of the others.

    On the CPU, where looking costs nothing, gradients without such elements are not touched;
    elsewhere they are written and measured again whatever they hold, so as not to wait.
    """
    if _known_finite(table):
        return table
    for tensor in found.tensors:
        _zero_(tensor)
    for gradient, coalesced in found.sparse.values():
        gradient.copy_(coalesced)
    return _with_norms(table, passes.active(found).measure_again(found, p))


def zeroed(found: Gradients, table: Tensor, p: float) -> tuple[Gradients, Tensor]:
    """The gradients that `zero_` would leave, as copies, and the table it would give."""
    if _known_finite(table):
        return found, table
    found = replace(found, tensors=[_zero_(tensor.clone()) for tensor in found.tensors], sparse={})
    return found, _with_norms(table, passes.active(found).measure_again(found, p))


def _known_finite(table: Tensor) -> bool:
    return tables.peek(tables.found_nonfinite(table)) == 0


def _with_norms(table: Tensor, again: Tensor) -> Tensor:
    powers = again[:, tables.POWER : tables.POWER + 1]
    return torch.cat([powers, table[:, tables.POWER + 1 :]], 1)


def _zero_(tensor: Tensor) -> Tensor:
    if tensor.is_complex():  # a part may be finite
        return tensor.masked_fill_(~tensor.isfinite(), 0)
    return tensor.nan_to_num_(0.0, 0.0, 0.0)
