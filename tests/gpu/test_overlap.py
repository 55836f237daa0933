"""Overlap with backward on a GPU: streams, no wait for the device, CUDA graphs, late answers."""

import pytest
import torch
from torch import nn

from fastclip import gradients, passes
from fastclip.overlap import Overlap

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch.cuda.is_available() is false: no GPU here"
)


def _model(width: int = 600) -> nn.Sequential:
    layers = (nn.Linear(width, width) for _ in range(4))
    return nn.Sequential(*layers).to("cuda")  # 1.4 MB a weight: worth a hook


def _backward(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(8, 600, device="cuda", generator=generator)
    model(x).square().sum().backward()


def _right(overlap: Overlap, model: nn.Module, served: int) -> None:
    listed = gradients.of_parameters(model)
    table = overlap.measure(listed)[1]
    assert overlap.served == (served, 8)
    torch.testing.assert_close(table, passes.measure(listed, 2.0)[1], rtol=1e-6, atol=0)


def _watching(model: nn.Module) -> Overlap:
    overlap = Overlap(2.0)
    overlap.watch(list(model.parameters()))
    return overlap


def test_steps_after_the_first_wait_for_nothing(no_sync: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    model = _model()
    overlap = _watching(model)
    _backward(model)
    _right(overlap, model, served=4)
    torch.cuda.set_sync_debug_mode("error")
    model.zero_grad()
    _backward(model, 1)
    overlap.measure(gradients.of_parameters(model))
    torch.cuda.set_sync_debug_mode("default")
    _right(overlap, model, served=4)


def test_a_backward_on_another_stream() -> None:
    model = _model()
    overlap = _watching(model)
    side = torch.cuda.Stream()
    for seed in range(20):
        model.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _backward(model, seed)
        torch.cuda.current_stream().wait_stream(side)
        _right(overlap, model, served=4)


def test_a_change_without_a_mark_is_an_error_when_it_is_known() -> None:
    model = _model()
    overlap = _watching(model)
    _backward(model)
    _right(overlap, model, served=4)
    model.zero_grad()
    _backward(model, 1)
    model.get_parameter("0.weight").grad.data.mul_(2)  # type: ignore[union-attr]
    overlap.measure(gradients.of_parameters(model))
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="an earlier step was clipped by their old norms"):
        overlap.measure(gradients.of_parameters(model))


@pytest.mark.filterwarnings("ignore:overlap=True had no effect:UserWarning")
def test_a_backward_in_a_graph_leaves_no_rows() -> None:
    model = _model()
    overlap = _watching(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _backward(model)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    x = torch.randn(8, 600, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().sum().backward()
    for factor in (1.0, 2.0):
        x.mul_(factor)
        graph.replay()
        _right(overlap, model, served=0)
