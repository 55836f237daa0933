"""torch's functions while patched give what fastclip's give, bit for bit, and keep its guards."""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import fastclip
from fastclip.integrations.torch import patch
from fastclip.testing.compare import bitwise_equal
from tests.backward import loss_of, mlp
from tests.making import floats, grads_of, parameters

F16, BF16, F64 = torch.float16, torch.bfloat16, torch.float64

Call = Callable[[list[Tensor]], Tensor | None]

CALLS: dict[str, tuple[Call, Call]] = {
    "clip_grad_norm_": (
        lambda params: clip_grad_norm_(params, 0.5),
        lambda params: fastclip.clip_grad_norm_(params, 0.5),
    ),
    "clip_grad_norm_-options": (
        lambda params: clip_grad_norm_(
            params, max_norm=0.5, norm_type=math.inf, error_if_nonfinite=True, foreach=True
        ),
        lambda params: fastclip.clip_grad_norm_(params, 0.5, math.inf, True),
    ),
    "get_total_norm": (
        lambda params: get_total_norm(grads_of(params), 3.0),
        lambda params: fastclip.get_total_norm(grads_of(params), 3.0),
    ),
    "clip_grads_with_norm_": (
        lambda params: clip_grads_with_norm_(params, 0.5, torch.tensor(2.0)),
        lambda params: fastclip.clip_grads_with_norm_(params, 0.5, 2.0),
    ),
    "clip_grad_value_": (
        lambda params: clip_grad_value_(params, clip_value=0.25),
        lambda params: fastclip.clip_grad_value_(params, 0.25),
    ),
}

LISTS: dict[str, Callable[[], list[Tensor | None]]] = {
    "none": list,
    "one": lambda: [floats(3.0, 4.0)],
    "without-gradients": lambda: [None, None],
    "mixed": lambda: [
        *(torch.randn(300, 7), None, torch.randn(11).to(BF16), torch.randn(5).to(F16)),
        *(torch.randn(3, dtype=F64), torch.randn(6, 4).t()),
    ],
    "far-from-1": lambda: [torch.randn(999) * 1e25, torch.randn(9) * 1e-30],
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("call", CALLS)
def test_as_fastclip_bit_for_bit(call: str, name: str) -> None:
    grads = LISTS[name]()
    torchs, ours = (
        parameters(*(None if grad is None else grad.clone() for grad in grads)) for _ in range(2)
    )
    of_torch, of_fastclip = CALLS[call]
    expected = of_fastclip(ours)
    with patch():
        got = of_torch(torchs)
    if expected is None:
        assert got is None
    else:
        assert got is not None
        assert bitwise_equal(expected, got)
        assert not got.requires_grad
    for a, b in zip(grads_of(ours), grads_of(torchs), strict=True):
        assert bitwise_equal(a, b)


def test_a_generator_a_tensor_named_parameters_and_a_module() -> None:
    model = nn.Linear(2, 1, bias=False)
    with patch():
        for given in (
            model.weight,
            (p for p in model.parameters()),
            model.named_parameters(),
            model,
        ):
            model.weight.grad = torch.tensor([[3.0, 4.0]])
            assert clip_grad_norm_(given, 1.0).item() == 5.0  # type: ignore[arg-type]
            assert model.weight.grad[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


def test_an_exhausted_generator_warns_of_this_line() -> None:
    used = (p for p in parameters(floats(3.0)))
    assert len(list(used)) == 1
    with patch(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert clip_grad_norm_(used, 1.0).item() == 0.0
    (warning,) = caught
    assert "exhausted generator" in str(warning.message)
    assert warning.filename == str(Path(__file__))


def test_errors_are_fastclips_and_change_nothing() -> None:
    params = parameters(floats(3.0), floats(math.nan, 1.0))
    with patch():
        with pytest.raises(RuntimeError, match=r"position 1 \(1 NaN"):
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        with pytest.raises(ValueError, match=r"at least 0 .*got -1"):
            clip_grad_norm_(params, -1.0)
    assert grads_of(params)[0].item() == 3.0


def train(steps: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for _ in range(steps):
        loss_of(model).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [*norms, *(p.detach() for p in model.parameters())]


def test_a_training_run_is_the_same_to_rounding() -> None:
    expected = train(30)
    with patch():
        got = train(30)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def clip_twice(guard_first: bool) -> list[str]:
    """Clips every micro-batch of an accumulation, which is a mistake; what the guard says."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    contexts: list[Callable[[], AbstractContextManager[object]]] = [
        lambda: fastclip.order_guard(optimizer),
        patch,
    ]
    if not guard_first:
        contexts.reverse()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contexts[0](), contexts[1]():
            for _ in range(2):
                loss_of(model).backward()
                norm = clip_grad_norm_(model.parameters(), 0.01)
            assert norm.dtype == torch.float32
            optimizer.step()
    assert all(warning.filename == str(Path(__file__)) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("guard_first", [True, False])
def test_the_order_guard_is_told_once(guard_first: bool) -> None:
    (said,) = clip_twice(guard_first)
    assert "clips gradients again" in said


@pytest.mark.parametrize("undo_first", ["patch", "guard"])
def test_guard_and_patch_undone_out_of_order(undo_first: str) -> None:
    model = mlp()
    loss_of(model).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard, patched = fastclip.order_guard(optimizer), patch()
    half = parameters(floats(3.0, 4.0, dtype=BF16))
    first, second = (patched.undo, guard.close)
    if undo_first == "guard":
        first, second = second, first
    first()
    expected = BF16 if undo_first == "patch" else torch.float32
    assert clip_grad_norm_(half, 1.0).dtype == expected
    second()
    assert clip_grad_norm_(half, 1.0).dtype == BF16


def test_overlap_notices_a_clip_by_torchs_name() -> None:
    model = mlp()
    clipper = fastclip.GradClipper(model, max_norm=math.inf, overlap=True)
    loss_of(model).backward()
    with patch():
        norm = clip_grad_norm_(model.parameters(), 0.1)
        stats = clipper.clip_()
    assert norm.item() > 0.1
    assert stats.total_norm.item() == pytest.approx(0.1, rel=1e-4)
