"""A sink's client, imported late."""

from importlib import import_module
from typing import Any


def client(sink: str, extra: str, module: str) -> Any:
    """The module. `ImportError` with what to install if its package is not there."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there, and lacks something itself
        needed = f"{sink} needs the package {error.name}: pip install 'torch-fastclip[{extra}]'"
        raise ImportError(needed, name=error.name) from error
