"""accelerate: served by the patch, and a GradClipper that steps what it has prepared."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fastclip
from examples.train import Text
from fastclip.integrations.torch import patch
from fastclip.monitor import Monitor
from fastclip.rules import ZClip
from fastclip.testing.compare import bitwise_equal

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ACCUMULATION = 4
MAX_NORM = 0.5  # under the norms of all 50 steps, 1.1 to 2.1
TEXT = Text()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """accelerate keeps its settings for the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=TEXT.vocabulary,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def train(steps: int, patched: bool) -> list[tuple[float, float]]:
    """A loop as accelerate documents it: the loss and the norm of each step of the optimizer."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATION
    )
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    history, losses = [], []
    with patch() if patched else nullcontext():
        for number in range(steps * ACCUMULATION):
            tokens, _ = TEXT.batch(number)
            with accelerator.accumulate(model):
                loss = model(tokens, labels=tokens).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                    history.append((sum(losses) / len(losses), norm.item()))
                    losses = []
                optimizer.step()
                optimizer.zero_grad()
    return history


@pytest.mark.slow
def test_the_same_losses_with_and_without_the_patch() -> None:
    plain, patched = train(50, patched=False), train(50, patched=True)
    assert len(patched) == 50
    assert min(norm for _, norm in plain) > MAX_NORM  # every step was clipped
    assert patched[-1][0] < 0.95 * patched[0][0]  # it learns
    for (loss, norm), (other_loss, other_norm) in zip(plain, patched, strict=True):
        # Norms differ in the last bit; what that moves a weight by is enough to round some of them
        # to another bfloat16 number.
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert other_norm == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_the_accelerators_own_methods_are_served(by: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    half.grad = torch.tensor([3.0, -4.0], dtype=torch.bfloat16)
    with patch():
        if by == "norm":
            norm = accelerator.clip_grad_norm_([half], 1.0)
            assert (norm.dtype, norm.item()) == (torch.float32, 5.0)
        else:
            with pytest.raises(ValueError, match="clip_value must be a number of at least 0"):
                accelerator.clip_grad_value_([half], -1.0)
            accelerator.clip_grad_value_([half], 0.5)
            assert half.grad.tolist() == [0.5, -0.5]


class Setting:
    """A prepared model and optimizer with a clipper, beside the same of plain torch."""

    def __init__(self, accumulation: int = 1, scaler: Any = None, **options: Any) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation
        )
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        self.inner = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        self.model = self.accelerator.prepare(model)
        self.optimizer = accelerate.optimizer.AcceleratedOptimizer(self.inner, scaler=scaler)
        self.clipper = fastclip.GradClipper(self.model, max_norm=0.1)

    def backward(self, number: int, factor: float = 1.0) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        loss = self.model(x).square().mean() * factor
        if self.optimizer.scaler is not None:
            loss = self.optimizer.scaler.scale(loss)
        self.accelerator.backward(loss)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def reference(steps: int, accumulation: int, **options: Any) -> list[Tensor]:
    """The weights after plain torch has clipped the sums of micro-batches."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for step in range(steps):
        for number in range(accumulation):
            generator = torch.Generator().manual_seed(step * accumulation + number)
            (
                model(torch.randn(3, 4, generator=generator)).square().mean() / accumulation
            ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


OPTIONS: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}


@pytest.mark.parametrize("mode", OPTIONS)
def test_the_clipper_steps_only_when_gradients_are_complete(mode: str) -> None:
    s = Setting(accumulation=4, **OPTIONS[mode])
    for number in range(12):
        with s.accelerator.accumulate(s.model):
            s.backward(number)
            before = s.weights()
            grads = [p.grad.clone() for p in s.model.parameters()]
            stats = s.clipper.step(s.optimizer)
            complete = number % 4 == 3
            assert s.accelerator.sync_gradients == complete
            if not complete:
                norm = torch.cat([grad.flatten() for grad in grads]).norm()
                assert stats.total_norm.item() == pytest.approx(norm.item(), rel=1e-6)
                pairs = zip(s.model.parameters(), grads, strict=True)
                assert all(bitwise_equal(p.grad, grad) for p, grad in pairs)
                assert all(map(bitwise_equal, s.weights(), before))
            s.optimizer.zero_grad()
    assert s.clipper.counters()["steps"].item() == 3
    for a, b in zip(s.weights(), reference(3, 4, **OPTIONS[mode]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_fused_optimizer_within_applies_the_coefficient() -> None:
    s = Setting(fused=True)
    s.backward(0)
    kept: list[Any] = []
    s.inner.register_step_pre_hook(lambda o, *_: kept.append(o.grad_scale))
    stats = s.clipper.step(s.optimizer)
    assert kept[0].item() == pytest.approx(1 / stats.coef.item(), rel=1e-6)


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("given", [False, True], ids=["scaler found", "scaler passed"])
def test_the_scaler_within_is_served(mode: str, given: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    s = Setting(scaler=scaler, **OPTIONS[mode])
    for number in range(2):
        s.backward(number)
        stats = s.clipper.step(s.optimizer, scaler if given else None)
        assert 0.1 < stats.total_norm.item() < 10  # without the loss scale
        assert not s.optimizer.step_was_skipped
        s.optimizer.zero_grad()
    assert scaler.get_scale() == 2048.0
    for a, b in zip(s.weights(), reference(2, 1, **OPTIONS[mode]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    before = s.weights()
    s.backward(2, factor=math.inf)
    stats = s.clipper.step(s.optimizer)
    assert stats.skipped
    # A fused optimizer skips by itself, of which accelerate is not told.
    assert s.optimizer.step_was_skipped == (mode != "fused")
    assert scaler.get_scale() == 1024.0
    assert all(map(bitwise_equal, s.weights(), before))


def test_clip_and_the_accelerators_step() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    s = Setting(scaler=scaler)
    for number in range(2):
        s.backward(number)
        assert s.clipper.clip_(s.optimizer).total_norm.item() < 10
        s.optimizer.step()
        s.optimizer.zero_grad()
    for a, b in zip(s.weights(), reference(2, 1), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scaled", [False, True], ids=["no scaler", "scaler"])
def test_clip_waits_for_complete_gradients_too(scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    s = Setting(accumulation=4, scaler=scaler)
    for number in range(8):
        with s.accelerator.accumulate(s.model):
            s.backward(number)
            s.clipper.clip_(s.optimizer)
            s.optimizer.step()
            s.optimizer.zero_grad()
    assert s.clipper.counters()["steps"].item() == 2
    for a, b in zip(s.weights(), reference(2, 4), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_cannot_be_served_is_refused_before_anything_changes() -> None:
    scaler = torch.amp.GradScaler("cpu")
    s = Setting(scaler=scaler)
    s.backward(0)
    before = [p.grad.clone() for p in s.model.parameters()]

    # as those of DeepSpeed and Megatron, whose step does nothing
    engine = type("Engine", (accelerate.optimizer.AcceleratedOptimizer,), {})
    second = accelerate.optimizer.AcceleratedOptimizer(
        torch.optim.SGD(s.model.parameters(), lr=0.1), scaler=scaler
    )
    with pytest.raises(TypeError, match=r"^Engine does not step the optimizer that it wraps"):
        s.clipper.step(engine(s.inner))
    with pytest.raises(TypeError, match="scaler must be the one that accelerate has given"):
        s.clipper.step(s.optimizer, torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="loss scale after each of the 2 optimizers"):
        s.clipper.step([s.optimizer, second])
    with pytest.raises(TypeError, match=r"one by one or in a list, got generator"):
        s.clipper.step(each for each in [s.optimizer])  # type: ignore[arg-type]
    s.optimizer.accelerator_state.distributed_type = accelerate.DistributedType.XLA
    with pytest.raises(RuntimeError, match="XLA"):
        s.clipper.step(s.optimizer)
    pairs = zip(s.model.parameters(), before, strict=True)
    assert all(bitwise_equal(p.grad, grad) for p, grad in pairs)
    assert s.clipper.counters()["steps"].item() == 0


def test_several_optimizers_have_one_norm() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    params = [nn.Parameter(torch.tensor([0.0])) for _ in range(2)]
    optimizers: list[Optimizer] = [
        accelerator.prepare(torch.optim.SGD([p], lr=1.0)) for p in params
    ]
    clipper = fastclip.GradClipper(params, max_norm=1.0)
    for _ in range(2):
        with accelerator.accumulate():
            for p, slope in zip(params, (3.0, 4.0), strict=True):
                accelerator.backward(slope * p.sum())
            clipper.step(optimizers)
    assert [p.item() for p in params] == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_states_are_saved_and_loaded_with_the_rest(tmp_path: Path) -> None:
    s = Setting()
    s.clipper = fastclip.GradClipper(s.model, rule=ZClip(warmup=2))
    monitor = Monitor()
    s.accelerator.register_for_checkpointing(s.clipper, monitor)

    def step(number: int) -> None:
        s.backward(number)
        stats = s.clipper.step(s.optimizer)
        monitor.observe(step=number, loss=1.0 / (number + 1), stats=stats)
        s.optimizer.zero_grad()

    for number in range(6):
        step(number)
    s.accelerator.save_state(str(tmp_path))
    clipper_state, monitor_state = s.clipper.state_dict(), monitor.state_dict()
    step(6)
    assert s.clipper.counters()["steps"].item() == 7
    s.accelerator.load_state(str(tmp_path))
    assert s.clipper.counters()["steps"].item() == 6
    assert repr(s.clipper.state_dict()) == repr(clipper_state)
    # a monitor does not forget which step it has seen
    assert monitor.state_dict() == {**monitor_state, "step": 6}
