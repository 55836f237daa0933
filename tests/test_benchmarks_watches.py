"""The benchmark of watches: it runs, says what each side cost, and refuses sides that lie."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import watches


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_rows_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "watches.csv"
    assert watches.main(["--quick", "--threads", "1", "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    assert len(rows) == 3 * len(tasks) == 12
    for row in rows:
        assert 0 < float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
        assert int(row["rounds"]) == watches.QUICK.rounds
        if row["side"] == watches.PLAIN:
            assert float(row["over_plain"]) == 1
    assert all(task in capsys.readouterr().out for task in tasks[:1])


def test_hooks_are_there_for_their_own_side_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for side in watches.Forward(model, torch.ones(1, 2)).sides():
        if side.before is not None:
            side.before()
        assert (len(model[0]._forward_hooks) == 1) == (side.name != watches.PLAIN)
        taken = side.run()
        assert side.name == watches.PLAIN or bool(taken) == (side.name == watches.ON)
        if side.check is not None:
            side.check(taken)
            with pytest.raises(RuntimeError, match="the watch took"):
                side.check({"a": torch.ones(()), "b": torch.ones(())})
        assert not model[0]._forward_hooks


def test_a_watch_that_sees_no_update_is_an_error() -> None:
    on = watches.steps(nn.Linear(2, 2))[-1]
    assert on.check is not None
    on.check(on.run())
    with pytest.raises(KeyError):  # nothing was measured since
        on.check(None)
