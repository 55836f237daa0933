"""Overlap with backward: where hooks are, and where they go."""

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from fastclip import gradients
from fastclip.overlap import Overlap
from tests.backward import loss_of, mlp, n_hooks, right, watching


def test_parameters_added_frozen_and_unfrozen_later() -> None:
    model = mlp()
    model[2].requires_grad_(False)
    overlap = watching(model)
    assert n_hooks(model) == [1, 1, 0, 0]
    loss_of(model).backward()
    right(overlap, model, served=(2, 2))
    model[2].requires_grad_(True)
    model[0].requires_grad_(False)
    model.append(nn.Linear(12, 2))
    model.zero_grad()
    loss_of(model).backward()
    right(overlap, model, served=(0, 4))
    overlap.watch(list(model.parameters()))
    overlap.watch(list(model.parameters()))
    assert n_hooks(model) == [1] * 6
    model.zero_grad()
    loss_of(model).backward()
    right(overlap, model, served=(4, 4))


def _materialise(model: nn.Sequential) -> None:
    model(torch.ones(1, 12))


def _enlarge(model: nn.Sequential) -> None:
    model.get_parameter("0.weight").data = torch.ones(12, 12)


@pytest.mark.parametrize("grow", [_materialise, _enlarge], ids=["lazy", "data"])
def test_a_parameter_that_becomes_large_is_hooked(grow: Callable[[nn.Sequential], None]) -> None:
    first = nn.LazyLinear(12) if grow is _materialise else nn.Linear(1, 12)
    model = nn.Sequential(first)
    overlap = Overlap(2.0, least=12 * 12 * 4)
    overlap.watch(list(model.parameters()))
    assert overlap.reason is not None
    grow(model)
    overlap.watch(list(model.parameters()))
    assert overlap.reason is None
    loss_of(model).backward()
    right(overlap, model, served=(1, 2))


def test_a_parameter_in_the_place_of_a_dead_one_is_hooked() -> None:
    model = mlp()
    overlap = watching(model)
    parameters = list(model.parameters())
    del overlap._hooks[id(parameters[0])]  # as when it died, and another got its id
    parameters[0]._post_accumulate_grad_hooks.clear()
    overlap.watch(parameters)
    assert n_hooks(model) == [1] * 4


def test_what_has_no_gradient_of_its_own_is_not_hooked() -> None:
    class Mine(nn.Parameter):
        pass

    leaf = torch.ones(3, requires_grad=True)
    overlap = Overlap(2.0, least=0)
    overlap.watch([leaf * 2, torch.ones(3), Mine(torch.ones(3))])
    assert overlap.reason is not None
    overlap.watch([leaf])
    assert overlap.reason is None


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("how", ["close", "collected"])
@pytest.mark.usefixtures("_no_collector")
def test_hooks_are_removed(how: str) -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    assert n_hooks(model) == [1] * 4
    if how == "close":
        overlap.close()
    else:
        del overlap
    assert n_hooks(model) == [0] * 4
    loss_of(model).backward()


@pytest.mark.usefixtures("_no_collector")
def test_neither_parameters_nor_gradients_are_kept_alive() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    overlap.measure(gradients.of_parameters(model))
    grad = weakref.ref(model[0].weight.grad)
    weight = weakref.ref(model[0].weight)
    model.zero_grad()
    assert grad() is None
    del model
    assert weight() is None
    assert len(overlap._hooks) == 0


def test_a_copied_or_saved_model_has_no_hooks_and_trains() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert n_hooks(other) == [0] * 4
        loss_of(other, 1).backward()
        right(overlap, model, served=(4, 4))


def test_a_copy_watches_for_itself() -> None:
    model = mlp()
    overlap = watching(model, 1.0)
    both = copy.deepcopy((model, overlap))
    assert (both[1].p, both[1].least) == (1.0, 0)
    both[1].watch(list(both[0].parameters()))
    loss_of(both[0]).backward()
    right(both[1], both[0], served=(4, 4))
    loss_of(model).backward()
    right(overlap, model, served=(4, 4))


def test_two_watch_the_same_parameters() -> None:
    model = mlp()
    first, second = watching(model), watching(model, 1.0)
    loss_of(model).backward()
    right(first, model, served=(4, 4))
    right(second, model, served=(4, 4))


def test_not_beside_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    overlap = watching(model)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match=r"no effect: torch\.distributed is initialised"):
        overlap.watch(list(model.parameters()))
    overlap.watch(list(model.parameters()))
    assert overlap.reason is not None
    assert n_hooks(model) == [0] * 4
    loss_of(model).backward()
    right(overlap, model, served=(0, 4))
    monkeypatch.undo()
    overlap.watch(list(model.parameters()))
    loss_of(model).backward()
    right(overlap, model, served=(4, 4))


@pytest.fixture
def _swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("convert", ["double", "double and float"])
@pytest.mark.parametrize("present", [True, False], ids=["with-gradients", "without"])
@pytest.mark.usefixtures("_swapping")
def test_hooks_outlive_a_conversion_that_swaps_parameters(present: bool, convert: str) -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    overlap.watch(list(model.parameters()))
    right(overlap, model, served=(4, 4))
    if not present:
        model.zero_grad()
    model.double()
    assert [p.dtype for p in model.parameters()] == [torch.float64] * 4
    if convert == "double and float":
        model.float()
    x = torch.ones(2, 12, dtype=next(model.parameters()).dtype)
    # the first backward shows that the hooks are gone; the second has them again
    for served in ((0, 4), (4, 4)):
        model.zero_grad()
        model(x).square().sum().backward()
        overlap.watch(list(model.parameters()))
        right(overlap, model, served=served)


def test_a_new_gradient_cannot_pass_for_a_dead_one() -> None:
    parameter = nn.Parameter(torch.zeros(64))
    overlap = Overlap(2.0, least=0)
    overlap.watch([parameter])
    parameter.sum().backward()
    (hook,) = overlap._hooks.values()
    assert hook.record is not None
    parameter.grad = None
    held = hook.record.storage  # so its address is not given away, though its memory is
    assert held.expired()
    assert held.cdata == hook.record.stamp.storage
    parameter.grad = torch.ones(64)  # as the hook has seen it, so no element tells
    assert parameter.grad.untyped_storage()._cdata != held.cdata
    with pytest.warns(UserWarning, match="all gradients were changed or"):
        overlap.measure(gradients.of_parameters([parameter]))
    assert overlap.served == (0, 1)
