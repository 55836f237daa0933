"""What `diagnose` gives."""

from typing import Any, NamedTuple

from fastclip.monitor.diagnosis.page import page


class Seen(NamedTuple):
    """One value that a conclusion rests on; `baseline` is what it was judged against, if there is
    such: the median of its band or the detector's baseline."""

    step: int
    attempt: int
    metric: str
    value: float
    baseline: float | None


class Evidence(NamedTuple):
    """A fact and the records that bear it out.

    `times`: how many do, from step `first` to step `last`; `attempt` is the newest among them.
    `onset` and `onset_metric` belong to the first, `batch` and `lr` are of the record that told it.
    `abandoned`: all of it was in steps that were run again after a rollback; then it is of the last
    attempt of which that is so. `records`: the first few. `message`: what was said of the first.
    `batches`: that of the step before the onset and that of the first alarm, if the log has them.
    """

    fact: str
    times: int
    first: int
    last: int
    attempt: int
    onset: int
    onset_metric: str
    batch: Any
    lr: float | None
    abandoned: bool
    records: tuple[Seen, ...]
    message: str
    batches: tuple[Any, Any] | None = None


class Compared(NamedTuple):
    """One quantity of both runs over the steps they share; None: it is not in that log."""

    quantity: str
    log: float | None
    baseline: float | None
    note: str = ""


class Diagnosis(NamedTuple):
    """One field per phase of the playbook; str() is a page to read.

    Attributes:
        symptom: A, "none", "isolated", "sustained", "gradient" or "nonfinite".
        boundary: B, "none", "forward", "backward", "update" or "loss_scale".
        interventions: C, what to do, in sentences.
        checks: D, how to see that they worked, and what to record where the log could not tell.
        onset: the step at which it began, of the first record that shows the symptom, of those that
            were not rolled back if there are such.
        onset_metric: the metric that left its normal band there.
        evidence: every fact of the decision table that the log shows, apart from others what was
            rolled back.
        unjudged: what the log cannot show.
        comparison: with a baseline, one entry a quantity.
    """

    symptom: str
    boundary: str
    interventions: tuple[str, ...]
    checks: tuple[str, ...]
    onset: int | None
    onset_metric: str | None
    evidence: tuple[Evidence, ...] = ()
    unjudged: tuple[str, ...] = ()
    comparison: tuple[Compared, ...] = ()

    def __str__(self) -> str:
        return page(self)
