"""Which backend serves, why, and what a request that cannot be met says."""

import asyncio
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fastclip
from fastclip import backends
from fastclip.backends import Backend
from tests.conftest import VARIANTS
from tests.making import floats, parameters

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def test_reference_is_always_available() -> None:
    assert backends.available()["reference"] is None
    assert backends.get("reference").name == "reference"


def test_available_gives_a_reason_for_what_is_not() -> None:
    for name, reason in backends.available().items():
        assert reason is None or len(reason) > 10
        if reason is None:
            assert isinstance(backends.get(name), Backend)
        else:
            with pytest.raises(RuntimeError, match=name) as caught:
                backends.get(name)
            assert reason in str(caught.value)


def test_automatic_choice_on_the_cpu(cpu_available: None) -> None:
    assert backends.choose(CPU).name == "cpu"
    name, reason = backends.explain()["cpu"]
    assert name == "cpu"
    assert "automatic" in reason
    assert "complex" in reason  # what its kernels hand to the reference


def test_other_devices_are_served_by_the_reference() -> None:
    assert backends.choose(torch.device("meta")).name == "reference"


def test_explain_has_a_reason_per_device() -> None:
    explained = backends.explain()
    assert {"cpu", "cuda"} <= set(explained)
    for name, reason in explained.values():
        assert name in backends.available()
        assert reason


def test_context_manager() -> None:
    outside = backends.choose(CPU).name
    with fastclip.backend("reference"):
        assert backends.choose(CPU).name == "reference"
        assert backends.explain()["cpu"][0] == "reference"
        assert "backend" in backends.explain()["cpu"][1]
    assert backends.choose(CPU).name == outside


def test_context_managers_nest_and_end_on_errors(cpu_available: None) -> None:
    with fastclip.backend("reference"):
        try:
            with fastclip.backend("cpu"):
                assert backends.choose(CPU).name == "cpu"
                raise KeyError
        except KeyError:
            pass
        assert backends.choose(CPU).name == "reference"
        with fastclip.backend("cpu"), fastclip.backend("reference"):
            assert backends.choose(CPU).name == "reference"


def test_the_context_is_this_threads_alone() -> None:
    outside = backends.choose(CPU).name
    seen = []
    with fastclip.backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(backends.choose(CPU).name))
        thread.start()
        thread.join()
    assert seen == [outside]


def test_threads_do_not_disturb_each_other(cpu_available: None) -> None:
    barrier = threading.Barrier(2, timeout=10)
    seen: dict[str, str] = {}

    def work(name: str) -> None:
        with fastclip.backend(name):
            barrier.wait()
            seen[name] = backends.choose(CPU).name
            barrier.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("reference", "cpu")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"reference": "reference", "cpu": "cpu"}


def test_async_tasks_do_not_disturb_each_other(cpu_available: None) -> None:
    async def work(name: str) -> str:
        with fastclip.backend(name):
            await asyncio.sleep(0.01)
            return backends.choose(CPU).name

    async def both() -> list[str]:
        return list(await asyncio.gather(work("reference"), work("cpu")))

    assert asyncio.run(both()) == ["reference", "cpu"]


def test_an_unknown_backend_fails_on_entry() -> None:
    entered = False
    with pytest.raises(RuntimeError, match=r"'fpga'.*available: .*reference"):
        with fastclip.backend("fpga"):
            entered = True
    assert not entered


@pytest.mark.parametrize("name", ["fpga", ""])
def test_get_of_an_unknown_backend(name: str) -> None:
    with pytest.raises(RuntimeError, match="reference"):
        backends.get(name)


def test_the_environment_asks(monkeypatch: pytest.MonkeyPatch, cpu_available: None) -> None:
    monkeypatch.setenv("FASTCLIP_BACKEND", "reference")
    assert backends.choose(CPU).name == "reference"
    assert "FASTCLIP_BACKEND" in backends.explain()["cpu"][1]
    with fastclip.backend("cpu"):  # goes before the environment
        assert backends.choose(CPU).name == "cpu"
    monkeypatch.delenv("FASTCLIP_BACKEND")
    assert backends.choose(CPU).name == "cpu"


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_an_environment_that_cannot_be_met_raises_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, max_norm: float
) -> None:
    monkeypatch.setenv("FASTCLIP_BACKEND", "fpga")
    params = parameters(floats(30.0))
    calls = (
        lambda: fastclip.clip_grad_norm_(params, max_norm),
        lambda: fastclip.grad_stats(params),
        lambda: fastclip.get_total_norm([floats(30.0)]),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"fpga.*available: .*reference"):
            call()
    assert params[0].grad is not None
    assert params[0].grad.item() == 30.0


def test_a_backend_that_does_not_serve_the_device(cpu_available: None) -> None:
    with fastclip.backend("cpu"), pytest.raises(RuntimeError, match=r"'cpu'.*meta"):
        backends.choose(torch.device("meta"))


def test_the_environment_in_a_new_process() -> None:
    code = "import fastclip; print(fastclip.backends.explain()['cpu'][0])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"FASTCLIP_BACKEND": "reference", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "reference\n"


def test_simd_levels(cpu_available: None) -> None:
    from fastclip.backends import native

    before = native.simd()
    usable = [variant for variant in VARIANTS if variant.simd and not variant.unavailable]
    try:
        for variant in usable:
            assert variant.simd is not None
            assert native.simd(variant.simd) == variant.simd
            assert native.simd() == variant.simd
            assert variant.simd in native.description()
        with pytest.raises(ValueError, match="'sse9'"):
            native.simd("sse9")
        assert native.simd() == usable[-1].simd  # a refused level changes nothing
    finally:
        native.simd(before)


@pytest.mark.parametrize("level", ["plain", "avx2"])
def test_the_environment_sets_the_simd_level(level: str, cpu_available: None) -> None:
    chosen = next(variant for variant in VARIANTS if variant.simd == level)
    if chosen.unavailable:
        pytest.skip(chosen.unavailable)
    run = _simd_process(level)
    assert run.stdout == f"{level}\n"


def test_a_wrong_simd_level_in_the_environment_is_said(cpu_available: None) -> None:
    run = _simd_process("sse9")
    assert run.returncode != 0
    assert "FASTCLIP_SIMD" in run.stderr
    assert "sse9" in run.stderr


def _simd_process(level: str) -> "subprocess.CompletedProcess[str]":
    import os

    code = "from fastclip.backends import native; print(native.simd())"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"FASTCLIP_SIMD": level},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_device_without_float64_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"mps.*float64"):
        fastclip.backends.choose(torch.device("mps"))


def test_a_refused_list_keeps_no_tensor(cpu_available: None) -> None:
    grads = [torch.ones(3), torch.ones(3, dtype=torch.complex64), torch.ones(3), torch.ones(3)]
    before = [grad._use_count() for grad in grads]  # type: ignore[attr-defined]
    with fastclip.backend("cpu") as backend:
        for _ in range(3):
            backend.measure(grads, 2.0, None)
            backend.scale_(grads, torch.tensor(0.5, dtype=torch.float64))
    assert [grad._use_count() for grad in grads] == before  # type: ignore[attr-defined]
