"""A threshold per unit, from the norm of the parameter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastclip import passes
from fastclip.backends import units as by_unit
from fastclip.rules.contract import Decision, Measured, State, UnsuitableGradient, require


@dataclass(frozen=True)
class AGC:
    """Clip each unit of a gradient to a share of its parameter's norm (NFNets, arXiv 2102.06171).

    A unit is a slice along the first dimension (the weights of one output), or the whole of a
    tensor with fewer than two dimensions. With its 2-norms w in the parameter and g in the
    gradient, whatever the norm order of the clipper::

        threshold = clip_factor * max(w, eps)
        coef = threshold / max(g, 1e-6) where g > threshold, else 1

    `eps` lets parameters learn that start at zero. The paper leaves the last, classifying layer
    out: give the clipper the other parameters. There is no state. Each step it reads the
    parameters; the gradients' unit norms come with their statistics on the CPU, elsewhere by a
    second read.

    `Decision.units` has the coefficients; `coef` and `threshold` are the smallest of each tensor.

    Raises `UnsuitableGradient`, a `TypeError`, for sparse and complex gradients and for those that
    do not have an element of their own for each of the parameter's. A clipper raises `TypeError`
    for DTensors over several processes, of which a unit may lie on more than one.
    """

    clip_factor: float = 0.01
    eps: float = 1e-3

    per_tensor: ClassVar[bool] = True
    by_unit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require("clip_factor", self.clip_factor, "a finite number over 0", lambda x: x > 0)
        require("eps", self.eps, "a finite number of at least 0", lambda x: x >= 0)

    def init(self, n: int, device: torch.device) -> State:
        return {}

    @torch.no_grad()
    def decide(self, measured: Measured, state: State) -> Decision:
        pairs = list(zip(measured.parameters, measured.gradients, strict=True))
        for row, (parameter, gradient) in enumerate(pairs):
            _refuse_unsuitable(row, parameter, gradient)
        units: dict[int, Tensor] = {}
        smallest: dict[int, Tensor] = {}
        for device in dict.fromkeys(gradient.device for _, gradient in pairs):
            rows = [row for row, (_, gradient) in enumerate(pairs) if gradient.device == device]
            counts = [by_unit.count(pairs[row][1]) for row in rows]
            columns = self._decide([pairs[row] for row in rows], measured)
            lowest = torch.stack([_lowest(part) for part in columns.split(counts, 1)])
            units |= zip(rows, columns[0].split(counts), strict=True)
            smallest |= zip(rows, lowest.to(measured.norms.device).unbind(), strict=True)
        if not pairs:
            return Decision(measured.norms, measured.norms, state, [])
        lows = torch.stack([smallest[row] for row in range(len(pairs))])
        every = [units[row] for row in range(len(pairs))]
        return Decision(lows[:, 0], lows[:, 1], state, every)

    def _decide(self, pairs: Sequence[tuple[Tensor, Tensor]], measured: Measured) -> Tensor:
        """Coefficients and thresholds of the units of tensors on one device, ``[2, units]``."""
        parameters, gradients = zip(*pairs, strict=True)
        unit_norms = passes.active().unit_norms
        # All units at once: on a GPU every operation on a tensor is a launch.
        norms = measured.unit_norms
        if norms is None:
            norms = unit_norms(gradients)
        if measured.inv_scale is not None:
            norms = norms * measured.inv_scale.to(norms.device, torch.float64)
        thresholds = unit_norms(parameters).clamp(min=self.eps) * self.clip_factor
        within = norms <= thresholds  # false for NaN, which so reaches the coefficient
        coefs = torch.where(within, 1.0, thresholds / norms.clamp(min=1e-6))
        return torch.stack([coefs, thresholds])


def _lowest(columns: Tensor) -> Tensor:
    """The smallest coefficient and threshold, ``[2]``; of no units 1 and infinity."""
    if columns.shape[1] > 0:
        return columns.amin(1)
    return torch.stack([columns.new_ones(()), columns.new_full((), math.inf)])


def _refuse_unsuitable(row: int, parameter: Tensor, gradient: Tensor) -> None:
    if gradient.layout != torch.strided:
        what = f"has layout {gradient.layout}"
    elif gradient.is_complex():
        what = f"is complex ({gradient.dtype})"
    elif gradient.shape != parameter.shape:
        stored, whole = tuple(gradient.shape), tuple(parameter.shape)
        what = f"is stored in shape {stored} for a parameter of shape {whole} (sparse or expanded)"
    else:
        return
    raise UnsuitableGradient(
        row,
        f"{what}: AGC clips each unit by itself and needs a dense real gradient with an element "
        "for each of the parameter's; leave this parameter out of the clipper, or take a rule "
        "that clips whole tensors (AdaGC) or the global norm",
    )
