"""tools/wheel.py: what it says of a right wheel and of others; the same bytes every time."""

import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_install import build_wheel, copy_source, needs_compiler
from tests.test_install import quick_compiler as quick_compiler
from tools.wheel import faults, metadata

pytestmark = [pytest.mark.slow, needs_compiler]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, quick_compiler: str) -> tuple[Path, Path]:
    """The same wheel, built in two folders."""
    settings = {"CXX": quick_compiler, "FASTCLIP_BUILD": "1", "FASTCLIP_BUILD_CUDA": "0"}
    settings |= {"SOURCE_DATE_EPOCH": "1700000000"}
    folders = [tmp_path_factory.mktemp(name) / "source" for name in ("first", "second-and-longer")]
    first, second = (built(folder, settings) for folder in folders)
    return first, second


def built(source: Path, settings: dict[str, str]) -> Path:
    done = build_wheel(Path(sys.executable), copy_source(source), **settings)
    assert done.returncode == 0, done.stderr
    return source / "dist" / done.stdout.splitlines()[-1]


def test_two_builds_are_the_same_byte_by_byte(wheels: tuple[Path, Path]) -> None:
    first, second = wheels
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        assert one.namelist() == other.namelist()
        assert [n for n in one.namelist() if one.read(n) != other.read(n)] == []
    assert first.read_bytes() == second.read_bytes()


def test_a_right_wheel_has_no_faults(wheels: tuple[Path, Path]) -> None:
    assert list(faults(wheels[0])) == []


def test_what_its_metadata_says(wheels: tuple[Path, Path]) -> None:
    fields = metadata(wheels[0])
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields["License-Expression"] == "MIT"
    assert fields["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in (fields.get_all("Classifier") or ())
    assert {"integrations", "monitor", "triton"} <= set(fields.get_all("Provides-Extra") or ())
    assert str(fields.get_payload()).startswith("# fastclip\n")


CHANGES: dict[str, tuple[str, str, bytes | None]] = {
    "a module is missing": ("fastclip/functional.py is missing", "fastclip/functional.py", None),
    "a source is missing": ("fastclip/csrc/table.h is missing", "fastclip/csrc/table.h", None),
    "not typed": ("fastclip/py.typed is missing", "fastclip/py.typed", None),
    "tests": ("tests/test_cases.py does not belong there", "tests/test_cases.py", b""),
    "object files": ("fastclip/0.o does not belong there", "fastclip/0.o", b""),
    "no licence": (
        "the licence is missing",
        "torch_fastclip-{version}.dist-info/licenses/LICENSE",
        None,
    ),
    "a path of the machine": (
        "fastclip/_C_cuda.abi3.so holds a path of the machine it was built on: /home/me/a.h",
        "fastclip/_C_cuda.abi3.so",
        b"\x7fELF\0/home/me/a.h\0",
    ),
    "numpy": (
        "it needs numpy, torch>=2.10 rather than torch>=2.10 alone",
        "torch_fastclip-{version}.dist-info/METADATA",
        b"Requires-Dist: numpy\nRequires-Dist: torch>=2.10\n\n",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_fault_is_found(case: str, wheels: tuple[Path, Path], tmp_path: Path) -> None:
    fault, changed, content = CHANGES[case]
    changed = changed.format(version=wheels[0].name.split("-")[1])
    spoilt = tmp_path / wheels[0].name
    with zipfile.ZipFile(wheels[0]) as wheel, zipfile.ZipFile(spoilt, "w") as copy:
        for name in wheel.namelist():
            if name != changed:
                copy.writestr(name, wheel.read(name))
        if content is not None:
            copy.writestr(changed, content)
    assert list(faults(spoilt)) == [fault]
