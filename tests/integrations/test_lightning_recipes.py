"""Lightning and Fabric without the callback: GradClipper in their hooks and with their wrappers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

import fastclip
from fastclip import GradClipper
from fastclip.integrations import torch as patching
from fastclip.integrations.lightning import GradClipCallback
from tests.integrations.lightning_runs import (
    KINDS,
    SILENT,
    SIZE,
    Batches,
    Net,
    Start,
    loader,
    norm,
    parameters,
    trainer,
)

pytestmark = SILENT

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_hook_of_a_module(precision: str, kind: str, tmp_path: Path) -> None:
    class Clipping(Start):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            self.stats = GradClipper(self, max_norm=0.5).clip_(optimizer, scaler)

    module = Clipping(kind, False)
    trainer(tmp_path, precision=precision).fit(module, loader(1))

    assert norm(parameters(module)) == pytest.approx(0.5, rel=1e-5)
    assert float(module.stats.total_norm) > 5


class Manual(Start):
    """Steps by a GradClipper that is handed Lightning's wrapper."""

    def __init__(self, kind: str, scaled: bool = False) -> None:
        super().__init__(kind, True)
        self.clipper = GradClipper(self, max_norm=0.5)
        self.scaled = scaled

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        scaler = getattr(self.trainer.precision_plugin, "scaler", None) if self.scaled else None
        self.stats = self.clipper.step(optimizer, scaler)


@every_kind
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_wrapper_steps_with_clipped_gradients(precision: str, kind: str, tmp_path: Path) -> None:
    module = Manual(kind)
    run = trainer(tmp_path, precision=precision)
    run.fit(module, loader(2, {1: float("nan")}))

    rounding = 2.0**-8 if precision == "bf16-true" else 1e-5
    assert norm(parameters(module)) == pytest.approx(0.5, rel=rounding)
    assert run.global_step == 1  # the second was skipped before it came to Lightning


@every_kind
def test_a_wrapper_with_a_scaler_is_refused(kind: str, tmp_path: Path) -> None:
    module = Manual(kind, scaled=True)
    with pytest.raises(
        TypeError, match=r"LightningSGD is a LightningOptimizer, .* taken out twice"
    ):
        trainer(tmp_path, precision="16-mixed").fit(module, loader(1))
    assert norm(parameters(module)) == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
def test_a_compiled_module(tmp_path: Path) -> None:
    plain, module = Net(), Net()
    trainer(tmp_path, GradClipCallback(0.5)).fit(plain, loader(5))
    module.net.compile(backend="aot_eager")
    compiled: Any = torch.compile(module, backend="eager")
    trainer(tmp_path, GradClipCallback(0.5)).fit(compiled, loader(5))

    assert module.losses == pytest.approx(plain.losses, rel=1e-5)


def test_activation_checkpointing(tmp_path: Path) -> None:
    class Sparing(Net):
        def loss(self, batch: Tensor) -> Tensor:
            out = checkpoint(self.net, batch, use_reentrant=False)
            return (out - 10 * batch.sum(1, keepdim=True)).square().mean()

    plain, module = Net(), Sparing()
    trainer(tmp_path, GradClipCallback(0.5)).fit(plain, loader(5))
    trainer(tmp_path, GradClipCallback(0.5)).fit(module, loader(5))

    assert module.losses == pytest.approx(plain.losses, rel=1e-6)


def fabric(precision: str) -> tuple[Fabric, GradScaler | None]:
    if precision != "16-mixed":
        return Fabric(accelerator="cpu", precision=precision), None  # type: ignore[arg-type]
    scaler = GradScaler("cpu", init_scale=64.0)
    return Fabric(accelerator="cpu", plugins=MixedPrecision("16-mixed", "cpu", scaler)), scaler


@every_kind
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_fabric(precision: str, kind: str) -> None:
    torch.manual_seed(0)
    net = nn.Linear(SIZE, 1)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    strategy, scaler = fabric(precision)
    raw = torch.optim.SGD(net.parameters(), lr=1.0, **KINDS[kind])
    model, optimizer = strategy.setup(net, raw)
    clipper = GradClipper(net, max_norm=0.5)
    for batch in Batches(2, {1: float("nan")}):
        target = 10 * batch.sum(1, keepdim=True)
        strategy.backward((model(batch).float() - target).square().mean())
        if scaler is None:
            stats = clipper.step(optimizer)
        else:
            with pytest.raises(TypeError, match="FabricSGD is a _FabricOptimizer"):
                clipper.step(optimizer, scaler)
            stats = clipper.clip_(optimizer.optimizer, scaler)
            optimizer.step()
        optimizer.zero_grad()

    assert stats.skipped
    rounding = 2.0**-8 if precision == "bf16-true" else 1e-5
    assert norm(parameters(net)) == pytest.approx(0.5, rel=rounding)


def test_the_patch_serves_lightnings_own_clipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def counting(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(max_norm)
        return fastclip.clip_grad_norm_(parameters, max_norm, *args, **kwargs)

    monkeypatch.setitem(patching._SERVED, "clip_grad_norm_", counting)
    theirs, ours = Net(), Net()
    trainer(tmp_path, gradient_clip_val=0.5).fit(theirs, loader(5))
    with patching.patch():
        trainer(tmp_path, gradient_clip_val=0.5).fit(ours, loader(5))
        net = nn.Linear(SIZE, 1)
        strategy, _ = fabric("32-true")
        model, optimizer = strategy.setup(net, torch.optim.SGD(net.parameters()))
        strategy.backward(model(torch.full((4, SIZE), 10.0)).sum())
        before = strategy.clip_gradients(model, optimizer, max_norm=0.25)

    assert calls == [0.5] * 5 + [0.25]
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert float(before or 0) > 10
    assert norm([each.grad for each in net.parameters() if each.grad is not None]) == (
        pytest.approx(0.25, rel=1e-5)
    )
