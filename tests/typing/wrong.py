"""What a type checker refuses: each line is an error of just the kind that its comment says."""

import torch
from torch import Tensor, nn

import fastclip
from fastclip import GradClipper, backends
from fastclip.integrations import lightning, transformers
from fastclip.monitor import Event, Monitor, Recovery, RollbackPolicy, Spike, StepRecord
from fastclip.rules import Decision, Measured, State, ZClip

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
clipper = GradClipper(model)
stats = fastclip.grad_stats(model)

fastclip.clip_grad_norm_(model, "1.0")  # type: ignore[arg-type]
fastclip.clip_grad_norm_(model)  # type: ignore[call-arg]
fastclip.clip_grad_norm_(model, 1.0, norm=2.0)  # type: ignore[call-arg]
fastclip.clip_grad_norm_("model", 1.0)  # type: ignore[arg-type]
fastclip.clip_grad_norm_({"weight": torch.ones(1)}, 1.0)  # type: ignore[arg-type]
fastclip.clip_grads_with_norm_(model, 1.0, None)  # type: ignore[arg-type]
fastclip.clip_grad_norm(model, 1.0)  # type: ignore[attr-defined]
norm: float = fastclip.clip_grad_norm_(model, 1.0)  # type: ignore[assignment]
stats.worst(by="mean")  # type: ignore[arg-type]
stats.total_norm = torch.zeros(())  # type: ignore[misc]
print(stats.total)  # type: ignore[attr-defined]
fastclip.backend(None)  # type: ignore[arg-type]

GradClipper(model, "1.0")  # type: ignore[arg-type]
GradClipper(model, nonfinite="ignore")  # type: ignore[arg-type]
GradClipper(model, None, ZClip())  # type: ignore[call-arg]
GradClipper(model, rule=ZClip)  # type: ignore[arg-type]
GradClipper(model, rule=1.0)  # type: ignore[arg-type]
clipper.step()  # type: ignore[call-arg]
clipper.step(model)  # type: ignore[arg-type]
clipper.step(optimizer, optimizer)  # type: ignore[arg-type]
fastclip.order_guard(model)  # type: ignore[arg-type]
ZClip(alpha="fast")  # type: ignore[arg-type]


class NoState:
    """A rule without `init`."""

    per_tensor = False

    def decide(self, measured: Measured, state: State) -> Decision:
        return Decision(measured.total, measured.total, state)


class ACoefficient:
    """A rule whose decision is none."""

    per_tensor = False

    def init(self, n: int, device: torch.device) -> State:
        return {}

    def decide(self, measured: Measured, state: State) -> Tensor:
        return measured.total


class NoEvents:
    """A detector that returns its state alone."""

    def init(self) -> int:
        return 0

    def __call__(self, state: int, record: StepRecord) -> int:
        return state


GradClipper(model, rule=NoState())  # type: ignore[arg-type]
GradClipper(model, rule=ACoefficient())  # type: ignore[arg-type]
Monitor([NoEvents()])  # type: ignore[list-item]
Monitor([Spike])  # type: ignore[list-item]
Monitor(sinks=[print])  # type: ignore[list-item]
Monitor(watches=[model])  # type: ignore[list-item]
Event(1, "spike", "fatal", "loss", 1.0)  # type: ignore[arg-type]
monitor = Monitor()
monitor.observe(loss=1.0)  # type: ignore[call-arg]
monitor.observe(step=1, losss=1.0)  # type: ignore[call-arg]
monitor.observe(step=1, loss="1.0")  # type: ignore[arg-type]
monitor.observe(step=1, stats=1.0)  # type: ignore[arg-type]
Recovery("checkpoints", {"model": 1})  # type: ignore[dict-item]
RollbackPolicy(on="fatal")  # type: ignore[arg-type]
backends.register("mine", lambda: None)  # type: ignore[arg-type, return-value]
transformers.GradClipCallback("1.0")  # type: ignore[arg-type]
transformers.GradClipCallback(1.0, on_critical="rollback")  # type: ignore[arg-type]
lightning.GradClipCallback(1.0, monitor=1)  # type: ignore[arg-type]
