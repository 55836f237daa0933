"""What is asked of a backend on one case. A trial returns its worst error in units of tolerance.

Infinity stands for what no tolerance forgives: a wrong count, NaN or infinity, or a gradient
written to where none may be.
"""

import math
from functools import cache

import torch
from torch import Tensor

from fastclip.backends import Backend
from fastclip.testing import compare, reference64
from fastclip.testing.cases import Case

COEF = 0.3  # not exact in any dtype: every product is rounded, twice in half types
# Two more bits than the element has: products are exact in float32, the only rounding is the last,
# and half types meet many ties.
EXACT_COEF = 0.75


@cache
def expected_table(case: Case, p: float, inv_scale: float = 1.0) -> Tensor:
    """The reference's table; computed once, asked for by every backend."""
    return reference64.table(_unscaled(case, inv_scale), p)


@cache
def expected_total(case: Case, p: float, inv_scale: float = 1.0) -> float:
    """The reference's norm of all elements."""
    return reference64.total_norm(_unscaled(case, inv_scale), p)


def _unscaled(case: Case, inv_scale: float) -> list[Tensor]:
    return [reference64.scaled(grad, inv_scale) for grad in case.tensors()]


def _written(after: list[Tensor], before: list[Tensor]) -> float:
    """0 if no gradient changed in any bit."""
    same = all(compare.bitwise_equal(a, b) for a, b in zip(after, before, strict=True))
    return 0.0 if same else math.inf


def measure(backend: Backend, case: Case, p: float, device: str) -> float:
    """The table, and that nothing is written."""
    grads = case.tensors(device)
    table = backend.measure(grads, p, None)
    error = compare.table_error(table.cpu(), expected_table(case, p), grads, p)
    return max(error, _written(grads, case.tensors(device)))


def _scaled(grads: list[Tensor], case: Case, coefs: list[float], norm_share: float = 0.0) -> float:
    """The worst error of scaled gradients; those with a coefficient of 1 must be untouched."""
    worst = 0.0
    for grad, before, coef in zip(grads, case.tensors(), coefs, strict=True):
        if coef == 1:
            error = _written([grad.cpu()], [before])
        else:
            error = compare.scale_error(grad, before, coef, norm_share)
        worst = max(worst, error)
    return worst


def scale(backend: Backend, case: Case, device: str) -> float:
    """One coefficient for all, then one per tensor with every third exactly 1, then 1 for all."""
    grads = case.tensors(device)
    n = len(grads)
    backend.scale_(grads, torch.tensor(EXACT_COEF, dtype=torch.float64, device=device))
    worst = math.inf if _scaled(grads, case, n * [EXACT_COEF]) > 0 else 0.0
    each = [1.0 if i % 3 == 2 else COEF / (1 + i % 5) for i in range(n)]
    grads = case.tensors(device)
    backend.scale_(grads, torch.tensor(each, dtype=torch.float64, device=device))
    worst = max(worst, _scaled(grads, case, each))
    grads = case.tensors(device)
    backend.scale_(grads, torch.tensor(1.0, dtype=torch.float64, device=device))
    return max(worst, _scaled(grads, case, n * [1.0]))


def clip(backend: Backend, case: Case, p: float, device: str) -> float:
    """All that clip_ returns and writes, for max_norm half the norm, twice the norm, 1 and inf."""
    total = expected_total(case, p)
    finite = total if math.isfinite(total) else 1.0
    thresholds = (finite / 2, 2 * (finite + reference64.EPS), 1.0, math.inf)
    return max(clip_at(backend, case, p, max_norm, device) for max_norm in thresholds)


def clip_at(backend: Backend, case: Case, p: float, max_norm: float, device: str) -> float:
    """One threshold."""
    total = expected_total(case, p)
    grads = case.tensors(device)
    table, norm, coef = backend.clip_(grads, p, max_norm, None)
    share = compare.norm_tolerance(grads)
    want = reference64.coefficient(total, max_norm)
    return max(
        compare.table_error(table.cpu(), expected_table(case, p), grads, p),
        compare.norm_error(norm.cpu(), total, grads),
        compare.coefficient_error(coef.cpu(), want, share),
        _scaled(grads, case, len(grads) * [want], share),
    )


def clip_with_inv_scale(
    backend: Backend, case: Case, p: float, inv_scale: float, device: str
) -> float:
    """A loss scale taken out in the same pass, without and with clipping."""
    inverse = torch.tensor(inv_scale, dtype=torch.float32, device=device)
    exact = float(inverse)  # what the backend is given: a third is not a third in float32
    total = expected_total(case, p, exact)
    worst = 0.0
    for max_norm in (math.inf, total / 2 if math.isfinite(total) else 1.0):
        grads = case.tensors(device)
        table, norm, coef = backend.clip_(grads, p, max_norm, inverse)
        share = compare.norm_tolerance(grads)
        want = reference64.coefficient(total, max_norm)
        worst = max(
            worst,
            compare.table_error(table.cpu(), expected_table(case, p, exact), grads, p, exact),
            compare.norm_error(norm.cpu(), total, grads),
            compare.coefficient_error(coef.cpu(), want, share),
            _scaled(grads, case, len(grads) * [want * exact], share),
        )
    return worst


def clip_skipping(backend: Backend, case: Case, p: float, device: str) -> float:
    """A non-finite element leaves every gradient as it was; without one, nothing is different."""
    half = torch.tensor(0.5, dtype=torch.float64, device=device)
    worst = 0.0
    for inv_scale in (None, half):
        total = expected_total(case, p, 1.0 if inv_scale is None else 0.5)
        max_norm = total / 2 if math.isfinite(total) else 1.0
        grads, plain = case.tensors(device), case.tensors(device)
        table, _, coef = backend.clip_(grads, p, max_norm, inv_scale, skip=True)
        backend.clip_(plain, p, max_norm, inv_scale)
        if bool(table[:, compare.NAN : compare.INF + 1].sum() > 0):
            plain = case.tensors(device)
            worst = worst if coef == 1 else math.inf
        worst = max(worst, _written(grads, plain))
    return worst
