"""Monitor, Telemetry, watches, sinks, detectors, one's own among them, and what reads a log."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from fastclip import GradClipper
from fastclip.monitor import (
    JSONL,
    ActivationWatch,
    Calibration,
    Console,
    Detector,
    Diagnosis,
    Event,
    LayerRow,
    Monitor,
    NonFiniteOrigin,
    ParameterWatch,
    PrecisionReport,
    RobustSpike,
    Sink,
    Skips,
    StepRecord,
    Telemetry,
    Watch,
    compare_precisions,
    default_detectors,
    diagnose,
    find_first_nonfinite,
    suggest_max_norm,
)


class Overfitting:
    kind: ClassVar[str] = "overfitting"
    metric: ClassVar[str] = "val_loss"

    def init(self) -> tuple[float, int]:
        return float("inf"), 0

    def __call__(
        self, state: tuple[float, int], record: StepRecord
    ) -> tuple[tuple[float, int], list[Event]]:
        assert_type(record.val_loss, float | None)
        if record.val_loss is None or record.val_loss < state[0]:
            return state, []
        event = Event(record.step, self.kind, "warn", self.metric, record.val_loss, message="worse")
        return state, [event]


class Printing:
    def write(self, record: StepRecord, events: list[Event]) -> None:
        print(record.step, len(events))


class Temperature:
    def take(self) -> dict[str, float]:
        return {"activation_max": 1.0}


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
clipper = GradClipper(model)
own: Detector = Overfitting()
sink: Sink = Printing()
watch: Watch = Temperature()
update = ParameterWatch(model, every=100)
activations = ActivationWatch(model, modules=lambda name, module: isinstance(module, nn.Linear))
with Monitor(
    [*default_detectors(), own, Skips(), RobustSpike("grad_norm", log=True)],
    sinks=[JSONL("run.jsonl"), Console(), sink],
    telemetry=Telemetry(lag=2, layers_every=20),
    watches=[activations, update, watch],
) as monitor:
    assert_type(monitor, Monitor)
    with update:
        stats = clipper.step(optimizer)
    events = monitor.observe(step=0, loss=torch.tensor(1.0), stats=stats, lr=1e-3, batch=[1, 2])
    layers = stats.cpu().layers()
    monitor.observe(step=1, loss=2.0, val_loss=None, skipped=False, layers=layers)
    monitor.observe(
        step=2, loss=np.float32(1.0), clipped=stats.clipped, layers=[LayerRow("weight")]
    )
    assert_type(events, list[Event])
    assert_type(monitor.flush(), list[Event])
    assert_type(events[0].onset, int | None)
    assert_type(monitor.state_dict(), dict[str, Any])
    monitor.load_state_dict(monitor.state_dict())
assert_type(Monitor().replay("run.jsonl"), list[Event])
for record in JSONL("run.jsonl"):
    assert_type(record, StepRecord)

found = suggest_max_norm(record.grad_norm for record in JSONL("run.jsonl"))
assert_type(found, Calibration)
assert_type(found.max_norm, float)
assert_type(diagnose("run.jsonl"), Diagnosis)


def forward() -> Tensor:
    return torch.zeros(())


assert_type(find_first_nonfinite(model, forward), NonFiniteOrigin | None)
assert_type(compare_precisions(model, forward), dict[str, PrecisionReport])
