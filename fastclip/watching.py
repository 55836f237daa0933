"""Who is told that gradients are being clipped, by fastclip's functions or by torch's.

The lowest floor: it knows nothing of who listens. torch's functions are watched only while someone
does, through the closures in which they keep the function they wrap: that reaches every name under
which a function was imported, and leaves every attribute of torch.nn.utils the object it was.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterable
from types import CellType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

Done = Callable[[], object]


class Listener(Protocol):
    def clipping(self, ids: set[int], limit: float | None, unscales: bool) -> Done | None:
        """What is to be called when the clip is done, or None.

        `ids` are those of the parameters; `limit` and `unscales` are as `clips` was given them.
        """


_listeners: tuple[Listener, ...] = ()
_watched: list[tuple[CellType, object, object]] = []  # cell, what torch put there, what we did
_lock = threading.RLock()


def clips(
    parameters: Iterable[Tensor], limit: float | Tensor | None, unscales: bool = False
) -> Done:
    """Tell those who listen that gradients are about to be clipped to `limit`.

    What comes back is to be called when they have been. If nobody listens, both take 60 ns.
    Clipping to infinity is measuring, and nobody is told.

    Args:
        parameters: whose gradients are clipped.
        limit: the threshold of the norm or of the elements; None if it is not known.
        unscales: whether the clip itself takes the loss scale out of the gradients.
    """
    if not _listeners:
        return _nothing
    return _tell(parameters, limit, unscales)


def add(listener: Listener) -> None:
    """Have `listener` told from now on. RuntimeError if torch's functions cannot be watched."""
    global _listeners
    with _lock:
        if not _listeners:
            _watch_torch()
        _listeners = (*_listeners, listener)


def remove(listener: Listener) -> None:
    """Undo `add`; with the last listener, torch's functions are as they were."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        while not _listeners and _watched:
            cell, before, put = _watched.pop()
            if cell.cell_contents is put:  # else someone has wrapped ours, which now only passes on
                cell.cell_contents = before


def _tell(parameters: Iterable[Tensor], limit: float | Tensor | None, unscales: bool) -> Done:
    if _tracing():
        return _nothing
    if isinstance(limit, Tensor) and limit.device.type != "cpu":
        limit = None  # not waited for
    number = None if limit is None else float(limit)
    if number == math.inf:
        return _nothing
    ids = set(map(id, parameters))
    done = [listener.clipping(ids, number, unscales) for listener in _listeners]
    return functools.partial(_call_all, [call for call in done if call is not None])


def _nothing() -> None:
    """For a clip that nobody was told of."""


def _call_all(calls: list[Done]) -> None:
    for call in calls:
        call()


def _tracing() -> bool:
    """Whether what runs is being recorded: then tensors are placeholders, and no step is taken."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _watch_torch() -> None:
    # torch's clip_grad_norm_ calls the first by its global name; both are the same in 2.10 to 2.14.
    functions = {"_clip_grads_with_norm_": "max_norm", "clip_grad_value_": "clip_value"}
    cells = [(_cell(name), limit_name) for name, limit_name in functions.items()]
    for cell, limit_name in cells:
        before = cell.cell_contents
        put = _telling(before, limit_name)
        _watched.append((cell, before, put))
        cell.cell_contents = put


def _cell(name: str) -> CellType:
    wrapper: Any = getattr(clip_grad, name, None)
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    if "func" not in names:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.nn.utils.clip_grad.{name} that keeps the "
            "function it wraps as 'func', so that calls of it cannot be watched"
        )
    cell: CellType = wrapper.__closure__[names.index("func")]
    return cell


def _telling(function: Callable[..., None], limit_name: str) -> Callable[..., None]:
    @functools.wraps(function)
    def telling(
        parameters: Tensor | Iterable[Tensor], *args: float | Tensor, **kwargs: Any
    ) -> None:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        done = clips(listed, args[0] if args else kwargs.get(limit_name))
        function(listed, *args, **kwargs)
        done()

    return telling
