"""What torch's functions that clip do, exchanged for all who have imported them, and put back.

Each of these functions is a wrapper that calls what it keeps in its closure. Exchanging that
reaches every name under which the wrapper was imported, and leaves every attribute of torch the
object it was. It is so in torch 2.10 to 2.14; where it is not, `put` raises and changes nothing.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import torch
from torch.nn.utils import clip_grad

Function = Callable[..., Any]

LAYERS = ("patch", "watch")  # the first that is there is called, and it calls no other

lock = threading.RLock()


@dataclass
class _Place:
    """Where torch keeps one function."""

    cell: CellType
    of_torch: Function
    layers: dict[str, Function] = field(default_factory=dict)

    @property
    def active(self) -> Function:
        there = [self.layers[layer] for layer in LAYERS if layer in self.layers]
        return there[0] if there else self.of_torch


_places: dict[str, _Place] = {}


def put(layer: str, makes: Mapping[str, Callable[[Function], Function]]) -> None:
    """Have torch's functions of these names, in torch.nn.utils.clip_grad, call what is made of what
    torch has there. RuntimeError, with nothing changed, if one of them cannot be redirected."""
    with lock:
        places = {name: _places.get(name) or _place(name) for name in makes}
        for name, place in places.items():
            if place.cell.cell_contents is not place.active:
                raise RuntimeError(
                    f"torch.nn.utils.clip_grad.{name} calls {place.cell.cell_contents!r}, which "
                    "has been put over a function of fastclip, so that it cannot be redirected"
                )
        made = {name: make(places[name].of_torch) for name, make in makes.items()}
        for name, place in places.items():
            place.layers[layer] = made[name]
            place.cell.cell_contents = place.active
            _places[name] = place


def take(layer: str) -> Sequence[str]:
    """Undo `put`. Returns the names of functions that somebody else has put another over since:
    those are left as they are."""
    left = []
    with lock:
        for name, place in [*_places.items()]:
            if layer not in place.layers:
                continue
            before = place.active
            del place.layers[layer]
            if place.cell.cell_contents is before:
                place.cell.cell_contents = place.active
            else:
                left.append(name)
            if not place.layers:
                del _places[name]
    return left


def _place(name: str) -> _Place:
    wrapper: Any = getattr(clip_grad, name, None)
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    if "func" not in names:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.nn.utils.clip_grad.{name} that keeps the "
            "function it wraps as 'func', so that calls of it cannot be redirected"
        )
    cell: CellType = wrapper.__closure__[names.index("func")]
    return _Place(cell, cell.cell_contents)
