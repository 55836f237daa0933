"""Small modules with a known fault, or with a feature that makes watching them difficult."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Apply(nn.Module):
    """One function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Siblings(nn.Module):
    """Three modules read one tensor; only `k` has an infinite derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.q, self.v = nn.Linear(4, 4), nn.Linear(4, 4)
        self.k = Apply(lambda x: (x * 0).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.q(x) + self.k(x) + self.v(x)


class Between(nn.Module):
    """The fault in the code of the module itself, between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) * 0).sqrt())


class Checkpointed(nn.Module):
    """The part is run again in the backward pass."""

    def __init__(self, part: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=self.reentrant)

    def _run(self, x: Tensor) -> Tensor:
        return self.part(x).tanh()


class CheckpointedCode(Checkpointed):
    """The fault is in code of its own that is run again."""

    def _run(self, x: Tensor) -> Tensor:
        return self.part((x * 0).sqrt())


class Catching(nn.Module):
    """Goes on with its own code, which is at fault, when a part of it raises."""

    def __init__(self, in_hook: bool) -> None:
        super().__init__()
        self.raises, self.after = Apply(self._refuse), nn.Linear(4, 4)
        if in_hook:
            self.raises.register_forward_pre_hook(self._refuse)

    def _refuse(self, *_: Any) -> None:
        raise ZeroDivisionError

    def forward(self, x: Tensor) -> Tensor:
        with suppress(ZeroDivisionError):
            self.raises(x)
        return self.after((x * 0).sqrt())


class Tied(nn.Module):
    """One weight in two modules, and one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.twice = nn.Linear(4, 4)
        self.log = Apply(torch.log)

    def forward(self, tokens: Tensor, shift: float) -> Tensor:
        x = self.twice(self.twice(self.embed(tokens)))
        self.log(torch.full_like(x, 2.0))
        return self.head(self.log(x.square() + shift))


@dataclass
class Answer:
    logits: Tensor
    states: tuple[Tensor, ...]
    best: Tensor  # of integers


class Structured(nn.Module):
    """Several inputs and outputs, nested and of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Apply(self._answer)
        self.spectrum = Apply(
            lambda x: {"spectrum": torch.fft.fft(x), "empty": x[:0], "none": None}
        )

    def _answer(self, x: Tensor, *, mask: Tensor, more: list[Tensor]) -> Answer:
        logits = torch.where(mask, x, more[0])
        return Answer(logits, (x, more[0]), logits.argmax())

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        answer = self.inner(x, mask=x > 0, more=[more])
        return self.spectrum(answer.logits)["spectrum"].abs()


class Doubled(torch.autograd.Function):
    """Its derivative is NaN; not everything it takes is a tensor, or wants a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, shift: Tensor) -> tuple[Tensor, Tensor]:
        return x * factor + shift, x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * math.nan, None, None


class Rewriting(nn.Module):
    """Changes in its forward pass what a module should not: parameters, buffers, tables, modes."""

    shadow: Tensor
    signed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.5)  # renormalised in place
        self.norm = nn.BatchNorm1d(4)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.binary = nn.Linear(4, 4)
        self.register_buffer("shadow", torch.zeros(4))
        self.register_buffer("signed", torch.zeros(1))
        self.register_buffer("expanded", torch.ones(1).expand(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.spectral(self.norm(self.table(tokens)))
        self.shadow = x.detach().mean(0)  # another tensor
        self.signed.neg_()  # -0.0: equal to what it was, but not the same
        self.register_buffer("late", torch.ones(2))
        self.binary.weight.data = self.binary.weight.data.sign()
        self.binary.train(not self.binary.training)
        return self.binary(x) * torch.rand(())
