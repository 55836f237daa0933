"""Recovery, with a state of modules, optimizers and fastclip's own objects."""

import torch
from torch import nn
from typing_extensions import assert_type

from fastclip import GradClipper
from fastclip.monitor import Checkpoint, Event, Monitor, Recovery, Rollback, RollbackPolicy

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
clipper = GradClipper(model)
monitor = Monitor()


def is_loss(event: Event) -> bool:
    return event.metric == "loss"


def first_rank(event: Event) -> list[int] | None:
    return [0] if event.onset else None


policy = RollbackPolicy(on=is_loss, confirm=50, ranks=first_rank)
RollbackPolicy(on="warn", lr_scale=0.25)
recovery = Recovery(
    "checkpoints",
    {"model": model, "optimizer": optimizer, "clipper": clipper, "monitor": monitor},
    policy,
    every=100,
    keep=3,
    asynchronous=True,
)
for step, batch in recovery.steps(1000):
    assert_type(step, int)
    assert_type(batch, int)
    events = monitor.observe(step=step, loss=1.0, batch=batch)
    assert_type(recovery.handle(events), bool)
assert_type(recovery.checkpoints, list[Checkpoint])
assert_type(recovery.rollbacks, list[Rollback])
assert_type(recovery.skipped, list[int])
assert_type(recovery.save(), Checkpoint)
assert_type(recovery.restore(before=500), int)
recovery.replay(7, lambda step, batch: torch.zeros(()))
