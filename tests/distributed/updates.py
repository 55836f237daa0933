"""What watches say of a model in shards: jobs for ranks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastclip.monitor import ActivationWatch, ParameterWatch
from tests.distributed import layouts, models

RATE = 0.5


class Said(NamedTuple):
    """Of one rank: what was measured, and the whole parameters before and after the update."""

    taken: dict[str, Any]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def update(layout: str, size: int) -> Said:
    """One step of SGD."""
    named = layouts.build(layout, size)
    watch = ParameterWatch(named, every=1)
    before = {name: layouts.whole(parameter) for name, parameter in named}
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=RATE, foreach=False)
    with watch:
        optimizer.step()
    taken = watch.take()
    after = {name: layouts.whole(parameter) for name, parameter in named}
    return Said(taken, before, after)


def activations(size: int) -> tuple[list[float], list[float]]:
    """The maxima of the modules of a model of FSDP2 on a rank's batch, and of the plain model."""
    tokens, classes = models.part(0, torch.distributed.get_rank(), size)
    data = tokens[:1, :2], classes[:1, :2]  # so few that the ranks have not all tokens alike
    sharded, plain = models.net(), models.net()
    layouts.shard(sharded, layouts.mesh(size))
    return _maxima(sharded, data), _maxima(plain, data)


def _maxima(model: nn.Module, data: tuple[Tensor, Tensor]) -> list[float]:
    watch = ActivationWatch(model)
    layouts.loss(model, data)
    watch.take()
    return watch.stats().max_abs.tolist()
