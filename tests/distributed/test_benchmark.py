"""The benchmark of distributed clipping: what it counts, and that a small run works."""

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import distributed
from benchmarks.distributed import QUICK, Traffic, contests, norms, traffic
from fastclip.benchmarking.contest import OURS
from tests.distributed.ranks import Pool


def counted() -> list[Traffic]:
    """Of a call without collectives, of two all-reduces, and of an all-gather."""
    five, half = torch.ones(5), torch.ones(3, dtype=torch.float16)
    many = [torch.empty(2, 3, dtype=torch.float64) for _ in range(dist.get_world_size())]

    def reduced() -> None:
        dist.all_reduce(five)
        dist.all_reduce(half)

    gathered = partial(dist.all_gather, many, torch.zeros(2, 3, dtype=torch.float64))
    return [traffic(call) for call in (five.sum, reduced, gathered)]


def test_collectives_and_their_bytes_are_counted(ranks: Pool) -> None:
    assert ranks.run(2, counted) == [[(0, 0), (2, 5 * 4 + 3 * 2), (1, 6 * 8)]] * 2


def sent_for_norms() -> dict[str, Traffic]:
    """In another call than the first, in which ranks agree on the list."""
    sides = norms(QUICK.small, 2)
    for side in sides:
        side.run()
    return {side.name: traffic(side.run) for side in sides}


def test_the_norm_is_one_collective_of_a_table(ranks: Pool) -> None:
    for sent in ranks.run(2, sent_for_norms):
        assert sent[OURS] == (1, 48 * (len(QUICK.small) + 3))
        assert sent["torch"].collectives >= 1


def test_a_small_run_writes_a_row_for_each_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")  # as main sets it: restored afterwards
    path = tmp_path / "rows.csv"
    assert distributed.main(["--quick", "--ranks", "2", "--csv", str(path)]) == 0
    names = [pair.name for pairs, _ in contests(QUICK, 2) for pair in pairs]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == names
    assert all(float(row["ratio"]) > 0 and row["ranks"] == "2" for row in rows)
    assert all(row[key] for row in rows for key in ("commit", "cpu", "torch", "python", "backend"))
    printed = capsys.readouterr().out
    assert all(pair.title in printed for pairs, _ in contests(QUICK, 2) for pair in pairs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--check", "--quick"], "--check judges the full sizes"),
        (["--csv", "/nowhere/rows.csv"], "does not exist"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        distributed.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
