"""Names and numbers, and clients that are not there."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from fastclip.monitor import Event, LayerRow, StepRecord
from fastclip.monitor.records import METRICS
from fastclip.monitor.sinks.scalars import scalars, sentence
from tests.monitor.making import healthy


def test_every_number_of_a_record_is_there_once() -> None:
    record = replace(
        healthy(1)[0], layers=(LayerRow("w", *(0.5,) * 5), LayerRow("b", norm=math.inf))
    )
    found = scalars(record, "p", True)
    columns = [f"p/layers/w/{name}" for name in LayerRow._fields[1:]]
    fields = [f"p/{name}" for name in (*METRICS, "clipped", "skipped", "attempt")]
    assert sorted(found) == sorted([*fields, *columns, "p/layers/b/norm"])
    assert all(type(value) is float for value in found.values())
    assert found["p/loss"] == record.loss
    assert found["p/layers/b/norm"] == math.inf
    assert sorted(scalars(record, "p", False)) == sorted(fields)


def test_an_empty_record_has_its_attempt_alone() -> None:
    assert scalars(StepRecord(5, attempt=2), "p", True) == {"p/attempt": 2.0}


def test_the_sentence_of_an_event() -> None:
    event = Event(7, "spike", "warn", "loss", 2.0, 1.0, onset=7, message="loss 2 is too large")
    assert sentence(event) == "step 7: warn: spike, loss 2 is too large"
    assert sentence(replace(event, onset=0)).startswith("step 7 (onset 0): ")
    assert sentence(replace(event, message="")) == "step 7: warn: spike, loss"


CLIENTS = {
    "Console": ("rich", "console"),
    "MLflow": ("mlflow", "mlflow"),
    "TensorBoard": ("tensorboard", "tensorboard"),
    "WandB": ("wandb", "wandb"),
}


@pytest.mark.parametrize("sink", CLIENTS)
def test_a_client_that_is_not_there_is_an_error_that_says_what_to_install(
    sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, extra = CLIENTS[sink]
    script = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from fastclip.monitor import {sink}
try:
    {sink}(*["x"] * ({sink!r} == "TensorBoard"))
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    needed = f"{sink} needs the package {package}: pip install 'torch-fastclip[{extra}]'\n"
    assert done.stdout == needed


def test_no_client_is_imported_before_its_sink_is_made() -> None:
    script = f"""
import sys
from fastclip.monitor import {", ".join(CLIENTS)}
print({{"torch", *{[package for package, _ in CLIENTS.values()]}}} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"


def test_a_client_that_is_broken_says_what_it_lacks() -> None:
    from fastclip.monitor.sinks.client import client

    with pytest.raises(ModuleNotFoundError, match=r"No module named 'json\.nothing'"):
        client("Sink", "extra", "json.nothing")
