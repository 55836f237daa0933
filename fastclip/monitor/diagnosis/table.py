"""The playbook as data: what a log can show, and what it means.

Facts are sentences that records bear out. The first row of `SYMPTOMS` and of `BOUNDARIES` that
holds counts. What follows is in `advice`. Texts of `GAPS` have places for what `diagnose` fills in:
{losses}, {with_loss}, {with_norm} (how many), {open} (the step of OPEN).
"""

from typing import NamedTuple

# Facts.
LOSS_NONFINITE = "the loss is not finite"
GRADIENT_NONFINITE = "gradients are not finite in a step not recorded as skipped"
BACKWARD_NONFINITE = "gradients are not finite while the loss is, in a step not recorded as skipped"
SCALE_FALLS = "the loss scale keeps falling"
SCALE_HELD = "the loss scale kept falling, and has held since"
GRADIENT_FIRST = "the gradient norm left its band before the loss did"
SUSTAINED = "the loss rose and stayed up (Sustained)"
SUSTAINED_BACK = "the loss rose and stayed up for a while (Sustained), and came back"
DRIFT = "the loss rose slowly (Drift)"
DRIFT_BACK = "the loss rose slowly (Drift), and came back"
RETURNED = "the loss left its band and came back"
STUCK = "the loss is not finite, up to the end of the log"
# These decide nothing; a reader wants to know them.
LEVEL = "the loss stayed outside its band for 100 values: a new level"
OPEN = "the loss is outside its band where the log ends"
OVERFLOWS = "gradients were not finite, and the step was skipped"
SKIPPING = "ten updates in a row, or more, were skipped (Skips)"
GRADIENT_SPIKE = "the gradient norm spiked (RobustSpike)"
OTHER_NONFINITE = "activation_max, param_norm or update_ratio is not finite"
CLIPPING = "most steps are clipped (ClipRate)"
# These are of the log as a whole.
PAST = "all that shows the symptom is of an attempt that was rolled back"
PAST_AND_NOW = "the same, but what was not rolled back shows a symptom of its own"
PASSED = "a loss is not finite, and losses before and after are"
ABRUPT = "the first that shows it is not Drift, and the loss did not come back"
SLOW = "the first that shows it is Drift, and the loss did not come back"
PAST_AND_OVER = "as PAST, and the newest attempt is well past it"
UNSCALED = "there is no loss_scale to hint at fp16, and no step spoiled the parameters before"
MANY_SKIPPED = "more steps were skipped than is normal"
LR_JUMPED = "the learning rate doubled, or more, at or just before the onset"
AWAY = "the loss left its band and did not come back"

# Where the loss rose and came back. Once it has, these take the place of the facts on the left.
BACK = {SUSTAINED: SUSTAINED_BACK, DRIFT: DRIFT_BACK}
OVER = {*BACK.values(), SCALE_HELD}
CALIBRATED = "there are enough healthy norms to suggest a threshold"
UNCALIBRATED = "there are not"

# The order in which evidence is shown.
FACTS = (
    *(LOSS_NONFINITE, STUCK, GRADIENT_NONFINITE, BACKWARD_NONFINITE),
    *(SCALE_FALLS, SCALE_HELD, OVERFLOWS, SKIPPING),
    *(GRADIENT_FIRST, SUSTAINED, SUSTAINED_BACK, DRIFT, DRIFT_BACK, OPEN, LEVEL, RETURNED),
    *(GRADIENT_SPIKE, OTHER_NONFINITE, CLIPPING),
)


class Symptom(NamedTuple):
    """Holds if one of `facts` does; the last row always. `back`: what it means if all of them that
    hold are `OVER`, where that differs."""

    name: str
    facts: tuple[str, ...]
    meaning: str
    back: str | None = None


SYMPTOMS = (
    Symptom(
        "nonfinite",
        (LOSS_NONFINITE, STUCK, GRADIENT_NONFINITE, BACKWARD_NONFINITE, SCALE_FALLS, SCALE_HELD),
        "Losses or gradients are NaN or infinite.",
        "Scaled gradients were infinite until the loss scale had found its level.",
    ),
    Symptom(
        "gradient",
        (GRADIENT_FIRST,),
        "The gradient norm left its normal band first, and the loss followed.",
    ),
    Symptom(
        "sustained",
        (SUSTAINED, SUSTAINED_BACK, DRIFT, DRIFT_BACK),
        "The loss rose and stayed up.",
        "The loss rose and stayed up for a while, and came back later.",
    ),
    Symptom("isolated", (RETURNED,), "The loss left its normal band and came back by itself."),
    Symptom("none", (), "The log shows nothing that the playbook is for."),
)


class Boundary(NamedTuple):
    """Holds if one of `facts` or `symptoms` does; the last row always. `back` as in `Symptom`."""

    name: str
    facts: tuple[str, ...]
    symptoms: tuple[str, ...]
    meaning: str
    back: str | None = None


# Of "none", where there is something to do all the same.
UNDISTURBED = "No loss shows a symptom, but more steps were skipped than is normal."

BOUNDARIES = (
    Boundary(
        "loss_scale",
        (SCALE_FALLS, SCALE_HELD),
        (),
        "The loss scale fell again and again: the scaled backward pass overflows at any scale.",
        "The loss scale came down until the scaled backward pass no longer overflowed.",
    ),
    Boundary(
        "forward",
        (LOSS_NONFINITE, STUCK),
        (),
        "The loss itself is not finite: the forward pass left the range of its format, or what "
        "came in with the batch or the parameters was not finite.",
    ),
    Boundary(
        "backward",
        (BACKWARD_NONFINITE,),
        (),
        "The loss is finite and its gradient is not: the backward pass left the range.",
    ),
    Boundary(
        "update",
        (),
        ("gradient", "sustained"),
        "Every number is finite: the updates went astray, not the arithmetic.",
    ),
    Boundary("none", (), (), "The log shows none."),
)


class Gap(NamedTuple):
    """What the log cannot tell, and what to record so that the next one can; nothing where it may
    be that there is nothing to tell."""

    what: str
    record: str


GAPS = {
    "no loss": Gap(
        "there is no loss in the log: whether it rose or was finite is not known",
        "monitor.observe(step=step, loss=loss, ...)",
    ),
    "few losses": Gap(
        "{losses} finite losses in the longest attempt are few: bands judge from the 21st, Drift "
        "from the 51st, Sustained from the 105th",
        "more steps, then diagnose again",
    ),
    "no norm": Gap(
        "there is no grad_norm in the log: whether the gradient moved before the loss (gradient "
        "rather than isolated or sustained) is not known",
        "monitor.observe(step=step, loss=loss, stats=clipper.step(optimizer))",
    ),
    "few norms": Gap(
        "grad_norm is in {with_norm} of {with_loss} records that have a loss: it may have left its "
        "band unseen",
        "grad_norm in every record that has a loss",
    ),
    "no skipped": Gap(
        "whether the steps with gradients that are not finite were skipped is not in the log, so "
        "they count as taken. If a GradScaler skipped them they were healthy probes of its scale",
        "skipped and loss_scale: monitor.observe(step=step, loss=loss, "
        "stats=clipper.step(optimizer, scaler))",
    ),
    "no scale": Gap(
        "there is no loss_scale in the log. In an fp16 run stats=clipper.step(optimizer, scaler) "
        "records it, and shows whether it keeps falling",
        "",
    ),
    "no boundary": Gap(
        "gradients are not finite and the loss of those steps is not in the log: forward or "
        "backward cannot be told",
        "the loss of every step; on the batch at hand find_first_nonfinite(model, forward) tells",
    ),
    "not positive": Gap(
        "losses at or below 0: Spike, Sustained and Drift compare by ratio and pass over "
        "baselines that are not positive, so a rise that stays was not looked for",
        "a positive quantity as `loss`, or RobustSpike('loss') on the live Monitor",
    ),
    "open": Gap(
        "the loss left its band at step {open} and the log ends outside: whether it comes back is "
        "not known",
        "a few more steps, then diagnose again; keep the checkpoint before step {open}",
    ),
}
