"""Backends that others have written: registered in a process, or named by an installed package."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastclip
from fastclip import backends
from fastclip.backends import Backend, Unavailable, reference, registry
from fastclip.cli import main
from fastclip.commands import check
from fastclip.testing.cases import BACKEND_CASES
from fastclip.testing.variants import Variant, variants
from tests.making import floats, parameters

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _installed_afresh() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _forget() -> None:
    registry._installed.cache_clear()
    backends._found.cache_clear()


def provide_mine() -> Backend:
    return replace(reference.provide(), name="mine", about="the reference by another name")


def provide_none() -> Backend:
    raise Unavailable("there is no such card here")


def provide_error() -> Backend:
    raise KeyError("card")


def test_a_registered_backend_serves_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = backends.choose(CPU).name
    made: list[int] = []

    def provide() -> Backend:
        made.append(1)
        return provide_mine()

    backends.register("mine", provide)
    assert made == []  # not before it is asked for
    assert backends.choose(CPU).name == before  # never by itself
    with fastclip.backend("mine") as chosen:
        assert chosen.name == "mine"
        params = parameters(floats(3.0, 4.0))
        assert fastclip.clip_grad_norm_(params, 1.0).item() == 5.0
        assert backends.explain()["cpu"] == (
            "mine",
            "asked for by fastclip.backend(): the reference by another name",
        )
    monkeypatch.setenv("FASTCLIP_BACKEND", "mine")
    assert backends.choose(CPU).name == "mine"
    assert backends.available()["mine"] is None
    assert made == [1]


@pytest.mark.parametrize("name", ["cpu", "reference", "mine"])
def test_a_name_is_taken_once(name: str) -> None:
    backends.register("mine", provide_mine)
    with pytest.raises(ValueError, match=f"there is a backend '{name}' already"):
        backends.register(name, provide_mine)
    assert backends.get(name).name == name


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unavailable": (provide_none, "there is no such card here"),
    "raising": (provide_error, "its provider raised KeyError: 'card'"),
    "nothing": (lambda: None, "its provider returned None, which is no Backend"),
    "other-name": (reference.provide, "returned a backend of the name 'reference'"),
}


@pytest.mark.parametrize(("provide", "reason"), WRONG.values(), ids=WRONG.keys())
def test_one_that_cannot_be_used_says_why(provide: Callable[[], Any], reason: str) -> None:
    backends.register("mine", provide)
    assert reason in str(backends.available()["mine"])
    with pytest.raises(RuntimeError, match=rf"'mine' cannot be used: .*{reason}.*available: ref"):
        backends.get("mine")
    assert backends.get("reference").name == "reference"
    with pytest.raises(RuntimeError, match=r"no backend 'other'; available: ref"):
        backends.get("other")


def test_a_name_is_not_empty() -> None:
    with pytest.raises(ValueError, match="a backend needs a name"):
        backends.register("", provide_mine)


def test_threads_that_ask_at_once_have_it_provided_once() -> None:
    made: list[int] = []
    start = threading.Barrier(4)

    def provide() -> Backend:
        made.append(1)
        time.sleep(0.05)
        return provide_mine()

    def ask(_: int) -> str:
        start.wait()
        return backends.get("mine").name

    backends.register("mine", provide)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["mine"] * 4
    assert made == [1]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a distribution with the module `theirs` and the entry points given."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)

    def install(entries: str) -> None:
        (tmp_path / "theirs.py").write_text(
            "from dataclasses import replace\n"
            "from fastclip.backends import reference\n\n\n"
            "def provide():\n"
            "    return replace(reference.provide(), name='theirs')\n"
        )
        (tmp_path / "broken.py").write_text("1 / 0\n")
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fastclip.backends]\n{entries}\n")

    return install


def test_an_installed_package_names_its_backend(installed: Callable[[str], None]) -> None:
    installed("theirs = theirs:provide")
    before = backends.choose(CPU).name
    assert "theirs" not in sys.modules
    with fastclip.backend("theirs"):
        assert backends.choose(CPU).name == "theirs"
    assert backends.choose(CPU).name == before
    assert Variant("theirs", "theirs", "cpu") in variants()  # so `fastclip check` tries it


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("theirs:missing", "theirs:missing cannot be loaded: .*missing"),
        ("nowhere:provide", "nowhere:provide cannot be loaded: No module named 'nowhere'"),
        ("broken:provide", "broken:provide cannot be loaded: division by zero"),
    ],
    ids=["attribute", "module", "module that raises"],
)
def test_an_installed_one_that_does_not_load_says_why(
    installed: Callable[[str], None], value: str, reason: str
) -> None:
    installed(f"theirs = {value}")
    with pytest.raises(RuntimeError, match=f"'theirs' cannot be used: {reason}"):
        backends.get("theirs")
    assert backends.get("reference").name == "reference"


def test_an_installed_one_cannot_take_the_place_of_another(
    installed: Callable[[str], None],
) -> None:
    installed("cpu = theirs:provide")
    with pytest.raises(RuntimeError, match="'cpu' of theirs has the name of one that is there"):
        backends.available()


def test_check_of_one_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backends.register("mine", provide_mine)
    seen: list[str] = []

    def one_case(variant: Variant) -> check.Result:
        seen.append(variant.id)
        return real(variant, BACKEND_CASES[:3])

    real = check.check_variant
    monkeypatch.setattr(check, "check_variant", one_case)
    assert main(["check", "--backend", "mine"]) == 0
    assert seen == ["mine"]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()][1] == ["mine", "3"]


@pytest.mark.parametrize("name", ["mine", "fpga"])
def test_check_of_a_backend_that_cannot_be_used(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    backends.register("mine", provide_none)
    assert main(["check", "--backend", name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{name!r}" in error
    assert "available: reference" in error


def test_check_finds_what_a_backend_gets_wrong() -> None:
    def too_large(*args: Any) -> torch.Tensor:
        return reference.measure(*args) * (1 + 1e-5)

    backends.register("mine", lambda: replace(provide_mine(), measure=too_large))
    result = check.check_variant(Variant("mine", "mine", "cpu"), BACKEND_CASES[:3])
    assert result.worst > 1
    assert any("measure p=2" in mismatch for mismatch in result.mismatches)
