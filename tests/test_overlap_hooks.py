"""Overlap with backward: kinds of backward."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastclip import gradients, passes
from fastclip.overlap import Overlap
from fastclip.testing.compare import bitwise_equal
from tests.backward import loss_of, mlp, right, watching
from tests.making import grads_of

# Which backward


def test_accumulation_is_right_and_only_the_last_backward_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp()
    overlap = watching(model)
    reads = 0
    measured = Overlap._measured

    def count(self: Overlap, gradient: Tensor | None) -> object:
        nonlocal reads
        record = measured(self, gradient)
        reads += record is not None
        return record

    monkeypatch.setattr(Overlap, "_measured", count)
    with overlap.accumulating():
        loss_of(model, 0).backward()
        with overlap.accumulating():
            loss_of(model, 1).backward()
        loss_of(model, 2).backward()
    assert reads == 0
    loss_of(model, 3).backward()
    assert reads == 4
    right(overlap, model, served=(4, 4))


def test_accumulation_without_saying_so() -> None:
    model = mlp()
    overlap = watching(model)
    for seed in range(3):
        loss_of(model, seed).backward()
    right(overlap, model, served=(4, 4))


def test_a_backward_within_accumulating_makes_earlier_rows_stale() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model, 0).backward()
    with overlap.accumulating():
        loss_of(model, 1).backward()
    with pytest.warns(UserWarning, match="all gradients were changed or"):
        right(overlap, model, served=(0, 4))


def test_accumulating_ends_with_an_error() -> None:
    model = mlp()
    overlap = watching(model)
    with pytest.raises(KeyError), overlap.accumulating():
        raise KeyError
    loss_of(model).backward()
    right(overlap, model, served=(4, 4))


def test_every_backward_within_accumulating_is_said_once() -> None:
    model = mlp()
    overlap = watching(model)
    with overlap.accumulating():
        loss_of(model).backward()
    with pytest.warns(UserWarning, match=r"no hook has run.*accumulating\(\)"):
        right(overlap, model, served=(0, 4))
    right(overlap, model, served=(0, 4))


def test_parameters_that_took_no_part() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    right(overlap, model, served=(4, 4))
    model.zero_grad(set_to_none=False)
    model[0](torch.ones(1, 12)).sum().backward()  # those of model[2] are 0 now
    right(overlap, model, served=(2, 4))
    model.zero_grad()
    model[0](torch.ones(1, 12)).sum().backward()
    right(overlap, model, served=(2, 2))


def test_a_gradient_that_stayed_keeps_its_row() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    model[0].zero_grad()
    model[0](torch.ones(1, 12)).sum().backward()
    right(overlap, model, served=(4, 4))


def test_tied_weights_are_measured_once_with_all_their_parts() -> None:
    model = mlp()
    model[2].weight = model[0].weight
    overlap = watching(model)
    loss_of(model).backward()
    right(overlap, model, served=(3, 3))


def test_one_gradient_on_two_parameters_counts_once() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    grad, other = model[0].weight.grad, model[2].weight
    assert isinstance(grad, Tensor)
    other.grad = grad
    right(overlap, model, served=(0, 4))
    other.grad = grad.view(12, 12)  # another tensor on the same memory
    right(overlap, model, served=(0, 4))


def test_gradients_in_one_buffer() -> None:
    """They share a version, and each accumulation makes those before it look changed."""
    model = mlp()
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view(parameter.shape)
    overlap = watching(model)
    loss_of(model).backward()
    right(overlap, model, served=(1, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    model = mlp()
    overlap = watching(model)
    x = torch.randn(5, 12, requires_grad=True)
    for _ in range(2):  # the first layer twice: its weight is accumulated in two parts
        x = checkpoint(model[0], x, use_reentrant=reentrant)
    model[2](x).square().sum().backward()
    right(overlap, model, served=(4, 4))


def test_two_backwards_of_one_graph() -> None:
    model = mlp()
    overlap = watching(model)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    right(overlap, model, served=(4, 4))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_gradients_that_are_to_be_differentiated_themselves() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward(create_graph=True)
    right(overlap, model, served=(4, 4))
    assert not overlap.measure(gradients.of_parameters(model))[1].requires_grad
    torch.stack([g.square().sum() for g in grads_of(list(model.parameters()))]).sum().backward()
    right(overlap, model, served=(4, 4))
    for parameter in model.parameters():
        parameter.grad = None  # else model and gradients keep each other alive


def test_sparse_and_complex_gradients_beside_dense_ones() -> None:
    model = nn.ModuleDict({"rows": nn.Embedding(30, 12, sparse=True), "rest": mlp()})
    model.register_parameter("c", nn.Parameter(torch.randn(7, dtype=torch.complex64)))
    overlap = watching(model)
    x = model["rows"](torch.tensor([3, 3, 4]))
    (model["rest"](x).square().sum() + model.get_parameter("c").abs().sum()).backward()
    listed = gradients.of_parameters(model)
    (found, table), expected = overlap.measure(listed), passes.measure(listed, 2.0)
    assert bitwise_equal(table, expected[1])
    assert found.names == expected[0].names
    assert found.sparse.keys() == expected[0].sparse.keys() == {1}
    assert overlap.served == (5, 6)


def test_a_compiled_model() -> None:
    model = mlp()
    overlap = watching(model)
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(2):
        model.zero_grad()
        loss_of(compiled, seed).backward()  # type: ignore[arg-type]
        right(overlap, model, served=(4, 4))


def test_a_backward_under_a_dispatch_mode_is_left_alone() -> None:
    model = mlp()
    overlap = watching(model)
    with FlopCounterMode(display=False) as mode:
        loss_of(model).backward()
    assert mode.get_total_flops() == 5 * 2 * 5 * 12 * 12  # and nothing of ours
    with pytest.warns(UserWarning, match="no hook has run"):
        right(overlap, model, served=(0, 4))


def test_a_hook_that_makes_the_step_itself() -> None:
    model = mlp()
    overlap = watching(model)

    def step(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model[0].parameters():
        parameter.register_post_accumulate_grad_hook(step)
    loss_of(model).backward()
    right(overlap, model, served=(2, 2))


# Other devices


class _Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_a_difference_that_arrives_late_is_an_error() -> None:
    model = mlp()
    overlap = watching(model)
    loss_of(model).backward()
    events = [_Event(), _Event()]
    for event, differ in zip(events, (False, True), strict=True):
        overlap._comparisons._underway.append((torch.tensor(differ), event))  # type: ignore[arg-type]
    events[1].done = True  # read in order
    right(overlap, model, served=(4, 4))
    events[0].done = True
    with pytest.raises(RuntimeError, match="an earlier step was clipped by their old norms"):
        overlap.measure(gradients.of_parameters(model))
