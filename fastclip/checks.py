"""Refusals of wrong settings that several parts share. Imports no torch."""

from collections.abc import Callable
from numbers import Integral, Real


def require(
    name: str, value: object, what: str, holds: Callable[[float], bool], whole: bool = False
) -> None:
    """Raise unless `value` is a number, a `whole` one if need be, that `holds`; say `what` it must
    be.
    """
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise TypeError(f"{name} must be {what}, got {value!r:.80}")
    if not holds(float(value)):  # false for NaN
        raise ValueError(f"{name} must be {what}, got {value!r:.80}")
