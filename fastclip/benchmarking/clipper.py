"""GradClipper: a step with fused AdamW, and the chain of mixed precision.

Fused AdamW reads gradients, and reads and writes parameters and both moments; if it is to divide
the gradients it writes these as well. To clip, they have to be read before. torch's chain of mixed
precision unscales in place, reads, and clips in place (5 times the bytes of the gradients), where
a read and a clip in place would do (3 times).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

import fastclip
from fastclip.benchmarking.contest import OURS, Contest, Row, Size
from fastclip.benchmarking.measure import Side
from fastclip.benchmarking.workloads import Clip, clip, gradients, require_right

LOSS_SCALE = 1024.0

Call = Callable[[], Tensor]


class _Step:
    """One optimizer on one set of gradients, for all sides."""

    def __init__(self, size: Size, clips: bool) -> None:
        self.problem = clip(size.gpt2, clips=clips)
        for parameter in self.problem.parameters:
            parameter.data.fill_(1.0)
        self.optimizer = AdamW(self.problem.parameters, lr=1e-6, fused=True)
        self.clipper = fastclip.GradClipper(self.problem.parameters, self.problem.max_norm)

    def clipped(self) -> Tensor:
        return self.clipper.step(self.optimizer).total_norm

    def clipped_by_torch(self) -> Tensor:
        problem = self.problem
        norm = torch.nn.utils.clip_grad_norm_(problem.parameters, problem.max_norm)
        self.optimizer.step()
        return norm

    def with_a_read(self, read: Callable[[], object]) -> None:
        read()
        self.optimizer.step()

    def side(self, name: str, call: Call) -> Side:
        return Side(name, call, self.problem.restore, partial(require_right, name, self.problem))


def _against_torch(size: Size, clips: bool) -> Contest:
    step = _Step(size, clips)
    sides = [step.side("torch", step.clipped_by_torch), step.side(OURS, step.clipped)]
    return Contest(sides, step.problem.n_bytes)


def _against_a_read(size: Size, clips: bool) -> Contest:
    """The rivals do not clip: they read as many bytes, by the faster of torch's reads, and step."""
    step = _Step(size, clips)
    (big,) = gradients([(sum(grad.numel() for grad in step.problem.gradients),)])
    sides = [
        Side("sum, step", partial(step.with_a_read, big.sum), step.problem.restore),
        Side("aminmax, step", partial(step.with_a_read, big.aminmax), step.problem.restore),
        step.side(OURS, step.clipped),
    ]
    return Contest(sides, step.problem.n_bytes)


class _LossScale:
    """Gradients that a scaler has scaled, clipped after their scale has been taken out.

    ``scaler.unscale_`` refuses float16 gradients; here torch is asked for what it would do.
    """

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        self.problem = clip(size.gpt2, dtype, clips=True)
        self.optimizer = SGD(self.problem.parameters, lr=0.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE, growth_interval=1 << 30)
        self.scaler.scale(torch.ones(()))
        self.max_norm = self.problem.max_norm / LOSS_SCALE
        self.clipper = fastclip.GradClipper(self.problem.parameters, self.max_norm)

    def clipped(self) -> Tensor:
        return self.clipper.clip_(self.optimizer, scaler=self.scaler).total_norm

    def clipped_by_torch(self) -> Tensor:
        if self.problem.gradients[0].dtype == torch.float16:
            found, inverse = torch.zeros(()), torch.tensor(1 / LOSS_SCALE)
            torch._amp_foreach_non_finite_check_and_unscale_(self.problem.gradients, found, inverse)
        else:
            self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.problem.parameters, self.max_norm)

    def side(self, name: str, call: Call) -> Side:
        check = partial(require_unscaled, name, self.problem)
        return Side(name, call, self._before, check)

    def _before(self) -> None:
        # As scaler.update leaves it, which refuses to be called when nothing was unscaled.
        self.scaler._per_optimizer_states.clear()
        if self.problem.restore is not None:
            self.problem.restore()


def require_unscaled(name: str, problem: Clip, norm: Tensor) -> None:
    """Clipped to half of the norm, and without the loss scale."""
    left = abs(problem.gradients[-1].view(-1)[0].item()) * LOSS_SCALE * 2 / problem.first
    share = float(norm) * LOSS_SCALE / problem.max_norm
    if not (0.9 < left < 1.1 and 1.8 < share < 2.2):
        raise RuntimeError(
            f"{name} returned {share:g} times the threshold, where 2 would be right, and left "
            f"{left:g} of each gradient, where 1 would be"
        )


def _mixed_precision(size: Size, dtype: torch.dtype) -> Contest:
    chain = _LossScale(size, dtype)
    sides = [chain.side("torch", chain.clipped_by_torch), chain.side(OURS, chain.clipped)]
    return Contest(sides, chain.problem.n_bytes)


AT_MOST = 1.05  # times a step without clipping and one read
SHARE = 0.6  # of the time of a row

ROWS = [
    Row("step-adamw", "fused AdamW step", partial(_against_torch, clips=False), share=SHARE),
    Row(
        "step-adamw-clipped",
        "fused AdamW step, clipped",
        partial(_against_torch, clips=True),
        share=SHARE,
    ),
    Row(
        "step-adamw-read",
        "the same to step without clip + read",
        partial(_against_a_read, clips=False),
        at_least=1 / AT_MOST,
        limit=1.0,
        share=SHARE,
    ),
    Row(
        "step-adamw-read-clipped",
        "the same, clipped",
        partial(_against_a_read, clips=True),
        # The optimizer's kernel writes the gradients too: 8 reads or writes of their size become 9.
        at_least=1 / AT_MOST * 8 / 9,
        limit=1.0,
        share=SHARE,
    ),
    *(
        Row(
            f"amp-{name}-clipped",
            f"unscale and clip, {name}",
            partial(_mixed_precision, dtype=dtype),
            at_least=1.5,
            reads=1,
            writes=1,
            share=SHARE,
        )
        for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16"))
    ),
]
