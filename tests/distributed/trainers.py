"""A Trainer on each rank, for the tests of its callback."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

ARGUMENTS: dict[str, Any] = {"max_steps": 10, "per_device_train_batch_size": 2}


def trained(
    folder: Path, clips: bool, rolls: bool = False, alarming: int | None = None
) -> dict[str, Any]:
    """What a rank logs, and what its monitor was told; the one of rank `alarming` finds something
    critical in step 3, which no other rank sees."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(size), HF_HUB_OFFLINE="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # accelerate warns that it does so itself
    from accelerate.state import AcceleratorState, PartialState

    from fastclip.integrations.transformers import GradClipCallback
    from fastclip.monitor import Monitor, RollbackPolicy
    from tests.integrations.trainer import model, spoiled, trainer

    AcceleratorState._reset_state(reset_partial_state=True)
    kept = _Kept()
    options: dict[str, Any] = {"monitor": Monitor(sinks=[kept])}
    net = model()
    if rolls:
        spoiled(net, {7} if rank == 1 else (), float("nan"))
        policy = RollbackPolicy(confirm=2, lr_steps=0)
        options |= {"nonfinite": "propagate", "on_critical": policy, "checkpoint_every": 4}
    if alarming is not None:
        detectors = [_Alarm()] if rank == alarming else []
        options = {"monitor": Monitor(detectors, [kept]), "on_critical": "stop"}
    callbacks = [GradClipCallback(1.0, **options)] if clips else []
    run = trainer(
        folder,
        *callbacks,
        net=net,
        ddp_backend="gloo",
        max_grad_norm=0 if clips else 1.0,
        **ARGUMENTS,
    )
    run.train()
    PartialState._shared_state.clear()
    log = run.state.log_history
    weight = next(run.model.parameters()).detach()
    return {"log": log, "records": kept.records, "weight": weight.tolist()}


class _Alarm:
    kind, metric = "alarm", "grad_norm"

    def init(self) -> tuple[()]:
        return ()

    def __call__(self, state: Any, record: Any) -> tuple[Any, list[Any]]:
        from fastclip.monitor import Event

        found = [Event(3, self.kind, "critical", self.metric, 1.0)] if record.step == 3 else []
        return state, found


class _Kept:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any, events: Any) -> None:
        self.records.append(record)
