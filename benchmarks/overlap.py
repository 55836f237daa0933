"""overlap=True: backward and clip, with hooks and without, end to end."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastclip
from benchmarks.gpt import GPT
from fastclip.benchmarking.contest import OURS, Contest, Row, Size
from fastclip.benchmarking.measure import Side

VOCABULARY = 8192
MAX_NORM = 1e9  # nothing is clipped: to measure is all that hooks can save


class _Training:
    """One model for both sides, which so meet the same state of the allocator: whether freed
    gradients went back to the system changes a backward by more than hooks could save."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        self.model, self._loss = model, loss
        self._last = torch.zeros(())
        self.plain = fastclip.GradClipper(model, MAX_NORM)
        self.hooked = fastclip.GradClipper(model, MAX_NORM, overlap=True)

    def forward(self, hooks: bool) -> None:
        assert self.hooked.overlap is not None
        if hooks:
            self.hooked.overlap.watch(list(self.model.parameters()))
        else:
            self.hooked.overlap.close()
        self.model.zero_grad()
        self._last = self._loss(self.model)

    def backward(self, clipper: fastclip.GradClipper) -> fastclip.GradStats:
        self._last.backward()
        return clipper.clip_()

    def check(self, stats: fastclip.GradStats) -> None:
        hooks = self.hooked.overlap
        if not float(stats.total_norm) > 0 or (hooks is not None and hooks.served[0] == 0):
            raise RuntimeError(f"hooks served {hooks and hooks.served}, norm {stats.total_norm}")

    def contest(self) -> Contest:
        sides = [
            Side("after", partial(self.backward, self.plain), partial(self.forward, False)),
            Side(
                OURS, partial(self.backward, self.hooked), partial(self.forward, True), self.check
            ),
        ]
        parameters = list(self.model.parameters())
        return Contest(sides, sum(p.nbytes for p in parameters), len(parameters))


def _transformer(size: Size) -> Contest:
    tokens = torch.randint(0, VOCABULARY, (4, 129), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    return _Training(GPT(*size.gpt, VOCABULARY, context=128), loss).contest()


def _mlp(size: Size) -> Contest:
    width, depth = size.mlp
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(0))

    torch.manual_seed(0)
    layers = [(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    model = nn.Sequential(*(part for layer in layers for part in layer))
    return _Training(model, lambda model: model(x).square().mean()).contest()


ROWS = [
    Row("overlap-gpt", "backward, clip: hooks, GPT 6 x 384", _transformer, rivals=("after",)),
    Row("overlap-mlp", "backward, clip: hooks, MLP 24 x 1024", _mlp, rivals=("after",)),
]
