"""Counters, and a rule's state by parameter name."""

from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fastclip.memory import Counters, Remembered
from fastclip.rules import AGC, AdaGC, AutoClip, MaxNorm, State, ZClip
from tests.making import floats

CPU = torch.device("cpu")
TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def adagc() -> Remembered:
    return Remembered(AdaGC())


def seen(remembered: Remembered, *names: str) -> list[float]:
    return remembered.rows(names, CPU)["gamma"].tolist()


def step(remembered: Remembered, **norms: float) -> None:
    """Remember these norms as gamma, and count."""
    state = remembered.rows(tuple(norms), CPU)
    gamma = torch.tensor(list(norms.values()), dtype=torch.float64)
    remembered.keep({"gamma": gamma, "count": state["count"] + 1})


def test_rows_follow_their_names() -> None:
    remembered = adagc()
    step(remembered, a=1.0, b=2.0, c=3.0)
    assert seen(remembered, "c", "a") == [3.0, 1.0]
    step(remembered, c=30.0, d=4.0, a=10.0)
    assert seen(remembered, "a", "b", "c", "d") == [10.0, 2.0, 30.0, 4.0]
    counts = remembered.rows(("a", "b", "c", "d"), CPU)["count"]
    assert counts.tolist() == [2, 1, 2, 1]
    step(remembered, b=20.0)
    assert seen(remembered, "d", "c", "b", "a") == [4.0, 30.0, 20.0, 10.0]


def test_a_name_without_a_row_gets_a_new_one() -> None:
    remembered = adagc()
    step(remembered, a=1.0)
    assert seen(remembered, "new", "a") == [0.0, 1.0]


def test_what_is_not_kept_leaves_no_trace() -> None:
    remembered = adagc()
    step(remembered, a=1.0, b=2.0)
    trial = copy(remembered)
    step(trial, b=5.0, c=6.0)
    assert list(remembered.dump()) == ["a", "b"]
    assert seen(remembered, "a", "b") == [1.0, 2.0]
    step(remembered, c=7.0, a=8.0)
    assert seen(remembered, "a", "b", "c") == [8.0, 2.0, 7.0]


def test_states_that_were_given_out_do_not_change() -> None:
    remembered = adagc()
    step(remembered, a=1.0, b=2.0)
    before, dumped = remembered.rows(("a", "b"), CPU), remembered.dump()
    step(remembered, b=5.0)
    assert before["gamma"].tolist() == [1.0, 2.0]
    assert dumped["b"]["gamma"].item() == 2.0


def test_a_rule_of_one_coefficient_has_one_state() -> None:
    remembered = Remembered(ZClip())
    first = remembered.rows(("a", "b"), CPU)
    assert {key: tuple(part.shape) for key, part in first.items()} == {
        "mean": (),
        "var": (),
        "count": (),
    }
    remembered.keep(first | {"mean": torch.tensor(3.0, dtype=torch.float64)})
    assert remembered.rows(("other",), CPU)["mean"].item() == 3.0
    assert remembered.dump()["mean"].item() == 3.0


@pytest.mark.parametrize("rule", [MaxNorm(1.0), AGC()], ids=["MaxNorm", "AGC"])
def test_rules_without_a_state(rule: Any) -> None:
    remembered = Remembered(rule)
    remembered.keep(remembered.rows(("a",), CPU))
    assert remembered.dump() == {}
    assert remembered.load({}, ["a"]) == []


def test_what_is_saved_is_loaded() -> None:
    remembered, again = adagc(), adagc()
    step(remembered, a=1.0, b=2.0, c=3.0)
    saved = remembered.dump()
    assert again.load(saved, ["c", "b", "x"]) == ["a"]
    assert seen(again, "x", "a", "b", "c") == [0.0, 0.0, 2.0, 3.0]
    assert all(part._base is None for part in saved["a"].values())  # not views of all rows


def test_loading_takes_copies() -> None:
    for rule, saved in (
        (AutoClip(window=2), {"norms": torch.zeros(2, dtype=torch.float64), "count": count(0)}),
        (AdaGC(), {"a": {"gamma": torch.zeros((), dtype=torch.float64), "count": count(0)}}),
    ):
        remembered = Remembered(rule)
        remembered.load(saved, ["a"])
        before = remembered.dump()
        for part in saved.values():
            for tensor in part.values() if isinstance(part, dict) else (part,):
                tensor += 1
        assert str(remembered.dump()) == str(before)


def count(number: int) -> Tensor:
    return torch.tensor(number)


def test_an_empty_state_starts_afresh() -> None:
    remembered = adagc()
    step(remembered, a=1.0)
    assert remembered.load(adagc().dump(), ["a"]) == []
    assert seen(remembered, "a") == [0.0]


WRONG: dict[str, tuple[Any, State | dict[str, State], str]] = {
    "other-window": (AutoClip(window=3), Remembered(AutoClip(window=2)).rows((), CPU), "shape"),
    "missing-part": (ZClip(), {"mean": floats(0.0)}, "where ZClip has count"),
    "other-dtype": (
        AdaGC(),
        {"a": {"gamma": torch.tensor(1.0), "count": count(1)}},
        r"the state of 'a' has count \(torch.int64, shape \(\)\), gamma \(torch.float32",
    ),
}


@pytest.mark.parametrize(("rule", "saved", "message"), WRONG.values(), ids=WRONG.keys())
def test_another_rules_state_is_refused(rule: Any, saved: Any, message: str) -> None:
    remembered = Remembered(rule)
    remembered.keep(remembered.rows(("a",), CPU))
    before = str(remembered.dump())
    with pytest.raises(ValueError, match=message):
        remembered.load(saved, ["a"])
    assert str(remembered.dump()) == before


def counted(counters: Counters) -> list[int]:
    read = counters.read()
    assert list(read) == ["steps", "clipped", "skipped", "consecutive_skips"]
    assert {(c.dtype, c.shape) for c in read.values()} == {(torch.int64, ())}
    return [int(c) for c in read.values()]


def test_counters() -> None:
    counters = Counters()
    assert counted(counters) == [0, 0, 0, 0]
    for clipped, skipped in ((TRUE, FALSE), (FALSE, TRUE), (FALSE, TRUE)):
        counters.count(clipped, skipped)
    assert counted(counters) == [3, 1, 2, 2]
    before = counters.read()
    counters.count(FALSE, FALSE)
    assert counted(counters) == [4, 1, 2, 0]
    assert before["consecutive_skips"].item() == 2
    again = Counters()
    again.load(before)
    again.count(TRUE, FALSE)
    assert counted(again) == [4, 2, 2, 0]
    assert [int(c) for c in before.values()] == [3, 1, 2, 2]
