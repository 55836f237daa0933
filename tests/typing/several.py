"""Several processes: groups, and whose batch a NaN came from."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import assert_type

import fastclip
from fastclip import GradClipper, GradStats, RankStats
from fastclip.distributed import Attribution, attribution_hook

module = nn.Linear(4, 1)
model = DistributedDataParallel(module)
attribution = Attribution(model, history=4)
assert_type(attribution, Attribution)
assert_type(fastclip.distributed.Attribution(model), Attribution)
model.register_comm_hook(attribution, attribution_hook)
assert_type(attribution.local(), GradStats)
assert_type(attribution.by_rank(-1), list[RankStats])

group = dist.new_group([0, 1])  # type: ignore[no-untyped-call, unused-ignore]
if isinstance(group, dist.ProcessGroup):
    GradClipper(module.named_parameters(), 1.0, process_group=group)
    clipper = GradClipper(module.named_parameters(), 1.0, process_group=[group, group])
    for row in clipper.measure().cpu().by_rank():
        assert_type(row, RankStats)
        assert_type(row.rank, int)
