"""compare_precisions against torch alone, and against float64."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fastclip.monitor import PrecisionReport, compare_precisions
from tests.monitor.batch.cases import CASES, Case, Forward, batch, healthy
from tests.monitor.batch.parts import Apply, Catching

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 3)


def by_torch(model: nn.Sequential, x: Tensor) -> tuple[float, float, float]:
    """Loss, gradient norm and largest output, layer by layer, where autocast is as it is."""
    value, most = x, 0.0
    for layer in model:
        value = layer(value)
        most = max(most, value.abs().max().item())
    loss = nn.functional.cross_entropy(value, torch.arange(len(x)) % 3)
    with torch.autocast("cpu", enabled=False):
        grads = torch.autograd.grad(loss, list(model.parameters()))
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
    return loss.item(), norm, most


@pytest.mark.parametrize("name", DTYPES)
def test_values_of_each_precision(name: str) -> None:
    model, x = network(), 3 * batch(16, 4)
    report = compare_precisions(model, lambda: loss_of(model, x), [name])[name]
    with torch.autocast("cpu", DTYPES[name], enabled=name != "fp32"):
        loss, norm, most = by_torch(model, x)
    assert report == PrecisionReport(loss, report.grad_norm, most, None)
    assert report.grad_norm == pytest.approx(norm, rel=1e-12)
    assert report.finite


def test_precisions_near_float64() -> None:
    """Within a few roundings: 4 eps of the dtype in what is of the order of one."""
    model, x = network(), batch(16, 4)
    expected = by_torch(copy.deepcopy(model).double(), x.double())
    reports = compare_precisions(model, lambda: loss_of(model, x))
    assert list(reports) == ["fp32", "bf16", "fp16"]
    for name, report in reports.items():
        eps = torch.finfo(DTYPES[name]).eps
        assert report[:3] == pytest.approx(expected, rel=4 * eps), name
    assert reports["bf16"].loss != reports["fp16"].loss != reports["fp32"].loss


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_faults_that_do_not_depend_on_precision(case: Case) -> None:
    model, forward = case.build()
    report = compare_precisions(model, forward, ["fp32"])["fp32"]
    assert report.nonfinite == (None if case.origin is None else case.origin[0])
    assert report.finite == (case.origin is None or case.vanishes)


def overflowing() -> tuple[nn.Module, Forward, str]:
    """4 * 300 * 300 is over 65504."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))
    nn.init.constant_(model.get_parameter("0.weight"), 75.0)
    nn.init.constant_(model.get_parameter("1.0.weight"), 300.0)
    x = torch.ones(2, 4)
    return model, lambda: model(x).float().mean(), "1.0"


def attention() -> tuple[nn.Module, Forward, str]:
    """Scores over 65504: infinite, all of them, so that the softmax is NaN."""
    scores = Apply(lambda x: x @ x.mT)
    model = nn.Sequential(nn.Linear(4, 4), scores, nn.Softmax(-1))
    nn.init.constant_(model.get_parameter("0.weight"), 40.0)
    x = torch.ones(3, 4)
    return model, lambda: model(x).float().sum(), "1"


def back_alone() -> tuple[nn.Module, Forward, str]:
    """The gradient of the first layer's weight sums 512 times 300."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.constant_(model.get_parameter("1.weight"), 1.0)
    x = torch.ones(512, 4)
    return model, lambda: (model(x).float() * 300.0).sum(), "1"


@pytest.mark.parametrize("build", [overflowing, attention, back_alone])
def test_overflow_in_fp16_alone(build: Callable[[], tuple[nn.Module, Forward, str]]) -> None:
    model, forward, module = build()
    reports = compare_precisions(model, forward)
    assert {name: report.finite for name, report in reports.items()} == {
        **dict.fromkeys(("fp32", "bf16"), True),
        "fp16": False,
    }
    assert [report.nonfinite for report in reports.values()] == [None, None, module]


def test_underflow_without_a_loss_scale() -> None:
    """1e-9 is zero in fp16; forward() may scale, and then says so in the norm."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    x = torch.ones(1, 4)
    tiny = lambda: model(x).float().sum() * 1e-9  # noqa: E731
    reports = compare_precisions(model, tiny)
    assert reports["fp32"].grad_norm == pytest.approx(2e-9)
    assert reports["fp16"].grad_norm == 0.0
    scaled = compare_precisions(model, lambda: tiny() * 2.0**16, ["fp16"])["fp16"]
    assert scaled.grad_norm == pytest.approx(2e-9 * 2.0**16, rel=1e-3)


def test_complex_parameters() -> None:
    """The loss is the sum of |w|^2, its gradient 2 w as torch has it: |w| is 5 and 13."""
    model, weight = nn.Module(), nn.Parameter(torch.tensor([3 + 4j, 5 - 12j]))
    model.register_parameter("weight", weight)
    report = compare_precisions(model, lambda: weight.abs().square().sum(), ["fp32"])["fp32"]
    assert report.loss == pytest.approx(25 + 169)
    assert report.grad_norm == pytest.approx(2 * math.sqrt(25 + 169))


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_an_infinite_activation_is_the_largest(bad: float) -> None:
    """Also where the next module makes something finite of it."""
    model = nn.Sequential(Apply(lambda x: x + bad), nn.Sigmoid(), nn.Linear(2, 1))
    reports = compare_precisions(model, lambda: model(torch.ones(2)).float().sum())
    assert [report.activation_max for report in reports.values()] == [math.inf] * 3
    assert [report.nonfinite for report in reports.values()] == ["0"] * 3
    assert all(report.finite for report in reports.values())


def test_a_nan_is_larger_than_any_activation() -> None:
    model = nn.Sequential(Apply(lambda x: x * math.inf), nn.Linear(2, 1))
    x = torch.tensor([0.0, 1.0])
    report = compare_precisions(model, lambda: model(x).sum(), ["fp32"])["fp32"]
    assert math.isnan(report.activation_max)
    assert report.nonfinite == "0"
    assert not report.finite


@settings(deadline=None)
@given(st.integers(-40, 40), st.integers(-40, 40))
def test_finite_is_what_torch_says(first: int, second: int) -> None:
    """Layers of any size of weights, in every precision."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), batch(3, 2)
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(10.0**first)
        model.get_parameter("1.weight").mul_(10.0**second)
    reports = compare_precisions(model, lambda: model(x).float().sum())
    for name, report in reports.items():
        with torch.autocast("cpu", DTYPES[name], enabled=name != "fp32"):
            loss = model(x).float().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        finite = all(bool(value.isfinite().all()) for value in [loss, *grads])
        assert report.finite == finite
        assert (report.nonfinite is None) == finite


def test_the_autocast_of_the_caller_is_off_in_fp32() -> None:
    model, x = network(), batch(16, 4)
    expected = compare_precisions(model, lambda: loss_of(model, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert compare_precisions(model, lambda: loss_of(model, x)) == expected


def test_parameters_in_16_bits_are_named() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)).bfloat16(), batch(6, 4)
    with pytest.warns(UserWarning, match=r"parameter '0\.weight' is torch\.bfloat16") as caught:
        reports = compare_precisions(model, lambda: loss_of(model, x.bfloat16()))
    assert caught[0].filename == __file__
    assert reports["fp32"].loss == loss_of(model, x.bfloat16()).item()  # in bf16, its dtype
    assert list(compare_precisions(model, lambda: loss_of(model, x), ["bf16"])) == ["bf16"]


def test_unknown_precisions_are_refused_before_anything_runs() -> None:
    model, _ = healthy()
    with pytest.raises(ValueError, match="one of fp32, bf16, fp16, got 'fp8'"):
        compare_precisions(model, lambda: pytest.fail("forward was called"), ["fp32", "fp8"])
    assert compare_precisions(model, lambda: pytest.fail("forward was called"), []) == {}


def test_a_device_without_a_precision_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device without the dtype does: torch warns and leaves autocast off."""
    model, forward = healthy()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    with pytest.raises(RuntimeError, match="autocast on the device cpu has no float16"):
        compare_precisions(model, forward, ["fp16"])


class Refusing(nn.Module):
    """Has no kernel for some dtypes."""

    def __init__(self, *dtypes: torch.dtype, backward: bool = False) -> None:
        super().__init__()
        self.dtypes, self.backward = dtypes, backward

    def forward(self, x: Tensor) -> Tensor:
        if self.backward:
            x.register_hook(self.refuse)
        else:
            self.refuse(x)
        return x

    def refuse(self, x: Tensor) -> None:
        if x.dtype in self.dtypes:
            raise RuntimeError(f"no kernel for {x.dtype}")


def refusing(*dtypes: torch.dtype, backward: bool = False) -> tuple[nn.Sequential, Forward]:
    part = nn.Sequential(nn.Linear(4, 4), Refusing(*dtypes, backward=backward))
    model, x = nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 1)), batch(3, 4)
    return model, lambda: model(x).float().sum()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_precision_that_fails_loses_no_report(backward: bool) -> None:
    model, forward = refusing(torch.bfloat16, backward=backward)
    reports = compare_precisions(model, forward, ["fp32", "fp16"])
    with pytest.raises(RuntimeError) as raised:
        compare_precisions(model, forward)
    by = "" if backward else "module '1.1' raised "
    assert str(raised.value).splitlines() == [
        f"the model does not run in bf16: {by}RuntimeError: no kernel for torch.bfloat16",
        "It does with precisions=('fp32', 'fp16'):",
        f"fp32: {reports['fp32']}",
        f"fp16: {reports['fp16']}",
    ]
    assert str(raised.value.__cause__) == "no kernel for torch.bfloat16"


def test_several_precisions_that_fail_are_all_named() -> None:
    model, forward = refusing(*DTYPES.values())
    with pytest.raises(RuntimeError) as raised:
        compare_precisions(model, forward)
    assert str(raised.value).splitlines() == [
        f"the model does not run in {name}: module '1.1' raised RuntimeError: no kernel for {dtype}"
        for name, dtype in DTYPES.items()
    ]


def test_the_module_that_lets_an_error_through_is_named() -> None:
    """Not one whose error was caught before, nor by the error that the caller is handling."""
    model, forward = refusing(torch.float16)
    model.insert(0, Catching(False))
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        with pytest.raises(RuntimeError, match=r"in fp16: module '2\.1' raised RuntimeError: no"):
            compare_precisions(model, forward)


def test_an_error_outside_all_modules_names_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Catching(False), nn.Linear(4, 1))
    refuse = Refusing(torch.bfloat16).refuse

    def forward() -> Tensor:
        refuse(model(batch(3, 4)))
        return model(batch(3, 4)).float().sum()

    with pytest.raises(RuntimeError, match=r"in bf16: RuntimeError: no kernel for"):
        compare_precisions(model, forward)


def test_a_report_prints_as_it_reads() -> None:
    report = PrecisionReport(1.0, 2.0, 3.0, "blocks.0")
    assert report.finite
    assert not report._replace(grad_norm=math.inf).finite
    assert not report._replace(loss=math.nan).finite
    assert str(report) == (
        "PrecisionReport(loss=1.0, grad_norm=2.0, activation_max=3.0, nonfinite='blocks.0')"
    )
