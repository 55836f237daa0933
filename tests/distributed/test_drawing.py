"""Random lists of gradients, placed at random on random meshes."""

import pytest

from tests.distributed import drawing
from tests.distributed.ranks import Pool


@pytest.mark.parametrize("size", [2, 4])
def test_any_list_is_measured_and_clipped_as_the_whole_tensors(ranks: Pool, size: int) -> None:
    answers = ranks.run(size, drawing.examples, size, 60, seed=7)
    for failed, norms in answers:
        assert failed == []
        assert norms == answers[0][1]  # every bit
        assert len(set(norms)) > 40
