"""The norm that the Trainer measures by itself: it leaves the gradients as they are, and torch."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from transformers import GPT2LMHeadModel, TrainerCallback

from fastclip.integrations.torch import patch
from fastclip.integrations.transformers import GradClipCallback
from fastclip.monitor import JSONL, Monitor
from tests.integrations.trainer import logged, model, trainer
from tests.making import floats, parameters

FAULTY = "transformer.h.1.mlp.c_fc.weight"
BAD = {(0, 0): math.nan, (3, 5): math.inf, (7, 1): -math.inf}


def faulty(step: int) -> GPT2LMHeadModel:
    """A model with elements in one gradient that are not finite, in one backward pass."""
    net = model()
    backwards = iter(range(99))

    def spoil(gradient: Tensor) -> Tensor:
        if next(backwards) != step:
            return gradient
        added = torch.zeros_like(gradient)
        for place, value in BAD.items():
            added[place] = value
        return gradient + added

    net.get_parameter(FAULTY).register_hook(spoil)
    return net


def is_ours() -> bool:
    """torch rounds the norm of half gradients to their dtype, fastclip does not."""
    given = parameters(floats(3.0, 4.0, dtype=torch.bfloat16))
    return torch.nn.utils.clip_grad_norm_(given, 1.0).dtype == torch.float32


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    assert not is_ours()
    yield
    gc.collect()
    assert not is_ours()


class Gradients(TrainerCallback):
    """Copies of them, before every step of the optimizer."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Tensor]] = []
        self.versions: list[set[int]] = []
        self.ours: list[bool] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.taken.append({name: grad.clone() for name, grad in grads.items()})
        self.versions.append({grad._version for grad in grads.values()})
        self.ours.append(is_ours())


def test_the_gradients_are_those_of_the_backward_pass(tmp_path: Path) -> None:
    """Not written once, and afterwards clipped as if the bad elements had been 0."""
    before, after = Gradients(), Gradients()
    callbacks = before, GradClipCallback(0.5, nonfinite="zero"), after
    run = trainer(tmp_path, *callbacks, net=faulty(1), max_steps=3)
    run.train()
    assert before.versions == [{0}] * 3
    assert (before.ours, after.ours) == ([True] * 3, [False] * 3)
    bad = {n: (~grad.isfinite()).nonzero().tolist() for n, grad in before.taken[1].items()}
    assert {name: places for name, places in bad.items() if places} == {
        FAULTY: [list(place) for place in BAD]
    }
    for given, clipped in zip(before.taken, after.taken, strict=True):
        kept = {name: grad.double().nan_to_num(0.0, 0.0, 0.0) for name, grad in given.items()}
        norm = math.hypot(*(float(grad.norm()) for grad in kept.values()))
        assert norm > 0.5
        for name, grad in kept.items():
            torch.testing.assert_close(
                clipped[name].double(), grad * (0.5 / (norm + 1e-6)), rtol=1e-6, atol=1e-12
            )
    assert logged(run, "grad_nonfinite") == [0, 3, 0]
    assert logged(run, "grad_skipped") == [0, 0, 0]


def test_the_layer_at_fault_is_in_the_log_and_the_record(tmp_path: Path) -> None:
    monitor = Monitor(sinks=[JSONL(tmp_path / "run.jsonl")])
    net = faulty(2)
    run = trainer(tmp_path, GradClipCallback(1.0, monitor=monitor), net=net, max_steps=4)
    run.train()
    assert logged(run, "grad_nonfinite") == [0, 0, 3, 0]
    assert logged(run, "grad_skipped") == [0, 0, 1, 0]
    finite = [entry for entry in run.state.log_history if entry.get("grad_nonfinite") == 3]
    norms = {name: value for name, value in finite[0].items() if name.startswith("grad_norm/")}
    assert [name for name, norm in norms.items() if not math.isfinite(norm)] == [
        "grad_norm/transformer.h.1"
    ]
    record = list(JSONL(tmp_path / "run.jsonl"))[2]
    assert record.nonfinite_count == 3
    assert record.layers is not None
    shares = {layer.name: layer.nonfinite for layer in record.layers if layer.nonfinite}
    assert shares == {FAULTY: pytest.approx(3 / net.get_parameter(FAULTY).numel())}


def test_an_error_names_the_parameter_at_fault(tmp_path: Path) -> None:
    own = GradClipCallback(1.0, nonfinite="error")
    run = trainer(tmp_path, own, net=faulty(1), max_steps=3)
    with pytest.raises(RuntimeError, match=r"not finite") as raised:
        run.train()
    assert f"nothing: gradient '{FAULTY}' (1 NaN, 2 inf)." in str(raised.value)


@pytest.mark.parametrize("within", ["backward", "forward"])
def test_what_a_step_that_raised_leaves_is_taken_back(within: str, tmp_path: Path) -> None:
    """By the next training, and when the callback goes away."""

    def fail(*args: Any) -> None:
        raise OSError("broken")

    def broken(own: GradClipCallback) -> GPT2LMHeadModel:
        net = model()
        if within == "forward":
            handle = net.register_forward_hook(fail)
        else:
            handle = net.get_parameter(FAULTY).register_hook(fail)
        with pytest.raises(OSError, match="broken"):
            trainer(tmp_path, own, net=net, max_steps=3).train()
        handle.remove()
        assert is_ours()
        return net

    own = GradClipCallback(1.0)
    net = broken(own)
    trainer(tmp_path, own, net=net, max_steps=1).train()
    assert not is_ours()
    broken(own)
    del own, net
    gc.collect()
    assert not is_ours()


def test_a_patch_of_ones_own_stays(tmp_path: Path) -> None:
    plain = trainer(tmp_path, max_grad_norm=1.0, max_steps=12)
    plain.train()
    patched = patch()
    run = trainer(tmp_path, GradClipCallback(1.0), max_steps=12)
    run.train()
    assert is_ours()
    patched.undo()
    assert not is_ours()
    assert logged(run, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-5)


def test_where_another_has_replaced_the_function_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torch = clip_grad.clip_grad_norm_

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        return of_torch(*args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", replaced)
    run = trainer(tmp_path, GradClipCallback(1.0), net=faulty(1), max_steps=3)
    with pytest.warns(
        UserWarning, match="nn.utils.clip_grad_norm_ is .*replaced.* not torch's"
    ) as w:
        run.train()
    assert len(w) == 1
    assert "may be torch's, which makes all gradients NaN" in str(w[0].message)
    assert logged(run, "grad_nonfinite") == [0, sum(p.numel() for p in run.model.parameters()), 0]
    assert logged(run, "grad_skipped") == [0, 1, 0]


def test_two_callbacks_are_refused(tmp_path: Path) -> None:
    first, second = GradClipCallback(1.0), GradClipCallback(0.5)
    run = trainer(tmp_path, first, second, max_steps=1)
    with pytest.raises(ValueError, match="clipped twice, by two callbacks of the kind GradClipCa"):
        run.train()
    assert not run.model._forward_hooks
    run.remove_callback(second)
    run.train()
    assert len(logged(run, "grad_norm")) == 1
    run.remove_callback(first)
    run.add_callback(second)
    run.train()
    assert second.stats is not None
