"""Every refusal names the offender, and leaves every gradient bitwise as it was."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fastclip
from tests.making import floats, parameters, snapshot, unchanged

pytestmark = pytest.mark.usefixtures("each_backend")

INF, NAN = math.inf, math.nan
Call = Callable[[Any], object]

NORM_CALLS: dict[str, Call] = {
    "clip_grad_norm_": lambda params: fastclip.clip_grad_norm_(params, 1.0),
    "get_total_norm": lambda params: fastclip.get_total_norm([p.grad for p in params]),
    "clip_grads_with_norm_": lambda params: fastclip.clip_grads_with_norm_(
        params, 1.0, torch.tensor(5.0)
    ),
    "grad_stats": lambda params: fastclip.grad_stats(params),
}
CALLS = NORM_CALLS | {"clip_grad_value_": lambda params: fastclip.clip_grad_value_(params, 0.1)}
WRITERS = ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_")


def _refused(call: Call, grads: Sequence[Tensor | None], error: type[Exception], match: str) -> str:
    params = parameters(*grads)
    before = snapshot(grads)
    with pytest.raises(error, match=match) as caught:
        call(params)
    assert unchanged(grads, before)
    assert unchanged([p.grad for p in params], before)
    return str(caught.value)


BAD_DTYPES = (
    torch.int8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@pytest.mark.parametrize("dtype", BAD_DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_dtypes_without_a_norm(name: str, dtype: torch.dtype) -> None:
    grads = [floats(30.0), None, torch.ones(3).to(dtype)]
    message = _refused(CALLS[name], grads, TypeError, "2")  # the position, None counted
    assert str(dtype).removeprefix("torch.") in message


def test_clip_value_refuses_complex() -> None:
    grads = [floats(30.0), torch.ones(3, dtype=torch.complex64)]
    _refused(CALLS["clip_grad_value_"], grads, TypeError, r"1.*complex64")


@pytest.mark.parametrize("name", CALLS)
def test_the_name_is_named(name: str) -> None:
    if name == "get_total_norm":
        pytest.skip("tensors have no names")
    params = parameters(floats(30.0), torch.ones(3, dtype=torch.int32))
    named = list(zip(("first.weight", "second.bias"), params, strict=True))
    with pytest.raises(TypeError, match=r"second\.bias"):
        CALLS[name](named)
    assert params[0].grad is not None
    assert params[0].grad.item() == 30.0


OVERLAPPING: dict[str, Callable[[], Tensor]] = {
    "unfold": lambda: torch.arange(20.0).unfold(0, 5, 2),
    "as-strided": lambda: torch.arange(20.0).as_strided((4, 4), (2, 1)),
    "diagonal-overlap": lambda: torch.arange(20.0).as_strided((3, 3), (1, 1)),
    "expanded-and-overlapping": lambda: torch.arange(20.0).unfold(0, 5, 2).expand(3, -1, -1),
}


@pytest.mark.parametrize("kind", OVERLAPPING)
@pytest.mark.parametrize("name", WRITERS)
def test_overlapping_memory(name: str, kind: str) -> None:
    _refused(
        CALLS[name], [floats(30.0), OVERLAPPING[kind]()], RuntimeError, "1.*(overlap|share memory)"
    )


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse_csc": lambda: torch.eye(3).to_sparse_csc(),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")  # torch calls the layouts a beta
def test_layouts_without_a_norm(kind: str, position: int) -> None:
    tensors = [floats(30.0)]
    tensors.insert(position, LAYOUTS[kind]())
    with pytest.raises(TypeError, match=rf"{position}.*{kind}"):
        fastclip.get_total_norm(tensors)


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grads_with_norm_"])
@pytest.mark.parametrize("bad", [-1.0, NAN, -INF, -1e-300])
def test_a_bad_max_norm(name: str, bad: float) -> None:
    calls: dict[str, Call] = {
        "clip_grad_norm_": lambda params: fastclip.clip_grad_norm_(params, bad),
        "clip_grads_with_norm_": lambda params: fastclip.clip_grads_with_norm_(
            params, bad, torch.tensor(5.0)
        ),
    }
    _refused(calls[name], [floats(3.0, 4.0)], ValueError, str(bad))
    _refused(calls[name], [], ValueError, str(bad))  # though there is nothing to clip
    _refused(calls[name], [None], ValueError, str(bad))


def test_a_max_norm_of_two_elements() -> None:
    call: Call = lambda params: fastclip.clip_grad_norm_(params, floats(1.0, 2.0))  # noqa: E731
    _refused(call, [floats(3.0)], ValueError, "max_norm.*(2|one)")


@pytest.mark.parametrize("bad", [NAN, "nan", "two"])
def test_a_bad_norm_type(bad: float | str) -> None:
    calls: list[Call] = [
        lambda params: fastclip.clip_grad_norm_(params, 1.0, bad),
        lambda params: fastclip.get_total_norm([p.grad for p in params], bad),
        lambda params: fastclip.grad_stats(params, bad),
    ]
    for call in calls:
        _refused(call, [floats(3.0)], ValueError, str(bad))


@pytest.mark.parametrize("norm_type", [2, INF, 3, -INF, 0])
def test_nonfinite_elements_are_counted_and_located(norm_type: float) -> None:
    grads = [floats(1.0), None, floats(NAN, INF, NAN, 2.0), floats(-INF, dtype=torch.bfloat16)]
    calls: list[Call] = [
        lambda params: fastclip.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True),
        lambda params: fastclip.clip_grad_norm_(params, INF, norm_type, error_if_nonfinite=True),
    ]
    for call in calls:
        message = _refused(call, grads, RuntimeError, "2 NaN")
        # positions count the entry without a gradient
        assert "2" in message
        assert "3" in message
        assert "1 inf" in message.lower()


def test_get_total_norm_locates_nonfinite_tensors() -> None:
    with pytest.raises(RuntimeError, match=r"2.*1 NaN"):
        fastclip.get_total_norm([floats(1.0), None, floats(NAN)], error_if_nonfinite=True)


def test_positions_come_with_how_to_get_names() -> None:
    params = parameters(floats(1.0), floats(INF))
    told = r"position 1 \(0 NaN, 1 inf\)\. Pass the module or \(name, Tensor\) pairs to have names"
    with pytest.raises(RuntimeError, match=told):
        fastclip.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=told):
        fastclip.GradClipper(params, nonfinite="error").clip_()


def test_nonfinite_parameters_are_named() -> None:
    params = parameters(floats(1.0), floats(INF))
    named = list(zip(("embed.weight", "head.bias"), params, strict=True))
    with pytest.raises(RuntimeError, match=r"head\.bias") as caught:
        fastclip.clip_grad_norm_(named, 1.0, error_if_nonfinite=True)
    assert "embed.weight" not in str(caught.value)
    assert "to have names" not in str(caught.value)


def test_at_most_ten_offenders_are_listed() -> None:
    params = parameters(*(floats(NAN) for _ in range(25)))
    named = [(f"layer{i}.weight", p) for i, p in enumerate(params)]
    with pytest.raises(RuntimeError, match="15 more") as caught:
        fastclip.clip_grad_norm_(named, 1.0, error_if_nonfinite=True)
    message = str(caught.value)
    assert sum(f"layer{i}.weight" in message for i in range(25)) == 10
    assert message.index("layer0.weight") < message.index("layer9.weight")


def test_modules_are_not_tensors() -> None:
    with pytest.raises(TypeError, match="Linear"):
        fastclip.get_total_norm(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [3, "weights", [1.0], [("a", 1.0)], [torch.nn.Linear(1, 1)]], ids=str
)
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_", "grad_stats"])
def test_what_is_not_parameters(name: str, bad: object) -> None:
    with pytest.raises(TypeError, match=r"parameters|Tensor"):
        CALLS[name](bad)


def test_a_bad_entry_late_in_the_list_changes_nothing_before_it() -> None:
    params = parameters(floats(30.0))
    entries: list[Any] = [*params, 7]
    with pytest.raises(TypeError, match="1"):
        fastclip.clip_grad_norm_(entries, 1.0)
    assert params[0].grad is not None
    assert params[0].grad.item() == 30.0
