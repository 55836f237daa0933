"""Every row of docs/differences.md, by torch's function and by fastclip's."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "differences.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([^|]+) \| `([^|]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
DIFFERENCES = ROW.findall(TEXT)


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """What the page's block defines."""
    names: dict[str, Any] = {}
    [block] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(block, names)
    return names


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
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(DIFFERENCES)} differences](docs/differences.md)" in readme
