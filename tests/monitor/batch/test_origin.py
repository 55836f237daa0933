"""find_first_nonfinite against models whose fault is known."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.monitor import NonFiniteOrigin, compare_precisions, find_first_nonfinite
from tests.monitor.batch.cases import CASES, Case, batch, healthy, summed
from tests.monitor.batch.parts import Apply, Between, Siblings


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_first_module_at_fault(case: Case) -> None:
    model, forward = case.build()
    assert find_first_nonfinite(model, forward) == case.origin


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_it_finds_is_so(case: Case) -> None:
    """By torch alone: where nothing is found, loss and gradients are finite."""
    model, forward = case.build()
    loss = forward()
    if loss.requires_grad:
        loss.backward()
    grads = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
    assert loss.isfinite().item() == (case.origin is None or case.origin[1] == "backward")
    finite = bool(loss.isfinite()) and all(bool(grad.isfinite().all()) for grad in grads)
    assert finite == (case.origin is None or case.vanishes)


def test_compiled_modules_are_watched_in_their_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Between(), nn.Linear(4, 4))
    x = batch(3, 4)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(x).sum()  # compiled without hooks
    origin = find_first_nonfinite(compiled, lambda: compiled(x).sum())
    assert origin == NonFiniteOrigin("_orig_mod.1", "backward")
    model.compile(backend="eager")
    assert find_first_nonfinite(model, lambda: model(x).sum()) == ("1", "backward")


def test_an_autocast_within_forward_is_the_one_that_counts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(model.get_parameter("1.weight"), 6e4)
    nn.init.constant_(model.get_parameter("0.weight"), 2.0)
    x = torch.ones(1, 2)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().sum()

    assert find_first_nonfinite(model, lambda: model(x).sum()) is None
    assert find_first_nonfinite(model, forward) == ("1", "forward")


def test_only_the_model_is_watched_but_the_whole_graph_is() -> None:
    """A fault in a second model is the model's as little as one in the loss."""
    model, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(Siblings())
    x = batch(3, 4)
    assert find_first_nonfinite(model, lambda: other(model(x)).sum()) == ("", "backward")
    assert find_first_nonfinite(other, lambda: other(model(x)).sum()) == ("0.k", "backward")


def test_infinite_masks_are_inputs_and_outputs_like_others() -> None:
    mask = torch.full((4,), -math.inf)
    softmax = Apply(lambda x, mask: (x + mask).softmax(-1))
    assert find_first_nonfinite(softmax, lambda: softmax(batch(4), mask).sum()) == ("", "input")
    mask[0] = 0.0
    assert find_first_nonfinite(softmax, lambda: softmax(batch(4), mask).sum()) is None
    logits = nn.Sequential(Apply(lambda x: x + mask), nn.Softmax(0))
    assert find_first_nonfinite(logits, lambda: logits(batch(4)).sum()) == ("0", "forward")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_seen_in_any_place(dtype: torch.dtype, size: int, bad: float) -> None:
    for place in {0, size // 2, size - 1}:
        x = torch.ones(size, dtype=dtype)
        x[place] = bad
        assert find_first_nonfinite(*summed(nn.Identity(), nn.Identity(), x=x)) == ("0", "input")


KINDS = {
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "float8": lambda x: x.to(torch.float8_e5m2),
    "complex": lambda x: torch.complex(torch.ones_like(x), x),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind(kind: str) -> None:
    parts = Apply(KINDS[kind]), Apply(lambda x: torch.ones((), requires_grad=True))
    for bad in (math.nan, math.inf):
        x = torch.ones(3, 4)
        assert find_first_nonfinite(*summed(*parts, x=x)) is None
        x[1, 2] = bad
        assert find_first_nonfinite(*summed(nn.Sequential(*parts), x=x)) == ("0.0", "input")
        x[1, 2] = 1.0
        made = Apply(lambda x, bad=bad: KINDS[kind](x * bad))
        assert find_first_nonfinite(*summed(made, parts[1], x=x)) == ("0", "forward")


def test_large_numbers_are_finite() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.float64))
    nn.init.constant_(model.get_parameter("0.weight"), 1e300)
    x = torch.ones(1, 1, dtype=torch.float64)
    assert find_first_nonfinite(model, lambda: model(x).sum()) is None


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (3.0, TypeError, r"forward\(\) must return the loss as a tensor, got float"),
        (torch.tensor(True), TypeError, r"as a floating-point tensor, got one of torch\.bool"),
        (torch.tensor(3), TypeError, r"as a floating-point tensor, got one of torch\.int64"),
        (torch.tensor(1j), TypeError, r"as a floating-point tensor, got one of torch\.complex64"),
        (torch.ones(2), ValueError, r"a loss of one element, got the shape \(2,\)"),
        (torch.ones(0), ValueError, r"a loss of one element, got the shape \(0,\)"),
        (torch.ones(()), ValueError, r"returned a loss without a graph: is no_grad in force\?"),
    ],
    ids=["number", "bool", "integer", "complex", "several", "none", "no graph"],
)
@pytest.mark.parametrize(
    "look", [find_first_nonfinite, compare_precisions], ids=["origin", "precisions"]
)
def test_what_is_no_loss(value: Any, error: type[Exception], text: str, look: Any) -> None:
    model, _ = healthy()
    with pytest.raises(error, match=text):
        look(model, lambda: value)


def test_a_loss_that_the_model_computes_as_an_integer() -> None:
    model, _ = healthy()
    with pytest.raises(TypeError, match=r"forward\(\) must return .*, got one of torch\.int64"):
        find_first_nonfinite(model, lambda: model(batch(16, 4)).argmax(1).eq(0).sum())


def test_models_that_cannot_be_watched() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"parameter '0\.weight' has no shape yet"):
        find_first_nonfinite(lazy, lambda: lazy(batch(2, 4)).sum())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(TypeError, match="module '1' is TorchScript"):
        find_first_nonfinite(model, lambda: model(batch(2, 4)).sum())


def test_gradients_are_looked_at_within_no_grad() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Between())
    with torch.no_grad():
        assert find_first_nonfinite(model, lambda: model(batch(3, 4)).sum()) == ("1", "backward")
