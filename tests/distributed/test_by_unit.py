"""AGC on DTensors is that of the whole tensors, whatever the processes have of a unit."""

import math
from typing import Any

import pytest
import torch

from tests import reference_rules as reference
from tests.distributed import by_unit
from tests.distributed.by_unit import FACTOR, Clipped
from tests.distributed.ranks import Pool

LAYOUTS = [
    *(("fsdp", 2), ("fsdp", 4), ("fsdp-cpu-offload", 2), ("fsdp-x-tensor", 4), ("hsdp", 4)),
    *(("several-meshes", 4), ("by-unit", 2), ("by-unit", 4)),
]


def assert_as_whole(got: Clipped, scale: float = 1.0) -> None:
    """Asserts that each unit has been clipped as the reference does it, with the whole tensors."""
    rule = reference.AGC(FACTOR)
    for row, (name, value) in enumerate(got.values.items()):
        grad = got.before[name].double() / scale
        decided = rule.decide(value.double(), grad)
        coefs = torch.tensor([coef for coef, _ in decided], dtype=torch.float64)
        expected = grad * (coefs.view(-1, *[1] * (grad.dim() - 1)) if grad.dim() > 1 else coefs[0])
        torch.testing.assert_close(
            {name: got.after[name].double()}, {name: expected}, rtol=3e-7, atol=0.0
        )
        least = min(coefs.tolist(), default=1.0)
        threshold = min((limit for _, limit in decided), default=math.inf)
        assert got.coef[row] == pytest.approx(least, rel=1e-6), name
        assert got.threshold[row] == pytest.approx(threshold, rel=1e-6), name


@pytest.mark.parametrize(("layout", "size"), LAYOUTS, ids=lambda value: str(value))
def test_units_of_whole_tensors(ranks: Pool, layout: str, size: int) -> None:
    answers = ranks.run(size, by_unit.clipped, layout, size)
    for answer in answers:
        assert_as_whole(answer)
        assert answer.coef == answers[0].coef
        assert answer.threshold == answers[0].threshold
    assert any(answer.written for answer in answers)
    assert 1.0 in answers[0].coef or layout != "by-unit"


def test_under_a_loss_scale(ranks: Pool) -> None:
    for answer in ranks.run(4, by_unit.clipped, "by-unit", 4, scale=4.0):
        assert_as_whole(answer, 4.0)


@pytest.mark.parametrize("lacking", [[1], [0, 2, 3], [0, 1, 2, 3]], ids=str)
def test_gradients_that_some_ranks_lack(ranks: Pool, lacking: list[int]) -> None:
    """What they lack is zeros to the others; the parameters are whole all the same."""
    answers = ranks.run(4, by_unit.absent, 4, lacking)
    rule = reference.AGC(FACTOR)
    for rank, (whole, grads, after, coef, threshold, skipped) in enumerate(answers):
        for grad in grads[:2]:
            for other in lacking:
                grad[2 * other : 2 * other + 2] = 0
        assert not skipped
        for row, (value, grad) in enumerate(zip(whole.values(), grads, strict=True)):
            if row < 2 and len(lacking) == 4:
                assert (after[row], coef[row], threshold[row]) == (None, 1.0, math.inf)
                continue
            decided = rule.decide(value, grad)
            of_those_there = [
                each for unit, each in enumerate(decided) if row != 1 or unit // 2 not in lacking
            ]
            assert coef[row] == pytest.approx(min(each for each, _ in of_those_there), rel=1e-6)
            least = min(each for _, each in of_those_there)
            assert threshold[row] == pytest.approx(least, rel=1e-6)
            if after[row] is None:
                assert rank in lacking
                continue
            coefs = torch.tensor([each for each, _ in decided])
            expected = grad * (coefs[:, None] if grad.dim() > 1 else coefs)
            own = expected.chunk(4, 1 if row == 2 else 0)[rank]
            torch.testing.assert_close(after[row], own, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize("kind", ["partial", "placed-otherwise"])
def test_gradients_not_placed_as_their_parameter_are_refused(ranks: Pool, kind: str) -> None:
    for message, kept in ranks.run(2, by_unit.refused, kind, 0):
        assert message.startswith("gradient 'w' is a DTensor with placements (")
        assert "laid out alike" in message
        assert kept


def test_one_rank_refuses_and_the_others_skip(ranks: Pool) -> None:
    answers = ranks.run(4, by_unit.refused, "expanded", 2, seconds=20)
    assert "is stored in shape (1, 1) for a parameter of shape (2, 3)" in answers[2][0]
    assert [message for message, _ in answers if message] == [answers[2][0]]
    assert all(kept for _, kept in answers)


def test_a_rule_that_does_not_ask_for_whole_units_must_not_give_units(ranks: Pool) -> None:
    for message, _, _ in ranks.run(2, by_unit.halved, False, 0.5, "skip"):
        assert message.startswith("Halving gave units of DTensors")


def test_units_are_for_rules_per_tensor(ranks: Pool) -> None:
    assert ranks.run(2, by_unit.halved_as_one) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("factor", "nonfinite", "expected"),
    [
        (0.25, "skip", ("", [0.25], False)),
        (math.inf, "skip", ("", [1.0], True)),
        (math.nan, "skip", ("", [1.0], True)),
        (math.inf, "error", ("Halving gave a coefficient that is not finite", [], False)),
    ],
    ids=["smallest", "inf", "nan", "inf-error"],
)
def test_what_one_rank_decides_all_hear_of(
    ranks: Pool, factor: float, nonfinite: str, expected: Any
) -> None:
    for message, coef, skipped in ranks.run(4, by_unit.halved, True, factor, nonfinite):
        assert message.startswith(expected[0])
        assert (message == "", coef, skipped) == (expected[0] == "", *expected[1:])


@pytest.mark.parametrize("nonfinite", ["skip", "error", "zero", "propagate"])
def test_a_nan_in_a_part_of_a_unit(ranks: Pool, nonfinite: str) -> None:
    for value, grad, after, said in ranks.run(4, by_unit.spoiled, nonfinite):
        bad = grad.clone()
        bad[1, 2] = math.nan
        if nonfinite in ("skip", "error"):
            torch.testing.assert_close(after, bad, rtol=0.0, atol=0.0, equal_nan=True)
            assert said is True or "on rank 1" in said
            continue
        clean = bad.nan_to_num(0.0)
        coefs = torch.tensor([coef for coef, _ in reference.AGC(FACTOR).decide(value, clean)])
        expected = clean * coefs[:, None]
        if nonfinite == "propagate":
            expected[1] = math.nan
        torch.testing.assert_close(after, expected, rtol=3e-7, atol=0.0, equal_nan=True)


def test_units_that_one_process_has_whole_are_not_sent(ranks: Pool) -> None:
    """The table, and the smallest of what each has decided; of units that are divided one sum."""
    table, reduced = "c10d::_allgather_base_", "c10d::allreduce_"
    for operators, elements in ranks.run(2, by_unit.sent, "whole-units"):
        assert operators == [table, reduced]
        assert elements == [2 * 20]
    for operators, elements in ranks.run(2, by_unit.sent, "vectors"):
        assert operators == [table, reduced, reduced]
        assert elements == [2 * 20, 2 * 20]
