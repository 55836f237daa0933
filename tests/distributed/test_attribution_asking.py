"""Attribution.by_rank: the guilty rank is named, and nobody is left waiting."""

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # re-exported, unmarked

import fastclip
from fastclip.distributed import Attribution, attribution_hook
from fastclip.ranks import RankStats
from tests.distributed.ddp import LAYOUTS, backward, batch, hooked, layers, sgd_steps
from tests.distributed.ranks import Pool

EVENT = 2  # the step of the corrupted batch


def corrupted(guilty: int) -> tuple[list[RankStats], list[RankStats], bool, list[bool]]:
    """Five steps, of which one has a corrupted batch on one rank. What is said of it after the
    event, of the step before it, whether all gradients were NaN then, and what was skipped."""
    model, attribution = hooked(LAYOUTS["bucket-each"])
    clipper = fastclip.GradClipper(model, max_norm=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    skipped, all_nan = [], False
    for step in range(5):
        optimizer.zero_grad()
        inputs = batch(step)
        if step == EVENT and dist.get_rank() == guilty:
            inputs[0] = math.nan
        backward(model, inputs)
        if step == EVENT:
            all_nan = all(
                bool(p.grad.isnan().any()) for p in model.parameters() if p.grad is not None
            )
        skipped.append(bool(clipper.step(optimizer).skipped))
    return attribution.by_rank(EVENT), attribution.by_rank(EVENT - 1), all_nan, skipped


@pytest.mark.parametrize(("size", "guilty"), [(2, 1), (4, 2)])
def test_the_rank_of_a_corrupted_batch_is_named(ranks: Pool, size: int, guilty: int) -> None:
    for event, before, all_nan, skipped in ranks.run(size, corrupted, guilty):
        assert all_nan
        assert skipped == [step == EVENT for step in range(5)]
        assert [each.rank for each in event] == list(range(size))
        assert [each.rank for each in event if each.nonfinite] == [guilty]
        bad = event[guilty]
        assert math.isnan(bad.norm)
        assert bad.nan > 0
        assert set(bad.nonfinite) == {
            f"{layer}.{kind}" for layer in ("first", "rare", "last") for kind in ("weight", "bias")
        }
        innocent = [each for each in event if each.rank != guilty]
        assert all(math.isfinite(each.norm) and each.norm > 0 for each in innocent)
        assert not any(each.nan or each.inf for each in [*innocent, *before])


def answers(steps: list[list[int]], history: int) -> list[list[RankStats] | str]:
    """What this rank is told in answer to its own list of steps, after four of them."""
    model, attribution = hooked({}, history=history)
    for step in sgd_steps(model, 4):
        backward(model, batch(step))
    found: list[list[RankStats] | str] = []
    for step in steps[dist.get_rank()]:
        try:
            found.append(attribution.by_rank(step))
        except (RuntimeError, IndexError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_steps_count_from_the_first_or_from_the_last(ranks: Pool) -> None:
    first, second = ranks.run(2, answers, [[0, 1, 2, 3, -4, -3, -2, -1]] * 2, 16)
    assert first == second
    assert first[:4] == first[4:]
    assert len({each.norm for step in first[:4] for each in step}) == 8


def test_ranks_that_ask_differently_for_one_step_are_answered(ranks: Pool) -> None:
    first, second = ranks.run(2, answers, [[-1], [3]], 16)
    assert [each.rank for each in first[0]] == [0, 1]
    assert first == second


def test_different_steps_are_an_error_on_all_ranks(ranks: Pool) -> None:
    for wrong, right in ranks.run(2, answers, [[-1, 1], [2, 1]], 16):
        assert wrong == "RuntimeError: ranks asked for different steps: 3 by rank 0, 2 by rank 1"
        assert len(right) == 2


def test_a_step_no_longer_kept_is_an_error_on_all_ranks(ranks: Pool) -> None:
    lost = "step 1 is not kept: of 4 so far, 2 to 3 are (history=2)"
    first, second = ranks.run(2, answers, [[1, 1, -5], [1, 3, 4]], 2)
    assert first[:2] == [f"IndexError: {lost}"] * 2
    assert second[:2] == [f"IndexError: {lost}", f"RuntimeError: rank 0 has no answer: {lost}"]
    assert str(first[2]).startswith("IndexError: step -5 is not kept")
    assert str(second[2]).startswith("IndexError: step 4 is not kept")


def asked_too_early() -> list[str]:
    model = layers({})
    attribution = Attribution(model)
    model.register_comm_hook(attribution, attribution_hook)
    with model.no_sync():
        backward(model, batch(0))
    messages = []
    for ask in (attribution.local, attribution.by_rank):
        with pytest.raises(RuntimeError) as error:
            ask()
        messages.append(str(error.value))
    return messages


def test_before_the_first_step_there_is_nothing_to_say(ranks: Pool) -> None:
    for messages in ranks.run(2, asked_too_early):
        assert all(text.startswith("no step has been recorded: ") for text in messages)


class Failing(Attribution):
    """Cannot measure the second step on rank 1."""

    def _measured(self, bucket: GradBucket) -> Any:
        if self.steps == 1 and dist.get_rank() == 1:
            raise TypeError("this cannot be measured")
        return super()._measured(bucket)


def failing() -> tuple[list[str], list[int], bool]:
    """What `local` and `by_rank` say of the step that failed on one rank, who answers for the next
    one, and whether the gradients of that step were those without a hook."""
    model, plain = layers(LAYOUTS["bucket-each"]), layers({})
    attribution = Failing(model)
    model.register_comm_hook(attribution, attribution_hook)
    alike = []
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
            backward(each, batch(step))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        alike.append(all(torch.equal(a.grad, b.grad) for a, b in pairs))  # type: ignore[arg-type]
    said = []
    for ask in (attribution.local, attribution.by_rank):
        try:
            said.append(type(ask(1)).__name__)
        except RuntimeError as error:
            said.append(str(error))
    return said, [each.rank for each in attribution.by_rank(2)], all(alike)


def test_what_one_rank_cannot_measure_is_told_when_asked(ranks: Pool) -> None:
    fault = "step 1 could not be measured: this cannot be measured"
    first, second = ranks.run(2, failing)
    assert first == (["GradStats", f"rank 1 has no answer: {fault}"], [0, 1], True)
    assert second == ([fault, fault], [0, 1], True)


def alone() -> list[RankStats]:
    model, attribution = hooked({})
    backward(model, batch(0))
    return attribution.by_rank()


def test_one_rank_has_one_entry(ranks: Pool) -> None:
    ((only,),) = ranks.run(1, alone)
    assert (only.rank, only.nan, only.inf, len(only.nonfinite)) == (0, 0, 0, 0)
    assert only.norm > only.max_abs > 0


def part_of_the_ranks() -> list[int]:
    """Of a model on ranks 1 and 2 of three."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    model, attribution = hooked({"process_group": group})
    backward(model, batch(0))
    return [each.rank for each in attribution.by_rank()]


def test_ranks_are_those_of_the_whole_job(ranks: Pool) -> None:
    assert ranks.run(3, part_of_the_ranks) == [[], [1, 2], [1, 2]]


def left_alone() -> str:
    model, attribution = hooked({})
    backward(model, batch(0))
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as error:
        attribution.by_rank()
    return str(error.value)


def test_a_rank_that_has_died_is_an_error_and_no_wait(mortal_ranks: Pool) -> None:
    message, _ = mortal_ranks.run(2, left_alone, dying=[1], timeout=5.0)
    assert message.startswith("gathering the gradient statistics of ranks 0, 1 failed: ")
