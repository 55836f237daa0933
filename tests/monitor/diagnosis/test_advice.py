"""What a page advises where the plain rows of the table would mislead."""

import math
from dataclasses import replace

import pytest

from fastclip.monitor import LayerRow, StepRecord, diagnose
from fastclip.monitor.diagnosis import table
from tests.monitor.diagnosis.cases import CASES, S, again, overflow, run, until
from tests.monitor.making import changed, healthy, times


def actions(records: list[StepRecord]) -> list[str]:
    return list(diagnose(records).interventions)


def test_steps_skipped_in_a_row_are_told_without_a_symptom() -> None:
    found = diagnose(CASES["skipped-to-the-end"].records(0))
    (action,) = found.interventions
    assert action.startswith(f"400 of 1,200 steps were skipped, up to 400 in a row, from step {S} ")
    assert f"find_first_nonfinite(model, forward) on batch {S} (step {S})" in action
    assert "more steps were skipped than is normal" in str(found)
    assert table.SKIPPING in {one.fact for one in found.evidence}
    (few,) = actions(CASES["every-fourth-skipped"].records(0))
    assert few.startswith(f"100 of 1,200 steps were skipped, up to 1 in a row, from step {S} ")


@pytest.mark.parametrize(("skips", "told"), [(9, False), (10, True)])
def test_how_many_skips_are_no_normal_share(skips: int, told: bool) -> None:
    for steps in (range(S, S + skips), range(100, 200, 5)[:skips]):
        records = changed(healthy(200 + S), (steps, "skipped", True))
        expected = told and steps.step == 1  # ten of 1,000 that are apart are no more than 5 %
        assert bool(actions(records)) == expected
        short = [replace(r, step=place) for place, r in enumerate(records[steps[0] :][:150])]
        assert bool(actions(short)) == told


@pytest.mark.parametrize(("held", "over"), [(99, False), (100, True)])
def test_a_scale_that_has_held_needs_nothing(held: int, over: bool) -> None:
    """LossScaleDrop tells of the third drop at step S + 41."""
    records = run(*overflow(S, S + 20, S + 40))(0)[: S + 42 + held]
    found = diagnose(records)
    assert (found.symptom, found.boundary) == ("nonfinite", "loss_scale")
    assert ("BF16" in str(found)) != over
    text = " ".join(str(found).split())
    assert ("overflows at any scale" in text) != over
    assert found.interventions[0].startswith("Nothing about the loss scale: it came ") == over
    if over:
        assert "it came down to 8192" in found.interventions[0]
        assert f"held for {held} records" in found.interventions[0]
    lost = changed(records, (range(len(records)), "loss_scale", times(2.0**-14)))
    assert "Turn to BF16" in actions(lost)[0]  # below 1


def test_a_nan_batch_that_lowered_the_scale_comes_first() -> None:
    first, *others = actions(CASES["a-nan-batch-after-two-halvings"].records(0))
    assert first.startswith(f"Look at batch {S + 20} (step {S + 20}) before the loss scale: ")
    assert others[0].startswith("Look at loss scaling")


def test_where_nothing_hints_at_fp16_the_batch_comes_before_precision() -> None:
    stuck = actions(CASES["nan-loss-in-float32"].records(0))
    assert stuck[0].startswith(f"Look at batch {S} (step {S}): there is no loss_scale in the log")
    assert "log of 0, division by 0" in stuck[0]
    assert stuck[1].startswith("Run the forward pass in BF16")


def test_the_missing_scale_is_a_note_and_no_doubt() -> None:
    lacking = (range(1200), "loss_scale", None)
    found = diagnose(run(([S], "skipped", True), ([S], "grad_norm", math.nan), lacking)(0))
    assert str(found).startswith("A. Symptom: none\n")
    assert str(found).count("loss_scale") == str(found).count("? Note: there is no loss_scale") == 1
    assert found.checks == ()


def test_batches_after_the_parameters_were_spoiled_are_no_suspects() -> None:
    """Batch S - 1 spoils them; the run goes on to S + 50, and is rolled back."""
    spoiled = run(([S - 1], "grad_norm", math.nan), (range(S, 1200), "loss", math.nan))
    for records in (spoiled(0), again(spoiled, S + 50, S - 50)(0)):
        found = diagnose(records)
        assert "the losses before and after are finite" not in str(found)
        assert f"compare_precisions(model, forward) on batch {S - 1} (step {S - 1})" in str(
            found.checks
        )
    twice = run(*((range(at, at + 5), "loss", math.nan) for at in (S, S + 50)))
    assert actions(twice(0))[0].startswith(
        f"Look at batch {S} (step {S}) and 1 more up to step {S + 54} first:"
    )


@pytest.mark.parametrize(("last", "over"), [(S + 99, False), (S + 100, True)])
def test_letting_it_run_ends(last: int, over: bool) -> None:
    found = diagnose(again(run(*RISE), S + 20, S - 50, until(last + 1, run()))(0))
    assert found.interventions[0].startswith("Nothing, as long as it does not come again") == over
    assert ("Let it run" in str(found.interventions)) != over
    assert found.checks[0].startswith("Done: " if over else "Diagnose again once")


RISE = [(range(S, 1200), "loss", times(2))]


@pytest.mark.parametrize(("step", "told"), [(S - 11, False), (S - 10, True), (S, True), (0, False)])
def test_a_rate_that_jumped_at_the_onset_is_named_first(step: int, told: bool) -> None:
    found = actions(run(*RISE, (range(step, 1200), "lr", times(10)))(0))
    named = f"Look at the learning rate first: it went from 0.0003 to 0.003 at step {step},"
    assert found[0].startswith(named) == told
    warm = changed(healthy(1200), (range(5, 200), "loss", times(2)))
    assert "learning rate first" not in str(actions(warm))


LAYERS: dict[str, tuple[tuple[float, ...], float, str]] = {
    # shares that are not finite from the input on, the loss, and what is said
    "the-last": ((0.0, 0.0, 0.5), 2.0, "1 of 3 layers, the last of them c: the cause is at it or "),
    "down-to-the-input": ((1.0, 0.5, 0.0), 2.0, "2 of 3 layers, the last of them b: the cause is"),
    "all": ((1.0, 1.0, 1.0), 2.0, "all 3 layers, the last of them c: the cause is at it or above"),
    "forward": ((1.0, 1.0, 1.0), math.nan, "all 3 layers, the last of them c, and the loss is not"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_nearest_the_loss_is_named(name: str) -> None:
    shares, loss, said = LAYERS[name]
    records = run(*overflow(S, skipped=False), ([S], "loss", loss))(0)
    rows = tuple(LayerRow(each, nonfinite=share) for each, share in zip("abc", shares, strict=True))
    records[S] = replace(records[S], layers=rows)
    messages = " ".join(one.message for one in diagnose(records).evidence)
    assert f"such elements are in {said}" in messages
