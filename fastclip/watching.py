"""Who is told that gradients are being clipped, by fastclip's functions or by torch's.

A low floor: it knows nothing of who listens. torch's functions are redirected only while someone
does. While they are fastclip's (`fastclip.integrations.torch`), those tell who listens.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from fastclip import redirecting

Done = Callable[[], object]


class Listener(Protocol):
    def clipping(self, ids: set[int], limit: float | None, unscales: bool) -> Done | None:
        """What is to be called when the clip is done, or None.

        `ids` are those of the parameters; `limit` and `unscales` are as `clips` was given them.
        """


_listeners: tuple[Listener, ...] = ()
_lock = redirecting.lock


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
        if not _listeners:
            redirecting.take("watch")  # if someone has wrapped ours, it now only passes on


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
    # torch's clip_grad_norm_ calls the first by its global name
    functions = {"_clip_grads_with_norm_": "max_norm", "clip_grad_value_": "clip_value"}
    makes = {name: functools.partial(_telling, limit) for name, limit in functions.items()}
    redirecting.put("watch", makes)


def _telling(limit_name: str, function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def telling(
        parameters: Tensor | Iterable[Tensor], *args: float | Tensor, **kwargs: Any
    ) -> None:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        done = clips(listed, args[0] if args else kwargs.get(limit_name))
        function(listed, *args, **kwargs)
        done()

    return telling
