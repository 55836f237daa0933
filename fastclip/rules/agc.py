"""A threshold per unit, from the norm of the parameter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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

    Of DTensors the units are those of the whole tensor. Sums of squares of units that lie on
    several processes are added over these, in one collective for each set of them.

    Args:
        clip_factor: the largest norm of a unit's gradient, as a share of its parameter's; over 0.
        eps: the least norm of a parameter's unit that is counted with, at least 0.

    Raises:
        TypeError: a setting is of another type. In a step `UnsuitableGradient`, a `TypeError`: a
            gradient is sparse or complex, or has not an element of its own for each of the
            parameter's; or a DTensor is partial or otherwise not placed as its parameter.
        ValueError: a setting is out of its range.
    """

    clip_factor: float = 0.01
    eps: float = 1e-3

    per_tensor = True
    by_unit = True

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
            columns = self._decide(*_norms(rows, pairs, measured))
            lowest = torch.stack([_lowest(part) for part in columns.split(counts, 1)])
            units |= zip(rows, columns[0].split(counts), strict=True)
            smallest |= zip(rows, lowest.to(measured.norms.device).unbind(), strict=True)
        if not pairs:
            return Decision(measured.norms, measured.norms, state, [])
        lows = torch.stack([smallest[row] for row in range(len(pairs))])
        every = [units[row] for row in range(len(pairs))]
        return Decision(lows[:, 0], lows[:, 1], state, every)

    def _decide(self, norms: Tensor, of_parameters: Tensor) -> Tensor:
        """Coefficients and thresholds, ``[2, units]``."""
        thresholds = of_parameters.clamp(min=self.eps) * self.clip_factor
        within = norms <= thresholds  # false for NaN, which so reaches the coefficient
        coefs = torch.where(within, 1.0, thresholds / norms.clamp(min=1e-6))
        return torch.stack([coefs, thresholds])


def _norms(
    rows: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]], measured: Measured
) -> tuple[Tensor, Tensor]:
    """Of the units of gradients and parameters on one device, without the loss scale."""
    # All units at once: on a GPU every operation on a tensor is a launch.
    if measured.whole_units is not None:
        norms, of_parameters = torch.cat([measured.whole_units[row] for row in rows], 1)
    else:
        parameters, gradients = zip(*(pairs[row] for row in rows), strict=True)
        unit_norms = passes.active().unit_norms
        known = measured.unit_norms
        norms = unit_norms(gradients) if known is None else known
        of_parameters = unit_norms(parameters)
    if measured.inv_scale is not None:
        norms = norms * measured.inv_scale.to(norms.device, torch.float64)
    return norms, of_parameters


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
