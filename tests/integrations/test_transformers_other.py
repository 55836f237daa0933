"""Trainers that do something otherwise: their optimizers, their losses, the way they save."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR
from transformers import Trainer
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from fastclip.integrations.transformers import GradClipCallback
from fastclip.monitor import JSONL, Event, Monitor, NonFinite, RollbackPolicy
from tests.integrations.trainer import logged, model, spoiled, trainer


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(tmp_path: Path) -> None:
    """What transformers makes of ``optim="galore_adamw_layerwise"``: hooks that step and clear."""
    net = model()
    own = {parameter: SGD([parameter], lr=0.01) for parameter in net.parameters()}

    def step(parameter: torch.Tensor) -> None:
        own[parameter].step()  # type: ignore[index]
        own[parameter].zero_grad()  # type: ignore[index]

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    optimizer = LayerWiseDummyOptimizer(optimizer_dict=own)
    schedule = ConstantLR(SGD(net.parameters(), lr=1.0))
    pair = (optimizer, schedule)
    run = trainer(tmp_path, GradClipCallback(1.0), net=net, max_steps=2, optimizers=pair)
    with pytest.raises(RuntimeError, match="no parameter has a gradient when LayerWiseDummy"):
        run.train()


class Own(Optimizer):
    """Has no learning rate, or none yet."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"rate": 0.1, **options})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["rate"])


class Still:
    """A schedule that does nothing."""

    def step(self) -> None: ...

    def get_last_lr(self) -> list[float]:
        return [0.1]


@pytest.mark.parametrize("options", [{}, {"lr": None}], ids=["unnamed", "none"])
def test_an_optimizer_without_a_learning_rate(options: Any, tmp_path: Path) -> None:
    """It is rolled back all the same; that its rate is not cut is said at the beginning."""
    net = spoiled(model(), {4}, math.nan)
    own = GradClipCallback(
        *(1.0,),
        nonfinite="propagate",
        monitor=Monitor([NonFinite()], [JSONL(tmp_path / "run.jsonl")]),
        on_critical=RollbackPolicy(confirm=1),
        checkpoint_every=2,
    )
    pair = (Own(net.parameters(), **options), Still())
    run = trainer(tmp_path, own, net=net, max_steps=6, optimizers=pair)
    with pytest.warns(UserWarning, match=r"Own has no learning rate .* lr_scale=0.5 .* nothing is"):
        run.train()
    assert own.rollbacks == 1
    assert {record.lr for record in JSONL(tmp_path / "run.jsonl")} == {None}
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())


def test_without_a_cut_nothing_is_said_of_the_learning_rate(tmp_path: Path) -> None:
    net = model()
    for number, policy in enumerate((RollbackPolicy(lr_scale=1.0), RollbackPolicy(lr_steps=0))):
        own = GradClipCallback(1.0, monitor=Monitor(), on_critical=policy)
        pair = (Own(net.parameters()), Still())
        trainer(tmp_path / str(number), own, net=net, max_steps=1, optimizers=pair).train()
        assert own.stats is not None


class Twice(Trainer):
    """Calls the model twice for one batch, as R-Drop does."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        once, again = (
            super(Twice, self).compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            for _ in range(2)
        )
        return (once + again) / 2  # type: ignore[operator]


def test_a_model_that_is_called_twice_has_the_mean_of_both_losses(tmp_path: Path) -> None:
    own = GradClipCallback(1.0, monitor=Monitor(sinks=[JSONL(tmp_path / "run.jsonl")]))
    options: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2}
    run = trainer(tmp_path, own, kind=Twice, **options)
    run.train()
    losses = [record.loss for record in JSONL(tmp_path / "run.jsonl")]
    assert losses == pytest.approx(logged(run, "loss"), rel=1e-6)


def test_what_is_the_best_is_judged_before_it_is_saved(tmp_path: Path) -> None:
    """Whether it is the best is known after the callback was told of the evaluation."""
    order: list[str] = []

    class Waited(Monitor):
        def flush(self) -> list[Event]:
            order.append(f"judged {run.state.global_step}")
            return super().flush()

    class Saving(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            order.append(f"saved {self.state.global_step}")
            super()._save_checkpoint(*args, **kwargs)

    own = GradClipCallback(1.0, monitor=Waited())
    best: dict[str, Any] = {"save_strategy": "best", "metric_for_best_model": "loss"}
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 5}
    run = trainer(tmp_path, own, kind=Saving, **best, **options)
    run.train()
    assert order[:4] == ["judged 2", "saved 2", "judged 4", "saved 4"]


def test_entries_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    """Shares are of the steps since the entry before, be it of the process before."""

    def run(folder: Path, steps: int) -> Any:
        net = spoiled(model(), {3} if steps == 4 or folder.name == "whole" else (), math.nan)
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
        options: dict[str, Any] = {"max_steps": steps, "logging_steps": 3}
        made = trainer(folder, GradClipCallback(1.0), net=net, **saving, **options)
        made.train(resume_from_checkpoint=True if steps == 6 and folder.name == "parts" else None)
        return made

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 4)
    resumed = run(tmp_path / "parts", 6)
    for name in ("grad_clipped", "grad_skipped"):
        assert logged(resumed, name) == logged(whole, name)
    assert logged(resumed, "grad_skipped") == [0, 1]
