"""A Trainer with and without fastclip: the same losses, the statistics in the log; skips."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.amp import GradScaler
from transformers import Trainer, TrainerCallback

from fastclip.integrations.torch import patch
from fastclip.integrations.transformers import GradClipCallback, block_of
from fastclip.monitor import JSONL, Monitor
from fastclip.rules import AdaGC
from tests.integrations.trainer import STEPS, logged, model, spoiled, trainer

# A last bit of a parameter that falls on the other side when it is rounded to 8 or 11 bits shows in
# the fourth or fifth digit of a loss.
TOLERANCE = {"bf16": 1e-3, "fp16": 1e-4}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"max_steps": STEPS},
    "accumulation": {"max_steps": 12, "gradient_accumulation_steps": 4},
    "bf16": {"max_steps": 12, "bf16": True},
    "checkpointing": {"max_steps": 12, "activation_checkpointing": True},
    "compiled": {"max_steps": 6, "torch_compile": True, "torch_compile_backend": "eager"},
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.parametrize("setting", SETTINGS)
def test_losses_and_norms_are_those_of_a_trainer_without_it(setting: str, tmp_path: Path) -> None:
    changed = SETTINGS[setting]
    plain = trainer(tmp_path, max_grad_norm=1.0, **changed)
    plain.train()
    monitor = Monitor(sinks=[JSONL(tmp_path / "run.jsonl")])
    clipped = trainer(tmp_path, GradClipCallback(1.0, monitor=monitor), **changed)
    clipped.train()
    assert len(logged(plain, "loss")) == changed["max_steps"]
    tolerance = TOLERANCE.get(setting, 1e-5)
    assert logged(clipped, "loss") == pytest.approx(logged(plain, "loss"), abs=tolerance)
    # of gradients that have had the rounding of all steps before
    norms = pytest.approx(logged(plain, "grad_norm"), rel=200 * tolerance)
    assert logged(clipped, "grad_norm") == norms
    records = list(JSONL(tmp_path / "run.jsonl"))
    assert [r.step for r in records] == list(range(changed["max_steps"]))
    assert [r.loss for r in records] == pytest.approx(logged(clipped, "loss"), rel=1e-6)
    assert [r.grad_norm for r in records] == pytest.approx(logged(clipped, "grad_norm"), rel=2e-6)
    assert [r.lr for r in records] == pytest.approx(logged(clipped, "learning_rate"))
    assert [r.clip_coef for r in records] == pytest.approx(logged(clipped, "grad_clip_coef"))
    assert any(r.clipped for r in records)


def test_losses_are_those_of_a_trainer_under_the_patch(tmp_path: Path) -> None:
    plain = trainer(tmp_path, max_grad_norm=1.0)
    plain.train()
    patched = trainer(tmp_path, max_grad_norm=1.0)
    with patch():
        patched.train()
    assert logged(patched, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-5)
    assert logged(patched, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=2e-3)


class Reporter(TrainerCallback):
    """Keeps what it is given, as TensorBoard's and W&B's would."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.entries.append(dict(logs))


def test_the_log_has_the_statistics_and_hands_them_on(tmp_path: Path) -> None:
    reporter = Reporter()
    run = trainer(tmp_path, GradClipCallback(1.0), reporter, max_steps=12, logging_steps=4)
    run.train()
    entries = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(entries) == 3
    blocks = ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1"]
    blocks.append("transformer.ln_f")
    for entry, given in zip(entries, reporter.entries, strict=False):
        assert [name for name in entry if "/" in name] == [
            f"{column}/{block}" for block in blocks for column in ("grad_norm", "grad_max")
        ]
        total = math.hypot(*(entry[f"grad_norm/{block}"] for block in blocks))
        assert total == pytest.approx(entry["grad_norm"], rel=1e-6)
        assert entry["grad_clip_coef"] == pytest.approx(min(1, 1 / (total + 1e-6)), rel=1e-6)
        assert (entry["grad_skipped"], entry["grad_nonfinite"]) == (0, 0)
        assert entry == given | {"step": entry["step"]}
    assert entries[0]["grad_clipped"] == 1.0  # of a model that has just begun to learn


def test_reporters_of_report_to_are_moved_behind(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    run = trainer(tmp_path, GradClipCallback(1.0), max_steps=2, report_to="tensorboard")
    run.pop_callback(TensorBoardCallback)
    found: list[str] = []

    class Writer(SummaryWriter):
        def add_scalar(self, tag: str, *args: Any, **kwargs: Any) -> None:
            found.append(tag)

    run.add_callback(TensorBoardCallback(Writer(str(tmp_path))))
    run.train()
    assert "train/grad_norm/transformer.h.0" in found


def test_a_callback_without_blocks_and_with_blocks_of_ones_own(tmp_path: Path) -> None:
    for layers, expected in (
        (None, set()),
        (lambda name: "all", {"grad_norm/all", "grad_max/all"}),
    ):
        run = trainer(tmp_path, GradClipCallback(1.0, layers=layers), max_steps=1)
        run.train()
        assert {name for name in run.state.log_history[0] if "/" in name} == expected


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("transformer.wte.weight", "transformer.wte"),
        ("bert.encoder.layer.0.output.dense.bias", "bert.encoder.layer.0"),
        ("scale", "scale"),
    ],
)
def test_blocks(name: str, block: str) -> None:
    assert block_of(name) == block


def test_a_step_with_a_nan_is_not_taken(tmp_path: Path) -> None:
    """Not one bit of the parameters and of the optimizer's state changes in it."""
    states: list[dict[str, Any]] = []

    class Photographer(TrainerCallback):
        def on_step_end(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
            moments = optimizer.state_dict()["state"]
            values = {f"{i}/{n}": v.clone() for i, s in moments.items() for n, v in s.items()}
            states.append(values | {n: p.detach().clone() for n, p in run.model.named_parameters()})

    monitor = Monitor(sinks=[JSONL(tmp_path / "run.jsonl")])
    callbacks = GradClipCallback(1.0, monitor=monitor), Photographer()
    net = spoiled(model(), {3}, math.nan)
    run = trainer(tmp_path, *callbacks, net=net, max_steps=8, logging_steps=4)
    run.train()
    assert all(torch.equal(states[3][name], value) for name, value in states[2].items())
    assert not torch.equal(states[4]["transformer.wte.weight"], states[3]["transformer.wte.weight"])
    assert all(bool(value.isfinite().all()) for value in states[-1].values())
    assert logged(run, "grad_skipped") == [1, 0]
    assert logged(run, "grad_nonfinite") == [sum(p.numel() for p in run.model.parameters()), 0]
    assert logged(run, "learning_rate")[1] == pytest.approx(3e-3 / 8)  # the schedule went on
    records = list(JSONL(tmp_path / "run.jsonl"))
    assert [r.step for r in records if r.skipped] == [3]
    assert math.isnan(records[3].loss or 0)


class HalfTrainer(Trainer):
    """With the scaler that accelerate has for fp16, which it leaves out on a CPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
        self.accelerator.native_amp = True
        self.accelerator.state._mixed_precision = "fp16"


def test_fp16_skips_and_backs_off_as_without_it(tmp_path: Path) -> None:
    runs, scales = [], []
    for callbacks, max_norm in (((), 1.0), ((GradClipCallback(1.0),), 0)):
        AcceleratorState._reset_state()
        net = spoiled(model(), {3, 4}, math.inf)
        run = trainer(
            *(tmp_path, *callbacks), kind=HalfTrainer, net=net, max_steps=12, max_grad_norm=max_norm
        )
        run.train()
        runs.append(run)
        scales.append(run.accelerator.scaler.get_scale())
    plain, clipped = runs
    assert scales[0] == scales[1] == 2.0**15  # halved twice, and doubled after five good steps
    losses = pytest.approx(logged(plain, "loss"), abs=TOLERANCE["fp16"])
    assert logged(clipped, "loss") == losses
    assert logged(clipped, "learning_rate") == logged(plain, "learning_rate")
    assert logged(clipped, "grad_skipped") == [int(step in (3, 4)) for step in range(12)]
    assert logged(clipped, "loss_scale")[:6] == [2.0**16] * 4 + [2.0**15, 2.0**14]


def test_optimizers_of_ones_own_are_clipped(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = [p.detach().clone() for p in net.parameters()]
    callback = GradClipCallback(0.125)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    run = trainer(tmp_path, callback, net=net, max_steps=1, optimizers=(optimizer, schedule))
    run.train()
    moved = [
        (p.detach() - old).norm().item() for p, old in zip(net.parameters(), before, strict=True)
    ]
    assert math.hypot(*moved) == pytest.approx(0.125, rel=1e-4)


def test_a_rule_per_tensor(tmp_path: Path) -> None:
    callback = GradClipCallback(rule=AdaGC(warmup=2, max_norm=None))
    run = trainer(tmp_path, callback, max_steps=6)
    run.train()
    assert callback.stats is not None
    assert logged(run, "grad_clip_coef")[-1] == pytest.approx(float(callback.stats.coef.min()))
    assert logged(run, "grad_clipped")[:2] == [0, 0]


def test_training_again_begins_afresh(tmp_path: Path) -> None:
    callback = GradClipCallback(1.0, monitor=Monitor(sinks=[JSONL(tmp_path / "run.jsonl")]))
    run = trainer(tmp_path, callback, max_steps=3)
    run.train()
    run.train()
    assert callback.clipper is not None
    assert int(callback.clipper.counters()["steps"]) == 3
    records = list(JSONL(tmp_path / "run.jsonl"))
    assert [(r.attempt, r.step) for r in records] == [(i, n) for i in (0, 1) for n in range(3)]
    assert not run.model._forward_hooks


def test_evaluation_and_prediction_without_training(tmp_path: Path) -> None:
    callback = GradClipCallback(1.0, monitor=Monitor())
    run = trainer(tmp_path, callback)
    assert run.evaluate()["eval_loss"] == pytest.approx(4.5, abs=0.2)
    assert len(run.predict(run.eval_dataset).predictions) == 16
    assert callback.clipper is None


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, GradClipCallback(1.0), max_grad_norm=0.5)
    with pytest.raises(ValueError, match=r"clips to max_grad_norm=0\.5 before GradClipCallback"):
        run.train()
    with pytest.raises(ValueError, match="max_norm must be a number of at least 0"):
        GradClipCallback(-1.0)
    with pytest.raises(ValueError, match="\"stop\" or a RollbackPolicy, got 'halt'"):
        GradClipCallback(1.0, monitor=Monitor(), on_critical="halt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="events that a monitor finds, and there is none"):
        GradClipCallback(1.0, on_critical="stop")
    with pytest.raises(TypeError, match="monitor must be a Monitor, got 1"):
        GradClipCallback(1.0, monitor=1)  # type: ignore[arg-type]
    for name in ("checkpoint_every", "keep", "layers"):
        options: Any = {name: 0}
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
            GradClipCallback(1.0, **options)
