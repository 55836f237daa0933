"""A DistributedDataParallel given as the parameters: names are those of the model it wraps."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastclip
from fastclip import GradClipper
from fastclip.distributed import Attribution, attribution_hook
from fastclip.rules import AdaGC
from tests.distributed.ddp import Layers, backward, batch, layers
from tests.distributed.ranks import Pool

NAMES = ["first.weight", "first.bias", "rare.weight", "rare.bias", "last.weight", "last.bias"]


def names() -> tuple[list[tuple[str, ...]], list[str], Any]:
    """Those of the functions and of the clipper, of an error, and the state of a rule by name."""
    model = layers({})
    backward(model, batch(0))
    clipper = GradClipper(model, rule=AdaGC())
    found = [fastclip.grad_stats(model).names, clipper.clip_().names]
    model.module.rare.bias.grad.fill_(torch.nan)
    messages = []
    for call in (
        lambda: fastclip.clip_grad_norm_(model, 1.0, error_if_nonfinite=True),
        GradClipper(model, nonfinite="error").clip_,
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        messages.append(str(error.value))
    return found, messages, clipper.state_dict()


@pytest.mark.parametrize("size", [1, 2])
def test_names_have_no_prefix_under_ddp(ranks: Pool, size: int) -> None:
    for found, messages, state in ranks.run(size, names):
        assert found == [tuple(NAMES)] * 2
        assert all("gradient 'rare.bias' (16 NaN, 0 inf)" in message for message in messages)
        assert list(state["state"]) == NAMES
        plain = GradClipper(Layers(True, torch.float32), rule=AdaGC())
        plain.load_state_dict(state)  # where it would warn of names that are not known
        assert plain.state_dict()["counters"]["steps"] == 1


def compiled() -> tuple[tuple[str, ...], tuple[str, ...]]:
    model = DistributedDataParallel(
        cast(nn.Module, torch.compile(Layers(True, torch.float32), backend="eager"))
    )
    attribution = Attribution(model)
    model.register_comm_hook(attribution, attribution_hook)
    backward(model, batch(0))
    return attribution.local().names, GradClipper(model).clip_().names


def test_names_have_no_prefix_of_a_compiled_model_under_ddp(ranks: Pool) -> None:
    ((attributed, clipped),) = ranks.run(1, compiled)
    assert list(clipped) == NAMES
    assert sorted(attributed) == sorted(NAMES)
