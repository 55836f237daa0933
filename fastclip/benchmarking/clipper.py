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
from fastclip.benchmarking.checks import Moves, require_right
from fastclip.benchmarking.contest import OURS, Contest, Row, Size
from fastclip.benchmarking.measure import Side
from fastclip.benchmarking.workloads import DTYPES, clip, dtypes, gradients

LOSS_SCALE = 1024.0

Call = Callable[[], Tensor]


class _Step:
    """One optimizer on one set of gradients, for all sides."""

    def __init__(self, size: Size, clips: bool) -> None:
        self.problem = clip(size.shapes("gpt2-small"), clips=clips)
        for parameter in self.problem.parameters:
            parameter.data.fill_(1.0)
        self.optimizer = AdamW(self.problem.parameters, lr=1e-6, fused=True)
        self.clipper = fastclip.GradClipper(self.problem.parameters, self.problem.max_norm)
        self._moves = Moves(self.optimizer)

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

    def side(self, name: str, call: Callable[[], Tensor | None]) -> Side:
        return Side(name, call, self._before, partial(self._require, name))

    def _before(self) -> None:
        self.problem.restore()
        self._moves.mark()

    def _require(self, name: str, norm: Tensor | None) -> None:
        self._moves.require(name)
        if name not in READS:
            require_right(name, self.problem, norm)


def _against_torch(size: Size, clips: bool) -> Contest:
    step = _Step(size, clips)
    sides = [step.side("torch", step.clipped_by_torch), step.side(OURS, step.clipped)]
    return Contest(sides, step.problem.n_bytes, step.problem.n_tensors)


def _against_a_read(size: Size, clips: bool) -> Contest:
    """The rivals do not clip: they read as many bytes, by the faster of torch's reads, and step."""
    step = _Step(size, clips)
    (big,) = gradients([(sum(grad.numel() for grad in step.problem.gradients),)])
    sides = [
        step.side(READS[0], partial(step.with_a_read, big.sum)),
        step.side(READS[1], partial(step.with_a_read, big.aminmax)),
        step.side(OURS, step.clipped),
    ]
    return Contest(sides, step.problem.n_bytes, step.problem.n_tensors)


class _LossScale:
    """Gradients that a scaler has scaled, clipped after their scale has been taken out.

    ``scaler.unscale_`` refuses float16 gradients; here torch is asked for what it would do.
    """

    def __init__(self, size: Size, dtype: str, *, clips: bool = True, steps: bool = False) -> None:
        shapes = size.shapes("gpt2-small")
        # To take the scale out changes gradients that are not clipped too: restore them always.
        self.problem = clip(shapes, dtypes(shapes, dtype), clips=True)
        parameters = self.problem.parameters
        if steps:
            for parameter in parameters:
                parameter.data.fill_(1.0)
        self.optimizer = (
            AdamW(parameters, lr=1e-6, fused=True) if steps else SGD(parameters, lr=0.0)
        )
        self._moves = Moves(self.optimizer) if steps else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE, growth_interval=1 << 30)
        self.scaler.scale(torch.ones(()))
        self.max_norm = self.problem.norm * (0.5 if clips else 2.0) / LOSS_SCALE
        self.clipper = fastclip.GradClipper(parameters, self.max_norm)

    def clipped(self) -> Tensor:
        return self.clipper.clip_(self.optimizer, scaler=self.scaler).total_norm

    def clipped_by_torch(self) -> Tensor:
        if torch.float16 in {grad.dtype for grad in self.problem.gradients}:
            found, inverse = torch.zeros(()), torch.tensor(1 / LOSS_SCALE)
            torch._amp_foreach_non_finite_check_and_unscale_(self.problem.gradients, found, inverse)
        else:
            self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.problem.parameters, self.max_norm)

    def stepped(self) -> Tensor:
        norm = self.clipper.step(self.optimizer, scaler=self.scaler).total_norm
        self.scaler.update()
        return norm

    def stepped_by_torch(self) -> Tensor:
        norm = self.clipped_by_torch()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def contest(self, by_torch: Call, ours: Call) -> Contest:
        sides = [self._side("torch", by_torch), self._side(OURS, ours)]
        return Contest(sides, self.problem.n_bytes, self.problem.n_tensors)

    def _side(self, name: str, call: Call) -> Side:
        return Side(name, call, self._before, partial(self._require, name))

    def _before(self) -> None:
        # As scaler.update leaves it, which refuses to be called when nothing was unscaled.
        self.scaler._per_optimizer_states.clear()
        self.problem.restore()
        if self._moves is not None:
            self._moves.mark()

    def _require(self, name: str, norm: Tensor) -> None:
        if self._moves is not None:
            self._moves.require(name)
        require_right(name, self.problem, norm, max_norm=self.max_norm, loss_scale=LOSS_SCALE)


def _mixed_precision(size: Size, dtype: str) -> Contest:
    chain = _LossScale(size, dtype)
    return chain.contest(chain.clipped_by_torch, chain.clipped)


def _mixed_precision_step(size: Size, clips: bool) -> Contest:
    chain = _LossScale(size, "float32", clips=clips, steps=True)
    return chain.contest(chain.stepped_by_torch, chain.stepped)


READS = ("sum, step", "aminmax, step")
AT_MOST = 1.05  # times a step without clipping and one read
SHARE = 0.6  # of the time of a row
AMP_TARGETS = {"float32": 1.5, "float16": 1.5}


def _step_row(name: str, title: str, build: Callable[..., Contest], clips: bool) -> Row:
    """Least traffic: gradients are read for their norm and again by AdamW, which reads and writes
    parameters and both moments; the threshold need not be written into the gradients."""
    return Row(
        f"{name}{'-clipped' if clips else ''}",
        f"{title}{', clipped' if clips else ''}",
        partial(build, clips=clips),
        reads=2,
        writes=3,
        copies=4,
        share=SHARE,
        workload="gpt2-small",
        dtype="float32",
        clips=clips,
    )


ROWS = [
    *(_step_row("step-adamw", "fused AdamW step", _against_torch, c) for c in (False, True)),
    Row(
        "step-adamw-read",
        "the same to step without clip + read",
        partial(_against_a_read, clips=False),
        at_least=1 / AT_MOST,
        limit=1.0,
        share=SHARE,
        rivals=READS,
    ),
    Row(
        "step-adamw-read-clipped",
        "the same, clipped",
        partial(_against_a_read, clips=True),
        # The optimizer's kernel writes the gradients too: 8 reads or writes of their size become 9.
        at_least=1 / AT_MOST * 8 / 9,
        limit=1.0,
        share=SHARE,
        rivals=READS,
    ),
    *(
        _step_row("step-amp", "AMP, fused AdamW step", _mixed_precision_step, clips)
        for clips in (False, True)
    ),
    *(
        Row(
            f"amp-{dtype}-clipped",
            f"unscale and clip, {dtype}",
            partial(_mixed_precision, dtype=dtype),
            at_least=AMP_TARGETS.get(dtype),
            reads=1,
            writes=1,
            share=SHARE,
            workload="gpt2-small",
            dtype=dtype,
            clips=True,
        )
        for dtype in DTYPES
    ),
]
