"""A small model, its data, and its gradients in one process."""

import torch
from torch import Tensor, nn

TOKENS = 7  # rows of the embedding: 4 and 3, or 2, 2, 2 and 1
LENGTH = 8
BATCH = 8
CLASSES = 3  # fewer rows than four ranks


class Net(nn.Module):
    """Shapes that shard unevenly over 2 and over 4 ranks, and evenly where tensor parallelism
    has to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 6)
        self.norm = nn.LayerNorm(6)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(self.norm(self.embed(tokens))).relu()
        return self.second(hidden) * self.scale


def net(dtype: torch.dtype = torch.float32) -> Net:
    """The same parameters in every process."""
    generator = torch.Generator().manual_seed(5)
    made = Net()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made.to(dtype)


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens ``[BATCH, LENGTH]`` and classes of the same shape. The last token never comes: a row
    of zeros."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(TOKENS - 1, (BATCH, LENGTH), generator=generator)
    return tokens, torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)


def part(step: int, index: int, count: int) -> tuple[Tensor, Tensor]:
    """The share of a batch that one of `count` data-parallel ranks gets."""
    tokens, classes = batch(step)
    rows = slice(index * BATCH // count, (index + 1) * BATCH // count)
    return tokens[rows], classes[rows]


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over all tokens."""
    tokens, classes = data
    scores = model(tokens).flatten(0, 1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return nn.functional.cross_entropy(scores.to(wide), classes.flatten())


def gradients(step: int = 0) -> dict[str, Tensor]:
    """Those of one process with the whole batch."""
    model = net()
    loss(model, batch(step)).backward()
    return {name: grad_of(parameter) for name, parameter in model.named_parameters()}


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
