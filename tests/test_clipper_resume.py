"""A run that was saved and loaded goes on bitwise as the one that was not interrupted."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastclip import GradClipper
from tests import training
from tests.resuming import GRADIENTS, HALF, RUNS, STEPS, Run

ROOT = Path(__file__).parent.parent
IDS = [f"{rule}-{policy}" for rule, policy in RUNS]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs saved half way, and taken to their end by a new process."""
    folder = tmp_path_factory.mktemp("resume")
    halves = {}
    for rule, policy in RUNS:
        run = Run(rule, policy)
        run.advance(0, HALF)
        halves[f"{rule}-{policy}"] = run.save()
    torch.save(halves, folder / "half.pt")
    files = [str(folder / name) for name in ("half.pt", "whole.pt")]
    command = [sys.executable, "-m", "tests.resuming", *files]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = torch.load(folder / "whole.pt", weights_only=True)
    return loaded


@pytest.mark.parametrize(("rule", "policy"), RUNS, ids=IDS)
def test_in_a_new_process(finished: dict[str, Any], rule: str, policy: str) -> None:
    """Thresholds, coefficients, counters, state, parameters and moments."""
    run = Run(rule, policy)
    run.advance(0, STEPS)
    expected = run.save()
    expected["decided"] = expected["decided"][HALF:]
    training.same(finished[f"{rule}-{policy}"], expected)
    assert training.counted(run.clipper)[0] == STEPS
    assert training.counted(run.clipper)[2] == (4 if policy == "skip" else 0)


@pytest.mark.parametrize("half", [0, 1, 4, 18, 30])
@pytest.mark.parametrize("rule", training.RULES)
def test_at_any_step(rule: str, half: int) -> None:
    """Before the first step, in warm-up, right after a skip: consecutive skips go on too."""
    run, whole = Run(rule, "skip"), Run(rule, "skip")
    run.advance(0, half)
    again = Run(rule, "skip")
    again.load(run.save())
    again.advance(half, half + 15)
    whole.advance(0, half + 15)
    training.same(
        again.save() | {"decided": again.decided}, whole.save() | {"decided": whole.decided[half:]}
    )


@pytest.mark.parametrize("rule", training.RULES)
def test_saving_and_loading_share_nothing(rule: str) -> None:
    """What was saved stays as it was, whatever the clippers that it came from and went to do."""
    run = Run(rule, "skip")
    run.advance(0, 12)
    saved = run.clipper.state_dict()
    before = training.snapshot(saved)
    again, other = Run(rule, "skip"), Run(rule, "skip")
    again.clipper.load_state_dict(saved)
    other.clipper.load_state_dict(saved)
    run.advance(12, 24)
    again.advance(12, 18)
    training.same(saved, before)
    training.same(other.clipper.state_dict(), before)


def test_loading_goes_back() -> None:
    """A rollback: the clipper had gone on, and repeats what it did."""
    run = Run("AdaGC", "skip")
    run.advance(0, 12)
    saved = run.save()
    run.advance(12, 24)
    first = training.snapshot(run.decided[12:])
    run.load(saved)
    run.advance(12, 24)
    training.same(run.decided[24:], first)


def clipper_of(names: list[str], rule: str) -> tuple[GradClipper, training.Parameters]:
    values = training.parameters()
    params = {name: values.get(name, nn.Parameter(torch.ones(3))) for name in names}
    return training.clipper(params, rule), params


def decide(clipper: GradClipper, params: training.Parameters, first: int, last: int) -> list[Any]:
    made = []
    for step in range(first, last):
        grads = {name: GRADIENTS[step].get(name, torch.full((3,), 0.1)) for name in params}
        training.assign(params, grads)
        stats = clipper.clip_()
        if stats.coef.dim():
            made.append(
                dict(zip(stats.names, zip(stats.coef, stats.threshold, strict=True), strict=True))
            )
        else:
            made.append({"": (stats.coef, stats.threshold)})
    return made


@pytest.mark.parametrize("rule", training.RULES)
def test_another_order_of_parameters(rule: str) -> None:
    """The state of a tensor is its name's. A sum in another order may round differently."""
    names = list(training.SHAPES)
    straight, reversed_ = clipper_of(names, rule), clipper_of(names[::-1], rule)
    decide(*straight, 0, 20)
    reversed_[0].load_state_dict(straight[0].state_dict())
    expected, found = decide(*straight, 20, 32), decide(*reversed_, 20, 32)
    for step, (want, got) in enumerate(zip(expected, found, strict=True)):
        for name, pair in want.items():
            torch.testing.assert_close(got[name], pair, rtol=1e-6, atol=0, msg=f"{name} at {step}")
    assert training.counted(reversed_[0]) == training.counted(straight[0])


def test_names_missing_from_the_saved_state_start_fresh() -> None:
    """The others go on; the new one has a warm-up of its own, under the global threshold."""
    names = list(training.SHAPES)
    old, new = clipper_of(names, "AdaGC"), clipper_of(["new", *names], "AdaGC")
    decide(*old, 0, 20)
    new[0].load_state_dict(old[0].state_dict())
    max_norm, warmup = training.RULES["AdaGC"]["max_norm"], training.RULES["AdaGC"]["warmup"]
    for step, found in enumerate(decide(*new, 20, 32)):
        (expected,) = decide(*old, 20 + step, 21 + step)
        for name in names:
            training.same(found[name], expected[name], when=name)
        assert (found["new"][1].item() == max_norm) == (step < warmup)


def test_names_that_are_gone_are_named_in_a_warning() -> None:
    names = list(training.SHAPES)
    old, new = (
        clipper_of(["gone.first", *names, "gone.second"], "AdaGC"),
        clipper_of(names, "AdaGC"),
    )
    decide(*old, 0, 20)
    with pytest.warns(UserWarning, match=r"gone\.first.*gone\.second") as warned:
        new[0].load_state_dict(old[0].state_dict())
    assert len(warned) == 1
    assert "layer" not in str(warned[0].message)
    assert str(warned[0].message).endswith("gone.second. What it says of them is dropped")
    for want, got in zip(decide(*old, 20, 26), decide(*new, 20, 26), strict=True):
        for name in names:
            training.same(got[name], want[name], when=name)


@pytest.mark.parametrize("rule", training.ONE_COEFFICIENT)
def test_a_rule_without_tensors_of_its_own_warns_of_no_names(rule: str) -> None:
    names = list(training.SHAPES)
    old, new = clipper_of([*names, "gone"], rule), clipper_of(names, rule)
    decide(*old, 0, 8)
    new[0].load_state_dict(old[0].state_dict())
    training.same(new[0].state_dict(), old[0].state_dict())


@pytest.mark.parametrize("rule", ["MaxNorm", "AdaGC", "LogZ"])
def test_the_state_of_another_rule_is_refused(rule: str) -> None:
    run, other = Run("ZClip", "skip"), Run(rule, "skip")
    run.advance(0, 12)
    other.advance(0, 12)
    before = training.snapshot(other.clipper.state_dict())
    with pytest.raises((ValueError, RuntimeError), match=rf"(?s)(ZClip.*{rule}|{rule}.*ZClip)"):
        other.clipper.load_state_dict(run.clipper.state_dict())
    training.same(other.clipper.state_dict(), before)


def test_unnamed_parameters_go_by_their_places() -> None:
    values = training.parameters()
    old, new = (GradClipper(list(values.values()), rule=training.rule("AdaGC")) for _ in "ab")
    decide(old, values, 0, 12)
    new.load_state_dict(old.state_dict())
    training.same(decide(new, values, 12, 20), decide(old, values, 12, 20))
