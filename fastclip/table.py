"""The statistics table, and what follows from it.

A table is a float64 tensor of shape ``[n_tensors, 5]``, one row per gradient tensor:

=======  =====================================================================================
POWER    sum of ``abs(x)**p``; for p = inf the maximum of ``abs(x)``, for -inf the minimum, for 0
         the number of elements other than zero. Non-finite elements take part.
MAX_ABS  maximum of ``abs(x)`` over the finite elements, 0 if there is none
NAN      number of NaN elements
INF      number of +inf and -inf elements
ZERO     number of elements equal to zero
=======  =====================================================================================

Everything here is a tensor operation: nothing waits for a device.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

POWER, MAX_ABS, NAN, INF, ZERO = range(5)
COLUMNS = 5
EPS = 1e-6  # added to the total norm before the division, as torch.nn.utils does

# The orders in which POWER of scaled elements follows from that of the elements. Of others it may
# overflow, or vanish, where that of the scaled elements does not: 70 and a scale of 2**16.
SCALABLE = frozenset({0.0, 1.0, 2.0, math.inf})

WIDE = frozenset({torch.float64, torch.complex128})


def result_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype norms are returned in: float64 if any tensor is as wide, else float32."""
    wide = not WIDE.isdisjoint([tensor.dtype for tensor in tensors])
    return torch.float64 if wide else torch.float32


def empty(p: float, n: int, device: torch.device) -> Tensor:
    """The rows of `n` tensors without elements."""
    rows = torch.zeros(n, COLUMNS, dtype=torch.float64, device=device)
    if p == -math.inf:
        rows[:, POWER] = math.inf
    return rows


def combine(rows: Tensor, p: float) -> Tensor:
    """The row, ``[5]``, of all elements that the rows of ``[n, 5]`` describe; n may be 0."""
    rows = torch.cat([empty(p, 1, rows.device), rows])
    row = rows.sum(0)
    row[MAX_ABS] = rows[:, MAX_ABS].amax()
    if math.isinf(p):
        powers = rows[:, POWER]
        row[POWER] = powers.amax() if p > 0 else powers.amin()
    return row


def root(power: Tensor, p: float) -> Tensor:
    """From the POWER column to norms, in float64."""
    if p == 2:
        return power.sqrt()
    if p in (0, 1) or abs(p) == math.inf:  # math.isinf refuses numbers that torch.compile follows
        return power
    return power ** (1.0 / p)


def norms(table: Tensor, p: float) -> Tensor:
    """The p-norm of each row, ``[n]``, float64."""
    return root(table[:, POWER], p)


def total_norm(table: Tensor, p: float) -> Tensor:
    """The p-norm of all elements as one vector, 0-d, float64."""
    powers = table.select(1, POWER)
    if abs(p) != math.inf:
        return root(powers.sum(), p)
    if not len(powers):
        powers = empty(p, 1, table.device)[:, POWER]
    return powers.amax() if p > 0 else powers.amin()


def coefficient(total: Tensor, max_norm: float | Tensor) -> Tensor:
    """``min(1, max_norm / (total + EPS))``, 0-d, float64.

    An infinite `max_norm` gives 1 whatever the total; a NaN stays NaN.
    """
    threshold = limit(max_norm, total.device)
    coef = (threshold / (total + EPS)).clamp(max=1.0)  # clamp keeps NaN
    if isinstance(max_norm, Tensor) or torch.compiler.is_compiling():
        return coef.masked_fill(threshold == math.inf, 1.0)
    return torch.ones_like(coef) if max_norm == math.inf else coef


def limit(max_norm: float | Tensor, device: torch.device) -> Tensor:
    """A threshold, 0-d, float64, on `device`."""
    if isinstance(max_norm, Tensor):
        return max_norm.to(device, torch.float64).reshape(())
    if torch.compiler.is_compiling():  # one trace for all numbers, where `full` has one for each
        return torch.ones((), dtype=torch.float64, device=device) * max_norm
    # filled in on the device: sending it there would wait for it
    return torch.full((), max_norm, dtype=torch.float64, device=device)


def found_nonfinite(table: Tensor) -> Tensor:
    """Whether an element is NaN or infinite, 0-d bool."""
    return table.narrow(1, NAN, 2).sum() > 0


def peek(number: Tensor) -> float | None:
    """The value of a 0-d tensor on the CPU, read without an operator; None elsewhere, where asking
    would wait."""
    value: Any = number.tolist() if number.device.type == "cpu" else None
    return value


def factors(
    table: Tensor,
    total: Tensor,
    max_norm: float | Tensor,
    inv_scale: Tensor | None,
    skip: bool,
) -> tuple[Tensor, Tensor]:
    """The coefficient, and what elements are to be multiplied by with a loss scale taken out.

    Both are 1 if `skip` is asked for and an element is not finite.
    """
    coef = coefficient(total, max_norm)
    factor = coef if inv_scale is None else coef * inv_scale.to(coef.device)
    if skip:
        found = found_nonfinite(table)
        coef, factor = torch.where(found, 1.0, coef), torch.where(found, 1.0, factor)
    return coef, factor


def unscale(table: Tensor, p: float, inv_scale: Tensor | None) -> Tensor:
    """The table of ``x * inv_scale`` from that of ``x``: no element has to be multiplied for it.

    In orders that are not `SCALABLE`, POWER has to be that of ``x * inv_scale`` already.
    """
    if inv_scale is None:
        return table
    factor = inv_scale.to(table.device, torch.float64).abs()
    table = table.clone()
    table[:, MAX_ABS] *= factor
    if p in SCALABLE:
        table[:, POWER] *= factor if math.isinf(p) else factor**p
    return table


def repeat(table: Tensor, p: float, counts: Sequence[int]) -> Tensor:
    """The table of tensors whose stored elements stand for `counts` elements each."""
    if all(count == 1 for count in counts):
        return table
    factor = torch.tensor(counts, dtype=torch.float64, device="cpu")
    if table.device.type == "cuda":
        factor = factor.pin_memory()  # else the copy waits for the device
    factor = factor.to(table.device, non_blocking=True)
    table = table.clone()
    table[:, NAN : ZERO + 1] *= factor[:, None]
    if not math.isinf(p):
        table[:, POWER] *= factor
    return table
