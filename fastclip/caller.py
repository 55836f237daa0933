"""Which line of the user's has called, through whatever of torch, of fastclip and of frameworks
lies between."""

import sys
from types import FrameType

# Modules whose frames are not the user's.
_INSIDE = frozenset(
    {
        *("torch", "fastclip"),
        *("accelerate", "transformers", "trl"),
        *("lightning", "lightning_fabric", "pytorch_lightning"),
        *("typing_extensions", "warnings", "_py_warnings"),  # the wrapper of deprecated functions
    }
)


def line() -> tuple[str, int]:
    """file:line of the user's call, and the stacklevel that means it in whoever calls this."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame):
        level, frame = level + 1, frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", level


def _is_inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE
