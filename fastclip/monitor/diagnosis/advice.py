"""What follows from symptom, boundary and facts; every row of `ADVICE` that holds does.

Texts have places for what `diagnose` fills in: {onset}, {target} (the newest checkpoint without the
onset), {step} (of the alarm), {batch} (that shows the boundary), {lost} (the first whose loss was
not finite, and how many more), {span} (batches from before the onset to the alarm), {symptom},
{now} (the symptom that advice is about), {lr}, {lr_before}, {lr_after} and {lr_step} (of a jump),
{scale} (the lowest), {held} (records since its last fall), {attempt}, {newest} (attempt), {past}
(its steps past the onset), {best} (what Drift compared with), {backward} and {backward_batch} (of
BACKWARD_NONFINITE), {threshold} and {norms} (what it is made of), {skipped} (how many of how many),
{row} (the most in a row), {skip} and {skip_batch} (where these begin).
"""

from typing import NamedTuple

from fastclip.monitor.diagnosis.table import (
    ABRUPT,
    AWAY,
    BACK,
    BACKWARD_NONFINITE,
    CALIBRATED,
    LR_JUMPED,
    MANY_SKIPPED,
    PASSED,
    PAST,
    PAST_AND_NOW,
    PAST_AND_OVER,
    SCALE_FALLS,
    SCALE_HELD,
    SLOW,
    STUCK,
    UNCALIBRATED,
    UNSCALED,
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
        (PAST_AND_OVER,),
        "Nothing, as long as it does not come again: what follows is about attempt {attempt}, "
        "which was rolled back, and the newest one, {newest}, does not show it {past} steps past "
        "step {onset}.",
        "Done: the newest attempt is 100 or more steps past step {onset}.",
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
        None,
        None,
        (LR_JUMPED,),
        "Look at the learning rate first: it went from {lr_before} to {lr_after} at step "
        "{lr_step}, at or just before the onset. If that was not meant, put it right before "
        "anything else.",
        "From a checkpoint before step {lr_step}, with the rate as it was, the run gets past step "
        "{onset} without an event.",
    ),
    Advice(
        "nonfinite",
        "forward",
        (PASSED,),
        "Look at {lost} first: the losses before and after are finite, so the cause is likely its "
        "data, or an operation that this data brings to its pole (log of 0, division by 0). "
        "find_first_nonfinite(model, forward) on it names the module, and gives "
        'where="input" if the fault came in with the batch.',
        "With that data repaired or left out every loss is finite.",
    ),
    Advice(
        "nonfinite",
        "loss_scale",
        (PASSED,),
        "Look at {lost} before the loss scale: its loss is not finite, the losses before and after "
        "are, and a GradScaler lowers its scale for that, too. find_first_nonfinite(model, "
        'forward) on it names the module, and gives where="input" if the fault came in with the '
        "batch. What follows is for a scale that falls without that batch, too.",
        "With that data repaired or left out every loss is finite, and LossScaleDrop is silent: "
        "then the loss scale needs nothing.",
    ),
    Advice(
        "nonfinite",
        "forward",
        (UNSCALED,),
        "Look at {batch}: there is no loss_scale in the log, and where the run is not fp16 its "
        "range is seldom the cause. What is left is the data, or an operation at its pole "
        "(log of 0, division by 0, a softmax with all masked). find_first_nonfinite(model, "
        'forward) names the module; module "" means code outside all modules, such as the loss.',
        "find_first_nonfinite(model, forward) on {batch}: None after the repair.",
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
        (SCALE_FALLS,),
        "Look at loss scaling: the scale is down to {scale}. Turn to BF16, which needs none, or "
        "restart the GradScaler at a scale that held before the onset, once the cause is gone.",
        "The new log's loss_scale grows again every growth_interval steps, falls now and then "
        "(a single halving is healthy), and LossScaleDrop is silent.",
    ),
    Advice(
        "nonfinite",
        "loss_scale",
        (SCALE_FALLS,),
        "Look at backward operations: overflow at any scale is a gradient that is itself not "
        "finite or beyond 65504. find_first_nonfinite(model, forward) names the module; compute "
        "it in FP32.",
        "compare_precisions(model, forward) on {batch}: finite in fp32 and bf16 means range "
        "(repair the precision), not finite anywhere means the operation or the data.",
    ),
    Advice(
        "nonfinite",
        "loss_scale",
        (SCALE_HELD,),
        "Nothing about the loss scale: it came down to {scale} and has found its level, for it has "
        "held for {held} records since. A GradScaler(init_scale={scale}) would spare the next run "
        "the skipped steps.",
        "The loss_scale falls only now and then (a single halving is healthy), and LossScaleDrop "
        "stays silent.",
    ),
    Advice(
        None,
        None,
        (MANY_SKIPPED,),
        "{skipped} steps were skipped, up to {row} in a row, from step {skip} on. That is no "
        "normal share: fp16 skips a few at its start and then one in about 2,000, any other run "
        "none, and Skips() among the detectors of the Monitor makes ten in a row critical. A run "
        "learns nothing from them: find_first_nonfinite(model, forward) on {skip_batch} names the "
        "module at fault.",
        "find_first_nonfinite(model, forward) on {skip_batch}: None after the repair, and skipped "
        "steps are rare.",
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
