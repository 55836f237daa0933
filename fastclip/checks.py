"""Checks of settings that several parts share: wrong ones are refused. Imports no torch."""

import math
from collections.abc import Callable
from numbers import Integral, Real

LARGEST = 2**63  # what an int64 counter can be compared with is under it
_OPTIONS = (  # of a GradClipper
    *("parameters", "max_norm", "rule", "norm_type", "nonfinite"),
    *("process_group", "counts", "overlap"),
)


def require(
    name: str,
    value: object,
    what: str,
    holds: Callable[[float], bool],
    whole: bool = False,
    infinite: bool = False,
) -> None:
    """Raise unless `value` is a finite number, a `whole` one if need be, that `holds`; say `what`
    it must be. It may be infinite too where `infinite` says so.
    """
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise TypeError(f"{name} must be {what}, got {value!r:.80}")
    try:
        size = float(value)
    except OverflowError:  # an int, whose digits may be too many to be printed
        raise ValueError(f"{name} must be {what}, got a number beyond float64") from None
    if whole and isinstance(value, Integral):
        fits = int(value) < LARGEST  # float64 would round the number just under it up
    else:
        fits = infinite or not math.isinf(size)
    if not (fits and holds(size)):  # false for NaN
        raise ValueError(f"{name} must be {what}, got {value!r:.80}")


def norm_order(norm_type: float | str) -> float:
    """The order p of a norm as a number."""
    p = number(norm_type, "norm_type must be a number or 'inf'")
    if p != p:  # NaN; math.isnan refuses numbers that torch.compile follows
        raise ValueError(f"norm_type must be a number or 'inf', got {norm_type!r}")
    return p


def number(value: object, rule: str) -> float:
    """`value` as a float, or the `rule` it breaks as an error."""
    try:
        return float(value)  # type: ignore[arg-type]  # what it is not shows here
    except (TypeError, ValueError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{rule}, got {value!r:.80}") from None


def refuse_setting(name: str, clipper: object) -> None:
    """Raise `AttributeError` if it is an option of a clipper, which nothing would read."""
    if name not in _OPTIONS or (name == "overlap" and name not in vars(clipper)):
        return
    how = f"build a new GradClipper with another {name}"
    if name == "max_norm":
        how += (
            "; or, for a threshold that changes, one whose max_norm is a function of the step, or "
            "a one-element Tensor to write into"
        )
    raise AttributeError(
        f"{name} of a GradClipper cannot be set, as its options stay those it was built with: {how}"
    )
