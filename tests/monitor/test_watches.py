"""Watches in a run: through a Monitor into the log, without a wait for a device."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fastclip
from fastclip.monitor import (
    JSONL,
    ActivationWatch,
    Event,
    Monitor,
    ParameterWatch,
    StepRecord,
    Telemetry,
    compare_precisions,
    find_first_nonfinite,
)
from tests.forbidding import NoReads


def test_a_run_logs_what_they_measure(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clipper = fastclip.GradClipper(model, 1.0)
    activations, parameters = ActivationWatch(model, every=2), ParameterWatch(model, every=4)
    path = tmp_path / "run.jsonl"
    largest, norms, events = [], [], list[Event]()
    with Monitor(
        sinks=[JSONL(path)],
        telemetry=Telemetry(lag=2, layers_every=4, layers_before=0),
        watches=[activations, parameters],
    ) as monitor:
        for step in range(8):
            x = torch.randn(16, 6)
            if step == 5:
                x[3] = math.nan
            loss = model(x).square().mean()
            with torch.no_grad():
                parts = [x := module(x) for module in model]
            largest.append(max(float(part.abs().max()) for part in parts))
            optimizer.zero_grad()
            loss.backward()
            with parameters:
                stats = clipper.step(optimizer)
            events += monitor.observe(step=step, loss=loss.detach(), stats=stats)
            norms.append(
                math.hypot(*(float(p.detach().double().norm()) for p in model.parameters()))
            )
    events += monitor.flush()
    records = list(JSONL(path))
    assert [record.step for record in records] == list(range(8))
    for step, record in enumerate(records):
        if step % 2:
            assert record.activation_max == pytest.approx(largest[step], nan_ok=True)
        else:
            assert record.activation_max is None
        if step % 4 == 3:
            assert record.param_norm == pytest.approx(norms[step], rel=1e-6)
            assert record.update_ratio is not None
            assert 0 < record.update_ratio < 1
            assert record.layers is not None
            assert [row.name for row in record.layers] == list(stats.names)
            for row in record.layers:
                assert None not in row
        else:
            assert (record.param_norm, record.update_ratio) == (None, None)
    assert [e.step for e in events if e.metric == "activation_max" and e.kind == "nonfinite"] == [5]


def test_rows_of_layers_carry_gradients_and_parameters_together() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.grad = torch.tensor([0.0, 2.0])
    clipper = fastclip.GradClipper([("w", parameter)], 10.0)
    watch = ParameterWatch([("w", parameter)], every=1)
    records: list[StepRecord] = []

    class Kept:
        def write(self, record: StepRecord, events: list[Event]) -> None:
            records.append(record)

    monitor = Monitor([], [Kept()], telemetry=Telemetry(layers_every=1), watches=[watch])
    with watch:
        stats = clipper.step(torch.optim.SGD([parameter], lr=1.0))
    monitor.observe(step=0, stats=stats)
    [record] = records
    assert record.layers is not None
    [row] = record.layers
    assert row[:4] == ("w", 2.0, 2.0, 0.0)
    assert row[4:] == pytest.approx((math.hypot(3, 2), 0.4), rel=1e-6)


def test_a_step_with_watches_reads_nothing_on_the_host() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    clipper = fastclip.GradClipper(model, 1.0)
    activations, parameters = ActivationWatch(model), ParameterWatch(model, every=1)
    monitor = Monitor(telemetry=Telemetry(lag=2), watches=[activations, parameters])
    x = torch.randn(16, 6)
    with NoReads():
        loss = model(x).square().mean()
        loss.backward()
        with parameters:
            stats = clipper.step(optimizer)
        assert monitor.observe(step=0, loss=loss, stats=stats) == []
    monitor.flush()


def test_looking_into_a_batch_is_no_step() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    with torch.no_grad():
        own, larger = model[0](batch).abs().max(), model[0](100 * batch).abs().max()
    with ActivationWatch(model) as watch:
        model(batch)
        assert find_first_nonfinite(model, lambda: model(100 * batch).sum()) is None
        compare_precisions(model, lambda: model(100 * batch).sum(), ("fp32", "bf16"))
        assert watch.take() == {"activation_max": own}
        model(100 * batch)
        assert watch.take() == {"activation_max": larger}
