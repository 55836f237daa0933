"""What the host does: how many kernels it starts, what else reaches the device, what it keeps."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

import fastclip
from fastclip import backends
from fastclip.backends import triton as backend
from fastclip.backends import triton_plan
from fastclip.backends.contract import Backend
from fastclip.backends.triton_plan import Grid
from tests.making import parameters

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64

pytestmark = pytest.mark.skipif(backend.interpreted(), reason="the launches are not carried out")


class Recorder:
    """Stands in for the launches: notes them, and fills no result."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def __call__(self, kernel: Any, blocks: int, *arguments: object, **options: object) -> None:
        self.kernels.append(kernel.__name__)
        self.calls.append({"blocks": blocks, "arguments": arguments, **options})


def operations(call: Callable[[], object]) -> set[str]:
    """Every operation of torch that the call runs, as the profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events() if "::" in event.name}


# Memory without a value, and other views of memory: nothing runs on a device for them.
FREE = {"aten::empty", "aten::view", "aten::detach", "detach", "aten::reshape"}


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(backend, "launch", found)
    monkeypatch.setattr(backend, "_plans", triton_plan.Plans())
    return found


def _grads(dtypes: tuple[torch.dtype, ...] = (F32,), n: int = 40) -> list[Tensor]:
    return [torch.randn(i % 50).to(dtypes[i % len(dtypes)]) for i in range(n)]


def _cooperative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_grid", lambda device: Grid(8, 1 << 20, 4))


@pytest.mark.parametrize("n", [1, 40, 3000])
def test_two_launches_and_nothing_else(recorder: Recorder, n: int) -> None:
    grads = _grads(n=n)
    backend.quick_clip_(grads, 2.0, 1.0)
    recorder.kernels.clear()
    found = operations(lambda: backend.quick_clip_(grads, 2.0, 1.0))
    assert recorder.kernels == ["measure_kernel", "scale_kernel"]
    assert "aten::empty" in found
    assert found <= FREE


def test_public_clip_grad_norm_(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Backend(
        *("triton", frozenset({"cpu"}), "", backend.measure, backend.scale_, backend.clip_),
        *(backend.quick_measure, backend.quick_scale_, backend.quick_clip_),
    )
    monkeypatch.setattr(backends, "choose", lambda device: served)
    params = parameters(*_grads())
    fastclip.clip_grad_norm_(params, 1.0)
    recorder.kernels.clear()
    max_norm = torch.tensor(1.0)
    found = operations(lambda: fastclip.clip_grad_norm_(params, max_norm))
    assert recorder.kernels == ["measure_kernel", "scale_kernel"]
    assert found <= FREE


def test_a_copy_would_be_seen() -> None:
    x = torch.ones(3)
    assert not operations(lambda: x.copy_(x + 1)) <= FREE


def test_two_launches_a_dtype(recorder: Recorder) -> None:
    backend.quick_clip_(_grads((F32, BF16, F64)), 2.0, 1.0)
    assert recorder.kernels == 3 * ["measure_kernel"] + 3 * ["scale_kernel"]
    measures = recorder.calls[:3]
    assert [call["LAST"] for call in measures] == [False, False, True]
    assert len({call["DTYPE"] for call in measures}) == 3
    assert [call["DTYPE"] for call in recorder.calls[3:]] == [c["DTYPE"] for c in measures[::-1]]


def test_one_cooperative_launch(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    _cooperative(monkeypatch)
    backend.quick_clip_(_grads(), 2.0, 1.0)
    assert recorder.kernels == ["clip_kernel"]
    assert recorder.calls[0]["blocks"] == 4
    backend.quick_clip_(_grads((F32, BF16)), 2.0, 1.0)  # two dtypes are two grids
    backend.quick_clip_([torch.randn(1 << 19)], 2.0, 1.0)  # 2 MiB do not fit
    assert recorder.kernels[1:].count("clip_kernel") == 0


def test_an_infinite_threshold_needs_no_second_launch(recorder: Recorder) -> None:
    grads = _grads()
    backend.quick_clip_(grads, 2.0, math.inf)
    assert recorder.kernels == ["measure_kernel"]
    backend.clip_(grads, 2.0, math.inf, torch.tensor(0.5))
    backend.clip_(grads, 2.0, torch.tensor(math.inf), None)  # known on the device alone
    assert recorder.kernels[1:] == 2 * ["measure_kernel", "scale_kernel"]


def test_measure_and_scale_are_one_launch_each(recorder: Recorder) -> None:
    grads = _grads()
    backend.quick_measure(grads, 1.0)
    backend.quick_scale_(grads, torch.tensor(0.5, dtype=F64))
    backend.quick_scale_(grads, torch.rand(len(grads), dtype=F64))
    assert recorder.kernels == ["measure_kernel", "scale_kernel", "scale_kernel"]
    assert [call["PER_ROW"] for call in recorder.calls[1:]] == [False, True]


def test_only_empty_gradients(recorder: Recorder) -> None:
    backend.quick_clip_([torch.zeros(0), torch.zeros(0, 3)], 2.0, 1.0)
    assert recorder.kernels == ["measure_kernel", "scale_kernel"]
    assert [call["blocks"] for call in recorder.calls] == [1, 1]


def test_the_threshold_is_not_compiled_in(recorder: Recorder) -> None:
    from fastclip.backends import triton_kernels

    grads = _grads()
    for max_norm in (1.0, 0.1, 0.0):
        backend.quick_clip_(grads, 2.0, max_norm)
    values = [call["arguments"] for call in recorder.calls if "LAST" in call]
    assert len({str(arguments[-4]) for arguments in values}) == 3
    assert "max_norm_bits" in triton_kernels.measure_kernel.do_not_specialize


class TestPlans:
    """What is uploaded when."""

    @pytest.fixture
    def uploads(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        sizes: list[int] = []
        upload = triton_plan._upload

        def noted(target: Tensor, values: Any, pinned: Tensor | None) -> None:
            sizes.append(len(values))
            upload(target, values, pinned)

        monkeypatch.setattr(triton_plan, "_upload", noted)
        return sizes

    def _find(self, plans: triton_plan.Plans, grads: list[Tensor]) -> triton_plan.Plan:
        plan = plans.find(grads, Grid(4))
        assert plan is not None
        return plan

    def test_a_hit_uploads_nothing(self, uploads: list[int]) -> None:
        plans, grads = triton_plan.Plans(), _grads()
        plan = self._find(plans, grads)
        assert self._find(plans, grads) is plan
        assert len(uploads) == 1

    def test_new_addresses_are_all_that_is_uploaded(self, uploads: list[int]) -> None:
        plans, grads = triton_plan.Plans(), _grads()
        plan = self._find(plans, grads)
        moved = [grad.clone() for grad in grads]
        assert self._find(plans, moved) is plan
        assert uploads[1:] == [sum(grad.numel() > 0 for grad in grads)]
        expected = [grad.data_ptr() for grad in moved if grad.numel()]
        assert plan.groups[0].addresses.tolist() == expected

    def test_other_sizes_dtypes_strides_or_grids_are_another_plan(self) -> None:
        plans, grads = triton_plan.Plans(), [torch.randn(6, 4), torch.randn(8)]
        first = self._find(plans, grads)
        others = (
            [torch.randn(6, 4), torch.randn(9)],
            [torch.randn(6, 4), torch.randn(8).to(BF16)],
            [torch.randn(12, 4)[::2], torch.randn(8)],
            [torch.randn(4, 6).t(), torch.randn(8)],
        )
        found = [first, *(self._find(plans, other) for other in others)]
        assert len(set(map(id, found))) == 5
        assert plans.find(grads, Grid(8)) is not first
        assert self._find(plans, grads) is first

    def test_the_plan_used_longest_ago_goes_first(self) -> None:
        plans, grads = triton_plan.Plans(), _grads(n=3)
        first = self._find(plans, grads)
        for n in range(triton_plan.CACHED - 1):
            self._find(plans, [torch.randn(n + 100)])
            assert self._find(plans, grads) is first
        lists = [[torch.randn(n + 1000)] for n in range(triton_plan.CACHED)]
        for other in lists:
            self._find(plans, other)
        assert self._find(plans, grads) is not first

    def test_what_is_refused(self) -> None:
        x = torch.randn(8)
        shifted = torch.frombuffer(bytearray(33), dtype=F32, offset=1)
        refused = (
            [x, x],
            [x, x.to(torch.complex64)],
            [x, x.to(torch.int32)],
            [x, torch.zeros(3).to_sparse()],
            [x, torch.zeros(1).expand(3)],
            [x, torch.empty(3, device="meta")],
            [x, shifted],
            [x, torch.randn(20).as_strided((3, 3), (2, 2))],
        )
        plans = triton_plan.Plans()
        for grads in refused:
            for _ in range(2):
                assert plans.find(grads, Grid(4)) is None
        assert plans.find([x], Grid(4)) is not None
        assert plans.find([shifted[:0], x], Grid(4)) is not None

    def test_whatever_the_default_device_is(self) -> None:
        grads = _grads()
        with torch.device("meta"):
            plan = self._find(triton_plan.Plans(), grads)
        assert plan.addresses.device.type == "cpu"
        assert plan.addresses.tolist() == [grad.data_ptr() for grad in grads if grad.numel()]
