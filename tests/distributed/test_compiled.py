"""DTensors inside torch.compile: an error that says what to do."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import fastclip
from tests.distributed.layouts import mesh, placed
from tests.distributed.ranks import Pool


def compiled(fullgraph: bool) -> str:
    parameter = placed(0, mesh(2), [Shard(0)], 4, 3)
    assert isinstance(parameter, nn.Parameter)
    torch._dynamo.reset()
    call = torch.compile(
        lambda: fastclip.clip_grad_norm_([parameter], 1.0), fullgraph=fullgraph, backend="eager"
    )
    with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported)) as error:
        call()
    return f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize(
    ("fullgraph", "kind"), [(False, "NotImplementedError"), (True, "Unsupported")]
)
def test_dtensors_are_refused_inside_torch_compile(ranks: Pool, fullgraph: bool, kind: str) -> None:
    for message in ranks.run(2, compiled, fullgraph):
        assert message.startswith(f"{kind}: ")
        assert "DTensors cannot be clipped or measured inside torch.compile" in message
