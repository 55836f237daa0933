"""A backend of one's own."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import assert_type

from fastclip import backends
from fastclip.backends import Backend, Unavailable, clip_in_passes, register
from fastclip.testing import trials
from fastclip.testing.cases import BACKEND_CASES


def measure(grads: Sequence[Tensor], p: float, inv_scale: Tensor | None) -> Tensor:
    return torch.zeros(len(grads), 5, dtype=torch.float64)


def scale_(grads: Sequence[Tensor], coef: Tensor) -> None:
    pass


def clip_(
    grads: Sequence[Tensor],
    p: float,
    max_norm: float | Tensor,
    inv_scale: Tensor | None,
    skip: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return clip_in_passes(measure, scale_, grads, p, max_norm, inv_scale, skip)


def provide() -> Backend:
    if not torch.cuda.is_available():
        raise Unavailable("there is no card here")
    return Backend("mine", frozenset({"cuda"}), "kernels of mine", measure, scale_, clip_)


register("mine", provide)
mine = backends.get("mine")
assert_type(mine, Backend)
assert_type(mine.serves("cuda"), bool)
for case in BACKEND_CASES:
    assert_type(case.id, str)
    assert_type(trials.measure(mine, case, 2.0, "cuda"), float)
    assert_type(trials.clip(mine, case, 2.0, "cuda"), float)
    assert_type(trials.scale(mine, case, "cuda"), float)
