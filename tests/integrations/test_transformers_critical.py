"""What a critical event does: a warning, an end, or a way back."""

import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from fastclip.integrations.transformers import FOLDER, GradClipCallback
from fastclip.monitor import JSONL, Event, Monitor, RollbackPolicy, Telemetry
from tests.integrations.trainer import logged, model, spoiled, trainer

STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
POLICY = RollbackPolicy(confirm=4, lr_steps=5)


class Photographer(TrainerCallback):
    """Keeps a parameter, a moment and the learning rate, after each step."""

    def __init__(self) -> None:
        self.taken: list[tuple[torch.Tensor, torch.Tensor, float]] = []

    def on_step_end(self, *args: Any, model: Any = None, optimizer: Any = None, **kw: Any) -> None:
        moment = optimizer.state[model.transformer.wte.weight]["exp_avg"]
        rate = optimizer.param_groups[0]["lr"]
        self.taken.append((model.transformer.wte.weight.detach().clone(), moment.clone(), rate))


def test_stop_ends_the_training_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = GradClipCallback(1.0, nonfinite="propagate", monitor=Monitor(), on_critical="stop")
    net = spoiled(model(), {5}, math.nan)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    run = trainer(tmp_path, own, net=net, max_steps=9, **saving)
    run.train()
    assert run.state.global_step == 6
    (why,) = logged(run, "stopped_by")
    assert why.startswith("step 5: critical: nonfinite, ")
    assert f"stopping the training: {why}" in caplog.text
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]  # none of 6


def test_a_warning_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = GradClipCallback(1.0, nonfinite="propagate", monitor=Monitor())
    run = trainer(tmp_path, own, net=spoiled(model(), {5}, math.nan), max_steps=9)
    run.train()
    assert run.state.global_step == 9
    assert not all(p.isfinite().all() for p in run.model.parameters())
    told = [record.getMessage() for record in caplog.records if record.name == "fastclip"]
    assert len(told) == 1  # of four steps of one incident
    assert told[0].startswith("step 5: critical: nonfinite, ")


def rolled(folder: Path, steps: int, spoils: set[int], **options: Any) -> tuple[Any, Any]:
    taken = Photographer()
    monitor = Monitor(sinks=[JSONL(folder / "run.jsonl")])
    given = {"monitor": monitor, "on_critical": POLICY, **options.pop("own", {})}
    own = GradClipCallback(1.0, nonfinite="propagate", checkpoint_every=5, **given)
    run = trainer(
        *(folder, own, taken),
        net=spoiled(model(**STILL), spoils, math.nan),
        max_steps=steps,
        **options,
    )
    run.train()
    return run, taken.taken


def test_a_rollback_brings_back_the_state_of_then(tmp_path: Path) -> None:
    run, taken = rolled(tmp_path, 20, {13}, save_strategy="steps", save_steps=14)
    (weight, moment, _), (weight_then, moment_then, _) = taken[13], taken[4]
    assert torch.equal(weight, weight_then)  # of 5 updates: that of 10 is not confirmed at 13
    assert torch.equal(moment, moment_then)
    # Nothing else is wound back: the Trainer's count, its schedule, its data.
    assert run.state.global_step == 20
    assert [rate for *_, rate in taken] == pytest.approx([3e-3 * (19 - n) / 20 for n in range(20)])
    records = list(JSONL(tmp_path / "run.jsonl"))
    assert [r.batch for r in records] == list(range(20))
    assert [(r.attempt, r.step) for r in records] == [
        *((0, step) for step in range(14)),
        *((1, step) for step in range(5, 11)),
    ]
    scale = [1.0] * 14 + [0.5] * 5 + [1.0]
    rates = [3e-3 * (20 - n) / 20 * each for n, each in enumerate(scale)]
    assert [r.lr for r in records] == pytest.approx(rates)
    assert logged(run, "rolled_back") == [1]
    assert logged(run, "updates_lost") == [9]
    # What the Trainer saved in that very step is what was gone back to.
    saved = load_file(tmp_path / "checkpoint-14" / "model.safetensors")
    assert torch.equal(saved["transformer.wte.weight"], weight_then)
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize("lag", [0, 2])
def test_an_alarm_that_comes_late_goes_back_before_the_next_state(lag: int, tmp_path: Path) -> None:
    """As one of numbers on a device, which is here asked for when a state is due after step 14."""
    monitor = Monitor(sinks=[JSONL(tmp_path / "run.jsonl")], telemetry=Telemetry(lag))
    run, _ = rolled(tmp_path, 20, {14}, own={"monitor": monitor})
    assert logged(run, "rolled_back") == [1]
    records = [record for record in JSONL(tmp_path / "run.jsonl") if record.attempt]
    assert [record.batch for record in records] == list(range(15, 20))
    assert [record.step for record in records] == list(range(5 if lag else 10, 10 if lag else 15))
    assert logged(run, "updates_lost") == [15 - records[0].step]
    assert [record.lr for record in records] == pytest.approx(
        [3e-3 * (20 - n) / 20 * 0.5 for n in range(15, 20)]
    )


def test_after_a_rollback_the_loss_is_that_of_a_run_without_the_fault(tmp_path: Path) -> None:
    clean = trainer(tmp_path / "clean", GradClipCallback(1.0), net=model(**STILL), max_steps=150)
    clean.train()
    run, _ = rolled(tmp_path, 150, {103})
    assert logged(run, "rolled_back") == [1]
    ends = [statistics.mean(logged(each, "loss")[-10:]) for each in (run, clean)]
    assert ends[0] == pytest.approx(ends[1], rel=0.02)
    losses = [each.evaluate()["eval_loss"] for each in (run, clean)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("faults", [(), (5,)], ids=["to the end", "to another rollback"])
def test_a_resumed_run_knows_of_the_rollback(
    faults: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The learning rate stays cut as long as in the run that was not stopped, and the rollback
    counts."""
    whole, _ = rolled(tmp_path, 20, {13}, save_strategy="steps", save_steps=14)
    monitor = Monitor(sinks=[JSONL(tmp_path / "resumed.jsonl")])
    own = GradClipCallback(
        *(1.0,),
        nonfinite="propagate",
        monitor=monitor,
        on_critical=POLICY,
        checkpoint_every=5,
    )
    run = trainer(tmp_path, own, net=spoiled(model(**STILL), faults, math.nan), max_steps=20)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-14"))
    went_through = list(JSONL(tmp_path / "run.jsonl"))[14:]
    assert [r.lr for r in went_through] == pytest.approx(
        [3e-3 * (20 - n) / 20 * (0.5 if n < 19 else 1) for n in range(14, 20)]
    )
    records = list(JSONL(tmp_path / "resumed.jsonl"))
    assert [r.lr for r in records] == [r.lr for r in went_through]
    if faults:
        assert own.rollbacks == 2
        assert logged(run, "rolled_back") == [1, 2]
        told = "from the alarm at step 10 .* to the checkpoint of step 5, without the batches 14 to"
        assert re.search(f"{told} 19, .*: rollback 2 of at most 3", caplog.text)
    else:
        assert records == went_through
        assert all(map(torch.equal, run.model.parameters(), whole.model.parameters()))


def test_the_budget_holds_across_a_resume(tmp_path: Path) -> None:
    policy = {"on_critical": RollbackPolicy(confirm=4, lr_steps=5, max_rollbacks=1)}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 14}
    rolled(tmp_path, 14, {13}, own=policy, **saving)
    monitor = Monitor(sinks=[JSONL(tmp_path / "run.jsonl")])
    own = GradClipCallback(
        *(1.0,),
        nonfinite="propagate",
        monitor=monitor,
        checkpoint_every=5,
        **policy,  # type: ignore[arg-type]
    )
    run = trainer(tmp_path, own, net=spoiled(model(**STILL), {6}, math.nan), max_steps=28)
    with pytest.raises(RuntimeError, match="and all are used: 1 of at most 1"):
        run.train(resume_from_checkpoint=True)
    records = list(JSONL(tmp_path / "run.jsonl"))[14:]
    assert [(r.attempt, r.step, r.batch) for r in records] == [(1, 5 + n, 14 + n) for n in range(7)]


class _Seen:
    """A detector that finds what it is told to in the validation loss."""

    kind = "seen"

    def init(self) -> tuple[()]:
        return ()

    def __call__(self, state: Any, record: Any) -> tuple[Any, list[Event]]:
        if record.val_loss is None:
            return state, []
        return state, [Event(record.step, self.kind, "critical", "val_loss", record.val_loss)]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_validation_loss_is_of_the_step_that_was_validated(strategy: str, tmp_path: Path) -> None:
    from tests.integrations.trainer import TRAINING

    monitor = Monitor([_Seen()], sinks=[JSONL(tmp_path / "run.jsonl")])
    own = GradClipCallback(1.0, monitor=monitor, on_critical="stop")
    data = torch.utils.data.Subset(TRAINING, range(32))  # 4 steps an epoch
    run = trainer(
        *(tmp_path, own), train_dataset=data, max_steps=9, eval_strategy=strategy, eval_steps=4
    )
    run.train()
    assert run.state.global_step == 4  # stopped by it
    records = list(JSONL(tmp_path / "run.jsonl"))
    assert [r.val_loss for r in records] == [None] * 3 + [logged(run, "eval_loss")[0]]


def test_where_the_model_gives_no_loss_it_is_that_of_the_log(tmp_path: Path) -> None:
    def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    own = GradClipCallback(1.0, monitor=Monitor(sinks=[JSONL(tmp_path / "run.jsonl")]))
    run = trainer(tmp_path, own, compute_loss_func=own_loss, max_steps=6, logging_steps=3)
    run.train()
    first, second = logged(run, "loss")
    records = list(JSONL(tmp_path / "run.jsonl"))
    assert [r.loss for r in records] == [None, None, first, None, None, second]
