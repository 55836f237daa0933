"""The tables of several processes into one, in one process."""

import math
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from fastclip import table as tables
from fastclip.backends.reference import measure
from fastclip.distributed import combine as combining
from fastclip.distributed.combine import Gathered, combine, pack
from fastclip.ranks import Contributions, RankStats, rank_stats, said

ORDERS = [0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf, -1.0]
NAN, INF = math.nan, math.inf


def table_of(*gradients: list[float], p: float) -> Tensor:
    return measure([torch.tensor(each, dtype=torch.float64) for each in gradients], p, None)


def combined(held: list[list[list[float]]], counted: list[list[bool]], p: float) -> Tensor:
    """Of what each process holds: for each its gradients."""
    every = torch.stack([table_of(*gradients, p=p) for gradients in held])
    return combine(every, torch.tensor(counted), p)


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0, equal_nan=True)


@pytest.mark.parametrize("p", ORDERS)
def test_shards_are_the_whole(p: float) -> None:
    got = combined(
        [[[1.0, -2.0], [0.0]], [[3.0], []], [[], [5.0, 0.0, -7.0]]], [[True, True]] * 3, p
    )
    assert_same(got, table_of([1.0, -2.0, 3.0], [0.0, 5.0, 0.0, -7.0], p=p))


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_shards_that_are_not_finite(p: float, bad: float) -> None:
    got = combined([[[1.0, 0.0]], [[bad, 3.0]]], [[True], [True]], p)
    assert_same(got, table_of([1.0, 0.0, bad, 3.0], p=p))


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("values", [[1.0, 0.0, 4.0], [1.0, NAN, INF]], ids=["finite", "bad"])
def test_replicas_count_once(p: float, values: list[float]) -> None:
    got = combined([[values]] * 3, [[False], [True], [False]], p)
    assert_same(got, table_of(values, p=p))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_bad_replica_is_seen(p: float, bad: float) -> None:
    """It is counted once, and makes the norm not finite."""
    row = combined([[[1.0, 2.0]], [[1.0, bad]], [[1.0, bad]]], [[True], [False], [False]], p)[0]
    assert_same(row[tables.POWER], torch.tensor(bad, dtype=torch.float64))
    counts = row[[tables.NAN, tables.INF]].tolist()
    assert counts == ([1, 0] if math.isnan(bad) else [0, 1])
    assert row[tables.MAX_ABS] == 2


def test_a_bad_replica_of_the_smallest_magnitude() -> None:
    row = combined([[[1.0, 2.0]], [[1.0, NAN]]], [[True], [False]], -math.inf)[0]
    assert row.tolist()[1:] == [2, 1, 0, 0]
    assert row[tables.POWER].isnan()


def test_shards_of_replicas() -> None:
    """Two by two processes: a NaN in one shard's replica beside one that is counted."""
    held = [[[1.0, NAN]], [[2.0, 0.0]], [[1.0, 1.0]], [[NAN, NAN]]]
    row = combined(held, [[True], [True], [False], [False]], 2.0)[0]
    assert row[[tables.NAN, tables.INF, tables.ZERO]].tolist() == [2, 0, 1]


def test_no_rows() -> None:
    got = combine(torch.zeros(2, 0, 5, dtype=torch.float64), torch.ones(2, 0, dtype=torch.bool), 2)
    assert got.shape == (0, 5)


def gathered(*packed: Tensor) -> Gathered:
    every = torch.stack(packed)
    rows, header = every[:, combining.HEADER :], every[:, : combining.HEADER, tables.COLUMNS]
    ranks = tuple(range(4, 4 + len(packed)))
    return Gathered(ranks, rows[..., : tables.COLUMNS], rows[..., tables.COLUMNS], header)


def test_packed_and_gathered() -> None:
    first, second = table_of([1.0], [2.0], [], p=2.0), table_of([3.0], [], [], p=2.0)
    both = combining.PRESENT | combining.COUNTED
    got = gathered(
        pack(first, [both, combining.PRESENT, 0], 7), pack(second, [both, combining.COUNTED, 0], 7)
    )
    assert got.tables.equal(torch.stack([first, second]))
    weights = got.weights()
    assert weights.counted.tolist() == [[True, False, False], [True, True, False]]
    assert weights.present.tolist() == [True, True, False]
    assert not weights.all_count
    assert got.known_failed() == []
    got.settle("unused")


def test_of_several_sets_the_lowest_that_has_a_gradient_counts() -> None:
    """Ranks 0, 2 and 1, 3 hold shards of one tensor each; of another only the second two."""
    both = combining.PRESENT | combining.COUNTED
    first, second = (both + combining.OWNER * (1 + lowest) for lowest in (0, 1))
    table = tables.empty(2.0, 2, torch.device("cpu"))
    flags = [[first, 0], [second, second], [first, 0], [second, second]]
    got = gathered(*(pack(table, each, 7) for each in flags))
    weights = got.weights()
    assert weights.counted.T.tolist() == [[True, False, True, False], [False, True, False, True]]
    assert weights.present.tolist() == [True, True]


def test_a_rank_that_failed_is_named() -> None:
    table = tables.empty(2.0, 1, torch.device("cpu"))
    got = gathered(pack(table, [0], 7), pack(table, [0], 7, failed=0))
    assert got.known_failed() == [0]
    with pytest.raises(RuntimeError, match=r"^rank 0 could not measure its gradients"):
        got.settle("unused")


def test_different_rows_are_named() -> None:
    table = tables.empty(2.0, 1, torch.device("cpu"))
    checksums = [combining.checksum_of(names) for names in (["ab", "c"], ["ab", "c"], ["a", "bc"])]
    assert all(0 <= checksum < 2**53 for checksum in checksums)
    got = gathered(*(pack(table, [0], checksum) for checksum in checksums))
    with pytest.raises(RuntimeError, match=r"^names differ, but rank 6 has others than rank 4\."):
        got.settle("names differ")


class Elsewhere(Tensor):
    """As if on a device that the host would have to wait for."""

    device = torch.device("cuda")


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("wrong", ["failed", "different", None])
def test_where_a_header_comes_late_the_norms_are_unknown(
    wrong: str | None, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm without a rank's part must not clip, whoever looks at the counts of NaN or not."""
    both, checksum = combining.PRESENT | combining.COUNTED, 7 + (wrong == "different")
    table, replica = table_of([3.0], [], p=p), table_of([3.0], [4.0], p=p)
    got = gathered(
        pack(table, [both, both], 7),
        pack(replica, [both, 0], checksum, failed=0 if wrong == "failed" else None),
    )
    late = Mock()
    monkeypatch.setattr(combining._Overdue, "of", late)
    monkeypatch.setattr(combining, "_overdue", [])
    got._replace(header=got.header.as_subclass(Elsewhere)).settle("unused")
    assert combining._overdue == [late.return_value]
    whole = combine(got.tables, got.counted, p)
    assert tables.total_norm(whole, p).isnan() == (wrong is not None)
    assert bool(tables.found_nonfinite(whole)) == (wrong is not None)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([2], "rank 2"),
        ([1, 0], "ranks 0, 1"),
        ([3, 1, 2, 0], "ranks 0-3"),
        ([0, 2, 3], "ranks 0, 2, 3"),
    ],
    ids=str,
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert said(ranks) == words


def test_what_each_rank_held() -> None:
    held = [table_of([3.0], [4.0, NAN], p=2.0), table_of([-INF, 1.0], [INF, NAN], p=2.0)]
    contributions = Contributions((5, 6), torch.stack(held), torch.tensor([True, True]))
    assert contributions.offenders() == [[6], [5, 6]]
    first, second = (
        rank_stats(rank, table, ["a", "b"], 2.0, torch.float32)
        for rank, table in zip(contributions.ranks, contributions.tables, strict=True)
    )
    assert math.isnan(first.norm)
    assert first[2:] == (4.0, 1, 0, ["b"])
    assert second[2:] == (1.0, 1, 2, ["a", "b"])
    clean = rank_stats(5, table_of([3.0], [4.0, 0.0], p=2.0), ["a", "b"], 2.0, torch.float32)
    assert clean == (5, 5.0, 4.0, 0, 0, [])


def test_a_rank_prints_few_names() -> None:
    few = RankStats(2, math.nan, 1.5, 3, 0, ["a", "b"])
    assert repr(few) == (
        "RankStats(rank=2, norm=nan, max_abs=1.5, nan=3, inf=0, nonfinite=['a', 'b'])"
    )
    many = few._replace(nonfinite=[str(number) for number in range(12)])
    assert repr(many).endswith("nonfinite=['0', '1', '2', '3', '4', and 7 more])")
    assert len(many.nonfinite) == 12


@pytest.mark.parametrize(
    ("bad", "shares", "torn"),
    [
        ([1, 0, 0], [1, -1, -1], True),
        ([0, 1, 1], [1, -1, -1], True),
        ([1, 1, 1], [1, -1, -1], False),
        ([1, 0, 1], [1, 1, 1], False),
        ([1, 0, 0], [1, 1, 0], False),
        ([1, 0, 1, 0], [1, 1, -1, -1], False),
        ([1, 0, 0, 0], [1, 1, -1, -1], True),
    ],
    ids=str,
)
def test_copies_that_are_bad_here_and_good_there(
    bad: list[int], shares: list[int], torn: bool
) -> None:
    held = torch.stack([table_of([NAN if each else 1.0], p=2.0) for each in bad])
    of_one = torch.tensor(shares)[:, None]
    assert bool(Contributions((0, 1, 2, 3), held, torch.tensor([True]), of_one).torn()) is torn
    assert not Contributions((0, 1, 2, 3), held, torch.tensor([True])).torn()
