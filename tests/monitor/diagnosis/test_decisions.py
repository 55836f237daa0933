"""Symptom, boundary and onset of known failures; every row of the table is reached."""

import math
import re
from dataclasses import replace
from functools import cache
from string import Formatter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.monitor import Diagnosis, LayerRow, StepRecord, diagnose, suggest_max_norm
from fastclip.monitor.diagnosis import table
from fastclip.monitor.diagnosis.advice import ADVICE
from fastclip.monitor.diagnosis.gathering import NORMS, SHOWN, Gathering
from tests.monitor.diagnosis.cases import CASES, SINGLE, S, overflow, run
from tests.monitor.making import changed, healthy, times


@cache
def diagnosed(name: str, seed: int = 0) -> Diagnosis:
    return diagnose((CASES | SINGLE)[name].records(seed))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_symptom_boundary_and_onset(name: str, seed: int) -> None:
    case, found = CASES[name], diagnosed(name, seed)
    assert (found.symptom, found.boundary) == (case.symptom, case.boundary)
    assert (found.onset, found.onset_metric) == (case.onset, case.metric)


def test_real_and_long_runs() -> None:
    for name in ("real-run", "many-norms"):
        assert diagnosed(name)[:2] + diagnosed(name)[4:6] == SINGLE[name][1:]
    slow = diagnosed("slow", 1)
    assert "Restore a checkpoint from before the rise" in slow.interventions[0]
    assert (slow.symptom, slow.boundary, slow.onset_metric) == ("sustained", "update", "loss")
    assert slow.onset is not None
    assert 2100 < slow.onset < 2200


def test_every_row_is_reached() -> None:
    """No row, fact or gap is dead: each shows in some log."""
    found = [diagnosed(name) for name in (*CASES, "many-norms")] + [diagnosed("slow", 1)]
    assert {one.symptom for one in found} == {row.name for row in table.SYMPTOMS}
    assert {one.boundary for one in found} == {row.name for row in table.BOUNDARIES}
    assert {fact.fact for one in found for fact in one.evidence} == set(table.FACTS)

    def starts(template: str) -> str:
        return next(iter(Formatter().parse(template)))[0]  # up to the first place

    actions = "\n".join(action for one in found for action in one.interventions)
    checks = "\n".join(check for one in found for check in one.checks)
    gaps = "\n".join(gap for one in found for gap in one.unjudged)
    for row in ADVICE:
        assert starts(row.action) in actions, row.action
        assert starts(row.check) in checks, row.check
    for gap in table.GAPS.values():
        assert starts(gap.what) in gaps, gap.what
        assert not gap.record or starts(gap.record) in checks, gap.record


# What each boundary or symptom has to be answered with, in the words of the playbook.
WORDS = {
    "nan-loss": ("Run the forward pass in BF16", "selective FP32"),
    "gradients-of-a-taken-step": ("loss scaling", "backward operations"),
    "falling-scale": ("loss scaling", "backward operations"),
    "gradient-first": ("Clip: GradClipper(",),
    "sustained": (f"recovery.restore(before={S - 1})", "learning rate (0.0003 at the onset)"),
    "isolated": ("Watch", "nothing disruptive"),
}


@pytest.mark.parametrize("name", WORDS)
def test_interventions_are_matched(name: str) -> None:
    found = diagnosed(name)
    text = " ".join(found.interventions)
    assert [word for word in WORDS[name] if word not in text] == []
    assert len(found.checks) >= len(found.interventions)
    others = {word for other in WORDS if other != name for word in WORDS[other]} - {*WORDS[name]}
    assert [word for word in others if word in text] == []


def test_nothing_to_do_for_a_healthy_run() -> None:
    assert diagnosed("healthy") == Diagnosis("none", "none", (), (), None, None)


def test_every_fact_has_its_records() -> None:
    records = CASES["gradient-first"].records(0)
    found = {one.fact: one for one in diagnosed("gradient-first").evidence}
    first = found[table.GRADIENT_FIRST]
    assert [(one.step, one.metric, one.value) for one in first.records] == [
        (S, "grad_norm", records[S].grad_norm),
        (S + 3, "loss", records[S + 3].loss),
    ]
    assert (first.times, first.first, first.last, first.abandoned) == (1, S, S + 3, False)
    # The band's medians, from the 100 values before.
    assert [round(one.baseline or 0, 1) for one in first.records] == [1.0, 2.2]
    back = found[table.RETURNED]
    worst = max(record.loss or 0 for record in records[S + 3 : S + 9])
    assert (back.records[0].step, back.records[0].value) == (S + 3, worst)
    assert f"inside again at step {S + 9}" in back.message


def test_little_evidence_is_said() -> None:
    for name, missing in (
        ("thirty-records", "30 finite losses"),
        ("loss-alone", "no grad_norm in the log"),
        ("norm-alone-not-finite", "forward or backward cannot be told"),
        ("gradients-of-a-step-maybe-skipped", "were skipped is not in the log"),
        ("a-spike-at-the-end", "left its band at step 1199"),
        ("negative-losses", "losses at or below 0"),
        ("sparse-norms", "grad_norm is in 240 of 1,200 records"),
    ):
        found = diagnosed(name)
        assert missing in " ".join(found.unjudged), name
        (asked,) = [check for check in found.checks if check.startswith("So that the next log can")]
        missed = {*found.unjudged} - {table.GAPS["no scale"].what}  # only a note
        several = range(1, len(missed) + 1) if len(missed) > 1 else []
        assert re.findall(r"\((\d)\) ", asked) == [*map(str, several)], name
        doubt = "A. Symptom: none, but not enough evidence\n" in str(found)
        assert doubt == (found.symptom == "none")
    assert diagnosed("healthy").unjudged == diagnosed("gradient-first").unjudged == ()
    assert str(diagnosed("healthy")).startswith("A. Symptom: none\n")


def test_counts_and_spans() -> None:
    (stuck,) = diagnosed("nan-loss-to-the-end").evidence
    assert (stuck.fact, stuck.times, stuck.first, stuck.last) == (table.STUCK, 400, S, 1199)
    assert len(stuck.records) == 3
    (once,) = diagnosed("gradients-of-a-taken-step").evidence
    assert once.times == 1  # the norm and the count are one record's


def test_no_two_facts_say_the_same_of_the_same_records() -> None:
    """A loss that is not finite to the end, and gradients with and without a finite loss."""
    records = changed(
        CASES["nan-loss-to-the-end"].records(0),
        (range(S - 50, S - 48), "loss", math.nan),
        (range(S - 1, S + 2), "grad_norm", math.inf),
    )
    found = {one.fact: (one.times, one.first, one.last) for one in diagnose(records).evidence}
    expected = {
        table.LOSS_NONFINITE: (402, S - 50, 1199),
        table.STUCK: (400, S, 1199),
        table.BACKWARD_NONFINITE: (1, S - 1, S - 1),
        table.GRADIENT_NONFINITE: (2, S, S + 1),
    }
    assert {fact: where for fact, where in found.items() if "not finite" in fact} == expected


@pytest.mark.parametrize("skipped", [None, False])
def test_a_step_of_which_no_record_says_that_it_was_skipped(skipped: bool | None) -> None:
    found = diagnose(run(*overflow(S, skipped=skipped))(0))
    assert [one.fact for one in found.evidence] == [table.BACKWARD_NONFINITE]
    assert "was not skipped" not in str(found)
    assert ("were skipped is not in the log" in str(found)) == (skipped is None)


def test_a_rollback_is_told() -> None:
    undone, in_vain = diagnosed("rolled-back"), diagnosed("rolled-back-in-vain")
    assert all(one.abandoned for one in undone.evidence)
    assert "attempt 0, which was rolled back" in undone.interventions[0]
    assert {one.fact for one in in_vain.evidence if not one.abandoned} >= {table.SUSTAINED}
    assert "Restore the checkpoint" in in_vain.interventions[0]
    kept = diagnosed("spike-long-before-a-rollback")
    assert not kept.evidence[0].abandoned


def test_advice_is_about_what_was_not_rolled_back() -> None:
    found = diagnosed("rolled-back-and-a-drift-later")
    (action,) = found.interventions
    assert action.startswith("Watch: the loss came back without a restart")
    assert f"(step {S + 249})" in action
    facts = {(one.fact, one.abandoned) for one in found.evidence}
    assert {(table.SUSTAINED, True), (table.DRIFT_BACK, False)} <= facts
    assert "The loss rose and stayed up for a while, and came back later." in str(found)


def test_advice_is_about_another_symptom_of_the_newest_attempt() -> None:
    actions = diagnosed("nan-rolled-back-and-a-rise-later").interventions
    assert actions[0].startswith("What shows nonfinite was rolled back, and the newest attempt, 1,")
    assert f"recovery.restore(before={S + 249})" in actions[1]
    assert "BF16" not in str(actions)


def test_no_span_is_reversed() -> None:
    """Also where the same comes earlier after going back."""
    first = changed(healthy(1200), ([S], "grad_norm", times(40)))
    second = changed(healthy(1200), ([S - 3], "grad_norm", times(40)))
    found = diagnose(first[: S + 1] + second[S - 50 :]).evidence
    assert [(one.fact, one.abandoned, one.times, one.first, one.last) for one in found] == [
        (table.GRADIENT_SPIKE, True, 1, S, S),
        (table.GRADIENT_SPIKE, False, 1, S - 3, S - 3),
    ]
    in_both = changed(first, ([300], "grad_norm", times(40)))
    (one,) = diagnose(in_both[: S + 1] + second[S - 50 :]).evidence
    assert (one.times, one.first, one.last) == (3, 300, S)


@pytest.mark.parametrize("name", ["sustained", "sustained-and-back"])
def test_batches_are_named_as_the_log_names_them(name: str) -> None:
    records = CASES[name].records(0)
    alarm = S + 4  # Sustained takes five values
    for batch, named in (
        (lambda step: step + 7, f"batches {S + 6} to {alarm + 7} (steps {S - 1} to {alarm})"),
        (lambda step: None, f"the batches of steps {S - 1} to {alarm}"),
        (lambda step: [step], f"batches [{S - 1}] to [{alarm}] (steps {S - 1} to {alarm})"),
    ):
        found = diagnose([replace(record, batch=batch(record.step)) for record in records])
        assert named in found.interventions[0]


def test_one_batch_with_a_loss_that_is_not_finite_is_looked_at_first() -> None:
    actions = diagnosed("nan-loss").interventions
    assert actions[0].startswith(f"Look at batch {S} (step {S}) first: the losses before and after")
    assert actions[1].startswith("Run the forward pass in BF16")
    assert "if it runs in fp16: else that does not help" in actions[1]
    assert "range of their format" not in str(diagnosed("nan-loss"))
    several = diagnose(run(([S, S + 9], "loss", math.nan))(0)).interventions[0]
    assert several.startswith(f"Look at batch {S} (step {S}) and 1 more up to step {S + 9} first:")
    for name in ("nan-loss-to-the-end", "nan-in-the-first-record", "nan-val-loss"):
        assert diagnosed(name).interventions[0].startswith("Run the forward pass in BF16"), name


def test_the_layer_and_the_batch_are_named() -> None:
    records = CASES["gradients-of-a-taken-step"].records(0)
    layers = (LayerRow("embed", nonfinite=0.0), LayerRow("blocks.3.attn", nonfinite=0.25))
    records[S] = replace(records[S], layers=layers, batch={"file": "a.txt", "line": 3})
    found = diagnose(records)
    assert found.evidence[0].message.endswith(
        "such elements are in 1 of 2 layers, the last of them blocks.3.attn: the cause is at it or "
        "above it, where the backward pass comes from"
    )
    assert f"batch {{'file': 'a.txt', 'line': 3}} (step {S})" in found.checks[1]


def test_a_validation_loss_is_not_of_the_training_batch() -> None:
    (check,) = diagnosed("nan-val-loss").checks
    assert f"on the validation data of step {S}:" in check


def test_a_loss_that_came_back_needs_no_restart() -> None:
    """Also where it was away for so long that Drift noticed."""
    records = changed(
        healthy(1200), ([S], "grad_norm", times(40)), (range(S + 3, S + 30), "loss", times(2))
    )
    found = diagnose(records)
    assert {table.DRIFT_BACK, table.RETURNED} <= {one.fact for one in found.evidence}
    assert [action.split(":")[0] for action in found.interventions] == ["Clip"]
    away = diagnosed("gradient-first-and-up-for-good").interventions
    assert [action.split(",")[0] for action in away][1:] == ["The loss did not come back"]


@pytest.mark.parametrize("name", ["sustained-and-back", "drift-and-back"])
def test_a_rise_that_came_back_gets_milder_words(name: str) -> None:
    back, away = diagnosed(name), diagnosed("sustained")
    assert (back.symptom, back.boundary) == (away.symptom, away.boundary)
    assert "The loss rose and stayed up for a while, and came back later." in str(back)
    assert "The loss rose and stayed up.\n" in str(away)
    assert [action.split(":")[0] for action in back.interventions] == ["Watch"]
    assert not re.search("halve|[Rr]estore", str(back.interventions))
    assert table.LEVEL not in {one.fact for one in back.evidence}


def test_how_soon_a_rise_has_come_back() -> None:
    """After 10 losses that are in order, as an excursion ends; never where it was rolled back."""
    records = CASES["sustained-and-back"].records(0)
    for end, fact in ((S + 17, table.SUSTAINED), (S + 18, table.SUSTAINED_BACK)):
        assert fact in {one.fact for one in diagnose(records[:end]).evidence}
    rolled_back = diagnosed("rolled-back")
    assert table.SUSTAINED in {one.fact for one in rolled_back.evidence}
    assert "The loss rose and stayed up.\n" in str(rolled_back)


def test_a_level_that_was_left_again_asks_for_no_restart() -> None:
    """Where the gradient was first, too."""
    for changes in ([], [([S - 1], "grad_norm", times(40))]):
        found = diagnose(run((range(S, S + 150), "loss", times(2)), *changes)(0))
        assert table.LEVEL in {one.fact for one in found.evidence}
        assert found.symptom == ("gradient" if changes else "sustained")
        assert "recovery.restore" not in str(found.interventions)


def test_the_threshold_is_that_of_the_healthy_part() -> None:
    found = diagnosed("many-norms")
    norms = [record.grad_norm for record in healthy(2500)]
    expected = f"max_norm={suggest_max_norm(norms).max_norm:.4g})"
    assert expected in found.interventions[0]
    assert "2,500 norms before the onset" in found.interventions[0]
    few = diagnosed("gradient-first")
    assert "800 norms before the onset; 1,000 are needed" in few.interventions[0]
    doubled = [
        replace(r, grad_norm=(r.grad_norm or 0) * (3 if r.step < 1250 else 1))
        for r in SINGLE["many-norms"].records(0)
    ]
    assert "their median changed by a factor of 0.329" in diagnose(doubled).interventions[0]


def test_what_is_kept_is_bounded() -> None:
    gathering = Gathering()
    records = healthy(4000)
    for step in range(12_000):
        gathering.add(replace(records[step % 4000], step=step, loss=math.nan))
    (lost,) = gathering.evidence().values()
    assert (lost.fact, lost.times, len(lost.records)) == (table.STUCK, 12_000, SHOWN)
    assert gathering.norms == []  # no step is outside the excursion
    for step in range(12_000, 24_000):
        gathering.add(replace(records[step % 4000], step=step, loss=2.0))
    assert len(gathering.norms) == NORMS


UNRELATED = ("lr", "clip_coef", "clipped", "val_loss", "param_norm", "batch", "layers")


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["gradient-first", "sustained", "isolated", "healthy", "nan-loss"]),
    metric=st.sampled_from(UNRELATED),
    steps=st.sets(st.integers(0, 1199), max_size=300),
)
def test_missing_values_of_other_metrics_change_nothing(
    name: str, metric: str, steps: set[int]
) -> None:
    records = CASES[name].records(0)
    change: dict[str, Any] = {metric: None}
    for step in steps:
        records[step] = replace(records[step], **change)
    found, whole = diagnose(records), diagnosed(name)
    assert found[:2] + found[4:6] == whole[:2] + whole[4:6]


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["gradient-first", "sustained", "isolated", "healthy", "nan-loss"]),
    metric=st.sampled_from(["lr", "clip_coef", "loss_scale", "activation_max", "update_ratio"]),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
    steps=st.sets(st.integers(0, 1199), max_size=20),
)
def test_nonfinite_values_of_other_metrics_decide_nothing(
    name: str, metric: str, value: float, steps: set[int]
) -> None:
    records = CASES[name].records(0)
    change: dict[str, Any] = {metric: value}
    for step in steps:
        records[step] = replace(records[step], **change)
    found, whole = diagnose(records), diagnosed(name)
    assert found[:2] == whole[:2]
    assert [one.fact for one in found.evidence if one.fact != table.OTHER_NONFINITE] == [
        one.fact for one in whole.evidence
    ]


@pytest.mark.parametrize("records", [[], iter(())], ids=["list", "iterator"])
def test_no_records(records: list[StepRecord]) -> None:
    with pytest.raises(ValueError, match="there are no records to diagnose"):
        diagnose(records)
    with pytest.raises(ValueError, match="there are no records in the baseline"):
        diagnose(healthy(5), records)


def test_a_missing_file(tmp_path: object) -> None:
    with pytest.raises(FileNotFoundError):
        diagnose(f"{tmp_path}/none.jsonl")
