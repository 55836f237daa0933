"""`fastclip demo`: what one bad batch does, and what clipping makes of it."""

import textwrap
from typing import Any

import torch

import fastclip
from fastclip.commands import InputError, demo_digits, demo_experiment, print_json, progress
from fastclip.commands.demo_digits import Result
from fastclip.commands.demo_experiment import BAD_STEP, Row

SHOWN = range(BAD_STEP - 1, BAD_STEP + 2)
PARTS = len(demo_experiment.MODES) + len(demo_digits.SETTINGS)
NEXT = (
    "Next: write fastclip.clip_grad_norm_ where your script has torch.nn.utils.clip_grad_norm_, "
    "and print(fastclip.grad_stats(model)) to see your own layers. "
    "`fastclip doctor` shows what runs on this machine."
)


def run(json: bool) -> int:
    """Runs both parts; prints each as soon as it is there, or one document for both."""
    backend = _backend()
    rows = _experiment()
    if not json:
        print(f"fastclip on torch {torch.__version__}, backend {backend!r}\n")
        print(experiment_text(rows), flush=True)
    try:
        data = demo_digits.load()
    except InputError:
        if json:
            print_json(document(backend, rows, []))
        raise
    results = _digits(data)
    if json:
        print_json(document(backend, rows, results))
    else:
        print(f"\n{digits_text(results)}\n\n{_fill(NEXT)}")
    return 0


def _backend() -> str:
    try:
        return fastclip.backends.choose(torch.device("cpu")).name
    except RuntimeError as error:
        raise InputError(" ".join(str(error).split())) from error


def _experiment() -> list[Row]:
    rows: list[Row] = []
    for part, mode in enumerate(demo_experiment.MODES, 1):
        progress(f"[{part}/{PARTS}] loss spike, {mode.name}: {demo_experiment.STEPS} steps")
        rows += demo_experiment.run(mode)
    return rows


def _digits(data: demo_digits.Data) -> list[Result]:
    results: list[Result] = []
    for part, setting in enumerate(demo_digits.SETTINGS, len(demo_experiment.MODES) + 1):
        progress(f"[{part}/{PARTS}] digits, {setting.name}: {demo_digits.EPOCHS} epochs")
        results.append(demo_digits.train(setting, data))
    return results


def document(backend: str, rows: list[Row], results: list[Result]) -> dict[str, Any]:
    """What `--json` prints; "digits" is null when they could not be run."""
    return {
        "torch": torch.__version__,
        "backend": backend,
        "experiment": [row._asdict() for row in rows],
        "digits": [_digits_document(result) for result in results] or None,
    }


def _digits_document(result: Result) -> dict[str, Any]:
    return {
        "run": result.name,
        "bad_step": demo_digits.BAD_STEP,
        "accuracy_before": result.before,
        "accuracy_after": result.after,
        "accuracy_final": result.final,
        "stats_before": result.stats_before.as_dict(),
        "stats": result.stats_bad.as_dict(),
        "worst": result.stats_bad.worst(1)[0].name,
    }


def _fill(text: str) -> str:
    return textwrap.fill(text, 79, break_long_words=False, break_on_hyphens=False)


def _number(value: float) -> str:
    return f"{value:#.7g}"  # 7 digits: as many as a float32 holds


def experiment_text(rows: list[Row]) -> str:
    lines = [
        "1. One bad batch in half precision",
        _fill(
            f"One weight, target 0, SGD. At step {BAD_STEP} the input is "
            f"{demo_experiment.BAD_INPUT:,.0f} instead of 1."
        ),
        "",
        f"{'mode':<18}{'step':>5}{'loss':>15}{'norm before clip':>18}{'weight after':>15}",
    ]
    for row in rows:
        if row.step in SHOWN:
            mode = row.mode if row.step == SHOWN[0] else ""
            numbers = f"{_number(row.loss):>15}{_number(row.norm):>18}{_number(row.weight):>15}"
            lines.append(f"{mode:<18}{row.step:>5}{numbers}{' skipped' if row.skipped else ''}")
    return "\n".join([*lines, "", _fill(_experiment_meaning(rows))])


def _experiment_meaning(rows: list[Row]) -> str:
    bad = {row.mode: row for row in rows if row.step == BAD_STEP}
    last = {row.mode: row for row in rows if row.step == demo_experiment.STEPS - 1}
    _, plain, clipped = (mode.name for mode in demo_experiment.MODES)
    return (
        "float16 overflows, and the scaler skips the step. bfloat16 does not overflow, so nothing "
        f"stops the batch: the weight goes to {bad[plain].weight:.3g}, and is still at "
        f"{last[plain].weight:.3g} when the run ends. Clipped, it is {bad[clipped].weight:.3g} "
        f"after the bad batch and {last[clipped].weight:.3g} at the end."
    )


def digits_text(results: list[Result]) -> str:
    _, unclipped, _ = results
    step = demo_digits.BAD_STEP
    lines = [
        "2. One bad batch while training on the 1,797 digits of scikit-learn",
        _fill(
            "A float32 network, 64-64-32-10, trained by SGD. The inputs of the bad batch, at step "
            f"{step}, are multiplied by {demo_digits.BAD_FACTOR:,.0f}."
        ),
        "",
        f"{'accuracy':<28}{f'before step {step}':>16}{'after it':>12}{'at the end':>12}",
    ]
    for name, before, after, final, *_ in results:
        lines.append(f"{name:<28}{before:>16.1%}{after:>12.1%}{final:>12.1%}")
    lines += [
        "",
        f"Gradients of the bad batch at step {step}, before clipping; this is print(stats):",
        "",
        str(unclipped.stats_bad),
        "",
        _fill(_standing_out(unclipped)),
    ]
    return "\n".join(lines)


def _standing_out(result: Result) -> str:
    """Names the worst layer, and what the pattern of all layers says."""
    norm_before = {layer.name: layer.norm for layer in result.stats_before.layers()}
    growth = {
        layer.name: layer.norm / norm_before[layer.name] for layer in result.stats_bad.layers()
    }
    worst = result.stats_bad.worst(1)[0]
    text = (
        f"{worst.name} stood out: its norm, {worst.norm:,.0f}, is {growth[worst.name]:,.0f} times "
        "that of the step before."
    )
    weights = min(factor for name, factor in growth.items() if name.endswith("weight"))
    biases = max(factor for name, factor in growth.items() if name.endswith("bias"))
    if weights > 100 * biases:
        text += (
            f" Every weight's norm grew at least {weights:,.0f}-fold and no bias's more than "
            f"{biases:.1f}-fold: only a weight's gradient contains the layer's inputs, so the "
            "fault is in the inputs, not in the labels or the loss."
        )
    return text
