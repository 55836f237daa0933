"""What `patch` reaches, and that nothing is left of it."""

import copy
import functools
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.utils as by_module
from torch import Tensor
from torch.nn.utils import clip_grad, clip_grad_norm_
from torch.nn.utils import clip_grad_norm_ as renamed

from fastclip.integrations.torch import patch
from tests.making import floats, parameters

NAMES = ["clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_", "clip_grad_value_"]
PRIVATE = ["clip_grad_norm_", "_get_total_norm", "_clip_grads_with_norm_", "clip_grad_value_"]
ORIGINAL = {name: getattr(clip_grad, name) for name in PRIVATE}

Clip = Callable[..., Tensor]

stored: dict[str, Clip] = {"clip": clip_grad_norm_}
applied = functools.partial(clip_grad_norm_, max_norm=1.0)
wrapped = functools.wraps(clip_grad_norm_)(lambda *args, **kwargs: clip_grad_norm_(*args, **kwargs))


def by_default(params: list[Tensor], max_norm: float, clip: Clip = clip_grad_norm_) -> Tensor:
    return clip(params, max_norm)


def imported_late(params: list[Tensor], max_norm: float) -> Tensor:
    from torch.nn.utils.clip_grad import clip_grad_norm_ as late

    return late(params, max_norm)


WAYS: dict[str, Clip] = {
    "from-import": clip_grad_norm_,
    "renamed": renamed,
    "module-attribute": lambda *args: by_module.clip_grad_norm_(*args),
    "full-path": lambda *args: torch.nn.utils.clip_grad_norm_(*args),
    "submodule": lambda *args: clip_grad.clip_grad_norm_(*args),
    "stored": lambda *args: stored["clip"](*args),
    "partial": lambda params, max_norm: applied(params),
    "wrapped": wrapped,
    "default-argument": by_default,
    "imported-late": imported_late,
}


def contents() -> list[object]:
    """What torch's four functions call."""
    return [ORIGINAL[name].__closure__[0].cell_contents for name in PRIVATE]


OF_TORCH = contents()


def is_ours(clip: Clip = clip_grad_norm_) -> bool:
    """torch rounds the norm of half gradients to their dtype, fastclip does not."""
    return clip(parameters(floats(3.0, 4.0, dtype=torch.bfloat16)), 1.0).dtype == torch.float32


def is_untouched() -> bool:
    same = [getattr(clip_grad, name) is ORIGINAL[name] for name in PRIVATE]
    public = [getattr(by_module, n) is ORIGINAL[p] for n, p in zip(NAMES, PRIVATE, strict=True)]
    cells = [a is b for a, b in zip(contents(), OF_TORCH, strict=True)]
    return all((*same, *public, *cells))


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    assert is_untouched()
    yield
    assert is_untouched()
    assert not is_ours()


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_import(way: str) -> None:
    assert not is_ours(WAYS[way])
    with patch():
        assert is_ours(WAYS[way])
    assert not is_ours(WAYS[way])


def test_the_deprecated_name() -> None:
    with patch(), pytest.warns(FutureWarning, match="deprecated"):
        assert is_ours(torch.nn.utils.clip_grad_norm)


def test_from_the_call_until_undone() -> None:
    patched = patch()
    assert is_ours()
    assert repr(patched) == "<Patch of torch.nn.utils, active>"
    patched.undo()
    assert is_untouched()
    patched.undo()
    assert repr(patched) == "<Patch of torch.nn.utils, undone>"


def test_attributes_stay_the_objects_they_were() -> None:
    with patch():
        assert [getattr(clip_grad, name) for name in PRIVATE] == list(ORIGINAL.values())
        assert torch.nn.utils.get_total_norm is ORIGINAL["_get_total_norm"]


def test_what_was_imported_meanwhile_is_torchs_afterwards() -> None:
    with patch():
        module = ModuleType("late")
        exec("from torch.nn.utils import clip_grad_norm_ as clip", vars(module))
        assert is_ours(module.clip)
    assert not is_ours(module.clip)


def test_an_error_undoes_too() -> None:
    with pytest.raises(ZeroDivisionError), patch():
        raise ZeroDivisionError
    assert is_untouched()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_nested_in_any_order(order: tuple[int, ...]) -> None:
    patches = [patch() for _ in range(3)]
    for number in order:
        assert is_ours()
        patches[number].undo()
        patches[number].undo()
    assert is_untouched()


def test_many_threads() -> None:
    """Each is served while its own patch holds, whatever the others do."""
    failures: list[str] = []
    start = threading.Barrier(8)

    def hammer() -> None:
        start.wait()
        for _ in range(300):
            with patch():
                if not is_ours():
                    failures.append("not fastclip's while patched")

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_a_copy_undoes_nothing(duplicate: Callable[[Any], Any]) -> None:
    with patch() as patched:
        other = duplicate(patched)
        other.undo()
        assert repr(other) == "<Patch of torch.nn.utils, undone>"
        assert is_ours()
    assert is_untouched()
    with patch():
        assert is_ours()


def test_undone_in_another_thread() -> None:
    patched = patch()
    thread = threading.Thread(target=patched.undo)
    thread.start()
    thread.join()
    assert is_untouched()


@pytest.mark.parametrize("name", NAMES)
def test_torch_replaced_by_somebody_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(torch.nn.utils, name, lambda *args: None)
        with pytest.raises(RuntimeError, match=rf"torch\.nn\.utils\.{name} is <function"):
            patch()
        assert all(a is b for a, b in zip(contents(), OF_TORCH, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_replaced_between_two_patches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with patch():
        with monkeypatch.context() as m:
            m.setattr(torch.nn.utils, name, lambda *args: None)
            with pytest.raises(RuntimeError, match=rf"torch\.nn\.utils\.{name} is <function"):
                patch()
        with patch():
            pass
        assert is_ours()


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_built_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: Any) -> None:
        """Without a closure."""

    of_torch = FunctionType(other.__code__, vars(clip_grad), other.__name__)
    with monkeypatch.context() as m:
        m.setattr(clip_grad, name, of_torch)
        m.setattr(torch.nn.utils, name.removeprefix("_"), of_torch)
        with pytest.raises(RuntimeError, match=rf"has no torch\.nn\.utils\.clip_grad\.{name} "):
            patch()
        assert all(a is b for a, b in zip(contents(), OF_TORCH, strict=True))


@pytest.mark.parametrize("name", PRIVATE)
def test_a_closure_that_somebody_else_has_changed(name: str) -> None:
    cell = ORIGINAL[name].__closure__[0]
    of_torch = cell.cell_contents
    cell.cell_contents = foreign = lambda *args: None
    try:
        with pytest.raises(RuntimeError, match=rf"clip_grad\.{name} calls <function .*not torch"):
            patch()
        assert sum(a is not b for a, b in zip(contents(), OF_TORCH, strict=True)) == 1
        assert cell.cell_contents is foreign
    finally:
        cell.cell_contents = of_torch


def test_a_closure_changed_while_patched() -> None:
    cell = ORIGINAL["clip_grad_value_"].__closure__[0]
    of_torch = cell.cell_contents
    patched = patch()
    cell.cell_contents = foreign = lambda *args: None
    try:
        with pytest.raises(RuntimeError, match=r"clip_grad\.clip_grad_value_ was replaced"):
            patched.undo()
        assert cell.cell_contents is foreign
        assert contents()[:3] == OF_TORCH[:3]
    finally:
        cell.cell_contents = of_torch


def test_a_closure_changed_between_two_patches() -> None:
    cell = ORIGINAL["clip_grad_value_"].__closure__[0]
    with patch():
        ours = cell.cell_contents
        cell.cell_contents = lambda *args: None
        try:
            with pytest.raises(RuntimeError, match=r"clip_grad\.clip_grad_value_ calls <function"):
                patch()
        finally:
            cell.cell_contents = ours


def test_what_tools_see_of_the_functions() -> None:
    with patch():
        assert copy.deepcopy(clip_grad_norm_) is clip_grad_norm_
        assert pickle.loads(pickle.dumps(clip_grad_norm_)) is clip_grad_norm_
        assert list(inspect.signature(clip_grad_norm_).parameters) == [
            *("parameters", "max_norm", "norm_type", "error_if_nonfinite", "foreach")
        ]
        assert clip_grad_norm_.__module__ == "torch.nn.utils.clip_grad"


def test_importing_patches_nothing_and_imports_no_framework() -> None:
    script = (
        "import sys, torch\n"
        "from torch.nn.utils import clip_grad\n"
        f"of_torch = [getattr(clip_grad, n).__closure__[0].cell_contents for n in {PRIVATE}]\n"
        "import fastclip, fastclip.integrations, fastclip.integrations.torch\n"
        f"now = [getattr(clip_grad, n).__closure__[0].cell_contents for n in {PRIVATE}]\n"
        "assert all(a is b for a, b in zip(of_torch, now))\n"
        "frameworks = {'accelerate', 'lightning', 'transformers', 'torch._dynamo'}\n"
        "print(sorted(frameworks & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
