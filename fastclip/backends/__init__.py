"""The backends and the choice between them.

Asked for by name (`backend`, else the environment variable ``FASTCLIP_BACKEND``), a backend that
cannot be had is an error. Otherwise the first of `AUTOMATIC` that is available is taken;
`explain` says which one that is and why. Backends of others serve only where they are asked for.
"""

import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fastclip.backends import registry
from fastclip.backends.contract import Backend as Backend
from fastclip.backends.contract import Refused as Refused
from fastclip.backends.contract import Unavailable as Unavailable
from fastclip.backends.contract import clip_in_passes as clip_in_passes
from fastclip.backends.registry import register as register

__all__ = [
    "Backend",
    "Refused",
    "Unavailable",
    "available",
    "backend",
    "choose",
    "clip_in_passes",
    "explain",
    "get",
    "register",
]

# Per device type, best first; any other device has the reference alone.
AUTOMATIC = {"cpu": ("cpu", "reference"), "cuda": ("triton", "cuda", "reference")}

WITHOUT_FLOAT64 = frozenset({"mps"})

VARIABLE = "FASTCLIP_BACKEND"

_finding = threading.RLock()  # who asks while a backend is being provided waits for that one

_requested: ContextVar[str | None] = ContextVar("fastclip.backend", default=None)


def available() -> dict[str, str | None]:
    """By the name of each backend None if it can be used here, else the reason why not."""
    found = {name: _find(name) for name in registry.names()}
    return {name: str(b) if isinstance(b, Unavailable) else None for name, b in found.items()}


def get(name: str) -> Backend:
    """The backend of that name. Raises `RuntimeError` if there is none or it cannot be used."""
    if not registry.exists(name):
        raise RuntimeError(f"there is no backend {name!r}; {_usable()}")
    found = _find(name)
    if isinstance(found, Unavailable):
        raise RuntimeError(f"the backend {name!r} cannot be used: {found}; {_usable()}") from found
    return found


def choose(device: torch.device) -> Backend:
    """The backend for tensors on `device`.

    Raises `RuntimeError` if one was asked for that cannot be used or does not serve the device.
    """
    if device.type in WITHOUT_FLOAT64:
        raise RuntimeError(
            f"gradients on {device} are not served: it has no float64, in which every backend adds"
        )
    name = _requested.get() or os.environ.get(VARIABLE)
    if not name:
        return _chosen(device.type)
    chosen = get(name)
    if not chosen.serves(device.type):
        raise RuntimeError(
            f"the backend {name!r} was asked for and does not serve gradients on {device}; "
            f"{_usable(device.type)}"
        )
    return chosen


@contextmanager
def backend(name: str) -> Iterator[Backend]:
    """Use one backend within a ``with`` block, in this thread (or async task) alone.

    Goes before ``FASTCLIP_BACKEND``. Raises `RuntimeError` on entry if it cannot be used.

    >>> with fastclip.backend("reference"):
    ...     fastclip.clip_grad_norm_(model, 1.0)
    """
    chosen = get(name)
    token = _requested.set(name)
    try:
        yield chosen
    finally:
        _requested.reset(token)


def explain() -> dict[str, tuple[str, str]]:
    """Per device type the backend that would serve now, and why: ``{"cpu": (name, reason)}``."""
    return {device_type: _explained(device_type) for device_type in AUTOMATIC}


def _explained(device_type: str) -> tuple[str, str]:
    source = "fastclip.backend()" if _requested.get() else VARIABLE
    name = _requested.get() or os.environ.get(VARIABLE)
    if not name:
        chosen, skipped = _automatic(device_type)
        return chosen.name, "; ".join([f"automatic: {chosen.about}", *skipped])
    chosen = get(name)
    if not chosen.serves(device_type):
        return "none", f"{source} asks for {name!r}, which does not serve {device_type} gradients"
    return name, f"asked for by {source}: {chosen.about}"


@functools.cache
def _chosen(device_type: str) -> Backend:
    """The automatic choice for gradients that exist; said once if it is not the best."""
    chosen, skipped = _automatic(device_type)
    if skipped:
        logging.getLogger("fastclip").warning(
            "fastclip: %s gradients are served by the backend %r, because %s",
            device_type,
            chosen.name,
            "; ".join(skipped),
        )
    return chosen


@functools.cache
def _automatic(device_type: str) -> tuple[Backend, list[str]]:
    """The choice, and for each better one why it was not chosen."""
    skipped: list[str] = []
    for name in AUTOMATIC.get(device_type, ("reference",)):
        found = _find(name)
        if isinstance(found, Refused):
            raise RuntimeError(f"the backend {name!r} cannot be used: {found}; {_usable()}")
        if isinstance(found, Backend):
            return found, skipped
        skipped.append(f"{name!r} is not available: {found}")
    raise AssertionError(f"the last of {AUTOMATIC} must always be available")


def _find(name: str) -> Backend | Unavailable:
    with _finding:
        return _found(name)


@functools.cache
def _found(name: str) -> Backend | Unavailable:
    """Looked for once: what is missing at the first use is not searched at every step."""
    try:
        return registry.provide(name)
    except Unavailable as reason:
        return reason


def _usable(device_type: str | None = None) -> str:
    names = [
        name
        for name in registry.names()
        if isinstance(found := _find(name), Backend)
        and (device_type is None or found.serves(device_type))
    ]
    return f"available: {', '.join(names)}"
