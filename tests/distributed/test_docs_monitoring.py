"""The block of docs/monitoring.md for several ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fastclip.monitor import JSONL
from tests.distributed.ranks import Pool
from tests.docs.pages import blocks

FIRST, *REST = (block for block in blocks("monitoring.md") if block.language == "python")
(BLOCK,) = (block for block in REST if block.for_several)


def watched(folder: str) -> tuple[dict[str, Any], list[float], list[str]]:
    """The Monitor's state, the last record's numbers, and the files that are there in the end."""
    names: dict[str, Any] = {}
    before = Path.cwd()
    os.chdir(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", lambda backend: None)
            exec(FIRST.code, names)
            exec(BLOCK.code, names)
        dist.barrier()
        files = sorted(path.name for path in Path().iterdir())
    finally:
        os.chdir(before)
    numbers = [names[name].item() for name in ("mean", "largest")]
    return names["monitor"].state_dict(), numbers, files


def test_ranks_see_the_same_and_one_writes(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, watched, str(tmp_path))
    assert first == second
    assert first[2] == ["ranks.jsonl"]
    records = list(JSONL(tmp_path / "ranks.jsonl"))
    assert [record.step for record in records] == [0, 1, 2]
    assert [records[-1].loss, records[-1].activation_max] == first[1]
    assert None not in [record.grad_norm for record in records]
