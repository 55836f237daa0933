"""The playbook as data: what a log can show, and what follows from it.

Facts are sentences that records bear out. The first row of `SYMPTOMS` and of `BOUNDARIES` that
holds counts; every row of `ADVICE` that holds does. Texts have places for what `diagnose` fills in:
{onset}, {target} (the newest checkpoint without the onset), {step} (of the alarm), {batch} (that
shows the boundary), {batches} (it, and how many more), {span} (batches from before the onset to the
alarm), {symptom}, {now} (the symptom that advice is about), {lr}, {scale} (the lowest), {attempt},
{newest} (attempt), {best} (what Drift compared with), {backward} and {backward_batch} (of
BACKWARD_NONFINITE), {threshold} and {norms} (what it is made of), {losses}, {with_loss},
{with_norm} (how many), {open} (the step of OPEN).
"""

from typing import NamedTuple

# Facts.
LOSS_NONFINITE = "the loss is not finite"
GRADIENT_NONFINITE = "gradients are not finite, no loss is, and the step is not recorded as skipped"
BACKWARD_NONFINITE = (
    "gradients are not finite, the loss is, and the step is not recorded as skipped"
)
SCALE_FALLS = "the loss scale keeps falling"
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
GRADIENT_SPIKE = "the gradient norm spiked (RobustSpike)"
OTHER_NONFINITE = "activation_max, param_norm or update_ratio is not finite"
CLIPPING = "most steps are clipped (ClipRate)"
# These are of the log as a whole.
PAST = "all that shows the symptom is of an attempt that was rolled back"
PAST_AND_NOW = "the same, but what was not rolled back shows a symptom of its own"
PASSED = "a loss is not finite, and losses before and after are"
ABRUPT = "the first that shows it is not Drift, and the loss did not come back"
SLOW = "the first that shows it is Drift, and the loss did not come back"
AWAY = "the loss left its band and did not come back"

# Where the loss rose and came back. Once it has, these take the place of the facts on the left.
BACK = {SUSTAINED: SUSTAINED_BACK, DRIFT: DRIFT_BACK}
CALIBRATED = "there are enough healthy norms to suggest a threshold"
UNCALIBRATED = "there are not"

# The order in which evidence is shown.
FACTS = (
    *(LOSS_NONFINITE, STUCK, GRADIENT_NONFINITE, BACKWARD_NONFINITE, SCALE_FALLS, OVERFLOWS),
    *(GRADIENT_FIRST, SUSTAINED, SUSTAINED_BACK, DRIFT, DRIFT_BACK, OPEN, LEVEL, RETURNED),
    *(GRADIENT_SPIKE, OTHER_NONFINITE, CLIPPING),
)


class Symptom(NamedTuple):
    """Holds if one of `facts` does; the last row always. `back`: what it means if the loss came
    back, where that differs."""

    name: str
    facts: tuple[str, ...]
    meaning: str
    back: str | None = None


SYMPTOMS = (
    Symptom(
        "nonfinite",
        (LOSS_NONFINITE, STUCK, GRADIENT_NONFINITE, BACKWARD_NONFINITE, SCALE_FALLS),
        "Losses or gradients are NaN or infinite.",
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
    """Holds if one of `facts` or `symptoms` does; the last row always."""

    name: str
    facts: tuple[str, ...]
    symptoms: tuple[str, ...]
    meaning: str


BOUNDARIES = (
    Boundary(
        "loss_scale",
        (SCALE_FALLS,),
        (),
        "The loss scale fell again and again: the scaled backward pass overflows at any scale.",
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


class Advice(NamedTuple):
    """What to do, and how to see that it worked. Holds if symptom, boundary and facts do; None is
    any, and of several facts one has to."""

    symptom: str | None
    boundary: str | None
    facts: tuple[str, ...] | None
    action: str
    check: str


ADVICE = (
    Advice(
        None,
        None,
        (PAST,),
        "What follows is about attempt {attempt}, which was rolled back; the newest one, "
        "{newest}, does not show it so far. Let it run, and keep the rest for the case that it "
        "comes again.",
        "Diagnose again once the newest attempt is 100 steps past step {onset}.",
    ),
    Advice(
        None,
        None,
        (PAST_AND_NOW,),
        "What shows {symptom} was rolled back, and the newest attempt, {newest}, does not show it "
        "so far. What follows is about what was not rolled back, whose symptom is {now}.",
        "Diagnose again in a few hundred steps: {symptom} is still marked as rolled back.",
    ),
    Advice(
        "nonfinite",
        "forward",
        (PASSED,),
        "Look at {batches} first: the losses before and after are finite, so the data is the "
        'likeliest cause. find_first_nonfinite(model, forward) on it gives where="input" if the '
        "fault came in with it.",
        "With that data repaired or left out every loss is finite.",
    ),
    Advice(
        "nonfinite",
        "forward",
        None,
        "Run the forward pass in BF16, which has the range of FP32 (torch.autocast(device, "
        "dtype=torch.bfloat16), no GradScaler), if it runs in fp16: else that does not help. Or "
        "use selective FP32: torch.autocast(device, enabled=False) around the module at fault. "
        "find_first_nonfinite(model, forward) names it.",
        "compare_precisions(model, forward) on {batch}: .finite is True for the precision chosen. "
        "If it is False for fp32 too, precision is not the cause: look at the data of that "
        "batch and at the parameters.",
    ),
    Advice(
        "nonfinite",
        "forward",
        (BACKWARD_NONFINITE,),
        "Look at the backward pass too: at step {backward} gradients were not finite while the "
        "loss was, and no record says that the step was skipped. If the loss turned only "
        "afterwards, it began there.",
        "find_first_nonfinite(model, forward) on {backward_batch}: None after the repair.",
    ),
    Advice(
        "nonfinite",
        "backward",
        None,
        "Look at loss scaling: with fp16, loss * scale has to go through a GradScaler, and "
        "clipper.step(optimizer, scaler) skips a step that overflows and lowers the scale. "
        'GradClipper(model, nonfinite="skip"), the default, takes no such step.',
        "Run on with clipper.step(optimizer, scaler): skipped steps are rare, and `fastclip "
        "diagnose` of the new log no longer says nonfinite.",
    ),
    Advice(
        "nonfinite",
        "backward",
        None,
        "Look at backward operations: find_first_nonfinite(model, forward) names the first module "
        "whose backward pass made it (the root of 0, a logarithm or division near 0, a softmax "
        "with all masked); compute that one in FP32 or keep it away from its pole.",
        "find_first_nonfinite(model, forward) on {batch}: None after the repair.",
    ),
    Advice(
        "nonfinite",
        "loss_scale",
        None,
        "Look at loss scaling: the scale is down to {scale}. Turn to BF16, which needs none, or "
        "restart the GradScaler at a scale that held before the onset, once the cause is gone.",
        "The new log's loss_scale grows again every growth_interval steps, falls now and then "
        "(a single halving is healthy), and LossScaleDrop is silent.",
    ),
    Advice(
        "nonfinite",
        "loss_scale",
        None,
        "Look at backward operations: overflow at any scale is a gradient that is itself not "
        "finite or beyond 65504. find_first_nonfinite(model, forward) names the module; compute "
        "it in FP32.",
        "compare_precisions(model, forward) on {batch}: finite in fp32 and bf16 means range "
        "(repair the precision), not finite anywhere means the operation or the data.",
    ),
    Advice(
        "nonfinite",
        None,
        (STUCK,),
        "The loss is not finite to the end, so the parameters may not be either: restore the "
        "checkpoint before the onset, recovery.restore(before={target}), after the repair.",
        "The first steps after restoring have the losses that the log has from step {target} on.",
    ),
    Advice(
        "gradient",
        None,
        (CALIBRATED,),
        "Clip: GradClipper(model, max_norm={threshold}), the threshold that clips at most 1 % of "
        "the {norms}; where norms change over the run, "
        "GradClipper(model, rule=fastclip.rules.LogZ()) follows them.",
        "Run again from a checkpoint before step {onset} with clipping: the loss stays in its band "
        "at step {step}, about 1 % of the steps are clipped and ClipRate is silent.",
    ),
    Advice(
        "gradient",
        None,
        (UNCALIBRATED,),
        "Clip: GradClipper(model, rule=fastclip.rules.LogZ()), which finds its threshold while it "
        "runs. For a fixed max_norm there are too few norms to go by ({norms}; 1,000 are needed): "
        "`fastclip calibrate GOOD.jsonl` on the log of a healthy run, or --baseline GOOD.jsonl.",
        "Run again from a checkpoint before step {onset} with clipping: the loss stays in its band "
        "at step {step}, few steps are clipped and ClipRate is silent.",
    ),
    Advice(
        "gradient",
        None,
        (AWAY,),
        "The loss did not come back, so clipping comes too late for this model: restore the "
        "checkpoint before the onset, recovery.restore(before={target}), and clip from there.",
        "100 steps past step {onset} without an event: then the restart held.",
    ),
    Advice(
        "sustained",
        None,
        (ABRUPT,),
        "Restore the checkpoint before the onset: recovery.restore(before={target}), and leave out "
        "{span}; Recovery(directory, state, RollbackPolicy()) does both by itself.",
        "100 steps past step {onset} without an event, losses as before the onset: then the "
        "restart held. If it diverges at the same step without those batches, they are not the "
        "cause.",
    ),
    Advice(
        "sustained",
        None,
        (SLOW,),
        "Restore a checkpoint from before the rise. It began earlier than step {onset}, where "
        "Drift noticed it: find in `fastclip report LOG` the step at which the loss was last at "
        "its best, {best}, and call recovery.restore(before=STEP).",
        "The restarted loss reaches {best} again and goes below it.",
    ),
    Advice(
        "sustained",
        None,
        tuple(BACK.values()),
        "Watch: the loss came back without a restart, so none is needed for what is past. Keep the "
        "checkpoint before the onset (step {target}) as long as it may come again, and look at "
        "{span} and at the learning rate ({lr} at the onset) for its cause.",
        "Diagnose again in a few hundred steps: the loss is still back. If it rises again, restore "
        "from before that onset and halve the learning rate.",
    ),
    Advice(
        "sustained",
        None,
        (ABRUPT, SLOW),
        "Review the learning rate ({lr} at the onset) and its warm-up: halve it for a few hundred "
        "steps after the restart (RollbackPolicy(lr_scale=0.5, lr_steps=200)), for good if it "
        "happens again.",
        "With the lower rate the update_ratio falls in proportion, and Sustained and Drift stay "
        "silent past step {onset}.",
    ),
    Advice(
        "isolated",
        None,
        None,
        "Watch, and do nothing disruptive: no rollback, no other learning rate, no other data. "
        "Keep the Monitor and its log on; `fastclip report LOG` shows the spikes in context.",
        "Diagnose again in a few thousand steps: still isolated, and not more often. Act when "
        "Sustained or Drift fires, or when the gradient norm starts to move first.",
    ),
)


class Gap(NamedTuple):
    """What the log cannot tell, and what to record so that the next one can."""

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
        "there is no loss_scale in the log: whether it kept falling is not known",
        "stats=clipper.step(optimizer, scaler), which has it, if the run is fp16",
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
