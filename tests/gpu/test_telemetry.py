"""The Monitor on a GPU: observing waits for nothing, and the values are those of their time."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from fastclip.monitor import LayerTable, Monitor, Telemetry
from tests import training
from tests.monitor.test_layers import Amended, At, Watching
from tests.monitor.test_observe import Kept

Forbidden = Callable[[], AbstractContextManager[None]]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch.cuda.is_available() is false: no GPU here"
)

STEPS = 20
BUSY = 1 << 26  # cycles; tens of milliseconds, so that a copy is not done when it is asked for


def parameters() -> training.Parameters:
    values = training.parameters()
    return {name: torch.nn.Parameter(p.detach().cuda()) for name, p in values.items()}


@pytest.mark.parametrize("lag", [None, 2])
@pytest.mark.parametrize("rule", ["MaxNorm", "AdaGC"])
def test_observing_does_not_wait(rule: str, lag: int | None, waiting_raises: Forbidden) -> None:
    params, sink = parameters(), Kept()
    clipper = training.clipper(params, rule)
    monitor, seen = Monitor([], [sink], telemetry=Telemetry(lag)), []
    for step, grads in enumerate(training.stream(STEPS, bad={5: math.nan})):
        training.assign(params, {name: grad.cuda() for name, grad in grads.items()})
        stats = clipper.clip_()
        loss = torch.full((), 2.0 + step, device="cuda", requires_grad=True) * 1
        if step < 14:  # pinned memory is allocated until the first rows have given theirs back
            monitor.observe(step=step, loss=loss, stats=stats, batch=[loss])
        else:
            with waiting_raises():
                monitor.observe(step=step, loss=loss, stats=stats, batch=[loss])
        assert [record.step for record in sink.records] == list(range(step - 1))
        seen.append(stats.cpu())
    monitor.flush()
    for step, (record, stats) in enumerate(zip(sink.records, seen, strict=True)):
        assert (record.step, record.loss, record.batch) == (step, 2.0 + step, [2.0 + step])
        assert repr(record.grad_norm) == repr(stats.total_norm.item())
        assert record.clip_coef == stats.coef.min().item()
        assert (record.clipped, record.skipped) == (bool(stats.clipped), bool(stats.skipped))
        assert record.nonfinite_count == stats.nonfinite_count.item()


@pytest.mark.parametrize("stream", ["default", "side"])
def test_what_changes_a_tensor_later_comes_after_its_copy(stream: str) -> None:
    sink = Kept()
    monitor = Monitor([], [sink])
    side = torch.cuda.Stream() if stream == "side" else torch.cuda.current_stream()
    with torch.cuda.stream(side):
        loss = torch.zeros((), device="cuda")
        ids = torch.zeros(1000, dtype=torch.int64, device="cuda")
        for step in range(6):
            torch.cuda._sleep(BUSY)
            loss.fill_(step)
            ids.fill_(step)
            monitor.observe(step=step, loss=loss, batch=ids)
            loss.fill_(-1)
            ids.fill_(-1)
    monitor.flush()
    assert [record.loss for record in sink.records] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [set(record.batch) for record in sink.records] == [{step} for step in range(6)]


def test_without_a_lag_it_waits() -> None:
    sink = Kept()
    monitor = Monitor([], [sink], telemetry=Telemetry(0))
    for step in range(3):
        torch.cuda._sleep(BUSY)
        monitor.observe(
            step=step, loss=torch.full((), float(step), device="cuda"), lr=torch.ones(1)
        )
        assert [record.loss for record in sink.records] == [float(s) for s in range(step + 1)]


def test_rows_of_layers_and_watches() -> None:
    params, sink = parameters(), Amended()
    clipper = training.clipper(params)
    columns: dict[str, Any] = {"param_norm": torch.arange(2.0, device="cuda")}
    watch = Watching({"layers": LayerTable(("layer.bias", "x"), columns)})
    telemetry = Telemetry(layers_every=4, layers_before=1)
    expected = []
    with Monitor([At(5)], [sink], telemetry=telemetry, watches=[watch]) as monitor:
        for step, grads in enumerate(training.stream(8)):
            training.assign(params, {name: grad.cuda() for name, grad in grads.items()})
            stats = clipper.clip_()
            monitor.observe(step=step, stats=stats)
            expected.append(stats.cpu().layers())
    carrying = [record for record in sink.records if record.layers is not None]
    assert [record.step for record in carrying] == [0, 3, 5, 7]
    assert [record.step for record in sink.amended] == [4]
    for record in (*carrying[1:], *sink.amended):
        assert record.layers is not None
        own = [(row.name, row.norm, row.max_abs) for row in record.layers]
        assert own == [(layer.name, layer.norm, layer.max_abs) for layer in expected[record.step]]
    assert carrying[0].layers is not None
    by_name = {row.name: row.param_norm for row in carrying[0].layers}
    assert (by_name["layer.bias"], by_name["x"]) == (0.0, 1.0)
