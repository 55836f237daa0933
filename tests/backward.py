"""Small models with hooks, and what `Overlap` must give for them."""

import torch
from torch import Tensor, nn

from fastclip import gradients, passes
from fastclip.gradients import Gradients
from fastclip.overlap import Overlap
from fastclip.testing.compare import bitwise_equal


def mlp(width: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(x).square().sum()
    return loss


def watching(model: nn.Module, p: float = 2.0) -> Overlap:
    """Hooks on parameters of any size."""
    overlap = Overlap(p, least=0)
    overlap.watch(list(model.parameters()))
    return overlap


def same(a: tuple[Gradients, Tensor], b: tuple[Gradients, Tensor]) -> bool:
    """Bit by bit, for the very same tensors."""
    rows = zip(a[0].rows(), b[0].rows(), strict=True)
    return bitwise_equal(a[1], b[1]) and all(
        x.tensor is y.tensor and x._replace(tensor=y.tensor) == y for x, y in rows
    )


def right(overlap: Overlap, model: nn.Module, served: tuple[int, int]) -> None:
    """The result is that of the plain pass, and so many of its rows came from hooks."""
    listed = gradients.of_parameters(model)
    assert same(overlap.measure(listed), passes.measure(listed, overlap.p))
    assert overlap.served == served


def n_hooks(model: nn.Module) -> list[int]:
    return [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
