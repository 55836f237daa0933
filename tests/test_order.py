"""The order guard notices each mistake once, at the line that has to change."""

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import fastclip
from fastclip import watching
from tests.making import snapshot, unchanged
from tests.order_loops import CLIPS, Clip, Training, line_of, warned

PLAIN_ORDER = ["loss.backward()", "clip_grad_norm_(", "optimizer.step()", "optimizer.zero_grad()"]
SCALED_ORDER = [
    *("scaler.scale(loss).backward()", "scaler.unscale_(optimizer)", "clip_grad_norm_("),
    *("scaler.step(optimizer)", "scaler.update()", "optimizer.zero_grad()"),
]


def clip_scaled(t: Training) -> None:
    for _ in range(3):
        t.backward()
        t.clip(t.params, 1.0)  # wrong
        t.scaler.step(t.optimizer)
        t.scaler.update()
        t.zero_grad()


def clip_before_unscaling(t: Training) -> None:
    for _ in range(3):
        t.backward()
        t.clip(t.params, 1.0)  # wrong
        t.scaler.unscale_(t.optimizer)
        t.scaler.step(t.optimizer)
        t.scaler.update()
        t.zero_grad()


def clip_after_step(t: Training) -> None:
    for _ in range(3):
        t.zero_grad()
        t.backward()
        t.scaler.step(t.optimizer)  # step
        t.clip(t.params, 1.0)  # wrong
        t.scaler.update()


def clip_after_update(t: Training) -> None:
    for _ in range(3):
        t.zero_grad()
        t.backward()
        t.scaler.step(t.optimizer)  # step
        t.scaler.update()
        t.clip(t.params, 1.0)  # wrong


def clip_each_micro_batch(t: Training) -> None:
    for _ in range(3):
        for micro_batch in range(4):
            t.backward()
            if micro_batch == 0:
                t.scaler.unscale_(t.optimizer)
            t.clip(t.params, 1.0)  # wrong
        t.scaler.step(t.optimizer)
        t.scaler.update()
        t.zero_grad()


def add_after_clip(t: Training) -> None:
    for _ in range(3):
        t.backward()
        t.scaler.unscale_(t.optimizer)
        t.clip(t.params, 1.0)  # clip
        t.backward()
        t.scaler.step(t.optimizer)  # wrong
        t.scaler.update()
        t.zero_grad()


def clip_zeros(t: Training) -> None:
    t.backward()
    for _ in range(3):
        t.optimizer.zero_grad(set_to_none=False)
        t.clip(t.params, 1.0)  # clip
        t.backward()
        t.optimizer.step()  # wrong


LATE = "has stepped with already"
REPEATED = "clipped after every micro-batch"
ADDED = "a backward was added to after they were clipped"

Loop = Callable[[Training], None]
MISTAKES: list[tuple[Loop, bool, str]] = [
    (clip_scaled, True, "still multiplied by the loss scale"),
    (clip_before_unscaling, True, "still multiplied by the loss scale"),
    (clip_after_step, False, LATE),
    (clip_after_step, True, LATE),
    (clip_after_update, True, LATE),
    (clip_each_micro_batch, False, REPEATED),
    (clip_each_micro_batch, True, REPEATED),
    (add_after_clip, False, ADDED),
    (add_after_clip, True, ADDED),
    (clip_zeros, False, ADDED),
]


def guarded(loop: Loop, t: Training) -> Callable[[], None]:
    def run() -> None:
        with fastclip.order_guard(t.optimizer, t.scaler):
            loop(t)

    return run


def in_order(text: str, calls: list[str]) -> bool:
    places = [text.find(call) for call in calls]
    return min(places) >= 0 and places == sorted(places)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize(
    ("loop", "scaled", "text"), MISTAKES, ids=lambda value: getattr(value, "__name__", None)
)
def test_each_mistake_once_at_its_line(
    loop: Loop, scaled: bool, text: str, clip: Clip, set_to_none: bool
) -> None:
    t = Training(clip, scaled)
    t.set_to_none = set_to_none
    (warning,) = warned(guarded(loop, t))
    message = str(warning.message)
    assert warning.category is UserWarning
    assert (warning.filename, warning.lineno) == (__file__, line_of(loop))
    assert message.startswith(f"{__file__}:{line_of(loop)} ")
    assert text in message
    order = message.partition("The right order: ")[2]
    assert in_order(order, SCALED_ORDER if scaled else PLAIN_ORDER)


@pytest.mark.parametrize(
    ("loop", "marker"),
    [(clip_after_step, "# step"), (add_after_clip, "# clip"), (clip_each_micro_batch, "# wrong")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_other_line_is_named_too(loop: Loop, marker: str) -> None:
    (warning,) = warned(guarded(loop, Training()))
    assert f" at {__file__}:{line_of(loop, marker)}" in str(warning.message)


@pytest.mark.parametrize(
    ("limit", "amount"),
    [(1.0, " = 1.53e-05 instead of 1."), (torch.tensor(2.0), " = 3.05e-05 instead of 2.")],
    ids=["float", "tensor"],
)
def test_the_loss_scale_in_numbers(limit: float | torch.Tensor, amount: str) -> None:
    t = Training(functools.partial(fastclip.clip_grad_norm_, max_norm=limit), scaled=True)

    def run() -> None:
        with fastclip.order_guard(t.optimizer, t.scaler):
            t.backward()
            t.clip(t.params)

    (warning,) = warned(run)
    assert "their norm is 65536 times too large" in str(warning.message)
    assert f"clipped to max_norm / 65536{amount}" in str(warning.message)


def test_two_mistakes_in_one_loop() -> None:
    def loop(t: Training) -> None:
        for _ in range(3):
            for _ in range(2):
                t.backward()
                t.clip(t.params, 1.0)  # wrong
            t.scaler.step(t.optimizer)
            t.scaler.update()
            t.zero_grad()

    found = warned(guarded(loop, Training(scaled=True)))
    assert [warning.lineno for warning in found] == [line_of(loop)] * 2
    assert "still multiplied" in str(found[0].message)
    assert REPEATED in str(found[1].message)


def test_a_clip_that_takes_the_scale_out_itself() -> None:
    t = Training(scaled=True)
    with fastclip.order_guard(t.optimizer, t.scaler):
        t.backward()
        watching.clips(t.params, 1.0, unscales=True)()
        t.backward()
        with pytest.warns(UserWarning, match=REPEATED):
            watching.clips(t.params, None, unscales=True)()
        t.zero_grad()
        t.backward()
        with pytest.warns(UserWarning, match=r"have been clipped to max_norm / 65536\. The right"):
            watching.clips(t.params, None)()


def test_without_a_block() -> None:
    t = Training()
    guard = fastclip.order_guard(t.optimizer)
    assert len(warned(lambda: clip_after_step(t))) == 1
    assert warned(lambda: clip_after_step(t)) == []  # once per guard
    guard.close()
    guard.close()
    guard = fastclip.order_guard(t.optimizer)
    assert len(warned(lambda: clip_after_step(t))) == 1
    guard.close()
    assert warned(lambda: clip_after_step(t)) == []


def test_a_dropped_guard_stays_on_while_its_optimizer_lives() -> None:
    t = Training()
    fastclip.order_guard(t.optimizer)
    assert len(warned(functools.partial(clip_after_step, t))) == 1
    assert len(watching._listeners) == 1
    del t
    other = Training()
    other.backward()
    clip_grad_norm_(other.params, 1.0)  # any clip lets go of guards without an optimizer
    assert len(watching._listeners) == 0


def test_several_guards() -> None:
    t = Training()
    outer = fastclip.order_guard(t.optimizer)
    with fastclip.order_guard(t.optimizer):
        assert len(warned(lambda: clip_after_step(t))) == 2
    with fastclip.order_guard(t.optimizer) as inner:
        outer.close()  # not in the order in which they were opened
        assert len(warned(lambda: clip_each_micro_batch(t))) == 1
        with inner:
            pass
        assert len(warned(lambda: clip_after_step(t))) == 1  # still on: the inner block only ended
    assert warned(lambda: add_after_clip(t)) == []
    with inner:  # on again, with what it has warned of
        assert len(warned(lambda: add_after_clip(t))) == 1
        assert warned(lambda: clip_after_step(t)) == []


def test_the_deprecated_name() -> None:
    t = Training()

    def loop() -> None:
        t.backward()
        t.optimizer.step()
        torch.nn.utils.clip_grad_norm(t.params, 1.0)  # wrong

    with fastclip.order_guard(t.optimizer):
        found = warned(loop)
    (warning,) = [each for each in found if each.category is UserWarning]
    assert (warning.filename, warning.lineno) == (__file__, line_of(loop))


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_as_an_error_it_comes_before_anything_is_changed(clip: Clip) -> None:
    t = Training(clip)
    with fastclip.order_guard(t.optimizer):
        t.backward(1e3)
        t.optimizer.step()
        before = snapshot(t.grads())
        with pytest.raises(UserWarning, match=LATE):
            clip(t.params, 1e-3)
        assert unchanged(t.grads(), before)
        params = snapshot(t.params)
        t.zero_grad()
        t.backward(1e3)
        clip(t.params, 1e-3)
        t.backward(1e3)
        with pytest.raises(UserWarning, match=ADDED):
            t.optimizer.step()
        assert unchanged(t.params, params)


@pytest.mark.parametrize(
    "framework",
    [*("accelerate", "transformers", "trl"), "lightning", "lightning_fabric", "pytorch_lightning"],
)
def test_the_line_is_not_one_of_a_framework(framework: str) -> None:
    module: dict[str, Any] = {"__name__": f"{framework}.wrapping"}
    exec("def clip(params):\n    return clip_grad_norm_(params, 1.0)", module)
    module["clip_grad_norm_"] = clip_grad_norm_

    def loop() -> None:
        for _ in range(3):
            t.zero_grad()
            t.backward()
            t.optimizer.step()
            module["clip"](t.params)  # wrong

    t = Training()
    with fastclip.order_guard(t.optimizer):
        (warning,) = warned(loop)
    assert (warning.filename, warning.lineno) == (__file__, line_of(loop))
    assert str(warning.message).startswith(f"{__file__}:{line_of(loop)} clips")


def test_in_a_thread_of_its_own() -> None:
    found: list[warnings.WarningMessage] = []
    t, other = Training(), Training()

    def run() -> None:
        for _ in range(20):
            clip_each_micro_batch(t)

    def right() -> None:
        for _ in range(100):
            other.backward()
            other.clip(other.params, 1.0)
            other.optimizer.step()
            other.zero_grad()

    def both() -> None:
        with fastclip.order_guard([t.optimizer, other.optimizer]):
            thread = threading.Thread(target=run)
            thread.start()
            right()
            thread.join()

    found = warned(both)
    assert [warning.lineno for warning in found] == [line_of(clip_each_micro_batch)]


@pytest.mark.parametrize(
    ("optimizer", "error", "match"),
    [
        (torch.nn.Linear(2, 2), TypeError, "must be a torch.optim.Optimizer or several, got Linea"),
        ([], ValueError, "no optimizer to watch"),
        ([1.5], TypeError, "optimizer 0 must be a torch.optim.Optimizer, got float"),
        (
            [torch.optim.SGD.__new__(torch.optim.SGD)],
            *(TypeError, r"optimizer 0 \(SGD\) has no step hooks"),
        ),
    ],
    ids=["module", "none", "number", "not-initialised"],
)
def test_not_an_optimizer(optimizer: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fastclip.order_guard(optimizer)  # type: ignore[arg-type]
    assert watching._listeners == ()


def test_not_a_scaler() -> None:
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got float"):
        fastclip.order_guard(Training().optimizer, 65536.0)  # type: ignore[arg-type]
