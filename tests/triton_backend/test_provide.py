"""When the backend can be had, and what it says when it cannot. Needs no Triton."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastclip import backends
from fastclip.backends import triton as backend
from fastclip.backends.contract import Unavailable

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call with a version of Triton that seems to be installed, None for no Triton."""

    def install(number: str | None) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: number)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: number)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    return install


def test_no_triton(version: Any) -> None:
    version(None)
    with pytest.raises(Unavailable, match="triton is not installed"):
        backend.provide()


@pytest.mark.parametrize("number", ["2.3.1", "3.3.9"])
def test_a_triton_that_is_too_old(version: Any, number: str) -> None:
    version(number)
    with pytest.raises(Unavailable, match=rf"{number} is older than 3\.4"):
        backend.provide()


@pytest.mark.parametrize("number", ["3.4.0", "3.10.0+git1234", "4.0"])
def test_a_triton_that_will_do(version: Any, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version(number)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    provided = backend.provide()
    assert provided.device_types == frozenset({"cuda"})
    assert number in provided.about
    assert "complex" in provided.about  # what its kernels hand to the reference


def test_no_gpu(version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version("3.9.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="no CUDA device"):
        backend.provide()


def test_interpreted_it_takes_cpu_tensors(version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version("3.9.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.provide().device_types == frozenset({"cuda", "cpu"})
    assert backends.AUTOMATIC["cpu"] == ("cpu", "reference")  # and only if asked for


def test_looking_for_it_does_not_import_triton() -> None:
    code = (
        "import sys; from fastclip import backends; "
        "backends.available(); backends.explain(); print('triton' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"
    assert run.stderr == ""  # nothing was asked of a GPU: nothing to warn about
