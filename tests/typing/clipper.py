"""GradClipper: optimizers, a scaler, policies, schedules, and saving."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import fastclip
from fastclip import GradClipper, GradStats
from fastclip.rules import AGC, AdaGC, AutoClip, LogZ, MaxNorm, ZClip

model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
other = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")

clipper = GradClipper(model, max_norm=1.0)
GradClipper(model)
GradClipper(model.named_parameters(), lambda step: 5.0 if step < 1000 else 1.0)
GradClipper(list(model.parameters()), torch.tensor(1.0), norm_type="inf", nonfinite="zero")
for rule in (MaxNorm(1.0), AGC(), AdaGC(), ZClip(), LogZ(), AutoClip()):
    GradClipper(model, rule=rule, overlap=True)


def counts(name: str, parameter: Tensor) -> bool:
    return not name.startswith("tied")


GradClipper(model.named_parameters(), 1.0, process_group=None, counts=counts)

assert_type(clipper.clip_(), GradStats)
assert_type(clipper.clip_(optimizer, scaler), GradStats)
assert_type(clipper.clip_([optimizer, other], scaler=scaler), GradStats)
assert_type(clipper.step(optimizer), GradStats)
assert_type(clipper.step(optimizer, scaler), GradStats)
assert_type(clipper.step([optimizer, other]), GradStats)
assert_type(clipper.measure(), GradStats)
assert_type(clipper.counters(), dict[str, Tensor])
with clipper.accumulating():
    pass

saved = clipper.state_dict()
assert_type(saved, dict[str, Any])
clipper.load_state_dict(saved)

with fastclip.order_guard(optimizer, scaler):
    pass
guard = fastclip.order_guard([optimizer, other])
guard.close()
