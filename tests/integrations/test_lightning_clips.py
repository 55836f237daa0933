"""Lightning: every clip happens, once, whoever takes the loss scale out and whoever steps."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from fastclip.integrations._clipping import BeforeStep
from fastclip.integrations._entries import Entries
from fastclip.integrations.lightning import GradClipCallback
from fastclip.rules import MaxNorm
from tests.forbidding import MODES
from tests.integrations.lightning_runs import (
    KINDS,
    PRECISIONS,
    SILENT,
    SIZE,
    Net,
    Start,
    loader,
    moved,
    norm,
    parameters,
    trainer,
)

pytestmark = SILENT

# Of a step of norm 0.5 whose elements were rounded to the parameters' dtype, at most half an ulp.
ROUNDING = {"bf16-true": 2.0**-8, "16-true": 2.0**-11, "64-true": 1e-7}

every_precision = pytest.mark.parametrize("precision", PRECISIONS)
every_kind = pytest.mark.parametrize("kind", KINDS)
both_ways = pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])


class Seen(Callback):
    """The norm of the gradients before the callbacks after this one, in float64."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        grads = [each.grad for each in pl_module.parameters() if each.grad is not None]
        self.norms.append(norm(grads))


@both_ways
@every_kind
@every_precision
def test_a_step_has_the_norm_of_the_clip(
    precision: str, kind: str, manual: bool, tmp_path: Path
) -> None:
    module, callback = Start(kind, manual), GradClipCallback(max_norm=0.5)
    trainer(tmp_path, callback, precision=precision).fit(module, loader(1))

    assert norm(parameters(module)) == pytest.approx(0.5, rel=ROUNDING.get(precision, 1e-5))
    assert {name: int(n) for name, n in callback.clippers[0].counters().items()} == {
        "steps": 1,
        "clipped": 1,
        "skipped": 0,
        "consecutive_skips": 0,
    }


@both_ways
@every_kind
@every_precision
def test_a_step_below_the_threshold_is_torchs(
    precision: str, kind: str, manual: bool, tmp_path: Path
) -> None:
    plain, clipped = Start(kind, manual), Start(kind, manual)
    trainer(tmp_path, precision=precision).fit(plain, loader(1))
    callback = GradClipCallback(max_norm=1000.0)
    trainer(tmp_path, callback, precision=precision).fit(clipped, loader(1))

    for ours, theirs in zip(parameters(clipped), parameters(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert norm(parameters(plain)) > 5  # ten times what is clipped elsewhere


@both_ways
@every_kind
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("spoilt", [0, 2], ids=["first", "third"])
def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(
    spoilt: int, precision: str, kind: str, manual: bool, tmp_path: Path
) -> None:
    def run(spoil: dict[int, float], drop: int | None) -> tuple[Net, GradClipCallback]:
        batches = loader(4, spoil)
        if drop is not None:
            kept = [place for place in range(4) if place != drop]
            batches.dataset.batches = batches.dataset.batches[kept]  # type: ignore[attr-defined]
        module = Net(lambda own: torch.optim.SGD(own, 0.01, momentum=0.9, **KINDS[kind]), manual)
        callback = GradClipCallback(max_norm=0.5)
        trainer(tmp_path, callback, precision=precision).fit(module, batches)
        return module, callback

    module, callback = run({spoilt: float("nan")}, None)
    expected, _ = run({}, spoilt)

    assert int(callback.clippers[0].counters()["skipped"]) == 1
    # the scale is halved after the bad batch, which changes how float16 rounds
    rtol, atol = (1e-3, 1e-4) if precision == "16-mixed" else (0.0, 0.0)
    for ours, theirs in zip(parameters(module), parameters(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@both_ways
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_the_scaler_backs_off(kind: str, manual: bool, tmp_path: Path) -> None:
    run = trainer(tmp_path, GradClipCallback(max_norm=0.5), precision="16-mixed")
    run.fit(Start(kind, manual), loader(2, {1: float("inf")}))

    assert run.precision_plugin.scaler.get_scale() == 32.0  # type: ignore[attr-defined]
    assert run.global_step == 2  # Lightning counts what was skipped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_losses_are_those_of_lightnings_own_clipping(
    precision: str, kind: str, tmp_path: Path
) -> None:
    def adam(own: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(own, lr=0.05, **KINDS[kind])

    def plain_adam(own: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(own, lr=0.05, foreach=False)

    # which refuses a fused optimizer under mixed precision, bf16-mixed too
    refused = precision != "32-true" and kind == "fused"
    theirs = Net(plain_adam if refused else adam)
    trainer(tmp_path, precision=precision, gradient_clip_val=5.0).fit(theirs, loader(50))
    seen, callback, ours = Seen(), GradClipCallback(max_norm=5.0), Net(adam)
    trainer(tmp_path, seen, callback, precision=precision).fit(ours, loader(50))

    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert int(callback.clippers[0].counters()["clipped"]) > 40
    assert ours.losses[-1] < 0.9 * ours.losses[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_itself_refuses_fused_optimizers(precision: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, precision=precision, gradient_clip_val=0.5)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        run.fit(Start("fused", False), loader(1))


@pytest.mark.parametrize("forbidden", MODES.values(), ids=MODES)
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "bad"])
def test_a_fused_step_waits_for_nothing(bad: bool, forbidden: Any) -> None:
    module = nn.Linear(SIZE, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, fused=True)
    held = BeforeStep(module, optimizer, {"max_norm": 0.5, "nonfinite": "skip"}, Entries(1))
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, math.nan if bad else 3.0)
    before = parameters(module)
    with forbidden():
        held.skip_if(held.clipper.clip_(optimizer), None)
        optimizer.step()

    assert moved(before, module) == pytest.approx(0.0 if bad else 0.5, rel=1e-5)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_accumulated_gradients_are_clipped_once(precision: str, kind: str, tmp_path: Path) -> None:
    changed: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": 4}
    theirs = Net(lambda own: torch.optim.SGD(own, 0.01, foreach=False))
    trainer(tmp_path, gradient_clip_val=0.5, **changed).fit(theirs, loader(10))
    callback = GradClipCallback(max_norm=0.5)
    ours = Net(lambda own: torch.optim.SGD(own, 0.01, **KINDS[kind]))
    trainer(tmp_path, callback, **changed).fit(ours, loader(10))

    assert int(callback.clippers[0].counters()["steps"]) == 3  # 4 + 4 + 2
    for one, other in zip(parameters(ours), parameters(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_accumulating_by_hand_is_accumulating(precision: str, kind: str, tmp_path: Path) -> None:
    class ByHand(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch) / 2)
            if batch_idx % 2:
                optimizer: Any = self.optimizers()
                optimizer.step()
                optimizer.zero_grad()

    def sgd(own: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(own, 0.01, **KINDS[kind])

    ours, theirs = ByHand(sgd, manual=True), Net(sgd)
    callback = GradClipCallback(0.5)
    trainer(tmp_path, callback, precision=precision).fit(ours, loader(6))
    changed: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": 2}
    trainer(tmp_path, GradClipCallback(0.5), **changed).fit(theirs, loader(6))

    assert int(callback.clippers[0].counters()["clipped"]) == 3
    for one, other in zip(parameters(ours), parameters(theirs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_training_step_of_none_leaves_all_as_it_was(
    kind: str, precision: str, tmp_path: Path
) -> None:
    class Now(Start):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx < 2 else super().training_step(batch, batch_idx)

    module, callback = Now(kind, False), GradClipCallback(max_norm=0.5)
    trainer(tmp_path, callback, precision=precision).fit(module, loader(3))

    assert norm(parameters(module)) == pytest.approx(0.5, rel=1e-5)


def test_a_schedule_and_a_rule_are_the_clippers(tmp_path: Path) -> None:
    module = Start("plain", False)
    callback = GradClipCallback(rule=MaxNorm(lambda step: 0.5 if step == 0 else 0.0))
    trainer(tmp_path, callback).fit(module, loader(3))

    assert norm(parameters(module)) == pytest.approx(0.5, rel=1e-5)


def test_parameters_that_are_added_are_clipped(tmp_path: Path) -> None:
    class Growing(Start):
        def __init__(self) -> None:
            super().__init__("plain", False)
            self.added = nn.Parameter(torch.zeros(3))
            self.make = lambda _: torch.optim.SGD(self.net.parameters(), lr=1.0)

        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) + 100 * self.added.sum()

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.optimizers[0].add_param_group({"params": [self.added]})

    module = Growing()
    callback = GradClipCallback(max_norm=0.5)
    before = parameters(module.net)
    trainer(tmp_path, callback).fit(module, loader(2))

    assert 0 < moved(before, module.net) <= 1
    assert 0 < norm([module.added.detach()]) <= 0.5


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_each_of_two_optimizers_clips_its_own(precision: str, tmp_path: Path) -> None:
    class Two(Start):
        def __init__(self) -> None:
            super().__init__("fused", True)
            self.other = nn.Linear(1, 1)
            nn.init.zeros_(self.other.weight)

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.net.parameters(), lr=1.0, fused=True)
            return first, torch.optim.SGD(self.other.parameters(), lr=1.0)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            several: Any = self.optimizers()
            first, second = several
            self.manual_backward(self.loss(batch))
            first.step()
            first.zero_grad()
            # the gradients of the first are there again, and are none of the second's
            out = self.other(self.net(batch))
            self.manual_backward((out.float() - 3).square().mean())
            second.step()
            first.zero_grad()
            second.zero_grad()

    module, callback = Two(), GradClipCallback(max_norm=0.25)
    before = parameters(module.other)
    run = trainer(tmp_path, callback, precision=precision)
    run.fit(module, loader(1))

    assert norm(parameters(module.net)) == pytest.approx(0.25, rel=1e-4)
    assert moved(before, module.other) == pytest.approx(0.25, rel=1e-4)
    assert [int(each.counters()["steps"]) for each in callback.clippers] == [1, 1]
    assert run.global_step == 2
