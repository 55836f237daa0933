"""Overlap with backward: the rows, and what happens to gradients after their hooks."""

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fastclip
from fastclip import gradients, passes, sampling
from fastclip import overlap as module
from fastclip.gradients import Gradients, Listed
from fastclip.overlap import Overlap
from fastclip.table import SCALABLE
from fastclip.testing.variants import Variant
from tests.backward import loss_of, mlp, right, same, watching

ORDERS = [2.0, 1.0, 0.0, float("inf"), 3.0]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The gradients of every plain pass within an `Overlap.measure`."""
    calls: list[list[Tensor]] = []

    def measure(listed: Listed, p: float, inv_scale: Tensor | None) -> tuple[Gradients, Tensor]:
        calls.append(listed.grads)
        return passes.measure(listed, p, inv_scale)

    class Spy:
        pass

    spy = Spy()
    spy.measure = staticmethod(measure)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "passes", spy)
    return calls


# The same rows


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "loss-scale"])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.usefixtures("each_backend")
def test_rows_are_those_of_the_plain_pass(variant: Variant, p: float, scaled: bool) -> None:
    model = mlp().to(variant.device)
    overlap = watching(model, p)
    model(torch.randn(5, 12, device=variant.device)).square().sum().backward()
    inv_scale = torch.tensor(1 / 3, device=variant.device) if scaled else None
    listed = gradients.of_parameters(model)
    found, table = overlap.measure(listed, inv_scale)
    expected = passes.measure(listed, p, inv_scale)
    again = scaled and p not in SCALABLE  # the hooks do not know the loss scale
    assert overlap.served == (0 if again else 4, 4)
    assert found.names == expected[0].names == ("0.weight", "0.bias", "2.weight", "2.bias")
    if variant.backend == "triton":  # cuts a gradient by the whole list
        torch.testing.assert_close(table, expected[1], rtol=1e-12, atol=0)
    else:
        assert same((found, table), expected)


def test_a_gradient_is_read_by_its_hook_and_not_again(measured: list[list[Tensor]]) -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    right(overlap, model, served=(4, 4))
    assert measured == []


def test_a_small_gradient_has_no_hook_and_is_left_to_the_pass(
    measured: list[list[Tensor]],
) -> None:
    model = mlp()
    overlap = Overlap(2.0, least=12 * 12 * 4)
    overlap.watch(list(model.parameters()))
    loss_of(model).backward()
    right(overlap, model, served=(2, 4))
    assert [[grad.shape for grad in call] for call in measured] == [[(12,), (12,)]]


def test_only_parameters_of_a_mebibyte_have_hooks_by_default() -> None:
    small, large = nn.Parameter(torch.zeros(262_143)), nn.Parameter(torch.zeros(262_144))
    overlap = Overlap(2.0)
    overlap.watch([small])
    assert overlap.reason is not None
    assert "large enough" in overlap.reason
    overlap.watch([small, large])
    assert overlap.reason is None
    (small.sum() + large.sum()).backward()
    overlap.measure(gradients.of_parameters([small, large]))
    assert overlap.served == (1, 2)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    touched=st.sets(st.integers(0, 5)),
    absent=st.sets(st.integers(0, 5)),
    named=st.booleans(),
    scale=st.sampled_from([None, 2.0**-16, 0.3]),
)
def test_any_mixture_of_rows(
    sizes: list[int], touched: set[int], absent: set[int], named: bool, scale: float | None
) -> None:
    params = [nn.Parameter(torch.arange(float(size)) - 3) for size in sizes]
    overlap = Overlap(2.0, least=0)
    overlap.watch(params)
    used = [p.square().sum() for i, p in enumerate(params) if i not in absent]
    if not used:
        return
    torch.stack(used).sum().backward()
    for i in touched:
        if i < len(params) and (grad := params[i].grad) is not None:
            grad.mul_(3)
    pairs = [(f"p{i}", p) for i, p in enumerate(params)]
    listed = gradients.of_parameters(pairs if named else params)
    inv_scale = None if scale is None else torch.tensor(scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # all of them touched
        result = overlap.measure(listed, inv_scale)
    assert same(result, passes.measure(listed, 2.0, inv_scale))


# What happens to a gradient after its hook

Change = Callable[[nn.Parameter], object]


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _replace(parameter: nn.Parameter) -> None:
    parameter.grad = _grad(parameter).clone() * 2


def _same_address(parameter: nn.Parameter) -> None:
    grad = _grad(parameter)
    parameter.grad = grad.view(grad.shape)


def _other_memory(parameter: nn.Parameter) -> None:
    _grad(parameter).data = torch.ones_like(parameter)


MARKED: dict[str, Change] = {
    "mul_": lambda p: _grad(p).mul_(2),
    "by a view": lambda p: _grad(p).view(-1)[5:7].zero_(),
    "by detach": lambda p: _grad(p).detach().mul_(2),
    "foreach": lambda p: torch._foreach_mul_([_grad(p)], 2.0),
    "zeroed": lambda p: _grad(p).zero_(),
    "value clipped": lambda p: fastclip.clip_grad_value_([p], 1e-3),
    "clipped": lambda p: fastclip.clip_grad_norm_([p], 1e-3),
    "clipped by torch": lambda p: nn.utils.clip_grad_norm_([p], 1e-3),
    "replaced": _replace,
    "replaced at its address": _same_address,
    "other memory": _other_memory,
}


@pytest.mark.parametrize("change", MARKED.values(), ids=MARKED)
def test_a_changed_gradient_alone_is_measured_again(
    change: Change, measured: list[list[Tensor]]
) -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    parameter = model.get_parameter("2.weight")
    change(parameter)
    right(overlap, model, served=(3, 4))
    assert [[grad is parameter.grad for grad in call] for call in measured] == [[True]]


def test_a_gradient_of_another_length_at_the_same_address() -> None:
    parameter = nn.Parameter(torch.arange(64.0))
    other = nn.Parameter(torch.arange(3.0))
    overlap = Overlap(2.0, least=0)
    overlap.watch([parameter, other])
    (parameter.square().sum() + other.square().sum()).backward()
    _grad(parameter).data = _grad(parameter).data[:3]
    listed = gradients.of_parameters([parameter, other])
    assert same(overlap.measure(listed), passes.measure(listed, 2.0))
    assert overlap.served == (1, 2)


def _unscale(model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _fused_step(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scales = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)}
    for name, value in scales.items():
        setattr(optimizer, name, value)
    optimizer.step()


UNMARKED: dict[str, Callable[[nn.Module], object]] = {
    "unscale_": _unscale,
    "fused optimizer": _fused_step,
    "data": lambda model: _grad(model.get_parameter("2.weight")).data.mul_(2),
    "numpy": lambda model: _grad(model.get_parameter("0.bias")).numpy().fill(0),
}


@pytest.mark.parametrize("change", UNMARKED.values(), ids=UNMARKED)
def test_a_change_that_leaves_no_mark_is_seen_and_said_once(
    change: Callable[[nn.Module], object],
) -> None:
    model = mlp()
    overlap = watching(model)
    for step in range(2):
        model.zero_grad()
        loss_of(model, step).backward()
        versions = [_grad(p)._version for p in model.parameters()]
        change(model)
        assert versions == [_grad(p)._version for p in model.parameters()]
        if step == 0:
            with pytest.warns(UserWarning, match="Pass the scaler to clip_ or step"):
                right(overlap, model, served=(0, 4))
        else:
            right(overlap, model, served=(0, 4))


class _Rows(nn.Module):
    """A dense gradient that is 0 but for two rows of which none of the spread elements is one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = nn.Embedding(2000, 8, dtype=dtype)
        self.small = nn.Linear(8, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.small(self.rows(x))
        return out


@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nan-and-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("least", [0, 10_000], ids=["all-hooked", "small-ones-not"])
def test_a_mostly_zero_gradient_that_is_unscaled(
    least: int, dtype: torch.dtype, nonfinite: bool
) -> None:
    model = _Rows(dtype)
    overlap = Overlap(2.0, least=least)
    overlap.watch(list(model.parameters()))
    if nonfinite:  # at places that no multiplication changes, before the others
        bad = torch.zeros(2000, 8, dtype=dtype)
        bad[1, :2] = torch.tensor([torch.nan, torch.inf])
        model.rows.weight.register_hook(lambda grad: grad + bad)
    model(torch.tensor([3, 5])).sum().backward()
    assert model.rows.weight.grad is not None
    assert not sampling.telling(sampling.spread(model.rows.weight.grad)).any()
    _unscale(model)
    with pytest.warns(UserWarning, match="Pass the scaler to clip_ or step"):
        right(overlap, model, served=(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("at", [1, 20_001, 99_999])
@pytest.mark.parametrize("bad", [None, 3, 50_003])
def test_the_one_element_that_shows_a_multiplication_is_found(
    bad: int | None, at: int, dtype: torch.dtype
) -> None:
    gradient = torch.zeros(100_000, dtype=dtype)
    if bad is not None:
        gradient[bad] = torch.nan
    gradient[at] = -0.5
    assert sampling.sample(gradient, sampling.place(gradient))[-1] == -0.5


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_a_gradient_in_which_no_multiplication_shows_keeps_its_row(value: float) -> None:
    parameter = nn.Parameter(torch.zeros(100))
    overlap = Overlap(2.0, least=0)
    overlap.watch([parameter])
    (parameter * value).sum().backward()
    _grad(parameter).data.mul_(0.25)
    listed = gradients.of_parameters([parameter])
    assert same(overlap.measure(listed), passes.measure(listed, 2.0))
    assert overlap.served == (1, 1)


def test_forgotten_rows_are_not_used() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    right(overlap, model, served=(4, 4))
    _fused_step(model)
    overlap.forget()
    right(overlap, model, served=(0, 4))  # and no warning


def test_rows_serve_until_something_changes() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    right(overlap, model, served=(4, 4))
    right(overlap, model, served=(4, 4))
    fastclip.clip_grad_norm_(model, 1e-3)
    right(overlap, model, served=(0, 4))  # no backward since: nothing to warn of


def test_another_backend_than_that_of_the_hooks(cpu_available: None) -> None:
    model = mlp()
    overlap = watching(model)
    with fastclip.backend("reference"):
        loss_of(model).backward()
    with fastclip.backend("cpu"), pytest.warns(UserWarning, match="measured again"):
        right(overlap, model, served=(0, 4))
