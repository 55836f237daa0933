"""Lists of gradients that ranks do not have in common are an error on all of them."""

import pytest

from tests.distributed import lists
from tests.distributed.ranks import Pool

KINDS = ["more", "frozen", "none", "plain", "shape", "placements"]


@pytest.mark.parametrize("kind", KINDS)
def test_another_list_on_one_rank(ranks: Pool, kind: str) -> None:
    answers = ranks.run(2, lists.different, kind)
    for text, norm in answers:
        assert text == (
            "all processes of a mesh need the same parameters in the same order, but rank 1 has "
            "others than rank 0. No gradient has been changed"
        )
        assert norm == answers[0][1] > 0


@pytest.mark.parametrize(
    ("meshes", "says"),
    [
        ([[0, 1], [2, 3]], {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}),
        ([[0, 1], [0, 2]], {1: (0, 2), 2: (0, 1)}),
        ([[0, 1], [2, 3], [1, 2]], {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}),
    ],
    ids=["disjoint", "overlapping", "a chain"],
)
def test_meshes_that_do_not_go_together(
    ranks: Pool, meshes: list[list[int]], says: dict[int, tuple[int, int]]
) -> None:
    answers = ranks.run(4, lists.on_meshes, meshes)
    for rank, text in enumerate(answers):
        if rank in says:
            first, second = says[rank]
            assert text.startswith(
                f"gradient 'on [{first}, {second}]' is a DTensor on a mesh of ranks {first}, "
                f"{second}, which rank {rank} is not one of"
            ), (rank, text)
            assert "process_group" in text
        elif any(rank in mesh for mesh in meshes):
            assert "rank 1 has another list of gradients" in text, (rank, text)
        else:
            assert text == ""


def test_groups_that_are_gone_or_none(ranks: Pool) -> None:
    for destroyed, mesh in ranks.run(2, lists.gone):
        assert destroyed.startswith("a group of process_group has been destroyed: build a new")
        assert mesh.endswith("got DeviceMesh: take mesh.get_group()")
