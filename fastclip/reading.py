"""What one read of the gradients gives: this process's gradients, and the table of all."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastclip import passes
from fastclip import table as tables
from fastclip.gradients import Gradients
from fastclip.ranks import Contributions


class Reading(NamedTuple):
    """`table` has n rows, which `names` and `numel` are of. In one process they are those of
    `found`, in order; else they are the same on all ranks, whatever each holds.
    """

    found: Gradients  # of this process
    names: tuple[str, ...]
    numel: tuple[int, ...]
    table: Tensor  # [n, 5]
    dtype: torch.dtype  # of the norms that are returned
    contributions: Contributions | None = None  # what each rank brought to the table
    rows: Sequence[int] | None = None  # under process groups, where the rows of `found` are

    @classmethod
    def of(cls, found: Gradients, table: Tensor) -> "Reading":
        dtype = tables.result_dtype(found.tensors)
        return cls(found, found.names, found.numel, table, dtype, found.contributions)

    def scale_(self, coef: Tensor) -> None:
        """Multiply this process's gradients in place by `coef`, float64, 0-d or ``[n]``."""
        if coef.dim() > 0 and self.rows is not None:
            if not self.rows:
                return
            coef = torch.stack([coef[row] for row in self.rows])  # an index would be sent
        passes.active(self.found).scale_(self.found, coef)
