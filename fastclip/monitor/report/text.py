"""What a log says, as text that is safe in a page and in plotly's labels."""

import html
import math
from collections.abc import Sequence
from typing import Any

LONGEST = 300  # characters of a name or message that are shown


def clean(value: Any, longest: int = LONGEST) -> str:
    """Without what cannot be printed (controls, half surrogates), and not longer than that."""
    text = str(value)
    if len(text) > longest:
        text = f"{text[: longest // 2]}…{text[len(text) - longest // 2 + 1 :]}"
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def escape(value: Any, longest: int = LONGEST) -> str:
    """As HTML."""
    return html.escape(clean(value, longest))


def label(value: Any, longest: int = LONGEST) -> str:
    """For plotly, which takes its texts for HTML but shows `&quot;` as it is."""
    return html.escape(clean(value, longest), quote=False)


def number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if math.isfinite(value) else str(value)


def count(amount: int, what: str) -> str:
    return f"{amount:,} {what}" if amount == 1 else f"{amount:,} {what}s"


def share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first of them, and how many more there are; not escaped."""
    more = len(names) - most
    text = ", ".join(clean(name, 60) for name in names[:most])
    return f"{text} and {more:,} more" if more > 0 else text
