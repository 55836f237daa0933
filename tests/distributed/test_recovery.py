"""Several ranks decide the same, write one checkpoint, and go on identically."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import recovering
from tests.distributed.ranks import Pool

LAYOUTS = ["fsdp", "ddp", "mixed"]
POISON = (1, 7)  # rank 1, batch 7


def shared(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What has to be the same on all ranks."""
    names = ("model", "checkpoints")
    for answer in answers[1:]:
        assert {n: answer[n] for n in names} == {n: answers[0][n] for n in names}
    return answers[0]


def flat(values: Any) -> list[float]:
    """The numbers in dicts and lists."""
    if isinstance(values, dict):
        values = list(values.values())
    return [x for each in values for x in flat(each)] if isinstance(values, list) else [values]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_to_the_bit(ranks: Pool, tmp_path: Path, layout: str, asynchronous: bool) -> None:
    """Stopped in the cut after a rollback; every rank has its own random numbers."""
    run: dict[str, Any] = {"layout": layout, "poison": POISON, "asynchronous": asynchronous}
    whole = ranks.run(2, recovering.trained, str(tmp_path / "whole"), stop=12, **run)
    ranks.run(2, recovering.trained, str(tmp_path / "parts"), stop=8, **run)
    parts = ranks.run(2, recovering.trained, str(tmp_path / "parts"), stop=12, **run)
    assert shared(parts)["model"] == shared(whole)["model"]
    assert [each["random"] for each in parts] == [each["random"] for each in whole]
    assert parts[0]["random"] != parts[1]["random"]
    for answer in (*whole, *parts):
        assert answer["rollbacks"] == [(7, 7, 3, (6, 7))]
        assert answer["skipped"] == [6, 7]


def test_copies_are_stored_once(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, recovering.trained, str(tmp_path), layout="ddp", stop=3)
    names = json.loads((tmp_path / "step-000000003" / "rank-1.json").read_bytes())["names"]
    owners = {name: int(stored.partition(":")[0]) for name, stored in names.items()}
    assert {name for name, owner in owners.items() if owner == 1} == {"random/cpu"}


@pytest.mark.parametrize("guilty", [0, 1], ids=["rank-0", "rank-1"])
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_only_the_batch_of_the_rank_at_fault_is_skipped(
    ranks: Pool, tmp_path: Path, layout: str, guilty: int
) -> None:
    """Its own loss tells which it was. The other rank uses each of its batches once."""
    run: dict[str, Any] = {"layout": layout, "poison": (guilty, 7), "blaming": True}
    answers = ranks.run(2, recovering.trained, str(tmp_path), stop=12, **run)
    shared(answers)
    assert answers[guilty]["skipped"] == [6, 7]
    assert answers[guilty]["rollbacks"] == [(7, 7, 3, (6, 7))]
    assert answers[1 - guilty]["skipped"] == []
    assert answers[1 - guilty]["rollbacks"] == [(7, 7, 3, ())]
    last = [dict(answer["used"]) for answer in answers]
    assert list(last[1 - guilty].values()) == list(range(12))
    assert list(last[guilty].values()) == [*range(6), *range(8, 14)]
    finite = [math.isfinite(x) for x in flat(answers[0]["model"])]
    assert finite
    assert all(finite)


def test_a_rank_that_dies_during_a_save(mortal_ranks: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with pytest.raises(AssertionError, match=r"could not be written to .* are as they were"):
        mortal_ranks.run(
            2, recovering.dying_in_a_save, folder, 12, dying=[1], timeout=5.0, seconds=60
        )
    parts = mortal_ranks.run(2, recovering.trained, folder, layout="fsdp", stop=12)
    assert parts[0]["used"][0] == (3, 3)
    whole = mortal_ranks.run(2, recovering.trained, str(tmp_path / "whole"), layout="fsdp", stop=12)
    assert shared(parts)["model"] == shared(whole)["model"]


def test_an_error_on_one_rank_is_one_on_all(ranks: Pool, tmp_path: Path) -> None:
    answers = ranks.run(2, recovering.failing_to_write, str(tmp_path))
    for said in answers:
        assert len(said) == 2
        for text in said:
            assert "the checkpoint of step 0 could not be written" in text
            assert "No space left on device" in text
    assert [path.name for path in tmp_path.iterdir()] == ["recovery.json"]


def test_what_one_rank_cannot_save_is_an_error_on_all(ranks: Pool, tmp_path: Path) -> None:
    answers = ranks.run(2, recovering.refusing_to_save, str(tmp_path))
    fault = "TypeError: state/monitor/seen is a builtins.set, and a checkpoint holds plain data"
    assert answers[0].startswith(f"RuntimeError: rank 1 failed reading the state: {fault}")
    assert answers[1].startswith(fault)
    assert [path.name for path in tmp_path.iterdir()] == ["recovery.json"]


def test_a_log_that_one_rank_cannot_write(ranks: Pool, tmp_path: Path) -> None:
    answers = ranks.run(2, recovering.failing_to_write_a_record, str(tmp_path), seconds=20)
    said = "OSError: no space left for the log"
    assert answers == [said, f"RuntimeError: rank 0 failed flushing the monitor: {said}"]


@pytest.mark.parametrize("spoil", [False, True], ids=["same", "different"])
def test_a_replay_names_the_rank(ranks: Pool, tmp_path: Path, spoil: bool) -> None:
    answers = ranks.run(2, recovering.replayed, str(tmp_path), spoil)
    for found in answers:
        assert found[:3] == (3, 4, (3, 4))
        assert found[4:] == ((4, 1, "the loss") if spoil else (None, None, None))


def test_another_number_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, recovering.trained, str(tmp_path), layout="fsdp", stop=1)
    with pytest.raises(AssertionError, match="it is of a run on 2 ranks, and here are 3"):
        ranks.run(3, recovering.trained, str(tmp_path), layout="fsdp", stop=2)
