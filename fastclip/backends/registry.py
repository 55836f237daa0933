"""Which backends there are: those of this package, and those that others have written.

A package of others names a function that gives its backend in the entry point group
``fastclip.backends``; `register` does the same for one process.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from fastclip.backends.contract import Backend, Unavailable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "fastclip.backends"

OWN = {"reference": "reference", "cpu": "native", "triton": "triton", "cuda": "cuda"}

_registered: dict[str, Callable[[], Backend]] = {}


def register(name: str, provide: Callable[[], Backend]) -> None:
    """Make a backend known by `name` in this process.

    `provide` is called once, when that name is first asked for; it raises `Unavailable` with the
    reason where the backend cannot be used. Any other exception of it is a reason too. The backend
    serves where it is asked for and is never chosen automatically. Raises `ValueError` if the name
    is empty, or there is a backend of that name.
    """
    if not name:
        raise ValueError("a backend needs a name")
    if exists(name):
        raise ValueError(f"there is a backend {name!r} already")
    _registered[name] = provide


def names() -> list[str]:
    return [*OWN, *_registered, *_installed()]


def exists(name: str) -> bool:
    return name in OWN or name in _registered or name in _installed()


def provide(name: str) -> Backend:
    """The backend of a name that exists. Raises `Unavailable` if it cannot be used."""
    if name in OWN:
        own: Backend = import_module(f"fastclip.backends.{OWN[name]}").provide()
        return own
    try:
        backend = _provider(name)()
    except Unavailable:
        raise
    except Exception as error:  # it may be anything, and others can be used all the same
        raise Unavailable(f"its provider raised {type(error).__name__}: {error}") from error
    if not isinstance(backend, Backend):
        raise Unavailable(f"its provider returned {backend!r:.80}, which is no Backend")
    if backend.name != name:
        raise Unavailable(f"its provider returned a backend of the name {backend.name!r}")
    return backend


def _provider(name: str) -> Callable[[], Backend]:
    if name in _registered:
        return _registered[name]
    entry = _installed()[name]
    try:
        provider: Callable[[], Backend] = entry.load()
    except Exception as error:  # whatever its module raises
        raise Unavailable(f"{entry.value} cannot be loaded: {error}") from error
    return provider


@functools.cache
def _installed() -> "dict[str, EntryPoint]":
    """Looked for when the first name that is not this package's own is asked for."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in OWN or found.get(entry.name, entry) != entry:
            where = entry.dist.name if entry.dist else "an installed package"
            raise RuntimeError(
                f"the backend {entry.name!r} of {where} has the name of one that is there already"
            )
        found[entry.name] = entry
    return found
