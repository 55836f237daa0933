"""Every line of the README that can be run, is."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fastclip
from fastclip.monitor import JSONL, Monitor
from tests.printed import assert_alike

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ROW = re.compile(r"^\| ([^|]+) \| `([^|]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
DIFFERENCES = ROW.findall(README[README.index("## Differences") :])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run."""
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def namespace(folder: Path) -> dict[str, Any]:
    """What the README's examples leave behind, run in order."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in BLOCKS:
            exec(block, names)
    return names


def test_examples_run(namespace: dict[str, Any]) -> None:
    assert len(BLOCKS) == 6
    assert namespace["total_norm"] > 1
    assert fastclip.get_total_norm([p.grad for p in namespace["model"].parameters()]) <= 1.00001


def test_the_first_example_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[0], {})
    shown = README[README.index("4 gradients") :].split("```")[0]
    assert_alike(capsys.readouterr().out, shown)


def test_the_watched_run_is_in_its_log(namespace: dict[str, Any], folder: Path) -> None:
    records = list(JSONL(folder / "run.jsonl"))
    assert [record.step for record in records] == list(range(200))
    assert [record.step for record in records if record.layers] == [99, 199]
    assert None not in (records[99].activation_max, records[99].update_ratio)
    assert Monitor().replay(records) == []


def parsed(text: str) -> list[float] | str:
    return text if text.endswith("Error") else [float(part) for part in text.split(",")]


def approximately(text: str) -> Any:
    """torch's float32 sums depend on the SIMD width of the machine: 2 % are left to it."""
    value = parsed(text)
    return value if isinstance(value, str) else pytest.approx(value, rel=0.02, nan_ok=True)


@pytest.mark.parametrize(("situation", "arguments", "by_torch", "by_fastclip"), DIFFERENCES)
def test_difference(
    namespace: dict[str, Any], situation: str, arguments: str, by_torch: str, by_fastclip: str
) -> None:
    def outcome(function: str) -> str:
        result: str = eval(f"outcome({function}, {arguments})", namespace)
        return result

    assert outcome("fastclip.clip_grad_norm_") == by_fastclip
    if torch.__version__.startswith("2.13."):  # what another torch does is not ours to promise
        assert parsed(outcome("torch_clip")) == approximately(by_torch)


def test_all_differences_are_run() -> None:
    assert len(DIFFERENCES) == 14
