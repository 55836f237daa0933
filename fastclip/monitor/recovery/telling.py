"""What is said of rollbacks, and at which line of the user's."""

import logging
import sys
import warnings
from collections.abc import Iterable

from fastclip.monitor.records import Event
from fastclip.monitor.recovery.ledger import Decision
from fastclip.monitor.recovery.policy import RollbackPolicy


def log_rollback(
    decision: Decision, events: list[Event], policy: RollbackPolicy, used: int
) -> None:
    """To the logger "fastclip"; `used` rollbacks, with this one."""
    first = min(events, key=lambda event: event.step if event.onset is None else event.onset)
    metric = first.metric if first.onset_metric is None else first.onset_metric
    rate = "as scheduled"
    if policy.lr_scale != 1.0 and policy.lr_steps > 0:
        rate = f"multiplied by {policy.lr_scale:g} until step {decision.cut_until}"
    logging.getLogger("fastclip").warning(
        "rolling back from the alarm at step %d (%s; onset %d, %s) to the checkpoint of step %d, "
        "without the batches %s, with the learning rate %s: rollback %d of at most %d",
        *(decision.step, ", ".join(dict.fromkeys(event.kind for event in events))),
        *(decision.onset, metric, decision.target, _left_out(decision.skipped), rate),
        *(used, policy.max_rollbacks),
    )


def _left_out(skipped: tuple[tuple[int, ...], ...]) -> str:
    if len(skipped) == 1:
        return spans(skipped[0])
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, batches in enumerate(skipped):
        if batches:
            ranks.setdefault(batches, []).append(rank)
    named = [f"{spans(batches)} of rank {spans(of)}" for batches, of in ranks.items()]
    return ", ".join(named) or "of no rank"


def spans(numbers: Iterable[int]) -> str:
    """Numbers that follow each other as their ends."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in found)


def warn(text: str) -> None:
    """A `UserWarning` at the line that called into fastclip, through however many calls."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def _is_inside(names: dict[str, object]) -> bool:
    return str(names.get("__name__")).partition(".")[0] == "fastclip"
