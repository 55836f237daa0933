"""The commands behind `fastclip`: one module each, with `run(json: bool, ...) -> int`.

What they share is here, and imports no torch.
"""

import json
import math
import sys
from typing import Any


class InputError(Exception):
    """The user can put this right: shown as one line, exit status 2."""


def progress(line: str) -> None:
    """Says what is going on, on stderr, so that stdout stays the result alone."""
    print(line, file=sys.stderr, flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def as_json(value: dict[str, Any]) -> str:
    """Valid JSON; "inf", "-inf" and "nan" become strings."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def print_json(document: dict[str, Any]) -> None:
    """Prints one valid JSON document, as `as_json` has it."""
    print(as_json(document), flush=True)
