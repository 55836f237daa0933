"""Synthetic logs for every row of the decision table, near misses, and what is to be said."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from fastclip.monitor import StepRecord
from tests.monitor.making import changed, healthy, mixtral, times

S = 800  # where failures start
AFTER = range(S, 1200)


class Case(NamedTuple):
    records: Callable[[int], list[StepRecord]]  # of a seed
    symptom: str
    boundary: str
    onset: int | None = None
    metric: str | None = None


def run(*changes: Any, steps: int = 1200) -> Callable[[int], list[StepRecord]]:
    return lambda seed: changed(healthy(steps, seed), *changes)


def until(
    step: int, records: Callable[[int], list[StepRecord]]
) -> Callable[[int], list[StepRecord]]:
    return lambda seed: records(seed)[:step]


def only(*names: str, of: Callable[[int], list[StepRecord]]) -> Callable[[int], list[StepRecord]]:
    """Records with these fields alone."""

    def make(seed: int) -> list[StepRecord]:
        return [
            StepRecord(record.step, **{name: getattr(record, name) for name in names})
            for record in of(seed)
        ]

    return make


def again(
    records: Callable[[int], list[StepRecord]], at: int, back: int, good: Any = None
) -> Callable[[int], list[StepRecord]]:
    """Up to step `at`, then from step `back` on as in a healthy run: a rollback."""

    def make(seed: int) -> list[StepRecord]:
        return records(seed)[:at] + (good or run())(seed)[back:]

    return make


def overflow(*steps: int, skipped: bool | None = True) -> list[tuple[Iterable[int], str, Any]]:
    """Gradients that are not finite; the scale is halved after a skipped step."""
    found: list[tuple[Iterable[int], str, Any]] = [
        (steps, "grad_norm", math.inf),
        (steps, "nonfinite_count", 7),
        (steps, "skipped", skipped),
    ]
    halved = [(range(step + 1, 1200), "loss_scale", times(0.5)) for step in steps]
    return found + (halved if skipped else [])


SPIKE = ([S], "loss", times(1.8))
RISE = (AFTER, "loss", times(2))
LATER = (range(S + 3, 1200), "loss", times(2))
NORM = ([S], "grad_norm", times(40))
FOLLOWS = (range(S + 3, S + 9), "loss", times(2))
LATE = range(S + 250, 1200)
DRIFT_LATER = (range(S + 250, S + 300), "loss", times(1.25))
SLOWLY = [([step], "loss", times(1 + (step - 1500) / 6000)) for step in range(1500, 4000)]

CASES = {
    # The rows of the table of symptoms and of boundaries.
    "nan-loss": Case(run(([S], "loss", math.nan)), "nonfinite", "forward", S, "loss"),
    "inf-loss": Case(run(([S], "loss", math.inf)), "nonfinite", "forward", S, "loss"),
    "nan-loss-to-the-end": Case(run((AFTER, "loss", math.nan)), "nonfinite", "forward", S, "loss"),
    "nan-val-loss": Case(run(([S], "val_loss", math.nan)), "nonfinite", "forward", S, "val_loss"),
    "nan-loss-of-a-skipped-step": Case(
        run(([S], "loss", math.nan), ([S], "skipped", True)), "nonfinite", "forward", S, "loss"
    ),
    "gradients-of-a-taken-step": Case(
        run(*overflow(S, skipped=False)), "nonfinite", "backward", S, "grad_norm"
    ),
    "elements-of-a-taken-step": Case(
        run(([S], "nonfinite_count", 1)), "nonfinite", "backward", S, "nonfinite_count"
    ),
    "gradients-of-a-step-maybe-skipped": Case(
        run(*overflow(S, skipped=None)), "nonfinite", "backward", S, "grad_norm"
    ),
    "falling-scale": Case(
        until(900, run(*overflow(S, S + 20, S + 40))),
        *("nonfinite", "loss_scale", S + 40, "grad_norm"),
    ),
    "a-scale-that-found-its-level": Case(
        run(*overflow(S, S + 20, S + 40)), "nonfinite", "loss_scale", S + 40, "grad_norm"
    ),
    "a-nan-batch-after-two-halvings": Case(
        until(860, run(*overflow(S, S + 1, S + 20), ([S + 20], "loss", math.nan))),
        *("nonfinite", "loss_scale", S + 20, "loss"),
    ),
    "skipped-to-the-end": Case(
        run((AFTER, "grad_norm", math.nan), (AFTER, "skipped", True)), "none", "none"
    ),
    "every-fourth-skipped": Case(
        run((range(S, 1200, 4), "skipped", True), (range(1200), "loss_scale", None)),
        *("none", "none"),
    ),
    "nan-loss-in-float32": Case(
        run((AFTER, "loss", math.nan), (range(1200), "loss_scale", None)),
        *("nonfinite", "forward", S, "loss"),
    ),
    "a-rate-that-jumped": Case(
        run(RISE, (range(S - 1, 1200), "lr", times(10))), "sustained", "update", S, "loss"
    ),
    "gradient-first": Case(run(NORM, FOLLOWS), "gradient", "update", S, "grad_norm"),
    "gradient-one-step-before": Case(
        run(NORM, ([S + 1], "loss", times(2))), "gradient", "update", S, "grad_norm"
    ),
    "gradient-first-and-up-for-good": Case(run(NORM, LATER), "gradient", "update", S, "grad_norm"),
    "activations-gradient-loss": Case(
        run(([S - 2], "activation_max", times(20)), NORM, FOLLOWS),
        *("gradient", "update", S - 2, "activation_max"),
    ),
    "sustained": Case(run(RISE), "sustained", "update", S, "loss"),
    "sustained-and-back": Case(
        run((range(S, S + 8), "loss", times(2))), "sustained", "update", S, "loss"
    ),
    "drift-and-back": Case(
        run((range(S, S + 30), "loss", times(2))), "sustained", "update", S, "loss"
    ),
    "isolated": Case(run(SPIKE), "isolated", "none", S, "loss"),
    "isolated-twice": Case(
        run(SPIKE, ([S + 100], "loss", times(2))), "isolated", "none", S, "loss"
    ),
    "isolated-two-records": Case(
        run((range(S, S + 2), "loss", times(1.8))), "isolated", "none", S, "loss"
    ),
    "healthy": Case(run(), "none", "none"),
    # Which row counts where several hold.
    "nan-after-a-rise": Case(
        run(RISE, ([S + 50], "loss", math.nan)), "nonfinite", "forward", S, "loss"
    ),
    "scale-before-forward": Case(
        run(*overflow(S, S + 20, S + 40), ([S + 60], "loss", math.nan)),
        *("nonfinite", "loss_scale", S + 40, "grad_norm"),
    ),
    "forward-before-backward": Case(
        run(*overflow(S, skipped=False), ([S + 1], "loss", math.nan)),
        *("nonfinite", "forward", S, "grad_norm"),
    ),
    "gradient-before-isolated": Case(
        run(([300], "loss", times(1.8)), NORM, FOLLOWS), "gradient", "update", S, "grad_norm"
    ),
    "sustained-before-isolated": Case(
        run(([300], "loss", times(1.8)), RISE), "sustained", "update", S, "loss"
    ),
    "nan-loss-and-gradient": Case(
        run(([S], "loss", math.nan), *overflow(S, skipped=False)),
        *("nonfinite", "forward", S, "loss"),
    ),
    # Near misses.
    "a-healthy-probe": Case(run(*overflow(S)), "none", "none"),
    "two-halvings": Case(run(*overflow(S, S + 20)), "none", "none"),
    "halvings-far-apart": Case(run(*overflow(300, 500, 700, 900)), "none", "none"),
    "a-probe-before-a-spike": Case(
        run(*overflow(S - 3), SPIKE), "isolated", "none", S - 3, "grad_norm"
    ),
    "a-probe-within-a-rise": Case(run(RISE, *overflow(S + 30)), "sustained", "update", S, "loss"),
    "gradient-in-the-same-step": Case(run(NORM, SPIKE), "isolated", "none", S, "loss"),
    "gradient-after-the-loss": Case(
        run(SPIKE, ([S + 1], "grad_norm", times(40)), ([S + 2], "loss", times(1.8))),
        *("isolated", "none", S, "loss"),
    ),
    "gradient-long-before": Case(
        run(([S - 20], "grad_norm", times(40)), SPIKE), "isolated", "none", S, "loss"
    ),
    "gradient-alone": Case(run(NORM), "none", "none"),
    "a-loss-within-its-band": Case(run(([S], "loss", times(1.05))), "none", "none"),
    "a-loss-that-falls": Case(run((AFTER, "loss", times(0.5))), "none", "none"),
    "other-metrics": Case(
        run(([S], "activation_max", math.nan), ([S + 20], "update_ratio", math.inf)),
        *("none", "none"),
    ),
    "most-steps-clipped": Case(run((AFTER, "clipped", True)), "none", "none"),
    "a-spike-at-the-end": Case(run(([1199], "loss", times(2))), "none", "none"),
    # Logs that lack something.
    "loss-alone": Case(only("loss", of=run(RISE)), "sustained", "update", S, "loss"),
    "norm-alone": Case(only("grad_norm", of=run(NORM)), "none", "none"),
    "norm-alone-not-finite": Case(
        only("grad_norm", of=run(*overflow(S, skipped=False))),
        *("nonfinite", "none", S, "grad_norm"),
    ),
    "steps-alone": Case(only(of=run()), "none", "none"),
    "thirty-records": Case(run(steps=30), "none", "none"),
    "a-spike-in-a-short-log": Case(
        run(([25], "loss", times(3)), steps=40), "isolated", "none", 25, "loss"
    ),
    "nan-in-the-first-record": Case(
        run(([0], "loss", math.nan), steps=5), "nonfinite", "forward", 0, "loss"
    ),
    "sparse-norms": Case(
        lambda seed: [
            r if r.step % 5 == 0 else replace(r, grad_norm=None) for r in run(SPIKE)(seed)
        ],
        *("isolated", "none", S, "loss"),
    ),
    "negative-losses": Case(
        run((range(1200), "loss", lambda loss: loss - 6), (AFTER, "loss", lambda loss: loss + 1.5)),
        *("none", "none"),
    ),
    "a-small-step-up": Case(
        run((range(1200), "loss", lambda loss: 5 + loss / 10), (AFTER, "loss", times(1.06))),
        *("none", "none"),
    ),
    # Several attempts.
    "rolled-back": Case(again(run(RISE), S + 20, S - 50), "sustained", "update", S, "loss"),
    "rolled-back-a-moment-ago": Case(
        again(run(RISE), S + 20, S - 50, until(S + 99, run())), "sustained", "update", S, "loss"
    ),
    "rolled-back-in-vain": Case(
        again(run(RISE), S + 20, S - 50, run(RISE)), "sustained", "update", S, "loss"
    ),
    "rolled-back-and-a-drift-later": Case(
        again(run(RISE), S + 20, S - 50, run(DRIFT_LATER)),
        *("sustained", "update", S + 250, "loss"),
    ),
    "nan-rolled-back-and-a-rise-later": Case(
        again(run(([S], "loss", math.nan)), S + 1, S - 50, run((LATE, "loss", times(2)))),
        *("nonfinite", "forward", S, "loss"),
    ),
    "spike-long-before-a-rollback": Case(
        again(run(([300], "loss", times(2))), S, S - 50), "isolated", "none", 300, "loss"
    ),
    "out-when-rolled-back": Case(again(run(SPIKE), S + 1, S - 50), "none", "none"),
}
SINGLE = {
    "slow": Case(lambda seed: changed(healthy(4000, seed), *SLOWLY), "sustained", "update"),
    "real-run": Case(lambda seed: mixtral(), "isolated", "none", 2425, "loss"),
    "many-norms": Case(
        run(([2500], "grad_norm", times(40)), ([2502], "loss", times(2)), steps=3000),
        *("gradient", "update", 2500, "grad_norm"),
    ),
}
