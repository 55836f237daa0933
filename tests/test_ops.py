"""The operators: what torch.library checks, and clip_grad_norm_ under torch.compile."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastclip
from fastclip import ops
from fastclip.testing.compare import bitwise_equal
from tests.making import floats, grads_of, parameters

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64

pytestmark = pytest.mark.usefixtures("each_backend")


def lists() -> dict[str, list[Tensor]]:
    return {
        "one": [floats(3.0, 4.0)],
        "mixed": [floats(3.0), floats(4.0, dtype=BF16), torch.zeros(0), floats(12.0, dtype=F64)],
        "strided": [torch.randn(5, 7).t(), torch.randn(30)[::2]],
    }


CALLS: dict[str, Callable[[list[Tensor]], tuple[object, tuple[object, ...]]]] = {
    "measure": lambda grads: (ops.measure, (grads, 2.0, None)),
    "measure-inv-scale": lambda grads: (ops.measure, (grads, 2.0, torch.tensor(0.5))),
    "scale_": lambda grads: (ops.scale_, (grads, torch.tensor(0.25, dtype=F64))),
    "scale_-each": lambda grads: (ops.scale_, (grads, torch.full((len(grads),), 0.25, dtype=F64))),
    "clip_": lambda grads: (ops.clip_, (grads, 2.0, torch.tensor(1.0), None)),
    "clip_-inf": lambda grads: (ops.clip_, (grads, math.inf, torch.tensor(1.0), None)),
}


@pytest.mark.parametrize("name", ["one", "mixed", "strided"])
@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call: str, name: str) -> None:
    operator, arguments = CALLS[call](lists()[name])
    checks = torch.library.opcheck(operator, arguments)  # type: ignore[arg-type]
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["measure", "scale_", "clip_"])
def test_no_cuda_graph_of_torch_compile_holds_them(name: str) -> None:
    operator = getattr(torch.ops.fastclip, name).default
    assert torch.Tag.cudagraph_unsafe in operator.tags


def test_operators_do_what_the_backend_does() -> None:
    grads = [floats(3.0, 4.0), floats(12.0)]
    table, total, coef = ops.clip_(grads, 2.0, torch.tensor(6.5))
    assert table.tolist() == [[25.0, 4.0, 0.0, 0.0, 0.0], [144.0, 12.0, 0.0, 0.0, 0.0]]
    assert total.item() == 13.0
    assert coef.item() == pytest.approx(0.5, rel=1e-6)
    assert grads[1].item() == pytest.approx(6.0, rel=1e-6)
    ops.scale_(grads, torch.tensor(2.0, dtype=F64))
    assert ops.measure(grads, math.inf)[:, 0].tolist() == pytest.approx([4.0, 12.0], rel=1e-6)


@pytest.mark.parametrize("max_norm", [1.0, 1e9, math.inf])
def test_compiled_equals_eager(max_norm: float) -> None:
    def clip(params: list[Tensor]) -> Tensor:
        return fastclip.clip_grad_norm_(params, max_norm)

    torch.compiler.reset()
    compiled = torch.compile(clip, fullgraph=True, backend="aot_eager")
    for name, grads in lists().items():
        eager, traced = (parameters(*(grad.clone() for grad in grads)) for _ in range(2))
        expected, got = clip(eager), compiled(traced)
        assert bitwise_equal(expected, got), name
        for a, b in zip(grads_of(eager), grads_of(traced), strict=True):
            assert bitwise_equal(a, b), name


def test_compiled_with_a_gradient_listed_twice() -> None:
    torch.compiler.reset()
    params = parameters(floats(3.0, 4.0))
    compiled = torch.compile(lambda p: fastclip.clip_grad_norm_(p, 1.0), backend="aot_eager")
    assert compiled([*params, *params]).item() == 5.0
    assert grads_of(params)[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


FUNCTIONS: dict[str, Callable[[list[Tensor]], object]] = {
    "clip_grad_norm_": lambda params: fastclip.clip_grad_norm_(params, 1.0),
    "clip_grad_norm_, p=3": lambda params: fastclip.clip_grad_norm_(params, 1.0, norm_type=3),
    "get_total_norm": lambda params: fastclip.get_total_norm([p.grad for p in params]),
    "clip_grads_with_norm_": lambda params: fastclip.clip_grads_with_norm_(
        params, 1.0, torch.tensor(2.0)
    ),
    "clip_grad_value_": lambda params: fastclip.clip_grad_value_(params, 0.5),
    "grad_stats": lambda params: fastclip.grad_stats(params).norms,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_compiles_to_one_graph(name: str) -> None:
    torch.compiler.reset()
    function = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager, traced = (parameters(*lists()["mixed"]) for _ in range(2))
    expected, got = function(eager), compiled(traced)
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor)
        assert bitwise_equal(expected, got)
    for a, b in zip(grads_of(eager), grads_of(traced), strict=True):
        assert bitwise_equal(a, b)


def test_looking_for_nonfinite_elements_breaks_the_graph_and_works() -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda params: fastclip.clip_grad_norm_(params, 1.0, error_if_nonfinite=True),
        backend="aot_eager",
    )
    params = parameters(floats(3.0, 4.0))
    assert compiled(params).item() == 5.0
    assert grads_of(params)[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    bad = parameters(floats(3.0, math.nan))
    with pytest.raises(RuntimeError, match=r"position 0 \(1 NaN"):
        compiled(bad)
    assert grads_of(bad)[0][0].item() == 3.0
