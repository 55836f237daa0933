"""Rows of several ranks brought together, in one process."""

import itertools

import pytest

from fastclip.distributed.roster import Roster, Share, sources, unite


def roster(rank: int, **numel: int) -> Roster:
    """What one rank holds; a negative number of elements is a copy that does not count."""
    shares = {(rank, name): Share(abs(n), n >= 0) for name, n in numel.items()}
    return Roster((rank,), tuple(numel), shares)


def numbers(members: list[Roster], united: Roster) -> list[object]:
    """What `sources` leads to, where each share's number is its rank and name."""
    largest = max(member.size for member in members)
    flat: list[object] = []
    for member in members:
        own: list[object] = list(itertools.product(member.ranks, member.names))
        flat += own + ["padding"] * (largest - len(own))
    flat.append(None)
    return [flat[place] for place in sources(members, united)]


def meeting(rosters: dict[int, Roster], *groupings: list[list[int]]) -> dict[int, Roster]:
    """The rosters after each rank's groups, one grouping after the other."""
    for grouping in groupings:
        united: dict[int, Roster] = {}
        for group in grouping:
            members = [rosters[rank] for rank in group]
            result = unite(members)
            expected = [
                (rank, name) if (rank, name) in result.shares else None
                for rank, name in itertools.product(result.ranks, result.names)
            ]
            assert numbers(members, result) == expected
            united |= dict.fromkeys(group, result)
        rosters = united
    return rosters


def test_rows_in_order_of_first_appearance() -> None:
    members = [roster(4, b=2, a=3), roster(1, c=5, a=7)]
    united = unite(members)
    assert (united.ranks, united.names) == ((4, 1), ("b", "a", "c"))
    assert united.numel() == (2, 10, 5)
    assert united.weights() == [[True, True, False], [False, True, True]]
    assert sources(members, united) == [0, 1, 4, 4, 3, 2]
    assert (united.holders("a"), united.holders("c")) == ([4, 1], [1])


def test_copies_have_no_elements_of_their_own() -> None:
    united = unite([roster(0, tied=6, first=2), roster(1, last=3, tied=-6)])
    assert united.numel() == (6, 2, 3)
    assert united.weights() == [[True, True, False], [False, False, True]]
    assert united.uncounted() == []
    assert unite([roster(0, x=-1, y=1), roster(1, x=-1)]).uncounted() == ["x"]


def test_a_rank_without_rows_takes_part() -> None:
    members = [roster(0), roster(1, a=3), roster(2)]
    united = unite(members)
    assert (united.ranks, united.names, united.numel()) == ((0, 1, 2), ("a",), (3,))
    assert sources(members, united) == [3, 1, 3]
    nobody = unite([roster(0), roster(1)])
    assert (nobody.size, nobody.numel(), sources([roster(0), roster(1)], nobody)) == (0, (), [])


@pytest.mark.parametrize(
    "groupings",
    [
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ([[0, 1], [2, 3]], [[0, 1, 2, 3]]),  # which has met in part already
        ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]),
    ],
    ids=["rows-columns", "rows-all", "all-again"],
)
def test_a_share_counts_once_whichever_way_it_comes(groupings: list[list[list[int]]]) -> None:
    """Tensor parallel (0 and 1, 2 and 3) within a pipeline of two stages that tie `embed`."""
    start = {
        0: roster(0, embed=8, w0=4, norm0=2),
        1: roster(1, embed=8, w0=4, norm0=-2),
        2: roster(2, w1=5, norm1=3, embed=-8),
        3: roster(3, w1=6, norm1=-3, embed=-8),
    }
    met = meeting(start, *groupings)
    for united in met.values():
        assert united == met[0]
        assert united.names == ("embed", "w0", "norm0", "w1", "norm1")
        assert united.numel() == (16, 8, 2, 11, 3)
        assert sum(map(sum, united.weights())) == 8


def test_a_copy_counts_if_one_of_those_who_pass_it_on_says_so() -> None:
    first, second = roster(0, a=-4), roster(0, a=4)
    assert unite([first, second]).numel() == (4,)
    assert unite([second, first]).numel() == (4,)
