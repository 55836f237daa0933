"""The states of all random number generators, as plain data."""

import random
import sys
from typing import Any

import torch

_DEVICES = ("cuda", "xpu")  # those whose modules give the states of all devices of the kind


def read() -> dict[str, Any]:
    """Of torch on every device in use, of Python, and of NumPy if it is loaded."""
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    for kind in _DEVICES:
        module = getattr(torch, kind)
        if module.is_available() and module.is_initialized():
            states[kind] = module.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    if "numpy" in sys.modules:
        # Typed as what it never is with legacy=True: a dict.
        name, key, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        states["numpy"] = (name, key.tolist(), *rest)
    return states


def write(states: dict[str, Any]) -> None:
    """Set every generator that is there, and of which there is a state."""
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    for kind in _DEVICES:
        module = getattr(torch, kind)
        if kind in states and module.is_available():
            for device, state in zip(range(module.device_count()), states[kind], strict=False):
                module.set_rng_state(state, device)
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
