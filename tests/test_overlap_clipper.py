"""GradClipper(overlap=True): the same training, with hooks."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fastclip
from fastclip import overlap as module
from fastclip.policy import Policy
from fastclip.rules import AGC, AdaGC, AutoClip, LogZ, MaxNorm, Rule, ZClip
from fastclip.testing.compare import bitwise_equal
from tests.backward import loss_of, mlp, n_hooks
from tests.making import grads_of

RULES: list[Callable[[], Rule]] = [
    lambda: MaxNorm(0.5),
    lambda: AGC(0.05),
    lambda: AdaGC(warmup=2),
    lambda: ZClip(warmup=2),
    lambda: LogZ(warmup=2, k=0.5),
    lambda: AutoClip(1.0),
]
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), 0.1, momentum=0.9),
    "fused": lambda model: AdamW(model.parameters(), 0.01, fused=True),
}


@pytest.fixture(autouse=True)
def _hooks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST", {"cpu": 0})


def served(clipper: fastclip.GradClipper) -> tuple[int, int]:
    assert clipper.overlap is not None
    return clipper.overlap.served


class Run:
    """A model, its optimizer and its clipper; two of them start the same."""

    def __init__(
        self,
        overlap: bool,
        rule: Rule | None = None,
        optimizer: str = "sgd",
        scaled: bool = False,
        nonfinite: Policy = "skip",
    ) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.clipper = fastclip.GradClipper(
            self.model, rule=rule, nonfinite=nonfinite, overlap=overlap
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)

    def backward(self, seed: int) -> None:
        self.scaler.scale(loss_of(self.model, seed)).backward()

    def step(self, seed: int) -> fastclip.GradStats:
        self.optimizer.zero_grad()
        self.backward(seed)
        stats = self.clipper.step(self.optimizer, scaler=self.scaler)
        self.scaler.update()
        return stats

    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters()]


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "loss-scale"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", RULES, ids=lambda make: type(make()).__name__)
def test_training_is_the_same(make: Callable[[], Rule], optimizer: str, scaled: bool) -> None:
    plain, hooked = (Run(overlap, make(), optimizer, scaled) for overlap in (False, True))
    clipped = 0
    for seed in range(6):
        expected, stats = plain.step(seed), hooked.step(seed)
        assert served(hooked.clipper) == (4, 4)
        assert bitwise_equal(stats.table, expected.table)
        torch.testing.assert_close(stats.coef, expected.coef, rtol=1e-6, atol=0)
        clipped += int(stats.clipped)
    assert clipped > 0
    for a, b in zip(plain.weights(), hooked.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("nonfinite", ["skip", "zero", "error"])
def test_a_nan_that_comes_with_backward(nonfinite: Policy, optimizer: str) -> None:
    plain, hooked = (Run(o, optimizer=optimizer, nonfinite=nonfinite) for o in (False, True))
    for run in (plain, hooked):
        run.step(0)
        run.optimizer.zero_grad()
        last = run.model.get_parameter("2.weight")
        handle = last.register_hook(lambda grad: grad.masked_fill(torch.eye(12).bool(), torch.nan))
        run.backward(1)
        handle.remove()
    if nonfinite == "error":
        with pytest.raises(RuntimeError, match=r"'2\.weight' \(12 NaN, 0 inf\)"):
            hooked.clipper.step(hooked.optimizer)
        return
    stats = [run.clipper.step(run.optimizer) for run in (plain, hooked)]
    assert served(hooked.clipper) == (4, 4)
    assert [bool(s.skipped) for s in stats] == [nonfinite == "skip"] * 2
    assert bitwise_equal(stats[0].table, stats[1].table)
    assert all(torch.equal(a, b) for a, b in zip(plain.weights(), hooked.weights(), strict=True))


def test_a_fused_step_that_clipped_leaves_no_rows_behind() -> None:
    run = Run(True, MaxNorm(0.5), "fused")
    run.step(0)
    before = run.clipper.measure()  # of what the optimizer left in the gradients
    assert float(before.total_norm) == pytest.approx(0.5, rel=1e-4)
    assert served(run.clipper) == (0, 4)


@pytest.fixture(params=[True, False], ids=["scaler-passed", "scaler-not-passed"])
def passed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_gradients_that_the_user_has_unscaled(passed: bool) -> None:
    said = "all gradients were changed or" if passed else "Pass the scaler to clip_ or step"
    run = Run(True, MaxNorm(1e9), scaled=True)
    run.backward(0)
    expected = fastclip.get_total_norm(grads_of(list(run.model.parameters()))) / 2**10
    run.scaler.unscale_(run.optimizer)
    with pytest.warns(UserWarning, match=said):
        stats = run.clipper.clip_(run.optimizer, scaler=run.scaler if passed else None)
    assert float(stats.total_norm) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
def test_accumulation(overlap: bool) -> None:
    runs = [Run(overlap), Run(False)]
    for seed in range(2):
        with runs[0].clipper.accumulating():
            runs[0].backward(seed)
        runs[1].backward(seed)
    for run in runs:
        run.backward(2)
    stats = [run.clipper.step(run.optimizer) for run in runs]
    assert bitwise_equal(stats[0].table, stats[1].table)
    if overlap:
        assert served(runs[0].clipper) == (4, 4)


def test_a_measurement_between_changes_nothing() -> None:
    run = Run(True)
    run.backward(0)
    looks = [run.clipper.measure(), run.clipper.measure(), run.clipper.clip_()]
    assert served(run.clipper) == (4, 4)
    assert all(bitwise_equal(looks[0].table, look.table) for look in looks)


def _pickled(run: Run) -> Run:
    saved = io.BytesIO()
    torch.save(run.__dict__, saved)
    saved.seek(0)
    other = Run(True)
    other.__dict__ = torch.load(saved, weights_only=False)
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled], ids=["copied", "pickled"])
def test_a_copy_goes_on_by_itself(copied: Callable[[Run], Run]) -> None:
    run = Run(True)
    run.step(0)
    other = copied(run)
    assert n_hooks(other.model) == [0] * 4
    with pytest.warns(UserWarning, match="no hook has run"):
        other.step(1)  # finds out here what it is to watch
    other.step(2)
    assert served(other.clipper) == (4, 4)
    run.step(1)
    run.step(2)
    assert served(run.clipper) == (4, 4)
    assert all(torch.equal(a, b) for a, b in zip(run.weights(), other.weights(), strict=True))
